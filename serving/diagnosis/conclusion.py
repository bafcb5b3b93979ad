"""From the signs of one start of a server to the cause of its end.

Order decides, but not alone. What was read before the server became ready and did not keep it from becoming ready is
no cause. What was followed by answered requests is none either. Of what is left, a line that names a cause beats one
that only says that memory ran out, that one beats a failure of communication (which follows when a process dies), and
that one beats the bare loss of a process; among equals the first line wins. What always follows from something else
(a dead engine, a signal to the other processes) is never a cause.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serving.diagnosis.advice import Advice, advise
from serving.diagnosis.redaction import presentable
from serving.diagnosis.signs import FIGURES, Role, Sign
from serving.diagnosis.words import (
    Confidence,
    DiagnosedLog,
    Diagnosis,
    EarlierStart,
    Evidence,
    Failure,
    Phase,
    State,
)
from serving.log_lines import LogLine

__all__ = ["Finding", "Start", "conclude", "summarise"]

Figure = float | int | str

_LINE_CHARACTERS = 4096
_STALE_FRAME_LINES = 400
_ENOUGH_LINES = 1000
_KEPT_RANKS = 64
_KEPT_FRAMES = 256
_RECOVERED_AFTER = 8
"""Requests that must be answered after a failure before it counts as survived."""
_MOST_EVIDENCE = 6

_TIERS = {Role.ROOT: 1, Role.MEMORY: 2, Role.POOL: 2, Role.PEER: 3, Role.LOSS: 4}
_DEATHS = (Role.AFTERMATH, Role.LOSS)
_MILD = frozenset({"DEBUG", "INFO", "WARNING"})
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Engines say GB and MB for powers of two.
_SIZE = re.compile(r"(-?[\d.]+) ?([KMGT]?)i?B?$", re.IGNORECASE)
_SERVERS = re.compile(r"(?i)python|vllm|sglang|llama|text-gen|enginecore|ray::|pt_main|worker")
_ENGINE_WORDS = re.compile(
    r"(?i)(?P<vllm>\bvllm|\bEngineCore)|(?P<sglang>\bsglang)|(?P<tgi>text_generation)"
    r"|(?P<llamacpp>\bllama_|\bllama (?:runner|server)|\bllama-server|\bggml|llama\.cpp|\bsrv +load_model)"
)
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_SIGNAL_WORDS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Illegal instruction": "SIGILL",
    "Bus error": "SIGBUS",
}
_MEMORY_BY_PHASE = {
    Phase.LAUNCH: Failure.WEIGHTS_OUT_OF_MEMORY,
    Phase.WEIGHTS: Failure.WEIGHTS_OUT_OF_MEMORY,
    Phase.PROFILE: Failure.WARM_UP,
    Phase.KV_CACHE: Failure.KV_CACHE_UNALLOCATED,
    Phase.GRAPHS: Failure.WARM_UP,
    Phase.SERVING: Failure.RUNTIME_OUT_OF_MEMORY,
    Phase.UNKNOWN: Failure.WEIGHTS_OUT_OF_MEMORY,
}


@dataclass(slots=True)
class Finding:
    """All lines of one start that show the same sign.

    Attributes:
        sign: the row of the table.
        line: the first line's number.
        last_line: the last one's.
        text: the first line, fit to be shown.
        phase: what was being done.
        answered: requests answered before the first line.
        answered_at_last: requests answered before the last line.
        count: how many lines.
        ranks: who said so.
        figures: from all lines; the first to tell a figure counts.
        is_warning: its first line was no error in the engine's own words.
    """

    sign: Sign
    line: int
    last_line: int
    text: str
    phase: Phase
    answered: int
    answered_at_last: int
    count: int = 1
    ranks: dict[str, None] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    is_warning: bool = False

    def evidence(self) -> Evidence:
        """The first line, as it may be shown."""
        return Evidence(self.line, self.text, self.count, tuple(sorted(self.ranks, key=_rank_order)))


@dataclass(slots=True)
class Start:
    """One life of the server, as far as it was read.

    Attributes:
        first_line: where its part of the log begins.
        start_line: the line in which it said that it starts; None where the log begins later.
        engine: whose words they are.
        last_line: the last line read.
        phase: how far it had come.
        answered: requests answered, streamed ones counted when their stream began.
        ready_line: where it became ready.
        stop_line: where it was asked to stop.
        findings: by sign.
        notes: lines that help to judge, by kind.
        facts: figures of the start by name.
        fact_lines: where they stand.
        refused: kind of refused request -> how many.
        error: the last error that no sign knows, and the first since the last traceback's beginning.
    """

    first_line: int
    start_line: int | None = None
    engine: str | None = None
    last_line: int = 0
    phase: Phase = Phase.UNKNOWN
    answered: int = 0
    ready_line: int | None = None
    stop_line: int | None = None
    findings: dict[int, Finding] = field(default_factory=dict)
    notes: dict[str, Evidence] = field(default_factory=dict)
    facts: dict[str, Figure] = field(default_factory=dict)
    fact_lines: dict[str, Evidence] = field(default_factory=dict)
    error: Evidence | None = None
    _frames: dict[tuple[str, str], tuple[Phase, int]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether something says that this life ended, or that it had become a server."""
        return (
            self.ready_line is not None
            or self.stop_line is not None
            or any(finding.sign.role in _DEATHS for finding in self.findings.values())
        )

    @property
    def serving(self) -> bool:
        """Whether it answers or had answered."""
        return self.ready_line is not None or (self.start_line is None and self.answered > 0)

    def heard_enough(self, signs: Iterable[Sign]) -> list[Finding]:
        """Their findings, if each of these signs was seen so often that one more line of it need only be counted."""
        known = [self.findings.get(id(sign)) for sign in signs]
        often = [finding for finding in known if finding is not None and finding.count >= _ENOUGH_LINES]
        return often if len(often) == len(known) else []

    def learn(self, line: LogLine, found: re.Match[str]) -> None:
        """Keep figures of the start."""
        for name, figure in _figures_of(found).items():
            self.facts[name] = figure
            self.fact_lines[name] = Evidence(line.number, presentable(line.text, found.group()))

    def note_error(self, line: LogLine) -> None:
        """Keep an error that no sign knows: the last one is what a start without a known cause ended with."""
        came_after_stop = self.stop_line is not None and line.number > self.stop_line
        was_survived = self.ready_line is not None and line.number < self.ready_line
        if not (came_after_stop or was_survived):
            self.error = Evidence(line.number, presentable(line.text), 1, (line.rank,) if line.rank else ())

    def take(self, line: LogLine, sign: Sign, found: re.Match[str]) -> Finding | None:
        """Take one sign of one line in; gives the finding it belongs to, if it is of that kind."""
        if self.engine is None:
            self.engine = sign.engine or _engine_of(line.text)
        match sign.role:
            case Role.START:
                self.phase = Phase.LAUNCH
            case Role.READY:
                self._become_ready(line.number)
            case Role.STOP:
                if self.stop_line is None and not any(one.sign.role in _DEATHS for one in self.findings.values()):
                    self.stop_line = line.number
            case Role.PHASE:
                if self.ready_line is None and sign.phase is not None:
                    self.phase = sign.phase
            case Role.TRACEBACK:
                self._frames.pop((line.process, line.rank), None)
            case Role.FRAME:
                self._take_frame(line, sign)
            case Role.NOTE:
                if sign.kind and sign.kind not in self.notes:
                    self.notes[sign.kind] = Evidence(line.number, presentable(line.text, found.group()))
            case _:
                if self.stop_line is None:
                    return self._find(line, sign, found)
        return None

    def _become_ready(self, number: int) -> None:
        if self.ready_line is None:
            self.ready_line = number
            self.phase = Phase.SERVING
            # Whatever went wrong before did not keep it from starting.
            self.findings.clear()
            self.error = None

    def _take_frame(self, line: LogLine, sign: Sign) -> None:
        key = (line.process, line.rank)
        known = self._frames.get(key)
        if known is not None and line.number - known[1] <= _STALE_FRAME_LINES:
            # The outermost frame that tells anything tells most.
            return
        if len(self._frames) >= _KEPT_FRAMES:
            self._frames.clear()
        if sign.phase is not None:
            self._frames[key] = (sign.phase, line.number)

    def _phase_at(self, line: LogLine) -> Phase:
        if self.serving:
            return Phase.SERVING
        frame = self._frames.get((line.process, line.rank))
        if frame is not None and line.number - frame[1] <= _STALE_FRAME_LINES:
            return frame[0]
        return self.phase

    def _find(self, line: LogLine, sign: Sign, found: re.Match[str]) -> Finding | None:
        figures = _figures_of(found)
        if sign.role is Role.LOSS:
            judged = _judge_loss(sign, figures)
            if judged is None:
                return None
            figures = judged
        if sign.kind == "oom_killer" and not _SERVERS.search(str(figures.get("program", ""))):
            self.notes.setdefault("other_killed", Evidence(line.number, presentable(line.text, found.group())))
            return None
        if sign.role in _TIERS or sign.role is Role.REQUEST:
            for pattern in FIGURES:
                seen = pattern.search(line.text[:_LINE_CHARACTERS])
                if seen:
                    for name, figure in _figures_of(seen).items():
                        figures.setdefault(name, figure)
        key = id(sign)
        finding = self.findings.get(key)
        if finding is None:
            finding = self.findings[key] = Finding(
                sign,
                line.number,
                line.number,
                presentable(line.text, found.group()),
                self._phase_at(line),
                self.answered,
                self.answered,
                figures=figures,
                is_warning=line.level in _MILD,
            )
        else:
            finding.count += 1
            finding.last_line = line.number
            finding.answered_at_last = self.answered
            for name, figure in figures.items():
                finding.figures.setdefault(name, figure)
        if line.rank and len(finding.ranks) < _KEPT_RANKS:
            finding.ranks[line.rank] = None
        return finding


