"""The journal of an experiment: what it is about to do, on the disk before it does it.

`hy3-serving.yaml` has it in `hy3-serving.experiment.jsonl`, one line of JSON a step, as long as the experiment lasts.
Whoever writes it holds a lock on it; a journal that nobody holds is of an experiment that was killed, and its last
whole line says at which step. Only its owner can read the file: the restart command in it may be no one else's affair.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from plimsoll.trial import State
from serving.errors import ConfigError, RecordError

__all__ = ["RESTARTS", "Journal", "Page", "journal_path", "refuse_unfinished"]

SCHEMA: Final = "plimsoll.experiment-journal/1"
RESTARTS: Final = "restart"
"""The kind of a plan that changes nothing: its journal only keeps others away."""
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Page:
    """What a journal says: the plan of its first line, and the last state with its notes; None before the first."""

    plan: Mapping[str, Any]
    state: State | None
    notes: Mapping[str, Any]


def journal_path(settings: Path) -> Path:
    """The journal of a settings file, which has one, by whatever links it is named."""
    file = settings.resolve() if settings.is_symlink() else settings
    return file.with_name(f"{file.stem}.experiment.jsonl")


def refuse_unfinished(settings: Path) -> None:
    """Raise when an experiment on this file is running or was left unfinished.

    Raises:
        ConfigError: it is; the message says what to do.
    """
    path = journal_path(settings)
    if path.exists():
        raise ConfigError(
            f"{path}: an experiment on {settings} runs, or was killed before its end; if none runs, bring the old "
            f"settings back first: `plimsoll experiment recover {settings}`"
        )


class Journal:
    """An open, locked journal; a context manager that lets go of it. `finish` removes it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._last: State | None = None

    @classmethod
    def create(cls, settings: Path, plan: Mapping[str, Any]) -> Self:
        """Begin a journal.

        Args:
            settings: the settings file that the experiment is about.
            plan: what does not change: all that recovery needs.

        Raises:
            ConfigError: there is one already.
            RecordError: it cannot be written.
        """
        refuse_unfinished(settings)
        path = journal_path(settings)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            refuse_unfinished(settings)
            raise
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error
        journal = cls(path, descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{path}: was taken by a recovery that began at this moment; try again") from None
            journal._append({"schema": SCHEMA, "plan": dict(plan)})
            journal._force_folder()
        except BaseException:
            journal.finish()
            raise
        return journal

    @classmethod
    def reopen(cls, settings: Path) -> tuple[Self, Page]:
        """Take over the journal that a killed experiment left.

        Raises:
            ConfigError: there is none, it is in use, or it cannot be read.
        """
        path = journal_path(settings)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ConfigError(f"{settings}: no unfinished experiment; there is nothing to recover") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror or error}") from error
        journal = cls(path, descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{path}: the experiment is running; stop it with Ctrl-C, which rolls back") from None
            return journal, journal._read()
        except BaseException:
            journal.close()
            raise

    def write(self, state: State, notes: Mapping[str, Any]) -> None:
        """Write down what is about to be done, and force it to the disk.

        Raises:
            RecordError: it cannot be written.
        """
        self._append({"state": state.document(), "notes": dict(notes)})
        self._last = state

    def note(self, notes: Mapping[str, Any]) -> None:
        """Write down new notes in the middle of a step.

        Raises:
            RecordError: they cannot be written.
        """
        if self._last is not None:
            self.write(self._last, notes)

    def finish(self) -> None:
        """The experiment is over: remove the journal."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self._force_folder()
        self.close()

    def close(self) -> None:
        """Let go of the journal and leave it where it is. Harmless when done already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, document: Mapping[str, Any]) -> None:
        line = json.dumps(document, allow_nan=False).encode() + b"\n"
        try:
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(self._descriptor, line) < len(line):
                os.ftruncate(self._descriptor, size)
                raise RecordError(f"{self.path}: could not be written whole: is the disk full?")
            os.fsync(self._descriptor)
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _read(self) -> Page:
        raw = os.pread(self._descriptor, _MAX_BYTES, 0)
        lines = []
        for line in raw.split(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):  # torn by the crash: the step had not begun
                document = json.loads(line)
                if isinstance(document, dict):
                    lines.append(document)
        if not lines or lines[0].get("schema") != SCHEMA:
            if raw.count(b"\n") == 0:
                # Killed while it wrote its first line, before anything was done.
                return Page({}, None, {})
            raise ConfigError(f"{self.path}: not a journal of this Plimsoll; look at it, and remove it by hand")
        plan = lines[0].get("plan")
        try:
            states = [(State.from_document(line["state"]), line["notes"]) for line in lines[1:] if "state" in line]
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.path}: cannot be understood ({error}); look at it, and remove it by hand"
            ) from None
        state, notes = states[-1] if states else (None, {})
        return Page(plan if isinstance(plan, dict) else {}, state, notes)

    def _force_folder(self) -> None:
        folder = os.open(self.path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
