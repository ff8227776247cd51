"""docs/structure.md: one sentence per package and module, from their docstrings.

`python -m tests.structure` writes the page; `tests/test_structure.py` checks it.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structure.md"
_HEAD = """\
# Structure

A package or module imports only those before it in `ORDER` of `tests/test_structure.py`. An op `X`
is `X.cu` in `cuda_src/` or [its family's folder](../cuda_src/README.md#a-family),
`engine/kernels/X.py` or `X/X.py`, `engine/reference/X.py`, a test and a benchmark.

"""
_TABLE = "| {} | Contents |\n|---|---|\n"
_ENTRIES = ("__init__", "__main__", "_version")


def packages() -> list[Path]:
    """Return the `__init__.py` of every package of the engine that can be imported by name."""
    found = (ROOT / "engine").rglob("__init__.py")
    return sorted(path for path in found if path.parent.name.isidentifier())


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring on one line; "" if it has none."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def page() -> str:
    """Return the page: a table of packages, and a table of the top-level modules of `engine/`.

    The row of `engine/kernels/` lists its kernel families.
    """
    rows = [_TABLE.format("Package")]
    inside = [path.parent.name for path in packages() if path.parent.parent.name == "kernels"]
    families = [name for name in inside if not name.startswith("_")]
    for path in packages():
        name = path.parent.relative_to(ROOT).as_posix()
        more = f". Families: {', '.join(families)}" if name == "engine/kernels" else ""
        if path.parent.name not in families:
            rows.append(f"| `{name}/` | {first_sentence(path)}{more} |\n")
    rows.append("\n" + _TABLE.format("Module"))
    for path in sorted((ROOT / "engine").glob("*.py")):
        if path.stem not in _ENTRIES:
            rows.append(f"| `{path.name}` | {first_sentence(path)} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
