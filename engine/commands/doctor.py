"""`engine doctor`: what this machine has, what works, and what to install next."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from typing import TypeVar

from engine import device, env
from engine._version import __version__
from engine.errors import CompileError, ConfigError
from engine.kernels import _module, _nvrtc
from engine.loading.download import local_path

__all__ = ["add_arguments", "run"]

_T = TypeVar("_T")

# Compiles only with the headers that the kernels include, and bfloat16 and fp8 conversions.
_FIVE_LINES = """#include <cuda_bf16.h>
#include <cuda_fp8.h>
extern "C" __global__ void five_lines(__nv_bfloat16* x, __nv_fp8_e4m3* y) {
  y[threadIdx.x] = __nv_fp8_e4m3(__bfloat162float(x[threadIdx.x]) * 2.0f);
}
"""


class _NotHereError(Exception):
    """Something that only a GPU needs is not on this machine; not a failure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--plan", metavar="MODEL", help="say how many tokens fit beside a model")
    parser.add_argument(
        "--memory-gb", type=float, help="for a device of this many GiB, with --plan"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run every check; 0 if the engine works on the CPU (a missing GPU is not a failure).

    With --plan, only print how the memory would be used.
    """
    if getattr(arguments, "plan", None) is not None:
        # Imported late: the checks must run where a part of the engine cannot be imported.
        from engine.commands._plan import plan_lines

        print("\n".join(plan_lines(arguments.plan, arguments.memory_gb)))
        return 0
    if getattr(arguments, "memory_gb", None) is not None:
        raise ConfigError("--memory-gb needs --plan MODEL")
    checks: list[tuple[str, Callable[[], str]]] = [
        ("engine", lambda: f"{__version__} in {os.path.dirname(os.path.dirname(__file__))}"),
        ("python", lambda: f"{platform.python_version()} on {platform.platform()}"),
        ("packages", _packages),
        ("cores", lambda: f"{os.cpu_count()}"),
        ("settings", _settings),
        ("cache", _cache),
        ("model smollm2", _model),
    ]
    failed = [name for name, check in checks if _show(name, check) != "ok"]
    gpu_checks = (_driver, _cupy, _gpu, _compiler, _headers, _kernel)
    names = ("driver", "cupy", "gpu", "nvrtc", "headers", "kernel")
    states = [_show(*pair) for pair in zip(names, gpu_checks, strict=True)]
    print()
    print("CPU: ready" if not failed else f"CPU: not ready, see {', '.join(failed)}")
    print(_verdict(states))
    return 1 if failed else 0


def _show(name: str, check: Callable[[], str]) -> str:
    """Run a check, print its line, and return "ok", "--" (not here) or "FAIL"."""
    try:
        text, state = check(), "ok"
    except _NotHereError as error:
        text, state = f"not here: {error}", "--"
    except Exception as error:  # report every failure, whatever its type
        text, state = f"{type(error).__name__}: {error}", "FAIL"
    print(f"{state:4} {name:14} {text}")
    return state


def _verdict(states: list[str]) -> str:
    """Return the line on CUDA, with the one next step."""
    if all(state == "ok" for state in states):
        return "CUDA: ready"
    install = f"{sys.executable} -m pip install '{device.gpu_extra()}'"
    if device.driver_version() is None:
        return f"CUDA: no GPU here, models run on the CPU. On a machine that has one: {install}"
    if "FAIL" in states:
        return "CUDA: not ready, see FAIL above"
    return f"CUDA: not ready. Next: {install}"


def _packages() -> str:
    wanted = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "gguf", "tqdm")
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in wanted)


def _settings() -> str:
    found = [f"{v.name}={os.environ[v.name]}" for v in env.VARIABLES if v.name in os.environ]
    env.kernel_tier(), env.compile_workers(), env.debug(), env.offline()  # raise if invalid
    return " ".join(found) or "all at their defaults"


def _cache() -> str:
    folder = env.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
    files = [p for p in folder.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files) / 1e6
    return f"{folder}: {len(files)} files, {size:.0f} MB, writable"


def _model() -> str:
    path = local_path("smollm2")
    return str(path) if path else "not pulled yet: engine pull smollm2"


def _driver() -> str:
    version = device.driver_version()
    if version is None:
        raise _NotHereError("no NVIDIA driver (libcuda)")
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _cupy() -> str:
    if importlib.util.find_spec("cupy") is None:
        raise _NotHereError("CuPy is not installed")
    return f"CuPy {device.cupy().__version__}"


def _gpu() -> str:
    if device.driver_version() is None or importlib.util.find_spec("cupy") is None:
        raise _NotHereError("needs the driver and CuPy")
    chosen, _ = device.resolve_device("cuda")
    runtime = device.cupy().cuda.runtime
    properties = runtime.getDeviceProperties(chosen.index)
    free, total = (size / 1e9 for size in runtime.memGetInfo())
    return (
        f"{properties['name'].decode()}, compute capability "
        f"{properties['major']}.{properties['minor']}, {free:.1f} of {total:.1f} GB free"
    )


def _compiler() -> str:
    return "{}.{}".format(*_part(_nvrtc.version))


def _headers() -> str:
    return " ".join(_part(_nvrtc.include_dirs))


def _kernel() -> str:
    chosen, _ = device.resolve_device("auto")
    arch = _module.current_architecture(chosen.index) if chosen.is_cuda else "sm_90a"
    options = [f"-arch={arch}", "-std=c++17", "-default-device", "-Xptxas=-v"]
    options += [f"-I{folder}" for folder in _part(_nvrtc.include_dirs)]
    entry = _nvrtc.compile_source(_FIVE_LINES, "five_lines.cu", options).entries[0]
    return f"five lines compiled for {arch}: {entry.registers} registers"


def _part(part: Callable[[], _T]) -> _T:
    """Return a part of the compiler; if it is missing and there is no GPU, that is "not here"."""
    try:
        return part()
    except CompileError as error:
        if device.driver_version() is None:
            raise _NotHereError("NVRTC and CUDA's headers are not installed") from error
        raise
