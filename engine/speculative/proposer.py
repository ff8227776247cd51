"""What proposes drafts: the interface, and the user's own callable."""

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
    """Proposes drafts for requests that are decoded.

    It brings itself up to date in `propose`, from the tokens of the request that it has not read
    yet. Between two calls a request may have got tokens, or been preempted and resumed.
    """

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Sequence[Proposal]:
        """Return drafts that may follow the known tokens of each request.

        Parameters
        ----------
        wanted : sequence of (Request, int)
            At most how many drafts for which request; at least one.

        Returns
        -------
        sequence of Drafts, None or Exception
            One for each; None proposes nothing, an exception says why that failed.
        """

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request: it has ended, or is not decoded for now."""

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return the seconds that drafts for so many sequences take, as measured at the start.

        0.0 if they are negligible: then it may also be asked for requests with a token in flight.
        """

    def close(self) -> None:
        """Free its memory."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A proposer that has to read prompts, and can do so while the device computes them."""

    def read_ahead(self, requests: Sequence[Request]) -> None:
        """Read as much of their known tokens as fits into a few milliseconds."""


class CustomProposer:
    """Asks a callable of the user's.

    Parameters
    ----------
    call : callable
        ``call(token_ids, num_tokens)`` with a list of int, the request's known tokens; returns up
        to num_tokens ids, or `Drafts`, or None.

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
        """Call it once for each request."""
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
            return Drafts(tuple(map(index, islice(ids, count + 1))))  # at most one too many
        except Exception as error:  # it must not keep others from their drafts
            return error
