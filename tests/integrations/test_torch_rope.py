"""RoPE on tensors: values, gradients, layouts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402

from engine.errors import ContractError, ShapeError  # noqa: E402
from engine.integrations import torch as ops  # noqa: E402


def _table(positions, rotary_dim, where, dtype=torch.float32):
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(rotary_dim // 2)
    return torch.cat([angles.cos(), angles.sin()], -1).to(where, dtype)


def _rotated(x, table, positions, interleaved):
    """The formula, with complex numbers."""
    half = table.shape[1] // 2
    turn = torch.complex(*(t.double() for t in (table[:, :half], table[:, half:])))[positions]
    rotary = x[..., : 2 * half].double()
    if not interleaved:
        rotary = rotary.unflatten(-1, (2, half)).transpose(-1, -2)
    pairs = torch.view_as_complex(
        rotary.reshape(*rotary.shape[: x.dim() - 1], half, 2).contiguous()
    )
    turned = torch.view_as_real(pairs * turn[..., None, :])
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2).to(x.dtype), x[..., 2 * half :]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_values_and_gradients(where, interleaved, rotary_dim):
    qkv = torch.randn(2, 5, 7, 16, device=where, requires_grad=True)
    table = _table(9, rotary_dim, where)
    positions = torch.randint(0, 9, (2, 5), device=where)
    q, k = ops.rope(qkv[..., :4, :], qkv[..., 4:6, :], table, positions, interleaved=interleaved)
    wanted = [
        _rotated(part, table, positions, interleaved)
        for part in (qkv[..., :4, :], qkv[..., 4:6, :])
    ]
    torch.testing.assert_close(q, wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, wanted[1], rtol=1e-5, atol=1e-5)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    (got,) = torch.autograd.grad((q * dq).sum() + (k * dk).sum(), qkv)
    (want,) = torch.autograd.grad((wanted[0] * dq).sum() + (wanted[1] * dk).sum(), qkv)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gradcheck_in_float64():
    q = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, 1, 8, dtype=torch.float64, requires_grad=True)
    table = _table(4, 6, "cpu")
    positions = torch.tensor([3, 0, 2])
    assert torch.autograd.gradcheck(lambda q, k: ops.rope(q, k, table, positions), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: ops.rope(q, k, table, positions), (q, k))


def test_positions_are_integers():
    q = torch.ones(3, 1, 8)
    with pytest.raises(TypeError, match="rope: positions: must be int64 or int32; got float32"):
        ops.rope(q, q, _table(4, 6, "cpu"), torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("position", [2**32 + 1, 1 - 2**32, 2**31, -1])
def test_a_position_that_int32_does_not_hold_is_outside_the_table(position):
    q = torch.ones(2, 1, 8)
    with pytest.raises(ContractError, match=r"rope: positions: must be in \[0, 4\)"):
        ops.rope(q, q, _table(4, 6, "cpu"), torch.tensor([0, position]))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 1), (3, 2, 1)])
def test_positions_that_do_not_fit_the_tokens_are_told(shape):
    q = torch.ones(3, 2, 1, 8)
    positions = torch.zeros(shape, dtype=torch.int64)
    if shape == (3, 1):
        ops.rope(q, q, _table(4, 6, "cpu"), positions)
        return
    with pytest.raises(ShapeError, match=r"rope: positions: must have shape \(3, 2\), the leading"):
        ops.rope(q, q, _table(4, 6, "cpu"), positions)


@pytest.mark.parametrize("lead", [(2, 3), (6,), (3, 3), (3, 2, 1)])
def test_keys_of_other_leading_axes_are_told(lead):
    """Of as many tokens they would get each other's positions."""
    q, k = torch.ones(3, 2, 1, 8), torch.ones(*lead, 1, 8)
    with pytest.raises(ShapeError, match=r"rope: k: must have shape \(3, 2, K, D\); got"):
        ops.rope(q, k, _table(4, 6, "cpu"), torch.tensor([0, 1]))


def test_queries_of_no_heads():
    q, k = torch.ones(3, 2, 0, 8), torch.ones(3, 2, 1, 8)
    rotated = ops.rope(q, k, _table(4, 6, "cpu"), torch.tensor([0, 1]))
    assert [x.shape for x in rotated] == [q.shape, k.shape]


def test_vmap_and_opcheck(where):
    q = torch.randn(3, 5, 2, 8, device=where)
    k = torch.randn(3, 5, 1, 8, device=where)
    table = _table(9, 8, where)
    positions = torch.randint(0, 9, (3, 5), device=where)
    got = torch.vmap(lambda q, k, p: ops.rope(q, k, table, p), (0, 0, 0))(q, k, positions)
    assert all(map(torch.equal, got, ops.rope(q, k, table, positions)))
    args = (q[0], k[0].requires_grad_(), positions[0].int(), table, False, False)
    opcheck(torch.ops.engine.rope.default, args)
