"""Weights that stack several matrices (E, N, K), for example one per expert.

A packed weight is stored as the planes of one matrix (E N, K), so N must be a multiple of 16. In
other formats the first axis of every array is E.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from engine.device import array_module
from engine.errors import WeightsError
from engine.weights.formats import TILE_ROWS
from engine.weights.weight import Weight

__all__ = ["append", "appended", "matrices", "stack_matrices", "take_matrices"]

_PLANES = ("data", "scales", "high", "super_scales")


def stack_matrices(parts: Sequence[Weight]) -> Weight:
    """Stack matrices (N, K) of equal format and shape into a weight (E, N, K).

    Raises
    ------
    WeightsError
        If formats or shapes differ, packed rows do not fill whole tiles, or columns are permuted.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.weights import FORMATS, Weight
    >>> from engine.weights.quantize import quantize
    >>> one = quantize(np.ones((16, 64), np.float32), FORMATS["q4_0"])
    >>> both = stack_matrices([one, one])
    >>> both.shape, both.data.shape
    ((2, 16, 64), (2, 1, 512))
    """
    first = parts[0]
    form = first.format
    shape = first.shape
    if any(part.format != form or part.shape != shape for part in parts):
        raise WeightsError("matrices of one weight must have the same format and shape")
    if any(part.permutation is not None for part in parts):
        raise WeightsError("matrices of one weight must not have permuted columns")
    if form.is_packed and shape[0] % TILE_ROWS:
        raise WeightsError(f"rows of {form.name} must be a multiple of {TILE_ROWS}; got {shape[0]}")
    xp = array_module(first.data)
    join = xp.concatenate if form.is_packed else xp.stack
    planes: dict[str, Any] = {}
    for name in _PLANES:
        arrays = [getattr(part, name) for part in parts]
        planes[name] = None if arrays[0] is None else join(arrays)
    return replace(first, shape=(len(parts), *shape), **planes)


def append(weight: Weight, last: Weight) -> tuple[Weight, Weight]:
    """Copy both into one array, where the rows or matrices of `last` lie behind those of `weight`.

    Returns
    -------
    (weight, last)
        Views of that array. `appended` returns it as one weight.

    Raises
    ------
    WeightsError
        If their formats or sizes differ.

    Examples
    --------
    >>> import numpy as np
    >>> arrays = np.zeros((2, 4, 8), np.float32), np.ones((4, 8), np.float32)
    >>> appended(*append(*map(Weight.dense, arrays))).data[:, 0, 0]
    array([0., 0., 1.], dtype=float32)
    """
    if not _continues(weight, last):
        raise WeightsError(
            f"last must have the format and sizes of weight, {weight.format.name} {weight.shape}; "
            f"got {last.format.name} {last.shape}"
        )
    concatenate = array_module(weight.data).concatenate
    before: dict[str, Any] = {}
    behind: dict[str, Any] = {}
    for name, array, rows in _plane_pairs(weight, last):
        bits = f"u{array.itemsize}"  # CuPy cannot copy slices of every dtype
        whole = concatenate([array.view(bits), rows.view(bits)]).view(array.dtype)
        before[name] = whole[: len(array)]
        behind[name] = whole[len(array) :].reshape(getattr(last, name).shape)
    return replace(weight, **before), replace(last, **behind)


def appended(weight: Weight, last: Weight) -> Weight | None:
    """Return the whole of which `append` returned `weight` and `last`; None if it did not."""
    if not _continues(weight, last):
        return None
    planes: dict[str, Any] = {}
    for name, array, rows in _plane_pairs(weight, last):
        whole = array.base
        if whole is None or whole is not rows.base or whole.nbytes != array.nbytes + rows.nbytes:
            return None
        planes[name] = whole.view(array.dtype).reshape(-1, *array.shape[1:])
    count = last.num_elements // math.prod(weight.shape[1:])
    return replace(weight, shape=(weight.shape[0] + count, *weight.shape[1:]), **planes)


def _continues(weight: Weight, last: Weight) -> bool:
    """Tell whether `last` has the format of `weight`, and whole rows or matrices like it."""
    is_alike = weight.format == last.format and weight.shape[-1] == last.shape[-1]
    is_plain = not (weight.parts or last.parts) and weight.permutation is last.permutation is None
    return is_alike and is_plain and last.num_elements % math.prod(weight.shape[1:]) == 0


def _plane_pairs(weight: Weight, last: Weight) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, array of `weight`, array of `last` with the same inner axes)."""
    for name in _PLANES:
        array = getattr(weight, name)
        if array is not None:
            yield name, array, getattr(last, name).reshape(-1, *array.shape[1:])


def take_matrices(weight: Weight, first: int, last: int) -> Weight:
    """Return matrices [first, last) of a weight (E, N, K), as views."""
    _, rows, columns = weight.shape
    taken = slice(first, last)
    if weight.format.is_packed:
        taken = slice(first * rows // TILE_ROWS, last * rows // TILE_ROWS)
    arrays = {name: getattr(weight, name) for name in _PLANES}
    planes: dict[str, Any] = {
        name: None if array is None else array[taken] for name, array in arrays.items()
    }
    return replace(weight, shape=(last - first, rows, columns), **planes)


def matrices(weight: Weight) -> Iterator[Weight]:
    """Yield the matrices (N, K) of a weight (E, N, K), as views."""
    for expert in range(weight.shape[0]):
        part = take_matrices(weight, expert, expert + 1)
        if not weight.format.is_packed:
            scales = None if part.scales is None else part.scales[0]
            part = replace(part, data=part.data[0], scales=scales)
        yield replace(part, shape=weight.shape[1:])
