"""Attention on tensors: values, gradients, layouts, transforms of torch."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from engine.errors import ContractError, ShapeError  # noqa: E402
from engine.integrations import torch as ops  # noqa: E402
from engine.kernels import BlockSparse, Periodic  # noqa: E402

_BLOCKS = BlockSparse(np.random.default_rng(0).random((4, 5)) < 0.6, 8, 8)
_PERIODIC = Periodic(9, 4, 2)
_OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window": 5, "scale": 0.3},
    {"causal": True, "softcap": 1.5},
    {"causal": True, "pattern": _PERIODIC},
    {"pattern": _BLOCKS, "softcap": 2.0},
]
_sdpa = torch.nn.functional.scaled_dot_product_attention


def _sees(pattern, position, key):
    if isinstance(pattern, Periodic):
        return (position - key + pattern.offset) % pattern.period < pattern.width
    row, column = position // pattern.block_q, key // pattern.block_k
    rows, columns = pattern.mask.shape
    inside = (row >= 0) & (row < rows) & (column < columns)
    mask = torch.tensor(pattern.mask)
    return inside & mask[row.clamp(0, rows - 1), column.clamp(0, columns - 1)]


def _hidden(n, m, causal, window, pattern):
    """Return the mask (n, m) of hidden pairs; the last of n queries is at the last key."""
    query, key = torch.arange(n)[:, None], torch.arange(m)
    last = query + m - n if causal else torch.full_like(query, m - 1)
    hidden = (key > last) | (key <= last - window if window else torch.tensor(False))
    if pattern is not None:
        hidden = hidden | ~_sees(pattern, last if causal else query, key)
    return hidden


def _formula(q, k, v, causal=False, scale=None, window=0, softcap=0.0, sinks=None, pattern=None):
    """Attention and log-sum-exp in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bihj", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = _hidden(q.shape[1], k.shape[1], causal, window, pattern).to(q.device)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is None:
        extra = torch.full_like(scores[..., :1], -torch.inf)
    else:
        extra = sinks.double()[:, None].expand(*scores.shape[:-1], 1)
    every = torch.cat([scores, extra], -1)
    lse = every.logsumexp(-1)
    p = (every - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()[..., :-1]
    return torch.einsum("bihj,bjhd->bihd", p, v), lse


def _leaf(*shape, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def _assert_close(got, want, limit=1e-5):
    got, want = got.double(), want.double()
    same = (got == want) | ((got - want).abs() <= limit * want[want.isfinite()].abs().max())
    assert got.shape == want.shape and bool(same.all())


def _compare(function, formula, leaves, limit=1e-5, seed=50):
    """Compare the results of two functions and the gradients of all leaves."""
    got, want = function(*leaves), formula(*leaves)
    weights = [_leaf(*x.shape, device=x.device, seed=seed + i).detach() for i, x in enumerate(got)]
    losses = []
    for results in (got, want):
        finite = [x.double().masked_fill(x.isinf(), 0) for x in results]
        losses.append(sum((x * w).sum() for x, w in zip(finite, weights, strict=True)))
    for x, y in zip(got, want, strict=True):
        _assert_close(x, y, limit)
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    for x, y in zip(*grads, strict=True):
        _assert_close(x, y, limit)


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
@pytest.mark.parametrize(("n", "m", "has_sinks"), [(33, 33, False), (20, 33, True), (1, 40, True)])
def test_values_and_gradients(where, options, n, m, has_sinks):
    leaves = [
        _leaf(2, n, 4, 16, device=where),
        *(_leaf(2, m, 2, 16, device=where, seed=s) for s in (1, 2)),
    ]
    leaves += [_leaf(4, device=where, seed=3)] * has_sinks

    def run(function, q, k, v, sinks=None):
        return function(q, k, v, sinks=sinks, **options)

    _compare(
        lambda *x: run(lambda *a, **o: ops.attention(*a, **o, return_lse=True), *x),
        lambda *x: run(_formula, *x),
        leaves,
    )


def _qkv(layout, where, dtype=torch.float32):
    """Return a leaf, and a function of it that returns q, k, v (B, S, H, D) of some layout."""
    b, s, h, k, d = 3, 12, 4, 2, 64
    if layout == "fused rows":
        leaf = _leaf(b, s, h + 2 * k, d, device=where, dtype=dtype)
        return leaf, lambda x: x.split([h, k, k], 2)
    if layout == "heads first":
        leaf = _leaf(b, h + 2 * k, s, d, device=where, dtype=dtype)
        return leaf, lambda x: [y.contiguous().transpose(1, 2) for y in x.split([h, k, k], 1)]
    if layout == "fused heads":  # no two axes can be merged
        leaf = _leaf(b, h + 2 * k, s, d, device=where, dtype=dtype)
        return leaf, lambda x: [y.transpose(1, 2) for y in x.split([h, k, k], 1)]
    if layout == "sequence first":
        leaf = _leaf(s, b, h + 2 * k, d, device=where, dtype=dtype)
        return leaf, lambda x: [y.transpose(0, 1) for y in x.split([h, k, k], 2)]
    if layout == "columns":
        leaf = _leaf(b, s, d, h + 2 * k, device=where, dtype=dtype)
        return leaf, lambda x: [y.transpose(2, 3) for y in x.split([h, k, k], 3)]
    leaf = _leaf(b, s, h, d, device=where, dtype=dtype)  # keys expanded over the heads
    return leaf, lambda x: (x, *(x[:, :, :1].expand(b, s, k, d) for _ in range(2)))


@pytest.mark.parametrize(
    "layout", ["fused rows", "heads first", "fused heads", "sequence first", "columns", "expanded"]
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1.6e-2)])
def test_layouts(where, layout, dtype, limit):
    leaf, split = _qkv(layout, where, dtype)
    sinks = _leaf(4, device=where, seed=3)
    _compare(
        lambda x, s: ops.attention(*split(x), causal=True, sinks=s, return_lse=True),
        lambda x, s: _formula(*split(x), causal=True, sinks=s),
        [leaf, sinks],
        limit,
    )


