"""Host-to-device copies: pinned memory is not reused before the device has read it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from engine import device
from engine.runner.transfer import HostToDeviceCopy, _PinnedBuffers

_SPIN = r"""
extern "C" __global__ void spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {}
}
"""


class _Buffer:
    pass


def test_a_buffer_is_held_until_its_event_has_completed():
    pinned, events = _PinnedBuffers(), [SimpleNamespace(done=False) for _ in range(3)]
    buffers = [_Buffer() for _ in events]
    alive = [weakref.ref(buffer) for buffer in buffers]
    for buffer, event in zip(buffers, events, strict=True):
        pinned.hold(buffer, event)
    del buffer, buffers
    assert all(ref() is not None for ref in alive)
    events[0].done = True
    pinned.hold(None, SimpleNamespace(done=True))
    assert [ref() is None for ref in alive] == [True, False, False]
    events[1].done = events[2].done = True
    pinned.hold(None, SimpleNamespace(done=True))
    assert all(ref() is None for ref in alive)
    assert len(pinned) == 1, "completed ones are dropped when the next one is held"


@pytest.mark.gpu
def test_an_unreferenced_copy_arrives_intact(cp):
    target, _ = device.resolve_device("cuda")
    cp.RawKernel(_SPIN, "spin")((1,), (1,), (np.int64(50_000_000),))  # the copies queue behind it
    sent = [
        HostToDeviceCopy(target, {"a": np.full(1000, i, np.int32)}).arrays["a"] for i in range(8)
    ]
    for i, array in enumerate(sent):
        np.testing.assert_array_equal(cp.asnumpy(array), np.full(1000, i))
