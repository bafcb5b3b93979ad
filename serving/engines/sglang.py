"""SGLang, from 0.4 on, and forks that keep its metric names (KTransformers' among them).

Scheduler series carry `tp_rank`, `pp_rank`, `moe_ep_rank` and, with data parallelism, `dp_rank`. With
`--enable-metrics-for-all-schedulers` every tensor-parallel rank repeats the same figures, so the largest of them counts
and only `dp_rank` adds up. With priority scheduling the series with an empty `priority` is the total and the others
its parts. Request-level counters move when a request finishes; `realtime_tokens_total` (late 0.5) moves at every log
interval.
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
    LogDump,
    LogFact,
    LogRule,
    LogTable,
    Reading,
    Source,
    whole_number,
)

__all__ = ["SGLANG"]

_TOTAL = (("priority", ("",)),)
_REALTIME = "sglang:realtime_tokens_total"
_GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")
_SERVER_ERRORS = ("500", "502", "503", "504")


def _mode(*modes: str) -> Source:
    return Source((_REALTIME,), where=(("mode", modes),), zero_if_unmatched=True)


def _read_limits(card: Mapping[str, Any], pages: Mapping[str, Any], reading: Reading | None) -> Limits:
    # The page also holds launch arguments, API keys among them: nothing but the fields below may be kept.
    page = pages.get("/server_info") or pages.get("/get_server_info")
    info = page if isinstance(page, dict) else {}
    listed = info.get("internal_states")
    states = [state for state in listed if isinstance(state, dict)] if isinstance(listed, list) else []
    version = info.get("version")
    running = [whole_number(state.get("effective_max_running_requests_per_dp")) for state in states]
    source = "server_info internal_states"
    limit = _sum_of_all(running)
    if limit is None:
        # As launched: before the server cut it down to what memory allows.
        limit, source = whole_number(info.get("max_running_requests")), "server_info max_running_requests, as launched"
    capacities = [
        whole_number(usage.get("token_capacity")) if isinstance(usage := state.get("memory_usage"), dict) else None
        for state in states
    ]
    capacity, capacity_source = _sum_of_all(capacities), "server_info token_capacity"
    if capacity is None and reading is not None:
        capacity = whole_number(reading.values.get("kv_cache_capacity_tokens"))
        capacity_source = reading.sources.get("kv_cache_capacity_tokens", "")
    if capacity is None:
        capacity, capacity_source = whole_number(info.get("max_total_num_tokens")), "server_info max_total_num_tokens"
    context = reading.values.get("config_context_tokens") if reading is not None else None
    contexts = (card.get("max_model_len"), context, info.get("context_length"))
    return Limits(
        version=version if isinstance(version, str) else None,
        context_tokens=next((tokens for tokens in map(whole_number, contexts) if tokens is not None), None),
        max_running_requests=limit,
        max_running_source=source if limit is not None else None,
        kv_cache_capacity_tokens=capacity,
        kv_cache_capacity_source=capacity_source if capacity is not None else None,
    )


def _sum_of_all(parts: list[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _settle(told: Mapping[str, LogFact], figures: Mapping[tuple[str, str], float]) -> dict[str, LogFact]:
    evidence = told.get("kv_tokens")
    tokens = [int(value) for (_, figure), value in figures.items() if figure == "kv_tokens"]
    if evidence is None or not tokens:
        return {}
    return {"kv_cache_capacity_tokens": LogFact(min(tokens), evidence.line, evidence.text)}


_GB = r"=(?P<{}>[\d.]{{1,20}}) GB"  # which means GiB
_LOG = LogTable(
    starts=("server_args=",),
    dumps=(
        LogDump(
            "server_args=",
            {
                "model_path": "model",
                "served_model_name": "served_as",
                "mem_fraction_static": "gpu_memory_utilization",
                "kv_cache_dtype": "kv_cache_dtype",
                "dtype": "dtype",
                "quantization": "quantization",
                "tp_size": "tensor_parallel_size",
                "pp_size": "pipeline_parallel_size",
                "dp_size": "data_parallel_size",
                "ep_size": "expert_parallel_size",
                "max_running_requests": "asked_max_batch_size",
                "max_total_tokens": "asked_kv_cache_capacity_tokens",
                "context_length": "asked_max_model_len",
                "chunked_prefill_size": "asked_max_num_batched_tokens",
            },
        ),
    ),
    rules=(
        LogRule("SGLang", r"SGLang (?:version|v)[: ]*v?(?P<version>\d[\w.+]*)"),
        LogRule("Load weight begin", r"Load weight begin", phase="weights"),
        LogRule(
            "Load weight end", r"Load weight end\b.*?mem usage" + _GB.format("weights_gib"), phase="kv_pool", adds=True
        ),
        LogRule("KV Cache is allocated", r"KV Cache is allocated\b.*?dtype: (?:torch\.)?(?P<kv_cache_dtype>\w+)"),
        LogRule("sing KV cache dtype", r"[Uu]sing KV cache dtype: (?:torch\.)?(?P<kv_cache_dtype>\w+)"),
        LogRule("K size: ", r"\bK size: (?P<kv_gib>[\d.]{1,20}) GB", adds=True),
        LogRule("V size: ", r"\bV size: (?P<kv_gib>[\d.]{1,20}) GB", adds=True),
        LogRule("KV size: ", r"\bKV size: (?P<kv_gib>[\d.]{1,20}) GB", adds=True),
        LogRule("Mamba Cache is allocated", r"conv_state size: (?P<state_gib>[\d.]{1,20}) ?GB", adds=True, hybrid=True),
        LogRule("Mamba Cache is allocated", r"ssm_state size: (?P<state_gib>[\d.]{1,20}) ?GB", adds=True, hybrid=True),
        LogRule("sliding window memory pool", r"[Uu]se sliding window memory pool", hybrid=True),
        LogRule("SWAKVPool mem usage", r"SWAKVPool mem usage", hybrid=True),
        LogRule("Memory pool end", r"Memory pool end", phase="workspace"),
        LogRule("raph begin", r"Capture .*[Gg]raph begin", phase="graphs"),
        LogRule("raph end", r"[Gg]raph end\b.*?mem usage" + _GB.format("graphs_gib"), phase="warmup", adds=True),
        LogRule(
            "max_running_requests was reduced",
            r"max_running_requests was reduced from (?:the )?requested (?P<asked>\d+) to (?P<taken>\d+)",
            clamps="max_batch_size",
        ),
        LogRule(
            "max_running_requests is capped",
            r"max_running_requests is capped to (?P<taken>\d+) by",
            clamps="max_batch_size",
        ),
        LogRule(
            "unning requests is reset",
            r"[Mm]ax running requests is reset to (?P<taken>\d+)",
            clamps="max_batch_size",
        ),
        LogRule(
            "larger than the profiled value",
            r"max_total_tokens=(?P<asked>\d{1,15}) is larger than the profiled value (?P<taken>\d+)",
            clamps="kv_cache_capacity_tokens",
        ),
        LogRule(
            "prefill size is adjusted",
            r"prefill size is adjusted to (?P<taken>\d+)",
            clamps="max_num_batched_tokens",
        ),
        LogRule("max_total_num_tokens=", r"\bmax_total_num_tokens=(?P<kv_tokens>\d+)", phase="warmup"),
        LogRule(
            "max_total_num_tokens=",
            r"\bchunked_prefill_size=(?P<max_num_batched_tokens>\d+)",
        ),
        LogRule("max_total_num_tokens=", r"\bmax_running_requests=(?P<max_batch_size>\d+)"),
        LogRule("max_total_num_tokens=", r"\bcontext_len=(?P<max_model_len>\d+)"),
        LogRule("fired up and ready", r"server is fired up and ready to roll", phase="ready"),
    ),
    settle=_settle,
    unlogged={
        "max_batch_size": "the line `max_total_num_tokens=..., max_running_requests=...` has it; /server_info too",
        "kv_cache_capacity_tokens": "the line `max_total_num_tokens=...` has it; /server_info too",
        "max_model_len": "the line `max_total_num_tokens=..., context_len=...` has it",
    },
)


SGLANG = Engine(
    name="sglang",
    sources={
        "requests_running": (Source(("sglang:num_running_reqs",), where=_TOTAL),),
        "requests_waiting": (Source(("sglang:num_queue_reqs",), where=_TOTAL),),
        # The fullest of the pools (full attention, sliding window, state): whichever is full stops admission.
        "kv_cache_usage_ratio": (Source(("sglang:token_usage",)), Source(("sglang:full_token_usage",))),
        "kv_cache_capacity_tokens": (Source(("sglang:max_total_num_tokens",)),),
        "request_preemptions_total": (
            Source(("sglang:num_retracted_requests_total",)),
            Source(("sglang:total_retracted_reqs",)),  # 0.4.9, typed gauge
        ),
        "prompt_tokens_total": (
            _mode("prefill_compute", "prefill_cache"),
            Source(("sglang:prompt_tokens_total",), at_finish=True),
        ),
        "prompt_tokens_cached_total": (
            _mode("prefill_cache"),
            Source(("sglang:cached_tokens_total",), at_finish=True),
        ),
        "generation_tokens_total": (
            _mode("decode"),
            Source(("sglang:generation_tokens_total",), at_finish=True),
        ),
        "requests_finished_total": (Source(("sglang:num_requests_total",)),),
        "request_errors_total": (
            Source(
                ("sglang:http_responses_total",),
                where=(("status_code", _SERVER_ERRORS), ("endpoint", _GENERATION_PATHS)),
                zero_if_unmatched=True,
            ),
        ),
        # Not steps, but it moves while the engine does; counters that move at finish would look like a hang.
        "engine_progress_total": (Source((_REALTIME,), proxy=True),),
        "time_to_first_token_seconds": (Source(("sglang:time_to_first_token_seconds",)),),
        "inter_token_latency_seconds": (
            Source(("sglang:inter_token_latency_seconds",)),  # 0.4.9 and later
            Source(("sglang:time_per_output_token_seconds",)),
        ),
        "request_duration_seconds": (Source(("sglang:e2e_request_latency_seconds",)),),
        "request_queue_seconds": (Source(("sglang:queue_time_seconds",)),),
        "config_context_tokens": (Source(("sglang:context_len",)),),
    },
    dialect=Dialect(
        default_port=30000,
        # /health generates a token, which takes a second and a batch slot.
        readiness_paths=("/ready", "/health"),
        metrics_path="/metrics",
        metrics_prefix="sglang:",
        metrics_hint="start SGLang with --enable-metrics",
        timeout_hint="",
        server_header=None,
        owned_by="sglang",
        supports_ignore_eos=True,
        replica_labels=frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "cp_rank", "attn_cp_rank"}),
        start_mark_header=None,
        complaints=(
            # SGLang says "out of memory" of its token pool, so this comes before memory.
            (
                Complaint.KV_CACHE_FULL,
                re.compile(
                    r"(?:Prefill|Decode) out of memory|KV cache pool is full|Memory pool size is too small",
                    re.IGNORECASE,
                ),
            ),
            (
                Complaint.PROMPT_TOO_LONG,
                re.compile(
                    r"longer than the model's context length|exceeds the model's maximum context length"
                    r"|exceeds the maximum allowed length",
                    re.IGNORECASE,
                ),
            ),
            (Complaint.OUT_OF_MEMORY, DEVICE_OUT_OF_MEMORY),
            (Complaint.OUT_OF_MEMORY, re.compile(r"Not enough memory\. Please try", re.IGNORECASE)),
        ),
        fact_pages=(("/server_info", "/get_server_info"),),
        read_limits=_read_limits,
        log=_LOG,
        # Its estimate begins there (SGLANG_INIT_NEW_TOKEN_RATIO) and falls while nothing has to be retracted.
        reserved_output_ratio=0.7,
    ),
)
