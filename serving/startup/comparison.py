"""Does the server run what the serving file says? Field by field, with the line that tells."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from serving.engines import ENGINES, LogFact, TargetFacts
from serving.settings import Scalar, Settings
from serving.startup.facts import Clamp, StartupFacts

__all__ = ["FieldCheck", "Outcome", "compare"]


class Outcome(StrEnum):
    """How a field of the file compares with the server."""

    EQUAL = "equal"
    DIFFERS = "differs"
    CLAMPED = "clamped"
    """The server was started with what the file says and cut it down."""
    ABSENT = "absent"
    """Neither the log nor the live server says."""


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """One field of the file against the server.

    Attributes:
        key: canonical settings key.
        outcome: how they compare.
        expected: what the file says.
        expected_line: its line in the file; None for what the file does not say (a clamp of a setting not in it).
        actual: what the server took; None when nothing tells.
        line: line of the log that says so; None when the live server did.
        text: that line, cut; or where the live server has it.
        live: what the live server says of the same, where it was asked and tells.
        note: what a person should know, or "".
    """

    key: str
    outcome: Outcome
    expected: Scalar | None
    expected_line: int | None
    actual: Scalar | None = None
    line: int | None = None
    text: str = ""
    live: Scalar | None = None
    note: str = ""


_UNCOMPARED = frozenset({"gpu", "mtp_layers"})
"""Keys that say what a file was derived for, not what a server runs."""
_LIVE = {
    "engine": "engine",
    "model": "model",
    "max_batch_size": "max_running_requests",
    "max_model_len": "context_tokens",
    "kv_cache_capacity_tokens": "kv_cache_capacity_tokens",
}


def compare(settings: Settings, facts: StartupFacts, live: TargetFacts | None = None) -> tuple[FieldCheck, ...]:
    """Compare each field of the file with the log and, where given, with the live server.

    The log counts where both tell; that the live server says otherwise is a difference too, since then it does not run
    from this start. A setting that the log says was cut, and that the file does not have, gets a line of its own.

    Args:
        settings: the file.
        facts: what the log says.
        live: what the running server says.
    """
    checks = [
        _check(settings, facts, live, key, value) for key, value in settings.values().items() if key not in _UNCOMPARED
    ]
    named = {check.key for check in checks}
    checks += [
        FieldCheck(clamp.key, Outcome.CLAMPED, clamp.asked, None, clamp.taken, clamp.line, clamp.text, note=_NOT_NAMED)
        for clamp in facts.clamps
        if clamp.key not in named
    ]
    return tuple(checks)


_NOT_NAMED = "the file does not say it"


def _check(settings: Settings, facts: StartupFacts, live: TargetFacts | None, key: str, expected: Scalar) -> FieldCheck:
    fact, note = _fact(facts, key)
    seen = getattr(live, _LIVE[key]) if live is not None and key in _LIVE else None
    line = settings.lines.get(key)
    if fact is None and seen is None:
        return FieldCheck(key, Outcome.ABSENT, expected, line, note=note or _silence(facts, key))
    agree = _AGREE.get(key, _equal)
    if fact is None:
        assert live is not None  # noqa: S101 - `seen` comes from it
        outcome = Outcome.EQUAL if agree(expected, seen, facts) else Outcome.DIFFERS
        return FieldCheck(key, outcome, expected, line, seen, None, f"live: {_live_source(live, key)}", seen, note)
    outcome = Outcome.EQUAL
    clamp = next((clamp for clamp in facts.clamps if clamp.key == key), None)
    text, told = fact.text, fact.line
    if not agree(expected, fact.value, facts):
        asked = facts.asked.get(key)
        started_so = asked is not None and agree(expected, asked.value, facts) and facts.replicas == 1
        outcome = Outcome.CLAMPED if clamp is not None or started_so else Outcome.DIFFERS
        if clamp is not None:
            text, told = clamp.text, clamp.line
            if clamp.asked is not None and not agree(expected, clamp.asked, facts):
                note = _join(note, f"the server was asked for {clamp.asked}, not for what the file says")
    elif clamp is not None:
        note = _join(note, _cut_from(clamp))
    if outcome is Outcome.EQUAL and seen is not None and not agree(expected, seen, facts):
        outcome = Outcome.DIFFERS
        note = _join(note, f"the log agrees, but the live server says {seen}: it does not run from this start")
    elif seen is not None and outcome is not Outcome.EQUAL and agree(expected, seen, facts):
        note = _join(note, f"the live server says {seen}: is this the log of its last start?")
    return FieldCheck(key, outcome, expected, line, fact.value, told, text, seen, note)


def _cut_from(clamp: Clamp) -> str:
    return "cut down by the server" + (f" from {clamp.asked}" if clamp.asked is not None else "")


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _fact(facts: StartupFacts, key: str) -> tuple[LogFact | None, str]:
    """What the server took by the log, and what is to be said of it."""
    if key == "engine":
        return (LogFact(facts.engine, facts.first_line, "the log is in its words"), "") if facts.engine else (None, "")
    if key == "gpus":
        return _cards(facts)
    fact = facts.settings.get(key)
    if fact is not None:
        note = ""
        if key == "kv_cache_capacity_tokens" and facts.hybrid:
            note = "a hybrid model: concurrency x length, no per-token cost"
        return fact, note
    asked = facts.asked.get(key)
    if asked is not None:
        return asked, "as it was started; the log does not say whether that was cut"
    return None, ""


def _cards(facts: StartupFacts) -> tuple[LogFact | None, str]:
    keys = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    told = [facts.settings[key] for key in keys if key in facts.settings]
    if len(told) == len(keys) and all(isinstance(fact.value, int) for fact in told):
        number = math.prod(int(fact.value) for fact in told)
        return LogFact(
            number, told[0].line, told[0].text
        ), "tensor x pipeline x data parallel; more if each has its own"
    cards = [buffers.device for buffers in facts.buffers if not buffers.on_host]
    if cards:
        return LogFact(len(cards), facts.first_line, f"buffers on {', '.join(cards)}"[:240]), ""
    return None, ""


def _silence(facts: StartupFacts, key: str) -> str:
    if facts.engine is None:
        return ""
    return ENGINES[facts.engine].dialect.log.unlogged.get(key, "")


def _live_source(live: TargetFacts, key: str) -> str:
    sources = {"max_batch_size": live.max_running_source, "kv_cache_capacity_tokens": live.kv_cache_capacity_source}
    return sources.get(key) or "its API"


# ---- when two values are the same


def _equal(expected: Scalar, actual: Scalar | None, facts: StartupFacts) -> bool:  # noqa: ARG001
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=1e-9, abs_tol=1e-9)
    return str(expected).strip().lower() == str(actual).strip().lower()


_TYPES = {
    "half": "float16", "f16": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32", "float": "float32",
    "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}  # fmt: skip


def _type_name(value: Scalar | None) -> str:
    name = str(value).strip().lower().removeprefix("torch.").replace("-", "_")
    return _TYPES.get(name, name)


def _equal_types(expected: Scalar, actual: Scalar | None, facts: StartupFacts) -> bool:
    wanted, taken = _type_name(expected), _type_name(actual)
    own = facts.settings.get("dtype")
    model = "auto" if own is None else _type_name(own.value)
    # `auto` is the model's own type, by either name.
    return wanted == taken or {wanted, taken} == {"auto", model} or ("auto" in (wanted, taken) and model == "auto")


def _equal_dtypes(expected: Scalar, actual: Scalar | None, facts: StartupFacts) -> bool:  # noqa: ARG001
    return _type_name(expected) in ("auto", _type_name(actual))


def _equal_models(expected: Scalar, actual: Scalar | None, facts: StartupFacts) -> bool:
    def plain(name: Scalar | None) -> str:
        last = re.split(r"[\\/]", str(name).rstrip("/\\"))[-1].lower()
        return re.sub(r"\.gguf$|-\d{5}-of-\d{5}", "", last)

    served = facts.served_as
    return plain(expected) == plain(actual) or (served is not None and plain(expected) == plain(served))


def _equal_layers(expected: Scalar, actual: Scalar | None, facts: StartupFacts) -> bool:
    if expected == "auto" or facts.layers is None:
        return expected in {"auto", actual}
    return actual == (facts.layers if expected == "all" else min(int(expected), facts.layers))


_AGREE: Mapping[str, Callable[[Scalar, Scalar | None, StartupFacts], bool]] = {
    "model": _equal_models,
    "dtype": _equal_dtypes,
    "kv_cache_dtype": _equal_types,
    "kv_cache_dtype_k": _equal_types,
    "kv_cache_dtype_v": _equal_types,
    "gpu_layers": _equal_layers,
}
