"""`plimsoll stress`: push load up to the batch limit and past it, observe, name what binds, judge.

Preflight (probe, smoke request, prompt calibration) -> idle head -> warm-up, not counted -> the stages that
`loadgen.load_line` asks for -> stop, drain, idle tail -> verdict. The run is one SQLite file from its first second on,
so whatever ends it early (Ctrl-C, the server, the load generator) leaves a readable partial result.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from loadgen.driver_link import DriverConfig, DriverLink
from loadgen.load_line import MAX_CEILING, BoundBy, LoadLineSearch, StageSpec, did_hold
from loadgen.observation import WindowLedger
from loadgen.plan import PlanName, StagePacer, StagePhase, StagePolicy
from loadgen.prompts import calibrate
from loadgen.tally import StageTally
from loadgen.workloads import WORKLOADS, find_workload
from monitor.gpu import gpu_reader
from monitor.history import SqliteHistory
from monitor.http import API_KEY_VARIABLE, converse, open_session, parse_url
from monitor.process import ServerProcesses, process_exists
from monitor.sampler import Sampler, Tick, target_reader
from plimsoll.arguments import duration, whole
from plimsoll.conclusion import document, interrupted_document
from plimsoll.evidence import Drain, Evidence, Prepared, StageRun
from plimsoll.report import clean, render_stress
from serving.clock import NS, SystemClock
from serving.engines import ENGINES, Complaint, ScrapeFailure, TargetFacts, probe, scrape
from serving.errors import ConfigError, TargetError
from serving.records import Event, RequestRecord, Stage
from serving.settings import Settings, read_settings, stale_warning
from serving.smoke import smoke
from serving.startup import logged_limits

__all__ = ["EXAMPLES", "StressOptions", "add_arguments", "execute", "finish", "run"]

EXAMPLES = """examples:
  plimsoll stress http://127.0.0.1:8000 --workload interactive --max-batch 48
  plimsoll stress http://127.0.0.1:8000 --workload long-document --settings hy3-serving.yaml --duration 30m
  plimsoll stress http://127.0.0.1:8080 --workload offline-batch --stage-seconds 10 --json > result.json

