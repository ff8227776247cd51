"""`engine kernels`: list kernels with their architecture, dtype, registers and shared memory.

`engine kernels headers [NAME ...]` lists the CUDA headers that kernels of the user's own include.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence

from engine import device, kernels
from engine.dtypes import FLOAT_NAMES
from engine.errors import CompileError, ConfigError, did_you_mean
from engine.kernels._module import (
    KNOWN_ARCHITECTURES,
    CompiledModule,
    ModuleSpec,
    cached_module,
    compile_module,
    current_architecture,
)

__all__ = ["add_arguments", "run"]

_DEFAULT_ARCH = "sm_90a"
_COMMANDS = ("check", "bench", "profile", "headers")  # COMMAND of `engine kernels`
_ROW = "{:23} {:9} {:9} {:42} {:>9} {:>7} {:>6}  {:8}  {}"
_SHORT = "{:23} {:16} {:>8} {:>8} {:>10} {:>8}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "op",
        nargs="*",
        help="list only these ops, with one line per kernel; `headers [NAME ...]`: CUDA headers",
    )
    parser.add_argument("--all", action="store_true", help="list every op with one line per kernel")
    parser.add_argument(
        "--arch", help="architecture, such as sm_80 (default: this GPU's, else sm_90a)"
    )
    parser.add_argument("--dtype", choices=FLOAT_NAMES, help="only this dtype")
    parser.add_argument("--compile", action="store_true", help="compile uncached kernels")


def op_names() -> list[str]:
    """Return the names of all ops, sorted."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    return sorted(name for name in names if not name.startswith("_"))


def op_specs(op: str, dtype: str) -> tuple[ModuleSpec, ...]:
    """Return the specs of all modules that `op` may launch for `dtype`."""
    module = importlib.import_module(f"engine.kernels.{op}")
    return tuple(module.specs(dtype, patterns=True))


def checked_arch(arch: str) -> str:
    """Return the value of --arch as the engine names it: sm_90a, and sm_100 for sm_100a.

    Raises
    ------
    ConfigError
        If it is not an architecture of compute capability 8.0 or newer that NVRTC knows.

    Examples
    --------
    >>> checked_arch("sm_90"), checked_arch("sm_120a")
    ('sm_90a', 'sm_120')
    """
    name = re.sub("[af]$", "", arch)
    name = "sm_90a" if name == "sm_90" else name
    if name not in KNOWN_ARCHITECTURES:
        raise ConfigError(
            f"--arch must be an architecture like sm_80 or sm_90a; got {arch!r:.40} (compute "
            f"capability 8.0 or newer: {', '.join(KNOWN_ARCHITECTURES)})"
        )
    return name


def run(arguments: argparse.Namespace) -> int:
    """Print one line per op; for named ops or with --all, one line per kernel."""
    if arguments.op[:1] == ["headers"]:
        _print_headers(arguments.op[1:])
        return 0
    arch = checked_arch(arguments.arch or _this_arch())
    if late := [name for name in arguments.op if name in _COMMANDS]:
        raise ConfigError(
            f"{late[0]!r} must be the first word after `engine kernels`, its options behind it"
        )
    if unknown := sorted(set(arguments.op) - set(op_names())):
        raise ConfigError(
            "op must be one of those that `engine kernels` lists, or follow a command "
            f"({', '.join(_COMMANDS)}); got {unknown[0]!r}"
            f"{did_you_mean(unknown[0], [*op_names(), *_COMMANDS])}"
        )
    print(f"architecture {arch}")
    if arguments.op or arguments.all:
        _print_kernels(arguments.op or op_names(), arguments, arch)
    else:
        _print_ops(arguments, arch)
    return 0


def _print_headers(names: Sequence[str]) -> None:
    known = kernels.headers()
    # Both forms are accepted: mma, as listed, and common/mma.cuh, as sources include it.
    names = [name.removeprefix("common/").removesuffix(".cuh") for name in names]
    if unknown := sorted(set(names) - set(known)):
        hint = did_you_mean(unknown[0], known)
        raise ConfigError(f"header must be one of {', '.join(known)}; got {unknown[0]!r}{hint}")
    if names:
        print("\n\n".join(str(known[name]) for name in names))
        return
    for header in known.values():
        print(f"{header.include:26} {header.requires:32} {header.title}")
    print("`engine kernels headers NAME` shows what one declares")


def _modules(
    op: str, arguments: argparse.Namespace, arch: str
) -> Iterator[tuple[ModuleSpec, CompiledModule | None, str]]:
    """Yield each module of an op for `arch`: the compiled module, if any, and its cache state."""
    for dtype in [arguments.dtype] if arguments.dtype else FLOAT_NAMES:
        for spec in op_specs(op, dtype):
            if spec.supports(arch):
                yield spec, *_found(spec, arch, arguments.compile)


def _found(spec: ModuleSpec, arch: str, compile_missing: bool) -> tuple[CompiledModule | None, str]:
    try:
        found = cached_module(spec, arch)
    except CompileError:  # NVRTC is missing
        found = None
    if found is None and compile_missing:
        return compile_module(spec, arch), "compiled"
    return found, "cached" if found else "missing"


def _print_ops(arguments: argparse.Namespace, arch: str) -> None:
    print(_SHORT.format("op", "tiers", "modules", "kernels", "registers", "spilled"))
    num_missing = 0
    for op in op_names():
        modules = list(_modules(op, arguments, arch))
        found = [compiled for _, compiled, _ in modules if compiled is not None]
        num_missing += len(modules) - len(found)
        entries = [entry for compiled in found for entry in compiled.entries]
        registers = [entry.registers for entry in entries]
        tiers = " ".join(sorted({spec.tier for spec, _, _ in modules}))
        span = f"{min(registers)}-{max(registers)}" if registers else "-"
        spilled = sum(entry.spill_bytes for entry in entries) if entries else "-"
        counts = len(modules), len(entries) or "-", span, spilled
        print(_SHORT.format(op, tiers, *counts))
    if num_missing:
        print(f"{num_missing} modules are not compiled yet; --compile or a load compiles them")
    print("`engine kernels OP` lists the kernels of one op, --all those of every op")


def _print_kernels(ops: Sequence[str], arguments: argparse.Namespace, arch: str) -> None:
    heads = ("op", "tier", "dtype", "kernel", "registers", "spilled", "shared", "cache", "macros")
    print(_ROW.format(*heads))
    for op in ops:
        for spec, compiled, state in _modules(op, arguments, arch):
            macros = " ".join(f"{name}={value}" for name, value in spec.defines)
            about = op, spec.tier, spec.dtype
            if compiled is None:
                print(_ROW.format(*about, "-", "-", "-", "-", state, macros).rstrip())
                continue
            for entry in compiled.entries:
                numbers = (entry.registers, entry.spill_bytes, entry.shared_bytes)
                print(_ROW.format(*about, entry.name, *numbers, state, macros).rstrip())


def _this_arch() -> str:
    chosen, _ = device.resolve_device("auto")
    return current_architecture(chosen.index) if chosen.is_cuda else _DEFAULT_ARCH
