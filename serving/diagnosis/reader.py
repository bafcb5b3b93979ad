"""Reads a log of any size once, and keeps what tells how the last start of the server came out.

How it is fast: a line without its digits and without the letters of hexadecimal numbers is a *shape*. Months of access
and statistics lines have a few hundred shapes. A block of the file becomes a set of shapes in three passes of C code;
only shapes that were never seen are looked at, and only lines of shapes that mean something are taken apart. A shape
that said the same many times in one start is only counted.

How it stays small: shapes are kept up to a limit, findings by sign and not by line, earlier starts as one sentence.
"""

import re
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from serving.diagnosis.conclusion import Finding, Start, conclude, summarise
from serving.diagnosis.signs import FACTS, SIGNS, Role, Sign
from serving.diagnosis.words import DiagnosedLog, EarlierStart
from serving.log_lines import Block, LogLine, parse_line, read_blocks

__all__ = ["LogReader", "diagnose"]

_HEAD_BYTES = 256
"""Words that mean something stand near the beginning of a line; prompts and configurations stand behind them."""
_JSON_HEAD_BYTES = 2048
"""In a line of JSON the message stands behind other fields, and may be a whole traceback."""
_SHAPE_BYTES = 512
"""Longer shapes are not remembered: they hold texts, which do not come again."""
_UNREAD = b"0123456789abcdef"
"""Bytes that do not tell shapes apart: digits, and the letters of hexadecimal identifiers."""
_KEPT_SHAPES = 20_000
_TAKEN_APART = 64
"""Lines of one shape that are read in full in one start; the rest are only counted."""
_LINE_CHARACTERS = 4096
_FACT_CHARACTERS = 20_000
"""A configuration printed in one line has less."""
_SAME_START_LINES = 30
"""A server says in several lines that it starts."""
_KEPT_STARTS = 20

_NEVER_ONLY_COUNTED = frozenset({Role.START, Role.READY, Role.STOP, Role.PHASE, Role.FRAME, Role.TRACEBACK})
_POSTED = re.compile(rb'"POST /[^"\n]*" 200')
_ANSWER_WORDS = (b"total time = ", b"Success")
"""llama.cpp and TGI say it so when a request is done."""
_ERROR_LINE = re.compile(
    r"(?:^|[\s.:])(?P<error>[A-Z]\w*(?:Error|Exception)): ?(?P<message>.*)|\bpanicked at\b|^panic: "
)
_ERROR_NEEDLES = (b"Error:", b"Exception:", b"panic")
_TEXTS_OF_CUSTOMERS = (b"Received request ", b"Receive: obj=", b"Finish: obj=")
"""How vLLM and SGLang begin a line that repeats a request with its prompt: no failure is told in one, and every text is
another."""
_ANCHORS = tuple(
    anchor.encode()
    for anchor in (
        # failures
        "rror", "ailed", "ailure", "rashed", "xce", "emory", "xit", "ignal", "SIG", "imeout", "timed out", "illed",
        " died", "is dead", "fault", "Xid", "NVRM", "ASSERT", "ssertion", "core dumped", "denied", "magic", "couldn't",
        "erminated", "etract", '" 4', "supported", "gated",
        # lives and phases
        "erver", "tart", "non-default", "nitializing", "oad", "onnected", "hut", "nterrupt", "leaning up", "raceback",
        ", in ", "KV ", "n_ctx", "n_seq", "buffer", "MiB free", "apturing", "apture ", "Warming", "Args {", "blocks:",
        "istening", "slots are", "onstruct", "busy_loop",
    )
)  # fmt: skip
"""Fragments of which every line that the tables know holds one near its beginning (a test says so). Few, because a
block of texts that are all different is searched for each of them."""
_TURNING_POINTS = tuple(needle for sign in SIGNS if sign.role in (Role.START, Role.READY) for needle in sign.needles)
_ERROR_ROW = -1


