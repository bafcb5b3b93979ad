"""llama.cpp's dialect gives what the real server gave: pages, streams, errors and logs, byte for byte where it can be."""

import contextlib
import http.client
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.conversation import HttpAnswer, converse
from serving.engines import ENGINES, Complaint, ScrapeFailure, probe, scrape
from serving.errors import ConfigError
from serving.exposition import parse
from serving.records import Outcome
from serving.simulator.dialects.base import Asked, Page, StartFailure, Trouble, Usage
from serving.simulator.dialects.llamacpp import LLAMACPP_DIALECT as DIALECT
from serving.simulator.spec import (
    Finish,
    MemoryPlan,
    Policy,
    ProcessView,
    ServerSpec,
    SlotView,
    Snapshot,
)
from serving.startup import logged_limits
from serving.stream import StreamDecoder

SAMPLES = Path(__file__).parents[2] / "samples" / "llamacpp"
ENGINE = ENGINES["llamacpp"]
NEW = ("b11549", "b11434", "b10434")
OLD = "b5170"
T_NS = 1_795_965_883_000_000_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Flat:
    def seconds(self, work):
        return 0.01


def spec(release="b10434", **changes):
    given_values = {
        "engine": "llamacpp",
        "release": release,
        "model": "tiny",
        "max_batch": 8,
        "context_tokens": 2048,
        "token_budget": 2048,
        "block_tokens": 1,
        "kv_blocks": 16384,
        "cost": Flat(),
        "memory": MemoryPlan(cards=0, weights_bytes=2_689_536),
        "policy": Policy(partitioned=True, counts_at_finish=True),
        "start_seconds": 0.2,
        "settings": {"port": 8101, "n_ctx_train": 4096, "n_vocab": 4096, "n_embd": 128, "n_params": 1_344_128},
    }
    return ServerSpec(**{**given_values, **changes})


def snapshot(**changes):
    given_values = {
        "t_ns": T_NS + 60_000_000_000,
        "started_ns": T_NS,
        "ready": True,
        **dict.fromkeys(("running", "waiting", "kv_blocks_used", "prompt_tokens", "cached_tokens"), 0),
        **dict.fromkeys(("generated_tokens", "preemptions", "steps", "step_tokens", "longest_tokens"), 0),
        **dict.fromkeys(("prefill_seconds", "decode_seconds"), 0.0),
        "finished": {},
        "http": {},
        "histograms": {},
        "slots": (),
        "gpus": (),
        "process": ProcessView(anonymous_memory_bytes=2**30),
    }
    return Snapshot(**{**given_values, **changes})


def recorded(name):
    """Status, headers in order, and body of a captured answer."""
    head, _, body = (SAMPLES / name).read_bytes().partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    length = dict(headers).get("Content-Length")
    return int(status.split()[1]), headers, body if length is None else body[: int(length)]


def transported(headers):
    """Without what the transport adds."""
    return [header for header in headers if header[0] not in {"Content-Length", "Transfer-Encoding"}]


def headers_of(page):
    """As sent: the content type stands before what rules the connection."""
    return [*page.headers[:-1], ("Content-Type", page.content_type), page.headers[-1]]


def answer_of(page):
    if page is None:
        return answer_of(DIALECT.complaint(Trouble.NOT_FOUND, spec()))
    headers = {name.lower(): value for name, value in headers_of(page)}
    return HttpAnswer(page.status, headers, page.body, 0.01)


def server(of, seen):
    """The dialect behind a transport."""

    def ask(request):
        if request.path == "/metrics":
            return answer_of(DIALECT.metrics(of, seen))
        return answer_of(DIALECT.page(request.path, of, seen))

    return ask


def shape(value):
    """What a document is made of: keys in order and kinds of values, lists by the kinds that they hold."""
    if isinstance(value, dict):
        return tuple((key, shape(item)) for key, item in value.items())
    if isinstance(value, list):
        return ["list", *{repr(found): found for found in map(shape, value)}.values()]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def anonymous(body):
    """A body without its random id and its second."""
    body = re.sub(rb'"id":"chatcmpl-[0-9A-Za-z]{32}"', b'"id":"ID"', body)
    return re.sub(rb'"created":\d{10}', b'"created":0', body)


def releases_of(prefix):
    return {"": "b10434", "b11434/": "b11434"}[prefix]


FOLDERS = ["", "b11434/"]


# Metrics --------------------------------------------------------------------------------------------------------------


def schema(body):
    return [line for line in body.decode().split("\n") if line.startswith(("# HELP", "# TYPE"))]


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("metrics_idle_b10434.txt", "b10434"),
        ("metrics_idle_xllamacpp_b11549.txt", "b11549"),
        ("metrics_under_load.txt", "b10434"),
        ("metrics_under_load_http64.txt", "b10434"),
        ("metrics_after_load.txt", "b10434"),
        ("b11434/metrics_idle.txt", "b11434"),
        ("b11434/metrics_under_load.txt", "b11434"),
    ],
)
def test_metric_families_are_those_of_the_capture(name, release):
    data = (SAMPLES / name).read_bytes()
    body = recorded(name)[2] if data.startswith(b"HTTP/") else data
    page = DIALECT.metrics(spec(release), snapshot())
    assert schema(page.body) == schema(body)
    simulated, captured = parse(page.body), parse(body)
    assert list(simulated.samples) == list(captured.samples)
    assert {name: [dict(labels) for labels, _ in series] for name, series in simulated.samples.items()} == {
        name: [dict(labels) for labels, _ in series] for name, series in captured.samples.items()
    }
    assert ENGINE.read(simulated).sources == ENGINE.read(captured).sources
    if "idle" in name:
        assert page.body == body


def test_the_answer_to_a_scrape_has_the_headers_of_the_capture():
    status, headers, _ = recorded("b11434/metrics_idle.txt")
    page = DIALECT.metrics(spec("b11434"), snapshot())
    assert page.status == status
    mine, theirs = headers_of(page), transported(headers)
    assert [name for name, _ in mine] == [name for name, _ in theirs]
    mark = "Process-Start-Time-Unix"
    assert {**dict(mine), mark: ""} == {**dict(theirs), mark: ""}
    assert dict(mine)[mark].isdigit()


