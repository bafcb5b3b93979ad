"""What a run has gathered: whose tokens count, what the server looked like before traffic, when the client is no judge."""

import dataclasses

import pytest

from loadgen.driver_link import ClientHealth
from loadgen.load_line import StageSpec
from loadgen.observation import WindowLedger
from loadgen.prompts import Calibration
from loadgen.tally import SloLimits, StageTally
from loadgen.workloads import find_workload
from monitor.http import parse_url
from monitor.sampler import Tick
from plimsoll.evidence import Ending, Evidence, Prepared, StageRun
from serving.clock import NS
from serving.engines import TargetFacts
from serving.records import Outcome, RequestRecord

MS = 1_000_000
TRAFFIC = 10 * NS


def evidence(*stages, slo=None, ticks=()):
    workload = dataclasses.replace(find_workload("interactive"), slo=slo or SloLimits(ttft_seconds=1.0))
    facts = TargetFacts("vllm", "0.32.0", "m", context_tokens=8192, max_running_requests=None)
    prepared = Prepared(
        parse_url("http://127.0.0.1:8000"), facts, "chat", Calibration(8.0, 1.3), workload, 8, "--max-batch"
    )
    gathered = Evidence(prepared, seed=1, stages=list(stages), t_traffic_ns=TRAFFIC)
    for one in ticks:
        gathered.add_tick(one)
    return gathered


def stage(name="4", *, window=(20, 30), counted=True, offered=4):
    run = StageRun(
        StageSpec(name, offered, "ramp"), counted, 15 * NS, StageTally(SloLimits()), WindowLedger(lambda text: text)
    )
    run.t_settled_ns, run.t_end_ns = (None if second is None else round(second * NS) for second in window)
    run.tally.t_settled_ns, run.tally.t_end_ns = run.t_settled_ns, run.t_end_ns
    return run


def tick(second, *, failure=None, processes=None, **values):
    return Tick(round(second * NS), failure is None, values, processes=processes or {}, failure=failure)


def record(outcome=Outcome.OK, *, second=22.0, name="4", **changes):
    """Sent 2 ms after it was due, ended a second after that."""
    t_ns = round(second * NS)
    base = RequestRecord(
        request_id=1,
        stage=name,
        user=0,
        outcome=outcome,
        t_plan_ns=t_ns,
        t_send_ns=t_ns + 2 * MS,
        t_headers_ns=t_ns + 3 * MS,
        t_first_ns=t_ns + 102 * MS,
        t_first_content_ns=t_ns + 102 * MS,
        t_last_ns=t_ns + 902 * MS,
        t_end_ns=t_ns + 1002 * MS,
        frames=6,
        frame_gaps_us=(160_000,) * 5,
        planned_prompt_tokens=100,
        planned_output_tokens=10,
        prompt_tokens=100,
        cached_tokens=0,
        completion_tokens=10,
        finish_reason="length",
        http_status=200,
        error=None,
        arrival_source="kernel",
        arrival_lag_us=80,
    )
    return dataclasses.replace(base, **changes)


def health(second, *, cpu=0.2, lag=0.001):
    return ClientHealth(round(second * NS), 1.0, cpu, lag, 2 * lag, 0.0, 0.0)


FAILED = [outcome for outcome in Outcome if outcome not in (Outcome.OK, Outcome.SHORT)]


@pytest.mark.parametrize(
    ("one", "client", "wasted"),
    [
        (record(), 10, 0),
        (record(Outcome.SHORT, completion_tokens=6), 6, 0),
        (record(completion_tokens=None), 0, 0),
        (record(Outcome.TIMEOUT, completion_tokens=None), 0, 6),
        (record(Outcome.TIMEOUT, completion_tokens=None, frames=0), 0, 0),
        *[(record(outcome), 10, 10) for outcome in FAILED],
    ],
)
def test_tokens_are_counted_whatever_became_of_the_request_and_wasted_unless_it_ended_well(one, client, wasted):
    run = evidence(stage())
    run.add_record(one)
    run.add_record(one)
    assert (run.client_tokens, run.wasted_tokens) == (2 * client, 2 * wasted)
    assert run.outcomes == {one.outcome: 2}


def test_only_answers_say_that_the_server_lives_and_how_long_a_request_takes():
    run = evidence()
    for one in (
        record(second=30, t_send_ns=28 * NS),
        record(second=20),
        record(t_send_ns=None),
        *[record(outcome, second=90, t_send_ns=0) for outcome in FAILED],
    ):
        run.add_record(one)
    assert run.t_last_good_ns == 30 * NS + 1002 * MS
    assert run.e2e_max_seconds == pytest.approx(3.002)


