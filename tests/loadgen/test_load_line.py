"""The search finds the truth of modelled servers exactly, names what binds, and never asks for nonsense."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load_line import BoundBy, LoadLineSearch, StageObservation, did_hold, is_judged, over_limit
from serving.records import Outcome


def observe(offered, *, runs, kv_each=0.0, preempts=False, waiting=None, tokens=None, **more):
    running = min(offered, runs)
    usage = min(1.0, running * kv_each)
    return StageObservation(
        offered=offered,
        seconds=30.0,
        running=[running] * 10,
        waiting=[offered - running if waiting is None else waiting] * 10,
        kv_cache_usage_ratio=[usage] * 10 if kv_each else (),
        preemptions=3 if preempts and offered > runs else 0,
        output_tokens_per_second=tokens,
        outcomes={Outcome.OK: 100},
        **more,
    )


def run(search, server):
    tried, names = [], set()
    while (spec := search.next_stage()) is not None:
        assert spec.name not in names, "names are unique"
        assert (spec.offered in tried) is (spec.purpose == "repeat"), "a stage is asked for again only to repeat it"
        names.add(spec.name)
        tried.append(spec.offered)
        assert len(tried) < 40
        search.record(server(spec.offered))
    return tried, search.result()


def test_a_healthy_server_of_8_slots_is_measured_at_25_50_75_100_percent_past_it_and_at_9():
    tried, line = run(LoadLineSearch(8), lambda n: observe(n, runs=8))
    assert tried == [2, 4, 6, 8, 10, 9]
    assert (line.configured, line.measured, line.bound_by, line.limit_in_effect) == (8, 8, BoundBy.BATCH_SLOTS, True)


def test_a_limit_that_is_not_in_effect_is_said_to_be_so():
    tried, line = run(LoadLineSearch(8), lambda n: observe(n, runs=100))
    assert tried == [2, 4, 6, 8, 10]
    assert line.limit_in_effect is False
    assert line.bound_by is BoundBy.NOT_REACHED
    assert "not in effect" in line.next_step


def test_a_limit_that_more_ran_than_is_not_in_effect_also_where_nothing_past_it_held():
    def server(n):
        return observe(n, runs=n if n <= 8 else n - 1, waiting=0.0)

    tried, line = run(LoadLineSearch(8), server)
    assert tried == [2, 4, 6, 8, 10, 10, 9, 9], "weak stages are repeated: eight slots cannot be what held them up"
    assert (line.measured, line.bound_by, line.limit_in_effect) == (9, BoundBy.UNKNOWN, False), "nine ran of ten"


def test_a_small_kv_cache_binds_below_the_limit():
    tried, line = run(LoadLineSearch(48), lambda n: observe(n, runs=40, kv_each=0.0247, preempts=True))
    assert line.measured == 40
    assert line.bound_by is BoundBy.KV_CACHE
    assert "3 preemptions" in line.evidence
    assert "max_batch_size to 40" in line.next_step
    assert 48 in tried


def test_the_configured_stage_is_tried_even_when_the_first_stage_fails():
    tried, line = run(LoadLineSearch(8), lambda n: observe(n, runs=1, kv_each=0.95))
    assert tried == [2, 8, 1]
    assert (line.measured, line.bound_by) == (1, BoundBy.KV_CACHE)


def test_a_stage_that_failed_by_accident_below_a_limit_that_holds_does_not_end_the_climb():
    tried, line = run(LoadLineSearch(8), lambda n: observe(n, runs=2 if n == 4 else 8))
    assert tried == [2, 4, 8, 6, 10, 9]
    assert (line.measured, line.bound_by) == (8, BoundBy.BATCH_SLOTS)
    assert line.notes == ("4 did not hold although 8 did: the server is unstable",)


def test_slots_that_all_run_bind_even_where_the_engine_hides_its_queue():
    _, line = run(LoadLineSearch(4), lambda n: observe(n, runs=4, waiting=0.3 if n > 4 else 0))
    assert (line.measured, line.bound_by) == (4, BoundBy.BATCH_SLOTS)


def test_a_queue_that_only_a_larger_offer_shows_is_a_queue():
    def server(n):
        return observe(n, runs=12, waiting=max(0, n - 13) + 0.3 if n > 12 else 0)

    _, line = run(LoadLineSearch(None), server)
    assert (line.measured, line.bound_by) == (12, BoundBy.BATCH_SLOTS)


def test_a_front_end_that_is_busy_streaming_is_not_taken_for_a_token_budget():
    """As seen on vLLM with a model so small that its API server was the bottleneck."""

    def server(n):
        seen = {
            2: ([0, 2, 2, 1, 0, 0, 1, 0], [0] * 8),
            8: ([0, 0, 0, 1, 4, 2, 0, 1], [0, 0, 0, 0, 0, 5, 0, 0]),
        }.get(n, ([1] * 8, [0] * 8))
        outcomes = {Outcome.OK: 20}
        return StageObservation(n, 9.0, *seen, kv_cache_usage_ratio=[0.1] * 8, preemptions=0, outcomes=outcomes)

    _, line = run(LoadLineSearch(8), server)
    assert (line.measured, line.bound_by) == (1, BoundBy.UNKNOWN)
    assert "front end" in line.next_step


def test_a_stage_that_fails_without_a_queue_is_repeated_once_and_the_repetition_counts():
    dips = {4}

    def server(n):
        if n in dips:
            dips.discard(n)
            return observe(n, runs=2, waiting=0.0)
        return observe(n, runs=8)

    tried, line = run(LoadLineSearch(8), server)
    assert tried == [2, 4, 4, 6, 8, 10, 9]
    assert (line.measured, line.bound_by, line.notes) == (8, BoundBy.BATCH_SLOTS, ())


def test_a_limit_that_is_merely_short_of_running_requests_held_if_a_larger_offer_ran_as_many():
    """As seen where the client's machine was busy: 47.5 of 48 ran at 48 offered, and 48 at 49."""

    def server(n):
        return observe(n, runs=48 if n != 48 else 47, waiting=None if n > 48 else 0.0)

    tried, line = run(LoadLineSearch(48), server)
    assert tried == [12, 24, 36, 48, 48, 53, 50, 49]
    assert (line.measured, line.bound_by, line.limit_in_effect, line.notes) == (48, BoundBy.BATCH_SLOTS, True, ())


