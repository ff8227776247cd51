"""Copies of blocks within the KV cache: `cuda_src/kv_copy.cu`, mirror `reference/kv_copy.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine import reference
from engine.kernels._contract import INT32, Contract
from engine.kernels._elementwise import MAX_GRID_Y, VECTOR_BYTES, vector_width
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._quantized_kv import KV_DTYPES, copy_spec, kv_dtype_of

__all__ = ["kv_copy", "specs"]

_THREADS = 256
_PARAMS = "pages:ptr block_pairs:ptr num_slabs:i64 num_blocks:i64 block_elements:i64"
_VECTOR = Kernel("kv_copy_vector", _PARAMS)
_SCALAR = Kernel("kv_copy_scalar", _PARAMS)


def specs(dtype: str, *, kv_dtype: str = "", **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for pages of `dtype`, or quantized pages."""
    return (copy_spec("kv_copy.cu", dtype, kv_dtype),)


def kv_copy(pages: Any, block_pairs: Any) -> None:
    """Copy whole blocks of the paged KV cache, in all slabs.

    Parameters
    ----------
    pages : (..., P, K, block_size, D) array of a float dtype, uint8 or int8, C-contiguous
        Written in place. Leading axes (layers, K and V) are slabs that share block ids.
    block_pairs : (n, 2) array of int32
        Rows (source, destination). Destinations must be distinct and must not be sources, because
        the copies run in no particular order.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Pairs are checked on NumPy arrays; on the GPU a pair
        with an id outside [0, P) is skipped.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(3, dtype=np.float32).reshape(3, 1, 1, 1)
    >>> kv_copy(pages, np.array([[2, 0]], np.int32))
    >>> pages.ravel()
    array([2., 1., 2.], dtype=float32)
    """
    call = Contract("kv_copy")
    pages = call.written("pages", pages, "* P K block_size D", KV_DTYPES)
    block_pairs = call.array("block_pairs", block_pairs, "n 2", INT32)
    if call.on_cpu:
        _check_pairs(call, block_pairs)
        reference.kv_copy(pages, block_pairs)
        return
    num_slabs = math.prod(pages.shape[:-4])
    block_elements = math.prod(pages.shape[-3:])
    fits = block_elements % vector_width(pages) == 0 and pages.data.ptr % VECTOR_BYTES == 0
    (_VECTOR if fits else _SCALAR).launch(
        copy_spec("kv_copy.cu", str(pages.dtype), kv_dtype_of(pages.dtype)),
        (call["n"], min(num_slabs, MAX_GRID_Y)),
        (_THREADS,),
        pages=pages,
        block_pairs=block_pairs,
        num_slabs=num_slabs,
        num_blocks=call["P"],
        block_elements=block_elements,
    )


def _check_pairs(call: Contract, block_pairs: Any) -> None:
    sources, destinations = block_pairs.T
    limit = call["P"]
    ok = bool(((block_pairs >= 0) & (block_pairs < limit)).all())
    call.check("block_pairs", ok, f"block ids in [0, {limit})", block_pairs.tolist())
    is_once = np.unique(destinations).size == destinations.size
    call.check("block_pairs", is_once, "pairs with each destination once", block_pairs.tolist())
    is_chained = bool(np.isin(destinations, sources).any())
    wanted = "pairs whose destinations are no sources"
    call.check("block_pairs", not is_chained, wanted, block_pairs.tolist())
