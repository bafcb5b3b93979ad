"""What a start-up log said, as values, and how memory moved during the phases of a start."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from serving.engines import LogFact
from serving.log_lines import Stamp, StampKind

__all__ = [
    "PHASES",
    "Clamp",
    "DeviceBuffers",
    "Phase",
    "PhaseMemory",
    "RankMemory",
    "StartupFacts",
    "memory_by_phase",
    "place_on_clock",
    "whole",
]

PHASES = ("launch", "weights", "profile", "kv_pool", "workspace", "graphs", "warmup", "ready")
"""The phases of a start in their order; engines have only some of them."""

_LEAP_YEAR = datetime(1972, 1, 1, tzinfo=UTC).timestamp()


def whole(fact: LogFact | None) -> int | None:
    """The whole number that a fact has, or None."""
    if fact is None or isinstance(fact.value, bool) or not isinstance(fact.value, int):
        return None
    return fact.value


@dataclass(frozen=True, slots=True)
class Clamp:
    """A setting that the server cut down, by its own words.

    Attributes:
        key: canonical settings key.
        asked: what it was started with; None where the line does not say.
        taken: what it took instead. Per replica where the line says so.
        line: where it says so, from 1.
        text: the line, cut.
    """

    key: str
    asked: str | int | float | None
    taken: str | int | float
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Where the memory of one rank went, as it printed it; None where it did not.

    Attributes:
        rank: such as `dp0 tp1`, or "" where the log names none.
        weights_bytes: model weights.
        kv_cache_bytes: memory for the KV cache, as available to it or as taken.
        state_bytes: state of recurrent layers.
        graphs_bytes: captured graphs.
        activations_bytes: peak of the profiled forward pass.
        non_torch_bytes: what the framework did not allocate (communication, driver).
        kv_tokens: tokens that its part of the KV cache holds; of hybrid models no per-token cost.
        kv_blocks: blocks of it.
    """

    rank: str
    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    state_bytes: int | None = None
    graphs_bytes: int | None = None
    activations_bytes: int | None = None
    non_torch_bytes: int | None = None
    kv_tokens: int | None = None
    kv_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceBuffers:
    """Buffers of one device, as llama.cpp prints them; None where it did not. `CPU` names are host memory."""

    device: str
    model_bytes: int | None = None
    kv_cache_bytes: int | None = None
    state_bytes: int | None = None
    compute_bytes: int | None = None
    output_bytes: int | None = None

    @property
    def on_host(self) -> bool:
        """Whether the buffers are in the host's memory (pinned memory such as CUDA_Host too)."""
        return self.device.startswith("CPU") or self.device.endswith("_Host")


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the start: it begins here and ends where the next begins.

    Attributes:
        name: one of `PHASES`.
        line: the line that tells.
        stamp: when, where the log has times.
    """

    name: str
    line: int
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """What a log says of the last start in it.

    Attributes:
        engine: name of the engine's table, or None when no start of any known engine is in the log.
        also: other engines of which starts are in the log too.
        starts: how many starts the log holds; 0 for none.
        first_line: where the last start begins.
        log_bytes: length of the log.
        version: as the engine printed it.
        served_as: the name under which requests ask for the model.
        settings: canonical settings key -> what the server really took, over the whole target.
        asked: canonical settings key -> what it was started with, where the log tells it apart.
        clamps: what it cut down, each once.
        ranks: memory by rank.
        buffers: memory by device (llama.cpp).
        offloaded_layers: layers on GPUs, of `layers` (llama.cpp).
        layers: layers of the model.
        max_concurrency: how many requests of `max_concurrency_tokens` the KV cache holds, as printed.
        max_concurrency_tokens: the length that this is for.
        replicas: data-parallel replicas by which figures of one were multiplied.
        hybrid: the log shows that KV tokens are no per-token cost (sliding windows, recurrent state).
        phases: how far the start came, in the order of `PHASES`.
    """

    engine: str | None = None
    also: tuple[str, ...] = ()
    starts: int = 0
    first_line: int = 0
    log_bytes: int = 0
    version: str | None = None
    served_as: str | None = None
    settings: Mapping[str, LogFact] = field(default_factory=dict)
    asked: Mapping[str, LogFact] = field(default_factory=dict)
    clamps: tuple[Clamp, ...] = ()
    ranks: tuple[RankMemory, ...] = ()
    buffers: tuple[DeviceBuffers, ...] = ()
    offloaded_layers: int | None = None
    layers: int | None = None
    max_concurrency: float | None = None
    max_concurrency_tokens: int | None = None
    replicas: int = 1
    hybrid: bool = False
    phases: tuple[Phase, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether the last start says that it came to its end."""
        return any(phase.name == "ready" for phase in self.phases)

    @property
    def binding_rank(self) -> RankMemory | None:
        """The rank with the smallest KV cache, which binds; None where none is known."""
        for figure in ("kv_tokens", "kv_blocks", "kv_cache_bytes"):
            known = [rank for rank in self.ranks if getattr(rank, figure) is not None]
            if known:
                return min(known, key=lambda rank: int(getattr(rank, figure)))
        return None

    def number(self, key: str) -> int | None:
        """The whole number that the server took for a settings key, or None."""
        return whole(self.settings.get(key))


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """How memory moved during one phase of a start.

    Attributes:
        phase: name of the phase.
        seconds: how long the phase lasted.
        before_bytes: the last sample at or before its begin; None when there is none.
        after_bytes: the last sample at or before its end, and not before its begin.
        peak_bytes: the largest between.
    """

    phase: str
    seconds: float
    before_bytes: float | None
    after_bytes: float | None
    peak_bytes: float | None

    @property
    def rise_bytes(self) -> float | None:
        """By how much it rose; None when either end is unknown."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.after_bytes - self.before_bytes


def memory_by_phase(samples: Iterable[tuple[float, float]], phases: Sequence[Phase]) -> tuple[PhaseMemory, ...]:
    """At which phase of a start memory rose, and by how much.

    Args:
        samples: (seconds, bytes) in order of time, on the same clock as the stamps of the phases.
        phases: as in `StartupFacts`; those without a stamp are passed over.

    Returns:
        One entry for each phase that has an end: a phase lasts until the next begins. The last, normally `ready`, only
        ends the one before it.
    """
    points = list(samples)
    stamped = [(phase.name, phase.stamp.seconds) for phase in phases if phase.stamp is not None]
    moved = []
    for (name, begin), (_, end) in itertools.pairwise(stamped):
        before = [value for seconds, value in points if seconds <= begin]
        within = [value for seconds, value in points if begin <= seconds <= end]
        moved.append(
            PhaseMemory(
                phase=name,
                seconds=end - begin,
                before_bytes=before[-1] if before else None,
                after_bytes=within[-1] if within else None,
                peak_bytes=max(within, default=None),
            )
        )
    return tuple(moved)


def place_on_clock(
    phases: Sequence[Phase], since_seconds: float, until_seconds: float, zones: Iterable[float] = (0.0,)
) -> tuple[Phase, ...] | None:
    """The phases with their times as Unix seconds; None where the log's times fit no moment, or several.

    Logs tell neither their zone nor, often, the year. What was sampled meanwhile does: the start must lie in it.

    Args:
        phases: as in `StartupFacts`.
        since_seconds: when sampling began, Unix time.
        until_seconds: when it ended.
        zones: zones to try, in seconds east of Greenwich.
    """
    stamps = [phase.stamp for phase in phases if phase.stamp is not None]
    if not stamps or stamps[0].kind == StampKind.RELATIVE:
        return None
    origins = [0.0]
    if stamps[0].kind == StampKind.YEARLESS:
        years = range(_year(since_seconds) - 1, _year(until_seconds) + 2)
        origins = [_origin(stamps[0].seconds, year) for year in years]
    east = (0.0,) if stamps[0].kind == StampKind.ZONED else tuple(dict.fromkeys(zones))
    fitting = []
    for shift in dict.fromkeys(origin - zone for origin in origins for zone in east):
        begin, end = stamps[0].seconds + shift, stamps[-1].seconds + shift
        if since_seconds <= end and begin <= until_seconds:
            fitting.append(shift)
    if len(fitting) != 1:
        return None
    return tuple(
        replace(phase, stamp=Stamp(phase.stamp.seconds + fitting[0], StampKind.ZONED)) if phase.stamp else phase
        for phase in phases
    )


def _origin(seconds: float, year: int) -> float:
    """What is to be added to seconds of a leap year so that month, day and time hold in `year`."""
    leap = datetime.fromtimestamp(_LEAP_YEAR + seconds, UTC)
    try:
        return leap.replace(year=year).timestamp() - seconds
    except ValueError:  # 29 February
        return leap.replace(year=year, day=28).timestamp() + 86400.0 - seconds


def _year(seconds: float) -> int:
    return datetime.fromtimestamp(seconds, UTC).year
