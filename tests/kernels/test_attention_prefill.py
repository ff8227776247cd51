"""attention_prefill: the kernel against its mirror, the mirror against float64, the contract."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._attention import ScoreRule, check_count
from engine.kernels._contract import Contract
from engine.kernels.attention_prefill import choose_tile, specs
from engine.testing import cases
from engine.testing.cases_attention import PREFILL, AttentionCase, cu_seqlens, paged_cache
from engine.testing.tolerances import assert_close


def _inputs(case, dtype):
    """Return q, k, v and the keyword arguments that delimit sequences."""
    q = cases.normal((sum(case.lens_q), case.num_heads, case.head_dim), dtype, seed=1)
    where = {"cu_seqlens_q": cu_seqlens(case.lens_q)}
    if case.block_size:
        sizes = case.num_kv_heads, case.block_size, case.head_dim
        k, v, where["block_tables"], where["context_lens"] = paged_cache(
            case.lens_k, *sizes, dtype, seed=2
        )
    else:
        shape = (sum(case.lens_k), case.num_kv_heads, case.head_dim)
        k, v = cases.normal(shape, dtype, seed=3), cases.normal(shape, dtype, seed=4)
        where["cu_seqlens_k"] = cu_seqlens(case.lens_k)
    return q, k, v, where


def _moved(xp, where):
    return {name: xp.asarray(array) for name, array in where.items()}


def _dense_softmax(case, q, k, v):
    """One sequence in float64, one query at a time."""
    (n, num_heads, _), m = q.shape, len(k)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    out, lse = np.zeros((n, num_heads, v.shape[2])), np.full((n, num_heads), -np.inf)
    for i in range(n):
        high = m - n + i + 1 if case.causal else m
        low = max(0, high - case.window) if case.window else 0
        for h in range(num_heads if high > low else 0):
            kv_head = h // (num_heads // case.num_kv_heads)
            s = scale * k[low:high, kv_head] @ q[i, h]
            if case.softcap:
                s = case.softcap * np.tanh(s / case.softcap)
            p = np.exp(s - s.max())
            out[i, h] = p @ v[low:high, kv_head] / p.sum()
            lse[i, h] = s.max() + np.log(p.sum())
    return out, lse


@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_mirror_is_the_formula(case):
    q, k, v, where = _inputs(case, "float32")
    out, lse = reference.attention_prefill(
        q, k, v, **where, causal=case.causal, **case.rule, return_lse=True
    )
    for b, length in enumerate(case.lens_k):
        rows = slice(*where["cu_seqlens_q"][b : b + 2])
        if case.block_size:
            blocks = where["block_tables"][b, : -(-length // case.block_size)]
            keys, values = (
                x[blocks].transpose(0, 2, 1, 3).reshape(-1, *x.shape[1::2])[:length] for x in (k, v)
            )
        else:
            keys, values = (x[slice(*where["cu_seqlens_k"][b : b + 2])] for x in (k, v))
        want, want_lse = _dense_softmax(case, q[rows], keys, values)
        np.testing.assert_allclose(out[rows], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", PREFILL, ids=str)
def test_matches_mirror(xp, case, dtype):
    q, k, v, where = _inputs(case, dtype)
    rule = {"causal": case.causal, **case.rule, "return_lse": True}
    want, want_lse = reference.attention_prefill(q, k, v, **where, **rule)
    out, buffer = cases.guarded(xp, q.shape, q.dtype)
    got, lse = kernels.attention_prefill(
        *cases.to_module(xp, q, k, v), **_moved(xp, where), **rule, out=out
    )
    assert got is out
    assert_close(got, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("head_dim", "offset"), [(64, 0), (80, 0), (64, 1), (20, 0)])
def test_views_into_fused_qkv_in_place(xp, head_dim, offset, dtype):
    """q, k and v are columns of one matrix (also at an odd address); the result overwrites q."""
    tokens, heads, kv_heads = 100, 4, 2
    width = (heads + 2 * kv_heads) * head_dim
    qkv = cases.normal((tokens, width + 8), dtype, seed=5)
    ends = offset + np.array([0, heads, heads + kv_heads, heads + 2 * kv_heads]) * head_dim

    def split(array):
        return [array[:, a:b].reshape(tokens, -1, head_dim) for a, b in pairwise(ends)]

    lens = xp.asarray(cu_seqlens([30, 70]))
    where = {"cu_seqlens_q": cu_seqlens([30, 70]), "cu_seqlens_k": cu_seqlens([30, 70])}
    want = reference.attention_prefill(*split(qkv), **where)
    array = xp.asarray(qkv.copy())
    q, k, v = split(array)
    assert xp.may_share_memory(q, array)
    got = kernels.attention_prefill(q, k, v, cu_seqlens_q=lens, cu_seqlens_k=lens, out=q)
    assert got is q
    assert_close(xp.ascontiguousarray(got), want, reduction=70 + head_dim)
    np.testing.assert_array_equal(to_numpy(array)[:, ends[1] :], qkv[:, ends[1] :])


@pytest.mark.grid("num_splits", [None, 3])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(
    ("head_dim", "value_dim"), [(192, 128), (192, 160), (256, 64), (64, 40), (96, 8), (24, 7)]
)
def test_narrow_values(xp, head_dim, value_dim, dtype, num_splits):
    """v lies beside what must not be read; so does the result beside what must not be written."""
    case = AttentionCase((130, 1, 70), (400, 5, 70), 6, 3, head_dim)
    q, k, _, where = _inputs(case, dtype)
    beside = cases.normal((len(k), 3, value_dim + 16), dtype, seed=8)
    beside[..., :8] = beside[..., 8 + value_dim :] = np.nan
    columns = np.s_[..., 8 : 8 + value_dim]
    want, want_lse = reference.attention_prefill(q, k, beside[columns], **where, return_lse=True)
    exact, _ = _dense_softmax(case, q[131:], k[405:], beside[columns][405:])
    assert_close(want[131:], exact.astype(want.dtype), reduction=case.reduction)
    out = xp.full((len(q), 6, value_dim + 16), np.nan, q.dtype)
    q, k, beside = cases.to_module(xp, q, k, beside)
    got, lse = kernels.attention_prefill(
        *(q, k, beside[columns]),
        **_moved(xp, where),
        num_splits=num_splits,
        out=out[columns],
        return_lse=True,
    )
    assert_close(xp.ascontiguousarray(got), want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    assert bool(xp.isnan(out[..., :8]).all()) and bool(xp.isnan(out[..., 8 + value_dim :]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("pieces", [(150,), (1, 149), (40, 64, 46), (128, 22)])
def test_pieces_equal_the_whole(xp, pieces, dtype):
    """A prompt in chunks, attending to its pages, equals the whole prompt at once."""
    case = AttentionCase((150,), (150,), 6, 2, block_size=16)
    q, k, v, where = _inputs(case, dtype)
    whole = to_numpy(kernels.attention_prefill(*cases.to_module(xp, q, k, v), **_moved(xp, where)))
    done = 0
    for piece in pieces:
        rows = slice(done, done + piece)
        done += piece
        where |= {
            "cu_seqlens_q": cu_seqlens([piece]),
            "context_lens": np.array([done], np.int32),
        }
        got = kernels.attention_prefill(
            *cases.to_module(xp, q[rows], k, v), **_moved(xp, where), max_seqlen_q=piece
        )
        assert_close(got, whole[rows], reduction=case.reduction)


def test_neighbours_change_nothing(xp):
    """A sequence's result is bitwise identical, alone or in a batch."""
    case = AttentionCase((20, 65, 3), (90, 65, 130), 4, 2, block_size=16)
    q, k, v, where = _inputs(case, "bfloat16")
    both = kernels.attention_prefill(*cases.to_module(xp, q, k, v), **_moved(xp, where))
    alone = {
        "cu_seqlens_q": cu_seqlens([65]),
        "block_tables": where["block_tables"][1:2],
        "context_lens": where["context_lens"][1:2],
    }
    one = kernels.attention_prefill(*cases.to_module(xp, q[20:85], k, v), **_moved(xp, alone))
    np.testing.assert_array_equal(to_numpy(one), to_numpy(both)[20:85])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_huge_and_infinite_scores(xp, dtype):
    """Integer scores up to 16,384 are exact, so only the softmax can be wrong."""
    rng = np.random.default_rng(6)
    q = (rng.integers(-1, 2, (40, 2, 64)) * 16).astype(cases.normal((1,), dtype, 0).dtype)
    k = (rng.integers(-1, 2, (90, 2, 64)) * 16).astype(q.dtype)
    v = cases.normal((90, 2, 64), dtype, seed=7)
    q[5], k[:, 1] = 1, np.where(np.arange(90)[:, None] < 60, -np.inf, k[:, 1])
    q[:, 1] = np.abs(q[:, 1]) + 1  # nonzero: 60 keys have score -inf, all keys of some rows
    where = {"cu_seqlens_q": cu_seqlens([40]), "cu_seqlens_k": cu_seqlens([90])}
    want, want_lse = reference.attention_prefill(q, k, v, **where, scale=1.0, return_lse=True)
    assert np.isneginf(want_lse[:10, 1]).all() and np.isfinite(want.astype(np.float32)).all()
    got, lse = kernels.attention_prefill(
        *cases.to_module(xp, q, k, v), **_moved(xp, where), scale=1.0, return_lse=True
    )
    assert_close(got, want, reduction=154)
    assert_close(lse, want_lse, reduction=154, name="lse")


