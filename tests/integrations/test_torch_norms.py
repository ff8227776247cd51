"""Gradients of RMSNorm and LayerNorm on tensors, with and without the residual add."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402

from engine.integrations import torch as ops  # noqa: E402

F = torch.nn.functional
KINDS = pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "layernorm with bias"])


def _ours(kind, x, weight, bias, **options):
    if kind == "rmsnorm":
        return ops.rmsnorm(x, weight, 1e-5, **options)
    return ops.layernorm(x, weight, bias if "bias" in kind else None, 1e-5, **options)


def _theirs(kind, x, weight, bias, residual=None, x_scale=1.0, weight_offset=0.0):
    h = x if residual is None else x_scale * x + residual
    shape = weight.shape
    if kind == "rmsnorm":
        y = F.rms_norm(h, shape, weight + weight_offset, 1e-5)
    else:
        bias = bias if "bias" in kind else None
        y = F.layer_norm(h, shape, weight + weight_offset, bias, 1e-5)
    return y if residual is None else (y, h)


def _inputs(where, dtype, n=48):
    generator = torch.Generator().manual_seed(7)
    shapes = ((3, 5, n), (n,), (n,), (3, 5, n))
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [v.to(where, dtype).requires_grad_() for v in values]


@KINDS
def test_gradcheck_in_float64(kind):
    x, weight, bias, residual = _inputs("cpu", torch.float64, n=6)

    def norm(x, weight, bias, residual):
        options = {"x_scale": 0.5, "weight_offset": 1.0}
        return _ours(kind, x, weight, bias, residual=residual, **options)

    used = (x, weight, bias, residual)
    assert torch.autograd.gradcheck(norm, used)
    assert torch.autograd.gradcheck(lambda *a: _ours(kind, *a), used[:3])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_exact_as_torchs(kind, dtype, where):
    """In float32 within 1e-5 of float64; in bfloat16 no further from it than torch's own."""
    errors = {}
    for run in ("exact", "ours", "theirs"):
        x, weight, bias, residual = _inputs(where, dtype, n=640)
        if run == "exact":
            x, weight, bias, residual = (
                v.detach().double().requires_grad_() for v in (x, weight, bias, residual)
            )
        norm = _ours if run == "ours" else _theirs
        y, h = norm(kind, x, weight, bias, residual=residual, weight_offset=1.0)
        loss = (y * torch.linspace(-1, 1, 640, device=where)).sum() + (h * h).sum()
        used = [v for v in (x, weight, bias, residual) if v is not bias or "bias" in kind]
        grads = torch.autograd.grad(loss, used)
        if run == "exact":
            exact = grads
        errors[run] = [
            ((g.double() - e).norm() / e.norm()).item() for g, e in zip(grads, exact, strict=True)
        ]
    for ours, theirs in zip(errors["ours"], errors["theirs"], strict=True):
        assert ours < (1e-5 if dtype == torch.float32 else max(1.05 * theirs, 4e-3))


def test_only_some_inputs_need_a_gradient(where):
    x, weight, bias, residual = _inputs(where, torch.float32)
    for needed in (x, weight, residual):
        used = [v if v is needed else v.detach() for v in (x, weight, residual)]
        y, _ = ops.rmsnorm(used[0], used[1], 1e-5, residual=used[2])
        (got,) = torch.autograd.grad(y.square().sum(), needed)
        want_y, _ = _theirs("rmsnorm", used[0], used[1], bias, residual=used[2])
        (want,) = torch.autograd.grad(want_y.square().sum(), needed)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    (got,) = torch.autograd.grad(ops.rmsnorm(x, weight, residual=residual)[1].sum(), x)
    assert torch.equal(got, torch.ones_like(x))


def test_a_second_derivative_is_an_error(where):
    x, weight, *_ = _inputs(where, torch.float32)
    (dx,) = torch.autograd.grad(ops.rmsnorm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="engine::rmsnorm_backward has no derivative"):
        dx.sum().backward()


def test_compiled_training_step(where):
    x, weight, bias, residual = _inputs(where, torch.float32)

    def loss(x, weight, bias, residual):
        y, h = ops.layernorm(x, weight, bias, residual=residual)
        return (y * y).sum() + h.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    used = (x, weight, bias, residual)
    got = torch.autograd.grad(compiled(*used), used)
    want = torch.autograd.grad(loss(*used), used)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_checkpointing_and_vmap_of_a_gradient(where):
    x, weight, *_ = _inputs(where, torch.float32)
    checkpoint = torch.utils.checkpoint.checkpoint
    y = checkpoint(lambda x: ops.rmsnorm(x, weight).square().sum(), x, use_reentrant=False)
    want = torch.autograd.grad(ops.rmsnorm(x, weight).square().sum(), (x, weight))
    got = torch.autograd.grad(y, (x, weight))
    assert all(map(torch.equal, got, want))
    per_sample = torch.vmap(
        torch.func.grad(lambda w, x: ops.rmsnorm(x, w).square().sum()), (None, 0)
    )(weight.detach(), x.detach())
    torch.testing.assert_close(per_sample.sum(0), want[1], rtol=1e-4, atol=1e-4)


def test_a_factor_without_residual_is_an_error():
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="layernorm: x_scale: must be 1 without residual; got 2"):
        ops.layernorm(x, x[0], x_scale=2.0)


def test_opcheck_with_gradients(where):
    x, weight, bias, residual = _inputs(where, torch.float32)
    opcheck(torch.ops.engine.rmsnorm.default, (x, weight, None, 1e-5, 0.0, False))
    opcheck(torch.ops.engine.rmsnorm.default, (x, weight, bias, 1e-5, 0.0, True))
    opcheck(
        torch.ops.engine.add_rmsnorm.default, (x, residual, weight, None, 1e-5, 1.0, 1.0, False)
    )
