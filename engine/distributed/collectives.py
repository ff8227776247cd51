"""Collectives on NumPy arrays over shared memory, for ranks on one host.

Operations are numbered. A rank writes its array into one of its two buffers, announces the number,
waits until all ranks have announced it, and reads their buffers. A buffer is reused two operations
later: by then all ranks have announced the operation in between, so they have read the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine import kernels
from engine.distributed.group import COUNT, SIZES, Group
from engine.errors import ContractError, RankError
from engine.layers.collectives import Collectives

__all__ = ["Collectives", "SharedMemoryCollectives"]

Array = np.ndarray[Any, Any]


class SharedMemoryCollectives:
    """`Collectives` of NumPy arrays.

    Parameters
    ----------
    group : Group

    Examples
    --------
    >>> from engine.distributed.segment import Segment
    >>> alone = SharedMemoryCollectives(Group(Segment.in_process(1), 0))
    >>> alone.all_reduce(np.array([1.5], np.float32))
    array([1.5], dtype=float32)
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._segment = group.segment
        self._room = group.segment.data.shape[2]

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def peers(self) -> None:
        """None: products send nothing."""

    def all_reduce(self, x: Array, *, out: Array | None = None) -> Array:
        """Return the sum of all ranks' `x`; see `Collectives`."""
        _check_float(x)
        result = np.empty(x.shape, x.dtype) if out is None else out
        _check_out("all_reduce", result, x.shape, x.dtype)
        flat = np.ascontiguousarray(x).reshape(-1)
        total = np.empty(flat.shape, x.dtype)
        for part, theirs in self._meet(f"all_reduce {_shown(x)}", flat):
            sums = theirs[0].astype(np.float32)
            for other in theirs[1:]:
                sums += other.astype(np.float32, copy=False)
            total[part] = sums.astype(x.dtype, copy=False)
        result[...] = total.reshape(x.shape)
        return result

    def all_reduce_rmsnorm(
        self, x: Array, residual: Array, weight: Array, eps: float, *, out: Array | None = None
    ) -> tuple[Array, Array]:
        """Return (rmsnorm(h) * weight, h), h = residual + the sum; see `Collectives`."""
        total = self.all_reduce(x)
        normed, h = kernels.rmsnorm(
            total,
            weight,
            eps=eps,
            residual=residual,
            out=total if out is None else out,
            residual_out=residual,
        )
        return normed, h

    def all_gather(self, x: Array, *, axis: int = -1, out: Array | None = None) -> Array:
        """Return all ranks' `x`, concatenated along `axis`; see `Collectives`."""
        flat = np.ascontiguousarray(x).reshape(-1)
        parts = np.empty((self.size, flat.size), x.dtype)
        for part, theirs in self._meet(f"all_gather {_shown(x)}", flat):
            for rank, other in enumerate(theirs):
                parts[rank, part] = other
        whole: Array = np.concatenate(list(parts.reshape(self.size, *x.shape)), axis=axis)
        if out is None:
            return whole
        _check_out("all_gather", out, whole.shape, x.dtype)
        out[...] = whole
        return out

    def broadcast(self, x: Array, *, root: int = 0) -> Array:
        """Overwrite `x` with rank `root`'s; see `Collectives`."""
        if not 0 <= root < self.size:
            raise ContractError(f"root must be a rank below {self.size}; got {root}")
        flat = np.ascontiguousarray(x).reshape(-1)
        received = np.empty(x.size, x.dtype)
        for part, theirs in self._meet(f"broadcast {_shown(x)} from {root}", flat, root):
            received[part] = theirs[root]
        if self.rank != root:
            x[...] = received.reshape(x.shape)
        return x

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called it."""
        self._announce(f"barrier {name}", np.zeros(0, np.uint8))

    def exchange(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """Return the `data` of every rank; lengths may differ. `timeout`: see `Group.wait`."""
        if len(data) > self._room:
            raise ContractError(f"data must be at most {self._room} bytes; got {len(data)}")
        turn = self._announce("exchange", np.frombuffer(data, np.uint8), timeout)
        sizes = self._segment.ranks[:, SIZES + turn].tolist()
        return [self._segment.data[r, turn, :n].tobytes() for r, n in enumerate(sizes)]

    def check(self, doing: str = "") -> None:
        """Do nothing: every operation raises its own error."""

    def abort(self) -> None:
        """Do nothing: the group ends waiting ranks."""

    def close(self) -> None:
        """Do nothing: the segment belongs to the group."""

    def _meet(
        self, what: str, flat: Array, root: int | None = None
    ) -> Iterator[tuple[slice, list[Array]]]:
        """Yield slices of `flat` that fit in a buffer, each with all ranks' values of that slice.

        With a `root`, only that rank's values are valid. The values are views of buffers: read
        them before the next slice is requested.
        """
        step = self._room // flat.itemsize
        for first in range(0, flat.size, step):
            part = slice(first, min(flat.size, first + step))
            own = flat[part].view(np.uint8) if root in (None, self.rank) else flat[:0].view("u1")
            num_bytes = (part.stop - first) * flat.itemsize
            where = f" [{first}:]" if first else ""
            turn = self._announce(what + where, own)
            theirs = self._segment.data[:, turn, :num_bytes]
            yield part, [row.view(flat.dtype) for row in theirs]

    def _announce(self, what: str, own: Array, timeout: float | None = None) -> int:
        """Write this rank's data, wait for all ranks, and return the index of the buffer used."""
        self._group.count += 1  # shared by all collectives of the group
        count = self._group.count
        turn = self._group.count & 1
        ranks = self._segment.ranks
        group = self._group
        self._segment.data[group.rank, turn, : own.size] = own
        ranks[group.rank, SIZES + turn] = own.size
        group.write_text(turn, what)
        group.fence()
        ranks[group.rank, COUNT] = count
        counts = ranks[:, COUNT]
        where = f"{what} (number {count})"
        group.wait(lambda: (counts < count).nonzero()[0].tolist(), where, timeout)
        self._compare(what, count, turn)
        return turn

    def _compare(self, what: str, count: int, turn: int) -> None:
        """Verify that all ranks have called the same operation."""
        texts = self._segment.texts[:, turn]
        size = len(what.encode()) + 1
        if (texts[:, :size] == texts[self.rank, :size]).all():
            return
        for rank in range(self.size):
            theirs = self._group.text(rank, turn)
            if theirs != self._group.text(self.rank, turn):
                raise RankError(
                    f"the ranks disagree in operation {count}: rank {self.rank} is in {what}, "
                    f"rank {rank} in {theirs}"
                )


def _check_float(x: Array) -> None:
    if x.dtype.itemsize not in (2, 4) or x.dtype.kind in "iub":
        raise ContractError(f"x of all_reduce must be of 16- or 32-bit floats; got {x.dtype}")


def _check_out(name: str, out: Array, shape: tuple[int, ...], dtype: Any) -> None:
    if out.shape != shape or out.dtype != dtype:
        raise ContractError(
            f"out of {name} must be {np.dtype(dtype)} {shape}; got {out.dtype} {out.shape}"
        )


def _shown(x: Array) -> str:
    return f"{x.dtype} {x.shape}"
