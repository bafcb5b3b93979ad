"""What a run amounts to: the verdict follows from the evidence, and what voids a run comes before what fails it."""

import dataclasses
import json
from array import array

import pytest

from alerts.verdict import Ruling
from loadgen.driver_link import ClientHealth
from loadgen.load_line import BoundBy, LoadLineSearch, StageSpec
from loadgen.observation import WindowLedger
from loadgen.prompts import Calibration
from loadgen.tally import SloLimits, StageTally
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


def documented(evidence, line, **changes):
    return document(evidence, line, **({"run": "r.db", "t_ns": T0, "slo_exact": False} | changes))


def found(evidence, line):
    return [finding.rule for finding in find(evidence, line, T0)]


def checked(evidence, line):
    return {one.name: one for one in check(evidence, line)}


def with_slo(**limits):
    return {"workload": dataclasses.replace(find_workload("interactive"), slo=SloLimits(**limits))}


def test_the_checks_of_a_passed_run_and_what_they_compare():
    evidence, line = modelled_run()
    assert [(one.name, one.outcome, one.value, one.op, one.limit, one.samples) for one in check(evidence, line)] == [
        ("load_line", Ruling.PASS, 8, ">=", 8, 120),
        ("limit_in_effect", Ruling.PASS, 8, "<=", 8, 120),
        ("server_survived", Ruling.PASS, 0, "==", 0, 1),
        ("memory_suffices", Ruling.PASS, 0, "==", 0, 1),
        ("requests_end", Ruling.PASS, 0, "<=", 0.01, 240),
        ("queue_drains", Ruling.PASS, 0, "==", 0, 1),
        ("kv_cache_drains", Ruling.PASS, 0, "<=", 0.01, 1),
    ]


UNDER_LOAD = ["load_line", "limit_in_effect", "server_survived", "memory_suffices"]


@pytest.mark.parametrize("what", ["interrupted", "server_died", "driver_died", "record_error"])
def test_a_run_that_ended_early_is_not_asked_how_it_drained(what):
    evidence, line = modelled_run()
    setattr(evidence.ending, what, "x")
    assert list(checked(evidence, line)) == UNDER_LOAD
    assert checked(evidence, line)["server_survived"].value == (what == "server_died")


def test_what_was_not_configured_not_tested_or_not_told_is_not_checked():
    evidence, line = modelled_run(limit=None)
    drained = ["requests_end", "queue_drains"]
    assert list(checked(evidence, line)) == ["server_survived", "memory_suffices", *drained, "kv_cache_drains"]
    evidence, line = modelled_run()
    assert "limit_in_effect" not in checked(evidence, dataclasses.replace(line, limit_in_effect=None))
    evidence.drain.kv_cache_usage_ratio = None
    assert list(checked(evidence, line)) == [*UNDER_LOAD, *drained]


def test_a_line_that_was_looked_for_and_not_found_is_none_and_one_never_looked_for_is_unknown():
    evidence, line = modelled_run()
    nothing = dataclasses.replace(line, measured=None)
    assert checked(evidence, nothing)["load_line"].value == 0
    evidence.stages.clear()
    assert checked(evidence, nothing)["load_line"].outcome is Ruling.INCONCLUSIVE


def test_memory_errors_of_every_stage_count_also_of_the_warm_up():
    evidence, line = modelled_run()
    evidence.stages[0].counted = False
    for stage in evidence.stages[:2]:
        stage.ended.classes["out_of_memory"] = 2
    assert checked(evidence, line)["memory_suffices"].value == 4


@pytest.mark.parametrize(
    ("running", "waiting", "left"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (None, 0, None), (0, None, None)]
)
def test_a_drain_counts_what_runs_and_what_waits_and_needs_both(running, waiting, left):
    evidence, line = modelled_run()
    evidence.drain = Drain(running, waiting, 0.0, 7.0)
    assert checked(evidence, line)["queue_drains"].value == left
    findings = find(evidence, line, T0)
    assert [one.rule for one in findings] == (["queue_not_drained"] if left else [])
    assert all(one.evidence == f"{left} still running or waiting 7 s after the last answer" for one in findings)


