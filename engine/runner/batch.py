"""A scheduled step as flat arrays: `build_inputs` returns `StepInputs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.drafts import Drafts
from engine.layers.batch import ForwardBatch
from engine.runner.request_rows import RequestRows
from engine.runner.state_arrays import state_arrays
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["StepInputs", "build_inputs", "tree_mask"]

IntArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step, on the host.

    Attributes
    ----------
    batch : ForwardBatch
        Requests logits for the last known token of every sampled sequence, and for its drafts.
    rows : (B,) int64
        Request row of each sequence.
    last_id_tokens : (n,) int64
        Indices of batch tokens whose ids the device reads from `RequestRows.last_ids`. Their
        `token_ids` are 0.
    last_id_rows : (n,) int64
        Rows of `last_ids` to read them from.
    sampled : sequence of ScheduledSequence
        Sequence of each row of logits (R): one row for the sequence's last token and one for each
        of its drafts.
    sampled_rows : (R,) int64
        Request row of each row of logits.
    sampled_positions : (R,) int32
        Position of the token to sample from each row of logits.
    paths : sequence of tuple of int, optional
        For each row of logits (R), the drafts between the sequence's last known token and the token
        to sample; None if the step has no drafts.
    """

    batch: ForwardBatch
    rows: IntArray
    last_id_tokens: IntArray
    last_id_rows: IntArray
    sampled: Sequence[ScheduledSequence]
    sampled_rows: IntArray
    sampled_positions: IntArray
    paths: Sequence[tuple[int, ...]] | None = None


