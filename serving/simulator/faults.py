"""What can be wrong with a simulated server, and when: the table of faults, their text form, and the plan of a run.

A fault is `NAME[=VALUE][,share=S][,start=T][,end=T][,OPTION=...]`, for example `host_leak_per_hour=200MiB,start=2h` or
`http_500=5%,end=10m`. It acts in `[start, end)`, in seconds since the simulation began. Faults of any kinds combine,
also several of one kind. Three rules say what that means:

- What accumulates (every leak, the cache, `decode_slows_per_hour`) stops growing at `end`; what it did until then stays
  until a restart clears it. To take a fault out of the plan undoes `decode_slows_per_hour` at once.
- Several of one kind add up where they accumulate or delay, multiply where they are factors, and the strictest binds
  where they are limits.
- Which requests are hit is decided by a hash of seed, kind and request id, never by the order of calls. A larger share
  therefore hits the same requests and more, and two faults of one kind hit no more than the larger of them does.

Everything here is pure. Nothing reads a clock; `FaultPlan` changes only through `add` and `remove`.
"""

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serving.errors import ConfigError

__all__ = [
    "FAULT_KINDS",
    "Conditions",
    "Fault",
    "FaultKind",
    "FaultOption",
    "FaultPlan",
    "LifeEvent",
    "LifeKind",
    "Switch",
    "Unit",
    "Where",
    "format_fault",
    "parse_fault",
]

HOUR = 3600.0
_DRAWS = 2**64


class Unit(StrEnum):
    """What a value counts, and so how it is written."""

    FLAG = "flag"
    """No value: it is on."""
    BYTES = "bytes"
    BYTES_PER_HOUR = "bytes per hour"
    COUNT = "count"
    """A mean, so that fractions have a meaning."""
    WHOLE = "whole number"
    COUNT_PER_HOUR = "count per hour"
    RATIO = "ratio"
    RATIO_PER_HOUR = "ratio per hour"
    FACTOR = "factor"
    SHARE = "share"
    SECONDS = "seconds"


class Where(StrEnum):
    """Which part of the server a fault acts on."""

    MEMORY = "memory"
    KV_CACHE = "kv_cache"
    STEP = "step"
    REQUEST = "request"
    ANSWER = "answer"
    METRICS = "metrics"
    LIMITS = "limits"
    LIFE = "life"


