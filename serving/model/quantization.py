"""How a model's weights are stored: which modules, in how many bits, from `quantization_config` in its `config.json`.

Every method is one function that turns its block of JSON into *rules*: patterns of module names, and the scheme that
the weights of those modules have. The first rule that matches decides; what no rule matches is stored as the model's
dtype. A method, format or dtype that is not known is named and refused, because a guess here is a wrong budget later.

Sources: what vLLM's `model_executor/layers/quantization/` and transformers' `quantizers/` make of each block (which
modules they pass over by themselves, what shapes their scales have), the compressed-tensors, ModelOpt, Quark, AutoRound
and GPTQModel writers of those blocks, and for 4-bit floats "OCP Microscaling Formats (MX) v1.0" (blocks of 32 with one
scale of 8 bits) and NVIDIA's description of NVFP4 (blocks of 16 with one scale of 8 bits).
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from serving.errors import ConfigError
from serving.model.config import Config, read_object

__all__ = ["Quantization", "Scheme", "read_quantization"]

_PLAIN_BITS: Final[Mapping[str, float]] = MappingProxyType({"bfloat16": 16.0, "float16": 16.0, "float32": 16.0})
"""Bits in a card's memory by the stored type: engines load float32 as 16 bits unless they are told otherwise."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of some modules are stored.

    Attributes:
        name: fp8, int8, int4, nvfp4, mxfp4, mxfp8, nf4.
        element_bits: bits that one weight takes without scales; where integers do not fill a word evenly, more than
            their width.
        share_bits: bits of the scales and zero points of groups and blocks that fall to one weight.
        row_bits: bits of the scales that belong to one row of a matrix; 0 where there are none.
        activation_bits: bits of the activations that it is multiplied with; None where those stay as they are.
        tensor: last part of the tensor's name in a file: weight, qweight, weight_packed, blocks.
        dtypes: types that the tensor may have in a safetensors file.
    """

    name: str
    element_bits: float
    share_bits: float
    row_bits: float
    activation_bits: int | None
    tensor: str
    dtypes: tuple[str, ...]

    def bits(self, columns: int | None = None) -> float:
        """Bits of one stored weight with its share of scales and zero points.

        Args:
            columns: inputs of the matrix, over which the scale of a row is spread; None leaves such scales out, which
                is less than 1 % for matrices as wide as a model's.
        """
        return self.element_bits + self.share_bits + (self.row_bits / columns if columns else 0.0)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How all weights of a model are stored.

    Attributes:
        method: what to call it: none, fp8, int8, awq, gptq, mxfp4, bitsandbytes/nf4, compressed-tensors/int4,
            modelopt/nvfp4, ...
        plain_bits: bits of a weight that is not quantised.
        scheme: that of most weights: of the layers' matrices where nothing is said of them in particular, else of the
            first group of modules that has one; None where nothing is quantised.
        kv_cache_dtype: type of the KV cache that the checkpoint asks for (fp8, int8, nvfp4); None where it says
            nothing.
        kv_cache_bits: bits of one element of such a cache with its share of scales.
    """

    method: str
    plain_bits: float
    scheme: Scheme | None
    kv_cache_dtype: str | None
    kv_cache_bits: float | None
    _rules: tuple["_Rule", ...]

    @property
    def weight_bits(self) -> float:
        """Bits of one weight of most of the layers' matrices, scales of rows left out."""
        return self.plain_bits if self.scheme is None else self.scheme.bits()

    @property
    def activation_bits(self) -> int | None:
        """Bits of the activations before most of the layers' matrices; None where they are not quantised."""
        return None if self.scheme is None else self.scheme.activation_bits

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that some module may have, that of most weights first."""
        found = [self.scheme, *(rule.scheme for rule in self._rules)]
        return tuple(dict.fromkeys(scheme for scheme in found if scheme is not None))

    def scheme_of(self, module: str) -> Scheme | None:
        """How the weights of a module are stored; None if they are not quantised.

        Args:
            module: its name in the checkpoint without the last part, as in `model.layers.3.self_attn.q_proj`.
        """
        plain = _canonical(module)
        for rule in self._rules:
            if rule.matches(plain, module):
                return rule.scheme
        return None

    def bits(self, module: str, columns: int | None = None) -> float:
        """Bits that one weight of a module takes, with its share of scales and zero points.

        Args:
            module: its name in the checkpoint without the last part, as in `model.layers.3.self_attn.q_proj`.
            columns: inputs of the matrix, where a scale for each row is to be counted.
        """
        scheme = self.scheme_of(module)
        return self.plain_bits if scheme is None else scheme.bits(columns)


def read_quantization(config: Mapping[str, Any], where: str, folder: Path | None = None) -> Quantization:
    """Read how the weights of a model are stored.

    Args:
        config: the content of `config.json`. The block may stand under `quantization_config` or `compression_config`,
            at the top or in `text_config`.
        where: what to call the file in errors.
        folder: the model's folder, in which a block may stand beside `config.json` (`hf_quant_config.json` of ModelOpt,
            `quantize_config.json` of GPTQ, `quant_config.json` of AWQ) where that has none.

    Raises:
        ConfigError: the method, its format or a dtype is not known, or a value cannot be right.
    """
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, Mapping) else (config,)
    plain = _plain_bits(parts, where)
    block, source = _find_block(parts, where, folder)
    if block is None:
        return Quantization("none", plain, None, None, None, ())
    inner = block.get("quantization")
    if isinstance(inner, Mapping):  # hf_quant_config.json wraps its block
        block = {"quant_method": "modelopt", **inner}
    # DeepSeek-V4 says beside the block that its experts have another type than the block.
    experts = next((part["expert_dtype"] for part in (block, *parts) if part.get("expert_dtype") is not None), None)
    block = {**block, "expert_dtype": experts}
    reader = _Block(f"{source}: quantization_config", block)
    method = _method(reader)
    if method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        raise reader.error(f"quant_method {method!r} is not known, so its bits are not either; known: {known}")
    found = _METHODS[method](reader)
    cache = found.kv_cache
    cache_bits = None if cache is None else _KV_CACHE_BITS[cache]
    return Quantization(found.method, plain, found.scheme, cache, cache_bits, found.rules)


_KV_CACHE_BITS: Final[Mapping[str, float]] = MappingProxyType({"fp8": 8.0, "int8": 8.0, "nvfp4": 4.5})


def _plain_bits(parts: Iterable[Mapping[str, Any]], where: str) -> float:
    for part in parts:
        for key in ("torch_dtype", "dtype"):
            dtype = part.get(key)
            if dtype is None:
                continue
            bits = _PLAIN_BITS.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
            if bits is None:
                raise ConfigError(f"{where}: {key} {str(dtype)[:60]!r} is not known; known: {', '.join(_PLAIN_BITS)}")
            return bits
    return _PLAIN_BITS["bfloat16"]


def _find_block(
    parts: Iterable[Mapping[str, Any]], where: str, folder: Path | None
) -> tuple[Mapping[str, Any] | None, str]:
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            block = part.get(key)
            if block is None or block == {}:
                continue
            if not isinstance(block, Mapping):
                raise ConfigError(f"{where}: {key} must be an object")
            return block, where
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json") if folder is not None else ():
        path = Path(folder or ".", name)
        if path.is_file():
            return _read_beside(path), str(path)
    return None, where


def _read_beside(path: Path) -> Mapping[str, Any]:
    found = read_object(path)
    if "quant_method" in found or "quantization" in found:
        return found
    return {"quant_method": "awq" if "w_bit" in found or "zero_point" in found else "gptq", **found}


def _method(block: "_Block") -> str:
    method = block.values.get("quant_method")
    if method is None and ("load_in_4bit" in block.values or "load_in_8bit" in block.values):
        method = "bitsandbytes"
    if method is None and "quant_algo" in block.values:
        method = "modelopt"
    if method is None and "config_groups" in block.values:
        method = "compressed-tensors"
    if not isinstance(method, str) or not method:
        raise block.error(f"quant_method is {str(method)[:60]!r}; it must name the method")
    return method.lower().replace("_", "-")


# --- names ---------------------------------------------------------------------------------------------------------

_HEADS = frozenset({"lm_head", "embed_out", "head"})
_EMBEDDINGS = frozenset({"wte", "wpe", "word_embeddings", "tok_embeddings", "embeddings", "embed"})
_ALWAYS_PLAIN = frozenset({"gate", "router", "shared_expert_gate", "conv1d", "eh_proj", "weights_proj"})
"""Modules that engines load without quantisation whatever the block says: they choose experts, mix tokens or join the
embedding of multi-token prediction, and are small."""
_GLOB = re.compile(r"[*?\[]")


def _canonical(name: str) -> str:
    """A name as a text model has it: multimodal ones wrap the text model in one of two ways."""
    for prefix, plain in (("model.language_model.", "model."), ("language_model.model.", "model.")):
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name.removeprefix("language_model.")


def _spellings(plain: str, module: str) -> tuple[str, ...]:
    """How a module may be called, since a pattern may want the wrapping that its name lacks."""
    inner = plain.removeprefix("model.")
    wrapped = (f"model.language_model.{inner}", f"language_model.{plain}", f"language_model.model.{inner}")
    return tuple(dict.fromkeys((plain, module, *wrapped)))


@dataclass(frozen=True, slots=True)
class _Names:
    """A set of patterns for module names, quick to ask.

    A plain name stands for itself, for what is inside of it, and where it is the end or the middle of a path, for every
    path that has it. `re:` starts a regular expression that has to match from the start; `*` makes a glob.
    """

    plain: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def read(cls, names: Iterable[str], block: "_Block") -> "_Names":
        plain, patterns, globs = set(), [], []
        for name in names:
            if name.startswith("re:"):
                patterns.append(_compile(name[3:], block))
            elif _GLOB.search(name):
                globs += [fnmatch.translate(spelling) for spelling in (name, name.rstrip(".*") + ".*")]
            elif name.strip("."):
                plain.add(_canonical(name.strip(".")))
        if globs:
            patterns.append(_compile("|".join(dict.fromkeys(globs)), block))
        return cls(frozenset(plain), tuple(patterns))

    def match(self, plain: str, module: str) -> bool:
        if self.plain:
            parts = plain.split(".")
            ends = range(1, len(parts) + 1)
            if any(".".join(parts[start:end]) in self.plain for end in ends for start in range(end)):
                return True
        return bool(self.patterns) and any(
            pattern.match(name) for name in _spellings(plain, module) for pattern in self.patterns
        )


def _compile(pattern: str, block: "_Block") -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise block.error(f"{pattern[:80]!r} is no regular expression: {error}") from error


def _kind(plain_name: str) -> str:
    """Which sort of module a name speaks of: expert, linear, embedding, head, plain."""
    parts = plain_name.split(".")
    leaf = parts[-1]
    if leaf in _HEADS:
        return "head"
    if leaf in _EMBEDDINGS or leaf.startswith("embed"):
        return "embedding"
    if leaf in _ALWAYS_PLAIN or "router" in parts or "norm" in leaf or leaf.startswith("ln_"):
        return "plain"
    return "expert" if "experts" in parts else "linear"


@dataclass(frozen=True, slots=True)
class _Rule:
    """Modules, by name or by kind, and what their weights are stored as; None is not quantised."""

    scheme: Scheme | None
    names: _Names | None = None
    kinds: frozenset[str] = frozenset()

    def matches(self, plain: str, module: str) -> bool:
        return _kind(plain) in self.kinds if self.names is None else self.names.match(plain, module)


_LAYERS = frozenset({"linear", "expert"})


def _rules(
    block: "_Block",
    default: Scheme | None,
    *,
    ignored: Iterable[str] = (),
    head: bool = False,
    only_experts: bool = False,
) -> tuple[_Rule, ...]:
    """The common case: one scheme for the layers' matrices, and modules that it passes over."""
    kinds = frozenset({"expert"}) if only_experts else _LAYERS
    return (_Rule(None, _Names.read(ignored, block)), _Rule(default, kinds=kinds | {"head"} if head else kinds))


