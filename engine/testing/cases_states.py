"""Sequences and state slots for the tests of the recurrent ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.device import to_numpy
from engine.dtypes import dtype_name
from engine.testing.cases import normal, to_module
from engine.testing.cases_attention import cu_seqlens
from engine.testing.tolerances import assert_close

__all__ = ["STATE_BATCHES", "StateBatch", "assert_recurrence"]

Array = np.ndarray[Any, Any]

_NUM_DRAFTS = 4  # columns of targets with "drafts"


@dataclass(frozen=True)
class StateBatch:
    """Sequences of `lens` new tokens after `cached` earlier ones, and what they write.

    Attributes
    ----------
    lens, cached : tuple of int
        New and earlier tokens of each sequence.
    targets : str
        "own": the slot that is read; "new": another one; "each": one per token; "drafts": the same
        for up to 4 tokens, the last state of longer sequences; "none".
    snapshots : tuple of int
        Tokens before each sequence's snapshot; 0 means none. Empty means no sequence has one.
    """

    lens: tuple[int, ...]
    cached: tuple[int, ...]
    targets: str = "own"
    snapshots: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, T."""
        return sum(self.lens)

    @property
    def num_slots(self) -> int:
        """Slots for all states, and a few that no sequence uses."""
        widths = {"new": 1, "each": max(self.lens), "drafts": _NUM_DRAFTS}
        width = widths.get(self.targets, 0)
        return len(self.lens) * (1 + width + bool(self.snapshots)) + 3

    def slots(self, seed: int = 0) -> dict[str, Array]:
        """Return the ops' arguments; every slot occurs once, in random order."""
        batch = len(self.lens)
        order = np.random.default_rng(seed).permutation(self.num_slots).astype(np.int32)
        read, order = order[:batch], order[batch:]
        slots = {
            "state_slots": read,
            "cu_seqlens_q": cu_seqlens(self.lens),
            "context_lens": np.add(self.lens, self.cached).astype(np.int32),
        }
        if self.targets == "new":
            slots["state_targets"], order = order[:batch], order[batch:]
        elif self.targets == "each":
            width = max(self.lens)
            slots["state_targets"] = order[: batch * width].reshape(batch, width)
            order = order[batch * width :]
        elif self.targets == "drafts":
            counts = np.array(self.lens)[:, None]
            columns = np.arange(_NUM_DRAFTS)
            is_used = np.where(counts > len(columns), columns == columns[-1], columns < counts)
            targets = order[: batch * _NUM_DRAFTS].reshape(batch, _NUM_DRAFTS)
            slots["state_targets"] = np.where(is_used, targets, np.int32(-1))
            order = order[batch * _NUM_DRAFTS :]
        elif self.targets == "none":
            slots["state_targets"] = np.full(batch, -1, np.int32)
        if self.snapshots:
            offsets = np.array(self.snapshots, np.int32)
            slots["snapshot_slots"] = np.where(offsets > 0, order[:batch], -1).astype(np.int32)
            slots["snapshot_offsets"] = np.where(offsets > 0, offsets, -1).astype(np.int32)
        return slots

    def states(self, shape: Sequence[int], dtype: str, slots: dict[str, Array]) -> Array:
        """Return states of `shape`; those that must not be read are NaN."""
        states = normal((self.num_slots, *shape), dtype, seed=11, scale=0.5)
        is_read = np.isin(
            np.arange(self.num_slots), slots["state_slots"][np.array(self.cached) > 0]
        )
        states[~is_read] = np.nan
        return states

    def on(self, xp: Any, slots: dict[str, Array]) -> dict[str, Any]:
        """Return `slots` in array module `xp`."""
        return {name: to_module(xp, array) for name, array in slots.items()}

    def __str__(self) -> str:
        lens, cached, snapshots = (
            "_".join(map(str, x)) for x in (self.lens, self.cached, self.snapshots)
        )
        return f"q{lens}-c{cached}-{self.targets}" + (f"-s{snapshots}" if snapshots else "")


STATE_BATCHES = (
    StateBatch((1,), (0,)),
    StateBatch((1, 1, 1, 1, 1), (0, 7, 64, 1, 300)),
    StateBatch((1, 1, 1), (5, 0, 9), "new"),
    StateBatch((4, 4, 4), (3, 0, 90), "each"),
    StateBatch((2, 8, 1), (3, 0, 90), "each", (0, 8, 1)),
    StateBatch((8, 0, 3, 1), (0, 12, 2, 0), "own"),
    StateBatch((70, 1, 130, 5), (0, 33, 64, 59), "own", (64, 0, 128, 5)),
    StateBatch((200, 9), (128, 55), "new", (192, 9)),
    StateBatch((17, 64, 65), (1, 63, 130), "none", (0, 1, 62)),
    StateBatch((4, 20, 1, 70, 6), (30, 0, 9, 64, 1), "drafts", (0, 20, 0, 64, 0)),
    StateBatch((12, 9, 3), (70, 0, 5), "each"),
)
"""One token each; drafts to verify; prefill from the start, in chunks, and beside decodes."""


def assert_recurrence(got: Any, states: Any, want: Array, want_states: Array, longest: int) -> None:
    """Compare outputs and states; a state is as exact as its operands.

    Chunks, which sequences of more than 8 tokens take (`longest`), round the matrices between
    their products.
    """
    reduction = 257 if longest <= 8 or got.dtype == np.float32 else math.inf
    assert_close(got, want, reduction=reduction)
    error = to_numpy(got).astype(np.float64) - want.astype(np.float64)
    limit = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype_name(got.dtype)]
    assert np.linalg.norm(error) <= limit * np.linalg.norm(want.astype(np.float64))
    names = (dtype_name(got.dtype), dtype_name(states.dtype))
    coarser = max(names, key=("float32", "float16", "bfloat16").index)
    for slot in range(len(want_states)):
        pair = states[slot], want_states[slot]
        assert_close(*pair, reduction=reduction, name=f"state {slot}", dtype=coarser)
