"""`plimsoll stress` and `plimsoll demo` as processes against the real llama.cpp server: the truth is how it was started."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serving.embedded import EmbeddedServer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def engine(tmp_path, cache):
    """Start an engine; all are stopped at the end."""
    started = []

    def start(**options):
        server = EmbeddedServer.start(log_path=tmp_path / "engine.log", cache_dir=cache, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def stress(tmp_path):
    """Start `plimsoll stress`; whatever still runs at the end is killed."""
    started = []

    def start(server, *arguments):
        for left in tmp_path.glob("run.db*"):
            left.unlink()
        command = [
            *(sys.executable, "-m", "plimsoll", "stress", server.url, "--json", "--gpu", "none"),
            *("--log", server.log_path, "--out", tmp_path / "run.db", "--interval", 0.25, *arguments),
        ]
        child = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


def finish(child, limit_seconds=300):
    out, err = child.communicate(timeout=limit_seconds)
    assert out, f"no document; stderr:\n{err}"
    result = json.loads(out)
    assert "load_line" in result, f"{result}\n{err}"
    for stage in result["stages"]:
        requests = dict(stage["requests"])
        assert requests.pop("issued") == sum(requests.values()), stage
    return child.returncode, result


def measure(run):
    """What `run` gives; again while the run says of itself that this machine was too busy for it to be a measurement."""
    for _ in range(3):
        code, result = run()
        if result["client"]["valid"]:
            break
    return code, result


def rows(path, sql):
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        found = connection.execute(sql).fetchall()
    connection.close()
    return found


def wait_for(condition, what, limit_seconds=60):
    """Poll for an event with a deadline."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    pytest.fail(f"{what} within {limit_seconds} s")


def requests_on_disk(path, at_least):
    def enough():
        try:
            count = rows(path, "SELECT count(*) FROM request")[0][0]
        except sqlite3.Error:
            return 0
        return count if count >= at_least else 0

    return wait_for(enough, f"{at_least} requests in {path}")


def children_of(pid):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            if parent == pid and b"loadgen.driver" in command:
                found.append(int(entry.name))
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_four_slots_are_a_line_of_four_batch_slots_on_every_workload(engine, stress):
    server = engine(slots=4)
    lengths = ("--prompt-tokens", 200, "--output-tokens", 120)
    code, result = measure(
        lambda: finish(stress(server, "--workload", "offline-batch", "--stage-seconds", 4, *lengths))
    )
    line = result["load_line"]
    assert (line["configured"], line["measured"], line["bound_by"]) == (4, 4, "batch_slots"), result
    assert (code, result["verdict"]) == (0, "pass")
    assert result["tokens"]["client_completion"] == result["tokens"]["server_completion"]
    assert max(stage["waiting"]["max"] for stage in result["stages"] if stage["offered"] == 6) > 0
    assert result["drain"]["running"] == result["drain"]["waiting"] == 0


def test_a_shared_kv_cache_that_is_too_small_binds_with_error_events_inside_200_streams(engine, stress):
    server = engine(slots=8, kv_unified=True, total_context_tokens=1024)
    lengths = ("--prompt-tokens", 100, "--output-tokens", 150)
    code, result = measure(lambda: finish(stress(server, "--stage-seconds", 4, "--max-batch", 8, *lengths)))
    line = result["load_line"]
    assert (line["configured"], line["bound_by"]) == (8, "kv_cache"), result
    assert line["measured"] is None or line["measured"] < 8
    assert (code, result["verdict"]) == (1, "fail")
    top = next(stage for stage in result["stages"] if stage["offered"] == 8)
    assert top["requests"]["stream_error"] > 0
    assert "Context size has been exceeded" in top["first_error"]


def test_a_limit_that_is_not_in_effect_is_a_failure(engine, stress):
    server = engine(slots=8)
    code, result = measure(lambda: finish(stress(server, "--max-batch", 3, "--stage-seconds", 3)))
    assert code == 1
    assert "not in effect" in result["reason"]
    assert "limit_differs" in {finding["rule"] for finding in result["findings"]}


def test_ctrl_c_leaves_a_readable_partial_run_and_exits_with_130(engine, stress, tmp_path):
    child = stress(engine(slots=4), "--stage-seconds", 30)
    requests_on_disk(tmp_path / "run.db", 10)
    child.send_signal(signal.SIGINT)
    code, result = finish(child, 60)
    assert code == 130
    assert result["interrupted"] is True
    assert rows(tmp_path / "run.db", "SELECT count(*) FROM request")[0][0] >= 10
    assert [kind for (kind,) in rows(tmp_path / "run.db", "SELECT kind FROM event")] == ["interrupted"]
    assert not list(tmp_path.glob("run.db-*")), "a run is one file"


def test_an_engine_that_dies_under_load_is_a_result(engine, stress, tmp_path):
    server = engine(slots=4)
    child = stress(server, "--stage-seconds", 30)
    requests_on_disk(tmp_path / "run.db", 10)
    os.kill(server.pid, signal.SIGKILL)
    code, result = finish(child, 60)
    assert (code, result["verdict"]) == (1, "fail")
    assert "the server died under load" in result["reason"]
    assert ("server_died",) in rows(tmp_path / "run.db", "SELECT kind FROM event")


def test_a_load_generator_that_dies_is_inconclusive_and_loses_nothing_that_was_reported(engine, stress, tmp_path):
    child = stress(engine(slots=4), "--stage-seconds", 30)
    requests_on_disk(tmp_path / "run.db", 10)
    (driver,) = children_of(child.pid)
    os.kill(driver, signal.SIGKILL)
    code, result = finish(child, 60)
    assert (code, result["verdict"]) == (3, "inconclusive")
    assert "signal 9" in result["reason"]
    issued = sum(stage["requests"]["issued"] for stage in result["stages"])
    assert rows(tmp_path / "run.db", "SELECT count(*) FROM request")[0][0] >= max(10, issued)


def test_kill_9_leaves_a_readable_run_and_no_load_generator_behind(engine, stress, tmp_path):
    child = stress(engine(slots=4), "--stage-seconds", 30)
    seen = requests_on_disk(tmp_path / "run.db", 10)
    (driver,) = children_of(child.pid)
    child.kill()
    child.wait()
    wait_for(lambda: not alive(driver), "the load generator ended", 10)
    assert rows(tmp_path / "run.db", "SELECT count(*) FROM request")[0][0] >= seen
    assert rows(tmp_path / "run.db", "PRAGMA integrity_check") == [("ok",)]


def test_the_demo_finds_eight_slots(tmp_path):
    numbers = iter(range(3))

    def demo():
        command = [sys.executable, "-m", "plimsoll", "demo", "--json", "--out", str(tmp_path / f"demo{next(numbers)}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    code, result = measure(demo)
    assert code == 0, result["reason"]
    line = result["load_line"]
    assert (line["configured"], line["measured"], line["bound_by"]) == (8, 8, "batch_slots")
    over = next(stage for stage in result["stages"] if stage["offered"] == 10)
    assert over["waiting"]["max"] > 0
    assert result["tokens"]["client_completion"] == result["tokens"]["server_completion"]
