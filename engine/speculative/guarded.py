"""Guard around a proposer: its failures and invalid drafts cannot harm a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine.drafts import DeferredDrafts, Drafts
from engine.request import Request
from engine.speculative.proposer import Proposer, ReadsAhead

__all__ = ["GuardedProposer"]

_log = logging.getLogger(__name__)

_MAX_FAILURES = 16  # consecutive failed calls before the proposer is disabled


class GuardedProposer:
    """Calls a proposer and drops invalid proposals; the first fault is logged.

    Parameters
    ----------
    proposer : Proposer
        The guarded proposer.
    vocab_size : int
        Exclusive upper bound of draft ids.
    may_defer : bool
        Accept `DeferredDrafts` unread; for the engine's own proposers.

    Attributes
    ----------
    num_failures : int
        Number of proposals dropped so far.
    is_given_up : bool
        Whether too many consecutive failures have disabled the proposer.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, *, may_defer: bool = False) -> None:
        self.num_failures = 0
        self.is_given_up = False
        self._proposer = proposer
        self.vocab_size = vocab_size
        self._may_defer = may_defer
        self._num_failed_calls = 0  # consecutive

    def ask(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[Request, Drafts]]:
        """Return the valid proposals. See `Proposer.propose`."""
        if not wanted or self.is_given_up:
            return []
        num_failures = self.num_failures
        proposals = []
        for (request, most), proposal in zip(wanted, self._ask(tuple(wanted)), strict=True):
            if proposal is None:
                continue
            drafts = self._checked(proposal, most)
            if drafts is not None and len(drafts):
                proposals.append((request, drafts))
        has_failed = not proposals and num_failures != self.num_failures
        self._num_failed_calls = self._num_failed_calls + 1 if has_failed else 0
        if self._num_failed_calls == _MAX_FAILURES:
            self.is_given_up = True
            _log.error("the proposer of drafts has failed %d times; it is off", _MAX_FAILURES)
        return proposals

    def read_ahead(self, requests: Sequence[Request]) -> None:
        """Call `ReadsAhead.read_ahead` if the proposer implements it."""
        if isinstance(self._proposer, ReadsAhead) and not self.is_given_up:
            try:
                self._proposer.read_ahead(requests)
            except Exception as error:
                self._note(_reason(error))

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

    def _ask(self, wanted: tuple[tuple[Request, int], ...]) -> Sequence[Any]:
        """Return one proposal per request, all None if the call fails."""
        try:
            given = list(islice(self._proposer.propose(wanted), len(wanted) + 1))
        except Exception as error:
            self._note(_reason(error))
            return [None] * len(wanted)
        if len(given) != len(wanted):
            number = len(given) if len(given) < len(wanted) else "more"
            self._note(f"it returned {number} proposals for {len(wanted)} requests")
            return [None] * len(wanted)
        return given

    def _checked(self, proposal: Any, most: int) -> Drafts | None:
        """Return a proposal as validated drafts; None if it is invalid."""
        try:
            return self._drafts(proposal, most)
        except Exception as error:
            self._note(_reason(error))
            return None

    def _drafts(self, given: Any, most: int) -> Drafts:
        if isinstance(given, Exception):
            raise given
        if not isinstance(given, Drafts):
            raise TypeError(f"it returned {type(given).__name__} in place of Drafts")
        if self._may_defer and isinstance(given, DeferredDrafts) and len(given) <= most:
            return given
        # A subclass, or an object built without __init__, may hold anything: check everything, and
        # copy whatever is mutable.
        drafts = given
        ids = given.token_ids
        parents = given.parents
        is_constant = type(given) is Drafts and type(ids) is tuple and parents is None
        if not is_constant:
            ids = tuple(islice(ids, most + 1))
        if len(ids) > most:
            raise ValueError(f"it returned more than the {most} drafts that were wanted")
        if is_constant:
            drafts.check()
        else:
            drafts = Drafts(ids, None if parents is None else tuple(islice(parents, most + 1)))
        if ids and max(ids) >= self.vocab_size:
            raise ValueError(f"it returned id {max(ids)}; the vocabulary has {self.vocab_size}")
        return drafts

    def _note(self, why: str) -> None:
        if not self.num_failures:
            _log.warning("the proposer of drafts has failed; its proposal is dropped: %s", why)
        self.num_failures += 1


def _reason(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:400]
    except Exception:  # str(error) raises
        return type(error).__name__
