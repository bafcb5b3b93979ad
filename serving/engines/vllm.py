"""vLLM, V0 and V1, from 0.6 on.

Series are per engine (`engine` is the data-parallel rank). Gauges are published on engine steps only, so they freeze
when the engine does. `_perc` is a ratio in spite of its name.
"""

import re
from collections.abc import Mapping
from typing import Any

from serving.engines.base import (
    DEVICE_OUT_OF_MEMORY,
    Complaint,
    Dialect,
    Engine,
    Limits,
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


_MAX_NUM_SEQS = re.compile(r"'max_num_seqs': (\d+)")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_MAX_SEQ_LEN = re.compile(r"\bmax_seq_len=(\d+)")
_MODEL_LEN = re.compile(r"Using max model len (\d+)")
_FITTED_LEN = re.compile(r"Auto-fit max_model_len: reduced from [\d,]+ to ([\d,]+)")


def _read_log(text: str) -> dict[str, int]:
    facts = {}
    seqs = _MAX_NUM_SEQS.findall(text)
    if seqs:
        facts["max_running_requests"] = int(seqs[-1])
    tokens = [int(found.replace(",", "")) for found in _KV_TOKENS.findall(text)]
    if tokens:
        # Pipeline stages print one line each, and the smallest binds.
        facts["kv_cache_capacity_tokens"] = min(tokens)
    lengths = _MAX_SEQ_LEN.findall(text) or _MODEL_LEN.findall(text)
    fitted = _FITTED_LEN.findall(text)
    if fitted:
        # Printed after the lengths above, which are those asked for.
        facts["context_tokens"] = int(fitted[-1].replace(",", ""))
    elif lengths:
        facts["context_tokens"] = int(lengths[-1])
    return facts


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
        read_log=_read_log,
        log_tells_max_running=False,
    ),
)
