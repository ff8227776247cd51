"""Steps compile nothing: the kernels that requests need are there once the engine is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.device import resolve_device

KINDS = (
    *("sampling", "ahead", "scores", "penalties", "drafts", "preemption", "hybrid", "experts"),
    "adapters",
)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_kernel_is_compiled_in_a_step(kind):
    """In a process of its own: CuPy keeps what another test has compiled."""
    if not resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.first_use", kind],
        capture_output=True,
        text=True,
        env={**os.environ, "ENGINE_REQUIRE_GPU": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
