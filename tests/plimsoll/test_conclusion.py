"""What a run amounts to: the verdict follows from the evidence, and what voids a run comes before what fails it."""

import dataclasses
import json

import pytest

from alerts.verdict import Ruling
from loadgen.driver_link import ClientHealth
from loadgen.load_line import BoundBy, LoadLineSearch, StageSpec
from loadgen.observation import WindowLedger
from loadgen.prompts import Calibration
from loadgen.tally import StageTally
from loadgen.workloads import find_workload
from monitor.http import parse_url
from monitor.sampler import Tick
from plimsoll.conclusion import check, document, find, interrupted_document, rule
from plimsoll.evidence import Drain, Evidence, Prepared, StageRun
from serving.clock import NS
from serving.engines import ENGINES, TargetFacts
from serving.records import Outcome, RequestRecord

MS = 1_000_000
T0 = 1_700_000_000 * NS


def prepared(**changes):
    facts = TargetFacts("vllm", "0.32.0", "hy3", context_tokens=8192, max_running_requests=None)
    base = Prepared(
        parse_url("http://127.0.0.1:8000"),
        facts,
        "chat",
        Calibration(8.0, 1.3),
        find_workload("interactive"),
        8,
        "--max-batch",
    )
    return dataclasses.replace(base, **changes)


def tick(second, *, running=0.0, waiting=0.0, kv=0.0, tokens=0.0, swap=0.0, failure=None, preemptions=0.0):
    values = {"up": 1.0, "scrape_duration_seconds": 0.01}
    if failure is None:
        values |= {
            "requests_running": running,
            "requests_waiting": waiting,
            "kv_cache_usage_ratio": kv,
            "generation_tokens_total": tokens,
            "request_preemptions_total": preemptions,
        }
    else:
        values["up"] = 0.0
    processes = {"engine": {"process_swap_bytes": swap}}
    return Tick(T0 + second * NS, failure is None, values, processes=processes, failure=failure)


def record(index, stage, t_ns, *, outcome=Outcome.OK, error=None, tokens=10):
    good = outcome in (Outcome.OK, Outcome.SHORT)
    return RequestRecord(
        request_id=index,
        stage=stage,
        user=0,
        outcome=outcome,
        t_plan_ns=t_ns,
        t_send_ns=t_ns,
        t_headers_ns=t_ns + MS,
        t_first_ns=t_ns + 100 * MS if good else None,
        t_first_content_ns=t_ns + 100 * MS if good else None,
        t_last_ns=t_ns + 1000 * MS if good else None,
        t_end_ns=t_ns + 1000 * MS,
        frames=tokens if good else 0,
        frame_gaps_us=(100_000,) * (tokens - 1) if good else (),
        planned_prompt_tokens=100,
        planned_output_tokens=tokens,
        prompt_tokens=100 if good else None,
        cached_tokens=0 if good else None,
        completion_tokens=tokens if good else None,
        finish_reason="length" if good else None,
        http_status=200,
        error=error,
        arrival_source="kernel",
        arrival_lag_us=80,
    )


def modelled_run(
    *, runs=8, limit=8, kv_each=0.05, failing=None, swap_per_second=0.0, changes=None, cpu=lambda _: 0.2, lag=0.001
):
    """A run against a server that runs `runs` requests at once; returns the evidence and the line."""
    evidence = Evidence(prepared(limit=limit, **(changes or {})), seed=1)
    search = LoadLineSearch(limit)
    second, tokens, index = 2, 0.0, 0
    for early in (0, 1):
        evidence.add_tick(tick(early))
    evidence.t_traffic_ns = T0 + 1 * NS + 1
    while (spec := search.next_stage()) is not None:
        stage = StageRun(
            spec,
            True,
            T0 + second * NS,
            StageTally(evidence.prepared.workload.slo),
            WindowLedger(ENGINES["vllm"].complaint),
        )
        evidence.stages.append(stage)
        stage.t_settled_ns = stage.tally.t_settled_ns = T0 + second * NS
        stage.t_end_ns = stage.tally.t_end_ns = T0 + (second + 20) * NS
        stage.settled = stage.complete = True
        for _ in range(20):
            for _ in range(min(2, spec.offered)):
                bad = failing and failing(spec.offered, index)
                one = record(
                    index,
                    spec.name,
                    T0 + second * NS,
                    outcome=Outcome.STREAM_ERROR if bad else Outcome.OK,
                    error=bad or None,
                )
                evidence.add_record(one)
                tokens += one.completion_tokens or 0
                index += 1
            running = min(spec.offered, runs)
            evidence.add_tick(
                tick(
                    second,
                    running=running,
                    waiting=spec.offered - running,
                    kv=running * kv_each,
                    tokens=tokens,
                    swap=swap_per_second * second,
                )
            )
            evidence.health.append(ClientHealth(T0 + second * NS, 1.0, cpu(spec.offered), lag, 2 * lag, 0.0, 0.0))
            second += 1
        search.record(evidence.see(stage).observation)
    evidence.add_tick(tick(second, tokens=tokens))
    evidence.drain = Drain(0.0, 0.0, 0.0, 1.0)
    return evidence, search.result()


