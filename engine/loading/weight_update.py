"""Writes new weights into a loaded model, in place: their addresses stay valid for CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import shown, shown_with_type
from engine.config import ModelConfig
from engine.device import Device, array_module, is_cupy_array
from engine.dtypes import np_dtype
from engine.errors import EngineError, WeightsError
from engine.loading.array_tensors import ArrayTensors
from engine.loading.tensor_reader import TensorReader, half_split
from engine.loading.weight_memory import quantized_formats, weight_dtype
from engine.loading.weight_table import Placement, weight_shapes
from engine.loading.weights import rounded
from engine.models.tensor_layout import ROWS
from engine.models.wrappers import text_name
from engine.weights import FORMATS, WHOLE, Format, Shard, Weight

__all__ = ["WeightUpdate", "open_update"]

Array = np.ndarray[Any, Any]


def open_update(
    source: str | PathLike[str] | Mapping[str, Any],
    config: ModelConfig,
    weights: Mapping[str, Weight],
    device: Device,
    quantization: str | None = None,
    shard: Shard = WHOLE,
    new_name: Callable[[str], str | None] = text_name,
) -> WeightUpdate:
    """Check new weights against a loaded model; nothing is written yet.

    Parameters
    ----------
    source : str or path, or mapping of str to array
        A folder with safetensors, or arrays by the names of a Hugging Face checkpoint
        (`ArrayTensors`). Tensors may be left out; a quantized matrix needs all of its parts.
    config : ModelConfig
        Configuration of the whole model.
    weights : mapping of str to Weight
        The loaded weights, by name.
    device : Device
    quantization : str, optional
        The `quantization` option of the load.
    shard : Shard
    new_name : callable
        Returns the name of a tensor in the text model alone; None leaves it out.

    Raises
    ------
    WeightsError
        If there is no such folder, a tensor is not the model's or has another shape, or a weight is
        stored in a format that numbers cannot be rounded to.
    """
    tensors: ArrayTensors | Path
    if isinstance(source, Mapping):
        tensors = ArrayTensors(source, new_name)
    else:
        is_path = isinstance(source, str | PathLike) and isinstance(os.fspath(source), str)
        if not is_path or not os.fspath(source):
            raise WeightsError(
                f"source must be a folder, or a mapping of arrays; got {shown_with_type(source)}"
            )
        tensors = Path(source)
    reader = TensorReader(tensors, config)
    form = FORMATS.get(quantization or "")
    formats = {} if form is None else quantized_formats(config, form, shard)
    places: dict[str, list[Placement]] = {}
    for place in reader.placements(shard, is_partial=True, undivided=formats):
        places.setdefault(str(place.target), []).append(place)
    if config.tie_word_embeddings and "lm_head" in formats and "embed" in places:
        places.setdefault("lm_head", places["embed"])  # a rounded copy
    shapes = weight_shapes(config, shard)
    update = WeightUpdate(reader, places, weights, device, formats, shapes)
    update.check()
    return update


class WeightUpdate:
    """Weights that have been checked, and wait to be written; see `open_update`."""

    def __init__(
        self,
        reader: TensorReader,
        places: Mapping[str, list[Placement]],
        weights: Mapping[str, Weight],
        device: Device,
        formats: Mapping[str, Format],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._reader = reader
        self._places = places
        self._weights = weights
        self._device = device
        self._formats = formats
        self._shapes = shapes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights that change."""
        return tuple(self._places)

    def check(self) -> None:
        """Check that every weight can be written, and its values read.

        Raises
        ------
        WeightsError
            If one cannot; the message names it.
        """
        if not self._places:
            raise WeightsError("an update must hold weights of the model; got none")
        for name in self._places:
            weight = self._weights.get(name)
            if weight is None:
                raise WeightsError(f"weight {shown(name)} is not one that the model holds")
            if name not in self._formats and not weight.format.is_dense:
                raise WeightsError(
                    f"weight {shown(name)} is stored in {weight.format.name}: only dense weights, "
                    "and those that the option `quantization` quantized, can be updated; "
                    'quantization="none" loads dense ones'
                )
        if self._dtype("") == np.float16 or self._reader.checkpoint.scheme is not None:
            for name, places in self._places.items():
                for place in places:  # reading refuses infinities, and damaged codes
                    self._values(place, self._dtype(name))

    def write(self) -> None:
        """Write the weights, after earlier work on the current stream; wait until that is done.

        Raises
        ------
        EngineError
            If they cannot be read any more: the model has some of them.
        """
        self._device.activate()
        try:
            self._write()
        except Exception as error:
            raise EngineError(
                f"{str(error) or type(error).__name__}. Some of the new weights have been written, "
                "others not: update all again, or load the model again"
            ) from error
        finally:
            if self._device.is_cuda:
                # SAFETY: the caller may now change or free the arrays, on streams of its own.
                self._device.xp.cuda.get_current_stream().synchronize()

    def _write(self) -> None:
        for name, places in self._places.items():
            weight = self._weights[name]
            if name in self._formats:
                self._write_rounded(name, weight, places)
                continue
            for place in places:
                target = self._rows_of(name, weight.data, place)
                _assign(target, self._values(place, weight.data.dtype))

    def _write_rounded(self, name: str, weight: Weight, places: Iterable[Placement]) -> None:
        """Quantize new numbers, and copy codes and scales over the old ones."""
        dtype = self._dtype(name)
        # No tensor fills the rows of a padded vocabulary, or between the heads of narrow values.
        array = self._device.xp.zeros(weight.shape, f"u{dtype.itemsize}").view(dtype)
        for place in places:
            _assign(self._rows_of(name, array, place), self._values(place, dtype))
        new = rounded(array, self._formats[name], self._device, dtype.name)
        for (_, old), (_, values) in zip(weight.arrays(), new.arrays(), strict=True):
            old[...] = values

    def _rows_of(self, name: str, array: Any, place: Placement) -> Any:
        """Return the view of a weight that a placement fills; an MLP may be padded."""
        start = place.start
        planned = self._shapes[name]
        if array.shape == planned:  # rows are numbered across all experts
            rows = array if array.ndim < 2 else array.reshape(-1, place.width)
            return rows[start : start + place.num_rows]
        if place.target.kind.startswith("gate_up") and start >= planned[0] // 2:
            start += (len(array) - planned[0]) // 2
        own = array[start : start + place.num_rows]
        return own if own.ndim < 2 else own[:, : place.width]

    def _dtype(self, name: str) -> np.dtype[Any]:
        dense = next(weight for weight in self._weights.values() if weight.format.is_dense)
        return np_dtype(weight_dtype(name, np.dtype(dense.data.dtype).name))

    def _values(self, place: Placement, dtype: Any) -> Any:
        """Return the new rows of a placement, on the device if they are there already."""
        tensors: Any = self._reader.checkpoint.checkpoint
        if isinstance(tensors, ArrayTensors) and place.layout == ROWS:
            rows = tensors.rows(place.name, place.first, place.last, place.columns)
            if is_cupy_array(rows):
                if self._reader.is_interleaved and place.rotated is not None:
                    rows = half_split(rows, place.rotated)
                if place.factor != 1.0:
                    rows = rows.astype(np.float32) * np.float32(place.factor)
                rows = rows.astype(dtype, copy=False)
                if rows.dtype == np.float16:
                    self._reader.check_finite(place, rows)
                return rows
        return self._reader.dense_rows(place, np.dtype(dtype).name)


def _assign(target: Any, values: Any) -> None:
    """Copy values, of as many elements, to an array; from the host if they are there."""
    xp = array_module(target)
    target[...] = xp.asarray(values).reshape(target.shape)