def test_a_sample_says_that_the_server_lives_and_an_older_answer_takes_nothing_back():
    run = evidence(ticks=[tick(40), tick(50, failure="timed out")])
    run.add_record(record(second=20))
    assert run.t_last_good_ns == 40 * NS


@pytest.mark.parametrize(
    ("failures", "failed", "refused"),
    [
        ([None], 0, 0),
        (["connection refused"], 1, 1),
        (["timed out"], 1, 0),
        (["connection refused", "Connection refused by peer"], 2, 2),
        (["connection refused", "timed out"], 2, 0),
        (["connection refused", "timed out", "connection refused"], 3, 1),
        (["connection refused", "connection refused", None], 0, 0),
        (["connection refused", None, "connection refused"], 1, 1),
    ],
)
def test_failed_scrapes_are_counted_in_a_row_and_refusals_in_a_row_of_their_own(failures, failed, refused):
    run = evidence(ticks=[tick(n, failure=failure) for n, failure in enumerate(failures)])
    assert (run.failed_ticks, run.refused_ticks, len(run.ticks)) == (failed, refused, len(failures))


@pytest.mark.parametrize(
    ("samples", "tokens"),
    [
        ({}, None),
        ({5: 70}, None),
        ({5: 70, 9: 100, 20: 103, 30: 150}, 50),
        ({10: 100, 20: 150}, 50),
        ({11: 100, 20: 150}, 50),
        ({9: 100, 20: 150, 30: 7, 40: 9}, 59),
        ({9: 100, 20: 100.6}, 1),
    ],
)
def test_the_servers_tokens_count_from_the_last_sample_before_traffic_and_through_a_restart(samples, tokens):
    run = evidence(ticks=[tick(second, generation_tokens_total=value) for second, value in samples.items()])
    run.add_tick(tick(9.5))
    run.add_tick(tick(50, failure="timed out", generation_tokens_total=0.0))
    run.ticks.sort(key=lambda one: one.t_ns)
    assert run.server_tokens() == tokens


@pytest.mark.parametrize(("ended", "tokens"), [(20, 50), (20.001, None)])
@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.TIMEOUT])
def test_the_servers_tokens_are_not_told_when_it_said_nothing_once_the_last_request_had_ended(ended, tokens, outcome):
    ticks = [tick(second, generation_tokens_total=value) for second, value in ((9, 100), (20, 150))]
    run = evidence(ticks=[*ticks, tick(25), tick(26, failure="timed out", generation_tokens_total=160.0)])
    run.add_record(record(outcome, t_end_ns=round(ended * NS)))
    run.add_record(record(t_end_ns=15 * NS))
    assert run.server_tokens() == tokens


@pytest.mark.parametrize(
    ("samples", "idle"),
    [({}, None), ({11: 0.0}, None), ({1: 0.3, 2: 0.2, 3: 0.25, 11: 0.0}, 0.2), ({10: 0.4}, 0.4)],
)
def test_idle_kv_usage_is_the_least_before_traffic(samples, idle):
    run = evidence(ticks=[tick(second, kv_cache_usage_ratio=value) for second, value in samples.items()])
    run.add_tick(tick(1))
    assert run.idle_kv_ratio() == idle


@pytest.mark.parametrize(
    ("running", "said"),
    [
        ({}, None),
        ({1: 2, 2: 0, 3: 5}, None),
        ({1: 2, 2: 3}, "2 requests were running before the first of ours"),
        ({10: 1}, "1 requests were running before the first of ours"),
        ({11: 4}, None),
    ],
)
def test_other_traffic_shows_before_ours_where_it_never_ceases(running, said):
    run = evidence(ticks=[tick(second, requests_running=value) for second, value in running.items()])
    assert run.other_traffic() == said


@pytest.mark.parametrize(("running", "others"), [(4.0, False), (5.0, True), (None, False)])
def test_other_traffic_shows_when_more_run_than_were_offered(running, others):
    run = evidence(stage(), stage("8", offered=8))
    if running is not None:
        run.add_tick(tick(25, requests_running=running))
    run.see(run.stages[0])
    assert (run.other_traffic() is not None) is others


