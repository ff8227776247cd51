"""causal_conv: the kernel against its mirror, the mirror against np.convolve, and its states."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.testing import cases
from engine.testing.cases_attention import cu_seqlens
from engine.testing.cases_elementwise import misaligned
from engine.testing.cases_states import STATE_BATCHES, StateBatch
from engine.testing.tolerances import assert_close

# (channels, width): vectors and partial blocks; no vector width; one channel.
SHAPES = ((64, 4), (1032, 4), (63, 3), (1, 2), (200, 2), (96, 3))


def _case(batch, channels, width, dtype):
    slots = batch.slots()
    x = cases.normal((batch.num_tokens, channels), dtype, seed=1)
    weight = cases.normal((channels, width), dtype, seed=2)
    bias = cases.normal((channels,), dtype, seed=3)
    return x, weight, bias, batch.states((width - 1, channels), dtype, slots), slots


def _floats(array):
    return to_numpy(array).astype(np.float32)  # NumPy's comparison knows no bfloat16 NaN


def _check(got, states, want, want_states):
    assert_close(got, want, reduction=4)
    np.testing.assert_array_equal(_floats(states), _floats(want_states))


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", SHAPES, ids=str)
@pytest.mark.grid("batch", STATE_BATCHES, ids=str)
def test_matches_mirror(xp, batch, shape, dtype):
    x, weight, bias, states, slots = _case(batch, *shape, dtype)
    want_states = states.copy()
    options = {"activation": "silu", "bias": bias if shape[1] != 3 else None}
    want = reference.causal_conv(x, weight, states=want_states, **slots, **options)
    assert np.isfinite(want.astype(np.float32)).all()
    states = xp.asarray(states)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    options["bias"] = None if options["bias"] is None else xp.asarray(bias)
    got = kernels.causal_conv(
        *cases.to_module(xp, x, weight), states=states, **batch.on(xp, slots), **options, out=out
    )
    assert got is out
    _check(got, states, want, want_states)
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("batch", (STATE_BATCHES[1], STATE_BATCHES[6]), ids=str)
def test_views(xp, batch, dtype):
    """Columns of a wider projection, and one layer of a slab of states; misaligned rows."""
    x, weight, _, states, slots = _case(batch, 72, 4, dtype)
    want_states = states.copy()
    want = reference.causal_conv(x, weight, states=want_states, **slots)
    slab = xp.asarray(np.stack([states, states, states], axis=1))
    wide = xp.asarray(np.concatenate([x, x], axis=1))[:, 72:]
    got = kernels.causal_conv(wide, xp.asarray(weight), states=slab[:, 1], **batch.on(xp, slots))
    _check(got, slab[:, 1], want, want_states)
    np.testing.assert_array_equal(_floats(slab[:, 0]), _floats(states))
    shifted, states = misaligned(xp, x), xp.asarray(states)
    got = kernels.causal_conv(shifted, xp.asarray(weight), states=states, **batch.on(xp, slots))
    _check(got, states, want, want_states)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_misaligned_weight(xp, width, dtype):
    """Everything else has aligned rows: only the weight's start forbids loads of 16 bytes."""
    batch = STATE_BATCHES[1]
    x, weight, bias, states, slots = _case(batch, 72, width, dtype)
    want_states = states.copy()
    want = reference.causal_conv(x, weight, states=want_states, **slots, bias=bias)
    states, options = xp.asarray(states), {"bias": misaligned(xp, bias), **batch.on(xp, slots)}
    got = kernels.causal_conv(xp.asarray(x), misaligned(xp, weight), states=states, **options)
    _check(got, states, want, want_states)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("channels", [72, 63])