def test_the_result_has_the_memory_order_of_q(where):
    for layout in ("fused rows", "heads first"):
        leaf, split = _qkv(layout, where)
        q, k, v = split(leaf)
        out = ops.attention(q, k, v)
        assert out.transpose(1, 2).is_contiguous() == (layout == "heads first")
        assert out.is_contiguous() == (layout == "fused rows")
        got = ops.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
        )
        torch.testing.assert_close(got.transpose(1, 2), out)
        assert got.stride() == out.transpose(1, 2).stride()


@pytest.mark.parametrize("options", [*_OPTIONS, {"causal": True, "heads_first": True}], ids=str)
def test_gradcheck_in_float64(options):
    leaves = [_leaf(2, *shape, dtype=torch.float64) for shape in ((3, 4, 3), (5, 2, 3), (5, 2, 3))]
    options = dict(options)
    if options.pop("heads_first", False):
        leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves]
        swap = lambda x: x.transpose(1, 2)  # noqa: E731
    else:
        swap = lambda x: x  # noqa: E731
    sinks = _leaf(4, dtype=torch.float64, seed=3)

    def run(q, k, v, sinks):
        out, lse = ops.attention(*map(swap, (q, k, v)), sinks=sinks, **options, return_lse=True)
        return swap(out), lse

    assert torch.autograd.gradcheck(run, (*leaves, sinks))


def test_packed_sequences_of_expanded_tensors(where):
    """Keys shared by all heads; the gradient of a mean over the tokens is one row, repeated."""
    leaves = [_leaf(29, n, 64, device=where, dtype=torch.bfloat16, seed=n) for n in (4, 1)]
    starts = torch.tensor([0, 9, 29], dtype=torch.int32, device=where)

    def gradients(keys):
        q, shared = leaves
        out = ops.attention_varlen(q, *[keys(shared)] * 2, starts, starts, 20, 20, causal=True)
        return torch.autograd.grad(out.float().mean(0).square().sum(), leaves)

    got = gradients(lambda x: x.expand(29, 4, 64))
    want = gradients(lambda x: x.repeat(1, 4, 1))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-5)


