"""The CUDA source of a user's kernel: a string or a file, its entry points, and their parameters.

A kernel's parameters are read from its declaration, so that a definition need not repeat them:

    extern "C" __global__ void scale_rows(const scalar_t* x, const float* scale, scalar_t* out,
                                          int64_t T, int N)
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.checks import shown
from engine.errors import CompileError, ConfigError
from engine.kernels._module import INCLUDE, source_dir
from engine.kernels._user.names import is_reserved, is_reserved_kernel

__all__ = ["CudaText", "Entry", "Param", "Source"]

# C type of a parameter that is passed by value -> kind of `_launch.Kernel`.
_VALUES = {
    "int": "i32",
    "int32_t": "i32",
    "signed int": "i32",
    "unsigned": "u32",
    "unsigned int": "u32",
    "uint32_t": "u32",
    "long long": "i64",
    "long long int": "i64",
    "int64_t": "i64",
    "unsigned long long": "u64",
    "uint64_t": "u64",
    "size_t": "u64",
    "float": "f32",
    "double": "f64",
    "bool": "b8",
    "TensorMap": "tmap",
    "CUtensorMap": "tmap",
}
_QUALIFIERS = {"const", "__restrict__", "__restrict", "restrict", "volatile", "__grid_constant__"}


@dataclass(frozen=True)
class Param:
    """A parameter of an entry point: a pointer to `ctype`, or a value of that type.

    Attributes
    ----------
    name, ctype : str
    is_pointer, is_const : bool
        `is_const`: the pointer is to const values.
    """

    name: str
    ctype: str
    is_pointer: bool
    is_const: bool

    @property
    def kind(self) -> str:
        """The parameter's kind in a `_launch.Kernel`; "" if it cannot be passed."""
        return "ptr" if self.is_pointer else _VALUES.get(self.ctype, "")

    def __str__(self) -> str:
        const = "const " if self.is_const else ""
        return f"{const}{self.ctype}{'*' if self.is_pointer else ''} {self.name}"


@dataclass(frozen=True)
class Entry:
    """An `extern "C" __global__` function."""

    name: str
    params: tuple[Param, ...]


@dataclass(frozen=True)
class CudaText:
    """A CUDA source as it was read.

    Attributes
    ----------
    text : str
    label : str
        Name in messages: the file's name, or the op's with ".cu".
    folder : str
        Folder of the headers that it includes: that of the file, or of the definition.
    digest : str
        Hash of the text and of these headers.
    """

    text: str
    label: str
    folder: str
    digest: str

    def __hash__(self) -> int:  # a call looks its kernels up
        return hash(self.digest)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The entry points, by name.

        Raises
        ------
        ConfigError
            If none is declared `extern "C"`, or one has a parameter that cannot be passed.
        """
        return {entry.name: entry for entry in _entries(self.text, self.label)}

    def entry(self, name: str) -> Entry:
        """Return the entry point `name`; raise a ConfigError that lists those that exist."""
        try:
            return self.entries[name]
        except KeyError:
            known = ", ".join(self.entries) or "none"
            raise ConfigError(
                f'{self.label}: has no kernel called {name!r}; its extern "C" kernels: {known}. '
                "Rename one, or name it in the launch (entry=)"
            ) from None


class Source:
    """Where a CUDA source comes from: a string, or a file that is read again when it changes.

    Parameters
    ----------
    source : str or Path
        CUDA text (it contains "__global__"), or the path of a file.
    name : str
        Name of the op.
    folder : Path
        Where a relative path begins.

    Raises
    ------
    ConfigError
        If it is neither text nor an existing file.

    Attributes
    ----------
    path : Path or None
        The file; None for a string.
    """

    def __init__(self, source: str | Path, name: str, folder: Path) -> None:
        self.path: Path | None = None
        self._stamps: tuple[tuple[Path, int], ...] = ()
        self._text = ""
        self._label = f"{name}.cu"
        self._folder = folder
        if isinstance(source, str) and "__global__" in source:
            self._text = source
            self._read = self._load()
            return
        if not isinstance(source, str | Path) or "\n" in str(source):
            raise ConfigError(
                f"{name}: source: must be the path of a .cu file, or CUDA text with a __global__ "
                f"function; got {source!r:.80}"
            )
        found = [place for place in (folder / source, Path(source)) if os.path.isfile(place)]
        if not found:
            raise ConfigError(f"{name}: source: there is no file {shown(str(source))} in {folder}")
        self.path = found[0].resolve()
        self._label = self.path.name
        self._folder = self.path.parent
        self._read = self._load()

    def current(self) -> CudaText:
        """Return the source; read the file again if it, or a header beside it, has changed.

        Raises
        ------
        CompileError
            If the file cannot be read.
        """
        if self._stamps != tuple((path, _stamp(path)) for path, _ in self._stamps):
            self._read = self._load()
        return self._read

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, if it is one, and the headers beside it that it includes."""
        return tuple(path for path, _ in self._stamps)

    def _load(self) -> CudaText:
        stamps = [(self.path, _stamp(self.path))] if self.path else []
        text = _read(self.path) if self.path else self._text
        headers = _headers(text, self._folder)
        own = [path for path, _ in headers if not path.is_relative_to(source_dir())]
        self._stamps = (*stamps, *((path, _stamp(path)) for path in own))
        digest = _hashed(text, headers)
        return CudaText(text, self._label, str(self._folder), digest)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Some editors write a BOM.
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"{path} cannot be read as UTF-8: {error}") from error


