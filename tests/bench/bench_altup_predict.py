"""altup_predict, bfloat16: GB/s of the streams read and written, at Gemma 3n's sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close

STREAMS = 4
N = 2048
SIZES = (1, 256, 4096)  # tokens


def altup_case(
    op: Callable[..., Any], tokens: int, *shapes: tuple[int, ...], num_rows: int
) -> BenchCase:
    """Return a case of `op`, which moves `num_rows` rows a token; `shapes` follow the streams'."""

    def make(xp, seed):
        all_shapes = ((tokens, STREAMS, N), *shapes)
        arrays = (
            cases.normal(s, "bfloat16", seed=seed + i, scale=0.1) for i, s in enumerate(all_shapes)
        )
        return cases.to_module(xp, *arrays)

    def check(args, result):
        # The streams were overwritten: only the copy of the first one can be compared with them.
        assert_close(result, np.ascontiguousarray(to_numpy(args[0])[:, 0]))

    nbytes = num_rows * tokens * N * 2
    return BenchCase(f"({tokens}, {STREAMS}, {N})", make, op, nbytes=nbytes, check=check)


_WEIGHTS = ((N,), (STREAMS, N), (STREAMS**2, STREAMS))
CASES = [
    altup_case(kernels.altup_predict, tokens, *_WEIGHTS, num_rows=2 * STREAMS + 1)
    for tokens in SIZES
]