def test_packed_sequences(where):
    lens_q, lens_k = (7, 0, 20, 1, 5), (7, 4, 33, 9, 0)
    q = _leaf(sum(lens_q), 4, 16, device=where)
    k, v = (_leaf(sum(lens_k), 2, 16, device=where, seed=s) for s in (1, 2))
    sinks = _leaf(4, device=where, seed=3)
    starts = [
        torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32, device=where)
        for lens in (lens_q, lens_k)
    ]

    def formula(q, k, v, sinks):
        parts = zip(q.split(lens_q), k.split(lens_k), v.split(lens_k), strict=True)
        results = [_formula(*(x[None] for x in p), causal=True, sinks=sinks) for p in parts]
        return [torch.cat([x[0] for x in column]) for column in zip(*results, strict=True)]

    def run(q, k, v, sinks):
        options = {"causal": True, "sinks": sinks, "return_lse": True}
        return ops.attention_varlen(q, k, v, *starts, 20, 40, **options)

    _compare(run, formula, [q, k, v, sinks])


def test_what_packed_sequences_need():
    q, k = torch.ones(5, 2, 8), torch.ones(5, 1, 8)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    for x in (q[0], q[None]):
        with pytest.raises(
            ShapeError, match=r"attention_varlen: q: must have shape \(tokens, heads"
        ):
            ops.attention_varlen(x, k, k, ends, ends, 3, 3)
    with pytest.raises(ContractError, match="max_seqlen_q: must be at least 3, the longest seq"):
        ops.attention_varlen(q, k, k, ends, ends, 2, 3)
    q.requires_grad_()
    with pytest.raises(ContractError, match="max_seqlen_k: must be at least 3, the longest seq"):
        ops.attention_varlen(q, k, k, ends, ends, 3, 2).sum().backward()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(17, 17), (9, 17)])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_torchs_signature(where, lead, n, m, is_causal):
    """torch aligns a causal mask at the first key."""
    leaves = [
        _leaf(*lead, *shape, device=where, seed=s)
        for s, shape in enumerate(((4, n, 16), (2, m, 16), (2, m, 16)))
    ]
    options = {"is_causal": is_causal, "enable_gqa": True, "scale": 0.4}
    with sdpa_kernel(SDPBackend.MATH):
        _compare(
            lambda *x: [ops.scaled_dot_product_attention(*x, **options)],
            lambda *x: [_sdpa(*(y.double() for y in x), **options)],
            leaves,
        )


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (0,), (0, 3)])
def test_torchs_signature_without_queries(where, lead):
    n = 5 if 0 in lead else 0
    q, k = _leaf(*lead, 4, n, 16, device=where), _leaf(*lead, 2, 5, 16, device=where)
    out = ops.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert out.shape == q.shape
    for x, grad in zip((q, k), torch.autograd.grad(out.sum(), (q, k)), strict=True):
        assert grad.shape == x.shape and bool((grad == 0).all())


