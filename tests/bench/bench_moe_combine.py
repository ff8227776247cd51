"""moe_combine, bfloat16, 8 experts of width 2048 and a residual: GB/s read and written."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_moe import MOE_LAYERS
from engine.testing.tolerances import assert_close

_TOKENS = (1, 8, 64, 256, 4096)
_HIDDEN, _, _, _TOP_K = MOE_LAYERS["Qwen3-30B-A3B"]


def _run(pairs, residual):
    return kernels.moe_combine(pairs, residual=residual)


def _check(args, result):
    pairs, residual = (to_numpy(array[:64]) for array in args)
    want = reference.moe_combine(pairs, residual=residual)
    assert_close(result[:64], want, reduction=_TOP_K + 1)


def _case(num_tokens: int) -> BenchCase:
    def make(xp, seed):
        pairs = normal_on(xp, (num_tokens, _TOP_K, _HIDDEN), "bfloat16", seed)
        return pairs, xp.asarray(cases.normal((num_tokens, _HIDDEN), "bfloat16", seed + 1))

    nbytes = 2 * num_tokens * _HIDDEN * (_TOP_K + 2)
    name = f"T {num_tokens}, k {_TOP_K}, N {_HIDDEN}"
    return BenchCase(name, make, _run, nbytes=nbytes, check=_check)


CASES = [_case(num_tokens) for num_tokens in _TOKENS]
