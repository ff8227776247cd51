"""Loads checkpoint tensors into the model's fused weights, in slabs of rows.

Every fused array is allocated once, on the target device, and filled slab by slab: a reader
returns some rows (a view of the mapped file, or newly dequantized), which are cast into place; on
CUDA they are copied through small pinned buffers. Neither the model nor a large tensor is ever in
memory twice. A weight that is quantized is filled in the model's dtype first, one weight at a time.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import CPU, Device
from engine.dtypes import BFLOAT16, np_dtype
from engine.errors import WeightsError
from engine.loading.dummy import dummy_weights
from engine.loading.expert_rows import read_expert_rows
from engine.loading.gguf import GgufFile
from engine.loading.placement import Placement
from engine.loading.quantized.reader import QuantizedCheckpoint
from engine.loading.quantized.scheme import load_scheme
from engine.loading.safetensors import open_safetensors
from engine.loading.stored_weights import StoredWeights, stored_formats
from engine.loading.weight_memory import (
    is_expert,
    quantized_formats,
    weight_bytes,
    weight_dtype,
    weight_room,
)
from engine.loading.weight_table import place_tensors, shard_axis, weight_shapes
from engine.model_files import is_present
from engine.models.registry import family
from engine.models.tensor_layout import ROWS
from engine.weights import WHOLE, Format, Shard, Weight, unpack_weight
from engine.weights.quantize import quantize

__all__ = ["dummy_weights", "half_split", "load_weights", "weight_bytes", "weight_shapes"]

_SLAB_BYTES = 16 << 20
"""Weights per slab: enough to saturate the bus, few enough for small pinned buffers."""

_STEP_WEIGHTS = 1 << 18
"""Weights cast at a time within a slab, so that intermediates stay in the cache."""

_MAX_WORKERS = 8

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Work:
    """Rows [first, last) of a placement's tensor, to be written to rows of a weight."""

    place: Placement
    first: int
    last: int


def load_weights(
    source: str | PathLike[str],
    config: ModelConfig,
    *,
    device: Device = CPU,
    dtype: str = "float32",
    quantization: Format | None = None,
    keeps_formats: bool = False,
    shard: Shard = WHOLE,
    max_model_len: int = 0,
    progress: bool = False,
) -> dict[str, Weight]:
    """Load the weights of a model, or of one shard of it.

    Parameters
    ----------
    source : str or path
        A directory with safetensors, or a .gguf file.
    config : ModelConfig
        The configuration that the checkpoint must match.
    device : Device
        Where the arrays live: NumPy arrays on the CPU, CuPy arrays on CUDA.
    dtype : str
        "float32", "float16" or "bfloat16"; tensors in other dtypes are cast.
    quantization : Format, optional
        Quantize the matrices of layers to this format, one of `quantization.quantize.QUANTIZABLE`,
        and perhaps the output layer (`weight_memory.quantized_formats`).
    keeps_formats : bool
        Keep the matrices of layers, and of the output layer, in the formats of the file, if these
        are quantized. Otherwise they are dequantized.
    shard : Shard
        Which part to load; the rest of the file is not read. A vocabulary that cannot be divided
        evenly is padded with rows of zeros.
    max_model_len : int
        Leave room for the rope tables of sequences of this length.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    dict of str to Weight
        The names and shapes of `weight_shapes(config, shard)`. Tied embeddings are one weight under
        two names. Rows of q and k are in half-split rope order, whatever their order in the file.

    Raises
    ------
    WeightsError
        If a file is damaged, or a tensor is missing, unexpected, or has the wrong shape.
    ConfigError
        If the model cannot be divided into this many shards.
    OutOfMemoryError
        If the device does not have room for the weights.
    """
    checkpoint, placements = _plan(Path(source), config, shard)
    device.activate()
    formats = {}
    if keeps_formats:
        is_tied = config.tie_word_embeddings and shard.stage.is_last
        formats = stored_formats(checkpoint, placements, _keeps(device, dtype), is_tied=is_tied)
    if quantization is not None:
        formats = quantized_formats(config, quantization, shard)
    with weight_room(
        config, device, dtype, shard=shard, max_model_len=max_model_len, formats=formats
    ):
        arrays = _allocate(config, device, dtype, shard, formats)
    loader = _Loader(checkpoint, config, arrays, device, dtype)
    weights = {name: Weight.dense(array) for name, array in arrays.items()}
    shapes = weight_shapes(config, shard)
    works = list(_slabs(placements, config.head_dim))
    rounded = partial(_rounded, has_all_kernels=_has_all_kernels(device, dtype))
    with _progress_bar(works, dtype, progress) as advance, ThreadPoolExecutor(_workers()) as pool:
        run = partial(_run_all, pool, loader, advance)
        run([work for work in works if str(work.place.target) in arrays])
        for name, own in _by_target(works).items():
            if name in arrays:
                continue
            if quantization is None:
                places = list(dict.fromkeys(work.place for work in own))
                weights[name] = loader.stored_weight(places, shapes[name])
            else:
                arrays[name] = _empty(device, name, shapes[name], dtype, config, shard)
                run(own)
                weights[name] = rounded(arrays.pop(name), formats[name])
    if config.tie_word_embeddings and "lm_head" in formats:  # embed is looked up in, as numbers
        tied = [place for place in placements if place.target.kind == "embed"]
        if quantization is None:
            weights["lm_head"] = loader.stored_weight(tied, shapes["embed"])
        else:
            weights["lm_head"] = rounded(arrays["embed"], formats["lm_head"])
    return _finished(config, weights, shard)


