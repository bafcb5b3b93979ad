"""A serving file as an engine's flags, so that a restart command can say what the file says.

What an engine has no flag for is named with the reason, never dropped in silence. The flags are those of vLLM 0.32
(`vllm/engine/arg_utils.py`), SGLang of 2026 (`python/sglang/srt/server_args.py`) and llama.cpp (`common/arg.cpp`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from serving.errors import ConfigError
from serving.settings.keys import Scalar, Settings

__all__ = ["EngineArguments", "engine_arguments"]


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """A serving file in one engine's words.

    Attributes:
        engine: the engine.
        words: its arguments, each flag and each value a word of its own.
        left_out: canonical key -> why none of the words says it.
    """

    engine: str
    words: tuple[str, ...]
    left_out: Mapping[str, str]


def engine_arguments(settings: Settings, engine: str | None = None) -> EngineArguments:
    """The flags that `engine` takes for these settings.

    Args:
        settings: the file.
        engine: the engine; None takes the file's.

    Raises:
        ConfigError: neither names an engine, or they name two.
    """
    named = engine or settings.engine
    if named is None:
        raise ConfigError(f"{settings.path}: says no engine; add the line `engine: vllm`, or name one")
    if named not in _RULES:
        raise ConfigError(f"engine {named!r} is not known; known: {', '.join(_RULES)}")
    if settings.engine not in (None, named):
        raise ConfigError(f"{settings.where('engine')}: engine is {settings.engine}, but {named} was asked for")
    words: list[str] = []
    left_out: dict[str, str] = {}
    for key, value in settings.values().items():
        if key in _DESCRIPTIONS:
            continue
        said = _RULES[named][key](settings, value)
        if isinstance(said, str):
            left_out[key] = said
        else:
            words.extend(said)
    return EngineArguments(named, tuple(words), left_out)


_DESCRIPTIONS: Final = frozenset({"engine", "gpu", "gpus"})
"""Where the server is meant to run; nothing that it is told."""

_Rule: TypeAlias = Callable[[Settings, Scalar], list[str] | str]
"""Words for a value, or why there are none."""


def _flag(name: str, kinds: Mapping[str, str] | None = None) -> _Rule:
    """A flag with its value; `kinds` are values that this engine spells otherwise."""
    return lambda _, value: [name, (kinds or {}).get(str(value).lower(), _word(value))]


def _kind(name: str, kinds: Mapping[str, str], strangers: frozenset[str], advice: str) -> _Rule:
    """A flag for an element type; of those of other engines, that this one would refuse, says so."""

    def rule(_: Settings, value: Scalar) -> list[str] | str:
        kind = str(value).lower()
        return advice.format(value) if kind in strangers else [name, kinds.get(kind, _word(value))]

    return rule


def _positional(_: Settings, value: Scalar) -> list[str]:
    return [_word(value)]


def _switch(on: str | None, off: str | None) -> _Rule:
    """A flag without value for each state; None where the engine does it unasked."""

    def rule(_: Settings, value: Scalar) -> list[str]:
        name = on if value else off
        return [] if name is None else [name]

    return rule


def _per_copy(name: str) -> _Rule:
    """A flag that counts for each data-parallel copy what the file counts over all."""

    def rule(settings: Settings, value: Scalar) -> list[str] | str:
        copies = settings.data_parallel_size or 1
        if int(value) < copies:
            return f"{name} counts for each of {copies} copies, and {value} over all are less than one each"
        return [name, str(int(value) // copies)]

    return rule


def _one_cache(_: Settings, value: Scalar) -> list[str] | str:
    return [] if value else "requests always share one KV cache here"


def _nothing(reason: str) -> _Rule:
    return lambda _, __: reason


def _weights_method(rule: _Rule) -> _Rule:
    return lambda settings, value: [] if value == "none" else rule(settings, value)


def _word(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value)


# ---- drafting


def _drafting(words: Callable[[int], list[str]]) -> dict[str, _Rule]:
    """Layers for multi-token prediction and what they draft make one set of flags."""

    def tokens(settings: Settings, value: Scalar) -> list[str] | str:
        if not value:
            return []
        if not settings.mtp_layers:
            return "the method of drafting is not in the file: say mtp_layers, or give the engine's own flags"
        return words(int(value))

    def layers(settings: Settings, value: Scalar) -> list[str] | str:
        if value and not settings.num_speculative_tokens:
            return "how many tokens are drafted is not in the file: say num_speculative_tokens"
        return []

    return {"num_speculative_tokens": tokens, "mtp_layers": layers}


def _vllm_drafting(tokens: int) -> list[str]:
    return ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})]


def _sglang_drafting(tokens: int) -> list[str]:
    method = ["--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1"]
    # The tokens that are verified are those drafted and the one before them.
    return [*method, "--speculative-num-steps", str(tokens), "--speculative-num-draft-tokens", str(tokens + 1)]


# ---- experts


def _vllm_experts(settings: Settings, value: Scalar) -> list[str] | str:
    cards = (settings.tensor_parallel_size or 1) * (settings.data_parallel_size or 1)
    if value not in (1, cards):
        return f"vLLM spreads experts over all {cards} tensor- and data-parallel cards or over none, not over {value}"
    return ["--enable-expert-parallel"] if int(value) > 1 and not settings.enable_expert_parallel else []


# ---- llama.cpp

_GGML_KINDS: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_GGML_SPELLING: Final = {"bfloat16": "bf16", "float16": "f16", "fp16": "f16", "half": "f16", "float32": "f32"}


_TORCH_SPELLING: Final = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "fp32": "float32"}
"""vLLM and SGLang know the long names, `half` and `float` alone."""
_STRANGE_KINDS: Final = frozenset(_GGML_KINDS) - {"f16", "bf16"} | {"float32", "fp32"}
"""Element types of a KV cache that only llama.cpp has."""


def _shares_cache(settings: Settings) -> bool:
    """Whether llama.cpp's slots share one cache: as told, or when it is left to choose their number."""
    return settings.max_batch_size is None if settings.kv_unified is None else settings.kv_unified


