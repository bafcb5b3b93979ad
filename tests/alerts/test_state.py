import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alerts.state import AlertState, Health, Patience, Sight, State, Transition, advance
from alerts.testing import read_points
from serving.clock import NS
from serving.errors import ConfigError, RecordError

INACTIVE, PENDING, FIRING, RESOLVED = State.INACTIVE, State.PENDING, State.FIRING, State.RESOLVED
MINUTE = 60 * NS


def sights_of(text):
    """1 present, 0 absent, _ no data, 9 error."""
    return [
        Sight.NO_DATA if point is None else {1: Sight.PRESENT, 0: Sight.ABSENT, 9: Sight.ERROR}[int(point)]
        for point in read_points(text)
    ]


def run(sights, patience, alert=None, start_ns=0, step_ns=MINUTE):
    alert = alert or AlertState()
    history = []
    for turn, sight in enumerate(sights):
        alert, _ = advance(alert, sight, start_ns + turn * step_ns, patience)
        history.append(alert)
    return history


@pytest.mark.parametrize(
    ("seen", "for_min", "keep_min", "show_min", "states"),
    [
        # A condition must last for `for`, measured from the first look that saw it.
        ("1 1 1 1", 3, 0, 15, "pending pending pending firing"),
        ("1 1 0 1", 3, 0, 15, "pending pending inactive pending"),
        # Without `for` the first sight fires.
        ("0 1 0", 0, 0, 15, "inactive firing resolved"),
        # keep_firing_for bridges flapping, and starts anew each time.
        ("1 0 1 0 0 0", 0, 2, 15, "firing firing firing firing firing resolved"),
        # A resolved alert is shown for a while and can begin again from there.
        ("1 0 0 0 0", 0, 0, 3, "firing resolved resolved resolved inactive"),
        ("1 0 1 1", 1, 0, 9, "pending inactive pending firing"),
        ("1 1 0 1 1", 1, 0, 9, "pending firing resolved pending firing"),
        # Absence keeps the state, and the time it lasts counts for nothing.
        ("1 1 _ _ 1 1", 2, 0, 15, "pending pending pending pending pending firing"),
        ("1 _x9 0", 0, 0, 15, "firing " * 10 + "resolved"),
        ("1 0 _ _ 0 0 0", 0, 2, 15, "firing firing firing firing firing firing resolved"),
        ("_ _ 0", 0, 0, 15, "inactive inactive inactive"),
        # An error is as good as no data.
        ("1 9 9 1 1", 1, 0, 15, "pending pending pending pending firing"),
        # All durations 0: the end is reported although nothing of it lasts.
        ("1 0", 0, 0, 0, "firing inactive"),
    ],
)
def test_states(seen, for_min, keep_min, show_min, states):
    patience = Patience(for_min * 60, keep_min * 60, show_min * 60)
    assert [alert.state.value for alert in run(sights_of(seen), patience)] == states.split()


def test_health_tells_looked_from_could_not_look():
    alert, _ = advance(AlertState(), Sight.NO_DATA, 0, Patience(), "target is down")
    assert (alert.health, alert.message) == (Health.UNKNOWN, "target is down")
    alert, _ = advance(alert, Sight.ERROR, 1, Patience(), "division by zero")
    assert (alert.health, alert.message) == (Health.ERR, "division by zero")
    alert, _ = advance(alert, Sight.ABSENT, 2, Patience())
    assert (alert.health, alert.message) == (Health.OK, "")


def test_every_change_is_reported_in_order():
    alert, first = advance(AlertState(), Sight.PRESENT, 5, Patience())
    assert first == (Transition(5, INACTIVE, PENDING), Transition(5, PENDING, FIRING))
    _, second = advance(alert, Sight.ABSENT, 6, Patience(show_resolved_s=0))
    assert second == (Transition(6, FIRING, RESOLVED), Transition(6, RESOLVED, INACTIVE))


def test_since_is_when_the_state_was_entered():
    history = run(sights_of("0 0 1 1 1"), Patience(for_s=120))
    assert [alert.since_ns for alert in history] == [0, 0, 2 * MINUTE, 2 * MINUTE, 4 * MINUTE]


def test_a_clock_that_steps_back_neither_fires_nor_fails():
    alert, _ = advance(AlertState(), Sight.PRESENT, 100 * MINUTE, Patience(for_s=60))
    alert, _ = advance(alert, Sight.PRESENT, 1 * MINUTE, Patience(for_s=60))
    assert (alert.state, alert.held_ns) == (PENDING, 0)


