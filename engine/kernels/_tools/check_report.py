"""What `check` found, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CheckReport", "CompiledKernel", "Finding"]

_MAX_SHOWN = 3  # findings of one kind that are shown in full
_ROW = "    {:7} {:24} {:24} {:>9} {:>7} {:>7}"


@dataclass(frozen=True)
class Finding:
    """Something wrong, or suspicious.

    Attributes
    ----------
    kind : str
        Findings of one kind are shown together: "compile", "launch", "reference", "values",
        "unwritten", "guard", "input", "outside", "shared", "nondeterminism", "crash", "timeout",
        "graph", "unused", "spill", "sizes", ...
    text : str
        Names the element, both values, and the cause, as far as it is known.
    where : str
        The call: "T=3, N=5, float16"; "" if it is about every call.
    repeat : str
        Arguments of `check` that repeat this call alone.
    is_error : bool
        False for a warning.
    """

    kind: str
    text: str
    where: str = ""
    repeat: str = ""
    is_error: bool = True


@dataclass(frozen=True)
class CompiledKernel:
    """ptxas's report on a kernel."""

    arch: str
    dtype: str
    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass
class CheckReport:
    """The result of `check`.

    Attributes
    ----------
    op : str
    signature : str
    findings : list of Finding
    kernels : list of CompiledKernel
    num_references, num_calls : int
        Calls of the reference, and of the kernel on the GPU.
    device : str
        Name of the GPU; "" if the kernel was compiled, but not run.
    skipped : list of str
        What was not done, and why.
    seconds : float
    """

    op: str
    signature: str
    findings: list[Finding] = field(default_factory=list)
    kernels: list[CompiledKernel] = field(default_factory=list)
    num_references: int = 0
    num_calls: int = 0
    device: str = ""
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings are allowed."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors."""
        return [finding for finding in self.findings if finding.is_error]

    @property
    def warnings(self) -> list[Finding]:
        """The other findings."""
        return [finding for finding in self.findings if not finding.is_error]

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self.errors)} errors"
        return f"<CheckReport {self.op}: {state}, {len(self.warnings)} warnings>"

    def __str__(self) -> str:
        parts = [f"{self.op}({self.signature})", *self._summary()]
        parts += self._table()
        parts += _shown("warning", self.warnings)
        parts += _shown("FAILED", self.errors)
        parts += [f"  not checked: {reason}" for reason in self.skipped]
        count = len({finding.kind for finding in self.errors})
        state = "ok" if self.ok else f"FAILED ({count} kind{'s' * (count > 1)} of error)"
        return "\n".join([*parts, f"{self.op}: {state}, {self.seconds:.1f} s"])

    def _summary(self) -> list[str]:
        lines = []
        if self.num_references:
            lines.append(f"  reference: {self.num_references} calls")
        if self.device:
            lines.append(f"  kernel: {self.num_calls} calls on {self.device}")
        else:
            lines.append("  no GPU: the kernel was compiled, not run")
        return lines

    def _table(self) -> list[str]:
        if not self.kernels:
            return []
        heads = ("arch", "dtype", "kernel", "registers", "spilled", "shared")
        rows: dict[tuple[object, ...], list[str]] = {}  # dtypes with equal numbers, in one row
        for each in self.kernels:
            numbers = (each.registers, each.spill_bytes, each.shared_bytes)
            rows.setdefault((each.arch, each.name, *numbers), []).append(each.dtype)
        lines = [_ROW.format(*heads)]
        for (arch, name, *counts), dtypes in rows.items():
            lines.append(_ROW.format(arch, " ".join(dtypes), name, *counts))
        return lines


def _shown(label: str, findings: list[Finding]) -> list[str]:
    """Return the lines of the findings: a few of each kind, and how many calls say the same."""
    lines: list[str] = []
    for kind in dict.fromkeys(finding.kind for finding in findings):
        same = [finding for finding in findings if finding.kind == kind]
        texts = list(dict.fromkeys(finding.text for finding in same))
        texts.sort(key=lambda text: -text.count("\n"))  # those with a hint first
        for text in texts[:_MAX_SHOWN]:
            lines += _paragraph(label, [finding for finding in same if finding.text == text])
        if len(texts) > _MAX_SHOWN:
            rest = sum(finding.text in texts[_MAX_SHOWN:] for finding in same)
            lines.append(f"    ... and {rest} more of this kind")
    return lines


def _paragraph(label: str, same: list[Finding]) -> list[str]:
    """Return the lines of findings with equal text."""
    first = same[0]
    where = f" with {first.where}" if first.where else ""
    more = f" (and {len(same) - 1} other calls)" if same[1:] else ""
    lines = [f"  {label} ({first.kind}){where}{more}:"]
    lines += [f"    {line}".rstrip() for line in first.text.splitlines()]
    return [*lines, f"    repeat: {first.repeat}"] if first.repeat else lines
