"""Token ids of penalised requests, kept on the device that computes the penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.device import Device
from engine.drafts import MAX_QUERY_LEN
from engine.runner.batch import StepInputs

__all__ = ["HistoryTable", "history_indices"]

IntArray = np.ndarray[Any, np.dtype[Any]]


class HistoryTable:
    """One row of token ids per running request, as wide as the longest penalised one.

    Sampled ids are appended on the device, so penalties do not wait for the host.

    Examples
    --------
    >>> from engine.device import CPU
    >>> table = HistoryTable(num_rows=2, device=CPU)
    >>> table.assign(1, [7, 8], max_num_tokens=4)
    >>> table.append(np.array([1]), np.array([2]), np.array([9], np.int32))
    >>> table.gather(np.array([1]), 3)
    array([[7, 8, 9]], dtype=int32)
    """

    def __init__(self, num_rows: int, device: Device) -> None:
        self._xp = device.xp
        self._ids = self._xp.zeros((num_rows, 0), np.int32)

    def assign(self, row: int, token_ids: Sequence[int], max_num_tokens: int) -> None:
        """Fill a row with known ids, reserving room for `max_num_tokens` plus drafts."""
        self._reserve(max_num_tokens + MAX_QUERY_LEN)
        self._ids[row, : len(token_ids)] = self._xp.asarray(np.array(token_ids, np.int32))

    def append(self, rows: Any, positions: Any, token_ids: Any) -> None:
        """Append one id to each row, at its position; all arrays are on the device."""
        self._ids[rows, positions] = token_ids

    def write(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        """Write ids known to the host into a row, starting at `position`."""
        ids = self._xp.asarray(np.array(token_ids, np.int32))
        self._ids[row, position : position + len(token_ids)] = ids

    def gather(self, rows: Any, length: int) -> Any:
        """Return the first `length` ids of these rows, (R, length) int32."""
        return self._xp.ascontiguousarray(self._ids[:, :length][rows])

    def _reserve(self, length: int) -> None:
        num_rows, width = self._ids.shape
        if length > width:
            wider = self._xp.zeros((num_rows, max(length, 2 * width)), np.int32)
            wider[:, :width] = self._ids
            self._ids = wider


def history_indices(inputs: StepInputs, history_lens: IntArray) -> dict[str, IntArray]:
    """Return the indices `ModelRunner._sample` uses to update histories.

    "penalised": rows of logits whose sampled ids are appended on the device (for a sequence with
    drafts the host writes the ids instead, once it knows the accepted ones). "path_rows",
    "path_columns", "path_ids": row, column and id of each draft to write into the gathered
    histories; these drafts precede the token to sample.
    """
    penalised = np.flatnonzero(history_lens)
    if inputs.paths is None:
        return {"penalised": penalised}
    is_plain = [inputs.sampled[row].drafts is None for row in penalised.tolist()]
    entries: list[tuple[int, int, int]] = []
    for row in penalised.tolist():
        path = inputs.paths[row]
        stop = int(history_lens[row])
        entries += [(row, stop - len(path) + i, token) for i, token in enumerate(path)]
    rows, columns, ids = np.array(entries, np.int64).reshape(-1, 3).T.copy()
    return {
        "penalised": penalised[np.array(is_plain, np.bool_)],
        "path_rows": rows,
        "path_columns": columns,
        "path_ids": ids.astype(np.int32),
    }
