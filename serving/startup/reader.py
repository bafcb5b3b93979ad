"""What a start-up log says: one reader for all engines, driven by their tables.

A configuration file says what a server was meant to run with. Its start-up log says what it took, what it cut down,
where the memory went and how far it came. Everything here is evidence: each fact has the number of its line and the
line. What the log does not say is absent; engines keep silent about defaults, and a default is not assumed.

A log may hold many starts (restarts append) with months of service between them; the facts are of the last. Between
starts only the words with which a process introduces itself are looked for, so that such a log is read at the speed of
a text search, in bounded memory.
"""

import io
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from serving.engines import ENGINES, Engine, LogDump, LogFact, LogRule, LogTable
from serving.log_lines import Block, LogLine, Stamp, parse_line, read_blocks, split_block
from serving.startup.facts import PHASES, Clamp, DeviceBuffers, Phase, RankMemory, StartupFacts, whole

__all__ = ["logged_limits", "read_startup"]

_TEXT_LIMIT = 240
_QUIET_BYTES = 8 << 20
"""A start that says nothing for so long is over, whether or not it said so."""
_LOOK_BACK_LINES = 24
"""How far back a line without a time looks for one."""
_GIB, _MIB = 1 << 30, 1 << 20
_RANK_FIGURES = {
    "weights_gib": "weights_bytes",
    "kv_gib": "kv_cache_bytes",
    "state_gib": "state_bytes",
    "graphs_gib": "graphs_bytes",
    "activations_gib": "activations_bytes",
    "non_torch_gib": "non_torch_bytes",
    "kv_tokens": "kv_tokens",
    "kv_blocks": "kv_blocks",
}
_DEVICE_FIGURES = {
    "model_mib": "model_bytes",
    "kv_mib": "kv_cache_bytes",
    "state_mib": "state_bytes",
    "compute_mib": "compute_bytes",
    "output_mib": "output_bytes",
}
_SMALLEST_COUNTS = frozenset({"kv_tokens", "kv_blocks"})
"""Figures that one rank prints for several pipeline stages; the smallest binds."""
_PER_REPLICA = ("max_batch_size", "kv_cache_capacity_tokens")
"""Facts that engines print for one data-parallel replica, while settings mean the whole target."""
_SECRET = re.compile(r"api[_-]?key|token\b|password|secret|credential", re.IGNORECASE)
_DUMPED = re.compile(r"""['"]?\b(?P<key>\w+)['"]?\s*[=:]\s*(?P<value>'[^']*'|"[^"]*"|-?[\w.+/-]+)""")
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?|-?\.\d{1,15}")
_FIGURE = re.compile(r"[\d.,-]*")
_RELEASE = re.compile(r"\d{1,9}(?:\.\d{1,9}){2,5}")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+,?|\d+,")
_ENGINE_PROCESS = re.compile(r"(?:EngineCore|APIServer|ApiServer)(?:_|$)")


def read_startup(source: Path | BinaryIO, engine: Engine | None = None) -> StartupFacts:
    """Read the last start in a log.

    Args:
        source: a file, or an open binary stream.
        engine: whose log it is; found out from the log when None.

    Raises:
        ConfigError: the log cannot be read.
    """
    candidates = list(ENGINES.values()) if engine is None else [engine]
    readers = [_Reader(candidate) for candidate in candidates]
    length = 0
    for block in read_blocks(source):
        length += len(block.data)
        for reader in readers:
            reader.take(block)
    found = sorted((reader for reader in readers if reader.told), key=lambda reader: reader.told, reverse=True)
    if not found:
        return StartupFacts(log_bytes=length)
    also = tuple(reader.engine.name for reader in found[1:] if reader.introduced)
    return replace(found[0].facts(), also=also, log_bytes=length)


def logged_limits(engine: Engine, log_text: str) -> dict[str, int]:
    """Limits that a start-up log states: `max_running_requests`, `kv_cache_capacity_tokens`, `context_tokens`.

    Over the whole target, of the last start in the log. What the log does not state is absent.
    """
    facts = read_startup(io.BytesIO(log_text.encode("utf-8", "replace")), engine)
    limits = {
        "max_running_requests": facts.number("max_batch_size"),
        "kv_cache_capacity_tokens": facts.number("kv_cache_capacity_tokens"),
        "context_tokens": facts.number("max_model_len"),
    }
    return {name: number for name, number in limits.items() if number is not None}


