"""attention_decode: the kernel against its mirror, the mirror against prefill's, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.attention_decode import choose_num_splits, choose_tile, specs
from engine.kernels.attention_decode.sm90 import choose_hopper_tile
from engine.testing import cases
from engine.testing.cases_attention import DECODE, AttentionCase, cu_seqlens, paged_cache
from engine.testing.tolerances import assert_close


def _inputs(case, dtype, num_shared=0):
    """Return q, key and value pages, block tables and lengths."""
    shape = (len(case.lens_q), case.lens_q[0], case.num_heads, case.head_dim)
    sizes = case.num_kv_heads, case.block_size, case.head_dim
    cache = paged_cache(case.lens_k, *sizes, dtype, seed=2, num_shared=num_shared)
    return cases.normal(shape, dtype, seed=1), *cache


def _run(op, xp, arrays, **keywords):
    q, k, v, tables, lens = cases.to_module(xp, *arrays)
    return op(q, k, v, block_tables=tables, context_lens=lens, **keywords)


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_mirror_is_prefill_of_the_last_tokens(case):
    """Compare with prefill's mirror, which is itself checked against a float64 loop."""
    q, k, v, tables, lens = _inputs(case, "float32")
    got = reference.attention_decode(
        q, k, v, block_tables=tables, context_lens=lens, **case.rule, return_lse=True
    )
    want = reference.attention_prefill(
        q.reshape(-1, *q.shape[2:]),
        k,
        v,
        cu_seqlens_q=cu_seqlens(case.lens_q),
        block_tables=tables,
        context_lens=lens,
        **case.rule,
        return_lse=True,
    )
    np.testing.assert_array_equal(got[0], want[0].reshape(q.shape))
    np.testing.assert_array_equal(got[1], want[1].reshape(q.shape[:3]))


