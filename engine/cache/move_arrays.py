"""Block moves as arrays, for the messages between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.cache.swap import Moves

__all__ = ["NUM_MOVE_ARRAYS", "moves_from_arrays", "moves_to_arrays"]

_NAMES = "swap_out", "copies", "swap_in", "freed_blocks"
NUM_MOVE_ARRAYS = len(_NAMES)


def moves_to_arrays(moves: Moves) -> list[Any]:
    """Return a step's block moves as int32 arrays on the host: (n, 2) for pairs of blocks.

    Examples
    --------
    >>> moves = SimpleNamespace(swap_out=[], copies=[(1, 2)], swap_in=[], freed_blocks=[7])
    >>> moves_from_arrays(moves_to_arrays(moves)) == moves
    True
    """
    return [np.array(getattr(moves, name), np.int32) for name in _NAMES]


def moves_from_arrays(arrays: Sequence[Any]) -> Moves:
    """Return the block moves encoded by `moves_to_arrays`."""
    lists = [[_pair(item) for item in array.tolist()] for array in arrays]
    moves: Any = SimpleNamespace(**dict(zip(_NAMES, lists, strict=True)))
    return moves  # type: ignore[no-any-return]


def _pair(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item