def test_a_capture_is_written_as_it_was():
    values = {
        name: series[0][1] for name, series in parse((SAMPLES / "metrics_after_load.txt").read_bytes()).samples.items()
    }
    seen = snapshot(
        prompt_tokens=1869 + 98,
        cached_tokens=98,
        prefill_seconds=7.96131,
        generated_tokens=2048,
        decode_seconds=147.864,
        steps=513,
        longest_tokens=127,
    )
    mine = {name: series[0][1] for name, series in parse(DIALECT.metrics(spec(), seen).body).samples.items()}
    averages = {
        "llamacpp:prompt_tokens_seconds",
        "llamacpp:predicted_tokens_seconds",
        "llamacpp:n_busy_slots_per_decode",
    }
    assert {name: value for name, value in mine.items() if name not in averages} == {
        name: value for name, value in values.items() if name not in averages
    }


def test_every_start_has_a_mark_of_its_own():
    marks = {
        converse(scrape(ENGINE), server(spec(), snapshot(started_ns=started_ns))).start_mark
        for started_ns in (T_NS, T_NS + 1_000, T_NS + 3_600_000_000_000)
    }
    assert len(marks) == 3


def test_a_counter_above_a_million_loses_its_last_digits_as_in_the_engine():
    # A real b11549 that had processed 1,003,002 prompt tokens said 1.003e+06.
    page = DIALECT.metrics(
        spec("b11549"), snapshot(prompt_tokens=1_003_002, prefill_seconds=35.48134, decode_seconds=6.3e-05)
    )
    assert b"\nllamacpp:prompt_tokens_total 1.003e+06\n" in page.body
    assert b"\nllamacpp:prompt_seconds_total 35.4813\n" in page.body
    assert b"\nllamacpp:tokens_predicted_seconds_total 6.3e-05\n" in page.body


count = st.integers(0, 10**9)
level = st.floats(0, 1e4)


@st.composite
def servers(draw):
    max_batch = draw(st.integers(1, 64))
    block_tokens = draw(st.sampled_from([1, 16, 32]))
    context = draw(st.integers(2, 512)) * block_tokens
    partitioned = draw(st.booleans())
    blocks = context * max_batch // block_tokens if partitioned else draw(st.integers(1, 8)) * context // block_tokens
    return spec(
        draw(st.sampled_from(DIALECT.releases)),
        max_batch=max_batch,
        context_tokens=context,
        block_tokens=block_tokens,
        kv_blocks=blocks,
        policy=Policy(partitioned=partitioned, counts_at_finish=True),
    )


@st.composite
def slots_of(draw, of):
    slots = []
    for index in range(of.max_batch):
        kind = draw(st.sampled_from(["fresh", "idle", "busy"]))
        prompt = draw(st.integers(1, of.context_tokens - 1))
        if kind == "fresh":
            slots.append(SlotView())
        elif kind == "idle":
            slots.append(SlotView(task_id=index, prompt_tokens=prompt))
        else:
            cached = draw(st.integers(0, prompt - 1))
            decoded = draw(st.integers(0, of.context_tokens - prompt))
            processed = prompt - cached if decoded else draw(st.integers(0, prompt - cached))
            slots.append(SlotView(True, index, prompt, processed, cached, decoded))
    return tuple(slots)


@st.composite
def sights(draw):
    of = draw(servers())
    prompt_tokens = draw(count)
    return of, snapshot(
        running=draw(level),
        waiting=draw(level),
        kv_blocks_used=draw(st.floats(0, of.kv_blocks)),
        prompt_tokens=prompt_tokens,
        cached_tokens=draw(st.integers(0, prompt_tokens)),
        generated_tokens=draw(count),
        steps=draw(count),
        step_tokens=draw(count),
        longest_tokens=draw(st.integers(0, of.context_tokens)),
        prefill_seconds=draw(level),
        decode_seconds=draw(level),
        slots=draw(st.just(()) | slots_of(of)),
    )


@given(sights())
@settings(max_examples=150, deadline=None)
def test_any_snapshot_is_read_back(sight):
    of, seen = sight
    page = DIALECT.metrics(of, seen)
    exposition = parse(page.body)
    assert exposition.bad_lines == 0
    values = ENGINE.read(exposition).values
    expected = {
        "requests_running": seen.running,
        "requests_waiting": seen.waiting,
        "prompt_tokens_total": seen.prompt_tokens,
        "prompt_tokens_cached_total": seen.cached_tokens,
        "generation_tokens_total": seen.generated_tokens,
        "engine_progress_total": seen.steps,
    }
    if of.release == OLD:
        expected["kv_cache_usage_ratio"] = seen.kv_blocks_used / of.kv_blocks
        expected["prompt_tokens_total"] -= expected.pop("prompt_tokens_cached_total")
    assert values == pytest.approx(expected, rel=6e-6)


@given(sights())
@settings(max_examples=150, deadline=None)
def test_slots_tell_the_share_of_the_cache_that_busy_ones_hold(sight):
    of, seen = sight
    page = DIALECT.page("/slots", of, seen)
    told = ENGINE.side_page.read(json.loads(page.body), of.kv_capacity_tokens)
    assert told["config_context_tokens"][0] == of.context_tokens
    assert told["config_max_running_requests"][0] == of.max_batch
    if of.release == OLD:
        assert "kv_cache_usage_ratio" not in told or not any(slot.is_processing for slot in seen.slots)
        return
    if seen.slots:
        held = sum(
            slot.processed_tokens + slot.cached_tokens + slot.decoded_tokens
            for slot in seen.slots
            if slot.is_processing
        )
    else:
        # Averages: what the cache holds is in as many slots as there are requests, as far as it fits.
        busy = min(of.max_batch, math.ceil(seen.running))
        held = min(round(seen.kv_blocks_used * of.block_tokens), busy * of.context_tokens)
    assert told["kv_cache_usage_ratio"][0] == pytest.approx(min(1.0, held / of.kv_capacity_tokens))


@pytest.mark.parametrize("release", DIALECT.releases)
def test_a_rename_hides_signals_and_leaves_others(release):
    seen = snapshot(running=3, waiting=4, generated_tokens=5, steps=6, prompt_tokens=7)
    before = ENGINE.read(parse(DIALECT.metrics(spec(release), seen).body))
    exposition = parse(DIALECT.metrics(spec(release), seen, renamed=True).body)
    after = ENGINE.read(exposition)
    lost = {"generation_tokens_total", "engine_progress_total", "requests_waiting"}
    lost |= {"kv_cache_usage_ratio"} if release == OLD else set()
    assert set(before.values) - set(after.values) == lost
    assert after.values["requests_running"] == 3
    assert ENGINE.speaks(exposition)


def test_nothing_but_the_models_is_told_while_the_model_loads():
    loading = snapshot(ready=False)
    status, headers, body = recorded("err_loading_503_health.txt")
    for page in (DIALECT.page("/health", spec(), loading), DIALECT.page("/nothing", spec(), loading)):
        assert (page.status, headers_of(page), page.body) == (status, transported(headers), body)
    failure = converse(scrape(ENGINE), server(spec(), loading))
    assert isinstance(failure, ScrapeFailure)
    assert failure.reason == "http_503"
    assert json.loads(DIALECT.page("/v1/models", spec(), loading).body)["data"][0]["meta"] is None
    assert DIALECT.page("/v1/models", spec(OLD), loading).status == 503


