"""Cost of batch invariance: gemm in both modes on a decoder's shapes, bfloat16.

Launched with `pdl`, as in a model: no kernel still running writes the weights.
"""

from __future__ import annotations

from engine import kernels
from engine.testing import cases
from engine.testing.bench_case import BenchCase

_LAYERS = {
    "qwen3-8b gate_up": (24576, 4096),
    "qwen3-8b o": (4096, 4096),
    "qwen3-0.6b gate_up": (6144, 1024),
    "qwen3-0.6b down": (1024, 3072),
}
_ROWS = (1, 8, 16, 64, 256, 2048)


def _case(name: str, m: int, n: int, k: int) -> BenchCase:
    def make(xp, seed):
        weight = xp.random.default_rng(seed).standard_normal((n, k), "float32") * k**-0.5
        x = cases.normal((m, k), "bfloat16", seed)
        return xp.asarray(x), weight.astype(x.dtype)

    def run(x, weight):
        return kernels.gemm(x, weight, deterministic=True, pdl=True)

    return BenchCase(
        f"{name} M={m}",
        make,
        run,
        nbytes=2 * (m * k + n * k + m * n),
        flops=2 * m * n * k,
        baselines={"default": lambda x, weight: kernels.gemm(x, weight, pdl=True)},
    )


CASES = [_case(name, m, n, k) for name, (n, k) in _LAYERS.items() for m in _ROWS]
