"""sigmoid_gate, bfloat16, over x: GB/s of two reads and one write, vs the array operations."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _formula(x, fused):
    gate = fused[:, -x.shape[1] :].astype("float32")
    return (x / (1 + array_module(x).exp(-gate))).astype(x.dtype)


def _run(x, fused):
    return kernels.sigmoid_gate(x, fused[:, -x.shape[1] :])


def _case(rows: int, heads: int, kv_heads: int, d: int) -> BenchCase:
    """Rows of heads, and rows of q, k, v and the gate."""
    f = heads * d

    def make(xp, seed):
        wide = 2 * f + 2 * kv_heads * d
        shapes = (rows, f), (rows, wide)
        return cases.to_module(
            xp, *(cases.normal(shape, "bfloat16", seed + i) for i, shape in enumerate(shapes))
        )

    def check(args, result):
        x, fused = map(to_numpy, args)
        assert_close(result, reference.sigmoid_gate(x, fused[:, -f:]))

    return BenchCase(
        f"({rows}, {heads} x {d})",
        make,
        _run,
        nbytes=3 * rows * f * 2,
        baselines={"formula": _formula},
        check=check,
    )


def _run_per_head(x, gate):
    return kernels.sigmoid_gate(x, gate)


def _per_head(rows: int, heads: int, d: int) -> BenchCase:
    """A gate per head."""

    def make(xp, seed):
        shapes = (rows, heads * d), (rows, heads)
        return cases.to_module(
            xp, *(cases.normal(shape, "bfloat16", seed + i) for i, shape in enumerate(shapes))
        )

    def check(args, result):
        assert_close(result, reference.sigmoid_gate(*map(to_numpy, args)))

    nbytes = 2 * rows * heads * (2 * d + 1)
    name = f"({rows}, {heads} x {d}), a gate per head"
    return BenchCase(name, make, _run_per_head, nbytes=nbytes, check=check)


# Qwen3.6-35B-A3B, Qwen3-Next and Trinity Mini: one token, a batch, a prompt.
CASES = [_case(rows, *sizes) for sizes in ((16, 2, 256), (32, 4, 128)) for rows in (1, 256, 8192)]
CASES += [_per_head(rows, 32, 128) for rows in (1, 8192)]  # Ling 3
CPU_CASES = [_case(64, 16, 2, 256), _per_head(64, 32, 128)]
