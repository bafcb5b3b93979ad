"""Logs of servers as lines: read in blocks from files of any size, and stripped of what was put in front of them.

The two halves are apart on purpose. `read_blocks` deals in bytes and is as fast as the disk, so that a reader of
months of access lines can search a block for the few words it wants and split only the blocks that have them.
`split_block` and `parse_line` deal in lines, and cost microseconds for each.

Log text is no API: nothing here fails on a line, whatever it holds.
"""

import codecs
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from serving.errors import ConfigError

__all__ = [
    "BLOCK_BYTES",
    "LINE_LIMIT_BYTES",
    "Block",
    "LogLine",
    "Stamp",
    "StampKind",
    "parse_line",
    "read_blocks",
    "read_lines",
    "split_block",
    "strip_ansi",
]

BLOCK_BYTES = 1 << 20
"""How much of a log is held at a time."""

LINE_LIMIT_BYTES = 64 * 1024
"""A longer line is cut here: the longest lines that engines print, their whole configuration, are below 20 KiB."""

_NOT_LOGS = {
    b"\x1f\x8b": "a gzip file: unpack it first (zcat)",
    b"\x28\xb5\x2f\xfd": "a zstandard file: unpack it first (zstdcat)",
    b"\xfd7zXZ\x00": "an xz file: unpack it first (xzcat)",
    b"BZh": "a bzip2 file: unpack it first (bzcat)",
    b"PK\x03\x04": "a zip file: unpack it first",
    b"GGUF": "a GGUF model, not a log",
    b"SQLite format 3\x00": "an SQLite file (a history of Plimsoll?), not a log",
    b"\x7fELF": "a program, not a log",
}
_UTF16_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive whole lines of a log.

    Attributes:
        first_line: number of the first line, from 1.
        data: the lines, each with its newline except perhaps the last of the file.
    """

    first_line: int
    data: bytes


class StampKind:
    """What the seconds of a `Stamp` count from."""

    ZONED = "zoned"
    """The Unix epoch."""
    LOCAL = "local"
    """1970-01-01 on the wall clock of the server, whose zone the log does not tell."""
    YEARLESS = "yearless"
    """1 January of a leap year on the wall clock of the server: the log tells neither year nor zone."""
    RELATIVE = "relative"
    """The start of the process."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """When a line was written, as far as the line tells. Only stamps of one kind can be compared."""

    seconds: float
    kind: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log, taken apart. What the line does not tell is None, "" or empty.

    Attributes:
        number: line in the file, from 1; parts of a line that a progress bar wrote have the same number.
        message: what the program said, without all that was put in front of it.
        text: the line without ANSI codes, with its prefix.
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        stamp: when.
        process: the name in `(Worker_TP0 pid=9)`.
        pid: the number there.
        ranks: which rank spoke: keys among dp, tp, pp, ep, cp and rank, in lower case.
        source: file that printed it, as in `[gpu_worker.py:123]`.
    """

    number: int
    message: str
    text: str
    level: str = ""
    stamp: Stamp | None = None
    process: str = ""
    pid: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    @property
    def rank(self) -> str:
        """The ranks in one word such as `dp1 tp0`; "" where the line names none."""
        return " ".join(f"{name}{number}" for name, number in sorted(self.ranks.items()))


