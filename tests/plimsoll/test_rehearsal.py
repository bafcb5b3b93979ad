"""A rehearsed watch is a watch: it ticks, remembers, judges and exports as beside a real server, in virtual time."""

import asyncio
import io
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rehearsing import CUSTOMERS, FLAT, MIB, SPEC, Rehearsed, Scenario

from alerts.state import Health, State
from monitor.exporter import TickCollector
from plimsoll.rehearsal import LeapingClock
from serving.clock import NS
from serving.records import Event
from serving.signals import SIGNALS, Kind, increase
from serving.simulator.fluid import FluidServer
from serving.simulator.server import SimulatedServer
from serving.simulator.truth import TruthWriter, read_truth

BOTH = pytest.mark.parametrize("mode", [SimulatedServer, FluidServer], ids=["token", "fluid"])
FEW = replace(FLAT, per_second=0.5)
"""Token mode takes every step of them."""


@pytest.fixture
def rehearse(tmp_path):
    """Make a scenario's server and watch; its file is closed at the end."""
    made = []

    def make(scenario, **options):
        rehearsed = Rehearsed(scenario, tmp_path / f"{len(made)}.db", **options)
        made.append(rehearsed)
        return rehearsed

    yield make
    for one in made:
        one.history.close()


def everything(history):
    """All rows of a history, by table."""
    history.flush()
    with closing(sqlite3.connect(history.path)) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
        return {table: list(file.execute(f"SELECT * FROM {table} ORDER BY 1, 2")) for table in tables}  # noqa: S608


LEAK = "host_leak_per_hour=400MiB"
CRASH = "crash=100s,start=5402s"


@BOTH
def test_the_same_seed_gives_the_same_samples_and_alerts(rehearse, mode):
    scenario = Scenario(1.2, (LEAK, "crash=100s,start=1h"), FEW, mode=mode)
    one, two = rehearse(scenario).run(), rehearse(scenario).run()
    assert one.rehearsal.said == two.rehearsal.said != []
    assert everything(one.history) == everything(two.history)
    another = rehearse(replace(scenario, traffic=replace(FEW, seed=2), seed=2)).run(0.1)
    assert everything(one.history)["target_sample"][:24] != everything(another.history)["target_sample"]


@BOTH
def test_to_stop_on_the_way_and_go_on_changes_nothing(rehearse, mode):
    scenario = Scenario(1.0, (LEAK, "crash=60s,start=50m"), FEW, mode=mode)
    whole, pieces = rehearse(scenario).run(), rehearse(scenario)
    for until_h in (0.0, 0.5, 0.7071, 0.8375, 1.0):
        pieces.run(until_h)
    assert pieces.rehearsal.said == whole.rehearsal.said != []
    assert everything(pieces.history) == everything(whole.history)


@BOTH
def test_ticks_keep_to_the_interval_and_judgements_to_theirs(rehearse, mode):
    one = rehearse(
        Scenario(1.0, traffic=replace(FEW, per_second=0.1), mode=mode, interval_s=5.0, evaluate_every_s=60.0)
    )
    heard, judged = [], []
    one.rehearsal.sampler.add_listener(heard.append)
    judge = one.rehearsal.watch.judge

    async def listen():
        judged.append(one.clock.now_ns())
        await judge()

    one.rehearsal.watch.judge = listen
    one.run()
    assert [tick.t_ns for tick in heard] == [one.begin_ns + turn * 5 * NS for turn in range(720)]
    assert judged == [one.begin_ns + turn * 60 * NS for turn in range(1, 60)]
    assert one.rehearsal.ticks == 720
    assert one.rehearsal.failed_ticks == one.rehearsal.sampler.skipped_ticks == 0
    assert not one.rehearsal.sampler.errors
    assert list(one.read("up").t_ns) == [tick.t_ns for tick in heard]


@BOTH
def test_a_crash_is_a_gap_and_a_restart_at_its_moment(rehearse, mode):
    one = rehearse(Scenario(1.6, (CRASH,), replace(FEW, per_second=0.2), mode=mode)).run()
    down = [one.begin_ns + second * NS for second in range(5415, 5502, 15)]
    up = one.read("up")
    assert [t_ns for t_ns, value in zip(up.t_ns, up.values, strict=True) if not value] == down
    assert one.rehearsal.failed_ticks == len(down)
    restart_ns = one.begin_ns + 5505 * NS
    assert [(event.t_ns, event.kind) for event in one.rehearsal.events] == [
        (one.begin_ns, "up"),
        (down[0], "down"),
        (restart_ns, "restart"),
        (restart_ns, "up"),
    ]
    first, second = one.history.epochs("sim")
    assert (first.t_start_ns, first.t_end_ns) == (one.begin_ns, restart_ns)
    assert (second.t_start_ns, second.t_end_ns) == (restart_ns, None)
    # Nothing but the failure is known of the time between: no value is repeated, none becomes 0.
    for signal in ("requests_running", "gpu_memory_used_bytes", "process_anonymous_memory_bytes"):
        assert set(up.t_ns) - set(one.read(signal).t_ns) == set(down)
    started_s = one.read("engine_start_timestamp_seconds").values
    assert set(started_s) == {one.begin_ns / NS, one.begin_ns / NS + 5502}


