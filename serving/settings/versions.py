"""What a serving file said before: versions beside it, replaced all at once, and put back to the byte.

    hy3-serving.yaml
    hy3-serving.yaml.plimsoll/
        0001-5f3a0c1e9b2d.yaml     a version: number, first digits of its SHA-256, the file as it was
        0002-77d0e41c8a90.yaml
        uses.jsonl                 when and why each was stored or stored again

A file is replaced by writing a new one beside it, forcing that to the disk and renaming it: whenever the process or the
machine stops, the old content or the new is there, whole. Writers hold a lock on the folder, so a second one is refused
and not mixed in. A version is never changed or removed; a version that no longer has its hash is refused.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from serving.errors import ConfigError, RecordError
from serving.settings.keys import Scalar, Settings, parse_settings
from serving.strict_yaml import MAX_BYTES

__all__ = [
    "Backup",
    "Difference",
    "Use",
    "apply",
    "backup",
    "diff",
    "locked",
    "read_bytes",
    "replace_bytes",
    "restore",
    "stored_settings",
    "versions",
]

_FOLDER_SUFFIX: Final = ".plimsoll"
_USES: Final = "uses.jsonl"
_FRESH: Final = ".plimsoll-new-"
"""How the name of a file begins that is still being written."""
_SHORT: Final = 12
_VERSION_NAME: Final = re.compile(rf"(\d{{4,9}})-([0-9a-f]{{{_SHORT}}})\.yaml")
_NEW_FILE_MODE: Final = 0o644
_NO_LOCKS: Final = frozenset({errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class Use:
    """One time at which a version was stored or found stored: `at` in UTC as ISO 8601, and why."""

    at: str
    reason: str


@dataclass(frozen=True, slots=True)
class Backup:
    """A stored version of a serving file.

    Attributes:
        version: its number, from 1.
        sha256: hash of its content.
        path: the stored copy.
        size_bytes: its size.
        uses: when and why it was stored, oldest first.
    """

    version: int
    sha256: str
    path: str
    size_bytes: int
    uses: tuple[Use, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Whether it still has the hash that its name tells."""
        return Path(self.path).name.endswith(f"-{self.sha256[:_SHORT]}.yaml")


@dataclass(frozen=True, slots=True)
class Difference:
    """A canonical key whose value differs; None where a side does not have it, lines from 1."""

    key: str
    was: Scalar | None
    now: Scalar | None
    was_line: int | None
    now_line: int | None


