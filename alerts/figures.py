"""Figures of one target under one fixed load, and what may be said about two or many of them. Pure.

A figure is the median over rounds of the same load, with the lowest and highest round beside it: the spread of the
machine itself. Two figures differ only when they differ by more than what is allowed *and* their rounds do not overlap.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist, median
from typing import Any, Final

__all__ = [
    "RULES",
    "Comparison",
    "Figure",
    "Figures",
    "Judgement",
    "Trend",
    "compare",
    "figure_of",
    "pool",
    "rule_of",
    "theil_sen",
]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: `value` is the median of its rounds, `low` and `high` their ends.

    Attributes:
        value: in the unit that its name ends with.
        low: lowest round; equal to `value` when there was one.
        high: highest round.
        samples: requests, or samples of a gauge, behind it.
    """

    value: float
    low: float
    high: float
    samples: int = 1

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"value": self.value, "low": self.low, "high": self.high, "samples": self.samples}


Figures = Mapping[str, Figure]
"""By name: a name in `RULES`, with `@N` behind it where it was measured at concurrency N."""


def figure_of(rounds: Iterable[float], samples: int | None = None) -> Figure | None:
    """The figure of one value per round; None without rounds."""
    values = [value for value in rounds if math.isfinite(value)]
    if not values:
        return None
    return Figure(median(values), min(values), max(values), len(values) if samples is None else samples)


def pool(first: Figures, second: Figures) -> Figures:
    """Two measurements of one server under one load as one, whose rounds are those of both.

    Speeds and times have the middle of both medians; of peaks and failures the higher counts.
    """
    pooled = {**first, **second}
    for name in first.keys() & second.keys():
        one, two = first[name], second[name]
        if "@" in name:
            middle = (one.value + two.value) / 2
            samples = one.samples + two.samples
            pooled[name] = Figure(middle, min(one.low, two.low), max(one.high, two.high), samples)
        else:
            pooled[name] = max(one, two, key=lambda figure: figure.value)
    return pooled


@dataclass(frozen=True, slots=True)
class FigureRule:
    """How a figure is judged.

    Attributes:
        higher_is_better: which way is worse.
        words: for people.
        judged: whether getting worse counts as a regression; others are only shown.
        absolute: any worsening counts, as of failures, whatever share is allowed.
    """

    higher_is_better: bool
    words: str
    judged: bool = True
    absolute: bool = False


RULES: Final[Mapping[str, FigureRule]] = {
    "prefill_tokens_per_second": FigureRule(higher_is_better=True, words="prefill"),
    "decode_tokens_per_second": FigureRule(higher_is_better=True, words="decode"),
    "ttft_seconds": FigureRule(higher_is_better=False, words="TTFT"),
    "output_tokens_per_second": FigureRule(higher_is_better=True, words="throughput", judged=False),
    "gpu_memory_peak_bytes": FigureRule(higher_is_better=False, words="GPU memory peak", judged=False),
    "process_memory_peak_bytes": FigureRule(higher_is_better=False, words="process memory peak", judged=False),
    "kv_cache_usage_peak_ratio": FigureRule(higher_is_better=False, words="KV cache peak", judged=False),
    "failures": FigureRule(higher_is_better=False, words="failures", absolute=True),
}
"""The fixed set. Memory is shown and not judged: a change of settings is often made to use more of it. Nor is
throughput: it is one figure of a whole level without a spread, and what moves it moves a speed per request too."""


TTFT_FLOOR_SECONDS: Final = 0.005
_FROM_TTFT: Final = ("ttft_seconds", "prefill_tokens_per_second")


def rule_of(name: str) -> FigureRule | None:
    """The rule of a figure by its full name, `decode_tokens_per_second@8`; None for a name of no known figure."""
    return RULES.get(name.partition("@")[0])


class Judgement(StrEnum):
    """What became of a figure."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure before and after.

    Attributes:
        name: full name.
        before: the baseline.
        after: what it is held against.
        change_ratio: (after - before) / before; None when before is 0.
        judgement: what is to be said of it.
        judged: whether it counts.
    """

    name: str
    before: Figure
    after: Figure
    change_ratio: float | None
    judgement: Judgement
    judged: bool

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "name": self.name,
            "before": self.before.document(),
            "after": self.after.document(),
            "change_ratio": self.change_ratio,
            "judgement": self.judgement.value,
            "judged": self.judged,
        }


def compare(before: Figures, after: Figures, *, allowed_ratio: float) -> list[Comparison]:
    """Hold `after` against `before`, for every known figure that both have.

    Times to the first token that differ by less than `TTFT_FLOOR_SECONDS` are the same, and so are the prefill speeds
    that follow from them: with short prompts that is what a connection and a scheduler take, not what a model does.

    Args:
        before: the baseline.
        after: the figures to judge.
        allowed_ratio: how much worse a figure may be, as a share of the baseline; what improves by less is the same.
    """
    found = []
    for name, old in before.items():
        rule, new = rule_of(name), after.get(name)
        if rule is None or new is None:
            continue
        change = (new.value - old.value) / abs(old.value) if old.value else None
        judgement = _judge(rule, old, new, allowed_ratio)
        base, at, level = name.partition("@")
        if base in _FROM_TTFT:
            was, now = (figures.get(f"ttft_seconds{at}{level}") for figures in (before, after))
            if was is not None and now is not None and abs(was.value - now.value) <= TTFT_FLOOR_SECONDS:
                judgement = Judgement.SAME
        found.append(Comparison(name, old, new, change, judgement, rule.judged))
    return found


def _judge(rule: FigureRule, old: Figure, new: Figure, allowed_ratio: float) -> Judgement:
    sign = 1.0 if rule.higher_is_better else -1.0
    gain = sign * (new.value - old.value)
    if gain == 0 or (not rule.absolute and abs(gain) <= allowed_ratio * abs(old.value)):
        return Judgement.SAME
    rose = new.value > old.value
    apart = new.low > old.high if rose else new.high < old.low
    if not apart and not rule.absolute:
        return Judgement.SAME
    return Judgement.BETTER if gain > 0 else Judgement.WORSE


@dataclass(frozen=True, slots=True)
class Trend:
    """A robust line through points: change of y per unit of x, with its interval."""

    slope: float
    low: float
    high: float
    points: int


def theil_sen(points: Sequence[tuple[float, float]], *, confidence: float = 0.99) -> Trend | None:
    """The median of all pairwise slopes, with Sen's interval from the variance of Kendall's S (ties accounted for).

    A third of the points may be wild without moving it. The interval takes the points' errors to be independent; its
    normal approximation is fair from about eight points on. Source: P. K. Sen, "Estimates of the regression coefficient
    based on Kendall's tau", JASA 63 (1968); variance with ties as in M. G. Kendall, "Rank Correlation Methods" (1970).

    Args:
        points: (x, y); points of equal x say nothing about the slope between them.
        confidence: of the two-sided interval, below 1.

    Returns:
        None when no two points differ in x.
    """
    slopes = sorted(
        (y2 - y1) / (x2 - x1) for index, (x1, y1) in enumerate(points) for x2, y2 in points[index + 1 :] if x2 != x1
    )
    if not slopes:
        return None
    n = len(points)
    tied = sum(t * (t - 1) * (2 * t + 5) for t in Counter(y for _, y in points).values())
    sigma = math.sqrt(max(0.0, (n * (n - 1) * (2 * n + 5) - tied) / 18))
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * sigma
    lower = max(0, math.floor((len(slopes) - reach) / 2) - 1)
    upper = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return Trend(median(slopes), slopes[lower], slopes[upper], n)
