"""What a request costs is told by what moves while it runs, and other traffic or a restart spoils it."""

import json

import pytest
from child import Child

from monitor.sampler import Tick
from plimsoll.cli import main
from plimsoll.memory import Cost, Estimate, conclude
from plimsoll.witness import MemoryUse, Witness, others_ran
from serving.clock import NS, FakeClock
from serving.embedded import EmbeddedServer
from serving.engines import TargetFacts

MIB = 2**20
FACTS = TargetFacts(engine="vllm", version="0.33.0", model="m", kv_cache_capacity_tokens=1000)


def tick(seconds, gpu=None, process=None, mark="a", **values):
    return Tick(
        seconds * NS,
        up=True,
        values=values,
        gpus={} if gpu is None else {"GPU-0": {"gpu_memory_used_bytes": gpu}},
        processes={} if process is None else {"server": {"process_anonymous_memory_bytes": process}},
        server_mark=mark,
    )


def cost(tokens, gpu=None, process=None, kv_tokens=None, prompt=10):
    rise = MemoryUse({} if gpu is None else {"GPU-0": gpu}, process)
    return Cost(prompt, tokens, 1.0, rise, MemoryUse({}, None), kv_tokens)


def concluded(costs, ticks=(), idle=None, *, estimate=None, is_preallocated=True, failed=None):
    seen = Witness(FakeClock())
    for one in ticks:
        seen.on_tick(one)
    idle = [tick(0, gpu=100.0 * MIB)] if idle is None else idle
    return conclude("http://x", FACTS, idle, seen, costs, failed, estimate, is_preallocated=is_preallocated)


def test_growth_per_token_is_what_the_longer_answer_took_more():
    found = concluded([cost(100, gpu=5.0 * MIB), cost(300, gpu=25.0 * MIB)], is_preallocated=False)
    assert found["growth_per_output_token"] == {
        "gpu_bytes": 20 * MIB / 200,
        "process_bytes": None,
        "kv_tokens": None,
    }
    assert found["verdict"] == "pass"


def test_an_engine_without_a_pool_is_compared_by_bytes():
    estimate = Estimate("m", kv_bytes_per_token=100_000, weights_bytes=0)
    costs = [cost(100, process=0.0), cost(300, process=22_000_000.0)]
    found = concluded(costs, estimate=estimate, is_preallocated=False)
    assert (
        found["comparison"] == "100,000 bytes of KV cache per token and card are expected, 110,000 were measured (110%)"
    )


def test_an_engine_with_a_pool_is_compared_by_how_much_of_it_was_filled_and_never_by_what_memory_rose():
    estimate = Estimate("m", kv_bytes_per_token=100_000, weights_bytes=0)
    costs = [cost(100, gpu=0.0, kv_tokens=110), cost(300, gpu=64.0 * MIB, kv_tokens=310)]
    found = concluded(costs, estimate=estimate)
    assert "filled 1.00 tokens of the pool: 100,000 bytes" in found["comparison"]
    assert any("no KV cache" in note for note in found["notes"])


def test_a_gauge_that_did_not_move_is_said_to_be_too_coarse():
    found = concluded([cost(100, gpu=0.0, kv_tokens=0.0), cost(300, gpu=0.0, kv_tokens=0.0)])
    assert any("too coarse" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ({"idle": [tick(0, gpu=1.0, requests_running=1.0)]}, "other requests"),
        ({"ticks": [tick(1, requests_running=2.0)]}, "other requests"),
        ({"ticks": [tick(1), tick(2, mark="b")]}, "restarted"),
        ({"idle": [tick(0)]}, "neither memory nor"),
    ],
)
def test_what_spoils_a_measurement_makes_it_inconclusive(spoilt, reason):
    found = concluded([cost(100), cost(300)], **spoilt)
    assert found["verdict"] == "inconclusive"
    assert reason in found["reason"]


@pytest.mark.parametrize(
    ("made", "verdict", "says"),
    [
        (0, "inconclusive", "stood still: a gateway"),
        (432, "pass", "measured"),
        (440, "pass", "measured"),
        (5000, "inconclusive", "other requests ran meanwhile: the server made 5,000 tokens, and 432"),
    ],
)
def test_the_tokens_that_the_server_counts_must_be_those_that_were_asked_for(made, verdict, says):
    idle = [tick(0, gpu=1.0, generation_tokens_total=100.0)]
    seen = Witness(FakeClock())
    seen.on_tick(tick(9, gpu=1.0, generation_tokens_total=100.0 + made))
    costs = [cost(100, gpu=0.0, kv_tokens=110), cost(300, gpu=0.0, kv_tokens=310)]
    found = conclude("http://x", FACTS, idle, seen, costs, None, None, is_preallocated=True, warm_tokens=32)
    assert found["verdict"] == verdict
    assert says in found["reason"]


