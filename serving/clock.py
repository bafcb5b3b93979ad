"""One time line: nanoseconds since the Unix epoch that never step.

Every `t_ns` in Plimsoll is `anchor + monotonic clock`. The anchor is taken once per run, so a step of the wall clock
(NTP, a suspended laptop) moves nothing, and the driver's child process, which is handed the same anchor, stamps on the
same line: CLOCK_MONOTONIC is shared by all processes of a Linux host. A second host is a second clock.
"""

import asyncio
import heapq
import time
from typing import Protocol

__all__ = ["NS", "Clock", "FakeClock", "SystemClock"]

NS = 1_000_000_000


class Clock(Protocol):
    """What code that needs time asks for. Pure code takes `t_ns` as an argument instead."""

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch on this run's time line."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""
        ...


class SystemClock:
    """The machine's monotonic clock, anchored once to wall time.

    Args:
        anchor_ns: Unix time minus monotonic time, nanoseconds; taken now when absent. A child gets its parent's.
    """

    def __init__(self, anchor_ns: int | None = None) -> None:
        self.anchor_ns = time.time_ns() - time.monotonic_ns() if anchor_ns is None else anchor_ns

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return time.monotonic_ns() + self.anchor_ns

    def from_realtime_ns(self, realtime_ns: int) -> int:
        """Move a CLOCK_REALTIME stamp (a kernel receive time, say) onto this line, by its age at this moment."""
        return self.now_ns() - (time.time_ns() - realtime_ns)

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed."""
        await asyncio.sleep(seconds)


class FakeClock:
    """A clock that moves only when told to; shipped as a test double.

    Args:
        start_ns: first reading.
    """

    def __init__(self, start_ns: int = 1_700_000_000 * NS) -> None:
        self._now_ns = start_ns
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = 0

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return self._now_ns

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the clock by `seconds`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._sleepers, (self._now_ns + round(seconds * NS), self._order, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move time forward, waking sleepers in the order in which they are due and letting each run."""
        end_ns = self._now_ns + round(seconds * NS)
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end_ns:
            due_ns, _, future = heapq.heappop(self._sleepers)
            self._now_ns = max(self._now_ns, due_ns)
            if not future.done():
                future.set_result(None)
            await self._settle()
        self._now_ns = end_ns

    @staticmethod
    async def _settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
