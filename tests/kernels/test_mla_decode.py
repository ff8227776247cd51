"""mla_decode: the kernel against its mirror, the mirror against expanded attention, contract."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.mla_decode import specs
from engine.kernels.mla_decode.sm90 import choose_hopper_tile
from engine.testing import cases
from engine.testing.cases_attention import paged_cache
from engine.testing.tolerances import assert_close


@dataclass(frozen=True)
class Case:
    """Sequences of `lens` tokens, of which the last `num_queries` are new."""

    lens: tuple[int, ...]
    num_queries: int = 1
    num_heads: int = 16
    latent: int = 512
    rope: int = 64
    block_size: int = 16

    @property
    def reduction(self) -> int:
        return self.latent + self.rope + max(self.lens)


CASES = (
    Case((1, 5, 64, 65, 130)),
    Case((0, 300, 0, 77), num_heads=20),
    Case((128, 129, 500), num_queries=2, block_size=32),
    Case((70, 3, 200), num_queries=5, num_heads=20, block_size=64),  # 100 rows: two row tiles
    Case((200, 2), num_queries=3, num_heads=128, block_size=128),  # the first sees no key
    Case((90, 400, 33), num_heads=64, latent=256),
    Case((1000,), num_heads=3),
    Case((60, 35), num_queries=2, num_heads=5, latent=24, rope=8),
    Case((60, 35), num_heads=5, latent=19, rope=6),  # rows that no vector divides
    Case((150, 35), num_heads=40, latent=256, rope=32),
)


def _inputs(case, dtype, num_shared=0):
    """Return q, q_rope, pages, block tables and lengths; what must not be read is NaN."""
    shape = (len(case.lens), case.num_queries, case.num_heads)
    width = case.latent + case.rope
    pages, _, *tables = paged_cache(
        case.lens, 1, case.block_size, width, dtype, seed=2, num_shared=num_shared
    )
    q = cases.normal((*shape, case.latent), dtype, seed=1)
    q_rope = cases.normal((*shape, case.rope), dtype, seed=3)
    return q, q_rope, pages[:, 0], *tables


def _run(op, xp, arrays, **keywords):
    q, q_rope, pages, tables, lens = cases.to_module(xp, *arrays)
    keywords = {"scale": 0.07} | keywords
    return op(q, q_rope, pages, block_tables=tables, context_lens=lens, **keywords)


def test_mirror_is_attention_with_expanded_keys_and_values():
    """The absorbed form equals attention over k = [Wk c | k_rope], v = Wv c (arXiv:2405.04434)."""
    case = Case((40, 3), num_queries=2, num_heads=3, latent=24, rope=8)
    _, q_rope, pages, tables, lens = _inputs(case, "float32")
    q_rope, pages = q_rope.astype(np.float64), pages.astype(np.float64)
    q_nope = np.float64(cases.normal((2, 2, 3, 12), "float32", seed=5))
    up_k, up_v = (np.float64(cases.normal((3, n, 24), "float32", seed=n)) for n in (12, 10))
    q = np.einsum("bihn,hnl->bihl", q_nope, up_k)
    latents, lse = _run(reference.mla_decode, np, (q, q_rope, pages, tables, lens), return_lse=True)
    got = np.einsum("bihl,hvl->bihv", latents, up_v)
    for b, i, h in np.ndindex(2, 2, 3):
        slots = [(tables[b, j // 16], j % 16) for j in range(lens[b] - 2 + i + 1)]
        c, k_rope = (np.array([pages[s][part] for s in slots]) for part in (np.s_[:24], np.s_[24:]))
        s = 0.07 * (c @ up_k[h].T @ q_nope[b, i, h] + k_rope @ q_rope[b, i, h])
        want = np.exp(s) / np.exp(s).sum() @ (c @ up_v[h].T)
        np.testing.assert_allclose(got[b, i, h], want, rtol=1e-10)
        np.testing.assert_allclose(lse[b, i, h], np.log(np.exp(s).sum()), rtol=1e-10)


@pytest.mark.grid("num_splits", [None, 1, 3])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", CASES, ids=str)
def test_matches_mirror(xp, case, dtype, num_splits):
    arrays = _inputs(case, dtype)
    want, want_lse = _run(reference.mla_decode, np, arrays, return_lse=True)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got, lse = _run(kernels.mla_decode, xp, arrays, num_splits=num_splits, out=out, return_lse=True)
    assert got is out
    assert_close(got, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize("batch", [1, 7, 133])
def test_persistent_schedule(cp, batch, num_heads):
    """Sequences that start and end anywhere within a block's share of the keys."""
    lens = tuple(
        int(n) for n in np.random.default_rng(batch).integers(1, 3000 // batch + 65, batch)
    )
    case = Case(lens, num_heads=num_heads)
    arrays = _inputs(case, "bfloat16")
    want = _run(reference.mla_decode, np, arrays)
    for _ in range(3):  # scratch memory of the previous launch
        got = _run(kernels.mla_decode, cp, arrays)
        assert_close(got, want, reduction=case.reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [(300,) * 131, (300,) * 70, (64,) * 500, (0, 640, 0) * 40])
def test_whole_sequences_and_empty_ones(cp, lens):
    """Shares rounded up to whole sequences, more sequences than lanes, none in between."""
    case = Case(lens, num_queries=2, num_heads=64)
    arrays = _inputs(case, "bfloat16")
    want = _run(reference.mla_decode, np, arrays)
    got = to_numpy(_run(kernels.mla_decode, cp, arrays))
    has_keys = np.array(lens) > 0  # zeros would lower the allowed error
    assert_close(got[has_keys], want[has_keys], reduction=case.reduction)
    np.testing.assert_array_equal(got[~has_keys], want[~has_keys])


@pytest.mark.gpu
@pytest.mark.parametrize(("num_seqs", "num_heads"), [(33, 16), (4, 128)])
def test_long_sequences_cut_anywhere(cp, num_seqs, num_heads):
    """Pieces of one tile follow long ones: the warpgroups are as far apart as they can be."""
    case = Case((8000,) * num_seqs, num_heads=num_heads)
    arrays = _inputs(case, "bfloat16")
    want = _run(reference.mla_decode, np, arrays)
    for _ in range(20):
        got = _run(kernels.mla_decode, cp, arrays)
    assert_close(got, want, reduction=case.reduction)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_shared_blocks_and_any_number_of_splits(xp, dtype):
    arrays = _inputs(Case((500, 48, 49, 300)), dtype, num_shared=3)
    want = _run(reference.mla_decode, np, arrays)
    for num_splits in (2, 5, 8, 40):
        got = _run(kernels.mla_decode, xp, arrays, num_splits=num_splits)
        assert_close(got, want, reduction=1100)


@pytest.mark.parametrize("num_heads", [3, 128])
def test_splits_do_not_depend_on_the_batch(xp, num_heads):
    """With `num_splits` given, a sequence has the same bits alone and among many."""
    case = Case((400, *range(1, 40)), num_heads=num_heads, latent=256)
    q, q_rope, pages, tables, lens = _inputs(case, "bfloat16")
    many = _run(kernels.mla_decode, xp, (q, q_rope, pages, tables, lens), num_splits=3)
    one = (q[:1], q_rope[:1], pages, tables[:1], lens[:1])
    alone = _run(kernels.mla_decode, xp, one, num_splits=3)
    np.testing.assert_array_equal(to_numpy(many[:1]), to_numpy(alone))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_tokens_unevenly_apart(xp, dtype):
    """Queries as (B, H, Q, L) in memory: no distance between rows is common to all."""
    case = Case((70, 300), num_queries=3, num_heads=4)
    q, q_rope, *rest = _inputs(case, dtype)
    want = _run(reference.mla_decode, np, (q, q_rope, *rest))
    q, q_rope = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, q_rope))
    q, q_rope, pages, tables, lens = cases.to_module(xp, q, q_rope, *rest)
    q, q_rope = q.swapaxes(1, 2), q_rope.swapaxes(1, 2)
    where = {"block_tables": tables, "context_lens": lens, "scale": 0.07}
    got = kernels.mla_decode(q, q_rope, pages, **where)
    assert_close(got, want, reduction=case.reduction)


