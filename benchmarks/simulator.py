"""How much virtual time the simulated server gets through in a second of wall time, in token mode and in fluid mode,
and in fluid mode with the whole watch beside it: sampler, history on disk, and all rules every five minutes.

    python benchmarks/simulator.py [--minutes 10] [--days 3]

The figures depend on the machine and on how much the server has to do: token mode costs by the token, fluid mode by the
sample. Sampling is every 15 s, as a watch does it.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from monitor.history import SqliteHistory
from monitor.http import parse_url
from plimsoll.rehearsal import LeapingClock, Rehearsal
from plimsoll.watch import WatchConfig, WatchTarget
from serving.clock import NS
from serving.simulator.dialects.vllm import VLLM_DIALECT
from serving.simulator.fluid import FluidServer
from serving.simulator.inprocess import InProcessTarget
from serving.simulator.launch import launch
from serving.simulator.server import SimulatedServer
from serving.simulator.traffic import Traffic

START_NS = 1_790_000_000 * NS
SAMPLE_SECONDS = 15
SPEC = launch("vllm", model="hy3", card="h200", cards=8, max_batch=48)
LOADS = {
    "light": Traffic(0.5, diurnal_ratio=0.6, weekend_ratio=0.5),
    "usual": Traffic(3.0, diurnal_ratio=0.6, weekend_ratio=0.5, bursts_per_day=3, growth_ratio_per_week=0.02),
    "full": Traffic(60.0),
}


def run(server: SimulatedServer | FluidServer, seconds: int) -> tuple[float, float]:
    """(wall seconds, tokens generated) of that much virtual time."""
    began = time.perf_counter()
    tokens = 0.0
    for second in range(SAMPLE_SECONDS, seconds + 1, SAMPLE_SECONDS):
        server.run_until(START_NS + second * NS)
        seen = server.snapshot()
        tokens = seen.generated_tokens if seen is not None else tokens
    return time.perf_counter() - began, tokens


def watch(server: FluidServer, seconds: int) -> tuple[float, float]:
    """(wall seconds, tokens generated) of that much virtual time with a watch beside the server."""
    clock = LeapingClock(START_NS)
    target = InProcessTarget(server, VLLM_DIALECT, clock.now_ns)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "watch.db"
        told = WatchTarget(parse_url("http://127.0.0.1:8000"), "simulated", interval_s=SAMPLE_SECONDS)
        with SqliteHistory.create(path) as history:
            rehearsal = Rehearsal(WatchConfig(told, path, evaluate_every_s=300.0), history, clock, target)
            began = time.perf_counter()
            asyncio.run(rehearsal.run(START_NS + seconds * NS))
            return time.perf_counter() - began, server.generated_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="virtual time in token mode")
    parser.add_argument("--days", type=float, default=3, help="virtual time in fluid mode and of the watch")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    spec = replace(SPEC, queue_limit=200)
    print(f"{'mode':8}{'load':8}{'virtual s':>12}{'wall s':>10}{'ratio':>12}{'30 days take':>16}")
    for name, load in LOADS.items():
        traffic = replace(load, since_ns=START_NS)
        for mode in ("token", "fluid", "watch"):
            seconds = round(asked.minutes * 60 if mode == "token" else asked.days * 86_400)
            server = (SimulatedServer if mode == "token" else FluidServer)(
                spec, traffic=traffic, edges=VLLM_DIALECT.edges, t_ns=START_NS
            )
            wall, tokens = watch(server, seconds) if mode == "watch" else run(server, seconds)
            month = 30 * 86_400 * wall / seconds
            print(
                f"{mode:8}{name:8}{seconds:12d}{wall:10.2f}{seconds / wall:12.0f}{month:14.0f} s"
                f"   {wall / max(1.0, tokens) * 1e6:.3f} us a token, {wall / seconds * SAMPLE_SECONDS * 1e6:.0f} us a sample"
            )


if __name__ == "__main__":
    main()
