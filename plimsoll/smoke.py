"""`plimsoll smoke URL`: the smallest request that proves the server answers and generates, and with which model."""

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from monitor.http import converse, open_session, parse_url
from monitor.process import process_exists
from plimsoll.report import clean
from plimsoll.witness import Witness, others_ran, witness
from serving.clock import NS, SystemClock
from serving.engines import ENGINES, probe
from serving.errors import ConfigError, TargetError
from serving.smoke import Reach, judge_reach, smoke

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """examples:
  plimsoll smoke http://127.0.0.1:8000
  plimsoll smoke http://127.0.0.1:8000 --model hy3 --json"""

_EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}
_COLOURS = {"pass": "green", "fail": "red", "inconclusive": "yellow", None: "dim"}
_HEAD_TICKS = 2
_TAIL_SECONDS = 5.0
"""Engines that count tokens at the end of a request may need a moment to publish them."""
_CONNECT_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("url", metavar="URL", help="the server's base URL")
    parser.add_argument("--model", help="model name to ask for (default: the server's first)")
    parser.add_argument("--gpu", default="auto", metavar="G", help="auto, nvml, none, or the URL of a DCGM exporter")
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="the server's process (default: found by its port on this host)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Ask once.

    Exit code 0 when the server's model generated text, 1 when there is no text, 3 when there is and its counters say
    that it came from elsewhere.
    """
    if arguments.pid is not None and not process_exists(arguments.pid):
        raise ConfigError(f"--pid {arguments.pid}: there is no such process on this host")
    result = asyncio.run(_ask(arguments))
    if arguments.json:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)
    return _EXIT_CODES[result["verdict"]]


def _print(result: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    words = {"pass": "yes", "fail": "no", None: "unknown"}
    console.print(
        f"[{_COLOURS[result['verdict']]}]{result['verdict']}[/]  {result['target']['url']}  "
        + escape(clean(result["reason"])),
        highlight=False,
    )
    for layer in result["layers"]:
        colour = _COLOURS[layer["outcome"]]
        console.print(
            f"  {layer['name'].replace('_', ' '):<18}[{colour}]{words[layer['outcome']]:<8}[/] "
            + escape(clean(layer["detail"])),
            highlight=False,
        )


def _layer(name: str, passed: bool | None, detail: str) -> dict[str, Any]:
    return {"name": name, "outcome": None if passed is None else "pass" if passed else "fail", "detail": detail}


async def _ask(arguments: argparse.Namespace) -> dict[str, Any]:
    base = parse_url(arguments.url)
    clock = SystemClock()
    async with open_session() as session:
        open_seconds = await _connect(base.host, base.port)
        try:
            facts = await converse(session, base.text, probe(arguments.model, where=base.text, require_metrics=False))
        except TargetError as error:
            if open_seconds is None:
                raise
            raise TargetError(f"port {base.port} of {base.host} is open, but: {error}") from None
        async with witness(session, base, facts, clock, gpu=arguments.gpu, pid=arguments.pid) as seen:
            await seen.gather(_HEAD_TICKS)
            begun_ns = clock.now_ns()
            answer = await converse(session, base.text, smoke(facts.model))
            reach = Reach(reached=None, sign="nothing was generated")
            if answer.generated:
                reach = await _judge_reach(seen, begun_ns, is_preallocated=_is_preallocated(facts.engine))
    verdict, reason = "pass", "it generates"
    if not answer.generated:
        verdict, reason = "fail", answer.reason or "it does not generate"
    elif reach.reached is False:
        verdict, reason = "inconclusive", reach.sign
    tokens = f"{answer.completion_tokens} tokens in {answer.seconds:.2f} s over {answer.api}"
    if answer.model is not None:
        tokens += f"; the answer names its model {answer.model!r}"
    told = f"{facts.engine}{f' {facts.version}' if facts.version else ''}, model {facts.model}"
    return {
        "schema": "plimsoll.smoke/1",
        "target": {"url": base.text, "engine": facts.engine, "version": facts.version, "model": facts.model},
        "verdict": verdict,
        "reason": reason,
        "layers": [
            _layer("port_open", open_seconds is not None or None, f"{base.host}:{base.port}"),
            _layer("answers", passed=True, detail=told),
            _layer("generates", answer.generated, tokens if answer.generated else "as said above"),
            _layer("reached_the_model", reach.reached, reach.sign),
        ],
        "answer": asdict(answer),
    }


def _is_preallocated(engine: str) -> bool:
    return ENGINES[engine].dialect.preallocates_kv_cache


async def _connect(host: str, port: int) -> float | None:
    """Seconds to open a connection; None when there was none, for the probe to say why."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError):
        return None
    writer.close()
    return loop.time() - begun


async def _judge_reach(seen: Witness, begun_ns: int, *, is_preallocated: bool) -> Reach:
    before = seen.ticks[-1].values if seen.ticks[-1].t_ns < begun_ns else {}
    before = next((tick.values for tick in reversed(seen.ticks) if tick.t_ns < begun_ns and tick.up), before)
    head = [tick for tick in seen.ticks if tick.t_ns < begun_ns]
    idle = seen.memory(head)
    deadline_ns = seen.clock.now_ns() + round(_TAIL_SECONDS * NS)
    while True:
        tick = await seen.next()
        rise = seen.memory(seen.between(begun_ns), max).minus(idle)
        rises = [*rise.gpus.values(), *([rise.process_bytes] if rise.process_bytes is not None else [])]
        moved = max(rises) if rises else None
        reach = judge_reach(
            before,
            tick.values,
            moved,
            is_preallocated=is_preallocated,
            others_ran=bool(others_ran(head, seen.between(begun_ns))),
            restart=seen.restart,
        )
        # A counter that stands still may be one that is published late.
        if reach.reached is not False or tick.t_ns > deadline_ns:
            return reach
