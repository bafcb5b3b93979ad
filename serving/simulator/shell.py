"""The HTTP shell of a simulated server: sockets and a clock around `SimulatedServer`, in the words of a dialect.

Virtual time is wall time since the start, times `speed`. Steps follow each other in virtual time; the shell waits for
the wall to reach the end of one, writes its tokens to their connections, and begins the next. A machine that is too
slow for this is late: up to a slack that is caught up on, beyond it the next step begins when the last one's tokens
were really written, so what the truth says and what clients see stay the same thing. How late it was is told.

Answers are written byte by byte here and not by aiohttp, which reads the requests: header names, their order and the
ends of bodies are then the engine's. aiohttp's own answers are left for what is no HTTP.

Beside the engine's paths there are `/dcgm/metrics` (the cards, as a DCGM exporter shows them) and, for this host only,
`/simulator/state`, `/simulator/faults` and `/simulator/crash`.
"""

import asyncio
import contextlib
import errno
import hmac
import io
import json
import logging
import math
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import formatdate
from enum import Enum
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self, TextIO

from aiohttp import web
from aiohttp.http import HttpProcessingError

from serving.clock import NS
from serving.errors import ConfigError, PlimsollError, RecordError
from serving.simulator.ballast import Ballast
from serving.simulator.core import Flight
from serving.simulator.dcgm import dcgm_page
from serving.simulator.dialects.base import Asked, Dialect, Page, Stream, Trouble, Usage
from serving.simulator.dialects.llamacpp import LLAMACPP_DIALECT
from serving.simulator.dialects.sglang import SGLANG_DIALECT
from serving.simulator.dialects.vllm import VLLM_DIALECT
from serving.simulator.faults import Fault, format_fault, parse_fault
from serving.simulator.server import SimulatedServer
from serving.simulator.spec import Arrival, Finish, Snapshot, Step
from serving.simulator.traffic import Traffic

__all__ = ["DIALECTS", "Lateness", "SimulatorShell", "open_record"]

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect for dialect in (VLLM_DIALECT, SGLANG_DIALECT, LLAMACPP_DIALECT)
}
"""Every engine that can be simulated, by name."""

GENERATION_PATHS: Final = ("/v1/chat/completions", "/v1/completions")

_SLACK_SECONDS = 0.05
"""How late, on the wall's clock, the end of a step may be noticed without the next one beginning later for it."""
_TOLD_SECONDS = 0.25
"""How far behind, in wall time, the simulation is when people are told: one hiccup of the host is no news."""
_PULSE_SECONDS = 0.05
"""Wall time after which the server's life is looked at when nothing else is due."""
_FLUSH_SECONDS = 0.5
_BACKLOG = 512
_BODY_LIMIT_BYTES = 64 * 2**20
_HEADER_LIMIT_BYTES = 64 * 2**10
_DOWN_LIMIT_SECONDS = 100 * 366 * 86400.0
_ID_DIGITS = 18
"""No id of a fault has more; Python refuses to read numbers of thousands of digits."""
_UNSENT_LIMIT_BYTES = 256 * 1024
"""A reader that has so much still to read gets its tokens in larger frames, as a real engine's output queue does it."""
_KEEP_ALIVE_SECONDS = 5.0
"""After which an idle connection is closed: the default of uvicorn and of llama.cpp's server alike."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close by reset."""

_WORDS: Final = tuple(
    f" {start}{middle}{end}"
    for start in ("tok", "lum", "ber", "sil", "mar", "ven", "kol", "dra")
    for middle in ("a", "e", "i", "o")
    for end in ("", "n", "ra", "l", "mi", "s", "to", "x")
)
"""Texts of tokens, one each."""


class _Software(Enum):
    """What web server an engine is built on: it decides about what no dialect says."""

    UVICORN = "uvicorn"
    """Names in lower case and a date; listens once the model is loaded; a stream's head goes out at once; it is another
    process than the engine, and tells its clients when that dies."""
    HTTPLIB = "httplib"
    """Listens while the model loads; a stream's head waits for the first token; dies with the engine."""


_REFUSALS: Final = {
    "http_429": Trouble.TOO_MANY,
    "http_503": Trouble.OVERLOADED,
    "http_500": Trouble.INTERNAL,
}
_BREAKS: Final = frozenset({"garbage_frame", "stream_error", "cut_reset", "cut_clean", "stall"})
"""Faults of an answer that strike after some of its tokens."""


