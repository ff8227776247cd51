"""A step's schedule, laid out as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.layers.batch import ForwardBatch
from engine.runner.request_rows import RequestRows
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["StepInputs", "build_inputs"]

IntArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class StepInputs:
    """One step on the host.

    Attributes
    ----------
    batch : ForwardBatch
        Logits are wanted for the last token of every sampled sequence.
    rows : (B,) int64
        The row of each sequence.
    linked : (n,) int64
        Which of the batch's tokens were sampled by the step before: their ids are to be taken from
        `RequestRows.last_ids`, and are 0 here.
    linked_rows : (n,) int64
        The rows of these.
    sampled : list of ScheduledSequence
        For whom a token is sampled (R), in the order of their logits.
    sampled_rows : (R,) int64
        Their table.
    sampled_positions : (R,) int32
        Where the tokens to be sampled stand in their sequences.
    """

    batch: ForwardBatch
    rows: IntArray
    linked: IntArray
    linked_rows: IntArray
    sampled: Sequence[ScheduledSequence]
    sampled_rows: IntArray
    sampled_positions: IntArray


def build_inputs(
    output: ScheduleOutput, rows: IntArray, starts: IntArray, table: RequestRows, block_size: int
) -> StepInputs:
    """Lay out `output`.

    Parameters
    ----------
    output : ScheduleOutput
        With at least one sequence; those of one query token first.
    rows : (B,) int64
        The row of each sequence.
    starts : (B,) int32
        Position of the first query token of each.
    table : RequestRows
        Its block tables are brought up to date here.
    block_size : int
        Tokens of a block.
    """
    if output.is_unchanged:
        return _build_decodes(output, rows, starts, table, block_size)
    sequences, num_decodes = output.sequences, output.num_decodes
    counts = np.ones(len(sequences), np.int32)
    counts[num_decodes:] = [s.num_scheduled_tokens for s in sequences[num_decodes:]]
    lens = starts + counts
    num_blocks = (lens - 1) // block_size + 1
    table.update_tables(sequences, rows, num_blocks, rewritten=bool(output.copies))
    is_linked = table.last_positions[rows] == lens - 1
    cu_seqlens = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    owners, positions = _positions(starts, counts, cu_seqlens, num_decodes)
    tables = table.block_tables[rows, : num_blocks.max()]
    blocks = tables[owners, positions // block_size].astype(np.int64)
    is_sampled = np.array([s.is_sampled for s in sequences], np.bool_)
    batch = ForwardBatch(
        token_ids=_token_ids(sequences, cu_seqlens, is_linked),
        positions=positions,
        rope_positions=positions + table.rope_offsets[rows][owners],
        slot_mapping=blocks * block_size + positions % block_size,
        cu_seqlens_q=cu_seqlens,
        context_lens=lens,
        block_tables=tables,
        logits_indices=(cu_seqlens[1:] - 1)[is_sampled],
        num_decodes=num_decodes,
        max_seqlen_q=int(counts.max()),
        max_context_len=int(lens.max()),
    )
    return StepInputs(
        batch=batch,
        rows=rows,
        linked=(cu_seqlens[1:] - 1)[is_linked].astype(np.int64),
        linked_rows=rows[is_linked],
        sampled=sequences if is_sampled.all() else [s for s in sequences if s.is_sampled],
        sampled_rows=rows[is_sampled],
        sampled_positions=lens[is_sampled],
    )


def _build_decodes(
    output: ScheduleOutput, rows: IntArray, starts: IntArray, table: RequestRows, block_size: int
) -> StepInputs:
    """Lay out a step in which every sequence has one token and is sampled, without walking it."""
    sequences, count = output.sequences, len(rows)
    lens, places = starts + np.int32(1), starts // block_size
    table.update_tables(sequences, rows, places + 1, rewritten=bool(output.copies))
    is_linked = table.last_positions[rows] == starts
    tables = table.block_tables[rows, : places.max() + 1]
    index, cu_seqlens = np.arange(count), np.arange(count + 1, dtype=np.int32)
    linked = np.flatnonzero(is_linked)
    batch = ForwardBatch(
        token_ids=_token_ids(sequences, cu_seqlens, is_linked),
        positions=starts,
        rope_positions=starts + table.rope_offsets[rows],
        slot_mapping=tables[index, places].astype(np.int64) * block_size + starts % block_size,
        cu_seqlens_q=cu_seqlens,
        context_lens=lens,
        block_tables=tables,
        logits_indices=index.astype(np.int32),
        num_decodes=count,
        max_seqlen_q=1,
        max_context_len=int(lens.max()),
    )
    return StepInputs(batch, rows, linked, rows[linked], sequences, rows, lens)


def _positions(
    starts: IntArray, counts: IntArray, cu_seqlens: IntArray, num_decodes: int
) -> tuple[IntArray, IntArray]:
    """Return whose token each one is, and its position in the sequence, both (T,)."""
    if num_decodes == len(counts):
        return np.arange(len(counts)), starts
    owners = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owners), dtype=np.int32)
    return owners, index - cu_seqlens[owners] + starts[owners]


def _token_ids(
    sequences: Sequence[ScheduledSequence], cu_seqlens: IntArray, is_linked: IntArray
) -> IntArray:
    """Return the ids that the host knows (T,) int32, 0 for the last token of a linked sequence."""
    ids = np.zeros(cu_seqlens[-1], np.int32)
    is_known = cu_seqlens[1:] - cu_seqlens[:-1] > is_linked  # what is linked needs no id
    places: list[int] = []
    known: list[int] = []
    for index in np.flatnonzero(is_known).tolist():
        sequence = sequences[index]
        start, stop = sequence.start, sequence.context_len - int(is_linked[index])
        first = int(cu_seqlens[index])
        places += range(first, first + stop - start)
        known += sequence.request.token_ids(start, stop)
    ids[places] = known
    return ids
