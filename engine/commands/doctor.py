"""`engine doctor`: check this machine, and say what to install next."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from typing import TypeVar

from engine import device, env, threads
from engine._version import __version__
from engine.cache.memory_pool import device_memory, format_bytes
from engine.checks import shown, shown_size
from engine.commands._bench_models import named_config
from engine.commands._quantization import add_quantization_argument, planned_quantization
from engine.commands._speculation import add_speculation_argument, speculation_option
from engine.commands.kernels import checked_arch, op_names, op_specs
from engine.config import ModelConfig
from engine.errors import CompileError, ConfigError, did_you_mean
from engine.kernels import _module, _nvrtc
from engine.kernels._cpu import compiled
from engine.loading.download import local_path
from engine.loading.load_config import LoadConfig, resolve_load_config
from engine.model_files import excerpt
from engine.scaling.memory import MemoryPlan, plan_memory
from engine.speculative import SpeculativeConfig
from engine.speculative.config import HEAD_METHODS
from engine.weights.quantize import QUANTIZABLE

__all__ = ["add_arguments", "run"]

_T = TypeVar("_T")

# Compiles only if the CUDA headers that the kernels include (bfloat16, fp8) are available.
_FIVE_LINES = """#include <cuda_bf16.h>
#include <cuda_fp8.h>
extern "C" __global__ void five_lines(__nv_bfloat16* x, __nv_fp8_e4m3* y) {
  y[threadIdx.x] = __nv_fp8_e4m3(__bfloat162float(x[threadIdx.x]) * 2.0f);
}
"""


_MATRIX = (3072, 576)  # gate and up of smollm2
_RUN_ON = ("sm_90a",)  # architectures on which the test suite has run


class _NotHereError(Exception):
    """Something needed only for a GPU is missing; not a failure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--arch",
        help="print which kernels each op gets on an architecture instead, such as sm_100",
    )
    output.add_argument(
        "--plan",
        metavar="MODEL",
        help="print a memory plan for a model's configuration instead: a folder, a "
        ".gguf file, a name, or a built-in configuration of engine bench",
    )
    parser.add_argument("--memory", help="with --plan: GPU memory, such as 141GB or 80GiB "
                        "(default: this machine's)")  # fmt: skip
    parser.add_argument("--dtype", help="with --plan: float32, float16, bfloat16 or auto")
    parser.add_argument("--max-model-len", type=int, help="with --plan: longest sequence")
    add_quantization_argument(parser)
    add_speculation_argument(parser, "with --plan: also load a draft model, as JSON: "
                             '{"model": "smollm2"}')  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run all checks; return 0 if the engine works on the CPU (a missing GPU is not a failure).

    With --plan, print the memory plan; return 0 if the model fits.
    """
    if arguments.plan is not None:
        title, plan = _plan(arguments)
        print(f"{title}\n{plan}")
        return 0 if plan.fits else 1
    for name in ("memory", "dtype", "max_model_len", "quantization", "speculative_config"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --plan")
    if arguments.arch is not None:
        print(_tiers_of(checked_arch(arguments.arch)))
        return 0
    checks: list[tuple[str, Callable[[], str]]] = [
        ("engine", lambda: f"{__version__} in {os.path.dirname(os.path.dirname(__file__))}"),
        ("python", lambda: f"{platform.python_version()} on {platform.platform()}"),
        ("packages", _packages),
        ("threads", _threads),
        ("products", _products),
        ("settings", _settings),
        ("cache", _cache),
        ("model smollm2", _model),
    ]
    failed = [name for name, check in checks if _show(name, check) != "ok"]
    gpu_checks = (_driver, _cupy, _gpu, _tiers, _compiler, _headers, _kernel)
    names = ("driver", "cupy", "gpu", "tiers", "nvrtc", "headers", "kernel")
    states = [_show(*pair) for pair in zip(names, gpu_checks, strict=True)]
    print()
    print("CPU: ready" if not failed else f"CPU: not ready, see {', '.join(failed)}")
    print(_verdict(states))
    return 1 if failed else 0


def _show(name: str, check: Callable[[], str]) -> str:
    """Run a check, print its line, and return "ok", "--" (missing) or "FAIL"."""
    try:
        text = check()
        state = "ok"
    except _NotHereError as error:
        text = f"not here: {error}"
        state = "--"
    except Exception as error:  # any exception counts as a failed check
        text = f"{type(error).__name__}: {error}"
        state = "FAIL"
    print(f"{state:4} {name:14} {text}")
    return state


def _verdict(states: list[str]) -> str:
    """Return the verdict on CUDA and the next step."""
    if all(state == "ok" for state in states):
        return "CUDA: ready"
    install = f"{sys.executable} -m pip install '{device.gpu_extra()}'"
    if device.driver_version() is None:
        return f"CUDA: no GPU here, models run on the CPU. On a machine that has one: {install}"
    if "FAIL" in states:
        return "CUDA: not ready, see FAIL above"
    return f"CUDA: not ready. Next: {install}"


def _plan(arguments: argparse.Namespace) -> tuple[str, MemoryPlan]:
    """Return the title and the memory plan for the chosen model and GPU."""
    if not arguments.plan:
        raise ConfigError("--plan must name a model; got ''")
    config, source = named_config(arguments.plan)
    if arguments.memory is None:
        place = device.resolve_device("auto")[0]
        total = device_memory(place)[0]
    else:
        place = device.Device("cuda", 0)
        total = _parsed_memory(arguments.memory)
    quantization = planned_quantization(arguments.quantization, source)
    # "dummy": a plan may be in a format that files can have and no option converts to.
    options = (arguments.dtype or "auto", "dummy", arguments.max_model_len, quantization)
    how = resolve_load_config(config, source, (place, ""), *options)
    where = place if arguments.memory is None else f"{format_bytes(total)} of a GPU"
    form = how.dtype if how.quantization in (None, "none") else how.quantization
    title = f"{excerpt(arguments.plan)} in {form} on {where}"
    draft = None
    num_drafts = 0
    speculative = SpeculativeConfig.from_option(
        speculation_option(arguments).get("speculative_config")
    )
    if speculative is not None and speculative.method in HEAD_METHODS:
        raise ConfigError(
            "a plan counts draft models, but no heads: --speculative-config must have another "
            f"method; got {speculative.method!r}"
        )
    if speculative is not None and speculative.method == "draft_model":
        draft = _draft(speculative, how)
        num_drafts = speculative.num_tokens
    # A format that loading cannot round to is that of some file.
    is_rounded = arguments.quantization is not None and how.quantization in QUANTIZABLE
    plan = plan_memory(
        config, how, total, draft=draft, num_drafts=num_drafts, is_rounded=is_rounded
    )
    return title, plan


def _draft(speculative: SpeculativeConfig, target: LoadConfig) -> tuple[ModelConfig, LoadConfig]:
    """Return the draft model's configuration and its load options, derived from the target's."""
    config, source = named_config(str(speculative.model))
    length = min(target.max_model_len, config.max_position_embeddings)
    dtype = speculative.dtype or target.dtype
    place = (target.device, "")
    quantization = planned_quantization(speculative.quantization, source)
    how = resolve_load_config(config, source, place, dtype, "dummy", length, quantization)
    return config, how


def _parsed_memory(text: str) -> int:
    """Parse a number of bytes.

    Examples
    --------
    >>> _parsed_memory("141GB"), _parsed_memory("0.5 GiB")
    (141000000000, 536870912)
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([MGT])(i?)B", text)
    if not found or float(found[1]) <= 0:
        raise ConfigError(f"--memory must be a size such as 141GB or 80GiB; got {shown(text)}")
    power = "MGT".index(found[2]) + 2
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def _packages() -> str:
    wanted = ["numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "gguf", "tqdm"]
    wanted.append("threadpoolctl")
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in wanted)