def test_the_same_twice(xp):
    arrays = _inputs(Case((1000, 700)), "float16")
    first, second = (_run(kernels.mla_decode, xp, arrays) for _ in range(2))
    np.testing.assert_array_equal(to_numpy(first), to_numpy(second))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views_in_place(xp, dtype):
    """Heads apart in memory, one layer's pages among others', out overwrites q."""
    case = Case((70, 5, 300), num_queries=2, num_heads=6, latent=256)
    q, q_rope, pages, tables, lens = _inputs(case, dtype)
    want = _run(reference.mla_decode, np, (q, q_rope, pages, tables, lens))
    wide = xp.zeros((3, 2, 6, 256 + 64 + 8), q.dtype)
    wide[..., :256], wide[..., 256:320] = xp.asarray(q), xp.asarray(q_rope)
    layers = xp.zeros((len(pages), 3, *pages.shape[1:]), q.dtype)
    layers[:, 1] = xp.asarray(pages)
    got = kernels.mla_decode(
        wide[..., :256],
        wide[..., 256:320],
        layers[:, 1],
        block_tables=xp.asarray(tables),
        context_lens=xp.asarray(lens),
        scale=0.07,
        out=wide[..., :256],
    )
    assert_close(got.copy(), want, reduction=case.reduction)
    np.testing.assert_array_equal(to_numpy(wide[..., 256:320]), q_rope)


