"""`Proposer`: the interface of draft proposers; `CustomProposer` wraps the user's callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import index
from typing import Any, Protocol, runtime_checkable

from engine.drafts import Drafts
from engine.request import Request

__all__ = ["CustomProposer", "Proposal", "Proposer", "ReadsAhead"]

Proposal = Drafts | Exception | None


class Proposer(Protocol):
    """Proposes drafts for decoding requests.

    `propose` first reads each request's new tokens. Between two calls, a request may have received
    tokens, or been preempted and resumed.
    """

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Sequence[Proposal]:
        """Return drafts that may follow the known tokens of each request.

        Parameters
        ----------
        wanted : sequence of (Request, int)
            Requests, and the maximum number of drafts for each, at least 1.

        Returns
        -------
        sequence of Drafts, None or Exception
            One per request; None proposes nothing, an exception states why proposing failed.
        """

    def forget(self, request: Request) -> None:
        """Drop the state kept for a request that has ended or stopped decoding for now."""

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return the seconds, measured at startup, to propose `num_tokens` drafts per sequence.

        0.0 if negligible; then `propose` may also be called for requests with a token in flight.
        """

    def close(self) -> None:
        """Free its memory."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A proposer that must read prompts, and can do so while the device computes them."""

    def read_ahead(self, requests: Sequence[Request]) -> None:
        """Read their known tokens for at most a few milliseconds."""


class CustomProposer:
    """Calls the user's proposer.

    Parameters
    ----------
    call : callable
        ``call(token_ids, num_tokens)``: takes the request's known tokens, a list of int, and
        returns up to num_tokens ids, or `Drafts`, or None.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> request = Request("r0", [5, 6, 7], SimpleNamespace(ignore_eos=False, stop_token_ids=None))
    >>> CustomProposer(lambda ids, count: ids[:count]).propose([(request, 2)])
    [Drafts(token_ids=(5, 6), parents=None)]
    """

    def __init__(self, call: Callable[[list[int], int], Any]) -> None:
        self._call = call

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        """Call the user's proposer once per request."""
        return [self._of(request, count) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Do nothing."""

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return 0.0."""
        return 0.0

    def close(self) -> None:
        """Do nothing."""

    def _of(self, request: Request, count: int) -> Proposal:
        try:
            ids = self._call(request.token_ids(0, request.num_known_tokens), count)
            if ids is None or isinstance(ids, Drafts):
                return ids
            # One id too many is kept, so that the check of the count refuses the proposal.
            return Drafts(tuple(map(index, islice(ids, count + 1))))
        except Exception as error:  # other requests must still get their drafts
            return error
