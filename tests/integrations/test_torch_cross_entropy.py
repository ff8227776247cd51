"""cross_entropy and linear_cross_entropy beside torch's own, with every option and reduction."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402

from engine import reference  # noqa: E402
from engine.errors import ContractError, DTypeError, ShapeError  # noqa: E402
from engine.integrations import torch as ops  # noqa: E402
from engine.integrations.torch.linear_cross_entropy import default_chunk_rows  # noqa: E402

F = torch.nn.functional
REDUCTIONS = ["mean", "sum", "none"]
OPTIONS = [
    {},
    {"label_smoothing": 0.1, "ignore_index": 3},
    {"softcap": 3.0, "z_loss": 1e-2},
    {"softcap": 3.0, "z_loss": 1e-2, "label_smoothing": 0.2},
]
ROWS, VOCAB, HIDDEN = 600, 50, 16
CHUNK = 256  # rows of logits that exist at once: three chunks, the last one partial


def _linear(*args, **options):
    return ops.linear_cross_entropy(*args, chunk_rows=CHUNK, **options)


def _problem(where="cpu", dtype=torch.float64, rows=ROWS, *, bias=False, ignored=-100):
    """Return x, weight, bias (or None) and targets, of which a seventh is `ignored`."""
    generator = torch.Generator().manual_seed(rows)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    tensors = [draw(rows, HIDDEN), draw(VOCAB, HIDDEN), draw(VOCAB) if bias else None]
    target = torch.randint(0, VOCAB, (rows,), generator=generator)
    target[::7] = ignored
    ready = [None if t is None else t.to(where, dtype).requires_grad_() for t in tensors]
    return *ready, target.to(where)


def _loss(logits, target, reduction="mean", *, softcap=0.0, z_loss=0.0, **options):
    """Return torch's loss of capped logits, with the weighted square of the log-sum-exp."""
    x = softcap * torch.tanh(logits / softcap) if softcap else logits
    losses = F.cross_entropy(x, target, reduction="none", **options)
    is_counted = target != options.get("ignore_index", -100)
    losses = losses + z_loss * x.logsumexp(-1) ** 2 * is_counted
    if reduction == "none":
        return losses
    return losses.sum() / (is_counted.sum() if reduction == "mean" else 1)


def _upstream(loss):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(loss.shape, generator=generator, dtype=torch.float64).to(loss)


def _gradients(loss, inputs):
    return torch.autograd.grad(loss, [t for t in inputs if t is not None], _upstream(loss))


def _exact(problem, reduction, options):
    """Return torch's loss and gradients of the same values in float64."""
    *inputs, target = problem
    inputs = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    loss = _loss(F.linear(*inputs), target, reduction, **options)
    return loss, _gradients(loss, inputs)


def _error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_is_torch_s(where, reduction, options, bias):
    dtype, tolerance = (torch.float64, 1e-12) if where == "cpu" else (torch.float32, 1e-5)
    ignored = options.get("ignore_index", -100)
    problem = _problem(where, dtype, bias=bias, ignored=ignored)
    x, weight, b, target = problem
    loss = _linear(x, weight, target, bias=b, reduction=reduction, **options)
    want, gradients = _exact(problem, reduction, options)
    assert loss.dtype == dtype and loss.shape == want.shape
    assert _error(loss, want) < tolerance
    for got, exact in zip(_gradients(loss, problem[:3]), gradients, strict=True):
        assert got.dtype == dtype and _error(got, exact) < tolerance


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_is_torch_s(where, reduction, options):
    dtype, tolerance = (torch.float64, 1e-12) if where == "cpu" else (torch.float32, 1e-5)
    ignored = options.get("ignore_index", -100)
    x, weight, _, target = _problem(where, dtype, ignored=ignored)
    logits = F.linear(x, weight).detach().requires_grad_()
    loss = ops.cross_entropy(logits, target, reduction=reduction, **options)
    exact = logits.detach().double().requires_grad_()
    want = _loss(exact, target, reduction, **options)
    assert _error(loss, want) < tolerance
    assert _error(_gradients(loss, [logits])[0], _gradients(want, [exact])[0]) < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sum_dtype", [None, torch.float32])
