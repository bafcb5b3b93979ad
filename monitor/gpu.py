"""GPU memory and load by GPU: from NVML, from an exporter that speaks DCGM's names, or not at all.

A card that cannot say something (unified memory has no frame buffer, a partition has no power meter) lacks that signal;
a card that is lost is absent. No reader raises when the driver fails: the engine's own metrics are worth having alone.
"""

import asyncio
import importlib
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from serving import exposition
from serving.conversation import Conversation, HttpAnswer, HttpRequest
from serving.errors import ConfigError

__all__ = [
    "BoundedCall",
    "DcgmReader",
    "GpuDevice",
    "GpuProcess",
    "GpuReader",
    "GpuReport",
    "NoGpuReader",
    "NvmlReader",
    "PcieLink",
    "describe_gpus",
    "gpu_reader",
]

GpuValues: TypeAlias = dict[str, dict[str, float]]
"""GPU uuid to signal to value; signals are those of scope GPU in `serving.signals`."""

T = TypeVar("T")


_LANE_BYTES_PER_SECOND: Final = MappingProxyType(
    {
        1: 2.5e9 * 8 / 10 / 8,
        2: 5e9 * 8 / 10 / 8,
        3: 8e9 * 128 / 130 / 8,
        4: 16e9 * 128 / 130 / 8,
        5: 32e9 * 128 / 130 / 8,
        6: 64e9 * 242 / 256 / 8,
    }
)
"""Of one PCIe lane in one direction by generation: transfers a second without line coding (6.0: without checks)."""


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A card's link to its machine, now and at most with this card in this slot; None is what is not told.

    An idle card lets its link fall back to a low generation and keeps its lanes, so that the generation seen now says
    little, and lanes that are missing now are missing under load.
    """

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """Of the link under load, in one direction: the lanes in use now at the highest generation."""
        return _link_speed(self.max_generation or self.generation, self.width or self.max_width)

    @property
    def max_bytes_per_second(self) -> float | None:
        """Of the link if all its lanes were in use, in one direction."""
        return _link_speed(self.max_generation, self.max_width)


def _link_speed(generation: int | None, width: int | None) -> float | None:
    lane = _LANE_BYTES_PER_SECOND.get(generation or 0)
    return None if lane is None or width is None else lane * width


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    """As the driver counts: in a container it may be the host's number."""
    used_bytes: float | None
    """None where the driver does not tell."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU, or one memory partition (MIG) of one; None is what it or its driver does not tell."""

    uuid: str
    name: str
    memory_total_bytes: float | None
    """None also where the card has no memory of its own (unified memory)."""
    memory_used_bytes: float | None = None
    memory_free_bytes: float | None = None
    """What a program can get: less than total - used, as the driver keeps a part."""
    pci_address: str | None = None
    """As the kernel writes it: 0000:65:00.0. A partition has that of its card."""
    link: PcieLink | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """In a container, often only its own."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What a reader found; `problem` says why it found nothing, or which card is missing."""

    source: str
    devices: tuple[GpuDevice, ...] = ()
    problem: str | None = None


class GpuReader(Protocol):
    """Reads all GPUs it can see; never raises for what a GPU or driver does."""

    async def read(self) -> GpuValues:
        """Signals of every GPU that answered, by uuid."""
        ...

    async def describe(self) -> GpuReport:
        """What is there, for people; reads once."""
        ...

    async def close(self) -> None:
        """Let go of the driver or the connection."""
        ...


def gpu_reader(source: str = "auto") -> GpuReader:
    """The reader for what a user names: `auto` (NVML), `none`, or the URL of a DCGM-style exporter.

    Raises:
        ConfigError: neither of these.
    """
    if source in {"auto", "nvml"}:
        return NvmlReader()
    if source == "none":
        return NoGpuReader()
    if ":" not in source:
        raise ConfigError(
            f"GPU source {source!r} is unknown; use auto, nvml, none, or a URL like http://127.0.0.1:9400/metrics"
        )
    return DcgmReader(source)


