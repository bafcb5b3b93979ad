"""How long the steps of a real server take, learned from one recorded run of it.

The coefficients of a step cost are what the simulator needs to stand in for a server that was measured: fit them on
one run, and it predicts others of the same server, with other prompts, answers and loads.

Method. Every request is a stopwatch. Between its first and its last token a server with continuous batching took
exactly as many steps as tokens came out, and what those steps had to do is what all requests together did in that
time, which their own times tell. A step's cost is linear in its coefficients (`spec.Work`), so that each request gives
one linear equation. The time to first token gives another, for requests that found a free place and met no other
prompt on the way: the step in progress when it arrived, then the steps that take in its prompt, and what the server
spends outside the engine. The equations, each divided by its own time, are solved by least squares without negative
coefficients (sequential coordinate-wise descent: Franc, Hlavac, Navara, "Sequential coordinate-wise algorithm for the
non-negative least squares problem", CAIP 2005). Those that miss by more than three times the median error are left
out, and the rest is solved again: somebody else had the machine at that moment.

Assumptions. Tokens of one request come evenly between its first and last, except while prompts are processed (which is
known once prompts have a cost, so that everything is solved three times). A prompt fits the token budget of a step.
Nothing was preempted and nothing failed in the run. A request arrives as a step begins, as it does in a closed loop,
where the step after the one that ended an answer is under way when the next request comes.

Data. `RequestRecord`s of a run with at least two different numbers of requests in flight and prompts of different
lengths; a stage of one request at a time is worth most. 100 requests give the coefficients within a few percent on a
quiet machine; fewer than 20 are refused.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from serving.clock import NS
from serving.errors import ConfigError
from serving.records import GOOD, RequestRecord
from serving.simulator.roofline import Affine
from serving.simulator.spec import StepCost, Work

__all__ = ["Fit", "StepTable", "fit_affine", "fit_table"]

MIN_REQUESTS: Final = 20
MIN_STEPS_OF_A_SIZE: Final = 50
"""Steps with so many sequences that a table needs to have seen to give them an entry of their own."""
SPARED_ERRORS: Final = 3.0
"""Equations that miss by more than this many median errors are left out."""
SAME_STEP_SECONDS: Final = 0.002
"""The tokens of one step reach the client within this."""
TURNAROUND_SECONDS: Final = 0.005
"""A request that follows the end of another within this was set off by it."""
PASSES: Final = 3
"""The decode clock needs to know what prompts cost, and what prompts cost is found with the decode clock."""
ROUNDS: Final = 4
SWEEPS: Final = 4000


@dataclass(frozen=True, slots=True)
class StepTable:
    """A step cost whose decode part is a table, for engines whose kernels like some batch sizes and not others.

    llama.cpp on a CPU is one: its matrix kernels take rows by the four, and three sequences cost more than four.

    Attributes:
        sequences_seconds: a step that decodes n sequences, by n; entry 0 is for one that only processes prompts.
            Beyond the table the step grows as from its first to its last entry.
        prefill_token_seconds: per prompt token.
        prefill_context_seconds: per token of context that a prompt token attends to.
        decode_context_seconds: per token in the KV cache of a sequence that gets a token.
    """

    sequences_seconds: tuple[float, ...]
    prefill_token_seconds: float
    prefill_context_seconds: float
    decode_context_seconds: float

    def seconds(self, work: Work) -> float:
        """Seconds for one step."""
        table, size = self.sequences_seconds, work.decode_sequences
        beyond = size - len(table) + 1
        decode = table[size] if beyond <= 0 else table[-1] + beyond * (table[-1] - table[0]) / (len(table) - 1)
        return (
            decode
            + self.prefill_token_seconds * work.prefill_tokens
            + self.prefill_context_seconds * work.prefill_context_tokens
            + self.decode_context_seconds * work.decode_context_tokens
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """What a run tells about its server.

    Attributes:
        cost: how long a step takes.
        front_end_seconds: between a request's sending and its coming to the scheduler, and back: what the server's
            front end adds to the time to first token. Only requests that found the server idle tell; without any it is
            0, and what the front end takes beyond a step in progress is put down to the prompts.
        equations: how many could be made of the run.
        median_error_ratio: half of them miss by less.
    """

    cost: StepCost
    front_end_seconds: float
    equations: int
    median_error_ratio: float


def fit_affine(requests: Iterable[RequestRecord], *, slots: int, prompt_steps: int = 1) -> Fit:
    """Fit a step cost that is linear in everything.

    Args:
        requests: of one run; those that failed count for nothing.
        slots: requests that run at once; more than these wait.
        prompt_steps: steps that a short prompt takes (2 for llama.cpp where it keeps context checkpoints).

    Raises:
        ConfigError: the run holds too little.
    """

    def rows_of(equations: Sequence[_Equation]) -> list[tuple[float, ...]]:
        return [
            (sum(each.steps), sum(n * steps for n, steps in enumerate(each.steps)), *each.others) for each in equations
        ]

    (fixed, sequence, token, context, decode_context, front_end), count, error = _fitted(
        requests, slots, prompt_steps, rows_of
    )
    cost = Affine(
        fixed_seconds=fixed,
        prefill_token_seconds=token,
        prefill_context_seconds=context,
        decode_sequence_seconds=sequence,
        decode_context_seconds=decode_context,
    )
    return Fit(cost, front_end, count, error)


def fit_table(requests: Iterable[RequestRecord], *, slots: int, prompt_steps: int = 1) -> Fit:
    """Fit a step cost with an entry for each number of sequences. Arguments and errors are those of `fit_affine`.

    Numbers that the run hardly had are put between their neighbours.
    """
    seen: list[int] = []

    def rows_of(equations: Sequence[_Equation]) -> list[tuple[float, ...]]:
        steps = [sum(each.steps[n] for each in equations) for n in range(slots + 1)]
        seen[:] = [n for n in range(slots + 1) if n == 0 or steps[n] >= MIN_STEPS_OF_A_SIZE]
        return [(*(each.steps[n] for n in seen), *each.others) for each in equations]

    found, count, error = _fitted(requests, slots, prompt_steps, rows_of)
    token, context, decode_context, front_end = found[len(seen) :]
    table = _filled(dict(zip(seen, found, strict=False)), slots)
    return Fit(StepTable(table, token, context, decode_context), front_end, count, error)


def _filled(known: dict[int, float], slots: int) -> tuple[float, ...]:
    """The table with every entry: straight lines between those that are known, the last one up to the end."""
    sizes = sorted(known)
    table = []
    for n in range(slots + 1):
        at = bisect_left(sizes, n)
        if at == len(sizes):
            table.append(known[sizes[-1]])
        elif sizes[at] == n:
            table.append(known[n])
        else:
            low, high = sizes[at - 1], sizes[at]
            table.append(known[low] + (known[high] - known[low]) * (n - low) / (high - low))
    return tuple(table)


def _fitted(
    requests: Iterable[RequestRecord],
    slots: int,
    prompt_steps: int,
    rows_of: Callable[[Sequence["_Equation"]], list[tuple[float, ...]]],
) -> tuple[list[float], int, float]:
    """Coefficients (the last four are those of `_Equation.others`), number of equations, median error."""
    served = sorted(filter(None, map(_served, requests)))
    if len(served) < MIN_REQUESTS:
        raise ConfigError(f"{len(served)} answered requests are too few to fit a step cost; {MIN_REQUESTS} are needed")
    found = [0.0] * 4
    for _ in range(PASSES):
        token, context = found[-4], found[-3]
        lengths = [token * each.uncached_tokens + context * _causal(each.uncached_tokens) for each in served]
        clock = _DecodeClock((each.first, length) for each, length in zip(served, lengths, strict=True))
        equations = _equations(served, clock, slots, prompt_steps)
        found, error = _solve(rows_of(equations), equations)
    return found, len(equations), error


# ---- equations


@dataclass(frozen=True, slots=True, order=True)
class _Served:
    """A request that was answered. Times in seconds; in order of sending."""

    sent: float
    first: float
    last: float
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int

    def progress(self, moment: float) -> float:
        """Tokens after the first that had come out at a moment."""
        if self.last <= self.first:
            return 0.0
        share = (min(max(moment, self.first), self.last) - self.first) / (self.last - self.first)
        return share * (self.output_tokens - 1)

    def context(self, since: float, until: float) -> float:
        """What the tokens decoded in a stretch attended to, summed."""
        before, after = self.progress(since), self.progress(until)
        return (after - before) * (self.prompt_tokens + (before + after) / 2 + 1)


class _DecodeClock:
    """A clock that stands still while a prompt is processed: tokens come evenly by it.

    Args:
        pauses: (end, length) of each in seconds.
    """

    def __init__(self, pauses: Iterable[tuple[float, float]]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._lost: list[float] = [0.0]
        for begin, end in sorted((end - length, end) for end, length in pauses):
            if self._ends and begin <= self._ends[-1]:
                self._lost[-1] += max(0.0, end - self._ends[-1])
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)
                self._lost.append(self._lost[-1] + end - begin)

    def at(self, moment: float) -> float:
        """What it shows at a moment."""
        before = bisect_right(self._begins, moment)
        over = max(0.0, self._ends[before - 1] - moment) if before else 0.0
        return moment - self._lost[before] + over

    def of(self, request: _Served) -> _Served:
        """A request with this clock's times."""
        return replace(request, sent=self.at(request.sent), first=self.at(request.first), last=self.at(request.last))


