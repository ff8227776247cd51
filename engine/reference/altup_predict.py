"""NumPy mirror of `engine.kernels.altup_predict`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._altup import modalities
from engine.reference._row_by_row import multiply_row_by_row

__all__ = ["altup_predict"]

Array = np.ndarray[Any, Any]


def altup_predict(
    streams: Array,
    router_norm: Array,
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
    m = modalities(streams[:, 0], router_norm, router, eps)
    mixing = multiply_row_by_row(m, coefs.astype(np.float32).T)
    mixing = mixing.reshape(-1, num_streams, num_streams)
    predicted = (h + np.einsum("tij,tjn->tin", mixing, h)).astype(streams.dtype)
    return predicted, predicted[:, 0].copy()
