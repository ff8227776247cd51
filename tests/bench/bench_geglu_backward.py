"""geglu_backward, bfloat16: GB/s of three reads and two writes, vs torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close
from tests.bench import torch_backward


def _case(rows: int, f: int) -> BenchCase:
    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        return normal_on(xp, (rows, f), "bfloat16", seed), normal_on(
            xp, (rows, 2 * f), "bfloat16", seed + 1
        )

    def check(args: tuple[Any, ...], result: Any) -> None:
        dout, x = (to_numpy(a[:256]) for a in args)
        assert_close(result[:256], reference.geglu_backward(dout, x), reduction=2)

    return BenchCase(
        f"({rows}, {f})",
        make,
        kernels.geglu_backward,
        nbytes=5 * rows * f * 2,
        peers={"torch.compile": partial(torch_backward.gated_seconds, "geglu", rows, f)},
        check=check,
    )


CASES = [_case(512, 8192), _case(8192, 2048), _case(8192, 8192), _case(8192, 14336)]
CPU_CASES = [_case(256, 1024)]
