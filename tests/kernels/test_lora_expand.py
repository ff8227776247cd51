"""lora_expand: the kernel against its mirror, the mirror against a loop, parts, the contract."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import accumulation_dtype, np_dtype
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_lora import adapters_of, sorted_by_adapter
from engine.testing.tolerances import assert_close

# (T, S, rank, bounds): decoding, both tile sizes, prompts, many adapters, ranks of one step of the
# tensor cores and of several, parts no vector divides, empty.
SHAPES = (
    (1, 1, 8, (64,)),
    (64, 16, 16, (512, 640, 768)),
    (17, 3, 32, (300, 600)),
    (128, 5, 64, (264,)),
    (129, 4, 48, (128, 520)),
    (700, 3, 16, (96, 112)),
    (300, 256, 8, (40,)),
    (20, 256, 256, (33, 34, 290)),
    (150, 2, 200, (264, 300)),
    (33, 2, 5, (7, 19)),
    (80, 3, 19, (1, 2, 3, 4, 5, 6, 7, 278)),
    (0, 2, 8, (64,)),
)


def _inputs(shape, dtype, num_splits=2):
    """Return h (NaN for tokens without an adapter), b, order and offsets."""
    num_tokens, num_adapters, rank, bounds = shape
    real = accumulation_dtype(np_dtype(dtype))
    h = cases.normal((num_splits, num_tokens, len(bounds) * rank), "float32", seed=1).astype(real)
    b = cases.normal((num_adapters, bounds[-1], rank), dtype, seed=2)
    adapters = adapters_of(num_tokens, num_adapters, seed=3)
    h[:, adapters < 0] = np.nan
    return h, b, *sorted_by_adapter(adapters, num_adapters)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("accumulate", [False, True])
@pytest.mark.grid("num_splits", [1, 2, 7])
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, num_splits, accumulate, dtype):
    h, b, order, offsets = _inputs(shape, dtype, num_splits)
    y = cases.normal((shape[0], shape[3][-1]), dtype, seed=4)
    options = {"bounds": shape[3], "accumulate": accumulate}
    want = reference.lora_expand(h, b, order, offsets, **options, out=y.copy())
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    if accumulate:
        out[...] = xp.asarray(y)
    arrays = cases.to_module(xp, h, b, order, offsets)
    assert kernels.lora_expand(*arrays, **options, out=out) is out
    assert_close(out, want, reduction=shape[2])
    others = order[offsets[-1] :]
    kept = y[others] if accumulate else np.zeros_like(y[others])
    np.testing.assert_array_equal(to_numpy(out)[others], kept)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("accumulate", [False, True])
@pytest.mark.grid("begin", [16, 3])
def test_views(xp, begin, accumulate, dtype):
    """The result is columns of wider rows, aligned or not; the others stay NaN."""
    h, b, order, offsets = _inputs((50, 3, 16, (40, 296)), dtype)
    y = cases.normal((50, 296), dtype, seed=4)
    options = {"bounds": (40, 296), "accumulate": accumulate}
    want = reference.lora_expand(h, b, order, offsets, **options, out=y.copy())
    wide = xp.full((50, 328), float("nan"), y.dtype)
    out = wide[:, begin : begin + 296]
    if accumulate:
        out[...] = xp.asarray(y)
    kernels.lora_expand(*cases.to_module(xp, h, b, order, offsets), **options, out=out)
    assert_close(out.copy(), want, reduction=16)
    assert bool(xp.isnan(wide[:, :begin]).all()) and bool(xp.isnan(wide[:, begin + 296 :]).all())


@pytest.mark.grid("dtype", cases.DTYPES)
def test_without_out(xp, dtype):
    h, b, order, offsets = _inputs((30, 3, 16, (72,)), dtype)
    want = reference.lora_expand(h, b, order, offsets, bounds=(72,))
    got = kernels.lora_expand(*cases.to_module(xp, h, b, order, offsets), bounds=(72,))
    assert_close(got, want, reduction=16)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("accumulate", [False, True])
@pytest.mark.grid("shape", SHAPES)
def test_bias(xp, shape, accumulate, dtype):
    """It is added to rows with an adapter, once; the mirror's rows without h are the bias alone."""
    h, b, order, offsets = _inputs(shape, dtype)
    bias = cases.normal(b.shape[:2], dtype, seed=5)
    y = cases.normal((shape[0], shape[3][-1]), dtype, seed=4)
    options = {"bounds": shape[3], "accumulate": accumulate}
    want = reference.lora_expand(h, b, order, offsets, bias=bias, **options, out=y.copy())
    out = xp.asarray(y)
    arrays = cases.to_module(xp, h, b, order, offsets)
    kernels.lora_expand(*arrays, bias=xp.asarray(bias), **options, out=out)
    assert_close(out, want, reduction=shape[2])
    alone = reference.lora_expand(np.zeros_like(h), b, order, offsets, bias=bias, bounds=shape[3])
    for adapter, (begin, end) in enumerate(itertools.pairwise(offsets)):
        for token in order[begin:end]:
            np.testing.assert_array_equal(alone[token], bias[adapter])


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("rank", [16, 96])
def test_bits_depend_on_no_other_token(xp, rank, dtype):
    """A token alone, in a small batch and in a large one of other order."""
    h, b, _, _ = _inputs((300, 3, rank, (256, 300)), dtype)
    adapters = np.arange(300) % 4 - 1
    h = np.nan_to_num(h)
    results = []
    for tokens in (np.arange(300), np.arange(299, -1, -1), np.arange(100), np.array([7])):
        lists = sorted_by_adapter(adapters[tokens], 3)
        arrays = cases.to_module(xp, h[:, tokens], b, *lists)
        got = to_numpy(kernels.lora_expand(*arrays, bounds=(256, 300)))
        results.append(got[np.flatnonzero(tokens == 7)[0]])
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.grid("dtype", cases.DTYPES)
def test_after_lora_shrink(xp, dtype):
    """Both launches: y[t] + B[s] (A[s] x[t]), against a product in float64."""
    num_tokens, num_adapters, rank, bounds = (64, 4, 16, (128, 160, 192))
    x = cases.normal((num_tokens, 512), dtype, seed=5)
    a = cases.normal((num_adapters, 3 * rank, 512), dtype, seed=6, scale=512**-0.5)
    b = cases.normal((num_adapters, 192, rank), dtype, seed=7)
    y = cases.normal((num_tokens, 192), dtype, seed=8)
    adapters = adapters_of(num_tokens, num_adapters, seed=9)
    want = np.float64(y)
    for t, s in enumerate(adapters):
        for part, (begin, end) in enumerate(itertools.pairwise((0, *bounds))):
            if s >= 0:
                low = np.float64(a[s, part * rank : (part + 1) * rank]) @ np.float64(x[t])
                want[t, begin:end] += np.float64(b[s, begin:end]) @ low
    lists = cases.to_module(xp, *sorted_by_adapter(adapters, num_adapters))
    out = xp.asarray(y)
    h = kernels.lora_shrink(*cases.to_module(xp, x, a), *lists, pdl=True)
    options = {"bounds": bounds, "accumulate": True, "pdl": True}
    kernels.lora_expand(h, xp.asarray(b), *lists, **options, out=out)
    assert_close(out, want.astype(y.dtype), reduction=512)


