"""Tracing a forward pass: attention weights and the residual stream, layer by layer.

The kernels never materialise an attention matrix. For inspection, this module computes it in full,
for one sequence at a time, on the CPU only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.device import CPU
from engine.errors import DeviceError
from engine.layers.attention import Attention
from engine.layers.mla import Mla
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.sharding import WholeParts

__all__ = ["Trace", "trace_decoder"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Trace:
    """Intermediate values of a forward pass over T tokens.

    Attributes
    ----------
    attention : list of (H, T, T) float32 arrays
        For each layer and head: the attention weight of each token (row) on each key (column).
    hidden : list of (T, N) arrays
        The residual stream after each layer.
    """

    attention: list[Array]
    hidden: list[Array]


def trace_decoder(decoder: Decoder, token_ids: Array) -> Trace:
    """Run `token_ids` (T,) through the layers, and return their intermediate values.

    Raises
    ------
    DeviceError
        If the weights are on a GPU.
    ConfigError
        If the model has layers of another kind than `DecoderLayer`.
    """
    if decoder.xp is not np:
        raise DeviceError(f"tracing needs a model on {CPU}; got one whose weights are on a GPU")
    layers = decoder.plain_layers("a trace", (Attention, Mla))
    positions = np.arange(len(token_ids), dtype=np.int32)
    decoder.extend_ropes(len(token_ids))
    rope_positions = positions + decoder.rope_offsets(len(token_ids))
    result = Trace([], [])
    residual = decoder.embedded(token_ids.astype(np.int32), rope_positions)
    for layer in layers:
        weights, residual = _walk(layer, residual, positions, rope_positions, decoder.parts)
        by_head = decoder.parts.all_heads(np.moveaxis(weights, 0, -1))
        result.attention.append(np.ascontiguousarray(np.moveaxis(by_head, -1, 0)))
        result.hidden.append(residual)
    return result


def _walk(
    layer: DecoderLayer,
    residual: Array,
    positions: Array,
    rope_positions: Array,
    parts: WholeParts,
) -> tuple[Array, Array]:
    """Return the layer's attention weights and the residual stream after it."""
    assert isinstance(layer.attn, Attention | Mla) and layer.mlp is not None
    given = layer.attn_norm(residual)
    weights, heads = attend(layer.attn, given, positions, rope_positions)
    x = layer.attn.o(heads)
    if layer.is_parallel:
        given = given if layer.mlp_norm is layer.attn_norm else layer.mlp_norm(residual)
        return weights, residual + layer.attn_norm.branch_scale * (x + layer.mlp(given))
    x = x if layer.post_attn_norm is None else layer.post_attn_norm(x)
    x, residual = layer.mlp_norm.add(x, residual.copy())
    x = parts.summed(layer.mlp(x))
    x = x if layer.post_mlp_norm is None else layer.post_mlp_norm(x)
    return weights, residual + layer.mlp_norm.branch_scale * x


def attend(
    attention: Attention | Mla, x: Array, positions: Array, rope_positions: Array
) -> tuple[Array, Array]:
    """Return attention weights (H, T, T), and the heads' outputs (T, H*D) before o_proj.

    With attention sinks, the weights of a query sum up to less than 1.
    """
    p = attention.params
    q, k, v = (a.astype(np.float32) for a in attention.project(x, rope_positions))
    k, v = (np.repeat(a, p.num_heads // p.num_kv_heads, axis=1) for a in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * p.scale
    if p.softcap:
        scores = p.softcap * np.tanh(scores / p.softcap)
    distance = positions[:, None] - positions[None, :]
    is_hidden = (distance < 0) | ((distance >= p.window) if p.window else False)
    if p.chunk:
        is_hidden |= positions[:, None] // p.chunk != positions[None, :] // p.chunk
    scores[:, is_hidden] = -np.inf
    no_sinks = np.full(p.num_heads, -np.inf, np.float32)
    sinks = (no_sinks if attention.sinks is None else attention.sinks)[:, None, None]
    highest = np.maximum(scores.max(-1, keepdims=True), sinks)
    weights = np.exp(scores - highest)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks - highest)
    heads = np.einsum("hij,jhd->ihd", weights, v).astype(x.dtype)
    return weights, attention.joined(heads, x)
