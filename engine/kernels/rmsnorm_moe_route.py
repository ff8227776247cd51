"""RMSNorm, router GEMM and routing in one kernel: `cuda_src/rmsnorm_moe_route/`.

The mirror is `reference/rmsnorm_moe_route.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._chip import limits
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._elementwise import is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._quantize import new_codes
from engine.kernels._workspace import workspace
from engine.kernels.gemm import gemm
from engine.kernels.gemm import specs as gemm_specs
from engine.kernels.moe_route import (
    MAX_EXPERTS,
    WIDTHS,
    checked_options,
    moe_route,
    new_routing,
    place_pairs,
)
from engine.kernels.moe_route import specs as route_specs
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rmsnorm import specs as norm_specs
from engine.kernels.rmsnorm_quantize import rmsnorm_quantize
from engine.kernels.rmsnorm_quantize import specs as quantize_specs
from engine.reference import Routing

__all__ = ["rmsnorm_moe_route", "specs"]

_PARAMS = (
    "x:ptr residual:ptr norm_weight:ptr weight:ptr bias:ptr y:ptr residual_out:ptr codes:ptr "
    "scales:ptr correction:ptr expert_scale:ptr experts:ptr weights:ptr order:ptr offsets:ptr "
    "slots:ptr load:ptr counts:ptr num_tokens:i32 n:i32 num_experts:i32 top_k:i32 num_shared:i32 "
    "is_sigmoid:i32 num_groups:i32 top_groups:i32 renormalize:i32 slab:i32 log_splits:i32 "
    "scale:f32 eps:f32 weight_offset:f32"
)


def _kernels(name: str) -> dict[int, Kernel]:
    entry = f"rmsnorm_moe_route{name}"
    return {n: Kernel(f"{entry}_{n}", _PARAMS, struct="RmsnormMoeRouteParams") for n in WIDTHS}


_ONE_TOKEN, _FEW_TOKENS = (_kernels(name) for name in ("", "_few"))
_THREADS = 512  # kThreads of both files in CUDA
_STATIC_BYTES = 12 * 1024  # static shared memory and the driver's reserve, in bytes

# Blocks per cluster for one token, best first: of 16, which not every GPU can place, a block leaves
# room for one of the product before it, and so loads its rows of the weight while that product
# runs.
_CLUSTERS = (16, 8)
_MAX_VECTORS = 2 * _THREADS  # maximum 16-byte vectors per row, for one token

# Constants of rmsnorm_moe_route_few_tokens.cu.
_TOKENS = 16
_GROUP = 128
_STEP = 32
_PART = 32
_ROW_PAD = 32
_LOGIT_PAD = 8
# Clusters for few tokens: 16 blocks are tried before 8 if each of 8 would have over _WIDE_SLAB
# columns and the tokens fill at most _MAX_TILES tiles; otherwise 8 before 16.
_WIDE_SLAB = 256
_MAX_TILES = 4


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    norms = (*norm_specs(dtype), *quantize_specs(dtype))
    few = () if dtype == "float32" else (_spec(dtype, "_few_tokens"),)
    return (_spec(dtype), *few, *norms, *gemm_specs(dtype), *route_specs(dtype))


def _spec(dtype: str, name: str = "") -> ModuleSpec:
    return ModuleSpec(f"rmsnorm_moe_route/rmsnorm_moe_route{name}.cu", dtype)


def rmsnorm_moe_route(
    x: Any,
    norm_weight: Any,
    weight: Any,
    top_k: int,
    *,
    bias: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Any = None,
    quantize_out: bool = False,
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
    out: Any = None,
    residual_out: Any = None,
) -> tuple[Any, ...]:
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
    residual : (T, N) array of x's dtype, optional
        Added to `x` first.
    quantize_out : bool
        Return the normalised tokens also as e4m3 codes with a scale per 128 features, for
        `moe_gemm` with `x_scales`.
    score : "softmax" or "sigmoid"
    correction, expert_scale, num_groups, top_groups, renormalize, scale : optional
    num_shared, slots, load : optional
        See `moe_route`.
    pdl : bool
        Promise that the preceding kernel on the stream writes neither `norm_weight` nor `weight`
        nor `bias`, so that they may be read before it has ended.
    out : (T, N) array of x's dtype, optional
        Array for `y`; may be `x`.
    residual_out : (T, N) array of x's dtype, optional
        Array for `h`; may be `residual`.

    Returns
    -------
    y : (T, N) array of x's dtype
        The normalised tokens.
    routing : Routing
        See `moe_route`.
    codes : (T, N) array of uint8 (bits of e4m3)
    scales : (T, ceil(N / 128)) array of float32
        Only with `quantize_out`.
    h : (T, N) array of x's dtype
        ``x + residual``; only with a `residual`.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Equals `rmsnorm` (or `rmsnorm_quantize`), `gemm` to float32 and `moe_route`. With `pdl` and
    thread block clusters, whose shared memory must hold the weight, one token takes one kernel. In
    16 bits so do up to 16 tokens, and as many as the GPU holds clusters for take two, with at most
    512 logits, aligned rows, and N a multiple of 32.

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
    quantize_out = bool(quantize_out)  # an array raises here, before anything is written
    x = call.array("x", x, "T N", FLOATS)
    norm_weight = call.array("norm_weight", norm_weight, "N", x.dtype)
    weight = call.array("weight", weight, "E N", x.dtype)
    call.check("x", call["N"] > 0, "of at least one feature", x.shape)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    if bias is not None:
        bias = call.array("bias", bias, "E", x.dtype)
    if residual is not None:
        residual = call.array("residual", residual, "T N", x.dtype)
    call.check("residual_out", residual is not None or residual_out is None, "None", residual_out)
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
    top_k = int(top_k)
    norm: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset}
    if call.on_cpu:
        call.check_target(out, x.shape, x.dtype)  # before `load` is written
        call.check_target(residual_out, x.shape, x.dtype, "residual_out")
        results = reference.rmsnorm_moe_route(
            x,
            norm_weight,
            weight,
            top_k,
            bias=bias,
            residual=residual,
            quantize_out=quantize_out,
            **norm,
            **options,
        )
        y, routing, *others = results
        if residual is not None:
            others[-1] = call.finish(residual_out, others[-1], "residual_out")
        return (call.finish(out, y), routing, *others)
    y = call.output("out", out, x.shape, x.dtype)
    h = None
    if residual is not None:
        h = call.output("residual_out", residual_out, x.shape, x.dtype)
    arrays = _Arrays(x, residual, norm_weight, weight, bias, y, h)
    # The kernels always read the weights early.
    is_one = x.shape[0] == 1 and residual is None and not quantize_out
    is_one &= y.data.ptr != x.data.ptr  # each block reads the whole token
    chosen = None
    if pdl:
        chosen = _choose_one(arrays, num_shared) if is_one else _choose_few(arrays)
    if chosen is None:
        return _in_parts(arrays, top_k, quantize_out=quantize_out, pdl=pdl, norm=norm, **options)
    if quantize_out:
        codes, scales = new_codes(call, call["T"], call["N"], "fp8", _GROUP)
        arrays = arrays._replace(codes=codes, scales=scales)
    routing = new_routing(call, top_k, num_shared)
    _launch(chosen, arrays, routing, top_k=top_k, **norm, **options)
    return arrays.results(routing)


class _Arrays(NamedTuple):
    """Arrays of a call, but for the routing's."""

    x: Any
    residual: Any
    norm_weight: Any
    weight: Any
    bias: Any
    y: Any
    residual_out: Any
    codes: Any = None
    scales: Any = None

    def results(self, routing: Routing) -> tuple[Any, ...]:
        """Return the op's results."""
        optional = (self.codes, self.scales, self.residual_out)
        return (self.y, routing, *(one for one in optional if one is not None))


