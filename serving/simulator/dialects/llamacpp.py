"""llama.cpp's `llama-server` as its clients, scrapers and log readers meet it, in four of its builds.

Wire text and log formats follow answers and logs of real servers (b10434, b11434, and b11549 as embedded by the
`xllamacpp` wheel, which calls itself b0-unknown), and for b5170 of April 2025 the server's source of that month. That
one still tells KV cache use in its metrics; the gauges went in May 2025.

What is as in the engine, and easily taken for a fault of the simulator:

- Metrics have six significant digits, so that a counter above a million moves in steps of ten and more.
- Token counters move when a request ends (`Policy.counts_at_finish`), the count of decode calls at every step.
- `/slots` gives a slot that never served no figures, and a prompt is nowhere in it.
- An unknown model is served. So is a wish for 0 tokens: it gets one. A wish for more than fits is cut at the context.
- At its usual verbosity a build of 2026 logs no memory sizes; `settings["verbosity"] = 4` shows them.

The rates among the gauges are averages since the start: the engine's own begin anew at every scrape, and a dialect
remembers nothing. The oldest build answers as with `--no-context-shift`, because a simulated request never outgrows its
context. Values of `ServerSpec.settings` that are used: `verbosity`, `n_ctx` (tokens asked for in all), `n_ctx_train`,
`n_layer`, `n_vocab`, `n_embd`, `n_params`, `ftype`, `model_path`, `host`, `port`.
"""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from serving.errors import ConfigError
from serving.simulator.dialects.base import (
    Asked,
    Dialect,
    LogLine,
    Page,
    StartFailure,
    Stream,
    Trouble,
    Usage,
    tokenise,
)
from serving.simulator.spec import Finish, ServerSpec, SlotView, Snapshot
from serving.stream import Api

__all__ = ["LLAMACPP_DIALECT"]

_NS = 1_000_000_000
_MIB = 2**20
_JSON = "application/json; charset=utf-8"
_LARGEST_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Build:
    """Where builds differ.

    Attributes:
        release: its tag.
        info: what it calls itself.
        old: before June 2025: KV gauges, usage in the last chunk of a chat, lax reading of fields, plain log lines.
        bad_json_status: status for a body that is not JSON, or lacks what it must have.
        has_architecture: whether `/v1/models` tells modalities.
        main: name of the main function in log lines.
        listener: name of the function that sets up the HTTP listener in log lines.
        allocator: function that complains when a buffer cannot be had.
    """

    release: str
    info: str
    old: bool = False
    bad_json_status: int = 400
    has_architecture: bool = True
    main: str = "llama_server"
    listener: str = "init_listener"
    allocator: str = "alloc_tensor_range"


_BUILDS = (
    _Build("b11549", "b0-unknown", main="init", allocator="ggml_backend_buft_alloc_buffer_n_default"),
    _Build("b11434", "b0-unknown"),
    _Build("b10434", "b1-7e4c0a9", bad_json_status=500, has_architecture=False, listener="init"),
    _Build("b5170", "b5170-00000000", old=True, bad_json_status=500, has_architecture=False, main="main"),
)


@lru_cache(maxsize=64)
def _build_of(release: str) -> _Build:
    """The build to imitate: the newest known that is not newer than `release`, else the oldest."""
    found = re.fullmatch(r"b?(\d+)", release)
    if found is None:
        known = ", ".join(build.release for build in _BUILDS)
        raise ConfigError(f"llama.cpp has no release {release!r}; give a build number like these: {known}")
    number = int(found[1])
    return next((build for build in _BUILDS if int(build.release[1:]) <= number), _BUILDS[-1])


# Pages ----------------------------------------------------------------------------------------------------------------

_SERVER_HEADERS = (("Server", "llama.cpp"), ("Access-Control-Allow-Origin", ""))
_KEEP = ("Keep-Alive", "timeout=5, max=100")
_CLOSE = ("Connection", "close")
_HEADERS, _ERROR_HEADERS = (*_SERVER_HEADERS, _KEEP), (*_SERVER_HEADERS, _CLOSE)


def _dump(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _answer(document: Any) -> Page:
    return Page(200, _dump(document), _JSON, _HEADERS)


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
}
_BAD_TYPE = "Field '{}': [json.exception.type_error.302] type must be {}, but is {}"
_OUT_OF_RANGE = "Field '{}': Value must be between {} <= value <= {}, but got {}"
_NO_FIELD = "[json.exception.out_of_range.403] key '{}' not found"
_NOT_JSON = (
    "[json.exception.parse_error.101] parse error at line {}, column {}: syntax error while parsing value - unexpected "
    "end of input; expected '[', '{{', or a literal"
)
_COMPLAINTS: Mapping[Trouble, tuple[int, str]] = {
    Trouble.NOT_FOUND: (404, "File Not Found"),
    Trouble.METHOD_NOT_ALLOWED: (404, "File Not Found"),
    Trouble.BAD_JSON: (400, _NOT_JSON.format(1, 1).replace("{", "{{")),
    Trouble.MISSING_MESSAGES: (400, "'messages' is required"),
    Trouble.BAD_FIELD: (400, _BAD_TYPE.format("temperature", "number", "string")),
    Trouble.UNKNOWN_MODEL: (400, "model '{model}' not found"),
    Trouble.BAD_MAX_TOKENS: (400, _OUT_OF_RANGE.format("max_tokens", -1, _LARGEST_INT, "{asked}")),
    Trouble.PROMPT_TOO_LONG: (
        400,
        "request ({prompt_tokens} tokens) exceeds the available context size ({context} tokens), try increasing it",
    ),
    Trouble.NO_KEY: (401, "Invalid API Key"),
    Trouble.LOADING: (503, "Loading model"),
    Trouble.OVERLOADED: (503, "no slot available"),
    Trouble.TOO_MANY: (429, "no slot available"),
    Trouble.KV_FULL: (500, "Context size has been exceeded."),
    Trouble.INTERNAL: (500, "Compute error."),
    Trouble.OUT_OF_MEMORY: (500, "Compute error."),
    Trouble.ENGINE_DEAD: (500, "Compute error."),
}
"""Status and message; 400 for a body that is not JSON became so between b10434 and b11434."""
_OLD_COMPLAINTS: Mapping[Trouble, tuple[int, str]] = {
    Trouble.MISSING_MESSAGES: (500, _NO_FIELD.format("messages")),
    Trouble.PROMPT_TOO_LONG: (
        400,
        "the request exceeds the available context size. try increasing the context size or enable context shift",
    ),
    Trouble.KV_FULL: (500, "Input prompt is too big compared to KV size. Please try increasing KV size."),
}
_BY_HAND = frozenset({Trouble.NOT_FOUND, Trouble.METHOD_NOT_ALLOWED, Trouble.LOADING, Trouble.NO_KEY})
"""Errors that builds of 2026 write by hand, with their fields in another order."""


