"""Draft tokens: guesses at a sequence's next tokens, verified by one step of the model.

A step computes a sequence's last known token together with its drafts, and samples at each of them.
A draft is accepted if it equals the token sampled at its parent, the token before it; the token
sampled at the last accepted draft is a valid next token as well. Sampling is keyed by seed and
position, so the output is the same as when decoding one by one, whatever was proposed: bit for
bit with `deterministic=True`, otherwise up to rounding of the logits, which may decide a near tie.

Rows of logits of a sequence with drafts: row 0 belongs to the last known token, row 1 + i to draft
i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from engine.errors import RequestError

__all__ = ["MAX_QUERY_LEN", "MAX_STATE_QUERY_LEN", "DeferredDrafts", "DraftIds", "Drafts"]

MAX_QUERY_LEN = 64
"""Maximum query tokens of a sequence with a draft tree: one bit each in a tree mask."""

MAX_STATE_QUERY_LEN = 8
"""Maximum query tokens of a sequence with drafts in recurrent layers: a state slot each."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that may come next: a chain, or a tree of alternatives.

    Parameters
    ----------
    token_ids : tuple of int
    parents : tuple of int, optional
        For each draft the index of its parent, an earlier draft, or -1 for the last known token.
        None means a chain.

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
        """Verify ids and parents; the constructor calls this.

        Raises
        ------
        RequestError
            If the ids are not whole numbers, or the parents do not form a tree.
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
        """Distance of each draft from the last known token; that token's children have depth 1."""
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
        """Return the tree mask: an int per token, for `num_known` tokens and then the drafts.

        Bit i: the token attends to token i of this list.
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
            Id sampled at each of the 1 + len(self) rows.
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
        """Return how many of these drafts a step accepted that verified these and further drafts.

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
        """Return the moves of keys and values to make after a step, as (old, new) draft indices.

        A step writes the drafts' keys and values in list order; the next step expects the accepted
        ones in sequence order.

        Parameters
        ----------
        rows : sequence of int
            Result of `accepted_rows`.
        """
        return [(row - 1, i) for i, row in enumerate(rows[1:]) if row - 1 != i]

    def _parent(self, index: int) -> int:
        return index - 1 if self.parents is None else self.parents[index]


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class DraftIds:
    """Ids of many draft chains sampled on the device.

    Parameters
    ----------
    on_device : (R, K) array of int32
        One chain per row.
    read : callable
        Waits for the device; returns each row's valid ids on the host.

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
        """Return the ids on the host; the first call waits for the device."""
        if self._ids is None:
            self._ids = self._read()
        return self._ids


class DeferredDrafts(Drafts):
    """A chain of drafts of known length whose ids may still exist only on the device.

    Reading `token_ids` waits for the device.

    Parameters
    ----------
    ids : DraftIds
    row, count : int
        The drafts are the first `count` ids of row `row`.

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
        """Return `self`, which is already a chain."""
        return self