# --- values --------------------------------------------------------------------------------------------------------


class _Block(Config):
    """The keys of one block, which is an object in a configuration."""

    __slots__ = ()

    def integer(self, *keys: str, least: int = 1, most: int = 2**20, default: int | None = None) -> int:
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise self.error(f"{key} is {str(value)[:60]!r}; it must be a whole number of {least} to {most}")
            return value
        if default is None:
            raise self.error(f"{keys[0]} is missing")
        return default

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} is {str(value)[:60]!r}; it must be text")
        return value

    def names(self, *keys: str) -> list[str]:
        """All names that stand in lists under these keys; a single name may stand for a list."""
        found: list[str] = []
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, str):
                value = [value]
            if value is None:
                continue
            if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                raise self.error(f"{key} must be a list of module names")
            found += value
        return found

    def inner(self, key: str) -> "_Block | None":
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} must be an object")
        return _Block(f"{self.where}.{key}", value)

    def blocks(self, key: str) -> dict[str, "_Block"]:
        """The objects inside of an object."""
        outer = self.inner(key)
        if outer is None:
            return {}
        found = {}
        for name, value in outer.values.items():
            if not isinstance(value, Mapping):
                raise outer.error(f"{name} must be an object")
            found[name] = _Block(f"{outer.where}.{name}", value)
        return found

    def pair(self, key: str) -> tuple[int, int] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 2**20 for size in value)
        ):
            raise self.error(f"{key} is {str(value)[:60]!r}; it must be the two sides of a block")
        return value[0], value[1]


