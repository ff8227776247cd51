"""Inputs of decode steps at fixed addresses, filled by one host-to-device copy per step.

A captured graph always reads the same addresses, so all inputs of a decode step live in one device
buffer. The host writes them to a staging buffer in pinned memory and copies the used part. Several
staging buffers take turns, because copies of earlier steps may still be in flight while the next
step is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.device import Device
from engine.layers.lora import NO_ADAPTER
from engine.runner.transfer import DeviceToHostCopy

__all__ = ["NUM_BUFFERS", "StagingBuffer", "StaticInputs"]

IntArray = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 16  # bytes; alignment of every field
NUM_BUFFERS = 4  # staging buffers; more than the number of steps in flight in one process

# Name -> dtype and padding value. The block ids ("new_blocks") follow these fields.
_TOKEN_FIELDS: dict[str, tuple[str, float]] = {
    "seeds": ("uint64", 0),
    "tree_mask": ("uint64", 0),
    "sample_positions": ("int64", 0),
    "token_ids": ("int32", 0),
    "positions": ("int32", 0),
    "rope_positions": ("int32", 0),
    "top_k": ("int32", 0),
    "temperature": ("float32", 0),
    "top_p": ("float32", 1),
    "min_p": ("float32", 0),
}
_SEQUENCE_FIELDS: dict[str, tuple[str, float]] = {
    "rows": ("int32", -1),
    "context_lens": ("int32", 0),
    "new_starts": ("int32", 0),
}
# Only for models with recurrent layers.
_STATE_TOKEN_FIELDS: dict[str, tuple[str, float]] = {"state_targets": ("int32", -1)}
_STATE_SEQUENCE_FIELDS: dict[str, tuple[str, float]] = {"state_slots": ("int32", -1)}
# Only for models with slots for LoRA adapters.
_ADAPTER_TOKEN_FIELDS: dict[str, tuple[str, float]] = {"adapter_slots": ("int32", NO_ADAPTER)}
_ALL_TOKEN_FIELDS = _TOKEN_FIELDS | _STATE_TOKEN_FIELDS | _ADAPTER_TOKEN_FIELDS
_FIELDS = _ALL_TOKEN_FIELDS | _SEQUENCE_FIELDS | _STATE_SEQUENCE_FIELDS


class StagingBuffer:
    """Host memory for one step's inputs, by name, and for its results.

    SAFETY: the device uses it from `StaticInputs.send` until the event `done`, recorded by `read`
    or `release`, has completed.

    Attributes
    ----------
    fields : dict of str to array
        One entry per token or per sequence; "cu_new_blocks" has one more, "new_blocks" as many as
        a step can send.
    results : (2 * max_tokens,) int32
    holds : object
        Identifies content that a later step can reuse; None if there is none.
    has_blocks : bool
        Whether "cu_new_blocks" may be nonzero.
    """

    def __init__(self, memory: IntArray, fields: dict[str, IntArray], results: IntArray) -> None:
        self.memory = memory
        self.fields = fields
        self.results = results
        self.holds: object = None
        self.has_blocks = True
        self.done: Any = None
        # Cached: getting an address from NumPy takes microseconds.
        self.address = memory.ctypes.data
        self.results_address = results.ctypes.data

    def fill(self, num_sequences: int, size: int, query_len: int = 1, /, **columns: Any) -> None:
        """Write the fields `columns` for `num_sequences` sequences, and pad up to `size`.

        `query_len`: entries per sequence in fields with one entry per token.
        """
        for name, column in columns.items():
            width = query_len if name in _ALL_TOKEN_FIELDS else 1
            field = self.fields[name]
            field[: num_sequences * width] = column
            field[num_sequences * width : size * width] = _FIELDS[name][1]

    def pad(self, num_sequences: int, size: int, query_len: int) -> None:
        """Write padding to all fields, from `num_sequences` up to `size` sequences."""
        for name in self.fields.keys() & _FIELDS.keys():
            width = query_len if name in _ALL_TOKEN_FIELDS else 1
            self.fields[name][num_sequences * width : size * width] = _FIELDS[name][1]

    def fill_blocks(self, counts: IntArray, size: int) -> IntArray:
        """Write and return the offsets of each sequence's new blocks, (len(counts) + 1,)."""
        offsets = self.fields["cu_new_blocks"]
        self.has_blocks = True
        offsets[0] = 0
        np.cumsum(counts, out=offsets[1 : len(counts) + 1])
        offsets[len(counts) + 1 : size + 1] = offsets[len(counts)]
        return offsets[: len(counts) + 1]

    def fill_no_blocks(self) -> None:
        """Zero the offsets of new blocks, for a batch of any size that has none."""
        if self.has_blocks:
            self.fields["cu_new_blocks"][:] = 0
            self.has_blocks = False