def test_large_scores_do_not_overflow(xp):
    """The base of a row moves with its maximum, upwards and not downwards."""
    q, q_rope, pages, tables, lens = _inputs(Case((400,), num_heads=4), "bfloat16")
    order = np.concatenate([np.linspace(0, 30, 200), np.linspace(30, -30, 200)])
    for j, factor in enumerate(order):
        pages[tables[0, j // 16], j % 16] *= pages.dtype.type(factor)
    arrays = (q, q_rope, pages, tables, lens)
    want = _run(reference.mla_decode, np, arrays)
    assert np.isfinite(want.astype(np.float32)).all()
    assert_close(_run(kernels.mla_decode, xp, arrays), want, reduction=1000)


def test_contract(xp):
    case = Case((20, 3), num_queries=2, num_heads=3, latent=24, rope=8)
    q, q_rope, pages, tables, lens = cases.to_module(xp, *_inputs(case, "float32"))
    op = kernels.mla_decode
    where = {"block_tables": tables, "context_lens": lens, "scale": 0.1}
    with pytest.raises(ContractError, match=r"pages: must be of width L \+ R = 32; got 31"):
        op(q, q_rope, pages[..., :31].copy(), **where)
    with pytest.raises(ContractError, match="pages: must be pages of contiguous tokens"):
        op(q, q_rope[..., :7], pages[..., :31], **where)
    with pytest.raises(DTypeError, match="q_rope: must be float32"):
        op(q, q_rope.astype(np.float16), pages, **where)
    with pytest.raises(ShapeError, match=r"q_rope: must have shape \(B, Q, H, R\); H = 3 from q"):
        op(q, q_rope[:, :, :2], pages, **where)
    with pytest.raises(ContractError, match="num_splits: must be from 1 to 1024; got 1025"):
        op(q, q_rope, pages, num_splits=1025, **where)
    with pytest.raises(ContractError, match="scale: must be positive and finite; got -1"):
        op(q, q_rope, pages, **(where | {"scale": -1.0}))
    with pytest.raises(ContractError, match="block_size: must be one of"):
        op(q, q_rope, pages[:, :8].copy(), **where)
    if xp is np:
        with pytest.raises(ContractError, match="context_lens: must be from 0 to NB"):
            op(q, q_rope, pages, **(where | {"context_lens": lens + np.int32(99)}))


def test_tiles_and_modules():
    assert choose_hopper_tile("float32", 512, 64, 16) is None
    assert choose_hopper_tile("bfloat16", 512, 32, 16) is None
    for latent in (256, 512):
        for block_size in (16, 32, 64, 128):
            tile = choose_hopper_tile("bfloat16", latent, 64, block_size)
            assert tile is not None and tile.shared_bytes <= 227 * 1024
            assert tile.spec("bfloat16") in specs("bfloat16")
            assert tile.spec("bfloat16") in specs(
                "bfloat16", latent_dim=latent, block_size=block_size
            )
