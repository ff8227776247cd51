"""The trained network for screening: fused ops, no gradients, 16-bit or FP8 products."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import kernels

from . import ops
from .network import Batch, Group, Network

__all__ = ["PRECISIONS", "FastNetwork"]

PRECISIONS = ("same", "fp8")


class FastNetwork:
    """A network's forward pass in fused ops.

    A layer is a norm, a product, attention and a product to which the residual is added; then a
    norm, a product with SwiGLU, and a product to which the residual is added. With FP8, a product
    normalises and quantizes its rows itself.

    These rows are so short that moving them takes the time. On Hopper, 16-bit networks of up to 128
    features therefore take two ops of the example's own (`ops`): the norm with its product, and
    all that follows attention.

    Parameters
    ----------
    network : Network
        float32, bfloat16 or float16. Later changes of its weights are not seen.
    precision : "same" or "fp8"
        With "fp8", attention without a pattern over sequences of `FP8_KEYS` tokens or more runs in
        e4m3, with a scale per head; the kernel for e4m3 takes no pattern. So do the layers'
        products, with a scale per row, unless they take the ops of `ops`, which are faster.
    """

    FP8_KEYS = 1024

    def __init__(self, network: Network, precision: str = "same") -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}; got {precision!r}")
        if precision == "fp8" and network.dtype.itemsize != 2:
            raise ValueError(f"precision 'fp8' needs a 16-bit network; got {network.dtype}")
        self.config = network.config
        self.xp = network.xp
        self.precision = precision
        self._weights = {name: weight.copy() for name, weight in network.weights.items()}
        self._table = network.table.copy()
        self._is_fused = network.dtype.itemsize == 2 and ops.are_for(
            self.xp, network.config.hidden, network.config.ffn
        )
        self._codes = {}
        if precision == "fp8" and not self._is_fused:
            for name, weight in self._weights.items():
                if name.rpartition(".")[2] in ("qkv", "out", "gate_up", "down"):
                    codes, scales = kernels.quantize_rows(weight, dtype="fp8")
                    self._codes[name] = (codes, scales[:, 0])

    def predict(self, batch: Batch) -> Any:
        """Return the outputs, (B, 1) float32. See `Network.predict`."""
        features = batch.features.astype(self._table.dtype, copy=False)
        rows = kernels.embedding(batch.elements, self._table)
        x = kernels.gemm(features, self._weights["features"], residual=rows)
        x = self._mlp(x, 0)
        for layer in range(1, self.config.num_layers + 1):
            mixed = self._attend(x, layer, batch)
            if self._is_fused:
                x = self._mlp(x, layer, mixed, self._weights[f"{layer}.out"])
            else:
                x = self._mlp(self._product(mixed, f"{layer}.out", residual=x), layer)
        y = kernels.rmsnorm(self._pool(x, batch), self._weights["final_norm"])
        return kernels.gemm(y, self._weights["head"], out_dtype=np.float32)

    def _product(self, x: Any, name: str, norm: str = "", **options: Any) -> Any:
        """Return the product of (normed) rows with a weight; `options` are those of `gemm`."""
        norm_weight = self._weights[norm] if norm else None
        if name in self._codes:
            codes, scales = self._codes[name]
            return kernels.gemm_fp8(x, codes, scales, norm_weight=norm_weight, **options)
        y = x if norm_weight is None else kernels.rmsnorm(x, norm_weight)
        return kernels.gemm(y, self._weights[name], **options)

    def _mlp(self, x: Any, layer: int, mixed: Any = None, mixed_weight: Any = None) -> Any:
        norm, gate_up, down = (f"{layer}.{name}" for name in ("mlp_norm", "gate_up", "down"))
        if self._is_fused:
            weights = (self._weights[name] for name in (norm, gate_up, down))
            return ops.finish_layer(x, *weights, mixed, mixed_weight)
        inner = self._product(x, gate_up, norm, activation="swiglu")
        return self._product(inner, down, residual=x)

    def _attend(self, x: Any, layer: int, batch: Batch) -> Any:
        """Return what attention gives each token, (T, hidden)."""
        norm, qkv = f"{layer}.attention_norm", f"{layer}.qkv"
        if self._is_fused:
            rows = ops.norm_product(x, self._weights[norm], self._weights[qkv])
        else:
            rows = self._product(x, qkv, norm)
        heads = rows.reshape(len(x), 3, self.config.num_heads, self.config.head_dim)
        mixed = self.xp.empty_like(heads[:, 0])
        for group in batch.groups:
            self._attend_group(heads, group, mixed)
        return mixed.reshape(x.shape)

    def _attend_group(self, heads: Any, group: Group, mixed: Any) -> None:
        q, k, v = (heads[group.tokens, i] for i in range(3))
        bounds = group.bounds
        out = mixed[group.tokens]
        pattern = bounds.pop("pattern")
        is_fp8 = self.precision == "fp8" and pattern is None and group.length >= self.FP8_KEYS
        if is_fp8:
            pairs = [kernels.quantize_heads(x) for x in (q, k, v)]
            codes = [pair[0] for pair in pairs]
            scales = dict(
                zip(("q_scale", "k_scale", "v_scale"), (p[1] for p in pairs), strict=True)
            )
            kernels.attention_prefill_fp8(*codes, **scales, **bounds, dtype=out.dtype.name, out=out)
        else:
            kernels.attention_prefill(q, k, v, **bounds, pattern=pattern, out=out)

    def _pool(self, x: Any, batch: Batch) -> Any:
        if batch.roots is not None:
            return x[batch.roots]
        return self.xp.concatenate(
            [self._mean(x[g.tokens].reshape(g.count, g.length, -1)) for g in batch.groups]
        )

    def _mean(self, x: Any) -> Any:
        if self._is_fused:
            return ops.mean_rows(x)
        return x.astype(np.float32).mean(1).astype(x.dtype)