@dataclass(frozen=True, slots=True)
class _Found:
    method: str
    scheme: Scheme | None
    rules: tuple[_Rule, ...]
    kv_cache: str | None = None


_F8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_PACKED_FLOATS = ("U8", "I8", "F4")

_FP8 = Scheme("fp8", 8.0, 0.0, 0.0, 8, "weight", _F8)
_FP8_ROWS = replace(_FP8, row_bits=32.0)
_INT8_ROWS = Scheme("int8", 8.0, 0.0, 32.0, 8, "weight", ("I8",))
_MXFP4 = Scheme("mxfp4", 4.0, 8 / 32, 0.0, None, "weight", _PACKED_FLOATS)
_MXFP8 = Scheme("mxfp8", 8.0, 8 / 32, 0.0, 8, "weight", _F8)
_NVFP4 = Scheme("nvfp4", 4.0, 8 / 16, 0.0, 4, "weight", _PACKED_FLOATS)


def _fp8_blocks(block: _Block, size: tuple[int, int]) -> Scheme:
    # Large blocks have scales of 32 bits even where they are powers of two; MX ones are stored as 8 bits.
    area = size[0] * size[1]
    small = block.values.get("scale_fmt") == "ue8m0" and area <= 1024
    return replace(_FP8, share_bits=(8 if small else 32) / area)


