"""`plimsoll memory URL`: what one request costs in memory, measured against an idle server and against the estimate.

The same request is made twice with two output lengths, so that growth per token shows. Where an engine takes memory for
the KV cache at its start, no increment can show the cache: how much of it the request filled is read instead.
"""

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monitor.http import BaseUrl, converse, open_session, parse_url
from monitor.process import process_exists
from monitor.sampler import Tick
from plimsoll.arguments import whole
from plimsoll.report import clean
from plimsoll.witness import MemoryUse, Witness, others_ran, witness
from serving.budget import kv_bits
from serving.clock import Clock, SystemClock
from serving.engines import ENGINES, TargetFacts, probe
from serving.errors import ConfigError
from serving.model import ModelShape, Split, read_model
from serving.settings import Settings, read_settings, stale_warning
from serving.smoke import SmokeResult, ask

__all__ = ["EXAMPLES", "Cost", "Estimate", "add_arguments", "conclude", "run"]

EXAMPLES = """examples:
  plimsoll memory http://127.0.0.1:8000
  plimsoll memory http://127.0.0.1:8000 --config /models/hy3/config.json --settings hy3-serving.yaml
  plimsoll memory http://127.0.0.1:8080 --output-tokens 64 512 --json"""

_EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}
_HEAD_TICKS = 15
_REST_TICKS = 10
_WARM_TOKENS = 32
_SECONDS = 2.0
_SHORTEST, _LONGEST = 64, 8192
"""Tokens of the longer answer, where its length is not given."""
_WORDS = "The ship was loaded until the water reached the line painted on her hull. "
"""What the prompt repeats; about one token a word in most vocabularies."""
_WORD_COUNT = len(_WORDS.split())
_NOISE_BYTES = 2**20
_FOREIGN_SHARE, _FOREIGN_TOKENS = 1.25, 16
"""Tokens above which a server must have worked for others; engines may count those that a stop cut off."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One request and what was seen while it ran.

    Attributes:
        prompt_tokens: as the server counts them.
        completion_tokens: likewise.
        seconds: request to last byte.
        rise: peak memory during the request less idle memory.
        kept: idle memory after it less idle memory before it.
        kv_tokens: tokens of the KV cache that it filled at its peak; None where the engine does not tell.
    """

    prompt_tokens: int
    completion_tokens: int
    seconds: float
    rise: MemoryUse
    kept: MemoryUse
    kv_tokens: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model's shape says that one token takes in the KV cache of one card."""

    model: str
    kv_bytes_per_token: int
    weights_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("url", metavar="URL", help="the server's base URL")
    parser.add_argument("--model", help="model name to ask for (default: the server's first)")
    parser.add_argument("--config", metavar="CONFIG.json", help="the model's configuration, for the estimate")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="serving settings: how the model is divided")
    parser.add_argument(
        "--prompt-tokens",
        type=whole(1, 1_000_000),
        default=64,
        metavar="N",
        help="about so long a prompt (default: 64)",
    )
    parser.add_argument(
        "--output-tokens",
        type=whole(2, 1_000_000),
        nargs=2,
        metavar=("A", "B"),
        help="the two lengths of the answer (default: what takes about half a second and two seconds)",
    )
    parser.add_argument("--gpu", default="auto", metavar="G", help="auto, nvml, none, or the URL of a DCGM exporter")
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="the server's process (default: found by its port on this host)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measure.

    Exit code 0 when it was measured, 1 when a request failed, 3 when other traffic or a restart spoilt it or nothing
    can be seen.
    """
    if arguments.pid is not None and not process_exists(arguments.pid):
        raise ConfigError(f"--pid {arguments.pid}: there is no such process on this host")
    lengths = tuple(sorted(arguments.output_tokens)) if arguments.output_tokens else None
    if lengths is not None and lengths[1] < 2 * lengths[0]:
        short, long = lengths
        raise ConfigError(f"--output-tokens {short} {long}: the second must be at least twice the first to show growth")
    settings = read_settings(arguments.settings) if arguments.settings is not None else None
    source = arguments.config or (settings.model if settings is not None else None)
    estimate = _estimate(source, settings) if source is not None else None
    result = asyncio.run(_measure(arguments, lengths, estimate))
    if settings is not None and (stale := stale_warning(settings)) is not None:
        result["notes"].append(stale)
    if arguments.json:
        print(json.dumps(result, allow_nan=False))
    else:
        _print(result)
    return _EXIT_CODES[result["verdict"]]


def _estimate(source: str, settings: Settings | None) -> Estimate:
    shape: ModelShape = read_model(source)
    split = Split()
    width = 16.0
    if settings is not None:
        split = Split(settings.tensor_parallel_size or 1, settings.pipeline_parallel_size or 1)
        width = kv_bits(settings.kv_cache_dtype, settings.where("kv_cache_dtype"))
    weights = shape.weight_bytes(split).total
    return Estimate(shape.name, shape.kv_bytes_per_token(width, split), weights)


async def _measure(
    arguments: argparse.Namespace, lengths: tuple[int, ...] | None, estimate: Estimate | None
) -> dict[str, Any]:
    base = parse_url(arguments.url)
    clock = SystemClock()
    async with open_session() as session:
        facts = await converse(session, base.text, probe(arguments.model, where=base.text))
        async with witness(session, base, facts, clock, gpu=arguments.gpu, pid=arguments.pid) as seen:
            bench = _Bench(session, base, facts, clock, seen, arguments.prompt_tokens)
            idle = await seen.gather(_HEAD_TICKS)
            warm, _ = await bench.request(_WARM_TOKENS)
            costs: list[Cost] = []
            failed = None if warm.generated else warm.reason
            for tokens in _lengths(lengths, warm, facts) if failed is None else ():
                answer, cost = await bench.request(tokens)
                if cost is None:
                    failed = answer.reason or "usage counts no tokens"
                    break
                costs.append(cost)
    return conclude(
        base.text,
        facts,
        idle,
        seen,
        costs,
        failed,
        estimate,
        is_preallocated=ENGINES[facts.engine].dialect.preallocates_kv_cache,
        warm_tokens=warm.completion_tokens or 0,
    )


def _lengths(asked: tuple[int, ...] | None, warm: SmokeResult, facts: TargetFacts) -> tuple[int, ...]:
    """Two lengths of the answer: as asked for, or long enough for several samples, as far as the context allows.

    Raises:
        ConfigError: they do not fit the context beside the prompt.
    """
    prompt, made = warm.prompt_tokens or 1, warm.completion_tokens or 1
    room = (facts.context_tokens or _LONGEST) - prompt - 1
    if asked is not None:
        if asked[1] > room:
            raise ConfigError(
                f"an answer of {asked[1]} tokens does not fit: the context has {facts.context_tokens} tokens and the "
                f"prompt takes {prompt}; give shorter --output-tokens or --prompt-tokens"
            )
        return asked
    long = min(room, _LONGEST, max(_SHORTEST, round(_SECONDS * made / max(warm.seconds, 1e-6))))
    if long < 2:
        raise ConfigError(f"a prompt of {prompt} tokens leaves no room for an answer; give a shorter --prompt-tokens")
    return max(1, long // 4), long


class _Bench:
    """Makes one request after the other, each between two spans of rest."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base: BaseUrl,
        facts: TargetFacts,
        clock: Clock,
        seen: Witness,
        prompt_tokens: int,
    ) -> None:
        self._session, self._base, self._facts, self._clock, self._seen = session, base, facts, clock, seen
        self._words = max(1, prompt_tokens // _WORD_COUNT)
        self._turn = 0

    async def request(self, tokens: int) -> tuple[SmokeResult, Cost | None]:
        """One request for `tokens` tokens; its cost where it was answered in full."""
        seen = self._seen
        before = await seen.gather(_REST_TICKS)
        # Each prompt begins otherwise, or the second request would find the first one's prompt in the prefix cache.
        self._turn += 1
        prompt = f"{self._turn}: " + _WORDS * self._words
        begun_ns = self._clock.now_ns()
        conversation = ask(
            self._facts.model,
            prompt,
            tokens,
            ignore_eos=ENGINES[self._facts.engine].dialect.supports_ignore_eos,
            timeout_s=3600.0,
        )
        answer = await converse(self._session, self._base.text, conversation)
        ended_ns = self._clock.now_ns()
        after = await seen.gather(_REST_TICKS)
        if not answer.generated or answer.prompt_tokens is None or answer.completion_tokens is None:
            return answer, None
        idle = seen.memory(before)
        return answer, Cost(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seconds=answer.seconds,
            rise=seen.memory(seen.between(begun_ns, ended_ns), max).minus(idle),
            kept=seen.memory(after).minus(idle),
            kv_tokens=_kv_tokens(before, seen.between(begun_ns, ended_ns), self._facts),
        )


def _kv_tokens(before: list[Tick], during: list[Tick], facts: TargetFacts) -> float | None:
    """Tokens that the KV cache held at its fullest over what it held before."""
    name = "kv_cache_usage_ratio"
    held = [tick.values[name] for tick in before if name in tick.values]
    seen = [tick.values[name] for tick in during if name in tick.values]
    capacity = facts.kv_cache_capacity_tokens
    if capacity is None:
        capacities = [
            tick.values["kv_cache_capacity_tokens"] for tick in during if "kv_cache_capacity_tokens" in tick.values
        ]
        capacity = round(capacities[-1]) if capacities else None
    if capacity is None and facts.context_tokens is not None and facts.max_running_requests is not None:
        # What the ratio of an engine with slots is a share of, as far as it can be told from outside.
        capacity = facts.context_tokens * facts.max_running_requests
    if not held or not seen or capacity is None:
        return None
    return max(0.0, max(seen) - min(held)) * capacity


def conclude(
    url: str,
    facts: TargetFacts,
    idle: list[Tick],
    seen: Witness,
    costs: list[Cost],
    failed: str | None,
    estimate: Estimate | None,
    *,
    is_preallocated: bool,
    warm_tokens: int = 0,
) -> dict[str, Any]:
    """The document of a measurement: figures, what they mean, and whether they can be trusted."""
    notes: list[str] = []
    verdict, reason = "pass", "measured"
    at_rest = seen.memory(idle)
    foreign = others_ran(idle, seen.ticks)
    if failed is not None:
        verdict, reason = "fail", f"a request was not answered: {failed}"
    elif seen.restart is not None:
        verdict, reason = "inconclusive", f"the server was restarted meanwhile: {seen.restart}"
    elif (
        elsewhere := _made_elsewhere(idle, seen, warm_tokens + sum(cost.completion_tokens for cost in costs))
    ) is not None:
        verdict, reason = "inconclusive", elsewhere
    elif foreign:
        verdict, reason = "inconclusive", "other requests ran meanwhile; measure a server without traffic"
    if foreign is None:
        notes.append("the server does not tell what runs, so that traffic of others is not excluded")
    growth = _growth(costs) if len(costs) == 2 else None
    if growth is not None and costs[1].completion_tokens == costs[0].completion_tokens:
        growth, verdict, reason = None, "inconclusive", "both answers had the same length; growth cannot be seen"
    if not at_rest.is_seen:
        notes.append(
            "no memory can be seen: run this on the server's host, or give --pid, or a DCGM exporter's URL to --gpu"
        )
        if verdict == "pass" and (growth is None or growth["kv_tokens"] is None):
            verdict, reason = "inconclusive", "neither memory nor the use of the KV cache can be seen"
    if is_preallocated:
        notes.append(
            "the engine takes memory for the KV cache at its start: what memory rises by during a request is no KV "
            "cache, and what the request filled of it is read from its gauge"
        )
    if any(not cost.rise.is_seen and cost.kv_tokens is None for cost in costs):
        notes.append("a request ended before a sample was taken; give longer --output-tokens")
    elif growth is not None and is_preallocated and not growth["kv_tokens"]:
        notes.append(
            "the gauge of the KV cache did not move: it is too coarse, or published too seldom, for so short a request"
        )
    return {
        "schema": "plimsoll.memory/1",
        "target": {"url": url, "engine": facts.engine, "version": facts.version, "model": facts.model},
        "verdict": verdict,
        "reason": reason,
        "idle": _use(at_rest),
        "kv_cache_capacity_tokens": facts.kv_cache_capacity_tokens,
        "is_preallocated": is_preallocated,
        "requests": [
            {
                "prompt_tokens": cost.prompt_tokens,
                "completion_tokens": cost.completion_tokens,
                "seconds": cost.seconds,
                "rise": _use(cost.rise),
                "kept": _use(cost.kept),
                "kv_tokens": cost.kv_tokens,
            }
            for cost in costs
        ],
        "growth_per_output_token": growth,
        "estimate": None if estimate is None else asdict(estimate),
        "comparison": _compare(growth, estimate, is_preallocated=is_preallocated),
        "notes": notes,
    }


def _made_elsewhere(idle: list[Tick], seen: Witness, answered: int) -> str | None:
    """Why the tokens that were answered are not those that the server counted; None where they may be."""
    name = "generation_tokens_total"
    counts = [tick.values[name] for tick in [*idle[:1], *seen.ticks[-1:]] if name in tick.values]
    if len(counts) < 2 or not answered:
        return None
    made = counts[1] - counts[0]
    if made == 0:
        return (
            f"{answered:,} tokens were answered, and {name} of this server stood still: a gateway, a cache or another "
            "replica answered; give the URL of the engine itself"
        )
    if made > _FOREIGN_SHARE * answered + _FOREIGN_TOKENS:
        return (
            f"other requests ran meanwhile: the server made {made:,.0f} tokens, and {answered:,} of them were asked "
            "for here"
        )
    return None


def _use(use: MemoryUse) -> dict[str, Any]:
    return {"gpu_memory_used_bytes": dict(use.gpus), "process_anonymous_memory_bytes": use.process_bytes}


def _growth(costs: list[Cost]) -> dict[str, Any]:
    """What each further token of the longer answer added, by what was seen."""
    short, long = costs
    tokens = long.completion_tokens - short.completion_tokens or 1
    more = long.rise.minus(short.rise)
    gpus = [used / tokens for used in more.gpus.values()]
    kv = None if long.kv_tokens is None or short.kv_tokens is None else (long.kv_tokens - short.kv_tokens) / tokens
    return {
        "gpu_bytes": max(gpus) if gpus else None,
        "process_bytes": None if more.process_bytes is None else more.process_bytes / tokens,
        "kv_tokens": kv,
    }


def _compare(growth: dict[str, Any] | None, estimate: Estimate | None, *, is_preallocated: bool) -> str | None:
    """What the growth means beside the estimate, in a sentence; None without an estimate."""
    if estimate is None or growth is None:
        return None
    expected = f"{estimate.kv_bytes_per_token:,} bytes of KV cache per token and card are expected"
    if is_preallocated:
        tokens = growth["kv_tokens"]
        if not tokens:
            return f"{expected}; how much of the pool the request filled could not be seen"
        return (
            f"{expected}, and each output token filled {tokens:.2f} tokens of the pool: "
            f"{tokens * estimate.kv_bytes_per_token:,.0f} bytes"
        )
    measured = growth["gpu_bytes"] if growth["gpu_bytes"] is not None else growth["process_bytes"]
    if measured is None:
        return f"{expected}; no memory could be seen"
    return f"{expected}, {measured:,.0f} were measured ({measured / estimate.kv_bytes_per_token:.0%})"


def _print(result: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    colour = {"pass": "green", "fail": "red", "inconclusive": "yellow"}[result["verdict"]]
    console.print(
        f"[{colour}]{result['verdict']}[/]  {result['target']['url']}  {escape(clean(result['reason']))}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "prompt", "output", "seconds", "GPU", "processes", "KV cache"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("idle", "", "", "", *_cells(result["idle"], rise=False), "")
    for request in result["requests"]:
        held = request["kv_tokens"]
        table.add_row(
            "request",
            f"{request['prompt_tokens']:,}",
            f"{request['completion_tokens']:,}",
            f"{request['seconds']:.2f}",
            *_cells(request["rise"], rise=True),
            "not told" if held is None else f"{held:,.0f} tokens",
        )
    console.print(table)
    growth = result["growth_per_output_token"]
    if growth is not None:
        parts = [
            f"{growth[name]:,.0f} bytes of {what}"
            for name, what in (("gpu_bytes", "GPU memory"), ("process_bytes", "process memory"))
            if growth[name] is not None
        ]
        if growth["kv_tokens"] is not None:
            parts.append(f"{growth['kv_tokens']:.2f} tokens of KV cache")
        console.print(f"per output token: {', '.join(parts) or 'nothing can be seen'}", highlight=False)
    for line in ([result["comparison"]] if result["comparison"] else []) + result["notes"]:
        console.print(f"[dim]{escape(clean(line))}[/]", highlight=False)


def _cells(use: dict[str, Any], *, rise: bool) -> tuple[str, str]:
    sign = "+" if rise else ""

    def size(value: float) -> str:
        if rise and abs(value) < _NOISE_BYTES:
            return f"{value / 2**10:{sign},.0f} KiB"
        return f"{value / 2**20:{sign},.0f} MiB"

    cards = use["gpu_memory_used_bytes"]
    process = use["process_anonymous_memory_bytes"]
    return (
        size(max(cards.values())) if cards else "not seen",
        size(process) if process is not None else "not seen",
    )
