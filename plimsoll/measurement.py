"""Measuring a server that runs: the same prompts each time, after a warm-up, at one request and at many at once.

Prompts of a `Load` are the same from one measurement to the next but for the words that open them: these are drawn
anew, so that a prefix cache that still holds the last measurement's prompts cannot answer for the model. All have one
length, as have all answers; what varies between rounds is then the machine. Load is pushed by the load generator's own
process (`loadgen.driver`); what the server, its cards and its processes show meanwhile comes from the sampler.

Also here: one request near the context limit, a burst near the batch limit, and the quality probe, which compares
greedy answers in memory and keeps only digests, positions and drifts of them.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any, Final

import aiohttp

from alerts.figures import Figure, figure_of
from loadgen.driver_link import ClientHealth, DriverConfig, DriverLink, TimeLimits
from loadgen.prompts import Calibration, calibrate, question
from loadgen.tally import prefill_speed, tpot_seconds, ttft_seconds
from loadgen.workloads import MIN_OUTPUT_TOKENS, MIN_PROMPT_TOKENS, Workload
from monitor.gpu import gpu_reader
from monitor.http import BaseUrl, converse, open_session, parse_url
from monitor.process import ServerProcesses
from monitor.sampler import Sampler, Tick, target_reader
from serving.clock import NS, SystemClock
from serving.conversation import Conversation, HttpAnswer, HttpRequest
from serving.engines import ENGINES, TargetFacts, probe
from serving.errors import ConfigError, TargetError
from serving.records import GOOD, Event, Outcome, RequestRecord
from serving.smoke import smoke
from serving.stream import Api, message_of

__all__ = [
    "Answer",
    "Drift",
    "Load",
    "Measurement",
    "Meter",
    "Proof",
    "ask_quality",
    "compare_answers",
    "open_meter",
]

NEAR_LIMIT_SHARE = 0.95
"""Share of the context that the request near its limit fills, prompt and answer together."""
UNMEASURED_SHARE = 0.7
"""The same where the server reports no usage, so that prompt lengths are only assumed."""
NEAR_LIMIT_OUTPUT_TOKENS = 16
MAX_BURST = 4096
_REFUSED_TICKS = 3
_STANDSTILL_SECONDS = 2.0
_SEND_LAG_SHARE = 0.05
_SEND_LAG_FLOOR_SECONDS = 0.005
_LATE_ALLOWANCE = 3
_CACHED_SHARE = 0.05
_CONTEXT_SHARE = 0.9
_GRACE_SECONDS = 5.0
_SWAP_BYTES = 64 * 2**20
"""Growth of swap below this is the host's own housekeeping."""


