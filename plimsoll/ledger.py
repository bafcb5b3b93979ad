"""`plimsoll ledger`: the history of settings, figures and conclusions, one line of JSON a record, beside the settings.

`hy3-serving.yaml` has its ledger in `hy3-serving.ledger.jsonl`. It is only ever appended to and fits in git: a line is
a whole record, so that a merge is a union of lines. A line that a crash cut off costs that record and is said; fields
that a newer Plimsoll wrote are shown and passed over. No text of prompts or answers and no key is ever in it.
"""

import argparse
import contextlib
import fcntl
import getpass
import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeGuard

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alerts.figures import RULES, Comparison, Figure, Figures, Judgement, Trend, compare, rule_of, theil_sen
from plimsoll.arguments import number, whole
from plimsoll.report import clean, figure
from serving.clock import NS, SystemClock
from serving.errors import ConfigError, RecordError

__all__ = [
    "EXAMPLES",
    "Change",
    "Conclusion",
    "LedgerPage",
    "Record",
    "Regression",
    "add_arguments",
    "append",
    "find",
    "ledger_path",
    "new_id",
    "read_ledger",
    "read_record",
    "regress",
    "run",
    "who_decides",
]

EXAMPLES = """examples:
  plimsoll ledger show hy3-serving.yaml --last 5
  plimsoll ledger show hy3-serving.yaml last
  plimsoll ledger add hy3-serving.yaml --note "driver 580 installed" --figure decode_tokens_per_second@1=52.1
  plimsoll ledger add hy3-serving.yaml --run result.json --note "after the driver"
  plimsoll ledger diff hy3-serving.yaml 3 last
  plimsoll ledger regress hy3-serving.yaml

A record is named by its number in the file, by its id or the beginning of it, or by `last`.
regress: exit code 1 when figures are worse than the best comparable record, 3 when there is too little to say."""

SCHEMA: Final = "plimsoll.ledger/1"
_MAX_LINE_BYTES = 2**20
_MAX_FILE_BYTES = 256 * 2**20
_TREND_RECORDS = 8
"""Records below which a trend is not asked for: the interval's approximation needs about so many."""
_TREND_LIMIT = 500
_TREND_ERROR = 0.01
"""How often chance may make a decline of any figure."""
_SCATTER_RECORDS = 5
"""Records from which on they tell themselves how much records differ."""
_SCATTER_LIMIT = 4.0
"""Standard deviations of records that chance may make; more where few records tell what one is."""
_NORMAL_BY_MAD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
_DAY_SECONDS = 86_400
_LONGEST_TEXT = 2000
_MUST_AGREE = (
    *("quantization", "dtype", "kv_cache_dtype", "kv_cache_dtype_k", "kv_cache_dtype_v"),
    *("mtp_layers", "num_speculative_tokens"),
)
"""Settings that make figures incomparable when they differ; the others are what tuning is about."""


