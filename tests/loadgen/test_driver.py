"""The driver's child process, through its parent's link, against a scripted server: nothing issued is ever lost."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from loadgen.driver_link import ClientHealth, DriverConfig, DriverLink, TimeLimits
from loadgen.prompts import Calibration, calibrate
from loadgen.protocol import decode_config, decode_record, encode_config, encode_record
from loadgen.workloads import WORKLOADS
from serving.clock import NS, SystemClock
from serving.conversation import HttpAnswer, HttpRequest, converse
from serving.errors import PlimsollError
from serving.records import Outcome, RequestRecord

CLOCK = SystemClock()
LIMITS = TimeLimits(connect_seconds=2.0, first_byte_seconds=5.0, request_seconds=30.0)


@dataclass
class Heard:
    """All that the link reported."""

    records: list[RequestRecord] = field(default_factory=list)
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    health: list[ClientHealth] = field(default_factory=list)
    died: list[tuple[int, str]] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(record.outcome for record in self.records)

    @property
    def now_in_flight(self) -> int:
        return self.in_flight[-1][0] if self.in_flight else 0

    async def until(self, condition, seconds=10.0):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 (several handlers may make it true)
                await asyncio.sleep(0.01)


def config_for(url: str, **changes) -> DriverConfig:
    workload = replace(WORKLOADS["interactive"].scaled(200), output_tokens=4, output_spread=0.0)
    values = {"base_url": url, "model": "m", "api": "chat", "workload": workload, "calibration": Calibration(5.0, 2.0)}
    return DriverConfig(**(values | {"seed": 1, "anchor_ns": CLOCK.anchor_ns, "limits": LIMITS} | changes))


@pytest.fixture
async def drive():
    """Starts drivers and makes sure that none is left behind."""
    links = []

    async def start(url, **changes) -> tuple[DriverLink, Heard]:
        heard = Heard()
        link = await DriverLink.start(
            config_for(url, **changes),
            on_record=heard.records.append,
            on_in_flight=lambda in_flight, t_ns: heard.in_flight.append((in_flight, t_ns)),
            on_health=heard.health.append,
            on_died=lambda code, words: heard.died.append((code, words)),
        )
        links.append(link)
        return link, heard

    yield start
    for link in links:
        await link.close()


async def test_a_stage_keeps_its_users_busy_and_every_request_has_its_record(fake_server, drive):
    fake_server.token_seconds = 0.005
    link, heard = await drive(fake_server.url)
    t_ns = await link.stage("3", 3)
    await heard.until(lambda: len(heard.records) >= 12)
    await link.stop(5.0)
    assert fake_server.peak == 3
    assert heard.outcomes == {Outcome.OK: link.issued}
    assert sorted(record.request_id for record in heard.records) == list(range(link.issued))
    assert {record.stage for record in heard.records} == {"3"}
    assert all(t_ns - 5_000_000 <= record.t_plan_ns <= record.t_send_ns <= record.t_end_ns for record in heard.records)
    assert all(record.completion_tokens == record.planned_output_tokens == 4 for record in heard.records)
    assert heard.in_flight[-1][0] == 0
    assert not heard.died


async def test_more_are_offered_at_once_and_fewer_without_cutting_anyone(fake_server, drive):
    fake_server.behaviour = lambda number: "paced"
    link, heard = await drive(fake_server.url)
    await link.stage("2", 2)
    await heard.until(lambda: fake_server.active == 2 and heard.now_in_flight == 2)
    await link.stage("5", 5)
    await heard.until(lambda: fake_server.active == 5 and heard.now_in_flight == 5)
    await link.stage("1", 1)
    fake_server.token_seconds = 0.01
    fake_server.behaviour = lambda number: "ok"
    fake_server.pause.set()
    await heard.until(lambda: len(heard.records) >= 8 and heard.now_in_flight == 1)
    await link.stop(5.0)
    assert heard.outcomes == {Outcome.OK: link.issued}
    assert fake_server.peak == 5
    assert Counter(record.stage for record in heard.records if record.stage != "1") == {"2": 2, "5": 3}


async def test_what_does_not_end_within_the_grace_is_unfinished(fake_server, drive):
    fake_server.behaviour = lambda number: "hang"
    link, heard = await drive(fake_server.url)
    await link.stage("4", 4)
    await heard.until(lambda: fake_server.active == 4)
    await link.stop(0.2)
    assert heard.outcomes == {Outcome.UNFINISHED: 4}
    assert all(record.frames == 1 for record in heard.records)
    assert not heard.died


FAULTS = ["ok", "short", "500", "429", "cut", "clean cut", "reset", "error event", "error only", "empty", "garbage"]
FAULTS += ["no done", "late headers", "reset before", "close before"]


async def test_issued_is_the_sum_of_outcomes_whatever_the_server_does(fake_server, drive):
    fake_server.behaviour = lambda number: FAULTS[number % len(FAULTS)]
    link, heard = await drive(fake_server.url)
    await link.stage("8", 8)
    await heard.until(lambda: len(heard.records) >= 2 * len(FAULTS), seconds=20)
    await link.stop(5.0)
    assert heard.outcomes.total() == link.issued
    assert {outcome for outcome in heard.outcomes if outcome in tuple(Outcome)} == {
        Outcome.OK,
        Outcome.SHORT,
        Outcome.HTTP_ERROR,
        Outcome.TRUNCATED,
        Outcome.STREAM_ERROR,
    }


async def test_a_target_that_refuses_is_asked_slowly_and_each_refusal_is_recorded(fake_server, drive):
    url = fake_server.url
    fake_server.close()
    link, heard = await drive(url)
    await link.stage("2", 2)
    await heard.until(lambda: len(heard.records) >= 6)
    times = sorted(record.t_plan_ns for record in heard.records if record.user == 0)
    await link.stop(1.0)
    assert set(heard.outcomes) == {Outcome.HTTP_ERROR}
    assert len(heard.records) == link.issued
    gaps = [(after - before) / NS for before, after in itertools.pairwise(times)]
    assert gaps[0] >= 0.19
    assert gaps[1] >= 0.39


async def test_retry_after_is_honoured(fake_server, drive):
    fake_server.behaviour = lambda number: "429" if number == 0 else "ok"
    link, heard = await drive(fake_server.url)
    await link.stage("1", 1)
    await heard.until(lambda: len(heard.records) >= 2)
    await link.stop(1.0)
    first, second = sorted(heard.records, key=lambda record: record.request_id)[:2]
    assert second.t_plan_ns - first.t_end_ns >= 0.99 * NS


async def test_a_killed_driver_is_told_of_and_its_requests_are_unfinished(fake_server, drive):
    fake_server.behaviour = lambda number: "hang"
    link, heard = await drive(fake_server.url)
    await link.stage("3", 3)
    await heard.until(lambda: link.issued == 3)
    os.kill(link._process.pid, signal.SIGKILL)
    await heard.until(lambda: heard.died)
    assert heard.died[0][0] == -signal.SIGKILL
    assert heard.outcomes == {Outcome.UNFINISHED: 3}
    await link.stage("4", 4)
    await link.stop(1.0)


async def test_ctrl_c_in_the_terminal_does_not_reach_the_driver(fake_server, drive):
    fake_server.token_seconds = 0.005
    link, heard = await drive(fake_server.url)
    assert os.getpgid(link._process.pid) != os.getpgid(0)
    await link.stage("1", 1)
    os.kill(link._process.pid, signal.SIGINT)
    await heard.until(lambda: len(heard.records) >= 3)
    await link.stop(2.0)
    assert not heard.died


async def test_health_is_reported(fake_server, drive):
    fake_server.token_seconds = 0.005
    link, heard = await drive(fake_server.url)
    await link.stage("2", 2)
    await heard.until(lambda: len(heard.health) >= 1)
    await link.stop(2.0)
    health = heard.health[0]
    assert health.seconds >= 0.9
    assert health.cpu_ratio > 0
    assert 0 <= health.loop_lag_p99_seconds <= health.loop_lag_max_seconds
    assert health.send_lag_max_seconds is not None


PARENT = """
import asyncio, os, sys
from tests_config import config
from loadgen.driver_link import DriverLink

