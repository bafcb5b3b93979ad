"""`plimsoll experiment restart`: does a restart help? Nothing is changed; the same prompts, before and after restarts.

Measure, restart, wait until ready, warm up, measure, let it age, and again: `alerts.restart_benefit` says what that
shows. `run_restarts` is the order of steps over whatever can restart, measure and age a server, so that a simulated one
in virtual time goes through the same steps as a real one. Each restart is put into the ledger as soon as it has been
measured. Ctrl-C ends the experiment with what was measured; a server that was just being restarted is brought back.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alerts.figures import Figure, Figures, figure_of
from alerts.restart_benefit import METRICS, Cycle, RestartBenefit, Sitting, judge_restarts
from monitor.http import API_KEY_VARIABLE, open_session, parse_url
from monitor.sampler import Tick, find_restart
from plimsoll.arguments import duration, whole
from plimsoll.experiment_world import MOST_CONCURRENCY, add_server_arguments, settings_hash
from plimsoll.journal import RESTARTS, Journal
from plimsoll.ledger import Conclusion, Record, append, ledger_path, new_id, who_decides
from plimsoll.measurement import Load, Measurement, Meter, open_meter
from plimsoll.report import clean, figure
from plimsoll.restarting import LogMark, look, look_before, redact, run_restart, wait_until_new
from serving.clock import NS, Clock, SystemClock
from serving.engines import TargetFacts
from serving.errors import ConfigError, RecordError, TargetError
from serving.settings import SPLIT_KEYS, engine_arguments, read_settings

__all__ = ["EXAMPLES", "RestartPlan", "RestartRun", "Restartable", "add_arguments", "run", "run_restarts"]

EXAMPLES = """examples:
  plimsoll experiment restart hy3-serving.yaml --url http://127.0.0.1:8000 --restart 'systemctl restart vllm' \\
      --times 5 --age 4h
  plimsoll experiment restart hy3-serving.yaml --url ... --restart ... --times 5 --age-requests 2000 --json"""

AGE_SPREAD: Final = 0.15
"""Ages are drawn within this share of what was asked, so that a nightly or hourly job does not keep step with them."""
_LOOK_SECONDS: Final = 15.0
_STABLE_RATIO: Final = 0.03
_MOST_WARMUPS: Final = 6
_BLOCK_SEEDS: Final = 1000
"""Prompts of blocks that are not counted are others than those of blocks that are."""
_AGE_SECONDS: Final = 1800.0
_DRAIN_SECONDS: Final = 3.0
_MOST_AT_ONCE: Final = 200
_WORK_SECONDS: Final = 3600.0
_SIDES: Final = ("before", "after")
INTERRUPTED: Final = 130
_MEMORY: Final[Mapping[str, str]] = {
    "gpu_memory_peak_bytes": "gpu_memory_bytes",
    "process_memory_peak_bytes": "process_memory_bytes",
}
_TIMES: Final[Mapping[str, str]] = {
    "decode_tokens_per_second": "decode_seconds_per_token",
    "prefill_tokens_per_second": "prefill_seconds_per_token",
    "ttft_seconds": "ttft_seconds",
}
"""Figures of a measurement that are judged; speeds are turned round, so that of all of them more is worse."""


# ---- the order of steps


class Restartable(Protocol):
    """A server that can be restarted, measured, and left to age."""

    async def measure(self) -> Sitting:
        """Warm it up, and measure the fixed prompts.

        Raises:
            TargetError: it is gone.
        """
        ...

    async def restart(self) -> float:
        """Restart it and wait until it is ready; seconds without service.

        Raises:
            TargetError: it did not come back.
        """
        ...

    async def age(self) -> None:
        """Let the present start grow as old as starts are to be when they are measured again.

        Raises:
            TargetError: it is gone, or was restarted by somebody else.
        """
        ...


@dataclass(slots=True)
class RestartRun:
    """What was measured so far; whoever interrupts the run still has it.

    Attributes:
        cycles: one for each restart after which it was measured.
        closing: the present start as measured when it had aged, where no restart came after that.
        down_seconds: without service, one for each restart.
        ended_early: why, None where it did not.
    """

    cycles: list[Cycle] = field(default_factory=list)
    closing: Sitting | None = None
    down_seconds: list[float] = field(default_factory=list)
    ended_early: str | None = None

    def judge(self, **options: Any) -> RestartBenefit | None:
        """What it shows; None before the first restart was measured. Options are those of `judge_restarts`."""
        if not self.cycles:
            return None
        cost = median(self.down_seconds) if self.down_seconds else None
        return judge_restarts(self.cycles, closing=self.closing, restart_cost_seconds=cost, **options)


async def run_restarts(
    server: Restartable,
    times: int,
    run: RestartRun,
    *,
    on_cycle: Callable[[RestartRun], None] = lambda _: None,
) -> None:
    """Restart `times` times: A B, ages, A B, ... and the last start once more when it has aged.

    Args:
        server: what is restarted.
        times: how often.
        run: is filled in as it goes, and is whole after each step.
        on_cycle: called after each restart's second measurement.

    Raises:
        TargetError: the server did not come back, or is gone. `run` has what was measured until then, and the reason.
    """
    try:
        run.closing = before = await server.measure()
        for _ in range(times):
            run.down_seconds.append(await server.restart())
            after = await server.measure()
            run.cycles.append(Cycle(before, after))
            run.closing = None
            on_cycle(run)
            await server.age()
            run.closing = before = await server.measure()
    except TargetError as error:
        run.ended_early = str(error)
        raise


# ---- a real server


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """What is asked.

    Attributes:
        id: of the experiment; records of its restarts name it.
        settings: the settings file; it is read and not changed.
        url: where the server is.
        restart: the command, for `/bin/sh -c`.
        times: how many restarts.
        age_seconds: how old a start is when it is measured again; None with `age_requests`.
        age_requests: requests that it has served by then; None with `age_seconds`.
        blocks: parts of a measurement, each with prompts of its own; the same each time.
        load: the load of one block; a concurrency of 0 is worked out from the batch limit.
        log: the server's log, None where it is not to be read.
        limit_seconds: for the restart command, and again for the server to be ready.
        model: the name to ask for.
        gpu: as of `monitor.gpu.gpu_reader`.
        by: who decides.
        seed: of the ages that are drawn.
    """

    id: str
    settings: Path
    url: str
    restart: str
    times: int
    age_seconds: float | None
    age_requests: int | None
    blocks: int
    load: Load
    log: Path | None
    limit_seconds: float
    model: str | None
    gpu: str
    by: str
    seed: int


class _DisturbedError(TargetError):
    """What was measured is not what was asked, and the server is not to blame."""


class _OneLevel(Load):
    """Work at the stated concurrency only, to age by."""

    __slots__ = ()

    def levels(self) -> tuple[int, ...]:
        return (self.concurrency,)


class RealServer:
    """A server behind a URL with a restart command.

    Args:
        plan: what is asked.
        say: tells people.
    """

    def __init__(self, plan: RestartPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.base = parse_url(plan.url)
        self.settings = read_settings(plan.settings)
        self.facts: TargetFacts | None = None
        """What it said of itself when first measured."""
        self.load: Load | None = None
        """As fitted to it."""
        self.warnings: list[str] = []
        self.figures: list[Figures] = []
        """Of each measurement, over its blocks, for the ledger."""
        self.room_bytes: dict[str, float] = {}
        """Memory metric -> bytes that were still free when last looked."""
        self.under_way = False
        """Whether a restart was begun and not seen to end well."""
        self._say = say
        self._clock: Clock = SystemClock()
        self._rng = random.Random(plan.seed)
        self._ready_ns: int | None = None
        self._served = 0
        self._peak: float | None = None
        self._mark = LogMark(Path(os.devnull), None, 0, "")

    # ---- measuring

    async def measure(self) -> Sitting:
        """Blocks until two in a row agree, then the counted ones."""
        async with self._meter() as meter:
            await self._warm_up(meter)
            age_seconds, age_requests = self._age_now(meter.ticks[-1]), self._served
            blocks, others = [], []
            for number in range(self.plan.blocks):
                others.append(await self._others(meter))
                blocks.append(await self._block(meter, number))
            others.append(await self._others(meter))
            self._look_around(meter.ticks)
            figures = _collect(blocks)
            shared = _shared_memory_bytes() if self.base.is_loopback else None
            if shared is not None:
                figures["shared_memory_bytes"] = {"": shared}
        self.figures.append(_summary(blocks))
        foreign = [count for count in others if count is not None]
        return Sitting(
            figures,
            age_seconds=age_seconds,
            age_requests=age_requests if self._ready_ns is not None else None,
            running=self._fixed_load().concurrency + fmean(foreign) if foreign else None,
            peak_running=self._peak,
        )

    @contextlib.asynccontextmanager
    async def _meter(self) -> AsyncIterator[Meter]:
        async with open_meter(self.plan.url, model=self.plan.model, gpu=self.plan.gpu) as meter:
            self._fit(meter.facts)
            yield meter

    def _fit(self, facts: TargetFacts) -> None:
        """Fix the load at the first look; later, say where a start is not what the first one was."""
        if self.facts is None or self.load is None:
            limits = [limit for limit in (self.settings.max_batch_size, facts.max_running_requests) if limit]
            concurrency = self.plan.load.concurrency or min([MOST_CONCURRENCY, *limits])
            context = facts.context_tokens or self.settings.max_model_len
            self.facts, self.load = facts, replace(self.plan.load, concurrency=concurrency).fitted(context)
            return
        for name in ("version", "model", "context_tokens", "max_running_requests", "kv_cache_capacity_tokens"):
            old, new = getattr(self.facts, name), getattr(facts, name)
            if old != new:
                self.warn(f"starts are not alike: {name} was {old} and is {new}")

    def _fixed_load(self) -> Load:
        assert self.load is not None  # noqa: S101 # fixed by the first look at the server
        return self.load

    async def _warm_up(self, meter: Meter) -> None:
        """Uncounted blocks until decoding is the same twice in a row."""
        last: float | None = None
        name = f"decode_tokens_per_second@{self._fixed_load().concurrency}"
        for turn in range(_MOST_WARMUPS):
            await self._others(meter)
            measured = await self._block(meter, _BLOCK_SEEDS + turn)
            speed = measured.figures.get(name)
            if speed is not None and last is not None and abs(speed.value / last - 1) <= _STABLE_RATIO:
                return
            last = None if speed is None else speed.value
        self.warn(f"decoding still moved by more than {_STABLE_RATIO:.0%} after {_MOST_WARMUPS} blocks of warm-up")

    async def _block(self, meter: Meter, number: int) -> Measurement:
        load = self._fixed_load()
        return await self._push(meter, replace(load, seed=load.seed + number))

    async def _push(self, meter: Meter, load: Load, *, limit_seconds: float = 900.0) -> Measurement:
        measured = await meter.measure(load, limit_seconds=limit_seconds)
        self._served += sum(measured.outcomes.values())
        if measured.died is not None:
            raise TargetError(self._epitaph(measured.died, meter.facts.engine))
        for problem in (*measured.invalid, *measured.warnings):
            self.warn(problem)
        return measured

    def _epitaph(self, died: str, engine: str) -> str:
        age = self._age_now(None)
        told = "" if age is None else f" {age:,.0f} s after its start and {self._served:,} of our requests"
        cause = self._mark.death(engine)
        return f"the server died{told}: {died}" + (f"; {cause}" if cause else "")

    async def _others(self, meter: Meter) -> float | None:
        """Requests of others that run now, ours having had time to end; None where the server does not tell."""
        until_ns = self._clock.now_ns() + round(_DRAIN_SECONDS * NS)
        while True:
            await meter.idle_kv_ratio()
            running = meter.ticks[-1].values.get("requests_running")
            if not running or self._clock.now_ns() >= until_ns:
                return running
            await self._clock.sleep(0.1)

    def _look_around(self, ticks: Sequence[Tick]) -> None:
        """The most requests that ran at once, and how much memory is free."""
        running = [tick.values["requests_running"] for tick in ticks if "requests_running" in tick.values]
        if running:
            self._peak = max([*running, self._peak or 0.0])
        if not ticks:
            return
        last = ticks[-1]
        free = [
            gpu["gpu_memory_total_bytes"] - gpu["gpu_memory_used_bytes"]
            for gpu in last.gpus.values()
            if {"gpu_memory_total_bytes", "gpu_memory_used_bytes"} <= gpu.keys()
        ]
        if free:
            self.room_bytes["gpu_memory_bytes"] = min(free)
        if "host_memory_available_bytes" in last.values:
            self.room_bytes["process_memory_bytes"] = last.values["host_memory_available_bytes"]

    def _age_now(self, tick: Tick | None) -> float | None:
        """Seconds since the present start was ready, by ourselves or else by what it says of itself."""
        now_ns = self._clock.now_ns()
        if self._ready_ns is not None:
            return (now_ns - self._ready_ns) / NS
        started = None if tick is None else tick.values.get("engine_start_timestamp_seconds")
        return None if started is None else max(0.0, now_ns / NS - started)

    async def is_up(self) -> bool | None:
        """Whether something answers now; None where nothing ever did."""
        if self.facts is None:
            return None
        async with open_session() as session:
            return (await look(session, self.base, self._clock, self.facts.engine)).up

    # ---- restarting

    async def restart(self) -> float:
        """Run the command and wait for the new server."""
        began_ns, engine = self._clock.now_ns(), None if self.facts is None else self.facts.engine
        if self.plan.log is not None:
            self._mark = LogMark.now(self.plan.log)
        async with open_session() as session:
            before = None if engine is None else await look_before(session, self.base, self._clock, engine)
            self.under_way = True
            problem = await run_restart(self.plan.restart, self._environment(), self.plan.limit_seconds)
            if problem is not None:
                raise TargetError(problem)
            found = await wait_until_new(
                session,
                self.base,
                self._clock,
                model=self.plan.model,
                before=before,
                log=self._mark,
                engine=engine,
                limit_seconds=self.plan.limit_seconds,
            )
        if isinstance(found, str):
            raise TargetError(f"the server did not come back: {found}")
        self.under_way = False
        self._ready_ns, self._served, self._peak = self._clock.now_ns(), 0, None
        return (self._ready_ns - began_ns) / NS

    def _environment(self) -> dict[str, str]:
        environment = {"PLIMSOLL_SETTINGS": str(self.plan.settings.absolute())}
        engine = self.settings.engine if self.facts is None else self.facts.engine
        if engine is not None:
            environment["PLIMSOLL_ENGINE_ARGS"] = shlex.join(engine_arguments(self.settings, engine).words)
        return environment

    # ---- ageing

    async def age(self) -> None:
        """Wait, or work, by as much as was drawn."""
        share = self._rng.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        if self.plan.age_requests is not None:
            await self._work(max(1, round(share * self.plan.age_requests)))
        elif self.plan.age_seconds is not None and self._ready_ns is not None:
            await self._wait(self._ready_ns + round(share * self.plan.age_seconds * NS))

    async def _work(self, requests: int) -> None:
        load = self._fixed_load()
        async with self._meter() as meter:
            while (left := requests - self._served) > 0:
                some = min(left, _MOST_AT_ONCE)
                work = _OneLevel(load.prompt_tokens, load.output_tokens, load.concurrency, 1, some, load.seed + left)
                before = self._served
                await self._push(meter, work, limit_seconds=_WORK_SECONDS)
                if self._served == before:
                    raise _DisturbedError("no request ended while it was to age by work")
            self._look_around(meter.ticks)

    async def _wait(self, until_ns: int) -> None:
        """Look now and then, so that a restart by somebody else and peaks of others' load are seen."""
        assert self.facts is not None  # noqa: S101 # measured before it ages
        first: Tick | None = None
        async with open_session() as session:
            while (left_ns := until_ns - self._clock.now_ns()) > 0:
                await self._clock.sleep(min(_LOOK_SECONDS, left_ns / NS))
                tick = await look(session, self.base, self._clock, self.facts.engine)
                if not tick.up:
                    continue
                first = first or tick
                why = find_restart(first, tick)
                if why is not None:
                    raise _DisturbedError(f"the server was restarted while it aged, and not by us: {why}")
                self._look_around([tick])

    def warn(self, text: str) -> None:
        """Say something that a reader of the result must know."""
        told = redact(text)
        if told not in self.warnings:
            self.warnings.append(told)
            self._say(told)


