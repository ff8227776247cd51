"""CUDA modules: compilation of `.cu` files, the cubin cache on disk, loading.

A `ModuleSpec` names a file, a dtype and macros. `compile_module` compiles it to a cubin on disk, or
finds it in the cache, whose key covers the source, every first-party header it includes, the
options, the architecture and NVRTC's version. `load_module` passes the cubin to `cupy.RawModule`.

All modules of a model are compiled when it is loaded (`compile_all`). Later compilations, after
`mark_ready()`, are counted in `stats().compiles_after_ready`, which tests assert to be zero.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from engine import device, env
from engine.errors import CompileError
from engine.kernels import _nvrtc
from engine.kernels._disk_cache import cache_folder, write_file

__all__ = [
    "ARCHITECTURES",
    "INCLUDE",
    "CompileStats",
    "CompiledModule",
    "ModuleSpec",
    "cached_module",
    "compile_all",
    "compile_module",
    "current_architecture",
    "load_module",
    "mark_ready",
    "source_dir",
    "stats",
    "uncounted",
]

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120")
"""Architectures for which CI compiles every kernel."""

KNOWN_ARCHITECTURES = (
    *("sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90a", "sm_100", "sm_101", "sm_103"),
    *("sm_110", "sm_120", "sm_121"),
)
"""Architectures from sm_80 on that NVRTC 12.9 or 13 compiles for."""

INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
"""Finds the first-party headers that a source includes."""

_DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}


@dataclass(frozen=True)
class ModuleSpec:
    """A module to compile: one file for one dtype, with macros.

    Attributes
    ----------
    file : str
        Path in `cuda_src/`, such as "rmsnorm.cu".
    dtype : str
        Selects the C type `scalar_t` (see common/types.cuh).
    defines : tuple of (str, int)
        Further macros, such as (("HEAD_DIM", 64),).
    """

    file: str
    dtype: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def tier(self) -> str:
        """ "sm90" for Hopper-only files, else "portable"."""
        return "sm90" if self.file.endswith("_sm90.cu") else "portable"

    def supports(self, arch: str) -> bool:
        """Tell whether this file can be compiled for `arch`."""
        return self.tier == "portable" or arch == "sm_90a"

    def source(self) -> str:
        """Return the CUDA text."""
        return _source(self.file)

    def digest(self) -> str:
        """Hash the text and the first-party headers it includes."""
        return _digest(self.file)

    def options(self, arch: str) -> list[str]:
        """Return NVRTC's options for `arch`."""
        return [
            f"-arch={arch}",
            "-std=c++17",
            "-default-device",
            "-Xptxas=-v",
            "-no-cache",  # from its cache NVRTC returns a cubin without ptxas's report
            f"-I{source_dir()}",
            *(f"-I{folder}" for folder in _nvrtc.include_dirs()),
            f"-DENGINE_DTYPE={_DTYPE_CODES[self.dtype]}",
            *(f"-D{name}={value}" for name, value in self.defines),
        ]

    def explain(self, error: _nvrtc.NvrtcError, arch: str) -> CompileError:
        """Return the error to raise if NVRTC refuses the source."""
        return error

    def __str__(self) -> str:
        macros = "".join(f" {name}={value}" for name, value in self.defines)
        return f"{self.file}[{self.dtype}{macros}]"


@dataclass(frozen=True)
class CompiledModule:
    """A cubin on disk, with ptxas's report on its kernels."""

    spec: ModuleSpec
    arch: str
    path: Path
    entries: tuple[_nvrtc.EntryInfo, ...]
    log: str


@dataclass
class CompileStats:
    """Counters since the process started."""

    compiled: int = 0
    cache_hits: int = 0
    compiles_after_ready: int = 0
    late: list[str] = field(default_factory=list)


_stats = CompileStats()
_lock = threading.Lock()
_is_ready = False
_num_uncounted = 0  # `uncounted` blocks that threads are in


def stats() -> CompileStats:
    """Return the process's compilation counters."""
    return _stats


