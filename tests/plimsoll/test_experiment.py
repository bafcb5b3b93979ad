"""Experiments on real processes: simulated servers and llama.cpp, a restart script, a ledger, and `kill -9`."""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from plimsoll import experiment, restarting
from plimsoll.experiment_world import settings_hash
from plimsoll.journal import journal_path
from plimsoll.ledger import Conclusion, read_ledger
from plimsoll.restarting import LogMark, RunningCommand, run_restart
from serving.embedded.tiny_model import PRESETS, cached_gguf
from serving.errors import ConfigError
from serving.settings import read_settings

SCRIPT = Path(__file__).with_name("restart_server.py")
QUICK = ("--prompt-tokens", "64", "--output-tokens", "8", "--rounds", "2", "--limit", "60")
"""A short load whose speeds are not judged: this machine has others on it, and what is held here is no speed."""
ONE = ("--concurrency", "1")
"""One level only, where nobody looks at the figures of more requests at once."""
SETTINGS = """\
# what the shop runs
engine: vllm
model: qwen2.5-7b
max_batch_size: 4   # few
max_model_len: 8192
"""
START = "import argparse,sys; from plimsoll import experiment as e; p=argparse.ArgumentParser(); e.add_arguments(p); sys.exit(e.run(p.parse_args()))"


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def answers(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5) as page:
        return page.status == 200
    return False


def wait_for(condition, what, limit_seconds=60):
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_seconds} s: {what}"
        time.sleep(0.05)


