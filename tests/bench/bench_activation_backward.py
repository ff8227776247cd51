"""activation_backward, bfloat16: GB/s of two reads and one write, vs torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close
from tests.bench import torch_backward


def _case(activation: str, rows: int, f: int) -> BenchCase:
    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        dout, x = (normal_on(xp, (rows, f), "bfloat16", seed + i) for i in (0, 1))
        return dout, x, activation

    def check(args: tuple[Any, ...], result: Any) -> None:
        dout, x = (to_numpy(a[:256]) for a in args[:2])
        want = reference.activation_backward(dout, x, activation)
        assert_close(result[:256], want, reduction=2)

    return BenchCase(
        f"{activation} ({rows}, {f})",
        make,
        kernels.activation_backward,
        nbytes=3 * rows * f * 2,
        peers={"torch.compile": partial(torch_backward.activation_seconds, activation, rows, f)},
        check=check,
    )


CASES = [_case(activation, 8192, 8192) for activation in ("silu", "gelu", "gelu_tanh", "relu")]
CPU_CASES = [_case(activation, 256, 1024) for activation in ("silu", "gelu_tanh")]
