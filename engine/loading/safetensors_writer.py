"""Write safetensors files one tensor at a time, in any order; the layout is fixed in advance."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import ml_dtypes
import numpy as np

from engine.errors import WeightsError

__all__ = ["DTYPE_NAMES", "SafetensorsWriter"]

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPE_NAMES = {stored: name for name, stored in _NAMES.items()}
"""Name in a safetensors file -> name of the dtype."""

_ML_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}
_ALIGNMENT = 8

Entries = Mapping[str, tuple[str, tuple[int, ...]]]


class SafetensorsWriter:
    """Writer of model.safetensors, or of shards with an index; a context manager.

    Parameters
    ----------
    folder : Path
    entries : mapping of str to (str, tuple of int)
        Dtype name and shape of every tensor. Each shard holds consecutive entries.
    max_shard_bytes : int
        Maximum bytes per shard; only a shard with a single tensor may exceed it.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from engine.loading.safetensors import open_safetensors
    >>> with TemporaryDirectory() as folder:
    ...     with SafetensorsWriter(Path(folder), {"w": ("float32", (2, 3))}) as writer:
    ...         writer.write("w", np.ones((2, 3), np.float32))
    ...     float(open_safetensors(folder).view("w").sum())
    6.0
    """

    def __init__(self, folder: Path, entries: Entries, max_shard_bytes: int = 5 << 30) -> None:
        self._entries = dict(entries)
        self._missing = set(self._entries)
        self._places: dict[str, tuple[IO[bytes], int]] = {}
        self._files: list[IO[bytes]] = []
        shards = list(_shards(self._entries, max_shard_bytes))
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = ["model.safetensors"]
        try:
            for name, shard in zip(names, shards, strict=True):
                self._begin(folder / name, shard)
            if len(shards) > 1:
                _write_index(folder, self._entries, dict(zip(names, shards, strict=True)))
        except BaseException:
            self._close()
            raise

    def write(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Write tensor `name`, which must have the declared dtype and shape."""
        dtype, shape = self._entries[name]
        if array.dtype != _dtype(dtype) or array.shape != shape:
            raise WeightsError(
                f"tensor {name!r} must be {dtype} of shape {shape}; "
                f"got {array.dtype} of shape {array.shape}"
            )
        file, start = self._places[name]
        file.seek(start)
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._missing.discard(name)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._missing:
            self._close()
            raise WeightsError(f"tensors were not written: {', '.join(sorted(self._missing)[:4])}")
        for file in self._files if kind is None else ():
            file.flush()
            os.fsync(file.fileno())
        self._close()

    def _begin(self, path: Path, shard: list[str]) -> None:
        """Write one file's header and reserve space for its tensors."""
        # Wide dtypes first, so every tensor is aligned for readers that map it in place.
        ordered = sorted(shard, key=lambda name: -_dtype(self._entries[name][0]).itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts = {}
        start = 0
        for name in ordered:
            dtype, shape = self._entries[name]
            starts[name] = start
            stop = start + _nbytes(self._entries[name])
            offsets = [start, stop]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        file = path.open("xb")
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        base = 8 + len(text)
        file.truncate(base + start)
        self._places |= {name: (file, base + place) for name, place in starts.items()}

    def _close(self) -> None:
        for file in self._files:
            file.close()


def _dtype(name: str) -> np.dtype[Any]:
    return _ML_DTYPES.get(name) or np.dtype(name)


def _nbytes(entry: tuple[str, tuple[int, ...]]) -> int:
    return math.prod(entry[1]) * _dtype(entry[0]).itemsize


def _shards(entries: Entries, most: int) -> Iterator[list[str]]:
    """Split the tensors, in order, into shards of at most `most` bytes or a single tensor."""
    shard: list[str] = []
    size = 0
    for name, entry in entries.items():
        if shard and size + _nbytes(entry) > most:
            yield shard
            shard = []
            size = 0
        shard.append(name)
        size += _nbytes(entry)
    yield shard


def _write_index(folder: Path, entries: Entries, shards: Mapping[str, list[str]]) -> None:
    total = sum(map(_nbytes, entries.values()))
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
