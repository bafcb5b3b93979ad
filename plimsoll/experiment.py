"""`plimsoll experiment`: change one setting, restart, check, prove the limits, warm up, measure, keep or roll back.

`set` tries one change, `sweep` one setting over values, `ladder` the order of retreat: quantisation, then context, then
concurrency. Each step is written to a journal before it is performed (`plimsoll.journal`), and what comes next is pure
(`plimsoll.trial`); so whatever ends an experiment in between, `recover` brings the old settings and server back. Ctrl-C
rolls back; a second one leaves that to `recover`.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monitor.http import API_KEY_VARIABLE, parse_url
from plimsoll import restart_experiment
from plimsoll.arguments import duration, number, whole
from plimsoll.experiment_world import MOST_CONCURRENCY, Plan, RealWorld, add_server_arguments
from plimsoll.journal import RESTARTS, Journal, journal_path, refuse_unfinished
from plimsoll.ledger import ledger_path, new_id, read_ledger, who_decides
from plimsoll.measurement import Load
from plimsoll.report import clean, figure
from plimsoll.restarting import redact
from plimsoll.trial import (
    QUALITY_KEYS,
    LadderPolicy,
    OneChange,
    Outcome,
    Policy,
    Seen,
    State,
    Step,
    SweepPolicy,
    TrialResult,
    Verdict,
    advance,
    recovered,
)
from serving.clock import SystemClock
from serving.errors import ConfigError, PlimsollError, RecordError
from serving.settings import Scalar, Settings, read_assignment, read_settings

__all__ = ["EXAMPLES", "Stop", "World", "add_arguments", "drive", "run"]

EXAMPLES = """examples:
  plimsoll experiment set hy3-serving.yaml max_batch_size=64 --url http://127.0.0.1:8000 \\
      --restart 'systemctl restart vllm' --log /var/log/vllm.log
  plimsoll experiment sweep hy3-serving.yaml max_batch_size=32,48,64 --url ... --restart ... --log ...
  plimsoll experiment ladder hy3-serving.yaml --quantize quantization=fp8 --context 65536,32768 --batch 16,8 --url ...
  plimsoll experiment restart hy3-serving.yaml --times 5 --age 4h --url ... --restart ...
  plimsoll experiment recover hy3-serving.yaml

The restart command is run by /bin/sh with PLIMSOLL_SETTINGS (the settings file) and PLIMSOLL_ENGINE_ARGS (the engine's
flags for it, quoted for a shell) in its environment. It must leave the server running and come to an end.
Exit codes: 0 kept, 1 rolled back and serving again, 3 rolled back as nothing can be said, 4 the server is not back."""

_LOUD: Final = "!" * 78
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends an experiment: Ctrl-C, a supervisor, and a terminal or connection that went away."""


# ---- the loop


class World(Protocol):
    """What performs the steps."""

    async def perform(self, state: State) -> Seen:
        """Perform the state's step. What server or command do wrong is in what is seen; errors of ours raise."""
        ...

    def on_result(self, result: TrialResult) -> None:
        """A trial has ended."""
        ...

    def notes(self) -> Mapping[str, Any]:
        """What has to survive a crash, as JSON."""
        ...


