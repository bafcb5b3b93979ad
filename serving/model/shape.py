"""What is known of a language model from its `config.json`: its shape, and the sizes that follow from it.

Sizes are computed from the shape and never looked up, so that they hold for a model that nobody has listed. Parameters
are kept apart by how engines divide them over cards (`Parameters`), because that decides which of them each card holds
(`ModelShape.on_card`) and which of them a step reads. An architecture that is not known is refused and never guessed.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from serving.errors import ConfigError

__all__ = ["BUILT_IN_MODELS", "ModelShape", "Parameters", "Split", "read_model"]

_MAX_BYTES = 2**20


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
class Parameters:
    """Numbers of parameters, by how they are divided over cards.

    Attributes:
        embedding: input embedding, divided by rows of the vocabulary; of each token only one row is read.
        head: output matrix where it is not the embedding itself, divided likewise.
        query: query and output projections, divided by heads.
        key_value: key and value projections, divided by key-value heads until one is left per card.
        dense: feed-forward parts without experts, and shared experts.
        router: the matrices that choose experts; not divided.
        experts: routed experts.
        other: norms and biases; not divided.
    """

    embedding: int = 0
    head: int = 0
    query: int = 0
    key_value: int = 0
    dense: int = 0
    router: int = 0
    experts: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.always_read + self.experts

    @property
    def always_read(self) -> int:
        """Those of the layers that every step reads, whatever its tokens are."""
        return self.query + self.key_value + self.dense + self.router + self.other


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder-only transformer with grouped-query attention and gated feed-forward parts.

    Attributes:
        name: what to call it.
        layers: transformer blocks, those for multi-token prediction not counted.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocabulary: tokens of the vocabulary.
        context_tokens: longest sequence that the model claims.
        architecture: the class that engines load it with, as their logs name it.
        intermediate: width of the feed-forward part in layers without experts; 0 where there is no such layer.
        experts: routed experts in each layer that has them; 0 for a dense model.
        experts_per_token: routed experts that each token passes through.
        expert_intermediate: width of one routed expert.
        shared_experts: experts that every token passes through.
        shared_intermediate: width of all shared experts of a layer together.
        dense_layers: layers without experts in a model that has them; in a dense model all layers are.
        mtp_layers: further layers for multi-token prediction, loaded only when they are used.
        tied_embeddings: the output matrix is the input embedding.
        other_parameters: norms and biases of the whole model, without the multi-token prediction layers.
        weight_bits: bits of one weight of the layers as stored, with its share of the scales of quantisation.
        embedding_bits: bits of one weight of the embedding and of the output matrix.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    architecture: str = ""
    intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    mtp_layers: int = 0
    tied_embeddings: bool = False
    other_parameters: int = 0
    weight_bits: float = 16.0
    embedding_bits: float = 16.0

    @property
    def expert_layers(self) -> int:
        """Layers with experts, those for multi-token prediction not counted."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def parameters(self) -> Parameters:
        """All parameters without those for multi-token prediction."""
        sparse = self.expert_layers
        matrix = self.vocabulary * self.hidden
        return Parameters(
            embedding=matrix,
            head=0 if self.tied_embeddings else matrix,
            query=self.layers * 2 * self.hidden * self.heads * self.head_dim,
            key_value=self.layers * 2 * self.hidden * self.kv_heads * self.head_dim,
            dense=3 * self.hidden * ((self.layers - sparse) * self.intermediate + sparse * self.shared_intermediate),
            router=sparse * self.hidden * self.experts,
            experts=sparse * self.experts * self.expert_parameters,
            other=self.other_parameters,
        )

    @property
    def total_parameters(self) -> int:
        """Parameters of the model without those for multi-token prediction."""
        return self.parameters.total

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: both the input embedding and the output matrix are counted.

        Publishers differ in whether they count the embedding.
        """
        used = self.expert_layers * self.experts_per_token * self.expert_parameters
        return self.parameters.total - self.parameters.experts + used

    @property
    def mtp_parameters(self) -> int:
        """Parameters of the layers for multi-token prediction.

        Each is a layer like the model's last one, and the matrix that joins a token's embedding to the hidden state.
        """
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        if self.experts:
            mlp = 3 * self.hidden * self.shared_intermediate + self.experts * (self.hidden + self.expert_parameters)
        else:
            mlp = 3 * self.hidden * self.intermediate
        return self.mtp_layers * (attention + mlp + 2 * self.hidden * self.hidden)

    def check_split(self, split: Split) -> None:
        """Whether the model can be divided like that.

        Raises:
            ConfigError: heads, layers or experts do not divide.
        """
        if self.heads % split.tensor:
            raise ConfigError(
                f"{self.name} has {self.heads} attention heads, which {split.tensor} cards cannot share evenly; "
                "set a tensor-parallel size that divides them"
            )
        if self.kv_heads % split.tensor and split.tensor % self.kv_heads:
            raise ConfigError(
                f"{self.name} has {self.kv_heads} key-value heads; a tensor-parallel size of {split.tensor} neither "
                "divides them nor is a multiple of them"
            )
        if split.pipeline > self.layers:
            raise ConfigError(f"{self.name} has {self.layers} layers, fewer than {split.pipeline} pipeline stages")
        if split.expert > 1 and not self.experts:
            raise ConfigError(f"{self.name} has no experts to spread over {split.expert} cards")
        if split.expert > 1 and self.experts % split.expert:
            raise ConfigError(
                f"{self.name} has {self.experts} experts per layer, which {split.expert} cards cannot share evenly"
            )

    def on_card(self, split: Split) -> Parameters:
        """What the fullest card holds, without the layers for multi-token prediction.

        Expert parallelism divides nothing but experts; where there are more tensor-parallel cards than expert-parallel
        ones, each expert is divided among the rest.

        Raises:
            ConfigError: the model cannot be divided like that.
        """
        self.check_split(split)
        whole = self.parameters
        stage = -(-self.layers // split.pipeline)

        def part(count: int, cards: int) -> int:
            return -(-count * stage // (self.layers * cards))

        # The first stage has the embedding and the last one the output matrix, so no card has both.
        staged = split.pipeline > 1
        return Parameters(
            embedding=0 if staged and whole.head else -(-whole.embedding // split.tensor),
            head=-(-whole.head // split.tensor),
            query=part(whole.query, split.tensor),
            key_value=part(whole.key_value, min(split.tensor, self.kv_heads)),
            dense=part(whole.dense, split.tensor),
            router=part(whole.router, 1),
            experts=part(whole.experts, max(split.tensor, split.expert)),
            other=part(whole.other, 1),
        )

    def weight_bytes(self, parameters: Parameters) -> int:
        """Bytes that these parameters take as stored. Norms and biases have 16 bits."""
        matrices = parameters.always_read - parameters.other + parameters.experts
        bits = matrices * self.weight_bits + (parameters.embedding + parameters.head) * self.embedding_bits
        return round(bits / 8) + 2 * parameters.other

    def kv_bytes_per_token(self, kv_bits: float = 16.0, split: Split | None = None, *, mtp_layers: int = 0) -> int:
        """Bytes that one token takes in the KV cache of one card.

        Args:
            kv_bits: bits of one element as stored, with its share of scales.
            split: how the model is divided; None is one card.
            mtp_layers: layers for multi-token prediction that are in use and have a cache of their own.
        """
        divided = split or Split()
        heads = -(-self.kv_heads // divided.tensor)
        layers = -(-self.layers // divided.pipeline) + mtp_layers
        return round(2 * layers * heads * self.head_dim * kv_bits / 8)


def read_model(source: str | Path) -> ModelShape:
    """Read a model's shape.

    Args:
        source: a `config.json`, a folder that has one, or one of the names in `BUILT_IN_MODELS`.

    Raises:
        ConfigError: there is no such file or name, it is not a model's configuration, or something in it is missing or
            not known. The message names the file.
    """
    name = str(source)
    if name.lower() in _BUILT_IN:
        return _shape(name.lower(), _Config(f"built-in model {name.lower()}", _BUILT_IN[name.lower()]))
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        close = difflib.get_close_matches(name.lower(), BUILT_IN_MODELS, n=1)
        advice = f"; did you mean {close[0]!r}?" if close else f"; built-in models: {', '.join(BUILT_IN_MODELS)}"
        raise ConfigError(f"{path}: no such file, nor a model known by that name{advice}")
    title = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _shape(title, _Config(str(path), _read_json(path)))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            body = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(body) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES} bytes; a model's config.json is not")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return found


@dataclass(frozen=True, slots=True)
class _Config:
    """The keys of one configuration, asked for by type."""

    where: str
    values: Mapping[str, Any]

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")

    def count(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of these keys that is there and not null."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self.error(f"{key} is {value!r}; it must be a whole number of at least {least}")
            return value
        if default is None:
            raise self.error(f"{keys[0]} is missing")
        return default

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; it must be true or false")
        return value


def _dense(config: _Config, layers: int) -> dict[str, int]:
    del layers
    return {"intermediate": config.count("intermediate_size")}


def _mixtral(config: _Config, layers: int) -> dict[str, int]:
    del layers
    return {
        "experts": config.count("num_local_experts"),
        "experts_per_token": config.count("num_experts_per_tok"),
        "expert_intermediate": config.count("intermediate_size"),
    }


def _qwen_moe(config: _Config, layers: int) -> dict[str, int]:
    step = config.count("decoder_sparse_step", default=1)
    only = config.values.get("mlp_only_layers") or ()
    if not isinstance(only, list | tuple):
        raise config.error("mlp_only_layers must be a list")
    sparse = sum(1 for layer in range(layers) if layer not in only and (layer + 1) % step == 0)
    width = config.count("moe_intermediate_size")
    shared = config.count("shared_expert_intermediate_size", default=0, least=0)
    return {
        "experts": config.count("num_experts"),
        "experts_per_token": config.count("num_experts_per_tok"),
        "expert_intermediate": width,
        "shared_experts": -(-shared // width),
        "shared_intermediate": shared,
        "dense_layers": layers - sparse,
        "intermediate": config.count("intermediate_size") if sparse < layers else 0,
    }


def _hy3(config: _Config, layers: int) -> dict[str, int]:
    kinds = config.values.get("mlp_layer_types")
    if kinds is None:
        dense = config.count("first_k_dense_replace", default=1, least=0)
    elif isinstance(kinds, list) and len(kinds) == layers and set(kinds) <= {"dense", "sparse"}:
        dense = kinds.count("dense")
    else:
        raise config.error(f'mlp_layer_types must have "dense" or "sparse" for each of the {layers} layers')
    width = config.count("moe_intermediate_size", "expert_hidden_dim")
    shared = config.count("num_shared_experts", default=1, least=0)
    return {
        "experts": config.count("num_experts", "num_local_experts"),
        "experts_per_token": config.count("num_experts_per_tok"),
        "expert_intermediate": width,
        "shared_experts": shared,
        "shared_intermediate": shared * width,
        "dense_layers": dense,
        "intermediate": config.count("intermediate_size") if dense else 0,
        "mtp_layers": config.count("num_nextn_predict_layers", default=0, least=0),
    }


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How the models of one `model_type` differ from the others.

    Attributes:
        name: the class that engines load them with.
        feed_forward: reads the fields of `ModelShape` that have to do with feed-forward parts.
        qkv_bias: query, key and value always have biases.
        qk_norm: queries and keys are normalised per head.
        window: the key that turns sliding-window attention on, be it with true or with a width.
    """

    name: str
    feed_forward: Callable[[_Config, int], dict[str, int]]
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str | None = None


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = MappingProxyType(
    {
        "llama": _Architecture("LlamaForCausalLM", _dense),
        "mistral": _Architecture("MistralForCausalLM", _dense, window="sliding_window"),
        "mixtral": _Architecture("MixtralForCausalLM", _mixtral, window="sliding_window"),
        "qwen2": _Architecture("Qwen2ForCausalLM", _dense, qkv_bias=True, window="use_sliding_window"),
        "qwen2_moe": _Architecture("Qwen2MoeForCausalLM", _qwen_moe, qkv_bias=True, window="use_sliding_window"),
        "qwen3": _Architecture("Qwen3ForCausalLM", _dense, qk_norm=True, window="use_sliding_window"),
        "qwen3_moe": _Architecture("Qwen3MoeForCausalLM", _qwen_moe, qk_norm=True, window="use_sliding_window"),
        "hy_v3": _Architecture("HYV3ForCausalLM", _hy3, qk_norm=True),
    }
)