def test_a_stage_that_is_short_did_not_hold_where_no_larger_offer_ran_as_many():
    def server(n):
        return observe(n, runs=48 if n < 48 else 47, waiting=0.0)

    tried, line = run(LoadLineSearch(48), server)
    assert tried[:6] == [12, 24, 36, 48, 48, 53]
    assert (line.measured, line.bound_by) == (47, BoundBy.UNKNOWN)


def test_what_a_short_stage_is_short_of_is_told_by_the_larger_ones():
    def server(n):
        return observe(n, runs=n if n < 7 else 6, waiting=0.0 if n < 9 else 3.0, preempts=n > 8, kv_each=0.1)

    _, line = run(LoadLineSearch(12), server)
    assert (line.measured, line.bound_by) == (6, BoundBy.KV_CACHE)


def test_a_queue_for_prompts_is_no_full_cache_because_a_larger_offer_fills_it():
    def server(n):
        seen = observe(n, runs=n if n < 5 else n - 1, waiting=1.0 if n > 4 else 0.0, kv_each=0.05)
        return dataclasses.replace(seen, preemptions=9 if n > 8 else 0)

    _, line = run(LoadLineSearch(12), server)
    assert (line.measured, line.bound_by) == (4, BoundBy.TOKEN_BUDGET)


def test_a_stage_with_too_few_samples_is_repeated_and_then_ends_the_search_undecided():
    def server(n):
        seen = observe(n, runs=8)
        return seen if n <= 8 else dataclasses.replace(seen, running=(8,), waiting=(2,))

    tried, line = run(LoadLineSearch(8), server)
    assert tried == [2, 4, 6, 8, 10, 10]
    assert (line.measured, line.bound_by, line.limit_in_effect) == (8, BoundBy.UNKNOWN, None)
    assert "metrics did not answer" in line.next_step


