"""rmsnorm_backward, bfloat16: GB/s of two reads and one write, vs torch.compile's backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close
from tests.bench import torch_backward


def _case(rows: int, n: int, *, has_dh: bool = False, is_layernorm: bool = False) -> BenchCase:
    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        dy, h, dh = (normal_on(xp, (rows, n), "bfloat16", seed + i) for i in range(3))
        weight = xp.asarray(cases.normal((n,), "bfloat16", seed + 3, mean=1.0))
        return dy, h, weight, dh if has_dh else None

    def run(dy: Any, h: Any, weight: Any, dh: Any) -> Any:
        return kernels.rmsnorm_backward(dy, h, weight, dh=dh, subtract_mean=is_layernorm)

    def check(args: tuple[Any, ...], result: Any) -> None:
        dy, h, weight, dh = (None if x is None else to_numpy(x) for x in args)
        want = reference.rmsnorm_backward(dy, h, weight, dh=dh, subtract_mean=is_layernorm)
        assert_close(result[0], want[0], reduction=n)
        assert_close(result[1], want[1], reduction=rows)

    name = ("layernorm " if is_layernorm else "") + f"({rows}, {n})" + (" + dh" if has_dh else "")
    peer = partial(torch_backward.norm_seconds, rows, n, has_dh, is_layernorm)
    nbytes = (3 + has_dh) * rows * n * 2
    peers = {"torch.compile": peer}
    return BenchCase(name, make, run, nbytes=nbytes, peers=peers, check=check)


CASES = [
    _case(512, 2048),
    *(_case(rows, n) for n in (768, 2048, 4096) for rows in (8192, 16384)),
    _case(8192, 4096, has_dh=True),
    _case(8192, 8192),
    _case(8192, 768, is_layernorm=True),
    _case(8192, 4096, is_layernorm=True),
    _case(262144, 128),
]
