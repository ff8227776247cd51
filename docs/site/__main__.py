"""Build the site: `python docs/site [--out build/site]`; a warning is an error.

The pages are `docs/`, the API from docstrings, and the course from the notebooks. They are written
to `build/pages`, from which Sphinx makes the site. No other host is needed to build or to read it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import api
import course
from pages import ROOT, Pages
from sphinx.cmd.build import main as sphinx

_BENCHMARKS = sorted(
    path.stem for path in (ROOT / "docs" / "benchmarks").glob("*.md") if path.stem != "README"
)
_FRAMEWORKS = sorted(path.stem for path in (ROOT / "docs" / "integrations").glob("*.md"))
NAVIGATION = {
    "Start": ["quickstart", "command_line", "platforms"],
    "Course": ["course/index", *(f"course/{name}" for name in course.names())],
    "Guides": [
        *("serving", "page", "clients", "tools_and_reasoning", "structured_output"),
        *(
            "models",
            "quantization",
            "lora",
            "speculative",
            "distributed",
            "replicas",
            "scaling",
            "determinism",
            "superconductors",
        ),
    ],
    "Kernels": ["your_kernel", "override", "headers", "kernels", "benchmarks/README"],
    "Frameworks": [f"integrations/{name}" for name in _FRAMEWORKS],
    "API": ["stable_api", *(f"api/{name}" for name in api.page_names())],
    "Inside": ["engine", "memory", "states", "processes", "structure", "lab-notebook"],
}
_BELOW = {  # pages in the navigation of another page
    "benchmarks/README": [f"benchmarks/{name}" for name in _BENCHMARKS],
    "api/kernels": [f"api/kernels/{op}" for op in api.ops()],
}


def write_pages(folder: Path) -> None:
    """Write every page of the site to an empty folder."""
    docs = ROOT / "docs"
    shutil.copytree(docs, folder, ignore=shutil.ignore_patterns("*.md", "site"))
    pages = Pages(folder)
    for path in docs.rglob("*.md"):
        pages.add(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    api.add_api(pages)
    course.add_course(pages)
    for caption, names in NAVIGATION.items():
        _append(folder / "index.md", names, caption)
    for page, names in _BELOW.items():
        _append(folder / f"{page}.md", names)


def _append(page: Path, names: list[str], caption: str = "") -> None:
    """Add entries to the navigation below `page`."""
    head = f":caption: {caption}\n" if caption else ""
    entries = "".join(f"/{name}\n" for name in names)
    with page.open("a", encoding="utf-8") as file:
        file.write(f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n{head}\n{entries}```\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--pages", type=Path, default=ROOT / "build" / "pages")
    arguments = parser.parse_args()
    for folder in (arguments.out, arguments.pages):
        shutil.rmtree(folder, ignore_errors=True)
    write_pages(arguments.pages)
    strict = ("--fail-on-warning", "--keep-going", "--quiet", "--fresh-env", "--jobs", "auto")
    here = str(Path(__file__).parent)
    return sphinx(["-b", "html", "-c", here, *strict, str(arguments.pages), str(arguments.out)])


if __name__ == "__main__":
    sys.exit(main())
