"""moe_decode, bfloat16: a layer of Qwen3-30B-A3B for one token, beside the ops it is made of.

GB/s of the experts' weights, which are rotated so that they come from memory.
"""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.cases_moe import MOE_LAYERS
from engine.testing.tolerances import assert_close
from tests.bench.bench_gemm import filled
from tests.bench.case import BenchCase

_HIDDEN, _WIDTH, _EXPERTS, _TOP_K = MOE_LAYERS["Qwen3-30B-A3B"]
_BYTES = 2 * _TOP_K * 3 * _HIDDEN * _WIDTH


def _make(xp, seed):
    x = xp.asarray(cases.normal((1, _HIDDEN), "bfloat16", seed))
    norm = xp.asarray(cases.normal((_HIDDEN,), "bfloat16", seed + 1))
    router = filled(xp, (_EXPERTS, _HIDDEN), seed + 2, _HIDDEN**-0.5)
    up = filled(xp, (_EXPERTS, 2 * _WIDTH, _HIDDEN), seed + 3, _HIDDEN**-0.5)
    return x, norm, router, up, filled(xp, (_EXPERTS, _HIDDEN, _WIDTH), seed + 4, _WIDTH**-0.5)


def _run(*arrays):
    return kernels.moe_decode(*arrays, _TOP_K, pdl=True)


def _apart(x, norm, router, up, down):
    y = kernels.rmsnorm(x, norm)
    logits = kernels.gemm(y, router, out_dtype="float32", pdl=True)
    routing = kernels.moe_route(logits, _TOP_K)
    rows = kernels.moe_gemm(y, up, routing, activation="swiglu", pdl=True)
    pairs = kernels.moe_gemm(rows, down, routing, scatter=True, pdl=True)
    return kernels.moe_combine(pairs.reshape(1, _TOP_K, _HIDDEN), residual=x)


def _check(args, result):
    want = reference.moe_decode(*map(to_numpy, args), _TOP_K)
    assert_close(to_numpy(result), want, reduction=_HIDDEN)


def _case(name: str, run) -> BenchCase:
    return BenchCase(name, _make, run, nbytes=_BYTES, check=_check)


CASES = [_case("one kernel", _run), _case("six kernels", _apart)]
