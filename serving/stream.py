"""Sans-io reading of one streamed answer: bytes and their arrival times in, what the request was worth out.

`HttpDecoder` undoes HTTP/1.1 framing, `StreamDecoder` reads the server-sent events inside it as chat or text completion
chunks. Neither opens a socket or reads a clock, so the same code serves gevent in the load generator, asyncio in the
monitor, and recorded captures in tests; how the bytes were split into reads never changes the result.

The text itself is looked at and dropped: only times and counts are kept.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from serving.records import Outcome

__all__ = ["Api", "HttpDecoder", "StreamDecoder", "StreamResult", "message_of"]

Api: TypeAlias = Literal["chat", "completions"]

_LINE_LIMIT_BYTES = 64 * 1024
_HEADER_LIMIT = 256
_EVENT_LIMIT_BYTES = 16 * 1024 * 1024
_BODY_LIMIT_BYTES = 64 * 1024
_MESSAGE_LIMIT = 300
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_STATUS_LINE, _HEADERS, _SIZE, _DATA, _DATA_END, _TRAILERS, _UNTIL_CLOSE, _ENDED = range(8)


class HttpDecoder:
    """One HTTP/1.1 answer: bytes in, body bytes out.

    Reads chunked (with extensions and trailers), counted and until-close bodies, skips interim 1xx answers, and accepts
    bare line feeds. `broken` says what could not be read, if anything; nothing is raised.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.reason = ""
        self.headers: dict[str, str] = {}
        self.head_complete = False
        self.broken: str | None = None
        self._state = _STATUS_LINE
        self._rest = b""
        self._left = 0
        self._chunked = False
        self._keep_alive = True
        self._surplus = False

    @property
    def complete(self) -> bool:
        """Nothing more is to be read: the body ended, or cannot be followed any further."""
        return self._state == _ENDED

    @property
    def reusable(self) -> bool:
        """The connection may carry another request."""
        return self.complete and self._keep_alive and not self._surplus and self.broken is None

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrived and return the body bytes that they complete."""
        if self._state == _ENDED:
            self._surplus = self._surplus or bool(data)
            return b""
        buffer = self._rest + data if self._rest else data
        end = len(buffer)
        position = 0
        body: list[bytes] = []
        while self._state != _ENDED:
            if self._state == _DATA:
                if position == end:
                    break
                piece = buffer[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                body.append(piece)
                if not self._left:
                    self._state = _DATA_END if self._chunked else _ENDED
            elif self._state == _UNTIL_CLOSE:
                body.append(buffer[position:])
                position = end
                break
            else:
                line_end = buffer.find(b"\n", position)
                if (end if line_end < 0 else line_end) - position > _LINE_LIMIT_BYTES:
                    self._break(f"a line of the answer's head or framing is longer than {_LINE_LIMIT_BYTES} bytes")
                if line_end < 0:
                    break
                line = buffer[position:line_end]
                position = line_end + 1
                self._take_line(line[:-1] if line.endswith(b"\r") else line)
        self._rest = buffer[position:]
        if self._state == _ENDED and self._rest:
            self._surplus = True
            self._rest = b""
        return body[0] if len(body) == 1 else b"".join(body)

    def close(self) -> None:
        """The server closed the connection: the proper end of an uncounted body, a cut of any other."""
        if self._state == _UNTIL_CLOSE:
            self._state = _ENDED
        self._keep_alive = False

    def _take_line(self, line: bytes) -> None:
        if self._state == _STATUS_LINE:
            if line or self.status is not None:
                self._take_status(line)
        elif self._state == _HEADERS:
            if line:
                self._take_header(line)
            else:
                self._end_head()
        elif self._state == _SIZE:
            size = line.partition(b";")[0].strip()
            try:
                self._left = int(size, 16) if size.isalnum() else -1
            except ValueError:
                self._left = -1
            if self._left < 0:
                self._break("the chunked body is damaged: a chunk size is not a number")
            else:
                self._state = _DATA if self._left else _TRAILERS
        elif self._state == _DATA_END:
            if line:
                self._break("the chunked body is damaged: a chunk is longer than its size")
            else:
                self._state = _SIZE
        elif not line:
            self._state = _ENDED

    def _take_status(self, line: bytes) -> None:
        version, _, rest = line.partition(b" ")
        code, _, reason = rest.strip().partition(b" ")
        if not version.startswith(b"HTTP/1.") or not (len(code) == 3 and code.isdigit()):
            self._break("the answer is not HTTP/1.x: is this the right port, and http or https as it should be?")
            return
        self.status = int(code)
        self.reason = reason.decode("latin-1").strip()
        self.headers = {}
        self._keep_alive = version != b"HTTP/1.0"
        self._state = _HEADERS

    def _take_header(self, line: bytes) -> None:
        name, colon, value = line.partition(b":")
        if len(self.headers) >= _HEADER_LIMIT:
            self._break(f"the answer has more than {_HEADER_LIMIT} headers")
        elif colon:
            self.headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()

    def _end_head(self) -> None:
        status = self.status or 0
        if 100 <= status < 200 and status != 101:
            self._state = _STATUS_LINE
            self.status = None
            return
        self.head_complete = True
        connection = self.headers.get("connection", "").lower()
        if "close" in connection:
            self._keep_alive = False
        elif "keep-alive" in connection:
            self._keep_alive = True
        length = self.headers.get("content-length")
        if status in {101, 204, 304}:
            self._state = _ENDED
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._chunked = True
            self._state = _SIZE
        elif length is None:
            self._state = _UNTIL_CLOSE
        elif length.isascii() and length.isdigit():
            self._left = int(length)
            self._state = _DATA if self._left else _ENDED
        else:
            self._break("the answer's Content-Length is not a number")

    def _break(self, why: str) -> None:
        self.broken = why
        self._state = _ENDED


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What one streamed answer amounted to; the fields mean what they mean in `serving.records.RequestRecord`.

    `server_prompt_seconds` and `server_decode_seconds` are the engine's own timings where it sends them (llama.cpp).
    """

    outcome: Outcome
    status: int | None
    t_headers_ns: int | None
    t_first_ns: int | None
    t_first_content_ns: int | None
    t_last_ns: int | None
    frames: int
    gaps_us: tuple[int, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    error: str | None
    server_prompt_seconds: float | None
    server_decode_seconds: float | None


class StreamDecoder:
    """Reads one answer of `/v1/chat/completions` or `/v1/completions` that was asked to stream.

    A frame counts when it bears text: reasoning, content or tool arguments. Role, usage, finish and comment frames do
    not. An answer is judged by what the server itself said: an error event is an error even after HTTP 200, a stream
    without a finish reason is truncated even when it ends politely, and a missing `[DONE]` after a finish reason is
    only a habit of some servers.

    Args:
        api: which of the two request forms was used.
        redact: takes secrets out of a message that the server sent.
    """

    def __init__(self, api: Api = "chat", redact: Callable[[str], str] = str) -> None:
        self._api = api
        self._redact = redact
        self._http = HttpDecoder()
        self._streams = False
        self._body = b""
        self._pending = b""
        self._after_cr = False
        self._first_event = True
        self._flushed = False
        self._cut: str | None = None
        self._failure: str | None = None
        self._events = 0
        self._terminated = False
        self._finish_reason: str | None = None
        self._seen_choices: set[int] = set()
        self._finished_choices: set[int] = set()
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}
        self._t_headers_ns: int | None = None
        self._t_data_ns = 0
        self._t_first_ns: int | None = None
        self._t_first_content_ns: int | None = None
        self._t_last_ns: int | None = None
        self._gaps_us: list[int] = []

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer, names in lower case; empty until the head is complete."""
        return self._http.headers if self._http.head_complete else {}

    @property
    def head_complete(self) -> bool:
        """Status and headers are known."""
        return self._http.head_complete

    @property
    def complete(self) -> bool:
        """The HTTP answer has ended, or cannot be followed any further."""
        return self._http.complete

    @property
    def terminated(self) -> bool:
        """The server sent its last frame (`[DONE]`), whether or not the HTTP body ended too."""
        return self._terminated

    @property
    def reusable(self) -> bool:
        """The connection may carry another request."""
        return self._http.reusable

    def feed(self, data: bytes, t_ns: int) -> None:
        """Take the bytes of one read that arrived at `t_ns`."""
        payload = self._http.feed(data)
        if self._t_headers_ns is None and self._http.head_complete:
            self._t_headers_ns = t_ns
            kind = self._http.headers.get("content-type", "").lower()
            encoding = self._http.headers.get("content-encoding", "identity").lower()
            self._streams = _succeeded(self._http.status) and not ("json" in kind or "html" in kind)
            self._streams = self._streams and encoding == "identity"
        if payload:
            self._t_data_ns = t_ns
            if self._streams:
                self._read_events(payload, t_ns)
            elif len(self._body) < _BODY_LIMIT_BYTES:
                self._body += payload[: _BODY_LIMIT_BYTES - len(self._body)]
        if self._http.complete:
            self._flush()

    def close(self, error: str | None = None) -> None:
        """The connection ended: `error` is the system's message, None for an orderly close."""
        self._http.close()
        if not self._http.complete:
            self._cut = error or "the server closed the connection"
        self._flush()

    def result(self, expected_tokens: int | None = None, *, ignore_eos: bool = False) -> StreamResult:
        """Judge the answer as it stands.

        Args:
            expected_tokens: tokens asked for.
            ignore_eos: whether the end-of-sequence token was to be ignored, so that fewer tokens are a fault.
        """
        completion_tokens = _count(self._usage.get("completion_tokens"))
        outcome, error = self._judge(completion_tokens)
        if (
            outcome is Outcome.OK
            and ignore_eos
            and expected_tokens is not None
            and completion_tokens is not None
            and completion_tokens < expected_tokens
        ):
            outcome = Outcome.SHORT
        details = self._usage.get("prompt_tokens_details")
        return StreamResult(
            outcome=outcome,
            status=self._http.status if self._http.head_complete else None,
            t_headers_ns=self._t_headers_ns,
            t_first_ns=self._t_first_ns,
            t_first_content_ns=self._t_first_content_ns,
            t_last_ns=self._t_last_ns,
            frames=0 if self._t_first_ns is None else len(self._gaps_us) + 1,
            gaps_us=tuple(self._gaps_us),
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            completion_tokens=completion_tokens,
            finish_reason=self._finish_reason,
            # Cut only after a secret was taken out, or the part before the cut would stay.
            error=None if error is None else self._redact(error)[:_MESSAGE_LIMIT],
            server_prompt_seconds=_seconds(self._timings.get("prompt_ms")),
            server_decode_seconds=_seconds(self._timings.get("predicted_ms")),
        )

    def _judge(self, completion_tokens: int | None) -> tuple[Outcome, str | None]:
        http = self._http
        if not http.head_complete:
            return Outcome.HTTP_ERROR, http.broken or self._cut or "no answer"
        if not _succeeded(http.status):
            return Outcome.HTTP_ERROR, self._body_message()
        if self._failure is not None:
            return Outcome.STREAM_ERROR, self._failure
        if http.broken is not None:
            return Outcome.STREAM_ERROR, http.broken
        if not self._streams and http.complete:
            return Outcome.STREAM_ERROR, self._not_a_stream()
        if self._finish_reason is None or self._seen_choices - self._finished_choices:
            return Outcome.TRUNCATED, self._cut or "the stream ended without a finish reason"
        if self._t_first_ns is None and not completion_tokens:
            return Outcome.TRUNCATED, "the stream ended without any text"
        return Outcome.OK, None

    def _body_message(self) -> str:
        status = f"HTTP {self._http.status} {self._http.reason}".strip()
        if "html" in self._http.headers.get("content-type", "").lower():
            return f"{status}: a web page"
        try:
            message = message_of(json.loads(self._body))
        except (ValueError, RecursionError):
            message = self._body.decode("utf-8", "replace").strip()
        return f"{status}: {message}" if message else status

    def _not_a_stream(self) -> str:
        kind = self._http.headers.get("content-type", "")
        try:
            document = json.loads(self._body)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict) and "choices" not in document and (message := message_of(document)):
            return message
        encoding = self._http.headers.get("content-encoding")
        form = f"one document of type {kind}" if encoding is None else f"content encoding {encoding}"
        return f"asked for a plain event stream, answered with {form}: the server or a proxy does not stream"

    def _read_events(self, payload: bytes, t_ns: int) -> None:
        if self._after_cr:
            payload = payload.removeprefix(b"\n")
        self._after_cr = False
        if b"\r" in payload:
            # A carriage return ends a line at once; a line feed that follows in the next read belongs to it.
            self._after_cr = payload.endswith(b"\r")
            payload = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._pending = (self._pending + payload if self._pending else payload).split(b"\n\n")
        for event in events:
            if event:
                self._read_event(event, t_ns)
        if len(self._pending) > _EVENT_LIMIT_BYTES:
            self._fail(f"event {self._events + 1} is longer than {_EVENT_LIMIT_BYTES} bytes")
            self._pending = b""

    def _flush(self) -> None:
        """Take a last event that was not closed by an empty line, unless it is only a piece of one."""
        if self._flushed:
            return
        self._flushed = True
        tail, self._pending = self._pending, b""
        if tail.strip():
            self._read_event(tail, self._t_data_ns, cut_short=True)

    def _read_event(self, event: bytes, t_ns: int, *, cut_short: bool = False) -> None:
        if self._first_event:
            self._first_event = False
            event = event.removeprefix(_BYTE_ORDER_MARK)
        name = b""
        if event.startswith(b"data:") and b"\n" not in event:
            data = event[6:] if event[5:6] == b" " else event[5:]
        else:
            lines = []
            for line in event.split(b"\n"):
                field, _, value = line.partition(b":")
                value = value.removeprefix(b" ")
                if field == b"data":
                    lines.append(value)
                elif field == b"error":
                    # Not of the standard: llama.cpp until 2025 puts the error where others put data.
                    name = b"error"
                    lines.append(value)
                elif field == b"event":
                    name = value.strip()
            if not lines:
                return
            data = b"\n".join(lines)
        self._events += 1
        if data.strip() == b"[DONE]":
            self._terminated = True
            return
        try:
            frame = json.loads(data)
        except (ValueError, RecursionError):
            if name == b"error":
                self._fail(data.decode("utf-8", "replace"))
            elif not cut_short:
                self._fail(f"event {self._events} is not JSON")
            return
        if not isinstance(frame, dict):
            if not cut_short:
                self._fail(f"event {self._events} is not a JSON object")
        elif name == b"error" or frame.get("error") or "error" in (frame.get("object"), frame.get("type")):
            self._fail(message_of(frame) or "an error event without a message")
        else:
            self._read_frame(frame, t_ns)

    def _read_frame(self, frame: dict[str, Any], t_ns: int) -> None:
        usage = frame.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        timings = frame.get("timings")
        if isinstance(timings, dict):
            self._timings = timings
        choices = frame.get("choices")
        if not choices:
            return
        if not isinstance(choices, list):
            self._fail(f"event {self._events} has no list of choices")
            return
        thought = said = False
        for choice in choices:
            if not isinstance(choice, dict):
                self._fail(f"event {self._events} has a choice that is not an object")
                return
            index = choice.get("index")
            index = index if isinstance(index, int) else 0
            finish_reason = choice.get("finish_reason")
            if finish_reason:
                self._finish(index, finish_reason)
            else:
                self._seen_choices.add(index)
            if self._api == "completions":
                said = said or bool(choice.get("text"))
                thought = thought or bool(choice.get("reasoning_content") or choice.get("reasoning"))
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict):
                said = said or bool(delta.get("content")) or _has_arguments(delta)
                thought = thought or bool(delta.get("reasoning_content") or delta.get("reasoning"))
        if said or thought:
            self._stamp(t_ns, said=said)

    def _finish(self, index: int, finish_reason: Any) -> None:
        detail = finish_reason if isinstance(finish_reason, dict) else {}
        self._finish_reason = str(detail.get("type", finish_reason))[:40]
        self._finished_choices.add(index)
        if self._finish_reason in {"abort", "error"}:
            message = detail.get("message")
            self._fail(message if isinstance(message, str) else f"the server ended it with {self._finish_reason!r}")

    def _stamp(self, t_ns: int, *, said: bool) -> None:
        if self._t_last_ns is None or self._t_first_ns is None:
            self._t_first_ns = t_ns
        else:
            # Kernel stamps are moved from the wall clock, so a stepped clock may put one a hair before its predecessor.
            t_ns = max(t_ns, self._t_last_ns)
            # Rounded from the first frame on, so that the sum of many gaps does not drift.
            first_ns = self._t_first_ns
            self._gaps_us.append((t_ns - first_ns) // 1000 - (self._t_last_ns - first_ns) // 1000)
        if said and self._t_first_content_ns is None:
            self._t_first_content_ns = t_ns
        self._t_last_ns = t_ns

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message


def message_of(document: Any, depth: int = 6) -> str | None:
    """The message in an error document of any dialect (OpenAI, FastAPI, TGI, text), at most `depth` levels down."""
    if isinstance(document, str):
        return document.strip() or None
    if depth and isinstance(document, list):
        return next((message for item in document if (message := message_of(item, depth - 1))), None)
    if depth and isinstance(document, dict):
        for key in ("error", "message", "detail", "msg"):
            if message := message_of(document.get(key), depth - 1):
                return message
    return None


def _succeeded(status: int | None) -> bool:
    return status is not None and 200 <= status < 300


def _has_arguments(delta: dict[str, Any]) -> bool:
    calls = delta.get("tool_calls")
    if not calls:
        return False
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return any(bool(function.get("arguments")) for function in functions if isinstance(function, dict))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(milliseconds: Any) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, int | float) and milliseconds >= 0 else None
