"""`plimsoll demo`: a whole stress run on a real llama.cpp server with a tiny model, started here and ended here.

With `--simulated` it runs on a simulated vLLM with a large model on eight cards instead: nothing is to be installed for
it, and what the server really did is in a file beside the run.
"""

import argparse
import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.workloads import WORKLOADS, find_workload
from plimsoll.stress import StressOptions, execute, finish
from serving.embedded import EmbeddedServer
from serving.errors import ConfigError, TargetError

__all__ = ["EXAMPLES", "add_arguments", "cache_folder", "run", "simulated_server"]

EXAMPLES = """examples:
  plimsoll demo
  plimsoll demo --simulated
  plimsoll demo --workload long-document --out /tmp/demo --json"""

SLOTS = 8
STAGE_SECONDS = 6.0
INTERVAL_SECONDS = 0.5
_START_LIMIT_SECONDS = 30.0

SIMULATED = ("--engine", "vllm", "--model", "hy3", "--gpu", "h200", "--gpus", "8", "--max-batch", "16")
"""What `--simulated` launches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--workload",
        default="interactive",
        metavar="W",
        help=f"one of {', '.join(WORKLOADS).replace('_', '-')} (default: interactive)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for run file and engine log (default: runs/…)")
    parser.add_argument(
        "--simulated", action="store_true", help="use a simulated vLLM with Hy3 on 8 H200 instead of real llama.cpp"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    find_workload(arguments.workload)
    if arguments.out is not None and not str(arguments.out).strip("."):
        raise ConfigError("--out names no folder; give one, or leave it out")
    folder = arguments.out or Path("runs") / f"demo-{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}"
    if any((folder / name).exists() for name in ("run.db", "engine.log", "truth.jsonl")):
        raise ConfigError(f"{folder} holds a demo already; name another folder with --out")
    console = Console(stderr=True)
    result = (_on_simulated if arguments.simulated else _on_real)(arguments.workload, folder, console)
    return finish(result, as_json=arguments.json)


def _on_real(workload: str, folder: Path, console: Console) -> dict[str, Any]:
    console.print(f"starting a real llama.cpp server with {SLOTS} slots and a tiny model made on the spot", style="dim")
    with EmbeddedServer.start(log_path=folder / "engine.log", cache_dir=cache_folder(), slots=SLOTS) as server:
        options = StressOptions(
            url=server.url,
            workload=workload,
            stage_seconds=STAGE_SECONDS,
            interval_seconds=INTERVAL_SECONDS,
            log=server.log_path,
            out=folder / "run.db",
            pid=server.pid,
            gpu="none",
        )
        return asyncio.run(execute(options, console))


def _on_simulated(workload: str, folder: Path, console: Console) -> dict[str, Any]:
    console.print(
        "starting a SIMULATED vLLM: Hy3 on 8 x H200, which is arithmetic and no engine; its figures show how a run "
        "looks, and prove nothing of a real server",
        style="dim",
    )
    log, truth = folder / "engine.log", folder / "truth.jsonl"
    with simulated_server([*SIMULATED, "--log", str(log), "--truth", str(truth)]) as server:
        options = StressOptions(
            url=server["url"],
            workload=workload,
            stage_seconds=STAGE_SECONDS,
            interval_seconds=INTERVAL_SECONDS,
            log=log,
            out=folder / "run.db",
            pid=server["pid"],
            gpu=server["gpu_url"],
        )
        result = asyncio.run(execute(options, console))
    result["target"] = {**(result.get("target") or {}), "simulated": True}
    console.print(
        f"this was a simulation; what its server really did: {truth}\n"
        f"  {Path(sys.executable).name} -m serving.simulator.truth {truth}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    return result


@contextlib.contextmanager
def simulated_server(arguments: list[str]) -> Iterator[dict[str, Any]]:
    """A simulated server in a child process, on a free port: the document that `plimsoll simulate --json` prints.

    It ends with this process, however that ends, and ignores Ctrl-C: the run that uses it decides when to stop it.

    Args:
        arguments: of `plimsoll simulate`.

    Raises:
        TargetError: it does not start.
    """
    command = [sys.executable, "-P", "-m", "plimsoll", "simulate", *arguments]
    command += ["--port", "0", "--json", "--until-stdin-closes"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield _introduction(child)
    finally:
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _introduction(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert child.stdout is not None  # noqa: S101 - it was opened as a pipe
    assert child.stderr is not None  # noqa: S101 - so was this
    line, deadline = b"", time.monotonic() + _START_LIMIT_SECONDS
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(child.stdout.fileno(), 4096) if readable else b""
        if not piece:
            child.kill()
            said = child.stderr.read().decode("utf-8", "replace").strip().splitlines()
            raise TargetError(f"the simulated server did not start: {said[-1] if said else 'it said nothing'}")
        line += piece
    document: dict[str, Any] = json.loads(line)
    if document.get("url") is None:
        raise TargetError(f"the simulated server did not start: {document.get('message', document.get('error'))}")
    return document


def cache_folder() -> Path:
    """Where made models are kept: the XDG cache folder, or PLIMSOLL_CACHE."""
    chosen = os.environ.get("PLIMSOLL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plimsoll"
