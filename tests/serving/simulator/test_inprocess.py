"""Over no socket a simulated server says what it says over one."""

from dataclasses import replace

import pytest

from serving.clock import NS
from serving.conversation import HttpRequest, converse
from serving.engines import Reading, ScrapeFailure, probe, scrape
from serving.engines.exchange import ENGINES
from serving.simulator.dialects.base import Dialect
from serving.simulator.dialects.llamacpp import LLAMACPP_DIALECT
from serving.simulator.dialects.sglang import SGLANG_DIALECT
from serving.simulator.dialects.vllm import VLLM_DIALECT
from serving.simulator.faults import FaultPlan, parse_fault
from serving.simulator.inprocess import InProcessTarget
from serving.simulator.launch import launch
from serving.simulator.server import SimulatedServer
from serving.simulator.spec import Finish, ServerSpec
from serving.simulator.traffic import Traffic
from serving.smoke import smoke

T0 = 1_700_000_000 * NS
TRAFFIC = Traffic(per_second=4.0, prompt_tokens=300, output_tokens=80, disconnect_share=0.2, shared_prefix_share=0.3)
SERVERS: list[tuple[Dialect, ServerSpec]] = [
    (VLLM_DIALECT, launch("vllm", model="hy3", card="h200", cards=8, max_batch=48)),
    # A pool that is too small, so that requests are preempted.
    (VLLM_DIALECT, launch("vllm", model="llama-3.1-8b", card="l40s", kv_blocks=1024, context_tokens=4096)),
    (SGLANG_DIALECT, launch("sglang", model="llama-3.1-8b", card="rtx 4090", max_batch=8, context_tokens=8192)),
    (LLAMACPP_DIALECT, launch("llamacpp", model="qwen2.5-7b", card="rtx 4090", max_batch=8, weight_bits=4.85)),
]
RELEASES = [(dialect, replace(spec, release=release)) for dialect, spec in SERVERS for release in dialect.releases]


class Bench:
    def __init__(self, dialect: Dialect, spec: ServerSpec, *faults: str, capacity: int | None = None) -> None:
        self.now_ns = T0
        plan = FaultPlan([parse_fault(fault) for fault in faults])
        server = SimulatedServer(spec, t_ns=T0, edges=dialect.edges, plan=plan, traffic=TRAFFIC)
        self.target = InProcessTarget(server, dialect, lambda: self.now_ns, kv_cache_capacity_tokens=capacity)
        self.capacity = capacity

    def page(self) -> Reading | ScrapeFailure:
        engine = ENGINES[self.target.server.spec.engine]
        return converse(scrape(engine, kv_cache_capacity_tokens=self.capacity), self.target.answer)


@pytest.mark.parametrize(("dialect", "spec"), RELEASES, ids=lambda value: getattr(value, "release", ""))
@pytest.mark.parametrize("capacity", [None, 5000])
def test_a_scrape_without_its_text_tells_what_the_page_tells(dialect, spec, capacity):
    bench = Bench(dialect, spec, capacity=capacity)
    for second in (1, 2, 5, 11, 30, 47, 90):
        bench.now_ns = T0 + second * NS
        fast = bench.target.read()
        assert isinstance(fast, Reading)
        assert fast == bench.page()


@pytest.mark.parametrize(("dialect", "spec"), RELEASES, ids=lambda value: getattr(value, "release", ""))
def test_it_tells_of_refusals_what_the_page_tells(dialect, spec):
    bench = Bench(dialect, replace(spec, max_batch=1, queue_limit=1))
    for second in (0, 1, 10, 60):
        bench.now_ns = T0 + second * NS
        assert bench.target.read() == bench.page()
    assert bench.target.server.finished[Finish.REJECTED] > 20


@pytest.mark.parametrize(("dialect", "spec"), SERVERS, ids=lambda value: getattr(value, "engine", ""))
def test_a_probe_and_a_smoke_request_find_a_server_that_works(dialect, spec):
    target = Bench(dialect, spec).target
    facts = converse(probe(), target.answer)
    assert (facts.engine, facts.model, facts.metrics_supported) == (spec.engine, spec.model, True)
    assert facts.context_tokens == spec.context_tokens
    assert converse(smoke(facts.model), target.answer).generated


def test_what_the_engine_does_not_know_is_refused_in_its_words():
    target = Bench(*SERVERS[0]).target
    assert target.answer(HttpRequest("/nothing/here")).status == 404


def test_a_server_that_is_down_refuses():
    bench = Bench(*SERVERS[0], "crash=20s,start=10s")
    bench.now_ns = T0 + 15 * NS
    told = bench.target.read()
    assert isinstance(told, ScrapeFailure)
    assert told.reason == "refused"
    bench.now_ns = T0 + 31 * NS
    again = bench.target.read()
    assert isinstance(again, Reading)
    assert again.values["engine_start_timestamp_seconds"] == (T0 + 30 * NS) / NS


def test_renamed_metrics_are_missed_and_slow_ones_time_out():
    bench = Bench(*SERVERS[0], "renamed_metrics,start=10s,end=20s", "slow_metrics=60s,start=30s")
    bench.now_ns = T0 + 5 * NS
    before = bench.target.read()
    bench.now_ns = T0 + 15 * NS
    renamed = bench.target.read()
    assert isinstance(before, Reading)
    assert isinstance(renamed, Reading)
    assert before.values.keys() - renamed.values.keys()
    bench.now_ns = T0 + 25 * NS
    assert bench.target.read() == bench.page()
    bench.now_ns = T0 + 35 * NS
    slow = bench.target.read()
    assert isinstance(slow, ScrapeFailure)
    assert (slow.reason, slow.seconds) == ("timeout", 10.0)
