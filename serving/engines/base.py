"""The words in which an engine is described: a table of signals, and a dialect.

All that Plimsoll knows of one engine is one `Engine` value in a module of its own. Nothing else in the project asks
which engine it talks to; it asks the table. A new engine is a new table.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serving.exposition import Exposition, Histogram, Labels
from serving.signals import SIGNALS, Kind

__all__ = [
    "DEVICE_OUT_OF_MEMORY",
    "PROXY",
    "Complaint",
    "Dialect",
    "Engine",
    "Limits",
    "LogDump",
    "LogFact",
    "LogRule",
    "LogTable",
    "Reading",
    "SidePage",
    "Source",
    "TargetFacts",
    "whole_number",
]

PROXY = "proxy:"
"""Prefix of a source that only stands in for what the signal means."""


class Complaint(StrEnum):
    """What an engine means by an error message."""

    KV_CACHE_FULL = "kv_cache_full"
    OUT_OF_MEMORY = "out_of_memory"
    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt, or prompt plus requested output, does not fit the context."""


DEVICE_OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU|NPU) out of memory|OutOfMemoryError|cudaMalloc failed|CUDA error: out of memory", re.IGNORECASE
)
"""What the frameworks under all engines say when the device has no memory left."""


@dataclass(frozen=True, slots=True)
class Source:
    """One of an engine's own ways to tell a canonical signal.

    Attributes:
        names: exposed sample names (histograms: without suffix); the values of all are added, and all must be there.
        where: label -> accepted values; a missing label counts as "".
        scale: factor from the engine's unit to the canonical one.
        labels: for `_info` metrics: the value is the product of these labels' values instead of the sample's.
        across: "sum" or "max" over series when it differs from the signal's own aggregation.
        proxy: only stands in for the signal.
        at_finish: a counter that moves when a request ends, not while it runs.
        zero_if_unmatched: series of the name exist and none matches `where`: that means zero, because the engine makes
            a series only at the first occurrence.
    """

    names: tuple[str, ...]
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()
    scale: float = 1.0
    labels: tuple[str, ...] = ()
    across: str | None = None
    proxy: bool = False
    at_finish: bool = False
    zero_if_unmatched: bool = False

    @property
    def text(self) -> str:
        """How the source is named in samples and reports."""
        selector = ",".join(f"{label}={'|'.join(values)}" for label, values in self.where if values != ("",))
        label = f"[{'*'.join(self.labels)}]" if self.labels else ""
        name = "+".join(self.names) + (f"{{{selector}}}" if selector else "") + label
        return PROXY + name if self.proxy else name


@dataclass(frozen=True, slots=True)
class Reading:
    """What one scrape told, in canonical signals. What the engine did not tell is absent.

    Attributes:
        values: canonical signal -> value in its unit, over all ranks.
        sources: canonical signal -> the engine's own name for it; begins with `PROXY` where it only stands in.
        histograms: canonical signal -> cumulative histogram, over all ranks.
        at_finish: counters that in this engine move only when requests end: no heartbeat, no live rate.
        seconds: how long the answers took.
        start_mark: opaque; differs after a restart of the server. None where the engine shows none.
        bad_lines: lines of the page that could not be read.
    """

    values: Mapping[str, float]
    sources: Mapping[str, str]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    at_finish: frozenset[str] = frozenset()
    seconds: float = 0.0
    start_mark: str | None = None
    bad_lines: int = 0

    def is_proxy(self, signal: str) -> bool:
        """Whether the value of `signal` only stands in for what the signal means."""
        return self.sources.get(signal, "").startswith(PROXY)


