"""How the matrices of some modules are stored in a quantized checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from engine.weights import FORMATS, Format

__all__ = ["Storage", "group_format"]

_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Storage:
    """How a module's matrix is stored, and in which format its rows are read.

    Attributes
    ----------
    layout : str
        Which tensors there are: "packed" (compressed-tensors' words of whole numbers), "int8",
        "fp8", "mxfp4", "gptq" or "awq".
    format : Format
        The format of the rows. Stored groups may be multiples of its groups; a scale then appears
        several times.
    bits : int
        Bits of a stored number.
    group_size : int
        Stored numbers of a row that share a scale; 0 if all of them do.
    block : (int, int) or None
        Rows and columns of a block of "fp8" with one scale.
    symmetric : bool
        Whether there are no zero points.
    act_order : bool
        Whether the configuration says that groups are not of consecutive columns (the tensors
        decide).
    zero_minus_one : bool
        Whether stored zero points are too small by 1.
    activations : str
        What the checkpoint was made for: "" (activations are not quantized), "dynamic" (with a
        scale per token) or "static" (with a stored scale). The format decides what is done: packed
        formats leave them in 16 bits, and the others quantize them per token, which is no less
        exact than a stored scale.

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

    None if there is none.
    """
    if bits not in (4, 8):
        return None
    group = next((one for one in _GROUPS if group_size % one == 0), None)
    return FORMATS.get(f"int{bits}_g{group}{'' if symmetric else '_zp'}")
