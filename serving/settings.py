"""The engine-neutral serving file: what the server under test is meant to run with, in YAML.

    model: /models/hy3
    engine: vllm
    max_batch_size: 48
    max_model_len: 32768
    tensor_parallel_size: 8

The names that vLLM, SGLang and llama.cpp use for the same settings are accepted too, with `-` or `_`. What is not known
is refused with file and line, because a misspelt limit that is silently ignored is a wrong verdict later.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serving.engines import ENGINES
from serving.errors import ConfigError
from serving.strict_yaml import Node, read_yaml

__all__ = ["MAX_BATCH_SIZE_LIMIT", "SETTING_ALIASES", "Settings", "read_settings"]

MAX_BATCH_SIZE_LIMIT = 65_536
"""No server batches more than this; a larger figure is a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the serving file says; None where it says nothing.

    Attributes:
        path: the file, as given.
        lines: canonical key -> line in the file, from 1.
        model: name or path of the model.
        engine: one of the engines Plimsoll knows.
        max_batch_size: requests that may run at once, over the whole target.
        max_model_len: longest prompt plus output of one request, in tokens.
        max_num_batched_tokens: token budget of one engine step.
        kv_cache_capacity_tokens: tokens that the KV cache of the whole target holds.
        kv_cache_dtype: element type of the KV cache, as the engine spells it.
        gpu_memory_utilization: share of each GPU's memory that the engine may take, 0..1.
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: stages of layers.
        data_parallel_size: whole copies of the model.
        expert_parallel_size: GPUs over which experts are spread.
    """

    path: str
    lines: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    engine: str | None = None
    max_batch_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_capacity_tokens: int | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    expert_parallel_size: int | None = None

    def where(self, key: str) -> str:
        """`file:line` of a canonical key, or the file alone when the key is not in it."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else self.path


def _engine(node: Node) -> str:
    name = node.text().lower().replace(".", "").replace("-", "").replace("_", "")
    if name not in ENGINES:
        raise node.error(f"must be one of {', '.join(ENGINES)}")
    return name


def _count(largest: int) -> Callable[[Node], int]:
    return lambda node: node.integer(1, largest)


def _ratio(node: Node) -> float:
    value = node.number()
    if not 0 < value <= 1:
        raise node.error(f"is {value:g}; it must be above 0 and at most 1 (a ratio, not percent)")
    return value


_LARGEST_TOKENS = 1_000_000_000
_READERS: Mapping[str, Callable[[Node], str | int | float]] = {
    "model": Node.text,
    "engine": _engine,
    "max_batch_size": _count(MAX_BATCH_SIZE_LIMIT),
    "max_model_len": _count(_LARGEST_TOKENS),
    "max_num_batched_tokens": _count(_LARGEST_TOKENS),
    "kv_cache_capacity_tokens": _count(_LARGEST_TOKENS * 1000),
    "kv_cache_dtype": Node.text,
    "gpu_memory_utilization": _ratio,
    "tensor_parallel_size": _count(65_536),
    "pipeline_parallel_size": _count(65_536),
    "data_parallel_size": _count(65_536),
    "expert_parallel_size": _count(65_536),
}

SETTING_ALIASES: Mapping[str, str] = {
    "model_path": "model",
    "max_num_seqs": "max_batch_size",
    "max_running_requests": "max_batch_size",
    "parallel": "max_batch_size",
    "np": "max_batch_size",
    "context_length": "max_model_len",
    # llama.cpp's context is the whole cache, which its slots share or divide; one request may get only a part.
    "ctx_size": "kv_cache_capacity_tokens",
    "n_ctx": "kv_cache_capacity_tokens",
    "max_total_tokens": "kv_cache_capacity_tokens",
    "mem_fraction_static": "gpu_memory_utilization",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "expert_parallel_size",
}
"""Engines' own names -> canonical key. All are accepted with `-` for `_` too."""


def read_settings(path: str | Path) -> Settings:
    """Read a serving file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or says something that is unknown, given twice, of the wrong
            type or out of range. The message begins with `file:line` where there is a line.
    """
    values: dict[str, str | int | float] = {}
    nodes: dict[str, tuple[str, Node]] = {}
    for given, node in read_yaml(Path(path)).mapping().items():
        key = _canonical(given, node)
        if key in nodes:
            earlier, first = nodes[key]
            raise node.error(f"is given twice: line {first.line} has it as {earlier!r}; keep one")
        values[key] = _READERS[key](node)
        nodes[key] = (given, node)
    lines = {key: node.line for key, (_, node) in nodes.items()}
    return Settings(path=str(path), lines=lines, **values)  # type: ignore[arg-type] # _READERS gives each its type


def _canonical(given: str, node: Node) -> str:
    """The canonical name of a key as it is spelt in the file."""
    plain = given.strip().replace("-", "_")
    key = SETTING_ALIASES.get(plain, plain)
    if key not in _READERS:
        close = difflib.get_close_matches(plain.lower(), [*_READERS, *SETTING_ALIASES], n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(_READERS)}"
        raise ConfigError(f"{node.where}: unknown key {given[:60]!r}; {advice}")
    return key
