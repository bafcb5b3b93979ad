"""Fluid mode against token mode: one hour from an idle start, at points that differ in what binds.

Token mode draws each request, so its hour has an error of its own; fluid mode is cheap and takes the mean of a few
seeds. Points have many short requests, and seeds are those of an hour that brought within 1 % of the requests and tokens
that its rate says: a batch near saturation makes three times as much of every deviation.
"""

from dataclasses import replace

import pytest

from serving.clock import NS
from serving.simulator.fluid import FluidServer
from serving.simulator.launch import launch
from serving.simulator.roofline import Affine
from serving.simulator.server import SimulatedServer
from serving.simulator.spec import Finish, MemoryPlan, Policy, ServerSpec
from serving.simulator.traffic import Traffic

START_NS = 1_790_000_000 * NS
START_HOUR = START_NS / NS % 86_400 / 3600
SECONDS = 3600
EVERY = 5
FLUID_SEEDS = range(4)

GIB = 2**30
SMALL = ServerSpec(
    "vllm",
    "0.10.0",
    "small",
    max_batch=48,
    context_tokens=8192,
    token_budget=2048,
    block_tokens=16,
    kv_blocks=8000,
    cost=Affine(
        0.040,
        prefill_token_seconds=160e-6,
        prefill_context_seconds=2e-8,
        decode_sequence_seconds=800e-6,
        decode_context_seconds=2e-8,
    ),
    memory=MemoryPlan(
        weights_bytes=14 * GIB,
        kv_cache_bytes=20 * GIB,
        workspace_bytes=2 * GIB,
        activation_bytes_per_token=200_000,
        gpu_bytes_per_request=64 * 2**20,
        host_bytes_per_request=64 * 2**20,
    ),
)
FAST_PREFILL = Affine(
    0.020,
    prefill_token_seconds=20e-6,
    prefill_context_seconds=1e-9,
    decode_sequence_seconds=400e-6,
    decode_context_seconds=1e-8,
)
SHORT = Traffic(1.0, prompt_tokens=200, output_tokens=60, prompt_spread=0.5, output_spread=0.5, seed=1)
SGLANG = Policy(prefill_first=True, reserved_output_ratio=0.7)
HY3 = launch("vllm", model="hy3", card="h200", cards=8, max_batch=48)

POINTS = {
    "light": (SMALL, replace(SHORT, per_second=1.0)),
    "half": (SMALL, replace(SHORT, per_second=4.0)),
    "near saturation": (SMALL, replace(SHORT, per_second=6.25)),
    "overload": (replace(SMALL, queue_limit=80), replace(SHORT, per_second=10.0)),
    "long prompts": (
        replace(SMALL, context_tokens=32_768, kv_blocks=40_000, cost=FAST_PREFILL),
        replace(SHORT, per_second=1.5, prompt_tokens=9000, prompt_spread=0.3),
    ),
    "kv cache binds": (
        replace(SMALL, kv_blocks=600, queue_limit=50),
        replace(SHORT, per_second=7.0, output_tokens=150),
    ),
    "token budget binds": (
        replace(SMALL, queue_limit=60),
        replace(SHORT, per_second=4.5, prompt_tokens=1500, output_tokens=20, prompt_spread=0.3),
    ),
    "common prefix": (
        SMALL,
        replace(SHORT, per_second=3.5, prompt_tokens=700, shared_prefix_share=0.8, shared_prefix_tokens=512),
    ),
    "morning ramp with disconnects": (
        SMALL,
        replace(
            SHORT, per_second=3.5, seed=11, diurnal_ratio=0.9, peak_hour=(START_HOUR + 7) % 24, disconnect_share=0.1
        ),
    ),
    "prompts first, kv cache binds": (
        replace(SMALL, policy=SGLANG, kv_blocks=500, queue_limit=50),
        replace(SHORT, per_second=7.0),
    ),
    "Hy3 on 8 x H200": (HY3, replace(SHORT, per_second=3.5, seed=3, prompt_tokens=1000, output_tokens=150)),
}


