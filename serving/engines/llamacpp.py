"""llama.cpp's `llama-server`, also as embedded by the `xllamacpp` wheel.

Its metrics have no labels, no histograms, no request or error counters and, since May 2025, no KV cache use. The last
is estimated from `/slots`. Rates that it exposes as gauges start anew at every scrape, whoever scrapes, so they are
left alone.
"""

import re
from collections.abc import Mapping
from typing import Any

from serving.engines.base import (
    DEVICE_OUT_OF_MEMORY,
    PROXY,
    Complaint,
    Dialect,
    Engine,
    Limits,
    LogFact,
    LogRule,
    LogTable,
    Reading,
    SidePage,
    Source,
    whole_number,
)

__all__ = ["LLAMACPP"]

_SLOTS = "/slots"
_ASSUMES_SPLIT = "assuming that slots do not share the cache"


def _tokens_held(slot: Mapping[str, Any]) -> int | None:
    """Tokens of a busy slot that are in the KV cache now; None when the build does not tell.

    `n_prompt_tokens` alone would do once generation runs (it then counts prompt and output), but before that it is the
    length of a prompt that is still to be processed. Processed, reused and decoded tokens are right at any moment.
    """
    steps = slot.get("next_token")
    step = steps[0] if isinstance(steps, list) and steps else steps
    decoded = step.get("n_decoded") if isinstance(step, dict) else None
    parts = (slot.get("n_prompt_tokens_processed"), slot.get("n_prompt_tokens_cache"), decoded)
    counts = [part for part in parts if isinstance(part, int) and part >= 0]
    if len(counts) == len(parts):
        return sum(counts)
    prompt = slot.get("n_prompt_tokens")
    return prompt if isinstance(prompt, int) and prompt >= 0 else None


def _read_slots(page: Any, capacity_tokens: int | None) -> dict[str, tuple[float, str]]:
    # With --slots-debug the page holds prompts; only numbers are read.
    slots = [slot for slot in page if isinstance(slot, dict)] if isinstance(page, list) else []
    contexts = [context for context in (whole_number(slot.get("n_ctx")) for slot in slots) if context is not None]
    if not slots or len(contexts) < len(slots):
        return {}
    told: dict[str, tuple[float, str]] = {
        "config_max_running_requests": (float(len(slots)), _SLOTS),
        "config_context_tokens": (float(min(contexts)), f"{_SLOTS} n_ctx"),
    }
    held = 0
    for slot, context in zip(slots, contexts, strict=True):
        if slot.get("is_processing"):
            tokens = _tokens_held(slot)
            if tokens is None:
                return told
            # With context shift a request decodes more tokens than it holds.
            held += min(tokens, context)
    source = f"{PROXY}{_SLOTS} tokens of busy slots / capacity"
    if capacity_tokens is None:
        capacity_tokens = sum(contexts)
        if len(slots) > 1:
            source += f", {_ASSUMES_SPLIT}"
    told["kv_cache_usage_ratio"] = (min(1.0, held / capacity_tokens), source)
    return told


def _read_limits(card: Mapping[str, Any], pages: Mapping[str, Any], reading: Reading | None) -> Limits:  # noqa: ARG001
    props = pages.get("/props")
    props = props if isinstance(props, dict) else {}
    defaults, meta = props.get("default_generation_settings"), card.get("meta")
    told = _read_slots(pages.get(_SLOTS), None)
    slots = whole_number(props.get("total_slots"))
    slots_source = "/props total_slots"
    if slots is None and "config_max_running_requests" in told:
        slots, slots_source = int(told["config_max_running_requests"][0]), _SLOTS
    contexts = (
        defaults.get("n_ctx") if isinstance(defaults, dict) else None,
        told.get("config_context_tokens", (None,))[0],
        meta.get("n_ctx") if isinstance(meta, dict) else None,
    )
    context = next((tokens for tokens in map(whole_number, contexts) if tokens is not None), None)
    build = props.get("build_info")
    notes = []
    if not told:
        notes.append("llama.cpp gives no slots page, so KV cache use is unknown: start it without --no-slots")
    elif slots is not None and slots > 1:
        # Neither /props, /slots nor /metrics says whether --kv-unified is in effect; only the start-up log does.
        notes.append(
            f"llama.cpp does not tell whether its {slots} slots share one KV cache: its use is estimated as if they "
            "did not; kv_cache_capacity_tokens (its start-up log has it) would settle it"
        )
    alone = slots == 1 and context is not None
    return Limits(
        # Builds without version data say b0-unknown.
        version=build if isinstance(build, str) and build and "unknown" not in build else None,
        context_tokens=context,
        max_running_requests=slots,
        max_running_source=slots_source if slots is not None else None,
        kv_cache_capacity_tokens=context if alone else None,
        kv_cache_capacity_source="n_ctx of the only slot" if alone else None,
        notes=tuple(notes),
    )


