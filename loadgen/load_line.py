"""The load-line search: which concurrency to try next, given what was seen so far. Pure: no clock, no I/O.

The load line is the largest closed-loop concurrency that *held*: in a settled stage the median of running requests
equals what was offered, waiting averages below half a request (admission takes one engine step; a queue is more),
nothing was preempted, and requests did not fail. It is refined by bisection between the last stage that held and the
first that did not, so it is exact to one request. A stage that is merely short of running requests, while none waits,
has some on their way between client and engine; it held all the same if a larger offer ran as many at once.

With a configured limit N the stages are 25, 50, 75 and 100 % of N, then N + k (k = max(2, 10 % of N)): if that holds
too, the limit is not in effect. The first stage that does not hold sends the search to N itself, to show what
production would meet there, and then to bisection. Without a limit it doubles from 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median

from serving.records import GOOD, Outcome

__all__ = [
    "MAX_CEILING",
    "BoundBy",
    "LoadLine",
    "LoadLineSearch",
    "StageObservation",
    "StageSpec",
    "did_hold",
    "is_judged",
    "over_limit",
]

FAILED = (Outcome.STREAM_ERROR, Outcome.HTTP_ERROR, Outcome.TRUNCATED, Outcome.TIMEOUT)
"""Outcomes that the server answers for. Cancelled, unfinished and client errors are ours."""

FAILURE_TOLERANCE_RATIO = 0.01
"""Share of failed requests up to which a stage can still hold: one in a hundred is an incident, not a limit."""

MIN_SAMPLES = 3
"""A stage with fewer samples of running requests neither held nor failed to."""
WAITING_TOLERANCE = 0.5
IN_TRANSIT_RATIO = 0.25
"""Share of the offered requests that may be neither running nor waiting before that is what stands out."""
KV_FULL_RATIO = 0.9
KV_ROOM_RATIO = 0.7
GROWTH_TOLERANCE_RATIO = 0.05
"""Throughput that grows by less than this while concurrency grows by at least a quarter has stopped growing."""

MAX_CEILING = 4096


class BoundBy(StrEnum):
    """What stops the server from running one more request at once."""

    BATCH_SLOTS = "batch_slots"
    KV_CACHE = "kv_cache"
    TOKEN_BUDGET = "token_budget"
    COMPUTE = "compute"
    GPU_MEMORY = "gpu_memory"
    ERRORS = "errors"
    CLIENT = "client"
    NOT_REACHED = "not_reached"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage to run: `offered` requests in flight, and why. Names are unique within a run."""

    name: str
    offered: int
    purpose: str
    """`ramp`, `limit`, `over`, `double`, `bisect` or `repeat`."""


@dataclass(frozen=True, slots=True)
class StageObservation:
    """What one settled stage showed. Sample tuples hold one value per scrape in the measured window.

    `kv_full_errors` and `out_of_memory_errors` count failed requests whose message the engine's own table reads so;
    `kv_tokens_needed` is what one more request of this workload asks of the KV cache at admission, beside
    `kv_tokens_reserved`, what the engine keeps free for the answers of those that run.
    """

    offered: int
    seconds: float
    running: Sequence[float]
    waiting: Sequence[float]
    kv_cache_usage_ratio: Sequence[float] = ()
    preemptions: int | None = None
    output_tokens_per_second: float | None = None
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    kv_full_errors: int = 0
    out_of_memory_errors: int = 0
    first_error: str | None = None
    kv_capacity_tokens: float | None = None
    kv_tokens_needed: float | None = None
    kv_tokens_reserved: float = 0.0
    client_valid: bool = True
    server_died: bool = False
    died_of_memory: bool = False
    """With `server_died`: it had no memory left."""
    overfull: bool = False
    """Requests of a larger stage were still in flight: what ran and waited is not this stage's alone."""
    slo_met: bool | None = None

    @property
    def running_p50(self) -> float | None:
        """Median of running requests, or None without samples."""
        return median(self.running) if self.running else None

    @property
    def waiting_mean(self) -> float | None:
        """Mean of waiting requests, or None without samples."""
        return fmean(self.waiting) if self.waiting else None

    @property
    def in_transit(self) -> float:
        """Offered requests that on average were neither running nor waiting; 0 without samples."""
        if not self.running or not self.waiting:
            return 0.0
        return max(0.0, self.offered - fmean(self.running) - fmean(self.waiting))

    @property
    def answered(self) -> int:
        """Requests of this stage that ended well."""
        return sum(self.outcomes.get(outcome, 0) for outcome in GOOD)

    @property
    def failed(self) -> int:
        """Requests of this stage that the server failed."""
        return sum(self.outcomes.get(outcome, 0) for outcome in FAILED)

    @property
    def failed_ratio(self) -> float:
        """Failed requests over all requests of this stage that ended."""
        ended = sum(count for outcome, count in self.outcomes.items() if outcome is not Outcome.UNFINISHED)
        return self.failed / ended if ended else 0.0

    @property
    def kv_max(self) -> float | None:
        """Highest KV-cache usage seen, or None where the engine does not tell."""
        return max(self.kv_cache_usage_ratio, default=None)


