"""What was observed, kept: one SQLite file for a run or for the watch's memory, laid out as `docs/history.md` says.

A tick of the sampler is one wide row per target, GPU and process, with one column per signal of `serving.signals`: that
costs 9.5 bytes a sample where a row per sample costs 24 to 47 (`benchmarks/history_size.py`). A measurement that
was not made is NULL. Appending only fills a buffer; a thread commits it twice a second, so that `kill -9` loses less
than a second and the event loop never waits for the disk. While it is written the file is in WAL mode, so that others
can read it; when it is closed it is a single ordinary file.
"""
# ruff: noqa: S608 - every name put into SQL is a literal of this module, a record's field or a signal; values are bound.

import contextlib
import fcntl
import json
import math
import os
import sqlite3
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol, Self

from serving.errors import ConfigError, RecordError
from serving.records import Event, Outcome, RequestRecord, Stage
from serving.signals import Kind, Scope, Series, signals_of

__all__ = ["Epoch", "History", "SqliteHistory", "StoredFinding", "TargetPast"]

SCHEMA_MAJOR: Final = 1
"""Raised when an older version could misread a newer file; columns that are only added do not raise it."""
APPLICATION_ID: Final = 0x504C494D  # "PLIM", in the file's header
COMMIT_INTERVAL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Epoch:
    """A stretch of a target's life without a restart: `t_start_ns <= t_ns < t_end_ns`; None while it lasts."""

    target: str
    number: int
    """Counted from 1."""
    t_start_ns: int
    t_end_ns: int | None
    reason: str
    """`first sample`, or the text of the restart event that began it."""


@dataclass(frozen=True, slots=True)
class StoredFinding:
    """What a rule or detector said at a moment. `detail` is its JSON."""

    t_ns: int
    rule: str
    state: str
    detail: Mapping[str, Any]
    target: str | None = None


class History(Protocol):
    """What a judge reads, whoever recorded it. Both ends of a stretch belong to it; None means from or to the end."""

    def series(
        self,
        signal: str,
        since_ns: int | None = None,
        until_ns: int | None = None,
        *,
        target: str | None = None,
        labels: Mapping[str, str] | None = None,
        epoch: Epoch | None = None,
    ) -> list[Series]:
        """The series of a signal that have points in the stretch: one per target, GPU or process role.

        Args:
            signal: a name in `serving.signals.SIGNALS`; of a histogram, the name with `_sum` or `_count`.
            since_ns: first time.
            until_ns: last time.
            target: only this target. When absent, each series carries its target as the label `target`.
            labels: only series that carry these: `gpu` (a uuid), `role` (of a process), `target`.
            epoch: only this epoch of its target.

        Raises:
            ConfigError: no such signal.
            RecordError: the record cannot be read.
        """
        ...

    def events(
        self, since_ns: int | None = None, until_ns: int | None = None, *, target: str | None = None
    ) -> list[Event]:
        """Events in time order; with `target`, those of this target and those of no particular one."""
        ...

    def epochs(self, target: str | None = None) -> list[Epoch]:
        """The stretches between restarts, by target, in time order."""
        ...


# --- layout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SampleTable:
    """Where the signals of one scope are: a wide table, and what its rows are told apart by besides target and time."""

    name: str
    scope: Scope
    part: str = ""
    """Table that names the parts: `gpu` or `process`; none for the target itself."""
    part_name: str = ""
    """Column of that table with the name."""
    label: str = ""
    """What the name is called in a series."""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("target_id", "t_ns", f"{self.part}_id") if self.part else ("target_id", "t_ns")

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(
            column
            for signal in signals_of(self.scope)
            for column in (
                (f"{signal.name}_sum", f"{signal.name}_count") if signal.kind is Kind.HISTOGRAM else (signal.name,)
            )
        )


