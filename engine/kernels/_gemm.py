"""What gemm and rmsnorm_gemm have in common: the choice of a kernel, and its launch.

Problem -> `choose_config` -> `Config` -> `launch`. The choice is a pure function that needs no GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.dtypes import dtype_name, itemsize
from engine.errors import ContractError
from engine.kernels._contract import FLOAT32
from engine.kernels._launch import Kernel, ceil_div, sm_count
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace

__all__ = ["ACTIVATIONS", "Config", "Norm", "Operands", "choose_config", "launch"]

ACTIVATIONS: tuple[str | None, ...] = (None, "silu", "gelu", "gelu_tanh", "relu")

_PARAMS = (
    "x:ptr x_stride:i64 weight:ptr norm_weight:ptr row_scales:ptr eps:f32 weight_offset:f32 "
    "bias:ptr residual:ptr residual_stride:i64 out:ptr out_stride:i64 partials:ptr m:i32 n:i32 "
    "k:i32 k_per_split:i32 activation:i32 is_float:i32 is_vector:i32"
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
_ROW_SCALES_ROWS = 8  # rows a block
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Config:
    """A kernel and how the problem is cut for it.

    Attributes
    ----------
    kernel : str
        Entry point, without the op's prefix.
    tile_m, tile_n : int
        Rows and columns of out that a block makes.
    threads, shared_bytes : int
        Threads and dynamic shared memory of a block.
    num_splits, k_per_split : int
        How many blocks share the sum over k of a tile, and how much of k each takes.
    """

    kernel: str
    tile_m: int
    tile_n: int
    threads: int
    shared_bytes: int
    num_splits: int
    k_per_split: int

    @property
    def is_skinny(self) -> bool:
        """Tell whether weights stream through registers (few rows of x)."""
        return self.kernel.startswith("skinny")

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return how many blocks a problem of `m` rows and `n` columns takes."""
        rows, cols = ceil_div(m, self.tile_m), ceil_div(n, self.tile_n)
        return (cols, rows) if self.is_skinny else (rows * cols, self.num_splits)


@dataclass(frozen=True)
class _Tile:
    """A tiled kernel, and what it is worth: `rate` products a cycle of a full multiprocessor."""

    kernel: str
    tile_m: int
    tile_n: int
    threads: int
    stages: int
    blocks_per_sm: int
    rate: int

    def config(self, k: int, num_splits: int = 1, step: int = 1) -> Config:
        """Return the kernel with `k` cut into `num_splits` shares, multiples of `step`."""
        shared = self.stages * (self.tile_m + self.tile_n) * 64
        share = max(step, ceil_div(ceil_div(k, num_splits), step) * step)
        splits = max(1, ceil_div(k, share))
        return Config(self.kernel, self.tile_m, self.tile_n, self.threads, shared, splits, share)


# The rates are estimates for Hopper from instruction and L2 throughput; only their ratios matter.
_HALF_TILES = (
    _Tile("tile_128x256", 128, 256, 256, 4, 1, 1250),
    _Tile("tile_128x128", 128, 128, 128, 4, 2, 1000),
    _Tile("tile_64x128", 64, 128, 128, 5, 3, 800),
    _Tile("tile_64x64", 64, 64, 128, 6, 4, 550),
)
_FLOAT_TILES = (
    _Tile("tile_128x128", 128, 128, 256, 4, 2, 90),
    _Tile("tile_64x64", 64, 64, 256, 4, 3, 70),
)
_HALF_UNALIGNED = _Tile("unaligned_64x64", 64, 64, 128, 3, 3, 0)
_FLOAT_UNALIGNED = _Tile("unaligned_64x64", 64, 64, 256, 3, 3, 0)

_SKINNY_MAX_M = {2: 32, 4: 16}  # by itemsize
_BYTES_PER_CYCLE = 2400  # of memory, whole chip
_TILE_CYCLES = 1500  # before a block's first product and after its last
_REDUCE_CYCLES = 3000  # a second launch
_MIN_SHARE_BYTES = 512  # of k: less is not worth a block


