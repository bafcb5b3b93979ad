"""Counts add up, percentiles are exact or absent, tokens are booked when they arrive."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.tally import SloLimits, StageTally, TokenBook, percentile, summarize, tpot_seconds, ttft_seconds
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
    assert tally(*[record()] * 50, slo=slo).worst_slo() == "ttft_seconds > 0.1 in 100% of requests"
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