def _settle(told: Mapping[str, LogFact], figures: Mapping[tuple[str, str], float]) -> dict[str, LogFact]:  # noqa: ARG001
    settled: dict[str, LogFact] = {}
    # What the server's slots are told last is what requests get; the context below them may be larger.
    slots, slot = told.get("slots"), told.get("slot_tokens")
    if slots is not None:
        settled["max_batch_size"] = slots
    if slot is not None:
        settled["max_model_len"] = slot
    kinds = [told[key] for key in ("kv_cache_dtype_k", "kv_cache_dtype_v") if key in told]
    if len(kinds) == 2 and kinds[0].value == kinds[1].value:
        settled["kv_cache_dtype"] = kinds[0]
    if "offloaded_layers" in told:
        settled["gpu_layers"] = told["offloaded_layers"]
    unified, pool = told.get("kv_unified"), told.get("pool_tokens")
    if unified is not None and slot is not None and unified.value is True:
        # A shared pool is larger than what one slot may use of it where a slot was capped.
        settled["kv_cache_capacity_tokens"] = pool or slot
    elif unified is not None and slot is not None and slots is not None:
        settled["kv_cache_capacity_tokens"] = LogFact(int(slots.value) * int(slot.value), slot.line, slot.text)
    elif "context_tokens" in told:
        settled["kv_cache_capacity_tokens"] = told["context_tokens"]
    return settled


_CONTEXT = r"llama_(?:context|new_context_with_model|init_from_model): "
_MIB = r" buffer size = +(?P<{}>[\d.]{{1,20}}) MiB"
_LOG = LogTable(
    # "build: " would do for old builds, but prompts that a talkative server prints may hold it too.
    starts=("build_info: ", "common_params_print_info", "load_model: loading model '"),
    rules=(
        LogRule("build", r"\bbuild: (?P<version>\d+ \(\w+\))"),
        LogRule("build_info: ", r"build_info: (?P<version>b(?!0\b)[\w-]+)"),
        LogRule("build=", r"\bbuild=(?P<version>\d+) commit="),
        LogRule("loading model '", r"loading model '(?P<model>[^']+)'", phase="weights"),
        LogRule(
            "loaded meta data with",
            r"key-value pairs and \d+ tensors from (?P<model>.+?) \(version",
            phase="weights",
            first=True,
        ),
        LogRule("loading model tensors", r"load_tensors: loading model tensors", phase="weights"),
        LogRule("layers to GPU", r"offloaded (?P<offloaded_layers>\d+)/(?P<layers>\d+) layers to GPU", first=True),
        LogRule(
            " buffer size = ",
            r"load_tensors: +(?P<device>\S{1,32}) (?:model )?" + _MIB[1:].format("model_mib"),
            adds=True,
        ),
        LogRule("constructing llama_context", r"constructing llama_context", phase="kv_pool"),
        LogRule("n_ctx ", _CONTEXT + r"n_ctx +=\s+(?P<context_tokens>\d+)", phase="kv_pool", first=True),
        LogRule("n_seq_max", _CONTEXT + r"n_seq_max +=\s+(?P<asked_max_batch_size>\d+)", first=True),
        LogRule("n_ctx_", _CONTEXT + r"n_ctx_(?:per_)?seq +=\s+(?P<asked_max_model_len>\d+)", first=True),
        LogRule("n_batch ", _CONTEXT + r"n_batch +=\s+(?P<max_num_batched_tokens>\d+)", first=True),
        LogRule("n_ubatch ", _CONTEXT + r"n_ubatch +=\s+(?P<physical_batch_tokens>\d+)", first=True),
        LogRule("kv_unified", r"\bkv_unified += '?(?P<kv_unified>true|false)"),
        LogRule("KV buffer size", r"(?:^|\s)(?P<device>\S{1,32}) KV" + _MIB.format("kv_mib"), adds=True),
        LogRule(
            "RS buffer size", r"(?:^|\s)(?P<device>\S{1,32}) RS" + _MIB.format("state_mib"), adds=True, hybrid=True
        ),
        LogRule("K (", r"\bK \((?P<kv_cache_dtype_k>\w+)\):", first=True),
        LogRule("V (", r"\bV \((?P<kv_cache_dtype_v>\w+)\):", first=True),
        LogRule("SWA KV cache", r"creating (?:non-)?SWA KV cache", hybrid=True),
        LogRule("output buffer size", r"(?:^|\s)(?P<device>\S{1,32}) +output" + _MIB.format("output_mib")),
        LogRule("reserving", r"sched_reserve: reserving", phase="workspace"),
        LogRule(
            "compute buffer size",
            r"(?:^|\s)(?P<device>\S{1,32}) compute" + _MIB.format("compute_mib"),
            phase="workspace",
        ),
        LogRule("warming up the model", r"warming up the model", phase="warmup"),
        LogRule(
            "context size reduced from",
            r"context size reduced from (?P<asked>\d+) to (?P<taken>\d+)",
            clamps="kv_cache_capacity_tokens",
        ),
        LogRule(
            "rounding down to",
            r"n_ctx is not divisible by n_seq_max\b.*?rounding down to (?P<taken>\d+)",
            clamps="kv_cache_capacity_tokens",
        ),
        LogRule(
            "exceeds the training context",
            r"the slot context \((?P<asked>\d+)\) exceeds the training context of the model \((?P<taken>\d+)\)",
            clamps="max_model_len",
        ),
        LogRule("exceeds the training context", r"the slot context \((?P<pool_tokens>\d+)\) exceeds"),
        LogRule(
            "capping per-slot context",
            r"capping per-slot context \((?P<asked>\d+)\) to --kv-unified-per-slot \((?P<taken>\d+)\)",
            clamps="max_model_len",
        ),
        LogRule("capping per-slot context", r"capping per-slot context \((?P<pool_tokens>\d+)\) to"),
        LogRule("n_slots = ", r"\bn_slots = (?P<slots>\d+)"),
        LogRule("n_ctx_slot = ", r"\bn_ctx_slot = (?P<slot_tokens>\d+)"),
        LogRule("new slot, n_ctx = ", r"new slot, n_ctx = (?P<slot_tokens>\d+)"),
        LogRule("model loaded", r"\bmodel loaded\b", phase="ready"),
        LogRule("listening on http", r"\blistening on http", phase="ready"),
    ),
    settle=_settle,
    unlogged={
        "kv_cache_capacity_tokens": "llama.cpp prints n_ctx and the KV buffers at verbosity 4 (-lv 4)",
        "max_num_batched_tokens": "llama.cpp prints n_batch at verbosity 4 (-lv 4)",
        "kv_cache_dtype": "llama.cpp prints the types of K and V at verbosity 4 (-lv 4)",
        "tensor_parallel_size": "llama.cpp prints the buffers of each device at verbosity 4 (-lv 4)",
    },
)


