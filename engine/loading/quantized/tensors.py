"""Checked access to one quantized module's tensors, and validation of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engine.checks import shown
from engine.errors import WeightsError
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.storage import Storage
from engine.loading.quantized.unpack import as_signed
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile
from engine.weights import Format
from engine.weights.values import E8M0

__all__ = ["SCALE_DTYPES", "ModuleTensors", "check_columns", "check_scales", "column_order"]
__all__ += ["grouped_rows", "spread_groups"]

Array = np.ndarray[Any, Any]
Checkpoint = SafetensorsFile | SafetensorsDirectory

SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors "<module>.<kind>" of one module of a checkpoint."""

    checkpoint: Checkpoint
    module: str

    def name(self, kind: str) -> str:
        """Return the full name of tensor `kind`."""
        return f"{self.module}.{kind}"

    def has(self, kind: str) -> bool:
        """Tell whether tensor `kind` exists."""
        return self.name(kind) in self.checkpoint

    def dtype(self, kind: str) -> str:
        """Return the dtype of the existing tensor `kind`."""
        return self.checkpoint.dtype(self.name(kind))

    def shape(self, kind: str) -> tuple[int, ...]:
        """Return the shape of the existing tensor `kind`."""
        return self.checkpoint.shape(self.name(kind))

    def error(self, kind: str, message: str) -> WeightsError:
        """Return an error about tensor `kind`."""
        return WeightsError(f"{self.checkpoint.path}: tensor {shown(self.name(kind))} {message}")

    def view(
        self,
        kind: str,
        dtypes: Sequence[str],
        *shapes: tuple[int, ...],
    ) -> Array:
        """Return tensor `kind`, which must have one of the dtypes and, if given, one of the shapes.

        Raises
        ------
        WeightsError
            If it is missing, or has another dtype or shape.
        """
        if not self.has(kind):
            raise self.error(kind, f"is missing; other tensors of {shown(self.module)} need it")
        if (dtype := self.dtype(kind)) not in dtypes:
            raise self.error(kind, f"must be one of {', '.join(dtypes)}; got {dtype}")
        shape = self.shape(kind)
        if shapes and shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise self.error(kind, f"must have shape {wanted}; got {shape}")
        return self.checkpoint.view(self.name(kind))

    def matrix(self, kind: str, dtypes: Sequence[str]) -> Array:
        """Return tensor `kind`, which must be a non-empty matrix."""
        view = self.view(kind, dtypes)
        if view.ndim != 2 or min(view.shape) < 1:
            raise self.error(kind, f"must be a matrix; got shape {view.shape}")
        return view


def check_columns(
    tensors: ModuleTensors, kind: str, columns: tuple[int, int] | None, width: int, step: int
) -> tuple[int, int]:
    """Return the checked range `columns`; None means all columns.

    Raises
    ------
    WeightsError
        If the range begins or ends inside a group of `step` columns.
    """
    first, last = columns or (0, width)
    if not 0 <= first < last <= width:
        raise tensors.error(kind, f"has {width} columns; got the range [{first}, {last})")
    if first % step or (last % step and last != width):
        raise tensors.error(
            kind,
            f"has scales for groups of {step} columns, which cannot be divided; got the range "
            f"[{first}, {last}) of {width}. Use fewer shards",
        )
    return first, last


