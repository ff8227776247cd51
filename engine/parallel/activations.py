"""What a pipeline stage sends to the next one: the last layer's output and the residual stream.

The host sends bytes; on CUDA they go through pinned memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.device import Device
from engine.distributed.connection import Connection
from engine.distributed.peer import ACTIVATIONS
from engine.dtypes import np_dtype
from engine.runner.transfer import DeviceToHostCopy, HostToDeviceCopy

__all__ = ["ActivationSender", "from_wire", "to_wire"]


class ActivationSender:
    """Sends activations from a thread, so that the next step is launched meanwhile.

    Parameters
    ----------
    connection : Connection
        To the next stage.
    device : Device
    check : callable
        Called when a step is on the host, before it is sent: raises if it is not to be sent.

    Attributes
    ----------
    error : Exception or None
        Why nothing is sent any more.
    """

    def __init__(self, connection: Connection, device: Device, check: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        self._connection = connection
        self._device = device
        self._check = check
        self._steps: queue.SimpleQueue[tuple[int, DeviceToHostCopy] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, step: int, delta: Any, residual: Any) -> None:
        """Send the activations of a step, (T, N) each or None, which must not change any more.

        On CUDA, later work on the current stream may change them.
        """
        # As integers, which every device and host can copy.
        arrays = {"delta": delta, "residual": residual}
        bits = {n: None if a is None else a.view(f"u{a.itemsize}") for n, a in arrays.items()}
        copy = DeviceToHostCopy(self._device, bits)
        self._steps.put((step, copy))

    def close(self) -> None:
        """Send nothing more."""
        self._steps.put(None)
        self._connection.close()

    def _run(self) -> None:
        self._device.activate()
        try:
            while (item := self._steps.get()) is not None:
                step, copy = item
                sent = to_wire(copy)
                self._check()
                self._connection.send(ACTIVATIONS, [step], sent)
        except Exception as error:
            self.error = error


def to_wire(copy: DeviceToHostCopy) -> list[Any]:
    """Return delta and residual as bytes (T, n) on the host, or None; waits for them.

    Examples
    --------
    >>> from engine.device import CPU
    >>> arrays = {"delta": None, "residual": np.ones((2, 3), np.float32)}
    >>> sent = to_wire(DeviceToHostCopy(CPU, arrays))
    >>> from_wire(CPU, "float32", sent)[1].shape
    (2, 3)
    """
    arrays = copy.wait()
    return [
        None if array is None else np.ascontiguousarray(array).view(np.uint8)
        for array in (arrays["delta"], arrays["residual"])
    ]


def from_wire(device: Device, dtype: str, arrays: list[Any]) -> tuple[Any, Any]:
    """Return what `to_wire` made bytes of, as new arrays of `dtype` on the device."""
    # The bytes of a message may lie at any address; a copy is aligned. For CUDA they are copied
    # anyway.
    named = {
        name: array if device.is_cuda else np.array(array)
        for name, array in zip(("delta", "residual"), arrays, strict=True)
        if array is not None
    }
    there = HostToDeviceCopy(device, named).arrays
    kind = np_dtype(dtype)
    delta, residual = (
        None if array is None else there[name].reshape(-1).view(kind).reshape(len(array), -1)
        for name, array in zip(("delta", "residual"), arrays, strict=True)
    )
    return delta, residual
