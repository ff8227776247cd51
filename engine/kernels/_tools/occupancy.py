"""Occupancy: how many blocks of a kernel a multiprocessor holds at once, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels._chip import RESERVED_BYTES
from engine.kernels._launch import ceil_div
from engine.kernels._user.problem import REGISTERS, Chip

__all__ = ["Occupancy", "occupancy"]

_WARP = 32
_PARTITIONS = 4  # a warp lives in one, with a quarter of the registers
_REGISTER_UNIT = 256  # registers of a warp are allocated in these
_SHARED_UNIT = 128  # bytes

# Resident threads and blocks of a multiprocessor. CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_LIMITS = {
    "sm_80": (2048, 32),
    "sm_86": (1536, 16),
    "sm_87": (1536, 16),
    "sm_89": (1536, 24),
    "sm_90a": (2048, 32),
    "sm_100": (2048, 32),
    "sm_103": (2048, 32),
    "sm_120": (1536, 24),
    "sm_121": (1536, 24),
}
_DEFAULT = (1536, 16)


@dataclass(frozen=True)
class Occupancy:
    """Blocks that a multiprocessor holds at once.

    Attributes
    ----------
    blocks : int
        0 if not one block fits.
    warps, max_warps : int
        Resident warps, and those that the multiprocessor has room for.
    limits : tuple of str
        What allows no further block: "registers", "shared memory", "threads", "blocks".
    """

    blocks: int
    warps: int
    max_warps: int
    limits: tuple[str, ...]

    @property
    def fraction(self) -> float:
        """Resident warps as a fraction of those that fit."""
        return self.warps / self.max_warps


def occupancy(chip: Chip, threads: int, registers: int, shared: int) -> Occupancy:
    """Return the theoretical occupancy of a kernel.

    Parameters
    ----------
    chip : Chip
    threads : int
        Threads of a block.
    registers : int
        Registers of a thread.
    shared : int
        Shared memory of a block in bytes, static and dynamic.

    Examples
    --------
    >>> from engine.kernels._user.problem import CHIPS
    >>> occupancy(CHIPS["sm_90a"], 256, 64, 0)
    Occupancy(blocks=4, warps=32, max_warps=64, limits=('registers',))
    """
    max_threads, max_blocks = _LIMITS.get(chip.arch, _DEFAULT)
    warps = ceil_div(threads, _WARP)
    of_a_warp = max(1, ceil_div(registers * _WARP, _REGISTER_UNIT)) * _REGISTER_UNIT
    warps_by_registers = REGISTERS // _PARTITIONS // of_a_warp * _PARTITIONS
    of_a_block = ceil_div(shared + RESERVED_BYTES, _SHARED_UNIT) * _SHARED_UNIT
    allowed = {
        "registers": warps_by_registers // warps,
        "shared memory": (chip.max_shared_bytes + RESERVED_BYTES) // of_a_block,
        "threads": max_threads // _WARP // warps,
        "blocks": max_blocks,
    }
    blocks = min(allowed.values())
    limits = tuple(name for name, most in allowed.items() if most == blocks)
    return Occupancy(blocks, blocks * warps, max_threads // _WARP, limits)
