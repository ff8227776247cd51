"""Draft tokens: proposed next tokens of a sequence, verified by one step of the model.

A step computes a sequence's last known token and its drafts together, and samples at each of them.
A draft is accepted if it equals the token sampled at its parent, the token before it; the token
sampled at the last accepted draft is a valid next token too. Draws are keyed by seed and position,
so the tokens equal those of decoding one by one, whatever was proposed: bit for bit with
`deterministic=True`, otherwise up to rounding of the logits, which may decide a near tie.

The rows of logits of a sequence with drafts: row 0 belongs to the last known token, row 1 + i to
draft i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from engine.errors import RequestError

__all__ = ["MAX_QUERY_LEN", "DeferredDrafts", "DraftIds", "Drafts"]

MAX_QUERY_LEN = 64
"""Maximum query tokens of a sequence with a tree of drafts: the number of bits of a tree mask."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that may follow a sequence: a chain, or a tree of alternatives.

    Parameters
    ----------
    token_ids : tuple of int
    parents : tuple of int, optional
        For each draft, the index of its parent, an earlier draft; -1: the last known token. None
        means a chain.

    Examples
    --------
    >>> tree = Drafts((5, 6, 7), parents=(-1, -1, 0))  # 5 or 6; after 5 comes 7
    >>> tree.accepted_rows([5, 7, 0, 9])  # sampled at each row
    [0, 1, 3]
    >>> tree.depths, tree.path(3)
    ((1, 1, 2), (5, 7))
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Verify ids and parents; the constructor does, too.

        Raises
        ------
        RequestError
            If they are not whole numbers, or do not form a tree.
        """
        ids = self.token_ids
        parents = self.parents
        if not all([(type(i) is int or _is_whole(i)) and i >= 0 for i in ids]):
            raise RequestError(f"draft token_ids must be whole numbers >= 0; got {ids}")
        if parents is None:
            return
        if len(parents) != len(ids) or not all(
            _is_whole(p) and -1 <= p < i for i, p in enumerate(parents)
        ):
            raise RequestError(
                f"draft parents must be {len(ids)} indices of earlier drafts or -1; got {parents}"
            )
        if len(set(zip(parents, ids, strict=True))) != len(ids):
            raise RequestError(
                f"drafts with the same parent must differ; got token_ids {ids}, parents {parents}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_tree(self) -> bool:
        """Tell whether any draft has a parent other than its predecessor in the list."""
        return self.parents is not None and len(self) != len(self.chain())

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each draft from the last known token, whose children have depth 1."""
        if self.parents is None:
            return tuple(range(1, 1 + len(self)))
        depths: list[int] = []
        for index in range(len(self)):
            parent = self._parent(index)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def prefix(self, count: int) -> Drafts:
        """Return the first `count` drafts."""
        if count >= len(self):
            return self
        parents = None if self.parents is None else self.parents[:count]
        return Drafts(self.token_ids[:count], parents)

    def chain(self) -> Drafts:
        """Return the longest prefix in which each draft is the parent of the next."""
        if self.parents is None:
            return self
        count = len(list(takewhile(lambda i: self._parent(i) == i - 1, range(len(self)))))
        return Drafts(self.token_ids[:count])

    def path(self, row: int) -> tuple[int, ...]:
        """Return the drafts between the last known token and the token sampled at `row`."""
        path: list[int] = []
        index = row - 1
        while index >= 0:
            path.append(self.token_ids[index])
            index = self._parent(index)
        return tuple(reversed(path))

    def masks(self, num_known: int) -> list[int]:
        """Return the tree mask: for each of `num_known` tokens and each draft, an int of bits.

        Bit i: it attends to token i of these tokens and drafts.
        """
        known = (1 << num_known) - 1
        masks = [(2 << i) - 1 for i in range(num_known)]
        for index in range(len(self)):
            parent = self._parent(index)
            seen = known if parent < 0 else masks[num_known + parent]
            masks.append(seen | 1 << (num_known + index))
        return masks

    def accepted_rows(self, sampled: Sequence[int]) -> list[int]:
        """Return the rows whose sampled ids are the sequence's next tokens, in order.

        Parameters
        ----------
        sampled : sequence of int
            The id sampled at each row, 1 + len(self).
        """
        if self.parents is None:
            return list(range(1 + _num_equal(self.token_ids, sampled)))
        children = {(self._parent(i), t): i for i, t in enumerate(self.token_ids)}
        rows = [0]
        index = -1
        while (found := children.get((index, sampled[rows[-1]]))) is not None:
            index = found
            rows.append(1 + index)
        return rows

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Return how many of these drafts were accepted by a step that verified more drafts.

        Parameters
        ----------
        token_ids : sequence of int
            The accepted drafts and the token after them.
        """
        if self.parents is None:
            return _num_equal(self.token_ids, token_ids[:-1])
        children = {(self._parent(i), t): i for i, t in enumerate(self.token_ids)}
        count = 0
        index = -1
        for token_id in token_ids[:-1]:
            if (found := children.get((index, token_id))) is None:
                break
            count = count + 1
            index = found
        return count

    def moves(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the moves of keys and values after a step, as (old, new) indices of drafts.

        Keys and values of drafts are written in the order of the list; the next step expects those
        of the accepted drafts in the order of the sequence.

        Parameters
        ----------
        rows : sequence of int
            From `accepted_rows`.
        """
        return [(row - 1, i) for i, row in enumerate(rows[1:]) if row - 1 != i]

    def _parent(self, index: int) -> int:
        return index - 1 if self.parents is None else self.parents[index]


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal leading ids."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class DraftIds:
    """The ids of many chains of drafts, sampled on the device.

    Parameters
    ----------
    on_device : (R, K) array of int32
        One chain in each row.
    read : callable
        Waits for the device, and returns the valid ids of each row on the host.

    Attributes
    ----------
    on_device : array or None
        None once the array may have been overwritten.
    """

    def __init__(self, on_device: Any, read: Callable[[], list[list[int]]]) -> None:
        self.on_device = on_device
        self._read = read
        self._ids: list[list[int]] | None = None

    def rows(self) -> list[list[int]]:
        """Return the ids on the host; waits for the device the first time."""
        if self._ids is None:
            self._ids = self._read()
        return self._ids


class DeferredDrafts(Drafts):
    """A chain of drafts of known length whose ids may still be on the device only.

    Reading `token_ids` waits for the device.

    Parameters
    ----------
    ids : DraftIds
    row, count : int
        The drafts are the first `count` ids of this row.

    Examples
    --------
    >>> drafts = DeferredDrafts(DraftIds(None, lambda: [[5, 6, 7]]), row=0, count=3)
    >>> len(drafts), drafts.depths, drafts.prefix(2).token_ids
    (3, (1, 2, 3), (5, 6))
    """

    __slots__ = ("count", "ids", "row")
    ids: DraftIds
    row: int
    count: int

    def __init__(self, ids: DraftIds, row: int, count: int) -> None:
        for name, value in (("ids", ids), ("row", row), ("count", count), ("parents", None)):
            object.__setattr__(self, name, value)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids on the host."""
        return tuple(self.ids.rows()[self.row][: self.count])

    def __len__(self) -> int:
        return self.count

    def prefix(self, count: int) -> DeferredDrafts:
        """Return the first `count` drafts."""
        return self if count >= self.count else DeferredDrafts(self.ids, self.row, count)

    def chain(self) -> DeferredDrafts:
        """Return the drafts themselves, which are a chain."""
        return self
