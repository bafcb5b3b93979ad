"""What a serving file may say: canonical keys, the names that engines have for them, and what voids a batch size.

The names that vLLM, SGLang, llama.cpp, TGI and TensorRT-LLM use for the same settings are accepted too, with `-` or
`_`, and as options with their dashes. What is not known is refused with file and line, because a misspelt limit that is
silently ignored is a wrong verdict later. So is a name that means one thing to one engine and another to the next.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from serving.engines import ENGINES
from serving.errors import ConfigError
from serving.strict_yaml import Node, parse_yaml, read_yaml

__all__ = [
    "DERIVED_KEYS",
    "ENGINE_ALIASES",
    "MAX_BATCH_SIZE_LIMIT",
    "SETTING_ALIASES",
    "SETTING_KEYS",
    "SPLIT_KEYS",
    "Scalar",
    "Settings",
    "StaleInput",
    "parse_settings",
    "read_assignment",
    "read_settings",
    "spelt_value",
    "stale_inputs",
    "stale_warning",
]

Scalar: TypeAlias = str | int | float | bool
"""A value of the file."""

MAX_BATCH_SIZE_LIMIT = 65_536
"""No server batches more than this; a larger figure is a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the serving file says; None where it says nothing.

    Attributes:
        path: the file, as given.
        lines: canonical key -> line in the file, from 1; inputs of the batch size as `derived_from.KEY`.
        spelt: canonical key, or `derived_from.KEY` -> the key as the file has it.
        model: name or path of the model.
        engine: one of the engines Plimsoll knows.
        gpu: name of the card it is meant for.
        gpus: how many of them.
        max_batch_size: requests that may run at once, over the whole target.
        max_model_len: longest prompt plus output of one request, in tokens.
        max_num_batched_tokens: token budget of one engine step. For SGLang and TGI, which do not mix them, of a step
            that takes in prompts; for llama.cpp, its logical batch.
        physical_batch_tokens: tokens that llama.cpp computes at once; its buffers are sized for them.
        kv_cache_capacity_tokens: tokens that the KV cache of the whole target holds.
        kv_cache_dtype: element type of the KV cache, as the engine spells it; `auto` is the model's own.
        kv_cache_dtype_k: that of the keys, where they differ (llama.cpp).
        kv_cache_dtype_v: that of the values.
        kv_unified: llama.cpp: slots share one KV cache instead of having a part each.
        enable_prefix_cache: what requests have in common at their beginning is computed once.
        quantization: method by which weights are quantised, as the engine spells it; `none` where they are not.
        dtype: element type of weights and activations that are not quantised.
        gpu_memory_utilization: share of each GPU's memory that the engine may take, 0..1. SGLang's is of weights and
            KV cache alone.
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: stages of layers.
        data_parallel_size: whole copies of the model.
        expert_parallel_size: GPUs over which experts are spread.
        enable_expert_parallel: vLLM: experts are spread over all GPUs.
        mtp_layers: layers for multi-token prediction that are loaded to draft with.
        num_speculative_tokens: tokens drafted ahead at each step.
        gpu_layers: llama.cpp: layers on the GPUs, or `all`, or `auto`.
        cpu_moe_layers: llama.cpp: layers whose experts stay in main memory, from the first, or `all`.
        cpu_offload_gb: weights of each GPU kept in main memory, in GiB.
        swap_space_gb: main memory of each GPU for KV cache that was pushed out, in GiB.
        derived_from: what `max_batch_size` was worked out for: memory inputs by canonical key.
    """

    path: str
    lines: Mapping[str, int] = field(default_factory=dict)
    spelt: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    model: str | None = None
    engine: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    max_batch_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    physical_batch_tokens: int | None = None
    kv_cache_capacity_tokens: int | None = None
    kv_cache_dtype: str | None = None
    kv_cache_dtype_k: str | None = None
    kv_cache_dtype_v: str | None = None
    kv_unified: bool | None = None
    enable_prefix_cache: bool | None = None
    quantization: str | None = None
    dtype: str | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    mtp_layers: int | None = None
    num_speculative_tokens: int | None = None
    gpu_layers: int | str | None = None
    cpu_moe_layers: int | str | None = None
    cpu_offload_gb: float | None = None
    swap_space_gb: float | None = None
    derived_from: Mapping[str, Scalar] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """`file:line` of a canonical key, or the file alone when the key is not in it."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else self.path

    def values(self) -> dict[str, Scalar]:
        """What is set: canonical key -> value, in the order of the table; without `derived_from`."""
        found = ((key, getattr(self, key)) for key in SETTING_KEYS)
        return {key: value for key, value in found if value is not None}

    @property
    def expert_parallel(self) -> int | None:
        """GPUs over which experts are spread, however the file says it; None when it does not."""
        if self.expert_parallel_size is None and self.enable_expert_parallel:
            return (self.tensor_parallel_size or 1) * (self.data_parallel_size or 1)
        return self.expert_parallel_size

    @property
    def stale(self) -> tuple["StaleInput", ...]:
        """The inputs that differ from those the batch size was worked out for."""
        return stale_inputs(self)


