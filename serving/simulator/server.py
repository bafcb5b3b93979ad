"""A simulated server in token mode: the core's steps, and what a real server has around them.

It counts what an engine exposes, loses and leaks what its faults have it lose, and writes down the truth; starts,
deaths and memory are those of any simulated server (`life`). It is as pure as the core: every call says what time it
is. Whoever drives it decides how fast that time passes: the HTTP shell by the wall clock, tests and the rehearsal of a
watch as fast as the machine can.

    server = SimulatedServer(spec, t_ns=0)
    server.arrive(Arrival(1, 0, prompt_tokens=100, output_tokens=20))
    while (step := server.step(until_ns)) is not None:
        ...
"""

import math
from collections import Counter
from collections.abc import Mapping

from serving.clock import NS
from serving.simulator import core
from serving.simulator.core import Flight, Scheduled, State
from serving.simulator.dialects.base import Trouble
from serving.simulator.faults import Fault, FaultPlan, Where, format_fault
from serving.simulator.life import Life
from serving.simulator.spec import Arrival, Finish, ServerSpec, SlotView, Step
from serving.simulator.traffic import Traffic
from serving.simulator.truth import TruthWriter

__all__ = ["SimulatedServer"]

_COMPLETIONS = "/v1/completions"
_NO_LIMIT = 1_000_000


class SimulatedServer(Life):
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
        self.truth = truth
        self.traffic = traffic
        self._traffic_ns = t_ns
        self.lost: list[Flight] = []
        """Requests that a death of the server took along, but for those that nobody reads; whoever serves them empties
        this."""
        self.state = State.fresh(spec, t_ns)
        self._told_on: dict[int, Fault] = {}
        self._told_leaks_ns = self._told_faults_ns = t_ns
        super().__init__(spec, t_ns=t_ns, edges=edges, plan=plan, cold=cold)
        self._told_version = self.plan.version

    def _begin_anew(self, *, keeps_leaks: bool) -> None:
        leaked_blocks = self.state.pool.leaked
        self.state = State.fresh(self.spec, self.started_ns)
        if keeps_leaks:
            self.state.pool.leak(leaked_blocks)
        self.flights: dict[int, Flight] = {}
        self._zombies: set[int] = set()
        self._unread: set[int] = set()
        self._owed_blocks = 0
        if self.truth is not None:
            self.truth.start(self.started_ns, self.spec, self.start_number)

    # ---- life

    @property
    def t_ns(self) -> int:
        """The time up to which everything has happened."""
        return max(self._now_ns, self.state.t_ns)

    def elapse(self, t_ns: int) -> None:
        """Let time pass up to `t_ns`. A step that computes goes on; when the server dies it is lost with all else."""
        super().elapse(t_ns)
        if self.truth is not None and self._now_ns - self._told_leaks_ns >= NS:
            self._tell_leaks()

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
        if self.truth is None:
            return
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
        scheduled = core.begin(
            state,
            max_batch=limit,
            factor=self._factor(conditions),
            decode_factor=conditions.decode_factor(at_s),
        )
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

    def _inside(self) -> tuple[int, int]:
        return len(self.state.running), len(self.state.waiting)

    def _busy(self) -> float:
        return 0.0 if self.state.computing is None else 1.0

    def _gauges(self) -> tuple[float, float, float]:
        # What arrives during a step an engine sees after it.
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