def _rows() -> dict[bytes, list[int]]:
    """Needle -> rows that it calls for: those of `SIGNS`, then those of `FACTS`."""
    rows: dict[bytes, list[int]] = {needle: [_ERROR_ROW] for needle in _ERROR_NEEDLES}
    for row, needles in enumerate([sign.needles for sign in SIGNS] + [needles for needles, _ in FACTS]):
        for needle in needles:
            rows.setdefault(needle, []).append(row)
    # The search gives the longest needle at a place, and those that it begins with are there as well.
    return {needle: [row for shorter in rows if needle.startswith(shorter) for row in rows[shorter]] for needle in rows}


def _any_of(words: Collection[bytes]) -> bytes:
    """A pattern for the longest of the words, arranged by their beginnings: `re` tries alternatives one by one."""
    tails: dict[bytes, list[bytes]] = {}
    for word in sorted(words):
        if word:
            tails.setdefault(word[:1], []).append(word[1:])
    branches = [re.escape(first) + _any_of(rest) for first, rest in tails.items()]
    if not branches:
        return b""
    joined = branches[0] if len(branches) == 1 and b"" not in words else b"(?:" + b"|".join(branches) + b")"
    return joined + b"?" if b"" in words else joined


_ROWS_OF = _rows()
_NEEDLE = re.compile(b"(?=(" + _any_of(_ROWS_OF) + b"))")
"""At each place in a line the longest needle that begins there."""


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
        self._engines = {sign.engine for sign in SIGNS} if engine is None else {"", engine}
        self._dull: set[bytes] = set()
        self._shapes: dict[bytes, _Shape] = {}
        self._lines = 0
        self._starts = 0
        self._earlier: deque[EarlierStart] = deque(maxlen=_KEPT_STARTS)
        self._start = Start(first_line=1, engine=engine)
        self._again: dict[int, tuple[Finding, int]] = {}
        self._turns: bool | None = None

    def take(self, block: Block) -> None:
        """Read one block; blocks come in the order of the file."""
        shapes = block.data.translate(None, _UNREAD).split(b"\n")
        different = set(shapes)
        self._turns = None
        self._look_at(different, block, shapes)
        telling = different & self._shapes.keys()
        if telling:
            self._read_telling(block, shapes, telling)
        else:
            self._start.answered += _count_answers(block.data)
        if self._again:
            self._settle(block)
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
        # One line for each new shape: the last that has it.
        lines = block.data.split(b"\n")
        examples = {shape: place for place, shape in enumerate(shapes) if shape in new}
        for mark in _TEXTS_OF_CUSTOMERS:
            if mark in block.data:
                examples = {shape: place for shape, place in examples.items() if mark not in lines[place][:_HEAD_BYTES]}
        heads = b"\n".join([_head(lines[place]) for place in examples.values()])
        present = [anchor for anchor in _ANCHORS if anchor in heads]
        for shape, place in examples.items() if present else ():
            head = _head(lines[place])
            if [anchor for anchor in present if anchor in head]:
                meaning = self._meaning(head, lines[place], place, block.data)
                if meaning is not None:
                    if len(self._shapes) >= _KEPT_SHAPES:
                        self._shapes.clear()
                    self._shapes[shape] = meaning
        if len(self._dull) >= _KEPT_SHAPES:
            self._dull.clear()
        if len(new) < _KEPT_SHAPES // 4:
            # A block with so many new shapes is one of texts, which do not come again.
            self._dull.update(shape for shape in new - self._shapes.keys() if len(shape) <= _SHAPE_BYTES)

    def _meaning(self, head: bytes, raw: bytes, place: int, data: bytes) -> _Shape | None:
        if b"\r" in raw:
            # What a progress bar wrote stands before what matters.
            head = raw[-_HEAD_BYTES:]
        rows = sorted({row for found in _NEEDLE.finditer(head) for row in _ROWS_OF[found[1]]})
        if not rows:
            return None
        signs = [SIGNS[row] for row in rows if 0 <= row < len(SIGNS) and SIGNS[row].engine in self._engines]
        facts = tuple(FACTS[row - len(SIGNS)][1] for row in rows if row >= len(SIGNS))
        text = raw[:_LINE_CHARACTERS].decode("utf-8", "replace")
        said = [sign for sign in signs if sign.pattern.search(text)]
        often = self._start.heard_enough(said)
        if often and self._turns is None:
            self._turns = any(mark in data for mark in _TURNING_POINTS)
        if often and not self._turns:
            # Millions of lines that say the same in other words: who said it, and when first, is known by now.
            for finding in often:
                finding.count += 1
                self._heard_again(finding, place)
            return None
        message = _text_of(0, raw).message[:_LINE_CHARACTERS]
        signs = [sign for sign in signs if sign.pattern.search(message)]
        alone = next((sign for sign in signs if sign.alone), None)
        if alone is not None:
            signs = [alone]
        if not signs and not facts and not (rows[0] == _ERROR_ROW and _ERROR_LINE.search(message)):
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
                    self._heard_again(finding, place)
                continue
            self._start.answered += _count_answers(b"\n".join(lines[done:place]))
            done = place
            self._read_line(number, lines[place], meaning)
        self._start.answered += _count_answers(b"\n".join(lines[done:]))

    def _count_only(self, block: Block, shapes: list[bytes], places: list[int]) -> None:
        last = {shapes[place]: place for place in places}
        for shape, times in Counter([shapes[place] for place in places]).items():
            meaning = self._shapes[shape]
            meaning.seen += times
            for finding in meaning.findings:
                finding.count += times
                self._heard_again(finding, last[shape])
        self._start.answered += _count_answers(block.data)

    def _heard_again(self, finding: Finding, place: int) -> None:
        known = self._again.get(id(finding))
        self._again[id(finding)] = (finding, place if known is None else max(known[1], place))

    def _settle(self, block: Block) -> None:
        """Where in the block what was only counted was said last, and how many requests were answered by then."""
        lines = block.data.split(b"\n")
        for finding, place in self._again.values():
            finding.last_line = max(finding.last_line, block.first_line + place)
            finding.answered_at_last = self._start.answered - _count_answers(b"\n".join(lines[place + 1 :]))
        self._again.clear()

    def _read_line(self, number: int, raw: bytes, meaning: _Shape) -> None:
        line = _text_of(number, raw)
        message = line.message[:_LINE_CHARACTERS]
        for sign in meaning.signs:
            if sign.role is Role.START and sign.pattern.search(message):
                self._begin(number, sign)
        for pattern in meaning.facts:
            told = pattern.search(line.text[:_FACT_CHARACTERS])
            if told:
                self._start.learn(line, told)
        if not meaning.signs:
            self._start.note_error(line)
            return
        was_ready = self._start.ready_line is not None
        findings: list[Finding] = []
        for sign in meaning.signs:
            found = sign.pattern.search(message)
            if found is None:
                continue
            finding = self._start.take(line, sign, found)
            if finding is not None:
                findings.append(finding)
        meaning.findings = tuple(findings)
        if not was_ready and self._start.ready_line is not None:
            # What was said before is forgotten, and said anew it is to be read anew.
            self._read_anew()

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
        self._read_anew()

    def _read_anew(self) -> None:
        self._again.clear()
        for shape in self._shapes.values():
            shape.seen, shape.findings = 0, ()


