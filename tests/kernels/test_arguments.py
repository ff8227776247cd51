"""Arguments that callers get wrong alike in many ops: NumPy's integers, other types, read-only."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine import kernels
from engine.errors import ContractError, DTypeError

ROWS = np.arange(24, dtype=np.float32).reshape(3, 8)
CUBE = ROWS[:, None].copy()
IDS = np.array([0, 2, 2], np.int32)
LOGITS = np.arange(24, dtype=np.float32).reshape(3, 8) % 5
ORDER, OFFSETS = np.array([1, 0, 2], np.int32), np.array([0, 1, 3], np.int32)
PAGES = np.zeros((2, 1, 16, 8), np.float32)
GATHERED = (
    PAGES,
    PAGES,
    np.zeros((1, 2), np.int32),
    np.array([3], np.int32),
    np.array([0, 3], np.int32),
)

# Name of an argument -> a call that takes it, and a valid value.
INTEGERS = {
    "vocab_size": (lambda n: kernels.embedding_backward(ROWS, IDS, np.arange(3), n), 5),
    "padding_id": (
        lambda n: kernels.embedding_backward(ROWS, IDS, np.arange(3), 5, padding_id=n),
        2,
    ),
    "nope_dim": (lambda n: kernels.mla_expand(ROWS[:, None], ROWS[:, :2], nope_dim=n), 5),
    "total_tokens": (lambda n: kernels.kv_gather(*GATHERED, total_tokens=n), 3),
    "num_experts": (
        lambda n: kernels.moe_sort(IDS[:, None], ROWS[:, :1].copy(), num_experts=n),
        3,
    ),
    "top_k": (lambda n: kernels.moe_route(LOGITS, n), 2),
    "num_groups": (lambda n: kernels.moe_route(LOGITS, 2, num_groups=n, top_groups=2), 4),
    "top_groups": (lambda n: kernels.moe_route(LOGITS, 2, num_groups=4, top_groups=n), 2),
    "num_shared": (lambda n: kernels.moe_route(LOGITS, 2, num_shared=n), 1),
    "num_splits": (
        lambda n: kernels.lora_shrink(
            ROWS, np.ones((2, 4, 8), np.float32), ORDER, OFFSETS, num_splits=n
        ),
        1,
    ),
    "bounds": (
        lambda n: kernels.lora_expand(
            np.ones((1, 3, 4), np.float32),
            np.ones((2, 6, 4), np.float32),
            ORDER,
            OFFSETS,
            bounds=(n,),
        ),
        6,
    ),
    "group": (lambda n: kernels.quantize_rows(np.ones((2, 256), np.float32), group=n), 128),
}


def _leaves(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_an_integer_may_be_numpys(name, kind):
    """As a size from another array is: ``ids.max() + 1``."""
    call, number = INTEGERS[name]
    for got, want in zip(_leaves(call(kind(number))), _leaves(call(number)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [None, "2", 1.5, np.float32(2.0), True, [1], 10**30])
def test_a_value_that_is_no_such_integer_is_named(name, value):
    call, _ = INTEGERS[name]
    if value is None and name in ("total_tokens", "num_splits"):  # their default
        return
    with pytest.raises(ContractError, match=rf"{name}: must be .*; got"):
        call(value)


@pytest.mark.parametrize("out", [[[1.0]], "out", 1, np.float32(1), object()])
def test_an_out_that_is_no_array_is_named(out):
    with pytest.raises((ContractError, DTypeError), match="scale_rows: out: must be an array; got"):
        kernels.scale_rows(ROWS, np.ones(3, np.float32), out=out)
    with pytest.raises(DTypeError, match="cross_entropy: dlogits_out: must be an array; got"):
        kernels.cross_entropy(
            LOGITS, IDS.astype(np.int64), dloss=np.ones(3, np.float32), dlogits_out=out
        )


@pytest.mark.parametrize("routing", [None, 3, (1, 2, 3, 4), "routing"])
def test_a_routing_of_another_type_is_named(routing):
    weight = np.ones((4, 2, 8), np.float32)
    pairs = np.ones((3, 8), np.float32)
    name = type(routing).__name__
    for call in (
        lambda: kernels.moe_gemm(ROWS, weight, routing),
        lambda: kernels.moe_gemm_combine(ROWS, weight, routing),
        lambda: kernels.moe_wgrad(pairs, ROWS, routing, gather="x"),
        lambda: kernels.moe_activation_backward(pairs[:, :4], pairs, routing),
    ):
        with pytest.raises(ContractError, match=f"routing: must be a Routing.*; got '{name}'"):
            call()
    if routing is not None:
        with pytest.raises(ContractError, match=f"routing: must be a Routing.*; got '{name}'"):
            kernels.moe_combine(pairs[:, None], routing=routing, num_identity=1)


@pytest.mark.parametrize("out_dtype", ["nope", 5, [1.0]])
def test_an_out_dtype_that_is_none_is_named(out_dtype):
    routing = kernels.moe_route(LOGITS[:, :4].copy(), 1)
    for op in (kernels.moe_gemm, kernels.moe_gemm_combine):
        with pytest.raises(ContractError, match="out_dtype: must be float32; got"):
            op(ROWS, np.ones((4, 2, 8), np.float32), routing, out_dtype=out_dtype)


def test_indices_outside_are_named_on_the_host():
    with pytest.raises(ContractError, match=r"order: must be from 0 to 2; got \(0, 3\)"):
        kernels.embedding_backward(ROWS, IDS, np.array([0, 1, 3]), 5)
    routing = kernels.moe_route(LOGITS, 2, num_shared=1)  # seven experts and a shared one
    with pytest.raises(ContractError, match=r"experts: must be from 0 to 6; got \(\d, 7\)"):
        kernels.moe_route_backward(routing.weights, LOGITS[:, :7].copy(), routing.experts)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"order": np.array([0, 1, 3], np.int32)}, r"order: must be from 0 to 2; got \(0, 3\)"),
        ({"order": np.array([0, -1, 2], np.int32)}, r"order: must be from 0 to 2; got \(-1, 2\)"),
        ({"offsets": np.array([0, 9, 9, 3, 3], np.int32)}, r"offsets: must be from 0 to 3; got"),
    ],
)
def test_a_damaged_routing_is_named_on_the_host(damage, text):
    weight = np.ones((4, 2, 8), np.float32)
    pairs = np.ones((3, 8), np.float32)
    routing = kernels.moe_route(LOGITS[:, :4].copy(), 1)._replace(**damage)
    calls = [
        lambda: kernels.moe_gemm(ROWS, weight, routing),
        lambda: kernels.moe_gemm_combine(ROWS, weight, routing),
        lambda: kernels.moe_wgrad(pairs, ROWS, routing, gather="x"),
    ]
    if "order" in damage:
        calls.append(lambda: kernels.moe_activation_backward(pairs[:, :4], pairs, routing))
    for call in calls:
        with pytest.raises(ContractError, match=rf"routing\.{text}"):
            call()


def test_a_limit_of_mamba2_that_is_no_number_is_named():
    ones = np.ones((1, 1), np.float32)
    zero = np.zeros(1, np.int32)
    arrays = {
        "x": np.ones((1, 1, 8), np.float32),
        "dt": ones,
        "b": np.ones((1, 1, 8), np.float32),
        "c": np.ones((1, 1, 8), np.float32),
    }
    states = {
        "states": np.zeros((1, 1, 8, 8), np.float32),
        "state_slots": zero,
        "cu_seqlens_q": np.array([0, 1], np.int32),
        "context_lens": zero + 1,
    }
    heads = dict.fromkeys(("a_log", "d", "dt_bias"), np.zeros(1, np.float32))
    for value in (None, "1", np.nan):
        with pytest.raises(ContractError, match=r"dt_max: must be a number .*; got"):
            kernels.mamba2(**arrays, **heads, **states, dt_max=value)


class Unusable(np.ndarray):
    """A subclass that computes nothing."""

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        raise AssertionError("an op must not compute with a caller's class")


@pytest.mark.parametrize("kind", [np.matrix, Unusable])
def test_an_array_of_a_subclass_is_a_plain_one(kind):
    """`*` of np.matrix, which SciPy's ``todense()`` returns, is a product of matrices."""
    square = np.arange(16, dtype=np.float32).reshape(4, 4) - 5
    given, ones = square.view(kind), np.ones(4, np.float32)
    for got, want in (
        (kernels.relu(given, squared=True), kernels.relu(square, squared=True)),
        (kernels.rmsnorm(given, ones), kernels.rmsnorm(square, ones)),
        (kernels.gemm(given, given), kernels.gemm(square, square)),
        (kernels.silu(square, out=np.empty_like(square).view(kind)), kernels.silu(square)),
    ):
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, want)
    op = kernels.define(
        "squared",
        "x: (M, N) float32 -> (M, N) like x",
        reference=lambda x: x * x,
        source='extern "C" __global__ void squared(const float* x, float* out) {}',
        launch=lambda call: call.grid1d(1, 32),
    )
    np.testing.assert_array_equal(op(given), square * square)