class Shop:
    """A folder with settings, a server that runs them, and the means to experiment on it."""

    def __init__(self, folder, text, mode, arguments):
        self.folder = folder
        self.settings = folder / "s.yaml"
        self.settings.write_text(text)
        self.text = text
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.restart = shlex.join([sys.executable, str(SCRIPT), mode, str(folder), str(self.port), *arguments])

    def open(self, engine_arguments=""):
        environment = os.environ | {"PLIMSOLL_SETTINGS": str(self.settings), "PLIMSOLL_ENGINE_ARGS": engine_arguments}
        self.close()
        subprocess.run(self.restart, shell=True, check=True, env=environment)  # noqa: S602 - as an operator would
        wait_for(lambda: answers(self.url), "the first server")

    def close(self):
        subprocess.run([sys.executable, SCRIPT, "stop", self.folder], check=True)

    def words(self, action, *words, restart=None):
        common = ["--url", self.url, "--restart", restart or self.restart, "--log", self.log, *QUICK]
        common += ["--allow-worse", "10"] if action == "set" else []
        return [
            action,
            str(self.settings),
            *map(str, common if action != "recover" else ()),
            *map(str, words),
            "--json",
        ]

    def spawn(self, action, *words, **options):
        """Start it as a process of its own."""
        command = [sys.executable, "-c", START, *self.words(action, *words, **options)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def records(self):
        return read_ledger(self.folder / "s.ledger.jsonl").records


@pytest.fixture
def shop(tmp_path):
    made = Shop(tmp_path, SETTINGS, "simulated", ["--gpu", "h200", "--kv-blocks", "1281", "--speed", "5"])
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    """The waits of one process for another, shortened: the servers here are ready within a second."""
    monkeypatch.setattr(restarting, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(restarting, "_DEATH_SECONDS", 0.5)


@pytest.fixture
def experiment_on(shop, capsys):
    """Run an experiment here: exit code and document."""

    def go(action, *words, **options):
        parser = argparse.ArgumentParser()
        experiment.add_arguments(parser)
        code = experiment.run(parser.parse_args(shop.words(action, *words, **options)))
        document = json.loads(capsys.readouterr().out)
        assert document["schema"] == "plimsoll.experiment/1"
        assert document["exit_code"] == code
        return code, document

    return go


def test_changes_that_prove_themselves_are_kept_and_the_ledger_shows_before_and_after(shop, experiment_on):
    code, document = experiment_on("set", "max_num_seqs=8", "--by", "ann")
    assert (code, document["outcome"], document["serving"]) == (0, "kept", True)
    assert shop.settings.read_text() == SETTINGS.replace("max_batch_size: 4", "max_batch_size: 8")
    (record,) = shop.records
    assert (record.conclusion, record.by) == (Conclusion.KEPT, "ann")
    assert [(change.key, change.before, change.after) for change in record.changes] == [("max_batch_size", 4, 8)]
    assert record.startup["max_batch_size"] == 8
    assert record.hash_after == settings_hash(read_settings(shop.settings))
    for figures in (record.before, record.after):
        assert {"decode_tokens_per_second@1", "ttft_seconds@4", "failures"} <= set(figures)
    assert [proof["asked"] for proof in record.detail["limits"]] == [1, 8]
    assert not journal_path(shop.settings).exists()

    code, document = experiment_on("set", "max_num_seqs=6", "max_model_len=4096", "--allow-many", "--reuse-baseline")
    assert (code, document["outcome"]) == (0, "kept")
    assert "2 settings were changed at once" in shop.records[1].warnings[0]
    assert shop.records[1].before == record.after
    assert f"the baseline is that of record {record.id}" in shop.records[1].warnings


def test_a_value_that_does_not_fit_the_memory_is_rolled_back_and_served_again(shop, experiment_on):
    code, document = experiment_on("set", "max_model_len=32768", *ONE)
    assert (code, document["outcome"], document["serving"]) == (1, "rolled back", True)
    assert "the KV cache is smaller than one request" in document["reason"]
    assert shop.settings.read_text() == SETTINGS
    assert answers(shop.url)
    (record,) = shop.records
    assert (record.conclusion, record.after) == (Conclusion.ROLLED_BACK, {})
    assert record.served()[0]["max_model_len"] == 8192


def test_a_server_that_clamps_the_value_is_rolled_back_with_the_line_that_says_so(shop, experiment_on):
    shop.settings.write_text(SETTINGS.replace("vllm", "sglang"))
    shop.open()
    code, document = experiment_on("set", "max_batch_size=8", *ONE, restart=f"{shop.restart} --fault clamp_max_batch=5")
    assert (code, document["outcome"]) == (1, "rolled back")
    assert document["reason"].startswith("check: max_batch_size is 5, not 8")
    assert "reduced from the requested 8 to 5" in document["reason"]


def test_a_batch_limit_that_was_cut_in_silence_shows_in_the_burst(shop, experiment_on):
    _, document = experiment_on(
        "set", "max_batch_size=40", *ONE, "--output-tokens", "96", restart=f"{shop.restart} --fault clamp_max_batch=5"
    )
    assert any("at most 5 ran while others waited" in text for text in document["record"]["warnings"])


def test_a_server_that_dies_of_the_burst_is_rolled_back(shop, experiment_on):
    restart = f'{shop.restart} $(grep -q "max_batch_size: 8" $PLIMSOLL_SETTINGS && echo --fault oom_at_bytes=1MiB)'
    code, document = experiment_on("set", "max_batch_size=8", *ONE, restart=restart)
    assert (code, document["outcome"], document["serving"]) == (1, "rolled back", True)
    assert answers(shop.url)
    assert shop.settings.read_text() == SETTINGS


@pytest.mark.parametrize(
    ("slow_when", "code", "verdict", "said"),
    [
        ("max_batch_size: 8", 1, "fail", "allowed are 50%"),
        ("engine: vllm", 3, "inconclusive", "the old server is no better now"),
    ],
)
def test_a_slow_change_is_told_from_a_machine_that_became_slow(shop, experiment_on, slow_when, code, verdict, said):
    fault = f'$(grep -q "{slow_when}" $PLIMSOLL_SETTINGS && echo --fault step_slowdown=4)'
    words = ("--allow-worse", "0.5", "--output-tokens", "16", *ONE)
    found, document = experiment_on("set", "max_batch_size=8", *words, restart=f"{shop.restart} {fault}")
    assert (found, document["verdict"], document["outcome"], document["serving"]) == (
        code,
        verdict,
        "rolled back",
        True,
    )
    assert document["reason"].startswith("measure: ")
    assert said in document["reason"]
    (record,) = shop.records
    assert ("old_again" in record.detail, record.reason) == (True, document["reason"])


def test_a_restart_command_that_restarts_nothing_is_not_taken_for_a_restart(shop, experiment_on):
    # A second server that finds the port taken writes such lines as well.
    started = "INFO 11-29 12:00:00 [utils.py:1] non-default args: {'max_num_seqs': 8}"
    restart = f"echo {shlex.quote(started)} >> {shop.log}"
    code, document = experiment_on("set", "max_batch_size=8", "--limit", "1", *ONE, restart=restart)
    assert (code, document["outcome"], document["serving"]) == (1, "rolled back", True)
    assert "the old server still answers" in document["reason"]
    assert shop.settings.read_text() == SETTINGS


def test_a_server_that_never_comes_back_is_told_with_its_backup_and_can_be_recovered(shop, experiment_on):
    stop = shlex.join([sys.executable, str(SCRIPT), "stop", str(shop.folder)])
    code, document = experiment_on("set", "max_batch_size=8", "--limit", "1", *ONE, restart=stop)
    assert (code, document["outcome"], document["serving"]) == (4, "lost", False)
    assert "cannot be reached" in document["reason"]
    assert shop.settings.read_text() == SETTINGS
    assert document["backup"]["version"] == 1
    assert Path(document["backup"]["path"]).read_text() == SETTINGS

    with pytest.raises(ConfigError, match="plimsoll experiment recover"):
        experiment_on("set", "max_batch_size=8")
    code, document = experiment_on("recover", "--restart", shop.restart, "--limit", "60")
    assert (code, document["outcome"], document["serving"]) == (0, "rolled back", True)
    assert [record.conclusion for record in shop.records] == [Conclusion.ROLLED_BACK] * 2
    assert "did not come back" in shop.records[0].reason
    assert not journal_path(shop.settings).exists()


@pytest.mark.parametrize(
    ("restart", "said"),
    [
        ("echo all wrong >&2; exit 3", "the restart command ended with code 3: all wrong"),
        (
            "sleep 60",
            "the restart command did not end within 1 s (it has to leave the server running in the background, and end)",
        ),
        ("kill -9 $$", "the restart command was ended by signal 9"),
    ],
)
def test_a_restart_command_that_fails_is_told_in_its_own_words(shop, experiment_on, restart, said):
    code, document = experiment_on("set", "max_batch_size=8", "--limit", "1", *ONE, restart=restart)
    assert (code, document["outcome"], document["serving"]) == (1, "rolled back", True)
    assert document["reason"] == f"restart: {said}"
    assert shop.settings.read_text() == SETTINGS
    assert answers(shop.url)


def test_a_target_that_is_not_there_changes_nothing(shop, experiment_on):
    shop.close()
    code, document = experiment_on("set", "max_batch_size=8")
    assert (code, document["outcome"], document["serving"]) == (4, "nothing changed", False)
    assert "cannot be reached" in document["reason"]
    assert (shop.records, journal_path(shop.settings).exists()) == ((), False)
    assert shop.settings.read_text() == SETTINGS


def last_step(shop):
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads(journal_path(shop.settings).read_text().splitlines()[-1])["state"]["step"]
    return None


@pytest.mark.parametrize("step", ["restart", "wait", "limits", "measure"])
def test_killed_while_the_new_server_runs_the_old_one_is_recovered(shop, experiment_on, step):
    child = shop.spawn("set", "max_batch_size=8", *ONE)
    try:
        wait_for(lambda: last_step(shop) == step or child.poll() is not None, step)
    finally:
        child.kill()
        child.communicate()
    assert "max_batch_size: 8" in shop.settings.read_text()
    with pytest.raises(ConfigError, match="plimsoll experiment recover"):
        experiment_on("sweep", "max_batch_size=2,3")
    code, document = experiment_on("recover")
    assert (code, document["outcome"], document["serving"]) == (0, "rolled back", True)
    assert shop.settings.read_text() == SETTINGS
    (record,) = shop.records
    assert record.reason.startswith(f"the experiment was cut off at {step}")
    assert [(change.key, change.before, change.after) for change in record.changes] == [("max_batch_size", 4, 8)]
    assert set(record.before) >= {"decode_tokens_per_second@1"}


def test_recovered_without_the_stored_file_the_old_values_come_back_and_are_recorded_once(shop, experiment_on):
    child = shop.spawn("set", "max_batch_size=8", *ONE)
    try:
        wait_for(lambda: last_step(shop) == "wait" or child.poll() is not None, "wait")
    finally:
        child.kill()
        child.communicate()
    shutil.rmtree(shop.folder / "s.yaml.plimsoll")
    for _ in range(2):
        code, document = experiment_on("recover", "--restart", "false")
        assert (code, document["outcome"], document["backup"]["path"]) == (4, "lost", None)
    code, document = experiment_on("recover")
    assert (code, document["outcome"], document["serving"]) == (0, "rolled back", True)
    assert shop.settings.read_text() == SETTINGS
    assert len(shop.records) == 2
    assert len({record.id for record in shop.records}) == 2


def test_settings_that_somebody_else_edits_meanwhile_are_not_taken_for_what_was_tried(shop, experiment_on):
    restart = (
        f'{shop.restart}; grep -q "max_batch_size: 8" $PLIMSOLL_SETTINGS && sed -i s/8192/4096/ {shop.settings}; true'
    )
    code, document = experiment_on("set", "max_batch_size=8", *ONE, restart=restart)
    assert (code, document["outcome"], document["serving"]) == (3, "rolled back", True)
    assert "max_model_len of s.yaml was changed by somebody else" in document["reason"]
    assert shop.settings.read_text() == SETTINGS
    stored = [path.read_text() for path in sorted((shop.folder / "s.yaml.plimsoll").glob("0*.yaml"))]
    assert SETTINGS.replace("max_batch_size: 4", "max_batch_size: 8").replace("8192", "4096") in stored


def test_a_change_that_no_log_can_prove_is_not_kept(shop, experiment_on):
    code, document = experiment_on("set", "max_batch_size=8", *ONE, "--log", shop.folder / "other.log")
    assert (code, document["verdict"], document["outcome"]) == (3, "inconclusive", "rolled back")
    assert "is it the log of this server?" in document["reason"]


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGINT, "measure"), (signal.SIGTERM, "wait"), (signal.SIGHUP, "restart")]
)
def test_a_signal_rolls_back(shop, number, step):
    child = shop.spawn("set", "max_batch_size=8", *ONE)
    try:
        wait_for(lambda: last_step(shop) == step or child.poll() is not None, step)
        child.send_signal(number)
        out, _ = child.communicate(timeout=90)
    finally:
        child.kill()
    document = json.loads(out)
    assert (child.returncode, document["outcome"], document["serving"]) == (130, "rolled back", True)
    assert shop.settings.read_text() == SETTINGS
    assert answers(shop.url)