_SAMPLE_TABLES: Final = (
    _SampleTable("target_sample", Scope.TARGET),
    _SampleTable("gpu_sample", Scope.GPU, "gpu", "uuid", "gpu"),
    _SampleTable("process_sample", Scope.PROCESS, "process", "role", "role"),
)
_TABLE_OF: Final = {table.scope: table for table in _SAMPLE_TABLES}
_HOME_OF: Final = {column: table for table in _SAMPLE_TABLES for column in table.columns}
_HISTOGRAMS: Final = frozenset(signal.name for signal in signals_of(Scope.TARGET) if signal.kind is Kind.HISTOGRAM)
_REQUEST_COLUMNS: Final = tuple(field.name for field in fields(RequestRecord))

_TABLES: Final = """
CREATE TABLE manifest (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE target (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE gpu (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE);
CREATE TABLE process (id INTEGER PRIMARY KEY, role TEXT NOT NULL UNIQUE);
CREATE TABLE target_sample (
    target_id INTEGER NOT NULL REFERENCES target, t_ns INTEGER NOT NULL,
    PRIMARY KEY (target_id, t_ns)) WITHOUT ROWID;
CREATE TABLE gpu_sample (
    target_id INTEGER NOT NULL REFERENCES target, t_ns INTEGER NOT NULL, gpu_id INTEGER NOT NULL REFERENCES gpu,
    PRIMARY KEY (target_id, t_ns, gpu_id)) WITHOUT ROWID;
CREATE TABLE process_sample (
    target_id INTEGER NOT NULL REFERENCES target, t_ns INTEGER NOT NULL,
    process_id INTEGER NOT NULL REFERENCES process,
    PRIMARY KEY (target_id, t_ns, process_id)) WITHOUT ROWID;
CREATE TABLE request (
    request_id INTEGER NOT NULL, stage TEXT NOT NULL, user INTEGER NOT NULL, outcome TEXT NOT NULL,
    t_plan_ns INTEGER NOT NULL, t_send_ns INTEGER, t_headers_ns INTEGER, t_first_ns INTEGER,
    t_first_content_ns INTEGER, t_last_ns INTEGER, t_end_ns INTEGER NOT NULL,
    frames INTEGER NOT NULL, frame_gaps_us BLOB NOT NULL,
    planned_prompt_tokens INTEGER NOT NULL, planned_output_tokens INTEGER NOT NULL,
    prompt_tokens INTEGER, cached_tokens INTEGER, completion_tokens INTEGER,
    finish_reason TEXT, http_status INTEGER, error TEXT, arrival_source TEXT NOT NULL, arrival_lag_us INTEGER);
CREATE TABLE stage (
    name TEXT NOT NULL, offered INTEGER NOT NULL, t_start_ns INTEGER NOT NULL, t_settled_ns INTEGER,
    t_end_ns INTEGER, counted INTEGER NOT NULL,
    PRIMARY KEY (t_start_ns, name)) WITHOUT ROWID;
CREATE TABLE event (
    t_ns INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, target_id INTEGER REFERENCES target);
CREATE TABLE finding (
    t_ns INTEGER NOT NULL, rule TEXT NOT NULL, state TEXT NOT NULL, detail TEXT NOT NULL,
    target_id INTEGER REFERENCES target);
CREATE INDEX request_by_stage ON request (stage);
CREATE INDEX event_by_time ON event (t_ns);
CREATE INDEX finding_by_time ON finding (t_ns);
"""


def _utc(column: str) -> str:
    return f"strftime('%Y-%m-%dT%H:%M:%fZ', {column} / 1e9, 'unixepoch')"