def _shape(name: str, config: _Config) -> ModelShape:
    kind = config.values.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise config.error(f"model_type {kind!r} is not known; known: {', '.join(_ARCHITECTURES)}")
    architecture = _ARCHITECTURES[kind]
    if architecture.window and config.values.get(architecture.window):
        raise config.error(f"{architecture.window} is set: sliding-window attention of {kind} is not known")
    for layer_kind in config.values.get("layer_types") or ():
        if layer_kind != "full_attention":
            raise config.error(f"layer_types has {layer_kind!r}; only full_attention is known for {kind}")
    layers = config.count("num_hidden_layers")
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error(f"{heads} num_attention_heads cannot share {kv_heads} num_key_value_heads evenly")
    head_dim = config.count("head_dim", default=hidden // heads)
    parts = architecture.feed_forward(config, layers)
    if parts.get("experts_per_token", 0) > parts.get("experts", 0):
        raise config.error(f"num_experts_per_tok is {parts['experts_per_token']}, more than there are experts")
    if parts.get("dense_layers", 0) > layers:
        raise config.error(f"{parts['dense_layers']} layers without experts are more than num_hidden_layers")
    small = 2 * hidden
    small += 2 * head_dim if architecture.qk_norm else 0
    if architecture.qkv_bias:
        small += (heads + 2 * kv_heads) * head_dim
    elif config.flag("attention_bias"):
        small += (heads + 2 * kv_heads) * head_dim + hidden
    if config.flag("mlp_bias"):
        small += 2 * parts.get("intermediate", 0) + hidden
    weight_bits, embedding_bits = _bits(config)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=config.count("vocab_size"),
        context_tokens=config.count("max_position_embeddings"),
        architecture=architecture.name,
        tied_embeddings=config.flag("tie_word_embeddings"),
        other_parameters=layers * small + hidden,
        weight_bits=weight_bits,
        embedding_bits=embedding_bits,
        **parts,
    )


