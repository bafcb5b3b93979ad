"""Workloads: means as stated, lengths that fit the context, draws that depend on index and seed alone."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.prompts import Calibration
from loadgen.workloads import WORKLOADS, RequestMaker, find_workload
from serving.errors import ConfigError

MEANS = {"long_document": (24_000, 512), "interactive": (512, 256), "offline_batch": (2_000, 512)}


@pytest.mark.parametrize("name", MEANS)
def test_mean_lengths_are_as_stated(name):
    workload = WORKLOADS[name]
    draws = [workload.draw(index, 7) for index in range(4000)]
    for position, stated in enumerate(MEANS[name]):
        assert (workload.prompt_tokens, workload.output_tokens)[position] == stated
        assert sum(draw[position] for draw in draws) / len(draws) == pytest.approx(stated, rel=0.03)


def test_limits_are_as_stated():
    limits = {name: (one.slo.ttft_seconds, one.slo.tpot_seconds) for name, one in WORKLOADS.items()}
    assert limits == {"long_document": (30.0, None), "interactive": (1.5, 0.060), "offline_batch": (None, None)}


@pytest.mark.parametrize("name", ["long-document", "long_document", "Long Document", "LONG_DOCUMENT"])
def test_a_workload_is_found_however_it_is_spelt(name):
    assert find_workload(name).name == "long_document"


def test_an_unknown_workload_is_an_error_that_names_the_known_ones():
    with pytest.raises(ConfigError, match="long_document, interactive, offline_batch"):
        find_workload("chat")


@given(st.sampled_from(sorted(MEANS)), st.integers(64, 300_000), st.integers(0, 10**9), st.integers(0, 10**6))
def test_no_request_plans_to_leave_the_context(name, context, seed, index):
    prompt, output = WORKLOADS[name].scaled(context).draw(index, seed)
    assert prompt >= 16
    assert output >= 4
    assert prompt + output <= 0.95 * context


@given(st.sampled_from(sorted(MEANS)), st.integers(200, 300_000))
def test_mean_lengths_fill_at_most_six_tenths_of_the_context_in_the_same_proportion(name, context):
    plain, scaled = WORKLOADS[name], WORKLOADS[name].scaled(context)
    total = plain.prompt_tokens + plain.output_tokens
    if total <= 0.6 * context:
        assert (scaled.prompt_tokens, scaled.output_tokens) == (plain.prompt_tokens, plain.output_tokens)
    else:
        assert scaled.prompt_tokens == pytest.approx(plain.prompt_tokens * 0.6 * context / total, abs=16)
        assert scaled.output_tokens == pytest.approx(plain.output_tokens * 0.6 * context / total, abs=4)


@given(st.integers(200, 5_000), st.integers(16, 150), st.booleans())
def test_a_length_that_was_asked_for_stays_and_the_other_makes_room(context, asked, of_prompt):
    workload = WORKLOADS["offline_batch"].scaled(context, **{"prompt_tokens" if of_prompt else "output_tokens": asked})
    assert (workload.prompt_tokens if of_prompt else workload.output_tokens) == asked
    assert workload.prompt_tokens + workload.output_tokens <= 0.98 * context


@pytest.mark.parametrize(
    ("context", "lengths", "message"),
    [
        (2048, {"prompt_tokens": 3000}, "do not fit the context of 2048"),
        (2048, {"prompt_tokens": 1000, "output_tokens": 1000}, "do not fit"),
        (40, {}, "too small"),
        (2048, {"prompt_tokens": 3}, "at least 16"),
        (None, {"output_tokens": 0}, "at least 4"),
    ],
)
def test_lengths_that_cannot_be_are_refused(context, lengths, message):
    with pytest.raises(ConfigError, match=message):
        WORKLOADS["interactive"].scaled(context, **lengths)


def test_without_a_known_context_nothing_is_scaled():
    assert WORKLOADS["long_document"].scaled(None).draw(3, 1) == WORKLOADS["long_document"].draw(3, 1)


def test_draws_depend_on_index_and_seed_alone_and_not_on_the_process():
    workload = WORKLOADS["interactive"]
    here = [workload.draw(index, 5) for index in (9, 3, 3, 7)]
    assert here[1] == here[2]
    assert len(set(here)) == 3
    assert workload.draw(9, 6) != here[0]
    code = "from loadgen.workloads import WORKLOADS; print(WORKLOADS['interactive'].draw(9, 5))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(here[0])


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_body_asks_for_a_stream_with_usage_and_the_full_length(api):
    maker = RequestMaker(WORKLOADS["interactive"], Calibration(10, 1.0), "m", api, 1, 2)
    body, prompt_tokens, output_tokens = maker.make(4)
    document = json.loads(body)
    text = document["prompt"] if api == "completions" else document["messages"][0]["content"]
    assert len(text.split()) == prompt_tokens - 10
    assert document["max_tokens"] == output_tokens
    assert document["stream"] is True
    assert document["stream_options"] == {"include_usage": True}
    assert (document["ignore_eos"], document["temperature"], document["model"]) == (True, 0.8, "m")
    assert (prompt_tokens, output_tokens) == WORKLOADS["interactive"].draw(4, 1)


def test_an_engine_that_cannot_ignore_the_end_is_not_asked_to():
    maker = RequestMaker(WORKLOADS["interactive"], Calibration(10, 1.0), "m", "chat", 1, 2, ignore_eos=False)
    assert "ignore_eos" not in json.loads(maker.make(0)[0])
    assert not maker.full_length


def test_bodies_depend_on_seed_index_and_run_nonce():
    made = {
        RequestMaker(WORKLOADS["interactive"], Calibration(10, 1.0), "m", "chat", seed, nonce).make(index)[0]
        for seed, nonce, index in [(1, 2, 3), (1, 2, 3), (2, 2, 3), (1, 9, 3), (1, 2, 4)]
    }
    assert len(made) == 4
