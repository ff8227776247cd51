"""GEMM with a fused epilogue: `cuda_src/gemm/gemm.cu`, mirror `reference/gemm.py`.

`config.py` chooses the kernel and `launch.py` launches it, also for rmsnorm_gemm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import ContractError, ShapeError
from engine.kernels import _cpu
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels._peer_memory import peer_memory
from engine.kernels.gemm.config import Config, choose_config
from engine.kernels.gemm.launch import launch
from engine.kernels.gemm.operands import (
    SWIGLU,
    Operands,
    check_columns,
    check_residual,
    out_dtype_of,
)
from engine.kernels.gemm.sm90 import hopper_specs, stream_specs
from engine.kernels.swiglu import specs as swiglu_specs

__all__ = ["Config", "choose_config", "gemm", "interleave_gate_up", "specs"]


def specs(
    dtype: str, *, deterministic: bool = False, has_peers: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`, also with the options if given."""
    tiles = hopper_specs(dtype, deterministic=deterministic, sends=has_peers)
    streams = stream_specs("gemm", dtype) if deterministic else ()
    return (ModuleSpec("gemm/gemm.cu", dtype), *streams, *tiles, *swiglu_specs(dtype))


def gemm(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    pdl: bool = False,
    peers: Any = None,
    out: Any = None,
) -> Any:
    """Multiply rows by a weight matrix: activation(x Wᵀ + bias) + residual.

    The activations "swiglu" and "silu_and_mul" compute the first half of a gated feed-forward
    layer, silu(gate) * up.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        The rows may be strided (a view). An array whose last axis is not contiguous is copied.
    weight : (N, K) array of x's dtype
        (out features, in features), as in checkpoints.
    bias : (N,) array of x's dtype, optional
    residual : (M, N) array of the result's dtype, optional
        Added last; may be `out` itself.
    activation : None, "silu", "gelu" (erf), "gelu_tanh", "relu", "swiglu" or "silu_and_mul"
        "swiglu": `weight` (and `bias`) hold all rows of gate, then as many of up; the result has
        N / 2 columns and x's dtype, and `residual` must be None. "silu_and_mul": rows of gate and
        up alternate by eights (see `interleave_gate_up`); N is a multiple of 16, and the result and
        `residual` have N / 2 columns.
    out_dtype : dtype, optional
        x's dtype (the default) or float32.
    deterministic : bool
        Sum each row in an order that does not depend on M, so that the bits of a row's result do
        not depend on the other rows. Slower for few rows.
    pdl : bool
        Promise that no kernel still running on the stream writes `weight` or `bias`; this holds for
        a model's parameters. With few rows they are then read while the preceding kernel ends.
    peers : PeerMemory, optional
        The result is this rank's part of a sum over ranks: the group's next call must be
        `all_reduce` or `all_reduce_rmsnorm` of it. On Hopper large products send most of their rows
        to the other ranks while they multiply the rest. Ignored for NumPy arrays.
    out : (M, N) array of `out_dtype`, optional
        Array for the result; its rows may be strided.

    Returns
    -------
    (M, N) or (M, N / 2) array of `out_dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums, bias, activation and residual are float32, and the result is rounded once; with "swiglu"
    some kernels also round gate and up. On Hopper in 16 bits with `deterministic` the product is
    rounded before a residual is added. float32 GEMMs never use TF32.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 2.0]], np.float32)
    >>> weight = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], np.float32)
    >>> gemm(x, weight, bias=np.ones(3, np.float32), activation="relu")
    array([[2., 3., 0.]], dtype=float32)
    """
    call = Contract("gemm")
    x = call.array("x", x, "M K", FLOATS, layout="rows")
    weight = call.array("weight", weight, "N K", x.dtype)
    dtype = out_dtype_of(call, x.dtype, out_dtype)
    columns = check_columns(call, activation)
    residual = check_residual(call, activation, residual, columns, dtype)
    if activation == SWIGLU and dtype != x.dtype:
        call.check("out_dtype", False, f'{x.dtype} with "swiglu"', str(dtype))
    if bias is not None:
        bias = call.array("bias", bias, "N", x.dtype)
    if call.on_cpu:
        result = _cpu.gemm(
            x,
            weight,
            bias=bias,
            residual=residual,
            activation=activation,
            out_dtype=dtype,
            deterministic=deterministic,
        )
        return call.finish(out, result, layout="rows")
    out = call.output("out", out, (call["M"], columns), dtype, layout="rows")
    if peers is not None:
        peers = peer_memory(call, x, peers)
    operands = Operands(x, weight, out, bias, residual, activation, deterministic, pdl, peers)
    launch("gemm", operands)
    return out


def interleave_gate_up(gate_up: Any) -> Any:
    """Return the rows of [gate; up] in the order of "silu_and_mul": alternating groups of eight.

    Parameters
    ----------
    gate_up : (2F, ...) array
        A weight (2F, K) or bias (2F,), all gate rows first; F is a multiple of 8.

    Returns
    -------
    (2F, ...) array
        A copy.

    Raises
    ------
    ShapeError, ContractError
        If `gate_up` has no rows, or F is not a multiple of 8.

    Examples
    --------
    >>> import numpy as np
    >>> interleave_gate_up(np.arange(32))[:20]
    array([ 0,  1,  2,  3,  4,  5,  6,  7, 16, 17, 18, 19, 20, 21, 22, 23,  8,
            9, 10, 11])
    """
    gate_up = gate_up if hasattr(gate_up, "swapaxes") else np.asarray(gate_up)
    if gate_up.ndim == 0:
        raise ShapeError("interleave_gate_up: gate_up: must have rows; got a single value")
    rows = gate_up.shape[0]
    if rows % 16:
        raise ContractError(
            f"interleave_gate_up: gate_up: must have a multiple of 16 rows; got {rows}"
        )
    halves = gate_up.reshape(2, rows // 16, 8, *gate_up.shape[1:])
    return halves.swapaxes(0, 1).reshape(gate_up.shape)