class Stop:
    """Ctrl-C, and what it means at each moment.

    While a change is tried, the first one ends the step in progress and the old settings come back. On the way back
    the first one is only answered, and the second one gives up, which leaves the rest to `recover`.

    Args:
        say: tells people.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._task: asyncio.Future[Seen] | None = None
        self._gentle = True
        self._asked = self._warned = False
        self.abandoned = False
        """The way back was given up."""

    def watch(self, task: "asyncio.Future[Seen]", *, gentle: bool) -> None:
        """The step in progress; `gentle` when it may be cut off at the first Ctrl-C."""
        self._task, self._gentle = task, gentle
        if gentle and self._asked:  # it came between two steps
            task.cancel()

    def press(self) -> None:
        """Ctrl-C, or another signal that asks for an end."""
        self._asked = True
        if self._task is None:
            return
        if not self._gentle and not self._warned:
            self._warned = True
            self._say("coming to an end; press Ctrl-C again to leave the rest to `plimsoll experiment recover`")
            return
        self.abandoned = not self._gentle
        self._task.cancel()


async def drive(
    state: State,
    policy: Policy,
    world: World,
    journal: Journal,
    stop: Stop,
    *,
    on_step: Callable[[State], None] = lambda _: None,
) -> State:
    """Perform steps until the experiment is over.

    Returns:
        The last state. Its step is `DONE`, unless the way back was abandoned.
    """
    while state.step is not Step.DONE:
        try:
            journal.write(state, world.notes())
        except RecordError as error:
            # Without a journal nothing is begun that may have to be undone; the way back is the same without it.
            if state.step in (Step.BASELINE, Step.BACKUP):
                return replace(
                    state,
                    step=Step.DONE,
                    outcome=Outcome.NOTHING_CHANGED,
                    verdict=Verdict.FAILED,
                    reason=str(error),
                )
            if not state.going_back and state.step not in (Step.KEEP, Step.RECORD):
                state = replace(state, step=Step.RESTORE, verdict=Verdict.FAILED, reason=str(error))
                continue
        on_step(state)
        gentle = not state.going_back and state.step not in (Step.KEEP, Step.RECORD)
        task = asyncio.ensure_future(world.perform(state))
        stop.watch(task, gentle=gentle)
        try:
            seen = await task
        except asyncio.CancelledError:
            if stop.abandoned:
                return state
            if not gentle:
                raise
            seen = Seen(Verdict.INTERRUPTED, "interrupted")
        except PlimsollError as error:
            seen = Seen(Verdict.FAILED, redact(str(error)), elsewhere=True)
        before = len(state.results)
        state = advance(state, seen, policy)
        for result in state.results[before:]:
            world.on_result(result)
    return state


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="set|sweep|ladder|restart|recover")

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=summary, description=summary)
        sub.add_argument("settings", type=Path, metavar="SETTINGS.yaml", help="the settings file")
        sub.add_argument("--json", action="store_true", help="print one JSON document on stdout")
        return sub

    one = action("set", "change one setting; keep it when all goes well, else bring the old one back")
    one.add_argument("change", nargs="+", metavar="KEY=VALUE", help="the new value")
    one.add_argument("--allow-many", action="store_true", help="change several settings at once, with a warning")
    one.add_argument(
        "--allow-worse",
        type=number(0, 10),
        default=0.1,
        metavar="R",
        help="accepted worsening as a ratio (default 0.1)",
    )
    sweep = action("sweep", "measure one setting at several values; the old one comes back")
    sweep.add_argument("change", metavar="KEY=V1,V2,...", help="the values")
    sweep.add_argument("--keep-best", action="store_true", help="keep the value of the highest throughput")
    ladder = action("ladder", "retreat step by step until the server starts and meets what is asked; says what binds")
    ladder.add_argument(
        "--quantize", action="append", default=[], metavar="KEY=V1,V2", help="steps of quantisation, least first"
    )
    ladder.add_argument("--context", metavar="N1,N2", help="context lengths to fall back to, largest first")
    ladder.add_argument("--batch", metavar="N1,N2", help="batch sizes to fall back to, largest first")
    for sub in (sweep, ladder):
        sub.set_defaults(allow_worse=0.1)
    for sub in (one, sweep, ladder):
        _add_common(sub)
    benefit = "change nothing, and tell by restarts whether a restart helps"
    restart_experiment.add_arguments(
        actions.add_parser(
            "restart",
            help=benefit,
            description=benefit[0].upper() + benefit[1:] + ".",
            epilog=restart_experiment.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    back = action("recover", "bring the old settings and server back after an experiment was killed")
    back.add_argument("--restart", metavar="CMD", help="another restart command than the experiment's")
    back.add_argument("--limit", type=duration(1), metavar="S", help="another time limit")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="the server's base URL")
    parser.add_argument("--restart", required=True, metavar="CMD", help="shell command that restarts the server")
    parser.add_argument("--log", required=True, type=Path, metavar="LOG", help="the server's log")
    add_server_arguments(parser)
    parser.add_argument(
        "--reuse-baseline", action="store_true", help="take the baseline from the ledger if it is there"
    )
    parser.add_argument(
        "--concurrency", type=whole(1, 4096), metavar="N", help="requests at once (default: what old and new limit run)"
    )
    parser.add_argument("--rounds", type=whole(2, 100), default=3, metavar="N", help="rounds of a level (default: 3)")
    parser.add_argument("--ttft", type=number(0, 3600), metavar="S", help="limit of the median TTFT at the concurrency")
    parser.add_argument("--tpot", type=number(0, 3600), metavar="S", help="limit of the median time per token there")
    drift = parser.add_mutually_exclusive_group()
    drift.add_argument("--accept-drift", action="store_true", help="keep a change of quantisation whatever its drift")
    drift.add_argument(
        "--drift-limit", type=number(0, 1), metavar="R", help="share of answers that may be lost to drift (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if arguments.action == "restart":
        return restart_experiment.run(arguments)
    console = Console(stderr=True)

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            console.print(clean(redact(text)), style="dim", markup=False, highlight=False, soft_wrap=True)

    if arguments.action == "recover":
        document = asyncio.run(_recover(arguments, say))
    else:
        policy, planned, warnings = _policy(arguments)
        document = asyncio.run(_execute(_plan(arguments, planned, warnings), policy, planned, say))
    if arguments.json:
        print(json.dumps(document, allow_nan=False), flush=True)
    else:
        _render(document, Console())
    code: int = document["exit_code"]
    return code


def _policy(arguments: argparse.Namespace) -> tuple[Policy, list[Mapping[str, Scalar]], list[str]]:
    """The policy, the changes that it may try, and warnings for the record."""
    settings = read_settings(arguments.settings)
    now = settings.values()
    if arguments.action == "set":
        changes = dict(read_assignment(text, settings.engine) for text in arguments.change)
        if len(changes) < len(arguments.change):
            raise ConfigError("a setting is given twice; give each once")
        warnings = []
        if len(changes) > 1:
            if not arguments.allow_many:
                raise ConfigError(
                    f"{len(changes)} settings at once ({', '.join(changes)}): when it fails nobody can say which did "
                    "it; change one, or insist with --allow-many"
                )
            warnings.append(f"{len(changes)} settings were changed at once: what came of it cannot be told apart")
        same = [key for key, value in changes.items() if now.get(key) == value]
        if same:
            raise ConfigError(f"{settings.where(same[0])}: {same[0]} is {now[same[0]]} already; nothing to try")
        return OneChange(changes), [changes], warnings
    if arguments.action == "sweep":
        key, values = _values(arguments.change, settings)
        return SweepPolicy(key, values, arguments.keep_best), [{key: value} for value in values], []
    steps: list[Mapping[str, Scalar]] = []
    for text in arguments.quantize:
        key, values = _values(text, settings)
        steps += [{key: value} for value in values]
    context = [] if arguments.context is None else _values(f"max_model_len={arguments.context}", settings)[1]
    batch = [] if arguments.batch is None else _values(f"max_batch_size={arguments.batch}", settings)[1]
    if not steps and not context and not batch:
        raise ConfigError("nothing to fall back to: give --quantize KEY=V1,V2, --context N1,N2 or --batch N1,N2")
    planned = [*steps, *({"max_model_len": v} for v in context), *({"max_batch_size": v} for v in batch)]
    return LadderPolicy(steps, _rungs("max_model_len", context, now), _rungs("max_batch_size", batch, now)), planned, []


def _rungs(key: str, values: Sequence[Scalar], now: Mapping[str, Scalar]) -> list[int]:
    """The values of a retreat, each smaller than the one before and the first smaller than what is set."""
    rungs = [value for value in values if isinstance(value, int)]
    present = now.get(key)
    chain = [present, *rungs] if isinstance(present, int) else rungs
    if any(later >= earlier for earlier, later in itertools.pairwise(chain)):
        told = f"; {key} is {present}" if isinstance(present, int) else ""
        raise ConfigError(f"{key}={','.join(map(str, rungs))}: a retreat goes from larger to smaller values{told}")
    return rungs


def _values(text: str, settings: Settings) -> tuple[str, list[Scalar]]:
    """`KEY=V1,V2` as a canonical key and its values."""
    name, found, listed = text.partition("=")
    parts = [part for part in listed.split(",") if part.strip()]
    if not found or not parts:
        raise ConfigError(f"{text[:60]!r}: write KEY=V1,V2, as in max_batch_size=32,48")
    pairs = [read_assignment(f"{name}={part}", settings.engine) for part in parts]
    values = [value for _, value in pairs]
    if len({str(value) for value in values}) < len(values):
        raise ConfigError(f"{text[:60]!r}: a value is given twice")
    return pairs[0][0], values


def _plan(arguments: argparse.Namespace, planned: Sequence[Mapping[str, Scalar]], warnings: Sequence[str]) -> Plan:
    parse_url(arguments.url)
    if arguments.log.exists() and not arguments.log.is_file():
        raise ConfigError(f"--log {arguments.log}: not a regular file")
    if not arguments.restart.strip():
        raise ConfigError("--restart: the command is empty")
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if key and key in arguments.restart:
        raise ConfigError(f"--restart holds the key in {API_KEY_VARIABLE}: the command inherits it, leave it out")
    altering = sorted({key for change in planned for key in change} & QUALITY_KEYS)
    if altering and arguments.action != "set" and not arguments.accept_drift and arguments.drift_limit is None:
        raise ConfigError(
            f"{', '.join(altering)} can alter answers: say how much may be lost with --drift-limit R, or --accept-drift"
        )
    batches = [change["max_batch_size"] for change in planned if isinstance(change.get("max_batch_size"), int)]
    concurrency = arguments.concurrency or 0
    if not concurrency and arguments.action == "sweep" and batches:
        # Between batch sizes only the load that needs the largest tells them apart.
        concurrency = min(MOST_CONCURRENCY, max(value for value in batches if isinstance(value, int)))
    load = Load(arguments.prompt_tokens, arguments.output_tokens, concurrency, arguments.rounds)
    return Plan(
        id=new_id(SystemClock().now_ns()),
        kind=arguments.action,
        settings=str(arguments.settings),
        url=arguments.url,
        restart=arguments.restart,
        log=str(arguments.log.absolute()),
        by=arguments.by or who_decides(),
        model=arguments.model,
        gpu=arguments.gpu,
        limit_seconds=arguments.limit,
        load=load.document(),
        allowed_ratio=arguments.allow_worse,
        drift_limit=None if arguments.accept_drift else arguments.drift_limit or 0.0,
        slo_ttft_seconds=arguments.ttft,
        slo_tpot_seconds=arguments.tpot,
        reuse_baseline=arguments.reuse_baseline,
        warnings=tuple(warnings),
    )


async def _execute(
    plan: Plan, policy: Policy, planned: Sequence[Mapping[str, Scalar]], say: Callable[[str], None]
) -> dict[str, Any]:
    refuse_unfinished(Path(plan.settings))
    read_ledger(ledger_path(Path(plan.settings)))
    world = RealWorld(plan, say, planned=planned)
    with Journal.create(Path(plan.settings), asdict(plan)) as journal:
        return await _finish(State(), policy, world, journal, say)


async def _recover(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    journal, page = Journal.reopen(arguments.settings)
    with journal:
        if page.state is None or not page.plan:
            journal.finish()
            reason = (
                "an experiment of restarts was cut off; it changed nothing, but see that the server is up"
                if page.plan.get("kind") == RESTARTS
                else "it was cut off before it began"
            )
            state = State(step=Step.DONE, outcome=Outcome.NOTHING_CHANGED, reason=reason)
            return _document(state, None, arguments.settings, "recover")
        known = dict(page.plan) | ({"restart": arguments.restart} if arguments.restart else {})
        known |= {"limit_seconds": arguments.limit} if arguments.limit else {}
        known |= {"settings": str(arguments.settings), "warnings": tuple(known.get("warnings", ()))}
        try:
            plan = Plan(**known)
        except TypeError as error:
            raise ConfigError(f"{journal.path}: written by another Plimsoll: {error}") from None
        world = RealWorld(plan, say, notes=page.notes)
        return await _finish(recovered(page.state), OneChange({}), world, journal, say, recovering=True)


async def _finish(
    state: State,
    policy: Policy,
    world: RealWorld,
    journal: Journal,
    say: Callable[[str], None],
    *,
    recovering: bool = False,
) -> dict[str, Any]:
    """Drive an experiment to its end, and say how it went."""
    loop = asyncio.get_running_loop()
    world.on_note = journal.note
    stop = Stop(say)
    for signal_number in _STOPS:
        loop.add_signal_handler(signal_number, stop.press)
    try:
        state = await drive(state, policy, world, journal, stop, on_step=lambda at: say(_progress(at)))
        if world.serving is None and state.step is Step.DONE:
            await world.look_once()
    finally:
        for signal_number in _STOPS:
            loop.remove_signal_handler(signal_number)
        await world.close()
    if state.outcome in (Outcome.KEPT, Outcome.ROLLED_BACK, Outcome.NOTHING_CHANGED):
        journal.finish()
    return _document(state, world, Path(world.plan.settings), "recover" if recovering else world.plan.kind)


def _progress(state: State) -> str:
    label = f"{state.label}: " if state.label and not state.going_back else ""
    return f"{label}{state.step.value}" + (f" ({state.reason})" if state.step is Step.RESTORE else "")


def _document(state: State, world: RealWorld | None, settings: Path, action: str) -> dict[str, Any]:
    code = _exit_code(state, action)
    back = None if world is None or state.backup is None else {"version": state.backup, "path": world.backup_path}
    left = journal_path(settings).exists()
    return {
        "schema": "plimsoll.experiment/1",
        "action": action,
        "settings": str(settings),
        "outcome": None if state.outcome is None else state.outcome.value,
        "verdict": {0: "pass", 1: "fail", 3: "inconclusive"}.get(code),
        "reason": state.reason,
        "trouble": state.trouble or None,
        "trials": [
            {
                "label": result.label,
                "changes": dict(result.changes),
                "verdict": result.verdict.value,
                "reason": result.reason or None,
                "served": result.served,
                "output_tokens_per_second": result.score,
            }
            for result in state.results
        ],
        "record": None if world is None or world.record is None else world.record.document(),
        "ledger": str(ledger_path(settings)),
        "backup": back,
        "serving": None if world is None else world.serving,
        "unfinished": str(journal_path(settings)) if left else None,
        "exit_code": code,
    }


def _exit_code(state: State, action: str) -> int:
    if state.step is not Step.DONE:
        return 130
    if state.outcome in (Outcome.LOST, Outcome.UNRECORDED):
        return 4
    if action == "recover" or state.outcome is Outcome.KEPT:
        return 0
    by_verdict = {Verdict.OK: 0, Verdict.INTERRUPTED: 130, Verdict.INCONCLUSIVE: 3}
    return by_verdict.get(state.verdict, 1 if state.outcome is Outcome.ROLLED_BACK else 4)


def _render(document: Mapping[str, Any], console: Console) -> None:
    record = document["record"]
    if record is not None and record["figures"]["after"]:
        table = Table("figure", "before", "after", box=box.SIMPLE_HEAD, pad_edge=False)
        names = dict.fromkeys([*record["figures"]["before"], *record["figures"]["after"]])
        for name in names:
            sides = (record["figures"][side].get(name) for side in ("before", "after"))
            table.add_row(escape(name), *(figure(side["value"] if side else None) for side in sides))
        console.print(table)
    if document["action"] in ("sweep", "ladder"):
        table = Table("trial", "", "tokens/s", "why", box=box.SIMPLE_HEAD, pad_edge=False)
        for trial in document["trials"]:
            cells = (trial["label"], trial["verdict"], figure(trial["output_tokens_per_second"]), trial["reason"] or "")
            table.add_row(*(escape(clean(cell)) for cell in cells))
        console.print(table)
    for warning in record["warnings"] if record is not None else ():
        console.print(f"[yellow]{escape(clean(warning))}[/]", highlight=False, soft_wrap=True)
    lost = document["outcome"] == Outcome.LOST.value or document["outcome"] is None
    colour = {0: "green", 1: "red", 3: "yellow"}.get(document["exit_code"], "red")
    outcome = document["outcome"] or "stopped on the way back"
    lines = [f"[{colour} bold]{outcome}[/]  {escape(clean(document['reason']))}"]
    if document["trouble"]:
        lines.append(escape(clean(document["trouble"])))
    if lost:
        back = document["backup"]
        lines = [
            f"[red bold]{_LOUD}[/]",
            *lines,
            "[red bold]the server does not serve[/]"
            if document["serving"] is False
            else "[red bold]a server answers, but it is not known to run the settings before the experiment[/]"
            if document["serving"]
            else "[red bold]the server is not known to serve[/]",
            f"the settings before the experiment: version {back['version']}, {escape(str(back['path']))}"
            if back and back["path"]
            else "",
            f"try again: plimsoll experiment recover {escape(document['settings'])}",
            f"[red bold]{_LOUD}[/]",
        ]
    for line in filter(None, lines):
        console.print(line, highlight=False, soft_wrap=True)
    sys.stdout.flush()
