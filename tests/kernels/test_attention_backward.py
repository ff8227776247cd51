"""attention_backward: the kernel against its mirror, the mirror against float64, the contract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.attention_backward import choose_tile, specs
from engine.testing import cases
from engine.testing.cases_attention import PREFILL, AttentionCase, cu_seqlens
from engine.testing.tolerances import assert_close

_NARROW = [case for case in PREFILL if case.head_dim <= 256]
CASES = tuple(dict.fromkeys(replace(case, block_size=0) for case in _NARROW))


def _reduction(case):
    """Terms summed per element: a score, dP, delta; then the group's queries, or the keys."""
    group = case.num_heads // case.num_kv_heads
    return 3 * case.head_dim + max(*case.lens_k, *(group * n for n in case.lens_q))


def _inputs(case, dtype):
    """Return arrays dout, q, k, v, out, lse by name, and the keyword arguments."""
    shape = (sum(case.lens_q), case.num_heads, case.head_dim)
    kv_shape = (sum(case.lens_k), case.num_kv_heads, case.head_dim)
    arrays = {
        name: cases.normal(kv_shape if name in "kv" else shape, dtype, seed)
        for seed, name in enumerate(("dout", "q", "k", "v"))
    }
    where = {"cu_seqlens_q": cu_seqlens(case.lens_q), "cu_seqlens_k": cu_seqlens(case.lens_k)}
    rule = {"causal": case.causal, **case.rule}
    qkv = (arrays[name] for name in "qkv")
    out, lse = reference.attention_prefill(*qkv, **where, **rule, return_lse=True)
    return {**arrays, "out": out, "lse": lse}, where, rule


def _assert_gradients(case, got, want):
    """Compare dq, dk, dv with the mirror's; only rounding errors remain if all softmaxes are 1."""
    for name, x, wanted in zip(("dq", "dk", "dv"), got, want, strict=True):
        if name != "dv" and (case.window == 1 or max(case.lens_k) == 1):
            assert x.shape == wanted.shape and float(abs(x).max()) < 1e-4, name
        else:
            assert_close(x, wanted, reduction=_reduction(case), name=name)


def _run(xp, arrays, where, rule, **options):
    moved = {name: xp.asarray(array) for name, array in {**arrays, **where}.items()}
    return kernels.attention_backward(**moved, **rule, **options)


def _forward64(case, q, k, v):
    """Attention of one sequence in float64, one query at a time."""
    (n, num_heads, _), m = q.shape, len(k)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    out = np.zeros(q.shape)
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
    return out


def _backward64(case, dout, q, k, v):
    """Gradients of `_forward64` by the chain rule, with the softmax's full Jacobian, in float64."""
    (n, num_heads, _), m = q.shape, len(k)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for i in range(n):
        high = m - n + i + 1 if case.causal else m
        low = max(0, high - case.window) if case.window else 0
        for h in range(num_heads if high > low else 0):
            kv_head = h // (num_heads // case.num_kv_heads)
            keys = slice(low, high), kv_head
            s = scale * k[keys] @ q[i, h]
            slope = 1.0
            if case.softcap:
                slope = 1 - np.tanh(s / case.softcap) ** 2
                s = case.softcap * np.tanh(s / case.softcap)
            p = np.exp(s - s.max())
            p /= p.sum()
            dv[keys] += np.outer(p, dout[i, h])
            ds = (np.diag(p) - np.outer(p, p)) @ (v[keys] @ dout[i, h]) * slope * scale
            dq[i, h] = ds @ k[keys]
            dk[keys] += np.outer(ds, q[i, h])
    return dq, dk, dv


def _expected(case, arrays, where):
    """Float64 gradients of all sequences."""
    found = []
    for b in range(len(case.lens_q)):
        rows, keys = (slice(*ends[b : b + 2]) for ends in where.values())
        parts = (arrays[n][keys if n in "kv" else rows] for n in ("dout", "q", "k", "v"))
        found.append(_backward64(case, *(x.astype(np.float64) for x in parts)))
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mirror_is_the_formula(case):
    arrays, where, rule = _inputs(case, "float32")
    got = reference.attention_backward(**arrays, **where, **rule)
    for name, x, want in zip("qkv", got, _expected(case, arrays, where), strict=True):
        limit = 2e-5 * np.abs(want).max(initial=1.0)
        np.testing.assert_allclose(x, want, rtol=1e-4, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase((5,), (7,), 4, 2, 6),
        AttentionCase((6,), (4,), 2, 1, 5, causal=False, scale=0.7),
        AttentionCase((9,), (9,), 2, 2, 4, window=3, softcap=1.5),
    ],
    ids=str,
)
def test_formula_is_the_derivative(case):
    """Check every partial derivative by central differences of the float64 forward pass."""
    rng = np.random.default_rng(11)
    (n,), (m,) = case.lens_q, case.lens_k
    q, dout = (rng.standard_normal((n, case.num_heads, case.head_dim)) for _ in range(2))
    k, v = (rng.standard_normal((m, case.num_kv_heads, case.head_dim)) for _ in range(2))
    step = 1e-5
    for x, got in zip((q, k, v), _backward64(case, dout, q, k, v), strict=True):
        for index in np.ndindex(x.shape):
            kept, losses = x[index], []
            for sign in (1, -1):
                x[index] = kept + sign * step
                losses.append(np.sum(dout * _forward64(case, q, k, v)))
            x[index] = kept
            assert abs((losses[0] - losses[1]) / (2 * step) - got[index]) < 1e-7


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", CASES, ids=str)
def test_matches_mirror(xp, case, dtype):
    arrays, where, rule = _inputs(case, dtype)
    want = reference.attention_backward(**arrays, **where, **rule)
    for deterministic in (True, False):
        got = _run(xp, arrays, where, rule, deterministic=deterministic)
        _assert_gradients(case, got, want)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("head_dim", "offset"), [(64, 0), (80, 0), (64, 1), (20, 0)])
