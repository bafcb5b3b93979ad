"""Token mode: continuous batching over paged KV blocks, one engine step at a time.

A step function over an explicit state. It reads no clock, draws no random number and does no I/O: the same state and
the same calls give the same steps, and a copy of the state (`copy.deepcopy`) can be taken anywhere else. The state is
changed in place, because a month has a hundred million steps.

One step is two calls. `begin` schedules it: which requests take part with how many tokens, who is admitted from the
queue, who is thrown out, how long it takes. `complete` lets its tokens come out at its end. Requests may arrive and
leave between the two, as they do while a real engine computes; they then meet the next step.

The scheduling is that of vLLM's V1 scheduler as its documentation describes it (running requests first, then the queue
in order, prompts in chunks under a token budget, the youngest request preempted and recomputed when blocks run out),
with the deviations of SGLang and llama.cpp that `spec.Policy` names.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.clock import NS
from serving.simulator.spec import Arrival, Finish, OnFull, ServerSpec, Step, Work

__all__ = ["BlockPool", "Flight", "Scheduled", "State", "begin", "cancel", "complete", "enqueue", "fail_all"]


class BlockPool:
    """The KV blocks: free, held by one request, shared by their content, kept for reuse, or leaked.

    At any time `free + private + len(held) + len(idle) + leaked == total`.

    Args:
        total: blocks in all.
        keep: whether blocks of known content are kept after use, the least recently used first to be taken.
    """

    __slots__ = ("free", "held", "idle", "keep", "leaked", "private", "total")

    def __init__(self, total: int, *, keep: bool) -> None:
        self.total = total
        self.free = total
        self.private = 0
        self.leaked = 0
        self.keep = keep
        self.held: dict[int, int] = {}
        """Content hash -> requests that hold the block."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Content hash of blocks that nobody holds, least recently used first."""

    @property
    def used(self) -> int:
        """Blocks that cannot be given out: held by requests, or leaked."""
        return self.total - self.free - len(self.idle)

    @property
    def available(self) -> int:
        """Blocks that can be given out, those with reusable content included."""
        return self.free + len(self.idle)

    def take(self, count: int) -> bool:
        """Give `count` blocks to one request; False, and nothing changed, when there are not that many."""
        short = count - self.free
        if short > 0:
            if short > len(self.idle):
                return False
            for _ in range(short):
                self.idle.popitem(last=False)
            self.free += short
        self.free -= count
        self.private += count
        return True

    def known(self, prefix: tuple[int, ...], limit: int) -> int:
        """How many leading blocks of a prompt, at most `limit`, are here with their content."""
        count = 0
        for content in prefix[:limit]:
            if content not in self.held and content not in self.idle:
                break
            count += 1
        return count

    def idle_among(self, contents: Iterable[int]) -> int:
        """How many of these blocks nobody holds at the moment."""
        return sum(1 for content in contents if content in self.idle)

    def share(self, content: int) -> None:
        """One more request holds a block of known content."""
        if content in self.idle:
            del self.idle[content]
            self.held[content] = 1
        else:
            self.held[content] += 1

    def publish(self, content: int) -> bool:
        """A request's private block has become one of known content; False when there is such a block already."""
        if content in self.held or content in self.idle:
            return False
        self.private -= 1
        self.held[content] = 1
        return True

    def release(self, private: int, contents: list[int]) -> None:
        """A request gives up its private blocks and its part in shared ones."""
        self.private -= private
        self.free += private
        # The end of a prompt is of use to fewer requests than its beginning, so it is to be taken first.
        for content in reversed(contents):
            holders = self.held[content] - 1
            if holders:
                self.held[content] = holders
                continue
            del self.held[content]
            if self.keep:
                self.idle[content] = None
            else:
                self.free += 1

    def leak(self, count: int) -> int:
        """Lose up to `count` blocks that are free, and return how many were lost."""
        lost = min(count, self.available)
        if lost and self.take(lost):
            self.private -= lost
            self.leaked += lost
        return lost

    def recover(self) -> None:
        """Leaked blocks are free again, as after a restart."""
        self.free += self.leaked
        self.leaked = 0


