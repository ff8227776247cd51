"""altup_correct, bfloat16: GB/s of the streams read and written, at Gemma 3n's sizes."""

from __future__ import annotations

from engine import kernels
from tests.bench.bench_altup_predict import SIZES, STREAMS, N, altup_case

_WEIGHTS = ((N,), (STREAMS, N), (STREAMS, STREAMS))
CASES = [
    altup_case(kernels.altup_correct, tokens, (tokens, N), *_WEIGHTS, num_rows=2 * STREAMS + 2)
    for tokens in SIZES
]
