"""gemm_fp8 and gemm_int8, GEMMs of 8-bit codes: contract, choice of the kernel, launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine import device, reference
from engine.dtypes import dtype_name
from engine.errors import ContractError
from engine.kernels._chip import HOPPER_DTYPES, Limits, is_hopper, limits, sm_count
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._peer_memory import PeerMemory, peer_memory
from engine.kernels._quantize import CODES, GROUP, num_scales
from engine.kernels.gemm.launch import is_vector, out_vector, plan_sending
from engine.kernels.gemm.operands import (
    SWIGLU,
    activation_number,
    check_columns,
    check_residual,
    out_dtype_of,
    row_stride,
)
from engine.kernels.gemm.sm90 import HopperConfig
from engine.kernels.gemm.w8_sm90 import (
    choose_w8_hopper,
    choose_w8_sender,
    launch_w8_hopper,
    w8_hopper_specs,
)
from engine.kernels.quantize_rows import quantize_rows
from engine.kernels.quantize_rows import specs as rows_specs
from engine.kernels.rmsnorm_quantize import rmsnorm_quantize
from engine.kernels.rmsnorm_quantize import specs as norm_specs
from engine.kernels.swiglu import specs as swiglu_specs
from engine.kernels.swiglu import swiglu

__all__ = ["MAX_SKINNY_ROWS", "SkinnyW8", "W8Operands", "choose_skinny", "gemm_w8", "w8_specs"]

_PARAMS = (
    "x:ptr x_stride:i64 x_scales:ptr weight:ptr weight_scales:ptr norm_weight:ptr eps:f32 "
    "weight_offset:f32 bias:ptr residual:ptr residual_stride:i64 out:ptr out_stride:i64 m:i32 "
    "n:i32 k:i32 k_per_split:i32 num_tiles:i32 num_stages:i32 num_gates:i32 activation:i32 "
    "is_float:i32 is_vector:i32 uses_pdl:i32"
)
_OPS = ("gemm_fp8", "gemm_fp8_blocks", "gemm_int8")
_KERNELS = {
    f"{op}_{name}": Kernel(f"{op}_{name}", _PARAMS, struct="W8Params")
    for op in _OPS
    for name in ("tile", "unaligned", "skinny_5", "skinny_4", "skinny_3")
}
_TILE = 64
_TILE_THREADS = 128
_MAX_INT32 = 2**31 - 1

MAX_SKINNY_ROWS = 8
# On Hopper tiles take more rows than these, tuned on model steps. Swapped tiles take over if the
# weight has at least _SWAPPED_MIN_SIZE rows and columns: after 2 rows, or 4 with scales by group.
# Other tiles take over for rows of over _LONG_K values, which leave the skinny kernels few stages.
_SWAPPED_MIN_SIZE = 4096
_MAX_ROWS_BESIDE_SWAPPED = {False: 2, True: 4}
_LONG_K = 8192
_MAX_LONG_ROWS = 4
_WARPS = 8  # warps per block: the limit of __launch_bounds__ in w8_skinny.cuh
_PARTS = (4, 2, 8, 1)  # parts of k among the warps of a block, preferred ones first
_ROWS = 16  # weight rows per warp
_STEP_PAIRS = 128  # pairs of values of k per step of a warp
_STAGE_BYTES = 4096
_LONG_STAGES = 12  # minimum stages per warp for which a longer ring pays
_MAX_QUANTIZED_K = 16384  # maximum row length that the skinny kernels quantize
_STATIC_BYTES = 2048  # static shared memory and the driver's reserve, in bytes


def w8_specs(
    op: str, dtype: str, *, deterministic: bool = False, has_peers: bool = False
) -> tuple[ModuleSpec, ...]:
    """Return the modules that `op` may launch for `dtype`."""
    codes = op.removeprefix("gemm_")
    tiles = w8_hopper_specs(codes, dtype, deterministic=deterministic, sends=has_peers)
    own = (ModuleSpec(f"gemm/{op}.cu", dtype), *tiles)
    others = (*rows_specs(dtype), *norm_specs(dtype), *swiglu_specs(dtype))
    return tuple(dict.fromkeys((*own, *others)))


@dataclass(frozen=True)
class W8Operands:
    """Checked arrays and options of one GEMM.

    Attributes
    ----------
    codes : str
        "fp8" or "int8".
    dtype : str
        Dtype of the module, of bias, and of a 16-bit result.
    """

    codes: str
    dtype: str
    x: Any
    weight: Any
    weight_scales: Any
    x_scales: Any
    norm_weight: Any
    eps: float
    weight_offset: float
    bias: Any
    residual: Any
    activation: str | None
    deterministic: bool
    pdl: bool
    peers: PeerMemory | None = None
    out: Any = None

    @property
    def op(self) -> str:
        """Return the prefix of the entry points."""
        return f"gemm_{self.codes}" + ("_blocks" if self.has_blocks else "")

    @property
    def has_blocks(self) -> bool:
        """Tell whether the weight has one scale per block."""
        return int(self.weight_scales.ndim) == 2

    @property
    def group(self) -> int:
        """Return the columns of x per scale; 0 means the whole row."""
        return _group(self.codes, has_blocks=self.has_blocks)


@dataclass(frozen=True)
class SkinnyW8:
    """Tiling of a skinny product: stages of a warp's ring, parts of k."""

    stages: int
    parts: int
    part_pairs: int
    shared_bytes: int
    blocks: int

    @property
    def tile_n(self) -> int:
        """Return the weight rows per step of a block."""
        return _WARPS // self.parts * _ROWS