class Lateness:
    """How late the ends of steps were noticed, on the wall's clock."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_seconds = 0.0
        self.max_seconds = 0.0
        self.slips = 0
        """Steps after which the slack was used up."""
        self.slipped_seconds = 0.0
        """Wall time by which the simulation is behind for good."""

    def add(self, seconds: float) -> bool:
        """Count the end of one step; True when the next one cannot begin on time."""
        self.steps += 1
        self.total_seconds += seconds
        self.max_seconds = max(self.max_seconds, seconds)
        if seconds <= _SLACK_SECONDS:
            return False
        self.slips += 1
        self.slipped_seconds += seconds
        return True

    @property
    def mean_seconds(self) -> float:
        """Mean over all steps; 0 before the first."""
        return self.total_seconds / self.steps if self.steps else 0.0


class SimulatorShell:
    """Serves a simulated server over HTTP by the wall clock.

    Args:
        server: made for this very moment; its origin becomes now.
        dialect: how it speaks.
        host: address to listen on.
        port: TCP port; 0 takes a free one, which a restarted server then has again.
        speed: virtual seconds in one second.
        log: where to write the engine's log; overwritten.
        api_key: bearer token that the engine asks for, on the paths on which it does.
        allocate: really hold what leaks (see `ballast`).
        traffic: requests from elsewhere.
        reasoning_tokens: so many tokens of each answer come in the reasoning channel.
        answer_tokens: mean length of an answer that may end by itself; None lets all use up what they asked for.
        restart_after_seconds: a server that died for good is started again so much later, in virtual time.
        max_http_streams: connections served at once; others wait, whatever they ask for (an engine with a fixed number
            of HTTP threads).
        truth: the text stream that the server's truth goes to, to be flushed.
        seed: of the lengths of answers.
        warn: told once when the machine is too slow, and of what else people should know.
    """

    def __init__(
        self,
        server: SimulatedServer,
        dialect: Dialect,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        speed: float = 1.0,
        log: Path | None = None,
        api_key: str | None = None,
        allocate: bool = False,
        traffic: Traffic | None = None,
        reasoning_tokens: int = 0,
        answer_tokens: float | None = 256.0,
        restart_after_seconds: float | None = None,
        max_http_streams: int | None = None,
        truth: TextIO | None = None,
        seed: int = 0,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if not (math.isfinite(speed) and speed > 0):
            raise ConfigError(f"speed {speed:g}: give how many seconds pass in one, above 0")
        self.server = server
        self.dialect = dialect
        self.speed = speed
        self.host = host
        self.port = port
        self.lateness = Lateness()
        self.reasoning_tokens = reasoning_tokens
        self.ended: asyncio.Future[Trouble]
        """Why the server ended for good; or the exception that ended the simulation."""
        self._log_path = log
        self._api_key = api_key
        self._answer_tokens = answer_tokens
        self._restart_after_seconds = restart_after_seconds
        self._truth = truth
        self._seed = seed
        self._warn = warn or (lambda text: print(f"simulator: {text}", file=sys.stderr))
        self._warned_slow = False
        self._ballast = Ballast() if allocate else None
        self._traffic = traffic
        self._turns = asyncio.Semaphore(max_http_streams) if max_http_streams is not None else None
        self._answers: dict[int, _Answer] = {}
        self._last_id = 0
        self._log: TextIO | None = None
        self._log_lines: list[tuple[int, str]] = []
        self._customers: Iterator[Arrival] = iter(())
        self._next_customer: Arrival | None = None
        self._start_number = server.start_number
        self.spec = server.spec
        self.software = _software(dialect.complaint(Trouble.NOT_FOUND, server.spec))
        self._handle: asyncio.TimerHandle | None = None
        self._poked = False
        self._flushed_s = 0.0
        self._held_s = 0.0
        self._holder: socket.socket | None = None
        self._http: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._listening: asyncio.Task[None] | None = None

    # ---- life

    @property
    def url(self) -> str:
        """Base URL; known once it has started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Begin: time passes from now on, and requests are taken.

        Raises:
            ConfigError: the address cannot be listened on, or the log not be written.
            RecordError: there is no room for the log.
        """
        loop = self._loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._holder = _hold(self.host, self.port)
        self._address, self.port = self._holder.getsockname()[:2]
        try:
            await self._begin()
        except PlimsollError:
            self._holder.close()
            if self._log is not None:
                with contextlib.suppress(RecordError):
                    self._log.close()
            raise

    async def _begin(self) -> None:
        loop = self._loop
        if self._log_path is not None:
            self._log = open_record(self._log_path, "w", "log")
        complaints = logging.Logger("simulator")  # noqa: LOG001 - of this server's own, and in nobody's tree
        complaints.addHandler(_Complaints(self._warn))
        self._http = web.Server(
            self._answer,
            request_factory=self._read_head,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            logger=complaints,
            max_line_size=_HEADER_LIMIT_BYTES,
            max_field_size=_HEADER_LIMIT_BYTES,
            auto_decompress=False,
        )
        self._wall_s = loop.time()
        self._origin_ns = self.server.t_ns
        if self._traffic is not None:
            end_ns = self._origin_ns + 100 * 365 * 86400 * NS
            self._customers = self._traffic.arrivals(self._origin_ns, end_ns, self.server.spec.block_tokens)
            self._next_customer = next(self._customers, None)
        self._launched()
        if self._is_up():
            await self._listen()
        self._tick()

    async def stop(self) -> None:
        """End the server: what runs is lost, connections are closed, what was allocated is given back.

        Harmless when called again.
        """
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            if self.server.alive:
                self.server.elapse(self.now_ns)
                self.server.go_down(math.inf)
            self._settle()
        if self._listening is not None:
            self._listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listening
        if self._http is not None:
            self._hang_up()
            await self._http.shutdown(1.0)
            self._http = None
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        if self._ballast is not None:
            self._ballast.release()
        log, self._log = self._log, None
        try:
            if self._truth is not None and not self._truth.closed:
                self._truth.flush()
        finally:
            if log is not None:
                log.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return self._origin_ns + round((time.monotonic() - self._wall_s) * self.speed * NS)

    def _wall(self, t_ns: int) -> float:
        """When the wall's clock (the loop's) reaches that virtual time."""
        return self._wall_s + (t_ns - self._origin_ns) / (self.speed * NS)

    # ---- time

    def _tick(self) -> None:
        """Do what is due, and come back when the next thing is."""
        self._poked = False
        if self._handle is not None:
            self._handle.cancel()
        try:
            now_ns = self.now_ns
            self._advance(now_ns)
            if self.server.begin(now_ns) is None:
                self._settle()
        except Exception as error:  # noqa: BLE001 - there is no caller here: whoever waits for the end is told
            if not self.ended.done():
                self.ended.set_exception(error)
            return
        due_s = self._loop.time() + _PULSE_SECONDS
        if (end_ns := self.server.next_ns) is not None:
            due_s = min(due_s, self._wall(end_ns))
        if self._next_customer is not None:
            due_s = min(due_s, self._wall(self._next_customer.t_ns))
        self._handle = self._loop.call_at(due_s, self._tick)

    def _poke(self) -> None:
        """Something came in: what arrives at the same moment shares the step."""
        if not self._poked:
            self._poked = True
            self._loop.call_soon(self._tick)

    def _advance(self, now_ns: int) -> None:
        """Let everything happen that is due by `now_ns`."""
        server = self.server
        while True:
            end_ns = server.next_ns
            customer = self._next_customer
            if customer is not None and customer.t_ns <= now_ns and (end_ns is None or customer.t_ns <= end_ns):
                server.take(customer)
                self._next_customer = next(self._customers, None)
                server.begin(customer.t_ns)
            elif end_ns is not None and end_ns <= now_ns:
                number = server.start_number
                step = server.complete()
                if step.emitted or step.finished:
                    self._deliver(step)
                if server.start_number == number:
                    late = self.lateness.add((now_ns - end_ns) / (self.speed * NS))
                    server.begin(now_ns if late else end_ns)
                    if late:
                        self._tell_slowness()
            else:
                break
        server.elapse(now_ns)
        self._settle()
        wall_s = self._loop.time()
        if self._ballast is not None and wall_s - self._held_s >= _PULSE_SECONDS / 2:
            self._held_s = wall_s
            self._hold(self._ballast)
        if wall_s - self._flushed_s >= _FLUSH_SECONDS:
            self._flushed_s = wall_s
            self._keep()

    def _tell_slowness(self) -> None:
        behind_s = self.lateness.slipped_seconds
        if behind_s >= _TOLD_SECONDS and not self._warned_slow:
            self._warned_slow = True
            self._warn(
                f"this machine is too slow for speed {self.speed:g}, or something kept it busy: the simulation is "
                f"{behind_s:.2f} s behind; the truth says when tokens really came out, and GET /simulator/state how "
                "late they were"
            )

    def _keep(self) -> None:
        """What need not be done at each step."""
        if self._truth is not None:
            self._truth.flush()
        if self._log_lines:
            self._write_log()

    def _hold(self, ballast: Ballast) -> None:
        """Really hold what leaked; a process that is down holds nothing."""
        memory, alive = self.server.memory, self.server.alive
        ballast.follow(
            memory_bytes=memory.host_leaked + memory.cache_bytes if alive else 0.0,
            descriptors=memory.descriptors if alive else 0.0,
            shared_bytes=self.server.shared_bytes,
        )

    def _settle(self) -> None:
        """Tell those whose request a death took, and keep the sockets as alive as the server is."""
        server = self.server
        if server.lost:
            trouble = server.died or Trouble.ENGINE_DEAD
            for flight in server.lost:
                answer = self._answers.pop(flight.id, None)
                if answer is not None:
                    answer.die(trouble)
            server.lost.clear()
        if server.start_number != self._start_number or not server.alive:
            if self._listener is not None:
                self._hang_up()
            if server.alive:
                self._start_number = server.start_number
                self._launched()
        if server.died is not None and not self.ended.done():
            trouble = server.died
            self._log_death(trouble)
            if self._restart_after_seconds is None:
                self.ended.set_result(trouble)
            else:
                server.come_back(self._restart_after_seconds)
        if self._is_up() and self._listener is None and self._listening is None:
            self._listening = self._loop.create_task(self._listen_again())

    # ---- sockets

    def _is_up(self) -> bool:
        return self.server.ready or (self.server.alive and self.software is _Software.HTTPLIB)

    async def _listen(self) -> None:
        assert self._http is not None  # noqa: S101 - start has made it
        try:
            self._listener = await self._loop.create_server(
                self._http, self._address, self.port, reuse_port=True, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {self.url}: {error.strerror or error}") from error

    async def _listen_again(self) -> None:
        try:
            await self._listen()
        except ConfigError as error:
            if not self.ended.done():
                self.ended.set_exception(error)
        finally:
            self._listening = None

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _hang_up(self) -> None:
        """As when the process is gone: nothing listens, and every connection is closed."""
        self._stop_listening()
        self._answers.clear()
        if self._http is not None:
            for connection in self._http.connections:
                connection.force_close()

    # ---- the log

    def _launched(self) -> None:
        """A start of the server: what it says of itself from now on, and its log."""
        server = self.server
        self.spec = server.spec
        if self._log is None:
            return
        lines = self.dialect.startup_log(self.spec, server.started_ns)
        # A server that is ready at once has it all behind it.
        begun_ns = server.started_ns if server.ready_ns > server.started_ns else -(2**62)
        self._log_lines += [(begun_ns + round(line.seconds * NS), line.text) for line in lines]
        self._write_log()

    def _write_log(self) -> None:
        now_ns = self.server.t_ns
        due = [text for t_ns, text in self._log_lines if t_ns <= now_ns]
        self._log_lines = [line for line in self._log_lines if line[0] > now_ns]
        if due and self._log is not None:
            self._log.write("".join(f"{text}\n" for text in due))
            self._log.flush()

    def _log_death(self, trouble: Trouble) -> None:
        self._log_lines.clear()
        if self._log is not None:
            lines = self.dialect.death_log(trouble, self.spec, self.server.t_ns)
            self._log.write("".join(f"{line.text}\n" for line in lines))
            self._log.flush()

    # ---- steps and their answers

    def _deliver(self, step: Step) -> None:
        answers = self._answers
        if not answers:
            return
        get = answers.get
        if not step.finished:
            for request_id in step.emitted:
                answer = get(request_id)
                if answer is not None:
                    answer.token()
            return
        ends = dict(step.finished)
        for request_id in step.emitted:
            if request_id not in ends:
                answer = get(request_id)
                if answer is not None:
                    answer.token()
        for request_id, why in step.finished:
            answer = answers.pop(request_id, None)
            if answer is not None:
                answer.end(why)

    # ---- HTTP

    def _read_head(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=_BODY_LIMIT_BYTES)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._turns is None:
            return await self._route(request)
        async with self._turns:
            return await self._route(request)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        path, method = request.path, request.method
        if request.transport is not None and request.headers.get("Expect", "").lower() == "100-continue":
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.read() if method == "POST" else b""
        if path.startswith("/simulator/"):
            return self._reply(request, self._control(request, body))
        self._advance(self.now_ns)
        server = self.server
        snapshot = server.snapshot()
        if snapshot is None:
            # The connection was opened while the server was still there.
            return _close(request)
        if path == "/dcgm/metrics":
            return self._reply(request, dcgm_page(snapshot))
        if self._api_key is not None and self.dialect.asks_key(path) and not self._has_key(request):
            return self._reply(request, self.complain(Trouble.NO_KEY, path), path)
        if method == "POST" and path in GENERATION_PATHS:
            if not server.ready:
                return self._reply(request, self.complain(Trouble.LOADING, path), path)
            return await self._generate(request, path, body)
        return self._reply(request, await self._page(method, path, body, snapshot), path)

    async def _page(self, method: str, path: str, body: bytes, snapshot: Snapshot) -> Page:
        dialect, spec = self.dialect, self.spec
        page: Page | None = None
        if method == "HEAD" and self.software is _Software.HTTPLIB:
            method = "GET"
        if method == "GET" and path == "/metrics":
            conditions = self.server.conditions
            if conditions.metrics_delay_seconds:
                await asyncio.sleep(conditions.metrics_delay_seconds / self.speed)
                snapshot = self.server.snapshot() or snapshot
            if snapshot.ready:
                return dialect.metrics(spec, snapshot, renamed=conditions.metrics_renamed)
        elif method == "GET":
            page = dialect.page(path, spec, snapshot)
        elif method == "POST" and snapshot.ready:
            page = dialect.post(path, body, spec)
        if page is not None:
            return page
        if not snapshot.ready:
            return self.complain(Trouble.LOADING, path)
        page = dialect.page(path, spec, snapshot)
        if path == "/metrics" or (page is not None and page.status != HTTPStatus.METHOD_NOT_ALLOWED):
            return self.complain(Trouble.METHOD_NOT_ALLOWED, path, allow="GET")
        return page or self.complain(Trouble.NOT_FOUND, path)

    async def _generate(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        server, now_ns = self.server, self.server.t_ns
        asked = self.dialect.read_request(path, body, self.spec)
        if isinstance(asked, Page):
            return self._reply(request, asked, path)
        self._last_id += 1
        request_id = self._last_id
        fault = server.plan.answer_fault(request_id, (now_ns - server.origin_ns) / NS)
        if fault is not None and fault.name in _REFUSALS:
            self._tell_hit(fault, request_id, asked)
            return self._reply(request, self.complain(_REFUSALS[fault.name], path), path)
        tokens, finish = self._length(asked, request_id)
        if fault is not None and fault.name == "empty_answer":
            # The model says that it has ended, first thing; that is a token, and it has no text.
            tokens, finish = 1, Finish.STOP
        arrival = Arrival(request_id, now_ns, asked.prompt_tokens, tokens, asked.prefix, finish)
        if server.arrive(arrival) is not None:
            return self._reply(request, self.complain(Trouble.OVERLOADED, path), path)
        if fault is not None:
            self._tell_hit(fault, request_id, asked)
        answer = _Answer(self, request, asked, server.flights[request_id], fault)
        self._answers[request_id] = answer
        self._poke()
        try:
            await answer.done
        except asyncio.CancelledError:
            if self._answers.pop(request_id, None) is not None:
                self._cancel(request_id)
            raise
        return _Reply(keep_alive=answer.keeps_alive)

    def _tell_hit(self, fault: Fault, request_id: int, asked: Asked) -> None:
        """Write down which request a fault of answers hits: those that are refused leave no other trace."""
        server = self.server
        if server.truth is not None:
            lengths = {"prompt_tokens": asked.prompt_tokens, "output_tokens": asked.output_tokens}
            server.truth.event(server.t_ns, fault.name, id=request_id, **lengths)

    def forget(self, request_id: int) -> None:
        """An answer broke off by its own fault: the engine sees a client that went away."""
        if self._answers.pop(request_id, None) is not None:
            self._loop.call_soon(self._cancel, request_id)

    def _cancel(self, request_id: int) -> None:
        self._advance(self.now_ns)
        self.server.cancel(request_id, self.server.t_ns)

    def _length(self, asked: Asked, request_id: int) -> tuple[int, Finish]:
        """How many tokens the answer has, and why it ends there."""
        if asked.ignore_eos or self._answer_tokens is None:
            return asked.output_tokens, Finish.LENGTH
        draw = random.Random(f"{self._seed}/answer/{request_id}").lognormvariate(-0.125, 0.5)
        tokens = max(1, round(self._answer_tokens * draw))
        return (tokens, Finish.STOP) if tokens < asked.output_tokens else (asked.output_tokens, Finish.LENGTH)

    def _has_key(self, request: web.BaseRequest) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, (self._api_key or "").encode())

    def complain(self, trouble: Trouble, path: str, **detail: str) -> Page:
        """An error in the engine's words."""
        return self.dialect.complaint(trouble, self.spec, {"path": path, **detail})

    def count(self, path: str, status: int) -> None:
        """Count an answer as the engine's own metrics do."""
        self.server.http[path, status] += 1

    def _reply(self, request: web.BaseRequest, page: Page, path: str | None = None) -> web.StreamResponse:
        """Write a whole answer; `path` where the engine counts it."""
        if path is not None:
            self.count(path, page.status)
        keeps_alive = request.keep_alive and not _closes(page.headers)
        if request.transport is not None:
            data = _page_bytes(page, self.software, keeps_alive=keeps_alive)
            if request.method == "HEAD":
                data = data[: len(data) - len(page.body)]
            request.transport.write(data)
        return _Reply(keep_alive=keeps_alive)

    # ---- control

    def _control(self, request: web.BaseRequest, body: bytes) -> Page:
        if not _is_local(request.remote):
            return _json(403, {"error": "the simulator is only steered from its own host"})
        self._advance(self.now_ns)
        method, path = request.method, request.path
        if path == "/simulator/state":
            return _json(200, self.state()) if method == "GET" else _json(405, {"error": "GET /simulator/state"})
        try:
            document = json.loads(body) if body.strip() else {}
            if not isinstance(document, dict):
                return _json(400, {"error": "the body must be a JSON object"})
        except (ValueError, RecursionError):
            return _json(400, {"error": "the body is not JSON"})
        try:
            if path == "/simulator/faults" and method == "POST":
                return self._add_fault(document)
            if path.startswith("/simulator/faults/") and method == "DELETE":
                return self._remove_fault(path.removeprefix("/simulator/faults/"))
            if path == "/simulator/crash" and method == "POST":
                return self._crash(document)
        except ConfigError as error:
            return _json(400, {"error": str(error)})
        return _json(
            404,
            {
                "error": "there are GET /simulator/state, POST /simulator/faults, DELETE /simulator/faults/ID and "
                "POST /simulator/crash"
            },
        )

    def _add_fault(self, document: Mapping[str, Any]) -> Page:
        text = document.get("fault")
        if not isinstance(text, str):
            raise ConfigError('give the fault as {"fault": "NAME=VALUE,..."}')
        fault = parse_fault(text, now_s=self._seconds())
        added = self.server.plan.add(fault)
        self._poke()
        return _json(200, {"id": added, "fault": format_fault(fault)})

    def _remove_fault(self, text: str) -> Page:
        if not text.isascii() or not text.isdigit() or len(text) > _ID_DIGITS:
            raise ConfigError(f"{text!r} is no fault's id; GET /simulator/state lists them")
        fault = self.server.plan.remove(int(text))
        self._poke()
        return _json(200, {"id": int(text), "fault": format_fault(fault)})

    def _crash(self, document: Mapping[str, Any]) -> Page:
        seconds = document.get("down_seconds", 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _DOWN_LIMIT_SECONDS:
            given = f"{seconds!r:.40}"
            raise ConfigError(f"down_seconds {given}: give how long it is down, in virtual seconds, up to 100 years")
        self._loop.call_soon(self._go_down, float(seconds))
        return _json(200, {"down_seconds": float(seconds)})

    def _go_down(self, seconds: float) -> None:
        self._advance(self.now_ns)
        self.server.go_down(seconds)
        self._tick()

    def _seconds(self) -> float:
        return (self.server.t_ns - self.server.origin_ns) / NS

    def state(self) -> dict[str, Any]:
        """What `GET /simulator/state` tells."""
        server, late = self.server, self.lateness
        state = server.state
        return {
            "schema": "plimsoll.simulator/1",
            "t_ns": server.t_ns,
            "seconds": round(self._seconds(), 6),
            "speed": self.speed,
            "engine": self.spec.engine,
            "release": self.spec.release,
            "model": self.spec.model,
            "alive": server.alive,
            "ready": server.ready,
            "start_number": server.start_number,
            "died": server.died.value if server.died is not None else None,
            "running": len(state.running),
            "waiting": len(state.waiting),
            "kv_blocks_used": state.pool.used,
            "kv_blocks": state.pool.total,
            "max_batch": self.spec.max_batch,
            "steps": server.steps,
            "connections_answered": len(self._answers),
            "lateness": {
                "steps": late.steps,
                "mean_seconds": round(late.mean_seconds, 6),
                "max_seconds": round(late.max_seconds, 6),
                "slips": late.slips,
                "slipped_seconds": round(late.slipped_seconds, 6),
            },
            "faults": [
                {"id": fault_id, "fault": format_fault(fault), "on": fault.is_on(self._seconds())}
                for fault_id, fault in server.plan.faults.items()
            ],
            "allocated": None
            if self._ballast is None
            else {
                "memory_bytes": self._ballast.memory_bytes,
                "shared_bytes": self._ballast.shared_bytes,
                "descriptors": self._ballast.descriptors,
                "short": self._ballast.is_short,
            },
        }


class _Complaints(logging.Handler):
    """What aiohttp has to say: nothing of clients that speak no HTTP, and in one line what went wrong in here."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or isinstance(error, HttpProcessingError | OSError | PlimsollError | web.RequestPayloadError):
            return
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where is not None else "?"
        self._tell(f"a request could not be answered: {type(error).__name__} at {place}; this is a fault of its own")


class _Reply(web.StreamResponse):
    """An answer that is on its way already: nothing is left for aiohttp to write."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keeps_alive = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection may carry another request."""
        return self._keeps_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing to do."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to do."""


class _Answer:
    """A request inside the server, and the connection on which its answer is written as its tokens come."""

    def __init__(
        self, shell: SimulatorShell, request: web.BaseRequest, asked: Asked, flight: Flight, fault: Fault | None
    ) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client went away before its request was read")
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.keeps_alive = request.keep_alive
        self.status: int | None = None
        """Of the answer, once its head is sent."""
        self._shell = shell
        self._transport = transport
        self._asked = asked
        self._flight = flight
        self._count = 0
        self._reasoning = shell.reasoning_tokens
        self._unsent: list[tuple[str, bool]] = []
        self._holds = False
        self._why: Finish | None = None
        """Why it ended, while it is held."""
        self._fault = fault
        self._strike = round(fault.option("after") or 0) if fault is not None and fault.name in _BREAKS else -1
        self._word = flight.id * 37
        self._opened = False
        """Whether the role chunk is out."""
        self._stream: Stream | None = None
        if asked.stream:
            self._stream = shell.dialect.stream(asked, shell.spec, flight.id, shell.server.t_ns)
            if shell.software is _Software.UVICORN:
                self._transport.write(self._open())

    def token(self) -> None:
        """One more token came out."""
        number = self._count
        self._count = number + 1
        stream = self._stream
        if stream is None:
            return
        if number == self._strike and not self._misbehave():
            return
        text = _WORDS[(self._word + number) % len(_WORDS)]
        reasoning = number < self._reasoning
        transport = self._transport
        if self._holds or transport.get_write_buffer_size() > _UNSENT_LIMIT_BYTES:
            self._unsent.append((text, reasoning))
            return
        if self._unsent or self.status is None or number == 0:
            self._unsent.append((text, reasoning))
            self._flush()
            return
        frame = stream.tokens((text,), reasoning=reasoning)
        transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))

    def end(self, why: Finish) -> None:
        """It left the server; its last token, if it has one, came out in the same step."""
        if why is Finish.KV_FULL:
            self._fail(Trouble.KV_FULL)
            return
        # It is over before the fault could strike: then it strikes now.
        if self._strike >= 0 and not self._misbehave():
            return
        if self._holds:
            self._why = why
            return
        self._finish(why)

    def die(self, trouble: Trouble) -> None:
        """The server died under it. What closes the connection is not this answer's concern."""
        if self._shell.software is not _Software.UVICORN or self._transport.is_closing():
            return
        if self._stream is not None and self.status is not None:
            self._transport.write(_chunk(self._stream.error(trouble)))
        elif self.status is None:
            page = self._shell.complain(trouble, self._asked.path)
            self._transport.write(_page_bytes(page, self._shell.software, keeps_alive=False))

    def _finish(self, why: Finish) -> None:
        flight, stream = self._flight, self._stream
        empty = self._fault is not None and self._fault.name == "empty_answer"
        usage = Usage(
            prompt_tokens=flight.prompt_tokens,
            completion_tokens=flight.generated * self._asked.choices,
            cached_tokens=flight.cached_tokens,
            prompt_seconds=_seconds_between(flight.t_admitted_ns, flight.t_first_ns),
            decode_seconds=_seconds_between(flight.t_first_ns, flight.t_last_ns),
        )
        shell = self._shell
        if stream is None:
            words = range(self._word, self._word + (0 if empty else flight.generated))
            text = "".join([_WORDS[number % len(_WORDS)] for number in words])
            page = shell.dialect.answer(self._asked, shell.spec, flight.id, shell.server.t_ns, text, why, usage)
            self._write_page(page)
            return
        last: tuple[str, ...] = ()
        if not empty:
            text = _WORDS[(self._word + self._count) % len(_WORDS)]
            if self._count < self._reasoning:
                self._unsent.append((text, True))
            else:
                last = (text,)
        self._flush()
        frames = stream.ending(why, usage, last)
        if self._fault is not None and self._fault.name == "no_terminator":
            frames = frames.removesuffix(_TERMINATOR)
        self._close_body(frames)

    def _fail(self, trouble: Trouble) -> None:
        """An error where the rest of the answer should be."""
        if self._stream is None or self.status is None:
            self._write_page(self._shell.complain(trouble, self._asked.path))
            return
        self._flush()
        self._close_body(self._stream.error(trouble))

    def _misbehave(self) -> bool:
        """What the fault does now; whether the answer goes on."""
        fault, shell, transport = self._fault, self._shell, self._transport
        assert fault is not None  # noqa: S101 - only then is there a strike
        self._strike = -1
        if fault.name == "stall":
            self._holds = True
            asyncio.get_running_loop().call_later(fault.value / shell.speed, self._release)
            return True
        if fault.name == "garbage_frame":
            if self._stream is None:
                self._write_page(Page(200, _GARBAGE, "application/json"))
                shell.forget(self._flight.id)
                return False
            self._flush()
            transport.write((b"" if self.status is not None else self._open()) + _chunk(_GARBAGE_FRAME))
            return True
        shell.forget(self._flight.id)
        if fault.name == "stream_error":
            if self._stream is not None and self.status is None:
                transport.write(self._open())
            self._fail(Trouble.INTERNAL)
        elif fault.name == "cut_reset":
            self._flush()
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        else:
            self.keeps_alive = False
            self._flush()
            if self._stream is not None and self.status is not None:
                # Politely: the body ends as it should, only the answer does not.
                transport.write(_LAST_CHUNK)
            transport.close()
        return False

    def _release(self) -> None:
        self._holds = False
        if self._transport.is_closing():
            return
        if self._why is not None:
            self._finish(self._why)
        else:
            self._flush()

    def _open(self) -> bytes:
        """The head of a stream; the role chunk comes with the first token."""
        stream, shell = self._stream, self._shell
        assert stream is not None  # noqa: S101 - only streams are opened
        self.status = stream.status
        shell.count(self._asked.path, stream.status)
        headers = [*stream.headers, ("Transfer-Encoding", "chunked")]
        return _head(stream.status, headers, stream.content_type, shell.software, keeps_alive=self.keeps_alive)

    def _flush(self) -> None:
        """Write what is unsent, after the head if that is unsent too."""
        stream = self._stream
        if stream is None or self._transport.is_closing() or not self._unsent:
            return
        parts = [self._open()] if self.status is None else []
        if not self._opened:
            self._opened = True
            parts.append(_chunk(stream.opening()))
        for reasoning in (True, False):
            texts = [text for text, thought in self._unsent if thought is reasoning]
            if texts:
                parts.append(_chunk(stream.tokens(texts, reasoning=reasoning)))
        self._unsent.clear()
        self._transport.write(b"".join(parts))

    def _close_body(self, frames: bytes) -> None:
        """The last frames, and the end of the body."""
        if not self._transport.is_closing():
            head = self._open() if self.status is None else b""
            if not self._opened and self._stream is not None:
                self._opened = True
                frames = self._stream.opening() + frames
            self._transport.write(head + _chunk(frames) + _LAST_CHUNK)
        self._settle()

    def _write_page(self, page: Page) -> None:
        self.status = page.status
        shell = self._shell
        shell.count(self._asked.path, page.status)
        self.keeps_alive = self.keeps_alive and not _closes(page.headers)
        if not self._transport.is_closing():
            self._transport.write(_page_bytes(page, shell.software, keeps_alive=self.keeps_alive))
        self._settle()

    def _settle(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


_LAST_CHUNK = b"0\r\n\r\n"
_TERMINATOR = b"data: [DONE]\n\n"
_GARBAGE = b'{"choices":[{"index":0,"mess'
_GARBAGE_FRAME = b'data: {"choices":[{"index":0,"del\xff\x00\n\n'


def _chunk(data: bytes) -> bytes:
    """One chunk of a body; nothing for no data, since an empty chunk ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _software(page: Page) -> _Software:
    servers = {value for name, value in page.headers if name.lower() == "server"}
    return _Software.UVICORN if "uvicorn" in servers else _Software.HTTPLIB


def _closes(headers: Sequence[tuple[str, str]]) -> bool:
    return any(name.lower() == "connection" and value.lower() == "close" for name, value in headers)


def _page_bytes(page: Page, software: _Software, *, keeps_alive: bool) -> bytes:
    headers = [*page.headers, ("Content-Length", str(len(page.body)))]
    return _head(page.status, headers, page.content_type, software, keeps_alive=keeps_alive) + page.body


def _head(
    status: int,
    headers: Sequence[tuple[str, str]],
    content_type: str,
    software: _Software,
    *,
    keeps_alive: bool,
) -> bytes:
    """Status line and headers as the engine's web server writes them."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    rows = list(headers)
    if content_type:
        rows.insert(-1, ("Content-Type", content_type))
    if not keeps_alive and not _closes(headers):
        rows = [*((name, value) for name, value in rows if name != "Keep-Alive"), ("Connection", "close")]
    if software is _Software.UVICORN:
        rows = [("date", formatdate(usegmt=True)), *((name.lower(), value) for name, value in rows)]
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in rows)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _json(status: int, document: Mapping[str, Any]) -> Page:
    return Page(status, json.dumps(document, allow_nan=False).encode(), "application/json")


