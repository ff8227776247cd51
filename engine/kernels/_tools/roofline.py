"""The roofs of a GPU: bytes and operations a second, at most; and how near a time comes to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import device
from engine.cards import CARDS, Card
from engine.kernels._module import current_architecture
from engine.testing.timing import L2_BYTES, measure_gpu

__all__ = ["Peaks", "Roof", "copy_rate", "peaks_of_card", "peaks_of_device"]

_COPY_BYTES = 1 << 28
# float32 lanes of a multiprocessor, and 16-bit operations of its tensor cores in a clock (sums in
# float32), by architecture. CUDA programming guide, and NVIDIA's white papers. GeForce: half.
_LANES = {"sm_80": 64}
_TENSOR = {"sm_80": 2048, "sm_90a": 4096, "sm_100": 8192}
_TENSOR_DEFAULT = 1024


@dataclass(frozen=True)
class Roof:
    """The limit of one problem.

    Attributes
    ----------
    name : str
        "memory" or "arithmetic".
    seconds : float
        Time at the card's peak.
    """

    name: str
    seconds: float


@dataclass(frozen=True)
class Peaks:
    """What a GPU can do at most.

    Attributes
    ----------
    title : str
    memory : float
        Bytes per second of its memory.
    rates : dict of str to float
        Operations per second by dtype: float32, tf32, bfloat16, fp8, int8.
    source : str
        Where the figures are from.
    sm_count, l2_bytes : int
    """

    title: str
    memory: float
    rates: dict[str, float]
    source: str
    sm_count: int = 0
    l2_bytes: int = L2_BYTES

    def rate(self, dtype: str) -> float:
        """Return operations per second in `dtype`; float32 is outside tensor cores."""
        name = "bfloat16" if dtype == "float16" else dtype
        return self.rates.get(name) or self.rates["float32"]

    def roof(self, nbytes: float, flops: float, dtype: str) -> Roof:
        """Return the limit of a problem: the slower one of its bytes and its operations.

        Examples
        --------
        >>> h200 = peaks_of_card(CARDS["h200"])
        >>> h200.roof(4.8e6, 1e6, "float32")
        Roof(name='memory', seconds=1e-06)
        >>> h200.roof(4.8e6, 989e7, "bfloat16")
        Roof(name='arithmetic', seconds=1e-05)
        """
        moving = nbytes / self.memory
        computing = flops / self.rate(dtype)
        return Roof("arithmetic", computing) if computing > moving else Roof("memory", moving)


def peaks_of_card(card: Card, sm_count: int = 0, l2_bytes: int = L2_BYTES) -> Peaks:
    """Return the figures of a data sheet."""
    return Peaks(
        card.title,
        card.memory_rate * 1e12,
        _rates(card.vector, card.tensor_16, card.tensor_fp8, card.tensor_int8),
        card.source,
        sm_count,
        l2_bytes,
    )


def _rates(vector: float, tensor: float, fp8: float, int8: float) -> dict[str, float]:
    """Return operations per second by dtype, from TFLOP/s."""
    rates = {"float32": vector, "tf32": tensor / 2, "bfloat16": tensor, "fp8": fp8, "int8": int8}
    return {name: rate * 1e12 for name, rate in rates.items()}


def peaks_of_device(index: int) -> Peaks:
    """Return the peaks of a CUDA device: from its data sheet, else computed from its clocks."""
    cuda = device.cupy().cuda
    name = cuda.runtime.getDeviceProperties(index)["name"].decode()
    found = dict(cuda.Device(index).attributes)
    arch = current_architecture(index)
    sm_count = int(found["MultiProcessorCount"])
    l2_bytes = int(found.get("L2CacheSize") or L2_BYTES)
    for card in CARDS.values():
        if name in card.devices:
            return peaks_of_card(card, sm_count, l2_bytes)
    clocks = sm_count * int(found["ClockRate"]) * 1e3 * 1e-12  # 10^12 a second
    tensor = clocks * _TENSOR.get(arch, _TENSOR_DEFAULT) / (2 if "GeForce" in name else 1)
    vector = clocks * 2 * _LANES.get(arch, 128)
    memory = 2e3 * int(found.get("MemoryClockRate") or 0)  # two transfers a clock
    memory *= int(found.get("GlobalMemoryBusWidth") or 0) / 8
    source = "computed from its clocks"
    if not memory:
        memory = copy_rate()
        source += "; memory: a measured copy"
    return Peaks(name, memory, _rates(vector, tensor, 0.0, 2 * tensor), source, sm_count, l2_bytes)


def copy_rate() -> float:
    """Return bytes per second, read and written, of copying a large array on the current device."""
    cupy = device.cupy()
    source, target = (cupy.zeros(_COPY_BYTES, cupy.uint8) for _ in range(2))

    def copy() -> Any:
        target[...] = source

    timing = measure_gpu([copy], replays=5, min_launches=4)
    return 2 * _COPY_BYTES / timing.median
