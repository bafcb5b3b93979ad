"""The machine that a budget is made for: its cards and what is free of them, its memory and how fast it is, its links.

Nothing is measured here; everything is what driver, kernel and firmware tell, at this moment. What they do not tell is
None, and a sentence in `Machine.notes` says why and what would make it visible.

Sources: proc(5) for `meminfo`, `cpuinfo` and `status`; the kernel's "Control Group v2" and "Memory Resource Controller"
for limits, its sysfs ABI (sysfs-bus-pci, sysfs-devices-system-cpu) for links and cores; the System Management BIOS
reference specification (DMTF DSP0134 3.7, structure types 4 and 17) for processors and memory modules.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from monitor.gpu import GpuDevice, GpuProcess, GpuReport, PcieLink
from serving.cards import Card, Host, find_card
from serving.errors import ConfigError

__all__ = [
    "Disk",
    "HostMemory",
    "Machine",
    "MemorySlot",
    "Processor",
    "count_channels",
    "host",
    "known_card",
    "machine_lines",
    "read_machine",
    "read_slots",
]

_PROC: Final = Path("/proc")
_SYS: Final = Path("/sys")
_MAX_FILE_BYTES: Final = 4 * 2**20
"""Larger than any SMBIOS table or kernel file read here."""
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class MemorySlot:
    """A place for a memory module, as the firmware describes it; None is what it does not tell.

    Attributes:
        locator: the slot's name on the board.
        bank: the name of the bank it belongs to; firmware puts socket and channel into either of the two.
        size_bytes: of the module; 0 is an empty slot.
        technology: DDR4, LPDDR5 and so on.
        megatransfers_per_second: as configured, else as the module is rated.
        width_bits: of its data, without error correction.
    """

    locator: str
    bank: str
    size_bytes: int | None
    technology: str | None = None
    megatransfers_per_second: int | None = None
    width_bits: int | None = None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Main memory. Limits of a container are in `total_bytes` and `available_bytes` already.

    Attributes:
        installed_bytes: what the kernel manages.
        limit_bytes: of this process's control groups, where that is less; None is no limit.
        total_bytes: what this process can have at most: the smaller of both.
        available_bytes: what can be had now without swapping, within the limit.
        swap_total_bytes: swap space, within the limit.
        swap_free_bytes: the part of it that is not in use.
        slots: places for modules; None where the firmware's table cannot be read.
        channels: in use, all sockets together.
        channels_are_counted: False where slots do not name their channel: `channels` is then the number of modules,
            which is an upper bound.
        megatransfers_per_second: of the slowest module.
        bandwidth_bytes_per_second: at peak: channels x width x transfers.
    """

    installed_bytes: int | None
    limit_bytes: int | None
    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    slots: tuple[MemorySlot, ...] | None = None
    channels: int | None = None
    channels_are_counted: bool = False
    megatransfers_per_second: int | None = None
    bandwidth_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Processor:
    """The processors, all sockets together.

    Attributes:
        name: as the maker writes it.
        cores: physical ones.
        threads: hardware threads.
        usable_threads: of those, what this process may use: by its affinity and the quota of its control groups.
    """

    name: str | None
    cores: int | None
    threads: int | None
    usable_threads: float | None


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that weights lie on, or will.

    Attributes:
        path: the folder that was looked at: the one asked for, or the nearest above it that exists.
        total_bytes: size of the file system.
        free_bytes: what a user other than root can write.
    """

    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a model finds here.

    Attributes:
        cards: cards and partitions that a model can use. Where a card shares main memory, that is its memory here.
        memory: main memory.
        processor: the processors.
        disk: where the weights are; None where nobody asked, or the path cannot be read.
        notes: what is not known, and what to keep in mind about what is; sentences for people.
    """

    cards: tuple[GpuDevice, ...]
    memory: HostMemory
    processor: Processor
    disk: Disk | None
    notes: tuple[str, ...]


