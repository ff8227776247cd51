"""GPU data sheets: memory, bandwidth, arithmetic throughput, links."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.checks import shown
from engine.errors import ConfigError, did_you_mean

__all__ = ["CARDS", "Card", "find_card"]


@dataclass(frozen=True)
class Card:
    """One kind of GPU.

    Attributes
    ----------
    name, title : str
        Name in options, and full name.
    memory : int
        Memory in bytes. Data sheets round down: drivers report a little more.
    memory_rate : float
        Memory bandwidth, TB/s.
    tensor_16, tensor_fp8, tensor_int8 : float
        Tensor cores without sparsity: TFLOP/s in 16 bits and e4m3, TOP/s in int8; 0 if unsupported.
    vector : float
        float32 outside tensor cores, TFLOP/s.
    link_rate : float
        GB/s to the other GPUs of the host, in one direction.
    link : str
        Kind of the link.
    source : str
        Source of the figures.
    devices : tuple of str
        What CUDA calls it.
    is_measured : bool
        Whether the shares of `Constants` were measured on this kind of card.
    """

    name: str
    title: str
    memory: int
    memory_rate: float
    tensor_16: float
    tensor_fp8: float
    tensor_int8: float
    vector: float
    link_rate: float
    link: str
    source: str
    devices: tuple[str, ...] = ()
    is_measured: bool = False


_GB = 10**9
_PCIE4 = "PCIe 4.0 x16, 64 GB/s both ways"
_PCIE5 = "PCIe 5.0 x16, 128 GB/s both ways"
_AMPERE = "NVIDIA Ampere GA102 white paper"
_ADA = "NVIDIA Ada white paper"
_BLACKWELL = "NVIDIA RTX Blackwell white paper"


def _geforce(
    model: str, gigabytes: int, memory_rate: float, vector: float, source: str, *, lanes: int = 16
) -> Card:
    """Return a GeForce card, whose tensor cores are multiples of `vector` in each generation.

    They sum in float32: 16 bits at half the rate of sums in float16, e4m3 likewise. A page of
    specifications states `vector`, and of the tensor cores only the fastest rate with sparsity.
    """
    name = model.removeprefix("GeForce ").replace(f" {gigabytes}GB", f"-{gigabytes}GB")
    has_fp8 = source != _AMPERE
    link = _PCIE5 if source == _BLACKWELL else _PCIE4
    link_rate = lanes * (4.0 if source == _BLACKWELL else 2.0)
    if lanes != 16:
        link = f"{link[:9]}x{lanes}, {2 * link_rate:g} GB/s both ways"
    return Card(
        name.replace(" ", "").lower(), model, gigabytes * _GB, memory_rate,
        2 * vector, 4 * vector * has_fp8, 8 * vector, vector, link_rate, link,
        f"{model} specifications, rates by the {source}",
        (f"NVIDIA {model.removesuffix(f' {gigabytes}GB')}",),
    )  # fmt: skip


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("h200", "NVIDIA H200 SXM", 141 * _GB, 4.8, 989.0, 1979.0, 1979.0, 67.0, 450.0,
             "NVLink 4, 900 GB/s both ways", "NVIDIA H200 data sheet", ("NVIDIA H200",), True),
        Card("h100", "NVIDIA H100 SXM", 80 * _GB, 3.35, 989.0, 1979.0, 1979.0, 67.0, 450.0,
             "NVLink 4, 900 GB/s both ways", "NVIDIA H100 data sheet", ("NVIDIA H100 80GB HBM3",),
             True),
        Card("h100-pcie", "NVIDIA H100 PCIe", 80 * _GB, 2.0, 756.0, 1513.0, 1513.0, 51.0, 64.0,
             _PCIE5, "NVIDIA H100 PCIe data sheet", ("NVIDIA H100 PCIe",)),
        Card("b200", "NVIDIA B200 SXM", 180 * _GB, 8.0, 2250.0, 4500.0, 4500.0, 75.0, 900.0,
             "NVLink 5, 1.8 TB/s both ways", "NVIDIA DGX B200 data sheet, an eighth of it",
             ("NVIDIA B200",)),
        Card("a100", "NVIDIA A100 SXM 80 GB", 80 * _GB, 2.039, 312.0, 0.0, 624.0, 19.5, 300.0,
             "NVLink 3, 600 GB/s both ways", "NVIDIA A100 data sheet", ("NVIDIA A100-SXM4-80GB",)),
        Card("a100-40gb", "NVIDIA A100 SXM 40 GB", 40 * _GB, 1.555, 312.0, 0.0, 624.0, 19.5, 300.0,
             "NVLink 3, 600 GB/s both ways", "NVIDIA A100 data sheet",
             ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
        Card("a100-pcie", "NVIDIA A100 PCIe 80 GB", 80 * _GB, 1.935, 312.0, 0.0, 624.0, 19.5, 32.0,
             _PCIE4, "NVIDIA A100 data sheet", ("NVIDIA A100 80GB PCIe",)),
        Card("l40s", "NVIDIA L40S", 48 * _GB, 0.864, 362.0, 733.0, 733.0, 91.6, 32.0,
             _PCIE4, "NVIDIA L40S data sheet", ("NVIDIA L40S",)),
        Card("l4", "NVIDIA L4", 24 * _GB, 0.3, 121.0, 242.0, 242.0, 30.3, 32.0,
             _PCIE4, "NVIDIA L4 data sheet", ("NVIDIA L4",)),
        Card("h200-nvl", "NVIDIA H200 NVL", 141 * _GB, 4.8, 835.5, 1670.5, 1670.5, 60.0, 64.0,
             _PCIE5, "NVIDIA H200 data sheet", ("NVIDIA H200 NVL",)),
        Card("h100-nvl", "NVIDIA H100 NVL", 94 * _GB, 3.9, 835.5, 1670.5, 1670.5, 60.0, 64.0,
             _PCIE5, "NVIDIA H100 data sheet", ("NVIDIA H100 NVL",)),
        Card("l40", "NVIDIA L40", 48 * _GB, 0.864, 181.0, 362.0, 362.0, 90.5, 32.0,
             _PCIE4, "NVIDIA L40 data sheet", ("NVIDIA L40",)),
        Card("a40", "NVIDIA A40", 48 * _GB, 0.696, 149.7, 0.0, 299.3, 37.4, 32.0,
             _PCIE4, "NVIDIA A40 data sheet", ("NVIDIA A40",)),
        Card("a30", "NVIDIA A30", 24 * _GB, 0.933, 165.0, 0.0, 330.0, 10.3, 32.0,
             _PCIE4, "NVIDIA A30 data sheet", ("NVIDIA A30",)),
        Card("a10", "NVIDIA A10", 24 * _GB, 0.6, 125.0, 0.0, 250.0, 31.2, 32.0,
             _PCIE4, "NVIDIA A10 data sheet", ("NVIDIA A10",)),
        # Dense rates are an eighth (16 bits) and a fourth of the data sheet's FP4 with sparsity.
        Card("rtxpro6000", "RTX PRO 6000 Blackwell", 96 * _GB, 1.792, 500.0, 1000.0, 1000.0, 125.0,
             64.0, _PCIE5, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet",
             ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",)),
        Card("rtx6000ada", "RTX 6000 Ada", 48 * _GB, 0.96, 364.2, 728.5, 728.5, 91.1, 32.0,
             _PCIE4, "NVIDIA RTX 6000 Ada data sheet", ("NVIDIA RTX 6000 Ada Generation",)),
        Card("rtxa6000", "RTX A6000", 48 * _GB, 0.768, 154.8, 0.0, 309.7, 38.7, 32.0,
             _PCIE4, "NVIDIA RTX A6000 data sheet", ("NVIDIA RTX A6000",)),
        # GeForce: 16 bits and e4m3 with sums in float32, at half the rate of sums in float16.
        Card("rtx3090", "GeForce RTX 3090", 24 * _GB, 0.936, 71.0, 0.0, 284.0, 35.6, 32.0,
             _PCIE4, _AMPERE, ("NVIDIA GeForce RTX 3090",)),
        Card("rtx4090", "GeForce RTX 4090", 24 * _GB, 1.008, 165.2, 330.3, 660.6, 82.6, 32.0,
             _PCIE4, _ADA, ("NVIDIA GeForce RTX 4090",)),
        Card("rtx5090", "GeForce RTX 5090", 32 * _GB, 1.792, 209.5, 419.0, 838.0, 104.8, 64.0,
             _PCIE5, _BLACKWELL, ("NVIDIA GeForce RTX 5090",)),
        _geforce("GeForce RTX 3060 12GB", 12, 0.36, 12.7, _AMPERE),
        _geforce("GeForce RTX 3080", 10, 0.76, 29.8, _AMPERE),
        _geforce("GeForce RTX 3090 Ti", 24, 1.008, 40.0, _AMPERE),
        _geforce("GeForce RTX 4060 Ti 16GB", 16, 0.288, 22.1, _ADA, lanes=8),
        _geforce("GeForce RTX 4070", 12, 0.504, 29.1, _ADA),
        _geforce("GeForce RTX 4070 Ti SUPER", 16, 0.672, 44.1, _ADA),
        _geforce("GeForce RTX 4080", 16, 0.7168, 48.7, _ADA),
        _geforce("GeForce RTX 4080 SUPER", 16, 0.736, 52.2, _ADA),
        _geforce("GeForce RTX 5060 Ti 16GB", 16, 0.448, 23.7, _BLACKWELL, lanes=8),
        _geforce("GeForce RTX 5070", 12, 0.672, 30.9, _BLACKWELL),
        _geforce("GeForce RTX 5070 Ti", 16, 0.896, 43.9, _BLACKWELL),
        _geforce("GeForce RTX 5080", 16, 0.96, 56.3, _BLACKWELL),
    )
}  # fmt: skip
"""Every kind of GPU that `engine plan` supports, by its name in options; all dense rates.

