"""The trained network for screening: fused ops, no gradients, 16-bit or FP8 products."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import kernels

from .network import Batch, Group, Network

__all__ = ["PRECISIONS", "FastNetwork"]

PRECISIONS = ("same", "fp8")


class FastNetwork:
    """A network's forward pass in the engine's fused ops.

    A layer is a norm, a product, attention and a product to which the residual is added; then a
    norm, a product with SwiGLU, and a product to which the residual is added. With FP8, a product
    normalises and quantizes its rows itself.

    Parameters
    ----------
    network : Network
        float32, bfloat16 or float16. Later changes of its weights are not seen.
    precision : "same" or "fp8"
        Format of the products' operands: the network's dtype, or e4m3 with one scale per row.
        The features' and the head's products are small and keep the dtype. Attention without a
        pattern over sequences of `FP8_KEYS` tokens or more also runs in e4m3, with a scale per
        head; the kernel for e4m3 takes no pattern, so with one attention keeps the dtype.
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
        self._codes = {}
        if precision == "fp8":
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
            x = self._mlp(self._attend(x, layer, batch), layer)
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

    def _mlp(self, x: Any, layer: int) -> Any:
        norm = f"{layer}.mlp_norm"
        inner = self._product(x, f"{layer}.gate_up", norm, activation="swiglu")
        return self._product(inner, f"{layer}.down", residual=x)

    def _attend(self, x: Any, layer: int, batch: Batch) -> Any:
        config = self.config
        rows = self._product(x, f"{layer}.qkv", f"{layer}.attention_norm")
        heads = rows.reshape(len(x), 3, config.num_heads, config.head_dim)
        mixed = self.xp.empty((len(x), config.num_heads, config.head_dim), x.dtype)
        for group in batch.groups:
            self._attend_group(heads, group, mixed)
        return self._product(mixed.reshape(x.shape), f"{layer}.out", residual=x)

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
        means = [
            x[g.tokens].reshape(g.count, g.length, -1).astype(np.float32).mean(1)
            for g in batch.groups
        ]
        return self.xp.concatenate(means).astype(x.dtype)