_VIEWS: Final = {
    "v_target_sample": f"""
        SELECT {_utc("t_ns")} AS at, target.name AS target, target_sample.*
        FROM target_sample JOIN target ON target.id = target_id""",
    "v_gpu_sample": f"""
        SELECT {_utc("t_ns")} AS at, target.name AS target, gpu.uuid AS uuid, gpu_sample.*
        FROM gpu_sample JOIN target ON target.id = target_id JOIN gpu ON gpu.id = gpu_id""",
    "v_process_sample": f"""
        SELECT {_utc("t_ns")} AS at, target.name AS target, process.role AS role, process_sample.*
        FROM process_sample JOIN target ON target.id = target_id JOIN process ON process.id = process_id""",
    "v_request": f"""
        SELECT request_id, stage, user, outcome, {_utc("t_plan_ns")} AS planned_at,
            (t_send_ns - t_plan_ns) / 1e9 AS send_lag_seconds,
            (t_first_ns - t_send_ns) / 1e9 AS ttft_seconds,
            (t_first_ns - t_plan_ns) / 1e9 AS ttft_user_seconds,
            CASE WHEN completion_tokens > 1 THEN (t_last_ns - t_first_ns) / 1e9 / (completion_tokens - 1) END
                AS tpot_seconds,
            (t_last_ns - t_send_ns) / 1e9 AS e2e_seconds,
            prompt_tokens, cached_tokens, completion_tokens, finish_reason, http_status, error
        FROM request""",
    "v_stage": f"""
        SELECT name, offered, {_utc("t_start_ns")} AS started_at,
            (t_settled_ns - t_start_ns) / 1e9 AS settling_seconds,
            (t_end_ns - t_settled_ns) / 1e9 AS measured_seconds, counted
        FROM stage ORDER BY t_start_ns""",
    "v_event": f"""
        SELECT {_utc("t_ns")} AS at, target.name AS target, kind, text
        FROM event LEFT JOIN target ON target.id = target_id ORDER BY t_ns""",
    "v_finding": f"""
        SELECT {_utc("t_ns")} AS at, target.name AS target, rule, state, detail
        FROM finding LEFT JOIN target ON target.id = target_id ORDER BY t_ns""",
    # A target's first sample begins an epoch unless a restart before it has begun one already.
    "v_epoch": """
        WITH restart (target_id, t_ns, reason) AS (
            SELECT target.id, event.t_ns, event.text
            FROM event JOIN target ON event.target_id IS NULL OR event.target_id = target.id
            WHERE event.kind = 'restart'
            GROUP BY target.id, event.t_ns),
        first (target_id, t_ns, reason) AS (
            SELECT id, (SELECT min(t_ns) FROM target_sample WHERE target_id = target.id), 'first sample' FROM target),
        began AS (
            SELECT * FROM restart
            UNION ALL
            SELECT * FROM first WHERE t_ns IS NOT NULL AND NOT EXISTS (
                SELECT 1 FROM restart WHERE restart.target_id = first.target_id AND restart.t_ns <= first.t_ns))
        SELECT target.name AS target,
            row_number() OVER (PARTITION BY target_id ORDER BY t_ns) AS number,
            t_ns AS t_start_ns,
            lead(t_ns) OVER (PARTITION BY target_id ORDER BY t_ns) AS t_end_ns, reason
        FROM began JOIN target ON target.id = target_id ORDER BY target.name, t_ns""",
}


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Add the columns of signals that the file does not know yet, and this version's views."""
    for table in _SAMPLE_TABLES:
        known = _columns(connection, table.name)
        for column in table.columns:
            if column not in known:
                connection.execute(f"ALTER TABLE {table.name} ADD COLUMN {column} REAL")
    for name, select in _VIEWS.items():
        connection.execute(f"DROP VIEW IF EXISTS {name}")
        connection.execute(f"CREATE VIEW {name} AS {select}")


def _columns(connection: sqlite3.Connection, table: str) -> frozenset[str]:
    return frozenset(row[1] for row in connection.execute(f"PRAGMA table_info({table})"))


@lru_cache(maxsize=256)
def _insert_sample(table: _SampleTable, columns: tuple[str, ...]) -> str:
    """A tick may arrive in pieces: a later one adds its columns to the row."""
    part = f", (SELECT id FROM {table.part} WHERE {table.part_name} = ?)" if table.part else ""
    return (
        f"INSERT INTO {table.name} ({', '.join((*table.keys, *columns))}) "
        f"VALUES ((SELECT id FROM target WHERE name = ?), ?{part}{', ?' * len(columns)}) "
        f"ON CONFLICT ({', '.join(table.keys)}) DO UPDATE SET "
        + ", ".join(f"{column} = excluded.{column}" for column in columns)
    )


