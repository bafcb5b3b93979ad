"""What a simulated vLLM says has the shape of what a real one said, and means what the simulator meant.

The captures are those of release 0.32.0; each schema test compares structure, not figures.
"""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.conversation import HttpAnswer
from serving.engines import ENGINES, Complaint, probe
from serving.exposition import Histogram, parse
from serving.simulator.dialects.base import Asked, Page, StartFailure, Trouble, Usage, tokenise
from serving.simulator.dialects.vllm import VLLM_DIALECT
from serving.simulator.spec import Finish, GpuView, MemoryPlan, ProcessView, ServerSpec, Snapshot
from serving.startup import logged_limits
from serving.stream import StreamDecoder

SAMPLES = Path(__file__).parents[2] / "samples" / "vllm"
VLLM = ENGINES["vllm"]
T_NS = 1_795_966_868_000_000_000
STARTED_NS = 1_795_965_046_260_000_000
END = b"0\r\n\r\n"


class Instant:
    def seconds(self, work):
        return 0.01


def spec_of(release="0.32.0", **changes):
    memory = MemoryPlan(
        cards=1,
        card_total_bytes=80 * 2**30,
        weights_bytes=14 * 2**30,
        kv_cache_bytes=40 * 2**30,
        workspace_bytes=4 * 2**30,
    )
    spec = ServerSpec(
        engine="vllm",
        release=release,
        model="tiny",
        max_batch=8,
        context_tokens=2048,
        token_budget=2048,
        block_tokens=16,
        kv_blocks=1001,
        cost=Instant(),
        memory=memory,
    )
    return replace(spec, **changes)


SPEC = spec_of()
CPU_SPEC = spec_of(memory=MemoryPlan(cards=0, kv_cache_bytes=2**30))


def histogram(signal, counts):
    edges = VLLM_DIALECT.edges[signal]
    padded = [*counts, *[0] * (len(edges) + 1 - len(counts))]
    cumulative = tuple(float(sum(padded[: i + 1])) for i in range(len(padded)))
    return Histogram((*edges, math.inf), cumulative, sum(counts) * 0.125)


def snapshot_of(**changes):
    snapshot = Snapshot(
        t_ns=T_NS,
        started_ns=STARTED_NS,
        ready=True,
        running=5,
        waiting=3,
        kv_blocks_used=250,
        prompt_tokens=4066,
        cached_tokens=512,
        generated_tokens=6024,
        preemptions=7,
        finished={Finish.LENGTH: 64, Finish.STOP: 11, Finish.CANCELLED: 8, Finish.REJECTED: 2},
        http={
            ("/v1/chat/completions", 200): 70,
            ("/v1/models", 200): 1,
            ("/v1/completions", 200): 5,
            ("/v1/chat/completions", 400): 4,
            ("/v1/chat/completions", 404): 1,
            ("/slots", 404): 6,
            ("/health", 200): 99,
        },
        steps=1197,
        step_tokens=10090,
        prefill_seconds=2.75,
        decode_seconds=89.5,
        histograms={
            "time_to_first_token_seconds": histogram("time_to_first_token_seconds", [0, 1, 2, 72]),
            "inter_token_latency_seconds": histogram("inter_token_latency_seconds", [2955, 1880, 1114]),
            "request_duration_seconds": histogram("request_duration_seconds", [5, 10, 60]),
            "request_queue_seconds": histogram("request_queue_seconds", [75]),
        },
        slots=(),
        longest_tokens=900,
        gpus=(GpuView("GPU-0", "NVIDIA H200", 60 * 2**30, 80 * 2**30, 0.5, 300.0, 60.0),),
        process=ProcessView(anonymous_memory_bytes=3 * 2**30, open_fds=46, cpu_seconds=22.45),
    )
    return replace(snapshot, **changes)


def read(spec, snapshot, **options):
    page = VLLM_DIALECT.metrics(spec, snapshot, **options)
    exposition = parse(page.body)
    assert exposition.bad_lines == 0
    return VLLM.read(exposition)


# ---- captures


def captured(name):
    """(status, headers, body) of a recorded answer."""
    head, _, body = (SAMPLES / name).read_bytes().partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length")
    return int(status.split()[1]), headers, body if length is None else body[: int(length)]


def headers_of(page):
    """As a transport would send them."""
    headers = {name.lower(): value for name, value in page.headers}
    if page.content_type:
        headers["content-type"] = page.content_type
    if isinstance(page, Page):
        headers["content-length"] = str(len(page.body))
    return headers


def same_headers(page, recorded):
    """Which headers there are, and the values of those that do not depend on the moment."""
    own = headers_of(page)
    assert own.keys() == recorded.keys() - {"date", "transfer-encoding"}
    varying = ("content-length", "date", "transfer-encoding")
    assert {name: own[name] for name in own if name not in varying} == {
        name: value for name, value in recorded.items() if name not in varying
    }


def shape(document):
    """Keys and order of a JSON document, recursively; a scalar is only a scalar, and a list is its first element."""
    if isinstance(document, dict):
        return [(key, shape(value)) for key, value in document.items()]
    if isinstance(document, list):
        return [shape(document[0])] if document else []
    return None


