"""How much virtual time the simulated server gets through in a second of wall time, in token mode and in fluid mode.

    python benchmarks/simulator.py [--minutes 10] [--days 3]

The figures depend on the machine and on how much the server has to do: token mode costs by the token, fluid mode by the
sample. Sampling is every 15 s, as a watch does it.
"""

import argparse
import time
from dataclasses import replace

from serving.clock import NS
from serving.simulator.dialects.vllm import VLLM_DIALECT
from serving.simulator.fluid import FluidServer
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="virtual time in token mode")
    parser.add_argument("--days", type=float, default=3, help="virtual time in fluid mode")
    asked = parser.parse_args()
    spec = replace(SPEC, queue_limit=200)
    print(f"{'mode':8}{'load':8}{'virtual s':>12}{'wall s':>10}{'ratio':>12}{'30 days take':>16}")
    for name, load in LOADS.items():
        traffic = replace(load, since_ns=START_NS)
        for mode, seconds in (("token", round(asked.minutes * 60)), ("fluid", round(asked.days * 86_400))):
            server = (SimulatedServer if mode == "token" else FluidServer)(
                spec, traffic=traffic, edges=VLLM_DIALECT.edges, t_ns=START_NS
            )
            wall, tokens = run(server, seconds)
            month = 30 * 86_400 * wall / seconds
            print(
                f"{mode:8}{name:8}{seconds:12d}{wall:10.2f}{seconds / wall:12.0f}{month:14.0f} s"
                f"   {wall / max(1.0, tokens) * 1e6:.3f} us a token, {wall / seconds * SAMPLE_SECONDS * 1e6:.0f} us a sample"
            )


if __name__ == "__main__":
    main()
