"""attention_shared_prefix against attention_decode over the whole tables."""

from __future__ import annotations

import numpy as np
import pytest

from engine import reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.layers.shared_prefix import attention_shared_prefix
from engine.testing import cases
from engine.testing.cases_attention import paged_cache
from engine.testing.tolerances import assert_close

# (B, Q, H, K, D, block_size, prefix blocks, own lengths): few and many rows, lengths around page
# and tile sizes, own parts of exactly Q tokens, group sizes that do not divide a tile, several
# queries.
SHAPES = (
    (1, 1, 4, 2, 64, 16, 1, (1,)),
    (3, 1, 8, 2, 64, 16, 4, (1, 17, 300)),
    (9, 1, 32, 8, 128, 16, 40, (1, 15, 16, 17, 127, 128, 129, 64, 500)),
    (5, 2, 9, 3, 64, 16, 9, (2, 3, 16, 130, 33)),
    (4, 8, 8, 2, 128, 64, 20, (8, 9, 200, 64)),
    (70, 1, 16, 8, 128, 16, 33, (5, 90) * 35),
    (3, 4, 6, 2, 80, 32, 7, (4, 50, 32)),
    (2, 1, 8, 1, 256, 16, 12, (1, 40)),
    (2, 3, 4, 4, 36, 16, 5, (3, 20)),
)


def _inputs(shape, dtype):
    batch, num_queries, heads, kv_heads, head_dim, block_size, prefix, own = shape
    lens = [prefix * block_size + n for n in own]
    cache = paged_cache(lens, kv_heads, block_size, head_dim, dtype, seed=3, num_shared=prefix)
    return cases.normal((batch, num_queries, heads, head_dim), dtype, seed=1), *cache


def _run(xp, shape, arrays, *, length=None, lens=None, **keywords):
    q, k, v, tables, whole = arrays
    prefix, block_size = shape[6], shape[5]
    length = prefix * block_size if length is None else length
    lens = whole - prefix * block_size if lens is None else lens
    q, k, v, tables, lens = cases.to_module(xp, q, k, v, tables, lens.astype(np.int32))
    return attention_shared_prefix(
        q,
        k,
        v,
        prefix_blocks=tables[0, :prefix],
        prefix_len=xp.asarray(np.array([length], np.int32)),
        block_tables=tables[:, prefix:],
        context_lens=lens,
        return_lse=True,
        **keywords,
    )


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_decode_over_the_whole_table(xp, shape, dtype, tier):
    q, k, v, tables, lens = _inputs(shape, dtype)
    rule = {"scale": 0.2, "softcap": 8.0} if shape[0] == 3 else {}
    want, want_lse = reference.attention_decode(
        q, k, v, block_tables=tables, context_lens=lens, return_lse=True, **rule
    )
    got, lse = _run(xp, shape, (q, k, v, tables, lens), **rule)
    assert_close(got, want, reduction=q.shape[-1] + int(lens.max()))
    assert_close(lse, want_lse, reduction=q.shape[-1] + int(lens.max()), name="lse")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_in_place_and_out(xp, dtype):
    shape = SHAPES[3]
    arrays = _inputs(shape, dtype)
    q, k, v, tables, lens = arrays
    want = reference.attention_decode(q, k, v, block_tables=tables, context_lens=lens)
    out, buffer = cases.guarded(xp, q.shape, q.dtype)
    assert _run(xp, shape, arrays, out=out)[0] is out
    assert_close(out, want, reduction=q.shape[-1] + int(lens.max()))
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())
    rows = xp.asarray(q.copy())
    _run(xp, shape, (rows, *arrays[1:]), out=rows)
    assert_close(rows, want, reduction=q.shape[-1] + int(lens.max()))


