"""The world in which an experiment happens: a settings file, a restart command, a server behind a URL, a ledger.

`plimsoll.trial` says which step comes next and `plimsoll.experiment` drives it; here each step is performed.
"""

import argparse
import contextlib
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from alerts.figures import Comparison, Figure, Figures, Judgement, compare, pool
from monitor.http import BaseUrl, converse, open_session, parse_url
from monitor.process import host_memory
from monitor.sampler import Tick
from plimsoll.arguments import duration, whole
from plimsoll.ledger import Change, Conclusion, Record, append, ledger_path, new_id, read_ledger, read_record
from plimsoll.measurement import Answer, Load, Measurement, Meter, Proof, compare_answers, open_meter
from plimsoll.report import figure
from plimsoll.restarting import (
    Before,
    LogMark,
    RunningCommand,
    listening_sockets,
    look_before,
    redact,
    run_restart,
    wait_until_new,
)
from plimsoll.trial import QUALITY_KEYS, Outcome, Seen, State, Step, TrialResult, Verdict
from serving.clock import NS, Clock, SystemClock
from serving.engines import TargetFacts
from serving.errors import ConfigError, RecordError, TargetError
from serving.settings import (
    SPLIT_KEYS,
    Scalar,
    Settings,
    backup,
    edit_settings,
    engine_arguments,
    read_settings,
    restore,
    stale_warning,
)
from serving.smoke import smoke
from serving.startup import FieldCheck, StartupFacts
from serving.startup import Outcome as FieldOutcome
from serving.startup import compare as compare_start

__all__ = ["MOST_CONCURRENCY", "Plan", "RealWorld", "add_server_arguments", "settings_hash"]

