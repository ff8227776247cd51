"""ForwardBatch: the layout of a step, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from engine.device import CPU, Device, to_numpy
from engine.errors import ContractError
from engine.layers.batch import ForwardBatch


def _mixed(**options):
    """Two decodes (at 5 and 16), then a chunk of 3 from 15, then a single token from 0."""
    ids = [[9], [8], [1, 2, 3], [7]]
    tables = [[3], [0, 5], [2, 6], [4]]
    return ForwardBatch.build(ids, [5, 16, 15, 0], tables, 16, **options)


def test_layout():
    batch = _mixed()
    assert batch.num_tokens == 6 and batch.num_sequences == 4 and batch.num_decodes == 2
    assert batch.token_ids.tolist() == [9, 8, 1, 2, 3, 7]
    assert batch.positions.tolist() == [5, 16, 15, 16, 17, 0]
    assert batch.slot_mapping.tolist() == [3 * 16 + 5, 80, 2 * 16 + 15, 96, 97, 64]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 5, 6]
    assert batch.prefill_cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [6, 17, 18, 1]
    assert batch.block_tables.tolist() == [[3, 0], [0, 5], [2, 6], [4, 0]]
    assert batch.logits_indices.tolist() == [0, 1, 4, 5]
    assert (batch.max_seqlen_q, batch.max_context_len) == (3, 18)


def test_dtypes():
    batch = _mixed()
    assert batch.slot_mapping.dtype == np.int64
    for name in (
        "token_ids",
        "positions",
        "rope_positions",
        "cu_seqlens_q",
        "context_lens",
        "block_tables",
        "logits_indices",
        "prefill_cu_seqlens_q",
    ):
        assert getattr(batch, name).dtype == np.int32, name


def test_which_logits():
    assert _mixed(logits="all").logits_indices is None
    assert _mixed(logits="none").logits_indices.shape == (0,)


def test_rope_offset():
    batch = _mixed(rope_offset=100)
    assert (batch.rope_positions - batch.positions).tolist() == [100] * 6


def test_all_decodes():
    batch = ForwardBatch.build([[1], [2]], [0, 0], [[0], [1]], 16)
    assert batch.num_decodes == 2 and batch.prefill_cu_seqlens_q.tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "starts", "tables", "message"),
    [
        ([[]], [0], [[0]], r"sequence 0 .* at least 1 token"),
        ([[1], [2]], [0, -1], [[0], [1]], "sequence 1 .* start at 0 or later"),
        ([[1, 2]], [15], [[0]], r"within its 1 blocks of 16; got tokens \[15, 17\)"),
        ([[1], [2]], [0], [[0]], "same length"),
        ([], [], [], "at least 1; got 0, 0 and 0"),
    ],
)
def test_refused(ids, starts, tables, message):
    with pytest.raises(ContractError, match=message):
        ForwardBatch.build(ids, starts, tables, 16)


def test_to_is_a_no_op_on_the_cpu():
    batch = _mixed()
    assert batch.to(CPU) is batch


@pytest.mark.gpu
def test_moves_to_the_device_in_one_copy(cp):
    batch = _mixed()
    moved = batch.to(Device("cuda"))
    assert moved.on_host is batch
    for name, value in vars(batch).items():
        if name == "on_host":
            continue
        other = getattr(moved, name)
        if isinstance(value, np.ndarray):
            assert isinstance(other, cp.ndarray) and other.dtype == value.dtype
            np.testing.assert_array_equal(to_numpy(other), value, err_msg=name)
            assert other.flags.c_contiguous
        else:
            assert other == value
