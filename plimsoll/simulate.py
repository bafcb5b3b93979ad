"""`plimsoll simulate`: an inference server whose truth is known, over HTTP, until it is stopped."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from monitor.http import API_KEY_VARIABLE
from plimsoll.arguments import duration, number, whole
from plimsoll.report import clean
from serving.clock import SystemClock
from serving.engines import ENGINES
from serving.errors import ConfigError, PlimsollError
from serving.settings import Settings, read_settings, stale_warning
from serving.simulator.dialects.base import Dialect, Trouble
from serving.simulator.faults import FAULT_KINDS, FaultPlan, format_fault, parse_fault
from serving.simulator.launch import LaunchFailure, launch
from serving.simulator.server import SimulatedServer
from serving.simulator.shell import DIALECTS, SimulatorShell, open_record
from serving.simulator.spec import ServerSpec
from serving.simulator.traffic import Traffic, parse_traffic
from serving.simulator.truth import TruthWriter

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = f"""examples:
  plimsoll simulate
  plimsoll simulate --engine vllm --model hy3 --gpu h200 --gpus 8 --max-batch 48 --speed 5 --truth truth.jsonl
  plimsoll simulate --engine llamacpp --model qwen2.5-7b --gpu rtx-4090 --fault host_leak_per_hour=2GiB --allocate
  plimsoll simulate --background 2/s,prompt=500,output=200,diurnal=60% --fault crash=20,start=1h,every=6h