def _keeps(device: Device, dtype: str) -> Callable[[str, Format], bool]:
    """Return whether a weight's format is computed with as it is."""
    has_all = _has_all_kernels(device, dtype)
    return lambda name, form: has_all or (bool(form.activations) and not is_expert(name))


def _has_all_kernels(device: Device, dtype: str) -> bool:
    """Tell whether there are kernels for packed weights and for quantized experts.

    They multiply 16-bit activations. NumPy would unpack such a weight for every product.
    """
    return device.is_cuda and dtype != "float32"


def _rounded(array: Any, form: Format, *, has_all_kernels: bool) -> Weight:
    """Quantize a matrix; where its format is not computed with, return the rounded numbers."""
    weight = quantize(array, form)
    if (form.is_packed or array.ndim > 2) and not has_all_kernels:
        return Weight.dense(unpack_weight(weight).astype(array.dtype))
    return weight


def _finished(config: ModelConfig, weights: dict[str, Weight], shard: Shard) -> dict[str, Weight]:
    """Return the weights with what they are shards of, and the tied one under its second name."""
    if not shard.is_whole:
        axis_of = partial(
            shard_axis, by_output=shard.by_output, expert_parallel=shard.expert_parallel
        )
        weights = {
            name: replace(weight, shard=shard, axis=axis_of(name.rpartition(".")[2]))
            for name, weight in weights.items()
        }
    if config.tie_word_embeddings and shard.stage.is_last:
        weights.setdefault("lm_head", weights["embed"])
    return weights


def _run_all(
    pool: ThreadPoolExecutor, loader: _Loader, advance: Callable[[_Work], Any], works: list[_Work]
) -> None:
    """Load slabs, several at a time; after a failure no other one begins."""
    futures = [pool.submit(loader.run, work) for work in works]
    try:
        for work, future in zip(works, futures, strict=True):
            future.result()
            advance(work)
    finally:
        for future in futures:
            future.cancel()


def _by_target(works: list[_Work]) -> dict[str, list[_Work]]:
    """Return the slabs of each weight."""
    grouped: dict[str, list[_Work]] = {}
    for work in works:
        grouped.setdefault(str(work.place.target), []).append(work)
    return grouped


def _plan(
    source: Path, config: ModelConfig, shard: Shard
) -> tuple[QuantizedCheckpoint, list[Placement]]:
    """Open the checkpoint and place its tensors in the model's weights."""
    kind = family(config.model_type)
    if source.suffix == ".gguf":
        checkpoint = QuantizedCheckpoint(GgufFile(source))
        table = kind.gguf_names
    else:
        scheme = load_scheme(source) if is_present(source / "config.json") else None
        checkpoint = QuantizedCheckpoint(open_safetensors(source), scheme)
        table = kind.names
    found = {name: checkpoint.shape(name) for name in checkpoint.names()}
    # Old GPTQ writers add a bias of zeros to every matrix.
    is_spare = checkpoint.is_spare_bias
    where = str(checkpoint.path)
    places = place_tensors(where, config, table, found, shard, is_spare=is_spare)
    has = shard.stage.has
    is_tied = config.tie_word_embeddings
    return checkpoint, [place for place in places if has(str(place.target), is_tied=is_tied)]


