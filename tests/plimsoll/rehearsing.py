"""A watch rehearsed beside a simulated server with customers, for tests; times are hours since the beginning."""

import asyncio
import statistics
from dataclasses import dataclass
from typing import Any

from alerts.rules import RULES, Rule, make_rule
from monitor.history import SqliteHistory
from monitor.http import parse_url
from plimsoll.rehearsal import LeapingClock, Rehearsal
from plimsoll.watch import WatchConfig, WatchTarget
from serving.clock import NS
from serving.signals import SIGNALS, Kind, Series, continuous, increase
from serving.simulator.dialects.vllm import VLLM_DIALECT
from serving.simulator.faults import FaultPlan, parse_fault
from serving.simulator.fluid import FluidServer
from serving.simulator.inprocess import InProcessTarget
from serving.simulator.launch import launch
from serving.simulator.server import SimulatedServer
from serving.simulator.spec import Finish, ServerSpec
from serving.simulator.traffic import Traffic

HOUR_NS = 3600 * NS
MIB = 2**20
MONDAY_NS = 1_699_833_600 * NS
"""00:00 UTC."""
SPEC = launch("vllm", model="llama-3.1-8b", card="l40s", max_batch=32, context_tokens=8192)
FLAT = Traffic(2.0, prompt_tokens=300, output_tokens=100, disconnect_share=0.05)
"""As many requests at night as by day: four running on average."""
CUSTOMERS = Traffic(
    2.0,
    prompt_tokens=300,
    output_tokens=100,
    disconnect_share=0.05,
    diurnal_ratio=0.5,
    weekend_ratio=0.5,
    bursts_per_day=3,
)


class RefusingServer(SimulatedServer):
    """In token mode, with customers who are refused as the fault plan has it."""

    def take(self, arrival):
        fault = self.plan.answer_fault(arrival.id, (arrival.t_ns - self.origin_ns) / NS)
        if fault is None or not fault.name.startswith("http_"):
            return super().take(arrival)
        self.elapse(arrival.t_ns)
        self.http["/v1/completions", int(fault.name.removeprefix("http_"))] += 1
        return Finish.REJECTED


@dataclass(frozen=True)
class Scenario:
    """What is rehearsed. Faults count their times from the beginning, which is `begins_h` after a Monday's midnight."""

    hours: float
    faults: tuple[str, ...] = ()
    traffic: Traffic = CUSTOMERS
    spec: ServerSpec = SPEC
    mode: type[FluidServer] | type[SimulatedServer] = FluidServer
    seed: int = 1
    begins_h: float = 0.0
    interval_s: float = 15.0
    evaluate_every_s: float = 300.0
    rules: tuple[Rule, ...] = tuple(make_rule(name, {}) for name in RULES)


