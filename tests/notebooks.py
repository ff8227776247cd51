"""Build the notebooks: run every example cell by cell and keep its outputs and pictures.

`python -m tests.notebooks [NAME ...] [--out build/notebooks]` writes `NAME.ipynb` for each
`examples/NAME.py`, and the folders that some of them read. Each notebook runs in a Jupyter
kernel of its own, so an event loop is already running there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
_CELL_SECONDS = 300


def examples() -> list[Path]:
    """Return the examples in cells; the others are scripts that need other packages."""
    paths = sorted(EXAMPLES.glob("*.py"))
    return [path for path in paths if path.read_text(encoding="utf-8").startswith("# %%")]


def build(path: Path, out: Path) -> str:
    """Run the example `path` and write its notebook to `out`; return the error of a cell, or ""."""
    notebook = jupytext.read(path)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel})
    error = ""
    with TemporaryDirectory() as root:  # takes the pictures that the example saves
        (Path(root) / "docs").symlink_to(ROOT / "docs")
        client = NotebookClient(
            notebook,
            timeout=_CELL_SECONDS,
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],  # it warns of its sockets, which are local
            resources={"metadata": {"path": str(_copy_files(Path(root) / "examples"))}},
        )
        try:
            client.execute()
        except CellExecutionError as failed:
            error = f"{path.name}: {failed}"
    nbformat.write(notebook, out / f"{path.stem}.ipynb")  # shows the error, if there was one
    return error


def _copy_files(folder: Path) -> Path:
    """Copy all that examples read or import to `folder`, and return it."""
    examples_and_pages = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".md")}

    def ignored(place: str, names: list[str]) -> set[str]:
        return {"__pycache__"} | (examples_and_pages if Path(place) == EXAMPLES else set())

    return Path(shutil.copytree(EXAMPLES, folder, ignore=ignored, dirs_exist_ok=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all examples")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "notebooks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="notebooks at a time")
    arguments = parser.parse_args()
    paths = [EXAMPLES / f"{name}.py" for name in arguments.names] or examples()
    out = _copy_files(arguments.out)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        errors = list(pool.map(partial(build, out=out), paths))
    for path, error in zip(paths, errors, strict=True):
        print(error or out / f"{path.stem}.ipynb")
    return int(any(errors))


if __name__ == "__main__":
    sys.exit(main())
