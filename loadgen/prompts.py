"""Prompts of a wanted length in tokens, without a tokenizer and without a network of model files.

Text is made of one short list of plain English words. Every word occurs equally often, up to one partial round, so the
tokens of a prompt grow linearly with its words whatever the tokenizer; two numbers, measured on the server's own
`usage.prompt_tokens`, turn wanted tokens into words.

Each prompt begins with a nonce written in the same words, so no two share a prefix that a prefix cache could reuse.
"""

import random
from dataclasses import dataclass
from typing import Any, Final

from serving.conversation import Conversation, HttpRequest
from serving.errors import TargetError
from serving.stream import Api, message_of

__all__ = ["NONCE_WORDS", "WORDS", "Calibration", "calibrate", "make_prompt", "nonce_of", "question"]

WORDS: Final[tuple[str, ...]] = tuple(
    """
    about after again answer book change city day earth every example family find food good great
    group hand help home house land large last light line little long make more mother name
    """.split()  # noqa: SIM905 (a column of quoted words would be harder to read)
)

NONCE_WORDS: Final = 10
"""Words that the nonce takes: 32 ** 10 is enough for 48 bits."""

_NONCE_BITS = 48
_NONCE_MASK = (1 << _NONCE_BITS) - 1


def _paragraphs() -> tuple[tuple[str, ...], ...]:
    rng = random.Random(0)
    return tuple(tuple(rng.sample(WORDS, len(WORDS))) for _ in range(64))


_PARAGRAPHS: Final = _paragraphs()
_TEXTS: Final = tuple(" ".join(paragraph) for paragraph in _PARAGRAPHS)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens the target makes of our words: `fixed_tokens` for the template and `tokens_per_word`.

    `measured` is False when the server reports no usage; lengths are then only rough.
    """

    fixed_tokens: float
    tokens_per_word: float
    measured: bool = True

    def words_for(self, tokens: int) -> int:
        """Words that make a prompt of about `tokens` tokens, at least the nonce."""
        return max(NONCE_WORDS, round((tokens - self.fixed_tokens) / self.tokens_per_word))

    def tokens_for(self, words: int) -> float:
        """Tokens to expect of a prompt of `words` words."""
        return self.fixed_tokens + self.tokens_per_word * words


ASSUMED: Final = Calibration(fixed_tokens=8.0, tokens_per_word=1.1, measured=False)
"""Typical of English words under vocabularies of 32k to 256k entries; used only when the server reports no usage."""


def nonce_of(run_nonce: int, index: int) -> int:
    """A number that no two requests of a run share and two runs share only by chance; neighbours differ everywhere."""
    value = (index ^ run_nonce) & _NONCE_MASK
    # Multiplying by an odd number and folding high bits into low ones are both one to one.
    value = value * 0x9E3779B97F4B & _NONCE_MASK
    value ^= value >> 23
    value = value * 0xD6E8FEB86659 & _NONCE_MASK
    return value ^ value >> 25


def make_prompt(rng: random.Random, words: int, nonce: int | None, *, shared_prefix: bool = False) -> str:
    """A text of exactly `words` words.

    Args:
        rng: where the order of words comes from.
        words: length; a text shorter than the nonce is a part of the nonce.
        nonce: see `nonce_of`; None leaves it out.
        shared_prefix: the first half is the same in all prompts (a system prompt, say), and the nonce follows it.
    """
    parts: list[str] = []
    if shared_prefix:
        shared = words // 2
        rounds = shared // len(WORDS)
        endless = [_TEXTS[number % len(_TEXTS)] for number in range(rounds)]
        parts += _fill(endless, _PARAGRAPHS[rounds % len(_PARAGRAPHS)], shared)
        words -= shared
    if nonce is not None:
        opening = [WORDS[nonce >> (5 * digit) & 31] for digit in range(min(words, NONCE_WORDS))]
        # The rest of the first round leaves out what the nonce has used, so that the nonce costs no balance.
        rest = [word for word in rng.choice(_PARAGRAPHS) if word not in opening][: words - len(opening)]
        parts += opening + rest
        words -= len(opening) + len(rest)
    return " ".join([*parts, *_fill(rng.choices(_TEXTS, k=words // len(WORDS)), rng.choice(_PARAGRAPHS), words)])


def _fill(texts: list[str], last: tuple[str, ...], words: int) -> list[str]:
    """Whole rounds of all words, and a part of one more."""
    return [*texts, *last[: words % len(WORDS)]]


def question(model: str, api: Api, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The part of a request body that both request forms need."""
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
    if api == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


def calibrate(
    model: str, api: Api, context_tokens: int | None = None, *, timeout_seconds: float = 120.0
) -> Conversation[Calibration]:
    """Measure `Calibration` with four requests of one output token each.

    A short and a long prompt under each of two nonces: the difference inside a pair is whole rounds of the word list
    (unless the context is tiny), so the slope does not depend on which words were drawn.

    Args:
        model: model name to send.
        api: request form to use.
        context_tokens: the target's context; the long prompt stays below half of it.
        timeout_seconds: for each request.

    Raises:
        TargetError: the server does not answer, or refuses.
    """
    context = context_tokens or 2048
    short = 2 * len(WORDS) if context >= 512 else NONCE_WORDS
    long = 0
    points: list[tuple[int, int]] = []
    for number, nonce in enumerate((0x2F3A_5C71_9D06, 0xB84E_10E7_6A95)):
        for position in range(2):
            if number == 0 and position == 1:
                per_word = points[0][1] / short
                rounds = int(min(800, context * 0.5) / per_word - short) // len(WORDS)
                long = short + len(WORDS) * rounds if rounds > 0 else short * 2
            words = long if position else short
            prompt = make_prompt(random.Random(words), words, nonce)
            body = question(model, api, prompt, 1) | {"temperature": 0}
            path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
            answer = yield HttpRequest(path, body, timeout_seconds)
            if answer.error is not None:
                raise TargetError(f"measuring prompt lengths: no answer to POST {path}: {answer.error}")
            if answer.status != 200:
                message = message_of(answer.json()) or answer.text()[:200]
                raise TargetError(f"measuring prompt lengths: POST {path} gave HTTP {answer.status}: {message}")
            tokens = _prompt_tokens(answer.json())
            if tokens is None:
                return ASSUMED
            points.append((words, tokens))
    rise = sum(points[pair + 1][1] - points[pair][1] for pair in (0, 2))
    tokens_per_word = rise / (2 * (long - short))
    if tokens_per_word < 0.2:
        # A server that counts every prompt alike tells us nothing.
        return ASSUMED
    fixed = sum(tokens - tokens_per_word * words for words, tokens in points) / len(points)
    return Calibration(fixed, tokens_per_word)


def _prompt_tokens(document: Any) -> int | None:
    usage = document.get("usage") if isinstance(document, dict) else None
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None