def test_nothing_to_do(xp):
    q, k = xp.zeros((0, 4, 64), np.float16), xp.zeros((5, 2, 64), np.float16)
    none = xp.zeros(1, np.int32)
    for starts in (none, xp.zeros(4, np.int32)):
        ends = starts.copy() if len(starts) == 1 else xp.asarray(cu_seqlens([0, 5, 0]))
        keys = k[:0] if len(starts) == 1 else k
        got = kernels.attention_prefill(q, keys, keys, cu_seqlens_q=starts, cu_seqlens_k=ends)
        assert got.shape == (0, 4, 64)


def test_tiles_fit_every_chip():
    for dtype in cases.DTYPES:
        for spec in specs(dtype):
            limit = 99 if spec.tier == "portable" else 227
            assert dict(spec.defines)["SHARED_BYTES"] <= limit * 1024
    assert choose_tile("float16", 80).head_dim == 96
    assert specs("float32", head_dim=64) == (specs("float32")[0],)


def test_contract(xp):
    q, k = xp.ones((4, 4, 8), np.float32), xp.ones((4, 2, 8), np.float32)
    pages = xp.ones((3, 2, 16, 8), np.float32)
    lens, tables = xp.asarray(cu_seqlens([1, 3])), xp.zeros((2, 1), np.int32)
    dense = {"cu_seqlens_q": lens, "cu_seqlens_k": lens}
    paged = {"cu_seqlens_q": lens, "block_tables": tables, "context_lens": lens[1:]}
    op = kernels.attention_prefill
    with pytest.raises(ShapeError, match=r"k: must have shape \(Tk, K, D\); D = 8 from q; got"):
        op(q, k[..., :7], k, **dense)
    with pytest.raises(ContractError, match="V: must be from 1 to D = 8; got 16"):
        op(q, k, xp.ones((*k.shape[:2], 16), np.float32), **dense)
    with pytest.raises(DTypeError, match="v: must be float32; got float16"):
        op(q, k, k.astype(np.float16), **dense)
    with pytest.raises(ContractError, match="K: must be a divisor of the number of query heads, 3"):
        op(q[:, :3], k, k, **dense)
    with pytest.raises(ContractError, match="D: must be from 1 to 512; got 520"):
        op(xp.ones((4, 2, 520), np.float32), *[xp.ones((4, 2, 520), np.float32)] * 2, **dense)
    with pytest.raises(ContractError, match="window: must be 0 unless causal; got 3"):
        op(q, k, k, **dense, causal=False, window=3)
    with pytest.raises(ContractError, match="scale: must be positive and finite; got 0"):
        op(q, k, k, **dense, scale=0)
    for number in (1e-300, 1e300, np.float64(1e39)):
        with pytest.raises(ContractError, match="scale: must be from 1e-18 to 1e18; got"):
            op(q, k, k, **dense, scale=number)
        with pytest.raises(ContractError, match="softcap: must be 0 or from 1e-18 to 1e18; got"):
            op(q, k, k, **dense, softcap=number)
    with pytest.raises(ContractError, match="H: must be 1 or more; got 0"):
        op(q[:, :0], k, k, **dense)
    with pytest.raises(ContractError, match="softcap: must be a number from 0"):
        op(q, k, k, **dense, softcap=-1.0)
    with pytest.raises(ContractError, match="cu_seqlens_k: must be None with block_tables"):
        op(q, pages, pages, **paged, cu_seqlens_k=lens)
    with pytest.raises(ContractError, match="context_lens: must be None without block_tables"):
        op(q, k, k, **dense, context_lens=lens)
    with pytest.raises(DTypeError, match="cu_seqlens_k: must be an array; got NoneType"):
        op(q, k, k, cu_seqlens_q=lens)
    with pytest.raises(ShapeError, match=r"context_lens: must have shape \(B,\); B = 1 from block"):
        op(q, pages, pages, **{**paged, "block_tables": tables[:1]})
    with pytest.raises(ContractError, match=r"cu_seqlens_q: must be of length B\+1 = 2, with B fr"):
        op(q, pages, pages, **{**paged, "block_tables": tables[:1], "context_lens": lens[:1]})
    with pytest.raises(ContractError, match=r"block_size: must be one of \(16, 32, 64, 128\)"):
        op(q, pages[:, :, :8].copy(), pages[:, :, :8].copy(), **paged)
    with pytest.raises(ShapeError, match="k: its last axis must be contiguous; got strides"):
        op(q, pages[..., ::-1], pages, **paged)
    with pytest.raises(ShapeError, match="v: must have the strides of k, "):
        op(q, pages, pages[:, ::-1], **paged)
    with pytest.raises(ShapeError, match="out: must have shape"):
        op(q, k, k, **dense, out=q[:2])


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64, np.uint64, int])
def test_counts_become_ints_of_python(kind):
    """NumPy integers keep their width: in 8 bits, a grid of 100 * 8 rows would overflow to 32."""
    count = check_count(Contract("op"), "max_seqlen_q", kind(100))
    assert type(count) is int and count * 8 == 800
    assert type(ScoreRule.checked(Contract("op"), 64, None, kind(3), 0.0).window) is int


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_seqlens_q", [0, 3, 2], r"cu_seqlens_q: must be rising from 0 to 4; got \[0, 3, 2\]"),
        ("context_lens", [1, 17], r"context_lens: must be from 0 to NB \* block_size = 16; got"),
        ("context_lens", [-1, 1], "context_lens: must be from 0"),
        ("block_tables", [[0], [3]], "block_tables: must be ids from 0 to 2; got 3"),
    ],
)
def test_values_are_checked_on_the_cpu(name, value, message):
    where = {
        "cu_seqlens_q": cu_seqlens([1, 3]),
        "block_tables": np.zeros((2, 1), np.int32),
        "context_lens": np.array([1, 3], np.int32),
    }
    where[name] = np.array(value, np.int32)
    pages = np.ones((3, 2, 16, 8), np.float32)
    with pytest.raises(ContractError, match=message):
        kernels.attention_prefill(np.ones((4, 4, 8), np.float32), pages, pages, **where)


@pytest.mark.gpu
def test_damaged_tables_read_nothing_outside(cp):
    """Out-of-range ids and lengths are clamped: no fault, and all other results are right."""
    case = AttentionCase((33, 20), (64, 90), 4, 2, block_size=16)
    q, k, v, where = _inputs(case, "bfloat16")
    want = reference.attention_prefill(q, k, v, **where)
    where["block_tables"][1, :3] = [-1, 2**31 - 1, 10**6]
    where["context_lens"][1] = 2**31 - 1
    got = kernels.attention_prefill(*cases.to_module(cp, q, k, v), **_moved(cp, where))
    assert_close(got[:33], want[:33], reduction=case.reduction)
