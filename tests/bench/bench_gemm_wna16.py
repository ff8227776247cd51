"""gemm_wna16 in bfloat16 on layers of Llama 3.1 8B and Qwen3 0.6B, vs gemm with dense weights."""

from __future__ import annotations

from engine import device, kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_gemm import MODEL_LAYERS
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS
from tests.bench.bench_dequantize import first_rows, repeated
from tests.bench.bench_gemm import filled, sample

_FORMATS = ("int4_g128", "int4_g128_zp", "mxfp4", "q4_0", "q4_k", "q5_k", "q6_k", "q8_0")
_MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")
_ROWS = (1, 4, 8, 16, 64, 1024)
_LM_HEAD_ROWS = 8
_CHECKED = 256  # result columns compared


def _check(args, result):
    x, weight = args
    rows, _ = sample(*result.shape)
    want = reference.gemm_wna16(to_numpy(x[rows]), first_rows(weight, _CHECKED))
    assert_close(to_numpy(result[rows, :_CHECKED]).copy(), want, reduction=x.shape[1])


def _case(name: str, m: int, n: int, k: int, label: str) -> BenchCase:
    form = FORMATS[name]

    def make(xp, seed):
        return filled(xp, (m, k), seed), repeated(xp, name, n, k, seed)

    def run(x, weight):
        return kernels.gemm_wna16(x, weight, pdl=True)

    dense: dict[int, object] = {}  # dense weight by copy

    def dense_gemm(x, weight):
        if id(weight) not in dense:
            dense[id(weight)] = kernels.dequantize(weight, "bfloat16")
        return kernels.gemm(x, dense[id(weight)], pdl=True)

    on_gpu = device.resolve_device("auto")[0].is_cuda
    return BenchCase(
        f"{name} {label} M={m} N={n} K={k}",
        make,
        run,
        nbytes=form.num_bytes((n, k)) + 2 * m * (n + k),
        flops=2 * m * n * k,
        baselines={"gemm of bfloat16": dense_gemm} if on_gpu else None,
        check=_check,
    )


def _cases():
    for name in _FORMATS:
        for (model, layer), (n, k) in MODEL_LAYERS.items():
            if model not in _MODELS or (name not in _FORMATS[:1] and model != _MODELS[0]):
                continue
            for m in _ROWS:
                if layer == "lm_head" and (m > _LM_HEAD_ROWS or n % _CHECKED):
                    continue
                yield _case(name, m, n, k, f"{model} {layer}")


CASES = list(_cases())
