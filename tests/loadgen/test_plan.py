"""A stage settles, is measured for long enough, and ends, by arguments alone."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan import StagePacer, StagePhase, StagePolicy
from serving.clock import NS

POLICY = StagePolicy(min_seconds=10, max_seconds=60, settle_seconds=2, max_settle_seconds=20)


def drive(pacer, *, running, until, in_flight=4, requests_per_second=5):
    """Advance second by second; returns the phase at each."""
    phases = []
    for second in range(until):
        t_ns = second * NS
        pacer.on_in_flight(in_flight(second) if callable(in_flight) else in_flight)
        pacer.on_sample(running(second), t_ns)
        for _ in range(requests_per_second):
            pacer.on_request(t_ns)
        phases.append(pacer.advance(t_ns))
    return phases


def test_a_calm_stage_is_measured_from_its_third_sample_for_the_least_time():
    pacer = StagePacer(4, POLICY, 0)
    phases = drive(pacer, running=lambda _: 4, until=15)
    assert pacer.settled
    assert pacer.t_settled_ns == 2 * NS
    assert phases.index(StagePhase.DONE) == 12


def test_a_stage_is_not_measured_while_requests_in_flight_are_short_of_the_offer():
    pacer = StagePacer(4, POLICY, 0)
    drive(pacer, running=lambda _: 4, until=15, in_flight=lambda second: 3 if second < 10 else 4)
    assert pacer.t_settled_ns == 12 * NS


def test_a_stage_is_not_measured_while_requests_of_a_larger_one_are_in_flight():
    pacer = StagePacer(4, POLICY, 0)
    drive(pacer, running=lambda _: 4, until=15, in_flight=lambda second: 9 if second < 6 else 4)
    assert (pacer.t_settled_ns, pacer.overfull) == (8 * NS, False)


def test_a_stage_that_has_to_begin_with_too_many_in_flight_says_so():
    pacer = StagePacer(4, POLICY, 0)
    drive(pacer, running=lambda _: 4, until=25, in_flight=9)
    assert (pacer.settled, pacer.overfull) == (False, True)


def test_failed_scrapes_are_no_samples_of_the_window():
    pacer = StagePacer(4, POLICY, 0)
    drive(pacer, running=lambda second: 4 if second < 3 else None, until=30)
    assert pacer.phase is StagePhase.MEASURING


def test_a_stage_that_never_settles_is_measured_after_the_limit_and_says_so():
    pacer = StagePacer(8, POLICY, 0)
    drive(pacer, running=lambda second: 1 if second % 2 else 8, until=25, in_flight=8)
    assert not pacer.settled
    assert pacer.t_settled_ns == 20 * NS


def test_a_stage_past_the_limit_settles_below_what_is_offered():
    pacer = StagePacer(10, POLICY, 0)
    drive(pacer, running=lambda _: 8, until=5, in_flight=10)
    assert pacer.settled


def test_a_slow_server_gets_more_time_until_enough_requests_ended_and_no_more_than_the_limit():
    pacer = StagePacer(4, POLICY, 0)
    phases = drive(pacer, running=lambda _: 4, until=70, requests_per_second=0)
    assert phases.index(StagePhase.DONE) == 62


def test_requests_that_were_due_before_the_window_do_not_count():
    pacer = StagePacer(4, POLICY, 0)
    drive(pacer, running=lambda _: 4, until=4, requests_per_second=0)
    for _ in range(100):
        pacer.on_request(1 * NS)
    assert pacer.advance(30 * NS) is StagePhase.MEASURING


def test_failed_scrapes_do_not_settle_a_stage():
    pacer = StagePacer(4, POLICY, 0)
    drive(pacer, running=lambda _: None, until=10)
    assert pacer.phase is StagePhase.SETTLING


def test_progress_goes_from_nothing_to_one():
    pacer = StagePacer(4, POLICY, 0)
    assert pacer.progress(0) == 0.0
    drive(pacer, running=lambda _: 4, until=8)
    assert 0 < pacer.progress(8 * NS) < 1
    drive(pacer, running=lambda _: 4, until=15)
    assert pacer.progress(15 * NS) == 1.0


def test_shorter_stages_scale_their_parts():
    policy = StagePolicy().with_stage_seconds(8)
    assert (policy.min_seconds, policy.settle_seconds, policy.warmup_seconds) == (8, 2.0, 4.0)


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), max_size=200), st.integers(1, 20))
def test_phases_only_move_forward(samples, offered):
    order = [StagePhase.SETTLING, StagePhase.MEASURING, StagePhase.DONE]
    pacer = StagePacer(offered, POLICY, 0)
    reached = 0
    for second, running in enumerate(samples):
        pacer.on_in_flight(offered)
        pacer.on_sample(running, second * NS)
        pacer.on_request(second * NS)
        now = order.index(pacer.advance(second * NS))
        assert now >= reached
        reached = now


def measuring(policy=POLICY, *, offered=4):
    """A pacer whose window began at 2 s, so that nothing is counted yet."""
    pacer = StagePacer(offered, policy, 0)
    pacer.on_in_flight(offered)
    for second in range(3):
        pacer.on_sample(offered, second * NS)
    assert pacer.advance(2 * NS) is StagePhase.MEASURING
    return pacer


@pytest.mark.parametrize(
    ("offered", "samples", "requests", "second", "phase"),
    [
        (4, 8, 20, 12, "done"),
        (4, 8, 20, 11.999, "measuring"),
        (4, 7, 20, 12, "measuring"),
        (4, 8, 19, 12, "measuring"),
        (30, 8, 59, 12, "measuring"),
        (30, 8, 60, 12, "done"),
        (10, 8, 20, 12, "done"),
        (30, 0, 0, 61.999, "measuring"),
        (30, 0, 0, 62, "done"),
    ],
)
def test_a_window_ends_with_enough_time_samples_and_requests_or_at_its_limit(offered, samples, requests, second, phase):
    pacer = measuring(offered=offered)
    for _ in range(samples):
        pacer.on_sample(0, 3 * NS)
    for _ in range(requests):
        pacer.on_request(2 * NS)
    assert pacer.advance(round(second * NS)) == phase


def test_samples_and_requests_from_before_the_window_do_not_fill_it():
    pacer = StagePacer(4, POLICY, 0)
    drive(pacer, running=lambda second: 9 * (second % 2), until=20)
    assert pacer.phase is StagePhase.SETTLING
    pacer.advance(20 * NS)
    for _ in range(20):
        pacer.on_request(20 * NS)
    for number in range(8):
        assert pacer.advance(40 * NS) is StagePhase.MEASURING, number
        pacer.on_sample(4, 40 * NS)
    assert pacer.advance(40 * NS) is StagePhase.DONE


@pytest.mark.parametrize(
    ("settle_seconds", "second", "phase"),
    [(5, 4.999, "settling"), (5, 5, "measuring"), (0, 2, "measuring")],
)
def test_a_calm_server_is_watched_for_the_least_time_all_the_same(settle_seconds, second, phase):
    pacer = StagePacer(4, dataclasses.replace(POLICY, settle_seconds=settle_seconds), 0)
    pacer.on_in_flight(4)
    for sample in range(3):
        pacer.on_sample(4, sample * NS)
    assert pacer.advance(round(second * NS)) == phase
    assert pacer.settled is (phase == "measuring")


@pytest.mark.parametrize(
    ("offered", "samples", "calm"),
    [
        (4, [4, 4], False),
        (4, [4, 3, 4], True),
        (4, [4, 2, 4], False),
        (4, [0, 4, 4, 4], True),
        (4, [4, 4, 0, 4], False),
        (20, [20, 19, 20], True),
        (20, [20, 18, 20], False),
        (40, [40, 38, 40], True),
        (40, [40, 37, 40], False),
        (100, [100, 95, 98], True),
        (100, [100, 94, 98], False),
    ],
)
def test_three_samples_are_calm_within_one_request_or_five_percent(offered, samples, calm):
    pacer = StagePacer(offered, POLICY, 0)
    pacer.on_in_flight(offered)
    for running in samples:
        pacer.on_sample(running, NS)
    assert (pacer.advance(3 * NS) is StagePhase.MEASURING) is calm


@pytest.mark.parametrize("in_flight", [3, 5])
def test_requests_in_flight_that_leave_the_offer_begin_the_settling_anew(in_flight):
    pacer = StagePacer(4, POLICY, 0)
    pacer.on_in_flight(4)
    for _ in range(3):
        pacer.on_sample(4, NS)
    pacer.on_in_flight(in_flight)
    pacer.on_sample(4, 2 * NS)
    pacer.on_in_flight(4)
    for seen in range(3):
        assert pacer.advance(3 * NS) is StagePhase.SETTLING, seen
        pacer.on_sample(4, 3 * NS)
    assert pacer.advance(3 * NS) is StagePhase.MEASURING


@pytest.mark.parametrize(("in_flight", "overfull"), [(None, False), (3, False), (4, False), (5, True)])
def test_a_window_that_had_to_begin_is_overfull_with_more_in_flight_than_were_offered(in_flight, overfull):
    pacer = StagePacer(4, POLICY, 0)
    if in_flight is not None:
        pacer.on_in_flight(in_flight)
    assert pacer.advance(20 * NS - 1) is StagePhase.SETTLING
    assert pacer.advance(20 * NS) is StagePhase.MEASURING
    assert (pacer.settled, pacer.overfull) == (False, overfull)


def test_samples_of_the_stage_before_are_no_samples_of_this_one():
    pacer = StagePacer(4, POLICY, 10 * NS)
    pacer.on_in_flight(4)
    for _ in range(3):
        pacer.on_sample(4, 10 * NS - 1)
    assert pacer.advance(15 * NS) is StagePhase.SETTLING
    for _ in range(3):
        pacer.on_sample(4, 10 * NS)
    assert pacer.advance(15 * NS) is StagePhase.MEASURING


@pytest.mark.parametrize(("second", "share"), [(2, 0.0), (7, 0.5), (11.9, 0.99), (40, 0.99)])
def test_progress_is_the_share_of_the_least_time_and_never_whole_before_the_end(second, share):
    assert measuring().progress(round(second * NS)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("seconds", "lengths"),
    [(4, (4, 60, 1, 20, 2)), (30, (30, 120, 2, 60, 5)), (12, (12, 60, 2, 24, 5)), (8, (8, 60, 2, 20, 4))],
)
def test_the_lengths_of_a_stage_scale_within_bounds(seconds, lengths):
    made = StagePolicy().with_stage_seconds(seconds)
    named = (made.min_seconds, made.max_seconds, made.settle_seconds, made.max_settle_seconds, made.warmup_seconds)
    assert named == lengths
    assert (made.min_requests, made.requests_per_user, made.min_samples) == (20, 2, 8)
