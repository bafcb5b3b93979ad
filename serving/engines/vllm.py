"""vLLM, V0 and V1, from 0.6 on.

Series are per engine (`engine` is the data-parallel rank). Gauges are published on engine steps only, so they freeze
when the engine does. `_perc` is a ratio in spite of its name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serving.engines.base import (
    DEVICE_OUT_OF_MEMORY,
    Complaint,
    Dialect,
    Engine,
    Limits,
    LogDump,
    LogFact,
    LogRule,
    LogTable,
    Reading,
    Source,
    whole_number,
)

__all__ = ["VLLM"]

_NO_BATCH_LIMIT = (
    "vLLM does not tell max_num_seqs over HTTP: give it in the settings file (max_batch_size), or give the start-up "
    "log (which has it only when it is not the default)"
)
_GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")


def _read_limits(card: Mapping[str, Any], pages: Mapping[str, Any], reading: Reading | None) -> Limits:
    page = pages.get("/version")
    version = page.get("version") if isinstance(page, dict) else None
    capacity = reading.values.get("kv_cache_capacity_tokens") if reading is not None else None
    return Limits(
        version=version if isinstance(version, str) else None,
        context_tokens=whole_number(card.get("max_model_len")),
        kv_cache_capacity_tokens=whole_number(capacity),
        kv_cache_capacity_source=reading.sources["kv_cache_capacity_tokens"] if reading and capacity else None,
        notes=(_NO_BATCH_LIMIT,),
    )


_BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)


def _named(figure: str) -> str:
    return rf"(?P<{figure}>-?[\d.]{{1,20}}) ?Gi?B"


def _settle(told: Mapping[str, LogFact], figures: Mapping[tuple[str, str], float]) -> dict[str, LogFact]:
    settled = _capacity(told, figures)
    if "concurrency_tokens" in told:
        # Printed last, so after all that may have cut it.
        settled["max_model_len"] = told["concurrency_tokens"]
    flag = told.get("enable_expert_parallel")
    if flag is not None and flag.value is True:
        parts = [told[key].value for key in ("tensor_parallel_size", "data_parallel_size") if key in told]
        if parts and all(isinstance(part, int) for part in parts):
            settled["expert_parallel_size"] = LogFact(math.prod(int(part) for part in parts), flag.line, flag.text)
    return settled


def _capacity(told: Mapping[str, LogFact], figures: Mapping[tuple[str, str], float]) -> dict[str, LogFact]:
    """Tokens that the KV cache of one replica holds, and whether the model is a hybrid."""
    evidence = told.get("kv_tokens") or told.get("kv_blocks")
    if evidence is None:
        return {}
    concurrency, length = told.get("concurrency"), told.get("concurrency_tokens")
    held = None
    if concurrency is not None and length is not None:
        held = int(float(concurrency.value) * float(length.value))
    tokens = [int(value) for (_, figure), value in figures.items() if figure == "kv_tokens"]
    if not tokens:
        # V0 and early V1 printed blocks and not their size; the concurrency printed beside it has it.
        blocks = min(int(value) for (_, figure), value in figures.items() if figure == "kv_blocks")
        block = told.get("block_size")
        size = block.value if block is not None and isinstance(block.value, int) else None
        if size is None and held is not None:
            size = min(_BLOCK_SIZES, key=lambda candidate: abs(candidate * blocks - held))
        return {} if size is None else {"kv_cache_capacity_tokens": replace(evidence, value=size * blocks)}
    capacity = min(tokens)
    if concurrency is not None and length is not None and held is not None:
        # Printed with two decimals, and in whole blocks.
        doubt = 0.02 * capacity + 0.01 * float(length.value) + _BLOCK_SIZES[-1]
        if abs(held - capacity) > doubt:
            # Releases before 0.2x divided the blocks by the number of layer groups in one figure and not in the other.
            return {"hybrid": concurrency, "kv_cache_capacity_tokens": replace(concurrency, value=held)}
    return {"kv_cache_capacity_tokens": replace(evidence, value=capacity)}


_ARGUMENTS = {
    "model": "model",
    "model_tag": "model",
    "max_num_seqs": "max_batch_size",
    "max_model_len": "asked_max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    # Then every replica is a server with a log of its own.
    "data_parallel_rank": "one_replica",
    "data_parallel_external_lb": "one_replica",
    "enable_expert_parallel": "enable_expert_parallel",
    "enable_prefix_caching": "enable_prefix_cache",
    "quantization": "quantization",
    "cpu_offload_gb": "cpu_offload_gb",
    "swap_space": "swap_space_gb",
    "block_size": "block_size",
}
_LOG = LogTable(
    # The dump of a dying engine names itself too, so the words go as far as "Initializing".
    starts=(
        "vLLM API server version",
        "non-default args: ",
        "Initializing a V1 LLM engine (v",
        "Initializing a V0 LLM engine (v",
        "Initializing an LLM engine (v",
    ),
    dumps=(
        LogDump("non-default args: ", _ARGUMENTS),
        LogDump("args: Namespace(", _ARGUMENTS),  # to 0.9: all of them, the defaults too
        LogDump(
            ") with config: ",
            {
                "model": "model",
                "dtype": "dtype",
                "max_seq_len": "max_model_len",
                "quantization": "quantization",
                "enable_prefix_caching": "enable_prefix_cache",
                "served_model_name": "served_as",
                "kv_cache_dtype": "kv_cache_dtype",
                "tensor_parallel_size": "tensor_parallel_size",
                "pipeline_parallel_size": "pipeline_parallel_size",
                "data_parallel_size": "data_parallel_size",
            },
            nones={"quantization": "none"},
        ),
    ),
    rules=(
        LogRule("LLM engine (v", r"LLM engine \(v(?P<version>[^)\s]+)\)"),
        LogRule("API server version", r"API server version (?P<version>\d\S*)"),
        LogRule("version ", r"█ +version (?P<version>\d\S*)"),
        LogRule("Using max model len", r"Using max model len (?P<max_model_len>\d+)"),
        LogRule("max_seq_len=", r"\bmax_seq_len=(?P<max_model_len>\d+)"),
        LogRule(
            "Auto-fit max_model_len",
            r"Auto-fit max_model_len: reduced from (?P<asked>[\d,]+) to (?P<taken>[\d,]+)",
            clamps="max_model_len",
        ),
        LogRule(
            "apping the max",
            r"[Cc]apping the max(?:imum)? (?:model )?len(?:gth)?\b[^(]*\([^()\d]*(?P<taken>\d+)\)",
            clamps="max_model_len",
        ),
        LogRule("max_num_batched_tokens=", r"enabled with max_num_batched_tokens=(?P<max_num_batched_tokens>\d+)"),
        LogRule("data type to store kv cache", r"Using (?P<kv_cache_dtype>\w+) data type to store kv cache"),
        LogRule("Starting to load model", r"Starting to load model", phase="weights"),
        LogRule(" took ", rf"(?:Loading model weights|Model loading) took {_named('weights_gib')}", phase="profile"),
        # 0.6 and V0, in one line and in several
        LogRule("model weights take", rf"model weights take +{_named('weights_gib')}"),
        LogRule("non_torch_memory", rf"non_torch_memory(?: takes|=)? *{_named('non_torch_gib')}"),
        LogRule("activation peak memory", rf"activation peak memory(?: takes)? +{_named('activations_gib')}"),
        LogRule("for KV Cache is", rf"reserved for KV Cache is {_named('kv_gib')}", phase="kv_pool"),
        LogRule("available_kv_cache_memory", rf"available_kv_cache_memory +{_named('kv_gib')}", phase="kv_pool"),
        LogRule("kv_cache_size=", rf"kv_cache_size={_named('kv_gib')}", phase="kv_pool"),
        LogRule("gpu_memory_utilization", r"gpu_memory_utilization(?: +\(|=| +)(?P<gpu_memory_utilization>[01]?\.\d+)"),
        LogRule(" blocks: ", r"# (?!CPU)\w+ blocks: (?P<kv_blocks>\d+)", phase="kv_pool"),
        # V1
        LogRule("Available KV cache memory", rf"Available KV cache memory: {_named('kv_gib')}", phase="kv_pool"),
        LogRule("memory for KV Cache", rf"[Rr]eserved {_named('kv_gib')} memory for KV Cache", phase="kv_pool"),
        LogRule(
            "for KV cache on node", r"Explicitly set \((?P<kv_gib>[\d.]+)/[\d.]+\) GiB for KV cache", phase="kv_pool"
        ),
        LogRule("num_gpu_blocks_override=", r"num_gpu_blocks_override=(?P<blocks_override>\d+)"),
        LogRule("KV cache size: ", r"KV cache size: (?P<kv_tokens>[\d,]+) tokens", phase="kv_pool"),
        LogRule(
            "Maximum concurrency for",
            r"Maximum concurrency for (?P<concurrency_tokens>[\d,]+) tokens per request: (?P<concurrency>[\d.]+)x",
        ),
        LogRule("padding layers, may waste", r"padding layers, may waste", hybrid=True),
        LogRule("Setting attention block size", r"Setting attention block size to \d+ tokens", hybrid=True),
        LogRule("Desired GPU memory util", r"Desired GPU memory utilization is \((?P<gpu_memory_utilization>[\d.]+)"),
        LogRule("GiB for weight,", rf"{_named('weights_gib')} for weight,"),
        LogRule("GiB for peak activation", rf"{_named('activations_gib')} for peak activation"),
        LogRule("GiB for non-torch", rf"{_named('non_torch_gib')} for non-torch"),
        LogRule("GiB for CUDAGraph", rf"{_named('graphs_gib')} for CUDAGraph"),
        LogRule("Capturing ", r"Capturing (?:the model for CUDA graphs|cudagraphs|CUDA graphs)", phase="graphs"),
        LogRule(
            "Graph capturing finished",
            rf"Graph capturing finished in (?P<lasted>\d+) secs?(?:, took {_named('graphs_gib')})?",
            phase="warmup",
            lasting="graphs",
        ),
        LogRule("graph pool memory", rf"graph pool memory: {_named('graphs_gib')} \(actual\)"),
        LogRule("init engine (profile", r"init engine \(profile", phase="warmup"),
        LogRule("startup complete", r"Application startup complete", phase="ready"),
        LogRule("Uvicorn running on", r"Uvicorn running on", phase="ready"),
    ),
    settle=_settle,
    unlogged={
        "max_batch_size": (
            "vLLM prints max_num_seqs only when it is given and not the default; nothing else shows it: give it on the "
            "command line"
        ),
        "max_num_batched_tokens": "vLLM prints it only when chunked prefill is on or it is not the default",
        "gpu_memory_utilization": (
            "vLLM prints it only when it is not the default; its metric vllm:cache_config_info has it as a label"
        ),
        "kv_cache_capacity_tokens": "its metric vllm:cache_config_info has it as labels",
        "expert_parallel_size": "vLLM prints enable_expert_parallel only when it is on",
    },
)


VLLM = Engine(
    name="vllm",
    sources={
        "requests_running": (Source(("vllm:num_requests_running",)),),
        "requests_waiting": (Source(("vllm:num_requests_waiting",)),),
        "kv_cache_usage_ratio": (
            Source(("vllm:kv_cache_usage_perc",)),  # 0.9 and later
            Source(("vllm:gpu_cache_usage_perc",)),  # until 0.10
        ),
        "kv_cache_capacity_tokens": (
            Source(("vllm:cache_config_info",), labels=("kv_cache_size_tokens",)),  # per engine
            # Every engine repeats the blocks of all; wrong for models with sliding windows or state space layers.
            Source(("vllm:cache_config_info",), labels=("num_gpu_blocks", "block_size"), across="max", proxy=True),
        ),
        "request_preemptions_total": (Source(("vllm:num_preemptions_total",)),),
        "prompt_tokens_total": (Source(("vllm:prompt_tokens_total",)),),
        "prompt_tokens_cached_total": (
            Source(("vllm:prompt_tokens_cached_total",)),  # 0.20 and later
            Source(("vllm:prefix_cache_hits_total",)),  # 0.9 and later; before it counted blocks
        ),
        "generation_tokens_total": (Source(("vllm:generation_tokens_total",)),),
        "requests_finished_total": (Source(("vllm:request_success_total",)),),
        "request_errors_total": (
            Source(("vllm:request_success_total",), where=(("finished_reason", ("error",)),)),
            Source(
                ("http_requests_total",),
                where=(("status", ("5xx",)), ("handler", _GENERATION_PATHS)),
                zero_if_unmatched=True,
            ),
        ),
        "engine_progress_total": (Source(("vllm:iteration_tokens_total_count",)),),
        "time_to_first_token_seconds": (Source(("vllm:time_to_first_token_seconds",)),),
        "inter_token_latency_seconds": (
            Source(("vllm:inter_token_latency_seconds",)),  # 0.10.2 and later
            Source(("vllm:time_per_output_token_seconds",)),  # the same quantity until 0.12
        ),
        "request_duration_seconds": (Source(("vllm:e2e_request_latency_seconds",)),),
        "request_queue_seconds": (Source(("vllm:request_queue_time_seconds",)),),
        "engine_start_timestamp_seconds": (
            Source(("process_start_time_seconds",)),
            Source(("vllm:generation_tokens_created",), proxy=True),
        ),
    },
    dialect=Dialect(
        default_port=8000,
        readiness_paths=("/health",),
        metrics_path="/metrics",
        metrics_prefix="vllm:",
        metrics_hint="start vLLM without --disable-log-stats and let proxies pass /metrics through",
        timeout_hint="",
        server_header=None,
        owned_by="vllm",
        supports_ignore_eos=True,
        replica_labels=frozenset(),
        start_mark_header=None,
        complaints=(
            (
                Complaint.PROMPT_TOO_LONG,
                re.compile(
                    r"maximum context length is \d+ tokens|longer than the maximum model length"
                    r"|cannot be greater than max_model_len",
                    re.IGNORECASE,
                ),
            ),
            (
                Complaint.KV_CACHE_FULL,
                re.compile(
                    r"larger than the (?:maximum number of tokens that can be stored in|available) KV cache"
                    r"|No available memory for the cache blocks",
                    re.IGNORECASE,
                ),
            ),
            (Complaint.OUT_OF_MEMORY, DEVICE_OUT_OF_MEMORY),
            (Complaint.OUT_OF_MEMORY, re.compile(r"not enough GPU memory", re.IGNORECASE)),
        ),
        fact_pages=(("/version",),),
        read_limits=_read_limits,
        log=_LOG,
    ),
)
