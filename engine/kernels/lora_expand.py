"""Up-projections of LoRA adapters: `cuda_src/lora/lora_expand.cu`, `reference/lora_expand.py`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from engine import reference
from engine.dtypes import accumulation_dtype, dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import element_strides, is_aligned
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._lora import THREADS, checked_order, max_tiles, tile_tokens
from engine.kernels._module import ModuleSpec

__all__ = ["lora_expand", "specs"]

MAX_PARTS = 8
MAX_RANK = 256
_PARAMS = (
    "h:ptr b:ptr bias:ptr order:ptr offsets:ptr out:ptr out_stride:i64 num_splits:i32 "
    "num_tokens:i32 num_adapters:i32 columns:i32 rank:i32 h_columns:i32 is_vector:i32 "
    "accumulate:i32 " + " ".join(f"bound{part}:i32" for part in range(MAX_PARTS))
)
_KERNELS = {
    tokens: Kernel(f"lora_expand_{tokens}", _PARAMS, struct="LoraExpandParams")
    for tokens in (16, 64)
}
"""Kernels by tokens per tile."""

_COLUMNS = 256  # kColumns in CUDA
_VECTOR = 4  # values of rank per access
_MAX_SPLITS = 64


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("lora/lora_expand.cu", dtype),)


def lora_expand(
    h: Any,
    b: Any,
    order: Any,
    offsets: Any,
    *,
    bounds: tuple[int, ...],
    bias: Any = None,
    accumulate: bool = False,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Multiply each token's low-rank activations by the matrix B of its LoRA adapter.

    The second half of y[t] += B[s] (A[s] x[t]) [1]_ [2]_; `lora_shrink` is the first.

    Parameters
    ----------
    h : (P, T, R) array of float32 (of float64 if b has it)
        Partial sums over K, as `lora_shrink` returns them. Rows of tokens without an adapter are
        not read.
    b : (S, N, r) array of float32, float16 or bfloat16 (NumPy: or float64)
        A matrix per adapter, with its scaling factor; S from 1 to 256, r (the rank) to 256.
    order, offsets : (T,) and (S + 1,) arrays of int32
        Tokens sorted by adapter. See `lora_shrink`.
    bounds : tuple of int
        Last columns of the fused products (q, k and v), exclusive: columns [bounds[i - 1],
        bounds[i]) are part i and read h[..., i * r : (i + 1) * r]. Ascending, at most 8, the last
        is N, and R is their number times r.
    bias : (S, N) array of b's dtype, optional
        Added to the products of each adapter.
    accumulate : bool
        Add to `out`, which must be given.
    pdl : bool
        Promise that no kernel still running on the stream writes `b`, `bias`, `order` or
        `offsets`, which are then read while the preceding kernel ends.
    out : (T, N) array of b's dtype, optional
        Array for the result; a view whose last axis is contiguous. Must not overlap another
        argument.

    Returns
    -------
    (T, N) array of b's dtype
        Rows of tokens without an adapter are 0, or those of `out` if `accumulate`.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. The values of `order` and `offsets` are checked on NumPy
        arrays; on the GPU indices outside the arrays are skipped.

    Notes
    -----
    The partial sums are added in order and, for 16-bit dtypes, rounded to b's dtype. Products and
    the sums with `bias` and `out` are float32, rounded once. A token's bits depend on no other
    token.

    References
    ----------
    .. [1] Hu et al.: LoRA, arXiv:2106.09685.
    .. [2] Chen et al.: Punica, multi-tenant LoRA serving, arXiv:2310.18547.

    Examples
    --------
    >>> import numpy as np
    >>> h = np.array([[[1.0, 2.0], [np.nan, np.nan]]])
    >>> b = np.array([[[1.0], [10.0], [100.0]]])
    >>> order, offsets = np.array([0, 1], np.int32), np.array([0, 1], np.int32)
    >>> lora_expand(h, b, order, offsets, bounds=(2, 3)).tolist()
    [[1.0, 10.0, 200.0], [0.0, 0.0, 0.0]]
    """
    call = Contract("lora_expand")
    b = call.array("b", b, "S N r", MIRROR_FLOATS)
    h = call.array("h", h, "P T R", accumulation_dtype(b.dtype))
    if bias is not None:
        bias = call.array("bias", bias, "S N", b.dtype)
    order, offsets = checked_order(call, order, offsets)
    bounds = _checked_bounds(call, bounds)
    in_range = 1 <= call["P"] <= _MAX_SPLITS
    call.check("P", in_range, f"from 1 to {_MAX_SPLITS}", call["P"])
    call.check("out", not accumulate or out is not None, "given with accumulate=True", out)
    if out is not None or not call.on_cpu:
        out = call.output("out", out, (call["T"], call["N"]), b.dtype, layout="rows")
    if call.on_cpu:
        options = {"bounds": bounds, "bias": bias, "accumulate": accumulate, "out": out}
        return reference.lora_expand(h, b, order, offsets, **options)
    _launch(call, h, b, bias, order, offsets, bounds, out, accumulate=accumulate, pdl=pdl)
    return out


