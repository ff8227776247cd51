"""Safetensors files, single or sharded: a validated JSON header and views of the mapped file.

File layout: header length (8 bytes, little endian), a JSON object {name: {"dtype", "shape",
"data_offsets"}}, then the data without gaps. Everything is checked against the file size, in
Python integers, before any view is created; nothing is copied or executed.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from engine.checks import shown, warn_once
from engine.errors import WeightsError
from engine.model_files import excerpt, is_present, open_file, read_json

__all__ = [
    "SafetensorsDirectory",
    "SafetensorsFile",
    "TensorInfo",
    "map_file",
    "open_safetensors",
]

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 8

_VIEWS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype("u1"),  # power-of-two scales as biased exponents
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_WEIGHT_DTYPES = ("F32", "F16", "BF16")
_NEVER_QUANTIZED = ("F64", "I64", "U64", "BOOL")  # dtypes that no quantized weight has

Rename = Callable[[str], str | None]
"""New name of a tensor; None to leave it out."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: dtype name, shape, and byte range [start, stop) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One .safetensors file, memory-mapped and checked.

    Parameters
    ----------
    path : str or path
    root : Path, optional
        The model's folder; symlinks that leave it are rejected (see `engine.model_files`). None for
        a file named by the user.

    Raises
    ------
    WeightsError
        If the file is damaged; the message names the file, the tensor, and both values in conflict.

    Examples
    --------
    >>> from safetensors.numpy import save_file
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"w": np.ones((2, 3), np.float32)}, f"{folder}/x.safetensors")
    ...     file = SafetensorsFile(f"{folder}/x.safetensors")
    >>> file.shape("w"), float(file.view("w").sum())  # the mapping outlives the file name
    ((2, 3), 6.0)
    """

    def __init__(self, path: str | PathLike[str], root: Path | None = None) -> None:
        self.path = Path(path)
        self._map = map_file(self.path, root)
        header, data_start = _read_header(self.path, self._map)
        self.tensors = _read_tensors(self.path, header, data_start, len(self._map))

    def names(self) -> Iterator[str]:
        """Return the names of the tensors."""
        return iter(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def rename(self, new_name: Rename) -> None:
        """Give every tensor the name `new_name(name)`, or drop it where that is None.

        Raises
        ------
        WeightsError
            If two names become equal.
        """
        self.tensors = _renamed(self.path, self.tensors, new_name)

    def divide(self, name: str, parts: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Replace tensor `name` by parts of it: new name -> (first element, shape)."""
        whole = self.tensors.pop(name)
        size = _VIEWS[whole.dtype].itemsize
        for part, (first, shape) in parts.items():
            start = whole.start + first * size
            stop = start + math.prod(shape) * size
            assert start <= stop <= whole.stop
            self.tensors[part] = TensorInfo(whole.dtype, shape, start, stop)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name of tensor `name`."""
        return self.tensors[name].dtype

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """Return tensor `name` as a read-only view of the mapped file (nothing is copied)."""
        info = self.tensors[name]
        dtype = _VIEWS[info.dtype]
        view: np.ndarray[Any, Any] = np.ndarray(info.shape, dtype, self._map, info.start)
        return view

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Return rows [start, stop) of weight `name`: a view in float32, float16 or bfloat16.

        Rows of a tensor with more than two dimensions are numbered across all its matrices. With
        `columns`, only these are returned, and only file pages that contain them are read.

        Raises
        ------
        WeightsError
            If the tensor has any other dtype.
        """
        dtype = self.tensors[name].dtype
        if dtype not in _WEIGHT_DTYPES:
            rule = " (the model's configuration does not say that it is quantized)"
            raise WeightsError(
                f"{self.path}: tensor {shown(name)} must be one of {', '.join(_WEIGHT_DTYPES)}; "
                f"got {dtype}{rule if dtype not in _NEVER_QUANTIZED else ''}"
            )
        view = np.atleast_1d(self.view(name))
        rows = (view if view.ndim < 3 else view.reshape(-1, view.shape[-1]))[start:stop]
        return rows if columns is None else rows[:, slice(*columns)]

    def read_bytes(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return a view of rows [start, stop) of a uint8 tensor (E, R, ...) with E·R rows.

        Raises
        ------
        WeightsError
            If the dtype is not uint8.
        """
        if (dtype := self.tensors[name].dtype) != "U8":
            raise WeightsError(f"{self.path}: tensor {shown(name)} must be U8; got {dtype}")
        view = self.view(name)
        return view.reshape(-1, *view.shape[2:])[start:stop]


class SafetensorsDirectory:
    """A sharded checkpoint: an index, and shards that together hold every tensor exactly once.

    Parameters
    ----------
    index : str or path
        The model.safetensors.index.json.
    is_wanted : callable, optional
        Predicate on tensor names. A shard without wanted tensors is not opened, and may be absent.

    Raises
    ------
    WeightsError
        If a shard is missing, damaged or outside the directory, or two shards hold one tensor.

    Notes
    -----
    The shards' own headers say which tensors exist. Entries of the index that no shard holds are
    logged as a warning.
    """

    def __init__(
        self, index: str | PathLike[str], is_wanted: Callable[[str], bool] | None = None
    ) -> None:
        self.path = Path(index)
        wanted = _read_index(self.path)
        if is_wanted is not None:
            wanted = {name: shard for name, shard in wanted.items() if is_wanted(name)}
        shards = {
            name: SafetensorsFile(_shard_path(self.path, name), self.path.parent)
            for name in sorted(set(wanted.values()))
        }
        self._home: dict[str, SafetensorsFile] = {}
        for shard in shards.values():
            for tensor in shard.names():
                if tensor in self._home:
                    raise WeightsError(
                        f"{self.path}: tensor {shown(tensor)} must be in one shard; got "
                        f"{self._home[tensor].path.name} and {shard.path.name}"
                    )
                self._home[tensor] = shard
        # If the model needs one of these, `place_tensors` refuses the checkpoint.
        absent = [tensor for tensor in wanted if tensor not in self._home]
        if absent:
            first = absent[0]
            warn_once(
                f"{self.path}: {len(absent)} tensors are in no shard: the first is {shown(first)}, "
                f"which {excerpt(wanted[first])} must hold and does not"
            )

    def names(self) -> Iterator[str]:
        """Return the names of the tensors of all shards."""
        return iter(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def rename(self, new_name: Rename) -> None:
        """Rename or drop every tensor; see `SafetensorsFile.rename`."""
        for shard in set(self._home.values()):
            shard.rename(new_name)
        self._home = _renamed(self.path, self._home, new_name)

    def divide(self, name: str, parts: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Replace tensor `name` by parts of it; see `SafetensorsFile.divide`."""
        shard = self._home.pop(name)
        shard.divide(name, parts)
        self._home |= dict.fromkeys(parts, shard)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self._home[name].shape(name)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name of tensor `name`."""
        return self._home[name].dtype(name)

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """Return tensor `name` as a read-only view of its mapped shard."""
        return self._home[name].view(name)

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Return rows [start, stop) of weight `name`; see `SafetensorsFile.read`."""
        return self._home[name].read(name, start, stop, columns)

    def read_bytes(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows [start, stop) of a uint8 tensor; see `SafetensorsFile.read_bytes`."""
        return self._home[name].read_bytes(name, start, stop)


def _renamed(path: Path, tensors: Mapping[str, _T], new_name: Rename) -> dict[str, _T]:
    names = {name: new_name(name) for name in tensors}
    kept = {new: tensors[name] for name, new in names.items() if new is not None}
    if len(kept) < sum(new is not None for new in names.values()):
        seen: dict[str, str] = {}
        for name, new in names.items():
            if new is not None and seen.setdefault(new, name) != name:
                raise WeightsError(
                    f"{path}: {shown(new)} must have one tensor; got {shown(seen[new])} and "
                    f"{shown(name)}"
                )
    return kept


def open_safetensors(
    directory: str | PathLike[str], is_wanted: Callable[[str], bool] | None = None
) -> SafetensorsFile | SafetensorsDirectory:
    """Open the checkpoint in `directory`: model.safetensors, or an index with its shards.

    See `SafetensorsDirectory` for `is_wanted`.

    Files may be symlinks within `directory`, or, in the hub's cache, to its blobs (see
    `engine.model_files`).

    Raises
    ------
    WeightsError
        If the weights are missing or in a format that can run code, or if a file is damaged, not a
        regular file, or a symlink out of the directory. The message names the cause.
    """
    root = Path(directory)
    if not os.path.isdir(root):  # never raises, unlike Path.is_dir
        raise WeightsError(f"{root} must be a directory with a model; it is not a directory")
    if is_present(root / "model.safetensors"):
        return SafetensorsFile(root / "model.safetensors", root)
    if is_present(root / "model.safetensors.index.json"):
        return SafetensorsDirectory(root / "model.safetensors.index.json", is_wanted)
    found = sorted(root.glob("*.safetensors"))
    if len(found) == 1:
        return SafetensorsFile(found[0], root)
    if found:
        names = ", ".join(one.name for one in found[:4])
        raise WeightsError(
            f"{root} must have model.safetensors or model.safetensors.index.json; got {names}"
            f"{', ...' if len(found) > 4 else ''} (the index is missing: download it too)"
        )
    raise _no_weights(root)


def _no_weights(root: Path) -> WeightsError:
    """Return the error for a directory without safetensors; it suggests a remedy."""
    pickled = sorted(
        one.name for one in root.glob("*") if one.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickled:
        return WeightsError(
            f"{root} has weights only as a pickle ({pickled[0]}), which can run any code when "
            "loaded and is never read. Use a .safetensors or .gguf version of the model, or "
            "convert it in a sandbox with safetensors.torch.save_file"
        )
    return WeightsError(
        f"{root} has no weights; it needs model.safetensors, model.safetensors.index.json with its "
        "shards, or a .gguf file"
    )


def map_file(path: Path, root: Path | None = None) -> mmap.mmap:
    """Memory-map file `path` for reading.

    Parameters
    ----------
    path : Path
    root : Path, optional
        The model's folder; symlinks that leave it are rejected (see `engine.model_files`).

    Raises
    ------
    WeightsError
        If the file is not regular, cannot be read, has fewer than 8 bytes, or is a symlink out of
        `root`.
    """
    with open_file(path, root, WeightsError) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise WeightsError(f"{path}: must have at least 8 bytes; got {size}")
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path}: cannot be read ({error})") from error


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """Return the header's JSON object and the offset of the data."""
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{path}: header must have at most {MAX_HEADER_BYTES} bytes; got {length}"
        )
    if 8 + length > len(data):
        raise WeightsError(
            f"{path}: is truncated: the header needs {8 + length} bytes; the file has {len(data)}"
        )
    try:
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: header is not valid JSON ({excerpt(error)})") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: header must be a JSON object; got {shown(header)}")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or any(not isinstance(one, str) for one in notes.values()):
        raise WeightsError(f"{path}: __metadata__ must be an object of strings; got {shown(notes)}")
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject an object with a duplicate key: its value would depend on the parser."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} appears twice")
    return result


