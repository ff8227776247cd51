"""moe_activation_backward, bfloat16: GB/s read and written, vs torch.compile's backward pass.

The peer returns dh and the gradient of the weights, but not w act(h).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.reference import Routing
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close
from tests.bench import torch_backward

_CHECKED = 64  # rows compared with the mirror


def _case(num_pairs: int, width: int) -> BenchCase:
    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        dy = normal_on(xp, (num_pairs, width), "bfloat16", seed)
        order = np.random.default_rng(seed).permutation(num_pairs).astype(np.int32)
        weights = xp.full((num_pairs, 1), 0.5, np.float32)
        h = normal_on(xp, (num_pairs, 2 * width), "bfloat16", seed + 1)
        return dy, h, weights, xp.asarray(order)

    def run(dy: Any, h: Any, weights: Any, order: Any) -> Any:
        return kernels.moe_activation_backward(dy, h, Routing(None, weights, order, None))

    def check(args: tuple[Any, ...], result: Any) -> None:
        dy, h = (to_numpy(x[:_CHECKED]) for x in args[:2])
        own = np.arange(_CHECKED, dtype=np.int32)
        few = Routing(None, np.full((_CHECKED, 1), 0.5, np.float32), own, None)
        want = reference.moe_activation_backward(dy, h, few)
        for got, wanted in zip(result[:2], want[:2], strict=True):
            assert_close(got[:_CHECKED], wanted, reduction=2)
        pairs = to_numpy(args[3])[:_CHECKED]
        assert_close(to_numpy(result[2])[pairs], want[2], reduction=width)

    nbytes = 2 * 6 * num_pairs * width
    peer = partial(torch_backward.weighted_swiglu_seconds, num_pairs, width)
    name = f"P {num_pairs}, F {width}"
    return BenchCase(name, make, run, nbytes=nbytes, peers={"torch.compile": peer}, check=check)


CASES = [_case(8192, 2048), _case(32768, 2048), _case(32768, 768), _case(65536, 768)]
CPU_CASES = [_case(256, 1024)]
