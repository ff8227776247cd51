"""Slots: one row of persistent arrays for each running request.

A step's arrays are gathered from these rows, so the host work of a step is a few array operations
plus what changed: a request that came or went, a block table that grew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from engine.device import Device
from engine.errors import EngineError
from engine.request import Request
from engine.scheduler.output import ScheduledSequence

__all__ = ["SlotTable"]

IntArray = np.ndarray[Any, np.dtype[Any]]


class SlotTable:
    """The rows of running requests.

    Parameters
    ----------
    num_slots : int
        Most requests that run at once.
    max_blocks : int
        Longest block table.
    device : Device
        Where `last_ids` lives.

    Attributes
    ----------
    block_tables : (num_slots, max_blocks) int32
        Block ids; entries past a table's length are stale.
    num_blocks, num_sent : (num_slots,) int64
        Lengths of the block tables: what they are, and what `decode_inputs` knows of them.
    last_ids : (num_slots,) int32, on the device
        The id sampled last for each slot. The host may not know it yet.
    last_positions : (num_slots,) int32
        Where that id stands in its sequence; -1 if nothing was sampled in this slot.
    rope_offsets : (num_slots,) int32
        First row of the rope table for the request.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: Device) -> None:
        self.block_tables = np.zeros((num_slots, max_blocks), np.int32)
        self.last_ids = device.xp.zeros(num_slots, np.int32)
        self.last_positions = np.full(num_slots, -1, np.int32)
        self.rope_offsets = np.zeros(num_slots, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.num_sent = np.zeros(num_slots, np.int64)
        self._slots: dict[Request, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def __contains__(self, request: Request) -> bool:
        return request in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, request: Request) -> int:
        """Return the row of a request that has one."""
        return self._slots[request]

    def assign(self, request: Request) -> int:
        """Give `request`, which has no row, a free one."""
        if not self._free:
            raise EngineError(f"no free slot for request {request.request_id!r}")
        slot = self._slots[request] = self._free.pop()
        self.last_positions[slot] = -1
        self.num_blocks[slot] = self.num_sent[slot] = 0
        return slot

    def release(self, request: Request) -> int | None:
        """Take the row of `request` back, if it has one, and return it."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def check_integrity(self, known: Collection[Request]) -> None:
        """Verify that each slot is free or has one owner, which is among `known`."""
        owned = list(self._slots.values())
        if sorted(owned + self._free) != list(range(len(self.last_positions))):
            raise EngineError(f"slots: owned {sorted(owned)} and free {sorted(self._free)}")
        for request in self._slots:
            if request not in known:
                raise EngineError(
                    f"slots: request {request.request_id!r} is finished, but owns one"
                )

    def rows(self, sequences: Sequence[ScheduledSequence]) -> IntArray:
        """Return the row of each sequence (B,) int64; -1 where it has none yet."""
        slots = self._slots
        return np.array([slots.get(s.request, -1) for s in sequences], np.int64)

    def update_tables(
        self,
        sequences: Sequence[ScheduledSequence],
        rows: IntArray,
        num_blocks: IntArray,
        *,
        rewritten: bool,
    ) -> None:
        """Copy what is new in the requests' block tables, as far as this step needs it.

        Parameters
        ----------
        sequences : sequence of ScheduledSequence
        rows : (B,) int64
            Their slots.
        num_blocks : (B,) int
            How many blocks of each table the step uses.
        rewritten : bool
            Whether entries may have changed; otherwise tables have only grown.
        """
        held = self.num_blocks[rows]
        if rewritten:
            held[:] = self.num_sent[rows] = 0
        for index in (num_blocks > held).nonzero()[0].tolist():
            table, slot, start = sequences[index].request.block_table, rows[index], held[index]
            if len(table) - start == 1:
                self.block_tables[slot, start] = table[start]
            else:
                self.block_tables[slot, start : len(table)] = table[start:]
            self.num_blocks[slot] = len(table)

    def check(
        self,
        sequences: Sequence[ScheduledSequence],
        rows: IntArray,
        starts: IntArray,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """Verify the rows that a step is about to use (debug mode).

        Raises
        ------
        EngineError
            If `rows` or `starts` are not those of the sequences, a row is not its request's block
            table, holds an id outside [0, num_blocks), or two sequences would write into the same
            block.
        """
        wanted = [(self._slots[s.request], s.start) for s in sequences]
        if list(zip(rows.tolist(), starts.tolist(), strict=True)) != wanted:
            raise EngineError(f"slots and positions must be {wanted}; got {rows} and {starts}")
        writers: dict[int, str] = {}
        for sequence in sequences:
            request, stop = sequence.request, (sequence.context_len - 1) // block_size + 1
            table = request.block_table[:stop]
            row = self.block_tables[self._slots[request], : len(table)].tolist()
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
