"""`kernels.override` on single ops: keywords, results, and fused ops as their parts."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import kernels, reference
from engine.errors import ConfigError, ContractError, UnknownOptionError
from engine.kernels._override.dispatch import OPS
from engine.kernels._override.fused import KEPT, STEPS, WHOLES
from engine.kernels._override.scope import ModelKernels
from engine.kernels._override.table import Overrides
from engine.testing.cases_quantized import random_weight
from engine.weights.quantize import quantize, resolve_format
from engine.weights.stack import stack_matrices

ROOT = Path(engine.__file__).parent
RNG = np.random.default_rng(0)
SAMPLES = [
    {"activation": name, "quantize_x": True, "quantize_out": True}
    | {"residual": 0, "q_weight": 0, "k_weight": 0, "q_factors": 0, "dtype": "fp8"}
    | {"deterministic": True}
    | dict.fromkeys(("k", "v", "positions", "cos_sin", "slot_mapping"), 0)
    for name in ("swiglu", "silu", "gelu", "gelu_tanh", "relu")
]


def array(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def int4(*shape):
    return quantize(array(*shape), resolve_format("int4"))


def pages():
    return np.zeros((4, 2, 16, 8), np.float32)


def heads(q_weight=True):
    """Arguments of `qk_norm_rope_store`: 3 tokens, H = 4, K = 2, D = 8."""
    args = (array(3, 4, 8), array(3, 2, 8), array(3, 2, 8), np.arange(3, dtype=np.int32))
    args += (array(8, 8), pages(), pages(), np.arange(3, dtype=np.int64))
    norms = {"q_weight": array(8), "k_weight": array(8)} if q_weight else {}
    return args, {"q_factors": array(8), **norms}


def decode():
    q, k, v, positions, table, k_pages, v_pages, slots = heads()[0]
    slots = slots * 16
    options = {"block_tables": np.arange(3, dtype=np.int32)[:, None]}
    options |= {"context_lens": np.ones(3, np.int32), "k": k[:, None], "v": v[:, None]}
    options |= {"positions": positions * 0, "cos_sin": table, "slot_mapping": slots}
    options |= {"q_weight": array(8), "k_weight": array(8), "max_context_len": 16}
    options |= {"quantize_out": True, "return_lse": True}
    return (q[:, None], k_pages, v_pages), options


def half_of_a_token():
    """Arguments of `attention_decode` with a new token that lacks its values."""
    args, options = decode()
    return args, options | {"v": None}


def routing():
    return reference.moe_route(array(3, 4), 2)


def coded_experts(rows):
    return stack_matrices([random_weight("fp8_block", rows, 16, seed) for seed in range(4)])


def eight_bit(name):
    group = 128 if name == "int8" else 0
    codes, scales = reference.quantize_rows(array(12, 16), dtype=name, group=group)
    return codes, scales[:, 0]


PRODUCT = {"activation": "swiglu", "bias": array(12)}
CALLS = {
    "gemm": lambda: ((array(3, 16), array(12, 16)), dict(PRODUCT)),
    "gemm_wna16": lambda: ((array(3, 128), int4(12, 128)), dict(PRODUCT)),
    "gemm_fp8": lambda: (
        (array(3, 16), *eight_bit("fp8")),
        PRODUCT | {"norm_weight": array(16), "weight_offset": 1.0},
    ),
    "gemm_int8": lambda: (
        (array(3, 16), *eight_bit("int8")),
        PRODUCT | {"norm_weight": array(16)},
    ),
    "rmsnorm_gemm": lambda: (
        (array(3, 16), array(16), array(12, 16)),
        {"activation": "swiglu", "eps": 1e-5},
    ),
    "rmsnorm_gemm_wna16": lambda: (
        (array(3, 128), array(128), int4(12, 128)),
        {"activation": "swiglu"},
    ),
    "moe_gemm": lambda: (
        (array(3, 16), coded_experts(12), routing()),
        {"activation": "swiglu", "quantize_x": True, "quantize_out": True},
    ),
    "moe_combine": lambda: ((array(3, 2, 8),), {"residual": array(3, 8)}),
    "rmsnorm": lambda: ((array(3, 16), array(16)), {"residual": array(3, 16)}),
    "attention_decode": decode,
    "rmsnorm_quantize": lambda: (
        (array(3, 16), array(16)),
        {"residual": array(3, 16), "normed_out": array(3, 16)},
    ),
    "rmsnorm_moe_route": lambda: (
        (array(3, 16), array(16), array(4, 16), 2),
        {"residual": array(3, 16), "quantize_out": True},
    ),
    "moe_combine_rmsnorm": lambda: (
        (array(3, 2, 16), array(3, 16), array(16)),
        {"dtype": "fp8", "group": 128},
    ),
    "all_reduce_rmsnorm": lambda: (
        (x := array(3, 16), [x, array(3, 16)], array(3, 16), array(16)),
        {},
    ),
    "swiglu_quantize": lambda: ((array(3, 16),), {"dtype": "int8"}),
    "moe_gemm_combine": lambda: (
        (array(6, 16), coded_experts(8), routing()),
        {"residual": array(3, 8), "shared": array(3, 8), "quantize_x": True},
    ),
    "qk_norm_rope_store": heads,
}


def all_parts(op):
    """Return the ops that `op` can be taken apart into."""
    whole = WHOLES[op][0] if op in WHOLES else lambda options: ()
    found = {part for sample in SAMPLES for part in whole(sample)}
    for step in STEPS.get(op, ()):
        found |= {part for sample in SAMPLES for part in step.parts(sample)}
    return found


def imported_ops(module, name, seen):
    """Return the ops that a module of `name`'s family calls, its helpers' included."""
    found = set()
    if module in seen:
        return found
    seen.add(module)
    for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        package = [*node.module.split("."), ""][1]
        if package not in ("kernels", "reference"):
            continue
        names = {alias.asname or alias.name for alias in node.names}
        found |= names & set(OPS) & set(node.module.split(".")) - {name}
        for other in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]:
            try:
                is_helper = importlib.util.find_spec(other) is not None
            except ModuleNotFoundError:
                is_helper = False
            last = other.split(".")[-1]
            if is_helper and other.count(".") > 1 and last not in OPS:
                found |= imported_ops(other, name, seen)
    return found


def contained(op):
    """Return the ops that `op`'s wrapper or mirror calls."""
    where = OPS[op].__module__
    return imported_ops(where, op, set()) | imported_ops(f"engine.reference.{op}", op, set())


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_fused_op_is_listed_with_its_parts(op):
    """A new fused op needs an entry in `fused.py`: its parts, or a word that it keeps them."""
    known = all_parts(op) | {part for part, keepers in KEPT.items() if op in keepers}
    if op == "rmsnorm_gemm" or op.startswith("gemm_"):
        known |= {"gemm"}  # a product of another format is another op
    unused = {"rmsnorm"} if op == "moe_gemm" else set()  # of a helper that it shares
    assert contained(op) - unused <= known, "list the part in STEPS, WHOLES or KEPT of fused.py"
    keywords = inspect.signature(OPS[op]).parameters
    is_own = op in ("causal_conv", "gated_delta", "gated_norm")  # their gates and norms are no op
    for keyword, part in (("activation", "swiglu"), ("residual", "residual_add")):
        is_gradient = op.endswith("_backward")  # models call none
        assert keyword not in keywords or part in known or op == part or is_gradient or is_own
    assert "norm_weight" not in keywords or "rmsnorm" in known or is_own


