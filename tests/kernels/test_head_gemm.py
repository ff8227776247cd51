"""head_gemm: the kernel against its mirror, the mirror against a loop, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.tolerances import assert_close

# (T, H, N, K): absorbed products of several models, edges of the tiles, rows no vector divides.
SHAPES = (
    (1, 16, 512, 128),
    (17, 20, 512, 192),
    (16, 20, 256, 512),
    (65, 3, 128, 512),
    (130, 2, 64, 256),
    (5, 4, 65, 40),
    (3, 5, 7, 19),
    (0, 4, 64, 64),
)


def _inputs(shape, dtype):
    num_tokens, num_heads, columns, depth = shape
    x = cases.normal((num_tokens, num_heads, depth), dtype, seed=1)
    return x, cases.normal((num_heads, columns, depth), dtype, seed=2)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, dtype):
    x, weight = _inputs(shape, dtype)
    want = reference.head_gemm(x, weight)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got = kernels.head_gemm(*cases.to_module(xp, x, weight), out=out)
    assert got is out
    assert_close(got, want, reduction=shape[3])
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views(xp, dtype):
    """x is part of wider heads; the result's heads lie apart."""
    x, weight = _inputs((9, 6, 32, 64), dtype)
    wide, result = xp.zeros((9, 6, 96), x.dtype), xp.zeros((6, 9, 40), x.dtype)
    wide[..., :64] = xp.asarray(x)
    out = result[..., :32].transpose(1, 0, 2)
    got = kernels.head_gemm(wide[..., :64], xp.asarray(weight), out=out)
    assert_close(got.copy(), reference.head_gemm(x, weight), reduction=64)
    assert not bool(result[..., 32:].any())


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", [*SHAPES[:6], (9, 6, 13, 21)])
def test_parts_of_an_up_projection(xp, shape, dtype):
    """Both matrices of a head are views of one array (H, K + N, L): the first is transposed."""
    num_tokens, num_heads, depth, columns = shape
    x, whole = _inputs((num_tokens, num_heads, columns + 8, depth), dtype)
    want = reference.head_gemm(x, whole[:, 8:])
    stored = xp.asarray(whole)
    assert_close(kernels.head_gemm(xp.asarray(x), stored[:, 8:]), want, reduction=depth)
    y = cases.normal((num_tokens, num_heads, columns), dtype, seed=3)
    want = reference.head_gemm(y, whole[:, 8:].transpose(0, 2, 1))
    got = kernels.head_gemm(xp.asarray(y), stored[:, 8:].transpose(0, 2, 1))
    assert_close(got, want, reduction=columns)


def test_mirror_is_a_loop():
    x, weight = _inputs((3, 2, 4, 5), "float32")
    got = reference.head_gemm(x, weight)
    for t, h, n in np.ndindex(got.shape):
        np.testing.assert_allclose(got[t, h, n], np.float64(weight[h, n]) @ x[t, h], rtol=1e-5)


def test_contract(xp):
    x, weight = cases.to_module(xp, *_inputs((3, 2, 4, 8), "float32"))
    with pytest.raises(ShapeError, match=r"weight: must have shape \(H, N, K\); K = 8 from x"):
        kernels.head_gemm(x, weight[..., :4])
    with pytest.raises(DTypeError, match="weight: must be float32; got float16"):
        kernels.head_gemm(x, weight.astype(np.float16))
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.head_gemm(x, weight, out=xp.zeros((3, 2, 5), np.float32))
    with pytest.raises(ContractError, match="H: must be at most 65535"):
        kernels.head_gemm(xp.zeros((1, 65536, 1), np.float32), xp.zeros((65536, 1, 1), np.float32))
