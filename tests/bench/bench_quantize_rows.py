"""quantize_rows, bfloat16 to e4m3: GB/s of one read of the rows and one write of the codes."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on


def _case(rows: int, n: int, group: int) -> BenchCase:
    def make(xp, seed):
        return (normal_on(xp, (rows, n), "bfloat16", seed),)

    def run(x):
        return kernels.quantize_rows(x, group=group)

    def check(args, result):
        want, scales = reference.quantize_rows(to_numpy(args[0][:64]), group=group)
        assert (to_numpy(result[0][:64]) == want).all()
        assert (to_numpy(result[1][:64]) == scales).all()

    name = f"({rows}, {n}){f' in groups of {group}' if group else ''}"
    return BenchCase(name, make, run, nbytes=3 * rows * n, check=check)


CASES = [
    _case(rows, n, group)
    for rows in (1, 64, 4096)
    for n, group in ((4096, 0), (4096, 128), (14336, 0))
]