def test_what_torchs_signature_does_not_support():
    q, k = torch.ones(2, 4, 9, 8), torch.ones(2, 2, 5, 8)
    op = ops.scaled_dot_product_attention
    with pytest.raises(ContractError, match="attn_mask: must be None"):
        op(q, q, q, torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(ContractError, match=r"dropout_p: must be 0; got 0\.1"):
        op(q, q, q, dropout_p=0.1)
    with pytest.raises(ContractError, match="is_causal: must be False for 9 queries and 5 keys"):
        op(q, k, k, is_causal=True, enable_gqa=True)
    with pytest.raises(ContractError, match="enable_gqa: must be True for 4 heads"):
        op(q, k, k)
    with pytest.raises(ShapeError, match=r"v: must have shape"):
        op(q, q, q[..., :4])


def test_batch_axes_must_agree(where):
    """Merged with the tokens or the heads, other batches could pass for valid shapes."""
    x = torch.ones(2, 4, 2, 8, device=where)
    for other in (x[:1], x.reshape(4, 2, 2, 8), x.repeat(2, 1, 1, 1)):
        with pytest.raises(ShapeError, match=r"attention: k: must have shape .*; B = 2 from q"):
            ops.attention(x, other, other)
        with pytest.raises(ShapeError, match="attention: v: must have shape"):
            ops.attention(x, x, other)
    with pytest.raises(ShapeError, match=r"k: must have shape .*; B = 2 from q"):
        ops.scaled_dot_product_attention(x, x[:1], x[:1])
    with pytest.raises(ShapeError, match=r"q: must have shape \(B, Sq, H, D\); got \(4, 2, 8\)"):
        ops.attention(x[0], x[0], x[0])
    five = torch.ones(2, 3, 4, 2, 8, device=where)
    with pytest.raises(ContractError, match=r"key: must be of the leading axes \(2, 3\) of query;"):
        ops.scaled_dot_product_attention(five, five.transpose(0, 1), five)
    with pytest.raises(
        ContractError, match=r"value: must be of the leading axes .* \(6, 4, 2, 8\)"
    ):
        ops.scaled_dot_product_attention(five, five, five.reshape(6, 4, 2, 8))
    with pytest.raises(ContractError, match=r"query: must be of at least three axes.*got \(2, 8\)"):
        ops.scaled_dot_product_attention(x[0, 0], x, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 50}, {}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_half_precision(where, head_dim, options, dtype):
    """The error is that of rounding the inputs of products and the results."""
    leaves = [
        _leaf(2, 150, heads, head_dim, device=where, dtype=dtype, seed=s)
        for s, heads in enumerate((4, 2, 2))
    ]
    sinks = _leaf(4, device=where, seed=3)
    limit = 2e-3 if dtype == torch.float16 else 1.6e-2
    _compare(
        lambda q, k, v, s: ops.attention(q, k, v, sinks=s, **options, return_lse=True),
        lambda q, k, v, s: _formula(q, k, v, sinks=s, **options),
        [*leaves, sinks],
        limit,
    )


def test_sinks_of_another_dtype(where):
    x = _leaf(1, 5, 2, 8, device=where)
    sinks = _leaf(2, device=where, dtype=torch.bfloat16, seed=1)
    (got,) = torch.autograd.grad(ops.attention(x, x, x, sinks=sinks).sum(), sinks)
    (want,) = torch.autograd.grad(_formula(x, x, x, sinks=sinks)[0].sum(), sinks)
    assert got.dtype == torch.bfloat16
    _assert_close(got, want, 8e-3)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_no_tokens(where, shape, is_transposed):
    b, n, m = shape
    if is_transposed:  # an empty tensor may have any strides
        q = _leaf(b, 4, n, 16, device=where).transpose(1, 2)
        k = _leaf(b, 2, m + 1, 16, device=where)[:, :, :m].transpose(1, 2)
    else:
        q, k = _leaf(b, n, 4, 16, device=where), _leaf(b, m, 2, 16, device=where)
    sinks = _leaf(4, device=where)
    out, lse = ops.attention(q, k, k, sinks=sinks, return_lse=True)
    assert out.shape == q.shape and lse.shape == (b, n, 4)
    assert bool((out == 0).all())
    for grad in torch.autograd.grad(out.sum(), (q, k, sinks)):
        assert bool((grad == 0).all())


@pytest.mark.parametrize("needing", ["q", "k", "v", "s", "qv", "ks"])
def test_gradients_of_some_inputs(where, needing):
    shapes = {"q": (2, 6, 4, 16), "k": (2, 6, 2, 16), "v": (2, 6, 2, 16), "s": (4,)}
    tensors = {n: _leaf(*shapes[n], device=where, seed=i) for i, n in enumerate(shapes)}
    every = dict(tensors)
    for name in shapes:
        if name not in needing:
            every[name] = tensors[name].detach()
    loss = [
        ops.attention(x["q"], x["k"], x["v"], sinks=x["s"], causal=True).square().sum()
        for x in (tensors, every)
    ]
    wanted = torch.autograd.grad(loss[0], [tensors[n] for n in needing])
    for x, y in zip(torch.autograd.grad(loss[1], [every[n] for n in needing]), wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_only_lse_is_used(where):
    q = _leaf(2, 6, 4, 16, device=where)
    _, lse = ops.attention(q, q, q, return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), q)
    (want,) = torch.autograd.grad(_formula(q, q, q)[1].sum(), q)
    _assert_close(got, want)


def test_second_derivative_is_an_error(where):
    q = _leaf(1, 3, 2, 16, device=where)
    (grad,) = torch.autograd.grad(ops.attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="engine::attention_backward has no derivative"):
        grad.sum().backward()


def test_autocast(where):
    q = _leaf(1, 9, 2, 64, device=where)
    with torch.autocast(where, torch.bfloat16):
        out = ops.attention(q, q, q, causal=True)
        packed = ops.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3)
    assert out.dtype == packed.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.dtype == torch.float32
    x = q.detach().bfloat16()
    assert torch.equal(out, ops.attention(x, x, x, causal=True))


