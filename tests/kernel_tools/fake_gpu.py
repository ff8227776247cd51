"""A stand-in for CuPy over NumPy, and for an op whose kernel is a Python function: the checks of
`device_run` are tested without a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np


class _Address:
    """A place in a buffer, as `buffer.data + 16` is in CuPy."""

    def __init__(self, buffer, offset=0):
        self.buffer = buffer
        self.offset = offset

    def __add__(self, step):
        return _Address(self.buffer, self.offset + step)


class _Buffer:
    def __init__(self, content):
        self.content = np.array(content)
        self.data = _Address(self.content)
        self.size = self.content.size

    def get(self):
        return self.content.copy()

    def set(self, content):
        self.content[...] = content


def _ndarray(shape, dtype, start, strides):
    return np.ndarray(shape, dtype, start.buffer, start.offset, strides)


class _Graph:
    def __init__(self, work):
        self._work = work

    def launch(self, stream):
        self._work()


class _Stream:
    def __init__(self, gpu):
        self._gpu = gpu

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def begin_capture(self):
        self._gpu.captured = []

    def end_capture(self):
        work = self._gpu.captured
        self._gpu.captured = None
        return _Graph(lambda: [step() for step in work])

    def synchronize(self):
        pass


class FakeGpu:
    """A module like `cupy`, with the few names that `device_run` needs."""

    uint8 = np.uint8
    asarray = staticmethod(_Buffer)
    empty = staticmethod(np.empty)
    full = staticmethod(np.full)
    ndarray = staticmethod(_ndarray)

    def __init__(self):
        self.captured: Any = None
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(synchronize=lambda: None),
            Stream=lambda non_blocking: _Stream(self),
        )
        self.shared = 0  # byte that shared memory holds

    def fill_shared(self, value):
        self.shared = value


class FakeOp:
    """An op whose kernel is ``kernel(gpu, **arrays)``; it may step outside by `beyond`."""

    name = "fake"

    def __init__(self, gpu, kernel, outputs=("out",)):
        self._gpu = gpu
        self._kernel = kernel
        self._outputs = outputs

    def problem(self, **_):
        return None

    def launches(self, _):
        return []

    def __call__(self, *, out=None, **arrays):
        arrays |= dict(zip(self._outputs, out or (), strict=False))

        def work():
            self._kernel(self._gpu, **arrays)

        if self._gpu.captured is None:
            work()
        else:
            self._gpu.captured.append(work)


def beyond(array, num_before, num_behind):
    """Return a flat view of a contiguous array with the elements before and behind it."""
    itemsize = array.itemsize
    base = array.base if array.base is not None else array
    start = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // itemsize
    whole = base.view(np.uint8)[: base.size // itemsize * itemsize].view(array.dtype)
    return whole[start - num_before : start + array.size + num_behind]


@contextmanager
def fake_gpu(monkeypatch):
    """Let `device_run` use a fake GPU."""
    from engine.kernels._tools import device_run

    gpu = FakeGpu()
    with monkeypatch.context() as patch:
        patch.setattr(device_run.device, "cupy", lambda: gpu)
        patch.setattr(device_run, "_fill_shared", gpu.fill_shared)
        yield gpu
