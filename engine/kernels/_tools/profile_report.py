"""What `profile` found, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.kernels._tools.ncu import KernelCounters
from engine.kernels._tools.occupancy import Occupancy
from engine.kernels._tools.roofline import Peaks
from engine.kernels._tools.table import text_table
from engine.kernels._user.problem import Chip, Launch

__all__ = ["LaunchProfile", "ProfileReport"]

_LATENCY = 600e-9  # seconds from a load to its data under load, about, on every architecture


@dataclass(frozen=True)
class LaunchProfile:
    """One launch of an op on one GPU.

    Attributes
    ----------
    chip : Chip
    kernel : str
    launch : Launch
    registers : int
        Of a thread.
    spill_bytes, static_shared : int
        Bytes that ptxas spilled; static shared memory of a block.
    occupancy : Occupancy
    """

    chip: Chip
    kernel: str
    launch: Launch
    registers: int
    spill_bytes: int
    static_shared: int
    occupancy: Occupancy

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.launch.grid)

    @property
    def waves(self) -> float:
        """Blocks of the grid, divided by those that the GPU holds at once."""
        return self.num_blocks / max(1, self.occupancy.blocks * self.chip.sm_count)

    @property
    def tail(self) -> float:
        """Share of the multiprocessors' time in which no block is left for them, 0 to 1.

        Assumes that all blocks take the same time.
        """
        return 1 - self.waves / max(1, math.ceil(self.waves))

    def lines(self, peaks: Peaks | None) -> list[str]:
        """Return the launch in a few readable lines."""
        launch = self.launch
        shared = f"{self.static_shared} bytes static, {launch.shared} dynamic"
        spills = f"{self.spill_bytes} bytes spilled" if self.spill_bytes else "none spilled"
        lines = [
            f"{self.kernel}  grid {launch.grid}, block {launch.block}",
            f"  registers {self.registers} a thread, {spills}; shared memory {shared}",
            f"  {self._occupancy_text()}",
        ]
        if self.occupancy.blocks:
            lines.append(f"  {self._waves_text()}")
        if peaks is not None and peaks.sm_count and self.occupancy.blocks:
            lines.append(f"  {self._in_flight_text(peaks)}")
        return lines

    def _occupancy_text(self) -> str:
        found = self.occupancy
        if not found.blocks:
            return f"no block fits on a multiprocessor: {', '.join(found.limits)}"
        return (
            f"occupancy {found.fraction:.0%}: {found.blocks} blocks an SM, {found.warps} of "
            f"{found.max_warps} warps; limited by {', '.join(found.limits)}"
        )

    def _waves_text(self) -> str:
        at_once = self.occupancy.blocks * self.chip.sm_count
        text = f"{self.num_blocks} blocks, {at_once} at once: {self.waves:.2f} waves"
        if self.num_blocks < self.chip.sm_count:
            return f"{text}; {self.num_blocks} of {self.chip.sm_count} SMs have a block"
        return f"{text}; {self.tail:.0%} of the SM time is the tail of the last one"

    def _in_flight_text(self, peaks: Peaks) -> str:
        per_sm = peaks.memory * _LATENCY / peaks.sm_count
        threads = 32 * self.occupancy.warps
        return (
            f"memory at full rate needs {per_sm / 1024:.0f} KiB in flight an SM (600 ns): "
            f"{per_sm / threads:.0f} bytes for each resident thread"
        )


@dataclass(frozen=True)
class ProfileReport:
    """The result of `profile`: `print` shows it.

    Attributes
    ----------
    op, case : str
        Name, and the call that is profiled: sizes and dtype.
    launches : tuple of LaunchProfile
        On this GPU, or compiled for a common GPU of each architecture.
    failures : dict of str to str
        Architecture -> why the op does not run there.
    counters : tuple of KernelCounters
        Measured by ncu; empty without it.
    note : str
        Why there are no counters.
    peaks : Peaks or None
        Of this GPU.
    """

    op: str
    case: str
    launches: tuple[LaunchProfile, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    counters: tuple[KernelCounters, ...] = ()
    note: str = ""
    peaks: Peaks | None = None

    def __str__(self) -> str:
        lines = [f"{self.op}  {self.case}"]
        if self.peaks is not None:
            lines[0] += f"  on {self.peaks.title}"
            lines += [line for each in self.launches for line in each.lines(self.peaks)]
        else:
            lines += [*text_table(_HEADS, [_cells(each) for each in self.launches])]
        lines += [f"{arch}: {reason}" for arch, reason in self.failures.items()]
        for each in self.counters:
            lines += each.lines()
        return "\n".join([*lines, *([self.note] if self.note else [])])

    __repr__ = __str__


_HEADS = (
    "arch",
    "kernel",
    "block",
    "registers",
    "spilled",
    "shared",
    "occupancy",
    "limit",
    "waves",
)


def _cells(each: LaunchProfile) -> Sequence[str]:
    found = each.occupancy
    return (
        each.chip.arch,
        each.kernel,
        "x".join(map(str, each.launch.block)),
        str(each.registers),
        str(each.spill_bytes),
        str(each.static_shared + each.launch.shared),
        f"{found.fraction:.0%}, {found.blocks} blocks",
        ", ".join(found.limits),
        f"{each.waves:.1f} on {each.chip.sm_count} SMs",
    )
