"""Launches of gemm and rmsnorm_gemm, using the kernels that `config.py` chooses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine import device
from engine.dtypes import dtype_name
from engine.errors import ContractError
from engine.kernels._chip import is_hopper, limits, sm_count
from engine.kernels._contract import FLOAT32
from engine.kernels._elementwise import VECTOR_BYTES
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.kernels.all_reduce import sent_segment
from engine.kernels.gemm import config as configs
from engine.kernels.gemm import skinny
from engine.kernels.gemm.config import Config, choose_config
from engine.kernels.gemm.operands import (
    SWIGLU,
    Norm,
    Operands,
    activation_number,
    row_stride,
)
from engine.kernels.gemm.skinny import SkinnyConfig, choose_skinny_in_parts
from engine.kernels.gemm.sm90 import (
    MAX_FEW_ROWS,
    HopperConfig,
    OutVector,
    Sending,
    choose_sender,
    launch_hopper,
    part_length,
)
from engine.kernels.swiglu import swiglu

__all__ = ["fuses_norm", "is_vector", "launch", "out_vector", "plan_sending", "sums_in_parts"]

_PARAMS = (
    "x:ptr x_stride:i64 weight:ptr norm_weight:ptr row_scales:ptr eps:f32 weight_offset:f32 "
    "bias:ptr residual:ptr residual_stride:i64 out:ptr out_stride:i64 partials:ptr m:i32 n:i32 "
    "k:i32 k_per_split:i32 activation:i32 is_float:i32 is_vector:i32"
)
_SKINNY_PARAMS = (
    "x:ptr x_stride:i64 weight:ptr norm_weight:ptr eps:f32 weight_offset:f32 bias:ptr "
    "residual:ptr residual_stride:i64 out:ptr out_stride:i64 m:i32 n:i32 k:i32 k_per_split:i32 "
    "num_tiles:i32 num_stages:i32 num_gates:i32 activation:i32 is_float:i32 is_vector:i32 "
    "uses_pdl:i32 warms_up:i32"
)
_KERNELS = {
    f"{op}_{name}": Kernel(f"{op}_{name}", params, struct=struct)
    for op in ("gemm", "rmsnorm_gemm")
    for names, params, struct in (
        (configs.KERNELS, _PARAMS, "GemmParams"),
        (skinny.KERNELS, _SKINNY_PARAMS, "SkinnyParams"),
    )
    for name in names
}
_KERNELS["gemm_" + skinny.RESIDENT] = Kernel(
    "gemm_" + skinny.RESIDENT, _SKINNY_PARAMS, struct="SkinnyParams"
)
_REDUCE = Kernel(
    "gemm_reduce",
    "partials:ptr num_splits:i32 bias:ptr residual:ptr residual_stride:i64 out:ptr "
    "out_stride:i64 m:i32 n:i32 activation:i32 is_float:i32",
)
_ROW_SCALES = Kernel(
    "rmsnorm_row_scales",
    "x:ptr x_stride:i64 row_scales:ptr m:i32 k:i32 eps:f32 is_vector:i32",
)
_REDUCE_THREADS = 256
_ROW_SCALES_ROWS = 8  # rows per block
_MAX_INT32 = 2**31 - 1
# Minimum columns of a result of which rows may be sent: shorter rows need other kernels of
# all_reduce_rmsnorm.
_SENT_MIN_COLUMNS = 2048
# Maximum rows of x, and maximum elements of the weight, for which Hopper's tiles leave swiglu to a
# separate kernel. Tuned on a model step: `python -m tests.bench decode_loop`.
_APART_MAX_M = 256
_APART_MAX_WEIGHT = 1 << 24


def launch(op: str, operands: Operands, norm: Norm | None = None) -> None:
    """Launch `op` ("gemm", or "rmsnorm_gemm" with a norm) on CuPy arrays."""
    x = operands.x
    (m, k) = x.shape
    n = operands.weight.shape[0]
    if m == 0 or n == 0:
        return
    dtype = dtype_name(x.dtype)
    aligned = _is_aligned(x, operands.weight, norm, deterministic=operands.deterministic)
    config = choose_config(
        m,
        n,
        k,
        dtype,
        sm_count(),
        is_aligned=aligned,
        deterministic=operands.deterministic,
        is_hopper=is_hopper(dtype) and (norm is None or operands.deterministic),
        is_gated=operands.activation in ("silu_and_mul", SWIGLU),
        has_norm=norm is not None,
        limits=limits(),
    )
    is_split = operands.activation == SWIGLU
    if is_split and not _fuses_swiglu(config, m, n, k, operands.deterministic):
        _launch_apart(op, operands, norm)
        return
    if max(m, n, k) > _MAX_INT32 - 256:
        raise ContractError(f"{op}: x: {m} x {k} by {n} x {k} is more than one launch can do")
    if isinstance(config, HopperConfig):
        config, sending = plan_sending(operands, config, choose_sender)
        launch_hopper(
            config,
            x,
            operands.weight,
            operands.out,
            _epilogue(operands),
            out_vector(operands.out, operands.residual),
            pdl=operands.pdl,
            is_split=is_split,
            sending=sending,
        )
    elif isinstance(config, SkinnyConfig):
        _launch_skinny(op, operands, norm, config)
    else:
        _launch_portable(op, operands, norm, config, aligned)


def fuses_norm(operands: Operands, norm: Norm) -> bool:
    """Tell whether one kernel returns the bits of `rmsnorm`, then `gemm`, with `deterministic`."""
    x = operands.x
    weight = operands.weight
    if not sums_in_parts(weight) or not _is_aligned(x, weight, norm, deterministic=True):
        return False
    (m, k) = x.shape
    problem = (m, weight.shape[0], k, part_length(k), sm_count(), limits())
    return choose_skinny_in_parts(*problem, has_norm=True) is not None


def sums_in_parts(weight: Any) -> bool:
    """Tell whether a `deterministic` product with `weight` (N, K) sums parts of k.

    It then rounds before it adds a residual. So a residual added by the product and one added by a
    norm after it yield the same bits, and `rmsnorm_gemm` those of `rmsnorm`, then `gemm`.
    """
    k = weight.shape[1]
    if not device.is_cupy_array(weight) or not is_hopper(dtype_name(weight.dtype)):
        return False
    steps = weight.data.ptr, k * weight.itemsize
    return part_length(k) > 0 and all(step % 16 == 0 for step in steps)


def plan_sending(
    o: Any, config: HopperConfig, choose: Callable[..., tuple[HopperConfig, int]]
) -> tuple[HopperConfig, Sending | None]:
    """Return the tile and the rows to send of `o`, Operands or W8Operands; None: it sends nothing.

    `config` is the tile of a product that sends nothing, and `choose` is `choose_sender` or
    `choose_w8_sender`.
    """
    (m, k) = o.x.shape
    if o.peers is None or o.peers.size == 1 or o.deterministic or m <= MAX_FEW_ROWS:
        return config, None
    if o.residual is not None or o.activation is not None or o.out.itemsize != 2:
        return config, None
    n = o.out.shape[1]
    is_whole = o.out.flags.c_contiguous and o.out.data.ptr % VECTOR_BYTES == 0
    if not is_whole or n < _SENT_MIN_COLUMNS or n * o.out.itemsize % VECTOR_BYTES:
        return config, None
    segment = sent_segment(o.peers, o.out.nbytes)
    if segment is None:
        return config, None
    config, rows = choose(config, m, n, k, sm_count())
    return config, Sending(o.peers, rows, segment) if rows else None


def _fuses_swiglu(
    config: Config | HopperConfig | SkinnyConfig, m: int, n: int, k: int, deterministic: bool
) -> bool:
    """Tell whether the GEMM kernel applies swiglu itself; portable tiles cannot.

    For few rows and small weights, Hopper's tiles leave it to the op `swiglu`: while that runs, the
    next GEMM already loads its weights (docs/benchmarks/decode_loop.md).
    """
    if n % 16:
        return False
    if isinstance(config, HopperConfig):
        return deterministic or m > _APART_MAX_M or n * k > _APART_MAX_WEIGHT
    return isinstance(config, SkinnyConfig)


def _launch_apart(op: str, operands: Operands, norm: Norm | None) -> None:
    """Launch the GEMM, then swiglu on its result."""
    x = operands.x
    rows = operands.weight.shape[0]
    packed = device.cupy().empty((x.shape[0], rows), x.dtype)
    launch(op, replace(operands, activation=None, out=packed), norm)
    swiglu(packed, out=operands.out)


def _launch_portable(
    op: str, operands: Operands, norm: Norm | None, config: Config, aligned: bool
) -> None:
    x = operands.x
    out = operands.out
    (m, k) = x.shape
    n = operands.weight.shape[0]
    dtype = dtype_name(x.dtype)
    if math.prod(config.grid(m, n)) > _MAX_INT32:
        raise ContractError(f"{op}: x: {m} x {k} by {n} x {k} is more than one launch can do")
    row_scales, partials = _scratch(config, m, n, needs_scales=norm is not None)
    if row_scales is not None and norm is not None:
        _launch_row_scales(ModuleSpec(f"gemm/{op}.cu", dtype), x, row_scales, norm.eps, aligned)
    epilogue = _epilogue(operands)
    _KERNELS[f"{op}_{config.kernel}"].launch(
        ModuleSpec(f"gemm/{op}.cu", dtype),
        config.grid(m, n),
        (config.threads,),
        config.shared_bytes,
        x=x,
        x_stride=row_stride(x),
        weight=operands.weight,
        norm_weight=None if norm is None else norm.weight,
        row_scales=row_scales,
        eps=0.0 if norm is None else norm.eps,
        weight_offset=0.0 if norm is None else norm.weight_offset,
        partials=partials,
        m=m,
        n=n,
        k=k,
        k_per_split=config.k_per_split,
        is_vector=is_vector(out, operands.residual),
        **epilogue,
    )
    if partials is not None:
        _REDUCE.launch(
            ModuleSpec("gemm/gemm.cu", dtype),
            (ceil_div(m * n, _REDUCE_THREADS),),
            (_REDUCE_THREADS,),
            partials=partials,
            num_splits=config.num_splits,
            m=m,
            n=n,
            **epilogue,
        )


def _launch_skinny(op: str, operands: Operands, norm: Norm | None, config: SkinnyConfig) -> None:
    x = operands.x
    out = operands.out
    (m, k) = x.shape
    n = operands.weight.shape[0]
    pdl = operands.pdl and limits().has_clusters
    file = f"gemm/{op}_stream_sm90.cu" if config.sums_parts else f"gemm/{op}.cu"
    _KERNELS[f"{op}_{config.kernel}"].launch(
        ModuleSpec(file, dtype_name(x.dtype)),
        config.grid(m, n),
        config.block,
        config.shared_bytes,
        cluster=config.cluster,
        pdl=pdl,
        x=x,
        x_stride=row_stride(x),
        weight=operands.weight,
        norm_weight=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        weight_offset=0.0 if norm is None else norm.weight_offset,
        m=m,
        n=n,
        k=k,
        k_per_split=config.k_per_split,
        num_tiles=config.num_tiles(n),
        num_stages=config.num_stages,
        num_gates=n // 2 if operands.activation == SWIGLU else 0,
        is_vector=is_vector(out, operands.residual),
        uses_pdl=pdl,
        warms_up=config.warms_up and pdl,
        **_epilogue(operands),
    )


def _scratch(config: Config, m: int, n: int, *, needs_scales: bool) -> tuple[Any, Any]:
    """Return scratch for 1 / rms of each row and for partial sums; None if not needed."""
    scales = 0 if config.is_skinny or not needs_scales else ceil_div(m, 4) * 4
    partials = config.num_splits * m * n if config.num_splits > 1 else 0
    if scales + partials == 0:
        return None, None
    buffer = workspace(scales + partials)
    return (buffer[:scales] if scales else None), (buffer[scales:] if partials else None)


def _launch_row_scales(spec: ModuleSpec, x: Any, scales: Any, eps: float, aligned: bool) -> None:
    m, k = x.shape
    _ROW_SCALES.launch(
        spec,
        (ceil_div(m, _ROW_SCALES_ROWS),),
        (_ROW_SCALES_ROWS * 32,),
        x=x,
        x_stride=row_stride(x),
        row_scales=scales,
        m=m,
        k=k,
        eps=eps,
        is_vector=aligned,
    )


def _epilogue(operands: Operands) -> dict[str, Any]:
    out = operands.out
    residual = operands.residual
    return {
        "bias": operands.bias,
        "residual": residual,
        "residual_stride": 0 if residual is None else row_stride(residual),
        "out": out,
        "out_stride": row_stride(out),
        "activation": activation_number(operands.activation),
        "is_float": out.dtype == FLOAT32,
    }


def _is_aligned(x: Any, weight: Any, norm: Norm | None, *, deterministic: bool) -> bool:
    """Tell whether 16-byte accesses can read all rows of the operands.

    With `deterministic` the stride of a single row counts too, to select the same kernel.
    """
    steps = [x.data.ptr, weight.data.ptr, x.shape[1] * x.itemsize]
    if x.shape[0] > 1 or deterministic:
        steps.append(x.strides[0])
    if norm is not None:
        steps.append(norm.weight.data.ptr)
    return all(step % 16 == 0 for step in steps)


def is_vector(out: Any, residual: Any) -> bool:
    """Tell whether out and residual can be accessed in vectors of four elements."""
    width = 4 * out.itemsize
    for array in (out,) if residual is None else (out, residual):
        if array.data.ptr % width or array.shape[1] % 4:
            return False
        if array.shape[0] > 1 and array.strides[0] % width:
            return False
    return True


def out_vector(out: Any, residual: Any) -> OutVector:
    """Return the widest vector for accesses to out and residual."""
    if not is_vector(out, residual):
        return OutVector.ONE
    steps = [out.data.ptr, out.shape[1] * out.itemsize]
    if out.shape[0] > 1:
        steps.append(out.strides[0])
    return OutVector.EIGHT if all(step % 16 == 0 for step in steps) else OutVector.FOUR
