"""The sampler: target, GPUs and processes at the same tick, every second, on one clock.

A scrape that failed is a tick with `up` 0 and without the target's values: a gap, never a zero and never an old value
again. Ticks keep to an absolute schedule, so that a year of them does not drift, and never overlap: those that fall
into a slow scrape are counted and left out.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import aiohttp

from monitor.gpu import BoundedCall, GpuReader, NoGpuReader
from monitor.http import converse
from monitor.process import ServerProcesses, host_memory
from serving.clock import NS, Clock
from serving.engines import Engine, Reading, ScrapeFailure, scrape
from serving.errors import ConfigError
from serving.exposition import Histogram
from serving.records import Event
from serving.signals import SIGNALS, Kind

__all__ = ["LocalView", "ReadLocal", "ReadTarget", "Sampler", "Tick", "find_restart", "target_reader"]

_log = logging.getLogger(__name__)

_START_TIMESTAMP = "engine_start_timestamp_seconds"
_FROM_PROC = "/proc"
_START_TOLERANCE_SECONDS = 2.0
"""Start times that servers work out from a wall clock may move by its corrections."""
_PROCESS_DEADLINE_S = 1.0

ReadTarget: TypeAlias = Callable[[], Awaitable[Reading | ScrapeFailure]]
"""One scrape of the target. Must come to an end by itself, and tells of failures instead of raising."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalView:
    """What the host on which the server runs tells of it: host signals, process signals by role, which start it is."""

    host: Mapping[str, float] = field(default_factory=dict)
    processes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    start_mark: str | None = None
    start_timestamp_seconds: float | None = None


