"""Sans-io HTTP exchanges: what to ask a server and what to make of the answer, without a transport.

A conversation is a generator that yields `HttpRequest`s, is sent one `HttpAnswer` for each, and returns its result.
The same conversation runs over asyncio in `monitor.http` and over gevent in `loadgen.client`; tests feed it recorded
answers.
"""

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

__all__ = ["Conversation", "HttpAnswer", "HttpRequest", "converse"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request relative to the target's base URL. `json_body` makes it a POST."""

    path: str
    json_body: Mapping[str, Any] | None = None
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back, or why nothing did.

    `error` is set exactly when no HTTP answer arrived: `refused`, `timeout`, `dns`, `tls`, or the system's message;
    status is then 0. Header names are lower case.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    error: str | None = None

    def json(self) -> Any:
        """The body as JSON, or None when it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def text(self) -> str:
        """The body as text; undecodable bytes are replaced."""
        return self.body.decode("utf-8", "replace")


Conversation: TypeAlias = Generator[HttpRequest, HttpAnswer, T]


def converse(conversation: Conversation[T], answer: Callable[[HttpRequest], HttpAnswer]) -> T:
    """Run a conversation over a blocking transport: gevent's looks blocking, a table of recorded answers is."""
    try:
        request = next(conversation)
        while True:
            request = conversation.send(answer(request))
    except StopIteration as stop:
        result: T = stop.value
        return result
