"""One checked call of a kernel on the GPU: guarded arrays, poison, and repeated runs.

Every array lies between guard bands in a buffer of its own. The call runs

1. with NaN patterns (0xFF) in the guards, the results, shared and scratch memory,
2. again with the same: equal inputs must give equal bits,
3. with other patterns: a result that keeps both patterns was not written, and one that
   changes depends on memory that the kernel must not read. Runs that change one of these places
   alone then find which.

Runs in the process that owns the GPU: `child.py`, or the caller's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine import device
from engine.errors import DeviceError, EngineError
from engine.kernels._launch import Kernel
from engine.kernels._tools.check_compare import element, region
from engine.kernels._user.launch_failure import LOST
from engine.kernels._user.module import UserModule
from engine.kernels._user.op import Op, current_chip
from engine.kernels._user.problem import Scratch
from engine.kernels._user.signature import DTYPES

__all__ = ["Answer", "Call", "Placed", "run_call"]

GUARD_BYTES = 64 << 10
"""Size of a guard band: a multiple of the alignment of an allocation."""

_NAN = 0xFF
_LARGE = 0x7B  # a large positive float of 16 or 32 bits
_SMALL = 0x3B  # a small one, which no sum with it leaves as it is
_REPEATS = 3  # runs that must agree

_HELPERS = r"""
#include "common/pdl.cuh"

extern "C" __global__ void fill_shared(uint32_t word, int words) {
  extern __shared__ uint32_t smem[];
  volatile uint32_t* place = smem;
  for (int i = threadIdx.x; i < words; i += blockDim.x) place[i] = word;
}

