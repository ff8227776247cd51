"""What the current GPU allows: multiprocessors, shared memory, and the Hopper kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from engine import device, env
from engine.kernels._module import current_architecture

__all__ = ["DEFAULT_SHARED_BYTES", "HOPPER", "HOPPER_DTYPES", "PORTABLE", "Limits", "is_hopper"]
__all__ += ["RESERVED_BYTES", "limits", "limits_of", "sm_count"]

HOPPER_DTYPES = ("float16", "bfloat16")
"""Dtypes of the kernels in `*_sm90.cu`."""

DEFAULT_SHARED_BYTES = 48 * 1024
"""Shared memory of a block, static and dynamic, unless its kernel asks for more."""

RESERVED_BYTES = 1024
"""Shared memory of a multiprocessor that the driver takes for each resident block."""


@dataclass(frozen=True)
class Limits:
    """Launch limits of a GPU.

    Attributes
    ----------
    shared_bytes : int
        Maximum shared memory per block in bytes, static and dynamic.
    has_clusters : bool
        Whether it supports thread block clusters and programmatic dependent launch, which both
        need compute capability 9.0.
    """

    shared_bytes: int
    has_clusters: bool

    @property
    def sm_shared_bytes(self) -> int:
        """Shared memory per multiprocessor: the maximum of a block, plus the driver's reserve."""
        return self.shared_bytes + RESERVED_BYTES

    def shared_per_block(self, blocks: int) -> int:
        """Return the maximum shared memory per block if `blocks` blocks share a multiprocessor.

        Examples
        --------
        >>> HOPPER.shared_per_block(1) // 1024, HOPPER.shared_per_block(2) // 1024
        (227, 113)
        """
        return self.sm_shared_bytes // blocks - RESERVED_BYTES


PORTABLE = Limits(99 * 1024, has_clusters=False)
"""Limits that every chip from sm_80 on meets."""
HOPPER = Limits(227 * 1024, has_clusters=True)


def is_hopper(dtype: str) -> bool:
    """Tell whether the Hopper kernels may run: the current device is a Hopper, ENGINE_KERNEL_TIER
    allows them, and they support `dtype`."""
    return (
        dtype in HOPPER_DTYPES
        and env.kernel_tier() == "auto"
        and current_architecture(_current()) == "sm_90a"
    )


def limits() -> Limits:
    """Return the limits of the current device."""
    return limits_of(_current())


def sm_count() -> int:
    """Return the number of multiprocessors of the current device."""
    return _sm_count(_current())


def _current() -> int:
    return int(device.cupy().cuda.runtime.getDevice())


@cache
def limits_of(index: int) -> Limits:
    """Return the limits of device `index`; cached, since CuPy queries a hundred attributes."""
    cuda = device.cupy().cuda
    shared_bytes = int(cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"])
    major = int(cuda.runtime.getDeviceProperties(index)["major"])
    return Limits(shared_bytes, has_clusters=major >= 9)


@cache
def _sm_count(index: int) -> int:
    return int(device.cupy().cuda.Device(index).attributes["MultiProcessorCount"])