def test_a_sweep_measures_each_value_and_the_old_one_comes_back(shop, experiment_on):
    code, document = experiment_on("sweep", "max_batch_size=2,8", "--output-tokens", "24")
    assert (code, document["outcome"], document["serving"]) == (0, "rolled back", True)
    assert [(trial["label"], trial["verdict"]) for trial in document["trials"]] == [
        ("max_batch_size=2", "ok"),
        ("max_batch_size=8", "ok"),
    ]
    two, eight = (trial["output_tokens_per_second"] for trial in document["trials"])
    assert eight > 1.5 * two
    assert shop.settings.read_text() == SETTINGS
    assert [record.conclusion for record in shop.records] == ["measured", "measured", "rolled back"]
    assert shop.records[-1].changes == ()


def test_the_ladder_finds_the_context_with_which_the_server_starts(shop, experiment_on):
    shop.close()
    shop.settings.write_text(SETTINGS.replace("8192", "32768"))
    code, document = experiment_on("ladder", "--context", "30000,16384,8192", *ONE)
    assert (code, document["outcome"]) == (0, "kept")
    assert document["reason"] == "the context helps, and no quantisation could be tried: the KV cache binds"
    assert [(trial["label"], trial["served"]) for trial in document["trials"]] == [
        ("max_model_len=30000", False),
        ("max_model_len=16384", True),
    ]
    assert read_settings(shop.settings).max_model_len == 16384
    assert [record.conclusion for record in shop.records] == ["refused", "measured", "kept"]


