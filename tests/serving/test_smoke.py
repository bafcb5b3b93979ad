"""The smoke request tells generating servers from all others, in the server's own words."""

import json
from pathlib import Path

import pytest

from serving.conversation import HttpAnswer, converse
from serving.smoke import SmokeResult, judge_reach, smoke

SAMPLES = Path(__file__).parent.parent / "samples"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def recorded(name):
    head, _, body = (SAMPLES / name).read_bytes().partition(b"\r\n\r\n")
    return HttpAnswer(int(head.split()[1]), {}, body, 0.25)


def page(body, status=200, **headers):
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return HttpAnswer(status, {name.replace("_", "-"): value for name, value in headers.items()}, data, 0.25)


def smoked(chat, completions=None):
    """The result and the requests it took."""
    asked = []
    answers = {CHAT: chat, COMPLETIONS: completions}

    def answer(request):
        asked.append(request)
        return answers[request.path]

    return converse(smoke("tiny"), answer), asked


def text_page(**usage):
    return {"choices": [{"message": {"content": "hello"}}], "usage": usage}


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "llamacpp/b11434"])
def test_a_server_that_generates_passes(engine):
    result, asked = smoked(recorded(f"{engine}/chat_nonstream.txt"))
    assert result == SmokeResult(
        answered=True, generated=True, api="chat", prompt_tokens=10, completion_tokens=4, seconds=0.25
    )
    assert [request.path for request in asked] == [CHAT]


def test_the_request_is_small_and_not_streamed():
    _, (request,) = smoked(recorded("vllm/chat_nonstream.txt"))
    assert request.json_body["model"] == "tiny"
    assert request.json_body["max_tokens"] == 8
    assert request.json_body["stream"] is False
    assert [message["role"] for message in request.json_body["messages"]] == ["user"]


@pytest.mark.parametrize(
    "chat",
    [
        recorded("vllm/err_404.txt"),
        recorded("llamacpp/err_404.txt"),
        recorded("vllm/err_405.txt"),
        page("", 501),
        page({"error": {"message": "default chat template is no longer allowed, so you must provide one"}}, 400),
        page({"message": "the tokenizer has no chat_template"}, 422),
    ],
)
def test_without_chat_the_completions_endpoint_is_asked(chat):
    result, asked = smoked(chat, recorded("vllm/completion_nonstream.txt"))
    assert result.generated
    assert (result.api, result.prompt_tokens, result.completion_tokens) == ("completions", 2, 4)
    assert [request.path for request in asked] == [CHAT, COMPLETIONS]
    assert isinstance(asked[1].json_body["prompt"], str)
    assert "messages" not in asked[1].json_body


def test_a_model_that_only_reasoned_did_generate():
    body = {
        "choices": [{"message": {"content": None, "reasoning_content": "The user"}}],
        "usage": {"completion_tokens": 8},
    }
    assert smoked(page(body))[0].generated


@pytest.mark.parametrize(
    ("chat", "answered", "reason"),
    [
        (HttpAnswer(0, error="refused"), False, "no answer: refused"),
        (HttpAnswer(0, error="timeout"), False, "no answer: timeout"),
        (recorded("vllm/err_bad_model.txt"), False, "does not serve the model 'tiny': The model `nope` does not exist"),
        (recorded("llamacpp/err_no_key.txt"), False, "HTTP 401: set PLIMSOLL_API_KEY"),
        (recorded("llamacpp/nonstream_kv_full.txt"), False, "HTTP 500: Context size has been exceeded."),
        (recorded("llamacpp/err_loading_503_health.txt"), False, "HTTP 503: Loading model"),
        (recorded("vllm/err_bad_json.txt"), False, "HTTP 400: 1 validation error"),
        (page("", 500), False, "HTTP 500: an empty body"),
        (page({"detail": [{"msg": "field required"}]}, 422), False, 'HTTP 422: [{"msg": "field required"}]'),
        (page({"error": {"code": 5}}, 500), False, 'HTTP 500: {"code": 5}'),
        (page("<html>hi</html>", content_type="text/html"), False, "not a JSON object (text/html)"),
        (page([1]), False, "not a JSON object"),
        (page({"error": {"message": "engine died"}}), False, "HTTP 200, but an error inside: engine died"),
        (page({}), True, "holds no text"),
        (page({"choices": []}), True, "holds no text"),
        (page({"choices": [3]}), True, "holds no text"),
        (page({"choices": [{"message": None}]}), True, "holds no text"),
        (page({"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 3}}), True, "holds no text"),
        (page({"choices": [{"message": {"content": 3}}], "usage": {"completion_tokens": 3}}), True, "holds no text"),
        (page(text_page()), True, "no completion tokens"),
        (page(text_page(completion_tokens=0)), True, "no completion tokens"),
        (page(text_page(completion_tokens="8")), True, "no completion tokens"),
        (page({"choices": [{"message": {"content": "hello"}}], "usage": None}), True, "no completion tokens"),
    ],
)
def test_what_does_not_generate_fails_with_its_reason(chat, answered, reason):
    result, asked = smoked(chat)
    assert not result.generated
    assert result.answered is answered
    assert reason in result.reason
    assert [request.path for request in asked] == [CHAT]


def test_failure_of_both_endpoints_is_told_of_the_second():
    result, _ = smoked(recorded("vllm/err_404.txt"), recorded("llamacpp/nonstream_kv_full.txt"))
    assert (result.api, result.reason) == ("completions", "HTTP 500: Context size has been exceeded.")


def test_a_long_message_is_cut_and_generated_text_is_not_kept():
    assert len(smoked(page({"error": "x" * 5000}, 500))[0].reason) < 330
    assert len(smoked(page("y" * 5000, 500))[0].reason) < 330
    streamed = 'data: {"choices":[{"delta":{"content":"secret words"}}]}'
    assert "secret words" not in repr(smoked(page(streamed, content_type="text/event-stream"))[0])


def test_usage_is_told_even_when_there_is_no_text():
    result, _ = smoked(page({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}}))
    assert (result.prompt_tokens, result.completion_tokens) == (9, 0)


TOKENS = "generation_tokens_total"


@pytest.mark.parametrize(
    ("before", "after", "rise", "is_preallocated", "reached", "sign"),
    [
        ({TOKENS: 5.0}, {TOKENS: 13.0}, None, False, True, "grew by 8"),
        ({TOKENS: 5.0}, {TOKENS: 13.0}, 0.0, True, True, "memory need not move"),
        ({TOKENS: 5.0}, {TOKENS: 5.0}, 0.0, True, False, "stood still"),
        ({"requests_finished_total": 0.0}, {"requests_finished_total": 1.0}, None, True, True, "grew by 1"),
        ({TOKENS: 5.0}, {TOKENS: 5.0}, 64.0 * 2**20, False, True, "memory rose by 64 MiB"),
        ({}, {TOKENS: 5.0}, 0.0, False, False, "memory rose by only"),
        ({}, {}, 0.0, True, None, "need not move"),
        ({}, {}, None, False, None, "no sign"),
    ],
)
def test_an_answer_reached_the_model_when_counters_or_memory_moved(before, after, rise, is_preallocated, reached, sign):
    found = judge_reach(before, after, rise, is_preallocated=is_preallocated)
    assert found.reached is reached
    assert sign in found.sign