@dataclass(frozen=True, slots=True)
class FaultOption:
    """What can be added to one kind of fault. `default` is None where leaving it out means none of it."""

    unit: Unit
    does: str
    default: float | None = None
    required: bool = False
    minimum: float = 0.0
    maximum: float = math.inf


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        name: as written.
        unit: what its value counts.
        where: which part of the server it acts on.
        does: what it does, in one line.
        default: its value where none is given; None where one must be.
        minimum: smallest value.
        has_share: whether `share=` may say which part of the requests it hits. Where the value itself is the share,
            `share=` is another way to write the value.
        options: name -> option.
    """

    name: str
    unit: Unit
    where: Where
    does: str
    default: float | None = None
    minimum: float = 0.0
    has_share: bool = False
    options: Mapping[str, FaultOption] = field(default_factory=dict)


_AFTER = {"after": FaultOption(Unit.WHOLE, "tokens that are sent before", 1.0)}
_EVERY = FaultOption(Unit.SECONDS, "again each time this long after the last, before `end`", minimum=1.0)


def _flag(name: str, where: Where, does: str) -> FaultKind:
    return FaultKind(name, Unit.FLAG, where, does, default=1.0)


def _hits(name: str, where: Where, does: str, options: Mapping[str, FaultOption] | None = None) -> FaultKind:
    return FaultKind(name, Unit.SHARE, where, does, default=1.0, has_share=True, options=options or {})


_KINDS = (
    FaultKind(
        "gpu_leak_per_request",
        Unit.BYTES,
        Where.MEMORY,
        "each request leaves these bytes behind on the first card",
        has_share=True,
    ),
    FaultKind(
        "gpu_leak_per_hour", Unit.BYTES_PER_HOUR, Where.MEMORY, "bytes are lost on the first card as time passes"
    ),
    FaultKind(
        "kv_leak_per_disconnect",
        Unit.COUNT,
        Where.KV_CACHE,
        "each client that goes away leaves these KV blocks taken for ever",
        has_share=True,
    ),
    FaultKind("host_leak_per_hour", Unit.BYTES_PER_HOUR, Where.MEMORY, "host memory is lost as time passes"),
    FaultKind("host_leak_per_token", Unit.BYTES, Where.MEMORY, "host memory is lost with each generated token"),
    FaultKind(
        "cache_fill_per_hour",
        Unit.BYTES_PER_HOUR,
        Where.MEMORY,
        "a bounded cache in host memory fills and stops: looks like a leak and is none",
        options={"cap": FaultOption(Unit.BYTES, "where it stops", required=True)},
    ),
    _flag("high_water", Where.MEMORY, "the host's allocator never returns what the busiest moment took"),
    FaultKind("fd_leak_per_hour", Unit.COUNT_PER_HOUR, Where.MEMORY, "file descriptors are never closed"),
    FaultKind("shm_leak_per_hour", Unit.BYTES_PER_HOUR, Where.MEMORY, "bytes in /dev/shm are never freed"),
    FaultKind(
        "decode_slows_per_hour",
        Unit.RATIO_PER_HOUR,
        Where.STEP,
        "each hour since the server started adds this ratio of its first length to the decoding of a step",
        options={"survives_restart": FaultOption(Unit.FLAG, "a restart does not cure it")},
    ),
    FaultKind("step_slowdown", Unit.FACTOR, Where.STEP, "each step takes this many times as long", minimum=1.0),
    FaultKind(
        "noisy_neighbour",
        Unit.FACTOR,
        Where.STEP,
        "each step takes this many times as long in the first part of each period",
        minimum=1.0,
        options={
            "period": FaultOption(Unit.SECONDS, "how often the neighbour comes", 60.0, minimum=0.001),
            "duty": FaultOption(Unit.SHARE, "share of the period for which it stays", 0.5, maximum=1.0),
        },
    ),
    _hits("stuck_request", Where.REQUEST, "requests stay in the batch for ever and get no more tokens"),
    _hits("zombie", Where.REQUEST, "requests whose client went away go on to their end"),
    _flag("frozen_gauges", Where.METRICS, "gauges keep the value that they had at the start of the fault"),
    FaultKind(
        "clamp_max_batch",
        Unit.WHOLE,
        Where.LIMITS,
        "a server that starts while this is on runs at most this many requests at once",
        minimum=1.0,
    ),
    _flag("limit_ignored", Where.LIMITS, "the configured batch limit is not in effect"),
    FaultKind(
        "oom_at_bytes",
        Unit.BYTES,
        Where.MEMORY,
        "the server dies out of memory when the first card would use more than this",
    ),
    _hits("http_429", Where.ANSWER, "requests are refused with 429"),
    _hits("http_503", Where.ANSWER, "requests are refused with 503"),
    _hits("http_500", Where.ANSWER, "requests fail with 500"),
    _hits("empty_answer", Where.ANSWER, "answers end properly and have no text"),
    _hits("garbage_frame", Where.ANSWER, "a frame that cannot be read comes inside a 200 stream", _AFTER),
    _hits("stream_error", Where.ANSWER, "an error event comes inside a 200 stream", _AFTER),
    _hits("cut_reset", Where.ANSWER, "the connection is reset in the middle of an answer", _AFTER),
    _hits("cut_clean", Where.ANSWER, "the connection is closed cleanly in the middle of an answer", _AFTER),
    _hits("no_terminator", Where.ANSWER, "the stream ends without its terminator"),
    FaultKind(
        "stall",
        Unit.SECONDS,
        Where.ANSWER,
        "an answer stops this long and then goes on",
        has_share=True,
        options=_AFTER,
    ),
    FaultKind("slow_metrics", Unit.SECONDS, Where.METRICS, "the metrics page takes this much longer"),
    _flag("renamed_metrics", Where.METRICS, "metric families have other names, as after an upgrade"),
    FaultKind(
        "crash",
        Unit.SECONDS,
        Where.LIFE,
        "the server dies at `start` and starts again after this long",
        default=0.0,
        options={
            "every": _EVERY,
            "keeps_leaks": FaultOption(Unit.FLAG, "what was leaked is still lost after the restart"),
            "spawn_lottery": FaultOption(
                Unit.RATIO,
                "the step time of each start, the first included, is fixed at 1 +- up to this ratio",
                maximum=0.99,
            ),
        },
    ),
    FaultKind(
        "deploy",
        Unit.SECONDS,
        Where.LIFE,
        "a new release replaces the server at `start`, down for this long; its steps stay and add up",
        default=0.0,
        options={
            "every": _EVERY,
            "memory": FaultOption(
                Unit.BYTES, "needed on top, in the host's memory and on the first card", minimum=-math.inf
            ),
            "speed": FaultOption(Unit.RATIO, "how much faster (slower below 0) it is", minimum=-0.99),
        },
    ),
)

FAULT_KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in _KINDS}
"""Every fault by name. The order of those that act on answers is the order in which one is chosen for a request."""

_ANSWER_RANK = {kind.name: rank for rank, kind in enumerate(_KINDS) if kind.where is Where.ANSWER}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Values are in base units: bytes, seconds, ratios, and per hour where the kind says so.

    Attributes:
        name: a key of `FAULT_KINDS`.
        value: in the kind's unit; 1 for a flag.
        share: part of the requests that it hits; 1 where the value itself is that share.
        start_s: first moment at which it acts, seconds since the simulation began.
        end_s: first moment at which it acts no more.
        options: those that were given, flags as 1.

    Raises:
        ConfigError: an unknown name, or a figure that its kind does not have or allow.
    """

    name: str
    value: float
    share: float = 1.0
    start_s: float = 0.0
    end_s: float = math.inf
    options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = _known(self.name)
        maximum = 1.0 if kind.unit is Unit.SHARE else math.inf
        _check(f"fault {self.name}", self.value, kind.unit, kind.minimum, maximum)
        _check(f"fault {self.name}: share", self.share, Unit.SHARE, 0.0, 1.0)
        if self.share != 1.0 and (not kind.has_share or kind.unit is Unit.SHARE):
            raise ConfigError(f"fault {self.name}: has no share beside its value")
        _check(f"fault {self.name}: start", self.start_s, Unit.SECONDS, 0.0, math.inf)
        if _MOST < self.end_s < math.inf:
            raise ConfigError(
                f"fault {self.name}: end is {self.end_s:g}s, and no more than {_MOST:g}s can be; leave it out"
            )
        if not self.end_s > self.start_s:
            raise ConfigError(f"fault {self.name}: end {self.end_s:g}s must come after start {self.start_s:g}s")
        for name, value in self.options.items():
            option = _known_option(kind, name)
            _check(f"fault {self.name}: {name}", value, option.unit, option.minimum, option.maximum)
        for name, option in kind.options.items():
            if option.required and name not in self.options:
                raise ConfigError(f"fault {self.name}: needs {name}=..., {option.does}")
        every = self.options.get("every")
        if every is not None and every <= self.value:
            raise ConfigError(
                f"fault {self.name}: every {every:g}s it would go down for {self.value:g}s, and so never come back; "
                "make every longer"
            )

    @property
    def kind(self) -> FaultKind:
        """The row of the table."""
        return FAULT_KINDS[self.name]

    @property
    def hit_share(self) -> float:
        """Part of the requests that it hits, 0..1."""
        return self.value if self.kind.unit is Unit.SHARE else self.share

    def option(self, name: str) -> float | None:
        """An option's value, or its default; None where it is neither given nor has one."""
        return self.options.get(name, FAULT_KINDS[self.name].options[name].default)

    def is_on(self, t_s: float) -> bool:
        """Whether it acts at that moment."""
        return self.start_s <= t_s < self.end_s


