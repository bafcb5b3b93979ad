"""How well do our time stamps agree with the moments at which a server really sent?

    python benchmarks/timestamp_accuracy.py [--streams 64] [--seconds 10] [--repeat 3]

Compiles `paced_server.c` (needs gcc), holds `--streams` streams of 50 tokens/s against it through the whole driver
(child process, Locust, client), finds each of our requests in the server's log by the hash of its body, and compares
every frame. Prints; asserts nothing: on a busy machine the figures are the machine's.
"""

import argparse
import asyncio
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from loadgen.driver_link import ClientHealth, DriverConfig, DriverLink
from loadgen.prompts import Calibration
from loadgen.workloads import WORKLOADS
from serving.clock import SystemClock
from serving.records import Outcome, RequestRecord

TTFT_MS, ITL_MS, TOKENS = 200, 20, 64
TARGET_MS = 2.0


def body_hash(body: bytes) -> str:
    """64-bit FNV-1a, as in paced_server.c."""
    value = 0xCBF29CE484222325
    for byte in body:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def quantile(ordered: list[float], p: float) -> float:
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def describe(name: str, values_ms: list[float]) -> str:
    ordered = sorted(values_ms)
    if not ordered:
        return f"{name:34} not known"
    figures = [f"{label} {quantile(ordered, p):8.3f}" for label, p in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))]
    return f"{name:34} {'  '.join(figures)}  ms  ({len(ordered)} values)"


async def drive(url: str, clock: SystemClock, streams: int, seconds: float):
    plain = WORKLOADS["interactive"].scaled(8192, prompt_tokens=100, output_tokens=TOKENS)
    workload = replace(plain, output_spread=0.0, prompt_spread=0.0)
    config = DriverConfig(url, "paced", "chat", workload, Calibration(8.0, 1.0), 1, clock.anchor_ns)
    records: list[RequestRecord] = []
    health: list[ClientHealth] = []
    link = await DriverLink.start(config, on_record=records.append, on_health=health.append)
    try:
        await link.stage("all", streams)
        await asyncio.sleep(seconds)
        await link.stop(5.0)
    finally:
        await link.close()
    return config, records, health


def read_truth(path: Path) -> dict[str, tuple[int, list[int]]]:
    truth = {}
    for line in path.read_text().splitlines():
        name, received, sent = line.split(",")
        truth[name] = int(received), [int(one) for one in sent.split("|")]
    return truth


def compare(config, records, truth, anchor_ns: int) -> tuple[list[float], list[float], list[float]]:
    """(frame errors, TTFT errors, frame-gap errors), ours minus the server's, milliseconds."""
    maker = config.maker()
    frames, firsts, gaps = [], [], []
    for record in records:
        if record.outcome is not Outcome.OK:
            continue
        received, sent = truth[body_hash(maker.make(record.request_id)[0])]
        t_ns = record.t_first_ns - anchor_ns
        firsts.append(((record.t_first_ns - record.t_send_ns) - (sent[0] - received)) / 1e6)
        frames.append((t_ns - sent[0]) / 1e6)
        for gap_us, (before, after) in zip(record.frame_gaps_us, pairwise(sent), strict=True):
            t_ns += gap_us * 1000
            frames.append((t_ns - after) / 1e6)
            gaps.append((gap_us * 1000 - (after - before)) / 1e6)
    return frames, firsts, gaps


def run_once(binary: Path, folder: Path, streams: int, seconds: float) -> None:
    log = folder / "truth.csv"
    command = [binary, "--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS), "--log", log]
    clock = SystemClock()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            config, records, health = asyncio.run(drive(url, clock, streams, seconds))
        finally:
            server.terminate()
    frames, firsts, gaps = compare(config, records, read_truth(log), clock.anchor_ns)
    send_lags = [(one.t_send_ns - one.t_plan_ns) / 1e6 for one in records if one.t_send_ns]
    arrival_lags = [one.arrival_lag_us / 1e3 for one in records if one.arrival_lag_us is not None]
    sources = Counter(one.arrival_source for one in records)
    outcomes = Counter(one.outcome.value for one in records)
    print(f"{len(records)} requests {dict(outcomes)}, stamps by {dict(sources)}")
    print(describe("frame stamp minus send time", [abs(one) for one in frames]))
    print(describe("TTFT minus the server's", [abs(one) for one in firsts]))
    print(describe("frame gap minus the server's", [abs(one) for one in gaps]))
    print(describe("own lateness (worst of a request)", arrival_lags))
    print(describe("send lag", send_lags))
    cpu = sorted(one.cpu_ratio for one in health)
    loops = [one.loop_lag_p99_seconds * 1e3 for one in health]
    print(f"driver's CPU {cpu[len(cpu) // 2]:.2f} of a core; loop lag p99 by second: worst {max(loops):.2f} ms")
    worst = quantile(sorted(abs(one) for one in frames), 0.99)
    print(f"target p99 <= {TARGET_MS} ms: {'met' if worst <= TARGET_MS else 'MISSED'} ({worst:.3f} ms)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        binary = folder / "paced_server"
        source = Path(__file__).with_name("paced_server.c")
        subprocess.run(["gcc", "-O2", "-o", binary, source], check=True)
        for _ in range(options.repeat):
            run_once(binary, folder, options.streams, options.seconds)


if __name__ == "__main__":
    main()
