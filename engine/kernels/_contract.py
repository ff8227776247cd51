"""The contract of an op, checked once, at its boundary.

CuPy checks nothing when it launches a raw kernel, so every op declares its contract here: shapes
with symbolic sizes ("T H D"), dtypes, layout. The first argument with a symbol binds its size; if a
later one disagrees, the error names both arguments and both values.

    call = Contract("rmsnorm")
    x = call.array("x", x, "* N", FLOATS, layout="rows")
    weight = call.array("weight", weight, "N", x.dtype)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from engine import device
from engine.checks import shown
from engine.dtypes import BFLOAT16
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._memory import repeats_elements
from engine.plan_array import NotContiguousError, PlanArray

__all__ = ["FLOATS", "INT32", "INT64", "MIRROR_FLOATS", "Contract", "shown_argument"]

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
# Dtypes of an op whose mirror also computes in float64; on the GPU they are FLOATS.
MIRROR_FLOATS = (*FLOATS, FLOAT64)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)

DTypes = np.dtype[Any] | tuple[np.dtype[Any], ...]


@lru_cache(maxsize=4096)
def _parsed_shape(shape: str) -> tuple[bool, tuple[str | int, ...]]:
    """Return whether a shape begins with "*", and its other symbols and numbers."""
    symbols = shape.split()
    has_more = symbols[:1] == ["*"]
    names = symbols[1:] if has_more else symbols
    return has_more, tuple(int(name) if name.isdecimal() else name for name in names)


def shown_argument(value: Any) -> str:
    """Return an argument as a short text for an error: an array by its shape."""
    if hasattr(value, "shape") and not isinstance(value, np.generic | type):
        return f"an array of shape {tuple(value.shape)}"
    return shown(value)


class Contract:
    """Checks the arguments of one call to `op` and records the sizes they bind.

    Attributes
    ----------
    dims : dict
        Size of every symbol bound so far.
    xp : module
        `numpy` or `cupy`, the module of the arrays checked so far.
    """

    __slots__ = ("_device", "_first", "_is_planned", "_origin", "dims", "op", "xp")

    def __init__(self, op: str) -> None:
        self.op = op
        self.dims: dict[str, int] = {}
        self.xp: Any = None
        self._origin: dict[str, str] = {}
        self._first = ""
        self._device: int | None = None
        self._is_planned = False  # a launch plan is being recorded: outputs must be PlanArrays

    def again(self) -> Contract:
        """Return the contract of another call whose arguments have these shapes and dtypes."""
        new = Contract(self.op)
        new.dims = self.dims
        new.xp = self.xp
        new._origin = self._origin
        new._first = self._first
        new._device = self._device
        return new

    @property
    def on_cpu(self) -> bool:
        """Tell whether the arguments are NumPy arrays, so that the mirror computes the result."""
        return self.xp is np

    def __getitem__(self, symbol: str) -> int:
        return self.dims[symbol]

    def bind(self, symbol: str, size: int, name: str) -> int:
        """Return the size bound to `symbol`; if unbound, bind `size`, from argument `name`."""
        self._origin.setdefault(symbol, name)
        return self.dims.setdefault(symbol, size)

    def array(self, name: str, value: Any, shape: str, dtype: DTypes, *, layout: str = "C") -> Any:
        """Check an input and return it as an array of the call's module.

        Parameters
        ----------
        name, value : str, array_like
            The argument. Anything with `__cuda_array_interface__` or `__dlpack__` is accepted
            without a copy.
        shape : str
            Symbols or numbers, separated by spaces; a leading "*" stands for any number of axes.
        dtype : np.dtype or tuple of np.dtype
            The allowed dtypes; float64 is allowed in NumPy arrays only.
        layout : str
            "C": a view that is not C-contiguous is copied. "rows": a view whose last axis is not
            contiguous is copied. "any": the op supports every stride.

        Raises
        ------
        ShapeError, DTypeError, ContractError
            The message names the argument, what was expected and what was given.
        """
        array = value if type(value) is np.ndarray else self._as_array(name, value)
        if self.xp is not np or array is not value:
            self._check_module(name, array)
        if array.dtype is not dtype:
            self._check_dtype(name, array, dtype)
        self._check_shape(name, array, shape)
        if layout == "C" and not array.flags.c_contiguous:
            return self._copied(name, array)
        if layout == "rows" and array.size and array.strides[-1] != array.itemsize:
            return self._copied(name, array)
        return array

    def written(
        self, name: str, value: Any, shape: str, dtype: DTypes, *, layout: str = "C"
    ) -> Any:
        """Check an argument that the op writes to.

        A layout that `array` would copy is an error, and so are elements that share memory.
        """
        array = self.array(name, value, shape, dtype, layout="any")
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ContractError(f"{self.op}: {name}: must be writeable; got a read-only array")
        if layout == "C" and not array.flags.c_contiguous:
            raise ShapeError(
                f"{self.op}: {name}: must be C-contiguous; got strides {array.strides}"
            )
        if layout == "rows" and array.size and array.strides[-1] != array.itemsize:
            raise ShapeError(
                f"{self.op}: {name}: its last axis must be contiguous; got {array.strides}"
            )
        if repeats_elements(array):
            raise ContractError(
                f"{self.op}: {name}: its elements must not share memory; got shape "
                f"{tuple(array.shape)} with strides {array.strides}"
            )
        return array

    def output(
        self,
        name: str,
        out: Any,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        *,
        layout: str = "C",
    ) -> Any:
        """Return `out` after checking it, or a new array if it is None."""
        if out is None:
            new = self.xp.empty(tuple(shape), dtype)
            return PlanArray(new) if self._is_planned else new
        return self.written(name, out, " ".join(map(str, shape)), dtype, layout=layout)

    def finish(self, out: Any, result: Any, name: str = "out", *, layout: str = "C") -> Any:
        """Return the mirror's `result`, copied into `out` if that is given. See `output`."""
        return self.fill(self.target(out, result, name, layout=layout), result)

    def target(self, out: Any, result: Any, name: str = "out", *, layout: str = "C") -> Any:
        """Return the array for the mirror's `result`: the checked `out`, or `result` itself.

        An op with several results checks every target before it calls `fill` for the first.
        """
        if out is None:
            return result
        return self.output(name, out, result.shape, result.dtype, layout=layout)

    def check_target(
        self,
        out: Any,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        name: str = "out",
    ) -> None:
        """Check `out`, if it is given, for a mirror that writes an argument: before it does."""
        if out is not None:
            self.output(name, out, shape, dtype)

    @staticmethod
    def fill(target: Any, result: Any) -> Any:
        """Copy the mirror's `result` to its `target` and return the target."""
        if target is not result:
            np.copyto(target, result)
        return target

    def check(self, name: str, ok: bool, wanted: str, got: Any) -> None:
        """Raise a ContractError unless `ok`."""
        if not ok:
            raise ContractError(f"{self.op}: {name}: must be {wanted}; got {shown_argument(got)}")

    def number(
        self, name: str, value: Any, *, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """Check and return a real number in [`low`, `high`]; NaN is an error."""
        kinds = int | float | np.integer | np.floating
        ok = isinstance(value, kinds) and not isinstance(value, bool)
        try:
            number = float(value) if ok else math.nan
        except OverflowError:  # an int beyond float64
            number = math.nan
        if not low <= number <= high:
            raise ContractError(
                f"{self.op}: {name}: must be a number from {low} to {high}; "
                f"got {shown_argument(value)}"
            )
        return number

    def integer(self, name: str, value: Any, low: int, high: int, wanted: str = "") -> int:
        """Check an integer in [`low`, `high`], Python's or NumPy's; return it as a Python int.

        A NumPy int keeps its width when multiplied by a Python int, so it could overflow.
        """
        is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not (is_int and low <= value <= high):
            self.check(name, False, wanted or f"an int from {low} to {high}", value)
        return int(value)

    def indices(self, name: str, values: Any, low: int, high: int) -> None:
        """On the CPU, check that all values lie in [`low`, `high`] (on a GPU this would wait)."""
        if not self.on_cpu or not values.size:
            return
        ends = int(values.min()), int(values.max())
        self.check(name, low <= ends[0] and ends[1] <= high, f"from {low} to {high}", ends)

    def _copied(self, name: str, array: Any) -> Any:
        if self._is_planned:  # a plan records our launches only, not CuPy's copy
            raise NotContiguousError(
                f"{self.op}: {name}: must be contiguous; got strides {array.strides}", array
            )
        return self.xp.ascontiguousarray(array)

    def _as_array(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ma.MaskedArray):  # its mask would be lost
            raise DTypeError(f"{self.op}: {name}: must be a plain array; got a masked one")
        if type(value) in (np.ndarray, np.memmap):
            return value
        if isinstance(value, np.ndarray):  # a subclass may compute otherwise: matrices have a `*`
            return value.view(np.ndarray)
        if device.is_cupy_array(value):
            self._is_planned |= isinstance(value, PlanArray)
            return value
        try:
            if hasattr(value, "__cuda_array_interface__"):
                return device.cupy().asarray(value)
            if hasattr(value, "__dlpack__"):
                on_gpu = value.__dlpack_device__()[0] == 2  # kDLCUDA
                return (device.cupy() if on_gpu else np).from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ContractError(
                f"{self.op}: {name}: must be readable as an array; got {type(value).__name__} of "
                f"{getattr(value, 'dtype', 'no dtype')}: {error}"
            ) from error
        raise DTypeError(f"{self.op}: {name}: must be an array; got {type(value).__name__}")

    def _check_module(self, name: str, array: Any) -> None:
        xp = np if isinstance(array, np.ndarray) else device.cupy()
        where = None if xp is np else array.device.id
        if self.xp is None:
            self.xp = xp
            self._first = name
            self._device = where
        elif self.xp is not xp:
            raise ContractError(
                f"{self.op}: {name}: is a {xp.__name__} array, but {self._first} is a "
                f"{self.xp.__name__} array; move one of them"
            )
        elif where != self._device:
            raise ContractError(
                f"{self.op}: {name}: is on cuda:{where}, but {self._first} is on "
                f"cuda:{self._device}"
            )

    def _check_dtype(self, name: str, array: Any, dtype: DTypes) -> None:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if array.dtype in allowed and (self.xp is np or array.dtype != FLOAT64):
            return
        wanted = " or ".join(str(d) for d in allowed if self.xp is np or d != FLOAT64)
        rule = "; float64 must be a NumPy array" if FLOAT64 in allowed and self.xp is not np else ""
        raise DTypeError(f"{self.op}: {name}: must be {wanted}; got {array.dtype}{rule}")

    def _check_shape(self, name: str, array: Any, shape: str) -> None:
        has_more, symbols = _parsed_shape(shape)
        sizes = array.shape
        if has_more:
            sizes = sizes[max(0, len(sizes) - len(symbols)) :]
        if len(symbols) != len(sizes):
            self._shape_error(name, shape, array.shape, "")
        dims = self.dims
        for symbol, size in zip(symbols, sizes, strict=False):
            if symbol in dims:
                if dims[symbol] != size:
                    where = f"; {symbol} = {dims[symbol]} from {self._origin[symbol]}"
                    self._shape_error(name, shape, array.shape, where)
            elif isinstance(symbol, str):
                self.bind(symbol, size, name)
            elif symbol != size:
                self._shape_error(name, shape, array.shape, "")

    def _shape_error(self, name: str, shape: str, got: tuple[int, ...], where: str) -> None:
        dims = shape.replace("*", "...").split()
        wanted = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
        raise ShapeError(f"{self.op}: {name}: must have shape {wanted}{where}; got {tuple(got)}")