def _packed(block: _Block, *, bits: int, group: int, zero_points: bool, tensor: str = "qweight") -> Scheme:
    """Integers in words of 32 bits; a group of them has a scale of 16 bits, and a zero point as wide as a weight."""
    share, rows = (16 + (bits if zero_points else 0)), 0
    if group == -1:
        share, rows = 0, share
    elif group < 1:
        raise block.error(f"group_size is {group}; it must be -1 for whole rows, or at least 1")
    return Scheme(f"int{bits}", float(bits), share / group if share else 0.0, float(rows), None, tensor, ("I32",))


# --- methods -------------------------------------------------------------------------------------------------------

_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")


def _read_fp8(block: _Block) -> _Found:
    size = block.pair("weight_block_size")
    scheme = _FP8 if size is None else _fp8_blocks(block, size)
    ignored = block.names(*_IGNORED)
    rules = _rules(block, scheme, ignored=ignored)
    experts = block.text("expert_dtype", "fp8")
    if experts == "fp4":
        rules = (rules[0], _Rule(_MXFP4, kinds=frozenset({"expert"})), *rules[1:])
        return _Found("fp8 with mxfp4 experts", scheme, rules, _kv_cache(block))
    if experts != "fp8":
        raise block.error(f"expert_dtype {experts[:60]!r} is not known; known: fp4, fp8")
    return _Found("fp8", scheme, rules, _kv_cache(block))


def _fixed(method: str, scheme: Scheme, *, only_experts: bool = False) -> Callable[[_Block], _Found]:
    """A method whose block says nothing but which modules it passes over."""

    def read(block: _Block) -> _Found:
        rules = _rules(block, scheme, ignored=block.names(*_IGNORED), only_experts=only_experts)
        return _Found(method, scheme, rules, _kv_cache(block))

    return read


def _read_blockwise_int8(block: _Block) -> _Found:
    size = block.pair("weight_block_size") or (128, 128)
    scheme = replace(_INT8_ROWS, share_bits=32 / (size[0] * size[1]), row_bits=0.0)
    return _Found("int8", scheme, _rules(block, scheme, ignored=block.names(*_IGNORED)))


def _read_awq(block: _Block) -> _Found:
    bits = block.integer("bits", "w_bit", most=8)
    group = block.integer("group_size", "q_group_size", least=-1)
    block.flag("zero_point", default=True)  # Files have zero points either way, and engines load them.
    scheme = _packed(block, bits=bits, group=group, zero_points=True)
    head = block.flag("lm_head", default=False)
    return _Found("awq", scheme, _rules(block, scheme, ignored=block.names(*_IGNORED), head=head))


def _read_gptq(block: _Block) -> _Found:
    scheme = _gptq_scheme(block, block)
    # Act-order keeps one index of 32 bits for each input: less than 1 % of a matrix of 4,096 rows at 4 bits.
    block.flag("desc_act", default=False)
    head = block.flag("lm_head", default=False)
    rules = []
    for pattern, override in block.blocks("dynamic").items():
        names = _Names.read([f"re:{pattern.removeprefix('+:').removeprefix('-:')}"], block)
        rules.append(_Rule(None if pattern.startswith("-:") else _gptq_scheme(override, block), names))
    ignored = block.names(*_IGNORED)
    only = _flat_names(block, "modules_in_block_to_quantize")
    kinds = _LAYERS | {"head"} if head else _LAYERS
    rules.append(_Rule(None, _Names.read(ignored, block)))
    # A positive rule must not reach what GPTQ never touches.
    rules = [_Rule(None, kinds=frozenset({"plain", "embedding", "linear", "expert", "head"}) - kinds), *rules]
    if only:
        rules.append(_Rule(scheme, _Names.read(only, block)))
    else:
        rules.append(_Rule(scheme, kinds=kinds))
    return _Found("gptq", scheme, tuple(rules))


