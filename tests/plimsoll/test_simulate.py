"""`plimsoll simulate` starts what is asked for, says what it is, and ends as it should."""

import argparse
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from child import Child

from plimsoll import demo, simulate
from plimsoll.cli import main
from serving.cards import CARDS
from serving.model import BUILT_IN_MODELS
from serving.simulator.faults import FAULT_KINDS
from serving.simulator.launch import LaunchFailure
from serving.simulator.shell import DIALECTS
from serving.simulator.truth import read_truth


@pytest.fixture
def start():
    children = []

    def begin(*arguments, **options):
        child = Child(*arguments, **options)
        children.append(child)
        return child

    yield begin
    for child in children:
        child.process.kill()
        child.process.communicate()


def generate(child, tokens=5):
    body = {"model": child.document["model"], "prompt": "a b c", "max_tokens": tokens, "ignore_eos": True}
    return child.request("POST", "/v1/completions", body)


def plan(*words):
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return simulate._plan(parser.parse_args(words))


def test_it_says_what_it_is_serves_and_leaves_a_whole_truth_when_it_is_stopped(start, tmp_path):
    child = start("--truth", str(tmp_path / "truth.jsonl"), "--log", str(tmp_path / "engine.log"))
    document = child.document
    assert (document["schema"], document["pid"]) == ("plimsoll.simulate/1", child.process.pid)
    assert (document["engine"], document["model"], document["simulated"]) == ("vllm", "hy3", True)
    assert document["spec"]["cards"] == 8
    status, answer = generate(child)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    child.process.send_signal(signal.SIGTERM)
    code, said = child.ends()
    assert code == 0
    assert "not a real engine" in said
    assert document["url"] in said
    with (tmp_path / "truth.jsonl").open(encoding="utf-8") as lines:
        report = read_truth(lines)
    assert (report.tokens, report.inside, report.cut) == (5, 0, False)
    assert "vLLM API server version" in (tmp_path / "engine.log").read_text(encoding="utf-8")


def test_ctrl_c_ends_it_with_130(start):
    child = start("--engine", "llamacpp", "--model", "qwen2.5-7b", "--gpu", "rtx-4090", "--context", "8192")
    assert generate(child)[0] == 200
    child.process.send_signal(signal.SIGINT)
    assert child.ends()[0] == 130


def test_it_ends_with_the_process_that_holds_its_input(start):
    child = start("--until-stdin-closes", stdin=subprocess.PIPE)
    child.process.stdin.close()
    child.process.stdin = None
    assert child.ends()[0] == 0


def test_out_of_memory_ends_it_with_1(start, tmp_path):
    child = start("--fault", "oom_at_bytes=1GiB", "--log", str(tmp_path / "engine.log"))
    assert generate(child)[0] == 500
    code, said = child.ends()
    assert code == 1
    assert "out_of_memory" in said
    assert "CUDA out of memory" in (tmp_path / "engine.log").read_text(encoding="utf-8")


def test_what_does_not_fit_does_not_start_and_its_log_says_why(capsys, tmp_path):
    code = main(
        ["simulate", "--model", "hy3", "--gpu", "rtx-4090", "--gpus", "1", "--json", "--log", f"{tmp_path}/log"]
    )
    captured = capsys.readouterr()
    assert code == 1
    document = json.loads(captured.out)
    assert (document["url"], document["failure"]) == (None, "weights_out_of_memory")
    assert "does not start" in captured.err
    assert "out of memory" in (tmp_path / "log").read_text(encoding="utf-8").lower()


