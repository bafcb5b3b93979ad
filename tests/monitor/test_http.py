import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from monitor import http
from monitor.http import BaseUrl, converse, open_session, parse_url
from serving.conversation import Conversation, HttpAnswer, HttpRequest
from serving.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "base_url", "notes"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", 0),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", 0),
        (" localhost:8000\n", "http://localhost:8000", 1),
        ("http://h:8000/v1", "http://h:8000", 1),
        ("http://h:8000/v1/", "http://h:8000", 1),
        ("http://h/metrics", "http://h", 1),
        ("h/v1/chat/completions", "http://h", 2),
        ("https://gateway.example/team-a/v1", "https://gateway.example/team-a", 1),
        ("https://gateway.example/team-a", "https://gateway.example/team-a", 0),
        ("http://h/v1beta", "http://h/v1beta", 0),
        ("[::1]:8000", "http://[::1]:8000", 1),
        ("HTTP://Host:80", "http://host:80", 0),
    ],
)
def test_a_typed_address_becomes_a_base_url(typed: str, base_url: str, notes: int) -> None:
    parsed = parse_url(typed)
    assert parsed.text == base_url
    assert len(parsed.notes) == notes
    assert parse_url(parsed.text) == BaseUrl(parsed.text, parsed.host, parsed.port)


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ("", "no host"),
        ("http://", "no host"),
        ("http://a b:80", "no host"),
        ("ftp://h", "scheme ftp://"),
        ("unix:///tmp/socket", "scheme unix://"),
        ("http://h:99999", "not a URL"),
        ("h:port", "not a URL"),
        ("http://h:0", "port 0"),
        ("http://a..b", "not a URL"),
        ("http://h/?model=x", "query"),
    ],
)
def test_an_address_that_cannot_be_meant_says_what_is_wrong(typed: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_url(typed)


@pytest.mark.parametrize(
    "typed", ["http://user:hunter2@h", "user:hunter2@h:80", "http://user:hunter2/3@h", "hunter2@h"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(typed)
    assert "hunter2" not in str(caught.value)
    assert "PLIMSOLL_API_KEY" in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "loopback"),
    [("localhost", True), ("127.0.0.2:1", True), ("[::1]:1", True), ("10.0.0.1", False), ("host.example", False)],
)
def test_loopback_is_told_from_the_address(typed: str, loopback: bool) -> None:
    assert parse_url(typed).is_loopback is loopback


def test_default_ports_are_those_of_the_scheme() -> None:
    assert parse_url("https://h").port == 443
    assert parse_url("http://h").port == 80


def one(request: HttpRequest) -> Conversation[HttpAnswer]:
    answer = yield request
    return answer


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw(answer: bytes | None) -> AsyncIterator[str]:
    """A TCP server that sends these bytes after the request and closes; None: never answers."""

    talks: set[asyncio.Task[None]] = set()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.current_task())  # type: ignore[arg-type]
        await reader.read(1)
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*talks, return_exceptions=True)


async def ask(base_url: str, request: HttpRequest | None = None) -> HttpAnswer:
    async with open_session() as session:
        return await converse(session, base_url, one(request or HttpRequest("/x")))


async def test_a_conversation_gets_each_answer_and_returns_its_result() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"method": request.method, "path": request.path, "body": await request.text()})

    def two() -> Conversation[list[object]]:
        first = yield HttpRequest("/a/b")
        second = yield HttpRequest("/c", json_body={"n": 1})
        return [first.json(), second.json(), first.headers["content-type"], first.error, first.seconds > 0]

    async with served(echo) as base_url, open_session() as session:
        result = await converse(session, f"{base_url}/prefix/", two())
    assert result == [
        {"method": "GET", "path": "/prefix/a/b", "body": ""},
        {"method": "POST", "path": "/prefix/c", "body": '{"n": 1}'},
        "application/json; charset=utf-8",
        None,
        True,
    ]