@dataclass(slots=True, eq=False)
class Flight:
    """A request inside the server.

    Attributes:
        computed: tokens of prompt and output whose keys and values are in the cache.
        generated: tokens that came out.
        private: KV blocks of its own.
        shared: content hashes of blocks that it holds with others, from the prompt's start.
        cached_tokens: prompt tokens that it found in the prefix cache when first admitted.
        stuck_at: it makes no further progress once it has generated that many tokens; None never.
        gone: it was cancelled while a step computed; the step's end releases it.
    """

    id: int
    prompt_tokens: int
    output_tokens: int
    t_received_ns: int
    finish: Finish = Finish.LENGTH
    prefix: tuple[int, ...] = ()
    computed: int = 0
    generated: int = 0
    private: int = 0
    shared: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    t_admitted_ns: int | None = None
    t_first_ns: int | None = None
    t_last_ns: int | None = None
    stuck_at: int | None = None
    slot: int = -1
    gone: bool = False

    @property
    def blocks(self) -> int:
        """KV blocks that it holds."""
        return self.private + len(self.shared)

    @property
    def is_stuck(self) -> bool:
        """Whether it makes no progress any more."""
        return self.stuck_at is not None and self.generated >= self.stuck_at


@dataclass(slots=True)
class State:
    """Everything that the server knows. `t_ns` is the end of the last step, or later when it was idle since."""

    spec: ServerSpec
    t_ns: int
    pool: BlockPool
    running: list[Flight] = field(default_factory=list)
    waiting: deque[Flight] = field(default_factory=deque)
    computing: "Scheduled | None" = None
    """The step between its `begin` and its `complete`."""
    free_slots: list[int] = field(default_factory=list)

    @classmethod
    def fresh(cls, spec: ServerSpec, t_ns: int) -> "State":
        """A server that has just become ready."""
        return cls(spec, t_ns, BlockPool(spec.kv_blocks - spec.policy.reserved_blocks, keep=spec.prefix_cache))

    @property
    def inside(self) -> int:
        """Requests in the server, running or waiting."""
        return len(self.running) + len(self.waiting)


@dataclass(slots=True)
class Scheduled:
    """A step that computes.

    Attributes:
        parts: who takes part, and with how many tokens.
        failed: requests that could not be given a block, where the engine fails them.
    """

    t_ns: int
    t_end_ns: int
    work: Work
    parts: list[tuple[Flight, int]]
    running: int
    waiting: int
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    failed: tuple[Flight, ...] = ()


def enqueue(state: State, arrival: Arrival, *, stuck_at: int | None = None) -> Flight:
    """Put a request at the end of the queue; whether it may come in at all is for the caller to decide."""
    flight = Flight(
        arrival.id,
        arrival.prompt_tokens,
        arrival.output_tokens,
        arrival.t_ns,
        finish=arrival.finish or Finish.LENGTH,
        prefix=arrival.prefix,
        stuck_at=stuck_at,
    )
    state.waiting.append(flight)
    return flight


def cancel(state: State, flight: Flight) -> None:
    """A request leaves before its end. One that takes part in a step leaves when the step ends."""
    if flight in state.waiting:
        state.waiting.remove(flight)
    elif flight in state.running:
        if state.computing is not None:
            flight.gone = True
        else:
            _leave(state, flight)
    elif state.computing is not None and flight in state.computing.failed:
        # Its failure was about to be told to it.
        flight.gone = True


def fail_all(state: State) -> tuple[Flight, ...]:
    """Everything that runs or waits is lost, as when the server dies; returns it in order."""
    failed = state.computing.failed if state.computing is not None else ()
    # Those that were cancelled while the step computed have left already.
    lost = tuple(flight for flight in (*failed, *state.running, *state.waiting) if not flight.gone)
    for flight in state.running:
        state.pool.release(flight.private, flight.shared)
    state.running.clear()
    state.waiting.clear()
    state.free_slots.clear()
    state.computing = None
    return lost


