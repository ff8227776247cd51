"""gated_delta, bfloat16: decode in GB/s of states read and written; prefill in TFLOP/s."""

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

_DIM = 128  # of keys and values
_TOKENS = ("q", "k", "v", "a", "b")


def _run(arrays, states, slots, longest):
    return kernels.gated_delta(**arrays, states=states, **slots, max_seqlen_q=longest)


def _case(
    name: str,
    batch: StateBatch,
    key_heads: int,
    heads: int,
    state_dtype: str = "bfloat16",
    *,
    has_channel_gate: bool = False,
) -> BenchCase:
    gate = (_DIM,) if has_channel_gate else ()
    slots = batch.slots()
    tokens = batch.num_tokens

    def make(xp, seed):
        normal = partial(xp.random.default_rng(seed).standard_normal, dtype=np.float32)
        shapes = {
            "q": (tokens, key_heads, _DIM),
            "k": (tokens, key_heads, _DIM),
            "v": (tokens, heads, _DIM),
            "a": (tokens, heads, *gate),
            "b": (tokens, heads),
        }
        bfloat16 = cases.np_dtype("bfloat16")
        arrays = {name: normal(shape).astype(bfloat16) for name, shape in shapes.items()}
        arrays |= {"a_log": normal(heads), "dt_bias": normal((heads, *gate)) - 2}
        states = normal((batch.num_slots, heads, _DIM, _DIM)) * np.float32(0.1)
        states = states.astype(cases.np_dtype(state_dtype))
        return arrays, states, batch.on(xp, slots), max(batch.lens)

    def check(args, result):
        """Compare one call from zeros: the timed calls have replaced the states."""
        arrays, states, on_device, _ = args
        first = min(batch.lens[0], 256)  # over more numbers one leaves the bounds
        few = {n: x[:first] if n in _TOKENS else x for n, x in arrays.items()}
        one = {n: x[: 2 if n == "cu_seqlens_q" else 1] for n, x in on_device.items()}
        one["cu_seqlens_q"] = one["cu_seqlens_q"].clip(0, first)
        one["context_lens"] = one["context_lens"] * 0 + first
        got = kernels.gated_delta(**few, states=states.copy(), **one)
        host = {n: to_numpy(x) for n, x in {**few, **one, "states": states.copy()}.items()}
        reduction = _DIM + first if first == 1 else math.inf  # a chunk rounds what it multiplies
        assert_close(got, reference.gated_delta(**host), reduction=reduction)
        assert np.isfinite(to_numpy(result[:first]).astype(np.float32)).all()

    state_bytes = 2 * heads * _DIM * _DIM * cases.np_dtype(state_dtype).itemsize
    rows = 2 * _DIM * (2 * key_heads + 2 * heads) + 2 * heads * (1 + (*gate, 1)[0])
    # Per 64 tokens and head: K K^T, Q K^T, X and what it adds to the output; K S, Q S and S.
    flops = 0 if max(batch.lens) == 1 else heads * tokens * _DIM * (4 * 2 * 64 + 3 * 2 * _DIM)
    name = f"{name}, heads {key_heads} and {heads}, states {state_dtype}"
    nbytes = tokens * rows + len(batch.lens) * state_bytes
    return BenchCase(name, make, _run, nbytes=nbytes, flops=flops, check=check)


def _kimi(name: str, batch: StateBatch) -> BenchCase:
    """Kimi Linear's heads, with a decay per channel."""
    return _case(f"KDA, {name}", batch, 32, 32, "float32", has_channel_gate=True)


def _decode(batch: int, state_dtype: str = "bfloat16") -> BenchCase:
    sequences = StateBatch((1,) * batch, (100,) * batch)
    return _case(f"decode, batch {batch}", sequences, 8, 16, state_dtype)


CASES = [
    *(_decode(batch) for batch in (1, 32, 128, 256)),
    _decode(32, "float32"),
    _case("verify, batch 8", StateBatch((4,) * 8, (100,) * 8, "each"), 8, 16),
    _case("prefill, 4096 tokens", StateBatch((4096,), (0,)), 16, 32),
    _case("prefill, 16384 tokens", StateBatch((16384,), (0,)), 16, 32),
    _case("prefill, 32 x 512 tokens", StateBatch((512,) * 32, (0,) * 32), 16, 32),
    _case("prefill, 16 x 4096 tokens", StateBatch((4096,) * 16, (0,) * 16), 16, 32),
    _kimi("decode, batch 32", StateBatch((1,) * 32, (100,) * 32)),
    _kimi("prefill, 8192 tokens", StateBatch((8192,), (0,))),
]
CPU_CASES = [
    _case("prefill, 64 tokens", StateBatch((64,), (0,)), 1, 2),
    _case("KDA, prefill, 64 tokens", StateBatch((64,), (0,)), 2, 2, has_channel_gate=True),
]
