"""Shared code of the elementwise ops: alignment, strides in elements, launches.

A "flat" kernel maps n elements, in 16-byte vectors with a scalar tail
(`cuda_src/common/elementwise.cuh`). A "gated" kernel maps packed rows [gate | up].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = [
    "FLAT_THREADS",
    "GATED_PARAMS",
    "MAX_GRID_Y",
    "ROW_THREADS",
    "UNARY_PARAMS",
    "element_strides",
    "gated",
    "gated_backward",
    "gated_backward_kernels",
    "is_aligned",
    "is_large",
    "launch_flat",
    "launch_gated",
    "named_strides",
    "unary",
    "vector_width",
]

VECTOR_BYTES = 16
FLAT_THREADS = 256
ROW_THREADS = 128
# Results of this many bytes or more are evicted from L2 before they are read. Tuned with
# `python -m tests.bench rope embedding merge_states` on an H200 (50 MB of L2).
_LARGE_BYTES = 32 << 20
MAX_GRID_Y = 65535  # CUDA's limit in blocks; with more rows, kernels loop

_GATED_BACKWARD_PARAMS = (
    "dout:ptr x:ptr dx:ptr num_rows:i64 num_features:i32 dout_stride:i64 x_stride:i64 dx_stride:i64"
)
UNARY_PARAMS = "x:ptr out:ptr num_vectors:i64 n:i64"
GATED_PARAMS = (
    "gate:ptr up:ptr out:ptr num_rows:i64 num_features:i32 gate_stride:i64 up_stride:i64 "
    "out_stride:i64"
)


def vector_width(array: Any) -> int:
    """Return the array's elements per 16-byte vector."""
    return VECTOR_BYTES // int(array.itemsize)


