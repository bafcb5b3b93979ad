"""Conversations with a target: what it is (`probe`), and what it says now (`scrape`)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from serving.conversation import Conversation, HttpAnswer, HttpRequest
from serving.engines.base import Engine, Limits, Reading, TargetFacts
from serving.engines.llamacpp import LLAMACPP
from serving.engines.sglang import SGLANG
from serving.engines.vllm import VLLM
from serving.errors import TargetError
from serving.exposition import Exposition, parse

__all__ = ["ENGINES", "ScrapeFailure", "probe", "scrape"]

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (VLLM, SGLANG, LLAMACPP)}
"""Every engine that Plimsoll knows, by name."""

_MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    """Why a scrape gave no reading: a gap in the series, not an error of ours.

    Attributes:
        reason: short and stable: `refused`, `timeout`, `dns`, `tls`, `connection`, `http_<status>`, `not_metrics`,
            `no_engine_metrics` or `too_large`.
        detail: a sentence for people; says which flag turns metrics on where that is the cause.
        seconds: how long it took to find out.
    """

    reason: str
    detail: str
    seconds: float = 0.0


def scrape(
    engine: Engine, *, kv_cache_capacity_tokens: int | None = None, timeout_s: float = 10.0
) -> Conversation[Reading | ScrapeFailure]:
    """Ask the target what it is doing now.

    Args:
        engine: its table.
        kv_cache_capacity_tokens: where the caller knows it (start-up log, settings file); needed by engines whose KV
            cache use is estimated from another page.
        timeout_s: for each page.

    Returns:
        What it told, or why it told nothing. A side page that fails costs its own signals only.
    """
    answer = yield HttpRequest(engine.dialect.metrics_path, timeout_s=timeout_s)
    outcome = _read_metrics(engine, answer)
    side = engine.side_page
    if isinstance(outcome, ScrapeFailure) or side is None or all(name in outcome.values for name in side.signals):
        return outcome
    extra = yield HttpRequest(side.path, timeout_s=timeout_s)
    values, sources = dict(outcome.values), dict(outcome.sources)
    if extra.status == 200:
        for name, (value, source) in side.read(extra.json(), kv_cache_capacity_tokens).items():
            if name not in values:
                values[name], sources[name] = value, source
    return replace(outcome, values=values, sources=sources, seconds=answer.seconds + extra.seconds)


def _read_metrics(engine: Engine, answer: HttpAnswer) -> Reading | ScrapeFailure:
    hint, path = engine.dialect.metrics_hint, engine.dialect.metrics_path

    def failure(reason: str, detail: str) -> ScrapeFailure:
        return ScrapeFailure(reason, detail, answer.seconds)

    if answer.error is not None:
        known = answer.error if answer.error in _CONNECTION_FAULTS else "connection"
        hint = engine.dialect.timeout_hint if answer.error == "timeout" else ""
        return failure(known, f"{path}: {_fault(answer.error)}" + (f"; {hint}" if hint else ""))
    if answer.status in (401, 403):
        return failure(f"http_{answer.status}", f"{path} wants an API key: {_KEY_ADVICE}")
    if answer.status != 200:
        advice = f"; {hint}" if answer.status in (404, 501) else ""
        return failure(f"http_{answer.status}", f"{path} gave HTTP {answer.status}: {_gist(answer)}{advice}")
    exposition = parse(answer.body)
    if exposition.refused is not None:
        return failure("too_large", f"{path}: {exposition.refused}")
    if not exposition.samples:
        return failure("not_metrics", f"{path} is not a page of metrics: {_gist(answer)}; {hint}")
    if not engine.speaks(exposition):
        return failure(
            "no_engine_metrics",
            f"{path} holds no name that begins with {engine.dialect.metrics_prefix}; {hint}",
        )
    mark = engine.dialect.start_mark_header
    reading = engine.read(exposition)
    return replace(reading, seconds=answer.seconds, start_mark=answer.headers.get(mark) if mark is not None else None)


def probe(
    model: str | None = None, *, where: str = "the target", require_metrics: bool = True
) -> Conversation[TargetFacts]:
    """Find out which engine a target runs, and what it says of its limits.

    Args:
        model: the name that requests are to use; the first that the target serves when None.
        where: the target's URL as messages should show it (without credentials).
        require_metrics: whether a target without metrics is an error.

    Raises:
        TargetError: the target cannot be used; the message says what is wrong and what to do.
    """
    listing = yield HttpRequest(_MODELS)
    _check_reachable(listing, where)
    cards = _model_cards(listing)
    if cards is None:
        stranger = yield from _describe_stranger(listing)
        raise TargetError(
            f"{where} answers, but not as an inference API: GET {_MODELS} gave {stranger}. Give the root URL of the "
            f"inference server itself, without /v1 ({_default_ports()})"
        )
    page = yield HttpRequest("/metrics")
    engine = _recognise(listing, cards, page)
    if engine is None:
        raise TargetError(
            f"{where} speaks the OpenAI API but is no engine that Plimsoll knows ({', '.join(ENGINES)}): "
            f"owned_by of its models is {_owners(cards)}, and {_metrics_gist(page)}"
        )
    if engine.dialect.metrics_path != "/metrics":
        page = yield HttpRequest(engine.dialect.metrics_path)
    outcome = _read_metrics(engine, page)
    if isinstance(outcome, ScrapeFailure) and require_metrics:
        raise TargetError(f"{where} runs {engine.name}, but gives no metrics: {outcome.detail}")
    reading = outcome if isinstance(outcome, Reading) else None
    card = _choose(cards, model, where)
    pages: dict[str, Any] = {}
    for alternatives in engine.dialect.fact_pages:
        for path in alternatives:
            answer = yield HttpRequest(path)
            if answer.status == 200:
                pages[path] = answer.json()
                break
    limits: Limits = engine.dialect.read_limits(card, pages, reading)
    return TargetFacts(
        engine=engine.name,
        version=limits.version,
        model=model if model is not None else str(card["id"]),
        context_tokens=limits.context_tokens,
        max_running_requests=limits.max_running_requests,
        max_running_source=limits.max_running_source,
        kv_cache_capacity_tokens=limits.kv_cache_capacity_tokens,
        kv_cache_capacity_source=limits.kv_cache_capacity_source,
        metrics_supported=reading is not None,
        notes=limits.notes,
    )


_KEY_ADVICE = "set PLIMSOLL_API_KEY to a key that the target accepts"

_CONNECTION_FAULTS = {
    "refused": "nothing listens there; check host and port, and whether the server is up (many engines open their "
    "port only once the model is loaded)",
    "timeout": "no answer in time; the server may be overloaded or still loading, or a firewall drops the packets",
    "dns": "the host name cannot be resolved; check its spelling",
    "tls": "the TLS handshake failed; check https:// against http://, and the certificate",
}


def _fault(error: str) -> str:
    return _CONNECTION_FAULTS.get(error, f"the connection failed: {error[:200]}")


def _check_reachable(listing: HttpAnswer, where: str) -> None:
    if listing.error is not None:
        raise TargetError(f"{where} cannot be reached: {_fault(listing.error)}")
    if listing.status in (401, 403):
        raise TargetError(f"{where} wants an API key (HTTP {listing.status}): {_KEY_ADVICE}")
    if listing.status == 503:
        raise TargetError(
            f"{where} is not ready (HTTP 503: {_gist(listing)}): wait until the model is loaded, then try again"
        )
    if listing.status in (500, 502, 504):
        raise TargetError(
            f"{where} fails (HTTP {listing.status}: {_gist(listing)}): look into the server's log; 502 and 504 come "
            "from a proxy that does not reach the server"
        )


def _model_cards(listing: HttpAnswer) -> list[Mapping[str, Any]] | None:
    page = listing.json() if listing.status == 200 else None
    data = page.get("data") if isinstance(page, dict) else None
    if not isinstance(data, list):
        return None
    cards: list[Mapping[str, Any]] = [
        card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)
    ]
    return cards or None


def _recognise(listing: HttpAnswer, cards: list[Mapping[str, Any]], page: HttpAnswer) -> Engine | None:
    """By metric names first: proxies rewrite headers and model cards, not those."""
    exposition = parse(page.body) if page.status == 200 else Exposition()
    for engine in ENGINES.values():
        if engine.speaks(exposition):
            return engine
    header = listing.headers.get("server")
    for engine in ENGINES.values():
        if engine.dialect.server_header is not None and header == engine.dialect.server_header:
            return engine
    owners = {card.get("owned_by") for card in cards}
    return next((engine for engine in ENGINES.values() if engine.dialect.owned_by in owners), None)


def _choose(cards: list[Mapping[str, Any]], model: str | None, where: str) -> Mapping[str, Any]:
    if model is None:
        return cards[0]
    for card in cards:
        aliases = card.get("aliases")
        if model == card["id"] or (isinstance(aliases, list) and model in aliases):
            return card
    names = [str(card["id"]) for card in cards]
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise TargetError(f"{where} does not serve the model {model!r}; it serves: {shown}")


def _describe_stranger(listing: HttpAnswer) -> Conversation[str]:
    """What the thing looks like that answered instead of an inference API."""
    page = yield HttpRequest("/metrics")
    exposition = parse(page.body) if page.status == 200 else Exposition()
    clues = [
        f"its metrics are {engine.name}'s, so this may be a metrics port, or a path prefix is missing"
        for engine in ENGINES.values()
        if engine.speaks(exposition)
    ]
    builds = [name.removesuffix("_build_info") for name in exposition.samples if name.endswith("_build_info")]
    clues += [f"its metrics are those of {name}" for name in builds[:1]]
    title = _title(listing)
    if title is None or title[:3].isdigit():
        # An error page is titled by its status; the front page says who is there.
        front = yield HttpRequest("/")
        title = _title(front) or title
    if title is not None:
        clues.append(f"the page is titled {title!r}")
    location = listing.headers.get("location")
    if location:
        clues.append(f"it redirects to {location[:80]!r}")
    server = listing.headers.get("server")
    if server:
        clues.append(f"the Server header is {server[:60]!r}")
    kind = "a web page" if _is_html(listing) else _gist(listing)
    looks = f" (it looks like this: {'; '.join(clues)})" if clues else ""
    return f"HTTP {listing.status}, {kind}{looks}"


def _is_html(answer: HttpAnswer) -> bool:
    return "html" in answer.headers.get("content-type", "") or answer.body.lstrip()[:1] == b"<"


_TITLE = re.compile(r"<title[^>]{0,200}>([^<]{1,200})", re.IGNORECASE)


def _title(answer: HttpAnswer) -> str | None:
    found = _TITLE.search(answer.body[:20_000].decode("utf-8", "replace")) if _is_html(answer) else None
    title = " ".join(found.group(1).split())[:80] if found is not None else ""
    return title or None


def _gist(answer: HttpAnswer) -> str:
    """The message in an error body, or its beginning."""
    if _is_html(answer):
        title = _title(answer)
        return f"a web page titled {title!r}" if title is not None else "a web page"
    page = answer.json() if len(answer.body) < 100_000 else None
    if isinstance(page, dict):
        error = page.get("error", page.get("detail", page.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str):
            return message[:200]
    text = " ".join(answer.body[:400].decode("utf-8", "replace").split())[:120]
    return f"the text {text!r}" if text else "an empty body"


def _metrics_gist(page: HttpAnswer) -> str:
    if page.error is not None:
        return f"its /metrics cannot be read ({page.error[:200]})"
    if page.status != 200:
        return f"its /metrics gave HTTP {page.status}"
    names = sorted({name.partition(":")[0] + ":" for name in parse(page.body).samples if ":" in name})
    return f"its metrics begin with {', '.join(names[:5])}" if names else "its /metrics names no engine"


def _owners(cards: list[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({repr(card.get("owned_by"))[:40] for card in cards})[:5])


def _default_ports() -> str:
    ports = ", ".join(f"{engine.name} {engine.dialect.default_port}" for engine in ENGINES.values())
    return f"default ports: {ports}"
