"""Messages of integers and arrays, and the slot ring from rank 0 to all other ranks."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.distributed.group import MESSAGES, Group
from engine.errors import RankError

__all__ = ["Buffer", "Messages", "from_text", "pack", "pack_parts", "to_text", "unpack"]

_NUMBER, _SIZE, _LEFT, _SUM = range(4)  # fields of a slot

Buffer = bytes | bytearray | memoryview

_DTYPES = ("uint8", "int32", "int64", "uint64", "float32", "bool")
_NONE = -1  # dtype number that stands for None
_ALIGNMENT = 8


def pack(kind: int, numbers: Sequence[int], arrays: Sequence[Any]) -> bytearray:
    """Return a message of integers and NumPy arrays; an array may be None.

    Examples
    --------
    >>> unpack(pack(3, [7, -1], [np.arange(2, dtype=np.int32), None]))
    (3, [7, -1], [array([0, 1], dtype=int32), None])
    """
    return bytearray().join(pack_parts(kind, numbers, arrays))


def pack_parts(kind: int, numbers: Sequence[int], arrays: Sequence[Any]) -> list[Buffer]:
    """Return the message of `pack` in parts; contiguous arrays are not copied."""
    fields = [kind, len(numbers), len(arrays), *numbers]
    for array in arrays:
        fields += _described(array)
    parts: list[Buffer] = [np.array(fields, np.int64).tobytes()]
    for array in arrays:
        if array is not None and array.size:
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            parts.append(bytes(-array.nbytes % _ALIGNMENT))
    return parts


def unpack(data: Buffer) -> tuple[int, list[int], list[Any]]:
    """Return (kind, numbers, arrays) of a message; the arrays are views of `data`.

    Raises
    ------
    RankError
        If it is no message.
    """
    try:
        return _unpacked(memoryview(data))
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        raise RankError(f"a message of {len(data)} bytes is damaged: {error}") from None


def _unpacked(view: memoryview) -> tuple[int, list[int], list[Any]]:
    kind, num_numbers, num_arrays = np.frombuffer(view, np.int64, 3).tolist()
    if min(num_numbers, num_arrays) < 0:  # -1 would mean all that is left
        raise ValueError("a negative count")
    at = 3 * 8
    numbers = np.frombuffer(view, np.int64, num_numbers, at).tolist()
    at += 8 * num_numbers
    shapes: list[tuple[int, list[int]]] = []
    for _ in range(num_arrays):
        dtype, num_dims = np.frombuffer(view, np.int64, 2, at).tolist()
        if num_dims < 0 or not _NONE <= dtype < len(_DTYPES):
            raise ValueError(f"an array of dtype {dtype} with {num_dims} dimensions")
        shapes.append((dtype, np.frombuffer(view, np.int64, num_dims, at + 16).tolist()))
        at += 16 + 8 * num_dims
    arrays: list[Any] = []
    for code, shape in shapes:
        if code == _NONE:
            arrays.append(None)
            continue
        if min(shape, default=0) < 0:
            raise ValueError(f"an array of shape {shape}")
        array = np.frombuffer(view, _DTYPES[code], math.prod(shape), at).reshape(shape)
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        arrays.append(array)
    return kind, numbers, arrays


def _described(array: Any) -> list[int]:
    """Return an array's dtype number, number of dimensions, and shape."""
    if array is None:
        return [_NONE, 0]
    return [_DTYPES.index(array.dtype.name), array.ndim, *array.shape]


def to_text(value: Any) -> Any:
    """Return a string, or the JSON of another value, as an array of uint8.

    Examples
    --------
    >>> from_text(to_text("step 1")), json.loads(from_text(to_text({"stage": 0})))
    ('step 1', {'stage': 0})
    """
    text = value if isinstance(value, str) else json.dumps(value)
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)


def from_text(array: Any) -> str:
    """Return the string encoded by `to_text`."""
    return bytes(array).decode("utf-8", "replace")


class Messages:
    """Sends messages of any length from rank 0, and receives them in the other ranks, in order.

    Parameters
    ----------
    group : Group

    Examples
    --------
    >>> from engine.distributed.segment import Segment
    >>> segment = Segment.in_process(2)
    >>> ours, theirs = (Messages(Group(segment, rank)) for rank in range(2))
    >>> ours.send(b"step")
    >>> bytes(theirs.receive())
    b'step'
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._segment = group.segment
        self._count = 0  # number of slots written or read

    def send(self, data: Buffer) -> None:
        """Send `data`; wait for ranks that have not yet read the slots to be overwritten.

        Raises
        ------
        RankError
            If a rank has failed, or does not read in time.
        """
        rest = memoryview(data)
        room = self._segment.slots.shape[1]
        while True:
            part = rest[:room]
            rest = rest[room:]
            self._write(part, len(rest))
            if not len(rest):
                return

    def receive(self) -> bytearray:
        """Return the next message; wait for it while rank 0 is alive.

        Raises
        ------
        RankError
            If another rank has failed, rank 0 has ended the group, or the message is damaged.
        """
        data = bytearray()
        while True:
            left = self._read(data)
            if not left:
                return data

    def _write(self, part: memoryview, left: int) -> None:
        number = self._count = self._count + 1
        fields, slot = self._slot(number)
        read = self._segment.ranks[1:, MESSAGES]
        first = number - len(self._segment.slots)
        if first > 0:
            self._group.wait(lambda: (1 + (read < first).nonzero()[0]).tolist(), "the next message")
        slot[: len(part)] = np.frombuffer(part, np.uint8)
        fields[[_SIZE, _LEFT, _SUM]] = len(part), left, zlib.crc32(part)
        self._group.fence()
        fields[_NUMBER] = number

    def _read(self, data: bytearray) -> int:
        """Append the next slot to `data`; return the bytes of the message that remain."""
        number = self._count = self._count + 1
        fields, slot = self._slot(number)
        self._group.wait(lambda: () if fields[_NUMBER] == number else (0,), "a step", math.inf)
        size = int(fields[_SIZE])
        left = int(fields[_LEFT])
        part = slot[:size].tobytes()
        if zlib.crc32(part) != int(fields[_SUM]):
            raise RankError(f"rank {self._group.rank} got a damaged message (number {number})")
        self._group.fence()
        self._segment.ranks[self._group.rank, MESSAGES] = number
        data += part
        return left

    def _slot(self, number: int) -> tuple[Any, Any]:
        index = number % len(self._segment.slots)
        return self._segment.slot_fields[index], self._segment.slots[index]
