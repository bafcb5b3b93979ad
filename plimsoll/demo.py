"""`plimsoll demo`: a whole stress run on a real llama.cpp server with a tiny model, started here and ended here."""

import argparse
import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadgen.workloads import WORKLOADS, find_workload
from plimsoll.stress import StressOptions, execute, finish
from serving.embedded import EmbeddedServer
from serving.errors import ConfigError

__all__ = ["EXAMPLES", "add_arguments", "cache_folder", "run"]

EXAMPLES = """examples:
  plimsoll demo
  plimsoll demo --workload long-document --out /tmp/demo --json"""

SLOTS = 8
STAGE_SECONDS = 9.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--workload",
        default="interactive",
        metavar="W",
        help=f"one of {', '.join(WORKLOADS).replace('_', '-')} (default: interactive)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for run file and engine log (default: runs/…)")
    parser.add_argument("--simulated", action="store_true", help="use the simulated engine (not part of this version)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if arguments.simulated:
        raise ConfigError("--simulated: this version has no simulated engine yet; leave it out to use real llama.cpp")
    find_workload(arguments.workload)
    if arguments.out is not None and not str(arguments.out).strip("."):
        raise ConfigError("--out names no folder; give one, or leave it out")
    folder = arguments.out or Path("runs") / f"demo-{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}"
    if (folder / "run.db").exists() or (folder / "engine.log").exists():
        raise ConfigError(f"{folder} holds a demo already; name another folder with --out")
    console = Console(stderr=True)
    console.print(f"starting a real llama.cpp server with {SLOTS} slots and a tiny model made on the spot", style="dim")
    with EmbeddedServer.start(log_path=folder / "engine.log", cache_dir=cache_folder(), slots=SLOTS) as server:
        options = StressOptions(
            url=server.url,
            workload=arguments.workload,
            stage_seconds=STAGE_SECONDS,
            log=server.log_path,
            out=folder / "run.db",
            pid=server.pid,
            gpu="none",
        )
        result = asyncio.run(execute(options, console))
    return finish(result, as_json=arguments.json)


def cache_folder() -> Path:
    """Where made models are kept: the XDG cache folder, or PLIMSOLL_CACHE."""
    chosen = os.environ.get("PLIMSOLL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plimsoll"
