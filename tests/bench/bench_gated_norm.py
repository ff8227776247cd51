"""gated_norm, bfloat16: GB/s of x and z read and the result written."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _case(tokens: int, heads: int, head_dim: int) -> BenchCase:
    def make(xp, seed):
        rng = xp.random.default_rng(seed)
        shapes = ((tokens, heads, head_dim), (tokens, heads, head_dim), (head_dim,))
        bfloat16 = cases.np_dtype("bfloat16")
        return tuple(rng.standard_normal(s, dtype=np.float32).astype(bfloat16) for s in shapes)

    def check(args, result):
        few = min(tokens, 128)
        x, z = (to_numpy(array[:few]) for array in args[:2])
        want = reference.gated_norm(x, z, to_numpy(args[2]))
        assert_close(result[:few], want, reduction=head_dim)

    nbytes = 2 * (3 * tokens * heads + 1) * head_dim
    name = f"T {tokens}, H {heads}, D {head_dim}"
    return BenchCase(name, make, kernels.gated_norm, nbytes=nbytes, check=check)


CASES = [_case(1, 32, 128), _case(32, 32, 128), _case(8192, 32, 128), _case(2048, 8, 1024)]
