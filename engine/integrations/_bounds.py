"""Bounds of sequence lengths that change with every batch."""

from __future__ import annotations

__all__ = ["length_bound"]

_STEP = 128  # tokens


def length_bound(longest: int) -> int:
    """Round an upper bound of sequence lengths up to a multiple of 128.

    Launches are prepared once for each bound that a call names: few bounds, few preparations.

    Examples
    --------
    >>> length_bound(1000)
    1024
    """
    return -(-longest // _STEP) * _STEP
