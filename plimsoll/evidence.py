"""Everything that a stress run has gathered, as it comes in; what is made of it is in `plimsoll.conclusion`."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from loadgen.driver_link import ClientHealth
from loadgen.load_line import StageSpec
from loadgen.observation import StageView, WindowLedger, growth_of, view_stage
from loadgen.prompts import Calibration
from loadgen.tally import StageTally, TokenBook
from loadgen.workloads import Workload
from monitor.http import BaseUrl
from monitor.sampler import Tick
from serving.clock import NS
from serving.engines import ENGINES, TargetFacts
from serving.records import GOOD, Outcome, RequestRecord
from serving.stream import Api

__all__ = ["Drain", "Ending", "Evidence", "Prepared", "StageRun"]

SEND_LAG_SHARE = 0.05
"""Send lag may reach this share of the TTFT limit (of one second without one) before it falsifies the measurement."""
SEND_LAG_ALLOWANCE = 3
"""So many late requests are an incident, however few there were in all; beyond that it is one in a hundred."""
CPU_LIMIT_RATIO = 0.9
SILENCE_LIMIT_SECONDS = 5.0
STILL_GAUGES_SECONDS = 3.0
GPU_FULL_RATIO = 0.98
"""A card with less than the rest of this free is full: engines that plan a card leave more."""
STANDSTILL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the preflight found out.

    `limit` is the batch limit to prove and `limit_source` where it was read; what the server itself says is in `facts`.
    `warnings` are what a person should know of the settings.
    """

    base: BaseUrl
    facts: TargetFacts
    api: Api
    calibration: Calibration
    workload: Workload
    limit: int | None
    limit_source: str
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class StageRun:
    """One stage while it runs and afterwards."""

    spec: StageSpec
    counted: bool
    t_start_ns: int
    tally: StageTally
    ended: WindowLedger
    t_settled_ns: int | None = None
    t_end_ns: int | None = None
    settled: bool = False
    complete: bool = False
    overfull: bool = False
    client_problem: str | None = None
    """Why the load generator could not be trusted in this stage."""
    view: StageView | None = None

    @property
    def window(self) -> tuple[int, int]:
        """The measured window."""
        return self.t_settled_ns or self.t_start_ns, self.t_end_ns or self.t_start_ns

    def holds(self, t_ns: int) -> bool:
        """Whether a moment lies in the measured window, which may still be open."""
        return self.t_settled_ns is not None and self.t_settled_ns <= t_ns and (self.t_end_ns or t_ns) >= t_ns


@dataclass(slots=True)
class Drain:
    """What the server looked like once the last request was answered."""

    running: float | None = None
    waiting: float | None = None
    kv_cache_usage_ratio: float | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Ending:
    """Why a run ended before its time, if it did."""

    interrupted: bool = False
    server_died: str | None = None
    out_of_memory: str | None = None
    """What shows that a server that died had no memory left."""
    driver_died: str | None = None
    record_error: str | None = None

    @property
    def early(self) -> bool:
        """Whether the run has to stop now."""
        return self.interrupted or any((self.server_died, self.driver_died, self.record_error))


