"""NumPy mirror of `engine.kernels.moe_route`: its specification."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["LEAST_TOTAL", "Routing", "moe_route", "router_scores", "sorted_by_expert"]

Array = np.ndarray[Any, Any]

LEAST_TOTAL = 1e-20  # smallest divisor of renormalized weights


class Routing(NamedTuple):
    """Experts of each token. Pair t·k + j is token t with its j-th expert; P = T·k.

    Attributes
    ----------
    experts : (T, k) array of int32
        Experts of each token, best first.
    weights : (T, k) array of float32
        Factors on the experts' outputs.
    order : (P,) array of int32
        Pair indices, sorted by expert, then by token.
    offsets : (E + 1,) array of int32
        The pairs of expert e are entries offsets[e] to offsets[e + 1] of `order`.
    """

    experts: Any
    weights: Any
    order: Any
    offsets: Any


def moe_route(
    logits: Array,
    top_k: int,
    *,
    score: str = "softmax",
    jitter: float = 0.0,
    correction: Array | None = None,
    expert_scale: Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    num_shared: int = 0,
    slots: Array | None = None,
    load: Array | None = None,
) -> Routing:
    """Choose the top_k experts of each token, and sort the pairs (token, expert) by expert."""
    real = accumulation_dtype(logits.dtype).type
    num_experts = logits.shape[1] - num_shared
    logits, gate = logits[:, :num_experts], logits[:, num_experts:]
    logits = logits.astype(real, copy=False)
    is_mixed = score == "sparsemixer"
    scores = logits if is_mixed else router_scores(logits, score)
    ranked = scores if correction is None else scores + correction.astype(real, copy=False)
    if num_groups > 1:
        ranked = _best_groups(ranked, num_groups, top_groups, sums_two=correction is not None)
    # Stable: ties go to the lower expert index.
    experts = np.argsort(-ranked, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    weights = np.take_along_axis(scores, experts, axis=1)
    if is_mixed:
        weights = _shares(logits, experts, real(jitter))
    if renormalize:
        total = np.zeros(len(weights), real)
        for column in weights.T:  # in rank order, as in the kernel
            total += column
        weights = weights / np.maximum(total, real(LEAST_TOTAL))[:, None]
    if expert_scale is not None:
        weights = weights * expert_scale.astype(real, copy=False)[experts]
    if load is not None:
        counted = experts if slots is None else experts[slots >= 0]
        load += np.bincount(counted.reshape(-1), minlength=len(load))
    weights = weights * real(scale)
    if num_shared:
        experts = np.hstack([experts, np.full(gate.shape, num_experts, np.int32)])
        weights = np.hstack([weights, router_scores(gate.astype(real, copy=False), "sigmoid")])
    return Routing(experts, weights, *sorted_by_expert(experts, num_experts + num_shared))


def _shares(logits: Array, experts: Array, jitter: Any) -> Array:
    """Return each expert's share among those that are left and close to it: "sparsemixer"."""
    left = np.ones(logits.shape, bool)
    shares = np.empty(experts.shape, logits.dtype)
    for rank, chosen in enumerate(experts.T):
        best = np.take_along_axis(logits, chosen[:, None], axis=1)
        is_far = best - logits > 2 * jitter * np.maximum(np.abs(logits), best)
        exps = np.where(left & ~is_far, np.exp(np.minimum(logits - best, 0)), 0)
        shares[:, rank] = 1 / exps.sum(axis=1)
        np.put_along_axis(left, chosen[:, None], False, axis=1)
    return shares


def sorted_by_expert(experts: Array, num_experts: int) -> tuple[Array, Array]:
    """Return `order` and `offsets` of the `Routing` with these experts."""
    order = np.argsort(experts.reshape(-1), kind="stable").astype(np.int32)
    counts = np.bincount(experts.reshape(-1), minlength=num_experts)
    return order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def router_scores(logits: Array, score: str) -> Array:
    """Return the softmax over all experts, or the sigmoid of each."""
    if score == "sigmoid":
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-logits)))
    with np.errstate(invalid="ignore"):  # inf - inf
        exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exps / exps.sum(axis=1, keepdims=True))


def _best_groups(ranked: Array, num_groups: int, top_groups: int, *, sums_two: bool) -> Array:
    """Set the scores of experts outside each token's best groups to -inf."""
    groups = ranked.reshape(len(ranked), num_groups, ranked.shape[1] // num_groups)
    best = -np.sort(-groups, axis=2)
    of_group = best[:, :, 0] + best[:, :, 1] if sums_two else best[:, :, 0]
    chosen = np.argsort(-of_group, axis=1, kind="stable")[:, :top_groups]
    kept = np.zeros(of_group.shape, bool)
    np.put_along_axis(kept, chosen, True, axis=1)
    masked: Array = np.where(kept[:, :, None], groups, groups.dtype.type(-np.inf))
    return np.asarray(masked.reshape(ranked.shape))