def element_strides(array: Any) -> tuple[int, ...]:
    """Return the array's strides in elements."""
    return tuple(stride // array.itemsize for stride in array.strides)


def named_strides(axes: str, **arrays: Any) -> dict[str, Any]:
    """Return the strides of the leading axes in elements, by kernel parameter name.

    Examples
    --------
    >>> import numpy as np
    >>> named_strides("th", q=np.zeros((2, 3, 4)))
    {'q_stride_t': 12, 'q_stride_h': 4}
    """
    return {
        f"{name}_stride_{axis}": stride
        for name, array in arrays.items()
        for axis, stride in zip(axes, element_strides(array), strict=False)
    }


def is_aligned(*arrays: Any) -> bool:
    """Tell whether every row of the CuPy arrays starts at a multiple of 16 bytes."""
    return all(step % VECTOR_BYTES == 0 for a in arrays for step in (a.data.ptr, *a.strides[:-1]))


def is_large(*outputs: Any) -> int:
    """Return 1 if L2 evicts some of the results before they are read, else 0."""
    return int(sum(array.nbytes for array in outputs) >= _LARGE_BYTES)


def launch_flat(
    kernel: Kernel, spec: ModuleSpec, others: Mapping[str, Any] | None = None, **arrays: Any
) -> None:
    """Launch a flat kernel on C-contiguous arrays of equal size, given by parameter name.

    `others` are arguments that every element reads.
    """
    n = next(iter(arrays.values())).size
    width = vector_width(next(iter(arrays.values())))
    aligned = all(a.data.ptr % VECTOR_BYTES == 0 for a in arrays.values())
    num_vectors = n // width if aligned else 0
    num_threads = num_vectors + n - num_vectors * width
    grid = (ceil_div(num_threads, FLAT_THREADS),)
    others = others or {}
    kernel.launch(spec, grid, (FLAT_THREADS,), num_vectors=num_vectors, n=n, **others, **arrays)


def unary(
    call: Contract, kernel: Kernel, file: str, mirror: Callable[[Any], Any], x: Any, out: Any
) -> Any:
    """Check x, then run `mirror` (NumPy) or launch `kernel` (CuPy)."""
    x = call.array("x", x, "*", MIRROR_FLOATS)
    if call.on_cpu:
        return call.finish(out, mirror(x))
    out = call.output("out", out, x.shape, x.dtype)
    launch_flat(kernel, ModuleSpec(file, dtype_name(x.dtype)), x=x, out=out)
    return out


def gated(
    call: Contract,
    kernels: dict[str, Kernel],
    file: str,
    mirror: Callable[..., Any],
    x: Any,
    out: Any,
    up: Any = None,
) -> Any:
    """Check rows [gate | up], then run `mirror` (NumPy) or launch one of `kernels` (CuPy).

    `kernels` maps "vector" and "scalar" to the kernel of that access width. With an `up`, `x` is
    the gate alone, and `mirror` takes both.
    """
    x = call.array("x", x, "* 2F" if up is None else "* F", MIRROR_FLOATS, layout="rows")
    shape = x.shape
    if up is None:
        call.check("x", x.shape[-1] % 2 == 0, "of even length along its last axis", x.shape)
        shape = (*x.shape[:-1], x.shape[-1] // 2)
    else:
        up = call.array("up", up, " ".join(map(str, shape)), x.dtype, layout="rows")
    layout = "rows" if len(shape) == 2 else "C"
    if call.on_cpu:
        return call.finish(out, mirror(x) if up is None else mirror(x, up=up), layout=layout)
    out = call.output("out", out, shape, x.dtype, layout=layout)
    num_rows = math.prod(shape[:-1])
    f = shape[-1]
    rows = x.reshape(num_rows, x.shape[-1])
    factor = rows[:, f:] if up is None else up.reshape(num_rows, f)
    launch_gated(kernels, file, gate=rows[:, :f], up=factor, out=out.reshape(num_rows, f))
    return out


def launch_gated(
    kernels: dict[str, Kernel], file: str, *, gate: Any, up: Any, out: Any, head_dim: int = 0
) -> None:
    """Launch one of a gated op's `kernels` on rows (T, F), each array with its own row stride.

    With a `head_dim`, each element of `gate` (T, F / head_dim) is for that many features.
    """
    num_rows, f = up.shape
    width = vector_width(gate)
    if head_dim:
        fits = head_dim % width == 0 and is_aligned(up, out)
    else:
        fits = f % width == 0 and is_aligned(gate, up, out)
    items = f // width if fits else f
    kernels["vector" if fits else "scalar"].launch(
        ModuleSpec(file, dtype_name(gate.dtype)),
        (ceil_div(items, ROW_THREADS), min(num_rows, MAX_GRID_Y)),
        (ROW_THREADS,),
        pdl=True,
        gate=gate,
        up=up,
        out=out,
        num_rows=num_rows,
        num_features=f,
        gate_stride=element_strides(gate)[0],
        up_stride=element_strides(up)[0],
        out_stride=element_strides(out)[0],
        **({"head_dim": head_dim} if head_dim else {}),
    )


def gated_backward_kernels(prefix: str) -> dict[str, Kernel]:
    """Return the kernels `prefix`_vector and `prefix`_scalar of a gated op's gradient."""
    return {
        width: Kernel(f"{prefix}_{width}", _GATED_BACKWARD_PARAMS, struct="GatedBackwardParams")
        for width in ("vector", "scalar")
    }


def gated_backward(
    call: Contract,
    kernels: dict[str, Kernel],
    file: str,
    mirror: Callable[[Any, Any], Any],
    dout: Any,
    x: Any,
    out: Any,
) -> Any:
    """Check dout and rows [gate | up], then run `mirror` or launch a kernel. See `gated`."""
    layout = "rows" if getattr(x, "ndim", 2) == 2 else "C"
    x = call.array("x", x, "* 2F", MIRROR_FLOATS, layout=layout)
    call.check("x", x.shape[-1] % 2 == 0, "of even length along its last axis", x.shape)
    f = x.shape[-1] // 2
    shape = " ".join(map(str, (*x.shape[:-1], f)))
    dout = call.array("dout", dout, shape, x.dtype, layout=layout)
    if call.on_cpu:
        return call.finish(out, mirror(dout, x), layout=layout)
    dx = call.output("out", out, x.shape, x.dtype, layout=layout)
    num_rows = math.prod(x.shape[:-1])
    rows = {
        "dout": dout.reshape(num_rows, f),
        "x": x.reshape(num_rows, 2 * f),
        "dx": dx.reshape(num_rows, 2 * f),
    }
    fits = f % vector_width(x) == 0 and is_aligned(*rows.values())
    items = f // vector_width(x) if fits else f
    kernels["vector" if fits else "scalar"].launch(
        ModuleSpec(file, dtype_name(x.dtype)),
        (ceil_div(items, ROW_THREADS), min(num_rows, MAX_GRID_Y)),
        (ROW_THREADS,),
        pdl=True,
        **rows,
        num_rows=num_rows,
        num_features=f,
        **{f"{name}_stride": element_strides(array)[0] for name, array in rows.items()},
    )
    return dx
