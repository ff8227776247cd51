"""Hardware counters of an op's kernels: Nsight Compute (ncu) in a child process, in ten lines."""

from __future__ import annotations

import csv
import glob
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.kernels._tools.check_cases import Case
from engine.kernels._user.op import Op

__all__ = ["KernelCounters", "find_ncu", "mark_child", "measure", "parse"]

_SECTIONS = (
    *("SpeedOfLight", "Occupancy", "WarpStateStats", "MemoryWorkloadAnalysis"),
    *("MemoryWorkloadAnalysis_Tables", "ComputeWorkloadAnalysis", "SourceCounters"),
)
_PLACES = (
    "/usr/local/cuda/bin/ncu",
    "/usr/local/cuda-*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
)
_TIMEOUT = 300  # seconds
_LEAST_STALL = 0.05  # share of a warp's time from which a reason is reported
_NOTABLE = 0.1  # share of excess accesses from which they are reported

NO_NCU = (
    "no hardware counters: ncu was not found. It is part of Nsight Compute, in the CUDA toolkit: "
    "https://developer.nvidia.com/nsight-compute"
)
NOT_PERMITTED = (
    "no hardware counters: the driver does not permit them (ERR_NVGPUCTRPERM). Run as root, or "
    "load the driver with NVreg_RestrictProfilingToAdminUsers=0; in a container add "
    "--cap-add=SYS_ADMIN: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)
NO_FILE = (
    "no hardware counters: ncu runs the definition in a child process, so it must be in a file: "
    "engine kernels profile FILE.py"
)

# Reason of a stall in ncu's metrics -> what the warp does, and what may help.
_STALLS = {
    "long_scoreboard": (
        "waiting for global or local memory",
        "put more bytes in flight: 16-byte loads, several before the first use, more warps",
    ),
    "short_scoreboard": (
        "waiting for shared memory or a special function",
        "look for bank conflicts and narrow accesses; use fewer exp, log, division",
    ),
    "barrier": (
        "waiting at __syncthreads()",
        "give all warps the same work, or an SM more and smaller blocks",
    ),
    "wait": ("waiting out a fixed latency", "unroll: more independent instructions"),
    "math_pipe_throttle": ("waiting for a busy arithmetic unit", "it is the limit"),
    "lg_throttle": ("waiting to issue a global access", "make fewer and wider ones"),
    "mio_throttle": ("waiting to issue a shared memory access", "make fewer and wider ones"),
    "tex_throttle": ("waiting to issue a texture access", "make fewer and wider ones"),
    "not_selected": ("ready, but another warp was issued", "no limit: there are enough warps"),
    "no_instruction": ("waiting for instructions", "shorten the code, or do more in a thread"),
    "imc_miss": ("waiting for constants", "use fewer, or the same in all threads"),
    "drain": ("waiting for the last stores", "store 16 bytes a thread, coalesced"),
    "membar": ("waiting at a memory fence", "use fewer fences, or of smaller scope"),
    "branch_resolving": ("waiting for a branch", "branch less"),
    "sleeping": ("asleep", "__nanosleep is what it asked for"),
    "gmma": ("waiting for wgmma", "the tensor cores are the limit, or wait later for them"),
}

_TENSOR = r"sm__(inst_executed_)?pipe_tensor.*\.avg\.pct_of_peak_sustained_(active|elapsed)"

_is_child = False


@dataclass(frozen=True)
class KernelCounters:
    """What ncu counted for one launch. Shares are of 1.

    Attributes
    ----------
    kernel : str
    seconds : float
    dram, l2, sm_busy, tensor, occupancy : float or None
        Throughput of memory, of L2 and of the multiprocessors as shares of their peaks; tensor
        cores, share of the cycles; resident warps, share of those that fit. None: not counted.
    stalls : tuple of (str, float)
        Reason, and share of the time of a warp between two instructions; the largest first.
    uncoalesced, bank_conflicts : float or None
        Share of the global sectors, and of the shared memory wavefronts, that better placed
        accesses would not need.
    """

    kernel: str
    seconds: float
    dram: float | None = None
    l2: float | None = None
    sm_busy: float | None = None
    tensor: float | None = None
    occupancy: float | None = None
    stalls: tuple[tuple[str, float], ...] = ()
    uncoalesced: float | None = None
    bank_conflicts: float | None = None

    def lines(self) -> list[str]:
        """Return at most ten readable lines."""
        used = {"DRAM": self.dram, "L2": self.l2, "SMs": self.sm_busy, "tensor cores": self.tensor}
        shares = ", ".join(
            f"{name} {share:.0%}" for name, share in used.items() if share is not None
        )
        lines = [f"{self.kernel}  {self.seconds * 1e6:.1f} us under ncu, caches flushed before it"]
        lines.append(f"  used of the peak: {shares}")
        if self.occupancy is not None:
            lines.append(f"  occupancy achieved: {self.occupancy:.0%}")
        for reason, share in self.stalls[:3]:
            if share < _LEAST_STALL:
                continue
            what, advice = _STALLS.get(reason, (reason.replace("_", " "), "see Nsight Compute"))
            lines.append(f"  {what}: {share:.0%} of a warp's time; {advice}")
        if (self.uncoalesced or 0) > _NOTABLE:
            lines.append(
                f"  uncoalesced: {self.uncoalesced:.0%} of the sectors moved are not needed; "
                "neighbouring threads should access neighbouring addresses"
            )
        if (self.bank_conflicts or 0) > _NOTABLE:
            lines.append(
                f"  bank conflicts: {self.bank_conflicts:.0%} of the accesses to shared memory are "
                "repeats; pad the rows, or swizzle them"
            )
        return lines


def mark_child() -> None:
    """Mark this process as the one that ncu profiles: it must not start another."""
    global _is_child
    _is_child = True


def find_ncu() -> str | None:
    """Return the path of ncu; None if it is not installed."""
    if found := shutil.which("ncu"):
        return found
    places = [path for pattern in _PLACES for path in sorted(glob.glob(pattern), reverse=True)]
    return places[0] if places else None


def measure(op: Op, case: Case) -> tuple[tuple[KernelCounters, ...], str]:
    """Return the counters of each kernel of a call, and why there are none."""
    if _is_child:  # the file of the definition profiles it itself
        return (), ""
    program = find_ncu()
    if program is None:
        return (), NO_NCU
    if not op.definition.file:
        return (), NO_FILE
    command = [program, *_options(), *_child(op, case)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"no hardware counters: {error}"
    found = parse(done.stdout)
    if found:
        return tuple(found), ""
    said = f"{done.stdout}\n{done.stderr}"
    return (), NOT_PERMITTED if "ERR_NVGPUCTRPERM" in said else _failure(said)


def _options() -> list[str]:
    sections = [word for name in _SECTIONS for word in ("--section", name)]
    return [
        *("--profile-from-start", "off", "--clock-control", "none"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *sections,
    ]


def _child(op: Op, case: Case) -> list[str]:
    sizes = {name: value for name, value in (*case.sizes, *case.scalars)}
    words = [op.definition.file, op.name, json.dumps(sizes), case.dtype]
    return [sys.executable, "-m", "engine.kernels._tools.profile_child", *words]


def _failure(said: str) -> str:
    """Return ncu's error, or the last line of a traceback."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")] or lines[-1:]
    return f"no hardware counters: ncu failed: {' '.join(errors)[:400] or 'it printed nothing'}"


def parse(text: str) -> list[KernelCounters]:
    """Return the counters in ncu's output (`--csv --page raw --print-units base`)."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = csv.DictReader(lines[start:])
    return [_counters(row) for row in rows if (row.get("ID") or "").strip()]  # the first has units


def _counters(row: Mapping[str, str]) -> KernelCounters:
    nanoseconds = _number(row, "gpu__time_duration.sum") or 0.0
    return KernelCounters(
        row.get("Kernel Name", "?").partition("(")[0],
        nanoseconds * 1e-9,
        _percent(row, r"(gpu__)?dram__?throughput\.avg\.pct_of_peak_sustained_elapsed"),
        _percent(row, r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed"),
        _percent(row, r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed"),
        _percent(
            row, r"sm__(inst_executed_)?pipe_tensor.*\.avg\.pct_of_peak_sustained_(active|elapsed)"
        ),
        _percent(row, r"sm__warps_active\.avg\.pct_of_peak_sustained_active"),
        _stalls(row),
        _share(
            row,
            "derived__memory_l2_theoretical_sectors_global_excessive",
            "memory_l2_theoretical_sectors_global",
        ),
        _share(
            row, "derived__memory_l1_wavefronts_shared_excessive", "memory_l1_wavefronts_shared"
        ),
    )


def _percent(row: Mapping[str, str], pattern: str) -> float | None:
    """Return the largest metric whose name matches, as a share: names differ by architecture."""
    found = [_number(row, name) for name in row if re.fullmatch(pattern, name or "")]
    values = [value / 100 for value in found if value is not None]
    return max(values, default=None)


def _stalls(row: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    pattern = r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio"
    times: dict[str, float] = {}
    for name in row:
        match = re.fullmatch(pattern, name or "")
        if match and "not_issued" not in match[1]:
            times[match[1]] = _number(row, name) or 0.0
    total = sum(times.values())
    ordered: Sequence[tuple[str, float]] = sorted(times.items(), key=lambda item: -item[1])
    return tuple((name, time / total) for name, time in ordered if name != "selected" and time)


def _share(row: Mapping[str, str], part: str, whole: str) -> float | None:
    a = _number(row, part)
    b = _number(row, whole)
    return None if a is None or not b else a / b


def _number(row: Mapping[str, str], name: str) -> float | None:
    """Return a metric; None if ncu lacks it, or has "nan", as where processes share the card."""
    try:
        value = float(row[name].replace(",", ""))
    except (KeyError, ValueError, AttributeError):
        return None
    return value if math.isfinite(value) else None