@pytest.mark.parametrize("batch", (STATE_BATCHES[1], STATE_BATCHES[6]), ids=str)
def test_gates(xp, batch, channels, dtype):
    """Factors on inputs and results, views of one projection; the states hold the products."""
    x, weight, bias, states, slots = _case(batch, channels, 3, dtype)
    in_gate, out_gate = (cases.normal(x.shape, dtype, seed) for seed in (4, 5))
    wide = xp.asarray(np.concatenate([in_gate, out_gate, x], axis=1))
    options = {"bias": bias, "in_gate": in_gate, "out_gate": out_gate}
    want_states = states.copy()
    want = reference.causal_conv(x, weight, states=want_states, **slots, **options)
    real = x.astype(np.float32) * in_gate.astype(np.float32)
    bare_states = states.copy()
    inputs = {"states": bare_states, **slots, "bias": bias}
    bare = reference.causal_conv(real.astype(x.dtype), weight, **inputs)
    np.testing.assert_array_equal(_floats(want_states), _floats(bare_states))
    product = bare.astype(np.float32) * out_gate.astype(np.float32)
    assert_close(product.astype(want.dtype), want, reduction=4)
    states = xp.asarray(states)
    options = {
        "bias": xp.asarray(bias),
        "in_gate": wide[:, :channels],
        "out_gate": wide[:, channels : 2 * channels],
    }
    got = kernels.causal_conv(
        wide[:, 2 * channels :],
        xp.asarray(weight),
        states=states,
        **batch.on(xp, slots),
        **options,
    )
    _check(got, states, want, want_states)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_per_block", [1, 2, 16])
def test_bits_do_not_depend_on_the_split(cp, monkeypatch, tokens_per_block):
    module = importlib.import_module("engine.kernels.causal_conv")
    batch = StateBatch((37, 1, 2, 3, 90, 4), (5, 3, 0, 1, 0, 8), "own", (0, 0, 1, 2, 64, 0))
    x, weight, bias, states, slots = _case(batch, 136, 4, "bfloat16")
    x, weight, bias = cases.to_module(cp, x, weight, bias)
    results = []
    for count in (tokens_per_block, 8):
        monkeypatch.setattr(module, "choose_tokens_per_block", lambda _, count=count: count)
        kept = cp.asarray(states)
        out = kernels.causal_conv(
            *cases.to_module(cp, x, weight),
            states=kept,
            **batch.on(cp, slots),
            bias=cp.asarray(bias),
        )
        results.append((to_numpy(out), to_numpy(kept)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(_floats(one), _floats(other))


def test_mirror_is_a_convolution():
    x, weight = cases.normal((40, 5), "float32", 1), cases.normal((5, 4), "float32", 2)
    slots = {
        "state_slots": np.zeros(1, np.int32),
        "cu_seqlens_q": cu_seqlens([40]),
        "context_lens": np.array([40], np.int32),
    }
    states = np.full((1, 3, 5), np.nan, np.float32)
    got = reference.causal_conv(x, weight, states=states, **slots)
    for channel in range(5):
        want = np.convolve(x[:, channel].astype(np.float64), weight[channel, ::-1])[:40]
        np.testing.assert_allclose(got[:, channel], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(states[0], x[-3:])


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 40), (64,)])
def test_pieces_are_the_whole(xp, cuts):
    """A sequence convolved in pieces gives the bits of the whole, and the same state."""
    x, weight = cases.to_module(xp, *(cases.normal((n, 64), "float16", n) for n in (90, 64)))
    weight = xp.ascontiguousarray(weight[:, :4])
    states = xp.zeros((2, 3, 64), np.float16)

    def run(begin, end, slot):
        slots = [[slot], [0, end - begin], [end]]
        names = ("state_slots", "cu_seqlens_q", "context_lens")
        arrays = dict(zip(names, (xp.asarray(s, dtype=np.int32) for s in slots), strict=True))
        return kernels.causal_conv(x[begin:end], weight, states=states, **arrays)

    want = run(0, 90, 0)
    ends = (0, *cuts, 90)
    got = xp.concatenate([run(a, b, 1) for a, b in itertools.pairwise(ends)])
    np.testing.assert_array_equal(to_numpy(got), to_numpy(want))
    np.testing.assert_array_equal(to_numpy(states[0]), to_numpy(states[1]))


