import asyncio
import math
import os
import re
import shutil
import socket
from asyncio.subprocess import PIPE
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from monitor.exporter import TickCollector, families, make_app, serve
from monitor.sampler import Sampler, Tick
from serving.clock import NS, FakeClock
from serving.engines import ENGINES, ScrapeFailure, TargetFacts
from serving.errors import ConfigError
from serving.exposition import Histogram, parse
from serving.signals import SIGNALS, Kind, Scope, signals_of

ROOT = Path(__file__).parent.parent.parent
FACTS = TargetFacts(engine="vllm", version="0.33.0", model='a "quoted" \\ model')


def full_tick(t_ns: int) -> Tick:
    """A tick with a value for every signal that there is."""
    values = {signal.name: 2.5 for signal in signals_of(Scope.TARGET) if signal.kind is not Kind.HISTOGRAM}
    histogram = Histogram((0.001, 0.5, 1000000.0, math.inf), (1, 2, 3, 4), 7.5)
    histograms = {signal.name: histogram for signal in signals_of(Scope.TARGET) if signal.kind is Kind.HISTOGRAM}
    return Tick(
        t_ns,
        up=True,
        values=values | {"up": 1.0},
        sources={"requests_running": "vllm:num_requests_running", "kv_cache_usage_ratio": "proxy:/slots"},
        histograms=histograms,
        gpus={gpu: {signal.name: 3.0 for signal in signals_of(Scope.GPU)} for gpu in ("GPU-a", "GPU-b")},
        processes={role: {signal.name: 4.0 for signal in signals_of(Scope.PROCESS)} for role in ("api", "worker:TP0")},
    )


def down_tick(t_ns: int) -> Tick:
    return Tick(t_ns, up=False, values={"up": 0.0, "scrape_duration_seconds": 10.0}, failure="timeout: no answer")