class Rehearsed:
    """A scenario's server and the watch beside it, which writes `path`."""

    def __init__(self, scenario: Scenario, path: Any, **options: Any) -> None:
        self.begin_ns = MONDAY_NS + round(scenario.begins_h * HOUR_NS)
        self.hours = scenario.hours
        plan = FaultPlan([parse_fault(text) for text in scenario.faults], seed=scenario.seed)
        if scenario.mode is FluidServer:
            options["seed"] = scenario.seed
        self.server = scenario.mode(
            scenario.spec,
            t_ns=self.begin_ns,
            edges=VLLM_DIALECT.edges,
            plan=plan,
            traffic=scenario.traffic,
            **options,
        )
        self.clock = LeapingClock(self.begin_ns)
        self.target = InProcessTarget(self.server, VLLM_DIALECT, self.clock.now_ns)
        self.config = WatchConfig(
            WatchTarget(parse_url("http://127.0.0.1:8000"), "sim", interval_s=scenario.interval_s),
            path,
            evaluate_every_s=scenario.evaluate_every_s,
            rules=scenario.rules,
        )
        self.history = SqliteHistory.create(path)
        self.rehearsal = Rehearsal(self.config, self.history, self.clock, self.target)

    def run(self, until_h: float | None = None) -> "Rehearsed":
        """Up to then, or to the scenario's end."""
        until_h = self.hours if until_h is None else until_h
        asyncio.run(self.rehearsal.run(self.at_ns(until_h)))
        return self

    def start_watch_again(self, at_h: float) -> None:
        """The watch has ended; another takes its place at that hour, as from the same file."""
        path = self.history.path
        self.history.close()
        self.clock.advance((self.at_ns(at_h) - self.clock.now_ns()) / NS)
        self.history = SqliteHistory.open(path, readonly=False)
        self.rehearsal = Rehearsal(self.config, self.history, self.clock, self.target)

    def at_ns(self, hour: float) -> int:
        return self.begin_ns + round(hour * HOUR_NS)

    def hour(self, t_ns: float) -> float:
        return (t_ns - self.begin_ns) / HOUR_NS

    # ---- what was recorded

    def read(self, signal: str, since_h: float = 0.0, until_h: float = 1e6, **labels: str) -> Series:
        """The only series of a signal with these labels; empty where there is none."""
        found = self.history.series(signal, self.at_ns(since_h), self.at_ns(until_h), target="sim", labels=labels)
        assert len(found) <= 1
        return found[0] if found else Series(signal, (), ())

    def points(self, signal: str, since_h: float = 0.0, until_h: float = 1e6) -> tuple[list[float], list[float]]:
        """Hours and values; counters are read through resets."""
        series = self.read(signal, since_h, until_h)
        if signal.endswith(("_sum", "_count")) or SIGNALS[signal].kind is Kind.COUNTER:
            series = continuous(series)
        return [self.hour(t_ns) for t_ns in series.t_ns], list(series.values)

    def slope(
        self,
        signal: str,
        since_h: float = 0.0,
        until_h: float = 1e6,
        *,
        per: str | None = None,
        beside: str | None = None,
    ) -> float:
        """Least squares of a signal against hours or against another signal, with a third held the same."""
        hours, values = self.points(signal, since_h, until_h)
        base = hours if per is None else self.points(per, since_h, until_h)[1]
        if beside is not None:
            # Frisch and Waugh: what the third signal explains is taken out of both.
            load = self.points(beside, since_h, until_h)[1]
            base, values = _without(load, base), _without(load, values)
        return statistics.linear_regression(base, values).slope

    def mean(self, histogram: str, since_h: float, until_h: float) -> float:
        """Mean of what a histogram counted in that time."""
        total, count = (increase(self.read(f"{histogram}_{part}", since_h, until_h)) for part in ("sum", "count"))
        return total / count

    # ---- what was said

    def fired(self, rule: str | None = None) -> list[float]:
        """Hours at which alerts began to fire, of one rule or of all."""
        return [self.hour(one.t_ns) for one in self.rehearsal.fired(rule)]

    def firing(self, rule: str, since_h: float = 0.0, until_h: float | None = None) -> float:
        """For how many hours of that time the rule's alert was firing."""
        until_h = self.hours if until_h is None else until_h
        total, began = 0.0, None
        for one in self.rehearsal.said:
            if one.rule == rule and one.firing:
                began = self.hour(one.t_ns)
            elif one.rule == rule and began is not None:
                total += max(0.0, min(until_h, self.hour(one.t_ns)) - max(since_h, began))
                began = None
        return total + (0.0 if began is None else max(0.0, until_h - max(since_h, began)))

    def told_of(self, *signals: str) -> list[float]:
        """Hours at which alerts began to fire with a finding about one of these signals."""
        return [
            self.hour(one.t_ns)
            for one in self.rehearsal.fired()
            if any(finding.signal in signals for finding in one.findings)
        ]

    def events(self, kind: str) -> list[float]:
        """Hours of the events of a kind."""
        return [self.hour(event.t_ns) for event in self.rehearsal.events if event.kind == kind]


def _without(load: list[float], values: list[float]) -> list[float]:
    slope, floor = statistics.linear_regression(load, values)
    return [value - slope * at - floor for value, at in zip(values, load, strict=True)]