@pytest.mark.parametrize(("idle", "after", "drained"), [(0, 0.01, True), (0, 0.0101, False), (0.3, 0.3099, True)])
def test_one_percent_of_the_kv_cache_above_idle_may_stay(idle, after, drained):
    evidence, line = modelled_run()
    evidence.ticks[:2] = [tick(0, kv=idle), tick(1, kv=idle)]
    evidence.drain.kv_cache_usage_ratio = after
    assert (checked(evidence, line)["kv_cache_drains"].outcome is Ruling.PASS) is drained
    assert found(evidence, line) == ([] if drained else ["kv_cache_not_drained"])
    assert ruled(evidence, line).ruling is (Ruling.PASS if drained else Ruling.FAIL)


@pytest.mark.parametrize(
    ("swap", "ruling"), [(16 * 2**20, Ruling.PASS), (16 * 2**20 + 1, Ruling.INCONCLUSIVE), (None, Ruling.PASS)]
)
def test_swap_may_grow_by_sixteen_mebibytes(swap, ruling):
    evidence, line = modelled_run()
    if swap is None:
        evidence.ticks = [dataclasses.replace(one, processes={}) for one in evidence.ticks]
    else:
        evidence.ticks[-1] = tick(9000, swap=swap)
    assert ruled(evidence, line).ruling is ruling


@pytest.mark.parametrize(("cut", "ruling"), [(10, Ruling.PASS), (11, Ruling.FAIL)])
def test_one_request_in_a_hundred_may_have_to_be_cut(cut, ruling):
    evidence, line = modelled_run()
    evidence.outcomes.clear()
    evidence.outcomes.update({Outcome.OK: 1000 - cut, Outcome.UNFINISHED: cut})
    assert ruled(evidence, line).ruling is ruling


def test_gauges_that_stand_still_say_nothing_of_what_stayed_behind():
    evidence, line = modelled_run()
    for second in range(300, 310):
        evidence.add_tick(tick(second, running=3, kv=0.3))
    evidence.t_last_answer_ns = T0 + 305 * NS
    evidence.drain = Drain(3.0, 0.0, 0.3, 60.0)
    assert checked(evidence, line)["queue_drains"].outcome is Ruling.INCONCLUSIVE
    assert "kv_cache_drains" not in checked(evidence, line)
    assert [one.rule for one in find(evidence, line, T0)] == ["gauges_stand_still"]
    assert ruled(evidence, line).ruling is Ruling.INCONCLUSIVE


def test_a_server_that_died_out_of_memory_lacks_memory():
    evidence, line = modelled_run()
    evidence.ending.server_died, evidence.ending.out_of_memory = "refused", "its log says: CUDA out of memory"
    assert checked(evidence, line)["memory_suffices"].value == 1
    assert ruled(evidence, line).reason == "the server died under load: refused; its log says: CUDA out of memory"


@pytest.mark.parametrize(("short", "ruling"), [(10, Ruling.PASS), (11, Ruling.INCONCLUSIVE)])
def test_one_answer_in_ten_may_be_short(short, ruling):
    evidence, line = modelled_run()
    evidence.outcomes.clear()
    evidence.outcomes.update({Outcome.OK: 100 - short, Outcome.SHORT: short})
    assert ruled(evidence, line).ruling is ruling


def test_what_voids_or_ends_a_run_is_told_in_this_order():
    evidence, line = modelled_run(runs=5, cpu=lambda _: 0.97, swap_per_second=2**20)
    evidence.ticks[:2] = [tick(0, running=1), tick(1, running=1)]
    evidence.ending.record_error, evidence.ending.driver_died = "disk full", "the driver died"
    evidence.ending.server_died, evidence.ending.interrupted = "refused", True
    told = [(ruled(evidence, line).ruling, ruled(evidence, line).reason)]
    for cause in ("record_error", "driver_died", "server_died", "interrupted"):
        setattr(evidence.ending, cause, None)
        told.append((ruled(evidence, line).ruling, ruled(evidence, line).reason))
    evidence.ticks = [dataclasses.replace(one, processes={}) for one in evidence.ticks]
    told.append((ruled(evidence, line).ruling, ruled(evidence, line).reason))
    for stage in evidence.stages:
        stage.client_problem = None
    told.append((ruled(evidence, line).ruling, ruled(evidence, line).reason))
    words = [
        "the run file could not be written to its end, what is in it is readable: disk full",
        "the driver died",
        "the server died under load: refused",
        "interrupted: a partial result",
        "swap grew by",
        "the load generator was the bottleneck: at 2 offered",
        "the server was not ours alone: 1 requests were running",
    ]
    assert all(reason.startswith(word) for (_, reason), word in zip(told, words, strict=True)), told
    assert [ruling for ruling, _ in told] == [*[Ruling.INCONCLUSIVE] * 2, Ruling.FAIL, *[Ruling.INCONCLUSIVE] * 4]


