"""What NVRTC and ptxas say about a user's source, as errors with the source line.

scale_rows.cu:12: error: identifier "foo" is undefined   [float16, sm_90a]
    out[i] = foo(x[i]);
             ^
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import CompileError
from engine.kernels._chip import HOPPER
from engine.kernels._module import source_dir

__all__ = ["Diagnostic", "KernelCompileError", "read_log"]

_MESSAGE = re.compile(r"(.+?)\((\d+)\): (?:catastrophic )?(error|warning)(?: #[\w-]+)?: (.*)")
_PTXAS = re.compile(r"\W*ptxas\s+(?:application ptx input, line \d+; )?(error|fatal)\s*:\s*(.*)")
_C_HEADERS = {"assert.h", "float.h", "limits.h", "math.h", "stdint.h", "stdio.h", "stdlib.h"}
_SUMMARY = re.compile(r"\d+ (?:catastrophic )?errors? detected|Compilation terminated|Remark:")
_SHARED = re.compile(r"Entry function '(\w+)' uses too much shared data \((\w+) bytes, (\w+) max\)")
_MISSING = re.compile(r'cannot open source file "([^"]+)"')
_EXTERN = re.compile(r"Unresolved extern function '(\w+)'")


@dataclass(frozen=True)
class Diagnostic:
    """An error or a warning of the compiler.

    Attributes
    ----------
    file : str
    line : int
        Line in the file, from 1; 0 if ptxas names none.
    severity : str
        "error" or "warning".
    message : str
    context : tuple of str
        The source line and the caret below it; notes on template instantiation.
    """

    file: str
    line: int
    severity: str
    message: str
    context: tuple[str, ...] = ()

    def text(self, variants: Sequence[str] = ()) -> str:
        """Return it as the terminal shows it; `variants`: what it was compiled for."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        suffix = f"   [{'; '.join(variants)}]" if variants else ""
        return "\n".join([f"{place}: {self.severity}: {self.message}{suffix}", *self.context])


class KernelCompileError(CompileError):
    """A user's source does not compile.

    Parameters
    ----------
    diagnostics : sequence of Diagnostic
        Errors, at least one.
    variant : str
        What it was compiled for: "float16, sm_90a".
    """

    def __init__(self, diagnostics: Sequence[Diagnostic], variant: str) -> None:
        super().__init__("\n".join(each.text([variant]) for each in diagnostics))
        self.diagnostics = tuple(diagnostics)
        self.variant = variant

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the lines of the source, without a traceback."""
        return [f"CompileError: {self}"]


def read_log(log: str, file: str, source: str) -> list[Diagnostic]:
    """Return the errors and warnings of a log of NVRTC, errors first.

    Parameters
    ----------
    log : str
    file : str
        Name of the source, for messages of ptxas.
    source : str
        The CUDA text, in which the instruction that ptxas refuses is looked up.
    """
    found: list[Diagnostic] = []
    context: list[str] | None = None
    last = f"{file}({source.rstrip().count(chr(10)) + 1}):"
    for line in [*log.splitlines(), ""]:
        line = line.replace("At end of source:", last)  # a brace is missing, say
        ptxas = _PTXAS.match(line)
        message = None if ptxas else _MESSAGE.match(line)
        if message or ptxas or not line.strip() or _SUMMARY.match(line):
            if context is not None:
                found[-1] = _with_context(found[-1], context)
            context = None
        if message:
            words = message[4] + _remedy(message[4])
            found.append(Diagnostic(message[1], int(message[2]), message[3], words))
            context = []
        elif ptxas:
            found += _of_ptxas(ptxas[2], file, source)
        elif context is not None:
            context.append(line)
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda each: each.severity != "error")


def _remedy(message: str) -> str:
    """Return what to do about a header that NVRTC does not find; "" if it is another error."""
    missing = _MISSING.match(message)
    if missing is None:
        return ""
    name = missing[1]
    ours = [f"common/{path.name}" for path in (source_dir() / "common").glob("*.cuh")]
    if near := difflib.get_close_matches(f"common/{name.removeprefix('common/')}", ours, 1, 0.8):
        return f'; did you mean "{near[0]}"?'
    if name.startswith(("cub/", "thrust/", "cuda/", "nv/", "cooperative_groups")):
        return "; CUB, Thrust, libcu++ and cooperative groups are not available"
    if "." not in name or name in _C_HEADERS:
        return (
            "; NVRTC has no C or C++ library: printf, assert and the functions of math.h are built "
            "in, and int64_t is in common/types.cuh"
        )
    return ""


def _with_context(diagnostic: Diagnostic, lines: list[str]) -> Diagnostic:
    """Indent by four columns; a message that is continued on the next line has no caret."""
    if lines and not any(set(line.strip()) == {"^"} for line in lines):
        message = " ".join([diagnostic.message, *(line.strip() for line in lines)])
        return Diagnostic(diagnostic.file, diagnostic.line, diagnostic.severity, message)
    shown = tuple(f"  {line}".rstrip() for line in lines)
    return Diagnostic(
        diagnostic.file, diagnostic.line, diagnostic.severity, diagnostic.message, shown
    )


def _of_ptxas(message: str, file: str, source: str) -> list[Diagnostic]:
    if "aborted due to errors" in message:
        return []
    if shared := _SHARED.match(message):
        used = int(shared[2], 0)
        most = int(shared[3], 0)
        remedy = "use less"
        if used <= HOPPER.shared_bytes:
            remedy = "make it dynamic (extern __shared__, and shared= in the launch)"
        message = f"{shared[1]} declares {used} bytes of static shared memory, more than {most}"
        message += f": {remedy}"
    elif extern := _EXTERN.match(message):
        message = f"{extern[1]} is declared and called, but defined nowhere"
    name = re.search(r"'(\w[\w.]*)'", message)
    lines = source.splitlines()
    where = [number for number, line in enumerate(lines, 1) if name and name[1] in line]
    line = where[0] if len(where) == 1 else 0
    shown = (f"    {lines[line - 1].strip()}",) if line else ()
    return [Diagnostic(file, line, "error", message, shown)]
