"""Mixtures of experts on tensors: values and gradients against a loop over the experts."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402

from engine import kernels  # noqa: E402
from engine.errors import ContractError, ShapeError  # noqa: E402
from engine.integrations import torch as ops  # noqa: E402

OPTIONS = [
    {"score": score, "renormalize": renormalize, "scale": scale}
    for score in ("softmax", "sigmoid")
    for renormalize, scale in ((True, 1.0), (False, 2.5))
]
ROUTERS = ("random", "one expert", "few experts")


def _inputs(where, dtype, tokens=33, experts=6, top_k=2, hidden=24, width=16, router="random"):
    generator = torch.Generator().manual_seed(7)
    shapes = ((tokens, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    scales = (1.0, hidden**-0.5, width**-0.5)
    values = [
        (torch.randn(s, generator=generator, dtype=torch.float64) * f).to(where, dtype)
        for s, f in zip(shapes, scales, strict=True)
    ]
    scores = torch.rand((tokens, experts), generator=generator, dtype=torch.float64)
    among = {"random": experts, "one expert": top_k, "few experts": max(top_k, experts // 2)}
    scores[:, among[router] :] -= 1
    weights, ids = scores.topk(top_k, dim=1)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    values.append(weights.to(where, kind))
    return [v.requires_grad_() for v in values], ids.to(where)


def _loop(x, gate_up, down, ids, weights):
    """Return the layer as a loop over experts; each computes the tokens that chose it."""
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        tokens, rank = torch.where(ids == expert)
        gate, up = (x[tokens] @ gate_up[expert].T).chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, tokens, y * weights[tokens, rank, None].to(y.dtype))
    return out


def _route(logits, top_k, score, renormalize, scale):
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    weights, ids = scores.topk(top_k, dim=1)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * scale, ids


def _grads(layer, values, ids):
    x, gate_up, down, weights = values
    out = layer(x, gate_up, down, ids, weights)
    loss = (out * torch.linspace(-1, 1, out.shape[1], device=out.device)).sum()
    return out, torch.autograd.grad(loss, values)


@pytest.mark.parametrize("options", OPTIONS)
def test_router_gradcheck_in_float64(options):
    logits = torch.randn(5, 7, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: ops.moe_route(z, 3, **options)[0], (logits,))


@pytest.mark.parametrize("options", OPTIONS)
def test_router_is_torchs(options, where):
    logits = torch.randn(300, 40, device=where, generator=None).requires_grad_()
    weights, ids = ops.moe_route(logits, 4, **options)
    want, chosen = _route(logits, 4, **options)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)
    factors = torch.linspace(-1, 1, 4, device=where)
    (got,) = torch.autograd.grad((weights * factors).sum(), logits)
    (want,) = torch.autograd.grad((want * factors).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_gradcheck_in_float64(router):
    sizes = {"tokens": 5, "experts": 4, "hidden": 3, "width": 2}
    values, ids = _inputs("cpu", torch.float64, **sizes, router=router)
    x, gate_up, down, weights = values
    assert torch.autograd.gradcheck(
        lambda x, g, d, w: ops.moe_experts(x, g, d, ids, w), (x, gate_up, down, weights)
    )


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_exact_as_the_loops(dtype, router, where):
    """In float32 within 1e-5 of float64; in bfloat16 no further from it than the loop in torch."""
    sizes = {"tokens": 200, "hidden": 64, "width": 48}
    values, ids = _inputs(where, dtype, **sizes, router=router)
    exact = [v.detach().double().requires_grad_() for v in values]
    exact_out, want = _grads(_loop, exact, ids)
    errors = {}
    for name, layer in (("ours", ops.moe_experts), ("theirs", _loop)):
        out, got = _grads(layer, values, ids)
        pairs = zip((out, *got), (exact_out, *want), strict=True)
        errors[name] = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
        unused = [e for e in range(6) if not (ids == e).any()]
        assert not got[1][unused].any() and not got[2][unused].any()
    for ours, theirs in zip(errors["ours"], errors["theirs"], strict=True):
        assert ours < (1e-5 if dtype == torch.float32 else max(1.1 * theirs, 4e-3))


def test_without_gradients_the_fused_path_gives_the_same(where):
    values, ids = _inputs(where, torch.float32)
    x, gate_up, down, weights = values
    kept = ops.moe_experts(x, gate_up, down, ids, weights)
    with torch.no_grad():
        plain = ops.moe_experts(x, gate_up, down, ids.int(), weights)
    torch.testing.assert_close(plain, kept, rtol=1e-5, atol=1e-6)
    # Called as an operator it has a derivative, too: it computes the forward pass again.
    out = torch.ops.engine.moe_experts(x, gate_up, down, ids, weights)
    for a, b in zip(torch.autograd.grad(out.sum(), values),
                    torch.autograd.grad(kept.sum(), values), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_only_some_inputs_need_a_gradient(where):
    values, ids = _inputs(where, torch.float32)
    _, want = _grads(_loop, values, ids)
    for needed, gradient in zip(range(4), want, strict=True):
        x, gate_up, down, weights = (
            v.detach().requires_grad_(i == needed) for i, v in enumerate(values)
        )
        out = ops.moe_experts(x, gate_up, down, ids, weights)
        factors = torch.linspace(-1, 1, out.shape[1], device=where)
        (got,) = torch.autograd.grad((out * factors).sum(), (x, gate_up, down, weights)[needed])
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-5)


def test_no_tokens(where):
    values, ids = _inputs(where, torch.float32, tokens=0)
    out, grads = _grads(ops.moe_experts, values, ids)
    assert out.shape == (0, 24)
    assert [g.shape for g in grads] == [v.shape for v in values]
    assert not grads[1].any() and not grads[2].any()


def test_views_of_the_matrices(where):
    """Gate and up as two views of one tensor; matrices with other strides are copied."""
    values, ids = _inputs(where, torch.float32)
    x, gate_up, down, weights = values
    want = ops.moe_experts(x, gate_up, down, ids, weights)
    across = [m.detach().transpose(1, 2).contiguous().transpose(1, 2) for m in (gate_up, down)]
    wide = x.detach().repeat_interleave(2, dim=1)[:, ::2]
    got = ops.moe_experts(wide, *across, ids, weights)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_compiled_training_step(where):
    values, _ = _inputs(where, torch.float32)
    logits = torch.randn(33, 6, device=where).requires_grad_()

    def step(x, gate_up, down, logits):
        weights, chosen = ops.moe_route(logits, 2)
        return ops.moe_experts(x, gate_up, down, chosen, weights).square().sum()

    used = (*values[:3], logits)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*used), used)
    want = torch.autograd.grad(step(*used), used)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_first_product_of_an_operator_waits_for_what_precedes(monkeypatch):
    """`pdl` is a promise about the preceding kernel, which may be a cast of gate_up."""
    products = []

    def recorded(*args, scatter=False, pdl=False, **options):
        products.append((scatter, pdl))
        return moe_gemm(*args, scatter=scatter, pdl=pdl, **options)

    moe_gemm = kernels.moe_gemm
    monkeypatch.setattr(kernels, "moe_gemm", recorded)
    values, ids = _inputs("cpu", torch.float32)
    _grads(ops.moe_experts, values, ids)
    assert len(products) == 3 and any(scatter for scatter, _ in products)
    assert not any(pdl for _, pdl in products)


def test_autocast(where):
    values, ids = _inputs(where, torch.float32)
    x, gate_up, down, weights = values
    with torch.autocast(where, torch.bfloat16):
        out = ops.moe_experts(x, gate_up, down, ids, weights)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), values)
    assert all(g.dtype == torch.float32 for g in grads)


def test_a_second_derivative_is_an_error(where):
    values, ids = _inputs(where, torch.float32)
    x, gate_up, down, weights = values
    out = ops.moe_experts(x, gate_up, down, ids, weights)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no derivative"):
        dx.sum().backward()


def test_checkpointing(where):
    values, ids = _inputs(where, torch.float32)
    _, want = _grads(ops.moe_experts, values, ids)

    def layer(x, gate_up, down, ids, weights):
        run = torch.utils.checkpoint.checkpoint
        return run(ops.moe_experts, x, gate_up, down, ids, weights, use_reentrant=False)

    _, got = _grads(layer, values, ids)
    assert all(map(torch.equal, got, want))


def test_vmap_over_tokens(where):
    values, ids = _inputs(where, torch.float32)
    x, gate_up, down, weights = (v.detach() for v in values)
    want = ops.moe_experts(x, gate_up, down, ids, weights)
    batch = [t.unflatten(0, (3, 11)) for t in (x, ids, weights)]
    got = torch.vmap(lambda x, i, w: ops.moe_experts(x, gate_up, down, i, w))(*batch)
    torch.testing.assert_close(got.flatten(0, 1), want, rtol=1e-5, atol=1e-6)


def test_opcheck(where):
    values, ids = _inputs(where, torch.float32)
    x, gate_up, down, weights = values
    opcheck(torch.ops.engine.moe_experts.default, (x, gate_up, down, ids, weights))
    opcheck(torch.ops.engine.moe_experts_kept.default, (x, gate_up, down, ids, weights))
    logits = torch.randn(9, 6, device=where).requires_grad_()
    opcheck(torch.ops.engine.moe_route.default, (logits, None, 2, "softmax", 1, 1, True, 1.0))


def test_a_router_takes_numbers_with_a_fraction():
    with pytest.raises(TypeError, match=r"logits: must be floating-point; got torch.int64"):
        ops.moe_route(torch.zeros(3, 4, dtype=torch.int64), 2)


def test_another_activation_is_an_error(where):
    values, ids = _inputs(where, torch.float32)
    x, gate_up, down, weights = values
    with pytest.raises(ContractError, match="activation: must be 'swiglu'; got 'gelu'"):
        ops.moe_experts(x, gate_up, down, ids, weights, activation="gelu")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("down", (3, 6, 4)),  # not N columns of the result
        ("gate_up", (2, 8, 8)),
        ("gate_up", (3, 6, 8)),
        ("topk_ids", (4, 2)),
        ("topk_weights", (5, 1)),
    ],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_an_argument_of_another_shape_is_named(name, shape, needs_grad):
    shapes = {"x": (5, 8), "gate_up": (3, 8, 8), "down": (3, 8, 4)}
    shapes |= {"topk_ids": (5, 2), "topk_weights": (5, 2), name: shape}
    arguments = {key: torch.zeros(sizes) for key, sizes in shapes.items()}
    arguments["x"].requires_grad_(needs_grad)
    arguments["topk_ids"] = arguments["topk_ids"].int()
    wanted = rf"moe_experts: {name}: must have shape .*; got {re.escape(str(shape))}"
    with pytest.raises(ShapeError, match=wanted):
        ops.moe_experts(**arguments)