def parse_fault(text: str, *, now_s: float = 0.0) -> Fault:
    """Read `NAME[=VALUE][,share=S][,start=T][,end=T][,OPTION[=VALUE]]`.

    Args:
        text: bytes as `B`, `KiB`, `MiB`, `GiB`, `TiB`, `kB`, `MB`, `GB`, `TB` or plain; times as `ms`, `s`, `m`, `h`,
            `d` or plain seconds; shares and ratios plain or with `%`; a rate may end in `/h`.
        now_s: `start` where none is given: a fault that is switched on at run time begins now.

    Raises:
        ConfigError: says what is wrong, and the nearest known name for one that is not known.
    """
    parts = [part.strip() for part in text.split(",")]
    name, has_value, written = (piece.strip() for piece in parts[0].partition("="))
    kind = _known(name)
    value: float | None = None
    if has_value:
        value = _read(f"fault {name}", written, kind.unit)
    share: float | None = None
    start_s, end_s = now_s, math.inf
    options: dict[str, float] = {}
    seen: set[str] = set()
    for part in parts[1:]:
        key, has_setting, setting = (piece.strip() for piece in part.partition("="))
        where = f"fault {name}: {key}"
        if key in seen:
            raise ConfigError(f"{where} is written a second time; keep one")
        seen.add(key)
        if key == "share" and kind.has_share:
            share = _read(where, setting, Unit.SHARE)
        elif key == "start":
            start_s = _read(where, setting, Unit.SECONDS)
        elif key == "end":
            end_s = _read(where, setting, Unit.SECONDS)
        else:
            option = _known_option(kind, key)
            if option.unit is not Unit.FLAG:
                options[key] = _read(where, setting, option.unit)
            elif not has_setting or _read(where, setting, Unit.FLAG):
                options[key] = 1.0
    if kind.unit is Unit.SHARE and share is not None:
        if value is not None:
            raise ConfigError(f"fault {name}: its value is its share; give one of {name}={written} and share=")
        value, share = share, None
    if value is None:
        value = kind.default
    if value is None:
        raise ConfigError(f"fault {name}: needs a value in {kind.unit}: {name}=...; {kind.does}")
    return Fault(name, value, 1.0 if share is None else share, start_s, end_s, options)