def _gptq_scheme(block: _Block, base: _Block) -> Scheme:
    bits = block.integer("bits", "w_bit", most=8, default=base.integer("bits", "w_bit", most=8))
    default_group = base.integer("group_size", "q_group_size", least=-1, default=128)
    group = block.integer("group_size", "q_group_size", least=-1, default=default_group)
    marlin = base.values.get("checkpoint_format") == "marlin" or base.values.get("is_marlin_format") is True
    return _packed(block, bits=bits, group=group, zero_points=not marlin)


def _flat_names(block: _Block, key: str) -> list[str]:
    """Names in a list, or in a list of lists."""
    value = block.values.get(key)
    if isinstance(value, list | tuple) and all(isinstance(part, list | tuple) for part in value):
        return [name for part in value for name in _Block(block.where, {key: part}).names(key)]
    return block.names(key)


def _read_auto_round(block: _Block) -> _Found:
    scheme = _auto_round_scheme(block, block)
    rules = [_Rule(None, _Names.read(block.names(*_IGNORED), block))]
    for name, override in block.blocks("extra_config").items():
        pattern = f"re:.*(?:{name})" if re.search(r"[*+?^$()\[\]{}|\\]", name) else name
        rules.append(_Rule(_auto_round_scheme(override, block), _Names.read([pattern], block)))
    if block.flag("lm_head", default=False):
        rules.append(_Rule(scheme, kinds=frozenset({"head"})))
    inside = _flat_names(block, "block_name_to_quantize") or _flat_names(block, "to_quant_block_names")
    inside = [name for part in inside for name in part.split(",") if name.strip()]
    if inside:
        rules.append(_Rule(None, kinds=frozenset({"plain", "embedding", "head"})))
        rules.append(_Rule(scheme, _Names.read([name.strip() for name in inside], block)))
    else:
        rules.append(_Rule(scheme, kinds=_LAYERS))
    return _Found("auto-round" if scheme is None else f"auto-round/{scheme.name}", scheme, tuple(rules))


def _auto_round_scheme(block: _Block, base: _Block) -> Scheme | None:
    bits = block.integer("bits", most=32, default=base.integer("bits", most=32))
    kind = block.text("data_type", base.text("data_type", "int"))
    if bits >= 16:
        return None
    if kind.startswith("mx_fp") and bits in (4, 8):
        return _MXFP4 if bits == 4 else _MXFP8
    if kind.startswith("nv_fp") and bits == 4:
        return _NVFP4
    if kind.startswith("fp") and bits == 8:
        return _FP8_ROWS
    if not kind.startswith("int") or bits > 8:
        raise block.error(f"data_type {kind[:60]!r} of {bits} bits is not known; known: int, fp, mx_fp, nv_fp")
    group = block.integer("group_size", least=-1, default=base.integer("group_size", least=-1, default=128))
    return _packed(block, bits=bits, group=group, zero_points=True)


