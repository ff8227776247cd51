"""mamba2: the kernel against its mirror, the mirror against a float64 recurrence, its states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_attention import cu_seqlens
from engine.testing.cases_states import STATE_BATCHES
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


HEADS = (Heads(1, 3, 64, 128), Heads(2, 4, 40, 64), Heads(2, 2, 33, 200), Heads(1, 2, 7, 9))


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
    got = kernels.mamba2(**moved, states=states, **batch.on(xp, slots), **limits, out=out)
    assert got is out
    assert_close(got, want, reduction=heads.size)
    for slot in range(len(want_states)):
        assert_close(states[slot], want_states[slot], reduction=heads.size, name=f"state {slot}")
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
    assert_close(got, want, reduction=heads.size)
    np.testing.assert_allclose(to_numpy(slab[:, 1]), want_states, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(to_numpy(slab[:, 0]), states)


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
    """A sequence computed in pieces gives the bits of the whole, and the same state."""
    heads, n = HEADS[1], 90
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
            parts.append(to_numpy(kernels.mamba2(**piece, **arrays, states=states, **slots)))
            begin = end
        results.append(np.concatenate(parts))
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(to_numpy(states[0]), to_numpy(states[1]))


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
