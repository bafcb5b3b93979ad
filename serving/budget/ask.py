"""What is to be budgeted: a model, cards, an engine and its settings, and what requests look like."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from serving.budget.accounts import ACCOUNTS, Account
from serving.errors import ConfigError
from serving.model import ModelShape, Split
from serving.settings import Settings

__all__ = ["KV_BITS", "Ask", "Demand", "ask_for", "cache_bits", "cache_kind", "kv_bits"]

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
        if self.engine not in ACCOUNTS:
            raise ConfigError(f"engine {self.engine!r} is not known; known: {', '.join(ACCOUNTS)}")
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
    def account(self) -> Account:
        """How the engine divides a card."""
        return ACCOUNTS[self.engine]

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
    account = ACCOUNTS[engine]
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
    both, offloads = settings.kv_cache_dtype, ACCOUNTS[engine].offloads
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
    offloads = ACCOUNTS[engine].offloads
    if bits == KV_BITS["auto"]:
        return "f16" if offloads else "bfloat16"
    others = _TORCH_KINDS if offloads else _GGML_KINDS
    kinds = [kind for kind, width in KV_BITS.items() if kind not in others and width == bits]
    if not kinds:
        raise ConfigError(f"{engine} has no type of KV cache with {bits:g} bits an element; name one of its types")
    return kinds[0]


_TORCH_KINDS: Final = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "int8"})
_GGML_KINDS: Final = frozenset({"f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"})
