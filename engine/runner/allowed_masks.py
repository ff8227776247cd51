"""Masks of the tokens each row of a step may sample: `allowed_token_ids` and grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.device import Device
from engine.layers.sampler import pack_allowed
from engine.request import Request
from engine.runner.transfer import PinnedArrays
from engine.scheduler.output import ScheduledSequence
from engine.structured.masks import MaskPlan

__all__ = ["AllowedMasks"]

IntArray = np.ndarray[Any, np.dtype[Any]]


class AllowedMasks:
    """Builds a step's token masks: one per row of logits that needs one.

    Parameters
    ----------
    num_rows, vocab_size : int
        Number of request rows (see `RequestRows`), and V.
    eos_token_ids : sequence of int
        Ids that end a sequence.
    device : Device
        Device the masks are copied to.

    Attributes
    ----------
    has_mask : (num_rows,) bool
        True for request rows that need a mask.
    errors : dict of int to str
        By row of logits of the last `build`: why its grammar has no mask.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: Device
    ) -> None:
        self.has_mask = np.zeros(num_rows, np.bool_)
        self.errors: dict[int, str] = {}
        self._has_grammar = np.zeros(num_rows, np.bool_)
        self._rules = np.zeros(
            num_rows, np.int64
        )  # id of each row's mask rule; rows with equal ids may share a mask
        self._fixed: dict[int, IntArray] = {}  # masks of allowed_token_ids, by row
        self._vocab_size = vocab_size
        self._eos = pack_allowed([i for i in eos_token_ids if i < vocab_size], vocab_size)
        self._eos_words = np.flatnonzero(self._eos)
        self._pinned = PinnedArrays(device)

    def assign(self, request: Request) -> None:
        """Fill the row of `request`."""
        row = request.row
        spec = request.spec
        allowed_ids = spec.params.allowed_token_ids
        self._fixed.pop(row, None)
        if allowed_ids is not None:
            self._fixed[row] = pack_allowed(allowed_ids, self._vocab_size)
        self._has_grammar[row] = spec.grammar is not None
        self._rules[row] = 1 if spec.params.ignore_eos else 2 + spec.params.min_tokens
        if allowed_ids is not None:
            self._rules[row] = -1 - row
        self.has_mask[row] = spec.grammar is not None or allowed_ids is not None

    def build(
        self,
        sampled: Sequence[ScheduledSequence],
        rows: IntArray,
        positions: IntArray,
        paths: Sequence[tuple[int, ...]] | None = None,
    ) -> dict[str, Any]:
        """Return `kernels.sample`'s arguments "allowed" (on the device) and "allowed_rows".

        Grammars are first advanced by their requests' output. Rows of one grammar whose masks are
        equal share one mask. Empty if no row needs a mask. For the arguments see
        `SamplingTable.build`.
        """
        has_grammar = self._has_grammar[rows]
        by_grammar = np.flatnonzero(has_grammar)
        by_ids = np.flatnonzero(self.has_mask[rows] & ~has_grammar)
        self.errors = {}
        if not len(by_grammar) and not len(by_ids):
            return {}
        plan = self._plan(sampled, rows, by_grammar, paths)
        firsts = by_grammar[plan.firsts]
        num_plans = len(plan.firsts)
        needed = np.concatenate([firsts, by_ids])
        masks = self._pinned.next((len(needed), len(self._eos)), np.int32)
        is_allowed = plan.fill(masks[:num_plans])
        self.errors = {int(by_grammar[row]): why for row, why in plan.errors.items()}
        masks[num_plans:] = -1
        for index, row in enumerate(rows[needed].tolist()) if self._fixed else ():
            if row in self._fixed:
                masks[index] &= self._fixed[row]
        requests = [sampled[i].request for i in firsts.tolist()]
        self._delay_end(masks[:num_plans], requests, positions[firsts].tolist(), is_allowed)
        allowed_rows = np.full(len(rows), -1, np.int32)
        allowed_rows[by_grammar] = plan.indices
        allowed_rows[by_ids] = np.arange(num_plans, len(needed))
        return {"allowed": self._pinned.send(), "allowed_rows": allowed_rows}

    def _plan(
        self,
        sampled: Sequence[ScheduledSequence],
        rows: IntArray,
        by_grammar: IntArray,
        paths: Sequence[tuple[int, ...]] | None,
    ) -> MaskPlan:
        """Advance the grammars by their requests' output; return the plan of their masks."""
        indices = by_grammar.tolist()
        states = []
        for index in indices:
            request = sampled[index].request
            state = request.spec.grammar
            state.follow(request.output_token_ids)
            states.append(state)
        of_grammars = None if paths is None else [paths[index] for index in indices]
        return MaskPlan(states, of_grammars, self._rules[rows[by_grammar]].tolist())

    def _delay_end(
        self,
        masks: IntArray,
        requests: Sequence[Request],
        positions: Sequence[int],
        is_allowed: Sequence[bool],
    ) -> None:
        """Mask out EOS while `ignore_eos` or `min_tokens` forbids it and the grammar can go on."""
        for index in self._rows_with_eos(masks):
            request = requests[index]
            rules = request.spec.params
            is_early = positions[index] - request.num_prompt_tokens < rules.min_tokens
            if is_allowed[index] and (rules.ignore_eos or is_early):
                self._forbid_eos(masks[index])

    def _rows_with_eos(self, masks: IntArray) -> list[int]:
        words = self._eos_words
        rows: list[int] = np.flatnonzero((masks[:, words] & self._eos[words]).any(axis=1)).tolist()
        return rows

    def _forbid_eos(self, mask: IntArray) -> None:
        """Mask out EOS, unless no other token is allowed."""
        others = mask & ~self._eos
        if others.any():
            mask[:] = others
