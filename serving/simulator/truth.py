"""What really happened in a simulated server: its writer, and the script that computes from the file what is true.

The file has one JSON object on each line. Times are virtual nanoseconds, and every line is whole in itself:

    {"schema":"plimsoll.truth/1","start":[T,NUMBER],"engine":"vllm","max_batch":48,"kv_blocks":9000, ...}
    {"received":[T,ID,PROMPT_TOKENS,OUTPUT_TOKENS]}
    {"rejected":[T,ID,WHY]}
    {"step":[T,T_END,RUNNING,WAITING,KV_BLOCKS,GPU_BYTES,HOST_BYTES,PREFILL_TOKENS],
     "admitted":[ID,...],"preempted":[ID,...],"emitted":[ID,...],"finished":[[ID,WHY],...]}
    {"ended":[T,ID,WHY]}
    {"leak":[T,{"gpu_bytes":123,"kv_blocks":4}]}
    {"event":[T,"crash",{"fault":1}]}

A `start` line is written for each start of the server, and the first line of the file is one. `received` comes before
anything else of its request, and each received request ends once: by `rejected`, by `ended`, or in the `finished` of a
step. Admissions and preemptions of a step are at its T, tokens and ends at its T_END; a step is written when it ends,
so lines may lag by one step. A leak line says what has been lost so far, by any names. A `zombie` event says
with `output_tokens` how many its request is now planned to have, where that is another number.

`python -m serving.simulator.truth FILE` reads such a file as it streams by. It knows nothing of the simulator: requests
are followed by their ids alone, and the figures that a step states of itself are only checked against that.

The largest un-queued batch
---------------------------
It is what `plimsoll stress` calls the load line, computed from the requests instead of from samples of gauges:

1. The level is the number of requests inside the server. Dips of less than `dip_seconds` are filled up to the lower of
   their two sides: a client in a closed loop needs a moment to send its next request, and while it does no fewer
   are offered.
2. A level is settled from the moment at which every request that was inside when it began has been admitted: the crowd
   that comes at the start of a stage has to be read in, and tells nothing about the level. Only settled time counts.
3. A level is un-queued when, over all its settled time (at least `min_hold_seconds`), the time-weighted median of
   running requests is the level, waiting requests average below one half, tokens came out, nothing was preempted and
   nothing was lost. The answer is the largest such level.

Waiting is received and not (or no longer) admitted, as an engine's gauge has it. A request that is received during a
step waits for the next one also where there is room, for half a step on average; the tolerance of one half is for that
and is the same that the load line has. Where it is reached by arrivals alone, more than half a request in each step is
new, running falls short of the level more often than not, and the median says so too.
"""

import argparse
import heapq
import json
import math
import os
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from serving.errors import ConfigError, PlimsollError, RecordError
from serving.simulator.spec import Arrival, Finish, ServerSpec, Step

__all__ = ["SCHEMA", "LeakRate", "Level", "Slope", "Spread", "TruthReport", "TruthWriter", "main", "read_truth"]

SCHEMA = "plimsoll.truth/1"
REPORT_SCHEMA = "plimsoll.truth_report/1"

_NS = 1_000_000_000
_HOUR_NS = 3600 * _NS
_MOST_NS = 2**62
"""Every time and figure is below this, so that differences fit 64 bits."""
WAITING_TOLERANCE = 0.5
MIN_HOLD_SECONDS = 1.0
DIP_SECONDS = 0.25


