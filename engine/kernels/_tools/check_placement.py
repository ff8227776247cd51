"""Where the arrays of a checked call lie: contiguous, padded, transposed, misaligned, in place."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.kernels._tools.check_cases import Case
from engine.kernels._tools.device_run import Call, Placed
from engine.kernels._user.binding import dtype_text
from engine.kernels._user.op import Op
from engine.kernels._user.signature import ArrayArg

__all__ = ["placed_call"]

_GAP = 3  # elements behind each row of a padded array


def placed_call(op: Op, case: Case, values: Mapping[str, Any], wanted: Mapping[str, Any]) -> Call:
    """Return the call of a case.

    Parameters
    ----------
    op : Op
    case : Case
    values : mapping
        Arguments by name. See `make_inputs`.
    wanted : mapping
        What the reference computed: gives the shapes of the results.
    """
    data = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    others = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
        if name not in data
    }
    arrays = [
        _placed(op, array, data[array.name], case, "inout" if array.is_inout else "in")
        for array in op.signature.arrays
        if array.name in data
    ]
    for output in op.signature.outputs:
        role = "zeroed" if output.is_zeroed else "out"
        placed = _placed(op, output, wanted[output.name], case, role)
        arrays.append(_in_place(op, placed, arrays, case))
    has_graph = case.kind in ("uneven", "asked") and not case.view
    return Call(arrays, data, others, is_full=case.kind != "huge", has_graph=has_graph)


def _placed(op: Op, array: ArrayArg, value: Any, case: Case, role: str) -> Placed:
    shape = tuple(value.shape)
    itemsize = value.dtype.itemsize
    may_have_gaps = array.is_strided or role == "in"
    view = case.view if may_have_gaps or case.view == "misaligned" else ""
    offset = itemsize if view == "misaligned" else 0
    if role == "inout" and op.definition.alignment > 1:
        offset = 0  # the op refuses it, since it cannot copy
    strides = _strides(shape, itemsize, view)
    return Placed(array.name, dtype_text(value.dtype), shape, strides, offset, role)


def _strides(shape: Sequence[int], itemsize: int, view: str) -> tuple[int, ...]:
    axes = list(range(len(shape)))
    if view == "transposed":
        axes.reverse()
    steps = [itemsize] * len(shape)
    step = itemsize * (2 if view == "padded" and len(shape) == 1 else 1)
    for position, axis in enumerate(reversed(axes)):
        steps[axis] = step
        step *= max(shape[axis], 1)
        if view == "padded" and position == 0 and len(shape) > 1:
            step += _GAP * itemsize
    return tuple(steps)


def _in_place(op: Op, placed: Placed, arrays: Sequence[Placed], case: Case) -> Placed:
    """Put a result in the place of an argument that allows it, once."""
    if case.view != "in place":
        return placed
    taken = {other.alias for other in arrays}
    for other, name in itertools.product(arrays, op.definition.in_place):
        same = (other.shape, other.dtype) == (placed.shape, placed.dtype)
        if other.name == name and same and name not in taken:
            return Placed(
                placed.name, placed.dtype, placed.shape, other.strides, 0, placed.role, name
            )
    return placed
