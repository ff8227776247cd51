"""Cost of batch invariance: products with quantized weights in both modes, on a decoder's shapes.

Launched with `pdl`, as in a model: no kernel still running writes the weights. Rows of 8-bit
products are quantized in the call. `deterministic` has the shapes in 16 bits.
"""

from __future__ import annotations

from engine import kernels
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.cases_w8 import quantized_weight
from engine.weights import FORMATS

_LAYERS = {
    "qwen3-8b qkv": (6144, 4096),
    "qwen3-8b o": (4096, 4096),
    "qwen3-0.6b down": (1024, 3072),
}
_FORMATS = ("fp8", "fp8 blocks", "int4_g128", "q4_k")
_ROWS = (1, 8, 16, 64, 256, 2048)


def _case(form: str, name: str, m: int) -> BenchCase:
    n, k = _LAYERS[name]
    is_packed = form in FORMATS and FORMATS[form].is_packed

    def make(xp, seed):
        x = xp.asarray(cases.normal((m, k), "bfloat16", seed))
        if is_packed:
            return x, weight_to(xp, random_weight(form, n, k, seed))
        codes = quantized_weight(n, k, "fp8", form == "fp8 blocks", seed=seed)
        return x, *cases.to_module(xp, *codes)

    def run(x, *weight, deterministic=True):
        op = kernels.gemm_wna16 if is_packed else kernels.gemm_fp8
        return op(x, *weight, deterministic=deterministic, pdl=True)

    weight_bytes = FORMATS[form].num_bytes((n, k)) if is_packed else n * k
    return BenchCase(
        f"{form} {name} M={m}",
        make,
        run,
        nbytes=2 * m * (k + n) + weight_bytes,
        flops=2 * m * n * k,
        baselines={"default": lambda *args: run(*args, deterministic=False)},
        arithmetic="bfloat16" if is_packed else "fp8",
    )


CASES = [_case(form, name, m) for form in _FORMATS for name in _LAYERS for m in _ROWS]
