"""What a simulated SGLang says has the names and labels of its releases, and means what the simulator meant.

SGLang needs a GPU, so its pages under `samples/sglang` were composed from its sources, not captured; streams, errors
and logs have no sample at all and are held to what our own readers make of them.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.conversation import HttpAnswer
from serving.engines import ENGINES, Complaint, probe
from serving.exposition import Histogram, parse
from serving.simulator.dialects.base import Asked, Page, StartFailure, Trouble, Usage
from serving.simulator.dialects.sglang import SGLANG_DIALECT
from serving.simulator.spec import Finish, MemoryPlan, Policy, ProcessView, ServerSpec, Snapshot
from serving.startup import logged_limits
from serving.stream import StreamDecoder

SAMPLES = Path(__file__).parents[2] / "samples" / "sglang"
SGLANG = ENGINES["sglang"]
T_NS = 1_795_966_868_000_000_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Instant:
    def seconds(self, work):
        return 0.01


def spec_of(release="0.5.23", **changes):
    memory = MemoryPlan(
        cards=1,
        card_total_bytes=80 * 2**30,
        weights_bytes=14 * 2**30,
        kv_cache_bytes=40 * 2**30,
        workspace_bytes=4 * 2**30,
    )
    spec = ServerSpec(
        engine="sglang",
        release=release,
        model="glm",
        max_batch=24,
        context_tokens=2048,
        token_budget=8192,
        block_tokens=1,
        kv_blocks=16000,
        cost=Instant(),
        memory=memory,
        policy=Policy(prefill_first=True, counts_at_finish=release != "0.5.23"),
    )
    return replace(spec, **changes)


SPEC = spec_of()
FOUR_RANKS = spec_of(
    card_parallel=4,
    settings={
        "dp_size": 2,
        "ep_size": 4,
        "enable_metrics_for_all_schedulers": True,
        "enable_priority_scheduling": True,
    },
)


def histogram(signal, counts):
    edges = SGLANG_DIALECT.edges[signal]
    padded = [*counts, *[0] * (len(edges) + 1 - len(counts))]
    cumulative = tuple(float(sum(padded[: i + 1])) for i in range(len(padded)))
    return Histogram((*edges, math.inf), cumulative, sum(counts) * 0.125)


def snapshot_of(**changes):
    snapshot = Snapshot(
        t_ns=T_NS,
        started_ns=T_NS - 10**12,
        ready=True,
        running=6,
        waiting=4,
        kv_blocks_used=4100,
        prompt_tokens=4066,
        cached_tokens=512,
        generated_tokens=6024,
        preemptions=8,
        finished={Finish.LENGTH: 64, Finish.STOP: 11, Finish.CANCELLED: 8, Finish.REJECTED: 2},
        http={(CHAT, 200): 70, (TEXT, 200): 5, (CHAT, 503): 3, ("/health", 503): 9, (CHAT, 400): 4},
        steps=1197,
        step_tokens=10090,
        prefill_seconds=2.75,
        decode_seconds=89.5,
        histograms={
            "time_to_first_token_seconds": histogram("time_to_first_token_seconds", [0, 1, 2, 72]),
            "inter_token_latency_seconds": histogram("inter_token_latency_seconds", [2955, 1880, 1114]),
            "request_duration_seconds": histogram("request_duration_seconds", [5, 10, 60]),
            "request_queue_seconds": histogram("request_queue_seconds", [20, 4, 52]),
        },
        slots=(),
        longest_tokens=900,
        gpus=(),
        process=ProcessView(anonymous_memory_bytes=3 * 2**30),
    )
    return replace(snapshot, **changes)


def read(spec, snapshot, **options):
    exposition = parse(SGLANG_DIALECT.metrics(spec, snapshot, **options).body)
    assert exposition.bad_lines == 0
    return SGLANG.read(exposition)


# ---- metrics


def families(text):
    """Family -> (type, label names of each kind of its samples)."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"^# HELP (\S+) ", text, re.MULTILINE)) == kinds.keys()
    labels = {name: set() for name in kinds}
    for line in text.splitlines():
        if line and line[0] != "#":
            name = re.match(r"[^{ ]+", line)[0]
            family = max((kind for kind in kinds if name.startswith(kind)), key=len)
            labels[family].add((name.removeprefix(family), frozenset(re.findall(r'(\w+)="', line))))
    return {name: (kind, frozenset(labels[name])) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    ("name", "spec"), [("metrics_0.4.9_composed.txt", spec_of("0.4.9")), ("metrics_0.5.23_composed.txt", FOUR_RANKS)]
)
def test_every_family_of_the_composed_page_is_there_with_its_type_and_labels(name, spec):
    composed = families((SAMPLES / name).read_text())
    own = families(SGLANG_DIALECT.metrics(spec, snapshot_of()).body.decode())
    assert {family: own.get(family) for family in composed} == composed
    assert all(family.startswith("sglang:") for family in own)


