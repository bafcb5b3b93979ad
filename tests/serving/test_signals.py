from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.signals import SIGNALS, Kind, Series, continuous, increase


def counter(*values: float) -> Series:
    return Series("generation_tokens_total", tuple(range(len(values))), tuple(values), (("role", "api"),))


@pytest.mark.parametrize(
    ("values", "grown"),
    [
        ((), None),
        ((5,), None),
        ((5, 5), 0),
        ((5, 9), 4),
        ((100, 110, 0, 7), 17),
        ((100, 3), 3),
        ((100, 3, 2), 5),
        ((0, 0), 0),
    ],
)
def test_a_counter_grows_through_resets(values: tuple[float, ...], grown: float | None) -> None:
    assert increase(counter(*values)) == grown


def test_a_continuous_counter_keeps_times_labels_and_its_first_value() -> None:
    series = counter(100, 110, 4)
    assert continuous(series) == replace(series, values=(100, 110, 114))


steps = st.lists(st.integers(0, 1000), min_size=1, max_size=30)


@given(epochs=st.lists(steps, min_size=1, max_size=5))
def test_the_increase_is_all_that_was_counted_but_for_what_a_lower_start_hides(epochs: list[list[int]]) -> None:
    """Every epoch counts up from zero. A reset is seen by a fall; one that is not seen hides the value before it."""
    runs = [list(accumulate(epoch)) for epoch in epochs]
    values = [value for run in runs for value in run]
    seen = runs[0][-1] - runs[0][0]
    for before, after in pairwise(runs):
        seen += after[-1] - (before[-1] if after[0] >= before[-1] else 0)
    grown = increase(counter(*values))
    assert grown == (seen if len(values) > 1 else None)


@given(values=st.lists(st.integers(0, 10**9), min_size=2, max_size=50), cut=st.integers(0, 48))
def test_increases_of_parts_that_share_a_point_add_up(values: list[int], cut: int) -> None:
    at = min(cut, len(values) - 2)
    whole, head, tail = (increase(counter(*part)) or 0 for part in (values, values[: at + 1], values[at:]))
    assert whole == head + tail


@given(values=st.lists(st.integers(0, 10**9), max_size=50))
def test_a_continuous_counter_never_falls(values: list[int]) -> None:
    read = continuous(counter(*values)).values
    assert len(read) == len(values)
    assert all(after >= before for before, after in pairwise(read))


def test_counters_alone_end_in_total() -> None:
    for name, signal in SIGNALS.items():
        assert name.endswith("_total") is (signal.kind is Kind.COUNTER)