def test_a_ladder_without_a_rung_that_holds_says_that_the_card_cannot(shop, experiment_on):
    shop.close()
    text = SETTINGS.replace("8192", "32768")
    shop.settings.write_text(text)
    code, document = experiment_on("ladder", "--context", "30000", *ONE)
    assert (code, document["outcome"]) == (1, "rolled back")
    assert "this card cannot" in document["reason"]
    assert shop.settings.read_text() == text


def test_a_ladder_of_a_server_that_meets_what_is_asked_changes_nothing(shop, experiment_on):
    code, document = experiment_on("ladder", "--context", "4096", "--ttft", "60", *ONE)
    assert (code, document["outcome"], document["serving"]) == (0, "nothing changed", True)
    assert "no need to retreat" in document["reason"]
    assert shop.records == ()


def test_a_ladder_retreats_from_a_limit_that_is_missed(shop, experiment_on):
    code, document = experiment_on("ladder", "--batch", "2", "--tpot", "0.000001", *ONE)
    assert (code, document["outcome"]) == (1, "rolled back")
    assert document["trials"][0]["reason"].startswith("measure: time per token at ")
    assert document["serving"] is True
    assert shop.settings.read_text() == SETTINGS


def test_quantised_kv_is_not_accepted_while_nobody_can_tell_its_drift(shop, experiment_on):
    # The simulator's answers are not the model's: they differ each time, and the probe says so.
    code, document = experiment_on("set", "kv_cache_dtype=fp8", *ONE)
    assert (code, document["verdict"], document["outcome"]) == (3, "inconclusive", "rolled back")
    assert "--accept-drift" in document["reason"]
    quality = shop.records[0].detail["quality"]
    assert quality["prompts"] == 6
    assert quality["own_drift_ratio"] > 0.5
    code, document = experiment_on("set", "kv_cache_dtype=fp8", "--accept-drift", *ONE)
    assert (code, document["outcome"]) == (0, "kept")
    assert any("quality probe" in warning for warning in document["record"]["warnings"])


