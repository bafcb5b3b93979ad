"""Reads a log of any size once, and keeps what tells how the last start of the server came out.

How it is fast: a line without its digits and without the letters of hexadecimal numbers is a *shape*. Months of access
and statistics lines have a few hundred shapes. A block of the file becomes a set of shapes in three passes of C code;
only shapes that were never seen are looked at, and only lines of shapes that mean something are taken apart. A shape
that said the same many times in one start is only counted.

How it stays small: shapes are kept up to a limit, findings by sign and not by line, earlier starts as one sentence.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from serving.diagnosis.conclusion import Finding, Start, conclude, summarise
from serving.diagnosis.signs import FACTS, SIGNS, UNREAD, Role, Sign
from serving.diagnosis.words import DiagnosedLog, EarlierStart, Phase
from serving.log_lines import Block, LogLine, parse_line, read_blocks

__all__ = ["LogReader", "diagnose"]

_SHAPE_BYTES = 512
"""Words that mean something stand near the beginning of a line; prompts and configurations stand behind."""
_KEPT_SHAPES = 20_000
_TAKEN_APART = 64
"""Lines of one shape that are read in full in one start; the rest are only counted."""
_LINE_CHARACTERS = 4096
_SAME_START_LINES = 30
"""A server says in several lines that it starts."""
_KEPT_STARTS = 20

_NEVER_ONLY_COUNTED = frozenset({Role.START, Role.READY, Role.STOP, Role.PHASE, Role.FRAME, Role.TRACEBACK})
_ANSWERED = re.compile(rb'"POST /[^"\n]*" 200|total time = |\bSuccess\b')
_ANSWER_MARKS = (b'"POST /', b"total time = ", b"Success")
_ERROR_LINE = re.compile(r"(?:^|[\s.:])(?P<error>[A-Z]\w*(?:Error|Exception)): ?(?P<message>.*)|\bpanicked at\b|^panic: ")
_ERROR_NEEDLES = tuple(word.translate(None, UNREAD) for word in (b"Error:", b"Exception:", b"panic"))


def _shortest(needles: Iterable[bytes]) -> tuple[bytes, ...]:
    """Those of which each of `needles` holds one."""
    kept: list[bytes] = []
    for needle in sorted(set(needles), key=len):
        if not any(word in needle for word in kept):
            kept.append(needle)
    return tuple(kept)


_ALL_NEEDLES = _shortest(
    [needle for sign in SIGNS for needle in sign.needles]
    + [needle for needles, _ in FACTS for needle in needles]
    + list(_ERROR_NEEDLES)
)


@dataclass(slots=True)
class _Shape:
    """What lines of one shape mean."""

    signs: tuple[Sign, ...]
    facts: tuple[re.Pattern[str], ...]
    may_be_counted: bool
    seen: int = 0
    findings: tuple[Finding, ...] = ()


class LogReader:
    """Takes a log block by block; `finish` gives what it tells."""

    def __init__(self, engine: str | None = None) -> None:
        self._engine = engine
        self._signs = tuple(sign for sign in SIGNS if engine is None or sign.engine in ("", engine))
        self._dull: set[bytes] = set()
        self._shapes: dict[bytes, _Shape] = {}
        self._lines = 0
        self._starts = 0
        self._earlier: deque[EarlierStart] = deque(maxlen=_KEPT_STARTS)
        self._start = Start(first_line=1, engine=engine)

    def take(self, block: Block) -> None:
        """Read one block; blocks come in the order of the file."""
        shapes = block.data.translate(None, UNREAD).split(b"\n")
        different = set(shapes)
        self._look_at(different, block, shapes)
        telling = different & self._shapes.keys()
        if telling:
            self._read_telling(block, shapes, telling)
        else:
            self._start.answered += _count_answers(block.data)
        self._lines = block.first_line + len(shapes) - (2 if block.data.endswith(b"\n") else 1)
        self._start.last_line = self._lines

    def finish(self) -> DiagnosedLog:
        """What the log tells, once all of it was taken."""
        return conclude(self._start, lines=self._lines, starts=self._starts, earlier=tuple(self._earlier))

    # ---- which lines are worth reading

    def _look_at(self, different: set[bytes], block: Block, shapes: list[bytes]) -> None:
        new = different - self._dull
        new -= self._shapes.keys()
        if not new:
            return
        heads = b"\n".join([shape[:_SHAPE_BYTES] for shape in new])
        present = [needle for needle in _ALL_NEEDLES if needle in heads]
        telling: set[bytes] = set()
        if present:
            telling = {shape for shape in new if any(needle in shape[:_SHAPE_BYTES] for needle in present)}
        if telling:
            lines = block.data.split(b"\n")
            for place, shape in enumerate(shapes):
                if shape in telling and shape not in self._shapes:
                    meaning = self._meaning(shape, lines[place])
                    if meaning is not None:
                        self._remember(shape, meaning)
        if len(self._dull) > _KEPT_SHAPES:
            self._dull.clear()
        self._dull.update(shape for shape in new - self._shapes.keys() if len(shape) <= _SHAPE_BYTES)

    def _remember(self, shape: bytes, meaning: _Shape) -> None:
        if len(self._shapes) >= _KEPT_SHAPES:
            self._shapes.clear()
        self._shapes[shape] = meaning

    def _meaning(self, shape: bytes, raw: bytes) -> _Shape | None:
        head = shape[:_SHAPE_BYTES]
        text = _text_of(0, raw).text[:_LINE_CHARACTERS]
        signs = []
        for sign in self._signs:
            if any(needle in head for needle in sign.needles) and sign.pattern.search(text):
                signs.append(sign)
                if sign.alone:
                    break
        facts = tuple(pattern for needles, pattern in FACTS if any(needle in head for needle in needles))
        is_error = not signs and any(needle in head for needle in _ERROR_NEEDLES) and _ERROR_LINE.search(text)
        if not signs and not facts and not is_error:
            return None
        return _Shape(tuple(signs), facts, may_be_counted=not _NEVER_ONLY_COUNTED & {sign.role for sign in signs})

    # ---- reading them

    def _read_telling(self, block: Block, shapes: list[bytes], telling: set[bytes]) -> None:
        places = [place for place, shape in enumerate(shapes) if shape in telling]
        meanings = [self._shapes[shapes[place]] for place in places]
        if all(meaning.may_be_counted and meaning.seen >= _TAKEN_APART for meaning in meanings):
            self._count_only(block, shapes, places)
            return
        lines = block.data.split(b"\n")
        done = 0
        for place, meaning in zip(places, meanings, strict=True):
            number = block.first_line + place
            meaning.seen += 1
            if meaning.may_be_counted and meaning.seen > _TAKEN_APART and meaning.findings:
                for finding in meaning.findings:
                    finding.count += 1
                    finding.last_line = number
                continue
            self._start.answered += _count_lines(lines, done, place)
            done = place
            self._read_line(number, lines[place], meaning)
        self._start.answered += _count_lines(lines, done, len(lines))
        for meaning in meanings:
            # What was only counted here was last said in this block; a few answers more or less do not matter.
            for finding in meaning.findings:
                if meaning.seen > _TAKEN_APART:
                    finding.answered_at_last = self._start.answered

    def _count_only(self, block: Block, shapes: list[bytes], places: list[int]) -> None:
        last = {shapes[place]: place for place in places}
        for shape, times in Counter([shapes[place] for place in places]).items():
            meaning = self._shapes[shape]
            meaning.seen += times
            for finding in meaning.findings:
                finding.count += times
                finding.last_line = max(finding.last_line, block.first_line + last[shape])
        before = self._start.answered
        self._start.answered += _count_answers(block.data)
        for shape in last:
            for finding in self._shapes[shape].findings:
                finding.answered_at_last = before

    def _read_line(self, number: int, raw: bytes, meaning: _Shape) -> None:
        line = _text_of(number, raw)
        whole, text = line.text, line.text[:_LINE_CHARACTERS]
        for sign in meaning.signs:
            if sign.role is Role.START and sign.pattern.search(text):
                self._begin(number, sign)
        for pattern in meaning.facts:
            told = pattern.search(whole)
            if told:
                self._start.learn(line, told)
        if not meaning.signs:
            self._start.note_error(line)
            return
        findings: list[Finding] = []
        for sign in meaning.signs:
            found = sign.pattern.search(text)
            if found is None:
                continue
            finding = self._start.take(line, sign, found)
            if finding is not None:
                findings.append(finding)
        meaning.findings = tuple(findings)

    def _begin(self, number: int, sign: Sign) -> None:
        start = self._start
        near = start.start_line is not None and number - start.start_line <= _SAME_START_LINES
        weak = sign.kind == "again" and start.start_line is not None and not start.is_over
        if (near and not start.is_over) or weak:
            return
        if start.start_line is not None or start.findings:
            self._earlier.append(summarise(start, number - 1))
        self._starts += 1
        self._start = Start(first_line=number, start_line=number, engine=self._engine or sign.engine)
        for shape in self._shapes.values():
            shape.seen, shape.findings = 0, ()


def _text_of(number: int, raw: bytes) -> LogLine:
    text = raw.decode("utf-8", "replace").replace("\x00", "")
    if "\r" in text:
        # A progress bar wrote over itself: the last that it left is what stands there.
        text = next((part for part in reversed(text.split("\r")) if part), "")
    return parse_line(number, text)


def _count_answers(data: bytes) -> int:
    return len(_ANSWERED.findall(data)) if any(mark in data for mark in _ANSWER_MARKS) else 0


def _count_lines(lines: list[bytes], begin: int, end: int) -> int:
    return sum(1 for line in lines[begin:end] if _ANSWERED.search(line)) if end > begin else 0


def diagnose(source: Path | BinaryIO, *, engine: str | None = None) -> DiagnosedLog:
    """Read a log once, in bounded memory, and say why its last start failed or died.

    Args:
        source: a log file, or an open binary stream (standard input).
        engine: whose log it is, where the caller knows: `vllm`, `sglang`, `llamacpp` or `tgi`. Seen in the log when None.

    Returns:
        The diagnosis, or that no cause was found and what state the log leaves the server in.

    Raises:
        ConfigError: the log cannot be read, or is plainly no text.
    """
    reader = LogReader(engine)
    for block in read_blocks(source):
        reader.take(block)
    return reader.finish()
