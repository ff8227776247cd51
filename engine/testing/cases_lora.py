"""Batches that mix LoRA adapters, for the tests and benchmarks of the LoRA ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["adapters_of", "sorted_by_adapter"]

Array = np.ndarray[Any, Any]


def sorted_by_adapter(adapters: Sequence[int] | Array, num_adapters: int) -> tuple[Array, Array]:
    """Return `order` (T,) and `offsets` (S + 1,) for each token's adapter; -1 is none.

    Examples
    --------
    >>> order, offsets = sorted_by_adapter([1, -1, 0, 1], num_adapters=2)
    >>> order.tolist(), offsets.tolist()
    ([2, 0, 3, 1], [0, 1, 3])
    """
    groups = np.asarray(adapters, np.int64)
    groups = np.where(groups < 0, num_adapters, groups)
    order = np.argsort(groups, kind="stable").astype(np.int32)
    counts = np.bincount(groups, minlength=num_adapters + 1)
    offsets = np.concatenate([[0], np.cumsum(counts[:num_adapters])]).astype(np.int32)
    return order, offsets


def adapters_of(num_tokens: int, num_adapters: int, seed: int) -> Array:
    """Return a random adapter for each token: one in five has none, some adapters no token."""
    rng = np.random.default_rng([seed, num_tokens, num_adapters])
    used = rng.choice(num_adapters, (num_adapters + 1) // 2 + num_adapters // 4, replace=False)
    adapters: Array = rng.choice(used, num_tokens)
    adapters[rng.random(num_tokens) < 0.2] = -1
    return adapters
