"""Lines of a log made fit to be shown: without secrets, without the words of customers, and short."""

import re

__all__ = ["TEXT_LIMIT", "presentable"]

TEXT_LIMIT = 240
"""Longest text of one line of evidence, in characters."""

_LOOKED_AT = 4096
_GONE = "[redacted]"
_NO_SECRET = r"(?!(?:None|null|True|False|Ellipsis)\b|-?\d+(?:\.\d+)?(?![\w.]))"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Authorization: Bearer abc
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {_GONE}"),
    # api_key='abc', api_key=['a', 'b'], HF_TOKEN=abc, "password": "abc"; but not eos_token_id=2, #token: 1920
    (
        re.compile(
            r"(?i)(\b[a-z_-]{0,40}(?:api[_-]?keys?|token|secret|passw(?:or)?d|access[_-]?key(?:[_-]?id)?|authorization|credentials?)"
            r"""["']?\s?[=:]\s?)""" + _NO_SECRET + r"""(?:\[[^\]]*\]?|"[^"]*"?|'[^']*'?|[^\s,;)}\]]+)"""
        ),
        rf"\1{_GONE}",
    ),
    # --api-key abc
    (
        re.compile(r"(?i)(--(?:api[_-]?key|hf[_-]?token|[\w-]{0,40}token|password)\b)[\s'\",=]{1,4}(?!-)[^\s'\",\]]+"),
        rf"\1 {_GONE}",
    ),
    # HF_TOKEN abc1, X-Auth-Token abc1: without a sign between them, what looks like no word
    (
        re.compile(
            r"(\b(?:[A-Z][A-Z0-9]*_)+(?:TOKEN|KEY|SECRET|PASSWORD)|\b(?i:x-[\w-]{0,40}(?:token|key)))\s+(?=[^\s\d]*\d)\S{10,}"
        ),
        rf"\1 {_GONE}",
    ),
    # pwd=abc, cookie: session=abc
    (re.compile(r"(?i)(\b(?:pass|pwd|passphrase)=)[^\s,;)}\]]+"), rf"\1{_GONE}"),
    (re.compile(r"(?i)(\b(?:set-)?cookie[\"']?\s?[=:]).*"), rf"\1 {_GONE}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*"), _GONE),
    # Tokens that show by their form: Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, NVIDIA, Slack, JSON Web Tokens
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[opsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}|nvapi-[\w-]{12,}"
            r"|xox[abpr]-[\w-]{8,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
        ),
        _GONE,
    ),
    # https://user:password@host, https://token@host, and what is signed or keyed in a query
    (re.compile(r"(?<=://)[^/\s@]{1,400}@"), f"{_GONE}@"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://[^\s?'\"<>]{1,500}\?)[^\s'\"<>]+"), rf"\1{_GONE}"),
    # What customers wrote is theirs: everything from such a field on goes.
    (
        re.compile(
            r"(?i)([\"']?\b(?:prompt\w{0,20}|messages|content|inputs?|input_value|input_text|text|generated_text"
            r"|query|question|instructions?|arguments|reasoning(?:_content)?|tool_calls|documents?)[\"']?\s?[=:]\s?)"
            r"[\"'\[{].*"
        ),
        r"\1[left out]",
    ),
)


def presentable(text: str, focus: str = "", limit: int = TEXT_LIMIT) -> str:
    """`text` on one line without secrets, prompts and characters that no terminal shows, cut to `limit` characters.

    Args:
        text: a line of a log, without terminal codes.
        focus: a part of it that should stay visible when it is cut.
        limit: longest result.
    """
    shown = text[:_LOOKED_AT]
    for pattern, instead in _RULES:
        shown = pattern.sub(instead, shown)
    shown = " ".join("".join(char if char.isprintable() else " " for char in shown).split())
    if len(shown) <= limit:
        return shown
    at = shown.find(" ".join(focus.split())[:32]) if focus else 0
    begin = max(0, min(at - limit // 4, len(shown) - limit))
    cut = shown[begin : begin + limit - 4]
    return ("… " if begin else "") + cut.strip() + (" …" if begin + limit - 4 < len(shown) else "")