def hour(server):
    """Means of an hour, seen as a monitor sees it."""
    running, waiting, blocks, gpu, host = [], [], [], [], []
    for second in range(EVERY, SECONDS + 1, EVERY):
        server.run_until(START_NS + second * NS)
        seen = server.snapshot()
        running.append(seen.running)
        waiting.append(seen.waiting)
        blocks.append(seen.kv_blocks_used)
        gpu.append(seen.gpus[0].memory_used_bytes)
        host.append(seen.process.anonymous_memory_bytes)
    count = len(running)
    memory = server.spec.memory
    fixed = memory.weights_bytes + memory.kv_cache_bytes + memory.workspace_bytes
    return {
        "output tokens": seen.generated_tokens,
        "prompt tokens": seen.prompt_tokens,
        "requests": seen.finished[Finish.STOP] + seen.finished.get(Finish.CANCELLED, 0),
        "running": sum(running) / count,
        "waiting": sum(waiting) / count,
        "kv blocks": sum(blocks) / count,
        "gpu bytes": sum(gpu) / count,
        "gpu bytes in use": sum(gpu) / count - fixed,
        "host bytes": sum(host) / count,
        "host bytes in use": sum(host) / count - memory.host_base_bytes,
        "cached tokens": seen.cached_tokens,
        "preemptions": seen.preemptions,
        "rejected": seen.finished.get(Finish.REJECTED, 0),
        "steps": seen.steps,
        "busy seconds": seen.decode_seconds,
        "prefill seconds": seen.prefill_seconds,
        "spread": (sum(x * x for x in running) / count - (sum(running) / count) ** 2) ** 0.5,
        **{signal: histogram.sum / histogram.count for signal, histogram in seen.histograms.items() if histogram.count},
    }


SIGNALS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_duration_seconds",
    "request_queue_seconds",
)
EDGES = dict.fromkeys(SIGNALS, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0))


@pytest.mark.parametrize("name", POINTS)
def test_an_hour_is_the_same_in_both_modes(name):
    spec, traffic = POINTS[name]
    token = hour(SimulatedServer(spec, traffic=traffic, edges=EDGES, t_ns=START_NS))
    fluids = [hour(FluidServer(spec, traffic=traffic, edges=EDGES, t_ns=START_NS, seed=seed)) for seed in FLUID_SEEDS]
    fluid = {figure: sum(one[figure] for one in fluids) / len(fluids) for figure in token}
    told = "\n".join(f"{figure:30s}{token[figure]:16.3f}{fluid[figure]:16.3f}" for figure in token)
    for figure in (
        "output tokens",
        "prompt tokens",
        "requests",
        "running",
        "kv blocks",
        "gpu bytes",
        "host bytes",
        "host bytes in use",
        "steps",
        "busy seconds",
        "inter_token_latency_seconds",
        "request_duration_seconds",
    ):
        assert fluid[figure] == pytest.approx(token[figure], rel=0.05), f"{figure}\n{told}"
    for figure in ("rejected", "cached tokens", "prefill seconds"):
        assert fluid[figure] == pytest.approx(token[figure], rel=0.1, abs=5), f"{figure}\n{told}"
    # The largest step of the hour is in it: one draw of an extreme.
    assert fluid["gpu bytes in use"] == pytest.approx(token["gpu bytes in use"], rel=0.25), told
    # Series are as restless as real ones, where the batch is not held at its limit.
    assert fluid["spread"] == pytest.approx(token["spread"], rel=0.2, abs=0.1), told
    assert fluid["time_to_first_token_seconds"] == pytest.approx(token["time_to_first_token_seconds"], rel=0.15), told
    assert fluid["waiting"] == pytest.approx(token["waiting"], rel=0.1, abs=0.3), told
    assert fluid["preemptions"] == pytest.approx(token["preemptions"], rel=0.25), told