@pytest.mark.parametrize(
    ("ticks", "growth"),
    [
        ([], None),
        ([{}], None),
        ([{"engine": 5}, {"engine": 2}, {"engine": 9}], 4),
        ([{"engine": 5}, {"engine": 2}, {"engine": 3}], 0),
        ([{"engine": 1, "server": 2}, {"engine": 4, "server": 8}], 9),
        ([{"engine": 1}, {"engine": 2}, {"engine": 2, "server": 90}], 1),
        ([{"host": 7}, {"host": 9}], 2),
        ([{"engine": 1, "host": 7}, {"engine": 2, "host": 90}], 1),
        ([{"engine": 1, "host": 7}, {"host": 90}, {"engine": 4}], 3),
        ([{"engine": 1, "host": 7}, {"host": 90}, {"host": 8}], 83),
    ],
)
def test_swap_growth_is_above_its_first_reading_and_the_servers_where_that_is_known(ticks, growth):
    run = evidence()
    for second, swaps in enumerate(ticks):
        host = {"host_swap_used_bytes": float(swaps["host"])} if "host" in swaps else {}
        roles = {role: {"process_swap_bytes": float(swap)} for role, swap in swaps.items() if role != "host"}
        run.add_tick(tick(second, processes=roles, **host))
    assert run.swap_growth_bytes() == growth


@pytest.mark.parametrize(
    ("window", "inside"),
    [((20, 30), [20, 25, 30]), ((20, None), [20, 25, 30, 31, 99]), ((None, None), []), ((None, 30), [])],
)
def test_a_stage_holds_the_moments_of_its_window_both_edges_included(window, inside):
    assert [second for second in (19, 20, 25, 30, 31, 99) if stage(window=window).holds(second * NS)] == inside


@pytest.mark.parametrize(
    ("window", "seen"), [((20, 30), (20, 30)), ((20, None), (20, 15)), ((None, 30), (15, 30)), ((None, None), (15, 15))]
)
def test_a_window_that_was_not_reached_is_empty(window, seen):
    assert stage(window=window).window == tuple(second * NS for second in seen)


def test_a_request_belongs_to_the_tally_that_issued_it_and_the_window_it_ended_in():
    four, eight = stage(window=(20, 30)), stage("8", window=(30, 40))
    run = evidence(four, eight)
    run.add_record(record(second=29))  # ends at 30.002
    run.add_record(record(second=50))
    run.add_record(record(second=25, name="nobody's"))
    assert (four.tally.issued, eight.tally.issued) == (2, 0)
    assert (four.ended.outcomes.total(), eight.ended.outcomes.total()) == (1, 1)
    assert run.outcomes.total() == 3


def test_a_moment_of_two_windows_belongs_to_the_later_stage_alone():
    four, eight = stage(window=(20, 30)), stage("8", window=(30, 40))
    evidence(four, eight).add_record(record(t_end_ns=30 * NS))
    assert (four.ended.outcomes.total(), eight.ended.outcomes.total()) == (0, 1)


def test_lateness_of_the_client_is_kept_of_counted_stages_only():
    run = evidence(stage(), stage("warmup", counted=False))
    for one in (
        record(),
        record(t_send_ns=None, arrival_lag_us=50, arrival_source="read"),
        record(arrival_lag_us=None, arrival_source="neither"),
        record(name="warmup", t_send_ns=90 * NS, arrival_lag_us=9_000_000, arrival_source="warm"),
    ):
        run.add_record(one)
    assert list(run.send_lag) == pytest.approx([0.002, 0.002])
    assert list(run.arrival_lag) == pytest.approx([80e-6, 50e-6])
    assert run.arrival_sources == {"kernel", "read"}


