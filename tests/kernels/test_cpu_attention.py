"""Attention of one new token a sequence on the CPU, in C and in NumPy, against its mirror."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference, threads
from engine.errors import ContractError
from engine.kernels._cpu import attention, compiled
from engine.testing.tolerances import assert_close

NUM_BLOCKS = 40
BLOCK_SIZE = 16


@pytest.fixture(params=["C", "NumPy"], autouse=True)
def language(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(compiled, "kernels", lambda: None)
    elif compiled.kernels() is None:
        pytest.skip(compiled.description())


def problem(
    lens=(1, 16, 100, 0, 33),
    heads=(6, 2),
    head_dim=64,
    rotary_dim=None,
    seed=0,
    num_blocks=NUM_BLOCKS,
):
    """Return q, pages, and the other arguments of a call; k is the newest key of each sequence."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    batch = len(lens)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim

    def random(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    qkv = random(batch, 1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = np.split(qkv, [num_heads, num_heads + num_kv_heads], axis=2)
    pages = [random(num_blocks, num_kv_heads, BLOCK_SIZE, head_dim) for _ in range(2)]
    wide = num_blocks // batch
    tables = rng.permutation(num_blocks)[: batch * wide].reshape(batch, wide).astype(np.int32)
    lens = np.array(lens, np.int32)
    last = np.maximum(lens - 1, 0)
    blocks = tables[np.arange(batch), last // BLOCK_SIZE].astype(np.int64)
    new = {
        "k": k,
        "v": v,
        "positions": last.astype(np.int32),
        "cos_sin": random(128, rotary_dim),
        "slot_mapping": np.where(lens > 0, blocks * BLOCK_SIZE + last % BLOCK_SIZE, -1),
    }
    return q, pages, {"block_tables": tables, "context_lens": lens}, new


def check(q, pages, where, **options):
    """Compare the result, and what is in the pages, with the mirror's."""
    mirrored = [array.copy() for array in pages]
    want = reference.attention_decode(q.copy(), *mirrored, **where, **options)
    got = kernels.attention_decode(q, *pages, **where, **options)
    assert_close(got, want, reduction=max(q.shape[-1], where["context_lens"].max()))
    for array, mirror in zip(pages, mirrored, strict=True):
        assert_close(array.copy(), mirror.copy(), reduction=q.shape[-1])


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (9, 3)])
@pytest.mark.parametrize("head_dim", [1, 20, 64, 96, 128, 264])
def test_heads(heads, head_dim):
    q, pages, where, _ = problem(heads=heads, head_dim=head_dim)
    check(q, pages, where)


@pytest.mark.parametrize("norms", ["", "q", "k", "qk"])
@pytest.mark.parametrize("rotary_dim", [0, 2, 32, 64])
def test_new_tokens(norms, rotary_dim):
    q, pages, where, new = problem(rotary_dim=rotary_dim)
    weights = np.random.default_rng(1).standard_normal((2, 64), dtype=np.float32)
    new |= {f"{name}_weight": weights["qk".index(name)] for name in norms}
    check(q, pages, where, **new, eps=1e-3, weight_offset=0.5)


@pytest.mark.parametrize("rule", [{"window": 1}, {"window": 20}, {"chunk": 16}, {"scale": 0.3}])
def test_rules(rule):
    q, pages, where, new = problem()
    check(q, pages, where, **new, **rule)


@pytest.mark.parametrize("layout", ["tokens first", "k and v in one", "strided table", "unaligned"])
def test_layouts(layout):
    q, pages, where, new = problem()
    if layout == "tokens first":
        pages = [x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for x in pages]
    elif layout == "k and v in one":
        pages = [*np.concatenate(pages, axis=3).reshape(*pages[0].shape[:3], 2, 64)
                 .transpose(3, 0, 1, 2, 4)]  # fmt: skip
    elif layout == "strided table":
        where["block_tables"] = np.repeat(where["block_tables"], 3, axis=0)[::3]
    else:
        new["k"] = unaligned(new["k"])
        q = unaligned(q)
    check(q, pages, where, **new)


def unaligned(array):
    """Return a copy at an odd address."""
    room = np.empty(array.nbytes + 1, np.uint8)
    copy = room[1:].view(np.float32).reshape(array.shape)
    copy[...] = array
    return copy


def test_long_sequences():
    q, pages, where, _ = problem(lens=(128, 127))
    where["block_tables"] = np.tile(where["block_tables"], (1, 40))
    where["context_lens"] = np.array([5_000, 5_119], np.int32)
    check(q, pages, where)


@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (32, 1), (12, 12)])
@pytest.mark.parametrize("lens", [(1500,), (700, 0, 1, 900), (90,) * 20])
def test_threads_give_the_same_bits(heads, lens, monkeypatch):
    q, pages, where, new = problem(lens=lens, heads=heads, num_blocks=240)
    new["cos_sin"] = np.random.default_rng(2).standard_normal((2048, 64), dtype=np.float32)
    found = []
    for number in (1, 2, 5):
        monkeypatch.setattr(threads, "count", lambda number=number: number)
        monkeypatch.setattr(threads, "are_own", lambda: True)
        monkeypatch.setattr(attention, "_MIN_SHARED", 0)
        copies = [array.copy() for array in pages]
        found.append((kernels.attention_decode(q, *copies, **where, **new), *copies))
    for other in found[1:]:
        assert all(map(np.array_equal, found[0], other))
    check(q, pages, where, **new)


def test_scores_that_differ_much():
    q, pages, where, _ = problem()
    q, pages[0] = np.rint(q * 20), np.rint(pages[0])  # whole numbers: every order of sums is exact
    check(q, pages, where)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_stay_with_their_head(value):
    q, pages, where, _ = problem(lens=(40, 50))
    want = kernels.attention_decode(q, *pages, **where)
    pages[0][where["block_tables"][0, 1], 0, 3] = value
    got = kernels.attention_decode(q, *pages, **where)
    assert np.array_equal(got[1], want[1]) and np.array_equal(got[0, :, 3:], want[0, :, 3:])
    assert np.isnan(got[0, 0, 0]).all()


def test_without_a_finite_score_the_result_is_0():
    q, pages, where, _ = problem(lens=(40, 50))
    pages[0][:] = np.where(q[0, 0, 0] > 0, -np.float32(3e38), np.float32(3e38))
    q[:] = q[0, 0, 0] * 100
    with np.errstate(over="ignore"):
        check(q, pages, where)
        assert not kernels.attention_decode(q, *pages, **where).any()


def test_pages_that_cannot_be_written_are_refused():
    q, pages, where, new = problem()
    pages[1].flags.writeable = False
    with pytest.raises(ContractError, match="v_pages: must be writeable"):
        kernels.attention_decode(q, *pages, **where, **new)
