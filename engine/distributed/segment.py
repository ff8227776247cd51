"""Shared memory of a group of ranks: states, last words, messages, and collective buffers.

The segment has no name: rank 0 passes its file descriptor to the processes that it starts, so
nothing is left behind, however they end.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np

from engine.errors import ConfigError, OutOfMemoryError

__all__ = ["Segment"]

IntArray = np.ndarray[Any, np.dtype[Any]]

MAX_RANKS = 64
_PAGE = 4096
_FIELDS = 16  # int64 fields per rank: 128 bytes, so that no two ranks share a cache line
_TEXT_BYTES = 256  # bytes of one description
_WORDS_BYTES = 8192  # bytes of a rank's last words
_ANSWER_BYTES = 2048  # bytes of a rank's answer about a background task
_DATA_BYTES = 1 << 20  # bytes of each of a rank's two buffers
_SLOT_BYTES = 1 << 18  # bytes of one slot of a message
_NUM_SLOTS = 8


class Segment:
    """The shared memory of one group, as arrays.

    Parameters
    ----------
    memory : (n,) array of uint8
        Zeros; n is `num_bytes(size)`.
    size : int
        Number of ranks.
    descriptor : int
        Descriptor of the mapped file; -1 for memory of this process alone.

    Attributes
    ----------
    group : (16,) int64
        Fields of the group: whether it is closing.
    ranks : (size, 16) int64
        Fields of each rank, which only that rank writes.
    texts : (size, 3, n) uint8
        Two descriptions of operations, used in turn, and the rank's current activity.
    words : (size, n) uint8
        The last words of each rank.
    answers : (size, n) uint8
        The error of each rank's last background task.
    data : (size, 2, n) uint8
        Two buffers of each rank, used in turn.
    slot_fields : (slots, 4) int64
        Number, size, remaining bytes and checksum of each slot.
    slots : (slots, n) uint8
        Ring of rank 0's messages.

    Examples
    --------
    >>> segment = Segment.in_process(2)
    >>> segment.ranks.shape, segment.data.shape
    ((2, 16), (2, 2, 1048576))
    """

    def __init__(self, memory: IntArray, size: int, descriptor: int = -1) -> None:
        self.size = size
        self.descriptor = descriptor
        self._next = 0
        self._memory = memory
        self.group = self._take((_FIELDS,), np.int64)
        self.ranks = self._take((size, _FIELDS), np.int64)
        self.texts = self._take((size, 3, _TEXT_BYTES), np.uint8)
        self.words = self._take((size, _WORDS_BYTES), np.uint8)
        self.answers = self._take((size, _ANSWER_BYTES), np.uint8)
        self.slot_fields = self._take((_NUM_SLOTS, 4), np.int64)
        self.slots = self._take((_NUM_SLOTS, _SLOT_BYTES), np.uint8)
        self.data = self._take((size, 2, _DATA_BYTES), np.uint8)

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the size of a segment for `size` ranks, in bytes."""
        return _PAGE * 64 + _NUM_SLOTS * _SLOT_BYTES + size * (2 * _DATA_BYTES + 4 * _PAGE)

    @classmethod
    def create(cls, size: int) -> Segment:
        """Return a new segment that children can map.

        Raises
        ------
        ConfigError
            If `size` is not in [1, 64].
        OutOfMemoryError
            If the host has too little shared memory.
        """
        if not 1 <= size <= MAX_RANKS:
            raise ConfigError(f"a group must have from 1 to {MAX_RANKS} ranks; got {size}")
        descriptor = _anonymous_file()
        try:
            os.ftruncate(descriptor, cls.num_bytes(size))
            if hasattr(os, "posix_fallocate"):  # fail now instead of with SIGBUS later
                os.posix_fallocate(descriptor, 0, cls.num_bytes(size))
            return cls.attach(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise OutOfMemoryError(
                f"no room for {cls.num_bytes(size)} bytes of shared memory ({error})"
            ) from error

    @classmethod
    def attach(cls, descriptor: int, size: int) -> Segment:
        """Map the segment with this descriptor."""
        mapped = mmap.mmap(descriptor, cls.num_bytes(size))
        return cls(np.frombuffer(mapped, np.uint8), size, descriptor)

    @classmethod
    def in_process(cls, size: int) -> Segment:
        """Return a segment for ranks that are threads of this process."""
        return cls(np.zeros(cls.num_bytes(size), np.uint8), size)

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as its arrays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _take(self, shape: tuple[int, ...], dtype: Any) -> IntArray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        part = self._memory[self._next : self._next + count]
        self._next += -(-count // _PAGE) * _PAGE
        taken: IntArray = part.view(dtype).reshape(shape)
        return taken


def _anonymous_file() -> int:
    """Return the descriptor of an unnamed file, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("engine-ranks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
