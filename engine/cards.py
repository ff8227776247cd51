"""GPU data sheets: memory, bandwidth, arithmetic throughput, links."""

from __future__ import annotations

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

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("h200", "NVIDIA H200 SXM", 141 * _GB, 4.8, 989.0, 1979.0, 1979.0, 67.0, 450.0,
             "NVLink 4, 900 GB/s both ways", "NVIDIA H200 data sheet", ("NVIDIA H200",), True),
        Card("h100", "NVIDIA H100 SXM", 80 * _GB, 3.35, 989.0, 1979.0, 1979.0, 67.0, 450.0,
             "NVLink 4, 900 GB/s both ways", "NVIDIA H100 data sheet", ("NVIDIA H100 80GB HBM3",)),
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
        Card("a10", "NVIDIA A10", 24 * _GB, 0.6, 125.0, 0.0, 250.0, 31.2, 32.0,
             _PCIE4, "NVIDIA A10 data sheet", ("NVIDIA A10",)),
        # GeForce: 16 bits and e4m3 with sums in float32, at half the rate of sums in float16.
        Card("rtx3090", "GeForce RTX 3090", 24 * _GB, 0.936, 71.0, 0.0, 284.0, 35.6, 32.0,
             _PCIE4, "NVIDIA Ampere GA102 white paper", ("NVIDIA GeForce RTX 3090",)),
        Card("rtx4090", "GeForce RTX 4090", 24 * _GB, 1.008, 165.2, 330.3, 660.6, 82.6, 32.0,
             _PCIE4, "NVIDIA Ada white paper", ("NVIDIA GeForce RTX 4090",)),
        Card("rtx5090", "GeForce RTX 5090", 32 * _GB, 1.792, 209.5, 419.0, 838.0, 104.8, 64.0,
             _PCIE5, "NVIDIA RTX Blackwell white paper", ("NVIDIA GeForce RTX 5090",)),
    )
}  # fmt: skip
"""Every kind of GPU that `engine plan` supports, by its name in options."""


def find_card(name: str) -> Card:
    """Return the card called `name`, ignoring case.

    Raises
    ------
    ConfigError
        If the name is unknown; the message lists the known ones.

    Examples
    --------
    >>> find_card("H200").memory_rate
    4.8
    """
    if (card := CARDS.get(name.lower())) is not None:
        return card
    hint = did_you_mean(name.lower(), CARDS)
    raise ConfigError(f"GPU must be one of {', '.join(CARDS)}; got {shown(name)}{hint}")
