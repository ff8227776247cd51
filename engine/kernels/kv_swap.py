"""Copies of blocks between two sets of pages: `cuda_src/kv_swap.cu`, mirror `reference/kv_swap.py`.

It packs scattered blocks for a transfer to the host, for example. Within one set, use `kv_copy`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine import reference
from engine.kernels._contract import INT32, Contract
from engine.kernels._elementwise import MAX_GRID_Y, element_strides, is_aligned, vector_width
from engine.kernels._launch import Kernel
from engine.kernels._memory import overlaps
from engine.kernels._module import ModuleSpec
from engine.kernels._quantized_kv import KV_DTYPES, copy_spec, kv_dtype_of

__all__ = ["kv_swap", "specs"]

_THREADS = 256
_PARAMS = (
    "source:ptr target:ptr block_pairs:ptr "
    "source_blocks:i64 source_slab_stride:i64 source_block_stride:i64 "
    "target_blocks:i64 target_slab_stride:i64 target_block_stride:i64 "
    "num_slabs:i64 block_elements:i64"
)
_VECTOR = Kernel("kv_swap_vector", _PARAMS)
_SCALAR = Kernel("kv_swap_scalar", _PARAMS)


def specs(dtype: str, *, kv_dtype: str = "", **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for pages of `dtype`, or quantized pages."""
    return (copy_spec("kv_swap.cu", dtype, kv_dtype),)


def kv_swap(source: Any, target: Any, block_pairs: Any) -> None:
    """Copy whole blocks from one set of pages to another, in all slabs.

    Parameters
    ----------
    source : (S, P, K, block_size, D) array of float32, float16, bfloat16, uint8 or int8
        The first two axes may have any strides; each block is contiguous.
    target : (S, Q, K, block_size, D) array of source's dtype
        Written in place; any strides as for `source`. It must not overlap `source`.
    block_pairs : (n, 2) array of int32
        Rows (block of source, block of target); targets are distinct.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Pairs are checked on NumPy arrays; on the GPU a pair
        with an id outside its pages is skipped.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1, 1)
    >>> packed = np.zeros((2, 1, 1, 1, 1), np.float32)             # block first, then slab
    >>> kv_swap(pages, packed.swapaxes(0, 1), np.array([[3, 0], [1, 1]], np.int32))
    >>> packed.ravel()
    array([3., 1.], dtype=float32)
    """
    call = Contract("kv_swap")
    source = call.array("source", source, "S P K block_size D", KV_DTYPES, layout="any")
    target = call.written("target", target, "S Q K block_size D", source.dtype, layout="any")
    block_pairs = call.array("block_pairs", block_pairs, "n 2", INT32)
    for name, pages in (("source", source), ("target", target)):
        call.check(name, _has_whole_blocks(pages), "of contiguous blocks", pages.strides)
    if call.on_cpu:
        _check_pairs(call, source, target, block_pairs)
        reference.kv_swap(source, target, block_pairs)
        return
    block_elements = math.prod(source.shape[2:])
    fits = block_elements % vector_width(source) == 0 and is_aligned(_rows(source), _rows(target))
    source_strides = element_strides(source)
    target_strides = element_strides(target)
    (_VECTOR if fits else _SCALAR).launch(
        copy_spec("kv_swap.cu", str(source.dtype), kv_dtype_of(source.dtype)),
        (call["n"], min(call["S"], MAX_GRID_Y)),
        (_THREADS,),
        source=source,
        target=target,
        block_pairs=block_pairs,
        source_blocks=call["P"],
        source_slab_stride=source_strides[0],
        source_block_stride=source_strides[1],
        target_blocks=call["Q"],
        target_slab_stride=target_strides[0],
        target_block_stride=target_strides[1],
        num_slabs=call["S"],
        block_elements=block_elements,
    )


def _has_whole_blocks(pages: Any) -> bool:
    return not pages.size or bool(pages[0, 0].flags.c_contiguous)


def _rows(pages: Any) -> Any:
    """Return a view of each block's first element, to check the blocks' alignment."""
    return pages[:, :, 0, 0, :1] if pages.size else pages[:, :, :0, :0, :0].reshape(0, 1)


def _check_pairs(call: Contract, source: Any, target: Any, block_pairs: Any) -> None:
    for column, symbol in enumerate("PQ"):
        ids = block_pairs[:, column]
        limit = call[symbol]
        ok = bool(((ids >= 0) & (ids < limit)).all())
        wanted = f"block ids in [0, {limit}) in column {column}"
        call.check("block_pairs", ok, wanted, block_pairs.tolist())
    is_once = np.unique(block_pairs[:, 1]).size == len(block_pairs)
    call.check("block_pairs", is_once, "pairs with each target once", block_pairs.tolist())
    is_apart = not overlaps(source, target)
    call.check("target", is_apart, "other memory than source", "overlapping memory")