def _allocate(
    config: ModelConfig,
    device: Device,
    dtype: str,
    shard: Shard,
    formats: Mapping[str, Format],
) -> dict[str, Any]:
    """Return the dense fused arrays, uninitialised apart from padding."""
    shapes = weight_shapes(config, shard)
    if config.tie_word_embeddings:
        shapes.pop("lm_head", None)
    arrays = {
        name: device.xp.empty(shape, np_dtype(weight_dtype(name, dtype)))
        for name, shape in shapes.items()
        if name not in formats
    }
    _synchronize(device)
    for name in ("embed", "lm_head", "lm_head_bias"):
        if name in arrays:
            _pad_vocabulary(arrays[name], config, shard)
    return arrays


def _pad_vocabulary(array: Any, config: ModelConfig, shard: Shard) -> None:
    """Write zeros to the rows of a shard that are behind the vocabulary."""
    first, last, rows = shard.cut_padded(config.vocab_size)
    if last - first < rows:
        array[last - first :].view(f"u{array.itemsize}").fill(0)


def _empty(
    device: Device, name: str, shape: tuple[int, ...], dtype: str, config: ModelConfig, shard: Shard
) -> Any:
    """Return the array of one weight, uninitialised apart from padding."""
    array = device.xp.empty(shape, np_dtype(dtype))
    _synchronize(device)
    if name == "lm_head":
        _pad_vocabulary(array, config, shard)
    return array


def _synchronize(device: Device) -> None:
    """Wait for the device.

    SAFETY: a kernel on another stream may still use newly allocated memory, if it was just freed.
    """
    if device.is_cuda:
        device.xp.cuda.runtime.deviceSynchronize()