# Pages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("name", ["health", "load", "ping", "ready", "server_info", "tokenize", "version"])
def test_small_pages_are_those_of_the_capture(folder, name):
    status, headers, body = recorded(f"{folder}get_{name}.txt")
    of = spec(releases_of(folder))
    page = DIALECT.page(f"/{name}", of, snapshot()) or DIALECT.complaint(Trouble.NOT_FOUND, of)
    assert (page.status, headers_of(page), page.body) == (status, transported(headers), body)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(("path", "name"), [("/props", "get_props.txt"), ("/v1/models", "models.txt")])
def test_larger_pages_have_the_structure_of_the_capture(folder, path, name):
    status, headers, body = recorded(folder + name)
    page = DIALECT.page(path, spec(releases_of(folder)), snapshot())
    assert (page.status, headers_of(page)) == (status, transported(headers))
    mine, theirs = json.loads(page.body), json.loads(body)
    assert shape(mine) == shape(theirs)
    if path == "/v1/models":
        theirs["data"][0]["created"] = mine["data"][0]["created"]
        assert mine == theirs
    else:
        own = {"chat_template", "media_marker"}
        assert {name: mine[name] for name in mine.keys() - own} == {name: theirs[name] for name in theirs.keys() - own}
        assert re.fullmatch(r"<__media_[0-9A-Za-z]{32}__>", mine["media_marker"])


def slot_view(slot):
    """A captured slot as the simulator has it."""
    if not slot["is_processing"]:
        return SlotView(task_id=slot.get("id_task", -1), prompt_tokens=slot.get("n_prompt_tokens", 0))
    processed, cached = slot["n_prompt_tokens_processed"], slot["n_prompt_tokens_cache"]
    return SlotView(True, slot["id_task"], processed + cached, processed, cached, slot["next_token"][0]["n_decoded"])


@pytest.mark.parametrize(
    "name", ["slots_under_load.json", "b11434/slots_under_load.json", "get_slots.txt", "b11434/get_slots.txt"]
)
def test_slots_are_those_of_the_capture(name):
    data = (SAMPLES / name).read_bytes()
    theirs = json.loads(recorded(name)[2] if data.startswith(b"HTTP/") else data)
    of = spec("b11434" if "b11434" in name else "b10434", max_batch=len(theirs))
    mine = json.loads(DIALECT.page("/slots", of, snapshot(slots=tuple(map(slot_view, theirs)))).body)
    assert list(map(shape, mine)) == list(map(shape, theirs))
    assert ENGINE.side_page.read(mine, 16384) == ENGINE.side_page.read(theirs, 16384)
    for my, their in zip(mine, theirs, strict=True):
        for slot in (my, their):
            # What a request asked for is not in a slot's view.
            slot.pop("params", None)
            for step in slot.get("next_token", ()):
                del step["n_remain"], step["has_next_token"]
        assert my == their


def test_no_prompt_is_in_any_page():
    of, seen = spec(OLD), snapshot(slots=(SlotView(True, 1, 10, 10, 0, 3),) * 8)
    assert [slot["prompt"] for slot in json.loads(DIALECT.page("/slots", of, seen).body)] == [""] * 8
    assert "prompt" not in json.loads(DIALECT.page("/slots", spec(), seen).body)[0]


def test_a_full_server_says_so_where_it_is_asked():
    busy = snapshot(slots=(SlotView(True, 1, 10, 10),) * 8)
    assert DIALECT.page("/slots?fail_on_no_slot=1", spec(), busy).status == 503
    assert DIALECT.page("/slots?fail_on_no_slot=1", spec(), snapshot()).status == 200


def test_probing_and_scraping_the_dialect_as_a_server():
    seen = snapshot(running=2, waiting=1, steps=5, slots=(SlotView(True, 1, 100, 60, 40, 4), SlotView(True, 2, 30, 20)))
    for release in NEW:
        facts = converse(probe(), server(spec(release, max_batch=2), seen))
        assert (facts.engine, facts.model, facts.context_tokens, facts.max_running_requests) == (
            "llamacpp",
            "tiny",
            2048,
            2,
        )
        assert facts.version == ("b1-7e4c0a9" if release == "b10434" else None)
        reading = converse(scrape(ENGINE, kv_cache_capacity_tokens=1000), server(spec(release), seen))
        assert reading.values["kv_cache_usage_ratio"] == pytest.approx((104 + 20) / 1000)
        assert reading.is_proxy("kv_cache_usage_ratio")
        assert reading.at_finish == {"generation_tokens_total"}
    facts = converse(probe(), server(spec(OLD), seen))
    assert (facts.version, facts.max_running_requests) == ("b5170-00000000", 8)


def test_tokenise_counts_words():
    page = DIALECT.post("/tokenize", b'{"content":"hello there hello"}', spec())
    assert shape(json.loads(page.body)) == (("tokens", ["list", "number"]),)
    first, second, third = json.loads(page.body)["tokens"]
    assert first == third != second
    pieces = json.loads(DIALECT.post("/tokenize", b'{"content":"a b","with_pieces":true}', spec()).body)["tokens"]
    assert [list(piece) for piece in pieces] == [["id", "piece"]] * 2
    assert json.loads(DIALECT.post("/tokenize", b"{}", spec()).body) == {"tokens": []}
    assert DIALECT.post("/tokenize", b"{", spec("b11434")).status == 400
    assert DIALECT.post("/nothing", b"{}", spec()) is None


# Requests and errors --------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi"}]


def read(path, body, of):
    return DIALECT.read_request(path, body if isinstance(body, bytes) else json.dumps(body).encode(), of)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("err_bad_json.txt", CHAT, b'{"model":'),
        ("err_no_messages.txt", CHAT, {"model": "tiny"}),
        ("err_bad_temp.txt", CHAT, {"messages": MESSAGES, "temperature": "hot"}),
        ("err_neg_max.txt", CHAT, {"messages": MESSAGES, "max_tokens": -5}),
        ("err_prompt_too_long_stream.txt", COMPLETIONS, {"prompt": "a " * 6004, "max_tokens": 5, "stream": True}),
        ("err_404.txt", "/v1/nothing", b""),
    ],
)
def test_a_bad_request_gets_the_answer_of_the_capture(folder, name, path, body):
    status, headers, captured = recorded(folder + name)
    page = read(path, body, spec(releases_of(folder)))
    assert isinstance(page, Page)
    assert (page.status, headers_of(page), page.body) == (status, transported(headers), captured)


