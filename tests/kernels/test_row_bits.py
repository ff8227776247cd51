"""A row's bits with `deterministic`: alone, and among 16, 64, 256 and 4096 rows, in every format.

On the CPU the sizes are small: NumPy's mirrors multiply each row separately.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels
from engine.device import to_numpy
from engine.reference import Routing
from engine.testing import cases
from engine.testing.cases_attention import cu_seqlens, paged_cache
from engine.testing.cases_moe import routing_of
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.cases_w8 import quantized_weight
from engine.weights.stack import stack_matrices

DENSE = ("float32", "float16", "bfloat16")
BYTES = {"fp8": ("fp8", False), "fp8 blocks": ("fp8", True), "int8": ("int8", False)}
PACKED = ("int4_g128", "int4_g32_zp", "int8_g64", "mxfp4", "q4_k", "q5_1", "q6_k")
EXPERTS = ("bfloat16", "fp8_block", "mxfp4", "int4_g128", "q4_k", "int8")
# Output and input features: fewer and more than fill the chip, one and several parts of k (of which
# the last is shorter), and a remainder of every tile.
LAYERS = ((640, 4096), (4128, 1032), (96, 2056), (272, 4232))
SMALL_LAYERS = ((96, 264),)
EPILOGUES = ("none", "bias, gelu, residual", "swiglu", "float32")


def _counts(xp):
    return (1, 16, 64, 256, 4096) if xp is not np else (1, 5, 24)


def _ranges(counts):
    """Yield rows (start, stop) of every count but the last: the first, some, and the last rows."""
    total = counts[-1]
    for count in counts[:-1]:
        for start in (0, total // 3, total - count):
            yield start, start + count


def _assert_rows_keep_their_bits(product, counts):
    """Compare `product(rows)` for parts of the rows with the product of all rows."""
    whole = to_numpy(product(slice(0, counts[-1]))).view(np.uint8)
    assert (whole != whole[:1]).any()  # rows differ, so a row in the wrong place is noticed
    for start, stop in _ranges(counts):
        part = to_numpy(product(slice(start, stop))).view(np.uint8)
        np.testing.assert_array_equal(part, whole[start:stop], err_msg=f"rows {start} to {stop}")


def _product(xp, name, n, k):
    """Return `run(x, **options)` with a weight (n, k) of a format, and x's dtype."""
    if name in DENSE:
        weight = xp.asarray(cases.normal((n, k), name, seed=2, scale=k**-0.5))
        return lambda x, **options: kernels.gemm(x, weight, **options), name
    if name in BYTES:
        codes, has_blocks = BYTES[name]
        arrays = cases.to_module(xp, *quantized_weight(n, k, codes, has_blocks, seed=2))
        op = kernels.gemm_fp8 if codes == "fp8" else kernels.gemm_int8
        return lambda x, **options: op(x, *arrays, **options), "bfloat16"
    weight = weight_to(xp, random_weight(name, n, k, 2))
    return lambda x, **options: kernels.gemm_wna16(x, weight, **options), "bfloat16"


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", [*DENSE, *BYTES, *PACKED])
def test_of_a_product(xp, tier, name, epilogue):
    counts = _counts(xp)
    for n, k in LAYERS if xp is not np else SMALL_LAYERS:
        run, dtype = _product(xp, name, n, k)
        x = xp.asarray(cases.normal((counts[-1], k), dtype, seed=1))
        options = {"deterministic": True, "pdl": True}
        if epilogue == "float32":
            options["out_dtype"] = np.float32
        elif epilogue == "swiglu":
            options["activation"] = "swiglu"
        elif epilogue != "none":
            bias, residual = (cases.normal(s, dtype, seed=3) for s in ((n,), (counts[-1], n)))
            options |= {"bias": xp.asarray(bias), "activation": "gelu"}
            residual = xp.asarray(residual)

        def product(rows, run=run, x=x, options=options, n=n):
            if epilogue.endswith("residual"):
                return run(x[rows], residual=residual[rows], **options)  # noqa: B023
            return run(x[rows], **options)

        _assert_rows_keep_their_bits(product, counts)


