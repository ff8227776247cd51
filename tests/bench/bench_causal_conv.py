"""causal_conv, bfloat16: GB/s of the inputs and states read, the result and states written."""

from __future__ import annotations

from functools import partial

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_states import StateBatch
from engine.testing.tolerances import assert_close

_WIDTH = 4


def _run(x, weight, states, slots):
    return kernels.causal_conv(x, weight, states=states, **slots, activation="silu")


def _case(name: str, batch: StateBatch, channels: int) -> BenchCase:
    slots = batch.slots()
    sequences = len(batch.lens)

    def make(xp, seed):
        normal = partial(xp.random.default_rng(seed).standard_normal, dtype=np.float32)
        shapes = (
            (batch.num_tokens, channels),
            (channels, _WIDTH),
            (batch.num_slots, _WIDTH - 1, channels),
        )
        bfloat16 = cases.np_dtype("bfloat16")
        return *(normal(shape).astype(bfloat16) for shape in shapes), batch.on(xp, slots)

    def check(args, result):
        x, weight, states = (to_numpy(array) for array in args[:3])
        first = batch.lens[0]
        kept = {"cu_seqlens_q": slots["cu_seqlens_q"][:2]}
        kept |= {name: slots[name][:1] for name in ("state_slots", "context_lens")}
        # The timed calls have replaced the states; those of tokens beyond a state's reach agree.
        want = reference.causal_conv(x[:first], weight, states=states, **kept, activation="silu")
        assert_close(result[_WIDTH - 1 : first], want[_WIDTH - 1 :], reduction=_WIDTH)

    rows = 2 * batch.num_tokens + 2 * (_WIDTH - 1) * sequences
    nbytes = 2 * channels * (rows + _WIDTH)
    return BenchCase(f"{name}, C {channels}", make, _run, nbytes=nbytes, check=check)


CASES = [
    _case("decode, batch 32", StateBatch((1,) * 32, (100,) * 32), 8192),
    _case("decode, batch 256", StateBatch((1,) * 256, (100,) * 256), 8192),
    _case("prefill, 2048 tokens", StateBatch((2048,), (0,)), 8192),
    _case("prefill, 8 x 1024 tokens", StateBatch((1024,) * 8, (0,) * 8), 8192),
]
CPU_CASES = [_case("prefill, 256 tokens", StateBatch((256,), (0,)), 1024)]
