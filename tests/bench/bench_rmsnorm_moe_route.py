"""rmsnorm_moe_route, bfloat16, one token: GB/s of the router's weight, vs the separate ops."""

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


CASES = [_case(model) for model in MOE_LAYERS]
