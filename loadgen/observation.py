"""From what the sampler and the client saw to what the search needs: one observation per stage. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol

from loadgen.load_line import FAILED, StageObservation
from loadgen.tally import StageTally, TokenBook
from serving.clock import NS
from serving.records import GOOD, Outcome, RequestRecord
from serving.signals import Series, increase

__all__ = ["Gauge", "StageView", "TickLike", "WindowLedger", "gauge", "growth_of", "view_stage"]


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
    output_tokens_per_second: float | None
    """Booked by arrival; complete only once every request that was in flight in the window has ended."""
    seconds: float


def gauge(values: Sequence[float]) -> Gauge:
    """Median, mean and maximum. Ten samples do for a median of a gauge: these are not latencies but a level."""
    if not values:
        return Gauge(None, None, None, 0)
    return Gauge(median(values), fmean(values), max(values), len(values))


def growth_of(signal: str, ticks: Sequence[TickLike]) -> float | None:
    """How much a counter grew over these ticks, read through resets; None where fewer than two of them have it."""
    told = [tick for tick in ticks if signal in tick.values]
    times, values = tuple(tick.t_ns for tick in told), tuple(tick.values[signal] for tick in told)
    return increase(Series(signal, times, values))


class WindowLedger:
    """The requests that *ended* in one stage's measured window, whichever stage issued them.

    Whether a stage held is a question about its own time: a request that an earlier stage issued and that breaks under
    this stage's load speaks about this stage.

    Args:
        classify: from an error message to `kv_cache_full`, `out_of_memory` or another class, or None.
    """

    def __init__(self, classify: Callable[[str], str | None]) -> None:
        self._classify = classify
        self.outcomes: Counter[Outcome] = Counter()
        self.classes: Counter[str] = Counter()
        self.first_error: str | None = None
        self.completion_tokens = 0

    def add(self, record: RequestRecord) -> None:
        """Take in one record that ended inside the window."""
        self.outcomes[record.outcome] += 1
        if record.outcome in GOOD:
            self.completion_tokens += record.completion_tokens or 0
        if record.outcome in FAILED and record.error:
            self.first_error = self.first_error or record.error
            kind = self._classify(record.error)
            if kind is not None:
                self.classes[kind] += 1


def view_stage(
    offered: int,
    ticks: Sequence[TickLike],
    window: tuple[int, int],
    tally: StageTally,
    book: TokenBook,
    ended: WindowLedger,
    *,
    client_valid: bool,
    server_died: bool,
    overfull: bool,
    died_of_memory: bool = False,
    reserved_output_ratio: float = 0.0,
) -> StageView:
    """Reduce one stage.

    Args:
        offered: requests in flight that the client held.
        ticks: samples of the whole run, in time order.
        window: the measured window, `t_ns` from and to.
        tally: the requests that the stage issued.
        book: output tokens by arrival time.
        ended: the requests that ended in the window.
        client_valid: whether the load generator kept up.
        server_died: whether the server went away in this stage.
        overfull: whether requests of a larger stage were still in flight when the window began.
        died_of_memory: whether that was for want of memory.
        reserved_output_ratio: as of the engine's dialect.
    """
    t_from_ns, t_to_ns = window
    inside = [tick for tick in ticks if t_from_ns <= tick.t_ns and _t_end_ns(tick) <= t_to_ns]

    def values(signal: str) -> list[float]:
        return [tick.values[signal] for tick in inside if signal in tick.values]

    preemptions = _increase_over(ticks, "request_preemptions_total", t_from_ns, t_to_ns)
    capacity = values("kv_cache_capacity_tokens")
    seconds = max(0.0, (t_to_ns - t_from_ns) / NS)
    running, waiting, kv_cache = (
        values(name) for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    )
    observation = StageObservation(
        offered=offered,
        seconds=seconds,
        running=running,
        waiting=waiting,
        kv_cache_usage_ratio=kv_cache,
        preemptions=None if preemptions is None else round(preemptions),
        # By the end of requests: in a steady state what began before the window makes up for what ends after it, while
        # tokens by arrival are known only once their request has ended.
        output_tokens_per_second=ended.completion_tokens / seconds if seconds else None,
        outcomes=dict(ended.outcomes),
        kv_full_errors=ended.classes["kv_cache_full"],
        out_of_memory_errors=ended.classes["out_of_memory"],
        # A server that dies before its stage has settled leaves nothing in the window.
        first_error=ended.first_error or (tally.first_error if server_died else None),
        kv_capacity_tokens=capacity[-1] if capacity else None,
        kv_tokens_needed=median(tally.kv_tokens) if tally.kv_tokens else None,
        kv_tokens_reserved=_reserved_tokens(running, tally.output_tokens, reserved_output_ratio),
        client_valid=client_valid,
        server_died=server_died,
        died_of_memory=died_of_memory,
        overfull=overfull,
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
        book.output_rate(t_from_ns, t_to_ns),
        seconds,
    )


def _reserved_tokens(running: Sequence[float], output_tokens: Sequence[float], ratio: float) -> float:
    """What is kept free for the answers of those that run; on average each has half of its answer still to come."""
    return ratio * median(running) * median(output_tokens) / 2 if ratio and running and output_tokens else 0.0


def _t_end_ns(tick: TickLike) -> int:
    """When the scrape ended: its values were taken somewhere between, and a slow one can reach into the next stage."""
    return tick.t_ns + round(tick.values.get("scrape_duration_seconds", 0.0) * NS)


def _increase_over(ticks: Sequence[TickLike], signal: str, t_from_ns: int, t_to_ns: int) -> float | None:
    """Growth of a counter from the last sample before a window to the last one in it.

    The first sample after the window is not looked at: by then the next stage's load is on, and what it breaks at once
    is not this stage's. What happens between two samples at the end of a window goes unseen instead.
    """
    told = [tick for tick in ticks if signal in tick.values]
    before = [tick for tick in told if tick.t_ns <= t_from_ns][-1:]
    inside = [tick for tick in told if t_from_ns < tick.t_ns and _t_end_ns(tick) <= t_to_ns]
    return growth_of(signal, (*before, *inside))
