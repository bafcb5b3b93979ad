"""The answer: what a card is spent on, how many requests fit, what binds, and what a step of a retreat would buy."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from serving.budget.accounts import (
    BEST,
    DRIVER_BYTES,
    LIKELY,
    WORST,
    Fixed,
    Guess,
    Terms,
    fix,
    growth_bytes,
    is_hybrid,
    most_requests,
    pool_tokens,
    request_bytes,
)
from serving.budget.ask import Ask, Demand
from serving.errors import ConfigError
from serving.model import Attention, Split, UniformBits

__all__ = ["Budget", "Step", "longest_context", "work_out"]

_GIB: Final = 2**30
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a retreat would buy.

    Attributes:
        kind: `quantization`, `context` or `concurrency`, in the order in which to try them.
        change: what would be changed, for people.
        max_batch: requests at once after it; None where it still does not fit.
        price: what it costs.
    """

    kind: str
    change: str
    max_batch: int | None
    price: str


@dataclass(frozen=True, slots=True)
class Budget:
    """The answer.

    Attributes:
        ask: what was asked.
        terms: the fullest card's memory.
        token_budget: tokens of a step of one copy, as given or by the engine's default.
        token_bytes: bytes by which a long request grows for each token, on the fullest card.
        mean_bytes: bytes that a mean request holds there.
        longest_bytes: bytes that a request of full context holds there.
        kv_tokens: tokens that the KV cache of one copy holds when filled by requests of full context, started with
            `max_batch`.
        max_batch: requests at once over all copies; 0 where none fits.
        max_batch_range: the same with the uncertain terms at their worst and at their best.
        fits: whether the server starts, and can serve one request of full context.
        bound_by: the term that binds: `weights`, `kv_cache`, `workspace`, `elsewhere` (other processes),
            `token_budget`, or `asked` where the batch size that was given is no more than fits.
        reason: the same in a sentence.
        steps: what one step of quantisation, context or concurrency would buy.
        notes: what a person should know about the figures.
    """

    ask: Ask
    terms: Terms
    token_budget: int
    token_bytes: int
    mean_bytes: int
    longest_bytes: int
    kv_tokens: int
    max_batch: int
    max_batch_range: tuple[int, int]
    fits: bool
    bound_by: str
    reason: str
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds_asked(self) -> bool:
        """Whether it fits, and with as many requests at once as were asked for, where a number was."""
        return self.fits and self.max_batch >= (self.ask.max_batch or 1) * self.ask.copies


# ---- the answer


def work_out(ask: Ask) -> Budget:
    """Budget a card.

    Returns:
        The terms, what fits, what binds, and what a step of a retreat would buy. That nothing fits is an answer.

    Raises:
        ConfigError: the model cannot be divided like that, or nothing on the cards grows with the requests.
    """
    if not request_bytes(ask, ask.context):
        whole = replace(ask, split=Split(), gpu_layers=None)
        raise ConfigError(
            f"no layer of {ask.model.name} that keeps anything of a request is on the cards, so main memory and not a "
            f"card says how many fit: {_gib(fix(ask).host_weights)} of weights, and "
            f"{_gib(request_bytes(whole, ask.context))} for each request of {ask.context:,} tokens"
        )
    found = _answer(ask)
    return replace(found, steps=_steps(found)) if not ask.account.offloads or found.max_batch else found


