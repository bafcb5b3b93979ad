"""`plimsoll check SETTINGS.yaml --log LOG`: does the server run what the file says?"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plimsoll.arguments import whole
from plimsoll.report import clean
from serving.budget import ask_for
from serving.cards import find_card
from serving.engines import ENGINES, TargetFacts
from serving.errors import ConfigError
from serving.model import read_model
from serving.settings import Scalar, Settings, backup, edit_settings, read_settings, stale_warning
from serving.startup import (
    FieldCheck,
    Outcome,
    PhaseMemory,
    StartupFacts,
    as_started,
    compare,
    compare_estimates,
    memory_by_phase,
    place_on_clock,
    read_startup,
)

__all__ = ["EXAMPLES", "add_arguments", "compare_with_budget", "run"]

EXAMPLES = """examples:
  plimsoll check hy3-serving.yaml --log vllm.log
  plimsoll check hy3-serving.yaml --log vllm.log --url http://127.0.0.1:8000
  plimsoll check hy3-serving.yaml --log vllm.log --memory watch.db
  plimsoll check hy3-serving.yaml --log vllm.log --write-actual"""

_PASS, _FAIL, _INCONCLUSIVE = 0, 1, 3
_COLOURS: Final = {
    Outcome.EQUAL: "green",
    Outcome.DIFFERS: "red",
    Outcome.CLAMPED: "red",
    Outcome.ABSENT: "dim",
}
_WORDS: Final = {Outcome.ABSENT: "not in the log"}
_NAMES: Final = frozenset({"model", "engine", "gpus"})
"""What `--write-actual` leaves alone: names are spelt in many ways, and another engine is another file."""
_ANY_CARD_BYTES: Final = 80 * 2**30 + 1
"""Stands for a card that is not known, where nothing that depends on it is looked at."""
_FAR: Final = 0.25
_TELLING: Final = frozenset({"weights_bytes", "kv_cache_bytes"})
_MEMORY_SIGNALS: Final = (("gpu_memory_used_bytes", "gpu"), ("process_anonymous_memory_bytes", "role"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("settings", metavar="SETTINGS.yaml", type=Path, help="serving settings (docs/settings.md)")
    parser.add_argument(
        "--log", type=Path, metavar="LOG", help="the server's start-up log; the last start in it counts"
    )
    parser.add_argument("--url", metavar="URL", help="the running server, asked for its own limits")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="whose log it is (default: found out from the log)")
    parser.add_argument("--config", metavar="CONFIG.json", help="the model's configuration (default: the file's model)")
    parser.add_argument("--gpu", metavar="NAME", help="the card, for the budget (default: the file's)")
    parser.add_argument("--gpus", type=whole(1, 65_536), metavar="N", help="how many of them (default: the file's)")
    parser.add_argument(
        "--memory", type=Path, metavar="RUN.db", help="a history that was recorded during the start: memory by phase"
    )
    parser.add_argument(
        "--write-actual", action="store_true", help="correct the file to what the server took; it is backed up first"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print. Exit code 0: equal; 1: a field differs or was clamped; 3: nothing tells, or not yet."""
    if arguments.log is None and arguments.url is None:
        raise ConfigError("give --log LOG, the server's start-up log (or --url URL, or both)")
    settings = read_settings(arguments.settings)
    facts = StartupFacts() if arguments.log is None else _read_log(arguments.log, arguments.engine, settings)
    live = None if arguments.url is None else _ask(arguments.url)
    checks = compare(settings, facts, live)
    moved = [] if arguments.memory is None else _memory(arguments.memory, facts)
    written = _write_actual(settings, checks, arguments.log or arguments.url) if arguments.write_actual else {}
    code, reason = _judge(checks, facts, arguments.log)
    document: dict[str, Any] = {
        "schema": "plimsoll.check/1",
        "settings": str(arguments.settings),
        "log": None if arguments.log is None else str(arguments.log),
        "verdict": {_PASS: "pass", _FAIL: "fail", _INCONCLUSIVE: "inconclusive"}[code],
        "reason": reason,
        "checks": [asdict(check) for check in checks],
        "startup": _startup(facts),
        "live": None if live is None else asdict(live),
        "budget": compare_with_budget(arguments, settings, facts),
        "memory": moved if arguments.memory is not None else None,
        "written": written,
        "warnings": _warnings(settings, facts),
    }
    if arguments.json:
        print(json.dumps(document, allow_nan=False, default=str))
    else:
        _render(document, checks, Console(soft_wrap=True))
    return code