@dataclass(slots=True)
class _Start:
    """What was read of one start so far."""

    first_line: int = 0
    told: dict[str, LogFact] = field(default_factory=dict)
    asked: dict[str, LogFact] = field(default_factory=dict)
    clamps: dict[tuple[str, str, str], Clamp] = field(default_factory=dict)
    figures: dict[tuple[str, str], float] = field(default_factory=dict)
    buffers: dict[tuple[str, str], float] = field(default_factory=dict)
    marks: list[Phase] = field(default_factory=list)
    hybrid: bool = False
    processes: dict[str, int | None] = field(default_factory=dict)

    @property
    def progressed(self) -> bool:
        """Whether it got beyond introducing itself."""
        return any(mark.name != "launch" for mark in self.marks)

    @property
    def over(self) -> bool:
        return any(mark.name == "ready" for mark in self.marks)


class _Reader:
    """Reads one engine's starts from blocks of a log."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._table: LogTable = engine.dialect.log
        self._start = _Start()
        self._starts = 0
        self._quiet_bytes = 0
        self._recent: deque[str] = deque(maxlen=_LOOK_BACK_LINES)
        self._rules = tuple((rule, re.compile(rule.pattern)) for rule in self._table.rules)
        words = dict.fromkeys(
            [*self._table.starts, *(d.words for d in self._table.dumps), *(r.words for r in self._table.rules)]
        )
        self._words = tuple(words)
        self._words_bytes = tuple(word.encode() for word in words)
        self._starts_bytes = tuple(word.encode() for word in self._table.starts)

    @property
    def told(self) -> int:
        """How much the last start tells; generic lines such as a web server's do not count."""
        start = self._start
        return len(start.told) + len(start.asked) + len(start.figures) + len(start.buffers) + len(start.clamps)

    @property
    def introduced(self) -> bool:
        """Whether a line with which this engine introduces itself was seen."""
        return self._starts > 0 and any(mark.name == "launch" for mark in self._start.marks)

    def take(self, block: Block) -> None:
        """Read on."""
        resting = self._start.over or self._quiet_bytes > _QUIET_BYTES
        if not any(word in block.data for word in (self._starts_bytes if resting else self._words_bytes)):
            self._quiet_bytes += len(block.data)
            self._recent.clear()
            return
        self._quiet_bytes = 0
        for number, text in split_block(block):
            self._line(number, text)

    def _line(self, number: int, text: str) -> None:
        words = self._table.starts if self._start.over else self._words
        self._recent.append(text)
        # A bare loop over literals: this is what every line of a log costs.
        for word in words:
            if word in text:
                break
        else:
            return
        line = parse_line(number, text)
        if any(word in line.text for word in self._table.starts):
            self._introduce(line)
        if self._start.over:
            return
        dumped = False
        for dump in self._table.dumps:
            if dump.words in line.text:
                dumped = True
                self._dump(dump, line)
        for rule, pattern in self._rules:
            if rule.words in line.text:
                found = pattern.search(line.text)
                if found is not None:
                    self._apply(rule, line, found, dumped=dumped)

    def _introduce(self, line: LogLine) -> None:
        start = self._start
        known = line.process in start.processes
        again = known and start.processes[line.process] != line.pid
        # Engines of several data-parallel ranks introduce themselves one after the other, each under its own name.
        if self._starts == 0 or again or (start.progressed and (known or not line.process or start.over)):
            self._begin(line.number)
        self._start.processes[line.process] = line.pid
        self._start.marks.append(Phase("launch", line.number, self._when(line)))

    def _begin(self, number: int) -> None:
        self._start = _Start(first_line=number)
        self._starts += 1

    def _when(self, line: LogLine) -> Stamp | None:
        if line.stamp is not None:
            return line.stamp
        # Web servers' lines have no time; that of the line before is near enough.
        for text in reversed(self._recent):
            stamp = parse_line(0, text).stamp
            if stamp is not None:
                return stamp
        return None

    def _dump(self, dump: LogDump, line: LogLine) -> None:
        _, _, body = line.text.partition(dump.words)
        seen: set[str] = set()
        for found in _DUMPED.finditer(body):
            key = found["key"]
            name = dump.names.get(key)
            if name is None or key in seen:
                continue
            seen.add(key)
            value = _read_value(found["value"].strip("'\""))
            value = dump.nones.get(key) if value is None else value
            if value is not None:
                # The rest of the line is not kept: it may hold keys.
                text = f"{dump.words.strip()} ... {found[0]} ..."
                self._tell(name, LogFact(value, line.number, text[:_TEXT_LIMIT]))

    def _apply(self, rule: LogRule, line: LogLine, found: re.Match[str], *, dumped: bool) -> None:
        if self._starts == 0:
            # A log whose first lines were cut away.
            self._begin(line.number)
        start = self._start
        text = f"... {found[0]} ..." if dumped or _SECRET.search(line.message) else line.message
        text = text[:_TEXT_LIMIT]
        told = {name: _read_value(value) for name, value in found.groupdict().items() if value is not None}
        start.hybrid |= rule.hybrid
        taken = told.get("taken")
        if rule.clamps and taken is not None:
            clamp = Clamp(rule.clamps, told.get("asked"), taken, line.number, text)
            start.clamps.setdefault((clamp.key, str(clamp.asked), str(taken)), clamp)
            start.told[rule.clamps] = LogFact(taken, line.number, text)
        device = found.groupdict().get("device")
        rank = _rank_name(line)
        for name, value in told.items():
            if value is None or name in ("device", "asked", "taken", "lasted"):
                continue
            if name in _RANK_FIGURES:
                _put(start.figures, (rank, name), value, adds=rule.adds)
                if name in _SMALLEST_COUNTS:
                    self._tell(name, LogFact(value, line.number, text))
            elif name in _DEVICE_FIGURES and device is not None:
                _put(start.buffers, (device, name), value, adds=rule.adds)
            elif not (rule.first and name in start.told):
                self._tell(name, LogFact(value, line.number, text))
        if rule.phase:
            self._mark(rule, line, told.get("lasted"))

    def _mark(self, rule: LogRule, line: LogLine, lasted: str | float | None) -> None:
        stamp = self._when(line)
        if rule.lasting and stamp is not None and isinstance(lasted, int | float):
            self._start.marks.append(
                Phase(rule.lasting, line.number, replace(stamp, seconds=stamp.seconds - float(lasted)))
            )
        self._start.marks.append(Phase(rule.phase, line.number, stamp))

    def _tell(self, name: str, fact: LogFact) -> None:
        if self._starts == 0:
            self._begin(fact.line)
        if name.startswith("asked_"):
            self._start.asked.setdefault(name.removeprefix("asked_"), fact)
        elif name == "concurrency" and name in self._start.told:
            known = self._start.told[name]
            if isinstance(known.value, int | float) and isinstance(fact.value, int | float):
                self._start.told[name] = min(known, fact, key=lambda one: float(one.value))
        else:
            self._start.told[name] = fact

    def facts(self) -> StartupFacts:
        """The facts of the last start."""
        start = self._start
        # What a clamp says holds against a line that repeats what was asked for.
        told = dict(start.told)
        for clamp in start.clamps.values():
            fact = told.get(clamp.key)
            if fact is None or fact.value == clamp.asked:
                told[clamp.key] = LogFact(clamp.taken, clamp.line, clamp.text)
        told |= self._table.settle(told, start.figures)
        replicas = 1 if "one_replica" in told else whole(told.get("data_parallel_size")) or 1
        for key in _PER_REPLICA:
            told_once = whole(told.get(key))
            if replicas > 1 and told_once is not None:
                text = f"{told[key].text} (x {replicas} data-parallel replicas)"
                told[key] = replace(told[key], value=told_once * replicas, text=text)
        version, served, concurrency = (told.get(name) for name in ("version", "served_as", "concurrency"))
        return StartupFacts(
            engine=self.engine.name,
            starts=self._starts,
            first_line=start.first_line,
            version=None if version is None else str(version.value),
            served_as=None if served is None else str(served.value),
            settings={name: fact for name, fact in told.items() if name not in _NOT_SETTINGS},
            asked=start.asked,
            clamps=_complete(start.clamps.values(), start.asked),
            ranks=_ranks(start.figures),
            buffers=_buffers(start.buffers),
            offloaded_layers=whole(told.get("offloaded_layers")),
            layers=whole(told.get("layers")),
            max_concurrency=float(concurrency.value) if concurrency is not None else None,
            max_concurrency_tokens=whole(told.get("concurrency_tokens")),
            replicas=replicas,
            hybrid=start.hybrid or "hybrid" in told,
            phases=_order(start.marks),
        )