@pytest.mark.parametrize(
    ("name", "trouble", "detail"),
    [
        ("err_405.txt", Trouble.METHOD_NOT_ALLOWED, None),
        ("err_no_key.txt", Trouble.NO_KEY, None),
        ("err_loading_503_health.txt", Trouble.LOADING, None),
        ("err_no_messages.txt", Trouble.MISSING_MESSAGES, None),
        ("err_bad_temp.txt", Trouble.BAD_FIELD, None),
        ("err_neg_max.txt", Trouble.BAD_MAX_TOKENS, {"asked": -5}),
        ("err_prompt_too_long_stream.txt", Trouble.PROMPT_TOO_LONG, {"prompt_tokens": 6004}),
        ("nonstream_kv_full.txt", Trouble.KV_FULL, None),
        ("nonstream_kv_full_2.txt", Trouble.KV_FULL, {}),
    ],
)
def test_a_complaint_is_that_of_the_capture(name, trouble, detail):
    status, headers, body = recorded(name)
    page = DIALECT.complaint(trouble, spec(), detail)
    assert (page.status, headers_of(page), page.body) == (status, transported(headers), body)
    message = json.loads(body)["error"]["message"]
    assert ENGINE.complaint(json.loads(page.body)["error"]["message"]) == ENGINE.complaint(message)


@pytest.mark.parametrize("release", DIALECT.releases)
@pytest.mark.parametrize("trouble", Trouble)
def test_every_trouble_has_an_error_document(release, trouble):
    page = DIALECT.complaint(trouble, spec(release))
    document = json.loads(page.body)["error"]
    assert set(document) >= {"code", "message", "type"}
    assert page.status == document["code"] >= 400
    own = DIALECT.complaint(trouble, spec(release), {"message": "{so} to say"})
    assert json.loads(own.body)["error"]["message"] == "{so} to say"


def test_what_the_table_makes_of_complaints():
    def reading(trouble, release="b11434"):
        return ENGINE.complaint(json.loads(DIALECT.complaint(trouble, spec(release)).body)["error"]["message"])

    assert reading(Trouble.KV_FULL) is Complaint.KV_CACHE_FULL
    assert reading(Trouble.PROMPT_TOO_LONG) is Complaint.PROMPT_TOO_LONG
    assert reading(Trouble.PROMPT_TOO_LONG, OLD) is Complaint.PROMPT_TOO_LONG
    assert reading(Trouble.INTERNAL) is None


# Answers of a real b11549 to the same bodies.
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (COMPLETIONS, {"max_tokens": 3}, 400, "[json.exception.out_of_range.403] key 'prompt' not found"),
        (COMPLETIONS, {"prompt": 5}, 400, '"prompt" elements must be a string, a list of tokens, '),
        (COMPLETIONS, [], 400, "[json.exception.type_error.304] cannot use at() with array"),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": "x"},
            400,
            "Field 'max_tokens': [json.exception.type_error.302] type ",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "stream": "yes"},
            400,
            "Field 'stream': [json.exception.type_error.302] type must be b",
        ),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "Field 'n': Value must be between 1 <= value <= 8, but got 0"),
        (COMPLETIONS, {"prompt": "a", "n": 9}, 400, "Field 'n': Value must be between 1 <= value <= 8, but got 9"),
        (
            COMPLETIONS,
            {"prompt": "a", "ignore_eos": "x"},
            400,
            "Field 'ignore_eos': [json.exception.type_error.302] type must",
        ),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "[json.exception.parse_error.101]"),
        (COMPLETIONS, b"\xff", 400, "[json.exception.parse_error.101]"),
        (CHAT, [], 400, "'messages' is required"),
        (CHAT, {"messages": "hi"}, 400, "Expected 'messages' to be an array"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "All non-assistant messages must contain 'content'"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400, "Expected 'content' to be a string or an array"),
        (CHAT, {"messages": [{"content": "x"}]}, 500, "Failed to parse messages: Missing 'role' in message"),
        (
            COMPLETIONS,
            {"prompt": [3] * 2048},
            400,
            "request (2048 tokens) exceeds the available context size (2048 tokens)",
        ),
    ],
)
def test_other_bad_requests(path, body, status, message):
    page = read(path, body, spec("b11549"))
    assert isinstance(page, Page)
    assert page.status == status
    assert json.loads(page.body)["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (COMPLETIONS, {"prompt": "Hi there", "max_tokens": 4}, (2, 4, 1)),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 0}, (1, 1, 1)),
        (COMPLETIONS, {"prompt": "Hi"}, (1, 2047, 1)),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": -1}, (1, 2047, 1)),
        (COMPLETIONS, {"prompt": "Hi there", "max_tokens": 100_000}, (2, 2046, 1)),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 2.7}, (1, 2, 1)),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": True}, (1, 1, 1)),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": None, "temperature": None}, (1, 2047, 1)),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 3, "n_predict": 2}, (1, 2, 1)),
        (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 3}, (3, 3, 1)),
        (COMPLETIONS, {"prompt": [5, "six seven"], "max_tokens": 3}, (3, 3, 1)),
        (COMPLETIONS, {"prompt": ["a", "b c"], "max_tokens": 3, "n": 2}, (2, 3, 4)),
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 3}, (2, 3, 2)),
        (COMPLETIONS, {"prompt": {"prompt_string": "a b"}, "max_tokens": 3}, (2, 3, 1)),
        (COMPLETIONS, {"prompt": "", "max_tokens": 3}, (1, 3, 1)),
        (COMPLETIONS, {"prompt": [3] * 2047, "max_tokens": 9}, (2047, 1, 1)),
        (CHAT, {"messages": [], "max_tokens": 3}, (3, 3, 1)),
        (CHAT, {"messages": [{"role": "user", "content": None}], "max_tokens": 3}, (8, 3, 1)),
        (CHAT, {"messages": MESSAGES, "max_tokens": 3, "model": "nope"}, (9, 3, 1)),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}], "max_tokens": 3},
            (10, 3, 1),
        ),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 2}, (9, 2, 1)),
    ],
)
def test_what_a_request_asks_for(path, fields, expected):
    asked = read(path, fields, spec("b11549"))
    assert isinstance(asked, Asked)
    assert (asked.prompt_tokens, asked.output_tokens, asked.choices) == expected
    assert (asked.stream, asked.include_usage, asked.ignore_eos) == (False, False, False)


