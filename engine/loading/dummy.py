"""Random weights from a configuration alone (load_format="dummy")."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import CPU, Device, array_module
from engine.dtypes import np_dtype
from engine.errors import ConfigError
from engine.loading.dummy_quantized import RandomCodes
from engine.loading.weight_memory import (
    is_expert,
    quantized_formats,
    weight_dtype,
    weight_room,
)
from engine.loading.weight_table import PLAIN_NORM, shard_axis, shard_pieces, weight_shapes
from engine.weights import WHOLE, Format, Shard, Weight, unpack_weight

__all__ = ["dummy_weights", "take_shard"]

_STD = 0.02
_NEAR_ONE = ("norm", "layer_scale", "router_scale")
_POOL = 1_048_573
"""Numbers in the random pool; prime, so rows repeat only after this many rows."""


def dummy_weights(
    config: ModelConfig,
    *,
    device: Device = CPU,
    dtype: str = "float32",
    seed: int = 0,
    max_model_len: int = 0,
    quantization: Format | None = None,
    shard: Shard = WHOLE,
) -> dict[str, Weight]:
    """Return random weights for a model: normal, of deviation 0.02; norms and factors near 1.

    A weight depends only on its name, size, dtype and the seed, and is the same on every device.
    A single pool of random numbers is tiled from an offset derived from the name, so billions of
    weights are generated at memory bandwidth.

    Parameters
    ----------
    config : ModelConfig
    device : Device
    dtype : str
        "float32", "float16" or "bfloat16".
    seed : int
    max_model_len : int
        Also reserve memory for the rope tables of sequences of this length.
    quantization : Format, optional
        Any format for the layers' matrices, even one that `quantize` does not support. See
        `load_weights` for the output layer.
    shard : Shard
        The shard to keep; each weight is generated whole first. Experts are dequantized if their
        shard does not consist of whole tiles.

    Returns
    -------
    dict of str to Weight
        The weights by name; see `load_weights`.

    Raises
    ------
    OutOfMemoryError
        If the device does not have enough memory.
    ConfigError
        On CUDA, if dtype is float32 and the format's kernels support only 16-bit activations.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> weights = dummy_weights(config, dtype="bfloat16")
    >>> weights["layers.0.qkv"].shape, weights["final_norm"].format.name
    ((64, 32), 'bfloat16')
    """
    device.activate()
    xp = device.xp
    pool = np.random.default_rng(seed).standard_normal(_POOL, np.float32) * np.float32(_STD)
    tile = xp.asarray(pool.astype(np_dtype(dtype)))
    weights: dict[str, Weight] = {}
    formats, own_formats = (
        {} if quantization is None else quantized_formats(config, quantization, part)
        for part in (WHOLE, shard)
    )
    if device.is_cuda and dtype == "float32":
        _check_kernels(own_formats)
    codes = {form: RandomCodes(form, pool, device, _tiled) for form in set(formats.values())}
    own = weight_shapes(config, shard)
    room: dict[str, Any] = {"max_model_len": max_model_len, "formats": own_formats, "shard": shard}
    with weight_room(config, device, dtype, **room):
        for name, shape in weight_shapes(config).items():
            if name not in own:
                continue
            if name == "lm_head" and name not in formats and config.tie_word_embeddings:
                weights[name] = weights["embed"]
                continue
            if name.endswith(_NEAR_ONE):
                has_offset = name.endswith("norm") and not name.endswith(PLAIN_NORM)
                offset = config.norm_weight_offset if has_offset else 0.0
                near_one = _tiled(pool, shape, _start(name)) + np.float32(1 - offset)
                stored = np_dtype(weight_dtype(name, dtype))
                weights[name] = Weight.dense(xp.asarray(near_one.astype(stored)))
            elif name in own_formats and not shard.is_whole:
                weights[name] = _quantized_part(codes[formats[name]], name, config, shard)
                continue
            elif name in formats:
                weights[name] = codes[formats[name]].weight(shape, _start(name))
                if name not in own_formats:
                    numbers = unpack_weight(weights[name])
                    weights[name] = Weight.dense(numbers.astype(np_dtype(dtype)))
            elif weight_dtype(name, dtype) != dtype:
                weights[name] = Weight.dense(xp.asarray(_tiled(pool, shape, _start(name))))
            else:
                weights[name] = Weight.dense(_tiled(tile, shape, _start(name)))
            if not shard.is_whole:
                weights[name] = take_shard(weights[name], name, config, shard)
    return weights


def _quantized_part(codes: RandomCodes, name: str, config: ModelConfig, shard: Shard) -> Weight:
    """Return a shard of a quantized weight."""
    take = partial(_take_part, name=name, config=config, shard=shard)
    part = codes.weight(weight_shapes(config)[name], _start(name), take)
    kind = name.rpartition(".")[2]
    experts = shard.expert_parallel
    axis = shard_axis(kind, by_output=shard.by_output, expert_parallel=experts)
    return replace(part, shard=shard, axis=axis)


def take_shard(weight: Weight, name: str, config: ModelConfig, shard: Shard) -> Weight:
    """Return a shard of a dense, unsharded weight as a new weight.

    Parameters
    ----------
    weight : Weight
    name : str
        The weight's name, such as "layers.0.qkv".
    config : ModelConfig
    shard : Shard

    Examples
    --------
    >>> import numpy as np
    >>> config = ModelConfig("llama", 5, 32, 1, 4, 2, 8, 48, 128)
    >>> whole = Weight.dense(np.ones((5, 32), np.float32))
    >>> take_shard(whole, "embed", config, Shard(1, 2)).data[:, 0]
    array([1., 1., 0.], dtype=float32)
    """
    kind = name.rpartition(".")[2]
    axis = shard_axis(kind, by_output=shard.by_output, expert_parallel=shard.expert_parallel)
    if axis is None:
        return weight
    return Weight.dense(_take_part(weight.data, name, config, shard), shard, axis)


def _take_part(whole: Any, name: str, config: ModelConfig, shard: Shard) -> Any:
    """Return a copy of the shard of an array shaped like the whole weight, such as its codes."""
    kind = name.rpartition(".")[2]
    shape = weight_shapes(config, shard)[name]
    bits = whole.view(f"u{whole.itemsize}")  # CuPy cannot copy slices of every dtype
    is_expert = kind.startswith("experts_")
    matrices = bits[slice(*shard.cut_experts(len(bits)))] if is_expert else bits[None]
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    rows, columns = shard_pieces(kind, config, matrices.shape[1:], shard, layer)
    cut = slice(None) if columns is None else slice(*columns)
    own = array_module(bits).zeros((len(matrices), *_matrix(shape, kind)), bits.dtype)
    start = 0
    for first, last in rows:
        own[:, start : start + last - first] = matrices[:, first:last][..., cut]
        start += last - first
    return own.reshape(shape).view(whole.dtype)


def _matrix(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Return the shape of one expert's matrix, or of the weight itself."""
    return shape[1:] if kind.startswith("experts_") else shape


def _check_kernels(formats: Mapping[str, Format]) -> None:
    """Reject formats whose CUDA kernels support only 16-bit activations."""
    for name, form in formats.items():
        if form.is_packed or is_expert(name):
            raise ConfigError(
                f"dtype must be float16 or bfloat16 for random weights in {form.name} on CUDA "
                f"({name}); got float32"
            )


def _start(name: str) -> int:
    """Return the pool offset of weight `name`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % _POOL


def _tiled(tile: Any, shape: tuple[int, ...], start: int) -> Any:
    """Return an array of `shape` that repeats `tile`, starting at its element `start`."""
    size = math.prod(shape)
    out = array_module(tile).empty(size, tile.dtype)
    done = min(size, _POOL - start)
    _copy(out[:done], tile[start : start + done])
    while done < size:
        count = min(size - done, _POOL)
        _copy(out[done : done + count], tile[:count])
        done += count
    return out.reshape(shape)


def _copy(out: Any, source: Any) -> None:
    """Copy between contiguous arrays; on CUDA by memcpy, which needs no compiled kernel."""
    if isinstance(out, np.ndarray):
        out[...] = source
    else:
        out.data.copy_from_device_async(source.data, out.nbytes)
