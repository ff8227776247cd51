"""A kernel that waits for a rank ends when the host says so."""

from __future__ import annotations

import threading
import time

import pytest

from engine import device, kernels
from engine.kernels._peer_memory import connected_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy():
    chosen, reason = device.resolve_device("auto")
    if not chosen.is_cuda:
        pytest.skip(f"no GPU: {reason}")
    return chosen.xp


def test_abort_ends_a_call_that_waits_and_those_after_it(cupy):
    ours, _ = connected_ranks([0, 0], capacity=1 << 20, timeout=20.0, max_blocks=4)
    kernels.all_reduce(
        cupy.ones(8, cupy.float32), connected_ranks([0], capacity=64, timeout=1.0)[0]
    )
    cupy.cuda.get_current_stream().synchronize()  # compiled
    timer = threading.Timer(0.5, ours.abort)
    timer.start()
    start = time.monotonic()
    first = kernels.all_reduce(cupy.ones(4096, cupy.float32), ours)
    second = kernels.all_reduce(cupy.ones(4096, cupy.float32), ours)
    cupy.cuda.get_current_stream().synchronize()
    assert 0.3 < time.monotonic() - start < 5
    timer.join()
    assert bool(cupy.isnan(first).all()) and bool(cupy.isnan(second).all())
    assert ours.missing() is None