def _head(line: bytes) -> bytes:
    return line[: _JSON_HEAD_BYTES if line[:1] == b"{" else _HEAD_BYTES]


def _text_of(number: int, raw: bytes) -> LogLine:
    text = raw.decode("utf-8", "replace").replace("\x00", "")
    if "\r" in text:
        # A progress bar wrote over itself: the last that it left is what stands there.
        text = next((part for part in reversed(text.split("\r")) if part), "")
    return parse_line(number, text)


def _count_answers(data: bytes) -> int:
    posted = len(_POSTED.findall(data)) if b'"POST /' in data else 0
    return posted + sum(data.count(word) for word in _ANSWER_WORDS)


def diagnose(source: Path | BinaryIO, *, engine: str | None = None) -> DiagnosedLog:
    """Read a log once, in bounded memory, and say why its last start failed or died.

    Args:
        source: a log file, or an open binary stream (standard input).
        engine: whose log it is, where the caller knows: `vllm`, `sglang`, `llamacpp` or `tgi`; seen in the log when
            None.

    Returns:
        The diagnosis, or that no cause was found and what state the log leaves the server in.

    Raises:
        ConfigError: the log cannot be read, or is plainly no text.
    """
    reader = LogReader(engine)
    for block in read_blocks(source):
        reader.take(block)
    return reader.finish()