def test_every_fused_op_is_called_below():
    assert set(CALLS) == {*STEPS, *WHOLES}


def flat(value):
    if isinstance(value, tuple):
        return [array for item in value for array in flat(item)]
    return [value] if isinstance(value, np.ndarray) else []


def copied(value):
    if isinstance(value, np.ndarray):
        return value.copy()
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("op", "part"), [(op, part) for op in sorted(CALLS) for part in sorted(all_parts(op))]
)
def test_a_fused_op_gives_way_to_an_overridden_part(op, part, by_name):
    """The part runs in the user's version; with the same formula the result is the same."""
    args, options = CALLS[op]()
    if part in ("silu", "gelu", "relu"):
        if op == "moe_gemm":
            pytest.skip("moe_gemm has no such activation")
        options["activation"] = part
    if part == "residual_add" and "activation" in options:
        options |= {"activation": None, "residual": array(3, 12)}
    if part == "attention_prefill":
        options |= {"deterministic": True, "quantize_out": False}
    calls = []

    def mine(*args, **options):
        calls.append(args)
        return OPS[part](*args, **options)

    given = copied(args), {name: copied(value) for name, value in options.items()}
    wanted = getattr(kernels, op)(*args, **options)
    runs = ModelKernels()
    named = dict(zip(inspect.signature(OPS[op]).parameters, given[0], strict=False))
    with runs.active(), kernels.override(part, mine):
        if by_name:
            got = getattr(kernels, op)(**named, **given[1])
        else:
            got = getattr(kernels, op)(*given[0], **given[1])
    assert calls
    assert runs.runs[f"{part}=mine"] == len(calls)
    pairs = zip(flat(wanted), flat(got), strict=True)
    written = zip(flat(args), flat(given[0]), strict=True)  # pages, and q rotated in place
    for one, other in (*pairs, *written):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("op", ["attention_decode", "qk_norm_rope_store"])
