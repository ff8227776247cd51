"""Output of `python -m tests.bench --list`: one line per benchmark, without importing any."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
DEVICES = {
    "GPU": "needs a GPU",
    "CPU": "uses none",
    "any": "runs on either; without a GPU the NumPy mirrors are timed",
}


@dataclass(frozen=True)
class Benchmark:
    """One `bench_<name>.py`.

    Attributes
    ----------
    name, command : str
        Name on the command line; full command.
    measures : str
        The first line of the module's docstring, without the name.
    device : str
        Key of DEVICES: the module's DEVICE constant, or "any".
    """

    name: str
    measures: str
    device: str

    @property
    def command(self) -> str:
        return f"python -m tests.bench {self.name}"


def _read(path: Path) -> Benchmark:
    name = path.stem.removeprefix("bench_")
    module = ast.parse(path.read_text())
    first_line = (ast.get_docstring(module) or "").partition("\n")[0].removesuffix(".")
    measures = first_line.removeprefix(name).lstrip(",: ")
    device = "any"
    for statement in module.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Constant)
            and [target.id for target in statement.targets if isinstance(target, ast.Name)]
            == ["DEVICE"]
        ):
            device = str(statement.value.value)
    return Benchmark(name, measures, device)


def benchmarks() -> list[Benchmark]:
    """Return all benchmarks by name."""
    return [_read(path) for path in sorted(FOLDER.glob("bench_*.py"))]


def table() -> str:
    """Return a line for each benchmark: name, device, command, what it measures."""
    found = benchmarks()
    wide = max(len(each.name) for each in found)
    prefix = len("python -m tests.bench ")
    lines = [
        f"{each.name:{wide}}  {each.device:3}  {each.command:{prefix + wide}}  {each.measures}"
        for each in found
    ]
    return "\n".join([*lines, "", *(f"{key}: {what}" for key, what in DEVICES.items())])
