"""The module of a user's kernel: its text, compiled for one dtype with macros."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import CompileError
from engine.kernels._module import ModuleSpec
from engine.kernels._nvrtc import NvrtcError
from engine.kernels._user.diagnostics import KernelCompileError, read_log

__all__ = ["UserModule", "can_run"]


@dataclass(frozen=True)
class UserModule(ModuleSpec):
    """A module compiled from text: `file` is its name in messages.

    Attributes
    ----------
    text_digest : str
        Hash of the text and its headers. Two modules with the same one are the same.
    text : str
    folder : str
        Folder of headers; "" for none.
    types : tuple of (str, str)
        Macros that name C types.
    requires : str
        Oldest architecture; "" for any.
    """

    text_digest: str = ""
    types: tuple[tuple[str, str], ...] = ()
    requires: str = ""
    text: str = field(default="", compare=False, repr=False)
    folder: str = field(default="", compare=False, repr=False)

    def __hash__(self) -> int:  # a launch looks its module up
        return hash((self.text_digest, self.dtype, self.defines))

    def supports(self, arch: str) -> bool:
        """Tell whether this file can be compiled for `arch`."""
        return can_run(self.requires, arch)

    def source(self) -> str:
        """Return the CUDA text."""
        return self.text

    def digest(self) -> str:
        """Return the hash of the text and of the headers it includes."""
        return self.text_digest

    def options(self, arch: str) -> list[str]:
        """Return NVRTC's options: `scalar_t` is known without an include.

        -lineinfo changes no code; profilers and compute-sanitizer then name the source line.
        """
        folders = [f"-I{self.folder}"] if self.folder else []
        types = [f"-D{name}={ctype}" for name, ctype in self.types]
        return [
            *folders,
            *super().options(arch),
            "--pre-include=common/types.cuh",
            "-lineinfo",
            *types,
        ]

    def explain(self, error: NvrtcError, arch: str) -> CompileError:
        """Return an error with the source lines."""
        found = [
            each for each in read_log(error.log, self.file, self.text) if each.severity == "error"
        ]
        return KernelCompileError(found, f"{self.variant}, {arch}") if found else error

    @property
    def variant(self) -> str:
        """What it is compiled for: the dtype of `scalar_t` and the macros."""
        macros = (f"{name}={value}" for name, value in (*self.types, *self.defines))
        return ", ".join([self.dtype, *macros])

    def __str__(self) -> str:
        return super().__str__() + "".join(f" {name}={ctype}" for name, ctype in self.types)


def can_run(requires: str, arch: str) -> bool:
    """Tell whether a kernel that requires an architecture runs on `arch`.

    "sm_90a" is Hopper alone; a name without "a" means this architecture or a later one.

    Examples
    --------
    >>> can_run("sm_90a", "sm_120"), can_run("sm_89", "sm_120")
    (False, True)
    """
    if not requires or requires == arch:
        return True
    return not requires.endswith("a") and _number(arch) >= _number(requires)


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("a"))
