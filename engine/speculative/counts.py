"""Counters of speculative decoding, exported in /metrics under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DraftCounts", "SpeculationStats"]


@dataclass(frozen=True)
class SpeculationStats:
    """A snapshot of the counters.

    Attributes
    ----------
    num_drafts : int
        Number of verifications: one per request and step with drafts.
    num_draft_tokens, num_accepted_tokens : int
        Number of draft tokens verified, and number accepted.
    num_accepted_tokens_per_pos : tuple of int
        Accepted drafts at distance 1, 2, ... from the last known token.
    num_draft_tokens_per_pos : tuple of int
        Verified drafts at the same distances.
    num_proposer_failures : int
        Proposals dropped because the proposer raised or returned invalid drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    num_proposer_failures: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Fraction of verified drafts that were accepted; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class DraftCounts:
    """Running counters of drafts.

    Parameters
    ----------
    num_positions : int
        The largest distance of a draft from the last known token.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_drafts = 0
        self._drafted = [0] * num_positions
        self._accepted = [0] * num_positions

    def add(self, num_per_depth: list[int], num_accepted: int) -> None:
        """Count one request's drafts in one step: verified per depth, and accepted."""
        self._num_drafts += 1
        for depth, count in enumerate(num_per_depth):
            self._drafted[depth] += count
        for depth in range(num_accepted):
            self._accepted[depth] += 1

    def snapshot(self, num_failures: int) -> SpeculationStats:
        """Return a snapshot; `num_failures` is counted by the proposers."""
        return SpeculationStats(
            self._num_drafts,
            sum(self._drafted),
            sum(self._accepted),
            tuple(self._accepted),
            tuple(self._drafted),
            num_failures,
        )
