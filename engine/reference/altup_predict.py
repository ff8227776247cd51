"""NumPy mirror of `engine.kernels.altup_predict`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.rmsnorm import rmsnorm

__all__ = ["altup_modalities", "altup_predict"]

Array = np.ndarray[Any, Any]


def altup_modalities(x: Array, norm_weight: Array, router: Array, eps: float) -> Array:
    """tanh(router norm(x) / N), (T, S), in float32."""
    normed = rmsnorm(x.astype(np.float32), norm_weight.astype(np.float32), eps=eps)
    logits = normed @ router.astype(np.float32).T / np.float32(x.shape[1])
    return np.asarray(np.tanh(logits))


def altup_predict(
    streams: Array,
    norm_weight: Array,
    router: Array,
    coefs: Array,
    *,
    delta: Array | None = None,
    eps: float = 1e-6,
) -> tuple[Array, Array]:
    """Return h_i + sum_j R_ij h_j for each stream h_i, and a copy of the first one."""
    num_streams = streams.shape[1]
    h = streams.astype(np.float32)
    if delta is not None:
        h[:, 1:] += delta.astype(np.float32)[:, None]
    modalities = altup_modalities(streams[:, 0], norm_weight, router, eps)
    mixing = (modalities @ coefs.astype(np.float32).T).reshape(-1, num_streams, num_streams)
    predicted = (h + np.einsum("tij,tjn->tin", mixing, h)).astype(streams.dtype)
    return predicted, predicted[:, 0].copy()
