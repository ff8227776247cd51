"""A layer of experts for one token in one kernel: `cuda_src/moe_decode.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import device, reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOAT32, FLOATS, INT64, Contract
from engine.kernels._launch import Kernel, sm_count
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import counters, workspace
from engine.kernels.gemm.gemm import gemm
from engine.kernels.moe_combine import moe_combine
from engine.kernels.moe_gemm.moe_gemm import moe_gemm
from engine.kernels.moe_gemm.operands import ACTIVATIONS
from engine.kernels.moe_route import MAX_EXPERTS, check_rule, moe_route
from engine.kernels.rmsnorm import rmsnorm

__all__ = ["moe_decode", "specs", "warp_values"]

# Constants of the CUDA file.
_THREADS, _WARPS, _VECTOR = 512, 16, 8
_STREAM_VALUES = 3 * 2 * 1024  # of a warp: kSteps steps of a row of gate and a row of up
_STATIC_BYTES = 2048  # of shared memory: what the kernel declares, and what the driver reserves
_DTYPES = ("float16", "bfloat16")
_WIDTHS = (32, 64, 128, 256, 512)  # most experts of each entry point
_KERNELS = {
    width: Kernel(
        f"moe_decode_{width}",
        "x:ptr norm_weight:ptr router:ptr router_bias:ptr correction:ptr gate_up:ptr "
        "gate_up_bias:ptr down:ptr down_bias:ptr slots:ptr load:ptr out:ptr logits:ptr hidden:ptr "
        "arrived:ptr num_features:i32 width:i32 num_experts:i32 top_k:i32 "
        "is_sigmoid:i32 num_groups:i32 top_groups:i32 renormalize:i32 scale:f32 eps:f32 "
        "weight_offset:f32 activation:i32 alpha:f32 limit:f32 warp_values:i32 is_early:i32",
        struct="MoeDecodeParams",
    )
    for width in _WIDTHS
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`, apart from those of other ops."""
    return (ModuleSpec("moe_decode.cu", dtype),) if dtype in _DTYPES else ()


