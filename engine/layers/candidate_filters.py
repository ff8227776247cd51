"""Filters of candidates that `kernels.sample` does not have: top-n-sigma, typical, XTC.

Each takes the logits with masks, biases and penalties, before the temperature, and returns the
tokens that stay. They are applied in this order, with the probabilities of the tokens left so far.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.device import array_module

__all__ = ["kept_tokens", "pack_rows"]


def kept_tokens(
    logits: Any, *, top_n_sigma: Any = None, typical_p: Any = None, xtc_threshold: Any = None
) -> Any:
    """Return which tokens each row keeps.

    Parameters
    ----------
    logits : (n, V) array of float32
        -inf for tokens that are not allowed. Not modified.
    top_n_sigma : (n,) array of float32, optional
        Keep logits within this many standard deviations of the largest [1]_; 0 keeps all.
    typical_p : (n,) array of float32, optional
        Keep the tokens whose information is closest to the distribution's entropy, up to this
        probability [2]_; 1 keeps all.
    xtc_threshold : (n,) array of float32, optional
        Of the tokens at least this probable keep only the least probable [3]_; above 0.5 keeps all.

    Returns
    -------
    (n, V) array of bool
        At least one token per row, if its logits have a finite one.

    References
    ----------
    .. [1] Tang et al.: Top-nσ: Not All Logits Are You Need, arXiv:2411.07641.
    .. [2] Meister et al.: Locally Typical Sampling, arXiv:2202.00666.
    .. [3] Exclude Top Choices: a sampler by P. E. Weidmann, 2024.

    Examples
    --------
    >>> logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    >>> kept_tokens(logits, xtc_threshold=np.float32([0.25])).tolist()
    [[False, True, True, True]]
    >>> kept_tokens(logits, typical_p=np.float32([0.3])).tolist()
    [[False, True, False, False]]
    """
    xp = array_module(logits)
    keep = xp.isfinite(logits)
    if top_n_sigma is not None:
        keep &= _within_sigmas(xp, logits, keep, top_n_sigma)
    if typical_p is not None:
        keep &= _typical(xp, _probabilities(xp, logits, keep), typical_p)
    if xtc_threshold is not None:
        keep &= _without_top(xp, _probabilities(xp, logits, keep), xtc_threshold)
    return keep


def pack_rows(keep: Any) -> Any:
    """Return masks (n, ceil(V/32)) int32 as `kernels.sample` takes them, of booleans (n, V).

    Examples
    --------
    >>> pack_rows(np.array([[True, False, True]])).tolist()
    [[5]]
    """
    xp = array_module(keep)
    num_rows, size = keep.shape
    padded = xp.zeros((num_rows, -(-size // 32) * 32), np.bool_)
    padded[:, :size] = keep
    packed = xp.packbits(padded.reshape(-1), bitorder="little")
    return packed.view(np.int32).reshape(num_rows, -1)


def _probabilities(xp: Any, logits: Any, keep: Any) -> Any:
    """Return the probabilities of the tokens kept; 0 for the others."""
    rest = xp.where(keep, logits, np.float32(-np.inf))
    top = rest.max(axis=1, keepdims=True)
    powers = xp.exp(rest - xp.where(xp.isfinite(top), top, np.float32(0)))
    return powers / xp.maximum(powers.sum(axis=1, keepdims=True), np.float32(1e-30))


def _within_sigmas(xp: Any, logits: Any, keep: Any, limit: Any) -> Any:
    count = xp.maximum(keep.sum(axis=1, keepdims=True), 1)
    rest = xp.where(keep, logits, np.float32(0))
    mean = rest.sum(axis=1, keepdims=True) / count
    square = xp.where(keep, (logits - mean) ** 2, np.float32(0))
    sigma = xp.sqrt(square.sum(axis=1, keepdims=True) / count)
    top = xp.where(keep, logits, np.float32(-np.inf)).max(axis=1, keepdims=True)
    limit = limit[:, None]
    return (logits >= top - limit * sigma) | (limit <= 0)


def _typical(xp: Any, probabilities: Any, mass: Any) -> Any:
    logs = xp.log(xp.maximum(probabilities, np.float32(1e-38)))
    entropy = -(probabilities * logs).sum(axis=1, keepdims=True)
    distance = xp.where(probabilities > 0, xp.abs(-logs - entropy), np.float32(np.inf))
    order = xp.argsort(distance, axis=1, kind="stable")
    ordered = xp.take_along_axis(probabilities, order, axis=1)
    before = xp.cumsum(ordered, axis=1) - ordered  # probability of the tokens before each
    mass = mass[:, None]
    chosen = (before < mass) | (mass >= 1)
    ranks = xp.argsort(order, axis=1)  # rank of each token in the order
    return xp.take_along_axis(chosen, ranks, axis=1)


def _without_top(xp: Any, probabilities: Any, threshold: Any) -> Any:
    threshold = threshold[:, None]
    above = (probabilities >= threshold) & (probabilities > 0) & (threshold <= 0.5)
    least = xp.where(above, probabilities, np.float32(np.inf)).argmin(axis=1)
    stays = xp.arange(probabilities.shape[1])[None, :] == least[:, None]
    return ~above | stays