@pytest.mark.parametrize("name", ["q_weight", "k_weight"])
def test_the_norm_of_queries_or_keys_alone_gives_way(op, name):
    args, options = CALLS[op]()
    del options["q_weight" if name == "k_weight" else "k_weight"]
    weights = []

    def mine(x, weight, **options):
        weights.append(weight)
        return OPS["rmsnorm"](x, weight, **options)

    with kernels.override("rmsnorm", mine):
        getattr(kernels, op)(*args, **options)
    (weight,) = weights
    assert weight is options[name]


def test_factors_of_no_tokens():
    (q, k, v, positions, *others, slots), options = heads()
    args = (q[:0], k[:0], v[:0], positions[:0], *others, slots[:0])
    with kernels.override("scale_rows", OPS["scale_rows"]):
        kernels.qk_norm_rope_store(*args, **options)


@pytest.mark.parametrize("overridden", ["rmsnorm", "all_reduce", "all_reduce_rmsnorm", "gemm"])
def test_peers_reach_only_the_catalogs_products_and_sums(overridden, monkeypatch):
    """A user's sum would miss the rows sent, and a user's product may change them."""
    given = []
    gemm = OPS["gemm"]

    def product(*args, peers=None, **options):
        given.append(peers)
        return gemm(*args, **options)

    if overridden != "gemm":
        monkeypatch.setitem(OPS, "gemm", product)
    with ModelKernels().active(), kernels.override(overridden, product):
        kernels.gemm(array(3, 4), array(3, 4), peers="peers")
    assert given == ["peers" if overridden == "rmsnorm" else None]


@pytest.mark.parametrize("has_residual", [False, True])
def test_normalised_rows_of_a_function_that_returns_codes(has_residual):
    """They are computed after it, from the sum; also where they and the sum replace its inputs."""
    x, weight = array(3, 256), array(256)
    options = {"residual": array(3, 256)} if has_residual else {}
    options |= {"group": 128, "weight_offset": 1.0}
    normed = np.empty_like(x)
    want = kernels.rmsnorm_quantize(x, weight, **options, normed_out=normed)

    def mine(x, weight, *, eps, residual=None, weight_offset=0.0, group=0):
        given = {"residual": residual, "weight_offset": weight_offset, "group": group}
        return kernels.rmsnorm_quantize(x, weight, eps=eps, **given)

    if has_residual:
        options["residual_out"] = options["residual"]
    active = ModelKernels()
    with active.active(), kernels.override("rmsnorm_quantize", mine):
        got = kernels.rmsnorm_quantize(x, weight, **options, normed_out=x)
    np.testing.assert_allclose(x, normed, rtol=1e-6)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    with (
        active.active(),
        kernels.override("rmsnorm_quantize", lambda x, w, group=0: (x, x)),
        pytest.raises(ContractError, match=r"rmsnorm_quantize must return .* uint8"),
    ):
        kernels.rmsnorm_quantize(x, weight, group=128)


