""".gguf files: metadata and tensors, validated against the file size before any view.

File layout: magic, version, counts, key-value pairs, tensor infos, padding, data. Files are
untrusted: lengths and offsets are Python integers, and no read goes beyond the file. Metadata is
scanned once and decoded on access, so opening a file takes milliseconds.

A model may be split into parts NAME-00001-of-00003.gguf: the first holds the metadata, each of them
some of the tensors.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine.checks import shown
from engine.errors import WeightsError
from engine.loading.gguf_quants import FORMATS, QuantFormat
from engine.loading.safetensors import map_file
from engine.model_files import excerpt, is_present

__all__ = ["GgufFile", "GgufMetadata", "GgufTensor", "part_paths"]

_MAX_DIMS = 4
_STRING = 8
_ARRAY = 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MAX_ITEMS = 1 << 24  # maximum length of a metadata array, such as a vocabulary
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 1024


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: format, NumPy shape (out, in), and byte range [start, stop) in part `part`."""

    format: QuantFormat
    shape: tuple[int, ...]
    start: int
    stop: int
    part: int = 0


class _Cursor:
    """A read position in the mapped file; reading past the end raises."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def fail(self, message: str) -> WeightsError:
        return WeightsError(f"{self.path}: {message}")

    def skip(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return the offset of the first."""
        start = self.at
        self.at = self.at + count
        if self.at > len(self.data):
            raise self.fail(
                f"is truncated: {excerpt(what)} needs {count} bytes at byte {start}; the file has "
                f"{len(self.data)}"
            )
        return start

    def number(self, form: str, what: str) -> int:
        """Read one little-endian integer."""
        start = self.skip(struct.calcsize(form), what)
        value: int = struct.unpack_from(form, self.data, start)[0]
        return value

    def text(self, what: str) -> str:
        """Read one string."""
        length = self.number("<Q", what)
        return self.decode(self.skip(length, what), length, what)

    def decode(self, start: int, length: int, what: str) -> str:
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{excerpt(what)} must be UTF-8 ({error})") from error

    def count(self, least: int, what: str) -> int:
        """Read an item count; that many items of at least `least` bytes must fit in the file."""
        count = self.number("<Q", what)
        if count * least > (left := len(self.data) - self.at):
            raise self.fail(f"is truncated: {count} {what} do not fit in the {left} bytes left")
        return count


