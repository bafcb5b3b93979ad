"""What a simulated server leaks, really held: host memory, file descriptors and files in /dev/shm.

So that whoever reads /proc sees the leak that the faults describe, and not only the engine's own figures of it. What is
held is bounded, and given back when the process that leaked it restarts, or ends.
"""

import mmap
import os
import resource
import shutil
import tempfile
from pathlib import Path

__all__ = ["Ballast"]

_PIECE_BYTES = 2**20
_MOST = 2**62
_PIECES_AT_ONCE = 4
"""Touching a MiB takes half a millisecond, more where the host is short, and the clock must not stand still for it."""
_DESCRIPTORS_LEFT = 256
"""So many below the process's limit are left for connections."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - that this is where it goes is what is simulated


class Ballast:
    """Holds as much as `follow` was last told, a little at a time.

    Args:
        limit_bytes: at most this much in memory and shared memory together.
        folder: where shared memory is.
    """

    def __init__(self, limit_bytes: int = 2 * 2**30, *, folder: Path = _SHARED_MEMORY) -> None:
        self.limit_bytes = limit_bytes
        self.is_short = False
        """Whether less is held than was asked for, because of the limit or of what the host has."""
        self._parent = folder
        self._pieces: list[mmap.mmap] = []
        self._descriptors: list[int] = []
        self._folder: Path | None = None
        self._files = 0

    @property
    def memory_bytes(self) -> int:
        """Anonymous memory held."""
        return len(self._pieces) * _PIECE_BYTES

    @property
    def shared_bytes(self) -> int:
        """Held in files under /dev/shm."""
        return self._files * _PIECE_BYTES

    @property
    def descriptors(self) -> int:
        """File descriptors held."""
        return len(self._descriptors)

    def follow(self, *, memory_bytes: float, descriptors: float, shared_bytes: float) -> bool:
        """Hold that much, rounded down; True when another call would bring it closer."""
        # A leak that is fast enough is infinite.
        memory, shared, opened = (int(min(amount, _MOST)) for amount in (memory_bytes, shared_bytes, descriptors))
        room = self.limit_bytes // _PIECE_BYTES
        files = min(shared // _PIECE_BYTES, room)
        pieces = min(memory // _PIECE_BYTES, room - files)
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _DESCRIPTORS_LEFT
        handles = min(opened, max(0, allowed))
        self.is_short = files + pieces < memory // _PIECE_BYTES + shared // _PIECE_BYTES or handles < opened
        while len(self._pieces) > pieces:
            self._pieces.pop().close()
        while len(self._descriptors) > handles:
            os.close(self._descriptors.pop())
        while self._files > files:
            self._files -= 1
            self._file(self._files).unlink(missing_ok=True)
        try:
            self._grow(pieces, handles, files)
        except OSError:
            # The host has no more of it: a leak that has come to its natural end.
            self.is_short = True
            return False
        return len(self._pieces) < pieces or self._files < files

    def release(self) -> None:
        """Give everything back."""
        self.follow(memory_bytes=0, descriptors=0, shared_bytes=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _grow(self, pieces: int, handles: int, files: int) -> None:
        for _ in range(min(pieces - len(self._pieces), _PIECES_AT_ONCE)):
            piece = mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            piece[:: mmap.PAGESIZE] = b"\1" * (_PIECE_BYTES // mmap.PAGESIZE)
            self._pieces.append(piece)
        while len(self._descriptors) < handles:
            self._descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(min(files - self._files, _PIECES_AT_ONCE)):
            self._file(self._files).write_bytes(b"\1" * _PIECE_BYTES)
            self._files += 1

    def _file(self, number: int) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="plimsoll-simulator-", dir=self._parent))
        return self._folder / f"leaked-{number}"