def test_how_an_answer_is_to_be_sent():
    fields = {"prompt": "Hi", "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    asked = read(COMPLETIONS, fields, spec())
    assert (asked.api, asked.path, asked.stream, asked.include_usage, asked.ignore_eos) == (
        *("completions", COMPLETIONS),
        *(True, True, True),
    )
    assert read("/chat/completions?x=1", {"messages": MESSAGES}, spec()).api == "chat"


def test_prompts_that_begin_alike_share_their_first_blocks():
    of = spec(block_tokens=4)
    first, second = (read(COMPLETIONS, {"prompt": f"a b c d {end}"}, of).prefix for end in ("e f g h", "e f g i"))
    assert len(first) == len(second) == 2
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (CHAT, {"model": "tiny"}, 500),
        (CHAT, [], 500),
        (CHAT, {"messages": [{"role": "user"}]}, 500),
        (COMPLETIONS, {"max_tokens": 3}, 500),
        (COMPLETIONS, {"prompt": "a", "n": 2}, 500),
        (COMPLETIONS, {"prompt": [3] * 2048}, 400),
    ],
)
def test_the_old_build_refuses_in_its_own_way(path, fields, status):
    assert read(path, fields, spec(OLD)).status == status


def test_the_old_build_takes_what_later_ones_refuse():
    asked = read(COMPLETIONS, {"prompt": "a", "temperature": "hot", "max_tokens": -5}, spec(OLD))
    assert asked.output_tokens == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
field_names = (
    "prompt",
    "messages",
    "max_tokens",
    "n",
    "stream",
    "stream_options",
    "temperature",
    "n_predict",
    "ignore_eos",
)


@given(
    st.sampled_from(DIALECT.releases),
    st.sampled_from([CHAT, COMPLETIONS]),
    st.binary(max_size=20)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(field_names), json_values).map(lambda value: json.dumps(value).encode()),
)
@settings(max_examples=300, deadline=None)
def test_any_body_is_a_request_or_a_complaint(release, path, body):
    of = spec(release)
    asked = DIALECT.read_request(path, body, of)
    if isinstance(asked, Page):
        assert asked.status in {400, 500}
    else:
        assert asked.output_tokens >= 1
        assert asked.prompt_tokens >= 1
        assert asked.prompt_tokens + asked.output_tokens <= of.context_tokens
        assert asked.choices >= 1


def test_a_release_that_is_none_is_the_callers_mistake():
    with pytest.raises(ConfigError, match="b11434"):
        DIALECT.complaint(Trouble.INTERNAL, spec("latest"))
    # A number between known builds is as the one before it; b4500 is older than all, and as the oldest.
    assert DIALECT.metrics(spec("b11500"), snapshot()).body == DIALECT.metrics(spec("b11434"), snapshot()).body
    assert b"kv_cache_usage_ratio" in DIALECT.metrics(spec("b4500"), snapshot()).body


# Streams --------------------------------------------------------------------------------------------------------------


def chunk(payload):
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def decode(api, body, headers=(("Content-Type", "text/event-stream"),)):
    head = "".join(f"{name}: {value}\r\n" for name, value in headers)
    decoder = StreamDecoder(api)
    decoder.feed(f"HTTP/1.1 200 OK\r\n{head}Transfer-Encoding: chunked\r\n\r\n".encode(), 1)
    for event in body.split(b"\n\n"):
        if event.strip():
            decoder.feed(chunk(event + b"\n\n"), 1)
    decoder.feed(b"0\r\n\r\n", 1)
    decoder.close()
    return decoder.result()


def events(body):
    return [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]


def asked_for(frames):
    """What the request behind captured frames was."""
    chat = frames[0]["object"] == "chat.completion.chunk"
    indices = {choice["index"] for frame in frames for choice in frame.get("choices", ())}
    return Asked(
        api="chat" if chat else "completions",
        path=CHAT if chat else COMPLETIONS,
        prompt_tokens=1,
        prefix=(),
        output_tokens=1,
        ignore_eos=False,
        stream=True,
        include_usage=any(not frame.get("choices", True) for frame in frames),
        choices=len(indices),
    )


def used_in(frames):
    """What the captured answer used, from the last frame that tells."""
    timings = next((frame["timings"] for frame in frames if "timings" in frame), None)
    if timings is None:
        return None
    return Usage(
        prompt_tokens=timings["cache_n"] + timings["prompt_n"],
        completion_tokens=timings["predicted_n"],
        cached_tokens=timings["cache_n"],
        prompt_seconds=timings["prompt_ms"] / 1e3,
        decode_seconds=timings["predicted_ms"] / 1e3,
    )


def texts_in(frames, index=0):
    for frame in frames:
        for choice in frame.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content")
            if text and choice["index"] == index:
                yield text


def simulated(frames, release):
    asked = asked_for(frames)
    stream = DIALECT.stream(asked, spec(release), 7, T_NS)
    parts = [stream.opening(), *(stream.tokens([text]) for text in texts_in(frames))]
    if "error" in frames[-1]:
        parts.append(stream.error(Trouble.KV_FULL))
    else:
        reasons = [choice["finish_reason"] for frame in frames for choice in frame["choices"]]
        finish = Finish(next(reason for reason in reasons if reason))
        parts.append(stream.ending(finish, used_in(frames)))
    return asked, stream, b"".join(parts)


STREAMS = [
    *("sse_chat_usage.txt", "sse_chat_nousage.txt", "sse_completion_usage.txt", "sse_completion_nousage.txt"),
    *("sse_stop_finish.txt", "max_tokens_over_context.txt"),
]
FAILED = ["sse_kv_full_1.txt", "sse_kv_full_2.txt", "sse_kv_full_3.txt"]


@pytest.mark.parametrize("name", [*STREAMS, *FAILED, *(f"b11434/{name}" for name in STREAMS)])
def test_a_stream_is_that_of_the_capture_byte_for_byte(name):
    status, headers, body = recorded(name)
    release = "b11434" if "b11434" in name else "b10434"
    frames = events(body)
    asked, stream, mine = simulated(frames, release)
    assert (stream.status, headers_of(stream)) == (status, transported(headers))
    assert anonymous(mine).strip() == anonymous(body).strip()
    assert decode(asked.api, mine, headers_of(stream)) == decode(asked.api, body, headers)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stream_of_two_choices_has_the_chunks_of_the_capture(folder):
    _, _, body = recorded(folder + "sse_completion_n2.txt")
    frames = events(body)
    asked, _, mine = simulated(frames, releases_of(folder))
    assert asked.choices == 2

    def kinds(of):
        return {(frame["choices"][0]["index"], repr(shape(frame))) for frame in events(of)}

    assert kinds(mine) == kinds(body)
    for result in (decode(asked.api, mine), decode(asked.api, body)):
        assert (result.outcome, result.finish_reason, result.completion_tokens) == (Outcome.OK, "length", 3)


