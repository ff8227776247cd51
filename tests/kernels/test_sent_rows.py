"""Products with `peers`: rows sent while the kernel runs arrive once, and as they were stored."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError
from engine.kernels.gemm.sm90 import HopperConfig, choose_hopper, choose_sender
from engine.kernels.gemm.w8_sm90 import choose_w8_hopper, choose_w8_sender
from engine.testing import cases
from engine.testing.tolerances import assert_close
from tests.cases_collectives import Ranks

FORMATS = ("bfloat16", "float16", "fp8", "fp8_block", "int8")
# Rows, columns and features. Tiles of 128 x 128; 256 x 128; the same with a tile past the columns.
SHAPES = ((2100, 2600, 2048), (3000, 4096, 1024), (3000, 2432, 1024))
CAPACITY = 32 << 20
NUMBERS = {"eps": 1e-5, "x_scale": 0.5, "weight_offset": 1.0}


def _op(form):
    """Return the name of the op for a weight in `form`."""
    return "gemm" if form in ("bfloat16", "float16") else f"gemm_{form.removesuffix('_block')}"


def _operands(form, shape, seed):
    """Return the op's arrays (x, weight, scales) of one rank."""
    m, n, k = shape
    dtype = form if _op(form) == "gemm" else "bfloat16"
    x = cases.normal((m, k), dtype, seed=seed)
    weight = cases.normal((n, k), dtype, seed=seed + 1)
    if form == dtype:
        return x, weight
    codes, scales = reference.quantize_rows(weight, dtype=form.removesuffix("_block"))
    if form == "fp8_block":
        scales = abs(cases.normal((-(-n // 128), k // 128), "float32", seed=seed + 2))
    return x, codes, scales.reshape(-1) if form != "fp8_block" else scales


def _send(ranks, form, operands, ys):
    """Launch each rank's product; return how many rows each has sent."""
    sent = []
    for r, arrays in enumerate(operands):
        with ranks.on(r) as memory:
            getattr(kernels, _op(form))(*arrays, peers=memory, out=ys[r])
            sent.append(0 if memory.sent is None else memory.sent.num_sent // ys[r].shape[1])
    return sent


@pytest.mark.gpu
@pytest.mark.grid("form", FORMATS)
@pytest.mark.grid("size", (2, 3))
@pytest.mark.grid("shape", SHAPES)
def test_rows_arrive_as_they_are_stored(cp, form, size, shape):
    """In one shot with two ranks, in two with three; all buffers are used in turn."""
    m, n, k = shape
    ranks = Ranks(size, capacity=CAPACITY)
    arrays = [_operands(form, shape, seed=7 * r) for r in range(size)]
    operands = list(zip(*(ranks.move(each) for each in zip(*arrays, strict=True)), strict=True))
    empty = np.full((m, n), 7, arrays[0][0].dtype)
    ys, totals = ranks.move([empty] * size), ranks.move([empty] * size)
    for turn in range(4):
        sent = _send(ranks, form, operands, ys)
        assert all(m // 4 < rows < m for rows in sent)
        ranks.run(lambda r, memory: kernels.all_reduce(ys[r], memory, out=totals[r]))
        parts = [to_numpy(y) for y in ys]
        want = reference.all_reduce(parts[0], parts)
        for total in totals:
            np.testing.assert_array_equal(to_numpy(total), want)
        if turn == 0:
            mirror = getattr(reference, _op(form))
            assert_close(parts[1], mirror(*arrays[1]), reduction=k)
        for r, (x, *_) in enumerate(operands):
            with ranks.on(r):
                x += x  # other values in the next turn
        ranks.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
def test_rows_are_sent_once(cp, form):
    """What has been sent is not read from the result again."""
    ranks = Ranks(2, capacity=CAPACITY)
    arrays = [_operands(form, SHAPES[0], seed=7 * r) for r in range(2)]
    operands = list(zip(*(ranks.move(each) for each in zip(*arrays, strict=True)), strict=True))
    ys = ranks.move([np.zeros(SHAPES[0][:2], arrays[0][0].dtype)] * 2)
    sent = _send(ranks, form, operands, ys)
    ranks.synchronize()
    parts = [to_numpy(y) for y in ys]
    for r, rows in enumerate(sent):
        with ranks.on(r):
            ys[r][:rows] = 0
    ranks.run(lambda r, memory: kernels.all_reduce(ys[r], memory, out=ys[r]))
    for r, rows in enumerate(sent):
        np.testing.assert_array_equal(to_numpy(ys[r])[:rows], parts[1 - r][:rows])


@pytest.mark.gpu
def test_rows_for_a_norm(cp):
    m, n, _ = shape = SHAPES[1]
    ranks = Ranks(2, capacity=CAPACITY)
    arrays = [_operands("bfloat16", shape, seed=7 * r) for r in range(2)]
    operands = list(zip(*(ranks.move(each) for each in zip(*arrays, strict=True)), strict=True))
    residual = cases.normal((m, n), "bfloat16", seed=3)
    weight = cases.normal((n,), "bfloat16", seed=4)
    residuals, weights = ranks.move([residual] * 2), ranks.move([weight] * 2)
    ys, outs, hs = (ranks.move([np.full_like(residual, 7)] * 2) for _ in range(3))
    with ranks.on(0):  # preload: loading later would deadlock with a waiting rank
        kernels.rmsnorm(ys[0], weights[0], residual=residuals[0])

    def add(r, memory):
        where = {"out": outs[r], "residual_out": hs[r]}
        kernels.all_reduce_rmsnorm(ys[r], memory, residuals[r], weights[r], **where, **NUMBERS)

    for _ in range(4):
        assert all(m // 4 < rows < m for rows in _send(ranks, "bfloat16", operands, ys))
        ranks.run(add)
        parts = [to_numpy(y) for y in ys]
        total = cp.asarray(reference.all_reduce(parts[0], parts))
        want = kernels.rmsnorm(total, cp.asarray(weight), residual=cp.asarray(residual), **NUMBERS)
        for got in zip(outs, hs, strict=True):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@pytest.mark.gpu
def test_what_was_sent_must_be_summed_next(cp):
    ranks = Ranks(2, capacity=CAPACITY)
    x, weight = map(cp.asarray, _operands("bfloat16", SHAPES[0], seed=0))
    with ranks.on(0) as memory:
        y = kernels.gemm(x, weight, peers=memory)
        for call in (
            lambda: kernels.all_reduce(y[1:], memory),
            lambda: kernels.all_gather(y, memory),
        ):
            with pytest.raises(ContractError, match=f"begun to send, of {y.size} elements"):
                call()
        with pytest.raises(ContractError, match="must have summed the result"):
            kernels.gemm(x, weight, peers=memory)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"deterministic": True}, {"activation": "silu"}, {"out_dtype": "float32"}, {"residual": True}],
)
def test_other_products_send_nothing(cp, options):
    ranks = Ranks(2, capacity=CAPACITY)
    x, weight = map(cp.asarray, _operands("bfloat16", SHAPES[0], seed=0))
    if "residual" in options:
        options = {"residual": cp.zeros(SHAPES[0][:2], x.dtype)}
    with ranks.on(0) as memory:
        kernels.gemm(x, weight, peers=memory, **options)
        kernels.gemm(x[:64], weight, peers=memory)
        kernels.gemm(x, weight[:1024], peers=memory)
        assert memory.sent is None


def test_numpy_arrays_are_not_sent(xp):
    x, weight = (cases.normal((2, 8), "float32", seed=s) for s in (1, 2))
    np.testing.assert_array_equal(kernels.gemm(x, weight, peers=object()), kernels.gemm(x, weight))


@pytest.mark.parametrize(
    "config",
    [
        HopperConfig(256, 128, cluster_n=2),
        HopperConfig(128, 128, cluster_m=2),
        HopperConfig(128, 128),
    ],
)
@pytest.mark.parametrize("shape", [(64, 4096), (1100, 2600), (2100, 2600), (8192, 4096)])
def test_sent_rows_are_followed_by_another_tile(config, shape):
    """In the order of the tile scheduler, with bands of one row of super-tiles."""
    m, n = shape
    height = config.tile_m * config.cluster_m
    columns = -(-n // (config.tile_n * config.cluster_n))
    count = -(-m // height) * columns
    step = min(count, config.max_clusters(132))
    last = {index for first in range(step) for index in [*range(first, count, step)][-1:]}
    rows = config.sent_rows(m, n, 132)
    assert rows == min(index // columns for index in last) * height < m


@pytest.mark.parametrize("form", FORMATS)
def test_the_tiles_of_these_tests(form):
    chosen = []
    for m, n, k in SHAPES:
        if _op(form) == "gemm":
            plain = choose_hopper(m, n, k, 132)
            config, rows = choose_sender(plain, m, n, k, 132)
        else:
            codes, _, blocks = form.partition("_")
            plain = choose_w8_hopper(codes, m, n, k, 132, has_blocks=bool(blocks))
            config, rows = choose_w8_sender(plain, m, n, k, 132)
        assert m // 4 < rows < m
        chosen.append((config.tile_m, config.tile_n))
    assert chosen == [(128, 128), (256, 128), (256, 128)]


@pytest.mark.parametrize(("m", "k"), [(512, 2048), (8192, 64)])
def test_products_that_send_nothing(m, k):
    """Too few tiles for a CTA to have another one, or too few stages in a tile."""
    plain = choose_hopper(m, 4096, k, 132)
    assert choose_sender(plain, m, 4096, k, 132) == (plain, 0)