def _llamacpp_context(settings: Settings, value: Scalar) -> list[str] | str:
    """`-c` is the whole cache: slots that have a part each need it as often as there are slots."""
    length = int(value)
    if _shares_cache(settings):
        total = settings.kv_cache_capacity_tokens or length
        if length == total:
            return [] if settings.kv_cache_capacity_tokens else ["--ctx-size", str(total)]
        return f"slots share a cache of {total} tokens, and any one may use all of it"
    slots = settings.max_batch_size
    if slots is None:
        return "--ctx-size is the whole cache, and how many slots divide it is not in the file: say max_batch_size"
    if settings.kv_cache_capacity_tokens is None:
        return ["--ctx-size", str(length * slots)]
    if settings.kv_cache_capacity_tokens // slots == length:
        return []
    return (
        f"each of {slots} slots has {settings.kv_cache_capacity_tokens // slots} of the "
        f"{settings.kv_cache_capacity_tokens} tokens that kv_cache_capacity_tokens says"
    )


def _llamacpp_kind(*flags: str) -> _Rule:
    def rule(settings: Settings, value: Scalar) -> list[str] | str:
        kind = str(value).lower()
        if kind == "auto":
            return []
        kind = _GGML_SPELLING.get(kind, kind)
        if kind not in _GGML_KINDS:
            return f"llama.cpp has no element type {value}; it has {', '.join(_GGML_KINDS)}"
        given = {"--cache-type-k": settings.kv_cache_dtype_k, "--cache-type-v": settings.kv_cache_dtype_v}
        # The type of both is said for those parts that have none of their own.
        both = len(flags) > 1
        return [word for flag in flags if not (both and given[flag]) for word in (flag, kind)]

    return rule


def _llamacpp_experts(_: Settings, value: Scalar) -> list[str]:
    return ["--cpu-moe"] if value == "all" else ["--n-cpu-moe", str(value)]


def _single_copy(_: Settings, value: Scalar) -> list[str] | str:
    return [] if value == 1 else "a llama.cpp server is one copy; start one server for each"


def _offload_gib(_: Settings, value: Scalar) -> list[str] | str:
    if int(value) != value:
        return "SGLang takes whole gigabytes"
    return ["--cpu-offload-gb", str(int(value))]


def _sglang_experts_switch(settings: Settings, value: Scalar) -> list[str] | str:
    if value and settings.expert_parallel_size is None:
        return "SGLang asks for a number of cards: say expert_parallel_size"
    return []


_GGUF_ONLY: Final = _nothing("only llama.cpp keeps single layers elsewhere")
_PARTS: Final = _nothing("keys and values have one element type here: say kv_cache_dtype")
_OWN_FILE: Final = _nothing("a GGUF file has its own")
_BY_DEVICES: Final = _nothing("llama.cpp divides a model by --split-mode and --tensor-split over the devices it sees")