_KV_SLACK_RATIO: Final = 0.05
_SETTLE_SECONDS: Final = 60.0
_SWAP_BYTES: Final = 64 * 2**20
"""Growth of swap below this is the host's own housekeeping."""
_DEFAULT_CONCURRENCY: Final = 8
MOST_CONCURRENCY: Final = 16
"""Requests at once of the second level where nobody states them: enough to see a batch, few enough to be quick."""
_MEASUREMENTS: Final = 2
"""What seems worse is measured so often before it is believed."""
_OFFLOAD_KEYS: Final = ("cpu_offload_gb", "cpu_moe_layers")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What every experiment is told of the server, beside where it is and how it is restarted."""
    parser.add_argument(
        "--limit",
        type=duration(1),
        default=600.0,
        metavar="S",
        help="for the restart, and for readiness (default: 10m)",
    )
    parser.add_argument("--model", metavar="NAME", help="model name to ask for (default: the server's first)")
    parser.add_argument("--gpu", default="auto", metavar="G", help="auto, nvml, none, or the URL of a DCGM exporter")
    parser.add_argument("--by", metavar="WHO", help="who decides (default: user@host)")
    parser.add_argument("--prompt-tokens", type=whole(16, 10_000_000), default=512, metavar="N")
    parser.add_argument("--output-tokens", type=whole(4, 1_000_000), default=128, metavar="N")


@dataclass(frozen=True, slots=True)
class Plan:
    """What does not change during an experiment; the journal's first line.

    Attributes:
        id: of the experiment and its last record.
        kind: `set`, `sweep` or `ladder`.
        settings: the file.
        url: where the server is.
        restart: the command.
        log: the server's log.
        by: who decides.
        model: the name to ask for.
        gpu: as of `monitor.gpu.gpu_reader`.
        limit_seconds: for the restart command, and again for the server to be ready.
        load: the fixed load as asked; a concurrency of 0 is worked out from the batch limits.
        allowed_ratio: how much worse a judged figure may be.
        drift_limit: share of answers that may be lost to drift above the server's own; None accepts any.
        slo_ttft_seconds: limit of the median TTFT at the stated concurrency.
        slo_tpot_seconds: limit of the median time per token there.
        reuse_baseline: take the baseline from the ledger where the same settings and load are in it.
        warnings: what every record of it has to say.
    """

    id: str
    kind: str
    settings: str
    url: str
    restart: str
    log: str
    by: str
    model: str | None = None
    gpu: str = "auto"
    limit_seconds: float = 600.0
    load: Mapping[str, int] = field(default_factory=lambda: Load(concurrency=0).document())
    allowed_ratio: float = 0.1
    drift_limit: float | None = 0.0
    slo_ttft_seconds: float | None = None
    slo_tpot_seconds: float | None = None
    reuse_baseline: bool = False
    warnings: tuple[str, ...] = ()


def settings_hash(settings: Settings) -> str:
    """Tells settings apart by what they say, whatever their comments, order and spelling."""
    said = json.dumps(settings.values(), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Trial:
    """What one trial gave, for its record."""

    settings: Settings | None = None
    startup: dict[str, Any] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class RealWorld:
    """Settings on this disk, a server behind a URL, a restart command, a ledger.

    Args:
        plan: what is asked.
        say: tells people.
        planned: the changes that may be tried: the load is chosen to fit all of them.
        notes: what a killed experiment had written down, when this one goes on from there.
    """

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None],
        *,
        planned: Sequence[Mapping[str, Scalar]] = (),
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.path = Path(plan.settings)
        self.ledger = ledger_path(self.path)
        self.base: BaseUrl = parse_url(plan.url)
        self.record: Record | None = None
        """The last record, once it was made."""
        self.backup_path: str | None = None
        self.serving: bool | None = None
        """Whether a server was seen to serve when last looked; None while nobody has looked."""
        self._say = say
        self._clock: Clock = SystemClock()
        self._stack = contextlib.AsyncExitStack()
        self._meter: Meter | None = None
        self._log = LogMark.now(Path(plan.log))
        self._engine: str | None = (notes or {}).get("target", {}).get("engine")
        self._before: Before | None = None
        self._swap_before: float | None = None
        self._load: Load | None = None
        self._answers: tuple[Answer, ...] | None = None
        self._noise_ratio = 0.0
        self._unmoved = False
        """The server of before the experiment was never restarted."""
        self._trials: dict[str, _Trial] = {}
        self._trial = _Trial()
        self._planned: Sequence[Mapping[str, Scalar]] = planned
        self._warnings = list(plan.warnings)
        left = dict(notes or {})
        self._left = None if "record" not in left else read_record(left["record"])
        """What a killed experiment had written of its record."""
        self._old_figures: Figures = {} if self._left is None else self._left.before
        self._old: dict[str, Any] = {
            "hash": left.get("hash"),
            "values": left.get("values", {}),
            "target": left.get("target", {}),
            "split": left.get("split", {}),
            "load": left.get("load", {}),
            "idle_kv_ratio": left.get("idle_kv_ratio"),
            "equal": left.get("equal", []),
            "marks": left.get("marks", []),
            "sockets": left.get("sockets", []),
            "restarting": left.get("restarting"),
        }
        self.on_note: Callable[[Mapping[str, Any]], None] = lambda _: None
        """Told of notes that cannot wait for the next step."""

    def notes(self) -> Mapping[str, Any]:
        """What recovery needs besides the plan: how the old server was, and the record as far as it is known."""
        return {**self._old, "record": self._draft().document()}

    async def look_once(self) -> None:
        """See whether a server serves, where no step has said so."""
        try:
            await self._open_meter()
        except TargetError:
            self.serving = False
        else:
            self.serving = True

    async def close(self) -> None:
        """Let go of the server."""
        self._meter = None
        await self._stack.aclose()

    async def perform(self, state: State) -> Seen:
        """Perform the state's step."""
        steps: dict[Step, Callable[[State], Any]] = {
            Step.BASELINE: self._baseline,
            Step.BACKUP: self._backup,
            Step.EDIT: self._edit,
            Step.RESTART: self._restart,
            Step.WAIT: self._wait,
            Step.CHECK: self._check,
            Step.LIMITS: self._limits,
            Step.MEASURE: self._measure,
            Step.QUALITY: self._quality,
            Step.KEEP: self._keep,
            Step.RESTORE: self._restore,
            Step.RESTART_BACK: self._restart,
            Step.WAIT_BACK: self._wait,
            Step.CHECK_BACK: self._check_back,
            Step.SMOKE_BACK: self._smoke_back,
            Step.SETTLE_BACK: self._settle_back,
            Step.RECORD: self._record_end,
        }
        seen: Seen = await steps[state.step](state)
        return seen

    # ---- before

    async def _baseline(self, state: State) -> Seen:
        del state
        settings = read_settings(self.path)
        self._old |= {
            "hash": settings_hash(settings),
            "values": settings.values(),
            "split": {key: value for key, value in settings.values().items() if key in SPLIT_KEYS},
        }
        try:
            meter = await self._open_meter()
        except TargetError as error:
            self.serving = False
            return Seen(Verdict.FAILED, redact(str(error)))
        self.serving = True
        self._old["target"] = _target_document(meter.facts, self.base)
        self._engine = meter.facts.engine
        engine_arguments(settings, self._engine)  # what cannot be said must show before anything is restarted
        self._old["idle_kv_ratio"] = await meter.idle_kv_ratio()
        self._old["marks"] = _marks(meter.ticks[-1])
        self._old["sockets"] = sorted(listening_sockets(self.base))
        facts = self._whole_log_facts()
        if not facts.starts:
            self._say(f"no start of the server is in {self.plan.log}; is it its log?")
        checks = compare_start(settings, facts, meter.facts)
        self._old["equal"] = [check.key for check in checks if check.outcome is FieldOutcome.EQUAL]
        load = self._fix_load(settings, meter.facts)
        known = self._known_baseline(load) if self.plan.reuse_baseline else None
        if known is not None:
            self._old_figures = known
        else:
            measured = await meter.measure(load)
            problem = _measured_badly(measured)
            if problem is not None:
                self.serving = measured.died is None
                return problem
            self._old_figures = measured.figures
            self._warnings += measured.warnings
        if self.plan.kind == "ladder":
            return await self._is_enough(meter, settings, load)
        score = self._old_figures.get(f"output_tokens_per_second@{load.concurrency}")
        return Seen(score=None if score is None else score.value)

    async def _is_enough(self, meter: Meter, settings: Settings, load: Load) -> Seen:
        """Whether a ladder is needed at all."""
        missed = self._missed_slo(self._old_figures, load.concurrency)
        failures = self._old_figures.get("failures")
        if missed is None and not (failures and failures.value):
            proofs, _ = await self._prove(meter, settings, load)
            if all(proof.passed for proof in proofs):
                return Seen(
                    Verdict.ENOUGH, "the server starts and meets what is asked already; there is no need to retreat"
                )
        self.serving = meter.died is None
        # What the trials are measured by, if it died of this.
        return Seen() if meter.died is None else Seen(Verdict.FAILED, meter.died)

    def _whole_log_facts(self) -> StartupFacts:
        return LogMark(Path(self.plan.log), None, 0, "").facts(self._engine)

    def _known_baseline(self, load: Load) -> Figures | None:
        """Figures of the latest record of the same server, release, settings and load, None when there is none.

        A concurrency that nobody stated is that of the record, if the settings to be tried can run it too.
        """
        for record in reversed(read_ledger(self.ledger).records):
            known = record.measured_hash()
            if known is None or known[0] != self._old["hash"] or record.target != self._old["target"]:
                continue
            at = record.load.get("concurrency")
            wanted = load
            if not self.plan.load["concurrency"] and isinstance(at, int) and 1 <= at <= load.concurrency:
                wanted = replace(load, concurrency=at)
            if record.load == wanted.document():
                self._load = wanted
                self._old["load"] = wanted.document()
                self._say(f"baseline taken from record {record.id}")
                self._warnings.append(f"the baseline is that of record {record.id}")
                return known[1]
        return None

    def _fix_load(self, settings: Settings, facts: TargetFacts) -> Load:
        """The load of the whole experiment: what fits before and after, at a concurrency that both can run."""
        if self._load is not None:
            return self._load
        asked = Load(**self.plan.load)
        limits = [limit for limit in (settings.max_batch_size, facts.max_running_requests) if limit]
        context = facts.context_tokens or settings.max_model_len
        for change in self._planned:
            batch, length = change.get("max_batch_size"), change.get("max_model_len")
            limits += [batch] if isinstance(batch, int) else []
            context = min(context or length, length) if isinstance(length, int) else context
        concurrency = asked.concurrency or min([MOST_CONCURRENCY, *limits] if limits else [_DEFAULT_CONCURRENCY])
        self._load = replace(asked, concurrency=concurrency).fitted(context)
        self._old["load"] = self._load.document()
        return self._load

    async def _ask_before(self) -> None:
        """The quality probe's answers before the change, twice: how far the server's own drift from run to run."""
        if self._meter is None:
            return
        first, second = await self._meter.ask_quality(), await self._meter.ask_quality()
        self._answers = second
        self._noise_ratio = 1.0 - compare_answers(first, second).agreement_ratio

    async def _backup(self, state: State) -> Seen:
        del state
        if any(key in QUALITY_KEYS for change in self._planned for key in change):
            await self._ask_before()
        meddled = self._meddled(read_settings(self.path).values())
        if meddled is not None:
            return meddled
        stored = backup(self.path, reason=f"before experiment {self.plan.id}")
        self.backup_path = stored.path
        return Seen(backup=stored.version)

    # ---- a trial

    async def _edit(self, state: State) -> Seen:
        if state.results and state.backup is not None:
            meddled = self._meddled(read_settings(self.path).values())
            if meddled is not None:
                return meddled
            restore(self.path, state.backup, reason=f"between trials of experiment {self.plan.id}")
        settings = edit_settings(self.path, dict(state.changes))
        self._trial = self._trials.setdefault(state.label, _Trial())
        self._trial.settings = settings
        stale = stale_warning(settings)
        if stale is not None:
            self._trial.warnings.append(stale)
        if self._engine is not None:
            left_out = engine_arguments(settings, self._engine).left_out
            self._trial.warnings += [
                f"PLIMSOLL_ENGINE_ARGS cannot say {key}: {left_out[key]}" for key in state.changes if key in left_out
            ]
        return Seen()

    async def _restart(self, state: State) -> Seen:
        await self._close_meter()
        self._end_left_restart()
        settings = read_settings(self.path)
        meddled = None if state.going_back else self._meddled(settings.values())
        if meddled is not None:
            return meddled
        engine = self._engine or settings.engine
        environment = {"PLIMSOLL_SETTINGS": str(self.path.absolute())}
        if engine is not None:
            environment["PLIMSOLL_ENGINE_ARGS"] = shlex.join(engine_arguments(settings, engine).words)
        async with open_session() as session:
            self._before = None if engine is None else await look_before(session, self.base, self._clock, engine)
        self._log = LogMark.now(Path(self.plan.log))
        self._swap_before = host_memory().get("host_swap_used_bytes") if self.base.is_loopback else None
        self._unmoved = state.going_back and self._before is not None and self._is_old(self._before)
        if self._unmoved:
            self._say("the server of before the experiment still runs; it was never restarted")
            return Seen()
        self.serving = None
        problem = await run_restart(
            self.plan.restart, environment, self.plan.limit_seconds, on_begun=self._note_restart
        )
        self._old["restarting"] = None
        return Seen() if problem is None else Seen(Verdict.FAILED, problem, elsewhere=True)

    def _is_old(self, seen: Before) -> bool:
        """Whether the server of before the experiment serves, and no other beside it."""
        same = _marks(seen.tick) == self._old["marks"] and sorted(seen.sockets) == self._old["sockets"]
        return seen.tick.up and any(self._old["marks"]) and same

    def _meddled(self, now: Mapping[str, Scalar]) -> Seen | None:
        """That somebody else changed the settings meanwhile; what they wrote is stored as a version."""
        known = self._old["values"] if self._trial.settings is None else self._trial.settings.values()
        changed = [key for key in {**known, **now} if known.get(key) != now.get(key)]
        if not changed:
            return None
        stored = backup(self.path, reason=f"changed by somebody else during experiment {self.plan.id}")
        return Seen(
            Verdict.INCONCLUSIVE,
            f"{', '.join(changed)} of {self.path.name} was changed by somebody else meanwhile; "
            f"that file is stored as version {stored.version}",
        )

    def _note_restart(self, command: RunningCommand) -> None:
        self._old["restarting"] = asdict(command)
        with contextlib.suppress(RecordError):  # without it, only a restart that outlives us would be missed
            self.on_note(self.notes())

    def _end_left_restart(self) -> None:
        """End a restart command that outlived the experiment that began it: two of them would fight for the port."""
        left = self._old["restarting"]
        if isinstance(left, dict) and RunningCommand(**left).end():
            self._say("a restart command of the killed experiment was still running, and was ended")

    async def _wait(self, state: State) -> Seen:
        del state
        if not self._unmoved:
            async with open_session() as session:
                found = await wait_until_new(
                    session,
                    self.base,
                    self._clock,
                    model=self.plan.model,
                    before=self._before,
                    log=self._log,
                    engine=self._engine,
                    limit_seconds=self.plan.limit_seconds,
                )
            if isinstance(found, str):
                self.serving = False
                return Seen(Verdict.FAILED, found, elsewhere=not self._log.died_of_memory(self._engine))
            self._engine = found.engine
        try:
            await self._open_meter()
        except TargetError as error:
            self.serving = False
            return Seen(Verdict.FAILED, redact(str(error)))
        self.serving = True
        return Seen()

    async def _check(self, state: State) -> Seen:
        meter, settings = self._need_meter(), read_settings(self.path)
        meddled = self._meddled(settings.values())
        if meddled is not None:
            return meddled
        facts = self._log.facts(meter.facts.engine)
        checks = compare_start(settings, facts, meter.facts)
        self._trial.startup = _startup_document(facts, checks)
        wrong = self._wrong(checks, set(state.changes))
        if wrong:
            return Seen(Verdict.FAILED, wrong)
        unseen = [c.key for c in checks if c.key in state.changes and c.outcome is FieldOutcome.ABSENT]
        if unseen and not facts.starts:
            told = f"{', '.join(unseen)} cannot be checked: {self.plan.log} has no start of the new server"
            return Seen(Verdict.INCONCLUSIVE, f"{told}; is it the log of this server?")
        if unseen:
            self._trial.warnings.append(f"neither log nor server says whether {', '.join(unseen)} is in effect")
        died = self._log.death(meter.facts.engine)
        if died is not None:
            return Seen(Verdict.FAILED, died)
        needed = self._offload(settings, facts)
        if needed is not None:
            self._trial.detail["no_tuning_result"] = needed
            self._trial.warnings.append(f"no tuning result: {needed}")
            if self.plan.kind == "ladder":
                return Seen(Verdict.FAILED, f"no tuning result: {needed}")
        return Seen()

    def _wrong(self, checks: Sequence[FieldCheck], changed: set[str]) -> str:
        """Fields that are not what the file says, among those changed and those that were right before."""
        bad = (FieldOutcome.DIFFERS, FieldOutcome.CLAMPED)
        return "; ".join(
            f"{check.key} is {check.actual}, not {check.expected}"
            + (f" ({check.outcome.value}: {redact(check.text)})" if check.text else "")
            for check in checks
            if check.outcome in bad and (check.key in changed or check.key in self._old["equal"])
        )

    def _offload(self, settings: Settings, facts: StartupFacts) -> str | None:
        """How it shows that the start needed swap or main memory in place of the card's; None when it does not."""
        said = [key for key in _OFFLOAD_KEYS if settings.values().get(key) not in (None, 0, 0.0)]
        if said:
            return f"{', '.join(said)} put part of the model into main memory"
        if facts.layers and facts.offloaded_layers and facts.offloaded_layers < facts.layers:
            return f"only {facts.offloaded_layers} of {facts.layers} layers are on the card"
        swapped = host_memory().get("host_swap_used_bytes") if self._swap_before is not None else None
        if swapped is not None and self._swap_before is not None and swapped - self._swap_before > _SWAP_BYTES:
            return f"the start moved {(swapped - self._swap_before) / 2**20:.0f} MiB of this host to swap"
        return None

    async def _prove(self, meter: Meter, settings: Settings, load: Load) -> tuple[list[Proof], int | None]:
        """A request near the context limit and, when that was answered, a burst at the batch limit; and that limit."""
        limit = settings.max_batch_size or meter.facts.max_running_requests
        near = await meter.near_limit()
        proofs = [] if near is None else [near]
        if near is None or near.passed:
            proofs.append(await meter.burst(limit or load.concurrency, load))
        return proofs, limit

    async def _limits(self, state: State) -> Seen:
        del state
        meter, settings = self._need_meter(), read_settings(self.path)
        load = self._fix_load(settings, meter.facts)
        proofs, limit = await self._prove(meter, settings, load)
        trial, last = self._trial, proofs[-1]
        trial.detail["limits"] = [asdict(proof) for proof in proofs]
        if proofs[0].name != "near_limit":
            trial.warnings.append("the context length is not known, so no request near it was sent")
        if limit is None:
            trial.warnings.append("the batch limit is not known; the burst was of the load's concurrency")
        if not last.passed:
            cause = self._log.death(meter.facts.engine)
            return Seen(Verdict.FAILED, redact(last.say()) + (f"; {cause}" if cause else ""))
        if limit is not None and last.held_back_at is not None and last.held_back_at < min(limit, last.asked):
            trial.warnings.append(
                f"in the burst of {last.asked} at most {last.held_back_at} ran while others waited: the batch limit is "
                "not what binds, or it is not in effect"
            )
        return Seen()

    async def _measure(self, state: State) -> Seen:
        del state
        meter, settings = self._need_meter(), read_settings(self.path)
        load = self._fix_load(settings, meter.facts)
        trial, figures = self._trial, dict[str, Figure]()
        for attempt in range(_MEASUREMENTS):
            measured = await meter.measure(load)
            figures = dict(pool(figures, measured.figures))
            trial.warnings += measured.warnings
            trial.comparisons = tuple(compare(self._old_figures, figures, allowed_ratio=self.plan.allowed_ratio))
            worse = self._worse(trial.comparisons)
            if self.plan.kind != "set" or measured.invalid or measured.died or not worse:
                break
            if any(item.name == "failures" for item in worse):
                break
            if attempt + 1 < _MEASUREMENTS:
                self._say("something is worse; measuring once more, in case it was a bad minute of this machine")
        trial.figures = figures
        trial.detail["requests"] = dict(measured.outcomes)
        trial.detail["tokens"] = {"prompt": measured.prompt_tokens, "completion": measured.completion_tokens}
        if measured.swap_bytes is not None and measured.swap_bytes > _SWAP_BYTES:
            needed = f"{measured.swap_bytes / 2**20:.0f} MiB went to swap under load"
            trial.detail["no_tuning_result"] = needed
            trial.warnings.append(f"no tuning result: {needed}")
        score = figures.get(f"output_tokens_per_second@{load.concurrency}")
        self.serving = measured.died is None
        problem = (
            _measured_badly(measured) or self._meddled(read_settings(self.path).values()) or self._judge(trial, load)
        )
        if problem is not None:
            cause = self._log.death(meter.facts.engine) if measured.died else None
            return replace(problem, reason=problem.reason + (f"; {cause}" if cause else ""))
        return Seen(score=None if score is None else score.value)

    def _judge(self, trial: _Trial, load: Load) -> Seen | None:
        """What speaks against the figures of a trial."""
        failures = trial.figures.get("failures")
        before = self._old_figures.get("failures")
        if failures is not None and failures.value > (0 if before is None else before.value):
            return Seen(Verdict.FAILED, f"{failures.value:g} of {failures.samples} requests failed")
        missed = self._missed_slo(trial.figures, load.concurrency)
        if missed is not None:
            return Seen(Verdict.WORSE, missed)
        if self.plan.kind != "set":
            return None
        worse = self._worse(trial.comparisons)
        if worse:
            return Seen(Verdict.WORSE, f"{_say_changes(worse)}; allowed are {self.plan.allowed_ratio:.0%}")
        if not any(item.judged and not item.name.startswith("failures") for item in trial.comparisons):
            return Seen(Verdict.INCONCLUSIVE, "no figure was measured both before and after")
        return None

    def _worse(self, comparisons: Sequence[Comparison]) -> list[Comparison]:
        return [item for item in comparisons if item.judged and item.judgement is Judgement.WORSE]

    def _missed_slo(self, figures: Figures, concurrency: int) -> str | None:
        ttft, decode = (figures.get(f"{n}@{concurrency}") for n in ("ttft_seconds", "decode_tokens_per_second"))
        limit = self.plan.slo_ttft_seconds
        if limit is not None and (ttft is None or ttft.value > limit):
            return f"TTFT at {concurrency} is {figure(ttft.value if ttft else None)} s, above {limit:g} s"
        limit = self.plan.slo_tpot_seconds
        if limit is not None and (decode is None or 1 / decode.value > limit):
            told = figure(None if decode is None else 1 / decode.value)
            return f"time per token at {concurrency} is {told} s, above {limit:g} s"
        return None

    async def _quality(self, state: State) -> Seen:
        del state
        after = await self._need_meter().ask_quality()
        limit = self.plan.drift_limit
        if self._answers is None:
            self._trial.warnings.append("answers before the change are not known, so drift cannot be told")
            if limit is None:
                return Seen(score=None)
            return Seen(
                Verdict.INCONCLUSIVE, "drift cannot be told without answers from before; --accept-drift keeps it"
            )
        drift = compare_answers(self._answers, after)
        lost = max(0.0, 1.0 - drift.agreement_ratio - self._noise_ratio)
        self._trial.detail["quality"] = {**drift.document(), "own_drift_ratio": self._noise_ratio, "lost_ratio": lost}
        self._trial.warnings.append(f"quality probe: {drift.say()}")
        self._say(drift.say())
        if limit is None:
            return Seen()
        if self._noise_ratio > 0.5:
            told = f"{self._noise_ratio:.0%} of the server's own greedy answers differ from run to run"
            return Seen(Verdict.INCONCLUSIVE, f"{told}: drift cannot be told; --accept-drift keeps it")
        if lost > limit:
            return Seen(Verdict.WORSE, f"{drift.say()}; --accept-drift or --drift-limit {lost:.2g} would keep it")
        return Seen()

    def on_result(self, result: TrialResult) -> None:
        """Put a trial of a sweep or ladder into the ledger; that of one change is in the last record."""
        if self.plan.kind == "set":
            return
        trial = self._trials[result.label]
        conclusion = Conclusion.MEASURED if result.verdict is Verdict.OK else Conclusion.REFUSED
        t_ns = self._clock.now_ns()
        record = self._make(trial, result.changes, conclusion, result.reason or "measured", new_id(t_ns))
        try:
            append(self.ledger, replace(record, before={}))
        except RecordError as error:  # the trial was worth its time all the same
            self._say(f"a trial is not in the ledger: {error}")
            self._warnings.append(f"a trial is not in the ledger: {error}")

    # ---- the end

    async def _keep(self, state: State) -> Seen:
        return self._record_as(Conclusion.KEPT, state.reason, self.plan.id)

    async def _restore(self, state: State) -> Seen:
        await self._close_meter()
        if state.backup is None:
            return Seen(Verdict.FAILED, "no backup was made")
        try:
            stored = restore(self.path, state.backup, reason=f"experiment {self.plan.id}: {state.label}")
        except (ConfigError, RecordError) as error:
            if not self._old["values"]:
                raise
            now, old = read_settings(self.path).values(), self._old["values"]
            edit_settings(self.path, {key: old.get(key) for key in {**now, **old} if now.get(key) != old.get(key)})
            self._warnings.append(
                f"the stored file could not be used, so the old values were put back one by one: {error}"
            )
        else:
            self.backup_path = stored.path
        return Seen()

    async def _check_back(self, state: State) -> Seen:
        del state
        meter = self._need_meter()
        settings = read_settings(self.path)
        if self._old["values"] and settings.values() != self._old["values"]:
            return Seen(Verdict.FAILED, "the settings file is not what was backed up")
        wrong = self._wrong(compare_start(settings, self._log.facts(meter.facts.engine), meter.facts), set())
        return Seen(Verdict.FAILED, f"the old fields are not back: {wrong}") if wrong else Seen()

    async def _smoke_back(self, state: State) -> Seen:
        del state
        meter = self._need_meter()
        async with open_session() as session:
            answer = await converse(session, self.base.text, smoke(meter.facts.model))
        return Seen() if answer.generated else Seen(Verdict.FAILED, f"it does not generate: {answer.reason}")

    async def _settle_back(self, state: State) -> Seen:
        """Wait until the KV cache is used as little as it was when idle before; what was worse is held against it."""
        usual = self._old["idle_kv_ratio"]
        meter = self._need_meter()
        settled = Seen() if usual is None else await self._settle(meter, usual)
        worse = self._worse(self._trial.comparisons) if state.verdict is Verdict.WORSE else []
        if not settled.ok or self._load is None or not worse or self.plan.kind != "set":
            return settled
        if self._missed_slo(self._trial.figures, self._load.concurrency) is not None:
            return settled
        return await self._is_machine(meter, self._load, worse)

    async def _is_machine(self, meter: Meter, load: Load, worse: Sequence[Comparison]) -> Seen:
        """Whether the old server, measured again, is as bad as the new one was: then it was not the change."""
        self._say("measuring the old server once more, to see whether it was the change or this machine")
        again = await meter.measure(load)
        if again.died is not None or again.invalid:
            return Seen()
        self._trial.detail["old_again"] = {name: item.document() for name, item in again.figures.items()}
        against = {
            item.name: item
            for item in compare(again.figures, self._trial.figures, allowed_ratio=self.plan.allowed_ratio)
        }
        still = [item for item in worse if (now := against.get(item.name)) and now.judgement is Judgement.WORSE]
        if still:
            return Seen()
        told = f"{_say_changes(worse)}, but the old server is no better now: this machine changed, not only the setting"
        return Seen(Verdict.INCONCLUSIVE, f"measure: {told}")

    async def _settle(self, meter: Meter, usual: float) -> Seen:
        until_ns = self._clock.now_ns() + round(_SETTLE_SECONDS * NS)
        while True:
            now = await meter.idle_kv_ratio()
            if now is None or now <= usual + _KV_SLACK_RATIO:
                return Seen()
            if self._clock.now_ns() >= until_ns:
                return Seen(Verdict.FAILED, f"KV cache use stays at {now:.0%}; it was {usual:.0%} before")
            await self._clock.sleep(0.5)

    async def _record_end(self, state: State) -> Seen:
        reason = "; ".join(part for part in (state.reason, state.trouble) if part)
        if state.outcome is not Outcome.LOST:
            return self._record_as(Conclusion.ROLLED_BACK, reason, self.plan.id)
        # A name of its own, the same each time: once it is recovered, the experiment has another end.
        reason = f"the server did not come back: {reason}"
        return self._record_as(Conclusion.ROLLED_BACK, reason, f"{self.plan.id}-lost")

    def _record_as(self, conclusion: Conclusion, reason: str, name: str) -> Seen:
        """Append the experiment's record, unless it got so far before it was killed."""
        record = replace(self._draft(), id=name, t_ns=self._clock.now_ns(), conclusion=conclusion, reason=reason)
        if conclusion is Conclusion.ROLLED_BACK and self.plan.kind != "set":
            # Its trials have records of their own; of the whole there is only that all is as it was.
            old = self._old
            record = replace(
                record, changes=(), after={}, startup={}, settings=old["values"], hash_after=old["hash"], detail={}
            )
        self.record = record
        if all(known.id != name for known in read_ledger(self.ledger).records):
            append(self.ledger, record)
        return Seen()

    # ---- records

    def _draft(self) -> Record:
        """The record as far as it is known."""
        if self._left is not None and not self._trials:
            return self._left
        now = {} if self._trial.settings is None else self._trial.settings.values()
        changes = {key: value for key, value in now.items() if self._old["values"].get(key) != value}
        return self._make(self._trial, changes, Conclusion.ROLLED_BACK, "cut off", self.plan.id)

    def _make(
        self, trial: _Trial, changes: Mapping[str, Scalar], conclusion: Conclusion, reason: str, name: str
    ) -> Record:
        settings = trial.settings
        return Record(
            id=name,
            t_ns=self._clock.now_ns(),
            kind=self.plan.kind,
            conclusion=conclusion,
            reason=reason,
            by=self.plan.by,
            rule=self._rule(),
            changes=tuple(Change(key, self._old["values"].get(key), value) for key, value in changes.items()),
            settings=self._old["values"] if settings is None else settings.values(),
            hash_before=self._old["hash"],
            hash_after=self._old["hash"] if settings is None else settings_hash(settings),
            target=self._old["target"],
            split=self._old["split"],
            load=self._old["load"],
            startup=trial.startup,
            before=self._old_figures,
            after=trial.figures,
            warnings=tuple(dict.fromkeys([*self._warnings, *trial.warnings])),
            detail=trial.detail,
        )

    def _rule(self) -> str:
        return (
            "kept when the start is as the file says, the limits hold, no request fails and no judged figure is worse "
            f"by more than {self.plan.allowed_ratio:.0%} with its rounds apart"
            if self.plan.kind == "set"
            else "kept when the start is as the file says, the limits hold and no request fails"
        )

    # ---- within

    async def _open_meter(self) -> Meter:
        await self._close_meter()
        self._stack = contextlib.AsyncExitStack()
        self._meter = await self._stack.enter_async_context(
            open_meter(self.plan.url, model=self.plan.model, gpu=self.plan.gpu)
        )
        return self._meter

    async def _close_meter(self) -> None:
        self._meter = None
        await self._stack.aclose()

    def _need_meter(self) -> Meter:
        if self._meter is None:
            raise TargetError("the server was not found")
        return self._meter