def moe_decode(
    x: Any,
    norm_weight: Any,
    router: Any,
    gate_up: Any,
    down: Any,
    top_k: int,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    router_bias: Any = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    score: str = "softmax",
    correction: Any = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    slots: Any = None,
    load: Any = None,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Return x + experts(rmsnorm(x)): a whole layer of experts, for one token in one kernel.

    Parameters
    ----------
    x : (T, N) array of float32, float16 or bfloat16
        The residual stream.
    norm_weight : (N,) array of x's dtype
    router : (E, N) array of x's dtype
    gate_up : (E, 2·I, N) array of x's dtype
        Of every expert the rows of gate, then those of up.
    down : (E, N, I) array of x's dtype
    top_k : int
        Experts of a token.
    eps, weight_offset : float
        Of the norm, as in `rmsnorm`.
    router_bias : (E,) array of x's dtype, optional
    gate_up_bias : (E, 2·I) array of x's dtype, optional
    down_bias : (E, N) array of x's dtype, optional
    activation, alpha, limit
        As in `moe_gemm`.
    score, correction, num_groups, top_groups, renormalize, scale, slots, load
        As in `moe_route`.
    pdl : bool
        Say that no kernel still running on the stream writes the weights.
    out : (T, N) array of x's dtype, optional
        Where to put the result; may be `x`.

    Returns
    -------
    (T, N) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    The one kernel takes a token of at most 4,096 features in 16 bits, where a multiprocessor has
    more than 200 KB of shared memory. All else, and sizes that are no multiples of 8, take the ops
    that it is made of, which round each expert's output, too.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.ones((1, 4), np.float32)
    >>> router, up, down = np.eye(2, 4), np.ones((2, 2, 4)), np.ones((2, 4, 1))
    >>> weights = [array.astype(np.float32) for array in (one[0], router, up, down)]
    >>> moe_decode(one, *weights, 1, eps=0.0).round(2)
    array([[16.71, 16.71, 16.71, 16.71]], dtype=float32)
    """
    call = Contract("moe_decode")
    x = call.array("x", x, "T N", FLOATS)
    norm_weight = call.array("norm_weight", norm_weight, "N", x.dtype)
    router = call.array("router", router, "E N", x.dtype)
    down = call.array("down", down, "E N I", x.dtype)
    gate_up = call.array("gate_up", gate_up, f"E {2 * call['I']} N", x.dtype)
    call.check("x", call["N"] > 0, "of at least one feature", x.shape)
    for name, low in (("eps", 0.0), ("weight_offset", -np.inf), ("alpha", -np.inf), ("limit", 0.0)):
        call.number(name, locals()[name], low=low)
    gated = ACTIVATIONS[1:]
    call.check("activation", activation in gated, f"one of {gated}", activation)
    biases = {
        "router_bias": (router_bias, "E"),
        "gate_up_bias": (gate_up_bias, f"E {2 * call['I']}"),
        "down_bias": (down_bias, "E N"),
    }
    options: dict[str, Any] = {
        name: None if bias is None else call.array(name, bias, shape, x.dtype)
        for name, (bias, shape) in biases.items()
    }
    options |= {"eps": eps, "weight_offset": weight_offset}
    options |= {"activation": activation, "alpha": alpha, "limit": limit}
    if correction is not None:
        correction = call.array("correction", correction, "E", FLOAT32)
    rule: dict[str, Any] = {
        "score": score,
        "correction": correction,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "renormalize": bool(renormalize),
        "scale": scale,
    }
    check_rule(call, top_k, **rule)
    rule["slots"] = None if slots is None else call.array("slots", slots, "T", INT64)
    rule["load"] = None if load is None else call.written("load", load, "E", INT64)
    arrays = (x, norm_weight, router, gate_up, down)
    if call.on_cpu:
        mirror: Any = reference.moe_decode
        return call.finish(out, mirror(*arrays, top_k, **options, **rule))
    out = call.output("out", out, x.shape, x.dtype)
    if x.shape[0]:
        layer = _Layer(*arrays, out, top_k, options, rule, pdl)
        (_launch if warp_values(layer) else _launch_apart)(layer)
    return out


@dataclass(frozen=True)
class _Layer:
    """A call, checked: `options` of norm, biases and gate, `rule` of the choice."""

    x: Any
    norm_weight: Any
    router: Any
    gate_up: Any
    down: Any
    out: Any
    top_k: int
    options: dict[str, Any]
    rule: dict[str, Any]
    pdl: bool


def warp_values(layer: _Layer) -> int:
    """Return how many values of weights a warp has room for; 0 if the kernel cannot take the layer.

    There must be room for a stream of gate and up and for a row of down.
    """
    (tokens, features), (experts, _, width) = layer.x.shape, layer.down.shape
    if dtype_name(layer.x.dtype) not in _DTYPES or tokens > 1 or experts > MAX_EXPERTS:
        return 0
    if features > _THREADS * _VECTOR or features % _VECTOR or width % _VECTOR or width == 0:
        return 0
    arrays = (layer.x, layer.norm_weight, layer.router, layer.gate_up, layer.down, layer.out)
    if any(array.data.ptr % 16 for array in arrays):
        return 0
    index = device.cupy().cuda.runtime.getDevice()
    limit = int(device.cupy().cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"])
    room = ((limit - _STATIC_BYTES) // 2 - features - layer.top_k * width) // _WARPS
    if room < max(_STREAM_VALUES, width):
        return 0
    rows = min(layer.top_k, room // width)
    return int(max(_STREAM_VALUES, rows * width))


def _launch(layer: _Layer) -> None:
    top_k, features, (experts, _, width) = layer.top_k, layer.x.shape[1], layer.down.shape
    values = warp_values(layer)
    num_logits = -(-experts // 4) * 4  # what follows is aligned to 16 bytes
    scratch = workspace(num_logits + -(-top_k * width // 2))
    options = layer.options | layer.rule
    options["is_sigmoid"] = options.pop("score") == "sigmoid"
    options["activation"] = ACTIVATIONS.index(options["activation"])
    _KERNELS[next(n for n in _WIDTHS if n >= experts)].launch(
        specs(dtype_name(layer.x.dtype))[0],
        (sm_count(),),
        (_THREADS,),
        2 * (features + top_k * width + _WARPS * values),
        pdl=True,  # the kernel waits before it touches what another may write
        x=layer.x,
        norm_weight=layer.norm_weight,
        router=layer.router,
        gate_up=layer.gate_up,
        down=layer.down,
        out=layer.out,
        logits=scratch[:num_logits],
        hidden=scratch[num_logits:],
        arrived=counters(),
        num_features=features,
        width=width,
        num_experts=experts,
        top_k=top_k,
        warp_values=values,
        is_early=layer.pdl,
        **options,
    )


def _launch_apart(layer: _Layer) -> None:
    """Launch the ops that the layer is made of."""
    x, options, pdl = layer.x, layer.options, layer.pdl
    norm = {"eps": options["eps"], "weight_offset": options["weight_offset"]}
    y = rmsnorm(x, layer.norm_weight, **norm)
    bias = options["router_bias"]
    logits = gemm(y, layer.router, bias=bias, out_dtype=np.float32, pdl=pdl)
    routing = moe_route(logits, layer.top_k, **layer.rule)
    gate = {name: options[name] for name in ("activation", "alpha", "limit")}
    bias = options["gate_up_bias"]
    rows = moe_gemm(y, layer.gate_up, routing, bias=bias, pdl=pdl, **gate)
    bias = options["down_bias"]
    pairs = moe_gemm(rows, layer.down, routing, bias=bias, scatter=True, pdl=pdl)
    pairs = pairs.reshape(x.shape[0], layer.top_k, x.shape[1])
    moe_combine(pairs, residual=x, out=layer.out)
