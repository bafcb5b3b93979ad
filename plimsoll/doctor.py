"""`plimsoll doctor`: what is installed and from where, what is seen, and what would get in the way of a run."""

import argparse
import asyncio
import importlib
import itertools
import json
import platform
import resource
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monitor.gpu import describe_gpus
from monitor.http import converse, open_session, parse_url
from monitor.machine import Machine, machine_lines, read_machine
from plimsoll.report import clean
from serving.engines import probe
from serving.errors import PlimsollError

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """examples:
  plimsoll doctor
  plimsoll doctor http://127.0.0.1:8000 http://127.0.0.1:8080 --json"""

OUR_PACKAGES = ("serving", "monitor", "loadgen", "alerts", "plimsoll")
LIBRARIES = ("locust", "gevent", "prometheus-client", "aiohttp", "nvidia-ml-py", "apscheduler", "pyyaml", "xllamacpp")
WANTED_DESCRIPTORS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("urls", nargs="*", metavar="URL", help="servers to look at")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Look, and print. Exit code 0, or 1 when a named server cannot be used."""
    document, machine = asyncio.run(_examine(arguments.urls))
    if arguments.json:
        print(json.dumps(document, allow_nan=False))
    else:
        _render(document, machine, Console())
    return 1 if any(target["problem"] for target in document["targets"]) else 0


async def _examine(urls: list[str]) -> tuple[dict[str, Any], Machine]:
    gpus = await describe_gpus()
    machine = read_machine(gpus)
    document = {
        "schema": "plimsoll.doctor/1",
        "version": version("plimsoll"),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: str(Path(importlib.import_module(name).__file__ or "").parent) for name in OUR_PACKAGES},
        "libraries": {name: _version_of(name) for name in LIBRARIES},
        "gpus": asdict(gpus),
        "machine": asdict(machine),
        "clock": _clock(),
        "file_descriptors": _descriptors(),
        "targets": [await _target(url) for url in urls],
    }
    return document, machine


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _clock() -> dict[str, Any]:
    """How finely the clock is read, and whether it is the one that all processes of this host share."""
    readings = [time.monotonic_ns() for _ in range(1000)]
    steps = [b - a for a, b in itertools.pairwise(readings) if b > a]
    info = time.get_clock_info("monotonic")
    return {
        "source": info.implementation,
        "resolution_seconds": info.resolution,
        "smallest_step_seconds": min(steps, default=0) / 1e9,
        "shared_between_processes": "CLOCK_MONOTONIC" in info.implementation,
    }


def _descriptors() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard, "enough": soft >= WANTED_DESCRIPTORS or soft == resource.RLIM_INFINITY}


async def _target(url: str) -> dict[str, Any]:
    try:
        base = parse_url(url)
        async with open_session() as session:
            facts = await converse(session, base.text, probe(where=base.text))
    except PlimsollError as error:
        return {"url": url, "problem": str(error)}
    return {
        "url": base.text,
        "problem": None,
        "engine": facts.engine,
        "version": facts.version,
        "model": facts.model,
        "context_tokens": facts.context_tokens,
        "max_running_requests": facts.max_running_requests,
    }


def _render(document: dict[str, Any], machine: Machine, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("plimsoll", document["version"])
    table.add_row("python", f"{document['python']['version']}  {document['python']['executable']}")
    for name, place in document["packages"].items():
        table.add_row(f"  {name}", place)
    for name, found in document["libraries"].items():
        missing = "[yellow]not installed[/]" + (" (only `plimsoll demo` needs it)" if name == "xllamacpp" else "")
        table.add_row(f"  {name}", found or missing)
    for label, text in machine_lines(machine):
        table.add_row(label, escape(clean(text)))
    clock = document["clock"]
    shared = "shared by all processes" if clock["shared_between_processes"] else "[yellow]not shared[/]"
    table.add_row("clock", f"{clock['source']}, step {clock['smallest_step_seconds'] * 1e9:.0f} ns, {shared}")
    limit = document["file_descriptors"]
    advice = "" if limit["enough"] else f"  [yellow]raise it: ulimit -n {WANTED_DESCRIPTORS}[/]"
    table.add_row("open files", f"{limit['soft']} (hard limit {limit['hard']}){advice}")
    for target in document["targets"]:
        if target["problem"]:
            table.add_row("target", f"[red]{escape(clean(target['problem']))}[/]")
        else:
            engine = " ".join(str(part) for part in (target["engine"], target["version"]) if part)
            limit_text = target["max_running_requests"] or "not told"
            table.add_row(
                "target",
                escape(
                    clean(
                        f"{target['url']}: {engine}, model {target['model']}, context {target['context_tokens']} "
                        f"tokens, batch limit {limit_text}"
                    )
                ),
            )
    console.print(table)