_NOT_SETTINGS = frozenset(
    {
        "version", "one_replica", "served_as", "concurrency", "concurrency_tokens", "offloaded_layers", "layers",
        "hybrid", "slots", "slot_tokens", "pool_tokens", "context_tokens", "block_size", "blocks_override", "kv_tokens",
        "kv_blocks",
    }
)  # fmt: skip
"""Names that rules tell and that are no settings."""


def _read_value(text: str) -> str | int | float | None:
    """A value as the engines write it: None and the empty string mean that it is not set."""
    plain = text.strip()
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    if plain in ("", "None", "null", "-1"):
        return None
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if _NUMBER.fullmatch(plain):
        return float(plain) if "." in plain else int(plain)
    # A figure of thousands of digits, or of commas alone, is no log of a server.
    return None if _FIGURE.fullmatch(plain) and not _RELEASE.fullmatch(plain) else plain[:_TEXT_LIMIT]


def _rank_name(line: LogLine) -> str:
    if line.ranks or line.pid is None or _ENGINE_PROCESS.match(line.process):
        return line.rank
    # V0 of vLLM and Ray name their workers by process alone.
    return f"{line.process} {line.pid}".strip()


def _put(figures: dict[tuple[str, str], float], key: tuple[str, str], value: str | float, *, adds: bool) -> None:
    if isinstance(value, str):
        return
    known = figures.get(key)
    if known is None:
        figures[key] = value
    elif adds:
        figures[key] = known + value
    elif key[1] in _SMALLEST_COUNTS:
        figures[key] = min(known, value)
    elif key[1] == "compute_mib":
        figures[key] = max(known, value)
    else:
        figures[key] = value


