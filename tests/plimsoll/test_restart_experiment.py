"""`plimsoll experiment restart`: the order of steps, what is left when something ends it, and one real run."""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from alerts.restart_benefit import RestartVerdict, Sitting
from plimsoll import experiment, restart_experiment, restarting
from plimsoll.journal import Journal, journal_path
from plimsoll.ledger import Conclusion, read_ledger
from plimsoll.restart_experiment import RestartRun, run_restarts
from serving.errors import ConfigError, TargetError

SETTINGS = "engine: vllm\nmodel: qwen2.5-7b\nmax_batch_size: 8\nmax_model_len: 4096\n"
SCRIPT = Path(__file__).with_name("restart_server.py")
DECODE = "decode_seconds_per_token@8"


class Steps:
    """A server that is only played; `events` may raise at the n-th step."""

    def __init__(self, decline: float = 1.2, events: dict[int, Exception] | None = None):
        self.done: list[str] = []
        self.decline, self.events = decline, events or {}
        self.old = True

    def step(self, name: str):
        self.done.append(name)
        error = self.events.get(len(self.done))
        if error is not None:
            raise error

    async def measure(self) -> Sitting:
        self.step("measure")
        wobble = 1 + 0.001 * (len(self.done) % 3)
        slow = (self.decline if self.old else 1.0) * wobble
        values = {f"block {n}": 0.02 * slow for n in range(6)}
        return Sitting({DECODE: values}, age_seconds=3600.0 if self.old else 60.0)

    async def restart(self) -> float:
        self.step("restart")
        self.old = False
        return 30.0

    async def age(self) -> None:
        self.step("age")
        self.old = True


def play(server, times=3):
    run = RestartRun()
    asyncio.run(run_restarts(server, times, run))
    return run


def test_each_start_is_measured_fresh_and_aged_and_the_last_one_too():
    server = Steps()
    run = play(server, 3)
    assert server.done == ["measure", *["restart", "measure", "age", "measure"] * 3]
    assert len(run.cycles) == 3
    assert run.closing is not None
    assert run.down_seconds == [30.0] * 3
    result = run.judge()
    assert result is not None
    assert result.verdict is RestartVerdict.CONFIRMED
    assert result.metrics[0].schedule.cheapest == pytest.approx((2 * 30 * 3600 / 0.2) ** 0.5, rel=0.02)


def test_each_restart_is_told_as_soon_as_it_has_been_measured():
    told = []
    server = Steps()
    asyncio.run(
        run_restarts(server, 2, RestartRun(), on_cycle=lambda run: told.append((len(run.cycles), len(server.done))))
    )
    assert told == [(1, 3), (2, 7)]


@pytest.mark.parametrize("at", range(1, 14))
def test_whatever_step_fails_what_was_measured_until_then_is_left(at):
    server, run = Steps(events={at: TargetError("gone")}), RestartRun()
    with pytest.raises(TargetError):
        asyncio.run(run_restarts(server, 3, run))
    assert run.ended_early == "gone"
    measured = server.done[: at - 1]
    sittings = 2 * len(run.cycles) + (run.closing is not None)
    # Only the measurement after a restart that was not reached has no other to go with.
    assert measured.count("measure") - sittings in (0, 1)
    result = run.judge()
    assert (result is None) == (at <= 3)


def test_an_interrupted_run_has_what_was_measured():
    async def interrupted():
        run, server = RestartRun(), Steps()
        waits = asyncio.Event()

        async def forever():
            waits.set()
            await asyncio.sleep(3600)

        server.age = forever
        task = asyncio.ensure_future(run_restarts(server, 3, run))
        await waits.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return run

    run = asyncio.run(interrupted())
    assert len(run.cycles) == 1
    assert run.judge().verdict is RestartVerdict.CONSISTENT_WITH


# ---- the command