def begin(
    state: State, *, max_batch: int | None = None, factor: float = 1.0, decode_factor: float = 1.0
) -> Scheduled | None:
    """Schedule the next step at `state.t_ns`.

    Args:
        state: changed in place: requests are admitted or preempted, blocks are taken.
        max_batch: requests that may run at once, where it is not the spec's.
        factor: the step takes this many times as long.
        decode_factor: the same for the part of a step that decodes: a step that only decodes takes that many times as
            long, one that only processes prompts is not affected.

    Returns:
        The step, whose tokens come out with `complete`; None when there is nothing that could be computed.
    """
    spec = state.spec
    policy = spec.policy
    limit = spec.max_batch if max_batch is None else max_batch
    parts: list[tuple[Flight, int]] = []
    preempted: list[int] = []
    decodes = not (policy.prefill_first and _has_prompt_work(state, limit))
    failed = _give_tokens(state, parts, preempted, decodes=decodes)
    # Nobody is let in over the head of those just thrown out.
    admitted = [] if preempted or failed else _admit(state, limit, parts)
    if not parts and not failed:
        # The prompts that decoding was to pause for do not fit after all: what decodes makes room for them. If nothing
        # is left that could decode, those thrown out are alone and start over.
        failed = () if decodes else _give_tokens(state, parts, preempted, decodes=True)
        if not parts and not failed:
            admitted = _admit(state, limit, parts)
    for flight in failed:
        _leave(state, flight)
    if not parts and not failed:
        return None
    prefill = context = decoding = decode_context = 0
    for flight, todo in parts:
        if todo == 1 and flight.generated and flight.computed + 1 == flight.prompt_tokens + flight.generated:
            decoding += 1
            decode_context += flight.computed + 1
        else:
            prefill += todo
            context += todo * flight.computed + todo * (todo + 1) // 2
    work = Work(prefill, context, decoding, decode_context)
    if failed:
        # The engine finds out while it prepares the step; that takes next to nothing.
        seconds = 0.001
    else:
        seconds = spec.cost.seconds(work) * factor
        if decode_factor != 1.0 and decoding:
            share = spec.cost.seconds(Work(0, 0, decoding, decode_context)) * factor
            seconds += min(share, seconds) * (decode_factor - 1.0)
    scheduled = Scheduled(
        state.t_ns,
        state.t_ns + max(1, round(seconds * NS)),
        work,
        parts,
        len(state.running) + len(failed),
        len(state.waiting),
        tuple(admitted),
        tuple(preempted),
        failed,
    )
    state.computing = scheduled
    return scheduled


def complete(state: State) -> Step:
    """End the step that computes: its tokens come out, and requests that have all of theirs leave.

    Raises:
        ValueError: no step computes.
    """
    scheduled = state.computing
    if scheduled is None:
        raise ValueError("no step computes: call begin first")
    state.computing = None
    end_ns = state.t_ns = scheduled.t_end_ns
    block_tokens = state.spec.block_tokens
    publishes = state.spec.prefix_cache
    emitted: list[int] = []
    finished = [(flight.id, Finish.KV_FULL) for flight in scheduled.failed if not flight.gone]
    for flight, todo in scheduled.parts:
        if publishes and flight.prefix and flight.computed < flight.prompt_tokens:
            flight.computed += todo
            _publish(state.pool, flight, block_tokens)
        else:
            flight.computed += todo
        # What is stuck and was thrown out is recomputed, and stays stuck.
        if flight.gone or (flight.stuck_at is not None and flight.is_stuck):
            continue
        if flight.computed == flight.prompt_tokens + flight.generated:
            flight.generated += 1
            emitted.append(flight.id)
            if flight.t_first_ns is None:
                flight.t_first_ns = end_ns
            flight.t_last_ns = end_ns
            if flight.generated >= flight.output_tokens and not flight.is_stuck:
                finished.append((flight.id, flight.finish))
                flight.gone = True
    if any(flight.gone for flight in state.running):
        for flight in [flight for flight in state.running if flight.gone]:
            _leave(state, flight)
    return Step(
        scheduled.t_ns,
        end_ns,
        scheduled.running,
        scheduled.waiting,
        state.pool.used,
        scheduled.work.prefill_tokens,
        scheduled.admitted,
        scheduled.preempted,
        tuple(emitted),
        tuple(finished),
    )


