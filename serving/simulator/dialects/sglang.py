"""SGLang as its clients, scrapers and log readers meet it: releases 0.4.9 to 0.5.23, started with `--enable-metrics`.

SGLang needs a GPU, so nothing here was compared with a running server: names, labels, messages and log lines follow
what is known of its releases. What one card more or less changes is told by settings under SGLang's own names:
`dp_size`, `enable_metrics_for_all_schedulers`, `enable_priority_scheduling`, `ep_size`, `enable_cache_report`. With
several data-parallel ranks each shows an equal part of the server's figures.

The dialect knows one count of generated tokens, whichever the server's policy gives it. SGLang's request counters move
when requests end; releases that have `sglang:realtime_tokens_total` show beside them what moves at once. So a server
of 0.4.9 or 0.5.5 wants `Policy.counts_at_finish`, and one of 0.5.23 does not; its request counters then run ahead.

Not simulated, and zero on the metrics page: sliding-window and state-space pools, grammars, speculation.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from serving.clock import NS
from serving.exposition import Histogram
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

__all__ = ["SGLANG_DIALECT", "SglangDialect"]

_GIB = 2**30
_HEADERS = (("server", "uvicorn"),)
_MAX_PREFILL_TOKENS = 16384
_STOP_TOKEN = 151645
_KV_FULL = "Decode out of memory. Try to lower your batch size."
_GRAPH_SHARE = 0.25
"""Share of `MemoryPlan.workspace_bytes` that the captured graphs take."""

_FIRST_EDGES = edges_of("0.1 0.2 0.4 0.6 0.8 1 2 4 6 8 10 20 40 60 80 100 200 400")
_BETWEEN_EDGES = edges_of(
    "0.002 0.004 0.006 0.008 0.01 0.015 0.02 0.025 0.03 0.035 0.04 0.06 0.08 0.1 0.2 0.4 0.6 0.8 1 2 4 6 8"
)
_WHOLE_EDGES = edges_of("0.1 0.2 0.4 0.6 0.8 1 2 4 6 8 10 20 40 60 80 100 200 400 600 1200 1800 2400")
_QUEUE_EDGES = edges_of(
    "0 0.001 0.005 0.01 0.05 0.1 0.2 0.5 1 2 3 4 5 10 15 20 30 40 50 60 70 80 90 100 200 300 400 500 600 700 800 900 "
    "1000 1200 1400 1600 1800 2000 2500 3000"
)
_RETRACTION_EDGES = edges_of("0 1 2 3 4 5 6 7 8 9 10 15 20 25 30 40 50 75 100")

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first", _FIRST_EDGES),
    ("inter_token_latency_seconds", "between", _BETWEEN_EDGES),
    ("request_duration_seconds", "whole", _WHOLE_EDGES),
    ("request_queue_seconds", "queue", _QUEUE_EDGES),
)

_POST_PATHS = (*GENERATION_PATHS, "/generate", "/flush_cache", "/abort_request", "/v1/responses", "/v1/embeddings")


@dataclass(slots=True)
class _Layout:
    """The fixed part of one server's metrics page."""

    spec: ServerSpec
    template: Template
    http: list[tuple[str, list[tuple[str, int]]]]
    """Hole -> the (endpoint, status) that it adds up."""


