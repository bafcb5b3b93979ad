"""A scripted OpenAI-compatible server on loopback, for faults that no real engine commits on demand."""

import contextlib
import itertools
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(document) -> bytes:
    data = document if isinstance(document, bytes) else b"data: " + json.dumps(document).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def _delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "text": fields.get("content", ""), "finish_reason": finish}]}


DONE = b"data: [DONE]\n\n"
ERROR = {"error": {"message": "the engine is dead", "code": 500}}


class FakeServer:
    """Answers every request as `behaviour(number)` says, number counting from 0 over all connections."""

    def __init__(self) -> None:
        self.behaviour: Callable[[int], str] = lambda number: "ok"
        self.pause = threading.Event()
        """Streams wait for this after their first token in behaviour `paced`."""
        self.bodies: list[dict] = []
        self.headers: list[bytes] = []
        self.connections = 0
        self.active = self.peak = 0
        self.token_seconds = 0.0
        self.prompt_tokens: Callable[[str], int] = lambda text: 5 + 2 * len(text.split())
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        self.stopping.set()
        self.pause.set()
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in [self._accepting, *self._threads]:
            thread.join(5)

    def hang_up_idle(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rb") as reader:
            while self._one(connection, reader):
                pass

    def _one(self, connection, reader) -> bool:
        line = reader.readline()
        if not line:
            return False
        head = [line]
        while (line := reader.readline()) not in (b"\r\n", b""):
            head.append(line)
        length = next((int(one.split(b":")[1]) for one in head if one.lower().startswith(b"content-length")), 0)
        body = json.loads(reader.read(length)) if length else {}
        if head[0].startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + b'{"data":[]}')
            return True
        with self._lock:
            number = next(self._numbers)
            self.bodies.append(body)
            self.headers.append(b"".join(head))
            self.active += 1
            self.peak = max(self.peak, self.active)
        try:
            return self._answer(connection, self.behaviour(number), body)
        finally:
            with self._lock:
                self.active -= 1

    def _answer(self, connection, kind: str, body: dict) -> bool:
        send = connection.sendall
        text = body.get("prompt") or (body.get("messages") or [{}])[-1].get("content", "")
        wanted = body.get("max_tokens") or 3
        tokens = wanted - 1 if kind == "short" else wanted
        usage = {"prompt_tokens": self.prompt_tokens(text), "completion_tokens": tokens, "total_tokens": 0}
        if kind in {"500", "503", "401"}:
            message = json.dumps({"error": {"message": f"refused by script {kind}"}}).encode()
            send(b"HTTP/1.1 %s Nope\r\nContent-Length: %d\r\n\r\n" % (kind.encode(), len(message)) + message)
            return True
        if kind == "429":
            send(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            return True
        if kind == "echo key":
            message = head_key(self.headers[-1])
            send(b"HTTP/1.1 401 Nope\r\nContent-Length: %d\r\n\r\n" % len(message) + message)
            return True
        if not body.get("stream"):
            document = {
                "choices": [{"text": "x", "message": {"content": "x"}, "finish_reason": "length"}],
                "usage": usage,
            }
            if kind == "no usage":
                del document["usage"]
            data = json.dumps(document).encode()
            send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            return True
        if kind == "page":
            send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>")
            return True
        if kind in {"reset before", "close before", "silent"}:
            if kind == "silent":
                self.stopping.wait()
            self._hang_up(connection, reset=kind == "reset before")
            return False
        if kind == "late headers":
            self.stopping.wait(0.05)
        send(CHUNKED + _chunk(_delta(role="assistant", content="")))
        if kind in {"error only", "empty"}:
            send(_chunk(ERROR if kind == "error only" else _delta("stop")) + _chunk(DONE) + b"0\r\n\r\n")
            return True
        for index in range(tokens):
            if index and kind == "paced":
                self.pause.wait()
            elif index and self.token_seconds:
                self.stopping.wait(self.token_seconds)
            if index == 1 and kind in {"cut", "reset", "hang", "garbage", "error event"}:
                break
            send(_chunk(_delta(content=" a")))
        if kind == "hang":
            self.stopping.wait()
        if kind in {"cut", "reset", "hang"}:
            self._hang_up(connection, reset=kind == "reset")
            return False
        if kind == "garbage":
            send(_chunk(b'data: {"choices":[{"del\n\n'))
        if kind == "error event":
            send(_chunk(ERROR) + _chunk(DONE) + b"0\r\n\r\n")
            return True
        if kind == "clean cut":
            send(b"0\r\n\r\n")
            return True
        send(_chunk(_delta("length")) + (b"" if kind == "no usage" else _chunk({"choices": [], "usage": usage})))
        send((b"" if kind == "no done" else _chunk(DONE)) + (b"" if kind == "no end" else b"0\r\n\r\n"))
        if kind == "no end":
            self.stopping.wait()
        return kind != "close after"

    @staticmethod
    def _hang_up(connection, *, reset: bool) -> None:
        if reset:
            # With a linger time of zero the close that follows sends a reset instead of an orderly end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.shutdown(socket.SHUT_RDWR)


def head_key(head: bytes) -> bytes:
    line = next((one for one in head.split(b"\r\n") if one.lower().startswith(b"authorization")), b"")
    return b"bad key " + line.partition(b"Bearer ")[2]


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()
