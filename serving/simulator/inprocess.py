"""A simulated server without sockets: the same requests and pages as over HTTP, in virtual time.

`InProcessTarget.answer` takes a request and gives an answer, so every conversation (`probe`, `scrape`, `smoke`) runs
against it by `serving.conversation.converse`. `read` is a scrape that leaves out the text of the page: rendering and
parsing 50 kB a hundred thousand times is what a month of virtual time would otherwise be spent on. It learns from one
real scrape what the engine's table reads, and from then on fills the values in from the snapshot; a test holds it to
what the page says.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from serving.conversation import HttpAnswer, HttpRequest, converse
from serving.engines import ENGINES, Reading, ScrapeFailure, scrape
from serving.simulator.dialects.base import Asked, Dialect, Page, Trouble, Usage
from serving.simulator.faults import Conditions
from serving.simulator.spec import Finish, ServerSpec, Snapshot

__all__ = ["InProcessTarget", "Simulated"]


class Simulated(Protocol):
    """A server in token mode or fluid mode."""

    @property
    def spec(self) -> ServerSpec:
        """As it runs."""
        ...

    @property
    def conditions(self) -> Conditions:
        """What its faults amount to now."""
        ...

    def run_until(self, t_ns: int) -> None:
        """Bring it to `t_ns`."""
        ...

    def snapshot(self) -> Snapshot | None:
        """What can be seen of it now; None while it is down."""
        ...


class InProcessTarget:
    """Answers for a simulated server at the time of a clock.

    Args:
        server: the server. It is brought up to the clock before it is looked at.
        dialect: the engine whose pages it gives.
        now_ns: reads the clock.
        kv_cache_capacity_tokens: as of `serving.engines.scrape`.
    """

    def __init__(
        self,
        server: Simulated,
        dialect: Dialect,
        now_ns: Callable[[], int],
        *,
        kv_cache_capacity_tokens: int | None = None,
    ) -> None:
        self.server = server
        self.dialect = dialect
        self._now_ns = now_ns
        self._capacity = kv_cache_capacity_tokens
        self._looked_ns: int | None = None
        self._seen: Snapshot | None = None
        self._learnt: Reading | None = None
        self._learnt_from: tuple[object, ...] | None = None

    def look(self) -> Snapshot | None:
        """The server as it is now; None while it is down. Within one moment of the clock it is looked at once."""
        now_ns = self._now_ns()
        if now_ns != self._looked_ns:
            self.server.run_until(now_ns)
            self._seen, self._looked_ns = self.server.snapshot(), now_ns
        return self._seen

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """What the server says to a request. Its own time does not pass meanwhile."""
        snapshot = self.look()
        conditions = self.server.conditions
        if snapshot is None:
            return HttpAnswer(0, error="refused")
        spec, dialect = self.server.spec, self.dialect
        path = request.path.partition("?")[0]
        seconds = 0.001
        if path == ENGINES[spec.engine].dialect.metrics_path:
            seconds += conditions.metrics_delay_seconds
            if seconds > request.timeout_s:
                return HttpAnswer(0, seconds=request.timeout_s, error="timeout")
            page: Page | None = dialect.metrics(spec, snapshot, renamed=conditions.metrics_renamed)
        elif request.json_body is None:
            page = dialect.page(path, spec, snapshot)
        else:
            page = self._post(path, json.dumps(request.json_body).encode(), snapshot)
        if page is None:
            page = dialect.complaint(Trouble.NOT_FOUND, spec, {"path": path})
        headers = {name.lower(): value for name, value in page.headers}
        return HttpAnswer(page.status, headers | {"content-type": page.content_type}, page.body, seconds)

    def _post(self, path: str, body: bytes, snapshot: Snapshot) -> Page | None:
        spec, dialect = self.server.spec, self.dialect
        other = dialect.post(path, body, spec)
        if other is not None:
            return other
        asked = dialect.read_request(path, body, spec)
        if not isinstance(asked, Asked):
            return asked
        usage = Usage(asked.prompt_tokens, asked.output_tokens)
        text = " tok" * asked.output_tokens
        return dialect.answer(asked, spec, 0, snapshot.t_ns, text, Finish.LENGTH, usage)

    def read(self) -> Reading | ScrapeFailure:
        """One scrape."""
        snapshot = self.look()
        conditions = self.server.conditions
        if snapshot is None or not snapshot.ready or conditions.metrics_delay_seconds:
            return self._scrape()
        # A family of HTTP answers is on the page from the first of its kind.
        key = (conditions.metrics_renamed, snapshot.started_ns, self.server.spec.release, *snapshot.http)
        if self._learnt is None or key != self._learnt_from:
            told = self._scrape()
            if isinstance(told, ScrapeFailure):
                return told
            self._learnt, self._learnt_from = told, key
            return told
        return fill(self._learnt, self.dialect, self.server.spec, snapshot, self._capacity)

    def _scrape(self) -> Reading | ScrapeFailure:
        engine = ENGINES[self.server.spec.engine]
        return converse(scrape(engine, kv_cache_capacity_tokens=self._capacity), self.answer)


def fill(
    learnt: Reading, dialect: Dialect, spec: ServerSpec, snapshot: Snapshot, capacity_tokens: int | None = None
) -> Reading:
    """A reading with the signals and sources of `learnt` and the figures of `snapshot`."""
    told = dialect.figures(spec, snapshot, capacity_tokens)
    values = {signal: told.get(signal, value) for signal, value in learnt.values.items()}
    histograms = {signal: snapshot.histograms[signal] for signal in learnt.histograms}
    return replace(learnt, values=values, histograms=histograms)