// Lets the next kernel start at once, and writes late.
extern "C" __global__ void delayed_copy(const unsigned char* source, unsigned char* target,
                                        int64_t n) {
  pdl_trigger();
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) target[i] = source[i];
}
"""


@dataclass(frozen=True)
class Placed:
    """Where an array lies.

    Attributes
    ----------
    name, dtype : str
    shape, strides : tuple of int
        Strides in bytes, all positive.
    offset : int
        Bytes from an aligned address to the first element.
    role : str
        "in", "inout", "out", or "zeroed": an `out` that the op sets to 0.
    alias : str
        Argument in whose place a result is written; "" for none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    role: str = "in"
    alias: str = ""

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes."""
        return DTYPES[self.dtype].itemsize

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last element."""
        if 0 in self.shape:
            return 0
        steps = ((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return sum(steps) + self.itemsize

    def view(self, buffer: np.ndarray[Any, Any], guard: int, dtype: Any = None) -> Any:
        """Return the array inside a host buffer with guard bands."""
        if 0 in self.shape:
            return np.empty(self.shape, dtype or DTYPES[self.dtype])
        return np.ndarray(
            self.shape, dtype or DTYPES[self.dtype], buffer, guard + self.offset, self.strides
        )


@dataclass
class Call:
    """A call to make.

    Attributes
    ----------
    arrays : list of Placed
        Arguments and results.
    data : dict
        Content of the arguments, by name.
    scalars : dict
        Scalar arguments; None for omitted arrays.
    guard : int
        Bytes of a guard band; 0 under compute-sanitizer, which watches the end of allocations.
    is_full : bool
        Run it several times, as described above.
    is_deterministic : bool
        Whether runs must agree bit by bit.
    has_graph : bool
        Run it from a CUDA graph, too.
    """

    arrays: list[Placed]
    data: dict[str, Any]
    scalars: dict[str, Any]
    guard: int = GUARD_BYTES
    is_full: bool = True
    is_deterministic: bool = True
    has_graph: bool = False


@dataclass
class Answer:
    """The outcome of a call.

    Attributes
    ----------
    results : dict
        NumPy arrays: the results, and the arguments that are written in place.
    findings : list of (kind, text)
    error : (kind, text) or None
        What made the call fail: "contract", or "crash" if the CUDA context is lost.
    """

    results: dict[str, Any] = field(default_factory=dict)
    findings: list[tuple[str, str]] = field(default_factory=list)
    error: tuple[str, str] | None = None


def run_call(op: Op, call: Call) -> Answer:
    """Make a call on the current device. Errors become `Answer.error`."""
    answer = Answer()
    try:
        _Runs(op, call, answer).run()
    except EngineError as error:
        is_lost = isinstance(error, DeviceError) and LOST in str(error)
        answer.error = ("crash" if is_lost else "contract", str(error))
    except Exception as error:
        answer.error = ("crash", f"{type(error).__name__}: {error}")
    return answer


class _Runs:
    """The runs of one call."""

    def __init__(self, op: Op, call: Call, answer: Answer) -> None:
        self._op = op
        self._call = call
        self._answer = answer
        self._placed = {placed.name: placed for placed in call.arrays}
        self._outputs = [placed for placed in call.arrays if placed.role in ("out", "zeroed")]
        self._written = [*self._outputs, *(p for p in call.arrays if p.role == "inout")]

    def run(self) -> None:
        first = self._bytes_after({})
        self._answer.results = {p.name: self._view(p, first).copy() for p in self._written}
        self._check_guards(first, {})
        if not self._call.is_full:
            return
        agrees = self._check_repeats(first)
        fills = {place: _other(place) for place in self._places()}
        other = self._bytes_after(fills)
        self._check_guards(other, fills)
        self._check_dependence(first, other, may_differ=not agrees)
        if self._call.has_graph and agrees:
            self._check_graph(first)
            if self._has_pdl():
                self._check_pdl(first)

    def _has_pdl(self) -> bool:
        cp = device.cupy()
        arrays = {
            p.name: cp.asarray(self._call.data[p.name])
            for p in self._placed.values()
            if p.name in self._call.data
        }
        problem = self._op.problem(**arrays, **self._call.scalars)
        return any(launch.pdl for launch in self._op.launches(problem))

    def _places(self) -> list[str]:
        """Return the places that a kernel must not read before it writes there."""
        return [*(f"guard {name}" for name in self._placed), "result", "shared", "scratch"]

    def _bytes_after(self, fills: Mapping[str, int]) -> dict[str, Any]:
        """Run once; return the content of every buffer. `fills`: bytes other than 0xFF."""
        cp = device.cupy()
        buffers = {placed.name: self._buffer(placed, fills) for placed in self._placed.values()}
        arrays = {name: self._array(name, buffers) for name in self._placed}
        if self._call.guard:
            self._fill_scratch(arrays, fills.get("scratch", _NAN))
            _fill_shared(fills.get("shared", _NAN))
        self._launch(arrays)
        cp.cuda.Device().synchronize()
        return _host(buffers)

    def _buffer(self, placed: Placed, fills: Mapping[str, int]) -> Any:
        """Return a buffer; without guards nothing writes a result, so that initcheck sees that."""
        cp = device.cupy()
        if not self._call.guard and placed.role == "out" and not placed.alias:
            buffer = cp.empty(placed.offset + placed.span, cp.uint8)
            buffer[: placed.offset] = _NAN  # copied to the host with the result
            return buffer
        return cp.asarray(self._content(placed, fills))

    def _content(self, placed: Placed, fills: Mapping[str, int]) -> Any:
        """Return a buffer for the host: guards, and the argument's content or poison."""
        guard = self._call.guard
        size = guard + placed.offset + placed.span + guard
        buffer = np.full(size, fills.get(f"guard {placed.name}", _NAN), np.uint8)
        if placed.name in self._call.data:
            placed.view(buffer, guard)[...] = self._call.data[placed.name]
        elif placed.span:
            whole = buffer[guard + placed.offset : guard + placed.offset + placed.span]
            whole[:] = fills.get("result", _NAN)
        return buffer

    def _array(self, name: str, buffers: Mapping[str, Any]) -> Any:
        cp = device.cupy()
        placed = self._placed[name]
        if placed.alias:
            return self._array(placed.alias, buffers)
        if 0 in placed.shape:
            return cp.empty(placed.shape, DTYPES[placed.dtype])
        start = buffers[name].data + (self._call.guard + placed.offset)
        return cp.ndarray(placed.shape, DTYPES[placed.dtype], start, placed.strides)

    def _arguments(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        names = [p.name for p in self._placed.values() if p.role in ("in", "inout")]
        return {name: arrays[name] for name in names} | self._call.scalars

    def _launch(self, arrays: Mapping[str, Any]) -> None:
        outs = tuple(arrays[placed.name] for placed in self._outputs)
        self._op(**self._arguments(arrays), out=outs or None)

    def _fill_scratch(self, arrays: Mapping[str, Any], value: int) -> None:
        """Fill the blocks of CuPy's pool from which the call's scratch memory comes."""
        cp = device.cupy()
        with contextlib.suppress(Exception):  # the call itself reports it
            launches = self._op.launches(self._op.problem(**self._arguments(arrays)))
            values = [value for launch in launches for _, value in launch.args]
            found = [each for each in dict.fromkeys(values) if isinstance(each, Scratch)]
            sizes = [math.prod(each.shape) * DTYPES[each.dtype].itemsize for each in found]
            kept = [cp.full(size, value, cp.uint8) for size in sizes if size]
            del kept  # returns them to the pool: the next allocations of these sizes get them

    def _view(self, placed: Placed, buffers: Mapping[str, Any], dtype: Any = None) -> Any:
        place = self._placed[placed.alias] if placed.alias else placed
        return place.view(buffers[place.name], self._call.guard, dtype)

    def _bits(self, placed: Placed, buffers: Mapping[str, Any]) -> Any:
        """Return an array's elements as unsigned integers, to compare NaNs."""
        return self._view(placed, buffers, np.dtype(f"u{placed.itemsize}"))

    def _report(self, kind: str, text: str) -> None:
        if (kind, text) not in self._answer.findings:
            self._answer.findings.append((kind, text))

    def _check_guards(self, after: Mapping[str, Any], fills: Mapping[str, int]) -> None:
        aliases = {placed.alias for placed in self._outputs}
        for placed in self._placed.values():
            before = self._content(placed, fills)
            changed = before != after[placed.name]
            if not changed.any():
                continue
            inside = np.zeros(changed.shape, np.uint8)
            if placed.span:
                placed.view(inside, self._call.guard, np.dtype(f"u{placed.itemsize}"))[...] = (
                    np.iinfo(f"u{placed.itemsize}").max
                )
            for text in _outside(placed, changed & (inside == 0), self._call.guard):
                self._report("guard", text)
            if placed.role == "in" and placed.name not in aliases:
                was = placed.view(before, self._call.guard, np.dtype(f"u{placed.itemsize}"))
                mask = was != self._bits(placed, after)
                if mask.any():
                    text = f"wrote to its argument {region(placed.name, mask)}, which is not inout"
                    self._report("input", text)

    def _check_repeats(self, first: Mapping[str, Any]) -> bool:
        if not self._call.is_deterministic:
            return False
        for _ in range(_REPEATS - 1):
            again = self._bytes_after({})
            for placed in self._written:
                mask = self._bits(placed, first) != self._bits(placed, again)
                if mask.any():
                    values = [self._view(placed, run) for run in (first, again)]
                    self._report("nondeterminism", _differs(placed.name, mask, values))
                    return False
        return True

    def _check_dependence(
        self, first: Mapping[str, Any], other: Mapping[str, Any], *, may_differ: bool
    ) -> None:
        """Report results that were not written, or that depend on what they must not."""
        depends = False
        for placed in self._written:
            old = self._bits(placed, first)
            new = self._bits(placed, other)
            patterns = (_pattern(_NAN, placed.itemsize), _pattern(_SMALL, placed.itemsize))
            missed = (old == patterns[0]) & (new == patterns[1])
            if placed.role == "out" and not placed.alias and missed.any():
                count = f" ({int(missed.sum())} of {missed.size} elements)"
                text = f"{region(placed.name, missed)} was never written{count}"
                self._report("unwritten", text)
            else:
                missed = np.zeros(old.shape, np.bool_)
            depends |= bool(((old != new) & ~missed).any())
        if depends and not may_differ:
            self._find_cause(first)

    def _find_cause(self, first: Mapping[str, Any]) -> None:
        found = False
        for place in self._places():
            after = self._bytes_after({place: _other(place)})
            masks = {p.name: self._bits(p, first) != self._bits(p, after) for p in self._written}
            if place == "result":  # unwritten elements differ, too
                for placed in self._outputs:
                    masks[placed.name] &= self._bits(placed, after) != _pattern(
                        _SMALL, placed.itemsize
                    )
            for name, mask in masks.items():
                if mask.any():
                    found = True
                    self._report(*_cause(place, region(name, mask)))
        if not found:
            self._report("outside", "its results depend on memory that it must not read")

    def _check_graph(self, first: Mapping[str, Any]) -> None:
        """Capture the call in a CUDA graph, and compare what the graph computes."""
        cp = device.cupy()
        contents = {p.name: self._content(p, {}) for p in self._placed.values()}
        buffers = {name: cp.asarray(content) for name, content in contents.items()}
        arrays = {name: self._array(name, buffers) for name in self._placed}
        cp.cuda.Device().synchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            self._launch(arrays)  # the stream's pool then has the memory that the call takes
            graph = self._captured(stream, arrays)
            for name, content in contents.items():
                buffers[name].set(content)
            if graph is not None:
                graph.launch(stream)
        stream.synchronize()
        if graph is not None:
            text = "differs when the call runs from a CUDA graph"
            self._report_changes("graph", first, _host(buffers), text)

    def _captured(self, stream: Any, arrays: Mapping[str, Any]) -> Any:
        stream.begin_capture()
        try:
            self._launch(arrays)
        except Exception as error:
            with contextlib.suppress(Exception):  # the capture is invalid
                stream.end_capture()
            self._report("graph", f"the call cannot be captured in a CUDA graph: {error}")
            return None
        return stream.end_capture()

    def _check_pdl(self, first: Mapping[str, Any]) -> None:
        """Let a kernel that has not ended yet write each argument just before the call."""
        cp = device.cupy()
        contents = {p.name: self._content(p, {}) for p in self._placed.values()}
        for late in (p for p in self._placed.values() if p.name in self._call.data and p.span):
            buffers = {name: cp.asarray(content) for name, content in contents.items()}
            source = buffers[late.name].copy()
            arrays = {name: self._array(name, buffers) for name in self._placed}
            args = {"source": source, "target": buffers[late.name], "n": source.size}
            cp.cuda.Device().synchronize()
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                self._launch(arrays)  # the stream's pool then has the memory that the call takes
                for name, content in contents.items():
                    buffers[name].set(content)
                buffers[late.name].fill(_LARGE)
                _COPY.launch(_helper_module(), (1,), (1024,), **args)
                self._launch(arrays)
            stream.synchronize()
            text = f"differs if {late.name} is written late: it is read before pdl_wait()"
            self._report_changes("pdl", first, _host(buffers), text)

    def _report_changes(
        self, kind: str, first: Mapping[str, Any], after: Mapping[str, Any], text: str
    ) -> None:
        for placed in self._written:
            mask = self._bits(placed, first) != self._bits(placed, after)
            if mask.any():
                self._report(kind, f"{region(placed.name, mask)} {text}")


def _host(buffers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: buffer.get() for name, buffer in buffers.items()}


def _outside(placed: Placed, changed: np.ndarray[Any, Any], guard: int) -> Iterator[str]:
    """Yield where a kernel wrote outside an array."""
    start = guard + placed.offset
    end = start + placed.span
    size = placed.itemsize
    places = np.flatnonzero(changed)
    behind = places[places >= end]
    if behind.size:
        count = _elements(behind - end, size)
        first = int(behind[0] - end) // size + 1
        yield f"wrote {_plural(count)} after the end of {placed.name} (the first is {first} behind)"
    before = places[places < start]
    if before.size:
        count = _elements(start - 1 - before, size)
        last = int(start - 1 - before[-1]) // size + 1
        where = f"before the start of {placed.name} (the last is {last} before)"
        yield f"wrote {_plural(count)} {where}"
    between = places[(places >= start) & (places < end)]
    if between.size:
        count = _elements(between - start, size)
        where = f"between the rows of {placed.name}: its strides leave gaps there"
        yield f"wrote {_plural(count)} {where}"


def _elements(offsets: np.ndarray[Any, Any], itemsize: int) -> int:
    return len(np.unique(offsets // itemsize))


def _plural(count: int) -> str:
    return f"{count} element{'s' * (count != 1)}"


def _other(place: str) -> int:
    """Return the byte that the third run finds in a place."""
    return _SMALL if place == "result" else _LARGE


def _pattern(byte: int, itemsize: int) -> Any:
    return np.frombuffer(bytes([byte]) * itemsize, f"u{itemsize}")[0]


def _differs(name: str, mask: np.ndarray[Any, Any], values: Sequence[Any]) -> str:
    place = tuple(int(i) for i in np.argwhere(mask)[0])
    old, new = (str(value[place]) for value in values)
    return (
        "results differ between two runs with the same inputs: a race (a missing __syncthreads?), "
        f"or atomics in floating point. {element(name, place)} is {old}, then {new}; "
        f"{int(mask.sum())} of {mask.size} elements differ"
    )


def _cause(place: str, where: str) -> tuple[str, str]:
    if place.startswith("guard "):
        name = place.removeprefix("guard ")
        return "outside", (
            f"reads outside {name}: {where} changes with what lies before or behind the array"
        )
    if place == "result":
        return "outside", f"reads the result before it has written it: {where} changes with it"
    if place == "shared":
        return "shared", (
            f"reads shared memory that it has not written, or that another thread writes without a "
            f"__syncthreads() in between: {where} changes with what was there before"
        )
    return "outside", (
        f"reads scratch memory that it has not written: {where} changes with what was there "
        "before (scratch(..., zeroed=True) sets it to 0)"
    )


def _fill_shared(value: int) -> None:
    """Fill the shared memory of every multiprocessor."""
    chip = current_chip()
    size = chip.max_shared_bytes
    word = int.from_bytes(bytes([value]) * 4, "little")
    grid = (4 * chip.sm_count,)
    _FILL.launch(_helper_module(), grid, (1024,), size, word=word, words=size // 4)


def _helper_module() -> UserModule:
    digest = hashlib.sha256(_HELPERS.encode()).hexdigest()
    return UserModule("check_helpers.cu", "float32", (), digest, text=_HELPERS)


_FILL = Kernel("fill_shared", "word:u32 words:i32")
_COPY = Kernel("delayed_copy", "source:ptr target:ptr n:i64")
