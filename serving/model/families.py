"""Which shape the configuration of each family of models stands for.

A family is one function from a configuration to layers. What it counts was held against the modules that transformers
5.19 and vLLM 0.32 build; defaults of missing keys are those of transformers' configuration classes, because published
files leave out what equals them. A `model_type` that is not here is refused and never guessed.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from serving.model.config import Config
from serving.model.quantization import read_quantization
from serving.model.shape import (
    Attention,
    Dense,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    Mixer,
    ModelShape,
    Module,
    RecurrentState,
)

__all__ = ["FAMILIES", "shape_of"]


@dataclass(frozen=True, slots=True)
class _Body:
    """What a family makes of a configuration.

    Attributes:
        layers: in order.
        mtp: modules for multi-token prediction.
        other: parameters outside the layers; None is one norm without a bias.
        context_tokens: longest sequence; None is `max_position_embeddings`.
        not_counted: what is left out, in words.
    """

    layers: Sequence[Layer]
    mtp: tuple[tuple[Layer, ...], ...] = ()
    other: int | None = None
    context_tokens: int | None = None
    not_counted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Family:
    """How the models of one `model_type` are read.

    Attributes:
        architecture: the class that engines load them with.
        read: makes layers of a configuration.
        tied: output matrix and input embedding are one where the configuration does not say.
        usual: values of keys that a text part inside a multimodal configuration leaves out.
        prefix: as in `ModelShape`.
    """

    architecture: str
    read: Callable[[Config], _Body]
    tied: bool = False
    usual: Mapping[str, int] | None = None
    prefix: str = "model."


# ---- parts that many families share

_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "full_attention": "full",
        "sliding_attention": "window",
        "chunked_attention": "chunk",
        "linear_attention": "state",
    }
)


_MOST_LAYERS: Final = 4096
_MOST_PREDICTORS: Final = 64


def _count(config: Config) -> int:
    return config.count("num_hidden_layers", most=_MOST_LAYERS)


def _predictors(config: Config, *keys: str, default: int = 0) -> int:
    """Modules for multi-token prediction."""
    return config.count(*(keys or ("num_nextn_predict_layers",)), default=default, least=0, most=_MOST_PREDICTORS)


def _kinds(config: Config, known: str, otherwise: Callable[[int], str]) -> list[str]:
    """What each layer is: as `layer_types` says, or else by its number."""
    count = _count(config)
    allowed = {word: kind for word, kind in _KINDS.items() if kind in known.split()}
    return config.words("layer_types", allowed, count) or [otherwise(layer) for layer in range(count)]


def _all_full(config: Config) -> int:
    """The number of layers, all of which see all tokens."""
    return len(_kinds(config, "full", lambda _: "full"))


def _attention(
    config: Config,
    *,
    head_dim: int | None = None,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    qk_norm: bool = False,
    other: int = 0,
    **options: Any,
) -> Attention:
    """Grouped-query attention from the usual keys. Biases are as `attention_bias` says unless told otherwise.

    Args:
        config: the configuration.
        head_dim: where the configuration does not say; None is width by heads.
        qkv_bias: queries, keys and values have biases.
        output_bias: the output projection has a bias.
        qk_norm: queries and keys are normalised, each head by the same weights.
        other: further parameters.
        options: further fields of `Attention`.
    """
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error(f"{heads} num_attention_heads cannot share {kv_heads} num_key_value_heads evenly")
    width = config.count("head_dim", default=head_dim or max(1, hidden // heads))
    biased = config.flag("attention_bias")
    if biased if qkv_bias is None else qkv_bias:
        other += (heads + 2 * kv_heads) * width
    if biased if output_bias is None else output_bias:
        other += hidden
    if qk_norm:
        other += 2 * width
    return Attention(heads, kv_heads, width, other=other, **options)


def _dense(config: Config, *, biased: bool = False, **options: Any) -> Dense:
    width = config.count("intermediate_size")
    gated = options.get("gated", True)
    other = (2 * width if gated else width) + config.count("hidden_size") if biased else 0
    return Dense(width, other=other, **options)


def _experts(config: Config, count: int, per_token: int, width: int, **options: Any) -> Experts:
    if per_token > count:
        raise config.error(f"num_experts_per_tok is {per_token}, more than there are experts")
    return Experts(count, per_token, width, **options)


def _layers(config: Config, parts: Sequence[tuple[Mixer, Dense | Experts]], norms: int = 2) -> list[Layer]:
    """A layer for each pair of parts, with so many norms as wide as the model. Layers alike are one object."""
    size = norms * config.count("hidden_size")
    made = {pair: Layer(*pair, size) for pair in set(parts)}
    return [made[pair] for pair in parts]


def _mtp(config: Config, count: int, layers: Sequence[Layer], name: str = "eh_proj") -> tuple[tuple[Layer, ...], ...]:
    """Modules for multi-token prediction: such layers after a matrix that joins embedding and hidden state."""
    hidden = config.count("hidden_size")
    join = Module(name, "dense", 2 * hidden * hidden, most_cards=1)
    first = replace(layers[0], extra=(join,), norms=layers[0].norms + 3 * hidden)
    return ((first, *layers[1:]),) * count


# ---- plain transformers


def _read_llama(config: Config) -> _Body:
    parts = (_attention(config), _dense(config, biased=config.flag("mlp_bias")))
    return _Body(_layers(config, [parts] * _all_full(config)))


def _read_mistral(config: Config) -> _Body:
    window = config.maybe("sliding_window", default=4096)
    kinds = _kinds(config, "full window", lambda _: "window" if window else "full")
    feed_forward = _dense(config)
    parts = {"full": (_attention(config), feed_forward), "window": (_attention(config, window=window), feed_forward)}
    return _Body(_layers(config, [parts[kind] for kind in kinds]))


def _read_mixtral(config: Config) -> _Body:
    feed_forward = _experts(
        config,
        config.count("num_local_experts", default=8),
        config.count("num_experts_per_tok", default=2),
        config.count("intermediate_size"),
        name="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    mixer = _attention(config, window=config.maybe("sliding_window"))
    return _Body(_layers(config, [(mixer, feed_forward)] * _count(config)))


def _qwen_mixers(config: Config, **options: Any) -> list[Attention]:
    """Qwen's later layers see a window where that is turned on."""
    window = config.maybe("sliding_window", default=4096) if config.flag("use_sliding_window") else None
    first = config.count("max_window_layers", default=28, least=0)
    kinds = _kinds(config, "full window", lambda layer: "window" if window and layer >= first else "full")
    full, windowed = _attention(config, **options), _attention(config, window=window, **options)
    return [windowed if kind == "window" else full for kind in kinds]


