"""A stage settles, is measured for long enough, and ends, by arguments alone."""

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
