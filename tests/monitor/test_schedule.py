import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from monitor.schedule import Job, Schedule
from serving.errors import ConfigError

HOUR = 3600.0


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Work:
    """A job's work that counts its runs; each waits at the gate."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = self.ended = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = error

    async def __call__(self) -> None:
        self.begun += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.ended += 1


async def make_due(schedule: Schedule, name: str, ago_seconds: float = 0) -> None:
    """Let the job's next time be now, or past: what a host that slept looks like to the scheduler."""
    schedule._scheduler.modify_job(name, next_run_time=datetime.now(UTC) - timedelta(seconds=ago_seconds))
    await settle()


async def test_a_job_runs_when_it_is_due_and_not_before() -> None:
    now, later = Work(), Work()
    async with Schedule([Job("now", now, HOUR, at_once=True), Job("later", later, HOUR)]) as schedule:
        await settle()
        assert (now.ended, later.ended) == (1, 0)
        await make_due(schedule, "later")
        assert (now.ended, later.ended) == (1, 1)


async def test_a_job_that_fails_is_counted_logged_and_run_again(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(error=ValueError("a bug"))
    async with Schedule([Job("judge", work, HOUR, at_once=True)]) as schedule:
        await settle()
        await make_due(schedule, "judge")
    assert work.begun == 2
    assert schedule.errors == {"judge": 2}
    assert [record.exc_info is not None for record in caplog.records if "judge failed" in record.message] == [True] * 2


async def test_a_job_never_runs_twice_at_once() -> None:
    work = Work()
    work.gate.clear()
    async with Schedule([Job("slow", work, HOUR, at_once=True)]) as schedule:
        await settle()
        await make_due(schedule, "slow")
        assert (work.begun, schedule.skipped["slow"]) == (1, 1)
        work.gate.set()
        await settle()
        await make_due(schedule, "slow")
        assert work.ended == 2


async def test_runs_missed_while_the_host_slept_become_one() -> None:
    work = Work()
    async with Schedule([Job("often", work, 60, late_seconds=HOUR)]) as schedule:
        await make_due(schedule, "often", ago_seconds=3000)  # fifty runs are due
        assert (work.ended, schedule.skipped["often"]) == (1, 0)


async def test_a_run_that_is_too_late_is_left_out_and_counted() -> None:
    work = Work()
    async with Schedule([Job("punctual", work, HOUR, late_seconds=1)]) as schedule:
        await make_due(schedule, "punctual", ago_seconds=100)
        assert (work.begun, schedule.skipped["punctual"]) == (0, 1)


async def test_at_the_end_running_jobs_are_cancelled_quietly(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    work.gate.clear()
    async with Schedule([Job("slow", work, HOUR, at_once=True)]) as schedule:
        await settle()
        assert work.begun == 1
    assert work.ended == 0
    assert schedule.errors == {}
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("jobs", "what"),
    [
        (lambda work: [Job("a", work, 1), Job("a", work, 1)], "two jobs are called 'a'"),
        (lambda work: [Job("a", work, 0)], "above 0"),
        (lambda work: [Job("a", work, float("nan"))], "above 0"),
    ],
)
async def test_jobs_that_cannot_be_meant_are_refused(
    jobs: Callable[[Callable[[], Awaitable[None]]], list[Job]], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        Schedule(jobs(Work()))