@pytest.mark.parametrize(
    ("changes", "ruling", "reason"),
    [
        (
            {"measured": 5, "bound_by": "kv_cache"},
            "fail",
            "the KV cache holds 5 requests of this workload at once, not",
        ),
        ({"measured": 5, "bound_by": "batch_slots"}, "fail", "the server runs 5 requests at once, not"),
        ({"measured": 5, "bound_by": "token_budget"}, "fail", "prompts queue for the token budget above 5 requests"),
        ({"measured": 5, "bound_by": "gpu_memory"}, "fail", "GPU memory runs out above 5 requests at once, not"),
        ({"measured": 5, "bound_by": "errors"}, "fail", "requests fail above 5 at once, not the configured 8"),
        ({"measured": 5, "bound_by": "compute"}, "fail", "5 requests run at once, not the configured 8"),
        ({"measured": 5, "bound_by": "unknown"}, "inconclusive", "seen: do this"),
        ({"measured": None, "bound_by": "errors"}, "fail", "not even the smallest stage held: "),
        ({"limit_in_effect": False, "measured": 5}, "fail", "the configured limit of 8 is not in effect: more ran"),
        ({"bound_by": "unknown"}, "inconclusive", "what binds was not seen: seen; do this"),
        ({"limit_in_effect": None}, "inconclusive", "past the limit of 8 nothing was measured"),
        ({"bound_by": "batch_slots"}, "pass", "all 8 configured requests run at once; above 8, a queue forms"),
        ({"bound_by": "kv_cache"}, "pass", "all 8 configured requests run at once; above 8, the KV cache is full"),
        ({"bound_by": "token_budget"}, "pass", "all 8 configured requests run at once; above 8, prompts queue for"),
        ({"bound_by": "errors"}, "pass", "all 8 configured requests run at once; above 8, requests are refused"),
        ({"bound_by": "compute"}, "pass", "all 8 configured requests run at once; above 8, no more do"),
        ({"bound_by": "not_reached"}, "pass", "all 8 configured requests run at once; above 8, no more do"),
        ({"configured": None, "measured": None}, "fail", "not even one request at a time held: seen"),
        ({"configured": None, "bound_by": "not_reached"}, "inconclusive", "nothing bound up to 8 requests at once"),
        ({"configured": None, "limit_in_effect": None}, "pass", "a load line was found at 8; nothing was configured"),
    ],
)
def test_a_line_is_put_in_words(changes, ruling, reason):
    evidence, line = modelled_run()
    if "bound_by" in changes:
        changes = changes | {"bound_by": BoundBy(changes["bound_by"])}
    verdict = ruled(evidence, dataclasses.replace(line, evidence="seen", next_step="do this", **changes))
    assert (verdict.ruling, verdict.reason[: len(reason)]) == (ruling, reason)


def test_a_failure_beside_the_line_is_told_by_its_check():
    evidence, line = modelled_run()
    evidence.drain.running = 2
    assert ruled(evidence, line).reason == "queue_drains is 2 requests, wanted == 0 requests"
    unknown = dataclasses.replace(line, measured=5, bound_by=BoundBy.UNKNOWN)
    assert ruled(evidence, unknown).ruling is Ruling.FAIL


@pytest.mark.parametrize(
    ("ending", "runs", "code"),
    [
        ({}, 8, 0),
        ({}, 5, 1),
        ({"driver_died": "x"}, 8, 3),
        ({"server_died": "x"}, 8, 1),
        ({"interrupted": True}, 8, 130),
        ({"interrupted": True, "server_died": "x"}, 8, 130),
        ({"interrupted": True, "record_error": "x"}, 8, 4),
    ],
)
def test_exit_codes(ending, runs, code):
    evidence, line = modelled_run(runs=runs, kv_each=0.19 if runs == 5 else 0.05)
    for name, value in ending.items():
        setattr(evidence.ending, name, value)
    result = documented(evidence, line)
    assert result["exit_code"] == code
    assert result["interrupted"] is ("interrupted" in ending)


def _all_short(evidence):
    evidence.outcomes[Outcome.SHORT] = 2


def _unsettled(evidence):
    evidence.stages[0].settled = evidence.stages[2].settled = False


def _unsettled_elsewhere(evidence):
    _unsettled(evidence)
    evidence.stages[0].complete = evidence.stages[2].counted = False


