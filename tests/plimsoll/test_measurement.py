"""A measurement asks the same each time, counts no warm-up, and says when its figures are not the server's."""

import asyncio
import json
import random
import urllib.request
from collections import Counter

import pytest

from loadgen.prompts import Calibration, make_prompt, nonce_of
from plimsoll.demo import simulated_server
from plimsoll.measurement import Answer, Load, ask_quality, compare_answers, open_meter
from serving.conversation import HttpAnswer, converse
from serving.embedded import EmbeddedServer
from serving.errors import ConfigError, TargetError

LOAD = Load(prompt_tokens=64, output_tokens=24, concurrency=3, rounds=2, requests_per_round=2)


def on_server(arguments, work):
    """Run `work(meter)` against a simulated server."""

    async def go(url):
        async with open_meter(url, interval_seconds=0.2) as meter:
            return await work(meter)

    with simulated_server(["--model", "qwen2.5-7b", "--gpu", "rtx-4090", "--max-batch", "4", *arguments]) as server:
        return asyncio.run(go(server["url"]))


# ---- the load


def test_a_load_that_fits_stays_as_it_is():
    assert LOAD.fitted(4096) is LOAD
    assert LOAD.fitted(None) is LOAD


@pytest.mark.parametrize("context", [64, 90, 128, 1000, 4096])
def test_a_load_is_shortened_to_fit_the_context(context):
    fitted = Load(prompt_tokens=4000, output_tokens=1000).fitted(context)
    assert fitted.prompt_tokens + fitted.output_tokens <= 0.9 * context
    assert min(fitted.prompt_tokens, fitted.output_tokens) >= 4


def test_a_context_too_small_for_any_load_is_refused():
    with pytest.raises(ConfigError, match="too small"):
        Load().fitted(30)


def test_levels_are_one_request_and_the_stated_concurrency():
    assert Load(concurrency=8).levels() == (1, 8)
    assert Load(concurrency=1).levels() == (1,)


def test_prompts_differ_between_measurements_only_in_the_words_that_open_them():
    def words(nonce):
        rng = random.Random("1/5/text")
        return make_prompt(rng, Calibration(0, 1).words_for(512), nonce_of(nonce, 5)).split()

    first, second = words(123), words(456)
    assert first[:10] != second[:10]
    assert len(first) == len(second)
    # Ten words are drawn; the others of that round make up for them, and what follows is the same.
    assert sum((Counter(first) - Counter(second)).values()) <= 10
    assert " ".join(first[50:300]) in " ".join(second)


# ---- against a server


@pytest.fixture(scope="module")
def measured():
    async def work(meter):
        first = await meter.measure(LOAD)
        burst = await meter.burst(6, LOAD)
        limit = await meter.near_limit()
        return meter.facts, first, burst, limit, await meter.idle_kv_ratio(), list(meter.ticks)

    return on_server(["--speed", "5", "--context", "2048"], work)


def test_every_figure_of_the_fixed_set_is_there_at_both_levels(measured):
    _, first, *_ = measured
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "ttft_seconds", "output_tokens_per_second"):
        assert {f"{name}@1", f"{name}@3"} <= set(first.figures)
    assert first.figures["failures"].value == 0
    assert first.figures["process_memory_peak_bytes"].value > 1e6
    assert 0 < first.figures["kv_cache_usage_peak_ratio"].value < 1


def test_the_warm_up_is_asked_but_not_counted(measured):
    _, first, *_ = measured
    counted = 2 * (2 + 3)
    warmup = 2 + 3
    assert first.outcomes == {"ok": counted + warmup}
    assert first.figures["failures"].samples == counted
    assert first.figures["ttft_seconds@3"].samples == 2 * 3
    assert (first.prompt_tokens, first.completion_tokens) == (64 * counted, 24 * counted)


def test_rounds_give_a_spread_around_the_figure(measured):
    _, first, *_ = measured
    for figure in first.figures.values():
        assert figure.low <= figure.value <= figure.high


def test_a_burst_above_the_batch_limit_is_answered_in_turn(measured):
    _, _, burst, *_ = measured
    assert burst.passed
    assert (burst.name, burst.asked, burst.answered) == ("burst", 6, 6)
    assert burst.say() == "a burst of 6 was answered"


def test_the_request_near_the_limit_nearly_fills_the_context(measured):
    facts, _, _, limit, *_ = measured
    assert limit.passed
    assert 0.9 * facts.context_tokens <= limit.tokens + 16 <= facts.context_tokens


def test_afterwards_the_kv_cache_is_idle(measured):
    assert measured[4] == 0.0


def tell(meter, path, document):
    """Change the simulated server while it runs."""
    request = urllib.request.Request(meter.base.text + path, json.dumps(document).encode(), method="POST")
    urllib.request.urlopen(request, timeout=10).close()


def test_a_burst_that_fails_is_told_with_the_servers_words():
    async def work(meter):
        await asyncio.to_thread(tell, meter, "/simulator/faults", {"fault": "http_503"})
        return await meter.burst(4, LOAD, limit_seconds=20)

    proof = on_server(["--speed", "5"], work)
    assert (proof.passed, proof.asked, proof.answered, proof.died) == (False, 4, 0, None)
    assert proof.first_error.startswith("http_error: ")
    assert proof.say().startswith("a burst of 4: 4 of 4 not answered; http_error")


