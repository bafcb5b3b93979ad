"""The load generator's transport: one keep-alive connection with one request in flight, over gevent.

Reading happens in an io-watcher callback of gevent's hub, not in the greenlet that waits for the answer: a frame is
read and stamped as soon as the loop sees it, without a greenlet switch in between. On Linux every read also carries the
kernel's own receive time (SO_TIMESTAMPING), so a reader that comes late neither falsifies a stamp nor hides that it was
late: read time minus receive time is reported as the arrival lag.

Nothing here needs gevent's monkey patching, and nothing minds it.
"""

import contextlib
import errno
import json
import os
import ssl
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

import gevent.socket  # type: ignore[import-untyped]
from gevent import monkey
from gevent.event import Event  # type: ignore[import-untyped]

from loadgen.protocol import TimeLimits
from serving.clock import NS, SystemClock
from serving.conversation import HttpAnswer, HttpRequest
from serving.errors import ConfigError
from serving.records import Outcome, RequestRecord
from serving.stream import Api, HttpDecoder, StreamDecoder

__all__ = ["PATHS", "Connection", "Endpoint", "RequestSpec"]

PATHS: Final[Mapping[Api, str]] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_READ_BYTES = 64 * 1024
_ANCILLARY_BYTES = 256
_TIMESPEC = struct.Struct("@ll")
# The option and the two flags (receive stamps made by software, and reported as such) of linux/net_tstamp.h.
_SO_TIMESTAMPING = 37
_RX_SOFTWARE_STAMPS = 1 << 3 | 1 << 4
_STAMP_AGE_LIMIT_NS = 60 * NS
_READABLE, _WRITABLE = 1, 2
_LINGER_SECONDS = 1.0
"""How long a server may take to end the HTTP body after its last frame before we close the connection ourselves."""
_STALE_AFTER_SECONDS = 0.5
"""Idle time after which a keep-alive connection may have been closed by the server without our having heard of it."""
_CROSSING_SECONDS = 0.5
"""A close of a used connection this soon after our request, without a byte of an answer, crossed it on the way."""

