"""NumPy mirror of `engine.kernels.decode_inputs`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.embedding import PADDING_ID

__all__ = ["decode_inputs"]

Array = np.ndarray[Any, Any]


def decode_inputs(
    rows: Array,
    token_ids: Array,
    positions: Array,
    last_ids: Array,
    tables: Array,
    new_starts: Array,
    cu_new_blocks: Array,
    new_blocks: Array,
    *,
    block_size: int,
) -> tuple[Array, Array, Array]:
    """Update the rows' block tables, then gather; padding yields `PADDING_ID`, -1 and zeros."""
    used = np.flatnonzero(rows >= 0)
    for b in used[np.diff(cu_new_blocks)[used] > 0]:
        blocks = new_blocks[cu_new_blocks[b] : cu_new_blocks[b + 1]]
        tables[rows[b], new_starts[b] : new_starts[b] + len(blocks)] = blocks
    ids = np.full_like(token_ids, PADDING_ID)
    slots = np.full(token_ids.shape, -1, np.int64)
    tables_out = np.zeros((len(rows), tables.shape[1]), np.int32)
    row = rows[used, None]
    position = positions[used]
    ids[used] = np.where(token_ids[used] >= 0, token_ids[used], last_ids[row])
    blocks = tables[row, position // block_size].astype(np.int64)
    slots[used] = blocks * block_size + position % block_size
    tables_out[used] = tables[rows[used]]
    return ids, slots, tables_out