def _in_parts(
    arrays: _Arrays,
    top_k: int,
    *,
    quantize_out: bool,
    pdl: bool,
    norm: dict[str, Any],
    **options: Any,
) -> tuple[Any, ...]:
    """Launch the kernels of the parts."""
    x, residual, norm_weight, weight, bias, y, h, *_ = arrays
    norm = norm if h is None else norm | {"residual": residual, "residual_out": h}
    if quantize_out:
        codes, scales, *_ = rmsnorm_quantize(x, norm_weight, group=_GROUP, normed_out=y, **norm)
        arrays = arrays._replace(codes=codes, scales=scales)
    else:
        rmsnorm(x, norm_weight, out=y, **norm)
    logits = gemm(y, weight, bias=bias, out_dtype=FLOAT32, pdl=pdl)
    return arrays.results(moe_route(logits, top_k, **options))


class _Choice(NamedTuple):
    """A kernel, its module, the blocks per cluster, and their dynamic shared memory in bytes."""

    kernel: Kernel
    spec: ModuleSpec
    cluster: int
    shared_bytes: int

    def is_small(self) -> bool:
        """Tell whether a block fits a multiprocessor."""
        return self.shared_bytes + _STATIC_BYTES <= limits().shared_bytes


@cache
def _num_clusters(choice: _Choice) -> int:
    """Return the number of clusters that the device holds at once."""
    kernel, spec, cluster, shared_bytes = choice
    return kernel.resident_clusters(spec, _THREADS, shared_bytes, cluster)


def _width(num_experts: int) -> int:
    """Return the experts in the entry point's name."""
    return next(width for width in WIDTHS if width >= num_experts)


