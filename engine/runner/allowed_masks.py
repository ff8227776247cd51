"""Which tokens the rows of a step may sample: allowed_token_ids, and grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.device import Device
from engine.layers.sampler import pack_allowed
from engine.request import Request
from engine.runner.transfer import PinnedArrays
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
    device : Device
        Where masks are used.

    Attributes
    ----------
    has_mask : (num_rows,) bool
        Which request rows need a mask.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: Device
    ) -> None:
        self.has_mask = np.zeros(num_rows, np.bool_)
        self._has_grammar = np.zeros(num_rows, np.bool_)
        self._fixed: dict[int, IntArray] = {}  # masks of allowed_token_ids, by row
        self._vocab_size = vocab_size
        self._eos = pack_allowed([i for i in eos_token_ids if i < vocab_size], vocab_size)
        self._eos_words = np.flatnonzero(self._eos)
        self._pinned = PinnedArrays(device)

    def assign(self, request: Request) -> None:
        """Fill the row of `request`."""
        row, spec = request.row, request.spec
        allowed_ids = spec.params.allowed_token_ids
        self._fixed.pop(row, None)
        if allowed_ids is not None:
            self._fixed[row] = pack_allowed(allowed_ids, self._vocab_size)
        self._has_grammar[row] = spec.grammar is not None
        self.has_mask[row] = spec.grammar is not None or allowed_ids is not None

    def build(
        self,
        sampled: Sequence[ScheduledSequence],
        rows: IntArray,
        positions: IntArray,
        paths: Sequence[tuple[int, ...]],
    ) -> dict[str, Any]:
        """Return "allowed", on the device, and "allowed_rows" of `kernels.sample`.

        Grammars first follow the requests' output. Empty if no row needs a mask; arguments as of
        `SamplingTable.build`.
        """
        has_grammar = self._has_grammar[rows]
        by_grammar = np.flatnonzero(has_grammar)
        needed = np.concatenate([by_grammar, np.flatnonzero(self.has_mask[rows] & ~has_grammar)])
        if not len(needed):
            return {}
        masks = self._pinned.next((len(needed), len(self._eos)), np.int32)
        masks[len(by_grammar) :] = -1
        indices = by_grammar.tolist()
        of_grammars, requests = masks[: len(indices)], [sampled[i].request for i in indices]
        is_allowed = self._fill(of_grammars, requests, [paths[i] for i in indices])
        for index, row in enumerate(rows[needed].tolist()) if self._fixed else ():
            if row in self._fixed:
                masks[index] &= self._fixed[row]
        self._delay_end(of_grammars, requests, positions[by_grammar].tolist(), is_allowed)
        allowed_rows = np.full(len(rows), -1, np.int32)
        allowed_rows[needed] = np.arange(len(needed))
        return {"allowed": self._pinned.send(), "allowed_rows": allowed_rows}

    def _fill(
        self,
        masks: IntArray,
        requests: Sequence[Request],
        paths: Sequence[tuple[int, ...]],
    ) -> list[bool]:
        """Write the masks of grammars; return which paths they allow."""
        if not requests:
            return []
        from engine.structured.masks import fill_masks  # on demand: it needs a library

        states = [request.spec.grammar for request in requests]
        for request, state in zip(requests, states, strict=True):
            state.follow(request.output_token_ids)
        return fill_masks(states, paths, masks)

    def _delay_end(
        self,
        masks: IntArray,
        requests: Sequence[Request],
        positions: Sequence[int],
        is_allowed: Sequence[bool],
    ) -> None:
        """Forbid the end where `ignore_eos` or `min_tokens` says so, and the text can go on."""
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
        """Forbid the end, unless nothing else is possible."""
        others = mask & ~self._eos
        if others.any():
            mask[:] = others
