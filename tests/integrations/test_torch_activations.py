"""Activations on tensors: values, gradients, opcheck."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402

from engine.integrations import torch as ops  # noqa: E402

F = torch.nn.functional


def _gated(function):
    return lambda x: function(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


PAIRS = {
    "swiglu": (ops.swiglu, _gated(F.silu)),
    "geglu tanh": (ops.geglu, _gated(lambda x: F.gelu(x, approximate="tanh"))),
    "geglu erf": (lambda x: ops.geglu(x, approximate="none"), _gated(F.gelu)),
    "silu": (ops.silu, F.silu),
    "gelu erf": (ops.gelu, F.gelu),
    "gelu tanh": (
        lambda x: ops.gelu(x, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "relu": (ops.relu, F.relu),
}


@pytest.mark.parametrize("name", PAIRS)
def test_gradcheck_in_float64(name):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PAIRS[name][0], x)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_as_exact_as_torchs(name, dtype, where):
    ours, theirs = PAIRS[name]
    x = torch.randn(2, 9, 96, generator=torch.Generator().manual_seed(1)).to(where, dtype)
    x.requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    exact = theirs(exact_x)
    dout = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2)).to(where, dtype)
    (exact_dx,) = torch.autograd.grad(exact, exact_x, dout.double())
    errors = []
    for function in (ours, theirs):
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dout)
        errors.append(
            [((a.double() - b).norm() / b.norm()).item() for a, b in ((y, exact), (dx, exact_dx))]
        )
    for mine, torchs in zip(*errors, strict=True):
        assert mine < (1e-5 if dtype == torch.float32 else max(1.02 * torchs, 1e-4))


@pytest.mark.parametrize("name", PAIRS)
def test_compile_vmap_and_views(name, where):
    ours, theirs = PAIRS[name]
    x = torch.randn(4, 6, 64, device=where)[:, :, 8:40].requires_grad_()
    compiled = torch.compile(lambda x: ours(x).sum(), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x), x)
    (want,) = torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    mapped = torch.vmap(ours, 1, 1)(x.detach())
    torch.testing.assert_close(mapped, theirs(x.detach()), rtol=1e-5, atol=1e-5)
    gradient = torch.func.grad(lambda x: ours(x).sum())
    torch.testing.assert_close(torch.vmap(gradient)(x.detach()), want, rtol=1e-5, atol=1e-5)


def test_opcheck(where):
    x = torch.randn(4, 64, device=where, requires_grad=True)
    opcheck(torch.ops.engine.swiglu.default, (x,))
    for approximate in ("none", "tanh"):
        opcheck(torch.ops.engine.geglu.default, (x, approximate))
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        opcheck(torch.ops.engine.activation.default, (x, activation))


def test_bad_options_are_named(where):
    x = torch.randn(2, 4, device=where)
    with pytest.raises(ValueError, match="gelu: approximate: must be 'none' or 'tanh'; got 'erf'"):
        ops.gelu(x, approximate="erf")
    with pytest.raises(ValueError, match=r"swiglu: x: must be of even length .*; got \(2, 3\)"):
        ops.swiglu(x[:, :3])
