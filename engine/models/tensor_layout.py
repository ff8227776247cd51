"""How a checkpoint lays out the matrices of a layer's experts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Layout"]

_MXFP4_BLOCK = 32


@dataclass(frozen=True)
class Layout:
    """How one tensor with the matrices (E, rows, columns) of all experts is stored.

    Attributes
    ----------
    transposed : bool
        As (E, columns, rows). A bias (E, rows) counts as transposed, with one column.
    interleaved : bool
        Rows of gate and up alternate, gate first. Otherwise gate has the first half of the rows.
    mxfp4 : bool
        As two tensors: "<...>_blocks" (E, rows, columns / 32, 16) of bytes with two numbers each,
        and "<...>_scales" (E, rows, columns / 32) of exponents.

    Examples
    --------
    >>> Layout(transposed=True).shape((2, 6, 64)), Layout(mxfp4=True).shape((2, 6, 64))
    ((2, 64, 6), (2, 6, 2, 16))
    """

    transposed: bool = False
    interleaved: bool = False
    mxfp4: bool = False

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, for the weight's shape (E, rows, columns) or (E, rows)."""
        if len(logical) < 3:
            return logical
        experts, rows, columns = logical
        if self.mxfp4:
            return experts, rows, -(-columns // _MXFP4_BLOCK), _MXFP4_BLOCK // 2
        return (experts, columns, rows) if self.transposed else logical

    def companions(self, name: str, logical: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the tensors that are read together with tensor `name`."""
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
