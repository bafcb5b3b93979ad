"""Does a restart help? Judged from measurements before and after restarts that change nothing. Pure.

An engineer who restarts a slow server and finds it fast has seen three things at once: what ageing had cost, the luck
of two starts (the same server can start 10 % faster or slower), and whatever else the host did meanwhile. This module
takes them apart. The same prompts are measured in the order

    A1 restart B1 ages A2 restart B2 ages A3 ... restart BN ages A(N+1)

so that each start from the first restart on is seen fresh (B) and aged (A). Two quantities follow, in logarithms for
times and in bytes for memory, always "more is worse":

- decline: A(k+1) - B(k), within one start. The luck of that start is in both and cancels. If a server does not get
  worse within its starts, restarts cure nothing, however fast the one after the restart was.
- restored: what a restart takes back of it. Were that nothing, fresh starts would get worse from restart to restart by
  the whole decline. So it is the decline minus the climb from start to start, where the climb is the slope of a
  straight line through the starts' own levels (B(k) + A(k+1)) / 2. The luck of starts and slow changes of the host
  enter it only as scatter around that line. The mean of A(k) - B(k), the difference that one sees at restarts, carries
  the luck of two starts each time. It is reported, and has a say only in that restarts do harm: whoever claims that
  shows it at the restarts too.

Level and half difference of a start are the two strata of a split plot, and independent of each other when both
measurements have the same variance: R. A. Fisher, "The Design of Experiments" (1935); intervals are Student's t over
starts ("Student", Biometrika 6, 1908), that of a sum of two strata with Satterthwaite's degrees of freedom (Biometrics
Bulletin 2, 1946).

Assumptions: the load is the same whenever measured (where it was seen to differ, the pair is left out); declines of
different starts are independent and roughly normal (negative correlation, which stationary noise of the host brings,
makes the intervals wide rather than narrow); what recurs with the period of the cycles, such as a nightly job, is not
told from ageing, so draw the ages at random. Luck may have any distribution that is alike for all starts.

Within one pair of measurements the interval is that of the median difference over prompts, from order statistics
(W. R. Thompson, Annals of Mathematical Statistics 7, 1936): it knows the noise of single requests, not that of the
hour, and decides only where two cycles are all there is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Any, Final, Literal

from alerts.verdict import Ruling
from serving.errors import ConfigError

__all__ = [
    "METRICS",
    "Cycle",
    "CycleRow",
    "Doubt",
    "Interval",
    "Metric",
    "MetricBenefit",
    "RestartBenefit",
    "RestartVerdict",
    "Schedule",
    "Shift",
    "Sitting",
    "judge_restarts",
    "t_quantile",
]

MIB: Final = 2**20
HOUR_SECONDS: Final = 3600.0
CONFIDENCE: Final = 0.95
"""Of two-sided intervals. "At least half" is one-sided at the same level."""
RESTORED_WHOLE: Final = 0.8
"""A restart that takes back less than this share of the decline is a partial cure: the rest lives elsewhere."""
RESTORED_LEAST: Final = 0.5
SAFETY: Final = 0.8
"""Share of the time to the tolerated loss after which to restart."""
LOAD_RATIO: Final = 0.25
LOAD_REQUESTS: Final = 0.5
"""Two measurements were at one load when the requests running differ by no more than the larger of these two."""
AGE_RATIO: Final = 2.0
"""The start before the first restart counts among the others when its age is within this factor of theirs."""
MOST_CYCLES: Final = 50
"""More restarts than this are nobody's next step."""


