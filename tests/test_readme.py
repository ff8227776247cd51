"""Every Python block of the README, and of a page, prints what it says there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/structured_output.md"))
BLOCKS = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", TEXT, re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) == TEXT.count("```python") >= 4


@pytest.mark.parametrize(("code", "output"), BLOCKS, ids=range(len(BLOCKS)))
def test_block_prints_what_it_says(code, output, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_named_files_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"`((?:engine|cuda_src|examples|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([\w/.]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_catalog_is_whole():
    from engine import kernels

    rows = (ROOT / "README.md").read_text().split("## The catalog")[1].split("## ")[0]
    assert set(re.findall(r"`(\w+)`", rows)) - {"engine"} >= set(kernels.__all__)
