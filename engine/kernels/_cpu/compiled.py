"""The C kernels of the CPU: compiled once for this machine by its C compiler, loaded by ctypes.

They are optional: without a C compiler NumPy does their work. A call releases the interpreter's
lock, so threads can share its work.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import env
from engine.errors import CompileError
from engine.kernels._cpu.features import cpu_features
from engine.kernels._cpu.helpers import Helpers
from engine.kernels._disk_cache import cache_folder, write_file

__all__ = ["Kernels", "description", "kernels"]

_FOLDER = Path(__file__).parent
_SOURCES = ("panels.c", "attention.c", "helpers.c")
_HEADERS = ("helpers.h", "vectors.h")
_OPTIONS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden")
_TARGETS = ("-march=native", "-mcpu=native")  # some compilers for ARM know only the second one
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT = 120  # maximum time of a compilation, s

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_ARGUMENTS = {
    "panels_multiply": "pppppp iiiiii",
    "helpers_help": "",
    "helpers_reset": "",
    # in groups: out and scratch; q; k; v; the new tokens; pages; block tables; sizes
    "attention_decode": "pp pii pii pii ppipppff ppiiii pip iiiifiii",
}


@dataclass(frozen=True)
class Kernels:
    """The functions of the C files, which describe their arguments.

    Attributes
    ----------
    multiply, attend : callable
        Take addresses and numbers.
    helpers : Helpers
    compiler : str
        The command that compiled them.
    """

    multiply: Callable[..., None]
    attend: Callable[..., None]
    helpers: Helpers
    compiler: str


def kernels() -> Kernels | None:
    """Return the C kernels, compiled at the first call; None if there is no way to compile them.

    Raises
    ------
    CompileError
        If `ENGINE_CC` is set and cannot compile them.
    """
    found = _found or _find()
    return found if isinstance(found, Kernels) else None


def description() -> str:
    """Return whether there are C kernels, by which compiler, or why not.

    Raises
    ------
    CompileError
        If `ENGINE_CC` is set and cannot compile them.
    """
    found = _found or _find()
    if isinstance(found, Kernels):
        return f"C kernels ({found.compiler})"
    return f"no C kernels ({found})"


_found: Kernels | str | None = None  # the kernels, or why there are none

# One thread compiles, and a fork waits for it.
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def _find() -> Kernels | str:
    global _found
    with _lock:
        _found = _found or _compiled(env.c_compiler())
    return _found


def _compiled(wanted: str | None) -> Kernels | str:
    """Return the kernels, or why there are none."""
    if wanted == "none":
        return "ENGINE_CC=none"
    command = wanted or os.environ.get("CC") or _installed_compiler()
    if command is None:
        return "no C compiler found"
    try:
        return _functions(_library(_words(command)), command)
    except (CompileError, OSError, AttributeError) as error:  # a function may be missing
        if wanted is not None:
            raise CompileError(f"ENGINE_CC={wanted}: {error}") from error
        return f"{command}: {error}"


def _installed_compiler() -> str | None:
    """Return the path of the first compiler that is found."""
    path = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if path is None or (sys.platform == "darwin" and not _has_developer_tools()):
        return None
    return path


def _words(command: str) -> list[str]:
    """Return the words of a command; a path may hold spaces."""
    if shutil.which(command):
        return [command]
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CompileError(f"must be a command: {error}") from error
    if not words:
        raise CompileError("must be a command")
    return words


def _has_developer_tools() -> bool:
    """Tell whether macOS's compiler is installed: without it, /usr/bin/cc opens a dialog."""
    path = shutil.which("xcode-select")
    return path is not None and subprocess.run([path, "-p"], capture_output=True).returncode == 0


def _library(command: list[str]) -> ctypes.CDLL:
    """Return the library, from the cache if it is there and whole."""
    name = f"cpu-kernels-{_cache_key(command)}.{'dll' if os.name == 'nt' else 'so'}"
    cached: Path | None = None
    with contextlib.suppress(CompileError):  # without a cache, every process compiles
        cached = cache_folder() / name
    if cached is not None and cached.exists():
        with contextlib.suppress(OSError):  # a damaged file
            return ctypes.CDLL(str(cached))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder) / name
        _compile(command, built)
        if cached is not None:
            with contextlib.suppress(CompileError):  # a full disk
                write_file(cached, built.read_bytes())
        return ctypes.CDLL(str(built))  # stays loaded when the file is deleted


def _cache_key(command: list[str]) -> str:
    """Return a hash of all that the library depends on."""
    path = shutil.which(command[0])
    status = os.stat(path) if path else None
    compiler = [command, path, status and (status.st_size, status.st_mtime_ns)]
    machine = [platform.system(), platform.machine(), sorted(cpu_features())]
    files = [(_FOLDER / name).read_text() for name in (*_SOURCES, *_HEADERS)]
    text = json.dumps([files, _OPTIONS, _TARGETS, compiler, machine])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _compile(command: list[str], path: Path) -> None:
    """Compile the library to a file."""
    problems = []
    for target in _TARGETS:
        files = [str(_FOLDER / name) for name in _SOURCES]
        arguments = [*command, *_OPTIONS, target, "-o", str(path), *files, "-lm"]
        try:
            done = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=_TIMEOUT,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(str(error)) from error
        if done.returncode == 0:
            return
        lines = (done.stderr or done.stdout).splitlines()
        first = next((line for line in lines if "error" in line), "".join(lines[:1]))
        problems.append(f"exit status {done.returncode}: {first.strip()}")
    raise CompileError(problems[0])


def _functions(library: ctypes.CDLL, compiler: str) -> Kernels:
    for name, kinds in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [_KINDS[kind] for kind in kinds.replace(" ", "")]
        function.restype = None
    return Kernels(
        library.panels_multiply,
        library.attention_decode,
        Helpers(library.helpers_help, library.helpers_reset),
        compiler,
    )