def test_a_chat_of_two_choices_tells_usage_for_each():
    # As a real b11549 did.
    asked = replace(asked_for(events(recorded("sse_chat_usage.txt")[2])), choices=2)
    stream = DIALECT.stream(asked, spec(), 1, T_NS)
    frames = events(stream.opening() + stream.tokens([" a"]) + stream.ending(Finish.LENGTH, Usage(5, 1)))
    assert [[choice["index"] for choice in frame["choices"]] for frame in frames] == [
        *([[0], [1]] * 2),
        [0],
        [],
        [1],
        [],
    ]
    assert (
        decode("chat", stream.opening() + stream.tokens([" a"]) + stream.ending(Finish.LENGTH, Usage(5, 1))).outcome
        == "ok"
    )


@pytest.mark.parametrize("release", DIALECT.releases)
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_every_stream_is_read_as_what_it_is(release, api, include_usage):
    asked = Asked(api, CHAT if api == "chat" else COMPLETIONS, 5, (), 3, False, True, include_usage)
    usage = Usage(5, 3, 2, 0.25, 1.5)

    def stream():
        return DIALECT.stream(asked, spec(release), 1, T_NS)

    whole = stream()
    begun = whole.opening() + whole.tokens([" a", " b"])
    result = decode(api, begun + whole.ending(Finish.STOP, usage, [" c"]), headers_of(whole))
    counted = include_usage or api == "completions" or release == OLD
    assert (result.outcome, result.finish_reason, result.frames) == (Outcome.OK, "stop", 2)
    assert (result.prompt_tokens, result.completion_tokens) == ((5, 3) if counted else (None, None))
    assert result.cached_tokens == (2 if counted and release != OLD else None)
    assert (result.server_prompt_seconds, result.server_decode_seconds) == (0.25, 1.5)
    failed = decode(api, begun + stream().ending(Finish.KV_FULL, usage))
    assert failed.outcome is Outcome.STREAM_ERROR
    assert ENGINE.complaint(failed.error) is Complaint.KV_CACHE_FULL
    for broken in (Finish.CANCELLED, Finish.DIED, Finish.REJECTED):
        assert stream().ending(broken, usage) == b""
    other = decode(api, begun + stream().error(Trouble.INTERNAL, "gone"))
    assert other.error == "gone"


def test_reasoning_is_in_a_field_of_its_own():
    asked = Asked("chat", CHAT, 5, (), 3, False, True, True)
    stream = DIALECT.stream(asked, spec(), 1, T_NS)
    (frame,) = events(stream.tokens([" hm"], reasoning=True))
    assert frame["choices"][0]["delta"] == {"reasoning_content": " hm"}
    result = decode("chat", stream.tokens([" hm"], reasoning=True) + stream.ending(Finish.LENGTH, Usage(5, 1)))
    assert result.t_first_ns is not None
    assert result.t_first_content_ns is None


def test_ids_differ_between_requests_and_repeat_with_the_seed():
    asked = Asked("chat", CHAT, 5, (), 3, False, True, True)
    ids = [events(DIALECT.stream(asked, spec(), request, T_NS).opening())[0]["id"] for request in (1, 2, 1)]
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("name", "path", "fields"),
    [
        ("chat_nonstream.txt", CHAT, {"messages": MESSAGES, "max_tokens": 4}),
        ("completion_nonstream.txt", COMPLETIONS, {"prompt": "Hi there", "max_tokens": 4}),
        ("completion_token_ids.txt", COMPLETIONS, {"prompt": [5, 6, 7, 8], "max_tokens": 4}),
        ("err_bad_model.txt", CHAT, {"model": "nope", "messages": MESSAGES, "max_tokens": 2}),
        ("err_zero_max.txt", COMPLETIONS, {"prompt": "Hi there", "max_tokens": 0}),
    ],
)
def test_a_whole_answer_is_that_of_the_capture(folder, name, path, fields):
    status, headers, body = recorded(folder + name)
    theirs = json.loads(body)
    of = spec(releases_of(folder))
    asked = read(path, fields, of)
    assert asked.output_tokens == theirs["usage"]["completion_tokens"]
    text = theirs["choices"][0].get("text") or theirs["choices"][0]["message"]["content"]
    finish = Finish(theirs["choices"][0]["finish_reason"])
    page = DIALECT.answer(asked, of, 7, T_NS, text, finish, used_in([theirs]))
    assert (page.status, headers_of(page)) == (status, transported(headers))
    assert anonymous(page.body) == anonymous(body)


def test_answers_of_several_choices_and_failed_ones():
    asked = read(COMPLETIONS, {"prompt": "a", "n": 2}, spec())
    choices = json.loads(DIALECT.answer(asked, spec(), 1, T_NS, "x", Finish.STOP, Usage(1, 1)).body)["choices"]
    assert [(choice["index"], choice["finish_reason"]) for choice in choices] == [(0, "stop"), (1, "stop")]
    failed = DIALECT.answer(asked, spec(), 1, T_NS, "", Finish.KV_FULL, Usage(1, 1))
    assert (failed.status, failed.body) == (recorded("nonstream_kv_full.txt")[0], recorded("nonstream_kv_full.txt")[2])


# Logs -----------------------------------------------------------------------------------------------------------------

STAMP = re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} ")


def log_text(lines):
    return "\n".join(line.text for line in lines)


def until_ready(text):
    """Lines without their stamps, up to the first that says where it listens."""
    lines = [STAMP.sub("", line) for line in text.split("\n")]
    ready = next(index for index, line in enumerate(lines) if "listening on" in line)
    return lines[: ready + 1]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("startup.log", {}),
        ("startup_b10434.log", {}),
        ("b11434/startup.log", {"release": "b11434"}),
        ("log_kv_full.log", {"context_tokens": 1024, "kv_blocks": 1024, "policy": Policy(partitioned=False)}),
    ],
)
def test_a_start_is_logged_as_in_the_capture(name, changes):
    text = (SAMPLES / name).read_text()
    port = int(re.search(r"listening on http://127.0.0.1:(\d+)", text)[1])
    of = spec(**{**changes, "settings": {**spec().settings, "port": port}})
    mine = log_text(DIALECT.startup_log(of, T_NS))
    assert until_ready(mine) == until_ready(text)
    assert all(STAMP.match(line) for line in mine.split("\n"))
    assert logged_limits(ENGINE, mine) == logged_limits(ENGINE, text)


