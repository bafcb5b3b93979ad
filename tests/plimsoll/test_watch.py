import argparse
import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from alerts.rules import DecodeSpeedDown, MemoryOnlyGrows, RestartCuredIt
from alerts.state import Health, State
from monitor.history import SqliteHistory
from monitor.http import open_session, parse_url
from monitor.sampler import Tick
from plimsoll.watch import (
    EXAMPLES,
    Watch,
    WatchConfig,
    WatchTarget,
    add_arguments,
    keep_watch,
    read_config,
    watching_reader,
)
from serving.clock import FakeClock
from serving.engines import ScrapeFailure
from serving.errors import ConfigError, RecordError
from serving.records import Event

MIB = 2**20
SAMPLES = Path(__file__).parents[1] / "samples"
ALL_RULES = (MemoryOnlyGrows(), DecodeSpeedDown(), RestartCuredIt())


@pytest.fixture
def config_of(tmp_path):
    def write(text):
        path = tmp_path / "watch.yaml"
        path.write_text(textwrap.dedent(text))
        return read_config(path)

    return write


class TestConfig:
    def test_a_url_is_enough(self, config_of, tmp_path):
        config = config_of("targets:\n  - url: 127.0.0.1:8000\n")
        assert config.target == WatchTarget(parse_url("127.0.0.1:8000"), "127.0.0.1:8000")
        assert (config.host, config.port, config.evaluate_every_s) == ("127.0.0.1", 9464, 60)
        assert config.history == tmp_path / "watch.db"
        assert config.rules == ALL_RULES

    def test_everything_can_be_set(self, config_of):
        config = config_of(
            """
            targets:
              - url: http://[::1]:8000
                name: hy3
                model: hy3-instruct
                interval: 0.5
                gpu: http://127.0.0.1:9400
                pid: 4711
            listen: "[::]:9000"
            history: /var/lib/plimsoll/hy3.db
            evaluate_every: 30
            rules:
              memory_only_grows: {window_s: 7200, for_s: 0}
              decode_speed_down: off
              restart_cured_it: on
            """
        )
        target = WatchTarget(
            parse_url("http://[::1]:8000"), "hy3", "hy3-instruct", 0.5, gpu="http://127.0.0.1:9400", pid=4711
        )
        assert config.target == target
        assert (config.host, config.port, config.evaluate_every_s) == ("::", 9000, 30)
        assert config.history == Path("/var/lib/plimsoll/hy3.db")
        assert config.rules == (MemoryOnlyGrows(window_s=7200, for_s=0), RestartCuredIt())

    def test_the_example_of_the_help_can_be_used(self, config_of):
        example = EXAMPLES[EXAMPLES.index("  targets:") : EXAMPLES.index("\n\nAn API key")]
        config = config_of(example)
        assert (config.target.name, config.target.pid) == ("hy3", 4711)
        assert config.rules == (MemoryOnlyGrows(window_s=7200), RestartCuredIt())

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("listen: 1.2.3.4:1\n", r":1: key 'targets' is missing"),
            ("targets: []\n", r":1: targets: one target is watched at a time, 0 are listed"),
            ("targets:\n- url: a\n- url: b\n", r":1: targets: one target is watched at a time, 2 are listed"),
            ("targets:\n- name: a\n", r":2: targets\[0\]: key 'url' is missing"),
            ("targets:\n- url: http://h/?q=1\n", r":2: targets\[0\]\.url: .*query"),
            ("targets:\n- url: h\n  intervall: 1\n", r":3: unknown key 'intervall' in 'targets\[0\]'; did you mean"),
            ("targets:\n- url: h\n  interval: 60\n", r":3: targets\[0\]\.interval: is 60; it must be 0\.1 to 15"),
            (
                "targets:\n- url: h\n  pid: me\n",
                r":3: targets\[0\]\.pid: must be a whole number, without quotes or fraction, not 'me'",
            ),
            ("targets:\n- url: h\nlisten: 9464\n", r":3: listen: must be text"),
            ("targets:\n- url: h\nlisten: localhost\n", r":3: listen: 'localhost' is not an address; write HOST:PORT"),
            ("targets:\n- url: h\nlisten: 'h:99999'\n", r":3: listen: 'h:99999' is not an address"),
            ("targets:\n- url: h\nevaluate_every: 0\n", r":3: evaluate_every: is 0; it must be 1 to 3600"),
            ("targets:\n- url: h\nrules: {leak: on}\n", r":3: unknown key 'leak' in 'rules'"),
            ("targets:\n- url: h\nrules:\n  memory_only_grows: 3\n", r":4: rules\.memory_only_grows: must be true or"),
            (
                "targets:\n- url: h\nrules:\n  memory_only_grows:\n    window: 3\n",
                r":5: rules\.memory_only_grows\.window: rule memory_only_grows has no parameter 'window'",
            ),
            (
                "targets:\n- url: h\nrules:\n  memory_only_grows: {for_s: 1,\n   window_s: 0}\n",
                r":5: rules\.memory_only_grows\.window_s: rule memory_only_grows: window_s is 0",
            ),
            ("targets:\n- url: h\nalerts: {}\n", r":3: unknown key 'alerts'; known here: targets, listen"),
        ],
    )
    def test_a_mistake_is_named_with_file_and_line(self, config_of, text, said):
        with pytest.raises(ConfigError, match=rf"watch\.yaml{said}"):
            config_of(text)


