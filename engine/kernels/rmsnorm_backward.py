"""Gradients of `rmsnorm`: `cuda_src/rmsnorm_backward.cu`, `reference/rmsnorm_backward.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._chip import sm_count
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.kernels.rmsnorm import are_rows_aligned, row_layout

__all__ = ["Config", "choose_config", "rmsnorm_backward", "specs"]

_PARAMS = (
    "dy:ptr h:ptr dh:ptr weight:ptr dx:ptr partials:ptr num_rows:i64 n:i32 num_b:i32 "
    "dy_stride_a:i64 dy_stride_b:i64 h_stride_a:i64 h_stride_b:i64 dh_stride_a:i64 "
    "dh_stride_b:i64 dx_stride_a:i64 dx_stride_b:i64 eps:f32 weight_offset:f32"
)
_SUM = Kernel(
    "rmsnorm_backward_sum",
    "partials:ptr dweight:ptr dbias:ptr num_partials:i32 n:i32",
)
_SUM_THREADS = 1024  # kSumThreads in CUDA
_SUM_COLUMNS = 32  # columns per block of _SUM


@dataclass(frozen=True)
class Config:
    """One kernel for the rows: its template arguments in CUDA.

    Attributes
    ----------
    kernel : str
        Entry point, without "rmsnorm_backward_".
    threads, row_threads : int
        Threads of a block, and those that share a row.
    vectors, stages : int
        Vectors of a row per thread, and rows in the ring in shared memory; 0 without a ring.
    max_blocks : int
        Blocks per multiprocessor: more would only add partial sums.
    """

    kernel: str
    threads: int
    row_threads: int
    vectors: int
    stages: int
    max_blocks: int

    @property
    def rows_at_once(self) -> int:
        """Rows that a block processes together."""
        return self.threads // self.row_threads

    def shared_bytes(self, num_arrays: int) -> int:
        """Return the ring's size in bytes if a row has `num_arrays` inputs."""
        return self.stages * num_arrays * self.vectors * self.threads * 16


# Maximum row length in bytes -> kernel; tuned with `python -m tests.bench rmsnorm_backward`.
_RINGS = {
    16 * row_threads * vectors: Config(
        f"ring_{16 * row_threads * vectors}", threads, row_threads, vectors, stages, max_blocks
    )
    for threads, row_threads, vectors, stages, max_blocks in (
        (512, 16, 1, 3, 2),
        (512, 32, 1, 3, 2),
        (256, 32, 2, 3, 2),
        (256, 64, 2, 3, 2),
        (256, 128, 2, 3, 2),
        (512, 256, 2, 2, 1),
        (512, 512, 2, 2, 1),
    )
}
_LONG_VECTOR = Config("long_vector", 256, 256, 0, 0, max_blocks=3)
_LONG_SCALAR = Config("long_scalar", 256, 256, 0, 0, max_blocks=3)
_KERNELS = {
    config.kernel: Kernel(
        f"rmsnorm_backward_{config.kernel}", _PARAMS, struct="RmsnormBackwardParams"
    )
    for config in (*_RINGS.values(), _LONG_VECTOR, _LONG_SCALAR)
}


