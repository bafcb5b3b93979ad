"""The life of a simulated server in either mode: its starts, its faults, its memory, its deaths, what is seen of it.

`Life` lets time pass and knows everything that does not depend on how requests are served; token mode (`server`) and
fluid mode (`fluid`) serve them. Pure: every call says what time it is.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from serving.clock import NS
from serving.exposition import Histogram
from serving.simulator.dialects.base import Trouble
from serving.simulator.faults import Conditions, FaultPlan
from serving.simulator.spec import Finish, GpuView, ProcessView, ServerSpec, SlotView, Snapshot

__all__ = ["HistogramCounter", "Life", "Memory"]

_NEVER_NS = 2**62
_IDLE_DESCRIPTORS = 64
_BUSY_RATIO = 0.97
"""Share of the time with a kernel running that a card shows which is never idle."""


class HistogramCounter:
    """A histogram that can be added to. `edges` are ascending, without infinity."""

    __slots__ = ("_edges", "counts", "sum")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self.counts = [0.0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: float = 1.0) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self._edges, value)] += times
        self.sum += value * times

    def view(self) -> Histogram:
        """As it is exposed: cumulative."""
        total = 0.0
        cumulative = []
        for count in self.counts:
            total += count
            cumulative.append(total)
        return Histogram((*self._edges, math.inf), tuple(cumulative), self.sum)


class Memory:
    """The bytes of one start of the server: what it must hold, what requests add, and what leaks.

    The pool for the KV cache is allocated at the start, so the use of the cache cannot be seen in it. What leaks on the
    GPU leaks on the first card.
    """

    __slots__ = (
        "_spec",
        "cache_bytes",
        "descriptors",
        "gpu_leaked",
        "host_leaked",
        "peak_running",
        "peak_tokens",
        "release_bytes",
    )
    _spec: ServerSpec

    def __init__(self, spec: ServerSpec, release_bytes: float = 0.0) -> None:
        self._spec = spec
        self.release_bytes = release_bytes
        """What releases since the first need on top, in the host's memory and on the first card."""
        self.gpu_leaked = 0.0
        self.host_leaked = 0.0
        self.cache_bytes = 0.0
        """What a bounded cache holds."""
        self.descriptors = 0.0
        """File descriptors that leaked."""
        self.peak_running = 0.0
        self.peak_tokens = 0.0

    def elapse(self, conditions: Conditions, seconds: float) -> None:
        """Let time pass under these conditions."""
        self.gpu_leaked += conditions.gpu_leak_bytes_per_second * seconds
        self.host_leaked += conditions.host_leak_bytes_per_second * seconds
        self.descriptors += conditions.fd_leak_per_second * seconds
        self.cache_bytes = conditions.cache_after(self.cache_bytes, seconds)

    def work(self, running: float, tokens: float) -> None:
        """A step ran `running` requests and processed `tokens` tokens."""
        self.peak_running = max(self.peak_running, running)
        self.peak_tokens = max(self.peak_tokens, tokens)

    def gpu_bytes(self, card: int, running: float) -> float:
        """Bytes in use on a card. The framework's allocator keeps what activations once took."""
        memory = self._spec.memory
        used: float = memory.weights_bytes + memory.kv_cache_bytes + memory.workspace_bytes
        used += memory.activation_bytes_per_token * self.peak_tokens + memory.gpu_bytes_per_request * running
        return used + (self.gpu_leaked + self.release_bytes if card == 0 else 0.0)

    def host_bytes(self, running: float, conditions: Conditions) -> float:
        """Anonymous memory of the server's processes."""
        memory = self._spec.memory
        requests = self.peak_running if conditions.high_water else running
        used = memory.host_base_bytes + memory.host_bytes_per_request * requests + self.host_leaked + self.cache_bytes
        return used + self.release_bytes

    def seconds_left(self, running: float, conditions: Conditions) -> float:
        """For how long these conditions can hold before a leak exhausts memory, at least; infinite where none grows.

        An idle server that asks for no more memory does not run out of it, however little there is.
        """
        if self._spec.memory.cards:
            rate = conditions.gpu_leak_bytes_per_second
        else:
            rate = conditions.host_leak_bytes_per_second
            if self.cache_bytes < conditions.cache_cap_bytes:
                rate += conditions.cache_fill_bytes_per_second
        return max(0.0, self._room(running, conditions) / rate) if rate else math.inf

    def exhausted(self, running: float, conditions: Conditions) -> bool:
        """Whether the server is out of memory: on a card, or on the host where there is no card."""
        return self._room(running, conditions) < 0

    def _room(self, running: float, conditions: Conditions) -> float:
        limit = math.inf if conditions.oom_at_bytes is None else conditions.oom_at_bytes
        if self._spec.memory.cards:
            return min(self._spec.memory.card_total_bytes, limit) - self.gpu_bytes(0, running)
        return limit - self.host_bytes(running, conditions)


