"""merge_states, bfloat16: GB/s of the states read and the result written."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _case(states: int, tokens: int, heads: int, head_dim: int) -> BenchCase:
    def make(xp, seed):
        rng = xp.random.default_rng(seed)
        shape = (states, tokens, heads, head_dim)
        outputs = rng.standard_normal(shape, dtype=np.float32).astype(cases.np_dtype("bfloat16"))
        return outputs, rng.standard_normal(shape[:3], dtype=np.float32) * 3

    def check(args, result):
        few = min(tokens, 512)
        outputs, lses = (to_numpy(x[:, :few]) for x in args)
        for got, want in zip(result, reference.merge_states(outputs, lses), strict=True):
            assert_close(got[:few], want, reduction=2)

    nbytes = tokens * heads * (states + 1) * (head_dim * 2 + 4)
    name = f"S {states}, T {tokens}, H {heads}, D {head_dim}"
    return BenchCase(name, make, kernels.merge_states, nbytes=nbytes, check=check)


CASES = [
    _case(2, 1, 32, 128),
    _case(2, 64, 32, 128),
    _case(2, 16384, 32, 128),
    _case(2, 32768, 32, 64),
    _case(4, 16384, 32, 128),
]
