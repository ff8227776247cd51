"""RMSNorm with 8-bit results: `cuda_src/quantize_rows/`, `reference/rmsnorm_quantize.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels import _cpu
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._quantize import CODES, checked_group, new_codes, rows_are_aligned
from engine.kernels.quantize_rows import quantize_rows
from engine.kernels.quantize_rows import specs as rows_specs
from engine.kernels.rmsnorm import choose_config, rmsnorm
from engine.kernels.rmsnorm import specs as rmsnorm_specs

__all__ = ["REGISTER_WARPS", "rmsnorm_quantize", "specs"]

_PARAMS = (
    "x:ptr residual:ptr weight:ptr residual_out:ptr normed_out:ptr codes:ptr scales:ptr "
    "x_stride:i64 n:i32 group:i32 eps:f32 weight_offset:f32 x_scale:f32"
)
# Size of the rmsnorm kernel that keeps a row in registers -> warps per row.
REGISTER_WARPS = {"1": 1, "2": 2, "4": 4, "8": 8, "16": 8, "32": 16}
_KERNELS = {
    (dtype, size): Kernel(
        f"rmsnorm_quantize_{dtype}_{size}", _PARAMS, struct="RmsnormQuantizeParams"
    )
    for dtype in CODES
    for size in REGISTER_WARPS
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    own = ModuleSpec("quantize_rows/rmsnorm_quantize.cu", dtype)
    return (own, *rmsnorm_specs(dtype), *rows_specs(dtype))


def rmsnorm_quantize(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    residual: Any = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    dtype: str = "fp8",
    group: int = 0,
    normed_out: Any = None,
    residual_out: Any = None,
) -> Any:
    """Normalise rows by their root mean square, and quantize the result to 8 bits.

    Parameters
    ----------
    x : (M, N) array of float32, float16 or bfloat16
        The rows may be strided (a view).
    weight, eps, residual, x_scale, weight_offset, residual_out
        See `rmsnorm`.
    dtype, group
        See `quantize_rows`.
    normed_out : (M, N) array of x's dtype, optional
        Array for the normalised rows, which otherwise are not written; may be `x`.

    Returns
    -------
    codes : (M, N) array of uint8 (bits of e4m3) or int8
    scales : (M, 1) or (M, ceil(N / 128)) array of float32
    h : (M, N) array of x's dtype
        ``x_scale · x + residual``; returned only if `residual` is given.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Equals ``quantize_rows(rmsnorm(x, ...))``, bit for bit. Rows that are 16-byte aligned and at
    most 32 KiB take one launch, others two.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[3.0, 4.0]], np.float32)
    >>> codes, scales = rmsnorm_quantize(x, np.ones(2, np.float32), dtype="int8", eps=0.0)
    >>> codes, (codes * scales).round(2)
    (array([[ 95, 127]], dtype=int8), array([[0.85, 1.13]], dtype=float32))
    """
    call = Contract("rmsnorm_quantize")
    x = call.array("x", x, "M N", FLOATS, layout="rows")
    weight = call.array("weight", weight, "N", x.dtype)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    call.number("x_scale", x_scale)
    call.check("x_scale", residual is not None or x_scale == 1.0, "1 without residual", x_scale)
    call.check("residual_out", residual is not None or residual_out is None, "None", residual_out)
    group = checked_group(call, dtype, group)
    if residual is not None:
        residual = call.array("residual", residual, "M N", x.dtype)
    numbers: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "x_scale": x_scale}
    if call.on_cpu:
        normed = _cpu.rmsnorm(x, weight, residual=residual, **numbers)
        y, *sums = (normed,) if residual is None else normed
        targets = [call.target(residual_out, h, "residual_out") for h in sums]
        call.finish(normed_out, y, "normed_out")
        coded = reference.quantize_rows(y, dtype=dtype, group=group)
        return (*coded, *(call.fill(to, h) for to, h in zip(targets, sums, strict=True)))
    arrays = [x, weight, *(() if residual is None else (residual,))]
    if normed_out is not None:
        arrays.append(call.output("normed_out", normed_out, x.shape, x.dtype))
    h = None
    if residual is not None:
        h = call.output("residual_out", residual_out, x.shape, x.dtype)
        arrays.append(h)
    n = x.shape[1]
    is_aligned = all(rows_are_aligned(a, n) for a in arrays)
    config = choose_config(n, x.itemsize, is_aligned=is_aligned)
    size = config.kernel.removeprefix("registers_")
    if size in REGISTER_WARPS:
        codes, scales = new_codes(call, x.shape[0], n, dtype, group)
        _launch(
            (dtype, size),
            (x, residual, weight, h, normed_out),
            codes,
            scales,
            group=group if n else 0,
            **numbers,
        )
    else:
        y = rmsnorm(x, weight, residual=residual, out=normed_out, residual_out=h, **numbers)
        codes, scales = quantize_rows(y if h is None else y[0], dtype=dtype, group=group)
    return (codes, scales) if h is None else (codes, scales, h)


def _launch(
    kernel: tuple[str, str], arrays: tuple[Any, ...], codes: Any, scales: Any, **numbers: Any
) -> None:
    x, residual, weight, h, normed_out = arrays
    _KERNELS[kernel].launch(
        ModuleSpec("quantize_rows/rmsnorm_quantize.cu", dtype_name(x.dtype)),
        (x.shape[0],),
        (REGISTER_WARPS[kernel[1]] * 32,),
        pdl=True,
        x=x,
        residual=residual,
        weight=weight,
        residual_out=h,
        normed_out=normed_out,
        codes=codes,
        scales=scales,
        x_stride=x.strides[0] // x.itemsize,
        n=x.shape[1],
        **numbers,
    )
