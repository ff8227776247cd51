"""`engine kernels`: what is compiled, for what, at which cost."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re

from engine import device, kernels
from engine.dtypes import FLOAT_NAMES
from engine.errors import CompileError, ConfigError
from engine.kernels._module import ModuleSpec, cached_module, compile_module, current_architecture

__all__ = ["add_arguments", "run"]

_DEFAULT_ARCH = "sm_90a"
_ROW = "{:21} {:9} {:9} {:42} {:>9} {:>7} {:>6}  {:8}  {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--arch", help="architecture, such as sm_80 (default: this GPU's)")
    parser.add_argument("--dtype", choices=FLOAT_NAMES, help="only this dtype")
    parser.add_argument("--compile", action="store_true", help="compile what is not in the cache")


def op_names() -> list[str]:
    """Return the names of all ops, sorted."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    return sorted(name for name in names if not name.startswith("_"))


def op_specs(op: str, dtype: str) -> tuple[ModuleSpec, ...]:
    """Return every module that op `op` may launch for `dtype`."""
    module = importlib.import_module(f"engine.kernels.{op}")
    return tuple(module.specs(dtype, patterns=True))


def run(arguments: argparse.Namespace) -> int:
    """Print one line a kernel, or one a module where its registers are not known yet."""
    arch = arguments.arch or _this_arch()
    if not re.fullmatch(r"sm_\d{2,3}a?", arch):
        raise ConfigError(f"--arch must be an architecture like sm_80 or sm_90a; got {arch!r}")
    print(f"architecture {arch}")
    heads = ("op", "tier", "dtype", "kernel", "registers", "spilled", "shared", "cache", "macros")
    print(_ROW.format(*heads))
    for op in op_names():
        for dtype in [arguments.dtype] if arguments.dtype else FLOAT_NAMES:
            for spec in op_specs(op, dtype):
                if spec.supports(arch):
                    _print_module(op, spec, arch, arguments.compile)
    return 0


def _print_module(op: str, spec: ModuleSpec, arch: str, compile_missing: bool) -> None:
    macros = " ".join(f"{name}={value}" for name, value in spec.defines)
    try:
        found = cached_module(spec, arch)
    except CompileError:  # no NVRTC here: nothing can have been compiled
        found = None
    state = "cached" if found else "missing"
    if found is None and compile_missing:
        found, state = compile_module(spec, arch), "compiled"
    if found is None:
        print(_ROW.format(op, spec.tier, spec.dtype, "-", "-", "-", "-", state, macros).rstrip())
        return
    for entry in found.entries:
        numbers = (entry.registers, entry.spill_bytes, entry.shared_bytes)
        print(_ROW.format(op, spec.tier, spec.dtype, entry.name, *numbers, state, macros).rstrip())


def _this_arch() -> str:
    chosen, _ = device.resolve_device("auto")
    return current_architecture(chosen.index) if chosen.is_cuda else _DEFAULT_ARCH
