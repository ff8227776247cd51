"""The course: a page per example, with the outputs and pictures of its notebook.

`make notebooks` runs the examples; one without a notebook is shown without outputs.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import jupytext
from pages import ROOT, Pages

EXAMPLES = ROOT / "examples"
NOTEBOOKS = ROOT / "build" / "notebooks"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def names() -> list[str]:
    """Return the examples in the course's order, that of their names."""
    paths = EXAMPLES.glob("*.py")
    return sorted(p.stem for p in paths if p.read_text(encoding="utf-8").startswith("# %%"))


def add_course(pages: Pages) -> None:
    """Write a page per example, and the one that lists them."""
    pages.add("examples/README.md", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    for name in names():
        path = NOTEBOOKS / f"{name}.ipynb"
        if path.exists():
            notebook = json.loads(path.read_text(encoding="utf-8"))
        else:
            notebook = jupytext.read(EXAMPLES / f"{name}.py")
        folder = pages.folder / "course" / name
        cells = [_cell(cell, folder, number) for number, cell in enumerate(notebook["cells"])]
        link = f"[examples/{name}.py](../docs/course/{name}.py)"
        (pages.folder / "course").mkdir(exist_ok=True)
        source = EXAMPLES / f"{name}.py"
        (pages.folder / "course" / source.name).write_bytes(source.read_bytes())
        pages.add(f"examples/{name}.py", "\n\n".join([*cells, f"The script: {link}"]) + "\n")


def _cell(cell: Any, folder: Path, number: int) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    outputs = [_output(each, folder, number) for each in cell.get("outputs", ())]
    return "\n\n".join([_fenced("python", text), *outputs])


def _output(output: Any, folder: Path, number: int) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        folder.mkdir(parents=True, exist_ok=True)
        picture = folder / f"{number}.png"
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        return f"![Output of the cell above](../docs/course/{folder.name}/{picture.name})"
    text = output.get("text") or data.get("text/plain") or output.get("traceback", "")
    return _fenced("text", _ANSI.sub("", "".join(text)))


def _fenced(language: str, text: str) -> str:
    return f"`````{language}\n{text.rstrip()}\n`````"