def test_the_composed_pages_are_read_with_the_same_sources():
    for name, spec in (("0.4.9", spec_of("0.4.9")), ("0.5.23", FOUR_RANKS)):
        composed = SGLANG.read(parse((SAMPLES / f"metrics_{name}_composed.txt").read_bytes()))
        own = read(spec, snapshot_of())
        assert composed.sources.items() <= own.sources.items()
        assert composed.at_finish == own.at_finish


# release -> signals that it does not tell, and the sources that differ from release to release
RELEASES = {
    "0.4.9": (
        {"kv_cache_capacity_tokens", "request_errors_total", "engine_progress_total", "config_context_tokens"},
        {
            "generation_tokens_total": "sglang:generation_tokens_total",
            "request_preemptions_total": "sglang:total_retracted_reqs",
        },
    ),
    "0.5.5": (
        {
            "kv_cache_capacity_tokens",
            "request_errors_total",
            "engine_progress_total",
            "config_context_tokens",
            "request_preemptions_total",
        },
        {"generation_tokens_total": "sglang:generation_tokens_total"},
    ),
    "0.5.23": (
        set(),
        {
            "generation_tokens_total": "sglang:realtime_tokens_total{mode=decode}",
            "request_preemptions_total": "sglang:num_retracted_requests_total",
            "kv_cache_capacity_tokens": "sglang:max_total_num_tokens",
        },
    ),
}


def test_every_release_is_in_the_table():
    assert tuple(SGLANG_DIALECT.releases) == tuple(reversed(RELEASES))


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_engine_table_reads_is_what_the_snapshot_says(release):
    absent, sources = RELEASES[release]
    snapshot = snapshot_of()
    reading = read(spec_of(release), snapshot)
    everything = {
        "requests_running": 6,
        "requests_waiting": 4,
        "kv_cache_usage_ratio": 0.26,  # of 0.25625
        "kv_cache_capacity_tokens": 16000,
        "request_preemptions_total": 8,
        "prompt_tokens_total": 4066,
        "prompt_tokens_cached_total": 512,
        "generation_tokens_total": 6024,
        "requests_finished_total": 75,
        "request_errors_total": 3,
        "engine_progress_total": 4066 + 6024,
        "config_context_tokens": 2048,
    }
    assert reading.values == {name: value for name, value in everything.items() if name not in absent}
    assert sources.items() <= reading.sources.items()
    live = release == "0.5.23"
    assert ("generation_tokens_total" in reading.at_finish) is not live
    queue = "request_queue_seconds"
    told = {name: found for name, found in snapshot.histograms.items() if release != "0.4.9" or name != queue}
    assert reading.histograms == told


def test_ranks_that_repeat_one_another_and_ranks_that_add_up_give_the_same_reading():
    one, four = (read(spec, snapshot_of()) for spec in (SPEC, FOUR_RANKS))
    assert four.values == one.values
    assert four.histograms == one.histograms


