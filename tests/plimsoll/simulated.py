"""A simulated server as a child process, for tests: what `plimsoll simulate` runs, but of any server that can be made.

`python simulated.py` reads one pickled document from stdin, serves until stdin is closed, and prints one JSON line once
it listens. What it is given: `spec`, `faults` (texts), `seed`, `truth` (a path), and the options of `SimulatorShell`.
"""

import asyncio
import json
import pickle
import sys
from pathlib import Path

from serving.clock import SystemClock
from serving.simulator.faults import FaultPlan, parse_fault
from serving.simulator.server import SimulatedServer
from serving.simulator.shell import DIALECTS, SimulatorShell
from serving.simulator.truth import TruthWriter


async def serve(stream, *, spec, faults=(), seed=0, **options):
    dialect = DIALECTS[spec.engine]
    server = SimulatedServer(
        spec,
        t_ns=SystemClock().now_ns(),
        edges=dialect.edges,
        plan=FaultPlan([parse_fault(text) for text in faults], seed=seed),
        truth=TruthWriter(stream),
    )
    async with SimulatorShell(server, dialect, truth=stream, seed=seed, **options) as shell:
        print(json.dumps({"url": shell.url}), flush=True)
        closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), closed.set)
        # One that died stays as it is, refusing, until the test has seen it.
        await closed.wait()


def main():
    """Everything that is asked for, and not a byte of what comes after: stdin's end is the sign to stop."""
    pipe = sys.stdin.buffer.raw
    size = int.from_bytes(pipe.read(8))
    document = b""
    while len(document) < size:
        document += pipe.read(size - len(document))
    asked = pickle.loads(document)  # noqa: S301 - from the test that started this
    with Path(asked.pop("truth")).open("x", encoding="utf-8") as stream:
        asyncio.run(serve(stream, **asked))


if __name__ == "__main__":
    main()
