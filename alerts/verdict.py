"""What a judgement is made of: checks, findings, and the verdict that follows from checks.

The algebra is one sentence: a verdict is the worst of its checks, where fail is worse than inconclusive and that is
worse than pass; no checks at all is inconclusive, because nothing was asked and so nothing was shown.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from serving.errors import ConfigError

__all__ = ["Check", "Finding", "Ruling", "Severity", "Verdict", "compare", "judge"]

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        "==": lambda value, limit: value == limit,
        "!=": lambda value, limit: value != limit,
        "<=": lambda value, limit: value <= limit,
        "<": lambda value, limit: value < limit,
        ">=": lambda value, limit: value >= limit,
        ">": lambda value, limit: value > limit,
    }
)


class Ruling(StrEnum):
    """What one check, or all of them together, says."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    """Neither is shown: too little data, the client was the bottleneck, or a restart inside the window."""

    @property
    def exit_code(self) -> int:
        """What the command line returns: 0 pass, 1 fail, 3 inconclusive."""
        return {Ruling.PASS: 0, Ruling.FAIL: 1, Ruling.INCONCLUSIVE: 3}[self]


class Severity(StrEnum):
    """How soon somebody has to look."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Check:
    """One question with a limit and the answer that was measured.

    `value` and `limit` are in `unit`; None means not measured, or no limit known. `samples` is how many measurements
    stand behind `value`.
    """

    name: str
    outcome: Ruling
    value: float | None
    op: str
    limit: float | None
    unit: str
    samples: int

    def sentence(self) -> str:
        """The check in words, for the reason of a verdict."""
        wanted = "no limit is known" if self.limit is None else f"wanted {self.op} {_figure(self.limit)} {self.unit}"
        if self.value is None:
            return f"{self.name} was not measured ({wanted})"
        few = f"; {self.samples} samples do not decide it" if self.outcome is Ruling.INCONCLUSIVE else ""
        return f"{self.name} is {_figure(self.value)} {self.unit}, {wanted}{few}"

    def to_json(self) -> dict[str, Any]:
        """One element of `checks` in JSON output."""
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "value": self.value,
            "op": self.op,
            "limit": self.limit,
            "unit": self.unit,
            "samples": self.samples,
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a rule saw, with the numbers that show it and what to do next.

    `figures` are the evidence for programs: names carry their units. `labels` name the GPU or process, as in a series.
    """

    rule: str
    severity: Severity
    title: str
    evidence: str
    next_step: str
    t_ns: int
    signal: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    figures: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """One element of `findings` in JSON output."""
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "title": self.title,
            "evidence": self.evidence,
            "next_step": self.next_step,
            "t_ns": self.t_ns,
            "signal": self.signal or None,
            "labels": dict(self.labels),
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to the whole question, with its reason."""

    ruling: Ruling
    reason: str

    @property
    def exit_code(self) -> int:
        """What the command line returns."""
        return self.ruling.exit_code

    def to_json(self) -> dict[str, str]:
        """The two top-level fields `verdict` and `reason` of JSON output."""
        return {"verdict": self.ruling.value, "reason": self.reason}


def compare(
    name: str, value: float | None, op: str, limit: float | None, unit: str, *, samples: int, minimum_samples: int = 1
) -> Check:
    """Answer one check.

    Args:
        name: what is asked, `snake_case`.
        value: what was measured, in `unit`; None when it was not measured.
        op: one of `==`, `!=`, `<=`, `<`, `>=`, `>`, read as "value op limit passes".
        limit: what was asked for, in `unit`; None when nothing is known to compare with.
        unit: of both.
        samples: how many measurements stand behind `value`.
        minimum_samples: with fewer than this the check is inconclusive, whatever the value.

    Raises:
        ConfigError: `op` is no comparison, or a number is NaN or infinite.
    """
    if op not in _OPERATORS:
        raise ConfigError(f"check {name!r}: {op!r} is no comparison; use one of {', '.join(_OPERATORS)}")
    for what, number in (("value", value), ("limit", limit)):
        if number is not None and not math.isfinite(number):
            raise ConfigError(f"check {name!r}: the {what} is {number}; pass None for what was not measured")
    if value is None or limit is None or samples < minimum_samples:
        outcome = Ruling.INCONCLUSIVE
    else:
        outcome = Ruling.PASS if _OPERATORS[op](value, limit) else Ruling.FAIL
    return Check(name, outcome, value, op, limit, unit, samples)


def judge(checks: Iterable[Check]) -> Verdict:
    """The verdict that follows from `checks`: the worst of them; inconclusive when there are none.

    The reason names every check that has the deciding outcome, in the order given.
    """
    asked = tuple(checks)
    if not asked:
        return Verdict(Ruling.INCONCLUSIVE, "nothing was checked")
    for ruling in (Ruling.FAIL, Ruling.INCONCLUSIVE):
        deciding = [check.sentence() for check in asked if check.outcome is ruling]
        if deciding:
            return Verdict(ruling, "; ".join(deciding))
    return Verdict(Ruling.PASS, "the only check passed" if len(asked) == 1 else f"all {len(asked)} checks passed")


def _figure(number: float) -> str:
    return f"{number:.4g}" if abs(number) < 1e4 else f"{number:,.0f}"
