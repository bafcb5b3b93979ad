"""What a simulated server is made of, and what it shows: the words its parts share.

A `ServerSpec` is what the server was given, an `Arrival` is a request that reaches it, a `Step` is one engine step that
it took, and a `Snapshot` is everything that can be seen of it from outside at one moment. The token mode (`core`) and
the fluid mode (`fluid`) both give snapshots; a dialect turns one into the pages of a real engine.

Times are `t_ns` on the simulator's own, virtual clock: nanoseconds since the Unix epoch, as `serving.clock` has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from serving.exposition import Histogram

__all__ = [
    "Arrival",
    "Finish",
    "GpuView",
    "MemoryPlan",
    "OnFull",
    "Policy",
    "ProcessView",
    "ServerSpec",
    "SlotView",
    "Snapshot",
    "Step",
    "StepCost",
    "Work",
]


@dataclass(frozen=True, slots=True)
class Work:
    """What one engine step has to do.

    Attributes:
        prefill_tokens: prompt tokens (or tokens to recompute) that are processed.
        prefill_context_tokens: sum over those tokens of the context that each attends to: a prompt of n tokens
            processed at once is n (n + 1) / 2.
        decode_sequences: sequences that get one new token.
        decode_context_tokens: sum over those sequences of the tokens in their KV cache.
    """

    prefill_tokens: int = 0
    prefill_context_tokens: int = 0
    decode_sequences: int = 0
    decode_context_tokens: int = 0


class StepCost(Protocol):
    """How long a step takes."""

    def seconds(self, work: Work) -> float:
        """Seconds for one step; above 0."""
        ...


class OnFull(StrEnum):
    """What an engine does when a running request needs a KV block and none is free."""

    PREEMPT = "preempt"
    """The youngest running request gives up its blocks and waits to be recomputed (vLLM, SGLang's retraction)."""
    FAIL = "fail"
    """Every running request fails with an error (llama.cpp with a shared cache)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How an engine schedules, where engines differ.

    Attributes:
        on_full: what happens when the KV cache is full.
        prefill_first: waiting prompts are processed in steps of their own while decode pauses (SGLang), instead of
            sharing a step with it (vLLM, llama.cpp).
        reserved_output_ratio: share of the output still to come that a request must find free in the KV cache to be
            admitted, over all running requests (SGLang's new-token ratio); 0 admits by the prompt alone.
        partitioned: each batch slot has its own part of the KV cache (llama.cpp without a unified cache), so none can
            take another's.
        counts_at_finish: token counters that clients see move when a request ends (llama.cpp).
        reserved_blocks: KV blocks that no request ever gets (vLLM's null block).
        prompt_tail_tokens: so many tokens at a prompt's end get a step of their own (4 where llama.cpp keeps context
            checkpoints: models with a sliding window or a recurrent state).
    """

    on_full: OnFull = OnFull.PREEMPT
    prefill_first: bool = False
    reserved_output_ratio: float = 0.0
    partitioned: bool = False
    counts_at_finish: bool = False
    reserved_blocks: int = 0
    prompt_tail_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes of each card and of the host are at the start. All figures in bytes, per card.

    Attributes:
        cards: number of cards; 0 where there is none, and then only the host's memory is shown.
        card_name: as NVML or DCGM would name it.
        card_total_bytes: memory of one card.
        weights_bytes: weights on one card.
        kv_cache_bytes: preallocated KV pool on one card.
        workspace_bytes: activations, communication buffers and graphs.
        activation_bytes_per_token: further memory that a step with that many tokens needs while it runs.
        gpu_bytes_per_request: what one running request needs on each card beside its KV blocks (logits, buffers).
        host_base_bytes: anonymous memory of the server's processes when idle.
        host_bytes_per_request: what one running request adds to it.
        reserve_bytes: left free on a card on purpose, so that the pool was not planned to the last byte.
    """

    cards: int = 1
    card_name: str = "NVIDIA H200"
    card_total_bytes: int = 141 * 2**30
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    workspace_bytes: int = 0
    activation_bytes_per_token: int = 0
    gpu_bytes_per_request: int = 0
    host_base_bytes: int = 2 * 2**30
    host_bytes_per_request: int = 2 * 2**20
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A simulated server as it was started.

    Attributes:
        engine: name of the engine whose dialect it speaks.
        release: that engine's release, which decides about metric families and log lines.
        model: the model's name in requests.
        max_batch: requests that run at once.
        context_tokens: longest prompt plus output of one request.
        token_budget: tokens that one step may process, prompt chunks and decode together.
        block_tokens: tokens in one KV block.
        kv_blocks: blocks in the pool.
        cost: how long a step takes.
        memory: where the bytes are.
        policy: how it schedules.
        queue_limit: waiting requests above which a new one is refused; None never refuses.
        prefix_cache: blocks of finished prompts are kept, least recently used first to go.
        asked_max_batch: what the start command asked for, where the server clamped it.
        card_parallel: number of cards that share the model.
        start_seconds: from launch to readiness.
        settings: further values that the start-up log repeats, by the engine's own names.
    """

    engine: str
    release: str
    model: str
    max_batch: int
    context_tokens: int
    token_budget: int
    block_tokens: int
    kv_blocks: int
    cost: StepCost
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    policy: Policy = field(default_factory=Policy)
    queue_limit: int | None = None
    prefix_cache: bool = True
    asked_max_batch: int | None = None
    card_parallel: int = 1
    start_seconds: float = 30.0
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.kv_blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it reaches the server.

    Attributes:
        id: unique within a simulation.
        t_ns: when it arrived.
        prompt_tokens: length of the prompt.
        output_tokens: tokens that it will generate unless something ends it earlier.
        prefix: one hash for each full KV block of the prompt, each depending on all before it; empty where the content
            does not matter, and then nothing is found in the prefix cache.
        finish: how it ends when it has generated `output_tokens`.
    """

    id: int
    t_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    finish: "Finish | None" = None


class Finish(StrEnum):
    """Why a request left the server."""

    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    """The client went away."""
    KV_FULL = "kv_full"
    """The engine had no KV block for it (llama.cpp)."""
    REJECTED = "rejected"
    """The queue was full, or it does not fit the context."""
    DIED = "died"
    """The server went down under it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. Ids are those of `Arrival`.

    Attributes:
        t_ns: when it began.
        t_end_ns: when its tokens came out.
        running: requests in the batch during the step.
        waiting: requests left waiting when it was scheduled.
        kv_blocks_used: blocks that live requests hold when it ends, leaked ones included.
        prefill_tokens: prompt tokens processed.
        admitted: ids taken from the queue, in order.
        preempted: ids thrown out of the batch, in order.
        emitted: ids that got one token at `t_end_ns`.
        finished: (id, why), in order, at `t_end_ns`.
    """

    t_ns: int
    t_end_ns: int
    running: int
    waiting: int
    kv_blocks_used: int
    prefill_tokens: int
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    finished: tuple[tuple[int, Finish], ...] = ()


@dataclass(frozen=True, slots=True)
class SlotView:
    """One batch slot of llama.cpp. Counts are tokens; an idle slot keeps its last prompt's."""

    is_processing: bool = False
    task_id: int = -1
    prompt_tokens: int = 0
    processed_tokens: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GpuView:
    """One card as NVML or DCGM shows it."""

    uuid: str
    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilization_ratio: float
    power_watts: float
    temperature_celsius: float


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The server's processes taken together."""

    anonymous_memory_bytes: int
    swap_bytes: int = 0
    open_fds: int = 64
    threads: int = 32
    cpu_seconds: float = 0.0
    shared_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What can be seen of a simulated server at one moment. Counters count since `started_ns`.

    Figures are floats because the fluid mode deals in averages; the token mode's are whole.

    Attributes:
        t_ns: the moment.
        started_ns: when this start of the server began.
        ready: whether the model is loaded.
        running: requests in the batch.
        waiting: requests in the queue.
        kv_blocks_used: blocks that requests hold, leaked ones included, blocks kept for the prefix cache not.
        prompt_tokens: prompt tokens taken in, cached ones included.
        cached_tokens: prompt tokens found in the prefix cache.
        generated_tokens: tokens generated (with `Policy.counts_at_finish`: by requests that ended).
        preemptions: requests thrown out of the batch.
        finished: why -> requests.
        http: (handler, status) -> answers, for example ("/v1/chat/completions", 200).
        steps: engine steps.
        step_tokens: tokens processed in all steps.
        prefill_seconds: time spent in steps for prompts.
        decode_seconds: time spent in steps for decoding.
        histograms: canonical signal -> cumulative histogram with the dialect's own edges, for
            `time_to_first_token_seconds`, `inter_token_latency_seconds`, `request_duration_seconds` and
            `request_queue_seconds`.
        slots: batch slots, where the engine shows them; empty in fluid mode, where the dialect makes them up from
            `running` and `kv_blocks_used`.
        longest_tokens: largest number of tokens that one request held.
        gpus: the cards.
        process: the server's processes.
    """

    t_ns: int
    started_ns: int
    ready: bool
    running: float
    waiting: float
    kv_blocks_used: float
    prompt_tokens: float
    cached_tokens: float
    generated_tokens: float
    preemptions: float
    finished: Mapping[Finish, float]
    http: Mapping[tuple[str, int], float]
    steps: float
    step_tokens: float
    prefill_seconds: float
    decode_seconds: float
    histograms: Mapping[str, Histogram]
    slots: Sequence[SlotView]
    longest_tokens: float
    gpus: Sequence[GpuView]
    process: ProcessView
