"""A layer's sinks reach the attention of every token, whichever kernel computes it."""

from __future__ import annotations

import numpy as np
import pytest

from engine import reference
from engine.device import to_numpy
from engine.layers.attention import Attention, AttentionParams
from engine.layers.batch import ForwardBatch
from engine.testing import cases
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close

_SINKS = np.array([0.5, 3.0, -1.0, 20.0], np.float32)
_BLOCK = 16


class _Identity:
    """In place of a `Linear`: the test's rows are those of q, k and v."""

    input_format = None

    def arrays(self):
        return iter(())

    def __call__(self, x, *, residual=None):
        return x.copy()


def _layer(xp, *, deterministic=False, sinks=_SINKS):
    params = AttentionParams(4, 2, 64, 0.125, window=20, deterministic=deterministic)
    sinks = None if sinks is None else xp.asarray(sinks)
    table = xp.asarray(cos_sin_table(64, 64))
    return Attention(params, _Identity(), _Identity(), table, sinks=sinks)


def _batch(xp, counts, starts):
    """Sequence b has blocks 3 b to 3 b + 2."""
    tables = [[3 * b, 3 * b + 1, 3 * b + 2] for b in range(len(counts))]
    batch = ForwardBatch.build([[0] * n for n in counts], starts, tables, _BLOCK)
    arrays = {name: value for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
    return ForwardBatch(**(vars(batch) | {name: xp.asarray(a) for name, a in arrays.items()}))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "counts, starts", [((1, 1), (30, 0)), ((1, 7), (30, 3)), ((5, 9), (0, 30))]
)
def test_every_path_has_them(xp, counts, starts, deterministic):
    batch = _batch(xp, counts, starts)
    shape = 3 * len(counts), 2, _BLOCK, 64
    pages = [cases.normal(shape, "float32", seed) for seed in (1, 2)]
    fused = cases.normal((sum(counts), 8 * 64), "float32", seed=3)
    x, *on_device = cases.to_module(xp, fused, *pages)
    got = _layer(xp, deterministic=deterministic)(x, batch, *on_device)
    rows = fused.reshape(-1, 8, 64).copy()
    q = rows[:, :4]
    host = _batch(np, counts, starts)
    reference.qk_norm_rope_store(
        *(q, rows[:, 4:6], rows[:, 6:], host.rope_positions, cos_sin_table(64, 64)),
        *(*pages, host.slot_mapping),
    )
    want = reference.attention_prefill(
        q,
        *pages,
        cu_seqlens_q=host.cu_seqlens_q,
        block_tables=host.block_tables,
        context_lens=host.context_lens,
        scale=0.125,
        window=20,
        sinks=_SINKS,
    )
    assert_close(got, want.reshape(len(rows), -1), reduction=100)


def test_they_are_listed_only_if_there_are_any():
    named = dict(_layer(np).arrays())
    np.testing.assert_array_equal(to_numpy(named["sinks"]), _SINKS)
    assert "sinks" not in dict(_layer(np, sinks=None).arrays())
