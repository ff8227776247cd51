"""State slots of recurrent ops: which states a sequence starts from and writes."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["first_state", "state_writes"]

Array = np.ndarray[Any, Any]


def first_state(states: Array, slot: int, num_cached: int, dtype: Any) -> Array:
    """Return the state before a sequence's first token: zeros if it has no earlier tokens."""
    if num_cached <= 0:
        return np.zeros(states.shape[1:], dtype)
    state: Array = states[slot].astype(dtype)
    return state


def state_writes(
    sequence: int,
    num_tokens: int,
    targets: Array,
    snapshot_slots: Array | None,
    snapshot_offsets: Array | None,
) -> list[tuple[int, int]]:
    """Return the pairs (tokens processed, slot) in which a sequence's state is kept.

    `targets` (B,) holds the slot after the last token, (B, Q) those after each of at most Q tokens;
    of a sequence with more tokens, the last entry is the slot after its last token.
    """
    if targets.ndim == 2 and num_tokens > targets.shape[1]:
        writes = [(num_tokens, int(targets[sequence, -1]))]
    elif targets.ndim == 2:
        writes = list(enumerate(targets[sequence, :num_tokens].tolist(), start=1))
    else:
        writes = [(num_tokens, int(targets[sequence]))]
    if snapshot_slots is not None and snapshot_offsets is not None:
        writes.append((int(snapshot_offsets[sequence]), int(snapshot_slots[sequence])))
    return [(count, slot) for count, slot in writes if slot >= 0 and 0 < count <= num_tokens]
