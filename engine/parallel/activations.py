"""Activations between pipeline stages: the last layer's output and the residual stream, as bytes.

With a draft head, the inputs of the layers that it reads follow ("features").

On CUDA they are copied through pinned host memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.device import Device
from engine.distributed.connection import Connection
from engine.dtypes import np_dtype
from engine.runner.transfer import DeviceToHostCopy, HostToDeviceCopy

__all__ = ["ACTIVATIONS", "ActivationSender", "from_wire", "to_wire"]

ACTIVATIONS = 2
"""Kind of message: from a stage to the next one."""


class ActivationSender:
    """Sends activations in a background thread, so that the next step can be launched.

    Parameters
    ----------
    connection : Connection
        Connection to the next stage.
    device : Device
    check : callable
        Called once a step's activations are on the host. It raises if they must not be sent.

    Attributes
    ----------
    error : Exception or None
        The error that ended the thread.
    """

    def __init__(self, connection: Connection, device: Device, check: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        self._connection = connection
        self._device = device
        self._check = check
        self._steps: queue.SimpleQueue[tuple[int, DeviceToHostCopy] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, step: int, *activations: Any) -> None:
        """Send the delta, the residual stream and the features of a step, (T, N) each or None.

        On the CPU the arrays must not change afterwards. On CUDA, later work on the current stream
        may overwrite them.
        """
        # Viewed as integers: every device and host can copy these.
        bits = [None if a is None else a.view(f"u{a.itemsize}") for a in activations]
        copy = DeviceToHostCopy(self._device, {str(i): array for i, array in enumerate(bits)})
        self._steps.put((step, copy))

    def close(self) -> None:
        """End the thread and the connection."""
        self._steps.put(None)
        self._connection.close()

    def _run(self) -> None:
        try:
            self._device.activate()
            while (item := self._steps.get()) is not None:
                step, copy = item
                sent = to_wire(copy)
                self._check()
                self._connection.send(ACTIVATIONS, [step], sent)
        except Exception as error:
            self.error = error


def to_wire(copy: DeviceToHostCopy) -> list[Any]:
    """Wait for activations, and return them as bytes (T, n) on the host, or None.

    Examples
    --------
    >>> from engine.device import CPU
    >>> arrays = {"delta": None, "residual": np.ones((2, 3), np.float32)}
    >>> sent = to_wire(DeviceToHostCopy(CPU, arrays))
    >>> from_wire(CPU, "float32", sent)[1].shape
    (2, 3)
    """
    return [
        None if array is None else np.ascontiguousarray(array).view(np.uint8)
        for array in copy.wait().values()
    ]


def from_wire(device: Device, dtype: str, arrays: list[Any]) -> list[Any]:
    """Return activations, new arrays of `dtype` on the device or None, from their bytes."""
    # The bytes of a message may be unaligned; a copy is aligned. For CUDA they are copied anyway.
    named = {
        str(i): array if device.is_cuda else np.array(array)
        for i, array in enumerate(arrays)
        if array is not None
    }
    there = HostToDeviceCopy(device, named).arrays
    kind = np_dtype(dtype)
    return [
        None if array is None else there[str(i)].reshape(-1).view(kind).reshape(len(array), -1)
        for i, array in enumerate(arrays)
    ]
