"""The order of columns in groups that are not of consecutive ones (act-order)."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.loading.quantized.storage import Storage
from engine.loading.quantized.tensors import ModuleTensors

__all__ = ["column_order"]

Array = np.ndarray[Any, Any]


def column_order(
    tensors: ModuleTensors, kind: str, g_idx: Array, storage: Storage, groups: int
) -> Array | None:
    """Return the order of columns that makes groups contiguous; None if they are.

    Parameters
    ----------
    tensors, kind : ModuleTensors, str
        Where `g_idx` is from, for messages.
    g_idx : (K,) array of int32
        The group of each column.
    storage : Storage
    groups : int
        How many groups there are.

    Raises
    ------
    WeightsError
        If a group is out of range, or has not as many columns as the configuration says.
    """
    wrong = (g_idx < 0) | (g_idx >= groups)
    if wrong.any():
        column = int(np.flatnonzero(wrong)[0])
        raise tensors.error(
            kind, f"must be in [0, {groups}); got {g_idx[column]} (column {column})"
        )
    size = storage.group_size or len(g_idx)
    consecutive = np.arange(len(g_idx)) // size
    if np.array_equal(g_idx, consecutive):
        return None
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], consecutive):
        counts = np.bincount(g_idx, minlength=groups)
        group = int(np.flatnonzero(counts != np.bincount(consecutive, minlength=groups))[0])
        raise tensors.error(
            kind,
            f"must name each group of {size} columns {size} times (the last one may be short); "
            f"got group {group} {counts[group]} times",
        )
    return order