@dataclass(slots=True)
class Evidence:
    """The run so far. Times are `t_ns`; `t_traffic_ns` is when the first request could have been sent."""

    prepared: Prepared
    seed: int
    ending: Ending = field(default_factory=Ending)
    drain: Drain = field(default_factory=Drain)
    stages: list[StageRun] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    health: list[ClientHealth] = field(default_factory=list)
    book: TokenBook = field(default_factory=TokenBook)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    send_lag: "array[float]" = field(default_factory=lambda: array("d"))
    arrival_lag: "array[float]" = field(default_factory=lambda: array("d"))
    arrival_sources: set[str] = field(default_factory=set)
    client_error: str | None = None
    client_tokens: int = 0
    without_usage: int = 0
    """Good answers without token counts: what was generated is not known."""
    without_text: int = 0
    too_long: int = 0
    """Answers with more tokens than were asked for."""
    wasted_tokens: int = 0
    e2e_max_seconds: float = 0.0
    t_traffic_ns: int = 0
    t_last_good_ns: int = 0
    t_last_end_ns: int = 0
    t_last_answer_ns: int = 0
    """When the last request that ended well did."""
    failed_ticks: int = 0
    refused_ticks: int = 0
    """Scrapes refused in a row until now."""

    def add_tick(self, tick: Tick) -> None:
        """Take in one sample."""
        self.ticks.append(tick)
        if tick.up:
            self.failed_ticks = self.refused_ticks = 0
            self.t_last_good_ns = max(self.t_last_good_ns, tick.t_ns)
            return
        self.failed_ticks += 1
        self.refused_ticks = self.refused_ticks + 1 if "refused" in (tick.failure or "") else 0

    def add_record(self, record: RequestRecord) -> None:
        """Take in one request that ended."""
        self.outcomes[record.outcome] += 1
        self.book.add(record)
        self.client_tokens += record.completion_tokens or 0
        self.without_usage += record.outcome in GOOD and record.completion_tokens is None
        self.without_text += record.outcome in GOOD and record.frames == 0
        self.too_long += (record.completion_tokens or 0) > record.planned_output_tokens
        self.t_last_end_ns = max(self.t_last_end_ns, record.t_end_ns)
        if record.outcome in GOOD:
            self.t_last_good_ns = max(self.t_last_good_ns, record.t_end_ns)
            self.t_last_answer_ns = max(self.t_last_answer_ns, record.t_end_ns)
            if record.t_send_ns is not None:
                self.e2e_max_seconds = max(self.e2e_max_seconds, (record.t_end_ns - record.t_send_ns) / NS)
        else:
            self.wasted_tokens += record.completion_tokens or record.frames
        if record.outcome is Outcome.CLIENT_ERROR and self.client_error is None:
            self.client_error = record.error
        for stage in reversed(self.stages):
            if stage.holds(record.t_end_ns):
                stage.ended.add(record)
                break
        stage_of_issue = next((stage for stage in reversed(self.stages) if stage.spec.name == record.stage), None)
        if stage_of_issue is None:
            return
        stage_of_issue.tally.add(record)
        if stage_of_issue.counted:
            if record.t_send_ns is not None:
                self.send_lag.append((record.t_send_ns - record.t_plan_ns) / NS)
            if record.arrival_lag_us is not None:
                self.arrival_lag.append(record.arrival_lag_us / 1e6)
                self.arrival_sources.add(record.arrival_source)

    def see(self, stage: StageRun) -> StageView:
        """Reduce one stage to what the search needs, and keep it."""
        stage.client_problem = stage.client_problem or self._client_problem_in(stage)
        ending, dialect = self.ending, ENGINES[self.prepared.facts.engine].dialect
        stage.view = view_stage(
            stage.spec.offered,
            self.ticks,
            stage.window,
            stage.tally,
            self.book,
            stage.ended,
            client_valid=stage.client_problem is None,
            server_died=ending.server_died is not None and stage is self.stages[-1],
            overfull=stage.overfull,
            died_of_memory=ending.out_of_memory is not None,
            reserved_output_ratio=dialect.reserved_output_ratio,
        )
        return stage.view

    def client_problem(self) -> str | None:
        """Why the load generator's figures cannot be trusted, or None. What was wrong in one stage stays wrong."""
        if self.outcomes[Outcome.CLIENT_ERROR]:
            return f"{self.outcomes[Outcome.CLIENT_ERROR]} requests could not be sent: {self.client_error}"
        for stage in self.stages:
            if stage.counted and stage.client_problem is not None:
                return f"at {stage.spec.offered} offered, {stage.client_problem}"
        return None

    def _client_problem_in(self, stage: StageRun) -> str | None:
        limit = max(0.001, SEND_LAG_SHARE * (self.prepared.workload.slo.ttft_seconds or 1.0))
        lags = stage.tally.send_lag
        late = sum(lag > limit for lag in lags)
        if late > max(SEND_LAG_ALLOWANCE, 0.01 * len(lags)):
            return f"{late} of {len(lags)} requests left more than {limit * 1000:.0f} ms late"
        t_from_ns, t_to_ns = stage.window
        heard = [health for health in self.health if t_from_ns <= health.t_ns <= t_to_ns]
        if not heard and (t_to_ns - t_from_ns) / NS > SILENCE_LIMIT_SECONDS:
            return "the load generator's process did not report"
        longest = max((health.loop_lag_max_seconds for health in heard), default=0.0)
        if longest > STANDSTILL_SECONDS:
            return f"the load generator stood still for {longest:.1f} s"
        busy = sorted(health.cpu_ratio for health in heard)
        if len(busy) >= 3 and busy[len(busy) // 2] > CPU_LIMIT_RATIO:
            return f"the load generator used {busy[len(busy) // 2]:.0%} of its core"
        delays = sorted(health.loop_lag_p99_seconds for health in heard)
        if len(delays) >= 3 and delays[len(delays) // 2] > limit:
            return f"the load generator's own loop was {delays[len(delays) // 2] * 1000:.0f} ms late"
        return None

    def other_traffic(self) -> str | None:
        """How it shows that somebody else was using the server, or None."""
        name = "requests_running"
        before = [t.values[name] for t in self.ticks if t.t_ns <= self.t_traffic_ns and name in t.values]
        if before and min(before) > 0:
            return f"{min(before):g} requests were running before the first of ours"
        for stage in self.stages:
            if stage.overfull:  # more than was offered ran, but it was ours: left from a larger stage
                continue
            most = stage.view.running.p50 if stage.view is not None else None
            if most is not None and most > stage.spec.offered:
                return f"{most:g} requests ran while {stage.spec.offered} were offered"
        return None

    def still_gauges_seconds(self) -> float | None:
        """For how long answers came in while the server's gauges already read what they read to the end; else None.

        A request that is left behind is there after all others have gone, and the gauges moved as those went.
        """
        names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        seen = [(tick.t_ns, tuple(map(tick.values.get, names))) for tick in self.ticks if tick.up]
        if not seen:
            return None
        moved_ns = [t_ns for t_ns, gauges in seen if gauges != seen[-1][1]]
        since_ns = next(t_ns for t_ns, _ in seen if not moved_ns or t_ns > moved_ns[-1])
        seconds = (self.t_last_answer_ns - since_ns) / NS
        return seconds if seconds >= STILL_GAUGES_SECONDS else None

    def client_cpu_ratio(self) -> float | None:
        """Median share of one core that the load generator used; the first report is its start-up."""
        ratios = sorted(health.cpu_ratio for health in self.health[1:])
        return ratios[len(ratios) // 2] if len(ratios) >= 3 else None

    def server_tokens(self) -> int | None:
        """Tokens that the server says it generated since just before the first request.

        None where it does not say, or did not any more once the last request had ended: an older figure would look like
        lost tokens.
        """
        name = "generation_tokens_total"
        told = [tick for tick in self.ticks if tick.up and name in tick.values]
        before = [tick for tick in told if tick.t_ns <= self.t_traffic_ns][-1:]
        during = [tick for tick in told if tick.t_ns > self.t_traffic_ns]
        if not told or told[-1].t_ns < self.t_last_end_ns:
            return None
        grown = growth_of(name, (*before, *during))
        return None if grown is None else round(grown)

    def idle_kv_ratio(self) -> float | None:
        """KV-cache usage before the first request."""
        name = "kv_cache_usage_ratio"
        values = [t.values[name] for t in self.ticks if t.t_ns <= self.t_traffic_ns and name in t.values]
        return min(values, default=None)

    def full_gpu(self) -> str | None:
        """A GPU that had no memory left when the server was last seen alive, in words, or None."""
        seen = next((tick.gpus for tick in reversed(self.ticks) if tick.up and tick.gpus), {})
        for name, gpu in sorted(seen.items()):
            used, total = gpu.get("gpu_memory_used_bytes"), gpu.get("gpu_memory_total_bytes")
            if used is not None and total and used >= GPU_FULL_RATIO * total:
                return f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB of {name} were in use just before"
        return None

    def swap_growth_bytes(self) -> float | None:
        """How far swap rose above its first reading: the server's where its processes are known, else the host's."""
        of_server = [
            (frozenset(tick.processes), sum(p.get("process_swap_bytes", 0.0) for p in tick.processes.values()))
            for tick in self.ticks
            if any("process_swap_bytes" in p for p in tick.processes.values())
        ]
        if 2 * len(of_server) >= len(self.ticks) and of_server:
            # Only ticks that saw the same processes compare: one that appears brings swap of its own.
            usual = Counter(roles for roles, _ in of_server).most_common(1)[0][0]
            values = [swap for roles, swap in of_server if roles == usual]
        else:
            name = "host_swap_used_bytes"
            values = [tick.values[name] for tick in self.ticks if name in tick.values]
        return max(values) - values[0] if values else None
