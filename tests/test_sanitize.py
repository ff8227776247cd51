"""`python -m tests.sanitize`, with a stand-in for compute-sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TOOL = """#!/bin/sh
echo "tool: $2"
shift 4
"$@" || exit $?
exit {status}
"""


_TESTS = [
    f"tests/kernels/test_kv_copy.py::test_{name}" for name in ("no_pairs", "misaligned_pages")
]


def _run(tmp_path: Path, status: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(_TOOL.format(status=status))
    tool.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "tests.sanitize", "--tool", "racecheck", *arguments],
        env=os.environ | {"PATH": path},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("status", [0, 9])
def test_each_function_is_checked_and_a_finding_fails(tmp_path, status):
    done = _run(tmp_path, status, "--jobs", "2", *_TESTS)
    assert done.returncode == (1 if status else 0), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "test_kv_copy.py::" in line]
    word = "FAILED, status 9" if status else "ok"
    assert lines and all(f": {word}" in line for line in lines if line.startswith("tests/"))
    assert ("tool: racecheck" in done.stdout) == bool(status), "what failed is shown whole"
    num_failed = len(lines) if status else 0
    assert f"racecheck: {len(lines)} test functions, {num_failed} failed" in done.stdout


def test_a_process_that_takes_too_long_fails(tmp_path):
    done = _run(tmp_path, 0, "--timeout", "0.01", _TESTS[0])
    assert done.returncode == 1
    assert "took more than 0.01 s" in done.stdout


def test_cases_of_each_tier_are_kept():
    """Without a GPU both cases are generated, too, and are errors."""
    function = "tests/kernels/test_attention_prefill_fp8.py::test_random_problems"
    done = subprocess.run(
        [sys.executable, "-m", "tests.sanitize", "--per-test", "1", function],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "ENGINE_REQUIRE_GPU": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 errors" in done.stdout or "2 passed" in done.stdout, done.stdout + done.stderr
