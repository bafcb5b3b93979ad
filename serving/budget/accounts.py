"""How each engine divides a card: one account per engine, and nothing else here asks which engine it is.

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
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from serving.model import Attention, Layer, ModelShape, RecurrentState, Weights

if TYPE_CHECKING:
    from serving.budget.ask import Ask

__all__ = [
    "ACCOUNTS",
    "BEST",
    "DRIVER_BYTES",
    "FIT_MARGIN_BYTES",
    "LIKELY",
    "WORST",
    "Account",
    "Fixed",
    "Guess",
    "Terms",
    "activation_bytes",
    "as_launched",
    "card_terms",
    "fix",
    "growth_bytes",
    "is_hybrid",
    "memory_share",
    "most_requests",
    "newest_release",
    "pool_token_bytes",
    "pool_tokens",
    "request_bytes",
    "step_sizes",
]

_GIB: Final = 2**30
_MIB: Final = 2**20


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
class Guess:
    """The estimated constants, and how far they may be off: factors of what is likely."""

    communication: float = 1.0
    workspace: float = 1.0
    driver: float = 1.0


LIKELY: Final = Guess()
WORST: Final = Guess(communication=1.8, workspace=1.4, driver=1.5)
BEST: Final = Guess(communication=0.5, workspace=0.7, driver=0.7)

DRIVER_BYTES: Final = 450 * _MIB
"""What the driver keeps of the memory that NVML shows as total."""


# ---- what requests hold


def request_bytes(ask: "Ask", tokens: int) -> float:
    """Bytes of the KV cache that one request of this length holds on the fullest card, as the engine allots them."""
    return ask.account.request(ask, tokens)


def pool_tokens(ask: "Ask", pool_bytes: int) -> int:
    """Tokens that a KV cache of so many bytes on each card holds, as the engine counts them.

    Where layers differ in what they keep, no number of tokens is the whole truth; then the tokens of requests of full
    context are counted: how many of these fit, times their length.
    """
    return ask.account.tokens(ask, pool_bytes)


def pool_token_bytes(ask: "Ask") -> float:
    """What a token of the KV cache costs on the fullest card.

    Where layers differ in what they keep, it is its share of a request of full context, as engines lay that out.
    """
    return request_bytes(ask, ask.context) / ask.context if is_hybrid(ask) else growth_bytes(ask)


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _stages(ask: "Ask") -> list[list[Layer]]:
    """The layers of each card of a copy; those that stay in main memory, and their part of the cache, are in none."""
    stages = [[ask.model.layers[number] for number in stage] for stage in ask.account.deal(ask)]
    stages[-1] += [layer for layers in ask.model.mtp[: ask.mtp_layers] for layer in layers]
    return stages


def _staged(ask: "Ask") -> Sequence[Sequence[int]]:
    return ask.model.stages(ask.split.pipeline)


def _dealt(ask: "Ask") -> Sequence[Sequence[int]]:
    """llama.cpp's layers by card: the last ones that it is told to load, the output matrix counting as one more.

    Source: b11434, `src/llama-model.cpp`.
    """
    layers = len(ask.model.layers)
    count = layers + 1 if ask.gpu_layers is None else min(ask.gpu_layers, layers + 1)
    cards: list[list[int]] = [[] for _ in range(ask.split.pipeline)]
    for turn, number in enumerate(range(layers + 1 - count, layers)):
        cards[turn * ask.split.pipeline // count].append(number)
    return cards


def growth_bytes(ask: "Ask") -> float:
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


def is_hybrid(ask: "Ask") -> bool:
    """Whether layers differ in what they keep of a request."""
    mixers = [layer.mixer for layer in ask.model.layers if layer.mixer is not None]
    kept = [mixer for mixer in mixers if not (isinstance(mixer, Attention) and mixer.shares_kv)]
    windows = {mixer.window for mixer in kept if mixer.token_bytes(16.0, 1)}
    return len(windows) > 1 or any(mixer.state_bytes(1, None) for mixer in mixers)


def _paged_request(ask: "Ask", tokens: int) -> float:
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


def _paged_tokens(ask: "Ask", pool_bytes: int) -> int:
    size = ask.block_tokens or 16
    if is_hybrid(ask):
        return max(0, int(pool_bytes / _paged_request(ask, ask.context) * ask.context))
    return max(0, int(pool_bytes // (_plain_rate(ask) * size))) * size


def _plain_rate(ask: "Ask") -> float:
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


def _pooled_rate(ask: "Ask") -> float:
    """SGLang: bytes of a token of the main pool, with the share that it takes along in the pool of windows."""
    tensor = ask.split.tensor
    most = 0.0
    for stage in _stages(ask):
        mixers = [layer.mixer for layer in stage if layer.mixer is not None]
        plain = sum(mixer.token_bytes(ask.kv_bits, tensor) for mixer in mixers if mixer.window is None)
        windowed = sum(mixer.token_bytes(ask.kv_bits, tensor) for mixer in mixers if mixer.window is not None)
        most = max(most, plain + (_WINDOW_SHARE if plain else 1.0) * windowed)
    return most


def _has_states(ask: "Ask") -> bool:
    return any(layer.mixer is not None and layer.mixer.state_bytes(1, None) for layer in ask.model.layers)


def _kept_states(ask: "Ask") -> float:
    """Bytes of the states that SGLang keeps for one request that may run."""
    return ask.model.state_bytes(ask.split) * (_STATES_KEPT if ask.prefix_cache else 1)


def _pooled_request(ask: "Ask", tokens: int) -> float:
    return _pooled_rate(ask) * tokens + _kept_states(ask)


def _pooled_tokens(ask: "Ask", pool_bytes: int) -> int:
    states = 0.0
    if _has_states(ask):
        states = pool_bytes * _STATE_RATIO / (1 + _STATE_RATIO)
        if ask.max_batch is not None:
            states = min(states, ask.max_batch * _kept_states(ask))
    return max(0, int((pool_bytes - states) / _pooled_rate(ask)))


def _pooled_most(ask: "Ask", pool_bytes: int) -> int | None:
    if not _has_states(ask):
        return None
    return max(0, int(pool_bytes * _STATE_RATIO / (1 + _STATE_RATIO) / _kept_states(ask)))


def most_requests(ask: "Ask", pool_bytes: int) -> int | None:
    """Requests at once to which an engine cuts the batch by its pool of states; None where it has no such limit."""
    return None if ask.account.most is None else ask.account.most(ask, pool_bytes)


def _cells_request(ask: "Ask", tokens: int) -> float:
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


def _cells_tokens(ask: "Ask", pool_bytes: int) -> int:
    full = _cells_request(ask, ask.context)
    return max(0, int(pool_bytes / full * ask.context)) if full else 0


# ---- what the rest takes


@dataclass(frozen=True, slots=True)
class Fixed:
    """What does not depend on how many requests run at once; worked out once.

    Attributes:
        weights: bytes on the fullest card.
        host_weights: bytes in main memory.
        activation: bytes of one token at the peak of a step, on one card.
    """

    weights: int
    host_weights: int
    activation: int


def fix(ask: "Ask") -> Fixed:
    """What of a card does not depend on how many requests run at once."""
    weights, host = ask.account.weigh(ask)
    return Fixed(weights, host, activation_bytes(ask))


def card_terms(ask: "Ask", *, weights_bytes: int | None = None) -> Terms:
    """The terms of a card that is started just so, whatever fits; `weights_bytes` are on it, where that is known."""
    fixed = fix(ask) if weights_bytes is None else Fixed(weights_bytes, 0, activation_bytes(ask))
    return ask.account.terms(ask, fixed, LIKELY)


def step_sizes(ask: "Ask") -> tuple[int, int]:
    """(tokens of a step, requests at once) of one copy, as given or by the engine's defaults.

    For SGLang the second is the largest batch with a graph, and for llama.cpp the first is the logical batch.
    """
    return ask.account.sizes(ask)


def as_launched(ask: "Ask") -> "Ask":
    """The same with the batch that the engine runs where none is asked for, if it plans its memory by that."""
    return replace(ask, max_batch=step_sizes(ask)[1]) if ask.account.plans_batch else ask


def memory_share(ask: "Ask") -> float:
    """The share of a card's memory that the engine takes, as given or by its default; each means its own by it."""
    return ask.account.share(ask)


