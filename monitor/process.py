"""The server's processes on this host, read from /proc: who listens on the port, what it started, what that holds.

Memory that leaks is anonymous memory, in RAM or in swap (RssAnon + VmSwap): the resident size alone looks healthy while
leaked pages are swapped out. An engine's own `process_*` metrics tell of its API process only; here the whole tree
below the listener is read, split by role.

Fields are those of proc(5): `status` (kB), `stat` (clock ticks), `meminfo` (kB), `net/tcp` and `net/tcp6`.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ServerProcesses", "find_listener", "host_memory", "process_exists", "process_tree"]

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_READS_PER_SCAN = 10
_FORWARDERS = frozenset(
    {"docker-proxy", "rootlessport", "slirp4netns", "conmon", "ssh", "sshd", "kubectl", "socat"}
    | {"haproxy", "nginx", "envoy", "caddy", "traefik", "systemd", "init"}
)
"""Names (comm) of programs that hold a port for a server which is not their child: their memory says nothing of it."""

_TITLES = (
    (re.compile(r"VLLM::EngineCore(?:_(\w+))?"), "engine"),
    (re.compile(r"VLLM::Worker(?:_(\w+))?"), "worker"),
    (re.compile(r"sglang::scheduler(?:_(\w+))?"), "engine"),
)
"""Titles that engines give to their processes; the group is the rank, as in VLLM::Worker_TP0_EP0."""


@dataclass(frozen=True, slots=True)
class _Stat:
    comm: str
    parent: int
    cpu_seconds: float
    start_ticks: int
    """Since boot; with the pid it names a process for good, although pids are used again."""


def find_listener(port: int, proc: Path = _PROC) -> int | None:
    """The process that serves a TCP port of this host, or None when it cannot be told.

    Several processes may hold one listening socket (an API server that forked its workers): the one above the others is
    meant. A port forwarder is not the server. `ServerProcesses.problem` says why there is none.
    """
    found = _locate(port, proc)
    return found if isinstance(found, int) else None


def process_exists(pid: int, proc: Path = _PROC) -> bool:
    """Whether this host has such a process."""
    return (proc / str(pid)).exists()


def process_tree(pid: int, proc: Path = _PROC) -> tuple[int, ...]:
    """A process and all that descend from it, itself first; empty when it is gone."""
    children: dict[int, list[int]] = defaultdict(list)
    for other in _pids(proc):
        if (stat := _stat(other, proc)) is not None:
            children[stat.parent].append(other)
    if _stat(pid, proc) is None:
        return ()
    tree = [pid]
    for member in tree:  # grows while it is walked
        tree.extend(sorted(children[member]))
    return tuple(tree)


def host_memory(proc: Path = _PROC) -> dict[str, float]:
    """The host's `host_memory_available_bytes` and `host_swap_used_bytes`; what /proc/meminfo lacks is absent."""
    fields = _kilobyte_fields(proc / "meminfo")
    values: dict[str, float] = {}
    if "MemAvailable" in fields:
        values["host_memory_available_bytes"] = fields["MemAvailable"]
    if "SwapTotal" in fields and "SwapFree" in fields:
        values["host_swap_used_bytes"] = fields["SwapTotal"] - fields["SwapFree"]
    return values


class ServerProcesses:
    """The processes of the server that listens on a port of this host.

    The listener is looked for until it is found, and again when it is gone: a restarted server has a new one. Its
    children are looked for at every tenth read, as this needs a walk through all processes of the host.

    Args:
        port: TCP port on which the server listens.
        pid: the server's process, where the user knows it better (a server behind a port forwarder); the port is then
            not looked at, and another process is never taken for it.
        proc: root of the proc file system.
    """

    def __init__(self, port: int, *, pid: int | None = None, proc: Path = _PROC) -> None:
        self._port = port
        self._pid = pid
        self.proc = proc
        """Root of the proc file system."""
        self._reads_until_scan = 0
        self._members: dict[int, tuple[int, str]] = {}
        """Process id to its start and its role."""
        self.problem: str | None = None
        """Why the last read found nothing, for people."""
        self.start_timestamp_seconds: float | None = None
        """When the listening process started, Unix time, as of the last read."""
        self.start_mark: str | None = None
        """Names this start of the server: differs after a restart, and does not move with the wall clock."""

    def read(self) -> dict[str, dict[str, float]]:
        """Process signals by role, each summed over the processes of that role.

        Roles are `server` or, where the engine names its processes, `api`, `engine` and `worker`, the latter two with
        their rank if they have one: `worker:TP0`. A process that vanished is absent, and so is a signal that could not
        be read of every process of the role (the file descriptors of another user, say).
        """
        self._reads_until_scan -= 1
        if self._reads_until_scan < 0 or not self._is_alive():
            self._scan()
        by_role: dict[str, list[dict[str, float]]] = defaultdict(list)
        for pid, (start_ticks, role) in self._members.items():
            values = _read_process(pid, start_ticks, self.proc)
            if values:
                by_role[role].append(values)
        return {role: _sum_common(group) for role, group in sorted(by_role.items())}

    def _is_alive(self) -> bool:
        root = next(iter(self._members), None)
        if root is None:
            return False
        stat = _stat(root, self.proc)
        return stat is not None and stat.start_ticks == self._members[root][0]

    def _scan(self) -> None:
        self._reads_until_scan = _READS_PER_SCAN - 1
        self._members = {}
        self.start_timestamp_seconds = self.start_mark = None
        found = _locate(self._port, self.proc) if self._pid is None else self._pid
        if isinstance(found, int) and _stat(found, self.proc) is None:
            found = f"process {found} is gone"
        if isinstance(found, str):
            self.problem = found
            return
        self.problem = None
        tree = process_tree(found, self.proc)
        roles = _roles({pid: _title(pid, self.proc) for pid in tree})
        for pid in tree:
            if (stat := _stat(pid, self.proc)) is not None:
                self._members[pid] = (stat.start_ticks, roles[pid])
        if found not in self._members:  # it went while we looked; without it the rest is no server
            self._members, self.problem = {}, f"process {found} is gone"
            return
        self.start_mark = f"process {found} started {self._members[found][0]} ticks after boot"
        boot_seconds = _boot_seconds(self.proc)
        if boot_seconds is not None:
            self.start_timestamp_seconds = boot_seconds + self._members[found][0] / _TICKS_PER_SECOND