@pytest.mark.parametrize("adapters", [[-1] * 9, [2] * 9, [-1] * 8 + [0]], ids=["none", "one", "1"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_uneven_batches(xp, adapters, accumulate):
    h, b, _, _ = _inputs((9, 3, 16, (24,)), "bfloat16")
    h = np.nan_to_num(h)
    h[:, np.array(adapters) < 0] = np.nan
    order, offsets = sorted_by_adapter(adapters, 3)
    y = cases.normal((9, 24), "bfloat16", seed=4)
    options = {"bounds": (24,), "accumulate": accumulate}
    want = reference.lora_expand(h, b, order, offsets, **options, out=y.copy())
    out = xp.asarray(y)
    kernels.lora_expand(*cases.to_module(xp, h, b, order, offsets), **options, out=out)
    assert_close(out, want, reduction=16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [24, 200])
def test_a_captured_graph_follows_the_lists(cp, num_tokens):
    """Both ops read the lists on the device: a replay with other adapters gives their results."""
    x = cases.normal((num_tokens, 512), "bfloat16", seed=1)
    a = cases.normal((5, 32, 512), "bfloat16", seed=2, scale=512**-0.5)
    b = cases.normal((5, 600, 16), "bfloat16", seed=3)
    inputs = cases.to_module(cp, x, a)
    weight = cp.asarray(b)
    order, offsets = cases.to_module(cp, *sorted_by_adapter([-1] * num_tokens, 5))
    h = cp.zeros((4, num_tokens, 32), np.float32)
    out = cp.zeros((num_tokens, 600), weight.dtype)

    def launch():
        kernels.lora_shrink(*inputs, order, offsets, num_splits=4, pdl=True, out=h)
        options = {"bounds": (280, 600), "pdl": True, "out": out}
        kernels.lora_expand(h, weight, order, offsets, **options)

    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()  # wait for the copies above, on another stream
    with stream:
        launch()  # warm-up: compile
        stream.synchronize()
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
        for seed in range(4):
            lists = sorted_by_adapter(adapters_of(num_tokens, 5, seed), 5)
            order.set(lists[0])
            offsets.set(lists[1])
            graph.launch(stream)
            stream.synchronize()
            low = reference.lora_shrink(x, a, *lists, num_splits=4)
            want = reference.lora_expand(low, b, *lists, bounds=(280, 600))
            assert_close(out, want, reduction=512)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
def test_damaged_lists_write_nothing_else(cp, accumulate):
    """Tokens out of range are skipped, and offsets out of range clamped."""
    h, b, order, offsets = _inputs((40, 3, 16, (72,)), "float16")
    options = {"bounds": (72,), "accumulate": accumulate}
    y = cases.normal((40, 72), "float16", seed=4)
    want = reference.lora_expand(h, b, order, offsets, **options, out=y.copy())
    damaged = order.copy()
    damaged[5] = 40
    damaged[6] = -1
    out, buffer = cases.guarded(cp, (40, 72), np.float16)
    out[...] = cp.asarray(y)
    kernels.lora_expand(*cases.to_module(cp, h, b, damaged, offsets), **options, out=out)
    want[order[[5, 6]]] = y[order[[5, 6]]]
    assert_close(out, want, reduction=16)
    for bad in ([-5, 2**31 - 1, -(2**31), 7], [30, 20, 10, 0]):
        lists = cases.to_module(cp, order, np.array(bad, np.int32))
        kernels.lora_expand(*cases.to_module(cp, h, b), *lists, **options, out=out)
    assert bool(cp.isnan(buffer[:64]).all()) and bool(cp.isnan(buffer[-64:]).all())


def test_mirror_is_a_loop():
    """With float16, the sum of the splits is rounded before the product."""
    for dtype in ("float32", "float16"):
        h, b, order, offsets = _inputs((7, 2, 3, (4, 6)), dtype)
        adapters = adapters_of(7, 2, seed=3)
        got = reference.lora_expand(h, b, order, offsets, bounds=(4, 6))
        low = (h[0] + h[1]).astype(b.dtype).astype(np.float64)
        for t, n in np.ndindex(got.shape):
            part = 0 if n < 4 else 1
            row = low[t, 3 * part : 3 * part + 3]
            want = np.float64(b[adapters[t], n]) @ row if adapters[t] >= 0 else 0.0
            assert_close(got[t, n], np.asarray(want, b.dtype)[()], reduction=3)


def test_contract(xp):
    shape = (5, 2, 4, (8, 16))
    h, b, order, offsets = cases.to_module(xp, *_inputs(shape, "float16"))

    def call(h=h, b=b, bounds=(8, 16), **options):
        return kernels.lora_expand(h, b, order, offsets, bounds=bounds, **options)

    with pytest.raises(DTypeError, match="h: must be float32; got float16"):
        call(h=h.astype(np.float16))
    with pytest.raises(ContractError, match=r"R: must be len\(bounds\) \* r = 4; got 8"):
        call(bounds=(16,))
    with pytest.raises(ContractError, match=r"bounds: must be up to N = 16; got \(8, 15\)"):
        call(bounds=(8, 15))
    for bad in ((16, 8), (0, 16), (8, 8)):
        with pytest.raises(ContractError, match="bounds: must be ascending from more than 0"):
            call(bounds=bad)
    for bad in (16, (8, 16.0), (True, 16)):
        with pytest.raises(ContractError, match="bounds: must be a tuple of int"):
            call(bounds=bad)
    for bad in ((), tuple(range(1, 10))):
        with pytest.raises(ContractError, match="bounds: must be of 1 to 8 parts"):
            call(bounds=bad)
    with pytest.raises(ContractError, match="out: must be given with accumulate=True; got None"):
        call(accumulate=True)
    with pytest.raises(ShapeError, match=r"out: must have shape \(5, 16\)"):
        call(out=xp.zeros((5, 8), b.dtype))
    with pytest.raises(ContractError, match="r: must be from 1 to 256; got 257"):
        call(h=xp.zeros((1, 5, 514), h.dtype), b=xp.zeros((2, 16, 257), b.dtype))
    with pytest.raises(ContractError, match="P: must be from 1 to 64; got 65"):
        call(h=xp.zeros((65, 5, 8), h.dtype))