@cache
def choose_config(
    m: int, n: int, k: int, dtype: str, sm_count: int, *, is_aligned: bool = True
) -> Config:
    """Choose for x (m, k) and weight (n, k) of `dtype` on `sm_count` multiprocessors.

    `is_aligned` says that rows start at, and have the length of, whole 16-byte accesses. Few rows
    take a skinny kernel; else the tile and the number of splits with the least estimated time. The
    skinny kernels sum in an order that depends on n and k alone, the tiled ones in one that depends
    on `num_splits` too, and so on m.

    Examples
    --------
    >>> choose_config(1, 4096, 4096, "bfloat16", 132).kernel
    'skinny_8x16_w16'
    >>> choose_config(4096, 4096, 4096, "bfloat16", 132).kernel
    'tile_128x256'
    """
    size = itemsize(dtype)
    if not is_aligned:
        return (_HALF_UNALIGNED if size == 2 else _FLOAT_UNALIGNED).config(k)
    if m <= _SKINNY_MAX_M[size]:
        return _skinny(m, n, k, size, sm_count)
    step = 64 // size
    choices = [
        tile.config(k, splits, step)
        for tile in (_HALF_TILES if size == 2 else _FLOAT_TILES)
        for splits in _splits(
            ceil_div(m, tile.tile_m) * ceil_div(n, tile.tile_n), k, size, sm_count
        )
    ]
    return min(choices, key=lambda config: _estimate(config, m, n, k, size, sm_count))


def _skinny(m: int, n: int, k: int, size: int, sm_count: int) -> Config:
    if size == 4:
        tokens, rows, warps = (1, 4, 8) if m <= 1 else (8, 2, 8)
    else:
        tokens = next(t for t in (8, 16, 32) if m <= t)
        # Many rows: two blocks of eight warps fill a multiprocessor, and 32 rows halve the reads of
        # x. Few rows: sixteen warps a block, or there would not be enough loads in flight. How many
        # warps share k is settled by n alone, so that a result does not depend on m.
        is_large = n >= 64 * sm_count
        warps = 8 if is_large else 16
        rows = 32 if is_large and tokens > 8 else 16
    return Config(f"skinny_{tokens}x{rows}_w{warps}", tokens, rows, warps * 32, 0, 1, k)