def test_mirror_is_the_formula():
    case = AttentionCase((2, 2), (40, 1), 4, 2, 16, block_size=16)
    q, k, v, tables, lens = _inputs(case, "float32")
    got, lse = reference.attention_decode(
        q, k, v, block_tables=tables, context_lens=lens, return_lse=True
    )
    for b, i, h in np.ndindex(2, 2, 4):
        keys = range(lens[b] - 2 + i + 1)
        slots = [(tables[b, j // 16], h // 2, j % 16) for j in keys]
        s = np.array([q[b, i, h].astype(np.float64) @ k[slot] / 4 for slot in slots])
        want = sum((np.exp(x) * v[slot] for x, slot in zip(s, slots, strict=True)), np.zeros(16))
        total = np.exp(s).sum()
        np.testing.assert_allclose(got[b, i, h], want / (total or 1), rtol=1e-5, atol=1e-6)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[b, i, h], np.log(total), rtol=1e-5)


@pytest.mark.grid("num_splits", [None, 1, 3])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", DECODE, ids=str)
def test_matches_mirror(xp, case, dtype, num_splits):
    arrays = _inputs(case, dtype)
    want, want_lse = _run(reference.attention_decode, np, arrays, **case.rule, return_lse=True)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got, lse = _run(
        kernels.attention_decode,
        xp,
        arrays,
        **case.rule,
        num_splits=num_splits,
        max_context_len=max(case.lens_k),
        out=out,
        return_lse=True,
    )
    assert got is out
    assert_close(got, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


CHUNKED = AttentionCase((1,) * 7, (64, 65, 1, 200, 63, 320, 0), 8, 2, 64, block_size=16)


def test_mirror_of_chunks_is_each_chunk_by_itself():
    """A sequence's query sees what it would see if its chunk were all there is."""
    q, k, v, tables, lens = _inputs(CHUNKED, "float32")
    options = {"softcap": 3.0, "return_lse": True}
    got = _run(reference.attention_decode, np, (q, k, v, tables, lens), chunk=64, **options)
    first = (np.maximum(lens, 1) - 1) // 64 * 64
    own = np.stack(
        [np.resize(row[start // 16 :], 4) for row, start in zip(tables, first, strict=True)]
    )
    want = _run(reference.attention_decode, np, (q, k, v, own, lens - first), **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    whole = _run(reference.attention_decode, np, (q, k, v, tables, lens), **options)
    assert (got[0] != whole[0]).any(axis=(1, 2, 3)).tolist() == (lens > 64).tolist()


@pytest.mark.grid("chunk", [1, 32, 64, 512])
@pytest.mark.grid("num_splits", [None, 1, 3])
@pytest.mark.grid("dtype", cases.DTYPES)
def test_chunks(xp, dtype, num_splits, chunk, tier):
    arrays = _inputs(CHUNKED, dtype)
    want, want_lse = _run(reference.attention_decode, np, arrays, chunk=chunk, return_lse=True)
    options = {"num_splits": num_splits, "chunk": chunk, "max_context_len": 320}
    got, lse = _run(kernels.attention_decode, xp, arrays, **options, return_lse=True)
    assert_close(got, want, reduction=CHUNKED.reduction)
    assert_close(lse, want_lse, reduction=CHUNKED.reduction, name="lse")


@pytest.mark.grid("num_queries", range(1, 9))
@pytest.mark.grid("group", [1, 3, 4, 8])
def test_queries_and_groups(xp, num_queries, group):
    """Every fill level of a row tile, 1 to 64 rows."""
    case = AttentionCase((num_queries,) * 3, (130, 64, 7), 2 * group, 2, 64, block_size=16)
    arrays = _inputs(case, "bfloat16")
    got = _run(kernels.attention_decode, xp, arrays)
    assert_close(got, _run(reference.attention_decode, np, arrays), reduction=case.reduction)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shared_blocks_and_any_number_of_splits(xp, dtype):
    """Sequences that share prefix pages; more splits than keys."""
    case = AttentionCase((1,) * 4, (500, 48, 49, 300), 8, 2, 64, block_size=16)
    arrays = _inputs(case, dtype, num_shared=3)
    assert (arrays[3][:, :3] == arrays[3][0, :3]).all()
    want = _run(reference.attention_decode, np, arrays)
    for num_splits in (2, 5, 8, 40):
        got = _run(kernels.attention_decode, xp, arrays, num_splits=num_splits)
        assert_close(got, want, reduction=case.reduction)


def test_the_same_twice(xp):
    """Splits are combined in a fixed order, so the bits do not depend on which finishes first."""
    arrays = _inputs(AttentionCase((1, 1), (1000, 700), 8, 2, 128, block_size=16), "float16")
    first, second = (_run(kernels.attention_decode, xp, arrays, num_splits=8) for _ in range(2))
    np.testing.assert_array_equal(to_numpy(first), to_numpy(second))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_views_into_fused_qkv_in_place(xp, head_dim, dtype):
    """q is the start of wider rows, block tables are columns of wider ones, out overwrites q."""
    case = AttentionCase((2, 2, 2), (70, 5, 300), 6, 2, head_dim, block_size=16)
    q, k, v, tables, lens = _inputs(case, dtype)
    want = _run(reference.attention_decode, np, (q, k, v, tables, lens))
    rows = xp.zeros((6, 10 * head_dim), q.dtype)
    view = rows[:, : 6 * head_dim].reshape(3, 2, 6, head_dim)
    view[:] = xp.asarray(q)
    assert xp.may_share_memory(view, rows)
    wide = xp.full((3, tables.shape[1] + 5), -1, np.int32)
    wide[:, : tables.shape[1]] = xp.asarray(tables)
    got = kernels.attention_decode(
        view,
        *cases.to_module(xp, k, v),
        block_tables=wide[:, : tables.shape[1]],
        context_lens=xp.asarray(lens),
        out=view,
        num_splits=2,
    )
    assert got is view
    assert_close(xp.ascontiguousarray(view), want, reduction=case.reduction)
    assert not bool(rows[:, 6 * head_dim :].any())


def _float64(case, q, keys, values, tree):
    """One sequence, one query and head at a time; returns (Q, H, D) and (Q, H)."""
    (n, num_heads, _), m = q.shape, len(keys)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for i, h in np.ndindex(n, num_heads):
        last, kv_head = m - n + i, h // (num_heads // case.num_kv_heads)
        seen = [j for j in range(last + 1) if not case.window or j > last - case.window]
        if tree is not None:
            seen = [j for j in seen if j < m - n or int(tree[i]) >> (j - (m - n)) & 1]
        s = keys[seen, kv_head].astype(np.float64) @ q[i, h].astype(np.float64)
        s = s * (case.head_dim**-0.5 if case.scale is None else case.scale)
        s = case.softcap * np.tanh(s / case.softcap) if case.softcap else s
        if len(s) and s.max() > -np.inf:
            p = np.exp(s - s.max())
            out[i, h] = p @ values[seen, kv_head].astype(np.float64) / p.sum()
            lse[i, h] = s.max() + np.log(p.sum())
    return out, lse


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(xp, seed, tier):
    """Random shapes, lengths near page and tile borders, shared blocks and options."""
    rng = np.random.default_rng(seed)
    num_queries, batch = int(rng.choice([1, 1, 2, 3, 5, 8])), int(rng.choice([1, 2, 5, 18]))
    borders = [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257]
    kv_heads, is_tree = int(rng.integers(1, 4)), bool(rng.random() < 0.4)
    case = AttentionCase(
        (num_queries,) * batch,
        tuple(rng.choice(borders, batch).tolist()),
        kv_heads * int(rng.choice([1, 2, 3, 4, 7, 8])),
        kv_heads,
        int(rng.choice([20, 64, 64, 80, 128, 128, 256])),
        block_size=int(rng.choice([16, 32, 64, 128])),
        window=0 if is_tree else int(rng.choice([0, 1, 50])),
        softcap=float(rng.choice([0.0, 0.0, 5.0])),
    )
    dtype = cases.DTYPES[seed % 3]
    q, k, v, tables, _ = arrays = _inputs(case, dtype, num_shared=int(rng.integers(0, 3)))
    masks = _trees(case) if is_tree else None
    options = {**case.rule, "return_lse": True}
    want, want_lse = _run(reference.attention_decode, np, arrays, **options, tree_mask=masks)
    for b, m in enumerate(case.lens_k) if dtype == "float32" else ():
        blocks = tables[b, : -(-m // case.block_size)]
        kv = (x[blocks].transpose(0, 2, 1, 3).reshape(-1, kv_heads, case.head_dim) for x in (k, v))
        out, lse = _float64(case, q[b], *(x[:m] for x in kv), None if masks is None else masks[b])
        np.testing.assert_allclose(want[b], out, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(want_lse[b], lse, rtol=1e-5, atol=1e-5)
    options |= {"tree_mask": None if masks is None else xp.asarray(masks)}
    for num_splits in (None, 3):
        options["num_splits"] = num_splits
        got, lse = _run(kernels.attention_decode, xp, arrays, **options)
        assert_close(got, want, reduction=case.reduction)
        assert_close(lse, want_lse, reduction=case.reduction, name="lse")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("num_queries", [1, 3])
def test_huge_and_infinite_scores(xp, num_queries, dtype, tier):
    """Integer scores up to 16,384 are exact, so only the softmax can be wrong."""
    case = AttentionCase((num_queries,) * 2, (90, 300), 4, 2, 64, block_size=16, scale=1.0)
    q, k, v, tables, lens = _inputs(case, dtype)
    rng = np.random.default_rng(6)
    q[...] = rng.integers(-1, 2, q.shape) * 16
    k[...] = np.where(np.isnan(k), np.nan, rng.integers(-1, 2, k.shape) * 16)
    q[:, :, 2:] = np.abs(q[:, :, 2:]) + 1  # nonzero: scores are -inf for all keys but one, or all
    for b, spared in ((0, 50), (1, 300)):
        slots = np.setdiff1d(np.arange(lens[b]), spared)
        k[tables[b, slots // 16], 1, slots % 16] = -np.inf
    arrays = q, k, v, tables, lens
    want, want_lse = _run(reference.attention_decode, np, arrays, scale=1.0, return_lse=True)
    assert np.isfinite(want.astype(np.float32)).all() and np.isneginf(want_lse[1, :, 2:]).all()
    assert not want[1, :, 2:].any() and want_lse[0].min() > -np.inf and want_lse.max() > 2000
    for b, m in enumerate(case.lens_k):
        blocks = tables[b, : -(-m // 16)]
        kv = (x[blocks].transpose(0, 2, 1, 3).reshape(-1, 2, 64)[:m] for x in (k, v))
        with np.errstate(invalid="ignore"):
            out, lse = _float64(case, q[b], *kv, None)
        np.testing.assert_allclose(want_lse[b], lse, rtol=1e-6)
        assert_close(want[b], out.astype(want.dtype), reduction=case.reduction)
    for num_splits in (None, 3):
        got, lse = _run(
            kernels.attention_decode,
            xp,
            arrays,
            scale=1.0,
            num_splits=num_splits,
            return_lse=True,
        )
        assert_close(got, want, reduction=case.reduction)
        assert_close(lse, want_lse, reduction=case.reduction, name="lse")


_OFFSETS = {
    "first": lambda j: np.where(j == 5, 250, 0),
    "last": lambda j: np.where(j == 1490, 250, 0),
    "falling": lambda j: -10 * (j // 64),
    "rising": lambda j: 10 * (j // 64),
    "slowly falling": lambda j: -3 * (j // 64),
}


@pytest.mark.grid("offsets", _OFFSETS)
@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("head_dim", [64, 128])
@pytest.mark.grid(("batch", "num_splits"), [(1, 1), (1, None), (10, None), (40, None)])
def test_tiles_whose_scores_lie_far_apart(xp, batch, num_splits, head_dim, dtype, offsets):
    """Many tiles of a sequence per CTA: single CTA, clusters of eight and four, persistent."""
    case = AttentionCase((1,) * batch, (1500,) * batch, 4, 2, head_dim, block_size=16, scale=1.0)
    q, k, v, tables, lens = _inputs(case, dtype)
    q *= np.array(0.1, q.dtype)
    q[..., 0] = 1
    slots = np.arange(1500)
    k[tables[:, slots // 16], :, slots % 16, 0] = _OFFSETS[offsets](slots)[None, :, None]
    arrays, options = (q, k, v, tables, lens), {"scale": 1.0, "return_lse": True}
    want, want_lse = _run(reference.attention_decode, np, arrays, **options)
    assert np.isfinite(want.astype(np.float32)).all() and np.isfinite(want_lse).all()
    got, lse = _run(kernels.attention_decode, xp, arrays, num_splits=num_splits, **options)
    assert_close(got, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")


def _random_tree(rng, num_queries):
    """Return each token's mask: its own bit plus, unless it is a root, its parent's mask."""
    masks = np.zeros(num_queries, np.uint64)
    for i in range(num_queries):
        parent = int(rng.integers(-1, i)) if i else -1
        masks[i] = np.uint64(1 << i) | (masks[parent] if parent >= 0 else np.uint64(0))
    return masks


def _trees(case):
    rng = np.random.default_rng(case.lens_q[0])
    return np.array([_random_tree(rng, n) for n in case.lens_q], np.uint64)


_TREES = (
    AttentionCase((8,) * 3, (130, 8, 64), 8, 2, 64, block_size=16),
    AttentionCase((8,) * 20, (300, 9, 128, 129, 17) * 4, 8, 2, 128, block_size=16),
    AttentionCase((5,) * 2, (1000, 70), 32, 8, 128, block_size=16, softcap=9.0),
    AttentionCase((8,) * 18, (700, 8, 20) * 6, 16, 2, 128, block_size=64),
    AttentionCase((3,) * 2, (40, 3), 6, 2, 80, block_size=32),
    AttentionCase((64,), (150,), 4, 4, 64, block_size=16),
)


def test_mirror_of_a_tree_is_each_branch_by_itself():
    """A tree token's result equals that of its path decoded as a plain sequence."""
    case = AttentionCase((6,), (46,), 4, 2, 16, block_size=64)
    q, k, v, tables, lens = _inputs(case, "float32")
    masks = _trees(case)
    got = reference.attention_decode(
        q, k, v, block_tables=tables, context_lens=lens, tree_mask=masks
    )
    for i in range(6):
        path = [j for j in range(6) if int(masks[0, i]) >> j & 1]
        keys = [*range(40), *(40 + j for j in path)]
        branch = [np.zeros_like(pages) for pages in (k, v)]
        for to, pages in zip(branch, (k, v), strict=True):
            to[0, :, : len(keys)] = pages[tables[0, 0]][:, keys]
        want = reference.attention_decode(
            q[:, path],
            *branch,
            block_tables=np.zeros((1, 1), np.int32),
            context_lens=np.array([len(keys)], np.int32),
        )
        np.testing.assert_allclose(got[0, i], want[0, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", _TREES, ids=str)
def test_trees(xp, case, dtype, tier):
    arrays, masks = _inputs(case, dtype), _trees(case)
    want, want_lse = _run(
        reference.attention_decode, np, arrays, **case.rule, tree_mask=masks, return_lse=True
    )
    noise = np.uint64(0xFFFFFFFFFFFFFFFF) << np.arange(1, masks.shape[1] + 1, dtype=np.uint64)
    if masks.shape[1] == 64:
        noise[-1] = 0
    for mask in (masks, masks | noise):  # later tokens' bits are ignored
        for num_splits in (None, 3):
            got, lse = _run(
                kernels.attention_decode,
                xp,
                arrays,
                **case.rule,
                tree_mask=xp.asarray(mask),
                num_splits=num_splits,
                return_lse=True,
            )
            assert_close(got, want, reduction=case.reduction)
            assert_close(lse, want_lse, reduction=case.reduction, name="lse")


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_tree_may_hide_the_newest_key_of_a_single_query(xp, return_lse):
    case = AttentionCase((1, 1, 1), (1, 2, 40), 4, 2, 64, block_size=16)
    q, k, v, tables, lens = _inputs(case, "float32")
    want = _run(kernels.attention_decode, xp, (q, k, v, tables, lens - 1))
    masks = xp.asarray(np.full((3, 1), 2, np.uint64))
    options = {"tree_mask": masks, "return_lse": return_lse}
    got = _run(kernels.attention_decode, xp, (q, k, v, tables, lens), **options)
    assert_close(got[0] if return_lse else got, to_numpy(want), reduction=case.reduction)


@pytest.mark.parametrize("shape", [(7, 2), (8, 3)])  # query tokens in one part, in two parts
def test_a_tree_that_is_a_chain_changes_nothing(xp, shape):
    tokens, kv_heads = shape
    case = AttentionCase((tokens,) * 2, (300, 40), 4 * kv_heads, kv_heads, 128, block_size=16)
    arrays = _inputs(case, "bfloat16")
    chain = (np.uint64(2) << np.arange(tokens, dtype=np.uint64)) - np.uint64(1)
    masks = xp.asarray(np.broadcast_to(chain, (2, tokens)).copy())
    got = _run(kernels.attention_decode, xp, arrays, tree_mask=masks)
    np.testing.assert_array_equal(
        to_numpy(got), to_numpy(_run(kernels.attention_decode, xp, arrays))
    )


@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_codes_of_several_queries_with_sinks(xp, dtype, has_tree):
    """Many sequences: the kernel has rows of several tokens and heads, and quantizes them."""
    rng = np.random.default_rng(5)
    lens = rng.integers(3, 700, 40)
    case = AttentionCase((3,) * 40, tuple(lens.tolist()), 32, 8, 128, block_size=16)
    arrays = _inputs(case, dtype)
    options = {"sinks": xp.asarray(rng.standard_normal(32, np.float32)), "return_lse": True}
    if has_tree:
        masks = np.stack([_random_tree(rng, 3) for _ in lens])
        options["tree_mask"] = xp.asarray(masks)
    out, lse = _run(kernels.attention_decode, xp, arrays, **options)
    codes, scales, own_lse = _run(
        kernels.attention_decode, xp, arrays, quantize_out=True, **options
    )
    want = reference.quantize_rows(to_numpy(out).reshape(120, -1), group=128)
    np.testing.assert_array_equal(to_numpy(codes).reshape(120, -1), want[0])
    np.testing.assert_array_equal(to_numpy(scales).reshape(120, -1), want[1])
    np.testing.assert_array_equal(to_numpy(own_lse), to_numpy(lse))


def test_nothing_to_do(xp):
    pages, tables = xp.zeros((2, 2, 16, 64), np.float16), xp.zeros((0, 1), np.int32)
    got = kernels.attention_decode(
        xp.zeros((0, 1, 4, 64), np.float16),
        pages,
        pages,
        block_tables=tables,
        context_lens=xp.zeros(0, np.int32),
    )
    assert got.shape == (0, 1, 4, 64)


def test_num_splits_is_a_pure_function():
    assert choose_num_splits(8, 64, sm_count=132) == 1  # one split's worth of keys
    assert choose_num_splits(8, 1024, sm_count=132) == 16  # 128 blocks for 132 SMs
    assert choose_num_splits(2048, 16384, sm_count=132) == 1  # device is full without splits
    for blocks in (1, 8, 100, 5000):
        for keys in (1, 64, 65, 5000, 200_000):
            splits = choose_num_splits(blocks, keys, sm_count=132)
            assert 1 <= splits <= max(1, -(-keys // 64))


def test_tiles_fit_every_chip():
    for dtype in cases.DTYPES:
        for spec in specs(dtype):
            limit = 99 if spec.tier == "portable" else 227
            assert dict(spec.defines)["SHARED_BYTES"] <= limit * 1024
    assert choose_tile("float16", 96, num_rows=16).warps_n == 4
    assert choose_tile("float16", 96, num_rows=17).warps_m == 4
    assert len(specs("float16", head_dim=80, num_rows=4)) == 1
    assert len(specs("float16", head_dim=64, num_rows=4)) == 15  # one portable, fourteen for Hopper
    assert choose_hopper_tile("bfloat16", 128, num_rows=32).rows == 32
    assert choose_hopper_tile("bfloat16", 128, num_rows=65) is None
    assert choose_hopper_tile("float32", 128, num_rows=1) is None


def test_contract(xp):
    q, pages = xp.ones((2, 1, 4, 8), np.float32), xp.ones((3, 2, 16, 8), np.float32)
    where = {"block_tables": xp.zeros((2, 1), np.int32), "context_lens": xp.ones(2, np.int32)}
    op = kernels.attention_decode
    with pytest.raises(ShapeError, match=r"v_pages: must have shape \(P, K, block_size, D\)"):
        op(q, pages, pages[:, :, :8], **where)
    with pytest.raises(DTypeError, match="k_pages: must be float32 or uint8 or int8; got float16"):
        op(q, pages.astype(np.float16), pages, **where)
    with pytest.raises(ShapeError, match="v_pages: must have the strides of k_pages"):
        op(q, xp.ones((3, 1, 16, 8), np.float32), pages[:, :1], **where)
    with pytest.raises(ShapeError, match=r"context_lens: must have shape \(B,\); B = 2 from q"):
        op(q, pages, pages, **{**where, "context_lens": xp.ones(3, np.int32)})
    with pytest.raises(DTypeError, match="block_tables: must be int32; got int64"):
        op(q, pages, pages, **{**where, "block_tables": xp.zeros((2, 1), np.int64)})
    with pytest.raises(ContractError, match="K: must be a divisor"):
        op(q[:, :, :3], pages, pages, **where)
    with pytest.raises(ContractError, match="num_splits: must be from 1 to 1024; got 0"):
        op(q, pages, pages, **where, num_splits=0)
    with pytest.raises(ContractError, match="window: must be an int of 0 or more; got -1"):
        op(q, pages, pages, **where, window=-1)
    masks = xp.ones((2, 1), np.uint64)
    with pytest.raises(DTypeError, match="tree_mask: must be uint64; got int64"):
        op(q, pages, pages, **where, tree_mask=masks.astype(np.int64))
    with pytest.raises(ShapeError, match=r"tree_mask: must have shape \(B, Q\)"):
        op(q, pages, pages, **where, tree_mask=xp.ones((2, 2), np.uint64))
    with pytest.raises(ContractError, match="tree_mask: must be None with a window"):
        op(q, pages, pages, **where, tree_mask=masks, window=4)
    with pytest.raises(ContractError, match="tree_mask: must be None with a window or chunk"):
        op(q, pages, pages, **where, tree_mask=masks, chunk=4)
    with pytest.raises(ContractError, match="chunk: must be 0 with a window; got 8"):
        op(q, pages, pages, **where, window=4, chunk=8)
    with pytest.raises(ContractError, match="Q: must be 1 with a chunk; got 2"):
        op(xp.ones((2, 2, 4, 8), np.float32), pages, pages, **where, chunk=8)
    with pytest.raises(ContractError, match="Q: must be at most 64 with a tree_mask; got 65"):
        many = xp.ones((2, 65, 4, 8), np.float32)
        op(many, pages, pages, **where, tree_mask=xp.ones((2, 65), np.uint64))
    with pytest.raises(
        ContractError, match=r"max_context_len: must be an int of 0 or more; got 1\.5"
    ):
        op(q, pages, pages, **where, max_context_len=1.5)
    with pytest.raises(ContractError, match="out: must be None with quantize_out; got 'an array'"):
        op(q, pages, pages, **where, out=xp.empty_like(q), quantize_out=True)


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [1, 20])
def test_a_captured_graph_follows_the_lengths(cp, copies):
    """Lengths and tables are read on the device: a replay after they grew gives the new result."""
    case = AttentionCase((1,) * 2 * copies, (600, 300) * copies, 8, 2, 64, block_size=16)
    arrays = _inputs(case, "bfloat16")
    q, k, v, tables, lens = cases.to_module(cp, *arrays)
    current, out = cp.asarray(np.array([70, 3] * copies, np.int32)), cp.zeros_like(q)
    keywords = {"block_tables": tables, "context_lens": current, "max_context_len": 600, "out": out}
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()  # wait for the copies above, on another stream
    with stream:
        kernels.attention_decode(q, k, v, **keywords)  # warm-up: compile and fill the memory pool
        stream.synchronize()
        stream.begin_capture()
        kernels.attention_decode(q, k, v, **keywords)
        graph = stream.end_capture()
        for lengths in (np.roll(lens.get(), 1) // 2, np.zeros_like(lens.get()), lens.get()):
            current.set(lengths)
            graph.launch(stream)
            stream.synchronize()
            want = _run(reference.attention_decode, np, (*arrays[:4], lengths))
            assert_close(out, want, reduction=case.reduction)