def test_half_precision_is_as_exact_as_torch_s(where, dtype, sum_dtype):
    """Several chunks are added in the weight's dtype; a float32 sum is rounded once."""
    x, weight, _, target = _problem(where, dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = F.cross_entropy(F.linear(*exact), target)
    own = F.cross_entropy(F.linear(x, weight), target)
    loss = _linear(x, weight, target, sum_dtype=sum_dtype)
    assert loss.dtype == torch.float32 and _error(loss, want) <= _error(own, want)
    gradients = [
        torch.autograd.grad(a, b)
        for a, b in ((loss, (x, weight)), (own, (x, weight)), (want, exact))
    ]
    for i, (got, theirs, true) in enumerate(zip(*gradients, strict=True)):
        slack = 1.5 if i == 1 and sum_dtype is None else 1.1
        assert got.dtype == dtype and _error(got, true) < slack * _error(theirs, true)


def test_gradients_are_derivatives():
    for reduction in REDUCTIONS:
        for options in OPTIONS:
            ignored = options.get("ignore_index", -100)
            x, weight, bias, target = _problem(rows=9, bias=True, ignored=ignored)
            options = {"target": target, "reduction": reduction, **options}
            run = partial(ops.cross_entropy, **options)
            logits = F.linear(x, weight).detach().requires_grad_()
            assert torch.autograd.gradcheck(run, (logits,))
            run = partial(_linear, **options)
            assert torch.autograd.gradcheck(
                lambda x, w, b, run=run: run(x, w, bias=b), (x, weight, bias)
            )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_operators_pass_opcheck(where, reduction):
    x, weight, bias, target = _problem(where, torch.float32, rows=9, bias=True)
    options = (-100, 0.0, 0.0, 0.1, 4, True, True, True, torch.float32)
    forward = torch.ops.engine.linear_cross_entropy.default
    opcheck(forward, (x, weight, bias, target, *options, reduction))
    opcheck(
        forward,
        (x, weight.detach(), None, target, *options[:6], False, False, *options[8:], reduction),
    )
    opcheck(torch.ops.engine.cross_entropy.default, (x, target % 16, -100, 0.0, 0.0, 0.1))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_some_inputs_only(reduction, needed):
    problem = _problem(bias=True)
    _, gradients = _exact(problem, reduction, {})
    inputs = [t.detach().requires_grad_(i in needed) for i, t in enumerate(problem[:3])]
    x, weight, bias = inputs
    loss = _linear(x, weight, problem[3], bias=bias, reduction=reduction)
    for i, got in zip(needed, _gradients(loss, [inputs[i] for i in needed]), strict=True):
        assert _error(got, gradients[i]) < 1e-12


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_pass_over_a_retained_graph(where, reduction):
    dtype = torch.float64 if where == "cpu" else torch.float32
    x, weight, _, target = _problem(where, dtype)
    loss = _linear(x, weight, target, reduction=reduction)
    upstream = _upstream(loss)
    first = torch.autograd.grad(loss, (x, weight), upstream, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (x, weight), 2 * upstream)
    for a, b, c in zip(kept, second, first, strict=True):
        assert _error(2 * a, b) < 1e-5 and torch.equal(a, c)


def test_a_second_derivative_is_an_error():
    x, weight, _, target = _problem()
    for loss in (
        ops.linear_cross_entropy(x, weight, target),
        ops.cross_entropy(F.linear(x, weight), target),
    ):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"engine::.*cross_entropy.* no "):
            dx.sum().backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_to_one_graph(where, reduction):
    dtype = torch.float64 if where == "cpu" else torch.float32
    problem = _problem(where, dtype)
    x, weight, _, target = problem

    def both(x, weight, target):
        loss = _linear(2 * x, weight, target, reduction=reduction)
        return loss + ops.cross_entropy(F.linear(x, weight), target, reduction=reduction)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    loss, want = compiled(x, weight, target), both(x, weight, target)
    assert _error(loss, want) < 1e-6
    for got, exact in zip(
        _gradients(loss, (x, weight)), _gradients(want, (x, weight)), strict=True
    ):
        assert _error(got, exact) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_runs_each_problem(reduction):
    x, weight, _, target = _problem(rows=12)
    xs, targets = x.view(3, 4, HIDDEN), target.view(3, 4)
    run = partial(_linear, reduction=reduction)
    got = torch.vmap(run, (0, None, 0))(xs, weight, targets)
    want = torch.stack([run(a, weight, b) for a, b in zip(xs, targets, strict=True)])
    assert _error(got, want) < 1e-12

    def loss(x, weight, target):
        return run(x, weight, target).sum()

    got = torch.vmap(torch.func.grad(loss), (0, None, 0))(xs, weight, targets)
    for index in range(3):
        want = torch.autograd.grad(loss(xs[index], weight, targets[index]), xs)[0][index]
        assert _error(got[index], want) < 1e-12


