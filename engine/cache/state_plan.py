"""Plan the number of state slots of a model with recurrent layers, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.memory_pool import format_bytes

__all__ = ["CacheSizes", "StatePlan", "fitting_num_seqs", "plan_num_slots"]

# Largest share of the memory left for caches that the states of running requests take, if their
# number is not given.
_OWN_SHARE = 1 / 2
# Share of the rest for snapshots. A cached prefix is of use with its blocks and one snapshot; the
# snapshot weighs as much as some 3000 tokens, less than the prefixes that are worth caching.
_SNAPSHOT_SHARE = 1 / 4
_SNAPSHOTS_PER_REQUEST = 4
_DRAFTING_REQUESTS = 16  # with more, verifying drafts hardly pays


class CacheSizes(NamedTuple):
    """Numbers of blocks and state slots, on the device and on the host."""

    num_blocks: int
    num_host_blocks: int = 0
    num_state_slots: int = 0
    num_host_state_slots: int = 0

    @classmethod
    def least(cls, stages: Sequence[CacheSizes]) -> CacheSizes:
        """Return what all pipeline stages have room for; one without states has none to limit.

        Examples
        --------
        >>> CacheSizes.least([CacheSizes(9, 4), CacheSizes(8, 5, 3, 2), CacheSizes(7, 6, 4, 1)])
        CacheSizes(num_blocks=7, num_host_blocks=4, num_state_slots=3, num_host_state_slots=1)
        """
        with_states = [stage for stage in stages if stage.num_state_slots]
        return cls(
            min(stage.num_blocks for stage in stages),
            min(stage.num_host_blocks for stage in stages),
            min((stage.num_state_slots for stage in with_states), default=0),
            min((stage.num_host_state_slots for stage in with_states), default=0),
        )


@dataclass(frozen=True)
class StatePlan:
    """The number of state slots to allocate, and the reason for it."""

    num_slots: int
    num_bytes: int
    reason: str


def fitting_num_seqs(num_seqs: int, bytes_per_slot: int, room: int) -> int:
    """Return `num_seqs`, or fewer whose states take half of `room` bytes.

    Examples
    --------
    >>> fitting_num_seqs(256, 60 << 20, 40 << 30), fitting_num_seqs(256, 180 << 20, 20 << 30)
    (256, 56)
    """
    return max(1, min(num_seqs, int(room * _OWN_SHARE) // bytes_per_slot))


def plan_num_slots(
    bytes_per_slot: int,
    room: int,
    *,
    max_num_seqs: int,
    num_snapshots: int | None = None,
    max_draft_tokens: int = 0,
    prefix_caching: bool = True,
) -> StatePlan:
    """Choose the number of slots: one for each request, and some for drafts and snapshots.

    Parameters
    ----------
    bytes_per_slot : int
        Bytes of the states of one sequence.
    room : int
        Bytes left for states and pages.
    max_num_seqs : int
        Maximum number of running requests.
    num_snapshots : int, optional
        Number of slots for snapshots requested by the user.
    max_draft_tokens : int
        Maximum drafts per request: verifying n of them takes n slots more.
    prefix_caching : bool
        Whether prefixes are cached; without them there are no snapshots.

    Examples
    --------
    >>> plan_num_slots(60 << 20, 34 << 30, max_num_seqs=256).reason
    '337 slots of 60.00 MiB (19.75 GiB): 256 for requests, 0 for drafts, 81 for snapshots'
    """
    rest = max(0, room - max_num_seqs * bytes_per_slot)
    if not prefix_caching:
        num_snapshots = 0
    elif num_snapshots is None:
        fitting = int(rest * _SNAPSHOT_SHARE) // bytes_per_slot
        num_snapshots = min(fitting, _SNAPSHOTS_PER_REQUEST * max_num_seqs)
    num_drafts = max_draft_tokens * min(max_num_seqs, _DRAFTING_REQUESTS)
    num_slots = max_num_seqs + num_drafts + num_snapshots
    text = (
        f"{num_slots} slots of {format_bytes(bytes_per_slot)} "
        f"({format_bytes(num_slots * bytes_per_slot)}): {max_num_seqs} for requests, "
        f"{num_drafts} for drafts, {num_snapshots} for snapshots"
    )
    return StatePlan(num_slots, num_slots * bytes_per_slot, text)