@pytest.mark.parametrize(
    ("op", "lacking"),
    [
        ("rmsnorm_quantize", ("residual", "residual_out", "normed_out")),
        ("moe_gemm", ("activation", "quantize_x", "quantize_out")),
        ("moe_gemm_combine", ("residual", "quantize_x")),
        ("rmsnorm_moe_route", ("residual", "residual_out", "quantize_out")),
        ("moe_combine_rmsnorm", ("dtype", "group")),
        ("attention_decode", ("quantize_out",)),
    ],
)
def test_a_fused_op_of_a_user_without_some_parts(op, lacking):
    """They run on their own, before or after it; the results are those of the op."""
    args, options = CALLS[op]()
    want = getattr(kernels, op)(*copied(args), **{k: copied(v) for k, v in options.items()})

    def mine(*args, **given):
        assert not any(given.get(name) for name in lacking)
        return getattr(kernels, op)(*args, **given)

    keywords = [p for n, p in inspect.signature(OPS[op]).parameters.items() if n not in lacking]
    mine.__signature__ = inspect.Signature(keywords)
    with ModelKernels().active(), kernels.override(op, mine):
        got = getattr(kernels, op)(*args, **options)
    for one, other in zip(flat(want), flat(got), strict=True):
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=2e-5, atol=2e-5
        )


def test_an_activation_before_the_routing_weights_stays_within_the_product():
    routing = kernels.moe_route(array(3, 4), 2)
    args = array(6, 8), array(4, 6, 8), routing
    options = {"activation": "swiglu", "scatter": True}
    want = kernels.moe_gemm(*args, **options)
    with kernels.override("swiglu", lambda x: kernels.swiglu(x)):
        np.testing.assert_array_equal(kernels.moe_gemm(*args, **options), want)


def test_a_function_with_fewer_keywords():
    """Defaults are left out, a residual is added first, and launch keywords are dropped."""
    x, weight, residual = array(3, 16), array(16), array(3, 16)
    wanted = kernels.rmsnorm(x, weight, residual=residual, eps=1e-6)
    with kernels.override("rmsnorm", lambda x, w: kernels.rmsnorm(x, w)):
        y = kernels.rmsnorm(x, weight, residual=residual, eps=1e-6, is_late=True)
    np.testing.assert_array_equal(y[0], wanted[0])
    np.testing.assert_array_equal(y[1], wanted[1])


def test_a_keyword_with_a_meaning_that_the_function_lacks_is_an_error():
    x, weight = array(3, 16), array(16)
    with (
        kernels.override("rmsnorm", lambda x, w, eps: x),
        pytest.raises(ConfigError, match=r"must take weight_offset=.*with weight_offset=1\.0"),
    ):
        kernels.rmsnorm(x, weight, weight_offset=1.0)


def test_results_go_to_the_outputs_that_were_given():
    """Also where the output is an input, and the function writes its own while it still reads."""
    x, weight, residual = array(3, 16), array(16), array(3, 16)
    wanted = kernels.rmsnorm(x, weight, residual=residual)

    def careless(x, weight, *, out=None):
        y = np.zeros_like(x) if out is None else out
        y[...] = 0
        y[...] = kernels.rmsnorm(x, weight)
        return y

    with kernels.override("rmsnorm", careless):
        y, h = kernels.rmsnorm(x, weight, residual=residual, out=x, residual_out=residual)
        assert y is x and h is residual
        again = kernels.rmsnorm(h, weight, out=h)
    np.testing.assert_array_equal(x, wanted[0])
    np.testing.assert_array_equal(again, wanted[0])
    assert again is residual


def test_a_result_that_is_an_input_is_copied():
    x = array(2, 8)
    with kernels.override("silu", lambda x: x):
        y = kernels.silu(x)
    y[...] = 0
    assert np.all(x != 0)