@dataclass(frozen=True, slots=True)
class StaleInput:
    """A memory input that is no longer what the batch size was derived from.

    Attributes:
        key: its canonical key.
        was: what the batch size was derived from.
        now: what holds now.
        was_line: line of `derived_from` in the file; None where an input that is not there means 1.
        now_line: line of the setting; None where the file does not have it.
    """

    key: str
    was: Scalar
    now: Scalar
    was_line: int | None
    now_line: int | None


# ---- how each value is read


def _engine(node: Node) -> str:
    name = node.text().lower().replace(".", "").replace("-", "").replace("_", "")
    if name not in ENGINES:
        raise node.error(f"must be one of {', '.join(ENGINES)}")
    return name


def _count(largest: int, smallest: int = 1) -> Callable[[Node], int]:
    return lambda node: node.integer(smallest, largest)


def _amount(largest: float) -> Callable[[Node], float]:
    return lambda node: node.number(0, largest)


def _ratio(node: Node) -> float:
    value = node.number()
    if not 0 < value <= 1:
        raise node.error(f"is {value:g}; it must be above 0 and at most 1 (a ratio, not percent)")
    return value


_OFF: Final = frozenset({"off", "no", "none", "false", "disabled", "关闭", "关", "否", "无"})
_ON: Final = frozenset({"on", "yes", "true", "enabled", "开启", "开", "是"})


def _kind(off: str, example: str) -> Callable[[Node], str]:
    """Reads the name of an element type or method, where words for off give `off`."""

    def read(node: Node) -> str:
        said = str(node.flag()).lower() if node.is_flag() else node.text().strip()
        if said.lower() in _OFF:
            return off
        if said.lower() in _ON:
            raise node.error(f"says that it is on, and not which: name it, as in {example}")
        return said

    return read


def _layers(*words: str, flags: bool = False) -> Callable[[Node], int | str]:
    """Reads a number of layers or one of `words`; with `flags`, true is all and false none."""

    def read(node: Node) -> int | str:
        if flags and node.is_flag():
            return "all" if node.flag() else 0
        if node.is_text():
            said = node.text().strip().lower()
            if said not in words:
                raise node.error(f"is {said[:40]!r}; it must be a number of layers or {' or '.join(words)}")
            return said
        return node.integer(0, 100_000)

    return read


def _not(node: Node) -> bool:
    return not node.flag()


_Reader: TypeAlias = Callable[[Node], Scalar]
_LARGEST_TOKENS: Final = 1_000_000_000
_KV_KIND: Final = _kind("auto", "kv_cache_dtype: fp8")
_PARALLEL: Final = _count(65_536)

