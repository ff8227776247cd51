"""The examples run on the CPU as scripts and as notebooks, with what they say to install."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import DownloadError
from engine.loading.download import resolve_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

ROOT = Path(__file__).parents[1]
FILES = {
    path.stem: path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.read_text().startswith("# %%")  # in cells; the others need a framework
}
CHAPTERS = [name for name in FILES if name[0].isdigit()]
_SLOW_SCRIPTS = ("09_speculative_decoding", "screen_superconductors", "structured_output")
_QUICK_NOTEBOOKS = ("02_inside_attention", "async_requests")  # pictures; an event loop
_EXTRA_OF = {"matplotlib": "examples", "cupy": "cuda12", "llguidance": "grammar"}
_FOLDERS = {path.parent.name for path in (ROOT / "examples").glob("*/__init__.py")}
_INSTALL = re.compile(
    r"# Install, in a checkout of the engine: `pip install ('?)\.(?:\[(.*?)\])?\1`"
)


def _cases(is_slow):
    return [
        pytest.param(path, id=name, marks=[pytest.mark.slow] if is_slow(name) else [])
        for name, path in FILES.items()
    ]


def _extras(path):
    """Return the extras that the example says to install."""
    found = _INSTALL.match(path.read_text().split("\n")[3])
    assert found is not None, "line 4, after the title, says what to install"
    return set(found[2].split(",")) if found[2] else set()


@pytest.mark.parametrize("path", _cases(lambda name: name in _SLOW_SCRIPTS))
def test_runs_as_a_script(path, tmp_path):
    _run_script(path, tmp_path)
    if (lens := tmp_path / "logits.png").exists():
        from matplotlib.image import imread

        darkness = (imread(lens)[..., :3].mean(-1) < 0.25).mean()
        assert darkness < 0.4, "most of the picture can be told apart"


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_pictures_of_numbers_have_a_scale(path):
    cells = path.read_text().split("\n# %%")
    assert all("colorbar(" in cell for cell in cells if "imshow(" in cell and "cmap=" in cell)


@pytest.mark.gpu
@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_runs_on_a_gpu(cp, path, tmp_path):
    if "smollm2" in path.read_text():
        try:
            resolve_model("smollm2", progress=False)
        except DownloadError as error:
            pytest.skip(f"no weights: {error}")
    errors = _run_script(path, tmp_path)
    assert "engine: device cpu" not in errors


def _run_script(path, folder):
    """Run the example in `folder`, and return what it wrote to standard error."""
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=folder, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example prints what it found"
    pictures = re.findall(r'savefig\("(.*?)"', path.read_text())
    assert {picture.name for picture in folder.glob("*.png")} >= set(pictures)
    return done.stderr


@pytest.mark.parametrize("path", _cases(lambda name: name not in _QUICK_NOTEBOOKS))
def test_runs_as_a_notebook(path, tmp_path):
    command = [sys.executable, "-m", "tests.notebooks", path.stem, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = json.loads((tmp_path / f"{path.stem}.ipynb").read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert any(output.get("name") == "stdout" for output in outputs)
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures == path.read_text().count("savefig("), "each figure is shown once"


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_is_a_notebook_that_checks_something(path):
    text = path.read_text()
    cells = text.split("\n# %%")
    assert re.match(r"# %% \[markdown\]\n# # .+\n#\n", cells[0]), "a title comes first"
    assert sum("[markdown]" in cell[:12] for cell in cells) >= 3
    assert re.search(r"\bassert |assert_allclose\(|assert_close\(|check\(", text)


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_names_what_it_imports(path):
    extras = _extras(path)
    tree = ast.walk(ast.parse(path.read_text()))
    imported = set()
    for node in tree:
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    others = imported - {"engine", "numpy"} - _FOLDERS - set(sys.stdlib_module_names)
    assert {_EXTRA_OF[name] for name in others} <= extras
    if "StructuredOutput" in path.read_text():
        assert "grammar" in extras


@pytest.mark.skipif(tomllib is None, reason="needs Python 3.11, which reads TOML")
@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_names_extras_that_exist(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert _extras(path) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_uses_no_private_name(path):
    private = re.findall(r"[\w.]*\b(?:import |\.)_(?!_)\w+", path.read_text())
    assert not private


def test_the_course_has_an_order():
    assert [int(name[:2]) for name in CHAPTERS] == [*range(1, 10)]
    for name, following in zip(CHAPTERS, [*CHAPTERS[1:], None], strict=True):
        text = FILES[name].read_text()
        number = int(name[:2])
        assert text.startswith(f"# %% [markdown]\n# # {number}. ")
        assert "\n# ## Exercises\n" in text, name
        assert following is None or f"]({following}.py)" in text, name


def test_the_index_lists_every_example():
    index = (ROOT / "examples" / "README.md").read_text()
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert set(re.findall(r"\]\((\w+)\.py\)", index)) == scripts
