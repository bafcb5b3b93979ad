"""Reads a log of any size once, and keeps what tells how the last start of the server came out.

How it is fast: a line without its digits and without the letters of hexadecimal numbers is a *shape*. Months of access
and statistics lines have a few hundred shapes. A block of the file becomes a set of shapes in three passes of C code;
only shapes that were never seen are looked at, and only lines of shapes that mean something are taken apart. A shape
that said the same many times in one start is only counted.

How it stays small: shapes are kept up to a limit, findings by sign and not by line, earlier starts as one sentence.
"""

import math
import re
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
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
_FLOOD_LINES = 1000
"""A block with so many new lines that may tell something is a flood: the same said in ever other words."""
_RARE = 4
"""Words of a flood that fewer lines have are names: of customers, requests, tensors."""
_FLOOD_TAKEN_APART = 64
"""Lines of a flood alike but for names that are read in full; the rest are only counted."""
_TAKEN_APART = 64
"""Lines of one shape that are read in full in one start; the rest are only counted."""
_LINE_CHARACTERS = 4096
_FACT_CHARACTERS = 20_000
"""A configuration printed in one line has less."""
_SAME_START_LINES = 30
"""A server says in several lines that it starts."""
_KEPT_STARTS = 20

_NEVER_ONLY_COUNTED = frozenset({Role.START, Role.READY, Role.STOP, Role.PHASE, Role.FRAME, Role.TRACEBACK})
_TURNS = frozenset({Role.START, Role.READY})
_OF_STARTS = frozenset({Role.PHASE, Role.FRAME, Role.TRACEBACK})
_POSTED = re.compile(rb'"POST /[^"\n]*" 200')
_ANSWER_WORDS = (b"total time = ", b"Success")
"""llama.cpp and TGI say it so when a request is done."""
_ERROR_LINE = re.compile(
    r"(?:^|[\s.:])(?P<error>[A-Z]\w*(?:Error|Exception)): ?(?P<message>.*)|\bpanicked at\b|^panic: "
    r"|^(?:\w+\.)*(?:AssertionError|TimeoutError|NotImplementedError|RuntimeError)$"
)
_ERROR_NEEDLES = (
    *(b"Error:", b"Exception:", b"panic", b"AssertionError", b"TimeoutError", b"NotImplementedError", b"RuntimeError"),
)
_TEXTS_OF_CUSTOMERS = (b"Received request ", b"Receive: obj=", b"Finish: obj=")
"""How vLLM and SGLang begin a line that repeats a request with its prompt: no failure is told in one, and every text is
another."""
_ANCHORS = tuple(
    anchor.encode()
    for anchor in (
        # failures
        "rror", "ailed", "ailure", "rashed", "xce", "emory", "xit", "ignal", "SIG", "imeout", "timed out", "illed",
        " died", "is dead", "fault", "Xid", "NVRM", "ASSERT", "ssertion", "core dumped", "denied", "magic", "couldn't",
        "erminate", "etract", '" 4', "supported", "gated", "atal",
        "bad_alloc", "(required", "space left", "open files", "Not Found", "OOM",
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
_PIECE = re.compile(_any_of({max(needle.split(), key=len) for needle in _ROWS_OF}))
"""Of each needle the longest word: what has none of them holds no needle."""


@dataclass(slots=True)
class _Shape:
    """What lines of one shape mean."""

    signs: tuple[Sign, ...]
    facts: tuple[re.Pattern[str], ...]
    may_be_counted: bool
    seen: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def roles(self) -> set[Role]:
        """What its signs are."""
        return {sign.role for sign in self.signs}


@dataclass(slots=True)
class _Alike:
    """What lines of a flood mean that are alike but for names; None where they mean nothing."""

    meaning: _Shape | None
    seen: int = 1

    def is_plain_by(self, key: bytes) -> bool:
        """Whether the words that lines share say already what is known of them, so that their names need no look."""
        signs = () if self.meaning is None else self.meaning.signs
        return bool(signs) and all(any(needle in key for needle in sign.needles) for sign in signs)


class _Flood:
    """New lines by the thousand in one block: mostly the same, said of ever other names.

    Lines are alike when they have the same words but for digits and names. A name is a word that few lines have.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Alike] = {}
        self._words: dict[bytes, bytes] = {}

    def keys(self, heads: list[bytes]) -> list[bytes]:
        """For each line the words that it shares with others."""
        text = b"\n".join(heads).translate(None, b"0123456789\x00").replace(b"\n", b" \x00 ")
        words = [b"\x00", *text.split(), b"\x00"]
        if not self._words:
            self._words = {word: word for word, times in Counter(words).items() if times >= _RARE}
        return b" ".join(filter(None, map(self._words.get, words))).split(b"\x00")[1:-1]

    def finer(self, key: bytes, head: bytes) -> bytes:
        """The key with what the line's names hold of needles: it passes for none that the tables tell apart."""
        names = b" ".join([word for word in head.translate(None, b"0123456789\x00").split() if word not in self._words])
        return key + b"\x00" + b"+".join(_PIECE.findall(names))

    def told(self, key: bytes) -> _Alike | None:
        """What a line means of which one more need only be counted; None where it has to be read."""
        alike = self._known.get(key)
        if alike is None or alike.seen < _FLOOD_TAKEN_APART:
            return None
        meaning = alike.meaning
        # How a process ended is in its figures.
        is_told = meaning is None or (meaning.may_be_counted and not meaning.facts and Role.LOSS not in meaning.roles)
        return alike if is_told else None

    def learn(self, key: bytes, meaning: _Shape | None) -> None:
        """What one line of those alike meant."""
        alike = self._known.get(key)
        if alike is None:
            if len(self._known) >= _KEPT_SHAPES:
                self._known.clear()
            self._known[key] = _Alike(meaning)
        elif (alike.meaning and alike.meaning.signs) != (meaning and meaning.signs):
            # Alike in words and not in meaning: they are read on.
            alike.meaning, alike.seen = meaning, 1
        else:
            alike.seen += 1

    def forget(self) -> None:
        """Begin anew: other words are shared by now."""
        self._known.clear()
        self._words.clear()


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
        self._flood = _Flood()
        self._told_later: list[tuple[_Shape, list[int]]] = []
        self._counted: set[bytes] = set()
        self._unknown_error: int | None = None
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
        self._count_told(block)
        if self._again or self._unknown_error is not None:
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
        telling = _telling(examples, lines)
        if len(telling) >= _FLOOD_LINES:
            self._read_flood(telling, lines, block, different)
            # So many new shapes are texts, which do not come again.
            return
        for shape, place, head in telling:
            self._learn(shape, place, head, lines, block)
        if len(self._dull) >= _KEPT_SHAPES:
            self._dull.clear()
        if len(new) < _KEPT_SHAPES // 4:
            dull = new - self._shapes.keys() - self._counted
            self._dull.update(shape for shape in dull if len(shape) <= _SHAPE_BYTES)
        self._counted.clear()

    def _turns_in(self, block: Block) -> bool:
        """Whether a start may begin or become ready in the block."""
        if self._turns is None:
            self._turns = any(mark in block.data for mark in _TURNING_POINTS)
        return self._turns

    def _learn(self, shape: bytes, place: int, head: bytes, lines: list[bytes], block: Block) -> _Shape | None:
        """What a new shape means, if anything; kept unless its line was counted and need not be read."""
        meaning = self._meaning(head, lines[place])
        if meaning is None:
            return None
        often = self._start.heard_enough(meaning.signs) if meaning.may_be_counted and not meaning.facts else []
        if often and not self._turns_in(block):
            # Millions of lines that say the same in other words: who said it, and when first, is known by now.
            self._told_later.append((meaning, [place]))
            self._counted.add(shape)
            return meaning
        if len(self._shapes) >= _KEPT_SHAPES:
            self._shapes.clear()
        self._shapes[shape] = meaning
        return meaning

    def _read_flood(
        self, telling: list[tuple[bytes, int, bytes]], lines: list[bytes], block: Block, different: set[bytes]
    ) -> None:
        """Read lines that are alike so long as they may say more, and count the rest."""
        keys = self._flood.keys([head for _, _, head in telling])
        turning = any(_TURNS & self._shapes[shape].roles for shape in different & self._shapes.keys())
        # Lines that say the same of known meaning need no look at their names; those of none do.
        plain = {key: alike for key in set(keys) if (alike := self._flood.told(key)) and alike.is_plain_by(key)}
        counted: dict[int, tuple[_Alike, list[int]]] = {}
        read = 0
        for index, key in enumerate(keys):
            alike = plain.get(key)
            if alike is None:
                shape, place, head = telling[index]
                finer = self._flood.finer(key, head)
                alike = self._flood.told(finer)
                if alike is None:
                    read += 1
                    meaning = self._learn(shape, place, head, lines, block)
                    self._flood.learn(finer, meaning)
                    self._flood.learn(key, meaning)
                    turning = turning or (meaning is not None and bool(_TURNS & meaning.roles))
                    continue
            counted.setdefault(id(alike), (alike, []))[1].append(index)
        if read >= _FLOOD_LINES:
            self._flood.forget()
        for alike, indices in counted.values():
            if turning:
                # What was said before a start or its readiness is another's: each line in its place.
                for index in indices:
                    shape, place, head = telling[index]
                    self._learn(shape, place, head, lines, block)
            elif alike.meaning is not None:
                self._told_later.append((alike.meaning, [telling[index][1] for index in indices]))

    def _count_told(self, block: Block) -> None:
        """Add lines that were not read to findings, which by now there are; but for those after the server's stop."""
        stop = math.inf if self._start.stop_line is None else self._start.stop_line - block.first_line
        for meaning, told in self._told_later:
            places = [place for place in told if place < stop]
            found = [self._start.findings.get(id(sign)) for sign in meaning.signs]
            if places:
                self._count_more(meaning, [one for one in found if one is not None], places[-1], len(places))
        self._told_later.clear()

    def _meaning(self, head: bytes, raw: bytes) -> _Shape | None:
        if b"\r" in raw:
            # What a progress bar wrote stands before what matters.
            head = raw[-_HEAD_BYTES:]
        rows = sorted({row for found in _NEEDLE.finditer(head) for row in _ROWS_OF[found[1]]})
        if not rows:
            return None
        signs = [SIGNS[row] for row in rows if 0 <= row < len(SIGNS) and SIGNS[row].engine in self._engines]
        facts = tuple(FACTS[row - len(SIGNS)][1] for row in rows if row >= len(SIGNS))
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
        told = {shape: self._told_already(self._shapes[shape]) for shape in telling}
        if None not in told.values():
            self._start.answered += _count_answers(block.data)
            last = {shapes[place]: place for place in places}
            for shape, times in Counter([shapes[place] for place in places]).items():
                self._count_more(self._shapes[shape], told[shape] or (), last[shape], times)
            return
        lines = block.data.split(b"\n")
        done = 0
        for place in places:
            meaning = self._shapes[shapes[place]]
            findings = self._told_already(meaning)
            if findings is not None:
                self._count_more(meaning, findings, place)
                continue
            meaning.seen += 1
            self._start.answered += _count_answers(b"\n".join(lines[done:place]))
            done = place
            self._read_line(block.first_line + place, lines[place], meaning)
        self._start.answered += _count_answers(b"\n".join(lines[done:]))

    def _count_more(self, meaning: _Shape, findings: Sequence[Finding], place: int, times: int = 1) -> None:
        meaning.seen += times
        for finding in findings:
            finding.count += times
            self._heard_again(finding, place)
        if not meaning.signs:
            self._unknown_error = place if self._unknown_error is None else max(self._unknown_error, place)

    def _told_already(self, meaning: _Shape) -> Sequence[Finding] | None:
        """The findings that one more line of a shape only adds to; None where it has to be read."""
        if self._start.serving and not meaning.facts and meaning.signs and meaning.roles <= _OF_STARTS:
            return ()  # how far it had come is known: whatever it does is done while serving
        if not meaning.may_be_counted:
            return None
        if self._start.stop_line is not None and meaning.signs and not meaning.facts:
            return ()  # what follows a stop tells nothing
        if meaning.seen >= _TAKEN_APART and (meaning.findings or not (meaning.signs or meaning.facts)):
            return meaning.findings
        return None if meaning.facts else self._start.heard_enough(meaning.signs) or None

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
        last, self._unknown_error = self._unknown_error, None
        known = self._start.error
        if last is not None and (known is None or known.line < block.first_line + last):
            self._start.note_error(_text_of(block.first_line + last, lines[last]))

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
        self._unknown_error = None
        for shape in self._shapes.values():
            shape.seen, shape.findings = 0, ()


def _telling(examples: Mapping[bytes, int], lines: Sequence[bytes]) -> list[tuple[bytes, int, bytes]]:
    """Shape, place and head of the lines that hold a fragment of the tables, in their order."""
    left = [(shape, place, _head(lines[place])) for shape, place in examples.items()]
    found: list[tuple[bytes, int, bytes]] = []
    joined = b"\n".join([head for _, _, head in left])
    for anchor in _ANCHORS:
        if anchor not in joined:
            continue
        having = [one for one in left if anchor in one[2]]
        if len(having) == len(left):
            found += left
            break
        found += having
        left = [one for one in left if anchor not in one[2]]
        joined = b"\n".join([head for _, _, head in left])
    return sorted(found, key=lambda one: one[1])


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
