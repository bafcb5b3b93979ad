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


_SLOT_COUNT = re.compile(r"\bn_slots = (\d+)")
_SLOT_CONTEXT = re.compile(r"\bn_ctx_slot = (\d+)")
_UNIFIED = re.compile(r"\bkv_unified = '(true|false)'")
_CAPPED_POOL = re.compile(
    r"capping per-slot context \((\d+)\) to --kv-unified-per-slot"
    r"|the slot context \((\d+)\) exceeds the training context"
)
"""A shared pool is larger than what one slot may use of it."""
_TOTAL_CONTEXT = re.compile(r"llama_context: n_ctx +?= (\d+)")


def _read_log(text: str) -> dict[str, int]:
    facts = {}
    slots, context = _last(_SLOT_COUNT, text), _last(_SLOT_CONTEXT, text)
    if slots is not None:
        facts["max_running_requests"] = int(slots)
    if context is not None:
        facts["context_tokens"] = int(context)
    unified = _last(_UNIFIED, text)
    if unified == "true" and context is not None:
        capped = _CAPPED_POOL.findall(text)
        facts["kv_cache_capacity_tokens"] = int("".join(capped[-1]) if capped else context)
    elif unified == "false" and slots is not None and context is not None:
        facts["kv_cache_capacity_tokens"] = int(slots) * int(context)
    else:
        total = _last(_TOTAL_CONTEXT, text)
        if total is not None:
            facts["kv_cache_capacity_tokens"] = int(total)
    return facts


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    # The last start counts in a log that was appended to.
    found = pattern.findall(text)
    return str(found[-1]) if found else None


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
        read_log=_read_log,
        log_tells_max_running=True,
    ),
    side_page=SidePage(
        path=_SLOTS,
        signals=("kv_cache_usage_ratio", "config_max_running_requests", "config_context_tokens"),
        read=_read_slots,
    ),
)
