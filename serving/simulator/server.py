"""A simulated server in token mode: the core's steps, and what a real server has around them.

It keeps the counters and histograms that an engine exposes, the memory of cards and processes, the faults that are
switched on, crashes and restarts, and writes down the truth. It is as pure as the core: every call says what time it
is. Whoever drives it decides how fast that time passes: the HTTP shell by the wall clock, tests and the rehearsal of a
watch as fast as the machine can.

    server = SimulatedServer(spec, t_ns=0)
    server.arrive(Arrival(1, 0, prompt_tokens=100, output_tokens=20))
    while (step := server.step(until_ns)) is not None:
        ...
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from serving.clock import NS
from serving.exposition import Histogram
from serving.simulator import core
from serving.simulator.core import Flight, Scheduled, State
from serving.simulator.dialects.base import Trouble
from serving.simulator.faults import Conditions, Fault, FaultPlan, LifeEvent, Where, format_fault
from serving.simulator.spec import Arrival, Finish, GpuView, ProcessView, ServerSpec, SlotView, Snapshot, Step
from serving.simulator.traffic import Traffic
from serving.simulator.truth import TruthWriter

__all__ = ["GpuModel", "HistogramCounter", "Memory", "SimulatedServer"]

_COMPLETIONS = "/v1/completions"
_NEVER_NS = 2**62
_NO_LIMIT = 1_000_000


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


class GpuModel:
    """What one card shows apart from its memory, by how busy it is. The figures are those of a data-centre card."""

    IDLE_WATTS = 110.0
    BUSY_WATTS = 620.0
    IDLE_CELSIUS = 34.0
    BUSY_CELSIUS = 66.0

    @classmethod
    def view(cls, spec: ServerSpec, card: int, used_bytes: float, busy: float) -> GpuView:
        """Card number `card` with that much memory in use, busy for that share of the time."""
        memory = spec.memory
        return GpuView(
            uuid=f"GPU-51100000-0000-4000-8000-{card:012d}",
            name=memory.card_name,
            memory_used_bytes=min(round(used_bytes), memory.card_total_bytes),
            memory_total_bytes=memory.card_total_bytes,
            utilization_ratio=busy,
            power_watts=round(cls.IDLE_WATTS + (cls.BUSY_WATTS - cls.IDLE_WATTS) * busy, 1),
            temperature_celsius=round(cls.IDLE_CELSIUS + (cls.BUSY_CELSIUS - cls.IDLE_CELSIUS) * busy, 1),
        )


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


class SimulatedServer:
    """A server in token mode.

    Args:
        spec: as it was started.
        t_ns: when it is launched; it is ready at once, or after `spec.start_seconds` with `cold`.
        edges: histogram edges by canonical signal, as the dialect has them.
        plan: faults; none by default. May be changed while the server runs.
        truth: where to write down what happens.
        traffic: customers, for `run_until`; others may arrive beside them.
        cold: whether the first start takes its time.
    """

    def __init__(
        self,
        spec: ServerSpec,
        *,
        t_ns: int,
        edges: Mapping[str, tuple[float, ...]] | None = None,
        plan: FaultPlan | None = None,
        truth: TruthWriter | None = None,
        traffic: Traffic | None = None,
        cold: bool = False,
    ) -> None:
        self._given = spec
        self.spec = spec
        """As it runs: with what the present start was clamped to."""
        self.plan = plan if plan is not None else FaultPlan()
        self.truth = truth
        self.traffic = traffic
        self._traffic_ns = t_ns
        self.origin_ns = t_ns
        """When the simulation began; faults count their times from here."""
        self.start_number = 0
        self.lost: list[Flight] = []
        """Requests that a death of the server took along, but for those that nobody reads; whoever serves them empties
        this."""
        self.died: Trouble | None = None
        """Why the server is down for good, if it is."""
        self.shared_bytes = 0.0
        """Leaked shared memory (/dev/shm): no restart gives it back."""
        self._edges = dict(edges or {})
        self._keeps_leaks = False
        self._startup_ns = 0
        self._release_bytes = 0.0
        self._release_speed = 1.0
        self._frozen: tuple[float, float, float] | None = None
        self._now_ns = t_ns
        self._life_s = 0.0
        self._told_on: dict[int, Fault] = {}
        self._told_version = self.plan.version
        self._told_leaks_ns = self._told_faults_ns = t_ns
        self._down_until_ns: int | None = None
        self.state = State.fresh(spec, t_ns)
        self.memory = Memory(spec)
        self._start(t_ns, t_ns + (round(spec.start_seconds * NS) if cold else 0), keeps_leaks=False)

    def _start(self, t_ns: int, ready_ns: int, *, keeps_leaks: bool) -> None:
        before, leaked_blocks = self.memory, self.state.pool.leaked
        self.start_number += 1
        self.started_ns = t_ns
        clamp = self.plan.conditions(self._seconds(t_ns), self._seconds(t_ns)).max_batch_clamp
        if clamp is not None and clamp < self._given.max_batch:
            asked = self._given.asked_max_batch or self._given.max_batch
            self.spec = replace(self._given, max_batch=clamp, asked_max_batch=asked)
        else:
            self.spec = self._given
        self.ready_ns = ready_ns
        self._down_until_ns = None
        self._frozen = None
        self.state = State.fresh(self.spec, t_ns)
        self.memory = Memory(self.spec, self._release_bytes)
        if keeps_leaks:
            self.state.pool.leak(leaked_blocks)
            self.memory.gpu_leaked, self.memory.host_leaked = before.gpu_leaked, before.host_leaked
            self.memory.descriptors = before.descriptors
        self.flights: dict[int, Flight] = {}
        self._zombies: set[int] = set()
        self._unread: set[int] = set()
        self._owed_blocks = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.preemptions = 0
        self.finished: Counter[Finish] = Counter()
        self.http: Counter[tuple[str, int]] = Counter()
        self.steps = self.step_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self.longest_tokens = 0
        self.histograms = {signal: HistogramCounter(edges) for signal, edges in self._edges.items()}
        self._spawn_factor = self.plan.spawn_factor(self.start_number)
        if self.truth is not None:
            self.truth.start(t_ns, self.spec, self.start_number)

    # ---- life

    @property
    def t_ns(self) -> int:
        """The time up to which everything has happened."""
        return max(self._now_ns, self.state.t_ns)

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

    def elapse(self, t_ns: int) -> None:
        """Let time pass up to `t_ns`: memory leaks, the server dies and comes back as its faults have it.

        A step that computes goes on; when the server dies it is lost with everything else.
        """
        while self._now_ns < t_ns:
            here_s = self._seconds(self._now_ns)
            target_ns = t_ns
            event = self.plan.next_life_event(self._life_s, self._seconds(t_ns))
            event_ns = t_ns
            if event is not None:
                event_ns = max(self._now_ns, min(t_ns, self.origin_ns + round(event.t_s * NS)))
                target_ns = event_ns
            exhausted = False
            if self._down_until_ns is not None:
                target_ns = min(target_ns, max(self._now_ns, self._down_until_ns))
            elif target_ns > self._now_ns:
                conditions = self.plan.conditions(here_s, self._seconds(self.started_ns))
                until_s = conditions.valid_until_s
                if math.isfinite(until_s):
                    target_ns = min(target_ns, max(self._now_ns + 1, self.origin_ns + math.ceil(until_s * NS)))
                running = len(self.state.running)
                left_ns = self.memory.seconds_left(running, conditions) * NS
                if left_ns < target_ns - self._now_ns:
                    target_ns = self._now_ns + math.floor(left_ns) + 1
                self.memory.elapse(conditions, (target_ns - self._now_ns) / NS)
                self.shared_bytes += conditions.shm_leak_bytes_per_second * (target_ns - self._now_ns) / NS
                self._freeze(conditions)
                exhausted = math.isfinite(left_ns) and self.memory.exhausted(running, conditions)
            self._now_ns = target_ns
            if self.truth is not None:
                self._tell_faults(target_ns)
            if exhausted:
                self.die(Trouble.OUT_OF_MEMORY)
            if self._down_until_ns is not None and self._now_ns >= self._down_until_ns:
                self._start(self._now_ns, self._now_ns + self._startup_ns, keeps_leaks=self._keeps_leaks)
            if event is not None and self._now_ns >= event_ns:
                # One event at a time: a restart may come before the next.
                self._life_s = math.nextafter(event.t_s, math.inf)
                if self.died is None:
                    self._live(event)
            elif self._now_ns >= t_ns:
                self._life_s = max(self._life_s, self._seconds(t_ns))
        if self.truth is not None and self._now_ns - self._told_leaks_ns >= NS:
            self._tell_leaks()

    def _live(self, event: LifeEvent) -> None:
        self._release_bytes += event.memory_bytes
        self._release_speed *= 1.0 + event.speed_ratio
        self._event(event.kind.value, fault=event.fault_id)
        self.go_down(event.down_seconds, keeps_leaks=event.keeps_leaks)

    def go_down(self, seconds: float, *, keeps_leaks: bool = False, startup_seconds: float = 0.0) -> None:
        """The process ends now, and is started again after `seconds`; all requests inside are lost."""
        self._lose_all()
        self._keeps_leaks = keeps_leaks
        self._startup_ns = round(startup_seconds * NS)
        self._down_until_ns = _NEVER_NS if math.isinf(seconds) else self._now_ns + round(seconds * NS)

    def die(self, why: Trouble) -> None:
        """The process ends for good."""
        self.died = why
        self._event("died", why=why.value)
        self.go_down(math.inf)

    def _lose_all(self) -> None:
        for flight in core.fail_all(self.state):
            if flight.id not in self._zombies and flight.id not in self._unread:
                self.lost.append(flight)
            self.finished[Finish.DIED] += 1
            if self.truth is not None:
                self.truth.ended(self._now_ns, flight.id, Finish.DIED)
        self.flights.clear()
        self._zombies.clear()
        self._unread.clear()
        self._owed_blocks = 0

    def _tell_faults(self, t_ns: int) -> None:
        told_ns, on = self._told_faults_ns, self._told_on
        if self.plan.version != self._told_version:
            # Faults came into the plan or went out of it since.
            self._told_version = self.plan.version
            faults = self.plan.faults
            for fault_id in [fault_id for fault_id in on if fault_id not in faults]:
                self._tell_switch(told_ns, fault_id, on[fault_id], is_on=False)
            told_s = self._seconds(told_ns)
            for fault_id, fault in faults.items():
                if fault_id not in on and fault.start_s < told_s < fault.end_s and fault.kind.where is not Where.LIFE:
                    self._tell_switch(told_ns, fault_id, fault, is_on=True)
        if t_ns > told_ns:
            for switch in self.plan.switches(self._seconds(told_ns), self._seconds(t_ns)):
                at_ns = max(told_ns, min(t_ns, self.origin_ns + round(switch.t_s * NS)))
                self._tell_switch(at_ns, switch.fault_id, switch.fault, is_on=switch.on)
            self._told_faults_ns = t_ns

    def _tell_switch(self, at_ns: int, fault_id: int, fault: Fault, *, is_on: bool) -> None:
        if is_on:
            self._told_on[fault_id] = fault
        else:
            self._told_on.pop(fault_id, None)
        if self.truth is not None:
            word = "fault_on" if is_on else "fault_off"
            self.truth.event(at_ns, word, id=fault_id, fault=format_fault(fault))

    def _tell_leaks(self) -> None:
        """Write down what has leaked so far, of which there is any."""
        self._told_leaks_ns = self._now_ns
        memory = self.memory
        so_far = {
            "gpu_bytes": memory.gpu_leaked,
            "host_bytes": memory.host_leaked,
            "cache_bytes": memory.cache_bytes,
            "descriptors": memory.descriptors,
            "shm_bytes": self.shared_bytes,
            "kv_blocks": self.state.pool.leaked,
        }
        lost = {name: round(amount) for name, amount in so_far.items() if amount}
        if self.truth is not None and lost:
            self.truth.leak(self._now_ns, **lost)

    def _event(self, kind: str, **figures: str | float) -> None:
        if self.truth is not None:
            self.truth.event(self._now_ns, kind, **figures)

    def _freeze(self, conditions: Conditions) -> None:
        if not conditions.gauges_frozen:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self._gauges()

    # ---- requests

    def arrive(self, arrival: Arrival) -> Finish | None:
        """A request arrives. None when it is in, else why it is not."""
        self.elapse(arrival.t_ns)
        if self.truth is not None:
            self.truth.received(arrival.t_ns, arrival)
        spec, state = self.spec, self.state
        why: Finish | None = None
        if not self.ready:
            why = Finish.DIED
        elif arrival.prompt_tokens + arrival.output_tokens > spec.context_tokens or (
            spec.queue_limit is not None and len(state.waiting) >= spec.queue_limit
        ):
            why = Finish.REJECTED
        if why is not None:
            self.finished[why] += 1
            if self.truth is not None:
                self.truth.rejected(arrival.t_ns, arrival.id, why)
            return why
        at_s = self._seconds(arrival.t_ns)
        stuck = self.plan.is_stuck(arrival.id, at_s)
        flight = core.enqueue(state, arrival, stuck_at=max(1, arrival.output_tokens // 2) if stuck else None)
        self.flights[arrival.id] = flight
        return None

    def cancel(self, request_id: int, t_ns: int) -> None:
        """The client of a request has gone away."""
        self.elapse(t_ns)
        flight = self.flights.get(request_id)
        if flight is None or request_id in self._zombies:
            return
        at_s = self._seconds(t_ns)
        if self.plan.is_zombie(request_id, at_s):
            # It goes on to its end as if somebody listened.
            self._zombies.add(request_id)
            self._event("zombie", id=request_id)
        else:
            core.cancel(self.state, flight)
            self._end(flight, Finish.CANCELLED)
            if self.truth is not None:
                self.truth.ended(t_ns, request_id, Finish.CANCELLED)
        self._leak_blocks(request_id, at_s)

    def _leak_blocks(self, request_id: int, at_s: float) -> None:
        """What the disconnect of a client leaves behind. Where too little is free, the next blocks to come free."""
        self._owed_blocks += self.plan.kv_leak_blocks(request_id, at_s)
        if self._owed_blocks:
            self._pay_blocks()

    def _pay_blocks(self) -> None:
        lost = self.state.pool.leak(self._owed_blocks)
        self._owed_blocks -= lost
        if lost:
            self._tell_leaks()

    def _outlive_clients(self, scheduled: Scheduled) -> None:
        """Let those zombies go on whose client goes away with the token that this step gives them."""
        at_s = self._seconds(scheduled.t_end_ns)
        for flight, todo in scheduled.parts:
            if (
                flight.finish is Finish.CANCELLED
                and not flight.gone
                and flight.generated + 1 >= flight.output_tokens
                and flight.computed + todo == flight.prompt_tokens + flight.generated
                and self.plan.is_zombie(flight.id, at_s)
            ):
                # Traffic says after how many tokens its client goes away, not how many there would have been; clients
                # go away anywhere in an answer, so twice as many on average.
                most = self.spec.context_tokens - flight.prompt_tokens
                flight.output_tokens = min(2 * flight.output_tokens, most)
                flight.finish = Finish.LENGTH
                self._zombies.add(flight.id)
                self._event("zombie", id=flight.id, output_tokens=flight.output_tokens)
                self._leak_blocks(flight.id, at_s)

    def _end(self, flight: Flight, why: Finish) -> None:
        self.flights.pop(flight.id, None)
        self._zombies.discard(flight.id)
        self._unread.discard(flight.id)
        self.finished[why] += 1
        if self.spec.policy.counts_at_finish:
            self.generated_tokens += flight.generated
        self.longest_tokens = max(self.longest_tokens, flight.prompt_tokens + flight.generated)
        conditions = self.conditions
        self.memory.gpu_leaked += conditions.gpu_leak_bytes_per_request

    # ---- steps

    @property
    def next_ns(self) -> int | None:
        """When the step that computes ends, or None."""
        return self.state.computing.t_end_ns if self.state.computing is not None else None

    def begin(self, t_ns: int) -> Scheduled | None:
        """Begin a step at `t_ns`; None when the server is idle, loading, down, or a step computes already."""
        self.elapse(t_ns)
        state = self.state
        if state.computing is not None or not self.ready:
            return None
        state.t_ns = max(state.t_ns, t_ns, self.ready_ns)
        conditions = self.conditions
        limit = _NO_LIMIT if conditions.limit_ignored else self.spec.max_batch
        at_s = self._seconds(state.t_ns)
        factor = conditions.step_factor * self._spawn_factor / self._release_speed
        scheduled = core.begin(state, max_batch=limit, factor=factor, decode_factor=conditions.decode_factor(at_s))
        if scheduled is None:
            return None
        work = scheduled.work
        self.memory.work(scheduled.running, work.prefill_tokens + work.decode_sequences)
        if self.memory.exhausted(scheduled.running, conditions):
            self.die(Trouble.OUT_OF_MEMORY)
            return None
        return scheduled

    def complete(self) -> Step:
        """End the step that computes, at its time."""
        end_ns = self.next_ns
        if end_ns is None:
            raise ValueError("no step computes: call begin first")
        self.elapse(end_ns)
        if self.state.computing is None:
            # The server died while it computed.
            return Step(end_ns, end_ns, 0, 0, 0, 0)
        scheduled = self.state.computing
        flights = self.flights
        lasts = {flight.id: flight.t_last_ns for flight, _ in scheduled.parts}
        if self.conditions.zombie_share:
            self._outlive_clients(scheduled)
        step = core.complete(self.state)
        if self._owed_blocks:
            self._pay_blocks()
        self._count(scheduled, step, lasts)
        for request_id, why in step.finished:
            flight = flights[request_id]
            duration = self.histograms.get("request_duration_seconds")
            if duration is not None and why is not Finish.KV_FULL:
                duration.observe((end_ns - flight.t_received_ns) / NS)
            if why is Finish.CANCELLED:
                self._leak_blocks(request_id, self._seconds(end_ns))
            self._end(flight, why)
        if self.truth is not None:
            conditions, running = self.conditions, len(self.state.running)
            self.truth.step(
                step,
                round(self.memory.gpu_bytes(0, running)),
                round(self.memory.host_bytes(running, conditions)),
            )
        return step

    def step(self, until_ns: int) -> Step | None:
        """Take one step, if there is work before `until_ns`; else let time pass up to there and return None."""
        if self.state.computing is None:
            self.begin(max(self.t_ns, min(until_ns, self.ready_ns)))
            # Whoever waits and could not come in may be able to when the faults change.
            while self.next_ns is None and self.state.waiting:
                change_s = self.conditions.valid_until_s
                if change_s >= self._seconds(until_ns):
                    break
                self.begin(max(self.t_ns + 1, self.origin_ns + math.ceil(change_s * NS)))
        end_ns = self.next_ns
        if end_ns is None or end_ns > until_ns:
            self.elapse(until_ns)
            return None
        return self.complete()

    def run_until(self, t_ns: int) -> None:
        """Serve its customers up to `t_ns`, in virtual time."""
        if self.traffic is not None and t_ns > self._traffic_ns:
            for arrival in self.traffic.arrivals(self._traffic_ns, t_ns, self.spec.block_tokens):
                self._serve_until(arrival.t_ns)
                self.take(arrival)
            self._traffic_ns = t_ns
        self._serve_until(t_ns)

    def take(self, arrival: Arrival) -> Finish | None:
        """A request arrives over HTTP, without a client that reads its answer: what it gets is counted."""
        why = self.arrive(arrival)
        status = {None: 200, Finish.REJECTED: 503}.get(why, 0)
        if status:
            self.http[_COMPLETIONS, status] += 1
        if why is None:
            self._unread.add(arrival.id)
        return why

    def _serve_until(self, t_ns: int) -> None:
        while self.step(t_ns) is not None:
            pass

    def _count(self, scheduled: Scheduled, step: Step, lasts: dict[int, int | None]) -> None:
        flights, histograms = self.flights, self.histograms
        end_ns = step.t_end_ns
        self.steps += 1
        self.step_tokens += scheduled.work.prefill_tokens + scheduled.work.decode_sequences
        self.preemptions += len(step.preempted)
        seconds = (end_ns - step.t_ns) / NS
        if scheduled.work.prefill_tokens:
            self.prefill_seconds += seconds
        if scheduled.work.decode_sequences:
            self.decode_seconds += seconds
        queue = histograms.get("request_queue_seconds")
        if queue is not None and step.admitted:
            for request_id in step.admitted:
                admitted = flights.get(request_id)  # gone when its client left during the step
                if admitted is not None and not admitted.preemptions:
                    queue.observe(max(0, step.t_ns - admitted.t_received_ns) / NS)
        first = histograms.get("time_to_first_token_seconds")
        between = histograms.get("inter_token_latency_seconds")
        emitted = len(step.emitted)
        if not self.spec.policy.counts_at_finish:
            self.generated_tokens += emitted
        self.memory.host_leaked += self.conditions.host_leak_bytes_per_token * emitted
        gaps: Counter[int] = Counter()
        for request_id in step.emitted:
            last_ns = lasts[request_id]
            if last_ns is None:
                flight = flights[request_id]
                self.prompt_tokens += flight.prompt_tokens
                self.cached_tokens += flight.cached_tokens
                if first is not None:
                    first.observe((end_ns - flight.t_received_ns) / NS)
            else:
                gaps[end_ns - last_ns] += 1
        if between is not None:
            for gap_ns, times in gaps.items():
                between.observe(gap_ns / NS, times)

    # ---- what is seen

    def snapshot(self, t_ns: int | None = None) -> Snapshot | None:
        """What can be seen at `t_ns` (now when absent); None while the process is down."""
        if t_ns is not None:
            self.elapse(t_ns)
        if not self.alive:
            return None
        state, conditions = self.state, self.conditions
        running, waiting, blocks = (
            self._frozen if conditions.gauges_frozen and self._frozen is not None else self._gauges()
        )
        busy = 0.0 if state.computing is None else 0.97
        return Snapshot(
            t_ns=self.t_ns,
            started_ns=self.started_ns,
            ready=self.ready,
            running=running,
            waiting=waiting,
            kv_blocks_used=blocks,
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
                GpuModel.view(self.spec, card, self.memory.gpu_bytes(card, len(state.running)), busy)
                for card in range(self.spec.memory.cards)
            ),
            process=ProcessView(
                anonymous_memory_bytes=round(self.memory.host_bytes(len(state.running), conditions)),
                open_fds=round(64 + self.memory.descriptors + state.inside),
                cpu_seconds=self.prefill_seconds + self.decode_seconds,
                shared_memory_bytes=round(self.shared_bytes),
            ),
        )

    def _gauges(self) -> tuple[float, float, float]:
        """Running, waiting and used blocks, as an engine knows them: what arrives during a step it sees after it."""
        state = self.state
        waiting = len(state.waiting) if state.computing is None else state.computing.waiting
        return len(state.running), waiting, state.pool.used

    def _slots(self) -> tuple[SlotView, ...]:
        if not self.spec.policy.counts_at_finish:
            return ()
        running = self.state.running
        slots = [SlotView()] * max(self.spec.max_batch, *(flight.slot + 1 for flight in running), 0)
        for flight in running:
            slots[flight.slot] = SlotView(
                is_processing=True,
                task_id=flight.id,
                prompt_tokens=flight.prompt_tokens,
                processed_tokens=max(0, min(flight.computed, flight.prompt_tokens) - flight.cached_tokens),
                cached_tokens=flight.cached_tokens,
                decoded_tokens=flight.generated,
            )
        return tuple(slots)