def _slabs(placements: list[Placement], head_dim: int) -> Iterator[_Work]:
    """Cut every tensor into slabs of rows, whole heads at a time."""
    multiple = math.lcm(1024, head_dim)
    for place in placements:
        is_vector = len(place.shape) == 1
        step = place.last if is_vector else _rows_of(_SLAB_BYTES // 4, place.width, multiple)
        for first in range(place.first, place.last, max(1, step)):
            yield _Work(place, first, min(place.last, first + step))


def _rows_of(weights: int, width: int, multiple: int) -> int:
    """Return the number of rows with about `weights` weights, a multiple of `multiple`."""
    return max(1, weights // width // multiple) * multiple


class _Loader:
    """Fills slabs of the arrays; `run` may be called from several threads."""

    def __init__(
        self,
        checkpoint: QuantizedCheckpoint,
        config: ModelConfig,
        arrays: dict[str, Any],
        device: Device,
        dtype: str,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.arrays = arrays
        self.device = device
        self.head_dim = config.head_dim
        self.rotary_dim = config.rope.rotary_dim
        is_gguf = isinstance(checkpoint.checkpoint, GgufFile)
        kind = family(config.model_type)
        self.is_interleaved = kind.gguf_interleaved_rope if is_gguf else kind.interleaved_rope
        # A .gguf stores Gemma's norms as 1 + w.
        self.norm_offset = config.norm_weight_offset if is_gguf else 0.0
        self._local = threading.local()

    def run(self, work: _Work) -> None:
        """Load one slab."""
        place = work.place
        start = place.start - place.first
        array = self.arrays[str(place.target)]
        if array.ndim > 1:  # the matrices of experts are loaded as one below the other
            array = array.reshape(-1, place.width)
        rows = array[start + work.first : start + work.last]
        if not self.device.is_cuda:
            self._fill(rows, work)
            return
        buffer, stream = self._staging(rows.nbytes)
        host = buffer[: rows.nbytes].view(rows.dtype).reshape(rows.shape)
        self._fill(host, work)
        rows.set(host, stream=stream)
        stream.synchronize()  # the next slab overwrites the buffer

    def stored_weight(self, places: Sequence[Placement], shape: tuple[int, ...]) -> Weight:
        """Return the weight that these placements make up, in the formats of their tensors.

        Experts that cannot be multiplied as they are stored are dequantized.
        """
        made = StoredWeights(self.device, self.checkpoint, self._dense_rows, self._row_order)
        if len(shape) == 2:
            return made.weight(places)
        weight = made.experts(places, shape)
        if weight is not None:
            return weight
        rows = [self._dense_rows(place) for place in sorted(places, key=lambda p: p.start)]
        return Weight.dense(self.device.xp.concatenate(rows).reshape(shape))

    def _dense_rows(self, place: Placement) -> Any:
        rows = np.empty((place.last - place.first, place.width), np_dtype(self.dtype))
        self._fill(rows, _Work(place, place.first, place.last))
        return self.device.xp.asarray(rows)

    def _row_order(self, place: Placement) -> Array | None:
        """Return the order of rows that are stored as interleaved pairs; None if they are not."""
        if not (self.is_interleaved and place.is_rotated):
            return None
        rows = np.arange(place.last - place.first)
        return half_split(rows, self.head_dim, self.rotary_dim)

    def _staging(self, num_bytes: int) -> tuple[Array, Any]:
        """Return this thread's pinned buffer of at least `num_bytes` bytes, and its stream."""
        cp = self.device.xp
        if not hasattr(self._local, "stream"):
            self.device.activate()
            self._local.stream = cp.cuda.Stream(non_blocking=True)
            self._local.buffer = np.empty(0, np.uint8)
        if len(self._local.buffer) < num_bytes:
            pinned = cp.cuda.alloc_pinned_memory(num_bytes)
            self._local.buffer = np.frombuffer(pinned, np.uint8, num_bytes)
        buffer: Array = self._local.buffer
        return buffer, self._local.stream

    def _fill(self, out: Array, work: _Work) -> None:
        """Write the slab's rows to the host array `out`."""
        place = work.place
        is_vector = len(place.shape) == 1
        multiple = math.lcm(4096, self.head_dim) if is_vector else self.head_dim
        step = _rows_of(_STEP_WEIGHTS, place.width, multiple)
        for first in range(work.first, work.last, step):
            last = min(work.last, first + step)
            rows = self._read(place, first, last)
            if self.is_interleaved and place.is_rotated:
                rows = half_split(rows, self.head_dim, self.rotary_dim)
            if self.norm_offset and place.target.kind.endswith("norm"):
                rows = rows.astype(np.float32) - np.float32(self.norm_offset)
            part = out[first - work.first : last - work.first]
            _cast_into(part, rows)
            if part.dtype == np.float16 and not np.isfinite(part).all():
                raise WeightsError(
                    f"{self.checkpoint.path}: tensor {place.name!r} must have finite values up to "
                    "65504 for dtype float16; it has others. Use bfloat16 or float32"
                )

    def _read(self, place: Placement, first: int, last: int) -> Array:
        if place.layout == ROWS:
            return self.checkpoint.read(place.name, first, last, place.columns)
        return read_expert_rows(self.checkpoint.checkpoint, place, first, last)


def half_split(rows: Array, head_dim: int, rotary_dim: int) -> Array:
    """Reorder the rotated rows of each head, the first ones, from interleaved pairs to halves."""
    order = np.arange(head_dim)
    order[:rotary_dim] = order[:rotary_dim].reshape(-1, 2).T.reshape(-1)
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    halves: Array = heads[:, order].reshape(rows.shape)
    return halves


def _cast_into(out: Array, rows: Array) -> None:
    """Write `rows` to `out` in the dtype of `out`."""
    if rows.dtype == BFLOAT16 and out.dtype == np.float32:
        bits = out.view(np.uint32)  # exact, and several times faster than a cast
        bits[...] = rows.view(np.uint16)
        bits <<= 16
    else:
        with np.errstate(over="ignore"):  # the caller checks for infinities
            out[...] = rows


def _workers() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(_MAX_WORKERS, cores)


@contextmanager
def _progress_bar(works: list[_Work], dtype: str, progress: bool) -> Iterator[Any]:
    """Yield a function that counts a finished slab on a progress bar, if there is one."""
    if not (progress and sys.stderr.isatty()):
        yield lambda work: None
        return
    from tqdm import tqdm

    def nbytes(work: _Work) -> int:
        return (work.last - work.first) * work.place.width * np_dtype(dtype).itemsize

    total = sum(map(nbytes, works))
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights") as bar:
        yield lambda work: bar.update(nbytes(work))
