"""Moves of blocks and state slots as arrays, for the messages between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from engine.cache.state_slots import SlotMoves
from engine.cache.swap import Moves

__all__ = ["NUM_MOVE_ARRAYS", "moves_from_arrays", "moves_to_arrays"]

_NAMES = "swap_out", "copies", "swap_in", "freed_blocks"
_SLOT_NAMES = "swap_out", "copies", "swap_in", "freed"
NUM_MOVE_ARRAYS = len(_NAMES) + len(_SLOT_NAMES)


def moves_to_arrays(moves: Moves) -> list[Any]:
    """Return the moves of a step as int32 arrays on the host: (n, 2) for pairs.

    Examples
    --------
    >>> slots = SlotMoves(copies=[(3, 0)])
    >>> moves = SimpleNamespace(
    ...     swap_out=[], copies=[(1, 2)], swap_in=[], freed_blocks=[7], slot_moves=slots)
    >>> moves_from_arrays(moves_to_arrays(moves)) == moves
    True
    """
    slots = moves.slot_moves or SlotMoves()
    lists = [getattr(moves, name) for name in _NAMES]
    return [np.array(x, np.int32) for x in (*lists, *(getattr(slots, n) for n in _SLOT_NAMES))]


def moves_from_arrays(arrays: Sequence[Any]) -> Moves:
    """Return the moves encoded by `moves_to_arrays`."""
    lists = [[_pair(item) for item in array.tolist()] for array in arrays]
    count = len(_NAMES)
    slots = SlotMoves(**dict(zip(_SLOT_NAMES, lists[count:], strict=True)))
    blocks = dict(zip(_NAMES, lists[:count], strict=True))
    return cast(Moves, SimpleNamespace(**blocks, slot_moves=slots))


def _pair(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item
