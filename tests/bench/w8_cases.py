"""Shared by bench_gemm_fp8 and bench_gemm_int8: layers, weights, and torch as a peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from engine import device, kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close
from tests.bench.bench_gemm import filled, sample

_LAYERS = {
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B o": (4096, 4096),
    "Llama-3.1-8B gate_up": (28672, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
    "square": (8192, 8192),
}
_ROWS = (1, 8, 64, 256, 1024, 4096)


def cases(codes: str, *, has_blocks: bool = False) -> list[BenchCase]:
    """Return the cases for one code type: x is 16-bit up to 8 rows, beyond that quantized."""
    return [
        _case(codes, label, m, *_LAYERS[label], has_blocks=has_blocks)
        for m in _ROWS
        for label in _LAYERS
    ]


def _case(codes: str, label: str, m: int, n: int, k: int, *, has_blocks: bool) -> BenchCase:
    product = getattr(kernels, f"gemm_{codes}")
    group = 128 if has_blocks or codes == "int8" else 0

    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        x = filled(xp, (m, k), seed)
        weight, scales = kernels.quantize_rows(filled(xp, (n, k), seed + 1, k**-0.5), dtype=codes)
        scales = scales[:, 0].copy()
        if has_blocks:
            scales = xp.full((-(-n // 128), -(-k // 128)), 2e-3, np.float32)
        if m <= 8:
            return x, weight, scales, None
        x, x_scales = kernels.quantize_rows(x, dtype=codes, group=group)
        return x, weight, scales, x_scales

    def run(x: Any, weight: Any, scales: Any, x_scales: Any) -> Any:
        out_dtype = None if x_scales is None else "bfloat16"
        return product(x, weight, scales, x_scales=x_scales, out_dtype=out_dtype)

    def check(args: tuple[Any, ...], result: Any) -> None:
        x, weight, scales, x_scales = args
        rows, columns = sample(*result.shape)
        given = None if x_scales is None else to_numpy(x_scales[rows])
        host = to_numpy(result[rows, columns]).copy()
        wanted = to_numpy(scales[columns]) if scales.ndim == 1 else None
        if wanted is None:  # all blocks have the same scale
            wanted = np.full((-(-host.shape[1] // 128), scales.shape[1]), 2e-3, np.float32)
        want = getattr(reference, f"gemm_{codes}")(
            to_numpy(x[rows]), to_numpy(weight[columns]), wanted, x_scales=given,
            out_dtype=host.dtype,
        )  # fmt: skip
        assert_close(host, want, reduction=k)

    has_torch = importlib.util.find_spec("torch") and device.resolve_device("auto")[0].is_cuda
    peers: dict[str, Callable[[], float]] | None = None
    if has_torch and m > 16 and not has_blocks:
        peers = {"torch": partial(_torch_seconds, codes, m, n, k)}
    return BenchCase(
        f"{label} M={m} N={n} K={k}{' blocks' if has_blocks else ''}",
        make,
        run,
        nbytes=m * k + n * k + 2 * m * n,
        flops=2 * m * n * k,
        peers=peers,
        check=check,
        arithmetic=codes,
    )


def _torch_seconds(codes: str, m: int, n: int, k: int) -> float:
    """Return the median seconds of _scaled_mm with per-row scales, or of _int_mm without scales."""
    import torch

    x, weight = (torch.randn(shape, device="cuda") for shape in ((m, k), (n, k)))
    if codes == "fp8":
        a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
        scales = (torch.ones(shape, device="cuda") for shape in ((m, 1), (1, n)))
        call = partial(torch._scaled_mm, a, b, *scales, out_dtype=torch.bfloat16)
    else:
        a, b = ((t * 30).to(torch.int8) for t in (x, weight))
        call = partial(torch._int_mm, a, b.t())
    times = []
    for _ in range(15):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return float(np.median(times))
