"""AltUp's correction of all residual streams: `cuda_src/altup/altup_correct.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._altup import checked_streams, kernels_of, launch
from engine.kernels._contract import Contract
from engine.kernels._module import ModuleSpec

__all__ = ["altup_correct", "specs"]

_KERNELS = kernels_of("altup_correct", "AltupCorrectParams", "streams:ptr x:ptr scale:ptr")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("altup/altup_correct.cu", dtype),)


def altup_correct(
    streams: Any,
    x: Any,
    router_norm: Any,
    router: Any,
    coefs: Any,
    *,
    scale: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Correct the predicted residual streams by a layer's result, in place.

    Parameters
    ----------
    streams : (T, S, N) array of float32, float16 or bfloat16
        Predictions of `altup_predict`; overwritten by the corrected streams.
    x : (T, N) array of streams' dtype
        The layer's result for the first stream.
    router_norm : (N,) array of streams' dtype
        Weight of the router's RMSNorm.
    router : (S, N) array of streams' dtype
    coefs : (S, S) array of streams' dtype
        Maps the router's output m to c, the streams' factors less 1.
    scale : (N,) array of streams' dtype, optional
        Factor on `own`.
    eps : float
        Added to the mean square.

    Returns
    -------
    own : (T, N) array of streams' dtype
        A copy of the corrected first stream, times `scale`.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    m = tanh(router norm(x) / N), c = coefs m, and p_i becomes p_i + (x - p_0) (1 + c_i) [1]_.
    Everything is float32; the results are rounded once.

    References
    ----------
    .. [1] Baykal et al.: Alternating Updates for Efficient Transformers, arXiv:2301.13310.

    Examples
    --------
    >>> import numpy as np
    >>> p = np.array([[[1.0], [10.0]]], np.float32)  # one token, two streams, one feature
    >>> x = np.array([[3.0]], np.float32)
    >>> router = np.array([[100.0], [0.0]], np.float32)  # m = (1, 0)
    >>> coefs = np.array([[0, 0], [0.5, 0]], np.float32)  # c = (0, 0.5)
    >>> altup_correct(p, x, np.ones(1, np.float32), router, coefs), p.ravel()
    (array([[3.]], dtype=float32), array([ 3., 13.], dtype=float32))
    """
    call = Contract("altup_correct")
    streams = checked_streams(call, streams)
    arrays = {
        "x": call.array("x", x, "T N", streams.dtype),
        "router_norm": call.array("router_norm", router_norm, "N", streams.dtype),
        "router": call.array("router", router, "S N", streams.dtype),
        "coefs": call.array("coefs", coefs, "S S", streams.dtype),
    }
    if scale is not None:
        scale = call.array("scale", scale, "N", streams.dtype)
    call.number("eps", eps, low=0.0)
    if call.on_cpu:
        corrected, own = reference.altup_correct(streams, **arrays, scale=scale, eps=eps)
        streams[...] = corrected
        return own
    spec = specs(dtype_name(streams.dtype))[0]
    return launch(call, _KERNELS, spec, streams=streams, scale=scale, eps=eps, **arrays)
