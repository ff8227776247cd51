"""altup_correct, bfloat16: GB/s of the streams read and written, at Gemma 3n's sizes."""

from __future__ import annotations

from engine import kernels
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _case(tokens: int, n: int, streams: int = 4) -> BenchCase:
    def make(xp, seed):
        shapes = ((tokens, streams, n), (tokens, n), (n,), (streams, n), (streams, streams))
        arrays = (cases.normal(s, "bfloat16", seed + i, 0.1) for i, s in enumerate(shapes))
        return cases.to_module(xp, *arrays)

    def check(args, result):
        # The streams were overwritten: only the copy of the first one can be compared with them.
        assert_close(result, to_numpy(args[0])[:, 0])

    return BenchCase(
        f"({tokens}, {streams}, {n})",
        make,
        kernels.altup_correct,
        nbytes=(2 * streams + 2) * tokens * n * 2,
        check=check,
    )


CASES = [_case(1, 2048), _case(256, 2048), _case(4096, 2048)]
