"""dequantize to bfloat16: GB/s of reading a quantized matrix and writing it dense."""

from __future__ import annotations

from dataclasses import replace

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS, Weight

_FORMATS = ("int4_g128", "mxfp4", "q4_k", "q5_k", "q6_k", "q8_0", "fp8", "fp8_block", "int8")
_BLOCK = 256  # rows to repeat: large random weights take too long to generate


def repeated(xp, name: str, n: int, k: int, seed: int) -> Weight:
    """Return a weight with a multiple of 256 rows that repeats 256 random rows."""
    block = weight_to(xp, random_weight(name, _BLOCK, k, seed))

    def grown(array):
        return xp.tile(array, (n // _BLOCK, *(1,) * (array.ndim - 1)))

    arrays = {key: grown(array) for key, array in block.arrays()}
    return replace(block, shape=(n, k), **arrays)


def first_rows(weight: Weight, count: int) -> Weight:
    """Return the first rows of a weight (a multiple of 256) as NumPy arrays."""

    def cut(array):
        return to_numpy(array[: len(array) * count // weight.shape[0]])

    arrays = {key: cut(array) for key, array in weight.arrays()}
    if weight.format.code == "e4m3":
        arrays["data"] = arrays["data"].view("u1")
    return replace(weight, shape=(count, weight.shape[1]), **arrays)


def _case(name: str, n: int, k: int) -> BenchCase:
    def check(args, result):
        want = reference.dequantize(first_rows(args[0], _BLOCK), "bfloat16")
        assert_close(to_numpy(result[:_BLOCK]).copy(), want)

    return BenchCase(
        f"{name} N={n} K={k}",
        lambda xp, seed: (repeated(xp, name, n, k, seed), "bfloat16"),
        kernels.dequantize,
        nbytes=FORMATS[name].num_bytes((n, k)) + 2 * n * k,
        check=check,
    )


CASES = [_case(name, 4096, 4096) for name in _FORMATS] + [_case("int4_g128", 28672, 4096)]
CPU_CASES = [_case(name, 512, 2048) for name in ("int4_g128", "mxfp4", "q4_k", "fp8")]
