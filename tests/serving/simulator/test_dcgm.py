"""The simulated exporter gives back the cards that the simulation has, through the reader of real ones."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.gpu import DcgmReader, GpuDevice
from serving.exposition import parse
from serving.simulator.dcgm import dcgm_page
from serving.simulator.spec import GpuView, ProcessView, Snapshot

MIB = 2**20


def snapshot(*gpus):
    return Snapshot(
        t_ns=1,
        started_ns=0,
        ready=False,
        **dict.fromkeys(("running", "waiting", "kv_blocks_used", "prompt_tokens", "cached_tokens"), 0),
        **dict.fromkeys(("generated_tokens", "preemptions", "steps", "step_tokens", "longest_tokens"), 0),
        **dict.fromkeys(("prefill_seconds", "decode_seconds"), 0.0),
        finished={},
        http={},
        histograms={},
        slots=(),
        gpus=gpus,
        process=ProcessView(anonymous_memory_bytes=0),
    )


@asynccontextmanager
async def reader(page) -> AsyncIterator[DcgmReader]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=page.body, status=page.status, headers={"Content-Type": page.content_type})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        dcgm = DcgmReader(f"http://127.0.0.1:{server.port}")
        yield dcgm
        await dcgm.close()


H200 = GpuView("GPU-1", "NVIDIA H200", 100_000 * MIB, 143_771 * MIB, 0.97, 612.3, 64.0)
FULL = GpuView("GPU-2", "NVIDIA H200", 143_771 * MIB, 143_771 * MIB, 0.0, 110.0, 34.0)


async def test_the_reader_gives_back_the_cards():
    async with reader(dcgm_page(snapshot(H200, FULL))) as dcgm:
        assert await dcgm.read() == {
            card.uuid: {
                "gpu_memory_used_bytes": card.memory_used_bytes,
                "gpu_memory_total_bytes": card.memory_total_bytes,
                "gpu_utilization_ratio": pytest.approx(card.utilization_ratio),
                "gpu_power_watts": card.power_watts,
                "gpu_temperature_celsius": card.temperature_celsius,
            }
            for card in (H200, FULL)
        }
        report = await dcgm.describe()
    assert report.problem is None
    assert report.devices == tuple(GpuDevice(card.uuid, card.name, card.memory_total_bytes) for card in (H200, FULL))


async def test_a_server_without_cards_has_an_exporter_without_metrics():
    page = dcgm_page(snapshot())
    assert (page.status, page.body) == (200, b"")
    async with reader(page) as dcgm:
        assert await dcgm.read() == {}
        assert "no DCGM_FI_DEV_" in str((await dcgm.describe()).problem)


def test_a_family_is_as_the_exporter_writes_it():
    lines = dcgm_page(snapshot(H200), host="node-1").body.decode().split("\n")
    at = lines.index("# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).")
    labels = (
        'gpu="0",UUID="GPU-1",pci_bus_id="00000000:01:00.0",device="nvidia0",modelName="NVIDIA H200",'
        'Hostname="node-1",DCGM_FI_DRIVER_VERSION="580.65.06"'
    )
    assert lines[at : at + 3] == [
        "# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).",
        "# TYPE DCGM_FI_DEV_FB_USED gauge",
        f"DCGM_FI_DEV_FB_USED{{{labels}}} 100000",
    ]
    assert f'DCGM_FI_DEV_XID_ERRORS{{{labels},err_code="0",err_msg="No Error"}} 0' in lines
    assert f"DCGM_FI_DEV_POWER_USAGE{{{labels}}} 612.300000" in lines


cards = st.integers(0, 2**40).flatmap(
    lambda total: st.builds(
        GpuView,
        uuid=st.uuids().map(lambda uuid: f"GPU-{uuid}"),
        name=st.text(max_size=8),
        memory_used_bytes=st.integers(0, total),
        memory_total_bytes=st.just(total),
        utilization_ratio=st.floats(0, 1),
        power_watts=st.floats(0, 1000),
        temperature_celsius=st.floats(0, 100),
    )
)


@given(st.lists(cards, max_size=4), st.text(max_size=8))
@settings(max_examples=100, deadline=None)
def test_any_card_is_read_back_to_the_exporters_precision(gpus, host):
    exposition = parse(dcgm_page(snapshot(*gpus), host=host).body)
    assert exposition.bad_lines == 0

    def figures(name):
        return [value for _, value in exposition.samples.get(f"DCGM_FI_DEV_{name}", ())]

    used, free, reserved = figures("FB_USED"), figures("FB_FREE"), figures("FB_RESERVED")
    assert used == [card.memory_used_bytes // MIB for card in gpus]
    assert [sum(parts) for parts in zip(used, free, reserved, strict=True)] == [
        card.memory_total_bytes // MIB for card in gpus
    ]
    assert all(value >= 0 for value in (*free, *reserved))
    assert figures("GPU_UTIL") == pytest.approx([card.utilization_ratio * 100 for card in gpus], abs=0.5)
    assert figures("POWER_USAGE") == pytest.approx([card.power_watts for card in gpus], abs=1e-6)
    assert figures("GPU_TEMP") == pytest.approx([card.temperature_celsius for card in gpus], abs=0.5)
    assert figures("XID_ERRORS") == [0] * len(gpus)
    # A newline of any other kind in a name would end the line.
    assert [labels["UUID"] for labels, _ in exposition.samples.get("DCGM_FI_DEV_FB_USED", ())] == [
        card.uuid for card in gpus
    ]