# ---- wrong usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["max_batch_size=8", "max_model_len=4096"], "--allow-many"),
        (["max_batch_size=4"], "is 4 already"),
        (["max_batchsize=8"], "max_batch_size"),
        (["max_batch_size"], "NAME=VALUE"),
        (["max_batch_size=0"], "max_batch_size"),
        (["max_batch_size=8", "max_num_seqs=9"], "given twice"),
    ],
)
def test_a_change_that_is_none_is_refused_before_anything_happens(tmp_path, words, message):
    shop = Shop(tmp_path, SETTINGS, "simulated", [])
    parser = argparse.ArgumentParser()
    experiment.add_arguments(parser)
    with pytest.raises(ConfigError, match=message):
        experiment.run(parser.parse_args(shop.words("set", *words)))
    assert list(tmp_path.iterdir()) == [shop.settings]


@pytest.mark.parametrize(
    ("action", "words", "message"),
    [
        ("sweep", ["kv_cache_dtype=fp8,fp8_e5m2"], "--drift-limit"),
        ("sweep", ["max_batch_size=8,8"], "given twice"),
        ("sweep", ["max_batch_size="], "KEY=V1,V2"),
        ("ladder", ["--quantize", "kv_cache_dtype=fp8"], "--accept-drift"),
        ("ladder", [], "nothing to fall back to"),
        ("ladder", ["--context", "many"], "max_model_len"),
        ("ladder", ["--context", "2048,4096"], "from larger to smaller"),
        ("ladder", ["--batch", "8"], "max_batch_size is 4"),
        ("recover", [], "nothing to recover"),
    ],
)
def test_wrong_usage_is_refused_before_anything_happens(tmp_path, action, words, message):
    shop = Shop(tmp_path, SETTINGS, "simulated", [])
    parser = argparse.ArgumentParser()
    experiment.add_arguments(parser)
    with pytest.raises(ConfigError, match=message):
        experiment.run(parser.parse_args(shop.words(action, *words)))
    assert list(tmp_path.iterdir()) == [shop.settings]