class StaticInputs:
    """The device buffer, and host staging buffers with the same layout.

    Parameters
    ----------
    device : Device
        On the CPU, the buffer is its own staging buffer.
    max_sequences, max_tokens : int
        Limits per step.
    max_new_blocks : int
        Maximum block ids sent per step.
    has_states : bool
        Whether the model has recurrent layers.
    has_adapters : bool
        Whether the model has slots for LoRA adapters.
    num_buffers : int
        Number of staging buffers; more than the number of steps whose results are not read yet.

    Attributes
    ----------
    arrays : dict of str to array
        Fields of `StagingBuffer.fields`, on the device.
    results : (2 * max_tokens,) int32, on the device

    Examples
    --------
    >>> from engine.device import CPU
    >>> inputs = StaticInputs(CPU, max_sequences=4, max_tokens=4, max_new_blocks=8)
    >>> buffer = inputs.next_buffer()
    >>> buffer.fill(1, 2, rows=[7], top_p=[0.5])
    >>> inputs.send(buffer, num_new_blocks=0)
    >>> inputs.arrays["rows"][:2], inputs.arrays["top_p"][:2]
    (array([ 7, -1], dtype=int32), array([0.5, 1. ], dtype=float32))
    """

    def __init__(
        self,
        device: Device,
        max_sequences: int,
        max_tokens: int,
        max_new_blocks: int,
        *,
        has_states: bool = False,
        has_adapters: bool = False,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self._device = device
        self._stream: Any = device.xp.cuda.get_current_stream if device.is_cuda else None
        self._max_tokens = max_tokens
        by_token = _TOKEN_FIELDS | (_STATE_TOKEN_FIELDS if has_states else {})
        by_token |= _ADAPTER_TOKEN_FIELDS if has_adapters else {}
        by_sequence = _SEQUENCE_FIELDS | (_STATE_SEQUENCE_FIELDS if has_states else {})
        sizes = {name: (dtype, max_tokens) for name, (dtype, _) in by_token.items()}
        sizes |= {name: (dtype, max_sequences) for name, (dtype, _) in by_sequence.items()}
        sizes["cu_new_blocks"] = ("int32", max_sequences + 1)
        self._layout, self._base = _layout(sizes)
        num_bytes = self._base + 4 * max_new_blocks
        xp = device.xp
        self._memory = xp.zeros(num_bytes, np.uint8)
        self.arrays = self._views(self._memory)
        self.results = xp.zeros(2 * max_tokens, np.int32)
        count = num_buffers if device.is_cuda else 1
        self._buffers = [self._staging_buffer(num_bytes) for _ in range(count)]
        self._next = 0
        first = self.next_buffer()
        first.fill(0, max_tokens, 1, **dict.fromkeys(by_token, ()))
        first.fill(0, max_sequences, 1, **dict.fromkeys(by_sequence, ()))
        first.fill_blocks(np.zeros(0, np.int64), max_sequences)
        self.send(first, 0)

    def next_buffer(self) -> StagingBuffer:
        """Return the staging buffer for the next step, once its last use has ended."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.done is not None and not buffer.done.done:
            buffer.done.synchronize()
        return buffer

    def send(self, buffer: StagingBuffer, num_new_blocks: int) -> None:
        """Copy the used part of `buffer` to the device, asynchronously on the current stream."""
        if self._device.is_cuda:
            num_bytes = self._base + 4 * num_new_blocks
            self._memory.data.copy_from_host_async(buffer.address, num_bytes, self._stream())

    def used(self, buffer: StagingBuffer, num_new_blocks: int) -> Any:
        """Return the part of `buffer` that `send` copies, as bytes."""
        return buffer.memory[: self._base + 4 * num_new_blocks]

    def load(self, data: Any) -> StagingBuffer:
        """Stage and send bytes that `used` returned in another process."""
        buffer = self.next_buffer()
        buffer.memory[: len(data)] = data
        buffer.holds = None
        buffer.has_blocks = True
        self.send(buffer, (len(data) - self._base) // 4)
        return buffer

    def read(self, buffer: StagingBuffer, num_tokens: int, size: int) -> DeviceToHostCopy:
        """Copy `results`, (2, size), to the host; return the first `num_tokens` of both rows."""
        if not self._device.is_cuda:
            rows = self.results[: 2 * size].reshape(2, size)[:, :num_tokens].copy()
            return DeviceToHostCopy(self._device, {"token_ids": rows[0], "status": rows[1]})
        stream = self._stream()
        self.results.data.copy_to_host_async(buffer.results_address, 8 * size, stream)
        buffer.done.record(stream)
        rows = buffer.results[: 2 * size].reshape(2, size)[:, :num_tokens]
        return DeviceToHostCopy.of(buffer.done, {"token_ids": rows[0], "status": rows[1]})

    def release(self, buffer: StagingBuffer) -> None:
        """Make `buffer` reusable after its host-to-device copy, without reading results."""
        if buffer.done is not None:
            buffer.done.record(self._stream())

    def _staging_buffer(self, num_bytes: int) -> StagingBuffer:
        if not self._device.is_cuda:
            return StagingBuffer(self._memory, self.arrays, self.results)
        cuda = self._device.xp.cuda
        memory = _pinned(cuda, num_bytes, np.uint8)
        buffer = StagingBuffer(
            memory, self._views(memory), _pinned(cuda, 2 * self._max_tokens, np.int32)
        )
        buffer.done = cuda.Event(disable_timing=True)
        return buffer

    def _views(self, memory: Any) -> dict[str, Any]:
        views = {
            name: memory[start : start + count * np.dtype(dtype).itemsize].view(dtype)
            for name, (start, dtype, count) in self._layout.items()
        }
        views["new_blocks"] = memory[self._base :].view(np.int32)
        return views


def _layout(
    sizes: Mapping[str, tuple[str, int]],
) -> tuple[dict[str, tuple[int, str, int]], int]:
    """Return name -> (byte offset, dtype, length), and the total number of bytes.

    `sizes`: name -> (dtype, length).
    """
    layout = {}
    size = 0
    for name, (dtype, count) in sizes.items():
        layout[name] = (size, dtype, count)
        size += -(-count * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return layout, size


def _pinned(cuda: Any, count: int, dtype: type[Any]) -> IntArray:
    """Return an array of `count` elements in pinned memory."""
    memory = cuda.alloc_pinned_memory(max(1, count) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count)