An API key is read from PLIMSOLL_API_KEY and kept out of every file. Ctrl-C ends the run early with a partial result."""

_COUNT = whole(1, 10_000_000)
_DURATION = duration(0.001)
LOG_HEAD_BYTES = 64 * 2**20
LOG_TAIL_BYTES = 4 * 2**20
GAUGE_TRIES = 3
DRIVER_LIMIT_SECONDS = 20.0
REFUSED_TICKS = 3
"""Scrapes refused in a row after which the server is taken to be dead."""
SILENT_SECONDS = 60.0
"""Neither a scrape nor a request succeeded for this long, and for three times the longest request: the same."""
IDLE_HEAD_TICKS = 2
DRAIN_LIMIT_SECONDS = 60.0
LAST_LOOK_SECONDS = 3.0
IDLE_TAIL_SECONDS = 3.0
WARMUP = "warmup"


@dataclass(frozen=True, slots=True)
class StressOptions:
    """What is asked of a run; `None` means that it is for the server or the workload to tell."""

    url: str
    workload: str = "interactive"
    settings: Path | None = None
    max_batch: int | None = None
    model: str | None = None
    log: Path | None = None
    plan: PlanName = PlanName.LOAD_LINE
    stage_seconds: float | None = None
    duration_seconds: float | None = None
    out: Path | None = None
    seed: int = 1
    interval_seconds: float = 1.0
    gpu: str = "auto"
    pid: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ceiling: int = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("url", metavar="URL", help="the server's base URL, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--workload",
        default="interactive",
        metavar="W",
        help=f"one of {', '.join(WORKLOADS).replace('_', '-')} (default: interactive)",
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--settings", type=Path, metavar="FILE", help="serving settings with max_batch_size")
    limit.add_argument("--max-batch", type=_COUNT, metavar="N", help="the configured batch limit")
    parser.add_argument("--model", metavar="NAME", help="model name to ask for (default: the server's first)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the server's start-up log: tells what HTTP does not")
    parser.add_argument(
        "--plan",
        default=PlanName.LOAD_LINE.value,
        metavar="PLAN",
        help="load_line (default), or slo: also bisect for the largest concurrency that meets the workload's SLOs",
    )
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--stage-seconds", type=_DURATION, metavar="S", help="measured length of a stage (default: 30)")
    pace.add_argument("--duration", type=_DURATION, metavar="D", help="about how long all stages may take: 90, 10m, 1h")
    parser.add_argument("--prompt-tokens", type=_COUNT, metavar="N", help="mean prompt length, not the workload's")
    parser.add_argument("--output-tokens", type=_COUNT, metavar="N", help="mean output length, not the workload's")
    parser.add_argument(
        "--ceiling",
        type=whole(1, MAX_CEILING),
        default=256,
        metavar="N",
        help="where a search without a limit ends (default: 256)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of prompts and lengths (default: 1)")
    parser.add_argument(
        "--interval", type=duration(0.05, 60), default=1.0, metavar="S", help="sampling interval (default: 1 s)"
    )
    parser.add_argument("--gpu", default="auto", metavar="G", help="auto, nvml, none, or the URL of a DCGM exporter")
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="the server's process (default: found by its port on this host)"
    )
    parser.add_argument("--out", type=Path, metavar="RUN.db", help="run file (default: runs/TIME.db)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    try:
        plan = PlanName(arguments.plan)
    except ValueError:
        raise ConfigError(f"--plan {arguments.plan}: choose one of {', '.join(PlanName)}") from None
    options = StressOptions(
        url=arguments.url,
        workload=arguments.workload,
        settings=arguments.settings,
        max_batch=arguments.max_batch,
        model=arguments.model,
        log=arguments.log,
        plan=plan,
        stage_seconds=arguments.stage_seconds,
        duration_seconds=arguments.duration,
        out=arguments.out,
        seed=arguments.seed,
        interval_seconds=arguments.interval,
        gpu=arguments.gpu,
        pid=arguments.pid,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        ceiling=arguments.ceiling,
    )
    return finish(asyncio.run(execute(options, Console(stderr=True))), as_json=arguments.json)


def finish(result: dict[str, Any], *, as_json: bool) -> int:
    """Print a finished run, for a program or for people, and return its exit code."""
    try:
        if as_json:
            print(json.dumps(result, allow_nan=False), flush=True)
        else:
            render_stress(result, Console())
        sys.stdout.flush()
    except OSError as error:
        # The reader went away, as `head` does, or the disk behind stdout is full; what the run found out still counts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                print(
                    f"plimsoll: cannot write to stdout: {error.strerror}; the result is in the run file",
                    file=sys.stderr,
                )
    code: int = result["exit_code"]
    return code


async def execute(options: StressOptions, console: Console) -> dict[str, Any]:
    """Run it; returns the document of `--json`.

    Args:
        options: what is asked.
        console: where progress for people goes; stdout stays free.

    Raises:
        ConfigError: wrong options, settings or output path.
        TargetError: the target cannot be used before the run began.
        RecordError: the run file cannot be created. One that cannot be written to its end is said in the document.
    """
    return await _StressRun(options, console).execute()


class _StressRun:
    def __init__(self, options: StressOptions, console: Console) -> None:
        self.options = options
        self.console = console
        self.clock = SystemClock()
        self.workload = find_workload(options.workload)
        self.path = options.out or Path("runs") / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}.db"
        self.policy = StagePolicy()
        self.pacer: StagePacer | None = None
        self.in_flight = 0
        self.draining = False
        """No request is in flight any more: that none succeeds says nothing of the server."""
        self.interrupted = False
        self.log_bytes = 0
        """Length of the server's log when the run began."""
        self.evidence: Evidence
        self.history: SqliteHistory
        self.link: DriverLink

    async def execute(self) -> dict[str, Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            # Before there is traffic, and at the second Ctrl-C, nothing is worth waiting for.
            if task is not None and (self.interrupted or not hasattr(self, "evidence")):
                task.cancel()
            self.interrupted = True
            if hasattr(self, "evidence"):
                self.evidence.ending.interrupted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            async with open_session() as session:
                try:
                    prepared = await self._prepare(session)
                except asyncio.CancelledError:
                    return self._interrupted_early()
                self.evidence = Evidence(prepared, self.options.seed)
                self.evidence.ending.interrupted = self.interrupted
                with self._create_history() as self.history:
                    return await self._measure(session)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    # ---- before traffic

    async def _prepare(self, session: aiohttp.ClientSession) -> Prepared:
        options = self.options
        base = parse_url(options.url)
        _require_writable(self.path)
        settings = None if options.settings is None else read_settings(_regular(options.settings, "--settings"))
        log = None if options.log is None else _read_head(_regular(options.log, "--log"))
        self.log_bytes = 0 if options.log is None else options.log.stat().st_size
        await gpu_reader(options.gpu).close()
        if options.pid is not None and not process_exists(options.pid):
            raise ConfigError(f"--pid {options.pid}: there is no such process on this host; leave it out to find it")
        for note in base.notes:
            self._say(note)
        facts = await converse(session, base.text, probe(options.model, where=base.text))
        facts = self._learn_from_files(facts, settings, log)
        stale = None if settings is None else stale_warning(settings)
        for note in (*facts.notes, *([stale] if stale else [])):
            self._say(note)
        limit, source = self._find_limit(facts, settings)
        workload = self.workload.scaled(
            facts.context_tokens, prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens
        )
        answer = await converse(session, base.text, smoke(facts.model))
        if not answer.generated:
            raise TargetError(f"{base.text} answers but does not generate: {answer.reason}")
        calibration = await converse(session, base.text, calibrate(facts.model, answer.api, facts.context_tokens))
        await self._require_gauges(session, base.text, facts)
        self._say(
            f"{base.text}: {facts.engine}, model {facts.model}, context {facts.context_tokens or 'unknown'} tokens; "
            + (f"batch limit {limit} ({source})" if limit else f"{source}: searching upwards by doubling")
        )
        if not calibration.measured:
            self._say("the server reports no usage.prompt_tokens: prompt lengths are only assumed")
        self._say(
            f"workload {workload.name}: {workload.prompt_tokens} tokens in, {workload.output_tokens} out on average, "
            f"seed {options.seed}"
        )
        return Prepared(
            base, facts, answer.api, calibration, workload, limit, source, warnings=(stale,) if stale else ()
        )

    async def _require_gauges(self, session: aiohttp.ClientSession, where: str, facts: TargetFacts) -> None:
        """Refuse a server whose metrics do not say what runs and what waits: it would be a long run that shows nothing.

        Asked after the first answers: some engines make a gauge only when it has a value.
        """
        engine = ENGINES[facts.engine]
        said = ""
        for attempt in range(GAUGE_TRIES):
            await self.clock.sleep(attempt and 1.0)
            seen = await converse(session, where, scrape(engine))
            if isinstance(seen, ScrapeFailure):
                said = seen.detail
                continue
            missing = [name for name in ("requests_running", "requests_waiting") if name not in seen.values]
            if not missing:
                return
            names = ", ".join(source.text for name in missing for source in engine.sources[name])
            said = (
                f"its metrics page lacks {' and '.join(missing)} ({names}); this Plimsoll may be older than release "
                f"{facts.version or 'it runs'} of {facts.engine}: look at the page for what they are called now"
            )
        raise TargetError(f"{where} answers, but no load line can be seen: {said}")

    def _learn_from_files(self, facts: TargetFacts, settings: Settings | None, log: str | None) -> TargetFacts:
        """What the start-up log and the settings file say that HTTP does not."""
        options = self.options
        if settings is not None:
            if settings.engine not in (None, facts.engine):
                raise ConfigError(f"{settings.where('engine')}: says {settings.engine}, the server is {facts.engine}")
            capacity = settings.kv_cache_capacity_tokens
            if capacity is not None and facts.kv_cache_capacity_tokens is None:
                facts = replace(facts, kv_cache_capacity_tokens=capacity, notes=())
        if log is None:
            return facts
        logged = logged_limits(ENGINES[facts.engine], log)
        if not logged:
            raise ConfigError(f"--log {options.log}: no start-up line of {facts.engine} in it; is it the right log?")
        if "max_running_requests" in logged:
            facts = replace(
                facts, max_running_requests=logged["max_running_requests"], max_running_source=str(options.log)
            )
        if "kv_cache_capacity_tokens" in logged:
            facts = replace(facts, kv_cache_capacity_tokens=logged["kv_cache_capacity_tokens"], notes=())
        return facts

    def _find_limit(self, facts: TargetFacts, settings: Settings | None) -> tuple[int | None, str]:
        """The batch limit to prove, and where it was read."""
        options = self.options
        if settings is not None:
            limit, source = settings.max_batch_size, settings.where("max_batch_size")
            if limit is None:
                raise ConfigError(f"{source}: no max_batch_size in it; add the line, or give --max-batch instead")
        elif options.max_batch is not None:
            limit, source = options.max_batch, "--max-batch"
        elif facts.max_running_requests is not None:
            limit, source = facts.max_running_requests, f"told by {facts.max_running_source}"
        else:
            return None, "nothing tells the batch limit (--settings, --max-batch, --log, the server)"
        if not 1 <= limit <= MAX_CEILING:
            raise ConfigError(f"{source}: a batch limit of {limit} is outside 1..{MAX_CEILING}")
        return limit, source

    def _create_history(self) -> SqliteHistory:
        history = SqliteHistory.create(self.path)
        history.set_manifest(
            {
                "kind": "stress",
                "plimsoll_version": version("plimsoll"),
                "started_t_ns": self.clock.now_ns(),
                "anchor_ns": self.clock.anchor_ns,
                "options": _plain(asdict(self.options)),
            }
        )
        return history

    def _interrupted_early(self) -> dict[str, Any]:
        with self._create_history() as history:
            history.append_event(Event(self.clock.now_ns(), "interrupted", "during the preflight"))
            workload = {
                "name": self.workload.name,
                "prompt_tokens": self.workload.prompt_tokens,
                "output_tokens": self.workload.output_tokens,
                "seed": self.options.seed,
            }
            result = interrupted_document(run=str(self.path), url=self.options.url, workload=workload)
            history.set_manifest({"result": result})
        return result

    # ---- traffic

    async def _measure(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        prepared = self.evidence.prepared
        self.policy = self._stage_policy()
        self.history.set_manifest(
            {
                "target": _plain(asdict(prepared.facts)),
                "workload": _plain(asdict(prepared.workload)),
                "calibration": _plain(asdict(prepared.calibration)),
                "limit": {"value": prepared.limit, "source": prepared.limit_source},
                "stage_policy": _plain(asdict(self.policy)),
            }
        )
        search = LoadLineSearch(
            prepared.limit,
            ceiling=self.options.ceiling,
            slots=prepared.facts.max_running_requests,
            refine_slo=self.options.plan is PlanName.SLO,
        )
        # A second Ctrl-C cancels whatever is being waited for; what was measured until then is still concluded.
        with contextlib.suppress(asyncio.CancelledError):
            async with self._sampling(session), self._driving():
                await self._wait(lambda: len(self.evidence.ticks) >= IDLE_HEAD_TICKS, limit_seconds=10.0)
                self.evidence.t_traffic_ns = self.clock.now_ns()
                await self._climb(search)
                await self._stop()
                await self._watch_drain()
        return self._conclude(search)

    def _stage_policy(self) -> StagePolicy:
        options = self.options
        if options.stage_seconds is not None:
            return StagePolicy().with_stage_seconds(options.stage_seconds)
        if options.duration_seconds is None:
            return StagePolicy()
        limit = self.evidence.prepared.limit
        stages = LoadLineSearch(limit).stages_left() if limit else 2 * math.ceil(math.log2(options.ceiling))
        share = options.duration_seconds / (stages + 1)
        # With a stated duration a slow server gets shorter measurements, not a longer run.
        return replace(StagePolicy().with_stage_seconds(max(3.0, 0.7 * share)), max_seconds=max(3.0, share))

    async def _climb(self, search: LoadLineSearch) -> None:
        first = search.next_stage()
        if first is None:
            return
        with _progress(self.console) as progress:
            bar = progress.add_task("warm-up", total=None, figures="")
            warmup = replace(
                self.policy,
                min_seconds=self.policy.warmup_seconds,
                min_requests=min(4, first.offered),
                requests_per_user=0.0,
                min_samples=1,
            )
            warm = StageSpec(WARMUP, first.offered, "warmup")
            await self._run_stage(warm, warmup, self._show(progress, bar, warm, 0, 0))
            done = 0
            while not self.evidence.ending.early and (spec := search.next_stage()) is not None:
                total = done + search.stages_left()
                stage = await self._run_stage(spec, self.policy, self._show(progress, bar, spec, done, total))
                done += 1
                view = self.evidence.see(stage)
                if stage.complete or self.evidence.ending.server_died:
                    search.record(view.observation)
                    self._report_stage(stage)

    async def _run_stage(
        self, spec: StageSpec, policy: StagePolicy, on_progress: Callable[[StagePacer], None]
    ) -> StageRun:
        prepared, ending = self.evidence.prepared, self.evidence.ending
        # After a step down, the requests of the larger stage have to end first, however long they take.
        longest = 5.0 + 1.2 * self.evidence.e2e_max_seconds
        policy = replace(policy, max_settle_seconds=max(policy.max_settle_seconds, longest))
        pacer = StagePacer(spec.offered, policy, self.clock.now_ns())
        stage = StageRun(
            spec,
            spec.name != WARMUP,
            pacer.t_start_ns,
            StageTally(prepared.workload.slo),
            WindowLedger(ENGINES[prepared.facts.engine].complaint),
        )
        self.evidence.stages.append(stage)
        self.history.append_stage(Stage(spec.name, spec.offered, stage.t_start_ns, None, None, counted=False))
        self.pacer = pacer
        try:
            async with asyncio.timeout(DRIVER_LIMIT_SECONDS):
                await self.link.stage(spec.name, spec.offered)
        except TimeoutError:
            ending.driver_died = f"the load generator's process did not react for {DRIVER_LIMIT_SECONDS:.0f} s"
        while pacer.advance(self.clock.now_ns()) is not StagePhase.DONE and not ending.early:
            stage.t_settled_ns = stage.tally.t_settled_ns = pacer.t_settled_ns
            on_progress(pacer)
            await self.clock.sleep(0.1)
        stage.t_settled_ns = stage.tally.t_settled_ns = pacer.t_settled_ns
        stage.t_end_ns = stage.tally.t_end_ns = self.clock.now_ns()
        stage.settled, stage.overfull = pacer.settled, pacer.overfull
        stage.complete = pacer.phase is StagePhase.DONE
        counted = stage.counted and stage.complete
        self.history.append_stage(
            Stage(spec.name, spec.offered, stage.t_start_ns, stage.t_settled_ns, stage.t_end_ns, counted)
        )
        return stage

    def _look_for_death(self) -> None:
        """Decide whether the server is gone."""
        evidence, now_ns = self.evidence, self.clock.now_ns()
        if evidence.ending.server_died is not None or not evidence.failed_ticks:
            return
        silent = (now_ns - max(evidence.t_last_good_ns, evidence.t_traffic_ns)) / NS
        if evidence.refused_ticks >= REFUSED_TICKS:
            evidence.ending.server_died = "it refuses connections"
        elif not self.draining and silent >= max(SILENT_SECONDS, 3 * evidence.e2e_max_seconds):
            failure = evidence.ticks[-1].failure
            evidence.ending.server_died = f"no scrape and no request succeeded for {silent:.0f} s ({failure})"
        else:
            return
        self.history.append_event(Event(now_ns, "server_died", evidence.ending.server_died))

    async def _stop(self) -> None:
        ending = self.evidence.ending
        if ending.driver_died:
            return
        grace = min(120.0, 10 + 3 * self.evidence.e2e_max_seconds)
        if ending.interrupted or ending.server_died:
            grace = 2.0
        self._say(f"stopping: up to {grace:.0f} s for the requests in flight")
        await self.link.stop(grace)

    async def _watch_drain(self) -> None:
        """Wait until the server is idle again, then a little longer, and note what it looks like."""
        began_ns = self.clock.now_ns()
        self.draining = True
        if self.evidence.ending.early:
            # Not a drain, but the server's counters as of now: without them its tokens do not compare with ours.
            until_ns = began_ns + round(LAST_LOOK_SECONDS * NS)
            while self.clock.now_ns() < until_ns and not self._looked_since(began_ns):
                await self.clock.sleep(0.1)
            return

        def latest() -> Tick | None:
            ticks = self.evidence.ticks
            return ticks[-1] if ticks and ticks[-1].up and ticks[-1].t_ns >= began_ns else None

        def idle() -> bool:
            tick = latest()
            return tick is not None and tick.values.get("requests_running") == tick.values.get("requests_waiting") == 0

        await self._wait(idle, limit_seconds=DRAIN_LIMIT_SECONDS)
        seconds = (self.clock.now_ns() - began_ns) / NS
        await self._wait(lambda: False, limit_seconds=IDLE_TAIL_SECONDS)
        tick = latest()
        if tick is not None:
            self.evidence.drain = Drain(
                tick.values.get("requests_running"),
                tick.values.get("requests_waiting"),
                tick.values.get("kv_cache_usage_ratio"),
                round(seconds, 3),
            )

    def _looked_since(self, t_ns: int) -> bool:
        return bool(self.evidence.ending.server_died) or any(t.t_ns >= t_ns for t in self.evidence.ticks[-1:])

    async def _wait(self, condition: Callable[[], bool], *, limit_seconds: float) -> None:
        until_ns = self.clock.now_ns() + round(limit_seconds * NS)
        while not condition() and not self.evidence.ending.early and self.clock.now_ns() < until_ns:
            await self.clock.sleep(0.1)

    # ---- what comes in

    @contextlib.asynccontextmanager
    async def _sampling(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        prepared, options = self.evidence.prepared, self.options
        base, facts = prepared.base, prepared.facts
        here = base.is_loopback or options.pid is not None
        # The GPUs of this host say nothing of a server on another one.
        gpu = gpu_reader("none" if options.gpu == "auto" and not here else options.gpu)
        sampler = Sampler(
            self.clock,
            target_reader(
                session,
                base.text,
                ENGINES[facts.engine],
                kv_cache_capacity_tokens=facts.kv_cache_capacity_tokens,
            ),
            gpu=gpu,
            processes=ServerProcesses(base.port, pid=options.pid) if here else None,
            interval_seconds=options.interval_seconds,
        )
        sampler.add_listener(self._on_tick)
        sampler.add_event_listener(self._on_event)
        task = asyncio.create_task(sampler.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await gpu.close()

    @contextlib.asynccontextmanager
    async def _driving(self) -> AsyncIterator[None]:
        prepared = self.evidence.prepared
        config = DriverConfig(
            base_url=prepared.base.text,
            model=prepared.facts.model,
            api=prepared.api,
            workload=prepared.workload,
            calibration=prepared.calibration,
            seed=self.options.seed,
            ignore_eos=ENGINES[prepared.facts.engine].dialect.supports_ignore_eos,
            anchor_ns=self.clock.anchor_ns,
        )
        self.link = await DriverLink.start(
            config,
            on_record=self._on_record,
            on_in_flight=self._on_in_flight,
            on_health=self.evidence.health.append,
            on_died=self._on_driver_died,
        )
        try:
            yield
        finally:
            await self.link.close()

    def _on_tick(self, tick: Tick) -> None:
        self.evidence.add_tick(tick)
        self.history.append_tick(
            self.evidence.prepared.base.text, tick.t_ns, tick.values, tick.gpus, tick.processes, tick.histogram_totals()
        )
        if self.pacer is not None:
            self.pacer.on_sample(tick.values.get("requests_running"), tick.t_ns)
            self._look_for_death()
        if self.history.error is not None:
            self.evidence.ending.record_error = str(self.history.error)

    def _on_event(self, event: Event) -> None:
        self.history.append_event(event)
        if event.kind == "restart" and self.evidence.ending.server_died is None:
            self.evidence.ending.server_died = f"it restarted ({event.text})"

    def _on_record(self, record: RequestRecord) -> None:
        self.history.append_request(record)
        self.evidence.add_record(record)
        if self.pacer is not None:
            self.pacer.on_request(record.t_plan_ns)

    def _on_in_flight(self, in_flight: int, t_ns: int) -> None:
        del t_ns
        self.in_flight = in_flight
        if self.pacer is not None:
            self.pacer.on_in_flight(in_flight)

    def _on_driver_died(self, code: int, last_words: str) -> None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        text = f"the load generator's process ended ({how})" + (f": {last_words}" if last_words else "")
        self.evidence.ending.driver_died = text
        self.history.append_event(Event(self.clock.now_ns(), "driver_died", text))

    # ---- after traffic

    def _last_words(self) -> str | None:
        """The line of the server's log that says that it ran out of memory during the run, or None."""
        log = self.options.log
        if log is None:
            return None
        try:
            text = _read_since(log, self.log_bytes)
        except OSError:  # it was there when the run began; without it the log simply says nothing
            return None
        engine = ENGINES[self.evidence.prepared.facts.engine]
        said = next((line for line in text.splitlines() if engine.complaint(line) is Complaint.OUT_OF_MEMORY), None)
        if said is None:
            return None
        key = os.environ.get(API_KEY_VARIABLE, "").strip()
        return f"its log says: {clean(said.replace(key, '***') if key else said)[-200:]}"

    def _conclude(self, search: LoadLineSearch) -> dict[str, Any]:
        evidence = self.evidence
        if evidence.ending.server_died:
            evidence.ending.out_of_memory = self._last_words() or evidence.full_gpu()
        # Requests that ended after their stage did are in only now, so every stage is looked at again; what its samples
        # showed, and whether the client kept up and the server lived, was for its own time to say.
        for stage in evidence.stages:
            if stage.counted and stage.view is not None:
                before, view = stage.view, evidence.see(stage)
                died = before.observation.server_died
                observation = replace(
                    view.observation,
                    server_died=died,
                    running=before.observation.running,
                    waiting=before.observation.waiting,
                )
                stage.view = replace(view, observation=observation, running=before.running, waiting=before.waiting)
                if stage.complete or died:
                    search.amend(stage.view.observation)
        now_ns = self.clock.now_ns()
        if evidence.ending.interrupted:
            self.history.append_event(Event(now_ns, "interrupted", "by the user"))
        result = self._document(search, now_ns)
        self.history.set_manifest({"result": result, "ended_t_ns": now_ns})
        for finding in result["findings"]:
            self.history.append_finding(now_ns, finding["rule"], "found", finding)
        self.history.flush()
        if self.history.error is not None and evidence.ending.record_error is None:
            # The very last write failed: the result cannot be in the file, so it has to say so itself.
            evidence.ending.record_error = str(self.history.error)
            result = self._document(search, now_ns)
        return result

    def _document(self, search: LoadLineSearch, t_ns: int) -> dict[str, Any]:
        line = search.result()
        if self.evidence.ending.early and not self.evidence.ending.server_died and search.next_stage() is not None:
            seen = f"ended after {len(search.seen)} stages: {line.evidence}"
            line = replace(line, bound_by=BoundBy.UNKNOWN, evidence=seen, next_step="run it again to its end")
        return document(
            self.evidence,
            line,
            run=str(self.path),
            t_ns=t_ns,
            slo_exact=self.options.plan is PlanName.SLO,
        )

    # ---- for people

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more, but the run goes on
            self.console.print(clean(text), style="dim", markup=False, highlight=False, soft_wrap=True)

    def _show(
        self, progress: Progress, bar: TaskID, spec: StageSpec, done: int, total: int
    ) -> Callable[[StagePacer], None]:
        def show(pacer: StagePacer) -> None:
            values = self.evidence.ticks[-1].values if self.evidence.ticks else {}
            figures = [f"{self.in_flight} in flight"]
            for name, label in (("requests_running", "running"), ("requests_waiting", "waiting")):
                if name in values:
                    figures.append(f"{values[name]:g} {label}")
            if "kv_cache_usage_ratio" in values:
                figures.append(f"KV cache {values['kv_cache_usage_ratio']:.0%}")
            warming = spec.name == WARMUP
            progress.update(
                bar,
                description="warm-up" if warming else f"{spec.offered} offered, {pacer.phase}",
                total=None if warming else total,
                completed=done + pacer.progress(self.clock.now_ns()),
                figures=", ".join(figures),
            )

        return show

    def _report_stage(self, stage: StageRun) -> None:
        if stage.view is None:
            return
        held, why = did_hold(stage.view.observation)
        self._say(f"{stage.spec.offered} offered: {'held' if held else 'did not hold'} ({why})")


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=console,
        expand=True,
        transient=True,
        disable=not console.is_terminal,
    )


def _require_writable(path: Path) -> None:
    """Refuse an output path before a single request is sent."""
    if path.exists():
        raise ConfigError(f"{path} exists already; a run never overwrites one: name another file with --out")
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: {folder} is not a folder; name another file with --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: no permission in {folder}; name another file with --out")


def _regular(path: Path, option: str) -> Path:
    """Refuse what is no file: reading a pipe or a device may never end."""
    if not path.exists():
        raise ConfigError(f"{option} {path}: there is no such file")
    if not path.is_file():
        raise ConfigError(f"{option} {path}: not a regular file")
    return path


def _read_head(path: Path) -> str:
    """The beginning of a log, where a start is told; logs of a long life are large."""
    try:
        with path.open("rb") as log:
            return log.read(LOG_HEAD_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"--log {path}: {error.strerror}") from None


def _read_since(path: Path, offset: int) -> str:
    """What was written to a log since it had that length, at most its last part; all of a new one in its place."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(offset if size >= offset else 0, size - LOG_TAIL_BYTES))
        return log.read(LOG_TAIL_BYTES).decode("utf-8", "replace")


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
