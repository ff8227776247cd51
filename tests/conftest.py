"""Suite-wide fixtures, and the test cases generated for NumPy and for a GPU."""

from __future__ import annotations

import itertools
import os
import sys

# Must precede the imports. The suite runs in parallel: BLAS threads spinning on busy cores cost far
# more than they gain, and JAX would reserve three quarters of a GPU that workers share.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from collections.abc import MutableMapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings

from engine import device

# Same examples in every run, so only the change under test can cause a failure. New examples come
# from `python -m tests.fuzz` and `--hypothesis-profile=default`.
settings.register_profile("fixed", derandomize=True, database=None)
settings.load_profile("fixed")


def spread_over_gpus(environ: MutableMapping[str, str], num_gpus: int) -> None:
    """Let each worker of pytest-xdist begin with another GPU; tests of several still see all."""
    worker = environ.get("PYTEST_XDIST_WORKER", "")
    gpus = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
    if not worker or len(gpus) < 2:
        return
    first = int(worker.removeprefix("gw")) % len(gpus)
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


# Before anything initialises CUDA.
spread_over_gpus(os.environ, len([*Path("/dev").glob("nvidia[0-9]*")]))


# Grid axes that select a kernel; they have no effect on NumPy.
_KERNEL_AXES = ("tier", "num_splits", "config")


class _Point(NamedTuple):
    """One point of an axis: parameter values, id and marks."""

    values: dict[str, Any]
    id: str
    marks: tuple[Any, ...] = ()


_NUMPY = _Point({"xp": "numpy"}, "numpy")
_CUPY = _Point({"xp": "cupy"}, "cupy", (pytest.mark.gpu,))


def pytest_generate_tests(metafunc):
    """Generate the cases for `xp`, `tier` and the `grid` marks.

    `@pytest.mark.grid` accepts the arguments of `parametrize`. On a GPU, the cases are the product
    of the axes. On NumPy an op is its mirror, and a full product would only compare the mirror with
    itself: each value of each axis appears in at least one case, and kernel-selecting axes have a
    single value. Without a GPU, one skipped case stands for all GPU cases.
    """
    marks = list(metafunc.definition.iter_markers("grid"))
    axes = [_axis(*mark.args, **mark.kwargs) for mark in marks]
    if "tier" in metafunc.fixturenames and not _is_parametrized(metafunc, "tier"):
        axes.append(_axis("tier", ("auto", "portable")))
    has_xp = "xp" in metafunc.fixturenames
    cases = [list(points) for points in itertools.product(*axes)] if axes else [[]]
    cases = cases if not marks or _has_gpu() else cases[:1]
    if has_xp:
        on_numpy = [[_NUMPY, *points] for points in _each_value_once(axes)]
        cases = on_numpy + [[_CUPY, *points] for points in cases]
    if has_xp or axes:
        names = [name for point in cases[0] for name in point.values]
        indirect = [name for name in ("xp", "tier") if name in names]
        metafunc.parametrize(names, [_merged(points) for points in cases], indirect=indirect)


def _is_parametrized(metafunc, name):
    """Tell whether a mark of the test sets `name`."""
    marks = [*metafunc.definition.iter_markers()]
    return any(name in mark.args[0] for mark in marks if mark.name in ("grid", "parametrize"))


def _axis(names, values, ids=None):
    """Return the points of one `grid` mark, given `parametrize` arguments."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    ids = ids if callable(ids) or ids is None else list(ids)
    points = []
    for index, value in enumerate(values):
        point = value if hasattr(value, "marks") else pytest.param(*_row(names, value))
        row = dict(zip(names, point.values, strict=True))
        if callable(ids):
            words = [str(ids(x)) for x in point.values]
        elif ids:
            words = [str(ids[index])]
        else:
            words = [_word(name, x, index) for name, x in row.items()]
        points.append(_Point(row, point.id or "-".join(words), tuple(point.marks)))
    return points


def _row(names, value):
    return value if len(names) > 1 else [value]


def _word(name, value, index):
    if value is None or isinstance(value, str | int | float):
        return str(value)
    return getattr(value, "__name__", f"{name}{index}")


def _each_value_once(axes):
    """Return the smallest set of cases that covers every point of every axis."""
    distinct = []
    for axis in axes:
        points = {}
        for point in axis:
            key = [repr(x) for name, x in point.values.items() if name not in _KERNEL_AXES]
            points.setdefault(tuple(key), point)
        distinct.append(list(points.values()))
    num_cases = max((len(axis) for axis in distinct), default=1)
    return [[axis[i % len(axis)] for axis in distinct] for i in range(num_cases)]


def _merged(points):
    values = [value for point in points for value in point.values.values()]
    marks = [mark for point in points for mark in point.marks]
    return pytest.param(*values, id="-".join(point.id for point in points), marks=marks)


@cache
def _has_gpu():
    return os.environ.get("ENGINE_REQUIRE_GPU") == "1" or device.resolve_device("auto")[0].is_cuda


@pytest.fixture(scope="module", autouse=True)
def cached_gpu_memory():
    """Give back, after each test file, what allocators keep of a GPU that workers share."""
    yield
    if not _has_gpu():
        return
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


@pytest.fixture
def xp(request):
    """Array module under test: NumPy or, on a GPU, CuPy."""
    return np if request.param == "numpy" else _cupy_or_skip()


@pytest.fixture
def tier(request, monkeypatch):
    """Kernel tier: the chip's own, or the portable one."""
    monkeypatch.setenv("ENGINE_KERNEL_TIER", request.param)
    return request.param


@pytest.fixture
def cp():
    """CuPy, for GPU-only tests (mark them `gpu`)."""
    return _cupy_or_skip()


@pytest.fixture
def hopper(cp):
    """CuPy, on a Hopper GPU."""
    from engine.kernels._module import current_architecture

    if current_architecture(cp.cuda.runtime.getDevice()) != "sm_90a":
        pytest.skip("not a Hopper GPU")
    return cp


def _cupy_or_skip():
    chosen, reason = device.resolve_device("auto")
    if not chosen.is_cuda:
        if os.environ.get("ENGINE_REQUIRE_GPU") == "1":
            pytest.fail(f"ENGINE_REQUIRE_GPU=1, but {reason}")
        pytest.skip(f"no GPU: {reason}")
    return device.cupy()


@pytest.fixture
def launched(monkeypatch):
    """Entry points of the kernels that the test launches, in order."""
    from engine.kernels._launch import Kernel

    entries, launch = [], Kernel.launch

    def noted(kernel, *args, **options):
        entries.append(kernel.entry)
        launch(kernel, *args, **options)

    monkeypatch.setattr(Kernel, "launch", noted)
    return entries


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that contains `engine/`, `cuda_src/` and `tests/`."""
    return Path(__file__).parents[1]
