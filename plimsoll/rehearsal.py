"""A watch in virtual time: the real sampler, history, rules and exporter beside a simulated server, months in minutes.

Nothing here judges or measures. It is the composition of `plimsoll.watch` with a clock that jumps from one sample to
the next and a target that needs no socket, so that what the watch says after thirty days can be held against what is
known to have happened.

    rehearsal = Rehearsal(config, history, clock, InProcessTarget(server, VLLM_DIALECT, clock.now_ns))
    await rehearsal.run(until_ns)
    rehearsal.fired("memory_only_grows")
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from alerts.state import State
from alerts.verdict import Finding
from monitor.gpu import GpuDevice, GpuReport
from monitor.history import SqliteHistory
from monitor.sampler import LocalView, Sampler, Tick
from plimsoll.watch import Watch, WatchConfig
from serving.clock import NS
from serving.engines import Reading, ScrapeFailure
from serving.records import Event
from serving.simulator.inprocess import InProcessTarget

__all__ = ["LeapingClock", "Rehearsal", "Said", "SimulatedGpus", "simulated_host"]

HOST_BYTES: Final = 512 * 2**30
"""Memory of the simulated host."""


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

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass for something that was done meanwhile."""
        self._now_ns += max(0, round(seconds * NS))

    async def sleep(self, seconds: float) -> None:
        """Leap ahead by `seconds`."""
        self.advance(seconds)
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


def simulated_host(target: InProcessTarget, host_bytes: int = HOST_BYTES) -> Callable[[], Awaitable[LocalView]]:
    """What a host with that much memory tells of itself and of a simulated server's processes; nothing while down.

    What lies in /dev/shm is nobody's anonymous memory, but the host can no longer give it out.
    """

    async def read() -> LocalView:
        snapshot = target.look()
        if snapshot is None:
            return LocalView()
        process = snapshot.process
        resident_bytes = process.anonymous_memory_bytes - process.swap_bytes
        values = {
            "process_anonymous_memory_bytes": float(process.anonymous_memory_bytes),
            "process_resident_memory_bytes": float(resident_bytes),
            "process_swap_bytes": float(process.swap_bytes),
            "process_open_fds": float(process.open_fds),
            "process_threads": float(process.threads),
            "process_cpu_seconds_total": process.cpu_seconds,
        }
        host = {
            "host_memory_available_bytes": float(max(0, host_bytes - resident_bytes - process.shared_memory_bytes)),
            "host_swap_used_bytes": float(process.swap_bytes),
        }
        started_s = snapshot.started_ns / NS
        return LocalView(host, {"server": values}, f"simulated start at {snapshot.started_ns}", started_s)

    return read


@dataclass(frozen=True, slots=True)
class Said:
    """An alert that began to fire, or ended; `findings` are those of the evaluation that moved it."""

    t_ns: int
    rule: str
    firing: bool
    findings: tuple[Finding, ...] = ()


class Rehearsal:
    """A watch beside a simulated server.

    `watch` and `sampler` are the real ones: an exporter follows `sampler` and shows `watch.families`, a listener of
    `sampler` hears every tick, and `watch.on_event` puts a deploy on the timeline. The time that a scrape takes passes
    for the watch as well.

    Args:
        config: as of a real watch; its target's interval and its rules count, its addresses do not.
        history: open for writing, and kept by the caller. One that an earlier watch has left is continued.
        clock: reads the same time as the target.
        target: the simulated server.

    Attributes:
        watch: what remembers and judges.
        sampler: what looks.
        said: alerts that fired and ended, in order.
        ticks: samples taken.
        failed_ticks: of those, without an answer of the target.
    """

    def __init__(
        self, config: WatchConfig, history: SqliteHistory, clock: LeapingClock, target: InProcessTarget
    ) -> None:
        self.watch = Watch(config, history, clock)
        self.said: list[Said] = []
        self.ticks = 0
        self.failed_ticks = 0
        self._history = history
        self._clock = clock
        self._name = config.target.name
        self._every_ns = round(config.evaluate_every_s * NS)
        self._due_ns = clock.now_ns() + self._every_ns
        self._until_ns = clock.now_ns()

        async def read() -> Reading | ScrapeFailure:
            return target.read()

        self.sampler = Sampler(
            clock,
            read,
            gpu=SimulatedGpus(target),
            local=simulated_host(target),
            interval_seconds=config.target.interval_s,
        )
        self.sampler.add_listener(self._count)
        self.sampler.add_listener(self.watch.on_tick)
        self.sampler.add_event_listener(self.watch.on_event)

    async def run(self, until_ns: int) -> None:
        """Take every sample that is due before `until_ns`; may be called again to go on."""
        self._until_ns = until_ns
        self._clock.on_leap = self._judge_when_due
        with contextlib.suppress(_Over):
            await self._judge_when_due(self._clock.now_ns())
            await self.sampler.run()
        self.watch.save()

    def fired(self, rule: str | None = None) -> tuple[Said, ...]:
        """Alerts that began to fire, of one rule or of all."""
        return tuple(one for one in self.said if one.firing and rule in (None, one.rule))

    @property
    def events(self) -> list[Event]:
        """What is on the target's timeline: restarts, when it came and went, and what was marked."""
        return self._history.events(target=self._name)

    def _count(self, tick: Tick) -> None:
        self.ticks += 1
        self.failed_ticks += not tick.up
        self._clock.advance(tick.values["scrape_duration_seconds"])

    async def _judge_when_due(self, t_ns: int) -> None:
        if t_ns >= self._until_ns:
            raise _Over
        if t_ns < self._due_ns:
            return
        self._due_ns += self._every_ns * ((t_ns - self._due_ns) // self._every_ns + 1)
        states = {name: alert.state for name, alert in self.watch.alerts.items()}
        await self.watch.judge()
        for name, alert in self.watch.alerts.items():
            if (states[name] is State.FIRING) != (alert.state is State.FIRING):
                findings = self.watch.looks[name].findings
                self.said.append(Said(t_ns, name, alert.state is State.FIRING, findings))


class _Over(Exception):  # noqa: N818 # nothing is wrong
    """The rehearsal has reached its end."""
