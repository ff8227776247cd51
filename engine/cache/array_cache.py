"""`Cache`: the KV cache of `Model.step`; one sequence per row, each with a fixed set of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.memory_pool import MemoryPool
from engine.checks import is_integer, shown
from engine.device import CPU, Device, to_numpy
from engine.errors import RequestError

__all__ = ["Cache"]


class Cache:
    """Pages for a fixed number of sequences of bounded length.

    Built by `Model.new_cache`, filled by `Model.step`. Row b owns the blocks [b * n, (b + 1) * n)
    from the start, so nothing is allocated later.

    Parameters
    ----------
    geometry : KVGeometry
        Shape and dtype of the pages.
    batch_size : int
        B, the number of rows.
    max_tokens : int
        Maximum number of tokens per row.
    device : Device
        Device of the pages.
    owner : object
        Identifies the model allowed to fill the cache; compared with `is`.

    Attributes
    ----------
    kv : KVCache
        The blocks of all rows.
    block_tables : (B, n) array of int32
        Block ids of each row, on the host.
    pages : list of (k_pages, v_pages)
        The pages of every layer, (B * n, K, block_size, D) each.
    rope_offsets : (B,) array of int32
        First row of the rope table with which the keys of each row are rotated; -1 if they must be
        computed anew.
    state_slots : (B,) array of int32, or None
        State slot of each row; None if no layer has a state.
    adapter_slots : (B,) array of int32, or None
        Slot of each row's LoRA adapter; None if no row has one.
    token_ids : (B, max_tokens) array of int32
        Ids of the tokens, on the host; (B, 0) unless `keep_token_ids` was called.

    Examples
    --------
    >>> geometry = KVGeometry.uniform(num_layers=1, num_kv_heads=2, head_dim=8)
    >>> cache = Cache(geometry, batch_size=2, max_tokens=40)
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
        num_slots = batch_size if geometry.has_states else 0
        self.kv = KVCache(geometry, batch_size * blocks, MemoryPool(device), num_slots=num_slots)
        self._lengths = np.zeros(batch_size, np.int32)
        self.owner = owner
        self.max_tokens = max_tokens
        self.pages = self.kv.layers
        self.block_tables = np.arange(batch_size * blocks, dtype=np.int32).reshape(batch_size, -1)
        self.rope_offsets = np.zeros(batch_size, np.int32)
        self.state_slots = self.kv.first_slots(batch_size)
        self.adapter_slots: np.ndarray[Any, np.dtype[np.int32]] | None = None
        self.token_ids = np.zeros((batch_size, 0), np.int32)

    @property
    def batch_size(self) -> int:
        """B: the number of rows."""
        return len(self._lengths)

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.kv.geometry.block_size

    @property
    def device(self) -> Device:
        """Device of the pages."""
        return self.kv.device

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens in each row, (B,) int32 (a copy)."""
        return np.array(self._lengths)

    def check_room(self, num_tokens: int) -> None:
        """Check that every row has room for `num_tokens` more.

        Raises
        ------
        RequestError
            If the cache was closed, or a row would exceed `max_tokens`.
        """
        if not self.pages:
            raise RequestError("cache must be open; it was closed")
        row = int(self._lengths.argmax())
        held = int(self._lengths[row])
        if held + num_tokens > self.max_tokens:
            raise RequestError(
                f"token_ids must fit into the cache, made for max_tokens={self.max_tokens}; "
                f"got {num_tokens} for row {row}, which holds {held}"
            )

    def keep_token_ids(self) -> None:
        """Keep the ids of all tokens appended from now on, so that they can be computed anew."""
        self.token_ids = np.zeros((self.batch_size, self.max_tokens), np.int32)

    def append(self, num_tokens: int, token_ids: Any = None) -> None:
        """Extend every row by `num_tokens` whose keys and values are now in the pages.

        `token_ids`: their ids (B, num_tokens), needed after `keep_token_ids`.
        """
        if self.token_ids.size:
            places = self._lengths[:, None] + np.arange(num_tokens)
            np.put_along_axis(self.token_ids, places, token_ids, axis=1)
        self._lengths += num_tokens

    def truncate(self, num_tokens: int, row: int | None = None) -> None:
        """Drop all but the first `num_tokens` tokens of a row, or of every row.

        Raises
        ------
        RequestError
            If a row holds fewer tokens, or the row does not exist; or if it would keep some of its
            tokens and the model has recurrent layers, whose states cannot be rolled back.
        """
        if row is not None and not (is_integer(row) and 0 <= row < self.batch_size):
            raise RequestError(f"row must be in [0, {self.batch_size}); got {shown(row)}")
        rows = slice(None) if row is None else slice(row, row + 1)
        shortest = int(self._lengths[rows].min())
        if not (is_integer(num_tokens) and 0 <= num_tokens <= shortest):
            raise RequestError(
                f"num_tokens must be in [0, {shortest}], the tokens held; got {shown(num_tokens)}"
            )
        if self.state_slots is not None and num_tokens:
            longest = int(self._lengths[rows].max())
            if longest > num_tokens:
                raise RequestError(
                    "num_tokens must be 0 or the row's length: recurrent states cannot be rolled "
                    f"back; got {num_tokens} for a row of {longest}"
                )
        self._lengths[rows] = num_tokens

    def peaks(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the largest magnitude of keys and values by layer and head, (layers, 2, K).

        Only for floating-point pages. Slots that were never written are zero, and so are layers
        without keys.
        """
        shapes = [layer.pages for layer in self.kv.geometry.layers]
        num_heads = max(page.num_heads for pages in shapes for page in pages)
        found = np.zeros((len(shapes), 2, num_heads), np.float32)
        for layer, pages, arrays in zip(found, shapes, self.kv.layers, strict=True):
            for row, part in zip(layer, arrays[: len(pages)], strict=False):
                row[: part.shape[1]] = to_numpy(abs(part.astype(np.float32)).max(axis=(0, 2, 3)))
        return found

    def reset(self) -> None:
        """Drop all tokens; the pages stay allocated."""
        self._lengths[:] = 0

    def close(self) -> None:
        """Free the pages."""
        self.pages = []
        self.kv.close()

    def __repr__(self) -> str:
        return f"<Cache {self.lengths.tolist()} of {self.max_tokens} tokens on {self.device}>"