def test_autocast_leaves_float64():
    """torch's autocast casts no float64: it would lose digits that the caller asked for."""
    q = _leaf(1, 9, 2, 64).double()
    ends = torch.tensor([0, 9], dtype=torch.int32)
    want = ops.attention(q, q, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.attention(q, q, q), want)
        assert ops.attention_varlen(q[0], q[0], q[0], ends, ends, 9, 9).dtype == torch.float64
        assert _sdpa(q, q, q).dtype == torch.float64


@pytest.mark.parametrize("shape", [(), (3,), (8,), (1, 4)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_sinks_of_another_shape_are_named(where, shape, is_transposed):
    x = torch.ones(2, 4, 4, 8, device=where)
    x = x.transpose(1, 2) if is_transposed else x
    with pytest.raises(ShapeError, match=r"sinks: must have shape .*; got ") as error:
        ops.attention(x, x, x, sinks=torch.zeros(shape, device=where))
    assert str(error.value).endswith(f"got {shape}")


@pytest.mark.parametrize("shape", [(), (3,), (8, 3)])
def test_too_few_axes_are_named(where, shape):
    x = torch.ones(shape, device=where).mT if len(shape) == 2 else torch.ones(shape, device=where)
    with pytest.raises(ShapeError, match=r"q: must have shape \(B, Sq, H, D\); got \("):
        ops.attention(x, x, x)


@pytest.mark.parametrize("heads_first", [False, True])
def test_opcheck(where, heads_first):
    shapes = [(2, 6, 4, 16), (2, 6, 2, 16), (2, 6, 2, 16)]
    tensors = [_leaf(*shape, device=where, seed=i) for i, shape in enumerate(shapes)]
    if heads_first:
        tensors = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]
    sinks = _leaf(8 if heads_first else 4, device=where)
    options = (None, None, 0, 0, True, None, 0, 0.0, _PERIODIC.number, heads_first, True)
    opcheck(torch.ops.engine.attention.default, (*tensors, sinks, *options))
    opcheck(torch.ops.engine.attention.default, (*tensors, None, *options))
    tensors = [x.detach() for x in tensors]
    out, lse = torch.ops.engine.attention(*tensors, sinks.detach(), *options)
    arguments = (out, *tensors, out, lse, lse, sinks.detach(), *options)
    opcheck(torch.ops.engine.attention_sinks_backward.default, arguments)
    arguments = (out, *tensors, out, lse, None, None, *options)
    opcheck(torch.ops.engine.attention_backward.default, arguments)


def test_opcheck_of_packed_sequences(where):
    q, k = _leaf(6, 4, 16, device=where), _leaf(8, 2, 16, device=where)
    starts = [torch.tensor(x, dtype=torch.int32, device=where) for x in ([0, 2, 6], [0, 5, 8])]
    options = (*starts, 4, 5, True, None, 3, 1.5, 0, False, True)
    opcheck(torch.ops.engine.attention.default, (q, k, k.detach(), None, *options))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["fused rows", "heads first", "fused heads"])
def test_compile(where, layout, dynamic):
    leaf, split = _qkv(layout, where)
    sinks = _leaf(4, device=where, seed=3)

    def run(x, sinks):
        out = ops.attention(*split(x * 2), causal=True, window=7, sinks=sinks, pattern=_PERIODIC)
        return out.flatten(2).relu()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = [function(leaf, sinks) for function in (run, compiled)]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(x.square().sum(), (leaf, sinks)) for x in results]
    torch.testing.assert_close(*grads)


def test_compile_of_torchs_signature(where):
    q, k = _leaf(2, 4, 9, 16, device=where), _leaf(2, 2, 9, 16, device=where)

    def run(q, k):
        return ops.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), run(q, k))