@dataclass(frozen=True, slots=True)
class LoadLine:
    """The answer. `measured` is None when nothing held or nothing was measured."""

    configured: int | None
    measured: int | None
    bound_by: BoundBy
    evidence: str
    next_step: str
    limit_in_effect: bool | None
    """False when more than the configured number ran at once; None when that was not tested."""
    slo_measured: int | None
    notes: tuple[str, ...] = ()


def over_limit(limit: int) -> int:
    """The stage past the limit: N + max(2, 10 % of N)."""
    return limit + max(2, math.ceil(limit * 0.1))


def is_judged(seen: StageObservation) -> bool:
    """Whether the stage shows anything: enough samples of its own load, or a death that needs none."""
    if seen.server_died:
        return True
    return min(len(seen.running), len(seen.waiting)) >= MIN_SAMPLES and not seen.overfull


def did_hold(seen: StageObservation) -> tuple[bool, str]:
    """Whether the stage held, and in a few words why (not)."""
    running, waiting = seen.running_p50, seen.waiting_mean
    if seen.server_died:
        return False, "the server died"
    if seen.kv_full_errors:
        return False, f"{seen.kv_full_errors} requests failed because the KV cache was full"
    if seen.out_of_memory_errors:
        return False, f"{seen.out_of_memory_errors} requests failed out of memory"
    if seen.failed_ratio > FAILURE_TOLERANCE_RATIO:
        return False, f"{seen.failed} requests failed"
    if running is None or waiting is None or not is_judged(seen):
        return False, f"{len(seen.running)} samples of its own load show nothing"
    if not seen.answered:
        # Gauges freeze when an engine hangs: eight "running" requests that never end are no load that is carried.
        return False, "no request was answered"
    if seen.preemptions:
        return False, f"{seen.preemptions} preemptions"
    if running < seen.offered:
        return False, f"{running:g} of {seen.offered} ran at once, {waiting:.1f} waited"
    if _queues(seen):
        return False, f"{waiting:.1f} requests waited on average"
    return True, f"{running:g} ran at once, {waiting:.1f} waited"


