"""`plimsoll experiment restart`: does a restart help? Nothing is changed; the same prompts, before and after restarts.

Measure, restart, wait until ready, warm up, measure, let it age, and again: `alerts.restart_benefit` says what that
shows. `run_restarts` is the order of steps over whatever can restart, measure and age a server, so that a simulated one
in virtual time goes through the same steps as a real one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from alerts.restart_benefit import Cycle, Sitting
from serving.errors import TargetError

__all__ = ["RestartRun", "Restartable", "run_restarts"]


class Restartable(Protocol):
    """A server that can be restarted, measured, and left to age."""

    async def measure(self) -> Sitting:
        """Warm it up, and measure the fixed prompts.

        Raises:
            TargetError: it is gone, or what was measured is not the server's.
        """
        ...

    async def restart(self) -> float:
        """Restart it and wait until it is ready; seconds without service.

        Raises:
            TargetError: it did not come back.
        """
        ...

    async def age(self) -> None:
        """Let the present start grow as old as starts are to be when they are measured again."""
        ...


@dataclass(slots=True)
class RestartRun:
    """What was measured so far; whoever interrupts the run still has it.

    Attributes:
        cycles: one for each restart after which it was measured.
        closing: the last start, measured once more.
        down_seconds: without service, one for each restart.
        ended_early: why, None where it did not.
    """

    cycles: list[Cycle] = field(default_factory=list)
    closing: Sitting | None = None
    down_seconds: list[float] = field(default_factory=list)
    ended_early: str | None = None


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
        TargetError: the server did not come back, or cannot be measured. `run` has what was measured until then.
    """
    try:
        before = await server.measure()
        for _ in range(times):
            run.down_seconds.append(await server.restart())
            after = await server.measure()
            run.cycles.append(Cycle(before, after))
            run.closing = None
            on_cycle(run)
            await server.age()
            before = run.closing = await server.measure()
    except TargetError as error:
        run.ended_early = str(error)
        raise