def format_fault(fault: Fault) -> str:
    """The fault as text; `parse_fault` gives the same fault back, whatever its `now_s`."""
    kind = fault.kind
    parts = [fault.name if kind.unit is Unit.FLAG else f"{fault.name}={_write(fault.value, kind.unit)}"]
    if fault.share != 1.0:
        parts.append(f"share={_write(fault.share, Unit.SHARE)}")
    parts.append(f"start={_write(fault.start_s, Unit.SECONDS)}")
    if fault.end_s != math.inf:
        parts.append(f"end={_write(fault.end_s, Unit.SECONDS)}")
    for name in sorted(fault.options):
        unit = kind.options[name].unit
        parts.append(name if unit is Unit.FLAG else f"{name}={_write(fault.options[name], unit)}")
    return ",".join(parts)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the faults make of the server from `valid_from_s` to before `valid_until_s`. The defaults are health.

    Attributes:
        step_factor: each step takes this many times as long.
        decode_base: the decode factor at `valid_from_s`.
        decode_per_second: what is added to it with each second.
        gpu_leak_bytes_per_second: lost on the first card.
        gpu_leak_bytes_per_request: the same with each request, on average over all.
        host_leak_bytes_per_second: lost in the host's memory.
        host_leak_bytes_per_token: the same with each generated token.
        cache_fill_bytes_per_second: growth of the bounded cache in host memory.
        cache_cap_bytes: where that growth stops; infinite while nothing fills. A smaller cap never shrinks the cache:
            `cache_after` does that sum.
        high_water: memory that the busiest moment took is not returned.
        fd_leak_per_second: descriptors.
        shm_leak_bytes_per_second: in /dev/shm.
        kv_leak_blocks_per_disconnect: on average over all disconnects; `FaultPlan.kv_leak_blocks` says it of one.
        zombie_share: of the requests whose client goes away.
        stuck_share: of all requests.
        max_batch_clamp: the batch limit that this start of the server was clamped to.
        limit_ignored: the batch limit is not in effect.
        oom_at_bytes: memory in use at which the server dies.
        gauges_frozen: gauges no longer move.
        metrics_renamed: the metrics page is that of another release.
        metrics_delay_seconds: how much longer it takes.
        valid_from_s: since when this holds.
        valid_until_s: the next moment at which any of it may change while the plan and the server's start stay.
    """

    step_factor: float = 1.0
    decode_base: float = 1.0
    decode_per_second: float = 0.0
    gpu_leak_bytes_per_second: float = 0.0
    gpu_leak_bytes_per_request: float = 0.0
    host_leak_bytes_per_second: float = 0.0
    host_leak_bytes_per_token: float = 0.0
    cache_fill_bytes_per_second: float = 0.0
    cache_cap_bytes: float = math.inf
    high_water: bool = False
    fd_leak_per_second: float = 0.0
    shm_leak_bytes_per_second: float = 0.0
    kv_leak_blocks_per_disconnect: float = 0.0
    zombie_share: float = 0.0
    stuck_share: float = 0.0
    max_batch_clamp: int | None = None
    limit_ignored: bool = False
    oom_at_bytes: float | None = None
    gauges_frozen: bool = False
    metrics_renamed: bool = False
    metrics_delay_seconds: float = 0.0
    valid_from_s: float = 0.0
    valid_until_s: float = math.inf

    def decode_factor(self, t_s: float) -> float:
        """How many times as long the decoding part of a step takes that begins at `t_s`."""
        return self.decode_base + self.decode_per_second * (t_s - self.valid_from_s)

    def cache_after(self, filled_bytes: float, seconds: float) -> float:
        """Bytes in the bounded cache when these conditions have held for `seconds`."""
        grown = min(self.cache_cap_bytes, filled_bytes + self.cache_fill_bytes_per_second * seconds)
        return max(filled_bytes, grown)


class LifeKind(StrEnum):
    """Why a server goes down."""

    CRASH = "crash"
    DEPLOY = "deploy"


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """The server goes down at `t_s` and starts again `down_seconds` later.

    Attributes:
        keeps_leaks: what was leaked is still lost after the restart.
        memory_bytes: what the new release needs on top of the one before.
        speed_ratio: how much faster it is than the one before; steps take 1 / (1 + ratio) times as long.
        fault_id: id in the plan.
    """

    t_s: float
    kind: LifeKind
    down_seconds: float
    keeps_leaks: bool
    memory_bytes: float
    speed_ratio: float
    fault_id: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Switch:
    """A fault begins or ends."""

    t_s: float
    on: bool
    fault_id: int
    fault: Fault


class FaultPlan:
    """The faults of a run, by id. Queries are pure: they depend on the faults, the seed and their arguments alone.

    Args:
        faults: those that are there from the beginning; ids count from 1.
        seed: decides which requests are hit.
    """

    def __init__(self, faults: Iterable[Fault] = (), *, seed: int = 0) -> None:
        self.seed = seed
        self.version = 0
        """Changes with each `add` and `remove`: whoever keeps conditions until they expire has to look at it too."""
        self._faults: dict[int, Fault] = {}
        self._last_id = 0
        self._answers: list[Fault] = []
        self._life: list[tuple[int, Fault]] = []
        self._current: Conditions | None = None
        self._current_started_s = 0.0
        for fault in faults:
            self.add(fault)

    @property
    def faults(self) -> dict[int, Fault]:
        """A copy of what is in the plan: id -> fault."""
        return dict(self._faults)

    def add(self, fault: Fault) -> int:
        """Put one more fault into the plan and return its id."""
        self._last_id += 1
        self._faults[self._last_id] = fault
        self._changed()
        return self._last_id

    def remove(self, fault_id: int) -> Fault:
        """Take a fault out of the plan and return it.

        Raises:
            ConfigError: there is none with this id.
        """
        if fault_id not in self._faults:
            there = ", ".join(map(str, self._faults)) or "none"
            raise ConfigError(f"fault {fault_id} is not in the plan; there: {there}")
        fault = self._faults.pop(fault_id)
        self._changed()
        return fault

    def conditions(self, t_s: float, started_s: float) -> Conditions:
        """What holds at `t_s` for a server whose present start began at `started_s`."""
        current = self._current
        if (
            current is not None
            and self._current_started_s == started_s
            and current.valid_from_s <= t_s < current.valid_until_s
        ):
            return current
        current = self._conditions(t_s, started_s)
        self._current, self._current_started_s = current, started_s
        return current

    def answer_fault(self, request_id: int, t_s: float) -> Fault | None:
        """What goes wrong with the answer to this request, where that is decided at `t_s`.

        Where several hit it, the first in the order of `FAULT_KINDS` counts: refusals before broken streams. Of one
        kind it is the one with the smallest share, so that a rare long stall shows beside frequent short ones.
        """
        for fault in self._answers:
            if fault.is_on(t_s) and self._hits(fault.name, request_id, fault.hit_share):
                return fault
        return None

    def is_stuck(self, request_id: int, t_s: float) -> bool:
        """Whether this request, which arrives at `t_s`, never ends."""
        return self._any_hits("stuck_request", request_id, t_s)

    def is_zombie(self, request_id: int, t_s: float) -> bool:
        """Whether this request, whose client goes away at `t_s`, goes on."""
        return self._any_hits("zombie", request_id, t_s)

    def kv_leak_blocks(self, request_id: int, t_s: float) -> int:
        """KV blocks that are lost when this request's client goes away at `t_s`.

        A fraction of a block is lost by as many of the requests; the mean over many is the one in the conditions.
        """
        blocks = 0
        for fault in self._faults.values():
            if (
                fault.name == "kv_leak_per_disconnect"
                and fault.is_on(t_s)
                and self._hits(fault.name, request_id, fault.share)
            ):
                whole = int(fault.value)
                blocks += whole + self._hits("kv_leak_fraction", request_id, fault.value - whole)
        return blocks

    def next_life_event(self, from_s: float, to_s: float) -> LifeEvent | None:
        """The first of `life_events`, without the rest of them; None when there is none."""
        first: LifeEvent | None = None
        for fault_id, fault in self._life:
            t_s = _first_turn(fault, from_s)
            if from_s <= t_s < min(to_s, fault.end_s) and (first is None or t_s < first.t_s):
                first = _life_event(t_s, fault_id, fault)
        return first

    def life_events(self, from_s: float, to_s: float) -> list[LifeEvent]:
        """Crashes and deploys in `[from_s, to_s)`, in order of time, then of ids.

        Raises:
            ValueError: `to_s` is not finite, so that the list might not end.
        """
        if not math.isfinite(to_s):
            raise ValueError(f"life events need an end, not {to_s}")
        events: list[LifeEvent] = []
        for fault_id, fault in self._life:
            at_s = from_s
            while at_s <= (t_s := _first_turn(fault, at_s)) < min(to_s, fault.end_s):
                events.append(_life_event(t_s, fault_id, fault))
                at_s = math.nextafter(t_s, math.inf)
        events.sort(key=lambda event: (event.t_s, event.fault_id))
        return events

    def switches(self, from_s: float, to_s: float) -> list[Switch]:
        """Beginnings and ends in `[from_s, to_s)`, in order of time, ends first; crashes and deploys have none."""
        found: list[Switch] = []
        for fault_id, fault in self._faults.items():
            if fault.kind.where is not Where.LIFE:
                found += [
                    Switch(t_s, on, fault_id, fault)
                    for t_s, on in ((fault.start_s, True), (fault.end_s, False))
                    if from_s <= t_s < to_s
                ]
        found.sort(key=lambda switch: (switch.t_s, switch.on, switch.fault_id))
        return found

    def spawn_factor(self, start_number: int) -> float:
        """How many times as long the steps of this start of the server take: what `spawn_lottery` drew for it.

        The draw is even within 1 +- the ratio, and a property of the start alone: the fault's `start` is when the
        server crashes, not when luck begins.
        """
        factor = 1.0
        for _, fault in self._life:
            ratio = fault.option("spawn_lottery") if fault.name == "crash" else None
            if ratio:
                factor *= 1.0 + ratio * (2.0 * self._draw("spawn_lottery", start_number) / _DRAWS - 1.0)
        return factor

    def _changed(self) -> None:
        self.version += 1
        self._current = None
        self._answers = sorted(
            (fault for fault in self._faults.values() if fault.kind.where is Where.ANSWER),
            key=lambda fault: (_ANSWER_RANK[fault.name], fault.hit_share, format_fault(fault)),
        )
        self._life = [(key, fault) for key, fault in self._faults.items() if fault.kind.where is Where.LIFE]

    def _draw(self, what: str, number: int) -> int:
        """Evenly in 0.._DRAWS - 1, and always the same for the same words."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}:{what}:{number}".encode(), digest_size=8).digest())

    def _hits(self, what: str, number: int, share: float) -> bool:
        return share > 0.0 and (share >= 1.0 or self._draw(what, number) < int(share * _DRAWS))

    def _any_hits(self, name: str, request_id: int, t_s: float) -> bool:
        return any(
            fault.name == name and fault.is_on(t_s) and self._hits(name, request_id, fault.value)
            for fault in self._faults.values()
        )

    def _conditions(self, t_s: float, started_s: float) -> Conditions:
        step_factor = 1.0
        gpu_second = gpu_request = host_second = host_token = fill = fds = shm = kv_blocks = delay = 0.0
        cap = zombie = stuck = 0.0
        clamps: list[float] = []
        limits: list[float] = []
        flags: set[str] = set()
        slowing: list[tuple[float, float, float]] = []
        edges = [started_s]
        for fault in self._faults.values():
            name, value = fault.name, fault.value
            if name == "clamp_max_batch":
                if fault.is_on(started_s):
                    clamps.append(value)
                continue
            if fault.kind.where in (Where.LIFE, Where.ANSWER):
                continue
            edges += (fault.start_s, fault.end_s)
            if name == "decode_slows_per_hour":
                origin_s = fault.start_s if fault.option("survives_restart") else max(fault.start_s, started_s)
                slowing.append((origin_s, max(origin_s, fault.end_s), value / HOUR))
                continue
            if not fault.is_on(t_s):
                continue
            match name:
                case "gpu_leak_per_request":
                    gpu_request += value * fault.share
                case "gpu_leak_per_hour":
                    gpu_second += value / HOUR
                case "kv_leak_per_disconnect":
                    kv_blocks += value * fault.share
                case "host_leak_per_hour":
                    host_second += value / HOUR
                case "host_leak_per_token":
                    host_token += value
                case "cache_fill_per_hour":
                    fill += value / HOUR
                    cap += fault.options["cap"]
                case "fd_leak_per_hour":
                    fds += value / HOUR
                case "shm_leak_per_hour":
                    shm += value / HOUR
                case "step_slowdown":
                    step_factor *= value
                case "noisy_neighbour":
                    is_there, neighbour_edges = _neighbour(fault, t_s)
                    edges += neighbour_edges
                    step_factor *= value if is_there else 1.0
                case "stuck_request":
                    stuck = max(stuck, value)
                case "zombie":
                    zombie = max(zombie, value)
                case "oom_at_bytes":
                    limits.append(value)
                case "slow_metrics":
                    delay += value
                case _:
                    flags.add(name)
        from_s = max((edge for edge in edges if edge <= t_s), default=0.0)
        return Conditions(
            step_factor=step_factor,
            # Counted from the edge, never from the moment of the call: the factor must not depend on who asked when.
            decode_base=1.0
            + sum(rate * (min(from_s, end_s) - origin_s) for origin_s, end_s, rate in slowing if origin_s < from_s),
            decode_per_second=sum(rate for origin_s, end_s, rate in slowing if origin_s <= t_s < end_s),
            gpu_leak_bytes_per_second=gpu_second,
            gpu_leak_bytes_per_request=gpu_request,
            host_leak_bytes_per_second=host_second,
            host_leak_bytes_per_token=host_token,
            cache_fill_bytes_per_second=fill,
            cache_cap_bytes=cap if fill else math.inf,
            high_water="high_water" in flags,
            fd_leak_per_second=fds,
            shm_leak_bytes_per_second=shm,
            kv_leak_blocks_per_disconnect=kv_blocks,
            zombie_share=zombie,
            stuck_share=stuck,
            max_batch_clamp=int(min(clamps)) if clamps else None,
            limit_ignored="limit_ignored" in flags,
            oom_at_bytes=min(limits, default=None),
            gauges_frozen="frozen_gauges" in flags,
            metrics_renamed="renamed_metrics" in flags,
            metrics_delay_seconds=delay,
            valid_from_s=from_s,
            valid_until_s=min((edge for edge in edges if edge > t_s), default=math.inf),
        )


