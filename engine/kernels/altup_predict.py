"""AltUp's prediction of all residual streams: `cuda_src/altup/altup_predict.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._altup import checked_streams, kernels_of, launch
from engine.kernels._contract import Contract
from engine.kernels._module import ModuleSpec

__all__ = ["altup_predict", "specs"]

_KERNELS = kernels_of("altup_predict", "AltupPredictParams", "streams:ptr delta:ptr")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("altup/altup_predict.cu", dtype),)


def altup_predict(
    streams: Any,
    router_norm: Any,
    router: Any,
    coefs: Any,
    *,
    delta: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Predict every residual stream from all of them, in place.

    Parameters
    ----------
    streams : (T, S, N) array of float32, float16 or bfloat16
        S streams of each token, at most 4; overwritten by their predictions.
    router_norm : (N,) array of streams' dtype
        Weight of the router's RMSNorm.
    router : (S, N) array of streams' dtype
    coefs : (S·S, S) array of streams' dtype
        Maps the router's output m to the mixing matrix R = (coefs m), (S, S).
    delta : (T, N) array of streams' dtype, optional
        Added to all streams but the first, before anything else.
    eps : float
        Added to the mean square.

    Returns
    -------
    own : (T, N) array of streams' dtype
        A copy of the first stream's prediction.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    m = tanh(router norm(h_0) / N), and h_i becomes h_i + Σ_j R_ij h_j [1]_. Everything is
    float32; the results are rounded once.

    References
    ----------
    .. [1] Baykal et al.: Alternating Updates for Efficient Transformers, arXiv:2301.13310.

    Examples
    --------
    >>> import numpy as np
    >>> h = np.array([[[1.0], [10.0]]], np.float32)  # one token, two streams, one feature
    >>> ones = np.ones((1,), np.float32)
    >>> router = np.array([[100.0], [0.0]], np.float32)  # m = (1, 0)
    >>> coefs = np.array([[0, 0], [1, 0], [0, 0], [0, 0]], np.float32)  # R_01 = m_0
    >>> altup_predict(h, ones, router, coefs), h.ravel()
    (array([[11.]], dtype=float32), array([11., 10.], dtype=float32))
    """
    call = Contract("altup_predict")
    streams = checked_streams(call, streams)
    arrays = {
        "router_norm": call.array("router_norm", router_norm, "N", streams.dtype),
        "router": call.array("router", router, "S N", streams.dtype),
        "coefs": call.array("coefs", coefs, f"{call['S'] ** 2} S", streams.dtype),
    }
    if delta is not None:
        delta = call.array("delta", delta, "T N", streams.dtype)
    call.number("eps", eps, low=0.0)
    if call.on_cpu:
        predicted, own = reference.altup_predict(streams, **arrays, delta=delta, eps=eps)
        streams[...] = predicted
        return own
    spec = specs(dtype_name(streams.dtype))[0]
    return launch(call, _KERNELS, spec, streams=streams, delta=delta, eps=eps, **arrays)