_OWN_FAULTS = {
    errno.EMFILE: "no file descriptor left: raise the limit with `ulimit -n`",
    errno.ENFILE: "the host has no file descriptor left",
    errno.EADDRNOTAVAIL: "no local port left: too many connections were opened and closed",
    errno.ENOBUFS: "the host has no buffer space left",
    errno.ENOMEM: "the host has no memory left",
    errno.EACCES: "the system forbids the connection",
    errno.EPERM: "the system forbids the connection",
}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request to issue: the JSON body, and what the record must say about it."""

    request_id: int
    stage: str
    user: int
    t_plan_ns: int
    body: bytes
    api: Api
    planned_prompt_tokens: int
    planned_output_tokens: int
    ignore_eos: bool


class _GaveUpError(Exception):
    """An exchange that we ended, or could not begin; `kind` is the word for it in `HttpAnswer.error`."""

    def __init__(self, outcome: Outcome, kind: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.kind = kind


class _Answer(Protocol):
    """What the transport needs of whoever reads the answer."""

    @property
    def head_complete(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    @property
    def terminated(self) -> bool: ...
    @property
    def reusable(self) -> bool: ...
    def feed(self, data: bytes, t_ns: int) -> None: ...
    def close(self, error: str | None = None) -> None: ...


AnswerT = TypeVar("AnswerT", bound=_Answer)


class _WholeBody:
    """Reads an answer that is not a stream."""

    terminated = False

    def __init__(self) -> None:
        self.http = HttpDecoder()
        self.body = bytearray()
        self.error: str | None = None

    @property
    def head_complete(self) -> bool:
        return self.http.head_complete

    @property
    def complete(self) -> bool:
        return self.http.complete

    @property
    def reusable(self) -> bool:
        return self.http.reusable

    def feed(self, data: bytes, t_ns: int) -> None:
        del t_ns
        self.body += self.http.feed(data)

    def close(self, error: str | None = None) -> None:
        self.http.close()
        if not self.http.complete:
            self.error = error or "the server closed the connection"


class Endpoint:
    """Where requests go: parsed and resolved once, shared by all connections of a run.

    Args:
        base_url: `http://host:port`, with a path prefix if the target has one.
        api_key: sent as a bearer token; never in a message or record.
        limits: time limits of connections and requests.
        clock: the run's time line.

    Raises:
        ConfigError: not an http(s) URL, or a key that cannot be a header.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        limits: TimeLimits | None = None,
        clock: SystemClock | None = None,
    ) -> None:
        url = _parse(base_url)
        self.host = url.hostname or ""
        self.port = url.port or (443 if url.scheme == "https" else 80)
        self.prefix = url.path.rstrip("/")
        self.tls = ssl.create_default_context() if url.scheme == "https" else None
        self.limits = limits or TimeLimits()
        self.clock = clock or SystemClock()
        self._api_key = api_key or ""
        if not self._api_key.isprintable() or not self._api_key.isascii():
            raise ConfigError("the API key holds characters that no HTTP header can carry: check PLIMSOLL_API_KEY")
        self._authority = url.netloc
        self._addresses: list[tuple[int, Any]] = []

    def request_bytes(self, path: str, body: bytes | None, accept: str) -> bytes:
        """One request as it goes over the wire; a POST when there is a body."""
        head = [
            f"{'GET' if body is None else 'POST'} {self.prefix}{path} HTTP/1.1",
            f"Host: {self._authority}",
            "User-Agent: plimsoll",
            f"Accept: {accept}",
        ]
        if self._api_key:
            head.append(f"Authorization: Bearer {self._api_key}")
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*head, "", ""]).encode("ascii") + (body or b"")

    def redact(self, message: str) -> str:
        """The message without the API key, should a server repeat it."""
        return message.replace(self._api_key, "***") if self._api_key else message

    def redact_body(self, body: bytes) -> bytes:
        """The same of a whole answer, before anything is quoted from it."""
        return body.replace(self._api_key.encode(), b"***") if self._api_key else body

    def addresses(self) -> list[tuple[int, Any]]:
        """(family, address) in order of preference; looked up once.

        Raises:
            OSError: the name cannot be resolved.
        """
        if not self._addresses:
            stream = gevent.socket.SOCK_STREAM
            try:
                # A numeric address needs no look-up, and so no thread of gevent's resolver.
                lookup = monkey.get_original("socket", "getaddrinfo")
                found = lookup(self.host, self.port, type=stream, flags=gevent.socket.AI_NUMERICHOST)
            except OSError:
                found = gevent.socket.getaddrinfo(self.host, self.port, type=stream)
            self._addresses = [(family, address) for family, _, _, _, address in found]
        return self._addresses


