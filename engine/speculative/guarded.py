"""A proposer that may fail or return garbage, without harm to any request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engine.drafts import Drafts
from engine.request import Request
from engine.speculative.proposer import Proposer

__all__ = ["GuardedProposer"]

_log = logging.getLogger(__name__)

_MAX_FAILURES = 16  # calls in a row


class GuardedProposer:
    """Asks a proposer, and drops what is no valid proposal; the first fault is logged.

    Parameters
    ----------
    proposer : Proposer
    vocab_size : int
        Ids of drafts are below it.

    Attributes
    ----------
    num_failures : int
        Proposals dropped so far.
    is_given_up : bool
        Whether it has failed so often in a row that it is not asked again.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.num_failures = 0
        self.is_given_up = False
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._num_failed_calls = 0  # in a row

    def ask(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[Request, Drafts]]:
        """Return the valid proposals, as of `Proposer.propose`."""
        if not wanted or self.is_given_up:
            return []
        num_failures, proposals = self.num_failures, []
        for (request, most), drafts in zip(wanted, self._ask(wanted), strict=True):
            if drafts is None:
                continue
            if why := self._fault(drafts, most):
                self._note(why)
            elif len(drafts):
                proposals.append((request, drafts))
        has_failed = not proposals and num_failures != self.num_failures
        self._num_failed_calls = self._num_failed_calls + 1 if has_failed else 0
        if self._num_failed_calls == _MAX_FAILURES:
            self.is_given_up = True
            _log.error("the proposer of drafts has failed %d times; it is off", _MAX_FAILURES)
        return proposals

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return `Proposer.cost`."""
        return self._proposer.cost(num_sequences, num_tokens)

    def forget(self, request: Request) -> None:
        """Call `Proposer.forget`."""
        try:
            self._proposer.forget(request)
        except Exception as error:
            self._note(_reason(error))

    def close(self) -> None:
        """Call `Proposer.close`."""
        try:
            self._proposer.close()
        except Exception as error:
            self._note(_reason(error))

    def _ask(self, wanted: Sequence[tuple[Request, int]]) -> Sequence[Any]:
        """Return one proposal for each; if the call fails, none."""
        try:
            given = list(self._proposer.propose(wanted))
        except Exception as error:
            self._note(_reason(error))
            return [None] * len(wanted)
        if len(given) != len(wanted):
            self._note(f"it returned {len(given)} proposals for {len(wanted)} requests")
            return [None] * len(wanted)
        return given

    def _fault(self, drafts: Any, most: int) -> str:
        """Return why these are no valid drafts; "" if they are."""
        if isinstance(drafts, Exception):
            return _reason(drafts)
        if not isinstance(drafts, Drafts):
            return f"it returned {type(drafts).__name__} in place of Drafts"
        if len(drafts) > most:
            return f"it returned {len(drafts)} drafts where at most {most} were wanted"
        if drafts.token_ids and max(drafts.token_ids) >= self._vocab_size:
            return f"it returned id {max(drafts.token_ids)}; the vocabulary has {self._vocab_size}"
        return ""

    def _note(self, why: str) -> None:
        if not self.num_failures:
            _log.warning("the proposer of drafts has failed; its proposal is dropped: %s", why)
        self.num_failures += 1


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]