def _read_qwen2(config: Config) -> _Body:
    feed_forward = _dense(config)
    mixers = _qwen_mixers(config, qkv_bias=True, output_bias=False)
    return _Body(_layers(config, [(mixer, feed_forward) for mixer in mixers]))


def _read_qwen3(config: Config) -> _Body:
    feed_forward = _dense(config)
    mixers = _qwen_mixers(config, head_dim=128, qk_norm=True)
    return _Body(_layers(config, [(mixer, feed_forward) for mixer in mixers]))


def _qwen_experts(config: Config) -> Callable[[int], Dense | Experts]:
    """The feed-forward part of a layer by its number."""
    hidden = config.count("hidden_size")
    step = config.count("decoder_sparse_step", default=1)
    plain = set(config.numbers("mlp_only_layers"))
    shared = config.count("shared_expert_intermediate_size", default=0, least=0)
    experts = _experts(
        config,
        config.count("num_experts", "num_local_experts"),
        config.count("num_experts_per_tok"),
        config.count("moe_intermediate_size"),
        shared_width=shared,
        shared="shared_expert",
        other=hidden if shared else 0,  # its gate
    )

    def part(layer: int) -> Dense | Experts:
        return _dense(config) if layer in plain or (layer + 1) % step else experts

    return part


def _read_qwen_moe(config: Config, **options: Any) -> _Body:
    if config.flag("use_sliding_window"):
        raise config.error("use_sliding_window is set: sliding-window attention of this family is not known")
    part, mixer = _qwen_experts(config), _attention(config, **options)
    return _Body(_layers(config, [(mixer, part(layer)) for layer in range(_all_full(config))]))


def _read_qwen2_moe(config: Config) -> _Body:
    return _read_qwen_moe(config, qkv_bias=config.flag("qkv_bias", default=True), output_bias=False)


def _read_qwen3_moe(config: Config) -> _Body:
    return _read_qwen_moe(config, qk_norm=True)


def _read_glm4(config: Config) -> _Body:
    mixer = _attention(config, head_dim=128, qkv_bias=config.flag("attention_bias", default=True), output_bias=False)
    return _Body(_layers(config, [(mixer, _dense(config))] * _all_full(config), norms=4))


