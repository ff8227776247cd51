"""The Python blocks of each page in docs/integrations run, one after the other, as one session."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    path.stem: re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    for path in sorted((ROOT / "docs" / "integrations").glob("*.md"))
}


@pytest.mark.parametrize("name", [name for name, blocks in PAGES.items() if blocks])
def test_blocks_run(name, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "session.py").write_text("".join(PAGES[name]))
    done = subprocess.run(
        [sys.executable, "session.py"], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stderr
