"""embedding_backward, bfloat16: GB/s of rows read and written; ids as frequent as words of text."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close


def _ids(tokens: int, vocab: int, seed: int, *, is_text: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if not is_text:
        return rng.integers(0, vocab, tokens).astype(np.int32)
    frequencies = 1 / (np.arange(vocab) + 2.7)  # Zipf's law, as Mandelbrot fitted it to words
    ranked = rng.choice(vocab, tokens, p=frequencies / frequencies.sum())
    ids = np.concatenate([rng.permutation(1000), np.arange(1000, vocab)])  # common ids are low
    return ids[ranked].astype(np.int32)


def _case(tokens: int, vocab: int, n: int, *, is_text: bool = True) -> BenchCase:
    def make(xp, seed):
        ids = _ids(tokens, vocab, seed, is_text=is_text)
        order = np.argsort(ids, kind="stable")
        return (
            normal_on(xp, (tokens, n), "bfloat16", seed),
            xp.asarray(ids[order]),
            xp.asarray(order),
        )

    def run(dout, ids, order):
        return kernels.embedding_backward(dout, ids, order, vocab)

    def check(args, result):
        want = reference.embedding_backward(*map(to_numpy, args), vocab)
        assert_close(result, want, reduction=tokens)

    name = f"T {tokens}, V {vocab}, N {n}{'' if is_text else ', uniform'}"
    return BenchCase(name, make, run, (tokens + vocab) * n * 2 + tokens * 12, check=check)


CASES = [
    _case(16384, 32768, 768),
    _case(16384, 128256, 2048),
    _case(16384, 128256, 2048, is_text=False),
    _case(16384, 128256, 4096),
    _case(131072, 128256, 4096),
]
CPU_CASES = [_case(64, 2000, 16)]
