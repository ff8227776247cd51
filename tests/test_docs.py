"""The documents hold together: links and symbols resolve, pages keep their form."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from engine import env

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
FOLDERS = ("docs", "cuda_src", "engine", "examples", "tests", ".github")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)
PAGES = sorted(set(BENCHMARKS.glob("*.md")) - {BENCHMARKS / "README.md"})
HEADINGS = ["What is measured", "Picture", "Beside the peers", "Run it again", "What limits it"]
SCREEN = (66, 112)  # lines; columns of a table

_LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s]+)\)")
_SOURCES = {".cu", ".cuh", ".py"}


def _links(document: Path) -> list[tuple[str, str, str]]:
    """Return (text, target, anchor) of the relative links and pictures; code is not looked at."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = []
    for name, target in _LINK.findall(text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            found.append((name, path, anchor))
    return found


def _anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


def _has(source: Path, symbol: str) -> bool:
    """Tell whether a source file names the symbol, as a whole word."""
    if source.suffix not in _SOURCES or not source.exists():
        return False
    return re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", source.read_text()) is not None


def _name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def test_there_are_documents():
    assert {"README.md", "docs/kernels.md", "docs/lab-notebook.md"} <= set(map(_name, DOCUMENTS))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_resolve(document):
    missing = []
    for text, path, anchor in _links(document):
        target = (document.parent / path).resolve() if path else document
        exists = target.is_relative_to(ROOT) and target.exists()
        if not exists or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            missing.append(f"[{text}]({path}#{anchor})")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_linked_symbols_are_in_the_linked_file(document):
    """[`symbol`](file): the one notation of a pointer into the sources."""
    missing = []
    for text, path, _ in _links(document):
        found = re.fullmatch(r"`([^`]+)`", text)
        if not found or Path(path).suffix not in _SOURCES or "/" in found[1]:
            continue
        symbol, source = found[1].removesuffix("()"), (document.parent / path).resolve()
        if symbol != source.name and not _has(source, symbol):
            folder = ROOT / source.relative_to(ROOT).parts[0]
            others = [_name(file) for file in sorted(folder.rglob("*.*")) if _has(file, symbol)]
            missing.append(f"{symbol} is not in {path}, but in {others or 'no file there'}")
    assert not missing, "\n".join(missing)


def test_a_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "docs" / "site" / "__main__.py").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        listed = f'"{page.stem}"' in navigation or page.stem == "index"
        assert listed, f"{_name(page)}: add it to NAVIGATION in docs/site/__main__.py"


def test_the_stable_names_can_be_imported():
    """In the first column: a name of `engine`, or a path below it; of kernels by their path."""
    text = (ROOT / "docs" / "stable_api.md").read_text()
    names = [
        name
        for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`([\w.]+)[`(]", cell)
    ]
    assert {"LLM", "Op", "engine.kernels.define"} <= set(names)
    missing = []
    for name in names:
        module, _, last = name.rpartition(".")
        homes = [module] if module else ["engine", "engine.kernels"]
        if not any(hasattr(importlib.import_module(home), last) for home in homes):
            missing.append(name)
    assert not missing


def test_a_model_of_an_example_can_be_loaded():
    """The default model, a hub id or a path; "dummy" has a config of its own."""
    for document in DOCUMENTS:
        for name in re.findall(r'\b(?:LLM|load|from_name)\(\s*"([^"]*)"', document.read_text()):
            assert name in ("smollm2", "dummy") or "/" in name, f"{_name(document)}: {name}"


def test_the_ladder_points_at_symbols():
    links = _links(ROOT / "docs" / "kernels.md")
    assert sum(text.startswith("`") and Path(path).suffix in _SOURCES
               for text, path, _ in links) > 50  # fmt: skip


def test_the_notebook_lists_its_entries():
    notebook = ROOT / "docs" / "lab-notebook.md"
    entries = re.findall(r"^### ", notebook.read_text(), re.MULTILINE)
    listed = re.findall(r"^  - \[[^\]]+\]\(#", notebook.read_text(), re.MULTILINE)
    assert len(listed) == len(entries)


def test_prose_wraps_at_100_columns():
    """Not tables, code, headings, nor lines with a link, which may not break."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        is_code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            is_whole = re.match(r"    |#|\s*\||!\[|.*\]\(", line)
            assert is_code or is_whole or len(line) <= 100, (
                f"{page.name}:{number} has {len(line)} columns"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_one_screen_in_five_parts(page):
    lines = page.read_text().splitlines()
    most, widest = SCREEN
    assert len(lines) <= most, f"{len(lines)} lines: what was tried belongs in docs/lab-notebook.md"
    assert all(len(line) <= widest for line in lines), max(lines, key=len)
    assert [line[3:] for line in lines if line.startswith("## ")] == HEADINGS


def test_a_benchmark_file_is_shown_and_what_is_shown_exists():
    shown = set()
    for document in (*PAGES, BENCHMARKS / "README.md"):
        for _, path, _ in _links(document):
            target = (document.parent / path).resolve()
            if target.parent == BENCHMARKS:
                assert target.exists(), f"{document.name}: {path}"
                shown.add(target)
    assert shown >= set(BENCHMARKS.iterdir()) - {BENCHMARKS / "README.md"}


def test_pictures_are_small():
    for picture in BENCHMARKS.glob("*.png"):
        assert picture.stat().st_size < 120 << 10, picture.name


def test_the_page_names_every_environment_variable():
    page = (ROOT / "docs" / "command_line.md").read_text()
    named = re.findall(r"^\| `(ENGINE_\w+)` \|", page, re.MULTILINE)
    assert sorted(named) == sorted(variable.name for variable in env.VARIABLES)
