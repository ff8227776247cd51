"""Fills the static inputs of decode steps, writing only the fields that changed.

Between steps of the same requests only ids and positions change; the rest, such as the sampling
parameters, is still in the staging buffer from its last use. This matters for steps with drafts:
their tokens depend on the previous step's results, so the device idles while the host prepares
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engine.device import Device
from engine.drafts import DeferredDrafts
from engine.runner.batch import tree_mask
from engine.runner.request_rows import RequestRows
from engine.runner.sampling import SamplingTable
from engine.runner.static_inputs import NUM_BUFFERS, StagingBuffer, StaticInputs
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["Columns", "GraphInputs", "Tokens"]

IntArray = np.ndarray[Any, np.dtype[Any]]


class Tokens(NamedTuple):
    """Tokens of a decode step, `query_len` per sequence; every array is (T,)."""

    token_ids: IntArray | list[int]  # -1: read the row's entry of `last_ids`
    kv_positions: IntArray  # int32; positions in the KV cache at which the keys are written
    positions: IntArray  # int32; sequence positions; differ from `kv_positions` only in trees
    tree_mask: IntArray | None = None  # uint64; see `batch.tree_mask`
    drafts: Any = None  # (B, query_len - 1) on the device: ids after each sequence's first token


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns that stay unchanged while the same requests are decoded.

    Attributes
    ----------
    rows : (B,) int64
    query_len : int
    sampling : dict of str to (B * query_len,) array
        Columns required by `kernels.sample`, and the adapter slots, if the model has any.
    rope_offsets : (B * query_len,) int32
    key : tuple
        Changes whenever any of these may have changed.
    """

    rows: IntArray
    query_len: int
    sampling: dict[str, IntArray]
    rope_offsets: IntArray
    key: tuple[bytes, int, int]


