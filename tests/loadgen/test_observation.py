"""What a stage showed: only samples and requests of its own window, counters read through resets, nothing made up."""

import dataclasses

import pytest

from loadgen.observation import Gauge, WindowLedger, gauge, growth_of, view_stage
from loadgen.tally import SloLimits, StageTally, TokenBook
from monitor.sampler import Tick
from serving.clock import NS
from serving.records import Outcome, RequestRecord

MS = 1_000_000
WINDOW = (10 * NS, 20 * NS)
CLASSES = {"kv": "kv_cache_full", "oom": "out_of_memory", "odd": "another"}


def tick(second, gpus=None, **values):
    return Tick(round(second * NS), True, values, gpus=gpus or {})


def record(outcome=Outcome.OK, *, second=12, tokens=10, error=None, prompt=100):
    t_ns = second * NS
    return RequestRecord(
        request_id=1,
        stage="4",
        user=0,
        outcome=outcome,
        t_plan_ns=t_ns,
        t_send_ns=t_ns,
        t_headers_ns=t_ns,
        t_first_ns=t_ns,
        t_first_content_ns=t_ns,
        t_last_ns=t_ns + 900 * MS,
        t_end_ns=t_ns + 900 * MS,
        frames=10,
        frame_gaps_us=(100_000,) * 9,
        planned_prompt_tokens=100,
        planned_output_tokens=10,
        prompt_tokens=prompt,
        cached_tokens=0,
        completion_tokens=tokens,
        finish_reason="length",
        http_status=200,
        error=error,
        arrival_source="kernel",
        arrival_lag_us=100,
    )


def ledger(*records):
    ended = WindowLedger(CLASSES.get)
    for one in records:
        ended.add(one)
    return ended


def view(ticks=(), *, records=(), window=WINDOW, slo=None, **flags):
    tally, book = StageTally(slo or SloLimits()), TokenBook()
    tally.t_settled_ns, tally.t_end_ns = window
    for one in records:
        tally.add(one)
        book.add(one)
    flags = {"client_valid": True, "server_died": False, "overfull": False} | flags
    return view_stage(4, ticks, window, tally, book, ledger(*records), **flags)


@pytest.mark.parametrize(
    ("values", "grown"),
    [
        ([], None),
        ([7], None),
        ([7, 7], 0),
        ([7, 9], 2),
        ([7, 9, 3, 5], 2 + 3 + 2),
        ([5, 0, 0, 4], 4),
        ([0, 8, 8, 1], 9),
    ],
)
def test_a_counter_grows_through_resets_and_needs_two_samples(values, grown):
    assert growth_of("n", [tick(second, n=value) for second, value in enumerate(values)]) == grown


@pytest.mark.parametrize(
    ("values", "seen"),
    [([], Gauge(None, None, None, 0)), ([3.0], Gauge(3, 3, 3, 1)), ([1.0, 9.0, 2.0], Gauge(2, 4, 9, 3))],
)
def test_a_gauge_is_its_median_mean_and_maximum(values, seen):
    assert gauge(values) == seen


def test_samples_at_both_edges_of_the_window_are_inside_and_no_others():
    ticks = [tick(second, requests_running=float(second), requests_waiting=1.0) for second in (9, 10, 15, 20, 21)]
    seen = view(ticks)
    assert seen.observation.running == [10, 15, 20]
    assert seen.running == Gauge(15, 15, 20, 3)
    assert seen.waiting == Gauge(1, 1, 1, 3)
    assert seen.seconds == seen.observation.seconds == 10


def test_each_gauge_is_read_from_its_own_signal_and_a_missing_value_is_no_sample():
    ticks = [tick(11, requests_running=4, requests_waiting=2, kv_cache_usage_ratio=0.5), tick(12, requests_running=3)]
    seen = view(ticks)
    assert (seen.running.max, seen.waiting.max, seen.kv_cache.max) == (4, 2, 0.5)
    assert (seen.running.samples, seen.waiting.samples, seen.kv_cache.samples) == (2, 1, 1)
    assert (seen.observation.waiting, seen.observation.kv_cache_usage_ratio) == ([2], [0.5])


