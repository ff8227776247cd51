"""Load a model's weights in three steps: plan, allocate, fill.

The plan maps each fused weight to parts of checkpoint tensors. A weight is allocated once, on its
device, and filled in slabs of rows that `TensorReader` casts to its dtype, on CUDA through small
pinned buffers. Neither the model nor a large tensor is ever in memory twice. Weights to be
quantized are filled in the model's dtype first, one at a time.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine import threads
from engine.config import ModelConfig
from engine.device import CPU, Device
from engine.dtypes import np_dtype
from engine.errors import WeightsError
from engine.kernels._cpu import compiled
from engine.kernels._cpu.panels import panel_min_bits
from engine.loading.dummy import dummy_weights
from engine.loading.stored_weights import StoredWeights, stored_formats
from engine.loading.tensor_reader import TensorReader, rows_of
from engine.loading.weight_memory import (
    is_expert,
    quantized_formats,
    weight_bytes,
    weight_dtype,
    weight_room,
)
from engine.loading.weight_table import Placement, shard_axis, weight_shapes
from engine.models.mtp_family import MtpFamily
from engine.weights import WHOLE, Format, Shard, Weight, unpack_weight
from engine.weights.panels import panel_format
from engine.weights.quantize import quantize

__all__ = [
    "dummy_weights",
    "held_formats",
    "load_weights",
    "rounded",
    "weight_bytes",
    "weight_shapes",
]

_SLAB_BYTES = 16 << 20
"""Bytes per slab: large enough to saturate the bus, small enough for the pinned buffers."""

_MAX_WORKERS = 8

Array = np.ndarray[Any, Any]


def load_weights(
    source: str | PathLike[str],
    config: ModelConfig,
    *,
    device: Device = CPU,
    dtype: str = "float32",
    quantization: Format | None = None,
    keeps_formats: bool = False,
    deterministic: bool = False,
    shard: Shard = WHOLE,
    max_model_len: int = 0,
    mtp: MtpFamily | None = None,
    progress: bool = False,
) -> dict[str, Weight]:
    """Load the weights of a whole model or of one shard.

    Parameters
    ----------
    source : str or path
        A directory with safetensors, or a .gguf file.
    config : ModelConfig
        Configuration that the checkpoint must match.
    device : Device
        Device of the weights: NumPy arrays on the CPU, CuPy arrays on CUDA.
    dtype : str
        "float32", "float16" or "bfloat16"; tensors in other dtypes are cast.
    quantization : Format, optional
        Quantize the layers' matrices to this format, one of `weights.quantize.QUANTIZABLE`; see
        `weight_memory.quantized_formats` for the output layer.
    keeps_formats : bool
        Keep quantized matrices of layers and the output layer in their stored formats instead of
        dequantizing them.
    deterministic : bool
        The products must be batch-invariant; on the CPU only dense matrices have such products.
    shard : Shard
        Shard to load; the rest of the file is not read. A vocabulary that cannot be divided evenly
        is padded with zero rows.
    max_model_len : int
        Also reserve memory for the rope tables of sequences of this length.
    mtp : MtpFamily, optional
        Declaration of the MTP layer that the config's last layer is.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    dict of str to Weight
        Weights with the names and shapes of `weight_shapes(config, shard)`. Tied embeddings are one
        weight under two names. Rows of q and k are in half-split rope order, whatever the file's.

    Raises
    ------
    WeightsError
        If a file is damaged, or a tensor is missing, unexpected, or has the wrong shape.
    ConfigError
        If the model cannot be divided into this many shards.
    OutOfMemoryError
        If the weights do not fit on the device.
    """
    reader = TensorReader(Path(source), config, mtp)
    placements = reader.placements(shard)
    formats: dict[str, Format] = {}
    if quantization is not None:
        formats = quantized_formats(config, quantization, shard)
    elif keeps_formats:
        is_tied = config.tie_word_embeddings and shard.stage.is_last
        keeps = _keeps(device, dtype, deterministic=deterministic)
        formats = stored_formats(reader, placements, keeps, is_tied=is_tied)
        if config.v_head_dim:  # rows between the heads of v are in no tensor
            formats = {name: form for name, form in formats.items() if not name.endswith(".qkv")}
    plan = _Plan.of(config, shard, dtype, placements, formats)
    device.activate()
    shapes = weight_shapes(config, shard)
    sizes = _held(formats, shapes, device, dtype, is_rounded=quantization is not None)
    with weight_room(
        config, device, dtype, shard=shard, max_model_len=max_model_len, formats=sizes
    ):
        arrays = plan.allocate(device, [name for name in plan.shapes if name not in formats])
    weights = {name: Weight.dense(array) for name, array in arrays.items()}
    stored = StoredWeights(reader, device, dtype)
    with _filler(reader, device, plan, progress) as fill:
        fill(arrays)
        for name, form in formats.items():
            target = plan.target(name)
            if quantization is None:
                weights[name] = stored.build(plan.parts[target], plan.shapes[target])
            elif target in arrays:
                weights[name] = _rounded(name, arrays[target], form, device, dtype)
            else:
                one = plan.allocate(device, [name])
                fill(one)
                weights[name] = _rounded(name, one.pop(name), form, device, dtype)
    _divide_threads(weights)
    return plan.finished(weights)


def _rounded(name: str, array: Any, form: Format, device: Device, dtype: str) -> Weight:
    """Quantize weight `name`. See `rounded`."""
    try:
        return rounded(array, form, device, dtype)
    except WeightsError as error:
        raise WeightsError(f"{name} cannot be rounded to {form.name}: {error}") from error


def _divide_threads(weights: Mapping[str, Weight]) -> None:
    """Give the C kernels' threads to a model whose products they compute.

    Experts are dense on the CPU: BLAS multiplies them.
    """
    has_panels = any(
        part.panels is not None for weight in weights.values() for part in (weight, *weight.parts)
    )
    if has_panels and compiled.kernels() is not None and not any(map(is_expert, weights)):
        threads.take_from_blas()


@dataclass(frozen=True)
class _Plan:
    """Load plan: a shard's weights, and the tensor rows that fill them.

    Attributes
    ----------
    dtype : str
        Dtype of unquantized weights.
    shapes : dict of str to tuple of int
        Shapes by weight name, without a tied output layer.
    parts : dict of str to list of Placement
        Placements by weight name, in checkpoint order.
    formats : mapping of str to Format
        Formats of the quantized weights by name, possibly including a tied output layer.
    """

    config: ModelConfig
    shard: Shard
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, list[Placement]]
    formats: Mapping[str, Format]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        shard: Shard,
        dtype: str,
        placements: Iterable[Placement],
        formats: Mapping[str, Format],
    ) -> _Plan:
        shapes = weight_shapes(config, shard)
        if config.tie_word_embeddings:
            shapes.pop("lm_head", None)
        parts: dict[str, list[Placement]] = {name: [] for name in shapes}
        for place in placements:
            parts[str(place.target)].append(place)
        return cls(config, shard, dtype, shapes, parts, formats)

    def target(self, name: str) -> str:
        """Return the planned weight that provides `name`: the embedding for a tied output layer."""
        return "embed" if name == "lm_head" and self.config.tie_word_embeddings else name

    def allocate(self, device: Device, names: Iterable[str]) -> dict[str, Any]:
        """Return dense arrays, uninitialised except for what no tensor fills."""
        arrays = {
            name: device.xp.empty(self.shapes[name], np_dtype(weight_dtype(name, self.dtype)))
            for name in names
        }
        if device.is_cuda:
            # SAFETY: a kernel on another stream may still use this memory, just freed to the pool.
            device.xp.cuda.runtime.deviceSynchronize()
        if not self.config.norm_weight:
            for name in (name for name in arrays if name.endswith("norm")):
                arrays[name][...] = arrays[name].dtype.type(1)
        for name in filter(self._has_empty_rows, arrays):
            arrays[name].view(f"u{arrays[name].itemsize}").fill(0)
        first, last, rows = self.shard.cut_padded(self.config.vocab_size)
        for name in ("embed", "lm_head", "lm_head_bias"):
            if name in arrays and last - first < rows:
                padding = arrays[name][last - first :]
                padding.view(f"u{padding.itemsize}").fill(0)
        if device.is_cuda:
            # SAFETY: slabs are copied on other streams, some to rows that have just been filled.
            device.xp.cuda.get_current_stream().synchronize()
        return arrays

    def _has_empty_rows(self, name: str) -> bool:
        """Tell whether tensors may leave out rows: a gate's biases, the width of narrow values."""
        is_narrow = bool(self.config.v_head_dim)
        if name.endswith(".qkv_bias"):
            return is_narrow or bool(self.config.attn_gate)
        return is_narrow and name.endswith(".qkv")

    def finished(self, weights: dict[str, Weight]) -> dict[str, Weight]:
        """Return the weights tagged with their shard, and a tied weight under both names."""
        shard = self.shard
        if not shard.is_whole:
            divided = {"by_output": shard.by_output, "expert_parallel": shard.expert_parallel}
            weights = {
                name: replace(
                    weight, shard=shard, axis=shard_axis(name.rpartition(".")[2], **divided)
                )
                for name, weight in weights.items()
            }
        if self.config.tie_word_embeddings and shard.stage.is_last:
            weights.setdefault("lm_head", weights["embed"])
        return weights


