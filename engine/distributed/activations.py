"""What a pipeline stage sends to the next one: the last layer's output and the residual stream.

The host sends bytes; on CUDA they go through pinned memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.device import Device
from engine.dtypes import np_dtype
from engine.runner.transfer import DeviceToHostCopy, HostToDeviceCopy

__all__ = ["from_wire", "to_wire"]


def to_wire(device: Device, delta: Any, residual: Any) -> list[Any]:
    """Return (delta, residual), (T, N) each or None, as bytes (T, n) on the host; waits for them.

    Examples
    --------
    >>> from engine.device import CPU
    >>> sent = to_wire(CPU, None, np.ones((2, 3), np.float32))
    >>> from_wire(CPU, "float32", sent)[1].shape
    (2, 3)
    """
    arrays = DeviceToHostCopy(device, {"delta": delta, "residual": residual}).wait()
    return [
        None if array is None else np.ascontiguousarray(array).view(np.uint8)
        for array in (arrays["delta"], arrays["residual"])
    ]


def from_wire(device: Device, dtype: str, arrays: list[Any]) -> tuple[Any, Any]:
    """Return what `to_wire` made bytes of, as new arrays of `dtype` on the device."""
    # Copied on the CPU, so that they are aligned as arrays that a layer has made.
    named = {
        name: array if device.is_cuda else np.array(array)
        for name, array in zip(("delta", "residual"), arrays, strict=True)
        if array is not None
    }
    there = HostToDeviceCopy(device, named).arrays
    kind = np_dtype(dtype)
    return tuple(  # type: ignore[return-value]
        there[name].view(kind) if name in there else None for name in ("delta", "residual")
    )
