"""moe_sort: microseconds to sort the pairs of chosen experts, vs torch's sort and searchsorted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from tests.bench import moe_peers


def _case(num_tokens: int, num_experts: int, top_k: int) -> BenchCase:
    shape = (num_tokens, top_k)

    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        ids = np.random.default_rng(seed).integers(0, num_experts, shape).astype(np.int32)
        return xp.asarray(ids), xp.ones(shape, np.float32)

    def run(ids: Any, weights: Any) -> Any:
        return kernels.moe_sort(ids, weights, num_experts=num_experts)

    def check(args: tuple[Any, ...], result: Any) -> None:
        ids, weights = map(to_numpy, args)
        want = reference.moe_sort(ids, weights, num_experts=num_experts)
        for got, wanted in zip(result, want, strict=True):
            np.testing.assert_array_equal(to_numpy(got), wanted)

    peer = partial(moe_peers.sort_seconds, num_tokens, num_experts, top_k)
    name = f"T {num_tokens}, E {num_experts}, k {top_k}"
    nbytes = 4 * 4 * num_tokens * top_k
    return BenchCase(name, make, run, nbytes=nbytes, peers={"torch": peer}, check=check)


CASES = [_case(4096, 8, 2), _case(16384, 8, 2), _case(4096, 128, 8), _case(8192, 64, 8)]
