"""vLLM as its clients, scrapers and log readers meet it: V1, releases 0.8.5 to 0.33.0.

Release 0.32.0 follows recorded pages, streams, errors and logs; a schema test compares the two. The others follow what
is known of their metric names, messages and log lines, and nobody has compared them with a running server. Where a
release is not in the list, each detail is that of the newest release which is not newer.

Not simulated, and zero on the metrics page: model FLOPs and bytes, the multi-modal and the external cache, what a
request's output tokens took on average, the sizes of HTTP bodies. Of histograms that the simulator does not keep only
count and sum move; all their observations lie at one edge.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TypeAlias

from serving.clock import NS
from serving.simulator.dialects import asgi
from serving.simulator.dialects.asgi import GENERATION_PATHS, Invalid, RawRequest, compact, version_of, wire_string
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
from serving.simulator.dialects.prometheus import Figure, Template, bucket_values, edges_of, number
from serving.simulator.spec import Finish, ServerSpec, Snapshot

__all__ = ["VLLM_DIALECT", "VllmDialect", "_counts_aborts"]

_GIB = 2**30
_HEADERS = (("server", "uvicorn"), ("vary", "Origin"))
_ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_CHARACTERS_A_TOKEN = 13
"""Longest token of the tokenizer: a longer text is refused before it is tokenised."""
_DEFAULT_MAX_NUM_SEQS = 256
_DEFAULT_BLOCK_TOKENS = 16

# Shares of `MemoryPlan.workspace_bytes` by which the log tells it apart.
_ACTIVATION_SHARE, _GRAPH_SHARE = 0.5, 0.25

_LATENCY_EDGES = edges_of(
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
)
_FIRST_EDGES = edges_of(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
)
_BETWEEN_EDGES = edges_of("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_STEP_EDGES = edges_of("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
_HTTP_EDGES = edges_of("0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60")
_HANDLER_EDGES = edges_of("0.1 0.5 1")
_PREEMPTION_EDGES = edges_of("1 2 3 4 5 10 20")
_CHOICE_EDGES = edges_of("1 2 5 10 20")

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first", _FIRST_EDGES),
    ("inter_token_latency_seconds", "between", _BETWEEN_EDGES),
    ("request_duration_seconds", "whole", _LATENCY_EDGES),
    ("request_queue_seconds", "queue", _LATENCY_EDGES),
)

_GET_PATHS = ("/health", "/ping", "/version", "/load", "/v1/models", "/metrics")
_POST_PATHS = (*GENERATION_PATHS, "/tokenize", "/detokenize", "/v1/responses", "/v1/messages", "/invocations", "/ping")
_UNCOUNTED_PATHS = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})

_CACHE_CONFIG = {
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "is_attention_free": "False",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_caching_hash_algo": "sha256",
    "sliding_window": "None",
}
_CACHE_CONFIG_BEFORE_0_26 = {"cpu_offload_gb": "0", "swap_space_bytes": "4294967296"}
_CACHE_CONFIG_SINCE_0_26 = {
    "_block_size_resolved": "True",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "hash_block_size": "None",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "prefix_cache_retention_interval": "0",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}


@dataclass(slots=True)
class _Layout:
    """The fixed part of one server's metrics page."""

    spec: ServerSpec
    template: Template
    http: "_Keys"


