"""The cards of a simulated server as NVIDIA's dcgm-exporter shows them.

Names, help texts and labels are those of the exporter's default counters. Its units lose what they lose there: memory
comes in whole MiB, utilization in whole percent, temperature in whole degrees. Figures that a simulated card does not
have (clocks, PCIe traffic) are left out, as the exporter leaves out what a card does not support.
"""

from serving.simulator.dialects.base import Page
from serving.simulator.spec import GpuView, Snapshot

__all__ = ["dcgm_page"]

_MIB = 2**20
_RESERVED_SHARE = 230
"""The driver keeps about one part in so many of a card's memory for itself."""
_DRIVER = "580.65.06"
_FAMILIES = (
    ("GPU_TEMP", "GPU temperature (in C)."),
    ("POWER_USAGE", "Power draw (in W)."),
    ("GPU_UTIL", "GPU utilization (in %)."),
    ("XID_ERRORS", "Value of the last XID error encountered."),
    ("FB_FREE", "Framebuffer memory free (in MiB)."),
    ("FB_USED", "Framebuffer memory used (in MiB)."),
    ("FB_RESERVED", "Framebuffer memory reserved (in MiB)."),
)


def dcgm_page(snapshot: Snapshot, *, host: str = "simulated") -> Page:
    """The page of an exporter on the host of the server's cards; all its metrics are gauges.

    Used, free and reserved memory add up to the card's memory, rounded down to MiB. What the driver reserves comes out
    of what is free, so a card that is full has none.

    Args:
        snapshot: of it, the cards alone are shown, whether or not the server is ready.
        host: the exporter's `Hostname` label.
    """
    blocks = [(_labels(index, card, host), _figures(card)) for index, card in enumerate(snapshot.gpus)]
    lines = []
    for index, (name, text) in enumerate(_FAMILIES if blocks else ()):
        metric = f"DCGM_FI_DEV_{name}"
        extra = ',err_code="0",err_msg="No Error"' if name == "XID_ERRORS" else ""
        lines.append(f"# HELP {metric} {text}\n# TYPE {metric} gauge\n")
        lines.extend(f"{metric}{{{labels}{extra}}} {figures[index]}\n" for labels, figures in blocks)
    return Page(200, "".join(lines).encode(), "text/plain; charset=utf-8")


def _labels(index: int, card: GpuView, host: str) -> str:
    labels = {
        "gpu": str(index),
        "UUID": card.uuid,
        "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
        "device": f"nvidia{index}",
        "modelName": card.name,
        "Hostname": host,
        "DCGM_FI_DRIVER_VERSION": _DRIVER,
    }
    return ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _figures(card: GpuView) -> tuple[str, ...]:
    """In the order of the families."""
    total, used = card.memory_total_bytes // _MIB, card.memory_used_bytes // _MIB
    reserved = min(total - used, total // _RESERVED_SHARE)
    return (
        f"{card.temperature_celsius:.0f}",
        f"{card.power_watts:.6f}",
        f"{card.utilization_ratio * 100:.0f}",
        "0",
        str(total - used - reserved),
        str(used),
        str(reserved),
    )