class RestartVerdict(StrEnum):
    """What restarts do to one figure, or to the server."""

    CONFIRMED = "CONFIRMED"
    """It gets worse within each start and a restart takes that back; shown over three starts or more."""
    LIKELY = "LIKELY"
    """The same with two cycles that agree, or with "at least half" short of shown."""
    PARTIAL = "PARTIAL"
    """A restart takes back a part of what ageing costs, and a part worth having."""
    HARMFUL = "HARMFUL"
    """Each restart makes it worse."""
    CONSISTENT_WITH = "CONSISTENT_WITH"
    """Better after a restart, but the luck of a start, or an end of bad times, would look the same."""
    NO_EFFECT = "NO_EFFECT"
    """Nothing worth a restart happens within a start; or it does, and restarts do not take it back."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """Too few cycles, or too much noise for them."""


class Doubt(StrEnum):
    """Why a figure that was better after a restart is not taken to be better because of it."""

    FEW = "few"
    """There were one or two restarts."""
    SPAWN = "spawn"
    """It does get worse within starts, and luck differs so much between them that the rest stays open."""
    FIRST_START = "first_start"
    """Only the start before the first restart was worse, which may have been far older, or unlucky."""
    PEAKS = "peaks"
    """More requests ran at once while it aged than when it was fresh, and memory once taken may just be kept."""


OLDER: Final = (Doubt.FIRST_START, Doubt.PEAKS)
"""Doubts that more restarts of the same kind do not take away."""
CLAIMS: Final = (
    RestartVerdict.CONFIRMED,
    RestartVerdict.LIKELY,
    RestartVerdict.PARTIAL,
    RestartVerdict.HARMFUL,
    RestartVerdict.CONSISTENT_WITH,
)
"""In the order in which one figure's verdict goes before another's."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that can be judged; of all of them more is worse.

    Attributes:
        words: for people.
        is_ratio: judged by ratios, so that `material` is a share; by differences in bytes otherwise.
        material: the least decline over one ageing that is worth a restart.
    """

    words: str
    is_ratio: bool
    material: float


METRICS: Final[Mapping[str, Metric]] = {
    "decode_seconds_per_token": Metric("decode time per token", is_ratio=True, material=0.03),
    "prefill_seconds_per_token": Metric("prefill time per token", is_ratio=True, material=0.03),
    "ttft_seconds": Metric("TTFT", is_ratio=True, material=0.03),
    "gpu_memory_bytes": Metric("GPU memory", is_ratio=False, material=16.0 * MIB),
    "process_memory_bytes": Metric("the server's memory", is_ratio=False, material=16.0 * MIB),
    "shared_memory_bytes": Metric("shared memory (/dev/shm)", is_ratio=False, material=16.0 * MIB),
}
"""By name; `@N` may follow it where it was measured at N requests at once."""


@dataclass(frozen=True, slots=True)
class Sitting:
    """One measurement of a server, warm-up excluded.

    Attributes:
        figures: metric -> prompt -> value, in the unit that the metric's name ends with. The same prompt has the same
            name whenever it is asked; memory has one value, under any name.
        age_seconds: since the server was ready; None where nobody knows.
        age_requests: requests that it has served since then; None where nobody knows.
        running: requests running meanwhile, on average, those of others included; None where not seen.
        peak_running: most requests that ran at once since the server was ready; None where not seen.
    """

    figures: Mapping[str, Mapping[str, float]]
    age_seconds: float | None = None
    age_requests: int | None = None
    running: float | None = None
    peak_running: float | None = None


@dataclass(frozen=True, slots=True)
class Cycle:
    """One restart: measured before it, and again when the new start had warmed up."""

    before: Sitting
    after: Sitting


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its two-sided interval of confidence `CONFIDENCE` over `starts` starts of the server."""

    estimate: float
    low: float
    high: float
    starts: int

    def reversed(self) -> "Interval":
        """The same of the negative."""
        return Interval(-self.estimate, -self.high, -self.low, self.starts)


@dataclass(frozen=True, slots=True)
class Shift:
    """The difference between two measurements: median over the prompts in both, with the interval that those give.

    In ratios (0.1: a tenth more) or bytes. `low` and `high` are None with fewer than 6 prompts.
    """

    change: float
    low: float | None
    high: float | None
    prompts: int


@dataclass(frozen=True, slots=True)
class CycleRow:
    """One restart as seen in one metric.

    Attributes:
        age: of the start that it ended, seconds or requests as the clock is; None where unknown.
        before: median over prompts, in the metric's unit.
        after: the same after the restart.
        better: how much more there was before than after; None where the two do not compare.
        decline: how much worse the new start got afterwards; None where that was not measured or does not compare.
    """

    age: float | None
    before: float | None
    after: float | None
    better: Shift | None
    decline: Shift | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """When to restart until the cause is found, taking the decline to be steady.

    Attributes:
        unit: `seconds` or `requests` of age.
        advised: keeps the loss within what is tolerated even at the upper end of the decline's interval, with a margin.
        earliest: when the tolerated loss is reached at the upper end.
        latest: the same at the lower end; None where the lower end is no decline.
        cheapest: where restarts cost as much as the decline does, sqrt(2 C / c') (T. Huang et al., "Software
            rejuvenation", FTCS 1995); None where the cost of a restart is not known.
        tolerated: the loss, a ratio or bytes.
    """

    unit: str
    advised: float
    earliest: float
    latest: float | None
    cheapest: float | None
    tolerated: float


