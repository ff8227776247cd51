"""`GgufCheckpoint`: a .gguf file as the checkpoint of a Hugging Face folder, dequantized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.dtypes import np_dtype
from engine.errors import ConfigError
from engine.loading.generation_config import generation_config, with_recommended
from engine.loading.gguf import GgufFile
from engine.loading.gguf_config import gguf_config_json
from engine.loading.tensor_reader import TensorReader, half_split
from engine.loading.weight_table import Placement, expected_tensors
from engine.models.registry import family
from engine.models.tensor_layout import ROWS
from engine.text.gguf_vocab import parts_from_gguf
from engine.weights import WHOLE

__all__ = ["GgufCheckpoint"]

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Array = np.ndarray[Any, Any]


class GgufCheckpoint:
    """Tensors of a .gguf file under the names of the model's Hugging Face checkpoint.

    They have the model's dtype, rows in the order of such a checkpoint, and norms without what
    .gguf files add. A tensor is dequantized when it is viewed; none is kept.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    path : Path
    config : ModelConfig

    Raises
    ------
    ConfigError
        If the configuration cannot be used, or the family's checkpoints store tensors that a .gguf
        file does not give, or store matrices transposed.
    WeightsError
        If the file is damaged, or a tensor is missing or unexpected.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.config, self._config_json = gguf_config_json(self._file)
        self._reader = TensorReader(path, self.config)
        self._sources: dict[str, list[Placement]] = {}  # weight -> the file's parts of it
        for place in self._reader.placements(WHOLE):
            self._sources.setdefault(str(place.target), []).append(place)
        kind = family(self.config.model_type)
        self._tensors = expected_tensors(self.config, kind.names)
        for name, (_, places) in self._tensors.items():
            if not places or any(place.layout != ROWS for place in places):
                is_transposed = any(place.layout.transposed for place in places)
                reason = "is stored transposed in one" if is_transposed else "has no counterpart"
                raise ConfigError(
                    f"{path}: a .gguf file of the family {kind.model_type} cannot become a folder: "
                    f"tensor {name!r} {reason}. Quantize the model when it is loaded"
                )

    def names(self) -> Iterator[str]:
        """Return the names of the tensors."""
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self._tensors[name][0]

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name of tensor `name`."""
        return _STORED[self.config.dtype]

    def view(self, name: str) -> Array:
        """Return tensor `name`, dequantized."""
        shape, places = self._tensors[name]
        array = np.empty(shape, np_dtype(self.config.dtype))
        rows = (
            array if array.ndim < 3 else array.reshape(-1, shape[-1])
        )  # experts after one another
        for place in places:
            self._fill(rows, place)
        return array

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the JSON files of the folder: configuration, sampling defaults, tokenizer."""
        found = {"config.json": self._config_json}
        generation = generation_config(self.path)
        if generation:
            generation["do_sample"] = generation.get("temperature") != 0
        generation = with_recommended(generation, self.path)
        ids = self._config_json.get("eos_token_id")
        if "tokenizer.ggml.tokens" in self._file.metadata:
            parts = parts_from_gguf(self._file.metadata)
            found["tokenizer.json"] = json.loads(parts.backend.to_str())
            found["tokenizer_config.json"] = _tokenizer_config(parts)
            ids = list(parts.eos_token_ids) or ids
        if ids is not None:
            generation["eos_token_id"] = ids
        if generation:
            found["generation_config.json"] = generation
        return found

    def _fill(self, out: Array, place: Placement) -> None:
        """Write the rows of `place` to `out`, all rows of a tensor."""
        rows = out[place.first : place.last]
        for source in self._sources[str(place.target)]:
            size = source.width // place.width  # over 1 where the folder's vectors are its rows
            begin = source.start * size
            first = max(begin, place.start)
            last = min(begin + source.num_rows * size, place.start + place.num_rows)
            if first >= last:
                continue
            own = rows[first - place.start : last - place.start]
            source = replace(source, factor=1.0)  # factors of config.json are in neither file
            if len(own) == source.num_rows:
                self._reader.read_into(own, source)
            else:  # the file packs several tensors into one
                packed = np.empty((source.num_rows * size, *out.shape[1:]), out.dtype)
                self._reader.read_into(packed.reshape(source.num_rows, -1), source)
                own[:] = packed[first - begin : last - begin]
        if place.rotated is not None and self.config.interleaved_rope:
            rows[half_split(np.arange(len(rows)), place.rotated)] = rows.copy()


def _tokenizer_config(parts: Any) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: special tokens and chat templates."""
    found = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    templates = dict(parts.chat_templates)
    if list(templates) == ["default"]:
        found["chat_template"] = templates["default"]
    elif templates:
        found["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return found
