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
    features therefore take ops of the example's own (`ops`): the norm with its product, attention
    of a few tokens, and all that follows attention.

    Parameters
    ----------
    network : Network
        float32, bfloat16 or float16. Later changes of its weights are not seen.
    precision : "same" or "fp8"
        With "fp8", attention without a pattern over sequences of `FP8_KEYS` tokens or more runs in
        e4m3, with a scale per head; the kernel for e4m3 takes no pattern. So do the layers'
        products, with a scale per row, unless they take the ops of `ops`, which are faster: then
        the scales of heads are those of the first batch, with room for twice its peaks.
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
        self._is_fused = network.dtype.itemsize == 2 and ops.are_for(self.xp, network.config)
        self._heads: dict[int, tuple[Any, Any]] = {}  # by layer: scales, and factors of columns
        self._codes = {}
        if precision == "fp8" and not self._is_fused:
            for name, weight in self._weights.items():
                if name.rpartition(".")[2] in ("qkv", "out", "gate_up", "down"):
                    codes, scales = kernels.quantize_rows(weight, dtype="fp8")
                    self._codes[name] = (codes, scales[:, 0])

    def predict(self, batch: Batch) -> Any:
        """Return the outputs, (B, 1) float32. See `Network.predict`."""
        x = self._first(batch)
        for layer in range(1, self.config.num_layers + 1):
            x = self._finish(x, self._attend(x, layer, batch), layer)
        y = kernels.rmsnorm(self._pool(x, batch), self._weights["final_norm"])
        return kernels.gemm(y, self._weights["head"], out_dtype=np.float32)

    def _first(self, batch: Batch) -> Any:
        """Return the tokens after the layer that has no attention."""
        if self._is_fused:
            features = batch.features.astype(np.float32, copy=False)
            weights = (self._weights[f"0.{name}"] for name in ("mlp_norm", "gate_up", "down"))
            inputs = (batch.elements, features, self._table, self._weights["features"])
            return ops.first_layer(*inputs, *weights)
        rows = kernels.embedding(batch.elements, self._table)
        features = batch.features.astype(self._table.dtype, copy=False)
        return self._mlp(kernels.gemm(features, self._weights["features"], residual=rows), 0)

    def _product(self, x: Any, name: str, norm: str = "", **options: Any) -> Any:
        """Return the product of (normed) rows with a weight; `options` are those of `gemm`."""
        norm_weight = self._weights[norm] if norm else None
        if name in self._codes:
            codes, scales = self._codes[name]
            return kernels.gemm_fp8(x, codes, scales, norm_weight=norm_weight, **options)
        y = x if norm_weight is None else kernels.rmsnorm(x, norm_weight)
        return kernels.gemm(y, self._weights[name], **options)

    def _mlp(self, x: Any, layer: int) -> Any:
        norm, gate_up, down = (f"{layer}.{name}" for name in ("mlp_norm", "gate_up", "down"))
        inner = self._product(x, gate_up, norm, activation="swiglu")
        return self._product(inner, down, residual=x)

    def _finish(self, x: Any, mixed: Any, layer: int) -> Any:
        """Return the tokens after a layer, from what attention gives them."""
        out = f"{layer}.out"
        if self._is_fused:
            weights = (self._weights[f"{layer}.{name}"] for name in ("mlp_norm", "gate_up", "down"))
            return ops.finish_layer(x, *weights, mixed, self._weights[out])
        return self._mlp(self._product(mixed, out, residual=x), layer)

    def _attend(self, x: Any, layer: int, batch: Batch) -> Any:
        """Return what attention gives each token, (T, hidden)."""
        config = self.config
        norm, qkv = f"{layer}.attention_norm", f"{layer}.qkv"
        mixed = self.xp.empty((len(x), config.num_heads, config.head_dim), x.dtype)
        scales = None
        if self._is_fused and all(map(self._takes_fp8, batch.groups)):
            scales, factors = self._head_scales(x, layer)
            weights = (self._weights[norm], self._weights[qkv])
            rows = ops.norm_product_codes(x, *weights, factors)
        elif self._is_fused:
            rows = ops.norm_product(x, self._weights[norm], self._weights[qkv])
        else:
            rows = self._product(x, qkv, norm)
        heads = rows.reshape(len(x), 3, config.num_heads, config.head_dim)
        for group in batch.groups:
            self._attend_group(heads, group, mixed, scales)
        return mixed.reshape(x.shape)

    def _takes_fp8(self, group: Group) -> bool:
        return self.precision == "fp8" and group.pattern is None and group.length >= self.FP8_KEYS

    def _head_scales(self, x: Any, layer: int) -> tuple[Any, Any]:
        """Return the scales of a layer's queries, keys and values, (3, H), from its first batch."""
        if layer not in self._heads:
            weights = (self._weights[f"{layer}.{name}"] for name in ("attention_norm", "qkv"))
            rows = abs(ops.norm_product(x, *weights).astype(np.float32)).max(0)
            peaks = rows.reshape(3, self.config.num_heads, self.config.head_dim).max(2)
            scales = self.xp.maximum(2 * peaks, 1e-6) / 448
            factors = self.xp.repeat((1 / scales).ravel(), self.config.head_dim)
            self._heads[layer] = scales.astype(np.float32), factors.astype(np.float32)
        return self._heads[layer]

    def _attend_group(self, heads: Any, group: Group, mixed: Any, scales: Any) -> None:
        """Write a group's rows of `mixed`; `heads` are codes if there are `scales`."""
        q, k, v = (heads[group.tokens, i] for i in range(3))
        bounds = group.bounds
        out = mixed[group.tokens]
        if self._is_fused and ops.is_short(group.length, self.config):
            shape = (group.count, group.length)
            rows = heads[group.tokens].reshape(*shape, *heads.shape[1:])
            ops.short_attention(rows, out=out.reshape(*shape, *out.shape[1:]))
        elif self._takes_fp8(group):
            del bounds["pattern"]
            if scales is None:
                pairs = [kernels.quantize_heads(x) for x in (q, k, v)]
                (q, k, v), scales = zip(*pairs, strict=True)
            names = ("q_scale", "k_scale", "v_scale")
            bounds |= dict(zip(names, scales, strict=True))
            kernels.attention_prefill_fp8(q, k, v, **bounds, dtype=out.dtype.name, out=out)
        else:
            kernels.attention_prefill(q, k, v, **bounds, out=out)

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
