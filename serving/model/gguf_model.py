"""The shape of a model in a GGUF file: what its metadata stand for, with widths taken from its tensors.

llama.cpp describes a model by keys of its own. They are put into the words of `config.json` and read by the same
families, so that a model has one shape however it is stored. What comes out is held against the tensors: if they have
other parameters than the shape, then something about the model is not known, and it is refused.

Source of keys and names: `gguf-py/gguf/constants.py` and `src/llama-arch.cpp` of llama.cpp.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from serving.errors import ConfigError
from serving.model.config import Config
from serving.model.families import shape_of
from serving.model.gguf import GgufFile
from serving.model.shape import ModelShape

__all__ = ["TensorBits", "shape_of_gguf"]


@dataclass(frozen=True, slots=True)
class TensorBits:
    """How wide the weights of a file are on average, by layer and by what they are for.

    Norms and the like, which a `ModelShape` counts with 16 bits, mostly have 32; the difference is in the average of
    the weights beside them, so that the bytes of a layer and of the model are exactly those of the tensors.

    Attributes:
        method: the recipe that the file names.
        by_layer: bits by number of the layer and sort of module: `experts`, `router`, `dense`, `mixer`.
        embedding: bits of the input embedding.
        head: bits of the output matrix.
    """

    method: str
    by_layer: Mapping[tuple[int, str], float]
    embedding: float
    head: float

    @property
    def activation_bits(self) -> None:
        """Activations are not stored in fewer bits."""
        return None

    def bits(self, module: str, columns: int | None = None) -> float:
        """As in `shape.StoredBits`."""
        del columns
        number = _LAYER.search(module)
        if number is None:
            return self.embedding if "embed" in module else self.head
        return self.by_layer[int(number[1]), _sort_of_module(module)]


_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")
_BLOCK: Final = re.compile(r"blk\.(\d+)\.")
_DENSE: Final = re.compile(r"ffn_(gate|up|down|latent_down|latent_up)(_shexp)?\.weight$")


def _sort_of_module(name: str) -> str:
    if ".experts." in name:
        return "experts"
    leaf = name.rpartition(".")[2]
    if leaf in ("gate", "router", "wg"):
        return "router"
    mixer = any(part in name for part in ("self_attn", "self_attention", "linear_attn", "mamba"))
    mixer = mixer or (".mixer." in name and leaf in _NEMOTRON_MIXER)
    return "mixer" if mixer else "dense"


_NEMOTRON_MIXER: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"})


def _sort_of_tensor(name: str) -> str:
    if "_exps." in name:
        return "experts"
    if "ffn_gate_inp.weight" in name:
        return "router"
    if _DENSE.search(name) or "nextn." in name:
        return "dense"
    return "mixer"


def shape_of_gguf(file: GgufFile, *, name: str) -> ModelShape:
    """The shape of a model in GGUF.

    Args:
        file: what was read of it.
        name: what to call the model.

    Raises:
        ConfigError: its architecture is not known, something is missing, or the tensors have other parameters than
            the shape.
    """
    where = str(file.path)
    architecture = file.architecture
    if architecture is None or architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        shown = str(architecture)[:60]
        raise ConfigError(f"{where}: general.architecture {shown!r} is not known; known: {known}")
    reader = _Reader(file, architecture)
    values = _common(reader)
    model_type, special = _ARCHITECTURES[architecture]
    values |= {"model_type": model_type} | special(reader, values)
    shape = replace(shape_of(values, name=name, where=where), architecture=architecture)
    _check_parameters(file, shape)
    return replace(shape, quantization=_tensor_bits(file, shape))


def _check_parameters(file: GgufFile, shape: ModelShape) -> None:
    stored = sum(tensor.elements for tensor in file.tensors if not tensor.name.startswith("rope_"))
    computed = shape.total_parameters + shape.mtp_parameters
    # Modules for multi-token prediction may have an embedding and an output matrix of their own.
    copies = len(shape.mtp) * 2 * shape.vocabulary * shape.hidden
    if not 0.99 * computed <= stored <= 1.01 * computed + copies:
        raise ConfigError(
            f"{file.path}: its tensors have {stored} parameters, and a {shape.architecture} of its metadata has "
            f"{computed}; something about this model is not known"
        )


def _tensor_bits(file: GgufFile, shape: ModelShape) -> TensorBits:
    size: defaultdict[tuple[int, str], int] = defaultdict(int)
    ends = {"embedding": 0, "head": 0}
    for tensor in file.tensors:
        block = _BLOCK.match(tensor.name)
        if block is not None:
            size[int(block[1]), _sort_of_tensor(tensor.name)] += tensor.size_bytes
        elif tensor.name.startswith("output.weight"):
            ends["head"] += tensor.size_bytes
        else:
            ends["embedding"] += tensor.size_bytes
    count: defaultdict[tuple[int, str], int] = defaultdict(int)
    outside = 0
    for name, module in shape.named_modules():
        number = _LAYER.search(name)
        elements = module.parameters * module.copies
        plain = module.kind == "other" or name.endswith("bias")
        if number is None:
            outside += elements if plain else 0
            continue
        layer = int(number[1])
        if plain:
            size[layer, "experts" if module.kind == "experts" else "mixer"] -= 2 * elements
        else:
            count[layer, _sort_of_module(name)] += elements
    # A layer without a mixer has norms all the same.
    for layer, sort in list(size):
        if not count[layer, sort]:
            beside = next((other for other in ("mixer", "dense", "experts") if count[layer, other]), sort)
            size[layer, beside] += size.pop((layer, sort)) if beside != sort else 0
    matrix = shape.vocabulary * shape.hidden
    return TensorBits(
        method=file.quantisation,
        by_layer=MappingProxyType({key: 8 * size[key] / elements for key, elements in count.items() if elements}),
        embedding=8 * (ends["embedding"] - 2 * outside) / matrix,
        head=8 * ends["head"] / matrix,
    )


# ---- metadata in the words of config.json


@dataclass(frozen=True, slots=True)
class _Reader:
    """The metadata of one file, asked for by key without the architecture's name before it."""

    file: GgufFile
    architecture: str

    def has(self, tensor: str) -> bool:
        return any(one.name == tensor for one in self.file.tensors)

    def value(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> Any:
        """A value; of a list with one for each layer, the largest."""
        value = self.value(key)
        if not isinstance(value, tuple):
            return value
        numbers = [item for item in value if isinstance(item, int)]
        return max(numbers, default=None)

    def per_layer(self, key: str, layers: int) -> list[int]:
        """A value for each layer."""
        value = self.value(key)
        found = list(value) if isinstance(value, tuple) else [value] * layers
        if len(found) != layers or not all(isinstance(item, int) for item in found):
            raise ConfigError(f"{self.file.path}: {self.architecture}.{key} must have a number for each layer")
        return found


def _common(reader: _Reader) -> dict[str, Any]:
    """Keys that mean the same for all architectures. A family takes those that it knows."""
    predicted = reader.number("nextn_predict_layers") or 0
    blocks = Config(str(reader.file.path), {"block_count": reader.number("block_count")}).count(
        "block_count", most=4096
    )
    if not predicted or not reader.has(f"blk.{blocks - 1}.nextn.eh_proj.weight"):
        # The blocks may be counted though the file does not have them.
        blocks -= predicted if predicted and not reader.has(f"blk.{blocks - 1}.attn_norm.weight") else 0
        predicted = 0
    experts, used = reader.number("expert_count"), reader.number("expert_used_count")
    width = reader.number("expert_feed_forward_length")
    vocabulary = next((one.shape[0] for one in reader.file.tensors if one.name == "token_embd.weight"), None)
    found = {
        "num_hidden_layers": blocks - predicted,
        "num_nextn_predict_layers": predicted,
        "mtp_num_hidden_layers": predicted,
        "hidden_size": reader.number("embedding_length"),
        "intermediate_size": reader.number("feed_forward_length"),
        "num_attention_heads": reader.number("attention.head_count"),
        "num_key_value_heads": reader.number("attention.head_count_kv"),
        "head_dim": reader.number("attention.key_length"),
        "max_position_embeddings": reader.number("context_length"),
        "sliding_window": reader.number("attention.sliding_window"),
        "vocab_size": vocabulary,
        "tie_word_embeddings": not reader.has("output.weight"),
        "attention_bias": reader.has("blk.0.attn_q.bias") or reader.has("blk.0.attn_qkv.bias"),
        "use_qk_norm": reader.has("blk.0.attn_q_norm.weight"),
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "moe_topk": used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": reader.number("expert_shared_feed_forward_length"),
        "n_shared_experts": reader.number("expert_shared_count"),
        "num_shared_expert": reader.number("expert_shared_count"),
        "first_k_dense_replace": reader.number("leading_dense_block_count"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _as_it_is(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    del reader, values
    return {}


def _llama(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp has one name for Llama, Mistral and Mixtral."""
    del reader
    return {"model_type": "mixtral" if values.get("num_local_experts") else "llama", "sliding_window": None}


def _llama4(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": values.get("moe_intermediate_size"),
        "intermediate_size_mlp": values.get("intermediate_size"),
        "interleave_moe_layer_step": reader.number("interleave_moe_layer_step"),
        "attention_chunk_size": reader.number("attention.chunk_size") or 8192,
    }


def _of_experts_width(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    """Families whose `intermediate_size` is that of an expert."""
    del reader
    return {"intermediate_size": values.get("moe_intermediate_size") or values.get("intermediate_size")}


def _phi2(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    del values
    return {"qk_layernorm": reader.has("blk.0.attn_q_norm.weight")}


def _phimoe(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    return {"lm_head_bias": reader.has("output.bias"), "sliding_window": None} | _of_experts_width(reader, values)


def _falcon(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    newer = reader.has("blk.0.attn_norm_2.weight")
    return {
        "num_kv_heads": values.get("num_key_value_heads"),
        "new_decoder_architecture": newer,
        "multi_query": values.get("num_key_value_heads") == 1,
        "ffn_hidden_size": values.get("intermediate_size"),
        "bias": values["attention_bias"],
    }


def _deepseek2(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    del values
    rope = reader.number("rope.dimension_count")
    key = reader.number("attention.key_length_mla") or reader.number("attention.key_length")
    chosen_by_bias = any(".exp_probs_b" in tensor.name for tensor in reader.file.tensors)
    return {
        "q_lora_rank": reader.number("attention.q_lora_rank"),
        "kv_lora_rank": reader.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope if isinstance(key, int) and isinstance(rope, int) else None,
        "v_head_dim": reader.number("attention.value_length_mla") or reader.number("attention.value_length"),
        "topk_method": "noaux_tc" if chosen_by_bias else "greedy",
    }


def _delta_net(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    del values
    heads, inner = reader.number("ssm.time_step_rank"), reader.number("ssm.inner_size")
    return {
        "linear_conv_kernel_dim": reader.number("ssm.conv_kernel"),
        "linear_key_head_dim": reader.number("ssm.state_size"),
        "linear_num_key_heads": reader.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads if isinstance(inner, int) and heads else None,
        "full_attention_interval": reader.number("full_attention_interval"),
        "mamba_ssm_dtype": "float32",  # as llama.cpp keeps it
    }


def _gemma4(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    windowed = reader.per_layer("attention.sliding_window_pattern", layers)
    kv_heads = reader.per_layer("attention.head_count_kv", layers)
    if len(set(windowed)) != 2:
        raise ConfigError(f"{reader.file.path}: gemma4.attention.sliding_window_pattern must have both kinds of layers")
    full, window = windowed.index(False), windowed.index(True)
    return {
        "head_dim": reader.number("attention.key_length_swa"),
        "global_head_dim": reader.number("attention.key_length"),
        "layer_types": ["sliding_attention" if narrow else "full_attention" for narrow in windowed],
        "num_key_value_heads": kv_heads[window],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": not reader.has(f"blk.{full}.attn_v.weight"),
        "num_kv_shared_layers": reader.number("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": reader.number("embedding_length_per_layer_input") or 0,
        "enable_moe_block": bool(values.get("num_experts")),
        "top_k_experts": values.get("num_experts_per_tok"),
    }


def _nemotron_h(reader: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    kv_heads = reader.per_layer("attention.head_count_kv", layers)
    widths = reader.per_layer("feed_forward_length", layers)
    wide = "E" if values.get("num_experts") else "-"
    heads, inner = reader.number("ssm.time_step_rank"), reader.number("ssm.inner_size")
    return {
        "hybrid_override_pattern": "".join(
            "*" if kv else wide if width else "M" for kv, width in zip(kv_heads, widths, strict=True)
        ),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads if isinstance(inner, int) and heads else None,
        "ssm_state_size": reader.number("ssm.state_size"),
        "n_groups": reader.number("ssm.group_count"),
        "conv_kernel": reader.number("ssm.conv_kernel"),
        "moe_shared_expert_intermediate_size": values.get("shared_expert_intermediate_size"),
        "moe_latent_size": reader.number("moe_latent_size"),
        "mamba_ssm_cache_dtype": "float32",
    }


_Special = Callable[[_Reader, dict[str, Any]], dict[str, Any]]

_ARCHITECTURES: Final[Mapping[str, tuple[str, _Special]]] = MappingProxyType(
    {
        "llama": ("llama", _llama),
        "mistral3": ("ministral3", _llama),
        "llama4": ("llama4_text", _llama4),
        "qwen2": ("qwen2", _as_it_is),
        "qwen2vl": ("qwen2", _as_it_is),
        "qwen2moe": ("qwen2_moe", _as_it_is),
        "qwen3": ("qwen3", _as_it_is),
        "qwen3vl": ("qwen3", _as_it_is),
        "qwen3moe": ("qwen3_moe", _as_it_is),
        "qwen3vlmoe": ("qwen3_moe", _as_it_is),
        "qwen3next": ("qwen3_next", _delta_net),
        "qwen35": ("qwen3_5_text", _delta_net),
        "qwen35moe": ("qwen3_5_moe_text", _delta_net),
        "gemma": ("gemma", _as_it_is),
        "gemma2": ("gemma2", _as_it_is),
        "gemma3": ("gemma3_text", _as_it_is),
        "gemma4": ("gemma4_text", _gemma4),
        "gpt-oss": ("gpt_oss", _of_experts_width),
        "deepseek2": ("deepseek_v3", _deepseek2),
        "glm4": ("glm4", _as_it_is),
        "glm4moe": ("glm4_moe", _as_it_is),
        "hunyuan-dense": ("hunyuan_v1_dense", _as_it_is),
        "hunyuan-moe": ("hunyuan_v1_moe", _as_it_is),
        "minimax-m2": ("minimax_m2", _of_experts_width),
        "nemotron_h": ("nemotron_h", _nemotron_h),
        "nemotron_h_moe": ("nemotron_h", _nemotron_h),
        "phi2": ("phi", _phi2),
        "phi3": ("phi3", _as_it_is),
        "phimoe": ("phimoe", _phimoe),
        "falcon": ("falcon", _falcon),
    }
)
"""By `general.architecture`: the `model_type` with the same layers, and what is special about its keys."""