def test_a_stage_that_began_with_too_many_in_flight_shows_nothing():
    seen = dataclasses.replace(observe(4, runs=2), overfull=True)
    assert not is_judged(seen)
    search = LoadLineSearch(8)
    search.record(seen)
    assert search.next_stage().name == "4 again"


def test_a_later_fuller_look_replaces_what_a_stage_showed_but_asks_for_no_more():
    search = LoadLineSearch(8)
    _, line = run(search, lambda n: observe(n, runs=8))
    search.amend(observe(8, runs=8, tokens=123.0))
    search.amend(observe(77, runs=8))
    assert search.next_stage() is None
    assert search.result() == line
    assert 77 not in search.seen


def test_known_slots_are_not_blamed_when_fewer_ran():
    prefill = run(LoadLineSearch(48, slots=48), lambda n: observe(n, runs=12, kv_each=0.01))[1]
    memory = run(LoadLineSearch(48, slots=48), lambda n: observe(n, runs=12, kv_each=0.08))[1]
    assert (prefill.measured, prefill.bound_by) == (12, BoundBy.TOKEN_BUDGET)
    assert (memory.measured, memory.bound_by) == (12, BoundBy.KV_CACHE)


def test_what_is_free_must_hold_one_more_request_or_the_kv_cache_binds():
    room = {"kv_capacity_tokens": 1000.0, "kv_each": 0.06}
    tight = run(LoadLineSearch(48, slots=48), lambda n: observe(n, runs=12, kv_tokens_needed=400.0, **room))[1]
    loose = run(LoadLineSearch(48, slots=48), lambda n: observe(n, runs=12, kv_tokens_needed=200.0, **room))[1]
    assert (tight.bound_by, loose.bound_by) == (BoundBy.KV_CACHE, BoundBy.TOKEN_BUDGET)


def test_what_is_kept_free_for_running_answers_is_not_free():
    room = {"kv_capacity_tokens": 1000.0, "kv_each": 0.06, "kv_tokens_needed": 200.0}
    search = LoadLineSearch(48, slots=48)
    _, line = run(search, lambda n: observe(n, runs=12, kv_tokens_reserved=100.0, **room))
    assert (line.measured, line.bound_by) == (12, BoundBy.KV_CACHE)


def test_gauges_that_stand_at_0_while_requests_are_answered_say_nothing():
    _, line = run(LoadLineSearch(8), lambda n: observe(n, runs=0, waiting=0.0))
    assert (line.measured, line.bound_by) == (None, BoundBy.UNKNOWN)
    assert line.evidence == "400 requests were answered while the server's gauges stood at 0 running and 0 waiting"
    assert "metrics page" in line.next_step


@pytest.mark.parametrize(
    ("kv_each", "tokens", "advice"),
    [
        (0.05, lambda n: 100.0 * n, "room to raise"),
        (0.12, lambda n: 100.0 * n, "nearly full"),
        (0.1, lambda n: 100.0 * n, "keep it"),
        (0.05, lambda n: 400.0 if n >= 4 else 100.0 * n, "did not grow from 4 to 8"),
    ],
)
def test_the_advice_at_full_slots_says_what_one_step_more_would_meet(kv_each, tokens, advice):
    _, line = run(LoadLineSearch(8), lambda n: observe(n, runs=8, kv_each=kv_each, tokens=tokens(n)))
    assert advice in line.next_step


@pytest.mark.parametrize("outcome", [Outcome.STREAM_ERROR, Outcome.HTTP_ERROR, Outcome.TRUNCATED, Outcome.TIMEOUT])
def test_failures_of_every_kind_that_the_server_answers_for_are_failures(outcome):
    seen = StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes={Outcome.OK: 50, outcome: 2}, first_error="boom")
    assert did_hold(seen) == (False, "2 requests failed")


@pytest.mark.parametrize("outcome", [Outcome.UNFINISHED, Outcome.CANCELLED, Outcome.CLIENT_ERROR])
def test_what_we_ended_ourselves_is_no_failure_of_the_server(outcome):
    seen = StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes={Outcome.OK: 50, outcome: 9})
    assert did_hold(seen)[0]