class LoadLineSearch:
    """Decides the stages. Call `next_stage`, run it, `record` what was seen, until `next_stage` returns None.

    Args:
        limit: the configured `max_batch_size`, or None to search upwards by doubling.
        ceiling: the highest concurrency to try when nothing limits the search.
        slots: the batch limit that the server itself reports, where it does; evidence for `batch_slots`.
        refine_slo: also bisect for the largest concurrency that meets every SLO.

    Raises:
        ValueError: a limit or ceiling outside 1..4096.
    """

    def __init__(
        self, limit: int | None, *, ceiling: int = 256, slots: int | None = None, refine_slo: bool = False
    ) -> None:
        if limit is not None and not 1 <= limit <= MAX_CEILING:
            raise ValueError(f"limit must be within 1..{MAX_CEILING}, got {limit}")
        if not 1 <= ceiling <= MAX_CEILING:
            raise ValueError(f"ceiling must be within 1..{MAX_CEILING}, got {ceiling}")
        self.limit = limit
        self.slots = slots
        self.ceiling = ceiling
        self.refine_slo = refine_slo
        self.seen: dict[int, StageObservation] = {}
        """Stages that show something, by what they offered."""
        self.blind: StageObservation | None = None
        """A stage that showed nothing, twice."""
        self._repeat: int | None = None
        self._repeated: set[int] = set()
        self._stopped = False
        if limit is None:
            self._ramp: list[int] = []
        else:
            quarters = sorted({max(1, math.ceil(limit * share)) for share in (0.25, 0.5, 0.75, 1.0)})
            self._ramp = [*quarters, over_limit(limit)]

    def record(self, seen: StageObservation) -> None:
        """Take in what a stage showed. A repeated stage replaces the earlier one.

        A stage that showed nothing, or that failed without a queue or an error to show for it, is asked for once more:
        one unlucky window must not move the line.
        """
        self._repeat = None
        again = seen.offered in self._repeated
        if seen.server_died or not seen.client_valid:
            self._stopped = True
        elif not is_judged(seen):
            if again:
                self.blind, self._stopped = seen, True
            else:
                self._ask_again(seen.offered)
            return
        elif not again and self._is_weak(seen):
            self._ask_again(seen.offered)
        self.seen[seen.offered] = seen

    def amend(self, seen: StageObservation) -> None:
        """Replace what a recorded stage showed by a fuller look at it, without asking for more stages."""
        if seen.offered in self.seen and is_judged(seen):
            self.seen[seen.offered] = seen

    def _ask_again(self, offered: int) -> None:
        self._repeat = offered
        self._repeated.add(offered)

    def _is_weak(self, seen: StageObservation) -> bool:
        slots = self._slots_in_effect(seen)
        all_run = slots is not None and seen.running_p50 is not None and seen.running_p50 >= slots
        return _is_short(seen) and not all_run

    def _held(self, offered: int) -> bool:
        """Whether a stage held by its own account, or was merely short where a larger offer ran as many at once."""
        seen = self.seen[offered]
        if did_hold(seen)[0]:
            return True
        larger = (more.running_p50 or 0.0 for more in self.seen.values() if more.offered > offered)
        return _is_short(seen) and max(larger, default=0.0) >= offered

    def _slots_in_effect(self, *more: StageObservation) -> int | None:
        """The known number of slots, unless more than that ran at once: then it is not what the server goes by."""
        slots = self.slots if self.slots is not None else self.limit
        most = max((seen.running_p50 or 0.0 for seen in (*self.seen.values(), *more)), default=0.0)
        return None if slots is None or most > slots else slots

    def next_stage(self) -> StageSpec | None:
        """The next stage to run, or None when the line is known (or cannot be)."""
        if self._stopped:
            return None
        if self._repeat is not None:
            return StageSpec(f"{self._repeat} again", self._repeat, "repeat")
        spec = self._climb() or self._bisect()
        if spec is None and self.refine_slo:
            spec = self._bisect_slo()
        return spec

    def stages_left(self) -> int:
        """Upper bound of the stages still to run, for a progress bar."""
        if self.next_stage() is None:
            return 0
        low, high = self._bracket()
        ramp = [offered for offered in self._ramp if offered not in self.seen]
        if high is not None:
            return max(1, math.ceil(math.log2(max(1, high - low))))
        bisections = 1
        if self.limit is not None:
            bisections = math.ceil(math.log2(max(2, over_limit(self.limit) - self.limit)))
        return len(ramp) + bisections

    def _climb(self) -> StageSpec | None:
        if self.limit is None:
            return self._double()
        _, high = self._bracket()
        at_limit = self.seen.get(self.limit)
        is_short = at_limit is not None and _is_short(at_limit)
        for offered in self._ramp:
            if offered in self.seen:
                continue
            if high is not None and offered != self.limit and not (is_short and offered > self.limit):
                continue
            if offered > self.limit:
                return StageSpec(str(offered), offered, "over")
            return StageSpec(str(offered), offered, "limit" if offered == self.limit else "ramp")
        return None

    def _double(self) -> StageSpec | None:
        if not self.seen:
            return StageSpec("1", 1, "double")
        top = max(self.seen)
        if not did_hold(self.seen[top])[0] or top >= self.ceiling or self._stopped_growing():
            return None
        offered = min(top * 2, self.ceiling)
        return StageSpec(str(offered), offered, "double")

    def _bracket(self) -> tuple[int, int | None]:
        low = max(filter(self._held, self.seen), default=0)
        high = min((offered for offered in self.seen if offered > low), default=None)
        return low, high

    def _bisect(self) -> StageSpec | None:
        low, high = self._bracket()
        if high is None or high - low <= 1:
            return None
        offered = (low + high) // 2
        return StageSpec(str(offered), offered, "bisect")

    def _bisect_slo(self) -> StageSpec | None:
        met = [o for o, seen in self.seen.items() if did_hold(seen)[0] and seen.slo_met]
        low = max(met, default=0)
        missed = [o for o, seen in self.seen.items() if o > low and not (did_hold(seen)[0] and seen.slo_met)]
        high = min(missed, default=None)
        if high is None or high - low <= 1:
            return None
        offered = (low + high) // 2
        return StageSpec(str(offered), offered, "bisect")

    def _stopped_growing(self) -> bool:
        """Whether throughput stopped growing over the two highest steps of concurrency."""
        points = [(o, self.seen[o].output_tokens_per_second) for o in sorted(self.seen)]
        rates = [(o, rate) for o, rate in points if rate is not None and did_hold(self.seen[o])[0]]
        if len(rates) < 3:
            return False
        steps = list(zip(rates[-3:], rates[-2:], strict=False))
        return all(
            after >= 1.25 * before and rate_after < rate_before * (1 + GROWTH_TOLERANCE_RATIO)
            for (before, rate_before), (after, rate_after) in steps
        )

    def _flat_from(self, low: int) -> int | None:
        """The smallest concurrency at most three quarters of the line with as many tokens/s as the line, or None."""
        best = self.seen[low].output_tokens_per_second if low in self.seen else None
        if not best:
            return None
        for offered in sorted(o for o in self.seen if o <= 0.75 * low):
            rate = self.seen[offered].output_tokens_per_second
            if rate is not None and did_hold(self.seen[offered])[0] and best < rate * (1 + GROWTH_TOLERANCE_RATIO):
                return offered
        return None

    def result(self) -> LoadLine:
        """What is known now; also meaningful for a search that was cut short."""
        low, high = self._bracket()
        measured = low or None
        slo = max((o for o, seen in self.seen.items() if did_hold(seen)[0] and seen.slo_met), default=None)
        beyond = [seen.running_p50 for offered, seen in self.seen.items() if self.limit and offered > self.limit]
        in_effect = all(self.limit is None or (most or 0.0) <= self.limit for most in beyond) if beyond else None
        bound_by, evidence, next_step = self._explain(low, high)
        notes = []
        unstable = sorted(offered for offered in self.seen if offered < low and not self._held(offered))
        if unstable:
            notes.append(f"{', '.join(map(str, unstable))} did not hold although {low} did: the server is unstable")
        return LoadLine(self.limit, measured, bound_by, evidence, next_step, in_effect, slo, tuple(notes))

    def _explain(self, low: int, high: int | None) -> tuple[BoundBy, str, str]:
        invalid = [seen for seen in self.seen.values() if not seen.client_valid]
        if invalid:
            return (
                BoundBy.CLIENT,
                f"at {invalid[0].offered} offered the load generator itself fell behind",
                "run the load generator on a machine of its own, or with less load",
            )
        if self.blind is not None:
            return (
                BoundBy.UNKNOWN,
                f"at {self.blind.offered} offered: {len(self.blind.running)} samples of running requests, twice",
                "its metrics did not answer under load, or hide what runs: look there (llama.cpp: --threads-http)",
            )
        if not self.seen:
            return BoundBy.UNKNOWN, "no stage was completed", "run again for longer"
        held = self.seen.get(low)
        if (unmoved := self._unmoved()) is not None:
            return BoundBy.UNKNOWN, unmoved, "look at the server's metrics page: its gauges say nothing of this load"
        if high is None:
            return self._explain_open(held)
        evidence = _evidence(self.seen[high], held)
        bound_by = self._binding(self.seen[high])
        return bound_by, evidence, self._advice(bound_by, low, self.seen[high], held)

    def _unmoved(self) -> str | None:
        """How it shows that the gauges stand still, or None: no sample saw a request, and yet many were answered."""
        stages = self.seen.values()
        answered = sum(seen.answered for seen in stages)
        if len(stages) < 2 or not answered or any(any((*seen.running, *seen.waiting)) for seen in stages):
            return None
        return f"{answered} requests were answered while the server's gauges stood at 0 running and 0 waiting"

    def _explain_open(self, held: StageObservation | None) -> tuple[BoundBy, str, str]:
        """Everything that was tried held."""
        if held is None:
            return BoundBy.UNKNOWN, "no stage held", "look at the first stage's errors"
        evidence = _evidence(held, None)
        flat_from = self._flat_from(held.offered) if self.limit is None else None
        if self._stopped_growing() or (flat_from is not None and 4 * flat_from <= held.offered):
            return BoundBy.COMPUTE, evidence + "; tokens/s no longer grows", "more concurrency only adds latency here"
        if self.limit is not None and held.offered > self.limit:
            return (
                BoundBy.NOT_REACHED,
                evidence,
                f"the configured limit of {self.limit} is not in effect: check that the server was started with it",
            )
        return BoundBy.NOT_REACHED, evidence, "raise --max-batch to look further"

    def _binding(self, failing: StageObservation) -> BoundBy:
        """What bound at the smallest concurrency that did not hold, from the strongest evidence to the weakest."""
        if failing.out_of_memory_errors or (failing.server_died and failing.died_of_memory):
            return BoundBy.GPU_MEMORY
        if failing.kv_full_errors or failing.preemptions:
            return BoundBy.KV_CACHE
        if failing.server_died or failing.failed_ratio > FAILURE_TOLERANCE_RATIO:
            return BoundBy.ERRORS
        running, waiting = failing.running_p50, failing.waiting_mean
        if running is None or waiting is None:
            return BoundBy.UNKNOWN
        slots = self._slots_in_effect()
        if slots is not None and running >= slots:
            # All slots run and still not everything that was offered: the rest waits, also where the engine's counter
            # does not show it yet (llama.cpp takes a request in only between two decode calls).
            return BoundBy.BATCH_SLOTS
        # A queue of less than one request on average is easily missed by sampling; a larger offer shows it.
        larger = [seen for seen in self.seen.values() if seen.offered >= failing.offered]
        if _is_short(failing) and any(seen.preemptions or seen.kv_full_errors for seen in larger):
            return BoundBy.KV_CACHE
        queued = any(_queues(seen) for seen in larger)
        most = max((max(seen.running, default=0.0) for seen in self.seen.values()), default=0.0)
        if queued and running >= most and self.slots is None:
            # No stage ever ran more at once, whatever was offered: a limit that nobody told us of, unless memory is it.
            return BoundBy.KV_CACHE if _kv_binds(failing) else BoundBy.BATCH_SLOTS
        if failing.in_transit > max(0.5, IN_TRANSIT_RATIO * failing.offered) or not queued:
            # Neither running nor waiting: in the server's front end or on the network. No limit of the batch is shown.
            return BoundBy.UNKNOWN
        return BoundBy.KV_CACHE if _kv_binds(failing) else BoundBy.TOKEN_BUDGET

    def _advice(self, bound_by: BoundBy, low: int, failing: StageObservation, held: StageObservation | None) -> str:
        if bound_by is BoundBy.KV_CACHE:
            return f"set max_batch_size to {low or 1}, or shorten max_model_len; change one of them"
        if bound_by is BoundBy.GPU_MEMORY:
            return "lower the memory share of the KV cache or the batch size; change one of them"
        if bound_by is BoundBy.TOKEN_BUDGET:
            return "long prompts queue for the prefill token budget: raise it one step and measure again"
        if bound_by is BoundBy.ERRORS:
            return f"read the server's log at the time of the first failure: {failing.first_error or 'no message'}"
        if bound_by is BoundBy.BATCH_SLOTS:
            room = held.kv_max if held is not None else None
            flat_from = self._flat_from(low)
            if self.limit is not None and low < self.limit:
                return f"the server runs {low} at once, not {self.limit}: check what it was started with"
            if flat_from is not None:
                return f"tokens/s did not grow from {flat_from} to {low} at once: more would only add latency"
            if room is not None and room < KV_ROOM_RATIO:
                return f"the KV cache was at most {room:.0%} full: there is room to raise max_batch_size by one step"
            if room is not None and room >= KV_FULL_RATIO:
                return "the KV cache is nearly full too: raise neither without more memory"
            return "keep it"
        if failing.in_transit > 0.5:
            return (
                f"about {failing.in_transit:.0f} requests neither ran nor waited: they were in the server's front end "
                "or on their way; give the front end more CPU, or the requests more tokens"
            )
        return "run again with longer stages"


