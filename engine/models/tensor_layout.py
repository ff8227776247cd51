"""`Layout`: storage of a layer's matrices in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Layout"]

_MXFP4_BLOCK = 32


@dataclass(frozen=True)
class Layout:
    """Storage of one matrix, (rows, columns), or of all experts' matrices, (E, rows, columns).

    Attributes
    ----------
    transposed : bool
        Stored as (columns, rows) or (E, columns, rows). A bias (E, rows) counts as transposed, with
        one column; so does a vector that is stored as one row.
    interleaved : bool
        Rows of gate and up alternate, gate first. Otherwise gate is the first half of the rows.
    mxfp4 : bool
        Stored as two tensors: "<...>_blocks" (E, rows, columns / 32, 16), two values per byte, and
        "<...>_scales" (E, rows, columns / 32), exponents.

    Examples
    --------
    >>> Layout(transposed=True).shape((2, 6, 64)), Layout(mxfp4=True).shape((2, 6, 64))
    ((2, 64, 6), (2, 6, 2, 16))
    """

    transposed: bool = False
    interleaved: bool = False
    mxfp4: bool = False

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, given the weight's: (E, rows, columns) or (E, rows)."""
        if len(logical) < 3:
            return logical
        experts, rows, columns = logical
        if self.mxfp4:
            return experts, rows, -(-columns // _MXFP4_BLOCK), _MXFP4_BLOCK // 2
        return (experts, columns, rows) if self.transposed else logical

    def companions(self, name: str, logical: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors that must be read together with tensor `name`."""
        if not self.mxfp4:
            return {}
        return {scales_name(name): self.shape(logical)[:3]}


def scales_name(blocks: str) -> str:
    """Return the name of the scales of tensor `blocks`.

    Examples
    --------
    >>> scales_name("experts.down_proj_blocks")
    'experts.down_proj_scales'
    """
    return f"{blocks.removesuffix('_blocks')}_scales"


ROWS = Layout()
"""The engine's own layout: rows of output features, gate's before up's."""