def test_empty(xp):
    states = xp.ones((1, 3, 8), np.float32)
    none = xp.zeros(0, np.int32)
    got = kernels.causal_conv(
        xp.zeros((0, 8), np.float32),
        xp.zeros((8, 4), np.float32),
        states=states,
        state_slots=none,
        cu_seqlens_q=xp.zeros(1, np.int32),
        context_lens=none,
    )
    assert got.shape == (0, 8) and bool((states == 1).all())


def test_contract(xp):
    batch = STATE_BATCHES[1]
    x, weight, _, states, slots = _case(batch, 8, 4, "float32")
    x, weight, states = cases.to_module(xp, x, weight, states)
    call = {"states": states, **batch.on(xp, slots)}
    op = kernels.causal_conv
    with pytest.raises(ShapeError, match=r"states: must have shape \(num_slots, 3, C\); C = 8"):
        op(x, weight, **call | {"states": states[:, :, :7]})
    with pytest.raises(ContractError, match="weight: must be of 2 to 4 columns; got 5"):
        op(x, xp.zeros((8, 5), np.float32), **call)
    with pytest.raises(ContractError, match="activation: must be None or 'silu'; got 'gelu'"):
        op(x, weight, **call, activation="gelu")
    with pytest.raises(ContractError, match="snapshot_offsets: must be given with"):
        op(x, weight, **call, snapshot_slots=call["state_slots"])
    with pytest.raises(ContractError, match="states: must be contiguous within a slot"):
        op(x, weight, **call | {"states": xp.zeros((40, 8, 3), np.float32).swapaxes(1, 2)})
    no_targets = xp.zeros((len(call["state_slots"]), 0), np.int32)
    with pytest.raises(ContractError, match="state_targets: must be a slot of the last state at"):
        op(x, weight, **call, state_targets=no_targets)


def test_tokens_without_a_sequence(xp):
    none = xp.zeros(0, np.int32)
    slots = {"state_slots": none, "context_lens": none, "cu_seqlens_q": xp.zeros(1, np.int32)}
    states = xp.zeros((2, 3, 8), np.float32)
    with pytest.raises(ContractError, match="cu_seqlens_q: must be"):
        kernels.causal_conv(
            xp.ones((5, 8), np.float32), xp.ones((8, 4), np.float32), states=states, **slots
        )


def test_values_are_checked_on_the_cpu():
    batch = STATE_BATCHES[1]
    x, weight, _, states, slots = _case(batch, 8, 4, "float32")
    bad = {
        "state_slots": (slots["state_slots"] + 1000, "state_slots: must be slots from 0 to"),
        "state_targets": (slots["state_slots"] - 1000, "state_targets: must be slots from -1 to"),
        "cu_seqlens_q": (slots["cu_seqlens_q"][::-1].copy(), "cu_seqlens_q: must be rising"),
        "context_lens": (np.zeros(5, np.int32), "context_lens: must be at least"),
    }
    for name, (value, message) in bad.items():
        with pytest.raises(ContractError, match=message):
            kernels.causal_conv(x, weight, states=states, **slots | {name: value})


@pytest.mark.gpu
def test_slots_outside_the_states_are_harmless(cp):
    """A corrupt slot reads as zeros and is not written."""
    batch = STATE_BATCHES[1]
    x, weight, _, states, slots = _case(batch, 8, 4, "float32")
    slots["state_slots"] = np.array([-5, 2**30, -(2**31), 2**31 - 1, 99999], np.int32)
    kept = cp.asarray(states)
    got = kernels.causal_conv(*cases.to_module(cp, x, weight), states=kept, **batch.on(cp, slots))
    np.testing.assert_array_equal(to_numpy(kept), states)
    assert_close(got, x * weight[:, 3], reduction=4)
