"""Drafts of the tokens that a grammar forces."""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafts import Drafts
from engine.request import Request
from engine.speculative.proposer import Proposal

__all__ = ["ForcedTokens"]


class ForcedTokens:
    """Proposes the tokens that a request's grammar forces, such as the property names of a schema.

    The grammar's mask allows only these tokens, so they are always accepted.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> request = Request("r0", [5, 6, 7], SimpleNamespace(ignore_eos=False, stop_token_ids=None))
    >>> request.spec = SimpleNamespace(grammar=None)
    >>> ForcedTokens().propose([(request, 2)])
    [None]
    """

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Proposal]:
        """Return forced tokens; None if the grammar allows several tokens, or without a grammar."""
        return [_forced(request, count) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Do nothing."""

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return 0.0."""
        return 0.0

    def close(self) -> None:
        """Do nothing."""


def _forced(request: Request, count: int) -> Drafts | None:
    state = request.spec.grammar
    if state is None:
        return None
    state.follow(request.output_token_ids)
    ids = state.forced_tokens(count)
    return Drafts(tuple(ids)) if ids else None