def test_a_page_has_no_process_and_no_creation_times():
    names = parse(SGLANG_DIALECT.metrics(SPEC, snapshot_of()).body).samples
    assert not [name for name in names if name.startswith("process_") or name.endswith("_created")]


@pytest.mark.parametrize(
    ("release", "name", "labels", "value"),
    [
        ("0.5.23", "sglang:num_aborted_requests_total", {}, 8),
        ("0.5.23", "sglang:gen_throughput", {}, 6024 / 89.5),
        ("0.5.23", "sglang:kv_available_tokens", {}, 16000 - 4100),
        ("0.5.23", "sglang:kv_used_tokens", {}, 4100),
        ("0.5.23", "sglang:generation_tokens_total", {"is_streaming": "true"}, 6024),
        ("0.5.23", "sglang:generation_tokens_total", {"is_streaming": "false"}, 0),
        ("0.5.23", "sglang:weight_memory_usage_gb", {}, 14),
        ("0.5.23", "sglang:kv_cache_memory_usage_gb", {}, 40),
        ("0.5.23", "sglang:graph_memory_usage_gb", {"phase": "decode"}, 1),
        ("0.5.23", "sglang:startup_available_gpu_memory_gb", {}, 22),
        ("0.5.5", "sglang:num_retractions_sum", {}, 8),
        ("0.4.9", "sglang:avg_request_queue_latency", {}, 0.125),
        ("0.4.9", "sglang:cache_hit_rate", {}, 512 / 4066),
    ],
)
def test_what_families_show_that_the_table_does_not_read(release, name, labels, value):
    samples = parse(SGLANG_DIALECT.metrics(spec_of(release), snapshot_of()).body).samples[name]
    assert [shown for found, shown in samples if labels.items() <= found.items()] == [value]


def test_occupancy_is_not_a_number_and_so_is_not_read():
    page = SGLANG_DIALECT.metrics(SPEC, snapshot_of()).body
    assert b" NaN\n" in page
    assert "sglang:fwd_occupancy" not in parse(page).samples


def test_after_a_silent_rename_two_signals_are_gone_and_all_others_stay():
    before, after = (read(SPEC, snapshot_of(), renamed=renamed) for renamed in (False, True))
    assert before.values.keys() - after.values.keys() == {"requests_running", "kv_cache_usage_ratio"}
    assert {name: before.values[name] for name in after.values} == after.values


def test_older_releases_say_the_older_content_type():
    assert SGLANG_DIALECT.metrics(spec_of("0.4.9"), snapshot_of()).content_type.startswith("text/plain; version=0.0.4")
    assert SGLANG_DIALECT.metrics(SPEC, snapshot_of()).content_type.startswith("text/plain; version=1.0.0")


def test_a_server_that_did_nothing_yet_has_a_page():
    fresh = snapshot_of(
        histograms={}, http={}, finished={}, running=0, prompt_tokens=0, cached_tokens=0, decode_seconds=0
    )
    for release in SGLANG_DIALECT.releases:
        assert read(spec_of(release), fresh).values["requests_finished_total"] == 0


COUNTS = st.integers(0, 10**12)
LEVELS = st.floats(0, 1e9, allow_nan=False) | st.integers(0, 10_000)


@st.composite
def snapshots(draw):
    histograms = {}
    for signal in draw(st.sets(st.sampled_from(sorted(SGLANG_DIALECT.edges)))):
        counts = draw(st.lists(st.integers(0, 10**9), min_size=0, max_size=len(SGLANG_DIALECT.edges[signal]) + 1))
        histograms[signal] = replace(histogram(signal, counts), sum=draw(st.floats(0, 1e15)))
    prompt = draw(COUNTS)
    return snapshot_of(
        running=draw(LEVELS),
        waiting=draw(LEVELS),
        kv_blocks_used=draw(st.floats(0, 16000)),
        prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt)),
        generated_tokens=draw(COUNTS),
        preemptions=draw(COUNTS),
        finished=draw(st.dictionaries(st.sampled_from(Finish), COUNTS)),
        http=draw(
            st.dictionaries(
                st.tuples(st.sampled_from([CHAT, TEXT, "/health", "/odd"]), st.sampled_from([200, 400, 500, 503])),
                COUNTS,
            )
        ),
        histograms=histograms,
    )