def _keeps(device: Device, dtype: str, *, deterministic: bool) -> Callable[[str, Format], bool]:
    """Return a predicate (name, format): whether a product reads the weight as stored.

    On the CPU packed matrices are laid out as panels, for float32 activations. Without C kernels
    for one thread only: several threads of BLAS read dense matrices faster than NumPy widens panels
    on one.
    """
    if _has_all_kernels(device, dtype):
        return lambda name, form: True
    has_panels = not (device.is_cuda or deterministic) and dtype == "float32"
    has_panels = has_panels and (compiled.kernels() is not None or threads.count() == 1)
    return lambda name, form: not is_expert(name) and (bool(form.activations) or has_panels)


def held_formats(
    config: ModelConfig, form: Format, device: Device, dtype: str, *, is_rounded: bool
) -> dict[str, Format]:
    """Return the format in which a device holds each weight of a quantized model.

    A weight that is held dense has none.

    Parameters
    ----------
    form : Format
        Format of the layers' matrices. See `quantized_formats`.
    is_rounded : bool
        Whether loading rounds to `form`: it is not the format of the files.
    """
    formats = quantized_formats(config, form)
    if not is_rounded:
        keeps = _keeps(device, dtype, deterministic=False)
        formats = {name: each for name, each in formats.items() if keeps(name, each)}
    return _held(formats, weight_shapes(config), device, dtype, is_rounded=is_rounded)


