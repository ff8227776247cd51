"""Compile every kernel; fail on register spills.

`python -m tests.compile_kernels [--arch sm_90a | --arch all]` needs NVRTC and no GPU. It prints,
for each kernel, registers, spilled bytes and static shared memory.

Without `--arch`, a module is compiled only for architectures that change its code: Hopper files for
sm_90a, all others for the oldest architecture. In addition, one module per file, dtype and set of
macros is compiled for each other outcome of the architecture `#if`s in its sources. The selection
is printed.

To prove that a rename or move changes no machine code, `--save before.json` writes a digest of
every kernel's instructions, and `--compare before.json` lists kernels whose digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import operator
import pkgutil
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from engine import kernels
from engine.dtypes import FLOAT_NAMES, KV_CODE_DTYPES
from engine.kernels._module import (
    ARCHITECTURES,
    CompiledModule,
    ModuleSpec,
    compile_module,
    source_dir,
)
from engine.weights import FORMATS

# (architecture, file, dtype, entry) -> why its spills are acceptable. Ideally empty.
ALLOWED_SPILLS: dict[tuple[str, str, str, str], str] = {}

# Slowest modules to compile: start them first, to keep all workers busy until the end.
SLOWEST = ("sample/sample.cu", "gemm/rmsnorm_gemm.cu", "gemm/gemm.cu")


_INCLUDE = re.compile(r'#include +["<]([^">]+)[">]')
_CONDITION = re.compile(r"(?:__CUDA_ARCH__|kArch) *(>=|<|==) *(\d+)")
_OPERATORS = {">=": operator.ge, "<": operator.lt, "==": operator.eq}

Condition = tuple[str, int]
Job = tuple[ModuleSpec, str]


@cache
def conditions(file: str) -> frozenset[Condition]:
    """Return the architecture conditions in a file and the headers it includes."""
    if file == "cuda_fp8.h":  # hardware conversions from sm_89 on
        return frozenset({(">=", 890)})
    path = source_dir() / file
    if not path.exists():
        return frozenset()
    text = path.read_text()
    own = frozenset((sign, int(number)) for sign, number in _CONDITION.findall(text))
    return own.union(*(conditions(name) for name in _INCLUDE.findall(text)))


def outcome(file: str, arch: str) -> frozenset[Condition]:
    """Return the conditions of `file` that hold on `arch`; equal results mean equal code."""
    number = 10 * int(arch.removeprefix("sm_").removesuffix("a"))
    return frozenset((sign, n) for sign, n in conditions(file) if _OPERATORS[sign](number, n))


def chosen_jobs(specs: list[ModuleSpec]) -> Iterator[tuple[Job, str]]:
    """Yield the modules to compile by default, each with its architecture and a reason."""
    oldest = ARCHITECTURES[0]
    seen = set()
    for spec in specs:
        if spec.tier == "sm90":
            yield (spec, "sm_90a"), "files of Hopper's tier"
            continue
        yield (spec, oldest), "every other module, for the oldest architecture"
        seen.add((*_family(spec), outcome(spec.file, oldest)))
    for spec in specs:
        for arch in ARCHITECTURES[1:] if spec.tier != "sm90" else ():
            held = outcome(spec.file, arch)
            key = (*_family(spec), held)
            if key not in seen:
                seen.add(key)
                names = ", ".join(f"{sign} {n}" for sign, n in sorted(held))
                yield (spec, arch), f"one of each file, dtype and macros: __CUDA_ARCH__ {names}"


def _family(spec: ModuleSpec) -> tuple[str, str, tuple[str, ...]]:
    """Return a key shared by modules that differ only in macro values."""
    return spec.file, spec.dtype, tuple(name for name, _ in spec.defines)


def every_spec() -> list[ModuleSpec]:
    """Return every module of every op in `engine.kernels`, for every dtype and weight format."""
    specs: list[ModuleSpec] = []
    for info in pkgutil.iter_modules(kernels.__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"engine.kernels.{info.name}")
            for dtype in FLOAT_NAMES:
                for codes in ("", *KV_CODE_DTYPES):
                    options = {"patterns": True, "deterministic": True, "has_peers": True}
                    specs += module.specs(dtype, kv_dtype=codes, formats=tuple(FORMATS), **options)
    return list(dict.fromkeys(specs))


def spills(compiled: CompiledModule) -> list[str]:
    """Return a line for each kernel in the module with spills that are not allowed."""
    spec = compiled.spec
    return [
        f"{spec} for {compiled.arch}: {entry.name} spills {entry.spill_bytes} bytes"
        for entry in compiled.entries
        if entry.spill_bytes
        and (compiled.arch, spec.file, spec.dtype, entry.name) not in ALLOWED_SPILLS
    ]


def warnings(compiled: CompiledModule) -> list[str]:
    """Return ptxas's warnings: wgmma serialised (C7510), setmaxnreg ignored (C7504, C7508).

    C7511 and C7512 (wgmma serialised for lack of registers) are not warnings to ptxas.
    """
    marks = "warning", "performance loss"
    found = [line for line in compiled.log.splitlines() if any(m in line.lower() for m in marks)]
    return [f"{compiled.spec} for {compiled.arch}: {line}" for line in found]


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """Return the instructions of each kernel in a cubin: the ELF sections `.text.<entry>`."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    code = {}
    for name_index, _, _, _, offset, size in headers:
        start = names_offset + name_index
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            code[name.removeprefix(".text.")] = cubin[offset : offset + size]
    return code


