"""Shared code of the ops that quantize rows to 8 bits: checks, outputs, choice of kernel, launch.

The kernels in `cuda_src/quantize_rows/` keep a row in registers if it fits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels._contract import FLOAT32, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = [
    "CODES",
    "GROUP",
    "SIZES",
    "checked_group",
    "launch_rows",
    "new_codes",
    "num_scales",
    "row_kernel",
    "rows_are_aligned",
]

CODES: dict[str, np.dtype[Any]] = {"fp8": np.dtype(np.uint8), "int8": np.dtype(np.int8)}
"""Array dtype of codes, by the name of their format."""

GROUP = 128  # columns per scale in rows with several scales

# Size in an entry point's name -> (maximum 16-byte vectors per row, threads per block). The size
# "any" has no maximum.
SIZES = {"1": (128, 128), "4": (512, 256), "8": (1024, 256), "16": (2048, 512)}
_ANY_THREADS = 256


def checked_group(call: Contract, dtype: Any, group: Any) -> int:
    """Check the `dtype` of the codes and the `group` of columns per scale; return the group."""
    call.check("dtype", dtype in CODES, "'fp8' or 'int8'", dtype)
    wanted = f"0 or {GROUP}"
    size = call.integer("group", group, 0, GROUP, wanted)
    call.check("group", size in (0, GROUP), wanted, group)
    return size


def num_scales(n: int, group: int) -> int:
    """Return the number of scales per row of `n` columns.

    Examples
    --------
    >>> num_scales(300, 0), num_scales(300, 128)
    (1, 3)
    """
    return 1 if group == 0 else max(1, ceil_div(n, group))


def new_codes(call: Contract, m: int, n: int, dtype: str, group: int) -> tuple[Any, Any]:
    """Return new arrays for codes (m, n) and their scales."""
    codes = call.output("codes", None, (m, n), CODES[dtype])
    scales = call.output("scales", None, (m, num_scales(n, group)), FLOAT32)
    return codes, scales


def row_kernel(n: int, itemsize: int, *, is_aligned: bool) -> tuple[str, int]:
    """Return the size in the entry point's name for rows of `n` columns, and threads per block.

    Examples
    --------
    >>> row_kernel(4096, 2, is_aligned=True), row_kernel(4096, 2, is_aligned=False)
    (('4', 256), ('any', 256))
    """
    if is_aligned:
        for size, (vectors, threads) in SIZES.items():
            if n * itemsize <= 16 * vectors:
                return size, threads
    return "any", _ANY_THREADS


def launch_rows(
    kernels: dict[tuple[str, str], Kernel],
    spec: ModuleSpec,
    x: Any,
    codes: Any,
    scales: Any,
    dtype: str,
    group: int,
    **more: Any,
) -> None:
    """Launch the kernel for this dtype and row size; it writes codes and scales."""
    m, n = codes.shape
    size, threads = row_kernel(n, x.itemsize, is_aligned=rows_are_aligned(x, n))
    kernels[dtype, size].launch(
        spec,
        (m,),
        (threads,),
        pdl=True,
        x=x,
        x_stride=x.strides[0] // x.itemsize,
        codes=codes,
        scales=scales,
        n=n,
        group=group if n else 0,  # an empty row has one scale, 0
        **more,
    )


def rows_are_aligned(x: Any, n: int) -> bool:
    """Tell whether 16-byte accesses can read rows of `n` columns and write their codes."""
    rows = x.strides[:-1] if x.shape[0] > 1 else ()
    steps = [x.data.ptr, n * x.itemsize, *rows]
    return all(step % 16 == 0 for step in steps)