def _answer(ask: Ask) -> Budget:
    fixed = fix(ask)
    demand = ask.demand or Demand(min(4096, ask.context))
    mean, longest = request_bytes(ask, min(demand.mean_tokens, ask.context)), request_bytes(ask, ask.context)
    long = request_bytes(ask, min(demand.long_tokens or ask.context, ask.context))
    usual = (1 - demand.long_share) * mean + demand.long_share * long

    def fitting(terms: Terms) -> int:
        """Requests that fit: of the usual mix, beside the room that one long request takes more."""
        pool = terms.kv_cache
        if _refusal(ask, terms, longest) is not None:
            return 0
        most = most_requests(ask, pool)
        held = int(pool // usual) if pool < longest else max(1, int((pool - max(0.0, long - usual)) // usual))
        return held if most is None else min(held, most)

    terms, batch = _fill(ask, fixed, fitting, LIKELY)
    worst, best = (_fill(ask, fixed, fitting, guess)[1] for guess in (WORST, BEST))
    budget, _ = ask.account.sizes(ask)
    bound_by, reason = _bind(ask, terms, batch, longest, budget)
    return Budget(
        ask=ask,
        terms=terms,
        token_budget=budget,
        token_bytes=round(growth_bytes(ask)),
        mean_bytes=round(mean),
        longest_bytes=round(longest),
        kv_tokens=pool_tokens(replace(ask, max_batch=max(1, batch)), terms.kv_cache),
        max_batch=batch * ask.copies,
        max_batch_range=(min(worst, batch) * ask.copies, max(best, batch) * ask.copies),
        fits=batch > 0,
        bound_by=bound_by,
        reason=reason,
        notes=_notes(ask, terms),
    )


def _fill(ask: Ask, fixed: Fixed, fitting: Callable[[Terms], int], guess: Guess) -> tuple[Terms, int]:
    """The terms and the requests that fit, where both agree: a larger batch needs a larger workspace."""
    if ask.max_batch is not None:
        terms = ask.account.terms(ask, fixed, guess)
        return terms, min(ask.max_batch, fitting(terms))
    low, high = 0, min(_LARGEST_BATCH, ask.account.sizes(ask)[0])
    while low < high:
        middle = (low + high + 1) // 2
        if fitting(ask.account.terms(replace(ask, max_batch=middle), fixed, guess)) >= middle:
            low = middle
        else:
            high = middle - 1
    return ask.account.terms(replace(ask, max_batch=max(1, low)), fixed, guess), low


_LARGEST_BATCH: Final = 65_536


def _refusal(ask: Ask, terms: Terms, longest: float) -> tuple[str, str] | None:
    """(the term that binds, why) where the engine does not start, or holds nothing; None where it starts."""
    usable = ask.card_bytes - terms.elsewhere
    if terms.weights > usable:
        return "weights", f"the weights need {_gib(terms.weights)} on each card and {_gib(usable)} are there"
    if terms.elsewhere and terms.reserve < 0:
        most = 1 - (terms.elsewhere + DRIVER_BYTES) / ask.card_bytes
        return "elsewhere", (
            f"other processes hold {_gib(terms.elsewhere)}, so that the engine's share of the card is not free; "
            f"end them, or lower the share below {math.floor(most * 100) / 100:g}"
        )
    if terms.kv_cache <= 0:
        buffers = terms.workspace + terms.communication
        return "weights" if terms.weights > buffers else "workspace", (
            f"weights ({_gib(terms.weights)}) and buffers ({_gib(buffers)}) are {_gib(-terms.kv_cache)} more than the "
            "engine may take of each card; nothing is left for the KV cache"
        )
    if (spare := terms.reserve - DRIVER_BYTES) < 0:
        return "workspace", (
            f"what the engine may take leaves {_gib(-spare)} too little of each card for graphs and the work of a step "
            f"({_gib(terms.graphs + terms.workspace)}): it runs out of memory while it warms up, or later; lower the "
            "share, or the tokens of a step"
        )
    if terms.kv_cache < longest and ask.account.refuses_long:
        return "kv_cache", (
            f"one request of {ask.context:,} tokens needs {_gib(longest)} of KV cache on each card and "
            f"{_gib(terms.kv_cache)} are left, enough for {longest_context(ask, terms.kv_cache):,} tokens"
        )
    return None


def _bind(ask: Ask, terms: Terms, batch: int, longest: float, budget: int) -> tuple[str, str]:
    """(the term that binds, why)."""
    refusal = _refusal(ask, terms, longest)
    if refusal is not None:
        return refusal
    each = " of each copy" if ask.copies > 1 else ""
    if ask.max_batch is not None and batch >= ask.max_batch:
        return "asked", f"the {ask.max_batch} requests{each} that were asked for fit"
    if batch >= budget and not ask.account.offloads:
        return "token_budget", f"a step takes {budget:,} tokens, so no more requests can get one each"
    held = f"hold {batch} requests{each} at once" if batch else "hold no request"
    asked = f", not the {ask.max_batch} that were asked for" if ask.max_batch is not None else ""
    return "kv_cache", f"{_gib(terms.kv_cache)} of KV cache on each card {held}{asked}"


def longest_context(ask: Ask, pool_bytes: int) -> int:
    """The longest request, in tokens, that a KV cache of so many bytes on each card holds; 0 where none fits."""
    low, high = 0, ask.context
    while low < high:
        middle = (low + high + 1) // 2
        if request_bytes(ask, middle) <= pool_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _steps(found: Budget) -> tuple[Step, ...]:
    """The retreat, in its order: quantisation, then context, then concurrency."""
    ask, model = found.ask, found.ask.model
    steps = []

    def step(kind: str, change: str, tried: Ask, price: str) -> None:
        after = _answer(tried)
        steps.append(Step(kind, change, after.max_batch or None, price))

    # What a step buys is how many requests fit after it, and not whether those that were asked for still do.
    free = replace(ask, max_batch=None)

    bits = 8 * found.terms.weights / max(1, model.on_card(ask.split, mtp_layers=ask.mtp_layers).total)
    narrower = next((narrow for above, narrow in ((10.0, 8.0), (6.0, 4.25)) if bits > above), None)
    if narrower is not None and not ask.account.offloads:
        tried = replace(free, model=replace(model, quantization=UniformBits(narrower, 16.0)), weights_bytes=None)
        price = "needs weights in that format, and answers may change: probe their quality"
        step("quantization", f"weights in {narrower:g} bits", tried, price)
    if ask.kv_bits > _NARROW_KV_BITS:
        tried = replace(free, kv_bits=8.0)
        step("quantization", "KV cache in 8 bits", tried, "answers over long contexts may change: probe their quality")
    shorter = ask.context // 2
    if not found.fits and 0 < (most := longest_context(ask, found.terms.kv_cache)) < shorter:
        shorter = most // 256 * 256 or most
    if shorter:
        demand = ask.demand
        if demand is not None:
            long = None if demand.long_tokens is None else max(1, min(demand.long_tokens, shorter))
            demand = replace(demand, mean_tokens=min(demand.mean_tokens, shorter), long_tokens=long)
        step(
            "context",
            f"a context of {shorter:,} tokens",
            replace(free, context_tokens=shorter, demand=demand),
            "longer requests are refused",
        )
    if found.max_batch > ask.copies:
        half = max(1, found.max_batch // ask.copies // 2)
        after = _answer(replace(ask, max_batch=half))
        held = after.kv_tokens // half
        room = f"{held:,} tokens on average" if held < ask.context else "as many tokens as the context allows"
        price = f"fewer requests at once, each of which may hold {room}"
        steps.append(Step("concurrency", f"a batch of {half * ask.copies}", half * ask.copies, price))
    elif not found.fits and not ask.account.offloads:
        step("concurrency", "a batch of 1", replace(ask, max_batch=1), "one request at a time")
    return tuple(steps)


_NARROW_KV_BITS: Final = 8.5


def _notes(ask: Ask, terms: Terms) -> tuple[str, ...]:
    notes = []
    model = ask.model
    if ask.demand is None:
        notes.append(f"no mean length was given: {min(4096, ask.context):,} tokens a request are assumed")
    if model.not_counted:
        notes.append(f"not counted, for want of a known shape: {', '.join(model.not_counted)}")
    if is_hybrid(ask):
        notes.append(
            "layers differ in what they keep of a request: a number of tokens of KV cache is that of requests of full "
            "context, and no cost of a token"
        )
    heads = {layer.mixer.kv_heads for layer in model.layers if isinstance(layer.mixer, Attention)}
    if heads and ask.split.tensor > min(heads):
        notes.append(
            f"{min(heads)} key-value heads over {ask.split.tensor} cards: copies of them take the rest, and the KV "
            "cache of a card gets no smaller than with one head on each"
        )
    asked_for = getattr(model.quantization, "kv_cache_dtype", None)
    if asked_for is not None and not ask.account.offloads:
        notes.append(
            f"the checkpoint asks for a KV cache in {asked_for}; it is counted in {ask.kv_bits:g} bits an element"
        )
    if ask.is_offloaded:
        notes.append(
            f"{_gib(terms.host_weights)} of weights stay in main memory: that is a way to start at all, and no tuning "
            "result; every step waits for them"
        )
    if terms.elsewhere > _NOTABLE_BYTES:
        notes.append(f"other processes hold {_gib(terms.elsewhere)} of the card")
    return tuple(notes)


_NOTABLE_BYTES: Final = 256 * _MIB


def _gib(count: float) -> str:
    return f"{count / _GIB:.2f} GiB"