class Beside:
    """A watch in virtual time: ticks every 15 s and a judgement every minute, no network."""

    def __init__(self, path, clock, rules=ALL_RULES):
        self.clock = clock
        config = WatchConfig(WatchTarget(parse_url("http://127.0.0.1:8000"), "demo"), path, rules=rules)
        self.history = SqliteHistory.open(path, readonly=False) if path.exists() else SqliteHistory.create(path)
        self.watch = Watch(config, self.history, clock)
        self.tokens = 0.0

    async def live(self, minutes, *, memory_mib=lambda minute: 1000.0, up=True, pid="1"):
        for minute in range(minutes):
            for _ in range(4):
                t_ns = self.clock.now_ns()
                if up:
                    self.tokens += 15 * 200
                    self.watch.on_tick(
                        Tick(
                            t_ns,
                            up=True,
                            values={"up": 1, "requests_running": 4, "generation_tokens_total": self.tokens},
                            sources={"generation_tokens_total": "engine:tokens"},
                            processes={"server": {"process_anonymous_memory_bytes": memory_mib(minute) * MIB}},
                            process_mark=pid,
                        )
                    )
                else:
                    self.watch.on_tick(Tick(t_ns, up=False, values={"up": 0}, failure="refused: nothing listens"))
                await self.clock.advance(15)
            await self.watch.judge()

    def state(self, rule="memory_only_grows"):
        return self.watch.alerts[rule].state

    def exported(self):
        return {
            (sample.name, *(sample.labels.get(label, "") for label in ("rule", "state", "health"))): sample.value
            for family in self.watch.families()
            for sample in family.samples
        }


@pytest.fixture
def beside(tmp_path):
    opened = []

    def start(clock=None, **more):
        one = Beside(tmp_path / "watch.db", clock or FakeClock(), **more)
        opened.append(one)
        return one

    yield start
    for one in opened:
        one.history.close()


async def test_a_leak_fires_is_logged_kept_and_exported(beside, caplog):
    one = beside()
    with caplog.at_level(logging.INFO, "plimsoll.watch"):
        await one.live(60, memory_mib=lambda minute: 1000 + 5 * minute)
    assert one.state() is State.FIRING
    assert "demo: memory_only_grows: pending, now firing" in caplog.text
    assert "memory of the server role server only grows: from " in caplog.text
    states = [(found.state, found.target) for found in one.history.findings() if found.rule == "memory_only_grows"]
    assert states == [("pending", "demo"), ("firing", "demo")]
    (finding,) = one.history.findings()[-1].detail["findings"]
    assert finding["figures"]["growth_bytes"] > 64 * MIB
    exported = one.exported()
    assert exported["plimsoll_alert_state", "memory_only_grows", "firing", ""] == 1
    assert exported["plimsoll_alert_state", "memory_only_grows", "inactive", ""] == 0
    assert exported["plimsoll_alert_health", "memory_only_grows", "", "ok"] == 1
    assert exported["plimsoll_findings", "memory_only_grows", "", ""] == 1
    assert exported["plimsoll_alert_state", "decode_speed_down", "inactive", ""] == 1


async def test_a_target_that_vanishes_resolves_nothing(beside):
    one = beside()
    await one.live(60, memory_mib=lambda minute: 1000 + 5 * minute)
    await one.live(600, up=False)
    assert one.state() is State.FIRING
    assert one.watch.alerts["memory_only_grows"].health is Health.UNKNOWN
    assert ("plimsoll_findings", "memory_only_grows", "", "") not in one.exported()


async def test_a_watch_that_is_started_again_goes_on_where_it_ended(beside):
    clock = FakeClock()
    one = beside(clock)
    await one.live(60, memory_mib=lambda minute: 1000 + 5 * minute)
    one.history.close()
    await clock.advance(3600)
    again = beside(clock)
    assert again.state() is State.FIRING
    assert again.exported()["plimsoll_alert_health", "memory_only_grows", "", "unknown"] == 1


async def test_a_restart_while_nobody_watched_ends_the_epoch(beside):
    clock = FakeClock()
    one = beside(clock)
    await one.live(5, pid="1")
    one.history.close()
    await clock.advance(3600)
    again = beside(clock)
    again.tokens = one.tokens
    await again.live(1, pid="2")
    (event,) = [one for one in again.history.events() if one.kind == "restart"]
    assert event.kind == "restart"
    assert event.text.startswith("while nobody watched: another process serves: 2")
    assert len(again.history.epochs("demo")) == 2


