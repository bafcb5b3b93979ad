"""What a server really gets when it is launched: weights, workspace and KV pool of each card, limits and clamps.

The arithmetic is each engine's own, as far as it can be known without running it:

    vLLM        plans with a share of the card (`gpu_memory_utilization`, 0.92, before 2026 0.9): what weights,
                activations at the token budget and the logits of a full batch leave of it is the KV pool, in blocks of
                16 tokens. It refuses to start when one request of full length does not fit. Cards with 70 GiB and more,
                but not the A100, get 8,192 tokens a step and 1,024 requests at once by default, others 2,048 and 256.
    SGLang      plans with `mem_fraction_static`, worked out from the chunk size, the size of the graphs and the number
                of cards where it is not given. The pool is counted in tokens; the running limit is cut to half of them.
                A pool below the context is no failure: longer requests are refused.
    llama.cpp   divides its context (`-c`) among its slots when their number is given, else four slots share it. A
                context that is not given is fitted to the memory that is left. Experts may stay in main memory.

Pools are counted in tokens that cost alike. Where layers see a window or keep a state, a token costs its share of a
request of full length, so that the pool holds as many of those as it should, but fewer short ones than a real one where
windows, and more where states make the difference.

What each card's memory is spent on is `serving.budget`'s to say.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from serving.budget import (
    DRIVER_BYTES,
    FIT_MARGIN_BYTES,
    Ask,
    Terms,
    activation_bytes,
    cache_bits,
    card_terms,
    memory_share,
    most_requests,
    newest_release,
    pool_token_bytes,
    pool_tokens,
    step_sizes,
)
from serving.cards import Card, Host, find_card
from serving.engines import ENGINES
from serving.errors import ConfigError
from serving.model import ModelShape, Split, read_model
from serving.settings import Settings
from serving.simulator.dialects.asgi import version_of
from serving.simulator.dialects.base import StartFailure
from serving.simulator.roofline import Efficiency, Roofline
from serving.simulator.spec import MemoryPlan, OnFull, Policy, ServerSpec

__all__ = ["LaunchFailure", "launch"]

_GIB: Final = 2**30
_LOAD_BYTES_PER_SECOND: Final = 3e9
"""From a local disk."""

_NULL_BLOCK_COUNTED: Final = (0, 32)
"""The first vLLM that is imitated here whose check of the pool leaves out the null block."""
_LIVE_COUNTERS: Final = (0, 5, 6)
"""The first SGLang that counts tokens as they come."""


class LaunchFailure(ConfigError):  # noqa: N818 # a start that failed is an answer of the simulation
    """The server does not come up.

    Attributes:
        failure: why, in the word that a dialect's start-up log takes.
        spec: the server as far as it had been worked out, for that log; its pool may be empty.
    """

    def __init__(self, failure: StartFailure, message: str, spec: ServerSpec) -> None:
        super().__init__(message)
        self.failure = failure
        self.spec = spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """What was asked for, with its defaults filled in as far as they are the same for all engines.

    Attributes:
        ask: the same in the words of the budget.
        usable_bytes: memory of one card that a program can get.
        weights_bytes: weights on the fullest card.
        kv_token_bytes: one token in the KV cache of one card.
        activation_token_bytes: activations of one token while it goes through a layer, on one card.
    """

    ask: Ask
    engine: str
    release: str
    served: str
    model: ModelShape
    card: Card
    split: Split
    kv_type: str
    cost: Roofline
    utilization: float | None
    max_batch: int | None
    context_tokens: int
    context_given: bool
    token_budget: int | None
    block_tokens: int | None
    kv_blocks: int | None
    kv_tokens: int | None
    partitioned: bool | None
    physical_tokens: int
    host_expert_ratio: float
    usable_bytes: int
    weights_bytes: int
    kv_token_bytes: int
    activation_token_bytes: int

    @property
    def cards(self) -> int:
        return self.split.tensor * self.split.pipeline

    def terms(self, max_batch: int) -> Terms:
        """What the fullest card's memory is spent on when so many requests may run at once."""
        return card_terms(replace(self.ask, max_batch=max_batch), weights_bytes=self.weights_bytes)

    def spec(
        self,
        *,
        max_batch: int,
        token_budget: int,
        block_tokens: int,
        kv_blocks: int,
        workspace_bytes: int,
        start_seconds: float,
        policy: Policy,
        settings: Mapping[str, str | int | float | bool | None],
        context_tokens: int | None = None,
        activation_token_bytes: int = 0,
        request_bytes: int = 0,
    ) -> ServerSpec:
        kv_bytes = kv_blocks * block_tokens * self.kv_token_bytes
        planned = self.weights_bytes + kv_bytes + workspace_bytes
        planned += activation_token_bytes * token_budget + request_bytes * max_batch
        total_weights = self.model.weight_bytes().total
        return ServerSpec(
            engine=self.engine,
            release=self.release,
            model=self.served,
            max_batch=max_batch,
            context_tokens=context_tokens or self.context_tokens,
            token_budget=token_budget,
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
            cost=self.cost,
            memory=MemoryPlan(
                cards=self.cards,
                card_name=self.card.name,
                card_total_bytes=self.card.memory_bytes,
                weights_bytes=self.weights_bytes,
                kv_cache_bytes=kv_bytes,
                workspace_bytes=workspace_bytes,
                activation_bytes_per_token=activation_token_bytes,
                gpu_bytes_per_request=request_bytes,
                reserve_bytes=max(0, self.card.memory_bytes - planned),
            ),
            policy=policy,
            asked_max_batch=self.max_batch if self.max_batch not in (None, max_batch) else None,
            card_parallel=self.cards,
            start_seconds=start_seconds + total_weights / _LOAD_BYTES_PER_SECOND,
            settings={"architecture": self.model.architecture, **settings},
        )

    def fail(self, failure: StartFailure, message: str, spec: ServerSpec) -> LaunchFailure:
        where = f"{self.cards} x {self.card.name}" if self.cards > 1 else self.card.name
        return LaunchFailure(
            failure, f"{self.engine} with {self.model.name} on {where} does not start: {message}", spec
        )

    def check_weights(self, room: int, spec: ServerSpec) -> None:
        """Raise if the weights are larger than `room` bytes."""
        if self.weights_bytes > room:
            raise self.fail(
                StartFailure.WEIGHTS_OUT_OF_MEMORY,
                f"weights need {_gib(self.weights_bytes)} on each card and {_gib(max(0, room))} are there; "
                "use fewer bits per weight, or more cards",
                spec,
            )