class Life(ABC):
    """A simulated server without what serves its requests.

    Args:
        spec: as it was started.
        t_ns: when it is launched; it is ready at once, or after `spec.start_seconds` with `cold`.
        edges: histogram edges by canonical signal, as the dialect has them.
        plan: faults; none by default. May be changed while the server runs.
        cold: whether the first start takes its time.
    """

    longest_step_ns = _NEVER_NS
    """For longer than this nothing is taken as constant."""

    def __init__(
        self,
        spec: ServerSpec,
        *,
        t_ns: int,
        edges: Mapping[str, tuple[float, ...]] | None,
        plan: FaultPlan | None,
        cold: bool,
    ) -> None:
        self._given = spec
        self.spec = spec
        """As it runs: with what the present start was clamped to."""
        self.plan = plan if plan is not None else FaultPlan()
        self.origin_ns = t_ns
        """When the simulation began; faults count their times from here."""
        self.start_number = 0
        self.died: Trouble | None = None
        """Why the server is down for good, if it is."""
        self.shared_bytes = 0.0
        """Leaked shared memory (/dev/shm): no restart gives it back."""
        self._edges = dict(edges or {})
        self._now_ns = t_ns
        self._life_s = 0.0
        self._down_until_ns: int | None = None
        self._keeps_leaks = False
        self._release_bytes = 0.0
        self._release_speed = 1.0
        self.memory = Memory(spec)
        self._start(t_ns, t_ns + (round(spec.start_seconds * NS) if cold else 0))

    def _start(self, t_ns: int, ready_ns: int) -> None:
        before = self.memory
        self.start_number += 1
        self.started_ns = t_ns
        self.ready_ns = ready_ns
        clamp = self.plan.conditions(self._seconds(t_ns), self._seconds(t_ns)).max_batch_clamp
        if clamp is not None and clamp < self._given.max_batch:
            asked = self._given.asked_max_batch or self._given.max_batch
            self.spec = replace(self._given, max_batch=clamp, asked_max_batch=asked)
        else:
            self.spec = self._given
        self.memory = Memory(self.spec, self._release_bytes)
        if self._keeps_leaks:
            self.memory.gpu_leaked, self.memory.host_leaked = before.gpu_leaked, before.host_leaked
            self.memory.descriptors = before.descriptors
        self._down_until_ns = None
        self._frozen: tuple[float, float, float] | None = None
        self.prompt_tokens: float = 0
        self.cached_tokens: float = 0
        self.generated_tokens: float = 0
        self.preemptions: float = 0
        self.steps: float = 0
        self.step_tokens: float = 0
        self.longest_tokens: float = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self.finished: Counter[Finish] = Counter()
        self.http: Counter[tuple[str, int]] = Counter()
        self.histograms = {signal: HistogramCounter(edges) for signal, edges in self._edges.items()}
        self._spawn_factor = self.plan.spawn_factor(self.start_number)
        self._begin_anew(keeps_leaks=self._keeps_leaks)

    # ---- what the modes do

    @abstractmethod
    def _begin_anew(self, *, keeps_leaks: bool) -> None:
        """The process has just started: no request is inside, and leaked KV blocks are back unless they are kept."""

    @abstractmethod
    def _lose_all(self) -> None:
        """The process ends: every request inside is lost."""

    @abstractmethod
    def _inside(self) -> tuple[int, int]:
        """Requests that run and that wait, as they truly are."""

    @abstractmethod
    def _gauges(self) -> tuple[float, float, float]:
        """Running, waiting and used KV blocks, as the engine's gauges have them."""

    @abstractmethod
    def _busy(self) -> float:
        """Share of the time in which it computes."""

    def _pass(self, conditions: Conditions, seconds: float) -> bool:
        """What happens to requests while time passes; whether that may have asked for more memory."""
        del conditions, seconds
        return False

    def _tell_faults(self, t_ns: int) -> None:
        """Write down which faults began and ended until then, where there is a truth file."""
        del t_ns

    def _event(self, kind: str, **figures: str | float) -> None:
        """Write down something that happened now, where there is a truth file."""
        del kind, figures

    def _slots(self) -> Sequence[SlotView]:
        """Batch slots, where single requests are known and the engine shows them."""
        return ()

    # ---- time

    @property
    def t_ns(self) -> int:
        """The time up to which everything has happened."""
        return self._now_ns

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may still be loading."""
        return self._down_until_ns is None

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self._down_until_ns is None and self._now_ns >= self.ready_ns

    @property
    def conditions(self) -> Conditions:
        """What the faults amount to now."""
        return self.plan.conditions(self._seconds(self._now_ns), self._seconds(self.started_ns))

    def _seconds(self, t_ns: int) -> float:
        return (t_ns - self.origin_ns) / NS

    def _factor(self, conditions: Conditions) -> float:
        """How many times as long a step takes as its cost says."""
        return conditions.step_factor * self._spawn_factor / self._release_speed

    def elapse(self, t_ns: int) -> None:
        """Let time pass up to `t_ns`: memory leaks, the server dies and comes back as its faults have it."""
        while self._now_ns < t_ns:
            now_ns = self._now_ns
            target_ns = event_ns = min(t_ns, now_ns + self.longest_step_ns)
            event = self.plan.next_life_event(self._life_s, self._seconds(target_ns))
            if event is not None:
                target_ns = event_ns = max(now_ns, min(target_ns, self.origin_ns + round(event.t_s * NS)))
            exhausted = False
            if self._down_until_ns is not None:
                target_ns = min(target_ns, max(now_ns, self._down_until_ns))
            elif target_ns > now_ns:
                target_ns, exhausted = self._live_until(target_ns)
            self._now_ns = target_ns
            self._tell_faults(target_ns)
            if exhausted:
                self.die(Trouble.OUT_OF_MEMORY)
            if self._down_until_ns is not None and target_ns >= self._down_until_ns:
                self._start(target_ns, target_ns)
            if event is None:
                self._life_s = max(self._life_s, self._seconds(target_ns))
            elif target_ns >= event_ns:
                # One event at a time: a restart may come before the next.
                self._life_s = math.nextafter(event.t_s, math.inf)
                if self.died is None:
                    self._release_bytes += event.memory_bytes
                    self._release_speed *= 1.0 + event.speed_ratio
                    self._event(event.kind.value, fault=event.fault_id)
                    self.go_down(event.down_seconds, keeps_leaks=event.keeps_leaks)

    def _live_until(self, target_ns: int) -> tuple[int, bool]:
        """Let a living process go on to `target_ns`, or to where something else holds.

        Returns:
            How far that was, and whether memory is exhausted there.
        """
        conditions = self.conditions
        if math.isfinite(conditions.valid_until_s):
            change_ns = self.origin_ns + math.ceil(conditions.valid_until_s * NS)
            target_ns = min(target_ns, max(self._now_ns + 1, change_ns))
        if self._now_ns < self.ready_ns:
            target_ns = min(target_ns, self.ready_ns)
        left_ns = self.memory.seconds_left(self._inside()[0], conditions) * NS
        if left_ns < target_ns - self._now_ns:
            target_ns = self._now_ns + math.floor(left_ns) + 1
        seconds = (target_ns - self._now_ns) / NS
        asked = self._pass(conditions, seconds)
        self.memory.elapse(conditions, seconds)
        self.shared_bytes += conditions.shm_leak_bytes_per_second * seconds
        if not conditions.gauges_frozen:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self._gauges()
        may_be = asked or math.isfinite(left_ns)
        return target_ns, may_be and self.memory.exhausted(self._inside()[0], conditions)

    def go_down(self, seconds: float, *, keeps_leaks: bool = False) -> None:
        """The process ends now, and is started again after `seconds`; all requests inside are lost.

        One that is down already stays so for the longer of both.
        """
        self._lose_all()
        self._keeps_leaks = keeps_leaks
        until_ns = _NEVER_NS if math.isinf(seconds) else self._now_ns + round(seconds * NS)
        self._down_until_ns = max(self._down_until_ns or 0, until_ns)

    def die(self, why: Trouble) -> None:
        """The process ends for good."""
        self.died = why
        self._event("died", why=why.value)
        self.go_down(math.inf)

    def come_back(self, seconds: float) -> None:
        """Start one that is down for good again after `seconds`."""
        self.died = None
        self._down_until_ns = self._now_ns + round(seconds * NS)

    # ---- what is seen

    def snapshot(self, t_ns: int | None = None) -> Snapshot | None:
        """What can be seen at `t_ns` (now when absent); None while the process is down."""
        if t_ns is not None:
            self.elapse(t_ns)
        if not self.alive:
            return None
        conditions = self.conditions
        gauges = self._frozen if conditions.gauges_frozen and self._frozen is not None else self._gauges()
        inside, outside = self._inside()
        return Snapshot(
            t_ns=self.t_ns,
            started_ns=self.started_ns,
            ready=self.ready,
            running=gauges[0],
            waiting=gauges[1],
            kv_blocks_used=gauges[2],
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            finished=dict(self.finished),
            http=dict(self.http),
            steps=self.steps,
            step_tokens=self.step_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            histograms={signal: counter.view() for signal, counter in self.histograms.items()},
            slots=self._slots(),
            longest_tokens=self.longest_tokens,
            gpus=tuple(
                _view_card(self.spec, card, self.memory.gpu_bytes(card, inside), _BUSY_RATIO * self._busy())
                for card in range(self.spec.memory.cards)
            ),
            process=ProcessView(
                anonymous_memory_bytes=round(self.memory.host_bytes(inside, conditions)),
                open_fds=round(_IDLE_DESCRIPTORS + self.memory.descriptors + inside + outside),
                cpu_seconds=self.prefill_seconds + self.decode_seconds,
                shared_memory_bytes=round(self.shared_bytes),
            ),
        )


_IDLE_WATTS, _BUSY_WATTS = 110.0, 620.0
_IDLE_CELSIUS, _BUSY_CELSIUS = 34.0, 66.0


def _view_card(spec: ServerSpec, card: int, used_bytes: float, busy: float) -> GpuView:
    """A card with that much memory in use, busy for that share of the time; as hot as a data-centre card would be."""
    memory = spec.memory
    return GpuView(
        uuid=f"GPU-51100000-0000-4000-8000-{card:012d}",
        name=memory.card_name,
        memory_used_bytes=min(round(used_bytes), memory.card_total_bytes),
        memory_total_bytes=memory.card_total_bytes,
        utilization_ratio=busy,
        power_watts=round(_IDLE_WATTS + (_BUSY_WATTS - _IDLE_WATTS) * busy, 1),
        temperature_celsius=round(_IDLE_CELSIUS + (_BUSY_CELSIUS - _IDLE_CELSIUS) * busy, 1),
    )