_READERS: Final[Mapping[str, _Reader]] = {
    "model": Node.text,
    "engine": _engine,
    "gpu": Node.text,
    "gpus": _PARALLEL,
    "max_batch_size": _count(MAX_BATCH_SIZE_LIMIT),
    "max_model_len": _count(_LARGEST_TOKENS),
    "max_num_batched_tokens": _count(_LARGEST_TOKENS),
    "physical_batch_tokens": _count(_LARGEST_TOKENS),
    "kv_cache_capacity_tokens": _count(_LARGEST_TOKENS * 1000),
    "kv_cache_dtype": _KV_KIND,
    "kv_cache_dtype_k": _KV_KIND,
    "kv_cache_dtype_v": _KV_KIND,
    "kv_unified": Node.flag,
    "enable_prefix_cache": Node.flag,
    "quantization": _kind("none", "quantization: fp8"),
    "dtype": Node.text,
    "gpu_memory_utilization": _ratio,
    "tensor_parallel_size": _PARALLEL,
    "pipeline_parallel_size": _PARALLEL,
    "data_parallel_size": _PARALLEL,
    "expert_parallel_size": _PARALLEL,
    "enable_expert_parallel": Node.flag,
    "mtp_layers": _count(1000, 0),
    "num_speculative_tokens": _count(1000, 0),
    "gpu_layers": _layers("all", "auto"),
    "cpu_moe_layers": _layers("all", flags=True),
    "cpu_offload_gb": _amount(1_000_000),
    "swap_space_gb": _amount(1_000_000),
}
SETTING_KEYS: Final = tuple(_READERS)
"""Canonical keys, in the order in which they are shown; `derived_from` stands beside them."""

SPLIT_KEYS: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size")
"""How the model is divided among cards."""

_DERIVED_ONLY: Final[Mapping[str, _Reader]] = {
    "gpu_memory_gib": _amount(1_000_000),
    "weight_bits": _amount(64),
    "kv_bits": _amount(64),
    "mean_tokens": _count(_LARGEST_TOKENS),
    "long_tokens": _count(_LARGEST_TOKENS),
    "long_share_ratio": lambda node: node.number(0, 1),
}
_DERIVED_READERS: Final[Mapping[str, _Reader]] = {
    key: reader
    for key, reader in {**_READERS, **_DERIVED_ONLY}.items()
    if key not in ("max_batch_size", "kv_cache_capacity_tokens", "enable_prefix_cache", "enable_expert_parallel")
}
DERIVED_KEYS: Final = tuple(_DERIVED_READERS)
"""What may stand in `derived_from`: the settings that take memory, and what the budget was told besides."""

# ---- names

SETTING_ALIASES: Final[Mapping[str, str]] = {
    "model_path": "model",
    "model_id": "model",
    "cards": "gpus",
    "num_gpus": "gpus",
    "max_num_seqs": "max_batch_size",
    "max_running_requests": "max_batch_size",
    "parallel": "max_batch_size",
    "np": "max_batch_size",
    "n_parallel": "max_batch_size",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_num_tokens": "max_num_batched_tokens",
    "max_batch_prefill_tokens": "max_num_batched_tokens",
    "n_batch": "max_num_batched_tokens",
    "ubatch_size": "physical_batch_tokens",
    "ub": "physical_batch_tokens",
    "n_ubatch": "physical_batch_tokens",
    # llama.cpp's context is the whole cache, which its slots share or divide; one request may get only a part.
    "ctx_size": "kv_cache_capacity_tokens",
    "n_ctx": "kv_cache_capacity_tokens",
    "max_batch_total_tokens": "kv_cache_capacity_tokens",
    "kv_cache_quant": "kv_cache_dtype",
    "cache_type_k": "kv_cache_dtype_k",
    "ctk": "kv_cache_dtype_k",
    "cache_type_v": "kv_cache_dtype_v",
    "ctv": "kv_cache_dtype_v",
    "kvu": "kv_unified",
    "enable_prefix_caching": "enable_prefix_cache",
    "disable_radix_cache": "enable_prefix_cache",
    "cache_prompt": "enable_prefix_cache",
    "quantize": "quantization",
    "device_memory_utilization": "gpu_memory_utilization",
    "mem_fraction_static": "gpu_memory_utilization",
    "cuda_memory_fraction": "gpu_memory_utilization",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "num_shard": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dp_size": "data_parallel_size",
    "ep": "expert_parallel_size",
    "ep_size": "expert_parallel_size",
    "moe_expert_parallel_size": "expert_parallel_size",
    "spec_tokens": "num_speculative_tokens",
    "speculative_num_steps": "num_speculative_tokens",
    "spec_draft_n_max": "num_speculative_tokens",
    "draft_max": "num_speculative_tokens",
    "speculate": "num_speculative_tokens",
    "n_gpu_layers": "gpu_layers",
    "ngl": "gpu_layers",
    "cpu_moe": "cpu_moe_layers",
    "cmoe": "cpu_moe_layers",
    "n_cpu_moe": "cpu_moe_layers",
    "ncmoe": "cpu_moe_layers",
    "swap_space": "swap_space_gb",
}
"""Engines' own names -> canonical key. All are accepted with `-` for `_` and with leading dashes too."""