def digests(compiled: CompiledModule) -> dict[str, str]:
    """Return a digest of each kernel's machine code, by architecture, module and entry."""
    spec = compiled.spec
    macros = "".join(f" {name}={value}" for name, value in spec.defines)
    module = f"{compiled.arch} {Path(spec.file).name}[{spec.dtype}{macros}]"
    return {
        f"{module} {entry}": hashlib.sha256(code).hexdigest()[:16]
        for entry, code in machine_code(compiled.path.read_bytes()).items()
    }


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return a line for each kernel that was added, removed, or has different instructions."""
    lines = [f"only before: {name}" for name in sorted(before.keys() - now.keys())]
    lines += [f"only now:    {name}" for name in sorted(now.keys() - before.keys())]
    both = sorted(before.keys() & now.keys())
    return lines + [f"differs:     {name}" for name in both if before[name] != now[name]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compile_kernels", description=__doc__)
    parser.add_argument("--arch", choices=[*ARCHITECTURES, "all"], action="append")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write digests of machine code")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="name kernels that differ")
    options = parser.parse_args()
    specs = every_spec()
    if options.arch:
        wanted = ARCHITECTURES if "all" in options.arch else options.arch
        jobs = [(spec, arch) for spec in specs for arch in wanted if spec.supports(arch)]
    else:
        reasons = dict(chosen_jobs(specs))
        jobs = list(reasons)
        for (arch, why), count in Counter((job[1], why) for job, why in reasons.items()).items():
            print(f"{arch:7} {count:4} modules: {why}")
    jobs.sort(key=lambda job: job[0].file not in SLOWEST)
    start, bad, kernels_seen = time.monotonic(), [], 0
    code: dict[str, str] = {}
    with ProcessPoolExecutor() as pool:
        for compiled in pool.map(compile_module, *zip(*jobs, strict=True)):
            for entry in compiled.entries:
                kernels_seen += 1
                print(
                    f"{compiled.arch:7} {compiled.spec!s:44} {entry.name:34} "
                    f"{entry.registers:3} registers {entry.spill_bytes:4} spilled "
                    f"{entry.shared_bytes:6} shared"
                )
            bad += spills(compiled) + warnings(compiled)
            code |= digests(compiled)
    seconds = time.monotonic() - start
    print(f"{kernels_seen} kernels in {len(jobs)} modules compiled in {seconds:.0f} s")
    if options.save:
        options.save.write_text(json.dumps(code, indent=1, sort_keys=True))
    if options.compare:
        bad += differences(json.loads(options.compare.read_text()), code)
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad or not kernels_seen else 0


if __name__ == "__main__":
    sys.exit(main())
