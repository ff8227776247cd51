"""RMSNorm, router GEMM and routing in one kernel: `cuda_src/rmsnorm_moe_route.cu`.

The mirror is `reference/rmsnorm_moe_route.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._chip import limits
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._elementwise import is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.gemm import gemm
from engine.kernels.gemm import specs as gemm_specs
from engine.kernels.moe_route import MAX_EXPERTS, WIDTHS, checked_options, moe_route, new_routing
from engine.kernels.moe_route import specs as route_specs
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rmsnorm import specs as norm_specs
from engine.reference import Routing

__all__ = ["rmsnorm_moe_route", "specs"]

_PARAMS = (
    "x:ptr norm_weight:ptr weight:ptr bias:ptr y:ptr correction:ptr expert_scale:ptr experts:ptr "
    "weights:ptr order:ptr offsets:ptr slots:ptr load:ptr n:i32 num_experts:i32 top_k:i32 "
    "num_shared:i32 is_sigmoid:i32 num_groups:i32 top_groups:i32 renormalize:i32 scale:f32 eps:f32 "
    "weight_offset:f32"
)
_KERNELS = {
    width: Kernel(f"rmsnorm_moe_route_{width}", _PARAMS, struct="RmsnormMoeRouteParams")
    for width in WIDTHS
}
_THREADS = 512  # kThreads in CUDA
# Blocks per cluster, best first: of 16, which not every GPU can place, a block leaves room for one
# of the product before it, and so loads its rows of the weight while that product runs.
_CLUSTERS = (16, 8)
_MAX_VECTORS = 2 * _THREADS  # maximum 16-byte vectors per row
_STATIC_BYTES = 12 * 1024  # static shared memory and the driver's reserve, in bytes


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    parts = (*norm_specs(dtype), *gemm_specs(dtype), *route_specs(dtype))
    return (_spec(dtype), *parts)


def _spec(dtype: str) -> ModuleSpec:
    return ModuleSpec("rmsnorm_moe_route.cu", dtype)


def rmsnorm_moe_route(
    x: Any,
    norm_weight: Any,
    weight: Any,
    top_k: int,
    *,
    bias: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    score: str = "softmax",
    correction: Any = None,
    expert_scale: Any = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    num_shared: int = 0,
    slots: Any = None,
    load: Any = None,
    pdl: bool = False,
) -> tuple[Any, Routing]:
    """Normalise tokens, multiply them by the router's weight, and choose their experts.

    Parameters
    ----------
    x : (T, N) array of float32, float16 or bfloat16
    norm_weight : (N,) array of x's dtype
    weight : (E + num_shared, N) array of x's dtype
        The router's weight, then the gate of the shared expert.
    top_k : int
    bias : (E + num_shared,) array of x's dtype, optional
        Added to the logits.
    eps, weight_offset : float
        See `rmsnorm`.
    score, correction, expert_scale, num_groups, top_groups, renormalize, scale : optional
    num_shared, slots, load : optional
        See `moe_route`.
    pdl : bool
        Promise that the preceding kernel on the stream writes neither `weight` nor `bias`, so that
        they may be read before it has ended.

    Returns
    -------
    y : (T, N) array of x's dtype
        The normalised tokens.
    routing : Routing
        See `moe_route`.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Equals `rmsnorm`, `gemm` to float32 and `moe_route`. With `pdl`, a single token is routed by one
    kernel if the GPU has thread block clusters and their shared memory holds the weight.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[3.0, 4.0]], np.float32)
    >>> router = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    >>> y, routing = rmsnorm_moe_route(x, np.ones(2, np.float32), router, 1)
    >>> y.round(3), routing.experts.tolist()
    (array([[0.849, 1.131]], dtype=float32), [[1]])
    """
    call = Contract("rmsnorm_moe_route")
    x = call.array("x", x, "T N", FLOATS)
    norm_weight = call.array("norm_weight", norm_weight, "N", x.dtype)
    weight = call.array("weight", weight, "E N", x.dtype)
    call.check("x", call["N"] > 0, "of at least one feature", x.shape)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    if bias is not None:
        bias = call.array("bias", bias, "E", x.dtype)
    options = checked_options(
        call,
        "weight",
        top_k,
        score=score,
        correction=correction,
        expert_scale=expert_scale,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=scale,
        num_shared=num_shared,
        slots=slots,
        load=load,
    )
    norm: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset}
    if call.on_cpu:
        return reference.rmsnorm_moe_route(
            x, norm_weight, weight, top_k, bias=bias, **norm, **options
        )
    # The fused kernel always reads the weight early.
    cluster = _choose_cluster(x, norm_weight, weight, num_shared) if pdl else 0
    if not cluster:
        y = rmsnorm(x, norm_weight, **norm)
        logits = gemm(y, weight, bias=bias, out_dtype=FLOAT32, pdl=pdl)
        return y, moe_route(logits, top_k, **options)
    y = call.output("y", None, x.shape, x.dtype)
    routing = new_routing(call, top_k, num_shared)
    arrays = {"x": x, "norm_weight": norm_weight, "weight": weight, "bias": bias, "y": y}
    _launch(cluster, routing, top_k=top_k, **arrays, **norm, **options)
    return y, routing


def _launch(
    cluster: int,
    routing: Routing,
    *,
    weight: Any,
    num_shared: int,
    score: str,
    **others: Any,
) -> None:
    num_experts = weight.shape[0] - num_shared
    _kernel(num_experts).launch(
        _spec(dtype_name(weight.dtype)),
        (cluster,),
        (_THREADS,),
        _shared_bytes(weight, cluster),
        cluster=cluster,
        pdl=True,
        weight=weight,
        n=weight.shape[1],
        num_experts=num_experts,
        num_shared=num_shared,
        is_sigmoid=score == "sigmoid",
        **routing._asdict(),
        **others,
    )


def _kernel(num_experts: int) -> Kernel:
    return _KERNELS[next(width for width in WIDTHS if width >= num_experts)]


def _shared_bytes(weight: Any, cluster: int) -> int:
    """Return the dynamic shared memory per block: rows of the weight, y, and the logits."""
    num_logits, n = weight.shape
    rows = ceil_div(num_logits, cluster) + 1
    return int(rows * n * weight.itemsize + num_logits * 4)


def _choose_cluster(x: Any, norm_weight: Any, weight: Any, num_shared: int) -> int:
    """Return the blocks per cluster of the fused kernel; 0 if it is unsupported."""
    (num_tokens, n) = x.shape
    num_logits = weight.shape[0]
    is_single = num_tokens == 1 and num_logits <= MAX_EXPERTS
    if not is_single or not limits().has_clusters or not is_aligned(x, norm_weight, weight):
        return 0
    width = vector_width(x)
    if n % width or n // width > _MAX_VECTORS:
        return 0
    kernel = _kernel(num_logits - num_shared)
    spec = _spec(dtype_name(weight.dtype))
    for cluster in _CLUSTERS:
        size = _shared_bytes(weight, cluster)
        if size + _STATIC_BYTES <= limits().shared_bytes and _fits(kernel, spec, size, cluster):
            return cluster
    return 0


@cache
def _fits(kernel: Kernel, spec: ModuleSpec, shared_bytes: int, cluster: int) -> bool:
    """Tell whether the device holds a cluster."""
    return kernel.resident_clusters(spec, _THREADS, shared_bytes, cluster) > 0