@given(snapshot=snapshots(), release=st.sampled_from(SGLANG_DIALECT.releases), model=st.text(min_size=1, max_size=20))
def test_any_snapshot_gives_a_page_that_reads_back_as_it_was(snapshot, release, model):
    reading = read(spec_of(release, model=model), snapshot)
    values, finished = reading.values, snapshot.finished
    assert reading.bad_lines == 0
    assert values["requests_running"] == snapshot.running
    assert values["requests_waiting"] == snapshot.waiting
    assert values["kv_cache_usage_ratio"] == round(snapshot.kv_blocks_used / 16000, 2)
    assert values["prompt_tokens_total"] == snapshot.prompt_tokens
    assert values["prompt_tokens_cached_total"] == snapshot.cached_tokens
    assert values["generation_tokens_total"] == snapshot.generated_tokens
    assert values.get("request_preemptions_total", snapshot.preemptions) == snapshot.preemptions
    assert values["requests_finished_total"] == finished.get(Finish.LENGTH, 0) + finished.get(Finish.STOP, 0)
    failed = sum(n for (path, status), n in snapshot.http.items() if status >= 500 and path in (CHAT, TEXT))
    if snapshot.http:
        assert values.get("request_errors_total", failed) == failed
    for signal, found in reading.histograms.items():
        if signal in snapshot.histograms:
            assert found == snapshot.histograms[signal]
        else:
            assert found.count == 0


# ---- requests and complaints


def chat(content="hello there", **fields):
    return json.dumps({"model": "glm", "messages": [{"role": "user", "content": content}], **fields}).encode()


def text(words, **fields):
    return json.dumps({"prompt": "a " * words, **fields}).encode()


def test_a_valid_request_is_read():
    body = chat("one two", max_tokens=7, ignore_eos=True, stream=True, stream_options={"include_usage": True}, n=2)
    assert SGLANG_DIALECT.read_request(CHAT, body, spec_of(block_tokens=4, kv_blocks=4000)) == Asked(
        api="chat",
        path=CHAT,
        prompt_tokens=5,
        prefix=SGLANG_DIALECT.read_request(CHAT, chat("one two", n=1), spec_of(block_tokens=4, kv_blocks=4000)).prefix,
        output_tokens=7,
        ignore_eos=True,
        stream=True,
        include_usage=True,
        choices=2,
    )


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        (TEXT, text(2), 16),
        (TEXT, text(2, max_tokens=5), 5),
        (TEXT, text(2040, max_tokens=6), 6),
        (CHAT, chat("a b"), 2048 - 5 - 2),
        (CHAT, chat("a b", model="any"), 2048 - 5 - 2),
        (CHAT, chat("a b", stream_options={"include_usage": True}), 2048 - 5 - 2),
    ],
)
def test_how_many_tokens_are_generated(path, body, output):
    assert SGLANG_DIALECT.read_request(path, body, SPEC).output_tokens == output


def test_the_output_is_cut_at_what_the_pool_holds():
    small = spec_of(kv_blocks=500)
    assert SGLANG_DIALECT.read_request(TEXT, text(100, max_tokens=900), small).output_tokens == 500 - 1 - 100 - 1
    assert SGLANG_DIALECT.read_request(TEXT, text(495), small).status == 400


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (text(3000), Complaint.PROMPT_TOO_LONG),
        (text(2000, max_tokens=100), Complaint.PROMPT_TOO_LONG),
        (text(2041, max_tokens=7), Complaint.PROMPT_TOO_LONG),
        (text(2043, max_tokens=1), Complaint.PROMPT_TOO_LONG),
        (text(0), None),
        (text(1, max_tokens=0), None),
        (text(1, max_tokens=-5), None),
        (text(1, n=0), None),
        (text(1, temperature="hot"), None),
        (b"{}", None),
        (b"nope", None),
        (b"\xff", None),
    ],
)
def test_a_bad_request_gets_a_flat_complaint(body, complaint):
    page = SGLANG_DIALECT.read_request(TEXT, body, SPEC)
    document = json.loads(page.body)
    assert page.status == document["code"] == 400
    assert list(document) == ["object", "message", "type", "param", "code"]
    assert document["object"] == "error"
    assert SGLANG.complaint(document["message"]) is complaint


