"""Two measurements of one server are one, and only what is bad in both is worse."""

import pytest

from alerts.figures import Figure, Judgement, compare, pool

DECODE = "decode_tokens_per_second@8"


def judged(before, *after):
    figures = {}
    for one in after:
        figures = dict(pool(figures, {DECODE: one}))
    (item,) = compare({DECODE: before}, figures, allowed_ratio=0.1)
    return item.judgement


BEFORE = Figure(100.0, 97.0, 102.0, 24)
BAD, GOOD = Figure(80.0, 78.0, 82.0, 24), Figure(99.0, 96.0, 101.0, 24)


def test_one_bad_minute_is_no_regression_and_two_are():
    assert judged(BEFORE, BAD) is Judgement.WORSE
    assert judged(BEFORE, BAD, GOOD) is Judgement.SAME
    assert judged(BEFORE, BAD, BAD) is Judgement.WORSE


def test_pooled_rounds_reach_from_the_lowest_to_the_highest_of_both():
    first = {DECODE: BAD, "failures": Figure(1, 1, 1, 24), "gpu_memory_peak_bytes": Figure(5e9, 5e9, 5e9, 9)}
    second = {DECODE: GOOD, "failures": Figure(0, 0, 0, 24), "ttft_seconds@8": Figure(0.1, 0.1, 0.1, 24)}
    assert pool(first, second) == {
        DECODE: Figure(89.5, 78.0, 101.0, 48),
        "failures": Figure(1, 1, 1, 24),
        "gpu_memory_peak_bytes": Figure(5e9, 5e9, 5e9, 9),
        "ttft_seconds@8": Figure(0.1, 0.1, 0.1, 24),
    }


@pytest.mark.parametrize("name", ["failures", "kv_cache_usage_peak_ratio"])
def test_of_peaks_and_failures_the_higher_counts(name):
    low, high = Figure(0.2, 0.2, 0.2, 3), Figure(0.9, 0.9, 0.9, 3)
    assert pool({name: low}, {name: high}) == pool({name: high}, {name: low}) == {name: high}
