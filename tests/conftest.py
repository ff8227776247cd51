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


# They choose among kernels: the mirrors have no tiers, and do not split keys.
_KERNEL_ONLY = ("tier", "num_splits")


def pytest_collection_modifyitems(config, items):
    """Leave out tests on NumPy that differ from an earlier one only in what kernels do."""
    seen, repeated = set(), []
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or call.params.get("xp") != "numpy":
            continue
        others = sorted((n, id(v)) for n, v in call.params.items() if n not in _KERNEL_ONLY)
        key = item.nodeid.partition("[")[0], *others
        if key in seen:
            repeated.append(item)
        seen.add(key)
    config.hook.pytest_deselected(items=repeated)
    left_out = set(repeated)
    items[:] = [item for item in items if item not in left_out]


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
