"""The site: every public name has a page, every page is in the navigation, every link leads on."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from engine import errors, kernels, reference

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"

pytest.importorskip("sphinx", reason="the site needs: pip install '.[docs]'")
pytest.importorskip("jupytext", reason="the course needs: pip install '.[docs]'")


@pytest.fixture(scope="module")
def site():
    """Return the module that writes the pages, as `python docs/site` runs it."""
    sys.path.insert(0, str(SITE))
    try:
        spec = importlib.util.spec_from_file_location("site_main", SITE / "__main__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SITE))


@pytest.fixture(scope="module")
def pages(site, tmp_path_factory):
    """Return the folder with all pages in Markdown."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    site.write_pages(folder)
    return folder


def _documented(folder):
    """Return the names that a directive documents."""
    text = "".join(path.read_text() for path in (folder / "api").rglob("*.md"))
    return set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE))


def test_every_public_name_has_a_page(pages):
    modules = {"errors", "kernels", "reference", "__version__"}
    wanted = {f"engine.{name}" for name in set(engine.__all__) - modules}
    wanted |= {f"engine.kernels.{name}" for name in kernels.__all__}
    wanted |= {f"engine.errors.{name}" for name in errors.__all__ if name[0].isupper()}
    assert not wanted - _documented(pages)
    for op in filter(lambda name: inspect.isfunction(getattr(reference, name)), reference.__all__):
        assert f"def {op}(" in (pages / "api" / "kernels" / f"{op}.md").read_text()


def test_no_private_name_has_a_page(pages):
    assert not [name for name in _documented(pages) if re.search(r"\._|^_", name)]


def test_every_option_is_described(pages):
    text = (pages / "api" / "options.md").read_text()
    for name in list(inspect.signature(engine.LLM).parameters)[1:]:
        assert re.search(rf"^`{name}`\n: .{{20,}}", text, re.MULTILINE), name


def test_the_navigation_and_the_pages_are_the_same(pages):
    """Only pages that others link to, such as sources, stand outside the navigation."""
    listed = []
    for page in pages.rglob("*.md"):
        for block in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.S | re.M):
            listed += re.findall(r"^/(.+)$", block, re.M)
    there = {path.relative_to(pages).with_suffix("").as_posix() for path in pages.rglob("*.md")}
    shown = {name for name in there if not name.startswith("source/")}
    assert len(listed) == len(set(listed))
    assert set(listed) == shown - {"index"}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= shown


def test_links_to_sources_lead_to_their_pages(pages):
    text = (pages / "kernels.md").read_text()
    assert "](source/cuda_src/rmsnorm.cu.md)" in text
    assert "__global__" in (pages / "source" / "cuda_src" / "rmsnorm.cu.md").read_text()
    for page in pages.rglob("*.md"):
        prose = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", prose):
            assert (page.parent / target).exists(), f"{page.relative_to(pages)}: {target}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, SITE, "--out", tmp_path / "site", "--pages", tmp_path / "pages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*https?://[^>]*>", page.read_text())
        assert not [tag for tag in loaded if 'rel="canonical"' not in tag], page.name
    found = (tmp_path / "site" / "searchindex.js").read_text()
    assert "api/LLM" in found
