"""Jobs that run again and again beside the sampler: judging by rules, probes, tidying up.

APScheduler decides when; this says what it may decide: a job never runs twice at once, runs that were missed while the
host slept or the loop was busy become one, and one that is too late is left out. A job that fails is counted, logged
and run again at its next time.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from serving.errors import ConfigError

__all__ = ["Job", "Schedule"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and when.

    Attributes:
        name: unique among the jobs.
        run: one run.
        every_seconds: from the beginning of one run to that of the next.
        at_once: run at the start as well, not only after the first interval.
        jitter_seconds: each run is moved by up to this, earlier or later: many watches must not probe at once.
        late_seconds: a run that cannot begin within this time is left out; the interval by default.
    """

    name: str
    run: Callable[[], Awaitable[None]]
    every_seconds: float
    at_once: bool = False
    jitter_seconds: float = 0.0
    late_seconds: float | None = None


class Schedule:
    """Runs jobs while its `async with` block lasts; jobs still running at its end are cancelled and waited for.

    Args:
        jobs: the jobs.

    Raises:
        ConfigError: two jobs of one name, or an interval that is not above 0.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.errors: Counter[str] = Counter()
        """Runs that raised, by job."""
        self.skipped: Counter[str] = Counter()
        """Runs left out because the job was still running or it was too late, by job."""
        self._running: set[asyncio.Task[Any]] = set()
        self._is_stopping = False
        # In UTC, so that no run is skipped or doubled when summer time begins or ends.
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._scheduler.add_listener(self._count_skipped, EVENT_JOB_MISSED | EVENT_JOB_MAX_INSTANCES)
        names: set[str] = set()
        for job in jobs:
            if job.name in names:
                raise ConfigError(f"two jobs are called {job.name!r}; give each its own name")
            if not 0 < job.every_seconds < math.inf:
                raise ConfigError(f"job {job.name!r} runs every {job.every_seconds:g} s; give a time above 0")
            names.add(job.name)
            late_seconds = job.every_seconds if job.late_seconds is None else job.late_seconds
            self._scheduler.add_job(
                self._run,
                IntervalTrigger(seconds=job.every_seconds, jitter=job.jitter_seconds or None, timezone=UTC),
                args=[job],
                id=job.name,
                name=job.name,
                coalesce=True,
                max_instances=1,
                misfire_grace_time=max(1, math.ceil(late_seconds)),  # it takes whole seconds
                **({"next_run_time": datetime.now(UTC)} if job.at_once else {}),
            )

    async def __aenter__(self) -> Self:
        self._scheduler.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_stopping = True
        self._scheduler.shutdown(wait=False)
        await asyncio.sleep(0)  # the scheduler ends, and cancels its runs, in the loop's next round
        await asyncio.gather(*self._running)

    async def _run(self, job: Job) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task; for the type checker
        self._running.add(task)
        try:
            await job.run()
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
        except Exception:  # noqa: BLE001 - one of the loops that must go on for months
            self.errors[job.name] += 1
            _log.exception("job %s failed and will run again at its next time", job.name)
        finally:
            self._running.discard(task)

    def _count_skipped(self, event: Any) -> None:
        self.skipped[event.job_id] += 1
