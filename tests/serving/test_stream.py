"""The stream decoder: recorded answers as golden tests, every fault a table row, any split of the bytes the same result."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.records import Outcome
from serving.stream import HttpDecoder, StreamDecoder, StreamResult, message_of

SAMPLES = Path(__file__).parents[1] / "samples"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(payload: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(payload), extension, payload)


def event(document) -> bytes:
    return b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"


def delta(finish=None, index=0, **fields):
    return {"object": "chat.completion.chunk", "choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}
ROLE, ONE, LAST = delta(role="assistant", content=""), delta(content=" a"), delta("length")


def answer(*documents, done=True, end=True) -> bytes:
    events = [event(document) for document in documents] + ([event(b"[DONE]")] if done else [])
    return HEAD + b"".join(map(chunk, events)) + (END if end else b"")


def decode(data: bytes, *, api="chat", expected=None, ignore_eos=False, error=None, cuts=()) -> StreamResult:
    decoder = StreamDecoder(api)
    start = 0
    for cut in (*sorted(cuts), len(data)):
        if cut > start:
            decoder.feed(data[start:cut], 1_000_000)
            start = cut
    decoder.close(error)
    return decoder.result(expected, ignore_eos=ignore_eos)


def raw_of(path: Path) -> tuple[bytes, bytes]:
    """A capture holds the head as received and the body without its chunk framing; put a framing back."""
    head, _, body = path.read_bytes().partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        length = int(next(line for line in head.lower().split(b"\r\n") if b"content-length" in line).split(b":")[1])
        return head + b"\r\n\r\n", body[:length]
    return head + b"\r\n\r\n", body


def capture(name: str) -> bytes:
    head, body = raw_of(SAMPLES / name)
    if b"chunked" not in head.lower():
        return head + body
    return head + b"".join(chunk(piece + b"\n\n") for piece in body.split(b"\n\n") if piece.strip()) + END


# name, outcome, frames, (prompt, cached, completion), finish reason
GOLDEN = [
    ("vllm/sse_chat.txt", "ok", 8, (17, None, 8), "length"),
    ("vllm/sse_chat_logprobs.txt", "ok", 2, (None, None, None), "length"),
    ("vllm/sse_chat_nousage.txt", "ok", 4, (None, None, None), "length"),
    ("vllm/sse_chat_usage.txt", "ok", 8, (17, None, 8), "length"),
    ("vllm/sse_completion_n2.txt", "ok", 6, (9, None, 6), "length"),
    ("vllm/sse_completion_nousage.txt", "ok", 4, (None, None, None), "length"),
    ("vllm/sse_completion_usage.txt", "ok", 8, (9, None, 8), "length"),
    ("vllm/sse_stop_finish.txt", "ok", 400, (10, None, 400), "length"),
    ("llamacpp/sse_chat_logprobs.txt", "ok", 2, (None, None, None), "length"),
    ("llamacpp/sse_chat_nousage.txt", "ok", 4, (None, None, None), "length"),
    ("llamacpp/sse_chat_usage.txt", "ok", 8, (17, 0, 8), "length"),
    ("llamacpp/sse_completion_n2.txt", "ok", 6, (9, 8, 3), "length"),
    ("llamacpp/sse_completion_nousage.txt", "ok", 4, (9, 8, 4), "length"),
    ("llamacpp/sse_completion_usage.txt", "ok", 8, (9, 0, 8), "length"),
    ("llamacpp/sse_stop_finish.txt", "ok", 188, (10, 9, 189), "stop"),
    ("llamacpp/max_tokens_over_context.txt", "ok", 2046, (2, 1, 2046), "length"),
    ("llamacpp/sse_kv_full_1.txt", "stream_error", 72, (None, None, None), None),
    ("llamacpp/sse_kv_full_2.txt", "stream_error", 74, (None, None, None), None),
    ("llamacpp/sse_kv_full_3.txt", "stream_error", 74, (None, None, None), None),
    ("transformers/sse_chat.txt", "ok", 5, (10, None, 5), "length"),
]


def api_of(name: str) -> str:
    return "completions" if "completion" in name or "over_context" in name else "chat"


@pytest.mark.parametrize(("name", "outcome", "frames", "usage", "finish"), GOLDEN)
def test_a_recorded_stream_decodes_to_what_the_engine_said(name, outcome, frames, usage, finish):
    result = decode(capture(name), api=api_of(name))
    assert (result.outcome, result.frames, result.finish_reason) == (outcome, frames, finish)
    assert (result.prompt_tokens, result.cached_tokens, result.completion_tokens) == usage
    assert len(result.gaps_us) == frames - 1
    assert result.status == 200


def test_every_recorded_stream_is_in_the_golden_table():
    names = {str(path.relative_to(SAMPLES)) for path in SAMPLES.glob("*/sse_*.txt")}
    assert names <= {row[0] for row in GOLDEN}


def test_the_message_of_an_error_event_is_kept():
    result = decode(capture("llamacpp/sse_kv_full_1.txt"))
    assert result.error == "Context size has been exceeded."


def test_llamacpp_timings_are_read():
    result = decode(capture("llamacpp/sse_completion_usage.txt"), api="completions")
    assert (result.server_prompt_seconds, result.server_decode_seconds) == pytest.approx((0.001586, 0.00434))


def error_samples():
    for path in sorted([*SAMPLES.glob("*/err_*.txt"), *SAMPLES.glob("llamacpp/b11434/err_*.txt")]):
        head, body = raw_of(path)
        if not head.startswith(b"HTTP/1.1 200"):
            yield pytest.param(head + body, id=str(path.relative_to(SAMPLES)))


@pytest.mark.parametrize("raw", list(error_samples()))
def test_a_recorded_error_answer_is_an_http_error_with_the_servers_message(raw):
    result = decode(raw)
    document = json.loads(raw.partition(b"\r\n\r\n")[2])
    assert result.outcome is Outcome.HTTP_ERROR
    assert result.status == int(raw.split()[1])
    assert (message_of(document) or "?")[:200].strip() in (result.error or "")


FAULTS = {
    "ok": (answer(ROLE, ONE, ONE, ONE, LAST, USAGE), "ok", 3, None),
    "no terminator": (answer(ROLE, ONE, ONE, ONE, LAST, USAGE, done=False), "ok", 3, None),
    "usage in the finish frame": (answer(ONE, LAST | {"usage": USAGE["usage"]}), "ok", 1, None),
    "text in the finish frame": (answer(ONE, delta("stop", content="b")), "ok", 2, None),
    "clean end without finish reason": (answer(ROLE, ONE, done=False), "truncated", 1, "without a finish reason"),
    "terminator without finish reason": (answer(ROLE, ONE), "truncated", 1, "without a finish reason"),
    "cut in the body": (answer(ROLE, ONE, done=False, end=False), "truncated", 1, "closed the connection"),
    "cut inside a frame": (answer(ROLE, ONE, ONE, done=False, end=False)[:-20], "truncated", 1, "closed"),
    "cut after the finish reason": (answer(ROLE, ONE, LAST, done=False, end=False), "ok", 1, None),
    "error event after text": (answer(ONE, {"error": {"message": "dead", "code": 500}}), "stream_error", 1, "dead"),
    "error event only": (answer({"error": {"message": "no"}}), "stream_error", 0, "no"),
    "error as a string": (answer({"error": "overloaded", "error_type": "overloaded"}), "stream_error", 0, "overloaded"),
    "error object": (answer({"object": "error", "message": "bad"}), "stream_error", 0, "bad"),
    "error type": (answer({"type": "error", "error": {"message": "worse"}}), "stream_error", 0, "worse"),
    "named error event": (
        HEAD + chunk(b'event: error\ndata: {"message": "gone"}\n\n') + END,
        "stream_error",
        0,
        "gone",
    ),
    "error field of llama.cpp until 2025": (
        HEAD + chunk(event(ONE)) + chunk(b'error: {"code":500,"message":"too big","type":"server_error"}\n\n') + END,
        "stream_error",
        1,
        "too big",
    ),
    "named error event in plain text": (HEAD + chunk(b"event: error\ndata: gone\n\n") + END, "stream_error", 0, "gone"),
    "error then a finish reason": (answer({"error": {"message": "no"}}, ONE, LAST), "stream_error", 1, "no"),
    "aborted": (answer(ONE, delta("abort")), "stream_error", 1, "abort"),
    "aborted with detail": (answer(ONE, delta({"type": "abort", "message": "killed"})), "stream_error", 1, "killed"),
    "role, finish and usage only": (
        answer(ROLE, LAST, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}}),
        "truncated",
        0,
        "without any text",
    ),
    "tokens without text": (answer(ROLE, LAST, USAGE), "ok", 0, None),
    "garbage": (answer(ONE, b'{"choices":[{"delta":{"content":', LAST), "stream_error", 1, "not JSON"),
    "not an object": (answer(ONE, b"[1, 2]", LAST), "stream_error", 1, "not a JSON object"),
    "choices of the wrong kind": (answer(ONE, {"choices": "x"}, LAST), "stream_error", 1, "list of choices"),
    "deeply nested": (answer(ONE, b"[" * 100_000, LAST), "stream_error", 1, "not JSON"),
    "not UTF-8": (answer(ONE, b'{"a": "\xff"}', LAST), "stream_error", 1, "not JSON"),
    "one choice of two unfinished": (answer(ONE, delta(index=1, content="b"), LAST), "truncated", 2, "finish reason"),
    "empty chunked body": (HEAD + END, "truncated", 0, "without a finish reason"),
    "damaged chunk size": (HEAD + chunk(event(ONE)) + b"zz\r\n", "stream_error", 1, "chunk size"),
    "chunk longer than its size": (HEAD + b"3\r\nabcd\r\n", "stream_error", 0, "longer than its size"),
    "nothing": (b"", "http_error", 0, "closed the connection"),
    "head cut": (HEAD[:30], "http_error", 0, "closed the connection"),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "http_error", 0, "not HTTP"),
    "TLS alert": (b"\x15\x03\x01\x00\x02\x02\n", "http_error", 0, "not HTTP"),
    "endless header": (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "http_error", 0, "longer than"),
    "page with 502": (
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
        "http_error",
        0,
        "HTTP 502 Bad Gateway: a web page",
    ),
    "plain text with 503": (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\nno upstream",
        "http_error",
        0,
        "HTTP 503 Service Unavailable: no upstream",
    ),
    "500 without a body": (
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        "http_error",
        0,
        "HTTP 500 Internal Server Error",
    ),
    "document instead of a stream": (
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{"choices":[]}',
        "stream_error",
        0,
        "does not stream",
    ),
    "error document with 200": (
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"error":"no model"}',
        "stream_error",
        0,
        "no model",
    ),
    "web page with 200": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
        "stream_error",
        0,
        "text/html",
    ),
    "compressed": (HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n" + END, "stream_error", 0, "content encoding gzip"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_answer_is_judged_by_what_the_server_said(name):
    raw, outcome, frames, message = FAULTS[name]
    result = decode(raw)
    assert (result.outcome, result.frames) == (outcome, frames)
    if message is None:
        assert result.error is None
    else:
        assert message in (result.error or "")


@pytest.mark.parametrize("name", FAULTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_split_of_the_bytes_changes_the_result(name, data):
    raw = FAULTS[name][0]
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=12))
    assert decode(raw, cuts=cuts) == decode(raw)


def _with_line_ends(newline: bytes, prefix: bytes = b"") -> bytes:
    body = prefix + b"".join(event(document) for document in (ROLE, ONE, ONE, LAST, USAGE, b"[DONE]"))
    body = body.replace(b"\n", newline)
    return HEAD + chunk(body[:40]) + chunk(body[40:41], b";name=value") + chunk(body[41:]) + END


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf", b": comment\n\n", b"retry: 10\nid: 4\n\n", b"\n\n\n"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_line_ends_marks_comments_and_chunk_extensions_do_not_matter(newline, prefix, data):
    raw = _with_line_ends(newline, prefix)
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=20))
    result = decode(raw, cuts=cuts)
    assert (result.outcome, result.frames, result.completion_tokens) == ("ok", 2, 3)


def test_every_single_byte_split_of_carriage_return_line_feed_is_right():
    raw = _with_line_ends(b"\r\n")
    assert decode(raw, cuts=range(len(raw))) == decode(raw)


def test_data_over_several_lines_is_one_frame():
    document = json.dumps(ONE, indent=1).encode()
    body = b"data: " + document.replace(b"\n", b"\ndata: ") + b"\n\n" + event(LAST)
    assert decode(HEAD + chunk(body) + END).frames == 1


def test_trailers_and_an_interim_answer_are_skipped():
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" + answer(ROLE, ONE, LAST, end=False) + b"0\r\nX-Checksum: 1\r\n\r\n"
    decoder = StreamDecoder()
    decoder.feed(raw, 1)
    assert decoder.complete
    assert decoder.reusable
    assert decoder.result().outcome is Outcome.OK


def test_an_uncounted_body_ends_with_the_connection_and_a_counted_one_with_its_count():
    body = event(ONE) + event(LAST) + event(b"[DONE]")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    assert decode(head + b"\r\n" + body).outcome is Outcome.OK
    decoder = StreamDecoder()
    decoder.feed(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, 1)
    assert decoder.complete
    assert decoder.reusable
    assert decoder.terminated


def test_an_event_without_its_empty_line_counts_when_the_body_ends():
    raw = HEAD + chunk(event(ONE) + event(LAST).rstrip()) + END
    assert decode(raw).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("raw", "reusable"),
    [
        (answer(ONE, LAST), True),
        (answer(ONE, LAST) + b"HTTP/1.1 200 OK\r\n", False),
        (answer(ONE, LAST).replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (answer(ONE, LAST).replace(b"Transfer", b"Connection: close\r\nTransfer"), False),
        (answer(ONE, LAST).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Tran", b"Connection: keep-alive\r\nTran"), True),
        (answer(ONE, LAST, end=False), False),
    ],
)
def test_a_connection_is_reused_only_after_a_whole_answer_that_allows_it(raw, reusable):
    decoder = StreamDecoder()
    decoder.feed(raw, 1)
    assert decoder.reusable is reusable


def test_role_usage_and_finish_frames_are_not_text():
    decoder = StreamDecoder()
    documents = [ROLE, delta(content=None), ONE, delta(content=""), ONE, LAST, USAGE]
    decoder.feed(HEAD, 1_000_000)
    for number, document in enumerate(documents):
        decoder.feed(chunk(event(document)), 10_000_000 + number * 1_000_000)
    result = decoder.result()
    assert result.t_headers_ns == 1_000_000
    assert (result.t_first_ns, result.t_last_ns) == (12_000_000, 14_000_000)
    assert (result.frames, result.gaps_us) == (2, (2000,))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_time_to_first_token_is_at_the_first_reasoning_and_content_is_stamped_apart(field):
    decoder = StreamDecoder()
    for number, document in enumerate([ROLE, delta(**{field: "hm"}), ONE, LAST]):
        decoder.feed((HEAD if not number else b"") + chunk(event(document)), number)
    result = decoder.result()
    assert (result.t_first_ns, result.t_first_content_ns, result.frames) == (1, 2, 2)


def test_reasoning_alone_is_an_answer():
    result = decode(answer(ROLE, delta(reasoning_content="hm"), LAST))
    assert (result.outcome, result.t_first_content_ns) == ("ok", None)


def test_tool_arguments_are_text_and_a_tool_name_alone_is_not():
    name = delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])
    arguments = delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}])
    assert decode(answer(ROLE, name, arguments, delta("tool_calls"))).frames == 1


def test_a_frame_is_stamped_by_the_read_that_completes_it():
    raw = answer(ONE, ONE, LAST)
    boundary = raw.index(b"\n\n") + 2
    decoder = StreamDecoder()
    decoder.feed(raw[: boundary - 1], 100)
    assert decoder.result().frames == 0
    decoder.feed(raw[boundary - 1 : boundary], 200)
    assert decoder.result().t_first_ns == 200


def test_a_stamp_never_goes_back():
    decoder = StreamDecoder()
    decoder.feed(HEAD + chunk(event(ONE)), 5_000)
    decoder.feed(chunk(event(ONE)), 4_000)
    result = decoder.result()
    assert (result.gaps_us, result.t_last_ns) == ((0,), 5_000)


@pytest.mark.parametrize(
    ("expected", "ignore_eos", "outcome"),
    [(3, True, "ok"), (4, True, "short"), (4, False, "ok"), (None, True, "ok")],
)
def test_fewer_tokens_than_asked_is_short_only_when_the_end_was_to_be_ignored(expected, ignore_eos, outcome):
    result = decode(answer(ROLE, ONE, LAST, USAGE), expected=expected, ignore_eos=ignore_eos)
    assert result.outcome == outcome


def test_tokens_are_the_servers_count_and_absent_when_it_gives_none():
    assert decode(answer(ONE, LAST, USAGE)).completion_tokens == 3
    assert decode(answer(ONE, ONE, LAST), expected=9, ignore_eos=True).completion_tokens is None


@pytest.mark.parametrize("value", [-1, True, "3", 2.5, None])
def test_a_count_that_is_not_one_is_absent(value):
    assert decode(answer(ONE, LAST, {"choices": [], "usage": {"completion_tokens": value}})).completion_tokens is None


def test_a_message_is_at_most_three_hundred_characters():
    assert len(decode(answer({"error": {"message": "x" * 1000}})).error or "") == 300


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_no_bytes_at_all_make_the_decoder_raise(noise):
    assert decode(noise).outcome is not Outcome.OK
    decode(HEAD + noise)
    decode(HEAD + chunk(event(ONE)) + chunk(noise or b"x") + END)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "delta",
                        "error",
                        "usage",
                        "index",
                        "finish_reason",
                        "content",
                        "tool_calls",
                        "function",
                        "message",
                        "text",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
    )
)
@settings(max_examples=400, deadline=None)
def test_no_json_makes_the_decoder_raise(document):
    nested = {"choices": [document, {"delta": document, "index": document, "finish_reason": document}]}
    for result in (
        decode(answer(document)),
        decode(answer({"choices": document, "usage": document, "timings": document}), api="completions"),
        decode(answer(nested)),
    ):
        assert result.outcome in (Outcome.OK, Outcome.TRUNCATED, Outcome.STREAM_ERROR)
        assert (result.frames == 0) is (result.t_first_ns is None)
        assert len(result.gaps_us) == max(0, result.frames - 1)
        assert (result.error is None) is (result.outcome is Outcome.OK)


def test_the_http_decoder_gives_the_body_of_any_answer():
    http = HttpDecoder()
    assert http.feed(b"HTTP/1.1 404 Not Found\nContent-Length: 3\n\nab") == b"ab"
    assert not http.complete
    assert http.feed(b"c") == b"c"
    assert (http.status, http.reason, http.complete, http.reusable) == (404, "Not Found", True, True)


def test_the_sum_of_gaps_does_not_drift_from_the_last_stamp():
    decoder = StreamDecoder()
    decoder.feed(HEAD, 0)
    for number in range(500):
        decoder.feed(chunk(event(ONE)), number * 1_999)
    result = decoder.result()
    assert sum(result.gaps_us) == (result.t_last_ns - result.t_first_ns) // 1000


@pytest.mark.parametrize("step", [1, 2, 3, 10_000])
def test_a_byte_order_mark_before_the_first_event_is_no_part_of_it(step):
    body = b"\xef\xbb\xbf" + event(ONE) + event(LAST)
    raw = HEAD + b"".join(chunk(body[at : at + step]) for at in range(0, len(body), step)) + END
    result = decode(raw)
    assert (result.outcome, result.frames) == ("ok", 1)


def test_a_byte_order_mark_later_on_is_not_skipped():
    body = event(ONE) + b"\xef\xbb\xbf" + event(ONE) + event(LAST)
    assert decode(HEAD + chunk(body) + END).frames == 1


@pytest.mark.parametrize(
    ("pieces", "frames"),
    [
        ([b"event: x\r", b"\n%s\r", b"\n\r", b"\n"], 1),
        ([b"event: x\r", b"%s\r", b"\r"], 1),
        ([b"%s\r", b"\n", b"\r\n"], 1),
        # A line feed alone after a whole line ends the event; one that belongs to a carriage return does not.
        ([b"event: error\r", b"\n%s\r", b"\n\r\n"], 0),
    ],
)
def test_a_carriage_return_and_its_line_feed_in_two_reads_are_one_line_end(pieces, frames):
    decoder = StreamDecoder()
    decoder.feed(HEAD, 1)
    for piece in pieces:
        decoder.feed(chunk(piece.replace(b"%s", event(ONE).strip())), 2)
    decoder.feed(chunk(event(LAST)) + END, 3)
    assert decoder.result().frames == frames


@pytest.mark.parametrize("status", [100, 102, 103, 199])
@pytest.mark.parametrize("step", [1, 10_000])
def test_any_interim_answer_is_skipped_with_its_headers(status, step):
    interim = b"HTTP/1.1 %d Wait\r\nLink: </a>\r\nContent-Length: 5\r\n\r\n" % status
    raw = interim * 2 + answer(ROLE, ONE, LAST)
    decoder = StreamDecoder()
    for at in range(0, len(raw), step):
        decoder.feed(raw[at : at + step], 1)
    assert decoder.result().status == 200
    assert decoder.result().outcome is Outcome.OK
    assert "link" not in decoder.headers


def test_a_change_of_protocol_is_no_interim_answer():
    decoder = HttpDecoder()
    decoder.feed(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
    assert (decoder.complete, decoder.status) == (True, 101)


def test_a_secret_is_taken_out_before_a_message_is_cut():
    secret = "sk-0123456789"
    body = '{"error": {"message": "' + "x" * 290 + secret + '"}}'
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    decoder = StreamDecoder("chat", lambda text: text.replace(secret, "***"))
    decoder.feed((head + body).encode(), 1)
    error = decoder.result().error
    assert "sk-" not in error
    assert len(error) <= 300
