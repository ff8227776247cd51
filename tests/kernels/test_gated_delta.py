"""gated_delta: the kernels against their mirror, the mirror against the chunked form in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels._chip import limits
from engine.kernels.gated_delta import chunks, steps
from engine.testing import cases
from engine.testing.cases_attention import cu_seqlens
from engine.testing.cases_elementwise import misaligned
from engine.testing.cases_states import STATE_BATCHES, StateBatch, assert_recurrence
from engine.testing.tolerances import assert_close


@dataclass(frozen=True)
class Heads:
    """Hk key heads of dk, Hv value heads of dv, and the gates' kind."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    has_channel_gate: bool = False

    def __str__(self):
        gate = "-channel" if self.has_channel_gate else ""
        return f"{self.key_heads}x{self.key_dim}-{self.heads}x{self.value_dim}{gate}"


HEADS = (
    Heads(1, 2, 128, 128),
    Heads(2, 2, 64, 40),
    Heads(2, 4, 64, 64),
    Heads(1, 1, 256, 72),
    Heads(1, 3, 96, 192),
    Heads(2, 4, 7, 9),
    Heads(2, 2, 128, 128, has_channel_gate=True),
    Heads(1, 2, 80, 96, has_channel_gate=True),
    Heads(1, 2, 20, 16, has_channel_gate=True),
)


def _inputs(num_tokens, heads, dtype):
    """Return q, k, v, a, b and the gates' parameters; decays span (0, 1)."""
    gate = (heads.key_dim,) if heads.has_channel_gate else ()
    shapes = {
        "q": (num_tokens, heads.key_heads, heads.key_dim),
        "k": (num_tokens, heads.key_heads, heads.key_dim),
        "v": (num_tokens, heads.heads, heads.value_dim),
        "a": (num_tokens, heads.heads, *gate),
        "b": (num_tokens, heads.heads),
    }
    arrays = {name: cases.normal(s, dtype, seed=i) for i, (name, s) in enumerate(shapes.items())}
    arrays["a_log"] = cases.normal((heads.heads,), "float32", seed=5)
    arrays["dt_bias"] = cases.normal((heads.heads, *gate), "float32", seed=6, mean=-2.0)
    return arrays


