"""Down-projections of LoRA adapters: `cuda_src/lora/lora_shrink.cu`.

The mirror is `reference/lora_shrink.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import accumulation_dtype, dtype_name
from engine.kernels._attention import are_aligned
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import element_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._lora import THREADS, checked_order, max_tiles, tile_tokens
from engine.kernels._module import ModuleSpec

__all__ = ["choose_num_splits", "lora_shrink", "specs"]

_PARAMS = (
    "x:ptr a:ptr order:ptr offsets:ptr out:ptr x_stride:i64 num_tokens:i32 num_adapters:i32 "
    "columns:i32 depth:i32 num_splits:i32 is_vector:i32 is_paired:i32"
)
_KERNELS = {
    tokens: Kernel(f"lora_shrink_{tokens}", _PARAMS, struct="LoraShrinkParams")
    for tokens in (16, 64)
}
"""Kernels by tokens per tile."""

_COLUMNS = 64  # kColumns in CUDA
_STAGES = 4  # kStages in CUDA
_ROW_BYTES = 128  # bytes of a row of a chunk
_MAX_SPLITS = 64
_BLOCKS = 264  # blocks wanted: two for each multiprocessor of an H100
_SPLIT_DEPTH = 256  # least values of k per split that `choose_num_splits` returns
_CHOSEN_SPLITS = 16  # most splits that it returns


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("lora/lora_shrink.cu", dtype),)


def lora_shrink(
    x: Any,
    a: Any,
    order: Any,
    offsets: Any,
    *,
    num_splits: int | None = None,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Multiply each token by the matrix A of its LoRA adapter, in one launch for all adapters.

    The first half of y[t] += B[s] (A[s] x[t]) [1]_ [2]_; `lora_expand` is the second.

    Parameters
    ----------
    x : (T, K) array of float32, float16 or bfloat16 (NumPy: or float64)
        A view whose last axis is contiguous is not copied.
    a : (S, R, K) array of x's dtype
        A matrix per adapter, S from 1 to 256. If the layer is several products fused into one
        (q, k and v), R is their number times the rank, and their rows follow each other.
    order : (T,) array of int32
        Tokens sorted by adapter, in increasing order within an adapter; those without an adapter
        come last.
    offsets : (S + 1,) array of int32
        Adapter s has the tokens order[offsets[s] : offsets[s + 1]].
    num_splits : int, optional
        Parts of K that are summed separately, from 1 to 64. By default `choose_num_splits` of the
        sizes. With a fixed number, the bits of a token's result depend on no other token.
    pdl : bool
        Promise that no kernel still running on the stream writes `a`, `order` or `offsets`, which
        are then read while the preceding kernel ends.
    out : (num_splits, T, R) array of float32 (of float64 if x has it), optional
        Array for the result; must not overlap another argument.

    Returns
    -------
    (num_splits, T, R) array of float32 (of float64 if x has it)
        Partial sums. Rows of tokens without an adapter are not written.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. The values of `order` and `offsets` are checked on NumPy
        arrays; on the GPU indices outside the arrays are skipped.

    Notes
    -----
    Split p sums k from 64 floor(G p / num_splits) to 64 floor(G (p + 1) / num_splits), where G is
    K / 64 rounded up, in order and in float32. A matrix is read only if its adapter has tokens.

    References
    ----------
    .. [1] Hu et al.: LoRA, arXiv:2106.09685.
    .. [2] Chen et al.: Punica, multi-tenant LoRA serving, arXiv:2310.18547.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> a = np.array([[[1.0, 0.0]], [[0.0, 10.0]]])
    >>> order, offsets = np.array([1, 0, 2], np.int32), np.array([0, 1, 3], np.int32)
    >>> lora_shrink(x, a, order, offsets).tolist()
    [[[20.0], [3.0], [60.0]]]
    """
    call = Contract("lora_shrink")
    x = call.array("x", x, "T K", MIRROR_FLOATS, layout="rows")
    a = call.array("a", a, "S R K", x.dtype)
    order, offsets = checked_order(call, order, offsets)
    num_tokens = call["T"]
    columns = call["R"]
    if num_splits is None:
        num_splits = choose_num_splits(num_tokens, call["S"], columns, call["K"])
    num_splits = call.integer("num_splits", num_splits, 1, _MAX_SPLITS, f"from 1 to {_MAX_SPLITS}")
    if out is not None or not call.on_cpu:
        shape = (num_splits, num_tokens, columns)
        out = call.output("out", out, shape, accumulation_dtype(x.dtype))
    if call.on_cpu:
        return reference.lora_shrink(x, a, order, offsets, num_splits=num_splits, out=out)
    tile = tile_tokens(num_tokens)
    tiles = max_tiles(num_tokens, call["S"], tile)
    _KERNELS[tile].launch(
        specs(dtype_name(x.dtype))[0],
        (ceil_div(columns, _COLUMNS), tiles, num_splits),
        (THREADS,),
        _STAGES * (tile + _COLUMNS) * _ROW_BYTES,
        pdl=pdl,
        x=x,
        a=a,
        order=order,
        offsets=offsets,
        out=out,
        x_stride=element_strides(x)[0],
        num_tokens=num_tokens,
        num_adapters=call["S"],
        columns=columns,
        depth=call["K"],
        num_splits=num_splits,
        is_vector=int(are_aligned(x, a)),
        is_paired=int(columns % 2 == 0 and out.data.ptr % 8 == 0),
    )
    return out


def choose_num_splits(num_tokens: int, num_adapters: int, columns: int, depth: int) -> int:
    """Return into how many parts `lora_shrink` divides K for a batch.

    With few tokens the whole GPU is to read `a`, so K is split until the grid fills it; with many
    tokens the result is 1. A caller that wants the same bits in any batch passes a number of its
    own instead.

    Parameters
    ----------
    num_tokens, num_adapters : int
        T and S.
    columns, depth : int
        R and K.

    Examples
    --------
    >>> [choose_num_splits(t, 16, 48, 4096) for t in (1, 64, 1024, 65536)]
    [16, 14, 9, 1]
    """
    blocks = max_tiles(num_tokens, num_adapters, tile_tokens(num_tokens))
    blocks *= ceil_div(columns, _COLUMNS)
    most = min(_CHOSEN_SPLITS, depth // _SPLIT_DEPTH)
    return max(1, min(most, ceil_div(_BLOCKS, max(1, blocks))))