def _error(build: _Build, spec: ServerSpec, trouble: Trouble, detail: Mapping[str, int | str]) -> dict[str, Any]:
    """The document of an error; its `code` is the status."""
    status, wording = _COMPLAINTS[trouble]
    if build.old:
        status, wording = _OLD_COMPLAINTS.get(trouble, (status, wording))
    if trouble is Trouble.BAD_JSON:
        status = build.bad_json_status
    context = spec.context_tokens
    known: dict[str, int | str] = {"asked": -5, "model": "", "prompt_tokens": context, "context": context, **detail}
    message, kind = known.get("message") or wording.format_map(known), _ERROR_TYPES.get(status, "unavailable_error")
    inside: dict[str, Any] = {"code": status, "message": message, "type": kind}
    if trouble in _BY_HAND and not build.old:
        inside = {"message": message, "type": kind, "code": status}
    elif trouble is Trouble.PROMPT_TOO_LONG and not build.old:
        inside |= {"type": "exceed_context_size_error", "n_prompt_tokens": known["prompt_tokens"], "n_ctx": context}
    return {"error": inside}


def _error_page(document: Mapping[str, Any]) -> Page:
    return Page(document["error"]["code"], _dump(document), _JSON, _ERROR_HEADERS)


def _refusal(status: int, message: str) -> Page:
    """The complaint about one request, in words of its own."""
    return _error_page({"error": {"code": status, "message": message, "type": _ERROR_TYPES[status]}})


_SAMPLING: dict[str, Any] = {
    "seed": 4294967295,
    "temperature": 0.800000011920929,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.949999988079071,
    "min_p": 0.05000000074505806,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.10000000149011612,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.10000000149011612,
}
_SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


def _params(build: _Build, *, serving: bool) -> dict[str, Any]:
    """The settings of a request; `serving` for those of a slot that serves or served one, else the defaults."""
    if build.old:
        return {
            "n_predict": -1,
            **_SAMPLING,
            "dry_sequence_breakers": ["\n", ":", '"', "*"],
            "stop": [],
            "max_tokens": -1,
            "n_keep": 0,
            "n_discard": 0,
            "ignore_eos": False,
            "stream": serving,
            "logit_bias": [],
            "n_probs": 0,
            "min_keep": 0,
            "grammar": "",
            "grammar_lazy": False,
            "grammar_triggers": [],
            "preserved_tokens": [],
            "chat_format": "Content-only",
            "samplers": [name for name in _SAMPLERS if name != "top_n_sigma"],
            "speculative.n_max": 16,
            "speculative.n_min": 0,
            "speculative.p_min": 0.75,
            "timings_per_token": False,
            "post_sampling_probs": False,
            "lora": [],
        }
    # The order is the engine's; sampling parameters that came later stand among the others.
    sampling = dict(_SAMPLING)
    params = {name: sampling.pop(name) for name in list(sampling)[:7]} | {"top_n_sigma": -1.0} | sampling
    return {
        **params,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.8999999761581421,
        "max_tokens": -1,
        "n_predict": -1,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": False,
        "stream": serving,
        "n_probs": 0,
        "min_keep": 0,
        "chat_format": "peg-native" if serving else "Content-only",
        "reasoning_format": "deepseek" if serving else "none",
        "reasoning_in_content": False,
        "generation_prompt": "<|im_start|>assistant\n" if serving else "",
        "samplers": _SAMPLERS,
        "speculative.types": "none",
        "timings_per_token": False,
        "post_sampling_probs": False,
        "backend_sampling": False,
        "lora": [],
    }


@lru_cache(maxsize=8)
def _slot_params(build: _Build) -> str:
    return _dump(_params(build, serving=True)).decode()


def _slots_of(spec: ServerSpec, snapshot: Snapshot) -> Sequence[SlotView]:
    """The slots, made up where averages are all that is known: as many busy ones as requests run, each its share."""
    if snapshot.slots:
        return snapshot.slots
    busy = min(spec.max_batch, math.ceil(snapshot.running))
    share, rest = divmod(round(snapshot.kv_blocks_used * spec.block_tokens), max(1, busy))
    idle = SlotView(task_id=0) if snapshot.steps else SlotView()
    made = []
    for index in range(spec.max_batch):
        tokens = min(spec.context_tokens, share + (index < rest))
        made.append(SlotView(True, index, tokens, tokens) if index < busy else idle)
    return made


def _slots_page(build: _Build, spec: ServerSpec, snapshot: Snapshot) -> bytes:
    # Put together as text: a sampler asks for it once a second, over months of virtual time.
    params, context = _slot_params(build), spec.context_tokens
    parts = []
    for index, slot in enumerate(_slots_of(spec, snapshot)):
        busy, decoded = slot.is_processing, slot.decoded_tokens if slot.is_processing else 0
        processing, remain = ("true", max(0, context - slot.prompt_tokens - decoded)) if busy else ("false", -1)
        head = f'{{"id":{index}'
        step = f'{{"has_next_token":{processing},"has_new_line":false,"n_remain":{remain},"n_decoded":{decoded}'
        if build.old:
            parts.append(
                f'{head},"id_task":{slot.task_id},"n_ctx":{context},"speculative":false,"is_processing":{processing},'
                f'"non_causal":false,"params":{params},"prompt":"","next_token":{step},"stopping_word":""}}}}'
            )
        elif slot.task_id < 0 and not busy:
            parts.append(f'{head},"n_ctx":{context},"speculative":false,"is_processing":false}}')
        else:
            processed, cached = (slot.processed_tokens, slot.cached_tokens) if busy else (0, 0)
            # The last token of a finished answer was never fed back into the cache.
            held = slot.prompt_tokens + slot.decoded_tokens - (not busy and slot.decoded_tokens > 0)
            parts.append(
                f'{head},"n_ctx":{context},"speculative":false,"is_processing":{processing},"id_task":{slot.task_id},'
                f'"n_prompt_tokens":{held},"n_prompt_tokens_processed":{processed},"n_prompt_tokens_cache":{cached},'
                f'"params":{params},"next_token":[{step}}}]}}'
            )
    return f"[{','.join(parts)}]".encode()


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _props(build: _Build, spec: ServerSpec, snapshot: Snapshot) -> dict[str, Any]:
    path, params, context = _model_path(spec), _params(build, serving=False), spec.context_tokens
    if build.old:
        return {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": context,
                "speculative": False,
                "is_processing": False,
                "non_causal": False,
                "params": params,
                "prompt": "",
                "next_token": {
                    "has_next_token": True,
                    "has_new_line": False,
                    "n_remain": -1,
                    "n_decoded": 0,
                    "stopping_word": "",
                },
            },
            "total_slots": spec.max_batch,
            "model_path": path,
            "chat_template": _CHAT_TEMPLATE,
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "build_info": build.info,
        }
    capabilities = (
        *("object_arguments", "parallel_tool_calls", "preserve_reasoning", "reasoning_effort", "string_content"),
        *("system_role", "tool_calls", "tools", "typed_content"),
    )
    return {
        "default_generation_settings": {"params": params, "n_ctx": context},
        "total_slots": spec.max_batch,
        "model_alias": spec.model,
        "model_ftype": spec.settings.get("ftype", "F16"),
        "model_path": path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": f"<__media_{_letters(f'media {snapshot.started_ns}')}__>",
        "endpoint_slots": True,
        "endpoint_props": True,
        "endpoint_metrics": True,
        "ui": False,
        "ui_settings": {},
        "chat_template": _CHAT_TEMPLATE,
        "chat_template_caps": {f"supports_{name}": name in {"string_content", "system_role"} for name in capabilities},
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "build_info": build.info,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def _models(build: _Build, spec: ServerSpec, snapshot: Snapshot) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "vocab_type": 2,
        "n_vocab": _setting(spec, "n_vocab", 151_936),
        "n_ctx": spec.context_tokens,
        "n_ctx_train": _setting(spec, "n_ctx_train", spec.context_tokens),
        "n_embd": _setting(spec, "n_embd", 4096),
        "n_params": _setting(spec, "n_params", spec.memory.weights_bytes // 2),
        "size": spec.memory.weights_bytes * max(1, spec.memory.cards),
        "ftype": spec.settings.get("ftype", "F16"),
    }
    created = snapshot.t_ns // _NS
    if build.old:
        del meta["n_ctx"], meta["ftype"]
        card = {"id": spec.model, "object": "model", "created": created, "owned_by": "llamacpp", "meta": meta}
        return {"object": "list", "data": [card]}
    modalities = {"architecture": {"input_modalities": ["text"], "output_modalities": ["text"]}}
    return {
        "models": [
            {
                "name": spec.model,
                "model": spec.model,
                **dict.fromkeys(("modified_at", "size", "digest"), ""),
                "type": "model",
                "description": "",
                "tags": [""],
                "capabilities": ["completion"],
                "parameters": "",
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": "",
                    "families": [""],
                    "parameter_size": "",
                    "quantization_level": "",
                },
            }
        ],
        "object": "list",
        "data": [
            {
                "id": spec.model,
                "aliases": [spec.model],
                "tags": [],
                "object": "model",
                **(modalities if build.has_architecture else {}),
                "created": created,
                "owned_by": "llamacpp",
                "meta": meta if snapshot.ready else None,
            }
        ],
    }


