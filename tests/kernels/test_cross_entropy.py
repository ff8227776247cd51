"""cross_entropy: the kernel against its mirror, the mirror against float64, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._chip import HOPPER, PORTABLE
from engine.kernels.cross_entropy import Config, choose_config
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards
from engine.testing.tolerances import assert_close

# One logit; fewer than a vector; odd sizes; vocabularies of GPT-2, Llama 2 and Llama 3; empty.
SIZES = [
    (3, 1),
    (4, 5),
    (5, 63),
    (2, 1025),
    (7, 4096),
    (2, 8001),
    (3, 50257),
    (2, 32000),
    (2, 128256),
    (0, 8),
]
OPTIONS = [
    {},
    {"softcap": 5.0, "label_smoothing": 0.1},
    {"z_loss": 1e-3, "label_smoothing": 0.25},
]


def _inputs(rows, vocab, dtype):
    """Return logits, targets, of which some are ignored, and each row's dloss."""
    logits = cases.normal((rows, vocab), dtype, seed=1, scale=4.0)
    rng = np.random.default_rng(rows)
    target = rng.integers(0, vocab, rows)
    target[1::3] = -100
    return logits, target, rng.standard_normal(rows).astype(np.float32)


def _assert_same(got, want, vocab):
    """Compare (loss, lse, dlogits); a loss is a difference of two logits, and errs as they do."""
    for name, a, b in zip(("loss", "lse", "dlogits"), got, want, strict=False):
        assert_close(a, b, reduction=vocab, name=name)


@pytest.mark.grid("options", OPTIONS)
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "vocab"), SIZES)
def test_matches_mirror(xp, rows, vocab, dtype, options):
    logits, target, dloss = _inputs(rows, vocab, dtype)
    want = reference.cross_entropy(logits, target, dloss=dloss, **options)
    dlogits, buffer = cases.guarded(xp, (rows, vocab), logits.dtype)
    gx, gt, gd = cases.to_module(xp, logits, target, dloss)
    got = kernels.cross_entropy(gx, gt, dloss=gd, dlogits_out=dlogits, **options)
    assert got[2] is dlogits
    _assert_same(got, want, vocab)
    assert_guards(buffer)
    _assert_same(kernels.cross_entropy(gx, gt, **options), want[:2], vocab)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "vocab"), SIZES)
def test_in_place_with_strided_rows_and_one_factor(xp, rows, vocab, dtype):
    logits, target, _ = _inputs(rows, vocab, dtype)
    target = target.astype(np.int32)
    dloss = np.full(1, 0.5, np.float32)
    want = reference.cross_entropy(logits, target, dloss=dloss)
    wide = np.full((rows, vocab + 9), np.nan, np.float32).astype(logits.dtype)
    wide[:, 4 : 4 + vocab] = logits
    gx, gt, gd = cases.to_module(xp, wide, target, dloss)
    view = gx[:, 4 : 4 + vocab]
    got = kernels.cross_entropy(view, gt, dloss=gd, dlogits_out=view)
    assert got[2] is view
    _assert_same((*got[:2], xp.ascontiguousarray(view)), want, vocab)
    assert bool(xp.isnan(gx[:, :4]).all()) and bool(xp.isnan(gx[:, 4 + vocab :]).all())


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_logits_and_gradient_of_different_alignment(xp, dtype, shift):
    logits, target, dloss = _inputs(4, 1001, dtype)
    want = reference.cross_entropy(logits, target, dloss=dloss)
    gx, gt, gd = cases.to_module(xp, logits, target, dloss)
    out = xp.empty(4 * 1001 + shift, logits.dtype)[shift:].reshape(4, 1001)
    _assert_same(kernels.cross_entropy(gx, gt, dloss=gd, dlogits_out=out), want, 1001)


def test_a_row_longer_than_shared_memory(xp):
    logits, target, dloss = _inputs(2, (1 << 20) + 3, "bfloat16")
    want = reference.cross_entropy(logits, target, dloss=dloss)
    gx, gt, gd = cases.to_module(xp, logits, target, dloss)
    _assert_same(kernels.cross_entropy(gx, gt, dloss=gd, dlogits_out=gx), want, 1 << 20)


@pytest.mark.parametrize("target_dtype", [np.int32, np.int64])
def test_unknown_targets_yield_nan_and_ignored_ones_0(xp, target_dtype):
    logits = cases.normal((6, 40), "float32", seed=3)
    logits[5] = np.nan  # ignored, so not read
    target = np.array([-1, 40, np.iinfo(target_dtype).max, -100, 39, 7], target_dtype)
    gx, gt = cases.to_module(xp, logits, target)
    options = {"ignore_index": 7, "dloss": xp.ones(1, np.float32)}
    loss, lse, dlogits = map(to_numpy, kernels.cross_entropy(gx, gt, **options))
    assert np.isnan(loss[:4]).all() and np.isnan(dlogits[:4]).all()
    assert np.isfinite(lse[:5]).all() and np.isfinite(loss[4]) and np.isfinite(dlogits[4]).all()
    assert loss[5] == lse[5] == 0 and (dlogits[5] == 0).all()


