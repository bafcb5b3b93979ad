"""What vLLM and SGLang have in common: both are FastAPI applications behind uvicorn that check requests with pydantic.

Requests are read here as such an application reads them, before the engine's own rules: JSON, required fields, types.
All faults of a body are found at once, as pydantic finds them; each engine words its own complaint about them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from serving.simulator.dialects.base import Page
from serving.stream import Api

__all__ = [
    "GENERATION_PATHS",
    "MOST_CHOICES",
    "Invalid",
    "RawRequest",
    "compact",
    "empty_page",
    "json_page",
    "method_not_allowed",
    "not_found",
    "read_body",
    "version_of",
    "wire_string",
]

GENERATION_PATHS: Mapping[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""JSON as both engines write it: no blanks, and text as it is."""

wire_string = json.JSONEncoder(ensure_ascii=False).encode
"""One string as JSON; quick, for frames are made of it."""

_JSON = "application/json"
_DEFAULT_COMPLETION_TOKENS = 16

MOST_CHOICES = 16_384
"""`n` of one request, at most, counting that of each of its prompts."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """One fault that pydantic finds in a body.

    Attributes:
        kind: pydantic's name for it.
        loc: where, dotted, beginning with `body`.
        message: in pydantic's words.
        given: what stood there.
        reason: of a JSON fault.
    """

    kind: str
    loc: str
    message: str
    given: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A body with all fields of the right type, before the engine has looked at their values.

    Attributes:
        model: as named; None when it is left out.
        text: the prompt with what the chat template adds: two words a message, and one to begin the answer.
        characters: length of the prompt as given.
        max_tokens: as asked; None when it is left out.
        max_tokens_field: under which name.
        n: choices asked for, for all prompts together.
        ignore_eos: generate all of them.
        stream: answer as a stream of events.
        stream_options: whether they were given.
        include_usage: send usage at the end of the stream.
    """

    model: str | None
    text: str
    characters: int
    max_tokens: int | None
    max_tokens_field: str
    n: int
    ignore_eos: bool
    stream: bool
    stream_options: bool
    include_usage: bool