def _threads() -> str:
    chosen = threads.choose(_MATRIX)
    return f"{chosen.count} of {os.cpu_count()} cores: {chosen.reason}"


def _products() -> str:
    text = compiled.description()
    if compiled.kernels() is None:
        text += ": quantized models take about twice as long"
    return text


def _settings() -> str:
    (
        env.kernel_tier(),
        env.compile_workers(),
        env.num_threads(),
        env.debug(),
        env.offline(),
        env.vllm_layers(),
    )  # raise if invalid
    if "ENGINE_PIPELINE_SECRET" in os.environ:  # which may be unset
        env.pipeline_secret()
    known = [variable.name for variable in env.VARIABLES]
    found = [
        f"{name}={'(hidden)' if name.endswith('_SECRET') else os.environ[name]}"
        for name in known
        if name in os.environ
    ]
    for name in sorted(set(os.environ) - set(known)):
        if name.startswith("ENGINE_") and (hint := did_you_mean(name, known)):
            found.append(f"{name} is not read{hint}")
    return " ".join(found) or "all at their defaults"


def _cache() -> str:
    folder = env.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
    files = [p for p in folder.rglob("*") if p.is_file()]
    size = shown_size(sum(p.stat().st_size for p in files))
    return f"{folder}: {len(files)} files, {size}, writable"


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
    free, total = map(shown_size, runtime.memGetInfo())
    return (
        f"{properties['name'].decode()}, compute capability "
        f"{properties['major']}.{properties['minor']}, {free} of {total} free"
    )


def _tiers() -> str:
    chosen, _ = device.resolve_device("auto")
    if not chosen.is_cuda:
        raise _NotHereError("needs the driver and CuPy; for another machine: --arch sm_90a")
    return _tiers_of(_module.current_architecture(chosen.index))


def _tiers_of(arch: str) -> str:
    """Return which ops have kernels of their own for `arch`, in 16 bits; the others are portable.

    Examples
    --------
    >>> _tiers_of("sm_120")[:40]
    'sm_120: portable kernels for all of the '
    """
    ops = op_names()
    tuned = [
        op
        for op in ops
        if any(s.tier != "portable" and s.supports(arch) for s in op_specs(op, "float16"))
    ]
    if tuned and env.kernel_tier() == "auto":
        rest = len(ops) - len(tuned)
        return f"{arch}: sm90 kernels for {', '.join(tuned)}; portable ones for {rest} other ops"
    note = "" if arch in _RUN_ON else " (compiled for this architecture, never run on it)"
    return f"{arch}: portable kernels for all of the {len(ops)} ops{note}"


def _compiler() -> str:
    return "{}.{}".format(*_part(_nvrtc.version))


def _headers() -> str:
    return " ".join(_part(_nvrtc.include_dirs))


def _kernel() -> str:
    chosen, _ = device.resolve_device("auto")
    arch = _module.current_architecture(chosen.index) if chosen.is_cuda else "sm_90a"
    options = [f"-arch={arch}", "-std=c++17", "-default-device", "-Xptxas=-v", "-no-cache"]
    options += [f"-I{folder}" for folder in _part(_nvrtc.include_dirs)]
    entry = _nvrtc.compile_source(_FIVE_LINES, "five_lines.cu", options).entries[0]
    return f"five lines compiled for {arch}: {entry.registers} registers"


def _part(part: Callable[[], _T]) -> _T:
    """Return `part()`, a step that needs the compiler; without a driver it may be missing."""
    try:
        return part()
    except CompileError as error:
        if device.driver_version() is None:
            raise _NotHereError("NVRTC and CUDA's headers are not installed") from error
        raise
