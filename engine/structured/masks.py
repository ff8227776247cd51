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
    """Return llguidance's thread pool: as many threads as it thinks best for this machine."""
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
        A state may occur several times, if its paths are not empty.
    paths : sequence of sequence of int
        Drafts that come after the output.
    masks : (n, ceil(V/32)) array of int32
        C-contiguous. Bit i of word w set: id 32 w + i may follow.

    Returns
    -------
    list of bool
        Whether each path is allowed; if not, its mask is not written.
    """
    pairs = list(zip(states, paths, strict=True))
    plain = [(state.matcher, i) for i, (state, path) in enumerate(pairs) if not path]
    num_bytes = masks.shape[1] * 4
    if plain:
        _executor().unsafe_compute_mask_ptr(plain, masks.ctypes.data, num_bytes, len(masks))
    written = [True] * len(states)
    for index, path in enumerate(paths):
        if path:
            written[index] = _fill_after(states[index].matcher, path, masks[index])
    for state in states:
        state.note_error()
    return written


def _fill_after(matcher: Any, path: Sequence[int], mask: np.ndarray[Any, Any]) -> bool:
    """Write the mask after `path`, and return to where the matcher is now."""
    count: int = matcher.try_consume_tokens(list(path))
    if is_allowed := count == len(path):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if count:
        matcher.rollback(count)
    return is_allowed
