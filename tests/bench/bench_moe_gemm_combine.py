"""moe_gemm_combine, bfloat16: GB/s of the experts' second matrices, vs two separate kernels."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.reference import Routing
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_moe import MOE_LAYERS, routing_of
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS
from engine.weights.stack import stack_matrices
from tests.bench.bench_gemm import filled

_MODELS = (("Qwen3-30B-A3B", "fp8_block"), ("gpt-oss-20b", "mxfp4"))
_TOKENS = (1, 2, 4, 8)


def _one_kernel(x, weight, residual, *routing):
    own = Routing(*routing)
    return kernels.moe_gemm_combine(x, weight, own, residual=residual, pdl=True)


def _two_kernels(x, weight, residual, *routing):
    own = Routing(*routing)
    pairs = kernels.moe_gemm(x, weight, own, scatter=True, pdl=True)
    return kernels.moe_combine(pairs.reshape(*own.experts.shape, -1), residual=residual)


def _case(model: str, name: str, num_tokens: int) -> BenchCase:
    """Give every expert its own copy of the same matrix."""
    hidden, width, experts, top_k = MOE_LAYERS[model]
    pairs = num_tokens * top_k

    def route(seed):
        return reference.moe_route(cases.normal((num_tokens, experts), "float32", seed), top_k)

    def make(xp, seed):
        one = weight_to(xp, random_weight(name, hidden, width, seed))
        x, residual = (filled(xp, (n, w), seed) for n, w in ((pairs, width), (num_tokens, hidden)))
        return x, stack_matrices([one] * experts), residual, *cases.to_module(xp, *route(seed))

    def check(args, result):
        x, _, residual, *routing = args
        experts_of, weights, *_ = map(to_numpy, routing)
        touched, renamed = np.unique(experts_of, return_inverse=True)
        few = routing_of(renamed.reshape(experts_of.shape), len(touched))
        matrix = stack_matrices([random_weight(name, hidden, width, 0)] * len(touched))
        want = reference.moe_gemm_combine(
            to_numpy(x).astype(np.float32),
            matrix,
            few._replace(weights=weights),
            residual=to_numpy(residual).astype(np.float32),
        )
        assert_close(to_numpy(result), want.astype(result.dtype), reduction=width * top_k)

    touched = len(np.unique(route(0).experts))
    nbytes = touched * FORMATS[name].num_bytes((hidden, width))
    return BenchCase(
        f"{model} {name} T={num_tokens}",
        make,
        _one_kernel,
        nbytes=nbytes + 2 * (pairs * width + 2 * num_tokens * hidden),
        flops=2 * pairs * hidden * width,
        baselines={"two kernels": _two_kernels},
        check=check,
    )


CASES = [_case(*model, num_tokens) for model in _MODELS for num_tokens in _TOKENS]
