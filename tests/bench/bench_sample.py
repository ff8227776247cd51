"""sample, float32 logits: GB/s of reading the logits once, the minimum."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases_sample
from engine.testing.bench_case import BenchCase


@lru_cache(maxsize=8)
def _logits(rows: int, vocab_size: int, seed: int):
    return cases_sample.logits("normal", rows, vocab_size, seed)


def _case(rows: int, vocab_size: int, filters: str, scale: float = 1.0) -> BenchCase:
    def make(xp, seed):
        logits = _logits(rows, vocab_size, seed) * np.float32(scale)
        args = cases_sample.parameters(
            rows, **cases_sample.FILTERS[filters], seeds=np.arange(rows), positions=seed
        )
        return xp.asarray(logits), {name: xp.asarray(value) for name, value in args.items()}

    def run(logits, args):
        return kernels.sample(logits, **args)

    def check(args, result):
        few = slice(0, 8)
        want = reference.sample(
            to_numpy(args[0][few]), **{name: to_numpy(x[few]) for name, x in args[1].items()}
        )
        np.testing.assert_array_equal(to_numpy(result.token_ids[few]), want.token_ids)
        np.testing.assert_array_equal(to_numpy(result.num_kept[few]), want.num_kept)

    name = f"({rows}, {vocab_size}) {filters}" + (f", logits x {scale:g}" if scale != 1 else "")
    return BenchCase(name, make, run, nbytes=rows * vocab_size * 4, check=check)


CASES = [
    *(
        _case(rows, vocab_size, filters)
        for rows, vocab_size in ((1, 49152), (1, 151936), (16, 151936), (128, 151936))
        for filters in ("greedy", "top_k_top_p", "cool_top_p", "top_p_90", "plain")
    ),
    _case(1, 151936, "cool_top_p", 3.0),
    _case(128, 151936, "cool_top_p", 3.0),
]
