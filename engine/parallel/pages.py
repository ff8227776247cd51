"""KV caches of a tensor-parallel model: every rank holds the same blocks, for its own heads."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from engine.cache.kv_cache import KVCache
from engine.cache.swap import SwapSpace
from engine.errors import RequestError
from engine.models.decoder import Pages, caches_address
from engine.parallel.rank import FREE, SHARE, pages_message

__all__ = ["SharedPages"]


class SharedPages:
    """Assigns numbers to rank 0's KV caches; the workers hold theirs under the same numbers.

    Parameters
    ----------
    send : callable
        `DriverRank.send`.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._by_number: dict[int, weakref.ref[KVCache]] = {}
        self._count = 0

    def share(self, kv_cache: KVCache, swap: SwapSpace | None = None) -> None:
        """Let the workers allocate the same blocks. The cache with host blocks must come first."""
        which = self._count
        numbers, arrays = pages_message(kv_cache, swap)
        self._send("making pages", SHARE, [which, *numbers], arrays)
        self._by_number[which] = weakref.ref(kv_cache)
        self._count += 1

    def free_closed(self) -> None:
        """Let the workers free the caches that were closed or garbage-collected here."""
        pages = [(which, reference()) for which, reference in self._by_number.items()]
        closed = [which for which, kv in pages if kv is None or kv.is_closed]
        for which in closed:
            del self._by_number[which]
        if closed:
            self._send("freeing pages", FREE, closed)

    def number_of(self, kv_pages: Pages) -> int:
        """Return the number of the cache with these pages.

        Raises
        ------
        RequestError
            If the workers hold no such cache.
        """
        first = caches_address(kv_pages)
        for which, reference in self._by_number.items():
            kv_cache = reference()
            if kv_cache is not None and caches_address(kv_cache.layers) == first:
                return which
        raise RequestError(
            "kv_pages must be the engine's, or of a cache of this model's new_cache, when several "
            "ranks share the model; got other pages"
        )