def _case(batch, heads, dtype, state_dtype):
    slots = batch.slots()
    shape = (heads.heads, heads.value_dim, heads.key_dim)
    return _inputs(batch.num_tokens, heads, dtype), batch.states(shape, state_dtype, slots), slots


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("state_dtype", ["float32", "bfloat16"])
@pytest.mark.grid("heads", HEADS, ids=str)
@pytest.mark.grid("batch", STATE_BATCHES, ids=str)
def test_matches_mirror(xp, batch, heads, state_dtype, dtype):
    arrays, states, slots = _case(batch, heads, dtype, state_dtype)
    want_states = states.copy()
    options = {"beta_scale": 2.0} if heads.key_heads == 2 else {"scale": 0.3}
    if heads.has_channel_gate and heads.key_heads == 1:
        options["gate_bound"] = -5.0
    want = reference.gated_delta(**arrays, states=want_states, **slots, **options)
    assert np.isfinite(want.astype(np.float32)).all()
    states = xp.asarray(states)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    moved = {name: xp.asarray(array) for name, array in arrays.items()}
    got = kernels.gated_delta(
        **moved,
        states=states,
        **batch.on(xp, slots),
        **options,
        max_seqlen_q=max(batch.lens),
        out=out,
    )
    assert got is out
    assert_recurrence(got, states, want, want_states, max(batch.lens))
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("batch", (STATE_BATCHES[1], STATE_BATCHES[6]), ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views(xp, batch, dtype):
    """q, k, v are columns of the convolution's result; states are one layer of a slab."""
    heads = Heads(2, 4, 32, 16)
    arrays, states, slots = _case(batch, heads, dtype, "float32")
    want_states = states.copy()
    want = reference.gated_delta(**arrays, states=want_states, **slots)
    rows = [arrays[name].reshape(batch.num_tokens, -1) for name in ("q", "k", "v", "a", "b")]
    ends = np.cumsum([0, *(row.shape[1] for row in rows)])
    fused = xp.asarray(np.concatenate(rows, axis=1))
    moved = {name: xp.asarray(array) for name, array in arrays.items()}
    for name, (begin, end) in zip("qkvab", itertools.pairwise(ends), strict=True):
        view = fused[:, begin:end]
        moved[name] = view if name in "ab" else view.reshape(arrays[name].shape)
    slab = xp.asarray(np.stack([states, states], axis=1))
    got = kernels.gated_delta(**moved, states=slab[:, 1], **batch.on(xp, slots))
    assert_recurrence(got, slab[:, 1], want, want_states, max(batch.lens))
    np.testing.assert_array_equal(to_numpy(slab[:, 0]), states)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("longest", [None, 1])
def test_misaligned_bias_of_channels(xp, longest, dtype):
    """Everything else has aligned rows: only dt_bias forbids loads of 16 bytes."""
    batch, heads = StateBatch((1, 1, 1), (0, 5, 9)), Heads(2, 2, 128, 128, has_channel_gate=True)
    arrays, states, slots = _case(batch, heads, dtype, "float32")
    want_states = states.copy()
    want = reference.gated_delta(**arrays, states=want_states, **slots)
    moved = {name: xp.asarray(array) for name, array in arrays.items()}
    moved["dt_bias"] = misaligned(xp, arrays["dt_bias"])
    states, options = xp.asarray(states), {"max_seqlen_q": longest, **batch.on(xp, slots)}
    got = kernels.gated_delta(**moved, states=states, **options)
    assert_recurrence(got, states, want, want_states, 1)


@pytest.mark.parametrize("has_channel_gate", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 70])
@np.errstate(invalid="ignore")
def test_a_decay_of_nan_stays_nan(xp, num_tokens, has_channel_gate):
    heads, batch = Heads(1, 2, 128, 64, has_channel_gate), StateBatch((num_tokens,), (0,))
    arrays, states, slots = _case(batch, heads, "bfloat16", "float32")
    arrays["a"][1] = np.nan
    moved = {name: xp.asarray(a) for name, a in (arrays | slots).items()}
    states = xp.asarray(states)
    got = to_numpy(kernels.gated_delta(**moved, states=states)).astype(np.float32)
    assert np.isnan(got[1:]).all()
    assert bool(xp.isnan(states[slots["state_slots"][0]]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(cp, dtype):
    """A sequence alone, among others, with larger blocks, or with a bound: the same bits."""
    heads = Heads(2, 4, 128, 128)
    batch = StateBatch((1, 90, 1, 8, 1, 150), (5, 0, 9, 64, 0, 128))
    arrays, states, slots = _case(batch, heads, dtype, "bfloat16")
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    together = cp.asarray(states)
    want = to_numpy(kernels.gated_delta(**moved, states=together, **batch.on(cp, slots)))
    starts = slots["cu_seqlens_q"]
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        alone = cp.asarray(states)
        own = {n: x if n in ("a_log", "dt_bias") else x[begin:end] for n, x in moved.items()}
        one = {n: cp.asarray(slots[n][b : b + 1]) for n in ("state_slots", "context_lens")}
        one["cu_seqlens_q"] = cp.asarray(cu_seqlens([end - begin]))
        got = kernels.gated_delta(**own, states=alone, **one, max_seqlen_q=int(end - begin))
        np.testing.assert_array_equal(to_numpy(got), want[begin:end], strict=True)
        slot = int(slots["state_slots"][b])
        np.testing.assert_array_equal(to_numpy(alone[slot]), to_numpy(together[slot]))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decays_of_zero(cp, heads):
    """Decays that underflow reset a state; exponents of products beyond them would overflow."""
    batch = StateBatch((130, 5), (64, 9))
    arrays, states, slots = _case(batch, heads, "bfloat16", "float32")
    is_reset = np.random.default_rng(0).random(arrays["a"].shape) < 0.2
    arrays["a"][is_reset] = 3e4
    want_states = states.copy()
    want = reference.gated_delta(**arrays, states=want_states, **slots)
    assert np.isfinite(want.astype(np.float32)).all()
    states = cp.asarray(states)
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    got = kernels.gated_delta(**moved, states=states, **batch.on(cp, slots))
    assert_recurrence(got, states, want, want_states, max(batch.lens))


@pytest.mark.gpu
@pytest.mark.parametrize("has_channel_gate", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 3, 7])
def test_bits_do_not_depend_on_the_launches(cp, monkeypatch, num_chunks, has_channel_gate):
    """Scratch for a few chunks only: the state is carried from launch to launch, in float32."""
    heads = Heads(1, 2, 128, 64, has_channel_gate)
    batch = StateBatch((300, 1, 9, 700), (70, 3, 0, 64), "own", (0, 0, 9, 640))
    arrays, states, slots = _case(batch, heads, "bfloat16", "float32")
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    results = []
    for count in (10_000, num_chunks):
        floats = chunks.scratch_floats(2, 128, has_channel_gate=has_channel_gate)
        scratch = 4 * count * floats
        monkeypatch.setattr(chunks, "_SCRATCH_BYTES", scratch)
        kept = cp.asarray(states)
        out = kernels.gated_delta(**moved, states=kept, **batch.on(cp, slots))
        results.append((to_numpy(out).astype(np.float32), to_numpy(kept)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [chunks.PORTABLE, chunks.HOPPER], ids=["portable", "hopper"])
@pytest.mark.parametrize("has_channel_gate", [False, True])
def test_bits_do_not_depend_on_the_slice(cp, monkeypatch, has_channel_gate, tier):
    """Every kernel of the scan: slices of v, and stages."""
    if tier is chunks.HOPPER and not chunks.is_hopper("bfloat16"):
        pytest.skip("no Hopper")
    monkeypatch.setattr(chunks, "is_hopper", lambda _: tier is chunks.HOPPER)
    batch = StateBatch((150, 9), (70, 64), "own", (58, 0))
    case = _case(batch, Heads(1, 2, 128, 128, has_channel_gate), "bfloat16", "float32")
    arrays, states, slots = case
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    want_states = states.copy()
    want = reference.gated_delta(**arrays, states=want_states, **slots)
    results = []
    for kind in tier.kernels:
        size = tier.shared_bytes(128, *kind, has_channel_gate=has_channel_gate)
        if size > limits().shared_bytes:
            continue
        monkeypatch.setattr(chunks, "choose_scan", lambda *_, kind=kind, **__: kind)
        kept = cp.asarray(states)
        out = kernels.gated_delta(**moved, states=kept, **batch.on(cp, slots))
        assert_recurrence(out, kept, want, want_states, max(batch.lens))
        results.append((to_numpy(out).astype(np.float32), to_numpy(kept)))
    assert results
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [Heads(4, 8, 128, 128), Heads(4, 16, 64, 96, True)], ids=str)
def test_many_sequences_decode(cp, heads, state_dtype):
    """Enough heads for the larger blocks of the kernel for single tokens; one without a token."""
    lens, contexts = (1,) * 35 + (0,) + (1,) * 4, (3,) * 39 + (0,)
    batch = StateBatch(lens, contexts, "own", (0, 1, *(0,) * 38))
    arrays, states, slots = _case(batch, heads, "bfloat16", state_dtype)
    want_states = states.copy()
    want = reference.gated_delta(**arrays, states=want_states, **slots)
    states = cp.asarray(states)
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    got = kernels.gated_delta(**moved, states=states, **batch.on(cp, slots), max_seqlen_q=1)
    assert_recurrence(got, states, want, want_states, 1)


@pytest.mark.gpu
def test_slots_outside_the_states_are_harmless(cp):
    batch = STATE_BATCHES[1]
    arrays, states, slots = _case(batch, HEADS[0], "float32", "float32")
    slots["state_slots"] = np.array([-5, 2**30, -(2**31), 2**31 - 1, 99999], np.int32)
    kept = cp.asarray(states)
    moved = {name: cp.asarray(array) for name, array in arrays.items()}
    got = kernels.gated_delta(**moved, states=kept, **batch.on(cp, slots))
    np.testing.assert_array_equal(to_numpy(kept), states)
    slots["context_lens"] = np.ones(5, np.int32)  # as if no tokens came before
    slots["state_slots"] = np.arange(5, dtype=np.int32)
    want = reference.gated_delta(**arrays, states=states, **slots)
    assert_close(got, want, reduction=128)


def _chunked(q, k, v, g, beta, state, chunk):
    """One head in float64 by the WY form of the chunked algorithm: (out, new state)."""
    out = []
    for begin in range(0, len(q), chunk):
        rows = slice(begin, begin + chunk)
        c = np.cumsum(g[rows], axis=0)  # (n, 1), or (n, dk) with a gate per channel
        ratio = np.exp(np.minimum(c[:, None] - c[None], 0))
        scores = np.einsum("id,jd,ijd->ij", k[rows], k[rows], ratio + 0 * k[rows][:, None])
        system = np.eye(len(c)) + np.tril(beta[rows, None] * scores, -1)
        known = v[rows] - (k[rows] * np.exp(c)) @ state.T
        x = np.linalg.solve(system, beta[rows, None] * known)
        reads = np.einsum("id,jd,ijd->ij", q[rows], k[rows], ratio + 0 * k[rows][:, None])
        out.append((q[rows] * np.exp(c)) @ state.T + np.tril(reads) @ x)
        state = state * np.exp(c[-1]) + x.T @ (k[rows] * np.exp(c[-1] - c))
    return np.concatenate(out), state


@pytest.mark.parametrize(("has_channel_gate", "bound"), [(False, 0.0), (True, 0.0), (True, -3.0)])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_mirror_is_the_chunked_form(chunk, has_channel_gate, bound):
    heads = Heads(1, 2, 12, 10, has_channel_gate)
    batch = StateBatch((100,), (9,))
    arrays, states, slots = _case(batch, heads, "float32", "float32")
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    states = states.astype(np.float64)
    slot = int(slots["state_slots"][0])
    first = states[slot].copy()
    got = reference.gated_delta(**arrays, states=states, **slots, eps=0.0, gate_bound=bound)
    q, k = (x / np.linalg.norm(x, axis=2, keepdims=True) for x in (arrays["q"], arrays["k"]))
    for h in range(2):
        x = arrays["a"][:, h] + arrays["dt_bias"][h]
        rate = np.exp(arrays["a_log"][h])
        g = bound / (1 + np.exp(-rate * x)) if bound else -rate * np.log1p(np.exp(x))
        g = g.reshape(100, -1)
        beta = 1 / (1 + np.exp(-arrays["b"][:, h]))
        inputs = q[:, 0] * 12**-0.5, k[:, 0], arrays["v"][:, h], g, beta
        out, state = _chunked(*inputs, first[h], chunk)
        np.testing.assert_allclose(got[:, h], out, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(states[slot, h], state, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3), (64,), (40, 41, 128)])
