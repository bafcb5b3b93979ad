"""Counts add up, percentiles are exact or absent, tokens are booked when they arrive."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.tally import (
    SloLimits,
    StageTally,
    TokenBook,
    percentile,
    summarize,
    tpot_seconds,
    ttft_seconds,
)
from serving.clock import NS
from serving.records import Outcome, RequestRecord

MS = 1_000_000


def record(**changes):
    base = RequestRecord(
        request_id=1,
        stage="4",
        user=0,
        outcome=Outcome.OK,
        t_plan_ns=10 * NS,
        t_send_ns=10 * NS + MS,
        t_headers_ns=10 * NS + 5 * MS,
        t_first_ns=10 * NS + 201 * MS,
        t_first_content_ns=10 * NS + 201 * MS,
        t_last_ns=10 * NS + 501 * MS,
        t_end_ns=10 * NS + 502 * MS,
        frames=4,
        frame_gaps_us=(100_000, 100_000, 100_000),
        planned_prompt_tokens=100,
        planned_output_tokens=7,
        prompt_tokens=100,
        cached_tokens=20,
        completion_tokens=7,
        finish_reason="length",
        http_status=200,
        error=None,
        arrival_source="kernel",
        arrival_lag_us=100,
    )
    return dataclasses.replace(base, **changes)


def tally(*records, slo=None, window=(0, 100 * NS)):
    stage = StageTally(slo or SloLimits())
    stage.t_settled_ns, stage.t_end_ns = window
    for one in records:
        stage.add(one)
    return stage


def test_ttft_is_from_the_first_byte_sent_and_tpot_divides_by_tokens_not_frames():
    assert ttft_seconds(record()) == pytest.approx(0.2)
    assert tpot_seconds(record()) == pytest.approx(0.3 / 6)


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_tpot_is_undefined_below_two_tokens(tokens):
    assert tpot_seconds(record(completion_tokens=tokens)) is None


def test_prefill_speed_leaves_cached_tokens_out():
    stage = tally(*[record() for _ in range(20)])
    assert stage.prefill().p50 == pytest.approx(80 / 0.2)


@given(st.lists(st.sampled_from(list(Outcome)), max_size=60))
def test_every_outcome_is_counted_once(outcomes):
    stage = tally(*[record(outcome=outcome) for outcome in outcomes])
    assert stage.issued == len(outcomes)
    assert sum(stage.outcomes.values()) == len(outcomes)


def test_failed_requests_are_in_no_latency_and_their_tokens_are_wasted():
    stage = tally(*[record(outcome=Outcome.STREAM_ERROR, completion_tokens=None, error="full") for _ in range(30)])
    assert stage.ttft().samples == 0
    assert stage.wasted_tokens == 30 * 4
    assert stage.first_error == "full"


def test_requests_outside_the_window_are_counted_but_not_timed():
    stage = tally(record(t_plan_ns=1 * NS), record(), window=(5 * NS, 100 * NS))
    assert stage.issued == 2
    assert stage.ttft().samples == 1


@pytest.mark.parametrize(("p", "n"), [(0.5, 20), (0.95, 200), (0.99, 1000)])
def test_a_percentile_needs_ten_samples_beyond_it(p, n):
    assert percentile(list(range(n)), p) is not None
    assert percentile(list(range(n - 1)), p) is None


@given(st.lists(st.floats(0, 1e6), min_size=200, max_size=400))
def test_percentiles_are_values_that_were_seen_at_the_nearest_rank(values):
    p95 = summarize(values).p95
    assert p95 in values
    assert sum(v <= p95 for v in values) >= 0.95 * len(values)
    assert sum(v < p95 for v in values) < 0.95 * len(values)


def test_slo_is_met_when_95_percent_of_planned_requests_are_within_every_limit():
    slo = SloLimits(ttft_seconds=0.3, tpot_seconds=0.06)
    good, slow = record(), record(t_first_ns=10 * NS + 400 * MS)
    assert tally(*[good] * 95, *[slow] * 5, slo=slo).slo_met() is True
    assert tally(*[good] * 94, *[slow] * 6, slo=slo).slo_met() is False
    assert tally(*[good] * 19, slo=slo).slo_met() is None
    assert tally(*[good] * 100).slo_met() is None


def test_a_failed_request_misses_the_slo():
    slo = SloLimits(ttft_seconds=0.3)
    assert tally(*[record()] * 50, *[record(outcome=Outcome.HTTP_ERROR)] * 50, slo=slo).slo_met() is False


def test_the_missed_limit_is_named_with_its_figure():
    slo = SloLimits(ttft_seconds=0.1)
    assert tally(*[record()] * 200, slo=slo).worst_slo() == "ttft_seconds p95 0.2 > 0.1"
    assert tally(*[record()] * 50, slo=slo).worst_slo() == "ttft_seconds > 0.1 in 50 of 50 requests"
    assert tally(*[record()] * 50, slo=SloLimits(ttft_seconds=0.3)).worst_slo() is None


def test_limits_count_each_for_itself():
    """Four in a hundred miss one limit, four others miss the other: both 95th percentiles are within."""
    slo = SloLimits(ttft_seconds=0.3, tpot_seconds=0.06)
    slow_start, slow_decode = record(t_first_ns=10 * NS + 400 * MS), record(t_last_ns=10 * NS + 900 * MS)
    stage = tally(*[record()] * 92, *[slow_start] * 4, *[slow_decode] * 4, slo=slo)
    assert stage.slo_met() is True
    assert stage.goodput_rate(1.0) == 92


def test_without_usage_a_tpot_limit_cannot_be_shown_to_be_met():
    slo = SloLimits(tpot_seconds=0.06)
    assert tally(*[record(completion_tokens=None)] * 50, slo=slo).slo_met() is False
    assert tally(*[record(completion_tokens=1)] * 50, slo=slo).slo_met() is True


def test_tokens_are_booked_when_their_frames_arrive():
    book = TokenBook()
    book.add(record())
    first, last = 10 * NS + 200 * MS, 10 * NS + 600 * MS
    assert book.output_rate(first, last) == pytest.approx(7 / 0.4)
    assert book.output_rate(first, first + 200 * MS) == pytest.approx(7 / 4 * 2 / 0.2)
    assert book.output_rate(0, 5 * NS) == 0.0
    assert book.output_rate(5, 5) is None


def test_failed_requests_are_not_booked():
    book = TokenBook()
    book.add(record(outcome=Outcome.TRUNCATED))
    assert book.output_rate(0, 20 * NS) == 0.0


@given(st.integers(0, 10_000))
def test_windows_that_tile_the_run_add_up_to_all_tokens(seed):
    rng = random.Random(seed)
    book, total = TokenBook(), 0
    for _ in range(20):
        gaps = tuple(rng.randrange(1, 500_000) for _ in range(rng.randrange(0, 30)))
        tokens = rng.randrange(1, 200)
        start = rng.randrange(0, 30 * NS)
        book.add(record(t_first_ns=start, frames=len(gaps) + 1, frame_gaps_us=gaps, completion_tokens=tokens))
        total += tokens
    edges = [0, 3 * NS, 7 * NS, 20 * NS, 60 * NS]
    booked = sum(book.output_rate(a, b) * (b - a) / NS for a, b in itertools.pairwise(edges))
    assert booked == pytest.approx(total)


# every request: sent 1 ms late, first frame 200 ms after that, last 300 ms later, answer ended 1 ms after that
@pytest.mark.parametrize(
    ("figure", "value"),
    [("ttft", 0.2), ("tpot", 0.05), ("e2e", 0.5), ("frame_gap", 0.1), ("prefill", 400), ("decode", 20)],
)
def test_each_figure_is_of_its_own_times(figure, value):
    spread = getattr(tally(*[record()] * 20), figure)()
    assert (spread.p50, spread.max) == (pytest.approx(value), pytest.approx(value))
    assert (spread.p95, spread.samples) == (None, 60 if figure == "frame_gap" else 20)


def test_percentiles_are_under_their_own_names():
    spread = summarize(range(1000, 0, -1))
    assert (spread.p50, spread.p95, spread.p99, spread.max, spread.samples) == (500, 950, 990, 1000, 1000)
    assert dataclasses.astuple(summarize([])) == (None, None, None, None, 0)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"t_first_ns": None}, "ttft tpot prefill decode"),
        ({"t_send_ns": None}, "ttft e2e prefill"),
        ({"t_last_ns": None}, "tpot e2e decode"),
        ({"completion_tokens": 1}, "tpot decode"),
        ({"prompt_tokens": None}, "prefill"),
        ({"t_last_ns": 10 * NS + 201 * MS}, "decode"),
        ({"cached_tokens": None}, ""),
        ({"outcome": Outcome.SHORT}, ""),
        ({"outcome": Outcome.CANCELLED}, "ttft tpot e2e prefill decode"),
    ],
)
def test_a_figure_that_cannot_be_told_is_no_sample_and_costs_no_other_figure(changes, missing):
    stage = tally(record(**changes))
    figures = ("ttft", "tpot", "e2e", "prefill", "decode")
    assert [name for name in figures if not getattr(stage, name)().samples] == missing.split()


def test_prefill_counts_the_whole_prompt_where_the_server_tells_nothing_of_its_cache():
    assert tally(record(cached_tokens=None)).prefill().max == pytest.approx(100 / 0.2)


@pytest.mark.parametrize(
    ("t_plan_ns", "inside"),
    [(5 * NS - 1, False), (5 * NS, True), (20 * NS - 1, True), (20 * NS, False)],
)
def test_the_window_takes_in_its_first_moment_and_leaves_out_its_last(t_plan_ns, inside):
    stage = tally(record(t_plan_ns=t_plan_ns), window=(5 * NS, 20 * NS))
    assert (stage.issued, stage.planned_in_window, stage.ended_in_window) == (1, inside, inside)
    assert len(stage.send_lag) == stage.ttft().samples == inside


def test_a_window_that_has_not_begun_holds_nothing_and_one_that_has_not_ended_is_open():
    assert tally(record(), window=(None, None)).planned_in_window == 0
    assert tally(record(), window=(10 * NS, None)).planned_in_window == 1


def test_send_lag_is_from_when_a_request_was_due_and_is_kept_of_failed_ones_too():
    stage = tally(record(), record(outcome=Outcome.TIMEOUT, t_send_ns=10 * NS + 3 * MS), record(t_send_ns=None))
    assert list(stage.send_lag) == pytest.approx([0.001, 0.003])


def test_requests_per_second_are_those_that_ended_well_and_goodput_those_within_every_limit():
    slow = record(t_first_ns=10 * NS + 400 * MS)
    outside, failed = record(t_plan_ns=1 * NS), record(outcome=Outcome.TIMEOUT)
    stage = tally(*[record()] * 6, slow, slow, outside, failed, slo=SloLimits(ttft_seconds=0.3), window=(5 * NS, None))
    assert (stage.issued, stage.request_rate(4), stage.goodput_rate(4)) == (10, 2, 1.5)
    assert stage.request_rate(0) is None
    assert stage.goodput_rate(0) is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SloLimits(ttft_seconds=0.2), True),
        (SloLimits(ttft_seconds=0.1999), False),
        (SloLimits(tpot_seconds=tpot_seconds(record())), True),
        (SloLimits(tpot_seconds=0.0499), False),
        (SloLimits(ttft_seconds=0.2, tpot_seconds=0.0499), False),
        (SloLimits(ttft_seconds=0.1999, tpot_seconds=0.05), False),
    ],
)
def test_a_limit_is_met_at_the_limit_itself_and_either_limit_can_be_missed(slo, met):
    stage = tally(*[record()] * 20, slo=slo)
    assert stage.slo_met() is met
    assert stage.goodput_rate(1) == 20 * met
    assert (stage.worst_slo() is None) is met


def test_a_request_whose_first_frame_is_not_known_misses_a_ttft_limit():
    assert tally(*[record(t_first_ns=None)] * 20, slo=SloLimits(ttft_seconds=9)).slo_met() is False


def test_the_missed_limit_is_that_of_decoding_where_only_decoding_misses():
    slo = SloLimits(ttft_seconds=0.3, tpot_seconds=0.04)
    assert tally(*[record()] * 200, slo=slo).worst_slo() == "tpot_seconds p95 0.05 > 0.04"
    half = [record()] * 10 + [record(completion_tokens=70)] * 10
    assert tally(*half, slo=slo).worst_slo() == "tpot_seconds > 0.04 in 10 of 20 requests"


@pytest.mark.parametrize(
    ("records", "ratio"),
    [
        ([], None),
        ([record(prompt_tokens=None)], None),
        ([record(), record(prompt_tokens=300, cached_tokens=None)], 0.05),
        ([record(outcome=Outcome.TRUNCATED)], 0.2),
    ],
)
def test_the_cached_share_is_over_the_tokens_of_all_prompts(records, ratio):
    assert tally(*records).cached_ratio() == ratio


def test_a_request_fills_the_kv_cache_with_its_prompt_and_its_answer():
    stage = tally(record(), record(completion_tokens=None), record(prompt_tokens=None), record(t_plan_ns=0))
    assert list(stage.kv_tokens) == [107, 100, 107]


@pytest.mark.parametrize(
    ("changes", "wasted"),
    [
        ({}, 0),
        ({"outcome": Outcome.SHORT}, 0),
        ({"outcome": Outcome.TIMEOUT}, 7),
        ({"outcome": Outcome.TIMEOUT, "completion_tokens": None}, 4),
        ({"outcome": Outcome.UNFINISHED, "completion_tokens": None, "frames": 0}, 0),
    ],
)
def test_tokens_are_wasted_by_requests_that_did_not_end_well(changes, wasted):
    assert tally(record(**changes)).wasted_tokens == wasted


def test_the_first_error_is_the_first_message_of_a_request_that_did_not_end_well():
    stage = tally(record(error="fine"), record(outcome=Outcome.TIMEOUT), record(outcome=Outcome.TIMEOUT, error="a"))
    stage.add(record(outcome=Outcome.TIMEOUT, error="b"))
    assert stage.first_error == "a"


def test_prompts_are_booked_whole_at_their_first_frame():
    book = TokenBook()
    for one in (record(), record(completion_tokens=None), record(prompt_tokens=None), record(outcome=Outcome.TIMEOUT)):
        book.add(one)
    book.add(record(prompt_tokens=None, frames=0))
    at = 10 * NS + 200 * MS
    assert book.prompt_rate(at, at + 100 * MS) == pytest.approx(200 / 0.1)
    assert (book.prompt_rate(0, at), book.prompt_rate(at + 100 * MS, 20 * NS), book.prompt_rate(at, at)) == (0, 0, None)
    assert book.output_rate(0, 20 * NS) is None, "one good answer came without a count"


def test_a_short_answer_is_booked():
    book = TokenBook()
    book.add(record(outcome=Outcome.SHORT))
    assert book.output_rate(0, 20 * NS) == pytest.approx(7 / 20)


def test_a_window_counts_only_whole_bins():
    book = TokenBook()
    book.add(record(frames=1, frame_gaps_us=()))
    first = 10 * NS + 200 * MS
    assert book.output_rate(first + 1, first + 199 * MS) is None
    assert book.output_rate(first - 99 * MS, first + 199 * MS) == pytest.approx(7 / 0.1)


def test_failed_requests_are_not_called_slow():
    slo = SloLimits(ttft_seconds=1.5)
    stage = tally(*[record()] * 20, *[record(outcome=Outcome.HTTP_ERROR)] * 20, slo=slo)
    assert (stage.slo_met(), stage.worst_slo()) == (False, None)
