"""What does not depend on how requests are served is the same in both modes, and held in both."""

from dataclasses import replace

import pytest

from serving.clock import NS
from serving.simulator.dialects.base import Trouble
from serving.simulator.faults import FaultPlan, parse_fault
from serving.simulator.fluid import FluidServer
from serving.simulator.server import SimulatedServer
from serving.simulator.spec import MemoryPlan, ServerSpec, Work
from serving.simulator.traffic import Traffic

T0 = 1_700_000_000 * NS
MIB = 2**20


class Linear:
    def seconds(self, work: Work) -> float:
        return 0.01 + 1e-4 * work.prefill_tokens + 1e-3 * work.decode_sequences


SPEC = ServerSpec(
    engine="vllm",
    release="0.32.0",
    model="m",
    max_batch=8,
    context_tokens=2048,
    token_budget=512,
    block_tokens=16,
    kv_blocks=1000,
    cost=Linear(),
    memory=MemoryPlan(cards=1, card_total_bytes=1000 * MIB, weights_bytes=500 * MIB, kv_cache_bytes=200 * MIB),
)
CUSTOMERS = Traffic(per_second=1.0, prompt_tokens=100, output_tokens=40, context_tokens=2048)


@pytest.fixture(params=[SimulatedServer, FluidServer], ids=["token", "fluid"])
def serve(request):
    def start(*faults, spec=SPEC, traffic=CUSTOMERS, seconds=0.0, **options):
        plan = FaultPlan([parse_fault(fault) for fault in faults])
        server = request.param(spec, t_ns=T0, plan=plan, traffic=traffic, **options)
        server.run_until(T0 + round(seconds * NS))
        return server

    return start


def test_a_crash_is_over_after_its_time_and_the_next_start_counts_from_zero(serve):
    server = serve("crash=5s,start=20s", seconds=24)
    assert (server.alive, server.snapshot()) == (False, None)
    server.run_until(T0 + 26 * NS)
    assert (server.alive, server.start_number, server.started_ns) == (True, 2, T0 + 25 * NS)
    assert server.generated_tokens < 200


def test_what_is_down_already_stays_down_for_the_longer_of_both(serve):
    server = serve("crash=30s,start=10s", "deploy=2s,start=20s,memory=64MiB", seconds=39)
    assert not server.alive
    server.run_until(T0 + 41 * NS)
    assert server.started_ns == T0 + 40 * NS
    assert server.memory.release_bytes == 64 * MIB


def test_a_clamp_keeps_in_mind_what_was_asked_for(serve):
    server = serve("clamp_max_batch=3", spec=replace(SPEC, asked_max_batch=16), seconds=1)
    assert (server.spec.max_batch, server.spec.asked_max_batch) == (3, 16)


def test_an_idle_server_dies_at_the_moment_at_which_a_leak_has_filled_the_card(serve):
    # 300 MiB are free, and 1 MiB is lost each second.
    server = serve("gpu_leak_per_hour=3600MiB", traffic=None, seconds=299.9)
    assert server.died is None
    server.run_until(T0 + 301 * NS)
    assert server.died is Trouble.OUT_OF_MEMORY
    server.run_until(T0 + 7200 * NS)
    assert server.snapshot() is None


def test_an_idle_server_that_asks_for_nothing_lives_below_any_limit(serve):
    server = serve("oom_at_bytes=1MiB", traffic=None, seconds=3600)
    assert server.died is None
    assert server.snapshot().gpus[0].memory_used_bytes == 700 * MIB


def test_the_first_request_kills_a_server_that_has_no_memory_for_it(serve):
    assert serve("oom_at_bytes=1MiB", seconds=60).died is Trouble.OUT_OF_MEMORY


def test_shared_memory_outlives_the_server_and_what_else_leaked_does_not(serve):
    faults = ("shm_leak_per_hour=3600MiB,end=50s", "host_leak_per_hour=3600MiB,end=50s", "crash=0,start=60s")
    server = serve(*faults, traffic=None, seconds=100)
    process = server.snapshot().process
    assert process.shared_memory_bytes == pytest.approx(50 * MIB)
    assert process.anonymous_memory_bytes == SPEC.memory.host_base_bytes


def test_a_cold_start_takes_its_time(serve):
    server = serve(spec=replace(SPEC, start_seconds=30), cold=True, seconds=29)
    assert (server.alive, server.ready) == (True, False)
    server.run_until(T0 + 31 * NS)
    assert server.ready


def test_a_server_that_is_down_for_good_comes_back_when_it_is_started_again(serve):
    server = serve("gpu_leak_per_hour=3600MiB,end=310s", traffic=None, seconds=320)
    assert server.died is Trouble.OUT_OF_MEMORY
    server.come_back(20)
    server.run_until(T0 + 339 * NS)
    assert not server.alive
    server.run_until(T0 + 341 * NS)
    assert (server.alive, server.start_number, server.died) == (True, 2, None)