def test_a_file_may_be_an_argument_and_an_out(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 8))
    x[:] = ROWS
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(3, 8))
    assert kernels.silu(x, out=out) is out
    np.testing.assert_array_equal(out, kernels.silu(ROWS))


@pytest.mark.parametrize("flag", [np.array([True, False]), np.array([], bool)], ids=str)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rmsnorm: subtract_mean", lambda flag: kernels.rmsnorm(ROWS, ROWS[0], subtract_mean=flag)),
        ("relu: squared", lambda flag: kernels.relu(ROWS, squared=flag)),
        ("gemm: deterministic", lambda flag: kernels.gemm(ROWS, ROWS, deterministic=flag)),
    ],
)
def test_an_array_in_place_of_a_flag_is_named(name, call, flag):
    with pytest.raises(ContractError, match=f"^{name}: must be True or False; got an array of"):
        call(flag)


def _zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# Name of an op that also writes an argument in place -> a call with `out`, and that argument.
def _causal_conv(out):
    states = _zeros(1, 1, 8)
    sequence = {"cu_seqlens_q": np.array([0, 3], np.int32), "context_lens": np.array([3], np.int32)}
    slots = {"states": states, "state_slots": _zeros(1, dtype=np.int32)}
    return lambda: kernels.causal_conv(ROWS, _zeros(8, 2), **slots, **sequence, out=out), states