def test_without_a_log_file_the_failed_start_is_told_to_people(capsys):
    assert main(["simulate", "--model", "hy3", "--gpu", "rtx-4090", "--gpus", "1"]) == 1
    assert len(capsys.readouterr().err.splitlines()) > 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "vlm"], "vllm, sglang, llamacpp"),
        (["--release", "9.9"], "0.32.0"),
        (["--model", "hy4"], "hy3"),
        (["--gpu", "h2000"], "h200"),
        (["--fault", "http_5000"], "http_500"),
        (["--fault", "oom_at_bytes"], "oom_at_bytes="),
        (["--background", "fast"], "2/s"),
        (["--speed", "0"], "0.001"),
        (["--speed", "x"], "not a number"),
        (["--port", "70000"], "outside 0 to 65535"),
        (["--max-batch", "0"], "outside 1 to"),
        (["--gpus", "two"], "whole number"),
        (["--restart-after", "-1"], "duration"),
        (["--context", "999999999"], "999999999"),
        (["--settings", "/nonexistent.yaml"], "/nonexistent.yaml"),
        (["--api-key"], "PLIMSOLL_API_KEY"),
        (["--host-experts", "2"], "outside 0 to 1"),
        (["--host-experts", "x"], "not a number"),
        (["--host-experts", "0.5"], "mean nothing to vllm"),
        (["--kv-unified"], "mean nothing to vllm"),
        (["--truth", __file__], "never overwritten"),
        (["--truth", "/proc/nothing/truth"], "/proc/nothing"),
        (["--log", "/proc/nothing/log", "--port", "0"], "/proc/nothing"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_what_to_do(capsys, monkeypatch, words, says):
    monkeypatch.delenv("PLIMSOLL_API_KEY", raising=False)
    assert main(["simulate", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.startswith("plimsoll: error: ")
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_told(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["simulate", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_start_that_failed_leaves_no_truth_in_the_way_of_the_next(capsys, tmp_path):
    truth = tmp_path / "truth.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["simulate", "--port", str(taken.getsockname()[1]), "--truth", str(truth)]) == 2
    assert "another --port" in capsys.readouterr().err
    assert not truth.exists()
    assert main(["simulate", "--port", "0", "--log", "/dev/full", "--truth", str(truth)]) == 4
    assert "cannot write the log /dev/full: No space left" in capsys.readouterr().err
    assert not truth.exists()


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"intermediate_size": 128, "vocab_size": 99, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("flag", "content"), [("--truth", None), ("--settings", "model: hy3\n"), ("--model", json.dumps(LLAMA))]
)
def test_the_log_overwrites_nothing_that_is_read_or_kept(capsys, tmp_path, flag, content):
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert main(["simulate", "--port", "0", flag, str(file), "--log", f"{tmp_path}/../{tmp_path.name}/file"]) == 2
    assert f"is what {flag} names" in capsys.readouterr().err


def test_a_truth_for_which_there_is_no_room_ends_it_with_4_and_says_so(start, tmp_path):
    child = start("--truth", str(tmp_path / "truth.jsonl"), "--background", "50/s,prompt=20,output=20")
    resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    out, err = child.process.communicate(timeout=20)
    assert child.process.returncode == 4
    message = f"cannot write the truth {tmp_path}/truth.jsonl: "
    assert err.decode().splitlines()[-1].startswith(f"plimsoll: error: {message}")
    assert json.loads(out)["error"]["message"].startswith(message)


def test_flags_settings_and_defaults_make_the_server(tmp_path, monkeypatch):
    assert (plan().spec.model, plan().spec.memory.cards, plan().port) == ("hy3", 8, 8000)
    assert plan("--model", "hy3", "--gpu", "h200").spec.memory.cards == 8
    assert plan("--engine", "llamacpp", "--model", "qwen2.5-7b", "--gpu", "rtx-4090").port == 8080
    assert isinstance(plan("--model", "hy3", "--gpus", "1").spec, LaunchFailure)
    spec = plan("--max-batch", "48", "--kv-blocks", "4096", "--context", "32768", "--token-budget", "2048").spec
    assert (spec.max_batch, spec.kv_blocks, spec.context_tokens, spec.token_budget) == (48, 4096, 32768, 2048)
    assert plan("--queue-limit", "7").spec.queue_limit == 7
    offload = ("--engine", "llamacpp", "--model", "qwen3-30b-a3b", "--gpu", "rtx-3090", "--weight-bits", "4.85")
    whole, half = plan(*offload).spec, plan(*offload, "--host-experts", "0.5", "--kv-unified").spec
    assert half.memory.weights_bytes < 0.6 * whole.memory.weights_bytes
    assert not half.policy.partitioned
    settings = tmp_path / "serving.yaml"
    settings.write_text("model: hy3\nengine: sglang\nmax_batch_size: 24\ntensor_parallel_size: 8\n", encoding="utf-8")
    asked = plan("--settings", str(settings))
    assert (asked.spec.engine, asked.spec.max_batch, asked.spec.memory.cards) == ("sglang", 24, 8)
    assert asked.dialect.name == "sglang"
    assert plan("--settings", str(settings), "--max-batch", "12").spec.max_batch == 12
    settings.write_text("model: qwen2.5-7b\ngpu: NVIDIA L40S\ngpus: 2\n", encoding="utf-8")
    memory = plan("--settings", str(settings)).spec.memory
    assert (memory.card_name, memory.cards) == ("NVIDIA L40S", 2)
    assert plan("--settings", str(settings), "--gpu", "h100").spec.memory.card_name == "NVIDIA H100 80GB HBM3"
    monkeypatch.setenv("PLIMSOLL_API_KEY", " s3cret ")
    assert plan("--api-key").api_key == "s3cret"
    assert plan().api_key is None


def test_customers_stay_within_the_context_and_faults_keep_the_seed():
    asked = plan("--background", "2/s", "--context", "4096", "--seed", "7", "--fault", "http_500=5%")
    assert asked.traffic.context_tokens == 4096
    assert asked.traffic.seed == asked.faults.seed == 7
    assert [fault.name for fault in asked.faults.faults.values()] == ["http_500"]


def test_every_fault_release_model_card_and_flag_is_in_the_page_for_people():
    page = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser(add_help=False)
    simulate.add_arguments(parser)
    flags = [action.option_strings[0] for action in parser._actions if action.help != argparse.SUPPRESS]
    options = [f"`{name}`" for kind in FAULT_KINDS.values() for name in kind.options]
    releases = [release for dialect in DIALECTS.values() for release in dialect.releases]
    named = [f"`{name}`" for name in (*FAULT_KINDS, *BUILT_IN_MODELS, *(card.short_names[0] for card in CARDS))]
    assert [word for word in (*flags, *options, *releases, *named) if word not in page] == []


def test_a_simulated_server_for_a_run_is_gone_after_it():
    with demo.simulated_server([*demo.SIMULATED, "--speed", "50"]) as server:
        assert Path(f"/proc/{server['pid']}").exists()
        connection = http.client.HTTPConnection(server["url"].removeprefix("http://"), timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    with pytest.raises(ProcessLookupError):
        os.kill(server["pid"], 0)


def test_a_simulated_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(Exception, match="weights need"), demo.simulated_server(["--model", "hy3", "--gpus", "1"]):
        pass
    (tmp_path / "truth").touch()
    with pytest.raises(Exception, match="never overwritten"), demo.simulated_server(["--truth", f"{tmp_path}/truth"]):
        pass


def test_the_simulated_demo_says_that_it_is_a_simulation_and_keeps_the_truth_beside_the_run(
    capsys, monkeypatch, tmp_path
):
    asked = []

    async def execute(options, console):
        del console
        asked.append(options)
        connection = http.client.HTTPConnection(options.url.removeprefix("http://"), timeout=10)
        body = {"model": "hy3", "prompt": "a b c", "max_tokens": 3, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert connection.getresponse().status == 200
        connection.close()
        options.out.touch()
        return {"schema": "plimsoll.stress/1", "target": {"url": options.url, "engine": "vllm"}, "exit_code": 0}

    monkeypatch.setattr(demo, "execute", execute)
    folder = tmp_path / "demo"
    assert main(["demo", "--simulated", "--json", "--out", str(folder)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["target"]["simulated"] is True
    assert "SIMULATED" in captured.err
    assert "truth.jsonl" in captured.err
    assert (asked[0].gpu, asked[0].log) == (f"{asked[0].url}/dcgm", folder / "engine.log")
    with (folder / "truth.jsonl").open(encoding="utf-8") as lines:
        assert read_truth(lines).tokens == 3
    assert main(["demo", "--simulated", "--out", str(folder)]) == 2
