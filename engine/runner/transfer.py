"""Host-to-device copies of a step's arrays, and device-to-host copies of its results.

On CUDA both go through pinned memory and are asynchronous; on the CPU nothing is copied.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.device import CPU, Device
from engine.errors import StepTimeoutError

__all__ = ["DeviceToHostCopy", "HostToDeviceCopy", "PinnedArrays"]

_ALIGNMENT = 16  # bytes; alignment of every array in a copy
_POLL_SECONDS = 0.0002
_NUM_TURNS = 3  # buffers in rotation; one more than steps in flight without pipeline stages


class _PinnedBuffers:
    """Pinned buffers the device may still be reading or writing.

    Unreferenced pinned memory returns to a pool, from which the next copy could take it too early:
    the host never waits for a step that samples nothing, and drops some results unread.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    def hold(self, buffer: Any, done: Any) -> None:
        """Keep `buffer` until the event `done` completes; drop buffers whose event has."""
        with self._lock:
            while self._in_flight and self._in_flight[0][0].done:
                self._in_flight.popleft()
            self._in_flight.append((done, buffer))

    def __len__(self) -> int:
        return len(self._in_flight)


_pinned_buffers = _PinnedBuffers()


class HostToDeviceCopy:
    """Copies NumPy arrays to the device in a single transfer.

    Parameters
    ----------
    device : Device
    arrays : mapping of str to array
        C-contiguous; arrays already on the device are passed through.

    Attributes
    ----------
    arrays : dict of str to array
        Device copies; on the CPU, the given arrays.
    """

    def __init__(self, device: Device, arrays: Mapping[str, Any]) -> None:
        self.arrays = dict(arrays)
        if device.is_cuda:
            self._send(device)

    def _send(self, device: Device) -> None:
        cp = device.xp
        host = {n: a for n, a in self.arrays.items() if isinstance(a, np.ndarray) and a.size}
        empty = {n: a for n, a in self.arrays.items() if isinstance(a, np.ndarray) and not a.size}
        self.arrays |= {name: cp.empty(array.shape, array.dtype) for name, array in empty.items()}
        offsets = []
        size = 0
        for array in host.values():
            offsets.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        pinned_memory = cp.cuda.alloc_pinned_memory(max(size, 1))
        pinned = np.frombuffer(pinned_memory, np.uint8, max(size, 1))
        for offset, array in zip(offsets, host.values(), strict=True):
            part = pinned[offset : offset + array.nbytes]
            part.view(array.dtype).reshape(array.shape)[...] = array
        memory = cp.empty(pinned.shape, np.uint8)
        stream = cp.cuda.get_current_stream()
        memory.set(pinned, stream=stream)
        done = cp.cuda.Event(disable_timing=True)
        done.record(stream)
        _pinned_buffers.hold(pinned_memory, done)
        for offset, (name, array) in zip(offsets, host.items(), strict=True):
            part = memory[offset : offset + array.nbytes]
            self.arrays[name] = part.view(array.dtype).reshape(array.shape)


