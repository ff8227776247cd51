"""The pages that several ranks have: each has the same blocks, of its own heads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engine.cache.kv_cache import KVCache
from engine.errors import RequestError
from engine.models.decoder import Pages, address
from engine.parallel.rank import FREE, SHARE

__all__ = ["SharedPages"]


class Sender(Protocol):
    """Tells the other ranks; see `tensor_parallel.Leader`."""

    def send(
        self, what: str, kind: int, numbers: Sequence[int] = (), arrays: Sequence[Any] = ()
    ) -> None:
        """Announce something."""


class SharedPages:
    """Numbers rank 0's pages; the others have pages under the same numbers.

    Parameters
    ----------
    sender : Sender
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._by_number: dict[int, weakref.ref[KVCache]] = {}
        self._count = 0

    def share(self, kv_cache: KVCache, num_host_blocks: int = 0) -> None:
        """Let the others make pages as these; those with blocks on the host come first."""
        g = kv_cache.geometry
        which = self._count
        numbers = [which, kv_cache.num_blocks, num_host_blocks, g.block_size]
        dtype = np.frombuffer(g.dtype.encode(), np.uint8)
        self._sender.send("making pages", SHARE, numbers, [dtype])
        self._by_number[which] = weakref.ref(kv_cache)
        self._count += 1

    def free_closed(self) -> None:
        """Let the others free what was closed or forgotten here."""
        pages = [(which, reference()) for which, reference in self._by_number.items()]
        closed = [which for which, kv in pages if kv is None or kv.is_closed]
        for which in closed:
            del self._by_number[which]
        if closed:
            self._sender.send("freeing pages", FREE, closed)

    def number_of(self, kv_pages: Pages) -> int:
        """Return the number of these pages.

        Raises
        ------
        RequestError
            If the others have none like them.
        """
        first = address(kv_pages[0][0])
        for which, reference in self._by_number.items():
            kv_cache = reference()
            if kv_cache is not None and address(kv_cache.slab) == first:
                return which
        raise RequestError(
            "kv_pages must be the engine's, or of a cache of this model's new_cache, when several "
            "ranks share the model; got other pages"
        )
