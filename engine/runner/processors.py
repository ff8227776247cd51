"""Logits processors: user callables that run between model and sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["apply_processors"]

Processor = Callable[[list[int], Any], Any]


def apply_processors(processors: Sequence[Processor], output_ids: list[int], row: Any) -> str:
    """Apply `processors` in order to one row of logits, in place.

    Parameters
    ----------
    processors : sequence of callable
        ``processor(output_token_ids, logits)``: `logits` is a NumPy or CuPy array (V,) float32.
        A processor may modify it in place and return None, or return another array of that shape.
    output_ids : list of int
        Ids generated so far; each processor gets a copy.
    row : (V,) array of float32
        View of the logits.

    Returns
    -------
    str
        Error message, or "" on success. After an error the row must not be sampled.

    Examples
    --------
    >>> row = np.array([1.0, 2.0], np.float32)
    >>> apply_processors([lambda ids, logits: logits * len(ids)], [5, 6, 7], row), row
    ('', array([3., 6.], dtype=float32))
    >>> apply_processors([lambda ids, logits: "x"], [], row)
    'a logits processor returned str; wanted None or an array of shape (2,)'
    """
    for processor in processors:
        try:
            changed = processor(list(output_ids), row)
            if changed is None or changed is row:
                continue
            kind = getattr(getattr(changed, "dtype", None), "kind", "?")
            if getattr(changed, "shape", None) != row.shape or kind not in "fiu":
                return (
                    f"a logits processor returned {_name(changed)}; wanted None or an array of "
                    f"shape {row.shape}"
                )
            row[...] = changed.astype(np.float32)
        except Exception as error:
            return f"a logits processor raised {type(error).__name__}: {error}"
    return ""


def _name(value: Any) -> str:
    """Return the type of `value`, and its shape if it has one."""
    name = type(value).__name__
    return f"{name} of shape {value.shape}" if hasattr(value, "shape") else name