class SglangDialect:
    """SGLang's way to speak.

    The histogram edges are those of 0.5.23 throughout; earlier releases had fewer.
    """

    name: str = "sglang"
    releases: Sequence[str] = ("0.5.23", "0.5.5", "0.4.9")
    edges: Mapping[str, tuple[float, ...]] = MappingProxyType({signal: edges for signal, _, edges in _HISTOGRAMS})

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, bool, tuple[tuple[str, int], ...]], _Layout] = {}

    # ---- requests and pages

    def read_request(self, path: str, body: bytes, spec: ServerSpec) -> Asked | Page:
        """A generation request, or the engine's complaint about it.

        Any model's name will do. Prompt and output together must stay below the context, and the output is cut at what
        the pool can hold. Of several prompts in one request only the first is looked at; each becomes `n` choices.
        """
        api = GENERATION_PATHS.get(path)
        if api is None:
            return self.complaint(Trouble.NOT_FOUND, spec, {"path": path})
        raw = asgi.read_body(api, body)
        if not isinstance(raw, RawRequest):
            return _validation(raw)
        if raw.max_tokens is not None and raw.max_tokens <= 0:
            return self.complaint(Trouble.BAD_MAX_TOKENS, spec, {"message": f"{raw.max_tokens_field} must be positive"})
        tokens, prefix = tokenise(raw.text, spec.block_tokens)
        if not tokens:
            return _error(400, "Prompt cannot be empty", "BadRequestError")
        if raw.n < 1:
            return _error(400, f"n must be at least 1, got {raw.n}.", "BadRequestError")
        if raw.n > asgi.MOST_CHOICES:
            return _error(400, f"n must be at most {asgi.MOST_CHOICES}, got {raw.n}.", "BadRequestError")
        detail = {"prompt_tokens": tokens}
        if tokens >= spec.context_tokens:
            return self.complaint(Trouble.PROMPT_TOO_LONG, spec, detail)
        if raw.max_tokens is not None and tokens + raw.max_tokens >= spec.context_tokens:
            return self.complaint(Trouble.PROMPT_TOO_LONG, spec, {**detail, "asked": raw.max_tokens})
        longest = min(spec.context_tokens, spec.kv_capacity_tokens // _dp_size(spec)) - 1
        if tokens >= longest - 5:
            message = f"Input length ({tokens} tokens) exceeds the maximum allowed length ({longest - 6} tokens). "
            return _error(400, f"{message}Use a shorter input or enable --allow-auto-truncate.", "BadRequestError")
        room = longest - tokens - 1
        return Asked(
            api=api,
            path=path,
            prompt_tokens=tokens,
            prefix=prefix,
            output_tokens=room if raw.max_tokens is None else min(raw.max_tokens, room),
            ignore_eos=raw.ignore_eos,
            stream=raw.stream,
            include_usage=raw.include_usage,
            choices=raw.n,
        )

    def page(self, path: str, spec: ServerSpec, snapshot: Snapshot) -> Page | None:
        """Answer to a GET of any path but the metrics; None where SGLang has no such path."""
        version = version_of(spec.release)
        if path in ("/health", "/health_generate") or (path == "/ready" and version >= (0, 5, 23)):
            return asgi.empty_page(200 if snapshot.ready else 503, _HEADERS)
        if path == "/v1/models":
            return asgi.json_page(_models(spec, snapshot.t_ns), headers=_HEADERS)
        if path == "/get_server_info" or (path == "/server_info" and version >= (0, 5, 6)):
            return asgi.json_page(_server_info(spec, snapshot), headers=_HEADERS)
        if path == "/get_model_info" or (path == "/model_info" and version >= (0, 5, 6)):
            model = _model_path(spec)
            document = {"model_path": model, "tokenizer_path": model, "is_generation": True}
            return asgi.json_page(document, headers=_HEADERS)
        return asgi.method_not_allowed("POST", _HEADERS) if path in _POST_PATHS else None

    def post(self, path: str, body: bytes, spec: ServerSpec) -> Page | None:
        """Answer to a POST that generates nothing; None where SGLang has no such path."""
        del body, spec
        if path == "/flush_cache":
            text = b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting "
            return Page(200, text + b"requests, the operation will not be performed.)\n", "text/plain", _HEADERS)
        if path in ("/v1/models", "/metrics"):
            return asgi.method_not_allowed("GET", _HEADERS)
        return None

    def asks_key(self, path: str) -> bool:
        """See `Dialect`."""
        return not path.startswith(("/health", "/metrics"))

    # ---- metrics

    def metrics(self, spec: ServerSpec, snapshot: Snapshot, *, renamed: bool = False) -> Page:
        """The metrics page. The use of the KV cache has two decimals, as SGLang rounds it.

        Args:
            spec: the server.
            snapshot: what can be seen of it.
            renamed: the gauges of running requests and of KV cache use bear names that are in no release and in no
                table of ours (`sglang:running_requests`, `sglang:kv_used_ratio`): the signals `requests_running` and
                `kv_cache_usage_ratio` disappear; all others stay.
        """
        layout = self._layout(spec, snapshot, renamed=renamed)
        finished, histograms, ranks = snapshot.finished, snapshot.histograms, _dp_size(spec)
        used = min(snapshot.kv_blocks_used, spec.kv_blocks) * spec.block_tokens
        capacity = max(1, spec.kv_capacity_tokens)
        queue = histograms.get("request_queue_seconds")
        values = {
            "running": number(snapshot.running / ranks),
            "waiting": number(snapshot.waiting / ranks),
            "usage": number(round(used / capacity, 2)),
            "used": number(used / ranks),
            "free": number((capacity - used) / ranks),
            "retracted": number(snapshot.preemptions / ranks),
            "computed": number((snapshot.prompt_tokens - snapshot.cached_tokens) / ranks),
            "reused": number(snapshot.cached_tokens / ranks),
            "decoded": number(snapshot.generated_tokens / ranks),
            "prompt": number(snapshot.prompt_tokens),
            "cached": number(snapshot.cached_tokens),
            "generated": number(snapshot.generated_tokens),
            "done": number(finished.get(Finish.LENGTH, 0.0) + finished.get(Finish.STOP, 0.0)),
            "aborted": number(finished.get(Finish.CANCELLED, 0.0) + finished.get(Finish.KV_FULL, 0.0)),
            "hit_rate": number(snapshot.cached_tokens / snapshot.prompt_tokens if snapshot.prompt_tokens else 0.0),
            "speed": number(snapshot.generated_tokens / snapshot.decode_seconds if snapshot.decode_seconds else 0.0),
            "queue_mean": number((queue.sum or 0.0) / queue.count if queue is not None and queue.count else 0.0),
        }
        for signal, key, edges in _HISTOGRAMS:
            histogram = histograms.get(signal)
            if key == "queue" and histogram is not None and ranks > 1:
                shared = tuple(value / ranks for value in histogram.cumulative)
                histogram = Histogram(histogram.edges, shared, (histogram.sum or 0.0) / ranks)
            values.update(bucket_values(key, histogram, edges))
        for hole, keys in layout.http:
            values[hole] = number(sum(snapshot.http[key] for key in keys))
        version = "1.0.0" if version_of(spec.release) >= (0, 5, 6) else "0.0.4"
        return Page(200, layout.template.render(values), f"text/plain; version={version}; charset=utf-8", _HEADERS)

    def _layout(self, spec: ServerSpec, snapshot: Snapshot, *, renamed: bool) -> _Layout:
        # By identity: a spec may hold what cannot be hashed, and is the same object in every scrape of one server. The
        # layout keeps it alive, so no other spec can take over its identity.
        key = (id(spec), renamed, tuple(snapshot.http))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= 64:
                self._layouts.clear()
            layout = self._layouts[key] = _lay_out(spec, snapshot, renamed=renamed)
        return layout

    # ---- answers

    def figures(self, spec: ServerSpec, snapshot: Snapshot, capacity_tokens: int | None = None) -> dict[str, float]:
        """See `Dialect`. SGLang tells its capacity itself, and has no counter of steps: tokens stand in for it."""
        del capacity_tokens
        ends = snapshot.finished
        used = min(snapshot.kv_blocks_used, spec.kv_blocks) * spec.block_tokens
        return {
            "requests_running": float(snapshot.running),
            "requests_waiting": float(snapshot.waiting),
            "kv_cache_usage_ratio": round(used / max(1, spec.kv_capacity_tokens), 2),
            "request_preemptions_total": float(snapshot.preemptions),
            "prompt_tokens_total": float(snapshot.prompt_tokens),
            "prompt_tokens_cached_total": float(snapshot.cached_tokens),
            "generation_tokens_total": float(snapshot.generated_tokens),
            "requests_finished_total": float(ends.get(Finish.LENGTH, 0.0) + ends.get(Finish.STOP, 0.0)),
            "request_errors_total": float(
                sum(count for (_, status), count in snapshot.http.items() if 500 <= status <= 599)
            ),
            "engine_progress_total": float(snapshot.prompt_tokens + snapshot.generated_tokens),
        }

    def stream(self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> Stream:
        """The frames of a streamed answer. With several choices each call gives one frame for each of them."""
        kind = _ChatStream if asked.api == "chat" else _TextStream
        return kind(asked, spec, request_id, t_ns)

    def answer(
        self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int, text: str, finish: Finish, usage: Usage
    ) -> Page:
        """An answer that is not streamed."""
        reason = _FINISH_REASONS.get(finish)
        if reason is None:
            return self.complaint(Trouble.KV_FULL if finish is Finish.KV_FULL else Trouble.INTERNAL, spec)
        chat = asked.api == "chat"
        message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        body = {"message": message} if chat else {"text": text}
        stop = _STOP_TOKEN if finish is Finish.STOP else None
        tail = {"logprobs": None, "finish_reason": reason, "matched_stop": stop}
        document: dict[str, Any] = {
            "id": _answer_id(request_id, t_ns),
            "object": "chat.completion" if chat else "text_completion",
            "created": t_ns // NS,
            "model": spec.model,
            "choices": [{"index": index, **body, **tail} for index in range(asked.choices)],
            "usage": _usage(spec, usage),
        }
        if version_of(spec.release) >= (0, 5):
            document["metadata"] = {"weight_version": "default"}
        return asgi.json_page(document, headers=_HEADERS)

    def complaint(self, trouble: Trouble, spec: ServerSpec, detail: Mapping[str, int | str] | None = None) -> Page:
        """An error answer. `detail` may have `prompt_tokens`, `asked`, `model`, `allow`, `message`."""
        given = detail or {}
        own = given.get("message")
        match trouble:
            case Trouble.NOT_FOUND:
                return asgi.not_found(_HEADERS)
            case Trouble.METHOD_NOT_ALLOWED:
                return asgi.method_not_allowed(str(given.get("allow", "POST")), _HEADERS)
            case Trouble.BAD_JSON:
                reason = str(own or "Expecting value")
                return _validation([Invalid("json_invalid", "body.0", "JSON decode error", "{}", reason)])
            case Trouble.MISSING_MESSAGES:
                return _validation([Invalid("missing", "body.messages", "Field required", "{}")])
            case Trouble.BAD_FIELD:
                message = str(own or "Input should be a valid number, unable to parse string as a number")
                return _validation([Invalid("float_parsing", "body.temperature", message, "")])
            case Trouble.UNKNOWN_MODEL:
                told = f"The model '{given.get('model', '')}' does not exist"
                inner = {"message": told, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
                return asgi.json_page({"error": inner}, 404, _HEADERS)
            case Trouble.BAD_MAX_TOKENS:
                return _error(400, str(own or "max_tokens must be positive"), "BadRequestError")
            case Trouble.PROMPT_TOO_LONG:
                return _error(400, _too_long(spec, given), "BadRequestError")
            case Trouble.NO_KEY:
                return asgi.json_page({"error": "Unauthorized"}, 401, _HEADERS)
            case Trouble.LOADING:
                return asgi.empty_page(503, _HEADERS)
            case Trouble.OVERLOADED | Trouble.TOO_MANY:
                status = 503 if trouble is Trouble.OVERLOADED else 429
                return _error(status, str(own or "The request queue is full."), str(status))
            case _:
                return _error(500, str(own or _trouble_words(trouble, spec)), "InternalServerError")

    # ---- logs

    def startup_log(self, spec: ServerSpec, t_ns: int, failure: StartFailure | None = None) -> list[LogLine]:
        """The log from launch to readiness, or to the failure. A batch limit that was cut has its line."""
        log = _Log(spec, t_ns)
        _write_start(log, failure)
        return log.lines

    def death_log(self, trouble: Trouble, spec: ServerSpec, t_ns: int) -> list[LogLine]:
        """What it logs when it dies at run time; seconds count from the death."""
        log = _Log(spec, t_ns)
        if trouble is Trouble.OUT_OF_MEMORY:
            log.crash(0.0, f"torch.OutOfMemoryError: {_out_of_memory(spec)}")
        elif trouble is Trouble.KV_FULL:
            log.ranks(0.0, "Prefill out of memory. Try to lower your batch size.")
            log.crash(0.0, "RuntimeError: Prefill out of memory. Try to lower your batch size.")
        else:
            log.ranks(0.0, "Watchdog timeout (self.watchdog_timeout=300)")
            log.say(0.5, "SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        return log.lines


# ---- requests and answers


def _setting(spec: ServerSpec, name: str, default: int) -> int:
    value = spec.settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _dp_size(spec: ServerSpec) -> int:
    return _setting(spec, "dp_size", 1)


def _model_path(spec: ServerSpec) -> str:
    return str(spec.settings.get("model_path") or f"/models/{spec.model}")


def _error_document(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _error(status: int, message: str, kind: str) -> Page:
    return asgi.json_page(_error_document(status, message, kind), status, _HEADERS)


def _validation(faults: Sequence[Invalid]) -> Page:
    told = []
    for fault in faults:
        item: dict[str, Any] = {"type": fault.kind, "loc": tuple(fault.loc.split(".")), "msg": fault.message}
        item["input"] = fault.given
        if fault.reason is not None:
            item["ctx"] = {"error": fault.reason}
        told.append(item)
    return _error(400, str(told), "Bad Request")


def _trouble_words(trouble: Trouble, spec: ServerSpec) -> str:
    words = {Trouble.KV_FULL: _KV_FULL, Trouble.OUT_OF_MEMORY: _out_of_memory(spec)}
    return f"Internal server error: {words.get(trouble, 'the scheduler is gone')}"


def _too_long(spec: ServerSpec, given: Mapping[str, int | str]) -> str:
    context = spec.context_tokens
    tokens = int(given.get("prompt_tokens", context + 1))
    if tokens >= context or "asked" not in given:
        return f"The input ({tokens} tokens) is longer than the model's context length ({context} tokens)."
    asked = int(given["asked"])
    return (
        f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total "
        f"of {tokens + asked} tokens: {tokens} tokens from the input messages and {asked} tokens for the completion."
    )


def _models(spec: ServerSpec, t_ns: int) -> dict[str, Any]:
    card = {"id": spec.model, "object": "model", "created": t_ns // NS, "owned_by": "sglang", "root": spec.model}
    card |= {"parent": None, "max_model_len": spec.context_tokens}
    return {"object": "list", "data": [card]}


def _server_info(spec: ServerSpec, snapshot: Snapshot) -> dict[str, Any]:
    ranks, memory = _dp_size(spec), spec.memory
    capacity = spec.kv_capacity_tokens // ranks
    speed = snapshot.generated_tokens / snapshot.decode_seconds if snapshot.decode_seconds else 0.0
    state = {
        "last_gen_throughput": speed / ranks,
        "memory_usage": {
            "weight": round(memory.weights_bytes / _GIB, 2),
            "kvcache": round(memory.kv_cache_bytes / _GIB, 2),
            "token_capacity": capacity,
            "graph": round(_GRAPH_SHARE * memory.workspace_bytes / _GIB, 2),
        },
        "effective_max_running_requests_per_dp": spec.max_batch // ranks,
        "api_key": None,
    }
    return {
        "model_path": _model_path(spec),
        "served_model_name": spec.model,
        "api_key": None,
        "tp_size": max(1, spec.card_parallel),
        "dp_size": ranks,
        "context_length": spec.settings.get("context_length"),
        "max_running_requests": spec.max_batch if spec.asked_max_batch is None else spec.asked_max_batch,
        "max_total_num_tokens": capacity,
        "max_req_input_len": min(spec.context_tokens, capacity) - 6,
        "internal_states": [dict(state) for _ in range(ranks)],
        "version": spec.release,
    }


def _answer_id(request_id: int, t_ns: int) -> str:
    return hashlib.blake2b(f"{request_id} {t_ns}".encode(), digest_size=16).hexdigest()


def _usage(spec: ServerSpec, usage: Usage) -> dict[str, Any]:
    reported = spec.settings.get("enable_cache_report") and usage.cached_tokens
    document: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if reported else None,
    }
    if version_of(spec.release) >= (0, 5, 5):
        document["reasoning_tokens"] = 0
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
        self._head = (
            f'data: {{"id":"{_answer_id(request_id, t_ns)}","object":"{self._object}","created":{t_ns // NS},'
            f'"model":{wire_string(spec.model)},"choices":['
        )

    def opening(self) -> bytes:
        """The role chunk of each choice; nothing for text completions."""
        return b""

    def tokens(self, texts: Sequence[str], *, reasoning: bool = False) -> bytes:
        """One frame for each choice with these tokens' text."""
        said = wire_string("".join(texts))
        return self._frames(self._said(said, reasoning=reasoning))

    def ending(self, finish: Finish, usage: Usage, last_texts: Sequence[str] = ()) -> bytes:
        """The last text and why it ended, usage if it was asked for, and the terminator."""
        reason = _FINISH_REASONS.get(finish)
        if reason is None:
            return self.error(Trouble.KV_FULL if finish is Finish.KV_FULL else Trouble.INTERNAL)
        stop = _STOP_TOKEN if finish is Finish.STOP else "null"
        frames = self._last(wire_string("".join(last_texts)), f'"finish_reason":"{reason}","matched_stop":{stop}')
        if self._asked.include_usage:
            frames += f'{self._head}],"usage":{compact(_usage(self._spec, usage))}}}\n\n'.encode()
        return frames + _DONE

    def error(self, trouble: Trouble, message: str | None = None) -> bytes:
        """An error event; the terminator follows all the same."""
        told = _error_document(500, message or _trouble_words(trouble, self._spec), "InternalServerError")
        return f"data: {wire_string({'error': told})}\n\n".encode() + _DONE

    def _frames(self, choice: str) -> bytes:
        """One frame for each choice; `choice` is its JSON from after the index."""
        head = self._head
        return "".join([f'{head}{{"index":{i},{choice}}}],"usage":null}}\n\n' for i in self._choices]).encode()

    def _said(self, said: str, *, reasoning: bool) -> str:
        raise NotImplementedError

    def _last(self, said: str, end: str) -> bytes:
        raise NotImplementedError


_GOES_ON = '"finish_reason":null,"matched_stop":null'


def _delta(role: str = "null", content: str = "null", reasoning: str = "null", end: str = _GOES_ON) -> str:
    inner = f'"role":{role},"content":{content},"reasoning_content":{reasoning},"tool_calls":null'
    return f'"delta":{{{inner}}},"logprobs":null,{end}'


class _ChatStream(_Stream):
    _object = "chat.completion.chunk"

    def opening(self) -> bytes:
        return self._frames(_delta(role='"assistant"', content='""'))

    def _said(self, said: str, *, reasoning: bool) -> str:
        return _delta(reasoning=said) if reasoning else _delta(content=said)

    def _last(self, said: str, end: str) -> bytes:
        # Text never shares a frame with the reason why it ends.
        text = self._frames(_delta(content=said)) if said != '""' else b""
        return text + self._frames(_delta(end=end))


class _TextStream(_Stream):
    _object = "text_completion"

    def _said(self, said: str, *, reasoning: bool) -> str:
        del reasoning  # text completions have no such channel
        return f'"text":{said},"logprobs":null,{_GOES_ON}'

    def _last(self, said: str, end: str) -> bytes:
        return self._frames(f'"text":{said},"logprobs":null,{end}')


# ---- metrics


def _rank_labels(spec: ServerSpec) -> list[dict[str, str]]:
    """Label sets of the scheduler's series: the first rank of each data-parallel group, or all of them."""
    version, groups = version_of(spec.release), _dp_size(spec)
    width = max(1, max(1, spec.card_parallel) // groups)
    several = _setting(spec, "ep_size", 1) > 1
    listed = []
    for group in range(groups):
        for place in range(width if spec.settings.get("enable_metrics_for_all_schedulers") else 1):
            rank = str(group * width + place)
            labels = {"model_name": spec.model, "engine_type": "unified", "tp_rank": rank, "pp_rank": "0"}
            if version >= (0, 5, 5):
                labels["moe_ep_rank"] = rank if several else "0"
            if groups > 1:
                labels["dp_rank"] = str(group)
            if version >= (0, 5, 5) and spec.settings.get("enable_priority_scheduling"):
                labels["priority"] = ""
            listed.append(labels)
    return listed


def _lay_out(spec: ServerSpec, snapshot: Snapshot, *, renamed: bool) -> _Layout:
    page = Template()
    _lay_out_scheduler(page, spec, renamed=renamed)
    _lay_out_requests(page, spec)
    http = _lay_out_http(page, snapshot) if version_of(spec.release) >= (0, 5, 6) else []
    return _Layout(spec, page, http)


def _lay_out_scheduler(page: Template, spec: ServerSpec, *, renamed: bool) -> None:
    version, ranks = version_of(spec.release), _rank_labels(spec)
    late = version >= (0, 5, 6)

    def gauge(name: str, figure: Figure) -> None:
        page.gauge(f"sglang:{name}", [(labels, figure) for labels in ranks])

    gauge("running_requests" if renamed else "num_running_reqs", "running")
    gauge("num_queue_reqs", "waiting")
    gauge("num_grammar_queue_reqs", 0.0)
    gauge("gen_throughput", "speed")
    gauge("cache_hit_rate", "hit_rate")
    gauge("kv_used_ratio" if renamed else "token_usage", "usage")
    if late and not renamed:
        gauge("full_token_usage", "usage")
    if late:
        for name in ("swa_token_usage", "mamba_usage"):
            gauge(name, 0.0)
    gauge("num_used_tokens", "used")
    if late:
        gauge("kv_available_tokens", "free")
        gauge("kv_used_tokens", "used")
    gauge("spec_accept_length", 0.0)
    # Nothing sets it.
    gauge("utilization", 0.0)
    if late:
        gauge("fwd_occupancy", math.nan)
    if version < (0, 5):
        gauge("avg_request_queue_latency", "queue_mean")
        gauge("total_retracted_reqs", "retracted")
        return
    # Of the last batch only.
    gauge("num_retracted_reqs", 0.0)
    page.histogram("sglang:queue_time_seconds", _QUEUE_EDGES, [(labels, "queue") for labels in ranks])
    if not late:
        rows = [(labels, "done", "retracted") for labels in ranks[:1]]
        page.plain_histogram("sglang:num_retractions", _RETRACTION_EDGES, rows, _RETRACTION_EDGES[-1])
        return
    page.counter("sglang:num_retracted_requests_total", [(labels, "retracted") for labels in ranks])
    modes = (("prefill_compute", "computed"), ("prefill_cache", "reused"), ("decode", "decoded"))
    live = [({**labels, "mode": mode}, hole) for mode, hole in modes for labels in ranks]
    page.counter("sglang:realtime_tokens_total", live)
    memory, groups = spec.memory, _dp_size(spec)
    gauge("max_total_num_tokens", spec.kv_capacity_tokens // groups)
    gauge("page_size", spec.block_tokens)
    gauge("num_pages", spec.kv_blocks // groups)
    gauge("context_len", spec.context_tokens)
    gauge("weight_memory_usage_gb", memory.weights_bytes / _GIB)
    gauge("kv_cache_memory_usage_gb", memory.kv_cache_bytes / _GIB)
    graphs = _GRAPH_SHARE * memory.workspace_bytes / _GIB
    page.gauge("sglang:graph_memory_usage_gb", [({**labels, "phase": "decode"}, graphs) for labels in ranks])
    gauge("startup_available_gpu_memory_gb", _free_bytes(spec) / _GIB)


def _lay_out_requests(page: Template, spec: ServerSpec) -> None:
    """What the tokenizer process counts: it knows of no ranks."""
    late = version_of(spec.release) >= (0, 5, 6)
    base = {"model_name": spec.model}

    def by_kind(hole: str) -> list[tuple[Mapping[str, str], Figure]]:
        if not late:
            return [(base, hole)]
        # How a request was asked for is not among the figures: all count as streams.
        return [({**base, "is_streaming": "true"}, hole), ({**base, "is_streaming": "false"}, 0.0)]

    page.counter("sglang:prompt_tokens_total", by_kind("prompt"))
    page.counter("sglang:generation_tokens_total", by_kind("generated"))
    page.counter("sglang:cached_tokens_total", [({**base, "cache_source": "device"} if late else base, "cached")])
    page.counter("sglang:num_requests_total", by_kind("done"))
    page.counter("sglang:num_so_requests_total", [(base, 0.0)])
    page.counter("sglang:num_aborted_requests_total", [(base, "aborted")])
    page.histogram("sglang:time_to_first_token_seconds", _FIRST_EDGES, [(base, "first")])
    page.histogram("sglang:inter_token_latency_seconds", _BETWEEN_EDGES, [(base, "between")])
    page.histogram("sglang:e2e_request_latency_seconds", _WHOLE_EDGES, [(base, "whole")])


def _lay_out_http(page: Template, snapshot: Snapshot) -> list[tuple[str, list[tuple[str, int]]]]:
    holes = [(f"http_{i}", [key]) for i, key in enumerate(snapshot.http)]
    series = []
    for hole, [(endpoint, status)] in holes:
        method = "POST" if endpoint in _POST_PATHS else "GET"
        series.append(({"endpoint": endpoint, "method": method, "status_code": str(status)}, hole))
    page.counter("sglang:http_responses_total", series)
    return holes


def _free_bytes(spec: ServerSpec) -> int:
    """What a card has left when the server is ready."""
    memory = spec.memory
    held = memory.weights_bytes + memory.kv_cache_bytes + memory.workspace_bytes
    return max(0, memory.card_total_bytes - held)


# ---- logs


class _Log:
    """Lines of one server's log: a stamp in brackets, with the rank where there are several."""

    def __init__(self, spec: ServerSpec, t_ns: int) -> None:
        self.spec = spec
        self.lines: list[LogLine] = []
        self._t_ns = t_ns

    def say(self, seconds: float, text: str, rank: str = "") -> None:
        """One line of SGLang's own logger."""
        stamp = datetime.fromtimestamp((self._t_ns + round(seconds * NS)) // NS, UTC).strftime("%Y-%m-%d %H:%M:%S")
        self.lines.append(LogLine(seconds, f"[{stamp}{rank}] {text}"))

    def plain(self, seconds: float, text: str) -> None:
        """A line that does not come from the engine's logger."""
        self.lines.append(LogLine(seconds, text))

    def ranks(self, seconds: float, text: str, *, first_only: bool = False) -> None:
        """One line of each scheduler."""
        width = max(1, self.spec.card_parallel)
        experts = _setting(self.spec, "ep_size", 1) > 1
        groups = _dp_size(self.spec)
        for rank in range(1 if first_only else width):
            token = f" TP{rank}" if width > 1 else ""
            token += f" EP{rank}" if experts else ""
            token = (f" DP{rank * groups // width}" if groups > 1 else "") + token
            self.say(seconds, text, token)

    def crash(self, seconds: float, error: str) -> None:
        """A scheduler ends with an error, and takes the server along."""
        self.ranks(seconds, "Scheduler hit an exception: Traceback (most recent call last):", first_only=True)
        self.plain(seconds, '  File "sglang/srt/managers/scheduler.py", line 3130, in run_scheduler_process')
        self.plain(seconds, error)
        self.say(seconds, "Received sigquit from a child process. It usually means the child failed.")


def _write_start(log: _Log, failure: StartFailure | None) -> None:
    spec, version, whole = log.spec, version_of(log.spec.release), log.spec.start_seconds
    memory = spec.memory
    log.say(0.05 * whole, f"server_args=ServerArgs({_arguments(spec)})")
    log.ranks(0.15 * whole, "Init torch distributed begin.")
    log.ranks(0.20 * whole, "Init torch distributed ends. mem usage=0.00 GB")
    start = memory.card_total_bytes - memory.reserve_bytes
    log.ranks(0.21 * whole, f"Load weight begin. avail mem={_gb(start)} GB")
    if failure is StartFailure.WEIGHTS_MISSING:
        log.crash(0.25 * whole, f"RuntimeError: Cannot find any model weights with `{_model_path(spec)}`")
        return
    log.plain(0.30 * whole, "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]")
    if failure is StartFailure.WEIGHTS_OUT_OF_MEMORY:
        log.crash(0.50 * whole, f"torch.OutOfMemoryError: {_out_of_memory(spec)}")
        return
    log.plain(0.55 * whole, "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  1.00it/s]")
    elapsed = f"elapsed={0.34 * whole:.2f} s, " if version >= (0, 5, 6) else ""
    kind = spec.settings.get("architecture", "LlamaForCausalLM")
    after = start - memory.weights_bytes
    text = f"Load weight end. {elapsed}type={kind}, dtype=torch.bfloat16, avail mem={_gb(after)} GB, "
    log.ranks(0.55 * whole, f"{text}mem usage={_gb(memory.weights_bytes)} GB.")
    if _write_pool(log, after, failure):
        log.plain(0.95 * whole, "INFO:     Started server process [1201]")
        log.plain(0.95 * whole, "INFO:     Waiting for application startup.")
        log.plain(0.96 * whole, "INFO:     Application startup complete.")
        log.plain(0.96 * whole, "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)")
        log.say(whole, "The server is fired up and ready to roll!")


def _write_pool(log: _Log, available: int, failure: StartFailure | None) -> bool:
    """From the KV pool to the line that tells all sizes; whether it went well."""
    spec, version, whole = log.spec, version_of(log.spec.release), log.spec.start_seconds
    memory, groups = spec.memory, _dp_size(spec)
    fraction = spec.settings.get("mem_fraction_static", 0.88)
    if failure is StartFailure.NO_KV_CACHE:
        text = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
        log.crash(0.56 * whole, f"{text}mem_fraction_static={fraction}")
        return False
    if failure is StartFailure.KV_BELOW_ONE_REQUEST:
        log.crash(0.56 * whole, "AssertionError: Memory pool size is too small")
        return False
    asked = spec.asked_max_batch
    if asked is not None and asked > spec.max_batch:
        text = f"max_running_requests was reduced from the requested {asked // groups} to {spec.max_batch // groups} "
        log.ranks(0.57 * whole, f"{text}(per dp worker) due to the available KV cache capacity.")
    half = memory.kv_cache_bytes / 2
    tokens = spec.kv_capacity_tokens // groups
    dtype = "dtype: torch.bfloat16, " if version >= (0, 5, 6) else ""
    text = f"KV Cache is allocated. {dtype}#tokens: {tokens}, K size: {_gb(half)} GB, V size: {_gb(half)} GB"
    log.ranks(0.58 * whole, text)
    left = available - memory.kv_cache_bytes
    log.ranks(0.59 * whole, f"Memory pool end. avail mem={_gb(left)} GB")
    if not spec.settings.get("disable_cuda_graph"):
        graphs = _GRAPH_SHARE * memory.workspace_bytes
        text = f"Capture cuda graph begin. This can take up to several minutes. avail mem={_gb(left)} GB"
        log.ranks(0.60 * whole, text)
        if failure is StartFailure.WARMUP_OUT_OF_MEMORY:
            log.crash(0.70 * whole, f"Exception: Capture cuda graph failed: {_out_of_memory(spec)}")
            return False
        left -= round(graphs)
        if version >= (0, 5, 20):
            text = f"Capture target decode CUDA graph end. elapsed={0.25 * whole:.2f} s, mem usage={_gb(graphs)} GB, "
            text += f"avail mem={_gb(left)} GB."
        else:
            text = f"Capture cuda graph end. Time elapsed: {0.25 * whole:.2f} s. mem usage={_gb(graphs)} GB. "
            text += f"avail mem={_gb(left)} GB."
        log.ranks(0.85 * whole, text)
    elif failure is StartFailure.WARMUP_OUT_OF_MEMORY:
        log.crash(0.70 * whole, f"torch.OutOfMemoryError: {_out_of_memory(spec)}")
        return False
    text = f"max_total_num_tokens={tokens}, chunked_prefill_size={spec.token_budget}, "
    text += f"max_prefill_tokens={_MAX_PREFILL_TOKENS}, max_running_requests={spec.max_batch // groups}, "
    text += f"context_len={spec.context_tokens}"
    text += f", available_gpu_mem={_gb(left)} GB" if version >= (0, 5) else ""
    log.ranks(0.90 * whole, text, first_only=True)
    return True


def _arguments(spec: ServerSpec) -> str:
    arguments: dict[str, Any] = {
        "model_path": _model_path(spec),
        "served_model_name": spec.model,
        "host": "0.0.0.0",
        "port": 30000,
        "context_length": None,
        "mem_fraction_static": 0.88,
        "max_running_requests": spec.max_batch if spec.asked_max_batch is None else spec.asked_max_batch,
        "max_queued_requests": spec.queue_limit,
        "max_total_tokens": None,
        "chunked_prefill_size": spec.token_budget,
        "max_prefill_tokens": _MAX_PREFILL_TOKENS,
        "page_size": spec.block_tokens,
        "tp_size": max(1, spec.card_parallel),
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "disable_radix_cache": not spec.prefix_cache,
        "disable_cuda_graph": False,
        "kv_cache_dtype": "auto",
        "enable_metrics": True,
    }
    arguments |= {name: value for name, value in spec.settings.items() if name != "architecture"}
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _out_of_memory(spec: ServerSpec) -> str:
    total = _gb(spec.memory.card_total_bytes)
    return (
        f"CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of {total} GiB of which "
        "318.06 MiB is free."
    )


def _gb(size: float) -> str:
    """SGLang says GB and means GiB."""
    return f"{size / _GIB:.2f}"


SGLANG_DIALECT: Dialect = SglangDialect()
"""The one that all simulated SGLang servers share."""
