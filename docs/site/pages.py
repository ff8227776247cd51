"""The folder that Sphinx reads: pages, and what they link to outside `docs/`.

Links in Markdown are relative to the file's place in the repository. On the site `docs/` is the
root, `examples/` the course, and any other linked file gets a page of its own below `source/`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".yaml": "yaml", ".json": "json"}


class Pages:
    """Pages written to `folder`.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._linked: set[str] = set()  # files outside docs/ that have a page

    def add(self, place: str, text: str) -> None:
        """Write a Markdown page.

        Parameters
        ----------
        place : str
            Path in the repository that relative links start from; it determines the page's own.
        text : str
        """
        page = _page_of(place)
        parts = _FENCE.split(text)  # text, fence mark, text, ...
        fences = [match[0] for match in _FENCE.finditer(text)]
        shown = [self._with_links(part, place, page) for part in parts[::2]]
        body = "".join(a + b for a, b in zip(shown, [*fences, ""], strict=True))
        self._write(page, body)

    def _with_links(self, text: str, place: str, page: str) -> str:
        def replaced(match: re.Match[str]) -> str:
            path = os.path.normpath(PurePosixPath(place).parent / match[1])
            target = self._page_with(path)
            return f"]({os.path.relpath(target, PurePosixPath(page).parent)}{match[2] or ''})"

        return _LINK.sub(replaced, text)

    def _page_with(self, path: str) -> str:
        """Return the page of a file, and write it if it lies outside `docs/`."""
        page = _page_of(path)
        if page.startswith("source/") and path not in self._linked:
            self._linked.add(path)
            if path.endswith(".md"):
                self.add(path, "---\norphan: true\n---\n\n" + (ROOT / path).read_text())
            else:
                self._write(page, _source(ROOT / path))
        return page

    def _write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _page_of(path: str) -> str:
    """Return the page, relative to the site's root, of a path in the repository."""
    place = PurePosixPath(path)
    if place.parts[0] == "docs":
        return str(place.relative_to("docs"))
    if path in ("examples", "examples/README.md"):
        return "course/index.md"
    if str(place.parent) == "examples" and place.suffix in (".py", ".ipynb"):
        script = ROOT / "examples" / f"{place.stem}.py"
        if script.read_text(encoding="utf-8").startswith("# %%"):  # in cells: of the course
            return f"course/{place.stem}.md"
    return f"source/{path}" if place.suffix == ".md" else f"source/{path}.md"


def _source(path: Path) -> str:
    """Return a page with a file's text, or the names in a folder."""
    title = path.relative_to(ROOT)
    if path.is_dir():
        names = "".join(f"- `{each.name}`\n" for each in sorted(path.iterdir()))
        return f"---\norphan: true\nnosearch: true\n---\n\n# {title}/\n\n{names}"
    language = _LANGUAGES.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8")
    return (
        f"---\norphan: true\nnosearch: true\n---\n\n# {title}\n\n"
        f"``````{{code-block}} {language}\n:linenos:\n\n{text}``````\n"
    )