def build_inputs(
    output: ScheduleOutput, rows: IntArray, starts: IntArray, table: RequestRows, block_size: int
) -> StepInputs:
    """Build the flat arrays of `output`.

    Parameters
    ----------
    output : ScheduleOutput
        At least one sequence.
    rows : (B,) int64
        Request row of each sequence.
    starts : (B,) int32
        Position of each sequence's first query token.
    table : RequestRows
        Its block tables are updated.
    block_size : int
        Tokens per block.
    """
    if output.is_unchanged:
        return _build_decodes(output, rows, starts, table, block_size)
    sequences = output.sequences
    num_decodes = output.num_decodes
    counts = np.full(len(sequences), output.query_len, np.int32)
    counts[num_decodes:] = [s.num_scheduled_tokens for s in sequences[num_decodes:]]
    lens = starts + counts
    table.update_tables(sequences, rows, lens, rewritten=bool(output.copies))
    cu_seqlens = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    seq_index, kv_positions = _token_positions(starts, counts, cu_seqlens)
    tables = table.block_tables[rows, : (lens.max() - 1) // block_size + 1]
    blocks = tables[seq_index, kv_positions // block_size].astype(np.int64)
    is_sampled = np.array([s.is_sampled for s in sequences], np.bool_)
    last = cu_seqlens[1:] - np.int32(1)  # each sequence's last token, drafts aside
    positions = kv_positions
    paths = None
    if output.num_draft_tokens:
        num_drafts = np.array([s.num_draft_tokens for s in sequences], np.int32)
        last -= num_drafts
        sampled, logits_indices = _logits(last, is_sampled, num_drafts)
        positions = _tree_positions(kv_positions, sequences, last)
        paths = _paths(sequences)
    else:
        sampled = is_sampled.nonzero()[0]
        logits_indices = last[is_sampled]
    uses_last_id = table.last_positions[rows] == kv_positions[last]
    adapters = table.adapters_of(rows)
    batch = ForwardBatch(
        token_ids=_token_ids(sequences, cu_seqlens, uses_last_id),
        positions=kv_positions,
        rope_positions=positions + table.rope_offsets[rows][seq_index],
        slot_mapping=blocks * block_size + kv_positions % block_size,
        cu_seqlens_q=cu_seqlens,
        context_lens=lens,
        block_tables=tables,
        logits_indices=logits_indices,
        num_decodes=num_decodes,
        max_seqlen_q=int(counts.max()),
        max_context_len=int(lens.max()),
        query_len=output.query_len,
        tree_mask=tree_mask(output),
        adapter_slots=None if adapters is None else adapters[seq_index],
        **state_arrays(output, rows, table),
    )
    is_plain = paths is None and len(sampled) == len(sequences)
    return StepInputs(
        batch=batch,
        rows=rows,
        last_id_tokens=last[uses_last_id].astype(np.int64),
        last_id_rows=rows[uses_last_id],
        sampled=sequences if is_plain else [sequences[i] for i in sampled.tolist()],
        sampled_rows=rows[sampled],
        sampled_positions=positions[logits_indices] + np.int32(1),
        paths=paths,
    )


def tree_mask(output: ScheduleOutput) -> IntArray | None:
    """Return the tree mask (num_decodes, query_len) uint64; None if no decode drafts a tree.

    Bit i of an entry: the query token attends to query token i of its sequence.
    """
    decodes = output.sequences[: output.num_decodes]
    if not output.num_draft_tokens or not any(s.drafts and s.drafts.is_tree for s in decodes):
        return None
    masks = [
        (s.drafts or Drafts(())).masks(s.num_scheduled_tokens - s.num_draft_tokens) for s in decodes
    ]
    return np.array(masks, np.uint64)


def _build_decodes(
    output: ScheduleOutput, rows: IntArray, starts: IntArray, table: RequestRows, block_size: int
) -> StepInputs:
    """Build the arrays of an unchanged batch without looping over its sequences."""
    sequences = output.sequences
    count = len(rows)
    lens = starts + np.int32(1)
    block_indices = starts // block_size
    table.update_tables(sequences, rows, lens, rewritten=bool(output.copies))
    uses_last_id = table.last_positions[rows] == starts
    tables = table.block_tables[rows, : block_indices.max() + 1]
    index = np.arange(count)
    cu_seqlens = np.arange(count + 1, dtype=np.int32)
    last_id_tokens = np.flatnonzero(uses_last_id)
    slots = tables[index, block_indices].astype(np.int64) * block_size + starts % block_size
    batch = ForwardBatch(
        token_ids=_token_ids(sequences, cu_seqlens, uses_last_id),
        positions=starts,
        rope_positions=starts + table.rope_offsets[rows],
        slot_mapping=slots,
        cu_seqlens_q=cu_seqlens,
        context_lens=lens,
        block_tables=tables,
        logits_indices=index.astype(np.int32),
        num_decodes=count,
        max_seqlen_q=1,
        max_context_len=int(lens.max()),
        adapter_slots=table.adapters_of(rows),
        **state_arrays(output, rows, table),
    )
    return StepInputs(batch, rows, last_id_tokens, rows[last_id_tokens], sequences, rows, lens)


def _token_positions(
    starts: IntArray, counts: IntArray, cu_seqlens: IntArray
) -> tuple[IntArray, IntArray]:
    """Return each token's sequence index and its position in the KV cache, both (T,)."""
    if len(counts) == cu_seqlens[-1]:
        return np.arange(len(counts)), starts
    seq_index = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(seq_index), dtype=np.int32)
    return seq_index, index - cu_seqlens[seq_index] + starts[seq_index]


def _tree_positions(
    kv_positions: IntArray, sequences: Sequence[ScheduledSequence], last: IntArray
) -> IntArray:
    """Return each token's position (T,); in a tree it follows from the depth, not the slot."""
    positions: IntArray = kv_positions.copy()
    for sequence, index in zip(sequences, last.tolist(), strict=True):
        if sequence.drafts is not None and sequence.drafts.is_tree:
            depths = np.array(sequence.drafts.depths, np.int32)
            positions[index + 1 : index + 1 + len(depths)] = positions[index] + depths
    return positions


def _logits(
    last: IntArray, is_sampled: IntArray, num_drafts: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the sequence index and token index of each row of logits, both (R,)."""
    counts = is_sampled * (1 + num_drafts)
    seq_index = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    index = np.arange(len(seq_index), dtype=np.int32)
    return seq_index, (last[seq_index] + index - first[seq_index]).astype(np.int32)


def _paths(sequences: Sequence[ScheduledSequence]) -> list[tuple[int, ...]]:
    """Return the drafts that precede the token to sample, for each row of logits (R,)."""
    paths: list[tuple[int, ...]] = []
    for sequence in sequences:
        if sequence.drafts is not None:
            paths += map(sequence.drafts.path, range(sequence.num_logits))
        elif sequence.is_sampled:
            paths.append(())
    return paths


def _token_ids(
    sequences: Sequence[ScheduledSequence], cu_seqlens: IntArray, uses_last_id: IntArray
) -> IntArray:
    """Return the ids (T,) int32 known to the host; 0 for ids the device reads itself."""
    ids = np.zeros(cu_seqlens[-1], np.int32)
    # A sequence whose only token is read from `last_ids` needs no id from the host.
    is_known = cu_seqlens[1:] - cu_seqlens[:-1] > uses_last_id
    indices: list[int] = []
    known: list[int] = []
    for index in np.flatnonzero(is_known).tolist():
        sequence = sequences[index]
        start = sequence.start
        first = int(cu_seqlens[index])
        num_known = sequence.num_reached_tokens - int(uses_last_id[index]) - start
        indices += range(first, first + num_known)
        known += sequence.request.token_ids(start, start + num_known)
        if sequence.drafts is not None:
            stop = int(cu_seqlens[index + 1])
            indices += range(stop - len(sequence.drafts), stop)
            known += sequence.drafts.token_ids
    ids[indices] = known
    return ids
