"""Restarting a server by a command of the user's, and knowing when the new one serves.

That something answers proves nothing: it may be the old server that has not gone yet. A server is new when another
process listens, when the server says so itself, or when the port was seen closed in between. Where neither process nor
server can be told apart, as behind a forwarder, a start in the new part of the log has to do, if it did not fail. While
a socket of the old server still listens beside one of the new, nothing that answers is known to be the new one.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import aiohttp

from monitor.http import API_KEY_VARIABLE, BaseUrl, converse
from monitor.process import ServerProcesses
from monitor.sampler import Sampler, Tick, find_restart, target_reader
from serving.clock import NS, Clock
from serving.diagnosis import Diagnosis, Failure, diagnose
from serving.diagnosis import State as LogState
from serving.diagnosis.redaction import presentable
from serving.engines import ENGINES, TargetFacts, probe
from serving.errors import ConfigError, TargetError
from serving.smoke import smoke
from serving.startup import StartupFacts, read_startup

__all__ = [
    "Before",
    "LogMark",
    "RunningCommand",
    "listening_sockets",
    "look",
    "look_before",
    "redact",
    "run_restart",
    "wait_until_new",
]

_TAIL_BYTES: Final = 4096
_POLL_SECONDS: Final = 0.5
_DEATH_SECONDS: Final = 3.0
"""A log that says that the server died, and has not grown for so long since, is believed before the time is up."""
_KILL_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 5.0
_LOCAL_ADDRESSES: Final = frozenset(
    {"00000000", "0100007F", "0" * 32, "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
)
"""The wildcard and loopback addresses as `net/tcp` and `net/tcp6` of proc(5) write them on a little-endian machine."""
_REASON_LENGTH: Final = 300
_OF_MEMORY: Final = frozenset(
    {
        *(Failure.WEIGHTS_OUT_OF_MEMORY, Failure.KV_CACHE_UNALLOCATED, Failure.KV_CACHE_BELOW_REQUEST),
        *(Failure.WARM_UP, Failure.RUNTIME_OUT_OF_MEMORY, Failure.KV_CACHE_EXHAUSTED),
    }
)


def redact(text: str) -> str:
    """The text without the API key, should a command or server repeat it."""
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    return text.replace(key, "***") if key else text


# ---- the log


@dataclass(frozen=True, slots=True)
class LogMark:
    """The end of a log at a moment; what comes later is new, also when the file was begun anew since.

    Attributes:
        path: the log.
        inode: of the file; None when there was none.
        size_bytes: its length then.
        tail: hash of its last bytes then, so that a file that was overwritten and has grown past its old length shows.
    """

    path: Path
    inode: int | None
    size_bytes: int
    tail: str

    @classmethod
    def now(cls, path: Path) -> "LogMark":
        """The end of a log as of now.

        Raises:
            ConfigError: it is there and cannot be read.
        """
        try:
            with path.open("rb") as log:
                status = os.fstat(log.fileno())
                return cls(path, status.st_ino, status.st_size, _tail(log, status.st_size))
        except FileNotFoundError:
            return cls(path, None, 0, "")
        except OSError as error:
            raise ConfigError(f"--log {path}: cannot be read: {error.strerror or error}") from error

    @contextlib.contextmanager
    def open_new(self) -> Iterator[BinaryIO]:
        """The log, placed where the new part begins."""
        with self.path.open("rb") as log:
            status = os.fstat(log.fileno())
            same = (
                self.inode == status.st_ino
                and status.st_size >= self.size_bytes
                and _tail(log, self.size_bytes) == self.tail
            )
            log.seek(self.size_bytes if same else 0)
            yield log

    def facts(self, engine: str | None) -> StartupFacts:
        """What the new part says of the last start in it; nothing while there is no log."""
        try:
            with self.open_new() as log:
                return read_startup(log, None if engine is None else ENGINES[engine])
        except OSError:  # not there yet, or no more
            return StartupFacts()

    def death(self, engine: str | None) -> str | None:
        """Why the server in the new part is dead, in a sentence; None when it is not, or nothing tells."""
        found = self._diagnosis(engine)
        return None if found is None else redact(f"{found.title}: {found.cause}")

    def died_of_memory(self, engine: str | None) -> bool:
        """Whether the server in the new part died for want of memory."""
        found = self._diagnosis(engine)
        return found is not None and found.failure in _OF_MEMORY

    def _diagnosis(self, engine: str | None) -> Diagnosis | None:
        try:
            with self.open_new() as log:
                found = diagnose(log, engine=engine)
        except (OSError, ConfigError):
            return None
        return found.diagnosis if found.state is LogState.DEAD else None


def _tail(log: BinaryIO, size: int) -> str:
    start = max(0, size - _TAIL_BYTES)
    log.seek(start)
    return hashlib.sha256(log.read(size - start)).hexdigest()


# ---- the command


@dataclass(frozen=True, slots=True)
class RunningCommand:
    """A restart command that was begun: its process group, and when that began, so that no other is taken for it."""

    group: int
    start_ticks: int | None

    @classmethod
    def of(cls, group: int) -> "RunningCommand":
        """The command whose first process has this id."""
        return cls(group, _start_ticks(group))

    def end(self) -> bool:
        """End it if it still runs, as after a crash of whoever began it; whether it did."""
        if self.start_ticks is None or _start_ticks(self.group) != self.start_ticks:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)
        return True


def _start_ticks(pid: int) -> int | None:
    """When a process began, in ticks since boot; None when it is gone, or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else None


