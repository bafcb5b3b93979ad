import json
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor import machine
from monitor.gpu import GpuDevice, GpuProcess, GpuReport, PcieLink
from monitor.machine import Machine, MemorySlot, count_channels, host, known_card, read_machine, read_slots
from serving.cards import Host, find_card

GIB = 2**30
MIB = 2**20
NO_CARDS = GpuReport("none")
LINK = PcieLink(generation=1, width=16, max_generation=5, max_width=16)
H200 = GpuDevice("GPU-a", "NVIDIA H200", 140.0 * GIB, 30.0 * GIB, 109.0 * GIB, "0000:6a:00.0", LINK, ())
HOST_NAMESPACE = "pid:[4026531836]"


class Roots:
    """Roots of the proc and sys file systems of a made-up machine."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"

    def write(self, path: str, content: str | bytes | int) -> None:
        """Below /proc or /sys, as in `sys/devices/...`."""
        place = self.proc.parent / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else str(content).encode())

    def link(self, path: str, target: str | Path) -> None:
        place = self.proc.parent / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def read(self, *devices: GpuDevice, weights: Path | None = None) -> Machine:
        return read_machine(GpuReport("nvml", devices), weights=weights, proc=self.proc, sys=self.sys)


@pytest.fixture
def made(tmp_path: Path) -> Roots:
    """64 GiB of memory, of which 50 are available, and 8 cores with two threads each."""
    host = Roots(tmp_path)
    lines = ["MemTotal:       67108864 kB", "MemFree:  1 kB", "MemAvailable:   52428800 kB"]
    host.write(
        "proc/meminfo", "\n".join([*lines, "SwapTotal:  8388608 kB", "SwapFree:  4194304 kB", "HugePages_Total: 0"])
    )
    host.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Fast Processor 9000\n\nprocessor\t: 1\n")
    host.write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-15\nMems_allowed_list:\t0\n")
    host.write("sys/devices/system/cpu/online", "0-15\n")
    for thread in range(16):
        host.write(
            f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list", f"{thread % 8},{thread % 8 + 8}\n"
        )
    host.link("proc/self/ns/pid", HOST_NAMESPACE)
    return host


def noted(machine: Machine, *words: str) -> bool:
    """Whether one note has all these words."""
    return any(all(word in note for word in words) for note in machine.notes)


# The firmware's table


def structure(kind: int, body: bytes, *strings: str) -> bytes:
    """One structure of an SMBIOS table, after chapter 6.1 of the specification."""
    text = b"".join(string.encode() + b"\0" for string in strings) or b"\0"
    return struct.pack("<BBH", kind, 4 + len(body), 0x1100) + body + text + b"\0"


def device(
    locator: str,
    bank: str,
    size: int = 16384,
    *,
    speed: int = 5600,
    configured: int = 4800,
    width: int = 64,
    kind: int = 0x22,
    technology: int = 3,
    extended: tuple[int, int, int] = (0, 0, 0),
    length: int = 0x5C,
) -> bytes:
    """A memory device (type 17), field by field in the order of table 74 of the specification.

    A structure has no empty strings: that of an empty name is number 0.
    """
    extended_size, extended_speed, extended_configured = extended
    strings = [text for text in (locator, bank, "Maker", "00000000", "Not Specified", "PART-1") if text]
    index = {text: number for number, text in reversed(list(enumerate(strings, start=1)))}
    names = (index.get(locator, 0), index.get(bank, 0))
    body = struct.pack("<HHHHHBBBBBHH", 0x1000, 0xFFFE, width, width, size, 9, 0, *names, kind, 0x80, speed)
    body += struct.pack("<BBBBBIHHHH", 1, 1, 1, 1, 2, extended_size, configured, 1100, 1100, 1100)
    body += struct.pack("<BHBHHHHQQQQ", technology, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    body += struct.pack("<II", extended_speed, extended_configured)
    assert len(body) == 0x5C - 4
    return structure(17, body[: length - 4], *strings)


def processor(socket: str = "CPU1", name: str = "Some Processor", kind: int = 3) -> bytes:
    body = struct.pack("<BBBB8sB", 1, kind, 0xFE, 2, bytes(8), 3).ljust(0x30 - 4, b"\0")
    return structure(4, body, socket, "Maker", name)


END = structure(127, b"")
OTHER = structure(0, bytes(20), "Firmware's maker", "1.0")
EMPTY = {"size": 0, "speed": 0, "configured": 0, "width": 0xFFFF, "kind": 2}


def test_a_slot_is_read_with_name_size_speed_and_width() -> None:
    table = OTHER + device("DIMM 0", "P0 CHANNEL A") + device("DIMM 1", "P0 CHANNEL A", **EMPTY) + END
    assert read_slots(table) == (
        MemorySlot("DIMM 0", "P0 CHANNEL A", 16 * GIB, "DDR5", 4800, 64),
        MemorySlot("DIMM 1", "P0 CHANNEL A", 0, None, None, None),
    )


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"size": 0x7FFF, "extended": (131072, 0, 0)}, {"size_bytes": 128 * GIB}),
        ({"size": 0xFFFF}, {"size_bytes": None}),
        ({"size": 0x8000 | 512}, {"size_bytes": 512 * 1024}),
        ({"configured": 0}, {"megatransfers_per_second": 5600}),
        ({"configured": 0, "speed": 0}, {"megatransfers_per_second": None}),
        ({"configured": 0xFFFF, "extended": (0, 0, 70_000)}, {"megatransfers_per_second": 70_000}),
        ({"configured": 0xFFFF, "speed": 0xFFFF, "extended": (0, 2**31, 0)}, {"megatransfers_per_second": None}),
        ({"length": 0x22}, {}),
        ({"length": 0x1C, "configured": 0}, {"megatransfers_per_second": 5600}),
        ({"length": 0x15}, {"megatransfers_per_second": None}),
        ({"width": 0}, {"width_bits": None}),
        ({"width": 12}, {"width_bits": None}),
        ({"kind": 0x99}, {"technology": None}),
    ],
)
def test_fields_that_older_or_odd_firmware_fills_differently(fields, changed) -> None:
    usual = MemorySlot("DIMM 0", "BANK 0", 16 * GIB, "DDR5", 4800, 64)
    assert read_slots(device("DIMM 0", "BANK 0", **fields)) == (replace(usual, **changed),)


@pytest.mark.parametrize("fields", [{"kind": 0x09, "size": 16}, {"technology": 7}, {"kind": 0x1F}])
def test_flash_and_persistent_memory_are_no_slots(fields) -> None:
    assert read_slots(device("SYSTEM ROM", "", **fields)) == ()


def test_what_follows_the_end_of_the_table_is_not_read() -> None:
    assert len(read_slots(device("A", "") + END + device("B", ""))) == 1


def test_a_name_cannot_move_a_terminal() -> None:
    assert read_slots(device("DIMM\x1b[2J\n 0", "\x07"))[0].locator == "DIMM[2J 0"


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@given(
    st.lists(st.tuples(NAMES, NAMES, st.integers(0, 0x7FFE), st.integers(100, 20_000)), max_size=8), st.integers(0, 9)
)
def test_a_table_gives_back_what_was_put_into_it(slots, others) -> None:
    table = (
        OTHER * others + b"".join(device(name, bank, size, configured=speed) for name, bank, size, speed in slots) + END
    )
    assert read_slots(table) == tuple(
        MemorySlot(name, bank, size * MIB, "DDR5", speed, 64) for name, bank, size, speed in slots
    )


@given(st.binary(max_size=400))
def test_bytes_that_are_no_table_give_slots_or_none(table: bytes) -> None:
    for slot in read_slots(table):
        assert slot.size_bytes is None or slot.size_bytes >= 0


TABLE = OTHER + b"".join(device(f"Channel{letter}-DIMM0", f"BANK {letter}") for letter in "ABCD") + END


@given(st.data())
def test_a_damaged_table_loses_what_is_damaged_and_raises_nothing(data) -> None:
    table = bytearray(TABLE)
    for place in data.draw(st.lists(st.integers(0, len(TABLE) - 1), max_size=12)):
        table[place] = data.draw(st.integers(0, 255))
    cut = bytes(table[: data.draw(st.integers(0, len(TABLE)))])
    slots = read_slots(cut)
    count, _ = count_channels(slots)
    assert count <= len(slots) <= len(TABLE) // 8


def test_the_first_part_of_a_table_that_was_cut_off_is_kept() -> None:
    whole = read_slots(TABLE)
    assert [len(read_slots(TABLE[:length])) for length in (0, 3, len(TABLE) // 2, len(TABLE))] == [0, 0, 2, 4]
    assert read_slots(TABLE[: len(TABLE) // 2]) == whole[:2]


# Channels


def slots(*names: tuple[str, str], empty: tuple[tuple[str, str], ...] = ()) -> tuple[MemorySlot, ...]:
    return tuple(MemorySlot(*name, 0 if name in empty else 16 * GIB) for name in (*names, *empty))


# How makers name slots, as people showed it in public: memtest86plus issue 123 (Threadripper), CoreFreq issues 160
# (Haswell laptop) and 561 (Ryzen AI Max), ckb-next issue 1220 (Z790), rasdaemon issue 64 (EPYC), netutils-linux issues
# 210 (HP) and 218 (Dell), dasharo-issues 1206 and Dasharo coreboot pull request 176 (coreboot).
@pytest.mark.parametrize(
    ("names", "sockets", "expected"),
    [
        ([("DIMM 1", "P0 CHANNEL A"), ("DIMM 1", "P0 CHANNEL B")], 1, (2, True)),
        ([("DIMM 0", "P0 CHANNEL A"), ("DIMM 1", "P0 CHANNEL A")], 1, (1, True)),
        ([("DIMM 0", f"P0 CHANNEL {letter}") for letter in "ABCDEFGH"], 1, (8, True)),
        ([("DIMMG2", "P0_Node0_Channel6_Dimm1"), ("DIMMH2", "P0_Node0_Channel7_Dimm1")], 1, (2, True)),
        ([("DIMMG1", "P0_Node0_Channel6_Dimm0"), ("DIMMG2", "P0_Node0_Channel6_Dimm1")], 1, (1, True)),
        ([("P1-DIMMA1", "P0_Node0_Channel0_Dimm0"), ("P2-DIMMA1", "P1_Node0_Channel0_Dimm0")], 2, (2, True)),
        ([("DIMMA1", "P0_Node1_Channel0_Dimm0"), ("DIMME1", "P1_Node0_Channel0_Dimm0")], 2, (2, True)),
        ([("ChannelA-DIMM0", "BANK 0"), ("ChannelB-DIMM0", "BANK 2"), ("ChannelB-DIMM1", "BANK 3")], None, (2, True)),
        ([("Controller0-ChannelA-DIMM0", "BANK 0"), ("Controller1-ChannelA-DIMM0", "BANK 0")], None, (2, True)),
        ([("Controller0-DIMMA2", "BANK 0"), ("Controller1-DIMMB2", "BANK 0")], None, (2, True)),
        ([("DIMM 1", "Channel A Slot 0"), ("DIMM 2", "Channel B Slot 0")], None, (2, True)),
        ([("Channel-0-DIMM-0", "BANK 0"), ("Channel-0-DIMM-1", "BANK 0"), ("Channel-1-DIMM-0", "BANK 0")], None, (2, True)),
        ([("CPU1_DIMM_A1", "NODE 1"), ("CPU1_DIMM_A2", "NODE 1"), ("CPU2_DIMM_A1", "NODE 2")], 2, (2, True)),
        ([("DIMM_P0_A0", "BANK 0"), ("DIMM_P0_B0", "BANK 1"), ("DIMM_P1_A0", "BANK 2")], 2, (3, True)),
        ([("DIMM_A2", "BANK 1"), ("DIMM_B2", "BANK 3")], 1, (2, True)),
        # Here the letter may be the socket's: then A1 and A2 are two channels.
        ([("DIMM_A1", "Not Specified"), ("DIMM_A2", "Not Specified"), ("DIMM_B1", "Not Specified")], 2, (3, False)),
        ([("DIMM_A1", "BANK 0"), ("DIMM_A2", "BANK 1")], None, (2, False)),
        ([("DIMM_A1", "BANK 0"), ("DIMM_A2", "BANK 1")], 1, (2, False)),
        ([("A1", ""), ("A2", ""), ("B1", "")], 1, (3, False)),
        ([("PROC  2 DIMM 12", "Not Specified"), ("PROC  1 DIMM 12", "Not Specified")], 2, (2, False)),
        ([("DIMM 0", "P0 CHANNEL A"), ("DIMM 7", "elsewhere")], 1, (2, False)),
        ([("Channel-0-DIMM-0", "BANK 0"), ("Channel-0-DIMM-0", "BANK 0")], None, (2, False)),
        ([("", ""), ("", "")], None, (2, False)),
        ([], None, (0, True)),
    ],
)  # fmt: skip
def test_channels_are_counted_where_slots_name_them_and_bounded_where_not(names, sockets, expected) -> None:
    assert count_channels(slots(*names), sockets) == expected


def test_an_empty_slot_is_no_channel_but_tells_what_letters_mean() -> None:
    full, empty = ("DIMM_A2", "BANK 1"), (("DIMM_A1", "BANK 0"), ("DIMM_B1", "BANK 2"))
    assert count_channels(slots(full, empty=empty), 1) == (1, True)
    assert count_channels(slots(full), 1) == (1, False)


@given(st.lists(st.tuples(st.sampled_from(("DIMM A1", "P0 CHANNEL A", "CPU1", "ChB", "x", "")), NAMES), max_size=6))
def test_there_are_never_more_channels_than_modules(names) -> None:
    count, are_counted = count_channels(slots(*names))
    assert count <= len(names)
    assert are_counted or count == len(names)


# Memory


def test_memory_bandwidth_is_channels_times_width_times_transfers(made: Roots) -> None:
    # Four modules on two channels run at 4200 MT/s (club-3090 issue 1130).
    modules = [device(f"DIMM {slot}", f"P0 CHANNEL {channel}", configured=4200) for channel in "AB" for slot in (0, 1)]
    made.write("sys/firmware/dmi/tables/DMI", processor() + b"".join(modules) + END)
    memory = made.read().memory
    assert (memory.channels, memory.channels_are_counted, memory.megatransfers_per_second) == (2, True, 4200)
    assert memory.bandwidth_bytes_per_second == pytest.approx(67.2e9)
    assert memory.slots is not None
    assert len(memory.slots) == 4


def test_soldered_memory_counts_with_its_narrow_channels(made: Roots) -> None:
    # Eight channels of 32 bits at 8000 MT/s (CoreFreq issue 561).
    chips = [device("DIMM 0", f"P0 CHANNEL {letter}", kind=0x23, width=32, configured=8000) for letter in "ABCDEFGH"]
    made.write("sys/firmware/dmi/tables/DMI", processor() + b"".join(chips) + END)
    assert made.read().memory.bandwidth_bytes_per_second == pytest.approx(256e9)


def test_unclear_slots_give_an_upper_bound_and_say_so(made: Roots) -> None:
    modules = [device(f"PROC  {socket} DIMM {slot}", "Not Specified") for socket in (1, 2) for slot in (1, 2)]
    made.write("sys/firmware/dmi/tables/DMI", processor("1") + processor("2") + b"".join(modules) + END)
    seen = made.read()
    assert (seen.memory.channels, seen.memory.channels_are_counted) == (4, False)
    assert noted(seen, "PROC 1 DIMM 1", "upper bound", "4 modules")
    assert noted(seen, "all 2 sockets")
    assert any("153.6 GB/s is an upper bound" in sentence for sentence in host(seen)[1])


def test_unlike_modules_count_like_the_slowest_and_narrowest(made: Roots) -> None:
    modules = device("ChannelA-DIMM0", "", configured=5600) + device("ChannelB-DIMM0", "", configured=4800, width=0)
    made.write("sys/firmware/dmi/tables/DMI", modules + END)
    seen = made.read()
    assert seen.memory.bandwidth_bytes_per_second == pytest.approx(2 * 8 * 4800e6)
    assert noted(seen, "differ")
    assert noted(seen, "taken for 64 bits")


@pytest.mark.parametrize(
    "table",
    [device("DIMM 0", "", speed=0, configured=0) + END, device("DIMM 0", "", **EMPTY) + END, processor() + END],
)
def test_a_table_without_speeds_gives_no_bandwidth(made: Roots, table: bytes) -> None:
    made.write("sys/firmware/dmi/tables/DMI", table)
    seen = made.read()
    assert (seen.memory.bandwidth_bytes_per_second, seen.memory.channels) == (None, None)
    assert noted(seen, "Speed of main memory is not visible")


def test_no_table_an_unreadable_one_and_a_broken_one_each_say_why(made: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(made.read(), "no SMBIOS table here")
    made.write("sys/firmware/dmi/tables/DMI", b"\xff" * 2)
    assert noted(made.read(), "the SMBIOS table is broken")
    usual = Path.open

    def refuse(path: Path, *arguments, **options):
        if path.name == "DMI":
            raise PermissionError(13, "Permission denied")
        return usual(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    seen = made.read()
    assert noted(seen, "as root")
    assert seen.memory.slots is None


def test_memory_without_limits_is_the_hosts(made: Roots) -> None:
    memory = made.read().memory
    assert (memory.installed_bytes, memory.limit_bytes, memory.total_bytes) == (64 * GIB, None, 64 * GIB)
    assert (memory.available_bytes, memory.swap_total_bytes, memory.swap_free_bytes) == (50 * GIB, 8 * GIB, 4 * GIB)


def test_the_tightest_group_of_version_2_is_the_true_limit(made: Roots) -> None:
    made.write("proc/self/cgroup", "0::/pods/mine\n")
    group = "sys/fs/cgroup/pods"
    made.write(f"{group}/memory.max", 16 * GIB)
    made.write(f"{group}/memory.current", 10 * GIB)
    made.write(f"{group}/memory.stat", f"anon {GIB}\nfile {7 * GIB}\ninactive_file {6 * GIB}\n")
    made.write(f"{group}/memory.swap.max", 0)
    made.write(f"{group}/mine/memory.max", "max\n")
    seen = made.read()
    assert (seen.memory.limit_bytes, seen.memory.total_bytes) == (16 * GIB, 16 * GIB)
    assert seen.memory.available_bytes == 12 * GIB  # cached files that nobody uses can go
    assert (seen.memory.swap_total_bytes, seen.memory.swap_free_bytes) == (0, 0)
    assert noted(seen, "control group", "16.0 GiB")


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/memory/docker/abc", "sys/fs/cgroup/memory"])
def test_a_group_of_version_1_limits_by_its_path_or_at_the_mount_of_a_container(made: Roots, folder: str) -> None:
    made.write("proc/self/cgroup", "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\nbroken\n")
    made.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    made.write(f"{folder}/memory.limit_in_bytes", 8 * GIB)
    made.write(f"{folder}/memory.usage_in_bytes", 3 * GIB)
    made.write(f"{folder}/memory.stat", f"inactive_file 0\ntotal_inactive_file {GIB}\n")
    memory = made.read().memory
    assert (memory.limit_bytes, memory.available_bytes) == (8 * GIB, 6 * GIB)


def test_a_limit_above_what_is_installed_is_none(made: Roots) -> None:
    made.write("proc/self/cgroup", "4:memory:/\n")
    made.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    made.write("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    memory = made.read().memory
    assert (memory.limit_bytes, memory.total_bytes, memory.available_bytes) == (None, 64 * GIB, 50 * GIB)


def test_what_the_host_has_left_bounds_what_a_group_may_take(made: Roots) -> None:
    made.write("proc/self/cgroup", "0::/../other\n")
    made.write("sys/fs/cgroup/memory.max", 60 * GIB)
    made.write("sys/fs/cgroup/memory.current", 0)
    memory = made.read().memory
    assert (memory.total_bytes, memory.available_bytes) == (60 * GIB, 50 * GIB)


# Processor


def test_cores_threads_and_what_of_them_is_usable(made: Roots) -> None:
    seen = made.read().processor
    assert (seen.name, seen.cores, seen.threads, seen.usable_threads) == ("Fast Processor 9000", 8, 16, 16)


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({"proc/self/status": "Cpus_allowed_list:\t0-2,8\n"}, 4),
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"sys/fs/cgroup/cpu.max": "100000 0\n"}, 16),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
        ({"proc/self/status": "Cpus_allowed_list:\t0-99999999999999\n"}, 16),
    ],
)  # fmt: skip
def test_affinity_and_quotas_bound_the_threads(made: Roots, files: dict[str, str], usable: float) -> None:
    made.write("proc/self/cgroup", "3:cpu,cpuacct:/mine\n0::/\n")
    for path, text in files.items():
        made.write(path, text)
    assert made.read().processor.usable_threads == usable


def test_a_processor_that_the_kernel_does_not_name_is_named_by_the_firmware(made: Roots) -> None:
    made.write("proc/cpuinfo", "processor\t: 0\nCPU part\t: 0xd4f\n")
    assert noted(made.read(), "name of the processor")
    made.write("sys/firmware/dmi/tables/DMI", processor(name="Grace A02") + END)
    seen = made.read()
    assert seen.processor.name == "Grace A02"
    assert not noted(seen, "name of the processor")


# Cards


def test_a_card_counts_with_what_is_free(made: Roots) -> None:
    seen = made.read(H200)
    assert seen.cards == (H200,)
    assert not noted(seen, "H200", "GPU-a") or noted(seen, "belong to no process")


def test_the_kernel_tells_a_link_that_the_driver_does_not_as_far_as_both_ends_go(made: Roots) -> None:
    port = "sys/devices/pci0000:00/0000:00:01.0"
    for folder, fastest, widest in ((port, "16.0 GT/s PCIe", 8), (f"{port}/0000:6a:00.0", "32.0 GT/s PCIe", 16)):
        made.write(f"{folder}/max_link_speed", f"{fastest}\n")
        made.write(f"{folder}/max_link_width", f"{widest}\n")
        made.write(f"{folder}/current_link_speed", "2.5 GT/s PCIe\n")
        made.write(f"{folder}/current_link_width", "8\n")
    made.link("sys/bus/pci/devices/0000:6a:00.0", made.proc.parent / port / "0000:6a:00.0")
    card = made.read(replace(H200, link=None)).cards[0]
    assert card.link == PcieLink(generation=1, width=8, max_generation=4, max_width=8)
    told = PcieLink(max_generation=3)
    assert made.read(replace(H200, link=told)).cards[0].link == PcieLink(1, 8, 3, 8)


@pytest.mark.parametrize(("speed", "width"), [("Unknown", "0"), ("", "255"), ("99 GT/s", "63"), ("x" * 50, "-4")])
def test_a_link_that_a_virtual_machine_makes_up_is_not_known(made: Roots, speed: str, width: str) -> None:
    for end in ("current", "max"):
        made.write(f"sys/bus/pci/devices/0000:6a:00.0/{end}_link_speed", speed)
        made.write(f"sys/bus/pci/devices/0000:6a:00.0/{end}_link_width", width)
    seen = made.read(replace(H200, link=None))
    assert seen.cards[0].link is None
    assert noted(seen, "PCIe link of NVIDIA H200 is not told", "lspci")


def test_an_address_is_no_way_out_of_the_folder(made: Roots) -> None:
    made.write("sys/bus/pci/devices/max_link_width", 16)
    assert made.read(replace(H200, link=None, pci_address="../devices")).cards[0].link is None


def test_missing_lanes_are_told_and_an_idle_link_is_not(made: Roots) -> None:
    assert not noted(made.read(H200), "lanes")
    narrow = replace(H200, link=replace(LINK, width=8))
    assert noted(made.read(narrow), "GPU-a", "uses 8 of 16 PCIe lanes")


def test_other_processes_are_named_by_the_kernel(made: Roots) -> None:
    made.write("proc/20/comm", "VLLM::EngineCor\n")
    made.write("proc/21/comm", "\x1b[2Jpython3\n")
    processes = (GpuProcess(20, 29.5 * GIB), GpuProcess(21, None), GpuProcess(22, 1.0))
    seen = made.read(replace(H200, processes=processes))
    assert seen.cards[0].processes == (
        GpuProcess(20, 29.5 * GIB, "VLLM::EngineCor"),
        GpuProcess(21, None, "[2Jpython3"),
        GpuProcess(22, 1.0),
    )
    assert noted(seen, "Not every process", "--pid=host")


def test_in_a_container_only_what_has_the_card_open_is_taken_for_the_process_meant(made: Roots) -> None:
    (made.proc / "self/ns/pid").unlink()
    made.link("proc/self/ns/pid", "pid:[4026533001]")
    for pid, opened in ((20, "/dev/nvidia0"), (21, "/dev/null")):
        made.write(f"proc/{pid}/comm", f"name-{pid}")
        made.link(f"proc/{pid}/fd/3", opened)
    seen = made.read(replace(H200, processes=(GpuProcess(20, GIB), GpuProcess(21, GIB))))
    assert [process.name for process in seen.cards[0].processes or ()] == ["name-20", None]


@pytest.mark.parametrize(
    ("processes", "is_noted"),
    [
        ((), True),
        ((GpuProcess(20, 28.0 * GIB),), True),
        ((GpuProcess(20, 29.5 * GIB),), False),
        ((GpuProcess(20, None),), False),
        (None, False),
    ],
)
def test_memory_in_use_that_no_process_owns_up_to_is_told(made: Roots, processes, is_noted: bool) -> None:
    seen = made.read(replace(H200, processes=processes))
    assert noted(seen, "in use on NVIDIA H200 (GPU-a) belong to no process") is is_noted
    assert noted(seen, "does not list the processes") is (processes is None)


def test_a_chip_that_works_in_main_memory_has_what_is_available_there(made: Roots) -> None:
    chip = GpuDevice("GPU-s", "NVIDIA GB10", None)
    seen = made.read(chip)
    assert (seen.cards[0].memory_total_bytes, seen.cards[0].memory_free_bytes) == (64 * GIB, 50 * GIB)
    assert noted(seen, "GB10", "shares main memory")
    assert not noted(seen, "PCIe link")


def test_a_card_that_tells_no_memory_is_not_taken_for_such_a_chip(made: Roots) -> None:
    seen = made.read(replace(H200, memory_total_bytes=None, memory_used_bytes=None, memory_free_bytes=None))
    assert (seen.cards[0].memory_total_bytes, seen.cards[0].memory_free_bytes) == (None, None)
    assert noted(seen, "does not tell how much of its memory is free", "--gpu-memory")


def test_a_card_in_partitions_is_its_partitions(made: Roots) -> None:
    whole = GpuDevice("GPU-a", "NVIDIA H200", None, pci_address="0000:6a:00.0", link=LINK)
    part = replace(
        whole, uuid="MIG-1", name="NVIDIA H200 MIG 1g.18gb", memory_total_bytes=18.0 * GIB, memory_free_bytes=17.0 * GIB
    )
    other = replace(H200, uuid="GPU-b", pci_address="0000:7a:00.0")
    seen = made.read(whole, part, replace(part, uuid="MIG-2"), other)
    assert [card.uuid for card in seen.cards] == ["MIG-1", "MIG-2", "GPU-b"]
    assert noted(seen, "GPU-a", "cut into partitions", "each of the 2")
    assert noted(seen, "MIG 1g.18gb is not in the table of cards")


def test_what_is_true_of_eight_cards_is_said_once(made: Roots) -> None:
    cards = [replace(H200, uuid=f"GPU-{number}", name="NVIDIA X1", processes=None, link=None) for number in range(8)]
    notes = made.read(*cards).notes
    assert len(notes) == len(set(notes))
    assert sum("NVIDIA X1 is not in the table" in note for note in notes) == 1


def test_why_no_card_is_seen_is_a_note(made: Roots) -> None:
    report = GpuReport("nvml", problem="NVML does not start: code 9")
    assert noted(read_machine(report, proc=made.proc, sys=made.sys), "NVML does not start: code 9")


def test_cards_on_the_bus_that_nobody_reads_are_told(made: Roots) -> None:
    def pci(address: str, kind: str, vendor: str, **files: int) -> None:
        for name, text in {"class": kind, "vendor": vendor, **files}.items():
            made.write(f"sys/bus/pci/devices/{address}/{name}", f"{text}\n")

    pci("0000:6a:00.0", "0x030200", "0x10de")
    pci("0000:7a:00.0", "0x030200", "0x10de")
    pci("0000:7b:00.0", "0x030200", "0x10de")
    pci("0000:7b:00.1", "0x040300", "0x10de")  # its sound
    pci("0000:8a:00.0", "0x120000", "0x1002", mem_info_vram_total=192 * GIB, mem_info_vram_used=2 * GIB)
    pci("0000:0a:00.0", "0x030000", "0x1002", mem_info_vram_total=GIB // 2, mem_info_vram_used=0)  # in the processor
    pci("0000:01:00.0", "0x030000", "0x1a03")  # of the board's controller
    seen = made.read(H200)
    assert noted(seen, "NVIDIA cards here: 0000:7a:00.0, 0000:7b:00.0;")
    assert noted(seen, "AMD card at 0000:8a:00.0 with 190.0 GiB of 192.0 GiB free")
    assert not any(
        "0000:0a" in note or "0000:01" in note or "6a:00.0" in note or "7b:00.1" in note for note in seen.notes
    )


def test_a_card_of_the_table_has_the_memory_that_it_has_here() -> None:
    card = known_card(H200)
    assert card == replace(find_card("h200"), memory_bytes=140 * GIB)
    assert known_card(replace(H200, memory_total_bytes=None)) == find_card("h200")
    assert known_card(replace(H200, name="NVIDIA H200 MIG 1g.18gb")) is None
    assert known_card(replace(H200, name="NVIDIA H100 PCIe")) is None


# The host for the simulator and the budget


def test_what_is_not_seen_of_a_host_is_a_default_by_name(made: Roots) -> None:
    figures, assumed = host(made.read())
    assert figures == Host()
    assert [word for word in ("Memory bandwidth", "Copies", "TFLOP/s") if any(word in text for text in assumed)] == [
        "Memory bandwidth",
        "Copies",
        "TFLOP/s",
    ]
    assert len(assumed) == 3


def test_copies_get_their_share_of_the_slowest_link(made: Roots) -> None:
    made.write("sys/firmware/dmi/tables/DMI", device("ChannelA-DIMM0", "") + device("ChannelB-DIMM0", "") + END)
    slow = replace(H200, uuid="GPU-b", link=PcieLink(4, 16, 4, 16))
    figures, assumed = host(made.read(H200, slow))
    assert figures.pcie_bandwidth == pytest.approx(25e9)
    assert figures.memory_bandwidth == pytest.approx(76.8e9)
    assert len(assumed) == 1
    assert host(made.read(H200))[0].pcie_bandwidth == pytest.approx(50e9)


def test_a_chip_beside_its_processor_does_not_copy_over_pcie(made: Roots) -> None:
    seen = made.read(replace(H200, name="NVIDIA GH200 480GB"))
    assert noted(seen, "NVLink-C2C")
    assert host(seen)[0].pcie_bandwidth == Host().pcie_bandwidth
    assert any("Copies" in sentence for sentence in host(seen)[1])


# Disk, and machines that tell nothing or nonsense


def test_free_space_is_that_of_the_nearest_folder_that_exists(made: Roots, tmp_path: Path) -> None:
    disk = made.read(weights=tmp_path / "not" / "yet" / "weights").disk
    assert disk is not None
    assert disk.path == str(tmp_path)
    assert 0 <= disk.free_bytes <= disk.total_bytes
    assert made.read().disk is None


def test_space_that_cannot_be_read_is_a_note(made: Roots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(machine.os, "statvfs", refuse)
    seen = made.read(weights=tmp_path)
    assert seen.disk is None
    assert noted(seen, "Free space for weights", "Permission denied")


def test_a_machine_that_tells_nothing_is_none_throughout_and_says_so(tmp_path: Path) -> None:
    seen = Roots(tmp_path).read()
    assert {value for value in asdict(seen.memory).values() if value is not False} == {None}
    assert set(asdict(seen.processor).values()) == {None}
    assert len(seen.notes) >= 4


@settings(deadline=None)  # it writes files
@given(st.binary(max_size=200))
def test_files_full_of_anything_raise_nothing(tmp_path_factory, content: bytes) -> None:
    made = Roots(tmp_path_factory.mktemp("junk"))
    for path in ("meminfo", "cpuinfo", "self/status", "self/cgroup", "20/comm"):
        made.write(f"proc/{path}", content)
    for path in ("memory.max", "memory.current", "memory.stat", "cpu.max"):
        made.write(f"sys/fs/cgroup/{path}", content)
    for path in ("firmware/dmi/tables/DMI", "devices/system/cpu/online", "bus/pci/devices/0000:6a:00.0/max_link_speed"):
        made.write(f"sys/{path}", content)
    seen = made.read(replace(H200, link=None, processes=(GpuProcess(20, None),)))
    assert [card.name for card in seen.cards] == [H200.name]
    assert seen.memory.total_bytes is None or seen.memory.total_bytes >= 0


def test_folders_in_place_of_files_raise_nothing(tmp_path: Path) -> None:
    for path in ("proc/meminfo", "proc/self/cgroup", "sys/firmware/dmi/tables/DMI", "sys/fs/cgroup/memory.max"):
        (tmp_path / path).mkdir(parents=True)
    assert Roots(tmp_path).read().memory.total_bytes is None


def test_this_machine_can_be_read_and_written_as_json() -> None:
    seen = read_machine(NO_CARDS, weights=Path.cwd())
    assert seen.memory.total_bytes is not None
    assert seen.processor.threads is not None
    assert json.loads(json.dumps(asdict(seen), allow_nan=False))["disk"]["path"] == str(Path.cwd())


@pytest.mark.parametrize(
    ("text", "count"), [("0-3,8\n", 5), ("0", 1), ("", 0), ("3-1", 0), ("a", 0), ("0-3,", 0), ("1" * 30, 0)]
)
def test_a_list_of_the_kernel_is_counted(text: str, count: int) -> None:
    assert machine._count(text) == count
