import inspect
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from monitor import gpu
from monitor.gpu import (
    BoundedCall,
    DcgmReader,
    GpuDevice,
    GpuProcess,
    GpuReport,
    NoGpuReader,
    NvmlReader,
    PcieLink,
    describe_gpus,
    gpu_reader,
)
from serving.errors import ConfigError
from serving.signals import Scope, signals_of

GIB = 2**30
MIB = 2**20
NOT_SUPPORTED, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 9, 13, 15, 999


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class FakeGpu:
    def __init__(self, uuid: str, **codes: int) -> None:
        self.uuid = uuid
        self.fails = codes
        """Function name to the error it gives."""
        self.used, self.reserved, self.total = 10 * GIB, GIB, 80 * GIB
        self.mig: list[tuple[int, FakeGpu] | None] = []
        self.link = {
            "CurrPcieLinkGeneration": 1,
            "CurrPcieLinkWidth": 8,
            "MaxPcieLinkGeneration": 5,
            "MaxPcieLinkWidth": 16,
        }
        self.computing: list[tuple[int, int | None]] = []
        self.drawing: list[tuple[int, int | None]] = []


class FakeNvml(ModuleType):
    """The functions of pynvml that are used, over FakeGpus; counts starts and can fail anywhere."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 0x02000028  # noqa: N815

    def __init__(self, *gpus: FakeGpu) -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus)
        self.started = 0
        self.open = False
        self.init_code = 0
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        def function(gpu: FakeGpu, *arguments: Any) -> Any:
            if not self.open:
                raise NvmlError(1)
            version = "_v2" if arguments == (self.nvmlMemory_v2,) else ""
            if code := gpu.fails.get(name + version):
                raise NvmlError(code)
            figure = name.removeprefix("nvmlDeviceGet")
            if figure in gpu.link:
                return gpu.link[figure]
            if figure.startswith("MPS"):
                raise NvmlError(FUNCTION_NOT_FOUND)
            return getattr(self, f"_{figure}")(gpu, *arguments)

        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return function

    def nvmlInit(self) -> None:  # noqa: N802
        self.gate.wait()
        self.started += 1
        if self.init_code:
            raise NvmlError(self.init_code)
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        gpu = self.gpus[index]
        if code := gpu.fails.get("nvmlDeviceGetHandleByIndex"):
            raise NvmlError(code)
        return gpu

    def _UUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.uuid

    def _Name(self, _: FakeGpu) -> bytes:  # noqa: N802
        return b"NVIDIA Test"

    def _MemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:  # noqa: N802
        used = gpu.used if version else gpu.used + gpu.reserved
        return SimpleNamespace(used=used, total=gpu.total, free=gpu.total - gpu.used - gpu.reserved)

    def _PciInfo_v3(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(busId="00000000:6A:00.0")

    def _ComputeRunningProcesses_v3(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.computing]

    _ComputeRunningProcesses_v2 = _ComputeRunningProcesses_v3

    def _GraphicsRunningProcesses_v3(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.drawing]

    _GraphicsRunningProcesses_v2 = _GraphicsRunningProcesses_v3

    def _UtilizationRates(self, _: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=37, memory=5)

    def _PowerUsage(self, _: FakeGpu) -> int:  # noqa: N802
        return 123_456

    def _Temperature(self, _gpu: FakeGpu, _sensor: int) -> int:  # noqa: N802
        return 61

    def _MigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        return [1 if gpu.mig else 0, 0]

    def _MaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        return len(gpu.mig)

    def _MigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:  # noqa: N802
        slot = gpu.mig[index]
        if slot is None:
            raise NvmlError(6)
        slot[1].instance = slot[0]  # type: ignore[attr-defined]
        return slot[1]

    def _GpuInstanceId(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.instance  # type: ignore[attr-defined,no-any-return]


def patient(nvml: FakeNvml) -> NvmlReader:
    """A reader that a busy machine does not make late."""
    return NvmlReader(nvml, deadline_s=60)


ALL = {
    "gpu_memory_used_bytes": 10 * GIB,
    "gpu_memory_total_bytes": 80 * GIB,
    "gpu_utilization_ratio": 0.37,
    "gpu_power_watts": 123.456,
    "gpu_temperature_celsius": 61,
}


async def test_nvml_gives_every_gpu_signal_in_base_units() -> None:
    reader = patient(FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b")))
    assert await reader.read() == {"GPU-a": ALL, "GPU-b": ALL}
    assert set(ALL) == {signal.name for signal in signals_of(Scope.GPU)}


async def test_memory_falls_back_to_version_1_on_an_old_driver() -> None:
    gpu = FakeGpu("GPU-a", nvmlDeviceGetMemoryInfo_v2=FUNCTION_NOT_FOUND)
    assert (await patient(FakeNvml(gpu)).read())["GPU-a"]["gpu_memory_used_bytes"] == 11 * GIB


@pytest.mark.parametrize("zero_total", [True, False])
async def test_unified_memory_is_absent_and_never_zero(zero_total: bool) -> None:
    gpu = FakeGpu("GPU-a")
    if zero_total:
        gpu.used = gpu.total = 0
    else:
        gpu.fails = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED}
    nvml = FakeNvml(gpu)
    reader = patient(nvml)
    values = (await reader.read())["GPU-a"]
    assert set(values) == {"gpu_utilization_ratio", "gpu_power_watts", "gpu_temperature_celsius"}
    device = (await reader.describe()).devices[0]
    assert (device.memory_total_bytes, device.memory_used_bytes, device.memory_free_bytes) == (None, None, None)
    assert nvml.started == 1


@pytest.mark.parametrize("signal", ["UtilizationRates", "PowerUsage", "Temperature"])
async def test_a_figure_that_a_card_lacks_is_absent_alone(signal: str) -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", **{f"nvmlDeviceGet{signal}": NOT_SUPPORTED}))
    reader = patient(nvml)
    assert len((await reader.read())["GPU-a"]) == len(ALL) - 1
    await reader.read()
    assert nvml.started == 1


async def test_a_card_that_says_nothing_at_all_is_absent() -> None:
    names = ("MemoryInfo", "MemoryInfo_v2", "UtilizationRates", "PowerUsage", "Temperature", "MigMode")
    gpu = FakeGpu("GPU-a", **{f"nvmlDeviceGet{name}": NOT_SUPPORTED for name in names})
    assert await patient(FakeNvml(gpu)).read() == {}


@pytest.mark.parametrize("code", [1, DRIVER_NOT_LOADED, GPU_IS_LOST, 18, 28, UNKNOWN])
async def test_after_a_lifecycle_error_nvml_is_started_anew_at_the_next_read(code: int) -> None:
    gpu = FakeGpu("GPU-a")
    nvml = FakeNvml(gpu)
    reader = patient(nvml)
    await reader.read()
    gpu.fails = {"nvmlDeviceGetUtilizationRates": code}
    assert await reader.read() == {}
    gpu.fails = {}
    assert await reader.read() == {"GPU-a": ALL}
    assert nvml.started == 2
    assert (await reader.describe()).problem is None


async def test_a_lost_card_leaves_the_others_readable_and_is_named() -> None:
    lost, other = FakeGpu("GPU-a", nvmlDeviceGetHandleByIndex=GPU_IS_LOST), FakeGpu("GPU-b")
    nvml = FakeNvml(lost, other)
    reader = patient(nvml)
    for _ in range(20):
        assert await reader.read() == {"GPU-b": ALL}
    assert nvml.started <= 6  # pauses of 0, 1, 3, 7 reads lie between the attempts
    report = await reader.describe()
    assert [device.uuid for device in report.devices] == ["GPU-b"]
    assert "GPU 0: code 15" in str(report.problem)
    lost.fails = {}
    for _ in range(60):
        values = await reader.read()
    assert values == {"GPU-a": ALL, "GPU-b": ALL}


async def test_a_host_without_a_driver_reads_nothing_and_says_why() -> None:
    nvml = FakeNvml()
    nvml.init_code = DRIVER_NOT_LOADED
    reader = patient(nvml)
    assert await reader.read() == {}
    report = await reader.describe()
    assert (report.source, report.devices) == ("nvml", ())
    assert "NVML does not start: code 9" in str(report.problem)


async def test_a_driver_without_a_card_says_so() -> None:
    assert (await patient(FakeNvml()).describe()).problem == "NVML works but sees no GPU"


async def test_a_partitioned_card_counts_memory_in_its_partitions_once() -> None:
    gpu = FakeGpu("GPU-a")
    gpu.mig = [(1, FakeGpu("MIG-1")), (1, FakeGpu("MIG-1b")), None, (2, FakeGpu("MIG-2"))]
    for _, part in (slot for slot in gpu.mig if slot):
        part.fails = {"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED, "nvmlDeviceGetPowerUsage": NOT_SUPPORTED}
    values = await patient(FakeNvml(gpu)).read()
    assert sorted(values) == ["GPU-a", "MIG-1", "MIG-2"]
    assert "gpu_memory_used_bytes" not in values["GPU-a"]
    assert values["MIG-2"]["gpu_memory_used_bytes"] == 10 * GIB


async def test_a_card_is_described_with_what_is_free_its_link_and_who_holds_it() -> None:
    gpu = FakeGpu("GPU-a")
    gpu.computing, gpu.drawing = [(20, 3 * GIB), (7, None), (21, None)], [(20, 3 * GIB), (21, GIB)]
    report = await patient(FakeNvml(gpu)).describe()
    link = PcieLink(generation=1, width=8, max_generation=5, max_width=16)
    processes = (GpuProcess(7, None), GpuProcess(20, 3 * GIB), GpuProcess(21, GIB))
    assert report == GpuReport(
        "nvml", (GpuDevice("GPU-a", "NVIDIA Test", 80 * GIB, 10 * GIB, 69 * GIB, "0000:6a:00.0", link, processes),)
    )


ALL_LISTS = tuple(f"{kind}RunningProcesses_v{version}" for kind in ("Compute", "Graphics") for version in (2, 3))


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, UNKNOWN, GPU_IS_LOST])
async def test_what_a_driver_does_not_tell_of_a_card_is_absent_and_the_rest_is_there(code: int) -> None:
    names = ("PciInfo_v3", *FakeGpu("").link, *ALL_LISTS)
    nvml = FakeNvml(FakeGpu("GPU-a", **{f"nvmlDeviceGet{name}": code for name in names}))
    report = await patient(nvml).describe()
    assert report == GpuReport("nvml", (GpuDevice("GPU-a", "NVIDIA Test", 80 * GIB, 10 * GIB, 69 * GIB),))


async def test_processes_are_listed_by_an_older_driver_too_and_none_is_not_unknown() -> None:
    gpu = FakeGpu("GPU-a", **{f"nvmlDeviceGet{name}": FUNCTION_NOT_FOUND for name in ALL_LISTS if name.endswith("3")})
    nvml = FakeNvml(gpu)
    assert (await patient(nvml).describe()).devices[0].processes == ()
    gpu.computing = [(5, 2 * GIB)]
    assert (await patient(nvml).describe()).devices[0].processes == (GpuProcess(5, 2 * GIB),)


async def test_a_partition_has_its_own_memory_and_processes_on_the_link_of_its_card() -> None:
    gpu, part = FakeGpu("GPU-a"), FakeGpu("MIG-1")
    gpu.mig, gpu.link = [(1, part)], {**gpu.link, "CurrPcieLinkWidth": 4}
    gpu.computing, part.computing, part.total = [(1, GIB), (2, GIB)], [(2, GIB)], 20 * GIB
    whole, cut = (await patient(FakeNvml(gpu)).describe()).devices
    assert (whole.memory_free_bytes, whole.processes) == (None, None)
    assert (cut.memory_free_bytes, cut.processes) == (9 * GIB, (GpuProcess(2, GIB),))
    assert cut.link is not None
    assert (cut.link, cut.pci_address) == (whole.link, whole.pci_address)
    assert cut.link.width == 4


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    [(1, 16, 4.0), (2, 16, 8.0), (3, 16, 15.75), (4, 16, 31.51), (5, 16, 63.02), (6, 16, 121.0), (3, 1, 0.985)],
)
def test_a_link_is_as_fast_as_tables_of_pcie_say(generation: int, width: int, gigabytes: float) -> None:
    link = PcieLink(max_generation=generation, max_width=width)
    assert link.max_bytes_per_second == pytest.approx(gigabytes * 1e9, rel=1e-3)
    assert link.bytes_per_second == link.max_bytes_per_second


def test_an_idle_link_wakes_to_its_highest_generation_on_the_lanes_it_has() -> None:
    link = PcieLink(generation=1, width=8, max_generation=4, max_width=16)
    assert link.bytes_per_second == pytest.approx(15.75e9, rel=1e-3)
    assert PcieLink(generation=4, width=8).bytes_per_second == link.bytes_per_second
    assert PcieLink(generation=4, width=8).max_bytes_per_second is None
    assert PcieLink(generation=9, width=8).bytes_per_second is None
    assert PcieLink(max_generation=4).bytes_per_second is None


async def test_describing_opens_a_driver_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(FakeGpu("GPU-a"))
    monkeypatch.setattr(gpu, "gpu_reader", lambda source: patient(nvml))
    assert [device.uuid for device in (await describe_gpus()).devices] == ["GPU-a"]
    assert (nvml.started, nvml.open) == (1, False)


def test_who_asks_nvml_alone_does_not_wait_for_an_http_client() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import monitor.gpu, sys; sys.exit('aiohttp' in sys.modules)"], check=False
    )
    assert done.returncode == 0


def join_others(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)


async def test_a_driver_that_hangs_costs_one_deadline_and_one_thread() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a"))
    nvml.gate.clear()
    before = set(threading.enumerate())
    reader = NvmlReader(nvml, deadline_s=0.01)
    assert [await reader.read() for _ in range(5)] == [{}] * 5
    assert len(set(threading.enumerate()) - before) == 1
    assert (await reader.describe()).problem == "the NVIDIA driver does not answer"
    await reader.close()
    nvml.gate.set()
    join_others(before)
    assert await reader.read() == {"GPU-a": ALL}
    assert nvml.started == 1


async def test_what_a_late_call_returns_is_thrown_away() -> None:
    gate, call, before = threading.Event(), BoundedCall(0.01), set(threading.enumerate())

    def late() -> str:
        gate.wait()
        return "old"

    assert await call.run(late) is None
    assert call.is_stuck
    assert await call.run(lambda: "second") is None
    gate.set()
    join_others(before)
    assert await call.run(lambda: "new", deadline_s=5) == "new"


async def test_the_error_of_a_call_is_raised_to_the_caller() -> None:
    def fails() -> None:
        raise KeyError("mine")

    call = BoundedCall(5)
    with pytest.raises(KeyError, match="mine"):
        await call.run(fails)
    assert not call.is_stuck


async def test_closing_shuts_nvml_down() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a"))
    reader = patient(nvml)
    await reader.read()
    await reader.close()
    assert not nvml.open


async def test_an_old_fork_of_pynvml_is_told_from_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    assert "uninstall nvidia-ml-py3" in str((await NvmlReader().describe()).problem)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "install nvidia-ml-py" in str((await NvmlReader().describe()).problem)


def test_the_real_pynvml_has_every_name_that_is_used() -> None:
    used = set(re.findall(r"\bnvml\.(nvml\w+|NVML\w+)", inspect.getsource(gpu)))
    assert len(used) > 10
    assert used <= set(dir(pynvml))
    assert pynvml.NVMLError(9).value == DRIVER_NOT_LOADED


async def test_the_real_pynvml_on_this_host_finds_cards_or_says_why() -> None:
    report = await NvmlReader().describe()
    assert report.devices or report.problem


DCGM = """\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node"} 42
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node"} 305.5
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node"} 85
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node"} 41000
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node"} 40000
DCGM_FI_DEV_FB_RESERVED{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node"} 480
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-2",modelName="NVIDIA H100 80GB HBM3",pod="a"} 100
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-2",modelName="NVIDIA H100 80GB HBM3",pod="b"} 100
DCGM_FI_DEV_FB_TOTAL{gpu="1",UUID="GPU-2",modelName="NVIDIA H100 80GB HBM3",pod="a"} 81559
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-2",modelName="NVIDIA H100 80GB HBM3"} 140737488355328
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-2",modelName="NVIDIA H100 80GB HBM3"} 9223372036854775794
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-2",modelName="NVIDIA H100 80GB HBM3"} 2147483632
DCGM_FI_DEV_FB_USED{gpu="2",UUID="GPU-3",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 5
DCGM_FI_DEV_FB_FREE{gpu="2",UUID="GPU-3",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 10
DCGM_FI_DEV_FB_USED{gpu="3",UUID="GPU-GB10"} 0
DCGM_FI_DEV_FB_FREE{gpu="3",UUID="GPU-GB10"} 0
DCGM_FI_DEV_GPU_TEMP{gpu="3",UUID="GPU-GB10"} 55
this line is broken {
"""


@asynccontextmanager
async def dcgm(text: str, status: int = 200) -> AsyncIterator[tuple[DcgmReader, list[str]]]:
    seen: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        reader = DcgmReader(f"http://127.0.0.1:{server.port}/metrics")
        yield reader, seen
        await reader.close()


async def test_a_dcgm_page_is_read_in_base_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_API_KEY", "the target's alone")
    async with dcgm(DCGM) as (reader, authorizations):
        assert await reader.read() == {
            "GPU-1": {
                "gpu_memory_used_bytes": 40000 * MIB,
                "gpu_memory_total_bytes": (40000 + 41000 + 480) * MIB,
                "gpu_utilization_ratio": 0.85,
                "gpu_power_watts": 305.5,
                "gpu_temperature_celsius": 42,
            },
            # Blank values are absent, and a GPU shared by two pods is counted once.
            "GPU-2": {"gpu_memory_used_bytes": 100 * MIB, "gpu_memory_total_bytes": 81559 * MIB},
            "GPU-3/7": {"gpu_memory_used_bytes": 5 * MIB, "gpu_memory_total_bytes": 15 * MIB},
            "GPU-GB10": {"gpu_temperature_celsius": 55},
        }
        report = await reader.describe()
    assert report.devices[0] == GpuDevice("GPU-1", "NVIDIA H100 80GB HBM3", 81480 * MIB)
    assert report.problem is None
    assert authorizations == ["", ""]


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [("<html>", 200, "no DCGM_FI_DEV_"), (DCGM, 503, "HTTP status 503"), ("", 200, "no DCGM_FI_DEV_")],
)
async def test_a_page_that_is_none_gives_nothing_and_says_why(text: str, status: int, problem: str) -> None:
    async with dcgm(text, status) as (reader, _):
        assert await reader.read() == {}
        assert problem in str((await reader.describe()).problem)


async def test_an_exporter_that_is_down_gives_nothing() -> None:
    reader = DcgmReader("http://127.0.0.1:1")
    assert await reader.read() == {}
    assert "refused" in str((await reader.describe()).problem)
    await reader.close()


async def test_the_reader_is_chosen_by_what_the_user_names() -> None:
    assert isinstance(gpu_reader(), NvmlReader)
    assert isinstance(gpu_reader("nvml"), NvmlReader)
    assert isinstance(gpu_reader("127.0.0.1:9400"), DcgmReader)
    none = gpu_reader("none")
    assert isinstance(none, NoGpuReader)
    assert await none.read() == {}
    assert (await none.describe()).source == "none"
    await none.close()
    with pytest.raises(ConfigError, match="use auto, nvml, none, or a URL"):
        gpu_reader("nvdia")