async def test_the_same_server_after_a_pause_is_no_restart(beside):
    clock = FakeClock()
    one = beside(clock)
    await one.live(5)
    one.watch.save()
    one.history.close()
    again = beside(clock)
    again.tokens = one.tokens
    await again.live(1)
    assert [event.kind for event in again.history.events()] == ["up", "up"]


async def test_what_cannot_be_restored_begins_anew(beside, caplog):
    one = beside()
    one.history.set_manifest({"watch of demo": {"alerts": {"memory_only_grows": {"state": "?"}}}})
    one.history.close()
    again = beside()
    assert again.state() is State.INACTIVE
    assert "rule memory_only_grows begins anew: a stored alert cannot be read" in caplog.text


async def test_a_rule_that_fails_is_told_once_and_ends_no_other(beside, caplog):
    class Broken:
        name = "broken"
        patience = MemoryOnlyGrows().patience

        def look(self, past, t_ns):
            raise ZeroDivisionError("division by zero")

    one = beside(rules=(Broken(), *ALL_RULES))
    await one.live(3)
    assert one.watch.alerts["broken"].health is Health.ERR
    assert one.watch.alerts["broken"].message == "ZeroDivisionError: division by zero"
    assert one.watch.alerts["restart_cured_it"].health is Health.OK
    assert caplog.text.count("rule broken failed") == 1


async def test_coming_and_going_is_told_once(beside, caplog):
    one = beside()
    with caplog.at_level(logging.INFO, "plimsoll.watch"):
        await one.live(2)
        await one.live(5, up=False)
        await one.live(2)
    told = [record.message for record in caplog.records if re.search(r"demo: (up|down)", record.message)]
    assert told == ["demo: up", "demo: down: refused: nothing listens", "demo: up"]


async def test_a_history_that_cannot_be_written_is_told_once_and_stops_nothing(beside, caplog):
    one = beside()
    one.history.error = RecordError("cannot write watch.db: the disk is full")
    one.history.dropped = 7
    await one.live(2)
    assert caplog.text.count("the disk is full") == 1
    assert one.exported()["plimsoll_history_dropped_total", "", "", ""] == 7


async def test_events_belong_to_the_target(beside):
    one = beside()
    one.watch.on_event(Event(one.clock.now_ns(), "restart", "counters began again"))
    await one.live(1)
    assert [epoch.target for epoch in one.history.epochs()] == ["demo"]


# --- over the network


def recorded(name):
    page = (SAMPLES / name).read_bytes()
    head, _, body = page.partition(b"\r\n\r\n") if page.startswith(b"HTTP/") else (b"", b"", page)
    server = re.search(rb"^server: (\S+)", head, re.IGNORECASE | re.MULTILINE)
    kind = "application/json" if body.startswith((b"{", b"[")) else "text/plain"
    headers = {"Server": server[1].decode()} if server else {}
    return web.Response(body=body, content_type=kind, headers=headers)


LLAMACPP = {
    "/metrics": "llamacpp/metrics_after_load.txt",
    "/v1/models": "llamacpp/models.txt",
    "/props": "llamacpp/get_props.txt",
    "/slots": "llamacpp/get_slots.txt",
    "/health": "llamacpp/get_health.txt",
}
VLLM = {
    "/metrics": "vllm/metrics_after_load.txt",
    "/v1/models": "vllm/models.txt",
    "/version": "vllm/get_version.txt",
    "/health": "vllm/get_health.txt",
}


class RecordedServer:
    """Answers with what a real server answered; `pages` can be exchanged while it runs."""

    def __init__(self, pages):
        self.pages = dict(pages)

    async def answer(self, request):
        name = self.pages.get(request.path)
        return web.Response(status=404) if name is None else recorded(name)

    @asynccontextmanager
    async def serve(self, port=0):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


async def wait_for(condition, deadline_s=20.0):
    async with asyncio.timeout(deadline_s):
        while not (result := await condition()):  # noqa: ASYNC110 - it comes about behind a socket
            await asyncio.sleep(0.05)
    return result


async def test_the_reader_finds_out_again_what_a_target_has_become():
    server, seen = RecordedServer(LLAMACPP), []
    async with server.serve() as port, open_session() as session:
        read = watching_reader(session, WatchTarget(parse_url(f"http://127.0.0.1:{port}"), "demo"), seen.append)
        first = await read()
        assert "generation_tokens_total" in first.values
        # llama.cpp tells its slots when probed, not in its metrics.
        assert first.values["config_max_running_requests"] == seen[0].max_running_requests
        server.pages = dict(VLLM)
        assert isinstance(await read(), ScrapeFailure)
        assert (await read()).histograms
    assert [facts.engine for facts in seen] == ["llamacpp", "vllm"]