def compare_with_budget(arguments: argparse.Namespace, settings: Settings, facts: StartupFacts) -> dict[str, Any]:
    """What the log reports of memory against the budget: `estimates`, or `problem`, why there is none."""
    source = arguments.config or settings.model
    if not facts.starts:
        return {"estimates": [], "problem": "the log holds no start"}
    if source is None:
        return {"estimates": [], "problem": "no model in the file; give --config CONFIG.json"}
    try:
        model = read_model(source)
    except ConfigError as error:
        if arguments.config:
            raise
        return {"estimates": [], "problem": f"{error}; give --config CONFIG.json"}
    started = as_started(settings, facts)
    remembered = settings.derived_from
    name = arguments.gpu or settings.gpu or remembered.get("gpu")
    size, card_name = remembered.get("gpu_memory_gib"), ""
    if name is not None:
        card = find_card(str(name))
        card_bytes, card_name = card.memory_bytes, card.name
    elif isinstance(size, int | float):
        card_bytes = round(size * 2**30)
    else:
        card_bytes = _ANY_CARD_BYTES
    copies = started.data_parallel_size or 1
    needed = (started.tensor_parallel_size or 1) * (started.pipeline_parallel_size or 1) * copies
    cards = arguments.gpus or started.gpus or needed
    try:
        ask = ask_for(started, model, card_bytes=card_bytes, card_name=card_name, cards=max(cards, needed))
        ask = replace(ask, release=facts.version)
        bits = remembered.get("weight_bits")
        if isinstance(bits, int | float):
            ask = ask.with_weight_bits(float(bits))
        estimates = compare_estimates(ask, facts, card_is_known=card_bytes != _ANY_CARD_BYTES)
    except ConfigError as error:
        return {"estimates": [], "problem": f"the budget does not know this start: {error}"}
    problem = None
    if card_bytes == _ANY_CARD_BYTES:
        problem = "the card is not known, so its memory is not budgeted: give --gpu NAME, or gpu in the file"
    far = [one for one in estimates if one.figure in _TELLING and abs(one.error_ratio or 0.0) > _FAR]
    if far and problem is None:
        problem = (
            "the estimates are far off: the cards, the model or the way they are divided are not those that the file "
            "says, or others use the cards too"
        )
    return {"estimates": [{**asdict(one), "error_ratio": one.error_ratio} for one in estimates], "problem": problem}


def _read_log(log: Path, engine: str | None, settings: Settings) -> StartupFacts:
    facts = read_startup(log, None if engine is None else ENGINES[engine])
    if engine is None and settings.engine in facts.also:
        return read_startup(log, ENGINES[settings.engine])
    return facts


def _ask(url: str) -> TargetFacts:
    # An HTTP client takes longer to import than all the rest takes to run.
    import asyncio

    from monitor.http import converse, open_session, parse_url
    from serving.engines import probe

    base = parse_url(url)

    async def ask() -> TargetFacts:
        async with open_session() as session:
            return await converse(session, base.text, probe(None, where=base.text, require_metrics=False))

    return asyncio.run(ask())