_MODEL_PATHS = frozenset({"/v1/models", "/models"})


def _setting(spec: ServerSpec, name: str, default: int) -> int:
    value = spec.settings.get(name)
    return default if value is None else int(value)


def _model_path(spec: ServerSpec) -> str:
    return str(spec.settings.get("model_path") or f"models/{spec.model}.gguf")


_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _letters(seed: str) -> str:
    """32 letters and digits that look random and are not."""
    return "".join(_ALPHABET[byte % 62] for byte in hashlib.blake2b(seed.encode(), digest_size=32).digest())


# Metrics --------------------------------------------------------------------------------------------------------------


def _heads(*rows: tuple[str, str, str]) -> tuple[str, ...]:
    return tuple(
        f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} " for name, kind, text in rows
    )


_DECODE_HELP = "Total number of llama_decode() calls, excluding speculative decoding and multimodal decoding"
_ACCEPTED_HELP = "Speculative: Total draft tokens accepted by the target model"
_NEW_ROWS = (
    ("prompt_tokens_total", "counter", "Number of prompt tokens processed, excluding cached tokens"),
    ("prompt_tokens_cached_total", "counter", "Number of prompt tokens reused from the cache"),
    ("prompt_seconds_total", "counter", "Total time spent processing prompts"),
    ("tokens_predicted_total", "counter", "Number of generation tokens processed"),
    ("tokens_predicted_seconds_total", "counter", "Total time spent generating tokens"),
    ("n_decode_total", "counter", _DECODE_HELP),
    ("n_tokens_max", "counter", "Largest observed sequence length (prompt + generation)"),
    ("spec_decode_num_draft_tokens_total", "counter", "Speculative: Total draft tokens generated"),
    ("spec_decode_num_accepted_tokens_total", "counter", _ACCEPTED_HELP),
    ("spec_decode_num_drafts_total", "counter", "Speculative: Total speculative decoding verification steps"),
    ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s"),
    ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s"),
    ("requests_processing", "gauge", "Number of requests processing"),
    ("requests_deferred", "gauge", "Number of requests deferred"),
    ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per llama_decode() call"),
)
_OLD_ROWS = (
    ("prompt_tokens_total", "counter", "Number of prompt tokens processed."),
    ("prompt_seconds_total", "counter", "Prompt process time"),
    ("tokens_predicted_total", "counter", "Number of generation tokens processed."),
    ("tokens_predicted_seconds_total", "counter", "Predict process time"),
    ("n_decode_total", "counter", "Total number of llama_decode() calls"),
    ("n_busy_slots_per_decode", "counter", "Average number of busy slots per llama_decode() call"),
    ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s."),
    ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s."),
    ("kv_cache_usage_ratio", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    ("kv_cache_tokens", "gauge", "KV-cache tokens."),
    ("requests_processing", "gauge", "Number of requests processing."),
    ("requests_deferred", "gauge", "Number of requests deferred."),
)
_RENAMES = {
    "tokens_predicted_total": "tokens_generated_total",
    "n_decode_total": "decode_calls_total",
    "requests_deferred": "requests_queued",
    "kv_cache_usage_ratio": "kv_cache_used_ratio",
}


def _renamed(rows: tuple[tuple[str, str, str], ...]) -> tuple[tuple[str, str, str], ...]:
    return tuple((_RENAMES.get(name, name), kind, text) for name, kind, text in rows)


_METRIC_HEADS = {
    (old, renamed): _heads(*(_renamed(rows) if renamed else rows))
    for old, rows in ((False, _NEW_ROWS), (True, _OLD_ROWS))
    for renamed in (False, True)
}


def _printed(value: float) -> float:
    """As it can be read back from the page."""
    return float(f"{value:.6g}")


def _metric_values(build: _Build, spec: ServerSpec, snapshot: Snapshot) -> tuple[float, ...]:
    """In the order of the rows."""
    cached, generated, steps = snapshot.cached_tokens, snapshot.generated_tokens, snapshot.steps
    processed = snapshot.prompt_tokens - cached
    prompt_seconds, seconds = snapshot.prefill_seconds, snapshot.decode_seconds
    prompt_rate = processed / prompt_seconds if prompt_seconds > 0 else 0.0
    rate = generated / seconds if seconds > 0 else 0.0
    # A step gives each busy slot one token, apart from the prompts in it.
    busy = min(float(spec.max_batch), max(0.0, snapshot.step_tokens - processed) / steps) if steps > 0 else 0.0
    running, waiting = snapshot.running, snapshot.waiting
    if build.old:
        blocks = snapshot.kv_blocks_used
        usage, held = blocks / max(1, spec.kv_blocks), blocks * spec.block_tokens
        return (
            *(processed, prompt_seconds, generated, seconds, steps, busy),
            *(prompt_rate, rate, usage, held, running, waiting),
        )
    return (
        *(processed, cached, prompt_seconds, generated, seconds, steps, snapshot.longest_tokens, 0, 0, 0),
        *(prompt_rate, rate, running, waiting, busy),
    )


# Requests -------------------------------------------------------------------------------------------------------------

_APIS: Mapping[str, Api] = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completions",
}
_NUMBERS = (
    *("max_tokens", "max_completion_tokens", "n_predict", "n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repeat_penalty"),
)
_BOOLEANS = ("stream", "ignore_eos", "cache_prompt")
_BAD_PROMPT = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, or a list of '
    "mixed strings & tokens."
)


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int | float, "number"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return value if isinstance(value, int | float) else None


