"""`Storage`: the layout of a module's matrix in a quantized checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from engine.weights import FORMATS, Format

__all__ = ["Storage", "group_format"]

_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Storage:
    """The layout of a module's matrix, and the format in which its rows are read.

    Attributes
    ----------
    layout : str
        Set of tensors: "packed" (compressed-tensors' words of whole numbers), "int8", "fp8",
        "mxfp4", "gptq" or "awq".
    format : Format
        Format of the rows read. Stored groups may be multiples of its groups; scales are then
        repeated.
    bits : int
        Bits of a stored number.
    group_size : int
        Stored numbers of a row that share a scale; 0 for the whole row.
    block : (int, int) or None
        Rows and columns of a block of "fp8" that shares a scale.
    symmetric : bool
        Whether groups have no zero points.
    act_order : bool
        Whether, by the configuration, the columns of a group are not consecutive. (The tensors
        decide.)
    zero_minus_one : bool
        Whether zero points are stored minus 1.
    activations : str
        Quantization of activations that the checkpoint was made for: "" (none), "dynamic" (a scale
        per token) or "static" (a stored scale). The engine follows the format instead: packed
        formats leave activations in 16 bits, others quantize them per token, which is no less exact
        than a stored scale.

    Examples
    --------
    >>> group_format(4, 256, symmetric=False).name, group_format(4, 96, symmetric=True).name
    ('int4_g128_zp', 'int4_g32')
    """

    layout: str
    format: Format
    bits: int = 8
    group_size: int = 0
    block: tuple[int, int] | None = None
    symmetric: bool = True
    act_order: bool = False
    zero_minus_one: bool = False
    activations: str = ""


def group_format(bits: int, group_size: int, *, symmetric: bool) -> Format | None:
    """Return the format with the largest groups that divide `group_size` (0: a whole row).

    None if no such format exists.
    """
    if bits not in (4, 8):
        return None
    group = next((one for one in _GROUPS if group_size % one == 0), None)
    return FORMATS.get(f"int{bits}_g{group}{'' if symmetric else '_zp'}")
