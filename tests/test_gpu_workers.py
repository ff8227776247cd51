"""Workers of pytest-xdist share the GPUs of a machine."""

from __future__ import annotations

import pytest

from tests.conftest import spread_over_gpus


@pytest.mark.parametrize(
    ("worker", "given", "count", "wanted"),
    [
        ("gw0", None, 4, "0,1,2,3"),
        ("gw5", None, 4, "1,2,3,0"),
        ("gw3", "7,GPU-8b0a", 4, "GPU-8b0a,7"),
        ("gw3", "5", 4, "5"),
        ("gw3", "", 4, ""),  # no GPUs
        ("gw1", None, 1, None),
        ("gw1", None, 0, None),
        (None, None, 4, None),  # one process
        (None, "1,0", 2, "1,0"),
    ],
)
def test_each_worker_begins_with_another_gpu(worker, given, count, wanted):
    names = {"PYTEST_XDIST_WORKER": worker, "CUDA_VISIBLE_DEVICES": given}
    environ = {name: value for name, value in names.items() if value is not None}
    spread_over_gpus(environ, count)
    assert environ.get("CUDA_VISIBLE_DEVICES") == wanted