class TruthWriter:
    """Writes the truth of one simulation. The same calls write the same bytes.

    What is written reaches the stream's file at least once in each second of virtual time in which something is
    written, so that a killed process loses at most the last one; call `flush` where time passes without a line.

    Args:
        stream: opened for text; never closed here.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = False
        self._flushed_ns = 0

    def start(self, t_ns: int, spec: ServerSpec, number: int) -> None:
        """The server starts for the `number`-th time. Comes before everything else."""
        figures: dict[str, Any] = {} if self._started else {"schema": SCHEMA}
        self._started = True
        figures |= {
            "start": [t_ns, number],
            "engine": spec.engine,
            "release": spec.release,
            "model": spec.model,
            "max_batch": spec.max_batch,
            "asked_max_batch": spec.asked_max_batch,
            "context_tokens": spec.context_tokens,
            "token_budget": spec.token_budget,
            "block_tokens": spec.block_tokens,
            "kv_blocks": spec.kv_blocks,
            "queue_limit": spec.queue_limit,
            "cards": spec.memory.cards,
        }
        self._write(t_ns, _json(figures))
        self.flush()

    def received(self, t_ns: int, arrival: Arrival) -> None:
        """A request has arrived, whatever becomes of it."""
        self._write(t_ns, f'{{"received":[{t_ns},{arrival.id},{arrival.prompt_tokens},{arrival.output_tokens}]}}')

    def rejected(self, t_ns: int, request_id: int, why: str) -> None:
        """A received request is refused before it was inside."""
        self._write(t_ns, f'{{"rejected":[{t_ns},{request_id},{_json(str(why))}]}}')

    def step(self, step: Step, gpu_bytes: int, host_bytes: int) -> None:
        """A step has ended.

        Args:
            step: with whom it admitted, preempted, gave a token and finished.
            gpu_bytes: memory in use on the first card.
            host_bytes: anonymous memory of the server's processes.
        """
        text = (
            f'{{"step":[{step.t_ns},{step.t_end_ns},{step.running},{step.waiting},{step.kv_blocks_used},'
            f"{gpu_bytes},{host_bytes},{step.prefill_tokens}]"
        )
        if step.admitted:
            text += f',"admitted":[{",".join(map(str, step.admitted))}]'
        if step.preempted:
            text += f',"preempted":[{",".join(map(str, step.preempted))}]'
        if step.emitted:
            text += f',"emitted":[{",".join(map(str, step.emitted))}]'
        if step.finished:
            text += ',"finished":[' + ",".join(f'[{key},"{why.value}"]' for key, why in step.finished) + "]"
        self._write(step.t_end_ns, text + "}")

    def ended(self, t_ns: int, request_id: int, finish: Finish) -> None:
        """A request has left the server otherwise than by a step."""
        self._write(t_ns, f'{{"ended":[{t_ns},{request_id},"{finish.value}"]}}')

    def leak(self, t_ns: int, **so_far: float) -> None:
        """What has been lost since it was last given back, by kind: `gpu_bytes=...`, `kv_blocks=...`."""
        self._write(t_ns, f'{{"leak":[{t_ns},{_json(so_far)}]}}')

    def event(self, t_ns: int, kind: str, **figures: object) -> None:
        """Anything else: a fault that begins or ends, a crash, a deploy.

        Raises:
            ValueError: a leak, which has a line of its own, or a figure that JSON does not have.
        """
        if kind == "leak":
            raise ValueError("leaks are written with leak(), as totals so far")
        self._write(t_ns, f'{{"event":[{t_ns},{_json(kind)},{_json(figures)}]}}')

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._stream.flush()

    def _write(self, t_ns: int, text: str) -> None:
        if not self._started:
            raise ValueError("a truth file begins with a start")
        self._stream.write(text + "\n")
        if not 0 <= t_ns - self._flushed_ns < _NS:
            self._flushed_ns = t_ns
            self._stream.flush()


@dataclass(frozen=True, slots=True)
class Level:
    """The time with `level` requests inside the server.

    Attributes:
        seconds: how long that was in all.
        settled_seconds: the part of it that counts; what follows is over that part.
        running_p50: time-weighted median of admitted requests; None without settled time.
        at_level_ratio: share of time in which all of the level ran.
        waiting_mean: time-weighted mean of requests that were not admitted.
        preemptions: requests thrown out of the batch.
        lost: requests that ended because the KV cache was full or the server died.
        tokens_per_second: tokens that came out.
        verdict: `un-queued`, or what speaks against it: `brief`, `unsettled`, `lost`, `preempting`, `queued`, `short`
            (fewer ran), `silent` (no token came out).
    """

    level: int
    seconds: float
    settled_seconds: float
    running_p50: int | None
    at_level_ratio: float | None
    waiting_mean: float | None
    preemptions: int
    lost: int
    tokens_per_second: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles by nearest rank; None without samples."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth for one more of something, fitted by least squares and by the last reading less the first."""

    least_squares: float | None
    simple: float | None


@dataclass(frozen=True, slots=True)
class LeakRate:
    """How one kind of leak grew between one start of the server and the next.

    Attributes:
        start: number of the start.
        kind: as the leak lines name it.
        first: first reading.
        last: last reading.
        readings: number of readings.
        hours: between first and last.
        per_hour: against time.
        per_request: against requests that had ended.
        per_token: against tokens that had come out.
        per_disconnect: against clients that had gone away: cancelled requests, and `zombie` events.
    """

    start: int
    kind: str
    first: float
    last: float
    readings: int
    hours: float
    per_hour: Slope
    per_request: Slope
    per_token: Slope
    per_disconnect: Slope


