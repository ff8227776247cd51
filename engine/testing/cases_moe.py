"""Router logits, routings and layers for the tests and benchmarks of mixture-of-experts ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.reference import Routing

__all__ = ["MOE_LAYERS", "distinct_logits", "routing_of", "tied_logits"]

# Model -> (hidden size, width of an expert, experts, top_k).
MOE_LAYERS: dict[str, tuple[int, int, int, int]] = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}


def distinct_logits(num_tokens: int, num_experts: int, seed: int) -> np.ndarray[Any, Any]:
    """Return (T, E) logits whose scores are far enough apart to rank alike on every device.

    Examples
    --------
    >>> distinct_logits(1, 2, seed=0).tolist()
    [[1.2000000476837158, -2.799999952316284]]
    """
    rng = np.random.default_rng([seed, num_tokens, num_experts])
    ranks = np.argsort(rng.random((num_tokens, num_experts)), axis=1)
    # Asymmetric about 0: otherwise the sigmoids of x and -x would sum to 1 for every x.
    logits: np.ndarray[Any, Any] = ((ranks - num_experts / 2 + 0.3) * (8 / num_experts)).astype(
        np.float32
    )
    return logits


def tied_logits(num_tokens: int, num_experts: int, seed: int) -> np.ndarray[Any, Any]:
    """Return (T, E) logits from few multiples of 1 / 16, so that many scores are equal."""
    rng = np.random.default_rng([seed, num_tokens, num_experts])
    return (rng.integers(-3, 4, (num_tokens, num_experts)) / 16).astype(np.float32)


def routing_of(experts: Sequence[Sequence[int]], num_experts: int, seed: int = 0) -> Routing:
    """Return a routing of tokens to `experts`, with random weights.

    Examples
    --------
    >>> routing = routing_of([[1, 0], [1, 2]], num_experts=4)
    >>> routing.order.tolist(), routing.offsets.tolist()
    ([1, 0, 2, 3], [0, 1, 3, 4, 4])
    """
    chosen = np.asarray(experts, np.int32)
    weights = np.random.default_rng(seed).random(chosen.shape, np.float32)
    order = np.argsort(chosen.reshape(-1), kind="stable").astype(np.int32)
    counts = np.bincount(chosen.reshape(-1), minlength=num_experts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Routing(chosen, weights, order, offsets)
