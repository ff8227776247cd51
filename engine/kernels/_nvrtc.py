"""NVRTC through ctypes: CUDA C to cubins. Needs neither a GPU nor CuPy.

The library and the CUDA headers come from the wheels of the `cuda12` / `cuda13` extras (or from a
toolkit found by `cuda-pathfinder`). CuPy's own compiler is not used: it does not know `sm_90a`, it
does not report registers and spills, and the same code must compile in CI, without CuPy.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.device import gpu_extra
from engine.errors import CompileError

__all__ = ["EntryInfo", "NvrtcError", "Program", "compile_source", "include_dirs", "version"]

_MIN_VERSION = (12, 9)  # first version that accepts -arch=sm_90a with our options


@dataclass(frozen=True)
class EntryInfo:
    """ptxas's report on one kernel: registers per thread, spilled and static shared bytes."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int


@dataclass(frozen=True)
class Program:
    """A compiled source: the cubin, ptxas's report on each kernel, and the whole log."""

    cubin: bytes
    entries: tuple[EntryInfo, ...]
    log: str


class NvrtcError(CompileError):
    """A source does not compile; `log` is what NVRTC and ptxas said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def _pathfinder() -> Any:
    try:
        from cuda import pathfinder
    except ImportError as error:
        raise CompileError(
            "finding NVRTC and the CUDA headers needs cuda-pathfinder, which is not installed; "
            f"install a GPU extra: pip install '{gpu_extra()}'"
        ) from error
    return pathfinder


@cache
def _library() -> ctypes.CDLL:
    pathfinder = _pathfinder()
    try:
        found = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except Exception as error:
        raise CompileError(
            f"NVRTC was not found ({error}); install it with: pip install '{gpu_extra()}'"
        ) from error
    return ctypes.CDLL(found.abs_path)


@cache
def version() -> tuple[int, int]:
    """Return NVRTC's version, (major, minor).

    Raises
    ------
    CompileError
        If NVRTC is missing or older than 12.9.
    """
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    found = (major.value, minor.value)
    if found < _MIN_VERSION:
        raise CompileError(f"NVRTC must be at least {_MIN_VERSION}; found {found}")
    return found


@cache
def include_dirs() -> tuple[str, ...]:
    """Return the folders of the CUDA headers (cuda_fp16.h, cuda_bf16.h, cuda_fp8.h)."""
    folder = _pathfinder().find_nvidia_header_directory("cudart")
    if not folder or not (Path(folder) / "cuda_fp16.h").exists():
        raise CompileError(
            f"the CUDA headers were not found (looked in {folder}); "
            "install them with: pip install nvidia-cuda-runtime-cu12"
        )
    return (str(folder),)


def compile_source(source: str, name: str, options: Sequence[str]) -> Program:
    """Compile `source` (called `name` in messages) to a cubin.

    Raises
    ------
    NvrtcError
        With NVRTC's log, if the source does not compile.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    try:
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        text = log.rstrip(b"\0").decode(errors="replace")
        if status != 0:
            message = f"{name} does not compile with {' '.join(options)}:\n{text}"
            raise NvrtcError(message, text)
        cubin = _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Program(cubin, _parse_ptxas(text), text)


def _read(program: ctypes.c_void_p, get_size: object, get: object) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)), "size")  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer), "read")  # type: ignore[operator]
    return buffer.raw


def _check(status: int, what: str) -> None:
    if status != 0:
        raise CompileError(f"NVRTC: {what} failed with status {status}")


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def _parse_ptxas(log: str) -> tuple[EntryInfo, ...]:
    """Parse the output of `-Xptxas=-v`, a group of lines per kernel."""
    entries: list[EntryInfo] = []
    name = ""
    stack = 0
    spill = 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = match[1]
            stack = 0
            spill = 0
        elif match := _STACK.search(line):
            stack = int(match[1])
            spill = int(match[2]) + int(match[3])
        elif name and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            entries.append(
                EntryInfo(name, int(match[1]), spill, int(shared[1]) if shared else 0, stack)
            )
            name = ""
    return tuple(entries)