def _locate(port: int, proc: Path) -> int | str:
    """The listener's pid, or why there is none."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(proc / "net" / table, port)}
    if not sockets:
        return f"nothing listens on port {port} in this host's network namespace (is the server in a container?)"
    holders = {
        pid: stat for pid in _pids(proc) if _holds(pid, sockets, proc) and (stat := _stat(pid, proc)) is not None
    }
    if not holders:
        return f"the process that listens on port {port} belongs to another user; run as that user or as root"
    servers = {pid: stat for pid, stat in holders.items() if stat.comm not in _FORWARDERS}
    if not servers:
        forwarder = min(holders.values(), key=lambda stat: stat.start_ticks).comm
        return f"port {port} is held by {forwarder}, which only forwards to the server"
    # A forked child is younger than its parent, and the parent opened the socket.
    return min(servers, key=lambda pid: (servers[pid].start_ticks, servers[pid].parent in servers, pid))


def _listening(table: Path, port: int) -> Iterable[str]:
    """Inodes of the sockets that listen (state 0A) on a port."""
    for line in _lines(table)[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A" and fields[1].endswith(f":{port:04X}"):
            yield fields[9]


def _holds(pid: int, sockets: set[str], proc: Path) -> bool:
    folder = proc / str(pid) / "fd"
    for name in _names(folder) or ():
        with suppress(OSError):
            if str((folder / name).readlink()) in sockets:
                return True
    return False


def _roles(titles: Mapping[int, str]) -> dict[int, str]:
    named: dict[int, str] = {}
    for pid, title in titles.items():
        for pattern, role in _TITLES:
            if match := pattern.match(title):
                named[pid] = f"{role}:{match[1]}" if match[1] else role
    rest = "api" if named else "server"
    return {pid: named.get(pid, rest) for pid in titles}


def _read_process(pid: int, start_ticks: int, proc: Path) -> dict[str, float]:
    stat = _stat(pid, proc)
    if stat is None or stat.start_ticks != start_ticks:
        return {}
    folder = proc / str(pid)
    memory = _kilobyte_fields(folder / "status")
    if "VmRSS" not in memory:  # gone since, or a zombie: what is left of it is no process of the server
        return {}
    values = {"process_cpu_seconds_total": stat.cpu_seconds, "process_resident_memory_bytes": memory["VmRSS"]}
    if "VmSwap" in memory:
        values["process_swap_bytes"] = memory["VmSwap"]
        if "RssAnon" in memory:
            values["process_anonymous_memory_bytes"] = memory["RssAnon"] + memory["VmSwap"]
    if "Threads" in memory:
        values["process_threads"] = memory["Threads"]
    if (descriptors := _names(folder / "fd")) is not None:
        values["process_open_fds"] = float(len(descriptors))
    return values


def _sum_common(group: list[dict[str, float]]) -> dict[str, float]:
    """Sums over all of a group; a signal that one of them lacks would read too low and is left out."""
    return {name: sum(values[name] for values in group) for name in group[0] if all(name in values for values in group)}


def _kilobyte_fields(path: Path) -> dict[str, float]:
    """`Name:  123 kB` lines as bytes; lines without a unit as they are."""
    fields: dict[str, float] = {}
    for line in _lines(path):
        name, _, text = line.partition(":")
        match text.split():
            case [number, "kB"] if number.isdecimal():
                fields[name] = float(number) * 1024
            case [number] if number.isdecimal():
                fields[name] = float(number)
    return fields


def _stat(pid: int, proc: Path) -> _Stat | None:
    line = "".join(_lines(proc / str(pid) / "stat"))
    before, found, after = line.rpartition(")")  # the name is in parentheses and may contain some
    fields = after.split()
    if not found or len(fields) < 20:
        return None
    cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return _Stat(before.partition("(")[2], int(fields[1]), cpu_seconds, int(fields[19]))


def _title(pid: int, proc: Path) -> str:
    return "".join(_lines(proc / str(pid) / "cmdline")).replace("\0", " ").strip()


def _boot_seconds(proc: Path) -> float | None:
    for line in _lines(proc / "stat"):
        match line.split():
            case ["btime", number]:
                return float(number)
    return None


def _pids(proc: Path) -> list[int]:
    return [int(name) for name in _names(proc) or () if name.isdecimal()]


def _names(folder: Path) -> list[str] | None:
    try:
        return os.listdir(folder)  # noqa: PTH208 - thousands of descriptors every second: names cost less than Paths
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    """A small file's lines; none when it cannot be read: the process is gone, or not ours to see."""
    try:
        return path.read_bytes().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
