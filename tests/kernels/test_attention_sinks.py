"""Attention sinks: mirrors against float64 with an extra column, kernels against both."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels import Periodic
from engine.testing import cases
from engine.testing.cases_attention import (
    DECODE_SINKS,
    PREFILL_SINKS,
    AttentionCase,
    cu_seqlens,
    paged_cache,
)
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close


def _prefill_inputs(case, dtype):
    """Return q, k, v and the array keyword arguments."""
    q = cases.normal((sum(case.lens_q), case.num_heads, case.head_dim), dtype, seed=1)
    more = {"cu_seqlens_q": cu_seqlens(case.lens_q), "sinks": case.head_sinks}
    if case.block_size:
        sizes = case.num_kv_heads, case.block_size, case.head_dim
        cache = paged_cache(case.lens_k, *sizes, dtype, seed=2)
        k, v, more["block_tables"], more["context_lens"] = cache
    else:
        shape = (sum(case.lens_k), case.num_kv_heads, case.head_dim)
        k, v = (cases.normal(shape, dtype, seed=seed) for seed in (3, 4))
        more["cu_seqlens_k"] = cu_seqlens(case.lens_k)
    return (q, k, v), more


def _decode_inputs(case, dtype):
    shape = (len(case.lens_q), case.lens_q[0], case.num_heads, case.head_dim)
    sizes = case.num_kv_heads, case.block_size, case.head_dim
    k, v, tables, lens = paged_cache(case.lens_k, *sizes, dtype, seed=2)
    more = {"block_tables": tables, "context_lens": lens, "sinks": case.head_sinks}
    return (cases.normal(shape, dtype, seed=1), k, v), more


def _moved(xp, arrays, more):
    moved = {name: xp.asarray(array) for name, array in more.items()}
    return cases.to_module(xp, *arrays), moved


def _keys(case, k, more, b):
    """Return the (m, K, D) keys or values of sequence b."""
    if not case.block_size:
        return k[slice(*more["cu_seqlens_k"][b : b + 2])]
    j = np.arange(case.lens_k[b])
    return k[more["block_tables"][b, j // case.block_size], :, j % case.block_size]


def _one_more_column(case, q, k, v):
    """P V of one sequence in float64; P is a softmax over all keys (-inf if hidden) and sink."""
    (n, num_heads, _), m = q.shape, len(k)
    group = num_heads // case.num_kv_heads
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) * (case.scale or case.head_dim**-0.5)
    if case.softcap:
        s = case.softcap * np.tanh(s / case.softcap)
    last = np.arange(m - n, m)[:, None] if case.causal else np.full((n, 1), m - 1)
    hidden = np.arange(m) > last
    if case.window:
        hidden |= np.arange(m) <= last - case.window
    s[:, hidden] = -np.inf
    column = np.broadcast_to(case.head_sinks.astype(np.float64)[:, None, None], (num_heads, n, 1))
    s = np.concatenate([s, column], axis=-1)
    top = s.max(axis=-1, keepdims=True)
    top[np.isneginf(top)] = 0
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    out = np.einsum("hij,jhd->ihd", p[..., :-1] / np.where(total == 0, 1, total), v)
    with np.errstate(divide="ignore"):
        return out, (top + np.log(total))[..., 0].T


@pytest.mark.parametrize("case", PREFILL_SINKS, ids=str)
def test_prefill_mirror_is_a_softmax_with_one_more_column(case):
    (q, k, v), more = _prefill_inputs(case, "float32")
    out, lse = reference.attention_prefill(
        q, k, v, **more, **case.rule, causal=case.causal, return_lse=True
    )
    for b in range(len(case.lens_q)):
        rows = slice(*more["cu_seqlens_q"][b : b + 2])
        keys, values = (_keys(case, x, more, b) for x in (k, v))
        want, want_lse = _one_more_column(case, q[rows], keys, values)
        np.testing.assert_allclose(out[rows], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", DECODE_SINKS, ids=str)
def test_decode_mirror_is_a_softmax_with_one_more_column(case):
    (q, k, v), more = _decode_inputs(case, "float32")
    out, lse = reference.attention_decode(q, k, v, **more, **case.rule, return_lse=True)
    for b in range(len(q)):
        keys, values = (_keys(case, x, more, b) for x in (k, v))
        want, want_lse = _one_more_column(case, q[b], keys, values)
        np.testing.assert_allclose(out[b], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[b], want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.grid("num_splits", [None, 1, 3])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", PREFILL_SINKS, ids=str)
def test_prefill_matches_mirror(xp, case, dtype, tier, num_splits):
    arrays, more = _prefill_inputs(case, dtype)
    rule = {**case.rule, "causal": case.causal, "return_lse": True}
    want, want_lse = reference.attention_prefill(*arrays, **more, **rule)
    arrays, more = _moved(xp, arrays, more)
    got, lse = kernels.attention_prefill(*arrays, **more, **rule, num_splits=num_splits)
    assert_close(got, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    alone = kernels.attention_prefill(
        *arrays, **more, **{**rule, "return_lse": False}, num_splits=num_splits
    )
    assert bool((alone == got).all())


@pytest.mark.grid("num_splits", [None, 1, 3])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", DECODE_SINKS, ids=str)
def test_decode_matches_mirror(xp, case, dtype, tier, num_splits):
    arrays, more = _decode_inputs(case, dtype)
    rule = {**case.rule, "return_lse": True}
    want, want_lse = reference.attention_decode(*arrays, **more, **rule)
    arrays, more = _moved(xp, arrays, more)
    limits = {"num_splits": num_splits, "max_context_len": max(case.lens_k)}
    got, lse = kernels.attention_decode(*arrays, **more, **rule, **limits)
    assert_close(got, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    alone = kernels.attention_decode(*arrays, **more, **case.rule, **limits)
    assert bool((alone == got).all())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("batch", [1, 6, 40, 150])  # clusters of 8 and 4, persistent CTAs
def test_new_tokens(xp, batch, head_dim, tier):
    lens = tuple((np.arange(batch) * 37 % 500).tolist())
    sinks = (0.5, 3.0, -2.0, 1e4, -1e4)
    case = AttentionCase((1,) * batch, lens, 16, 4, head_dim, 16, window=128, sinks=sinks)
    (q, k_pages, v_pages), more = _decode_inputs(case, "bfloat16")
    new = {
        name: cases.normal((batch, 1, 4, head_dim), "bfloat16", i) for i, name in enumerate("kv")
    }
    last = np.maximum(more["context_lens"] - 1, 0)
    blocks = more["block_tables"][np.arange(batch), last // 16].astype(np.int64)
    slots = np.where(more["context_lens"] > 0, blocks * 16 + last % 16, -1)
    new |= {"positions": last.astype(np.int32), "slot_mapping": slots}
    new["cos_sin"] = cos_sin_table(512, head_dim)
    pages = [k_pages.copy(), v_pages.copy()]
    want = reference.attention_decode(q.copy(), *pages, **more, **new, window=128)
    arrays, moved = _moved(xp, (q, k_pages, v_pages), more | new)
    got = kernels.attention_decode(*arrays, **moved, window=128)
    assert_close(got, want, reduction=case.reduction)


def test_goes_with_a_pattern_and_with_a_tree(xp, tier):
    case = PREFILL_SINKS[0]
    arrays, more = _prefill_inputs(case, "bfloat16")
    pattern = Periodic(16, 4)
    want = reference.attention_prefill(*arrays, **more, pattern=pattern)
    arrays, more = _moved(xp, arrays, more)
    got = kernels.attention_prefill(*arrays, **more, pattern=pattern)
    assert_close(got, want, reduction=case.reduction)
    case = AttentionCase((3, 3), (40, 7), 8, 2, 64, 16, sinks=case.sinks)
    arrays, more = _decode_inputs(case, "bfloat16")
    more["tree_mask"] = np.array([[1, 3, 5]] * 2, np.uint64)
    want = reference.attention_decode(*arrays, **more)
    arrays, more = _moved(xp, arrays, more)
    assert_close(kernels.attention_decode(*arrays, **more), want, reduction=case.reduction)


@pytest.mark.parametrize("with_sinks", [0, 1, 2])
def test_parts_are_merged_if_one_has_the_sinks(xp, with_sinks):
    """The third part has no keys, so its log-sum-exp is the sink."""
    case = AttentionCase((9,), (90,), 8, 2, 64, causal=False, sinks=(0.5, 4.0, -3.0, 30.0))
    (q, k, v), more = _prefill_inputs(case, "float32")
    want, want_lse = reference.attention_prefill(q, k, v, **more, causal=False, return_lse=True)
    (q, k, v), more = _moved(xp, (q, k, v), more)
    states = []
    for i, keys in enumerate((slice(0, 50), slice(50, 90), slice(90, 90))):
        rule = {"sinks": more["sinks"]} if i == with_sinks else {}
        ends = xp.asarray(cu_seqlens([len(range(90)[keys])]))
        where = {"cu_seqlens_q": more["cu_seqlens_q"], "cu_seqlens_k": ends}
        states.append(
            kernels.attention_prefill(
                q, k[keys], v[keys], **where, **rule, causal=False, return_lse=True
            )
        )
    out, lse = states[0]
    for other, other_lse in states[1:]:
        out, lse = kernels.merge_states((out, other), (lse, other_lse))
    assert_close(out, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")


@pytest.mark.parametrize("op", [kernels.attention_prefill, kernels.attention_decode])
def test_contract(xp, op):
    is_prefill = op is kernels.attention_prefill
    case = PREFILL_SINKS[6] if is_prefill else DECODE_SINKS[0]
    arrays, more = (_prefill_inputs if is_prefill else _decode_inputs)(case, "float32")
    arrays, more = _moved(xp, arrays, more)
    sinks = more.pop("sinks")
    with pytest.raises(ShapeError, match=r"sinks: must have shape \(H,\); H = 8 from q; got"):
        op(*arrays, **more, sinks=sinks[:7])
    with pytest.raises(DTypeError, match=r"sinks: must be float32; got float16"):
        op(*arrays, **more, sinks=sinks.astype(np.float16))
    with pytest.raises(DTypeError, match=r"sinks: must be"):
        op(*arrays, **more, sinks=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [kernels.attention_prefill, kernels.attention_decode])
def test_sinks_must_be_on_the_same_device(cp, op):
    is_prefill = op is kernels.attention_prefill
    case = PREFILL_SINKS[6] if is_prefill else DECODE_SINKS[0]
    arrays, more = (_prefill_inputs if is_prefill else _decode_inputs)(case, "float32")
    sinks = more.pop("sinks")
    arrays, more = _moved(cp, arrays, more)
    with pytest.raises(ContractError, match=r"sinks: is a numpy array, but q is a cupy array"):
        op(*arrays, **more, sinks=sinks)