def test_infinite_logits(xp):
    inf = np.inf
    rows = [[-inf, 1, 2], [-inf, -inf, -inf], [inf, 1, 2], [np.nan, 1, 2], [-300, -301, -inf]]
    logits, target = np.array(rows, np.float32), np.array([2, 0, 1, 1, 0])
    gx, gt = cases.to_module(xp, logits, target)
    got = kernels.cross_entropy(gx, gt, dloss=xp.ones(1, np.float32))
    loss, lse, dlogits = map(to_numpy, got)
    assert np.isnan(loss[1:4]).all() and np.isnan(dlogits[1:4]).all()
    assert lse[1] == -inf
    ce = np.log1p(np.exp(-1))
    np.testing.assert_allclose(loss[[0, 4]], ce, rtol=1e-6)
    p = np.exp(-ce)
    np.testing.assert_allclose(dlogits[[0, 4]], [[0, 1 - p, p - 1], [p - 1, 1 - p, 0]], rtol=1e-5)


def test_a_small_loss_keeps_its_digits(xp):
    logits = np.array([[1000.0, 990.0, 0.0]], np.float32)
    loss, _ = kernels.cross_entropy(*cases.to_module(xp, logits, np.zeros(1, np.int64)))
    np.testing.assert_allclose(to_numpy(loss), np.log1p(np.exp(-10.0)), rtol=2e-3)


@pytest.mark.parametrize("options", OPTIONS)
def test_mirror_is_the_formula_and_its_derivative(options):
    rng = np.random.default_rng(0)
    logits, target = rng.standard_normal((4, 9)) * 3, np.array([0, 8, 3, 3])
    dloss = rng.standard_normal(4)
    smoothing, softcap = (options.get(name, 0.0) for name in ("label_smoothing", "softcap"))

    def losses(logits):
        x = softcap * np.tanh(logits / softcap) if softcap else logits
        wanted = (1 - smoothing) * np.eye(9)[target] + smoothing / 9
        lse = np.log(np.exp(x).sum(1))
        return (wanted * (lse[:, None] - x)).sum(1) + options.get("z_loss", 0.0) * lse**2

    loss, _, dlogits = reference.cross_entropy(logits, target, dloss=dloss, **options)
    assert dlogits.dtype == np.float64
    np.testing.assert_allclose(loss, losses(logits), rtol=1e-12)
    for i, j in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[i, j] = 1e-6
        slope = (losses(logits + step) - losses(logits - step)) @ dloss / 2e-6
        np.testing.assert_allclose(dlogits[i, j], slope, rtol=1e-6, atol=1e-9)


def test_config_is_a_pure_function():
    assert choose_config(2 * 128256, HOPPER, has_gradient=False) == Config(256, 1, 0)
    assert choose_config(2048, HOPPER, has_gradient=True) == Config(32, 1, 2048)
    assert choose_config(8192, HOPPER, has_gradient=True) == Config(128, 1, 8192)
    assert choose_config(2 * 50257, HOPPER, has_gradient=True) == Config(256, 2, 50256)
    assert choose_config(4 * 256000, HOPPER, has_gradient=True) == Config(256, 8, 128000)
    longest = choose_config(1 << 24, HOPPER, has_gradient=True)
    assert HOPPER.shared_bytes - 2048 < longest.shared_mem <= HOPPER.shared_bytes - 768
    assert choose_config(2 * 128256, PORTABLE, has_gradient=True).cluster == 1


@pytest.mark.gpu
def test_rows_do_not_depend_on_their_number(cp):
    logits, target, dloss = cases.to_module(cp, *_inputs(300, 50257, "bfloat16"))
    whole = kernels.cross_entropy(logits, target, dloss=dloss)
    part = kernels.cross_entropy(logits[8:9], target[8:9], dloss=dloss[8:9])
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_array_equal(to_numpy(a)[8:9].view("u1"), to_numpy(b).view("u1"))


def test_contract(xp):
    logits, target = xp.ones((2, 8), np.float32), xp.zeros(2, np.int64)
    dloss = xp.ones(2, np.float32)
    with pytest.raises(ShapeError, match=r"target: must have shape \(N,\); N = 2 from logits"):
        kernels.cross_entropy(logits, target[:1])
    with pytest.raises(DTypeError, match="target: must be int64 or int32; got float32"):
        kernels.cross_entropy(logits, dloss)
    with pytest.raises(ContractError, match="logits: must be rows of 1 to 2"):
        kernels.cross_entropy(logits[:, :0], target)
    with pytest.raises(ContractError, match=r"label_smoothing: must be a number from 0\.0 to 1\.0"):
        kernels.cross_entropy(logits, target, label_smoothing=1.5)
    with pytest.raises(ContractError, match=r"softcap: must be a number from 0\.0 to inf"):
        kernels.cross_entropy(logits, target, softcap=-1.0)
    with pytest.raises(ContractError, match=r"ignore_index: must be an integer; got 0\.5"):
        kernels.cross_entropy(logits, target, ignore_index=0.5)
    with pytest.raises(ContractError, match="dlogits_out: must be None without dloss"):
        kernels.cross_entropy(logits, target, dlogits_out=logits)
    with pytest.raises(ShapeError, match=r"dloss: must have shape \(N,\)"):
        kernels.cross_entropy(logits, target, dloss=xp.ones(3, np.float32))
    wide = xp.ones((2, 12), np.float32)
    with pytest.raises(ContractError, match="dlogits_out: must be logits, or apart from it"):
        kernels.cross_entropy(wide[:, :8], target, dloss=dloss, dlogits_out=wide[:, 4:])
