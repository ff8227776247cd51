"""`TensorReader`: read checkpoint rows, converted to the fused weights' row order and values."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.device import array_module
from engine.dtypes import BFLOAT16, np_dtype
from engine.errors import WeightsError
from engine.loading.array_tensors import ArrayTensors
from engine.loading.classifier import HEAD, is_classifier
from engine.loading.gguf import GgufFile
from engine.loading.quantized.fused_experts import name_fused_experts
from engine.loading.quantized.mxfp4 import dequantize_mxfp4, read_mxfp4_experts
from engine.loading.quantized.reader import QuantizedCheckpoint
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.scheme import load_scheme
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile
from engine.loading.text_model import open_model
from engine.loading.weight_table import Placement, RotatedRows, place_tensors
from engine.model_files import is_present
from engine.models.mtp_family import MtpFamily
from engine.models.registry import family
from engine.models.tensor_layout import ROWS, scales_name
from engine.weights import FORMATS, Format, Shard

__all__ = ["TensorReader", "half_split", "rows_of"]

_STEP_WEIGHTS = 1 << 18
"""Weights cast at a time; the intermediates stay in cache."""

_BLOCK = 32  # columns per MXFP4 scale

Array = np.ndarray[Any, Any]


class TensorReader:
    """Reader of a checkpoint's tensors into host memory; thread-safe.

    Rows of q and k are always returned in half-split rope order, and Gemma's norms without the 1
    that .gguf files add.

    Parameters
    ----------
    source : Path or ArrayTensors
        A directory with safetensors, a .gguf file, or arrays with the names of a Hugging Face
        checkpoint.
    config : ModelConfig
    mtp : MtpFamily, optional
        Declaration of the MTP layer that the config's last layer is.
    """

    def __init__(
        self, source: Path | ArrayTensors, config: ModelConfig, mtp: MtpFamily | None = None
    ) -> None:
        kind = family(config.model_type)
        is_gguf = isinstance(source, Path) and source.suffix == ".gguf"
        if isinstance(source, ArrayTensors):
            tensors: Any = source  # read as unquantized safetensors are
            self.checkpoint = QuantizedCheckpoint(tensors)
        elif is_gguf:
            self.checkpoint = QuantizedCheckpoint(GgufFile(source))
        else:
            scheme = load_scheme(source) if is_present(source / "config.json") else None
            checkpoint = open_model(source)
            if scheme is not None:
                name_fused_experts(checkpoint)
            self.checkpoint = QuantizedCheckpoint(checkpoint, scheme)
        self._config = config
        self._skipped: tuple[str, ...] = ()  # beginnings of names
        if isinstance(source, Path) and is_classifier(source):
            self._skipped = (HEAD,)
        if mtp is not None:
            self._skipped += _as_last_layer(self.checkpoint.checkpoint, mtp, config.num_layers - 1)
        self._names = kind.gguf_names if is_gguf else kind.names
        self.is_interleaved = kind.gguf_interleaved_rope if is_gguf else config.interleaved_rope
        self._norm_offset = config.norm_weight_offset if is_gguf else 0.0

    def placements(
        self, shard: Shard, *, is_partial: bool = False, undivided: Container[str] = ()
    ) -> list[Placement]:
        """Return the parts of tensors that a shard needs, in checkpoint order.

        `is_partial`: tensors may be missing; of a weight in `undivided` all or none.

        Raises
        ------
        WeightsError
            If a tensor is missing, unexpected, or has the wrong shape.
        """
        found = {name: self.checkpoint.shape(name) for name in self.checkpoint.names()}
        where = str(self.checkpoint.path)
        self._refuse_transposed_codes(found)

        def is_spare(name: str) -> bool:
            # Old GPTQ writers add a bias of zeros to every matrix.
            return name.startswith(self._skipped) or self.checkpoint.is_spare_bias(name)

        places = place_tensors(
            where,
            self._config,
            self._names,
            found,
            shard,
            is_spare=is_spare,
            is_partial=is_partial,
            undivided=undivided,
        )
        is_tied = self._config.tie_word_embeddings
        return [p for p in places if shard.stage.has(str(p.target), is_tied=is_tied)]

    def _refuse_transposed_codes(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse quantized matrices of modules whose weights are stored transposed (GPT-2).

        Writers differ in whether codes are transposed as well.
        """
        if self.checkpoint.scheme is None:
            return
        transposed = {
            name
            for one in self._names
            if one.layout.transposed
            for name, _, _ in one.expand(self._config.num_layers)
        }
        for name, shape in found.items():
            if len(shape) > 2 or name not in transposed:  # experts may have either orientation
                continue
            if (form := self.checkpoint.format_of(name)) is not None:
                raise WeightsError(
                    f"{self.checkpoint.path}: tensor {name!r} must not be quantized, since "
                    f"{self._config.model_type} stores it transposed; got {form.name}. Load an "
                    "unquantized model, and quantize it then (quantization=)"
                )

    def read_into(self, out: Array, place: Placement) -> None:
        """Write the rows of `place` to `out`, in the dtype of `out`.

        Raises
        ------
        WeightsError
            If `out` is float16 and a value does not fit.
        """
        # Whole heads: rows are reordered within a head.
        multiple = 1 if place.rotated is None else place.rotated.period
        if len(place.shape) == 1:
            multiple = math.lcm(4096, multiple)
        step = rows_of(_STEP_WEIGHTS, place.width, multiple)
        for first in range(place.first, place.last, step):
            last = min(place.last, first + step)
            rows = self._read(place, first, last)
            if self.is_interleaved and place.rotated is not None:
                rows = half_split(rows, place.rotated)
            if self._norm_offset and place.target.kind.endswith("norm"):
                rows = rows.astype(np.float32) - np.float32(self._norm_offset)
            if place.factor != 1.0:
                rows = rows.astype(np.float32) * np.float32(place.factor)
            part = out[first - place.first : last - place.first]
            _cast_into(part, rows.reshape(part.shape))
            if part.dtype == np.float16:
                self.check_finite(place, part)

    def check_finite(self, place: Placement, rows: Any) -> None:
        """Refuse rows of `place`, a NumPy or CuPy array of float16, that are not all finite."""
        if not array_module(rows).isfinite(rows).all():
            raise WeightsError(
                f"{self.checkpoint.path}: tensor {place.name!r} must have finite values up to "
                "65504 for dtype float16; it has others. Use bfloat16 or float32"
            )

    def dense_rows(self, place: Placement, dtype: str) -> Array:
        """Return the rows of `place` in `dtype`."""
        rows = np.empty((place.num_rows, place.width), np_dtype(dtype))
        self.read_into(rows, place)
        return rows

    def stored_format(self, place: Placement) -> Format | None:
        """Return the stored format of the tensor of `place`; None if not quantized.

        Raises
        ------
        WeightsError
            If it is quantized, and its values have a factor.
        """
        if place.layout.mxfp4 and not isinstance(self.checkpoint.checkpoint, GgufFile):
            return FORMATS["mxfp4"]
        if place.layout.transposed:
            return None
        form = self.checkpoint.format_of(place.name)
        if form is not None and place.factor != 1.0:
            raise WeightsError(
                f"{self.checkpoint.path}: tensor {place.name!r} must not be quantized, since "
                f"config.json multiplies it; got {form.name}"
            )
        return form

    def stored_rows(self, place: Placement) -> QuantizedRows | None:
        """Return the rows of `place` in their stored format; None if not quantized."""
        rows = self._stored_rows(place)
        if rows is None or not self.is_interleaved or place.rotated is None:
            return rows
        return rows.take(half_split(np.arange(place.num_rows), place.rotated))

    def _stored_rows(self, place: Placement) -> QuantizedRows | None:
        if place.layout == ROWS:
            return self.checkpoint.read_rows(place.name, place.first, place.last, place.columns)
        if self.stored_format(place) is None:
            return None
        expert, num_rows, own = _rows_of_expert(place, place.first, place.last)
        rows = slice(expert * num_rows + own.start, expert * num_rows + own.stop, own.step)
        file = self.checkpoint.checkpoint
        if not isinstance(file, GgufFile):
            return read_mxfp4_experts(file, place.name, rows, place.columns)
        found = self.checkpoint.read_rows(place.name, rows.start, rows.stop, place.columns)
        return None if found is None else found.take(slice(None, None, rows.step))

    def _read(self, place: Placement, first: int, last: int) -> Array:
        """Return rows [first, last) of a tensor in file order, possibly as a view of the file."""
        if place.layout == ROWS:
            return self.checkpoint.read(place.name, first, last, place.columns)
        file = self.checkpoint.checkpoint
        shape = place.shape
        expert, num_rows, own = _rows_of_expert(place, first, last)
        if place.layout.transposed:
            num_columns = shape[1] if len(shape) > 2 else 1
            begin, end = place.columns or (0, num_columns)
            offset = expert * num_columns
            stored = file.read(place.name, offset + begin, offset + end, (own.start, own.stop))
            matrix: Array = stored[:, :: own.step].T
            return matrix
        rows = slice(expert * num_rows + own.start, expert * num_rows + own.stop, own.step)
        if place.layout.mxfp4 and not isinstance(file, GgufFile):  # GgufFile.read dequantizes
            return _mxfp4_rows(file, place, rows)
        return file.read(place.name, rows.start, rows.stop, place.columns)[:: own.step]


