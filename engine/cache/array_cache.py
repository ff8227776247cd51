"""`Cache`: the KV cache of the array door, one sequence a row, rows that own their blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.memory_pool import MemoryPool
from engine.device import CPU, Device
from engine.errors import RequestError

__all__ = ["Cache"]


class Cache:
    """Pages for a fixed number of sequences of bounded length.

    Made by `Model.new_cache`, filled by `Model.step`. Row b owns the blocks [b * n, (b + 1) * n)
    from the start, so nothing is allocated later.

    Parameters
    ----------
    geometry : KVGeometry
    batch_size : int
        B.
    max_tokens : int
        Most tokens of a row.
    device : Device
        Where the pages live.
    owner : object
        Who may fill it; told apart by identity.

    Attributes
    ----------
    block_tables : (B, n) array of int32
        On the host.
    pages : list of (k_pages, v_pages)
        Of every layer, (B * n, K, block_size, D) each.

    Examples
    --------
    >>> cache = Cache(KVGeometry(num_layers=1, num_kv_heads=2, head_dim=8), 2, max_tokens=40)
    >>> cache.block_tables.tolist(), cache.lengths.tolist()
    ([[0, 1, 2], [3, 4, 5]], [0, 0])
    """

    def __init__(
        self,
        geometry: KVGeometry,
        batch_size: int,
        max_tokens: int,
        device: Device = CPU,
        owner: object = None,
    ) -> None:
        blocks = -(-max_tokens // geometry.block_size)
        self._kv = KVCache(geometry, batch_size * blocks, MemoryPool(device))
        self._lengths = np.zeros(batch_size, np.int32)
        self.owner = owner
        self.max_tokens = max_tokens
        self.pages = self._kv.layers
        self.block_tables = np.arange(batch_size * blocks, dtype=np.int32).reshape(batch_size, -1)

    @property
    def batch_size(self) -> int:
        """B: the number of rows."""
        return len(self._lengths)

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self._kv.geometry.block_size

    @property
    def device(self) -> Device:
        """Where the pages live."""
        return self._kv.device

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens in each row, (B,) int32 (a copy)."""
        return np.array(self._lengths)

    def check_room(self, num_tokens: int) -> None:
        """Verify that every row can take `num_tokens` more.

        Raises
        ------
        RequestError
            If the cache was closed, or naming the row, what it holds, what was given and the limit.
        """
        if not self.pages:
            raise RequestError("cache: was closed")
        row = int(self._lengths.argmax())
        held = int(self._lengths[row])
        if held + num_tokens > self.max_tokens:
            raise RequestError(
                f"cache: row {row} holds {held} tokens and {num_tokens} more were given, but the "
                f"cache was made for max_tokens={self.max_tokens}"
            )

    def append(self, num_tokens: int) -> None:
        """Count `num_tokens` more in every row; their keys and values are in the pages."""
        self._lengths += num_tokens

    def truncate(self, num_tokens: int, row: int | None = None) -> None:
        """Forget all but the first `num_tokens` tokens of a row, or of every row.

        Raises
        ------
        RequestError
            If a row has fewer tokens, or there is no such row.
        """
        if row is not None and not (_is_int(row) and 0 <= row < self.batch_size):
            raise RequestError(f"row must be in [0, {self.batch_size}); got {row!r}")
        rows = slice(None) if row is None else slice(row, row + 1)
        shortest = int(self._lengths[rows].min())
        if not (_is_int(num_tokens) and 0 <= num_tokens <= shortest):
            raise RequestError(
                f"num_tokens must be from 0 to the {shortest} tokens there are; got {num_tokens!r}"
            )
        self._lengths[rows] = num_tokens

    def reset(self) -> None:
        """Forget everything; the pages stay."""
        self._lengths[:] = 0

    def close(self) -> None:
        """Give the pages back."""
        self.pages = []
        self._kv.close()

    def __repr__(self) -> str:
        return f"<Cache {self.lengths.tolist()} of {self.max_tokens} tokens on {self.device}>"


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