class GraphInputs:
    """Static inputs of decode graphs, filled for each step.

    Parameters
    ----------
    device : Device
    table : RequestRows
    sampling : SamplingTable
    max_size, max_query_len : int
        Maximum number of sequences, and of query tokens per sequence.
    num_buffers : int
        See `StaticInputs`.

    Attributes
    ----------
    static : StaticInputs
    """

    def __init__(
        self,
        device: Device,
        table: RequestRows,
        sampling: SamplingTable,
        max_size: int,
        max_query_len: int,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self._table = table
        self._sampling = sampling
        max_blocks = table.block_tables.size
        self.static = StaticInputs(
            device,
            max_size,
            max_size * max_query_len,
            max_blocks,
            has_states=table.state_slots is not None,
            has_adapters=table.adapter_slots is not None,
            num_buffers=num_buffers,
        )
        self._offsets = np.arange(max_query_len, dtype=np.int32)
        self._columns: Columns | None = None

    def columns(self, rows: IntArray, query_len: int) -> Columns | None:
        """Return the columns of these rows; None if any row's sampling needs more."""
        key = rows.tobytes(), query_len, self._sampling.version
        if self._columns is None or self._columns.key != key:
            columns = self._sampling.plain_columns(rows)
            if columns is None:
                return None
            repeated = {name: column.repeat(query_len) for name, column in columns.items()}
            if self._table.adapter_slots is not None:
                repeated["adapter_slots"] = self._table.adapter_slots[rows].repeat(query_len)
            offsets = self._table.rope_offsets[rows].repeat(query_len)
            self._columns = Columns(rows, query_len, repeated, offsets, key)
        return self._columns

    def tokens(self, output: ScheduleOutput, rows: IntArray, starts: IntArray) -> Tokens:
        """Return the tokens of a step; `starts` (B,): each sequence's first query position."""
        if output.query_len == 1:
            ids = self._last_or_host_ids(output.sequences, rows, starts)
            return Tokens(ids, starts, starts)
        return self._tokens_with_drafts(output, rows, starts)

    def fill(
        self,
        columns: Columns,
        size: int,
        tokens: Tokens,
        stops: IntArray,
        states: Mapping[str, IntArray],
    ) -> StagingBuffer:
        """Return the next staging buffer, filled except for the block tables.

        Parameters
        ----------
        columns : Columns
        size : int
            Number of sequences, padding included.
        tokens : Tokens
        stops : (B,) int32
            Context lengths.
        states : mapping of str to array
            "state_slots" and "state_targets" of a model with recurrent layers.
        """
        buffer = self.static.next_buffer()
        count = len(columns.rows)
        if buffer.holds != (columns.key, size):
            buffer.pad(count, size, columns.query_len)
            buffer.fill(count, count, columns.query_len, rows=columns.rows, **columns.sampling)
            buffer.holds = columns.key, size
        fields = buffer.fields
        num_tokens = len(columns.rope_offsets)
        fields["token_ids"][:num_tokens] = tokens.token_ids
        fields["positions"][:num_tokens] = tokens.kv_positions
        fields["sample_positions"][:num_tokens] = tokens.positions + 1
        rotated = fields["rope_positions"][:num_tokens]
        np.add(tokens.positions, columns.rope_offsets, out=rotated)
        fields["context_lens"][:count] = stops
        if tokens.tree_mask is not None:
            fields["tree_mask"][:num_tokens] = tokens.tree_mask
        for name, array in states.items():
            fields[name][: array.size] = array.ravel()
        return buffer

    def fill_all(
        self,
        rows: IntArray,
        size: int,
        query_len: int,
        tokens: Tokens,
        stops: IntArray,
        states: Mapping[str, IntArray],
    ) -> StagingBuffer:
        """Return the next staging buffer, filled for a graph that ends with the logits."""
        buffer = self.static.next_buffer()
        count = len(rows)
        buffer.holds = None
        offsets = self._table.rope_offsets[rows].repeat(query_len)
        columns: dict[str, Any] = {
            "rows": rows,
            "token_ids": tokens.token_ids,
            "positions": tokens.kv_positions,
            "rope_positions": tokens.positions + offsets,
            "context_lens": stops,
        }
        if tokens.tree_mask is not None:
            columns["tree_mask"] = tokens.tree_mask
        if self._table.adapter_slots is not None:
            columns["adapter_slots"] = self._table.adapter_slots[rows].repeat(query_len)
        columns |= {name: array.ravel() for name, array in states.items()}
        buffer.fill(count, size, query_len, **columns)
        return buffer

    def fill_blocks(self, buffer: StagingBuffer, rows: IntArray, size: int) -> int:
        """Write the block ids the device does not have yet; return their number."""
        if not self._table.has_unsent:
            buffer.fill_no_blocks()
            return 0
        held = self._table.num_blocks[rows]
        sent = self._table.num_sent[rows]
        counts = held - sent
        buffer.fill(len(rows), size, new_starts=sent)
        offsets = buffer.fill_blocks(counts, size)
        blocks = buffer.fields["new_blocks"]
        tables = self._table.block_tables
        for index in counts.nonzero()[0].tolist():
            new = tables[rows[index], sent[index] : held[index]]
            blocks[offsets[index] : offsets[index + 1]] = new
        self._table.note_sent(rows)
        return int(offsets[-1])

    def send(self, buffer: StagingBuffer, num_new_blocks: int, tokens: Tokens) -> None:
        """Copy the buffer, including its block ids, to the device."""
        self.static.send(buffer, num_new_blocks)
        if tokens.drafts is not None:
            shape = tokens.drafts.shape[0], tokens.drafts.shape[1] + 1
            ids = self.static.arrays["token_ids"][: shape[0] * shape[1]]
            ids.reshape(shape)[:, 1:] = tokens.drafts

    # ---- parts of the above

    def _last_or_host_ids(
        self, sequences: Sequence[ScheduledSequence], rows: IntArray, starts: IntArray
    ) -> IntArray:
        """Return the ids the host must send; -1 where the device reads `last_ids`."""
        ids = np.full(len(rows), -1, np.int32)
        for index in (self._table.last_positions[rows] != starts).nonzero()[0].tolist():
            start = sequences[index].start
            ids[index] = sequences[index].request.token_ids(start, start + 1)[0]
        return ids

    def _tokens_with_drafts(
        self, output: ScheduleOutput, rows: IntArray, starts: IntArray
    ) -> Tokens:
        """Return the tokens of decodes with drafts."""
        sequences = output.sequences
        query_len = output.query_len
        on_device = _drafts_on_device(sequences, query_len)
        ids: list[int] = []
        positions = starts[:, None] + self._offsets[:query_len]
        kv_positions = positions.ravel()
        has_parents = False
        last_positions = self._table.last_positions[rows].tolist()
        for sequence, last_position in zip(sequences, last_positions, strict=True):
            start = sequence.start
            drafts = sequence.drafts
            num_drafts = 0 if drafts is None else len(drafts)
            reached = start + sequence.num_scheduled_tokens - num_drafts
            known = sequence.request.token_ids(start, reached)
            if last_position == reached - 1:
                known = [*known[: reached - 1 - start], -1]
            ids += known
            if drafts is not None:
                ids += drafts.token_ids if on_device is None else [-1] * num_drafts
                has_parents = has_parents or drafts.parents is not None
        mask = tree_mask(output) if has_parents else None
        if mask is None:
            return Tokens(ids, kv_positions, kv_positions, None, on_device)
        _set_depths(positions := positions.copy(), sequences)
        return Tokens(ids, kv_positions, positions.ravel(), mask.ravel(), on_device)


def _set_depths(positions: IntArray, sequences: Sequence[ScheduledSequence]) -> None:
    """Set the position of each draft in a tree (B, query_len) from its depth."""
    for row, sequence in zip(positions, sequences, strict=True):
        if sequence.drafts is not None and sequence.drafts.is_tree:
            depths = np.array(sequence.drafts.depths, np.int32)
            row[-len(depths) :] = sequence.num_reached_tokens - 1 + depths


def _drafts_on_device(sequences: Sequence[ScheduledSequence], query_len: int) -> Any:
    """Return all sequences' drafts (B, query_len - 1) if already on the device, else None."""
    first = sequences[0].drafts
    if not isinstance(first, DeferredDrafts) or first.ids.on_device is None:
        return None
    for index, sequence in enumerate(sequences):
        drafts = sequence.drafts
        if not isinstance(drafts, DeferredDrafts) or drafts.ids is not first.ids:
            return None
        if drafts.row != index or len(drafts) != query_len - 1:
            return None
    return first.ids.on_device[: len(sequences), : query_len - 1]
