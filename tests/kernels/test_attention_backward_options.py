"""attention_backward with sinks, patterns, a gradient of the log-sum-exp, and given results."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import CompileError, ContractError, ShapeError
from engine.kernels import BlockSparse, Periodic, _nvrtc
from engine.kernels._module import compile_module
from engine.kernels.attention_backward import specs
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, cu_seqlens
from engine.testing.tolerances import assert_close

_PATTERNS = [
    BlockSparse(np.random.default_rng(0).random((6, 7)) < 0.4, 64, 64),
    BlockSparse(np.random.default_rng(1).random((4, 3)) < 0.5, 128, 128),
    BlockSparse(np.random.default_rng(2).random((30, 80)) < 0.3, 17, 7),  # aligned with no tile
    BlockSparse(np.random.default_rng(3).random((2, 2)) < 0.5, 100, 100),  # fewer keys than exist
    BlockSparse(np.zeros((4, 4), bool), 128, 128),
    BlockSparse(np.ones((4, 4), bool), 128, 128),
    Periodic(300, 40),
    Periodic(300, 41, 20),
    Periodic(7, 3, 2),
    Periodic(1, 1),
]
_LENS = ((160, 70, 0, 1), (160, 290, 5, 129))
_NAMES = ("dq", "dk", "dv", "dsinks")


def _inputs(case, dtype, **rule):
    """Return arrays dout, q, k, v, out, lse by name, and the other arguments."""
    shape = (sum(case.lens_q), case.num_heads, case.head_dim)
    kv_shape = (sum(case.lens_k), case.num_kv_heads, case.head_dim)
    arrays = {
        name: cases.normal(kv_shape if name in "kv" else shape, dtype, seed)
        for seed, name in enumerate(("dout", "q", "k", "v"))
    }
    where = {"cu_seqlens_q": cu_seqlens(case.lens_q), "cu_seqlens_k": cu_seqlens(case.lens_k)}
    forward = {name: value for name, value in rule.items() if name != "dlse"}
    qkv = (arrays[name] for name in "qkv")
    out, lse = reference.attention_prefill(*qkv, **where, **forward, return_lse=True)
    return {**arrays, "out": out, "lse": lse}, where


def _run(xp, arrays, **options):
    def moved(x):
        return xp.asarray(x) if isinstance(x, np.ndarray) else x

    return kernels.attention_backward(**{k: moved(x) for k, x in {**arrays, **options}.items()})


def _check(case, got, want, floor=0):
    """Compare with the mirror; a gradient of a sink sums over the tokens."""
    group = case.num_heads // case.num_kv_heads
    terms = 3 * case.head_dim + max(*case.lens_k, *(group * n for n in case.lens_q))
    for name, x, wanted in zip(_NAMES, got, want, strict=False):
        assert_close(x, wanted, reduction=max(terms, floor), name=name)


def _scale(head_dim):
    """Return a factor that keeps P flat: a large P that is rounded the other way than the mirror's
    would be an error beyond the table's."""
    return 0.5 * head_dim**-0.5


def _sinks(num_heads):
    return np.linspace(-1, 3, num_heads, dtype=np.float32)


def _dlse(case, seed=9):
    return cases.normal((sum(case.lens_q), case.num_heads), "float32", seed)


