"""Rules: what is looked for in the past of one target. Pure over a `Past`; time is an argument.

These three are the naive first slice. They compare windows with fixed thresholds, and each says in its docstring what
would fool it. A rule answers with a `Look`: present with findings, absent, or no data with the reason. No data is an
answer of its own, because a rule that has not seen enough must not end an alert (see `alerts.state`).
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Protocol

from alerts.state import Patience, Sight
from alerts.verdict import Finding, Severity
from serving.clock import NS
from serving.errors import ConfigError
from serving.records import Event
from serving.signals import Series, continuous

__all__ = ["RULES", "DecodeSpeedDown", "Look", "MemoryOnlyGrows", "Past", "RestartCuredIt", "Rule", "make_rule"]

MIB = 2**20


class Past(Protocol):
    """What was recorded of one target."""

    def series(self, signal: str, start_ns: int, end_ns: int) -> Sequence[Series]:
        """The series of `signal` with points in `start_ns <= t_ns <= end_ns`: one per GPU or process, else one."""
        ...

    def events(self, start_ns: int, end_ns: int) -> Sequence[Event]:
        """Events with `start_ns <= t_ns <= end_ns`, in time order."""
        ...

    def epoch_start_ns(self, t_ns: int) -> int | None:
        """The last restart at or before `t_ns`, else the first thing recorded; None when nothing is."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """What one evaluation of a rule saw. `why` says what is missing when there is no data."""

    sight: Sight
    findings: tuple[Finding, ...] = ()
    why: str = ""


class Rule(Protocol):
    """A named question to a target's past, and how long its answer must hold."""

    @property
    def name(self) -> str:
        """`snake_case`, unique; the value of the label `rule`."""
        ...

    @property
    def patience(self) -> Patience:
        """How long the condition must last and be gone."""
        ...

    def look(self, past: Past, t_ns: int) -> Look:
        """Evaluate at `t_ns`, reading nothing later than it."""
        ...


