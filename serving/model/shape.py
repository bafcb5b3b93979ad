"""The shape of a language model, layer by layer, and the sizes that follow from it.

A model is a sequence of layers. Each has a mixer, which lets tokens see earlier ones, and a feed-forward part, which
does not; either may be missing. A mixer says what a sequence leaves behind in it (keys and values for each token, a
latent, or a state of constant size), and both say which weight modules they have. Everything else is arithmetic.

Weights are kept apart by kind (`Weights`), because engines treat the kinds differently: they divide them differently
over cards, a step reads some of them only in part, and quantisation often leaves some alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, Protocol, TypeAlias

from serving.errors import ConfigError

__all__ = [
    "Attention",
    "Dense",
    "Experts",
    "Indexer",
    "LatentAttention",
    "Layer",
    "ModelShape",
    "Module",
    "RecurrentState",
    "Split",
    "StoredBits",
    "UniformBits",
    "WeightKind",
    "Weights",
]

WeightKind: TypeAlias = Literal["embedding", "head", "query", "key_value", "dense", "router", "experts", "other"]
"""What a weight module is for, as in `Weights`."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is divided over cards.

    Attributes:
        tensor: cards that share each layer. Key and value heads divide until one is left per card, then replicate.
        pipeline: stages of consecutive layers.
        expert: cards over which whole experts are spread; 1 leaves experts to the tensor split. It divides nothing but
            experts.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tensor", self.tensor), ("pipeline", self.pipeline), ("expert", self.expert)):
            if value < 1:
                raise ConfigError(f"{name}-parallel size is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Weights:
    """An amount of weights by kind: numbers of parameters, or bytes.

    Attributes:
        embedding: input embedding, divided by rows of the vocabulary; of each token only one row is read.
        head: output matrix where it is not the embedding itself, divided likewise.
        query: what divides by heads: query and output projections, gates, the projections of recurrent layers, and
            those that expand a latent.
        key_value: key and value projections, divided by key-value heads until one is left per card; the projections
            down to a latent and those of an indexer, which are not divided.
        dense: feed-forward parts without experts, and shared experts.
        router: the matrices that choose experts; not divided.
        experts: routed experts.
        other: norms, biases and the like; not divided.
    """

    embedding: int = 0
    head: int = 0
    query: int = 0
    key_value: int = 0
    dense: int = 0
    router: int = 0
    experts: int = 0
    other: int = 0

    def __add__(self, more: "Weights") -> "Weights":
        return Weights(*(getattr(self, kind) + getattr(more, kind) for kind in _KINDS))

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.always_read + self.experts

    @property
    def always_read(self) -> int:
        """Those of the layers that every step reads, whatever its tokens are."""
        return self.query + self.key_value + self.dense + self.router + self.other


_KINDS: Final = tuple(item.name for item in fields(Weights))


class StoredBits(Protocol):
    """How wide weights are stored; `quantization.Quantization` is one."""

    @property
    def method(self) -> str:
        """What to call it."""

    @property
    def activation_bits(self) -> int | None:
        """Bits of the activations that most weights are multiplied with; None where they are not quantised."""

    def bits(self, module: str, columns: int | None = None) -> float:
        """Bits of one weight of a module as stored, with its share of scales.

        Args:
            module: as published files name it, as in `model.layers.3.mlp.experts.0.gate_proj`.
            columns: inputs of the matrix, where a scale for each row is to be counted.
        """


@dataclass(frozen=True, slots=True)
class UniformBits:
    """The same width for all weights, but for the embedding and the output matrix.

    Attributes:
        layers: bits of a weight of the layers.
        ends: bits of a weight of the embedding and of the output matrix.
    """

    layers: float = 16.0
    ends: float = 16.0

    @property
    def method(self) -> str:
        """What to call it."""
        return f"{self.layers:g} bits"

    @property
    def activation_bits(self) -> int | None:
        """8 for weights of exactly 8 bits, which are multiplied in fp8; narrower ones are widened first."""
        return 8 if self.layers == 8 else None

    def bits(self, module: str, columns: int | None = None) -> float:
        """As in `StoredBits`."""
        del columns
        return self.layers if ".layers." in module else self.ends


@dataclass(frozen=True, slots=True)
class Module:
    """A weight matrix of a layer, or as many alike as there are experts.

    Attributes:
        name: within its layer, as published files name it, as in `self_attn.q_proj`; for experts that of the first.
        kind: what it is for. Those of kind `other`, and those whose name ends in `bias`, always have 16 bits.
        parameters: in one copy.
        copies: how many there are.
        most_cards: cards that it divides over at most; more hold copies. None is without limit.
    """

    name: str
    kind: WeightKind
    parameters: int
    copies: int = 1
    most_cards: int | None = None

    def on_card(self, split: Split) -> int:
        """Parameters that one card holds of it."""
        if self.kind == "experts":
            cards = max(split.tensor, split.expert)
        else:
            cards = min(split.tensor, self.most_cards or split.tensor)
        return -(-self.parameters * self.copies // cards)


def _whole(name: str, kind: WeightKind, parameters: int) -> Module:
    return Module(name, kind, parameters, most_cards=1)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with its own heads of keys and values, some of which several query heads may share.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a query and key head.
        value_dim: width of a value head; None is as `head_dim`.
        window: latest tokens that it sees; None is all. Older ones need no cache.
        chunked: it sees only tokens of its own stretch of `window` tokens, rather than the latest.
        shares_kv: it reads the keys and values of an earlier layer, and has none of its own.
        output_gate: the query projection is twice as wide, for a gate on the output.
        value_is_key: values are computed by the key projection. The cache holds both.
        other: norms, biases and the like.
        name: of the module in its layer.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    chunked: bool = False
    shares_kv: bool = False
    output_gate: bool = False
    value_is_key: bool = False
    other: int = 0
    name: str = "self_attn"

    @property
    def value_head_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def modules(self, hidden: int) -> Iterator[Module]:
        """Weight modules, in a model of this width."""
        gates = 2 if self.output_gate else 1
        yield Module(f"{self.name}.q_proj", "query", gates * hidden * self.heads * self.head_dim)
        if not self.shares_kv:
            yield Module(
                f"{self.name}.k_proj", "key_value", hidden * self.kv_heads * self.head_dim, most_cards=self.kv_heads
            )
            if not self.value_is_key:
                size = hidden * self.kv_heads * self.value_head_dim
                yield Module(f"{self.name}.v_proj", "key_value", size, most_cards=self.kv_heads)
        yield Module(f"{self.name}.o_proj", "query", hidden * self.heads * self.value_head_dim)
        yield _whole(f"{self.name}.norm", "other", self.other)

    def check_tensor(self, model: str, cards: int) -> None:
        """Raise if `cards` cannot share it."""
        if self.heads % cards:
            raise ConfigError(
                f"{model} has {self.heads} attention heads, which {cards} cards cannot share evenly; "
                "set a tensor-parallel size that divides them"
            )
        if self.kv_heads % cards and cards % self.kv_heads:
            raise ConfigError(
                f"{model} has {self.kv_heads} key-value heads; a tensor-parallel size of {cards} neither "
                "divides them nor is a multiple of them"
            )

    def token_bytes(self, kv_bits: float, cards: int) -> float:
        """Bytes of one token in the cache of one of `cards` cards that share the layer."""
        if self.shares_kv:
            return 0.0
        return -(-self.kv_heads // cards) * (self.head_dim + self.value_head_dim) * kv_bits / 8

    def state_bytes(self, cards: int, state_bits: float | None) -> float:
        """Bytes of a sequence whatever its length, on one of `cards` cards: none."""
        del cards, state_bits
        return 0.0

    @property
    def prefill_products(self) -> int:
        """Multiplications for each pair of a prompt's token and one that it sees."""
        return self.heads * (self.head_dim + self.value_head_dim)

    @property
    def decode_products(self) -> int:
        """Multiplications for each pair of a decoded token and one that it sees."""
        return self.prefill_products

    @property
    def activations(self) -> int:
        """Elements of one token between the projections, over all cards."""
        return (self.heads + self.kv_heads) * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True, slots=True)
class Indexer:
    """What chooses the tokens that latent attention looks at, with a cache of keys of its own (DeepSeek V3.2).

    Attributes:
        heads: its heads.
        head_dim: width of its one key and of each of its queries.
    """

    heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in its cache: 8 bits for each element, and a scale of 32 bits for every 128 of them.

        Source: vLLM 0.32, `model_executor/models/deepseek_v2.py`.
        """
        return self.head_dim + -(-self.head_dim // 128) * 4


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: the cache holds one latent per token, of which each card needs all (DeepSeek-V2).

    Attributes:
        heads: query heads.
        latent: width of the latent of keys and values (`kv_lora_rank`).
        rope_dim: width of the part of a key that carries the position, which all heads share.
        nope_dim: width of the rest of a key head.
        value_dim: width of a value head.
        query_latent: width of the latent of queries; None where they are projected at once.
        indexer: what chooses the tokens to look at; None where all are looked at.
        other: norms, biases and the like.
        name: of the module in its layer.
    """

    heads: int
    latent: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_latent: int | None = None
    indexer: Indexer | None = None
    other: int = 0
    name: str = "self_attn"

    @property
    def window(self) -> None:
        """Latest tokens that it sees: all."""
        return None

    def modules(self, hidden: int) -> Iterator[Module]:
        """Weight modules, in a model of this width."""
        query = self.heads * (self.nope_dim + self.rope_dim)
        if self.query_latent is None:
            yield Module(f"{self.name}.q_proj", "query", hidden * query)
        else:
            yield _whole(f"{self.name}.q_a_proj", "key_value", hidden * self.query_latent)
            yield Module(f"{self.name}.q_b_proj", "query", self.query_latent * query)
        yield _whole(f"{self.name}.kv_a_proj_with_mqa", "key_value", hidden * (self.latent + self.rope_dim))
        yield Module(f"{self.name}.kv_b_proj", "query", self.latent * self.heads * (self.nope_dim + self.value_dim))
        yield Module(f"{self.name}.o_proj", "query", hidden * self.heads * self.value_dim)
        if self.indexer is not None:
            heads, width = self.indexer.heads, self.indexer.head_dim
            yield _whole(f"{self.name}.indexer.wq_b", "key_value", (self.query_latent or hidden) * heads * width)
            yield _whole(f"{self.name}.indexer.wk", "key_value", hidden * width)
            yield _whole(f"{self.name}.indexer.weights_proj", "key_value", hidden * heads)
        yield _whole(f"{self.name}.norm", "other", self.other)

    def check_tensor(self, model: str, cards: int) -> None:
        """Raise if `cards` cannot share it."""
        if self.heads % cards:
            raise ConfigError(
                f"{model} has {self.heads} attention heads, which {cards} cards cannot share evenly; "
                "set a tensor-parallel size that divides them"
            )

    def token_bytes(self, kv_bits: float, cards: int) -> float:
        """Bytes of one token in the cache of each card.

        With an indexer a cache of 8 bits keeps the part with the position in 16 bits, and a scale of 32 bits for every
        128 elements of the latent; without one all elements are alike. Source: vLLM 0.32, `flashmla_sparse.py`.
        """
        del cards
        if self.indexer is None:
            return (self.latent + self.rope_dim) * kv_bits / 8
        scales = -(-self.latent // 128) * 4 if kv_bits < 16 else 0
        return self.latent * kv_bits / 8 + self.rope_dim * 2 + scales + self.indexer.token_bytes

    def state_bytes(self, cards: int, state_bits: float | None) -> float:
        """Bytes of a sequence whatever its length, on one of `cards` cards: none."""
        del cards, state_bits
        return 0.0

    @property
    def prefill_products(self) -> int:
        """Multiplications for each pair of a prompt's token and one that it sees, the latent being expanded first."""
        return self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def decode_products(self) -> int:
        """Multiplications for each pair of a decoded token and one that it sees: all heads read the latent itself."""
        return self.heads * (2 * self.latent + self.rope_dim)

    @property
    def activations(self) -> int:
        """Elements of one token between the projections, over all cards."""
        return self.heads * (2 * self.nope_dim + 2 * self.rope_dim + 2 * self.value_dim)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A mixer that keeps a state of constant size for each sequence instead of its tokens: Mamba, delta nets.

    Attributes:
        heads: heads of the state, divided among cards.
        head_elements: elements of the state of one head.
        channels: channels of the short convolution that divide with the heads.
        groups: groups of further channels, each of which some heads share; where there are fewer than cards, each card
            has one. 0 where there are none.
        group_channels: channels of the convolution in one group.
        past_tokens: inputs that the convolution remembers.
        projections: its weight modules.
        state_bits: bits of an element of the state; None is as wide as the convolution's.
        conv_bits: bits of an element that the convolution remembers.
    """

    heads: int
    head_elements: int
    channels: int
    past_tokens: int
    projections: tuple[Module, ...]
    groups: int = 0
    group_channels: int = 0
    state_bits: float | None = None
    conv_bits: float = 16.0

    @property
    def window(self) -> None:
        """Latest tokens that it sees: all."""
        return None

    def modules(self, hidden: int) -> Iterator[Module]:
        """Weight modules, in a model of this width."""
        del hidden
        yield from self.projections

    def check_tensor(self, model: str, cards: int) -> None:
        """Raise if `cards` cannot share it."""
        if self.heads % cards:
            raise ConfigError(
                f"{model} has {self.heads} heads in its recurrent layers, which {cards} cards cannot share evenly; "
                "set a tensor-parallel size that divides them"
            )
        if self.groups > 1 and self.groups % cards:
            raise ConfigError(
                f"{model} has {self.groups} groups in its recurrent layers, which {cards} cards cannot share evenly; "
                "set a tensor-parallel size that divides them"
            )

    def token_bytes(self, kv_bits: float, cards: int) -> float:
        """Bytes of one token: none."""
        del kv_bits, cards
        return 0.0

    def state_bytes(self, cards: int, state_bits: float | None) -> float:
        """Bytes of a sequence whatever its length, on one of `cards` cards.

        Args:
            cards: that share the layer.
            state_bits: bits of an element of the state, in place of the model's own.
        """
        channels = -(-self.channels // cards) + -(-self.groups // cards) * self.group_channels
        state = -(-self.heads // cards) * self.head_elements
        width = state_bits or self.state_bits or self.conv_bits
        return (channels * self.past_tokens * self.conv_bits + state * width) / 8

    @property
    def prefill_products(self) -> int:
        """Multiplications for each pair of tokens: none."""
        return 0

    @property
    def decode_products(self) -> int:
        """Multiplications for each pair of tokens: none."""
        return 0

    @property
    def activations(self) -> int:
        """Elements of one token between the projections, over all cards.

        Kernels that work through a prompt in chunks keep several copies beside the states of chunks: set by the peak
        that vLLM 0.11 showed with 64,000 tokens of Kimi-Linear.
        """
        return 8 * (self.channels + self.groups * self.group_channels)


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward part that is the same for all tokens.

    Attributes:
        width: of its hidden layer.
        gated: it has a gate besides its way up and its way down.
        other: biases.
        name: of the module in its layer.
    """

    width: int
    gated: bool = True
    other: int = 0
    name: str = "mlp"

    def modules(self, hidden: int) -> Iterator[Module]:
        """Weight modules, in a model of this width."""
        if self.gated:
            yield Module(f"{self.name}.gate_proj", "dense", hidden * self.width)
        yield Module(f"{self.name}.up_proj", "dense", hidden * self.width)
        yield Module(f"{self.name}.down_proj", "dense", hidden * self.width)
        yield _whole(f"{self.name}.bias", "other", self.other)

    def activations(self, hidden: int, cards: int) -> int:
        """Elements of one token in it on one of `cards` cards."""
        del hidden
        return 3 * self.width // cards


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward part of which each token passes through some experts, and through the shared part.

    Attributes:
        count: routed experts.
        per_token: routed experts that each token passes through.
        width: of the hidden layer of one of them.
        shared_width: of the hidden layers of all shared experts together; 0 is none.
        gated: they have gates besides their ways up and down.
        latent: width that the routed experts work in, where it is not the model's.
        bias: parameters of the biases of one expert.
        other: further parameters: biases of the router, the shared expert's gate.
        name: of the module in its layer.
        router: name of the router in it.
        shared: name of the shared part in it; the routed ones are `experts`.
        projections: names of a routed expert's gate, way up and way down.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    gated: bool = True
    latent: int | None = None
    bias: int = 0
    other: int = 0
    name: str = "mlp"
    router: str = "gate"
    shared: str = "shared_experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def modules(self, hidden: int) -> Iterator[Module]:
        """Weight modules, in a model of this width."""
        yield _whole(f"{self.name}.{self.router}", "router", hidden * self.count)
        gate, *others = self.projections
        for name in (gate, *others) if self.gated else others:
            size = (self.latent or hidden) * self.width
            yield Module(f"{self.name}.experts.0.{name}", "experts", size, self.count)
        if self.bias:
            yield Module(f"{self.name}.experts.bias", "experts", self.bias, self.count)
        if self.latent is not None:
            for name in ("fc1_latent_proj", "fc2_latent_proj"):
                yield _whole(f"{self.name}.{name}", "dense", hidden * self.latent)
        if self.shared_width:
            shared = Dense(self.shared_width, self.gated, name=f"{self.name}.{self.shared}")
            yield from shared.modules(hidden)
        yield _whole(f"{self.name}.norm", "other", self.other)

    def activations(self, hidden: int, cards: int) -> int:
        """Elements of one token in it on one of `cards` cards."""
        return max(3 * self.shared_width // cards, self.per_token * (3 * self.width // cards + hidden))


Mixer: TypeAlias = Attention | LatentAttention | RecurrentState


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        mixer: lets tokens see earlier ones; None in a layer that is a feed-forward part only.
        feed_forward: None in a layer that is a mixer only.
        norms: parameters of its norms.
        extra: further weight modules.
    """

    mixer: Mixer | None
    feed_forward: Dense | Experts | None
    norms: int = 0
    extra: tuple[Module, ...] = ()

    def modules(self, hidden: int) -> Iterator[Module]:
        """Weight modules, in a model of this width."""
        yield from self.extra
        if self.mixer is not None:
            yield from self.mixer.modules(hidden)
        if self.feed_forward is not None:
            yield from self.feed_forward.modules(hidden)
        yield _whole("norm", "other", self.norms)

    @property
    def experts(self) -> Experts | None:
        """Its feed-forward part where that has experts."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder-only language model.

    Attributes:
        name: what to call it.
        hidden: width of the residual stream.
        vocabulary: tokens of the vocabulary.
        context_tokens: longest sequence that the model claims.
        layers: its layers in order; layers alike may be the same object. Those for multi-token prediction are not here.
        mtp: modules for multi-token prediction, each a few layers, loaded only when they are used.
        architecture: the class that engines load it with, as their logs name it.
        tied_embeddings: the output matrix is the input embedding.
        other: parameters outside the layers besides embedding and output matrix: the last norm, a bias of the output.
        quantization: how wide its weights are stored.
        prefix: what precedes `layers.0` in the names of its weight modules, as in `model.`.
        head_name: name of the output matrix.
        not_counted: parts of the model that no figure here includes, by their keys in the configuration.
    """

    name: str
    hidden: int
    vocabulary: int
    context_tokens: int
    layers: tuple[Layer, ...]
    mtp: tuple[tuple[Layer, ...], ...] = ()
    architecture: str = ""
    tied_embeddings: bool = False
    other: int = 0
    quantization: StoredBits = UniformBits()
    prefix: str = "model."
    head_name: str = "lm_head"
    not_counted: tuple[str, ...] = ()

    # ---- parameters

    @property
    def parameters(self) -> Weights:
        """All parameters without those for multi-token prediction."""
        return _parameters(self._stage_modules(0, Split(), 0), Split())

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """All weight modules with their full names, those for multi-token prediction last."""
        for prefix, module in self._stage_modules(0, Split(), len(self.mtp)):
            yield prefix + module.name, module

    @property
    def total_parameters(self) -> int:
        """Parameters of the model without those for multi-token prediction."""
        return self.parameters.total

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: both the input embedding and the output matrix are counted.

        Publishers differ in whether they count the embedding; `active_without_embedding` leaves it out.
        """
        used = 0
        for layer in self.layers:
            if experts := layer.experts:
                routed = sum(part.parameters for part in experts.modules(self.hidden) if part.kind == "experts")
                used += routed * experts.per_token
        parameters = self.parameters
        return parameters.total - parameters.experts + used

    @property
    def active_without_embedding(self) -> int:
        """As `active_parameters`, but the input embedding counts only where it is the output matrix too."""
        return self.active_parameters - (0 if self.tied_embeddings else self.vocabulary * self.hidden)

    @property
    def mtp_parameters(self) -> int:
        """Parameters of the modules for multi-token prediction, whose embedding and output matrix are the model's."""
        modules = (part for layers in self.mtp for layer in layers for part in layer.modules(self.hidden))
        return sum(part.parameters * part.copies for part in modules)

    @property
    def expert_layers(self) -> int:
        """Layers with experts, those for multi-token prediction not counted."""
        return sum(1 for layer in self.layers if layer.experts)

    @property
    def experts(self) -> int:
        """Routed experts of a layer that has most of them; 0 for a dense model."""
        return max((layer.experts.count for layer in self.layers if layer.experts), default=0)

    @property
    def experts_per_token(self) -> int:
        """Routed experts that a token passes through, in a layer where these are most."""
        return max((layer.experts.per_token for layer in self.layers if layer.experts), default=0)

    # ---- division over cards

    def check_split(self, split: Split) -> None:
        """Whether the model can be divided like that.

        Raises:
            ConfigError: heads, layers or experts do not divide.
        """
        for mixer in {layer.mixer for layer in self.layers if layer.mixer is not None}:
            mixer.check_tensor(self.name, split.tensor)
        if split.pipeline > len(self.layers):
            raise ConfigError(f"{self.name} has {len(self.layers)} layers, fewer than {split.pipeline} pipeline stages")
        if split.expert > 1 and not self.experts:
            raise ConfigError(f"{self.name} has no experts to spread over {split.expert} cards")
        if split.expert > 1 and self.experts % split.expert:
            raise ConfigError(
                f"{self.name} has {self.experts} experts per layer, which {split.expert} cards cannot share evenly"
            )

    def stages(self, pipeline: int) -> tuple[range, ...]:
        """The layers of each pipeline stage, by their numbers.

        Layers that do not divide evenly go to the stages before the last one, as the last has the output matrix.
        Source: vLLM 0.32, `distributed/utils.py`.
        """
        sizes = [len(self.layers) // pipeline] * pipeline
        for back in range(len(self.layers) % pipeline):
            sizes[-2 - back] += 1
        starts = [sum(sizes[:stage]) for stage in range(pipeline)]
        return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))

    def on_card(self, split: Split, *, mtp_layers: int = 0) -> Weights:
        """Parameters on the card with most bytes of weights.

        Expert parallelism divides nothing but experts; where there are more tensor-parallel cards than expert-parallel
        ones, each expert is divided among the rest. The first stage has the embedding, the last one the output matrix
        and the modules for multi-token prediction.

        Raises:
            ConfigError: the model cannot be divided like that, or has fewer modules for multi-token prediction.
        """
        return _parameters(self._fullest(split, mtp_layers), split)

    def weight_bytes(self, split: Split | None = None, *, mtp_layers: int = 0) -> Weights:
        """Bytes of weights as stored, on the card with most of them; without a split, of the whole model.

        Raises:
            ConfigError: as `on_card`.
        """
        divided = split or Split()
        return self._bytes(self._fullest(divided, mtp_layers), divided)

    def _fullest(self, split: Split, mtp_layers: int) -> Iterable["_Part"]:
        """The weight modules of the stage with most bytes of weights."""
        self.check_split(split)
        self._check_mtp(mtp_layers)
        stages = [list(self._stage_modules(stage, split, mtp_layers)) for stage in range(split.pipeline)]
        return max(stages, key=lambda parts: self._bytes(parts, split).total) if split.pipeline > 1 else stages[0]

    def _stage_modules(self, stage: int, split: Split, mtp_layers: int) -> Iterator["_Part"]:
        """The weight modules of one stage, each with what precedes its name."""
        last = stage == split.pipeline - 1
        matrix = self.vocabulary * self.hidden
        if stage == 0:
            yield self.prefix, Module("embed_tokens", "embedding", matrix)
        if last:
            # A tied matrix is held twice where embedding and output are on different cards.
            if not self.tied_embeddings or stage > 0:
                yield "", Module(self.head_name, "head", matrix)
            yield self.prefix, _whole("norm", "other", self.other)
        layers = [(number, self.layers[number]) for number in self.stages(split.pipeline)[stage]]
        if last:
            further = (layer for layers in self.mtp[:mtp_layers] for layer in layers)
            layers += enumerate(further, len(self.layers))
        known: dict[int, tuple[Module, ...]] = {}
        for number, layer in layers:
            modules = known.get(id(layer)) or known.setdefault(id(layer), tuple(layer.modules(self.hidden)))
            prefix = f"{self.prefix}layers.{number}."
            for module in modules:
                yield prefix, module

    def _bytes(self, parts: Iterable["_Part"], split: Split) -> Weights:
        bits = self.quantization.bits
        totals = dict.fromkeys(_KINDS, 0.0)
        for prefix, module in parts:
            plain = module.kind == "other" or module.name.endswith("bias")
            totals[module.kind] += module.on_card(split) * (16.0 if plain else bits(prefix + module.name)) / 8
        return Weights(**{kind: round(total) for kind, total in totals.items()})

    def _check_mtp(self, mtp_layers: int) -> None:
        if mtp_layers > len(self.mtp):
            raise ConfigError(f"{self.name} has {len(self.mtp)} modules for multi-token prediction, not {mtp_layers}")

    def with_bits(self, layers: float, ends: float | None = None) -> "ModelShape":
        """The same model with weights of another width.

        Args:
            layers: bits of a weight of the layers, with its share of scales.
            ends: bits of a weight of the embedding and the output matrix; None leaves them as they are.
        """
        if ends is None:
            ends = self.quantization.bits(f"{self.prefix}embed_tokens")
        return replace(self, quantization=UniformBits(layers, ends))

    # ---- what sequences hold

    def kv_bytes_per_token(self, kv_bits: float = 16.0, split: Split | None = None, *, mtp_layers: int = 0) -> int:
        """Bytes by which a long sequence grows for each token, on the card where these are most.

        Layers that see a window, or that keep a state, do not grow.

        Args:
            kv_bits: bits of one element as stored, with its share of scales.
            split: how the model is divided; None is one card.
            mtp_layers: modules for multi-token prediction that are in use and have a cache of their own.
        """
        divided = split or Split()
        return self._most(
            divided,
            mtp_layers,
            lambda mixer: mixer.token_bytes(kv_bits, divided.tensor) if mixer.window is None else 0.0,
        )

    def sequence_bytes(
        self,
        tokens: int,
        kv_bits: float = 16.0,
        split: Split | None = None,
        *,
        mtp_layers: int = 0,
        state_bits: float | None = None,
        clip_windows: bool = True,
    ) -> int:
        """Bytes that a sequence of this length holds, on the card where these are most.

        Args:
            tokens: length of the sequence.
            kv_bits: bits of one element of the cache as stored, with its share of scales.
            split: how the model is divided; None is one card.
            mtp_layers: modules for multi-token prediction that are in use and have a cache of their own.
            state_bits: bits of an element of a recurrent state, in place of the model's own.
            clip_windows: layers that see a window hold no more than it; false is for engines that keep all tokens.
        """
        divided = split or Split()

        def held(mixer: Mixer) -> float:
            kept = tokens if mixer.window is None or not clip_windows else min(tokens, mixer.window)
            return mixer.token_bytes(kv_bits, divided.tensor) * kept + mixer.state_bytes(divided.tensor, state_bits)

        return self._most(divided, mtp_layers, held)

    def state_bytes(self, split: Split | None = None, *, state_bits: float | None = None) -> int:
        """Bytes that a sequence holds whatever its length, on the card where these are most."""
        divided = split or Split()
        return self._most(divided, 0, lambda mixer: mixer.state_bytes(divided.tensor, state_bits))

    def _most(self, split: Split, mtp_layers: int, amount: Callable[[Mixer], float]) -> int:
        """An amount summed over the mixers of each stage, of the stage where it is most."""
        self._check_mtp(mtp_layers)

        def summed(layers: Iterable[Layer]) -> float:
            return sum(amount(layer.mixer) for layer in layers if layer.mixer is not None)

        sums = [summed(self.layers[number] for number in stage) for stage in self.stages(split.pipeline)]
        sums[-1] += summed(layer for layers in self.mtp[:mtp_layers] for layer in layers)
        return round(max(sums))


_Part: TypeAlias = tuple[str, Module]


def _parameters(parts: Iterable[_Part], split: Split) -> Weights:
    totals = dict.fromkeys(_KINDS, 0)
    for _, module in parts:
        totals[module.kind] += module.on_card(split)
    return Weights(**totals)
