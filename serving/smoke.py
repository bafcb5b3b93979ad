"""The smallest request that proves a server generates: a handful of tokens, not streamed.

Needs no knowledge of the engine: it speaks what all of them share.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.conversation import Conversation, HttpAnswer, HttpRequest
from serving.stream import Api

__all__ = ["Reach", "SmokeResult", "ask", "judge_reach", "smoke"]

_MAX_TOKENS = 8
_PROMPT = "Say hello."
_MESSAGE_LIMIT = 300


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """What came of the smallest request. The text itself is not kept.

    Attributes:
        answered: HTTP 200 with a body that can be read.
        generated: the answer held text, and usage counted at least one token.
        api: `chat` or `completions`, whichever gave this result.
        prompt_tokens: from usage, or None.
        completion_tokens: from usage, or None.
        seconds: request to last byte, of the request that gave this result.
        reason: why it did not generate, for people; None when it did.
        model: the name by which the answer calls its model, where that is another than was asked for.
    """

    answered: bool
    generated: bool
    api: Api
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    reason: str | None = None
    model: str | None = None


def smoke(model: str, *, timeout_s: float = 120.0) -> Conversation[SmokeResult]:
    """Ask `model` for at most eight tokens, over chat, or over completions where there is no chat.

    Never raises: that the server cannot generate is the result.
    """
    return (yield from ask(model, _PROMPT, _MAX_TOKENS, timeout_s=timeout_s))


def ask(
    model: str, prompt: str, max_tokens: int, *, ignore_eos: bool = False, timeout_s: float = 120.0
) -> Conversation[SmokeResult]:
    """One request that is not streamed, over chat, or over completions where there is no chat.

    Args:
        model: the name to ask for.
        prompt: what to say.
        max_tokens: tokens to generate at most.
        ignore_eos: generate all of them, for engines that know this field.
        timeout_s: for each attempt.
    """
    shared: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": False}
    if ignore_eos:
        shared["ignore_eos"] = True
    chat = {**shared, "messages": [{"role": "user", "content": prompt}]}
    answer = yield HttpRequest("/v1/chat/completions", chat, timeout_s)
    if not _chat_is_missing(answer):
        return _judge(answer, "chat", model)
    answer = yield HttpRequest("/v1/completions", {**shared, "prompt": prompt}, timeout_s)
    return _judge(answer, "completions", model)


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether an answer came out of the model of the server whose metrics are read, and by which sign.

    `reached` is None where there is no sign to go by.
    """

    reached: bool | None
    sign: str


_SIGNS = ("generation_tokens_total", "requests_finished_total", "engine_progress_total", "prompt_tokens_total")
"""Counters that an answer must have moved, the most telling first."""
_MOVED_BYTES = 4 * 2**20


def judge_reach(
    before: Mapping[str, float],
    after: Mapping[str, float],
    memory_moved_bytes: float | None,
    *,
    is_preallocated: bool,
    others_ran: bool = False,
    restart: str | None = None,
) -> Reach:
    """Whether one answered request reached the model.

    Args:
        before: the engine's counters just before the request, canonical names.
        after: the same after it.
        memory_moved_bytes: how far memory rose during the request; None where memory cannot be seen.
        is_preallocated: the engine takes memory for the KV cache at its start, so that none need move.
        others_ran: other requests ran on the server at that time, and may have moved what moved.
        restart: why the server is known to have been restarted meanwhile.
    """
    exempt = "memory need not move: the engine takes it for the KV cache at its start"
    told = [name for name in _SIGNS if name in before and name in after]
    fell = next((name for name in told if after[name] < before[name]), None)
    if restart is not None or fell is not None:
        why = restart or f"{fell} fell from {before[fell or '']:g} to {after[fell or '']:g}"
        return Reach(reached=False, sign=f"the server was restarted meanwhile, or its metrics are of several: {why}")
    moved = next((name for name in told if after[name] > before[name]), None)
    if moved is not None and others_ran:
        sign = f"{moved} grew by {after[moved] - before[moved]:g}, but other requests ran too and may have moved it"
        return Reach(reached=None, sign=sign)
    if moved is not None:
        sign = f"{moved} grew by {after[moved] - before[moved]:g}"
        return Reach(reached=True, sign=f"{sign}; {exempt}" if is_preallocated else sign)
    if memory_moved_bytes is not None and memory_moved_bytes >= _MOVED_BYTES and not others_ran:
        return Reach(reached=True, sign=f"memory rose by {memory_moved_bytes / 2**20:.0f} MiB during the request")
    if told:
        return Reach(
            reached=False,
            sign=f"the answer came, but {told[0]} of this server stood still: a gateway, a cache or another replica "
            "answered; give the URL of the engine itself",
        )
    if memory_moved_bytes is not None and not is_preallocated:
        return Reach(
            reached=False,
            sign=f"the engine tells no counters, and memory rose by only {memory_moved_bytes / 2**20:.1f} MiB",
        )
    return Reach(reached=None, sign=f"the engine tells no counters; {exempt}" if is_preallocated else "no sign is seen")