def test_compile_of_packed_sequences(where):
    """Other numbers of tokens, and other bounds, need no other graph."""

    def run(q, k, ends, longest):
        options = {"causal": True, "deterministic": False}
        return ops.attention_varlen(q, k, k, ends, ends, longest, longest, **options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, longest in ((6, 4), (9, 7), (12, 8)):
        q, k = _leaf(tokens, 4, 16, device=where), _leaf(tokens, 2, 16, device=where, seed=1)
        ends = torch.tensor([0, longest, tokens], dtype=torch.int32, device=where)
        with torch._dynamo.config.patch(error_on_recompile=tokens == 12):
            got = compiled(q, k, ends, longest)
        want = run(q, k, ends, longest)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(x.square().sum(), (q, k)) for x in (got, want)]
        torch.testing.assert_close(*grads)


def test_checkpointing(where):
    q = _leaf(2, 9, 4, 16, device=where)

    def run(q):
        return ops.attention(q, q, q, causal=True)

    kept = checkpoint(run, q, use_reentrant=False)
    grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (kept, run(q))]
    assert torch.equal(*grads)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 2, 2)])
def test_vmap(where, in_dims, heads_first):
    shapes = [(2, 6, 4, 16), (2, 6, 2, 16), (2, 6, 2, 16)]
    tensors = []
    for i, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True)):
        if heads_first:
            shape = (shape[0], shape[2], shape[1], shape[3])
        shape = shape if dim is None else (*shape[:dim], 3, *shape[dim:])
        tensors.append(_leaf(*shape, device=where, seed=i).detach())
    sinks = _leaf(4, device=where, seed=9).detach()

    def run(q, k, v):
        if heads_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ops.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)

    def gradient(q, k, v):
        return torch.func.grad(lambda *x: sum(y.square().sum() for y in run(*x)), (0, 1, 2))(
            q, k, v
        )

    for function in (run, gradient):
        got = torch.vmap(function, in_dims)(*tensors)
        for i in range(3):
            one = [
                x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)
            ]
            for x, y in zip(got, function(*one), strict=True):
                torch.testing.assert_close(x[i], y, rtol=1e-5, atol=1e-5)


def test_vmap_over_packed_sequences_and_sinks(where):
    q = _leaf(3, 6, 2, 16, device=where).detach()
    sinks = _leaf(3, 2, device=where, seed=1).detach()
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=where)

    def run(q, sinks):
        return ops.attention_varlen(q, q, q, ends, ends, 4, 4, causal=True, sinks=sinks)

    got = torch.vmap(run)(q, sinks)
    torch.testing.assert_close(got, torch.stack([run(q[i], sinks[i]) for i in range(3)]))


def test_a_pattern_must_live():
    q = _leaf(1, 4, 1, 8)
    pattern = Periodic(3, 1)
    options = (None, None, 0, 0, True, None, 0, 0.0, pattern.number, False, True)
    torch.ops.engine.attention(q, q, q, None, *options)
    del pattern
    gc.collect()
    with pytest.raises(ContractError, match="its object has been deleted"):
        torch.ops.engine.attention(q, q, q, None, *options)
    out = ops.attention(q, q, q, causal=True, pattern=Periodic(3, 2))  # kept for the gradient
    gc.collect()
    assert bool(torch.autograd.grad(out.sum(), q)[0].isfinite().all())


def _pages(k, where):
    """Return (1, K, D) rows as pages of 16 in another order, and their table."""
    blocks = torch.arange(3).flip(0)
    pages = torch.zeros(4, k.shape[2], 16, k.shape[3], device=where, dtype=k.dtype)
    for i, block in enumerate(blocks.tolist()):
        rows = k[0, 16 * i : 16 * i + 16]
        pages[block, :, : len(rows)] = rows.transpose(0, 1)
    return pages, blocks.to(where, torch.int32)[None]