faults (NAME[=VALUE][,share=S][,start=T][,end=T][,OPTION=...]; times in seconds of the simulation's clock):
  {", ".join(FAULT_KINDS)}

It says which address it listens on, and stops at Ctrl-C or SIGTERM. The figures of a simulation are its own: they say
whether a monitor works, never what a real engine would do."""

_COUNT = whole(1, 1_000_000_000)
_DEFAULT_MODEL, _DEFAULT_GPU, _DEFAULT_GPUS = "hy3", "h200", 8
_DEAD = 1
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--engine", metavar="E", help=f"{', '.join(ENGINES)} (default: the settings file's, or vllm)")
    parser.add_argument("--release", metavar="R", help="the engine's release to speak like (default: the newest known)")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=whole(0, 65535), metavar="P", help="port; 0 takes a free one (default: the engine's)"
    )
    what = parser.add_argument_group("what is launched")
    what.add_argument("--settings", type=Path, metavar="FILE", help="serving settings (docs/settings.md)")
    what.add_argument("--model", metavar="M", help="a config.json, or the name of a built-in model (default: hy3)")
    what.add_argument("--gpu", metavar="NAME", help="the card (default: the settings', else h200)")
    what.add_argument("--gpus", type=_COUNT, metavar="N", help="how many of them (default: the settings', 8 for hy3)")
    what.add_argument("--max-batch", type=_COUNT, metavar="N", help="requests at once")
    what.add_argument("--context", type=_COUNT, metavar="N", help="longest prompt plus output, tokens")
    what.add_argument("--kv-blocks", type=_COUNT, metavar="N", help="blocks of the KV pool (default: what fits)")
    what.add_argument("--token-budget", type=_COUNT, metavar="N", help="tokens of one step")
    what.add_argument("--weight-bits", type=float, metavar="B", help="bits per weight (default: the model's own)")
    what.add_argument(
        "--host-experts",
        type=number(0, 1),
        default=0.0,
        metavar="R",
        help="llama.cpp: share of experts in main memory, 0..1",
    )
    what.add_argument("--kv-unified", action="store_true", help="llama.cpp: its slots share one KV cache")
    what.add_argument("--queue-limit", type=_COUNT, metavar="N", help="waiting requests above which it refuses")
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--speed", type=number(0.001, 1000), default=1.0, metavar="X", help="its clock against the wall's (default: 1)"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all that is drawn (default: 0)")
    how.add_argument("--fault", action="append", default=[], metavar="K=V", help="a fault; may be given again")
    how.add_argument("--background", metavar="RATE,...", help="requests from elsewhere, e.g. 2/s,prompt=500,output=200")
    how.add_argument(
        "--reasoning-tokens",
        type=whole(0, 1_000_000_000),
        default=0,
        metavar="N",
        help="so many of an answer are reasoning",
    )
    how.add_argument(
        "--answer-tokens", type=_COUNT, default=256, metavar="N", help="mean length of answers that may end themselves"
    )
    how.add_argument("--cold", action="store_true", help="the first start takes its time, too")
    how.add_argument("--restart-after", type=duration(0), metavar="S", help="after it died of memory, start it again")
    how.add_argument("--http-threads", type=_COUNT, metavar="N", help="connections served at once; others wait")
    how.add_argument("--allocate", action="store_true", help="really hold the memory, descriptors and files it leaks")
    how.add_argument("--api-key", action="store_true", help=f"ask for the key in {API_KEY_VARIABLE}")
    how.add_argument("--log", type=Path, metavar="FILE", help="write the engine's log there")
    how.add_argument("--truth", type=Path, metavar="FILE", help="write what really happens there")
    how.add_argument("--json", action="store_true", help="print one JSON document on stdout once it is ready")
    # A parent that starts us as a child keeps the other end: however the parent ends, so do we.
    how.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    plan = _plan(arguments)
    _check_log(plan, arguments)
    if plan.truth is not None and plan.truth.exists():
        raise ConfigError(f"--truth {plan.truth}: exists already; a truth is never overwritten: name another file")
    if isinstance(plan.spec, LaunchFailure):
        return _tell_failure(plan, plan.spec)
    with _writer(plan.truth) as truth:
        return asyncio.run(_serve(plan, plan.spec, truth))


def _check_log(plan: "_Plan", arguments: argparse.Namespace) -> None:
    """The log is overwritten, so it must be none of the files that are read or kept."""
    if plan.log is None:
        return
    others = {"--truth": plan.truth, "--settings": arguments.settings}
    if arguments.model is not None and Path(arguments.model).exists():
        others["--model"] = Path(arguments.model)
    for flag, other in others.items():
        if other is not None and plan.log.resolve() == other.resolve():
            raise ConfigError(f"--log {plan.log}: is what {flag} names, and would be overwritten; name another file")


@dataclass(frozen=True, slots=True)
class _Plan:
    spec: ServerSpec | LaunchFailure
    dialect: Dialect
    host: str
    port: int
    speed: float
    seed: int
    faults: FaultPlan
    traffic: Traffic | None
    t_ns: int
    cold: bool
    reasoning_tokens: int
    answer_tokens: int
    restart_after_seconds: float | None
    http_threads: int | None
    allocate: bool
    api_key: str | None
    log: Path | None
    truth: Path | None
    as_json: bool
    until_stdin_closes: bool


def _plan(arguments: argparse.Namespace) -> _Plan:
    """What is asked for, checked as a whole before anything is opened."""
    settings = None if arguments.settings is None else read_settings(arguments.settings)
    if settings is not None and (stale := stale_warning(settings)) is not None:
        _say(stale)
    engine = _engine(arguments.engine, settings)
    dialect = DIALECTS[engine]
    release = arguments.release
    if release is not None and release not in dialect.releases:
        raise ConfigError(f"--release {release}: no release of {engine} to speak like; {', '.join(dialect.releases)}")
    faults = FaultPlan([parse_fault(text) for text in arguments.fault], seed=arguments.seed)
    t_ns = SystemClock().now_ns()
    spec = _launch(arguments, engine, settings)
    traffic = None
    if arguments.background is not None:
        traffic = parse_traffic(arguments.background, since_ns=t_ns, seed=arguments.seed)
        if traffic.context_tokens is None and isinstance(spec, ServerSpec):
            traffic = replace(traffic, context_tokens=spec.context_tokens)
    key = os.environ.get(API_KEY_VARIABLE, "").strip() if arguments.api_key else None
    if key == "":
        raise ConfigError(f"--api-key: {API_KEY_VARIABLE} is not set; set it to the key that clients are to send")
    port = ENGINES[engine].dialect.default_port if arguments.port is None else arguments.port
    return _Plan(
        spec=spec,
        dialect=dialect,
        host=arguments.host,
        port=port,
        speed=arguments.speed,
        seed=arguments.seed,
        faults=faults,
        traffic=traffic,
        t_ns=t_ns,
        cold=arguments.cold,
        reasoning_tokens=arguments.reasoning_tokens,
        answer_tokens=arguments.answer_tokens,
        restart_after_seconds=arguments.restart_after,
        http_threads=arguments.http_threads,
        allocate=arguments.allocate,
        api_key=key,
        log=arguments.log,
        truth=arguments.truth,
        as_json=arguments.json,
        until_stdin_closes=arguments.until_stdin_closes,
    )


def _engine(named: str | None, settings: Settings | None) -> str:
    engine = named or (settings.engine if settings is not None else None) or "vllm"
    if engine not in DIALECTS:
        raise ConfigError(f"--engine {engine}: choose one of {', '.join(DIALECTS)}")
    return engine


def _launch(arguments: argparse.Namespace, engine: str, settings: Settings | None) -> ServerSpec | LaunchFailure:
    model = arguments.model
    cards = arguments.gpus
    if model is None and (settings is None or settings.model is None):
        model = _DEFAULT_MODEL
        cards = cards or _DEFAULT_GPUS
    if cards is None and settings is not None:
        cards = settings.gpus or (settings.tensor_parallel_size or 1) * (settings.pipeline_parallel_size or 1)
    if cards is None:
        cards = _DEFAULT_GPUS if model == _DEFAULT_MODEL else 1
    try:
        spec = launch(
            engine,
            model=model,
            card=arguments.gpu or (settings.gpu if settings is not None else None) or _DEFAULT_GPU,
            cards=cards,
            settings=settings,
            release=arguments.release,
            max_batch=arguments.max_batch,
            kv_blocks=arguments.kv_blocks,
            context_tokens=arguments.context,
            token_budget=arguments.token_budget,
            weight_bits=arguments.weight_bits,
            host_expert_ratio=arguments.host_experts,
            partitioned=False if arguments.kv_unified else None,
        )
    except LaunchFailure as failure:
        return failure
    return replace(spec, queue_limit=arguments.queue_limit)


def _tell_failure(plan: _Plan, failure: LaunchFailure) -> int:
    """The start ends as the engine's does: with a log that says why, and no server."""
    lines = [line.text for line in plan.dialect.startup_log(failure.spec, plan.t_ns, failure.failure)]
    if plan.log is not None:
        try:
            plan.log.parent.mkdir(parents=True, exist_ok=True)
            plan.log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the log {plan.log}: {error.strerror or error}") from error
    else:
        for line in lines:
            _say(line)
    _say(f"the simulated server does not start: {failure}")
    if plan.as_json:
        document = {"url": None, "pid": os.getpid(), "failure": failure.failure.value, "message": str(failure)}
        _print_document(document)
    return _DEAD


@contextlib.contextmanager
def _writer(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    with open_record(path, "x", "truth") as stream:
        yield stream


async def _serve(plan: _Plan, spec: ServerSpec, truth: TextIO | None) -> int:
    server = SimulatedServer(
        spec,
        t_ns=SystemClock().now_ns(),
        edges=plan.dialect.edges,
        plan=plan.faults,
        truth=None if truth is None else TruthWriter(truth),
        cold=plan.cold,
    )
    shell = SimulatorShell(
        server,
        plan.dialect,
        host=plan.host,
        port=plan.port,
        speed=plan.speed,
        log=plan.log,
        api_key=plan.api_key,
        allocate=plan.allocate,
        traffic=plan.traffic,
        reasoning_tokens=plan.reasoning_tokens,
        answer_tokens=plan.answer_tokens,
        restart_after_seconds=plan.restart_after_seconds,
        max_http_streams=plan.http_threads,
        truth=truth,
        seed=plan.seed,
        warn=_say,
    )
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(code: int) -> None:
        if not stopped.done():
            stopped.set_result(code)

    loop.add_signal_handler(signal.SIGTERM, stop, 0)
    loop.add_signal_handler(signal.SIGINT, stop, _INTERRUPTED)
    try:
        await shell.start()
    except PlimsollError:
        # Nothing ran: a truth about nothing is not to be in the way of the next try.
        if plan.truth is not None:
            plan.truth.unlink(missing_ok=True)
        raise
    try:
        if plan.until_stdin_closes:
            loop.add_reader(sys.stdin.fileno(), _watch_stdin, stop)
        _introduce(plan, server, shell)
        either: set[asyncio.Future[Any]] = {stopped, shell.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return stopped.result()
        trouble: Trouble = shell.ended.result()
        _say(f"the simulated server died: {trouble.value}; restart it with --restart-after S to go on")
        return _DEAD
    finally:
        await shell.stop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        if plan.until_stdin_closes:
            loop.remove_reader(sys.stdin.fileno())


def _watch_stdin(stop: Any) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stop(0)


def _introduce(plan: _Plan, server: SimulatedServer, shell: SimulatorShell) -> None:
    spec = server.spec
    memory = spec.memory
    cards = f"{memory.cards} x {memory.card_name}" if memory.cards else "no card"
    _say(
        f"simulated {spec.engine} {spec.release} on {shell.url} (not a real engine): {spec.model} on {cards}, "
        f"batch limit {spec.max_batch}, context {spec.context_tokens}, KV cache {spec.kv_capacity_tokens} tokens"
    )
    if spec.asked_max_batch is not None and spec.asked_max_batch != spec.max_batch:
        _say(f"the batch limit was clamped: {spec.asked_max_batch} asked for, {spec.max_batch} in effect")
    if plan.speed != 1:
        _say(f"its clock runs {plan.speed:g} times as fast as yours: so do its answers")
    for fault in plan.faults.faults.values():
        _say(f"fault: {format_fault(fault)}")
    _say(f"cards: {shell.url}/dcgm (for --gpu); state and faults at run time: {shell.url}/simulator/state")
    if plan.as_json:
        _print_document(
            {
                "url": shell.url,
                "pid": os.getpid(),
                "simulated": True,
                "engine": spec.engine,
                "release": spec.release,
                "model": spec.model,
                "gpu_url": f"{shell.url}/dcgm",
                "speed": plan.speed,
                "t_ns": server.origin_ns,
                "spec": _describe(spec),
            }
        )


def _describe(spec: ServerSpec) -> dict[str, Any]:
    memory = spec.memory
    return {
        "max_batch": spec.max_batch,
        "asked_max_batch": spec.asked_max_batch,
        "context_tokens": spec.context_tokens,
        "token_budget": spec.token_budget,
        "block_tokens": spec.block_tokens,
        "kv_blocks": spec.kv_blocks,
        "kv_capacity_tokens": spec.kv_capacity_tokens,
        "queue_limit": spec.queue_limit,
        "cards": memory.cards,
        "card_name": memory.card_name,
        "card_total_bytes": memory.card_total_bytes,
        "weights_bytes": memory.weights_bytes,
        "kv_cache_bytes": memory.kv_cache_bytes,
        "settings": dict(spec.settings),
    }


def _print_document(document: dict[str, Any]) -> None:
    print(json.dumps({"schema": "plimsoll.simulate/1", **document}, allow_nan=False), flush=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more, but the server goes on
        print(clean(text), file=sys.stderr, flush=True)
