"""Prompts: exact word counts, unique prefixes, determinism, and lengths within 2 % under any tokenizer."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.prompts import NONCE_WORDS, WORDS, Calibration, calibrate, make_prompt, nonce_of
from serving.conversation import HttpAnswer, converse
from serving.errors import TargetError


def server(costs, fixed, **changes):
    """A server that charges each word its own number of tokens, as a tokenizer does."""
    asked = []

    def answer(request):
        text = request.json_body.get("prompt") or request.json_body["messages"][0]["content"]
        asked.append(request)
        tokens = fixed + sum(costs[word] for word in text.split())
        body = b'{"choices": [{}], "usage": {"prompt_tokens": %d, "completion_tokens": 1}}' % tokens
        return HttpAnswer(**({"status": 200, "body": body} | changes))

    return answer, asked


def costs_of(seed: int, largest: int) -> dict[str, int]:
    rng = random.Random(seed)
    return {word: rng.randint(1, largest) for word in WORDS}


def test_the_list_holds_thirty_two_different_words():
    assert len(WORDS) == len(set(WORDS)) == 32


@given(words=st.integers(0, 400), nonce=st.none() | st.integers(0, 2**48 - 1), shared=st.booleans())
@settings(deadline=None)
def test_a_prompt_has_exactly_the_words_asked_for(words, nonce, shared):
    text = make_prompt(random.Random(1), words, nonce, shared_prefix=shared)
    assert len(text.split()) == words


def test_words_occur_equally_often_up_to_one_round_and_the_nonce():
    counts = Counter(make_prompt(random.Random(3), 32 * 10 + 20, None).split())
    assert set(counts.values()) == {10, 11}


def test_the_same_seed_makes_the_same_prompt_and_another_makes_another():
    texts = [make_prompt(random.Random(seed), 200, 5) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@given(st.integers(0, 2**48 - 1), st.sets(st.integers(0, 2**30), min_size=2, max_size=50))
def test_no_two_requests_of_a_run_share_a_nonce(run_nonce, indices):
    assert len({nonce_of(run_nonce, index) for index in indices}) == len(indices)
    assert all(0 <= nonce_of(run_nonce, index) < 2**48 for index in indices)


def test_prompts_of_one_run_and_of_two_runs_hardly_share_a_prefix():
    runs = [random.Random(run).getrandbits(48) for run in (1, 2)]
    prompts = [
        make_prompt(random.Random(index), 100, nonce_of(run, index)).split() for run in runs for index in range(300)
    ]
    heads = Counter(tuple(words[:NONCE_WORDS]) for words in prompts)
    assert max(heads.values()) == 1
    assert max(Counter(tuple(words[:3]) for words in prompts).values()) <= 3


def test_a_shared_prefix_is_half_the_prompt_and_the_nonce_follows_it():
    one, two = (make_prompt(random.Random(i), 300, nonce_of(1, i), shared_prefix=True).split() for i in (1, 2))
    assert one[:150] == two[:150]
    assert one[150:160] != two[150:160]


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("largest", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_right_within_two_percent_from_five_hundred_tokens_on(api, largest, seed):
    costs = costs_of(seed, largest)
    answer, asked = server(costs, 20)
    calibration = converse(calibrate("m", api, 32_000), answer)
    assert all(request.json_body["max_tokens"] == 1 for request in asked)
    assert len(asked) == 4
    for tokens in (500, 2_000, 24_000):
        for index in range(20):
            prompt = make_prompt(random.Random(index), calibration.words_for(tokens), nonce_of(9, index))
            made = 20 + sum(costs[word] for word in prompt.split())
            # A tokenizer that splits words into up to six pieces spreads more than any that is in use.
            assert made == pytest.approx(tokens, rel=0.02 if largest < 6 else 0.05)


@pytest.mark.parametrize("context", [64, 128, 256, 511, 512, 2048, 1_000_000, None])
def test_calibration_stays_inside_half_the_context(context):
    answer, asked = server(costs_of(1, 2), 12)
    converse(calibrate("m", "completions", context), answer)
    longest = max(len(request.json_body["prompt"].split()) for request in asked)
    assert longest * 1.6 + 12 <= max(0.62 * (context or 2048), 50)
    assert longest <= 800


def test_without_usage_the_calibration_says_that_it_is_assumed():
    answer, _ = server(costs_of(1, 2), 5, body=b'{"choices": []}')
    assert not converse(calibrate("m", "chat", None), answer).measured


def test_a_server_that_counts_every_prompt_alike_is_not_believed():
    answer, _ = server(dict.fromkeys(WORDS, 0), 16)
    assert not converse(calibrate("m", "chat", None), answer).measured


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": 0, "error": "refused"}, "no answer to POST /v1/chat/completions: refused"),
        ({"status": 404, "body": b'{"error": {"message": "no such model"}}'}, "HTTP 404: no such model"),
        ({"status": 502, "body": b"bad gateway"}, "HTTP 502: bad gateway"),
    ],
)
def test_a_server_that_refuses_ends_the_calibration_with_its_own_words(changes, message):
    answer, _ = server(costs_of(1, 2), 5, **changes)
    with pytest.raises(TargetError, match=message):
        converse(calibrate("m", "chat", None), answer)


def test_words_and_tokens_are_inverse():
    calibration = Calibration(12.0, 1.5)
    assert calibration.words_for(512) == 333
    assert calibration.tokens_for(333) == pytest.approx(512, abs=1)
    assert calibration.words_for(1) == NONCE_WORDS


@pytest.mark.engine
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_lengths_are_right_on_a_real_engine(tmp_path_factory, api):
    pytest.importorskip("xllamacpp")
    from loadgen.client import Connection, Endpoint
    from loadgen.prompts import question
    from serving.conversation import HttpRequest
    from serving.embedded import EmbeddedServer

    folder: Path = tmp_path_factory.mktemp("engine")
    options = {"shape": "tiny", "slots": 2, "context_tokens_per_slot": 4096}
    with EmbeddedServer.start(log_path=folder / "log", cache_dir=folder, **options) as engine:
        connection = Connection(Endpoint(engine.url))
        calibration = converse(calibrate("tiny", api, 4096), connection.answer)
        for tokens in (500, 3000):
            prompt = make_prompt(random.Random(tokens), calibration.words_for(tokens), nonce_of(4, tokens))
            path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
            answer = connection.answer(HttpRequest(path, question("tiny", api, prompt, 1)))
            assert answer.json()["usage"]["prompt_tokens"] == pytest.approx(tokens, rel=0.02)
        connection.close()
