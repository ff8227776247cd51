"""Weights of the tiny golden models: a function of the tensor's name, so that none are stored.

Needs NumPy only; read by `make.py` (beside transformers) and by the tests (beside the engine).
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["tiny_weight"]


def tiny_weight(name: str, shape: list[int], norm_mean: float) -> np.ndarray:
    """Return tensor `name` in float32.

    Attention is far from uniform, and the layers dominate the embedding, so that a tied model does
    more than repeat its last token.
    """
    if name.endswith(("act_fn.beta", "act_fn.eps")):  # one number; real ones are 0.5 and -1e-6
        return np.array(0.4 if name.endswith("beta") else -0.02, np.float32).reshape(shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(tuple(shape))
    if "linear_attn.norm" in name:
        values = 1 + 0.2 * values  # in every family
    elif ("norm" in name or ".ln_" in name) and not name.endswith(".bias"):
        values = norm_mean + 0.2 * values
    elif name.endswith("layer_scalar"):
        values = 1 + 0.3 * values
    elif name.endswith(("correction_bias", "expert_bias")):
        values = 0.1 * values  # the router decides as well
    elif name.endswith(".bias"):
        values = 0.5 * values
    else:
        values = values * (0.125 if "embed_tokens" in name else 1.5 / np.sqrt(shape[-1]))
    return values.astype(np.float32)
