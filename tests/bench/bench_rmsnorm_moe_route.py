"""rmsnorm_moe_route, bfloat16: GB/s of the router's weight, vs the separate ops.

One token, and a few with a residual and codes.
"""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_moe import MOE_LAYERS
from engine.testing.tolerances import assert_close
from tests.bench.bench_gemm import filled

_FLOAT32 = np.dtype(np.float32)


def _one_kernel(top_k, x, norm_weight, weight):
    return kernels.rmsnorm_moe_route(x, norm_weight, weight, top_k, pdl=True)[0]


def _parts(top_k, x, norm_weight, weight):
    y = kernels.rmsnorm(x, norm_weight)
    logits = kernels.gemm(y, weight, out_dtype=_FLOAT32, pdl=True)
    return kernels.moe_route(logits, top_k).weights


def _check(args, result):
    _, x, norm_weight, _ = args
    assert_close(result, reference.rmsnorm(to_numpy(x), to_numpy(norm_weight)), reduction=64)


def _case(model: str) -> BenchCase:
    hidden, _, experts, top_k = MOE_LAYERS[model]

    def make(xp, seed):
        x, norm_weight = filled(xp, (1, hidden), seed), filled(xp, (hidden,), seed + 1)
        return top_k, x, norm_weight, filled(xp, (experts, hidden), seed + 2, hidden**-0.5)

    return BenchCase(
        f"{model}, E {experts}, k {top_k}, N {hidden}",
        make,
        _one_kernel,
        nbytes=2 * hidden * (experts + 2),
        baselines={"parts": _parts},
        check=_check,
    )


def _few(top_k, x, norm_weight, weight, residual):
    options = {"residual": residual, "quantize_out": True, "pdl": True}
    return kernels.rmsnorm_moe_route(x, norm_weight, weight, top_k, **options)[0]


def _few_in_parts(top_k, x, norm_weight, weight, residual):
    y, _ = kernels.rmsnorm(x, norm_weight, residual=residual)
    logits = kernels.gemm(y, weight, out_dtype=_FLOAT32, pdl=True)
    kernels.quantize_rows(y, group=128)
    return kernels.moe_route(logits, top_k).weights


def _check_few(args, result):
    _, x, norm_weight, _, residual = args
    want = reference.rmsnorm(*map(to_numpy, (x, norm_weight)), residual=to_numpy(residual))
    assert_close(result, want[0], reduction=64)


def _few_case(model: str, num_tokens: int) -> BenchCase:
    hidden, _, experts, top_k = MOE_LAYERS[model]

    def make(xp, seed):
        shapes = (num_tokens, hidden), (hidden,), (experts, hidden), (num_tokens, hidden)
        return top_k, *(filled(xp, shape, seed + i) for i, shape in enumerate(shapes))

    return BenchCase(
        f"{model}, T {num_tokens}",
        make,
        _few,
        nbytes=2 * hidden * experts + 9 * hidden * num_tokens,
        baselines={"parts": _few_in_parts},
        check=_check_few,
    )


CASES = [_case(model) for model in MOE_LAYERS]
CASES += [_few_case("Qwen3-30B-A3B", num_tokens) for num_tokens in (8, 16, 64, 256)]
