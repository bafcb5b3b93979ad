"""Pure pacing of a stage: when it has settled, when it has been measured for long enough.

A stage is measured only once the client's requests in flight and the server's running requests have settled, and it
ends when it has been watched for long enough *and* has seen enough requests. Time is an argument.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from serving.clock import NS

__all__ = ["PlanName", "StagePacer", "StagePhase", "StagePolicy"]


class PlanName(StrEnum):
    """What a run asks: the load line, or also the largest concurrency that meets every SLO."""

    LOAD_LINE = "load_line"
    SLO = "slo"


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """How long a stage takes.

    Attributes:
        min_seconds: least length of the measured window.
        max_seconds: greatest length of the measured window, however few requests ended in it.
        settle_seconds: least time before the window may begin.
        max_settle_seconds: after this the window begins although the server has not settled.
        requests_per_user: requests that must have ended in the window, for each one offered.
        min_requests: the same, in all.
        min_samples: samples of running requests that the window needs.
        warmup_seconds: least length of the warm-up stage, which is not counted.
    """

    min_seconds: float = 30.0
    max_seconds: float = 300.0
    settle_seconds: float = 2.0
    max_settle_seconds: float = 60.0
    requests_per_user: float = 2.0
    min_requests: int = 20
    min_samples: int = 8
    warmup_seconds: float = 5.0

    def with_stage_seconds(self, seconds: float) -> "StagePolicy":
        """The same policy with windows of about `seconds`: the other lengths scale along."""
        return replace(
            self,
            min_seconds=seconds,
            max_seconds=max(4 * seconds, 60.0),
            settle_seconds=min(2.0, seconds / 4),
            max_settle_seconds=max(2 * seconds, 20.0),
            warmup_seconds=min(5.0, seconds / 2),
        )


class StagePhase(StrEnum):
    """Where a stage is."""

    SETTLING = "settling"
    MEASURING = "measuring"
    DONE = "done"


class StagePacer:
    """Follows one stage from its start to its end.

    Feed it every sample of running requests (`on_sample`), every change of the client's requests in flight
    (`on_in_flight`) and every request that ended (`on_request`); read `phase` at any time with `advance`.
    """

    def __init__(self, offered: int, policy: StagePolicy, t_ns: int) -> None:
        self.offered = offered
        self.policy = policy
        self.t_start_ns = t_ns
        self.t_settled_ns: int | None = None
        self.settled = False
        """False when the window had to begin before the server settled."""
        self.overfull = False
        """True when requests of a larger stage were still in flight when the window had to begin."""
        self.phase = StagePhase.SETTLING
        self.in_flight: int | None = None
        self._recent: list[float] = []
        self._samples = 0
        self._requests = 0

    def on_in_flight(self, in_flight: int) -> None:
        """The client's requests in flight changed."""
        if in_flight != self.offered and self.phase is StagePhase.SETTLING:
            self._recent.clear()
        self.in_flight = in_flight

    def on_sample(self, running: float | None, t_ns: int) -> None:
        """A scrape ended; `running` is None when it failed."""
        if running is None or t_ns < self.t_start_ns:
            return
        if self.phase is StagePhase.MEASURING:
            self._samples += 1
        elif self.phase is StagePhase.SETTLING and self.in_flight == self.offered:
            self._recent = [*self._recent[-2:], running]

    def on_request(self, t_plan_ns: int) -> None:
        """A request ended; it counts when it was due inside the window."""
        if self.t_settled_ns is not None and t_plan_ns >= self.t_settled_ns:
            self._requests += 1

    def advance(self, t_ns: int) -> StagePhase:
        """The phase at `t_ns`; moves on when its time has come."""
        policy = self.policy
        if self.phase is StagePhase.SETTLING:
            waited = (t_ns - self.t_start_ns) / NS
            calm = self._calm() and waited >= policy.settle_seconds
            if calm or waited >= policy.max_settle_seconds:
                self.settled = calm
                self.overfull = self.in_flight is not None and self.in_flight > self.offered
                self.t_settled_ns = t_ns
                self.phase = StagePhase.MEASURING
        elif self.phase is StagePhase.MEASURING and self.t_settled_ns is not None:
            seconds = (t_ns - self.t_settled_ns) / NS
            wanted = max(policy.min_requests, policy.requests_per_user * self.offered)
            enough = seconds >= policy.min_seconds and self._requests >= wanted and self._samples >= policy.min_samples
            if enough or seconds >= policy.max_seconds:
                self.phase = StagePhase.DONE
        return self.phase

    def progress(self, t_ns: int) -> float:
        """Share of the stage that is done, 0..1, for a progress bar."""
        if self.phase is StagePhase.DONE:
            return 1.0
        if self.t_settled_ns is None:
            return 0.0
        return min(0.99, (t_ns - self.t_settled_ns) / NS / self.policy.min_seconds)

    def _calm(self) -> bool:
        """Requests in flight are what was offered, and three samples of running agree within one request or 5 %."""
        if self.in_flight != self.offered or len(self._recent) < 3:
            return False
        return max(self._recent) - min(self._recent) <= max(1.0, 0.05 * self.offered)
