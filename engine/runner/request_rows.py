"""Persistent arrays with one row per running request.

A step's arrays are gathered from these rows, so preparing a step on the host takes a few array
operations, plus work only for changes: requests that start or end, and block tables that grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.device import Device
from engine.errors import EngineError
from engine.layers.lora import NO_ADAPTER
from engine.request import NO_SLOT, Request
from engine.scheduler.output import ScheduledSequence

__all__ = ["RequestRows"]

IntArray = np.ndarray[Any, np.dtype[Any]]


class RequestRows:
    """One row per running request; `Request.row` is its index.

    Parameters
    ----------
    num_rows : int
        Maximum number of running requests.
    max_blocks : int
        Maximum length of a block table.
    block_size : int
        Tokens per block.
    device : Device
        Device that holds `last_ids`.
    has_states : bool
        Whether the model has recurrent layers.
    has_adapters : bool
        Whether the model has slots for LoRA adapters.

    Attributes
    ----------
    owners : list of Request or None
        Owner of each row; None if the row is free.
    block_tables : (num_rows, max_blocks) int32
        Block ids; entries past the end of a table are stale.
    num_slots : (num_rows,) int64
        Token capacity of the blocks in each table.
    num_blocks, num_sent : (num_rows,) int64
        Lengths of these tables, and of their copies on the device (`decode_inputs`).
    has_unsent : bool
        Whether the two lengths may differ.
    last_ids : (num_rows,) int32, on the device
        Last id sampled for each row; the host may not know it yet.
    last_positions : (num_rows,) int32
        Position of that id in its sequence; -1 if the `last_ids` entry is invalid.
    rope_offsets : (num_rows,) int32
        First row of the rope table that the request uses.
    state_slots : (num_rows,) int32, or None
        State slot that the request wrote last; None for a model without recurrent layers.
    adapter_slots : (num_rows,) int32, or None
        Slot of the request's LoRA adapter, or NO_ADAPTER; None for a model without slots.
    """

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        block_size: int,
        device: Device,
        *,
        has_states: bool,
        has_adapters: bool,
    ) -> None:
        self._block_size = block_size
        self.owners: list[Request | None] = [None] * num_rows
        self.block_tables = np.zeros((num_rows, max_blocks), np.int32)
        self.last_ids = device.xp.zeros(num_rows, np.int32)
        self.last_positions = np.full(num_rows, -1, np.int32)
        self.rope_offsets = np.zeros(num_rows, np.int32)
        self.state_slots = np.full(num_rows, NO_SLOT, np.int32) if has_states else None
        self.adapter_slots = np.full(num_rows, NO_ADAPTER, np.int32) if has_adapters else None
        self.num_slots = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.num_sent = np.zeros(num_rows, np.int64)
        self.has_unsent = False
        self._free = list(range(num_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.owners) - len(self._free)

    def assign(self, request: Request) -> int:
        """Assign a free row to `request`, which must have none."""
        if not self._free:
            raise EngineError(f"no row is free for request {request.request_id!r}")
        row = request.row = self._free.pop()
        self.owners[row] = request
        self.last_positions[row] = -1
        self.num_slots[row] = self.num_blocks[row] = self.num_sent[row] = 0
        return row

    def release(self, request: Request) -> None:
        """Free the row of `request`."""
        self.owners[request.row] = None
        self._free.append(request.row)
        request.row = -1

    def check_integrity(self) -> None:
        """Verify the counts, and that each row is free or owned by one unfinished request."""
        if (self.num_slots != self.num_blocks * self._block_size).any():
            raise EngineError(f"rows with {self.num_blocks} blocks hold {self.num_slots} tokens")
        if not self.has_unsent and (self.num_sent != self.num_blocks).any():
            raise EngineError(f"rows have {self.num_blocks} blocks; only {self.num_sent} are sent")
        owned = [row for row, owner in enumerate(self.owners) if owner is not None]
        if sorted(owned + self._free) != list(range(len(self.owners))):
            raise EngineError(
                f"each row must be owned or free; owned: {owned}, free: {sorted(self._free)}"
            )
        for row in owned:
            request = self.owners[row]
            assert request is not None
            if request.row != row or request.is_finished:
                raise EngineError(
                    f"row {row} must be owned by an unfinished request with this row; got "
                    f"{request.request_id!r}, {request.status.value}, with row {request.row}"
                )

    def update_tables(
        self,
        sequences: Sequence[ScheduledSequence],
        rows: IntArray,
        lens: IntArray,
        *,
        rewritten: bool,
    ) -> None:
        """Copy the new block-table entries this step needs.

        Parameters
        ----------
        sequences : sequence of ScheduledSequence
        rows : (B,) int64
            Row of each sequence.
        lens : (B,) int
            Tokens per sequence whose blocks the step uses.
        rewritten : bool
            Whether existing entries may have changed; otherwise tables only grew.
        """
        if rewritten:
            self.num_slots[rows] = self.num_blocks[rows] = self.num_sent[rows] = 0
        for index in (lens > self.num_slots[rows]).nonzero()[0].tolist():
            table = sequences[index].request.block_table
            row = rows[index]
            start = self.num_blocks[row]
            if len(table) - start == 1:
                self.block_tables[row, start] = table[start]
            else:
                self.block_tables[row, start : len(table)] = table[start:]
            self.num_blocks[row] = len(table)
            self.num_slots[row] = len(table) * self._block_size
            self.has_unsent = True

    def adapters_of(self, rows: IntArray) -> IntArray | None:
        """Return the adapter slots of these rows; None if no row has an adapter."""
        if self.adapter_slots is None:
            return None
        slots: IntArray = self.adapter_slots[rows]
        return slots if (slots != NO_ADAPTER).any() else None

    def note_sent(self, rows: IntArray) -> None:
        """Record that these block tables have been sent to the device."""
        self.num_sent[rows] = self.num_blocks[rows]
        self.has_unsent = self.num_sent.tobytes() != self.num_blocks.tobytes()

    def check(
        self,
        sequences: Sequence[ScheduledSequence],
        rows: IntArray,
        starts: IntArray,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """Verify the rows a step is about to use (debug mode).

        Raises
        ------
        EngineError
            If `rows` or `starts` do not match the sequences; if a row differs from its request's
            block table or holds an id outside [0, num_blocks); or if two requests would write to
            the same block.
        """
        wanted = [(s.request.row, s.start) for s in sequences]
        if list(zip(rows.tolist(), starts.tolist(), strict=True)) != wanted:
            raise EngineError(f"rows and positions must be {wanted}; got {rows} and {starts}")
        writers: dict[int, str] = {}
        for sequence in sequences:
            request = sequence.request
            stop = (sequence.context_len - 1) // block_size + 1
            table = request.block_table[:stop]
            row = self.block_tables[request.row, : len(table)].tolist()
            if row != table or not all(0 <= block < num_blocks for block in table):
                raise EngineError(
                    f"block table of request {request.request_id!r} must be {table}, of ids in "
                    f"[0, {num_blocks}); got {row}"
                )
            for block in table[sequence.start // block_size :]:
                other = writers.setdefault(block, request.request_id)
                if other != request.request_id:
                    raise EngineError(
                        f"block {block} would be written by requests {other!r} and "
                        f"{request.request_id!r} in one step"
                    )