def test_autocast_casts_x_and_weight(where):
    x, weight, _, target = _problem(where, torch.float32)
    with torch.autocast(where, torch.bfloat16):
        loss = _linear(x, weight, target)
    half = _linear(x.bfloat16(), weight.bfloat16(), target)
    assert torch.equal(loss, half) and loss.dtype == torch.float32
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert dx.dtype == dweight.dtype == torch.float32


def test_checkpointing(where):
    from torch.utils.checkpoint import checkpoint

    x, weight, _, target = _problem(where, torch.float32)
    want = torch.autograd.grad(_linear(x, weight, target), (x, weight))
    loss = checkpoint(_linear, x, weight, target, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(loss, (x, weight)), want, strict=True):
        assert torch.equal(a, b)


def test_all_ignored_and_no_rows(where):
    x, weight, _, target = _problem(where, torch.float32)
    for rows in (x, x[:0]):
        ignored = torch.full_like(target[: len(rows)], -100)
        for run in (ops.linear_cross_entropy, lambda x, w, t: ops.cross_entropy(x @ w.t(), t)):
            loss = run(rows, weight, ignored)
            assert loss.isnan()
            dx, dweight = torch.autograd.grad(loss, (x, weight))
            assert not dx.nan_to_num().any() and not dweight.nan_to_num().any()
        assert not torch.autograd.grad(ops.linear_cross_entropy(rows, weight, ignored), weight)[
            0
        ].any()


def test_views_and_leading_axes(where):
    x, weight, _, target = _problem(where, torch.float32)
    wide = torch.randn(20, 30, 40, device=where)
    wide[..., 8:24] = x.detach().view(20, 30, HIDDEN)
    view = wide[..., 8:24].requires_grad_()
    loss = _linear(view, weight, target.view(20, 30), reduction="none")
    want = _linear(x, weight, target, reduction="none")
    assert loss.shape == (20, 30) and torch.equal(loss.flatten(), want)
    logits = F.linear(view, weight).transpose(0, 1)
    losses = ops.cross_entropy(logits, target.view(20, 30).t(), reduction="none")
    assert _error(losses.t().flatten(), want) < 1e-5


