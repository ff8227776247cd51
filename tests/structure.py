"""docs/structure.md: one sentence per package, from the packages' docstrings.

`python -m tests.structure` writes the page; `tests/test_structure.py` compares it.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structure.md"
_HEAD = """\
# Structure

The packages of `engine/`, each with the first sentence of its docstring. A package imports only
from packages that stand before it in `ORDER` of `tests/test_structure.py`.
`python -m tests.structure` writes this page.

| Package | Contents |
|---|---|
"""


def packages() -> list[Path]:
    """Return the `__init__.py` of every package of the engine."""
    return sorted((ROOT / "engine").rglob("__init__.py"))


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, in one line; "" without a docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def page() -> str:
    """Return the page: a table with a row for each package."""
    rows = []
    for path in packages():
        name = path.parent.relative_to(ROOT).as_posix()
        rows.append(f"| `{name}/` | {first_sentence(path)} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