def ruled(evidence, line):
    return rule(evidence, line, check(evidence, line))


def test_a_server_that_runs_its_limit_and_queues_above_it_passes():
    evidence, line = modelled_run()
    verdict = ruled(evidence, line)
    assert (verdict.ruling, line.measured, line.bound_by) == (Ruling.PASS, 8, BoundBy.BATCH_SLOTS)
    assert verdict.reason == "all 8 configured requests run at once; above 8, a queue forms"
    assert find(evidence, line, T0) == []


def test_a_line_below_the_limit_fails_and_says_what_binds():
    evidence, line = modelled_run(runs=5, kv_each=0.19)
    verdict = ruled(evidence, line)
    assert verdict.ruling is Ruling.FAIL
    assert verdict.reason == "the KV cache holds 5 requests of this workload at once, not the configured 8"


def test_a_limit_that_is_not_in_effect_fails():
    evidence, line = modelled_run(runs=100, kv_each=0.01)
    verdict = ruled(evidence, line)
    assert verdict.ruling is Ruling.FAIL
    assert "not in effect" in verdict.reason


def test_nothing_configured_and_a_line_found_passes():
    evidence, line = modelled_run(runs=5, limit=None)
    verdict = ruled(evidence, line)
    assert (verdict.ruling, line.measured) == (Ruling.PASS, 5)


def test_swap_that_grows_voids_even_a_failure():
    evidence, line = modelled_run(runs=5, swap_per_second=2**20)
    verdict = ruled(evidence, line)
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "swap grew by" in verdict.reason


def test_a_slow_client_voids():
    evidence, line = modelled_run(cpu=lambda offered: 0.97 if offered >= 8 else 0.2)
    verdict = ruled(evidence, line)
    assert (verdict.ruling, line.bound_by) == (Ruling.INCONCLUSIVE, BoundBy.CLIENT)
    assert "at 8 offered, the load generator used 97% of its core" in verdict.reason
    assert document(evidence, line, run="r.db", t_ns=T0, slo_exact=False)["client"]["valid"] is False


@pytest.mark.parametrize(("late", "problem"), [(3, False), (4, True)])
def test_a_few_late_requests_are_an_incident_and_more_void(late, problem):
    evidence, _ = modelled_run()
    evidence.stages[3].tally.send_lag.extend([1.0] * late)
    evidence.see(evidence.stages[3])
    assert (evidence.client_problem() is not None) is problem


def test_a_client_whose_own_loop_is_late_or_that_is_silent_voids():
    assert "own loop was 500 ms late" in ruled(*modelled_run(lag=0.5)).reason
    evidence, _ = modelled_run()
    evidence.health.clear()
    evidence.see(evidence.stages[0])
    assert "did not report" in evidence.client_problem()


def test_out_of_memory_beyond_the_limit_fails_all_the_same():
    evidence, line = modelled_run(failing=lambda offered, index: "CUDA out of memory" if offered > 8 else None)
    verdict = ruled(evidence, line)
    assert (verdict.ruling, line.measured, line.bound_by) == (Ruling.FAIL, 8, BoundBy.GPU_MEMORY)
    assert "memory_suffices" in verdict.reason


def test_errors_beyond_the_limit_pass_and_are_not_called_a_queue():
    evidence, line = modelled_run(failing=lambda offered, index: "503 queue full" if offered > 8 else None)
    verdict = ruled(evidence, line)
    assert (verdict.ruling, line.bound_by) == (Ruling.PASS, BoundBy.ERRORS)
    assert "requests are refused or fail" in verdict.reason


@pytest.mark.parametrize("limit", [8, None])
def test_a_limit_that_was_not_seen_to_bind_is_no_pass(limit):
    evidence, line = modelled_run(limit=limit)
    unseen = dataclasses.replace(line, bound_by=BoundBy.UNKNOWN)
    assert ruled(evidence, unseen).ruling is Ruling.INCONCLUSIVE


