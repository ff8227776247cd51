"""Sum of each token's expert outputs, and the norm after it: `cuda_src/moe_combine_rmsnorm.cu`.

The mirror is `reference/moe_combine_rmsnorm.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels import _cpu
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._quantize import CODES, checked_group, new_codes, rows_are_aligned
from engine.kernels.moe_combine import moe_combine
from engine.kernels.moe_combine import specs as combine_specs
from engine.kernels.rmsnorm import choose_config, rmsnorm
from engine.kernels.rmsnorm_quantize import REGISTER_WARPS, rmsnorm_quantize
from engine.kernels.rmsnorm_quantize import specs as norm_specs

__all__ = ["moe_combine_rmsnorm", "specs"]

_ARRAYS = "pairs:ptr residual:ptr weight:ptr residual_out:ptr"
_PLAIN = {
    size: Kernel(
        f"moe_combine_rmsnorm_{size}",
        f"{_ARRAYS} y:ptr top_k:i32 n:i32 eps:f32 weight_offset:f32 is_late:i32",
    )
    for size in REGISTER_WARPS
}
_CODED = {
    (dtype, size): Kernel(
        f"moe_combine_rmsnorm_{dtype}_{size}",
        f"{_ARRAYS} codes:ptr scales:ptr top_k:i32 n:i32 group:i32 eps:f32 weight_offset:f32",
    )
    for dtype in CODES
    for size in REGISTER_WARPS
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    own = ModuleSpec("moe_combine_rmsnorm.cu", dtype)
    return (own, *combine_specs(dtype), *norm_specs(dtype))


def moe_combine_rmsnorm(
    pairs: Any,
    residual: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dtype: str | None = None,
    group: int = 0,
    is_late: bool = False,
    residual_out: Any = None,
) -> tuple[Any, ...]:
    """Sum the outputs of each token's experts, add them to the residual, and normalise.

    Parameters
    ----------
    pairs : (T, k, N) array of float32, float16 or bfloat16
        See `moe_combine`.
    residual : (T, N) array of pairs' dtype
    weight : (N,) array of pairs' dtype
    eps, weight_offset : float
        See `rmsnorm`.
    dtype, group : optional
        Quantize y: see `quantize_rows`.
    is_late : bool
        See `rmsnorm`; no effect with a `dtype`.
    residual_out : (T, N) array of pairs' dtype, optional
        Array for h; may be `residual`.

    Returns
    -------
    y : (T, N) array of pairs' dtype
        The normalised sum; with a `dtype` instead codes (T, N) of uint8 (bits of e4m3) or int8, and
        scales (T, 1) or (T, ceil(N / 128)) of float32.
    h : (T, N) array of pairs' dtype
        The sum of a token's outputs and the residual.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Equals `moe_combine`, then `rmsnorm` or `rmsnorm_quantize` with the residual, bit for bit. Rows
    that are 16-byte aligned and at most 32 KiB take one launch.

    Examples
    --------
    >>> import numpy as np
    >>> pairs = np.array([[[1.0, 2.0], [2.0, 2.0]]], np.float32)
    >>> ones = np.ones((1, 2), np.float32)
    >>> y, h = moe_combine_rmsnorm(pairs, ones, ones[0])
    >>> y.round(3), h
    (array([[0.883, 1.104]], dtype=float32), array([[4., 5.]], dtype=float32))
    """
    call = Contract("moe_combine_rmsnorm")
    pairs = call.array("pairs", pairs, "T k N", FLOATS)
    residual = call.array("residual", residual, "T N", pairs.dtype)
    weight = call.array("weight", weight, "N", pairs.dtype)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    group = checked_group(call, "fp8" if dtype is None else dtype, group)
    norm: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset}
    coded: dict[str, Any] = {"dtype": dtype, "group": group}
    if call.on_cpu:
        y, h = _cpu.rmsnorm(reference.moe_combine(pairs), weight, residual=residual, **norm)
        h = call.finish(residual_out, h, "residual_out")
        return (y, h) if dtype is None else (*reference.quantize_rows(y, **coded), h)
    h = call.output("residual_out", residual_out, residual.shape, pairs.dtype)
    n = call["N"]
    is_aligned = all(rows_are_aligned(one, n) for one in (pairs, residual, weight, h))
    config = choose_config(n, pairs.itemsize, is_aligned=is_aligned)
    size = config.kernel.removeprefix("registers_")
    if size not in REGISTER_WARPS:
        x = moe_combine(pairs)
        norm |= {"residual": residual, "residual_out": h}
        if dtype is None:
            return tuple(rmsnorm(x, weight, out=x, is_late=is_late, **norm))
        return tuple(rmsnorm_quantize(x, weight, **norm, **coded))
    arrays: dict[str, Any] = {
        "pairs": pairs,
        "residual": residual,
        "weight": weight,
        "residual_out": h,
    }
    tokens = call["T"]
    results: tuple[Any, ...]
    if dtype is None:
        kernel = _PLAIN[size]
        results = (call.output("y", None, residual.shape, pairs.dtype),)
        arrays["y"] = results[0]
        norm["is_late"] = is_late
    else:
        kernel = _CODED[dtype, size]
        results = new_codes(call, tokens, n, dtype, group)
        arrays |= zip(("codes", "scales"), results, strict=True)
        norm["group"] = group if n else 0
    kernel.launch(
        ModuleSpec("moe_combine_rmsnorm.cu", dtype_name(pairs.dtype)),
        (tokens,),
        (REGISTER_WARPS[size] * 32,),
        pdl=True,
        top_k=call["k"],
        n=n,
        **arrays,
        **norm,
    )
    return (*results, h)
