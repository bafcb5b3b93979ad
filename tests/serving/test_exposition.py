"""The reader of metrics pages takes what engines really send, and survives everything else."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import exposition
from serving.exposition import Histogram, parse

SAMPLES = Path(__file__).parent.parent / "samples"


@pytest.mark.parametrize(
    ("line", "name", "labels", "value"),
    [
        ("up 1", "up", {}, 1.0),
        ("up\t1", "up", {}, 1.0),
        ("  up   1  ", "up", {}, 1.0),
        ("up 1 1700000000000", "up", {}, 1.0),
        ("up 1 1700000000.123", "up", {}, 1.0),
        ("up{} 1", "up", {}, 1.0),
        ("up 1\r", "up", {}, 1.0),
        (
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
            "vllm:num_requests_running",
            {"engine": "0", "model_name": "m"},
            3.0,
        ),
        ('a{b="c",} 2', "a", {"b": "c"}, 2.0),
        ('a{ b = "c" , d="e" } 2', "a", {"b": "c", "d": "e"}, 2.0),
        ('a {b="c"} 2', "a", {"b": "c"}, 2.0),
        ('a{b="c"}2', "a", {"b": "c"}, 2.0),
        ('a{b=""} 2', "a", {"b": ""}, 2.0),
        (r'a{b="x\\y\"z\nw\q"} 2', "a", {"b": 'x\\y"z\nw\\q'}, 2.0),
        (r'a{b="ends with \\"} 2', "a", {"b": "ends with \\"}, 2.0),
        ('a{b="has } and , and = and # {inside"} 2', "a", {"b": "has } and , and = and # {inside"}, 2.0),
        ('a{b="日本語"} 2', "a", {"b": "日本語"}, 2.0),
        ("a 1.7976e+3", "a", {}, 1797.6),
        ("a 5e-05", "a", {}, 5e-05),
        ("a -0.5", "a", {}, -0.5),
        ("a +4", "a", {}, 4.0),
        ('a_bucket{le="+Inf"} 3', "a_bucket", {"le": "+Inf"}, 3.0),
        ('a_bucket{le="0.1"} 8 # {trace_id="KOO5S4vxi0o"} 0.067 1520879607.789', "a_bucket", {"le": "0.1"}, 8.0),
        ('a_total 17.0 # {trace_id="x}y"} 1', "a_total", {}, 17.0),
        ('{"odd.name", b="c"} 4', "odd.name", {"b": "c"}, 4.0),
        ('{"odd.name"} 4', "odd.name", {}, 4.0),
        ('a{"odd.label"="c"} 4', "a", {"odd.label": "c"}, 4.0),
    ],
)
def test_a_line_that_either_format_allows_is_read(line, name, labels, value):
    page = parse(line)
    assert page.bad_lines == 0
    assert page.samples == {name: [(labels, value)]}
    assert parse(line.encode()).samples == page.samples


@pytest.mark.parametrize(
    "line",
    [
        "up",
        "up one",
        "up 1 2 3",
        "up 1 soon",
        "up 1_000",
        "up 0x10",
        "up ١",
        "1up 2",
        "u-p 2",
        'up{b="c" 2',
        'up{b="c} 2',
        "up{b=c} 2",
        "up{b} 2",
        'up{="c"} 2',
        'up{b="c"d="e"} 2',
        'up{b="c",b="d"} 2',
        'up{b="c",,} 2',
        'up{b="c"}',
        'up{"a","b"} 2',
        'up{"a"} 2',
        '{b="c"} 2',
        '{""} 2',
        "{} 2",
        '{"error":{"message":"File Not Found","type":"not_found_error","code":404}}',
        "[]",
        "HTTP/1.1 200 OK",
        "\x00\x01\x02",
    ],
)
def test_a_bad_line_costs_that_line_only(line):
    page = parse(f"before 1\n{line}\nafter 2\n")
    assert page.samples == {"before": [({}, 1.0)], "after": [({}, 2.0)]}
    assert page.bad_lines == 1


@pytest.mark.parametrize("word", ["NaN", "nan", "+Inf", "-Inf", "Inf", "1e999"])
def test_a_value_that_is_not_finite_is_absent_and_not_bad(word):
    assert parse(f"a {word}\n") == parse("")


def test_comments_blank_lines_and_the_end_mark_are_neither_samples_nor_bad():
    page = parse("# HELP a b\n# TYPE a counter\n# UNIT a seconds\n\n   \n#\n# EOF\n")
    assert page.samples == {}
    assert page.bad_lines == 0


def test_windows_line_ends_are_read():
    assert parse(b'a 1\r\nb{c="d"} 2\r\n').samples == {"a": [({}, 1.0)], "b": [({"c": "d"}, 2.0)]}


def test_line_separators_of_other_kinds_stay_inside_a_label():
    page = parse('a{b="x\u2028y\x0bz"} 1\n')
    assert page.samples == {"a": [({"b": "x\u2028y\x0bz"}, 1.0)]}


@pytest.mark.parametrize("lead", ["", "\ufeff", "\r\n  "])
def test_a_web_page_gives_no_samples_even_where_a_line_looks_like_one(lead):
    page = parse(lead + "<!DOCTYPE html>\n<html>\nVersion 3\n</html>\n")
    assert page.samples == {}
    assert page.bad_lines == 4


def test_a_huge_body_is_refused_unread(monkeypatch):
    monkeypatch.setattr(exposition, "MAX_BODY_BYTES", 10)
    page = parse(b"a 1\n" * 4)
    assert page.samples == {}
    assert "larger" in page.refused


def test_openmetrics_counters_are_found_under_the_sample_name():
    page = parse(
        "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total 5\nvllm:prompt_tokens_created 1.7e9\n# EOF\n"
    )
    assert page.samples["vllm:prompt_tokens_total"] == [({}, 5.0)]
    assert page.refused is None


def test_the_recorded_vllm_page_is_read_whole():
    page = parse((SAMPLES / "vllm/metrics_under_load.txt").read_bytes())
    assert page.bad_lines == 0
    assert sum(map(len, page.samples.values())) == 479
    assert page.samples["process_virtual_memory_bytes"][0][1] > 1e9
    ttft = page.histogram("vllm:time_to_first_token_seconds")
    assert ttft.count == 80.0
    assert ttft.sum == pytest.approx(81.206388)
    assert ttft.edges[0] == 0.001
    assert ttft.edges[-1] == math.inf
    assert ttft.cumulative[ttft.edges.index(2.5)] == 79.0


def test_a_page_with_its_headers_in_front_loses_only_the_headers():
    page = parse((SAMPLES / "llamacpp/b11434/metrics_idle.txt").read_bytes())
    assert len(page.samples) == 15
    assert page.bad_lines == 7


HISTOGRAM = """
h_bucket{le="0.1",rank="0"} 1
h_bucket{le="1",rank="0"} 3
h_bucket{le="+Inf",rank="0"} 4
h_sum{rank="0"} 2.5
h_count{rank="0"} 4
h_bucket{le="0.1",rank="1"} 10
h_bucket{le="0.5",rank="1"} 20
h_bucket{le="1",rank="1"} 30
h_bucket{le="+Inf",rank="1"} 40
h_sum{rank="1"} 25
h_count{rank="1"} 40
"""


def test_a_histogram_is_summed_over_label_sets_at_the_edges_they_share():
    assert parse(HISTOGRAM).histogram("h") == Histogram((0.1, 1.0, math.inf), (11.0, 33.0, 44.0), 27.5)


def test_a_histogram_can_be_read_of_some_label_sets():
    one = parse(HISTOGRAM).histogram("h", lambda labels: labels["rank"] == "0")
    assert one == Histogram((0.1, 1.0, math.inf), (1.0, 3.0, 4.0), 2.5)
    assert one.count == 4.0


def test_a_missing_last_bucket_is_taken_from_the_count_and_a_missing_sum_is_absent():
    assert parse('h_bucket{le="1"} 2\nh_count 3\n').histogram("h") == Histogram((1.0, math.inf), (2.0, 3.0), None)


@pytest.mark.parametrize(
    "text",
    ["", "h_count 3\nh_sum 1\n", 'h_bucket{le="1"} 2\n', 'h_bucket{le="x"} 2\nh_bucket 3\n', 'h_bucket{le="NaN"} 2\n'],
)
def test_what_has_no_readable_buckets_is_no_histogram(text):
    assert parse(text).histogram("h") is None


@given(st.one_of(st.binary(max_size=400), st.text(max_size=400), st.text(alphabet='a{}"\\=,# \n1.e+_le', max_size=200)))
def test_no_input_makes_the_reader_raise(body):
    page = parse(body)
    assert all(math.isfinite(value) for series in page.samples.values() for _, value in series)
    for name in page.samples:
        page.histogram(name.removesuffix("_bucket"))


METRIC_NAMES = st.from_regex(r"\A[a-zA-Z_:][a-zA-Z0-9_:]{0,20}\Z")
LABEL_NAMES = st.from_regex(r"\A[a-zA-Z_][a-zA-Z0-9_]{0,10}\Z")
LABEL_SETS = st.dictionaries(LABEL_NAMES, st.text(st.characters(exclude_categories=("Cs",)), max_size=20), max_size=4)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SERIES = st.lists(st.tuples(METRIC_NAMES, LABEL_SETS, FINITE), max_size=15)


def render(series, *, crlf, exemplars):
    """The text format written by its rules, as far from the reader's code as it can be."""
    lines = []
    for name, labels, value in series:
        pairs = []
        for label, text in labels.items():
            escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
            pairs.append(f'{label}="{escaped}"')
        block = "{" + ",".join(pairs) + "}" if pairs else ""
        tail = ' # {trace_id="}\\""} 0.5 1.5' if exemplars else ""
        lines.append(f"{name}{block} {value!r}{tail}")
    return ("\r\n" if crlf else "\n").join(["# HELP x y", *lines, "# EOF", ""])


@given(SERIES, st.booleans(), st.booleans())
def test_what_is_rendered_by_the_rules_is_read_back(series, crlf, exemplars):
    page = parse(render(series, crlf=crlf, exemplars=exemplars))
    expected = {}
    for name, labels, value in series:
        expected.setdefault(name, []).append((labels, value))
    assert page.bad_lines == 0
    assert page.samples == expected