def _turn(t_s: float, start_s: float, period_s: float) -> int:
    """The number of the last beginning of a period at or before `t_s`, exactly as `start + turn * period` has them."""
    turn = max(0, math.floor((t_s - start_s) / period_s))
    while turn > 0 and start_s + turn * period_s > t_s:
        turn -= 1
    while start_s + (turn + 1) * period_s <= t_s:
        turn += 1
    return turn


def _first_turn(fault: Fault, from_s: float) -> float:
    """When a crash or deploy happens for the first time at or after `from_s`; before it where it never does again."""
    every = fault.option("every")
    if every is None or from_s <= fault.start_s:
        return fault.start_s
    turn = _turn(from_s, fault.start_s, every)
    t_s = fault.start_s + turn * every
    return t_s if t_s >= from_s else fault.start_s + (turn + 1) * every


def _life_event(t_s: float, fault_id: int, fault: Fault) -> LifeEvent:
    get = fault.options.get
    return LifeEvent(
        t_s=t_s,
        kind=LifeKind(fault.name),
        down_seconds=fault.value,
        keeps_leaks=bool(get("keeps_leaks")),
        memory_bytes=get("memory", 0.0),
        speed_ratio=get("speed", 0.0),
        fault_id=fault_id,
        fault=fault,
    )