LLAMACPP = Engine(
    name="llamacpp",
    sources={
        "requests_running": (Source(("llamacpp:requests_processing",)),),
        "requests_waiting": (Source(("llamacpp:requests_deferred",)),),
        # Gone upstream since May 2025; forks still have it.
        "kv_cache_usage_ratio": (Source(("llamacpp:kv_cache_usage_ratio",)),),
        # The engine's prompt counter leaves out what came from the cache; ours is everything taken in.
        "prompt_tokens_total": (
            Source(("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total")),
            Source(("llamacpp:prompt_tokens_total",)),
        ),
        "prompt_tokens_cached_total": (Source(("llamacpp:prompt_tokens_cached_total",)),),
        "generation_tokens_total": (Source(("llamacpp:tokens_predicted_total",), at_finish=True),),
        "engine_progress_total": (Source(("llamacpp:n_decode_total",)),),
    },
    dialect=Dialect(
        default_port=8080,
        readiness_paths=("/health",),
        metrics_path="/metrics",
        metrics_prefix="llamacpp:",
        metrics_hint="start llama-server with --metrics",
        timeout_hint="waiting streams hold its few HTTP threads: start llama-server with --threads-http 64",
        server_header="llama.cpp",
        owned_by="llamacpp",
        supports_ignore_eos=True,
        replica_labels=frozenset(),
        # In spite of its name it is microseconds of the host's monotonic clock, so it marks a start but dates none.
        start_mark_header="process-start-time-unix",
        complaints=(
            (
                Complaint.PROMPT_TOO_LONG,
                re.compile(r"exceed_context_size_error|exceeds the available context size", re.IGNORECASE),
            ),
            (
                Complaint.KV_CACHE_FULL,
                re.compile(
                    r"Context size has been exceeded|failed to find (?:free space in the KV cache|a memory slot)"
                    r"|Input prompt is too big compared to KV size",
                    re.IGNORECASE,
                ),
            ),
            (Complaint.OUT_OF_MEMORY, DEVICE_OUT_OF_MEMORY),
            (
                Complaint.OUT_OF_MEMORY,
                re.compile(
                    r"failed to allocate (?:buffer for kv cache|compute buffers)"
                    r"|ggml_aligned_malloc: insufficient memory",
                    re.IGNORECASE,
                ),
            ),
        ),
        fact_pages=(("/props",), (_SLOTS,)),
        read_limits=_read_limits,
        log=_LOG,
    ),
    side_page=SidePage(
        path=_SLOTS,
        signals=("kv_cache_usage_ratio", "config_max_running_requests", "config_context_tokens"),
        read=_read_slots,
    ),
)