class Conclusion(StrEnum):
    """What became of a change."""

    KEPT = "kept"
    ROLLED_BACK = "rolled back"
    MEASURED = "measured"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Change:
    """One changed setting by its canonical key; None is a setting that the file does not have."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the ledger.

    Attributes:
        id: `YYYYMMDD-HHMMSS-xxxxxx` in UTC.
        t_ns: when it was concluded, Unix nanoseconds.
        kind: what wrote it: `set`, `sweep`, `ladder`, `restart`, `recover`, `measure` or `by hand`.
        conclusion: what became of it.
        reason: why, for people.
        by: who decided.
        rule: the automatic rule that decided, None when a person did.
        changes: what changed.
        settings: canonical settings with which `after` was measured.
        hash_before: hash of the canonical settings before the change.
        hash_after: the same after it.
        target: url, engine, version, model.
        split: how the model is spread over cards, by canonical key.
        load: the fixed load that was measured, whole: figures of different loads do not compare.
        startup: start-up facts of the new start by canonical key.
        before: figures before the change.
        after: figures after it.
        warnings: what a reader must know.
        detail: whatever else the writer has to say.
        extra: fields of a newer Plimsoll.
        line: its line in the file, from 1; 0 when it is in none.
    """

    id: str
    t_ns: int
    kind: str
    conclusion: Conclusion | str
    reason: str
    by: str
    rule: str | None = None
    changes: tuple[Change, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    hash_before: str | None = None
    hash_after: str | None = None
    target: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    startup: Mapping[str, Any] = field(default_factory=dict)
    before: Figures = field(default_factory=dict)
    after: Figures = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0

    def document(self) -> dict[str, Any]:
        """As a line holds it."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "t_ns": self.t_ns,
            "at": datetime.fromtimestamp(self.t_ns / NS, UTC).isoformat(timespec="seconds"),
            "kind": self.kind,
            "conclusion": str(self.conclusion),
            "reason": self.reason,
            "by": self.by,
            "rule": self.rule,
            "changes": [{"key": item.key, "before": item.before, "after": item.after} for item in self.changes],
            "settings": dict(self.settings),
            "settings_hash": {"before": self.hash_before, "after": self.hash_after},
            "target": dict(self.target),
            "split": dict(self.split),
            "load": dict(self.load),
            "startup": dict(self.startup),
            "figures": {
                "before": {name: item.document() for name, item in self.before.items()},
                "after": {name: item.document() for name, item in self.after.items()},
            },
            "warnings": list(self.warnings),
            "detail": dict(self.detail),
            **self.extra,
        }

    def served(self) -> tuple[Mapping[str, Any], Figures] | None:
        """Settings and figures of what served once this was concluded; None when it says nothing of that.

        A trial of a sweep was on its way to the next one, so its figures are nobody's normal state.
        """
        trial = self.kind in ("sweep", "ladder") and self.conclusion in (Conclusion.MEASURED, Conclusion.REFUSED)
        if trial:
            return None
        if self.conclusion in (Conclusion.KEPT, Conclusion.MEASURED):
            return (self.settings, self.after) if self.after else None
        if not self.before:
            return None
        settings = dict(self.settings) | {change.key: change.before for change in self.changes}
        return {key: value for key, value in settings.items() if value is not None}, self.before

    def measured_hash(self) -> tuple[str | None, Figures] | None:
        """Hash of the settings that served at the end, and their figures."""
        served = self.served()
        if served is None:
            return None
        kept = self.conclusion in (Conclusion.KEPT, Conclusion.MEASURED)
        return self.hash_after if kept else self.hash_before, served[1]


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """A ledger as read: its records in the order of the file, and what could not be read."""

    path: Path
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()


# ---- the file


def ledger_path(settings: Path) -> Path:
    """The ledger of a settings file; a path that is a ledger already is taken as it is."""
    return settings if settings.suffix == ".jsonl" else settings.with_name(f"{settings.stem}.ledger.jsonl")


def new_id(t_ns: int) -> str:
    """A name for a record of that moment: sorts by time, and no two are alike."""
    return f"{datetime.fromtimestamp(t_ns / NS, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def who_decides() -> str:
    """`user@host`, of whoever runs this."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def append(path: Path, record: Record) -> None:
    """Add a record: whole or not at all, whoever else appends meanwhile.

    A line that a crash left unfinished is closed first, so that it costs no other record.

    Raises:
        RecordError: the file cannot be written; it is as it was before.
    """
    try:
        line = json.dumps(record.document(), allow_nan=False, separators=(", ", ": ")).encode() + b"\n"
    except ValueError as error:
        raise RecordError(f"{path}: a figure of the record is no finite number ({error})") from None
    if len(line) > _MAX_LINE_BYTES:
        raise RecordError(f"{path}: the record has {len(line)} bytes; a line has at most {_MAX_LINE_BYTES}")
    try:
        with _locked(path) as descriptor:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            written = os.write(descriptor, line)
            if written < len(line):
                os.ftruncate(descriptor, size)
                raise RecordError(f"{path}: only {written} of {len(line)} bytes could be written: is the disk full?")
            os.fsync(descriptor)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def read_ledger(path: Path) -> LedgerPage:
    """All records of a ledger; one that is not there yet is empty.

    Raises:
        ConfigError: what is there is no ledger.
    """
    try:
        if not path.exists():
            return LedgerPage(path, ())
        if not path.is_file():
            raise ConfigError(f"{path}: not a regular file, so no ledger")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES // 2**20} MiB; no ledger is")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    records: list[Record] = []
    notes: list[str] = []
    seen: set[str] = set()
    lines = raw.split(b"\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _read_line(line, place)
        if record is None:
            torn = place == len(lines)
            notes.append(
                f"{path}:{place}: "
                + ("cut off in the middle, by a crash or a full disk" if torn else "not a record; passed over")
            )
        elif record.id not in seen:  # a merge of two branches may bring a line twice
            seen.add(record.id)
            records.append(record)
    if notes and not records:
        raise ConfigError(f"{path}: no line of it is a record; is it a ledger?")
    return LedgerPage(path, tuple(records), tuple(notes))


def _read_line(line: bytes, place: int) -> Record | None:
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        # JSON knows no NaN and no Infinity: such a line could be read and never be told.
        document = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return read_record(document, place)


def _refuse(word: str) -> None:
    raise ValueError(word)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def read_record(document: Any, place: int = 0) -> Record | None:
    """A record from the JSON that `Record.document` gives; None when it is none. `place` is its line."""
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("plimsoll.ledger/"):
        return None
    name, t_ns = document.get("id"), document.get("t_ns")
    if not isinstance(name, str) or isinstance(t_ns, bool) or not isinstance(t_ns, int) or not 0 <= t_ns < 2**63:
        return None
    hashes, both = _mapping(document.get("settings_hash")), _mapping(document.get("figures"))
    record = Record(
        id=name,
        t_ns=t_ns,
        kind=_text(document.get("kind")) or "unknown",
        conclusion=_conclusion(document.get("conclusion")),
        reason=_text(document.get("reason")) or "",
        by=_text(document.get("by")) or "unknown",
        rule=_text(document.get("rule")),
        changes=tuple(
            Change(str(item["key"]), item.get("before"), item.get("after"))
            for item in _list(document.get("changes"))
            if isinstance(item, dict) and "key" in item
        ),
        settings=_mapping(document.get("settings")),
        hash_before=_text(hashes.get("before")),
        hash_after=_text(hashes.get("after")),
        target=_mapping(document.get("target")),
        split=_mapping(document.get("split")),
        load=_mapping(document.get("load")),
        startup=_mapping(document.get("startup")),
        before=_figures(both.get("before")),
        after=_figures(both.get("after")),
        warnings=tuple(str(item) for item in _list(document.get("warnings"))),
        detail=_mapping(document.get("detail")),
        line=place,
    )
    known = record.document()
    return replace(record, extra={key: value for key, value in document.items() if key not in known})


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _conclusion(value: Any) -> Conclusion | str:
    try:
        return Conclusion(value)
    except ValueError:
        return str(value)


def _figures(value: Any) -> dict[str, Figure]:
    found = {}
    for name, item in _mapping(value).items():
        parts = [item.get(key) for key in ("value", "low", "high")] if isinstance(item, dict) else [None]
        if all(_is_figure(part) for part in parts):
            value, low, high = (float(item[key]) for key in ("value", "low", "high"))
            samples = item.get("samples")
            found[name] = Figure(value, low, high, samples if isinstance(samples, int) else 1)
    return found


def _is_figure(value: Any) -> TypeGuard[float]:
    """Whether it is a number that a float can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def find(page: LedgerPage, name: str) -> Record:
    """The record called that: its number in the file from 1, `last`, or an id or its beginning.

    Raises:
        ConfigError: there is none, or more than one.
    """
    records = page.records
    if not records:
        raise ConfigError(f"{page.path}: the ledger is empty; `plimsoll experiment` and `plimsoll ledger add` fill it")
    if name == "last":
        return records[-1]
    if name.isascii() and name.isdigit() and len(name) < 8:
        if not 1 <= int(name) <= len(records):
            raise ConfigError(f"{page.path}: there is no record {name}; it has 1 to {len(records)}")
        return records[int(name) - 1]
    found = [record for record in records if record.id.startswith(name)] if name else []
    if len(found) != 1:
        many = "more than one record begins" if found else "no record begins"
        raise ConfigError(f"{page.path}: {many} with {name[:60]!r}; `plimsoll ledger show` lists them")
    return found[0]


# ---- regressions


@dataclass(frozen=True, slots=True)
class Decline:
    """How one figure moved over many records.

    Attributes:
        name: of the figure.
        trend: per day.
        days: between the first and the last record.
        change_ratio: of the line over that time, as a share of its beginning.
        change_low_ratio: lower end of its interval.
        change_high_ratio: upper end.
        flagged: the whole interval is on the worse side, and the change is large enough to matter.
    """

    name: str
    trend: Trend
    days: float
    change_ratio: float
    change_low_ratio: float
    change_high_ratio: float
    flagged: bool

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "name": self.name,
            "records": self.trend.points,
            "days": self.days,
            "change_ratio": self.change_ratio,
            "interval_ratio": [self.change_low_ratio, self.change_high_ratio],
            "flagged": self.flagged,
        }


@dataclass(frozen=True, slots=True)
class Regression:
    """What `regress` found.

    Attributes:
        record: the one that is judged.
        baseline: the best comparable one, None when there is none.
        comparisons: figure by figure.
        declines: figure by figure over all comparable records; empty with too few of them.
        comparable: comparable records, the judged one included.
        verdict: pass, fail or inconclusive.
        reason: for people.
        notes: what was not judged, and why.
    """

    record: Record
    baseline: Record | None
    comparisons: tuple[Comparison, ...]
    declines: tuple[Decline, ...]
    comparable: int
    verdict: str
    reason: str
    notes: tuple[str, ...] = ()


def _likeness(record: Record) -> str | None:
    """What must be equal for two records' figures to compare, as text; None when the record has no figures."""
    served = record.served()
    if served is None:
        return None
    settings, _ = served
    parts = [
        record.target.get("model"),
        record.target.get("engine"),
        {key: value for key, value in record.split.items() if value not in (None, 1)},
        record.load,
        [settings.get(key) for key in _MUST_AGREE],
    ]
    return json.dumps(parts, sort_keys=True, default=str)


def regress(page: LedgerPage, record: Record | None = None, *, allowed_ratio: float = 0.05) -> Regression:
    """Hold a record's figures against the best comparable record before it, and look for slow decline over all.

    Comparable are records of the same model, engine, split, load and precision. The best of many is best partly by
    luck; against that a figure counts as worse only when its rounds lie wholly outside the baseline's, by as much as
    rounds of one record differ, and, where there are enough records to tell, outside what those differ by themselves.
    Decline is Theil and Sen's slope over time with its interval, 99 % for all figures together, from eight records on;
    half of `allowed_ratio` over the whole time is enough to be flagged when the interval excludes no change.

    Args:
        page: the ledger.
        record: the one to judge; the latest that has figures when None.
        allowed_ratio: how much worse than the baseline is accepted, as a share of it.

    Raises:
        ConfigError: the named record has no figures.
    """
    if record is None:
        record = next((item for item in reversed(page.records) if _likeness(item) is not None), None)
        if record is None:
            raise ConfigError(f"{page.path}: no record with figures in it; `plimsoll experiment` measures")
    likeness = _likeness(record)
    served = record.served()
    if likeness is None or served is None:
        raise ConfigError(f"{page.path}: record {record.id} has no figures of what serves")
    figures = served[1]
    past = [
        (item, state[1])
        for item in page.records
        if item.id != record.id
        and (item.t_ns, item.line) < (record.t_ns, record.line)
        and _likeness(item) == likeness
        and (state := item.served()) is not None
    ]
    best = max(past, key=lambda pair: _advantage(pair[1], figures), default=None)
    found = [] if best is None else compare(best[1], figures, allowed_ratio=allowed_ratio)
    comparisons = tuple(_doubted(item, [known[item.name] for _, known in past if item.name in known]) for item in found)
    declines, notes = _declines([*past, (record, figures)], allowed_ratio)
    if best is not None and len(past) < _SCATTER_RECORDS:
        notes.append(
            f"how much records differ by themselves, as after restarts, is known from {_SCATTER_RECORDS} earlier ones "
            f"on; there are {len(past)}"
        )
    worse = [item for item in comparisons if item.judged and item.judgement is Judgement.WORSE]
    falling = [item for item in declines if item.flagged]
    if worse or falling:
        parts = [_say_comparison(item) for item in worse] + [_say_decline(item) for item in falling]
        verdict, reason = "fail", "; ".join(parts)
    elif best is None or not any(item.judged for item in comparisons):
        verdict = "inconclusive"
        reason = "no earlier record of the same model, engine, split, load and precision has figures"
    else:
        verdict, reason = "pass", f"no judged figure is worse than in {best[0].id} by more than {allowed_ratio:.0%}"
    return Regression(
        record,
        None if best is None else best[0],
        comparisons,
        tuple(declines),
        len(past) + 1,
        verdict,
        reason,
        tuple(notes),
    )


def _doubted(item: Comparison, past: Sequence[Figure]) -> Comparison:
    """The comparison; of a worse figure that chance makes as bad, that it is the same."""
    rule = rule_of(item.name)
    if item.judgement is not Judgement.WORSE or rule is None or rule.absolute:
        return item
    old, new = item.before, item.after
    gap = old.low - new.high if rule.higher_is_better else new.low - old.high
    by_chance = gap < ((old.high - old.low) + (new.high - new.low)) / 2
    if len(past) >= _SCATTER_RECORDS:
        values = [known.value for known in past]
        middle = median(values)
        scatter = _NORMAL_BY_MAD * median(abs(value - middle) for value in values)
        by_chance = abs(new.value - middle) <= _SCATTER_LIMIT * (1 + 4 / len(values)) * scatter
    return replace(item, judgement=Judgement.SAME) if by_chance else item


def _advantage(baseline: Figures, figures: Figures) -> float:
    """How much better a baseline is: the mean logarithm of the ratios of the judged figures, better being positive."""
    gains = []
    for name, old in baseline.items():
        rule, new = rule_of(name), figures.get(name)
        if rule is None or new is None or not rule.judged or rule.absolute or old.value <= 0 or new.value <= 0:
            continue
        gain = math.log(old.value / new.value)
        gains.append(gain if rule.higher_is_better else -gain)
    return sum(gains) / len(gains) if gains else -math.inf


def _declines(history: Sequence[tuple[Record, Figures]], allowed_ratio: float) -> tuple[list[Decline], list[str]]:
    if len(history) < _TREND_RECORDS:
        return [], [f"slow decline is judged from {_TREND_RECORDS} comparable records on; there are {len(history)}"]
    history = sorted(history, key=lambda pair: pair[0].t_ns)[-_TREND_LIMIT:]
    judged: dict[str, list[tuple[float, float]]] = {}
    for name in history[-1][1]:
        rule = rule_of(name)
        points = [(record.t_ns / NS / _DAY_SECONDS, known[name].value) for record, known in history if name in known]
        if rule is not None and rule.judged and not rule.absolute and len(points) >= _TREND_RECORDS:
            judged[name] = points
    found = []
    for name, points in judged.items():
        rule = RULES[name.partition("@")[0]]
        # Of several figures that are asked at once each has its share of the error (Bonferroni).
        trend = theil_sen(points, confidence=1 - _TREND_ERROR / len(judged))
        days = points[-1][0] - points[0][0]
        level = sorted(value for _, value in points)[len(points) // 2] if trend is not None else 0.0
        if trend is None or level <= 0:
            continue
        middle = (points[0][0] + points[-1][0]) / 2
        start = level + trend.slope * (points[0][0] - middle)
        scale = days / (start if start > 0 else level)
        low, change, high = trend.low * scale, trend.slope * scale, trend.high * scale
        worst = high if rule.higher_is_better else -low
        size = -change if rule.higher_is_better else change
        found.append(Decline(name, trend, days, change, low, high, flagged=worst < 0 and size >= allowed_ratio / 2))
    return found, []


def _say_name(name: str) -> str:
    base, _, at = name.partition("@")
    return (RULES[base].words if base in RULES else base) + (f" at {at}" if at else "")


def _say_change(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:+.1%}"


def _say_comparison(item: Comparison) -> str:
    change = "" if item.change_ratio is None else f" ({_say_change(item.change_ratio)})"
    return f"{_say_name(item.name)} got worse: {figure(item.before.value)} -> {figure(item.after.value)}{change}"


def _say_decline(item: Decline) -> str:
    return (
        f"{_say_name(item.name)} declines: {item.change_ratio:+.1%} over {item.days:.1f} days and "
        f"{item.trend.points} records (99 % interval {item.change_low_ratio:+.1%} to {item.change_high_ratio:+.1%})"
    )


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="show|add|diff|regress")

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=summary, description=summary)
        sub.add_argument("settings", type=Path, metavar="SETTINGS.yaml", help="the settings file, or its ledger")
        sub.add_argument("--json", action="store_true", help="print one JSON document on stdout")
        return sub

    show = action("show", "the records, as a table or one in full")
    show.add_argument("record", nargs="?", metavar="RECORD", help="one record in full: number, id or `last`")
    show.add_argument("--last", type=whole(1, 1_000_000), metavar="N", help="only the last N")
    add = action("add", "add a record by hand, or from the result of a run")
    add.add_argument("--note", required=True, metavar="TEXT", help="why there is this record")
    add.add_argument(
        "--run", type=Path, metavar="FILE", help="what `plimsoll stress --json` printed, or a run file: its figures"
    )
    add.add_argument(
        "--figure", action="append", default=[], metavar="NAME[@N]=VALUE", help=f"a figure: {', '.join(RULES)}"
    )
    add.add_argument("--changed", action="append", default=[], metavar="KEY=OLD:NEW", help="what was changed")
    add.add_argument(
        "--conclusion", default="measured", metavar="C", help=f"one of {', '.join(Conclusion)} (default: measured)"
    )
    add.add_argument("--by", metavar="WHO", help="who decided (default: user@host)")
    diff = action("diff", "two records: settings and figures")
    diff.add_argument("first", metavar="A")
    diff.add_argument("second", metavar="B")
    judge = action("regress", "the latest or a named record against the best comparable one")
    judge.add_argument("record", nargs="?", metavar="RECORD", help="number, id or `last` (default: the latest)")
    judge.add_argument(
        "--allowed", type=number(0, 10), default=0.05, metavar="R", help="accepted worsening as a ratio (default: 0.05)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    path = ledger_path(arguments.settings)
    page = read_ledger(path)
    if not path.exists() and not arguments.settings.exists():
        raise ConfigError(f"{arguments.settings}: there is no such file, and no ledger {path.name} beside it")
    document: dict[str, Any] = {"schema": SCHEMA, "ledger": str(path), "action": arguments.action}
    code = 0
    if arguments.action == "add":
        record = _by_hand(arguments)
        append(path, record)
        document |= {"added": record.document()}
    elif arguments.action == "diff":
        document |= _difference(find(page, arguments.first), find(page, arguments.second))
    elif arguments.action == "regress":
        named = find(page, arguments.record) if arguments.record is not None else None
        result = regress(page, named, allowed_ratio=arguments.allowed)
        document |= _regression_document(result)
        code = {"pass": 0, "fail": 1}.get(result.verdict, 3)
    else:
        chosen = (find(page, arguments.record),) if arguments.record is not None else page.records
        chosen = chosen if arguments.last is None else chosen[-arguments.last :]
        document |= {"records": [record.document() | {"number": _number(page, record)} for record in chosen]}
    document |= {"notes": [*document.get("notes", ()), *page.notes], "exit_code": code}
    if arguments.json:
        print(json.dumps(document, allow_nan=False))
    else:
        _render(document, Console(), in_full=arguments.action == "show" and arguments.record is not None)
    return code


def _number(page: LedgerPage, record: Record) -> int:
    return page.records.index(record) + 1


def _by_hand(arguments: argparse.Namespace) -> Record:
    try:
        conclusion = Conclusion(arguments.conclusion)
    except ValueError:
        raise ConfigError(f"--conclusion {arguments.conclusion}: choose one of {', '.join(Conclusion)}") from None
    figures: dict[str, Figure] = {}
    target: Mapping[str, Any] = {}
    load: Mapping[str, Any] = {}
    detail: dict[str, Any] = {}
    if arguments.run is not None:
        figures, target, load, detail = _from_run(arguments.run)
    for text in arguments.figure:
        name, found, value = text.partition("=")
        try:
            amount = float(value)
        except ValueError:
            found = ""
            amount = 0.0
        if not found or rule_of(name) is None or not math.isfinite(amount):
            raise ConfigError(f"--figure {text[:80]}: write NAME=VALUE or NAME@CONCURRENCY=VALUE; {', '.join(RULES)}")
        figures[name] = Figure(amount, amount, amount)
    t_ns = SystemClock().now_ns()
    return Record(
        id=new_id(t_ns),
        t_ns=t_ns,
        kind="by hand",
        conclusion=conclusion,
        reason=arguments.note[:_LONGEST_TEXT],
        by=arguments.by or who_decides(),
        changes=tuple(_changed(text) for text in arguments.changed),
        target=target,
        load=load,
        after=figures,
        detail=detail,
    )


def _changed(text: str) -> Change:
    key, found, values = text.partition("=")
    before, parted, after = values.partition(":")
    if not (found and parted and key):
        raise ConfigError(f"--changed {text[:80]}: write KEY=OLD:NEW, e.g. max_batch_size=32:48")
    return Change(key.strip(), before, after)


def _from_run(path: Path) -> tuple[dict[str, Figure], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Figures, target, load and where they come from, of a stress run: of the largest stage that held."""
    result = _run_document(path)
    held = [stage for stage in _list(result.get("stages")) if isinstance(stage, dict) and stage.get("held")]
    if not held:
        raise ConfigError(f"--run {path}: no stage of the run held, so it has no figures to keep")
    stage = max(held, key=lambda item: item.get("offered") or 0)
    at = f"@{stage.get('offered')}"
    found = {
        f"prefill_tokens_per_second{at}": stage.get("prefill_tokens_per_second"),
        f"decode_tokens_per_second{at}": stage.get("decode_tokens_per_second"),
        f"ttft_seconds{at}": _mapping(stage.get("ttft_seconds")).get("p50"),
        f"output_tokens_per_second{at}": stage.get("output_tokens_per_second"),
        "gpu_memory_peak_bytes": _mapping(stage.get("gpu_memory_used_bytes")).get("max"),
        "kv_cache_usage_peak_ratio": _mapping(stage.get("kv_cache_usage_ratio")).get("max"),
    }
    figures = {
        name: Figure(float(value), float(value), float(value)) for name, value in found.items() if _is_figure(value)
    }
    detail = {
        "run": str(result.get("run") or path.name),
        "verdict": result.get("verdict"),
        "load_line": _mapping(result.get("load_line")).get("measured"),
    }
    return figures, _mapping(result.get("target")), _mapping(result.get("workload")), detail


def _run_document(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(f"--run {path}: there is no such file")
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"--run {path}: cannot be read: {error.strerror or error}") from error
    if raw.startswith(b"SQLite format 3\0"):
        from monitor.history import SqliteHistory

        with SqliteHistory.open(path) as history:
            result = history.manifest().get("result")
    else:
        try:
            result = json.loads(raw)
        except (ValueError, RecursionError):
            result = None
    if not isinstance(result, dict) or result.get("schema") != "plimsoll.stress/1":
        raise ConfigError(f"--run {path}: neither what `plimsoll stress --json` prints nor a finished run file")
    return result


def _difference(first: Record, second: Record) -> dict[str, Any]:
    """What differs between two records: settings, start-up facts, and the figures of what served after each."""

    def state(record: Record) -> tuple[Mapping[str, Any], Figures]:
        return record.served() or (record.settings, record.after or record.before)

    (old_settings, old), (new_settings, new) = state(first), state(second)
    keys = sorted({*old_settings, *new_settings})
    facts = sorted({*first.startup, *second.startup})
    return {
        "first": {"id": first.id, "conclusion": str(first.conclusion)},
        "second": {"id": second.id, "conclusion": str(second.conclusion)},
        "settings": [
            {"key": key, "first": old_settings.get(key), "second": new_settings.get(key)}
            for key in keys
            if old_settings.get(key) != new_settings.get(key)
        ],
        "startup": [
            {"key": key, "first": first.startup.get(key), "second": second.startup.get(key)}
            for key in facts
            if first.startup.get(key) != second.startup.get(key)
        ],
        "comparable": _likeness(first) is not None and _likeness(first) == _likeness(second),
        "figures": [item.document() for item in compare(old, new, allowed_ratio=0.0)],
    }


def _regression_document(result: Regression) -> dict[str, Any]:
    return {
        "record": result.record.id,
        "baseline": None if result.baseline is None else result.baseline.id,
        "verdict": result.verdict,
        "reason": result.reason,
        "comparable_records": result.comparable,
        "figures": [item.document() for item in result.comparisons],
        "declines": [item.document() for item in result.declines],
        "notes": list(result.notes),
    }


# ---- for people


def _render(document: Mapping[str, Any], console: Console, *, in_full: bool) -> None:
    if in_full or document["action"] == "add":
        record = document["records"][0] if in_full else document["added"]
        for key, value in record.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            console.print(f"[bold]{escape(key)}[/]: {escape(clean(shown))}", highlight=False, soft_wrap=True)
    elif document["action"] == "show":
        console.print(_table(document["records"]) if document["records"] else "the ledger is empty")
    elif document["action"] == "diff":
        for part in ("settings", "startup"):
            for item in document[part]:
                text = f"{part}  {item['key']}: {item['first']} -> {item['second']}"
                console.print(escape(clean(text)), highlight=False, soft_wrap=True)
        console.print(_figure_table(document["figures"], "A", "B"))
        if not document["comparable"]:
            console.print("[yellow]model, engine, split, load or precision differ: the figures do not compare[/]")
    else:
        colour = {"pass": "green", "fail": "red"}.get(document["verdict"], "yellow")
        if document["figures"]:
            console.print(_figure_table(document["figures"], "baseline", "record"))
        console.print(
            f"[{colour}]{document['verdict']}[/]  {escape(clean(document['reason']))}", highlight=False, soft_wrap=True
        )
    for note in document["notes"]:
        console.print(f"[yellow]{escape(clean(note))}[/]", highlight=False, soft_wrap=True)


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("no", "at", "conclusion"):
        table.add_column(name, no_wrap=True)
    for name in ("changed", "decode tokens/s", "reason"):
        table.add_column(name, overflow="fold")
    for record in records:
        changes = ", ".join(f"{item['key']} {item['before']} -> {item['after']}" for item in record["changes"])
        decodes = [_decode(record["figures"][part]) for part in ("before", "after")]
        cells = (
            str(record["number"]),
            str(record["at"])[2:16].replace("T", " "),
            record["conclusion"],
            changes or "–",
            " -> ".join(text for text in decodes if text) or "–",
            f"{record['reason'][:200]} ({record['by']})",
        )
        table.add_row(*(escape(clean(cell)) for cell in cells))
    return table


def _decode(figures: Mapping[str, Any]) -> str:
    """The decode speeds of a record, by concurrency."""
    prefix = "decode_tokens_per_second"
    shown = [
        f"{figure(item['value'])}{name.removeprefix(prefix)}"
        for name, item in figures.items()
        if name.startswith(prefix)
    ]
    return " ".join(shown)


def _figure_table(figures: Sequence[Mapping[str, Any]], old: str, new: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure")
    for name in (old, new, "change", ""):
        table.add_column(name, justify="right")
    for item in figures:
        cells = (
            _say_name(item["name"]),
            figure(item["before"]["value"]),
            figure(item["after"]["value"]),
            _say_change(item["change_ratio"]),
            item["judgement"] if item["judged"] else f"({item['judgement']})",
        )
        table.add_row(*(escape(clean(cell)) for cell in cells))
    return table
