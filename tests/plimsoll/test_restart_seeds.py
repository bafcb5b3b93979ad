"""Restarts of simulated servers in virtual time, 20 seeds of each kind: a planted decay is found, and nothing where
there is none. The measurement is that of the command: the same prompts, closed loop, at a stated concurrency.
"""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from alerts.restart_benefit import RestartBenefit, RestartVerdict, Sitting, judge_restarts
from plimsoll.restart_experiment import RestartRun, run_restarts
from serving.clock import NS
from serving.simulator.faults import Fault, FaultPlan, parse_fault
from serving.simulator.launch import launch
from serving.simulator.server import SimulatedServer
from serving.simulator.spec import Arrival
from serving.simulator.traffic import Traffic

T0 = 1_700_000_000 * NS
HOUR = 3600.0
MIB = 2**20
SPEC = launch("vllm", model="llama-3.1-8b", card="l40s", max_batch=32, context_tokens=8192)
CONCURRENCY = 4
PROMPTS = tuple((200 + 40 * number, 24 + number % 3) for number in range(12))
"""Prompt and output tokens."""
CLAIMED = {RestartVerdict.CONFIRMED, RestartVerdict.LIKELY, RestartVerdict.PARTIAL, RestartVerdict.HARMFUL}
CURE = {RestartVerdict.CONFIRMED, RestartVerdict.LIKELY}


@dataclass
class Weather:
    """How a host differs from one moment to the next: factors on the length of steps, of 1 or more.

    Attributes:
        prompt_noise: of one wave of prompts, standard deviation of a logarithm.
        slow: of noise whose correlation falls by e in 16 hours.
        rng: draws them.
    """

    prompt_noise: float = 0.01
    slow: float = 0.0
    rng: random.Random = field(default_factory=random.Random)
    level: float = 0.0
    looked_h: float = -1000.0

    def factor(self, t_h: float) -> float:
        keeps = math.exp(-(t_h - self.looked_h) / 16)
        self.level = keeps * self.level + self.rng.gauss(0, self.slow * math.sqrt(1 - keeps * keeps))
        self.looked_h = t_h
        return max(1.0, 1.5 * math.exp(self.level + self.rng.gauss(0, self.prompt_noise)))


class SimulatedHost:
    """A simulated server that can be measured, restarted and left to age, as `Restartable`.

    Args:
        faults: what is wrong with it.
        seed: of the spawn lottery, of who is hit, and of the weather.
        age_h: how old starts are when they are measured again.
        customers: who use it while it ages, and whether they stay while it is measured.
    """

    def __init__(
        self,
        *faults: str,
        seed: int = 0,
        age_h: float = 4.0,
        weather: Weather | None = None,
        customers: Traffic | None = None,
        stay: bool = False,
    ) -> None:
        self.plan = FaultPlan([parse_fault(fault) for fault in faults], seed=seed)
        self.server = SimulatedServer(SPEC, t_ns=T0, plan=self.plan)
        self.rng = random.Random(f"host/{seed}")
        self.weather = weather or Weather()
        self.weather.rng = random.Random(f"weather/{seed}")
        self.age_h = age_h
        self.customers, self.stay = customers, stay
        self.peak = 0
        self.last_id = 0
        self.shm_per_restart = 0.0

    async def measure(self) -> Sitting:
        self.serve(PROMPTS[:CONCURRENCY], [])  # warm-up
        running: list[int] = []
        figures: dict[str, dict[str, float]] = {"decode_seconds_per_token@4": {}, "ttft_seconds@4": {}}
        for wave in range(0, len(PROMPTS), CONCURRENCY):
            for number, (ttft, tpot) in self.serve(PROMPTS[wave : wave + CONCURRENCY], running).items():
                figures["ttft_seconds@4"][f"p{wave + number}"] = ttft
                figures["decode_seconds_per_token@4"][f"p{wave + number}"] = tpot
        snapshot = self.server.snapshot()
        assert snapshot is not None
        figures["gpu_memory_bytes"] = {"": float(snapshot.gpus[0].memory_used_bytes)}
        figures["process_memory_bytes"] = {"": float(snapshot.process.anonymous_memory_bytes)}
        figures["shared_memory_bytes"] = {"": float(snapshot.process.shared_memory_bytes)}
        self.peak = max(self.peak, *running)
        age_s = (self.server.t_ns - self.server.started_ns) / NS
        return Sitting(figures, age_s, running=sum(running) / len(running), peak_running=self.peak)

    def serve(self, prompts, running: list[int]) -> dict[int, tuple[float, float]]:
        """Ask these at once and wait for all: number -> (TTFT, seconds per token)."""
        server = self.server
        t_ns = server.t_ns
        fault = self.plan.add(Fault("step_slowdown", self.weather.factor((t_ns - T0) / NS / HOUR)))
        ids = {}
        for number, (prompt_tokens, output_tokens) in enumerate(prompts):
            self.last_id += 1
            ids[self.last_id] = number
            assert server.arrive(Arrival(self.last_id, t_ns, prompt_tokens, output_tokens)) is None
        emitted: dict[int, list[int]] = {name: [] for name in ids}
        others = iter(())
        if self.stay and self.customers is not None:
            others = self.customers.arrivals(t_ns, t_ns + 60 * NS, SPEC.block_tokens)
        coming = next(others, None)
        while ids.keys() & server.flights.keys():
            while coming is not None and coming.t_ns <= server.t_ns:
                server.arrive(coming)
                coming = next(others, None)
            step = server.step(server.t_ns + 60 * NS)
            assert step is not None
            running.append(step.running)
            for name in step.emitted:
                if name in emitted:
                    emitted[name].append(step.t_end_ns)
        self.plan.remove(fault)
        return {
            number: (
                (emitted[name][0] - t_ns) / NS,
                (emitted[name][-1] - emitted[name][0]) / NS / (len(emitted[name]) - 1),
            )
            for name, number in ids.items()
        }

    async def restart(self) -> float:
        self.server.go_down(90.0)
        self.server.elapse(self.server.t_ns + 120 * NS)
        self.server.shared_bytes += self.shm_per_restart
        self.peak = 0
        return 90.0

    async def age(self) -> None:
        """Wait, by a time that differs a little so that nothing periodic keeps step."""
        server = self.server
        until_ns = server.t_ns + round(self.age_h * self.rng.uniform(0.85, 1.15) * HOUR * NS)
        if self.customers is not None:
            # The last seconds of them before a restart are as good as hours.
            server.elapse(until_ns - 8 * NS)
            for arrival in self.customers.arrivals(until_ns - 8 * NS, until_ns, SPEC.block_tokens):
                while server.step(arrival.t_ns) is not None:
                    self.peak = max(self.peak, len(server.state.running))
                server.arrive(arrival)
            if not self.stay:
                while server.flights:
                    server.step(server.t_ns + 60 * NS)
        server.elapse(max(server.t_ns, until_ns))


