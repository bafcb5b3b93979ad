"""The Locust user behind all scenarios and the driver: one connection, one request in flight.

Locust schedules users; everything that is measured is measured by `loadgen.client` and goes out as a `RequestRecord`,
because Locust's own statistics time headers and round percentiles to two digits.
"""

import itertools
from collections.abc import Callable
from typing import ClassVar

from locust import User
from locust.env import Environment

from loadgen.client import Connection, Endpoint, RequestSpec
from loadgen.workloads import RequestMaker
from serving.records import Outcome, RequestRecord

__all__ = ["LoadUser", "Traffic"]

_FIRST_BACKOFF_SECONDS = 0.2
_LONGEST_BACKOFF_SECONDS = 2.0
_LONGEST_RETRY_AFTER_SECONDS = 30.0
_REFUSED = (Outcome.HTTP_ERROR, Outcome.CLIENT_ERROR)
_BROKEN_OFF = (Outcome.STREAM_ERROR, Outcome.TRUNCATED)


class Traffic:
    """What all users of one run share.

    Args:
        endpoint: where requests go.
        maker: what they ask.
        on_issue: called with each request before it is sent.
        on_record: called with each request that ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        maker: RequestMaker,
        *,
        on_issue: Callable[[RequestSpec], None] | None = None,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self.endpoint = endpoint
        self.maker = maker
        self.stage = ""
        self.issued = 0
        self.in_flight = 0
        self.connections: set[Connection] = set()
        self._on_issue = on_issue
        self._on_record = on_record

    def issue(self, connection: Connection, user: int, t_plan_ns: int) -> RequestRecord:
        """Issue the run's next request on that connection and report how it ended."""
        index = self.issued
        self.issued += 1
        self.in_flight += 1
        try:
            body, prompt_tokens, output_tokens = self.maker.make(index)
            spec = RequestSpec(
                index,
                self.stage,
                user,
                t_plan_ns,
                body,
                self.maker.api,
                prompt_tokens,
                output_tokens,
                self.maker.full_length,
            )
            if self._on_issue is not None:
                self._on_issue(spec)
            record = connection.issue(spec)
        finally:
            self.in_flight -= 1
        self._on_record(record)
        return record


class LoadUser(User):
    """A user who asks, reads the answer to its end, and asks again."""

    abstract = True
    traffic: ClassVar[Traffic]
    numbers: ClassVar["itertools.count[int]"] = itertools.count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.number = next(self.numbers)
        self.connection = Connection(self.traffic.endpoint)
        self.t_due_ns: int | None = None
        self._backoff_seconds = 0.0

    def on_start(self) -> None:
        """Connect ahead of the first request."""
        self.traffic.connections.add(self.connection)
        self.connection.connect()

    def on_stop(self) -> None:
        """Hang up."""
        self.traffic.connections.discard(self.connection)
        self.connection.close()

    def pause(self, seconds: float) -> None:
        """Wait before the next request."""
        raise NotImplementedError

    def ask_once(self) -> None:
        """One request, due when the one before it ended, and the rest that the server needs after a failure."""
        clock = self.traffic.endpoint.clock
        record = self.traffic.issue(self.connection, self.number, self.t_due_ns or clock.now_ns())
        self.t_due_ns = record.t_end_ns
        if seconds := self._backoff(record):
            self.pause(seconds)
            self.t_due_ns = clock.now_ns()

    def _backoff(self, record: RequestRecord) -> float:
        """Seconds to wait after that record: a server that fails at once must not be asked at once again."""
        asked = self.connection.retry_after_seconds
        if record.outcome is Outcome.HTTP_ERROR and asked is not None:
            return min(max(asked, _FIRST_BACKOFF_SECONDS), _LONGEST_RETRY_AFTER_SECONDS)
        brief = (record.t_end_ns - record.t_plan_ns) / 1e9 < _FIRST_BACKOFF_SECONDS
        if record.outcome in _REFUSED or (record.outcome in _BROKEN_OFF and brief):
            doubled = max(_FIRST_BACKOFF_SECONDS, 2 * self._backoff_seconds)
            self._backoff_seconds = min(doubled, _LONGEST_BACKOFF_SECONDS)
            return self._backoff_seconds
        self._backoff_seconds = 0.0
        return 0.0
