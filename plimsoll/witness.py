"""Sampling a target around something that is done to it: what its gauges, GPUs and processes showed meanwhile."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import aiohttp

from monitor.gpu import gpu_reader
from monitor.http import BaseUrl
from monitor.process import ServerProcesses
from monitor.sampler import ReadTarget, Sampler, Tick, find_restart, target_reader
from serving.clock import Clock
from serving.engines import ENGINES, TargetFacts

__all__ = ["MemoryUse", "Witness", "others_ran", "witness"]

_INTERVAL_SECONDS = 0.1
"""Short, because what is looked at may last a second."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use at one moment, or of a span of time (a median, a peak).

    Attributes:
        gpus: GPU uuid -> bytes in use on the whole card.
        process_bytes: anonymous memory of the server's processes; None where they cannot be seen.
    """

    gpus: Mapping[str, float]
    process_bytes: float | None

    @property
    def is_seen(self) -> bool:
        """Whether there is any figure at all."""
        return bool(self.gpus) or self.process_bytes is not None

    def minus(self, other: "MemoryUse") -> "MemoryUse":
        """The increment over `other`, of what both have."""
        shared = {card: used - other.gpus[card] for card, used in self.gpus.items() if card in other.gpus}
        if self.process_bytes is None or other.process_bytes is None:
            return MemoryUse(shared, None)
        return MemoryUse(shared, self.process_bytes - other.process_bytes)


class Witness:
    """The ticks so far. Spans are given by `clock.now_ns()` at their ends."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ticks: list[Tick] = []
        self._fresh = asyncio.Event()

    def on_tick(self, tick: Tick) -> None:
        """Take a tick in."""
        self.ticks.append(tick)
        self._fresh.set()

    async def next(self) -> Tick:
        """The next tick that begins from now on."""
        begun_ns = self.clock.now_ns()
        while not self.ticks or self.ticks[-1].t_ns < begun_ns:
            self._fresh.clear()
            await self._fresh.wait()
        return self.ticks[-1]

    async def gather(self, count: int) -> list[Tick]:
        """The next `count` ticks."""
        return [await self.next() for _ in range(count)]

    def between(self, since_ns: int, until_ns: int | None = None) -> list[Tick]:
        """Ticks that began in the span; until now when it has no end."""
        return [tick for tick in self.ticks if tick.t_ns >= since_ns and (until_ns is None or tick.t_ns <= until_ns)]

    @property
    def restart(self) -> str | None:
        """Why the server was restarted since the first tick, or None when it was not."""
        up = [tick for tick in self.ticks if tick.up]
        for before, after in itertools.pairwise(up):
            if (why := find_restart(before, after)) is not None:
                return why
        return None

    @staticmethod
    def memory(ticks: Sequence[Tick], fold: Callable[[list[float]], float] = median) -> MemoryUse:
        """Memory in use over these ticks: the median, or what `fold` makes of it (`max`)."""
        cards: dict[str, list[float]] = {}
        processes: list[float] = []
        for tick in ticks:
            for card, values in tick.gpus.items():
                if "gpu_memory_used_bytes" in values:
                    cards.setdefault(card, []).append(values["gpu_memory_used_bytes"])
            parts = [role.get("process_anonymous_memory_bytes") for role in tick.processes.values()]
            known = [part for part in parts if part is not None]
            if known and len(known) == len(parts):
                processes.append(sum(known))
        return MemoryUse({card: fold(used) for card, used in cards.items()}, fold(processes) if processes else None)


def others_ran(before: Sequence[Tick], since: Sequence[Tick]) -> bool | None:
    """Whether any request but ours was seen on the server; None where it does not tell what runs.

    Args:
        before: samples from when none of ours was under way.
        since: samples from when at most one of ours was.
    """
    idle, busy = (
        [
            tick.values["requests_running"] + tick.values.get("requests_waiting", 0.0)
            for tick in ticks
            if "requests_running" in tick.values
        ]
        for ticks in (before, since)
    )
    if not idle and not busy:
        return None
    return max(idle, default=0.0) > 0 or max(busy, default=0.0) > 1


@contextlib.asynccontextmanager
async def witness(
    session: aiohttp.ClientSession,
    base: BaseUrl,
    facts: TargetFacts,
    clock: Clock,
    *,
    gpu: str = "auto",
    pid: int | None = None,
    read: ReadTarget | None = None,
) -> AsyncIterator[Witness]:
    """Sample the target ten times a second while the block runs.

    Args:
        session: for the scrapes.
        base: where the target is; its processes are looked at when that is this host.
        facts: what probing it told.
        clock: of the ticks.
        gpu: where GPUs are read; `auto` looks at this host's only when the server runs on it.
        pid: the server's process, where the user knows it.
        read: what scrapes the target in place of HTTP.

    Raises:
        ConfigError: `gpu` is no source of GPU figures.
    """
    here = base.is_loopback or pid is not None
    reader = gpu_reader("none" if gpu == "auto" and not here else gpu)
    engine = ENGINES[facts.engine]
    sampler = Sampler(
        clock,
        read or target_reader(session, base.text, engine, kv_cache_capacity_tokens=facts.kv_cache_capacity_tokens),
        gpu=reader,
        processes=ServerProcesses(base.port, pid=pid) if here else None,
        interval_seconds=_INTERVAL_SECONDS,
    )
    seen = Witness(clock)
    sampler.add_listener(seen.on_tick)
    task = asyncio.create_task(sampler.run())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await reader.close()