def _unfinished(evidence):
    evidence.outcomes[Outcome.UNFINISHED] = 3


def _more_tokens(evidence):
    evidence.client_tokens += 5


def _failed_too(evidence):
    _more_tokens(evidence)
    evidence.outcomes[Outcome.TIMEOUT] = 1


def _untold(evidence):
    _more_tokens(evidence)
    values = [{k: v for k, v in one.values.items() if k != "generation_tokens_total"} for one in evidence.ticks]
    evidence.ticks = [dataclasses.replace(one, values=v) for one, v in zip(evidence.ticks, values, strict=True)]


def _early(change):
    def both(evidence):
        change(evidence)
        evidence.ending.interrupted = True

    return both


@pytest.mark.parametrize(
    ("change", "rule_name", "severity", "words"),
    [
        (_all_short, "short_answers", "warning", "2 ended before their length"),
        (_unsettled, "not_settled", "info", "running requests kept changing at 2, 6 offered"),
        (_unsettled_elsewhere, None, None, None),
        (_unfinished, "requests_unfinished", "warning", "3 were still running"),
        (_early(_unfinished), None, None, None),
        (_more_tokens, "tokens_differ", "warning", "client 2,405, server 2,400"),
        (_early(_more_tokens), None, None, None),
        (_failed_too, None, None, None),
        (_untold, None, None, None),
    ],
)
def test_a_finding_is_there_when_its_cause_is_and_only_then(change, rule_name, severity, words):
    evidence, line = modelled_run()
    change(evidence)
    findings = find(evidence, line, T0 + 5)
    assert [one.rule for one in findings] == ([rule_name] if rule_name else [])
    for one in findings:
        assert (one.severity, one.t_ns) == (severity, T0 + 5)
        assert words in one.evidence


def test_each_note_of_the_line_is_a_finding():
    evidence, line = modelled_run()
    notes = ("2 did not hold although 8 did", "another")
    findings = find(evidence, dataclasses.replace(line, notes=notes), T0)
    assert [(one.rule, one.evidence) for one in findings] == [("unstable_stage", note) for note in notes]


@pytest.mark.parametrize(
    ("limit", "told", "differs"), [(8, 6, True), (8, 8, False), (8, None, False), (None, 6, False)]
)
def test_the_servers_limit_differs_only_from_one_that_was_given(limit, told, differs):
    evidence, line = modelled_run()
    facts = dataclasses.replace(prepared().facts, max_running_requests=told, max_running_source="/props")
    evidence.prepared = prepared(facts=facts, limit=limit)
    assert found(evidence, line) == (["limit_differs"] if differs else [])


@pytest.mark.parametrize(
    ("fixed", "cached", "hit"), [(0.0, 20, False), (0.0, 21, True), (51.2, 120, False), (51.2, 121, True)]
)
def test_two_percent_of_prompt_tokens_beyond_the_chat_template_may_come_from_a_cache(fixed, cached, hit):
    evidence, line = modelled_run(changes={"calibration": Calibration(fixed, 1.3)})
    tally = evidence.stages[2].tally = StageTally(SloLimits())
    tally.add(dataclasses.replace(record(1, "6", T0), prompt_tokens=1000, cached_tokens=cached))
    assert found(evidence, line) == (["prefix_cache_hits"] if hit else [])
    evidence.stages[2].counted = False
    assert found(evidence, line) == []


def _spread_tally():
    """A thousand requests whose n-th has TTFT n ms, TPOT 2 n ms, a frame gap of 3 n ms and 5 n ms in all."""
    tally = StageTally(SloLimits())
    tally.t_settled_ns = T0
    for n in range(1, 1001):
        first = T0 + n * MS
        one = record(n, "2", T0, tokens=3)
        times = {"t_first_ns": first, "t_last_ns": first + 4 * n * MS, "frame_gaps_us": (3000 * n,)}
        tally.add(dataclasses.replace(one, **times, error=None))
    return tally


def test_every_latency_and_speed_is_under_its_own_name():
    evidence, line = modelled_run()
    evidence.stages[0].tally = _spread_tally()
    stage = documented(evidence, line)["stages"][0]
    for name, times in (("ttft_seconds", 1), ("tpot_seconds", 2), ("frame_gap_seconds", 3), ("e2e_seconds", 5)):
        seen = {"p50": 0.5 * times, "p95": 0.95 * times, "p99": 0.99 * times, "max": times, "samples": 1000}
        assert stage[name] == pytest.approx(seen), name
    assert stage["prefill_tokens_per_second"] == pytest.approx(100 / 0.501, abs=1e-4)
    assert stage["decode_tokens_per_second"] == pytest.approx(1 / (2 * 0.501), abs=1e-4)
    assert stage["requests"]["issued"] == stage["requests"]["ok"] == 1000