def specs(
    dtype: str, *, subtract_mean: bool = False, patterns: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules for RMSNorm, for LayerNorm (`subtract_mean`), or both (`patterns`)."""
    kinds = (False, True) if patterns else (subtract_mean,)
    return tuple(_spec(dtype, kind) for kind in kinds)


def _spec(dtype: str, subtract_mean: bool) -> ModuleSpec:
    return ModuleSpec("rmsnorm_backward.cu", dtype, (("CENTRED", 1),) if subtract_mean else ())


def choose_config(n: int, itemsize: int, *, is_aligned: bool) -> Config:
    """Choose the kernel for rows of `n` features; `is_aligned` allows 16-byte accesses.

    Examples
    --------
    >>> choose_config(4096, 2, is_aligned=True).kernel
    'ring_8192'
    """
    if not is_aligned:
        return _LONG_SCALAR
    fitting = (config for size, config in _RINGS.items() if n * itemsize <= size)
    return next(fitting, _LONG_VECTOR)


def rmsnorm_backward(
    dy: Any,
    h: Any,
    weight: Any,
    *,
    dh: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    subtract_mean: bool = False,
    out: Any = None,
) -> Any:
    """Return the gradients of ``sum(dy * y + dh * h)`` with ``y, h = rmsnorm(x, weight, ...)``.

    Parameters
    ----------
    dy : (..., N) array of h's dtype
        Gradient with respect to `rmsnorm`'s result y.
    h : (..., N) array of float32, float16 or bfloat16 (NumPy: or float64)
        Input of the norm: `rmsnorm`'s second result, or x if it had no residual. If the rows of an
        array are strided (a view), it has at most three axes.
    weight : (N,) array of h's dtype
    dh : (..., N) array of h's dtype, optional
        Gradient with respect to `rmsnorm`'s second result, from the residual stream.
    eps, weight_offset, subtract_mean
        As in `rmsnorm`.
    out : (..., N) array of h's dtype, optional
        Array for `dx`; may be `dy`, `h` or `dh`, but must not overlap them otherwise.

    Returns
    -------
    dx : (..., N) array of h's dtype
        Gradient with respect to h, which is also the residual's; x's is `x_scale` times it.
    dweight : (N,) array of h's dtype
    dbias : (N,) array of h's dtype
        Only with `subtract_mean`.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    With normed = h / sqrt(mean(h²) + eps) and g = dy · (weight + weight_offset)::

        dx = (g - normed · mean(g · normed)) / sqrt(mean(h²) + eps) + dh
        dweight = sum over all rows of dy · normed

    `subtract_mean` reduces h and g by their means first, and dbias is the sum of dy [1]_. Sums are
    float32, in an order that depends only on the shape and the GPU; each result is rounded once.

    References
    ----------
    .. [1] Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np
    >>> h = np.array([[3.0, 4.0]], np.float32)
    >>> dy = np.array([[1.0, 0.0]], np.float32)
    >>> dx, dweight = rmsnorm_backward(dy, h, np.ones(2, np.float32), eps=0.0)
    >>> dx.round(3), dweight.round(3)  # dx is orthogonal to h: y does not change with h's length
    (array([[ 0.181, -0.136]], dtype=float32), array([0.849, 0.   ], dtype=float32))
    """
    call = Contract("rmsnorm_backward")
    layout = "rows" if getattr(h, "ndim", 1) <= 3 else "C"
    h = call.array("h", h, "* N", MIRROR_FLOATS, layout=layout)
    shape = " ".join(map(str, h.shape))
    dy = call.array("dy", dy, shape, h.dtype, layout=layout)
    weight = call.array("weight", weight, "N", h.dtype)
    if dh is not None:
        dh = call.array("dh", dh, shape, h.dtype, layout=layout)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    numbers = {"eps": eps, "weight_offset": weight_offset}
    if call.on_cpu:
        dx, *sums = reference.rmsnorm_backward(
            dy, h, weight, dh=dh, subtract_mean=subtract_mean, **numbers
        )
        return call.finish(out, dx, layout=layout), *sums
    dx = call.output("out", out, h.shape, h.dtype, layout=layout)
    names = ("dweight", "dbias") if subtract_mean else ("dweight",)
    sums = [call.output(name, None, weight.shape, h.dtype) for name in names]
    _launch(_spec(dtype_name(h.dtype), subtract_mean), dy, h, weight, dh, dx, sums, **numbers)
    return dx, *sums


def _launch(
    spec: ModuleSpec,
    dy: Any,
    h: Any,
    weight: Any,
    dh: Any,
    dx: Any,
    sums: list[Any],
    **numbers: Any,
) -> None:
    n = h.shape[-1]
    num_rows = h.size // n if n else 0
    rows = {"dy": dy, "h": h, "dh": h if dh is None else dh, "dx": dx}
    if h.ndim > 3:
        rows = {name: array.reshape(num_rows, n) for name, array in rows.items()}
    aligned = are_rows_aligned((*rows.values(), weight))
    config = choose_config(n, h.itemsize, is_aligned=aligned)
    kernel = _KERNELS[config.kernel]
    shared = config.shared_bytes(2 if dh is None else 3)
    blocks = min(config.max_blocks, kernel.resident_blocks(spec, config.threads, shared))
    num_blocks = min(ceil_div(num_rows, config.rows_at_once), blocks * sm_count())
    partials = workspace(num_blocks * len(sums) * n)
    kernel.launch(
        spec,
        (num_blocks,),
        (config.threads,),
        shared,
        pdl=True,
        **rows | {"dh": dh},
        weight=weight,
        partials=partials,
        num_rows=num_rows,
        n=n,
        **row_layout(**rows),
        **numbers,
    )
    _SUM.launch(
        spec,
        (ceil_div(len(sums) * n, _SUM_COLUMNS),),
        (_SUM_THREADS,),
        pdl=True,
        partials=partials,
        dweight=sums[0],
        dbias=sums[-1],
        num_partials=num_blocks,
        n=n,
    )