def test_pages(where):
    k, v = (_leaf(1, 40, 2, 64, device=where, seed=s).detach() for s in (1, 2))
    q = _leaf(1, 6, 4, 64, device=where).detach()
    sinks = _leaf(4, device=where, seed=3).detach()
    (k_pages, table), (v_pages, _) = _pages(k, where), _pages(v, where)
    lens = torch.tensor([40], dtype=torch.int32, device=where)
    want, want_lse = _formula(q, k, v, causal=True, sinks=sinks, window=20)
    options = {"sinks": sinks, "window": 20}
    got, lse = ops.attention_paged(q, k_pages, v_pages, table, lens, **options, return_lse=True)
    _assert_close(got, want)
    _assert_close(lse, want_lse)
    ends = torch.tensor([0, 6], dtype=torch.int32, device=where)
    for longest in (None, 6):
        options |= {"cu_seqlens_q": ends, "max_seqlen_q": longest}
        got = ops.attention_paged(q[0], k_pages, v_pages, table, lens, **options)
        _assert_close(got, want[0])
    out = torch.empty_like(q[0])
    assert ops.attention_paged(q[0], k_pages, v_pages, table, lens, **options, out=out) is out
    assert torch.equal(out, got)


def test_writing_out_invalidates_a_graph_that_saved_it(where):
    q = torch.zeros(1, 1, 2, 64, device=where)
    pages = torch.zeros(1, 2, 16, 64, device=where)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=where) for x in ([[0]], [3]))
    out = torch.ones_like(q)
    y = (torch.ones_like(q).requires_grad_() * out).sum()
    ops.attention_paged(q, pages, pages, table, lens, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_pages_have_no_derivative(where):
    q = _leaf(1, 1, 2, 64, device=where)
    pages = torch.zeros(1, 2, 16, 64, device=where)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=where) for x in ([[0]], [3]))
    out = ops.attention_paged(q, pages, pages, table, lens)
    with pytest.raises(NotImplementedError, match="attention_paged has no derivative"):
        out.sum().backward()
    out = torch.empty_like(q)
    for query, cache in ((q, pages), (q.detach(), pages.clone().requires_grad_())):
        with pytest.raises(ContractError, match="out: must be None if an argument requires a grad"):
            ops.attention_paged(query, cache, pages, table, lens, out=out)
    arguments = (q.detach(), pages, pages, table, lens, None, None, None, None, 1, None, 0, 0.0)
    opcheck(torch.ops.engine.attention_paged.default, arguments)
    opcheck(torch.ops.engine.attention_paged_out.default, (torch.empty_like(q), *arguments))


@contextlib.contextmanager
def _no_synchronisation():
    """Let torch raise an error if one of its operations synchronises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # leaves of two streams
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"pattern": _BLOCKS}], ids=str)
def test_cuda_graph(options):
    """Neither a pass nor its first call reads from the GPU; a replay computes on new values."""
    shapes = ((2, 150, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64), (4,))
    leaves = [_leaf(*shape, device="cuda", seed=i) for i, shape in enumerate(shapes)]
    static = [x.detach().bfloat16().requires_grad_() for x in leaves]

    def run(q, k, v, sinks):
        out = ops.attention(q, k, v, causal=True, sinks=sinks, **options)
        return out, *torch.autograd.grad(out, (q, k, v, sinks), out.detach())

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), _no_synchronisation():
        run(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(*static)
    for seed in (5, 6):
        with torch.no_grad():
            for x in static:
                x.copy_(_leaf(*x.shape, device="cuda", seed=seed))
        graph.replay()
        for x, y in zip(results, run(*static), strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own call
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's first, of no kernel
def test_compiled_into_cuda_graphs():
    """The first call allocates from the graph's pool, in which only its results may stay."""
    compiled = torch.compile(
        lambda x: ops.attention(x, x, x, causal=True), fullgraph=True, backend="cudagraphs"
    )
    for seed in range(4):
        x = _leaf(2, 256, 4, 128, device="cuda", dtype=torch.bfloat16, seed=seed).detach()
        assert torch.equal(compiled(x), ops.attention(x, x, x, causal=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # leaves of two streams
def test_two_streams():
    q = _leaf(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).detach().requires_grad_()
    k = q.detach()[:, :, :2]
    want = ops.attention(q, k, k, causal=True)
    (want_grad,) = torch.autograd.grad(want, q, want.detach())
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                out = ops.attention(q, k, k, causal=True)
                results.append((out, *torch.autograd.grad(out, q, out.detach())))
    torch.cuda.synchronize()
    for out, grad in results:
        assert torch.equal(out, want) and torch.equal(grad, want_grad)
