"""Gather paged keys and values to dense rows: `cuda_src/kv_gather.cu`, `reference/kv_gather.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference
from engine.dtypes import dtype_name
from engine.errors import ShapeError
from engine.kernels._contract import FLOATS, INT32, Contract
from engine.kernels._elementwise import ROW_THREADS, element_strides, is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["kv_gather", "specs"]

_PARAMS = (
    "k_pages:ptr v_pages:ptr block_tables:ptr context_lens:ptr cu_seqlens_k:ptr k:ptr v:ptr "
    "num_sequences:i32 num_columns:i32 block_size:i32 table_stride:i64 num_blocks:i64 "
    "num_heads:i32 head_dim:i32"
)
_VECTOR = Kernel("kv_gather_vector", _PARAMS, struct="KvGatherParams")
_SCALAR = Kernel("kv_gather_scalar", _PARAMS, struct="KvGatherParams")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("kv_gather.cu", dtype),)


def kv_gather(
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    context_lens: Any,
    cu_seqlens_k: Any,
    *,
    total_tokens: int | None = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """Copy the keys and values of all sequences from pages to dense, concatenated rows.

    Parameters
    ----------
    k_pages, v_pages : (P, K, block_size, D) array of float32, float16 or bfloat16, C-contiguous
    block_tables : (B, NB) array of int32
        Block ids; only those below ``ceil(context_len / block_size)`` are read.
    context_lens : (B,) array of int32
        Tokens of each sequence.
    cu_seqlens_k : (B + 1,) array of int32
        First row of each sequence, then the end: the cumulative sum of `context_lens`, from 0.
    total_tokens : int, optional
        Tk, at least ``cu_seqlens_k[-1]``. If omitted on CUDA, reading it synchronises.
    out : (k, v), optional
        Two (Tk, K, D) arrays for the results.

    Returns
    -------
    k, v : (Tk, K, D) arrays of the pages' dtype
        Rows from ``cu_seqlens_k[-1]`` on are NaN.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and block ids are checked on NumPy arrays; on
        the GPU, rows outside the table or the pages are NaN.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(4, dtype=np.float32).reshape(2, 1, 2, 1)  # 2 blocks of 2 slots
    >>> table, lens = np.array([[1, 0]], np.int32), np.array([3], np.int32)
    >>> k, v = kv_gather(pages, pages, table, lens, np.array([0, 3], np.int32))
    >>> k.ravel()
    array([2., 3., 0.], dtype=float32)
    """
    call = Contract("kv_gather")
    k_pages = _checked_pages(call, "k_pages", k_pages, FLOATS)
    v_pages = _checked_pages(call, "v_pages", v_pages, k_pages.dtype)
    call.check("k_pages", call["block_size"] > 0, "pages of at least one slot", k_pages.shape)
    tables = call.array("block_tables", block_tables, "B NB", INT32, layout="rows")
    lens = call.array("context_lens", context_lens, "B", INT32)
    starts = call.array("cu_seqlens_k", cu_seqlens_k, str(call["B"] + 1), INT32)
    is_pair = out is None or (isinstance(out, tuple | list) and len(out) == 2)
    call.check("out", is_pair, "None or a pair (k, v)", type(out).__name__)
    k_out, v_out = (None, None) if out is None else out
    num_rows = int(starts[-1]) if total_tokens is None else total_tokens
    num_rows = call.integer("total_tokens", num_rows, 0, 2**31 - 1, "at least 0")
    if call.on_cpu:
        _check_values(call, tables, lens, starts, num_rows)
        k, v = reference.kv_gather(k_pages, v_pages, tables, lens, starts, total_tokens=num_rows)
        k_to = call.target(k_out, k, "out[0]")
        v_to = call.target(v_out, v, "out[1]")
        return call.fill(k_to, k), call.fill(v_to, v)
    shape = (num_rows, call["K"], call["D"])
    k = call.output("out[0]", k_out, shape, k_pages.dtype)
    v = call.output("out[1]", v_out, shape, k_pages.dtype)
    _launch(k_pages, v_pages, tables, lens, starts, k, v)
    return k, v


def _checked_pages(call: Contract, name: str, value: Any, dtype: Any) -> Any:
    """Return the checked pages. Views are refused: a copy would duplicate the whole cache."""
    pages = call.array(name, value, "P K block_size D", dtype, layout="any")
    if not pages.flags.c_contiguous:
        raise ShapeError(f"{call.op}: {name}: must be C-contiguous; got strides {pages.strides}")
    return pages


def _check_values(call: Contract, tables: Any, lens: Any, starts: Any, num_rows: int) -> None:
    limit = tables.shape[1] * call["block_size"]
    ok = bool(((lens >= 0) & (lens <= limit)).all())
    call.check("context_lens", ok, f"in [0, {limit}], the slots of a table row", lens.tolist())
    is_sum = starts[0] == 0 and bool((np.diff(starts) == lens).all())
    call.check("cu_seqlens_k", is_sum, "the cumulated context_lens, from 0", starts.tolist())
    call.check("total_tokens", num_rows >= starts[-1], f"at least {starts[-1]}", num_rows)
    used = tables[np.arange(tables.shape[1]) * call["block_size"] < lens[:, None]]
    ok = bool(((used >= 0) & (used < call["P"])).all())
    call.check("block_tables", ok, f"block ids in [0, {call['P']})", tables.tolist())


def _launch(
    k_pages: Any, v_pages: Any, tables: Any, lens: Any, starts: Any, k: Any, v: Any
) -> None:
    num_blocks, num_heads, block_size, head_dim = k_pages.shape
    width = vector_width(k)
    fits = head_dim % width == 0 and is_aligned(k_pages, v_pages, k, v)
    items = 2 * num_heads * (head_dim // width if fits else head_dim)
    (_VECTOR if fits else _SCALAR).launch(
        specs(dtype_name(k.dtype))[0],
        (k.shape[0], ceil_div(items, ROW_THREADS)),
        (ROW_THREADS,),
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=tables,
        context_lens=lens,
        cu_seqlens_k=starts,
        k=k,
        v=v,
        num_sequences=tables.shape[0],
        num_columns=tables.shape[1],
        block_size=block_size,
        table_stride=element_strides(tables)[0],
        num_blocks=num_blocks,
        num_heads=num_heads,
        head_dim=head_dim,
    )
