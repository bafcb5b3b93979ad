import asyncio
import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from monitor import sampler
from monitor.http import open_session, parse_url
from monitor.process import ServerProcesses, find_listener
from monitor.sampler import Sampler, Tick, find_restart, target_reader
from serving.clock import NS, FakeClock, SystemClock
from serving.embedded import EmbeddedServer
from serving.engines import ENGINES, Reading, ScrapeFailure
from serving.errors import ConfigError
from serving.exposition import Histogram
from serving.records import Event

SAMPLES = Path(__file__).parent.parent / "samples"
REFUSED = ScrapeFailure("refused", "nothing listens there", 0.25)


@pytest.fixture(autouse=True)
def _a_busy_machine_makes_nothing_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_PROCESS_DEADLINE_S", 60.0)


def reading(running: float = 3, tokens: float = 100, **more: Any) -> Reading:
    values = {"requests_running": running, "generation_tokens_total": tokens}
    sources = {"requests_running": "vllm:num_requests_running", "generation_tokens_total": "vllm:generation_tokens"}
    return Reading(values, sources, seconds=0.125, **more)


class Script:
    """A target whose answers are listed, each with how long it takes; the last one is repeated."""

    def __init__(self, clock: FakeClock, *answers: tuple[float, Reading | ScrapeFailure]) -> None:
        self.clock = clock
        self.answers = list(answers)
        self.in_flight = self.most_in_flight = 0

    async def __call__(self) -> Reading | ScrapeFailure:
        seconds, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if seconds:
            await self.clock.sleep(seconds)
        self.in_flight -= 1
        return answer


class OneGpu:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def read(self) -> dict[str, dict[str, float]]:
        if self.error is not None:
            raise self.error
        return {"GPU-a": {"gpu_memory_used_bytes": 1.0}}

    async def describe(self) -> Any:
        raise NotImplementedError

    async def close(self) -> None: ...


async def run(clock: FakeClock, sampler: Sampler, seconds: float) -> list[Any]:
    """What the listeners of both kinds were told within `seconds`, in order."""
    told: list[Any] = []
    sampler.add_listener(told.append)
    sampler.add_event_listener(told.append)
    task = asyncio.create_task(sampler.run())
    await clock.advance(seconds)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return told


def offsets(ticks: Iterable[Tick], start_ns: int) -> list[float]:
    return [(tick.t_ns - start_ns) / NS for tick in ticks]


async def test_a_tick_holds_what_target_and_gpu_said_at_one_moment() -> None:
    clock = FakeClock()
    sampler = Sampler(clock, Script(clock, (0, reading())), gpu=OneGpu())
    tick = await sampler.read_once()
    assert tick == Tick(
        clock.now_ns(),
        up=True,
        values={
            "up": 1,
            "scrape_duration_seconds": 0.125,
            "requests_running": 3,
            "generation_tokens_total": 100,
        },
        sources={"requests_running": "vllm:num_requests_running", "generation_tokens_total": "vllm:generation_tokens"},
        gpus={"GPU-a": {"gpu_memory_used_bytes": 1.0}},
    )


def test_histogram_totals_are_sums_and_counts_where_both_are_told() -> None:
    told, half = Histogram((0.1, math.inf), (3, 5), 1.25), Histogram((math.inf,), (5,), None)
    tick = Tick(0, up=True, values={}, histograms={"request_queue_seconds": told, "request_duration_seconds": half})
    assert tick.histogram_totals() == {"request_queue_seconds": (1.25, 5)}


async def test_a_failed_scrape_is_a_gap_and_not_a_zero_or_an_old_value() -> None:
    clock = FakeClock()
    sampler = Sampler(clock, Script(clock, (0, reading()), (0, REFUSED), (0, reading(running=4))), gpu=OneGpu())
    first, gap, third = await run(clock, sampler, 2)
    assert first.values["requests_running"] == 3
    assert gap == Tick(
        first.t_ns + NS,
        up=False,
        values={"up": 0, "scrape_duration_seconds": 0.25},
        gpus={"GPU-a": {"gpu_memory_used_bytes": 1.0}},
        failure="refused: nothing listens there",
    )
    assert (third.up, third.values["requests_running"], third.failure) == (True, 4, None)