def test_columns_first(where):
    """The gradients of transposed inputs are scaled in place, too."""
    x = torch.randn(16, 30, device=where).t().requires_grad_()
    weight = torch.randn(16, 50, device=where).t().requires_grad_()
    target = torch.arange(30, device=where)
    inputs = (x, weight)
    got = torch.autograd.grad(0.3 * _linear(*inputs, target), inputs)
    want = torch.autograd.grad(0.3 * F.cross_entropy(F.linear(*inputs), target), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_unknown_targets_are_nan(where):
    x, weight, _, target = _problem(where, torch.float32)
    target[3] = VOCAB
    losses = _linear(x, weight, target, reduction="none")
    assert losses[3].isnan() and losses.isnan().sum() == 1
    assert ops.linear_cross_entropy(x, weight, target).isnan()


def test_module_parameters_train(where):
    """Gradients reach `.grad`, are added up, and a copy of the module has its own."""
    layer = torch.nn.Linear(HIDDEN, VOCAB).to(where)
    x, _, _, target = _problem(where, torch.float32)
    twin = copy.deepcopy(layer)
    for _ in range(2):
        ops.linear_cross_entropy(x, layer.weight, target, bias=layer.bias).backward()
        F.cross_entropy(twin(x), target).backward()
    assert _error(layer.weight.grad, twin.weight.grad.double()) < 1e-5
    assert _error(layer.bias.grad, twin.bias.grad.double()) < 1e-5


def test_wrong_arguments():
    x, weight, _, target = _problem()
    scalar = torch.tensor(1.0)
    for run in (ops.cross_entropy, partial(ops.linear_cross_entropy, weight=torch.ones(2, 3))):
        with pytest.raises(ShapeError, match=r"must be of at least one axis; got \(\)"):
            run(scalar, target=torch.tensor(0))
        with pytest.raises(DTypeError, match=r"y: target: must be int64 or int32; got float32"):
            run(torch.ones(0, 3), target=torch.ones(0))
    with pytest.raises(ContractError, match=r"reduction: must be one of .*; got 'max'"):
        ops.linear_cross_entropy(x, weight, target, reduction="max")
    with pytest.raises(ContractError, match=r"weight: must be torch.float64, as x is; got torch.f"):
        ops.linear_cross_entropy(x, weight.float(), target)
    with pytest.raises(ContractError, match="chunk_rows: must be positive; got 0"):
        ops.linear_cross_entropy(x, weight, target, chunk_rows=0)
    with pytest.raises(ContractError, match=r"sum_dtype: must be torch.float64 or .*; got"):
        ops.linear_cross_entropy(x, weight, target, sum_dtype=torch.int32)
    with pytest.raises(ContractError, match=r"bias: must have shape \(50,\); got \(1,\)"):
        ops.linear_cross_entropy(x, weight, target, bias=weight[0, :1])
    for other in (weight[:, 1:], weight[None]):
        with pytest.raises(
            ContractError, match=r"weight: must have shape \(V, \d+\), as x has; got"
        ):
            ops.linear_cross_entropy(x, other, target)
    for other in (weight[:0], weight[:, :0]):
        with pytest.raises(ContractError, match=r"weight: must be of at least one element; got"):
            ops.linear_cross_entropy(x[:, : other.shape[1]], other, target)
    with pytest.raises(ContractError, match=r"logits: must be rows of 1 to .*; got \(600, 0\)"):
        ops.cross_entropy(x[:, :0], target)
    for function in (ops.cross_entropy, lambda x, t: ops.linear_cross_entropy(x, weight, t)):
        with pytest.raises(ContractError, match=r"target: must have shape \(20, 30\); got \(30"):
            function(x.unflatten(0, (20, 30)), target.view(30, 20))


def test_chunks_take_little_memory():
    """As much as x or an eighth of the weight, or 64 Mi logits, rounded to 256 rows."""
    for rows, vocab, hidden in [(16384, 128256, 4096), (65536, 50257, 768), (4096, 128256, 2048)]:
        step = default_chunk_rows(rows, vocab, hidden)
        most = max(rows * hidden, vocab * hidden // 8, 64 << 20)
        assert step % 256 == 0 and abs(step * vocab - most) <= 128 * vocab
    assert default_chunk_rows(5, 50, 16) == 5


@pytest.mark.gpu
def test_logits_never_exist():
    rows, vocab, hidden = 8192, 32000, 512
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), device="cuda")

    def step():
        x.grad = weight.grad = None
        ops.linear_cross_entropy(x, weight, target, chunk_rows=1024).backward()

    step()  # cuBLAS allocates its workspace
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    gradients = 2 * (x.numel() + weight.numel())
    chunk = 2 * 1024 * vocab
    assert torch.cuda.max_memory_allocated() - before < gradients + chunk + (4 << 20)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # leaves of two streams
def test_a_step_in_a_cuda_graph():
    x, weight, _, target = _problem("cuda", torch.bfloat16)

    def step():
        x.grad = weight.grad = None
        loss = _linear(x, weight, target)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    captured = (loss, x.grad, weight.grad)
    with torch.no_grad():
        x.copy_(x.flip(0))
    graph.replay()
    got = [t.detach().clone() for t in captured]
    for a, b in zip(got, (step(), x.grad, weight.grad), strict=True):
        assert torch.equal(a, b)


def test_the_operator_runs_the_mirror():
    x, _, _, target = _problem(dtype=torch.bfloat16)
    want = reference.cross_entropy(
        x.detach().float().numpy(), np.asarray(target % 16), ignore_index=-1
    )[0]
    got = ops.cross_entropy(x, target % 16, ignore_index=-1, reduction="none")
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-6)