def test_one_request_that_met_a_full_kv_cache_or_memory_is_one_too_many():
    many = {Outcome.OK: 1000, Outcome.STREAM_ERROR: 1}
    assert not did_hold(StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes=many, kv_full_errors=1))[0]
    assert not did_hold(StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes=many, out_of_memory_errors=1))[0]


def test_a_client_that_falls_behind_ends_the_search_at_once():
    tried, _ = run(LoadLineSearch(8), lambda n: observe(n, runs=8, client_valid=n < 4))
    assert tried == [2, 4]


def test_requests_that_neither_run_nor_wait_point_at_the_front_end():
    _, line = run(LoadLineSearch(8), lambda n: observe(n, runs=min(n, 3), waiting=0.0))
    assert (line.measured, line.bound_by) == (3, BoundBy.UNKNOWN)
    assert "front end" in line.next_step


def test_a_clamped_server_is_batch_slots_at_what_it_really_runs():
    _, line = run(LoadLineSearch(16, slots=12), lambda n: observe(n, runs=12))
    assert (line.measured, line.bound_by) == (12, BoundBy.BATCH_SLOTS)
    assert "runs 12 at once, not 16" in line.next_step


def test_a_clamp_that_the_server_does_not_report_shows_as_a_plateau():
    _, line = run(LoadLineSearch(16), lambda n: observe(n, runs=12))
    assert (line.measured, line.bound_by) == (12, BoundBy.BATCH_SLOTS)


def test_waiting_with_room_everywhere_is_the_token_budget():
    def server(n):
        return observe(n, runs=n - (1 if n > 4 else 0), kv_each=0.01, waiting=1 if n > 4 else 0)

    _, line = run(LoadLineSearch(8), server)
    assert (line.measured, line.bound_by) == (4, BoundBy.TOKEN_BUDGET)


def test_error_events_of_a_full_kv_cache_are_kv_cache_and_not_errors():
    def server(n):
        bad = 50 if n > 3 else 0
        return StageObservation(
            n, 30.0, [n] * 10, [0] * 10, outcomes={Outcome.OK: 50, Outcome.STREAM_ERROR: bad}, kv_full_errors=bad
        )

    _, line = run(LoadLineSearch(8), server)
    assert (line.measured, line.bound_by) == (3, BoundBy.KV_CACHE)


def test_a_server_that_dies_ends_the_search_with_what_is_known():
    def server(n):
        return observe(n, runs=8, server_died=n >= 6)

    tried, line = run(LoadLineSearch(8), server)
    assert tried == [2, 4, 6]
    assert (line.measured, line.bound_by) == (4, BoundBy.ERRORS)
    assert "the server died" in line.evidence


def test_a_server_that_dies_for_want_of_memory_is_bound_by_it():
    def server(n):
        return observe(n, runs=8, server_died=n >= 6, died_of_memory=True)

    _, line = run(LoadLineSearch(8), server)
    assert (line.measured, line.bound_by) == (4, BoundBy.GPU_MEMORY)
    assert "the server died out of memory" in line.evidence
    assert "memory share" in line.next_step


def test_a_client_that_falls_behind_names_itself():
    _, line = run(LoadLineSearch(8), lambda n: observe(n, runs=8, client_valid=n < 6))
    assert line.bound_by is BoundBy.CLIENT


def test_without_a_limit_it_doubles_and_then_bisects():
    tried, line = run(LoadLineSearch(None), lambda n: observe(n, runs=11))
    assert tried == [1, 2, 4, 8, 16, 12, 10, 11]
    assert (line.configured, line.measured, line.bound_by) == (None, 11, BoundBy.BATCH_SLOTS)


def test_without_a_limit_it_stops_where_throughput_stops_growing():
    tried, line = run(LoadLineSearch(None), lambda n: observe(n, runs=999, tokens=min(n, 8) * 100.0))
    assert tried == [1, 2, 4, 8, 16, 32]
    assert line.bound_by is BoundBy.COMPUTE


