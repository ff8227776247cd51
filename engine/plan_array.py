"""Arrays that a layer gets while its launch plan is recorded; usable only for launches.

A plan (`kernels/_launch_plan.py`) replays the launches a layer made through the engine's ops.
Anything else the layer did, such as a CuPy product, would be missing when the plan is replayed for
other layers of its kind. So during recording the layer gets `PlanArray`s: they support views and
the attributes that ops read from a CuPy array, but no arithmetic, no methods and no conversion that
CuPy would accept.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from engine.errors import LaunchPlanError

__all__ = ["NotContiguousError", "PlanArray", "unwrapped"]

_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lshift", "rshift"),
)
_OTHERS = (
    *("neg", "pos", "abs", "invert", "bool", "int", "float", "index", "iter", "setitem"),
    *("contains", "eq", "ne", "lt", "le", "gt", "ge", "array"),
)


class NotContiguousError(LaunchPlanError):
    """An op would copy a view of a `PlanArray` (attribute `array`) to make it contiguous."""

    def __init__(self, message: str, array: PlanArray) -> None:
        super().__init__(message)
        self.array = array


class PlanArray:
    """Stands in for a CuPy array while a launch plan is recorded.

    Parameters
    ----------
    array : cupy.ndarray
        Wrapped array, sharing its memory.
    """

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def __repr__(self) -> str:
        return f"PlanArray(shape={self.shape}, dtype={self.dtype})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the wrapped array; other attributes that ops read are forwarded below."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    def __len__(self) -> int:
        return len(self.array)

    def reshape(self, *shape: Any) -> PlanArray:
        """Return a view with another shape; raise if that would need a copy."""
        # NumPy decides on the layout alone: CuPy would copy the elements, and they may not exist.
        layout = np.lib.stride_tricks.as_strided(
            np.empty(1, self.array.dtype), self.shape, self.array.strides
        )
        try:
            layout.reshape(*shape, copy=False)
        except ValueError:
            raise NotContiguousError(
                f"reshape must return a view; {self!r} to {shape} would copy", self
            ) from None
        return PlanArray(self.array.reshape(*shape))

    def transpose(self, *axes: int) -> PlanArray:
        """Return a view with its axes in another order."""
        return PlanArray(self.array.transpose(*axes))

    def __getitem__(self, index: Any) -> PlanArray:
        """Return a view; the index may contain only slices, ints, None and Ellipsis."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(p, slice | int) or p is None or p is Ellipsis for p in parts):
            raise LaunchPlanError(f"an index must be slices or ints, for a view; got {index!r}")
        return PlanArray(self.array[index])

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self, name)


def _refuse(array: PlanArray, name: str) -> NoReturn:
    raise LaunchPlanError(
        f"while its launch plan is made, a layer may only call the engine's ops (anything else "
        f"must go through plan_call); got {name!r} of {array!r}"
    )


def _forwarded(name: str) -> property:
    return property(lambda self: getattr(self.array, name))


def _refused(name: str) -> Any:
    def method(self: PlanArray, *_: Any) -> NoReturn:
        _refuse(self, name)

    return method


for _name in ("dtype", "strides", "data", "flags", "size", "ndim", "itemsize", "nbytes", "device"):
    setattr(PlanArray, _name, _forwarded(_name))
for _name in (*(f"{p}{o}" for o in _OPERATORS for p in ("", "r", "i")), *_OTHERS):
    setattr(PlanArray, f"__{_name}__", _refused(f"__{_name}__"))
PlanArray.__hash__ = object.__hash__  # type: ignore[method-assign]


def unwrapped(array: Any) -> Any:
    """Return the CuPy array inside a PlanArray; return anything else unchanged."""
    return array.array if isinstance(array, PlanArray) else array