def test_a_limit_past_which_nothing_was_measured_is_no_pass():
    evidence, line = modelled_run()
    assert ruled(evidence, dataclasses.replace(line, limit_in_effect=None)).ruling is Ruling.INCONCLUSIVE


def test_a_run_of_short_answers_is_no_pass():
    evidence, line = modelled_run()
    evidence.outcomes[Outcome.SHORT] = evidence.outcomes[Outcome.OK]
    assert "shorter than asked" in ruled(evidence, line).reason


def test_nothing_that_binds_up_to_the_ceiling_is_no_pass():
    evidence, line = modelled_run(limit=None)
    open_end = dataclasses.replace(line, bound_by=BoundBy.NOT_REACHED)
    assert ruled(evidence, open_end).ruling is Ruling.INCONCLUSIVE


def test_not_even_one_request_is_a_failure():
    evidence, line = modelled_run(limit=None)
    assert ruled(evidence, dataclasses.replace(line, measured=None)).ruling is Ruling.FAIL


def test_a_request_that_breaks_under_a_later_stage_speaks_about_that_stage():
    evidence, _ = modelled_run()
    eight, ten = evidence.stages[3], evidence.stages[4]
    late = record(9000, "8", ten.t_settled_ns - 500 * MS, outcome=Outcome.STREAM_ERROR, error="CUDA out of memory")
    evidence.add_record(late)
    assert ten.ended.classes["out_of_memory"] == 1
    assert eight.ended.classes["out_of_memory"] == 0
    assert eight.tally.outcomes[Outcome.STREAM_ERROR] == 1


def test_swap_is_compared_within_one_source():
    evidence, _ = modelled_run()
    first = evidence.ticks[0]
    host = {**first.values, "host_swap_used_bytes": 2e9}
    evidence.ticks[0] = dataclasses.replace(first, values=host, processes={})
    assert evidence.swap_growth_bytes() == 0.0
    grown = [dataclasses.replace(t, processes={"engine": {"process_swap_bytes": 1e9}}) for t in evidence.ticks[50:]]
    evidence.ticks[50:] = grown
    assert evidence.swap_growth_bytes() == 1e9
    evidence.ticks = [
        dataclasses.replace(t, processes={}, values={**t.values, "host_swap_used_bytes": 5.0 + n})
        for n, t in enumerate(evidence.ticks[:10])
    ]
    assert evidence.swap_growth_bytes() == 9.0


def test_requests_of_others_before_ours_void():
    evidence, line = modelled_run()
    evidence.ticks[0], evidence.ticks[1] = tick(0, running=2), tick(1, running=3)
    assert "2 requests were running before" in ruled(evidence, line).reason
    assert ruled(evidence, line).ruling is Ruling.INCONCLUSIVE


def test_more_running_than_offered_voids():
    evidence, line = modelled_run()
    view = evidence.stages[0].view
    evidence.stages[0].view = dataclasses.replace(view, running=dataclasses.replace(view.running, p50=5.0))
    verdict = ruled(evidence, line)
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "5 requests ran while 2 were offered" in verdict.reason


def test_requests_that_we_could_not_send_void():
    evidence, line = modelled_run()
    evidence.add_record(record(10_000, "8", T0, outcome=Outcome.CLIENT_ERROR, error="no file descriptor left"))
    verdict = ruled(evidence, line)
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "no file descriptor left" in verdict.reason


def test_error_events_of_a_full_kv_cache_fail_as_kv_cache():
    message = "CUDA out of memory"
    evidence, line = modelled_run(failing=lambda offered, index: message if offered > 4 and index % 2 else None)
    assert (line.measured, line.bound_by) == (4, BoundBy.GPU_MEMORY)
    assert "GPU memory runs out above 4" in ruled(evidence, line).reason


def test_less_running_than_offered_without_a_queue_is_inconclusive():
    evidence, line = modelled_run()
    low = dataclasses.replace(line, measured=7, bound_by=BoundBy.UNKNOWN)
    assert ruled(evidence, low).ruling is Ruling.INCONCLUSIVE


@pytest.mark.parametrize(
    ("what", "ruling"),
    [("server_died", Ruling.FAIL), ("driver_died", Ruling.INCONCLUSIVE), ("interrupted", Ruling.INCONCLUSIVE)],
)
def test_how_a_run_ended_decides_first(what, ruling):
    evidence, line = modelled_run()
    setattr(evidence.ending, what, True if what == "interrupted" else "it went away")
    verdict = ruled(evidence, line)
    assert verdict.ruling is ruling


