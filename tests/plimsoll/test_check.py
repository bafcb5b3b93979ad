"""`plimsoll check`: exit codes, words, the document, and what --write-actual leaves."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child import Child

from monitor.history import SqliteHistory
from plimsoll import check
from serving.errors import ConfigError, PlimsollError
from serving.settings import read_settings, versions
from serving.simulator.dialects.base import StartFailure
from serving.simulator.shell import DIALECTS
from serving.simulator.spec import MemoryPlan, ServerSpec

SAMPLES = Path(__file__).parent.parent / "samples"
VLLM_LOG = SAMPLES / "vllm" / "startup.log"
SAME = "engine: vllm\nmodel: models/tiny-hf\nmax_num_seqs: 8  # proved on Tuesday\nmax_model_len: 2048\n"


@pytest.fixture
def settings(tmp_path):
    def write(text):
        path = tmp_path / "serving.yaml"
        path.write_text(text)
        return path

    return write


def run(*words):
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return check.run(parser.parse_args([str(word) for word in words]))


def document(capsys, *words):
    code = run(*words, "--json")
    said = capsys.readouterr()
    return code, json.loads(said.out, parse_constant=pytest.fail)


def test_a_server_that_runs_what_the_file_says_passes(settings, capsys):
    assert run(settings(SAME), "--log", VLLM_LOG) == 0
    said = capsys.readouterr().out
    assert "max_batch_size" in said
    assert "pass  the server runs what the file says" in said


def test_a_field_that_differs_fails_with_the_line_that_tells(settings, capsys):
    code, page = document(capsys, settings(SAME.replace("8 ", "16 ")), "--log", VLLM_LOG)
    assert (code, page["schema"], page["verdict"]) == (1, "plimsoll.check/1", "fail")
    assert page["reason"] == "the server does not run what the file says: max_batch_size"
    (wrong,) = [one for one in page["checks"] if one["outcome"] == "differs"]
    assert (wrong["expected"], wrong["expected_line"], wrong["actual"], wrong["line"]) == (16, 3, 8, 8)
    assert page["startup"]["ready"] is True
    assert page["startup"]["max_concurrency"] == 1024.0
    assert page["budget"]["estimates"] == []
    assert "--config" in page["budget"]["problem"], "the model of the file cannot be read here"


def test_a_clamp_fails_and_its_line_is_shown(settings, capsys):
    log = SAMPLES / "logs" / "check" / "sglang_0.5.19_capped_by_state.log"
    assert run(settings("max_running_requests: 32\n"), "--log", log) == 1
    said = capsys.readouterr().out
    assert "clamped" in said
    assert "max_running_requests is capped to 9 by the mamba state cache" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("hello\n", "holds no start of vllm, sglang, llamacpp"),
        ('INFO:     10.0.0.7:1 - "GET /health HTTP/1.1" 200 OK\n' * 9, "access lines alone tell nothing"),
        ("INFO:     Application startup complete.\n", "holds no start"),
    ],
)
def test_a_log_without_a_start_is_inconclusive_in_clear_words(settings, capsys, tmp_path, text, words):
    log = tmp_path / "a.log"
    log.write_text(text)
    assert run(settings(SAME), "--log", log) == 3
    assert words in capsys.readouterr().out


def test_the_log_of_another_engine_is_said(settings, capsys):
    assert run(settings(SAME), "--log", SAMPLES / "llamacpp" / "startup.log") == 1
    assert "the server is llamacpp, the file is for vllm: is it the right log?" in capsys.readouterr().out


class Instant:
    overhead_ns = 1

    def step_ns(self, step):
        del step
        return 1


def simulated(failure=None, **changes):
    values = {
        "engine": "vllm", "release": "0.33.0", "model": "tiny-hf", "max_batch": 8, "context_tokens": 2048,
        "token_budget": 2048, "block_tokens": 16, "kv_blocks": 1001, "cost": Instant(), "start_seconds": 60.0,
        "memory": MemoryPlan(
            cards=1, card_total_bytes=80 << 30, weights_bytes=14 << 30, kv_cache_bytes=40 << 30, workspace_bytes=4 << 30
        ),
    }  # fmt: skip
    of = ServerSpec(**{**values, **changes})
    return "\n".join(line.text for line in DIALECTS[of.engine].startup_log(of, T_NS, failure)) + "\n"


T_NS = 1_795_966_874_000_000_000


def test_a_log_that_still_grows_is_inconclusive_until_the_server_is_ready(settings, capsys, tmp_path):
    log = tmp_path / "a.log"
    lines = simulated().splitlines(keepends=True)
    log.write_text("".join(lines[: len(lines) // 2]))
    assert run(settings(SAME), "--log", log) == 3
    assert "does not come to its end" in capsys.readouterr().out
    log.write_text("".join(lines))
    assert run(settings(SAME), "--log", log) == 0


def test_a_failed_start_points_to_diagnose(settings, capsys, tmp_path):
    log = tmp_path / "a.log"
    log.write_text(simulated(StartFailure.NO_KV_CACHE))
    assert run(settings(SAME), "--log", log) == 3
    assert "plimsoll diagnose" in capsys.readouterr().out


def test_several_starts_and_two_engines_are_said(settings, capsys, tmp_path):
    log = tmp_path / "a.log"
    log.write_text(simulated() * 2 + simulated(engine="sglang", release="0.5.23", block_tokens=1, kv_blocks=16000))
    code, page = document(capsys, settings(SAME), "--log", log)
    assert (code, page["startup"]["engine"]) == (0, "vllm")
    assert any("holds 2 starts; the last, from line" in one for one in page["warnings"])
    assert any("--engine chooses" in one for one in page["warnings"])
    code, page = document(capsys, settings(SAME), "--log", log, "--engine", "sglang")
    assert (code, page["startup"]["engine"]) == (1, "sglang")


def test_a_stale_batch_size_is_said(settings, capsys):
    stale = SAME + "tensor_parallel_size: 1\nderived_from:\n  tensor_parallel_size: 8\n"
    code, page = document(capsys, settings(stale), "--log", VLLM_LOG)
    assert code == 0
    assert any("tensor_parallel_size" in one for one in page["warnings"])


def test_write_actual_corrects_the_file_keeps_its_words_and_backs_it_up(settings, capsys):
    path = settings(SAME.replace("8 ", "16 ").replace("model: models/tiny-hf", "model: another"))
    code, page = document(capsys, path, "--log", VLLM_LOG, "--write-actual")
    assert (code, page["written"]) == (1, {"max_batch_size": 8})
    after = path.read_text()
    assert "max_num_seqs: 8  # proved on Tuesday" in after
    assert "model: another" in after
    assert [stored.uses[-1].reason for stored in versions(path)] == [f"before --write-actual from {VLLM_LOG}"]
    assert read_settings(path).max_batch_size == 8


def test_write_actual_touches_nothing_where_all_is_equal(settings, capsys):
    path = settings(SAME)
    _, page = document(capsys, path, "--log", VLLM_LOG, "--write-actual")
    assert page["written"] == {}
    assert path.read_text() == SAME
    assert versions(path) == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --log"),
        (("--log", "/nonexistent/a.log"), "a.log"),
        (("--log", "."), "directory"),
        (("--log", VLLM_LOG, "--memory", "/nonexistent/a.db"), "a.db"),
    ],
)
def test_wrong_usage_is_one_clear_line(settings, words, message):
    with pytest.raises(PlimsollError, match=message):
        run(settings(SAME), *words)


@pytest.mark.parametrize("data", [b"\x1f\x8b\x08\x00", b"GGUF\x03\x00\x00\x00"])
def test_a_file_that_is_no_log_is_named(settings, tmp_path, data):
    log = tmp_path / "a.log"
    log.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.log: an? "):
        run(settings(SAME), "--log", log)


def test_a_line_cannot_write_to_the_terminal(settings, capsys, tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"\x1b]0;owned\x07llama_model_loader: loaded\nsrv load_model: loading model '\x07[red]x.gguf'\n")
    run(settings("model: y\n"), "--log", log)
    said = capsys.readouterr().out
    assert "\x07" not in said
    assert "[red]x.gguf" in said


# ---- memory


def record(path, samples):
    with SqliteHistory.create(path) as history:
        for t_ns, value in samples:
            history.append_tick("t", t_ns, {}, gpus={"GPU-1": {"gpu_memory_used_bytes": float(value)}})


def test_memory_is_told_by_the_phase_in_which_it_rose(settings, capsys, tmp_path):
    log, history = tmp_path / "a.log", tmp_path / "run.db"
    log.write_text(simulated())
    # As the simulated start has it: weights from 30 % on, the pool at 72 %, graphs until 95 %.
    gib = 1 << 30
    record(
        history,
        [(T_NS + second * 10**9, gib * (1 if second < 20 else 15 if second < 43 else 55)) for second in range(-5, 70)],
    )
    code, page = document(capsys, settings(SAME), "--log", log, "--memory", history)
    assert code == 0
    rises = {move["phase"]: move["rise_bytes"] / gib for move in page["memory"]}
    assert rises["weights"] == 14
    assert sum(rises.values()) == 54
    assert {move["of"] for move in page["memory"]} == {"GPU-1"}


def test_a_history_of_another_time_is_refused(settings, tmp_path):
    log, history = tmp_path / "a.log", tmp_path / "run.db"
    log.write_text(simulated())
    record(history, [(T_NS - 10**15 + second * 10**9, 5.0) for second in range(9)])
    with pytest.raises(ConfigError, match="cannot be placed"):
        run(settings(SAME), "--log", log, "--memory", history)


# ---- speed of start


def test_nothing_heavy_is_imported(settings):
    code = (
        "import sys; from plimsoll import check; import argparse; p = argparse.ArgumentParser(); check.add_arguments(p);"
        f"check.run(p.parse_args([{str(settings(SAME))!r}, '--log', {str(VLLM_LOG)!r}]));"
        "heavy = {'aiohttp', 'locust', 'gevent', 'numpy', 'scipy', 'torch', 'sqlite3', 'xllamacpp'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")


# ---- the live server


@pytest.fixture
def sglang(tmp_path):
    child = Child("--engine", "sglang", "--log", str(tmp_path / "engine.log"))
    yield child.document["url"], tmp_path / "engine.log"
    child.process.terminate()
    child.ends()


def test_the_live_server_and_its_log_are_compared_with_one_file(settings, capsys, sglang):
    url, log = sglang
    code, page = document(capsys, settings("engine: sglang\n"), "--url", url, "--log", log)
    limit = page["live"]["max_running_requests"]
    assert (code, page["verdict"], page["live"]["engine"]) == (0, "pass", "sglang")
    assert page["startup"]["settings"]["max_batch_size"]["value"] == limit
    code, page = document(capsys, settings(f"max_batch_size: {limit + 1}\n"), "--url", url)
    assert code == 1
    (wrong,) = page["checks"]
    assert (wrong["actual"], wrong["line"]) == (limit, None)
    assert wrong["text"].startswith("live: ")


LLAMA = "model: llama-3.1-8b\nengine: vllm\nmax_batch_size: 8\nmax_model_len: 2048\n"
KV_BYTES = 1000 * 16 * 131_072


def llama_log(tmp_path, **changes):
    memory = MemoryPlan(
        cards=1,
        card_total_bytes=81559 << 20,
        weights_bytes=16_060_522_496,
        kv_cache_bytes=KV_BYTES,
        workspace_bytes=4 << 30,
    )
    log = tmp_path / "llama.log"
    log.write_text(simulated(kv_blocks=1000, memory=memory, model="llama-3.1-8b", **changes))
    return log


def errors(page):
    return {(one["figure"], one["given"]): one["error_ratio"] for one in page["budget"]["estimates"]}


def test_what_the_log_reports_is_compared_with_the_budget(settings, capsys, tmp_path):
    code, page = document(capsys, settings(LLAMA), "--log", llama_log(tmp_path), "--gpu", "h100")
    assert code == 0, "an estimate that is off is no field that differs"
    found = errors(page)
    assert found["weights_bytes", "card"] == pytest.approx(0, abs=0.001)
    assert found["kv_tokens", "kv_cache_bytes"] == pytest.approx(0, abs=0.005)
    # The pool was made far smaller than the card allows.
    assert found["kv_tokens", "card"] > 20
    assert "far off" in page["budget"]["problem"]
    assert found["max_concurrency", "card"] == pytest.approx(found["kv_tokens", "card"], rel=0.01)


def test_people_are_told_the_error_in_percent(settings, capsys, tmp_path):
    assert run(settings(LLAMA + "gpu: h100\n"), "--log", llama_log(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "budget: kv tokens from the log's KV bytes: 1" in said
    assert "%)" in said


def test_without_a_card_only_what_follows_from_the_model_is_compared(settings, capsys, tmp_path):
    _, page = document(capsys, settings(LLAMA), "--log", llama_log(tmp_path))
    assert set(errors(page)) == {
        ("weights_bytes", "card"),
        ("kv_tokens", "kv_cache_bytes"),
        ("max_concurrency", "kv_cache_bytes"),
    }
    assert "give --gpu" in page["budget"]["problem"]


def test_a_model_that_cannot_be_divided_as_the_log_says_is_no_failure_of_the_check(settings, capsys, tmp_path):
    log = llama_log(tmp_path)
    log.write_text(log.read_text().replace("tensor_parallel_size=1", "tensor_parallel_size=7"))
    code, page = document(capsys, settings(LLAMA), "--log", log, "--gpu", "h100")
    assert (code, page["budget"]["estimates"]) == (0, [])
    assert "cannot share evenly" in page["budget"]["problem"]


def test_of_several_copies_the_log_tells_the_tokens_of_one(settings, capsys, tmp_path):
    log = llama_log(tmp_path)
    _, alone = document(capsys, settings(LLAMA), "--log", log, "--gpu", "h100")
    log.write_text(log.read_text().replace("data_parallel_size=1", "data_parallel_size=2"))
    _, two = document(capsys, settings(LLAMA), "--log", log, "--gpu", "h100")
    assert two["startup"]["replicas"] == 2
    key = ("kv_tokens", "kv_cache_bytes")
    assert errors(two)[key] == errors(alone)[key] == pytest.approx(0, abs=0.005)


def test_what_the_file_does_not_say_is_not_written_into_it(settings, capsys):
    log = SAMPLES / "logs" / "check" / "sglang_2026_reduced.log"
    path = settings("engine: sglang\nmax_model_len: 16384\n")
    code, page = document(capsys, path, "--log", log, "--write-actual")
    assert (code, page["written"]) == (1, {"max_model_len": 32768})
    assert any(check["key"] == "max_batch_size" and check["outcome"] == "clamped" for check in page["checks"])
    assert read_settings(path).max_batch_size is None


def test_weights_of_another_width_are_those_that_the_file_was_derived_from(settings, capsys, tmp_path):
    log = llama_log(tmp_path)
    path = settings(LLAMA + "gpu: h100\nderived_from:\n  weight_bits: 8\n")
    _, page = document(capsys, path, "--log", log)
    # The matrices of the layers in 8 bits, embedding and output matrix in 16: 9.08 GB against the log's 16.06.
    assert errors(page)["weights_bytes", "card"] == pytest.approx(9.08 / 16.06 - 1, abs=0.002)


def test_the_caches_of_several_cards_are_together_that_of_all_layers(settings, capsys, tmp_path):
    # 40 layers with 64 heads of 128 for keys and for values: the log has 5,120 MiB for 4,096 tokens on two cards.
    config = tmp_path / "config.json"
    shape = {"hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64}
    shape |= {"model_type": "llama", "vocab_size": 256000, "max_position_embeddings": 131072}
    config.write_text(json.dumps(shape))
    log = SAMPLES / "logs" / "check" / "llamacpp_2024_two_cards.log"
    for words in ("gpus: 2\n", "gpus: 2\ngpu_layers: 99\n"):
        path = settings(f"model: {config}\nengine: llamacpp\n{words}")
        _, page = document(capsys, path, "--log", log)
        assert errors(page)["kv_tokens", "kv_cache_bytes"] == 0
