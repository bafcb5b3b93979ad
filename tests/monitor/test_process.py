import os
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from monitor.process import ServerProcesses, find_listener, host_memory, process_tree
from serving.signals import Scope, signals_of

TICKS = os.sysconf("SC_CLK_TCK")
MIB = 2**20
BOOT = 1_700_000_000
TCP_HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


class FakeProc:
    """A proc file system of files, as proc(5) describes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "net").mkdir()
        (root / "stat").write_text(f"cpu  1 2 3\nbtime {BOOT}\nprocesses 99\n")

    def listen(
        self, port: int, inode: int, *, address: str = "0100007F", table: str = "tcp", state: str = "0A"
    ) -> None:
        path = self.root / "net" / table
        if not path.exists():
            path.write_text(TCP_HEADER)
        with path.open("a") as file:
            file.write(
                f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  1000        0"
                f" {inode} 1 0000000000000000 100 0 0 10 0\n"
            )

    def add(
        self,
        pid: int,
        *,
        parent: int = 1,
        comm: str = "python3",
        title: str = "python3 -m server",
        started_s: float = 100,
        cpu_s: float = 2,
        anon_mib: int | None = 100,
        swap_mib: int | None = 0,
        rss_mib: int | None = 150,
        threads: int = 4,
        sockets: Iterable[int] = (),
    ) -> None:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        (folder / "cmdline").write_bytes(title.replace(" ", "\0").encode() + b"\0")
        ticks = f"{round(cpu_s * TICKS) - 1} 1"
        (folder / "stat").write_text(
            f"{pid} ({comm}) S {parent} {pid} {pid} 0 -1 4194560 9 0 0 0 {ticks} 0 0 20 0 {threads} 0"
            f" {round(started_s * TICKS)} 99 99\n"
        )
        status = f"Name:\t{comm}\nPid:\t{pid}\nThreads:\t{threads}\nSigQ:\t0/127\n"
        for name, mib in (("VmRSS", rss_mib), ("RssAnon", anon_mib), ("VmSwap", swap_mib)):
            if mib is not None:
                status += f"{name}:\t{mib * 1024:8d} kB\n"
        (folder / "status").write_text(status)
        for number, inode in enumerate(sockets):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")

    def remove(self, pid: int) -> None:
        for path in sorted((self.root / str(pid)).rglob("*"), reverse=True):
            path.unlink() if path.is_symlink() or path.is_file() else path.rmdir()
        (self.root / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


@pytest.mark.parametrize(
    ("address", "table"), [("0100007F", "tcp"), ("00000000", "tcp"), ("00000000000000000000000000000000", "tcp6")]
)
def test_the_listener_is_whoever_holds_the_listening_socket(proc: FakeProc, address: str, table: str) -> None:
    proc.listen(8000, 555, address=address, table=table)
    proc.add(40, sockets=[1, 2])
    proc.add(41, sockets=[3, 555])
    assert find_listener(8000, proc.root) == 41


def test_a_connection_to_the_port_is_no_listener(proc: FakeProc) -> None:
    proc.listen(8000, 555, state="01")
    proc.add(41, sockets=[555])
    assert find_listener(8000, proc.root) is None


def test_of_a_forking_server_the_parent_is_the_listener(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(30, parent=90, started_s=102, sockets=[555])
    proc.add(31, parent=90, started_s=102, sockets=[555])
    proc.add(90, started_s=101, sockets=[555])
    assert find_listener(8000, proc.root) == 90


def test_a_port_forwarder_is_not_the_server(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(41, comm="docker-proxy", sockets=[555])
    processes = ServerProcesses(8000, proc=proc.root)
    assert processes.read() == {}
    assert "docker-proxy" in str(processes.problem)
    assert find_listener(8000, proc.root) is None


def test_a_socket_that_systemd_opened_belongs_to_the_server(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(1, parent=0, comm="systemd", started_s=0, sockets=[555])
    proc.add(41, sockets=[555])
    assert find_listener(8000, proc.root) == 41


def test_the_reason_for_no_listener_is_told(proc: FakeProc) -> None:
    processes = ServerProcesses(8000, proc=proc.root)
    assert processes.read() == {}
    assert "nothing listens on port 8000" in str(processes.problem)
    proc.listen(8000, 555)
    proc.add(41, sockets=[7])
    assert processes.read() == {}
    assert "another user" in str(processes.problem)


def test_a_tree_has_all_descendants_and_no_one_else(proc: FakeProc) -> None:
    proc.add(10)
    proc.add(12, parent=10)
    proc.add(11, parent=12, comm="odd) name (1 2 3")
    proc.add(13, parent=1)
    assert process_tree(10, proc.root) == (10, 12, 11)
    assert process_tree(99, proc.root) == ()


def test_a_plain_server_is_one_role_with_its_sums(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, anon_mib=100, swap_mib=50, rss_mib=120, threads=3, cpu_s=4, started_s=100, sockets=[555, 1])
    proc.add(11, parent=10, anon_mib=10, swap_mib=0, rss_mib=11, threads=1, cpu_s=1, sockets=[2])
    processes = ServerProcesses(8000, proc=proc.root)
    assert processes.read() == {
        "server": {
            "process_anonymous_memory_bytes": 160 * MIB,
            "process_resident_memory_bytes": 131 * MIB,
            "process_swap_bytes": 50 * MIB,
            "process_open_fds": 3,
            "process_threads": 4,
            "process_cpu_seconds_total": 5,
        }
    }
    assert processes.start_timestamp_seconds == BOOT + 100
    assert processes.problem is None


@pytest.mark.parametrize(
    ("titles", "roles"),
    [
        (
            ["vllm serve m", "VLLM::EngineCore", "python -c from multiprocessing.resource_tracker import main"],
            {"api": 2, "engine": 1},
        ),
        (
            ["VLLM::APIServer_0", "VLLM::EngineCore_DP1", "VLLM::Worker_TP0", "VLLM::Worker_TP1_EP1"],
            {"api": 1, "engine:DP1": 1, "worker:TP0": 1, "worker:TP1_EP1": 1},
        ),
        (
            ["python -m sglang.launch_server", "sglang::scheduler_TP0", "sglang::detokenizer"],
            {"api": 2, "engine:TP0": 1},
        ),
        (["llama-server -m VLLM::Worker", "sh"], {"server": 2}),
    ],
)
def test_roles_follow_the_titles_that_engines_set(proc: FakeProc, titles: list[str], roles: dict[str, int]) -> None:
    proc.listen(8000, 555)
    for number, title in enumerate(titles):
        parent = 1 if number == 0 else 10
        proc.add(10 + number, parent=parent, title=title, threads=1, sockets=[555] if number == 0 else [])
    read = ServerProcesses(8000, proc=proc.root).read()
    assert {role: values["process_threads"] for role, values in read.items()} == roles


def test_a_process_that_vanishes_between_scan_and_read_is_absent(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, title="vllm serve m", sockets=[555])
    proc.add(11, parent=10, title="VLLM::EngineCore")
    processes = ServerProcesses(8000, proc=proc.root)
    assert set(processes.read()) == {"api", "engine"}
    proc.remove(11)
    assert set(processes.read()) == {"api"}


def test_a_process_that_vanishes_in_the_middle_of_a_read_is_absent(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, sockets=[555])
    proc.add(11, parent=10)
    (proc.root / "11" / "status").unlink()
    assert ServerProcesses(8000, proc=proc.root).read()["server"]["process_threads"] == 4


def test_a_zombie_and_a_reused_pid_are_not_the_server(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, sockets=[555])
    proc.add(11, parent=10, anon_mib=None, swap_mib=None, rss_mib=None)
    processes = ServerProcesses(8000, proc=proc.root)
    assert processes.read()["server"]["process_threads"] == 4
    proc.remove(11)
    proc.add(11, parent=1, started_s=500)
    assert processes.read()["server"]["process_threads"] == 4


def test_a_restarted_server_is_found_again_at_the_next_read(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, started_s=100, sockets=[555])
    processes = ServerProcesses(8000, proc=proc.root)
    assert processes.read()
    proc.remove(10)
    assert processes.read() == {}
    assert processes.start_timestamp_seconds is None
    proc.add(20, started_s=300, anon_mib=7, sockets=[555])
    assert processes.read()["server"]["process_anonymous_memory_bytes"] == 7 * MIB
    assert processes.start_timestamp_seconds == BOOT + 300


def test_the_start_mark_changes_with_the_process_and_not_with_the_wall_clock(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, started_s=100, sockets=[555])
    processes = ServerProcesses(8000, proc=proc.root)
    processes.read()
    first = processes.start_mark
    (proc.root / "stat").write_text("btime 1600000000\n")
    for _ in range(11):
        processes.read()
    assert processes.start_mark == first is not None
    proc.remove(10)
    proc.add(10, started_s=101, sockets=[555])
    processes.read()
    assert processes.start_mark not in {first, None}


def test_a_named_process_is_read_whoever_holds_the_port(proc: FakeProc) -> None:
    proc.add(10)
    proc.add(11, parent=10, threads=1)
    processes = ServerProcesses(8000, pid=11, proc=proc.root)
    assert processes.read()["server"]["process_threads"] == 1
    proc.remove(11)
    assert processes.read() == {}
    assert processes.problem == "process 11 is gone"


def test_a_new_child_is_seen_within_ten_reads(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, threads=1, sockets=[555])
    processes = ServerProcesses(8000, proc=proc.root)
    processes.read()
    proc.add(11, parent=10, threads=1)
    threads = [processes.read()["server"]["process_threads"] for _ in range(10)]
    assert threads == [1] * 9 + [2]


def test_a_signal_that_one_process_of_a_role_lacks_is_absent_and_not_too_low(proc: FakeProc) -> None:
    proc.listen(8000, 555)
    proc.add(10, sockets=[555])
    proc.add(11, parent=10, swap_mib=None)
    (proc.root / "11" / "fd").rmdir()
    values = ServerProcesses(8000, proc=proc.root).read()["server"]
    assert set(values) == {"process_resident_memory_bytes", "process_threads", "process_cpu_seconds_total"}


def test_host_memory_is_what_is_available_and_the_swap_in_use(proc: FakeProc) -> None:
    assert host_memory(proc.root) == {}
    (proc.root / "meminfo").write_text(
        "MemTotal: 2000 kB\nMemFree: 1 kB\nMemAvailable: 1000 kB\nSwapTotal: 300 kB\nSwapFree: 100 kB\nHugePages_Total: 0\n"
    )
    assert host_memory(proc.root) == {"host_memory_available_bytes": 1000 * 1024, "host_swap_used_bytes": 200 * 1024}


def test_a_host_without_swap_uses_none(proc: FakeProc) -> None:
    (proc.root / "meminfo").write_text("SwapTotal: 0 kB\nSwapFree: 0 kB\n")
    assert host_memory(proc.root) == {"host_swap_used_bytes": 0}


def test_a_host_without_proc_has_no_processes(tmp_path: Path) -> None:
    assert find_listener(8000, tmp_path / "none") is None
    assert ServerProcesses(8000, proc=tmp_path / "none").read() == {}
    assert host_memory(tmp_path / "none") == {}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_the_real_proc_knows_this_very_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert find_listener(port) == os.getpid()
        processes = ServerProcesses(port)
        (values,) = processes.read().values()
    assert values["process_resident_memory_bytes"] >= 10 * MIB
    assert set(values) == {signal.name for signal in signals_of(Scope.PROCESS)}
    assert set(host_memory()) == {"host_memory_available_bytes", "host_swap_used_bytes"}
    assert (processes.start_timestamp_seconds or 0) > BOOT
