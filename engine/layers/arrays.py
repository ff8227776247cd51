"""The arrays of a layer by name: a launch plan replaces their addresses from layer to layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

__all__ = ["HoldsArrays", "arrays_of"]


class HoldsArrays(Protocol):
    """A layer, or a part of one, with arrays on the device."""

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""


def arrays_of(**parts: HoldsArrays | None) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) for the arrays of all `parts`, as "part.array"; None has no arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.layers.norm import Norm
    >>> list(arrays_of(attn_norm=Norm(np.ones(2), 1e-6), post_attn_norm=None))
    [('attn_norm.weight', array([1., 1.]))]
    """
    for prefix, part in parts.items():
        if part is not None:
            for name, array in part.arrays():
                yield f"{prefix}.{name}", array