def test_a_server_that_dies_ends_the_measurement_and_is_said():
    async def work(meter):
        measuring = asyncio.create_task(meter.measure(LOAD, limit_seconds=60))
        while not any(tick.values.get("requests_running") for tick in meter.ticks):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)
        await asyncio.to_thread(tell, meter, "/simulator/crash", {"down_seconds": 600})
        return await measuring

    result = on_server(["--speed", "1"], work)
    assert result.died == "the server refuses connections"
    assert result.invalid


def test_failed_requests_are_counted_and_quoted():
    async def work(meter):
        await asyncio.to_thread(tell, meter, "/simulator/faults", {"fault": "http_500,share=0.5"})
        return await meter.measure(LOAD, limit_seconds=60)

    result = on_server(["--speed", "5"], work)
    assert result.figures["failures"].value > 0
    assert result.first_error.startswith("http_error")
    assert result.outcomes["http_error"] + result.outcomes["ok"] == 15


def test_requests_of_others_are_a_warning():
    async def work(meter):
        while not any(tick.values.get("requests_running") for tick in meter.ticks):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)
        return await meter.measure(LOAD, limit_seconds=60)

    # As many as always run, and a batch that has room for them.
    result = on_server(["--background", "2/s,prompt=20,output=200", "--max-batch", "64"], work)
    assert [warning[:2].strip().isdigit() and "of others" in warning for warning in result.warnings] == [True]


# ---- the quality probe


def chat_answer(tokens, logprob=-0.5):
    content = [{"token": token, "logprob": logprob} for token in tokens]
    choice = {"message": {"content": "".join(tokens)}, "logprobs": {"content": content}}
    return HttpAnswer(200, body=json.dumps({"choices": [choice]}).encode())


def test_tokens_and_logprobs_are_read_from_chat():
    asked = []

    def answer(request):
        asked.append(request)
        return chat_answer(["a", "b"])

    answers = converse(ask_quality("m", "chat"), answer)
    assert set(answers) == {Answer(("a", "b"), (-0.5, -0.5))}
    assert {request.json_body["temperature"] for request in asked} == {0}
    assert len({request.json_body["messages"][0]["content"] for request in asked}) == len(answers)


def test_tokens_and_logprobs_are_read_from_completions():
    choice = {"text": "ab", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1, -2]}}
    page = HttpAnswer(200, body=json.dumps({"choices": [choice]}).encode())
    assert converse(ask_quality("m", "completions"), lambda _: page)[0] == Answer(("a", "b"), (-1.0, -2.0))


def test_a_server_that_refuses_logprobs_is_asked_without():
    def answer(request):
        if "logprobs" in request.json_body:
            return HttpAnswer(400, body=b'{"error": {"message": "logprobs not supported"}}')
        return HttpAnswer(200, body=b'{"choices": [{"message": {"content": "hey"}}]}')

    assert converse(ask_quality("m", "chat"), answer)[0] == Answer(("h", "e", "y"))


@pytest.mark.parametrize(
    "answer", [HttpAnswer(0, error="refused"), HttpAnswer(500, body=b"{}"), HttpAnswer(200, body=b"[]")], ids=str
)
def test_a_probe_without_an_answer_is_an_error(answer):
    with pytest.raises(TargetError, match="quality probe"):
        converse(ask_quality("m", "chat"), lambda _: answer)


def test_equal_answers_have_no_drift():
    answers = (Answer(("a", "b"), (-1.0, -2.0)), Answer(("c",), (-3.0,)))
    drift = compare_answers(answers, answers)
    assert (drift.identical, drift.agreement_ratio, drift.logprob_drift) == (2, 1.0, 0.0)
    assert drift.first_differences == (None, None)


def test_drift_is_the_first_difference_and_what_moved_before_it():
    drift = compare_answers(
        (Answer(("a", "b", "c", "d"), (-1.0, -1.0, -1.0, -1.0)), Answer(("x",))),
        (Answer(("a", "b", "z", "d"), (-1.5, -1.0, -9.0, -9.0)), Answer(("x",))),
    )
    assert drift.first_differences == (2, None)
    assert drift.agreement_ratio == pytest.approx(3 / 5)
    assert drift.logprob_drift == pytest.approx(0.25)
    assert drift.identical == 1


def test_an_answer_that_goes_on_differs_where_the_other_ends():
    assert compare_answers((Answer(("a",)),), (Answer(("a", "b")),)).first_differences == (1,)


def test_no_text_is_in_what_is_kept_or_shown():
    secret = tuple("a private answer")
    drift = compare_answers((Answer(secret),), (Answer(tuple("another one")),))
    for kept in (json.dumps(drift.document()), repr(drift), repr(Answer(secret)), drift.say()):
        assert "private" not in kept.replace("', '", "")


@pytest.mark.engine
def test_a_real_engine_is_measured_and_answers_greedily_alike(tmp_path):
    async def go(url):
        async with open_meter(url, interval_seconds=0.2) as meter:
            result = await meter.measure(LOAD)
            return (
                result,
                compare_answers(await meter.ask_quality(), await meter.ask_quality()),
                await meter.near_limit(),
            )

    with EmbeddedServer.start(log_path=tmp_path / "log", cache_dir=tmp_path, slots=4) as server:
        result, drift, limit = asyncio.run(go(server.url))
    assert result.outcomes == {"ok": 15}
    assert result.figures["prefill_tokens_per_second@3"].value > 1
    assert (drift.identical, drift.logprob_drift) == (drift.prompts, pytest.approx(0, abs=1e-3))
    assert limit.passed
