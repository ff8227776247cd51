"""The examples run, cell by cell, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_EXAMPLES_OUT", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example prints what it found"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_is_a_notebook(path):
    cells = path.read_text().split("\n# %%")
    assert cells[0].startswith("# %% [markdown]\n# # ") or cells[0] == "", "a title comes first"
    assert sum("[markdown]" in cell[:12] for cell in cells) >= 3
