"""Reads a model's shape from a file, a folder or a name."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from serving.errors import ConfigError
from serving.model.config import read_object
from serving.model.families import shape_of
from serving.model.gguf import part_names, read_gguf
from serving.model.gguf_model import shape_of_gguf
from serving.model.shape import ModelShape

__all__ = ["BUILT_IN_MODELS", "read_model"]


def read_model(source: str | Path) -> ModelShape:
    """Read a model's shape.

    Args:
        source: a `config.json`, a GGUF file (of a model that is split, any one), a folder with either, or one of the
            names in `BUILT_IN_MODELS`.

    Raises:
        ConfigError: there is no such file or name, it describes no model, or something in it is missing or not known.
            The message names the file.
    """
    name = str(source)
    if name.lower() in _BUILT_IN:
        return shape_of(_BUILT_IN[name.lower()], name=name.lower(), where=f"built-in model {name.lower()}")
    path = Path(source)
    try:
        if path.is_dir():
            path = _in_folder(path)
        is_file = path.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ConfigError(f"{name[:200]}: cannot be read: {error.strerror or error}") from error
    if not is_file:
        close = difflib.get_close_matches(name.lower(), BUILT_IN_MODELS, n=1)
        advice = f"; did you mean {close[0]!r}?" if close else f"; built-in models: {', '.join(BUILT_IN_MODELS)}"
        raise ConfigError(f"{path}: no such file, nor a model known by that name{advice}")
    if path.suffix.lower() == ".gguf":
        return shape_of_gguf(read_gguf(path), name=path.stem)
    title = path.resolve().parent.name if path.name == "config.json" else path.stem
    return shape_of(read_object(path), name=title, where=str(path), folder=path.parent)


def _in_folder(folder: Path) -> Path:
    """The file that describes the model in a folder: its `config.json`, or else its only GGUF model."""
    config = folder / "config.json"
    if config.is_file():
        return config
    # A vision part lies beside the model in a file of its own.
    files = [path for path in sorted(folder.glob("*.gguf")) if "mmproj" not in path.name.lower()]
    if not files:
        return config
    if set(part_names(files[0])) != {path.name for path in files}:
        names = ", ".join(path.name for path in files[:5])
        raise ConfigError(f"{folder}: has several GGUF models ({names}); name one of the files")
    return files[0]


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