@BOTH
def test_the_history_holds_what_could_be_seen_at_each_tick(rehearse, mode):
    one = rehearse(Scenario(1.0, (LEAK, "crash=50s,start=1805s"), replace(FEW, per_second=1.0), mode=mode))
    seen = []
    one.rehearsal.sampler.add_listener(lambda tick: seen.append((tick.t_ns, one.server.snapshot())))
    one.run()
    there = [(t_ns, snapshot) for t_ns, snapshot in seen if snapshot is not None]
    assert len(seen) - len(there) == 3
    first_token = "time_to_first_token_seconds"
    figures = {
        "requests_running": lambda s: s.running,
        "requests_waiting": lambda s: s.waiting,
        "kv_cache_usage_ratio": lambda s: s.kv_blocks_used / (SPEC.kv_blocks - 1),
        "prompt_tokens_total": lambda s: s.prompt_tokens,
        "generation_tokens_total": lambda s: s.generated_tokens,
        "engine_progress_total": lambda s: s.steps,
        f"{first_token}_sum": lambda s: s.histograms[first_token].sum,
        f"{first_token}_count": lambda s: s.histograms[first_token].count,
        "process_anonymous_memory_bytes": lambda s: s.process.anonymous_memory_bytes,
        "process_open_fds": lambda s: s.process.open_fds,
        "gpu_memory_used_bytes": lambda s: s.gpus[0].memory_used_bytes,
        "gpu_utilization_ratio": lambda s: s.gpus[0].utilization_ratio,
    }
    for signal, figure in figures.items():
        series = one.read(signal)
        assert list(series.t_ns) == [t_ns for t_ns, _ in there]
        # A page has so many digits, and the first scrape of each start was one.
        assert series.values == pytest.approx([figure(snapshot) for _, snapshot in there], rel=1e-9), signal


def test_the_history_holds_what_the_truth_file_says(rehearse):
    truth = io.StringIO()
    # The longest prompt so far would raise the card's memory beside the leak.
    spec = replace(SPEC, memory=replace(SPEC.memory, activation_bytes_per_token=0))
    faults = ("host_leak_per_hour=200MiB", "gpu_leak_per_request=512KiB")
    one = rehearse(Scenario(1.0, faults, FEW, spec, mode=SimulatedServer), truth=TruthWriter(truth))
    one.run()
    report = read_truth(truth.getvalue().splitlines(keepends=True))
    assert not report.problems
    last_ns = one.read("up").t_ns[-1]
    assert last_ns == one.server.t_ns
    assert one.read("generation_tokens_total").values[-1] == report.tokens
    assert one.read("requests_finished_total").values[-1] == report.ended["stop"]  # this release counts no others
    assert one.read("request_duration_seconds_count").values[-1] == sum(report.ended.values())
    assert max(one.read("requests_running").values) <= report.running_max
    assert max(one.read("gpu_memory_used_bytes").values) <= report.gpu_bytes_max
    leaks = {leak.kind: leak for leak in report.leaks}
    per_hour = leaks["host_bytes"].per_hour.least_squares
    assert per_hour == pytest.approx(200 * MIB, rel=1e-3)
    assert one.slope("process_anonymous_memory_bytes") == pytest.approx(per_hour, rel=0.02)
    per_request = leaks["gpu_bytes"].per_request.least_squares
    assert per_request == pytest.approx(MIB / 2, rel=1e-3)
    measured = one.slope("gpu_memory_used_bytes", per="request_duration_seconds_count")
    assert measured == pytest.approx(per_request, rel=0.02)


@BOTH
def test_the_exporter_shows_the_last_tick_and_the_rules(rehearse, mode):
    one = rehearse(Scenario(1.1, (LEAK, "crash=60s,start=3605s"), FEW, mode=mode))
    collector = TickCollector(one.clock, extra=one.rehearsal.watch.families)
    collector.follow("sim", one.rehearsal.sampler)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    def page():
        families = text_string_to_metric_families(generate_latest(registry).decode())
        samples = [sample for family in families for sample in family.samples]
        return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}

    one.run(0.9)
    shown = page()
    snapshot = one.server.snapshot()
    assert shown["plimsoll_up", "sim"] == 1
    assert shown["plimsoll_generation_tokens_total", "sim"] == snapshot.generated_tokens
    last = ("plimsoll_process_anonymous_memory_bytes", "server", "sim")
    assert shown[last] == snapshot.process.anonymous_memory_bytes
    assert shown["plimsoll_alert_state", "firing", "memory_only_grows", "sim"] == 1
    assert shown["plimsoll_alert_health", "decode_speed_down", "ok", "sim"] == 1
    assert shown["plimsoll_last_sample_timestamp_seconds", "sim"] == (one.at_ns(0.9) - 15 * NS) / NS
    assert collector.problem() is None
    one.run(1.0 + 40 / 3600)
    assert page()["plimsoll_up", "sim"] == 0
    assert not {name for name, *_ in page()} & {"plimsoll_requests_running", last[0]}
    one.run()
    assert page()["plimsoll_up", "sim"] == 1
    assert page()["plimsoll_generation_tokens_total", "sim"] < shown["plimsoll_generation_tokens_total", "sim"]


