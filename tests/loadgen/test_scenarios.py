"""The Locust files under plain Locust: held users, the climb, Locust's own exit codes, and errors in plain words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).parents[2] / "loadgen" / "scenarios"
NAMES = ["interactive", "long_document", "offline_batch"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    pytest.importorskip("xllamacpp")
    from serving.embedded import EmbeddedServer

    folder = tmp_path_factory.mktemp("engine")
    with EmbeddedServer.start(shape="tiny", slots=2, log_path=folder / "log", cache_dir=folder) as server:
        yield server


def locust(name, folder, *arguments, **environment):
    command = [sys.executable, "-m", "locust", "-f", SCENARIOS / f"{name}.py", "--headless", "--json", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


def rows_of(finished) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(finished.stdout)}


@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_users_are_held_and_locust_is_told_whole_lengths_and_first_tokens(engine, tmp_path, name):
    finished = locust(name, tmp_path, "-u", "2", "-r", "2", "-t", "3s", "--host", engine.url)
    assert finished.returncode == 0, finished.stderr
    rows = rows_of(finished)
    assert set(rows) == {f"{name} e2e", f"{name} TTFT"}
    whole, first = rows[f"{name} e2e"], rows[f"{name} TTFT"]
    assert whole["num_requests"] == first["num_requests"] > 0
    assert whole["num_failures"] == 0
    assert 0 < first["total_response_time"] < whole["total_response_time"]


@pytest.mark.engine
def test_without_a_number_of_users_they_climb_to_the_load_line(engine, tmp_path):
    arguments = ("--stage-seconds", "2", "--host", engine.url)
    finished = locust("interactive", tmp_path, *arguments, PLIMSOLL_MAX_BATCH="2")
    assert finished.returncode == 0, finished.stderr
    assert "2 offered: held" in finished.stderr
    assert "4 offered: did not hold" in finished.stderr
    assert "load line 2 (configured 2), bound by batch_slots" in finished.stderr


@pytest.mark.engine
def test_a_run_time_ends_a_climb(engine, tmp_path):
    finished = locust("interactive", tmp_path, "-t", "3s", "--host", engine.url)
    assert finished.returncode == 0, finished.stderr
    assert "load line" not in finished.stderr
    assert rows_of(finished)


@pytest.mark.engine
def test_a_model_that_is_not_served_ends_the_run_before_traffic(engine, tmp_path):
    finished = locust("interactive", tmp_path, "-u", "1", "-t", "3s", "--model", "nope", "--host", engine.url)
    assert finished.returncode == 4
    assert "nope" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "no target: give --host http://host:port"),
        (("--host", "http://127.0.0.1:9"), 4, "http://127.0.0.1:9 cannot be reached"),
        (("--host", "nowhere"), 2, "is not a URL of a server"),
    ],
)
def test_a_run_that_cannot_begin_says_why_in_one_line(tmp_path, arguments, code, message):
    finished = locust("interactive", tmp_path, "-u", "1", "-t", "3s", *arguments)
    assert finished.returncode == code
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_file_holds_one_user_class_and_the_shape(name, tmp_path):
    code = (
        "from locust.util.load_locustfile import load_locustfile\n"
        f"users, shapes = load_locustfile({str(SCENARIOS / (name + '.py'))!r})\n"
        f"assert [user.workload_name for user in users.values()] == [{name!r}], users\n"
        "assert len(shapes) == 1, shapes"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_no_module_beside_the_scenarios_hides_one_of_the_standard_library():
    """Locust puts a scenario's folder first on the import path."""
    assert not {path.stem for path in SCENARIOS.glob("*.py")} & sys.stdlib_module_names
    assert not {path.stem for path in SCENARIOS.parent.glob("*.py")} & sys.stdlib_module_names
