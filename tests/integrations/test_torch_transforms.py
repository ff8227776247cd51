"""Every function below `torch.func`'s transforms, batched gradients and forward-mode AD."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from engine.integrations import torch as ops  # noqa: E402

TARGET = torch.tensor([1, 2, 0])
EXPERTS = torch.tensor([[0, 1], [1, 2], [2, 0]])
ENDS = torch.tensor([0, 1, 3], dtype=torch.int32)


def _drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, OUTPUT, ANGLES = _drawn(8), _drawn(5, 8), _drawn(4, 4)
GATE_UP, DOWN, FACTORS = _drawn(3, 8, 8), _drawn(3, 8, 4), _drawn(3, 2).abs()


def _qkv(x, *shape):
    return [part.reshape(shape) for part in (x, x.flip(0), x * x)]


# Functions of an x (3, 8).
FUNCTIONS = {
    "rmsnorm": lambda x: ops.rmsnorm(x, WEIGHT),
    "rmsnorm of weights": lambda x: ops.rmsnorm(OUTPUT, x[0]),
    "rmsnorm with residual": lambda x: sum(ops.rmsnorm(x, WEIGHT, residual=2 * x)),
    "layernorm": lambda x: ops.layernorm(x, WEIGHT, WEIGHT),
    "swiglu": ops.swiglu,
    "geglu": ops.geglu,
    "silu": ops.silu,
    "rope": lambda x: torch.cat(
        ops.rope(*_qkv(x, 3, 2, 4)[:2], ANGLES, torch.tensor([0, 2, 1])), 1
    ),
    "attention": lambda x: ops.attention(*_qkv(x, 1, 3, 2, 4), causal=True),
    "attention with sinks": lambda x: ops.attention(*_qkv(x, 1, 3, 2, 4), sinks=x[0, :2]),
    "heads first": lambda x: ops.scaled_dot_product_attention(*_qkv(x, 2, 2, 3, 2)),
    "packed": lambda x: ops.attention_varlen(*_qkv(x, 3, 2, 4), ENDS, ENDS, 2, 2),
    "embedding": lambda x: ops.embedding(torch.tensor([0, 2, 2]), x),
    "cross_entropy": lambda x: ops.cross_entropy(x, TARGET),
    "linear_cross_entropy": lambda x: ops.linear_cross_entropy(x, OUTPUT, TARGET),
    "linear_cross_entropy of weights": lambda x: ops.linear_cross_entropy(OUTPUT[:3], x, TARGET),
    "losses": lambda x: ops.linear_cross_entropy(x, OUTPUT, TARGET, reduction="none"),
    "moe_route": lambda x: ops.moe_route(x, 2)[0],
    "moe_experts": lambda x: ops.moe_experts(x, GATE_UP, DOWN, EXPERTS, FACTORS),
}
EACH = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def _close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _problem(function):
    """Return a scalar function, a batch of x, and the gradient of each, from autograd."""

    def loss(x):
        return function(x).square().sum()

    batch = _drawn(2, 3, 8, seed=1)
    leaf = batch.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(loss(x) for x in leaf), leaf)
    return loss, batch, want


@EACH
def test_grad_and_vmap_in_any_order(function):
    loss, batch, want = _problem(function)
    _close(torch.vmap(torch.func.grad(loss))(batch), want)
    _close(torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(batch), want)
    _close(torch.vmap(torch.vmap(torch.func.grad(loss)))(batch[None]), want[None])
    leaf = batch.clone().requires_grad_()
    torch.vmap(loss)(leaf).sum().backward()
    _close(leaf.grad, want)


# torch itself refuses the mean of an empty batch's losses, and products with it.
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "cross_entropy"])
def test_vmap_over_no_element(name):
    function = FUNCTIONS[name]
    one = function(_drawn(3, 8))
    for axis in (0, 1, 2):
        empty = torch.zeros(3, 8).unsqueeze(axis)[(slice(None),) * axis + (slice(0, 0),)]
        got = torch.vmap(function, axis)(empty)
        assert got.shape == (0, *one.shape) and got.dtype == one.dtype
    assert torch.vmap(torch.vmap(function))(torch.zeros(2, 0, 3, 8)).shape == (2, 0, *one.shape)
    leaf = torch.zeros(0, 3, 8, requires_grad=True)
    if "losses" not in name and "linear" not in name:
        torch.vmap(function)(leaf).sum().backward()
        assert leaf.grad.shape == leaf.shape


@EACH
def test_a_batch_of_gradients(function):
    x = _drawn(3, 8, seed=1).requires_grad_()
    y = function(x)
    dy = _drawn(2, *y.shape, seed=2)
    (got,) = torch.autograd.grad(y, x, dy, is_grads_batched=True)
    _close(got, torch.stack([torch.autograd.grad(function(x), x, one)[0] for one in dy]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own call
@EACH
def test_forward_mode_is_an_error(function):
    """The dispatcher would call the operator on the value and drop the tangent."""
    x = _drawn(3, 8)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="jvp"):
            function(dual)


def test_compiled_vmap():
    batch = _drawn(2, 3, 8, seed=1)
    function = FUNCTIONS["linear_cross_entropy"]
    compiled = torch.compile(torch.vmap(function), fullgraph=True, backend="aot_eager")
    _close(compiled(batch), torch.stack([function(x) for x in batch]))
