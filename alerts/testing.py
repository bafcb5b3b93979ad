"""Series written by hand, for tests of rules and of the state machine.

The language, one word per stretch, words separated by blanks:

    7           one point of value 7
    _           one point missing          _x5      five points missing
    7x5         7 and then five more 7s
    0+10x5      0 and then five more, each 10 higher: 0 10 20 30 40 50
    50-10x5     50 and then five more, each 10 lower

Points are `interval_s` apart; a missing one takes its time too.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from serving.clock import NS
from serving.errors import ConfigError
from serving.records import Event
from serving.signals import Series

__all__ = ["RememberedPast", "read_points", "series"]

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_WORD = re.compile(rf"(?P<start>{_NUMBER}|_)(?:(?P<step>[-+]\d+(?:\.\d+)?(?:e[-+]?\d+)?)?x(?P<times>\d+))?")


def read_points(text: str) -> tuple[float | None, ...]:
    """The points that `text` stands for; None is a missing one.

    Raises:
        ConfigError: a word is not in the language.
    """
    points: list[float | None] = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None or (match["start"] == "_" and match["step"]):
            raise ConfigError(f"series {text!r}: {word!r} is not one of 7, _, _x5, 7x5, 0+10x5, 50-10x5")
        times = int(match["times"] or 0)
        if match["start"] == "_":
            points += [None] * max(times, 1)
        else:
            start, step = float(match["start"]), float(match["step"] or 0)
            points += [start + step * turn for turn in range(times + 1)]
    return tuple(points)


def series(
    signal: str,
    text: str,
    *,
    interval_s: float = 60.0,
    start_ns: int = 0,
    labels: Sequence[tuple[str, str]] = (),
) -> Series:
    """The series that `text` stands for, beginning at `start_ns`."""
    kept = [(turn, value) for turn, value in enumerate(read_points(text)) if value is not None]
    return Series(
        signal,
        tuple(start_ns + round(turn * interval_s * NS) for turn, _ in kept),
        tuple(value for _, value in kept),
        tuple(labels),
    )


class RememberedPast:
    """What a rule reads from, held in memory: whole series and the events beside them."""

    def __init__(self, whole: Iterable[Series] = (), events: Iterable[Event] = ()) -> None:
        self._whole = tuple(whole)
        self._events = tuple(sorted(events, key=lambda event: event.t_ns))

    def series(self, signal: str, start_ns: int, end_ns: int) -> tuple[Series, ...]:
        """All series of `signal`, cut to `start_ns <= t_ns <= end_ns`; those without a point in it are left out."""
        cut = []
        for one in self._whole:
            part = slice(bisect_left(one.t_ns, start_ns), bisect_right(one.t_ns, end_ns))
            if one.signal == signal and one.t_ns[part]:
                cut.append(replace(one, t_ns=one.t_ns[part], values=one.values[part]))
        return tuple(cut)

    def events(self, start_ns: int, end_ns: int) -> tuple[Event, ...]:
        """Events with `start_ns <= t_ns <= end_ns`, in time order."""
        return tuple(event for event in self._events if start_ns <= event.t_ns <= end_ns)

    def epoch_start_ns(self, t_ns: int) -> int | None:
        """The last restart at or before `t_ns`, else the first point of any series at or before it."""
        restarts = [event.t_ns for event in self._events if event.kind == "restart" and event.t_ns <= t_ns]
        firsts = [one.t_ns[0] for one in self._whole if one.t_ns and one.t_ns[0] <= t_ns]
        return max(restarts, default=min(firsts, default=None))
