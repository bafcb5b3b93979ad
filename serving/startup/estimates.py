"""The budget against what a start-up log reports: how far each estimate was off."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from serving.budget import Ask, as_launched, pool_tokens, work_out
from serving.model import Split
from serving.settings import Settings
from serving.startup.facts import StartupFacts, whole

__all__ = ["Estimate", "as_started", "compare_estimates"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One figure of a log beside its estimate.

    Attributes:
        figure: `weights_bytes` and `kv_cache_bytes` of a card, `kv_tokens` of one copy of the model, or
            `max_concurrency`, requests of full context.
        given: what it was worked out from: `card` and settings alone, or the log's own `kv_cache_bytes`.
        logged: what the log says.
        estimated: what the budget says.
    """

    figure: str
    given: str
    logged: float
    estimated: float

    @property
    def error_ratio(self) -> float | None:
        """Estimate over log, less 1; None where the log says 0."""
        return self.estimated / self.logged - 1 if self.logged else None


_TAKEN = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "max_model_len",
    "max_num_batched_tokens",
    "max_batch_size",
)


def as_started(settings: Settings, facts: StartupFacts) -> Settings:
    """The settings with what the server really took, as far as its log says so."""
    taken = {key: number for key in _TAKEN if (number := facts.number(key)) is not None}
    share = facts.settings.get("gpu_memory_utilization")
    if share is not None and isinstance(share.value, int | float) and 0 < share.value <= 1:
        taken_share: float | None = float(share.value)
    else:
        taken_share = settings.gpu_memory_utilization
    return replace(
        settings,
        engine=facts.engine or settings.engine,
        gpu_memory_utilization=taken_share,
        **taken,  # type: ignore[arg-type] # whole numbers, as these fields are
    )


def compare_estimates(ask: Ask, facts: StartupFacts, *, card_is_known: bool) -> tuple[Estimate, ...]:
    """Every figure that both have.

    Args:
        ask: what was started, with the settings that the log tells of.
        facts: the log.
        card_is_known: whether `ask.card_bytes` is that of the server's cards. Otherwise only what follows from the
            model and from the log's own figures is compared.
    """
    return tuple(_estimates(ask, facts, card_is_known=card_is_known))


def _estimates(ask: Ask, facts: StartupFacts, *, card_is_known: bool) -> Iterator[Estimate]:
    # Where everything is in main memory, there is nothing of a card to be budgeted.
    budgeted = not (ask.account.offloads and _is_on_host(facts))
    found = work_out(as_launched(ask)) if budgeted else None
    rank = facts.binding_rank
    weights = max((one.weights_bytes for one in facts.ranks if one.weights_bytes is not None), default=None)
    pool = None if rank is None else rank.kv_cache_bytes
    capacity = whole(facts.settings.get("kv_cache_capacity_tokens"))
    tokens = None if capacity is None else capacity / max(1, facts.replicas)
    if facts.buffers:
        cards = [buffer for buffer in facts.buffers if not buffer.on_host]
        weights = max((one.model_bytes for one in cards if one.model_bytes is not None), default=weights)
        sizes = [one.kv_cache_bytes for one in facts.buffers if one.kv_cache_bytes is not None]
        pool = sum(sizes) if sizes else pool
    if weights is not None and found is not None:
        yield Estimate("weights_bytes", "card", weights, found.terms.weights)
    if pool:
        state = 0 if rank is None or rank.state_bytes is None else rank.state_bytes
        # The buffers of all devices together hold the cache of all layers.
        held = pool_tokens(replace(ask, split=Split(), gpu_layers=None) if facts.buffers else ask, pool + state)
        if tokens:
            yield Estimate("kv_tokens", "kv_cache_bytes", tokens, held)
        if facts.max_concurrency and facts.max_concurrency_tokens:
            yield Estimate(
                "max_concurrency", "kv_cache_bytes", facts.max_concurrency, held / facts.max_concurrency_tokens
            )
    if card_is_known and found is not None and not ask.account.offloads:
        estimated = pool_tokens(ask, found.terms.kv_cache)
        if pool:
            yield Estimate("kv_cache_bytes", "card", pool, max(0, found.terms.kv_cache))
        if tokens:
            yield Estimate("kv_tokens", "card", tokens, estimated)
        if facts.max_concurrency and facts.max_concurrency_tokens:
            concurrency = estimated / facts.max_concurrency_tokens
            yield Estimate("max_concurrency", "card", facts.max_concurrency, concurrency)


def _is_on_host(facts: StartupFacts) -> bool:
    return bool(facts.buffers) and all(buffer.on_host for buffer in facts.buffers if buffer.model_bytes is not None)