@dataclass(frozen=True, slots=True)
class TruthReport:
    """What a truth file says. Absent figures are None.

    Attributes:
        largest_unqueued_batch: see the module; None when no level was un-queued.
        exceeded: whether a larger level was held and was not un-queued; without one the batch might be larger.
        levels: every level that was held for long enough, in order.
        brief_levels: number of levels that were not.
        seconds: from the first line to the last.
        lines: lines read.
        cut: the last line was cut off.
        received: requests.
        ended: why -> requests.
        inside: requests that had not ended.
        tokens: tokens that came out.
        tokens_per_second: over all the time.
        tokens_per_step_second: over the time in which steps computed.
        steps: engine steps.
        prefill_tokens: prompt tokens processed.
        preemptions: requests thrown out of the batch.
        running_max: most requests in one step.
        waiting_max: most requests left waiting by one step.
        kv_blocks_max: most blocks in use at the end of a step.
        kv_ratio_max: the same as a share of the pool.
        gpu_bytes_max: most memory in use on the first card.
        host_bytes_max: most anonymous memory.
        ttft_seconds: from received to the first token.
        tpot_seconds: from first to last token for each token after the first, of finished requests.
        queue_seconds: from received to first admitted.
        starts: starts of the server.
        events: kind -> lines.
        leaks: by start and kind.
        problems: what contradicts itself -> how often; empty when requests and tokens are conserved.
    """

    largest_unqueued_batch: int | None
    exceeded: bool
    levels: Sequence[Level]
    brief_levels: int
    seconds: float
    lines: int
    cut: bool
    received: int
    ended: Mapping[str, int]
    inside: int
    tokens: int
    tokens_per_second: float | None
    tokens_per_step_second: float | None
    steps: int
    prefill_tokens: int
    preemptions: int
    running_max: int
    waiting_max: int
    kv_blocks_max: int
    kv_ratio_max: float
    gpu_bytes_max: int
    host_bytes_max: int
    ttft_seconds: Spread
    tpot_seconds: Spread
    queue_seconds: Spread
    starts: int
    events: Mapping[str, int]
    leaks: Sequence[LeakRate]
    problems: Mapping[str, int]

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(0, self.starts - 1)

    def as_json(self) -> dict[str, Any]:
        """One document of plain values."""
        return {"schema": REPORT_SCHEMA, "restarts": self.restarts, **asdict(self)}