async def test_an_http_error_is_an_answer_and_not_an_exception() -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.Response(status=503, text="Loading model")

    async with served(busy) as base_url:
        answer = await ask(base_url)
    assert (answer.status, answer.text(), answer.error) == (503, "Loading model", None)


async def test_the_error_of_a_conversation_passes_through() -> None:
    def fails() -> Conversation[None]:
        yield HttpRequest("/")
        raise ConfigError("mine")

    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as base_url, open_session() as session:
        with pytest.raises(ConfigError, match="mine"):
            await converse(session, base_url, fails())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_closed_port_reads_refused(host: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        answer = await ask(f"http://{host}:{reserved.getsockname()[1]}")
    assert (answer.status, answer.error) == (0, "refused")


async def test_a_silent_server_reads_timeout() -> None:
    async with raw(None) as base_url:
        answer = await ask(base_url, HttpRequest("/", timeout_s=0.02))
    assert (answer.status, answer.error) == (0, "timeout")


async def test_an_unknown_name_reads_dns() -> None:
    assert (await ask("http://no-such-host.invalid:1")).error == "dns"


async def test_https_to_a_plain_port_reads_tls() -> None:
    async with raw(b"HTTP/1.1 400 Bad Request\r\n\r\n") as base_url:
        answer = await ask(base_url.replace("http://", "https://"))
    assert answer.error == "tls"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "in the middle of its answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "."),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "circle"),
        (b"HTTP/1.1 302 Found\r\nLocation: ftp://h/\r\nContent-Length: 0\r\n\r\n", "redirects to ftp://h/"),
    ],
)
async def test_a_broken_answer_has_a_reason(sent: bytes, error: str) -> None:
    async with raw(sent) as base_url:
        answer = await ask(base_url)
    assert answer.status == 0
    assert error in str(answer.error)


@pytest.mark.parametrize("base_url", ["http://a..b", f"http://{'x' * 70}.example", "http://h:99999"])
async def test_a_base_url_that_nobody_parsed_still_raises_nothing(base_url: str) -> None:
    assert (await ask(base_url)).error


async def test_an_answer_over_the_cap_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 2**20)

    async def flood(request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(2**20 + int(request.path[1:])))

    async with served(flood) as base_url:
        fits, over = await ask(base_url, HttpRequest("/0")), await ask(base_url, HttpRequest("/1"))
    assert len(fits.body) == 2**20
    assert (over.status, over.body) == (0, b"")
    assert over.error == "the answer to /1 is larger than 1 MiB"


async def test_the_api_key_goes_to_the_target_and_to_no_one_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reveal(request: web.Request) -> web.Response:
        sent = request.headers.get("Authorization", "none")
        return web.Response(text=f"{sent} {sent[::-1]}" if sent != "none" else "none")

    monkeypatch.setenv("PLIMSOLL_API_KEY", " sk-test \n")
    async with served(reveal) as base_url:
        # It arrived (backwards it is not recognised), and a server that repeats it is not quoted with it.
        assert (await ask(base_url)).text() == f"Bearer *** {'Bearer sk-test'[::-1]}"
        async with open_session(authorized=False) as session:
            assert (await converse(session, base_url, one(HttpRequest("/")))).text() == "none"
        monkeypatch.delenv("PLIMSOLL_API_KEY")
        assert (await ask(base_url)).text() == "none"


async def test_a_key_too_short_to_be_a_secret_leaves_answers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reveal(_: web.Request) -> web.Response:
        return web.json_response({"token": "k", "usage": 1})

    monkeypatch.setenv("PLIMSOLL_API_KEY", "k")
    async with served(reveal) as base_url:
        assert (await ask(base_url)).json() == {"token": "k", "usage": 1}


async def test_a_key_that_no_header_carries_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_API_KEY", "sk-secret\nX-Evil: 1")
    with pytest.raises(ConfigError) as caught:
        open_session()
    assert "secret" not in str(caught.value)
