"""What weights a model has, and which rows of them each tensor of a checkpoint fills."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from engine.cache.memory_pool import device_memory, format_bytes
from engine.config import ModelConfig
from engine.device import Device
from engine.dtypes import itemsize
from engine.errors import OutOfMemoryError, WeightsError
from engine.models.family import TensorName

__all__ = ["Placement", "place_tensors", "weight_bytes", "weight_room", "weight_shapes"]

# Tables that the engine computes itself, in old checkpoints and in .gguf files.
_IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|rope_freqs\.weight|rope_factors_(long|short)\.weight"
)
_OUTPUT_NAMES = ("lm_head.weight", "output.weight")


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every (fused) weight of a model, (out, in) for a matrix.

    "lm_head" is in the table of a tied model too, where it is the same array as "embed".

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> weight_shapes(config)["layers.0.qkv"]
    (64, 32)
    """
    n, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embed": table}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"layers.{layer}.{name}"] = shape
    return {**shapes, "final_norm": (n,), "lm_head": table}


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the weights of one layer."""
    n, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (n,), "qkv": (config.qkv_dim, n)}
    if config.qkv_bias:
        shapes["qkv_bias"] = (config.qkv_dim,)
    if config.qk_norm:
        shapes |= {"q_norm": (d,), "k_norm": (d,)}
    shapes["o"] = (n, config.num_heads * d)
    if config.o_bias:
        shapes["o_bias"] = (n,)
    if config.post_norms:
        shapes["post_attn_norm"] = (n,)
    shapes |= {"mlp_norm": (n,), "gate_up": (2 * f, n), "down": (n, f)}
    if config.mlp_bias:
        shapes |= {"gate_up_bias": (2 * f,), "down_bias": (n,)}
    if config.post_norms:
        shapes["post_mlp_norm"] = (n,)
    return shapes


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the bytes of all weights in `dtype`; tied embeddings count once.

    Examples
    --------
    >>> weight_bytes(ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128), "float16")
    23744
    """
    shapes = weight_shapes(config)
    if config.tie_word_embeddings:
        del shapes["lm_head"]
    return sum(math.prod(shape) for shape in shapes.values()) * itemsize(dtype)


@contextmanager
def weight_room(config: ModelConfig, device: Device, dtype: str) -> Iterator[None]:
    """Refuse the weights that are allocated inside if the device has no room for them.

    Raises
    ------
    OutOfMemoryError
        With what is wanted, what there is and who uses it.
    """
    needed, (total, free) = weight_bytes(config, dtype), device_memory(device)
    text = (
        f"{device} has no room for {format_bytes(needed)} of weights in {dtype}: of "
        f"{format_bytes(total)} in total, others use {format_bytes(total - free)} and "
        f"{format_bytes(free)} are free"
    )
    if dtype == "float32" and weight_bytes(config, "bfloat16") <= free:
        text += '. What would fit: dtype="bfloat16"'
    # The system would promise the memory, and end whoever uses it. A GPU refuses by itself, and
    # CuPy may hold blocks that count as used.
    if needed > free and not device.is_cuda:
        raise OutOfMemoryError(text)
    try:
        yield
    except MemoryError as error:  # CuPy's own error derives from it
        raise OutOfMemoryError(f"{text} ({error})") from error


@dataclass(frozen=True)
class Placement:
    """Tensor `name` of shape `shape` fills rows [start, start + shape[0]) of weight `target`."""

    name: str
    target: str
    start: int
    shape: tuple[int, ...]
    is_rotated: bool = False
    """Whether these are rows of q or k, which rope turns."""


def place_tensors(
    where: str,
    config: ModelConfig,
    table: Iterable[TensorName],
    found: Mapping[str, tuple[int, ...]],
) -> list[Placement]:
    """Return where every tensor of a checkpoint goes, in the checkpoint's order.

    Parameters
    ----------
    where : str
        The checkpoint's name, for messages.
    table : iterable of TensorName
        The family's names.
    found : mapping
        Name and shape of the tensors that are there.

    Raises
    ------
    WeightsError
        If a tensor is missing, unexpected, or has another shape than the config says.
    """
    wanted = _wanted(config, table)
    ignored = set(_OUTPUT_NAMES) if config.tie_word_embeddings else set()
    unexpected = [
        name
        for name in found
        if name not in wanted and name not in ignored and not _IGNORED.fullmatch(name)
    ]
    _refuse(where, "missing", [name for name in wanted if name not in found])
    _refuse(where, f"unknown to a {config.model_type} model of this config", unexpected)
    for name, place in wanted.items():
        if found[name] != place.shape:
            raise WeightsError(
                f"{where}: tensor {name!r} must have shape {place.shape}, as the config says; "
                f"got {found[name]}"
            )
    return [wanted[name] for name in found if name in wanted]


def _refuse(where: str, fault: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        count = f"{len(names)} tensors are" if len(names) > 1 else "a tensor is"
        raise WeightsError(f"{where}: {count} {fault}: {', '.join(names[:4])}{more}")


def _wanted(config: ModelConfig, table: Iterable[TensorName]) -> dict[str, Placement]:
    """Return the placement of every tensor that the checkpoint must have."""
    shapes = weight_shapes(config)
    if config.tie_word_embeddings:
        del shapes["lm_head"]
    rows = _parts(config)
    placements: dict[str, Placement] = {}
    for template in table:
        layers = range(config.num_layers) if "{i}" in template.checkpoint else (0,)
        for layer in layers:
            name, target = (text.replace("{i}", str(layer)) for text in template[:2])
            if target not in shapes:
                continue
            start, count = rows.get(template.part, (0, shapes[target][0]))
            shape = (count, *shapes[target][1:])
            placements[name] = Placement(name, target, start, shape, template.part in ("q", "k"))
    return placements


def _parts(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the first row and the number of rows of each part of a fused weight."""
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    f = config.intermediate_size
    return {"q": (0, q), "k": (q, k), "v": (q + k, k), "gate": (0, f), "up": (f, f)}
