"""moe_combine_rmsnorm, bfloat16 to e4m3 in groups of 128: GB/s, vs the separate ops."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_moe import MOE_LAYERS

_HIDDEN, _, _, _TOP_K = MOE_LAYERS["Qwen3-30B-A3B"]
_CODES = {"dtype": "fp8", "group": 128}


def _run(pairs, residual, weight):
    return kernels.moe_combine_rmsnorm(pairs, residual, weight, **_CODES)


def _parts(pairs, residual, weight):
    x = kernels.moe_combine(pairs)
    return kernels.rmsnorm_quantize(x, weight, residual=residual, **_CODES)


def _check(args, result):
    want = reference.moe_combine_rmsnorm(*map(to_numpy, args), **_CODES)[0]
    steps = np.abs(to_numpy(result[0]).astype(int) - want.astype(int))
    assert steps.max() <= 1 and (steps != 0).mean() <= 0.01


def _case(num_tokens: int) -> BenchCase:
    def make(xp, seed):
        pairs = normal_on(xp, (num_tokens, _TOP_K, _HIDDEN), "bfloat16", seed)
        residual = normal_on(xp, (num_tokens, _HIDDEN), "bfloat16", seed + 1)
        return pairs, residual, xp.asarray(cases.normal((_HIDDEN,), "bfloat16", seed, mean=1.0))

    nbytes = num_tokens * _HIDDEN * (2 * (_TOP_K + 2) + 1)
    name = f"T {num_tokens}, k {_TOP_K}, N {_HIDDEN}"
    return BenchCase(name, make, _run, nbytes=nbytes, baselines={"parts": _parts}, check=_check)


CASES = [_case(num_tokens) for num_tokens in (16, 64, 256)]
