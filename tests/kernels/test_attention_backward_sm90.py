"""attention_backward on Hopper: supported problems, compilation, and random problems in float64."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from engine import kernels
from engine.device import to_numpy
from engine.errors import CompileError
from engine.kernels import Periodic, _nvrtc
from engine.kernels._attention import ScoreRule
from engine.kernels._module import compile_module, current_architecture
from engine.kernels.attention_backward import sm90 as backward_sm90
from engine.kernels.attention_backward.problem import BackwardProblem
from engine.kernels.attention_backward.sm90 import choose_hopper_tile, specs
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, cu_seqlens

_HALVES = ("float16", "bfloat16")
_ERROR = {"float16": 1e-3, "bfloat16": 6e-3}  # relative (norm): rounding of out, P, dS, result


def test_tiles():
    assert choose_hopper_tile("float32", 64) is None
    assert choose_hopper_tile("float16", 36) is None  # rows are not 16-byte aligned
    assert choose_hopper_tile("float16", 32) is None  # would waste half of every MMA
    assert choose_hopper_tile("float16", 136) is None  # too few registers for the accumulators
    for head_dim in range(40, 129, 8):
        tile = choose_hopper_tile("bfloat16", head_dim)
        assert tile.head_dim >= head_dim and tile.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("dtype", _HALVES)
def test_compiles_without_spills_or_serialised_products(dtype):
    try:
        _nvrtc.version()
    except CompileError as error:
        pytest.skip(str(error))
    for spec in specs(dtype):
        compiled = compile_module(spec, "sm_90a")
        assert not any(entry.spill_bytes or entry.stack_bytes for entry in compiled.entries)
        assert "serialized" not in compiled.log and "C7508" not in compiled.log


def _float64(dout, q, k, v, causal, window):
    """Gradients, output and log-sum-exp of one sequence in float64."""
    (n, heads, head_dim), (m, kv_heads, _) = q.shape, k.shape
    group, scale = heads // kv_heads, head_dim**-0.5
    dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    if causal:
        last = np.arange(n)[:, None] + m - n
        hidden = (np.arange(m) > last) | (np.arange(m) <= last - (window or 2**31))
        scores[:, hidden] = -np.inf
    high = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    p = np.exp(scores - high)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (high + np.log(total))[..., 0].T
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    out = np.einsum("hij,jhd->ihd", p, v)
    dp = np.einsum("ihd,jhd->hij", dout, v)
    ds = p * (dp - np.einsum("ihd,ihd->hi", dout, out)[..., None]) * scale
    dk, dv = (
        np.einsum("hij,ihd->jhd", x, y).reshape(m, kv_heads, group, head_dim).sum(2)
        for x, y in ((ds, q), (p, dout))
    )
    return (np.einsum("hij,jhd->ihd", ds, k), dk, dv), out, lse


def _is_hopper():
    return current_architecture(0) == "sm_90a"


def _inputs(case, dtype, seed):
    """Return the arrays, the sequence starts, and the float64 gradients."""
    shape = (sum(case.lens_q), case.num_heads, case.head_dim)
    kv_shape = (sum(case.lens_k), case.num_kv_heads, case.head_dim)
    arrays = {
        name: cases.normal(kv_shape if name in "kv" else shape, dtype, seed + i)
        for i, name in enumerate(("dout", "q", "k", "v"))
    }
    where = {"cu_seqlens_q": cu_seqlens(case.lens_q), "cu_seqlens_k": cu_seqlens(case.lens_k)}
    wants, outs, lses = [], [], []
    for b in range(len(case.lens_q)):
        rows, keys = (slice(*ends[b : b + 2]) for ends in where.values())
        parts = (arrays[n][keys if n in "kv" else rows] for n in ("dout", "q", "k", "v"))
        want, out, lse = _float64(*parts, case.causal, case.window)
        wants.append(want)
        outs.append(out)
        lses.append(lse)
    arrays["out"] = np.concatenate(outs).astype(arrays["q"].dtype)
    arrays["lse"] = np.concatenate(lses).astype(np.float32)
    return arrays, where, [np.concatenate(parts) for parts in zip(*wants, strict=True)]


def _run(cp, arrays, where, causal, deterministic, window=0):
    moved = {name: cp.asarray(x) for name, x in {**arrays, **where}.items()}
    with mock.patch.object(backward_sm90, "launch", wraps=backward_sm90.launch) as launch:
        got = kernels.attention_backward(
            **moved, causal=causal, deterministic=deterministic, window=window
        )
    assert launch.called == _is_hopper()
    return [to_numpy(x) for x in got]


def _check(got, want, dtype):
    for name, x, wanted in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert np.isfinite(x.astype(np.float32)).all(), name
        error = np.linalg.norm(x.astype(np.float64) - wanted)
        assert error <= _ERROR[dtype] * max(np.linalg.norm(wanted), 1.0), name


_BORDERS = (0, 1, 2, 15, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 400)


@pytest.mark.gpu
@pytest.mark.grid("dtype", _HALVES)
@pytest.mark.grid("seed", range(25))
def test_random_problems(cp, seed, dtype):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 6))
    lens_q = rng.choice(_BORDERS, batch)
    lens_k = np.where(rng.random(batch) < 0.7, lens_q + rng.choice(_BORDERS, batch), lens_q // 2)
    lens_q[0], lens_k[0] = max(lens_q[0], 1), max(lens_k[0], 1)
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3, 8]))
    case = AttentionCase(
        tuple(map(int, lens_q)),
        tuple(map(int, lens_k)),
        kv_heads * group,
        kv_heads,
        int(rng.choice([40, 64, 80, 96, 128])),
        causal=bool(rng.random() < 0.6),
    )
    arrays, where, want = _inputs(case, dtype, seed)
    first = _run(cp, arrays, where, case.causal, True)
    _check(first, want, dtype)
    for x, y in zip(_run(cp, arrays, where, case.causal, True), first, strict=True):
        np.testing.assert_array_equal(x, y)
    _check(_run(cp, arrays, where, case.causal, False), want, dtype)


@pytest.mark.gpu
@pytest.mark.grid("dtype", _HALVES)
@pytest.mark.grid("window", [1, 2, 63, 64, 65, 127, 128, 129, 200, 300, 5000])
@pytest.mark.grid("head_dim", [64, 128])
def test_windows(cp, head_dim, window, dtype):
    case = AttentionCase((400, 70, 1, 257), (400, 390, 129, 600), 4, 2, head_dim, window=window)
    arrays, where, want = _inputs(case, dtype, window)
    first = _run(cp, arrays, where, True, True, window)
    _check(first, want, dtype)
    for x, y in zip(_run(cp, arrays, where, True, True, window), first, strict=True):
        np.testing.assert_array_equal(x, y)
    _check(_run(cp, arrays, where, True, False, window), want, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_keys_than_blocks_run_at_once(cp, monkeypatch, head_dim, causal):
    """CTAs that add in a fixed order must not wait for a CTA that cannot start."""
    case = AttentionCase((300,), (20_000,), 1, 1, head_dim, causal=causal)
    arrays, where, want = _inputs(case, "bfloat16", 3)
    got = _run(cp, arrays, where, causal, True)
    _check(got, want, "bfloat16")
    for x, y in zip(_run(cp, arrays, where, causal, True), got, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
def test_portable_tier_can_be_forced(cp, monkeypatch):
    if not _is_hopper():
        pytest.skip("needs compute capability 9.0")
    assert backward_sm90.is_supported(_problem(cp))
    assert backward_sm90.is_supported(_problem(cp, rule=ScoreRule(1.0, 3, 0.0)))
    assert not backward_sm90.is_supported(_problem(cp, rule=ScoreRule(1.0, 0, 5.0)))
    assert not backward_sm90.is_supported(_problem(cp, pattern=Periodic(9, 3)))
    odd = {"dq": cp.ones((4, 2, 68), np.float16)[..., 1:65]}  # its rows are not aligned
    assert not backward_sm90.is_supported(_problem(cp, grads=odd))
    monkeypatch.setenv("ENGINE_KERNEL_TIER", "portable")
    assert not backward_sm90.is_supported(_problem(cp))


def _problem(cp, **given):
    x = cp.ones((4, 2, 64), np.float16)
    values = {
        "inputs": {name: x for name in ("dout", "q", "k", "v", "out")},
        "starts": {},
        "grads": {},
        "causal": True,
        "rule": ScoreRule(1.0, 0, 0.0),
        "pattern": None,
        "sinks": None,
        "dsinks": None,
        "dlse": None,
        "max_q": 4,
        "max_k": 4,
        "deterministic": True,
    }
    return BackwardProblem(**{**values, **given})


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # raised by torch on its own thread
def test_error_is_no_larger_than_cudnns(cp, head_dim, causal):
    torch = pytest.importorskip("torch")
    errors = [_errors(cp, torch, seed, head_dim, causal) for seed in range(6)]
    ours, cudnns = np.sqrt(np.square(errors).sum(0))  # over all inputs: dq, dk, dv
    print(f"error, in cuDNN's: dq, dk, dv {ours / cudnns}")
    assert (ours <= 1.01 * cudnns).all(), ours / cudnns


def _errors(cp, torch, seed, head_dim, causal):
    """Return the norms of our and cuDNN's errors in dq, dk and dv, relative to float64."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    n, heads = 1000, 4
    torch.manual_seed(seed)
    tensors = [torch.randn(1, heads, n, head_dim, device="cuda").bfloat16() for _ in range(4)]
    gradients = []
    for backend, dtype in ((SDPBackend.MATH, torch.float64), (SDPBackend.CUDNN_ATTENTION, None)):
        dout, *qkv = (x.to(dtype or x.dtype) for x in tensors)
        qkv = [x.requires_grad_() for x in qkv]
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal)
            gradients.append(torch.autograd.grad(out, qkv, dout))
    bfloat16 = cases.normal((1,), "bfloat16", 0).dtype
    dout, q, k, v = (
        cp.asarray(x.detach()[0].transpose(0, 1).float().cpu().numpy().astype(bfloat16))
        for x in tensors
    )
    lens = cp.asarray(cu_seqlens([n]))
    where = {"cu_seqlens_q": lens, "cu_seqlens_k": lens, "causal": causal}
    out, lse = kernels.attention_prefill(q, k, v, **where, return_lse=True)
    ours = kernels.attention_backward(dout, q, k, v, out, lse, **where)
    norms = []
    for x, want, theirs in zip(ours, *gradients, strict=True):
        judge = want[0].transpose(0, 1).cpu().numpy()
        error = np.linalg.norm(to_numpy(x).astype(np.float64) - judge)
        norms.append((error, float((theirs.double() - want).norm())))
    return np.transpose(norms)