@dataclass(frozen=True, slots=True)
class _Equation:
    """seconds = cost of `steps[n]` steps with n sequences each + cost of `others`.

    `others`: prompt tokens, their context, decode context, and how often the front end is passed.
    """

    seconds: float
    steps: tuple[float, ...]
    others: tuple[float, float, float, float]


def _equations(served: Sequence[_Served], clock: _DecodeClock, slots: int, prompt_steps: int) -> list[_Equation]:
    sent = [request.sent for request in served]
    longest = max(request.last - request.sent for request in served)
    found = []
    for request in served:
        near = served[bisect_left(sent, request.sent - longest) : bisect_left(sent, request.last)]
        others = [other for other in near if other is not request and other.last > request.sent - TURNAROUND_SECONDS]
        if request.last > request.first:
            found.append(_decoding(request, others, clock, slots))
        if (first := _first_token(request, others, clock, slots, prompt_steps)) is not None:
            found.append(first)
    if len({n for each in found for n in range(1, slots + 1) if each.steps[n]}) < 2:
        raise ConfigError("all steps of this run had the same number of sequences; record a run with several loads")
    return found


def _served(record: RequestRecord) -> _Served | None:
    sent, first, last = record.t_send_ns, record.t_first_ns, record.t_last_ns
    prompt, output = record.prompt_tokens, record.completion_tokens
    if record.outcome not in GOOD or not output or prompt is None or sent is None or first is None or last is None:
        return None
    return _Served(sent / NS, first / NS, last / NS, prompt, prompt - (record.cached_tokens or 0), output)


