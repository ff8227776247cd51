"""`HostCopies`: copies of a device's arrays in host memory, made at the rate of the link."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from engine import threads
from engine.cache.pinned_memory import check_host_memory, pinned_array, room, views
from engine.device import Device
from engine.errors import OutOfMemoryError

__all__ = ["HostCopies"]

Array = np.ndarray[Any, Any]

_GROUP_BYTES = 256 << 20  # bytes of host memory that a thread locks at once
_MAX_WORKERS = 8


class HostCopies:
    """Makes copies of a device's arrays on the host, and arrays of these copies.

    On CUDA they are in page-locked memory. Arrays are copied in groups, each to memory of its own:
    while one is copied, other threads map and lock the memory of the next ones. The memory is kept
    for the next copies of arrays of the same sizes. On the CPU nothing is kept.

    Parameters
    ----------
    device : Device
        Device of the arrays.

    Examples
    --------
    >>> from engine.device import CPU
    >>> copies = HostCopies(CPU).take([np.arange(3)])
    >>> HostCopies(CPU).restore(copies)
    [array([0, 1, 2])]
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[Array] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that are kept."""
        return sum(len(buffer) for buffer in self._buffers)

    def take(self, arrays: Sequence[Any]) -> list[Array]:
        """Return copies of arrays in host memory, C-contiguous and valid until the next call.

        Raises
        ------
        OutOfMemoryError
            If the host has no room.
        """
        if not self._device.is_cuda:
            return [array.copy() for array in arrays]
        groups = _grouped(arrays)
        sizes = list(map(room, groups))
        if [len(buffer) for buffer in self._buffers] != sizes:
            self._buffers = []
            check_host_memory(
                sum(sizes), "copies of the weights", "sleep at level 2, which keeps none"
            )
        self._device.activate()
        # SAFETY: the copies run on streams of their own; any stream may still write the arrays.
        self._device.xp.cuda.runtime.deviceSynchronize()
        with ThreadPoolExecutor(min(_MAX_WORKERS, threads.available().count)) as pool:
            kept: list[Array | None] = [*self._buffers] or [None] * len(groups)
            # The largest first, so that none of them is left alone at the end.
            order = sorted(range(len(groups)), key=sizes.__getitem__, reverse=True)
            futures = {i: pool.submit(self._copied, groups[i], sizes[i], kept[i]) for i in order}
        self._buffers = [futures[i].result() for i in range(len(groups))]
        found = zip(self._buffers, groups, strict=True)
        return [view for buffer, group in found for view in views(buffer, group)]

    def restore(self, copies: Sequence[Array]) -> list[Any]:
        """Return new arrays on the device with the values of copies.

        On CUDA they are written in the order of the current stream; until `wait`, the copies must
        not change.

        Raises
        ------
        OutOfMemoryError
            If the device has no room.
        """
        if not self._device.is_cuda:
            return [copy.copy() for copy in copies]
        self._device.activate()
        cp = self._device.xp
        arrays = []
        for copy in copies:
            try:
                array = cp.empty(copy.shape, copy.dtype)
            except cp.cuda.memory.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"the weights do not fit on {self._device}: {error}"
                ) from error
            _copy(
                cp,
                array.data.ptr,
                copy.ctypes.data,
                copy.nbytes,
                cp.cuda.runtime.memcpyHostToDevice,
            )
            arrays.append(array)
        return arrays

    def wait(self) -> None:
        """Wait until the arrays that `restore` has returned are written."""
        if self._device.is_cuda:
            self._device.activate()
            self._device.xp.cuda.get_current_stream().synchronize()

    def free(self) -> None:
        """Give the memory back to the host, once no copies are in use."""
        self._buffers = []

    def _copied(self, group: Sequence[Any], size: int, buffer: Array | None) -> Array:
        """Copy a group to `buffer`, or to new memory; return it."""
        self._device.activate()
        cp = self._device.xp
        if buffer is None:
            buffer = pinned_array(size, cp)
        with cp.cuda.Stream(non_blocking=True) as stream:
            sources = [cp.ascontiguousarray(array) for array in group]
            for source, view in zip(sources, views(buffer, group), strict=True):
                _copy(
                    cp,
                    view.ctypes.data,
                    source.data.ptr,
                    source.nbytes,
                    cp.cuda.runtime.memcpyDeviceToHost,
                )
            stream.synchronize()  # SAFETY: `sources` may hold arrays made here
        return buffer


def _copy(cp: Any, target: int, source: int, num_bytes: int, kind: int) -> None:
    """Start a copy on the current stream."""
    if num_bytes:
        stream = cp.cuda.get_current_stream().ptr
        cp.cuda.runtime.memcpyAsync(target, source, num_bytes, kind, stream)


def _grouped(arrays: Sequence[Any]) -> list[list[Any]]:
    """Cut a sequence into groups of `_GROUP_BYTES` or more; the last one may have less."""
    groups: list[list[Any]] = []
    num_bytes = _GROUP_BYTES
    for array in arrays:
        if num_bytes >= _GROUP_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1].append(array)
        num_bytes += room([array])
    return groups
