"""RMSNorm or LayerNorm with a fused residual add; `cuda_src/rmsnorm.cu`, `reference/rmsnorm.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.kernels import _cpu
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["Config", "choose_config", "rmsnorm", "specs"]
__all__ += ["are_rows_aligned", "row_layout"]

_PARAMS = (
    "x:ptr residual:ptr weight:ptr bias:ptr out:ptr residual_out:ptr num_rows:i64 n:i32 num_b:i32 "
    "x_stride_a:i64 x_stride_b:i64 out_stride_a:i64 out_stride_b:i64 eps:f32 weight_offset:f32 "
    "x_scale:f32 is_late:i32"
)
# Kernels that keep a row in registers: maximum row length in KiB -> threads per block; tuned with
# `python -m tests.bench rmsnorm`.
_REGISTER_ROWS = {1: 128, 2: 64, 4: 128, 8: 256, 16: 256, 32: 512}
_KERNELS = {
    name: Kernel(f"rmsnorm_{name}", _PARAMS, struct="RmsnormParams")
    for name in (
        *(f"registers_{size}" for size in _REGISTER_ROWS),
        "long_vector",
        "warp_scalar",
        "long_scalar",
    )
}


@dataclass(frozen=True)
class Config:
    """Entry point (without "rmsnorm_"), threads per block and rows per block."""

    kernel: str
    threads: int
    rows_per_block: int


def specs(
    dtype: str, *, subtract_mean: bool = False, patterns: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules for RMSNorm, for LayerNorm (`subtract_mean`), or both (`patterns`)."""
    kinds = (False, True) if patterns else (subtract_mean,)
    return tuple(_spec(dtype, kind) for kind in kinds)


def _spec(dtype: str, subtract_mean: bool) -> ModuleSpec:
    return ModuleSpec("rmsnorm.cu", dtype, (("CENTRED", 1),) if subtract_mean else ())


def choose_config(n: int, itemsize: int, *, is_aligned: bool) -> Config:
    """Choose the kernel for rows of `n` features; `is_aligned` allows 16-byte accesses.

    Examples
    --------
    >>> choose_config(4096, 2, is_aligned=True)
    Config(kernel='registers_8', threads=256, rows_per_block=1)
    """
    if not is_aligned:
        return Config("warp_scalar", 128, 4) if n <= 512 else Config("long_scalar", 256, 1)
    for size, threads in _REGISTER_ROWS.items():
        if n * itemsize <= 1024 * size:
            return Config(f"registers_{size}", threads, 4 if size == 1 else 1)
    return Config("long_vector", 256, 1)


