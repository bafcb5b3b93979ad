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
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypeVar

import aiohttp

from monitor.http import converse, open_session, parse_url
from serving import exposition
from serving.conversation import Conversation, HttpAnswer, HttpRequest
from serving.errors import ConfigError

__all__ = [
    "BoundedCall",
    "DcgmReader",
    "GpuDevice",
    "GpuReader",
    "GpuReport",
    "NoGpuReader",
    "NvmlReader",
    "gpu_reader",
]

GpuValues: TypeAlias = dict[str, dict[str, float]]
"""GPU uuid to signal to value; signals are those of scope GPU in `serving.signals`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU, or one memory partition (MIG) of one."""

    uuid: str
    name: str
    memory_total_bytes: float | None
    """None where the card has no memory of its own (unified memory) or does not tell."""


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
        values = await self._call.run(self._collect, deadline_s=max(self._call.deadline_s, _DESCRIBE_DEADLINE_S))
        if values is None:
            return GpuReport("nvml", problem="the NVIDIA driver does not answer")
        devices = tuple(
            GpuDevice(card.uuid, card.name, values.get(card.uuid, {}).get("gpu_memory_total_bytes"))
            for card in self._cards
        )
        return GpuReport("nvml", devices, self._problem)

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
            return [_Card(uuid, name, handle)]
        cards = [_Card(uuid, name, handle, has_memory=False)]
        seen: set[Any] = set()
        for slot in range(self._figure(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = self._figure(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
            if part is None:
                continue
            instance = self._figure(nvml.nvmlDeviceGetGpuInstanceId, part)
            if instance is None or instance not in seen:  # compute instances of one GPU instance share its memory
                seen.add(instance)
                cards.append(_Card(_text(nvml.nvmlDeviceGetUUID(part)), _text(nvml.nvmlDeviceGetName(part)), part))
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
        self._base_url = parse_url(url).text
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._names: dict[str, str] = {}
        self._problem: str | None = None

    async def read(self) -> GpuValues:
        """Signals of every GPU on the page; nothing when it cannot be had."""
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
