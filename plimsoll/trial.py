"""What comes next in an experiment, given what was seen. Pure: no clock, no file, no server.

An experiment tries changes of a settings file one after the other and keeps one of them or none:

    baseline  backup  ( edit  restart  wait  check  limits  measure  [quality] )...  keep
                             any failure, or nothing worth keeping:  restore  restart back  wait back
                                                                     check back  smoke back  settle back  record

`advance` says where a state goes once its step was performed, and `recovered` where an experiment goes on that was
killed at a step. Which change is tried next, and which is kept, is for a `Policy`: one change, a sweep over values, or
the ladder of retreat. A state is JSON, so that it can be written down before each step is performed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

from serving.settings import Scalar

__all__ = [
    "QUALITY_KEYS",
    "Finish",
    "LadderPolicy",
    "OneChange",
    "Outcome",
    "Policy",
    "Seen",
    "State",
    "Step",
    "SweepPolicy",
    "Trial",
    "TrialResult",
    "Verdict",
    "advance",
    "recovered",
]

Changes: TypeAlias = Mapping[str, Scalar]
"""Canonical settings key to its new value."""

_ATTEMPTS_BACK: Final = 2
"""Restarts with the old settings before the server is given up: the old process may still be letting go of memory."""


class Step(StrEnum):
    """One thing to do. A state that names a step says that the step has begun, and perhaps ended."""

    BASELINE = "baseline"
    BACKUP = "backup"
    EDIT = "edit"
    RESTART = "restart"
    WAIT = "wait"
    CHECK = "check"
    LIMITS = "limits"
    MEASURE = "measure"
    QUALITY = "quality"
    KEEP = "keep"
    RESTORE = "restore"
    RESTART_BACK = "restart back"
    WAIT_BACK = "wait back"
    CHECK_BACK = "check back"
    SMOKE_BACK = "smoke back"
    SETTLE_BACK = "settle back"
    RECORD = "record"
    DONE = "done"


_TRYING: Final = (
    Step.EDIT,
    Step.RESTART,
    Step.WAIT,
    Step.CHECK,
    Step.LIMITS,
    Step.MEASURE,
    Step.QUALITY,
)
_BACK: Final = (Step.RESTORE, Step.RESTART_BACK, Step.WAIT_BACK, Step.CHECK_BACK, Step.SMOKE_BACK, Step.SETTLE_BACK)


class Verdict(StrEnum):
    """What a performed step came to."""

    OK = "ok"
    ENOUGH = "enough"
    """Of a baseline: what is asked is met already."""
    FAILED = "failed"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    INTERRUPTED = "interrupted"


class Outcome(StrEnum):
    """How an experiment ended."""

    KEPT = "kept"
    ROLLED_BACK = "rolled back"
    NOTHING_CHANGED = "nothing changed"
    """It ended before the settings were touched."""
    LOST = "lost"
    """The old settings are back, but the server is not."""
    UNRECORDED = "unrecorded"
    """All is well but for the ledger, which could not be written."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a step.

    Attributes:
        verdict: whether it went well.
        reason: why not, for people.
        backup: version of the settings that was stored, of a backup.
        score: figure by which trials are ranked, of a measurement; larger is better.
        elsewhere: what failed says nothing of the card: a restart command, a setting that the engine refuses.
    """

    verdict: Verdict = Verdict.OK
    reason: str = ""
    backup: int | None = None
    score: float | None = None
    elsewhere: bool = False

    @property
    def ok(self) -> bool:
        """Whether it went well."""
        return self.verdict is Verdict.OK


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How one trial ended.

    Attributes:
        label: what was tried, for people.
        changes: the settings that it changed.
        verdict: whether it may be kept.
        reason: why not.
        served: whether the server came up with it.
        score: figure by which trials are ranked.
        elsewhere: it failed at what says nothing of the card.
    """

    label: str
    changes: Changes
    verdict: Verdict
    reason: str = ""
    served: bool = False
    score: float | None = None
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """A change to try next."""

    label: str
    changes: Changes


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing more is tried.

    Attributes:
        keep: the place of the result to keep; None keeps the old settings.
        reason: why, for people.
        verdict: why the old settings come back; OK where that was meant.
    """

    keep: int | None
    reason: str
    verdict: Verdict = Verdict.OK


class Policy(Protocol):
    """What to try, and what to keep."""

    @property
    def begins_dead(self) -> bool:
        """Whether a server that does not serve yet is where it begins."""
        ...

    def next(self, results: Sequence[TrialResult], old_score: float | None = None) -> Trial | Finish:
        """The next trial, or the end, given the results so far and the score of the old settings, if it is known."""
        ...

    def needs_quality(self, changes: Changes) -> bool:
        """Whether the change can alter answers."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    """Where an experiment is.

    Attributes:
        step: what is being done.
        label: the trial's.
        changes: the trial's.
        results: of trials that have ended.
        backup: version of the settings before the experiment.
        touched: a restart with changed settings has begun, so the server may run them.
        served_before: the server served before the experiment.
        old_score: of the old settings; None where it was not measured.
        served: the server came up in this trial.
        score: of this trial.
        applying: the trial was tried before and is put into effect again, to be kept.
        attempts: restarts with the old settings so far.
        verdict: why the old settings come back.
        outcome: how it ended, once it has.
        reason: why, for people.
        trouble: what went wrong on the way back.
    """

    step: Step = Step.BASELINE
    label: str = ""
    changes: Changes = field(default_factory=dict)
    results: tuple[TrialResult, ...] = ()
    backup: int | None = None
    touched: bool = False
    served_before: bool = True
    old_score: float | None = None
    served: bool = False
    score: float | None = None
    applying: bool = False
    attempts: int = 0
    verdict: Verdict = Verdict.OK
    outcome: Outcome | None = None
    reason: str = ""
    trouble: str = ""

    @property
    def going_back(self) -> bool:
        """Whether the old settings are being brought back."""
        return self.step in _BACK

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "step": self.step.value,
            "label": self.label,
            "changes": dict(self.changes),
            "results": [
                {
                    "label": item.label,
                    "changes": dict(item.changes),
                    "verdict": item.verdict.value,
                    "reason": item.reason,
                    "served": item.served,
                    "score": item.score,
                    "elsewhere": item.elsewhere,
                }
                for item in self.results
            ],
            "backup": self.backup,
            "touched": self.touched,
            "served_before": self.served_before,
            "old_score": self.old_score,
            "served": self.served,
            "score": self.score,
            "applying": self.applying,
            "attempts": self.attempts,
            "verdict": self.verdict.value,
            "outcome": None if self.outcome is None else self.outcome.value,
            "reason": self.reason,
            "trouble": self.trouble,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "State":
        """The inverse of `document`.

        Raises:
            KeyError, ValueError, TypeError: it is not what `document` gives.
        """
        values = dict(document)
        values["step"] = Step(values["step"])
        values["verdict"] = Verdict(values["verdict"])
        values["outcome"] = None if values["outcome"] is None else Outcome(values["outcome"])
        values["results"] = tuple(
            TrialResult(**{**item, "verdict": Verdict(item["verdict"])}) for item in values["results"]
        )
        return cls(**values)


def advance(state: State, seen: Seen, policy: Policy) -> State:
    """The state after its step was performed."""
    step = state.step
    if step is Step.BASELINE:
        if seen.verdict is Verdict.ENOUGH:
            return _end(state, Outcome.NOTHING_CHANGED, replace(seen, verdict=Verdict.OK))
        if seen.ok or (policy.begins_dead and seen.verdict is Verdict.FAILED):
            return replace(state, step=Step.BACKUP, served_before=seen.ok, old_score=seen.score)
        return _end(state, Outcome.NOTHING_CHANGED, seen)
    if step is Step.BACKUP:
        if not seen.ok:
            return _end(state, Outcome.NOTHING_CHANGED, seen)
        return _try_next(replace(state, backup=seen.backup), policy)
    if step in _TRYING:
        return _advance_trial(state, seen, policy)
    if step is Step.KEEP:
        return replace(
            state,
            step=Step.DONE,
            outcome=Outcome.KEPT if seen.ok else Outcome.UNRECORDED,
            trouble=state.trouble if seen.ok else seen.reason,
        )
    if step is Step.RECORD:
        unrecorded = not seen.ok and state.outcome is not Outcome.LOST
        return replace(
            state,
            step=Step.DONE,
            outcome=Outcome.UNRECORDED if unrecorded else state.outcome,
            trouble=state.trouble if seen.ok else _join(state.trouble, seen.reason),
        )
    return _advance_back(state, seen)


def _end(state: State, outcome: Outcome, seen: Seen) -> State:
    return replace(state, step=Step.DONE, outcome=outcome, verdict=seen.verdict, reason=seen.reason)


def _try_next(state: State, policy: Policy) -> State:
    """Begin what the policy wants."""
    after = policy.next(state.results, state.old_score)
    if isinstance(after, Trial):
        return replace(
            state, step=Step.EDIT, label=after.label, changes=after.changes, served=False, score=None, applying=False
        )
    if after.keep is None:
        return replace(state, step=Step.RESTORE, verdict=after.verdict, reason=after.reason)
    kept = state.results[after.keep]
    state = replace(state, label=kept.label, changes=kept.changes, reason=after.reason)
    if after.keep == len(state.results) - 1:
        return replace(state, step=Step.KEEP)
    return replace(state, step=Step.EDIT, applying=True)


def _advance_trial(state: State, seen: Seen, policy: Policy) -> State:
    step = state.step
    state = replace(
        state,
        touched=state.touched or step is Step.RESTART,
        served=state.served or (step is Step.WAIT and seen.ok),
        score=seen.score if step is Step.MEASURE else state.score,
    )
    if seen.verdict is Verdict.INTERRUPTED or (step is Step.EDIT and not seen.ok):
        return replace(state, step=Step.RESTORE, verdict=seen.verdict, reason=_at(step, seen))
    if state.applying:
        if not seen.ok:
            return replace(state, step=Step.RESTORE, verdict=seen.verdict, reason=_at(step, seen))
        return replace(state, step=Step.KEEP if step is Step.CHECK else _TRYING[_TRYING.index(step) + 1])
    ended = not seen.ok or step is Step.QUALITY or (step is Step.MEASURE and not policy.needs_quality(state.changes))
    if not ended:
        following = _TRYING[_TRYING.index(step) + 1]
        return replace(state, step=following, touched=state.touched or following is Step.RESTART)
    result = TrialResult(
        label=state.label,
        changes=state.changes,
        verdict=seen.verdict,
        reason="" if seen.ok else _at(step, seen),
        served=state.served,
        score=state.score,
        elsewhere=seen.elsewhere,
    )
    return _try_next(replace(state, results=(*state.results, result)), policy)


def _at(step: Step, seen: Seen) -> str:
    return f"{step.value}: {seen.reason}" if seen.reason else step.value


def _advance_back(state: State, seen: Seen) -> State:
    step = state.step
    if step is Step.RESTORE:
        if not seen.ok:
            return _lose(state, seen)
        if not state.touched:
            return replace(state, step=Step.RECORD, outcome=Outcome.ROLLED_BACK)
        return replace(state, step=Step.RESTART_BACK, attempts=state.attempts + 1)
    if step is Step.SETTLE_BACK and seen.verdict is Verdict.INCONCLUSIVE:
        # The old server is as bad as the new one was, so that it was not the change.
        return replace(
            state, step=Step.RECORD, outcome=Outcome.ROLLED_BACK, verdict=Verdict.INCONCLUSIVE, reason=seen.reason
        )
    if step is Step.SETTLE_BACK:
        trouble = state.trouble if seen.ok else _join(state.trouble, seen.reason)
        return replace(state, step=Step.RECORD, outcome=Outcome.ROLLED_BACK, trouble=trouble)
    if not state.served_before:
        # It did not serve with these settings before, and is not expected to.
        return replace(state, step=Step.RECORD, outcome=Outcome.ROLLED_BACK)
    if seen.ok:
        return replace(state, step=_BACK[_BACK.index(step) + 1])
    if state.attempts < _ATTEMPTS_BACK:
        trouble = _join(state.trouble, _at(step, seen))
        return replace(state, step=Step.RESTART_BACK, attempts=state.attempts + 1, trouble=trouble)
    return _lose(state, seen)


def _lose(state: State, seen: Seen) -> State:
    trouble = _join(state.trouble, _at(state.step, seen))
    return replace(state, step=Step.RECORD, outcome=Outcome.LOST, trouble=trouble)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def recovered(state: State) -> State:
    """Where an experiment goes on that was killed when its last written state was this one.

    The step may have been performed wholly, partly or not at all, so only such steps are chosen as may be repeated.
    """
    step = state.step
    if step in (Step.BASELINE, Step.BACKUP):
        return replace(state, step=Step.DONE, outcome=Outcome.NOTHING_CHANGED, reason=f"it was cut off at {step.value}")
    if step is Step.KEEP or (step is Step.RECORD and state.outcome is not Outcome.LOST):
        return state
    if step in _TRYING:
        reason = f"the experiment was cut off at {step.value}"
        return replace(state, step=Step.RESTORE, verdict=Verdict.INTERRUPTED, reason=reason, attempts=0)
    return replace(state, step=Step.RESTORE, outcome=None, attempts=0, trouble="")


# ---- policies

QUALITY_KEYS: Final = frozenset(
    {"model", "quantization", "dtype", "kv_cache_dtype", "kv_cache_dtype_k", "kv_cache_dtype_v"}
)
"""Settings that can alter answers."""
_KV_KEYS: Final = frozenset({"kv_cache_dtype", "kv_cache_dtype_k", "kv_cache_dtype_v"})


def _label(changes: Changes) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items())


class _Base:
    begins_dead = False

    def needs_quality(self, changes: Changes) -> bool:
        return any(key in QUALITY_KEYS for key in changes)


@dataclass(frozen=True)
class OneChange(_Base):
    """Try one change; keep it when it went well."""

    changes: Changes

    def next(self, results: Sequence[TrialResult], old_score: float | None = None) -> Trial | Finish:
        """The change, then the end."""
        del old_score
        if not results:
            return Trial(_label(self.changes), self.changes)
        result = results[-1]
        if result.verdict is Verdict.OK:
            return Finish(0, "all checks passed")
        return Finish(None, result.reason, result.verdict)


@dataclass(frozen=True)
class SweepPolicy(_Base):
    """Try one setting's values in order; keep the best of those that went well, or the old one.

    Attributes:
        key: the setting.
        values: what to try.
        keep_best: whether the best is kept; else the old settings come back.
    """

    key: str
    values: Sequence[Scalar]
    keep_best: bool = False

    def next(self, results: Sequence[TrialResult], old_score: float | None = None) -> Trial | Finish:
        """The next value, then the end."""
        if len(results) < len(self.values):
            changes = {self.key: self.values[len(results)]}
            return Trial(_label(changes), changes)
        scores = {place: r.score for place, r in enumerate(results) if r.verdict is Verdict.OK and r.score is not None}
        if not scores:
            return Finish(None, f"no value of {self.key} went well", Verdict.FAILED)
        best = max(scores, key=lambda place: scores[place])
        if not self.keep_best:
            return Finish(None, f"the sweep is over; the highest throughput is at {results[best].label}")
        if old_score is not None and old_score >= scores[best]:
            told = f"{results[best].label} comes to {scores[best]:.4g} tokens/s, what it was before to {old_score:.4g}"
            return Finish(None, f"no value is better than the old one: {told}")
        return Finish(best, f"the highest throughput of {len(scores)} values")


@dataclass(frozen=True)
class LadderPolicy(_Base):
    """Walk the order of retreat until the server starts and meets what is asked.

    First each direction alone, from the old settings, so that it shows which one helps: the steps of quantisation in
    order until one helps, then those of the context. If both help, the one that needs fewer steps is kept, and of equal
    ones the context, since answers stay what they are. If neither does, both are taken to their ends together, and
    then the batch is made smaller.

    Attributes:
        quantization: steps of quantisation, of weights or KV cache, least first.
        context: values of `max_model_len`, largest first.
        batch: values of `max_batch_size`, largest first.
    """

    quantization: Sequence[Changes] = ()
    context: Sequence[int] = ()
    batch: Sequence[int] = ()
    begins_dead: bool = True

    def next(self, results: Sequence[TrialResult], old_score: float | None = None) -> Trial | Finish:
        """The next rung, then the end."""
        del old_score
        told = list(results)
        lines: list[tuple[int, int] | None] = []
        alone: tuple[list[dict[str, Scalar]], ...] = (
            [dict(step) for step in self.quantization],
            [{"max_model_len": value} for value in self.context],
        )
        place = 0
        for steps in alone:
            helped = None
            for depth, changes in enumerate(steps, start=1):
                if place == len(told):
                    return Trial(_label(changes), changes)
                place += 1
                if told[place - 1].verdict is Verdict.OK:
                    helped = (place - 1, depth)
                    break
            lines.append(helped)
        quantized, shortened = lines
        if quantized is not None or shortened is not None:
            return self._conclude(told, quantized, shortened)
        deepest = {key: value for steps in alone if steps for key, value in steps[-1].items()}
        rungs = [deepest] if all(alone) else []
        rungs += [deepest | {"max_batch_size": value} for value in self.batch]
        for changes in rungs:
            if place == len(told):
                return Trial(_label(changes), changes)
            place += 1
            if told[place - 1].verdict is Verdict.OK:
                return Finish(place - 1, self._together(changes))
        unproved = next((r for r in told if r.served and r.verdict is Verdict.INCONCLUSIVE), None)
        if unproved is not None:
            return Finish(None, f"{unproved.label} serves, but {unproved.reason}", Verdict.INCONCLUSIVE)
        untried = next((r for r in told if r.elsewhere), None)
        if untried is not None:
            reason = f"no step helped, but {untried.label} failed at something else than the card: {untried.reason}"
            return Finish(None, reason, Verdict.INCONCLUSIVE)
        untold = self._not_given()
        reason = (
            f"no step helped, and {untold}: go further, or this card cannot carry the model"
            if untold
            else "no step helped: this card cannot carry the model; change the card or the model"
        )
        return Finish(None, reason, Verdict.FAILED)

    def _not_given(self) -> str:
        """Which directions nobody asked for, in words; empty when none is missing."""
        directions = (("quantisation", self.quantization), ("context", self.context))
        missing = [name for name, steps in directions if not steps]
        return f"{' and '.join(missing)} {'were' if len(missing) > 1 else 'was'} not tried" if missing else ""

    def _together(self, changes: Changes) -> str:
        """What it says that a rung below those of one direction alone helps."""
        untold = self._not_given()
        if "max_batch_size" not in changes:
            return f"only together: {_label(changes)}; weights and KV cache both bind"
        if untold:
            return f"a smaller batch helps: {_label(changes)}; {untold}, so what else would help is not known"
        return f"only together: {_label(changes)}; what requests take beside the weights binds, too"

    def _conclude(
        self, told: Sequence[TrialResult], quantized: tuple[int, int] | None, shortened: tuple[int, int] | None
    ) -> Finish:
        if quantized is not None and shortened is not None:
            by_context = shortened[1] <= quantized[1]
            keep = shortened[0] if by_context else quantized[0]
            return Finish(keep, f"quantisation and context both help; {told[keep].label} is the cheaper")
        if shortened is not None:
            alone = self._was_tried(told, self.quantization)
            only = "only the context helps" if alone else "the context helps, and no quantisation could be tried"
            return Finish(shortened[0], f"{only}: the KV cache binds")
        assert quantized is not None  # noqa: S101 - one of them helped
        kept = told[quantized[0]]
        if set(kept.changes) <= _KV_KEYS:
            return Finish(quantized[0], "only quantisation helps: the KV cache binds")
        if self._was_tried(told, [{"max_model_len": value} for value in self.context]):
            return Finish(quantized[0], "only quantisation helps: weights bind")
        reason = "quantisation helps; no shorter context could be tried, so weights or KV cache may bind"
        return Finish(quantized[0], reason)

    def _was_tried(self, told: Sequence[TrialResult], steps: Sequence[Changes]) -> bool:
        """Whether a trial of these steps failed for what the card cannot, so that they are known not to help."""
        return any(result.changes == changes and not result.elsewhere for result in told for changes in steps)