@dataclass(frozen=True, slots=True)
class MetricBenefit:
    """What restarts do to one metric. Declines and what is restored are ratios, or bytes for memory.

    Attributes:
        metric: its name.
        verdict: the answer.
        doubt: why it is no more than `CONSISTENT_WITH`; None with every other verdict.
        gets_worse: whether a decline within starts that is worth a restart is shown.
        decline: within one start over one ageing; None with fewer than two starts seen fresh and aged.
        restored: what a restart takes back of it; None with fewer than three such starts.
        restored_ratio: the latter over the former; None where there is no decline to speak of.
        at_restart: the plain mean over restarts of before minus after, for comparison.
        spawn_sd: how far starts of the same server lie apart, standard deviation around their trend.
        age: mean age at which a start was measured again, in the unit of the clock.
        more_cycles: how many more restarts would probably decide it; None where it is decided, or cannot be said.
        schedule: when to restart.
        rows: one for each restart.
        evidence: in a sentence.
    """

    metric: str
    verdict: RestartVerdict
    doubt: Doubt | None
    gets_worse: bool
    decline: Interval | None
    restored: Interval | None
    restored_ratio: float | None
    at_restart: Interval | None
    spawn_sd: float | None
    age: float | None
    more_cycles: int | None
    schedule: Schedule | None
    rows: tuple[CycleRow, ...]
    evidence: str


@dataclass(frozen=True, slots=True)
class RestartBenefit:
    """The answer.

    Attributes:
        verdict: that of `metric`.
        metric: the one that decides: with the strongest claim; the first one asked for where none gets worse.
        restarts: how many there were.
        metrics: all of them.
        sentence: the evidence.
        next_step: what to do.
        notes: what a reader must know.
    """

    verdict: RestartVerdict
    metric: str
    restarts: int
    metrics: tuple[MetricBenefit, ...]
    sentence: str
    next_step: str
    notes: tuple[str, ...] = field(default=())

    @property
    def ruling(self) -> Ruling:
        """Pass: nothing happens between restarts that needs one. Fail: the server gets worse, or restarts harm it."""
        if self.verdict in (RestartVerdict.CONSISTENT_WITH, RestartVerdict.INCONCLUSIVE):
            return Ruling.INCONCLUSIVE
        deciding = next(one for one in self.metrics if one.metric == self.metric)
        healthy = self.verdict is RestartVerdict.NO_EFFECT and not deciding.gets_worse
        return Ruling.PASS if healthy else Ruling.FAIL

    def to_json(self) -> dict[str, Any]:
        """For JSON output and records; absent figures are None."""
        return asdict(self) | {"verdict": self.verdict.value, "ruling": self.ruling.value}


def judge_restarts(
    cycles: Sequence[Cycle],
    *,
    closing: Sitting | None = None,
    metrics: Sequence[str] | None = None,
    clock: Literal["seconds", "requests"] = "seconds",
    tolerated_loss_ratio: float = 0.1,
    room_bytes: Mapping[str, float] | None = None,
    restart_cost_seconds: float | None = None,
) -> RestartBenefit:
    """Judge restarts in the order in which they were made.

    Minimum data: three restarts with a closing measurement for CONFIRMED, two for LIKELY; one can only be
    CONSISTENT_WITH. Claims are made per metric, without a correction for their number.

    Args:
        cycles: one for each restart.
        closing: the last start, measured once more when it had aged: it makes one more start that was seen twice.
        metrics: which to judge, the most important first; by default all that were measured, in the order of `METRICS`.
        clock: what age is counted in.
        tolerated_loss_ratio: loss of speed that a schedule of restarts is to stay within.
        room_bytes: memory metric -> bytes that it may still grow by.
        restart_cost_seconds: full service lost with each restart: down, start and warm-up together.

    Raises:
        ConfigError: a metric is not known, a figure is not finite, or a time is not above 0.
    """
    names = _names(cycles, closing) if metrics is None else tuple(metrics)
    for name in names:
        if name.partition("@")[0] not in METRICS:
            raise ConfigError(f"there is no metric {name!r} to judge restarts by; known are {', '.join(METRICS)}")
    if not names:
        raise ConfigError("nothing was measured before and after the restarts")
    notes: list[str] = []
    results = []
    for name in names:
        case = _Case(name, cycles, closing, clock)
        tolerated = tolerated_loss_ratio if case.rule.is_ratio else (room_bytes or {}).get(name)
        results.append(case.judge(tolerated, restart_cost_seconds))
        notes += [f"{case.words}: {note}" for note in case.notes]
    deciding = min(results, key=_rank)
    notes += [f"{one.evidence} ({one.verdict})" for one in results if one is not deciding and _rank(one) <= len(CLAIMS)]
    return RestartBenefit(
        verdict=deciding.verdict,
        metric=deciding.metric,
        restarts=len(cycles),
        metrics=tuple(results),
        sentence=deciding.evidence,
        next_step=_next_step(deciding),
        notes=tuple(notes),
    )