_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a line of something else ends in."""


def read_truth(
    lines: Iterable[str],
    *,
    min_hold_seconds: float = MIN_HOLD_SECONDS,
    dip_seconds: float = DIP_SECONDS,
    name: str = "truth",
) -> TruthReport:
    """What a truth file says, in one pass: memory grows with the requests, by 24 bytes each.

    Args:
        lines: of the file, with their line ends.
        min_hold_seconds: settled time that a level needs to be judged.
        dip_seconds: dips in the number of requests inside that are shorter are no level of their own.
        name: of the file, for messages.

    Raises:
        RecordError: not a truth file, or a line before the last that cannot be read.
        ConfigError: a length of time that is not one.
    """
    for what, seconds in (("min_hold_seconds", min_hold_seconds), ("dip_seconds", dip_seconds)):
        if not 0 <= seconds <= _MOST_NS / _NS:
            raise ConfigError(f"{what} is {seconds:g}; it must be a number of seconds, 0 or more")
    reader = _Reader(round(dip_seconds * _NS))
    number = 0
    cut = False
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if number == 1 and record.get("schema") != SCHEMA:
                raise RecordError(f"{name}: not a truth file of {SCHEMA}")
            reader.take(record)
        except _UNREADABLE as error:
            if number > 1 and isinstance(error, ValueError) and not line.endswith("\n"):
                cut = True
                break
            raise RecordError(f"{name}:{number}: not a line of a truth file ({type(error).__name__})") from error
    if not number:
        raise RecordError(f"{name}: the file is empty")
    return reader.report(number - cut, cut=cut, min_hold_ns=round(min_hold_seconds * _NS))


@dataclass(slots=True)
class _Request:
    serial: int
    t_received_ns: int
    planned: int
    waiting: bool = True
    admitted: bool = False
    tokens: int = 0
    t_first_ns: int = 0
    t_last_ns: int = 0


@dataclass(slots=True)
class _Piece:
    """A stretch of time in which nothing changed.

    Attributes:
        serial: requests received until then.
        oldest: the smallest serial among those that wait; above all serials when none does.
    """

    t_ns: int
    t_end_ns: int
    level: int
    running: int
    waiting: int
    serial: int
    oldest: int
    preemptions: int
    lost: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _StepLine:
    figures: list[int]
    admitted: list[int]
    preempted: list[int]
    emitted: list[int]
    finished: list[tuple[int, str]]


@dataclass(slots=True)
class _LevelSum:
    ns: int = 0
    settled_ns: int = 0
    waiting_ns: int = 0
    preemptions: int = 0
    lost: int = 0
    tokens: int = 0
    running_ns: dict[int, int] = field(default_factory=dict)


class _Levels:
    """Adds up time by level. `dip_ns` as in the module's point 1: a morphological closing, done as pieces come in."""

    def __init__(self, dip_ns: int) -> None:
        self.sums: dict[int, _LevelSum] = {}
        self._dip_ns = dip_ns
        self._pieces: deque[_Piece] = deque()
        self._level = -1
        self._began_serial = 0
        self._settled = False

    def add(self, piece: _Piece) -> None:
        """The next piece, which begins where the last one ended."""
        pieces = self._pieces
        if pieces:
            if piece.level > pieces[-1].level:
                self._fill(piece.t_ns, piece.level)
            horizon_ns = piece.t_end_ns - self._dip_ns
            while len(pieces) > 1 and pieces[0].t_end_ns <= horizon_ns:
                self._book(pieces.popleft())
        pieces.append(piece)

    @property
    def last(self) -> _Piece | None:
        """The piece that has just ended."""
        return self._pieces[-1] if self._pieces else None

    def close(self) -> None:
        """There are no more pieces."""
        while self._pieces:
            self._book(self._pieces.popleft())

    def _fill(self, rise_ns: int, level: int) -> None:
        peak = 0
        for piece in self._pieces:
            if rise_ns - piece.t_end_ns < self._dip_ns:
                was = piece.level
                piece.level = max(was, min(peak, level))
                peak = max(peak, was)

    def _book(self, piece: _Piece) -> None:
        if piece.level != self._level:
            self._level = piece.level
            self._began_serial = piece.serial
            self._settled = False
        self._settled = self._settled or piece.oldest > self._began_serial
        total = self.sums.setdefault(piece.level, _LevelSum())
        ns = piece.t_end_ns - piece.t_ns
        total.ns += ns
        if not self._settled:
            return
        total.settled_ns += ns
        total.waiting_ns += ns * piece.waiting
        total.running_ns[piece.running] = total.running_ns.get(piece.running, 0) + ns
        total.preemptions += piece.preemptions
        total.lost += piece.lost
        total.tokens += piece.tokens


