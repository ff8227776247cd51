"""Repeatable launches through the driver, with clusters and programmatic dependent launch.

CuPy offers none of this, so launches call the driver's cuLaunchKernelEx. Graph capture keeps both
attributes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from engine import device
from engine.errors import DeviceError
from engine.kernels._params import ParamStruct

__all__ = ["PreparedLaunch", "max_active_clusters"]

_INVALID_CONTEXT = 201  # CUresult
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID, as below
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
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _driver_launch() -> Any:
    return _driver().cuLaunchKernelEx


def max_active_clusters(function: int, num_threads: int, shared_bytes: int, cluster: int) -> int:
    """Return how many clusters of `cluster` blocks the device holds at once; 0 if none.

    `function` is a CUfunction.
    """
    attributes, count = _attributes(cluster, pdl=False)
    config = _Config(
        (ctypes.c_uint * 3)(cluster, 1, 1),
        (ctypes.c_uint * 3)(num_threads, 1, 1),
        shared_bytes,
        None,
        ctypes.addressof(attributes),
        count,
    )
    found = ctypes.c_int()
    query = _driver().cuOccupancyMaxActiveClusters
    status = query(ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config))
    return 0 if status else found.value


class PreparedLaunch:
    """A repeatable launch on the stream that is current on construction.

    Parameters
    ----------
    function : int
        A CUfunction.
    values : tuple
        NumPy scalars and arrays (passed by value), CuPy arrays (passed as pointers).
    struct : ParamStruct, optional
        Pass the values as the fields of this struct.
    cluster : int
        Blocks per cluster, along the grid's first axis.
    pdl : bool
        Programmatic dependent launch: the kernel may start before the preceding one has ended, and
        must wait for it before it accesses memory that either of them writes.
    """

    __slots__ = ("_addresses", "_attributes", "_call", "_config", "_hosts", "_memory", "_struct")

    def __init__(
        self,
        function: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        values: tuple[Any, ...],
        *,
        struct: ParamStruct | None = None,
        cluster: int = 1,
        pdl: bool = False,
    ) -> None:
        self._struct = struct
        self._hosts: list[Any] = []
        if struct is not None:
            self._memory = struct.pack(values)
            whole = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
            self._addresses = (ctypes.c_void_p * 1)(ctypes.addressof(whole))
        else:
            self._hosts = [_host_value(value) for value in values]
            addresses = [host.ctypes.data for host in self._hosts]
            self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self._attributes, count = _attributes(cluster, pdl)
        self._config = _Config(
            (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
            (ctypes.c_uint * 3)(*block, *(1,) * (3 - len(block))),
            shared_bytes,
            device.cupy().cuda.get_current_stream().ptr,
            ctypes.addressof(self._attributes),
            count,
        )
        self._call = (
            ctypes.byref(self._config),
            ctypes.c_void_p(function),
            self._addresses,
            None,
        )

    def launch(self) -> None:
        """Launch.

        Raises
        ------
        DeviceError
            If the driver rejects the launch.
        """
        status = _driver_launch()(*self._call)
        if status == _INVALID_CONTEXT:
            # This thread has made no CUDA call yet, such as one of torch's autograd engine.
            runtime = device.cupy().cuda.runtime
            runtime.setDevice(runtime.getDevice())
            status = _driver_launch()(*self._call)
        if status:
            config = self._config
            raise DeviceError(
                f"cuLaunchKernelEx: error {status}; grid {tuple(config.grid)}, block "
                f"{tuple(config.block)}, {config.shared_bytes} bytes of shared memory, "
                f"{config.num_attributes} attributes"
            )

    def use_stream(self, stream: int) -> None:
        """Make later launches on `stream`, a CUstream of the function's device."""
        self._config.stream = stream

    def host(self, index: int) -> Any:
        """Return the NumPy array of argument `index`; later launches pass its current content."""
        if self._struct is not None:
            return self._struct.field(self._memory, index)
        return self._hosts[index]

    def set_value(self, index: int, host: Any) -> None:
        """Pass the NumPy array `host` by value as argument `index` of later launches."""
        if self._struct is not None:
            self.host(index)[()] = host.reshape(())
            return
        self._hosts[index] = host
        self._addresses[index] = host.ctypes.data


def _attributes(cluster: int, pdl: bool) -> tuple[Any, int]:
    """Return the launch attributes and their number."""
    attributes = (_Attribute * 2)()
    count = 0
    if cluster > 1:
        attributes[count] = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        count += 1
    if pdl:
        attributes[count] = _Attribute(
            _PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint * 16)(1)
        )
        count += 1
    return attributes, count


def _host_value(value: Any) -> Any:
    """Return a NumPy array with the argument's bytes."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    return np.asarray(np.uint64(value.data.ptr))