def _close(request: web.BaseRequest) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.close()
    return _Reply(keep_alive=False)


def _is_local(remote: str | None) -> bool:
    try:
        address = ip_address((remote or "").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _seconds_between(start_ns: int | None, end_ns: int | None) -> float:
    return 0.0 if start_ns is None or end_ns is None else (end_ns - start_ns) / NS


def open_record(path: Path, mode: str, what: str) -> TextIO:
    """Open a file that is written to while the simulation goes on; its folder is made.

    Args:
        path: of the file.
        mode: `w` overwrites, `x` never does.
        what: it is, for people.

    Raises:
        ConfigError: it cannot be opened. What is written to it later raises `RecordError` when it cannot be kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _RecordFile(path, mode, what)
    except OSError as error:
        raise ConfigError(f"cannot write the {what} {path}: {error.strerror or error}") from error
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", newline="\n")


class _RecordFile(io.FileIO):
    """A file that says what it is when it is full."""

    def __init__(self, path: Path, mode: str, what: str) -> None:
        super().__init__(path, mode)
        self._told = f"cannot write the {what} {path}"

    def write(self, data: Any, /) -> int:
        """As it is for files.

        Raises:
            RecordError: the system cannot keep it.
        """
        try:
            return super().write(data)
        except OSError as error:
            raise RecordError(f"{self._told}: {error.strerror or error}; the simulation ends here") from error


def _hold(host: str, port: int) -> socket.socket:
    """Take the port for as long as the shell lives: bound and not listening, so that a server that is down refuses.

    Raises:
        ConfigError: it cannot be had.
    """
    holder: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            # Without SO_REUSEPORT, or a second simulator would silently share the port with the first.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            address = trial.getsockname()
        holder = socket.socket(family, kind, protocol)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except (OSError, UnicodeError) as error:
        if holder is not None:
            holder.close()
        reason = getattr(error, "strerror", None) or "this is no name of a host"
        other = "--port" if isinstance(error, OSError) and error.errno in _PORT_ERRORS else "--host"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another {other}") from None
    return holder


_PORT_ERRORS = frozenset({errno.EADDRINUSE, errno.EACCES})
