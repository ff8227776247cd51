"""mamba2, bfloat16, states float32: decode in GB/s of states; prefill in TFLOP/s."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_states import StateBatch
from engine.testing.tolerances import assert_close

_TOKENS = ("x", "dt", "b", "c")
_HEADS = (8, 128, 64, 128)


def _run(arrays, states, slots, longest):
    return kernels.mamba2(**arrays, states=states, **slots, max_seqlen_q=longest)


def _case(
    name: str, batch: StateBatch, groups: int, heads: int, head_dim: int, size: int
) -> BenchCase:
    """As in Nemotron-H: 8 groups, 128 heads of 64 features, states of 128 columns."""
    slots = batch.slots()
    tokens = batch.num_tokens

    def make(xp, seed):
        normal = partial(xp.random.default_rng(seed).standard_normal, dtype=np.float32)
        shapes = {
            "x": (tokens, heads, head_dim),
            "dt": (tokens, heads),
            "b": (tokens, groups, size),
            "c": (tokens, groups, size),
        }
        bfloat16 = cases.np_dtype("bfloat16")
        arrays = {name: normal(shape).astype(bfloat16) for name, shape in shapes.items()}
        arrays |= {name: normal(heads) for name in ("a_log", "d", "dt_bias")}
        states = normal((batch.num_slots, heads, head_dim, size)) * np.float32(0.1)
        return arrays, states, batch.on(xp, slots), max(batch.lens)

    def check(args, result):
        """Compare a short call from zeros: the timed calls have replaced the states."""
        arrays, states, on_device, longest = args
        first = min(batch.lens[0], 150)
        few = {n: x[:first] if n in _TOKENS else x for n, x in arrays.items()}
        one = {n: x[: 2 if n == "cu_seqlens_q" else 1] for n, x in on_device.items()}
        one["context_lens"] = one["context_lens"] * 0 + first
        one["cu_seqlens_q"] = one["cu_seqlens_q"].clip(0, first)
        got = kernels.mamba2(**few, states=states.copy(), **one)
        host = {n: to_numpy(x) for n, x in {**few, **one, "states": states.copy()}.items()}
        reduction = size if longest <= 8 else math.inf  # chunks round their operands
        assert_close(got, reference.mamba2(**host), reduction=reduction)
        assert np.isfinite(to_numpy(result[:first]).astype(np.float32)).all()

    state_bytes = 2 * heads * head_dim * size * 4
    rows = 2 * (2 * heads * head_dim + 2 * groups * size + heads)
    nbytes = tokens * rows + len(batch.lens) * state_bytes
    # Per 64 tokens: C B^T of a group; M X, C S^T and X^T B of a head.
    products = groups * 64 * size + heads * head_dim * (64 + 2 * size)
    flops = 0 if max(batch.lens) <= 8 else 2 * tokens * products
    name = f"{name}, {heads} heads in {groups} groups"
    return BenchCase(name, make, _run, nbytes=nbytes, flops=flops, check=check)


def _decode(batch: int) -> BenchCase:
    sequences = StateBatch((1,) * batch, (100,) * batch)
    return _case(f"decode, batch {batch}", sequences, *_HEADS)


CASES = [
    *(_decode(batch) for batch in (1, 32, 128, 256)),
    _case("verify, batch 8", StateBatch((4,) * 8, (100,) * 8, "each"), *_HEADS),
    _case("prefill, 1024 tokens", StateBatch((1024,), (0,)), *_HEADS),
    _case("prefill, 4096 tokens", StateBatch((4096,), (0,)), *_HEADS),
    _case("prefill, 16 x 1024 tokens", StateBatch((1024,) * 16, (0,) * 16), *_HEADS),
]
CPU_CASES = [_case("prefill, 64 tokens", StateBatch((64,), (0,)), 1, 2, 16, 32)]