def _read_bitsandbytes(block: _Block) -> _Found:
    """Blocks of 64 weights with one 32-bit scale, or with scales quantised again (Dettmers et al., "QLoRA", 2023)."""
    ignored = block.names("llm_int8_skip_modules")
    four = block.flag("load_in_4bit", default=block.flag("_load_in_4bit", default=False))
    eight = block.flag("load_in_8bit", default=block.flag("_load_in_8bit", default=False))
    if four == eight:
        raise block.error("must say either load_in_4bit or load_in_8bit")
    if eight:
        scheme = replace(_INT8_ROWS, activation_bits=8)
        return _Found("bitsandbytes/int8", scheme, _rules(block, scheme, ignored=ignored))
    kind = block.text("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise block.error(f"bnb_4bit_quant_type {kind[:60]!r} is not known; known: nf4, fp4")
    twice = block.flag("bnb_4bit_use_double_quant", default=False)
    share = 8 / 64 + 32 / (64 * 256) if twice else 32 / 64
    scheme = Scheme(kind, 4.0, share, 0.0, None, "weight", ("U8",))
    return _Found(f"bitsandbytes/{kind}", scheme, _rules(block, scheme, ignored=ignored))


_FORMATS = frozenset(
    {
        "dense",
        "naive-quantized",
        "int-quantized",
        "float-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    }
)


def _read_compressed_tensors(block: _Block) -> _Found:
    sparsity = block.inner("sparsity_config")
    sparse_format = sparsity.text("format", "dense") if sparsity is not None else "dense"
    if sparse_format != "dense":
        raise block.error(f"sparsity_config.format {sparse_format[:60]!r} is not known, so its bits are not either")
    groups = block.blocks("config_groups")
    if not groups:
        raise block.error("config_groups is missing")
    named, general = _group_rules(block, groups)
    if not named and not general:
        return _Found("none", None, (), _kv_cache(block))
    scheme = next(rule.scheme for rule in (*general, *named))
    rules = (_Rule(None, _Names.read(block.names("ignore"), block)), *named, *general)
    name = "mixed" if len({rule.scheme for rule in (*general, *named)}) > 1 else (scheme.name if scheme else "none")
    return _Found(f"compressed-tensors/{name}", scheme, rules, _kv_cache(block))


def _group_rules(block: _Block, groups: Mapping[str, _Block]) -> tuple[list[_Rule], list[_Rule]]:
    """(rules that name modules, rules that name classes of modules): a name goes before a class."""
    named, general = [], []
    for group in groups.values():
        weights = group.inner("weights")
        if weights is None:
            continue
        scheme = _compressed_scheme(weights, group, group.text("format") or block.text("format"))
        names = []
        for target in group.names("targets"):
            kinds = _class_kinds(target)
            if kinds is None:
                names.append(target)
            elif kinds:
                general.append(_Rule(scheme, kinds=kinds))
            else:
                raise group.error(
                    f"targets has the class {target[:60]!r}, which is not known; known: Linear, Embedding"
                )
        if names:
            named.append(_Rule(scheme, _Names.read(names, group)))
    return named, general


def _class_kinds(target: str) -> frozenset[str] | None:
    """The kinds of modules that a class of modules covers; empty if it is not known, None if it is no class."""
    if not re.fullmatch(r"[A-Z]\w*", target):
        return None
    if target.endswith("Linear"):
        return _LAYERS | {"head"}
    if target.endswith("Embedding"):
        return frozenset({"embedding"})
    if target.endswith(("MoE", "Experts")):
        return frozenset({"expert"})
    return frozenset({"head"}) if target == "ParallelLMHead" else frozenset()


_SCALE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {"float8_e4m3fn": 8, "uint8": 8, "float8_e8m0fnu": 8, "bfloat16": 16, "float16": 16, "float32": 32}
)


def _compressed_scheme(weights: _Block, group: _Block, stored: str) -> Scheme:
    """A scheme in the words of compressed-tensors' `QuantizationArgs`, which ModelOpt uses too."""
    if stored and stored not in _FORMATS:
        raise weights.error(f"format {stored[:60]!r} is not known; known: {', '.join(sorted(_FORMATS))}")
    bits = weights.integer("num_bits", most=16)
    kind = weights.text("type", "int")
    if kind not in ("int", "float") or (kind == "float" and bits not in (4, 8)) or bits > 8:
        raise weights.error(f"{kind[:20]} of {bits} bits is not known; known: int of up to 8 bits, float of 4 or 8")
    size = weights.integer("group_size", least=-1, default=-1)
    strategy = weights.text("strategy", "group" if size > 0 else "channel" if kind == "int" else "tensor")
    activations = group.inner("input_activations")
    names = {("float", 8, 32): "mxfp8", ("float", 4, 16): "nvfp4", ("float", 4, 32): "mxfp4"}
    name = f"int{bits}" if kind == "int" else names.get((kind, bits, size), "fp8" if bits == 8 else "")
    if not name:
        raise weights.error(f"4-bit floats in groups of {size} are not known; known: 16 (nvfp4), 32 (mxfp4)")
    packed = stored.endswith("pack-quantized") or (not stored and kind == "int" and bits < 8)
    if kind == "int":
        # Words of 32 bits hold whole integers only; unpacked ones take a byte each, however narrow they are.
        element = 32 / (32 // bits) if packed else 8.0
        dtypes: tuple[str, ...] = ("I32",) if packed else ("I8",)
    else:
        element = float(bits)
        dtypes = _PACKED_FLOATS if bits == 4 else _F8
    scale = weights.text("scale_dtype").removeprefix("torch.")
    if scale and scale not in _SCALE_BITS:
        raise weights.error(f"scale_dtype {scale[:60]!r} is not known; known: {', '.join(_SCALE_BITS)}")
    scale_bits = _SCALE_BITS[scale] if scale else 8 if name in ("nvfp4", "mxfp4", "mxfp8") else 16
    scale_bits += 0 if weights.flag("symmetric", default=True) else math.ceil(element)
    share, rows = 0.0, 0.0
    if strategy in ("group", "tensor_group") and size > 0:
        share = scale_bits / size
    elif strategy == "block":
        sides = weights.pair("block_structure") or (128, 128)
        share = max(scale_bits, 32) / (sides[0] * sides[1])
    elif strategy in ("channel", "group"):
        rows = float(scale_bits)
    elif strategy != "tensor":
        raise weights.error(
            f"strategy {strategy[:60]!r} is not known; known: tensor, channel, group, tensor_group, block"
        )
    return Scheme(
        name,
        element,
        share,
        rows,
        None if activations is None else activations.integer("num_bits", most=16),
        "weight_packed" if packed else "weight",
        dtypes,
    )


_ALGORITHMS: Final[Mapping[str, Scheme]] = MappingProxyType(
    {
        "FP8": _FP8,
        "FP8_PER_CHANNEL_PER_TOKEN": _FP8_ROWS,
        "FP8_PB_WO": replace(_FP8, share_bits=32 / 128**2, activation_bits=None),
        "FP8_BLOCK_SCALES": replace(_FP8, share_bits=32 / 128**2),
        "NVFP4": _NVFP4,
        "NVFP4_AWQ": _NVFP4,
        "W4A16_NVFP4": replace(_NVFP4, activation_bits=None),
        "W4A8_NVFP4_FP8": replace(_NVFP4, activation_bits=8),
        "MXFP4": _MXFP4,
        "W4A8_MXFP4_FP8": replace(_MXFP4, activation_bits=8),
        "W4A8_MXFP4_MXFP8": replace(_MXFP4, activation_bits=8),
        "MXFP8": _MXFP8,
        "W4A16_AWQ": Scheme("int4", 4.0, 16 / 128, 0.0, None, "weight", ("U8", "I8")),
        "W4A8_AWQ": Scheme("int4", 4.0, 16 / 128, 0.0, 8, "weight", ("U8", "I8")),
        "W8A8_SQ_PER_CHANNEL": _INT8_ROWS,
    }
)


def _algorithm(block: _Block, key: str = "quant_algo") -> Scheme | None:
    algorithm = block.text(key).upper()
    if algorithm in ("NO_QUANT", "UNQUANTIZED", "NONE"):
        return None
    if algorithm not in _ALGORITHMS:
        known = ", ".join([*_ALGORITHMS, "MIXED_PRECISION"])
        raise block.error(f"{key} {algorithm[:60]!r} is not known, so its bits are not either; known: {known}")
    scheme = _ALGORITHMS[algorithm]
    group = block.integer("group_size", least=0, default=0)
    if group and scheme.name == "int4":
        scheme = replace(scheme, share_bits=16 / group)
    return scheme


def _read_modelopt(block: _Block) -> _Found:
    cache = _kv_cache(block)
    ignored = _Rule(None, _Names.read(block.names(*_IGNORED), block))
    rules = [ignored]
    if block.text("moe_quant_algo"):
        rules.append(_Rule(_algorithm(block, "moe_quant_algo"), kinds=frozenset({"expert"})))
    if block.text("quant_algo").upper() != "MIXED_PRECISION":
        scheme = _algorithm(block)
        rules.append(_Rule(scheme, kinds=_LAYERS | {"head"}))
        return _Found(f"modelopt/{scheme.name}" if scheme else "none", scheme, tuple(rules), cache)
    by_scheme: dict[Scheme | None, list[str]] = {}
    for name, layer in block.blocks("quantized_layers").items():
        by_scheme.setdefault(_algorithm(layer), []).append(name)
    if by_scheme:
        rules += [_Rule(scheme, _Names.read(names, block)) for scheme, names in by_scheme.items()]
    else:
        named, general = _group_rules(block, block.blocks("config_groups"))
        rules += [*named, *general]
    schemes = [rule.scheme for rule in rules if rule.scheme is not None]
    if not schemes:
        raise block.error("quant_algo is MIXED_PRECISION, but neither quantized_layers nor config_groups says of what")
    # One name may stand for all experts of a layer, which are most of such a model.
    weigh = {
        scheme: (any(_kind(name) == "expert" for name in names), len(names)) for scheme, names in by_scheme.items()
    }
    most = max(schemes, key=lambda scheme: weigh.get(scheme, (False, 0)))
    return _Found("modelopt/mixed", most, tuple(rules), cache)


_QUARK_DTYPES: Final[Mapping[str, tuple[str, float, tuple[str, ...]]]] = MappingProxyType(
    {
        "fp8_e4m3": ("fp8", 8.0, _F8),
        "fp8_e5m2": ("fp8", 8.0, _F8),
        "fp4": ("mxfp4", 4.0, _PACKED_FLOATS),
        "fp4_e2m1": ("mxfp4", 4.0, _PACKED_FLOATS),
        "fp6_e2m3": ("mxfp6", 6.0, _PACKED_FLOATS),
        "fp6_e3m2": ("mxfp6", 6.0, _PACKED_FLOATS),
        "int8": ("int8", 8.0, ("I8",)),
        "int4": ("int4", 4.0, ("I32",)),
        "uint4": ("int4", 4.0, ("I32",)),
    }
)


def _read_quark(block: _Block) -> _Found:
    default = block.inner("global_quant_config")
    scheme = None if default is None else _quark_scheme(default)
    rules = [_Rule(None, _Names.read(block.names("exclude", "exclude_layers"), block))]
    for name, layer in block.blocks("layer_quant_config").items():
        rules.append(_Rule(_quark_scheme(layer), _Names.read([name], block)))
    for name, layer in block.blocks("layer_type_quant_config").items():
        kinds = _class_kinds(name)
        if not kinds:
            raise block.error(f"layer_type_quant_config has the class {name[:60]!r}, which is not known; known: Linear")
        rules.append(_Rule(_quark_scheme(layer), kinds=kinds))
    rules.append(_Rule(scheme, kinds=_LAYERS | {"head"}))
    main = scheme or next((rule.scheme for rule in rules if rule.scheme is not None), None)
    cache = None
    for layer in block.blocks("kv_cache_quant_config").values():
        outputs = layer.inner("output_tensors")
        cache = cache or (None if outputs is None else _cache_name(outputs.text("dtype"), block))
    return _Found("none" if main is None else f"quark/{main.name}", main, tuple(rules), cache)


def _quark_scheme(layer: _Block) -> Scheme | None:
    weight = layer.inner("weight")
    if weight is None:
        return None
    dtype = weight.text("dtype")
    if dtype in _PLAIN_BITS:
        return None
    if dtype not in _QUARK_DTYPES:
        raise weight.error(f"dtype {dtype[:60]!r} is not known; known: {', '.join(_QUARK_DTYPES)}")
    name, bits, dtypes = _QUARK_DTYPES[dtype]
    scheme = weight.text("qscheme", "per_tensor")
    share, rows = 0.0, 0.0
    if scheme == "per_group":
        group = weight.integer("group_size", default=32 if name.startswith("mx") else None)
        share = (
            8 if name.startswith("mx") else 16 + (0 if weight.values.get("symmetric") is not False else bits)
        ) / group
    elif scheme == "per_channel":
        rows = 32.0
    elif scheme != "per_tensor":
        raise weight.error(f"qscheme {scheme[:60]!r} is not known; known: per_tensor, per_channel, per_group")
    inputs = layer.inner("input_tensors")
    kind = "" if inputs is None else inputs.text("dtype")
    activations = None if kind not in _QUARK_DTYPES else int(_QUARK_DTYPES[kind][1])
    return Scheme(name, bits, share, rows, activations, "weight", dtypes)


def _kv_cache(block: _Block) -> str | None:
    """Type of KV cache that a block asks for, in the words of compressed-tensors and of ModelOpt."""
    algorithm = block.values.get("kv_cache_quant_algo")
    if isinstance(algorithm, str) and algorithm:
        return _cache_name(algorithm, block)
    scheme = block.values.get("kv_cache_scheme")
    if isinstance(scheme, str) and scheme:
        return _cache_name(scheme, block)
    inner = block.inner("kv_cache_scheme")
    if inner is None:
        return None
    bits, kind = inner.integer("num_bits", most=16, default=8), inner.text("type", "float")
    return _cache_name(
        {"float8": "fp8", "int8": "int8", "float4": "nvfp4"}.get(f"{kind}{bits}", f"{kind}{bits}"), block
    )


def _cache_name(name: str, block: _Block) -> str | None:
    plain = name.lower()
    if plain in ("auto", "none", "bfloat16", "float16"):
        return None
    for known in _KV_CACHE_BITS:
        if plain.startswith(known):
            return known
    raise block.error(f"KV cache type {name[:60]!r} is not known; known: {', '.join(_KV_CACHE_BITS)}")


_METHODS: Final[Mapping[str, Callable[[_Block], _Found]]] = MappingProxyType(
    {
        "fp8": _read_fp8,
        "fbgemm-fp8": _fixed("fp8", _FP8_ROWS),
        "w8a8-fp8": _fixed("fp8", _FP8_ROWS),
        "mxfp8": _fixed("mxfp8", _MXFP8),
        "w8a8-int8": _fixed("int8", _INT8_ROWS),
        "blockwise-int8": _read_blockwise_int8,
        "awq": _read_awq,
        "awq-marlin": _read_awq,
        "gptq": _read_gptq,
        "gptq-marlin": _read_gptq,
        "auto-round": _read_auto_round,
        "bitsandbytes": _read_bitsandbytes,
        # Engines load nothing but experts as 4 bits here.
        "mxfp4": _fixed("mxfp4", replace(_MXFP4, tensor="blocks"), only_experts=True),
        "compressed-tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
        "modelopt-fp4": _read_modelopt,
        "modelopt-mxfp8": _read_modelopt,
        "modelopt-mixed": _read_modelopt,
        "quark": _read_quark,
    }
)