class Bench:
    """A collector with one target, and what a scrape of it shows."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.collector = TickCollector(self.clock, **options)

    def take(self, tick: Tick, target: str = "t") -> None:
        self.collector.take(target, tick)

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in self.collector.collect():
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found


async def scrape(app: Any, path: str = "/metrics", accept: str | None = None) -> tuple[int, str, str]:
    async with serve(app, "127.0.0.1", 0) as base_url, aiohttp.ClientSession() as session:
        headers = {"Accept": accept} if accept else {}
        async with session.get(base_url + path, headers=headers) as response:
            return response.status, response.headers["Content-Type"], await response.text()


def test_every_signal_is_exported_with_the_labels_of_its_scope() -> None:
    bench = Bench()
    bench.take(full_tick(bench.clock.now_ns()))
    samples = bench.samples()
    assert samples["plimsoll_requests_running"] == [({"target": "t"}, 2.5)]
    assert samples["plimsoll_generation_tokens_total"] == [({"target": "t"}, 2.5)]
    assert [labels["gpu"] for labels, _ in samples["plimsoll_gpu_memory_used_bytes"]] == ["GPU-a", "GPU-b"]
    assert [labels["role"] for labels, _ in samples["plimsoll_process_swap_bytes"]] == ["api", "worker:TP0"]
    for name, signal in SIGNALS.items():
        suffix = "_bucket" if signal.kind is Kind.HISTOGRAM else ""
        assert f"plimsoll_{name}{suffix}" in samples


def test_histograms_keep_the_engines_buckets() -> None:
    bench = Bench()
    bench.take(full_tick(bench.clock.now_ns()))
    samples = bench.samples()
    buckets = [(labels["le"], value) for labels, value in samples["plimsoll_time_to_first_token_seconds_bucket"]]
    assert buckets == [("0.001", 1), ("0.5", 2), ("1e+06", 3), ("+Inf", 4)]
    assert samples["plimsoll_time_to_first_token_seconds_sum"] == [({"target": "t"}, 7.5)]
    assert samples["plimsoll_time_to_first_token_seconds_count"] == [({"target": "t"}, 4)]


def test_a_failed_scrape_leaves_up_zero_and_drops_what_was_there() -> None:
    bench = Bench()
    bench.take(full_tick(bench.clock.now_ns()))
    gpus = {"GPU-a": {"gpu_memory_used_bytes": 1.0}}
    bench.take(replace(down_tick(bench.clock.now_ns()), gpus=gpus))
    samples = bench.samples()
    del samples["plimsoll_build_info"]
    assert {name: rows[0][1] for name, rows in samples.items()} == {
        "plimsoll_up": 0,
        "plimsoll_scrape_duration_seconds": 10,
        "plimsoll_gpu_memory_used_bytes": 1,
        "plimsoll_last_sample_timestamp_seconds": bench.clock.now_ns() / NS,
    }


async def test_a_tick_of_a_stuck_sampler_is_not_shown_as_fresh() -> None:
    bench = Bench(max_age_seconds=60)
    bench.take(full_tick(bench.clock.now_ns()))
    sampled_ns = bench.clock.now_ns()
    await bench.clock.advance(60)
    assert bench.samples()["plimsoll_up"] == [({"target": "t"}, 1)]
    assert bench.collector.problem() is None
    await bench.clock.advance(0.001)
    samples = bench.samples()
    assert "plimsoll_up" not in samples
    assert samples["plimsoll_last_sample_timestamp_seconds"] == [({"target": "t"}, sampled_ns / NS)]
    assert bench.collector.problem() == "no sample of t in the last 60 s"
    assert bench.collector.states() == {"t": "not sampled"}


def test_two_targets_share_families() -> None:
    bench = Bench()
    bench.take(full_tick(bench.clock.now_ns()), "a")
    bench.take(down_tick(bench.clock.now_ns()), "b")
    assert bench.samples()["plimsoll_up"] == [({"target": "a"}, 1), ({"target": "b"}, 0)]
    assert bench.samples()["plimsoll_requests_running"] == [({"target": "a"}, 2.5)]
    names = [family.name for family in bench.collector.collect()]
    assert len(names) == len(set(names))


def test_the_engines_own_names_are_told_in_help_and_as_info() -> None:
    bench = Bench()
    bench.take(full_tick(bench.clock.now_ns()))
    bench.take(replace(full_tick(bench.clock.now_ns()), sources={"requests_running": "sglang:num_running_reqs"}), "u")
    (running,) = [family for family in bench.collector.collect() if family.name == "plimsoll_requests_running"]
    assert running.documentation.endswith("Read from sglang:num_running_reqs, vllm:num_requests_running.")
    infos = [tuple(labels.values()) for labels, _ in bench.samples()["plimsoll_signal_source_info"]]
    assert infos == [
        ("t", "requests_running", "vllm:num_requests_running"),
        ("t", "kv_cache_usage_ratio", "proxy:/slots"),
        ("u", "requests_running", "sglang:num_running_reqs"),
    ]


def test_what_a_target_runs_is_told_and_stays_while_it_is_down() -> None:
    bench = Bench()
    bench.collector.describe_target("t", replace(FACTS, version=None))
    bench.take(down_tick(bench.clock.now_ns()))
    labels = {"target": "t", "engine": "vllm", "version": "", "model": FACTS.model}
    assert bench.samples()["plimsoll_engine_info"] == [(labels, 1)]


async def test_a_followed_sampler_is_shown_with_its_own_faults() -> None:
    bench = Bench()

    async def read() -> ScrapeFailure:
        await bench.clock.sleep(2.5)
        return ScrapeFailure("timeout", "no answer", 2.5)

    def fails(_: Tick) -> None:
        raise ValueError("a bug")

    sampler = Sampler(bench.clock, read)
    sampler.add_listener(fails)
    bench.collector.follow("t", sampler)
    assert bench.collector.problem() == "no sample of t in the last 60 s"
    task = asyncio.create_task(sampler.run())
    await bench.clock.advance(3)
    task.cancel()
    samples = bench.samples()
    assert samples["plimsoll_up"] == [({"target": "t"}, 0)]
    assert samples["plimsoll_skipped_ticks_total"] == [({"target": "t"}, 2)]
    ((labels, count),) = samples["plimsoll_sampler_errors_total"]
    assert "fails" in labels["where"]
    assert count == 1
    assert bench.collector.states() == {"t": "timeout: no answer"}


def test_extra_families_are_made_anew_at_each_scrape() -> None:
    states = ["pending", "firing"]

    def rule_states() -> Iterable[Metric]:
        family = GaugeMetricFamily("plimsoll_alert_state", "State of each rule.", labels=["rule", "state"])
        family.add_metric(["memory_only_grows", states.pop(0)], 1)
        yield family

    bench = Bench(extra=rule_states)
    assert bench.samples()["plimsoll_alert_state"][0][0]["state"] == "pending"
    assert bench.samples()["plimsoll_alert_state"][0][0]["state"] == "firing"


@pytest.mark.parametrize(
    ("accept", "content_type", "read"),
    [
        (None, "text/plain; version=0.0.4; charset=utf-8", parse_text),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
            "application/openmetrics-text",
            parse_openmetrics,
        ),
    ],
)
async def test_metrics_are_negotiated(accept: str | None, content_type: str, read: Any) -> None:
    bench = Bench()
    bench.collector.describe_target("t", FACTS)
    bench.take(full_tick(bench.clock.now_ns()))
    status, got_type, text = await scrape(make_app(bench.collector), accept=accept)
    assert status == 200
    assert got_type.startswith(content_type)
    found = {family.name.removesuffix("_total") for family in read(text)}
    assert {family.name.removesuffix("_total") for family in families() if "errors" not in family.name} - found == {
        "plimsoll_skipped_ticks"
    }
    assert "process_resident_memory_bytes" in found  # of this process, beside those of the target


async def test_what_is_exported_reads_back_as_it_was_sampled() -> None:
    """Through the project's own reader, from a recorded page of a real engine and back."""
    page = (ROOT / "tests" / "samples" / "vllm" / "metrics_kv_pressure.txt").read_bytes()
    engine_reading = ENGINES["vllm"].read(parse(page))
    bench = Bench()
    values = {**engine_reading.values, "up": 1.0}
    bench.take(Tick(bench.clock.now_ns(), True, values, engine_reading.sources, engine_reading.histograms))
    _, _, text = await scrape(make_app(bench.collector))
    exported = parse(text)
    assert exported.bad_lines == 0
    assert {name: exported.samples[f"plimsoll_{name}"][0][1] for name in values} == values
    assert {
        name: exported.histogram(f"plimsoll_{name}") for name in engine_reading.histograms
    } == engine_reading.histograms


