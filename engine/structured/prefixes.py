"""Common prefixes of several requests' outputs, and the masks after them.

Two states of one grammar that have consumed the same ids are equal. While outputs agree, as at the
start of a text described by a schema, a mask is computed once for all requests, and stored for
later ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["MaskStore", "Prefix", "PrefixTree"]

MaskArray = np.ndarray[Any, np.dtype[np.int32]]

_MAX_STORED_BYTES = 64 << 20
_MAX_PREFIXES = 4096  # maximum prefixes per grammar


class Prefix:
    """The first ids of one or more requests' outputs.

    Attributes
    ----------
    children : dict of int to Prefix
        Prefixes longer by one id.
    num_visits : int
        Number of outputs that began with this prefix.
    """

    __slots__ = ("children", "num_visits")

    def __init__(self) -> None:
        self.children: dict[int, Prefix] = {}
        self.num_visits = 0

    def along(self, token_ids: Iterable[int]) -> list[Prefix]:
        """Return this prefix and its known extensions by 1, 2, ... of `token_ids`."""
        prefixes = [self]
        for token_id in token_ids:
            longer = prefixes[-1].children.get(token_id)
            if longer is None:
                break
            prefixes.append(longer)
        return prefixes


class PrefixTree:
    """The prefixes of one grammar's outputs.

    A request adds at most one prefix, where it departs from the others: ids that only one request
    has generated need none. Beyond `_MAX_PREFIXES`, new requests start a new tree.

    Examples
    --------
    >>> tree = PrefixTree()
    >>> first, second = tree.start(), tree.start()
    >>> first is second, tree.after(first, 7) is tree.after(second, 7)
    (True, True)
    >>> tree.after(tree.after(first, 8), 9) is None  # only one has reached 8
    True
    """

    def __init__(self) -> None:
        self._root = Prefix()
        self._num_prefixes = 1

    def start(self) -> Prefix:
        """Return the empty prefix."""
        if self._num_prefixes > _MAX_PREFIXES:
            self._root = Prefix()
            self._num_prefixes = 1
        self._root.num_visits += 1
        return self._root

    def after(self, prefix: Prefix, token_id: int) -> Prefix | None:
        """Return `prefix` extended by one id; None if no other request can share it."""
        longer = prefix.children.get(token_id)
        if longer is None:
            if prefix.num_visits < 2:
                return None
            longer = prefix.children[token_id] = Prefix()
            self._num_prefixes += 1
        longer.num_visits += 1
        return longer


class MaskStore:
    """LRU cache of the masks after shared prefixes.

    Parameters
    ----------
    max_bytes : int
    """

    def __init__(self, max_bytes: int = _MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._masks: OrderedDict[Prefix, MaskArray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._masks)

    def get(self, prefix: Prefix) -> MaskArray | None:
        """Return the mask (ceil(V/32),) after `prefix`, read-only; None if not stored."""
        mask = self._masks.get(prefix)
        if mask is not None:
            self._masks.move_to_end(prefix)
        return mask

    def add(self, prefix: Prefix, mask: MaskArray) -> None:
        """Store a copy of `mask` if a second request has reached `prefix`."""
        if prefix.num_visits < 2:
            return
        self._masks[prefix] = mask.copy()
        while len(self._masks) * mask.nbytes > self._max_bytes:
            self._masks.popitem(last=False)