def _stamp(path: Path) -> int:
    """Return the file's time of change in ns; 0 if it is missing, as while an editor saves it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _headers(text: str, folder: Path | None) -> list[tuple[Path, str]]:
    """Return (path, text) of the headers that `text` includes, directly or not.

    A header beside the source comes before one of ours with the same name.
    """
    found: dict[Path, str] = {}
    pending = INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        for base in (*([folder] if folder else []), source_dir()):
            path = base / name
            if path.is_file():
                if path not in found:
                    found[path] = path.read_text(errors="replace")
                    pending += INCLUDE.findall(found[path])
                break
    return list(found.items())


def _hashed(text: str, headers: list[tuple[Path, str]]) -> str:
    types = (source_dir() / "common" / "types.cuh").read_text()  # included in every user's source
    parts = [text, types, *(body for _, body in sorted(headers))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# Comments, strings and characters: kernels may print braces, or "__global__".
_TEXT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)


def _code(text: str) -> str:
    """Return CUDA source without comments, strings and characters, but with extern's "C"."""
    return _TEXT.sub(lambda found: '"C"' if found[0] == '"C"' else " ", text)


def _entries(text: str, label: str) -> list[Entry]:
    code = _code(text)
    found: list[Entry] = []
    hidden: list[str] = []
    for match in re.finditer(r"\b__global__\b", code):
        name, params = _declaration(code, match.end(), label)
        if not _has_c_name(code[: match.start()]):
            hidden.append(name)
            continue
        if is_reserved_kernel(name):
            raise ConfigError(
                f"{label}: kernel {name!r} must have another name, given as entry=: C++ or CUDA "
                "reserves this one"
            )
        entry = Entry(name, tuple(_param(part, name, label) for part in params))
        if not any(entry.name == other.name for other in found):  # declared and defined
            found.append(entry)
    if hidden and not found:
        raise ConfigError(
            f'{label}: kernel {hidden[0]!r} must be declared extern "C" __global__, so that it can '
            "be found by its name; a template cannot be, so call it from such a function"
        )
    return found


def _has_c_name(before: str) -> bool:
    """Tell whether a declaration after this code is extern "C", itself or in a block."""
    head = re.split(r"[;{}]", before)[-1]
    if re.search(r"\btemplate\s*<", head):
        return False
    blocks = re.finditer(r'\bextern\s+"C"\s*\{', before)
    is_c = re.search(r'\bextern\s+"C"', head) is not None
    return is_c or any(_is_open(before, block.end()) for block in blocks)


def _is_open(code: str, start: int) -> bool:
    """Tell whether the block that begins at `start` has no end."""
    depth = 1
    for brace in re.finditer("[{}]", code[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return False
    return True


def _declaration(code: str, start: int, label: str) -> tuple[str, list[str]]:
    """Return the name and the parameters of the kernel whose `__global__` ends at `start`."""
    at = start
    while True:
        found = re.compile(r"\s*(\w+)\s*").match(code, at)
        if not found:
            raise ConfigError(f"{label}: cannot read the kernel at {code[start : start + 60]!r}")
        at = found.end()
        if at < len(code) and code[at] == "(":
            end = _closing(code, at)
            if not found[1].startswith("__"):  # not __launch_bounds__(...)
                inner = code[at + 1 : end].strip()
                return found[1], _split_params(inner) if inner not in ("", "void") else []
            at = end + 1


def _closing(code: str, start: int) -> int:
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] == "(") - (code[at] == ")")
        if depth == 0:
            return at
    return len(code)


def _split_params(text: str) -> list[str]:
    parts = [""]
    depth = 0
    for char in text:
        depth += (char in "(<") - (char in ")>")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _param(text: str, entry: str, label: str) -> Param:
    if "=" in text:
        raise ConfigError(
            f"{label}: {entry}: a kernel's parameter has no default value; "
            f"got {' '.join(text.split())!r}"
        )
    is_pointer = "*" in text or "[" in text
    words = re.findall(r"[\w:]+(?:\s*<[^*]*>)?", re.sub(r"\[.*\]", "", text))
    is_const = "const" in text.partition("*")[0].split()  # behind the "*" the pointer itself is
    words = [word for word in words if word not in _QUALIFIERS]
    if len(words) < 2 or "&" in text or text.count("*") > 1:
        raise ConfigError(
            f"{label}: {entry}: a parameter must be a pointer or a number, with a name, and "
            f"written out: macros are not expanded here; got {' '.join(text.split())!r}"
        )
    param = Param(words[-1], " ".join(words[:-1]), is_pointer, is_const)
    if is_reserved(param.name):
        raise ConfigError(
            f"{label}: {entry}: parameter {param.name!r} must have another name: C++ or CUDA "
            f"reserves this one; got {' '.join(text.split())!r}"
        )
    if not param.kind:
        known = ", ".join(("int", "int64_t", "unsigned", "float", "double", "bool", "TensorMap"))
        raise ConfigError(
            f"{label}: {entry}: parameter {param.name!r} must be a pointer or have a type of "
            f"{known}, which no macro hides; got {param.ctype!r}"
        )
    return param