def _mamba2(out):
    states = np.ones((1, 1, 8, 8), np.float32)
    heads = dict.fromkeys(("a_log", "d", "dt_bias"), _zeros(1))
    sequence = {"cu_seqlens_q": np.array([0, 3], np.int32), "context_lens": np.array([3], np.int32)}
    slots = {"states": states, "state_slots": _zeros(1, dtype=np.int32)}
    arrays = (ROWS[:, None].copy(), _zeros(3, 1), ROWS[:, None].copy(), ROWS[:, None].copy())
    return lambda: kernels.mamba2(*arrays, **heads, **slots, **sequence, out=out), states


def _gated_delta(out):
    states = np.ones((1, 1, 8, 8), np.float32)
    heads = dict.fromkeys(("a_log", "dt_bias"), _zeros(1))
    sequence = {"cu_seqlens_q": np.array([0, 3], np.int32), "context_lens": np.array([3], np.int32)}
    slots = {"states": states, "state_slots": _zeros(1, dtype=np.int32)}
    arrays = (*[ROWS[:, None].copy()] * 3, _zeros(3, 1), _zeros(3, 1))
    return lambda: kernels.gated_delta(*arrays, **heads, **slots, **sequence, out=out), states


def _decode_inputs(out):
    tables = _zeros(2, 2, dtype=np.int32)
    lists = [np.array(values, np.int32) for values in ([1], [[-1, 8]], [[17, 18]], [5, 6])]
    news = [np.array(values, np.int32) for values in ([0], [0, 2], [9, 4])]
    outs = (None, None, out)
    return lambda: kernels.decode_inputs(*lists, tables, *news, block_size=16, out=outs), tables


def _decode_outputs(out):
    ids, last_ids = np.array([[7]], np.int32), _zeros(2, dtype=np.int32)
    status, rows = _zeros(1, 1, dtype=np.int32), np.array([1], np.int32)
    return lambda: kernels.decode_outputs(ids, status, rows, last_ids, out=out), last_ids


def _rmsnorm_moe_route(out):
    load = _zeros(4, dtype=np.int64)
    options = {"residual": ROWS, "residual_out": out, "load": load}
    return lambda: kernels.rmsnorm_moe_route(
        ROWS, ROWS[0], ROWS[:1].repeat(4, 0), 2, **options
    ), load


@pytest.mark.parametrize(
    "op",
    [_causal_conv, _mamba2, _gated_delta, _decode_inputs, _decode_outputs, _rmsnorm_moe_route],
)
@pytest.mark.parametrize("out", [_zeros(3, 9), np.broadcast_to(_zeros(1, 8), (3, 8)), "out"])
def test_nothing_is_written_if_out_is_wrong(op, out):
    call, written = op(out)
    before = written.copy()
    with pytest.raises(ContractError, match=r"out(\[2\])?: must"):
        call()
    np.testing.assert_array_equal(written, before)
    call, written = op(None)  # the call itself does write
    call()
    assert not np.array_equal(written, before)


