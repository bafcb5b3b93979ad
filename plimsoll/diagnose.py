"""`plimsoll diagnose LOG`: why a start failed or a server died, the next step, and what to leave alone."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from serving.diagnosis import DiagnosedLog, Diagnosis, EarlierStart, Evidence, State, diagnose
from serving.engines import ENGINES

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """examples:
  plimsoll diagnose server.log
  docker logs vllm 2>&1 | plimsoll diagnose -
  plimsoll diagnose server.log --engine sglang --json"""

NO_CAUSE = 3
_ENGINES = (*ENGINES, "tgi")
_COLOURS = {"high": "green", "medium": "yellow", "low": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("log", metavar="LOG", help="the server's log, whole or its end; - reads standard input")
    parser.add_argument("--engine", choices=_ENGINES, help="whose log it is (default: seen in the log)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Read the log and say why. Exit code 0 when a cause was found, 3 when not."""
    source = sys.stdin.buffer if arguments.log == "-" else Path(arguments.log)
    found = diagnose(source, engine=arguments.engine)
    if arguments.json:
        print(json.dumps(_document(arguments.log, found), allow_nan=False))
    else:
        _render(arguments.log, found, Console(soft_wrap=True, highlight=False))
    return NO_CAUSE if found.diagnosis is None else 0


def _document(log: str, found: DiagnosedLog) -> dict[str, Any]:
    return {
        "schema": "plimsoll.diagnose/1",
        "log": log,
        "lines": found.lines,
        "engine": found.engine,
        "state": found.state.value,
        "state_text": found.state_text,
        "diagnosis": None if found.diagnosis is None else _diagnosis(found.diagnosis),
        "last_error": None if found.last_error is None else asdict(found.last_error),
        "refused": dict(found.refused),
        "starts": found.starts,
        "earlier_starts": [asdict(start) for start in found.earlier],
    }


def _diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "class": diagnosis.failure.value,
        "title": diagnosis.title,
        "cause": diagnosis.cause,
        "figures": dict(diagnosis.figures),
        "evidence": [asdict(evidence) for evidence in diagnosis.evidence],
        "cause_line": diagnosis.cause_line,
        "ranks": list(diagnosis.ranks),
        "phase": diagnosis.phase.value,
        "requests_before": diagnosis.requests_before,
        "confidence": diagnosis.confidence.value,
        "doubts": list(diagnosis.doubts),
        "next_step": diagnosis.next_step,
        "leave_alone": list(diagnosis.leave_alone),
    }


def _render(log: str, found: DiagnosedLog, console: Console) -> None:
    name = "<stdin>" if log == "-" else log
    diagnosis = found.diagnosis
    if diagnosis is None:
        console.print(f"[yellow bold]no cause found[/]: {escape(found.state_text)}")
        if found.last_error is not None:
            console.print("  its last error is of no known class:")
            _show(name, (found.last_error,), found.last_error.line, console)
    else:
        console.print(f"[red bold]{escape(diagnosis.title)}[/]: {escape(diagnosis.cause)}")
        _show(name, diagnosis.evidence, diagnosis.cause_line, console)
        _row(console, "next step", diagnosis.next_step, "green")
        for advice in diagnosis.leave_alone:
            _row(console, "leave alone", advice, "cyan")
        doubts = "; ".join(diagnosis.doubts)
        confidence = diagnosis.confidence.value
        _row(console, "confidence", confidence + (f": {doubts}" if doubts else ""), _COLOURS[confidence])
        if diagnosis.ranks:
            _row(console, "ranks", ", ".join(diagnosis.ranks), "cyan")
        if found.state in (State.SERVING, State.STOPPED):
            _row(console, "state", found.state_text, "cyan")
    if found.refused:
        told = ", ".join(f"{kind}: {count:,}" for kind, count in found.refused.items())
        _row(console, "refused requests", told, "cyan")
    _show_earlier(found.earlier, found.starts, console)


def _show(name: str, lines: tuple[Evidence, ...], cause_line: int, console: Console) -> None:
    width = max((len(str(evidence.line)) for evidence in lines), default=1)
    console.print(f"{' ' * width} [blue]-->[/] {escape(name)}:{cause_line}")
    for evidence in lines:
        mark = "[red]>[/]" if evidence.line == cause_line else " "
        ranks = f", {len(evidence.ranks)} ranks" if len(evidence.ranks) > 1 else ""
        times = f"  [dim]({evidence.times:,} times{ranks})[/]" if evidence.times > 1 else ""
        console.print(f"[blue]{evidence.line:>{width}} |[/]{mark}{escape(evidence.text)}{times}")
    console.print(f"{' ' * width} [blue]|[/]")


def _row(console: Console, name: str, text: str, colour: str) -> None:
    console.print(f"  [{colour}]= {name}:[/] {escape(text)}")


def _show_earlier(earlier: tuple[EarlierStart, ...], starts: int, console: Console) -> None:
    shown = earlier[-3:]
    if not shown:
        return
    _row(console, "earlier", f"this is the last of {starts} starts in this log", "cyan")
    for start in shown:
        console.print(f"      lines {start.first_line:,} to {start.last_line:,}: {escape(start.cause)}")
