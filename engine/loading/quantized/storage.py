"""`Storage`: the layout of a module's matrix in a quantized checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from engine.weights import FORMATS, Format

__all__ = ["Storage", "group_format"]

_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Storage:
    """Layout of a module's matrix in the file, and the format of the rows read from it.

    Attributes
    ----------
    layout : str
        Tensor layout: "packed" (compressed-tensors' integers packed in words), "int8", "fp8",
        "mxfp4", "gptq", "awq", or BitNet's "bitlinear" and "autobitlinear".
    format : Format
        Format of the rows read. Stored groups may be larger, a multiple of its groups; their scales
        are then repeated.
    bits : int
        Bits per stored number.
    group_size : int
        Stored numbers per scale along a row; 0 for one scale per row.
    block : (int, int) or None
        Rows and columns per scale of block-scaled "fp8".
    symmetric : bool
        True if groups have no zero points.
    act_order : bool
        Whether the configuration declares act-order (columns of a group not consecutive). The
        tensors have the last word.
    zero_minus_one : bool
        Whether zero points are stored minus 1.
    activations : str
        Activation quantization that the checkpoint was calibrated for: "" (none), "dynamic" (one
        scale per token) or "static" (a stored scale). The engine follows the format instead: packed
        formats keep 16-bit activations; others quantize per token, at least as precise as a stored
        scale.

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