class VllmDialect:
    """vLLM's way to speak."""

    name: str = "vllm"
    releases: Sequence[str] = ("0.33.0", "0.32.0", "0.20.2", "0.12.0", "0.10.2", "0.8.5")
    edges: Mapping[str, tuple[float, ...]] = MappingProxyType({signal: edges for signal, _, edges in _HISTOGRAMS})

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, int, bool, tuple[tuple[str, int], ...]], _Layout] = {}

    # ---- requests and pages

    def read_request(self, path: str, body: bytes, spec: ServerSpec) -> Asked | Page:
        """A generation request, or the engine's complaint about it.

        Of several prompts in one request only the first is looked at; each becomes `n` choices. Until 0.20 prompt and
        output together must fit the context; since then only each of them, and the output is cut to what is left.
        """
        api = GENERATION_PATHS.get(path)
        if api is None:
            return self.complaint(Trouble.NOT_FOUND, spec, {"path": path})
        raw = asgi.read_body(api, body)
        if not isinstance(raw, RawRequest):
            return _validation(spec, raw)
        if raw.stream_options and not raw.stream:
            message = "Stream options can only be defined when `stream=True`."
            return _refusal(spec, message, "stream_options")
        if raw.model is not None and raw.model != spec.model:
            return self.complaint(Trouble.UNKNOWN_MODEL, spec, {"model": raw.model})
        context, asked = spec.context_tokens, raw.max_tokens
        if asked is not None and asked > context:
            return self.complaint(Trouble.BAD_MAX_TOKENS, spec, {"asked": asked})
        if version_of(spec.release) >= (0, 14) and raw.characters > context * _CHARACTERS_A_TOKEN:
            return self.complaint(Trouble.PROMPT_TOO_LONG, spec, {"characters": raw.characters})
        tokens, prefix = tokenise(raw.text, spec.block_tokens)
        if tokens > context:
            return self.complaint(Trouble.PROMPT_TOO_LONG, spec, {"prompt_tokens": tokens})
        if not tokens:
            return _refusal(spec, "The decoder prompt cannot be empty", None)
        if tokens == context or (asked is not None and not _cuts_output(spec) and tokens + asked > context):
            return self.complaint(Trouble.PROMPT_TOO_LONG, spec, {"prompt_tokens": tokens, "asked": asked or 1})
        if asked is not None and asked < 1:
            return self.complaint(Trouble.BAD_MAX_TOKENS, spec, {"asked": asked})
        if raw.n < 1:
            return _refusal(spec, f"n must be at least 1, got {raw.n}.", None)
        if raw.n > asgi.MOST_CHOICES:
            return _refusal(spec, f"n must be at most {asgi.MOST_CHOICES}, got {raw.n}.", None)
        return Asked(
            api=api,
            path=path,
            prompt_tokens=tokens,
            prefix=prefix,
            output_tokens=min(context - tokens, context if asked is None else asked),
            ignore_eos=raw.ignore_eos,
            stream=raw.stream,
            include_usage=raw.include_usage,
            choices=raw.n,
        )

    def page(self, path: str, spec: ServerSpec, snapshot: Snapshot) -> Page | None:
        """Answer to a GET of any path but the metrics; None where vLLM has no such path.

        vLLM opens its port only when the model is loaded: there is no page of a server that is not ready.
        """
        if path in ("/health", "/ping"):
            return asgi.empty_page(200 if snapshot.ready else 503, _HEADERS)
        if path == "/version":
            return asgi.json_page({"version": spec.release}, headers=_HEADERS)
        if path == "/load":
            # Counted only with --enable-server-load-tracking.
            return asgi.json_page({"server_load": 0}, headers=_HEADERS)
        if path == "/v1/models":
            return asgi.json_page(_models(spec, snapshot.t_ns), headers=_HEADERS)
        return asgi.method_not_allowed("POST", _HEADERS) if path in _POST_PATHS else None

    def post(self, path: str, body: bytes, spec: ServerSpec) -> Page | None:
        """Answer to a POST that generates nothing; None where vLLM has no such path."""
        if path == "/ping":
            return asgi.empty_page(200, _HEADERS)
        if path in _GET_PATHS:
            return asgi.method_not_allowed("GET", _HEADERS)
        if path != "/tokenize":
            return None
        raw = asgi.read_body("chat" if b'"messages"' in body else "completions", body)
        if not isinstance(raw, RawRequest):
            return _validation(spec, raw)
        if raw.model is not None and raw.model != spec.model:
            return self.complaint(Trouble.UNKNOWN_MODEL, spec, {"model": raw.model})
        tokens = [zlib.crc32(word.encode()) % 32_000 for word in raw.text.split()]
        document = {"count": len(tokens), "max_model_len": spec.context_tokens, "tokens": tokens, "token_strs": None}
        return asgi.json_page(document, headers=_HEADERS)

    def asks_key(self, path: str) -> bool:
        """See `Dialect`. Metrics and health are open to all."""
        return path.startswith("/v1")

    # ---- metrics

    def metrics(self, spec: ServerSpec, snapshot: Snapshot, *, renamed: bool = False) -> Page:
        """The metrics page.

        `kv_cache_usage_perc` leaves out the null block, which no request can hold; a pool that is used to the last
        block shows 1. Requests that a death of the server took are counted nowhere: so is the counter.

        Args:
            spec: the server.
            snapshot: what can be seen of it.
            renamed: the gauges of running requests and of KV cache use, and the counter of generated tokens, bear names
                that are in no release and in no table of ours (`vllm:running_requests`, `vllm:kv_cache_used_ratio`,
                `vllm:output_tokens_total`): the signals `requests_running`, `kv_cache_usage_ratio` and
                `generation_tokens_total` disappear; all others stay.
        """
        layout = self._layout(spec, snapshot, renamed=renamed)
        finished, histograms, http = snapshot.finished, snapshot.histograms, snapshot.http
        stop, length = finished.get(Finish.STOP, 0.0), finished.get(Finish.LENGTH, 0.0)
        abort = finished.get(Finish.CANCELLED, 0.0) if _counts_aborts(spec) else 0.0
        error = finished.get(Finish.KV_FULL, 0.0)
        done = number(stop + length + abort + error)
        prompt, cached = number(snapshot.prompt_tokens), number(snapshot.cached_tokens)
        computed = number(snapshot.prompt_tokens - snapshot.cached_tokens)
        generated = number(snapshot.generated_tokens)
        values = {
            "running": number(snapshot.running),
            "waiting": number(snapshot.waiting),
            "usage": number(min(1.0, snapshot.kv_blocks_used / max(1, spec.kv_blocks - 1))),
            "preemptions": number(snapshot.preemptions),
            "prompt": prompt,
            "cached": cached,
            "computed": computed,
            "prompt_blocks": number(snapshot.prompt_tokens // spec.block_tokens),
            "cached_blocks": number(snapshot.cached_tokens // spec.block_tokens),
            "generated": generated,
            "stop": number(stop),
            "length": number(length),
            "abort": number(abort),
            "error": number(error),
            "done": done,
            "rejected": number(finished.get(Finish.REJECTED, 0.0)),
            "steps": number(snapshot.steps),
            "step_tokens": number(snapshot.step_tokens),
            "prefill_seconds": number(snapshot.prefill_seconds),
            "cpu_seconds": number(snapshot.process.cpu_seconds),
            "open_fds": number(snapshot.process.open_fds),
        }
        for signal, key, edges in _HISTOGRAMS:
            values.update(bucket_values(key, histograms.get(signal), edges))
        whole, between = histograms.get("request_duration_seconds"), histograms.get("inter_token_latency_seconds")
        decode_seconds = (between.sum or 0.0) if between is not None else 0.0
        values["http_sum"] = values["whole_sum"]
        values["http_count"] = values["whole_count"]
        values["inference_seconds"] = number(snapshot.prefill_seconds + decode_seconds)
        for hole, keys in layout.http:
            values[hole] = number(sum(http[key] for key in keys))
        for i, floor in enumerate(_HTTP_FLOORS):
            values[f"http_{i}"] = number(whole.cumulative[floor]) if whole is not None and floor >= 0 else "0.0"
        return Page(200, layout.template.render(values), _metrics_type(spec), _HEADERS)

    def _layout(self, spec: ServerSpec, snapshot: Snapshot, *, renamed: bool) -> _Layout:
        # By identity: a spec may hold what cannot be hashed, and is the same object in every scrape of one server. The
        # layout keeps it alive, so no other spec can take over its identity.
        key = (id(spec), snapshot.started_ns, renamed, tuple(snapshot.http))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= 64:
                self._layouts.clear()
            layout = self._layouts[key] = _lay_out(spec, snapshot, renamed=renamed)
        return layout

    # ---- answers

    def figures(self, spec: ServerSpec, snapshot: Snapshot, capacity_tokens: int | None = None) -> dict[str, float]:
        """See `Dialect`. vLLM tells its capacity itself."""
        del capacity_tokens
        ends = snapshot.finished
        done = ends.get(Finish.LENGTH, 0.0) + ends.get(Finish.STOP, 0.0) + ends.get(Finish.KV_FULL, 0.0)
        if _counts_aborts(spec):
            done += ends.get(Finish.CANCELLED, 0.0)
        errors = ends.get(Finish.KV_FULL, 0.0)
        if version_of(spec.release) < (0, 20):
            # Without a reason "error", what is read is the HTTP answers.
            errors = sum(count for (_, status), count in snapshot.http.items() if 500 <= status <= 599)
        return {
            "requests_running": float(snapshot.running),
            "requests_waiting": float(snapshot.waiting),
            "kv_cache_usage_ratio": min(1.0, snapshot.kv_blocks_used / max(1, spec.kv_blocks - 1)),
            "request_preemptions_total": float(snapshot.preemptions),
            "prompt_tokens_total": float(snapshot.prompt_tokens),
            "prompt_tokens_cached_total": float(snapshot.cached_tokens),
            "generation_tokens_total": float(snapshot.generated_tokens),
            "requests_finished_total": float(done),
            "request_errors_total": float(errors),
            "engine_progress_total": float(snapshot.steps),
        }

    def stream(self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> Stream:
        """The frames of a streamed answer. With several choices each call gives one frame for each of them."""
        kind = _ChatStream if asked.api == "chat" else _TextStream
        return kind(asked, spec, request_id, t_ns)

    def answer(
        self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int, text: str, finish: Finish, usage: Usage
    ) -> Page:
        """An answer that is not streamed."""
        if finish not in _FINISH_REASONS:
            return self.complaint(Trouble.INTERNAL, spec)
        chat = asked.api == "chat"
        tail: dict[str, Any] = {"logprobs": None, "finish_reason": _FINISH_REASONS[finish], "stop_reason": None}
        version = version_of(spec.release)
        if version >= (0, 10, 2):
            tail["token_ids"] = None
        if not chat:
            tail |= {"prompt_logprobs": None, "prompt_token_ids": None}
        if version >= (0, 30):
            tail["routed_experts"] = None
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None, _reasoning_field(spec): None}
        body = {"message": message} if chat else {"text": text}
        document: dict[str, Any] = {
            "id": _answer_id(asked, request_id, t_ns),
            "object": "chat.completion" if chat else "text_completion",
            "created": t_ns // NS,
            "model": spec.model,
            "choices": [{"index": index, **body, **tail} for index in range(asked.choices)],
            "service_tier": None,
            "system_fingerprint": _fingerprint(spec),
            "usage": _usage(spec, usage, full=True),
        }
        if chat:
            document |= {"prompt_logprobs": None, "prompt_token_ids": None}
        if chat and version >= (0, 30):
            document["prompt_text"] = None
        document["kv_transfer_params"] = None
        if version >= (0, 30):
            document |= {"ec_transfer_params": None, "metrics": None}
        return asgi.json_page(document, headers=_HEADERS)

    def complaint(self, trouble: Trouble, spec: ServerSpec, detail: Mapping[str, int | str] | None = None) -> Page:
        """An error answer. `detail` may have `prompt_tokens`, `characters`, `asked`, `model`, `allow`, `message`."""
        given = detail or {}
        own = given.get("message")
        match trouble:
            case Trouble.NOT_FOUND:
                return asgi.not_found(_HEADERS)
            case Trouble.METHOD_NOT_ALLOWED:
                return asgi.method_not_allowed(str(given.get("allow", "POST")), _HEADERS)
            case Trouble.BAD_JSON:
                reason = str(own or "Expecting value")
                fault = Invalid("json_invalid", "body.0", "JSON decode error", "<dict of 0 items>", reason)
                return _validation(spec, [fault])
            case Trouble.MISSING_MESSAGES:
                return _validation(spec, [Invalid("missing", "body.messages", "Field required", "<dict of 1 items>")])
            case Trouble.BAD_FIELD:
                message = str(own or "Input should be a valid number, unable to parse string as a number")
                return _validation(spec, [Invalid("float_parsing", "body.temperature", message, "")])
            case Trouble.UNKNOWN_MODEL:
                told = f"The model `{given.get('model', '')}` does not exist."
                if version_of(spec.release) >= (0, 30):
                    told += f" Valid aliases: {spec.model}."
                return _error(spec, 404, told, "NotFoundError", "model")
            case Trouble.BAD_MAX_TOKENS:
                return _bad_max_tokens(spec, int(given.get("asked", 0)))
            case Trouble.PROMPT_TOO_LONG:
                return _prompt_too_long(spec, given)
            case Trouble.NO_KEY:
                return asgi.json_page({"error": "Unauthorized"}, 401, _HEADERS)
            case Trouble.LOADING:
                return asgi.empty_page(503, _HEADERS)
            case Trouble.OVERLOADED | Trouble.TOO_MANY:
                status = 503 if trouble is Trouble.OVERLOADED else 429
                message = "The engine is currently busy and cannot accept new requests. "
                message += "Please try again later or on a different instance."
                kind = "Service Unavailable" if status == 503 else "Too Many Requests"
                return _error(spec, status, str(own or message), kind, None)
            case _:
                return _error(spec, 500, str(own or _death_words(trouble)), "InternalServerError", None)

    # ---- logs

    def startup_log(self, spec: ServerSpec, t_ns: int, failure: StartFailure | None = None) -> list[LogLine]:
        """The log from launch to readiness, or to the failure.

        `max_num_seqs` is in it where it is not the default, as asked: vLLM has no word for a batch limit that it cut.
        Without cards it is the log of the CPU backend.
        """
        log = _Log(spec, t_ns)
        _write_start(log, failure)
        return log.lines

    def death_log(self, trouble: Trouble, spec: ServerSpec, t_ns: int) -> list[LogLine]:
        """What it logs when it dies at run time; seconds count from the death."""
        log = _Log(spec, t_ns)
        version = version_of(spec.release)
        core, fatal = "EngineCore", "core.py:1512"
        if trouble is Trouble.OUT_OF_MEMORY:
            root = f"torch.OutOfMemoryError: {_out_of_memory(spec)}"
        else:
            text = "Worker proc VllmWorker-0 died unexpectedly"
            text += " (exit code: None)" if version >= (0, 30) else ""
            log.say(0.0, core, "multiproc_executor.py:315", f"{text}, shutting down executor.", "ERROR")
            root = "RuntimeError: cancelled"
        text = f"Dumping input data for V1 LLM engine (v{spec.release}) with config: {_engine_config(spec)}"
        log.say(0.1, core, "dump_input.py:72", text, "ERROR")
        log.say(0.1, core, fatal, "EngineCore encountered a fatal error.", "ERROR")
        for line in ("Traceback (most recent call last):", "    engine_core.run_busy_loop()", root):
            log.say(0.1, core, fatal, line, "ERROR")
        for line in (
            "AsyncLLM output_handler failed.",
            "Traceback (most recent call last):",
            "    outputs = await engine_core.get_output_async()",
            f"vllm.v1.engine.exceptions.EngineDeadError: {_ENGINE_DEAD}",
        ):
            log.say(0.2, "APIServer", "async_llm.py:906", line, "ERROR")
        for line in ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete."):
            log.plain(0.3, f"INFO:     {line}")
        log.plain(0.4, f"INFO:     Finished server process [{_PIDS['APIServer']}]")
        return log.lines


# ---- requests and answers


def _cuts_output(spec: ServerSpec) -> bool:
    return version_of(spec.release) >= (0, 21)


def _counts_aborts(spec: ServerSpec) -> bool:
    # Measured to stay 0 in 0.32 and reported so of earlier ones; the oldest are given the benefit of the doubt.
    return version_of(spec.release) < (0, 13)


def _reasoning_field(spec: ServerSpec) -> str:
    return "reasoning" if version_of(spec.release) >= (0, 11) else "reasoning_content"


def _death_words(trouble: Trouble) -> str:
    """What clients read: the process that talks to them never learns why the engine died."""
    return _ENGINE_DEAD if trouble in (Trouble.ENGINE_DEAD, Trouble.OUT_OF_MEMORY) else "Internal server error"


def _error(spec: ServerSpec, status: int, message: str, kind: str, param: str | None) -> Page:
    return asgi.json_page(_error_document(spec, status, message, kind, param), status, _HEADERS)


def _error_document(spec: ServerSpec, status: int, message: str, kind: str, param: str | None) -> dict[str, Any]:
    inner = {"message": message, "type": kind, "param": param, "code": status}
    return {"error": inner} if version_of(spec.release) >= (0, 10, 1) else {"object": "error", **inner}


def _refusal(spec: ServerSpec, message: str, param: str | None, value: int | None = None) -> Page:
    """A request whose fields are of the right type but make no sense."""
    if value is not None and version_of(spec.release) >= (0, 20):
        message += f" (parameter={param}, value={value})"
    return _error(spec, 400, message, "BadRequestError", param if version_of(spec.release) >= (0, 20) else None)


def _validation(spec: ServerSpec, faults: Sequence[Invalid]) -> Page:
    lines = []
    for fault in faults[:10]:
        told: dict[str, Any] = {"type": fault.kind, "loc": fault.loc, "msg": fault.message, "input": fault.given}
        if fault.reason is not None:
            told["ctx"] = {"error": fault.reason}
        lines.append(f"  {told}")
    label = "error" if len(faults) == 1 else "errors"
    message = "\n".join([f"{len(faults)} validation {label}:", *lines])
    named = version_of(spec.release) >= (0, 20)
    return _error(spec, 400, message, "Bad Request", faults[0].loc if named else None)


def _bad_max_tokens(spec: ServerSpec, asked: int) -> Page:
    context, version = spec.context_tokens, version_of(spec.release)
    if asked <= context:
        return _refusal(spec, f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    if version >= (0, 21):
        message = f"max_tokens={asked} cannot be greater than max_model_len={context}."
        return _refusal(spec, f"{message} Please request fewer output tokens.", "max_tokens", asked)
    return _refusal(spec, _over_context(spec, 0, asked), "max_tokens")


def _prompt_too_long(spec: ServerSpec, given: Mapping[str, int | str]) -> Page:
    context, version = spec.context_tokens, version_of(spec.release)
    limit = f"This model's maximum context length is {context} tokens."
    advice = "Please reduce the length of the input prompt."
    tokens = int(given.get("prompt_tokens", context + 1))
    if "characters" in given:
        characters, most = int(given["characters"]), context * _CHARACTERS_A_TOKEN
        message = f"{limit} However, your prompt contains {characters} characters (more than {most} characters, which "
        message += f"is the upper bound for {context} input tokens). {advice}"
        return _refusal(spec, message, "input_text", characters)
    if tokens <= context:
        if version < (0, 21):
            return _refusal(spec, _over_context(spec, tokens, int(given.get("asked", 1))), "input_tokens")
        message = f"The decoder prompt (length {tokens}) plus the number of requested output tokens (at least 1) is "
        message += f"longer than the maximum model length of {context}."
        return _refusal(spec, message, None)
    if version >= (0, 14):
        # The tokenizer stops one token past the limit.
        message = f"{limit} However, your prompt contains at least {context + 1} input tokens, which exceeds this "
        message += f"limit even without any output tokens. {advice}"
        return _refusal(spec, message, "input_tokens", context + 1)
    message = f"{limit} However, your request has {tokens} input tokens. "
    return _refusal(spec, f"{message}Please reduce the length of the input messages.", None)


def _over_context(spec: ServerSpec, tokens: int, asked: int) -> str:
    """Until 0.20: prompt and output together are more than the context."""
    context, version = spec.context_tokens, version_of(spec.release)
    limit = f"This model's maximum context length is {context} tokens"
    if version >= (0, 14):
        return (
            f"{limit}. However, you requested {asked} output tokens and your prompt contains at least {tokens} input "
            f"tokens, for a total of at least {asked + tokens} tokens."
        )
    if version >= (0, 10):
        return (
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. {limit} and your request has {tokens} "
            f"input tokens ({asked} > {context} - {tokens})."
        )
    return (
        f"{limit}. However, you requested {asked + tokens} tokens ({tokens} in the messages, {asked} in the "
        "completion). Please reduce the length of the messages or completion."
    )


def _models(spec: ServerSpec, t_ns: int) -> dict[str, Any]:
    created = t_ns // NS
    permission = {
        "id": f"modelperm-{hashlib.blake2b(spec.model.encode(), digest_size=8).hexdigest()}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": spec.model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": _model_path(spec),
        "parent": None,
        "max_model_len": spec.context_tokens,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


def _model_path(spec: ServerSpec) -> str:
    return str(spec.settings.get("model_path") or f"models/{spec.model}")


def _answer_id(asked: Asked, request_id: int, t_ns: int) -> str:
    digest = hashlib.blake2b(f"{request_id} {t_ns}".encode(), digest_size=8).hexdigest()
    return f"{'chatcmpl' if asked.api == 'chat' else 'cmpl'}-{digest}"


def _fingerprint(spec: ServerSpec) -> str | None:
    if version_of(spec.release) < (0, 30):
        return None
    return f"vllm-{spec.release}-{zlib.crc32(spec.model.encode()):08x}"


def _usage(spec: ServerSpec, usage: Usage, *, full: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    details = {"cached_tokens": usage.cached_tokens} if spec.settings.get("enable_prompt_tokens_details") else None
    if full or details is not None:
        document["prompt_tokens_details"] = details
    if full and version_of(spec.release) >= (0, 30):
        document["completion_tokens_details"] = None
    return document


_FINISH_REASONS = {Finish.LENGTH: "length", Finish.STOP: "stop", Finish.CANCELLED: "abort"}
_DONE = b"data: [DONE]\n\n"


class _Stream:
    """The frames of one answer. Texts are put between parts that are the same in each frame."""

    status = 200
    content_type = "text/event-stream; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = _HEADERS
    _object = ""

    def __init__(self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> None:
        self._asked = asked
        self._spec = spec
        self._choices = range(asked.choices)
        identity = _answer_id(asked, request_id, t_ns)
        self._head = (
            f'data: {{"id":"{identity}","object":"{self._object}","created":{t_ns // NS},'
            f'"model":{wire_string(spec.model)},"choices":['
        )

    def opening(self) -> bytes:
        """The role chunk of each choice; nothing for text completions."""
        return b""

    def tokens(self, texts: Sequence[str], *, reasoning: bool = False) -> bytes:
        """One frame for each choice with these tokens' text."""
        said = wire_string("".join(texts))
        head = self._head
        return "".join([f"{head}{self._token(i, said, reasoning=reasoning)}]}}\n\n" for i in self._choices]).encode()

    def ending(self, finish: Finish, usage: Usage, last_texts: Sequence[str] = ()) -> bytes:
        """The last text of each choice with why it ended, usage if it was asked for, and the terminator."""
        reason = _FINISH_REASONS.get(finish)
        if reason is None:
            return self.error(Trouble.INTERNAL)
        said = wire_string("".join(last_texts))
        fingerprint = _fingerprint(self._spec)
        seal = "" if fingerprint is None else f',"system_fingerprint":"{fingerprint}"'
        include_usage = self._asked.include_usage
        frames = []
        for i in self._choices:
            last = i == self._choices[-1] and not include_usage
            frames.append(f"{self._head}{self._last(i, said, reason)}]{seal if last else ''}}}\n\n")
        if include_usage:
            told = compact(_usage(self._spec, usage, full=False))
            frames.append(f'{self._head}],"usage":{told}{seal}}}\n\n')
        return "".join(frames).encode() + _DONE

    def error(self, trouble: Trouble, message: str | None = None) -> bytes:
        """An error event; the terminator follows all the same."""
        document = _error_document(self._spec, 500, message or _death_words(trouble), "InternalServerError", None)
        return f"data: {wire_string(document)}\n\n".encode() + _DONE

    def _token(self, index: int, said: str, *, reasoning: bool) -> str:
        raise NotImplementedError

    def _last(self, index: int, said: str, reason: str) -> str:
        raise NotImplementedError


class _ChatStream(_Stream):
    _object = "chat.completion.chunk"

    def __init__(self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> None:
        super().__init__(asked, spec, request_id, t_ns)
        version = version_of(spec.release)
        self._reasoning = _reasoning_field(spec)
        self._ids = ',"token_ids":null' if version >= (0, 10, 2) else ""
        self._role_tail = ',"prompt_token_ids":null' if version >= (0, 10, 2) else ""
        if version >= (0, 30):
            self._role_tail += ',"prompt_text":null'

    def opening(self) -> bytes:
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return "".join(f'{self._head}{{"index":{i},{delta}}}]{self._role_tail}}}\n\n' for i in self._choices).encode()

    def _token(self, index: int, said: str, *, reasoning: bool) -> str:
        name = self._reasoning if reasoning else "content"
        return f'{{"index":{index},"delta":{{"{name}":{said}}},"logprobs":null,"finish_reason":null{self._ids}}}'

    def _last(self, index: int, said: str, reason: str) -> str:
        return (
            f'{{"index":{index},"delta":{{"content":{said}}},"logprobs":null,"finish_reason":"{reason}",'
            f'"stop_reason":null{self._ids}}}'
        )


class _TextStream(_Stream):
    _object = "text_completion"

    def __init__(self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> None:
        super().__init__(asked, spec, request_id, t_ns)
        newer = version_of(spec.release) >= (0, 10, 2)
        self._ids = ',"prompt_token_ids":null,"token_ids":null' if newer else ""

    def _token(self, index: int, said: str, *, reasoning: bool) -> str:
        del reasoning  # text completions have no such channel
        return f'{{"index":{index},"text":{said},"logprobs":null,"finish_reason":null,"stop_reason":null{self._ids}}}'

    def _last(self, index: int, said: str, reason: str) -> str:
        return (
            f'{{"index":{index},"text":{said},"logprobs":null,"finish_reason":"{reason}",'
            f'"stop_reason":null{self._ids}}}'
        )


# ---- metrics


def _metrics_type(spec: ServerSpec) -> str:
    # It is the client library's: releases since about 0.20 bring one that names version 1.0.0 of the format.
    return f"text/plain; version={'1.0.0' if version_of(spec.release) >= (0, 20) else '0.0.4'}; charset=utf-8"


def _floor_index(edge: float) -> int:
    """Index of the largest edge of request durations that is not above `edge`; -1 when there is none."""
    return max((i for i, own in enumerate(_LATENCY_EDGES) if own <= edge), default=-1)


_HTTP_FLOORS = (*(_floor_index(edge) for edge in _HTTP_EDGES), len(_LATENCY_EDGES))


def _one_two_five(largest: int) -> tuple[float, ...]:
    edges: list[float] = []
    for exponent in range(12):
        for digit in (1, 2, 5):
            edge = digit * 10**exponent
            if edge > largest:
                return tuple(edges)
            edges.append(float(edge))
    return tuple(edges)


def _lay_out(spec: ServerSpec, snapshot: Snapshot, *, renamed: bool) -> _Layout:
    version = version_of(spec.release)
    page = Template(created=snapshot.started_ns / NS)
    base = {"engine": "0", "model_name": spec.model}
    _lay_out_process(page, snapshot)
    if version >= (0, 14):
        for what in ("flops", "read_bytes", "write_bytes"):
            page.counter(f"vllm:estimated_{what}_per_gpu_total", [(base, 0.0)])
    _lay_out_scheduler(page, spec, base, renamed=renamed)
    _lay_out_counters(page, spec, base, renamed=renamed)
    _lay_out_histograms(page, spec, base)
    page.gauge("vllm:cache_config_info", [(_cache_config(spec), 1.0)])
    return _Layout(spec, page, _lay_out_http(page, snapshot))


def _lay_out_process(page: Template, snapshot: Snapshot) -> None:
    """The API server's own process: not the engine's, whose leaks it does not show."""
    page.gauge("process_virtual_memory_bytes", [({}, 2.2e9)])
    page.gauge("process_resident_memory_bytes", [({}, 6.7e8)])
    page.gauge("process_start_time_seconds", [({}, snapshot.started_ns / NS)])
    page.counter("process_cpu_seconds_total", [({}, "cpu_seconds")], created=False)
    page.gauge("process_open_fds", [({}, "open_fds")])
    page.gauge("process_max_fds", [({}, 65536.0)])


def _lay_out_scheduler(page: Template, spec: ServerSpec, base: dict[str, str], *, renamed: bool) -> None:
    version = version_of(spec.release)
    page.gauge("vllm:running_requests" if renamed else "vllm:num_requests_running", [(base, "running")])
    page.gauge("vllm:num_requests_waiting", [(base, "waiting")])
    if version >= (0, 20):
        reasons = (({**base, "reason": "capacity"}, "waiting"), ({**base, "reason": "deferred"}, 0.0))
        page.gauge("vllm:num_requests_waiting_by_reason", reasons)
    if version >= (0, 12):
        states = (("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0))
        page.gauge("vllm:engine_sleep_state", [({**base, "sleep_state": state}, value) for state, value in states])
    if renamed:
        page.gauge("vllm:kv_cache_used_ratio", [(base, "usage")])
        return
    if version < (0, 11):
        page.gauge("vllm:gpu_cache_usage_perc", [(base, "usage")])
    if version >= (0, 9):
        page.gauge("vllm:kv_cache_usage_perc", [(base, "usage")])


def _lay_out_counters(page: Template, spec: ServerSpec, base: dict[str, str], *, renamed: bool) -> None:
    version = version_of(spec.release)
    if version < (0, 9, 2):
        # They counted blocks.
        page.counter("vllm:gpu_prefix_cache_queries_total", [(base, "prompt_blocks")])
        page.counter("vllm:gpu_prefix_cache_hits_total", [(base, "cached_blocks")])
    else:
        for prefix in ("gpu_prefix", "prefix") if version < (0, 11) else ("prefix",):
            page.counter(f"vllm:{prefix}_cache_queries_total", [(base, "prompt")])
            page.counter(f"vllm:{prefix}_cache_hits_total", [(base, "cached")])
    if version >= (0, 12):
        for cache in ("external_prefix", "mm"):
            page.counter(f"vllm:{cache}_cache_queries_total", [(base, 0.0)])
            page.counter(f"vllm:{cache}_cache_hits_total", [(base, 0.0)])
    page.counter("vllm:num_preemptions_total", [(base, "preemptions")])
    page.counter("vllm:prompt_tokens_total", [(base, "prompt")])
    if version >= (0, 20):
        sources: list[tuple[str, Figure]] = [("local_compute", "computed"), ("local_cache_hit", "cached")]
        sources.append(("external_kv_transfer", 0.0))
        page.counter("vllm:prompt_tokens_by_source_total", [({**base, "source": name}, hole) for name, hole in sources])
        page.counter("vllm:prompt_tokens_cached_total", [(base, "cached")])
    if version >= (0, 30):
        tiers: list[tuple[str, Figure]] = [("device", "cached"), ("host", 0.0), ("p2p", 0.0), ("disk", 0.0)]
        tiers.append(("external_unspecified", 0.0))
        rows = [({**base, "source": name}, hole) for name, hole in tiers]
        page.counter("vllm:prompt_tokens_cached_by_source_total", rows)
    page.counter("vllm:output_tokens_total" if renamed else "vllm:generation_tokens_total", [(base, "generated")])
    reasons: list[tuple[str, Figure]] = [("stop", "stop"), ("length", "length"), ("abort", "abort")]
    if version >= (0, 20):
        reasons += [("error", "error"), ("repetition", 0.0)]
    page.counter("vllm:request_success_total", [({**base, "finished_reason": name}, hole) for name, hole in reasons])
    if version >= (0, 30):
        model = {"model_name": spec.model}
        limits: list[tuple[str, Figure]] = [("max_num_queued_reqs", "rejected"), ("max_num_queued_tokens", 0.0)]
        page.counter("vllm:admission_rejections_total", [({**model, "reason": name}, hole) for name, hole in limits])


def _lay_out_histograms(page: Template, spec: ServerSpec, base: dict[str, str]) -> None:
    version = version_of(spec.release)

    def plain(name: str, edges: tuple[float, ...], count: Figure, total: Figure, settled_at: float = 0.0) -> None:
        page.plain_histogram(f"vllm:{name}", edges, [(base, count, total)], settled_at or edges[-1])

    sizes = _one_two_five(spec.context_tokens)
    plain("request_prompt_tokens", sizes, "done", "prompt")
    plain("request_generation_tokens", sizes, "done", "generated")
    plain("iteration_tokens_total", _STEP_EDGES, "steps", "step_tokens")
    plain("request_max_num_generation_tokens", sizes, "done", "generated")
    plain("request_params_n", _CHOICE_EDGES, "done", "done", 1.0)
    plain("request_params_max_tokens", sizes, "done", "generated")
    page.histogram("vllm:time_to_first_token_seconds", _FIRST_EDGES, [(base, "first")])
    if version < (0, 12):
        page.histogram("vllm:time_per_output_token_seconds", _BETWEEN_EDGES, [(base, "between")])
    if version >= (0, 10, 2):
        page.histogram("vllm:inter_token_latency_seconds", _BETWEEN_EDGES, [(base, "between")])
    if version >= (0, 12):
        plain("request_time_per_output_token_seconds", _BETWEEN_EDGES, 0.0, 0.0)
    page.histogram("vllm:e2e_request_latency_seconds", _LATENCY_EDGES, [(base, "whole")])
    page.histogram("vllm:request_queue_time_seconds", _LATENCY_EDGES, [(base, "queue")])
    plain("request_inference_time_seconds", _LATENCY_EDGES, "done", "inference_seconds")
    plain("request_prefill_time_seconds", _LATENCY_EDGES, "done", "prefill_seconds")
    plain("request_decode_time_seconds", _LATENCY_EDGES, "done", "between_sum")
    if version >= (0, 30):
        plain("request_num_preemptions", _PREEMPTION_EDGES, "done", "preemptions")
    if version >= (0, 12):
        plain("request_prefill_kv_computed_tokens", sizes, "done", "computed")


_Keys: TypeAlias = list[tuple[str, list[tuple[str, int]]]]
"""Hole -> the (handler, status) of a snapshot that it adds up."""


def _lay_out_http(page: Template, snapshot: Snapshot) -> _Keys:
    """What the web framework's own instruments say: by handlers that it has, and by hundreds of statuses.

    How long answers took is told by request durations alone, each at the next edge above that both know.
    """
    groups: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    methods: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for path, status in snapshot.http:
        if path in _UNCOUNTED_PATHS:
            continue
        handler = path if path in _POST_PATHS or path in _GET_PATHS else "none"
        method = "POST" if path in _POST_PATHS else "GET"
        groups.setdefault((handler, method, f"{status // 100}xx"), []).append((path, status))
        methods.setdefault((handler, method), []).append((path, status))
    by_status = [(f"requests_{i}", keys) for i, keys in enumerate(groups.values())]
    by_handler = [(f"handler_{i}", keys) for i, keys in enumerate(methods.values())]
    page.counter(
        "http_requests_total",
        [
            ({"handler": handler, "method": method, "status": status}, hole)
            for (handler, method, status), (hole, _) in zip(groups, by_status, strict=True)
        ],
    )
    rows = [(handler, method, hole) for (handler, method), (hole, _) in zip(methods, by_handler, strict=True)]
    for name in ("http_request_size_bytes", "http_response_size_bytes"):
        page.summary(name, [({"handler": handler}, hole) for handler, _, hole in rows])
    page.histogram("http_request_duration_highr_seconds", _HTTP_EDGES, [({}, "http")])
    durations = [({"handler": handler, "method": method}, hole, 0.0) for handler, method, hole in rows]
    page.plain_histogram("http_request_duration_seconds", _HANDLER_EDGES, durations)
    return by_status + by_handler


def _cache_config(spec: ServerSpec) -> dict[str, str]:
    labels = dict(_CACHE_CONFIG)
    newer = version_of(spec.release) >= (0, 26)
    labels |= _CACHE_CONFIG_SINCE_0_26 if newer else _CACHE_CONFIG_BEFORE_0_26
    labels |= {name: str(value) for name, value in spec.settings.items() if name in labels}
    labels |= {"engine": "0", "block_size": str(spec.block_tokens), "num_gpu_blocks": str(spec.kv_blocks)}
    labels["enable_prefix_caching"] = str(spec.prefix_cache)
    if newer:
        labels["effective_attention_block_size"] = str(spec.block_tokens)
        labels["kv_cache_size_tokens"] = str(spec.kv_capacity_tokens)
        labels["kv_cache_max_concurrency"] = str(spec.kv_capacity_tokens / spec.context_tokens)
    return labels


# ---- logs

_PIDS = {"APIServer": 1201, "EngineCore": 1338, "Worker": 1402}


class _Log:
    """Lines of one server's log, each with the prefix that its release gives it."""

    def __init__(self, spec: ServerSpec, t_ns: int) -> None:
        self.spec = spec
        self.lines: list[LogLine] = []
        self._t_ns = t_ns
        self._version = version_of(spec.release)

    def say(self, seconds: float, who: str, where: str, text: str, level: str = "INFO", rank: int = 0) -> None:
        """One line of the engine's own logger. `who` is APIServer, EngineCore or Worker."""
        stamp = datetime.fromtimestamp((self._t_ns + round(seconds * NS)) // NS, UTC).strftime("%m-%d %H:%M:%S")
        self.lines.append(LogLine(seconds, f"{self._process(who, rank)}{level} {stamp} [{where}] {text}"))

    def plain(self, seconds: float, text: str) -> None:
        """A line that does not come from the engine's logger."""
        self.lines.append(LogLine(seconds, text))

    def workers(self, seconds: float, where: str, text: str, *, once_since: tuple[int, ...] = (1000,)) -> None:
        """One line of each worker (RANK becomes its number), or of the first only from a release on."""
        ranks = 1 if self._version >= once_since else max(1, self.spec.card_parallel)
        for rank in range(ranks):
            self.say(seconds, "Worker", where, text.replace("RANK", str(rank)), rank=rank)

    def fail(self, seconds: float, error: str) -> None:
        """The engine does not start, and so neither does the server."""
        for line in ("EngineCore failed to start.", "Traceback (most recent call last):", error):
            self.say(seconds, "EngineCore", "core.py:1512", line, "ERROR")
        why = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
        self.plain(seconds, f"{self._process('APIServer', 0)}{why}")

    def _process(self, who: str, rank: int) -> str:
        version, several = self._version, self.spec.card_parallel > 1
        if version < (0, 10):
            return f"(VllmWorker rank={rank} pid={_PIDS[who] + rank}) " if who == "Worker" and several else ""
        core = "EngineCore" if version >= (0, 21) else "EngineCore_DP0"
        if who == "Worker" and several:
            return f"(Worker_TP{rank} pid={_PIDS[who] + rank}) "
        if who == "EngineCore" or (who == "Worker" and version < (0, 21)):
            # Until then a single worker ran inside the engine's process.
            return f"({core} pid={_PIDS['EngineCore']}) "
        return f"({who} pid={_PIDS[who]}) "


def _write_start(log: _Log, failure: StartFailure | None) -> None:
    spec, version, path = log.spec, version_of(log.spec.release), _model_path(log.spec)
    whole = spec.start_seconds
    log.say(0.05 * whole, "APIServer", "api_utils.py:347", f"vLLM API server version {spec.release}")
    log.say(0.05 * whole, "APIServer", "api_utils.py:286", f"non-default args: {_arguments(spec)}")
    architecture = spec.settings.get("architecture", "LlamaForCausalLM")
    log.say(0.10 * whole, "APIServer", "model.py:733", f"Resolved architecture: {architecture}")
    log.say(0.10 * whole, "APIServer", "model.py:2152", f"Using max model len {_asked_context(spec)}")
    budget = f"Chunked prefill is enabled with max_num_batched_tokens={spec.token_budget}."
    log.say(0.11 * whole, "APIServer", "scheduler.py:308", budget)
    text = f"Initializing a V1 LLM engine (v{spec.release}) with config: {_engine_config(spec)}"
    log.say(0.20 * whole, "EngineCore", "core.py:133", text)
    expert = "RANK" if spec.settings.get("enable_expert_parallel") else "N/A"
    ranks = f"rank RANK in world size {max(1, spec.card_parallel)} is assigned as DP rank 0, PP rank 0, "
    ranks += "PCP rank 0, " if version >= (0, 13) else ""
    ranks += f"TP rank RANK, {'ETP rank 0, ' if version >= (0, 30) else ''}EP rank {expert}"
    ranks += ", EPLB rank N/A" if version >= (0, 30) else ""
    log.workers(0.25 * whole, "parallel_state.py:2350", ranks)
    runner = "gpu_model_runner.py" if spec.memory.cards else "cpu_model_runner.py"
    log.workers(0.30 * whole, f"{runner}:68", f"Starting to load model {path}...", once_since=(0, 21))
    if not _write_weights(log, f"{runner}:5150", failure) or not _write_cache(log, failure):
        return
    log.say(0.95 * whole, "APIServer", "entry.py:140", "Starting vLLM server on http://0.0.0.0:8000")
    log.say(0.95 * whole, "APIServer", "launcher.py:186", "Available routes are:")
    for paths, method in ((_GET_PATHS, "GET"), (_POST_PATHS, "POST")):
        for route in paths:
            log.say(0.95 * whole, "APIServer", "launcher.py:195", f"Route: {route}, Methods: {method}")
    log.plain(0.98 * whole, f"INFO:     Started server process [{_PIDS['APIServer']}]")
    log.plain(0.98 * whole, "INFO:     Waiting for application startup.")
    log.plain(whole, "INFO:     Application startup complete.")


def _write_weights(log: _Log, where: str, failure: StartFailure | None) -> bool:
    """Loading the weights; whether it went well."""
    spec, version, whole = log.spec, version_of(log.spec.release), log.spec.start_seconds
    if failure is StartFailure.WEIGHTS_MISSING:
        log.fail(0.35 * whole, f"RuntimeError: Cannot find any model weights with `{_model_path(spec)}`")
        return False
    log.plain(0.40 * whole, "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]")
    if failure is StartFailure.WEIGHTS_OUT_OF_MEMORY:
        told = "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for "
        told += "weights, increasing --tensor-parallel-size, or using --quantization."
        log.say(0.50 * whole, "Worker", where, f"{told} (original error: {_out_of_memory(spec)})", "ERROR")
        log.fail(0.50 * whole, f"torch.OutOfMemoryError: {_out_of_memory(spec)}")
        return False
    log.plain(0.60 * whole, "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  1.00it/s]")
    text = f"Loading weights took {0.3 * whole:.2f} seconds"
    log.workers(0.60 * whole, "default_loader.py:501", text, once_since=(0, 13))
    if spec.memory.cards:
        size = _gib(spec.memory.weights_bytes, 2 if version >= (0, 12) else 4)
        text = f"Model loading took {size} GiB{' memory' if version >= (0, 12) else ''} and {0.35 * whole:.6f} seconds"
        log.workers(0.62 * whole, where, text, once_since=(0, 13))
    return True


def _write_cache(log: _Log, failure: StartFailure | None) -> bool:
    """From the profile run to the warm-up; whether it went well."""
    spec, version, whole = log.spec, version_of(log.spec.release), log.spec.start_seconds
    memory, context, capacity = spec.memory, spec.context_tokens, spec.kv_capacity_tokens
    pool, cards = memory.kv_cache_bytes, memory.cards
    utils = "kv_cache_utils.py:2327"
    if cards:
        shown = -abs(memory.workspace_bytes) if failure is StartFailure.NO_KV_CACHE else pool
        text = f"Available KV cache memory: {_gib(shown)} GiB"
        log.workers(0.70 * whole, "gpu_worker.py:760", text, once_since=(0, 13))
    else:
        text = f"Explicitly set ({_gib(pool, 1)}/{_gib(memory.host_base_bytes + pool)}) GiB for KV cache on node 0."
        log.say(0.70 * whole, "Worker", "cpu_worker.py:260", text)
    if failure is StartFailure.NO_KV_CACHE:
        text = "ValueError: No available memory for the cache blocks. "
        log.fail(0.71 * whole, f"{text}Try increasing `gpu_memory_utilization` when initializing the engine.")
        return False
    if failure is StartFailure.KV_BELOW_ONE_REQUEST:
        needed = pool * context / max(1, capacity)
        typo = "models's" if version < (0, 11) else "model's"
        text = f"ValueError: To serve at least one request with the {typo} max seq len "
        text += f"({context}), ({_gib(needed)} GiB KV cache is needed, which is larger than the available KV cache "
        text += f"memory ({_gib(pool)} GiB). Based on the available memory, the estimated maximum model length is "
        text += f"{capacity}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
        log.fail(0.71 * whole, f"{text}the engine.")
        return False
    override = spec.settings.get("num_gpu_blocks_override")
    if override is not None:
        asked = spec.settings.get("num_gpu_blocks_profiled", 4096)
        text = f"Overriding num_gpu_blocks={asked} with num_gpu_blocks_override={override}"
        log.say(0.72 * whole, "EngineCore", "kv_cache_utils.py:2619", text)
    if _asked_context(spec) != context:
        text = f"Auto-fit max_model_len: reduced from {_asked_context(spec)} to {context} to fit in available KV cache "
        log.say(0.72 * whole, "EngineCore", "kv_cache_utils.py:2478", f"{text}memory ({_gib(pool)} GiB)")
    size = f"{'GPU' if cards else 'CPU'} KV cache size: {capacity:,} tokens"
    most = f"Maximum concurrency for {context:,} tokens per request: {capacity / context:.2f}x"
    if version >= (0, 21):
        log.say(0.73 * whole, "EngineCore", utils, f"{size}, {most}")
    else:
        # Each worker's cache has its line, but it is the engine that counts them.
        for _ in range(1 if version >= (0, 13) else max(1, spec.card_parallel)):
            log.say(0.73 * whole, "EngineCore", utils, size)
            log.say(0.73 * whole, "EngineCore", utils, most)
    if failure is StartFailure.WARMUP_OUT_OF_MEMORY:
        text = (
            f"RuntimeError: CUDA out of memory occurred when warming up sampler with {spec.max_batch} dummy requests. "
        )
        text += "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
        log.fail(0.80 * whole, text)
        return False
    if cards:
        _write_usage(log)
    text = f"init engine (profile, create kv cache, warmup model) took {0.28 * whole:.2f} s"
    log.say(0.90 * whole, "EngineCore", "core.py:402", text)
    return True


def _write_usage(log: _Log) -> None:
    spec, version, whole = log.spec, version_of(log.spec.release), log.spec.start_seconds
    memory = spec.memory
    graphs = 0.0 if spec.settings.get("enforce_eager") else _GRAPH_SHARE * memory.workspace_bytes
    if graphs:
        text = f"Graph capturing finished in {0.1 * whole:.0f} secs, took {_gib(graphs)} GiB"
        log.workers(0.88 * whole, "gpu_model_runner.py:6582", text, once_since=(0, 13))
    if (0, 12) <= version < (0, 21) or version < (0, 10, 2):
        # Written for debugging only.
        return
    utilization = float(spec.settings.get("gpu_memory_utilization") or 0.92)
    activations = _ACTIVATION_SHARE * memory.workspace_bytes
    other = memory.workspace_bytes - activations - graphs
    total = memory.card_total_bytes
    text = f"Free memory on device ({_gib(total - memory.reserve_bytes)}/{_gib(total)} GiB) on startup. "
    text += f"Desired GPU memory utilization is ({utilization}, {_gib(utilization * total)} GiB). Actual usage is "
    if version >= (0, 21):
        text += f"{_gib(memory.weights_bytes + other)} GiB for consumed memory (weights + non-torch), "
        text += f"{_gib(activations)} GiB for peak activation, and {_gib(graphs)} GiB for CUDAGraph memory. "
    else:
        text += f"{_gib(memory.weights_bytes)} GiB for weight, {_gib(activations)} GiB for peak activation, "
        text += f"{_gib(other)} GiB for non-torch memory, and {_gib(graphs)} GiB for CUDAGraph memory. "
    text += f"Current kv cache memory in use is {_gib(memory.kv_cache_bytes)} GiB."
    log.workers(0.89 * whole, "gpu_worker.py:1034", text)


def _arguments(spec: ServerSpec) -> dict[str, Any]:
    path = _model_path(spec)
    arguments: dict[str, Any] = {"model_tag": path, "host": "0.0.0.0", "model": path, "served_model_name": [spec.model]}
    arguments["max_model_len"] = _asked_context(spec)
    if spec.block_tokens != _DEFAULT_BLOCK_TOKENS:
        arguments["block_size"] = spec.block_tokens
    if (tensor := _tensor_parallel(spec)) > 1:
        arguments["tensor_parallel_size"] = tensor
    arguments["max_num_batched_tokens"] = spec.token_budget
    asked = spec.max_batch if spec.asked_max_batch is None else spec.asked_max_batch
    if asked != _DEFAULT_MAX_NUM_SEQS:
        arguments["max_num_seqs"] = asked
    if spec.queue_limit is not None:
        arguments["max_num_queued_reqs"] = spec.queue_limit
    inner = ("model_path", "architecture", "num_gpu_blocks_profiled")
    return arguments | {name: value for name, value in spec.settings.items() if name not in inner}


def _asked_context(spec: ServerSpec) -> int:
    asked = spec.settings.get("max_model_len")
    return asked if isinstance(asked, int) and asked > spec.context_tokens else spec.context_tokens


def _stages(spec: ServerSpec) -> int:
    stages = spec.settings.get("pipeline_parallel_size")
    return stages if isinstance(stages, int) and stages > 0 else 1


def _tensor_parallel(spec: ServerSpec) -> int:
    return max(1, spec.card_parallel // _stages(spec))


def _engine_config(spec: ServerSpec) -> str:
    path = _model_path(spec)
    return (
        f"model='{path}', speculative_config=None, tokenizer='{path}', skip_tokenizer_init=False, tokenizer_mode=auto, "
        f"revision=None, trust_remote_code=False, dtype={spec.settings.get('dtype', 'torch.bfloat16')}, "
        f"max_seq_len={_asked_context(spec)}, download_dir=None, load_format=auto, "
        f"tensor_parallel_size={_tensor_parallel(spec)}, pipeline_parallel_size={_stages(spec)}, data_parallel_size=1, "
        f"quantization={spec.settings.get('quantization')}, enforce_eager={bool(spec.settings.get('enforce_eager'))}, "
        f"kv_cache_dtype={spec.settings.get('kv_cache_dtype', 'auto')}, "
        f"device_config={'cuda' if spec.memory.cards else 'cpu'}, seed=0, served_model_name={spec.model}, "
        f"enable_prefix_caching={spec.prefix_cache}, enable_chunked_prefill=True"
    )


def _out_of_memory(spec: ServerSpec) -> str:
    total = _gib(spec.memory.card_total_bytes)
    return (
        f"CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of {total} GiB of which "
        f"318.06 MiB is free."
    )


def _gib(size: float, digits: int = 2) -> str:
    return f"{size / _GIB:.{digits}f}"


VLLM_DIALECT: Dialect = VllmDialect()
"""The one that all simulated vLLM servers share."""