def rmsnorm(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    residual: Any = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    subtract_mean: bool = False,
    bias: Any = None,
    out: Any = None,
    residual_out: Any = None,
    is_late: bool = False,
) -> Any:
    """Normalise the last axis by its root mean square, or to mean 0 and variance 1 (LayerNorm).

    Parameters
    ----------
    x : (..., N) array of float32, float16 or bfloat16 (NumPy: or float64)
        If its rows are strided (a view), at most three axes.
    weight : (N,) array of x's dtype
    eps : float
        Added to the mean square.
    residual : (..., N) array of x's dtype, optional
        Added to `x` first; the sum is rounded to x's dtype.
    x_scale : float
        Factor on `x` in that sum (Granite's residual multiplier); must be 1 without `residual`.
    weight_offset : float
        Added to `weight` (Gemma stores w - 1).
    subtract_mean : bool
        Subtract the row's mean before everything else, as in LayerNorm.
    bias : (N,) array of x's dtype, optional
        Added last; only with `subtract_mean`.
    out, residual_out : (..., N) array of x's dtype, optional
        Arrays for the results; may be `x` and `residual`.
    is_late : bool
        Delay the next kernel's start on the stream until the kernel before this one has ended. The
        result is the same; a GEMM with a packed weight that follows is faster.

    Returns
    -------
    y : (..., N) array of x's dtype
    h : (..., N) array of x's dtype
        ``x_scale · x + residual``; returned only if `residual` is given.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    y = h / sqrt(mean(h²) + eps) · (weight + weight_offset), in float32, rounded once [1]_.
    `subtract_mean` replaces h by h - mean(h) in this formula, and `bias` is added before the
    rounding [2]_. h is computed in float32 too, and rounded once.

    References
    ----------
    .. [1] Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.
    .. [2] Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[3.0, 4.0]], np.float32)
    >>> rmsnorm(x, np.ones(2, np.float32), eps=0.0).round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    call = Contract("rmsnorm")
    x = call.array("x", x, "* N", MIRROR_FLOATS, layout="rows")
    weight = call.array("weight", weight, "N", x.dtype)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    call.number("x_scale", x_scale)
    call.check("x_scale", residual is not None or x_scale == 1.0, "1 without residual", x_scale)
    call.check("residual_out", residual is not None or residual_out is None, "None", residual_out)
    call.check("bias", subtract_mean or bias is None, "None without subtract_mean", "an array")
    if bias is not None:
        bias = call.array("bias", bias, "N", x.dtype)
    shape = " ".join(map(str, x.shape))
    if residual is not None:
        residual = call.array("residual", residual, shape, x.dtype)
    layout = "rows" if x.ndim <= 3 else "C"
    numbers = {"eps": eps, "weight_offset": weight_offset, "x_scale": x_scale}
    if call.on_cpu:
        result = _cpu.rmsnorm(
            x, weight, residual=residual, subtract_mean=subtract_mean, bias=bias, **numbers
        )
        if residual is None:
            return call.finish(out, result, layout=layout)
        y, h = result
        y_to = call.target(out, y, layout=layout)
        h_to = call.target(residual_out, h, "residual_out")
        return call.fill(y_to, y), call.fill(h_to, h)
    y = call.output("out", out, x.shape, x.dtype, layout=layout)
    h = None
    if residual is not None:
        h = call.output("residual_out", residual_out, x.shape, x.dtype)
    spec = _spec(dtype_name(x.dtype), subtract_mean)
    _launch(spec, x, weight, residual, y, h, bias=bias, is_late=is_late, **numbers)
    return y if residual is None else (y, h)


def _launch(
    spec: ModuleSpec,
    x: Any,
    weight: Any,
    residual: Any,
    y: Any,
    h: Any,
    *,
    bias: Any,
    is_late: bool,
    **numbers: Any,
) -> None:
    n = x.shape[-1]
    if x.ndim > 3:
        x = x.reshape(-1, n)
        y = y.reshape(-1, n)
    aligned = are_rows_aligned(a for a in (x, weight, bias, residual, y, h) if a is not None)
    config = choose_config(n, x.itemsize, is_aligned=aligned)
    num_rows = x.size // n if n else 0
    _KERNELS[config.kernel].launch(
        spec,
        (ceil_div(num_rows, config.rows_per_block),),
        (config.threads,),
        pdl=True,
        x=x,
        residual=residual,
        weight=weight,
        bias=bias,
        out=y,
        residual_out=h,
        num_rows=num_rows,
        n=n,
        **row_layout(x=x, out=y),
        is_late=is_late,
        **numbers,
    )


def row_layout(**arrays: Any) -> dict[str, int]:
    """Return `num_b` and each array's strides in elements: the kernel's view (A, B, N) of its rows.

    The arrays have one shape, of at most three axes. B is 1 if the rows of each are evenly spaced,
    because the kernel divides by it.

    Examples
    --------
    >>> import numpy as np
    >>> row_layout(x=np.zeros((2, 3, 4)))
    {'num_b': 1, 'x_stride_a': 4, 'x_stride_b': 0}
    >>> row_layout(x=np.zeros((2, 5, 4))[:, :3])
    {'num_b': 3, 'x_stride_a': 20, 'x_stride_b': 4}
    """
    steps = {
        name: [stride // array.itemsize for stride in array.strides[:-1]]
        for name, array in arrays.items()
    }
    shape = next(iter(arrays.values())).shape
    num_b = 1
    if len(shape) == 3:
        is_even = all(outer == shape[1] * inner for outer, inner in steps.values())
        if is_even:
            steps = {name: [inner] for name, (_, inner) in steps.items()}
        else:
            num_b = shape[1]
    layout = {"num_b": num_b}
    for name, strides in steps.items():
        layout[f"{name}_stride_a"], layout[f"{name}_stride_b"] = (*strides, 0, 0)[:2]
    return layout


def are_rows_aligned(arrays: Iterable[Any]) -> bool:
    """Tell whether every row of every array starts and ends at a multiple of 16 bytes."""
    return all(
        step % 16 == 0
        for array in arrays
        for step in (array.shape[-1] * array.itemsize, array.data.ptr, *array.strides[:-1])
    )