class _Trend:
    """Growth of y over x, one point at a time (Welford's update of variance and covariance)."""

    __slots__ = ("first", "last", "mean_x", "mean_y", "number", "sxx", "sxy")

    def __init__(self) -> None:
        self.number = 0
        self.mean_x = self.mean_y = self.sxx = self.sxy = 0.0
        self.first = self.last = (0.0, 0.0)

    def add(self, x: float, y: float) -> None:
        self.number += 1
        if self.number == 1:
            self.first = (x, y)
        self.last = (x, y)
        off = x - self.mean_x
        self.mean_x += off / self.number
        self.mean_y += (y - self.mean_y) / self.number
        self.sxx += off * (x - self.mean_x)
        self.sxy += off * (y - self.mean_y)

    def slope(self) -> Slope:
        run = self.last[0] - self.first[0]
        return Slope(
            _finite(self.sxy / self.sxx) if self.sxx > 0 else None,
            _finite((self.last[1] - self.first[1]) / run) if run else None,
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _figure(value: Any) -> int:
    """A time or a count as written.

    Raises:
        ValueError: not one that there can be.
    """
    figure = int(value)
    if not -_MOST_NS < figure < _MOST_NS:
        raise ValueError("out of range")
    return figure


_STEP_END, _LINE, _STEP_BEGIN = range(3)
"""Order of what happens at one moment: a step's tokens come out, clients react, the next step takes them in."""

_STEP_FIGURES = 8
_ZOMBIE = "zombie"
"""The event of a client that went away from a request that goes on."""
_LOST = (Finish.KV_FULL.value, Finish.DIED.value)
_WHOLE = (Finish.LENGTH.value, Finish.STOP.value)


class _Reader:
    """Follows the requests of a truth file.

    Lines lag by up to a step, so what they say is put in order first: nothing that is still to come can be earlier
    than the beginning of the latest step that has been read.
    """

    def __init__(self, dip_ns: int) -> None:
        self._levels = _Levels(dip_ns)
        self._pending: list[tuple[int, int, int, str, Any]] = []
        self._order = 0
        self._now_ns = self._first_ns = 0
        self._step_began_ns = -_MOST_NS
        self._requests: dict[int, _Request] = {}
        self._waiting = 0
        self._queue: list[tuple[int, int]] = []
        """(serial, id) of those that wait, and of some that no longer do."""
        self._serial = 0
        self._preempted = 0
        self._computing = False
        self._met_now = 0
        """Requests that came or went at this moment: whether before or after the step's beginning is not written."""
        self._gone_now: set[int] = set()
        self._problems: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._tokens = self._steps = self._step_ns = self._prefill = self._preemptions = 0
        self._running_max = self._waiting_max = self._gpu_max = self._host_max = self._kv_max = 0
        self._kv_ratio = 0.0
        self._kv_blocks = self._starts = self._start_number = 0
        self._first_token_ns = array("q")
        self._per_token_ns = array("d")
        self._queue_ns = array("q")
        self._trends: dict[str, tuple[_Trend, _Trend, _Trend, _Trend]] = {}
        self._leaks: list[LeakRate] = []

    def take(self, record: dict[str, Any]) -> None:
        """One line."""
        # Everything is read here, so that what cannot be read is told of its own line.
        if "step" in record:
            figures = [int(figure) for figure in record["step"]]
            if len(figures) != _STEP_FIGURES or not all(-_MOST_NS < figure < _MOST_NS for figure in figures):
                raise IndexError("step")
            t_ns, t_end_ns, *_ = figures
            step = _StepLine(
                figures,
                [int(key) for key in record.get("admitted", ())],
                [int(key) for key in record.get("preempted", ())],
                [int(key) for key in record.get("emitted", ())],
                [(int(key), str(why)) for key, why in record.get("finished", ())],
            )
            if t_ns < self._step_began_ns or t_end_ns < t_ns:
                self._problems["time goes back"] += 1
            self._step_began_ns = t_ns
            self._put(t_ns, _STEP_BEGIN, "begin", step)
            self._put(t_end_ns, _STEP_END, "end", step)
            self._drain(t_ns)
        elif "start" in record:
            t_ns, number = (_figure(figure) for figure in record["start"])
            kv_blocks = _figure(record["kv_blocks"])
            # Whatever was inside is gone, so nothing of before can lag behind this.
            self._drain(None)
            self._start(t_ns, number, kv_blocks)
        elif "received" in record:
            t_ns, key, _, planned = record["received"]
            self._put(_figure(t_ns), _LINE, "received", (int(key), int(planned)))
        elif "rejected" in record or "ended" in record:
            kind = "rejected" if "rejected" in record else "ended"
            t_ns, key, why = record[kind]
            self._put(_figure(t_ns), _LINE, kind, (int(key), str(why)))
        elif "leak" in record:
            t_ns, so_far = record["leak"]
            lost = {kind: float(amount) for kind, amount in so_far.items()}
            if not all(map(math.isfinite, lost.values())):
                raise ValueError("leak")
            self._put(_figure(t_ns), _LINE, "leak", lost)
        else:
            t_ns, kind, details = record["event"]
            goes_on = None
            if kind == _ZOMBIE and "output_tokens" in details:
                goes_on = int(details["id"]), int(details["output_tokens"])
            self._put(_figure(t_ns), _LINE, "event", (str(kind), goes_on))

    def _put(self, t_ns: int, phase: int, kind: str, payload: Any) -> None:
        self._order += 1
        heapq.heappush(self._pending, (t_ns, phase, self._order, kind, payload))

    def _drain(self, until_ns: int | None) -> None:
        pending = self._pending
        while pending and (until_ns is None or pending[0][0] < until_ns):
            t_ns, _, _, kind, payload = heapq.heappop(pending)
            self._pass(t_ns)
            if kind == "begin":
                self._begin(t_ns, payload)
            elif kind == "end":
                self._end(t_ns, payload)
            elif kind == "received":
                self._receive(t_ns, *payload)
            elif kind == "leak":
                self._leak(t_ns, payload)
            elif kind == "event":
                self._event(*payload)
            else:
                self._leave(*payload, inside=kind == "ended")

    def _pass(self, t_ns: int) -> None:
        """Time passes up to `t_ns`, with everything as it is."""
        if t_ns < self._now_ns:
            self._problems["time goes back"] += 1
        elif t_ns > self._now_ns:
            queue, requests = self._queue, self._requests
            while queue and not ((head := requests.get(queue[0][1])) and head.waiting):
                heapq.heappop(queue)
            inside = len(requests)
            self._levels.add(
                _Piece(
                    self._now_ns,
                    t_ns,
                    inside,
                    inside - self._waiting,
                    self._waiting,
                    self._serial,
                    queue[0][0] if queue else self._serial + 1,
                    self._preempted,
                )
            )
            self._preempted = 0
            self._now_ns = t_ns
            self._met_now = 0
            self._gone_now.clear()

    def _start(self, t_ns: int, number: int, kv_blocks: int) -> None:
        if self._starts:
            self._pass(t_ns)
        else:
            self._first_ns = self._now_ns = t_ns
        if self._requests:
            self._problems["requests inside when the server starts"] += len(self._requests)
            self._requests.clear()
            self._waiting = 0
        self._close_leaks()
        self._starts += 1
        self._start_number = number
        self._kv_blocks = kv_blocks

    def _receive(self, t_ns: int, key: int, planned: int) -> None:
        if key in self._requests:
            self._problems["requests received twice"] += 1
            return
        self._met_now += 1
        self._serial += 1
        self._requests[key] = _Request(self._serial, t_ns, planned)
        self._waiting += 1
        heapq.heappush(self._queue, (self._serial, key))

    def _event(self, kind: str, goes_on: tuple[int, int] | None) -> None:
        self._events[kind] += 1
        if goes_on is not None and (request := self._requests.get(goes_on[0])) is not None:
            request.planned = goes_on[1]

    def _begin(self, t_ns: int, step: "_StepLine") -> None:
        if self._computing:
            self._problems["steps that overlap"] += 1
        self._computing = True
        for key in step.preempted:
            request = self._requests.get(key)
            if request is None or request.waiting:
                self._problems["preempted, but not running"] += key not in self._gone_now
                continue
            request.waiting = True
            self._waiting += 1
            self._preempted += 1
            self._preemptions += 1
            heapq.heappush(self._queue, (request.serial, key))
        for key in step.admitted:
            request = self._requests.get(key)
            if request is None or not request.waiting:
                self._problems["admitted, but not waiting"] += key not in self._gone_now
                continue
            request.waiting = False
            self._waiting -= 1
            if not request.admitted:
                request.admitted = True
                self._queue_ns.append(t_ns - request.t_received_ns)
        counts = [len(self._requests) - self._waiting, self._waiting]
        if step.figures[2:4] != counts and not self._met_now:
            self._problems["steps whose running or waiting is not that of their requests"] += 1

    def _end(self, t_ns: int, step: "_StepLine") -> None:
        begin_ns, _, running, waiting, blocks, gpu_bytes, host_bytes, prefill = step.figures
        self._steps += 1
        self._computing = False
        self._step_ns += t_ns - begin_ns
        self._prefill += prefill
        self._running_max = max(self._running_max, running)
        self._waiting_max = max(self._waiting_max, waiting)
        self._gpu_max = max(self._gpu_max, gpu_bytes)
        self._host_max = max(self._host_max, host_bytes)
        self._kv_max = max(self._kv_max, blocks)
        self._kv_ratio = max(self._kv_ratio, blocks / self._kv_blocks if self._kv_blocks else 0.0)
        emitted = step.emitted
        self._tokens += len(emitted)
        if (piece := self._levels.last) is not None:
            piece.tokens += len(emitted)
        requests = self._requests
        for key in emitted:
            request = requests.get(key)
            if request is None or request.waiting:
                self._problems["tokens for a request that does not run"] += 1
                continue
            request.tokens += 1
            request.t_last_ns = t_ns
            if request.tokens == 1:
                request.t_first_ns = t_ns
                self._first_token_ns.append(t_ns - request.t_received_ns)
        for key, why in step.finished:
            self._leave(key, why, inside=True)
        # Those who go with a step's end are gone before the next begins: that much is written.
        self._met_now = 0
        self._gone_now.clear()

    def _leave(self, key: int, why: str, *, inside: bool) -> None:
        request = self._requests.pop(key, None)
        if request is None:
            self._problems["ended, but not inside"] += 1
            return
        self._met_now += 1
        self._gone_now.add(key)
        self._ended[why] += 1
        if request.waiting:
            self._waiting -= 1
        if inside and why in _LOST and (piece := self._levels.last) is not None:
            piece.lost += 1
        if why in _WHOLE:
            if request.tokens != request.planned:
                self._problems["finished with other than the planned tokens"] += 1
            if request.tokens > 1:
                self._per_token_ns.append((request.t_last_ns - request.t_first_ns) / (request.tokens - 1))

    def _leak(self, t_ns: int, so_far: Mapping[str, float]) -> None:
        against = (
            (t_ns - self._first_ns) / _HOUR_NS,
            self._ended.total(),
            self._tokens,
            self._ended[Finish.CANCELLED.value] + self._events[_ZOMBIE],
        )
        for kind, amount in so_far.items():
            trends = self._trends.get(kind)
            if trends is None:
                trends = self._trends[kind] = (_Trend(), _Trend(), _Trend(), _Trend())
            for trend, x in zip(trends, against, strict=True):
                trend.add(x, amount)

    def _close_leaks(self) -> None:
        for kind, (hours, requests, tokens, disconnects) in sorted(self._trends.items()):
            self._leaks.append(
                LeakRate(
                    start=self._start_number,
                    kind=kind,
                    first=hours.first[1],
                    last=hours.last[1],
                    readings=hours.number,
                    hours=hours.last[0] - hours.first[0],
                    per_hour=hours.slope(),
                    per_request=requests.slope(),
                    per_token=tokens.slope(),
                    per_disconnect=disconnects.slope(),
                )
            )
        self._trends.clear()

    def report(self, lines: int, *, cut: bool, min_hold_ns: int) -> TruthReport:
        """Everything, after the last line."""
        self._drain(None)
        self._levels.close()
        self._close_leaks()
        levels = [_judge(level, total, min_hold_ns) for level, total in sorted(self._levels.sums.items()) if level]
        held = [level for level in levels if level.verdict != "brief"]
        best = max((level.level for level in held if level.verdict == "un-queued"), default=None)
        seconds = (self._now_ns - self._first_ns) / _NS
        return TruthReport(
            largest_unqueued_batch=best,
            exceeded=best is not None and any(level.level > best and level.verdict != "unsettled" for level in held),
            levels=held,
            brief_levels=len(levels) - len(held),
            seconds=seconds,
            lines=lines,
            cut=cut,
            received=self._serial,
            ended=dict(sorted(self._ended.items())),
            inside=len(self._requests),
            tokens=self._tokens,
            tokens_per_second=self._tokens / seconds if seconds else None,
            tokens_per_step_second=self._tokens * _NS / self._step_ns if self._step_ns else None,
            steps=self._steps,
            prefill_tokens=self._prefill,
            preemptions=self._preemptions,
            running_max=self._running_max,
            waiting_max=self._waiting_max,
            kv_blocks_max=self._kv_max,
            kv_ratio_max=self._kv_ratio,
            gpu_bytes_max=self._gpu_max,
            host_bytes_max=self._host_max,
            ttft_seconds=_spread(self._first_token_ns),
            tpot_seconds=_spread(self._per_token_ns),
            queue_seconds=_spread(self._queue_ns),
            starts=self._starts,
            events=dict(sorted(self._events.items())),
            leaks=self._leaks,
            problems={problem: count for problem, count in sorted(self._problems.items()) if count},
        )


def _judge(level: int, total: _LevelSum, min_hold_ns: int) -> Level:
    settled_ns = total.settled_ns
    passed = 0
    median: int | None = None
    for running, ns in sorted(total.running_ns.items()):
        passed += ns
        if 2 * passed >= settled_ns:
            median = running
            break
    waiting = total.waiting_ns / settled_ns if settled_ns else None
    if total.ns < min_hold_ns:
        verdict = "brief"
    elif settled_ns < min_hold_ns or waiting is None:
        verdict = "unsettled"
    elif total.lost:
        verdict = "lost"
    elif total.preemptions:
        verdict = "preempting"
    elif waiting >= WAITING_TOLERANCE:
        verdict = "queued"
    elif median != level:
        verdict = "short"
    else:
        verdict = "un-queued" if total.tokens else "silent"
    return Level(
        level=level,
        seconds=total.ns / _NS,
        settled_seconds=settled_ns / _NS,
        running_p50=median,
        at_level_ratio=total.running_ns.get(level, 0) / settled_ns if settled_ns else None,
        waiting_mean=waiting,
        preemptions=total.preemptions,
        lost=total.lost,
        tokens_per_second=total.tokens * _NS / settled_ns if settled_ns else None,
        verdict=verdict,
    )


def _spread(values_ns: Sequence[float]) -> Spread:
    ordered = sorted(values_ns)
    number = len(ordered)
    if not number:
        return Spread(None, None, None, None, 0)
    p50, p95, p99 = (ordered[max(1, math.ceil(number * percent / 100)) - 1] / _NS for percent in (50, 95, 99))
    return Spread(p50, p95, p99, ordered[-1] / _NS, number)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _lines(report: TruthReport) -> Iterable[str]:
    """The report for people."""
    best = report.largest_unqueued_batch
    more = "" if report.exceeded else " (no larger level was held that queued)"
    yield f"largest un-queued batch   {'none' if best is None else best}{more}"
    ended = ", ".join(f"{count} {_word(why)}" for why, count in report.ended.items()) or "none"
    yield f"requests                  {report.received} received; ended: {ended}; {report.inside} inside"
    yield (
        f"tokens                    {report.tokens} in {report.steps} steps and {report.seconds:.1f} s: "
        f"{_number(report.tokens_per_second)}/s, {_number(report.tokens_per_step_second)}/s while steps computed"
    )
    yield f"KV cache at most          {report.kv_blocks_max} blocks, {report.kv_ratio_max:.1%}"
    yield f"preemptions               {report.preemptions}"
    yield f"memory at most            {report.gpu_bytes_max} bytes on the first card, {report.host_bytes_max} host"
    for label, spread in (
        ("TTFT", report.ttft_seconds),
        ("TPOT", report.tpot_seconds),
        ("queue", report.queue_seconds),
    ):
        yield (
            f"{label + ', seconds':<26}p50 {_number(spread.p50)}, p95 {_number(spread.p95)}, "
            f"p99 {_number(spread.p99)}, max {_number(spread.max)} of {spread.samples}"
        )
    events = ", ".join(f"{count} {_word(kind)}" for kind, count in report.events.items()) or "none"
    yield f"starts                    {report.starts}; events: {events}"
    for leak in report.leaks:
        yield (
            f"leak of {_word(leak.kind)}, start {leak.start}: {leak.first:g} to {leak.last:g} in {leak.hours:.3g} h; "
            f"{_number(leak.per_hour.least_squares)}/hour, {_number(leak.per_request.least_squares)}/request, "
            f"{_number(leak.per_token.least_squares)}/token, {_number(leak.per_disconnect.least_squares)}/disconnect"
        )
    for problem, count in report.problems.items():
        yield f"PROBLEM                   {problem}: {count}"
    if report.cut:
        yield "the last line was cut off and is left out"
    yield ""
    yield "level  seconds  settled  running  all ran  waiting  preempted  lost  tokens/s  verdict"
    for row in report.levels:
        yield (
            f"{row.level:>5}{row.seconds:>9.1f}{row.settled_seconds:>9.1f}{_number(row.running_p50):>9}"
            f"{_number(row.at_level_ratio):>9}{_number(row.waiting_mean):>9}{row.preemptions:>11}{row.lost:>6}"
            f"{_number(row.tokens_per_second):>10}  {row.verdict}"
        )
    if report.brief_levels:
        yield f"{report.brief_levels} more levels were held too briefly to be judged"


def _word(name: str) -> str:
    """A name out of the file, which anybody may have written, as it may go to a terminal."""
    return ascii(name)[1:-1][:60]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m serving.simulator.truth FILE [--json]`; 0, or 1 when the file contradicts itself, or 4 unreadable."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.simulator.truth",
        description="Computes from a simulator's truth file what was true, for comparison with what was measured.",
    )
    parser.add_argument("file", type=Path, help="as written by plimsoll simulate --truth")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument(
        "--min-hold", type=float, default=MIN_HOLD_SECONDS, metavar="SECONDS", help="time that a level needs"
    )
    parser.add_argument(
        "--dip", type=float, default=DIP_SECONDS, metavar="SECONDS", help="shorter dips are no level of their own"
    )
    asked = parser.parse_args(arguments)
    try:
        with asked.file.open(encoding="utf-8", errors="replace") as file:
            report = read_truth(file, min_hold_seconds=asked.min_hold, dip_seconds=asked.dip, name=str(asked.file))
    except OSError as error:
        print(f"{asked.file}: cannot be read: {error.strerror or error}", file=sys.stderr)
        return RecordError.exit_code
    except PlimsollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    text = json.dumps(report.as_json(), allow_nan=False) if asked.json else "\n".join(_lines(report))
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader went away, as `head` does; what it wanted to see it has seen.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