@dataclass(frozen=True, slots=True)
class Load:
    """The fixed load. Two measurements compare when their loads are equal.

    Attributes:
        prompt_tokens: length of every prompt, by calibration.
        output_tokens: length of every answer, where the engine can be told to go on.
        concurrency: requests at once at the second level; the first level is one.
        rounds: parts into which the counted requests of a level are divided, to see the spread.
        requests_per_round: counted requests of a round; at least one for each request at once.
        seed: which prompts.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrency: int = 8
    rounds: int = 3
    requests_per_round: int = 4
    seed: int = 1

    def document(self) -> dict[str, Any]:
        """As the ledger holds it."""
        return asdict(self)

    def fitted(self, context_tokens: int | None) -> "Load":
        """This load, shortened in proportion if it does not fit into a context.

        Raises:
            ConfigError: the context is too small for any load.
        """
        if context_tokens is None:
            return self
        room = int(_CONTEXT_SHARE * context_tokens)
        if self.prompt_tokens + self.output_tokens <= room:
            return self
        if room < 2 * (MIN_PROMPT_TOKENS + MIN_OUTPUT_TOKENS):
            raise ConfigError(f"a context of {context_tokens} tokens is too small to measure in")
        ratio = room / (self.prompt_tokens + self.output_tokens)
        prompt = max(MIN_PROMPT_TOKENS, int(self.prompt_tokens * ratio))
        return replace(self, prompt_tokens=prompt, output_tokens=max(MIN_OUTPUT_TOKENS, room - prompt))

    def levels(self) -> tuple[int, ...]:
        """Requests at once, one level after the other."""
        return (1,) if self.concurrency == 1 else (1, self.concurrency)

    def round_size(self, level: int) -> int:
        """Counted requests in one round of a level."""
        return max(self.requests_per_round, level)

    def warmup(self, level: int) -> int:
        """Requests of a level before the first counted one."""
        return max(2, level)


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of requests that only have to be answered.

    Attributes:
        name: `near_limit` or `burst`.
        asked: requests sent at once.
        answered: those that ended well.
        tokens: prompt tokens of the longest, as the server counted them; None when it did not.
        seconds: from the first byte sent to the last answer's end.
        first_error: the server's own words, None when all were answered.
        died: why the server is taken to be gone, None while it lives.
        held_back_at: most requests that were seen to run while others waited; None when none waited in any sample.
    """

    name: str
    asked: int
    answered: int
    tokens: int | None
    seconds: float
    first_error: str | None
    died: str | None
    held_back_at: int | None = None

    @property
    def passed(self) -> bool:
        """All were answered, and the server lives."""
        return self.answered == self.asked and self.died is None

    def say(self) -> str:
        """The outcome in words."""
        what = "the request near the context limit" if self.name == "near_limit" else f"a burst of {self.asked}"
        if self.passed:
            return f"{what} was answered"
        failure = f"{what}: {self.asked - self.answered} of {self.asked} not answered"
        return "; ".join(part for part in (failure, self.first_error, self.died) if part)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured.

    Attributes:
        load: the load.
        figures: as of `alerts.figures.RULES`, speeds with `@N` behind.
        outcomes: how requests ended, warm-up included.
        prompt_tokens: the server's count over the counted requests; None when an answer came without one.
        completion_tokens: the same of answers.
        first_error: the server's own words in the first failure.
        died: why the server is taken to be gone, None while it lives.
        swap_bytes: growth of swap meanwhile; None where it is not seen.
        invalid: why the figures cannot be trusted, empty when they can.
        warnings: what a reader must know.
    """

    load: Load
    figures: Mapping[str, Figure]
    outcomes: Mapping[str, int]
    prompt_tokens: int | None
    completion_tokens: int | None
    first_error: str | None
    died: str | None
    swap_bytes: float | None
    invalid: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


# ---- the quality probe

_QUALITY_PROMPTS: Final = (
    "Name the four seasons in order, beginning with spring.",
    "What is 17 plus 25? Answer with the number and explain in one sentence.",
    "Describe in two sentences how rain forms.",
    "List three things that float on water and say why each does.",
    "Write one sentence about a ship that is loaded too deep.",
    "Count from eleven to twenty in words.",
)
_QUALITY_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer, held in memory for comparison only.

    Attributes:
        pieces: its tokens, or its characters where the engine gives no tokens.
        logprobs: log-probability of each piece, None where the engine gives none.
    """

    pieces: tuple[str, ...] = field(repr=False)
    logprobs: tuple[float, ...] | None = field(default=None, repr=False)

    def digest(self) -> str:
        """Tells two answers apart without holding either."""
        return hashlib.sha256("\0".join(self.pieces).encode("utf-8", "replace")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Drift:
    """How far greedy answers to fixed prompts moved.

    Attributes:
        prompts: how many were compared.
        identical: how many answers are the same to the last piece.
        agreement_ratio: share of pieces before the first difference, over all prompts. After one different token greedy
            answers go their own ways, so this says how early they part, not how many tokens differ.
        first_differences: per prompt the position of the first difference, None where there is none.
        logprob_drift: mean absolute difference of log-probabilities over the common beginnings, in nats; None without.
        digests: per prompt, before and after.
    """

    prompts: int
    identical: int
    agreement_ratio: float
    first_differences: tuple[int | None, ...]
    logprob_drift: float | None
    digests: tuple[tuple[str, str], ...]

    def document(self) -> dict[str, Any]:
        """As the ledger holds it."""
        return {
            "prompts": self.prompts,
            "identical": self.identical,
            "agreement_ratio": self.agreement_ratio,
            "first_differences": list(self.first_differences),
            "logprob_drift": self.logprob_drift,
            "digests": [list(pair) for pair in self.digests],
        }

    def say(self) -> str:
        """The drift in words."""
        told = "" if self.logprob_drift is None else f", log-probabilities moved by {self.logprob_drift:.3g} nats"
        agreed = f"answers agree over {self.agreement_ratio:.0%} of their length"
        return f"{self.identical} of {self.prompts} greedy answers are unchanged, {agreed}{told}"


def ask_quality(model: str, api: Api, *, timeout_s: float = 120.0) -> Conversation[tuple[Answer, ...]]:
    """Ask the fixed prompts one at a time, greedily, with log-probabilities where the engine gives them.

    Raises:
        TargetError: a prompt was not answered.
    """
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    extra: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if api == "chat" else {"logprobs": 1}
    answers = []
    for prompt in _QUALITY_PROMPTS:
        body = question(model, api, prompt, _QUALITY_TOKENS) | {"temperature": 0, "seed": 0, "stream": False}
        answer = yield HttpRequest(path, body | extra, timeout_s)
        if answer.status in (400, 422) and extra:
            extra = {}  # a server without log-probabilities says so by refusing them
            answer = yield HttpRequest(path, body, timeout_s)
        answers.append(_read_answer(answer, path))
    return tuple(answers)


def _read_answer(answer: HttpAnswer, path: str) -> Answer:
    if answer.error is not None or answer.status != 200:
        why = answer.error or f"HTTP {answer.status}: {message_of(answer.json()) or 'no message'}"
        raise TargetError(f"the quality probe was not answered: POST {path}: {why[:300]}")
    page = answer.json()
    choices = page.get("choices") if isinstance(page, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise TargetError(f"the quality probe was not answered: POST {path} gave no choices")
    told = choice.get("logprobs")
    told = told if isinstance(told, dict) else {}
    listed = told.get("content")
    if isinstance(listed, list):
        entries = [(item.get("token"), item.get("logprob")) for item in listed if isinstance(item, dict)]
    else:
        tokens, values = told.get("tokens"), told.get("token_logprobs")
        told_both = isinstance(tokens, list) and isinstance(values, list)
        entries = list(zip(tokens or (), values or (), strict=False)) if told_both else []
    good = [(token, value) for token, value in entries if isinstance(token, str) and isinstance(value, int | float)]
    if good and len(good) == len(entries):
        return Answer(tuple(token for token, _ in good), tuple(float(value) for _, value in good))
    message = choice.get("message")
    parts = (
        [message.get(name) for name in ("reasoning_content", "reasoning", "content")]
        if isinstance(message, dict)
        else [choice.get("text")]
    )
    return Answer(tuple("".join(part for part in parts if isinstance(part, str))))


def compare_answers(before: Sequence[Answer], after: Sequence[Answer]) -> Drift:
    """Hold the answers of two probes against each other.

    Raises:
        ValueError: the probes asked different numbers of prompts.
    """
    firsts: list[int | None] = []
    agreed = longest = 0
    moved: list[float] = []
    for old, new in zip(before, after, strict=True):
        same = 0
        for left, right in zip(old.pieces, new.pieces, strict=False):
            if left != right:
                break
            same += 1
        length = max(len(old.pieces), len(new.pieces))
        firsts.append(None if same == length else same)
        agreed, longest = agreed + same, longest + length
        if old.logprobs is not None and new.logprobs is not None:
            moved += [abs(a - b) for a, b in zip(old.logprobs[:same], new.logprobs[:same], strict=True)]
    return Drift(
        prompts=len(firsts),
        identical=sum(first is None for first in firsts),
        agreement_ratio=agreed / longest if longest else 1.0,
        first_differences=tuple(firsts),
        logprob_drift=fmean(moved) if moved else None,
        digests=tuple((old.digest(), new.digest()) for old, new in zip(before, after, strict=True)),
    )


# ---- the meter


@contextlib.asynccontextmanager
async def open_meter(
    url: str,
    *,
    model: str | None = None,
    gpu: str = "auto",
    pid: int | None = None,
    kv_cache_capacity_tokens: int | None = None,
    interval_seconds: float = 0.5,
) -> AsyncIterator["Meter"]:
    """A meter on the server at `url`, which is looked at until the context ends.

    Args:
        url: its base URL.
        model: the name to ask for; the server's first when None.
        gpu: as of `monitor.gpu.gpu_reader`.
        pid: the server's process, where it cannot be found by its port.
        kv_cache_capacity_tokens: where the caller knows it and the server does not tell.
        interval_seconds: between two samples.

    Raises:
        ConfigError: an argument cannot be used.
        TargetError: the server does not answer, or does not generate.
    """
    base = parse_url(url)
    async with open_session() as session:
        facts = await converse(session, base.text, probe(model, where=base.text))
        answer = await converse(session, base.text, smoke(facts.model))
        if not answer.generated:
            raise TargetError(f"{base.text} answers but does not generate: {answer.reason}")
        calibration = await converse(session, base.text, calibrate(facts.model, answer.api, facts.context_tokens))
        capacity = facts.kv_cache_capacity_tokens or kv_cache_capacity_tokens
        here = base.is_loopback or pid is not None
        reader = gpu_reader("none" if gpu == "auto" and not here else gpu)
        clock = SystemClock()
        sampler = Sampler(
            clock,
            target_reader(session, base.text, ENGINES[facts.engine], kv_cache_capacity_tokens=capacity),
            gpu=reader,
            processes=ServerProcesses(base.port, pid=pid) if here else None,
            interval_seconds=interval_seconds,
        )
        meter = Meter(base, facts, answer.api, calibration, clock, session, sampler)
        sampler.add_listener(meter.on_tick)
        sampler.add_event_listener(meter.on_event)
        task = asyncio.create_task(sampler.run())
        try:
            yield meter
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await reader.close()


@dataclass(slots=True)
class _Driven:
    """What one run of the driver gave."""

    records: dict[int, RequestRecord] = field(default_factory=dict)
    health: list[ClientHealth] = field(default_factory=list)
    driver_died: str | None = None


class Meter:
    """One running server and the means to measure it; made by `open_meter`.

    Attributes:
        base: where it is.
        facts: what it says of itself.
        api: the request form that it answers.
        calibration: its tokens to our words.
        ticks: all samples so far.
        died: why it is taken to be gone, None while it lives.
    """

    def __init__(
        self,
        base: BaseUrl,
        facts: TargetFacts,
        api: Api,
        calibration: Calibration,
        clock: SystemClock,
        session: aiohttp.ClientSession,
        sampler: Sampler,
    ) -> None:
        self.base = base
        self.facts = facts
        self.api = api
        self.calibration = calibration
        self.ticks: list[Tick] = []
        self.died: str | None = None
        self._clock = clock
        self._session = session
        self._sampler = sampler
        self._refused = 0

    def on_tick(self, tick: Tick) -> None:
        """Take in one sample."""
        self.ticks.append(tick)
        self._refused = self._refused + 1 if not tick.up and "refused" in (tick.failure or "") else 0
        if self._refused >= _REFUSED_TICKS and self.died is None:
            self.died = "the server refuses connections"

    def on_event(self, event: Event) -> None:
        """Hear of a restart: whatever is being measured was not one server."""
        if event.kind == "restart" and self.died is None:
            self.died = f"the server restarted meanwhile ({event.text})"

    async def near_limit(self, *, limit_seconds: float = 600.0) -> Proof | None:
        """One request whose prompt and answer nearly fill the context; None where the context is not known."""
        context = self.facts.context_tokens
        if context is None:
            return None
        share = NEAR_LIMIT_SHARE if self.calibration.measured else UNMEASURED_SHARE
        output = min(NEAR_LIMIT_OUTPUT_TOKENS, max(MIN_OUTPUT_TOKENS, context // 8))
        prompt = max(MIN_PROMPT_TOKENS, int(share * context) - output)
        workload = _fixed("near_limit", prompt, output)
        return await self._prove("near_limit", workload, 1, seed=0, limit_seconds=limit_seconds)

    async def burst(self, requests: int, load: Load, *, limit_seconds: float = 600.0) -> Proof:
        """`requests` of the load at once, at most `MAX_BURST`: each has to be answered."""
        workload = _fixed("burst", load.prompt_tokens, load.output_tokens)
        count = min(requests, MAX_BURST)
        return await self._prove("burst", workload, count, seed=load.seed, limit_seconds=limit_seconds)

    async def measure(self, load: Load, *, limit_seconds: float = 900.0) -> Measurement:
        """Measure a load: at each level a warm-up, then the counted rounds.

        Args:
            load: what to ask; it has to fit the context.
            limit_seconds: for each level.
        """
        began = len(self.ticks)
        await self._look()
        warnings = self._other_traffic()
        figures: dict[str, Figure] = {}
        outcomes: Counter[str] = Counter()
        counted: list[RequestRecord] = []
        invalid: list[str] = []
        first_error: str | None = None
        for level in load.levels():
            if self.died is not None:
                break
            warmup, size = load.warmup(level), load.round_size(level)
            wanted = warmup + size * load.rounds
            workload = _fixed("measure", load.prompt_tokens, load.output_tokens)
            driven = await self._drive(workload, level, wanted, seed=load.seed, limit_seconds=limit_seconds)
            records = [driven.records[index] for index in sorted(driven.records) if index < wanted]
            outcomes.update(record.outcome.value for record in records)
            first_error = first_error or _first_error(records)
            rounds = [
                [record for record in records if start <= record.request_id < start + size]
                for start in range(warmup, wanted, size)
            ]
            counted += [record for part in rounds for record in part]
            figures |= _level_figures(level, rounds)
            invalid += _client_problems(level, wanted, records, driven)
        await self._look()
        seen = self.ticks[began:]
        figures |= _peaks(seen)
        failed = sum(record.outcome not in GOOD for record in counted)
        figures["failures"] = Figure(failed, failed, failed, len(counted))
        return Measurement(
            load=load,
            figures=figures,
            outcomes=dict(outcomes),
            prompt_tokens=_total(record.prompt_tokens for record in counted),
            completion_tokens=_total(record.completion_tokens for record in counted),
            first_error=first_error,
            died=self.died,
            swap_bytes=self.swap_growth_bytes(),
            invalid=tuple(invalid),
            warnings=(*warnings, *_cache_warnings(counted)),
        )

    async def ask_quality(self) -> tuple[Answer, ...]:
        """The greedy answers to the fixed prompts.

        Raises:
            TargetError: a prompt was not answered.
        """
        return await converse(self._session, self.base.text, ask_quality(self.facts.model, self.api))

    async def idle_kv_ratio(self) -> float | None:
        """KV-cache use as of a new sample; None where it is not told."""
        tick = await self._look()
        return tick.values.get("kv_cache_usage_ratio")

    def swap_growth_bytes(self) -> float | None:
        """How far the swap of the server's processes, or else the host's, rose above the first sample; None unseen."""

        def of(tick: Tick) -> float | None:
            name = "process_swap_bytes"
            swaps = [values[name] for values in tick.processes.values() if name in values]
            return sum(swaps) if swaps else tick.values.get("host_swap_used_bytes")

        values = [value for tick in self.ticks if (value := of(tick)) is not None]
        return max(values) - values[0] if values else None

    # ---- within

    async def _look(self) -> Tick:
        """One sample now."""
        tick = await self._sampler.read_once()
        self.on_tick(tick)
        return tick

    def _other_traffic(self) -> tuple[str, ...]:
        running = self.ticks[-1].values.get("requests_running")
        if running is None:
            return ("what was running before the measurement is not known",)
        return (f"{running:g} requests of others were running before the measurement",) if running > 0 else ()

    async def _prove(self, name: str, workload: Workload, count: int, *, seed: int, limit_seconds: float) -> Proof:
        began = len(self.ticks)
        driven = await self._drive(workload, count, count, seed=seed, limit_seconds=limit_seconds, once=True)
        busy = [tick.values for tick in self.ticks[began:] if tick.values.get("requests_waiting")]
        held_back_at = max(
            (round(values["requests_running"]) for values in busy if "requests_running" in values), default=None
        )
        records = [record for index, record in driven.records.items() if index < count]
        sent = [record.t_send_ns for record in records if record.t_send_ns is not None]
        ends = [record.t_end_ns for record in records]
        await self._look()
        for _ in range(_REFUSED_TICKS):  # a server that is gone shows it within these
            if self.ticks[-1].up or self.died is not None:
                break
            await self._clock.sleep(0.2)
            await self._look()
        return Proof(
            name,
            count,
            sum(record.outcome in GOOD for record in records),
            max((record.prompt_tokens for record in records if record.prompt_tokens is not None), default=None),
            (max(ends) - min(sent)) / NS if sent and ends else 0.0,
            _first_error(records) or driven.driver_died,
            self.died,
            held_back_at,
        )

    async def _drive(
        self,
        workload: Workload,
        offered: int,
        wanted: int,
        *,
        seed: int,
        limit_seconds: float,
        once: bool = False,
    ) -> _Driven:
        """Keep `offered` requests in flight until the first `wanted` have ended, the limit has passed or all is lost.

        With `once` each user asks one time only. Requests beyond `wanted` are issued in between and are not looked at:
        the wanted ones are the same prompts each time.
        """
        driven = _Driven()

        def on_died(code: int, words: str) -> None:
            driven.driver_died = f"the load generator's process ended ({code})" + (f": {words[-300:]}" if words else "")

        link = await DriverLink.start(
            DriverConfig(
                base_url=self.base.text,
                model=self.facts.model,
                api=self.api,
                workload=workload,
                calibration=self.calibration,
                seed=seed,
                ignore_eos=ENGINES[self.facts.engine].dialect.supports_ignore_eos,
                anchor_ns=self._clock.anchor_ns,
                limits=TimeLimits(first_byte_seconds=limit_seconds, request_seconds=limit_seconds),
            ),
            on_record=lambda record: driven.records.__setitem__(record.request_id, record),
            on_health=driven.health.append,
            on_died=on_died,
        )
        try:
            await link.stage(workload.name, offered)
            until_ns = self._clock.now_ns() + round(limit_seconds * NS)
            closed = not once
            while self._clock.now_ns() < until_ns and self.died is None and driven.driver_died is None:
                if not closed and link.issued >= wanted:
                    await link.stage(f"{workload.name}_end", 0)
                    closed = True
                if sum(index < wanted for index in driven.records) >= wanted:
                    break
                await self._clock.sleep(0.05)
            # What is in flight beyond the wanted requests is nobody's business.
            await link.stop(0.0 if self.died is not None else _GRACE_SECONDS if once else 0.0)
        finally:
            await link.close()
        return driven


def _fixed(name: str, prompt_tokens: int, output_tokens: int) -> Workload:
    """A workload whose requests all have these lengths."""
    return Workload(name, prompt_tokens, output_tokens, 0.0, 0.0, temperature=0.0)


def _first_error(records: Sequence[RequestRecord]) -> str | None:
    failed = sorted((r for r in records if r.outcome not in GOOD), key=lambda record: record.t_end_ns)
    return next((f"{r.outcome.value}: {r.error}" if r.error else r.outcome.value for r in failed), None)


def _total(counts: Any) -> int | None:
    values = list(counts)
    return None if any(value is None for value in values) else sum(values)


def _level_figures(level: int, rounds: Sequence[Sequence[RequestRecord]]) -> dict[str, Figure]:
    """Medians of each round's requests that ended well, by figure."""
    names = ("prefill_tokens_per_second", "decode_tokens_per_second", "ttft_seconds")
    found: dict[str, list[float]] = {name: [] for name in names}
    everything: list[RequestRecord] = []
    for part in rounds:
        good = [record for record in part if record.outcome in GOOD]
        everything += good
        tpots = [tpot for record in good if (tpot := tpot_seconds(record))]
        prefills = [speed for record in good if (speed := prefill_speed(record)) is not None]
        ttfts = [ttft for record in good if (ttft := ttft_seconds(record)) is not None]
        for name, values in zip(names, (prefills, [1 / tpot for tpot in tpots], ttfts), strict=True):
            if values:
                found[name].append(median(values))
    figures = {f"{name}@{level}": figure_of(values, len(everything)) for name, values in found.items()}
    figures[f"output_tokens_per_second@{level}"] = figure_of(_throughput(everything), len(everything))
    return {name: figure for name, figure in figures.items() if figure is not None}


def _throughput(good: Sequence[RequestRecord]) -> list[float]:
    """Tokens of all counted answers over the time from the first request's start to the last answer's end, if any."""
    sent = [record.t_send_ns for record in good if record.t_send_ns is not None]
    last = [record.t_last_ns for record in good if record.t_last_ns is not None]
    tokens = _total(record.completion_tokens for record in good)
    if not tokens or not sent or not last or max(last) <= min(sent):
        return []
    return [tokens * NS / (max(last) - min(sent))]


def _client_problems(level: int, wanted: int, records: Sequence[RequestRecord], driven: _Driven) -> list[str]:
    """Why the figures of a level are not the server's, if they are not."""
    problems = []
    if driven.driver_died is not None:
        problems.append(driven.driver_died)
    unsent = sum(record.outcome is Outcome.CLIENT_ERROR for record in records)
    if unsent:
        problems.append(f"{unsent} requests could not be sent")
    lags = [(r.t_send_ns - r.t_plan_ns) / NS for r in records if r.t_send_ns is not None]
    ttfts = [ttft for record in records if (ttft := ttft_seconds(record)) is not None]
    limit = max(_SEND_LAG_FLOOR_SECONDS, _SEND_LAG_SHARE * median(ttfts)) if ttfts else 1.0
    late = sum(lag > limit for lag in lags)
    if late > max(_LATE_ALLOWANCE, 0.05 * len(lags)):
        problems.append(f"at {level} at once {late} of {len(lags)} requests left more than {limit * 1000:.0f} ms late")
    longest = max((health.loop_lag_max_seconds for health in driven.health), default=0.0)
    if longest > _STANDSTILL_SECONDS:
        problems.append(f"the load generator stood still for {longest:.1f} s")
    if len(records) < wanted:
        problems.append(f"at {level} at once only {len(records)} of {wanted} requests ended in time")
    return problems


def _cache_warnings(counted: Sequence[RequestRecord]) -> tuple[str, ...]:
    prompt = sum(record.prompt_tokens or 0 for record in counted)
    cached = sum(record.cached_tokens or 0 for record in counted)
    if prompt and cached / prompt > _CACHED_SHARE:
        return (f"{cached / prompt:.0%} of prompt tokens came from the prefix cache: prefill speed counts the others",)
    return ()


def _peaks(ticks: Sequence[Tick]) -> dict[str, Figure]:
    """Largest values over the samples: memory of all cards and of all processes, KV cache."""
    gpu, process, kv = [], [], []
    for tick in ticks:
        used = [values["gpu_memory_used_bytes"] for values in tick.gpus.values() if "gpu_memory_used_bytes" in values]
        if used:
            gpu.append(sum(used))
        resident = [
            values["process_resident_memory_bytes"] + values.get("process_swap_bytes", 0.0)
            for values in tick.processes.values()
            if "process_resident_memory_bytes" in values
        ]
        if resident:
            process.append(sum(resident))
        if "kv_cache_usage_ratio" in tick.values:
            kv.append(tick.values["kv_cache_usage_ratio"])
    found = {}
    for name, values in (
        ("gpu_memory_peak_bytes", gpu),
        ("process_memory_peak_bytes", process),
        ("kv_cache_usage_peak_ratio", kv),
    ):
        if values:
            found[name] = Figure(max(values), max(values), max(values), len(values))
    return found