@pytest.mark.parametrize(
    ("samples", "preemptions"),
    [
        ({}, None),
        ({15: 3}, None),
        ({9: 3, 21: 5}, None),
        ({5: 1, 9: 3, 15: 4, 21: 6, 25: 60}, 1),
        ({10: 3, 15: 4, 20: 5, 21: 7}, 2),
        ({9: 3, 10: 4, 20: 5}, 1),
        ({15: 3, 19: 5}, 2),
        ({9: 30, 15: 2, 19: 5}, 5),
        ({9: 3, 15: 3, 21: 9}, 0),
    ],
)
def test_preemptions_count_from_the_last_sample_before_the_window_to_the_last_in_it(samples, preemptions):
    seen = view([tick(second, request_preemptions_total=float(value)) for second, value in samples.items()])
    assert seen.preemptions == seen.observation.preemptions == preemptions


def test_what_the_next_stages_load_throws_out_is_not_this_stages():
    counts = {9: 3.0, 15: 3.0, 19.9: 3.0, 20.1: 8.0, 21: 30.0}
    assert view([tick(second, request_preemptions_total=count) for second, count in counts.items()]).preemptions == 0
    before = [tick(second, request_preemptions_total=3.0) for second in (9, 15)]
    slow = tick(19.9, request_preemptions_total=8.0, scrape_duration_seconds=0.5)
    assert view([*before, slow]).preemptions == 0


def test_ticks_without_the_counter_are_no_edge_of_it():
    ticks = [tick(8, request_preemptions_total=1), tick(9), tick(15), tick(19, request_preemptions_total=4), tick(20)]
    assert view(ticks).preemptions == 3


def test_gpu_memory_is_the_largest_sum_over_gpus_inside_the_window():
    def gpus(*used):
        return {f"GPU-{n}": {} if one is None else {"gpu_memory_used_bytes": one} for n, one in enumerate(used)}

    ticks = [tick(9, gpus(90, 90)), tick(11, gpus(9, 1)), tick(12, gpus(5, 6)), tick(13, gpus(8, None)), tick(14)]
    assert view(ticks).gpu_memory_used_bytes == 11
    assert view([tick(11, gpus(None, None)), tick(12)]).gpu_memory_used_bytes is None


def test_the_kv_cache_is_as_large_as_its_last_sample_says_and_a_request_needs_the_median():
    ticks = [tick(second, kv_cache_capacity_tokens=float(second)) for second in (9, 11, 12, 21)]
    seen = view(ticks, records=[record(prompt=prompt) for prompt in (10, 20, 900)]).observation
    assert (seen.kv_capacity_tokens, seen.kv_tokens_needed) == (12, 30)
    assert (view().observation.kv_capacity_tokens, view().observation.kv_tokens_needed) == (None, None)


def test_an_empty_window_shows_nothing_and_divides_by_nothing():
    seen = view([tick(9, requests_running=1.0)], window=(15 * NS, 15 * NS), records=[record()])
    assert (seen.seconds, seen.running.samples, seen.output_tokens_per_second) == (0, 0, None)
    assert seen.observation.output_tokens_per_second is None
    assert view(window=(20 * NS, 10 * NS)).seconds == 0


def test_the_rate_of_the_search_is_by_ended_requests_and_that_of_the_report_by_arrival():
    straddling = record(second=19, tokens=100)
    book_only = dataclasses.replace(straddling, t_first_ns=19 * NS + 500 * MS)
    seen = view(records=[record(tokens=30), book_only])
    assert seen.observation.output_tokens_per_second == pytest.approx(13)
    assert seen.output_tokens_per_second == pytest.approx((30 + 50) / 10)


@pytest.mark.parametrize("flag", ["client_valid", "server_died", "overfull"])
@pytest.mark.parametrize("value", [True, False])
def test_the_flags_reach_the_search(flag, value):
    seen = view(**{flag: value}).observation
    assert getattr(seen, flag) is value
    assert seen.offered == 4


@pytest.mark.parametrize(("limit", "met"), [(None, None), (0.5, True), (0.05, False)])
def test_whether_the_slo_was_met_reaches_the_search(limit, met):
    assert view(records=[record()] * 20, slo=SloLimits(tpot_seconds=limit)).observation.slo_met is met


