"""rmsnorm_gemm in bfloat16 on the layers that follow a norm, vs rmsnorm then gemm."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close
from tests.bench.bench_gemm import filled, layers, sample


def _two_launches(x, norm_weight, weight):
    return kernels.gemm(kernels.rmsnorm(x, norm_weight), weight)


def _check(args, result):
    x, norm_weight, weight = args
    rows, columns = sample(*result.shape)
    want = reference.rmsnorm_gemm(
        to_numpy(x[rows]), to_numpy(norm_weight), to_numpy(weight[columns])
    )
    assert_close(to_numpy(result[rows, columns]).copy(), want, reduction=x.shape[1])


def _case(m: int, n: int, k: int, label: str) -> BenchCase:
    def make(xp, seed):
        norm_weight = xp.asarray(cases.normal((k,), "bfloat16", seed, mean=1.0, scale=0.1))
        return filled(xp, (m, k), seed), norm_weight, filled(xp, (n, k), seed + 1, k**-0.5)

    return BenchCase(
        f"{label} M={m} N={n} K={k}",
        make,
        kernels.rmsnorm_gemm,
        nbytes=2 * (m * k + n * k + m * n + k),
        flops=2 * m * n * k,
        baselines={"rmsnorm + gemm": _two_launches},
        check=_check,
    )


CASES = [_case(*p) for p in layers() if p[3].split()[1] in ("qkv", "gate_up", "lm_head")]