def read_machine(gpus: GpuReport, *, weights: Path | None = None, proc: Path = _PROC, sys: Path = _SYS) -> Machine:
    """Look at the machine that this process runs on.

    Args:
        gpus: its cards, of `monitor.gpu.describe_gpus`.
        weights: file or folder of weights, which need not exist yet.
        proc: root of the proc file system.
        sys: root of the sys file system.
    """
    notes: list[str] = [] if gpus.problem is None else [f"Cards ({gpus.source}): {gpus.problem}."]
    table = _read_firmware(sys)
    memory = _memory(table, proc, sys, notes)
    cards = tuple(_complete(device, memory, proc, sys, notes) for device in _usable(gpus.devices, notes))
    notes.extend(_unread_cards({device.pci_address for device in gpus.devices}, sys))
    processor = _processor(table, proc, sys, notes)
    disk = None if weights is None else _disk(weights, notes)
    return Machine(cards, memory, processor, disk, tuple(dict.fromkeys(notes)))  # eight cards of a kind say it once


def known_card(device: GpuDevice) -> Card | None:
    """Bandwidth and speed of a card by its name, with the total memory that it has here; None where it is not known.

    A partition is no card of the table: it has a share of the bandwidth and of the speed.
    """
    try:
        card = find_card(device.name)
    except ConfigError:
        return None
    return card if device.memory_total_bytes is None else replace(card, memory_bytes=int(device.memory_total_bytes))


def host(machine: Machine) -> tuple[Host, tuple[str, ...]]:
    """The machine as the simulator and the budget take it, and a sentence for each figure that was not seen here.

    Copies to a card get the share of the link's speed that they get on the default host. Several cards count with the
    slowest link.
    """
    default, assumed = Host(), []
    memory = machine.memory
    bandwidth = memory.bandwidth_bytes_per_second
    if bandwidth is None:
        bandwidth = default.memory_bandwidth
        assumed.append(f"Memory bandwidth {_gigabytes(bandwidth)} is a default (two channels of DDR5-5200).")
    elif not memory.channels_are_counted:
        assumed.append(f"Memory bandwidth {_gigabytes(bandwidth)} is an upper bound: one channel for each module.")
    links = [
        card.link.bytes_per_second
        for card in machine.cards
        if card.link is not None and card.link.bytes_per_second is not None and not _SHORT_WAY.search(card.name)
    ]
    if links:
        pcie = min(links) * default.pcie_bandwidth / _DEFAULT_LINK_BYTES_PER_SECOND
    else:
        pcie = default.pcie_bandwidth
        assumed.append(f"Copies to a card at {_gigabytes(pcie)} are a default (PCIe 4.0 x16).")
    assumed.append(f"{default.flops / 1e12:g} TFLOP/s of the processor are a default: no table gives them.")
    return replace(default, memory_bandwidth=bandwidth, pcie_bandwidth=pcie), tuple(assumed)


def machine_lines(machine: Machine) -> Iterator[tuple[str, str]]:
    """Label and text of each line about a machine, for people."""
    for card in machine.cards:
        free = _free(card.memory_free_bytes, card.memory_total_bytes)
        yield "GPU", f"{card.name} ({card.uuid}): {free}{_link_text(card.link)}"
        for process in card.processes or ():
            amount = "" if process.used_bytes is None else f", {_gib(process.used_bytes)}"
            yield "", f"in use by {process.name or 'a process'} (pid {process.pid}){amount}"
    if not machine.cards:
        yield "GPU", "none seen"
    memory, processor = machine.memory, machine.processor
    speed = ""
    if memory.bandwidth_bytes_per_second is not None:
        most = "" if memory.channels_are_counted else "at most "
        speed = f", {most}{memory.channels} channels at {memory.megatransfers_per_second} MT/s"
        speed += f" = {_gigabytes(memory.bandwidth_bytes_per_second)}"
    yield "memory", _free(memory.available_bytes, memory.total_bytes) + speed
    cores = f"{processor.cores or 'unknown'} cores, {processor.threads or 'unknown'} threads"
    usable = "" if processor.usable_threads is None else f", {processor.usable_threads:g} usable"
    yield "processor", f"{processor.name or 'unknown'}: {cores}{usable}"
    for note in machine.notes:
        yield "", note


def _free(free_bytes: float | None, total_bytes: float | None) -> str:
    if free_bytes is None or total_bytes is None:
        return "memory not told"
    return f"{free_bytes / _GIB:.1f} of {_gib(total_bytes)} free"


def _link_text(link: PcieLink | None) -> str:
    if link is None or link.bytes_per_second is None:
        return ""
    generation, width = link.max_generation or link.generation, link.width or link.max_width
    return f", PCIe {generation}.0 x{width} = {_gigabytes(link.bytes_per_second)}"


