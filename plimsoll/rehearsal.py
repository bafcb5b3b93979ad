"""A watch in virtual time: the real sampler, history, rules and exporter beside a simulated server, months in minutes.

Nothing here judges or measures. It is the composition of `plimsoll.watch` with a clock that jumps from one sample to
the next and a target that needs no socket, so that what the watch says after thirty days can be held against what is
known to have happened.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from alerts.state import State
from monitor.gpu import GpuDevice, GpuReport
from monitor.history import SqliteHistory
from monitor.sampler import LocalView, Sampler, Tick
from plimsoll.watch import Watch, WatchConfig
from serving.clock import NS
from serving.engines import Reading, ScrapeFailure
from serving.records import Event
from serving.simulator.inprocess import InProcessTarget

__all__ = ["LeapingClock", "Rehearsal", "Said", "SimulatedGpus", "rehearse", "simulated_host"]


class LeapingClock:
    """A clock on which sleeping costs no time: it leaps to where the sleeper wanted to wake.

    For one sleeper; several would leave each other behind.

    Args:
        start_ns: first reading.
        on_leap: awaited after each leap, with the new time.
    """

    def __init__(self, start_ns: int, on_leap: Callable[[int], Awaitable[None]] | None = None) -> None:
        self._now_ns = start_ns
        self.on_leap = on_leap

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return self._now_ns

    async def sleep(self, seconds: float) -> None:
        """Leap ahead by `seconds`."""
        self._now_ns += max(0, round(seconds * NS))
        if self.on_leap is not None:
            await self.on_leap(self._now_ns)
        await asyncio.sleep(0)


class SimulatedGpus:
    """The cards of a simulated server, as a `monitor.gpu.GpuReader`."""

    def __init__(self, target: InProcessTarget) -> None:
        self._target = target

    async def read(self) -> dict[str, dict[str, float]]:
        """Signals by uuid; none while the server is down, whose memory is then free."""
        snapshot = self._target.look()
        if snapshot is None:
            return {}
        return {
            gpu.uuid: {
                "gpu_memory_used_bytes": float(gpu.memory_used_bytes),
                "gpu_memory_total_bytes": float(gpu.memory_total_bytes),
                "gpu_utilization_ratio": gpu.utilization_ratio,
                "gpu_power_watts": gpu.power_watts,
                "gpu_temperature_celsius": gpu.temperature_celsius,
            }
            for gpu in snapshot.gpus
        }

    async def describe(self) -> GpuReport:
        """The simulated cards."""
        snapshot = self._target.look()
        cards = () if snapshot is None else snapshot.gpus
        devices = tuple(GpuDevice(card.uuid, card.name, float(card.memory_total_bytes)) for card in cards)
        return GpuReport("simulated", devices)

    async def close(self) -> None:
        """Nothing to let go of."""


def simulated_host(target: InProcessTarget) -> Callable[[], Awaitable[LocalView]]:
    """What the host tells of a simulated server's processes."""

    async def read() -> LocalView:
        snapshot = target.look()
        if snapshot is None:
            return LocalView()
        process = snapshot.process
        values = {
            "process_anonymous_memory_bytes": float(process.anonymous_memory_bytes),
            "process_resident_memory_bytes": float(process.anonymous_memory_bytes - process.swap_bytes),
            "process_swap_bytes": float(process.swap_bytes),
            "process_open_fds": float(process.open_fds),
            "process_threads": float(process.threads),
            "process_cpu_seconds_total": process.cpu_seconds,
        }
        started_s = snapshot.started_ns / NS
        return LocalView({}, {"server": values}, f"simulated start at {snapshot.started_ns}", started_s)

    return read


@dataclass(frozen=True, slots=True)
class Said:
    """An alert that began to fire, or ended."""

    t_ns: int
    rule: str
    firing: bool
    titles: tuple[str, ...] = ()
    """What the findings of the evaluation that moved it said, in short."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a watch said in virtual time.

    Attributes:
        said: alerts that fired and ended, in order.
        events: restarts, and when the target came and went, as the watch saw them.
        ticks: samples taken.
        failed_ticks: of those, without an answer of the target.
    """

    said: tuple[Said, ...]
    events: tuple[Event, ...]
    ticks: int
    failed_ticks: int

    def fired(self, rule: str | None = None) -> tuple[Said, ...]:
        """Alerts that began to fire, of one rule or of all."""
        return tuple(one for one in self.said if one.firing and rule in (None, one.rule))


@dataclass(slots=True)
class _Notes:
    said: list[Said] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ticks: int = 0
    failed_ticks: int = 0


async def rehearse(
    config: WatchConfig,
    history: SqliteHistory,
    clock: LeapingClock,
    target: InProcessTarget,
    *,
    until_ns: int,
    on_tick: Callable[[Tick], None] | None = None,
) -> Rehearsal:
    """Run a watch beside a simulated server from the clock's time to `until_ns`.

    Args:
        config: as of a real watch; its target's interval and its rules count, its addresses do not.
        history: open for writing, and kept by the caller.
        clock: reads the same time as the target.
        target: the simulated server.
        until_ns: when it ends.
        on_tick: told of every sample.
    """
    watch = Watch(config, history, clock)
    notes = _Notes()
    every_ns = round(config.evaluate_every_s * NS)
    due_ns = clock.now_ns() + every_ns
    states = {name: alert.state for name, alert in watch.alerts.items()}

    async def read() -> Reading | ScrapeFailure:
        return target.read()

    sampler = Sampler(
        clock,
        read,
        gpu=SimulatedGpus(target),
        local=simulated_host(target),
        interval_seconds=config.target.interval_s,
    )

    def note(tick: Tick) -> None:
        notes.ticks += 1
        notes.failed_ticks += not tick.up
        watch.on_tick(tick)
        if on_tick is not None:
            on_tick(tick)

    def note_event(event: Event) -> None:
        notes.events.append(event)
        watch.on_event(event)

    async def judge(t_ns: int) -> None:
        nonlocal due_ns
        if t_ns >= until_ns:
            raise asyncio.CancelledError
        if t_ns < due_ns:
            return
        due_ns += every_ns * ((t_ns - due_ns) // every_ns + 1)
        await watch.judge()
        for name, alert in watch.alerts.items():
            was, states[name] = states[name], alert.state
            if (was is State.FIRING) != (alert.state is State.FIRING):
                titles = tuple(finding.title for finding in watch.looks[name].findings)
                notes.said.append(Said(t_ns, name, alert.state is State.FIRING, titles))

    clock.on_leap = judge
    sampler.add_listener(note)
    sampler.add_event_listener(note_event)
    with contextlib.suppress(asyncio.CancelledError):
        await sampler.run()
    watch.save()
    return Rehearsal(tuple(notes.said), tuple(notes.events), notes.ticks, notes.failed_ticks)