def test_pieces_are_the_whole(xp, cuts):
    """Prefill in pieces, and token by token, gives what one call gives."""
    heads = Heads(1, 2, 16, 16)
    arrays = {name: xp.asarray(x) for name, x in _inputs(150, heads, "float32").items()}
    states = xp.full((2, 2, 16, 16), np.nan, np.float32)

    def run(begin, end, slot):
        part = {n: x if n in ("a_log", "dt_bias") else x[begin:end] for n, x in arrays.items()}
        slots = {"state_slots": [slot], "cu_seqlens_q": [0, end - begin], "context_lens": [end]}
        moved = {name: xp.asarray(x, dtype=np.int32) for name, x in slots.items()}
        return to_numpy(kernels.gated_delta(**part, states=states, **moved))

    want = run(0, 150, 0)
    ends = (0, *cuts, 150)
    got = np.concatenate([run(a, b, 1) for a, b in itertools.pairwise(ends)])
    assert_close(got, want, reduction=150)
    assert_close(states[1], to_numpy(states[0]), reduction=150)


@pytest.mark.parametrize("has_channel_gate", [False, True])
@pytest.mark.parametrize("num_sequences", [0, 2])
def test_no_tokens(xp, num_sequences, has_channel_gate):
    """Sequences without tokens keep their states."""
    heads = next(one for one in HEADS if one.has_channel_gate == has_channel_gate)
    arrays = _inputs(0, heads, "float32")
    shape = (3, heads.heads, heads.value_dim, heads.key_dim)
    states = cases.normal(shape, "float32", seed=2)
    slots = {
        "state_slots": np.arange(num_sequences, dtype=np.int32),
        "cu_seqlens_q": np.zeros(num_sequences + 1, np.int32),
        "context_lens": np.full(num_sequences, 5, np.int32),
    }
    arrays, slots = ({n: xp.asarray(a) for n, a in each.items()} for each in (arrays, slots))
    after = xp.asarray(states.copy())
    out = kernels.gated_delta(**arrays, states=after, **slots)
    assert out.shape == (0, heads.heads, heads.value_dim)
    np.testing.assert_array_equal(to_numpy(after), states)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_an_update_of_strength_zero(xp, dtype):
    """exp(1000) overflows, and beta is 0: the state stays 0."""
    heads = cases.normal((1, 1, 8), dtype, seed=1)
    gates = np.zeros((1, 1), heads.dtype), np.full((1, 1), -1000, heads.dtype)
    states = xp.zeros((1, 1, 8, 8), np.float32)
    got = kernels.gated_delta(
        *cases.to_module(xp, heads, heads, heads, *gates),
        a_log=xp.zeros(1, np.float32),
        dt_bias=xp.zeros(1, np.float32),
        states=states,
        state_slots=xp.zeros(1, np.int32),
        cu_seqlens_q=xp.asarray([0, 1], np.int32),
        context_lens=xp.ones(1, np.int32),
    )
    assert not to_numpy(got).any() and not to_numpy(states).any()