def _checked_bounds(call: Contract, bounds: Any) -> tuple[int, ...]:
    """Check `bounds` against N, R and the rank; return them as a tuple."""
    is_sequence = isinstance(bounds, tuple | list)
    call.check("bounds", is_sequence, "a tuple of int", bounds)
    ints = all(isinstance(end, int | np.integer) and not isinstance(end, bool) for end in bounds)
    call.check("bounds", ints, "a tuple of int", bounds)
    bounds = tuple(map(int, bounds))
    in_range = 1 <= len(bounds) <= MAX_PARTS
    call.check("bounds", in_range, f"of 1 to {MAX_PARTS} parts", bounds)
    is_ascending = all(a < b for a, b in itertools.pairwise((0, *bounds)))
    call.check("bounds", is_ascending, "ascending from more than 0", bounds)
    columns = call["N"]
    call.check("bounds", bounds[-1] == columns, f"up to N = {columns}", bounds)
    rank = call["r"]
    call.check("r", 1 <= rank <= MAX_RANK, f"from 1 to {MAX_RANK}", rank)
    wanted = len(bounds) * rank
    call.check("R", call["R"] == wanted, f"len(bounds) * r = {wanted}", call["R"])
    return tuple(bounds)


def _launch(
    call: Contract,
    h: Any,
    b: Any,
    bias: Any,
    order: Any,
    offsets: Any,
    bounds: tuple[int, ...],
    out: Any,
    *,
    accumulate: bool,
    pdl: bool,
) -> None:
    num_tokens = call["T"]
    rank = call["r"]
    tile = tile_tokens(num_tokens)
    # Unless they keep their rows, tokens without an adapter are one more group, whose rows are 0.
    num_groups = call["S"] + (not accumulate)
    blocks = sum(ceil_div(end - begin, _COLUMNS) for begin, end in itertools.pairwise((0, *bounds)))
    ends = dict.fromkeys((f"bound{part}" for part in range(MAX_PARTS)), bounds[-1])
    ends |= {f"bound{part}": end for part, end in enumerate(bounds)}
    is_vector = rank % _VECTOR == 0 and is_aligned(out) and _starts_aligned(h, b)
    _KERNELS[tile].launch(
        specs(dtype_name(b.dtype))[0],
        (blocks, max_tiles(num_tokens, num_groups, tile)),
        (THREADS,),
        tile * _row_bytes(rank, b.itemsize, accumulate) + _COLUMNS * b.itemsize,
        pdl=pdl,
        h=h,
        b=b,
        bias=bias,
        order=order,
        offsets=offsets,
        out=out,
        out_stride=element_strides(out)[0],
        num_splits=call["P"],
        num_tokens=num_tokens,
        num_adapters=call["S"],
        columns=call["N"],
        rank=rank,
        h_columns=call["R"],
        is_vector=int(is_vector),
        accumulate=int(accumulate),
        **ends,
    )


def _starts_aligned(*arrays: Any) -> bool:
    return all(array.data.ptr % 16 == 0 for array in arrays)


def _row_bytes(rank: int, itemsize: int, accumulate: bool) -> int:
    """Return the bytes of shared memory per token: index, h, and former values of 16-bit dtypes."""
    if itemsize == 4:
        return 4 + 4 * _VECTOR * ceil_div(rank, _VECTOR)
    return 4 + 2 * 16 * (ceil_div(rank, 16) | 1) + 2 * _COLUMNS * accumulate
