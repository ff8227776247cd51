"""sample, float32 logits: the logits must be read once; GB/s of that."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases_sample
from tests.bench.case import BenchCase


def _case(rows: int, vocab_size: int, filters: str) -> BenchCase:
    def make(xp, seed):
        logits = cases_sample.logits("normal", rows, vocab_size, seed)
        args = cases_sample.parameters(
            rows, **cases_sample.FILTERS[filters], seeds=np.arange(rows), positions=seed
        )
        return xp.asarray(logits), {name: xp.asarray(value) for name, value in args.items()}

    def run(logits, args):
        return kernels.sample(logits, **args)

    def check(args, result):
        logits, parameters = to_numpy(args[0]), {k: to_numpy(v) for k, v in args[1].items()}
        want = reference.sample(logits, **parameters)
        np.testing.assert_array_equal(to_numpy(result.token_ids), want.token_ids)
        np.testing.assert_array_equal(to_numpy(result.num_kept), want.num_kept)

    name = f"({rows}, {vocab_size}) {filters}"
    return BenchCase(name, make, run, nbytes=rows * vocab_size * 4, check=check)


CASES = [
    _case(rows, vocab_size, filters)
    for rows, vocab_size in ((1, 49152), (1, 151936), (128, 151936))
    for filters in ("greedy", "top_k_top_p", "cool_top_p", "top_p_90", "plain")
]