def test_an_update_replaces_what_a_key_read():
    """With beta 1 and no decay, a key then reads the value that it wrote: the delta rule."""
    q = cases.normal((2, 1, 8), "float32", seed=1).astype(np.float64)
    q[1] = q[0]
    v = np.array([[[1.0, -2.0]], [[5.0, 3.0]]])
    got = reference.gated_delta(
        q,
        q,
        v,
        np.full((2, 1), -1e3),  # softplus is 0: no decay
        np.full((2, 1), 1e3),  # beta is 1
        a_log=np.zeros(1),
        dt_bias=np.zeros(1),
        states=np.zeros((1, 1, 2, 8)),
        state_slots=np.zeros(1, np.int32),
        cu_seqlens_q=np.array([0, 2], np.int32),
        context_lens=np.array([2], np.int32),
        scale=1.0,
        eps=0.0,
    )
    np.testing.assert_allclose(got, v, rtol=1e-12)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("state_dtype", ["float32", "bfloat16"])
@pytest.mark.grid("heads", HEADS, ids=str)
@pytest.mark.grid("batch", (STATE_BATCHES[1], STATE_BATCHES[3], STATE_BATCHES[6]), ids=str)
def test_norm_of_the_output(xp, batch, heads, state_dtype, dtype):
    """The gated norm in the same launch (one token each), or in its own; z is a strided view."""
    arrays, states, slots = _case(batch, heads, dtype, state_dtype)
    wide = cases.normal((batch.num_tokens, 3, heads.heads, heads.value_dim), dtype, seed=8)
    weight = cases.normal((heads.value_dim,), dtype, seed=9, mean=1.0)
    options = {"norm_eps": 1e-5, "norm_activation": "sigmoid" if heads.key_heads == 2 else "silu"}
    call = {name: xp.asarray(array) for name, array in arrays.items()} | batch.on(xp, slots)
    call["max_seqlen_q"] = max(batch.lens)
    plain_states, normed_states = xp.asarray(states), xp.asarray(states.copy())
    plain = to_numpy(kernels.gated_delta(**call, states=plain_states))
    norm = {"z": xp.asarray(wide)[:, 1], "norm_weight": xp.asarray(weight)}
    got = kernels.gated_delta(**call, states=normed_states, **norm, **options)
    want = reference.gated_norm(
        plain, wide[:, 1], weight, eps=1e-5, activation=options["norm_activation"]
    )
    assert_close(got, want, reduction=heads.value_dim)
    kept = (to_numpy(x).astype(np.float32) for x in (normed_states, plain_states))
    np.testing.assert_array_equal(*kept)


