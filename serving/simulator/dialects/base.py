"""What a dialect must be able to say: the outside of one engine, as its clients, scrapers and log readers meet it.

A dialect is pure. It reads a request body as the engine would, renders pages from a `Snapshot`, frames of a stream,
errors, and the start-up log. Which release it imitates is in `ServerSpec.release`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from serving.simulator.spec import Finish, ServerSpec, Snapshot
from serving.stream import Api

__all__ = [
    "Asked",
    "Dialect",
    "LogLine",
    "Page",
    "StartFailure",
    "Stream",
    "StreamHead",
    "Trouble",
    "Usage",
    "tokenise",
]


@dataclass(frozen=True, slots=True)
class Page:
    """One whole HTTP answer. Header names as the engine spells them; `Content-Length` is for the transport to add."""

    status: int
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A generation request, read and found valid.

    Attributes:
        api: which of the two forms.
        path: as requested.
        prompt_tokens: length of the prompt with what the chat template adds.
        prefix: one hash for each full block of the prompt (see `tokenise`).
        output_tokens: tokens to generate: what was asked for, cut at the context as the engine cuts.
        ignore_eos: generate all of them.
        stream: answer as a stream of events.
        include_usage: send usage at the end of the stream.
        choices: `n`, at least 1.
    """

    api: Api
    path: str
    prompt_tokens: int
    prefix: tuple[int, ...]
    output_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, and the engine's own timings for those that send them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


class Trouble(StrEnum):
    """What can be wrong with a request or with the server, each told by every engine in its own words."""

    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BAD_JSON = "bad_json"
    MISSING_MESSAGES = "missing_messages"
    BAD_FIELD = "bad_field"
    UNKNOWN_MODEL = "unknown_model"
    BAD_MAX_TOKENS = "bad_max_tokens"
    PROMPT_TOO_LONG = "prompt_too_long"
    NO_KEY = "no_key"
    LOADING = "loading"
    OVERLOADED = "overloaded"
    """Too many requests wait: 503, or 429 where asked."""
    TOO_MANY = "too_many"
    INTERNAL = "internal"
    KV_FULL = "kv_full"
    OUT_OF_MEMORY = "out_of_memory"
    ENGINE_DEAD = "engine_dead"


class StartFailure(StrEnum):
    """Why a start did not end in a server, for the start-up log."""

    WEIGHTS_MISSING = "weights_missing"
    WEIGHTS_OUT_OF_MEMORY = "weights_out_of_memory"
    NO_KV_CACHE = "no_kv_cache"
    KV_BELOW_ONE_REQUEST = "kv_below_one_request"
    WARMUP_OUT_OF_MEMORY = "warmup_out_of_memory"


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the server's log, `seconds` after its launch."""

    seconds: float
    text: str


class Stream(Protocol):
    """The frames of one streamed answer, in the order in which they are asked for. Bytes are the HTTP body's."""

    status: int
    content_type: str
    headers: tuple[tuple[str, str], ...]

    def opening(self) -> bytes:
        """What is sent before the first token: the role chunk, where the engine has one; may be empty."""
        ...

    def tokens(self, texts: Sequence[str], *, reasoning: bool = False) -> bytes:
        """One frame with these tokens' text."""
        ...

    def ending(self, finish: Finish, usage: Usage, last_texts: Sequence[str] = ()) -> bytes:
        """Finish chunk (with the last tokens' text where the engine puts both into one), usage chunk, terminator."""
        ...

    def error(self, trouble: Trouble, message: str | None = None) -> bytes:
        """An error event inside the stream, and what follows it."""
        ...


@dataclass(frozen=True, slots=True)
class StreamHead:
    """Status line and headers of a stream; a base for dialects' streams."""

    status: int = 200
    content_type: str = "text/event-stream"
    headers: tuple[tuple[str, str], ...] = field(default=())


class Dialect(Protocol):
    """One engine's way to speak."""

    name: str
    releases: Sequence[str]
    """Releases it can imitate, newest first."""
    edges: Mapping[str, tuple[float, ...]]
    """Histogram edges without infinity, by canonical signal; empty where the engine has no histograms."""

    def read_request(self, path: str, body: bytes, spec: ServerSpec) -> Asked | Page:
        """A generation request, or the engine's complaint about it."""
        ...

    def page(self, path: str, spec: ServerSpec, snapshot: Snapshot) -> Page | None:
        """Answer to a GET of any path but the metrics; None where the engine has no such path."""
        ...

    def post(self, path: str, body: bytes, spec: ServerSpec) -> Page | None:
        """Answer to a POST that generates nothing (tokenise); None where the engine has no such path."""
        ...

    def asks_key(self, path: str) -> bool:
        """Whether a server that was started with an API key asks for it there."""
        ...

    def metrics(self, spec: ServerSpec, snapshot: Snapshot, *, renamed: bool = False) -> Page:
        """The metrics page. `renamed`: as after an upgrade that renamed families without notice."""
        ...

    def figures(self, spec: ServerSpec, snapshot: Snapshot, capacity_tokens: int | None = None) -> dict[str, float]:
        """What `serving.engines` reads from the metrics page and its side page, without the page: signals that move.

        Args:
            spec: the server.
            snapshot: what can be seen of it.
            capacity_tokens: what the reader takes the KV cache to hold, where it needs to be told.
        """
        ...

    def stream(self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int) -> Stream:
        """The frames of a streamed answer."""
        ...

    def answer(
        self, asked: Asked, spec: ServerSpec, request_id: int, t_ns: int, text: str, finish: Finish, usage: Usage
    ) -> Page:
        """An answer that is not streamed."""
        ...

    def complaint(self, trouble: Trouble, spec: ServerSpec, detail: Mapping[str, int | str] | None = None) -> Page:
        """An error answer. `detail` may have `prompt_tokens`, `asked`, `model`, `path`, `allow`, `message`."""
        ...

    def startup_log(self, spec: ServerSpec, t_ns: int, failure: StartFailure | None = None) -> list[LogLine]:
        """The log from launch to readiness (or to the failure), clamps included."""
        ...

    def death_log(self, trouble: Trouble, spec: ServerSpec, t_ns: int) -> list[LogLine]:
        """What it logs when it dies at run time; seconds count from the death."""
        ...


def tokenise(text: str, block_tokens: int, seed: int = 0) -> tuple[int, tuple[int, ...]]:
    """Number of tokens in a text, and one chained hash for each full block.

    A token is a word: real tokenisers give 1.0 to 1.5 tokens a word, and a client that calibrates finds out which.
    """
    words = text.split()
    hashes: list[int] = []
    state = seed.to_bytes(8)
    for start in range(0, len(words) - block_tokens + 1, block_tokens):
        state = hashlib.blake2b(
            " ".join(words[start : start + block_tokens]).encode("utf-8", "replace"), digest_size=8, key=state
        ).digest()
        hashes.append(int.from_bytes(state))
    return len(words), tuple(hashes)