def _bad_field(fields: Mapping[str, Any], spec: ServerSpec) -> str | None:
    """What a build of 2026 says of a field that it cannot take; null means the default, a boolean is a number."""
    for name in _NUMBERS:
        if fields.get(name) is not None and _number(fields, name) is None:
            return _BAD_TYPE.format(name, "number", _type_name(fields[name]))
    for name in _BOOLEANS:
        if fields.get(name) is not None and not isinstance(fields[name], bool):
            return _BAD_TYPE.format(name, "boolean", _type_name(fields[name]))
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        number = _number(fields, name)
        if number is not None and not -1 <= number <= _LARGEST_INT:
            return _OUT_OF_RANGE.format(name, -1, _LARGEST_INT, number)
    number = _number(fields, "n")
    if number is not None and not 1 <= number <= spec.max_batch:
        return _OUT_OF_RANGE.format("n", 1, spec.max_batch, number)
    return None


def _parse_error(error: Exception) -> dict[str, int | str]:
    """In nlohmann's words, without the piece of the request that it would repeat."""
    return {"message": _NOT_JSON.format(getattr(error, "lineno", 1), getattr(error, "colno", 1))}


def _parse(body: bytes) -> Any:
    """The JSON in a body; ValueError or RecursionError where the engine would find none."""
    document = json.loads(body)
    if b"\\ud" in body.lower():
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair is a ValueError, as it is there
    return document


def _prompt(value: Any) -> str | None:
    """One prompt: a string, an object with one, or tokens; each token counts as a word."""
    if isinstance(value, dict):
        value = value.get("prompt_string")
    if isinstance(value, list) and value and all(isinstance(item, int | str) for item in value):
        value = " ".join(map(str, value))
    return value if isinstance(value, str) else None


def _prompts(value: Any) -> list[str]:
    """The texts of a `prompt` in any of its forms; empty when it has none of them."""
    several = isinstance(value, list) and not any(isinstance(item, int) for item in value)
    prompts = [_prompt(item) for item in (value if several else [value])]
    return [prompt for prompt in prompts if prompt is not None] if None not in prompts else []


def _bad_messages(build: _Build, fields: Any) -> tuple[int, str] | None:
    """What is wrong with the messages of a chat."""
    if build.old:
        if not isinstance(fields, dict):
            return 500, f"[json.exception.type_error.304] cannot use at() with {_type_name(fields)}"
        if "messages" not in fields:
            return 500, _NO_FIELD.format("messages")
        if not isinstance(fields["messages"], list) or any(
            not isinstance(message, dict) or "content" not in message for message in fields["messages"]
        ):
            return 500, "Missing 'content' (ref: https://github.com/ggml-org/llama.cpp/issues/8367)"
        return None
    if not isinstance(fields, dict) or "messages" not in fields:
        return 400, "'messages' is required"
    if not isinstance(fields["messages"], list):
        return 400, "Expected 'messages' to be an array"
    for message in fields["messages"]:
        if not isinstance(message, dict):
            return 500, "Failed to parse messages: Expected 'message' to be an object"
        if "content" not in message and message.get("role") != "assistant":
            return 400, "All non-assistant messages must contain 'content'"
        if not isinstance(message.get("content"), str | list | None):
            return 400, "Expected 'content' to be a string or an array"
        if "role" not in message:
            return 500, "Failed to parse messages: Missing 'role' in message"
    return None


def _bad_prompt(build: _Build, fields: Any) -> tuple[int, str]:
    """What is wrong with a completion without a usable prompt."""
    if isinstance(fields, dict) and "prompt" in fields:
        return 400, _BAD_PROMPT
    if build.old:
        return 500, '"prompt" is required'
    if not isinstance(fields, dict):
        return 400, f"[json.exception.type_error.304] cannot use at() with {_type_name(fields)}"
    return 400, _NO_FIELD.format("prompt")


def _chat_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt that the chat template makes: five tokens around each message, three that open the answer."""
    parts = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append(f"<|im_start|> {message.get('role')} Ċ {content or ''} <|im_end|> Ċ")
    return " ".join((*parts, "<|im_start|> assistant Ċ"))


# Answers --------------------------------------------------------------------------------------------------------------


def _timings(build: _Build, usage: Usage) -> dict[str, Any]:
    """Milliseconds with microseconds; the first token is free in builds of 2026, as the prompt's last step gives it."""
    prompt, predicted = max(0, usage.prompt_tokens - usage.cached_tokens), usage.completion_tokens
    prompt_ms, predicted_ms = round(usage.prompt_seconds * 1e3, 3), round(usage.decode_seconds * 1e3, 3)
    paid = predicted if build.old else predicted - 1
    timings: dict[str, Any] = {} if build.old else {"cache_n": usage.cached_tokens}
    return timings | {
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": 1e3 / prompt_ms * prompt if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / paid if paid > 0 else 0.0,
        "predicted_per_second": 1e3 / predicted_ms * max(0, paid) if predicted_ms else 0.0,
    }