def _decoding(request: _Served, others: Sequence[_Served], clock: _DecodeClock, slots: int) -> _Equation:
    """From its first token to its last."""
    decoding = [other for other in others if other.first < request.last and other.last > request.first]
    prompts = [other.uncached_tokens for other in decoding if other.first > request.first + SAME_STEP_SECONDS]
    own, beside = clock.of(request), [clock.of(other) for other in decoding]
    since, until = own.first, own.last
    cuts = sorted({since, until, *(t for other in beside for t in (other.first, other.last) if since < t < until)})
    steps = [0.0] * (slots + 1)
    for low, high in pairwise(cuts):
        together = 1 + sum(1 for other in beside if other.first < (low + high) / 2 < other.last)
        steps[min(together, slots)] += own.progress(high) - own.progress(low)
    context = sum(each.context(since, until) for each in (own, *beside))
    costs = (sum(prompts), sum(map(_causal, prompts)), context, 0.0)
    return _Equation(request.last - request.first, tuple(steps), costs)


def _first_token(
    request: _Served, others: Sequence[_Served], clock: _DecodeClock, slots: int, prompt_steps: int
) -> _Equation | None:
    """From its sending to its first token, where nothing but decoding was in its way."""
    inside = [other for other in others if other.sent < request.sent and other.last > request.sent]
    until = request.first + SAME_STEP_SECONDS
    if len(inside) >= slots or any(request.sent < other.first for other in inside):
        return None
    if any(request.sent < other.first <= until for other in others):
        return None
    steps = [0.0] * (slots + 1)
    tokens = request.uncached_tokens
    if not inside:
        steps[0] = prompt_steps
        return _Equation(request.first - request.sent, tuple(steps), (tokens, _causal(tokens), 0.0, 1.0))
    # The step in progress began when the answer that set this request off had ended.
    began = max((other.last for other in others if other.last <= request.sent), default=request.sent)
    steps[len(inside)] = prompt_steps + 1
    now = clock.at(request.sent)
    held = sum(other.prompt_tokens + clock.of(other).progress(now) for other in inside)
    costs = (tokens, _causal(tokens), held * (prompt_steps + 1), 0.0)
    return _Equation(request.first - began, tuple(steps), costs)


def _causal(tokens: int) -> float:
    """Context of a prompt that is processed at once."""
    return tokens * (tokens + 1) / 2


# ---- solving


def _solve(rows: Sequence[Sequence[float]], equations: Sequence[_Equation]) -> tuple[list[float], float]:
    """Coefficients for the columns of `rows`, and the median relative error."""
    relative = [[value / each.seconds for value in row] for row, each in zip(rows, equations, strict=True)]
    kept = relative
    for _ in range(ROUNDS):
        found = _least_squares(kept)
        errors = [abs(sum(c * value for c, value in zip(found, row, strict=True)) - 1) for row in relative]
        median = statistics.median(errors)
        kept = [row for row, error in zip(relative, errors, strict=True) if error <= SPARED_ERRORS * median + 1e-9]
    return found, median


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """The non-negative x for which the rows times x come closest to 1."""
    columns = list(zip(*rows, strict=True))
    # Columns of equal length: coefficients differ by six orders of magnitude, and the descent would crawl.
    scales = [sum(value * value for value in column) ** 0.5 or 1.0 for column in columns]
    size = range(len(columns))
    gram = [
        [sum(a * b for a, b in zip(columns[i], columns[j], strict=True)) / (scales[i] * scales[j]) for j in size]
        for i in size
    ]
    slope = [-sum(column) / scale for column, scale in zip(columns, scales, strict=True)]
    x = [0.0] * len(columns)
    for _ in range(SWEEPS):
        moved = 0.0
        for i in size:
            if not gram[i][i]:
                continue
            new = max(0.0, x[i] - slope[i] / gram[i][i])
            change = new - x[i]
            if change:
                x[i] = new
                row = gram[i]
                for j in size:
                    slope[j] += change * row[j]
                moved = max(moved, abs(change))
        if moved < 1e-12:
            break
    return [value / scale for value, scale in zip(x, scales, strict=True)]