async def main():
    link = await DriverLink.start(config)
    await link.stage("1", 1)
    print(link._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_driver_ends_when_its_parent_is_killed(fake_server, tmp_path):
    fake_server.behaviour = lambda number: "hang"
    (tmp_path / "tests_config.py").write_text(
        "import json\nfrom loadgen.protocol import decode_config\n"
        f"config = decode_config(json.loads({encode_config(config_for(fake_server.url)).decode()!r})['config'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 5
    while _lives(child):
        assert time.monotonic() < deadline, "the driver outlived its parent"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected by init does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


async def test_a_handler_that_raises_hangs_nobody_and_is_heard_of(fake_server):
    def refuse(record):
        raise RuntimeError("disk full")

    link = await DriverLink.start(config_for(fake_server.url), on_record=refuse)
    try:
        async with asyncio.timeout(10):
            await link.stage("1", 1)
            await link._ended.wait()
            await link.stage("2", 2)
    finally:
        with pytest.raises(RuntimeError, match="disk full"):
            await link.close()


async def test_a_driver_that_cannot_start_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PlimsollError, match="did not start"):
        await DriverLink.start(config_for("http://127.0.0.1:1"))


def test_messages_survive_the_wire():
    config = config_for("http://h:1")
    assert decode_config(json.loads(encode_config(config))["config"]) == config
    values = dict.fromkeys(RequestRecord.__dataclass_fields__)
    values |= {"outcome": Outcome.SHORT, "frame_gaps_us": (1, 2), "request_id": 3, "error": "ü"}
    record = RequestRecord(**values)
    assert decode_record(json.loads(encode_record(record))["record"]) == record


def test_the_link_needs_neither_gevent_nor_locust():
    code = "import sys, loadgen.driver_link; assert not {'gevent', 'locust'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.engine
async def test_on_a_real_engine_our_tokens_are_the_servers_and_the_answers_have_the_planned_length(drive, tmp_path):
    pytest.importorskip("xllamacpp")
    from serving.embedded import EmbeddedServer

    options = {"shape": "tiny", "slots": 4, "log_path": tmp_path / "log", "cache_dir": tmp_path}
    with await asyncio.to_thread(lambda: EmbeddedServer.start(**options)) as engine:
        answer = _plain_http(engine.url)
        workload = WORKLOADS["interactive"].scaled(2048, prompt_tokens=100, output_tokens=40)
        calibration = converse(calibrate("tiny", "chat", 2048), answer)
        before = _generated(answer)
        link, heard = await drive(engine.url, model="tiny", workload=workload, calibration=calibration)
        await link.stage("6", 6)
        await heard.until(lambda: len(heard.records) >= 30, seconds=30)
        await link.stop(20.0)
        assert heard.outcomes == {Outcome.OK: link.issued}
        assert all(record.completion_tokens == record.planned_output_tokens for record in heard.records)
        assert sum(record.completion_tokens or 0 for record in heard.records) == _generated(answer) - before


def _plain_http(url):
    def answer(request):
        data = None if request.json_body is None else json.dumps(request.json_body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url + request.path, data, headers)) as reply:
            return HttpAnswer(reply.status, {}, reply.read())

    return answer


def _generated(answer) -> int:
    text = answer(HttpRequest("/metrics")).text()
    return next(
        int(line.split()[1]) for line in text.splitlines() if line.startswith("llamacpp:tokens_predicted_total")
    )