@pytest.mark.parametrize("interval_seconds", [1.0, 0.1, 1 / 3])
async def test_ticks_keep_to_an_absolute_schedule(interval_seconds: float) -> None:
    """Each scrape takes 60 % of the interval; after 100 ticks nothing has drifted."""
    clock = FakeClock()
    start_ns = clock.now_ns()
    sampler = Sampler(clock, Script(clock, (0.6 * interval_seconds, reading())), interval_seconds=interval_seconds)
    ticks = await run(clock, sampler, 100 * interval_seconds)
    assert [tick.t_ns - start_ns for tick in ticks] == [n * round(interval_seconds * NS) for n in range(len(ticks))]
    assert len(ticks) == 100
    assert sampler.skipped_ticks == 0


@pytest.mark.parametrize(
    ("slow_seconds", "starts", "skipped"),
    [
        (0.999, [0, 1, 2, 3], 0),
        (1.0, [0, 1, 2, 3], 0),
        (1.001, [0, 2, 3], 1),
        (2.5, [0, 3], 2),
    ],
)
async def test_ticks_that_fall_into_a_slow_scrape_are_counted_and_never_overlap(
    slow_seconds: float, starts: list[float], skipped: int
) -> None:
    clock = FakeClock()
    start_ns = clock.now_ns()
    target = Script(clock, (slow_seconds, reading()), (0, reading()))
    sampler = Sampler(clock, target)
    ticks = await run(clock, sampler, 3)
    assert offsets(ticks, start_ns) == starts
    assert sampler.skipped_ticks == skipped
    assert target.most_in_flight == 1


async def test_a_restart_is_told_once_and_before_the_first_tick_after_it() -> None:
    clock = FakeClock()
    target = Script(clock, (0, reading(tokens=100)), (0, REFUSED), (0, reading(tokens=7)), (0, reading(tokens=9)))
    told = await run(clock, Sampler(clock, target), 3)
    assert [type(item).__name__ for item in told] == ["Tick", "Tick", "Event", "Tick", "Tick"]
    event = told[2]
    assert event == Event(told[3].t_ns, "restart", "generation_tokens_total fell from 100 to 7")


def tick(
    *,
    tokens: float | None = None,
    source: str = "a",
    started: float | None = None,
    started_source: str = "s",
    server: str | None = None,
    process: str | None = None,
) -> Tick:
    values = {"generation_tokens_total": tokens, "engine_start_timestamp_seconds": started, "requests_running": 1.0}
    sources = {"generation_tokens_total": source, "engine_start_timestamp_seconds": started_source}
    present = {name: value for name, value in values.items() if value is not None}
    return Tick(0, up=True, values=present, sources=sources, server_mark=server, process_mark=process)


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        (tick(tokens=5), tick(tokens=5), False),
        (tick(tokens=5), tick(tokens=6), False),
        (tick(tokens=5), tick(tokens=4), True),
        # An alias of another name is another counter.
        (tick(tokens=5), tick(tokens=4, source="b"), False),
        (tick(tokens=5), tick(), False),
        # The server's own word decides, both ways.
        (tick(server="1", tokens=5), tick(server="2", tokens=9), True),
        (tick(server="1", tokens=5), tick(server="1", tokens=4), False),
        (tick(server="1", tokens=5), tick(tokens=4), True),
        (tick(started=1000, tokens=5), tick(started=1001, tokens=4), False),
        (tick(started=1000, tokens=5), tick(started=1060, tokens=9), True),
        (tick(started=1000), tick(started=1060, started_source="/proc"), False),
        # A start time that the wall clock moved under the same process is none.
        (
            tick(started=1000, started_source="/proc", process="41"),
            tick(started=5000, started_source="/proc", process="41"),
            False,
        ),
        (tick(process="41", tokens=5), tick(process="57", tokens=9), True),
        # A supervisor may hold the port while it restarts the engine.
        (tick(process="41", tokens=5), tick(process="41", tokens=0), True),
        (tick(process="41", tokens=5), tick(process=None, tokens=6), False),
    ],
)
def test_a_restart_is_told_from_marks_first_and_counters_last(before: Tick, after: Tick, restarted: bool) -> None:
    assert (find_restart(before, after) is not None) is restarted


