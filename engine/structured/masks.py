"""Masks of many requests at once, on all cores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.structured.grammar import GrammarState
from engine.structured.sources import library

__all__ = ["fill_masks"]


@functools.cache
def _executor() -> Any:
    """Return llguidance's threads: by default 80 % of the cores, at most 32."""
    return library().LLExecutor()


def fill_masks(
    states: Sequence[GrammarState],
    paths: Sequence[Sequence[int]],
    masks: np.ndarray[Any, np.dtype[np.int32]],
) -> list[bool]:
    """Write, for each state, the mask of the tokens that may follow its output and `paths`.

    Parameters
    ----------
    states : sequence of GrammarState
        A state may occur several times, with different paths.
    paths : sequence of sequence of int
        Drafts that come after the output.
    masks : (n, ceil(V/32)) array of int32
        C-contiguous. Bit i of word w set: id 32 w + i may follow.

    Returns
    -------
    list of bool
        Whether each path is allowed; if not, its mask allows every token.
    """
    pairs = list(zip(states, paths, strict=True))
    plain = [(state.matcher, i) for i, (state, path) in enumerate(pairs) if not path]
    plain.sort(key=lambda pair: states[pair[1]].group)  # a thread takes neighbours
    num_bytes = masks.shape[1] * 4
    if plain:
        _executor().unsafe_compute_mask_ptr(plain, masks.ctypes.data, num_bytes, len(masks))
    is_allowed = [
        not path or _fill_after(state.matcher, path, masks[index])
        for index, (state, path) in enumerate(pairs)
    ]
    for state in states:
        state.note_error()
    return is_allowed


def _fill_after(matcher: Any, path: Sequence[int], mask: np.ndarray[Any, Any]) -> bool:
    """Write the mask after `path`, and return to where the matcher is now."""
    count: int = matcher.try_consume_tokens(list(path))
    mask[:] = -1
    if count == len(path):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if count:
        matcher.rollback(count)
    return count == len(path)
