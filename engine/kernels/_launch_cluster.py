"""Launches in clusters, and ones that overlap the end of the kernel before.

CuPy cannot say either, hence the driver's cuLaunchKernelEx; in a captured graph both are kept.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from engine import device
from engine.errors import DeviceError

__all__ = ["launch_cluster"]

_CLUSTER_DIMENSION = 4  # of CUlaunchAttributeID
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _driver_launch() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


def launch_cluster(
    function: int,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    shared_bytes: int,
    values: tuple[Any, ...],
    *,
    cluster: int = 1,
    overlap: bool = False,
) -> None:
    """Launch the driver's `function` on the current stream.

    Parameters
    ----------
    function : int
        A CUfunction.
    values : tuple
        NumPy scalars, CuPy arrays (passed as pointers), NumPy arrays (by value).
    cluster : int
        Blocks of a cluster, along the grid's first axis.
    overlap : bool
        Let the kernel start before the one in front has ended (programmatic dependent launch). It
        must wait for that one itself, before it touches what either of them writes.

    Raises
    ------
    DeviceError
        If the driver refuses.
    """
    hosts = [_host_value(value) for value in values]
    addresses = (ctypes.c_void_p * len(hosts))(*(host.ctypes.data for host in hosts))
    attributes = (_Attribute * 2)()
    count = 0
    if cluster > 1:
        attributes[count] = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        count += 1
    if overlap:
        attributes[count] = _Attribute(
            _PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint * 16)(1)
        )
        count += 1
    stream = device.cupy().cuda.get_current_stream().ptr
    config = _Config(
        (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
        (ctypes.c_uint * 3)(*block, *(1,) * (3 - len(block))),
        shared_bytes,
        stream,
        ctypes.addressof(attributes),
        count,
    )
    status = _driver_launch()(ctypes.byref(config), ctypes.c_void_p(function), addresses, None)
    if status:
        raise DeviceError(
            f"cuLaunchKernelEx: error {status}; grid {grid}, block {block}, "
            f"{shared_bytes} bytes of shared memory, clusters of {cluster}"
        )


def _host_value(value: Any) -> Any:
    """Return a NumPy array that holds the argument's bytes."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    return np.asarray(np.uint64(value.data.ptr))
