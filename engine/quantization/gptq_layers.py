"""GPTQ for a whole model: each layer is rounded for the inputs it gets from calibration text.

The text runs through the layers one at a time, after all earlier layers have been rounded. Memory
holds all tokens' activations at one layer boundary, and one layer's Hessians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.memory_pool import MemoryPool
from engine.device import Device
from engine.errors import WeightsError
from engine.layers.batch import ForwardBatch
from engine.layers.linear import NormedLinear
from engine.layers.mlp import MLP
from engine.layers.moe import MoE
from engine.layers.norm import Norm
from engine.models.decoder import Decoder, DecoderLayer, summed_experts
from engine.quantization.gptq import Hessian, gptq
from engine.weights import Format
from engine.weights.quantize import Codes, dequantize_codes

__all__ = ["gptq_layers"]

_BLOCK_SIZE = 16
_MAX_TOKENS = {"cpu": 512, "cuda": 8192}  # tokens per batch


class _Observer:
    """Wrapper around a `Linear` that accumulates its inputs in a Hessian."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.hessian = Hessian()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.linear, name)

    def __call__(self, x: Any, **options: Any) -> Any:
        self.hessian.add(x)
        return self.linear(x, **options)

    def of_normed(self, x: Any, norm: Norm, **options: Any) -> Any:
        self.hessian.add(norm(x))
        return self.linear.of_normed(x, norm, **options)


def gptq_layers(
    decoder: Decoder,
    device: Device,
    sequences: np.ndarray[Any, Any],
    form: Format,
    *,
    scale_dtype: Callable[[str], str] = lambda name: "",
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Codes]]:
    """Round the linear layers of a dense model with GPTQ, from first to last.

    Parameters
    ----------
    decoder : Decoder
        Each rounded weight is overwritten with its dequantized codes.
    device : Device
        Device of the decoder.
    sequences : (B, L) array of int
        Token ids of typical texts.
    form : Format
        A grouped integer format.
    scale_dtype : callable
        Weight name -> dtype its scales are rounded to ("": float16).
    wanted : callable
        Weight name -> whether to round it.

    Yields
    ------
    (str, Codes)
        Name of a weight, such as "layers.0.qkv", and its codes in row order. Expert matrices are
        skipped, since each sees only some of the tokens.
    """
    device.activate()
    batches = list(_batches(decoder, device, sequences))
    decoder.extend_ropes(sequences.shape[1])
    pages = _pages(decoder, device, batches)
    states = [(None, decoder.embedded(batch.token_ids, batch.rope_positions)) for batch in batches]
    for index, layer in enumerate(decoder.plain_layers("GPTQ")):
        places = {name: place for name, place in _linears(layer, index).items() if wanted(name)}
        hessians = _observe(layer, places, states, batches, pages)
        for name, (owner, attribute) in places.items():
            weight = getattr(owner, attribute).weight
            if not weight.format.is_dense:
                raise WeightsError(f"weight {name!r} must be dense; got {weight.format.name!r}")
            made = gptq(weight.data, hessians.pop(name), form, scale_dtype=scale_dtype(name))
            weight.data[...] = dequantize_codes(form, made).astype(weight.data.dtype)
            yield name, made
        after = (layer(*state, batch, pages) for state, batch in zip(states, batches, strict=True))
        states = [(summed_experts(delta), residual) for delta, residual in after]


def _linears(layer: DecoderLayer, index: int) -> dict[str, tuple[Any, str]]:
    """Return, by weight name, each linear layer's owner object and attribute name."""
    found: dict[str, tuple[Any, str]] = {"qkv": (layer.attn, "qkv"), "o": (layer.attn, "o")}
    mlp: Any = layer.mlp
    prefix = ""
    if isinstance(mlp, MoE):
        mlp = mlp.shared
        prefix = "shared_"
    if isinstance(mlp, MLP):
        found[f"{prefix}{'gate_up' if mlp.is_gated else 'up'}"] = mlp, "gate_up"
        found[f"{prefix}down"] = mlp, "down"
    for kind, place in found.items():
        linear = getattr(*place)
        if isinstance(linear, NormedLinear):  # what it multiplies is normalised
            found[kind] = linear, "linear"
    return {f"layers.{index}.{kind}": place for kind, place in found.items()}


def _observe(
    layer: DecoderLayer,
    places: dict[str, tuple[Any, str]],
    states: Sequence[tuple[Any, Any]],
    batches: Sequence[ForwardBatch],
    pages: tuple[Any, Any],
) -> dict[str, Any]:
    """Run the layer on copies of the activations; return each linear layer's Hessian."""
    observers = {name: _Observer(getattr(*place)) for name, place in places.items()}
    for name, place in places.items():
        setattr(*place, observers[name])
    try:
        for (delta, residual), batch in zip(states, batches, strict=True):
            # The layer overwrites the residual stream.
            layer(None if delta is None else delta.copy(), residual.copy(), batch, pages)
    finally:
        for name, place in places.items():
            setattr(*place, observers[name].linear)
    return {name: observer.hessian.total for name, observer in observers.items()}


def _batches(
    decoder: Decoder, device: Device, sequences: np.ndarray[Any, Any]
) -> Iterator[ForwardBatch]:
    length = sequences.shape[1]
    step = max(1, _MAX_TOKENS[device.kind] // length)
    blocks = -(-length // _BLOCK_SIZE)
    for first in range(0, len(sequences), step):
        rows = sequences[first : first + step]
        tables = np.arange(len(rows) * blocks, dtype=np.int32).reshape(len(rows), blocks)
        yield ForwardBatch.build(
            rows,
            [0] * len(rows),
            tables,
            _BLOCK_SIZE,
            rope_offset=decoder.rope_offsets([length] * len(rows)),
        ).to(device)


def _pages(decoder: Decoder, device: Device, batches: Sequence[ForwardBatch]) -> tuple[Any, Any]:
    """Return KV pages for one layer and one batch; each layer and batch reuses them."""
    c = decoder.config
    geometry = KVGeometry.uniform(1, c.num_kv_heads, c.head_dim, _BLOCK_SIZE, decoder.dtype.name)
    blocks = max(int(batch.block_tables.size) for batch in batches)
    pages: tuple[Any, Any] = KVCache(geometry, blocks, MemoryPool(device)).layers[0]
    return pages
