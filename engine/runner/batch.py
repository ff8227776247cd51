"""A step's schedule, laid out as flat arrays."""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.layers.batch import ForwardBatch
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["build_batch", "sampled_sequences"]


def sampled_sequences(output: ScheduleOutput) -> list[ScheduledSequence]:
    """Return the sequences for which a token is sampled, in the order of their logits."""
    return [sequence for sequence in output.sequences if sequence.is_sampled]


def build_batch(
    output: ScheduleOutput, *, block_size: int, long_rope_offset: int = 0
) -> ForwardBatch:
    """Lay out `output` on the host.

    Parameters
    ----------
    output : ScheduleOutput
        Not empty; sequences of one query token first.
    block_size : int
        Tokens of a block.
    long_rope_offset : int
        First row of the long factors in the rope table, for requests that use them.

    Returns
    -------
    ForwardBatch
        NumPy arrays; logits are wanted for the last token of every sampled sequence.
    """
    sequences = output.sequences
    batch = ForwardBatch.build(
        [s.request.token_ids(s.start, s.context_len) for s in sequences],
        [s.start for s in sequences],
        [s.request.block_table for s in sequences],
        block_size,
    )
    is_sampled = np.array([s.is_sampled for s in sequences])
    rope_positions = batch.rope_positions
    if any(s.request.long_rope for s in sequences):
        offsets = np.array([s.request.long_rope * long_rope_offset for s in sequences], np.int32)
        rope_positions = rope_positions + np.repeat(offsets, np.diff(batch.cu_seqlens_q))
    return dataclasses.replace(
        batch, rope_positions=rope_positions, logits_indices=batch.logits_indices[is_sampled]
    )