_NEGATED: Final = frozenset({"disable_radix_cache"})
"""Names that say the opposite of their canonical key."""

_PER_COPY: Final[Mapping[str, str]] = {
    "max_num_seqs": "vLLM counts it for each data-parallel copy",
    "max_running_requests": (
        "SGLang counts it for each data-parallel copy, or over all of them where --enable-dp-attention divides it"
    ),
}
"""Names whose value is one copy's, where the canonical key is the whole target's."""

_LOGICAL: Final = (
    "is llama.cpp's logical batch in tokens, and elsewhere a number of requests; write max_num_batched_tokens or "
    "max_batch_size, or say engine: llamacpp"
)
_CONTEXT: Final = "write kv_cache_capacity_tokens or max_model_len, or say engine: llamacpp"
ENGINE_ALIASES: Final[Mapping[str, tuple[str, str, str]]] = {
    "max_total_tokens": (
        "sglang",
        "kv_cache_capacity_tokens",
        (
            "is the KV cache's size to SGLang and one request's length to TGI; write kv_cache_capacity_tokens or "
            "max_model_len, or say engine: sglang"
        ),
    ),
    "batch_size": ("llamacpp", "max_num_batched_tokens", _LOGICAL),
    "b": ("llamacpp", "max_num_batched_tokens", _LOGICAL),
    "c": ("llamacpp", "kv_cache_capacity_tokens", _CONTEXT),
}
"""Names understood only where the file names their engine: name -> (engine, canonical key, why and what to do)."""

_NEAR_MISSES: Final[Mapping[str, str]] = {
    "free_gpu_memory_fraction": "is a share of what weights leave free, and gpu_memory_utilization is one of the card",
    "kv_cache_free_gpu_memory_fraction": (
        "is a share of what weights leave free, and gpu_memory_utilization is one of the card"
    ),
    "max_input_tokens": "is the prompt's part alone; write max_model_len, prompt plus output",
    "max_input_length": "is the prompt's part alone; write max_model_len, prompt plus output",
    "max_concurrent_requests": "counts those that wait, too; write max_batch_size, those that run",
    "max_num_active_seqs": "is what may run where it is below max_num_seqs; write it as max_batch_size, alone",
    "num_gpu_blocks_override": "is a number of blocks; write kv_cache_capacity_tokens, blocks x tokens of a block",
    "max_prefill_tokens": "is bounded by the context, not by memory; write chunked_prefill_size",
    "speculative_num_draft_tokens": "counts the token after the drafted ones too; write num_speculative_tokens",
}
"""Names that look like a setting of ours and mean something else."""


