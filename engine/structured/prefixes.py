"""What the outputs of several requests begin with, and the masks made after it.

Two states of one grammar that have consumed the same ids are the same. Where requests agree, at the
start of a text that a schema describes for example, a mask is therefore made once for all of them,
and kept for those that come later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["MaskStore", "Prefix", "PrefixTree"]

MaskArray = np.ndarray[Any, np.dtype[np.int32]]

_MAX_STORED_BYTES = 64 << 20
_MAX_PREFIXES = 4096  # of one grammar


class Prefix:
    """Output ids with which at least one request has begun.

    Attributes
    ----------
    children : dict of int to Prefix
        The prefixes that are one id longer.
    num_visits : int
        How many outputs have begun with it.
    """

    __slots__ = ("children", "num_visits")

    def __init__(self) -> None:
        self.children: dict[int, Prefix] = {}
        self.num_visits = 0

    def along(self, token_ids: Iterable[int]) -> list[Prefix]:
        """Return this prefix, and those with more and more of `token_ids`, as far as there are."""
        prefixes = [self]
        for token_id in token_ids:
            longer = prefixes[-1].children.get(token_id)
            if longer is None:
                break
            prefixes.append(longer)
        return prefixes


class PrefixTree:
    """The prefixes of one grammar's outputs.

    A request adds at most one, where it leaves the others: what only one request has written needs
    none. When there are too many, the next requests start a new tree.

    Examples
    --------
    >>> tree = PrefixTree()
    >>> first, second = tree.start(), tree.start()
    >>> first is second, tree.after(first, 7) is tree.after(second, 7)
    (True, True)
    >>> tree.after(tree.after(first, 8), 9) is None  # only one has come to 8
    True
    """

    def __init__(self) -> None:
        self._root = Prefix()
        self._num_prefixes = 1

    def start(self) -> Prefix:
        """Return the prefix of no ids."""
        if self._num_prefixes > _MAX_PREFIXES:
            self._root = Prefix()
            self._num_prefixes = 1
        self._root.num_visits += 1
        return self._root

    def after(self, prefix: Prefix, token_id: int) -> Prefix | None:
        """Return `prefix` and this id; None if no other request may have both."""
        longer = prefix.children.get(token_id)
        if longer is None:
            if prefix.num_visits < 2:
                return None
            longer = prefix.children[token_id] = Prefix()
            self._num_prefixes += 1
        longer.num_visits += 1
        return longer


class MaskStore:
    """Masks after prefixes that several requests have; those not used for long are dropped.

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
        """Return the mask (ceil(V/32),) after `prefix`, not to be changed; None if none is kept."""
        mask = self._masks.get(prefix)
        if mask is not None:
            self._masks.move_to_end(prefix)
        return mask

    def add(self, prefix: Prefix, mask: MaskArray) -> None:
        """Keep a copy of `mask` if a second request has come to `prefix`."""
        if prefix.num_visits < 2:
            return
        self._masks[prefix] = mask.copy()
        while len(self._masks) * mask.nbytes > self._max_bytes:
            self._masks.popitem(last=False)
