"""Cross-entropy and its gradient: `cuda_src/cross_entropy.cu`, `reference/cross_entropy.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import reference
from engine.dtypes import accumulation_dtype, dtype_name
from engine.kernels._chip import Limits, limits
from engine.kernels._contract import INT32, INT64, MIRROR_FLOATS, Contract
from engine.kernels._elementwise import VECTOR_BYTES, element_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._memory import is_same, overlaps
from engine.kernels._module import ModuleSpec

__all__ = ["Config", "choose_config", "cross_entropy", "specs"]

_PARAMS = (
    "logits:ptr logits_stride:i64 target:ptr wide_target:i32 ignore_index:i64 dloss:ptr "
    "dloss_stride:i32 loss:ptr lse:ptr dlogits:ptr dlogits_stride:i64 n:i32 max_resident:i32 "
    "softcap:f32 z_loss:f32 smoothing:f32"
)
_MAX_CLUSTER = 8  # kMaxCluster in CUDA
# Threads per CTA -> maximum bytes of a row; tuned with `python -m tests.bench cross_entropy`.
_THREADS = {32: 4 << 10, 128: 16 << 10, 256: 1 << 63}
_STATIC_BYTES = 1 << 10  # shared memory for the sums of a cluster's warps, rounded up
# CTAs per multiprocessor whose shares of long rows fit in shared memory: while one waits for its
# cluster, the others load and store.
_CTAS = 3
_KERNELS = {
    (has_cap, threads): Kernel(
        f"cross_entropy_{'softcap_' if has_cap else ''}{threads}",
        _PARAMS,
        struct="CrossEntropyParams",
    )
    for has_cap in (False, True)
    for threads in _THREADS
}


@dataclass(frozen=True)
class Config:
    """Threads per CTA, CTAs per row, and bytes of a row that each keeps in shared memory."""

    threads: int
    cluster: int
    shared_mem: int


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("cross_entropy.cu", dtype),)


def choose_config(row_bytes: int, chip: Limits, *, has_gradient: bool) -> Config:
    """Choose the division of a row of `row_bytes` on `chip`; it ignores the number of rows.

    Examples
    --------
    >>> from engine.kernels._chip import HOPPER
    >>> choose_config(2 * 128256, HOPPER, has_gradient=True)
    Config(threads=256, cluster=4, shared_mem=64128)
    """
    threads = next(count for count, most in _THREADS.items() if row_bytes <= most)
    if not has_gradient:
        return Config(threads, 1, 0)
    wanted = chip.shared_per_block(_CTAS) - _STATIC_BYTES
    cluster = 1
    while chip.has_clusters and cluster < _MAX_CLUSTER and cluster * wanted < row_bytes:
        cluster *= 2
    vectors = ceil_div(row_bytes // VECTOR_BYTES, cluster)
    most = chip.shared_per_block(1) - _STATIC_BYTES
    return Config(threads, cluster, min(vectors, most // VECTOR_BYTES) * VECTOR_BYTES)


def cross_entropy(
    logits: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    dloss: Any = None,
    out: Any = None,
    lse_out: Any = None,
    dlogits_out: Any = None,
) -> Any:
    """Compute the cross-entropy of each row of logits and, with `dloss`, the logits' gradient.

    Parameters
    ----------
    logits : (N, V) array of float32, float16 or bfloat16 (NumPy: or float64)
        The rows may be strided (a view).
    target : (N,) array of int64 or int32
        Class of each row. One outside [0, V) yields a loss and a gradient of NaN.
    ignore_index : int
        Rows with this target have loss 0, lse 0 and gradient 0; their logits are not read.
    softcap : float
        Replace the logits by ``softcap · tanh(logits / softcap)`` (Gemma 2); 0: leave them.
    z_loss : float
        Weight of ``lse²`` in the loss [1]_.
    label_smoothing : float
        Between 0 and 1: weight of the uniform distribution in the target [2]_.
    dloss : (N,) or (1,) array of float32 (float64 for float64 logits), optional
        Gradient of each row's loss; with (1,) the same for all rows.
    out, lse_out : (N,) array of float32 (float64 for float64 logits), optional
        Arrays for the results.
    dlogits_out : (N, V) array of logits' dtype, optional
        Array for the gradient; its rows may be strided. It may be `logits`, and may not overlap it
        otherwise. Requires `dloss`.

    Returns
    -------
    loss : (N,) array
    lse : (N,) array
        ``log(sum(exp(x)))`` of each row, for x = logits, capped.
    dlogits : (N, V) array of logits' dtype
        Only with `dloss`.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    ``loss = (1 - s) (lse - x[target]) + s (lse - mean(x)) + z_loss · lse²``, with
    s = `label_smoothing`. In float32; the gradient is rounded once.

    References
    ----------
    .. [1] Chowdhery et al.: PaLM, arXiv:2204.02311, section 5.
    .. [2] Szegedy et al.: Rethinking the Inception Architecture, arXiv:1512.00567, section 7.

    Examples
    --------
    >>> import numpy as np
    >>> logits, target = np.array([[0.0, 0.0], [9.0, 9.0]], np.float32), np.array([1, -100])
    >>> loss, lse, gradient = cross_entropy(logits, target, dloss=np.ones(1, np.float32))
    >>> loss.round(3), gradient
    (array([0.693, 0.   ], dtype=float32), array([[ 0.5, -0.5],
           [ 0. ,  0. ]], dtype=float32))
    """
    call = Contract("cross_entropy")
    logits = call.array("logits", logits, "N V", MIRROR_FLOATS, layout="rows")
    call.check("logits", 0 < call["V"] < 1 << 31, "rows of 1 to 2**31 - 1 logits", logits.shape)
    target = call.array("target", target, "N", (INT64, INT32))
    is_int = isinstance(ignore_index, int | np.integer) and not isinstance(ignore_index, bool)
    call.check("ignore_index", is_int, "an integer", ignore_index)
    call.number("softcap", softcap, low=0.0)
    call.number("z_loss", z_loss)
    call.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    dtype = accumulation_dtype(logits.dtype)
    is_wanted = dloss is not None or dlogits_out is None
    call.check("dlogits_out", is_wanted, "None without dloss", "an array")
    if dloss is not None:
        size = "N" if getattr(dloss, "shape", None) != (1,) else "1"
        dloss = call.array("dloss", dloss, size, dtype)
    if dlogits_out is not None:
        dlogits_out = call.written("dlogits_out", dlogits_out, "N V", logits.dtype, layout="rows")
        is_apart = is_same(dlogits_out, logits) or not overlaps(dlogits_out, logits)
        call.check("dlogits_out", is_apart, "logits, or apart from it", "an overlapping view")
    options: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap, "z_loss": z_loss}
    if call.on_cpu:
        results = reference.cross_entropy(
            logits, target, label_smoothing=label_smoothing, dloss=dloss, **options
        )
        return _finish(call, results, (out, lse_out, dlogits_out))
    loss = call.output("out", out, (call["N"],), dtype)
    lse = call.output("lse_out", lse_out, (call["N"],), dtype)
    dlogits = None
    if dloss is not None:
        shape = logits.shape
        dlogits = call.output("dlogits_out", dlogits_out, shape, logits.dtype, layout="rows")
    _launch(logits, target, dloss, loss, lse, dlogits, smoothing=label_smoothing, **options)
    return (loss, lse) if dloss is None else (loss, lse, dlogits)


def _finish(call: Contract, results: Any, outs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the mirror's results, in the caller's arrays where these are given."""
    names = ("out", "lse_out", "dlogits_out")
    targets = [
        call.target(out, result, name, layout="rows")
        for out, result, name in zip(outs, results, names, strict=False)
    ]
    return tuple(call.fill(a, b) for a, b in zip(targets, results, strict=True))


def _launch(
    logits: Any, target: Any, dloss: Any, loss: Any, lse: Any, dlogits: Any, **numbers: Any
) -> None:
    num_rows, n = logits.shape
    config = choose_config(n * logits.itemsize, limits(), has_gradient=dloss is not None)
    _KERNELS[numbers["softcap"] != 0, config.threads].launch(
        specs(dtype_name(logits.dtype))[0],
        (num_rows * config.cluster,),
        (config.threads,),
        config.shared_mem,
        cluster=config.cluster,
        pdl=True,
        logits=logits,
        logits_stride=element_strides(logits)[0],
        target=target,
        wide_target=target.dtype == INT64,
        dloss=dloss,
        dloss_stride=0 if dloss is None or dloss.size == 1 else 1,
        loss=loss,
        lse=lse,
        dlogits=dlogits,
        dlogits_stride=0 if dlogits is None else element_strides(dlogits)[0],
        n=n,
        max_resident=config.shared_mem // VECTOR_BYTES,
        **numbers,
    )