_ADD_TARGET: Final = "INSERT OR IGNORE INTO target (name) VALUES (?)"
_ADD_PART: Final = {
    table.part: f"INSERT OR IGNORE INTO {table.part} ({table.part_name}) VALUES (?)"
    for table in _SAMPLE_TABLES
    if table.part
}
_TARGET_ID: Final = "(SELECT id FROM target WHERE name = ?)"
_INSERT_REQUEST: Final = (
    f"INSERT INTO request ({', '.join(_REQUEST_COLUMNS)}) VALUES ({', '.join('?' * len(_REQUEST_COLUMNS))})"
)
_INSERT_STAGE: Final = (
    "INSERT OR REPLACE INTO stage (name, offered, t_start_ns, t_settled_ns, t_end_ns, counted) "
    "VALUES (?, ?, ?, ?, ?, ?)"
)
_INSERT_EVENT: Final = f"INSERT INTO event (t_ns, kind, text, target_id) VALUES (?, ?, ?, {_TARGET_ID})"
_INSERT_FINDING: Final = f"INSERT INTO finding (t_ns, rule, state, detail, target_id) VALUES (?, ?, ?, ?, {_TARGET_ID})"
_INSERT_MANIFEST: Final = "INSERT OR REPLACE INTO manifest (key, value) VALUES (?, ?)"

_Statement = tuple[str, tuple[Any, ...]]

# What one append can be guilty of, while the file is well: text with half a surrogate pair, a number over 64 bits.
_UNSTORABLE: Final = (
    ValueError,
    OverflowError,
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)


# --- the file ---------------------------------------------------------------------------------------------------------


