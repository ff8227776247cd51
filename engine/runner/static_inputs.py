"""The inputs of a decode step at addresses that never change, filled by one copy a step.

A captured graph reads what lies at the addresses it was captured with. So all inputs of a decode
step live in one buffer on the device; the host writes them into pinned memory and sends the used
part of it. There are several pinned buffers, taken in turns: a step is laid out while the copies of
the ones before may still be under way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.device import Device
from engine.runner.transfer import Readback

__all__ = ["StaticInputs", "Turn"]

IntArray = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 16  # bytes; every field starts at a multiple of it
_NUM_TURNS = 4  # more than steps that can be under way

# Name -> dtype and the value of a row that is padding. New blocks follow after these.
_FIELDS: dict[str, tuple[str, float]] = {
    "seeds": ("uint64", 0),
    "sample_positions": ("int64", 0),
    "rows": ("int32", -1),
    "token_ids": ("int32", 0),
    "positions": ("int32", 0),
    "rope_positions": ("int32", 0),
    "context_lens": ("int32", 0),
    "new_starts": ("int32", 0),
    "top_k": ("int32", 0),
    "temperature": ("float32", 0),
    "top_p": ("float32", 1),
    "min_p": ("float32", 0),
}


class Turn:
    """Host memory of one step: its inputs, by name, and its results.

    SAFETY: owned by the device from `StaticInputs.send` until `done`, set by `read` or `release`.

    Attributes
    ----------
    fields : dict of str to array
        (max_rows,) each; "cu_new_blocks" has one more, "new_blocks" as many as there can be.
    results : (2 * max_rows,) int32
    """

    def __init__(self, memory: IntArray, fields: dict[str, IntArray], results: IntArray) -> None:
        self.memory = memory
        self.fields = fields
        self.results = results
        self.done: Any = None

    def fill(self, num_rows: int, size: int, **columns: Any) -> None:
        """Write the first `num_rows` of some fields, and padding up to `size`."""
        for name, column in columns.items():
            field = self.fields[name]
            field[:num_rows] = column
            field[num_rows:size] = _FIELDS[name][1]

    def fill_blocks(self, counts: IntArray, size: int) -> IntArray:
        """Write where the new blocks of each row lie; return their places, (len(counts) + 1,)."""
        places = self.fields["cu_new_blocks"]
        places[0] = 0
        np.cumsum(counts, out=places[1 : len(counts) + 1])
        places[len(counts) + 1 : size + 1] = places[len(counts)]
        return places[: len(counts) + 1]


class StaticInputs:
    """The device's buffer and the host's, with the same layout.

    Parameters
    ----------
    device : Device
        On the CPU both are the same memory.
    max_rows : int
        Longest batch.
    max_new_blocks : int
        Most block ids that a step may send.

    Attributes
    ----------
    arrays : dict of str to array
        On the device, as `Turn.fields`.
    results : (2 * max_rows,) int32, on the device

    Examples
    --------
    >>> from engine.device import CPU
    >>> inputs = StaticInputs(CPU, max_rows=4, max_new_blocks=8)
    >>> turn = inputs.next_turn()
    >>> turn.fill(1, 2, rows=[7], top_p=[0.5])
    >>> inputs.send(turn, num_new_blocks=0)
    >>> inputs.arrays["rows"][:2], inputs.arrays["top_p"][:2]
    (array([ 7, -1], dtype=int32), array([0.5, 1. ], dtype=float32))
    """

    def __init__(self, device: Device, max_rows: int, max_new_blocks: int) -> None:
        self._device = device
        self._max_rows = max_rows
        self._layout, self._base = _layout(max_rows)
        num_bytes = self._base + 4 * max_new_blocks
        xp = device.xp
        self._there = xp.zeros(num_bytes, np.uint8)
        self.arrays = self._views(self._there)
        self.results = xp.zeros(2 * max_rows, np.int32)
        count = _NUM_TURNS if device.is_cuda else 1
        self._turns = [self._turn(num_bytes) for _ in range(count)]
        self._next = 0
        first = self.next_turn()
        first.fill(0, max_rows, **dict.fromkeys(_FIELDS, ()))
        first.fill_blocks(np.zeros(0, np.int64), max_rows)
        self.send(first, 0)

    def next_turn(self) -> Turn:
        """Return memory for the next step, once its last use is over."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        if turn.done is not None and not turn.done.done:
            turn.done.synchronize()
        return turn

    def send(self, turn: Turn, num_new_blocks: int) -> None:
        """Copy what was written to the device, on the current stream; waits for nothing."""
        if self._device.is_cuda:
            stream = self._device.xp.cuda.get_current_stream()
            num_bytes = self._base + 4 * num_new_blocks
            self._there.data.copy_from_host_async(turn.memory.ctypes.data, num_bytes, stream)

    def read(self, turn: Turn, num_rows: int, size: int) -> Readback:
        """Bring `results`, (2, size), to the host, and return the first rows of both lines."""
        if not self._device.is_cuda:
            lines = self.results[: 2 * size].reshape(2, size)[:, :num_rows].copy()
            return Readback(self._device, {"token_ids": lines[0], "status": lines[1]})
        stream = self._device.xp.cuda.get_current_stream()
        self.results.data.copy_to_host_async(turn.results.ctypes.data, 8 * size, stream)
        turn.done.record(stream)
        lines = turn.results[: 2 * size].reshape(2, size)[:, :num_rows]
        return Readback.of(turn.done, {"token_ids": lines[0], "status": lines[1]})

    def release(self, turn: Turn) -> None:
        """Let `turn` be used again once what was sent has arrived; nothing is read back."""
        if turn.done is not None:
            turn.done.record(self._device.xp.cuda.get_current_stream())

    def _turn(self, num_bytes: int) -> Turn:
        if not self._device.is_cuda:
            return Turn(self._there, self.arrays, self.results)
        cuda = self._device.xp.cuda
        memory = _pinned(cuda, num_bytes, np.uint8)
        turn = Turn(memory, self._views(memory), _pinned(cuda, 2 * self._max_rows, np.int32))
        turn.done = cuda.Event(disable_timing=True)
        return turn

    def _views(self, memory: Any) -> dict[str, Any]:
        views = {
            name: memory[start : start + count * np.dtype(dtype).itemsize].view(dtype)
            for name, (start, dtype, count) in self._layout.items()
        }
        views["new_blocks"] = memory[self._base :].view(np.int32)
        return views


def _layout(max_rows: int) -> tuple[dict[str, tuple[int, str, int]], int]:
    """Return name -> (first byte, dtype, length), and the bytes of all."""
    layout, size = {}, 0
    sizes = {name: (dtype, max_rows) for name, (dtype, _) in _FIELDS.items()}
    for name, (dtype, count) in (sizes | {"cu_new_blocks": ("int32", max_rows + 1)}).items():
        layout[name] = (size, dtype, count)
        size += -(-count * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return layout, size


def _pinned(cuda: Any, count: int, dtype: type[Any]) -> IntArray:
    """Return `count` numbers of page-locked memory."""
    memory = cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count)