def activation_bytes(ask: "Ask") -> int:
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


def _vllm_sizes(ask: "Ask") -> tuple[int, int]:
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


def _vllm_share(ask: "Ask") -> float:
    """`gpu_memory_utilization`."""
    return ask.utilization or (0.92 if ask.version >= _NEW_SHARE else 0.9)


def _vllm_terms(ask: "Ask", fixed: Fixed, guess: Guess) -> Terms:
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


def _graph_bytes(ask: "Ask", batch: int, layer_mib: float) -> int:
    """Captured graphs: a fixed part, and one for each layer and size of batch; up to 512 requests have one."""
    if not ask.graphs:
        return 0
    sizes = 3 + min(batch, 512) / 8
    return round(150 * _MIB + sizes * len(ask.model.layers) / ask.split.pipeline * layer_mib * _MIB)


def _torch_weights(ask: "Ask") -> tuple[int, int]:
    """(bytes of weights on the fullest card, none in main memory)."""
    if ask.weights_bytes is not None:
        return ask.weights_bytes, 0
    return ask.model.weight_bytes(ask.split, mtp_layers=ask.mtp_layers).total, 0


def _vllm_weights(ask: "Ask") -> tuple[int, int]:
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


def _sglang_sizes(ask: "Ask") -> tuple[int, int]:
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


def _sglang_fraction(ask: "Ask") -> float:
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


def _sglang_terms(ask: "Ask", fixed: Fixed, guess: Guess) -> Terms:
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


def _llamacpp_share(ask: "Ask") -> float:
    return ask.utilization or 1.0


def _llamacpp_sizes(ask: "Ask") -> tuple[int, int]:
    """(logical batch, slots)."""
    return ask.token_budget or 2048, ask.max_batch or 4


FIT_MARGIN_BYTES: Final = 1024 * _MIB
"""What llama.cpp leaves free on a card when it fits what it loads to it."""


def _llamacpp_terms(ask: "Ask", fixed: Fixed, guess: Guess) -> Terms:
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


def _ggml_weights(ask: "Ask") -> tuple[int, int]:
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


# ---- engines


@dataclass(frozen=True, slots=True)
class Account:
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
    terms: Callable[["Ask", Fixed, Guess], Terms]
    request: Callable[["Ask", int], float]
    tokens: Callable[["Ask", int], int]
    sizes: Callable[["Ask"], tuple[int, int]]
    weigh: Callable[["Ask"], tuple[int, int]]
    share: Callable[["Ask"], float]
    most: Callable[["Ask", int], int | None] | None = None
    deal: Callable[["Ask"], Sequence[Sequence[int]]] = _staged
    offloads: bool = False
    refuses_long: bool = False
    plans_batch: bool = False


ACCOUNTS: Final[Mapping[str, Account]] = MappingProxyType(
    {
        "vllm": Account(
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
        "sglang": Account(
            "0.5.23",
            _sglang_terms,
            _pooled_request,
            _pooled_tokens,
            _sglang_sizes,
            _torch_weights,
            _sglang_fraction,
            most=_pooled_most,
        ),
        "llamacpp": Account(
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
    return ACCOUNTS[engine].release