def read_settings(path: str | Path) -> Settings:
    """Read a serving file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or says something that is unknown, given twice, of the wrong
            type or out of range. The message begins with `file:line` where there is a line.
    """
    return _settings(read_yaml(Path(path)), str(path))


def parse_settings(raw: bytes, path: str | Path) -> Settings:
    """As `read_settings`, of content that is meant for `path`.

    Raises:
        ConfigError: as there.
    """
    return _settings(parse_yaml(raw, str(path)), str(path))


def read_assignment(text: str, engine: str | None = None) -> tuple[str, Scalar]:
    """A setting as it is given on a command line, `NAME=VALUE`, under any of its names.

    Args:
        text: the setting.
        engine: whose names are meant where engines differ.

    Returns:
        The canonical key and its value.

    Raises:
        ConfigError: there is no such setting, or it cannot have this value.
    """
    name, sign, value = text.partition("=")
    if not sign or not text.isprintable():
        raise ConfigError(f"{text[:60]!r} is no setting: write NAME=VALUE, as in max_batch_size=48")
    top = parse_yaml(f"{name.strip()}: {value.strip()}".encode(), "setting").mapping()
    if len(top) != 1 or "derived_from" in top:
        raise ConfigError(f"{text[:60]!r} is no setting: write NAME=VALUE, as in max_batch_size=48")
    values, _, _ = _read(top, _READERS, engine)
    return next(iter(values.items()))


def _settings(root: Node, path: str) -> Settings:
    top = root.mapping()
    derived = top.pop("derived_from", None)
    values, nodes, spelt = _read(top, _READERS, _engine_of(top))
    lines = {key: node.line for key, node in nodes.items()}
    for key, node in nodes.items():
        plain = _plain(spelt[key])
        copies = values.get("data_parallel_size", 1)
        if plain in _PER_COPY and copies != 1:
            raise node.error(
                f"{_PER_COPY[plain]}, and data_parallel_size is {copies}; write max_batch_size, the whole target's "
                f"(the product)"
            )
    if values.get("enable_expert_parallel") is False and values.get("expert_parallel_size", 1) != 1:
        raise nodes["expert_parallel_size"].error("is above 1, and enable_expert_parallel is false; keep one")
    inputs: dict[str, Scalar] = {}
    if derived is not None:
        lines["derived_from"] = derived.line
        inputs, found, names = _read(derived.mapping(), _DERIVED_READERS, values.get("engine"))
        lines |= {f"derived_from.{key}": node.line for key, node in found.items()}
        spelt |= {f"derived_from.{key}": name for key, name in names.items()}
    return Settings(path=path, lines=lines, spelt=spelt, derived_from=inputs, **values)  # type: ignore[arg-type] # _READERS gives each its type


def _engine_of(top: Mapping[str, Node]) -> Scalar | None:
    return _engine(top["engine"]) if "engine" in top else None


def _read(
    given: Mapping[str, Node], readers: Mapping[str, _Reader], engine: Scalar | None
) -> tuple[dict[str, Scalar], dict[str, Node], dict[str, str]]:
    """Canonical key -> value, node and spelling."""
    values: dict[str, Scalar] = {}
    nodes: dict[str, Node] = {}
    spelt: dict[str, str] = {}
    for name, node in given.items():
        key = _canonical(name, node, readers, engine)
        if key in nodes:
            raise node.error(f"is given twice: line {nodes[key].line} has it as {spelt[key]!r}; keep one")
        values[key] = _not(node) if _plain(name) in _NEGATED else readers[key](node)
        nodes[key] = node
        spelt[key] = name
    return values, nodes, spelt


def _plain(given: str) -> str:
    return given.strip().lstrip("-").replace("-", "_")


