"""The examples run, cell by cell, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SLOW = ("speculative_decoding", "structured_output")
FILES = {path.stem: path for path in (Path(__file__).parents[1] / "examples").glob("*.py")}
EXAMPLES = [
    pytest.param(FILES[name], id=name, marks=[pytest.mark.slow] if name in _SLOW else [])
    for name in sorted(FILES)
]


@pytest.mark.parametrize("path", EXAMPLES)
def test_example(path, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_EXAMPLES_OUT", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example prints what it found"


@pytest.mark.parametrize("path", EXAMPLES)
def test_example_is_a_notebook(path):
    cells = path.read_text().split("\n# %%")
    assert cells[0].startswith("# %% [markdown]\n# # ") or cells[0] == "", "a title comes first"
    assert sum("[markdown]" in cell[:12] for cell in cells) >= 3


def test_an_example_without_its_packages_says_what_to_install(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('matplotlib')\n")
    path = FILES["watch_attention"]
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "this example draws pictures; pip install '.[examples]' first"
