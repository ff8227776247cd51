"""Devices, and the array module (`numpy` or `cupy`) for each.

Only this module imports CuPy, and only when a CUDA device is requested, so `import engine` stays
fast and works without CuPy.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from engine.checks import shown
from engine.errors import DeviceError
from engine.plan_array import PlanArray

__all__ = [
    "CPU",
    "Device",
    "array_module",
    "cupy",
    "driver_version",
    "empty_like",
    "gpu_extra",
    "is_cupy_array",
    "resolve_device",
    "to_numpy",
]


@dataclass(frozen=True)
class Device:
    """A compute device: `kind` is "cpu" or "cuda", `index` the CUDA ordinal."""

    kind: str
    index: int = 0

    @property
    def is_cuda(self) -> bool:
        """Tell whether this is a CUDA device."""
        return self.kind == "cuda"

    @property
    def xp(self) -> Any:
        """Array module for this device: `numpy` or `cupy`."""
        return cupy() if self.is_cuda else np

    def activate(self) -> None:
        """Make this the calling thread's current CUDA device (no-op on the CPU)."""
        if self.is_cuda:
            cupy().cuda.Device(self.index).use()

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.is_cuda else "cpu"


CPU = Device("cpu")


def cupy() -> Any:
    """Return the `cupy` module.

    Raises
    ------
    DeviceError
        If CuPy is not installed; the message says what to install.
    """
    try:
        import cupy as cp
    except ImportError as error:
        raise DeviceError(
            "CUDA was asked for, but CuPy cannot be imported "
            f"({error}); install it with: pip install '{gpu_extra()}'"
        ) from error
    return cp


def is_cupy_array(x: Any) -> bool:
    """Tell whether `x` is a CuPy array or a `PlanArray`; does not import CuPy."""
    module = sys.modules.get("cupy")
    return module is not None and isinstance(x, (module.ndarray, PlanArray))


def array_module(*arrays: Any) -> Any:
    """Return `cupy` if any argument is a CuPy array, else `numpy`."""
    return sys.modules["cupy"] if any(is_cupy_array(a) for a in arrays) else np


def empty_like(x: Any, dtype: Any = None, shape: tuple[int, ...] | None = None) -> Any:
    """Return an uninitialised array like `x`; a `PlanArray` if `x` is one.

    `dtype` and `shape` override those of `x`.
    """
    new = array_module(x).empty(x.shape if shape is None else shape, dtype or x.dtype)
    return PlanArray(new) if isinstance(x, PlanArray) else new


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return `x` as a NumPy array; GPU arrays are copied to the host."""
    return x.get() if is_cupy_array(x) else np.asarray(x)


@cache
def driver_version() -> int | None:
    """Return the newest CUDA version the driver supports (13000 is 13.0); None without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def gpu_extra() -> str:
    """Return the extra to `pip install` for this machine's driver."""
    return f"rawengine[cuda{13 if (driver_version() or 0) >= 13000 else 12}]"


@cache
def _cuda_device_count() -> tuple[int, str]:
    """Return the number of usable devices, and the reason if there are none."""
    try:
        module = cupy()
    except DeviceError:
        if driver_version() is None:
            return 0, "there is no NVIDIA driver and no CuPy"
        return 0, f"CuPy is not installed; for this GPU: pip install '{gpu_extra()}'"
    try:
        count = int(module.cuda.runtime.getDeviceCount())
    except Exception as error:
        return 0, f"the CUDA driver does not answer ({error})"
    return count, "" if count else "no CUDA device is visible"


def resolve_device(device: str | Device = "auto") -> tuple[Device, str]:
    """Resolve a device name; return the device and the reason for the choice.

    Parameters
    ----------
    device : str or Device
        "cpu", "cuda", "cuda:<index>" or "auto" (CUDA if a device is present, else the CPU).

    Returns
    -------
    (Device, str)
        The device, and a one-line reason to show the user.

    Raises
    ------
    DeviceError
        If the name is unknown, or CUDA is requested but unavailable: "cuda" never falls back.

    Examples
    --------
    >>> resolve_device("cpu")
    (Device(kind='cpu', index=0), 'cpu was asked for')
    """
    if isinstance(device, Device):
        return device, f"{device} was asked for"
    if not isinstance(device, str):
        raise DeviceError(f"device must be a str or a Device; got {shown(device)}")
    if device == "cpu":
        return CPU, "cpu was asked for"
    kind, _, index = device.partition(":")
    if device != "auto" and (kind != "cuda" or (index and not index.isdecimal())):
        raise DeviceError(
            f"device must be 'cpu', 'cuda', 'cuda:<index>' or 'auto'; got {shown(device)}"
        )
    count, why_not = _cuda_device_count()
    if device == "auto":
        return (Device("cuda"), "a CUDA device is there") if count else (CPU, why_not)
    if int(index or 0) >= count:
        raise DeviceError(
            f"device {device!r} was asked for; {why_not or f'only {count} are there'}"
        )
    return Device("cuda", int(index or 0)), f"{device} was asked for"