def _as_last_layer(checkpoint: Any, mtp: MtpFamily, n: int) -> tuple[str, ...]:
    """Rename the tensors of an MTP layer to those of layer `n`; return the head's other modules."""
    prefix = mtp.layer.format(n=n)
    layer = f"model.layers.{n}."

    def renamed(name: str) -> str:
        if not name.startswith(prefix):
            return name
        own = name.removeprefix(prefix)
        module = next((one for one in mtp.modules if own.startswith(f"{one}.")), "")
        return layer + mtp.modules.get(module, "") + own.removeprefix(module)

    checkpoint.rename(renamed)
    modules = (mtp.proj, mtp.embed_norm, mtp.hidden_norm, mtp.final_norm, *mtp.repeated)
    return tuple(renamed(f"{module.format(n=n)}.") for module in modules)


def rows_of(weights: int, width: int, multiple: int) -> int:
    """Return the number of rows, a multiple of `multiple`, that hold about `weights` weights."""
    return max(1, weights // width // multiple) * multiple


def half_split(rows: Array, rotated: RotatedRows) -> Array:
    """Reorder the rotated rows, or columns, of each head from interleaved pairs to two halves."""
    order = array_module(rows).arange(rotated.period)
    turned = order[rotated.first : rotated.first + rotated.count]
    turned[:] = turned.reshape(-1, 2).T.reshape(-1)
    rest = () if rotated.in_columns else rows.shape[1:]
    heads = rows.reshape(-1, rotated.period, *rest)
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


def _rows_of_expert(place: Placement, first: int, last: int) -> tuple[int, int, slice]:
    """Return the expert that holds rows [first, last), its row count, and the slice within it."""
    layout = place.layout
    shape = place.shape
    num_rows = shape[-1] if layout.transposed else shape[1]
    expert, row = divmod(first, num_rows)
    start = row
    step = 1
    if layout.interleaved:
        is_up, row = divmod(row, num_rows // 2)
        start = 2 * row + is_up
        step = 2
    return expert, num_rows, slice(start, start + (last - first - 1) * step + 1, step)


def _mxfp4_rows(
    checkpoint: SafetensorsFile | SafetensorsDirectory, place: Placement, rows: slice
) -> Array:
    """Dequantize rows of the tensor to float32, reading only blocks that contain wanted columns."""
    begin, end = place.columns or (0, place.shape[2] * _BLOCK)
    first = begin // _BLOCK
    last = -(-end // _BLOCK)
    blocks = checkpoint.read_bytes(place.name, rows.start, rows.stop)
    scales = checkpoint.read_bytes(scales_name(place.name), rows.start, rows.stop)
    values = dequantize_mxfp4(blocks[:: rows.step, first:last], scales[:: rows.step, first:last])
    wanted: Array = values[:, begin - first * _BLOCK : end - first * _BLOCK]
    return wanted
