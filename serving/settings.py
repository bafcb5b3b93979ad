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
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from serving.engines import ENGINES
from serving.errors import ConfigError

__all__ = ["MAX_BATCH_SIZE_LIMIT", "SETTING_ALIASES", "Settings", "read_settings"]

MAX_BATCH_SIZE_LIMIT = 65_536
"""No server batches more than this; a larger figure is a slip of the keyboard."""

_FILE_LIMIT_BYTES = 1_000_000


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


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be text (put quotes around it if it looks like a number or a date)")
    return value


def _engine(value: Any) -> str:
    name = _text(value).lower().replace(".", "").replace("-", "").replace("_", "")
    if name not in ENGINES:
        raise ValueError(f"must be one of {', '.join(ENGINES)}")
    return name


def _count(largest: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError("must be a whole number, without quotes or fraction")
        if not 1 <= value <= largest:
            raise ValueError(f"must be between 1 and {largest}")
        return value

    return read


def _ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("must be a number")
    if not 0 < value <= 1:
        raise ValueError("must be above 0 and at most 1 (a ratio, not percent)")
    return float(value)


_LARGEST_TOKENS = 1_000_000_000
_READERS: Mapping[str, Callable[[Any], str | int | float]] = {
    "model": _text,
    "engine": _engine,
    "max_batch_size": _count(MAX_BATCH_SIZE_LIMIT),
    "max_model_len": _count(_LARGEST_TOKENS),
    "max_num_batched_tokens": _count(_LARGEST_TOKENS),
    "kv_cache_capacity_tokens": _count(_LARGEST_TOKENS * 1000),
    "kv_cache_dtype": _text,
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
    name = str(path)
    values: dict[str, str | int | float] = {}
    lines: dict[str, int] = {}
    spelt: dict[str, str] = {}
    for key_node, value_node in _pairs(_read_text(path, name), name):
        line = key_node.start_mark.line + 1
        given, key = _key(key_node, f"{name}:{line}")
        what = f"{name}:{line}: {given if given == key else f'{given} ({key})'}"
        if key in values:
            raise ConfigError(f"{what} is given twice: line {lines[key]} has it as {spelt[key]!r}; keep one")
        values[key] = _read_value(key, value_node, what)
        lines[key], spelt[key] = line, given
    return Settings(path=name, lines=lines, **values)  # type: ignore[arg-type] # _READERS gives each field its type


def _read_text(path: str | Path, name: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read the settings file: {error.strerror or error}") from error
    if len(data) > _FILE_LIMIT_BYTES:
        raise ConfigError(f"{name}: too large for a settings file (over {_FILE_LIMIT_BYTES:,} bytes)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text, so not a settings file") from error


def _pairs(text: str, name: str) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{name}: not valid YAML: {error.reason} at character {error.position}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deeply for a settings file") from error
    if root is None:
        raise ConfigError(f"{name}: the settings file is empty; it needs lines such as max_batch_size: 48")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{name}:{root.start_mark.line + 1}: expected lines of `key: value`, such as max_batch_size: 48"
        )
    pairs: list[tuple[yaml.Node, yaml.Node]] = root.value
    return pairs


def _key(node: yaml.Node, where: str) -> tuple[str, str]:
    """The key as spelt and its canonical name."""
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where}: a key must be a name")
    given = str(node.value)
    plain = given.strip().replace("-", "_")
    key = SETTING_ALIASES.get(plain, plain)
    if key not in _READERS:
        close = difflib.get_close_matches(plain.lower(), [*_READERS, *SETTING_ALIASES], n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(_READERS)}"
        raise ConfigError(f"{where}: unknown key {given[:60]!r}; {advice}")
    return given, key


def _read_value(key: str, node: yaml.Node, what: str) -> str | int | float:
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{what} must be a single value")
    shown = repr(str(node.value)[:60])
    try:
        value = SafeConstructor().construct_document(node)
    except (yaml.MarkedYAMLError, ValueError, LookupError, AttributeError) as error:
        # A date that does not exist, a number of thousands of digits; and YAML believes explicit tags: `!!bool x`.
        raise ConfigError(f"{what} is {shown}, which YAML cannot read as a value") from error
    if value is None:
        raise ConfigError(f"{what} has no value; give one or delete the line")
    if isinstance(value, int) and not isinstance(value, bool) and str(value) != str(node.value).replace("_", ""):
        # 010 is eight to YAML, and 1:30 is ninety.
        raise ConfigError(f"{what} is {shown}, which YAML reads as {value}; write plain digits")
    try:
        return _READERS[key](value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is {shown}: it {error}") from error
