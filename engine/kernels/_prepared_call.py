"""Prepared calls: the launches of ops on arrays of known layouts, repeated on raw addresses.

Checking an op's arguments and preparing its launches takes Python far longer than repeating the
launches. A framework that owns its memory and streams therefore prepares a call once per layout of
the arguments:

    call = prepare(lambda x, w: kernels.rmsnorm(x, w, eps=1e-6), [layout_of_x, layout_of_w])
    call.run([x_address, w_address, y_address, scratch_address, counters_address], stream)

The ops run on stand-ins: arrays at made-up addresses, a region of the address space for each array
(arrays of a real call may overlap, such as q, k and v in one row). Launches are recorded, not made.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from engine import device
from engine.errors import LaunchPlanError
from engine.kernels._launch_plan import HostCall, KernelLaunch, LaunchPlan, making_plan
from engine.kernels._workspace import lending
from engine.plan_array import NotContiguousError, PlanArray, unwrapped

__all__ = ["ALIGNMENT", "ArrayLayout", "PreparedCall", "constant", "prepare"]

ALIGNMENT = 16
"""Bytes: kernels distinguish addresses by their remainder modulo this number only."""

_REGION = 1 << 40  # bytes between stand-ins
_SCRATCH_ALIGNMENT = 256  # bytes
_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class ArrayLayout(NamedTuple):
    """Layout of an argument or a result of a prepared call.

    Attributes
    ----------
    shape : tuple of int
    strides : tuple of int
        In bytes.
    dtype : np.dtype
    offset : int
        The address modulo ALIGNMENT.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayLayout:
        """Return the layout of a C-contiguous array.

        Examples
        --------
        >>> ArrayLayout.contiguous((2, 3), np.dtype(np.float16)).strides
        (6, 2)
        """
        strides = []
        step = dtype.itemsize
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(tuple(shape), tuple(reversed(strides)), dtype)


class PreparedCall:
    """The launches of one call, for arrays of known layouts.

    SAFETY: `run` writes the addresses into the launches, so a call must not be shared by threads.

    Attributes
    ----------
    copied : tuple of int
        Indices of the arguments that the caller must copy to C order: it passes the copy's address.
    results : tuple of ArrayLayout
        Layouts of the results: C-contiguous arrays that the caller allocates.
    scratch_bytes : int
        Scratch memory that `run` needs, aligned to 256 bytes; other calls may use it afterwards.
    num_counters : int
        int32 counters that `run` needs: 0 before the call, and 0 again after it.
    """

    __slots__ = (
        *("_offsets", "_plan", "_stream"),
        *("copied", "num_counters", "results", "scratch_bytes"),
    )

    def __init__(
        self,
        plan: LaunchPlan,
        copied: tuple[int, ...],
        results: tuple[ArrayLayout, ...],
        scratch: Sequence[int],
        num_counters: int,
    ) -> None:
        self._plan = plan
        self._stream = -1
        self._offsets = []
        self.copied = copied
        self.results = results
        self.scratch_bytes = 0
        self.num_counters = num_counters
        for size in scratch:
            self._offsets.append(self.scratch_bytes)
            self.scratch_bytes += -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT

    def run(self, addresses: list[int], stream: int, scratch: int = 0, counters: int = 0) -> None:
        """Launch on `stream`.

        Parameters
        ----------
        addresses : list of int
            Addresses of the arguments, then of the results.
        stream : int
            A CUstream of the current device.
        scratch, counters : int
            Addresses; see `scratch_bytes` and `num_counters`.
        """
        if stream != self._stream:
            for entry in self._plan.entries:
                if isinstance(entry, KernelLaunch):
                    entry.launch.use_stream(stream)
            self._stream = stream
        if self._offsets:
            addresses = addresses + [scratch + offset for offset in self._offsets]
        if self.num_counters:
            addresses = [*addresses, counters]
        self._plan.run(addresses)


def prepare(function: Callable[..., Any], layouts: Sequence[ArrayLayout]) -> PreparedCall:
    """Prepare ``function(*arrays)`` for arrays of these layouts on the current device.

    Parameters
    ----------
    function : callable
        Calls ops of the catalog on its arguments and on views of them, and returns the array or the
        tuple of arrays (or None) that they return.
    layouts : sequence of ArrayLayout

    Raises
    ------
    LaunchPlanError
        If the function does anything else with the arrays, or returns one of them.
    EngineError
        What the ops raise for these layouts.
    """
    layouts = list(layouts)
    copied: list[int] = []
    while True:
        try:
            return _recorded(function, layouts, tuple(copied))
        except NotContiguousError as error:
            index = _index_of(error, layouts)
            if index in copied:
                raise
            copied.append(index)
            layouts[index] = ArrayLayout.contiguous(layouts[index].shape, layouts[index].dtype)


