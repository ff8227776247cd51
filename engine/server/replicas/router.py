"""`PrefixRouter`: chooses the replica with the least work before a prompt's first token.

Work is counted in tokens: those already waiting at the replica, plus the prompt tokens that it has
not cached. The contents of its cache are estimated from the prompts sent to it; a wrong guess costs
a prefill, never a wrong answer. Pure integer code without I/O.

A prompt is represented by the hashes of its chunks; each hash also covers all earlier tokens. A
replica's chunks are kept in LRU order, like its own prefix tree, and using a chunk also uses all
chunks before it. So the chunks expected at a replica always form complete prefixes.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.errors import EngineError

__all__ = ["PrefixRouter", "Route", "chunk_hashes"]

_MAX_HOLDERS = 8  # maximum number of replicas compared that hold the longest known prefix


def chunk_hashes(token_ids: Sequence[int], chunk_size: int, salt: str | None = None) -> list[int]:
    """Return a 64-bit hash per full chunk, which covers the salt and all tokens up to its end.

    Hashes are identical in all processes.

    Examples
    --------
    >>> a, b = chunk_hashes([1, 2, 3, 4, 5], 2), chunk_hashes([1, 2, 3, 9], 2)
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, True, False)
    """
    data = array("i", token_ids).tobytes()
    size = 4 * chunk_size
    last = b"" if salt is None else blake2b(salt.encode("utf-8", "surrogatepass")).digest()
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        last = blake2b(last + data[start : start + size], digest_size=8).digest()
        hashes.append(int.from_bytes(last, "little"))
    return hashes


@dataclass(eq=False, slots=True)
class _Replica:
    """The router's view of a replica: estimated cache contents and load.

    `chunks` maps each chunk's hash to the number of the last route that used it, in ascending order
    of that number (LRU first). `pending` holds the numbers of routes whose prompts are not computed
    yet.
    """

    number: int
    capacity: int
    chunks: dict[int, int] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    own_tokens: int = 0
    other_tokens: int = 0
    num_requests: int = 0
    is_removed: bool = False

    @property
    def load(self) -> int:
        return self.own_tokens + self.other_tokens

    def depth(self, hashes: Sequence[int], known: int = 0) -> int:
        """Return the number of leading `hashes` cached here, which is at least `known`."""
        chunks = self.chunks
        low = known
        high = len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in chunks:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(eq=False, slots=True)
class Route:
    """Assignment of a request to a replica; only valid with the router that returned it.

    Attributes
    ----------
    replica : int
    num_cached_tokens : int
        Prompt tokens expected in the replica's cache.
    num_waiting_tokens : int
        Prompt tokens yet to be computed; 0 once they are.
    """

    replica: int
    num_cached_tokens: int
    num_waiting_tokens: int
    _owner: _Replica
    _number: int
    _hashes: list[int]
    _last_uses: list[int]  # number of the last route to use each expected chunk
    _is_open: bool = True


class PrefixRouter:
    """Chooses replicas, using a bounded estimate of their caches.

    Evictions are inferred in two ways. A replica holds at most `capacity` tokens, so the least
    recently used chunks beyond that are forgotten. And if an expected chunk turns out not to be
    cached, all chunks last used before it are forgotten too. Replicas do not report evictions: most
    concern prefixes that nobody requests again, and every replica would have to report to every
    router.

    Parameters
    ----------
    chunk_size : int
        Tokens per chunk; a multiple of the replicas' block size.
    max_chunks : int
        Maximum number of remembered chunks over all replicas.
    request_tokens : int
        Load of an unfinished request in addition to its prompt, in tokens, since it takes part in
        every step.

    Examples
    --------
    >>> router = PrefixRouter(chunk_size=2)
    >>> router.add_replica(0), router.add_replica(1)
    (None, None)
    >>> first = router.route([1, 2, 3, 4])
    >>> router.computed(first, 0), router.finished(first)
    (None, None)
    >>> second = router.route([1, 2, 3, 9])
    >>> second.replica == first.replica, second.num_cached_tokens
    (True, 2)
    """

    def __init__(
        self, *, chunk_size: int = 64, max_chunks: int = 1 << 18, request_tokens: int = 256
    ) -> None:
        self.chunk_size = chunk_size
        self.max_chunks = max_chunks
        self.request_tokens = request_tokens
        self._replicas: dict[int, _Replica] = {}
        self._order: list[_Replica] = []  # by replica number
        self._holders: dict[int, list[_Replica]] = {}  # chunk -> replicas expected to cache it
        self._by_load: list[
            tuple[int, int, _Replica]
        ] = []  # heap, may hold stale entries; see `_least_loaded`
        self._num_noted = 0  # tie-breaker: heap entries never compare replicas
        self._num_routes = 0

    # ---- replicas

    @property
    def replicas(self) -> list[int]:
        """Numbers of all replicas in ascending order."""
        return [replica.number for replica in self._order]

    @property
    def num_chunks(self) -> int:
        """Number of remembered chunks over all replicas."""
        return sum(len(replica.chunks) for replica in self._order)

    def load(self, replica: int) -> int:
        """Return a replica's waiting tokens, plus `request_tokens` per request."""
        return self._replicas[replica].load

    def num_requests(self, replica: int) -> int:
        """Return the number of unfinished requests that this router has sent to a replica."""
        return self._replicas[replica].num_requests

    def add_replica(self, replica: int, capacity: int = 1 << 62) -> None:
        """Add a replica with an empty cache of `capacity` tokens."""
        if replica in self._replicas:
            raise EngineError(f"replica must be a new number; got {replica}, which is there")
        new = _Replica(replica, capacity // self.chunk_size)
        self._replicas[replica] = new
        insort(self._order, new, key=lambda each: each.number)
        self._note_load(new)
        share = max(1, self.max_chunks // len(self._order))
        for each in self._order:
            if len(each.chunks) > share:
                self._shrink(each)

    def remove_replica(self, replica: int) -> None:
        """Remove a replica; `computed` and `finished` ignore its open routes from now on."""
        gone = self._replicas.pop(replica)
        gone.is_removed = True
        self._order.remove(gone)
        for chunk in gone.chunks:
            self._drop_holder(chunk, gone)
        gone.chunks.clear()

    def forget_prefixes(self) -> None:
        """Forget the contents of all replicas' caches."""
        self._holders.clear()
        for replica in self._order:
            replica.chunks.clear()

    def report_load(self, replica: int, num_waiting_tokens: int, num_requests: int) -> None:
        """Record the load that a replica reports, which includes requests from other routers."""
        found = self._replicas.get(replica)
        if found is None:
            return
        total = num_waiting_tokens + num_requests * self.request_tokens
        others = max(0, total - found.own_tokens)
        if others != found.other_tokens:
            found.other_tokens = others
            self._note_load(found)

    # ---- requests

    def route(
        self, token_ids: Sequence[int], salt: str | None = None, excluded: Collection[int] = ()
    ) -> Route | None:
        """Choose a replica for a prompt; it counts as that replica's load until `finished`.

        Parameters
        ----------
        token_ids : sequence of int
        salt : str, optional
            Prompts with different salts never share cached prefixes.
        excluded : collection of int
            Replicas that must not be chosen.

        Returns
        -------
        Route or None
            None if every replica is excluded.
        """
        hashes = chunk_hashes(token_ids, self.chunk_size, salt)
        chosen = None
        depth = 0
        least = 0
        for replica in self._candidates(hashes, excluded):
            found = replica.depth(hashes)
            cost = replica.load - found * self.chunk_size
            if chosen is None or cost < least:
                chosen = replica
                depth = found
                least = cost
        if chosen is None:
            return None
        self._num_routes += 1
        number = self._num_routes
        last_uses = [chosen.chunks[chunk] for chunk in hashes[:depth]]
        self._use(chosen, hashes, number)
        num_cached = min(depth * self.chunk_size, max(0, len(token_ids) - 1))
        num_waiting = len(token_ids) - num_cached
        chosen.pending.add(number)
        chosen.num_requests += 1
        chosen.own_tokens += num_waiting + self.request_tokens
        self._note_load(chosen)
        return Route(chosen.number, num_cached, num_waiting, chosen, number, hashes, last_uses)

    def computed(self, route: Route, num_cached_tokens: int) -> None:
        """Record that a prompt has been computed, and how many of its tokens were cached."""
        owner = route._owner
        if owner.is_removed or not route.num_waiting_tokens:
            return
        num_tokens = route.num_cached_tokens + route.num_waiting_tokens
        owner.pending.discard(route._number)
        owner.own_tokens -= route.num_waiting_tokens
        route.num_waiting_tokens = 0
        self._note_load(owner)
        # The engine always recomputes the block of the last token.
        num_expected = min(len(route._last_uses), (num_tokens - 1) // self.chunk_size)
        num_found = num_cached_tokens // self.chunk_size
        if num_found < num_expected:
            missed = route._last_uses[num_found]
            if missed not in owner.pending:  # it had been computed, so it must have been evicted
                self._forget_until(owner, missed)

    def finished(self, route: Route) -> None:
        """Record that a request has ended, computed or not; further calls do nothing."""
        owner = route._owner
        if owner.is_removed or not route._is_open:
            return
        route._is_open = False
        owner.own_tokens -= route.num_waiting_tokens + self.request_tokens
        owner.num_requests -= 1
        if route.num_waiting_tokens:
            owner.pending.discard(route._number)
            for chunk in reversed(route._hashes[len(route._last_uses) :]):
                if owner.chunks.get(chunk) == route._number:
                    self._forget(owner, chunk)
        self._note_load(owner)

    # ---- internals

    def _candidates(self, hashes: list[int], excluded: Collection[int]) -> Iterator[_Replica]:
        """Yield a few candidates that include the best choice, however many replicas exist."""
        if hashes:
            # Hash-based preference: independent routers send equal prompts to the same replica.
            preferred = self._order[hashes[0] % len(self._order)] if self._order else None
            if preferred is not None and preferred.number not in excluded:
                yield preferred
        depth = self._depth(hashes)
        holders = self._holders[hashes[depth - 1]] if depth else []
        for replica in holders[:_MAX_HOLDERS]:
            if replica.number not in excluded:
                yield replica
        least = self._least_loaded(excluded)
        if least is not None:
            yield least

    def _depth(self, hashes: Sequence[int]) -> int:
        """Return the maximum number of leading `hashes` cached at any replica."""
        holders = self._holders
        low = 0
        high = len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in holders:
                low = middle + 1
            else:
                high = middle
        return low

    def _least_loaded(self, excluded: Collection[int]) -> _Replica | None:
        """Return the replica with the lowest load; stale heap entries are skipped."""
        heap = self._by_load
        kept = []
        found = None
        while heap and found is None:
            load, _, replica = heap[0]
            if replica.is_removed or replica.load != load:
                heapq.heappop(heap)
            elif replica.number in excluded:
                kept.append(heapq.heappop(heap))
            else:
                found = replica
        for entry in kept:
            heapq.heappush(heap, entry)
        return found

    def _note_load(self, replica: _Replica) -> None:
        self._num_noted += 1
        heapq.heappush(self._by_load, (replica.load, self._num_noted, replica))
        if len(self._by_load) > 4 * len(self._order) + 64:
            self._by_load = [(each.load, -each.number, each) for each in self._order]
            heapq.heapify(self._by_load)

    def _use(self, replica: _Replica, hashes: list[int], number: int) -> None:
        """Mark these chunks as used, last one first, so that prefixes outlive continuations."""
        chunks = replica.chunks
        holders = self._holders
        for chunk in reversed(hashes):
            if chunks.pop(chunk, None) is None:
                holders.setdefault(chunk, []).append(replica)
            chunks[chunk] = number
        self._shrink(replica)

    def _limit(self, replica: _Replica) -> int:
        return min(replica.capacity, max(1, self.max_chunks // len(self._order)))

    def _shrink(self, replica: _Replica) -> None:
        limit = self._limit(replica)
        while len(replica.chunks) > limit:
            self._forget(replica, next(iter(replica.chunks)))

    def _forget_until(self, replica: _Replica, number: int) -> None:
        """Forget the chunks last used by route `number` or earlier."""
        while replica.chunks:
            chunk, used = next(iter(replica.chunks.items()))
            if used > number:
                return
            self._forget(replica, chunk)

    def _forget(self, replica: _Replica, chunk: int) -> None:
        del replica.chunks[chunk]
        self._drop_holder(chunk, replica)

    def _drop_holder(self, chunk: int, replica: _Replica) -> None:
        holders = self._holders[chunk]
        holders.remove(replica)
        if not holders:
            del self._holders[chunk]

    def check_integrity(self) -> None:
        """Check that the tables are consistent and within bounds.

        Raises
        ------
        EngineError
            If they are not; the message names the inconsistency.
        """
        pairs = {(chunk, each.number) for each in self._order for chunk in each.chunks}
        held = [(chunk, each.number) for chunk, found in self._holders.items() for each in found]
        _verify(len(held) == len(set(held)) and set(held) == pairs, "holders are not the chunks'")
        _verify(all(self._holders.values()), "a chunk without a holder is kept")
        _verify(set(self._order) == set(self._replicas.values()), "the lists of replicas differ")
        entries = {(load, each) for load, _, each in self._by_load}
        _verify(len(self._by_load) <= 4 * len(self._order) + 64, "the heap of loads is too large")
        for each in self._order:
            name = f"replica {each.number}"
            _verify((each.load, each) in entries, f"{name} is not in the heap of loads")
            _verify(len(each.chunks) <= self._limit(each), f"{name} has more than its chunks")
            _verify(list(each.chunks.values()) == sorted(each.chunks.values()), f"{name}: no order")
            least = each.num_requests * self.request_tokens + len(each.pending)
            _verify(each.own_tokens >= least, f"{name} has fewer tokens than requests")
            _verify(len(each.pending) <= each.num_requests, f"{name} waits for ended routes")


def _verify(is_right: bool, what: str) -> None:
    if not is_right:
        raise EngineError(f"the router is inconsistent: {what}")