def _splits(tiles: int, k: int, size: int, sm_count: int) -> list[int]:
    """Return the numbers of splits worth looking at: more than one only if tiles are few."""
    most = min(16, 4 * sm_count // max(1, tiles), k * size // _MIN_SHARE_BYTES)
    return [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= max(1, most)]


def _estimate(config: Config, m: int, n: int, k: int, size: int, sm_count: int) -> float:
    """Return about how many cycles a tiled configuration takes."""
    tile = next(
        t for t in (_HALF_TILES if size == 2 else _FLOAT_TILES) if t.kernel == config.kernel
    )
    blocks = math.prod(config.grid(m, n))
    per_sm = ceil_div(blocks, sm_count)
    resident = min(per_sm, tile.blocks_per_sm)
    rate = tile.rate * (1 + resident / tile.blocks_per_sm) / 2  # a lone block hides less
    compute = per_sm * tile.tile_m * tile.tile_n * config.k_per_split / rate
    memory = (m + n) * k * size / _BYTES_PER_CYCLE
    waves = ceil_div(per_sm, tile.blocks_per_sm)
    cycles = max(compute, memory) + waves * _TILE_CYCLES
    if config.num_splits > 1:
        cycles += _REDUCE_CYCLES + 2 * config.num_splits * m * n * 4 / _BYTES_PER_CYCLE
    return cycles


@dataclass(frozen=True)
class Operands:
    """The arrays of one product, checked; x, residual and out have rows that may lie apart."""

    x: Any
    weight: Any
    out: Any
    bias: Any = None
    residual: Any = None
    activation: str | None = None


@dataclass(frozen=True)
class Norm:
    """A norm in front of the product: its weight (K,), epsilon and the weight's offset."""

    weight: Any
    eps: float
    weight_offset: float


def launch(op: str, operands: Operands, norm: Norm | None = None) -> None:
    """Launch `op` ("gemm", or "rmsnorm_gemm" with a norm) on CuPy arrays."""
    x, out = operands.x, operands.out
    (m, k), n = x.shape, out.shape[1]
    if m == 0 or n == 0:
        return
    dtype = dtype_name(x.dtype)
    aligned = _is_aligned(x, operands.weight, norm)
    config = choose_config(m, n, k, dtype, sm_count(), is_aligned=aligned)
    if math.prod(config.grid(m, n)) > _MAX_INT32 or max(m, n, k) > _MAX_INT32 - 256:
        raise ContractError(f"{op}: x: {m} x {k} by {n} x {k} is more than one launch can do")
    row_scales, partials = _scratch(config, m, n, needs_scales=norm is not None)
    if row_scales is not None and norm is not None:
        _launch_row_scales(ModuleSpec(f"{op}.cu", dtype), x, row_scales, norm.eps, aligned)
    epilogue = _epilogue(operands)
    _kernel(op, config.kernel).launch(
        ModuleSpec(f"{op}.cu", dtype),
        config.grid(m, n),
        (config.threads,),
        config.shared_bytes,
        x=x,
        x_stride=_row_stride(x),
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
        is_vector=_is_vector(out, operands.residual),
        **epilogue,
    )
    if partials is not None:
        _REDUCE.launch(
            ModuleSpec("gemm.cu", dtype),
            (ceil_div(m * n, _REDUCE_THREADS),),
            (_REDUCE_THREADS,),
            partials=partials,
            num_splits=config.num_splits,
            m=m,
            n=n,
            **epilogue,
        )


@cache
def _kernel(op: str, name: str) -> Kernel:
    return Kernel(f"{op}_{name}", _PARAMS)


def _scratch(config: Config, m: int, n: int, *, needs_scales: bool) -> tuple[Any, Any]:
    """Return scratch for 1 / rms of each row and for the splits' sums; None what is not needed."""
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
        x_stride=_row_stride(x),
        row_scales=scales,
        m=m,
        k=k,
        eps=eps,
        is_vector=aligned,
    )


def _epilogue(operands: Operands) -> dict[str, Any]:
    out, residual = operands.out, operands.residual
    return {
        "bias": operands.bias,
        "residual": residual,
        "residual_stride": 0 if residual is None else _row_stride(residual),
        "out": out,
        "out_stride": _row_stride(out),
        "activation": ACTIVATIONS.index(operands.activation),
        "is_float": out.dtype == FLOAT32,
    }


def _row_stride(array: Any) -> int:
    """Return the elements from one row to the next."""
    return int(array.strides[0]) // int(array.itemsize)


def _is_aligned(x: Any, weight: Any, norm: Norm | None) -> bool:
    """Tell whether all rows of the operands can be read 16 bytes at a time."""
    steps = [x.data.ptr, weight.data.ptr, x.shape[1] * x.itemsize]
    if x.shape[0] > 1:
        steps.append(x.strides[0])
    if norm is not None:
        steps.append(norm.weight.data.ptr)
    return all(step % 16 == 0 for step in steps)


def _is_vector(out: Any, residual: Any) -> bool:
    """Tell whether all rows of the results can be accessed four elements at a time."""
    width = 4 * out.itemsize
    for array in (out,) if residual is None else (out, residual):
        if array.data.ptr % width or array.shape[1] % 4:
            return False
        if array.shape[0] > 1 and array.strides[0] % width:
            return False
    return True