async def test_a_target_that_is_down_at_first_is_found_when_it_comes(tmp_path, unused_tcp_port):
    config = WatchConfig(
        WatchTarget(parse_url(f"http://127.0.0.1:{unused_tcp_port}"), "demo", interval_s=0.1, gpu="none"),
        tmp_path / "watch.db",
        port=0,
        evaluate_every_s=1,
    )
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(keep_watch(config, stop, address.set_result))
    async with aiohttp.ClientSession() as session:

        async def shows(line):
            async with session.get(await address) as answer:
                return line in await answer.text()

        await wait_for(lambda: shows('plimsoll_up{target="demo"} 0.0'))
        async with RecordedServer(LLAMACPP).serve(unused_tcp_port):
            await wait_for(lambda: shows('plimsoll_up{target="demo"} 1.0'))
            await wait_for(lambda: shows('plimsoll_engine_info{engine="llamacpp"'))
        await wait_for(lambda: shows('plimsoll_up{target="demo"} 0.0'))
        await wait_for(
            lambda: shows('plimsoll_alert_state{rule="memory_only_grows",state="inactive",target="demo"} 1.0')
        )
    stop.set()
    await watching
    with SqliteHistory.open(tmp_path / "watch.db") as history:
        (up,) = history.series("up", target="demo")
        assert set(up.values) == {0, 1}
        assert history.manifest()["kind"] == "watch"
        assert "memory_only_grows" in history.manifest()["watch of demo"]["alerts"]


async def test_a_stress_run_is_not_continued_as_a_watch(tmp_path):
    path = tmp_path / "run.db"
    with SqliteHistory.create(path) as history:
        history.set_manifest({"kind": "stress"})
    config = WatchConfig(WatchTarget(parse_url("http://127.0.0.1:1"), "demo", gpu="none"), path, port=0)
    with pytest.raises(ConfigError, match=r"run\.db is the file of another kind of run \(stress\)"):
        await keep_watch(config, asyncio.Event())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pid": 4_194_000}, "there is no such process"),
        ({"history": "nowhere/watch.db"}, "there is no folder"),
        ({"port": "taken"}, "cannot listen on 127.0.0.1"),
    ],
)
async def test_what_cannot_begin_writes_nothing(tmp_path, changes, says):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] if changes.get("port") else 0
        target = WatchTarget(parse_url("http://127.0.0.1:1"), "demo", gpu="none", pid=changes.get("pid"))
        config = WatchConfig(target, tmp_path / changes.get("history", "watch.db"), port=port)
        with pytest.raises(ConfigError, match=says):
            await keep_watch(config, asyncio.Event())
    assert list(tmp_path.iterdir()) == []


async def test_two_watches_on_one_history_are_refused(tmp_path):
    path = tmp_path / "watch.db"
    config = WatchConfig(WatchTarget(parse_url("http://127.0.0.1:1"), "demo", gpu="none"), path, port=0)
    with SqliteHistory.create(path) as history:
        history.set_manifest({"kind": "watch"})
        history.flush()
        with pytest.raises(RecordError, match="another Plimsoll process"):
            await keep_watch(config, asyncio.Event())


async def test_a_watch_that_no_longer_samples_ends_with_the_reason(tmp_path, monkeypatch):
    async def broken(self):
        raise RuntimeError("no more ticks")

    monkeypatch.setattr("plimsoll.watch.Sampler.run", broken)
    config = WatchConfig(WatchTarget(parse_url("http://127.0.0.1:1"), "demo", gpu="none"), tmp_path / "w.db", port=0)
    with pytest.raises(RuntimeError, match="no more ticks"):
        await keep_watch(config, asyncio.Event())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path, number):
    (tmp_path / "watch.yaml").write_text(
        "targets:\n- {url: http://127.0.0.1:1, name: nobody, gpu: none}\nlisten: 127.0.0.1:0\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "plimsoll", "watch", str(tmp_path / "watch.yaml")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PLIMSOLL_API_KEY": "sk-secret"},
    ) as child:
        lines = []
        for line in child.stderr:
            lines.append(line)
            if "down: not_ready" in line:
                break
        child.send_signal(number)
        lines += child.stderr.readlines()
        assert child.wait(timeout=30) == 0
    text = "".join(lines)
    assert re.search(
        r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO watching http://127\.0\.0\.1:1 as nobody; metrics at ", text
    )
    assert lines[-1].endswith("INFO ended\n")
    assert "Traceback" not in text
    assert "sk-secret" not in text
    with SqliteHistory.open(tmp_path / "watch.db") as history:
        assert history.series("up", target="nobody")


def test_arguments():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["w.yaml"]).config == Path("w.yaml")