def test_a_stage_is_documented_with_its_own_gauges_and_rates():
    evidence, line = modelled_run(changes=with_slo(ttft_seconds=1.0))
    over = evidence.stages[4]
    over.tally.first_error, over.tally.met_slo = "boom", 10
    start = over.t_settled_ns // NS - T0 // NS
    gpus = {"GPU-0": {"gpu_memory_used_bytes": 5.0}}
    for n, one in enumerate(evidence.ticks):
        if one.t_ns >= over.t_settled_ns:
            values = {**one.values, "request_preemptions_total": 4.0}
            evidence.ticks[n] = dataclasses.replace(one, gpus=gpus, values=values)
    evidence.ticks[start + 3] = tick(start + 3, running=7, waiting=6, kv=0.5)
    evidence.see(over)
    stage = documented(evidence, line)["stages"][4]
    assert {name: stage[name] for name in ("name", "purpose", "offered", "settled", "complete", "seconds")} == {
        "name": "10",
        "purpose": "over",
        "offered": 10,
        "settled": True,
        "complete": True,
        "seconds": 20,
    }
    assert stage["running"] == {"p50": 8, "mean": round((19 * 8 + 7) / 20, 4), "max": 8}
    assert stage["waiting"] == {"p50": 2, "mean": round((19 * 2 + 6) / 20, 4), "max": 6}
    assert stage["kv_cache_usage_ratio"] == {"p50": 0.4, "mean": round((19 * 0.4 + 0.5) / 20, 4), "max": 0.5}
    assert stage["gpu_memory_used_bytes"] == {"max": 5}
    assert stage["preemptions"] == 4
    assert (stage["output_tokens_per_second"], stage["prompt_tokens_per_second"]) == (20, 200)
    assert (stage["requests_per_second"], stage["goodput_per_second"]) == (2, 0.5)
    assert stage["first_error"] == "boom"


def test_whether_a_stage_held_is_told_only_of_one_that_was_whole_and_shows_something():
    evidence, line = modelled_run()
    assert [stage["held"] for stage in documented(evidence, line)["stages"]] == [True] * 4 + [False] * 2
    evidence.stages[0].complete = False
    observation = dataclasses.replace(evidence.stages[1].view.observation, running=(4.0, 4.0))
    evidence.stages[1].view = dataclasses.replace(evidence.stages[1].view, observation=observation)
    evidence.stages[2].overfull = True
    evidence.see(evidence.stages[2])
    assert [stage["held"] for stage in documented(evidence, line)["stages"]] == [None] * 3 + [True] + [False] * 2


def test_a_stage_that_was_never_seen_or_does_not_count_is_not_documented():
    evidence, line = modelled_run()
    evidence.stages[0].view = None
    evidence.stages[2].counted = False
    assert [stage["name"] for stage in documented(evidence, line)["stages"]] == ["4", "8", "10", "9"]


