"""moe_combine: the kernel against the mirror, the mirror against float64, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.tolerances import assert_close

# (T, k, N): one token, more experts than loads in flight, unvectorizable widths, empty.
SHAPES = (
    (1, 8, 2048),
    (3, 1, 63),
    (17, 2, 576),
    (64, 8, 768),
    (65, 6, 100),
    (5, 16, 1025),
    (2, 9, 2880),
    (300, 4, 1),
    (0, 8, 64),
    (4, 8, 0),
)
EXTRAS = (
    (),
    ("residual",),
    ("shared",),
    ("shared", "shared_gate"),
    ("shared", "shared_gate", "residual"),
)


def _inputs(shape, dtype):
    num_tokens, _, width = shape
    return cases.normal(shape, dtype, seed=1), {
        "shared": cases.normal((num_tokens, width), dtype, seed=2),
        "shared_gate": cases.normal((num_tokens, 1), dtype, seed=3, scale=4.0),
        "residual": cases.normal((num_tokens, width), dtype, seed=4, scale=3.0),
    }


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("extras", EXTRAS, ids="-".join)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, extras, dtype):
    pairs, options = _inputs(shape, dtype)
    options = {name: options[name] for name in extras}
    want = reference.moe_combine(pairs, **options)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    on_device = {name: xp.asarray(value) for name, value in options.items()}
    got = kernels.moe_combine(xp.asarray(pairs), **on_device, out=out)
    assert got is out
    assert_close(got, want, reduction=shape[1] + 2)
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("into", ["residual", "shared"])
def test_in_place(xp, into, dtype):
    pairs, options = _inputs((9, 3, 136), dtype)
    want = reference.moe_combine(pairs, **options)
    on_device = {name: xp.asarray(value.copy()) for name, value in options.items()}
    got = kernels.moe_combine(xp.asarray(pairs), **on_device, out=on_device[into])
    assert got is on_device[into]
    assert_close(got, want, reduction=5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned_and_views(xp, dtype):
    pairs, options = _inputs((6, 4, 64), dtype)
    want = reference.moe_combine(pairs, **options)
    moved = {name: misaligned(xp, value) for name, value in options.items()}
    assert_close(kernels.moe_combine(misaligned(xp, pairs), **moved), want, reduction=6)
    view = xp.asarray(np.repeat(pairs, 2, axis=2))[:, :, ::2]
    on_device = {name: xp.asarray(value) for name, value in options.items()}
    assert_close(kernels.moe_combine(view, **on_device), want, reduction=6)


@pytest.mark.gpu
def test_more_rows_than_a_grid_has(cp):
    pairs = cp.ones((70_001, 2, 8), np.float32) * cp.arange(70_001, dtype=np.float32)[:, None, None]
    got = kernels.moe_combine(pairs)
    assert bool((got == 2 * cp.arange(70_001, dtype=np.float32)[:, None]).all())


def test_mirror_is_the_formula():
    pairs, options = _inputs((7, 5, 33), "float32")
    got = reference.moe_combine(pairs, **options)
    gate = 1 / (1 + np.exp(-options["shared_gate"].astype(np.float64)))
    want = pairs.astype(np.float64).sum(axis=1) + options["shared"] * gate + options["residual"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_far_gates_open_and_close(xp):
    pairs, shared = xp.zeros((3, 2, 8), np.float32), xp.full((3, 8), 5, np.float32)
    gate = xp.asarray(np.array([[-1e4], [0], [1e4]], np.float32))
    got = kernels.moe_combine(pairs, shared=shared, shared_gate=gate)
    assert bool((got == xp.asarray(np.array([[0], [2.5], [5]], np.float32))).all())


def test_contract(xp):
    pairs, row = xp.zeros((3, 2, 8), np.float16), xp.zeros((3, 8), np.float16)
    op = kernels.moe_combine
    with pytest.raises(ShapeError, match=r"pairs: must have shape \(T, k, N\); got \(3, 8\)"):
        op(row)
    with pytest.raises(DTypeError, match=r"shared: must be float16; got float32"):
        op(pairs, shared=row.astype(np.float32))
    with pytest.raises(ShapeError, match=r"residual: must have shape \(T, N\); N = 8 from pairs"):
        op(pairs, residual=row[:, :7])
    with pytest.raises(ContractError, match=r"shared_gate: must be None without shared"):
        op(pairs, shared_gate=row[:, :1])
    with pytest.raises(ShapeError, match=r"shared_gate: must have shape \(T, 1\); got \(3, 8\)"):
        op(pairs, shared=row, shared_gate=row)
    with pytest.raises(ShapeError, match=r"out: must have shape \(3, 8\); got \(2, 8\)"):
        op(pairs, out=row[:2])
