"""mamba2: the kernel against its mirror, the mirror against a float64 recurrence, its states."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._chip import HOPPER, PORTABLE
from engine.kernels.mamba2 import chunks
from engine.testing import cases
from engine.testing.cases_attention import cu_seqlens
from engine.testing.cases_elementwise import misaligned
from engine.testing.cases_states import STATE_BATCHES, StateBatch, assert_recurrence
from engine.testing.tolerances import assert_close


@dataclass(frozen=True)
class Heads:
    """G groups, H heads of P features, and states of N columns."""

    groups: int
    heads: int
    head_dim: int
    size: int

    def __str__(self):
        return f"{self.groups}x{self.size}-{self.heads}x{self.head_dim}"


HEADS = (
    Heads(1, 3, 64, 128),
    Heads(2, 4, 40, 64),
    Heads(2, 2, 33, 200),
    Heads(1, 2, 7, 9),
    Heads(1, 2, 64, 256),
    Heads(2, 8, 80, 128),
    Heads(2, 2, 128, 48),
    Heads(1, 4, 16, 16),
)


def _inputs(num_tokens, heads, dtype):
    shapes = {
        "x": (num_tokens, heads.heads, heads.head_dim),
        "dt": (num_tokens, heads.heads),
        "b": (num_tokens, heads.groups, heads.size),
        "c": (num_tokens, heads.groups, heads.size),
    }
    arrays = {name: cases.normal(s, dtype, seed=i) for i, (name, s) in enumerate(shapes.items())}
    for seed, name in enumerate(("a_log", "d", "dt_bias"), start=5):
        arrays[name] = cases.normal((heads.heads,), "float32", seed=seed)
    return arrays


def _case(batch, heads, dtype, state_dtype):
    slots = batch.slots()
    shape = (heads.heads, heads.head_dim, heads.size)
    return _inputs(batch.num_tokens, heads, dtype), batch.states(shape, state_dtype, slots), slots


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("state_dtype", ["float32", "bfloat16"])
@pytest.mark.grid("heads", HEADS, ids=str)
@pytest.mark.grid("batch", STATE_BATCHES, ids=str)
def test_matches_mirror(xp, batch, heads, state_dtype, dtype):
    arrays, states, slots = _case(batch, heads, dtype, state_dtype)
    want_states = states.copy()
    limits = {"dt_min": 0.2, "dt_max": 1.5} if heads.groups == 2 else {}
    want = reference.mamba2(**arrays, states=want_states, **slots, **limits)
    assert np.isfinite(want.astype(np.float32)).all()
    states = xp.asarray(states)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    moved = {name: xp.asarray(array) for name, array in arrays.items()}
    got = kernels.mamba2(
        **moved,
        states=states,
        **batch.on(xp, slots),
        **limits,
        max_seqlen_q=max(batch.lens),
        out=out,
    )
    assert got is out
    assert_recurrence(got, states, want, want_states, max(batch.lens))
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views(xp, dtype):
    """Columns of wider rows, as a projection and a convolution leave them; a layer of a slab."""
    batch, heads = STATE_BATCHES[5], HEADS[1]
    arrays, states, slots = _case(batch, heads, dtype, "float32")
    want_states = states.copy()
    want = reference.mamba2(**arrays, states=want_states, **slots)
    rows = [arrays[name].reshape(batch.num_tokens, -1) for name in ("x", "b", "c", "dt")]
    wide = xp.asarray(np.concatenate(rows, axis=1))
    ends = np.cumsum([row.shape[1] for row in rows])
    parts = (wide[:, end - row.shape[1] : end] for end, row in zip(ends, rows, strict=True))
    names = zip(("x", "b", "c", "dt"), parts, strict=True)
    views = {name: part.reshape(arrays[name].shape) for name, part in names}
    moved = {name: xp.asarray(arrays[name]) for name in ("a_log", "d", "dt_bias")}
    slab = xp.asarray(np.stack([states, states], axis=1))
    got = kernels.mamba2(**views, **moved, states=slab[:, 1], **batch.on(xp, slots))
    assert_recurrence(got, slab[:, 1], want, want_states, max(batch.lens))
    np.testing.assert_array_equal(to_numpy(slab[:, 0]), states)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned_result(xp, dtype):
    batch = STATE_BATCHES[6]
    arrays, states, slots = _case(batch, HEADS[0], dtype, "float32")
    want_states = states.copy()
    want = reference.mamba2(**arrays, states=want_states, **slots)
    moved = {name: xp.asarray(array) for name, array in arrays.items()}
    out, states = misaligned(xp, np.zeros_like(want)), xp.asarray(states)
    assert kernels.mamba2(**moved, states=states, **batch.on(xp, slots), out=out) is out
    assert_recurrence(out, states, want, want_states, max(batch.lens))


@pytest.mark.parametrize("num_tokens", [3, 70])
@np.errstate(invalid="ignore")
def test_a_time_step_of_nan_stays_nan(xp, num_tokens):
    heads = Heads(1, 2, 64, 128)
    arrays, states, slots = _case(StateBatch((num_tokens,), (0,)), heads, "bfloat16", "float32")
    arrays["dt"][1] = np.nan
    moved = {name: xp.asarray(a) for name, a in (arrays | slots).items()}
    states = xp.asarray(states)
    got = to_numpy(kernels.mamba2(**moved, states=states)).astype(np.float32)
    assert np.isfinite(got[0]).all() and np.isnan(got[1:]).all()
    assert bool(xp.isnan(states[slots["state_slots"][0]]).all())


def test_mirror_is_the_recurrence_in_float64():
    heads, n = Heads(2, 4, 3, 5), 12
    arrays = _inputs(n, heads, "float32")
    x, dt, b, c, a_log, d, bias = (arrays[k].astype(np.float64) for k in arrays)
    states = np.full((1, 4, 3, 5), np.nan, np.float32)
    slots = {
        "state_slots": np.zeros(1, np.int32),
        "cu_seqlens_q": cu_seqlens([n]),
        "context_lens": np.array([n], np.int32),
    }
    got = reference.mamba2(**arrays, states=states, **slots)
    for head in range(4):
        state = np.zeros((3, 5))
        for t in range(n):
            step = np.log1p(np.exp(dt[t, head] + bias[head]))
            state *= np.exp(-step * np.exp(a_log[head]))
            state += step * np.outer(x[t, head], b[t, head // 2])
            want = state @ c[t, head // 2] + d[head] * x[t, head]
            np.testing.assert_allclose(got[t, head], want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(states[0, head], state, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 40)])
def test_pieces_are_the_whole(xp, cuts):
    """Deterministic: a sequence in pieces gives the bits of the whole, and the same state."""
    heads, n = HEADS[0], 90
    arrays = {name: xp.asarray(a) for name, a in _inputs(n, heads, "float16").items()}
    tokens = {name: arrays.pop(name) for name in ("x", "dt", "b", "c")}
    states = xp.zeros((2, heads.heads, heads.head_dim, heads.size), np.float32)
    results = []
    for slot, ends in enumerate(((n,), (*np.cumsum(cuts).tolist(), n))):
        begin, parts = 0, []
        for end in ends:
            slots = {
                "state_slots": xp.asarray(np.array([slot], np.int32)),
                "cu_seqlens_q": xp.asarray(cu_seqlens([end - begin])),
                "context_lens": xp.asarray(np.array([end], np.int32)),
            }
            piece = {name: array[begin:end] for name, array in tokens.items()}
            call = {**piece, **arrays, **slots, "states": states, "deterministic": True}
            parts.append(to_numpy(kernels.mamba2(**call)))
            begin = end
        results.append(np.concatenate(parts))
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(to_numpy(states[0]), to_numpy(states[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(cp, dtype):
    """A sequence alone, among others, or with a bound: the same bits."""
    heads = Heads(2, 4, 64, 128)
    batch = StateBatch((1, 90, 1, 8, 1, 150), (5, 0, 9, 64, 0, 128))
    arrays, states, slots = _case(batch, heads, dtype, "bfloat16")
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    together = cp.asarray(states)
    want = to_numpy(kernels.mamba2(**moved, states=together, **batch.on(cp, slots)))
    for b, (begin, end) in enumerate(itertools.pairwise(slots["cu_seqlens_q"])):
        alone = cp.asarray(states)
        own = {n: x[begin:end] if n in ("x", "dt", "b", "c") else x for n, x in moved.items()}
        one = {n: cp.asarray(slots[n][b : b + 1]) for n in ("state_slots", "context_lens")}
        one["cu_seqlens_q"] = cp.asarray(cu_seqlens([end - begin]))
        got = kernels.mamba2(**own, states=alone, **one, max_seqlen_q=int(end - begin))
        np.testing.assert_array_equal(to_numpy(got), want[begin:end], strict=True)
        slot = int(slots["state_slots"][b])
        np.testing.assert_array_equal(to_numpy(alone[slot]), to_numpy(together[slot]))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "size"), [(64, 16), (64, 128), (64, 256), (128, 64)])
def test_bits_do_not_depend_on_the_kernel(cp, monkeypatch, head_dim, size):
    """Every chunk kernel: few and many rows, one head per block and two, two stages and three."""
    batch = StateBatch((150, 9), (70, 64), "own", (58, 0))
    arrays, states, slots = _case(batch, Heads(2, 4, head_dim, size), "bfloat16", "float32")
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    results = []
    for config, stages in itertools.product(chunks.configs(head_dim, size, 2), (2, 3)):
        if config.stages(size, config.shared_bytes(size, stages)) != stages:
            continue  # no such kernel
        if config.shared_bytes(size, stages) > chunks.limits().shared_bytes:
            continue
        monkeypatch.setattr(chunks, "choose_config", lambda *_, config=config, **__: config)
        kept = cp.asarray(states)
        with monkeypatch.context() as patch:
            patch.setattr(chunks.Config, "stages", lambda *_, stages=stages: stages)
            out = kernels.mamba2(**moved, states=kept, **batch.on(cp, slots))
        results.append((to_numpy(out).astype(np.float32), to_numpy(kept)))
    assert len(results) > 1
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decays_of_zero(cp, heads):
    """Steps whose decays underflow reset a state; exponents beyond them would overflow."""
    batch = StateBatch((130, 5), (64, 9))
    arrays, states, slots = _case(batch, heads, "bfloat16", "float32")
    arrays["a_log"] += 9
    want_states = states.copy()
    want = reference.mamba2(**arrays, states=want_states, **slots)
    assert np.isfinite(want.astype(np.float32)).all()
    states = cp.asarray(states)
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    got = kernels.mamba2(**moved, states=states, **batch.on(cp, slots))
    assert_recurrence(got, states, want, want_states, max(batch.lens))


def _chunked(x, b, c, g, step, state, chunk):
    """One head in float64 by the chunked form, without the skip: (out, new state)."""
    out = []
    for begin in range(0, len(x), chunk):
        rows = slice(begin, begin + chunk)
        sums = np.cumsum(g[rows])
        decay = np.exp(np.minimum(sums[:, None] - sums, 0))
        mix = np.tril(c[rows] @ b[rows].T * decay) * step[rows]
        out.append(np.exp(sums)[:, None] * (c[rows] @ state.T) + mix @ x[rows])
        kept = (step[rows] * np.exp(sums[-1] - sums))[:, None] * x[rows]
        state = state * np.exp(sums[-1]) + kept.T @ b[rows]
    return np.concatenate(out), state


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_mirror_is_the_chunked_form(chunk):
    heads, batch = Heads(1, 2, 10, 12), StateBatch((100,), (9,))
    arrays, states, slots = _case(batch, heads, "float32", "float32")
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    states = states.astype(np.float64)
    slot = int(slots["state_slots"][0])
    first = states[slot].copy()
    got = reference.mamba2(**arrays, states=states, **slots)
    b, c = (arrays[name][:, 0] for name in "bc")
    for h in range(2):
        x = arrays["x"][:, h]
        step = np.log1p(np.exp(arrays["dt"][:, h] + arrays["dt_bias"][h]))
        g = -step * np.exp(arrays["a_log"][h])
        out, state = _chunked(x, b, c, g, step, first[h], chunk)
        np.testing.assert_allclose(got[:, h], out + arrays["d"][h] * x, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(states[slot, h], state, rtol=1e-9, atol=1e-12)


def test_equal_bounds_fix_the_step(xp):
    """Lightning attention: dt_min = dt_max = 1, whatever dt is; a plain decayed sum of v k^T."""
    heads, batch = Heads(2, 2, 16, 16), StateBatch((70,), (0,))
    arrays, states, slots = _case(batch, heads, "float32", "float32")
    arrays["d"][:] = 0
    states[:] = 0
    moved = {name: xp.asarray(array) for name, array in arrays.items()}
    call = {"states": xp.asarray(states), **batch.on(xp, slots), "dt_min": 1.0, "dt_max": 1.0}
    got = kernels.mamba2(**moved, **call)
    k, q, v = (arrays[name].astype(np.float64) for name in "bcx")
    n = np.arange(70)
    for h in range(2):
        decay = np.exp(-np.exp(float(arrays["a_log"][h])) * (n[:, None] - n))
        want = np.tril(q[:, h] @ k[:, h].T * decay) @ v[:, h]
        assert_close(got[:, h].copy(), want.astype(np.float32), reduction=70)


def test_choice_of_the_kernel():
    def choose(num_heads, heads_per_group, head_dim, size, chip=HOPPER):
        limits = {"num_sms": 132, "shared_bytes": chip.shared_bytes}
        return chunks.choose_config(num_heads, heads_per_group, head_dim, size, **limits)

    assert choose(128, 16, 64, 128) == chunks.Config(1, 64, 1)
    assert choose(2048, 16, 64, 128) == chunks.Config(2, 64, 2)
    assert choose(2048, 3, 64, 128) == chunks.Config(1, 64, 1)  # no pairs of heads
    assert choose(2048, 1, 128, 128) == chunks.Config(1, 128, 2)
    assert choose(2048, 16, 64, 256) == chunks.Config(1, 64, 1)
    assert choose(2048, 16, 80, 128) == chunks.Config(1, 80, 1)
    assert choose(2048, 16, 64, 128, PORTABLE) == chunks.Config(1, 32, 1)
    assert choose(2048, 16, 64, 256, PORTABLE) is None  # the recurrence
    assert choose(64, 1, 144, 64) is None
    assert [choose(1, 1, 64, 128).stages(128, c.shared_bytes) for c in (HOPPER, PORTABLE)] == [3, 2]


def test_contract(xp):
    batch = STATE_BATCHES[0]
    arrays, states, slots = _case(batch, HEADS[0], "float32", "float32")
    arrays = {name: xp.asarray(array) for name, array in arrays.items()}
    call = {"states": xp.asarray(states), **batch.on(xp, slots)}
    with pytest.raises(ShapeError, match=r"mamba2: dt: must have shape \(T, H\)"):
        kernels.mamba2(**arrays | {"dt": arrays["dt"][:, 1:]}, **call)
    with pytest.raises(DTypeError, match="states: must be float32 or bfloat16; got float16"):
        kernels.mamba2(**arrays, **call | {"states": call["states"].astype(np.float16)})
    wide = xp.concatenate([arrays["b"]] * 2, axis=1)
    with pytest.raises(ContractError, match="mamba2: x: must be of a multiple of 2 heads"):
        kernels.mamba2(**arrays | {"b": wide, "c": wide}, **call)