def test_errors_are_counted_by_class_for_failures_only():
    wrong = [record(Outcome.HTTP_ERROR, error="kv"), record(Outcome.STREAM_ERROR, error="kv")]
    memory = [record(outcome, error="oom") for outcome in (Outcome.TRUNCATED, Outcome.TIMEOUT, Outcome.STREAM_ERROR)]
    ours = [
        record(outcome, error="kv")
        for outcome in (Outcome.OK, Outcome.SHORT, Outcome.CLIENT_ERROR, Outcome.CANCELLED, Outcome.UNFINISHED)
    ]
    others = [record(Outcome.HTTP_ERROR, error="odd"), record(Outcome.HTTP_ERROR, error="?"), record(Outcome.TIMEOUT)]
    records = [*ours, *wrong, *memory, *others]
    seen = view(records=records).observation
    assert (seen.kv_full_errors, seen.out_of_memory_errors) == (2, 3)
    assert ledger(*records).classes == {"kv_cache_full": 2, "out_of_memory": 3, "another": 1}
    assert sum(seen.outcomes.values()) == len(records)
    assert seen.outcomes[Outcome.HTTP_ERROR] == 3


@pytest.mark.parametrize(
    ("records", "first"),
    [
        ([], None),
        ([record(Outcome.TIMEOUT)], None),
        ([record(Outcome.CANCELLED, error="we did"), record(Outcome.TIMEOUT, error="late")], "late"),
        ([record(Outcome.TIMEOUT), record(Outcome.HTTP_ERROR, error="a"), record(Outcome.HTTP_ERROR, error="b")], "a"),
    ],
)
def test_the_first_error_is_the_first_failure_that_has_a_message(records, first):
    assert ledger(*records).first_error == first
    assert view(records=records).observation.first_error == first


def test_tokens_of_the_window_are_those_of_answers_that_ended_well():
    records = [
        record(tokens=5),
        record(Outcome.SHORT, tokens=3),
        record(Outcome.TIMEOUT, tokens=40),
        record(tokens=None),
    ]
    assert ledger(*records).completion_tokens == 8


def test_a_window_is_judged_by_what_ended_in_it_and_not_by_what_its_stage_issued():
    """The stage issued one answer; three failures of an earlier stage ended in its window."""
    tally, book = StageTally(SloLimits()), TokenBook()
    tally.add(record(error="of its own"))
    failures = ledger(*[record(Outcome.TIMEOUT, error="of an earlier one")] * 3)
    flags = {"client_valid": True, "server_died": False, "overfull": False}
    seen = view_stage(4, [], WINDOW, tally, book, failures, **flags).observation
    assert (seen.outcomes, seen.first_error) == ({Outcome.TIMEOUT: 3}, "of an earlier one")


def test_a_scrape_that_reaches_into_the_next_stage_is_no_sample_of_this_one():
    slow = tick(19, requests_running=9, requests_waiting=0, scrape_duration_seconds=1.5)
    quick = tick(18, requests_running=4, requests_waiting=0, scrape_duration_seconds=0.5)
    assert view([quick, slow]).running.max == 4


def test_a_death_is_explained_by_what_its_stage_issued_where_nothing_ended_in_its_window():
    one = record(Outcome.STREAM_ERROR, second=21, error="the engine is dead")
    told = []
    for died in (False, True):
        tally = StageTally(SloLimits())
        tally.add(one)
        flags = {"client_valid": True, "server_died": died, "overfull": False}
        told.append(view_stage(4, [], WINDOW, tally, TokenBook(), ledger(), **flags).observation.first_error)
    assert told == [None, "the engine is dead"]


@pytest.mark.parametrize(("ratio", "reserved"), [(0.0, 0.0), (0.7, 0.7 * 4 * 20 / 2)])
def test_an_engine_that_reserves_keeps_half_of_each_running_answer_free_on_average(ratio, reserved):
    ticks = [tick(second, requests_running=4.0) for second in (11, 12, 13)]
    records = [record(tokens=tokens) for tokens in (10, 20, 30)]
    assert view(ticks, records=records, reserved_output_ratio=ratio).observation.kv_tokens_reserved == reserved
    assert view(ticks, reserved_output_ratio=ratio).observation.kv_tokens_reserved == 0
    assert view(records=records, reserved_output_ratio=ratio).observation.kv_tokens_reserved == 0