async def test_an_error_in_one_place_costs_that_place_only(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    sampler = Sampler(clock, Script(clock, (0, reading())), gpu=OneGpu(KeyError("a bug")))
    heard: list[Tick] = []

    def fails(_: Tick) -> None:
        raise ValueError("another bug")

    sampler.add_listener(fails)
    sampler.add_listener(heard.append)
    ticks = await run(clock, sampler, 4)
    assert len(ticks) == len(heard) == 5
    assert all(tick.up and not tick.gpus for tick in ticks)
    assert sampler.errors["gpu"] == 5
    assert sum(count for where, count in sampler.errors.items() if "fails" in where) == 5
    assert len(caplog.records) == 2  # each once


async def test_a_reader_that_raises_is_a_gap_that_says_so() -> None:
    async def broken() -> Reading:
        raise TypeError("a bug")

    clock = FakeClock()
    sampler = Sampler(clock, broken)
    (tick,) = await run(clock, sampler, 0)
    assert not tick.up
    assert "internal" in str(tick.failure)
    assert sampler.errors == {"target": 1}


@pytest.mark.parametrize("interval_seconds", [0, -1, float("nan")])
def test_an_interval_must_be_above_zero(interval_seconds: float) -> None:
    clock = FakeClock()
    with pytest.raises(ConfigError, match="not above 0"):
        Sampler(clock, Script(clock, (0, reading())), interval_seconds=interval_seconds)


class FixedProcesses(ServerProcesses):
    def read(self) -> dict[str, dict[str, float]]:
        self.start_mark, self.start_timestamp_seconds = "process 41", 1234.5
        return {"server": {"process_threads": 2}}


@pytest.mark.parametrize("up", [True, False])
async def test_processes_and_the_hosts_memory_are_read_whether_or_not_the_target_answers(
    tmp_path: Path, up: bool
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 4 kB\n")
    clock = FakeClock()
    target = Script(clock, (0, reading() if up else REFUSED))
    tick = await Sampler(clock, target, processes=FixedProcesses(80, proc=tmp_path)).read_once()
    assert tick.processes == {"server": {"process_threads": 2}}
    assert tick.values["host_memory_available_bytes"] == 4096
    assert tick.process_mark == "process 41"
    assert tick.values.get("engine_start_timestamp_seconds") == (1234.5 if up else None)


async def test_the_engines_own_start_time_goes_before_that_of_the_process(tmp_path: Path) -> None:
    clock = FakeClock()
    own = Reading({"engine_start_timestamp_seconds": 1.0}, {"engine_start_timestamp_seconds": "process_start_time"})
    tick = await Sampler(clock, Script(clock, (0, own)), processes=FixedProcesses(80, proc=tmp_path)).read_once()
    assert tick.values["engine_start_timestamp_seconds"] == 1.0
    assert tick.sources["engine_start_timestamp_seconds"] == "process_start_time"


async def test_a_recorded_vllm_page_becomes_a_tick_over_http() -> None:
    page = (SAMPLES / "vllm" / "metrics_kv_pressure.txt").read_bytes()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=page)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, open_session() as session:
        base_url = f"http://127.0.0.1:{server.port}"
        tick = await Sampler(FakeClock(), target_reader(session, base_url, ENGINES["vllm"])).read_once()
        no_engine = target_reader(session, base_url, ENGINES["sglang"])
        failure = await Sampler(FakeClock(), no_engine).read_once()
    assert tick.up
    assert tick.values["requests_running"] == 3
    assert tick.values["requests_waiting"] == 9
    assert tick.sources["requests_running"] == "vllm:num_requests_running"
    assert tick.histograms["time_to_first_token_seconds"].count > 0
    assert not failure.up
    assert set(failure.values) == {"up", "scrape_duration_seconds"}


@pytest.mark.engine
async def test_a_real_server_is_sampled_with_its_process_and_its_end_is_a_gap(tmp_path: Path) -> None:
    async def tick_of(server: EmbeddedServer) -> Tick:
        base = parse_url(server.url)
        processes = ServerProcesses(base.port)
        async with open_session() as session:
            read = target_reader(session, base.text, ENGINES["llamacpp"])
            tick = await Sampler(SystemClock(), read, processes=processes).read_once()
            server.stop()
            after = await Sampler(SystemClock(), read, processes=processes).read_once()
        assert (after.up, after.processes) == (False, {})
        assert not after.values.keys() & tick.sources.keys()
        assert str(after.failure).startswith("refused")
        return tick

    def start() -> EmbeddedServer:
        return EmbeddedServer.start(log_path=tmp_path / "log", cache_dir=tmp_path, shape="tiny", slots=2)

    with await asyncio.to_thread(start) as server:
        pid = server.pid
        assert find_listener(parse_url(server.url).port) == pid
        first = await tick_of(server)
    assert first.up
    assert first.values["requests_running"] == 0
    assert first.processes["server"]["process_anonymous_memory_bytes"] > 2**20
    assert str(first.process_mark).startswith(f"process {pid} ")
    with await asyncio.to_thread(start) as server:
        second = await tick_of(server)
    assert find_restart(first, second)
    assert find_restart(replace(first, server_mark=None), second)