def _judge(checks: tuple[FieldCheck, ...], facts: StartupFacts, log: Path | None) -> tuple[int, str]:
    wrong = [check for check in checks if check.outcome in (Outcome.DIFFERS, Outcome.CLAMPED)]
    equal = [check for check in checks if check.outcome is Outcome.EQUAL]
    if any(check.key == "engine" for check in wrong):
        (engine,) = (check for check in wrong if check.key == "engine")
        return (
            _FAIL,
            f"the server is {engine.actual}, the file is for {engine.expected}: is it the right log?",
        )
    if wrong:
        names = ", ".join(check.key for check in wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        return _FAIL, f"the server does not run what the file says: {names}"
    if log is not None and not facts.starts:
        gist = "is empty" if not facts.log_bytes else f"holds no start of {', '.join(ENGINES)}"
        told = ""
        if facts.log_bytes:
            told = ": access lines alone tell nothing; give the log from the server's launch on"
        if not equal:
            return _INCONCLUSIVE, f"{log} {gist}{told}"
    if not equal:
        return _INCONCLUSIVE, "nothing that the file says can be seen"
    if log is not None and facts.starts and not facts.ready:
        last = facts.phases[-1].name if facts.phases else "launch"
        return _INCONCLUSIVE, (
            f"equal so far, but the start in {log} does not come to its end (it got as far as {last}): wait until the "
            "server is ready, or see `plimsoll diagnose`"
        )
    return _PASS, "the server runs what the file says" + (
        f", as far as can be seen ({len(equal)} of {len(checks)} fields)" if len(equal) < len(checks) else ""
    )


def _warnings(settings: Settings, facts: StartupFacts) -> list[str]:
    warnings = []
    stale = stale_warning(settings)
    if stale:
        warnings.append(stale)
    if facts.also:
        warnings.append(
            f"the log holds starts of {facts.engine} and of {', '.join(facts.also)}: it was read as {facts.engine}'s; "
            "--engine chooses"
        )
    if facts.starts > 1:
        warnings.append(f"the log holds {facts.starts} starts; the last, from line {facts.first_line} on, is compared")
    return warnings


def _write_actual(settings: Settings, checks: tuple[FieldCheck, ...], source: object) -> dict[str, Scalar]:
    changes: dict[str, Scalar] = {
        check.key: check.actual
        for check in checks
        if check.outcome in (Outcome.DIFFERS, Outcome.CLAMPED)
        and check.actual is not None
        and check.expected_line is not None
        and check.key not in _NAMES
    }
    if changes:
        backup(settings.path, reason=f"before --write-actual from {source}")
        edit_settings(settings.path, dict(changes))
    return changes


# ---- memory during the start


def _memory(path: Path, facts: StartupFacts) -> list[dict[str, Any]]:
    from monitor.history import SqliteHistory

    moved = []
    with SqliteHistory.open(path) as history:
        for signal, by in _MEMORY_SIGNALS:
            for series in history.series(signal):
                if not series.t_ns:
                    continue
                points = [(t_ns / 1e9, value) for t_ns, value in zip(series.t_ns, series.values, strict=True)]
                phases = place_on_clock(facts.phases, points[0][0], points[-1][0], _zones(points[0][0]))
                if phases is None:
                    raise ConfigError(
                        f"--memory {path}: the log's times cannot be placed among its samples: it was not recorded "
                        "during this start, or the log has no times, or only such as count from the start"
                    )
                name = dict(series.labels).get(by, "")
                moved += [_moved(signal, name, phase) for phase in memory_by_phase(points, phases)]
    if not moved:
        raise ConfigError(f"--memory {path}: no memory was sampled in it")
    return moved


def _moved(signal: str, name: str, phase: PhaseMemory) -> dict[str, Any]:
    return {"signal": signal, "of": name, **asdict(phase), "rise_bytes": phase.rise_bytes}


def _zones(seconds: float) -> tuple[float, ...]:
    """The zones in which a log may have been written: that of this machine, and UTC as in most containers."""
    return (float(time.localtime(seconds).tm_gmtoff), 0.0)


# ---- for people


def _startup(facts: StartupFacts) -> dict[str, Any]:
    binding = facts.binding_rank
    return {**asdict(facts), "ready": facts.ready, "binding_rank": None if binding is None else binding.rank}


def _render(document: dict[str, Any], checks: tuple[FieldCheck, ...], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, unbroken in (("setting", True), ("file", False), ("server", False), ("", True), ("told by", False)):
        table.add_column(title, no_wrap=unbroken, overflow="fold")
    for check in checks:
        table.add_row(
            check.key,
            _value(check.expected),
            _value(check.actual),
            f"[{_COLOURS[check.outcome]}]{_WORDS.get(check.outcome, check.outcome.value)}[/]",
            f"log:{check.line}" if check.line is not None else escape(clean(check.text)),
        )
    console.print(table)
    for check in checks:
        wrong = check.outcome in {Outcome.DIFFERS, Outcome.CLAMPED}
        line = check.text if wrong and check.line is not None else ""
        told = "; ".join(filter(None, (line, check.note)))
        if told:
            console.print(f"{check.key}: {escape(clean(told))}", highlight=False)
    for line in _memory_lines(document["startup"]):
        console.print(escape(clean(line)), highlight=False)
    for line in _budget_lines(document["budget"]):
        console.print(escape(clean(line)), highlight=False)
    for move in document["memory"] or ():
        if move["rise_bytes"] is not None:
            console.print(
                f"{move['signal']} {escape(clean(str(move['of'])))}: {move['rise_bytes'] / 2**30:+.2f} GiB during "
                f"{move['phase']} ({move['seconds']:.1f} s)",
                highlight=False,
            )
    for warning in document["warnings"]:
        console.print(f"[yellow]{escape(clean(warning))}[/]", highlight=False)
    if document["written"]:
        changes = ", ".join(f"{key}: {value}" for key, value in document["written"].items())
        console.print(f"written to {escape(document['settings'])} (backed up first): {escape(clean(changes))}")
    colour = {"pass": "green", "fail": "red", "inconclusive": "yellow"}[document["verdict"]]
    console.print(f"[{colour} bold]{document['verdict']}[/]  {escape(clean(document['reason']))}", highlight=False)


def _budget_lines(budget: dict[str, Any]) -> list[str]:
    lines = []
    for one in budget["estimates"]:
        from_what = "the card and settings" if one["given"] == "card" else "the log's KV bytes"
        error = "" if one["error_ratio"] is None else f" ({one['error_ratio']:+.1%})"
        lines.append(
            f"budget: {one['figure'].removesuffix('_bytes').replace('_', ' ')} from {from_what}: "
            f"{_figure(one['figure'], one['estimated'])}, the log says {_figure(one['figure'], one['logged'])}{error}"
        )
    return [*lines, *([f"budget: {budget['problem']}"] if budget["problem"] else [])]


def _figure(figure: str, value: float) -> str:
    if figure.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    return f"{value:,.2f}" if figure == "max_concurrency" else f"{value:,.0f}"


def _value(value: Scalar | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(clean(str(value)))


def _memory_lines(startup: dict[str, Any]) -> list[str]:
    lines = []
    if startup["max_concurrency"] is not None:
        lines.append(
            f"KV cache: {startup['max_concurrency']:g} requests of {startup['max_concurrency_tokens']:,} tokens at once"
            + (" (hybrid model: tokens are no per-token cost)" if startup["hybrid"] else "")
        )
    for rank in startup["ranks"]:
        told = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {rank[name] / 2**30:.2f} GiB"
            for name in rank
            if name.endswith("_bytes") and rank[name] is not None
        ]
        if told:
            binds = " (binds)" if len(startup["ranks"]) > 1 and rank["rank"] == startup["binding_rank"] else ""
            lines.append(f"{rank['rank'] or 'rank'}: {', '.join(told)}{binds}")
    for buffers in startup["buffers"]:
        told = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {buffers[name] / 2**20:,.1f} MiB"
            for name in buffers
            if name.endswith("_bytes") and buffers[name] is not None
        ]
        lines.append(f"{buffers['device']}: {', '.join(told)}")
    if startup["layers"] is not None:
        lines.append(f"layers on GPUs: {startup['offloaded_layers']} of {startup['layers']}")
    return lines