@lru_cache
def version_of(release: str) -> tuple[int, ...]:
    """A release as numbers that can be compared; what follows the third is left out."""
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def json_page(document: Any, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> Page:
    """A page with one JSON document."""
    return Page(status, compact(document).encode("utf-8", "replace"), _JSON, tuple(headers))


def empty_page(status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> Page:
    """A page without a body, and so without a content type."""
    return Page(status, b"", "", tuple(headers))


def not_found(headers: Sequence[tuple[str, str]] = ()) -> Page:
    """What the framework says of a path that it does not have."""
    return json_page({"detail": "Not Found"}, 404, headers)


def method_not_allowed(allow: str, headers: Sequence[tuple[str, str]] = ()) -> Page:
    """What the framework says of a path that it has under another method."""
    return json_page({"detail": "Method Not Allowed"}, 405, (*headers, ("allow", allow)))


def read_body(api: Api, body: bytes) -> RawRequest | list[Invalid]:
    """Read a generation request's body; all its faults when it has any."""
    try:
        document = json.loads(body)
    except json.JSONDecodeError as fault:
        return [Invalid("json_invalid", f"body.{fault.pos}", "JSON decode error", "<dict of 0 items>", fault.msg)]
    except (ValueError, RecursionError):
        # Of text that is no UTF-8, nests too deeply, or has a number of thousands of digits.
        return [Invalid("json_invalid", "body.0", "JSON decode error", "<dict of 0 items>", "Expecting value")]
    if not isinstance(document, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        return [Invalid("model_attributes_type", "body", message, _gist(document))]
    return _Reader(document).read(api)


class _Reader:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._faults: list[Invalid] = []

    def read(self, api: Api) -> RawRequest | list[Invalid]:
        text, characters, prompts = self._chat() if api == "chat" else self._prompt()
        for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"):
            self._number(name)
        for name in ("min_tokens", "seed", "top_k"):
            self._integer(name)
        max_tokens, max_tokens_field = self._integer("max_tokens"), "max_tokens"
        if api == "chat":
            newer = self._integer("max_completion_tokens")
            if newer is not None:
                max_tokens, max_tokens_field = newer, "max_completion_tokens"
        elif max_tokens is None:
            max_tokens = _DEFAULT_COMPLETION_TOKENS
        n = self._integer("n")
        model = self._document.get("model")
        if model is not None and not isinstance(model, str):
            self._fault("string_type", "model", "Input should be a valid string", model)
        for name, string in (("messages" if api == "chat" else "prompt", text), ("model", model)):
            if isinstance(string, str) and not _is_text(string):
                message = "Input should be a valid string, unable to parse raw data as a unicode string"
                self._fault("string_unicode", name, message, "")
        ignore_eos, stream = self._flag("ignore_eos"), self._flag("stream")
        options = self._document.get("stream_options")
        if options is not None and not isinstance(options, dict):
            message = "Input should be a valid dictionary or instance of StreamOptions"
            self._fault("model_type", "stream_options", message, options)
        if self._faults:
            return self._faults
        return RawRequest(
            model=model,
            text=text,
            characters=characters,
            max_tokens=max_tokens,
            max_tokens_field=max_tokens_field,
            n=(1 if n is None else n) * prompts,
            ignore_eos=ignore_eos,
            stream=stream,
            stream_options=bool(options),
            include_usage=stream and isinstance(options, dict) and bool(options.get("include_usage")),
        )

    def _chat(self) -> tuple[str, int, int]:
        messages = self._required("messages")
        if messages is None:
            return "", 0, 1
        if not isinstance(messages, list):
            self._fault("list_type", "messages", "Input should be a valid list", messages)
            return "", 0, 1
        parts = []
        characters = 0
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                self._fault("missing", f"messages.{index}.role", "Field required", message)
                continue
            content = _content(message.get("content"))
            characters += len(content)
            parts.append(f"<|{message['role']}|> {content} <|end|>")
        return " ".join([*parts, "<|assistant|>"]), characters, 1

    def _prompt(self) -> tuple[str, int, int]:
        """The prompt; of several only the first, since all run alike."""
        prompt = self._required("prompt")
        prompts = 1
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompts, prompt = len(prompt), prompt[0]
        if isinstance(prompt, list):
            # Already token ids: one word each, so that they are counted as they are.
            return " ".join(map(str, prompt)), 0, prompts
        if prompt is not None and not isinstance(prompt, str):
            self._fault("string_type", "prompt", "Input should be a valid string", prompt)
        text = prompt if isinstance(prompt, str) else ""
        return text, len(text), prompts

    def _required(self, name: str) -> Any:
        value = self._document.get(name)
        if value is None:
            self._fault("missing", name, "Field required", self._document)
        return value

    def _number(self, name: str) -> None:
        value = self._document.get(name)
        if value is None or isinstance(value, int | float):
            return
        if not isinstance(value, str):
            self._fault("float_type", name, "Input should be a valid number", value)
            return
        try:
            float(value)
        except ValueError:
            message = "Input should be a valid number, unable to parse string as a number"
            self._fault("float_parsing", name, message, value)

    def _integer(self, name: str) -> int | None:
        value = self._document.get(name)
        if value is None:
            return None
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            if value.is_integer():
                return int(value)
            message = "Input should be a valid integer, got a number with a fractional part"
            self._fault("int_from_float", name, message, value)
        elif isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                message = "Input should be a valid integer, unable to parse string as an integer"
                self._fault("int_parsing", name, message, value)
        else:
            self._fault("int_type", name, "Input should be a valid integer", value)
        return None

    def _flag(self, name: str) -> bool:
        value = self._document.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        if value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in _FLAGS:
            return _FLAGS[value.lower()]
        self._fault("bool_type", name, "Input should be a valid boolean", value)
        return False

    def _fault(self, kind: str, name: str, message: str, given: Any) -> None:
        self._faults.append(Invalid(kind, f"body.{name}", message, _gist(given)))


_FLAGS = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True)
_FLAGS |= dict.fromkeys(("0", "false", "f", "no", "n", "off"), False)
"""Words that pydantic takes for a flag."""


def _is_text(string: str) -> bool:
    """Whether it can be written as UTF-8: JSON can name halves of characters that cannot."""
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


def _gist(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)[:200]


def _content(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return " ".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