The figures are NVIDIA's own, from the documents that each card's `source` names:

- Data sheets of the A10, A30, A40, A100, L4, L40, L40S, H100, H100 PCIe, H200, DGX B200, RTX A6000,
  RTX 6000 Ada and RTX PRO 6000 Blackwell: https://www.nvidia.com/en-us/data-center/ and
  https://www.nvidia.com/en-us/products/workstations/. Rates that they give with sparsity are
  halved.
- GeForce: the pages of specifications (https://www.nvidia.com/en-us/geforce/graphics-cards/) for
  memory, bandwidth and, as cores x 2 x boost clock, float32. The white papers "NVIDIA Ampere GA102
  GPU Architecture", "NVIDIA Ada GPU Architecture" and "NVIDIA RTX Blackwell GPU Architecture" for
  the tensor cores: 2 x float32 in 16 bits, 4 x in e4m3 (not Ampere), 8 x in int8.

GPUs below compute capability 8.0 are not supported by the kernels.
"""


def find_card(name: str) -> Card:
    """Return the card called `name`: "h200", "RTX 4090", "geforce-rtx-4090" or "4090".

    Raises
    ------
    ConfigError
        If the name is unknown; the message lists the known ones.

    Examples
    --------
    >>> find_card("H200").memory_rate, find_card("4090").name
    (4.8, 'rtx4090')
    """
    plain = re.sub("nvidia|geforce|[^a-z0-9]", "", name.lower())
    for card in CARDS.values():
        if plain in (known := card.name.replace("-", ""), known.removeprefix("rtx")):
            return card
    hint = did_you_mean(name.lower(), CARDS)
    raise ConfigError(f"GPU must be one of {', '.join(CARDS)}; got {shown(name)}{hint}")
