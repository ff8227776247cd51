"""rmsnorm_backward: the kernel against its mirror, the mirror against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.rmsnorm_backward import choose_config
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.tolerances import assert_close

# More rows than an H200 takes at once, for every kernel: rings of several rounds.
_MANY_ROWS = (
    (19001, 64),
    (19001, 128),
    (9001, 256),
    (5003, 512),
    (5003, 576),
    (3001, 768),
    (3001, 1024),
    (1501, 2048),
    (901, 4096),
    (451, 8192),
    (451, 16384),
    (1001, 63),
    (1001, 2049),
)
_OPTIONS = {"eps": 1e-5, "weight_offset": 0.25}


def _inputs(shape, dtype, has_dh=True):
    dy = cases.normal(shape, dtype, seed=1)
    h = cases.normal(shape, dtype, seed=2, scale=3.0, mean=0.5)
    weight = cases.normal(shape[-1:], dtype, seed=3, mean=1.0)
    return dy, h, weight, cases.normal(shape, dtype, seed=4) if has_dh else None


def _check(got, want, shape):
    rows = int(np.prod(shape[:-1]))
    assert len(got) == len(want)
    if shape[-1] == 1:  # without dh, dx is what rounding leaves of g - g, over sqrt(eps)
        np.testing.assert_allclose(
            to_numpy(got[0]).astype(np.float32), want[0].astype(np.float32), rtol=1e-2, atol=1e-4
        )
    else:
        assert_close(got[0], want[0], reduction=shape[-1], name="dx")
    for name, x, y in zip(("dweight", "dbias"), got[1:], want[1:], strict=False):
        assert_close(x, y, reduction=rows, name=name)


@pytest.mark.grid("subtract_mean", [False, True])
@pytest.mark.grid("has_dh", [False, True])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", cases.ROWS)
def test_matches_mirror(xp, shape, dtype, has_dh, subtract_mean):
    dy, h, weight, dh = _inputs(shape, dtype, has_dh)
    options = {**_OPTIONS, "subtract_mean": subtract_mean}
    out, buffer = cases.guarded(xp, shape, h.dtype)
    gdy, gh, gw, gdh = cases.to_module(xp, dy, h, weight, dh)
    got = kernels.rmsnorm_backward(gdy, gh, gw, dh=gdh, out=out, **options)
    assert got[0] is out
    _check(got, reference.rmsnorm_backward(dy, h, weight, dh=dh, **options), shape)
    assert_guards(buffer)


@pytest.mark.gpu
@pytest.mark.parametrize(("has_dh", "subtract_mean"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", _MANY_ROWS)
def test_many_rows(cp, shape, dtype, has_dh, subtract_mean):
    """Twice with the same bits; dweight and dbias against sums in float64."""
    dy, h, weight, dh = _inputs(shape, dtype, has_dh)
    options = {**_OPTIONS, "subtract_mean": subtract_mean}
    gdy, gh, gw, gdh = cases.to_module(cp, dy, h, weight, dh)
    got = kernels.rmsnorm_backward(gdy, gh, gw, dh=gdh, **options)
    wide = [None if x is None else x.astype(np.float64) for x in (dy, h, weight, dh)]
    want = reference.rmsnorm_backward(*wide[:3], dh=wide[3], **options)
    _check(got, [x.astype(h.dtype) for x in want], shape)
    again = kernels.rmsnorm_backward(gdy, gh, gw, dh=gdh, **options)
    for a, b in zip(got, again, strict=True):
        assert bool((a.view("u1") == b.view("u1")).all())


@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize("target", ["dy", "h", "dh"])
@pytest.mark.parametrize("shape", [(700, 576), (5, 2049), (40, 20000)])
def test_over_an_input(xp, shape, target, subtract_mean):
    dy, h, weight, dh = _inputs(shape, "float16")
    options = {**_OPTIONS, "subtract_mean": subtract_mean}
    want = reference.rmsnorm_backward(dy, h, weight, dh=dh, **options)
    gdy, gh, gw, gdh = (xp.array(x) for x in (dy, h, weight, dh))
    out = {"dy": gdy, "h": gh, "dh": gdh}[target]
    got = kernels.rmsnorm_backward(gdy, gh, gw, dh=gdh, out=out, **options)
    assert got[0] is out
    _check(got, want, shape)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "n"), [(300, 4, 64), (5, 2, 80), (1, 3, 33)])
def test_strided_heads(xp, tokens, heads, n, dtype):
    """Per-head q/k norm: h and dx are views of fused qkv rows, dy of wider rows."""
    fused = cases.normal((tokens, (heads + 2) * n), dtype, seed=5)
    wide = cases.normal((tokens, heads, n + 16), dtype, seed=6)
    weight = cases.normal((n,), dtype, seed=7, mean=1.0)
    h = fused[:, : heads * n].reshape(tokens, heads, n)
    dy = wide[:, :, 8 : 8 + n]
    want = reference.rmsnorm_backward(dy, h, weight, dh=dy)
    array, gwide = xp.array(fused), xp.array(wide)
    view = array[:, : heads * n].reshape(tokens, heads, n)
    gdy = gwide[:, :, 8 : 8 + n]
    got = kernels.rmsnorm_backward(gdy, view, xp.asarray(weight), dh=gdy, out=view)
    _check((xp.ascontiguousarray(got[0]), *got[1:]), want, (tokens * heads, n))
    np.testing.assert_array_equal(to_numpy(array)[:, heads * n :], fused[:, heads * n :])


@pytest.mark.parametrize("shape", [(64,), (2, 3, 2, 40), (2, 0, 3, 40)])
def test_any_leading_axes(xp, shape):
    dy, h, weight, dh = _inputs(shape, "bfloat16")
    want = reference.rmsnorm_backward(dy, h, weight, dh=dh)
    gdy, gh, gw, gdh = cases.to_module(xp, dy, h, weight, dh)
    _check(kernels.rmsnorm_backward(gdy, gh, gw, dh=gdh), want, (*shape, 1)[:2])
    _check(kernels.rmsnorm_backward(misaligned(xp, dy), gh, gw, dh=gdh), want, (*shape, 1)[:2])


@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_mirror_is_the_derivative(has_residual, subtract_mean):
    """Central differences of sum(dy * y + dh * h) in float64, for every element of every input."""
    rng = np.random.default_rng(8)
    x, residual, dy, dh = rng.standard_normal((4, 3, 6)) + 0.3
    weight, bias = rng.standard_normal((2, 6))
    options = {"eps": 1e-3, "weight_offset": 0.5, "subtract_mean": subtract_mean}

    def loss():
        bias_of = {"bias": bias} if subtract_mean else {}
        scaled = {"residual": residual, "x_scale": 0.7} if has_residual else {}
        result = kernels.rmsnorm(x, weight, **bias_of, **scaled, **options)
        if not has_residual:
            return np.sum(dy * result)
        return np.sum(dy * result[0]) + np.sum(dh * result[1])

    def differences(array):
        found = np.empty_like(array)
        for i in np.ndindex(array.shape):
            kept, values = array[i], []
            for step in (1e-5, -1e-5):
                array[i] = kept + step
                values.append(loss())
            array[i] = kept
            found[i] = (values[0] - values[1]) / 2e-5
        return found

    h = kernels.rmsnorm(x, weight, residual=residual, x_scale=0.7)[1] if has_residual else x
    given = {"dh": dh} if has_residual else {}
    dx, *sums = kernels.rmsnorm_backward(dy, h, weight, **given, **options)
    assert all(part.dtype == np.float64 for part in (dx, *sums))
    np.testing.assert_allclose(dx * (0.7 if has_residual else 1.0), differences(x), atol=1e-8)
    if has_residual:
        np.testing.assert_allclose(dx, differences(residual), atol=1e-8)
    for part, array in zip(sums, (weight, bias), strict=False):
        np.testing.assert_allclose(part, differences(array), atol=1e-8)


def test_dx_is_orthogonal_to_h(xp):
    """y does not change with the length of h, if eps is 0."""
    dy, h, weight, _ = _inputs((5, 96), "float32")
    dx, _ = kernels.rmsnorm_backward(*cases.to_module(xp, dy, h, weight), eps=0.0)
    lengths = np.linalg.norm(to_numpy(dx), axis=1) * np.linalg.norm(h, axis=1)
    assert np.all(np.abs(np.sum(to_numpy(dx) * h, axis=1)) < 1e-6 * lengths)


def test_config_is_a_pure_function():
    assert choose_config(128, 2, is_aligned=True).kernel == "ring_256"
    assert choose_config(136, 2, is_aligned=True).kernel == "ring_512"
    assert choose_config(768, 2, is_aligned=True).kernel == "ring_2048"
    assert choose_config(8192, 2, is_aligned=True).kernel == "ring_16384"
    assert choose_config(8192, 4, is_aligned=True).kernel == "long_vector"
    assert choose_config(63, 2, is_aligned=False).kernel == "long_scalar"
    config = choose_config(2048, 2, is_aligned=True)
    assert (config.kernel, config.rows_at_once) == ("ring_4096", 2)
    assert choose_config(4096, 2, is_aligned=True).shared_bytes(3) == 2 * 2 * 3 * 8192


def test_contract(xp):
    h, weight = xp.ones((2, 8), np.float32), xp.ones(8, np.float32)
    with pytest.raises(ShapeError, match=r"dy: must have shape \(2, 8\); got \(2, 7\)"):
        kernels.rmsnorm_backward(h[:, :7], h, weight)
    with pytest.raises(DTypeError, match="dy: must be float32; got float16"):
        kernels.rmsnorm_backward(h.astype(np.float16), h, weight)
    with pytest.raises(ShapeError, match=r"weight: must have shape \(N,\); N = 8 from h; got \(7,"):
        kernels.rmsnorm_backward(h, h, weight[:7])
    with pytest.raises(ShapeError, match="dh: must have shape"):
        kernels.rmsnorm_backward(h, h, weight, dh=h[:1])
    with pytest.raises(ContractError, match=r"eps: must be a number from 0\.0 to inf; got -1"):
        kernels.rmsnorm_backward(h, h, weight, eps=-1.0)
    with pytest.raises(DTypeError, match="h: must be an array; got list"):
        kernels.rmsnorm_backward(h, [1.0], weight)
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.rmsnorm_backward(h, h, weight, out=xp.empty((3, 8), np.float32))


@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
def test_rows_without_features(subtract_mean):
    h = np.ones((2, 3, 0), np.float32)
    dx, *grads = kernels.rmsnorm_backward(h, h, h[0, 0], subtract_mean=subtract_mean)
    assert dx.shape == h.shape and [grad.shape for grad in grads] == [(0,)] * (1 + subtract_mean)