@BOTH
def test_a_watch_that_is_started_again_goes_on_and_notices_a_restart_that_nobody_watched(rehearse, mode):
    one = rehearse(Scenario(1.6, (LEAK, "crash=60s,start=70m"), FEW, mode=mode)).run(0.9)
    assert one.rehearsal.watch.alerts["memory_only_grows"].state is State.FIRING
    fired = one.rehearsal.watch.alerts["memory_only_grows"].since_ns
    one.start_watch_again(1.5)
    left = one.rehearsal.watch.alerts["memory_only_grows"]
    assert (left.state, left.since_ns, left.health) == (State.FIRING, fired, Health.UNKNOWN)
    one.run()
    restarts = [event for event in one.rehearsal.events if event.kind == "restart"]
    assert [event.t_ns for event in restarts] == [one.at_ns(1.5)]
    assert restarts[0].text.startswith("while nobody watched: ")
    times = one.read("up").t_ns
    assert max(after - before for before, after in pairwise(times)) == 2175 * NS
    assert len(one.history.epochs("sim")) == 2


def test_a_watch_that_is_started_again_beside_the_same_server_sees_no_restart(rehearse):
    one = rehearse(Scenario(1.0)).run(0.5)
    one.start_watch_again(0.7)
    one.run()
    assert [event.kind for event in one.rehearsal.events] == ["up", "up"]
    assert len(one.history.epochs("sim")) == 1


@BOTH
def test_a_deploy_that_somebody_marks_is_on_the_timeline(rehearse, mode):
    deploy = "deploy=45s,start=30m,memory=1GiB,speed=25%"
    one = rehearse(Scenario(1.0, (deploy,), replace(FEW, per_second=1.0), mode=mode)).run(0.5)
    one.rehearsal.watch.on_event(Event(one.clock.now_ns(), "deploy", "release 2"))
    one.run()
    told = [(event.kind, event.t_ns) for event in one.rehearsal.events if event.kind in ("deploy", "restart")]
    assert told == [("deploy", one.at_ns(0.5)), ("restart", one.at_ns(0.5) + 45 * NS)]
    memory = one.points("process_anonymous_memory_bytes")[1]
    assert memory[-1] - memory[0] == pytest.approx(1024 * MIB, abs=40 * MIB)
    before, after = (
        increase(one.read("inter_token_latency_seconds_sum", *stretch))
        / increase(one.read("inter_token_latency_seconds_count", *stretch))
        for stretch in ((0.0, 0.5), (0.55, 1.0))
    )
    assert before / after == pytest.approx(1.25, rel=0.03)


def test_the_time_that_a_scrape_takes_passes_for_the_watch(rehearse):
    one = rehearse(Scenario(0.5, ("slow_metrics=2500ms,start=10m,end=20m",), interval_s=1.0)).run()
    # Those due 1 and 2 s after the scrape began fall into it.
    slow = [value for value in one.read("scrape_duration_seconds").values if value > 2]
    assert len(slow) == 200
    assert one.rehearsal.sampler.skipped_ticks == 400
    assert one.rehearsal.ticks == 1800 - 400
    assert one.rehearsal.failed_ticks == 0


def test_a_day_of_virtual_time_needs_no_wall_time_to_pass(rehearse):
    clock = LeapingClock(5 * NS)
    leaps = []

    async def note(t_ns):
        leaps.append(t_ns)

    async def sleep():
        await clock.sleep(86400)
        await clock.sleep(-1)
        clock.on_leap = note
        await clock.sleep(0.5)

    asyncio.run(asyncio.wait_for(sleep(), 5))
    assert clock.now_ns() == 86405 * NS + NS // 2
    assert leaps == [clock.now_ns()]


def test_customers_of_both_modes_are_alike_to_a_watch(rehearse):
    scenario = Scenario(1.0, traffic=CUSTOMERS, begins_h=10)
    token = rehearse(replace(scenario, mode=SimulatedServer)).run()
    fluid = rehearse(scenario).run()
    for signal in ("generation_tokens_total", "prompt_tokens_total", "requests_finished_total"):
        counted = [increase(one.read(signal)) for one in (token, fluid)]
        # Nearly as much as chance moves the number of requests of an hour.
        assert counted[0] == pytest.approx(counted[1], rel=0.05)
    recorded = [
        {name for name, signal in SIGNALS.items() if signal.kind is not Kind.HISTOGRAM and len(one.read(name))}
        for one in (token, fluid)
    ]
    assert recorded[0] == recorded[1]


def test_the_example_in_the_page_says_what_the_page_says(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    section = page[page.index("## Rehearsing a watch in virtual time") :]
    example, follow = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (said,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    follow = f"from monitor.exporter import TickCollector\n{follow}\nprint(collector.states())"
    done = subprocess.run(
        [sys.executable, "-c", example + follow], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == said + "{'simulated': 'not sampled'}\n"