class _Patient:
    """What all rules share: how long their condition must last, and be gone, are two of their parameters."""

    __slots__ = ()
    for_s: float
    keep_firing_for_s: float

    @property
    def patience(self) -> Patience:
        """How long the condition must last and be gone."""
        return Patience(self.for_s, self.keep_firing_for_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOnlyGrows(_Patient):
    """Memory of the server that rises, never falls back, and has no load to excuse it.

    Method: the window (the epoch after its warm-up, at most `window_s` of it) is cut into 12 equal blocks, and the
    lowest value of each block is its floor, so that peaks of single requests do not count. Reported when the floor
    rose by `growth_ratio` of its first value and by `growth_bytes`, gave back no more than `fall_ratio` of that on the
    way, and each third of the window brought at least a quarter of its fair share. The last condition is what a
    plateau and a single jump fail: caches fill and stop, leaks go on.

    Assumptions: the load of the window's second half (mean of `requests_running`) is not above the first half's by
    more than a tenth; growth under rising load is no data, not a finding. Signals: `process_anonymous_memory_bytes`
    per process and `gpu_memory_used_bytes` per GPU, each judged by itself.

    Fooled by: a cache that fills linearly for longer than the window; a leak slower than `growth_ratio` per window;
    a leak in a pool that was allocated beforehand.

    Minimum data: `minimum_s` after the warm-up, with points in at least 9 of the 12 blocks, the first and last
    included.

    Attributes:
        window_s: longest window, seconds.
        minimum_s: shortest window, seconds.
        warmup_s: left out at the start of an epoch, seconds.
        growth_ratio: least growth as a share of the first floor.
        growth_bytes: least growth, bytes.
        fall_ratio: most that may have been given back, as a share of the growth.
        for_s: `for`, seconds.
        keep_firing_for_s: `keep_firing_for`, seconds.
    """

    name: ClassVar[str] = "memory_only_grows"
    window_s: float = 6 * 3600.0
    minimum_s: float = 1800.0
    warmup_s: float = 300.0
    growth_ratio: float = 0.05
    growth_bytes: float = 64.0 * MIB
    fall_ratio: float = 0.1
    for_s: float = 300.0
    keep_firing_for_s: float = 1800.0

    def look(self, past: Past, t_ns: int) -> Look:
        """Evaluate at `t_ns`."""
        epoch_ns = past.epoch_start_ns(t_ns)
        if epoch_ns is None:
            return Look(Sight.NO_DATA, why="nothing is recorded yet")
        start_ns = max(epoch_ns + round(self.warmup_s * NS), t_ns - round(self.window_s * NS))
        if t_ns - start_ns < self.minimum_s * NS:
            return Look(
                Sight.NO_DATA,
                why=f"{_minutes(max(0, t_ns - start_ns))} since the warm-up, {_minutes(self.minimum_s * NS)} needed",
            )
        middle_ns = (start_ns + t_ns) // 2
        load = (_mean_running(past, start_ns, middle_ns), _mean_running(past, middle_ns, t_ns))
        judged = 0
        excused = False
        findings = []
        for signal in ("process_anonymous_memory_bytes", "gpu_memory_used_bytes"):
            for series in past.series(signal, start_ns, t_ns):
                floors = _floors(series, start_ns, t_ns)
                if floors is None:
                    continue
                judged += 1
                if not self._grows(floors):
                    continue
                if load[0] is None or load[1] is None or load[1] > 1.1 * load[0] + 0.1:
                    excused = True
                    continue
                findings.append(self._finding(series, floors, (load[0], load[1]), t_ns - start_ns, t_ns))
        if findings:
            return Look(Sight.PRESENT, tuple(findings))
        if excused:
            return Look(Sight.NO_DATA, why="memory grows, but the load is unknown or grew with it")
        if not judged:
            return Look(Sight.NO_DATA, why="no process or GPU memory was sampled throughout the window")
        return Look(Sight.ABSENT)

    def _grows(self, floors: Sequence[float]) -> bool:
        growth = floors[-1] - floors[0]
        if growth < max(self.growth_bytes, self.growth_ratio * floors[0]):
            return False
        fallen = sum(max(0.0, floors[turn] - floors[turn + 1]) for turn in range(11))
        thirds = (floors[4] - floors[0], floors[8] - floors[4], floors[11] - floors[8])
        return fallen <= self.fall_ratio * growth and min(thirds) >= growth / 12

    def _finding(
        self, series: Series, floors: Sequence[float], load: tuple[float, float], window_ns: int, t_ns: int
    ) -> Finding:
        growth = floors[-1] - floors[0]
        # The first and the last floor are the lowest of blocks that begin 11 of the window's 12 apart.
        seconds = window_ns / NS * 11 / 12
        hours = seconds / 3600
        on_gpu = series.signal.startswith("gpu_")
        what = f"{'GPU memory' if on_gpu else 'memory of the server'}{_labelled(series)}"
        return Finding(
            rule=self.name,
            severity=Severity.WARNING,
            title=f"{what} only grows",
            evidence=(
                f"from {floors[0] / MIB:,.0f} to {floors[-1] / MIB:,.0f} MiB (+{growth / MIB:,.0f} MiB, "
                f"+{growth / floors[0]:.0%}) in {hours:.1f} h, {growth / MIB / hours:,.0f} MiB/h, with no plateau, "
                f"while requests running went from {load[0]:.1f} to {load[1]:.1f} on average"
            ),
            next_step=(
                "see whether it stops when traffic does: if so, divide it by the requests served and look for what "
                "keeps them; if a cache of known size is filling, raise growth_bytes above that size; plan a restart "
                "before the limit is reached"
            ),
            t_ns=t_ns,
            signal=series.signal,
            labels=series.labels,
            figures=(
                ("first_bytes", floors[0]),
                ("last_bytes", floors[-1]),
                ("growth_bytes", growth),
                ("growth_ratio", growth / floors[0]),
                ("window_seconds", window_ns / NS),
                ("growth_bytes_per_second", growth / seconds),
                ("running_first_half", load[0]),
                ("running_second_half", load[1]),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeedDown(_Patient):
    """Tokens per second of one request, now against the first half hour after the start, at similar load.

    Method: speed is the increase of `generation_tokens_total` divided by the time integral of `requests_running`.
    Time is cut into minutes, and a minute counts when at least half a request ran in it. The recent speed is taken
    over the last `recent_s`, the baseline over those minutes of the epoch's first `baseline_s` in which the load was
    within `load_ratio` of the recent one. Reported when both halves of the recent stretch are slower than the
    baseline by `slower_ratio`: a dip that is over no longer counts.

    Assumptions: prompts and answers are about as long as they were, because running includes requests that are still
    in prefill; the first half hour was a normal one.

    Fooled by: a change of prompt length or of cache hits; a first half hour that was slow or fast for its own reasons;
    an engine that counts tokens only when a request ends, when requests last longer than a few minutes.

    Minimum data: the epoch is `baseline_s + recent_s` old, with half of the recent stretch busy and as many minutes of
    the baseline at similar load.

    Attributes:
        baseline_s: length of the baseline, seconds.
        recent_s: length of the recent stretch, seconds.
        slower_ratio: least loss, as a share of the baseline.
        load_ratio: how far the load may differ, as a share of the recent load (but always half a request).
        for_s: `for`, seconds; the recent stretch is seen to be slow when its second half is, so that the alert fires
            after `recent_s / 2 + for_s` of slowness at the earliest and `recent_s + for_s` at the latest.
        keep_firing_for_s: `keep_firing_for`, seconds.
    """

    name: ClassVar[str] = "decode_speed_down"
    baseline_s: float = 1800.0
    recent_s: float = 600.0
    slower_ratio: float = 0.2
    load_ratio: float = 0.25
    for_s: float = 300.0
    keep_firing_for_s: float = 600.0

    def look(self, past: Past, t_ns: int) -> Look:
        """Evaluate at `t_ns`."""
        epoch_ns = past.epoch_start_ns(t_ns)
        if epoch_ns is None:
            return Look(Sight.NO_DATA, why="nothing is recorded yet")
        baseline_end_ns = epoch_ns + round(self.baseline_s * NS)
        recent_ns = t_ns - round(self.recent_s * NS)
        if recent_ns < baseline_end_ns:
            needed_ns = (self.baseline_s + self.recent_s) * NS
            return Look(Sight.NO_DATA, why=f"{_minutes(t_ns - epoch_ns)} since the start, {_minutes(needed_ns)} needed")
        recent = _busy(_work(past, recent_ns, t_ns))
        if sum(piece.seconds for piece in recent) < self.recent_s / 2:
            return Look(Sight.NO_DATA, why="too little decoding in the recent stretch to measure its speed")
        baseline = _similar(_busy(_work(past, epoch_ns, baseline_end_ns)), _load(recent), self.load_ratio)
        if sum(piece.seconds for piece in baseline) < self.recent_s / 2:
            return Look(Sight.NO_DATA, why=f"no baseline at a load near {_load(recent):.1f} requests running")
        then, now = _speed(baseline), _speed(recent)
        if then <= 0:
            return Look(Sight.NO_DATA, why="no token was counted in the baseline")
        middle_ns = (recent_ns + t_ns) // 2
        halves = (
            [piece for piece in recent if piece.start_ns < middle_ns],
            [piece for piece in recent if piece.start_ns >= middle_ns],
        )
        if any(half and _speed(half) > (1 - self.slower_ratio) * then for half in halves):
            return Look(Sight.ABSENT)
        finding = Finding(
            rule=self.name,
            severity=Severity.WARNING,
            title="decoding is slower than after the start",
            evidence=(
                f"{now:.1f} tokens/s per running request over the last {_minutes(self.recent_s * NS)}, "
                f"{then:.1f} in the first {_minutes(self.baseline_s * NS)} of this epoch ({now / then - 1:+.0%}), "
                f"at {_load(recent):.1f} and {_load(baseline):.1f} requests running"
            ),
            next_step=(
                "compare prompt lengths, preemptions and GPU clocks with those after the start; if they are alike, "
                "restart one replica and see whether the speed comes back"
            ),
            t_ns=t_ns,
            signal="generation_tokens_total",
            figures=(
                ("baseline_tokens_per_second", then),
                ("recent_tokens_per_second", now),
                ("change_ratio", now / then - 1),
                ("baseline_running", _load(baseline)),
                ("recent_running", _load(recent)),
            ),
        )
        return Look(Sight.PRESENT, (finding,))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCuredIt(_Patient):
    """A restart after which memory is lower or decoding faster than in the half hour before it.

    Method: for each restart of the last `report_s`, the `compare_s` before it are compared with the `compare_s` that
    begin `settle_s` after it. Memory: sum over processes, and each GPU, of the medians; it must have fallen by
    `better_ratio` and by `growth_bytes`, while no fewer than three quarters as many requests ran. Speed: tokens per
    second of one request, as in `decode_speed_down`, at similar load; it must have risen by `better_ratio`.

    Assumptions: nothing but the restart changed. A deploy with the restart breaks that; the finding names it when an
    event says so.

    Fooled by: a cache that is cold for longer than `settle_s` looks like memory won back; the spread of speed between
    two starts of the same server can be several percent, so one restart proves little. One restart is a hint: it takes
    two that agree, and a decline before each, to call it a cure.

    Minimum data: half of either stretch sampled, and no second restart in them.

    Attributes:
        report_s: how long after a restart the finding stays, seconds.
        compare_s: length of each stretch, seconds.
        settle_s: left out after the restart, seconds.
        better_ratio: least improvement.
        growth_bytes: least fall of memory, bytes.
        load_ratio: how far the load may differ for speeds to be compared.
        for_s: `for`, seconds.
        keep_firing_for_s: `keep_firing_for`, seconds.
    """

    name: ClassVar[str] = "restart_cured_it"
    report_s: float = 24 * 3600.0
    compare_s: float = 1800.0
    settle_s: float = 300.0
    better_ratio: float = 0.2
    growth_bytes: float = 64.0 * MIB
    load_ratio: float = 0.25
    for_s: float = 0.0
    keep_firing_for_s: float = 0.0

    def look(self, past: Past, t_ns: int) -> Look:
        """Evaluate at `t_ns`."""
        events = past.events(t_ns - round((self.report_s + self.compare_s) * NS), t_ns)
        restarts = [event for event in events if event.kind == "restart"]
        recent = [event for event in restarts if event.t_ns >= t_ns - self.report_s * NS]
        if not recent:
            return Look(Sight.ABSENT)
        open_because = ""
        judged = False
        findings: list[Finding] = []
        for restart in recent:
            before = (restart.t_ns - round(self.compare_s * NS), restart.t_ns - 1)
            after_ns = restart.t_ns + round(self.settle_s * NS)
            after = (after_ns, after_ns + round(self.compare_s * NS))
            if after[1] > t_ns:
                open_because = f"{_minutes(after[1] - t_ns)} until the last restart can be judged"
                continue
            if any(other.t_ns != restart.t_ns and before[0] <= other.t_ns <= after[1] for other in restarts):
                open_because = "two restarts lie too close together to judge either"
                continue
            gains = tuple(self._gains(past, before, after))
            if not gains:
                open_because = "too little was sampled around the restart"
                continue
            judged = True
            beside = [
                event
                for event in events
                # That the server was away meanwhile is the restart itself.
                if event.kind not in ("restart", "up", "down") and before[0] <= event.t_ns <= after[1]
            ]
            findings += [self._finding(gain, restart, beside, t_ns) for gain in gains if gain.better]
        if findings:
            return Look(Sight.PRESENT, tuple(findings))
        return Look(Sight.ABSENT) if judged else Look(Sight.NO_DATA, why=open_because)

    def _gains(self, past: Past, before: tuple[int, int], after: tuple[int, int]) -> Iterator["_Gain"]:
        load_before, load_after = _mean_running(past, *before), _mean_running(past, *after)
        if load_before is not None and load_after is not None:
            load, same_load = (load_before, load_after), load_after >= 0.75 * load_before
            for signal in ("process_anonymous_memory_bytes", "gpu_memory_used_bytes"):
                was, now = _medians(past, signal, before), _medians(past, signal, after)
                for labels in was.keys() & now.keys():
                    won = was[labels] - now[labels]
                    better = same_load and won >= max(self.growth_bytes, self.better_ratio * was[labels])
                    yield _Gain(signal, labels, was[labels], now[labels], load, better=better)
        slow, fast = _busy(_work(past, *before)), _busy(_work(past, *after))
        if slow and fast:
            slow, fast = _similar(slow, _load(fast), self.load_ratio), _similar(fast, _load(slow), self.load_ratio)
        if min(sum(piece.seconds for piece in side) for side in (slow, fast)) >= self.compare_s / 6:
            was_speed, now_speed = _speed(slow), _speed(fast)
            better = now_speed > 0 and now_speed >= (1 + self.better_ratio) * was_speed
            yield _Gain("generation_tokens_total", (), was_speed, now_speed, (_load(slow), _load(fast)), better=better)

    def _finding(self, gain: "_Gain", restart: Event, beside: Sequence[Event], t_ns: int) -> Finding:
        if gain.signal == "generation_tokens_total":
            title, unit, scale = "decoding became faster with the restart", "tokens/s per running request", 1.0
        else:
            memory = "GPU memory" if gain.signal.startswith("gpu_") else "memory of the server"
            title, unit, scale = f"{memory} became less with the restart", "MiB", float(MIB)
        also = "".join(f"; {event.kind} {event.text!r} fell into the same time" for event in beside)
        change = f" ({gain.now / gain.was - 1:+.0%})" if gain.was else ""
        return Finding(
            rule=self.name,
            severity=Severity.INFO,
            title=title,
            evidence=(
                f"{gain.was / scale:,.1f} {unit} in the {_minutes(self.compare_s * NS)} before, "
                f"{gain.now / scale:,.1f} after{change}, "
                f"at {gain.load[0]:.1f} and {gain.load[1]:.1f} requests running{also}"
            ),
            next_step=(
                "one restart is a hint, not proof: watch whether the decline returns, and do not let a scheduled "
                "restart hide a bug that can be reported"
            ),
            t_ns=t_ns,
            signal=gain.signal,
            labels=gain.labels,
            figures=(
                ("before", gain.was),
                ("after", gain.now),
                ("running_before", gain.load[0]),
                ("running_after", gain.load[1]),
                ("restart_t_seconds", restart.t_ns / NS),
            ),
        )


RULES: Mapping[str, type[MemoryOnlyGrows] | type[DecodeSpeedDown] | type[RestartCuredIt]] = MappingProxyType(
    {rule.name: rule for rule in (MemoryOnlyGrows, DecodeSpeedDown, RestartCuredIt)}
)


def make_rule(name: str, parameters: Mapping[str, float]) -> Rule:
    """The rule called `name` with some of its parameters set.

    Raises:
        ConfigError: there is no such rule or parameter, or a value is not a finite number above 0 (0 is allowed for
            durations that may be nothing: `for_s`, `keep_firing_for_s`, `warmup_s`, `settle_s`).
    """
    if name not in RULES:
        raise ConfigError(f"there is no rule {name!r}; the rules are {', '.join(RULES)}")
    known = [item.name for item in dataclasses.fields(RULES[name])]
    for key, value in parameters.items():
        if key not in known:
            raise ConfigError(f"rule {name} has no parameter {key!r}; its parameters are {', '.join(known)}")
        may_be_0 = key in ("for_s", "keep_firing_for_s", "warmup_s", "settle_s")
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0):
            raise ConfigError(
                f"rule {name}: {key} is {value}; it must be a number {'0 or more' if may_be_0 else 'above 0'}"
            )
    return RULES[name](**parameters)


@dataclass(frozen=True, slots=True)
class _Gain:
    """One quantity before and after a restart."""

    signal: str
    labels: tuple[tuple[str, str], ...]
    was: float
    now: float
    load: tuple[float, float]
    better: bool = field(kw_only=True)


@dataclass(slots=True)
class _Minute:
    """Work done in one minute: tokens, the integral of requests running, and for how long each of them was sampled."""

    start_ns: int
    tokens: float = 0.0
    token_seconds: float = 0.0
    request_seconds: float = 0.0
    seconds: float = 0.0


def _work(past: Past, start_ns: int, end_ns: int) -> list[_Minute]:
    """The minutes of a stretch. Intervals longer than half a minute between two samples are gaps and count nowhere."""
    minutes = [_Minute(at_ns) for at_ns in range(start_ns, end_ns, 60 * NS)]
    for before, at, value, delta_s in _intervals(past.series("requests_running", start_ns, end_ns)):
        minute = minutes[min((at - start_ns) // (60 * NS), len(minutes) - 1)]
        minute.request_seconds += (before + value) / 2 * delta_s
        minute.seconds += delta_s
    tokens = [continuous(series) for series in past.series("generation_tokens_total", start_ns, end_ns)]
    for before, at, value, delta_s in _intervals(tokens):
        minute = minutes[min((at - start_ns) // (60 * NS), len(minutes) - 1)]
        minute.token_seconds += delta_s
        minute.tokens += value - before
    return minutes


def _intervals(all_series: Sequence[Series]) -> Iterator[tuple[float, int, float, float]]:
    """(value before, t_ns, value, seconds between) for successive samples of each series, without the gaps."""
    for series in all_series:
        for turn in range(1, len(series)):
            delta_ns = series.t_ns[turn] - series.t_ns[turn - 1]
            if delta_ns <= 30 * NS:
                yield series.values[turn - 1], series.t_ns[turn], series.values[turn], delta_ns / NS


def _busy(minutes: Iterable[_Minute]) -> list[_Minute]:
    """Minutes in which at least half a request ran, and tokens were counted for as long as requests were."""
    return [
        minute
        for minute in minutes
        if 0 < 0.9 * minute.seconds <= minute.token_seconds and minute.request_seconds >= 0.5 * minute.seconds
    ]


def _similar(minutes: Iterable[_Minute], load: float, ratio: float) -> list[_Minute]:
    allowed = max(0.5, ratio * load)
    return [minute for minute in minutes if abs(minute.request_seconds / minute.seconds - load) <= allowed]


def _load(minutes: Sequence[_Minute]) -> float:
    return sum(minute.request_seconds for minute in minutes) / sum(minute.seconds for minute in minutes)


def _speed(minutes: Sequence[_Minute]) -> float:
    return sum(minute.tokens for minute in minutes) / sum(minute.request_seconds for minute in minutes)


def _mean_running(past: Past, start_ns: int, end_ns: int) -> float | None:
    """Mean of requests running over a stretch; None when less than half of it was sampled."""
    intervals = [
        ((before + value) / 2 * delta_s, delta_s)
        for before, _, value, delta_s in _intervals(past.series("requests_running", start_ns, end_ns))
    ]
    seconds = sum(delta_s for _, delta_s in intervals)
    if seconds <= 0 or seconds < (end_ns - start_ns) / NS / 2:
        return None
    return sum(area for area, _ in intervals) / seconds


def _floors(series: Series, start_ns: int, end_ns: int) -> list[float] | None:
    """The lowest value in each of 12 equal blocks; None when too many are empty. An empty one repeats its neighbour."""
    lowest: list[float | None] = [None] * 12
    for t_ns, value in zip(series.t_ns, series.values, strict=True):
        block = min(11, 12 * (t_ns - start_ns) // (end_ns - start_ns))
        known = lowest[block]
        lowest[block] = value if known is None else min(known, value)
    first, last = lowest[0], lowest[-1]
    if first is None or last is None or first <= 0 or sum(floor is not None for floor in lowest) < 9:
        return None
    floors = [first]
    for floor in lowest[1:]:
        floors.append(floors[-1] if floor is None else floor)
    return floors


def _medians(past: Past, signal: str, stretch: tuple[int, int]) -> dict[tuple[tuple[str, str], ...], float]:
    """Median over a stretch by GPU; for processes, which a restart gives new numbers, the sum under no label."""
    start_ns, end_ns = stretch
    medians: dict[tuple[tuple[str, str], ...], float] = {}
    for series in past.series(signal, start_ns, end_ns):
        if series.t_ns[-1] - series.t_ns[0] >= (end_ns - start_ns) / 2:
            labels = series.labels if signal.startswith("gpu_") else ()
            medians[labels] = medians.get(labels, 0.0) + statistics.median(series.values)
    return medians


def _labelled(series: Series) -> str:
    return " " + " ".join(f"{name} {value}" for name, value in series.labels) if series.labels else ""


def _minutes(duration_ns: float) -> str:
    return f"{duration_ns / NS / 60:.0f} min"
