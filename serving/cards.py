"""The cards and hosts that models run on: memory, bandwidth and peak speed, from their makers' data sheets.

Sources: "NVIDIA H100 Tensor Core GPU" (SXM5, 80 GB HBM3), "NVIDIA H200 Tensor Core GPU" (SXM), "NVIDIA B200" as in
"HGX B200", "NVIDIA A100 Tensor Core GPU" (SXM4, 40 and 80 GB), "NVIDIA L40S", "NVIDIA L4", the white papers "NVIDIA Ada
GPU Architecture" (RTX 4090) and "NVIDIA Ampere GA102 GPU Architecture" (RTX 3090), "AMD Instinct MI300X Accelerator";
for the H20, which has no public sheet, the figures that system makers print. FLOP/s are without sparsity, and for
GeForce cards with 32-bit accumulation. The memory of a card is what `nvidia-smi` shows as total, which is a little less
than the name says.
"""

import difflib
from dataclasses import dataclass
from typing import Final

from serving.errors import ConfigError

__all__ = ["CARDS", "Card", "Host", "find_card"]

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator.

    Attributes:
        name: as NVML names it.
        short_names: other names for it, in lower case.
        memory_bytes: total memory as NVML shows it.
        memory_bandwidth: bytes per second from its memory, at peak.
        bf16_flops: dense bf16 FLOP/s at peak.
        fp8_flops: dense fp8 FLOP/s at peak; None where it has no such units.
        link_bandwidth: bytes per second to other cards, in one direction: NVLink or its like, else PCIe.
    """

    name: str
    short_names: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link_bandwidth: float


@dataclass(frozen=True, slots=True)
class Host:
    """The machine around the cards. Defaults are a desktop with two channels of DDR5-5200 and PCIe 4.0 x16.

    Attributes:
        memory_bandwidth: bytes per second from main memory to the processor, at peak: channels x 8 bytes x transfers.
        pcie_bandwidth: bytes per second from main memory to a card, as copies reach it.
        flops: FLOP/s that the processor reaches in quantised matrix products.
    """

    memory_bandwidth: float = 83.2e9
    pcie_bandwidth: float = 25e9
    flops: float = 1e12

    def __post_init__(self) -> None:
        if min(self.memory_bandwidth, self.pcie_bandwidth, self.flops) <= 0:
            raise ConfigError("a host's memory bandwidth, PCIe bandwidth and FLOP/s must be above 0")


CARDS: Final[tuple[Card, ...]] = (
    Card("NVIDIA H100 80GB HBM3", ("h100", "h100-80gb", "h100-sxm"), 81559 * _MIB, 3.35e12, 989.4e12, 1978.9e12, 450e9),
    Card("NVIDIA H200", ("h200", "h200-sxm"), 143771 * _MIB, 4.8e12, 989.4e12, 1978.9e12, 450e9),
    Card("NVIDIA H20", ("h20",), 97871 * _MIB, 4.0e12, 148e12, 296e12, 450e9),
    Card("NVIDIA B200", ("b200",), 183359 * _MIB, 8.0e12, 2250e12, 4500e12, 900e9),
    Card("NVIDIA A100-SXM4-40GB", ("a100-40gb", "a100-40g"), 40960 * _MIB, 1.555e12, 312e12, None, 300e9),
    Card("NVIDIA A100-SXM4-80GB", ("a100-80gb", "a100-80g"), 81920 * _MIB, 2.039e12, 312e12, None, 300e9),
    Card("NVIDIA L40S", ("l40s",), 46068 * _MIB, 0.864e12, 362.05e12, 733e12, 32e9),
    Card("NVIDIA L4", ("l4",), 23034 * _MIB, 0.3e12, 121e12, 242e12, 32e9),
    Card("NVIDIA GeForce RTX 4090", ("rtx-4090", "4090"), 24564 * _MIB, 1.008e12, 165.2e12, 330.3e12, 32e9),
    Card("NVIDIA GeForce RTX 3090", ("rtx-3090", "3090"), 24576 * _MIB, 0.936e12, 71e12, None, 32e9),
    Card("AMD Instinct MI300X", ("mi300x",), 196592 * _MIB, 5.3e12, 1307.4e12, 2614.9e12, 448e9),
)
"""The cards that are known."""


def _plain(name: str) -> str:
    words = name.lower().replace("_", " ").replace("-", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "amd", "instinct"))


_BY_NAME: Final = {_plain(name): card for card in CARDS for name in (card.name, *card.short_names)}


def find_card(name: str) -> Card:
    """The card of that name, as NVML, a data sheet or a colleague would say it.

    Raises:
        ConfigError: no card is known by that name, or several are; the message names the nearest.
    """
    plain = _plain(name)
    if plain in _BY_NAME:
        return _BY_NAME[plain]
    near = [card.short_names[0] for known, card in _BY_NAME.items() if plain and known.startswith(plain)]
    near = near or [_BY_NAME[known].short_names[0] for known in difflib.get_close_matches(plain, _BY_NAME, n=3)]
    nearest = list(dict.fromkeys(near)) or [card.short_names[0] for card in CARDS]
    advice = f"did you mean {' or '.join(nearest)}?" if near else f"known cards: {', '.join(nearest)}"
    raise ConfigError(f"no card is known as {name[:60]!r}; {advice}")
