"""attention_decode's error and cuDNN's on the same inputs, both relative to float64."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels
from engine.testing.cases_attention import normal_on
from tests.bench import sdpa

_HEADS, _BLOCK_SIZE = 8, 16
_ROUNDS = 32  # rounds of queries; a single round varies by a few per cent
# Our error over cuDNN's (H200, 2026-11-22): at most 1.001 in 97 of 108 cases, up to 1.014 in the
# others, all but one of which have 100 keys in one tile. A P of exactly 1 has no rounding error,
# and every tile has one such P per row.
_MARGIN = 1.02
_WRONG = 0.005  # relative (norm); a larger error means cuDNN solved another problem


def _paged(xp, batch, kv_heads, num_keys, head_dim, dtype):
    """Return randomly ordered K and V pages, block tables, and the same keys and values dense."""
    count = -(-num_keys // _BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(batch * count).reshape(batch, count)
    tables = xp.asarray(tables.astype(np.int32))
    shape = (batch * count, kv_heads, _BLOCK_SIZE, head_dim)
    pages = [normal_on(xp, shape, dtype, seed) for seed in (1, 2)]
    dense = []
    for x in pages:
        rows = x.view(np.int16)[tables].transpose(0, 2, 1, 3, 4)
        rows = rows.reshape(batch, kv_heads, count * _BLOCK_SIZE, head_dim)[:, :, :num_keys]
        dense.append(xp.ascontiguousarray(rows).view(x.dtype))
    return pages, tables, dense


def _to_torch(torch, xp, x, dtype):
    """Return 16-bit values as a tensor, via integers, which every DLPack version supports."""
    bits = torch.from_dlpack(xp.ascontiguousarray(x).view(np.int16))
    return bits.view(getattr(torch, dtype))


def _squares(xp, torch, backend, problem, dtype, shape, seed):
    """Return the squared norms of our error, the backend's error, and the result."""
    pages, tables, dense = problem
    q = normal_on(xp, shape, dtype, seed)
    lens = xp.full(shape[0], dense[0].shape[2], np.int32)
    ours = kernels.attention_decode(q, *pages, block_tables=tables, context_lens=lens)
    q, ours = (_to_torch(torch, xp, x.transpose(0, 2, 1, 3), dtype) for x in (q, ours))
    k, v = (_to_torch(torch, xp, x, dtype) for x in dense)
    want = sdpa.exact(q, k, v)
    mask = sdpa.newest_mask(backend, shape[1], k.shape[2], q)
    theirs = sdpa.attend(backend, q, k, v, mask)
    return [float(x.double().square().sum()) for x in (ours - want, theirs - want, want)]


def test_dense_keys_are_the_pages():
    pages, tables, dense = _paged(np, 3, 2, 37, 8, "bfloat16")
    assert [x.shape for x in dense] == [(3, 2, 37, 8)] * 2
    for b, j in np.ndindex(3, 37):
        for x, rows in zip(pages, dense, strict=True):
            np.testing.assert_array_equal(x[tables[b, j // 16], :, j % 16], rows[b, :, j])


@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_judge_agrees_with_the_mirror(group, num_queries):
    """Check the GPU tests' layouts, heads and masks on the CPU, with NumPy and torch."""
    torch = pytest.importorskip("torch")
    problem = _paged(np, 2, _HEADS // group, 100, 64, "bfloat16")
    shape = (2, num_queries, _HEADS, 64)
    ours, theirs, norm = _squares(np, torch, "MATH", problem, "bfloat16", shape, seed=3)
    assert max(ours, theirs) < (_WRONG**2) * norm


@pytest.mark.gpu
@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid(("batch", "num_queries"), [(2, 1), (40, 1), (2, 4)])
@pytest.mark.grid("num_keys", [100, 1000, 8192])
@pytest.mark.grid("group", [1, 4, 8])
@pytest.mark.grid("head_dim", [64, 128])
def test_error_is_about_cudnns(cp, head_dim, group, num_keys, batch, num_queries, dtype):
    """Few sequences, each split over many CTAs (2); and many sequences, split differently (40)."""
    torch = pytest.importorskip("torch")
    problem = _paged(cp, batch, _HEADS // group, num_keys, head_dim, dtype)
    shape = (batch, num_queries, _HEADS, head_dim)
    try:
        squares = [
            _squares(cp, torch, "CUDNN_ATTENTION", problem, dtype, shape, 10 + seed)
            for seed in range(_ROUNDS)
        ]
    except sdpa.RefusedError as refused:
        pytest.skip(f"cuDNN refuses: {refused}")
    ours, theirs, norm = np.sqrt(np.sum(squares, 0))
    print(f"error {ours / norm:.3g} of the norm, {ours / theirs:.4f} of cuDNN's")
    assert theirs < _WRONG * norm, f"cuDNN's result is wrong: error {theirs / norm:.3g}"
    assert ours <= _MARGIN * theirs, f"{ours / theirs:.4f} of cuDNN's error"
