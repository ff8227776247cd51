"""Why a launch fails: registers and shared memory of a block, and errors of earlier kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.errors import DeviceError
from engine.kernels._module import CompiledModule, compile_module
from engine.kernels._nvrtc import EntryInfo
from engine.kernels._user.cubin import max_threads
from engine.kernels._user.module import UserModule
from engine.kernels._user.problem import REGISTERS, Chip, Launch

__all__ = ["LOST", "explained", "resource_errors"]

LOST = "an earlier kernel failed"
"""In the error of a launch that finds the CUDA context lost."""

_WARP = 32  # threads
# CUresult of a launch, in words.
_CODES = {
    "1": "invalid value",
    "2": "out of memory",
    "700": "illegal address",
    "701": "out of resources: too many registers or threads, or too much shared memory",
    "715": "illegal instruction",
    "716": "misaligned address",
    "719": "launch failed",
}
_REGISTER_UNIT = 8  # registers of a thread are allocated in such numbers


def resource_errors(
    launch: Launch, entry: EntryInfo, compiled: CompiledModule, chip: Chip
) -> Iterator[str]:
    """Yield why no multiprocessor runs a block of the launch."""
    bound = max_threads(compiled.path.read_bytes(), entry.name)
    if bound and launch.num_threads > bound:
        yield (
            f"{entry.name} is compiled for blocks of at most {bound} threads "
            f"(__launch_bounds__); the launch has {launch.num_threads}"
        )
    per_thread = -(-entry.registers // _REGISTER_UNIT) * _REGISTER_UNIT
    needed = -(-launch.num_threads // _WARP) * _WARP * per_thread
    if needed > REGISTERS:
        yield (
            f"{entry.name}: {launch.num_threads} threads of {entry.registers} registers need "
            f"{needed}; a block has {REGISTERS}. Launch fewer threads, or state "
            f"__launch_bounds__({launch.num_threads})"
        )
    if entry.shared_bytes + launch.shared > chip.max_shared_bytes:
        yield (
            f"{entry.name}: {entry.shared_bytes} bytes of static and {launch.shared} bytes of "
            f"dynamic shared memory; a block of {chip.arch} has {chip.max_shared_bytes}"
        )


def explained(
    error: Exception, op: str, launch: Launch, module: UserModule, entry: str, chip: Chip
) -> DeviceError:
    """Return an error that names the cause of a launch that the driver refuses."""
    compiled = compile_module(module, chip.arch)
    reasons = [
        reason
        for each in compiled.entries
        if each.name == entry
        for reason in resource_errors(launch, each, compiled, chip)
    ]
    if reasons:
        return DeviceError(f"{op}: the launch fails: {'; '.join(reasons)}")
    if isinstance(error, DeviceError):  # a tensor map, for example: its words name the cause
        return DeviceError(f"{op}: the launch fails: {error}")
    text = re.sub(r"error (\d+)", lambda code: _CODES.get(code[1], code[0]), str(error))
    if re.search("illegal|misaligned|assert|launch.failed", text, re.IGNORECASE):
        return DeviceError(
            f"{op}: {LOST}, which CUDA reports at the next call: {text}. "
            "kernels.check finds the kernel and the cause"
        )
    return DeviceError(
        f"{op}: the launch fails: {text}; grid {launch.grid}, block {launch.block}, "
        f"{launch.shared} bytes of shared memory, clusters of {launch.cluster}"
    )