async def run_restart(
    command: str,
    environment: Mapping[str, str],
    limit_seconds: float,
    *,
    on_begun: Callable[[RunningCommand], None] = lambda _: None,
) -> str | None:
    """Run a shell command in a process group of its own, and wait until it has ended.

    A server that it leaves in the background is not waited for. When the time is up, or the wait is cancelled, the
    whole group is ended.

    Args:
        command: for `/bin/sh -c`.
        environment: variables on top of this process's own.
        limit_seconds: time limit.
        on_begun: told of the command as soon as it runs.

    Returns:
        What went wrong, None when it ended with code 0.
    """
    # A file and not a pipe: a server in the background holds a pipe open, and its end never comes.
    with tempfile.TemporaryFile() as output:
        try:
            child = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            return f"the restart command cannot be run: {error.strerror or error}"
        try:
            on_begun(RunningCommand.of(child.pid))
            async with asyncio.timeout(limit_seconds):
                code = await child.wait()
        except TimeoutError:
            await _end_group(child)
            told = f"the restart command did not end within {limit_seconds:g} s{_last_line(output)}"
            return f"{told} (it has to leave the server running in the background, and end)"
        except BaseException:
            await _end_group(child)
            raise
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"the restart command {how}{_last_line(output)}" if code else None


async def _end_group(child: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await child.wait()
                return


def _last_line(output: BinaryIO) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    # It goes into a ledger that is kept in git, so nothing that looks like a secret may be in it.
    return f": {presentable(redact(lines[-1].strip()), limit=_REASON_LENGTH)}" if lines else ""


# ---- the new server


@dataclass(frozen=True, slots=True)
class Before:
    """The server as it was before a restart.

    Attributes:
        tick: a sample of it; not up where it did not answer.
        sockets: inodes of the sockets that listened at its port on this host.
    """

    tick: Tick
    sockets: frozenset[str]


async def look(session: aiohttp.ClientSession, base: BaseUrl, clock: Clock, engine: str) -> Tick:
    """One sample of a target, by which two starts of it can be told apart."""
    # A view made anew: one that has looked before keeps to the processes that it knows for a while.
    processes = ServerProcesses(base.port) if base.is_loopback else None
    return await Sampler(clock, target_reader(session, base.text, ENGINES[engine]), processes=processes).read_once()


async def look_before(session: aiohttp.ClientSession, base: BaseUrl, clock: Clock, engine: str) -> Before:
    """What has to be known of a server before it is restarted."""
    return Before(await look(session, base, clock, engine), listening_sockets(base))


def listening_sockets(base: BaseUrl, proc: Path = Path("/proc")) -> frozenset[str]:
    """Inodes of the sockets that listen at a port of this host; empty for another host.

    Engines bind with SO_REUSEPORT, so an old server that was not ended does not keep a new one from listening: the
    kernel then deals connections out to both.
    """
    found: set[str] = set()
    for name in ("tcp", "tcp6") if base.is_loopback else ():
        with contextlib.suppress(OSError):
            rows = [line.split() for line in (proc / "net" / name).read_text(encoding="utf-8").splitlines()[1:]]
            # State 0A listens. A server at another address of this host is another server.
            found |= {
                row[9]
                for row in rows
                if len(row) > 9
                and row[3] == "0A"
                and row[1].endswith(f":{base.port:04X}")
                and row[1].partition(":")[0] in _LOCAL_ADDRESSES
            }
    return frozenset(found)


async def _refuses(base: BaseUrl) -> bool:
    """Whether nothing listens there. A server that is only slow or stuck does not refuse."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(base.host, base.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


def _is_new(before: Before | None, tick: Tick, log: LogMark, engine: str) -> bool:
    """Whether what answers is another start than the one before, where the port was not seen closed in between."""
    if before is not None:
        old = before.tick
        if find_restart(old, tick):
            return True
        marks = ((old.server_mark, tick.server_mark), (old.process_mark, tick.process_mark))
        if any(then is not None and then == now for then, now in marks):
            return False
    return log.facts(engine).starts > 0 and log.death(engine) is None


async def wait_until_new(
    session: aiohttp.ClientSession,
    base: BaseUrl,
    clock: Clock,
    *,
    model: str | None,
    before: Before | None,
    log: LogMark,
    engine: str | None,
    limit_seconds: float,
) -> TargetFacts | str:
    """Wait until a server answers at `base` that is not the one before, and generates.

    Args:
        session: for its HTTP.
        base: where.
        clock: whose time passes.
        model: the name to ask for; the server's first when None.
        before: the server before the restart; None when its engine was not known, as none had answered.
        log: end of the log before the restart.
        engine: whose log it is; None finds out.
        limit_seconds: how long to wait.

    Returns:
        What the new server says of itself, or why there is none.
    """
    until_ns = clock.now_ns() + round(limit_seconds * NS)
    was_down = before is None or not (before.tick.up or before.tick.process_mark)
    problem, quiet_since_ns, log_size = "nothing was seen of it", clock.now_ns(), -1
    while True:
        facts: TargetFacts | None = None
        try:
            facts = await converse(session, base.text, probe(model, where=base.text))
        except TargetError as error:
            problem = str(error)
            was_down = was_down or await _refuses(base)
        if facts is not None:
            sockets = listening_sockets(base)
            still = sockets & before.sockets if before is not None else frozenset()
            tick = await look(session, base, clock, facts.engine)
            if still and sockets - still:
                problem = (
                    f"two servers listen at port {base.port}, the old one and a new one: the restart command has to "
                    "end the old one first"
                )
            elif was_down or _is_new(before, tick, log, facts.engine):
                left_seconds = (until_ns - clock.now_ns()) / NS
                answer = await converse(session, base.text, smoke(facts.model, timeout_s=max(1.0, left_seconds)))
                if answer.generated:
                    return facts
                problem = f"it answers but does not generate: {answer.reason}"
            else:
                problem = "the old server still answers, and neither its process nor the log shows a new start"
        size = _size(log.path)
        if size != log_size:
            quiet_since_ns, log_size = clock.now_ns(), size
        if facts is None and clock.now_ns() - quiet_since_ns >= _DEATH_SECONDS * NS:
            cause = log.death(engine)
            if cause is not None:
                return f"the server died while it started: {cause}"
        if clock.now_ns() >= until_ns:
            cause = log.death(engine)
            return f"not ready within {limit_seconds:g} s: " + (cause or redact(problem))
        await clock.sleep(_POLL_SECONDS)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
