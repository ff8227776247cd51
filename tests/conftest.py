"""Fixtures of the whole suite: array modules, a private cache, the real model's weights."""

from __future__ import annotations

import os

# Before NumPy is imported: the suite runs in parallel, and BLAS threads that spin on busy cores
# cost far more than they gain.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from engine import device

# The same examples in every run, so that a change is judged by what it changed. New ones come from
# `python -m tests.fuzz` and from `--hypothesis-profile=default`.
settings.register_profile("fixed", derandomize=True, database=None)
settings.load_profile("fixed")


@pytest.fixture(
    params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)],
)
def xp(request):
    """The array modules that a test body runs on: NumPy, and CuPy if there is a GPU."""
    if request.param == "numpy":
        return np
    return _cupy_or_skip()


@pytest.fixture
def cp():
    """CuPy, for tests that only make sense on a GPU (mark them `gpu`)."""
    return _cupy_or_skip()


def _cupy_or_skip():
    chosen, reason = device.resolve_device("auto")
    if not chosen.is_cuda:
        if os.environ.get("ENGINE_REQUIRE_GPU") == "1":
            pytest.fail(f"ENGINE_REQUIRE_GPU=1, but {reason}")
        pytest.skip(f"no GPU: {reason}")
    return device.cupy()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that contains `engine/`, `cuda_src/` and `tests/`."""
    return Path(__file__).parents[1]
