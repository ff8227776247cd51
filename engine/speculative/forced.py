"""Drafts of the tokens that a grammar leaves no choice of."""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafts import Drafts
from engine.request import Request
from engine.speculative.proposer import Proposal, Proposer

__all__ = ["ForcedTokens"]


class ForcedTokens:
    """Proposes the tokens that a request's grammar forces, such as the names of a JSON schema.

    Their masks allow one token each, so they are accepted. A request without a grammar, or in a
    place where it leaves a choice, is left to another proposer.

    Parameters
    ----------
    other : Proposer, optional
        None: nothing is proposed for them.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> request = Request("r0", [5, 6, 7], SimpleNamespace(ignore_eos=False, stop_token_ids=None))
    >>> request.spec = SimpleNamespace(grammar=None)
    >>> ForcedTokens().propose([(request, 2)])
    [None]
    """

    def __init__(self, other: Proposer | None = None) -> None:
        self._other = other

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        """Return `Proposer.propose`; an error of the other proposer is of its requests only."""
        proposals: list[Proposal] = [_forced(request, count) for request, count in wanted]
        rest = [index for index, drafts in enumerate(proposals) if drafts is None]
        if self._other is None or not rest:
            return proposals
        for index, drafts in zip(rest, self._ask([wanted[i] for i in rest]), strict=True):
            proposals[index] = drafts
        return proposals

    def forget(self, request: Request) -> None:
        """Call `Proposer.forget`."""
        if self._other is not None:
            self._other.forget(request)

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return `Proposer.cost` of the other; forced tokens cost nothing."""
        return 0.0 if self._other is None else self._other.cost(num_sequences, num_tokens)

    def close(self) -> None:
        """Call `Proposer.close`."""
        if self._other is not None:
            self._other.close()

    def _ask(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        """Return the other's proposals, or why there are none."""
        assert self._other is not None
        try:
            given = list(self._other.propose(wanted))
        except Exception as error:  # forced tokens are good all the same
            return [error] * len(wanted)
        if len(given) != len(wanted):
            why = f"it returned {len(given)} proposals for {len(wanted)} requests"
            return [RuntimeError(why)] * len(wanted)
        return given


def _forced(request: Request, count: int) -> Drafts | None:
    state = request.spec.grammar
    if state is None:
        return None
    state.follow(request.output_token_ids)
    ids = state.forced_tokens(count)
    return Drafts(tuple(ids)) if ids else None