def diff(was: Settings, now: Settings) -> tuple[Difference, ...]:
    """What two serving files say differently, whatever their spelling, order and comments."""
    old, new = (_flat(settings) for settings in (was, now))
    return tuple(
        Difference(key, old.get(key), new.get(key), was.lines.get(key), now.lines.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    )


def _flat(settings: Settings) -> dict[str, Scalar]:
    return settings.values() | {f"derived_from.{key}": value for key, value in settings.derived_from.items()}


# ---- versions


def backup(path: str | Path, *, reason: str = "", at: datetime | None = None) -> Backup:
    """Store what a file says now; what is stored already is not stored twice, but this use of it is noted.

    Args:
        path: the file; a link is followed, and versions are beside its target.
        reason: why, in a few words.
        at: the time to note; None takes the clock's.

    Raises:
        ConfigError: the file cannot be read.
        RecordError: the version cannot be written, or another process is writing.
    """
    target = _target(Path(path))
    with locked(target):
        return _store(target, read_bytes(target), reason, at)


def versions(path: str | Path) -> tuple[Backup, ...]:
    """The stored versions of a file, oldest first.

    Raises:
        RecordError: their folder cannot be read.
    """
    folder = _folder(_target(Path(path)))
    uses = _uses(folder)
    found = []
    with _disk(folder, "read"):
        for place in folder.iterdir() if folder.is_dir() else ():
            match = _VERSION_NAME.fullmatch(place.name)
            if match is not None:
                content = place.read_bytes()
                number, digest = int(match[1]), hashlib.sha256(content).hexdigest()
                found.append(Backup(number, digest, str(place), len(content), uses.get((number, match[2]), ())))
    return tuple(sorted(found, key=lambda one: one.version))


def stored_settings(path: str | Path, version: int) -> Settings:
    """A stored version, read; its path is that of the stored copy.

    Raises:
        ConfigError: there is no such version, or it is no serving file.
        RecordError: it was changed since it was stored.
    """
    one, content = _load(_target(Path(path)), version)
    return parse_settings(content, one.path)


def restore(path: str | Path, version: int, *, reason: str = "", at: datetime | None = None) -> Backup:
    """Put a stored version back in the file's place, to the byte; what the file says now is stored first.

    Args:
        path: the file, which may be gone.
        version: the number of the version.
        reason: why, noted with the version that is replaced.
        at: the time to note; None takes the clock's.

    Returns:
        The version that was put back.

    Raises:
        ConfigError: there is no such version.
        RecordError: the version was changed since it was stored, or the file cannot be written.
    """
    target = _target(Path(path))
    with locked(target):
        one, content = _load(target, version)
        if target.exists():
            _store(target, read_bytes(target), reason or f"before version {version} was restored", at)
        replace_bytes(target, content)
    return one


def apply(path: str | Path, text: str | bytes) -> Settings:
    """Put a new content in the file's place, all at once.

    Args:
        path: the file; a link is followed. It keeps its mode, and its owner where that is allowed.
        text: the new content.

    Returns:
        The file as it now reads.

    Raises:
        ConfigError: the content is no serving file; nothing was changed.
        RecordError: the file cannot be written, or another process is writing; nothing was changed.
    """
    raw = text.encode() if isinstance(text, str) else text
    settings = parse_settings(raw, path)
    with locked(Path(path)):
        replace_bytes(Path(path), raw)
    return settings


def _load(target: Path, version: int) -> tuple[Backup, bytes]:
    stored = versions(target)
    found = [one for one in stored if one.version == version]
    if len(found) > 1:
        # As after a merge of two branches that each stored one.
        names = ", ".join(Path(one.path).name for one in found)
        raise RecordError(
            f"{target}: {len(found)} stored versions have the number {version} ({names}); rename all but one"
        )
    for one in found:
        content = read_bytes(Path(one.path))
        if hashlib.sha256(content).hexdigest() != one.sha256 or not one.is_intact:
            raise RecordError(f"{one.path}: was changed since it was stored; its name is no longer its hash")
        return one, content
    known = ", ".join(str(one.version) for one in stored) or "none; `plimsoll settings backup` stores one"
    raise ConfigError(f"{target}: has no stored version {version}; stored: {known}")


def _store(target: Path, content: bytes, reason: str, at: datetime | None) -> Backup:
    folder = _folder(target)
    digest = hashlib.sha256(content).hexdigest()
    stored = versions(target)
    same = next((one for one in reversed(stored) if one.sha256 == digest and one.is_intact), None)
    with _disk(folder, "written"):
        if not folder.is_dir():
            folder.mkdir()
            _force_folder(folder.parent)
        if same is None:
            number = stored[-1].version + 1 if stored else 1
            place = folder / f"{number:04}-{digest[:_SHORT]}.yaml"
            _write_whole(place, content, stat.S_IMODE(target.stat().st_mode))
            same = Backup(number, digest, str(place), len(content))
        use = Use((at or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds"), _one_line(reason))
        _note(folder, same.version, digest, use)
    return Backup(same.version, digest, same.path, len(content), (*same.uses, use))


def _note(folder: Path, version: int, digest: str, use: Use) -> None:
    line = json.dumps({"version": version, "sha256": digest, "at": use.at, "reason": use.reason}, ensure_ascii=False)
    book = os.open(folder / _USES, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _NEW_FILE_MODE)
    try:
        size = os.fstat(book).st_size
        # A line that a crash cut short stays alone, and this one begins anew.
        torn = size and os.pread(book, 1, size - 1) != b"\n"
        _write_all(book, (b"\n" if torn else b"") + line.encode("utf-8", "replace") + b"\n")
        os.fsync(book)
    finally:
        os.close(book)


def _uses(folder: Path) -> dict[tuple[int, str], tuple[Use, ...]]:
    """By number and first digits of the hash: numbers alone may come twice after a merge."""
    try:
        raw = (folder / _USES).read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecordError(f"{folder / _USES}: cannot be read: {error.strerror or error}") from error
    found: dict[tuple[int, str], tuple[Use, ...]] = {}
    for line in raw.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            said: Any = json.loads(line)
            key = (said["version"], str(said["sha256"])[:_SHORT])
            found[key] = (*found.get(key, ()), Use(str(said["at"]), str(said["reason"])))
    return found


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


# ---- the disk


def read_bytes(path: Path) -> bytes:
    """The content of a settings file.

    Raises:
        ConfigError: it cannot be read, or is too large to be one.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB; this is no file of settings")
    return content


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only writer of settings in the folder of `path`.

    Raises:
        RecordError: another process is.
    """
    folder = _target(path).parent
    with _disk(folder, "written"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(
                f"{path}: another process is writing settings in {folder} at this moment; wait for it and try again"
            ) from None
        except OSError as error:
            # A file system that cannot lock a folder, as some on a network: a file is replaced whole all the same.
            if error.errno not in _NO_LOCKS:
                raise RecordError(f"{folder}: cannot be locked: {error.strerror or error}") from error
        yield
    finally:
        os.close(handle)


def replace_bytes(path: Path, content: bytes) -> None:
    """Put `content` in the place of a file, under the lock of its folder.

    Raises:
        RecordError: it cannot be written; the file is as it was, or whole as asked where only the folder could not be
            forced to the disk.
    """
    target = _target(path)
    with _disk(target, "written"):
        try:
            old: os.stat_result | None = target.stat()
        except FileNotFoundError:
            old = None
        if old is not None and not stat.S_ISREG(old.st_mode):
            raise RecordError(f"{target}: is no regular file; name the file itself")
        _write_whole(target, content, stat.S_IMODE(old.st_mode) if old else _NEW_FILE_MODE, old)


def _write_whole(target: Path, content: bytes, mode: int, owner: os.stat_result | None = None) -> None:
    """Write beside, force to the disk, rename, force the folder."""
    for place in target.parent.iterdir():
        # What a writer that died left: whoever holds the lock is the only one that lives.
        if place.name.startswith(_FRESH):
            place.unlink()
    fresh = target.with_name(f"{_FRESH}{os.getpid()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write_all(handle, content)
            if owner is not None and (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                # Only root may give files away; then the file is the writer's.
                with contextlib.suppress(PermissionError):
                    os.fchown(handle, owner.st_uid, owner.st_gid)
            os.fchmod(handle, mode)
            os.fsync(handle)
        finally:
            os.close(handle)
        fresh.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    _force_folder(target.parent)


def _write_all(handle: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]


def _force_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _target(path: Path) -> Path:
    """Where a link leads, so that the link stays one."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be followed: {error}") from error


def _folder(target: Path) -> Path:
    return target.with_name(target.name + _FOLDER_SUFFIX)


@contextlib.contextmanager
def _disk(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"{error.filename or path}: cannot be {what}: {error.strerror or error}") from error