def _say_changes(items: Sequence[Comparison]) -> str:
    return "; ".join(
        f"{item.name} {figure(item.before.value)} -> {figure(item.after.value)}"
        + (f" ({item.change_ratio:+.0%})" if item.change_ratio is not None else "")
        for item in items
    )


def _marks(tick: Tick) -> list[str | None]:
    """What differs between two starts of the server, as a list that JSON gives back as it was."""
    return [tick.server_mark, tick.process_mark]


def _target_document(facts: TargetFacts, base: BaseUrl) -> dict[str, Any]:
    return {"url": base.text, "engine": facts.engine, "version": facts.version, "model": facts.model}


def _startup_document(facts: StartupFacts, checks: Sequence[FieldCheck]) -> dict[str, Any]:
    """What the start took, by canonical key, with the clamps it made."""
    found: dict[str, Any] = {key: fact.value for key, fact in facts.settings.items()}
    found |= {check.key: check.actual for check in checks if check.actual is not None}
    if facts.max_concurrency is not None:
        found["max_concurrency"] = facts.max_concurrency
    clamped = [check.key for check in checks if check.outcome is FieldOutcome.CLAMPED]
    return found | ({"clamped": clamped} if clamped else {})


def _measured_badly(measured: Measurement) -> Seen | None:
    """Why a measurement says nothing, or that the server did not survive it."""
    if measured.died is not None:
        return Seen(Verdict.FAILED, measured.died)
    if measured.invalid:
        told = "; ".join(measured.invalid)
        return Seen(Verdict.INCONCLUSIVE, redact(told + (f" ({measured.first_error})" if measured.first_error else "")))
    return None
