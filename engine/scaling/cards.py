"""GPU data sheets: memory, bandwidth, arithmetic throughput, links."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from engine.checks import shown
from engine.errors import ConfigError

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
    is_measured: bool = False


_GB = 10**9

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("h200", "NVIDIA H200 SXM", 141 * _GB, 4.8, 989.0, 1979.0, 1979.0, 67.0, 450.0,
             "NVLink 4, 900 GB/s both ways", "NVIDIA H200 data sheet", True),
        Card("h100", "NVIDIA H100 SXM", 80 * _GB, 3.35, 989.0, 1979.0, 1979.0, 67.0, 450.0,
             "NVLink 4, 900 GB/s both ways", "NVIDIA H100 data sheet"),
        Card("b200", "NVIDIA B200 SXM", 180 * _GB, 8.0, 2250.0, 4500.0, 4500.0, 75.0, 900.0,
             "NVLink 5, 1.8 TB/s both ways", "NVIDIA DGX B200 data sheet, an eighth of it"),
        Card("a100", "NVIDIA A100 SXM 80 GB", 80 * _GB, 2.039, 312.0, 0.0, 624.0, 19.5, 300.0,
             "NVLink 3, 600 GB/s both ways", "NVIDIA A100 data sheet"),
        Card("l40s", "NVIDIA L40S", 48 * _GB, 0.864, 362.0, 733.0, 733.0, 91.6, 32.0,
             "PCIe 4.0 x16, 64 GB/s both ways", "NVIDIA L40S data sheet"),
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
    close = difflib.get_close_matches(name.lower(), CARDS, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"GPU must be one of {', '.join(CARDS)}; got {shown(name)}{hint}")