class GgufMetadata(Mapping[str, Any]):
    """The key-value pairs of a .gguf file, decoded on access: str, int, float, bool, or lists.

    Tokenizer keys start with "tokenizer.".
    """

    def __init__(self, cursor: _Cursor) -> None:
        self._cursor = cursor
        self._values: dict[str, Any] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for _ in range(cursor.count(_MIN_PAIR_BYTES, "metadata pairs")):
            key = cursor.text("a metadata key")
            if key in self._places:
                raise cursor.fail(f"metadata key {shown(key)} appears twice")
            kind = cursor.number("<I", key)
            self._places[key] = (kind, cursor.at)
            self._skip(kind, key)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = self._decode(*self._places[key], key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _skip(self, kind: int, key: str) -> None:
        """Skip one value, checking that it ends inside the file."""
        cursor = self._cursor
        if kind in _SCALARS:
            cursor.skip(_SCALARS[kind].itemsize, key)
        elif kind == _STRING:
            cursor.skip(cursor.number("<Q", key), key)
        elif kind == _ARRAY:
            item = cursor.number("<I", key)
            if item != _STRING and item not in _SCALARS:
                raise cursor.fail(f"metadata {shown(key)}: unknown type {item} of array items")
            least = 8 if item == _STRING else _SCALARS[item].itemsize
            if (count := cursor.count(least, f"items of {shown(key)}")) > _MAX_ITEMS:
                raise cursor.fail(
                    f"metadata {shown(key)}: must have at most {_MAX_ITEMS} items; got {count}"
                )
            if item == _STRING:
                self._skip_strings(count, key)
            else:
                cursor.skip(count * least, key)
        else:
            raise cursor.fail(f"metadata {shown(key)}: unknown value type {kind}")

    def _skip_strings(self, count: int, key: str) -> None:
        at = self._cursor.at
        data = self._cursor.data
        size = len(self._cursor.data)
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                at = size + 1
                break
            at += 8 + unpack(data, at)[0]
        if at > size:
            raise self._cursor.fail(f"is truncated inside the strings of {shown(key)}")
        self._cursor.at = at

    def _decode(self, kind: int, start: int, key: str) -> Any:
        """Decode the value of type `kind` at byte `start` (its extent has been checked)."""
        cursor = _Cursor(self._cursor.path, self._cursor.data)
        cursor.at = start
        if kind in _SCALARS:
            return np.frombuffer(cursor.data, _SCALARS[kind], 1, start)[0].item()
        if kind == _STRING:
            return cursor.text(key)
        item = cursor.number("<I", key)
        count = cursor.number("<Q", key)
        if item == _STRING:
            return [cursor.text(key) for _ in range(count)]
        return np.frombuffer(cursor.data, _SCALARS[item], count, cursor.at).tolist()


def part_paths(path: str | PathLike[str]) -> list[Path]:
    """Return the paths of all parts of a split model, by the name of any of them.

    A name that is not NAME-00001-of-00003.gguf is that of a whole model: its path is returned.
    """
    one = Path(path)
    name = _PART_NAME.fullmatch(one.name)
    count = int(name["count"]) if name else 1
    if name is None or not 1 <= int(name["number"]) <= count <= _MAX_PARTS:
        return [one]
    numbers = range(1, count + 1)
    return [one.with_name(f"{name['stem']}-{i:05}-of-{count:05}.gguf") for i in numbers]


class _Part:
    """One file: its mapped bytes, metadata and tensors."""

    def __init__(self, path: Path, number: int, root: Path | None = None) -> None:
        cursor = _Cursor(path, map_file(path, root))
        self.fail = cursor.fail
        self.data = cursor.data
        tensor_count = _read_preamble(cursor)
        self.metadata = GgufMetadata(cursor)
        infos = [_read_info(cursor) for _ in range(_checked_count(cursor, tensor_count))]
        self.tensors = _place_tensors(cursor, infos, _alignment(cursor, self.metadata), number)

    def count(self, key: str, default: int) -> int:
        """Return the integer under `key`, one of the keys that describe a split."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise self.fail(f"{key} must be a whole number; got {shown(value)}")
        return value


def _open_parts(path: Path) -> list[_Part]:
    """Open a whole model, or all parts of the split model that the file `path` is a part of."""
    paths = part_paths(path)
    number = paths.index(path)
    named = _Part(path, number)
    count = named.count("split.count", 1)
    if count <= 1:
        return [_Part(path, 0) if number else named]
    if count != len(paths):
        raise named.fail(
            f"is one of {count} parts (split.count), so its name must end with "
            f"-00001-of-{count:05}.gguf, or the number of another part; got {excerpt(path.name)}"
        )
    parts = []
    for i, one in enumerate(paths):
        if i != number and not is_present(one):
            raise named.fail(
                f"is one of {count} parts (split.count), which must be in one folder; "
                f"{excerpt(one.name)} is missing"
            )
        parts.append(named if i == number else _Part(one, i, path.parent))
    _refuse_disagreement(parts)
    return parts


def _refuse_disagreement(parts: list[_Part]) -> None:
    """Check that the files are the parts of one model, in order, and that none is incomplete."""
    first = parts[0].metadata
    split = {"split.count": len(parts), "split.tensors.count": sum(len(p.tensors) for p in parts)}
    own = ("split.no", "general.alignment", *split)
    for part in parts:
        for key in part.metadata:
            if key not in own and part.metadata[key] != first.get(key):
                raise part.fail(
                    f"{excerpt(key)} must be {shown(first.get(key))}, as the first part says; "
                    f"got {shown(part.metadata[key])}"
                )
    for i, part in enumerate(parts):
        for key, value in {"split.no": i, **split}.items():
            if (got := part.count(key, value)) != value:
                raise part.fail(f"{key} must be {value}, as the other parts say; got {got}")


class GgufFile:
    """A model in a .gguf file, or in all parts of a split one; memory-mapped and checked.

    Parameters
    ----------
    path : str or path
        The file, or any part of a split model: the others are opened too.

    Attributes
    ----------
    metadata : GgufMetadata
        The key-value pairs; of a split model, those of the first part.
    tensors : dict of str to GgufTensor
        The tensors of all parts by name.

    Raises
    ------
    WeightsError
        If the file is damaged or holds a tensor in an unsupported format, or a part is missing or
        disagrees with the others.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        parts = _open_parts(self.path)
        self._data = [part.data for part in parts]
        self.metadata = parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        for part in parts:
            for name in part.tensors.keys() & self.tensors.keys():
                raise part.fail(f"tensor {shown(name)} is in another part, too")
            self.tensors |= part.tensors

    def names(self) -> Iterator[str]:
        """Return the names of the tensors."""
        return iter(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`, (out, in) for a matrix."""
        return self.tensors[name].shape

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray[Any, Any]:
        """Return rows [start, stop) of tensor `name`; whole blocks if it is 1-D and quantized.

        Rows of a tensor with more than two dimensions are numbered across all its matrices. With
        `columns`, only these are returned, and only quantized blocks that contain them are
        decoded. The result is a view for F32, F16 and BF16, else a new float32 array.
        """
        tensor = self.tensors[name]
        form = tensor.format
        rest = tensor.shape[1:][-1:]
        if columns is None:
            return form.decode(self._bytes(name, start, stop)).reshape(stop - start, *rest)
        begin = columns[0] // form.block
        end = -(-columns[1] // form.block)
        blocks = self.read_blocks(name, start, stop)[:, begin:end]
        part = form.decode(np.ascontiguousarray(blocks).reshape(-1)).reshape(stop - start, -1)
        return part[:, columns[0] - begin * form.block : columns[1] - begin * form.block]

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return a (rows, blocks, itemsize) uint8 view of rows [start, stop) of matrix `name`."""
        tensor = self.tensors[name]
        per_row = tensor.shape[-1] // tensor.format.block
        blocks = self._bytes(name, start, stop)
        return blocks.reshape(stop - start, per_row, tensor.format.itemsize)

    def _bytes(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return a view of the bytes of rows [start, stop) of tensor `name`."""
        tensor = self.tensors[name]
        form = tensor.format
        width = math.prod(tensor.shape[1:][-1:])
        first = tensor.start + form.nbytes(start * width)
        return np.frombuffer(
            self._data[tensor.part], np.uint8, form.nbytes((stop - start) * width), first
        )


def _read_preamble(cursor: _Cursor) -> int:
    """Check magic and version; return the number of tensors."""
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.fail(f"must begin with b'GGUF'; got {magic!r}")
    cursor.skip(4, "the magic")
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        note = " (a big-endian file?)" if version and not version & 0xFFFF else ""
        raise cursor.fail(f"version must be 2 or 3; got {version}{note}")
    return cursor.number("<Q", "the number of tensors")


def _checked_count(cursor: _Cursor, count: int) -> int:
    if count * _MIN_TENSOR_BYTES > (left := len(cursor.data) - cursor.at):
        raise cursor.fail(f"is truncated: {count} tensors do not fit in the {left} bytes left")
    return count


def _alignment(cursor: _Cursor, metadata: GgufMetadata) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= 1 << 20 or value & (value - 1):
        raise cursor.fail(
            f"general.alignment must be a power of two up to {1 << 20}; got {shown(value)}"
        )
    return value


def _read_info(cursor: _Cursor) -> tuple[str, QuantFormat, tuple[int, ...], int]:
    """Read a tensor's name, format, shape and offset into the data section."""
    name = cursor.text("a tensor's name")
    dims = cursor.number("<I", name)
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {shown(name)} must have 1 to {_MAX_DIMS} dimensions; got {dims}")
    shape = tuple(cursor.number("<Q", name) for _ in range(dims))[::-1]
    if min(shape) < 1:
        raise cursor.fail(f"tensor {shown(name)} must have dimensions above 0; got {shape}")
    kind = cursor.number("<I", name)
    if kind not in FORMATS:
        known = ", ".join(one.name for one in FORMATS.values())
        raise cursor.fail(f"tensor {shown(name)} must be one of {known}; got {_type_name(kind)}")
    if shape[-1] % FORMATS[kind].block:
        raise cursor.fail(
            f"tensor {shown(name)}: the length of rows of {FORMATS[kind].name} must be a multiple "
            f"of {FORMATS[kind].block}; got {shape[-1]}"
        )
    return name, FORMATS[kind], shape, cursor.number("<Q", name)


def _type_name(kind: int) -> str:
    """Return ggml's name for tensor type `kind`."""
    from gguf.constants import GGMLQuantizationType

    known = {int(one): one.name for one in GGMLQuantizationType}
    return known.get(kind, f"unknown type {kind}")


def _place_tensors(
    cursor: _Cursor,
    infos: list[tuple[str, QuantFormat, tuple[int, ...], int]],
    alignment: int,
    part: int,
) -> dict[str, GgufTensor]:
    """Return the tensors by name, after checking that they are disjoint and inside the file."""
    base = (cursor.at + alignment - 1) // alignment * alignment
    size = len(cursor.data)
    tensors: dict[str, GgufTensor] = {}
    for name, form, shape, offset in infos:
        if name in tensors:
            raise cursor.fail(f"tensor {shown(name)} appears twice")
        start = base + offset
        stop = start + form.nbytes(math.prod(shape))
        if offset % alignment:
            raise cursor.fail(
                f"tensor {shown(name)}: offset must be a multiple of {alignment}; got {offset}"
            )
        if stop > size:
            raise cursor.fail(
                f"is truncated: tensor {shown(name)} ends at byte {stop}; the file has {size}"
            )
        tensors[name] = GgufTensor(form, shape, start, stop, part)
    _refuse_overlap(cursor, tensors)
    return tensors


def _refuse_overlap(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    end = 0
    before = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise cursor.fail(
                f"tensor {shown(name)} overlaps {shown(before)}: it starts at byte {tensor.start}; "
                f"it must start at {end} or later"
            )
        end = tensor.stop
        before = name