class Connection:
    """One connection with one request in flight, reopened when needed.

    Not to be shared by greenlets; `abort` may be called from any of them.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._clock = endpoint.clock
        self._hub = gevent.get_hub()
        self._wake = Event()
        self._socket: Any = None
        self._watcher: Any = None
        self._tls: ssl.SSLObject | None = None
        self._tls_in = ssl.MemoryBIO()
        self._tls_out = ssl.MemoryBIO()
        self._answer: _Answer | None = None
        self._closed_by_peer: str | None = None
        self._aborted: Outcome | None = None
        self.retry_after_seconds: float | None = None
        """What the last stream's answer asked us to wait before the next request, if it asked in seconds."""
        self._t_idle_ns = 0
        self._heard = False
        self._lag_ns = 0
        self._stamped = True

    def connect(self) -> None:
        """Open the connection ahead of the first request, so that its send lag is not the handshake. Never raises."""
        if self._socket is None:
            try:
                self._open(self._deadline_ns(self._endpoint.limits.connect_seconds))
            except _GaveUpError:
                self.close()

    def issue(self, spec: RequestSpec) -> RequestRecord:
        """Send one completion request and follow its stream to the end, whatever that is."""
        payload = self._endpoint.request_bytes(PATHS[spec.api], spec.body, "text/event-stream")
        decoder, t_send_ns, gave_up = self._exchange(
            payload, lambda: StreamDecoder(spec.api, self._endpoint.redact), self._endpoint.limits
        )
        seen = decoder.result(spec.planned_output_tokens, ignore_eos=spec.ignore_eos)
        wait = decoder.headers.get("retry-after", "")
        self.retry_after_seconds = float(wait) if wait.isascii() and wait.isdigit() else None
        by_kernel = self._heard and self._stamped
        return RequestRecord(
            request_id=spec.request_id,
            stage=spec.stage,
            user=spec.user,
            outcome=seen.outcome if gave_up is None else gave_up.outcome,
            t_plan_ns=spec.t_plan_ns,
            t_send_ns=t_send_ns,
            t_headers_ns=seen.t_headers_ns,
            t_first_ns=seen.t_first_ns,
            t_first_content_ns=seen.t_first_content_ns,
            t_last_ns=seen.t_last_ns,
            t_end_ns=self._clock.now_ns(),
            frames=seen.frames,
            frame_gaps_us=seen.gaps_us,
            planned_prompt_tokens=spec.planned_prompt_tokens,
            planned_output_tokens=spec.planned_output_tokens,
            prompt_tokens=seen.prompt_tokens,
            cached_tokens=seen.cached_tokens,
            completion_tokens=seen.completion_tokens,
            finish_reason=seen.finish_reason,
            http_status=seen.status,
            error=seen.error if gave_up is None else self._endpoint.redact(str(gave_up)),
            arrival_source="kernel" if by_kernel else "read",
            arrival_lag_us=self._lag_ns // 1000 if by_kernel else None,
        )

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Ask one plain question: the transport of `serving.conversation.converse` over gevent. Never raises."""
        body = None if request.json_body is None else json.dumps(request.json_body).encode()
        payload = self._endpoint.request_bytes(request.path, body, "*/*")
        connect_seconds = min(self._endpoint.limits.connect_seconds, request.timeout_s)
        limits = TimeLimits(connect_seconds, request.timeout_s, request.timeout_s)
        t_start_ns = self._clock.now_ns()
        whole, _, gave_up = self._exchange(payload, _WholeBody, limits)
        seconds = (self._clock.now_ns() - t_start_ns) / NS
        error = gave_up.kind if gave_up is not None else whole.error or whole.http.broken
        if error is not None:
            return HttpAnswer(status=0, seconds=seconds, error=self._endpoint.redact(error))
        return HttpAnswer(
            whole.http.status or 0, dict(whole.http.headers), self._endpoint.redact_body(bytes(whole.body)), seconds
        )

    def abort(self, outcome: Outcome) -> None:
        """End the request in flight with `outcome`, and any later one at once."""
        self._aborted = outcome
        self._wake.set()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._tls = None
        self._closed_by_peer = None

    def _deadline_ns(self, seconds: float) -> int:
        return self._clock.now_ns() + round(seconds * NS)

    def _exchange(
        self, payload: bytes, new_answer: Callable[[], AnswerT], limits: TimeLimits
    ) -> tuple[AnswerT, int | None, _GaveUpError | None]:
        """Send the request and read its answer: (the answer so far, when the first byte left, why we ended it)."""
        deadline_ns = self._deadline_ns(limits.request_seconds)
        while True:
            answer = new_answer()
            t_send_ns: int | None = None
            self._heard, self._lag_ns, self._stamped = False, 0, True
            idle_ns = self._take_idle()
            used = self._socket is not None
            try:
                if self._socket is None:
                    self._open(min(deadline_ns, self._deadline_ns(limits.connect_seconds)))
                self._answer = answer
                t_send_ns = self._clock.now_ns()
                sent = self._send(payload, answer, deadline_ns)
                self._follow(answer, t_send_ns + round(limits.first_byte_seconds * NS), deadline_ns)
            except _GaveUpError as gave_up:
                self.close()
                return answer, t_send_ns, gave_up
            except BaseException:
                self.close()
                raise
            finally:
                self._answer = None
            closed = self._closed_by_peer
            if closed is not None and not self._heard and used:
                quick = self._clock.now_ns() - (t_send_ns or 0) < _CROSSING_SECONDS * NS
                if quick or idle_ns > _STALE_AFTER_SECONDS * NS:
                    # The server closed the connection while our request was on its way: nobody has read it. Some
                    # close after an answer now and then, a moment before the next request comes.
                    self.close()
                    continue
            if closed is not None:
                answer.close(closed or None)
            if closed is not None or not sent or not answer.reusable:
                self.close()
            self._t_idle_ns = self._clock.now_ns()
            return answer, t_send_ns, None

    def _take_idle(self) -> int:
        """Nanoseconds that the open connection has been idle, 0 when there is none; drops one that was closed."""
        if self._socket is not None:
            self._read()
        if self._closed_by_peer is not None:
            self.close()
        return 0 if self._socket is None else self._clock.now_ns() - self._t_idle_ns

    def _follow(self, answer: _Answer, head_deadline_ns: int, deadline_ns: int) -> None:
        linger_ns: int | None = None
        while not answer.complete and self._closed_by_peer is None:
            if answer.terminated:
                linger_ns = linger_ns or self._deadline_ns(_LINGER_SECONDS)
                if self._clock.now_ns() >= linger_ns:
                    return
                self._pause(linger_ns, "", at_most=True)
            elif answer.head_complete:
                self._pause(deadline_ns, "the answer did not end in time")
            else:
                self._pause(min(head_deadline_ns, deadline_ns), "no answer in time")

    def _pause(self, deadline_ns: int, late: str, *, at_most: bool = False) -> None:
        """Wait for the next sign of life, an abort or the deadline.

        Raises:
            _GaveUpError: aborted, or the deadline has passed (unless `at_most`).
        """
        if self._aborted is not None:
            raise _GaveUpError(self._aborted, self._aborted.value, "ended by the run")
        left_ns = deadline_ns - self._clock.now_ns()
        if left_ns <= 0 and not at_most:
            raise _GaveUpError(Outcome.TIMEOUT, "timeout", late)
        self._wake.wait(max(left_ns, 0) / NS)
        self._wake.clear()

    def _pause_until(self, events: int, deadline_ns: int, late: str) -> None:
        """Wait until the socket is readable (1) or writable (2)."""
        watcher = self._hub.loop.io(self._socket.fileno(), events)
        try:
            watcher.start(self._wake.set)
            self._pause(deadline_ns, late)
        finally:
            watcher.stop()
            watcher.close()

    def _open(self, deadline_ns: int) -> None:
        endpoint = self._endpoint
        try:
            addresses = endpoint.addresses()
        except OSError as error:
            message = f"cannot resolve {endpoint.host}: {error.strerror}"
            raise _GaveUpError(Outcome.CLIENT_ERROR, "dns", message) from None
        for number, (family, address) in enumerate(addresses, start=1):
            try:
                self._open_address(family, address, deadline_ns)
                break
            except OSError as error:
                self.close()
                failure = _connect_failure(error, f"{endpoint.host}:{endpoint.port}")
                if failure.outcome is Outcome.CLIENT_ERROR or number == len(addresses):
                    raise failure from None
        if endpoint.tls is not None:
            self._shake_hands(endpoint.tls, deadline_ns)
        self._wake.clear()
        self._watcher = self._hub.loop.io(self._socket.fileno(), _READABLE)
        self._watcher.start(self._read)

    def _open_address(self, family: int, address: Any, deadline_ns: int) -> None:
        # The original class: Locust's patched one would put a greenlet switch between the loop and the read.
        self._socket = monkey.get_original("socket", "socket")(family, gevent.socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._socket.setsockopt(gevent.socket.SOL_SOCKET, _SO_TIMESTAMPING, _RX_SOFTWARE_STAMPS)
        code = self._socket.connect_ex(address)
        if code in {errno.EINPROGRESS, errno.EWOULDBLOCK}:
            self._pause_until(_WRITABLE, deadline_ns, "no connection in time")
            while (code := self._socket.getsockopt(gevent.socket.SOL_SOCKET, gevent.socket.SO_ERROR)) == 0:
                try:
                    self._socket.getpeername()
                    break
                except OSError:
                    self._pause_until(_WRITABLE, deadline_ns, "no connection in time")
        if code:
            raise OSError(code, os.strerror(code))

    def _shake_hands(self, context: ssl.SSLContext, deadline_ns: int) -> None:
        self._tls_in, self._tls_out = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(self._tls_in, self._tls_out, server_hostname=self._endpoint.host)
        late = "no TLS session in time"
        try:
            while True:
                try:
                    tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._send_all(self._tls_out.read(), deadline_ns, late)
                    self._tls_in.write(self._receive(deadline_ns, late))
                else:
                    break
            self._send_all(self._tls_out.read(), deadline_ns, late)
        except OSError as error:
            reason = getattr(error, "verify_message", None) or error.strerror or str(error)
            raise _GaveUpError(Outcome.HTTP_ERROR, "tls", f"no TLS session: {reason}") from None
        self._tls = tls

    def _receive(self, deadline_ns: int, late: str) -> bytes:
        while True:
            try:
                data: bytes = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                self._pause_until(_READABLE, deadline_ns, late)
            else:
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
                return data

    def _send_all(self, data: bytes, deadline_ns: int, late: str) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, InterruptedError):
                self._pause_until(_WRITABLE, deadline_ns, late)

    def _send(self, data: bytes, answer: _Answer, deadline_ns: int) -> bool:
        """Send the request; False when the server answered or hung up before it had all of it."""
        if self._tls is not None:
            self._tls.write(data)
            data = self._tls_out.read()
        view = memoryview(data)
        while view:
            if answer.complete or self._closed_by_peer is not None:
                return False
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, InterruptedError):
                self._pause_until(_WRITABLE, deadline_ns, "the server did not take the request in time")
            except OSError as error:
                # A server that rejects a request may answer and hang up before it has read all of it.
                while self._read():
                    pass
                self._end(error.strerror or str(error))
                return False
        return True

    def _read(self) -> bool:
        """Take what has arrived; called by the hub whenever there is something. True when bytes came."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(error.strerror or str(error))
            return False
        now_ns = self._clock.now_ns()
        if not data:
            self._end("")
            return False
        t_ns = self._arrival_ns(ancillary, now_ns)
        if self._tls is not None:
            data = self._decrypt(self._tls, data)
        answer = self._answer
        if not data:
            return True
        if answer is None:
            self._end("the server sent bytes that nobody asked for")
            return False
        self._heard = True
        had_head = answer.head_complete
        answer.feed(data, t_ns)
        if answer.complete or answer.terminated or not had_head:
            self._wake.set()
        return True

    def _arrival_ns(self, ancillary: list[tuple[int, int, bytes]], now_ns: int) -> int:
        for level, kind, data in ancillary:
            if level == gevent.socket.SOL_SOCKET and kind == _SO_TIMESTAMPING and len(data) >= _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack_from(data)
                t_ns = min(self._clock.from_realtime_ns(seconds * NS + nanoseconds), now_ns)
                # An older stamp means that the wall clock was stepped between arrival and reading.
                if now_ns - t_ns < _STAMP_AGE_LIMIT_NS:
                    self._lag_ns = max(self._lag_ns, now_ns - t_ns)
                    return t_ns
        self._stamped = False
        return now_ns

    def _decrypt(self, tls: ssl.SSLObject, data: bytes) -> bytes:
        self._tls_in.write(data)
        parts: list[bytes] = []
        try:
            while part := tls.read(_READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._end("")
        except ssl.SSLError as error:
            self._end(f"TLS: {error.reason}")
        return b"".join(parts)

    def _end(self, message: str) -> None:
        """The peer closed: in order when the message is empty."""
        if self._closed_by_peer is None:
            self._closed_by_peer = message
        if self._watcher is not None:
            self._watcher.stop()
        self._wake.set()


def _parse(base_url: str) -> SplitResult:
    try:
        url = urlsplit(base_url.strip())
        usable = url.scheme in {"http", "https"} and url.hostname is not None and url.port != 0
    except ValueError:
        usable = False
    if not usable or not base_url.isascii():
        raise ConfigError(f"{base_url!r} is not a URL of a server: give http://host:port or https://host:port")
    if url.username is not None or url.password is not None:
        raise ConfigError("the URL holds a user name or password: give the key in PLIMSOLL_API_KEY instead")
    return url


def _connect_failure(error: OSError, where: str) -> _GaveUpError:
    if error.errno in _OWN_FAULTS:
        return _GaveUpError(Outcome.CLIENT_ERROR, _OWN_FAULTS[error.errno], f"{where}: {_OWN_FAULTS[error.errno]}")
    if error.errno == errno.ECONNREFUSED:
        return _GaveUpError(Outcome.HTTP_ERROR, "refused", f"{where}: connection refused")
    message = error.strerror or str(error)
    return _GaveUpError(Outcome.HTTP_ERROR, message, f"{where}: {message}")
