"""A step's schedule, laid out as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.drafts import Drafts
from engine.layers.batch import ForwardBatch
from engine.runner.request_rows import RequestRows
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["StepInputs", "build_inputs", "tree_mask"]

IntArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class StepInputs:
    """One step on the host.

    Attributes
    ----------
    batch : ForwardBatch
        Logits are wanted for the last known token of every sampled sequence, and for its drafts.
    rows : (B,) int64
        The row of each sequence.
    linked : (n,) int64
        Which of the batch's tokens were sampled by the step before: their ids are to be taken from
        `RequestRows.last_ids`, and are 0 here.
    linked_rows : (n,) int64
        The rows of these.
    sampled : list of ScheduledSequence
        Whose logits these are (R), in their order; 1 + its drafts for each sampled sequence.
    sampled_rows : (R,) int64
        The row of each.
    sampled_positions : (R,) int32
        Where the tokens to be sampled stand in their sequences.
    paths : list of tuple of int, optional
        The drafts between a sequence's last known token and the one to be sampled (R); None if the
        step has no drafts.
    """

    batch: ForwardBatch
    rows: IntArray
    linked: IntArray
    linked_rows: IntArray
    sampled: Sequence[ScheduledSequence]
    sampled_rows: IntArray
    sampled_positions: IntArray
    paths: Sequence[tuple[int, ...]] | None = None


def build_inputs(
    output: ScheduleOutput, rows: IntArray, starts: IntArray, table: RequestRows, block_size: int
) -> StepInputs:
    """Lay out `output`.

    Parameters
    ----------
    output : ScheduleOutput
        With at least one sequence.
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
    counts = np.full(len(sequences), output.query_len, np.int32)
    counts[num_decodes:] = [s.num_scheduled_tokens for s in sequences[num_decodes:]]
    lens = starts + counts
    num_blocks = (lens - 1) // block_size + 1
    table.update_tables(sequences, rows, num_blocks, rewritten=bool(output.copies))
    cu_seqlens = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    owners, places = _places(starts, counts, cu_seqlens)
    tables = table.block_tables[rows, : num_blocks.max()]
    blocks = tables[owners, places // block_size].astype(np.int64)
    is_sampled = np.array([s.is_sampled for s in sequences], np.bool_)
    last = cu_seqlens[1:] - np.int32(1)  # the last token of each sequence that is no draft
    positions, paths = places, None
    if output.num_draft_tokens:
        num_drafts = np.array([s.num_draft_tokens for s in sequences], np.int32)
        last -= num_drafts
        sampled, logits_indices = _logits(last, is_sampled, num_drafts)
        positions, paths = _tree_positions(places, sequences, last), _paths(sequences)
    else:
        sampled, logits_indices = is_sampled.nonzero()[0], last[is_sampled]
    is_linked = table.last_positions[rows] == places[last]
    batch = ForwardBatch(
        token_ids=_token_ids(sequences, cu_seqlens, is_linked),
        positions=places,
        rope_positions=positions + table.rope_offsets[rows][owners],
        slot_mapping=blocks * block_size + places % block_size,
        cu_seqlens_q=cu_seqlens,
        context_lens=lens,
        block_tables=tables,
        logits_indices=logits_indices,
        num_decodes=num_decodes,
        max_seqlen_q=int(counts.max()),
        max_context_len=int(lens.max()),
        query_len=output.query_len,
        tree_mask=tree_mask(output),
    )
    is_plain = paths is None and len(sampled) == len(sequences)
    return StepInputs(
        batch=batch,
        rows=rows,
        linked=last[is_linked].astype(np.int64),
        linked_rows=rows[is_linked],
        sampled=sequences if is_plain else [sequences[i] for i in sampled.tolist()],
        sampled_rows=rows[sampled],
        sampled_positions=positions[logits_indices] + np.int32(1),
        paths=paths,
    )


def tree_mask(output: ScheduleOutput) -> IntArray | None:
    """Return which of its sequence's query tokens each token of a decode sees, as bits.

    (num_decodes, query_len) uint64; None if no decode has a tree of drafts.
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


def _places(starts: IntArray, counts: IntArray, cu_seqlens: IntArray) -> tuple[IntArray, IntArray]:
    """Return whose token each one is, and its place in the sequence, both (T,)."""
    if len(counts) == cu_seqlens[-1]:
        return np.arange(len(counts)), starts
    owners = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owners), dtype=np.int32)
    return owners, index - cu_seqlens[owners] + starts[owners]


def _tree_positions(
    places: IntArray, sequences: Sequence[ScheduledSequence], last: IntArray
) -> IntArray:
    """Return the position of each token (T,): a draft's is its depth, wherever its keys lie."""
    positions: IntArray = places.copy()
    for sequence, index in zip(sequences, last.tolist(), strict=True):
        if sequence.drafts is not None and sequence.drafts.is_tree:
            depths = np.array(sequence.drafts.depths, np.int32)
            positions[index + 1 : index + 1 + len(depths)] = positions[index] + depths
    return positions


def _logits(
    last: IntArray, is_sampled: IntArray, num_drafts: IntArray
) -> tuple[IntArray, IntArray]:
    """Return whose each row of logits is, and of which token, both (R,)."""
    counts = is_sampled * (1 + num_drafts)
    owners = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    index = np.arange(len(owners), dtype=np.int32)
    return owners, (last[owners] + index - first[owners]).astype(np.int32)


def _paths(sequences: Sequence[ScheduledSequence]) -> list[tuple[int, ...]]:
    """Return the drafts before the token that each row of logits samples, (R,)."""
    paths: list[tuple[int, ...]] = []
    for sequence in sequences:
        if sequence.drafts is not None:
            paths += map(sequence.drafts.path, range(sequence.num_logits))
        elif sequence.is_sampled:
            paths.append(())
    return paths


def _token_ids(
    sequences: Sequence[ScheduledSequence], cu_seqlens: IntArray, is_linked: IntArray
) -> IntArray:
    """Return the ids that the host knows (T,) int32, 0 for the linked token of a sequence."""
    ids = np.zeros(cu_seqlens[-1], np.int32)
    is_known = cu_seqlens[1:] - cu_seqlens[:-1] > is_linked  # what is linked needs no id
    places: list[int] = []
    known: list[int] = []
    for index in np.flatnonzero(is_known).tolist():
        sequence = sequences[index]
        start, first = sequence.start, int(cu_seqlens[index])
        num_known = sequence.num_reached_tokens - int(is_linked[index]) - start
        places += range(first, first + num_known)
        known += sequence.request.token_ids(start, start + num_known)
        if sequence.drafts is not None:
            stop = int(cu_seqlens[index + 1])
            places += range(stop - len(sequence.drafts), stop)
            known += sequence.drafts.token_ids
    ids[places] = known
    return ids