def _read_phi(config: Config) -> _Body:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    norm = 4 * (hidden // heads) if config.flag("qk_layernorm") else 0
    mixer = _attention(config, qkv_bias=True, output_bias=True, other=norm)
    layers = _layers(config, [(mixer, _dense(config, biased=True, gated=False))] * _count(config))
    # One norm with a bias before both parts, one at the end, and an output with a bias.
    return _Body(layers, other=2 * hidden + config.count("vocab_size"))


def _read_phi3(config: Config) -> _Body:
    mixer = _attention(config, window=config.maybe("sliding_window"))
    return _Body(_layers(config, [(mixer, _dense(config))] * _count(config)))


def _read_phimoe(config: Config) -> _Body:
    hidden = config.count("hidden_size")
    feed_forward = _experts(
        config,
        config.count("num_local_experts", default=16),
        config.count("num_experts_per_tok", default=2),
        config.count("intermediate_size"),
        name="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    mixer = _attention(config, window=config.maybe("sliding_window"))
    bias = config.count("vocab_size") if config.flag("lm_head_bias") else 0
    layers = _layers(config, [(mixer, feed_forward)] * _count(config), norms=4)
    return _Body(layers, other=2 * hidden + bias)


def _read_falcon(config: Config) -> _Body:
    """Falcon: one key-value head unless it is of the newer kind, and attention beside the feed-forward part."""
    hidden = config.count("hidden_size", "n_embed")
    count = config.count("num_hidden_layers", "n_layer", most=_MOST_LAYERS)
    heads = config.count("num_attention_heads", "n_head")
    newer = config.flag("new_decoder_architecture")
    if newer:
        kv_heads = config.count("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if config.flag("multi_query", default=True) else heads
    if heads % kv_heads:
        raise config.error(f"{heads} num_attention_heads cannot share {kv_heads} num_kv_heads evenly")
    width, head_dim = config.count("ffn_hidden_size", default=4 * hidden), hidden // heads
    biased = config.flag("bias")
    mixer = Attention(
        heads,
        kv_heads,
        head_dim,
        other=(heads + 2 * kv_heads) * head_dim + hidden if biased else 0,
        name="self_attention",
    )
    feed_forward = Dense(width, gated=False, other=width + hidden if biased else 0)
    if newer:
        norms = config.count("num_ln_in_parallel_attn", default=2)
    else:
        norms = 1 if config.flag("parallel_attn", default=True) else 2
    context = config.count("max_position_embeddings", default=2048)
    return _Body([Layer(mixer, feed_forward, norms * 2 * hidden)] * count, other=2 * hidden, context_tokens=context)


def _read_deci(config: Config) -> _Body:
    """DeciLM: each block says by itself what it has of attention and of a feed-forward part."""
    count, hidden = _count(config), config.count("hidden_size")
    heads = config.count("num_attention_heads")
    blocks = config.objects("block_configs", count)
    made: dict[str, Layer] = {}

    def layer(block: Config) -> Layer:
        attention, ffn = block.inner("attention") or block, block.inner("ffn") or block
        for part in (attention, ffn):
            if part.flag("replace_with_linear"):
                raise part.error("replace_with_linear is set, which is not known")
        mixer = feed_forward = None
        if not attention.flag("no_op"):
            group = attention.count("n_heads_in_group")
            if heads % group:
                raise attention.error(f"n_heads_in_group is {group}, which does not divide {heads} heads")
            mixer = Attention(heads, heads // group, hidden // heads, window=attention.maybe("window_length"))
        if not ffn.flag("no_op"):
            # Two thirds of the multiple, for the gate, up to the next multiple of 256.
            feed_forward = Dense(-(-int(2 * ffn.number("ffn_mult") * hidden / 3) // 256) * 256)
        return Layer(mixer, feed_forward, hidden * ((mixer is not None) + (feed_forward is not None)))

    layers = []
    for block in blocks:
        one = layer(block)
        layers.append(made.setdefault(repr(one), one))
    return _Body(layers)


# ---- windows


def _read_gemma(config: Config) -> _Body:
    return _Body(_layers(config, [(_attention(config, head_dim=256), _dense(config))] * _all_full(config)))


def _gemma_kinds(config: Config, step: int) -> list[str]:
    return _kinds(config, "full window", lambda layer: "window" if (layer + 1) % step else "full")


def _read_gemma2(config: Config, *, step: int = 2, qk_norm: bool = False) -> _Body:
    window = config.maybe("sliding_window", default=4096)
    if window and config.values.get("use_bidirectional_attention"):
        window = window // 2 + 1
    feed_forward = _dense(config)
    mixers = {
        "full": _attention(config, head_dim=256, qk_norm=qk_norm),
        "window": _attention(config, head_dim=256, qk_norm=qk_norm, window=window),
    }
    kinds = _gemma_kinds(config, step)
    return _Body(_layers(config, [(mixers[kind], feed_forward) for kind in kinds], norms=4))


def _read_gemma3(config: Config) -> _Body:
    return _read_gemma2(config, step=config.count("sliding_window_pattern", default=6), qk_norm=True)


def _read_gemma4(config: Config) -> _Body:
    if config.count("hidden_size_per_layer_input", default=256, least=0):
        raise config.error("hidden_size_per_layer_input is not 0: embeddings for each layer are not known")
    if config.flag("use_double_wide_mlp"):
        raise config.error("use_double_wide_mlp is set, which is not known")
    hidden = config.count("hidden_size")
    kinds = _gemma_kinds(config, 6)
    windowed = _attention(config, head_dim=256, qk_norm=True, window=config.maybe("sliding_window", default=512))
    alike = config.flag("attention_k_eq_v")
    width = config.count("global_head_dim", default=512)
    kv_heads = config.count("num_global_key_value_heads", default=windowed.kv_heads) if alike else windowed.kv_heads
    # transformers 5 writes the same as differences from layer to layer.
    by_layer = config.inner("per_layer_config")
    if by_layer and "full" in kinds and (special := by_layer.inner(str(kinds.index("full")))):
        width = special.count("head_dim", default=windowed.head_dim)
        kv_heads = special.count("num_key_value_heads", default=windowed.kv_heads)
    full = replace(
        windowed,
        kv_heads=kv_heads,
        head_dim=width,
        value_is_key=alike,
        window=None,
        other=windowed.other + 2 * (width - windowed.head_dim),
    )
    shared_from = len(kinds) - config.count("num_kv_shared_layers", default=0, least=0)
    mixers = [
        replace(windowed if kind == "window" else full, shares_kv=layer >= shared_from)
        for layer, kind in enumerate(kinds)
    ]
    feed_forward: Dense | Experts = _dense(config)
    moe = config.flag("enable_moe_block")
    if moe:
        count = config.count("num_experts")
        feed_forward = _experts(
            config,
            count,
            config.count("top_k_experts"),
            config.count("moe_intermediate_size"),
            shared_width=config.count("intermediate_size"),
            shared="dense",
            router="router",
            other=hidden + count,
        )
    layers = _layers(config, [(mixer, feed_forward) for mixer in mixers], norms=7 if moe else 4)
    return _Body([replace(layer, norms=layer.norms + 1) for layer in layers])  # each layer's output has a scale


def _read_gpt_oss(config: Config) -> _Body:
    hidden, width = config.count("hidden_size"), config.count("intermediate_size")
    heads = config.count("num_attention_heads")
    count = config.count("num_local_experts", "num_experts")
    feed_forward = _experts(
        config,
        count,
        config.count("num_experts_per_tok", "experts_per_token"),
        width,
        router="router",
        bias=2 * width + hidden,
        other=count,
    )
    biased = config.flag("attention_bias", default=True)
    window = config.maybe("sliding_window", default=128)
    mixers = {
        kind: _attention(
            config,
            head_dim=64,
            qkv_bias=biased,
            output_bias=biased,
            other=heads,  # a sink for each
            window=window if kind == "window" else None,
        )
        for kind in ("full", "window")
    }
    kinds = _gemma_kinds(config, 2)
    return _Body(_layers(config, [(mixers[kind], feed_forward) for kind in kinds]))


def _read_llama4(config: Config) -> _Body:
    count, width = _count(config), config.count("intermediate_size")
    chunk = config.maybe("attention_chunk_size", default=8192)
    full = _attention(config, head_dim=128)
    chunked = replace(full, window=chunk, chunked=chunk is not None)
    ropes = config.numbers("no_rope_layers")
    if ropes and len(ropes) != count:
        raise config.error(f"no_rope_layers must have a number for each of the {count} layers")
    step = config.count("no_rope_layer_interval", default=4)
    ropes = ropes or [int((layer + 1) % step != 0) for layer in range(count)]
    kinds = _kinds(config, "full chunk", lambda layer: "chunk" if ropes[layer] else "full")
    experts = _experts(
        config,
        config.count("num_local_experts", default=16),
        config.count("num_experts_per_tok", default=1),
        width,
        shared_width=width,
        name="feed_forward",
        router="router",
        shared="shared_expert",
    )
    dense = Dense(config.count("intermediate_size_mlp", default=16384), name="feed_forward")
    interleave = config.count("interleave_moe_layer_step", default=1)
    sparse = set(range(interleave - 1, count, interleave))
    if isinstance(config.values.get("moe_layers"), list):
        sparse = set(config.numbers("moe_layers"))
    return _Body(
        _layers(
            config,
            [
                (chunked if kind == "chunk" else full, experts if layer in sparse else dense)
                for layer, kind in enumerate(kinds)
            ],
        )
    )


def _read_mimo_v2(config: Config) -> _Body:
    count = _count(config)
    full = _attention(config, head_dim=128)
    full = replace(full, value_dim=config.count("v_head_dim", default=full.head_dim))
    if config.flag("add_full_attention_sink_bias"):
        full = replace(full, other=full.other + full.heads)
    heads = config.count("swa_num_attention_heads", default=full.heads)
    head_dim = config.count("swa_head_dim", default=full.head_dim)
    windowed = Attention(
        heads,
        config.count("swa_num_key_value_heads", default=full.kv_heads),
        head_dim,
        config.count("swa_v_head_dim", default=head_dim),
        window=config.count("sliding_window_size", "sliding_window"),
        other=heads if config.flag("add_swa_attention_sink_bias") else 0,
    )
    pattern = config.numbers("hybrid_layer_pattern")
    if len(pattern) != count:
        raise config.error(f"hybrid_layer_pattern must have a number for each of the {count} layers")
    width = config.count("moe_intermediate_size")
    experts = _experts(
        config,
        config.count("n_routed_experts"),
        config.count("num_experts_per_tok"),
        width,
        shared_width=width * config.count("n_shared_experts", default=0, least=0),
        other=config.count("n_routed_experts"),
    )
    dense = Dense(config.count("intermediate_size"))
    parts = [
        (
            windowed if pattern[layer] else full,
            experts if config.per_layer("moe_layer_freq", layer, count, least=0) else dense,
        )
        for layer in range(count)
    ]
    return _Body(_layers(config, parts), not_counted=("layers for multi-token prediction",))


# ---- many experts


def _read_hy3(config: Config) -> _Body:
    count = _all_full(config)
    known = {"dense": "dense", "sparse": "sparse"}
    first = config.count("first_k_dense_replace", default=1, least=0)
    if first > count:
        raise config.error(f"{first} layers without experts are more than num_hidden_layers")
    kinds = config.words("mlp_layer_types", known, count) or ["dense"] * first + ["sparse"] * (count - first)
    width = config.count("moe_intermediate_size", "expert_hidden_dim")
    routed = config.count("num_experts", "num_local_experts")
    experts = _experts(
        config,
        routed,
        config.count("num_experts_per_tok"),
        width,
        shared_width=width * config.count("num_shared_experts", default=1, least=0),
        shared="shared_mlp",
        other=routed,
    )
    mixer = _attention(config, head_dim=128, qk_norm=config.flag("qk_norm", default=True))
    layers = _layers(config, [(mixer, experts if kind == "sparse" else _dense(config)) for kind in kinds])
    predicted = _predictors(config)
    return _Body(layers, _mtp(config, predicted, layers[-1:]))


def _read_hunyuan(config: Config, *, always_norm: bool = True) -> _Body:
    """Hunyuan: experts whose figures may differ by layer, and layers that share the keys and values of earlier ones."""
    count, hidden = _all_full(config), config.count("hidden_size")
    heads = config.count("num_attention_heads")
    head_dim = config.count("head_dim", "attention_head_dim", default=max(1, hidden // heads))
    share = config.count("cla_share_factor", default=1) if config.flag("use_cla") else 1
    own = _attention(
        config,
        head_dim=head_dim,
        qk_norm=config.flag("use_qk_norm", default=always_norm),
    )
    reader = replace(own, shares_kv=True)

    def part(layer: int) -> Dense | Experts:
        width = config.per_layer("intermediate_size", layer, count)
        routed = config.per_layer("num_experts", layer, count, default=1)
        if routed == 1 or layer < config.count("moe_layer_num_skipped", default=0, least=0):
            return Dense(width)
        shared = config.per_layer("num_shared_expert", layer, count, default=1, least=0)
        mixed = config.flag("use_mixed_mlp_moe", default=True)
        return _experts(
            config,
            routed,
            config.per_layer("moe_topk", layer, count),
            config.per_layer("moe_intermediate_size", layer, count, default=width),
            shared_width=width * shared if mixed else 0,
            router="gate.wg",
            shared="shared_mlp",
        )

    parts = [(reader if layer % share else own, part(layer)) for layer in range(count)]
    return _Body(_layers(config, parts))


def _read_hunyuan_large(config: Config) -> _Body:
    return _read_hunyuan(config, always_norm=False)


def _late_experts(config: Config, default_first: int = 0) -> Callable[[int], Dense | Experts]:
    """The feed-forward part of a layer by its number, where the first few have no experts (DeepSeek and its kin)."""
    routed = config.count("n_routed_experts", "num_experts", "num_local_experts")
    width = config.count("moe_intermediate_size")
    chosen_by_bias = config.values.get("topk_method", "noaux_tc") == "noaux_tc"
    experts = _experts(
        config,
        routed,
        config.count("num_experts_per_tok", "num_experts_per_token"),
        width,
        shared_width=width * config.count("n_shared_experts", "num_shared_experts", default=0, least=0),
        other=routed if chosen_by_bias else 0,
    )
    dense = _dense(config, biased=config.flag("mlp_bias"))
    known = {"dense": "dense", "sparse": "sparse"}
    kinds = config.words("mlp_layer_types", known, _count(config))
    first = config.count("first_k_dense_replace", default=default_first, least=0)
    step = config.count("moe_layer_freq", default=1)

    def part(layer: int) -> Dense | Experts:
        if kinds is not None:
            return experts if kinds[min(layer, len(kinds) - 1)] == "sparse" else dense
        return experts if layer >= first and layer % step == 0 else dense

    return part


def _latent(config: Config) -> LatentAttention:
    hidden, latent = config.count("hidden_size"), config.count("kv_lora_rank")
    rope = config.count("qk_rope_head_dim")
    query = config.maybe("q_lora_rank", default=None)
    other = latent + (query or 0)
    if config.flag("attention_bias"):
        other += latent + rope + (query or 0) + hidden
    return LatentAttention(
        config.count("num_attention_heads"),
        latent,
        rope,
        config.count("qk_nope_head_dim"),
        config.count("v_head_dim"),
        query,
        other=other,
    )


def _with_indexer(config: Config, mixer: LatentAttention) -> LatentAttention:
    indexer = Indexer(config.count("index_n_heads"), config.count("index_head_dim"))
    return replace(mixer, indexer=indexer, other=mixer.other + 2 * indexer.head_dim)


def _read_deepseek(config: Config, *, indexed: bool = False, default_first: int = 0, predicted: int = 0) -> _Body:
    count, part, mixer = _count(config), _late_experts(config, default_first), _latent(config)
    mixers: list[Mixer] = [mixer] * count
    if indexed:
        step = config.count("index_topk_freq", default=1)
        offset = config.count("index_skip_topk_offset", default=2, least=0)
        if config.values.get("index_topk_pattern") is not None:
            raise config.error("index_topk_pattern is not known")
        own = [max(layer - offset + 1, 0) % step == 0 for layer in range(count)]
        full = _with_indexer(config, mixer)
        mixers = [full if chooses else mixer for chooses in own]
        mixer = full
    layers = _layers(config, [(one, part(layer)) for layer, one in enumerate(mixers)])
    extra = _predictors(config, "num_nextn_predict_layers", "num_mtp_layers", default=predicted)
    last = _layers(config, [(mixer, part(count))])
    return _Body(layers, _mtp(config, extra, last))


def _read_deepseek_v2(config: Config) -> _Body:
    # The older kind chooses experts without a bias unless its file says otherwise.
    return _read_deepseek(Config(config.where, {"topk_method": "greedy", **config.values}))


def _read_deepseek_v3(config: Config) -> _Body:
    return _read_deepseek(config, default_first=3)


def _read_deepseek_v32(config: Config) -> _Body:
    return _read_deepseek(config, indexed=True, default_first=3)


def _read_glm4_lite(config: Config) -> _Body:
    return _read_deepseek(config, default_first=1)


def _read_glm4_moe(config: Config) -> _Body:
    part = _late_experts(config, 1)
    mixer = _attention(config, head_dim=128, output_bias=False, qk_norm=config.flag("use_qk_norm"))
    count = _all_full(config)
    layers = _layers(config, [(mixer, part(layer)) for layer in range(count)])
    predicted = _predictors(config)
    return _Body(layers, _mtp(config, predicted, _layers(config, [(mixer, part(count))])))


def _read_minimax_m2(config: Config) -> _Body:
    heads = config.count("num_attention_heads")
    head_dim = config.count("head_dim", default=128)
    kv_heads = config.count("num_key_value_heads", default=heads)
    if config.values.get("qk_norm_type", "per_layer") != "per_layer":
        raise config.error(f"qk_norm_type {str(config.values['qk_norm_type'])[:60]!r} is not known; known: per_layer")
    norm = (heads + kv_heads) * head_dim if config.flag("use_qk_norm", default=True) else 0
    routed = config.count("num_local_experts", "num_experts")
    experts = _experts(
        config,
        routed,
        config.count("num_experts_per_tok"),
        config.count("intermediate_size"),
        shared_width=config.count("shared_intermediate_size", default=0, least=0),
        other=routed if config.flag("use_routing_bias", default=True) else 0,
        name="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    layers = _layers(config, [(_attention(config, head_dim=128, other=norm), experts)] * _all_full(config))
    predicted = _predictors(config, "num_mtp_modules") if config.flag("use_mtp") else 0
    each = config.count("mtp_transformer_layers", default=1, most=_MOST_PREDICTORS)
    return _Body(layers, _mtp(config, predicted, layers[-1:] * each))


# ---- states of constant size

_WIDTHS: Final[Mapping[str, float]] = MappingProxyType({"float32": 32.0, "bfloat16": 16.0, "float16": 16.0})


def _state_bits(config: Config, key: str, default: float | None) -> float | None:
    value = config.values.get(key)
    if value is None:
        return default
    if value not in _WIDTHS:
        raise config.error(f"{key} {str(value)[:60]!r} is not known; known: {', '.join(_WIDTHS)}")
    return _WIDTHS[value]


def _delta_net(config: Config) -> RecurrentState:
    """Gated delta net: a matrix of key by value width for each value head."""
    hidden, kernel = config.count("hidden_size"), config.count("linear_conv_kernel_dim", default=4)
    key_heads = config.count("linear_num_key_heads", default=16)
    heads = config.count("linear_num_value_heads", default=32)
    key_dim = config.count("linear_key_head_dim", default=128)
    value_dim = config.count("linear_value_head_dim", default=128)
    channels = 2 * key_heads * key_dim + heads * value_dim
    return RecurrentState(
        heads,
        key_dim * value_dim,
        channels,
        kernel - 1,
        (
            Module("linear_attn.in_proj_qkvz", "query", hidden * (channels + heads * value_dim)),
            Module("linear_attn.in_proj_ba", "query", hidden * 2 * heads),
            Module("linear_attn.out_proj", "query", hidden * heads * value_dim),
            Module("linear_attn.conv1d", "other", channels * kernel + 2 * heads + value_dim),
        ),
        state_bits=_state_bits(config, "mamba_ssm_dtype", None),
    )


def _read_qwen3_next(config: Config, *, predicted: int = 1) -> _Body:
    step = config.count("full_attention_interval", default=4)
    kinds = _kinds(config, "full state", lambda layer: "state" if (layer + 1) % step else "full")
    gate = config.flag("attn_output_gate", default=True)
    full = _attention(config, head_dim=256, qk_norm=True, output_gate=gate)
    state = _delta_net(config)

    def part(layer: int) -> Dense | Experts:
        return _dense(config) if experts is None else experts(layer)

    has_experts = any(config.values.get(key) is not None for key in ("num_experts", "num_local_experts"))
    experts = _qwen_experts(config) if has_experts else None
    layers = _layers(config, [(full if kind == "full" else state, part(layer)) for layer, kind in enumerate(kinds)])
    count = _predictors(config, "mtp_num_hidden_layers", "num_nextn_predict_layers", default=predicted)
    return _Body(layers, _mtp(config, count, _layers(config, [(full, part(len(layers)))]), "fc"))


def _read_qwen3_5(config: Config) -> _Body:
    return _read_qwen3_next(config, predicted=0)


def _kimi_delta(config: Config) -> RecurrentState:
    """Kimi delta attention: as a gated delta net, with a forget gate for each channel; its state has 32 bits."""
    inner = config.inner("linear_attn_config") or Config(config.where, {})
    hidden = config.count("hidden_size")
    heads = inner.count("num_heads", default=config.count("linear_num_heads", default=32))
    width = inner.count("head_dim", default=config.count("linear_head_dim", default=128))
    kernel = inner.count("short_conv_kernel_size", default=config.count("linear_conv_kernel_dim", default=4))
    size = heads * width
    return RecurrentState(
        heads,
        width * width,
        3 * size,
        kernel - 1,
        (
            *(Module(f"self_attn.{name}_proj", "query", hidden * size) for name in "qkvo"),
            Module("self_attn.f_a_proj", "key_value", hidden * width, most_cards=1),
            Module("self_attn.g_a_proj", "key_value", hidden * width, most_cards=1),
            Module("self_attn.f_b_proj", "query", width * size),
            Module("self_attn.g_b_proj", "query", width * size),
            Module("self_attn.b_proj", "query", hidden * heads),
            Module("self_attn.conv1d", "other", 3 * size * kernel + size + heads + width),
        ),
        state_bits=32.0,
    )


def _read_kimi_linear(config: Config) -> _Body:
    count = _count(config)
    inner = config.inner("linear_attn_config")
    whole = {number - 1 for number in inner.numbers("full_attn_layers", 1)} if inner else set()
    if inner and whole | {number - 1 for number in inner.numbers("kda_layers", 1)} != set(range(count)):
        raise config.error("linear_attn_config must name each layer in full_attn_layers or in kda_layers")
    if not inner:
        whole = set(range(4, count, 4))
    kinds = _kinds(config, "full state", lambda layer: "full" if layer in whole else "state")
    full, state, part = _latent(config), _kimi_delta(config), _late_experts(config, 1)
    if config.flag("mla_use_output_gate") or config.values.get("routed_expert_hidden_size") is not None:
        raise config.error("an output gate of latent attention and experts in a latent are not known of kimi_linear")
    parts = [(full if kind == "full" else state, part(layer)) for layer, kind in enumerate(kinds)]
    return _Body(
        _layers(config, parts),
        context_tokens=config.count("max_position_embeddings", "model_max_length", default=1048576),
    )


def _read_jamba(config: Config) -> _Body:
    count, hidden = _count(config), config.count("hidden_size")
    inner = hidden * config.count("mamba_expand", default=2)
    size, kernel = config.count("mamba_d_state", default=16), config.count("mamba_d_conv", default=4)
    rank = -(-hidden // 16)
    if config.values.get("mamba_dt_rank", "auto") != "auto":
        rank = config.count("mamba_dt_rank")
    small = inner * (kernel + config.flag("mamba_conv_bias", default=True))  # convolution
    small += inner + inner * size + inner + rank + 2 * size  # time step's bias, A, D, norms
    small += (2 * inner + hidden) * config.flag("mamba_proj_bias")
    state = RecurrentState(
        inner,
        size,
        inner,
        kernel - 1,
        (
            Module("mamba.in_proj", "query", hidden * 2 * inner),
            Module("mamba.x_proj", "query", inner * (rank + 2 * size)),
            Module("mamba.dt_proj", "query", rank * inner),
            Module("mamba.out_proj", "query", inner * hidden),
            Module("mamba.conv1d", "other", small),
        ),
    )
    routed, width = config.count("num_experts", default=16), config.count("intermediate_size")
    dense = Dense(width, name="feed_forward")
    experts: Dense | Experts = dense
    if routed > 1:
        per_token = config.count("num_experts_per_tok", default=2)
        experts = _experts(config, routed, per_token, width, name="feed_forward", router="router")
    mixer = _attention(config, qkv_bias=False, output_bias=False)
    period, step = config.count("attn_layer_period", default=8), config.count("expert_layer_period", default=2)
    offset = config.count("attn_layer_offset", default=4, least=0)
    start = config.count("expert_layer_offset", default=1, least=0)
    parts = [
        (
            mixer if layer % period == offset else state,
            experts if layer % step == start else dense,
        )
        for layer in range(count)
    ]
    return _Body(_layers(config, parts))


def _mamba2(config: Config, name: str) -> RecurrentState:
    hidden, heads = config.count("hidden_size"), config.count("mamba_num_heads", default=128)
    width = config.count("mamba_head_dim", default=64)
    size = config.count("ssm_state_size", "mamba_state_dim", default=128)
    groups = config.count("n_groups", "mamba_n_groups", "mamba_num_groups", default=8)
    kernel = config.count("conv_kernel", "mamba_d_conv", default=4)
    inner = heads * width
    channels = inner + 2 * groups * size
    small = channels * (kernel + config.flag("use_conv_bias", default=True)) + 3 * heads + inner
    if config.flag("use_bias") or config.flag("mamba_proj_bias"):
        small += inner + channels + heads + hidden
    return RecurrentState(
        heads,
        width * size,
        inner,
        kernel - 1,
        (
            Module(f"{name}.in_proj", "query", hidden * (inner + channels + heads)),
            Module(f"{name}.out_proj", "query", inner * hidden),
            Module(f"{name}.conv1d", "other", small),
        ),
        groups,
        2 * size,
        state_bits=_state_bits(config, "mamba_ssm_cache_dtype", 32.0),
    )


_NEMOTRON: Final[Mapping[str, str]] = MappingProxyType({"M": "state", "*": "full", "-": "dense", "E": "experts"})


def _read_nemotron_h(config: Config) -> _Body:
    """Nemotron-H: layers of one part each, by a pattern of letters."""
    hidden = config.count("hidden_size")
    kinds = _nemotron_kinds(config, "hybrid_override_pattern")
    if not kinds:
        known = {"linear_attention": "state", "mamba": "state", "moe": "experts", "mlp": "dense"}
        known |= {"full_attention": "full", "attention": "full"}
        listed = config.values.get("layers_block_type")
        kinds = config.words("layers_block_type", known, len(listed) if isinstance(listed, list) else 0) or []
    if len(kinds) != config.count("num_hidden_layers", default=len(kinds), least=0) or not kinds:
        raise config.error("hybrid_override_pattern must say what each of the num_hidden_layers layers is")
    head_dim = config.count("attention_head_dim", default=128)
    mixers: dict[str, Mixer] = {}
    if "full" in kinds:
        mixers["full"] = replace(_attention(config, head_dim=head_dim, qkv_bias=False, output_bias=False), name="mixer")
    if "state" in kinds:
        mixers["state"] = _mamba2(config, "mixer")
    parts: dict[str, Dense | Experts] = {}
    if "dense" in kinds:
        parts["dense"] = replace(_dense(config, gated=False, biased=config.flag("mlp_bias")), name="mixer")
    predicted = _predictors(config)
    if "experts" in kinds or predicted:
        parts["experts"] = _nemotron_experts(config)
    made = {kind: Layer(mixers.get(kind), parts.get(kind), hidden) for kind in _NEMOTRON.values()}
    mtp: tuple[tuple[Layer, ...], ...] = ()
    if predicted:
        again = _nemotron_kinds(config, "mtp_hybrid_override_pattern") or ["full", "experts"]
        mtp = _mtp(config, predicted, [made[kind] for kind in again])
    return _Body([made[kind] for kind in kinds], mtp)


def _nemotron_kinds(config: Config, key: str) -> list[str]:
    pattern = config.values.get(key)
    if pattern is None:
        return []
    if not isinstance(pattern, str) or not set(pattern) <= set(_NEMOTRON):
        raise config.error(f"{key} must be made of the letters {', '.join(_NEMOTRON)}")
    return [_NEMOTRON[letter] for letter in pattern]


def _nemotron_experts(config: Config) -> Experts:
    routed = config.count("n_routed_experts", "num_experts", default=8)
    return _experts(
        config,
        routed,
        config.count("num_experts_per_tok", default=2),
        config.count("moe_intermediate_size", default=7688),
        shared_width=config.count("moe_shared_expert_intermediate_size", default=7688)
        if config.count("n_shared_experts", default=1, least=0)
        else 0,
        gated=False,
        latent=config.maybe("moe_latent_size"),
        other=routed,
        name="mixer",
    )


# ---- the table

_LLAMA: Final = _Family(
    "LlamaForCausalLM",
    _read_llama,
    usual={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
)
_MISTRAL: Final = _Family(
    "MistralForCausalLM",
    _read_mistral,
    usual={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
    },
)
_QWEN2: Final = _Family("Qwen2ForCausalLM", _read_qwen2)
_QWEN3: Final = _Family("Qwen3ForCausalLM", _read_qwen3)
_QWEN3_MOE: Final = _Family("Qwen3MoeForCausalLM", _read_qwen3_moe)
_QWEN3_5: Final = _Family("Qwen3_5ForConditionalGeneration", _read_qwen3_5)
_QWEN3_5_MOE: Final = _Family("Qwen3_5MoeForConditionalGeneration", _read_qwen3_5)
_DEEPSEEK_V3: Final = _Family("DeepseekV3ForCausalLM", _read_deepseek_v3)
_GEMMA3: Final = _Family(
    "Gemma3ForCausalLM",
    _read_gemma3,
    tied=True,
    usual={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
)
_GEMMA4: Final = _Family("Gemma4ForConditionalGeneration", _read_gemma4, tied=True)
_LLAMA4: Final = _Family("Llama4ForConditionalGeneration", _read_llama4)

FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _MISTRAL,
        "ministral": _MISTRAL,
        "ministral3": _MISTRAL,
        "mixtral": _Family("MixtralForCausalLM", _read_mixtral),
        "qwen2": _QWEN2,
        "qwen2_vl": _QWEN2,
        "qwen2_vl_text": _QWEN2,
        "qwen2_5_vl": _QWEN2,
        "qwen2_5_vl_text": _QWEN2,
        "qwen2_moe": _Family("Qwen2MoeForCausalLM", _read_qwen2_moe),
        "qwen3": _QWEN3,
        "qwen3_vl_text": _QWEN3,
        "qwen3_moe": _QWEN3_MOE,
        "qwen3_vl_moe_text": _QWEN3_MOE,
        "qwen3_next": _Family("Qwen3NextForCausalLM", _read_qwen3_next),
        "qwen3_5_text": _QWEN3_5,
        "qwen3_5_moe_text": _QWEN3_5_MOE,
        "hy_v3": _Family("HYV3ForCausalLM", _read_hy3),
        "hunyuan": _Family("HunYuanMoEV1ForCausalLM", _read_hunyuan_large),
        "hunyuan_v1_dense": _Family("HunYuanDenseV1ForCausalLM", _read_hunyuan),
        "hunyuan_v1_moe": _Family("HunYuanMoEV1ForCausalLM", _read_hunyuan),
        "deepseek_v2": _Family("DeepseekV2ForCausalLM", _read_deepseek_v2),
        "deepseek_v3": _DEEPSEEK_V3,
        "kimi_k2": _DEEPSEEK_V3,
        "deepseek_v32": _Family("DeepseekV32ForCausalLM", _read_deepseek_v32),
        "glm4": _Family("Glm4ForCausalLM", _read_glm4),
        "glm4_moe": _Family("Glm4MoeForCausalLM", _read_glm4_moe),
        "glm4_moe_lite": _Family("Glm4MoeLiteForCausalLM", _read_glm4_lite),
        "glm_moe_dsa": _Family("GlmMoeDsaForCausalLM", _read_deepseek_v32),
        "gpt_oss": _Family("GptOssForCausalLM", _read_gpt_oss),
        "gemma": _Family("GemmaForCausalLM", _read_gemma, tied=True),
        "gemma2": _Family("Gemma2ForCausalLM", _read_gemma2, tied=True),
        "gemma3_text": _GEMMA3,
        "gemma4_text": _GEMMA4,
        "llama4_text": _LLAMA4,
        "kimi_linear": _Family("KimiLinearForCausalLM", _read_kimi_linear),
        "jamba": _Family("JambaForCausalLM", _read_jamba),
        "nemotron-nas": _Family("DeciLMForCausalLM", _read_deci),
        "nemotron_h": _Family("NemotronHForCausalLM", _read_nemotron_h, prefix="backbone."),
        "minimax_m2": _Family("MiniMaxM2ForCausalLM", _read_minimax_m2),
        "mimo_v2_flash": _Family("MiMoV2FlashForCausalLM", _read_mimo_v2),
        "phi": _Family("PhiForCausalLM", _read_phi),
        "phi3": _Family("Phi3ForCausalLM", _read_phi3),
        "phimoe": _Family("PhimoeForCausalLM", _read_phimoe),
        "falcon": _Family("FalconForCausalLM", _read_falcon, tied=True),
    }
)
"""Families by `model_type`."""

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")
_TEXT_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "gemma4": "gemma4_text",
        "llama4": "llama4_text",
        "llava": "llama",
        "mistral3": "mistral",
        "qwen2_vl": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen3_vl": "qwen3_vl_text",
        "qwen3_vl_moe": "qwen3_vl_moe_text",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "kimi_k25": "deepseek_v3",
    }
)
"""What the text part is where it does not say so itself."""
_OTHER_PARTS: Final = re.compile(r"(vision|visual|audio|video|image|speech)\w*_config|vision_tower")


def shape_of(values: Mapping[str, Any], *, name: str, where: str, folder: Path | None = None) -> ModelShape:
    """The shape that a configuration stands for.

    Of a multimodal model it is that of the text part; the others are named in `not_counted`.

    Args:
        values: the content of `config.json`.
        name: what to call the model.
        where: what to call the configuration in errors.
        folder: where further files about quantisation may lie.

    Raises:
        ConfigError: its `model_type` is not known, or something is missing or cannot be right.
    """
    outer = Config(where, values)
    config = next((part for key in _TEXT_PARTS if (part := outer.inner(key))), outer)
    kind = config.values.get("model_type")
    if config is not outer and kind in (None, ""):
        kind = _TEXT_TYPES.get(str(outer.values.get("model_type")))
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise config.error(_unknown(kind))
    family = FAMILIES[kind]
    if config is not outer:
        config = Config(config.where, {**(family.usual or {}), **config.values})
    body = family.read(config)
    context = body.context_tokens or config.count("max_position_embeddings")
    if kind not in _STRETCHED:
        context = _stretched(config, context)
    hidden = config.count("hidden_size", "n_embed")
    tied = config.flag("tie_word_embeddings", default=family.tied)
    if config is not outer:
        tied = outer.flag("tie_word_embeddings", default=tied)
    architectures = outer.values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else family.architecture
    others = tuple(key for key in values if _OTHER_PARTS.fullmatch(key) and values[key])
    return ModelShape(
        name=name,
        hidden=hidden,
        vocabulary=config.count("vocab_size"),
        context_tokens=context,
        layers=_without_idle_windows(body.layers, context),
        mtp=body.mtp,
        architecture=str(architecture)[:100],
        tied_embeddings=tied,
        other=hidden if body.other is None else body.other,
        quantization=read_quantization(values, where, folder),
        prefix=family.prefix,
        not_counted=others + body.not_counted,
    )


_STRETCHED: Final = frozenset({"gemma3_text"})
"""Families whose `max_position_embeddings` is already what the scaling of positions makes of it."""
_UNSTRETCHING: Final = frozenset({"default", "su", "longrope", "llama3", "proportional"})
"""Kinds of scaling that leave `max_position_embeddings` as it is."""


def _stretched(config: Config, context: int) -> int:
    """The longest sequence, where positions are scaled.

    Sources: vLLM 0.32, `config/model.py`; SGLang 0.5, `utils/hf_transformers_utils.py`.
    """
    rope = config.inner("rope_scaling") or config.inner("rope_parameters")
    if rope is None:
        return context
    kind = rope.values.get("rope_type", rope.values.get("type"))
    if not isinstance(kind, str) or kind in _UNSTRETCHING or rope.values.get("factor") is None:
        return context
    original = rope.count("original_max_position_embeddings", default=context) if kind == "yarn" else context
    longest = int(original * rope.number("factor"))
    if longest < 1:
        raise rope.error(f"factor {rope.values['factor']} leaves no context")
    return longest


def _without_idle_windows(layers: Sequence[Layer], context: int) -> tuple[Layer, ...]:
    """The same layers, but a window that no sequence outgrows is none."""
    made = {}
    for layer in layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention) and mixer.window is not None and mixer.window >= context:
            made[id(layer)] = replace(layer, mixer=replace(mixer, window=None, chunked=False))
    kept = {id(layer): made.get(id(layer), layer) for layer in layers}
    return tuple(kept[id(layer)] for layer in layers)


def _unknown(kind: object) -> str:
    known = ", ".join(FAMILIES)
    shown = str(kind)[:60] if isinstance(kind, str) else kind
    close = difflib.get_close_matches(str(kind)[:60], FAMILIES, n=1, cutoff=0.4)
    nearest = f"the nearest known is {close[0]!r}; " if close else ""
    return f"model_type {shown!r} is not known; {nearest}known: {known}"
