"""What a card's memory is spent on, and how many requests fit into what is left.

The order is that of decisions that void one another: the split over cards is fixed first, from it follow the weights of
each card, then the buffers, then the KV cache, and from the cache the batch size, worked out from the mean length of
requests with room kept for a long one. Changing the split voids everything after it.

`ask` says what is to be budgeted, `accounts` how each engine divides a card, `answer` what follows from both.
"""

from serving.budget.accounts import (
    DRIVER_BYTES,
    FIT_MARGIN_BYTES,
    Terms,
    activation_bytes,
    as_launched,
    card_terms,
    memory_share,
    most_requests,
    newest_release,
    pool_token_bytes,
    pool_tokens,
    request_bytes,
    step_sizes,
)
from serving.budget.answer import Budget, Step, longest_context, work_out
from serving.budget.ask import KV_BITS, Ask, Demand, ask_for, cache_bits, cache_kind, kv_bits

__all__ = [
    "DRIVER_BYTES",
    "FIT_MARGIN_BYTES",
    "KV_BITS",
    "Ask",
    "Budget",
    "Demand",
    "Step",
    "Terms",
    "activation_bytes",
    "as_launched",
    "ask_for",
    "cache_bits",
    "cache_kind",
    "card_terms",
    "kv_bits",
    "longest_context",
    "memory_share",
    "most_requests",
    "newest_release",
    "pool_token_bytes",
    "pool_tokens",
    "request_bytes",
    "step_sizes",
    "work_out",
]
