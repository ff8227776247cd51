"""What is copied from one tensor of a checkpoint to one weight."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.family import WeightName
from engine.models.tensor_layout import ROWS, Layout

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """A copy of rows [first, last) of tensor `name` to rows of `target`, from `start` on.

    Rows of an array with more than two dimensions are those of all its matrices, in order.

    Attributes
    ----------
    name, target : str, WeightName
    shape : tuple of int
        Shape of the whole tensor.
    first, last, start : int
    columns : (int, int) or None
        The columns of these rows; None for all.
    is_rotated : bool
        Whether these are rows of q or k, to which rope applies.
    layout : Layout
        How the tensor stores the matrices of experts. `first`, `last` and `columns` count rows and
        columns of these matrices, whatever their layout; rows from the first expert to the last.
    """

    name: str
    target: WeightName
    shape: tuple[int, ...]
    first: int
    last: int
    start: int = 0
    columns: tuple[int, int] | None = None
    is_rotated: bool = False
    layout: Layout = ROWS

    @property
    def width(self) -> int:
        """Number of columns read per row."""
        if self.columns is not None:
            return self.columns[1] - self.columns[0]
        return self.shape[-1] if len(self.shape) > 1 else 1