def _neighbour(fault: Fault, t_s: float) -> tuple[bool, list[float]]:
    """Whether the noisy neighbour is there, and the moments around `t_s` at which it comes or goes."""
    period = fault.option("period") or 1.0
    duty = fault.option("duty") or 0.0
    turn = _turn(t_s, fault.start_s, period)
    comes = fault.start_s + turn * period
    goes = comes + duty * period
    returns = fault.start_s + (turn + 1) * period
    return t_s < goes, [comes, goes, returns]


def _known(name: str) -> FaultKind:
    kind = FAULT_KINDS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, FAULT_KINDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FAULT_KINDS)}"
        raise ConfigError(f"unknown fault {name!r}; {hint}")
    return kind


def _known_option(kind: FaultKind, name: str) -> FaultOption:
    option = kind.options.get(name)
    if option is None:
        if name == "share":
            raise ConfigError(f"fault {kind.name}: has no share: it does not act on single requests")
        known = [*(["share"] if kind.has_share else []), "start", "end", *kind.options]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        raise ConfigError(f"fault {kind.name}: unknown option {name!r}; {hint}")
    return option


_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z%]*)(/h)?", re.IGNORECASE)
_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": HOUR, "d": 24 * HOUR}
_PER_HOUR = (Unit.BYTES_PER_HOUR, Unit.COUNT_PER_HOUR, Unit.RATIO_PER_HOUR)
_EXAMPLES = {
    Unit.BYTES: "64MiB, 1.5GiB or plain bytes",
    Unit.BYTES_PER_HOUR: "64MiB or 64MiB/h",
    Unit.COUNT: "a plain number",
    Unit.WHOLE: "a plain number",
    Unit.COUNT_PER_HOUR: "12 or 12/h",
    Unit.RATIO: "0.1 or 10%",
    Unit.RATIO_PER_HOUR: "0.02, 2% or 2%/h",
    Unit.FACTOR: "1.5 or 1.5x",
    Unit.SHARE: "0.1 or 10%",
    Unit.SECONDS: "500ms, 90s, 5m, 2h, 1d or plain seconds",
}