def _collect(blocks: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """What is judged: per metric one value for each block; of memory the highest."""
    figures: dict[str, dict[str, float]] = {}
    for number, block in enumerate(blocks):
        if block.invalid:
            continue
        for name, item in block.figures.items():
            plain, at, level = name.partition("@")
            metric = _TIMES.get(plain)
            if metric is not None and item.value > 0:
                value = 1 / item.value if plain.endswith("_per_second") else item.value
                figures.setdefault(metric + at + level, {})[f"block {number}"] = value
    for name, metric in _MEMORY.items():
        peaks = [block.figures[name].high for block in blocks if name in block.figures]
        if peaks:
            figures[metric] = {"": max(peaks)}
    return figures


def _summary(blocks: Sequence[Measurement]) -> dict[str, Figure]:
    """The figures of all blocks together, as the ledger has them."""
    found: dict[str, Figure] = {}
    for name in dict.fromkeys(name for block in blocks for name in block.figures):
        items = [block.figures[name] for block in blocks if name in block.figures and not block.invalid]
        whole_figure = figure_of((item.value for item in items), sum(item.samples for item in items))
        if whole_figure is not None:
            found[name] = whole_figure
    return found


def _shared_memory_bytes() -> float | None:
    """What is taken of this host's /dev/shm; None where there is none."""
    try:
        status = os.statvfs("/dev/shm")  # noqa: S108 # the place itself is what is looked at
    except OSError:
        return None
    return float((status.f_blocks - status.f_bfree) * status.f_frsize)


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `plimsoll experiment restart`."""
    parser.add_argument("settings", type=Path, metavar="SETTINGS.yaml", help="the settings file; it is not changed")
    parser.add_argument("--url", required=True, metavar="URL", help="the server's base URL")
    parser.add_argument("--restart", required=True, metavar="CMD", help="shell command that restarts the server")
    parser.add_argument("--times", required=True, type=whole(1, 100), metavar="N", help="restarts; 5 are a good start")
    age = parser.add_mutually_exclusive_group()
    age.add_argument(
        "--age", type=duration(0), metavar="T", help="how old a start is when measured again (default: 30m)"
    )
    age.add_argument("--age-requests", type=whole(1, 10**9), metavar="N", help="the same in requests, which are sent")
    parser.add_argument(
        "--metric",
        action="append",
        choices=tuple(METRICS),
        metavar="M",
        help=f"judge only this one (repeatable): {', '.join(METRICS)}",
    )
    parser.add_argument("--log", type=Path, metavar="LOG", help="the server's log, to see new starts and deaths in it")
    add_server_arguments(parser)
    parser.add_argument(
        "--concurrency", type=whole(1, 4096), metavar="N", help="requests at once (default: what it runs, up to 16)"
    )
    parser.add_argument(
        "--blocks",
        type=whole(1, 100),
        default=6,
        metavar="N",
        help="parts of a measurement, each with its own prompts (default 6)",
    )
    parser.add_argument("--seed", type=whole(0, 2**31), default=1, metavar="N", help="of prompts and of ages")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    console = Console(stderr=True)

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            console.print(clean(redact(text)), style="dim", markup=False, highlight=False, soft_wrap=True)

    plan = _plan(arguments)
    server, result, ending = RealServer(plan, say), RestartRun(), _Ending()
    journal = Journal.create(plan.settings, {"kind": RESTARTS, "url": plan.url})
    try:
        asyncio.run(_execute(server, result, ending, say))
    finally:
        journal.finish()
    if ending.failed and server.facts is None:
        raise TargetError(ending.failed)
    document = _document(plan, server, result, ending, arguments.metric)
    if arguments.json:
        print(json.dumps(document, allow_nan=False), flush=True)
    else:
        _render(document, Console())
    code: int = document["exit_code"]
    return code


@dataclass(slots=True)
class _Ending:
    """How the experiment ended.

    Attributes:
        interrupted: somebody pressed Ctrl-C.
        failed: what went wrong, empty when nothing did.
        code: the exit code for that.
        serving: whether the server serves at the end; None where nobody knows.
        records: ids of the records that were made.
    """

    interrupted: bool = False
    failed: str = ""
    code: int = 0
    serving: bool | None = None
    records: list[str] = field(default_factory=list)


async def _execute(server: RealServer, run: RestartRun, ending: _Ending, say: Callable[[str], None]) -> None:
    """All restarts; and when that leaves the server down, one more."""
    loop = asyncio.get_running_loop()
    step: asyncio.Future[Any] = asyncio.ensure_future(
        run_restarts(
            server, server.plan.times, run, on_cycle=lambda so_far: _record(server, len(so_far.cycles), ending)
        )
    )

    def stop() -> None:
        ending.interrupted = True
        step.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            ending.failed, ending.code = await _result_of(step, server)
        ending.serving = await server.is_up()
        if ending.serving is False or (server.under_way and ending.interrupted):
            say("the server is down: restarting it once more; Ctrl-C leaves it as it is")
            step = asyncio.ensure_future(server.restart())
            with contextlib.suppress(asyncio.CancelledError):
                failed, code = await _result_of(step, server)
                ending.serving = not failed
                ending.failed = "; ".join(part for part in (ending.failed, failed) if part)
                ending.code = code or ending.code
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _result_of(step: "asyncio.Future[Any]", server: RealServer) -> tuple[str, int]:
    """What went wrong in a step, with the exit code for it; nothing and 0 when nothing did."""
    try:
        await step
    except _DisturbedError as error:
        return redact(str(error)), 3
    except TargetError as error:
        # A server that died of age is what was asked about; one that cannot be restarted ends the experiment.
        return redact(str(error)), 4 if server.under_way else 1
    return "", 0


def _target_document(facts: TargetFacts, url: str) -> dict[str, Any]:
    return {"url": url, "engine": facts.engine, "version": facts.version, "model": facts.model}


def _record(server: RealServer, number: int, ending: _Ending) -> None:
    """Put a restart into the ledger."""
    plan, facts = server.plan, server.facts
    t_ns = SystemClock().now_ns()
    values = server.settings.values()
    told = settings_hash(server.settings)
    record = Record(
        id=new_id(t_ns),
        t_ns=t_ns,
        kind="restart",
        conclusion=Conclusion.MEASURED,
        reason=f"restart {number} of {plan.times}; nothing was changed",
        by=plan.by,
        settings=values,
        hash_before=told,
        hash_after=told,
        target={} if facts is None else _target_document(facts, server.base.text),
        split={key: value for key, value in values.items() if key in SPLIT_KEYS},
        load={} if server.load is None else {**server.load.document(), "blocks": plan.blocks},
        before=server.figures[-2],
        after=server.figures[-1],
        warnings=tuple(server.warnings),
        detail={"experiment": plan.id, "restart": number, "of": plan.times},
    )
    try:
        append(ledger_path(plan.settings), record)
    except RecordError as error:  # the restart was worth its time all the same
        server.warn(f"a restart is not in the ledger: {error}")
    else:
        ending.records.append(record.id)


def _plan(arguments: argparse.Namespace) -> RestartPlan:
    if arguments.log is not None and arguments.log.exists() and not arguments.log.is_file():
        raise ConfigError(f"--log {arguments.log}: not a regular file")
    if not arguments.restart.strip():
        raise ConfigError("--restart: the command is empty")
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if key and key in arguments.restart:
        raise ConfigError(f"--restart holds the key in {API_KEY_VARIABLE}: the command inherits it, leave it out")
    by_time = arguments.age_requests is None
    return RestartPlan(
        id=new_id(SystemClock().now_ns()),
        settings=arguments.settings,
        url=arguments.url,
        restart=arguments.restart,
        times=arguments.times,
        age_seconds=(_AGE_SECONDS if arguments.age is None else arguments.age) if by_time else None,
        age_requests=arguments.age_requests,
        blocks=arguments.blocks,
        load=Load(
            arguments.prompt_tokens, arguments.output_tokens, arguments.concurrency or 0, rounds=1, seed=arguments.seed
        ),
        log=None if arguments.log is None else arguments.log.absolute(),
        limit_seconds=arguments.limit,
        model=arguments.model,
        gpu=arguments.gpu,
        by=arguments.by or who_decides(),
        seed=arguments.seed,
    )


def _judge(run: RestartRun, server: RealServer, wanted: Sequence[str] | None) -> RestartBenefit | None:
    measured = dict.fromkeys(name for cycle in run.cycles for name in cycle.before.figures)
    names = [name for one in wanted or METRICS for name in measured if name.partition("@")[0] == one]
    if not names:
        return None
    clock: Literal["seconds", "requests"] = "seconds" if server.plan.age_requests is None else "requests"
    return run.judge(metrics=names, clock=clock, room_bytes=server.room_bytes)


def _document(
    plan: RestartPlan, server: RealServer, run: RestartRun, ending: _Ending, wanted: Sequence[str] | None
) -> dict[str, Any]:
    benefit = _judge(run, server, wanted)
    code = 3 if benefit is None else benefit.ruling.exit_code
    code = ending.code or (INTERRUPTED if ending.interrupted else code)
    reason = "no restart was measured on both sides" if benefit is None else benefit.sentence
    return {
        "schema": "plimsoll.experiment/1",
        "action": "restart",
        "settings": str(plan.settings),
        "outcome": None if benefit is None else benefit.verdict.value,
        "verdict": {0: "pass", 1: "fail", 3: "inconclusive"}.get(code),
        "reason": reason,
        "next_step": None if benefit is None else benefit.next_step,
        "trouble": ending.failed or ("interrupted" if ending.interrupted else None),
        "restarts": {"asked": plan.times, "made": len(run.down_seconds), "measured": len(run.cycles)},
        "down_seconds": run.down_seconds,
        "load": None if server.load is None else {**server.load.document(), "blocks": plan.blocks},
        "benefit": None if benefit is None else benefit.to_json(),
        "warnings": [*server.warnings, *(() if benefit is None else benefit.notes)],
        "ledger": str(ledger_path(plan.settings)),
        "records": ending.records,
        "serving": ending.serving,
        "exit_code": code,
    }


def _render(document: Mapping[str, Any], console: Console) -> None:
    benefit = document["benefit"]
    if benefit is not None:
        one = next(item for item in benefit["metrics"] if item["metric"] == benefit["metric"])
        console.print(_table(one))
        for item in benefit["metrics"]:
            line = f"{item['metric']:<32} {item['verdict']}"
            console.print(escape(line), highlight=False, style=None if item is one else "dim")
    for warning in document["warnings"]:
        console.print(f"[yellow]{escape(clean(warning))}[/]", highlight=False, soft_wrap=True)
    colour = {0: "green", 1: "red", 3: "yellow"}.get(document["exit_code"], "red")
    lines = [f"[{colour} bold]{document['outcome'] or 'nothing measured'}[/]  {escape(clean(document['reason']))}"]
    if document["next_step"]:
        lines.append(f"next: {escape(clean(document['next_step']))}")
    if document["trouble"]:
        lines.append(f"[red]{escape(clean(document['trouble']))}[/]")
    if document["serving"] is False:
        lines.append("[red bold]the server is not known to serve: restart it by hand[/]")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _table(one: Mapping[str, Any]) -> Table:
    """One metric, restart by restart."""
    table = Table(title=one["metric"], title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("restart", "age before", "before", "after", "before against after", "then worse by"):
        table.add_column(name, justify="right")
    is_ratio = METRICS[one["metric"].partition("@")[0]].is_ratio
    scale, unit = (100.0, "%") if is_ratio else (1 / 2**20, " MiB")

    def change(shift: Mapping[str, Any] | None) -> str:
        if shift is None:
            return "–"
        ends = "" if shift["low"] is None else f" ({shift['low'] * scale:+.1f} to {shift['high'] * scale:+.1f})"
        return f"{shift['change'] * scale:+.1f}{unit}{ends}"

    for number, row in enumerate(one["rows"], start=1):
        age = "–" if row["age"] is None else f"{row['age']:,.0f}"
        level = [figure(row[side] if is_ratio or row[side] is None else row[side] * scale) for side in _SIDES]
        table.add_row(str(number), age, *level, change(row["better"]), change(row["decline"]))
    return table