class SqliteHistory:
    """A history in one SQLite file; a context manager that closes it. Made by `create` or `open`.

    Appends may come from any thread and return at once; what they add is on disk at most half a second later, or after
    `flush`. Reads see everything appended before them, and block while they read.

    A write that fails (the disk is full, say) costs what was buffered, never the program: `error` says what happened
    first and `dropped` how much was lost since. Writing is tried again twice a second.

    Attributes:
        path: the file.
        error: why the first write that failed did; None while all is well.
        dropped: appends that did not reach the file.
    """

    def __init__(
        self, path: Path, reader: sqlite3.Connection, writer: sqlite3.Connection | None, commit_interval_s: float
    ) -> None:
        self.path = path
        self.error: RecordError | None = None
        self.dropped = 0
        self._reader = reader
        self._writer = writer
        self._buffer: list[tuple[_Statement, ...]] = []
        self._read_lock, self._write_lock, self._buffer_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._known = {table.name: _columns(reader, table.name) for table in _SAMPLE_TABLES}
        self._claimed: IO[bytes] | None = None
        self._closing = threading.Event()
        self._committer = threading.Thread(
            target=self._commit_regularly, args=(commit_interval_s,), name="history", daemon=True
        )
        if writer is not None:
            self._committer.start()

    @classmethod
    def create(cls, path: Path, *, commit_interval_s: float = COMMIT_INTERVAL_S) -> Self:
        """Begin a new file, and its folder where that is missing.

        Raises:
            RecordError: the file exists, or cannot be written there.
        """
        if path.exists():
            raise RecordError(f"{path} exists and would be overwritten; name another file, or remove it first")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except OSError as error:
            reason = error.strerror or str(error)
            raise RecordError(f"cannot write {path}: {reason}; name a file in a folder you can write") from error
        try:
            writer = _connect(path, "rw")
            with contextlib.closing(writer), _transaction(writer):
                for statement in _TABLES.split(";"):
                    writer.execute(statement)
                _bring_up_to_date(writer)
                writer.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                writer.execute(f"PRAGMA user_version = {SCHEMA_MAJOR}")
        except sqlite3.Error as error:
            path.unlink(missing_ok=True)
            raise _record_error(path, "write", error) from error
        return cls.open(path, readonly=False, commit_interval_s=commit_interval_s)

    @classmethod
    def open(cls, path: Path, *, readonly: bool = True, commit_interval_s: float = COMMIT_INTERVAL_S) -> Self:
        """Open a file to read it, or with `readonly=False` to go on writing it.

        A file of an older version opens; when it is written, columns for the signals it lacks are added.

        Raises:
            RecordError: there is no such file, it is not one of ours or from a newer Plimsoll, it is damaged, or it
                cannot be written although that was asked.
        """
        if path.is_dir():
            raise RecordError(f"{path} is a folder; name a file in it")
        if not path.is_file():
            raise RecordError(f"there is no file {path}; check the name")
        with contextlib.ExitStack() as opened:
            claim = None if readonly else opened.enter_context(_claim(path))
            try:
                reader = opened.enter_context(contextlib.closing(_connect(path, "ro")))
                _check_ours(path, reader)
                writer = None
                if not readonly:
                    writer = opened.enter_context(contextlib.closing(_connect(path, "rw")))
                    writer.execute("PRAGMA journal_mode = WAL")
                    writer.execute("PRAGMA synchronous = NORMAL")
                    with _transaction(writer):
                        _bring_up_to_date(writer)
                history = cls(path, reader, writer, commit_interval_s)
                history._claimed = claim
            except sqlite3.Error as error:
                raise _record_error(path, "read" if readonly else "write", error) from error
            opened.pop_all()
        return history

    def close(self) -> None:
        """Write what is buffered and leave a single file without a write-ahead log. Harmless when closed already."""
        self._closing.set()
        if self._committer.is_alive():
            self._committer.join()
        if self._writer is not None:
            self.flush()
        with self._read_lock:
            self._reader.close()
        if self._writer is not None:
            with self._write_lock, contextlib.closing(self._writer):
                # Refused while somebody else reads the file; then the log stays beside it, and nothing is lost.
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("PRAGMA busy_timeout = 0")
                    self._writer.execute("PRAGMA journal_mode = DELETE")
                self._writer = None
        if self._claimed is not None:
            self._claimed.close()
            self._claimed = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- writing ---

    def append_tick(
        self,
        target: str,
        t_ns: int,
        values: Mapping[str, float | None],
        gpus: Mapping[str, Mapping[str, float | None]] | None = None,
        processes: Mapping[str, Mapping[str, float | None]] | None = None,
        histograms: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Add what was sampled of one target at one moment; what is None or not finite was not measured.

        Args:
            target: its name, the same throughout the file.
            t_ns: when.
            values: signals of scope target.
            gpus: for each GPU uuid, signals of scope GPU.
            processes: for each process role, signals of scope process.
            histograms: for each histogram signal, the sum and the count of its observations.

        Raises:
            ConfigError: a name is not a signal of that scope.
            RecordError: the history is closed or read-only.
        """
        whole = dict(values)
        for name, (total, count) in (histograms or {}).items():
            whole[f"{name}_sum"], whole[f"{name}_count"] = total, count
        statements: list[_Statement] = [(_ADD_TARGET, (target,))]
        statements += _sample_statements(_TABLE_OF[Scope.TARGET], (target, t_ns), whole)
        for scope, parts in ((Scope.GPU, gpus), (Scope.PROCESS, processes)):
            table = _TABLE_OF[scope]
            for name, measured in (parts or {}).items():
                statements.append((_ADD_PART[table.part], (name,)))
                statements += _sample_statements(table, (target, t_ns, name), measured)
        self._append(*statements)

    def append_request(self, record: RequestRecord) -> None:
        """Add a finished request."""
        row = [getattr(record, column) for column in _REQUEST_COLUMNS]
        row[_REQUEST_COLUMNS.index("outcome")] = record.outcome.value
        row[_REQUEST_COLUMNS.index("frame_gaps_us")] = _pack_gaps(record.frame_gaps_us)
        self._append((_INSERT_REQUEST, tuple(row)))

    def append_stage(self, stage: Stage) -> None:
        """Add a stage, or what is now known of one that was added before: same name and start."""
        row = (stage.name, stage.offered, stage.t_start_ns, stage.t_settled_ns, stage.t_end_ns, stage.counted)
        self._append((_INSERT_STAGE, row))

    def append_event(self, event: Event, target: str | None = None) -> None:
        """Add an event, of one target or of all. The kind `restart` begins an epoch."""
        self._append(*_adding(target), (_INSERT_EVENT, (event.t_ns, event.kind, event.text, target)))

    def append_finding(
        self, t_ns: int, rule: str, state: str, detail: Mapping[str, Any], target: str | None = None
    ) -> None:
        """Add what a rule or detector said. `detail` must be JSON without NaN or Infinity, else ValueError."""
        encoded = json.dumps(dict(detail), allow_nan=False)
        self._append(*_adding(target), (_INSERT_FINDING, (t_ns, rule, state, encoded, target)))

    def set_manifest(self, entries: Mapping[str, Any]) -> None:
        """Set entries of the manifest, leaving others as they are. Values must be JSON without NaN or Infinity."""
        rows = [(key, json.dumps(value, allow_nan=False)) for key, value in entries.items()]
        self._append(*((_INSERT_MANIFEST, row) for row in rows))

    def flush(self) -> None:
        """Commit what is buffered, in this thread. A failure is kept in `error`, not raised."""
        with self._write_lock:
            writer = self._writer
            if writer is None or not self._buffer:
                return
            taken: list[tuple[_Statement, ...]] = []
            try:
                with _transaction(writer):
                    taken = self._take_buffer()
                    for statements in taken:
                        try:
                            for sql, row in statements:
                                writer.execute(sql, row)
                        except _UNSTORABLE as error:
                            self._lose(1, error)
            except sqlite3.Error as error:
                self._lose(len(taken or self._take_buffer()), error)
            except BaseException:  # Ctrl-C in the middle: nothing was committed, so nothing may be forgotten
                with self._buffer_lock:
                    self._buffer[:0] = taken
                raise

    def _lose(self, appends: int, error: Exception) -> None:
        self.dropped += appends
        self.error = self.error or _record_error(self.path, "write", error)

    def _append(self, *statements: _Statement) -> None:
        if self._writer is None:
            raise RecordError(f"cannot add to {self.path}: it is closed, or was opened read-only")
        with self._buffer_lock:
            self._buffer.append(statements)

    def _take_buffer(self) -> list[tuple[_Statement, ...]]:
        with self._buffer_lock:
            taken, self._buffer = self._buffer, []
        return taken

    def _commit_regularly(self, interval_s: float) -> None:
        while not self._closing.wait(interval_s):
            self.flush()

    # --- reading ---

    def series(
        self,
        signal: str,
        since_ns: int | None = None,
        until_ns: int | None = None,
        *,
        target: str | None = None,
        labels: Mapping[str, str] | None = None,
        epoch: Epoch | None = None,
    ) -> list[Series]:
        """As `History.series`."""
        table = _HOME_OF.get(signal)
        if table is None:
            hint = f"; ask for {signal}_sum or {signal}_count" if signal in _HISTOGRAMS else ""
            raise ConfigError(f"{signal!r} is not a signal{hint}")
        if signal not in self._known[table.name]:
            return []  # the file is older than the signal
        wanted = dict(labels or {})
        part, among = wanted.pop(table.label, None), {wanted.pop("target", None), target} - {None}
        first_ns, end_ns = since_ns, None
        if epoch is not None:
            among.add(epoch.target)
            first_ns, end_ns = max(epoch.t_start_ns, since_ns or 0), epoch.t_end_ns
        if wanted or len(among) > 1:
            return []
        bounds = {"t_ns >= ?": first_ns, "t_ns <= ?": until_ns, "t_ns < ?": end_ns, f"{table.part_name} = ?": part}
        bounds = {clause: value for clause, value in bounds.items() if value is not None}
        select = (
            f"SELECT {table.part_name or 'NULL'}, t_ns, {signal} FROM {table.name} "
            + (f"JOIN {table.part} ON {table.part}.id = {table.part}_id " if table.part else "")
            + f"WHERE target_id = ? AND {signal} IS NOT NULL"
            + "".join(f" AND {clause}" for clause in bounds)
            + " ORDER BY t_ns"
        )
        found = []
        for target_id, name in self._read("SELECT id, name FROM target ORDER BY name"):
            if among and name not in among:
                continue
            points: dict[str, list[tuple[int, float]]] = {}
            for part_name, t_ns, value in self._read(select, target_id, *bounds.values()):
                points.setdefault(part_name, []).append((t_ns, value))
            for part_name in sorted(points, key=str):
                times, values = zip(*points[part_name], strict=True)
                of_target = () if target is not None else (("target", name),)
                of_part = ((table.label, part_name),) if table.part else ()
                found.append(Series(signal, times, values, of_target + of_part))
        return found

    def requests(self, stage: str | None = None) -> list[RequestRecord]:
        """The requests, of one stage or of all, in the order in which they were added."""
        columns = ", ".join(_REQUEST_COLUMNS)
        where = "" if stage is None else " WHERE stage = ?"
        rows = self._read(
            f"SELECT {columns} FROM request{where} ORDER BY rowid",
            *(() if stage is None else (stage,)),
        )
        records = []
        for row in rows:
            entry = dict(zip(_REQUEST_COLUMNS, row, strict=True))
            try:
                entry["outcome"] = Outcome(entry["outcome"])
                entry["frame_gaps_us"] = _unpack_gaps(entry["frame_gaps_us"])
            except (ValueError, struct.error) as error:
                raise RecordError(f"{self.path}: request {entry['request_id']} cannot be read: {error}") from error
            records.append(RequestRecord(**entry))
        return records

    def stages(self) -> list[Stage]:
        """The stages in time order."""
        rows = self._read(
            "SELECT name, offered, t_start_ns, t_settled_ns, t_end_ns, counted FROM stage ORDER BY t_start_ns, name"
        )
        return [
            Stage(name, offered, start_ns, settled_ns, end_ns, counted=bool(counted))
            for name, offered, start_ns, settled_ns, end_ns, counted in rows
        ]

    def events(
        self, since_ns: int | None = None, until_ns: int | None = None, *, target: str | None = None
    ) -> list[Event]:
        """As `History.events`."""
        return [Event(*row) for row in self._read_timed("event", "t_ns, kind, text", since_ns, until_ns, target)]

    def findings(
        self, since_ns: int | None = None, until_ns: int | None = None, *, target: str | None = None
    ) -> list[StoredFinding]:
        """What rules and detectors said, in time order; with `target`, of this target and of no particular one."""
        columns = "t_ns, rule, state, detail, (SELECT name FROM target WHERE id = target_id)"
        found = []
        for t_ns, rule, state, detail, name in self._read_timed("finding", columns, since_ns, until_ns, target):
            found.append(StoredFinding(t_ns, rule, state, self._decoded(detail), name))
        return found

    def epochs(self, target: str | None = None) -> list[Epoch]:
        """As `History.epochs`."""
        rows = self._read("SELECT target, number, t_start_ns, t_end_ns, reason FROM v_epoch")
        return [Epoch(*row) for row in rows if target in (None, row[0])]

    def targets(self) -> list[str]:
        """The names of all targets, sorted."""
        return [name for (name,) in self._read("SELECT name FROM target ORDER BY name")]

    def manifest(self) -> dict[str, Any]:
        """What was set about the run as a whole, by key."""
        rows = self._read("SELECT key, value FROM manifest ORDER BY key")
        return {key: self._decoded(value) for key, value in rows}

    def past(self, target: str) -> "TargetPast":
        """What was recorded of one target, for rules and detectors."""
        return TargetPast(self, target)

    def _read(self, sql: str, *row: Any) -> list[tuple[Any, ...]]:
        self.flush()
        with self._read_lock:
            try:
                return self._reader.execute(sql, row).fetchall()
            except sqlite3.Error as error:
                raise _record_error(self.path, "read", error) from error

    def _read_timed(
        self, table: str, columns: str, since_ns: int | None, until_ns: int | None, target: str | None
    ) -> list[tuple[Any, ...]]:
        clauses = {
            "t_ns >= ?": since_ns,
            "t_ns <= ?": until_ns,
            f"(target_id IS NULL OR target_id = {_TARGET_ID})": target,
        }
        clauses = {clause: value for clause, value in clauses.items() if value is not None}
        where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
        return self._read(f"SELECT {columns} FROM {table}{where} ORDER BY t_ns, rowid", *clauses.values())

    def _decoded(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise RecordError(f"{self.path} is damaged: {text[:60]!r} is not JSON") from error


class TargetPast:
    """One target's past, with the ends of every stretch inside it: what rules and detectors ask for."""

    def __init__(self, history: History, target: str) -> None:
        self._history = history
        self._target = target

    def series(self, signal: str, start_ns: int, end_ns: int) -> Sequence[Series]:
        """The series of `signal` with points in `start_ns <= t_ns <= end_ns`: one per GPU or process, else one."""
        return self._history.series(signal, start_ns, end_ns, target=self._target)

    def events(self, start_ns: int, end_ns: int) -> Sequence[Event]:
        """Events with `start_ns <= t_ns <= end_ns`, in time order."""
        return self._history.events(start_ns, end_ns, target=self._target)

    def epoch_start_ns(self, t_ns: int) -> int | None:
        """The last restart at or before `t_ns`, else the first sample at or before it; None when there is neither."""
        starts = [epoch.t_start_ns for epoch in self._history.epochs(self._target) if epoch.t_start_ns <= t_ns]
        return starts[-1] if starts else None


# --- pieces -----------------------------------------------------------------------------------------------------------


def _sample_statements(
    table: _SampleTable, key: tuple[str | int, ...], measured: Mapping[str, float | None]
) -> Iterator[_Statement]:
    for name in measured:
        if _HOME_OF.get(name) is not table:
            raise ConfigError(
                f"{name!r} is not a signal of scope {table.scope.value}, or is a histogram given as a value"
            )
    row = {name: float(value) for name, value in measured.items() if value is not None and math.isfinite(value)}
    if row:
        yield _insert_sample(table, tuple(row)), (*key, *row.values())


def _adding(target: str | None) -> list[_Statement]:
    return [] if target is None else [(_ADD_TARGET, (target,))]


def _pack_gaps(gaps_us: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(gaps_us)}I", *(min(max(gap, 0), 2**32 - 1) for gap in gaps_us))


def _unpack_gaps(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                connection.execute("ROLLBACK")


def _claim(path: Path) -> IO[bytes]:
    """The sole right to write the file, held as long as the handle is open; two writers would tell one past wrongly.

    Released by the system when the process ends, however that happens. The handle must outlive all connections:
    closing any handle of a file drops the locks that SQLite holds on it in this process.
    """
    try:
        handle = path.open("rb")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise RecordError(f"another Plimsoll process writes {path}; end it, or name another file") from error
    return handle


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # Threads share a connection, each under a lock of ours.
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None, check_same_thread=False)


def _check_ours(path: Path, connection: sqlite3.Connection) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (major,) = connection.execute("PRAGMA user_version").fetchone()
    if application_id != APPLICATION_ID:
        raise RecordError(
            f"{path} is not a Plimsoll file; name one that `plimsoll stress --out` or a watch has written"
        )
    if major != SCHEMA_MAJOR:
        raise RecordError(
            f"{path} was written by {'a newer' if major > SCHEMA_MAJOR else 'another'} Plimsoll (layout {major}, this "
            f"one reads {SCHEMA_MAJOR}); read it with that version"
        )


_ADVICE: Final = {
    "SQLITE_FULL": "the disk is full: free some space, or name a file on another disk",
    "SQLITE_IOERR": "the disk does not take or give data: check its space, its quota and the kernel's log",
    "SQLITE_READONLY": "the file or its folder is read-only: copy it to a folder you can write",
    "SQLITE_CANTOPEN": "it cannot be opened: check that you may read it, and write to its folder",
    "SQLITE_PERM": "you may not open it: check its permissions",
    "SQLITE_BUSY": "another program holds it: close that, then try again",
    "SQLITE_NOTADB": "it is not a Plimsoll file: name one that `plimsoll stress --out` or a watch has written",
    "SQLITE_CORRUPT": "it is damaged or cut short: copy it again from where it was written, together with a -wal file "
    "beside it; sqlite3's .recover extracts what is left",
}


def _record_error(path: Path, verb: str, error: Exception) -> RecordError:
    # SQLITE_IOERR_WRITE is a kind of SQLITE_IOERR.
    kind = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
    return RecordError(f"cannot {verb} {path}: {_ADVICE.get(kind, str(error))}")
