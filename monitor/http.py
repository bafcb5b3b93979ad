"""The asyncio transport of `serving.conversation`, and what makes a typed URL a base URL.

A network failure is an `HttpAnswer` with `error` set, never an exception: whoever asked decides what silence means.
"""

import ipaddress
import os
import ssl
import time
from dataclasses import dataclass
from errno import ECONNREFUSED
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from serving.conversation import Conversation, HttpAnswer, HttpRequest
from serving.errors import ConfigError

__all__ = ["API_KEY_VARIABLE", "MAX_BODY_BYTES", "BaseUrl", "converse", "open_session", "parse_url"]

API_KEY_VARIABLE = "PLIMSOLL_API_KEY"
MAX_BODY_BYTES = 16 * 1024 * 1024
"""Larger than any metrics page that can be read every second, small enough for a wrong address (a model file, an
endless stream) to cost nothing."""

T = TypeVar("T")

_SECRET_BYTES = 6


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """Where a server is. `text` has scheme, host, port if given, path prefix, and no trailing slash."""

    text: str
    host: str
    port: int
    notes: tuple[str, ...] = ()
    """What was changed in what the user typed, for people."""

    @property
    def is_loopback(self) -> bool:
        """Whether the server runs on this host by its address: its processes can then be found in /proc."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost" or self.host.endswith(".localhost")


def parse_url(text: str) -> BaseUrl:
    """Read the address of a server as people type it.

    A missing scheme becomes `http://`; a path of the OpenAI API (`/v1` and what follows) or of the metrics page is cut
    off with a note; a path before it stays, as servers behind a gateway have one.

    Raises:
        ConfigError: no host, a scheme other than http and https, a port out of range, or a user name, password, query
            or fragment, which Plimsoll would silently lose or print.
    """
    typed = text.strip()
    notes: list[str] = []
    if "@" in typed:  # before any message that could repeat a part of a password
        raise ConfigError(
            f"the URL contains a user name or password (an @); put the key into {API_KEY_VARIABLE} instead"
        )
    shown = repr(text[:120])
    if "://" not in typed:
        typed = f"http://{typed}"
        notes.append("no scheme given: http:// assumed")
    try:
        parts = urlsplit(typed)
        port = parts.port
        host = parts.hostname or ""
        host.encode("idna")
    except ValueError as error:  # UnicodeError of the host name is one
        raise ConfigError(f"{shown} is not a URL ({error}); write it like http://127.0.0.1:8000") from None
    if parts.scheme not in {"http", "https"}:
        raise ConfigError(f"scheme {parts.scheme}:// of {shown} is not supported; use http:// or https://")
    if not host or any(c.isspace() or not c.isprintable() for c in typed):
        raise ConfigError(f"{shown} names no host; write a URL like http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise ConfigError(f"{shown} has a query or fragment; give the server's base URL alone")
    if port == 0:
        raise ConfigError(f"port 0 of {shown} cannot be connected to; give the port on which the server listens")

    path = parts.path.rstrip("/")
    kept = f"{path}/".partition("/v1/")[0].rstrip("/").removesuffix("/metrics")
    if kept != path:
        notes.append(f"{path.removeprefix(kept)} cut off: the base URL of the server is meant")
    netloc = f"[{host}]" if ":" in host else host
    if port is not None:
        netloc += f":{port}"
    default_port = 443 if parts.scheme == "https" else 80
    return BaseUrl(f"{parts.scheme}://{netloc}{kept}", host, port or default_port, tuple(notes))


def open_session(*, authorized: bool = True) -> aiohttp.ClientSession:
    """A session for one server; call inside a running event loop, and close it with `async with`.

    Args:
        authorized: send the API key of PLIMSOLL_API_KEY, if set, as a bearer token. False for every server that is not
            the target: a GPU exporter must not be told the target's key.

    Raises:
        ConfigError: the key cannot be sent in a header.
    """
    # identity: a server under test should not spend its time on compressing what is read every second.
    headers = {"User-Agent": "plimsoll", "Accept-Encoding": "identity"}
    key = os.environ.get(API_KEY_VARIABLE, "").strip() if authorized else ""
    if key:
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{API_KEY_VARIABLE} contains a character that no HTTP header can carry; set it again")
        headers["Authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(headers=headers, cookie_jar=aiohttp.DummyCookieJar())


async def converse(session: aiohttp.ClientSession, base_url: str, conversation: Conversation[T]) -> T:
    """Run a conversation with the server at `base_url`; returns its result and raises only what it raises itself."""
    try:
        request = next(conversation)
        while True:
            request = conversation.send(await _ask(session, base_url, request))
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        conversation.close()


async def _ask(session: aiohttp.ClientSession, base_url: str, request: HttpRequest) -> HttpAnswer:
    started_s = time.monotonic()
    try:
        async with session.request(
            "GET" if request.json_body is None else "POST",
            base_url.rstrip("/") + request.path,
            json=request.json_body,
            timeout=aiohttp.ClientTimeout(total=request.timeout_s),
            max_redirects=3,
        ) as response:
            body = await _read_capped(response)
            if body is not None:
                body = _redact(session, body)
            headers = {name.lower(): value for name, value in response.headers.items()}
            seconds = time.monotonic() - started_s
            if body is None:
                limit = f"the answer to {request.path} is larger than {MAX_BODY_BYTES // 2**20} MiB"
                return HttpAnswer(0, seconds=seconds, error=limit)
            return HttpAnswer(response.status, headers, body, seconds)
    # ValueError and RuntimeError: an address that only the resolver or the connector finds unusable.
    except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
        return HttpAnswer(0, seconds=time.monotonic() - started_s, error=_reason(error))


def _redact(session: aiohttp.ClientSession, body: bytes) -> bytes:
    """The body without our key, should a server repeat it: what is quoted from an answer must never show it."""
    key = session.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    # A shorter one is no secret, and in the middle of many words and figures.
    return body.replace(key, b"***") if len(key) >= _SECRET_BYTES and key in body else body


async def _read_capped(response: aiohttp.ClientResponse) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(65536):
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _reason(error: Exception) -> str:
    """The word of `HttpAnswer.error` for an exception of the transport."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "dns"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "tls"
    if isinstance(error, OSError) and error.errno == ECONNREFUSED:
        return "refused"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the server closed the connection in the middle of its answer"
    if isinstance(error, aiohttp.TooManyRedirects):
        return "the server redirects in a circle"
    if isinstance(error, aiohttp.RedirectClientError):
        return f"the server redirects to {str(error)[:200]}, which cannot be followed"
    return str(error)[:300] or type(error).__name__