def parse(words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    restart_experiment.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(SETTINGS)
    return path


def words(settings, url, restart, *more):
    return [str(settings), "--url", url, "--restart", restart, "--times", "2", *more]


def test_a_restart_command_with_the_key_in_it_is_refused(settings, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_API_KEY", "sk-secret")
    with pytest.raises(ConfigError, match="holds the key") as caught:
        restart_experiment.run(parse(words(settings, "http://127.0.0.1:9", "curl -H sk-secret")))
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("restart", "more", "message"),
    [(" ", (), "command is empty"), ("true", ("--log", "/"), "not a regular file")],
)
def test_what_cannot_be_used_is_refused(settings, restart, more, message):
    with pytest.raises(ConfigError, match=message):
        restart_experiment.run(parse(words(settings, "http://127.0.0.1:9", restart, *more)))


def test_a_server_that_is_not_there_cannot_be_asked(settings):
    with pytest.raises(TargetError, match="cannot be reached"):
        restart_experiment.run(parse(words(settings, "http://127.0.0.1:9", "true")))


def test_age_is_a_time_or_a_number_of_requests():
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse(words("s.yaml", "http://x", "true", "--age", "1h", "--age-requests", "5"))


class Played(Steps):
    """What `_execute` needs of a real server besides its steps."""

    def __init__(self, settings, url, **more):
        super().__init__(**more)
        plan = restart_experiment._plan(parse(words(settings, url, "true")))
        self.real = restart_experiment.RealServer(plan, lambda _: None)
        self.under_way, self.up = False, True

    def __getattr__(self, name):
        return getattr(self.real, name)

    async def measure(self):
        self.real.figures.append({})
        return await super().measure()

    async def is_up(self):
        return self.up


def execute(server, wanted=None):
    run, ending = RestartRun(), restart_experiment._Ending()
    asyncio.run(restart_experiment._execute(server, run, ending, lambda _: None))
    return restart_experiment._document(server.plan, server, run, ending, wanted)


@pytest.fixture
def played(settings):
    return lambda **more: Played(settings, "http://127.0.0.1:9", **more)


def test_every_restart_is_in_the_ledger_and_the_verdict_decides_the_exit_code(played, settings):
    document = execute(played())
    assert document["exit_code"] == 1
    assert (document["verdict"], document["outcome"], document["serving"]) == ("fail", "LIKELY", True)
    records = read_ledger(settings.with_name("serving.ledger.jsonl")).records
    assert [record.id for record in records] == document["records"]
    assert [(record.kind, record.conclusion, record.changes) for record in records] == [
        ("restart", Conclusion.MEASURED, ())
    ] * 2
    assert records[0].hash_before == records[0].hash_after
    json.dumps(document, allow_nan=False)
    assert execute(played(decline=1.0))["exit_code"] == 3


def test_ctrl_c_leaves_a_partial_result_and_a_server_that_serves(played):
    server = played()

    async def age():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    server.age = age
    document = execute(server)
    assert document["exit_code"] == 130
    assert document["restarts"] == {"asked": 2, "made": 1, "measured": 1}
    assert (document["outcome"], document["trouble"]) == ("CONSISTENT_WITH", "interrupted")
    assert server.done == ["measure", "restart", "measure"]


def test_ctrl_c_while_it_restarts_brings_the_server_back_first(played):
    server = played()

    async def cut_off():
        server.step("restart")
        if server.done.count("restart") > 1:
            server.under_way = False
            return 1.0
        server.under_way, server.up = True, False
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        return 1.0

    server.restart = cut_off
    document = execute(server)
    assert server.done == ["measure", "restart", "restart"]
    assert (document["exit_code"], document["serving"]) == (130, True)


def test_a_server_that_never_comes_back_is_reported(played):
    server = played()

    async def never():
        server.step("restart")
        server.under_way, server.up = True, False
        raise TargetError("the server did not come back: not ready within 600 s")

    server.restart = never
    document = execute(server)
    assert (document["exit_code"], document["serving"]) == (4, False)
    assert "did not come back" in document["trouble"]
    assert server.done == ["measure", "restart", "restart"]  # once more, in case it was only slow


def test_a_server_that_dies_of_age_is_a_failure_and_is_brought_back(played):
    server = played()

    async def dies():
        server.up = False
        raise TargetError("the server died 3,600 s after its start")

    server.age = dies
    document = execute(server)
    assert (document["exit_code"], document["serving"], document["verdict"]) == (1, True, "fail")
    assert "died" in document["trouble"]


def test_a_restart_by_somebody_else_decides_nothing(played):
    server = played()

    async def disturbed():
        raise restart_experiment._DisturbedError("the server was restarted while it aged, and not by us")

    server.age = disturbed
    assert execute(server)["exit_code"] == 3


def test_only_the_metrics_asked_for_are_judged(played):
    assert execute(played(), ["ttft_seconds"])["benefit"] is None
    assert execute(played(), ["decode_seconds_per_token"])["benefit"]["metric"] == DECODE


def test_the_table_is_for_people(played, capsys):
    from rich.console import Console

    restart_experiment._render(execute(played()), Console(width=120))
    shown = capsys.readouterr().out
    assert "LIKELY" in shown
    assert "+20" in shown
    assert "next:" in shown


# ---- real processes


class Shop:
    """A simulated server behind the restart script of an operator."""

    def __init__(self, folder: Path):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self.folder, self.url = folder, f"http://127.0.0.1:{self.port}"
        self.settings = folder / "serving.yaml"
        self.settings.write_text(SETTINGS)
        more = ["--gpu", "rtx-4090", "--speed", "4"]
        self.restart = shlex.join([sys.executable, str(SCRIPT), "simulated", str(folder), str(self.port), *more])
        subprocess.run(
            shlex.split(self.restart), check=True, env={**os.environ, "PLIMSOLL_SETTINGS": str(self.settings)}
        )

    def wait(self):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/v1/models", timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("the simulated server did not start")

    def run(self, *more, restart=None):
        small = ["--blocks", "1", "--prompt-tokens", "64", "--output-tokens", "16", "--concurrency", "2"]
        return restart_experiment.run(
            parse([*words(self.settings, self.url, restart or self.restart, *small, *more), "--json"])
        )

    def close(self):
        subprocess.run([sys.executable, str(SCRIPT), "stop", str(self.folder)], check=True)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    # What is held here is no speed, so nothing waits for one that is steady.
    monkeypatch.setattr(restart_experiment, "_MOST_WARMUPS", 1)
    monkeypatch.setattr(restarting, "_POLL_SECONDS", 0.1)
    made = Shop(tmp_path)
    try:
        made.wait()
        yield made
    finally:
        made.close()


def test_a_simulated_server_is_restarted_measured_and_left_serving(shop, capfd):
    code = shop.run("--times", "1", "--age-requests", "12", "--log", str(shop.folder / "server.log"))
    document = json.loads(capfd.readouterr().out)
    assert document["restarts"] == {"asked": 1, "made": 1, "measured": 1}
    assert document["serving"] is True
    assert code == document["exit_code"]
    assert code in (0, 1, 3)
    names = {item["metric"] for item in document["benefit"]["metrics"]}
    assert {"decode_seconds_per_token@1", "decode_seconds_per_token@2", "ttft_seconds@2"} <= names
    assert "process_memory_bytes" in names
    (record,) = read_ledger(Path(document["ledger"])).records
    assert record.before
    assert record.after
    assert shop.settings.read_text() == SETTINGS
    assert not journal_path(shop.settings).exists()


def test_while_restarts_are_measured_no_other_experiment_begins_and_nothing_has_to_be_restored(settings, capsys):
    words_of_another = words(settings, "http://127.0.0.1:9", "true", "--json")
    journal = Journal.create(settings, {"kind": "restart", "url": "http://127.0.0.1:9"})
    with pytest.raises(ConfigError, match="runs, or was killed"):
        restart_experiment.run(parse(words_of_another))
    journal.close()  # as a killed one leaves it
    parser = argparse.ArgumentParser()
    experiment.add_arguments(parser)
    assert experiment.run(parser.parse_args(["recover", str(settings), "--json"])) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outcome"] == "nothing changed"
    assert "see that the server is up" in document["reason"]
    assert not journal_path(settings).exists()


def test_a_command_that_restarts_nothing_and_one_that_only_stops_are_told(shop, capfd):
    assert shop.run("--limit", "1", "--age", "1", "--concurrency", "1", restart="true") == 4
    document = json.loads(capfd.readouterr().out)
    assert document["serving"] is True
    assert "old server still answers" in document["trouble"]
    stop = shlex.join([sys.executable, str(SCRIPT), "stop", str(shop.folder)])
    assert shop.run("--limit", "1", "--concurrency", "1", restart=stop) == 4
    document = json.loads(capfd.readouterr().out)
    assert document["serving"] is False
    assert document["benefit"] is None
