"""Pages are written as the Prometheus client for Python writes them; the client itself says how."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.utils import floatToGoString

from serving.exposition import Histogram as Cumulative
from serving.simulator.dialects.prometheus import Template, bucket_values, edges_of, number


@given(st.floats() | st.integers(-(2**53), 2**53))
@example(999_999.0)
@example(1_000_000.0)
@example(1_795_965_046.26)
@example(-2e9)
@example(1e16)
@example(math.inf)
@example(-math.inf)
def test_numbers_are_spelt_as_the_client_spells_them(value):
    assert number(value) == floatToGoString(value)


def test_a_page_is_what_the_client_would_have_written_but_for_its_help():
    registry = CollectorRegistry()
    labels = {"model_name": 'a "b"\\ %s\nc', "engine": "0"}
    counter = Counter("vllm:tokens", "-", list(labels), registry=registry)
    counter.labels(**labels).inc(5)
    gauge = Gauge("vllm:running", "-", registry=registry)
    gauge.set(2.5)
    histogram = Histogram("vllm:wait_seconds", "-", list(labels), registry=registry, buckets=(0.1, 1.0, 2e9))
    for value in (0.05, 0.5, 0.5, 3e9):
        histogram.labels(**labels).observe(value)
    theirs = generate_latest(registry).decode()

    created = "created"
    template = Template(created)
    template.counter("vllm:tokens_total", [(labels, "tokens")])
    template.gauge("vllm:running", [({}, 2.5)])
    template.histogram("vllm:wait_seconds", edges_of("0.1 1 2e9"), [(labels, "wait")])
    seen = Cumulative((0.1, 1.0, 2e9, math.inf), (1.0, 3.0, 3.0, 4.0), 3e9 + 1.05)
    values = {"tokens": number(5), created: "@", **bucket_values("wait", seen, edges_of("0.1 1 2e9"))}

    def comparable(page):
        kept = [line for line in page.splitlines() if not line.startswith("# HELP")]
        return [line.rpartition(" ")[0] + " @" if "_created{" in line else line for line in kept]

    assert comparable(template.render(values).decode()) == comparable(theirs)


def test_a_histogram_without_observations_is_all_zero():
    assert set(bucket_values("wait", None, (0.1, 1.0)).values()) == {"0.0"}


def test_observations_whose_size_is_unknown_lie_at_one_edge():
    template = Template()
    template.plain_histogram("a", (1.0, 2.0, 3.0), [({}, "n", 7.0)], settled_at=2.0)
    lines = template.render({"n": "4.0"}).decode().splitlines()[2:]
    assert lines == [
        'a_bucket{le="1.0"} 0.0',
        'a_bucket{le="2.0"} 4.0',
        'a_bucket{le="3.0"} 4.0',
        'a_bucket{le="+Inf"} 4.0',
        "a_count 4.0",
        "a_sum 7.0",
    ]


@pytest.mark.parametrize("edges", [(1.0, math.inf), (1.0, 3.0, math.inf), (1.0, 2.0)])
def test_other_edges_are_the_callers_mistake(edges):
    seen = Cumulative(edges, tuple(1.0 for _ in edges), 1.0)
    with pytest.raises(ValueError, match="count with the dialect's own"):
        bucket_values("wait", seen, (1.0, 2.0))