def _rank(one: MetricBenefit) -> int:
    """Where a metric stands when one has to decide: claims first, in their order, then a decline without a cure."""
    if one.verdict in CLAIMS:
        return CLAIMS.index(one.verdict)
    return len(CLAIMS) + (not one.gets_worse)


def _names(cycles: Sequence[Cycle], closing: Sitting | None) -> tuple[str, ...]:
    measured = dict.fromkeys(name for sitting in _in_order(cycles, closing) for name in sitting.figures)
    known = list(METRICS)
    return tuple(
        sorted(
            (name for name in measured if name.partition("@")[0] in METRICS),
            key=lambda name: known.index(name.partition("@")[0]),
        )
    )


def _in_order(cycles: Sequence[Cycle], closing: Sitting | None) -> list[Sitting]:
    order = [sitting for cycle in cycles for sitting in (cycle.before, cycle.after)]
    return order if closing is None else [*order, closing]


class _Case:
    """One metric over all measurements, in their order: start k is fresh in number 2k - 1 and aged in number 2k."""

    def __init__(self, name: str, cycles: Sequence[Cycle], closing: Sitting | None, clock: str) -> None:
        self.name = name
        self.rule = METRICS[name.partition("@")[0]]
        self.words = self.rule.words + (f" at {name.partition('@')[2]} at once" if "@" in name else "")
        self.clock = clock
        self.notes: list[str] = []
        self.sittings = _in_order(cycles, closing)
        self.restarts = len(cycles)
        self.values = self._comparable([self._read(sitting) for sitting in self.sittings])
        # Each prompt is held against its own middle, so that long and short ones count alike.
        middles = {
            prompt: median(values[prompt] for values in self.values if values)
            for prompt in next((values for values in self.values if values), {})
        }
        self.levels = [
            median(value - middles[prompt] for prompt, value in values.items()) if values else None
            for values in self.values
        ]
        self.material = math.log1p(self.rule.material) if self.rule.is_ratio else self.rule.material

    def _read(self, sitting: Sitting) -> dict[str, float]:
        figures = {}
        for prompt, value in sitting.figures.get(self.name, {}).items():
            if not math.isfinite(value) or value < 0 or (self.rule.is_ratio and value == 0):
                raise ConfigError(f"{self.name} of prompt {prompt!r} is {value}; leave out what was not measured")
            figures[prompt] = math.log(value) if self.rule.is_ratio else value
        return figures

    def _comparable(self, read: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
        """The values of prompts that were answered each time; a measurement that lacks half of all is left out."""
        least = len({prompt for values in read for prompt in values}) / 2
        whole = [values for values in read if len(values) > least]
        common = set(whole[0]).intersection(*whole[1:]) if whole else set()
        short = sum(0 < len(values) <= least for values in read)
        if short:
            self.notes.append(f"{short} of {len(read)} measurements left out: fewer than half of the prompts answered")
        return [
            {prompt: value for prompt, value in values.items() if prompt in common} if len(values) > least else {}
            for values in read
        ]

    # ---- pairs of measurements

    def _same_load(self, one: int, two: int) -> bool:
        loads = [self.sittings[place].running for place in (one, two)]
        if loads[0] is None or loads[1] is None:
            return True
        return abs(loads[0] - loads[1]) <= max(LOAD_REQUESTS, LOAD_RATIO * min(loads[0], loads[1]))

    def _worse(self, later: int, earlier: int) -> float | None:
        """How much higher the level of one measurement is than that of another; None where they do not compare."""
        if not 0 <= min(later, earlier) <= max(later, earlier) < len(self.sittings):
            return None
        high, low = self.levels[later], self.levels[earlier]
        if high is None or low is None or not self._same_load(later, earlier):
            return None
        return high - low

    def _shift(self, more: int, less: int) -> Shift | None:
        if self._worse(more, less) is None:
            return None
        differences = sorted(value - self.values[less][prompt] for prompt, value in self.values[more].items())
        low, high = _median_interval(differences)
        return Shift(self._shown(median(differences)), self._told(low), self._told(high), len(differences))

    def _age(self, place: int) -> float | None:
        sitting = self.sittings[place]
        return sitting.age_seconds if self.clock == "seconds" else sitting.age_requests

    # ---- units

    def _shown(self, amount: float) -> float:
        """A difference as a ratio, or in bytes."""
        return math.expm1(min(amount, 50.0)) if self.rule.is_ratio else amount

    def _told(self, amount: float | None) -> float | None:
        return None if amount is None else self._shown(amount)

    def _show(self, interval: Interval | None) -> Interval | None:
        if interval is None:
            return None
        ends = [self._shown(end) for end in (interval.estimate, interval.low, interval.high)]
        return Interval(ends[0], ends[1], ends[2], interval.starts)

    # ---- the judgement

    def judge(self, tolerated: float | None, cost_seconds: float | None) -> MetricBenefit:
        """The verdict and all that it rests on."""
        seen = [
            (start, worse)
            for start in range(1, self.restarts + 1)
            if (worse := self._worse(2 * start, 2 * start - 1)) is not None
        ]
        missing = sum(2 * start < len(self.sittings) for start in range(1, self.restarts + 1)) - len(seen)
        if missing:
            self.notes.append(f"{missing} starts are left out: not measured twice at the same load")
        declines = [worse for _, worse in seen]
        ages = [age for start, _ in seen if (age := self._age(2 * start)) is not None]
        decline = _interval(declines)
        strata = self._strata(seen, ages)
        at_restart = [
            worse for turn in range(self.restarts) if (worse := self._worse(2 * turn, 2 * turn + 1)) is not None
        ]
        rows = tuple(self._row(turn) for turn in range(self.restarts))
        verdict, doubt = self._verdict(rows, decline, strata, _interval(at_restart))
        if verdict in CLAIMS[:3] and not self.rule.is_ratio and self._had_peaks([start for start, _ in seen]):
            verdict, doubt = RestartVerdict.CONSISTENT_WITH, Doubt.PEAKS
        shown = decline is not None and decline.starts >= 3 and decline.low > self.material
        gets_worse = shown or verdict is RestartVerdict.LIKELY
        age = fmean(ages) if ages else None
        ratio = None
        if strata is not None and decline is not None and decline.estimate > self.material:
            ratio = strata.restored.estimate / decline.estimate
        undecided = verdict in (RestartVerdict.INCONCLUSIVE, RestartVerdict.CONSISTENT_WITH)
        return MetricBenefit(
            metric=self.name,
            verdict=verdict,
            doubt=doubt,
            gets_worse=gets_worse,
            decline=self._show(decline),
            restored=self._show(strata.restored) if strata is not None else None,
            restored_ratio=ratio,
            at_restart=self._show(_interval(at_restart)),
            spawn_sd=self._told(strata.spawn_sd) if strata is not None else None,
            age=age,
            more_cycles=self._more_cycles(declines, strata) if undecided and doubt not in OLDER else None,
            schedule=self._schedule(decline, age, tolerated, cost_seconds) if verdict in CLAIMS[:3] else None,
            rows=rows,
            evidence=self._evidence(verdict, doubt, gets_worse, rows, decline, strata, ratio, age),
        )

    def _row(self, turn: int) -> CycleRow:
        before, after = 2 * turn, 2 * turn + 1
        middle = [
            median(self.sittings[place].figures[self.name].values()) if self.values[place] else None
            for place in (before, after)
        ]
        return CycleRow(
            self._age(before),
            middle[0],
            middle[1],
            self._shift(before, after),
            self._shift(after + 1, after) if after + 1 < len(self.sittings) else None,
        )

    def _strata(self, seen: Sequence[tuple[int, float]], ages: Sequence[float]) -> "_Strata | None":
        """The climb from start to start beside the decline within; None with fewer than three starts or two declines.

        The start before the first restart was seen only aged. It counts where its age is like the others', with half of
        their decline taken off.
        """
        if len(seen) < 2:
            return None
        worse = [amount for _, amount in seen]
        points = [(float(start), self._level(2 * start - 1) + amount / 2) for start, amount in seen]
        first_age, first = self._age(0), self.levels[0]
        comparable = first_age is not None and ages and _alike(first_age, fmean(ages))
        if first is not None and comparable and all(self._same_load(0, 2 * start - 1) for start, _ in seen):
            points.insert(0, (0.0, first - fmean(worse) / 2))
        return _split(worse, points) if len(points) >= 3 else None

    def _level(self, place: int) -> float:
        level = self.levels[place]
        assert level is not None  # noqa: S101 # asked only where a difference was
        return level

    def _verdict(
        self,
        rows: Sequence[CycleRow],
        decline: Interval | None,
        strata: "_Strata | None",
        at_restart: Interval | None,
    ) -> tuple[RestartVerdict, Doubt | None]:
        first_stands_out = self._first_stands_out()
        if strata is not None and decline is not None and decline.starts >= 3:
            if strata.restored.high < -self.material and at_restart is not None and at_restart.high < 0:
                return RestartVerdict.HARMFUL, None
            if decline.low > self.material:
                verdict = self._cure(decline, strata)
                return verdict, Doubt.SPAWN if verdict is RestartVerdict.CONSISTENT_WITH else None
            if decline.high < self.material and not first_stands_out:
                return RestartVerdict.NO_EFFECT, None
        elif self.restarts >= 2 and self._both_agree(rows):
            return RestartVerdict.LIKELY, None
        if first_stands_out:
            return RestartVerdict.CONSISTENT_WITH, Doubt.FIRST_START
        if self._seems_better(rows):
            return RestartVerdict.CONSISTENT_WITH, Doubt.FEW
        return RestartVerdict.INCONCLUSIVE, None

    def _cure(self, decline: Interval, strata: "_Strata") -> RestartVerdict:
        """What restarts do about a decline that is shown."""
        share = strata.restored.estimate / decline.estimate
        if strata.above_half > 0:
            return RestartVerdict.CONFIRMED if share >= RESTORED_WHOLE else RestartVerdict.PARTIAL
        if strata.restored.low > 0 and strata.restored.estimate > self.material:
            return RestartVerdict.LIKELY if share >= RESTORED_WHOLE else RestartVerdict.PARTIAL
        if strata.below_half < 0:
            return RestartVerdict.NO_EFFECT
        return RestartVerdict.CONSISTENT_WITH if share >= RESTORED_LEAST else RestartVerdict.INCONCLUSIVE

    def _both_agree(self, rows: Sequence[CycleRow]) -> bool:
        """Every start got worse and every restart took it back, beyond the noise of prompts and by similar amounts.

        Luck would have to look like the decline each time; amounts within a factor of 2 of each other leave it little.
        """
        shifts = [shift for row in rows for shift in (row.better, row.decline) if shift is not None]
        if len(shifts) < 2 * len(rows):
            return False
        least = self._shown(self.material)
        amounts = [shift.change for shift in shifts]
        return max(amounts) <= 2 * min(amounts) and all((shift.low or 0.0) > least for shift in shifts)

    def _seems_better(self, rows: Sequence[CycleRow]) -> bool:
        """With one cycle or two: each restart was followed by something better, beyond the noise of prompts."""
        if not 1 <= self.restarts <= 2:
            return False
        least = self._shown(self.material)
        return all(row.better is not None and (row.better.low or 0.0) > least for row in rows)

    def _first_stands_out(self) -> bool:
        """The start before the first restart was worse than another start's luck explains (a prediction interval).

        It may be far older than those that follow, so this is where a decline slower than the experiment shows.
        """
        others = [self.levels[place] for place in range(1, len(self.sittings), 2) if self._same_load(0, place)]
        fresh = [level for level in others if level is not None]
        first = self.levels[0] if self.levels else None
        if first is None or len(fresh) < 3:
            return False
        reach = t_quantile(0.5 + CONFIDENCE / 2, len(fresh) - 1) * stdev(fresh) * math.sqrt(1 + 1 / len(fresh))
        return first - fmean(fresh) > max(reach, 2 * self.material)

    def _had_peaks(self, starts: Sequence[int]) -> bool:
        """Whether more ran at once while a start aged, so that memory taken once and kept would explain its growth."""
        for start in starts:
            fresh, aged = (self.sittings[place].peak_running for place in (2 * start - 1, 2 * start))
            if fresh is not None and aged is not None and aged > fresh + max(LOAD_REQUESTS, LOAD_RATIO * fresh):
                return True
        return False

    def _more_cycles(self, declines: Sequence[float], strata: "_Strata | None") -> int | None:
        """Restarts to add until intervals of the present scatter would decide; None where more would not soon."""
        have = len(declines)
        if have < 2:
            return 3 - self.restarts if self.restarts < 3 else None
        mean, scatter = fmean(declines), stdev(declines)
        spawn = strata.spawn_sd if strata is not None else 0.0
        for count in range(max(3, have + 1), MOST_CYCLES + 1):
            if t_quantile(0.5 + CONFIDENCE / 2, count - 1) * scatter / math.sqrt(count) >= abs(mean - self.material):
                continue
            error = math.hypot(scatter / 2 / math.sqrt(count), spawn / math.sqrt(count * (count * count - 1) / 12))
            if mean < self.material or t_quantile(CONFIDENCE, count - 2) * error < mean * (1 - RESTORED_LEAST):
                return count - have
        return None

    def _schedule(
        self, decline: Interval | None, age: float | None, tolerated: float | None, cost_seconds: float | None
    ) -> Schedule | None:
        if decline is None or not age or tolerated is None:
            return None
        estimate, low, high = (self._shown(end) / age for end in (decline.estimate, decline.low, decline.high))
        cheapest = None
        if cost_seconds is not None and self.clock == "seconds" and self.rule.is_ratio and estimate > 0:
            cheapest = math.sqrt(2 * cost_seconds / estimate)
        return Schedule(
            self.clock,
            SAFETY * tolerated / high,
            tolerated / high,
            tolerated / low if low > 0 else None,
            cheapest,
            tolerated,
        )

    # ---- words

    def _amount(self, amount: float, sign: str = "") -> str:
        """A difference (logarithm or bytes) in words."""
        return f"{self._shown(amount):{sign}.1%}" if self.rule.is_ratio else f"{amount / MIB:{sign},.0f} MiB"

    def _say(self, interval: Interval) -> str:
        estimate, low, high = (self._amount(end, "+") for end in (interval.estimate, interval.low, interval.high))
        return f"{estimate} ({low} to {high})"

    def _evidence(
        self,
        verdict: RestartVerdict,
        doubt: Doubt | None,
        gets_worse: bool,
        rows: Sequence[CycleRow],
        decline: Interval | None,
        strata: "_Strata | None",
        ratio: float | None,
        age: float | None,
    ) -> str:
        ageing = "" if age is None else f" in {_say_age(age, self.clock)}"
        if decline is None or strata is None or decline.starts < 3:
            told = [self._changes(row.better for row in rows), self._changes(row.decline for row in rows)]
            if not told[0]:
                return f"{self.words} was not measured before and after a restart at the same load"
            again = f"; starts changed by {told[1]}{ageing}" if told[1] else ""
            return f"{self.words}: before restarts against after them {told[0]}{again}"
        parts = [f"{self.words} changed by {self._say(decline)}{ageing} within each of {decline.starts} starts"]
        if verdict is RestartVerdict.HARMFUL:
            parts.append(f"each restart made it worse by {self._say(strata.restored.reversed())}")
        elif gets_worse:
            share = "" if ratio is None or ratio < 0 else f", {ratio:.0%} of it"
            parts.append(f"of which a restart took back {self._say(strata.restored)}{share}")
        elif verdict is RestartVerdict.NO_EFFECT:
            parts.append(f"which is less than the {self._amount(self.material)} that would be worth a restart")
        if doubt is Doubt.FIRST_START:
            above = self._level(0) - fmean(level for level in self.levels[1::2] if level is not None)
            parts.append(f"the start before the first restart was worse than fresh ones by {self._amount(above)}")
        elif doubt is Doubt.PEAKS:
            parts.append("while it aged more requests ran at once than when it was fresh")
        parts.append(f"starts differ among themselves by {self._amount(strata.spawn_sd)} (standard deviation)")
        return "; ".join(parts)

    def _changes(self, shifts: Iterable[Shift | None]) -> str:
        amounts = [shift.change for shift in shifts if shift is not None]
        return ", ".join(f"{one:+.1%}" if self.rule.is_ratio else f"{one / MIB:+,.0f} MiB" for one in amounts)


@dataclass(frozen=True, slots=True)
class _Strata:
    """Both strata of a split plot.

    Attributes:
        restored: decline minus climb.
        above_half: lower bound, one-sided, of what is restored above half of the decline.
        below_half: its upper bound.
        spawn_sd: scatter of starts around their line.
    """

    restored: Interval
    above_half: float
    below_half: float
    spawn_sd: float


def _split(declines: Sequence[float], points: Sequence[tuple[float, float]]) -> _Strata:
    """Decline within starts and the line through their levels `(start, level)`, taken together."""
    count, starts = len(declines), len(points)
    mean, error = fmean(declines), stdev(declines) / math.sqrt(count)
    middle_x, middle_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    climb = sum((x - middle_x) * (y - middle_y) for x, y in points) / spread
    spawn_sd = math.sqrt(sum((y - middle_y - climb * (x - middle_x)) ** 2 for x, y in points) / (starts - 2))
    climb_error = spawn_sd / math.sqrt(spread)

    def reach(share: float, level: float) -> float:
        """How far the interval of `share * decline - climb` goes."""
        parts = ((share * error) ** 2, climb_error**2)
        whole = sum(parts)
        if whole == 0.0:
            return 0.0
        freedom = whole**2 / (parts[0] ** 2 / (count - 1) + parts[1] ** 2 / (starts - 2))
        return t_quantile(level, max(1, math.floor(freedom))) * math.sqrt(whole)

    restored, around = mean - climb, reach(1.0, 0.5 + CONFIDENCE / 2)
    half = (1 - RESTORED_LEAST) * mean - climb
    half_reach = reach(1 - RESTORED_LEAST, CONFIDENCE)
    return _Strata(
        Interval(restored, restored - around, restored + around, starts), half - half_reach, half + half_reach, spawn_sd
    )


def _interval(values: Sequence[float]) -> Interval | None:
    """Student's interval of a mean; None with fewer than two values."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    around = t_quantile(0.5 + CONFIDENCE / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - around, mean + around, len(values))


def _median_interval(ordered: Sequence[float]) -> tuple[float | None, float | None]:
    """The interval of a median from order statistics, of confidence at least `CONFIDENCE`; none below 6 values."""
    count = len(ordered)
    outside, rank = 0.0, 0
    while (outside := outside + math.comb(count, rank) / 2**count) <= (1 - CONFIDENCE) / 2:
        rank += 1
    return (None, None) if rank == 0 else (ordered[rank - 1], ordered[count - rank])


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's distribution with a whole number of degrees of freedom, by bisection of its exact series.

    The series is M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.

    Args:
        probability: above 0 and below 1; the answer is within 1e6 of 0.
        freedom: 1 or more.
    """
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if _student_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for step in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    if not odd:
        return 0.5 + sine * total / 2
    return 0.5 + (angle + (sine * total if freedom > 1 else 0.0)) / math.pi


def _alike(one: float, two: float) -> bool:
    return min(one, two) > 0 and max(one, two) <= AGE_RATIO * min(one, two)


def _say_age(age: float, clock: str) -> str:
    if clock == "requests":
        return f"{age:,.0f} requests"
    if age >= 2 * 24 * HOUR_SECONDS:
        return f"{age / (24 * HOUR_SECONDS):.1f} days"
    if age >= 2 * HOUR_SECONDS:
        return f"{age / HOUR_SECONDS:.1f} h"
    return f"{age / 60:.0f} min" if age >= 120 else f"{age:.0f} s"


def _next_step(one: MetricBenefit) -> str:
    memory = not METRICS[one.metric.partition("@")[0]].is_ratio
    more = _say_more(one)
    match one.verdict:
        case RestartVerdict.CONFIRMED | RestartVerdict.LIKELY:
            cause = (
                "find what is not given back: let it age twice as long, a leak grows to twice as much, a cache or an "
                "allocator's high-water mark does not"
                if memory
                else "find what grows with the age of a start (memory, caches, fragmentation, queues) and report it"
            )
            return "; ".join(part for part in (cause, _say_schedule(one)) if part)
        case RestartVerdict.PARTIAL:
            rest = (
                "look for the rest outside the process: driver and clock of the cards, /dev/shm, what else runs there"
            )
            return "; ".join(part for part in (rest, _say_schedule(one)) if part)
        case RestartVerdict.HARMFUL:
            return (
                "do not restart on a schedule; look at what a restart leaves behind (/dev/shm, processes that stay, "
                "memory of the cards) and at what it throws away (warm caches)"
            )
        case RestartVerdict.CONSISTENT_WITH:
            return _say_doubt(one)
        case RestartVerdict.NO_EFFECT if one.gets_worse:
            return "leave the server running and look at its host and its load: what got worse outlives restarts"
        case RestartVerdict.NO_EFFECT:
            return "no restarts on a schedule; if it is slow after days, measure again with starts that are days old"
    return more


def _say_doubt(one: MetricBenefit) -> str:
    match one.doubt:
        case Doubt.FIRST_START:
            return (
                "let each start age as long as the first one had before it is measured again; bad luck of that one "
                "start, or an end of bad times, looks the same"
            )
        case Doubt.PEAKS:
            return "let it age under the load that it is measured with: memory once taken for a peak may just be kept"
    return f"{_say_more(one)}; until then the luck of a start looks the same"


def _say_more(one: MetricBenefit) -> str:
    if one.more_cycles is not None:
        return f"about {one.more_cycles} more restart{'' if one.more_cycles == 1 else 's'} would decide it"
    return "let each start age longer or ask more prompts each time, more restarts alone would not decide it soon"


def _say_schedule(one: MetricBenefit) -> str:
    plan = one.schedule
    if plan is None:
        return ""
    is_ratio = METRICS[one.metric.partition("@")[0]].is_ratio
    loss = f"{plan.tolerated:.0%}" if is_ratio else f"{plan.tolerated / MIB:,.0f} MiB"
    latest = "later or never" if plan.latest is None else _say_age(plan.latest, plan.unit)
    cheapest = "" if plan.cheapest is None else f", and cheapest every {_say_age(plan.cheapest, plan.unit)}"
    return (
        f"until then a restart every {_say_age(plan.advised, plan.unit)} keeps the loss under {loss} "
        f"(reached after {_say_age(plan.earliest, plan.unit)} to {latest}, if the decline is steady){cheapest}"
    )