def test_views_into_fused_qkv(xp, head_dim, offset, dtype):
    """q, k and v as columns of one matrix, also at an odd address."""
    tokens, heads, kv_heads = 100, 4, 2
    case = AttentionCase((30, 70), (30, 70), heads, kv_heads, head_dim)
    arrays, where, rule = _inputs(case, dtype)
    want = reference.attention_backward(**arrays, **where, **rule)
    ends = offset + np.array([0, heads, heads + kv_heads, heads + 2 * kv_heads]) * head_dim
    fused = np.zeros((tokens, ends[-1] + 7), want[0].dtype)
    for name, first, last in zip("qkv", ends[:-1], ends[1:], strict=True):
        fused[:, first:last] = arrays[name].reshape(tokens, -1)
    array = xp.asarray(fused)
    moved = {name: xp.asarray(x) for name, x in {**arrays, **where}.items()}
    for name, first, last in zip("qkv", ends[:-1], ends[1:], strict=True):
        moved[name] = array[:, first:last].reshape(tokens, -1, head_dim)
        assert xp.may_share_memory(moved[name], array)
    _assert_gradients(case, kernels.attention_backward(**moved, **rule), want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_same_bits_every_time(xp, dtype):
    """The bits also do not depend on other sequences in the batch."""
    case = AttentionCase((20, 165, 3), (90, 365, 130), 4, 2)
    arrays, where, rule = _inputs(case, dtype)
    first = [to_numpy(x) for x in _run(xp, arrays, where, rule)]
    for _ in range(3):
        for x, want in zip(_run(xp, arrays, where, rule), first, strict=True):
            np.testing.assert_array_equal(to_numpy(x), want)
    rows, keys = slice(20, 185), slice(90, 455)
    alone = {name: x[keys if name in "kv" else rows] for name, x in arrays.items()}
    starts = {"cu_seqlens_q": cu_seqlens([165]), "cu_seqlens_k": cu_seqlens([365])}
    got = _run(xp, alone, starts, rule)
    for x, want, part in zip(got, first, (rows, keys, keys), strict=True):
        np.testing.assert_array_equal(to_numpy(x), want[part])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_neighbours_poison_nothing(xp, causal, dtype):
    """Tiles straddle sequence borders, yet a sequence of NaN must not affect its neighbour."""
    case = AttentionCase((70, 33, 5), (70, 90, 5), 4, 2, causal=causal)
    arrays, where, rule = _inputs(case, dtype)
    want = reference.attention_backward(**arrays, **where, **rule)
    rows, keys = slice(70, 103), slice(70, 160)
    for name, x in arrays.items():
        for part in (slice(0, 70), slice((keys if name in "kv" else rows).stop, None)):
            x[part] = np.nan
    for x, wanted, part in zip(
        _run(xp, arrays, where, rule), want, (rows, keys, keys), strict=True
    ):
        assert_close(x[part], wanted[part], reduction=_reduction(case))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_large_scores(xp, dtype):
    """Scores up to 16,384: most softmaxes select one key, or a few that tie. A log-sum-exp of that
    size has a float32 rounding error of 1e-3, and so has P, before any other rounding."""
    rng = np.random.default_rng(6)
    case = AttentionCase((40,), (90,), 2, 2, scale=1.0)
    arrays, where, rule = _inputs(case, dtype)
    for name in "qk":
        arrays[name][...] = rng.integers(-1, 2, arrays[name].shape) * 16
    arrays["out"], arrays["lse"] = reference.attention_prefill(
        *(arrays[name] for name in "qkv"), **where, **rule, return_lse=True
    )
    want = _expected(case, arrays, where)
    for name, x, wanted in zip("qkv", _run(xp, arrays, where, rule), want, strict=True):
        error = np.linalg.norm(to_numpy(x).astype(np.float64) - wanted)
        assert error <= 1e-2 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("sign", [1, -1])
def test_hidden_keys_of_large_scores_raise_no_warning(sign):
    """exp(0 - lse) of a hidden key overflows if all scores are far below 0."""
    case = AttentionCase((9,), (9,), 2, 1, 8, window=4)
    arrays, where, rule = _inputs(case, "float32")
    arrays["q"][...] = sign * (np.abs(arrays["q"]) + 8)
    arrays["k"][...] = np.abs(arrays["k"]) + 8
    qkv = (arrays[name] for name in "qkv")
    arrays["out"], arrays["lse"] = reference.attention_prefill(
        *qkv, **where, **rule, return_lse=True
    )
    assert (sign * arrays["lse"] > 100).all()
    got = kernels.attention_backward(**arrays, **where, **rule)
    for name, x, want in zip("qkv", got, _expected(case, arrays, where), strict=True):
        error = np.linalg.norm(x - want)
        assert error <= 1e-3 * np.linalg.norm(want), name


def test_nothing_to_do(xp):
    q, k = xp.zeros((0, 4, 64), np.float16), xp.ones((5, 2, 64), np.float16)
    lse, none = xp.zeros((0, 4), np.float32), xp.zeros(1, np.int32)
    starts = {"cu_seqlens_q": none, "cu_seqlens_k": none}
    grads = kernels.attention_backward(q, q, k[:0], k[:0], q, lse, **starts)
    assert [x.shape for x in grads] == [(0, 4, 64), (0, 2, 64), (0, 2, 64)]
    starts = {
        "cu_seqlens_q": xp.zeros(4, np.int32),
        "cu_seqlens_k": xp.asarray(cu_seqlens([0, 5, 0])),
    }
    _, dk, dv = kernels.attention_backward(q, q, k, k, q, lse, **starts)
    assert bool((dk == 0).all()) and bool((dv == 0).all())


def test_tiles_fit_every_chip():
    for dtype in cases.DTYPES:
        for spec in specs(dtype):
            limit = 99 if spec.tier == "portable" else 227
            assert dict(spec.defines)["SHARED_BYTES"] <= limit * 1024
    assert choose_tile("float16", 80).head_dim == 96


def test_contract(xp):
    q, k = xp.ones((4, 4, 8), np.float32), xp.ones((4, 2, 8), np.float32)
    lse, lens = xp.ones((4, 4), np.float32), xp.asarray(cu_seqlens([1, 3]))
    starts = {"cu_seqlens_q": lens, "cu_seqlens_k": lens}
    op = kernels.attention_backward
    with pytest.raises(ShapeError, match=r"k: must have shape \(Tk, K, D\); D = 8 from q; got"):
        op(q, q, k[..., :7], k, q, lse, **starts)
    with pytest.raises(DTypeError, match="dout: must be float32; got float16"):
        op(q.astype(np.float16), q, k, k, q, lse, **starts)
    with pytest.raises(ShapeError, match=r"out: must have shape \(Tq, H, D\)"):
        op(q, q, k, k, q[:3], lse, **starts)
    with pytest.raises(DTypeError, match="lse: must be float32; got float64"):
        op(q, q, k, k, q, lse.astype(np.float64), **starts)
    with pytest.raises(ContractError, match="K: must be a divisor of the number of query heads, 3"):
        op(q[:, :3], q[:, :3], k, k, q[:, :3], lse[:, :3], **starts)
    with pytest.raises(ContractError, match="window: must be 0 unless causal; got 3"):
        op(q, q, k, k, q, lse, **starts, causal=False, window=3)
    with pytest.raises(ContractError, match="scale: must be positive and finite; got 0"):
        op(q, q, k, k, q, lse, **starts, scale=0)
    with pytest.raises(ContractError, match="max_seqlen_k: must be an int of 0 or more; got -1"):
        op(q, q, k, k, q, lse, **starts, max_seqlen_k=-1)
    with pytest.raises(ShapeError, match=r"cu_seqlens_k: must have shape \(B\+1,\)"):
        op(q, q, k, k, q, lse, cu_seqlens_q=lens, cu_seqlens_k=lens[:2])
    with pytest.raises(TypeError):
        op(q, q, k, k, q, lse, **starts, dropout=0.1)


def test_values_are_checked_on_the_cpu():
    x, lse = np.ones((4, 2, 8), np.float32), np.ones((4, 2), np.float32)
    good, bad = cu_seqlens([1, 3]), np.array([0, 3, 2], np.int32)
    with pytest.raises(
        ContractError, match=r"cu_seqlens_k: must be rising from 0 to 4; got \[0, 3"
    ):
        kernels.attention_backward(x, x, x, x, x, lse, cu_seqlens_q=good, cu_seqlens_k=bad)