def test_what_is_not_there_is_told_by_the_framework():
    page = SGLANG_DIALECT.read_request("/v1/nothing", b"{}", SPEC)
    assert (page.status, json.loads(page.body)) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("trouble", list(Trouble))
def test_every_trouble_has_words(trouble):
    page = SGLANG_DIALECT.complaint(trouble, SPEC)
    assert page.status >= 400
    assert bool(page.body) is (trouble is not Trouble.LOADING)
    if page.body:
        assert json.loads(page.body)


@pytest.mark.parametrize(
    ("trouble", "status", "complaint"),
    [
        (Trouble.OVERLOADED, 503, None),
        (Trouble.TOO_MANY, 429, None),
        (Trouble.PROMPT_TOO_LONG, 400, Complaint.PROMPT_TOO_LONG),
        (Trouble.KV_FULL, 500, Complaint.KV_CACHE_FULL),
        (Trouble.OUT_OF_MEMORY, 500, Complaint.OUT_OF_MEMORY),
        (Trouble.ENGINE_DEAD, 500, None),
    ],
)
def test_what_a_complaint_means(trouble, status, complaint):
    page = SGLANG_DIALECT.complaint(trouble, SPEC)
    assert page.status == status
    assert SGLANG.complaint(json.loads(page.body)["message"]) is complaint


# ---- streams and answers

END = b"0\r\n\r\n"


def stream_bytes(stream, frames):
    head = f"HTTP/1.1 {stream.status} OK\r\ncontent-type: {stream.content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in frames if frame) + END


def decode(stream, frames, api):
    decoder = StreamDecoder(api)
    decoder.feed(stream_bytes(stream, frames), 1_000_000)
    decoder.close()
    return decoder.result()


def frames_of(body):
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event.strip()]
    return [event if event == b"[DONE]" else json.loads(event) for event in events]


def asked_of(api, **changes):
    path = CHAT if api == "chat" else TEXT
    return replace(Asked(api, path, 9, (), 8, ignore_eos=False, stream=True, include_usage=True), **changes)


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("release", SGLANG_DIALECT.releases)
def test_a_stream_decodes_to_what_it_was_made_of(release, api, choices, finish):
    stream = SGLANG_DIALECT.stream(asked_of(api, choices=choices), spec_of(release), 1, T_NS)
    frames = [stream.opening(), stream.tokens([" a"]), stream.tokens([" b", ' "c"'])]
    frames.append(stream.ending(finish, Usage(9, 4 * choices), [" d"]))
    result = decode(stream, frames, api)
    assert (result.outcome, result.frames, result.finish_reason) == ("ok", 3 * choices, finish.value)
    assert (result.prompt_tokens, result.cached_tokens, result.completion_tokens) == (9, None, 4 * choices)
    assert frames[-1].endswith(b"data: [DONE]\n\n")


def test_text_of_a_chat_never_shares_a_frame_with_the_reason_why_it_ends():
    stream = SGLANG_DIALECT.stream(asked_of("chat"), SPEC, 1, T_NS)
    *content, finish, usage, done = frames_of(stream.ending(Finish.STOP, Usage(9, 4), [" d"]))
    assert [frame["choices"][0]["delta"]["content"] for frame in content] == [" d"]
    assert finish["choices"][0]["delta"] == {
        "role": None,
        "content": None,
        "reasoning_content": None,
        "tool_calls": None,
    }
    assert finish["choices"][0]["matched_stop"] == 151645
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 9,
        "total_tokens": 13,
        "completion_tokens": 4,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }
    assert done == b"[DONE]"