def _usage(build: _Build, usage: Usage) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.completion_tokens + usage.prompt_tokens,
    }
    return counts if build.old else counts | {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


_REASONS = {Finish.LENGTH: "length", Finish.STOP: "stop"}
_DONE = b"data: [DONE]\n\n"
_NOTHING: Mapping[str, Any] = {}


class _Frames:
    """The frames of one streamed answer; every choice gets the same text."""

    def __init__(self, build: _Build, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> None:
        self.status = 200
        self.content_type = "text/event-stream"
        buffering = () if build.old else (("X-Accel-Buffering", "no"),)
        self.headers: tuple[tuple[str, str], ...] = (*_SERVER_HEADERS, *buffering, _KEEP)
        self._build = build
        self._spec = spec
        self._asked = asked
        self._chat = asked.api == "chat"
        identity = _identity(build, spec, request_id, t_ns)
        self._id = {"id": identity.pop("id")}
        if self._chat:
            identity = {"created": identity.pop("created"), **self._id, **identity, "object": "chat.completion.chunk"}
        else:
            identity["object"] = "text_completion"
        self._identity = identity

    def opening(self) -> bytes:
        """The role chunk of a chat."""
        if not self._chat or self._build.old:
            return b""
        return self._chunks(None, {"role": "assistant", "content": None})

    def tokens(self, texts: Sequence[str], *, reasoning: bool = False) -> bytes:
        """One frame a choice."""
        text = "".join(texts)
        if not self._chat:
            return self._chunks(None, text)
        return self._chunks(None, {"reasoning_content" if reasoning and not self._build.old else "content": text})

    def ending(self, finish: Finish, usage: Usage, last_texts: Sequence[str] = ()) -> bytes:
        """The last tokens' own frame, then what ends the answer; nothing more for one that was broken off."""
        last = self.tokens(last_texts) if last_texts else b""
        if finish is Finish.KV_FULL:
            return last + self.error(Trouble.KV_FULL)
        reason = _REASONS.get(finish)
        if reason is None:
            return last
        build = self._build
        used, timings = {"usage": _usage(build, usage)}, {"timings": _timings(build, usage)}
        if not self._chat:
            closing = self._chunks(reason, "", used, timings)
        elif build.old:
            closing = self._chunks(reason, {}, used, timings)
        elif self._asked.include_usage:
            summary = self._event([], used, timings)
            closing = b"".join(
                self._event([self._choice(index, reason, {})]) + summary for index in range(self._asked.choices)
            )
        else:
            closing = self._chunks(reason, {}, {}, timings)
        return last + closing + _DONE

    def error(self, trouble: Trouble, message: str | None = None) -> bytes:
        """The event of an error, after which a build of 2026 sends nothing, not even `[DONE]`."""
        detail: dict[str, int | str] = {} if message is None else {"message": message}
        document = _error(self._build, self._spec, trouble, detail)
        if self._build.old:
            return b"error: " + _dump(document["error"]) + b"\n\n" + _DONE
        return b"data: " + _dump(document) + b"\n\n"

    def _chunks(self, reason: str | None, part: Any, *extra: Mapping[str, Any]) -> bytes:
        choices = range(self._asked.choices)
        return b"".join(self._event([self._choice(index, reason, part)], *extra) for index in choices)

    def _choice(self, index: int, reason: str | None, part: Any) -> dict[str, Any]:
        if self._chat:
            return {"finish_reason": reason, "index": index, "delta": part}
        return {"text": part, "index": index, "logprobs": None, "finish_reason": reason}

    def _event(
        self, choices: list[dict[str, Any]], used: Mapping[str, Any] = _NOTHING, timings: Mapping[str, Any] = _NOTHING
    ) -> bytes:
        # In a text completion the id comes after the usage; in a chat it is among the identity already.
        document = {"choices": choices, **self._identity, **used, **self._id, **timings}
        return b"data: " + _dump(document) + b"\n\n"


def _identity(build: _Build, spec: ServerSpec, request_id: int, t_ns: int) -> dict[str, Any]:
    return {
        "created": t_ns // _NS,
        "model": spec.model,
        "system_fingerprint": build.info,
        "id": f"chatcmpl-{_letters(f'{request_id} {t_ns}')}",
    }


# Logs -----------------------------------------------------------------------------------------------------------------

_Line = tuple[float, str, str]
"""Share of the start that has gone by, level, text."""


def _srv(function: str, text: str) -> str:
    return f"srv  {function[:12]:>12}: {text}"


def _cmn(function: str, text: str) -> str:
    return f"cmn  {function[:12]:>12}: {text}"


def _stamped(seconds: float, level: str, text: str) -> LogLine:
    """A line of a build of 2026: minutes, seconds, milliseconds and microseconds since the launch, and a level."""
    microseconds = round(seconds * 1e6)
    whole, rest = divmod(microseconds, 1_000_000)
    clock = f"{whole // 60}.{whole % 60:02d}.{rest // 1000:03d}.{rest % 1000:03d}"
    return LogLine(seconds, f"{clock} {level} {text}")


def _devices(spec: ServerSpec) -> list[str]:
    return [f"CUDA{card}" for card in range(spec.memory.cards)] or ["CPU"]


@dataclass(frozen=True, slots=True)
class _Contexts:
    """Tokens of context: of one sequence as the cache was made, in all, and what the model was trained for."""

    per_sequence: int
    total: int
    trained: int | None

    @classmethod
    def of(cls, spec: ServerSpec) -> "_Contexts":
        trained = spec.settings.get("n_ctx_train")
        if not spec.policy.partitioned:
            per_sequence = total = spec.kv_capacity_tokens
        else:
            per_sequence = _setting(spec, "n_ctx", spec.context_tokens * spec.max_batch) // spec.max_batch
            total = per_sequence * spec.max_batch
        return cls(per_sequence, total, None if trained is None else int(trained))

    @property
    def fit_note(self) -> str | None:
        """How the context compares with what the model was trained for."""
        if self.trained is None or self.per_sequence == self.trained:
            return None
        if self.per_sequence > self.trained:
            return f"({self.per_sequence}) > n_ctx_train ({self.trained}) -- possible training context overflow"
        return (
            f"({self.per_sequence}) < n_ctx_train ({self.trained}) -- the full capacity of the model will not be "
            "utilized"
        )


def _loading_lines(spec: ServerSpec) -> list[_Line]:
    """Where the weights go: the same words in every build."""
    weights, layers = spec.memory.weights_bytes / _MIB, _setting(spec, "n_layer", 32)
    names = _devices(spec) if spec.memory.cards else ["CPU_Mapped"]
    offloading = (
        f"load_tensors: offloading {layers} repeating layers to GPU",
        "load_tensors: offloading output layer to GPU",
        f"load_tensors: offloaded {layers + 1}/{layers + 1} layers to GPU",
    )
    return [
        (0.03, "I", "load_tensors: loading model tensors, this can take a while... (mmap = true)"),
        *((0.6, "I", text) for text in offloading if spec.memory.cards),
        *((0.6, "I", f"load_tensors: {name:>12} model buffer size = {weights:8.2f} MiB") for name in names),
    ]


def _context_lines(build: _Build, spec: ServerSpec, contexts: _Contexts) -> list[_Line]:
    """The context, the KV cache and the compute buffers."""
    slots, memory, devices, layers = spec.max_batch, spec.memory, _devices(spec), _setting(spec, "n_layer", 32)
    unified, batch = not spec.policy.partitioned, max(spec.token_budget, 1)
    cache, compute, total = memory.kv_cache_bytes / _MIB, memory.workspace_bytes / _MIB, len(devices)
    total_cache = cache * total
    halves = f"K (f16): {total_cache / 2:7.2f} MiB, V (f16): {total_cache / 2:7.2f} MiB"
    figures: list[tuple[str, int | str]] = [("n_seq_max", slots), ("n_ctx", contexts.total)]
    if build.old:
        figures += [("n_ctx_per_seq", contexts.total // slots), ("n_batch", batch), ("n_ubatch", min(batch, 512))]
        figures += [("causal_attn", 1), ("flash_attn", 0)]
        kinds = f"type_k = 'f16', type_v = 'f16', n_layer = {layers}, can_shift = 1"
        sizing = [f"init: kv_size = {contexts.total}, offload = {int(memory.cards > 0)}, {kinds}"]
        sized = [f"llama_context: KV self size  = {total_cache:7.2f} MiB, {halves}"]
        width, pool, graph = 13, "init", "llama_context"
    else:
        figures += [("n_ctx_seq", contexts.per_sequence), ("n_batch", batch), ("n_ubatch", min(batch, 512))]
        figures += [("causal_attn", 1), ("flash_attn", "auto"), ("kv_unified", "true" if unified else "false")]
        cells = f"{contexts.per_sequence:6d} cells, {layers:3d} layers, {slots:2d}/{1 if unified else slots} seqs"
        sizing = []
        sized = [f"llama_kv_cache: size = {total_cache:7.2f} MiB ({cells}), {halves}", "sched_reserve: reserving ..."]
        width, pool, graph = 21, "llama_kv_cache", "sched_reserve"
    return [
        (0.8, "I", "llama_context: constructing llama_context"),
        *((0.8, "I", f"llama_context: {name:<{width}} = {value}") for name, value in figures),
        *((0.82, "I", text) for text in sizing),
        *((0.82, "I", f"{pool}: {name:>10} KV buffer size = {cache:8.2f} MiB") for name in devices),
        *((0.85, "I", text) for text in sized),
        *((0.9, "I", f"{graph}: {name:>10} compute buffer size = {compute:8.2f} MiB") for name in devices),
    ]


def _no_room(spec: ServerSpec, size_bytes: int, function: str) -> list[str]:
    """What the backend says when it cannot have a buffer."""
    if spec.memory.cards:
        where = "ggml_backend_cuda_buffer_type_alloc_buffer"
        words = [f"{where}: allocating {size_bytes / _MIB:.2f} MiB on device 0: cudaMalloc failed: out of memory"]
    else:
        words = [
            f"ggml_aligned_malloc: insufficient memory (attempted to allocate {size_bytes / _MIB:6.2f} MB)",
            f"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size {size_bytes}",
        ]
    return [*words, f"{function}: failed to allocate {_devices(spec)[0]} buffer of size {size_bytes}"]


def _failure_lines(build: _Build, spec: ServerSpec, failure: StartFailure) -> list[_Line]:
    path, memory = _model_path(spec), spec.memory
    of_context = "llama_init_from_model: failed to initialize the context: failed to allocate"
    of_weights = failure in {StartFailure.WEIGHTS_MISSING, StartFailure.WEIGHTS_OUT_OF_MEMORY}
    if failure is StartFailure.WEIGHTS_MISSING:
        reasons = [
            f"gguf_init_from_file: failed to open GGUF file '{path}' (No such file or directory)",
            f"llama_model_load: error loading model: llama_model_loader: failed to load model from {path}",
        ]
    elif failure is StartFailure.WEIGHTS_OUT_OF_MEMORY:
        reasons = _no_room(spec, memory.weights_bytes, build.allocator)
        reasons.append(f"llama_model_load: error loading model: unable to allocate {_devices(spec)[0]} buffer")
    elif failure is StartFailure.WARMUP_OUT_OF_MEMORY:
        graph = "ggml_gallocr_reserve_n" if build.old else "ggml_gallocr_reserve_n_impl"
        reasons = _no_room(spec, memory.workspace_bytes, graph)
        reasons += ["graph_reserve: failed to allocate compute buffers", f"{of_context} compute pp buffers"]
    else:
        reasons = [*_no_room(spec, memory.kv_cache_bytes, build.allocator), f"{of_context} buffer for kv cache"]
    lines: list[_Line] = []
    if failure is StartFailure.KV_BELOW_ONE_REQUEST and not build.old:
        unfit = "was unable to fit model into system memory by reducing context, abort"
        lines.append((0.01, "W", f"common_fit_params: failed to fit params to free device memory: {unfit}"))
    what, function = ("load model" if of_weights else "create context with model"), "common_init_from_params"
    if of_weights:
        reasons.append("llama_model_load_from_file_impl: failed to load model")
    reasons.append(
        f"{function}: failed to {what} '{path}'" if build.old else _cmn(function, f"failed to {what} '{path}'")
    )
    given_up = f"failed to load model, '{path}'"
    if not (of_weights or build.old):
        given_up = f"failed to create_context with model '{path}'"
    leaving = "exiting due to model loading error"
    return [
        *lines,
        *((1.0, "E", text) for text in (*reasons, _srv("load_model", given_up))),
        (1.0, "I", _srv("operator()", "operator(): cleaning up before exit...")),
        (1.0, "E", f"main: {leaving}" if build.old else _srv(build.main, leaving)),
    ]


_REACHED = {
    StartFailure.WEIGHTS_MISSING: 0.02,
    StartFailure.WEIGHTS_OUT_OF_MEMORY: 0.03,
    StartFailure.NO_KV_CACHE: 0.81,
    StartFailure.KV_BELOW_ONE_REQUEST: 0.81,
    StartFailure.WARMUP_OUT_OF_MEMORY: 0.85,
}
"""How far a start that fails gets, as a share of the lines of one that does not."""


def _address(spec: ServerSpec) -> str:
    return f"http://{spec.settings.get('host') or '127.0.0.1'}:{_setting(spec, 'port', 8080)}"


def _old_lines(build: _Build, spec: ServerSpec) -> list[_Line]:
    contexts, slots = _Contexts.of(spec), spec.max_batch
    host, port = spec.settings.get("host") or "127.0.0.1", _setting(spec, "port", 8080)
    note = contexts.fit_note
    return [
        (0.0, "I", f"build: {build.info[1:].partition('-')[0]} ({build.info.partition('-')[2]})"),
        (0.001, "I", "main: binding port with default address family"),
        (0.001, "I", f"main: HTTP server is listening, hostname: {host}, port: {port}, http threads: {slots + 2}"),
        (0.001, "I", "main: loading model"),
        (0.002, "I", _srv("load_model", f"loading model '{_model_path(spec)}'")),
        *_loading_lines(spec),
        *_context_lines(build, spec, contexts),
        *([(0.81, "W", f"llama_context: n_ctx_per_seq {note}")] if note is not None else []),
        (0.95, "I", "common_init_from_params: warming up the model with an empty run - please wait ..."),
        (0.99, "I", _srv("init", f"initializing slots, n_slots = {slots}")),
        *(
            (0.99, "I", f"slot {'init':>12}: id {index:2d} | task -1 | new slot n_ctx_slot = {spec.context_tokens}")
            for index in range(slots)
        ),
        (1.0, "I", "main: model loaded"),
        (1.0, "I", f"main: server is listening on {_address(spec)} - starting the main loop"),
        (1.0, "I", _srv("update_slots", "all slots are idle")),
    ]


def _greeting(build: _Build, verbosity: int) -> list[_Line]:
    usage = "Use --ui/--no-ui (or deprecated --webui/--no-webui) to enable/disable"
    verbose = f"common_params_print_info: verbosity = {verbosity} (adjust with the `-lv N` CLI arg)"
    opening = [_cmn("common_params_print_info", verbose)]
    if build.listener == "init":
        rule = "-----------------"
        warnings: tuple[str, ...] = (
            *(rule, "CORS is set to allow all origins ('*') and no API key is set"),
            "this can be a security risk (cross-origin attacks)",
            *("more info: https://github.com/ggml-org/llama.cpp/pull/25655", rule),
        )
    else:
        opening.insert(0, _srv(build.main, "initializing ..."))
        if build.main == "init":
            opening.insert(1, _srv(build.main, f"build_info: {build.info}"))
        risk = "no API key is set and CORS allows all origins"
        warnings = (f"security: {risk} (see https://github.com/ggml-org/llama.cpp/pull/25655)",)
    opening.extend((_srv(build.listener, "The UI is disabled"), _srv(build.listener, usage)))
    return [
        *((0.0005, "I", text) for text in opening),
        *((0.001, "W", _srv(build.main, text)) for text in warnings),
        *([(0.001, "I", _srv(build.main, "loading model"))] if build.main == "init" else []),
    ]


def _new_lines(build: _Build, spec: ServerSpec) -> list[_Line]:
    contexts, context, unified = _Contexts.of(spec), spec.context_tokens, not spec.policy.partitioned
    verbosity = _setting(spec, "verbosity", 3)
    lines = [
        *_greeting(build, verbosity),
        (0.002, "I", _srv("load_model", f"loading model '{_model_path(spec)}'")),
    ]
    if verbosity >= 4:
        lines.extend(_loading_lines(spec))
    note, too_long = contexts.fit_note, contexts.trained is not None and contexts.per_sequence > contexts.trained
    if note is not None and (too_long or verbosity >= 4):
        lines.append((0.81, "W" if too_long else "I", f"llama_context: n_ctx_seq {note}"))
    if verbosity >= 4:
        lines.extend(_context_lines(build, spec, contexts))
    lines.append((0.95, "I", _cmn("init", "llama threadpool init, n_threads = 1")))
    if too_long and context == contexts.trained:
        capping = f"the slot context ({contexts.per_sequence}) exceeds the training context of the model ({context})"
        lines.append((0.98, "W", _srv("load_model", f"{capping} - capping")))
    elif unified and context != contexts.per_sequence:
        capping = f"capping per-slot context ({contexts.per_sequence}) to --kv-unified-per-slot ({context})"
        lines.append((0.98, "I", _srv("load_model", capping)))
    shared = "true" if unified else "false"
    slots = f"initializing, n_slots = {spec.max_batch}, n_ctx_slot = {context}, kv_unified = '{shared}'"
    lines.append((0.99, "I", _srv("load_model", slots)))
    if verbosity >= 4:
        lines.extend(
            (0.99, "I", f"slot {'load_model':>12}: id {index:2d} | task -1 | new slot, n_ctx = {context}")
            for index in range(spec.max_batch)
        )
    lines.append((1.0, "I", _srv(build.main, "model loaded")))
    lines.append((1.0, "I", _srv(build.main, f"listening on {_address(spec)}")))
    return lines


def _last_words(build: _Build, trouble: Trouble, spec: ServerSpec) -> list[tuple[str, str]]:
    """Level and text of what is logged at the end; no level for what an abort prints past the log."""
    aborted = ("", "ggml-cuda.cu:103: CUDA error")
    if trouble is Trouble.KV_FULL and build.old:
        full = "failed to decode the batch: KV cache is full - try increasing it via the context size"
        return [("E", _srv("update_slots", f"{full}, i = 0, n_batch = 1, ret = 1"))]
    if trouble is Trouble.KV_FULL:
        retry = "failed to find free space in the KV cache, retrying with smaller batch size"
        where, full = "off = 0, n_batch = 1, ret = 1", "Context size has been exceeded."
        return [
            ("W", f"decode: failed to find a memory slot for batch of size {spec.max_batch}"),
            ("W", _srv("decode", f"{retry}, {where}")),
            ("E", _srv("decode", f"{full} {where}")),
            ("E", _srv("update_slots", f"decode() failed: {full}")),
        ]
    if spec.memory.cards and trouble is Trouble.OUT_OF_MEMORY:
        return [
            ("E", _no_room(spec, 512 * _MIB, "")[0]),
            ("E", "CUDA error: out of memory"),
            ("E", "  current device: 0, in function alloc at ggml-cuda.cu:509"),
            ("E", "  cuMemCreate(&handle, reserve_size, &prop, 0)"),
            aborted,
        ]
    if spec.memory.cards and trouble in {Trouble.ENGINE_DEAD, Trouble.INTERNAL}:
        return [
            ("E", "CUDA error: an illegal memory access was encountered"),
            ("E", "  current device: 0, in function ggml_backend_cuda_synchronize at ggml-cuda.cu:2981"),
            ("E", "  cudaStreamSynchronize(cuda_ctx->stream())"),
            aborted,
        ]
    return []


# The dialect ----------------------------------------------------------------------------------------------------------


class _LlamaCpp:
    """See `serving.simulator.dialects.base.Dialect`."""

    name = "llamacpp"
    releases: Sequence[str] = tuple(build.release for build in _BUILDS)
    edges: Mapping[str, tuple[float, ...]] = {}

    def read_request(self, path: str, body: bytes, spec: ServerSpec) -> Asked | Page:
        """As the server reads it: lax in the old build, checked field by field in those of 2026."""
        build = _build_of(spec.release)
        api = _APIS.get(path.partition("?")[0])
        if api is None:
            return self.complaint(Trouble.NOT_FOUND, spec)
        try:
            fields = _parse(body)
        except (ValueError, RecursionError) as error:
            return self.complaint(Trouble.BAD_JSON, spec, _parse_error(error))
        if api == "chat":
            bad = _bad_messages(build, fields)
            texts = [] if bad is not None else [_chat_text(fields["messages"])]
        else:
            texts = _prompts(fields.get("prompt")) if isinstance(fields, dict) else []
            bad = None if texts else _bad_prompt(build, fields)
        if bad is None and not build.old and (message := _bad_field(fields, spec)) is not None:
            bad = 400, message
        if bad is None and build.old and _number(fields, "n") not in {None, 1}:
            bad = 500, "Only one completion choice is allowed"
        if bad is not None:
            return _refusal(*bad)
        return self._asked(build, api, path, texts, fields, spec)

    def _asked(
        self, build: _Build, api: Api, path: str, texts: Sequence[str], fields: Mapping[str, Any], spec: ServerSpec
    ) -> Asked | Page:
        counted, prefix = max((tokenise(text, spec.block_tokens) for text in texts), key=lambda found: found[0])
        prompt_tokens = max(1, counted)
        room = spec.context_tokens - prompt_tokens
        if room < 1:
            return self.complaint(Trouble.PROMPT_TOO_LONG, spec, {"prompt_tokens": prompt_tokens})
        names = ("n_predict", "max_tokens") if build.old else ("n_predict", "max_tokens", "max_completion_tokens")
        wishes = [number for name in names if (number := _number(fields, name)) is not None]
        wish = wishes[0] if wishes and math.isfinite(wishes[0]) else -1
        output_tokens = room if int(wish) == -1 else min(room, max(1, int(wish)))
        options = fields.get("stream_options")
        choices = _number(fields, "n") or 1
        return Asked(
            api=api,
            path=path,
            prompt_tokens=prompt_tokens,
            prefix=prefix,
            output_tokens=output_tokens,
            ignore_eos=fields.get("ignore_eos") is True,
            stream=fields.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            choices=int(choices) * len(texts),
        )

    def page(self, path: str, spec: ServerSpec, snapshot: Snapshot) -> Page | None:
        """`/health`, `/v1/models`, `/props`, `/slots` and `/lora-adapters`; while it loads, only the models."""
        build = _build_of(spec.release)
        route, _, query = path.partition("?")
        if route in _MODEL_PATHS and (snapshot.ready or not build.old):
            return _answer(_models(build, spec, snapshot))
        if not snapshot.ready:
            return self.complaint(Trouble.LOADING, spec)
        if route == "/slots":
            if "fail_on_no_slot" in query and all(slot.is_processing for slot in _slots_of(spec, snapshot)):
                return self.complaint(Trouble.OVERLOADED, spec)
            return Page(200, _slots_page(build, spec, snapshot), _JSON, _HEADERS)
        if route == "/props":
            return _answer(_props(build, spec, snapshot))
        if route == "/lora-adapters":
            return _answer([])
        return _answer({"status": "ok"}) if route == "/health" or (route == "/v1/health" and not build.old) else None

    def post(self, path: str, body: bytes, spec: ServerSpec) -> Page | None:
        """`/tokenize`: a number for every word of `content`."""
        if path.partition("?")[0] != "/tokenize":
            return None
        try:
            fields = _parse(body)
        except (ValueError, RecursionError) as error:
            return self.complaint(Trouble.BAD_JSON, spec, _parse_error(error))
        fields = fields if isinstance(fields, dict) else {}
        vocabulary = max(1, _setting(spec, "n_vocab", 151_936))
        words = " ".join(_prompts(fields.get("content"))).split()
        tokens: list[Any] = [zlib.crc32(word.encode("utf-8", "replace")) % vocabulary for word in words]
        if fields.get("with_pieces") is True:
            tokens = [{"id": token, "piece": word} for token, word in zip(tokens, words, strict=True)]
        return _answer({"tokens": tokens})

    def asks_key(self, path: str) -> bool:
        """See `Dialect`. Only health and the models are open, metrics and slots are not."""
        return path not in _MODEL_PATHS | {"/health", "/v1/health"}

    def metrics(self, spec: ServerSpec, snapshot: Snapshot, *, renamed: bool = False) -> Page:
        """The metrics page, or 503 while the model loads.

        With `renamed`, `tokens_predicted_total`, `n_decode_total`, `requests_deferred` and, in the old build,
        `kv_cache_usage_ratio` are there under other names: `generation_tokens_total`, `engine_progress_total`,
        `requests_waiting` and `kv_cache_usage_ratio` cannot be read from the page any more. The rest can.
        """
        if not snapshot.ready:
            return self.complaint(Trouble.LOADING, spec)
        build = _build_of(spec.release)
        heads, values = _METRIC_HEADS[build.old, renamed], _metric_values(build, spec, snapshot)
        text = "".join([f"{head}{value:.6g}\n" for head, value in zip(heads, values, strict=True)])
        # The real one is the host's monotonic clock in microseconds: it marks a start and dates none.
        start = ("Process-Start-Time-Unix", str(snapshot.started_ns // 1000 % 10**13))
        return Page(200, text.encode(), "text/plain; version=0.0.4", (*_SERVER_HEADERS, start, _KEEP))

    def figures(self, spec: ServerSpec, snapshot: Snapshot, capacity_tokens: int | None = None) -> dict[str, float]:
        """See `Dialect`. What comes from the metrics page has six digits."""
        build = _build_of(spec.release)
        processed = _printed(snapshot.prompt_tokens - snapshot.cached_tokens)
        cached = _printed(snapshot.cached_tokens)
        if build.old:
            usage = _printed(snapshot.kv_blocks_used / max(1, spec.kv_blocks))
        else:
            capacity = capacity_tokens or spec.max_batch * spec.context_tokens
            held = [
                min(slot.processed_tokens + slot.cached_tokens + slot.decoded_tokens, spec.context_tokens)
                for slot in _slots_of(spec, snapshot)
                if slot.is_processing
            ]
            usage = min(1.0, sum(held) / capacity)
        return {
            "requests_running": _printed(snapshot.running),
            "requests_waiting": _printed(snapshot.waiting),
            "kv_cache_usage_ratio": usage,
            "prompt_tokens_total": processed if build.old else processed + cached,
            "prompt_tokens_cached_total": cached,
            "generation_tokens_total": _printed(snapshot.generated_tokens),
            "engine_progress_total": _printed(snapshot.steps),
        }

    def stream(self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> Stream:
        """Frames for every choice."""
        return _Frames(_build_of(spec.release), asked, spec, request_id, t_ns)

    def answer(
        self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int, text: str, finish: Finish, usage: Usage
    ) -> Page:
        """A whole answer; one that ran out of KV cache is an error."""
        if finish is Finish.KV_FULL:
            return self.complaint(Trouble.KV_FULL, spec)
        build = _build_of(spec.release)
        identity, reason = _identity(build, spec, request_id, t_ns), _REASONS.get(finish, "stop")
        chat = asked.api == "chat"
        choices: list[dict[str, Any]] = [
            {"finish_reason": reason, "index": index, "message": {"role": "assistant", "content": text}}
            if chat
            else {"text": text, "index": index, "logprobs": None, "finish_reason": reason}
            for index in range(asked.choices)
        ]
        return _answer(
            {
                "choices": choices,
                **{name: value for name, value in identity.items() if name != "id"},
                "object": "chat.completion" if chat else "text_completion",
                "usage": _usage(build, usage),
                "id": identity["id"],
                "timings": _timings(build, usage),
            }
        )

    def complaint(self, trouble: Trouble, spec: ServerSpec, detail: Mapping[str, int | str] | None = None) -> Page:
        """An error answer. The server itself never refuses for its queue: 429 and 503 are as a proxy before it says."""
        return _error_page(_error(_build_of(spec.release), spec, trouble, detail or {}))

    def startup_log(self, spec: ServerSpec, t_ns: int, failure: StartFailure | None = None) -> list[LogLine]:  # noqa: ARG002
        """The log until `spec.start_seconds`, when the server listens or has given up."""
        build = _build_of(spec.release)
        lines = _old_lines(build, spec) if build.old else _new_lines(build, spec)
        if failure is not None:
            reached = _REACHED[failure]
            lines = [line for line in lines if line[0] <= reached]
            lines += _failure_lines(build, spec, failure)
        lines.sort(key=lambda line: line[0])
        whole = spec.start_seconds
        if build.old:
            return [LogLine(share * whole, text) for share, _, text in lines]
        return [_stamped(share * whole, level, text) for share, level, text in lines]

    def death_log(self, trouble: Trouble, spec: ServerSpec, t_ns: int) -> list[LogLine]:  # noqa: ARG002
        """Its last words, stamped from the moment of death. Killed by the kernel, it has none."""
        build = _build_of(spec.release)
        words = _last_words(build, trouble, spec)
        return [
            LogLine(index * 1e-5, text) if build.old or not level else _stamped(index * 1e-5, level, text)
            for index, (level, text) in enumerate(words)
        ]


LLAMACPP_DIALECT: Dialect = _LlamaCpp()
"""llama.cpp's way to speak."""