@pytest.mark.parametrize(
    ("rule", "lens"),
    [
        ({}, (5, 5)),
        ({"causal": False, "softcap": 1.5}, (4, 6)),
        ({"window": 3, "scale": 0.7}, (6, 8)),
        ({"pattern": Periodic(4, 2, 1)}, (5, 7)),
        ({"pattern": BlockSparse(np.eye(4, dtype=bool), 2, 2), "causal": False}, (5, 8)),
        ({}, (5, 3)),  # two queries see the sink only
    ],
    ids=str,
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_mirror_is_the_derivative(rule, lens, has_sinks):
    """Check every partial derivative by central differences of the forward mirror in float64."""
    rng = np.random.default_rng(11)
    n, m = lens
    q, dout = (rng.standard_normal((n, 4, 3)) for _ in range(2))
    k, v = (rng.standard_normal((m, 2, 3)) for _ in range(2))
    dlse = rng.standard_normal((n, 4))
    where = {"cu_seqlens_q": cu_seqlens([n]), "cu_seqlens_k": cu_seqlens([m]), **rule}
    if has_sinks:
        where["sinks"] = rng.standard_normal(4)

    def loss():
        out, lse = reference.attention_prefill(q, k, v, **where, return_lse=True)
        return np.sum(dout * out) + np.sum((dlse * lse)[np.isfinite(lse)])

    out, lse = reference.attention_prefill(q, k, v, **where, return_lse=True)
    grads = reference.attention_backward(dout, q, k, v, out, lse, **where, dlse=dlse)
    inputs = (q, k, v, where["sinks"]) if has_sinks else (q, k, v)
    step = 1e-5
    for x, got in zip(inputs, grads, strict=True):
        assert got.dtype == np.float64
        for index in np.ndindex(x.shape):
            kept, losses = x[index], []
            for sign in (1, -1):
                x[index] = kept + sign * step
                losses.append(loss())
            x[index] = kept
            assert abs((losses[0] - losses[1]) / (2 * step) - got[index]) < 1e-7


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("rule", [{}, {"causal": False}, {"window": 50}, {"softcap": 5.0}], ids=str)
@pytest.mark.grid("head_dim", [64, 80, 128, 256])
def test_sinks_and_lse_match_mirror(xp, head_dim, rule, dtype, tier):
    case = AttentionCase(*_LENS, 6, 2, head_dim)
    rule = {**rule, "sinks": _sinks(6), "dlse": _dlse(case), "scale": _scale(head_dim)}
    arrays, where = _inputs(case, dtype, **rule)
    want = reference.attention_backward(**arrays, **where, **rule)
    got = _run(xp, arrays, **where, **rule)
    assert len(got) == 4 and got[3].dtype == np.float32
    _check(case, got, want, floor=sum(case.lens_q))
    for x, y in zip(_run(xp, arrays, **where, **rule), got, strict=True):
        np.testing.assert_array_equal(to_numpy(x), to_numpy(y))


@pytest.mark.parametrize("num_heads", [1, 33])
def test_sinks_of_many_heads_and_tokens(xp, num_heads):
    """More heads than lanes, more tokens than a block; -inf means no sink."""
    case = AttentionCase((520,), (520,), num_heads, 1, 16)
    sinks = _sinks(num_heads)
    sinks[::5] = -np.inf
    arrays, where = _inputs(case, "float32", sinks=sinks)
    want = reference.attention_backward(**arrays, **where, sinks=sinks)
    got = _run(xp, arrays, **where, sinks=sinks)
    assert (to_numpy(got[3])[::5] == 0).all()
    _check(case, got, want)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("head_dim", "causal"), [(64, True), (128, True), (80, False), (256, False)])
@pytest.mark.grid("pattern", _PATTERNS, ids=str)
def test_patterns_match_mirror(xp, pattern, head_dim, causal, dtype):
    case = AttentionCase(*_LENS, 4, 2, head_dim)
    rule = {"causal": causal, "pattern": pattern, "scale": _scale(head_dim)}
    arrays, where = _inputs(case, dtype, **rule)
    want = reference.attention_backward(**arrays, **where, **rule)
    _check(case, _run(xp, arrays, **where, **rule), want)


def test_a_pattern_goes_with_the_other_options(xp):
    case = AttentionCase((300, 33), (700, 33), 8, 2, 64)
    rule = {"pattern": _PATTERNS[0], "window": 90, "softcap": 5.0, "sinks": _sinks(8)}
    arrays, where = _inputs(case, "bfloat16", **rule)
    want = reference.attention_backward(**arrays, **where, **rule)
    _check(case, _run(xp, arrays, **where, **rule), want, floor=sum(case.lens_q))