def launch(
    engine: str,
    *,
    model: ModelShape | str | None = None,
    card: Card | str,
    cards: int = 1,
    host: Host | None = None,
    settings: Settings | None = None,
    release: str | None = None,
    weight_bits: float | None = None,
    host_expert_ratio: float = 0.0,
    partitioned: bool | None = None,
    physical_batch_tokens: int | None = None,
    efficiency: Efficiency | None = None,
    max_batch: int | None = None,
    kv_blocks: int | None = None,
    context_tokens: int | None = None,
    token_budget: int | None = None,
    block_tokens: int | None = None,
) -> ServerSpec:
    """Start a server on paper.

    Args:
        engine: `vllm`, `sglang` or `llamacpp`.
        model: its shape, or what `read_model` takes; None takes the settings' model.
        card: the card, or a name of it.
        cards: how many of them there are. vLLM and SGLang share each layer among all of them unless the settings say
            otherwise; llama.cpp gives each card its own layers.
        host: the machine around them.
        settings: what the serving file asks for.
        release: the engine's release; None is the newest that is known.
        weight_bits: bits per weight, where they are other than the configuration and the settings say. For llama.cpp,
            the average over the whole file (4.85 for Q4_K_M).
        host_expert_ratio: share of the expert layers whose experts stay in main memory (llama.cpp's `--n-cpu-moe`).
        partitioned: each slot of llama.cpp has its own part of the context; None is partitioned when the number of
            slots is given, as llama.cpp has it.
        physical_batch_tokens: llama.cpp's `-ub`; None is 512.
        efficiency: shares of peak for the roofline.
        max_batch: requests at once; before the settings, as are the following.
        kv_blocks: blocks of the KV pool in place of what memory allows; still it has to fit.
        context_tokens: longest prompt plus output.
        token_budget: tokens of one step.
        block_tokens: tokens of a KV block.

    Raises:
        LaunchFailure: the server does not come up.
        ConfigError: what was asked for is contradictory or unknown.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r} is not known; known: {', '.join(ENGINES)}")
    habits = _HABITS[engine]
    asked = settings or Settings(path="(no settings file)")
    if asked.engine not in (None, engine):
        raise ConfigError(f"{asked.where('engine')}: engine is {asked.engine}, but {engine} is to be launched")
    source = model or asked.model
    if source is None:
        raise ConfigError("no model: name one, or set model in the settings file")
    shape = source if isinstance(source, ModelShape) else read_model(source)
    remembered = asked.derived_from.get("weight_bits")
    if weight_bits is None and isinstance(remembered, int | float):
        weight_bits = float(remembered)
    if weight_bits is not None:
        if not 1 <= weight_bits <= 32:
            raise ConfigError(f"weight_bits is {weight_bits:g}; it must be between 1 and 32")
        # A GGUF file's bits are an average over everything in it; other files leave embedding and output matrix alone.
        shape = shape.with_bits(weight_bits, weight_bits if habits.is_ggml else None)
    if habits.is_ggml:
        if partitioned is None and asked.kv_unified is not None:
            partitioned = not asked.kv_unified
        physical_batch_tokens = physical_batch_tokens or asked.physical_batch_tokens
        host_expert_ratio = host_expert_ratio or _kept_experts(asked, shape)
        if isinstance(asked.gpu_layers, int) and asked.gpu_layers <= len(shape.layers):
            raise ConfigError(
                f"{asked.where('gpu_layers')}: layers in main memory are not simulated, only experts are; leave "
                f"gpu_layers out, or set it above the {len(shape.layers)} layers of {shape.name}"
            )
    elif host_expert_ratio or partitioned is not None or physical_batch_tokens:
        raise ConfigError(
            f"experts in main memory, slots that share a KV cache and a physical batch mean nothing to {engine}"
        )
    for name, value in (
        ("cards", cards),
        ("max_batch", max_batch),
        ("kv_blocks", kv_blocks),
        ("context_tokens", context_tokens),
        ("token_budget", token_budget),
        ("block_tokens", block_tokens),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if habits.is_ggml and block_tokens not in (None, 1):
        raise ConfigError(f"block_tokens is {block_tokens}; the KV cache of {engine} has cells of one token each")
    which = find_card(card) if isinstance(card, str) else card
    split = _split(habits, shape, asked, cards)
    kv_name = (asked.kv_cache_dtype or asked.kv_cache_dtype_k or "auto").lower()
    width = cache_bits(asked, shape, engine)
    context = context_tokens or asked.max_model_len
    if context is not None and context > shape.context_tokens and not habits.is_ggml:
        raise ConfigError(
            f"{asked.where('max_model_len')}: {context} tokens are more than the {shape.context_tokens} of {shape.name}"
        )
    longest = context or shape.context_tokens
    physical = (physical_batch_tokens or 512) if habits.is_ggml else None
    ask = Ask(
        model=shape,
        card_bytes=which.memory_bytes,
        card_name=which.name,
        engine=engine,
        split=split,
        release=release,
        utilization=asked.gpu_memory_utilization,
        kv_bits=width,
        context_tokens=context,
        token_budget=token_budget or asked.max_num_batched_tokens,
        max_batch=max_batch or asked.max_batch_size,
        mtp_layers=asked.mtp_layers or 0,
        prefix_cache=asked.enable_prefix_cache is not False,
        block_tokens=block_tokens,
        physical_tokens=physical or 512,
    )
    weights = card_terms(ask).weights - round(shape.weight_bytes(split).experts * host_expert_ratio)
    start = _Launch(
        ask=ask,
        engine=engine,
        release=release or newest_release(engine),
        served=asked.model or shape.name,
        model=shape,
        card=which,
        split=split,
        cost=Roofline(
            shape,
            which,
            split=split,
            kv_bits=width,
            host=host,
            host_expert_ratio=host_expert_ratio,
            physical_batch_tokens=physical,
            efficiency=efficiency,
        ),
        utilization=ask.utilization,
        max_batch=ask.max_batch,
        context_tokens=longest,
        context_given=context is not None,
        token_budget=ask.token_budget,
        block_tokens=block_tokens,
        kv_blocks=kv_blocks,
        kv_tokens=asked.kv_cache_capacity_tokens,
        partitioned=partitioned,
        physical_tokens=physical or 0,
        host_expert_ratio=host_expert_ratio,
        usable_bytes=which.memory_bytes - DRIVER_BYTES,
        weights_bytes=weights,
        kv_token_bytes=math.ceil(pool_token_bytes(ask)),
        activation_token_bytes=activation_bytes(ask),
        kv_type=kv_name,
    )
    return habits.start(start)


def _kept_experts(settings: Settings, model: ModelShape) -> float:
    """Share of the layers with experts whose experts the file leaves in main memory."""
    kept = settings.cpu_moe_layers
    if kept is None or not model.expert_layers:
        return 0.0
    if not isinstance(kept, int):
        return 1.0
    return sum(1 for layer in model.layers[:kept] if layer.experts) / model.expert_layers


def _split(habits: "_Habits", model: ModelShape, settings: Settings, cards: int) -> Split:
    """How the model is divided, checked against the number of cards."""
    if (settings.data_parallel_size or 1) > 1:
        raise ConfigError(
            f"{settings.where('data_parallel_size')}: only one copy of a model is simulated; "
            "launch one server for each copy"
        )
    tensor, pipeline = settings.tensor_parallel_size, settings.pipeline_parallel_size
    if habits.is_ggml:
        tensor = tensor or 1
        pipeline = pipeline or max(1, cards // tensor)
    else:
        pipeline = pipeline or 1
        tensor = tensor or max(1, cards // pipeline)
    if tensor * pipeline > cards:
        raise ConfigError(
            f"{settings.where('tensor_parallel_size')}: {tensor} x {pipeline} cards are needed and {cards} are there"
        )
    expert = settings.expert_parallel_size or (tensor if settings.enable_expert_parallel else 1)
    if expert > 1 and (tensor % expert or (habits.experts_on_all_cards and expert != tensor)):
        rule = "be the tensor-parallel size" if habits.experts_on_all_cards else "divide the tensor-parallel size"
        raise ConfigError(f"{settings.where('expert_parallel_size')}: {expert} must {rule}, {tensor}")
    split = Split(tensor, pipeline, expert)
    model.check_split(split)
    return split


def _vllm(start: _Launch) -> ServerSpec:
    budget, batch = step_sizes(start.ask)
    if budget < batch:
        raise ConfigError(f"vllm: {budget} tokens a step are fewer than {batch} requests at once; raise the former")
    utilization = memory_share(start.ask)
    size = start.block_tokens or 16
    terms = start.terms(batch)
    room = terms.kv_cache
    # What sampling needs beyond the activations of a step grows with the requests.
    request_bytes = max(0, terms.workspace - start.activation_token_bytes * budget) // batch
    fits = max(0, room) // (size * start.kv_token_bytes)
    override = start.kv_blocks
    if override is None and start.kv_tokens is not None:
        override = start.kv_tokens // size
    blocks = fits if override is None else override
    # The log repeats what is not the default.
    settings: dict[str, str | int | float | bool | None] = {}
    if start.split.tensor > 1:
        settings["tensor_parallel_size"] = start.split.tensor
    if start.split.pipeline > 1:
        settings["pipeline_parallel_size"] = start.split.pipeline
    if start.split.expert > 1:
        settings["enable_expert_parallel"] = True
    if start.utilization:
        settings["gpu_memory_utilization"] = utilization
    if start.ask.kv_bits != 16:
        settings["kv_cache_dtype"] = start.kv_type
    if override is not None:
        settings |= {"num_gpu_blocks_override": override, "num_gpu_blocks_profiled": fits}

    def spec(kv_blocks: int) -> ServerSpec:
        return start.spec(
            max_batch=batch,
            token_budget=budget,
            block_tokens=size,
            kv_blocks=kv_blocks,
            workspace_bytes=terms.communication + terms.graphs + DRIVER_BYTES,
            activation_token_bytes=start.activation_token_bytes,
            request_bytes=request_bytes,
            start_seconds=45.0,
            policy=Policy(reserved_blocks=1),
            settings=settings,
        )

    start.check_weights(start.usable_bytes - terms.communication, spec(0))
    if not fits or blocks > fits:
        wanted = f", and {_gib(blocks * size * start.kv_token_bytes)} were asked for" if blocks > fits else ""
        raise start.fail(
            StartFailure.NO_KV_CACHE,
            f"of gpu_memory_utilization {utilization:g} x {_gib(start.usable_bytes)} on each card, "
            f"{_gib(start.weights_bytes)} are weights and {_gib(max(0, room))} are left for the KV cache{wanted}; "
            f"raise gpu_memory_utilization, lower max_num_batched_tokens ({budget}), or use fewer bits per weight",
            spec(0),
        )
    # Older releases forget the null block here; a request of full length then waits for it for ever.
    kept = 1 if _version(start.release) >= _NULL_BLOCK_COUNTED else 0
    if (blocks - kept) * size < start.context_tokens:
        raise start.fail(
            StartFailure.KV_BELOW_ONE_REQUEST,
            f"one request of max_model_len {start.context_tokens} needs "
            f"{_gib(start.context_tokens * start.kv_token_bytes)} of KV cache on each card, and "
            f"{_gib(blocks * size * start.kv_token_bytes)} are there, enough for {max(0, blocks - kept) * size} "
            "tokens; lower max_model_len",
            spec(blocks),
        )
    return spec(blocks)


def _sglang(start: _Launch) -> ServerSpec:
    chunk, graph_batch = step_sizes(start.ask)
    fraction = memory_share(start.ask)
    size = start.block_tokens or 1
    terms = start.terms(start.max_batch or graph_batch)
    most = most_requests(start.ask, terms.kv_cache)
    if most is not None and (held := pool_tokens(start.ask, terms.kv_cache)):
        # States have a pool of their own, beside that of tokens.
        start = replace(start, kv_token_bytes=-(-terms.kv_cache // held))
    free = start.usable_bytes - terms.communication
    room = terms.kv_cache
    fits = max(0, room) // (size * start.kv_token_bytes)
    asked = start.kv_blocks
    if asked is None and start.kv_tokens is not None:
        # SGLang takes the smaller of what was asked for and what memory allows.
        asked = min(fits, start.kv_tokens // size)
    blocks = fits if asked is None else asked
    tokens = blocks * size
    estimate = min(max(tokens * 512 // start.context_tokens, 2048), 4096)
    batch = max(1, min(start.max_batch or estimate, tokens // 2, tokens if most is None else most))

    def spec(kv_blocks: int) -> ServerSpec:
        return start.spec(
            max_batch=batch,
            # A pool below the context is no failure here: what is longer than the pool is refused.
            context_tokens=min(start.context_tokens, max(1, tokens)),
            token_budget=chunk,
            block_tokens=size,
            kv_blocks=kv_blocks,
            workspace_bytes=terms.communication + terms.graphs + DRIVER_BYTES,
            activation_token_bytes=start.activation_token_bytes,
            start_seconds=40.0,
            policy=Policy(
                prefill_first=True,
                reserved_output_ratio=0.7,
                counts_at_finish=version_of(start.release) < _LIVE_COUNTERS,
            ),
            settings={
                "tp_size": start.split.tensor,
                "pp_size": start.split.pipeline,
                "ep_size": start.split.expert,
                "context_length": start.context_tokens,
                "max_running_requests": start.max_batch,
                "chunked_prefill_size": chunk,
                "max_prefill_tokens": 16384,
                "mem_fraction_static": fraction,
                "page_size": size,
                "kv_cache_dtype": start.kv_type,
            },
        )

    start.check_weights(free, spec(0))
    if fits and not blocks:
        raise start.fail(
            StartFailure.NO_KV_CACHE,
            f"a KV cache of {start.kv_tokens} tokens is less than one block of {size}; make it larger",
            spec(0),
        )
    if not fits or blocks > fits:
        raise start.fail(
            StartFailure.NO_KV_CACHE,
            f"of mem_fraction_static {fraction:g} x {_gib(free)} on each card, {_gib(start.weights_bytes)} are weights "
            f"and {_gib(max(0, room))} are left for the KV cache; raise it, or use fewer bits per weight",
            spec(0),
        )
    needed = terms.graphs + terms.workspace
    if needed > free * (1 - fraction):
        raise start.fail(
            StartFailure.WARMUP_OUT_OF_MEMORY,
            f"graphs and activations need {_gib(needed)} on each card and mem_fraction_static {fraction:g} leaves "
            f"{_gib(int(free * (1 - fraction)))}; lower it, or lower chunked_prefill_size ({chunk})",
            spec(blocks),
        )
    return spec(blocks)


def _llamacpp(start: _Launch) -> ServerSpec:
    model = start.model
    slots = start.max_batch or 4
    partitioned = start.max_batch is not None if start.partitioned is None else start.partitioned
    terms = start.terms(slots)
    buffers, fixed = terms.workspace, terms.workspace + terms.communication
    # A context that is asked for may take what one that is fitted leaves free.
    room = terms.kv_cache + (0 if start.utilization else FIT_MARGIN_BYTES)
    parts = slots if partitioned else 1
    if start.kv_blocks:
        context = start.kv_blocks
    elif start.kv_tokens:
        context = start.kv_tokens
    elif start.context_given:
        context = start.context_tokens * parts
    else:
        context = min(model.context_tokens, max(0, room - FIT_MARGIN_BYTES) // start.kv_token_bytes)
        context = context // 256 * 256
    slot = context // parts if start.kv_blocks else -(-context // (parts * 256)) * 256
    context = slot * parts
    fits = max(0, room) // start.kv_token_bytes
    wanted = min(slot, start.context_tokens if start.context_given else model.context_tokens, model.context_tokens)
    batch_tokens = min(start.token_budget or 2048, max(1, context))

    def spec(cells: int) -> ServerSpec:
        return start.spec(
            max_batch=slots,
            context_tokens=max(1, wanted),
            token_budget=batch_tokens,
            block_tokens=1,
            kv_blocks=cells,
            workspace_bytes=fixed + DRIVER_BYTES,
            start_seconds=1.0,
            policy=Policy(on_full=OnFull.FAIL, partitioned=partitioned, counts_at_finish=True),
            settings={
                "n_ctx": context,
                "n_ctx_slot": wanted,
                "n_ctx_train": model.context_tokens,
                "n_parallel": slots,
                "kv_unified": not partitioned,
                "n_batch": batch_tokens,
                "n_ubatch": start.physical_tokens,
                "cache_type": start.kv_type,
                "n_cpu_moe": round(start.host_expert_ratio * model.expert_layers),
            },
        )

    start.check_weights(start.usable_bytes - fixed, spec(0))
    if not 0 < context <= fits:
        raise start.fail(
            StartFailure.NO_KV_CACHE,
            f"a context of {context} tokens needs {_gib(context * start.kv_token_bytes)} on each card, and "
            f"{_gib(max(0, room))} are left beside {_gib(start.weights_bytes)} of weights and {_gib(buffers)} of "
            "buffers; lower the context, or keep more experts in main memory",
            spec(0),
        )
    return spec(context)


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2] if part.isdigit())


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class _Habits:
    """What sets one engine's start apart.

    Attributes:
        start: divides the memory.
        is_ggml: reads GGUF files: one figure for the bits of all weights, layers dealt out to the cards, experts and
            the input embedding in main memory, a physical batch below the logical one, a context that may be stretched.
        experts_on_all_cards: expert parallelism has no size of its own.
    """

    start: Callable[[_Launch], ServerSpec]
    is_ggml: bool = False
    experts_on_all_cards: bool = False


_HABITS: Final[Mapping[str, _Habits]] = MappingProxyType(
    {
        "vllm": _Habits(_vllm, experts_on_all_cards=True),
        "sglang": _Habits(_sglang),
        "llamacpp": _Habits(_llamacpp, is_ggml=True),
    }
)