@pytest.mark.parametrize(
    "durations", [{"for_s": -1}, {"keep_firing_for_s": float("nan")}, {"show_resolved_s": float("inf")}]
)
def test_a_duration_that_is_none_is_refused(durations):
    with pytest.raises(ConfigError, match=next(iter(durations))):
        Patience(**durations)


def test_a_firing_alert_survives_a_restart_of_the_watch_and_the_pause_does_not_count():
    patience = Patience(for_s=120, keep_firing_for_s=120)
    before = run(sights_of("1 1 1 0 0"), patience)[-1]
    assert (before.state, before.held_ns) == (FIRING, MINUTE)
    after = AlertState.from_json(json.loads(json.dumps(before.to_json())))
    assert (after.state, after.health, after.since_ns) == (FIRING, Health.UNKNOWN, 2 * MINUTE)
    # Hours later the first look only begins to count again; the second completes keep_firing_for.
    later = run(sights_of("0 0"), patience, after, start_ns=500 * MINUTE)
    assert [alert.state for alert in later] == [FIRING, RESOLVED]


@pytest.mark.parametrize(
    "broken", [{}, {"state": "on", "since_ns": 1, "held_ns": 0}, {"state": "firing", "since_ns": None, "held_ns": "x"}]
)
def test_a_stored_alert_that_cannot_be_read_says_so(broken):
    with pytest.raises(RecordError, match="cannot be read"):
        AlertState.from_json(broken)


sight_lists = st.lists(st.sampled_from(list(Sight)), max_size=60)
patiences = st.builds(
    Patience,
    for_s=st.integers(0, 6).map(lambda minutes: minutes * 60.0),
    keep_firing_for_s=st.integers(0, 4).map(lambda minutes: minutes * 60.0),
    show_resolved_s=st.integers(0, 4).map(lambda minutes: minutes * 60.0),
)


@given(sight_lists, patiences)
def test_law_nothing_fires_before_the_condition_was_seen_for_long_enough(sights, patience):
    alert = AlertState()
    for turn, sight in enumerate(sights):
        alert, changes = advance(alert, sight, turn * MINUTE, patience)
        if any(change.state is FIRING for change in changes):
            looks = 1
            unbroken = 0
            while turn - looks >= 0 and sights[turn - looks] is not Sight.ABSENT:
                if sights[turn - looks] is Sight.PRESENT and sights[turn - looks + 1] is Sight.PRESENT:
                    unbroken += 1
                looks += 1
            assert sight is Sight.PRESENT
            assert unbroken * 60 >= patience.for_s


@given(sight_lists, patiences, st.sampled_from([Sight.NO_DATA, Sight.ERROR]), st.integers(1, 500))
def test_law_absence_changes_no_state_however_long_it_lasts(sights, patience, absence, looks):
    alert = ([AlertState(), *run(sights, patience)])[-1]
    after = run([absence] * looks, patience, alert, start_ns=len(sights) * MINUTE)[-1]
    assert (after.state, after.held_ns) == (alert.state, alert.held_ns)
    assert after.health is not Health.OK


@given(sight_lists, patiences, st.integers(0, 60))
def test_law_a_restart_of_the_watch_is_one_look_without_data(sights, patience, cut):
    left, right = sights[:cut], sights[cut:]
    middle = ([AlertState(), *run(left, patience)])[-1]
    restored = AlertState.from_json(middle.to_json())
    blinked, _ = advance(middle, Sight.NO_DATA, len(left) * MINUTE, patience)
    start_ns = (len(left) + 1) * MINUTE
    states = [alert.state for alert in run(right, patience, restored, start_ns)]
    assert states == [alert.state for alert in run(right, patience, blinked, start_ns)]


@given(sight_lists, patiences)
def test_law_the_same_looks_give_the_same_alert(sights, patience):
    assert run(sights, patience) == run(sights, patience)


@given(sight_lists, patiences)
def test_law_only_known_steps_are_taken(sights, patience):
    allowed = {
        (INACTIVE, PENDING),
        (PENDING, FIRING),
        (PENDING, INACTIVE),
        (FIRING, RESOLVED),
        (RESOLVED, INACTIVE),
        (RESOLVED, PENDING),
    }
    alert, changes = AlertState(), []
    for turn, sight in enumerate(sights):
        alert, new = advance(alert, sight, turn * MINUTE, patience)
        changes += new
    assert {(change.came_from, change.state) for change in changes} <= allowed
    assert all(before.state is after.came_from for before, after in pairwise(changes))