@pytest.mark.parametrize(
    ("gauges", "answered", "still"),
    [
        ({}, 30, None),
        ({20: (4, 0, 0.2), 25: (4, 0, 0.2), 30: (0, 0, 0.0)}, 29, None),
        ({20: (4, 0, 0.2), 25: (4, 0, 0.2), 40: (4, 0, 0.2)}, 30, 10.0),
        ({20: (4, 0, 0.2), 28: (4, 0, 0.3), 40: (4, 0, 0.3)}, 30, None),
        ({20: (4, 1, 0.2), 25: (4, 0, 0.2), 40: (4, 0, 0.2)}, 30, 5.0),
        ({20: (4, None, 0.2), 25: (4, None, 0.2), 40: (4, None, 0.2)}, 22, None),
        ({20: (4, None, 0.2), 25: (4, None, 0.2), 40: (4, None, 0.2)}, 23, 3.0),
    ],
)
def test_gauges_stand_still_when_answers_came_while_they_read_what_they_read_to_the_end(gauges, answered, still):
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    ticks = [
        tick(second, **{name: one for name, one in zip(names, values, strict=True) if one is not None})
        for second, values in gauges.items()
    ]
    run = evidence(ticks=[*ticks, tick(41, failure="timeout")])
    run.add_record(record(second=answered - 1.002))
    run.add_record(record(Outcome.UNFINISHED, second=60))
    assert run.still_gauges_seconds() == still


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([], None),
        ([{}], None),
        ([{"gpu_memory_used_bytes": 9 * 2**30}], None),
        ([{"gpu_memory_used_bytes": 97 * 2**30, "gpu_memory_total_bytes": 100 * 2**30}], None),
        (
            [
                {"gpu_memory_used_bytes": 5 * 2**30, "gpu_memory_total_bytes": 100 * 2**30},
                {"gpu_memory_used_bytes": 98 * 2**30, "gpu_memory_total_bytes": 100 * 2**30},
            ],
            "98.0 of 100.0 GiB of GPU-1 were in use just before",
        ),
    ],
)
def test_a_card_is_full_by_what_it_showed_when_the_server_was_last_up(cards, words):
    gpus = {f"GPU-{number}": card for number, card in enumerate(cards)}
    empty = {"GPU-0": {"gpu_memory_used_bytes": 0.0, "gpu_memory_total_bytes": 1.0}}
    seen = [Tick(1, True, {}, gpus=empty), Tick(2, True, {}, gpus=gpus), Tick(3, False, {}, gpus=empty, failure="x")]
    assert evidence(ticks=seen).full_gpu() == words


def test_a_death_for_want_of_memory_is_told_to_the_stage():
    run = evidence(stage())
    run.ending.server_died, run.ending.out_of_memory = "gone", "its log says so"
    seen = run.see(run.stages[0]).observation
    assert (seen.server_died, seen.died_of_memory) == (True, True)


def test_a_dead_server_died_in_the_last_stage():
    run = evidence(stage(), stage("8"))
    died = [[run.see(one).observation.server_died for one in run.stages] for run.ending.server_died in (None, "gone")]
    assert died == [[False, False], [False, True]]


def test_a_stage_is_seen_as_what_it_offered_with_its_own_flags_and_kept():
    run = evidence(stage(), stage("8", offered=8))
    run.stages[1].overfull = True
    seen = [run.see(one) for one in run.stages]
    assert [(one.observation.offered, one.observation.overfull) for one in seen] == [(4, False), (8, True)]
    assert [one.view for one in run.stages] == seen


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ({}, "the load generator's process did not report"),
        ({"cpu": [0.2] * 3}, None),
        ({"cpu": [0.9] * 3}, None),
        ({"cpu": [0.91] * 3}, "the load generator used 91% of its core"),
        ({"cpu": [0.99, 0.99]}, None),
        ({"cpu": [0.99, 0.2, 0.2, 0.99, 0.2]}, None),
        ({"cpu": [0.2] * 3, "lag": [0.05] * 3}, None),
        ({"cpu": [0.2] * 3, "lag": [0.051] * 3}, "the load generator's own loop was 51 ms late"),
        ({"cpu": [0.2] * 3, "lag": [0.3, 0.01, 0.01]}, None),
        ({"cpu": [0.2] * 2, "lag": [0.3, 0.3]}, None),
        ({"cpu": [0.2] * 3, "late": [0.051] * 3}, None),
        ({"cpu": [0.2] * 3, "late": [0.05] * 99}, None),
        ({"cpu": [0.2] * 3, "late": [0.051] * 4}, "4 of 4 requests left more than 50 ms late"),
        ({"cpu": [0.2] * 3, "late": [0.051] * 4 + [0.0] * 396}, None),
        ({"cpu": [0.2] * 3, "late": [0.051] * 4 + [0.0] * 395}, "4 of 399 requests left more than 50 ms late"),
    ],
)
@pytest.mark.parametrize("ttft_seconds", [1.0, None])
def test_what_makes_the_client_no_judge(what, problem, ttft_seconds):
    run = evidence(stage(), slo=SloLimits(ttft_seconds=ttft_seconds))
    cpus = what.get("cpu", [])
    lags = what.get("lag", [0.001] * len(cpus))
    run.health = [health(21 + n, cpu=cpu, lag=lag) for n, (cpu, lag) in enumerate(zip(cpus, lags, strict=True))]
    run.health = [health(19, cpu=9, lag=9), *run.health, health(31, cpu=9, lag=9)]
    run.stages[0].tally.send_lag.extend(what.get("late", ()))
    assert run.see(run.stages[0]).observation.client_valid is (problem is None)
    assert run.client_problem() == (None if problem is None else f"at 4 offered, {problem}")