def test_rows_with_more_axes_reach_the_function_as_a_matrix():
    shapes = []

    def mine(x, weight, eps):
        shapes.append((x.shape, x.flags.c_contiguous))
        return kernels.rmsnorm(x, weight, eps=eps)

    fused, weight = array(3, 6, 8), array(8)
    with kernels.override("rmsnorm", mine):
        y = kernels.rmsnorm(fused[:, :4], weight)
    assert shapes == [((12, 8), True)]
    np.testing.assert_array_equal(y, kernels.rmsnorm(fused[:, :4], weight))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x[:, :3], r"returned \(4, 3\) float32; swiglu must return \(4, 4\) float32"),
        (lambda x: x[:, :4].astype(np.float64), r"returned \(4, 4\) float64"),
        (lambda x: None, r"returned nothing; swiglu must return \(4, 4\) float32"),
        (lambda x: [1.0], "returned list"),
        (lambda x: np.ma.array(x[:, :4]), "MaskedArray; swiglu must return a numpy.ndarray here"),
        (lambda x: (x, x), r"returned \(4, 8\) float32 and \(4, 8\) float32"),
    ],
)
def test_a_wrong_result_is_told_with_both_shapes(function, text):
    with kernels.override("swiglu", function), pytest.raises(ContractError, match=text):
        kernels.swiglu(array(4, 8))


@pytest.mark.parametrize(
    ("op", "args", "options", "text"),
    [
        ("rmsnorm", ([1.0], array(1)), {}, "rmsnorm: x: must be an array; got list"),
        ("rmsnorm", (array(2, 4), 3), {}, "rmsnorm: weight: must be an array; got int"),
        ("rmsnorm", (array(2, 4), array(4)), {"residual": [1]}, "residual: must be an array"),
        ("rmsnorm", (array(2, 4), array(4)), {"out": 3}, "out: must be an array; got int"),
        ("gemm", (array(2, 4), None), {}, "gemm: weight: must be an array; got NoneType"),
        ("rmsnorm_gemm", ("x", array(4), array(2, 4)), {}, "rmsnorm_gemm: x: must be an array"),
        ("attention_decode", *half_of_a_token(), "attention_decode: v: must be an array: k, v, "),
    ],
)
def test_an_argument_that_is_no_array_is_the_ops_own_error(op, args, options, text):
    def never(*args, **options):
        raise AssertionError

    with (
        kernels.override(rmsnorm=never, gemm=never),
        pytest.raises(ContractError, match=text),
    ):
        getattr(kernels, op)(*args, **options)


def test_a_tuple_of_the_only_result_is_that_result():
    x = array(3, 4)
    with kernels.override("silu", lambda x: (x + 1,)):
        np.testing.assert_array_equal(kernels.silu(x), x + 1)
        out = np.zeros_like(x)
        assert kernels.silu(x, out=out) is out and np.array_equal(out, x + 1)


def test_a_routing_may_be_a_plain_tuple():
    """A user's op of `define` returns one. The arrays are checked as other results are."""
    logits = array(5, 6)
    want = kernels.moe_route(logits, 2)
    with kernels.override("moe_route", lambda x, k: tuple(reference.moe_route(x, k))):
        got = kernels.moe_route(logits, 2)
    ids, weights = want.experts, want.weights
    with kernels.override("moe_sort", lambda *args, **kw: tuple(reference.moe_sort(*args, **kw))):
        again = kernels.moe_sort(ids, weights, num_experts=6)
    for one in (got, again):
        assert isinstance(one, kernels.Routing)
        for a, b in zip(one, want, strict=True):
            np.testing.assert_array_equal(a, b)
    for function, text in (
        (lambda x, k: reference.moe_route(x, k)[:2], r"moe_route must return \(5, 2\) int32 and"),
        (lambda x, k: reference.moe_route(x, k - 1), r"returned \(5, 1\) int32 and .* must return"),
        (lambda x, k: None, "returned nothing; moe_route must return"),
    ):
        with (
            kernels.override("moe_route", function),
            pytest.raises(ContractError, match=text),
        ):
            kernels.moe_route(logits, 2)