def families(text):
    """Family -> (type, label names of its samples)."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helped = set(re.findall(r"^# HELP (\S+) ", text, re.MULTILINE))
    assert helped == kinds.keys()
    labels = {name: set() for name in kinds}
    for name, samples in parse(text).samples.items():
        family = max((kind for kind in kinds if name.startswith(kind)), key=len)
        for found, _ in samples:
            labels[family].add((name.removeprefix(family), frozenset(found)))
    return {name: (kind, frozenset(labels[name])) for name, kind in kinds.items()}


PYTHON_OWN = {
    # The interpreter of the API server: which one it is and what its garbage collector did says nothing of the engine.
    "python_gc_objects_collected_total",
    "python_gc_objects_uncollectable_total",
    "python_gc_collections_total",
    "python_info",
}


@pytest.mark.parametrize(
    "name",
    [
        "metrics_idle.txt",
        "metrics_under_load.txt",
        "metrics_after_load.txt",
        "metrics_kv_pressure.txt",
        "small_moe/metrics_batch_slots.txt",
        "small_moe/metrics_kv_cache.txt",
    ],
)
def test_the_metrics_page_has_the_families_types_and_labels_of_the_recorded_one(name):
    recorded = families((SAMPLES / name).read_text())
    page = VLLM_DIALECT.metrics(SPEC, snapshot_of())
    own = families(page.body.decode())
    assert own == {family: what for family, what in recorded.items() if family not in PYTHON_OWN}
    assert recorded.keys() >= PYTHON_OWN
    assert page.content_type == "text/plain; version=1.0.0; charset=utf-8"


def test_but_for_its_figures_the_page_is_the_recorded_one_to_the_letter():
    """The server of the 34 blocks again: the same lines in the same order, with the same labels and edges."""
    recorded = (SAMPLES / "metrics_kv_pressure.txt").read_text()
    settings = {"num_gpu_blocks_override": 34, "kv_cache_memory_bytes": 2**30, "user_specified_block_size": True}
    spec = spec_of(context_tokens=1024, block_tokens=32, kv_blocks=34, settings=settings)
    own = VLLM_DIALECT.metrics(spec, snapshot_of(http={(CHAT, 200): 8})).body.decode()

    def lines(page):
        # Help is a sentence, and no sentence is copied.
        kept = [line for line in page.splitlines() if not line.startswith("# HELP")]
        named = [line.removeprefix("# TYPE ") if line[0] == "#" else line.rpartition(" ")[0] for line in kept]
        return [line for line in named if re.match(r"\w+", line)[0] not in PYTHON_OWN]

    assert lines(own) == lines(recorded)


def test_the_recorded_page_of_the_34_blocks_reads_the_same_as_the_simulated_one():
    """The same state of the server: three running, five waiting, 28 of 33 blocks that requests can hold."""
    spec = spec_of(context_tokens=1024, block_tokens=32, kv_blocks=34)
    recorded = VLLM.read(parse((SAMPLES / "metrics_kv_pressure.txt").read_bytes()))
    values = recorded.values
    snapshot = snapshot_of(
        started_ns=round(values["engine_start_timestamp_seconds"] * 1e9),
        running=values["requests_running"],
        waiting=values["requests_waiting"],
        kv_blocks_used=28,
        prompt_tokens=values["prompt_tokens_total"],
        cached_tokens=values["prompt_tokens_cached_total"],
        generated_tokens=values["generation_tokens_total"],
        preemptions=values["request_preemptions_total"],
        finished={Finish.LENGTH: 8},
        steps=values["engine_progress_total"],
        histograms=recorded.histograms,
    )
    own = read(spec, snapshot)
    assert own.values == values
    assert own.sources == recorded.sources
    assert own.histograms == recorded.histograms


def stream_bytes(stream, frames):
    head = f"HTTP/1.1 {stream.status} OK\r\ncontent-type: {stream.content_type}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in stream.headers) + "transfer-encoding: chunked\r\n\r\n"
    return head.encode() + b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in frames if frame) + END


def decode(data, api):
    decoder = StreamDecoder(api)
    decoder.feed(data, 1_000_000)
    decoder.close()
    return decoder.result()


def frames_of(body):
    """What stands in the events of a stream; the terminator as it is."""
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event.strip()]
    return [event if event == b"[DONE]" else json.loads(event) for event in events]


def kind_of(frame):
    if frame == b"[DONE]":
        return "done"
    if not frame["choices"]:
        return "usage"
    choice = frame["choices"][0]
    role = choice.get("delta", {}).get("role")
    return "finish" if choice["finish_reason"] else "role" if role else "content"


def asked_of(name, **changes):
    asked = Asked(
        api="completions" if "completion" in name else "chat",
        path="/v1/completions" if "completion" in name else "/v1/chat/completions",
        prompt_tokens=9 if "completion" in name else 17,
        prefix=(),
        output_tokens=8,
        ignore_eos=False,
        stream=True,
        include_usage="nousage" not in name,
        choices=2 if "n2" in name else 1,
    )
    return replace(asked, **changes)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("sse_chat.txt", 8),
        ("sse_chat_usage.txt", 8),
        ("sse_chat_nousage.txt", 4),
        ("sse_completion_usage.txt", 8),
        ("sse_completion_nousage.txt", 4),
        ("sse_completion_n2.txt", 3),
        ("small_moe/sse_chat_usage.txt", 8),
        ("small_moe/sse_completion_usage.txt", 8),
    ],
)
def test_a_stream_has_the_frames_of_the_recorded_one(name, tokens):
    asked = asked_of(name)
    stream = VLLM_DIALECT.stream(asked, SPEC, 1, T_NS)
    status, headers, body = captured(name)
    usage = Usage(asked.prompt_tokens, tokens * asked.choices)
    frames = [stream.opening(), *(stream.tokens([f" word{i}"]) for i in range(tokens - 1))]
    frames.append(stream.ending(Finish.LENGTH, usage, [" end"]))

    assert status == stream.status
    same_headers(stream, headers)
    own, theirs = frames_of(b"".join(frames)), frames_of(body)
    assert [(kind_of(frame), shape(frame)) for frame in own if frame != b"[DONE]"] == [
        (kind_of(frame), shape(frame)) for frame in theirs if frame != b"[DONE]"
    ]
    assert [kind_of(frame) for frame in own] == [kind_of(frame) for frame in theirs]
    assert [choice["index"] for frame in own[:-1] for choice in frame["choices"]] == [
        choice["index"] for frame in theirs[:-1] for choice in frame["choices"]
    ]

    ours = decode(stream_bytes(stream, frames), asked.api)
    real = decode(stream_bytes(stream, [body]), asked.api)
    assert (ours.outcome, ours.finish_reason, ours.frames) == (real.outcome, real.finish_reason, real.frames)
    assert (ours.prompt_tokens, ours.cached_tokens, ours.completion_tokens) == (
        real.prompt_tokens,
        real.cached_tokens,
        real.completion_tokens,
    )


def test_without_usage_the_fingerprint_is_in_the_last_frame_only():
    stream = VLLM_DIALECT.stream(asked_of("sse_completion_nousage.txt", choices=2), SPEC, 1, T_NS)
    first, second, done = frames_of(stream.ending(Finish.STOP, Usage(9, 2), [" a"]))
    assert "system_fingerprint" not in first
    assert second["system_fingerprint"].startswith("vllm-0.32.0-")
    assert done == b"[DONE]"


def test_several_tokens_share_one_frame_as_they_do_under_load():
    stream = VLLM_DIALECT.stream(asked_of("sse_chat_usage.txt"), SPEC, 1, T_NS)
    (frame,) = frames_of(stream.tokens([" a", " b", ' "c"\n']))
    assert frame["choices"][0]["delta"]["content"] == ' a b "c"\n'


@pytest.mark.parametrize(("release", "name"), [("0.33.0", "reasoning"), ("0.10.2", "reasoning_content")])
def test_reasoning_has_a_channel_of_its_own(release, name):
    stream = VLLM_DIALECT.stream(asked_of("sse_chat_usage.txt"), spec_of(release), 1, T_NS)
    frames = [stream.opening(), stream.tokens([" hm"], reasoning=True), stream.tokens([" so"])]
    assert frames_of(frames[1])[0]["choices"][0]["delta"] == {name: " hm"}
    result = decode(stream_bytes(stream, [*frames, stream.ending(Finish.STOP, Usage(3, 2))]), "chat")
    assert (result.outcome, result.frames, result.finish_reason) == ("ok", 2, "stop")


@pytest.mark.parametrize("trouble", [Trouble.INTERNAL, Trouble.ENGINE_DEAD])
def test_an_error_inside_a_stream_is_an_event_and_the_terminator_follows(trouble):
    stream = VLLM_DIALECT.stream(asked_of("sse_chat_usage.txt"), SPEC, 1, T_NS)
    frames = [stream.opening(), stream.tokens([" a"]), stream.error(trouble)]
    result = decode(stream_bytes(stream, frames), "chat")
    assert (result.outcome, result.frames, result.finish_reason) == ("stream_error", 1, None)
    assert result.error == (
        "Internal server error"
        if trouble is Trouble.INTERNAL
        else "EngineCore encountered an issue. See stack trace (above) for the root cause."
    )
    assert frames[-1].endswith(b"data: [DONE]\n\n")
    assert b"boom" in stream.error(Trouble.INTERNAL, "boom")


@pytest.mark.parametrize("finish", [Finish.KV_FULL, Finish.DIED])
def test_a_request_that_the_engine_could_not_finish_ends_in_an_error(finish):
    stream = VLLM_DIALECT.stream(asked_of("sse_chat_usage.txt"), SPEC, 1, T_NS)
    assert b'"error"' in stream.ending(finish, Usage(3, 2))
    assert VLLM_DIALECT.answer(asked_of("chat"), SPEC, 1, T_NS, " a", finish, Usage(3, 2)).status == 500


@pytest.mark.parametrize("name", ["chat_nonstream.txt", "completion_nonstream.txt", "completion_token_ids.txt"])
def test_an_answer_that_is_not_streamed_has_the_recorded_shape(name):
    status, headers, body = captured(name)
    asked = asked_of(name, stream=False)
    page = VLLM_DIALECT.answer(asked, SPEC, 1, T_NS, " batos banora", Finish.LENGTH, Usage(10, 4))
    assert page.status == status
    same_headers(page, headers)
    assert shape(json.loads(page.body)) == shape(json.loads(body))
    document = json.loads(page.body)
    assert document["usage"]["total_tokens"] == 14
    assert document["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_are_told_only_where_the_server_was_asked_to():
    spec = spec_of(settings={"enable_prompt_tokens_details": True})
    asked, usage = asked_of("sse_chat_usage.txt"), Usage(17, 8, cached_tokens=16)
    told = VLLM_DIALECT.stream(asked, spec, 1, T_NS).ending(Finish.LENGTH, usage)
    silent = VLLM_DIALECT.stream(asked, SPEC, 1, T_NS).ending(Finish.LENGTH, usage)
    assert frames_of(told)[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert "prompt_tokens_details" not in frames_of(silent)[-2]["usage"]


# ---- requests and complaints

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(content="hello there", **fields):
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}).encode()


LONG = "word " * 7199 + "four"  # 35,999 characters


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("err_bad_json.txt", CHAT, b'{"model":nope}'),
        ("err_bad_model.txt", CHAT, chat(model="nope")),
        ("err_bad_temp.txt", CHAT, chat(temperature="hot")),
        ("err_neg_max.txt", CHAT, chat(max_tokens=-5)),
        ("err_zero_max.txt", CHAT, chat(max_tokens=0)),
        ("err_no_messages.txt", CHAT, b'{"model":"tiny"}'),
        ("err_prompt_too_long_stream.txt", TEXT, json.dumps({"prompt": LONG, "stream": True}).encode()),
        ("small_moe/err_prompt_too_long_stream.txt", TEXT, json.dumps({"prompt": LONG, "stream": True}).encode()),
        ("max_tokens_over_context.txt", TEXT, json.dumps({"prompt": "a b", "max_tokens": 100000}).encode()),
        ("err_404.txt", "/v1/nothing", b"{}"),
    ],
)
def test_a_bad_request_gets_the_recorded_complaint(name, path, body):
    """To the letter: the same requests, as far as they are known, give the same bodies."""
    status, headers, recorded = captured(name)
    page = VLLM_DIALECT.read_request(path, body, SPEC)
    assert isinstance(page, Page)
    assert page.status == status
    same_headers(page, headers)
    own, theirs = json.loads(page.body), json.loads(recorded)
    assert own == theirs
    if "error" in theirs:
        assert VLLM.complaint(own["error"]["message"]) is VLLM.complaint(theirs["error"]["message"])


@pytest.mark.parametrize(
    ("name", "trouble", "detail"),
    [
        ("err_bad_json.txt", Trouble.BAD_JSON, None),
        ("err_bad_model.txt", Trouble.UNKNOWN_MODEL, {"model": "nope"}),
        ("err_bad_temp.txt", Trouble.BAD_FIELD, None),
        ("err_neg_max.txt", Trouble.BAD_MAX_TOKENS, {"asked": -5}),
        ("err_zero_max.txt", Trouble.BAD_MAX_TOKENS, {"asked": 0}),
        ("max_tokens_over_context.txt", Trouble.BAD_MAX_TOKENS, {"asked": 100000}),
        ("err_no_messages.txt", Trouble.MISSING_MESSAGES, None),
        ("err_prompt_too_long_stream.txt", Trouble.PROMPT_TOO_LONG, {"prompt_tokens": 7200}),
        ("err_404.txt", Trouble.NOT_FOUND, None),
        ("err_405.txt", Trouble.METHOD_NOT_ALLOWED, None),
    ],
)
def test_a_complaint_by_name_has_the_recorded_status_shape_and_meaning(name, trouble, detail):
    status, headers, recorded = captured(name)
    page = VLLM_DIALECT.complaint(trouble, SPEC, detail)
    assert page.status == status
    same_headers(page, headers)
    own, theirs = json.loads(page.body), json.loads(recorded)
    assert shape(own) == shape(theirs)
    if "error" in theirs:
        assert (own["error"]["type"], own["error"]["code"]) == (theirs["error"]["type"], theirs["error"]["code"])
        assert VLLM.complaint(own["error"]["message"]) is VLLM.complaint(theirs["error"]["message"])


@pytest.mark.parametrize("release", VLLM_DIALECT.releases)
@pytest.mark.parametrize("trouble", list(Trouble))
def test_every_trouble_has_words_in_every_release(trouble, release):
    page = VLLM_DIALECT.complaint(trouble, spec_of(release))
    assert page.status >= 400
    if page.body:
        assert json.loads(page.body)


@pytest.mark.parametrize("release", VLLM_DIALECT.releases)
def test_a_prompt_that_is_too_long_is_known_as_such_in_every_release(release):
    spec = spec_of(release)
    for tokens in (3000, 2048):
        body = json.dumps({"prompt": "a " * tokens}).encode()
        page = VLLM_DIALECT.read_request(TEXT, body, spec)
        document = json.loads(page.body)
        message = document.get("error", document)["message"]
        assert page.status == 400
        assert VLLM.complaint(message) is Complaint.PROMPT_TOO_LONG


def test_a_valid_request_is_read():
    asked = VLLM_DIALECT.read_request(
        CHAT,
        chat("one two three", max_tokens=7, ignore_eos=True, stream=True, stream_options={"include_usage": True}, n=2),
        SPEC,
    )
    assert asked == Asked(
        api="chat",
        path=CHAT,
        prompt_tokens=6,
        prefix=(),
        output_tokens=7,
        ignore_eos=True,
        stream=True,
        include_usage=True,
        choices=2,
    )


def test_prompts_that_begin_alike_share_their_first_blocks():
    """What the prefix cache finds: the chat template goes before, and is the same."""
    words = " ".join(f"w{i}" for i in range(40))
    first, second = (VLLM_DIALECT.read_request(CHAT, chat(words + tail), SPEC) for tail in (" a b", " c d"))
    assert len(first.prefix) == len(second.prefix) == 2
    assert first.prefix == second.prefix == tokenise(f"<|user|> {words}", 16)[1]


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        (TEXT, {"prompt": "a b"}, 16),
        (CHAT, {"messages": [{"role": "user", "content": "a b"}]}, 2048 - 5),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]}, 2048 - 5),
        (CHAT, {"messages": [{"role": "user", "content": "a b"}], "max_completion_tokens": 9, "max_tokens": 5}, 9),
        (TEXT, {"prompt": ["a b", "c d"], "max_tokens": 4}, 4),
        (TEXT, {"prompt": [1, 2, 3], "max_tokens": "4"}, 4),
        (TEXT, {"prompt": "a " * 2000, "max_tokens": 100}, 48),
    ],
)
def test_how_many_tokens_are_generated(path, body, output):
    assert VLLM_DIALECT.read_request(path, json.dumps(body).encode(), SPEC).output_tokens == output


@pytest.mark.parametrize("release", ["0.8.5", "0.10.2", "0.12.0", "0.20.2"])
def test_older_releases_refuse_what_does_not_fit_together(release):
    body = json.dumps({"prompt": "a " * 2000, "max_tokens": 100}).encode()
    page = VLLM_DIALECT.read_request(TEXT, body, spec_of(release))
    document = json.loads(page.body)
    assert page.status == 400
    assert VLLM.complaint(document.get("error", document)["message"]) is Complaint.PROMPT_TOO_LONG


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (2047, None),
        (2048, "The decoder prompt (length 2048) plus the number of requested output tokens (at least 1)"),
        (2049, "your prompt contains at least 2049 input tokens"),
    ],
)
def test_where_a_prompt_becomes_too_long(tokens, words):
    page = VLLM_DIALECT.read_request(TEXT, json.dumps({"prompt": "a " * tokens}).encode(), SPEC)
    if words is None:
        assert page.output_tokens == 1
    else:
        assert words in json.loads(page.body)["error"]["message"]


def test_a_long_message_is_refused_by_its_characters_like_a_long_prompt():
    page = VLLM_DIALECT.read_request(CHAT, chat("x" * 26_625), SPEC)
    assert "26625 characters (more than 26624 characters" in json.loads(page.body)["error"]["message"]
    assert VLLM_DIALECT.read_request(CHAT, chat("x" * 26_624), SPEC).prompt_tokens == 4


def test_fields_are_taken_as_leniently_as_pydantic_takes_them():
    body = {"prompt": ["a", "b"], "n": 2.0, "max_tokens": "7", "stream": 1, "ignore_eos": 0, "temperature": "0.5"}
    asked = VLLM_DIALECT.read_request(TEXT, json.dumps(body).encode(), SPEC)
    assert (asked.choices, asked.output_tokens, asked.stream, asked.ignore_eos) == (4, 7, True, False)
    body = {"prompt": "a", "stream": "True", "ignore_eos": "off"}
    asked = VLLM_DIALECT.read_request(TEXT, json.dumps(body).encode(), SPEC)
    assert (asked.stream, asked.ignore_eos) == (True, False)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (TEXT, b"\xff", 400),
        (TEXT, b"[" * 100_000, 400),
        (TEXT, b"[]", 400),
        (TEXT, b"{}", 400),
        (TEXT, b'{"prompt": ""}', 400),
        (TEXT, b'{"prompt": 5}', 400),
        (TEXT, b'{"prompt": "a", "n": 0}', 400),
        (TEXT, b'{"prompt": "a", "max_tokens": 1.5}', 400),
        (TEXT, b'{"prompt": "a", "max_tokens": [1]}', 400),
        (TEXT, b'{"prompt": "a", "max_tokens": "many"}', 400),
        (TEXT, b'{"prompt": "a", "stream": "perhaps"}', 400),
        (TEXT, b'{"prompt": "a", "stream_options": {"include_usage": true}}', 400),
        (TEXT, b'{"prompt": "a", "stream_options": 5}', 400),
        (TEXT, b'{"prompt": "a", "model": 5}', 400),
        (CHAT, b'{"messages": "a"}', 400),
        (CHAT, b'{"messages": ["a"]}', 400),
        (CHAT, b'{"messages": [{"content": "a"}], "temperature": [1]}', 400),
        (TEXT, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400),
        (TEXT, b'{"prompt": "a \\ud800"}', 400),
        (TEXT, b'{"prompt": "a", "model": "\\ud800"}', 400),
        (TEXT, b'{"prompt": "a", "temperature": "\\ud800"}', 400),
        (CHAT, b'{"messages": [{"role": "\\ud800", "content": "a"}]}', 400),
        (TEXT, b'{"prompt": "a", "n": 16385}', 400),
        ("/tokenise", b"{}", 404),
    ],
)
def test_what_is_not_a_request_is_refused(path, body, status):
    page = VLLM_DIALECT.read_request(path, body, SPEC)
    assert page.status == status
    assert json.loads(page.body)


def test_all_faults_of_a_body_are_told_at_once():
    page = VLLM_DIALECT.read_request(CHAT, b'{"temperature": "hot", "n": "two"}', SPEC)
    message = json.loads(page.body)["error"]["message"]
    assert message.startswith("3 validation errors:\n")
    assert Counter(re.findall(r"'loc': '(\S+)'", message)) == Counter(["body.messages", "body.temperature", "body.n"])


# ---- other pages


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("get_health.txt", "/health"),
        ("get_ping.txt", "/ping"),
        ("get_load.txt", "/load"),
        ("get_version.txt", "/version"),
        ("get_tokenize.txt", "/tokenize"),
        ("err_405.txt", "/v1/chat/completions"),
        ("models.txt", "/v1/models"),
        ("get_props.txt", "/props"),
        ("get_slots.txt", "/slots"),
        ("get_ready.txt", "/ready"),
        ("get_server_info.txt", "/server_info"),
    ],
)
def test_a_page_answers_as_recorded(name, path):
    status, headers, recorded = captured(name)
    page = VLLM_DIALECT.page(path, SPEC, snapshot_of())
    if status == 404:
        assert page is None
        page = VLLM_DIALECT.complaint(Trouble.NOT_FOUND, SPEC, {"path": path})
    assert page.status == status
    same_headers(page, headers)
    if name == "models.txt":
        assert shape(json.loads(page.body)) == shape(json.loads(recorded))
    else:
        assert page.body == recorded


def test_posts_that_generate_nothing():
    body = json.dumps({"prompt": "a b a"}).encode()
    tokens = json.loads(VLLM_DIALECT.post("/tokenize", body, SPEC).body)
    assert (tokens["count"], tokens["max_model_len"]) == (3, 2048)
    assert tokens["tokens"][0] == tokens["tokens"][2] != tokens["tokens"][1]
    assert json.loads(VLLM_DIALECT.post("/tokenize", chat("a b"), SPEC).body)["count"] == 5
    assert VLLM_DIALECT.post("/tokenize", chat(model="nope"), SPEC).status == 404
    assert VLLM_DIALECT.post("/tokenize", b"{}", SPEC).status == 400
    assert VLLM_DIALECT.post("/version", b"", SPEC).status == 405
    assert VLLM_DIALECT.post("/ping", b"", SPEC).status == 200
    assert VLLM_DIALECT.post("/generate", b"", SPEC) is None


@pytest.mark.parametrize("release", VLLM_DIALECT.releases)
def test_probing_a_simulated_server_finds_its_facts(release):
    spec, snapshot = spec_of(release), snapshot_of()
    facts = converse(probe(), spec, snapshot)
    assert (facts.engine, facts.version, facts.model) == ("vllm", release, "tiny")
    assert facts.context_tokens == 2048
    assert facts.kv_cache_capacity_tokens == 1001 * 16
    assert facts.max_running_requests is None


def converse(conversation, spec, snapshot):
    answer = None
    while True:
        try:
            request = conversation.send(answer)
        except StopIteration as end:
            return end.value
        page = (
            VLLM_DIALECT.metrics(spec, snapshot)
            if request.path == "/metrics"
            else VLLM_DIALECT.page(request.path, spec, snapshot) or VLLM_DIALECT.complaint(Trouble.NOT_FOUND, spec)
        )
        answer = HttpAnswer(page.status, headers_of(page), page.body, 0.01)


# ---- metrics of all releases

ALIASES = {
    "0.8.5": ("vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds", None, "blocks"),
    "0.10.2": (
        "vllm:kv_cache_usage_perc",
        "vllm:inter_token_latency_seconds",
        "vllm:prefix_cache_hits_total",
        "blocks",
    ),
    "0.12.0": (
        "vllm:kv_cache_usage_perc",
        "vllm:inter_token_latency_seconds",
        "vllm:prefix_cache_hits_total",
        "blocks",
    ),
    "0.20.2": (
        "vllm:kv_cache_usage_perc",
        "vllm:inter_token_latency_seconds",
        "vllm:prompt_tokens_cached_total",
        "blocks",
    ),
    "0.32.0": (
        "vllm:kv_cache_usage_perc",
        "vllm:inter_token_latency_seconds",
        "vllm:prompt_tokens_cached_total",
        "tokens",
    ),
    "0.33.0": (
        "vllm:kv_cache_usage_perc",
        "vllm:inter_token_latency_seconds",
        "vllm:prompt_tokens_cached_total",
        "tokens",
    ),
}


def test_every_release_is_in_the_table_of_aliases():
    assert tuple(VLLM_DIALECT.releases) == tuple(reversed(ALIASES))


@pytest.mark.parametrize("release", ALIASES)
def test_what_the_engine_table_reads_is_what_the_snapshot_says(release):
    snapshot = snapshot_of()
    reading = read(spec_of(release), snapshot)
    usage, between, cached, capacity = ALIASES[release]
    aborted = 8 if release in ("0.8.5", "0.10.2", "0.12.0") else 0
    expected = {
        "requests_running": 5,
        "requests_waiting": 3,
        "kv_cache_usage_ratio": 0.25,
        "kv_cache_capacity_tokens": 1001 * 16,
        "request_preemptions_total": 7,
        "prompt_tokens_total": 4066,
        "prompt_tokens_cached_total": 512,
        "generation_tokens_total": 6024,
        "requests_finished_total": 75 + aborted,
        "request_errors_total": 0,
        "engine_progress_total": 1197,
        "engine_start_timestamp_seconds": STARTED_NS / 1e9,
    }
    if cached is None:
        expected.pop("prompt_tokens_cached_total")
    assert reading.values == expected
    assert reading.histograms == snapshot.histograms
    assert reading.sources["kv_cache_usage_ratio"] == usage
    assert reading.sources["inter_token_latency_seconds"] == between
    assert reading.sources.get("prompt_tokens_cached_total") == cached
    assert reading.sources["engine_start_timestamp_seconds"] == "process_start_time_seconds"
    assert reading.is_proxy("kv_cache_capacity_tokens") is (capacity == "blocks")
    assert not reading.at_finish


@pytest.mark.parametrize(
    ("release", "present", "absent"),
    [
        ("0.8.5", ["gpu_prefix_cache_hits_total"], ["kv_cache_usage_perc", "prompt_tokens_by_source_total"]),
        (
            "0.10.2",
            ["gpu_cache_usage_perc", "kv_cache_usage_perc", "time_per_output_token_seconds_sum"],
            ["engine_sleep_state"],
        ),
        (
            "0.12.0",
            ["engine_sleep_state", "request_time_per_output_token_seconds_sum"],
            ["gpu_cache_usage_perc", "time_per_output_token_seconds_sum", "num_requests_waiting_by_reason"],
        ),
        ("0.20.2", ["num_requests_waiting_by_reason", "estimated_flops_per_gpu_total"], ["admission_rejections_total"]),
        ("0.33.0", ["admission_rejections_total", "prompt_tokens_cached_by_source_total"], ["gpu_cache_usage_perc"]),
    ],
)
def test_families_come_and_go_with_releases(release, present, absent):
    names = parse(VLLM_DIALECT.metrics(spec_of(release), snapshot_of()).body).samples
    assert {f"vllm:{name}" for name in present} <= names.keys()
    assert not {f"vllm:{name}" for name in absent} & names.keys()


def test_older_releases_say_the_older_content_type():
    assert VLLM_DIALECT.metrics(spec_of("0.10.2"), snapshot_of()).content_type.startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("release", ["0.8.5", "0.33.0"])
def test_after_a_silent_rename_some_signals_are_gone_and_all_others_stay(release):
    before, after = (read(spec_of(release), snapshot_of(), renamed=renamed) for renamed in (False, True))
    gone = {"requests_running", "kv_cache_usage_ratio", "generation_tokens_total"}
    assert before.values.keys() - after.values.keys() == gone
    assert {name: before.values[name] for name in after.values} == after.values


def test_model_flops_are_there_and_zero():
    samples = parse(VLLM_DIALECT.metrics(SPEC, snapshot_of()).body).samples
    assert [value for _, value in samples["vllm:estimated_flops_per_gpu_total"]] == [0.0]


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("vllm:request_prompt_tokens_count", {}, 75),
        ("vllm:request_prompt_tokens_sum", {}, 4066),
        ("vllm:request_prompt_tokens_bucket", {"le": "1000.0"}, 0),
        ("vllm:request_prompt_tokens_bucket", {"le": "2000.0"}, 75),
        ("vllm:request_params_n_bucket", {"le": "1.0"}, 75),
        ("vllm:iteration_tokens_total_sum", {}, 10090),
        ("vllm:iteration_tokens_total_bucket", {"le": "8192.0"}, 0),
        ("vllm:request_prefill_kv_computed_tokens_sum", {}, 4066 - 512),
        ("vllm:request_inference_time_seconds_sum", {}, 2.75 + 5949 * 0.125),
        ("vllm:request_decode_time_seconds_sum", {}, 5949 * 0.125),
        ("vllm:request_num_preemptions_sum", {}, 7),
        ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}, 4066 - 512),
        ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}, 512),
        ("vllm:prompt_tokens_cached_by_source_total", {"source": "device"}, 512),
        ("vllm:request_success_total", {"finished_reason": "length"}, 64),
        ("vllm:request_success_total", {"finished_reason": "abort"}, 0),
        ("vllm:admission_rejections_total", {"reason": "max_num_queued_reqs"}, 2),
        ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}, 3),
        ("http_request_duration_highr_seconds_count", {}, 75),
        ("http_request_duration_highr_seconds_bucket", {"le": "0.25"}, 0),
        ("http_request_duration_highr_seconds_bucket", {"le": "0.5"}, 15),
        ("http_request_duration_highr_seconds_bucket", {"le": "0.75"}, 15),
        ("http_request_duration_highr_seconds_bucket", {"le": "1.0"}, 75),
        ("http_request_duration_seconds_count", {"handler": "/v1/chat/completions"}, 75),
        ("process_open_fds", {}, 46),
        ("process_cpu_seconds_total", {}, 22.45),
    ],
)
def test_what_families_show_that_the_table_does_not_read(name, labels, value):
    samples = parse(VLLM_DIALECT.metrics(SPEC, snapshot_of()).body).samples[name]
    assert [shown for found, shown in samples if labels.items() <= found.items()] == [value]


def test_the_oldest_release_counts_cached_blocks_and_aborted_requests():
    samples = parse(VLLM_DIALECT.metrics(spec_of("0.8.5"), snapshot_of()).body).samples
    assert samples["vllm:gpu_prefix_cache_hits_total"][0][1] == 512 // 16
    assert samples["vllm:gpu_prefix_cache_queries_total"][0][1] == 4066 // 16
    assert samples["vllm:request_prompt_tokens_count"][0][1] == 75 + 8


def test_a_pool_used_to_the_last_block_shows_one():
    assert read(SPEC, snapshot_of(kv_blocks_used=1001)).values["kv_cache_usage_ratio"] == 1.0


def test_errors_are_finished_requests_and_server_errors_of_older_releases():
    broken = snapshot_of(finished={Finish.LENGTH: 3, Finish.KV_FULL: 2, Finish.DIED: 9}, http={(TEXT, 500): 4})
    assert read(SPEC, broken).values["request_errors_total"] == 2
    assert read(SPEC, broken).values["requests_finished_total"] == 5
    assert read(spec_of("0.12.0"), broken).values["request_errors_total"] == 4


def test_handlers_are_named_where_the_server_has_them_and_statuses_are_grouped():
    samples = parse(VLLM_DIALECT.metrics(SPEC, snapshot_of()).body).samples
    seen = {
        (labels["handler"], labels["method"], labels["status"]): value
        for labels, value in samples["http_requests_total"]
    }
    assert seen == {
        (CHAT, "POST", "2xx"): 70,
        ("/v1/models", "GET", "2xx"): 1,
        (TEXT, "POST", "2xx"): 5,
        (CHAT, "POST", "4xx"): 5,
        ("none", "GET", "4xx"): 6,
    }


def test_a_server_that_answered_nothing_yet_has_a_page():
    fresh = snapshot_of(histograms={}, http={}, finished={}, running=0, waiting=0, kv_blocks_used=0)
    reading = read(SPEC, fresh)
    assert reading.values["requests_finished_total"] == 0
    assert reading.histograms["time_to_first_token_seconds"].count == 0


def test_a_histogram_with_other_edges_is_the_callers_mistake():
    other = {"request_queue_seconds": Histogram((1.0, math.inf), (1.0, 2.0), 3.0)}
    with pytest.raises(ValueError, match="count with the dialect's own"):
        VLLM_DIALECT.metrics(SPEC, snapshot_of(histograms=other))


def test_two_servers_do_not_share_a_page_and_neither_do_two_starts_of_one():
    other = spec_of(model='a "b"\n%s\\')
    for spec in (SPEC, other, SPEC):
        samples = parse(VLLM_DIALECT.metrics(spec, snapshot_of()).body).samples
        assert samples["vllm:num_requests_running"][0][0]["model_name"] == spec.model
    restarted = snapshot_of(started_ns=STARTED_NS + 10**9)
    for snapshot in (snapshot_of(), restarted):
        started = read(SPEC, snapshot).values["engine_start_timestamp_seconds"]
        assert started == snapshot.started_ns / 1e9


COUNTS = st.integers(0, 10**12)
LEVELS = st.floats(0, 1e9, allow_nan=False) | st.integers(0, 10_000)


@st.composite
def snapshots(draw):
    histograms = {}
    for signal in draw(st.sets(st.sampled_from(sorted(VLLM_DIALECT.edges)))):
        counts = draw(st.lists(st.integers(0, 10**9), min_size=0, max_size=len(VLLM_DIALECT.edges[signal]) + 1))
        histograms[signal] = replace(histogram(signal, counts), sum=draw(st.floats(0, 1e15)))
    prompt = draw(COUNTS)
    return snapshot_of(
        started_ns=draw(st.integers(0, 2**62)),
        running=draw(LEVELS),
        waiting=draw(LEVELS),
        kv_blocks_used=draw(st.floats(0, 1000)),
        prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt)),
        generated_tokens=draw(COUNTS),
        preemptions=draw(COUNTS),
        finished=draw(st.dictionaries(st.sampled_from(Finish), COUNTS)),
        http=draw(
            st.dictionaries(
                st.tuples(
                    st.sampled_from([CHAT, TEXT, "/v1/models", "/health", "/odd"]),
                    st.sampled_from([200, 400, 404, 500, 503]),
                ),
                COUNTS,
            )
        ),
        steps=draw(COUNTS),
        step_tokens=draw(COUNTS),
        histograms=histograms,
    )


@given(snapshot=snapshots(), release=st.sampled_from(VLLM_DIALECT.releases), model=st.text(min_size=1, max_size=20))
def test_any_snapshot_gives_a_page_that_reads_back_as_it_was(snapshot, release, model):
    spec = spec_of(release, model=model)
    reading = read(spec, snapshot)
    values, finished = reading.values, snapshot.finished
    assert reading.bad_lines == 0
    assert values["requests_running"] == snapshot.running
    assert values["requests_waiting"] == snapshot.waiting
    assert values["kv_cache_usage_ratio"] == snapshot.kv_blocks_used / 1000
    assert values["prompt_tokens_total"] == snapshot.prompt_tokens
    assert values.get("prompt_tokens_cached_total", snapshot.cached_tokens) == snapshot.cached_tokens
    assert values["generation_tokens_total"] == snapshot.generated_tokens
    assert values["request_preemptions_total"] == snapshot.preemptions
    assert values["engine_progress_total"] == snapshot.steps
    done = sum(finished.get(why, 0) for why in (Finish.LENGTH, Finish.STOP))
    told = values["requests_finished_total"] - done
    assert told in (
        finished.get(Finish.CANCELLED, 0),
        finished.get(Finish.KV_FULL, 0),
        0,
    )
    for signal, found in reading.histograms.items():
        if signal in snapshot.histograms:
            assert found == snapshot.histograms[signal]
        else:
            assert found.count == 0


# ---- logs


def text_of(lines):
    return "\n".join(line.text for line in lines)


IMPORTANT = [
    r"^\(APIServer pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[\S+:\d+\] non-default args: \{'model_tag': '.+'max_num_seqs': 8\S*.*\}$",
    r"^\(APIServer pid=\d+\) INFO \S+ \S+ \[\S+:\d+\] Resolved architecture: \w+$",
    r"^\(APIServer pid=\d+\) INFO \S+ \S+ \[\S+:\d+\] Using max model len \d+$",
    (
        r"^\(EngineCore pid=\d+\) INFO \S+ \S+ \[core.py:\d+\] Initializing a V1 LLM engine \(v0\.32\.0\) with config: "
        r"model='.+', .*max_seq_len=\d+, .*tensor_parallel_size=1, .*kv_cache_dtype=auto"
    ),
    (
        r"^\(Worker pid=\d+\) INFO \S+ \S+ \[parallel_state.py:\d+\] rank 0 in world size 1 is assigned as DP rank 0, PP rank "
        r"0, PCP rank 0, TP rank 0, ETP rank 0, EP rank (N/A|0), EPLB rank N/A$"
    ),
    r"^\(Worker pid=\d+\) INFO \S+ \S+ \[cpu_model_runner.py:\d+\] Starting to load model \S+\.\.\.$",
    r"^Loading safetensors checkpoint shards: 100% Completed \| 1/1 ",
    r"^\(Worker pid=\d+\) INFO \S+ \S+ \[default_loader.py:\d+\] Loading weights took \d+\.\d\d seconds$",
    r"^\(Worker pid=\d+\) INFO \S+ \S+ \[cpu_worker.py:\d+\] Explicitly set \(1\.0/\d+\.\d+\) GiB for KV cache on node 0\.$",
    (
        r"^\(EngineCore pid=\d+\) INFO \S+ \S+ \[kv_cache_utils.py:\d+\] CPU KV cache size: [\d,]+ tokens, Maximum concurrency "
        r"for [\d,]+ tokens per request: \d+\.\d\dx$"
    ),
    (
        r"^\(EngineCore pid=\d+\) INFO \S+ \S+ \[core.py:\d+\] init engine \(profile, create kv cache, warmup model\) took "
        r"\d+\.\d\d s$"
    ),
    r"^\(APIServer pid=\d+\) INFO \S+ \S+ \[entry.py:\d+\] Starting vLLM server on http://",
    r"^\(APIServer pid=\d+\) INFO \S+ \S+ \[launcher.py:\d+\] Route: /v1/chat/completions, Methods: POST$",
    r"^INFO:     Started server process \[\d+\]$",
    r"^INFO:     Waiting for application startup\.$",
    r"^INFO:     Application startup complete\.$",
]


@pytest.mark.parametrize(
    "name",
    [
        "startup.log",
        "startup_notriton.log",
        "startup_moe_smallkv.log",
        "engine_dead.log",
        "small_moe/startup_batch_slots.log",
        "small_moe/startup_kv_cache.log",
    ],
)
def test_the_startup_log_has_the_lines_of_the_recorded_one(name):
    recorded = (SAMPLES / name).read_text(errors="replace")
    own = text_of(VLLM_DIALECT.startup_log(CPU_SPEC, T_NS))
    for pattern in IMPORTANT:
        assert re.search(pattern, recorded, re.MULTILINE), pattern
        assert re.search(pattern, own, re.MULTILINE), pattern
    assert logged_limits(VLLM, own).keys() == logged_limits(VLLM, recorded).keys()


def test_the_34_blocks_are_logged_as_recorded():
    spec = spec_of(
        context_tokens=1024,
        block_tokens=32,
        kv_blocks=34,
        memory=MemoryPlan(cards=0, kv_cache_bytes=2**30),
        settings={"num_gpu_blocks_override": 34},
    )
    own = text_of(VLLM_DIALECT.startup_log(spec, T_NS))
    recorded = (SAMPLES / "small_moe/startup_kv_cache.log").read_text()
    assert logged_limits(VLLM, own) == logged_limits(VLLM, recorded)
    for line in (
        "Overriding num_gpu_blocks=4096 with num_gpu_blocks_override=34",
        "CPU KV cache size: 1,088 tokens, Maximum concurrency for 1,024 tokens per request: 1.06x",
    ):
        assert line in own
        assert line in recorded


@pytest.mark.parametrize(
    ("release", "lines"),
    [
        (
            "0.8.5",
            [
                "INFO 11-29 15:41:26 [gpu_model_runner.py:5150] Model loading took 14.0000 GiB and 10.500000 seconds",
                "GPU KV cache size: 16,016 tokens\n",
                "] Maximum concurrency for 2,048 tokens per request: 7.82x",
            ],
        ),
        (
            "0.10.2",
            [
                "(EngineCore_DP0 pid=1338) INFO 11-29 15:41:29 [gpu_worker.py:760] Available KV cache memory: 40.00 GiB",
                (
                    "Actual usage is 14.00 GiB for weight, 2.00 GiB for peak activation, 1.00 GiB for non-torch memory, and "
                    "1.00 GiB for CUDAGraph memory."
                ),
            ],
        ),
        ("0.12.0", ["Model loading took 14.00 GiB memory and 10.500000 seconds", "GPU KV cache size: 16,016 tokens\n"]),
        ("0.20.2", ["(EngineCore_DP0 pid=1338)", "GPU KV cache size: 16,016 tokens\n"]),
        (
            "0.33.0",
            [
                "(Worker pid=1402) INFO 11-29 15:41:26 [gpu_model_runner.py:5150] Model loading took 14.00 GiB memory",
                "GPU KV cache size: 16,016 tokens, Maximum concurrency for 2,048 tokens per request: 7.82x",
                (
                    "Actual usage is 15.00 GiB for consumed memory (weights + non-torch), 2.00 GiB for peak activation, and "
                    "1.00 GiB for CUDAGraph memory."
                ),
                "Current kv cache memory in use is 40.00 GiB.",
                "Graph capturing finished in 3 secs, took 1.00 GiB",
            ],
        ),
    ],
)
def test_log_lines_change_with_releases(release, lines):
    text = text_of(VLLM_DIALECT.startup_log(spec_of(release), T_NS))
    for line in lines:
        assert line in text
    facts = {"max_running_requests": 8, "kv_cache_capacity_tokens": 16016, "context_tokens": 2048}
    assert logged_limits(VLLM, text) == facts


def test_the_default_batch_limit_is_not_in_the_log():
    text = text_of(VLLM_DIALECT.startup_log(spec_of(max_batch=256), T_NS))
    assert "max_running_requests" not in logged_limits(VLLM, text)


def test_the_log_repeats_what_was_asked_for_even_where_the_server_does_less():
    spec = spec_of(asked_max_batch=64, settings={"max_model_len": 4096, "kv_cache_dtype": "fp8"})
    text = text_of(VLLM_DIALECT.startup_log(spec, T_NS))
    assert logged_limits(VLLM, text)["max_running_requests"] == 64
    assert "Auto-fit max_model_len: reduced from 4096 to 2048" in text
    assert "kv_cache_dtype=fp8" in text


@pytest.mark.parametrize(("release", "prefix"), [("0.8.5", "VllmWorker rank="), ("0.33.0", "Worker_TP")])
def test_each_worker_of_several_cards_has_its_lines(release, prefix):
    text = text_of(VLLM_DIALECT.startup_log(spec_of(release, card_parallel=4), T_NS))
    ranks = re.findall(rf"^\({prefix}(\d) pid=\d+\) .*rank (\d) in world size 4", text, re.MULTILINE)
    assert ranks == [(str(rank), str(rank)) for rank in range(4)]
    assert "'tensor_parallel_size': 4" in text


@pytest.mark.parametrize(("stages", "tensor"), [(2, 2), (4, 1)])
def test_stages_are_not_told_as_cards_that_share_a_layer(stages, tensor):
    spec = spec_of(card_parallel=4, settings={"pipeline_parallel_size": stages})
    text = text_of(VLLM_DIALECT.startup_log(spec, T_NS))
    assert f"tensor_parallel_size={tensor}, pipeline_parallel_size={stages}, data_parallel_size=1" in text
    assert ("'tensor_parallel_size'" in text) == (tensor > 1)


FAILURES = {
    StartFailure.WEIGHTS_MISSING: ("Cannot find any model weights", None),
    StartFailure.WEIGHTS_OUT_OF_MEMORY: ("Failed to load model - not enough GPU memory", Complaint.OUT_OF_MEMORY),
    StartFailure.NO_KV_CACHE: ("No available memory for the cache blocks", Complaint.KV_CACHE_FULL),
    StartFailure.KV_BELOW_ONE_REQUEST: ("To serve at least one request with the model", Complaint.KV_CACHE_FULL),
    StartFailure.WARMUP_OUT_OF_MEMORY: ("out of memory occurred when warming up sampler", Complaint.OUT_OF_MEMORY),
}


@pytest.mark.parametrize("release", VLLM_DIALECT.releases)
@pytest.mark.parametrize("failure", list(StartFailure))
def test_a_failed_start_is_told_and_ends_the_log(failure, release):
    available = "Available KV cache memory: -4.00 GiB"
    lines = VLLM_DIALECT.startup_log(spec_of(release), T_NS, failure)
    words, complaint = FAILURES[failure]
    told = [line.text for line in lines if words in line.text]
    assert told
    assert VLLM.complaint(told[-1]) is complaint
    assert "Engine core initialization failed" in lines[-1].text
    assert "Application startup complete" not in text_of(lines)
    assert (available in text_of(lines)) is (failure is StartFailure.NO_KV_CACHE)


@pytest.mark.parametrize("failure", [None, *StartFailure])
def test_log_lines_are_in_order_of_time_and_within_the_start(failure):
    seconds = [line.seconds for line in VLLM_DIALECT.startup_log(spec_of(start_seconds=120.0), T_NS, failure)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert seconds[-1] <= 120.0
    assert (seconds[-1] == 120.0) is (failure is None)


def test_a_death_is_logged_as_recorded():
    recorded = (SAMPLES / "engine_dead.log").read_text(errors="replace")
    own = text_of(VLLM_DIALECT.death_log(Trouble.ENGINE_DEAD, SPEC, T_NS))
    for pattern in (
        (
            r"^\(EngineCore pid=\d+\) ERROR \S+ \S+ \[multiproc_executor.py:\d+\] Worker proc VllmWorker-0 died unexpectedly "
            r"\(exit code: None\), shutting down executor\.$"
        ),
        r"^\(EngineCore pid=\d+\) ERROR \S+ \S+ \[dump_input.py:\d+\] Dumping input data for V1 LLM engine \(v0.32.0\) ",
        r"^\(EngineCore pid=\d+\) ERROR \S+ \S+ \[core.py:\d+\] EngineCore encountered a fatal error\.$",
        r"^\(EngineCore pid=\d+\) ERROR \S+ \S+ \[core.py:\d+\] RuntimeError: cancelled$",
        r"^\(APIServer pid=\d+\) ERROR \S+ \S+ \[async_llm.py:\d+\] AsyncLLM output_handler failed\.$",
        (
            r"^\(APIServer pid=\d+\) ERROR \S+ \S+ \[async_llm.py:\d+\] vllm\.v1\.engine\.exceptions\.EngineDeadError: "
            r"EngineCore encountered an issue\. See stack trace \(above\) for the root cause\.$"
        ),
        r"^INFO:     Finished server process \[\d+\]$",
    ):
        assert re.search(pattern, recorded, re.MULTILINE), pattern
        assert re.search(pattern, own, re.MULTILINE), pattern


def test_a_death_for_want_of_memory_says_so():
    lines = VLLM_DIALECT.death_log(Trouble.OUT_OF_MEMORY, SPEC, T_NS)
    assert any(VLLM.complaint(line.text) is Complaint.OUT_OF_MEMORY for line in lines)
