"""The state machine of one rule: when something seen becomes an alert, and when it ends. Pure; time is an argument.

State and health are two axes. State is what we believe of the target:

    inactive --seen--> pending --seen for `for`--> firing --gone for `keep_firing_for`--> resolved --later--> inactive
                          |                                                                  |
                          +--gone--> inactive                                    seen again--+--> pending

Health is whether the last evaluation could be made: `ok`, `err` (the rule failed), or `unknown` (no data yet, or none
now). Absence of data changes health only. It never resolves an alert, never fires one, and the time it lasts counts
towards neither `for` nor `keep_firing_for`: a target that vanished has not recovered, and a condition nobody could
look at has not held. The same holds for the time in which the watch itself was down.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from serving.clock import NS
from serving.errors import ConfigError, RecordError

__all__ = ["AlertState", "Health", "Patience", "Sight", "State", "Transition", "advance"]


class State(StrEnum):
    """What is believed of the target."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Health(StrEnum):
    """Whether the last evaluation of the rule could be made."""

    UNKNOWN = "unknown"
    OK = "ok"
    ERR = "err"


class Sight(StrEnum):
    """What one evaluation saw: the condition is present, absent, or could not be looked at."""

    PRESENT = "present"
    ABSENT = "absent"
    NO_DATA = "no_data"
    ERROR = "error"


_WAITS_FOR = MappingProxyType(
    {State.PENDING: Sight.PRESENT, State.FIRING: Sight.ABSENT, State.RESOLVED: Sight.ABSENT}
)  # the sight that, held long enough, moves an alert on


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a condition must last, and be gone.

    `for_s` is the `for` of a rule file: how long the condition must have been seen before the alert fires. After it
    has been gone for `keep_firing_for_s` the alert is resolved, and it is shown as such for `show_resolved_s` so that
    a reader who looks every few minutes sees that it ended.
    """

    for_s: float = 0.0
    keep_firing_for_s: float = 0.0
    show_resolved_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("for_s", "keep_firing_for_s", "show_resolved_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value}; it must be a number of seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state. `came_from` is the state before it."""

    t_ns: int
    came_from: State
    state: State


@dataclass(frozen=True, slots=True)
class AlertState:
    """One rule's alert. Start with `AlertState()`, then replace it by what `advance` returns."""

    state: State = State.INACTIVE
    health: Health = Health.UNKNOWN
    since_ns: int | None = None
    """When this state was entered; None before the first evaluation."""
    held_ns: int = 0
    """How long the condition was seen without a break (pending), or was seen to be gone (firing, resolved)."""
    looked_ns: int | None = None
    """When the look that `held_ns` reaches up to was made; None when the time since then must not count."""
    message: str = ""
    """Why health is not ok."""

    def to_json(self) -> dict[str, Any]:
        """The whole alert, for a history; `from_json` reads it back."""
        return {
            "state": self.state.value,
            "health": self.health.value,
            "since_ns": self.since_ns,
            "held_ns": self.held_ns,
            "message": self.message,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AlertState":
        """What `to_json` wrote, as it is after a pause: time in which nobody looked counts for nothing.

        Raises:
            RecordError: `data` is not what `to_json` writes.
        """
        try:
            since_ns, held_ns = data["since_ns"], int(data["held_ns"])
            state = State(data["state"])
            return cls(state, Health.UNKNOWN, None if since_ns is None else int(since_ns), held_ns, None)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"a stored alert cannot be read ({error!r}): {data!r}") from error


def advance(
    alert: AlertState, sight: Sight, t_ns: int, patience: Patience, message: str = ""
) -> tuple[AlertState, tuple[Transition, ...]]:
    """The alert after one evaluation.

    Args:
        alert: as it was.
        sight: what the evaluation saw.
        t_ns: when it was made. A time before the previous evaluation counts as the same moment.
        patience: the rule's durations.
        message: why there is no data, or the error.

    Returns:
        The new alert, and the changes of state in order: more than one when a duration is 0.
    """
    since_ns = t_ns if alert.since_ns is None else alert.since_ns
    if sight in (Sight.NO_DATA, Sight.ERROR):
        health = Health.ERR if sight is Sight.ERROR else Health.UNKNOWN
        return replace(alert, health=health, since_ns=since_ns, looked_ns=None, message=message), ()

    alert = replace(alert, health=Health.OK, since_ns=since_ns, message="")
    if _WAITS_FOR.get(alert.state) is sight:
        unbroken_ns = 0 if alert.looked_ns is None else max(0, t_ns - alert.looked_ns)
        alert = replace(alert, held_ns=alert.held_ns + unbroken_ns, looked_ns=t_ns)
    else:
        alert = replace(alert, held_ns=0, looked_ns=None)

    transitions = []
    while (state := _next_state(alert, sight, patience)) is not alert.state:
        transitions.append(Transition(t_ns, alert.state, state))
        looked_ns = t_ns if _WAITS_FOR.get(state) is sight else None
        alert = replace(alert, state=state, since_ns=t_ns, held_ns=0, looked_ns=looked_ns)
    return alert, tuple(transitions)


def _next_state(alert: AlertState, sight: Sight, patience: Patience) -> State:
    """Where the alert goes, given how long it has waited; its own state when it stays."""
    match alert.state, sight:
        case ((State.INACTIVE | State.RESOLVED), Sight.PRESENT):
            return State.PENDING
        case State.PENDING, Sight.PRESENT if alert.held_ns >= patience.for_s * NS:
            return State.FIRING
        case State.PENDING, Sight.ABSENT:
            return State.INACTIVE
        case State.FIRING, Sight.ABSENT if alert.held_ns >= patience.keep_firing_for_s * NS:
            return State.RESOLVED
        case State.RESOLVED, Sight.ABSENT if alert.held_ns >= patience.show_resolved_s * NS:
            return State.INACTIVE
    return alert.state