async def describe_gpus(source: str = "auto") -> GpuReport:
    """What a reader of `source` (see `gpu_reader`) finds; opened for this and closed again.

    Raises:
        ConfigError: the source is unknown.
    """
    reader = gpu_reader(source)
    try:
        return await reader.describe()
    finally:
        await reader.close()


class BoundedCall:
    """Runs blocking calls, one at a time, and waits for each no longer than a deadline.

    A call into a wedged driver or file system may never return and cannot be ended. It then keeps its one thread, which
    does not hold up the program's exit, and no second one is started beside it. What it returns too late is thrown
    away: it would be old when it is seen.

    Args:
        deadline_s: seconds to wait for a call.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.is_stuck = False
        """Whether a call has not returned by its deadline and still runs."""

    async def run(self, call: Callable[[], T], deadline_s: float | None = None) -> T | None:
        """What `call` returns or raises, or None when it is late or an earlier one is still running.

        `deadline_s` replaces the usual deadline for this call.
        """
        if self.is_stuck:
            return None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type] # T may itself allow None

        def work() -> None:
            result, error = None, None
            try:
                result = call()
            except Exception as caught:  # noqa: BLE001 - carried over to the caller, whatever it is
                error = caught
            finally:
                self.is_stuck = False
            with suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
                loop.call_soon_threadsafe(settle, result, error)

        self.is_stuck = True  # until it has returned, so that a cancelled wait does not let a second one in
        threading.Thread(target=work, daemon=True).start()
        try:
            return await asyncio.wait_for(future, self.deadline_s if deadline_s is None else deadline_s)
        except TimeoutError:
            return None


class NoGpuReader:
    """No GPU is wanted."""

    async def read(self) -> GpuValues:
        """Nothing."""
        return {}

    async def describe(self) -> GpuReport:
        """Says so."""
        return GpuReport("none")

    async def close(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True, slots=True)
class _Card:
    uuid: str
    name: str
    handle: Any
    board: Any
    """The whole card: a partition has neither address nor link of its own."""
    has_memory: bool = True
    """False for a card cut into partitions: its memory is counted there."""


# Error codes of nvml.h, part of NVML's stable interface. These say that this card, driver or user has no such figure.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 2, 3, 4, 6
_FUNCTION_NOT_FOUND, _NO_DATA, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED = 13, 21, 25, 26
_NO_SUCH_FIGURE = frozenset(
    {_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND}
    | {_FUNCTION_NOT_FOUND, _NO_DATA, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED}
)
_LONGEST_WAIT_READS = 60
_DESCRIBE_DEADLINE_S = 10.0
"""The first start of NVML wakes every card; without the persistence daemon that takes seconds."""


class NvmlReader:
    """Reads GPUs through NVML, the library of NVIDIA's driver.

    Any error that is not "this card has no such figure" (a lost card, a driver that was unloaded or updated, a
    container that lost its device nodes) makes the reader start NVML anew: at the next read, then after pauses that
    double up to 60 reads. Other cards are read on meanwhile. Nothing is done before the first read, so that a fork
    before it does no harm.

    Args:
        nvml: the module to use instead of `pynvml`, which is imported at the first read.
        deadline_s: seconds to wait for the driver.
    """

    def __init__(self, nvml: ModuleType | None = None, deadline_s: float = 1.0) -> None:
        self._nvml: Any = nvml
        self._call = BoundedCall(deadline_s)
        self._cards: tuple[_Card, ...] = ()
        self._is_open = False
        self._failures = 0
        self._reads_until_start: int | None = 0
        """None: NVML works, no start is due."""
        self._problem: str | None = None

    async def read(self) -> GpuValues:
        """Signals of every GPU that answered; nothing while the driver does not return."""
        return await self._call.run(self._collect) or {}

    async def describe(self) -> GpuReport:
        """The cards NVML sees, or why it sees none."""
        report = await self._call.run(self._inspect, deadline_s=max(self._call.deadline_s, _DESCRIBE_DEADLINE_S))
        return report or GpuReport("nvml", problem="the NVIDIA driver does not answer")

    async def close(self) -> None:
        """Shut NVML down."""
        await self._call.run(self._shut_down)

    # All below runs in the worker thread, never twice at once.

    def _collect(self) -> GpuValues:
        if not self._has_module():
            return {}
        failed: list[str] = []
        waiting = bool(self._reads_until_start)
        if self._reads_until_start is not None:
            if waiting:
                self._reads_until_start -= 1
            else:
                failed.extend(self._start())
        values: GpuValues = {}
        readable: list[_Card] = []
        for card in self._cards:
            try:
                of_card = self._read_card(card)
            except self._nvml.NVMLError as error:
                failed.append(f"{card.uuid} ({card.name}): {error}")
                continue
            readable.append(card)
            if of_card:
                values[card.uuid] = of_card
        self._cards = tuple(readable)
        if failed:
            self._problem = "; ".join(failed)
        if failed and not waiting:
            self._reads_until_start = min(2**self._failures - 1, _LONGEST_WAIT_READS)
            self._failures = min(self._failures + 1, 10)
        elif not waiting:
            self._failures, self._reads_until_start, self._problem = 0, None, None
        return values

    def _inspect(self) -> GpuReport:
        values = self._collect()
        devices = tuple(self._device(card, values.get(card.uuid, {})) for card in self._cards)
        return GpuReport("nvml", devices, self._problem)

    def _device(self, card: _Card, values: dict[str, float]) -> GpuDevice:
        nvml, board = self._nvml, card.board
        total = values.get("gpu_memory_total_bytes")
        memory = None if total is None else self._told(self._memory, card.handle)
        place = self._told(nvml.nvmlDeviceGetPciInfo_v3, board)
        link = PcieLink(
            generation=self._told(nvml.nvmlDeviceGetCurrPcieLinkGeneration, board) or None,
            width=self._told(nvml.nvmlDeviceGetCurrPcieLinkWidth, board) or None,
            max_generation=self._told(nvml.nvmlDeviceGetMaxPcieLinkGeneration, board) or None,
            max_width=self._told(nvml.nvmlDeviceGetMaxPcieLinkWidth, board) or None,
        )
        return GpuDevice(
            uuid=card.uuid,
            name=card.name,
            memory_total_bytes=total,
            memory_used_bytes=values.get("gpu_memory_used_bytes"),
            memory_free_bytes=None if memory is None else float(memory.free),
            pci_address=None if place is None else _pci_address(_text(place.busId)),
            link=None if link == PcieLink() else link,
            processes=self._processes(card.handle) if card.has_memory else None,
        )

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """Version 3 where there is one. pynvml's unversioned names raise an error of another kind on older drivers."""
        nvml = self._nvml
        used: dict[int, list[float]] = {}
        is_told = False
        for newest, older in (
            (nvml.nvmlDeviceGetComputeRunningProcesses_v3, nvml.nvmlDeviceGetComputeRunningProcesses_v2),
            (nvml.nvmlDeviceGetGraphicsRunningProcesses_v3, nvml.nvmlDeviceGetGraphicsRunningProcesses_v2),
            (nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, nvml.nvmlDeviceGetMPSComputeRunningProcesses_v2),
        ):
            listed = self._told(newest, handle)
            listed = self._told(older, handle) if listed is None else listed
            for process in listed or ():
                amounts = used.setdefault(int(process.pid), [])
                if process.usedGpuMemory is not None:
                    amounts.append(float(process.usedGpuMemory))
            is_told = is_told or listed is not None
        if not is_told:
            return None
        # What computes and draws is in two lists with the same figure.
        return tuple(GpuProcess(pid, max(amounts, default=None)) for pid, amounts in sorted(used.items()))

    def _has_module(self) -> bool:
        if self._nvml is not None:
            return True
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            self._problem = f"NVML cannot be used ({error}); install nvidia-ml-py"
            return False
        if not hasattr(nvml, "nvmlMemory_v2"):  # an old fork of the same import name
            self._problem = "another package hides nvidia-ml-py's module pynvml; uninstall nvidia-ml-py3 or pynvml"
            return False
        self._nvml = nvml
        return True

    def _start(self) -> list[str]:
        """Start NVML anew and find its cards; returns what went wrong."""
        self._shut_down()
        failed: list[str] = []
        try:
            self._nvml.nvmlInit()
            self._is_open = True
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            return [f"NVML does not start: {error}"]
        cards: list[_Card] = []
        if count == 0:
            return ["NVML works but sees no GPU"]
        for index in range(count):
            try:
                cards.extend(self._cards_at(index))
            except self._nvml.NVMLError as error:
                failed.append(f"GPU {index}: {error}")
        self._cards = tuple(cards)
        return failed

    def _shut_down(self) -> None:
        self._cards = ()
        if self._is_open:
            self._is_open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _cards_at(self, index: int) -> list[_Card]:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
        mig = self._figure(nvml.nvmlDeviceGetMigMode, handle)
        if mig is None or mig[0] != 1:
            return [_Card(uuid, name, handle, handle)]
        cards = [_Card(uuid, name, handle, handle, has_memory=False)]
        seen: set[Any] = set()
        for slot in range(self._figure(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = self._figure(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
            if part is None:
                continue
            instance = self._figure(nvml.nvmlDeviceGetGpuInstanceId, part)
            if instance is None or instance not in seen:  # compute instances of one GPU instance share its memory
                seen.add(instance)
                uuid, name = _text(nvml.nvmlDeviceGetUUID(part)), _text(nvml.nvmlDeviceGetName(part))
                cards.append(_Card(uuid, name, part, handle))
        return cards

    def _read_card(self, card: _Card) -> dict[str, float]:
        nvml, handle = self._nvml, card.handle
        values: dict[str, float] = {}
        if card.has_memory and (memory := self._memory(handle)) is not None and memory.total > 0:
            values["gpu_memory_used_bytes"] = float(memory.used)
            values["gpu_memory_total_bytes"] = float(memory.total)
        if (rates := self._figure(nvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
            values["gpu_utilization_ratio"] = rates.gpu / 100
        if (milliwatts := self._figure(nvml.nvmlDeviceGetPowerUsage, handle)) is not None:
            values["gpu_power_watts"] = milliwatts / 1000
        core = nvml.NVML_TEMPERATURE_GPU
        if (celsius := self._figure(nvml.nvmlDeviceGetTemperature, handle, core)) is not None:
            values["gpu_temperature_celsius"] = float(celsius)
        return values

    def _memory(self, handle: Any) -> Any:
        """Version 2 where there is one: `used` of version 1 counts the driver's own reserve since driver 510."""
        nvml = self._nvml
        memory = self._figure(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        return memory if memory is not None else self._figure(nvml.nvmlDeviceGetMemoryInfo, handle)

    def _figure(self, get: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML says, or None when it has no such figure."""
        try:
            return get(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in _NO_SUCH_FIGURE:
                return None
            raise

    def _told(self, get: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML says, or None whatever the error: what only describes a card starts nothing anew."""
        try:
            return get(*arguments)
        except self._nvml.NVMLError:
            return None


_MIB = 2.0**20
_DCGM_BLANK = 0x7FFFFFF0
"""From here up, DCGM's values mean "blank", "not found", "not supported" or "not permitted" (those of 32 bit; those of
64 bit and of floating point are larger still). No figure read here is as large: 2**31 MiB is 2 PiB."""


@dataclass(slots=True)
class _DcgmCard:
    name: str = ""
    fields: dict[str, float] = field(default_factory=dict)


class DcgmReader:
    """Reads GPUs from an exporter with DCGM's metric names, as NVIDIA's dcgm-exporter serves them.

    Memory comes in MiB, utilization in percent. A partition (MIG) is named by its GPU's uuid, a slash and its instance
    id. The total is DCGM_FI_DEV_FB_TOTAL, else used + free + reserved, where all three are told or reserved is not.

    Args:
        url: address of the exporter; its page is `/metrics`.
        timeout_s: seconds to wait for an answer.

    Raises:
        ConfigError: the URL cannot be meant.
    """

    def __init__(self, url: str, timeout_s: float = 2.0) -> None:
        import aiohttp  # slow to import: those who ask NVML alone do without it

        from monitor.http import parse_url

        self._base_url = parse_url(url).text
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._names: dict[str, str] = {}
        self._problem: str | None = None

    async def read(self) -> GpuValues:
        """Signals of every GPU on the page; nothing when it cannot be had."""
        from monitor.http import converse, open_session

        if self._session is None:
            self._session = open_session(authorized=False)  # the key is the target's
        answer = await converse(self._session, self._base_url, _get_metrics(self._timeout_s))
        self._names = {}
        if answer.error is not None or answer.status != 200:
            self._problem = f"{self._base_url}/metrics: {answer.error or f'HTTP status {answer.status}'}"
            return {}
        cards = _dcgm_cards(answer.body)
        if not cards:
            self._problem = f"{self._base_url}/metrics has no DCGM_FI_DEV_* metric; give the address of a DCGM exporter"
            return {}
        self._problem = None
        self._names = {uuid: card.name for uuid, card in cards.items()}
        return {uuid: values for uuid, card in cards.items() if (values := _dcgm_values(card.fields))}

    async def describe(self) -> GpuReport:
        """The GPUs on the exporter's page, or why there are none."""
        values = await self.read()
        devices = tuple(
            GpuDevice(uuid, name, values.get(uuid, {}).get("gpu_memory_total_bytes"))
            for uuid, name in self._names.items()
        )
        return GpuReport(f"dcgm exporter {self._base_url}", devices, self._problem)

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _get_metrics(timeout_s: float) -> Conversation[HttpAnswer]:
    answer = yield HttpRequest("/metrics", timeout_s=timeout_s)
    return answer


def _dcgm_cards(body: bytes) -> dict[str, _DcgmCard]:
    cards: dict[str, _DcgmCard] = {}
    for metric, samples in exposition.parse(body).samples.items():
        if not metric.startswith("DCGM_FI_DEV_"):
            continue
        for labels, value in samples:
            uuid = labels.get("UUID") or labels.get("uuid") or labels.get("gpu")
            if uuid is None or not math.isfinite(value):
                continue
            instance = labels.get("GPU_I_ID")
            card = cards.setdefault(f"{uuid}/{instance}" if instance else uuid, _DcgmCard())
            card.name = labels.get("modelName", card.name)
            # A GPU shared by several pods is listed once for each, with the same figures.
            if value < _DCGM_BLANK:
                card.fields[metric.removeprefix("DCGM_FI_DEV_")] = value
    return cards


def _dcgm_values(fields: dict[str, float]) -> dict[str, float]:
    values: dict[str, float] = {}
    used, free = fields.get("FB_USED"), fields.get("FB_FREE")
    total = fields.get("FB_TOTAL")
    if total is None and used is not None and free is not None:
        total = used + free + fields.get("FB_RESERVED", 0.0)
    if total != 0:  # a card without memory of its own says 0 of 0
        if used is not None:
            values["gpu_memory_used_bytes"] = used * _MIB
        if total is not None:
            values["gpu_memory_total_bytes"] = total * _MIB
    if "GPU_UTIL" in fields:
        values["gpu_utilization_ratio"] = fields["GPU_UTIL"] / 100
    if "POWER_USAGE" in fields:
        values["gpu_power_watts"] = fields["POWER_USAGE"]
    if "GPU_TEMP" in fields:
        values["gpu_temperature_celsius"] = fields["GPU_TEMP"]
    return values


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _pci_address(text: str) -> str:
    """NVML writes the domain with eight digits, the kernel with at least four."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