async def test_health_is_that_of_the_watch_and_not_of_the_target() -> None:
    bench = Bench()
    app = make_app(bench.collector)
    assert await scrape(app, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    bench.take(down_tick(bench.clock.now_ns()))
    app = make_app(bench.collector)
    assert (await scrape(app, "/healthz"))[0] == 200
    await bench.clock.advance(61)
    app = make_app(bench.collector)
    assert (await scrape(app, "/healthz"))[::2] == (503, "no sample of t in the last 60 s\n")


async def test_the_index_links_and_lists_targets_as_text() -> None:
    bench = Bench()
    bench.take(full_tick(bench.clock.now_ns()), "<script>")
    status, content_type, text = await scrape(make_app(bench.collector), "/")
    assert (status, content_type) == (200, "text/html; charset=utf-8")
    assert 'href="metrics"' in text
    assert "<td>&lt;script&gt;</td><td>up</td>" in text


async def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    bench = Bench()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"port {port}: something listens there already; stop it, or choose another"
        ):
            async with serve(make_app(bench.collector), "127.0.0.1", port):
                pytest.fail("served on a port in use")


async def test_an_address_of_another_host_is_an_error_that_says_what_to_do() -> None:
    bench = Bench()
    with pytest.raises(ConfigError, match=r"no address 192\.0\.2\.1; use 127\.0\.0\.1"):
        async with serve(make_app(bench.collector), "192.0.2.1", 0):
            pytest.fail("served on an address of nobody")
    with pytest.raises(ConfigError, match="check the address"):
        async with serve(make_app(bench.collector), "no-such-host.invalid", 0):
            pytest.fail("served on a name of nobody")


async def test_the_port_is_free_again_after_serving() -> None:
    bench = Bench()
    async with serve(make_app(bench.collector), "127.0.0.1", 0) as base_url:
        port = int(base_url.rpartition(":")[2])
    async with serve(make_app(bench.collector), "127.0.0.1", port) as again:
        assert again == base_url


@pytest.mark.prometheus
@pytest.mark.parametrize("tick", [full_tick, down_tick])
async def test_promtool_finds_nothing_to_say(tick: Any) -> None:
    if shutil.which("promtool") is None:
        reason = "promtool is not installed (Debian package prometheus)"
        pytest.fail(f"CI must run this: {reason}") if os.environ.get("CI") == "true" else pytest.skip(reason)
    bench = Bench()
    bench.collector.describe_target("t", FACTS)
    bench.collector.follow("t", Sampler(bench.clock, asyncio.Event().wait))  # type: ignore[arg-type]
    bench.take(tick(bench.clock.now_ns()))
    _, _, text = await scrape(make_app(bench.collector))
    promtool = await asyncio.create_subprocess_exec(
        "promtool", "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert await promtool.communicate(text.encode()) == (b"", b"")
    assert promtool.returncode == 0


def test_the_docs_list_every_exported_metric_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    own, rules, _ = text.partition("\n## Rules and history\n")  # those of rules are the watch's
    assert rules
    documented = re.findall(r"^\| `(plimsoll_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", own, re.MULTILINE)
    listed = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in documented]
    exported = [(family.name, family.kind.value, family.labels, family.help) for family in families()]
    assert sorted(listed) == sorted(exported)
    assert len({name for name, *_ in exported}) == len(exported)