def test_a_request_that_was_not_answered_fails_the_measurement():
    found = concluded([], failed="HTTP 500: out of memory")
    assert (found["verdict"], found["growth_per_output_token"]) == ("fail", None)


def test_memory_in_use_is_the_median_and_a_role_that_cannot_be_read_makes_it_unknown():
    ticks = [tick(turn, gpu=float(used), process=float(used)) for turn, used in enumerate((5, 1, 3))]
    assert Witness.memory(ticks) == MemoryUse({"GPU-0": 3.0}, 3.0)
    assert Witness.memory(ticks, max) == MemoryUse({"GPU-0": 5.0}, 5.0)
    half = Tick(0, up=True, values={}, processes={"api": {"process_anonymous_memory_bytes": 1.0}, "engine": {}})
    assert Witness.memory([half]).process_bytes is None


def test_lengths_that_cannot_show_growth_are_refused(capsys, tmp_path):
    assert main(["memory", "http://127.0.0.1:1", "--output-tokens", "100", "150"]) == 2
    assert "at least twice" in capsys.readouterr().err


def test_each_output_token_fills_one_token_of_a_simulated_pool(capsys):
    child = Child("--engine", "vllm", "--model", "llama-3.1-8b", "--gpu", "h100", "--speed", "5")
    try:
        url = child.document["url"]
        gpu = child.document["gpu_url"]
        words = ["memory", url, "--gpu", gpu, "--config", "llama-3.1-8b", "--json", "--output-tokens", "400", "2000"]
        code = main(words)
        found = json.loads(capsys.readouterr().out)
        assert code == 0
        assert [one["completion_tokens"] for one in found["requests"]] == [400, 2000]
        assert found["growth_per_output_token"]["kv_tokens"] == pytest.approx(1.0, rel=0.1)
        assert found["growth_per_output_token"]["gpu_bytes"] == 0
        assert found["estimate"]["kv_bytes_per_token"] == 131_072
        assert min(found["idle"]["gpu_memory_used_bytes"].values()) > 16e9, "weights and pool"
        assert main(["memory", url, "--output-tokens", "100", "500000"]) == 2
        assert "does not fit" in capsys.readouterr().err
        assert main(["smoke", url, "--json"]) == 0
        smoke = json.loads(capsys.readouterr().out)
        layers = {layer["name"]: layer["outcome"] for layer in smoke["layers"]}
        assert layers == dict.fromkeys(("port_open", "answers", "generates", "reached_the_model"), "pass")
        assert "need not move" in smoke["layers"][-1]["detail"]
    finally:
        child.process.kill()
        child.process.communicate()


@pytest.mark.engine
def test_a_real_server_fills_its_cache_token_by_token(capsys, tmp_path):
    server = EmbeddedServer.start(log_path=tmp_path / "server.log", cache_dir=tmp_path)
    try:
        for _ in range(3):  # on a machine that is busy with others, the last samples of an answer may be missed
            assert main(["memory", server.url, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            long = found["requests"][1]
            held = long["prompt_tokens"] + long["completion_tokens"]
            if long["kv_tokens"] is not None and long["kv_tokens"] >= 0.8 * held:
                break
        assert 0.8 * held <= long["kv_tokens"] <= held + 1
        assert found["idle"]["process_anonymous_memory_bytes"] > 10 * MIB
        assert main(["smoke", server.url]) == 0
        assert "generation_tokens_total grew by 8" in capsys.readouterr().out
    finally:
        server.stop()


def test_a_server_that_does_not_tell_what_runs_is_not_taken_for_idle():
    found = concluded([cost(100, gpu=0.0, kv_tokens=110), cost(300, gpu=0.0, kv_tokens=310)], ticks=[tick(1, gpu=1.0)])
    assert any("not excluded" in note for note in found["notes"])
    known = [tick(0, gpu=1.0, requests_running=0.0)]
    found = concluded([cost(100, gpu=0.0, kv_tokens=110), cost(300, gpu=0.0, kv_tokens=310)], idle=known)
    assert not any("not excluded" in note for note in found["notes"])
    assert others_ran([], []) is None
    assert others_ran(known, [tick(1, requests_running=1.0)]) is False
    assert others_ran(known, [tick(1, requests_running=1.0, requests_waiting=1.0)]) is True