def judge(host: SimulatedHost, restarts: int = 5) -> RestartBenefit:
    run = RestartRun()

    async def whole() -> None:
        await host.age()
        await run_restarts(host, restarts, run)

    asyncio.run(whole())
    return judge_restarts(run.cycles, closing=run.closing)


LOTTERY = "crash=0s,start=100000h,spawn_lottery=10%"
NEIGHBOUR = "noisy_neighbour=1.3,period=5h,duty=30%"
PEAK = Traffic(per_second=6.0, prompt_tokens=300, output_tokens=100, context_tokens=8192)

NOTHING: dict[str, Callable[[int], SimulatedHost]] = {
    "nothing is wrong": lambda seed: SimulatedHost(seed=seed),
    "spawn lottery of 10 %": lambda seed: SimulatedHost(LOTTERY, seed=seed),
    "spawn lottery of 30 %": lambda seed: SimulatedHost(LOTTERY.replace("10%", "30%"), seed=seed),
    "lottery and heavy noise": lambda seed: SimulatedHost(LOTTERY, seed=seed, weather=Weather(0.15)),
    "lottery and slow noise": lambda seed: SimulatedHost(LOTTERY, seed=seed, weather=Weather(0.02, 0.06)),
    "noisy neighbour": lambda seed: SimulatedHost(LOTTERY, NEIGHBOUR, seed=seed),
    "a decay that survives restarts": lambda seed: SimulatedHost(
        "decode_slows_per_hour=5%,survives_restart", seed=seed
    ),
    "restarted after load peaks": lambda seed: SimulatedHost(LOTTERY, seed=seed, customers=PEAK),
    "after load peaks that an allocator remembers": lambda seed: SimulatedHost(
        LOTTERY, "high_water", seed=seed, customers=PEAK
    ),
    "restarted in the middle of load": lambda seed: SimulatedHost(LOTTERY, seed=seed, customers=PEAK, stay=True),
}

HEALTHY = ("nothing is wrong", "spawn lottery of 10 %", "spawn lottery of 30 %", "restarted after load peaks")
"""Of these, where the noise is small, it is said that restarts change nothing."""

DECAY: dict[str, Callable[[int], SimulatedHost]] = {
    "5 % an hour": lambda seed: SimulatedHost("decode_slows_per_hour=5%", seed=seed),
    "5 % an hour, lottery of 10 %": lambda seed: SimulatedHost("decode_slows_per_hour=5%", LOTTERY, seed=seed),
    "3 % an hour": lambda seed: SimulatedHost("decode_slows_per_hour=3%", seed=seed),
    "5 % an hour, lottery, slow noise": lambda seed: SimulatedHost(
        "decode_slows_per_hour=5%", LOTTERY, seed=seed, weather=Weather(0.03, 0.03)
    ),
    "a leak of 60 MiB an hour": lambda seed: SimulatedHost("host_leak_per_hour=60MiB", LOTTERY, seed=seed),
    "a leak on the card": lambda seed: SimulatedHost("gpu_leak_per_hour=50MiB", LOTTERY, seed=seed),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_nothing_is_claimed_in_20_of_20_where_there_is_nothing(kind):
    verdicts = {seed: judge(NOTHING[kind](seed)).verdict for seed in range(20)}
    assert not set(verdicts.values()) & CLAIMED, verdicts
    if kind in HEALTHY:
        assert set(verdicts.values()) == {RestartVerdict.NO_EFFECT}, verdicts


@pytest.mark.parametrize("kind", DECAY)
def test_a_decay_worth_finding_is_found_in_20_of_20(kind):
    verdicts = {seed: judge(DECAY[kind](seed)).verdict for seed in range(20)}
    assert set(verdicts.values()) <= CURE, verdicts


def test_what_restarts_leave_in_shared_memory_is_harm_in_20_of_20():
    verdicts = []
    for seed in range(20):
        host = SimulatedHost(LOTTERY, seed=seed)
        host.shm_per_restart = 200.0 * MIB
        result = judge(host)
        verdicts.append((result.verdict, result.metric))
    assert verdicts == [(RestartVerdict.HARMFUL, "shared_memory_bytes")] * 20


def test_the_size_and_the_schedule_are_those_that_were_planted():
    result = judge(DECAY["5 % an hour, lottery of 10 %"](3))
    one = result.metrics[0]
    assert one.metric == "decode_seconds_per_token@4"
    # 5 % of the first length with each hour, of which the first measurement already has some minutes.
    assert one.decline.low < 0.05 * one.age / HOUR < one.decline.high
    assert one.schedule.earliest < 2 * HOUR < one.schedule.latest
