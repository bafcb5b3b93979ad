"""The canonical signals: one name, unit and meaning for what every engine, GPU and process reports.

Names are `noun_unit` in base units, ratios 0..1, `_total` only for counters. A measurement that was not made is absent:
never 0, never NaN. The exporter adds the prefix `plimsoll_`; the history has one column per signal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

__all__ = ["SIGNALS", "Kind", "Sample", "Scope", "Series", "Signal", "continuous", "increase", "signals_of"]


class Kind(StrEnum):
    """How values of a signal behave over time."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """What one value of a signal belongs to: the served endpoint, one GPU, or one process of the server."""

    TARGET = "target"
    GPU = "gpu"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Signal:
    """One row of the table.

    `aggregation` says how values of several engine ranks become the target's one value: usage is a maximum, work is a
    sum, a limit that every rank repeats is a maximum.
    """

    name: str
    unit: str
    kind: Kind
    scope: Scope
    aggregation: str
    help: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one signal. `labels` name the GPU or process; `source` is the engine's own name for it."""

    signal: str
    t_ns: int
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one signal in time order; gaps are simply missing points. `t_ns` and `values` have equal length."""

    signal: str
    t_ns: tuple[int, ...]
    values: tuple[float, ...]
    labels: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.t_ns)


def _rows() -> tuple[Signal, ...]:
    gauge, counter, histogram = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM
    target, gpu, process = Scope.TARGET, Scope.GPU, Scope.PROCESS
    return (
        Signal("requests_running", "requests", gauge, target, "sum", "Requests in the engine's running batch."),
        Signal("requests_waiting", "requests", gauge, target, "sum", "Requests accepted but not yet in the batch."),
        Signal("kv_cache_usage_ratio", "ratio", gauge, target, "max", "Share of the KV cache that live requests hold."),
        Signal("kv_cache_capacity_tokens", "tokens", gauge, target, "sum", "Tokens that the KV cache can hold."),
        Signal("request_preemptions_total", "requests", counter, target, "sum", "Requests thrown out of the batch."),
        Signal("prompt_tokens_total", "tokens", counter, target, "sum", "Prompt tokens taken in."),
        Signal("prompt_tokens_cached_total", "tokens", counter, target, "sum", "Prompt tokens reused from cache."),
        Signal("generation_tokens_total", "tokens", counter, target, "sum", "Tokens generated."),
        Signal("requests_finished_total", "requests", counter, target, "sum", "Requests finished, for any reason."),
        Signal("request_errors_total", "requests", counter, target, "sum", "Requests that ended in a server error."),
        Signal("engine_progress_total", "steps", counter, target, "sum", "Engine steps: a heartbeat while running."),
        Signal("time_to_first_token_seconds", "seconds", histogram, target, "sum", "Server-side time to first token."),
        Signal("inter_token_latency_seconds", "seconds", histogram, target, "sum", "Server-side time between tokens."),
        Signal("request_duration_seconds", "seconds", histogram, target, "sum", "Server-side request duration."),
        Signal("request_queue_seconds", "seconds", histogram, target, "sum", "Server-side time spent waiting."),
        Signal("config_max_running_requests", "requests", gauge, target, "max", "The batch limit the server reports."),
        Signal("config_context_tokens", "tokens", gauge, target, "max", "The context length the server reports."),
        Signal("engine_start_timestamp_seconds", "seconds", gauge, target, "max", "When the server process started."),
        Signal("up", "bool", gauge, target, "max", "1 when the last scrape of the target succeeded, else 0."),
        Signal("scrape_duration_seconds", "seconds", gauge, target, "max", "How long the last scrape took."),
        Signal("host_memory_available_bytes", "bytes", gauge, target, "max", "Memory the host can still give out."),
        Signal("host_swap_used_bytes", "bytes", gauge, target, "max", "Swap in use on the host."),
        Signal("gpu_memory_used_bytes", "bytes", gauge, gpu, "max", "GPU memory in use, driver reserve excluded."),
        Signal("gpu_memory_total_bytes", "bytes", gauge, gpu, "max", "GPU memory in all."),
        Signal("gpu_utilization_ratio", "ratio", gauge, gpu, "max", "Share of time with a kernel running."),
        Signal("gpu_power_watts", "watts", gauge, gpu, "max", "Power drawn."),
        Signal("gpu_temperature_celsius", "celsius", gauge, gpu, "max", "Core temperature."),
        Signal("process_anonymous_memory_bytes", "bytes", gauge, process, "sum", "RssAnon + VmSwap: what leaks grow."),
        Signal("process_resident_memory_bytes", "bytes", gauge, process, "sum", "Resident memory, shared pages too."),
        Signal("process_swap_bytes", "bytes", gauge, process, "sum", "Memory of the process moved to swap."),
        Signal("process_open_fds", "descriptors", gauge, process, "sum", "Open file descriptors."),
        Signal("process_threads", "threads", gauge, process, "sum", "Threads."),
        Signal("process_cpu_seconds_total", "seconds", counter, process, "sum", "CPU time used, user and system."),
    )


SIGNALS: Mapping[str, Signal] = MappingProxyType({row.name: row for row in _rows()})


def signals_of(scope: Scope) -> tuple[Signal, ...]:
    """All signals of one scope, in the table's order."""
    return tuple(signal for signal in SIGNALS.values() if signal.scope is scope)


def continuous(series: Series) -> Series:
    """A counter read through its resets: the same points, never falling.

    A fall means that the counter began again at zero (the server restarted), so the value after it is growth. What was
    counted between the last sample before a reset and the reset itself is lost. The first value is kept.
    """
    values: list[float] = []
    for index, value in enumerate(series.values):
        before = series.values[index - 1] if index else 0.0
        grown = value - before if value >= before else value
        values.append((values[-1] if values else 0.0) + grown)
    return replace(series, values=tuple(values))


def increase(series: Series) -> float | None:
    """How much a counter grew from its first to its last point, read through resets; None below two points."""
    if len(series) < 2:
        return None
    values = continuous(series).values
    return values[-1] - values[0]
