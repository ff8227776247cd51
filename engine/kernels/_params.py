"""The layout of a kernel's parameters as one C struct, passed by value.

A kernel with many parameters takes them as `const __grid_constant__ Params p`. The equivalent NumPy
struct is made here from the kernel's parameter list, by C's rules: each field at the next multiple
of its alignment, the size rounded up to the largest alignment. `tests/kernels/test_params.py`
checks each one against the CUDA struct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["TENSOR_MAP_BYTES", "struct_dtype"]

TENSOR_MAP_BYTES = 128

# Type of a parameter -> NumPy's type, alignment in bytes.
_FIELDS: dict[str, tuple[Any, int]] = {
    "ptr": (np.uint64, 8),
    "i32": (np.int32, 4),
    "i64": (np.int64, 8),
    "u32": (np.uint32, 4),
    "u64": (np.uint64, 8),
    "f32": (np.float32, 4),
    "f64": (np.float64, 8),
    "tmap": (np.dtype((np.void, TENSOR_MAP_BYTES)), 64),
}


def struct_dtype(names: Sequence[str], types: Sequence[str]) -> np.dtype[Any]:
    """Return the struct with these fields.

    Examples
    --------
    >>> struct = struct_dtype(["n", "x", "eps"], ["i32", "ptr", "f32"])
    >>> [struct.fields[name][1] for name in struct.names], struct.itemsize
    ([0, 8, 16], 24)
    """
    offsets, end, largest = [], 0, 1
    for kind in types:
        field, alignment = _FIELDS[kind]
        start = -(-end // alignment) * alignment
        offsets.append(start)
        end, largest = start + np.dtype(field).itemsize, max(largest, alignment)
    return np.dtype(
        {
            "names": list(names),
            "formats": [_FIELDS[kind][0] for kind in types],
            "offsets": offsets,
            "itemsize": -(-end // largest) * largest,
        }
    )