def _canonical(given: str, node: Node, readers: Mapping[str, _Reader], engine: Scalar | None) -> str:
    """The canonical name of a key as it is spelt in the file."""
    plain = _plain(given)
    if plain in ENGINE_ALIASES:
        owner, key, advice = ENGINE_ALIASES[plain]
        if engine != owner:
            raise node.error(advice)
        return key
    if plain in _NEAR_MISSES:
        raise node.error(_NEAR_MISSES[plain])
    key = SETTING_ALIASES.get(plain, plain)
    if key not in readers:
        close = difflib.get_close_matches(plain.lower(), [*readers, *SETTING_ALIASES], n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(readers)}"
        inside = "" if readers is _READERS else " in derived_from"
        raise ConfigError(f"{node.where}: unknown key {given[:60]!r}{inside}; {advice}")
    return key


def spelt_value(spelling: str, value: Scalar) -> Scalar:
    """A canonical value as it is written under a key of the file."""
    return not value if _plain(spelling) in _NEGATED else value


# ---- what voids a batch size

_DIVIDE_UNASKED: Final = frozenset({"llamacpp"})
"""Engines that spread a model over all cards they see when the file says nothing of it."""
_SAME_KIND: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
}


def stale_inputs(settings: Settings, actual: Mapping[str, Scalar] | None = None) -> tuple[StaleInput, ...]:
    """The memory inputs that differ from those that `max_batch_size` was derived from.

    Compared is what `derived_from` remembers. A setting that the file leaves out is taken as unchanged, since the
    budget may have been told it on its command line, or it is the engine's own default. A parallel size is different:
    left out, it is 1 to an engine, in the file as in what is remembered. llama.cpp alone divides a model unasked, and
    a size that is left out says nothing there.

    Args:
        settings: the file.
        actual: what is known from elsewhere, by canonical key: a command line, a start-up log. Stands before the file.

    Returns:
        Nothing where no batch size is set, or none was derived.
    """
    if settings.max_batch_size is None or not settings.derived_from:
        return ()
    now = settings.values() | dict(actual or {})
    spread = settings.expert_parallel
    if spread is not None:
        now.setdefault("expert_parallel_size", spread)
    then = dict(settings.derived_from)
    if now.get("engine", then.get("engine")) not in _DIVIDE_UNASKED:
        for key in SPLIT_KEYS:
            if key in now or key in then:
                now.setdefault(key, 1)
                then.setdefault(key, 1)
    return tuple(
        StaleInput(
            key=key,
            was=then[key],
            now=now[key],
            was_line=settings.lines.get(f"derived_from.{key}"),
            now_line=settings.lines.get(key),
        )
        for key in (*SPLIT_KEYS, *(key for key in DERIVED_KEYS if key not in SPLIT_KEYS))
        if key in then and key in now and not _same(key, then[key], now[key])
    )


def stale_warning(settings: Settings, actual: Mapping[str, Scalar] | None = None) -> str | None:
    """One sentence for every command that reads a serving file: its batch size is no longer founded; None if it is."""
    stale = stale_inputs(settings, actual)
    if not stale:
        return None
    changes = ", ".join(
        f"{one.key} {_told(one.was, one.was_line)}, now {_told(one.now, one.now_line)}" for one in stale
    )
    return (
        f"{settings.where('max_batch_size')}: max_batch_size {settings.max_batch_size} is stale: it was derived from "
        f"{changes}; work it out again with `plimsoll budget`"
    )


def _told(value: Scalar, line: int | None) -> str:
    said = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{said} (line {line})" if line is not None else said


def _same(key: str, was: Scalar, now: Scalar) -> bool:
    if isinstance(was, str) and isinstance(now, str):
        if key == "model":
            return was == now
        if key == "gpu":
            was, now = ("".join(filter(str.isalnum, name.casefold())) for name in (was, now))
            return was == now
        was, now = was.casefold(), now.casefold()
        return _SAME_KIND.get(was, was) == _SAME_KIND.get(now, now)
    if isinstance(was, int | float) and isinstance(now, int | float):
        return math.isclose(was, now, rel_tol=1e-9)
    return was == now
