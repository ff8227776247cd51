"""rmsnorm_gemm_wna16 on layers of Llama 3.1 8B, vs rmsnorm then gemm_wna16."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_gemm import MODEL_LAYERS
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS
from tests.bench.bench_dequantize import first_rows, repeated
from tests.bench.bench_gemm import filled

_CHECKED = 256  # result columns compared


def _run(x, norm_weight, weight):
    return kernels.rmsnorm_gemm_wna16(x, norm_weight, weight, pdl=True)


def _two_launches(x, norm_weight, weight):
    return kernels.gemm_wna16(kernels.rmsnorm(x, norm_weight), weight, pdl=True)


def _check(args, result):
    x, norm_weight, weight = args
    want = reference.rmsnorm_gemm_wna16(
        to_numpy(x), to_numpy(norm_weight), first_rows(weight, _CHECKED)
    )
    assert_close(to_numpy(result[:, :_CHECKED]).copy(), want, reduction=x.shape[1])


def _case(name: str, m: int, n: int, k: int, label: str) -> BenchCase:
    def make(xp, seed):
        norm_weight = xp.asarray(cases.normal((k,), "bfloat16", seed, mean=1.0, scale=0.1))
        return filled(xp, (m, k), seed), norm_weight, repeated(xp, name, n, k, seed)

    return BenchCase(
        f"{name} {label} M={m} N={n} K={k}",
        make,
        _run,
        nbytes=FORMATS[name].num_bytes((n, k)) + 2 * m * (n + k) + 2 * k,
        flops=2 * m * n * k,
        baselines={"rmsnorm + gemm_wna16": _two_launches},
        check=_check,
    )


CASES = [
    _case(name, m, *MODEL_LAYERS["Llama-3.1-8B", layer], layer)
    for name in ("int4_g128", "q4_k", "q8_0")
    for layer in ("qkv", "gate_up")
    for m in (1, 8)
]
CPU_CASES = [_case(name, 1, 1024, 1024, "small") for name in ("int4_g128", "q4_k", "q8_0")]
