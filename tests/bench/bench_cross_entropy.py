"""cross_entropy, bfloat16: GB/s of one read of the logits and, with the gradient, one write.

Peers, if installed: `torch.compile` of torch's loss (with its backward pass), and Liger's kernel.
"""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close
from tests.bench.loss_peers import cross_entropy_peers


def _case(rows: int, vocab: int, *, has_gradient: bool) -> BenchCase:
    def make(xp, seed):
        target = np.random.default_rng(seed).integers(0, vocab, rows)
        dloss = xp.ones(1, np.float32) if has_gradient else None
        return normal_on(xp, (rows, vocab), "bfloat16", seed), xp.asarray(target), dloss

    def run(logits, target, dloss):
        return kernels.cross_entropy(logits, target, dloss=dloss)

    def check(args, result):
        logits, target = to_numpy(args[0][:8]), to_numpy(args[1][:8])
        dloss = np.ones(1, np.float32) if has_gradient else None
        want = reference.cross_entropy(logits, target, dloss=dloss)
        for a, b in zip(result, want, strict=True):
            assert_close(a[:8], b, reduction=vocab)

    name = f"({rows}, {vocab}){' with gradient' if has_gradient else ''}"
    nbytes = rows * vocab * 2 * (2 if has_gradient else 1)
    peers = cross_entropy_peers(rows, vocab, has_gradient=has_gradient)
    return BenchCase(name, make, run, nbytes, check=check, peers=peers)


CASES = [
    _case(rows, vocab, has_gradient=has_gradient)
    for rows, vocab in ((16384, 1024), (8192, 32000), (4096, 50257), (512, 128256), (4096, 128256))
    for has_gradient in (False, True)
]
CPU_CASES = [_case(64, 32000, has_gradient=has_gradient) for has_gradient in (False, True)]