def _choose_one(arrays: _Arrays, num_shared: int) -> _Choice | None:
    """Return the kernel for one token; None if it is unsupported."""
    x = arrays.x
    weight = arrays.weight
    (num_logits, n) = weight.shape
    is_routable = limits().has_clusters and num_logits <= MAX_EXPERTS
    if not is_routable or not is_aligned(x, arrays.norm_weight, weight, arrays.y):
        return None
    width = vector_width(x)
    if n % width or n // width > _MAX_VECTORS:
        return None
    kernel = _ONE_TOKEN[_width(num_logits - num_shared)]
    for cluster in _CLUSTERS:
        rows = ceil_div(num_logits, cluster) + 1  # rows of the weight, and y
        sums = num_logits << _log_splits(num_logits, cluster)
        size = rows * n * weight.itemsize + sums * 4
        choice = _Choice(kernel, _spec(dtype_name(weight.dtype)), cluster, size)
        if choice.is_small() and _num_clusters(choice):
            return choice
    return None


def _log_splits(num_logits: int, cluster: int) -> int:
    """Return the binary logarithm of the warps that share a row of the weight, for one token.

    Examples
    --------
    >>> _log_splits(128, 16), _log_splits(32, 16), _log_splits(512, 8)
    (1, 3, 0)
    """
    return max(_THREADS // 32 // ceil_div(num_logits, cluster), 1).bit_length() - 1


def _choose_few(arrays: _Arrays) -> _Choice | None:
    """Return the kernel for a few tokens; None if it is unsupported, or the parts are faster."""
    x = arrays.x
    weight = arrays.weight
    (num_tokens, n) = x.shape
    num_logits = weight.shape[0]
    # The bias is read element by element.
    given = [array for array in arrays if array is not None and array is not arrays.bias]
    is_routable = num_tokens > 0 and num_logits <= MAX_EXPERTS and n % _STEP == 0
    if not is_routable or x.itemsize != 2 or not limits().has_clusters or not is_aligned(*given):
        return None
    num_tiles = ceil_div(num_tokens, _TOKENS)
    is_wide = _slab(n, 8) > _WIDE_SLAB and num_tiles <= _MAX_TILES
    width = _width(num_logits)  # a shared expert's logit is one of the kernel's columns
    spec = _spec(dtype_name(weight.dtype), "_few_tokens")
    for cluster in (16, 8) if is_wide else (8, 16):
        choice = _Choice(_FEW_TOKENS[width], spec, cluster, _shared_bytes(n, width, cluster))
        if choice.is_small() and num_tiles <= _num_clusters(choice):
            return choice
    return None


def _slab(n: int, cluster: int) -> int:
    """Return the columns per block, a multiple of the columns per scale."""
    return ceil_div(ceil_div(n, cluster), _GROUP) * _GROUP


def _shared_bytes(n: int, width: int, cluster: int) -> int:
    """Return the dynamic shared memory per block: y, the norm's weight, logits, the weight.

    Examples
    --------
    >>> _shared_bytes(2048, 128, 8)
    92224
    """
    row_bytes = (_slab(n, cluster) + _ROW_PAD) * 2
    logit_bytes = _TOKENS * (width + _LOGIT_PAD) * 4
    num_splits = _THREADS // 32 // (width // _PART)  # each warp multiplies a part
    own = max(width * row_bytes, num_splits * logit_bytes)
    return (_TOKENS + 1) * row_bytes + logit_bytes + own


def _launch(
    choice: _Choice,
    arrays: _Arrays,
    routing: Routing,
    *,
    top_k: int,
    num_shared: int,
    score: str,
    **others: Any,
) -> None:
    cluster = choice.cluster
    (num_tokens, n) = arrays.x.shape
    num_experts = arrays.weight.shape[0] - num_shared
    num_tiles = ceil_div(num_tokens, _TOKENS)
    counts = workspace(num_tiles * num_experts) if num_tiles > 1 else None
    choice.kernel.launch(
        choice.spec,
        (cluster * num_tiles,),
        (_THREADS,),
        choice.shared_bytes,
        cluster=cluster,
        pdl=True,
        counts=counts,
        num_tokens=num_tokens,
        n=n,
        slab=_slab(n, cluster),
        log_splits=_log_splits(num_experts + num_shared, cluster),
        num_experts=num_experts,
        top_k=top_k,
        num_shared=num_shared,
        is_sigmoid=score == "sigmoid",
        **arrays._asdict(),
        **routing._asdict(),
        **others,
    )
    if num_tiles > 1:
        place_pairs(
            routing,
            counts,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=num_experts,
            num_shared=num_shared,
            chunk_tokens=_TOKENS,
        )