@dataclass(frozen=True, slots=True)
class SidePage:
    """A second page, asked for only when the metrics page lacks one of `signals`.

    `read` takes the page's JSON and the KV capacity in tokens, if known, and gives signal -> (value, source). It must
    take any JSON: absent is the answer to what it cannot read.
    """

    path: str
    signals: tuple[str, ...]
    read: Callable[[Any, int | None], dict[str, tuple[float, str]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server says of its own limits; None where it does not say."""

    version: str | None = None
    context_tokens: int | None = None
    max_running_requests: int | None = None
    max_running_source: str | None = None
    kv_cache_capacity_tokens: int | None = None
    kv_cache_capacity_source: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What probing a target found.

    Attributes:
        engine: name of the engine's table.
        version: as the server gives it, or None.
        model: the name to put into requests.
        context_tokens: longest prompt plus output of one request.
        max_running_requests: batch limit of the whole target (all data-parallel ranks).
        max_running_source: where that limit was read.
        kv_cache_capacity_tokens: tokens that the KV cache of the whole target holds.
        kv_cache_capacity_source: where that was read.
        metrics_supported: whether the metrics page answered with this engine's names.
        notes: what a person should know about the figures above, as sentences.
    """

    engine: str
    version: str | None
    model: str
    context_tokens: int | None = None
    max_running_requests: int | None = None
    max_running_source: str | None = None
    kv_cache_capacity_tokens: int | None = None
    kv_cache_capacity_source: str | None = None
    metrics_supported: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogFact:
    """Something that a start-up log says, and where.

    Attributes:
        value: as a number where it is one.
        line: number of the line in the file, from 1.
        text: the line, cut; of a line that repeats all arguments, keys among them, only the argument in question.
    """

    value: str | int | float
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class LogRule:
    """One kind of line of a start-up log, and what it tells.

    Lines are searched, never matched from their beginning: what stands in front of a message changes with every
    release and supervisor. What a line tells is in the names of the pattern's groups:

    - a canonical settings key: the value that was really taken;
    - `asked_` and a key: what the start was given, which may be cut down later;
    - `asked`, `taken`: the two sides of a clamp of the key that `clamps` names;
    - `weights_gib`, `kv_gib`, `state_gib`, `graphs_gib`, `activations_gib`, `non_torch_gib`, `kv_tokens`, `kv_blocks`:
      figures of the rank that printed the line;
    - `device` with `model_mib`, `kv_mib`, `state_mib`, `compute_mib`, `output_mib`: buffers of that device;
    - `one_replica`: the log is of one data-parallel replica, which serves alone;
    - `version`, `served_as`, `concurrency`, `concurrency_tokens`, `offloaded_layers`, `layers`: of the whole start;
    - `lasted`: seconds that the phase in `lasting` took up to this line;
    - any other name: for the table's own `settle`.

    Attributes:
        words: text that every such line has; looked for before the pattern is tried.
        pattern: regular expression that is searched in the line.
        phase: phase of the start that begins with this line.
        lasting: phase whose duration the line tells.
        clamps: settings key that the line says was cut.
        adds: figures of several such lines add up (pools, models and files of one start).
        first: the first such line of a start counts, not the last (later ones are of draft models).
        hybrid: only models with sliding-window or state layers beside attention print it.
    """

    words: str
    pattern: str
    phase: str = ""
    lasting: str = ""
    clamps: str = ""
    adds: bool = False
    first: bool = False
    hybrid: bool = False


@dataclass(frozen=True, slots=True)
class LogDump:
    """A line that repeats the whole configuration as `key=value` or `'key': value`.

    Attributes:
        words: text that every such line has, just before the first key.
        names: the engine's own key -> group name as in `LogRule`. The first mention of a key counts.
        nones: the engine's own key -> what None means there; of other keys None tells nothing.
    """

    words: str
    names: Mapping[str, str]
    nones: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogTable:
    """How an engine's start-up log is read.

    Attributes:
        starts: words of the lines with which a process introduces itself. One after the start had got further begins
            another start.
        rules: in the order in which they are tried; every rule that fits a line counts.
        dumps: lines of the whole configuration.
        settle: facts that follow from others: (name -> fact of the whole start, (rank, figure) -> number) -> facts to
            add or replace, by settings key.
        unlogged: settings key -> why a start-up log may lack it, and where else it can be seen.
    """

    starts: tuple[str, ...]
    rules: tuple[LogRule, ...]
    dumps: tuple[LogDump, ...] = ()
    settle: Callable[[Mapping[str, LogFact], Mapping[tuple[str, str], float]], dict[str, LogFact]] = lambda _, __: {}
    unlogged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one engine speaks, apart from its signals.

    Attributes:
        default_port: the port it takes when told none; for hints only.
        readiness_paths: in order of preference; a 404 means that this release lacks the path.
        metrics_path: where the metrics page is.
        metrics_prefix: how its metric names begin; identifies the engine.
        metrics_hint: how to get metrics from a server that gives none, as an imperative.
        timeout_hint: what to do when the metrics page of a working server does not answer in time, or "".
        server_header: `Server` header that identifies it, or None.
        owned_by: `owned_by` of its models, which identifies it where metrics are off.
        supports_ignore_eos: whether `ignore_eos` in a request makes it generate all tokens asked for.
        reserved_output_ratio: share of the tokens still to come that it keeps free in the KV cache for each running
            request before it admits another; 0 admits by what is in use.
        preallocates_kv_cache: whether it takes memory for the whole KV cache at its start.
        replica_labels: labels whose series repeat one another (tensor-parallel ranks): the largest counts, not the sum.
        start_mark_header: header of the metrics page that differs after a restart, or None.
        complaints: patterns of error messages, first match wins.
        fact_pages: pages that tell limits; each entry is one page under the paths it had over time.
        read_limits: (model's entry in /v1/models, path -> JSON, reading or None) -> limits.
        log: how its start-up log is read.
    """

    default_port: int
    readiness_paths: tuple[str, ...]
    metrics_path: str
    metrics_prefix: str
    metrics_hint: str
    timeout_hint: str
    server_header: str | None
    owned_by: str
    supports_ignore_eos: bool
    replica_labels: frozenset[str]
    start_mark_header: str | None
    complaints: tuple[tuple[Complaint, re.Pattern[str]], ...]
    fact_pages: tuple[tuple[str, ...], ...]
    read_limits: Callable[[Mapping[str, Any], Mapping[str, Any], Reading | None], Limits]
    log: LogTable
    reserved_output_ratio: float = 0.0
    preallocates_kv_cache: bool = True


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: canonical signal -> sources in order of preference, and the dialect.

    Sources are tried anew at every scrape, never by version: an engine renames without notice.
    """

    name: str
    sources: Mapping[str, tuple[Source, ...]]
    dialect: Dialect
    side_page: SidePage | None = None

    def complaint(self, message: str) -> Complaint | None:
        """What the engine means by an error message or log line; None when the tables do not know it."""
        for complaint, pattern in self.dialect.complaints:
            if pattern.search(message):
                return complaint
        return None

    def speaks(self, exposition: Exposition) -> bool:
        """Whether a metrics page holds this engine's names."""
        return any(name.startswith(self.dialect.metrics_prefix) for name in exposition.samples)

    def read(self, exposition: Exposition) -> Reading:
        """Canonical signals of one metrics page (the side page is the caller's: see `scrape`)."""
        values: dict[str, float] = {}
        texts: dict[str, str] = {}
        histograms: dict[str, Histogram] = {}
        at_finish: set[str] = set()
        for signal, sources in self.sources.items():
            for source in sources:
                if SIGNALS[signal].kind is Kind.HISTOGRAM:
                    histogram = self._histogram(exposition, source)
                    if histogram is None:
                        continue
                    histograms[signal] = histogram
                else:
                    value = self._value(exposition, source, source.across or SIGNALS[signal].aggregation)
                    if value is None:
                        continue
                    values[signal] = value
                texts[signal] = source.text
                if source.at_finish:
                    at_finish.add(signal)
                break
        return Reading(
            values=values,
            sources=texts,
            histograms=histograms,
            at_finish=frozenset(at_finish),
            bad_lines=exposition.bad_lines,
        )

    def _value(self, exposition: Exposition, source: Source, aggregation: str) -> float | None:
        total = 0.0
        for name in source.names:
            series = exposition.samples.get(name)
            if not series:
                return None
            largest: dict[frozenset[tuple[str, str]], float] = {}
            for labels, sample in series:
                if not _matches(labels, source.where):
                    continue
                value = _product(labels, source.labels) if source.labels else sample
                if value is None:
                    continue
                rank = self._rank(labels)
                largest[rank] = max(value, largest.get(rank, value))
            if largest:
                total += max(largest.values()) if aggregation == "max" else sum(largest.values())
            elif not source.zero_if_unmatched:
                return None
        return total * source.scale

    def _histogram(self, exposition: Exposition, source: Source) -> Histogram | None:
        first_replica: dict[frozenset[tuple[str, str]], tuple[str | None, ...]] = {}
        replica_labels = sorted(self.dialect.replica_labels)

        def keep(labels: Labels) -> bool:
            if not _matches(labels, source.where):
                return False
            replica = tuple(labels.get(label) for label in replica_labels)
            rank = frozenset(item for item in self._rank(labels) if item[0] != "le")
            return first_replica.setdefault(rank, replica) == replica

        return exposition.histogram(source.names[0], keep)

    def _rank(self, labels: Labels) -> frozenset[tuple[str, str]]:
        return frozenset(item for item in labels.items() if item[0] not in self.dialect.replica_labels)


def whole_number(value: Any) -> int | None:
    """`value` as a positive whole number if it is one in JSON or in a metric, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value > 0 and value == int(value) else None


def _matches(labels: Labels, where: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    return all(labels.get(label, "") in accepted for label, accepted in where)


def _product(labels: Labels, names: tuple[str, ...]) -> float | None:
    product = 1.0
    for name in names:
        # Info metrics carry settings as text, "None" and the empty string among them.
        text = labels.get(name, "")
        if not (text.isascii() and text.isdigit()):
            return None
        product *= int(text)
    return product