def test_choice_of_the_kernel():
    def choose(num_heads, value_dim, lanes, **changes):
        kind = {"is_single": True, "has_norm": False, "fits": True, "num_sms": 132}
        kind |= {"many_rows": 8} | changes
        return steps.choose_config(num_heads, value_dim, lanes, **kind)

    assert choose(512, 128, 16) == steps.Config("single_many", 128, 2)
    assert choose(512, 128, 16, many_rows=4) == steps.Config("single_many", 128, 4)
    assert choose(16, 128, 16) == steps.Config("single_few", 128, 4)
    assert choose(512, 128, 16, is_single=False) == steps.Config("steps_4", 128, 4)
    assert choose(512, 128, 8, fits=False) == steps.Config("steps_scalar", 128, 2)
    assert choose(512, 64, 8, has_norm=True) == steps.Config("single_norm", 64, 1)
    assert choose(1024, 64, 8, has_norm=True) == steps.Config("single_many", 128, 1)
    assert choose(512, 64, 8, has_norm=True, many_rows=4) == steps.Config("single_many", 128, 1)
    assert choose(512, 192, 16, has_norm=True) == steps.Config("single_many", 128, 3)  # too many


def test_choice_of_the_scan():
    """Narrow slices fill the chip with few heads; shared memory bounds width and stages."""
    choose = chunks.choose_scan
    h100 = {"num_sms": 132, "shared_bytes": 227 * 1024}
    small = {"num_sms": 84, "shared_bytes": 99 * 1024}
    assert choose(chunks.HOPPER, 1000, 96, 192, **h100) == (64, 3)
    assert choose(chunks.HOPPER, 1000, 128, 128, has_channel_gate=True, **h100) == (128, 2)
    assert choose(chunks.PORTABLE, 1000, 128, 96, **h100) == (32, 2)
    assert choose(chunks.PORTABLE, 1000, 128, 128, **small) == (128, 1)
    assert choose(chunks.PORTABLE, 1, 64, 128, **small) == (32, 2)