def _read_tensors(
    path: Path, header: Mapping[str, Any], data_start: int, size: int
) -> dict[str, TensorInfo]:
    """Return the tensors, checked to cover the data section without gap or overlap."""
    tensors = {
        name: _read_tensor(path, name, entry, data_start, size) for name, entry in header.items()
    }
    end = data_start
    before = "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            fault = "overlaps" if info.start < end else "leaves a gap after"
            raise WeightsError(
                f"{path}: tensor {shown(name)} {fault} {before}: it starts at byte {info.start}; "
                f"it must start at {end}"
            )
        end = info.stop
        before = shown(name)
    if end != size:
        raise WeightsError(f"{path}: tensors must end with the file, at {size}; got {end}")
    return tensors


def _read_tensor(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    """Check and return one header entry."""

    def fail(what: str, wanted: str, got: object) -> WeightsError:
        return WeightsError(
            f"{path}: tensor {shown(name)}: {what} must be {wanted}; got {shown(got)}"
        )

    if not isinstance(entry, dict):
        raise fail("entry", "an object", entry)
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _VIEWS:
        raise fail("dtype", f"one of {', '.join(_VIEWS)}", dtype)
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise fail("shape", f"at most {_MAX_DIMS} whole numbers >= 0", shape)
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail("data_offsets", "two whole numbers, the first not above the second", offsets)
    begin, stop = offsets
    if data_start + stop > size:
        raise fail("data_offsets", f"inside the {size - data_start} bytes of data", offsets)
    if (wanted := math.prod(shape) * _VIEWS[dtype].itemsize) != stop - begin:
        raise fail("size", f"{shown(wanted)} bytes ({dtype} of shape {shown(shape)})", stop - begin)
    return TensorInfo(dtype, tuple(shape), data_start + begin, data_start + stop)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's map from tensor name to file name."""
    index = read_json(path, MAX_HEADER_BYTES, path.parent, WeightsError, _no_duplicates)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise WeightsError(
            f"{path}: weight_map must be an object of file names; got {shown(names)}"
        )
    for tensor, name in names.items():
        if not isinstance(name, str) or not name:
            raise WeightsError(
                f"{path}: tensor {shown(tensor)} must name a file; got {shown(name)}"
            )
    return names


def _shard_path(index: Path, name: str) -> Path:
    """Return the path of shard `name`, which must be a bare file name next to `index`."""
    if Path(name).name != name or "\\" in name or "\0" in name or name in (".", ".."):
        raise WeightsError(f"{index}: shard must be a plain file name; got {shown(name)}")
    shard = index.parent / name
    if not is_present(shard):
        raise WeightsError(f"{index}: shard {excerpt(name)} is missing; download it again")
    return shard