def _read(where: str, text: str, unit: Unit) -> float:
    """A value with its unit, in base units."""
    if unit is Unit.FLAG:
        if text not in ("true", "false"):
            raise ConfigError(f"{where}: it is on or off: leave out the value, not {text!r}")
        return float(text == "true")
    match = _NUMBER.fullmatch(text)
    value = None if match is None else _scaled(float(match[1]), match[2].lower(), bool(match[3]), unit)
    if value is None:
        raise ConfigError(f"{where}: cannot read {text!r} as {unit}; write {_EXAMPLES[unit]}")
    return value


def _scaled(number: float, suffix: str, per_hour: bool, unit: Unit) -> float | None:
    """The number in base units; None where the suffix does not belong to the unit."""
    if per_hour and unit not in _PER_HOUR:
        return None
    match unit:
        case Unit.BYTES | Unit.BYTES_PER_HOUR:
            scale = _BYTES.get(suffix)
            return None if scale is None else number * scale
        case Unit.SECONDS:
            if suffix == "ms":
                return number / 1000
            seconds = _SECONDS.get(suffix)
            return None if seconds is None else number * seconds
        case Unit.SHARE | Unit.RATIO | Unit.RATIO_PER_HOUR:
            return number / 100 if suffix == "%" else None if suffix else number
        case Unit.FACTOR:
            return number if suffix in ("", "x") else None
        case _:
            return None if suffix else number