@pytest.mark.parametrize(("seconds", "silent"), [(5, False), (5.1, True)])
def test_silence_of_the_client_is_a_problem_after_five_seconds(seconds, silent):
    run = evidence(stage(window=(20, 20 + seconds)))
    run.see(run.stages[0])
    assert (run.client_problem() is not None) is silent


@pytest.mark.parametrize(("ttft_seconds", "limit_ms"), [(4.0, 200), (0.01, 1)])
def test_how_late_is_late_follows_the_limit_of_the_workload_and_is_at_least_a_millisecond(ttft_seconds, limit_ms):
    run = evidence(stage(), slo=SloLimits(ttft_seconds=ttft_seconds))
    run.health = [health(22)]
    run.stages[0].tally.send_lag.extend([limit_ms / 1000 + 0.0001] * 4)
    run.see(run.stages[0])
    assert run.client_problem() == f"at 4 offered, 4 of 4 requests left more than {limit_ms} ms late"


def test_what_was_wrong_with_the_client_in_a_stage_stays_wrong():
    run = evidence(stage())
    assert not run.see(run.stages[0]).observation.client_valid
    run.health = [health(22)]
    assert not run.see(run.stages[0]).observation.client_valid
    assert "did not report" in run.client_problem()


def test_a_client_that_falters_in_one_stage_is_no_less_valid_in_another():
    run = evidence(stage(window=(20, 30)), stage("8", window=(30, 40)))
    run.health = [health(35)]
    assert [run.see(one).observation.client_valid for one in run.stages] == [False, True]


def test_a_client_that_falters_in_a_warm_up_spoils_nothing():
    run = evidence(stage("warmup", counted=False))
    run.see(run.stages[0])
    assert run.client_problem() is None


def test_requests_that_could_not_be_sent_are_counted_and_told_with_the_first_message():
    run = evidence(stage())
    run.add_record(record(Outcome.TIMEOUT, error="not this one"))
    assert run.client_problem() is None
    for error in ("no port", "no descriptor"):
        run.add_record(record(Outcome.CLIENT_ERROR, error=error))
    assert run.client_problem() == "2 requests could not be sent: no port"


@pytest.mark.parametrize(
    ("ratios", "median"),
    [([], None), ([9.0, 0.1, 0.2], None), ([9.0, 0.3, 0.1, 0.2], 0.2), ([0.0, 0.3, 0.9, 0.9], 0.9)],
)
def test_the_clients_cpu_is_the_median_without_its_start_up(ratios, median):
    run = evidence()
    run.health = [health(n, cpu=ratio) for n, ratio in enumerate(ratios)]
    assert run.client_cpu_ratio() == median


@pytest.mark.parametrize(
    ("ending", "early"),
    [
        (Ending(), False),
        (Ending(interrupted=True), True),
        (Ending(server_died="x"), True),
        (Ending(driver_died="x"), True),
        (Ending(record_error="x"), True),
    ],
)
def test_a_run_ends_early_for_any_of_four_reasons(ending, early):
    assert ending.early is early


def test_what_is_left_of_our_own_larger_stage_is_nobody_elses_traffic():
    run = stage(offered=2)
    gathered = evidence(run, ticks=[tick(second, requests_running=5, requests_waiting=0) for second in range(20, 31)])
    gathered.see(run)
    assert "5 requests ran while 2 were offered" in gathered.other_traffic()
    run.overfull = True
    assert gathered.other_traffic() is None


def test_a_load_generator_that_stood_still_is_no_judge():
    run = stage()
    gathered = evidence(run, ticks=[tick(second, requests_running=4, requests_waiting=0) for second in range(20, 31)])
    for second in range(20, 31):
        longest = 3.0 if second == 25 else 0.01
        gathered.health.append(ClientHealth(second * NS, 1.0, 0.1, 0.001, longest, 0.0, 0.0))
    gathered.see(run)
    assert "stood still for 3.0 s" in gathered.client_problem()
