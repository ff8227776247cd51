"""`StepResult`: a step's outcome on the host, and its conversion from arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.outputs import Logprob
from engine.request import Request

__all__ = ["StepResult", "logprob_entries", "ranks_of"]


@dataclass
class StepResult:
    """Outcome of a step.

    Attributes
    ----------
    token_ids : dict of Request to list of int
        Ids sampled for each request.
    logprobs : dict of Request to list of dict
        One dict id -> `Logprob` per sampled id; only for requests that asked for it.
    prompt_logprobs : dict of Request to (int, list of dict)
        Position of the first scored token, and one such dict per prompt token from there on.
    failed : dict of Request to str
        Why no token could be sampled; `token_ids` holds the request's drafts accepted before that.
    """

    token_ids: dict[Request, list[int]] = field(default_factory=dict)
    logprobs: dict[Request, list[dict[int, Logprob]]] = field(default_factory=dict)
    prompt_logprobs: dict[Request, tuple[int, list[dict[int, Logprob]]]] = field(
        default_factory=dict
    )
    failed: dict[Request, str] = field(default_factory=dict)

    def keep(self, request: Request, count: int) -> None:
        """Keep only the first `count` ids sampled for `request`, which ended there."""
        self.token_ids[request] = self.token_ids[request][:count]
        if request in self.logprobs:
            del self.logprobs[request][count:]


def ranks_of(xp: Any, logits: Any, token_ids: Any) -> Any:
    """Return the rank of each row's id, (R,) int64: 1 + the number of larger logits."""
    rows = xp.arange(logits.shape[0])
    chosen = logits[rows, xp.maximum(token_ids, 0)]
    return (logits > chosen[:, None]).sum(axis=1) + 1


def logprob_entries(
    arrays: Mapping[str, Any], rows: Iterable[int], token_ids: Sequence[int], count: int
) -> list[dict[int, Logprob]]:
    """Return one dict per row: its `count` most probable ids (-1: all) and the chosen id.

    Parameters
    ----------
    arrays : mapping
        "logprobs" (R,), "ranks" (R,), and "top_ids", "top_logprobs" (R, n) or None; NumPy.
    rows : iterable of int
        Rows to read.
    token_ids : sequence of int
        Chosen id of each of these rows.
    count : int
    """
    entries = []
    for row, token_id in zip(rows, token_ids, strict=True):
        entry: dict[int, Logprob] = {}
        if arrays["top_ids"] is not None:
            width = arrays["top_ids"].shape[1]
            num_top = width if count < 0 else min(count, width)
            ids = arrays["top_ids"][row, :num_top].tolist()
            values = arrays["top_logprobs"][row, :num_top].tolist()
            pairs = zip(ids, values, strict=True)
            entry = {i: Logprob(value, rank) for rank, (i, value) in enumerate(pairs, 1)}
        if token_id not in entry:
            rank = int(arrays["ranks"][row])
            entry[token_id] = Logprob(float(arrays["logprobs"][row]), rank)
        entries.append(entry)
    return entries
