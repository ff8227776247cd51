"""Which tokens the rows of a step may sample: allowed_token_ids, and grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.layers.sampler import pack_allowed
from engine.request import Request
from engine.scheduler.output import ScheduledSequence

__all__ = ["AllowedMasks"]

IntArray = np.ndarray[Any, np.dtype[Any]]


class AllowedMasks:
    """Makes the masks of a step, one for each row of logits that needs one.

    Parameters
    ----------
    num_rows, vocab_size : int
        Request rows (see `RequestRows`), and V.
    eos_token_ids : sequence of int
        Ids that end a sequence.

    Attributes
    ----------
    has_mask, has_grammar : (num_rows,) bool
        Which request rows need a mask, and which of these a grammar's.
    """

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.has_mask = np.zeros(num_rows, np.bool_)
        self.has_grammar = np.zeros(num_rows, np.bool_)
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._fixed: dict[int, IntArray] = {}  # masks of allowed_token_ids, by row
        self._not_eos = ~pack_allowed([i for i in eos_token_ids if i < vocab_size], vocab_size)

    def assign(self, request: Request) -> None:
        """Fill the row of `request`."""
        row, spec = request.row, request.spec
        allowed_ids = spec.params.allowed_token_ids
        self._fixed.pop(row, None)
        if allowed_ids is not None:
            self._fixed[row] = pack_allowed(allowed_ids, self._vocab_size)
        self.has_grammar[row] = spec.grammar is not None
        self.has_mask[row] = spec.grammar is not None or allowed_ids is not None

    def build(
        self,
        sampled: Sequence[ScheduledSequence],
        rows: IntArray,
        positions: IntArray,
        paths: Sequence[tuple[int, ...]],
    ) -> dict[str, IntArray]:
        """Return "allowed" and "allowed_rows" of `kernels.sample`, for R rows of logits.

        Grammars first follow the requests' output. Empty if no row needs a mask; arguments as of
        `SamplingTable.build`.
        """
        needed = np.flatnonzero(self.has_mask[rows])
        if not len(needed):
            return {}
        masks = np.full((len(needed), self._num_words), -1, np.int32)
        allowed_rows = np.full(len(rows), -1, np.int32)
        allowed_rows[needed] = np.arange(len(needed))
        with_grammar = np.flatnonzero(self.has_grammar[rows[needed]])
        if len(with_grammar):
            logits_rows = needed[with_grammar].tolist()
            chosen = [sampled[i].request for i in logits_rows]
            grammar_masks = self._grammar_masks(
                chosen, positions[logits_rows].tolist(), [paths[i] for i in logits_rows]
            )
            masks[with_grammar] = grammar_masks
        for mask, row in zip(masks, rows[needed].tolist(), strict=True):
            if row in self._fixed:
                mask &= self._fixed[row]
        return {"allowed": masks, "allowed_rows": allowed_rows}

    def _grammar_masks(
        self, requests: Sequence[Request], positions: list[int], paths: Sequence[tuple[int, ...]]
    ) -> IntArray:
        from engine.structured.masks import fill_masks  # on demand: few requests have a grammar

        states = [request.spec.grammar for request in requests]
        for request, state in zip(requests, states, strict=True):
            state.follow(request.output_token_ids)
        masks = np.full((len(states), self._num_words), -1, np.int32)
        written = fill_masks(states, paths, masks)
        for index, request in enumerate(requests):
            rules = request.spec.params
            is_early = positions[index] - request.num_prompt_tokens < rules.min_tokens
            if written[index] and (rules.ignore_eos or is_early):
                self._forbid_eos(masks[index])
        return masks

    def _forbid_eos(self, mask: IntArray) -> None:
        """Forbid the end, unless nothing else is possible."""
        others = mask & self._not_eos
        if others.any():
            mask[:] = others
