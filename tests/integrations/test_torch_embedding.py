"""embedding beside torch's own: rows, the table's gradient, ids that have no row."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.library import opcheck  # noqa: E402

from engine.integrations import torch as ops  # noqa: E402

F = torch.nn.functional
VOCAB, WIDTH = 50, 24


def _problem(where="cpu", dtype=torch.float32, tokens=4000):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, WIDTH, generator=generator).to(where, dtype).requires_grad_()
    ids = torch.randint(0, VOCAB, (tokens // 4, 4), generator=generator).to(where)
    return ids, table


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_and_gradient_are_torch_s(where, dtype, id_dtype, padding_idx):
    ids, table = _problem(where, dtype)
    out = ops.embedding(ids.to(id_dtype), table, padding_idx=padding_idx)
    want = F.embedding(ids, table, padding_idx=padding_idx)
    assert torch.equal(out, want)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, table, dout)[0]
    exact = torch.zeros(VOCAB, WIDTH, dtype=torch.float64, device=where)
    exact.index_add_(0, ids.flatten(), dout.flatten(0, 1).double())
    if padding_idx is not None:
        exact[padding_idx] = 0
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, exact.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-4
    )


def test_wrong_arguments():
    ids, table = _problem()
    with pytest.raises(TypeError, match="embedding: token_ids: must be int64 or int32; got float"):
        ops.embedding(ids.float(), table)
    with pytest.raises(ValueError, match="padding_idx: must be from -50 to 49; got 50"):
        ops.embedding(ids, table, padding_idx=VOCAB)


def test_ids_outside_the_table(where):
    ids, table = _problem(where)
    bad = torch.tensor([-1, VOCAB, 2**32 + 1, -(2**40)], device=where)
    mixed = torch.cat([bad, ids.flatten()])
    out = ops.embedding(mixed, table)
    assert out[:4].isnan().all() and not out[4:].isnan().any()
    (got,) = torch.autograd.grad(out, table, torch.ones_like(out))
    assert torch.equal(got, torch.autograd.grad(F.embedding(ids, table).sum(), table)[0])


def test_scale(where):
    ids, table = _problem(where)
    out = ops.embedding(ids, table, scale=3.0)
    assert torch.equal(out, 3 * F.embedding(ids, table))
    (got,) = torch.autograd.grad(out.sum(), table)
    assert torch.equal(got, 3 * torch.autograd.grad(F.embedding(ids, table).sum(), table)[0])


def test_gradients_are_derivatives():
    ids, table = _problem(dtype=torch.float64, tokens=12)
    run = partial(ops.embedding, scale=1.5, padding_idx=int(ids[0, 0]))
    assert torch.autograd.gradcheck(lambda table: run(ids, table)[1:], table)
    assert torch.autograd.gradgradcheck(partial(ops.embedding, ids), table)


def test_transforms_of_the_operator(where):
    ids, table = _problem(where)
    compiled = torch.compile(ops.embedding, fullgraph=True, backend="aot_eager")
    out = compiled(ids, table)
    assert torch.equal(out, ops.embedding(ids, table))
    (got,) = torch.autograd.grad(out.sum(), table)
    want = torch.autograd.grad(F.embedding(ids, table).sum(), table)[0]
    assert torch.equal(got, want)
    assert torch.equal(torch.vmap(ops.embedding, (0, None))(ids, table), out)

    def loss(table, ids):
        return ops.embedding(ids, table).sum()

    assert torch.equal(torch.func.grad(loss)(table, ids), want)
    per_row = torch.vmap(torch.func.grad(loss), (None, 0))(table, ids[:3])
    assert torch.equal(per_row.sum(0), torch.func.grad(loss)(table, ids[:3]))
    opcheck(torch.ops.engine.embedding.default, (ids.flatten().int(), table, 2.0, 3))


def test_the_gradient_is_reproducible(where):
    ids, table = _problem(where, tokens=40000)
    dout = torch.randn(10000, 4, WIDTH, device=where)
    first, *others = (
        torch.autograd.grad(ops.embedding(ids, table), table, dout)[0] for _ in range(4)
    )
    assert all(torch.equal(first, other) for other in others)