def test_wrong_overrides_are_errors():
    with pytest.raises(UnknownOptionError, match="swiglu"), kernels.override("swigl", print):
        pass
    with pytest.raises(ConfigError, match=r"override\['silu'\] must be a function; got 3"):
        kernels.override("silu", 3).__enter__()
    with pytest.raises(ConfigError, match="must be a mapping"):
        Overrides.from_option([1], "kernels")


def test_blocks_are_nested_and_end():
    x = array(2, 8)
    plain = kernels.silu(x)
    with kernels.override("silu", lambda x: x * 0 + 1):
        with kernels.override(silu=lambda x: x * 0 + 2, relu=lambda x: x * 0 + 3):
            assert kernels.silu(x).max() == 2
            assert kernels.relu(x).max() == 3
        assert kernels.silu(x).max() == 1
        assert kernels.relu(x).max() != 3
    with pytest.raises(ZeroDivisionError), kernels.override("silu", lambda x: x * 0):
        1 / 0  # noqa: B018
    np.testing.assert_array_equal(kernels.silu(x), plain)


def test_a_block_holds_for_its_thread():
    x = array(2, 8)
    found = []
    with kernels.override("silu", lambda x: x * 0 + 1):
        other = threading.Thread(target=lambda: found.append(kernels.silu(x)))
        other.start()
        other.join()
    np.testing.assert_array_equal(found[0], kernels.silu(x))


def test_an_override_may_call_the_op_that_it_replaces():
    """There it is the catalog's; other overrides hold."""
    x = array(2, 8)
    with kernels.override(swiglu=lambda x: -kernels.swiglu(x) + kernels.silu(x[:, :4])):
        y = kernels.swiglu(x)
        with kernels.override(silu=lambda x: x * 0):
            np.testing.assert_array_equal(kernels.swiglu(x), -OPS["swiglu"](x))
    np.testing.assert_array_equal(y, -kernels.swiglu(x) + kernels.silu(x[:, :4]))


def test_an_op_gets_contiguous_arrays_and_writes_in_place_where_it_may():
    calls = []

    def formula(q, k, positions, table):
        calls.append((q.flags.c_contiguous, k.flags.c_contiguous))
        return reference.rope(q, k, positions, table)

    mine = kernels.define(
        name="my_rope",
        signature=(
            "q: (T, H, D) float, k: (T, K, D) float, positions: (T) int32, table: (P, R) float32 "
            "-> q_out: (T, H, D) like q, k_out: (T, K, D) like k"
        ),
        reference=formula,
        source='extern "C" __global__ void my_rope() {}',
        launch=lambda call: call.grid1d(1, 32),
    )
    rows = array(3, 8, 8)
    q, k = rows[:, :4], rows[:, 4:6]
    args = q, k, np.arange(3, dtype=np.int32), array(8, 8)
    wanted = kernels.rope(*args)
    with kernels.override("rope", mine):
        got = kernels.rope(*args, out=(q, k))
    assert got[0].base is rows or got[0] is q
    np.testing.assert_array_equal(q, wanted[0])
    np.testing.assert_array_equal(k, wanted[1])
    assert calls == [(True, True)]


def test_an_op_that_writes_its_arguments():
    """It returns them, as ops without a result do; `kv_store` returns nothing."""
    mine = kernels.define(
        name="my_store",
        signature=(
            "k: (T, K, D) float, v: (T, K, D) float, k_pages: (P, K, S, D) float inout, "
            "v_pages: (P, K, S, D) float inout, slots: (T) int64 ->"
        ),
        reference=lambda *args: reference.kv_store(*args),
        source='extern "C" __global__ void my_store() {}',
        launch=lambda call: call.grid1d(1, 32),
    )
    k, v = array(3, 2, 8), array(3, 2, 8)
    wanted, got = (pages(), pages()), (pages(), pages())
    kernels.kv_store(k, v, *wanted, np.arange(3))
    with kernels.override("kv_store", mine):
        assert kernels.kv_store(k, v, *got, np.arange(3)) is None
    np.testing.assert_array_equal(got, wanted)
    assert np.any(got[0])