def test_prefix_that_ends_inside_a_page(xp):
    """Compares with the keys of prefix and own part concatenated in new pages."""
    shape = (2, 2, 4, 2, 16, 16, 3, (2, 20))
    q, k, v, tables, lens = _inputs(shape, "float32")
    for length in (0, 1, 16, 37, 48):
        own = lens - 48
        new_tables = np.arange(2 * tables.shape[1], dtype=np.int32).reshape(2, -1)
        new = np.zeros((2, new_tables.size, *k.shape[1:]), np.float32)
        for b in range(2):
            slots = [*range(length), *range(48, 48 + own[b])]
            for at, slot in enumerate(slots):
                where = new_tables[b, at // 16], slice(None), at % 16
                for x, y in zip(new, (k, v), strict=True):
                    x[where] = y[tables[b, slot // 16], :, slot % 16]
        want = reference.attention_decode(
            q, *new, block_tables=new_tables, context_lens=(own + length).astype(np.int32)
        )
        got, _ = _run(xp, shape, (q, k, v, tables, lens), length=length)
        assert_close(got, want, reduction=70)


def test_padding_rows_see_the_prefix_alone(xp):
    shape = SHAPES[1]
    q, k, v, tables, lens = _inputs(shape, "float32")
    own = lens - 64
    own[1] = 0
    got, lse = _run(xp, shape, (q, k, v, tables, lens), lens=own)
    want, want_lse = reference.attention_decode(
        q[1:2],
        k,
        v,
        block_tables=tables[1:2],
        context_lens=np.array([64], np.int32),
        return_lse=True,
    )
    assert_close(got[1:2], want, reduction=64)
    assert_close(lse[1:2], want_lse, reduction=64)


@pytest.mark.parametrize("length", [0, 64])
def test_sinks_are_added_once(xp, length, tier):
    """Also where the prefix or a request's own part has no keys."""
    shape = SHAPES[1]
    q, k, v, tables, lens = _inputs(shape, "bfloat16")
    sinks = np.array([0.5, 2, -1, 30, -1e4, 5, 0, 1], np.float32)
    own = lens - 64
    own[1] = 0
    got, lse = _run(
        xp, shape, (q, k, v, tables, lens), length=length, lens=own, sinks=xp.asarray(sinks)
    )
    want, want_lse = reference.attention_decode(
        q,
        k,
        v,
        block_tables=tables if length else tables[:, 4:],
        context_lens=(own + length).astype(np.int32),
        sinks=sinks,
        return_lse=True,
    )
    assert_close(got, want, reduction=400)
    assert_close(lse, want_lse, reduction=400, name="lse")


def test_contract():
    shape = SHAPES[3]
    arrays = _inputs(shape, "float32")
    q, k, v, tables, lens = arrays
    with pytest.raises(ContractError, match="context_lens: must be at least Q = 2, or 0; got"):
        _run(np, shape, arrays, lens=np.array([1, 2, 3, 4, 5]))
    with pytest.raises(ContractError, match="context_lens: must be from 0 to NB"):
        _run(np, shape, arrays, length=9 * 16 + 1)
    good = {"prefix_blocks": tables[0, :9], "block_tables": tables[:, 9:], "context_lens": lens}
    length = np.array([9], np.int32)
    with pytest.raises(ShapeError, match=r"prefix_len: must have shape \(1,\); got \(2,\)"):
        attention_shared_prefix(q, k, v, prefix_len=np.tile(length, 2), **good)
    with pytest.raises(ShapeError, match=r"prefix_blocks: must have shape \(NP,\); got \(5,"):
        attention_shared_prefix(q, k, v, prefix_len=length, **(good | {"prefix_blocks": tables}))
    with pytest.raises(DTypeError, match="prefix_len: must be int32; got int64"):
        attention_shared_prefix(q, k, v, prefix_len=length.astype(np.int64), **good)
    with pytest.raises(TypeError, match="window"):
        attention_shared_prefix(q, k, v, prefix_len=length, window=5, **good)
    with pytest.raises(DTypeError, match="q: must be an array; got list"):
        attention_shared_prefix(q.tolist(), k, v, prefix_len=length, **good)
    with pytest.raises(DTypeError, match="context_lens: must be an array; got list"):
        attention_shared_prefix(q, k, v, prefix_len=length, **(good | {"context_lens": [2] * 5}))


def test_out_is_never_left_without_the_prefix(xp):
    """If `out` had to be copied to rows of tokens, the merged result would be lost."""
    shape = SHAPES[3]
    arrays = _inputs(shape, "float32")
    wide = xp.zeros((5, 3, 9, 64), np.float32)
    with pytest.raises(ShapeError, match="shared_prefix: out: must be C-contiguous"):
        _run(xp, shape, arrays, out=wide[:, :2])
    with pytest.raises(ShapeError, match=r"out: must have shape \(B, Q, H, D\); Q = 2 from q"):
        _run(xp, shape, arrays, out=wide)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_lengths(cp):
    shape = (20, 1, 8, 2, 128, 16, 20, (100, 33) * 10)
    q, k, v, tables, lens = _inputs(shape, "bfloat16")
    arrays = cases.to_module(cp, q, k, v, tables)
    prefix, own = cp.array([320], np.int32), cp.asarray(lens - 320)
    out = cp.zeros_like(arrays[0])
    where = {"prefix_blocks": arrays[3][0, :20], "block_tables": arrays[3][:, 20:]}
    where |= {"prefix_len": prefix, "context_lens": own, "out": out}
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        attention_shared_prefix(*arrays[:3], **where)
        stream.synchronize()
        stream.begin_capture()
        attention_shared_prefix(*arrays[:3], **where)
        graph = stream.end_capture()
        for length, cut in ((320, 0), (16, 5), (160, 30), (0, 1)):
            current = (lens - 320 - cut).astype(np.int32)
            prefix.set(np.array([length], np.int32))
            own.set(current)
            graph.launch(stream)
            stream.synchronize()
            short = np.concatenate([tables[:, : length // 16], tables[:, 20:]], axis=1)
            want = reference.attention_decode(
                q, k, v, block_tables=short, context_lens=current + np.int32(length)
            )
            assert_close(to_numpy(out), want, reduction=420)