def test_a_key_in_the_restart_command_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_API_KEY", "hush-hush")
    shop = Shop(tmp_path, SETTINGS, "simulated", [])
    parser = argparse.ArgumentParser()
    experiment.add_arguments(parser)
    with pytest.raises(ConfigError, match="leave it out") as refused:
        experiment.run(parser.parse_args(shop.words("set", "max_batch_size=8", restart="run --key hush-hush")))
    assert "hush-hush" not in str(refused.value)


# ---- the log


def test_the_new_part_of_a_log_is_what_was_written_since(tmp_path):
    log = tmp_path / "log"
    log.write_text("old\n")
    mark = LogMark.now(log)
    with log.open("a") as stream:
        stream.write("new\n")
    with mark.open_new() as part:
        assert part.read() == b"new\n"


@pytest.mark.parametrize("text", ["new\n", "a new log, longer than the old one was\n"])
def test_a_log_that_was_begun_anew_is_new_from_its_first_byte(tmp_path, text):
    log = tmp_path / "log"
    log.write_text("the old log\n")
    mark = LogMark.now(log)
    log.write_text(text)
    with mark.open_new() as part:
        assert part.read().decode() == text


def test_a_log_that_was_not_there_is_new_as_a_whole(tmp_path):
    log = tmp_path / "log"
    mark = LogMark.now(log)
    assert mark.facts("vllm").starts == 0
    log.write_text("all of it\n")
    with mark.open_new() as part:
        assert part.read() == b"all of it\n"


# ---- the restart command


def test_a_restart_command_that_outlived_its_experiment_is_ended_and_no_other_process_is():
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        command = RunningCommand.of(child.pid)
        assert not RunningCommand(child.pid, (command.start_ticks or 0) + 1).end()
        assert child.poll() is None
        assert command.end()
        assert child.wait(10) == -signal.SIGKILL
        assert not command.end()


def test_what_a_restart_command_leaves_in_the_background_lives_on(tmp_path):
    begun = []
    problem = asyncio.run(run_restart(f"sleep 600 & echo $! > {tmp_path}/pid", {"X": "1"}, 10, on_begun=begun.append))
    pid = int((tmp_path / "pid").read_text())
    assert (problem, len(begun)) == (None, 1)
    os.kill(pid, signal.SIGKILL)


def test_a_restart_command_that_is_given_up_takes_its_children_along(tmp_path):
    async def go():
        task = asyncio.create_task(run_restart(f"sleep 600 & echo $! > {tmp_path}/pid; wait", {}, 60))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(go())
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: RunningCommand.of(pid).start_ticks is None, "the child's end")


# ---- a real engine


@pytest.mark.engine
def test_more_slots_of_a_real_llamacpp_are_kept(tmp_path, capsys):
    model = cached_gguf(tmp_path, PRESETS["tiny"])
    text = f"engine: llamacpp\nmodel: {model}\nmax_batch_size: 4\nkv_cache_capacity_tokens: 8192\n"
    shop = Shop(tmp_path, text, "embedded", [str(model)])

    def go(*words):
        """The experiment; again while it says of itself that this machine was too busy for it to measure."""
        for _ in range(3):
            parser = argparse.ArgumentParser()
            experiment.add_arguments(parser)
            code = experiment.run(parser.parse_args(shop.words("set", *words)))
            document = json.loads(capsys.readouterr().out)
            if code != 3:
                break
        return code, document

    try:
        shop.open("--parallel 4 --ctx-size 8192")
        code, document = go("parallel=8")
        assert (code, document["outcome"], document["reason"]) == (0, "kept", "all checks passed")
        record = shop.records[-1]
        assert record.startup["max_batch_size"] == 8
        assert [proof["answered"] for proof in record.detail["limits"]] == [1, 8]

        # This script passes no cache types on. Neither log nor server tells, so it is said; the answers stay the same.
        code, document = go("cache_type_k=q8_0")
        assert (code, document["outcome"]) == (0, "kept")
        quality = document["record"]["detail"]["quality"]
        assert (quality["identical"], quality["own_drift_ratio"]) == (6, 0.0)
        assert quality["logprob_drift"] == pytest.approx(0, abs=1e-3)
        assert any("kv_cache_dtype_k is in effect" in text for text in document["record"]["warnings"])
    finally:
        shop.close()