def _attention_prefill(flag):
    out = np.ones_like(CUBE)
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array([0, 3], np.int32))
    options = {**ends, "out": out, "return_lse": flag}
    return lambda: kernels.attention_prefill(CUBE, CUBE, CUBE, **options), (out,)


def _attention_prefill_fp8(flag):
    out = np.ones(CUBE.shape, ml_dtypes.bfloat16)
    codes = CUBE.astype(ml_dtypes.float8_e4m3fn)
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array([0, 3], np.int32))
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), np.ones(1, np.float32))
    options = {**ends, **scales, "out": out, "return_lse": flag}
    return lambda: kernels.attention_prefill_fp8(codes, codes, codes, **options), (out,)


def _attention_decode(name):
    def case(flag):
        pages = np.ones((2, 2, 1, 16, 8), np.float32)
        new = {"k": ROWS[:1, None, None].copy(), "v": ROWS[:1, None, None].copy()}
        new |= {"positions": np.zeros(1, np.int32), "cos_sin": ROWS}
        keys = {"block_tables": _zeros(1, 1, dtype=np.int32), "context_lens": np.ones(1, np.int32)}
        options = {**keys, **new, "slot_mapping": np.zeros(1, np.int64), name: flag}
        options["sinks"] = np.zeros(1, np.float32)
        q = ROWS[1:2, None, None].copy()
        return lambda: kernels.attention_decode(q, *pages, **options), (pages,)

    return case


def _mla_decode(flag):
    out = np.ones((1, 1, 2, 8), np.float32)
    keys = {"block_tables": _zeros(1, 1, dtype=np.int32), "context_lens": np.ones(1, np.int32)}
    options = {**keys, "scale": 1.0, "out": out, "return_lse": flag}
    arrays = (_zeros(1, 1, 2, 8), _zeros(1, 1, 2, 4), _zeros(1, 16, 12))
    return lambda: kernels.mla_decode(*arrays, **options), (out,)


def _rmsnorm_moe_route_codes(flag):
    out = np.ones_like(ROWS)
    load = _zeros(4, dtype=np.int64)
    options = {"out": out, "load": load, "quantize_out": flag}
    arrays = (ROWS, ROWS[0], ROWS[:1].repeat(4, 0))
    return lambda: kernels.rmsnorm_moe_route(*arrays, 2, **options), (out, load)


@pytest.mark.parametrize(
    "op",
    [
        _attention_prefill,
        _attention_prefill_fp8,
        _attention_decode("return_lse"),
        _attention_decode("quantize_out"),
        _mla_decode,
        _rmsnorm_moe_route_codes,
    ],
)
def test_nothing_is_written_if_a_flag_is_an_array(op):
    call, written = op(np.array([True, False]))
    before = [one.copy() for one in written]
    with pytest.raises(ContractError, match="must be True or False; got an array of"):
        call()
    for got, want in zip(written, before, strict=True):
        np.testing.assert_array_equal(got, want)
    call, written = op(False)  # the call itself does write
    call()
    assert not any(map(np.array_equal, written, before))


@pytest.mark.parametrize("word", [["silu"], np.ones(2), {}, 1.5, b"silu"], ids=str)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gelu: approximate", lambda word: kernels.gelu(ROWS, approximate=word)),
        ("quantize_rows: dtype", lambda word: kernels.quantize_rows(ROWS, dtype=word)),
        ("gemm: activation", lambda word: kernels.gemm(ROWS, ROWS, activation=word)),
        ("gated_norm: activation", lambda w: kernels.gated_norm(CUBE, CUBE, ROWS[0], activation=w)),
        ("moe_route: score", lambda word: kernels.moe_route(LOGITS, 2, score=word)),
        ("activation_backward: activation", lambda w: kernels.activation_backward(ROWS, ROWS, w)),
    ],
)
def test_a_word_of_another_type_is_named(name, call, word):
    with pytest.raises(ContractError, match=f"^{name}: must be .*; got"):
        call(word)


def test_an_array_in_an_error_is_told_by_its_shape():
    """Its elements would fill pages."""
    many = np.zeros((1000, 8), np.float32)
    order, offsets = np.zeros(1000, np.int32), np.array([0, 1000], np.int32)
    for call, text in (
        (lambda: kernels.rmsnorm(many, many[0], residual_out=many), "got an array of shape (1000,"),
        (lambda: kernels.rmsnorm(many, many[0], eps=many), "got an array of shape (1000, 8)"),
        (lambda: kernels.moe_combine(many[:, None], num_identity=many), "got an array of shape"),
        (
            lambda: kernels.lora_shrink(many, np.ones((1, 4, 8), np.float32), order, offsets),
            "a permutation of range(1000); got 'token 0 1000 times'",
        ),
        (
            lambda: kernels.lora_shrink(many, np.ones((1, 4, 8), np.float32), order - 1, offsets),
            "order: must be a permutation of range(1000); got [-1]",
        ),
    ):
        with pytest.raises(ContractError) as failure:
            call()
        assert text in str(failure.value) and len(str(failure.value)) < 200


