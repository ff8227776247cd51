"""Compositions through the network: tokens, batches, training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .data import Compositions
from .neighbours import Neighbours
from .network import (
    NEIGHBOUR,
    Adam,
    Batch,
    Config,
    Network,
    packed,
)
from .ops import token_features
from .training import Step

__all__ = ["SCALE", "Trained", "batch_of", "in_kelvin", "train"]

Array = np.ndarray[Any, Any]
SCALE = 30.0  # K; the network's output is in this unit


def batch_of(
    compositions: Compositions,
    xp: Any = np,
    *,
    known: tuple[Array, Array] | None = None,
    room: int = 128,
) -> tuple[Batch, Array]:
    """Return a batch, and the row of `compositions` that each of its sequences stands for.

    A sequence is one token per element, one per known neighbour, and one for the whole composition
    (fraction 1, all atoms), from which the result is read. Rows are sorted by number of elements.

    known : pair of (N, K) arrays, optional
        Critical temperatures (in K) and distances of the nearest known compositions.
    """
    counts = np.count_nonzero(compositions.elements, axis=1)
    order = np.argsort(counts, kind="stable")
    columns = [xp.asarray(compositions.elements), xp.asarray(compositions.amounts)]
    columns += [xp.asarray(x, np.float32) for x in known or ()]
    num_known = 0 if known is None else known[0].shape[1]
    parts, groups, roots = [], [], []
    start = 0
    ends = np.searchsorted(counts[order], np.arange(counts.max() + 2))
    for count in np.flatnonzero(np.diff(ends)):
        rows = order[ends[count] : ends[count + 1]]
        length = int(count) + num_known + 1
        # All rows have the same count: the order is theirs, and nothing has to be gathered.
        chosen = columns if len(rows) == len(counts) else [x[xp.asarray(rows)] for x in columns]
        parts.append(_tokens(int(count), *chosen, xp=xp))
        group = packed(start, len(rows), length, xp, room)
        groups.append(group)
        roots.append(xp.arange(start + length - 1, group.tokens.stop, length))
        start = group.tokens.stop
    elements, *numbers = (
        column[0] if len(column) == 1 else xp.concatenate(column)
        for column in zip(*parts, strict=True)
    )
    features = token_features(*numbers)
    return Batch(elements, features, tuple(groups), xp.concatenate(roots)), order


def _tokens(
    count: int, elements: Any, amounts: Any, tc: Any = None, distances: Any = None, *, xp: Any
) -> tuple[Any, ...]:
    """Return element, fraction, amount, temperature and distance of the tokens of rows.

    Each is an (R * L,) array. All rows have `count` elements. What a kind of token lacks is 0.
    """
    num_known = 0 if tc is None else tc.shape[1]
    table = xp.zeros((5, len(elements), count + num_known + 1), np.float32)
    amounts = amounts[:, :count]
    atoms = amounts.sum(1, keepdims=True)
    table[0, :, :count] = elements[:, :count]
    table[0, :, count:-1] = NEIGHBOUR
    table[1, :, :count] = amounts / atoms
    table[1, :, -1] = 1
    table[2, :, :count] = amounts
    table[2, :, -1:] = atoms
    if tc is not None:
        table[3, :, count:-1] = tc
        table[4, :, count:-1] = distances
    first, *others = table.reshape(5, -1)
    return first.astype(np.int32), *others


@dataclass(frozen=True)
class Trained:
    """A network for compositions, and the rows that it was trained on as neighbours.

    Attributes
    ----------
    network : Network
    neighbours : Neighbours
    num_neighbours : int
        Known compositions that the network reads beside each one; 0 for none.
    """

    network: Network
    neighbours: Neighbours
    num_neighbours: int

    def predict(self, compositions: Compositions, size: int = 4096) -> Array:
        """Return critical temperatures in K, (N,) float32, `size` rows at a time."""
        found = np.empty(len(compositions), np.float32)
        for start in range(0, len(compositions), size):
            part = compositions[start : start + size]
            known = self.neighbours.known(part, self.num_neighbours)
            batch, order = batch_of(part, self.network.xp, known=known)
            found[start + order] = in_kelvin(self.network.predict(batch))
        return found


def in_kelvin(outputs: Any) -> Array:
    """Return the critical temperatures that a network's outputs (B, 1) mean, (B,), on the host."""
    values = outputs[:, 0]
    return np.maximum(values.get() if hasattr(values, "get") else values, 0) * SCALE


def train(
    compositions: Compositions,
    tc: Array,
    *,
    config: Config,
    num_epochs: int,
    num_neighbours: int = 0,
    xp: Any = np,
    dtype: Any = np.float32,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    weight_decay: float = 0.3,
    report: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train on the mean absolute error; the network gets the mean of its last weights.

    A row's neighbours are the nearest other rows, as those of a new composition will be.

    report : callable, optional
        Called with the number of each epoch and the mean of its losses in K.

    Raises
    ------
    ValueError
        If there are fewer rows than `batch_size`.
    """
    if len(compositions) < batch_size:
        raise ValueError(
            f"batch_size must be at most {len(compositions)}, the rows; got {batch_size}"
        )
    network = Network(config, xp, dtype)
    neighbours = Neighbours(compositions, tc, count=max(1, num_neighbours))
    known = neighbours.known(compositions, num_neighbours, skip=np.arange(len(compositions)))
    data = (compositions, tc / SCALE, known)
    adam = Adam(learning_rate, len(compositions) // batch_size * num_epochs, weight_decay)
    step = Step(network, adam)
    for epoch in range(num_epochs):
        losses = []
        for batch, wanted in _batches(data, batch_size, epoch, network):
            losses.append(abs(step(batch, wanted) - wanted).mean())
        if report is not None:
            report(epoch, float(sum(losses)) / len(losses) * SCALE)
    network.update(adam.mean)
    return Trained(network, neighbours, num_neighbours)


def _batches(
    data: tuple[Compositions, Array, tuple[Array, Array]], size: int, epoch: int, network: Network
) -> Iterator[tuple[Batch, Any]]:
    """Yield the batches of an epoch, in an order that its number and the network's seed give."""
    compositions, targets, (tc, distances) = data
    rng = np.random.default_rng((network.config.seed, epoch))
    rows = rng.permutation(len(compositions))
    for start in range(0, len(rows) - size + 1, size):
        chosen = rows[start : start + size]
        known = (tc[chosen], distances[chosen])
        # On a CPU smaller tiles save time: a tile's scores are computed whole.
        room = 64 if network.xp is np else 128
        batch, order = batch_of(compositions[chosen], network.xp, known=known, room=room)
        yield batch, network.xp.asarray(targets[chosen][order][:, None], np.float32)