_RULES: Final[Mapping[str, Mapping[str, _Rule]]] = {
    "vllm": {
        # `vllm serve` takes it in the first place and refuses the flag.
        "model": _positional,
        "max_batch_size": _per_copy("--max-num-seqs"),
        "max_model_len": _flag("--max-model-len"),
        "max_num_batched_tokens": _flag("--max-num-batched-tokens"),
        "physical_batch_tokens": _nothing("vLLM computes the whole step at once"),
        "kv_cache_capacity_tokens": _nothing(
            "vLLM counts blocks, and their size is its own affair: --num-gpu-blocks-override, blocks of one copy"
        ),
        "kv_cache_dtype": _kind(
            "--kv-cache-dtype",
            {**_TORCH_SPELLING, "half": "float16"},
            _STRANGE_KINDS,
            "vLLM has no KV cache of type {}; it has auto, float16, bfloat16 and kinds of fp8",
        ),
        "kv_cache_dtype_k": _PARTS,
        "kv_cache_dtype_v": _PARTS,
        "kv_unified": _one_cache,
        "enable_prefix_cache": _switch("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "quantization": _weights_method(_flag("--quantization")),
        "dtype": _flag("--dtype", _TORCH_SPELLING),
        "gpu_memory_utilization": _flag("--gpu-memory-utilization"),
        "tensor_parallel_size": _flag("--tensor-parallel-size"),
        "pipeline_parallel_size": _flag("--pipeline-parallel-size"),
        "data_parallel_size": _flag("--data-parallel-size"),
        "expert_parallel_size": _vllm_experts,
        "enable_expert_parallel": _switch("--enable-expert-parallel", None),
        **_drafting(_vllm_drafting),
        "gpu_layers": _GGUF_ONLY,
        "cpu_moe_layers": _GGUF_ONLY,
        "cpu_offload_gb": _flag("--cpu-offload-gb"),
        "swap_space_gb": _nothing("vLLM has had none since its first engine was removed"),
    },
    "sglang": {
        "model": _flag("--model-path"),
        # Each copy runs so many, unless --enable-dp-attention divides them, which a serving file cannot ask for.
        # Source: `self.dp_size` of sglang/srt/model_executor/model_runner.py.
        "max_batch_size": _per_copy("--max-running-requests"),
        "max_model_len": _flag("--context-length"),
        "max_num_batched_tokens": _flag("--chunked-prefill-size"),
        "physical_batch_tokens": _nothing("SGLang computes the whole chunk at once"),
        "kv_cache_capacity_tokens": _per_copy("--max-total-tokens"),
        "kv_cache_dtype": _kind(
            "--kv-cache-dtype",
            {"fp8": "fp8_e4m3"},
            _STRANGE_KINDS | {"f16", "fp16", "float16", "half"},
            "SGLang has no KV cache of type {}; it has auto (the model's own), bfloat16, fp8_e4m3 and fp8_e5m2",
        ),
        "kv_cache_dtype_k": _PARTS,
        "kv_cache_dtype_v": _PARTS,
        "kv_unified": _one_cache,
        "enable_prefix_cache": _switch(None, "--disable-radix-cache"),
        "quantization": _weights_method(_flag("--quantization")),
        "dtype": _flag("--dtype", _TORCH_SPELLING),
        "gpu_memory_utilization": _flag("--mem-fraction-static"),
        "tensor_parallel_size": _flag("--tp-size"),
        "pipeline_parallel_size": _flag("--pp-size"),
        "data_parallel_size": _flag("--dp-size"),
        "expert_parallel_size": _flag("--ep-size"),
        "enable_expert_parallel": _sglang_experts_switch,
        **_drafting(_sglang_drafting),
        "gpu_layers": _GGUF_ONLY,
        "cpu_moe_layers": _GGUF_ONLY,
        "cpu_offload_gb": _offload_gib,
        "swap_space_gb": _nothing("SGLang has none"),
    },
    "llamacpp": {
        "model": _flag("--model"),
        "max_batch_size": _flag("--parallel"),
        "max_model_len": _llamacpp_context,
        "max_num_batched_tokens": _flag("--batch-size"),
        "physical_batch_tokens": _flag("--ubatch-size"),
        "kv_cache_capacity_tokens": _flag("--ctx-size"),
        "kv_cache_dtype": _llamacpp_kind("--cache-type-k", "--cache-type-v"),
        "kv_cache_dtype_k": _llamacpp_kind("--cache-type-k"),
        "kv_cache_dtype_v": _llamacpp_kind("--cache-type-v"),
        "kv_unified": _switch("--kv-unified", "--no-kv-unified"),
        "enable_prefix_cache": _switch("--cache-prompt", "--no-cache-prompt"),
        "quantization": _weights_method(_OWN_FILE),
        "dtype": _OWN_FILE,
        "gpu_memory_utilization": _nothing("llama.cpp takes what it needs; it leaves a margin with --fit-target"),
        "tensor_parallel_size": _BY_DEVICES,
        "pipeline_parallel_size": _BY_DEVICES,
        "data_parallel_size": _single_copy,
        "expert_parallel_size": _BY_DEVICES,
        "enable_expert_parallel": _BY_DEVICES,
        "mtp_layers": _nothing("how llama.cpp is told to draft differs between its builds"),
        "num_speculative_tokens": _nothing("how llama.cpp is told to draft differs between its builds"),
        "gpu_layers": _flag("--n-gpu-layers"),
        "cpu_moe_layers": _llamacpp_experts,
        "cpu_offload_gb": _nothing("llama.cpp counts layers: say gpu_layers or cpu_moe_layers"),
        "swap_space_gb": _nothing("llama.cpp has none"),
    },
}