def _held(
    formats: Mapping[str, Format],
    shapes: Mapping[str, tuple[int, ...]],
    device: Device,
    dtype: str,
    *,
    is_rounded: bool,
) -> dict[str, Format]:
    """Return the formats that have the size of the loaded weights; those of dense ones go."""
    if _has_all_kernels(device, dtype):
        return dict(formats)
    if is_rounded:
        return {n: form for n, form in formats.items() if not (form.is_packed or is_expert(n))}
    return {
        name: panel_format(form, panel_min_bits())
        for name, form in formats.items()
        if not form.is_packed or shapes[name][-1] % form.group == 0
    }


def _has_all_kernels(device: Device, dtype: str) -> bool:
    """Tell whether kernels exist for packed weights and quantized experts.

    They need 16-bit activations.
    """
    return device.is_cuda and dtype != "float32"


def rounded(array: Any, form: Format, device: Device, dtype: str) -> Weight:
    """Quantize a matrix; if no kernel supports the format, return the rounded values dense."""
    weight = quantize(array, form)
    if (form.is_packed or array.ndim > 2) and not _has_all_kernels(device, dtype):
        return Weight.dense(unpack_weight(weight).astype(array.dtype))
    return weight


def _slabs(place: Placement) -> Iterator[Placement]:
    """Cut a placement into slabs of rows that never split a rotated head."""
    multiple = math.lcm(1024, 1 if place.rotated is None else place.rotated.period)
    is_vector = len(place.shape) == 1
    step = place.last if is_vector else rows_of(_SLAB_BYTES // 4, place.width, multiple)
    for first in range(place.first, place.last, max(1, step)):
        start = place.start + first - place.first
        yield replace(place, first=first, last=min(place.last, first + step), start=start)


@contextmanager
def _filler(
    reader: TensorReader, device: Device, plan: _Plan, progress: bool
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that fills arrays (by weight name) from the checkpoint.

    Slabs are copied in parallel; after a failure, no new slab is started.
    """
    itemsize = np_dtype(plan.dtype).itemsize
    total = sum(place.size for places in plan.parts.values() for place in places)
    copy = _SlabCopy(reader, device)

    def fill(arrays: Mapping[str, Any]) -> None:
        slabs = [
            slab
            for name, places in plan.parts.items()
            if name in arrays
            for place in places
            for slab in _slabs(place)
        ]
        futures = [pool.submit(copy, arrays[str(slab.target)], slab) for slab in slabs]
        try:
            for slab, future in zip(slabs, futures, strict=True):
                future.result()
                advance(slab.size * itemsize)
        finally:
            for future in futures:
                future.cancel()

    bar = _progress_bar(total * itemsize, progress)
    with bar as advance, ThreadPoolExecutor(_workers()) as pool:
        yield fill


class _SlabCopy:
    """Copier of tensor slabs into arrays; thread-safe."""

    def __init__(self, reader: TensorReader, device: Device) -> None:
        self._reader = reader
        self._device = device
        self._local = threading.local()

    def __call__(self, array: Any, slab: Placement) -> None:
        """Copy a slab into its rows of `array`."""
        if array.ndim > 1:  # rows are numbered across all experts
            array = array.reshape(-1, slab.width)
        rows = array[slab.start : slab.start + slab.num_rows]
        if not self._device.is_cuda:
            self._reader.read_into(rows, slab)
            return
        buffer, stream = self._staging(rows.nbytes)
        host = buffer[: rows.nbytes].view(rows.dtype).reshape(rows.shape)
        self._reader.read_into(host, slab)
        rows.set(host, stream=stream)
        stream.synchronize()  # the next slab overwrites the buffer

    def _staging(self, num_bytes: int) -> tuple[Array, Any]:
        """Return this thread's pinned buffer (at least `num_bytes` bytes) and stream."""
        cp = self._device.xp
        if not hasattr(self._local, "stream"):
            self._device.activate()
            self._local.stream = cp.cuda.Stream(non_blocking=True)
            self._local.buffer = np.empty(0, np.uint8)
        if len(self._local.buffer) < num_bytes:
            pinned = cp.cuda.alloc_pinned_memory(num_bytes)
            self._local.buffer = np.frombuffer(pinned, np.uint8, num_bytes)
        buffer: Array = self._local.buffer
        return buffer, self._local.stream


def _workers() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(_MAX_WORKERS, cores)


@contextmanager
def _progress_bar(total: int, progress: bool) -> Iterator[Callable[[int], Any]]:
    """Yield a function that advances the progress bar, if shown, by a number of bytes."""
    if not (progress and sys.stderr.isatty()):
        yield lambda num_bytes: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights") as bar:
        yield bar.update