def test_at_the_ceiling_tokens_that_grew_little_since_a_quarter_of_it_are_compute_also_where_steps_looked_uneven():
    rates = {1: 90.0, 2: 100.0, 4: 93.0, 8: 101.0, 16: 94.0, 32: 102.0}
    tried, line = run(LoadLineSearch(None, ceiling=32), lambda n: observe(n, runs=999, tokens=rates[n]))
    assert (tried[-1], line.measured, line.bound_by) == (32, 32, BoundBy.COMPUTE)
    growing = run(LoadLineSearch(None, ceiling=32), lambda n: observe(n, runs=999, tokens=90.0 * n))[1]
    assert growing.bound_by is BoundBy.NOT_REACHED


def test_nothing_recorded_is_unknown():
    line = LoadLineSearch(8).result()
    assert (line.measured, line.bound_by, line.limit_in_effect) == (None, BoundBy.UNKNOWN, None)


@pytest.mark.parametrize("limit", [0, -1, 4097])
def test_absurd_limits_are_refused(limit):
    with pytest.raises(ValueError, match="limit"):
        LoadLineSearch(limit)


@pytest.mark.parametrize(("limit", "over"), [(1, 3), (8, 10), (20, 22), (21, 24), (48, 53), (100, 110)])
def test_the_stage_past_the_limit(limit, over):
    assert over_limit(limit) == over


@given(truth=st.integers(1, 200), limit=st.integers(1, 200))
def test_the_line_of_any_server_is_found_exactly(truth, limit):
    tried, line = run(LoadLineSearch(limit), lambda n: observe(n, runs=truth))
    assert line.measured == min(truth, over_limit(limit))
    assert all(1 <= n <= over_limit(limit) for n in tried)
    assert line.limit_in_effect in (None, truth <= limit)


@given(truth=st.integers(1, 300))
def test_the_doubling_search_finds_any_line_below_its_ceiling(truth):
    _, line = run(LoadLineSearch(None, ceiling=256), lambda n: observe(n, runs=truth))
    assert line.measured == min(truth, 256)


@given(truth=st.integers(1, 64), slo=st.integers(0, 64))
def test_the_slo_line_is_exact_when_asked_for(truth, slo):
    _, line = run(LoadLineSearch(64, refine_slo=True), lambda n: observe(n, runs=truth, slo_met=n <= slo))
    assert line.measured == truth
    assert line.slo_measured == (min(truth, slo) or None)


@given(limit=st.integers(1, 200), truth=st.integers(1, 220))
def test_the_number_of_stages_left_is_an_upper_bound(limit, truth):
    search = LoadLineSearch(limit)
    left = search.stages_left()
    tried, _ = run(search, lambda n: observe(n, runs=truth))
    assert len(tried) <= left + 8
    assert search.stages_left() == 0


@pytest.mark.parametrize(
    ("seen", "held"),
    [
        (observe(8, runs=8), True),
        (observe(8, runs=8, waiting=0.4), True),
        (observe(8, runs=8, waiting=0.6), False),
        (observe(8, runs=7), False),
        (StageObservation(8, 30.0, (), ()), False),
        (StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes={Outcome.OK: 50}, preemptions=1), False),
        (StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes={Outcome.OK: 50}, preemptions=None), True),
        (StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes={Outcome.UNFINISHED: 8}), False),
        (StageObservation(8, 30.0, [8] * 9, [0] * 9), False),
        (StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes={Outcome.OK: 999, Outcome.HTTP_ERROR: 1}), True),
        (StageObservation(8, 30.0, [8] * 9, [0] * 9, outcomes={Outcome.OK: 50, Outcome.HTTP_ERROR: 1}), False),
        (StageObservation(8, 30.0, [7, 8, 8, 8], [2, 0, 0, 0], outcomes={Outcome.OK: 50}), False),
        (StageObservation(8, 30.0, [7, 8, 8, 8], [1, 0, 0, 0], outcomes={Outcome.OK: 50}), True),
    ],
)
def test_what_holding_means(seen, held):
    assert did_hold(seen)[0] is held