def test_what_keeps_its_own_is_logged(caplog):
    overrides = Overrides.from_option({"quantize_rows": print, "silu": print, "rope": print})
    overrides.warn_of_kept({"gemm_fp8": 2, "gemm_int8": 1, "rope=print": 2})
    assert [record.getMessage() for record in caplog.records] == [
        "kernels['quantize_rows']: print runs where the model calls quantize_rows; "
        "not within gemm_fp8, gemm_int8"
    ]


@pytest.mark.parametrize(("op", "pdl"), [("embedding", False), ("swiglu", True)])
def test_attention_starts_early_only_after_kernels_that_are_known(op, pdl, monkeypatch):
    """A user's kernel may trigger the next launch before what attention reads is written."""
    seen = []

    def probe(*args, **options):
        seen.append(options["pdl"])
        return attention(*args, **options)

    attention = OPS["attention_decode"]
    monkeypatch.setitem(OPS, "attention_decode", probe)
    args, options = decode()
    with kernels.override(op, OPS[op]):
        kernels.attention_decode(*args, **options, pdl=True)
    assert seen == [pdl]


def test_dispatchers_look_like_their_ops():
    for name, op in OPS.items():
        public = getattr(kernels, name)
        assert inspect.signature(public) == inspect.signature(op)
        assert public.__doc__ == op.__doc__ and public.__module__ == op.__module__


def test_the_page_names_every_fused_op():
    page = (ROOT.parent / "docs" / "override.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", page, re.MULTILINE)
    named = [set(re.findall(r"`(\w+)`", one)) & set(OPS) for one, _ in rows]
    assert {*STEPS, *WHOLES} <= set().union(*named)
    kept = {
        op: re.findall(r"`(\w+)`", other) for one, other in rows for op in KEPT if one == f"`{op}`"
    }
    assert kept == {op: list(keepers) for op, keepers in KEPT.items()}


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x, r"must accept \(x, weight\) by position.*too many positional"),
        (lambda x, weight, epsilon: x, r"by name \(.*eps.*\): missing .* 'epsilon'"),
        (lambda x, weight, eps, /: x, r"missing .* 'eps'"),
    ],
)
def test_a_signature_that_no_call_suits_is_an_error_at_once(function, text):
    with (
        pytest.raises(ConfigError, match=r"kernels\['rmsnorm'\]: <lambda>\(x.*" + text),
        kernels.override("rmsnorm", function),
    ):
        pass


def test_a_place_named_like_a_keyword_of_the_op_is_an_error_at_once():
    """attention_decode passes pages by position, and the new token's k by name."""
    text = r"<lambda>\(q, k, v, \*\*others\) gets \(q, k_pages, v_pages\) by position, and k as"
    with (
        pytest.raises(ConfigError, match=text),
        kernels.override("attention_decode", lambda q, k, v, **others: q),
    ):
        pass
    for function in (lambda q, k, v, /, **others: q, lambda q, k_pages, v_pages, **others: q):
        with kernels.override("attention_decode", function):
            pass


def test_an_override_of_no_op_is_an_error():
    text = "op must be the name of an op; got None, for <function"
    with pytest.raises(ConfigError, match=text), kernels.override(None, lambda x: x):
        pass


def test_a_method_is_one_function():
    """``object.method`` makes a new object each time; its graphs and prefixes are kept by table."""

    class Mine:
        def silu(self, x):
            return x

    one, other = Mine(), Mine()
    assert Overrides({"silu": one.silu}) == Overrides({"silu": one.silu})
    assert Overrides({"silu": one.silu}) != Overrides({"silu": other.silu})


def test_a_partial_is_called_like_its_function():
    runs = ModelKernels()
    with runs.active(), kernels.override("silu", functools.partial(lambda x, y: x + y, y=1)):
        kernels.silu(array(2, 8))
    assert runs.runs == {"silu=<lambda>": 1}


def test_a_missing_argument_is_not_taken_from_a_later_one():
    q = np.zeros((1, 2, 64), np.float32)
    with (
        kernels.override(rope=kernels.rope),
        pytest.raises(TypeError, match="k_pages"),
    ):
        kernels.attention_decode(q, v_pages=q)