def _give_tokens(
    state: State, parts: list[tuple[Flight, int]], preempted: list[int], *, decodes: bool
) -> tuple[Flight, ...]:
    """Share the token budget out among what runs; returns those that must fail for want of a block."""
    spec = state.spec
    block_tokens = spec.block_tokens
    running, pool = state.running, state.pool
    budget = spec.token_budget
    index = 0
    while index < len(running) and budget > 0:
        flight = running[index]
        index += 1
        generated = flight.generated
        todo = flight.prompt_tokens + generated - flight.computed
        if flight.stuck_at is not None and generated >= flight.stuck_at:
            continue
        if todo == 1 and generated and not decodes:
            continue
        todo = _chunk(todo, budget, spec.policy.prompt_tail_tokens)
        need = -(-(flight.computed + todo) // block_tokens) - flight.private - len(flight.shared)
        if need > 0:
            if not pool.take(need):
                if spec.policy.on_full is OnFull.FAIL:
                    parts.clear()
                    return tuple(running)
                if not _make_room(state, flight, need, preempted):
                    break
            flight.private += need
        parts.append((flight, todo))
        budget -= todo
    return ()


def _make_room(state: State, flight: Flight, need: int, preempted: list[int]) -> bool:
    """Preempt the youngest until `flight` has its blocks; False when it was itself the youngest."""
    while True:
        victim = state.running.pop()
        _preempt(state, victim)
        preempted.append(victim.id)
        if victim is flight:
            return False
        if state.pool.take(need):
            return True


def _chunk(todo: int, budget: int, tail: int) -> int:
    """Tokens of one request in one step: what the budget allows, and not a prompt's tail with what is before it."""
    return todo - tail if tail and tail < todo <= budget else min(todo, budget)


def _has_prompt_work(state: State, limit: int) -> bool:
    """Whether a prompt could be processed now, so that decoding has to pause for it."""
    for flight in state.running:
        if flight.computed < flight.prompt_tokens + flight.generated - (1 if flight.generated else 0):
            return True
    if not state.waiting or len(state.running) >= limit:
        return False
    return _fits(state, state.waiting[0], state.spec.token_budget) is not None


def _fits(state: State, flight: Flight, budget: int) -> tuple[int, int, int] | None:
    """(known blocks, tokens of the first chunk, blocks to take) if the head of the queue can come in, else None."""
    spec, pool = state.spec, state.pool
    size = spec.block_tokens
    todo = flight.prompt_tokens + flight.generated
    # The last token has to be computed in any case, or nothing would come out.
    known = pool.known(flight.prefix, (flight.prompt_tokens - 1) // size) if flight.prefix and pool.keep else 0
    first = _chunk(todo - known * size, budget, spec.policy.prompt_tail_tokens)
    need = -(-(known * size + first) // size) - known
    spare = pool.available - (pool.idle_among(flight.prefix[:known]) if known else 0)
    ratio = spec.policy.reserved_output_ratio
    if ratio:
        whole = -(-todo // size) - known
        to_come = sum(max(0, other.output_tokens - other.generated) for other in state.running)
        reserved = (to_come + flight.output_tokens - flight.generated) * ratio
        if whole + reserved / size > spare and state.running:
            return None
    return (known, first, need) if need <= spare else None


def _admit(state: State, limit: int, parts: list[tuple[Flight, int]]) -> list[int]:
    running, waiting, pool = state.running, state.waiting, state.pool
    budget = state.spec.token_budget - sum(todo for _, todo in parts) if waiting else 0
    admitted: list[int] = []
    while waiting and len(running) < limit and budget > 0:
        flight = waiting[0]
        fit = _fits(state, flight, budget)
        if fit is None:
            break
        known, first, need = fit
        waiting.popleft()
        for content in flight.prefix[:known]:
            pool.share(content)
        flight.shared = list(flight.prefix[:known])
        pool.take(need)
        flight.private = need
        flight.computed = known * state.spec.block_tokens
        if flight.t_admitted_ns is None:
            flight.t_admitted_ns = state.t_ns
            flight.cached_tokens = flight.computed
        taken = state.free_slots.pop() if state.free_slots else len(running)
        flight.slot = taken
        running.append(flight)
        admitted.append(flight.id)
        parts.append((flight, first))
        budget -= first
    return admitted


def _publish(pool: BlockPool, flight: Flight, block_tokens: int) -> None:
    """Full blocks of the prompt that were computed can be found by others from now on."""
    full = min(flight.computed // block_tokens, len(flight.prefix))
    while len(flight.shared) < full:
        content = flight.prefix[len(flight.shared)]
        if not pool.publish(content):
            # Another request computed the same at the same time; each keeps its own copy from here on.
            break
        flight.private -= 1
        flight.shared.append(content)


def _preempt(state: State, flight: Flight) -> None:
    state.pool.release(flight.private, flight.shared)
    flight.private = 0
    flight.shared = []
    flight.computed = 0
    flight.preemptions += 1
    state.free_slots.append(flight.slot)
    state.waiting.appendleft(flight)


def _leave(state: State, flight: Flight) -> None:
    state.running.remove(flight)
    state.pool.release(flight.private, flight.shared)
    flight.private = 0
    flight.shared = []
    state.free_slots.append(flight.slot)
