"""Every Python block of the README, and of a page, prints what it says there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/structured_output.md"))
_BLOCK = re.compile(r"```python\n(.*?)```\s*```text\n(.*?)```", re.DOTALL)
BLOCKS = _BLOCK.findall(TEXT)


def test_there_are_blocks():
    assert len(BLOCKS) == TEXT.count("```python") >= 4


@pytest.mark.parametrize(("code", "output"), BLOCKS, ids=range(len(BLOCKS)))
def test_block_prints_what_it_says(code, output, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_the_quickstart_is_one_session(tmp_path):
    """Its blocks run one after the other, and print what it says."""
    blocks = _BLOCK.findall((ROOT / "docs/quickstart.md").read_text())
    assert len(blocks) >= 4
    assert _printed("".join(code for code, _ in blocks), tmp_path) == "".join(o for _, o in blocks)


def test_the_page_about_a_kernel_of_your_own_is_one_session(tmp_path):
    """Comments at the end of a block are what it prints."""
    text = (ROOT / "docs/your_kernel.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    said = [re.search(r"(?:^# .*\n)*\Z", block, re.MULTILINE)[0] for block in blocks]
    assert len(blocks) >= 3
    assert any(said)
    code = "".join(block.removesuffix(end) for block, end in zip(blocks, said, strict=True))
    assert _printed(code, tmp_path) == re.sub("^# ", "", "".join(said), flags=re.MULTILINE)


def _printed(code, folder):
    (folder / "session.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "session.py"], capture_output=True, text=True, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_named_files_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"`((?:engine|cuda_src|examples|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([\w/.]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_catalog_is_whole():
    from engine import reference

    rows = (ROOT / "README.md").read_text().split("## The catalog")[1].split("## ")[0]
    assert set(re.findall(r"`(\w+)`", rows)) - {"engine"} >= set(reference.__all__)