@pytest.mark.parametrize("name", EXPERTS)
def test_of_experts(xp, tier, name):
    """Both products, and the sum over a token's experts."""
    counts = _counts(xp)
    num_experts, top_k, features, width = (9, 3, 2048, 768) if xp is not np else (5, 2, 128, 128)
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((counts[-1], num_experts)), axis=1)[:, :top_k]
    x = xp.asarray(cases.normal((counts[-1], features), "bfloat16", seed=1))
    own = {"deterministic": True, "pdl": True}
    if name == "fp8_block":
        own["quantize_x"] = True

    def weight(rows, k):
        if name == "bfloat16":
            numbers = cases.normal((num_experts, rows, k), name, seed=rows, scale=k**-0.5)
            return xp.asarray(numbers)
        parts = [random_weight(name, rows, k, seed) for seed in range(num_experts)]
        return weight_to(xp, stack_matrices(parts))

    first, second = weight(2 * width, features), weight(features, width)

    def product(rows):
        routing = routing_of(chosen[rows], num_experts, seed=0)
        weights = np.linspace(0.2, 0.9, top_k, dtype=np.float32)
        weights = np.broadcast_to(weights, routing.weights.shape).copy()
        routing = Routing(*cases.to_module(xp, *routing._replace(weights=weights)))
        inner = kernels.moe_gemm(x[rows], first, routing, activation="swiglu", **own)
        return kernels.moe_gemm_combine(inner, second, routing, **own)

    _assert_rows_keep_their_bits(product, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_of_attention(cp, tier, head_dim):
    """Sequences of 4,300 keys: tokens decoded one by one, in chunks, and beside other sequences."""
    num_keys, num_tokens = 4300, 4096
    lens = (num_keys, 700, 33)
    k, v, tables, _ = paged_cache(lens, 2, 16, head_dim, "bfloat16", 2)
    q = cases.normal((num_tokens, 8, head_dim), "bfloat16", 1)
    q, k, v, tables = cases.to_module(cp, q, k, v, tables)

    def attend(q, tokens, contexts):
        return kernels.attention_prefill(
            q,
            k,
            v,
            cu_seqlens_q=cp.asarray(cu_seqlens(tokens)),
            block_tables=tables[: len(tokens)],
            context_lens=cp.asarray(contexts, dtype=np.int32),
            num_splits=1,
        )

    def product(rows):
        count = rows.stop - rows.start
        return attend(q[rows], [count], [num_keys - num_tokens + rows.stop])

    _assert_rows_keep_their_bits(product, (1, 16, 64, 256, num_tokens))
    beside = attend(cp.concatenate((q[-1:], q[:1], q[:30])), [1, 1, 30], lens)
    alone = product(slice(num_tokens - 1, num_tokens))
    assert bool((beside[:1].view(np.uint16) == alone.view(np.uint16)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", DENSE)
def test_of_a_product_per_head(cp, dtype, is_transposed):
    x = cp.asarray(cases.normal((4096, 16, 512), dtype, seed=1))
    shape = (16, 512, 128) if is_transposed else (16, 128, 512)
    weight = cp.asarray(cases.normal(shape, dtype, seed=2))
    weight = weight.transpose(0, 2, 1) if is_transposed else weight
    _assert_rows_keep_their_bits(
        lambda rows: kernels.head_gemm(x[rows], weight), (1, 16, 64, 256, 4096)
    )


@pytest.mark.parametrize("columns", [128, 1024, 4096, 14336])
def test_of_norms_and_codes(xp, columns):
    """The norm, the addition before it, and the quantization of its rows."""
    counts = _counts(xp)
    x, residual = (cases.normal((counts[-1], columns), "bfloat16", seed=seed) for seed in (1, 2))
    weight = cases.normal((columns,), "bfloat16", seed=3, mean=1.0)
    x, residual, weight = cases.to_module(xp, x, residual, weight)
    products = [
        lambda rows: kernels.rmsnorm(x[rows], weight),
        lambda rows: kernels.rmsnorm(x[rows], weight, residual=residual[rows].copy())[0],
        lambda rows: kernels.quantize_rows(x[rows], dtype="fp8")[0],
        lambda rows: kernels.quantize_rows(x[rows], dtype="fp8")[1],
        lambda rows: kernels.quantize_rows(x[rows], dtype="fp8", group=128)[0],
        lambda rows: kernels.quantize_rows(x[rows], dtype="int8", group=128)[1],
        lambda rows: kernels.rmsnorm_quantize(x[rows], weight, dtype="fp8", group=128)[0],
    ]
    for product in products:
        _assert_rows_keep_their_bits(product, counts)