def _bytes(name: str, value: float) -> int:
    return round(value * (_GIB if name.endswith("_gib") else _MIB if name.endswith("_mib") else 1))


def _ranks(figures: Mapping[tuple[str, str], float]) -> tuple[RankMemory, ...]:
    by_rank: dict[str, dict[str, int]] = {}
    for (rank, name), value in figures.items():
        by_rank.setdefault(rank, {})[_RANK_FIGURES[name]] = _bytes(name, value)
    if len(by_rank) == 2 and "" in by_rank:  # an engine process and its only worker
        (worker,) = set(by_rank) - {""}
        if not set(by_rank[""]) & set(by_rank[worker]):
            by_rank = {"": by_rank[""] | by_rank[worker]}
    return tuple(RankMemory(rank, **by_rank[rank]) for rank in sorted(by_rank, key=_natural))


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,9})", text)]


def _buffers(figures: Mapping[tuple[str, str], float]) -> tuple[DeviceBuffers, ...]:
    by_device: dict[str, dict[str, int]] = {}
    for (device, name), value in figures.items():
        by_device.setdefault(device, {})[_DEVICE_FIGURES[name]] = _bytes(name, value)
    return tuple(DeviceBuffers(device, **told) for device, told in by_device.items())


def _complete(clamps: Iterable[Clamp], asked: Mapping[str, LogFact]) -> tuple[Clamp, ...]:
    """Clamps with what was asked for filled in from the line of arguments where their own line does not say it."""
    return tuple(
        replace(clamp, asked=asked[clamp.key].value) if clamp.asked is None and clamp.key in asked else clamp
        for clamp in clamps
    )


def _order(marks: Iterable[Phase]) -> tuple[Phase, ...]:
    """Each phase once, where it began, in the order of a start."""
    begun: dict[str, Phase] = {}
    for mark in marks:
        known = begun.get(mark.name)
        if known is None or (known.stamp is None and mark.stamp is not None):
            begun[mark.name] = mark
    phases: list[Phase] = []
    latest: Stamp | None = None
    for phase in sorted(begun.values(), key=lambda one: PHASES.index(one.name)):
        stamp = phase.stamp
        if stamp is not None and latest is not None:
            # Lines of several processes, and clocks of several kinds in one log.
            stamp = None if stamp.kind != latest.kind else replace(stamp, seconds=max(stamp.seconds, latest.seconds))
        latest = stamp or latest
        phases.append(replace(phase, stamp=stamp))
    return tuple(phases)