class PinnedArrays:
    """A large array the host writes in every step, copied while the device computes.

    The copy runs on its own stream: on the current one it would wait for the model, which was
    launched earlier. Buffers rotate and grow to the largest array requested. On the CPU there is no
    copy; each step uses a new array.

    Examples
    --------
    >>> from engine.device import CPU
    >>> arrays = PinnedArrays(CPU)
    >>> arrays.next((1, 2), np.int32)[:] = [[5, 6]]
    >>> arrays.send()
    array([[5, 6]], dtype=int32)
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = None
        self._buffers: list[_Buffer] = []  # next one first
        self._array: Any = None

    def next(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised array to write to, once the buffer's last use has ended."""
        if not self._device.is_cuda:
            self._array = np.empty(shape, dtype)
            return self._array
        cuda = self._device.xp.cuda
        if self._stream is None:
            self._stream = cuda.Stream(non_blocking=True)
            self._buffers = [_Buffer(cuda) for _ in range(_NUM_TURNS)]
        current = cuda.get_current_stream()
        buffer = self._buffers[0]
        last = self._buffers[-1]
        last.is_free.record(current)  # its readers have all been launched by now
        buffer.is_free.synchronize()
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if buffer.host.nbytes < num_bytes:
            buffer.grow(self._device.xp, 2 * num_bytes)
            # SAFETY: earlier kernels on this stream may still use the memory just allocated.
            buffer.is_sent.record(current)
            self._stream.wait_event(buffer.is_sent)
        self._array = buffer.host[:num_bytes].view(dtype).reshape(shape)
        return self._array

    def send(self) -> Any:
        """Start copying the array that `next` returned; return the device copy.

        Launch its readers on the current stream, before calling `next` again.
        """
        if not self._device.is_cuda:
            return self._array
        buffer = self._buffers[0]
        array = self._array
        device = buffer.device[: array.nbytes].view(array.dtype).reshape(array.shape)
        device.set(array, stream=self._stream)
        buffer.is_sent.record(self._stream)
        self._device.xp.cuda.get_current_stream().wait_event(buffer.is_sent)
        self._buffers.append(self._buffers.pop(0))
        return device


class _Buffer:
    """Pinned and device memory of equal size, with the events that guard their reuse."""

    def __init__(self, cuda: Any) -> None:
        self.host: Any = np.empty(0, np.uint8)
        self.device: Any = None
        self.is_free = cuda.Event(disable_timing=True)
        self.is_sent = cuda.Event(disable_timing=True)

    def grow(self, cp: Any, num_bytes: int) -> None:
        self.host = np.frombuffer(cp.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)
        self.device = cp.empty(num_bytes, np.uint8)


class DeviceToHostCopy:
    """Copies results to the host.

    Parameters
    ----------
    device : Device
    arrays : mapping of str to (array or None)
        Device arrays.

    Examples
    --------
    >>> from engine.device import CPU
    >>> DeviceToHostCopy(CPU, {"token_ids": np.array([7]), "logprobs": None}).wait()
    {'token_ids': array([7]), 'logprobs': None}
    """

    def __init__(self, device: Device, arrays: Mapping[str, Any]) -> None:
        self._arrays = dict(arrays)
        self._done: Any = None
        if device.is_cuda:
            self._receive(device)

    @classmethod
    def of(cls, done: Any, arrays: Mapping[str, Any]) -> DeviceToHostCopy:
        """Return a copy into these host arrays that completes with the event `done`."""
        copy = cls(CPU, arrays)
        copy._done = done
        return copy

    def _receive(self, device: Device) -> None:
        cp = device.xp
        stream = cp.cuda.get_current_stream()
        pinned = []
        # SAFETY: the device arrays may be reused only by later work on the same stream.
        for name, array in self._arrays.items():
            if array is None:
                continue
            memory = cp.cuda.alloc_pinned_memory(max(array.nbytes, 1))
            pinned.append(memory)
            host = np.frombuffer(memory, np.uint8, array.nbytes).view(array.dtype)
            host = host.reshape(array.shape)
            array.get(stream=stream, out=host, blocking=False)
            self._arrays[name] = host
        self._done = cp.cuda.Event(disable_timing=True)
        self._done.record(stream)
        _pinned_buffers.hold(pinned, self._done)

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the copies, and return the host arrays.

        Raises
        ------
        StepTimeoutError
            If they take more than `timeout` seconds.
        """
        if self._done is None:
            return self._arrays
        if timeout is None:
            self._done.synchronize()
            return self._arrays
        deadline = time.monotonic() + timeout
        while not self._done.done:
            if time.monotonic() > deadline:
                raise StepTimeoutError(f"the device did not finish a step within {timeout} s")
            time.sleep(_POLL_SECONDS)
        return self._arrays
