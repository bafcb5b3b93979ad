"""From what the sampler and the client saw to what the search needs: one observation per stage. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Protocol

from loadgen.load_line import FAILED, StageObservation
from loadgen.tally import StageTally, TokenBook
from serving.clock import NS
from serving.records import RequestRecord

__all__ = ["ErrorClasses", "Gauge", "StageView", "TickLike", "counter_increase", "gauge", "view_stage"]


class TickLike(Protocol):
    """What is read of a sampler's tick; a failed scrape has no values."""

    @property
    def t_ns(self) -> int:
        """When the sample was taken."""
        ...

    @property
    def values(self) -> Mapping[str, float]:
        """Target signals by canonical name; absent where not measured."""
        ...

    @property
    def gpus(self) -> Mapping[str, Mapping[str, float]]:
        """GPU signals by GPU."""
        ...

    @property
    def processes(self) -> Mapping[str, Mapping[str, float]]:
        """Process signals by role."""
        ...


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge over a window; None where nothing was measured."""

    p50: float | None
    mean: float | None
    max: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage as it was seen from both sides."""

    observation: StageObservation
    running: Gauge
    waiting: Gauge
    kv_cache: Gauge
    gpu_memory_used_bytes: float | None
    """Largest sum over all GPUs."""
    preemptions: int | None
    seconds: float


def gauge(values: Sequence[float]) -> Gauge:
    """Median, mean and maximum. Ten samples do for a median of a gauge: these are not latencies but a level."""
    if not values:
        return Gauge(None, None, None, 0)
    return Gauge(median(values), fmean(values), max(values), len(values))


def counter_increase(values: Sequence[float]) -> float | None:
    """Growth of a counter over its samples, read through resets: a fall means that it began again at zero."""
    if len(values) < 2:
        return None
    total = 0.0
    for before, after in pairwise(values):
        total += after - before if after >= before else after
    return total


class ErrorClasses:
    """Counts failed requests of one stage by what their message means to this engine.

    Args:
        classify: from a message to `kv_cache_full`, `out_of_memory` or another class, or None.
    """

    def __init__(self, classify: Callable[[str], str | None]) -> None:
        self._classify = classify
        self.counts: Counter[str] = Counter()

    def add(self, record: RequestRecord) -> None:
        """Take in one record."""
        if record.outcome in FAILED and record.error:
            kind = self._classify(record.error)
            if kind is not None:
                self.counts[kind] += 1


def view_stage(
    offered: int,
    ticks: Sequence[TickLike],
    window: tuple[int, int],
    tally: StageTally,
    book: TokenBook,
    errors: ErrorClasses,
    *,
    client_valid: bool,
    server_died: bool,
) -> StageView:
    """Reduce one stage.

    Args:
        offered: requests in flight that the client held.
        ticks: samples of the whole run, in time order.
        window: the measured window, `t_ns` from and to.
        tally: the stage's requests.
        book: output tokens by arrival time.
        errors: the stage's failures by class.
        client_valid: whether the load generator kept up.
        server_died: whether the server went away in this stage.
    """
    t_from_ns, t_to_ns = window
    inside = [tick for tick in ticks if t_from_ns <= tick.t_ns <= t_to_ns]

    def values(signal: str) -> list[float]:
        return [tick.values[signal] for tick in inside if signal in tick.values]

    # Preemptions are counted from the stage's last sample before the window, so that none falls between two windows.
    preemptions = counter_increase(values("request_preemptions_total"))
    capacity = values("kv_cache_capacity_tokens")
    seconds = max(0.0, (t_to_ns - t_from_ns) / NS)
    running, waiting, kv_cache = (
        values(name) for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    )
    rate = book.output_rate(t_from_ns, t_to_ns)
    observation = StageObservation(
        offered=offered,
        seconds=seconds,
        running=running,
        waiting=waiting,
        kv_cache_usage_ratio=kv_cache,
        preemptions=None if preemptions is None else round(preemptions),
        output_tokens_per_second=rate,
        outcomes=dict(tally.outcomes),
        kv_full_errors=errors.counts["kv_cache_full"],
        out_of_memory_errors=errors.counts["out_of_memory"],
        first_error=tally.first_error,
        kv_capacity_tokens=capacity[-1] if capacity else None,
        kv_tokens_needed=median(tally.kv_tokens) if tally.kv_tokens else None,
        client_valid=client_valid,
        server_died=server_died,
        slo_met=tally.slo_met(),
    )
    gpu_totals = [
        sum(gpu["gpu_memory_used_bytes"] for gpu in tick.gpus.values() if "gpu_memory_used_bytes" in gpu)
        for tick in inside
        if any("gpu_memory_used_bytes" in gpu for gpu in tick.gpus.values())
    ]
    return StageView(
        observation,
        gauge(running),
        gauge(waiting),
        gauge(kv_cache),
        max(gpu_totals, default=None),
        observation.preemptions,
        seconds,
    )