@pytest.mark.parametrize(
    ("limits", "slo_measured", "expected"),
    [
        ({}, None, None),
        ({"ttft_seconds": 0.5}, 8, (8, None)),
        ({"tpot_seconds": 0.06}, None, (None, "tpot_seconds > 0.06 in 40 of 40 requests at 2")),
        ({"tpot_seconds": 0.06}, 2, (2, "tpot_seconds > 0.06 in 40 of 40 requests at 6")),
        ({"tpot_seconds": 0.06}, 4, (4, "tpot_seconds > 0.06 in 40 of 40 requests at 6")),
        ({"ttft_seconds": 0.05}, 6, (6, "ttft_seconds > 0.05 in 40 of 40 requests at 8")),
        ({"ttft_seconds": 0.05}, 10, (10, None)),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_the_slo_line_is_bound_by_the_lowest_stage_above_it_that_missed(limits, slo_measured, expected, exact):
    evidence, line = modelled_run(changes=with_slo(**limits))
    evidence.stages[1].counted = False
    result = documented(evidence, dataclasses.replace(line, slo_measured=slo_measured), slo_exact=exact)["slo_line"]
    if expected is None:
        assert result is None
    else:
        measured, bound_by = expected
        assert result == {"measured": measured, "bound_by": bound_by, "workload": "interactive", "exact": exact}


@pytest.mark.parametrize(
    ("sources", "told"), [(set(), None), ({"kernel"}, "kernel"), ({"read"}, "read"), ({"kernel", "read"}, "read")]
)
def test_arrival_times_are_the_kernels_only_when_all_are(sources, told):
    evidence, line = modelled_run()
    evidence.arrival_sources = sources
    assert documented(evidence, line)["client"]["arrival_lag_seconds"]["source"] == told


def test_the_lateness_of_the_client_is_under_its_own_names():
    evidence, line = modelled_run()
    evidence.send_lag = array("d", [n / 1e4 for n in range(1, 1001)])
    evidence.arrival_lag = array("d", [n / 1e6 for n in range(1, 1001)])
    evidence.health = [ClientHealth(T0, 1.0, n / 10, n / 100, 9.0, 8.0, 7.0) for n in (9, 1, 2, 3)]
    assert documented(evidence, line)["client"] == {
        "valid": True,
        "problem": None,
        "send_lag_seconds": {"p50": 0.05, "p99": 0.099, "max": 0.1},
        "arrival_lag_seconds": {"p50": 0.0005, "p99": 0.00099, "max": 0.001, "source": "kernel"},
        "loop_lag_seconds": {"p99": 0.03},
        "cpu_ratio": 0.2,
    }


def test_a_client_that_nothing_was_heard_of_has_no_figures():
    evidence, line = modelled_run()
    evidence.send_lag = evidence.arrival_lag = array("d")
    evidence.health, evidence.arrival_sources = [], set()
    client = documented(evidence, line)["client"]
    nothing = {"p50": None, "p99": None, "max": None}
    assert (client["send_lag_seconds"], client["loop_lag_seconds"]) == (nothing, {"p99": None})
    assert (client["arrival_lag_seconds"], client["cpu_ratio"]) == (nothing | {"source": None}, None)


def test_the_document_says_what_was_measured_and_where():
    evidence, line = modelled_run()
    evidence.wasted_tokens, evidence.client_tokens = 3, 2405
    result = documented(evidence, line)
    assert result["target"] == {
        "url": "http://127.0.0.1:8000",
        "engine": "vllm",
        "version": "0.32.0",
        "model": "hy3",
        "context_tokens": 8192,
    }
    assert result["workload"] == {"name": "interactive", "prompt_tokens": 512, "output_tokens": 256, "seed": 1}
    assert result["tokens"] == {"client_completion": 2405, "server_completion": 2400, "wasted": 3}
    assert result["drain"] == {"running": 0, "waiting": 0, "kv_cache_usage_ratio": 0, "seconds": 1}
    assert [one["name"] for one in result["checks"]] == list(checked(evidence, line))
    assert (result["run"], result["verdict"]) == ("r.db", "pass")
    assert result["findings"] == [one.to_json() for one in find(evidence, line, T0)]
    assert len(result["findings"]) == 1
    assert result["load_line"] == {
        "configured": 8,
        "measured": 8,
        "bound_by": "batch_slots",
        "evidence": line.evidence,
        "next_step": line.next_step,
    }


def test_check_and_finding_agree_at_the_edge_of_the_kv_tolerance():
    evidence, line = modelled_run()
    for n in (0, 1):
        evidence.ticks[n] = tick(n, kv=0.5)
    evidence.drain = Drain(0.0, 0.0, 0.51, 1.0)
    assert ruled(evidence, line).ruling is Ruling.PASS
    assert "kv_cache_not_drained" not in {finding.rule for finding in find(evidence, line, T0)}


def test_a_line_that_was_not_seen_is_null_and_one_that_did_not_hold_is_0():
    evidence, line = modelled_run()
    unseen = dataclasses.replace(line, measured=None, bound_by=BoundBy.UNKNOWN, limit_in_effect=None)
    broken = dataclasses.replace(unseen, bound_by=BoundBy.ERRORS)
    assert (check(evidence, unseen)[0].value, check(evidence, unseen)[0].outcome) == (None, Ruling.INCONCLUSIVE)
    assert (check(evidence, broken)[0].value, check(evidence, broken)[0].outcome) == (0.0, Ruling.FAIL)
    assert ruled(evidence, unseen).ruling is Ruling.INCONCLUSIVE