_DEFAULT_LINK_BYTES_PER_SECOND: Final = PcieLink(max_generation=4, max_width=16).bytes_per_second or 0.0
"""Of the default host, whose copies reach 25 GB/s."""


# Cards

_NO_OWN_MEMORY: Final = re.compile(r"\b(GB10|Tegra|Xavier|Orin|Thor|Jetson)\b", re.IGNORECASE)
"""Names of chips whose GPU works in main memory. Only these are taken for such: a lost card tells no memory either."""
_SHORT_WAY: Final = re.compile(rf"\b(GH200|GB200|GB300)\b|{_NO_OWN_MEMORY.pattern}", re.IGNORECASE)
"""Names of cards that reach main memory past their PCIe link."""
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The kernel's fixed number (PROC_PID_INIT_INO) of the namespace that the host's processes live in."""
_UNSEEN_BYTES: Final = _GIB
"""Memory in use beyond that of known processes, from which on others are likely: a driver alone takes less."""
_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GENERATIONS: Final = MappingProxyType({2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6})
"""PCIe generation by GT/s."""
_AMD, _NVIDIA = "0x1002", "0x10de"
_BUILT_IN_BYTES: Final = 4 * _GIB
"""Graphics inside a processor has less memory of its own than this, and nobody means them by a card."""


def _usable(devices: Iterable[GpuDevice], notes: list[str]) -> list[GpuDevice]:
    """Without cards that are cut into partitions: these are listed on their own."""
    devices = tuple(devices)
    parts = [device for device in devices if device.uuid.startswith("MIG-")]
    usable = []
    for device in devices:
        its = [part for part in parts if part.pci_address is not None and part.pci_address == device.pci_address]
        if its and device not in parts:
            notes.append(f"{_title(device)} is cut into partitions (MIG); each of the {len(its)} counts as a card.")
        else:
            usable.append(device)
    return usable


def _complete(device: GpuDevice, memory: HostMemory, proc: Path, sys: Path, notes: list[str]) -> GpuDevice:
    """With the names of processes, and what its driver leaves to the kernel to tell."""
    total, free = device.memory_total_bytes, device.memory_free_bytes
    shares = total is None and _NO_OWN_MEMORY.search(device.name) is not None
    if shares:
        total, free = _float(memory.total_bytes), _float(memory.available_bytes)
        notes.append(f"{device.name} has no memory of its own: it shares main memory with all that runs here.")
    elif total is None or free is None:
        notes.append(f"{device.name} does not tell how much of its memory is free; give it with --gpu-memory.")
    link = _link(device, sys)
    if not shares and link is None:
        notes.append(
            f"The PCIe link of {device.name} is not told, as is usual in a virtual machine; look for it on the host "
            "with lspci -vv (LnkSta)."
        )
    elif not shares and _SHORT_WAY.search(device.name):
        notes.append(
            f"{device.name} reaches main memory over NVLink-C2C, not over its PCIe link; that speed is not told."
        )
    elif link is not None and link.width and link.max_width and link.width < link.max_width:
        notes.append(
            f"{_title(device)} uses {link.width} of {link.max_width} PCIe lanes, and copies to it are slower by as "
            "much: try another slot, or seat the card anew."
        )
    if known_card(device) is None:
        notes.append(f"{device.name} is not in the table of cards: its bandwidth and speed are not known.")
    processes = None
    if device.processes is None:
        notes.append(f"The driver does not list the processes that use {device.name}.")
    else:
        processes = _named(device.processes, proc)
        if any(process.name is None for process in processes):
            notes.append(
                "Not every process that uses a card can be named: it has ended, or lives outside this container (run "
                "where the host's processes are seen, as with --pid=host)."
            )
        notes.extend(_unseen_use(device))
    return replace(device, memory_total_bytes=total, memory_free_bytes=free, link=link, processes=processes)


def _named(processes: Iterable[GpuProcess], proc: Path) -> tuple[GpuProcess, ...]:
    """With the kernel's names (comm), never the command line: that may hold a key.

    A driver may count as the host does while this is a container with numbers of its own, in which the same number is
    another process. There only a process that has a device of the driver open is taken for the one that is meant.
    """
    is_host = False
    with suppress(OSError):
        is_host = str((proc / "self" / "ns" / "pid").readlink()) == _FIRST_PID_NAMESPACE
    named = []
    for process in processes:
        folder = proc / str(process.pid)
        name = _clean(_read(folder / "comm")) or None
        named.append(replace(process, name=name if is_host or _has_device_open(folder) else None))
    return tuple(named)


def _has_device_open(process: Path) -> bool:
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                if str(descriptor.readlink()).startswith("/dev/nvidia"):
                    return True
    return False


def _unseen_use(device: GpuDevice) -> Iterator[str]:
    amounts = [process.used_bytes for process in device.processes or ()]
    if device.memory_used_bytes is None or None in amounts:
        return
    unseen = device.memory_used_bytes - sum(amount for amount in amounts if amount is not None)
    if unseen >= _UNSEEN_BYTES:
        yield (
            f"{_gib(unseen)} in use on {_title(device)} belong to no process that the driver names here, which are "
            "those of other containers as a rule; run nvidia-smi on the host."
        )


def _link(device: GpuDevice, sys: Path) -> PcieLink | None:
    """What the driver tells, and for the rest the kernel: at most is what both ends of the link can do."""
    told = device.link or PcieLink()
    address = device.pci_address or ""
    if _PCI_ADDRESS.fullmatch(address):
        folder = sys / "bus" / "pci" / "devices" / address
        with suppress(OSError):
            folder = folder.resolve()
        ends = (folder, folder.parent)
        told = PcieLink(
            generation=told.generation or _generation(folder / "current_link_speed"),
            width=told.width or _width(folder / "current_link_width"),
            max_generation=told.max_generation or _least(_generation(end / "max_link_speed") for end in ends),
            max_width=told.max_width or _least(_width(end / "max_link_width") for end in ends),
        )
    return None if told == PcieLink() else told


def _generation(path: Path) -> int | None:
    match = re.match(r"\d{1,3}(\.\d)?(?= GT/s)", _read(path))
    return _GENERATIONS.get(float(match[0])) if match else None


def _width(path: Path) -> int | None:
    width = _whole(_read(path))
    return width if width is not None and 1 <= width <= 32 else None  # 0, 63 and 255 stand for no link


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _unread_cards(known: set[str | None], sys: Path) -> Iterator[str]:
    """Sentences on cards that the bus has and the report has not."""
    unseen = []
    for folder in _folders(sys / "bus" / "pci" / "devices"):
        if folder.name in known or not _read(folder / "class").startswith(("0x03", "0x12")):
            continue
        vendor = _read(folder / "vendor").strip()
        if vendor == _NVIDIA:
            unseen.append(folder.name)
        elif vendor == _AMD:
            total = _whole(_read(folder / "mem_info_vram_total"))
            used = _whole(_read(folder / "mem_info_vram_used"))
            if total is not None and total < _BUILT_IN_BYTES:
                continue
            memory = "" if total is None or used is None else f" with {_gib(total - used)} of {_gib(total)} free"
            yield f"The AMD card at {folder.name}{memory} is not read: name it with --gpu, or give --gpu-memory."
    if unseen:
        yield (
            f"The driver does not show these NVIDIA cards here: {', '.join(unseen)}; it is not loaded, or this "
            "container was not given them."
        )


# Memory

_DMI_TABLE: Final = Path("firmware/dmi/tables/DMI")
_PROCESSOR, _MEMORY_DEVICE, _END = 4, 17, 127
_TECHNOLOGIES: Final = MappingProxyType(
    {0x12: "DDR", 0x13: "DDR2", 0x18: "DDR3", 0x1A: "DDR4", 0x1B: "LPDDR", 0x1C: "LPDDR2", 0x1D: "LPDDR3"}
    | {0x1E: "LPDDR4", 0x20: "HBM", 0x21: "HBM2", 0x22: "DDR5", 0x23: "LPDDR5", 0x24: "HBM3"}
)
"""Values of "Memory Type"."""
_NO_RAM: Final = frozenset({0x08, 0x09, 0x0A, 0x0B, 0x0C, 0x1F})
"""Values of "Memory Type" that are ROM, flash and the like: the chip that holds the firmware, say."""
_PERSISTENT: Final = frozenset({5, 6, 7})
"""Values of "Memory Technology" that are no DRAM."""
_NO_FIGURE: Final = 0xFFFF


@dataclass(frozen=True, slots=True)
class _Structure:
    """One structure of an SMBIOS table."""

    kind: int
    data: bytes
    strings: tuple[str, ...]

    def number(self, offset: int, size: int) -> int | None:
        """An unsigned number; None in a structure that ends before it, as those of older firmware do."""
        field = self.data[offset : offset + size]
        return int.from_bytes(field, "little") if len(field) == size else None

    def text(self, offset: int) -> str:
        index = self.number(offset, 1) or 0
        return self.strings[index - 1] if 0 < index <= len(self.strings) else ""


def _structures(table: bytes) -> Iterator[_Structure]:
    """Of an SMBIOS table without its entry point; what follows a broken one is lost with it."""
    at = 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        end = at + length
        if length < 4 or end > len(table):
            return
        stop = table.find(b"\0\0", end)
        stop = len(table) if stop < 0 else stop
        strings = tuple(_clean(text.decode("utf-8", "replace")) for text in table[end:stop].split(b"\0"))
        yield _Structure(kind, table[at:end], strings)
        if kind == _END:
            return
        at = stop + 2


def read_slots(table: bytes) -> tuple[MemorySlot, ...]:
    """The memory slots of an SMBIOS table (structures of type 17); bytes that are none give no slots.

    Slots for other memory (firmware's flash, persistent memory) are left out.
    """
    return tuple(slot for structure in _structures(table) if (slot := _slot(structure)) is not None)


def _slot(structure: _Structure) -> MemorySlot | None:
    number = structure.number
    if structure.kind != _MEMORY_DEVICE or number(0x12, 1) in _NO_RAM or number(0x28, 1) in _PERSISTENT:
        return None
    size = number(0x0C, 2)
    if size == 0x7FFF:
        size_bytes = (number(0x1C, 4) or 0) * 2**20 or None
    elif size is None or size == _NO_FIGURE:
        size_bytes = None
    else:
        size_bytes = (size & 0x7FFF) * (2**10 if size & 0x8000 else 2**20)
    width = number(0x0A, 2)
    return MemorySlot(
        locator=structure.text(0x10),
        bank=structure.text(0x11),
        size_bytes=size_bytes,
        technology=_TECHNOLOGIES.get(number(0x12, 1) or 0),
        megatransfers_per_second=_speed(structure, 0x20, 0x58) or _speed(structure, 0x15, 0x54),
        width_bits=width if width is not None and 0 < width <= 1024 and width % 8 == 0 else None,
    )


def _speed(structure: _Structure, offset: int, extended: int) -> int | None:
    speed = structure.number(offset, 2)
    if speed == _NO_FIGURE:  # too large for the old field, or not known
        speed = structure.number(extended, 4)
    return speed if speed is not None and 100 <= speed <= 100_000 else None


_CHANNEL: Final = re.compile(r"(?<![a-z])ch(?:an(?:nel)?)?[\s_-]*([a-z]|\d+)(?![a-z])", re.IGNORECASE)
"""ChannelA-DIMM0, P0 CHANNEL A, Channel-0-DIMM-0, P0_Node0_Channel6_Dimm1."""
_PLACE: Final = re.compile(r"(?<![a-z])(cpu|proc|p|node|socket|controller|mc|die)[\s_-]*(\d+)", re.IGNORECASE)
"""What a channel belongs to: CPU1_DIMM_A1, P2-DIMMB1, Controller0-DIMMA2, NODE 1."""
_LETTER: Final = re.compile(r"(?<![a-z])dimm[\s_-]*(?:p\d+[\s_-]*)?([a-z])\d*$", re.IGNORECASE)
"""DIMM_A1, DIMMA2, DIMM_P0_A0: the letter of a channel, or on some makers' boards of a socket."""


def count_channels(slots: Iterable[MemorySlot], sockets: int | None = None) -> tuple[int, bool]:
    """Memory channels in use, and whether they could be counted; else the number of modules, an upper bound.

    Slots are named as every maker likes. They count where each module's name or bank says "channel", or has a letter
    that cannot be that of a socket: another word names the socket, or the board has one socket and several letters.

    Args:
        slots: all of the board.
        sockets: processors that the board has room for; None is not known.
    """
    slots = tuple(slots)
    modules = [slot for slot in slots if slot.size_bytes != 0]
    letters = {match[1].upper() for slot in slots if (match := _LETTER.search(slot.locator))}
    channels: set[tuple[object, ...]] = set()
    for slot in modules:
        names = (slot.locator, slot.bank)
        place = tuple(sorted({(word.lower(), int(digits)) for name in names for word, digits in _PLACE.findall(name)}))
        channel = next((match[1].upper() for name in names if (match := _CHANNEL.search(name))), None)
        letter = _LETTER.search(slot.locator)
        if channel is None and letter is not None and (place or (sockets == 1 and len(letters) > 1)):
            channel = letter[1].upper()
        if channel is None:
            return len(modules), False
        channels.add((place, channel))
    # Firmware that gives all slots one name has told nothing.
    is_told = len({(slot.locator, slot.bank) for slot in modules}) == len(modules)
    return (len(channels), True) if is_told else (len(modules), False)


def _read_firmware(sys: Path) -> tuple[_Structure, ...] | str:
    """The SMBIOS table, or a sentence that says why there is none."""
    try:
        with (sys / _DMI_TABLE).open("rb") as file:
            table = tuple(_structures(file.read(_MAX_FILE_BYTES)))
    except PermissionError:
        return "Speed and channels of main memory are readable by root alone: run this once as root (sudo)."
    except OSError:
        return (
            "Speed and channels of main memory are not visible: there is no SMBIOS table here, as in many virtual "
            "machines and containers."
        )
    return table or "Speed and channels of main memory are not visible: the SMBIOS table is broken."


def _memory(table: tuple[_Structure, ...] | str, proc: Path, sys: Path, notes: list[str]) -> HostMemory:
    fields = _numbers(_read(proc / "meminfo"))
    installed, available = fields.get("MemTotal"), fields.get("MemAvailable")
    if installed is None or available is None:
        notes.append(f"Size of main memory is not visible: {proc / 'meminfo'} does not tell it.")
    limit, room, swap_limit, swap_room = _memory_limits(proc, sys)
    if limit is not None and installed is not None and limit >= installed:
        limit = None
    if limit is not None:
        notes.append(f"A control group limits this process to {_gib(limit)} of main memory.")
    memory = HostMemory(
        installed_bytes=installed,
        limit_bytes=limit,
        total_bytes=_least((installed, limit)),
        available_bytes=None if available is None else _least((available, room)),
        swap_total_bytes=None if "SwapTotal" not in fields else _least((fields["SwapTotal"], swap_limit)),
        swap_free_bytes=None if "SwapFree" not in fields else _least((fields["SwapFree"], swap_room)),
    )
    if isinstance(table, str):
        notes.append(table)
        return memory
    slots = tuple(slot for structure in table if (slot := _slot(structure)) is not None)
    return _with_speed(replace(memory, slots=slots), slots, _sockets(table), notes)


def _with_speed(memory: HostMemory, slots: tuple[MemorySlot, ...], sockets: int | None, notes: list[str]) -> HostMemory:
    modules = [slot for slot in slots if slot.size_bytes != 0]
    speeds = {slot.megatransfers_per_second for slot in modules}
    if not modules or None in speeds:
        notes.append("Speed of main memory is not visible: the firmware does not tell it, as in virtual machines.")
        return memory
    channels, are_counted = count_channels(slots, sockets)
    speed = min(speed for speed in speeds if speed is not None)
    widths = {slot.width_bits for slot in modules}
    if None in widths:
        notes.append("Memory modules do not tell their width; each channel is taken for 64 bits.")
    width = min(width or 64 for width in widths)
    if len(speeds) > 1 or len(widths) > 1:
        notes.append("Memory modules differ in speed or width; all count like the slowest and narrowest.")
    if not are_counted:
        notes.append(
            f"Names of memory slots ({modules[0].locator or 'empty'}) do not tell their channel: memory bandwidth is "
            f"an upper bound, with one channel for each of the {channels} modules."
        )
    if sockets is not None and sockets > 1:
        notes.append(f"Memory bandwidth is that of all {sockets} sockets; what runs on one of them has its share.")
    return replace(
        memory,
        channels=channels,
        channels_are_counted=are_counted,
        megatransfers_per_second=speed,
        bandwidth_bytes_per_second=channels * width / 8 * speed * 1e6,
    )


def _memory_limits(proc: Path, sys: Path) -> tuple[int | None, int | None, int | None, int | None]:
    """(memory, what is left of it, swap, what is left of it) by the tightest of the control groups above this process.

    Cached files count as use of a group, but go when memory is needed, as far as they are inactive.
    """
    limits: list[int] = []
    rooms: list[int] = []
    swap_limits: list[int] = []
    swap_rooms: list[int] = []
    for group in _control_groups("memory", proc, sys):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _whole(_read(group / limit_name)), _whole(_read(group / used_name))
            if limit is not None:
                limits.append(limit)
                if used is not None:
                    cache = _numbers(_read(group / "memory.stat")).get(cache_name, 0)
                    rooms.append(max(0, limit - max(0, used - cache)))
        limit, used = _whole(_read(group / "memory.swap.max")), _whole(_read(group / "memory.swap.current"))
        if limit is not None:
            swap_limits.append(limit)
            swap_rooms.append(max(0, limit - (used or 0)))
    return _least(limits), _least(rooms), _least(swap_limits), _least(swap_rooms)


def _control_groups(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """Folders of this process's control groups of both versions, its own first.

    A container may see the path that its group has on the host, of which nothing is mounted but the end: the root of
    the mount is then the container's own group, and the folders between are missing.
    """
    root = sys / "fs" / "cgroup"
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controller if (root / controller).is_dir() else root / controllers
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


# Processor and disk


def _sockets(table: tuple[_Structure, ...]) -> int | None:
    """Places for central processors on the board, used or not."""
    return sum(structure.kind == _PROCESSOR and structure.number(0x05, 1) == 3 for structure in table) or None


def _processor(table: tuple[_Structure, ...] | str, proc: Path, sys: Path, notes: list[str]) -> Processor:
    info = _read(proc / "cpuinfo")
    match = re.search(r"^model name\s*:(.+)$", info, re.MULTILINE)
    name = _clean(match[1]) if match else ""
    if not name and not isinstance(table, str):  # Arm's kernel has no names of models
        name = next(
            (text for structure in table if structure.kind == _PROCESSOR and (text := structure.text(0x10))), ""
        )
    if not name:
        notes.append("The name of the processor is not visible; as root, the firmware's table may tell it.")
    folder = sys / "devices" / "system" / "cpu"
    threads = _count(_read(folder / "online")) or len(re.findall(r"^processor\s*:", info, re.MULTILINE)) or None
    siblings = {
        text
        for place in _folders(folder)
        if re.fullmatch(r"cpu\d+", place.name) and (text := _read(place / "topology" / "thread_siblings_list").strip())
    }
    if threads is None:
        notes.append("The number of processor threads is not visible.")
    status = re.search(r"^Cpus_allowed_list:\s*(\S+)", _read(proc / "self" / "status"), re.MULTILINE)
    allowed = [float(count) for count in (threads, _count(status[1]) if status else None) if count]
    allowed.extend(_processor_quotas(proc, sys))
    return Processor(name or None, len(siblings) or None, threads, min(allowed, default=None))


def _processor_quotas(proc: Path, sys: Path) -> Iterator[float]:
    """Processors that control groups grant: time in each period."""
    for group in _control_groups("cpu", proc, sys):
        newer = _read(group / "cpu.max").split()
        older = [_read(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        for granted in (newer, older):
            if len(granted) == 2:
                quota, period = _whole(granted[0]), _whole(granted[1])
                if quota and period:
                    yield quota / period


def _disk(path: Path, notes: list[str]) -> Disk | None:
    place = path.absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        figures = os.statvfs(place)
    except OSError as error:
        notes.append(f"Free space for weights is not visible: {_clean(str(error))}.")
        return None
    block = figures.f_frsize
    return Disk(str(place), figures.f_blocks * block, figures.f_bavail * block)


# Reading and writing figures


def _read(path: Path) -> str:
    """A small file's text; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _whole(text: str) -> int | None:
    """A decimal number of the kernel; None for its words ("max", "-1") and for what has more digits than it writes."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


def _numbers(text: str) -> dict[str, int]:
    """Lines `name: 12 kB` or `name 12` as bytes and numbers."""
    found = re.findall(r"^([\w()]+):?[ \t]+(\d{1,20})( kB)?$", text, re.MULTILINE | re.ASCII)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in found}


def _count(ranges: str) -> int:
    """Members of a kernel's list like `0-3,8`; 0 when it is none."""
    total = 0
    for part in ranges.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        if match is None:
            return 0
        total += max(0, int(match[2] or match[1]) - int(match[1]) + 1)
    return total


def _clean(text: str) -> str:
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def _title(device: GpuDevice) -> str:
    return f"{device.name} ({device.uuid})"


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f} GiB"


def _gigabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