def test_an_interrupted_run_exits_with_130():
    evidence, line = modelled_run()
    evidence.ending.interrupted = True
    assert document(evidence, line, run="r.db", t_ns=T0, slo_exact=False)["exit_code"] == 130


def test_a_run_file_that_could_not_be_written_exits_with_4_and_still_has_its_figures():
    evidence, line = modelled_run()
    evidence.ending.record_error = "disk full"
    result = document(evidence, line, run="r.db", t_ns=T0, slo_exact=False)
    assert (result["exit_code"], result["verdict"]) == (4, "inconclusive")
    assert "disk full" in result["reason"]
    assert result["load_line"]["measured"] == 8


def test_requests_left_behind_and_kv_left_in_use_fail_and_are_found():
    evidence, line = modelled_run()
    evidence.drain = Drain(2.0, 1.0, 0.1, 60.0)
    assert ruled(evidence, line).ruling is Ruling.FAIL
    assert {finding.rule for finding in find(evidence, line, T0)} == {"queue_not_drained", "kv_cache_not_drained"}


def test_a_drain_that_was_not_seen_is_inconclusive_not_a_pass():
    evidence, line = modelled_run()
    evidence.drain = Drain()
    assert ruled(evidence, line).ruling is Ruling.INCONCLUSIVE


def test_the_servers_own_other_limit_is_found():
    facts = dataclasses.replace(prepared().facts, max_running_requests=6, max_running_source="/props")
    evidence, line = modelled_run(runs=6, changes={"facts": facts})
    assert "limit_differs" in {finding.rule for finding in find(evidence, line, T0)}


def test_tokens_of_client_and_server_are_compared_through_a_restart():
    evidence, line = modelled_run()
    total = evidence.client_tokens
    assert evidence.server_tokens() == total
    evidence.add_tick(tick(9000, tokens=total + 7))
    assert "tokens_differ" in {finding.rule for finding in find(evidence, line, T0)}


def test_the_document_is_json_without_nan_and_its_requests_add_up():
    evidence, line = modelled_run(failing=lambda offered, index: "boom" if offered > 4 and index % 3 == 0 else None)
    result = document(evidence, line, run="r.db", t_ns=T0, slo_exact=False)
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text)["schema"] == "plimsoll.stress/1"
    for stage in result["stages"]:
        requests = dict(stage["requests"])
        assert requests.pop("issued") == sum(requests.values())


def test_the_document_has_the_fields_that_programs_rely_on():
    evidence, line = modelled_run()
    result = document(evidence, line, run="r.db", t_ns=T0, slo_exact=False)
    assert {"schema", "run", "target", "verdict", "reason", "load_line", "slo_line", "stages", "client"} <= set(result)
    assert {"tokens", "drain", "checks", "findings"} <= set(result)
    assert set(result["load_line"]) == {"configured", "measured", "bound_by", "evidence", "next_step"}
    stage = result["stages"][0]
    names = "name offered seconds running waiting kv_cache_usage_ratio gpu_memory_used_bytes preemptions requests"
    latencies = "ttft_seconds tpot_seconds frame_gap_seconds e2e_seconds"
    rates = (
        "prefill_tokens_per_second decode_tokens_per_second output_tokens_per_second prompt_tokens_per_second "
        "requests_per_second goodput_per_second"
    )
    assert set(f"{names} {latencies} {rates}".split()) <= set(stage)
    assert set(stage["requests"]) == {"issued", *(outcome.value for outcome in Outcome)}


def test_an_interrupted_preflight_has_the_same_fields():
    evidence, line = modelled_run()
    whole = document(evidence, line, run="r.db", t_ns=T0, slo_exact=False)
    early = interrupted_document(run="r.db", url="http://x", workload=whole["workload"])
    assert set(early) == set(whole)
    assert early["exit_code"] == 130


def test_a_warm_up_is_in_no_stage():
    evidence, line = modelled_run()
    warm = StageRun(
        StageSpec("warmup", 2, "warmup"),
        False,
        T0,
        StageTally(evidence.prepared.workload.slo),
        WindowLedger(lambda _: None),
    )
    evidence.stages.insert(0, warm)
    result = document(evidence, line, run="r.db", t_ns=T0, slo_exact=False)
    assert [stage["name"] for stage in result["stages"]] == ["2", "4", "6", "8", "10", "9"]