def test_a_bound_of_the_lengths_that_is_too_small_is_named_on_the_host():
    """On a GPU the tokens beyond it would be left out."""
    ends = np.array([0, 1, 3], np.int32)
    sequences = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    for bound, text in (
        (1, "at least 2, the longest sequence; got 1"),
        (-1, "an int of 0 or more"),
    ):
        with pytest.raises(ContractError, match=f"max_seqlen_q: must be {text}"):
            kernels.attention_prefill(CUBE, CUBE, CUBE, **sequences, max_seqlen_q=bound)
    out, lse = kernels.attention_prefill(
        CUBE, CUBE, CUBE, **sequences, max_seqlen_q=9, return_lse=True
    )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(ContractError, match=f"{name}: must be at least 2, the longest seq"):
            kernels.attention_backward(CUBE, CUBE, CUBE, CUBE, out, lse, **sequences, **{name: 1})
    slots = {"state_slots": np.array([0, 1], np.int32), "context_lens": np.array([1, 2], np.int32)}
    heads = dict.fromkeys(("a_log", "dt_bias"), _zeros(1))
    states = _zeros(2, 1, 8, 8)
    with pytest.raises(ContractError, match="gated_delta: max_seqlen_q: must be at least 2"):
        kernels.gated_delta(
            *[CUBE] * 3,
            *[_zeros(3, 1)] * 2,
            **heads,
            states=states,
            **slots,
            cu_seqlens_q=ends,
            max_seqlen_q=1,
        )
    assert not states.any()


@pytest.mark.parametrize("eps", [np.complex64(1), 10**400, np.nan, -1, True, "1"])
def test_a_number_that_is_none_is_told(eps):
    with pytest.raises(ContractError, match=r"eps: must be a number from 0\.0 to inf; got"):
        kernels.rmsnorm(ROWS, ROWS[0], eps=eps)


@pytest.mark.parametrize("op", [kernels.lora_shrink, kernels.lora_expand])
def test_offsets_that_fall_by_more_than_int32_holds_are_refused(op):
    """Their difference, in int32, is positive."""
    offsets = np.array([0, 3, -(2**31)], np.int32)
    options = {"bounds": (6,)} if op is kernels.lora_expand else {}
    x = np.ones((1, 3, 4), np.float32) if options else ROWS[:, :4].copy()
    with pytest.raises(ContractError, match="offsets: must be ascending; got"):
        op(x, np.ones((2, 6, 4), np.float32), ORDER, offsets, **options)


PRODUCT = kernels.define(
    "product",
    "x: (M, N) float32 -> (M, N) like x strided",
    reference=lambda x: 2 * x,
    source='extern "C" __global__ void product(const float* x, float* out) {}',
    launch=lambda call: call.grid1d(1, 32),
)
_AS_STRIDED = np.lib.stride_tricks.as_strided


@pytest.mark.parametrize("strides", [(0, 4), (16, 4), (-16, 4)], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda out: kernels.rmsnorm(ROWS, ROWS[0], out=out),
        lambda out: kernels.gemm(ROWS, np.ones((8, 8), np.float32), out=out),
        lambda out: PRODUCT(ROWS, out=out),
    ],
    ids=["rmsnorm", "gemm", "product"],
)
def test_an_out_whose_rows_share_memory_is_refused(call, strides):
    """As a broadcast view does: the later row would overwrite the earlier one."""
    memory = np.full(24, 7, np.float32)
    out = _AS_STRIDED(memory[8:], (3, 8), strides)
    with pytest.raises(ContractError, match=r"out: its elements must not share memory; got shape"):
        call(out)
    assert (memory == 7).all()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_an_out_of_reversed_or_exchanged_axes_is_filled(order):
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1].transpose(order)
    out = np.empty((4, 5, 6), np.float32)[1:3, 3:0:-1, 2:].transpose(order)
    want = kernels.rmsnorm(x.copy(), np.ones(4, np.float32))
    assert kernels.rmsnorm(x, np.ones(4, np.float32), out=out) is out
    np.testing.assert_array_equal(out, want)
