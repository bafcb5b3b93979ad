import json
from dataclasses import asdict, replace

import pytest

from monitor.gpu import GpuDevice, GpuProcess, GpuReport, PcieLink
from monitor.machine import HostMemory, Machine, Processor
from plimsoll import doctor
from plimsoll.cli import main

GIB = 2**30
CARD = GpuDevice(
    uuid="GPU-a",
    name="NVIDIA H200",
    memory_total_bytes=140.4 * GIB,
    memory_used_bytes=30.0 * GIB,
    memory_free_bytes=109.5 * GIB,
    pci_address="0000:6a:00.0",
    link=PcieLink(generation=1, width=8, max_generation=5, max_width=16),
    processes=(GpuProcess(20, 29.5 * GIB, "python[red]3"), GpuProcess(21, None)),
)
MEMORY = HostMemory(
    installed_bytes=128 * GIB,
    limit_bytes=64 * GIB,
    total_bytes=64 * GIB,
    available_bytes=50 * GIB,
    swap_total_bytes=0,
    swap_free_bytes=0,
    slots=(),
    channels=8,
    channels_are_counted=True,
    megatransfers_per_second=4800,
    bandwidth_bytes_per_second=307.2e9,
)
MACHINE = Machine((CARD,), MEMORY, Processor("Fast Processor 9000", 8, 16, 2.5), None, ("A note of the machine.",))
BARE = Machine((), HostMemory(None, None, None, None, None, None), Processor(None, None, None, None), None, ())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def show(machine: Machine, *options: str) -> str:
        async def describe() -> GpuReport:
            return GpuReport("nvml", machine.cards)

        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(doctor, "describe_gpus", describe)
        monkeypatch.setattr(doctor, "read_machine", lambda gpus: machine)
        assert main(["doctor", *options]) == 0
        return capsys.readouterr().out

    return show


def test_doctor_shows_the_machine_in_a_few_lines(shown) -> None:
    lines = [" ".join(line.split()) for line in shown(MACHINE).splitlines()]
    at = lines.index("GPU NVIDIA H200 (GPU-a): 109.5 of 140.4 GiB free, PCIe 5.0 x8 = 31.5 GB/s")
    assert lines[at : at + 6] == [
        lines[at],
        "in use by python[red]3 (pid 20), 29.5 GiB",
        "in use by a process (pid 21)",
        "memory 50.0 of 64.0 GiB free, 8 channels at 4800 MT/s = 307.2 GB/s",
        "processor Fast Processor 9000: 8 cores, 16 threads, 2.5 usable",
        "A note of the machine.",
    ]


def test_an_upper_bound_of_channels_is_shown_as_one(shown) -> None:
    bounded = replace(MACHINE, memory=replace(MEMORY, channels_are_counted=False))
    assert "at most 8 channels at 4800 MT/s" in " ".join(shown(bounded).split())


def test_a_machine_that_tells_nothing_is_shown_as_unknown(shown) -> None:
    text = " ".join(shown(BARE).split())
    assert "GPU none seen memory memory not told processor unknown: unknown cores, unknown threads" in text


def test_doctor_gives_programs_the_machine_whole(shown) -> None:
    document = json.loads(shown(MACHINE, "--json"))
    assert document["machine"] == json.loads(json.dumps(asdict(MACHINE)))
    assert document["gpus"]["devices"][0]["memory_free_bytes"] == 109.5 * GIB