# A real b11549 with four slots that share 1,024 tokens and may have 500 each.
REAL_B11549 = """\
0.00.000.259 I srv          init: initializing ...
0.00.001.763 I srv          init: build_info: b0-unknown
0.00.001.775 I cmn  common_param: common_params_print_info: verbosity = 3 (adjust with the `-lv N` CLI arg)
0.00.001.851 I srv  init_listene: The UI is disabled
0.00.001.851 I srv  init_listene: Use --ui/--no-ui (or deprecated --webui/--no-webui) to enable/disable
0.00.001.928 W srv          init: security: no API key is set and CORS allows all origins (see https://github.com/ggml-org/llama.cpp/pull/25655)
0.00.004.675 I srv          init: loading model
0.00.004.714 I srv    load_model: loading model 'models/tiny.gguf'
0.00.016.681 I cmn          init: llama threadpool init, n_threads = 1
0.00.017.399 I srv    load_model: capping per-slot context (1024) to --kv-unified-per-slot (500)
0.00.017.587 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 500, kv_unified = 'true'
0.00.019.078 I srv          init: model loaded
0.00.019.102 I srv          init: listening on http://127.0.0.1:8101"""


def test_the_newest_build_and_a_capped_pool():
    of = spec("b11549", max_batch=4, context_tokens=500, kv_blocks=1024, policy=Policy(partitioned=False))
    mine = log_text(DIALECT.startup_log(of, T_NS))
    assert until_ready(mine) == until_ready(REAL_B11549)
    assert logged_limits(ENGINE, mine) == {
        "max_running_requests": 4,
        "context_tokens": 500,
        "kv_cache_capacity_tokens": 1024,
    }


def test_a_context_beyond_the_training_of_the_model_is_capped():
    # Words of a real b11549 that was asked for two slots of 40,192 tokens with a model trained for 32,768.
    asked = {"n_ctx": 80384, "n_ctx_train": 32768}
    of = spec("b11549", max_batch=2, context_tokens=32768, kv_blocks=80384, settings=asked)
    lines = [STAMP.sub("", line.text) for line in DIALECT.startup_log(of, T_NS)]
    warnings = [line for line in lines if line.startswith("W") and "security" not in line]
    assert warnings == [
        "W llama_context: n_ctx_seq (40192) > n_ctx_train (32768) -- possible training context overflow",
        "W srv    load_model: the slot context (40192) exceeds the training context of the model (32768) - capping",
    ]
    assert logged_limits(ENGINE, "\n".join(lines))["context_tokens"] == 32768


# Lines of a real b11549 at verbosity 4; sizes as its model had them.
VERBOSE = """\
I load_tensors:   CPU_Mapped model buffer size =     5.20 MiB
I llama_context: constructing llama_context
I llama_context: n_seq_max             = 4
I llama_context: n_ctx                 = 2048
I llama_context: n_ctx_seq             = 512
I llama_context: n_batch               = 2048
I llama_context: n_ubatch              = 512
I llama_context: causal_attn           = 1
I llama_context: flash_attn            = auto
I llama_context: kv_unified            = false
I llama_context: n_ctx_seq (512) < n_ctx_train (32768) -- the full capacity of the model will not be utilized
I llama_kv_cache:        CPU KV buffer size =     1.00 MiB
I llama_kv_cache: size =    1.00 MiB (   512 cells,   2 layers,  4/4 seqs), K (f16):    0.50 MiB, V (f16):    0.50 MiB
I sched_reserve: reserving ...
I sched_reserve:        CPU compute buffer size =     4.77 MiB
I cmn          init: llama threadpool init, n_threads = 1
I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 512, kv_unified = 'false'
I slot   load_model: id  0 | task -1 | new slot, n_ctx = 512
I slot   load_model: id  3 | task -1 | new slot, n_ctx = 512"""


def test_a_talkative_start_tells_where_memory_went():
    memory = MemoryPlan(cards=0, weights_bytes=5_450_240, kv_cache_bytes=2**20, workspace_bytes=5_001_707)
    talkative = {"verbosity": 4, "n_layer": 2, "n_ctx_train": 32768}
    of = spec("b11549", max_batch=4, context_tokens=512, kv_blocks=2048, memory=memory, settings=talkative)
    lines = [STAMP.sub("", line.text) for line in DIALECT.startup_log(of, T_NS)]
    assert [line for line in lines if line in VERBOSE.split("\n")] == VERBOSE.split("\n")


def test_cards_are_named_where_there_are_some():
    memory = MemoryPlan(cards=2, weights_bytes=40 * 2**30, kv_cache_bytes=8 * 2**30, workspace_bytes=2**30)
    for release in DIALECT.releases:
        text = log_text(DIALECT.startup_log(spec(release, memory=memory, settings={"verbosity": 4}), T_NS))
        for card in ("CUDA0", "CUDA1"):
            assert f"{card} model buffer size = 40960.00 MiB" in text
            assert f"{card} KV buffer size =  8192.00 MiB" in text
            assert f"{card} compute buffer size =  1024.00 MiB" in text
        assert "offloaded 33/33 layers to GPU" in text
        assert re.search(r"size +=\s+16384\.00 MiB", text)


def test_the_old_build_tells_the_same_facts_in_other_lines():
    of = spec(OLD)
    lines = DIALECT.startup_log(of, T_NS)
    text = log_text(lines)
    assert logged_limits(ENGINE, text) == {
        "max_running_requests": 8,
        "context_tokens": 2048,
        "kv_cache_capacity_tokens": 16384,
    }
    assert not STAMP.match(lines[0].text)
    assert lines[-2].text == "main: server is listening on http://127.0.0.1:8101 - starting the main loop"
    assert "slot         init: id  7 | task -1 | new slot n_ctx_slot = 2048" in text
    assert "llama_context: n_ctx_per_seq (2048) < n_ctx_train (4096) -- " in text