def choose_skinny(
    m: int,
    n: int,
    k: int,
    sm_count: int,
    limits: Limits,
    *,
    group: int = 0,
) -> SkinnyW8 | None:
    """Choose for x (m, k) and weight (n, k), both aligned; None if x exceeds shared memory.

    Examples
    --------
    >>> choose_skinny(1, 4096, 4096, 132, Limits(232_448, True)).parts
    4
    """
    if not 0 < m <= MAX_SKINNY_ROWS or k == 0 or n == 0:
        return None
    parts = _num_parts(n, k, sm_count)
    part_pairs = ceil_div(ceil_div(k, 2 * _STEP_PAIRS), parts) * _STEP_PAIRS
    beside = m * (ceil_div(k, 512) * 512 + 64) + 2 * _WARPS * m * (_ROWS + 4) * 4
    beside += m * num_scales(k, group) * 4 if group else 0
    tiles = ceil_div(n, _WARPS // parts * _ROWS)
    waves = ceil_div(tiles, sm_count)
    is_long = waves * part_pairs >= _LONG_STAGES * _STEP_PAIRS
    for stages in (5, 4, 3) if is_long else (4, 3):
        shared = _WARPS * stages * _STAGE_BYTES + beside
        if shared + _STATIC_BYTES <= limits.sm_shared_bytes:
            return SkinnyW8(stages, parts, part_pairs, shared, min(tiles, sm_count))
    return None


def _num_parts(n: int, k: int, sm_count: int) -> int:
    """Return the number of parts of k that minimises the stages per warp.

    Finishing a tile costs a warp as much as a stage.
    """
    groups = ceil_div(n, _ROWS)
    stages = ceil_div(k, 2 * _STEP_PAIRS)

    def cost(parts: int) -> int:
        waves = ceil_div(ceil_div(groups, _WARPS // parts), sm_count)
        return waves * (ceil_div(stages, parts) + 1)

    least = min(map(cost, _PARTS))
    return next(parts for parts in _PARTS if cost(parts) <= 1.12 * least)


_MIRRORS = {"fp8": reference.gemm_fp8, "int8": reference.gemm_int8}


def gemm_w8(
    codes: str,
    x: Any,
    weight: Any,
    weight_scales: Any,
    *,
    deterministic: bool,
    pdl: bool,
    peers: Any,
    out: Any,
    **options: Any,
) -> Any:
    """Run gemm_fp8 or gemm_int8: check the arguments, then call the mirror or launch kernels.

    `codes` is "fp8" or "int8"; see the ops for the other arguments.
    """
    call = Contract(f"gemm_{codes}")
    columns = _check(call, codes, x, weight, weight_scales, options)
    if call.on_cpu:
        return call.finish(out, _MIRRORS[codes](**options), layout="rows")
    dtype = options.pop("out_dtype")
    out = call.output("out", out, (call["M"], columns), dtype, layout="rows")
    module = _module_dtype(options["x"], options["x_scales"], options["bias"], dtype)
    if peers is not None:
        options["peers"] = peer_memory(call, options["x"], peers)
    operands = W8Operands(codes, module, out=out, deterministic=deterministic, pdl=pdl, **options)
    _launch(operands)
    return out


def _check(
    call: Contract, codes: str, x: Any, weight: Any, weight_scales: Any, options: dict[str, Any]
) -> int:
    """Store the checked arrays in `options`; return the result's columns."""
    norm_weight = options["norm_weight"]
    activation = options["activation"]
    bias = options["bias"]
    residual = options["residual"]
    x, x_scales = _check_x(call, codes, x, options["x_scales"], norm_weight)
    weight = call.array("weight", weight, "N K", CODES[codes])
    weight_scales, x_scales = _check_scales(call, codes, weight_scales, x_scales)
    if norm_weight is not None:
        norm_weight = call.array("norm_weight", norm_weight, "K", x.dtype)
        call.check("norm_weight", call["K"] > 0, "of at least one feature", norm_weight.shape)
    call.number("eps", options["eps"], low=0.0)
    call.number("weight_offset", options["weight_offset"])
    allowed = tuple(dict.fromkeys((x.dtype, FLOAT32))) if x_scales is None else FLOATS
    dtype = out_dtype_of(call, x.dtype, options["out_dtype"], allowed)
    columns = check_columns(call, activation)
    residual = check_residual(call, activation, residual, columns, dtype)
    if bias is not None:
        own = FLOATS if dtype == FLOAT32 else dtype
        bias = call.array("bias", bias, "N", x.dtype if x_scales is None else own)
    options |= {"x": x, "weight": weight, "weight_scales": weight_scales, "x_scales": x_scales}
    options |= {"norm_weight": norm_weight, "bias": bias, "residual": residual, "out_dtype": dtype}
    return columns


def _check_x(call: Contract, codes: str, x: Any, x_scales: Any, norm_weight: Any) -> Any:
    if x_scales is None:
        return call.array("x", x, "M K", FLOATS, layout="rows"), None
    x = call.array("x", x, "M K", CODES[codes])
    call.check("norm_weight", norm_weight is None, "None with x_scales", "an array")
    return x, x_scales


def _check_scales(call: Contract, codes: str, weight_scales: Any, x_scales: Any) -> Any:
    has_blocks = codes == "fp8" and getattr(weight_scales, "ndim", 1) == 2
    blocks = f"{ceil_div(call['N'], GROUP)} {ceil_div(call['K'], GROUP)}"
    shape = blocks if has_blocks else "N"
    weight_scales = call.array("weight_scales", weight_scales, shape, FLOAT32)
    if x_scales is not None:
        shape = f"M {num_scales(call['K'], _group(codes, has_blocks=has_blocks))}"
        x_scales = call.array("x_scales", x_scales, shape, FLOAT32)
    return weight_scales, x_scales


def _group(codes: str, *, has_blocks: bool) -> int:
    """Return the columns of x per scale; 0 means the whole row."""
    return GROUP if has_blocks or codes == "int8" else 0


def _module_dtype(x: Any, x_scales: Any, bias: Any, result_dtype: np.dtype[Any]) -> str:
    if x_scales is None:
        return dtype_name(x.dtype)
    if bias is not None:
        return dtype_name(bias.dtype)
    return "bfloat16" if result_dtype == FLOAT32 else dtype_name(result_dtype)


def _launch(o: W8Operands) -> None:
    (m, k) = o.x.shape
    n = o.weight.shape[0]
    if m == 0 or n == 0:
        return
    if max(m, n, k) > _MAX_INT32 - 512:
        raise ContractError(f"{o.op}: x: {m} x {k} by {n} x {k} is more than one launch can do")
    if _may_skip_tiles(o):
        if m > 1 or k > _MAX_QUANTIZED_K:
            o = _quantized(o)
        config = choose_skinny(
            m,
            n,
            k,
            sm_count(),
            limits(),
            group=o.group,
        )
        if config is not None:
            _launch_skinny(o, config)
            return
    o = _quantized(o)
    if _is_hopper(o):
        _launch_hopper(o)
    elif o.activation == SWIGLU:
        packed = device.cupy().empty((m, n), np.dtype(o.out.dtype))
        _launch_tile(replace(o, activation=None, out=packed))
        swiglu(packed, out=o.out)
    else:
        _launch_tile(o)


def _may_skip_tiles(o: W8Operands) -> bool:
    """Tell whether a skinny kernel supports the GEMM, and beats Hopper's tiles."""
    m, k = o.x.shape
    if m > MAX_SKINNY_ROWS or o.deterministic or o.dtype not in HOPPER_DTYPES or k % 16:
        return False
    if o.activation == SWIGLU and o.weight.shape[0] % 16:
        return False
    steps = [o.x.data.ptr, o.weight.data.ptr, o.x.strides[0] if m > 1 else 0]
    steps.append(0 if o.norm_weight is None else o.norm_weight.data.ptr)
    if any(step % 16 for step in steps):
        return False
    if not _is_hopper(o):
        return True
    is_large = min(o.weight.shape) >= _SWAPPED_MIN_SIZE
    if is_large and m > _MAX_ROWS_BESIDE_SWAPPED[o.group > 0] and _hopper_tile(o).swapped:
        return False
    return bool(m <= _MAX_LONG_ROWS or k <= _LONG_K)


def _quantized(o: W8Operands) -> W8Operands:
    """Return the operands, with x quantized."""
    if o.x_scales is not None:
        return o
    if o.norm_weight is None:
        x, scales = quantize_rows(o.x, dtype=o.codes, group=o.group)
    else:
        x, scales = rmsnorm_quantize(
            o.x,
            o.norm_weight,
            eps=o.eps,
            weight_offset=o.weight_offset,
            dtype=o.codes,
            group=o.group,
        )
    return replace(o, x=x, x_scales=scales, norm_weight=None)


def _launch_skinny(o: W8Operands, config: SkinnyW8) -> None:
    n = o.weight.shape[0]
    pdl = o.pdl and limits().has_clusters
    _KERNELS[f"{o.op}_skinny_{config.stages}"].launch(
        ModuleSpec(f"gemm/gemm_{o.codes}.cu", o.dtype),
        (config.blocks,),
        (32, config.parts, _WARPS // config.parts),
        config.shared_bytes,
        pdl=True,
        k_per_split=config.part_pairs,
        num_tiles=ceil_div(n, config.tile_n),
        num_stages=config.stages,
        num_gates=n // 2 if o.activation == SWIGLU else 0,
        uses_pdl=pdl,
        **_arguments(o),
    )


def _is_hopper(o: W8Operands) -> bool:
    """Tell whether Hopper's tiles support this GEMM of codes."""
    n, k = o.weight.shape
    if o.activation == SWIGLU and (n % 16 or (o.has_blocks and n // 2 % 64)):
        return False
    aligned = all(step % 16 == 0 for step in (o.x.data.ptr, o.weight.data.ptr, k))
    return k > 0 and aligned and is_hopper(o.dtype)


def _hopper_tile(o: W8Operands) -> HopperConfig:
    return choose_w8_hopper(
        o.codes,
        o.x.shape[0],
        *o.weight.shape,
        sm_count(),
        has_blocks=o.has_blocks,
        deterministic=o.deterministic,
        is_gated=o.activation in (SWIGLU, "silu_and_mul"),
    )


def _launch_hopper(o: W8Operands) -> None:
    arguments = _arguments(o)
    names = (
        "x_scales weight_scales bias residual residual_stride out out_stride activation is_float"
    )
    config, sending = plan_sending(o, _hopper_tile(o), choose_w8_sender)
    launch_w8_hopper(
        config,
        o.codes,
        o.dtype,
        o.x,
        o.weight,
        o.out,
        {name: arguments[name] for name in names.split()},
        out_vector(o.out, o.residual),
        has_blocks=o.has_blocks,
        pdl=o.pdl,
        is_split=o.activation == SWIGLU,
        sending=sending,
    )


def _launch_tile(o: W8Operands) -> None:
    m, k = o.x.shape
    n = o.weight.shape[0]
    steps = (o.x.data.ptr, o.weight.data.ptr, k)
    name = "tile" if all(step % 16 == 0 for step in steps) else "unaligned"
    _KERNELS[f"{o.op}_{name}"].launch(
        ModuleSpec(f"gemm/gemm_{o.codes}.cu", o.dtype),
        (ceil_div(m, _TILE) * ceil_div(n, _TILE),),
        (_TILE_THREADS,),
        pdl=True,
        k_per_split=0,
        num_tiles=0,
        num_stages=0,
        num_gates=0,
        uses_pdl=False,
        **_arguments(o),
    )


def _arguments(o: W8Operands) -> dict[str, Any]:
    m, k = o.x.shape
    return {
        "x": o.x,
        "x_stride": row_stride(o.x),
        "x_scales": o.x_scales,
        "weight": o.weight,
        "weight_scales": o.weight_scales,
        "norm_weight": o.norm_weight,
        "eps": o.eps,
        "weight_offset": o.weight_offset,
        "bias": o.bias,
        "residual": o.residual,
        "residual_stride": 0 if o.residual is None else row_stride(o.residual),
        "out": o.out,
        "out_stride": row_stride(o.out),
        "m": m,
        "n": o.weight.shape[0],
        "k": k,
        "activation": activation_number(o.activation),
        "is_float": o.out.dtype == FLOAT32,
        "is_vector": is_vector(o.out, o.residual),
    }