def spread_groups(values: Array, stored: int, form: Format, columns: tuple[int, int]) -> Array:
    """Repeat the value of each stored group for the format's groups inside it.

    Parameters
    ----------
    values : (n, G) array
        One per stored group.
    stored : int
        Columns per stored group, a multiple of the format's group size; 0 for the whole row.
    form : Format
    columns : (int, int)
        [first, last), whole groups of the format.
    """
    first, last = columns
    starts = np.arange(first, last, form.group)
    return np.ascontiguousarray(values[:, starts // stored if stored else np.zeros_like(starts)])


def grouped_rows(
    storage: Storage,
    codes: Array,
    scales: Array,
    zeros: Array | None,
    columns: tuple[int, int],
    order: Array | None = None,
) -> QuantizedRows:
    """Return rows in the format of `storage`.

    Parameters
    ----------
    storage : Storage
    codes : (n, K) array of uint8
        Codes of the matrix's range `columns`.
    scales, zeros : (n, G) array
        One per stored group; `zeros` is None for symmetric groups.
    columns : (int, int)
        [first, last), whole groups of the format.
    order : (K,) array of int32, optional
        Column order that makes groups contiguous.
    """
    form = storage.format
    if order is not None:
        codes = np.take(codes, order, axis=1)  # C-contiguous, unlike codes[:, order]
    spread = partial(spread_groups, stored=storage.group_size, form=form, columns=columns)
    return QuantizedRows(
        form,
        as_signed(codes) if storage.bits == 8 else codes,
        spread(scales),
        None if zeros is None else spread(zeros),
        permutation=order,
    )


def column_order(
    tensors: ModuleTensors, kind: str, g_idx: Array, stored: int, groups: int
) -> Array | None:
    """Return the column order that makes act-order groups contiguous; None if they already are.

    Parameters
    ----------
    tensors, kind : ModuleTensors, str
        The tensor holding `g_idx`, for messages.
    g_idx : (K,) array of int32
        The group of each column.
    stored : int
        Columns per stored group; 0 for the whole row.
    groups : int
        Number of groups.

    Raises
    ------
    WeightsError
        If a group index is out of range, or a group's size differs from the configuration's.
    """
    wrong = (g_idx < 0) | (g_idx >= groups)
    if wrong.any():
        column = int(np.flatnonzero(wrong)[0])
        raise tensors.error(
            kind, f"must be in [0, {groups}); got {g_idx[column]} (column {column})"
        )
    size = stored or len(g_idx)
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


def check_scales(tensors: ModuleTensors, kind: str, rows: QuantizedRows) -> QuantizedRows:
    """Check the scales of `rows`, read from tensor `kind`; return `rows`.

    A scale may be 0 only if all codes of its group represent 0. Otherwise the file is damaged, or
    the scale underflowed and the group's numbers are lost.

    Raises
    ------
    WeightsError
        If a scale is NaN, infinite, or 0 with codes that do not represent 0.
    """
    scales = E8M0[rows.scales] if rows.scales.dtype == np.uint8 else rows.scales
    finite = np.isfinite(scales)
    if not finite.all():
        row, group = np.argwhere(~finite)[0]
        got = float(scales[row, group])
        raise tensors.error(kind, f"must have finite scales; got {got} (row {row}, group {group})")
    zeros = scales == 0
    if zeros.any() and (lost := _lost_groups(rows, zeros)).any():
        row, group = np.argwhere(lost)[0]
        raise tensors.error(
            kind,
            "may have a scale of 0 only for a group of zeros; got 0 for others "
            f"(row {row}, group {group})",
        )
    return rows


def _lost_groups(rows: QuantizedRows, zeros: Array) -> Array:
    """Return a mask of groups that have scale 0 but codes that do not all represent 0."""
    form = rows.format
    codes = rows.codes
    some = np.flatnonzero(zeros.any(axis=1))
    codes = codes[some]
    zeros = zeros[some]
    zero_codes: Any = form.zero
    if form.code in ("e4m3", "e2m1"):
        codes = codes & (0x7F if form.bits == 8 else 7)
        zero_codes = 0
    elif rows.offsets is not None:
        width = codes.shape[1]
        zero_codes = np.repeat(rows.offsets[some], form.group, axis=1)[:, :width]
    others = codes != zero_codes
    starts = np.arange(0, codes.shape[1], form.group) if form.group else [0]
    lost = np.zeros((rows.shape[0], zeros.shape[1]), bool)
    lost[some] = np.logical_or.reduceat(others, starts, axis=1) & zeros
    return lost