@given(servers(), st.sampled_from([None, *StartFailure]), st.integers(0, 2), st.sampled_from([3, 4]))
@settings(max_examples=100, deadline=None)
def test_a_log_goes_forward_and_ends_with_the_start(of, failure, cards, verbosity):
    of = replace(of, start_seconds=93.5, settings={"verbosity": verbosity}, memory=replace(of.memory, cards=cards))
    lines = DIALECT.startup_log(of, T_NS, failure)
    seconds = [line.seconds for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0
    assert seconds[-1] == 93.5
    assert all("\n" not in line.text for line in lines)
    facts = logged_limits(ENGINE, log_text(lines))
    if failure is None:
        assert facts["max_running_requests"] == of.max_batch
        assert facts["context_tokens"] == of.context_tokens
        assert (of.release == OLD and of.policy.partitioned) or facts[
            "kv_cache_capacity_tokens"
        ] == of.kv_capacity_tokens
        assert any("listening on" in line.text for line in lines)
    else:
        assert "max_running_requests" not in facts
        assert lines[-1].text.endswith("exiting due to model loading error")
        assert not any("listening on http" in line.text for line in lines)


# Ends of a real b11549 whose model file was not there, and whose cache did not fit; of that one the sizes are others.
MISSING = """\
I srv    load_model: loading model 'models/tiny.gguf'
E gguf_init_from_file: failed to open GGUF file 'models/tiny.gguf' (No such file or directory)
E llama_model_load: error loading model: llama_model_loader: failed to load model from models/tiny.gguf
E llama_model_load_from_file_impl: failed to load model
E cmn  common_init_: failed to load model 'models/tiny.gguf'
E srv    load_model: failed to load model, 'models/tiny.gguf'
I srv    operator(): operator(): cleaning up before exit...
E srv          init: exiting due to model loading error"""
NO_CACHE = """\
E ggml_aligned_malloc: insufficient memory (attempted to allocate 31250.00 MB)
E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 32768000000
E ggml_backend_buft_alloc_buffer_n_default: failed to allocate CPU buffer of size 32768000000
E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
E cmn  common_init_: failed to create context with model 'models/tiny.gguf'
E srv    load_model: failed to create_context with model 'models/tiny.gguf'
I srv    operator(): operator(): cleaning up before exit...
E srv          init: exiting due to model loading error"""


@pytest.mark.parametrize(
    ("failure", "end"), [(StartFailure.WEIGHTS_MISSING, MISSING), (StartFailure.NO_KV_CACHE, NO_CACHE)]
)
def test_a_start_fails_in_the_words_of_the_engine(failure, end):
    of = spec("b11549", memory=MemoryPlan(cards=0, kv_cache_bytes=32_768_000_000))
    lines = [STAMP.sub("", line.text) for line in DIALECT.startup_log(of, T_NS, failure)]
    assert lines[-len(end.split("\n")) :] == end.split("\n")


@pytest.mark.parametrize("release", DIALECT.releases)
@pytest.mark.parametrize(
    ("failure", "says", "size"),
    [
        (StartFailure.WEIGHTS_OUT_OF_MEMORY, "unable to allocate CUDA0 buffer", "40960.00"),
        (StartFailure.NO_KV_CACHE, "failed to allocate buffer for kv cache", "8192.00"),
        (StartFailure.KV_BELOW_ONE_REQUEST, "failed to allocate buffer for kv cache", "8192.00"),
        (StartFailure.WARMUP_OUT_OF_MEMORY, "graph_reserve: failed to allocate compute buffers", "1024.00"),
    ],
)
def test_a_card_without_room_is_out_of_memory(release, failure, says, size):
    memory = MemoryPlan(cards=1, weights_bytes=40 * 2**30, kv_cache_bytes=8 * 2**30, workspace_bytes=2**30)
    text = log_text(DIALECT.startup_log(spec(release, memory=memory), T_NS, failure))
    assert f"allocating {size} MiB on device 0: cudaMalloc failed: out of memory" in text
    assert says in text
    assert ENGINE.complaint(text) is Complaint.OUT_OF_MEMORY
    unfit = "failed to fit params to free device memory" in text
    assert unfit == (failure is StartFailure.KV_BELOW_ONE_REQUEST and release != OLD)


@pytest.mark.parametrize("release", DIALECT.releases)
def test_last_words(release):
    on_card, on_host = spec(release, memory=MemoryPlan(cards=1)), spec(release)
    dying = log_text(DIALECT.death_log(Trouble.OUT_OF_MEMORY, on_card, T_NS))
    assert "cudaMalloc failed: out of memory" in dying
    assert ENGINE.complaint(dying) is Complaint.OUT_OF_MEMORY
    assert "CUDA error" in log_text(DIALECT.death_log(Trouble.ENGINE_DEAD, on_card, T_NS))
    # The kernel kills it, and a killed process logs nothing.
    assert DIALECT.death_log(Trouble.OUT_OF_MEMORY, on_host, T_NS) == []
    full = [STAMP.sub("", line.text) for line in DIALECT.death_log(Trouble.KV_FULL, on_host, T_NS)]
    if release != OLD:
        known = {STAMP.sub("", line) for line in (SAMPLES / "log_kv_full.log").read_text().split("\n")}
        assert {re.sub(r"off = \d", "off = 3", line) for line in full[1:]} <= known
        assert full[0] in known
    else:
        assert "KV cache is full" in full[0]


# The real thing -------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_embedded_engine_speaks_as_its_dialect(tmp_path):
    pytest.importorskip("xllamacpp")
    from serving.embedded import EmbeddedServer

    def call(path, body=None):
        with contextlib.closing(
            http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=30)
        ) as connection:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.getheaders(), answer.read()

    log = tmp_path / "engine.log"
    with EmbeddedServer.start(log_path=log, cache_dir=tmp_path, shape="tiny", slots=2) as engine:
        fields = {"prompt": "a b c", "max_tokens": 4, "stream": True, "ignore_eos": True}
        body = call(COMPLETIONS, fields)[1]
        for _ in range(500):  # the slot is released after its last chunk is sent
            if not any(slot["is_processing"] for slot in json.loads(call("/slots")[1])):
                break
        pages = {path: call(path) for path in ("/metrics", "/slots", "/props", "/v1/models", "/health")}
    frames = events(body)
    of = spec("b11549", max_batch=2, model=frames[0]["model"])
    slots = tuple(slot_view(slot) for slot in json.loads(pages["/slots"][1]))
    seen = snapshot(slots=slots, steps=4)
    _, _, mine = simulated(frames, "b11549")
    assert (
        anonymous(mine.replace(b'"model":"tiny"', b'"model":"%s"' % of.model.encode())).strip()
        == anonymous(body).strip()
    )
    metrics = DIALECT.metrics(of, seen)
    assert schema(metrics.body) == schema(pages["/metrics"][1])
    assert [name for name, _ in headers_of(metrics)] == [name for name, _ in transported(pages["/metrics"][0])]
    for path in ("/slots", "/props", "/v1/models", "/health"):
        assert shape(json.loads(DIALECT.page(path, of, seen).body)) == shape(json.loads(pages[path][1])), path
    text = log.read_text()
    logged = {**of.settings, "port": int(engine.url.rsplit(":", 1)[1]), "model_path": str(engine.model)}
    assert until_ready(log_text(DIALECT.startup_log(replace(of, settings=logged), T_NS))) == until_ready(text)