def constant(values: np.ndarray[Any, Any]) -> Any:
    """Return `values` on the current device, also while a call is prepared or a graph captured.

    The prepared call that reads the array keeps it alive.
    """
    cupy = device.cupy()
    # SAFETY: not from a pool, which would hand on the memory while launches on any stream still
    # read it. The device frees it once they have ended.
    with _relaxed_capture(), cupy.cuda.using_allocator():
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.empty(values.shape, values.dtype)
            array.set(np.ascontiguousarray(values), stream=stream)
        stream.synchronize()
    return array


class _StandIns:
    """Arrays at made-up addresses; region 0 starts at `_REGION`."""

    def __init__(self) -> None:
        cupy = device.cupy()
        self._memory = cupy.cuda.UnownedMemory
        self._pointer = cupy.cuda.MemoryPointer
        self._array = cupy.ndarray
        self._device = cupy.cuda.runtime.getDevice()
        self._lent: dict[str, int] = {}
        self.sizes: list[int] = []

    def allocate(self, size: int) -> Any:
        """Return a pointer to a new region, as a CuPy allocator does."""
        self.sizes.append(int(size))
        return self._at(len(self.sizes) - 1, 0)

    def argument(self, layout: ArrayLayout) -> PlanArray:
        """Return the stand-in for an argument of the call, in a new region."""
        self.sizes.append(_REGION - 1)
        pointer = self._at(len(self.sizes) - 1, layout.offset)
        return PlanArray(self._array(layout.shape, layout.dtype, pointer, layout.strides))

    def lend(self, kind: str, count: int) -> Any:
        """Return scratch; a kind has one region, which grows."""
        index = self._lent.setdefault(kind, len(self.sizes))
        if index == len(self.sizes):
            self.sizes.append(0)
        self.sizes[index] = max(self.sizes[index], 4 * count)
        dtype = np.int32 if kind == "counters" else np.float32
        return self._array((count,), dtype, self._at(index, 0))

    @property
    def counters(self) -> int | None:
        """Region of the counters, or None."""
        return self._lent.get("counters")

    def _at(self, index: int, offset: int) -> Any:
        memory = self._memory((index + 1) * _REGION, _REGION, self, self._device)
        return self._pointer(memory, offset)


def _region(array: Any) -> int:
    return int(array.data.ptr) // _REGION - 1


def _recorded(
    function: Callable[..., Any], layouts: list[ArrayLayout], copied: tuple[int, ...]
) -> PreparedCall:
    stand_ins = _StandIns()
    arguments = [stand_ins.argument(layout) for layout in layouts]
    allocator = device.cupy().cuda.using_allocator(stand_ins.allocate)
    with (
        _relaxed_capture(),
        allocator,
        lending(stand_ins.lend),
        making_plan(is_dry=True) as builder,
    ):
        returned = function(*arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    results = [unwrapped(array) for array in returned if array is not None]
    order = [*range(len(layouts)), *(_checked_region(a, len(layouts)) for a in results)]
    counters = [] if stand_ins.counters is None else [stand_ins.counters]
    scratch = [i for i in range(len(stand_ins.sizes)) if i not in {*order, *counters}]
    order += [*scratch, *counters]
    # An argument's address includes its offset: its region begins there.
    offsets = [*(layout.offset for layout in layouts), *[0] * len(stand_ins.sizes)]
    plan = builder.finish(
        [(str(i), (i + 1) * _REGION + offsets[i], _REGION - ALIGNMENT) for i in order]
    )
    for entry in plan.entries:
        if isinstance(entry, HostCall):
            raise LaunchPlanError(f"a prepared call may only launch kernels; got {entry.name}")
    return PreparedCall(
        plan,
        copied,
        tuple(ArrayLayout.contiguous(a.shape, a.dtype) for a in results),
        [stand_ins.sizes[i] for i in scratch],
        sum(stand_ins.sizes[i] // 4 for i in counters),
    )


def _checked_region(array: Any, num_arguments: int) -> int:
    """Return the region of a result; it must be a whole new array."""
    index = _region(array)
    if index < num_arguments or array.data.ptr % _REGION or not array.flags.c_contiguous:
        raise LaunchPlanError("a prepared call must return whole new arrays, not views")
    return index


def _index_of(error: NotContiguousError, layouts: list[ArrayLayout]) -> int:
    """Return the argument that must be copied; a view of one is an error."""
    array = unwrapped(error.array)
    index = _region(array)
    is_whole = 0 <= index < len(layouts) and layouts[index][:2] == (array.shape, array.strides)
    if not is_whole or array.data.ptr % _REGION != layouts[index].offset:
        raise error
    return index


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Allow this thread to load modules and to allocate while a stream is captured."""
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
