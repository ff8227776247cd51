"""`ForwardBatch`: the flat arrays of one step, passed explicitly to everything that needs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from engine.device import Device, array_module
from engine.errors import ContractError

__all__ = ["ForwardBatch"]

Rows = Sequence[Sequence[int]] | np.ndarray[Any, Any]
"""Integers of each sequence: lists of varying length, or an array."""

_ALIGNMENT = 16  # alignment of each array in the device copy, in bytes


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of all sequences of a step, concatenated.

    `runner/batch.py` (for the engine) or `ForwardBatch.build` (for `Model.step`) fills it on the
    host, and `to` copies it once; the model only reads it.

    Attributes
    ----------
    token_ids : (T,) int32
        Token ids, checked against V on the host.
    positions : (T,) int32
        Position of each token in its sequence.
    rope_positions : (T,) int32
        Row of the rope table: the position, plus the model's `long_rope_offset` for sequences
        that use longrope's long factors.
    slot_mapping : (T,) int64
        Slot of each token's key and value: block id * block_size + offset.
    cu_seqlens_q : (B+1,) int32
        Sequence b has tokens [cu_seqlens_q[b], cu_seqlens_q[b+1]).
    context_lens : (B,) int32
        Number of keys of each sequence, this step's included.
    block_tables : (B, NB) int32
        Block ids of each sequence; entries past its length are never read.
    logits_indices : (R,) int32 or None
        Indices of the tokens whose logits are computed; None for all tokens.
    num_decodes : int
        The first `num_decodes` sequences have `query_len` tokens each and go to the decode kernel;
        the others go to the prefill kernel.
    max_seqlen_q, max_context_len : int
        Upper bounds of the lengths, kept on the host so that no launch waits for the device.
    prefill_cu_seqlens_q : (B - num_decodes + 1,) int32
        `cu_seqlens_q` of the prefilled sequences, rebased to 0. Computed if omitted.
    query_len : int
        Q, the number of tokens of each decode.
    num_prefill_keys : int
        Number of keys of all prefilled sequences, or an upper bound. Computed if omitted.
    tree_mask : (num_decodes, Q) uint64, optional
        Bit j of tree_mask[b, i], for j <= i: whether token i of decode b attends to token j of the
        Q. All of them attend to every earlier token. Without a mask, attention is causal.
    state_slots : (B,) int32, optional
        State slot that each sequence reads, if it has earlier tokens. None for a model without
        recurrent layers, like the three below. Padding in a graph has slot -1.
    state_targets : (B,) or (B, Q) int32, optional
        State slot that each sequence writes after its last token; -1 writes nothing. With drafts,
        entry (b, i) is written after token i of sequence b, and a sequence of more than Q tokens
        writes the last entry after its last token.
    snapshot_slots, snapshot_offsets : (B,) int32, optional
        State slot that also receives the state after the first `snapshot_offsets[b]` tokens; -1:
        none. None if no sequence takes a snapshot.
    adapter_slots : (T,) int32, optional
        Slot of each token's LoRA adapter, or `layers.lora.NO_ADAPTER`. None: no token has one.
    adapter_kinds : collection of str, optional
        Kinds of the weights that the adapters may change; other products are computed without
        them. None: those that adapters written so far have changed.
    features : mapping of int to (T, N) array, optional
        Index of a layer of the whole model -> array that receives the residual stream entering it;
        the number of layers -> the stream leaving the last one. Read by draft heads.
    entering : (array or None, array), optional
        Activations (T, N) from the previous pipeline stage: its (delta, residual).
    on_host : ForwardBatch, optional
        The same batch on the host, for announcements to workers. Token ids may be missing: only
        the device may know them.
    """

    token_ids: Any
    positions: Any
    rope_positions: Any
    slot_mapping: Any
    cu_seqlens_q: Any
    context_lens: Any
    block_tables: Any
    logits_indices: Any
    num_decodes: int
    max_seqlen_q: int
    max_context_len: int
    prefill_cu_seqlens_q: Any = None
    query_len: int = 1
    num_prefill_keys: int = -1
    tree_mask: Any = None
    state_slots: Any = None
    state_targets: Any = None
    snapshot_slots: Any = None
    snapshot_offsets: Any = None
    adapter_slots: Any = None
    adapter_kinds: Collection[str] | None = None
    features: Mapping[int, Any] | None = None
    entering: tuple[Any, Any] | None = None
    on_host: ForwardBatch | None = None

    def __post_init__(self) -> None:
        if self.prefill_cu_seqlens_q is None:
            rest = self.cu_seqlens_q[self.num_decodes :] - np.int32(self.num_decode_tokens)
            object.__setattr__(self, "prefill_cu_seqlens_q", rest)
        if self.num_prefill_keys < 0:
            object.__setattr__(self, "num_prefill_keys", self._most_prefill_keys())

    def _most_prefill_keys(self) -> int:
        num = self.num_sequences - self.num_decodes
        if num and isinstance(self.context_lens, np.ndarray):
            return int(self.context_lens[self.num_decodes :].sum())
        return num * self.max_context_len

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return int(self.token_ids.shape[0])

    @property
    def num_decode_tokens(self) -> int:
        """Number of decode tokens; they come first."""
        return self.num_decodes * self.query_len

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences."""
        return int(self.context_lens.shape[0])

    def of_rows(self, rows: Any) -> ForwardBatch:
        """Return the batch of the tokens `rows` (R,) alone, each a sequence that is decoded.

        Their keys must be in the pages; a `tree_mask` would be lost. Made on the batch's device.

        Examples
        --------
        >>> batch = ForwardBatch.build([[7], [5, 6]], [16, 0], [[2, 0], [1]], block_size=16)
        >>> last = batch.of_rows(np.array([0, 2], np.int32))
        >>> last.positions.tolist(), last.block_tables.tolist(), last.num_decodes
        ([16, 1], [[2, 0], [1, 0]], 2)
        """
        xp = array_module(rows)
        sequences = xp.searchsorted(self.cu_seqlens_q[1:], rows, side="right")
        positions = self.positions[rows]
        count = int(rows.shape[0])
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=positions,
            rope_positions=self.rope_positions[rows],
            slot_mapping=self.slot_mapping[rows],
            cu_seqlens_q=xp.arange(count + 1, dtype=np.int32),
            context_lens=positions + np.int32(1),
            block_tables=self.block_tables[sequences],
            logits_indices=None,
            num_decodes=count,
            max_seqlen_q=1,
            prefill_cu_seqlens_q=None,
            query_len=1,
            adapter_slots=None if self.adapter_slots is None else self.adapter_slots[rows],
            features=None,
            on_host=None,
        )

    @classmethod
    def build(
        cls,
        token_ids: Rows,
        starts: Sequence[int],
        block_tables: Rows,
        block_size: int,
        *,
        logits: Literal["last", "all", "none"] = "last",
        rope_offset: int | np.ndarray[Any, Any] = 0,
        state_slots: np.ndarray[Any, Any] | None = None,
        adapter_slots: np.ndarray[Any, Any] | None = None,
    ) -> ForwardBatch:
        """Lay out sequences on the host.

        Parameters
        ----------
        token_ids : B sequences of int
            New tokens of each sequence, at least one. Leading sequences with a single token are
            decoded, all others are prefilled.
        starts : B ints
            Number of tokens of each sequence that are already in the pages.
        block_tables : B sequences of int
            Block ids of each sequence, enough for the new tokens too.
        block_size : int
            Tokens per block.
        logits : str
            Tokens whose logits are computed: the "last" of each sequence, "all", or "none".
        rope_offset : int, or (B,) array of int
            `rope_positions` are the positions plus this offset, of all sequences or of each.
        state_slots : (B,) array of int32, optional
            State slots that the sequences read and write.
        adapter_slots : (B,) array of int32, optional
            Slot of each sequence's LoRA adapter, or NO_ADAPTER.

        Raises
        ------
        ContractError
            If a sequence has no new token, starts before 0, or ends beyond its blocks.

        Examples
        --------
        >>> batch = ForwardBatch.build([[7], [5, 6]], [16, 0], [[2, 0], [1]], block_size=16)
        >>> batch.slot_mapping.tolist(), batch.num_decodes, batch.context_lens.tolist()
        ([0, 16, 17], 1, [17, 2])
        """
        counts = np.array([len(ids) for ids in token_ids], np.int32)
        lens = np.array(starts, np.int32) + counts
        tables = _padded(block_tables)
        _check(counts, lens, [len(table) for table in block_tables], block_size)
        cu_seqlens = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens[1:])
        rows = np.repeat(np.arange(len(counts)), counts)  # (T,) sequence of each token
        index = np.arange(len(rows), dtype=np.int32)
        positions = index - cu_seqlens[rows] + (lens - counts)[rows]
        blocks = tables[rows, positions // block_size].astype(np.int64)
        is_decode = counts == 1
        wanted = {"last": cu_seqlens[1:] - 1, "all": None, "none": index[:0]}
        return cls(
            token_ids=np.concatenate([np.asarray(ids, np.int32) for ids in token_ids]),
            positions=positions,
            rope_positions=positions + np.broadcast_to(np.int32(rope_offset), counts.shape)[rows],
            slot_mapping=blocks * block_size + positions % block_size,
            cu_seqlens_q=cu_seqlens,
            context_lens=lens,
            block_tables=tables,
            logits_indices=wanted[logits],
            num_decodes=len(counts) if is_decode.all() else int(np.argmin(is_decode)),
            max_seqlen_q=int(counts.max()),
            max_context_len=int(lens.max()),
            state_slots=state_slots,
            state_targets=state_slots,
            adapter_slots=None if adapter_slots is None else adapter_slots[rows],
        )

    def to(self, device: Device) -> ForwardBatch:
        """Return the batch with its arrays on `device`; on CUDA in one host-to-device copy."""
        if not device.is_cuda:
            return self
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: a for name, a in arrays.items() if isinstance(a, np.ndarray)}
        offsets = []
        size = 0
        for array in arrays.values():
            offsets.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = np.zeros(size, np.uint8)
        for offset, array in zip(offsets, arrays.values(), strict=True):
            host[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).view(np.uint8).ravel()
            )
        there = device.xp.asarray(host)
        moved = {
            name: there[offset : offset + a.nbytes].view(a.dtype).reshape(a.shape)
            for offset, (name, a) in zip(offsets, arrays.items(), strict=True)
        }
        return replace(self, on_host=self.on_host or self, **moved)


def _padded(tables: Rows) -> np.ndarray[Any, Any]:
    """Return block tables of different lengths as one array, padded with 0 (never read)."""
    padded = np.zeros((len(tables), max((len(t) for t in tables), default=0)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _check(
    counts: np.ndarray[Any, Any], lens: np.ndarray[Any, Any], blocks: list[int], block_size: int
) -> None:
    if not len(counts) == len(lens) == len(blocks) or not len(counts):
        raise ContractError(
            "token_ids, starts and block_tables must have the same length, at least 1; got "
            f"{len(counts)}, {len(lens)} and {len(blocks)}"
        )
    for row, (count, length, held) in enumerate(zip(counts, lens, blocks, strict=True)):
        if count < 1 or length < count or length > held * block_size:
            raise ContractError(
                f"sequence {row} must have at least 1 token, start at 0 or later and end within "
                f"its {held} blocks of {block_size}; got tokens [{length - count}, {length})"
            )