ReadLocal: TypeAlias = Callable[[], Awaitable[LocalView]]
"""One look at the host; nothing where the server runs elsewhere."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Everything that was seen at one moment.

    Attributes:
        t_ns: when the reading began.
        up: whether the target's scrape succeeded.
        values: target-scope signals; always `up` and `scrape_duration_seconds`, the host's memory when the server runs
            on this host, and the engine's signals when up.
        sources: signal -> the engine's own name for it.
        histograms: histogram signal -> the engine's cumulative histogram.
        gpus: GPU uuid -> GPU signals.
        processes: role -> process signals, summed over the role.
        failure: why the scrape failed, None when up.
        server_mark: what the server says that differs after a restart, if anything.
        process_mark: the same, of the process that listens, when it runs on this host.
    """

    t_ns: int
    up: bool
    values: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    gpus: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    processes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failure: str | None = None
    server_mark: str | None = None
    process_mark: str | None = None

    def histogram_totals(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each histogram that tells both, as the history keeps them."""
        return {
            name: (histogram.sum, histogram.count)
            for name, histogram in self.histograms.items()
            if histogram.sum is not None
        }


def target_reader(
    session: aiohttp.ClientSession,
    base_url: str,
    engine: Engine,
    *,
    kv_cache_capacity_tokens: int | None = None,
    timeout_s: float = 10.0,
) -> ReadTarget:
    """The usual scrape of a target over HTTP; arguments as of `serving.engines.scrape`."""

    async def read() -> Reading | ScrapeFailure:
        conversation = scrape(engine, kv_cache_capacity_tokens=kv_cache_capacity_tokens, timeout_s=timeout_s)
        return await converse(session, base_url, conversation)

    return read


def find_restart(before: Tick, after: Tick) -> str | None:
    """Why `after` saw another start of the server than `before`, or None when it saw the same one.

    What the server itself says of its start decides, where both ticks have it. Otherwise another process on the port
    is another start, and so is a counter that fell: but only from the same source, as one that now comes from another
    of the engine's names says nothing, and also under the same process, which may only supervise the engine.
    """
    then, now = before.server_mark, after.server_mark
    if then is not None and now is not None:
        return None if then == now else f"the server says that it was started again ({then} was its start mark)"
    if _is_comparable(_START_TIMESTAMP, before, after) and after.sources.get(_START_TIMESTAMP) != _FROM_PROC:
        moved_seconds = after.values[_START_TIMESTAMP] - before.values[_START_TIMESTAMP]
        if abs(moved_seconds) <= _START_TOLERANCE_SECONDS:
            return None
        return f"the server says that it started {moved_seconds:+.0f} s from what it said before"
    then, now = before.process_mark, after.process_mark
    if then is not None and now is not None and then != now:
        return f"another process serves: {now}, before: {then}"
    for name in after.values:
        if _is_counter(name) and _is_comparable(name, before, after) and after.values[name] < before.values[name]:
            return f"{name} fell from {before.values[name]:g} to {after.values[name]:g}"
    return None


class Sampler:
    """Reads everything at every tick and hands the tick to its listeners.

    Args:
        clock: the run's clock.
        read: one scrape of the target.
        gpu: reader of the GPUs; none by default.
        processes: the server's processes, when it runs on this host; the host's memory is then read as well.
        local: what tells of the host instead of `processes`.
        interval_seconds: from tick to tick.

    Raises:
        ConfigError: an interval that is not above 0.
    """

    def __init__(
        self,
        clock: Clock,
        read: ReadTarget,
        *,
        gpu: GpuReader | None = None,
        processes: ServerProcesses | None = None,
        local: ReadLocal | None = None,
        interval_seconds: float = 1.0,
    ) -> None:
        if not interval_seconds > 0:
            raise ConfigError(f"a sampling interval of {interval_seconds:g} s is not above 0")
        self._clock = clock
        self._read = read
        self._gpu = gpu or NoGpuReader()
        self._processes = processes
        self._process_call = BoundedCall(_PROCESS_DEADLINE_S)
        self._read_local = local or self._read_processes
        self._interval_ns = max(1, round(interval_seconds * NS))
        self._listeners: list[Callable[[Tick], None]] = []
        self._event_listeners: list[Callable[[Event], None]] = []
        self._last_up: Tick | None = None
        self.skipped_ticks = 0
        """Ticks left out because an earlier one was not done."""
        self.errors: Counter[str] = Counter()
        """Exceptions caught since the start, by where; each means a bug, and the sampler went on."""

    def add_listener(self, listener: Callable[[Tick], None]) -> None:
        """Call `listener` with every tick of `run`, in the order of adding."""
        self._listeners.append(listener)

    def add_event_listener(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with every event of `run`; a `restart` comes before the first tick after it."""
        self._event_listeners.append(listener)

    async def run(self) -> None:
        """Tick until cancelled."""
        due_ns = self._clock.now_ns()
        while True:
            tick = await self.read_once()
            self._publish(tick)
            # The tick that is due at this very moment is still to come; those before it are past.
            missed = max(0, (self._clock.now_ns() - due_ns - 1) // self._interval_ns)
            self.skipped_ticks += missed
            due_ns += (missed + 1) * self._interval_ns
            await self._clock.sleep((due_ns - self._clock.now_ns()) / NS)

    async def read_once(self) -> Tick:
        """Read everything now, at once; listeners are not told."""
        t_ns = self._clock.now_ns()
        outcome, gpus, local = await asyncio.gather(
            self._guard("target", self._read, _BROKEN_SCRAPE),
            self._guard("gpu", self._gpu.read, dict[str, dict[str, float]]()),
            self._guard("processes", self._read_local, LocalView()),
        )
        values = dict(local.host)
        if isinstance(outcome, ScrapeFailure):
            values |= {"up": 0.0, "scrape_duration_seconds": outcome.seconds}
            return Tick(
                t_ns,
                up=False,
                values=values,
                gpus=gpus,
                processes=local.processes,
                failure=f"{outcome.reason}: {outcome.detail}",
                process_mark=local.start_mark,
            )
        values |= outcome.values
        values |= {"up": 1.0, "scrape_duration_seconds": outcome.seconds}
        sources = dict(outcome.sources)
        if _START_TIMESTAMP not in values and local.start_timestamp_seconds is not None:
            values[_START_TIMESTAMP] = local.start_timestamp_seconds
            sources[_START_TIMESTAMP] = _FROM_PROC
        return Tick(
            t_ns,
            up=True,
            values=values,
            sources=sources,
            histograms=outcome.histograms,
            gpus=gpus,
            processes=local.processes,
            server_mark=outcome.start_mark,
            process_mark=local.start_mark,
        )

    async def _read_processes(self) -> LocalView:
        processes = self._processes
        if processes is None:
            return LocalView()

        def read() -> LocalView:
            by_role = processes.read()
            return LocalView(
                host_memory(processes.proc), by_role, processes.start_mark, processes.start_timestamp_seconds
            )

        # In a thread: the command line of a process that is stuck in the kernel can block its reader.
        return await self._process_call.run(read) or LocalView()

    def _publish(self, tick: Tick) -> None:
        if tick.up:
            why = None if self._last_up is None else find_restart(self._last_up, tick)
            if why is not None:
                event = Event(tick.t_ns, "restart", why)
                for event_listener in self._event_listeners:
                    self._tell(event_listener, event)
            self._last_up = tick
        for listener in self._listeners:
            self._tell(listener, tick)

    async def _guard(self, name: str, read: Callable[[], Awaitable[T]], otherwise: T) -> T:
        try:
            return await read()
        except Exception:  # noqa: BLE001 - one of the loops that must go on for months
            self._count_error(name)
            return otherwise

    def _tell(self, listener: Callable[[T], None], what: T) -> None:
        try:
            listener(what)
        except Exception:  # noqa: BLE001 - as above
            self._count_error(f"listener {getattr(listener, '__qualname__', type(listener).__name__)}")

    def _count_error(self, where: str) -> None:
        self.errors[where] += 1
        if self.errors[where] == 1:  # once: the same bug at every tick would fill the disk
            _log.exception("the sampler goes on after an error (%s); more of these are only counted", where)


_BROKEN_SCRAPE: Reading | ScrapeFailure = ScrapeFailure(
    "internal", "reading the target raised an error of ours; it is in the log"
)


def _is_counter(name: str) -> bool:
    return name in SIGNALS and SIGNALS[name].kind is Kind.COUNTER


def _is_comparable(name: str, before: Tick, after: Tick) -> bool:
    return name in before.values and name in after.values and before.sources.get(name) == after.sources.get(name)