def read_blocks(source: Path | BinaryIO, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The log in blocks of whole lines, as UTF-8 whatever it was, in bounded memory.

    A log that grows is read up to where it ended when reading began. Lines are cut at `LINE_LIMIT_BYTES`.

    Args:
        source: a file or FIFO, or an open binary stream.
        block_bytes: how much is read at a time.

    Raises:
        ConfigError: it cannot be read, or is plainly no text (an archive, a model, a directory).
    """
    if not isinstance(source, Path):
        yield from _blocks(source, None, "the stream", block_bytes)
        return
    try:
        # A device such as /dev/zero would never end, so the kind is looked at first.
        status = source.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{source}: a directory, not a log")
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise ConfigError(f"{source}: a device or socket, not a log")
        with source.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size if stat.S_ISREG(status.st_mode) else None
            yield from _blocks(stream, size, str(source), block_bytes)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error


def _blocks(stream: BinaryIO, size: int | None, name: str, block_bytes: int) -> Iterator[Block]:
    line = 1
    carry = b""
    cutting = False
    for data in _utf8_chunks(stream, size, name, block_bytes):
        chunk = data
        if cutting:
            # The rest of a line that was cut is dropped up to its newline.
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk, cutting = chunk[end:], False
        chunk = carry + chunk
        end = chunk.rfind(b"\n") + 1
        whole, carry = chunk[:end], chunk[end:]
        if whole:
            yield Block(line, whole)
            line += whole.count(b"\n")
        if len(carry) > LINE_LIMIT_BYTES:
            carry, cutting = carry[:LINE_LIMIT_BYTES], True
    if carry:
        yield Block(line, carry)


def _utf8_chunks(stream: BinaryIO, size: int | None, name: str, block_bytes: int) -> Iterator[bytes]:
    left = size
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    while left is None or left > 0:
        data = stream.read(block_bytes if left is None else min(block_bytes, left))
        if not data:
            return
        if left is not None:
            left -= len(data)
        if first:
            first = False
            for magic, what in _NOT_LOGS.items():
                if data.startswith(magic):
                    raise ConfigError(f"{name}: {what}")
            # What PowerShell writes for `server > log.txt`.
            encoding = _UTF16_MARKS.get(data[:2])
            if encoding is not None:
                decoder = codecs.getincrementaldecoder(encoding)("replace")
        yield data if decoder is None else decoder.decode(data).encode("utf-8", "replace")


def split_block(block: Block) -> Iterator[tuple[int, str]]:
    """The lines of a block as (number, text): cut, decoded, without NULs, apart at each carriage return of a bar."""
    number = block.first_line
    for raw in block.data.split(b"\n"):
        if raw:
            yield from ((number, part) for part in _decode(raw))
        number += 1


def _decode(raw: bytes) -> list[str]:
    text = raw[:LINE_LIMIT_BYTES].decode("utf-8", "replace")
    if "\x00" in text:  # what copytruncate leaves of a log, and a crash of the file system
        text = text.replace("\x00", "")
    if "\r" not in text:
        return [text] if text else []
    return [part for part in text.split("\r") if part]


def read_lines(source: Path | BinaryIO) -> Iterator[tuple[int, str]]:
    """All lines of a log as (number, text). Raises what `read_blocks` raises."""
    for block in read_blocks(source):
        yield from split_block(block)


_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


def strip_ansi(text: str) -> str:
    """`text` without colours and other terminal commands."""
    return _ANSI.sub("", text) if "\x1b" in text else text


_LEVELS = {
    "D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL",
    "TRACE": "DEBUG", "DEBUG": "DEBUG", "INFO": "INFO", "WARN": "WARNING", "WARNING": "WARNING",
    "ERR": "ERROR", "ERROR": "ERROR", "CRITICAL": "CRITICAL", "FATAL": "CRITICAL",
}  # fmt: skip
_MONTHS = {
    "Jan": 1, "Feb": 2, "Mar": 3, "Apr": 4, "May": 5, "Jun": 6,
    "Jul": 7, "Aug": 8, "Sep": 9, "Oct": 10, "Nov": 11, "Dec": 12,
}  # fmt: skip
_RANK_WORD = r"(?:DCP|PCP|ATTN_?CP|DP|TP|PP|EP|CP)\d+"
_ISO = r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?(?P<zone>Z| ?[+-]\d\d:?\d\d)?"
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|TRACE)"

# What may stand in front of a message, in any order: containers, supervisors, frameworks and engines each add theirs.
_PREFIXES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        # vLLM and Ray: (EngineCore_DP0 pid=12), (VllmWorker rank=0 pid=9), (RayWorkerWrapper pid=9, ip=10.0.0.2)
        (
            r"\((?P<process>[A-Za-z_][\w.:-]*)?(?:[ ,]*(?P<process_ranks>(?:[A-Z]{2,3}\d+[ _]?)+))?"
            r"(?:[ ,]*rank=(?P<rank>\d+))?[ ,]*pid=(?P<pid>\d+)(?:,? *ip=[^)\s]*)?\)\s*"
        ),
        # vLLM: INFO 07-14 12:00:00 [core.py:12]
        _LEVEL + r" +(?P<monthday>\d\d-\d\d) (?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?\s?",
        # SGLang: [2026-11-29 10:01:00 DP1 TP0 EP0]
        r"\[" + _ISO + r"(?P<inner_ranks>(?: " + _RANK_WORD + r")*)\]\s?",
        # Kubernetes and others: 2026-11-29T10:01:00.5Z stderr F
        _ISO + r"(?: (?:stdout|stderr) [FP])?(?=[ \t\]:|,-]|$)[\s:|,-]*",
        # llama.cpp: 0.00.013.413 I (minutes, seconds, milliseconds, microseconds)
        r"(?P<minutes>\d+)\.(?P<seconds>\d\d)\.(?P<milli>\d{3})\.(?P<micro>\d{3}) (?P<letter>[DIWE]) ",
        # glog, which torch writes: W1129 15:40:13.961000 533 torch/_library/triton.py:53]
        (
            r"\[?(?:rank(?P<torch_rank>\d+)\]:\s*\[?)?(?P<letter>[DIWEF])(?P<mmdd>\d{4}) (?P<clock>\d\d:\d\d:\d\d)"
            r"\.(?P<part>\d{1,9})\s+\d+ (?P<source>[^\s\]]+?):\d+\]\s*"
        ),
        r"\[rank(?P<rank>\d+)\]:?\s*",
        # Old vLLM wrote it without the opening bracket: INFO 11-20 10:00:00 worker.py:232]
        r"\[?(?P<source>[\w./-]+\.(?:py|rs|cpp|cc|cu)):\d+\](?: |$)",
        r"\[?" + _LEVEL + r"\]?(?::|(?=\s)|(?=\[))\s*",
        # docker compose: vllm-1  |
        r"[\w.-]+ +\| ",
        # journald and syslog: Nov 29 15:40:13 host unit[12]:
        (
            rf"(?P<month>{'|'.join(_MONTHS)}) +(?P<day>\d{{1,2}}) (?P<clock>\d\d:\d\d:\d\d) "
            r"\S+ [^\s:\[]+(?:\[\d+\])?: "
        ),
    )
)
_WORKER_RANK = re.compile(r"(DCP|PCP|DP|TP|PP|EP|CP)(\d+)")
_MOST_PREFIXES = 8


def parse_line(number: int, text: str) -> LogLine:
    """Take a line apart: what stands in front of the message, and the message.

    Lines in JSON (Docker's log driver, structured loggers) are opened first. Figures of ranks come from process names
    such as `Worker_TP0_EP1` as well.
    """
    plain = strip_ansi(text)
    stamp: Stamp | None = None
    level = ""
    source = ""
    ranks: dict[str, int] = {}
    if plain.startswith("{"):
        opened = _open_json(plain)
        if opened is not None:
            plain, level, source = strip_ansi(opened.message), opened.level, opened.source
            stamp = _iso_stamp(opened.time)
            if opened.rank is not None:
                ranks["rank"] = opened.rank
    rest = plain.lstrip()
    text = f"{source}: {plain}" if source else plain
    line = LogLine(number=number, message=plain, text=text, level=level, stamp=stamp, source=source)
    for _ in range(_MOST_PREFIXES):
        for pattern in _PREFIXES:
            found = pattern.match(rest)
            if found is not None and found.end():
                break
        else:
            break
        rest = rest[found.end() :]
        line = _take(line, found, ranks)
    return replace(line, message=rest, ranks=ranks)


def _take(line: LogLine, found: re.Match[str], ranks: dict[str, int]) -> LogLine:
    """`line` with what one prefix tells; the innermost counts, since supervisors put theirs before it."""
    told = {name: text for name, text in found.groupdict().items() if text}
    for name in ("process", "process_ranks", "inner_ranks"):
        for kind, number in _WORKER_RANK.findall(told.get(name, "")):
            ranks[kind.lower()] = int(number[:9])
    for name in ("rank", "torch_rank"):
        if name in told:
            ranks["rank"] = int(told[name][:9])
    level = told.get("level") or told.get("letter")
    return replace(
        line,
        level=_LEVELS[level] if level else line.level,
        stamp=_stamp(told) or line.stamp,
        process=told.get("process", line.process),
        pid=int(told["pid"][:12]) if "pid" in told else line.pid,
        source=told["source"].rsplit("/", 1)[-1] if "source" in told else line.source,
    )


def _stamp(told: Mapping[str, str]) -> Stamp | None:
    if "minutes" in told:
        whole = int(told["minutes"][:9]) * 60 + int(told["seconds"])
        return Stamp(whole + int(told["milli"]) / 1e3 + int(told["micro"]) / 1e6, StampKind.RELATIVE)
    part = float(f"0.{told['part']}") if "part" in told else 0.0
    if "date" in told:
        return _dated(told["date"], told["clock"], part, told.get("zone", "").strip())
    if "monthday" in told:
        return _yearless(told["monthday"], told["clock"], part)
    if "mmdd" in told:
        return _yearless(f"{told['mmdd'][:2]}-{told['mmdd'][2:]}", told["clock"], part)
    if "month" in told:
        return _yearless(f"{_MONTHS[told['month']]:02}-{int(told['day']):02}", told["clock"], part)
    return None


def _yearless(month_day: str, clock: str, part: float) -> Stamp | None:
    stamp = _dated(f"1972-{month_day}", clock, part, "")
    return None if stamp is None else Stamp(stamp.seconds - _START_OF_1972, StampKind.YEARLESS)


# Lines of one second share date and clock, and a log writes many of them in a row.
@lru_cache(maxsize=256)
def _seconds(date: str, clock: str) -> float | None:
    try:
        return datetime.fromisoformat(f"{date}T{clock}").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _dated(date: str, clock: str, part: float, zone: str) -> Stamp | None:
    seconds = _seconds(date, clock)
    if seconds is None:
        return None
    if not zone:
        return Stamp(seconds + part, StampKind.LOCAL)
    if zone != "Z":
        digits = zone[1:].replace(":", "")
        offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:])).total_seconds()
        seconds -= offset if zone[0] == "+" else -offset
    return Stamp(seconds + part, StampKind.ZONED)


_START_OF_1972 = datetime(1972, 1, 1, tzinfo=UTC).timestamp()
_ISO_LINE = re.compile(_ISO)


def _iso_stamp(text: str) -> Stamp | None:
    found = _ISO_LINE.match(text)
    return _stamp({name: told for name, told in found.groupdict().items() if told}) if found else None


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a line of JSON holds: the message, and what stood beside it."""

    message: str
    level: str = ""
    time: str = ""
    source: str = ""
    rank: int | None = None


_NESTED = ("fields", "jsonpayload", "body")
"""Where structured loggers put the message a level deeper: Rust's tracing (TGI), cloud collectors, OpenTelemetry."""
_MOST_OPENED = 3
"""A collector's line may hold a container's, and that one the program's own."""


def _open_json(line: str) -> _Opened | None:
    """A line that is a JSON object with a message in it, or one in which that is again such a line."""
    opened: _Opened | None = None
    for _ in range(_MOST_OPENED):
        inner = _open_once(line)
        if inner is None:
            return opened
        if opened is not None:
            # The innermost counts, and what it does not tell is told by those around it.
            kept = {name: told for name in ("level", "time", "source", "rank") if (told := getattr(inner, name))}
            inner = replace(opened, message=inner.message, **kept)
        opened = inner
        line = opened.message.lstrip()
        if not line.startswith("{"):
            return opened
    return opened


def _open_once(line: str) -> _Opened | None:
    try:
        page = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(page, dict):
        return None
    fields = {str(key).lower(): value for key, value in page.items()}
    for name in _NESTED:
        inner = fields.get(name)
        if isinstance(inner, dict):
            fields = {**{str(key).lower(): value for key, value in inner.items()}, **fields}
    texts = {key: value for key, value in fields.items() if isinstance(value, str)}
    names = ("log", "message", "msg", "event", "textpayload", "body")
    message = next((texts[key] for key in names if key in texts), None)
    if message is None:
        return None
    span = fields.get("span")
    rank = span.get("rank") if isinstance(span, dict) else None
    return _Opened(
        message.rstrip("\r\n"),
        _LEVELS.get(texts.get("level", texts.get("levelname", texts.get("severity", ""))).upper(), ""),
        next((texts[key] for key in ("time", "timestamp", "ts", "asctime") if key in texts), ""),
        texts.get("target", ""),
        rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 10**9 else None,
    )
