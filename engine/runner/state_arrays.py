"""The state slots of a step as arrays: `state_arrays`."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.request import NO_SLOT
from engine.runner.request_rows import RequestRows
from engine.scheduler.output import ScheduleOutput

__all__ = ["state_arrays"]

IntArray = np.ndarray[Any, np.dtype[Any]]


def state_arrays(output: ScheduleOutput, rows: IntArray, table: RequestRows) -> dict[str, Any]:
    """Return the fields of a `ForwardBatch` for recurrent layers; {} for a model without any.

    Most sequences continue in the slot of their row; `output.state_access` lists the others.

    Parameters
    ----------
    output : ScheduleOutput
    rows : (B,) int64
        Request row of each sequence.
    table : RequestRows
        Its slots are updated.
    """
    if table.state_slots is None:
        return {}
    accesses = output.state_access
    width = max((len(access.targets) for access in accesses), default=1)
    index_of = np.zeros(len(table.state_slots), np.int64)
    index_of[rows] = np.arange(len(rows))
    for access in accesses:
        table.state_slots[access.request.row] = access.targets[0]
    slots = table.state_slots[rows]
    arrays: dict[str, Any] = {"state_slots": slots, "state_targets": slots.copy()}
    if width > 1:
        arrays["state_targets"] = _targets_of_tokens(output, slots, width)
    for access in accesses:
        index = index_of[access.request.row]
        slots[index] = access.source
        if len(access.targets) > 1:
            arrays["state_targets"][index, : len(access.targets)] = access.targets
    return arrays | _snapshots(output, index_of)


def _targets_of_tokens(output: ScheduleOutput, slots: IntArray, width: int) -> IntArray:
    """Return the slot to write after each token (B, width), for sequences without drafts.

    Only the last token has one; that of a longer sequence is in the last column.
    """
    counts = [min(sequence.num_scheduled_tokens, width) for sequence in output.sequences]
    targets = np.full((len(slots), width), NO_SLOT, np.int32)
    targets[np.arange(len(slots)), np.array(counts) - 1] = slots
    return targets


def _snapshots(output: ScheduleOutput, index_of: IntArray) -> dict[str, Any]:
    """Return the slots and token offsets of the snapshots that a step takes; {} without any."""
    taken = [access for access in output.state_access if access.snapshot != NO_SLOT]
    if not taken:
        return {}
    slots = np.full(len(output.sequences), NO_SLOT, np.int32)
    offsets = np.zeros_like(slots)
    for access in taken:
        index = index_of[access.request.row]
        slots[index] = access.snapshot
        offsets[index] = access.snapshot_len - output.sequences[index].start
    return {"snapshot_slots": slots, "snapshot_offsets": offsets}
