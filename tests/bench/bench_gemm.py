"""gemm in bfloat16 on the linear layers of real models, vs cuBLAS through CuPy."""

from __future__ import annotations

import numpy as np

from engine import device, kernels, reference
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_gemm import MODEL_LAYERS
from engine.testing.tolerances import assert_close

_DTYPE = "bfloat16"
_ROWS = (1, 16, 64, 256, 1024, 4096)
_LM_HEAD_ROWS = 256  # logits are computed for few rows per step


def filled(xp, shape, seed, scale=1.0):
    """Return normally distributed values; large arrays repeat a block, to save time."""
    out = xp.empty(int(np.prod(shape)), np_dtype(_DTYPE))
    block = xp.asarray(cases.normal((min(out.size, 1 << 22),), _DTYPE, seed, scale=scale))
    for start in range(0, out.size, block.size):
        part = out[start : start + block.size]
        part[...] = block[: part.size]
    return out.reshape(shape)


def sample(m, n):
    """Return a few rows and columns as slices: the mirror would take minutes for a whole GEMM.

    The steps are odd, so every position within a tile is covered.
    """
    return slice(None, None, m // 4 | 1), slice(None, None, n // 256 | 1)


def _check(args, result):
    x, weight = args
    rows, columns = sample(*result.shape)
    want = reference.gemm(to_numpy(x[rows]), to_numpy(weight[columns]))
    assert_close(to_numpy(result[rows, columns]).copy(), want, reduction=x.shape[1])


def _case(m: int, n: int, k: int, label: str) -> BenchCase:
    def make(xp, seed):
        return filled(xp, (m, k), seed), filled(xp, (n, k), seed + 1, k**-0.5)

    on_gpu = device.resolve_device("auto")[0].is_cuda  # NumPy has no fast bfloat16 GEMM
    return BenchCase(
        f"{label} M={m} N={n} K={k}",
        make,
        kernels.gemm,
        nbytes=2 * (m * k + n * k + m * n),
        flops=2 * m * n * k,
        baselines={"cublas": lambda x, weight: x @ weight.T} if on_gpu else None,
        check=_check,
    )


def layers():
    """Yield (m, n, k, label) of every measured problem."""
    for m in _ROWS:
        for (model, layer), (n, k) in MODEL_LAYERS.items():
            if layer != "lm_head" or m <= _LM_HEAD_ROWS:
                yield m, n, k, f"{model} {layer}"


CASES = [_case(*problem) for problem in layers()]