_NO_TEMPLATE = re.compile(r"chat[ _]template", re.IGNORECASE)
_NO_MODEL = re.compile(r"model.{0,300}(?:does not exist|not found|not available|unknown)|unknown model", re.IGNORECASE)


def _chat_is_missing(answer: HttpAnswer) -> bool:
    if answer.status in (404, 405, 501):
        # A 404 may also mean the model, and then the other path would say the same.
        return _NO_MODEL.search(_message(answer)) is None
    return answer.status in (400, 422) and _NO_TEMPLATE.search(_message(answer)) is not None


def _judge(answer: HttpAnswer, api: Api, model: str) -> SmokeResult:
    def failed(reason: str, *, answered: bool = False) -> SmokeResult:
        return SmokeResult(
            answered=answered,
            generated=False,
            api=api,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            seconds=answer.seconds,
            reason=reason,
        )

    prompt_tokens = completion_tokens = None
    if answer.error is not None:
        return failed(f"no answer: {answer.error[:_MESSAGE_LIMIT]}")
    if answer.status in (401, 403):
        return failed(f"HTTP {answer.status}: set PLIMSOLL_API_KEY to a key that the target accepts")
    if answer.status != 200:
        message = _message(answer)
        if answer.status in (400, 404) and _NO_MODEL.search(message):
            return failed(f"the target does not serve the model {model!r}: {message}")
        return failed(f"HTTP {answer.status}: {message}")
    page = answer.json()
    if not isinstance(page, dict):
        # The body may hold generated text, which is not ours to keep.
        kind = answer.headers.get("content-type", "no content type")[:100]
        return failed(f"HTTP 200, but the body is not a JSON object ({kind})")
    if page.get("error") or page.get("object") == "error":
        return failed(f"HTTP 200, but an error inside: {_message(answer)}")
    usage = page.get("usage")
    if isinstance(usage, dict):
        prompt_tokens, completion_tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if not _has_text(page):
        return failed("the answer holds no text, or only white space", answered=True)
    if not completion_tokens:
        return failed("the answer holds text, but usage counts no completion tokens", answered=True)
    return SmokeResult(
        answered=True,
        generated=True,
        api=api,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        seconds=answer.seconds,
        model=_other_name(page.get("model"), model),
    )


def _other_name(named: Any, asked: str) -> str | None:
    """As the answer names its model, cut; engines may answer with a path, gateways with what they took instead."""
    return named[:_MESSAGE_LIMIT] if isinstance(named, str) and named and named != asked else None


def _has_text(page: dict[str, Any]) -> bool:
    choices = page.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return False
    message = choice.get("message")
    # A reasoning model may spend all eight tokens thinking.
    fields = ("content", "reasoning_content", "reasoning")
    texts = [message.get(name) for name in fields] if isinstance(message, dict) else [choice.get("text")]
    return any(isinstance(text, str) and text.strip() for text in texts)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _message(answer: HttpAnswer) -> str:
    """The server's own words, cut."""
    page = answer.json() if len(answer.body) < 1_000_000 else None
    if isinstance(page, dict):
        error = page.get("error", page.get("detail", page.get("message")))
        message = error.get("message", error) if isinstance(error, dict) else error
        if message is not None:
            return (message if isinstance(message, str) else json.dumps(message))[:_MESSAGE_LIMIT]
    text = " ".join(answer.body[: 4 * _MESSAGE_LIMIT].decode("utf-8", "replace").split())
    return text[:_MESSAGE_LIMIT] or "an empty body"