@pytest.mark.gpu
def test_skipped_tiles_are_not_read(cp):
    """Queries and keys of NaN that the pattern hides from all others: a mask would spread them."""
    n = 1024
    mask = np.ones((8, 8), bool)
    mask[2:6, :] = mask[:, 2:6] = False
    rule = {"causal": False, "pattern": BlockSparse(mask, 128, 128)}
    case = AttentionCase((n,), (n,), 2, 2, 64)
    arrays, where = _inputs(case, "bfloat16", **rule)
    want = reference.attention_backward(**arrays, **where, **rule)
    for name in ("dout", "q", "k", "v"):
        arrays[name][256:768] = np.nan
    got = _run(cp, arrays, **where, **rule)
    seen = np.r_[0:256, 768:n]
    _check(case, [to_numpy(x)[seen] for x in got], [x[seen] for x in want])


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("head_dim", "offset"), [(64, 0), (80, 8), (64, 1), (20, 0)])
def test_given_results(xp, head_dim, offset, dtype, tier):
    """dq, dk and dv as columns of one matrix, also at an odd address; nothing else is written."""
    tokens, heads, kv_heads = 100, 4, 2
    case = AttentionCase((30, 70), (30, 70), heads, kv_heads, head_dim)
    sinks = _sinks(heads)
    arrays, where = _inputs(case, dtype, sinks=sinks)
    want = reference.attention_backward(**arrays, **where, sinks=sinks)
    ends = offset + np.array([0, heads, heads + kv_heads, heads + 2 * kv_heads]) * head_dim
    fused = xp.full((tokens, int(ends[-1]) + 24), np.nan, want[0].dtype)
    given = {
        name: fused[:, int(a) : int(b)].reshape(tokens, -1, head_dim)
        for name, a, b in zip(("dq", "dk", "dv"), ends[:-1], ends[1:], strict=True)
    }
    given["dsinks"] = xp.full(heads, np.nan, np.float32)
    got = _run(xp, arrays, **where, sinks=sinks, **given)
    assert all(x is given[name] for name, x in zip(_NAMES, got, strict=True))
    _check(case, [xp.ascontiguousarray(x) for x in got], want)
    outside = np.ones(fused.shape[1], bool)
    outside[int(ends[0]) : int(ends[-1])] = False
    assert np.isnan(to_numpy(fused).astype(np.float32)[:, outside]).all()


def test_no_tokens(xp):
    none, starts = xp.zeros((0, 2, 64), np.float16), xp.zeros(1, np.int32)
    got = kernels.attention_backward(
        *(none, none, none, none, none, xp.zeros((0, 2), np.float32)),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        sinks=xp.ones(2, np.float32),
    )
    assert [x.shape for x in got] == [(0, 2, 64)] * 3 + [(2,)]
    assert (to_numpy(got[3]) == 0).all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_compiles_without_spills(dtype):
    try:
        _nvrtc.version()
    except CompileError as error:
        pytest.skip(str(error))
    found = [s for s in specs(dtype, patterns=True) if dict(s.defines).get("PATTERN")]
    assert len(found) >= 2
    for spec in found:
        compiled = compile_module(spec, "sm_80")
        assert not any(entry.spill_bytes or entry.stack_bytes for entry in compiled.entries)


def test_contract(xp):
    q, lse = xp.ones((4, 2, 8), np.float32), xp.ones((4, 2), np.float32)
    lens = xp.asarray(cu_seqlens([4]))
    starts = {"cu_seqlens_q": lens, "cu_seqlens_k": lens}
    op = kernels.attention_backward
    with pytest.raises(ContractError, match="pattern: must be BlockSparse, Periodic or None; got"):
        op(q, q, q, q, q, lse, **starts, pattern=3)
    with pytest.raises(ShapeError, match=r"sinks: must have shape \(H,\)"):
        op(q, q, q, q, q, lse, **starts, sinks=lse[0, :1])
    with pytest.raises(ShapeError, match=r"dlse: must have shape \(Tq, H\)"):
        op(q, q, q, q, q, lse, **starts, dlse=lse[:3])
    with pytest.raises(ContractError, match="dsinks: must be None without sinks"):
        op(q, q, q, q, q, lse, **starts, dsinks=lse[0])
    with pytest.raises(ShapeError, match=r"dk: must have shape \(4, 2, 8\)"):
        op(q, q, q, q, q, lse, **starts, dk=q[:3])
    with pytest.raises(ShapeError, match="dv: its last axis must be contiguous"):
        op(q, q, q, q, q, lse, **starts, dv=xp.ones((4, 8, 2), np.float32).transpose(0, 2, 1))