def test_ranges_of_chunks():
    """Every sequence's chunks are in exactly one launch each, also those that begin late."""
    ranges = chunks.launch_ranges(1000, 3, chunks._SCRATCH_BYTES // 64)
    assert ranges[0] == (0, 16) and sum(count for _, count in ranges) == 1000 // 64 + 6
    assert [first for first, _ in ranges] == [0, 16]


def test_contract(xp):
    batch = STATE_BATCHES[1]
    arrays, states, slots = _case(batch, Heads(2, 4, 8, 6), "float16", "float32")
    call = {name: xp.asarray(x) for name, x in arrays.items()} | batch.on(xp, slots)
    call["states"] = xp.asarray(states)
    op = kernels.gated_delta
    with pytest.raises(ShapeError, match=r"k: must have shape \(T, Hk, dk\); dk = 8 from q"):
        op(**call | {"k": call["k"][:, :, :4]})
    with pytest.raises(ContractError, match="v: must be of a multiple of 2 heads, as q has; got 3"):
        v = call["v"][:, :3]
        gates = {"a": call["a"][:, :3], "b": call["b"][:, :3], "a_log": call["a_log"][:3]}
        op(
            **call
            | gates
            | {"v": v, "dt_bias": call["dt_bias"][:3], "states": call["states"][:, :3]}
        )
    with pytest.raises(DTypeError, match="a_log: must be float32; got float16"):
        op(**call | {"a_log": call["a_log"].astype(np.float16)})
    with pytest.raises(DTypeError, match="states: must be float32 or bfloat16; got float16"):
        op(**call | {"states": call["states"].astype(np.float16)})
    with pytest.raises(ShapeError, match=r"dt_bias: must have shape \(Hv, dk\)"):
        op(**call | {"a": xp.zeros((5, 4, 8), np.float16)})
    with pytest.raises(ContractError, match="norm_weight: must be given with z"):
        op(**call, z=call["v"])
    with pytest.raises(ContractError, match="norm_activation: must be one of"):
        op(**call, norm_activation="relu")
    with pytest.raises(ContractError, match="gate_bound: must be 0, or negative with a gate per"):
        op(**call, gate_bound=-5.0)
    with pytest.raises(ContractError, match="max_seqlen_q: must be an int of 0 or more; got -1"):
        op(**call, max_seqlen_q=-1)