_DTYPE_BITS: Final[Mapping[str, float]] = MappingProxyType({"bfloat16": 16.0, "float16": 16.0, "float32": 16.0})
"""Bits in a card's memory by the stored type: engines load float32 as 16 bits unless they are told otherwise."""


def _bits(config: _Config) -> tuple[float, float]:
    """(bits of a weight of the layers, bits of a weight of embedding and output matrix)."""
    dtype = config.values.get("torch_dtype") or config.values.get("dtype") or "bfloat16"
    if dtype not in _DTYPE_BITS:
        raise config.error(f"torch_dtype {dtype!r} is not known; known: {', '.join(_DTYPE_BITS)}")
    plain = _DTYPE_BITS[dtype]
    quantisation = config.values.get("quantization_config")
    if quantisation is None:
        return plain, plain
    if not isinstance(quantisation, dict):
        raise config.error("quantization_config must be an object")
    method = quantisation.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0, plain
    if method in ("awq", "gptq"):
        inner = _Config(f"{config.where}: quantization_config", quantisation)
        bits = inner.count("bits", "w_bit")
        group = inner.count("group_size", "q_group_size", least=-1)
        # Each group of weights has a scale of 16 bits and a zero point as wide as a weight.
        return bits + ((16 + bits) / group if group > 0 else 0.0), plain
    raise config.error(f"quantization_config.quant_method {method!r} is not known; known: fp8, fbgemm_fp8, awq, gptq")


_BUILT_IN: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "hy3": {
            "model_type": "hy_v3",
            "num_hidden_layers": 80,
            "num_nextn_predict_layers": 1,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 120832,
            "max_position_embeddings": 262144,
            "intermediate_size": 13312,
            "first_k_dense_replace": 1,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
        },
        "llama-3.1-8b": {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "intermediate_size": 14336,
        },
        "qwen2.5-7b": {
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "intermediate_size": 18944,
        },
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        "mixtral-8x7b": {
            "model_type": "mixtral",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    }
)

BUILT_IN_MODELS: Final[tuple[str, ...]] = tuple(_BUILT_IN)
"""Models whose shape is known without a file, by the values of their published `config.json`."""