def test_an_ending_without_text_has_no_frame_for_text():
    stream = SGLANG_DIALECT.stream(asked_of("chat"), SPEC, 1, T_NS)
    assert len(frames_of(stream.ending(Finish.STOP, Usage(9, 4)))) == 3


def test_usage_comes_only_when_it_was_asked_for():
    stream = SGLANG_DIALECT.stream(asked_of("completions", include_usage=False), SPEC, 1, T_NS)
    frames = frames_of(stream.ending(Finish.LENGTH, Usage(9, 4), [" d"]))
    assert [frame["usage"] for frame in frames[:-1]] == [None]


def test_reasoning_has_a_channel_of_its_own():
    stream = SGLANG_DIALECT.stream(asked_of("chat"), SPEC, 1, T_NS)
    frames = [stream.opening(), stream.tokens([" hm"], reasoning=True), stream.ending(Finish.STOP, Usage(9, 1))]
    assert frames_of(frames[1])[0]["choices"][0]["delta"]["reasoning_content"] == " hm"
    result = decode(stream, frames, "chat")
    assert (result.outcome, result.frames, result.t_first_content_ns) == ("ok", 1, None)


def test_cached_tokens_are_told_only_where_the_server_was_asked_to():
    spec = spec_of(settings={"enable_cache_report": True})
    frames = [SGLANG_DIALECT.stream(asked_of("chat"), spec, 1, T_NS).ending(Finish.STOP, Usage(9, 1, cached_tokens=8))]
    assert frames_of(frames[0])[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


@pytest.mark.parametrize(
    ("trouble", "complaint"),
    [
        (Trouble.INTERNAL, None),
        (Trouble.KV_FULL, Complaint.KV_CACHE_FULL),
        (Trouble.OUT_OF_MEMORY, Complaint.OUT_OF_MEMORY),
    ],
)
def test_an_error_inside_a_stream_is_an_event_and_the_terminator_follows(trouble, complaint):
    stream = SGLANG_DIALECT.stream(asked_of("chat"), SPEC, 1, T_NS)
    frames = [stream.opening(), stream.tokens([" a"]), stream.error(trouble)]
    result = decode(stream, frames, "chat")
    assert (result.outcome, result.frames, result.finish_reason) == ("stream_error", 1, None)
    assert SGLANG.complaint(result.error) is complaint
    assert frames[-1].endswith(b"data: [DONE]\n\n")


def test_a_request_that_the_engine_could_not_finish_ends_in_an_error():
    stream = SGLANG_DIALECT.stream(asked_of("chat"), SPEC, 1, T_NS)
    result = decode(stream, [stream.opening(), stream.ending(Finish.KV_FULL, Usage(9, 1))], "chat")
    assert SGLANG.complaint(result.error) is Complaint.KV_CACHE_FULL
    page = SGLANG_DIALECT.answer(asked_of("chat"), SPEC, 1, T_NS, "", Finish.KV_FULL, Usage(9, 1))
    assert page.status == 500


@pytest.mark.parametrize(("api", "part"), [("chat", "message"), ("completions", "text")])
def test_an_answer_that_is_not_streamed(api, part):
    page = SGLANG_DIALECT.answer(asked_of(api, choices=2), SPEC, 1, T_NS, " a b", Finish.LENGTH, Usage(9, 4))
    document = json.loads(page.body)
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    assert part in document["choices"][0]
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == 4


# ---- other pages


def shape(document):
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    if isinstance(document, list):
        return [shape(document[0])] if document else []
    return None


def test_server_info_has_the_fields_of_the_composed_one():
    composed = json.loads((SAMPLES / "server_info_0.5.23_composed.json").read_text())
    own = json.loads(SGLANG_DIALECT.page("/server_info", FOUR_RANKS, snapshot_of()).body)
    assert shape(own) == shape(composed)
    assert len(own["internal_states"]) == 2


@pytest.mark.parametrize(
    ("path", "release", "found"),
    [
        ("/health", "0.4.9", True),
        ("/ready", "0.5.23", True),
        ("/ready", "0.5.5", False),
        ("/server_info", "0.5.5", False),
        ("/get_server_info", "0.5.5", True),
        ("/get_server_info", "0.5.23", True),
        ("/model_info", "0.5.23", True),
        ("/v1/models", "0.4.9", True),
        ("/version", "0.5.23", False),
    ],
)
def test_pages_come_and_go_with_releases(path, release, found):
    page = SGLANG_DIALECT.page(path, spec_of(release), snapshot_of())
    assert (page is not None) is found
    if page is not None:
        assert page.status == 200


def test_a_server_that_loads_is_not_ready():
    assert SGLANG_DIALECT.page("/ready", SPEC, snapshot_of(ready=False)).status == 503


def test_methods_that_a_path_does_not_have():
    assert SGLANG_DIALECT.page(CHAT, SPEC, snapshot_of()).status == 405
    assert SGLANG_DIALECT.post("/v1/models", b"", SPEC).status == 405
    assert SGLANG_DIALECT.post("/flush_cache", b"", SPEC).status == 200
    assert SGLANG_DIALECT.post("/tokenize", b"", SPEC) is None


def converse(conversation, spec, snapshot):
    answer = None
    while True:
        try:
            request = conversation.send(answer)
        except StopIteration as end:
            return end.value
        page = (
            SGLANG_DIALECT.metrics(spec, snapshot)
            if request.path == "/metrics"
            else SGLANG_DIALECT.page(request.path, spec, snapshot) or SGLANG_DIALECT.complaint(Trouble.NOT_FOUND, spec)
        )
        assert isinstance(page, Page)
        answer = HttpAnswer(page.status, {"content-type": page.content_type}, page.body, 0.01)


@pytest.mark.parametrize("spec", [spec_of("0.4.9"), spec_of("0.5.5"), SPEC, FOUR_RANKS])
def test_probing_a_simulated_server_finds_its_facts(spec):
    facts = converse(probe(), spec, snapshot_of())
    assert (facts.engine, facts.version, facts.model) == ("sglang", spec.release, "glm")
    assert facts.context_tokens == 2048
    assert facts.max_running_requests == 24
    assert facts.kv_cache_capacity_tokens == 16000


# ---- logs


def text_of(lines):
    return "\n".join(line.text for line in lines)


@pytest.mark.parametrize("release", SGLANG_DIALECT.releases)
def test_the_startup_log_tells_all_limits(release):
    lines = SGLANG_DIALECT.startup_log(spec_of(release), T_NS)
    assert logged_limits(SGLANG, text_of(lines)) == {
        "max_running_requests": 24,
        "kv_cache_capacity_tokens": 16000,
        "context_tokens": 2048,
    }
    assert lines[-1].text.endswith("] The server is fired up and ready to roll!")
    assert re.match(r"\[2026-11-29 \d\d:\d\d:\d\d\] server_args=ServerArgs\(model_path='/models/glm', ", lines[0].text)


@pytest.mark.parametrize(
    ("release", "lines"),
    [
        (
            "0.4.9",
            [
                "] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=66.00 GB, mem usage=14.00 GB.",
                "] KV Cache is allocated. #tokens: 16000, K size: 20.00 GB, V size: 20.00 GB",
                "] Memory pool end. avail mem=26.00 GB",
                "] Capture cuda graph end. Time elapsed: 7.50 s. mem usage=1.00 GB. avail mem=25.00 GB.",
                "max_running_requests=24, context_len=2048\n",
            ],
        ),
        ("0.5.5", ["max_running_requests=24, context_len=2048, available_gpu_mem=25.00 GB"]),
        (
            "0.5.23",
            [
                "] Load weight end. elapsed=10.20 s, type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=66.00 GB, ",
                "] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 16000, K size: 20.00 GB, V size: 20.00 GB",
                "CUDA graph end. elapsed=7.50 s, mem usage=1.00 GB, avail mem=25.00 GB.",
            ],
        ),
    ],
)
def test_log_lines_change_with_releases(release, lines):
    log = text_of(SGLANG_DIALECT.startup_log(spec_of(release), T_NS))
    for line in lines:
        assert line in log


def test_a_batch_limit_that_was_cut_is_told():
    log = text_of(SGLANG_DIALECT.startup_log(spec_of(asked_max_batch=64), T_NS))
    assert "max_running_requests was reduced from the requested 64 to 24 (per dp worker)" in log
    assert "max_running_requests=64" in log.splitlines()[0]
    assert logged_limits(SGLANG, log)["max_running_requests"] == 24
    assert "was reduced" not in text_of(SGLANG_DIALECT.startup_log(SPEC, T_NS))


def test_each_rank_has_its_lines_and_the_first_tells_the_sizes():
    log = text_of(SGLANG_DIALECT.startup_log(FOUR_RANKS, T_NS))
    assert re.findall(r"^\[\S+ \S+ (DP\d) (TP\d) (EP\d)\] Load weight end", log, re.MULTILINE) == [
        ("DP0", "TP0", "EP0"),
        ("DP0", "TP1", "EP1"),
        ("DP1", "TP2", "EP2"),
        ("DP1", "TP3", "EP3"),
    ]
    assert len(re.findall(r"max_total_num_tokens=8000, .*max_running_requests=12", log)) == 1


FAILURES = {
    StartFailure.WEIGHTS_MISSING: ("Cannot find any model weights", None),
    StartFailure.WEIGHTS_OUT_OF_MEMORY: ("torch.OutOfMemoryError", Complaint.OUT_OF_MEMORY),
    StartFailure.NO_KV_CACHE: ("Not enough memory. Please try to increase", Complaint.OUT_OF_MEMORY),
    StartFailure.KV_BELOW_ONE_REQUEST: ("Memory pool size is too small", Complaint.KV_CACHE_FULL),
    StartFailure.WARMUP_OUT_OF_MEMORY: ("out of memory", Complaint.OUT_OF_MEMORY),
}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("failure", list(StartFailure))
def test_a_failed_start_is_told_and_ends_the_log(failure, graphs):
    spec = SPEC if graphs else spec_of(settings={"disable_cuda_graph": True})
    lines = SGLANG_DIALECT.startup_log(spec, T_NS, failure)
    words, complaint = FAILURES[failure]
    told = [line.text for line in lines if words in line.text]
    assert told
    assert SGLANG.complaint(told[-1]) is complaint
    assert "Received sigquit" in lines[-1].text
    assert "fired up" not in text_of(lines)


@pytest.mark.parametrize("failure", [None, *StartFailure])
def test_log_lines_are_in_order_of_time_and_within_the_start(failure):
    seconds = [line.seconds for line in SGLANG_DIALECT.startup_log(spec_of(start_seconds=120.0), T_NS, failure)]
    assert seconds == sorted(seconds)
    assert (seconds[-1] == 120.0) is (failure is None)


@pytest.mark.parametrize(
    ("trouble", "complaint"),
    [
        (Trouble.OUT_OF_MEMORY, Complaint.OUT_OF_MEMORY),
        (Trouble.KV_FULL, Complaint.KV_CACHE_FULL),
        (Trouble.ENGINE_DEAD, None),
    ],
)
def test_a_death_says_why(trouble, complaint):
    lines = SGLANG_DIALECT.death_log(trouble, SPEC, T_NS)
    meanings = {SGLANG.complaint(line.text) for line in lines} - {None}
    assert meanings == ({complaint} if complaint else set())
    assert "sigquit" in lines[-1].text.lower()
