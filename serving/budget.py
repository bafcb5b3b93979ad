"""What a card's memory is spent on, and how many requests fit into what is left.

The order is that of decisions that void one another: the split over cards is fixed first, from it follow the weights of
each card, then the buffers, then the KV cache, and from the cache the batch size, worked out from the mean length of
requests with room kept for a long one. Changing the split voids everything after it.

Sources of the accounting, each engine's own:

    vLLM        takes a share of the card (`gpu_memory_utilization`). A trial run of a full step and of sampling for a
                full batch shows what besides the weights is needed; the rest of the share is the KV cache. Releases
                from 0.20 on count the captured graphs in, older ones leave them to what is outside the share.
                (`v1/worker/gpu_worker.py`, `v1/core/kv_cache_utils.py`)
    SGLang      leaves a share (1 - `mem_fraction_static`) of the memory that was free before the weights to activations
                and graphs; what weights leave of the rest is the cache. (`model_executor/model_runner.py`)
    llama.cpp   loads as many layers onto cards as it is told, and the rest stays in main memory; the cache is as large
                as the context that is asked for. (`src/llama-kv-cache.cpp`, `common/fit.cpp`)

What no arithmetic can know (code of kernels, buffers of the links, the peak of a step) is estimated by constants that
were set with one half of the public start-up reports in `tests/samples/startup_reports`, and carries a range.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from serving.errors import ConfigError
from serving.model import Attention, Layer, ModelShape, RecurrentState, Split, UniformBits, Weights
from serving.settings import Settings

__all__ = [
    "DRIVER_BYTES",
    "FIT_MARGIN_BYTES",
    "KV_BITS",
    "Ask",
    "Budget",
    "Demand",
    "Step",
    "Terms",
    "activation_bytes",
    "as_launched",
    "ask_for",
    "cache_bits",
    "cache_kind",
    "card_terms",
    "kv_bits",
    "longest_context",
    "memory_share",
    "most_requests",
    "newest_release",
    "pool_token_bytes",
    "pool_tokens",
    "request_bytes",
    "step_sizes",
    "work_out",
]

_GIB: Final = 2**30
_MIB: Final = 2**20

KV_BITS: Final[Mapping[str, float]] = MappingProxyType(
    {
        **dict.fromkeys(("auto", "bf16", "bfloat16", "f16", "fp16", "float16", "half"), 16.0),
        **dict.fromkeys(("fp8_e4m3", "fp8", "fp8_e5m2", "int8"), 8.0),
        "f32": 32.0,
        "q8_0": 8.5,
        "q5_1": 6.0,
        "q5_0": 5.5,
        "q4_1": 5.0,
        "q4_0": 4.5,
        "iq4_nl": 4.5,
    }
)
"""Bits of an element of the KV cache by the engines' names for its type; ggml's blocks of 32 share a scale."""


def kv_bits(name: str | None, where: str = "kv_cache_dtype") -> float:
    """Bits of an element of the KV cache by its type's name; None is the default of 16.

    Raises:
        ConfigError: the name is not known; the message begins with `where`.
    """
    plain = (name or "auto").lower()
    if plain not in KV_BITS:
        raise ConfigError(f"{where}: kv_cache_dtype {plain[:60]!r} is not known; known: {', '.join(KV_BITS)}")
    return KV_BITS[plain]


@dataclass(frozen=True, slots=True)
class Demand:
    """What requests look like: lengths in tokens, prompt and output together.

    Attributes:
        mean_tokens: of an ordinary request.
        long_tokens: of a long one; None is the context.
        long_share: share of requests that are long, 0..1.
    """

    mean_tokens: int
    long_tokens: int | None = None
    long_share: float = 0.0

    def __post_init__(self) -> None:
        if self.mean_tokens < 1:
            raise ConfigError(f"a mean of {self.mean_tokens} tokens a request; it must be at least 1")
        if not 0 <= self.long_share <= 1:
            raise ConfigError(f"a share of long requests of {self.long_share:g}; it must be between 0 and 1")
        if self.long_tokens is not None and self.long_tokens < self.mean_tokens:
            raise ConfigError(
                f"long requests of {self.long_tokens} tokens are shorter than the mean, {self.mean_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be budgeted.

    Attributes:
        model: its shape.
        card_bytes: total memory of one card, as NVML shows it; all cards are alike.
        card_name: for messages, and where an engine's default depends on it.
        engine: `vllm`, `sglang` or `llamacpp`.
        split: how one copy of the model is divided. With `copies` above 1, `split.expert` may span them.
        copies: copies of the model that share the traffic (data parallelism).
        release: the engine's; None is the newest that is known.
        utilization: share of the memory that the engine may take; None is the engine's default.
        kv_bits: bits of an element of the KV cache.
        context_tokens: longest prompt plus output of one request; None is the model's.
        token_budget: tokens of one step of one copy; None is the engine's default.
        max_batch: requests at once of one copy, where that is given rather than asked for.
        mtp_layers: modules for multi-token prediction in use.
        demand: what requests look like; those longer than the context count as filling it.
        free_bytes: memory of a card that is free before the start; None is all.
        weights_bytes: weights on the fullest card, where they were measured; None works them out.
        block_tokens: tokens of a block of the KV cache.
        graphs: whether decode steps are captured as graphs.
        prefix_cache: whether beginnings of prompts are kept; then SGLang keeps several states for each request.
        gpu_layers: layers on the cards (llama.cpp's `-ngl`), the output matrix counting as one; None is all.
        cpu_moe_layers: first layers whose experts stay in main memory (`--n-cpu-moe`).
        physical_tokens: tokens that go through the layers at once (`-ub`).
    """

    model: ModelShape
    card_bytes: int
    engine: str = "vllm"
    card_name: str = ""
    split: Split = field(default_factory=Split)
    copies: int = 1
    release: str | None = None
    utilization: float | None = None
    kv_bits: float = 16.0
    context_tokens: int | None = None
    token_budget: int | None = None
    max_batch: int | None = None
    mtp_layers: int = 0
    demand: Demand | None = None
    free_bytes: int | None = None
    weights_bytes: int | None = None
    block_tokens: int | None = None
    graphs: bool = True
    prefix_cache: bool = True
    gpu_layers: int | None = None
    cpu_moe_layers: int = 0
    physical_tokens: int = 512

    def __post_init__(self) -> None:
        if self.engine not in _ACCOUNTS:
            raise ConfigError(f"engine {self.engine!r} is not known; known: {', '.join(_ACCOUNTS)}")
        for name in ("card_bytes", "copies", "context_tokens", "token_budget", "max_batch", "physical_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("mtp_layers", "cpu_moe_layers", "gpu_layers"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; it cannot be below 0")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise ConfigError(f"a utilization of {self.utilization:g}; it must be above 0 and at most 1")
        if not 1 <= self.kv_bits <= 32:
            raise ConfigError(f"{self.kv_bits:g} bits for an element of the KV cache; it must be between 1 and 32")
        if (self.gpu_layers is not None or self.cpu_moe_layers) and not self.account.offloads:
            raise ConfigError(f"{self.engine} cannot leave layers or experts in main memory; llamacpp can")
        if (self.split.tensor * self.copies) % self.split.expert:
            raise ConfigError(
                f"experts over {self.split.expert} cards: it must divide the cards that share a stage, "
                f"{self.split.tensor} (tensor) x {self.copies} (data)"
            )
        context = self.model.context_tokens
        if self.context_tokens is not None and self.context_tokens > context and not self.account.offloads:
            raise ConfigError(
                f"a context of {self.context_tokens} tokens is longer than the {context} of {self.model.name}"
            )

    def with_weight_bits(self, bits: float) -> "Ask":
        """The same with weights of another width.

        In a GGUF file that is an average over everything; elsewhere embedding and output matrix stay as they are.
        """
        return replace(self, model=self.model.with_bits(bits, bits if self.account.offloads else None))

    @property
    def is_offloaded(self) -> bool:
        """Whether layers or experts stay in main memory that could be on the cards.

        The input embedding, of which a token needs one row, stays there in any case with llama.cpp.
        """
        layers = self.model.layers
        kept = any(layer.experts for layer in layers[: self.cpu_moe_layers])
        return kept or (self.gpu_layers is not None and self.gpu_layers <= len(layers))

    @property
    def account(self) -> "_Account":
        """How the engine divides a card."""
        return _ACCOUNTS[self.engine]

    @property
    def cards(self) -> int:
        """Cards of the whole target."""
        return self.split.tensor * self.split.pipeline * self.copies

    @property
    def context(self) -> int:
        """The context in effect, in tokens."""
        return self.context_tokens or self.model.context_tokens

    @property
    def version(self) -> tuple[int, ...]:
        """The release as numbers, major and minor."""
        text = self.release or self.account.release
        return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def ask_for(settings: Settings, model: ModelShape, *, card_bytes: int, card_name: str = "", cards: int = 1) -> Ask:
    """What a serving file asks for, of cards that are given.

    vLLM and SGLang share each layer among all cards unless the file says otherwise; llama.cpp gives each card its own
    layers. A `max_batch_size` of several copies is divided among them.

    Raises:
        ConfigError: the file asks for more cards than there are, or for what the model or the engine cannot do.
    """
    engine = settings.engine or "vllm"
    account = _ACCOUNTS[engine]
    copies = settings.data_parallel_size or 1
    tensor, pipeline = settings.tensor_parallel_size, settings.pipeline_parallel_size
    if account.offloads:
        tensor = tensor or 1
        pipeline = pipeline or max(1, cards // (tensor * copies))
    else:
        pipeline = pipeline or 1
        tensor = tensor or max(1, cards // (pipeline * copies))
    if tensor * pipeline * copies > cards:
        raise ConfigError(
            f"{settings.where('tensor_parallel_size')}: {tensor} (tensor) x {pipeline} (pipeline) x {copies} (data) "
            f"cards are needed and {cards} are there"
        )
    expert = settings.expert_parallel_size or (tensor * copies if settings.enable_expert_parallel else 1)
    layers = len(model.layers)
    experts = layers if settings.cpu_moe_layers == "all" else settings.cpu_moe_layers
    batch = settings.max_batch_size
    return Ask(
        model=model,
        card_bytes=card_bytes,
        card_name=card_name,
        engine=engine,
        split=Split(tensor, pipeline, expert),
        copies=copies,
        utilization=settings.gpu_memory_utilization,
        kv_bits=cache_bits(settings, model, engine),
        context_tokens=settings.max_model_len,
        token_budget=settings.max_num_batched_tokens,
        max_batch=None if batch is None else max(1, batch // copies),
        mtp_layers=settings.mtp_layers or 0,
        prefix_cache=settings.enable_prefix_cache is not False,
        gpu_layers=settings.gpu_layers if isinstance(settings.gpu_layers, int) else None,
        cpu_moe_layers=int(experts or 0),
        physical_tokens=settings.physical_batch_tokens or 512,
    )


def cache_bits(settings: Settings, model: ModelShape, engine: str) -> float:
    """Bits of an element of the KV cache that an engine makes of a serving file, the mean of keys and values.

    Where the file leaves it open, vLLM and SGLang do as the checkpoint asks. Sources: vLLM 0.32, `utils/torch_utils.py`
    and `model_executor/layers/attention`; SGLang 0.5, `model_executor/model_runner.py`.

    Raises:
        ConfigError: a type is not known, or not one that the engine has.
    """
    both, offloads = settings.kv_cache_dtype, _ACCOUNTS[engine].offloads
    asked_for = getattr(model.quantization, "kv_cache_bits", None)
    names = {"kv_cache_dtype": both}
    if settings.kv_cache_dtype_k is not None or settings.kv_cache_dtype_v is not None:
        names = {
            "kv_cache_dtype_k": settings.kv_cache_dtype_k or both,
            "kv_cache_dtype_v": settings.kv_cache_dtype_v or both,
        }
    found = []
    for key, name in names.items():
        where = settings.where(key)
        bits = kv_bits(name, where)
        plain = (name or "auto").lower()
        if plain in (_TORCH_KINDS if offloads else _GGML_KINDS):
            ours = ", ".join(kind for kind in KV_BITS if kind not in (_TORCH_KINDS if offloads else _GGML_KINDS))
            raise ConfigError(f"{where}: kv_cache_dtype {plain!r} is not a type of {engine}'s; known: {ours}")
        found.append(asked_for if plain == "auto" and asked_for is not None and not offloads else bits)
    return sum(found) / len(found)


def cache_kind(engine: str, bits: float) -> str:
    """The name of an engine's type of KV cache with so many bits an element, the plainest where there are several.

    Raises:
        ConfigError: it has none.
    """
    offloads = _ACCOUNTS[engine].offloads
    if bits == KV_BITS["auto"]:
        return "f16" if offloads else "bfloat16"
    others = _TORCH_KINDS if offloads else _GGML_KINDS
    kinds = [kind for kind, width in KV_BITS.items() if kind not in others and width == bits]
    if not kinds:
        raise ConfigError(f"{engine} has no type of KV cache with {bits:g} bits an element; name one of its types")
    return kinds[0]


_TORCH_KINDS: Final = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "int8"})
_GGML_KINDS: Final = frozenset({"f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"})


@dataclass(frozen=True, slots=True)
class Terms:
    """What the fullest card's memory is spent on, in bytes; together they are the card.

    Attributes:
        weights: as loaded.
        communication: code and buffers outside the framework's allocator, most of them for exchange between cards.
        workspace: the peak of a step: activations, logits, sampling.
        graphs: captured graphs.
        kv_cache: what is left for the KV cache; negative where nothing is.
        reserve: what the engine leaves alone: the driver's, and the share that it was told not to take.
        elsewhere: what other processes hold.
        host_weights: weights that stay in main memory; not on the card.
    """

    weights: int
    communication: int
    workspace: int
    graphs: int
    kv_cache: int
    reserve: int
    elsewhere: int = 0
    host_weights: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a retreat would buy.

    Attributes:
        kind: `quantization`, `context` or `concurrency`, in the order in which to try them.
        change: what would be changed, for people.
        max_batch: requests at once after it; None where it still does not fit.
        price: what it costs.
    """

    kind: str
    change: str
    max_batch: int | None
    price: str


@dataclass(frozen=True, slots=True)
class Budget:
    """The answer.

    Attributes:
        ask: what was asked.
        terms: the fullest card's memory.
        token_budget: tokens of a step of one copy, as given or by the engine's default.
        token_bytes: bytes by which a long request grows for each token, on the fullest card.
        mean_bytes: bytes that a mean request holds there.
        longest_bytes: bytes that a request of full context holds there.
        kv_tokens: tokens that the KV cache of one copy holds when filled by requests of full context, started with
            `max_batch`.
        max_batch: requests at once over all copies; 0 where none fits.
        max_batch_range: the same with the uncertain terms at their worst and at their best.
        fits: whether the server starts, and can serve one request of full context.
        bound_by: the term that binds: `weights`, `kv_cache`, `workspace`, `elsewhere` (other processes),
            `token_budget`, or `asked` where the batch size that was given is no more than fits.
        reason: the same in a sentence.
        steps: what one step of quantisation, context or concurrency would buy.
        notes: what a person should know about the figures.
    """

    ask: Ask
    terms: Terms
    token_budget: int
    token_bytes: int
    mean_bytes: int
    longest_bytes: int
    kv_tokens: int
    max_batch: int
    max_batch_range: tuple[int, int]
    fits: bool
    bound_by: str
    reason: str
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds_asked(self) -> bool:
        """Whether it fits, and with as many requests at once as were asked for, where a number was."""
        return self.fits and self.max_batch >= (self.ask.max_batch or 1) * self.ask.copies


@dataclass(frozen=True, slots=True)
class _Guess:
    """The estimated constants, and how far they may be off: factors of what is likely."""

    communication: float = 1.0
    workspace: float = 1.0
    driver: float = 1.0


_LIKELY: Final = _Guess()
_WORST: Final = _Guess(communication=1.8, workspace=1.4, driver=1.5)
_BEST: Final = _Guess(communication=0.5, workspace=0.7, driver=0.7)

DRIVER_BYTES: Final = 450 * _MIB
"""What the driver keeps of the memory that NVML shows as total."""


# ---- what requests hold


def request_bytes(ask: Ask, tokens: int) -> float:
    """Bytes of the KV cache that one request of this length holds on the fullest card, as the engine allots them."""
    return ask.account.request(ask, tokens)


def pool_tokens(ask: Ask, pool_bytes: int) -> int:
    """Tokens that a KV cache of so many bytes on each card holds, as the engine counts them.

    Where layers differ in what they keep, no number of tokens is the whole truth; then the tokens of requests of full
    context are counted: how many of these fit, times their length.
    """
    return ask.account.tokens(ask, pool_bytes)


def pool_token_bytes(ask: Ask) -> float:
    """What a token of the KV cache costs on the fullest card.

    Where layers differ in what they keep, it is its share of a request of full context, as engines lay that out.
    """
    return request_bytes(ask, ask.context) / ask.context if _is_hybrid(ask) else _growth(ask)


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _stages(ask: Ask) -> list[list[Layer]]:
    """The layers of each card of a copy; those that stay in main memory, and their part of the cache, are in none."""
    stages = [[ask.model.layers[number] for number in stage] for stage in ask.account.deal(ask)]
    stages[-1] += [layer for layers in ask.model.mtp[: ask.mtp_layers] for layer in layers]
    return stages


def _staged(ask: Ask) -> Sequence[Sequence[int]]:
    return ask.model.stages(ask.split.pipeline)


def _dealt(ask: Ask) -> Sequence[Sequence[int]]:
    """llama.cpp's layers by card: the last ones that it is told to load, the output matrix counting as one more.

    Source: b11434, `src/llama-model.cpp`.
    """
    layers = len(ask.model.layers)
    count = layers + 1 if ask.gpu_layers is None else min(ask.gpu_layers, layers + 1)
    cards: list[list[int]] = [[] for _ in range(ask.split.pipeline)]
    for turn, number in enumerate(range(layers + 1 - count, layers)):
        cards[turn * ask.split.pipeline // count].append(number)
    return cards


def _growth(ask: Ask) -> float:
    """Bytes by which a long request grows for each token, on the fullest card."""
    tensor = 1 if ask.account.offloads else ask.split.tensor
    return max(
        sum(
            layer.mixer.token_bytes(ask.kv_bits, tensor)
            for layer in stage
            if layer.mixer is not None and layer.mixer.window is None
        )
        for stage in _stages(ask)
    )


def _is_hybrid(ask: Ask) -> bool:
    """Whether layers differ in what they keep of a request."""
    mixers = [layer.mixer for layer in ask.model.layers if layer.mixer is not None]
    kept = [mixer for mixer in mixers if not (isinstance(mixer, Attention) and mixer.shares_kv)]
    windows = {mixer.window for mixer in kept if mixer.token_bytes(16.0, 1)}
    return len(windows) > 1 or any(mixer.state_bytes(1, None) for mixer in mixers)


def _paged_request(ask: Ask, tokens: int) -> float:
    """A cache in pages, as vLLM has it: whole blocks, windows with room for a step, a block at least for a state.

    Blocks of attention are made as large as a state where there are states, and a state takes one of them.
    """
    size = ask.block_tokens or 16
    budget, tensor = ask.account.sizes(ask)[0], ask.split.tensor
    most = 0.0
    for stage in _stages(ask):
        mixers = [layer.mixer for layer in stage if layer.mixer is not None]
        rates = [mixer.token_bytes(ask.kv_bits, tensor) for mixer in mixers]
        states = [mixer.state_bytes(tensor, None) for mixer in mixers]
        page = size
        if any(states) and any(rates):
            page = _blocks(math.ceil(max(states) / min(rate for rate in rates if rate)), size) * size
        widest = max(rates, default=0.0) * page
        held = 0.0
        for mixer, rate, state in zip(mixers, rates, states, strict=True):
            kept = tokens if mixer.window is None else min(tokens, mixer.window - 1 + budget)
            held += rate * _blocks(kept, page) * page + (max(state, widest) if state else 0.0)
        most = max(most, held)
    return most


def _paged_tokens(ask: Ask, pool_bytes: int) -> int:
    size = ask.block_tokens or 16
    if _is_hybrid(ask):
        return max(0, int(pool_bytes / _paged_request(ask, ask.context) * ask.context))
    return max(0, int(pool_bytes // (_plain_rate(ask) * size))) * size


def _plain_rate(ask: Ask) -> float:
    """Bytes of a token on the fullest card where all layers keep all tokens."""
    tensor = ask.split.tensor
    return max(
        sum(layer.mixer.token_bytes(ask.kv_bits, tensor) for layer in stage if layer.mixer is not None)
        for stage in _stages(ask)
    )


_WINDOW_SHARE: Final = 0.8
"""SGLang's default of tokens in the pool of layers with a window, for each in the other pool."""
_STATE_RATIO: Final = 0.9
"""SGLang's default of bytes for states, for each byte of the other pool."""
_STATES_KEPT: Final = 3
"""States that SGLang keeps at most for each request that may run, where prefixes are cached."""


def _pooled_rate(ask: Ask) -> float:
    """SGLang: bytes of a token of the main pool, with the share that it takes along in the pool of windows."""
    tensor = ask.split.tensor
    most = 0.0
    for stage in _stages(ask):
        mixers = [layer.mixer for layer in stage if layer.mixer is not None]
        plain = sum(mixer.token_bytes(ask.kv_bits, tensor) for mixer in mixers if mixer.window is None)
        windowed = sum(mixer.token_bytes(ask.kv_bits, tensor) for mixer in mixers if mixer.window is not None)
        most = max(most, plain + (_WINDOW_SHARE if plain else 1.0) * windowed)
    return most


def _has_states(ask: Ask) -> bool:
    return any(layer.mixer is not None and layer.mixer.state_bytes(1, None) for layer in ask.model.layers)


def _kept_states(ask: Ask) -> float:
    """Bytes of the states that SGLang keeps for one request that may run."""
    return ask.model.state_bytes(ask.split) * (_STATES_KEPT if ask.prefix_cache else 1)


def _pooled_request(ask: Ask, tokens: int) -> float:
    return _pooled_rate(ask) * tokens + _kept_states(ask)


def _pooled_tokens(ask: Ask, pool_bytes: int) -> int:
    states = 0.0
    if _has_states(ask):
        states = pool_bytes * _STATE_RATIO / (1 + _STATE_RATIO)
        if ask.max_batch is not None:
            states = min(states, ask.max_batch * _kept_states(ask))
    return max(0, int((pool_bytes - states) / _pooled_rate(ask)))


def _pooled_most(ask: Ask, pool_bytes: int) -> int | None:
    if not _has_states(ask):
        return None
    return max(0, int(pool_bytes * _STATE_RATIO / (1 + _STATE_RATIO) / _kept_states(ask)))


def most_requests(ask: Ask, pool_bytes: int) -> int | None:
    """Requests at once to which an engine cuts the batch by its pool of states; None where it has no such limit."""
    return None if ask.account.most is None else ask.account.most(ask, pool_bytes)


def _cells_request(ask: Ask, tokens: int) -> float:
    """llama.cpp: cells of one token; a window keeps one physical batch beyond it."""
    most = 0.0
    for stage in _stages(ask):
        held = 0.0
        for layer in stage:
            mixer = layer.mixer
            if mixer is not None:
                kept = tokens if mixer.window is None else min(tokens, mixer.window + ask.physical_tokens)
                held += mixer.token_bytes(ask.kv_bits, 1) * kept
            if isinstance(mixer, RecurrentState):
                # What the convolution remembers has 32 bits, too. Source: `llama_memory_recurrent: R (f32), S (f32)`.
                held += replace(mixer, conv_bits=32.0).state_bytes(1, 32.0)
        most = max(most, held)
    return most


def _cells_tokens(ask: Ask, pool_bytes: int) -> int:
    full = _cells_request(ask, ask.context)
    return max(0, int(pool_bytes / full * ask.context)) if full else 0


# ---- what the rest takes


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What does not depend on how many requests run at once; worked out once.

    Attributes:
        weights: bytes on the fullest card.
        host_weights: bytes in main memory.
        activation: bytes of one token at the peak of a step, on one card.
    """

    weights: int
    host_weights: int
    activation: int


def _fix(ask: Ask) -> _Fixed:
    weights, host = ask.account.weigh(ask)
    return _Fixed(weights, host, activation_bytes(ask))


def card_terms(ask: Ask, *, weights_bytes: int | None = None) -> Terms:
    """The terms of a card that is started just so, whatever fits; `weights_bytes` are on it, where that is known."""
    fixed = _fix(ask) if weights_bytes is None else _Fixed(weights_bytes, 0, activation_bytes(ask))
    return ask.account.terms(ask, fixed, _LIKELY)


def step_sizes(ask: Ask) -> tuple[int, int]:
    """(tokens of a step, requests at once) of one copy, as given or by the engine's defaults.

    For SGLang the second is the largest batch with a graph, and for llama.cpp the first is the logical batch.
    """
    return ask.account.sizes(ask)


def as_launched(ask: Ask) -> Ask:
    """The same with the batch that the engine runs where none is asked for, if it plans its memory by that."""
    return replace(ask, max_batch=step_sizes(ask)[1]) if ask.account.plans_batch else ask


def memory_share(ask: Ask) -> float:
    """The share of a card's memory that the engine takes, as given or by its default; each means its own by it."""
    return ask.account.share(ask)


def activation_bytes(ask: Ask) -> int:
    """Peak activations of one token on one card, in 16 bits: the residual, its norm, and the widest part of a layer."""
    model, split = ask.model, ask.split
    mixers = {layer.mixer for layer in model.layers if layer.mixer is not None}
    parts = {layer.feed_forward for layer in model.layers if layer.feed_forward is not None}
    widest = max((mixer.activations // split.tensor for mixer in mixers), default=0)
    over = 1 if split.expert > 1 else split.tensor
    for part in parts:
        is_routed = any(layer.experts is part for layer in model.layers)
        widest = max(widest, part.activations(model.hidden, over if is_routed else split.tensor))
    return 2 * (3 * model.hidden + widest)


def _vllm_sizes(ask: Ask) -> tuple[int, int]:
    """(tokens of a step, requests at once) of one copy, by vLLM's defaults where they are not given."""
    large = ask.card_bytes >= 70 * _GIB and "a100" not in ask.card_name.lower()
    budget = ask.token_budget
    if budget is None:
        if ask.version < _V1:
            # Without chunked prefill a step takes a whole prompt; it is on where the context is long.
            budget = max(2048, ask.context) if ask.context <= 32768 else 2048
        else:
            budget = 8192 if large else 2048
    batch = ask.max_batch or min(1024 if large and ask.version >= _V1 else 256, budget)
    return budget, batch


_V1: Final = (0, 8)
_GRAPHS_COUNTED: Final = (0, 20)
_NEW_SHARE: Final = (0, 20)
_TRITON_SAMPLER: Final = (0, 16)
_LOGIT_BYTES: Final = 18
"""For each request and token of the vocabulary at the peak of sampling."""
_SORTED_LOGIT_BYTES: Final = 38
"""The same where logits are sorted for it, by releases before February 2026.

Source: the table of vLLM's pull request 32558, 1.25 GB for 256 requests and 131,072 tokens.
"""
_CODE_BYTES: Final = 200 * _MIB
_LINK_BYTES: Final = 500 * _MIB
_MOE_CHUNK_TOKENS: Final = 32768
"""More tokens than this go through the experts in turns."""


def _vllm_share(ask: Ask) -> float:
    """`gpu_memory_utilization`."""
    return ask.utilization or (0.92 if ask.version >= _NEW_SHARE else 0.9)


def _vllm_terms(ask: Ask, fixed: _Fixed, guess: _Guess) -> Terms:
    budget, batch = _vllm_sizes(ask)
    driver = round(DRIVER_BYTES * guess.driver)
    usable = ask.card_bytes - driver
    weights = fixed.weights
    tokens = budget
    if ask.copies > 1 and ask.split.expert > 1:
        tokens = min(budget * ask.copies, _MOE_CHUNK_TOKENS)
    logit = _LOGIT_BYTES if ask.version >= _TRITON_SAMPLER else _SORTED_LOGIT_BYTES
    sampling = logit * batch * ask.model.vocabulary
    workspace = round(max(fixed.activation * tokens, sampling) * guess.workspace)
    communication = round((_CODE_BYTES + (_LINK_BYTES if ask.cards > 1 else 0)) * guess.communication)
    graphs = _graph_bytes(ask, batch, 0.28)
    counted = graphs if ask.version >= _GRAPHS_COUNTED else 0
    pool = int(usable * _vllm_share(ask)) - weights - communication - workspace - counted
    elsewhere = max(0, usable - ask.free_bytes) if ask.free_bytes is not None else 0
    return Terms(
        weights=weights,
        communication=communication,
        workspace=workspace,
        graphs=graphs,
        kv_cache=pool,
        reserve=ask.card_bytes - weights - communication - workspace - graphs - pool - elsewhere,
        elsewhere=elsewhere,
    )


def _graph_bytes(ask: Ask, batch: int, layer_mib: float) -> int:
    """Captured graphs: a fixed part, and one for each layer and size of batch; up to 512 requests have one."""
    if not ask.graphs:
        return 0
    sizes = 3 + min(batch, 512) / 8
    return round(150 * _MIB + sizes * len(ask.model.layers) / ask.split.pipeline * layer_mib * _MIB)


def _torch_weights(ask: Ask) -> tuple[int, int]:
    """(bytes of weights on the fullest card, none in main memory)."""
    if ask.weights_bytes is not None:
        return ask.weights_bytes, 0
    return ask.model.weight_bytes(ask.split, mtp_layers=ask.mtp_layers).total, 0


def _vllm_weights(ask: Ask) -> tuple[int, int]:
    """As they are stored, but for experts in mxfp4: their kernels work on multiples of 256.

    Source: vLLM 0.12, `model_executor/layers/quantization/mxfp4.py`.
    """
    widths = {layer.experts.width for layer in ask.model.layers if layer.experts}
    if ask.weights_bytes is not None or not widths or getattr(ask.model.quantization, "method", None) != "mxfp4":
        return _torch_weights(ask)
    loaded = ask.model.weight_bytes(ask.split, mtp_layers=ask.mtp_layers)
    width = max(widths)
    return loaded.total + round(loaded.experts * (_blocks(width, 256) * 256 / width - 1)), 0


_SGLANG_OVERHEAD_BYTES: Final = 600 * _MIB
"""The context of the framework, taken before the memory that is there is first looked at."""


def _sglang_sizes(ask: Ask) -> tuple[int, int]:
    """(tokens of a chunk, largest batch with a graph) by a card's memory, as SGLang 0.5 chooses them."""
    few = ask.split.tensor < 4
    for below, chunk, graph_few, graph_many in (
        (20, 2048, 8, 8),
        (35, 2048, 24, 80),
        (60, 4096, 32, 160),
        (160, 8192, 256, 512),
    ):
        if ask.card_bytes < below * _GIB:
            return ask.token_budget or chunk, graph_few if few else graph_many
    return ask.token_budget or 16384, 512


_NEW_FRACTION: Final = (0, 5)


def _sglang_fraction(ask: Ask) -> float:
    """`mem_fraction_static`, as given or as SGLang works it out."""
    if ask.utilization is not None:
        return ask.utilization
    if ask.version < _NEW_FRACTION:
        return {1: 0.88, 2: 0.87, 4: 0.85, 8: 0.85}.get(ask.split.tensor, 0.83)
    chunk, graph_batch = _sglang_sizes(ask)
    total = ask.card_bytes / _MIB
    reserved = 512 + 1.5 * max(chunk, 2048) + 2 * graph_batch + ask.cards / 8 * 1024
    if total > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((total - reserved) / total, 3)


def _sglang_terms(ask: Ask, fixed: _Fixed, guess: _Guess) -> Terms:
    chunk, graph_batch = _sglang_sizes(ask)
    driver = round(DRIVER_BYTES * guess.driver)
    usable = ask.card_bytes - driver
    free = usable if ask.free_bytes is None else min(usable, ask.free_bytes)
    elsewhere = usable - free
    free -= round(_SGLANG_OVERHEAD_BYTES * guess.communication)
    weights = fixed.weights
    loading = round(150 * _MIB * guess.communication)
    pool = int(free * _sglang_fraction(ask)) - weights - loading
    graphs = _graph_bytes(ask, graph_batch, 0.5)
    workspace = round(fixed.activation * chunk * guess.workspace)
    communication = round(_SGLANG_OVERHEAD_BYTES * guess.communication) + loading
    return Terms(
        weights=weights,
        communication=communication,
        workspace=workspace,
        graphs=graphs,
        kv_cache=pool,
        reserve=ask.card_bytes - elsewhere - weights - communication - workspace - graphs - pool,
        elsewhere=elsewhere,
    )


def _llamacpp_share(ask: Ask) -> float:
    return ask.utilization or 1.0


def _llamacpp_sizes(ask: Ask) -> tuple[int, int]:
    """(logical batch, slots)."""
    return ask.token_budget or 2048, ask.max_batch or 4


FIT_MARGIN_BYTES: Final = 1024 * _MIB
"""What llama.cpp leaves free on a card when it fits what it loads to it."""


def _llamacpp_terms(ask: Ask, fixed: _Fixed, guess: _Guess) -> Terms:
    driver = round(DRIVER_BYTES * guess.driver)
    usable = ask.card_bytes - driver
    free = usable if ask.free_bytes is None else min(usable, ask.free_bytes)
    workspace = round(ask.physical_tokens * (4 * ask.model.vocabulary + fixed.activation) * guess.workspace)
    communication = round(300 * _MIB * guess.communication)
    kept = round(free * (1 - ask.utilization)) if ask.utilization else FIT_MARGIN_BYTES
    pool = free - kept - fixed.weights - workspace - communication
    return Terms(
        weights=fixed.weights,
        communication=communication,
        workspace=workspace,
        graphs=0,
        kv_cache=pool,
        reserve=driver + kept,
        elsewhere=usable - free,
        host_weights=fixed.host_weights,
    )


def _ggml_weights(ask: Ask) -> tuple[int, int]:
    """(bytes of weights on the fullest card, bytes in main memory).

    The input embedding stays in main memory; where it is the output matrix too, the card has a copy. The last layers go
    to the cards first, and the output matrix counts as one more layer.
    """
    model = ask.model
    layers = len(model.layers)
    on_cards = layers + 1 if ask.gpu_layers is None else min(ask.gpu_layers, layers + 1)
    whole = model.weight_bytes()
    scale = 1.0 if ask.weights_bytes is None else ask.weights_bytes / model.weight_bytes(ask.split).total
    head = whole.head or whole.embedding
    each = _layer_weights(model) if _uneven(model) else None
    body = whole.always_read + whole.experts

    def size(number: int) -> tuple[float, float]:
        """(bytes without experts, bytes of experts) of one layer."""
        if each is None:
            return whole.always_read / layers, whole.experts / layers
        return each[number].always_read, each[number].experts

    loaded = [0.0] * ask.split.pipeline
    held: float = body + whole.embedding
    for card, numbers in enumerate(_dealt(ask)):
        for number in numbers:
            plain, experts = size(number)
            loaded[card] += plain + (0.0 if number < ask.cpu_moe_layers else experts)
    held -= sum(loaded)
    if on_cards:
        loaded[-1] += head
    else:
        held += whole.head
    return round(max(loaded) * scale), round(held * scale)


def _layer_weights(model: ModelShape) -> list[Weights]:
    """Bytes of weights of each layer; layers alike are weighed once."""
    known: dict[int, Weights] = {}
    for layer in model.layers:
        if id(layer) not in known:
            known[id(layer)] = replace(model, layers=(layer,)).weight_bytes()
    return [known[id(layer)] for layer in model.layers]


def _uneven(model: ModelShape) -> bool:
    return len(set(model.layers)) > 1


# ---- the answer


def work_out(ask: Ask) -> Budget:
    """Budget a card.

    Returns:
        The terms, what fits, what binds, and what a step of a retreat would buy. That nothing fits is an answer.

    Raises:
        ConfigError: the model cannot be divided like that, or nothing on the cards grows with the requests.
    """
    if not request_bytes(ask, ask.context):
        whole = replace(ask, split=Split(), gpu_layers=None)
        raise ConfigError(
            f"no layer of {ask.model.name} that keeps anything of a request is on the cards, so main memory and not a "
            f"card says how many fit: {_gib(_fix(ask).host_weights)} of weights, and "
            f"{_gib(request_bytes(whole, ask.context))} for each request of {ask.context:,} tokens"
        )
    found = _answer(ask)
    return replace(found, steps=_steps(found)) if not ask.account.offloads or found.max_batch else found


def _answer(ask: Ask) -> Budget:
    fixed = _fix(ask)
    demand = ask.demand or Demand(min(4096, ask.context))
    mean, longest = request_bytes(ask, min(demand.mean_tokens, ask.context)), request_bytes(ask, ask.context)
    long = request_bytes(ask, min(demand.long_tokens or ask.context, ask.context))
    usual = (1 - demand.long_share) * mean + demand.long_share * long

    def fitting(terms: Terms) -> int:
        """Requests that fit: of the usual mix, beside the room that one long request takes more."""
        pool = terms.kv_cache
        if _refusal(ask, terms, longest) is not None:
            return 0
        most = most_requests(ask, pool)
        held = int(pool // usual) if pool < longest else max(1, int((pool - max(0.0, long - usual)) // usual))
        return held if most is None else min(held, most)

    terms, batch = _fill(ask, fixed, fitting, _LIKELY)
    worst, best = (_fill(ask, fixed, fitting, guess)[1] for guess in (_WORST, _BEST))
    budget, _ = ask.account.sizes(ask)
    bound_by, reason = _bind(ask, terms, batch, longest, budget)
    return Budget(
        ask=ask,
        terms=terms,
        token_budget=budget,
        token_bytes=round(_growth(ask)),
        mean_bytes=round(mean),
        longest_bytes=round(longest),
        kv_tokens=pool_tokens(replace(ask, max_batch=max(1, batch)), terms.kv_cache),
        max_batch=batch * ask.copies,
        max_batch_range=(min(worst, batch) * ask.copies, max(best, batch) * ask.copies),
        fits=batch > 0,
        bound_by=bound_by,
        reason=reason,
        notes=_notes(ask, terms),
    )


def _fill(ask: Ask, fixed: _Fixed, fitting: Callable[[Terms], int], guess: _Guess) -> tuple[Terms, int]:
    """The terms and the requests that fit, where both agree: a larger batch needs a larger workspace."""
    if ask.max_batch is not None:
        terms = ask.account.terms(ask, fixed, guess)
        return terms, min(ask.max_batch, fitting(terms))
    low, high = 0, min(_LARGEST_BATCH, ask.account.sizes(ask)[0])
    while low < high:
        middle = (low + high + 1) // 2
        if fitting(ask.account.terms(replace(ask, max_batch=middle), fixed, guess)) >= middle:
            low = middle
        else:
            high = middle - 1
    return ask.account.terms(replace(ask, max_batch=max(1, low)), fixed, guess), low


_LARGEST_BATCH: Final = 65_536


def _refusal(ask: Ask, terms: Terms, longest: float) -> tuple[str, str] | None:
    """(the term that binds, why) where the engine does not start, or holds nothing; None where it starts."""
    usable = ask.card_bytes - terms.elsewhere
    if terms.weights > usable:
        return "weights", f"the weights need {_gib(terms.weights)} on each card and {_gib(usable)} are there"
    if terms.elsewhere and terms.reserve < 0:
        most = 1 - (terms.elsewhere + DRIVER_BYTES) / ask.card_bytes
        return "elsewhere", (
            f"other processes hold {_gib(terms.elsewhere)}, so that the engine's share of the card is not free; "
            f"end them, or lower the share below {math.floor(most * 100) / 100:g}"
        )
    if terms.kv_cache <= 0:
        buffers = terms.workspace + terms.communication
        return "weights" if terms.weights > buffers else "workspace", (
            f"weights ({_gib(terms.weights)}) and buffers ({_gib(buffers)}) are {_gib(-terms.kv_cache)} more than the "
            "engine may take of each card; nothing is left for the KV cache"
        )
    if (spare := terms.reserve - DRIVER_BYTES) < 0:
        return "workspace", (
            f"what the engine may take leaves {_gib(-spare)} too little of each card for graphs and the work of a step "
            f"({_gib(terms.graphs + terms.workspace)}): it runs out of memory while it warms up, or later; lower the "
            "share, or the tokens of a step"
        )
    if terms.kv_cache < longest and ask.account.refuses_long:
        return "kv_cache", (
            f"one request of {ask.context:,} tokens needs {_gib(longest)} of KV cache on each card and "
            f"{_gib(terms.kv_cache)} are left, enough for {longest_context(ask, terms.kv_cache):,} tokens"
        )
    return None


def _bind(ask: Ask, terms: Terms, batch: int, longest: float, budget: int) -> tuple[str, str]:
    """(the term that binds, why)."""
    refusal = _refusal(ask, terms, longest)
    if refusal is not None:
        return refusal
    each = " of each copy" if ask.copies > 1 else ""
    if ask.max_batch is not None and batch >= ask.max_batch:
        return "asked", f"the {ask.max_batch} requests{each} that were asked for fit"
    if batch >= budget and not ask.account.offloads:
        return "token_budget", f"a step takes {budget:,} tokens, so no more requests can get one each"
    held = f"hold {batch} requests{each} at once" if batch else "hold no request"
    asked = f", not the {ask.max_batch} that were asked for" if ask.max_batch is not None else ""
    return "kv_cache", f"{_gib(terms.kv_cache)} of KV cache on each card {held}{asked}"


def longest_context(ask: Ask, pool_bytes: int) -> int:
    """The longest request, in tokens, that a KV cache of so many bytes on each card holds; 0 where none fits."""
    low, high = 0, ask.context
    while low < high:
        middle = (low + high + 1) // 2
        if request_bytes(ask, middle) <= pool_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _steps(found: Budget) -> tuple[Step, ...]:
    """The retreat, in its order: quantisation, then context, then concurrency."""
    ask, model = found.ask, found.ask.model
    steps = []

    def step(kind: str, change: str, tried: Ask, price: str) -> None:
        after = _answer(tried)
        steps.append(Step(kind, change, after.max_batch or None, price))

    # What a step buys is how many requests fit after it, and not whether those that were asked for still do.
    free = replace(ask, max_batch=None)

    bits = 8 * found.terms.weights / max(1, model.on_card(ask.split, mtp_layers=ask.mtp_layers).total)
    narrower = next((narrow for above, narrow in ((10.0, 8.0), (6.0, 4.25)) if bits > above), None)
    if narrower is not None and not ask.account.offloads:
        tried = replace(free, model=replace(model, quantization=UniformBits(narrower, 16.0)), weights_bytes=None)
        price = "needs weights in that format, and answers may change: probe their quality"
        step("quantization", f"weights in {narrower:g} bits", tried, price)
    if ask.kv_bits > _NARROW_KV_BITS:
        tried = replace(free, kv_bits=8.0)
        step("quantization", "KV cache in 8 bits", tried, "answers over long contexts may change: probe their quality")
    shorter = ask.context // 2
    if not found.fits and 0 < (most := longest_context(ask, found.terms.kv_cache)) < shorter:
        shorter = most // 256 * 256 or most
    if shorter:
        demand = ask.demand
        if demand is not None:
            long = None if demand.long_tokens is None else max(1, min(demand.long_tokens, shorter))
            demand = replace(demand, mean_tokens=min(demand.mean_tokens, shorter), long_tokens=long)
        step(
            "context",
            f"a context of {shorter:,} tokens",
            replace(free, context_tokens=shorter, demand=demand),
            "longer requests are refused",
        )
    if found.max_batch > ask.copies:
        half = max(1, found.max_batch // ask.copies // 2)
        after = _answer(replace(ask, max_batch=half))
        held = after.kv_tokens // half
        room = f"{held:,} tokens on average" if held < ask.context else "as many tokens as the context allows"
        price = f"fewer requests at once, each of which may hold {room}"
        steps.append(Step("concurrency", f"a batch of {half * ask.copies}", half * ask.copies, price))
    elif not found.fits and not ask.account.offloads:
        step("concurrency", "a batch of 1", replace(ask, max_batch=1), "one request at a time")
    return tuple(steps)


_NARROW_KV_BITS: Final = 8.5


def _notes(ask: Ask, terms: Terms) -> tuple[str, ...]:
    notes = []
    model = ask.model
    if ask.demand is None:
        notes.append(f"no mean length was given: {min(4096, ask.context):,} tokens a request are assumed")
    if model.not_counted:
        notes.append(f"not counted, for want of a known shape: {', '.join(model.not_counted)}")
    if _is_hybrid(ask):
        notes.append(
            "layers differ in what they keep of a request: a number of tokens of KV cache is that of requests of full "
            "context, and no cost of a token"
        )
    heads = {layer.mixer.kv_heads for layer in model.layers if isinstance(layer.mixer, Attention)}
    if heads and ask.split.tensor > min(heads):
        notes.append(
            f"{min(heads)} key-value heads over {ask.split.tensor} cards: copies of them take the rest, and the KV "
            "cache of a card gets no smaller than with one head on each"
        )
    asked_for = getattr(model.quantization, "kv_cache_dtype", None)
    if asked_for is not None and not ask.account.offloads:
        notes.append(
            f"the checkpoint asks for a KV cache in {asked_for}; it is counted in {ask.kv_bits:g} bits an element"
        )
    if ask.is_offloaded:
        notes.append(
            f"{_gib(terms.host_weights)} of weights stay in main memory: that is a way to start at all, and no tuning "
            "result; every step waits for them"
        )
    if terms.elsewhere > _NOTABLE_BYTES:
        notes.append(f"other processes hold {_gib(terms.elsewhere)} of the card")
    return tuple(notes)


_NOTABLE_BYTES: Final = 256 * _MIB


def _gib(count: float) -> str:
    return f"{count / _GIB:.2f} GiB"


# ---- engines


@dataclass(frozen=True, slots=True)
class _Account:
    """How one engine divides a card.

    Attributes:
        release: the newest that is known.
        terms: the card's memory.
        request: bytes that a request of a length holds.
        tokens: tokens that a pool of so many bytes holds.
        sizes: (tokens of a step, requests at once) in effect.
        share: of the memory that it takes.
        weigh: (bytes of weights on the fullest card, bytes in main memory).
        most: requests at once to which it cuts the batch by a pool of a size; None where it does not.
        deal: the numbers of the layers on each card of a copy.
        offloads: weights may stay in main memory, and the context may be stretched.
        refuses_long: does not start where one request of full context does not fit.
        plans_batch: keeps memory for as many requests at once as are allowed, used or not.
    """

    release: str
    terms: Callable[[Ask, _Fixed, _Guess], Terms]
    request: Callable[[Ask, int], float]
    tokens: Callable[[Ask, int], int]
    sizes: Callable[[Ask], tuple[int, int]]
    weigh: Callable[[Ask], tuple[int, int]]
    share: Callable[[Ask], float]
    most: Callable[[Ask, int], int | None] | None = None
    deal: Callable[[Ask], Sequence[Sequence[int]]] = _staged
    offloads: bool = False
    refuses_long: bool = False
    plans_batch: bool = False


_ACCOUNTS: Final[Mapping[str, _Account]] = MappingProxyType(
    {
        "vllm": _Account(
            "0.33.0",
            _vllm_terms,
            _paged_request,
            _paged_tokens,
            _vllm_sizes,
            _vllm_weights,
            _vllm_share,
            refuses_long=True,
            plans_batch=True,
        ),
        "sglang": _Account(
            "0.5.23",
            _sglang_terms,
            _pooled_request,
            _pooled_tokens,
            _sglang_sizes,
            _torch_weights,
            _sglang_fraction,
            most=_pooled_most,
        ),
        "llamacpp": _Account(
            "b11434",
            _llamacpp_terms,
            _cells_request,
            _cells_tokens,
            _llamacpp_sizes,
            _ggml_weights,
            _llamacpp_share,
            deal=_dealt,
            offloads=True,
            refuses_long=True,
        ),
    }
)


def newest_release(engine: str) -> str:
    """The newest release of an engine whose accounting is known."""
    return _ACCOUNTS[engine].release