def _engine_of(text: str) -> str | None:
    """Whose words a line is, by the names of files and processes in it."""
    found = _ENGINE_WORDS.search(text)
    return found.lastgroup if found else None


def _figures_of(found: re.Match[str]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for group, text in found.groupdict().items():
        if text is None or not text:
            continue
        name = group.rstrip("0123456789")
        figure = _figure(name, text)
        if figure is not None:
            figures.setdefault(*figure)
    return figures


def _figure(name: str, text: str) -> tuple[str, Figure] | None:
    unit = name.rpartition("_")[2]
    if unit == "bytes":
        found = _SIZE.match(text.strip())
        number = _number(found[1]) if found else None
        return None if found is None or number is None else (name, round(number * _UNITS[found[2].upper()]))
    if unit == "gib":
        number = _number(text)
        return None if number is None else (name[: -len("gib")] + "bytes", round(number * _UNITS["G"]))
    if unit == "ratio":
        number = _number(text)
        return None if number is None else (name, number)
    if text.lstrip("-").isdigit() and len(text) <= 15:
        return name, int(text)
    return name, presentable(text, limit=120)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e15 else None


def _judge_loss(sign: Sign, figures: dict[str, Figure]) -> dict[str, Figure] | None:
    """Which signal ended a process; None where it ended by itself, which is nobody's cause."""
    code, number = figures.pop("exit_code", None), figures.pop("signal", None)
    name = figures.pop("signal_name", None)
    words = figures.pop("signal_words", None)
    if isinstance(code, int):
        number = -code if code < 0 else code - 128 if code > 128 else None
        if number is None:
            return None
        figures["exit_code"] = code
    if isinstance(words, str):
        name = _SIGNAL_WORDS[words.capitalize()]
    if sign.kind == "sigkill":
        name = "SIGKILL"
    if isinstance(number, int):
        name = _SIGNALS.get(number, f"signal {number}")
    if name is not None:
        figures["signal"] = name
    return figures


def _rank_order(rank: str) -> tuple[int, str]:
    return len(rank), rank


# ---- conclusions


def conclude(start: Start, *, lines: int, starts: int, earlier: tuple[EarlierStart, ...]) -> DiagnosedLog:
    """What the log tells of its last start, with earlier ones beside it."""
    chosen = _choose(start)
    diagnosis = _diagnose(start, chosen, earlier) if chosen is not None else None
    state = _state(start, diagnosis)
    return DiagnosedLog(
        diagnosis=diagnosis,
        state=state,
        state_text=_state_text(start, state, diagnosis),
        engine=start.engine,
        lines=lines,
        starts=starts,
        earlier=earlier,
        refused=_refused(start),
        last_error=start.error if diagnosis is None else None,
    )


def summarise(start: Start, last_line: int) -> EarlierStart:
    """A start that was followed by another one, in a sentence."""
    start.last_line = last_line
    chosen = _choose(start)
    diagnosis = _diagnose(start, chosen, ()) if chosen is not None else None
    state = _state(start, diagnosis)
    return EarlierStart(
        start.first_line,
        last_line,
        state,
        diagnosis.failure if diagnosis else None,
        diagnosis.cause if diagnosis else _state_text(start, state, None),
    )


def _refused(start: Start) -> dict[str, int]:
    refused: dict[str, int] = {}
    for finding in start.findings.values():
        if finding.sign.role is Role.REQUEST:
            refused[finding.sign.kind] = max(refused.get(finding.sign.kind, 0), finding.count)
    return refused


def _died(start: Start) -> bool:
    return any(finding.sign.role in _DEATHS for finding in start.findings.values())


def _choose(start: Start) -> Finding | None:
    died = _died(start)
    standing = [
        finding
        for finding in start.findings.values()
        if finding.sign.role in _TIERS and not _survived(finding, start, died=died)
    ]
    if standing:
        return min(standing, key=lambda finding: (_tier(finding), finding.line))
    if died:
        return None
    refusals = [finding for finding in start.findings.values() if finding.sign.role is Role.REQUEST]
    lost = sum(finding.count for finding in refusals)
    if refusals and lost > start.answered:
        return max(refusals, key=lambda finding: (finding.count, -finding.line))
    return None


def _tier(finding: Finding) -> tuple[int, int]:
    # A loss that names a signal says more than one that does not.
    silent = finding.sign.role is Role.LOSS and "signal" not in finding.figures
    return _TIERS[finding.sign.role] + (10 if finding.is_warning else 0), int(silent)


def _survived(finding: Finding, start: Start, *, died: bool) -> bool:
    if not start.serving:
        return False
    return start.answered - finding.answered_at_last >= (_RECOVERED_AFTER if not died else 4 * _RECOVERED_AFTER)


def _failure_of(finding: Finding, start: Start) -> Failure:
    sign = finding.sign
    if sign.role is Role.MEMORY:
        return _MEMORY_BY_PHASE[finding.phase]
    if sign.role is Role.POOL:
        if finding.phase is Phase.SERVING:
            return Failure.KV_CACHE_EXHAUSTED
        sized = finding.figures.keys() & {"fits_tokens", "needed_bytes"}
        return Failure.KV_CACHE_BELOW_REQUEST if sized else Failure.KV_CACHE_UNALLOCATED
    if sign.role is Role.LOSS:
        signal = finding.figures.get("signal")
        if signal == "SIGBUS":
            return Failure.SHARED_MEMORY
        return (
            Failure.KILLED if signal in (None, "SIGKILL", "SIGTERM") and sign.kind != "assertion" else Failure.CRASHED
        )
    if sign.failure is Failure.KV_CACHE_UNALLOCATED and "cannot_fit" in start.notes:
        # Its own attempt to shorten the context had found that even the shortest does not fit.
        return Failure.KV_CACHE_BELOW_REQUEST
    return sign.failure if sign.failure is not None else Failure.CRASHED


def _diagnose(start: Start, chosen: Finding, earlier: tuple[EarlierStart, ...]) -> Diagnosis:
    failure = _failure_of(chosen, start)
    alike = _alike(start, chosen, failure)
    figures: dict[str, Figure] = dict(start.facts)
    for finding in reversed(alike):
        figures |= finding.figures
    figures |= chosen.figures
    host = any(finding.sign.kind == "host" for finding in alike)
    serving = chosen.phase is Phase.SERVING
    answered = chosen.answered if serving or chosen.answered else None
    advice = advise(
        failure, chosen.sign, figures, engine=start.engine, phase=chosen.phase, answered=answered, host=host
    )
    ranks = dict.fromkeys(rank for finding in alike for rank in finding.ranks)
    confidence, doubts = _confidence(start, chosen, failure, advice, earlier)
    return Diagnosis(
        failure=failure,
        title=advice.title,
        cause=advice.cause,
        figures=figures,
        evidence=_evidence(start, chosen, alike, advice),
        cause_line=chosen.line,
        ranks=tuple(sorted(ranks, key=_rank_order)),
        phase=chosen.phase,
        requests_before=answered,
        confidence=confidence,
        doubts=doubts,
        next_step=advice.next_step,
        leave_alone=advice.leave_alone,
        engine=start.engine,
    )


def _alike(start: Start, chosen: Finding, failure: Failure) -> list[Finding]:
    """Findings that tell the same: of the same class, and lines about memory beside one that says which memory."""
    others = [
        finding
        for finding in start.findings.values()
        if finding is not chosen
        and finding.sign.role in (*_TIERS, Role.REQUEST)
        and (_failure_of(finding, start) is failure or (finding.sign.role is Role.MEMORY and failure in _MEMORY_KINDS))
    ]
    return [chosen, *sorted(others, key=lambda finding: finding.line)]


_MEMORY_KINDS = frozenset(
    {
        Failure.WEIGHTS_OUT_OF_MEMORY,
        Failure.KV_CACHE_UNALLOCATED,
        Failure.KV_CACHE_BELOW_REQUEST,
        Failure.WARM_UP,
        Failure.RUNTIME_OUT_OF_MEMORY,
    }
)


def _evidence(start: Start, chosen: Finding, alike: list[Finding], advice: Advice) -> tuple[Evidence, ...]:
    lines = [chosen.evidence()]
    lines += [start.fact_lines[name] for name in advice.facts_used if name in start.fact_lines]
    lines += [start.notes[kind] for kind in ("cannot_fit", "retracted") if kind in start.notes and len(alike)]
    lines += [finding.evidence() for finding in alike[1:3]]
    after = [finding for finding in start.findings.values() if finding.sign.role in _DEATHS and finding is not chosen]
    if after:
        lines.append(min(after, key=lambda finding: finding.line).evidence())
    by_line = {evidence.line: evidence for evidence in reversed(lines[:_MOST_EVIDENCE])}
    return tuple(by_line[number] for number in sorted(by_line))


def _confidence(
    start: Start, chosen: Finding, failure: Failure, advice: Advice, earlier: tuple[EarlierStart, ...]
) -> tuple[Confidence, tuple[str, ...]]:
    doubts: list[str] = list(advice.doubts)
    low = False
    if chosen.sign.role is Role.MEMORY and chosen.phase in (Phase.UNKNOWN, Phase.LAUNCH):
        doubts.append("the log does not show what was being done when memory ran out")
        low = chosen.phase is Phase.UNKNOWN
    if failure is Failure.COMMUNICATION:
        doubts.append("communication also fails when another process dies first, and this log shows no such death")
    if failure is Failure.HANG:
        doubts.append("the log does not show what it waited for")
    if chosen.sign.role is Role.LOSS and chosen.sign.kind != "assertion":
        silent = "signal" not in chosen.figures
        doubts.append(
            "the process left no word of its own"
            + (
                ", and the log does not say which signal ended it"
                if silent
                else "; who sent the signal is not in this log"
            )
        )
        low = silent
    went_on = not _died(start) and start.stop_line is None and failure is not Failure.KV_CACHE_EXHAUSTED
    if chosen.sign.role in _TIERS and chosen.phase is Phase.SERVING and went_on:
        doubts.append("the log does not show that the server died of it")
    if failure is Failure.REQUEST_REFUSED:
        doubts.append("the server itself is well as far as the log shows")
    rivals = {
        _failure_of(finding, start): finding
        for finding in start.findings.values()
        if _TIERS.get(finding.sign.role) == 1 and _TIERS.get(chosen.sign.role) == 1
    }
    for rival, finding in rivals.items():
        if rival is not failure and not _survived(finding, start, died=True):
            doubts.append(f"line {finding.line} names another cause ({rival.value})")
    same = sum(1 for one in earlier if one.failure is failure)
    if low:
        return Confidence.LOW, tuple(doubts)
    if doubts and not (same >= 2 and len(doubts) == 1):
        return Confidence.MEDIUM, tuple(doubts)
    return Confidence.HIGH, tuple(doubts)


def _state(start: Start, diagnosis: Diagnosis | None) -> State:
    if _died(start):
        return State.DEAD
    if start.stop_line is not None:
        return State.STOPPED
    if start.serving:
        quiet = (Failure.REQUEST_REFUSED, Failure.KV_CACHE_EXHAUSTED)
        return State.DEAD if diagnosis is not None and diagnosis.failure not in quiet else State.SERVING
    if diagnosis is not None:
        return State.DEAD
    return State.STARTING if start.start_line is not None or start.phase is not Phase.UNKNOWN else State.UNKNOWN


_REACHED: Mapping[Phase, str] = {
    Phase.LAUNCH: "while it was being launched",
    Phase.WEIGHTS: "while the weights were being loaded",
    Phase.PROFILE: "after the weights were loaded, before the KV cache",
    Phase.KV_CACHE: "while the KV cache was being made",
    Phase.GRAPHS: "after the KV cache, before the server was ready",
}


def _state_text(start: Start, state: State, diagnosis: Diagnosis | None) -> str:
    answered = f"{start.answered:,} request{'' if start.answered == 1 else 's'} answered"
    match state:
        case State.SERVING:
            since = f", ready since line {start.ready_line}" if start.ready_line is not None else ""
            return f"the server is up{since}; {answered}"
        case State.STOPPED:
            ready = f"after {answered}" if start.serving else _REACHED.get(start.phase, "before it was ready")
            return f"the server was asked to stop at line {start.stop_line}, {ready}"
        case State.STARTING:
            where = _REACHED.get(start.phase, "before the server was ready")
            text = f"the log ends at line {start.last_line}, {where}"
            if diagnosis is None and start.error is None:
                text += (
                    "; a process that is killed (signal 9, a container's memory limit) leaves no word: look at its "
                    "exit code and at `dmesg` for 'Killed process'"
                )
            return text
        case State.DEAD:
            if start.serving:
                return f"the server died after {answered}"
            seen = start.start_line is not None or start.phase is not Phase.UNKNOWN
            return "the server did not start" if seen else "the server died; the log does not show how far it had come"
        case _:
            return "no line of an inference server that is known"