def _write(value: float, unit: Unit) -> str:
    """The shortest text that `_read` reads as exactly this value."""
    plain = _plain(value)
    scales: Mapping[str, float]
    match unit:
        case Unit.BYTES | Unit.BYTES_PER_HOUR:
            scales = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        case Unit.SECONDS:
            plain += "s"
            scales = {"m": 60.0, "h": HOUR}
        case _:
            return plain
    texts = [plain]
    texts += [
        _plain(value / scale) + suffix
        for suffix, scale in scales.items()
        if value and float(_plain(value / scale)) * scale == value
    ]
    return min(texts, key=len)


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


_MOST = 1e18
"""Of anything: what is made of it, in nanoseconds, can still be reckoned with."""


def _check(where: str, value: float, unit: Unit, minimum: float, maximum: float) -> None:
    if not math.isfinite(value) or not minimum <= value <= min(maximum, _MOST):
        limits = f"{minimum:g} to {maximum:g}" if maximum != math.inf else f"{minimum:g} or more"
        limits += f", and no more than {_MOST:g}" if value > _MOST else ""
        raise ConfigError(f"{where} is {value:g}; it must be {limits} ({unit})")
    if unit is Unit.WHOLE and value != int(value):
        raise ConfigError(f"{where} is {value:g}; it must be a whole number")
    if unit is Unit.FLAG and value != 1.0:
        raise ConfigError(f"{where} is {value:g}; it is on, or left out")
