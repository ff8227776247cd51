"""Copies between host and device: pinned memory is not reused before the device is done with it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from engine import device
from engine.runner.transfer import DeviceToHostCopy, HostToDeviceCopy, PinnedArrays, _PinnedBuffers

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


@pytest.mark.gpu
def test_a_copy_dropped_unread_writes_to_no_later_one(cp):
    """A request may end before its drafts are read; their memory must not stage the next inputs."""
    target, _ = device.resolve_device("cuda")
    results = cp.full(1000, -1, np.int32)
    cp.cuda.Device().synchronize()
    cp.RawKernel(_SPIN, "spin")((1,), (1,), (np.int64(50_000_000),))  # the copies queue behind it
    DeviceToHostCopy(target, {"ids": results})
    sent = HostToDeviceCopy(target, {"a": np.full(1000, 7, np.int32)}).arrays["a"]
    np.testing.assert_array_equal(cp.asnumpy(sent), np.full(1000, 7))


@pytest.mark.gpu
def test_arrays_of_a_stream_of_their_own_arrive_intact(cp):
    """They are overwritten only after what reads them has run, also while the buffers grow."""
    target, _ = device.resolve_device("cuda")
    spin, arrays, read = cp.RawKernel(_SPIN, "spin"), PinnedArrays(target), []
    for i in range(12):
        scratch = cp.full((50 + 40 * i, 1000), -1, np.int32)
        spin((1,), (1,), (np.int64(3_000_000),))
        scratch += 1  # still to run when its memory is given back
        del scratch
        arrays.next((50 + 40 * min(i, 9), 1000), np.int32)[:] = i
        sent = arrays.send()
        spin((1,), (1,), (np.int64(3_000_000),))
        read.append(sent.copy())
    for i, array in enumerate(read):
        np.testing.assert_array_equal(cp.asnumpy(array), np.full(array.shape, i))


@pytest.mark.gpu
def test_the_copy_of_such_an_array_does_not_wait_for_the_current_stream(cp):
    target, _ = device.resolve_device("cuda")
    arrays = PinnedArrays(target)
    for _ in range(4):
        arrays.next((1000,), np.int32)[:] = 7
        arrays.send()
    cp.cuda.Device().synchronize()
    cp.RawKernel(_SPIN, "spin")((1,), (1,), (np.int64(1_000_000_000),))
    arrays.next((1000,), np.int32)[:] = 8
    arrays.send()
    arrays._stream.synchronize()
    assert not cp.cuda.get_current_stream().done
    cp.cuda.Device().synchronize()