def _is_short(seen: StageObservation) -> bool:
    """Whether all that speaks against a stage is that fewer ran than were offered: nothing queued, nothing failed."""
    return bool(
        is_judged(seen)
        and not did_hold(seen)[0]
        and seen.answered
        and not _queues(seen)
        and not seen.server_died
        and not seen.preemptions
        and not seen.kv_full_errors
        and not seen.out_of_memory_errors
        and seen.failed_ratio <= FAILURE_TOLERANCE_RATIO
    )


def _queues(seen: StageObservation) -> bool:
    return seen.waiting_mean is not None and seen.waiting_mean >= WAITING_TOLERANCE


def _kv_binds(seen: StageObservation) -> bool:
    """Whether what is free in the KV cache is too little for one more request of this workload."""
    if seen.kv_max is None:
        return False
    if seen.kv_max >= KV_FULL_RATIO:
        return True
    if seen.kv_capacity_tokens is None or seen.kv_tokens_needed is None:
        return False
    free = (1 - median(seen.kv_cache_usage_ratio)) * seen.kv_capacity_tokens
    return free < seen.kv_tokens_needed + seen.kv_tokens_reserved


def _evidence(failing: StageObservation, held: StageObservation | None) -> str:
    parts = []
    if failing.server_died:
        parts.append("the server died out of memory" if failing.died_of_memory else "the server died")
    running, waiting = failing.running_p50, failing.waiting_mean
    if running is not None:
        parts.append(f"{running:g} running")
    if waiting is not None:
        parts.append(f"{waiting:.2g} waiting on average")
    if failing.kv_max is not None:
        parts.append(f"KV cache {failing.kv_max:.0%}")
    if failing.preemptions:
        parts.append(f"{failing.preemptions} preemptions in {failing.seconds:.0f} s")
    if failing.failed:
        parts.append(f"{failing.failed} requests failed" + (f" ({failing.first_error})" if failing.first_error else ""))
    text = f"at {failing.offered} offered: {', '.join(parts) or 'no samples'}"
    if held is None:
        return text
    calm = [did_hold(held)[1]]
    if held.kv_max is not None:
        calm.append(f"KV cache {held.kv_max:.0%}")
    return f"{text}; at {held.offered}: {', '.join(calm)}"