def mark_ready(ready: bool = True) -> None:
    """Mark the end of loading: later compilations are counted as defects."""
    global _is_ready
    _is_ready = ready


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Count no compilation within the block as a defect: a user's kernels are compiled there.

    Blocks of several threads may overlap; until the last one ends, none is counted.
    """
    global _num_uncounted
    with _lock:
        _num_uncounted += 1
    try:
        yield
    finally:
        with _lock:
            _num_uncounted -= 1


def source_dir() -> Path:
    """Return the folder of the CUDA files: in the installed package, or beside it in a checkout."""
    inside = Path(__file__).parents[1] / "_cuda_src"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "cuda_src"


def compile_module(spec: ModuleSpec, arch: str) -> CompiledModule:
    """Return `spec` compiled for `arch`, from the disk cache if it holds an intact cubin.

    Raises
    ------
    CompileError
        If the file is missing or does not compile, or the cache folder is not private.
    """
    key = _cache_key(spec, arch)
    if (found := _read_cache(spec, arch, key)) is not None:
        with _lock:
            _stats.cache_hits += 1
        return found
    try:
        program = _nvrtc.compile_source(spec.source(), spec.file, spec.options(arch))
    except _nvrtc.NvrtcError as error:
        raise spec.explain(error, arch) from None
    with _lock:
        _stats.compiled += 1
        if _is_ready and not _num_uncounted:
            _stats.compiles_after_ready += 1
            _stats.late.append(str(spec))
    return _write_cache(spec, arch, key, program)


def cached_module(spec: ModuleSpec, arch: str) -> CompiledModule | None:
    """Return the compiled `spec` from the disk cache, or None; never compiles."""
    return _read_cache(spec, arch, _cache_key(spec, arch))


def compile_all(
    specs: Iterable[ModuleSpec], arch: str, *, progress: bool = False
) -> list[CompiledModule]:
    """Compile `specs` for `arch` in parallel; `progress` shows a bar on stderr."""
    from tqdm import tqdm

    wanted = list(dict.fromkeys(s for s in specs if s.supports(arch)))
    with ThreadPoolExecutor(env.compile_workers()) as pool:
        done = pool.map(lambda spec: compile_module(spec, arch), wanted)
        bar = tqdm(done, "compiling kernels", len(wanted), disable=not progress, leave=False)
        return list(bar)


@cache
def current_architecture(index: int) -> str:
    """Return NVRTC's name for the architecture of CUDA device `index`, such as "sm_90a"."""
    properties = device.cupy().cuda.runtime.getDeviceProperties(index)
    major = properties["major"]
    minor = properties["minor"]
    if (major, minor) < (8, 0):
        raise CompileError(
            f"compute capability must be at least 8.0; cuda:{index} has {major}.{minor}"
        )
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@cache
def _load(spec: ModuleSpec, index: int) -> Any:
    compiled = compile_module(spec, current_architecture(index))
    return device.cupy().RawModule(path=str(compiled.path))


def load_module(spec: ModuleSpec) -> Any:
    """Return `spec` as a `cupy.RawModule` on the current device, compiled if necessary."""
    return _load(spec, device.cupy().cuda.runtime.getDevice())


@cache
def _source(file: str) -> str:
    path = source_dir() / file
    try:
        return path.read_text()
    except OSError as error:
        raise CompileError(f"there is no CUDA file {file!r} in {source_dir()}: {error}") from error


@cache
def _digest(file: str) -> str:
    """Hash a file and the first-party headers it includes."""
    text = _source(file)
    parts = [text, *(_digest(name) for name in INCLUDE.findall(text))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cache_key(spec: ModuleSpec, arch: str) -> str:
    # A folder to search for headers has another path on every machine; their text is in the digest.
    options = [option for option in spec.options(arch) if not option.startswith("-I")]
    text = json.dumps([str(spec), options, spec.digest(), _nvrtc.version(), "v1"])
    return f"{Path(spec.file).stem}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _read_cache(spec: ModuleSpec, arch: str, key: str) -> CompiledModule | None:
    """Return the cached module, or None if it is missing or damaged."""
    folder = cache_folder()
    try:
        record = json.loads((folder / f"{key}.json").read_text())
        path = folder / record["cubin"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
            return None
        entries = tuple(_nvrtc.EntryInfo(**entry) for entry in record["entries"])
        if not entries:  # stored without ptxas's report
            return None
        return CompiledModule(spec, arch, path, entries, record["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(spec: ModuleSpec, arch: str, key: str, program: _nvrtc.Program) -> CompiledModule:
    """Store a program. The record is written last and names the cubin by its hash, so that two
    processes that compile the same module at once cannot mix their files."""
    folder = cache_folder()
    digest = hashlib.sha256(program.cubin).hexdigest()
    path = folder / f"{key}-{digest[:16]}.cubin"
    record = {
        "cubin": path.name,
        "sha256": digest,
        "entries": [asdict(entry) for entry in program.entries],
        "log": program.log,
    }
    write_file(path, program.cubin)
    write_file(folder / f"{key}.json", json.dumps(record).encode())
    return CompiledModule(spec, arch, path, program.entries, program.log)
