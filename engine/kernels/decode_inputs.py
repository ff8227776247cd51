"""Inputs of a decode step, gathered from the request rows: `cuda_src/decode_inputs.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference
from engine.kernels._contract import INT32, INT64, Contract
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["decode_inputs", "specs"]

_THREADS = 128
_POINTERS = (
    *("rows", "token_ids", "positions", "last_ids", "tables"),
    *("new_starts", "cu_new_blocks", "new_blocks"),
    *("ids_out", "slots_out", "tables_out"),
)
_KERNEL = Kernel(
    "decode_inputs",
    " ".join(f"{name}:ptr" for name in _POINTERS)
    + " num_rows:i32 width:i32 num_new:i32 block_size:i32 query_len:i32",
    struct="DecodeInputsParams",
)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the module of the op: one for all dtypes, since the arrays are integers."""
    return (ModuleSpec("decode_inputs.cu", "float32"),)


def decode_inputs(
    rows: Any,
    token_ids: Any,
    positions: Any,
    last_ids: Any,
    tables: Any,
    new_starts: Any,
    cu_new_blocks: Any,
    new_blocks: Any,
    *,
    block_size: int,
    out: Any = None,
) -> Any:
    """Update the requests' block tables and gather the inputs of a step of Q tokens per sequence.

    Parameters
    ----------
    rows : (B,) array of int32
        Each sequence's request row, all distinct; -1 is padding.
    token_ids : (B, Q) array of int32
        Ids known to the host; -1 stands for the last id sampled in the row.
    positions : (B, Q) array of int32
        Positions of these tokens, less than W * block_size.
    last_ids : (S,) array of int32
        Last id sampled in each row.
    tables : (S, W) array of int32
        Block ids of each row; the op writes the new blocks to it.
    new_starts : (B,) array of int32
        First table column of the sequence's new blocks.
    cu_new_blocks : (B+1,) array of int32
        Sequence b's new blocks are [cu_new_blocks[b], cu_new_blocks[b+1]) of `new_blocks`.
    new_blocks : (C,) array of int32
    block_size : int
        Tokens per block.
    out : (token_ids, slot_mapping, block_tables), optional
        Arrays for the results.

    Returns
    -------
    token_ids : (B, Q) array of int32
        -2**31 for padding: `embedding` maps it to zeros, which draw less power in the GEMMs.
    slot_mapping : (B, Q) array of int64
        Slots for the keys and values; -1 for padding.
    block_tables : (B, W) array of int32
        Entries beyond the last position's block, and all entries of padding, are undefined.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. The arrays' values are checked on the CPU only; whatever
        they are, the GPU reads and writes nothing outside the arrays.

    Examples
    --------
    >>> import numpy as np
    >>> i32 = lambda *values: np.array(values, np.int32)
    >>> tables = np.zeros((2, 2), np.int32)
    >>> ids, slots, _ = decode_inputs(i32(1), i32([-1, 8]), i32([17, 18]), i32(5, 6), tables,
    ...                               i32(0), i32(0, 2), i32(9, 4), block_size=16)
    >>> ids, slots, tables[1]
    (array([[6, 8]], dtype=int32), array([[65, 66]]), array([9, 4], dtype=int32))
    """
    call = Contract("decode_inputs")
    rows = call.array("rows", rows, "B", INT32)
    token_ids = call.array("token_ids", token_ids, "B Q", INT32)
    positions = call.array("positions", positions, "B Q", INT32)
    last_ids = call.array("last_ids", last_ids, "S", INT32)
    tables = call.written("tables", tables, "S W", INT32)
    new_starts = call.array("new_starts", new_starts, "B", INT32)
    cu_new_blocks = call.array("cu_new_blocks", cu_new_blocks, str(call["B"] + 1), INT32)
    new_blocks = call.array("new_blocks", new_blocks, "C", INT32)
    block_size = call.integer(
        "block_size", block_size, 1, 2**31 - 1, "a whole number of at least 1"
    )
    is_triple = out is None or (isinstance(out, tuple | list) and len(out) == 3)
    call.check("out", is_triple, "None or three arrays", type(out).__name__)
    arrays = (rows, token_ids, positions, last_ids, tables, new_starts, cu_new_blocks, new_blocks)
    batch = call["B"]
    width = call["W"]
    query_len = call["Q"]
    outs = (None, None, None) if out is None else out
    outs = (
        call.output("out[0]", outs[0], (batch, query_len), INT32),
        call.output("out[1]", outs[1], (batch, query_len), INT64),
        call.output("out[2]", outs[2], (batch, width), INT32),
    )
    if call.on_cpu:
        _check_values(call, rows, positions, new_starts, cu_new_blocks, block_size)
        results = reference.decode_inputs(*arrays, block_size=block_size)
        return tuple(map(call.fill, outs, results))
    _launch(arrays, outs, block_size)
    return outs


def _check_values(
    call: Contract, rows: Any, positions: Any, new_starts: Any, cu_new_blocks: Any, block_size: int
) -> None:
    """Check the numbers that index arrays; those of padding do not."""
    call.indices("rows", rows, -1, call["S"] - 1)
    call.indices("positions", positions[rows >= 0], 0, call["W"] * block_size - 1)
    call.indices("cu_new_blocks", cu_new_blocks, 0, call["C"])
    counts = np.diff(cu_new_blocks)
    is_new = (rows >= 0) & (counts > 0)
    starts = new_starts[is_new].astype(np.int64)
    call.indices("new_starts", starts, 0, call["W"])
    call.indices("new_starts plus the number of new blocks", starts + counts[is_new], 0, call["W"])


def _launch(arrays: tuple[Any, ...], outs: tuple[Any, ...], block_size: int) -> None:
    given = dict(zip(_POINTERS, (*arrays, *outs), strict=True))
    num_rows, width = given["tables"].shape
    _KERNEL.launch(
        specs("float32")[0],
        (given["rows"].shape[0],),
        (_THREADS,),
        num_rows=num_rows,
        width=width,
        num_new=given["new_blocks"].shape[0],
        block_size=block_size,
        query_len=given["token_ids"].shape[1],
        **given,
    )
