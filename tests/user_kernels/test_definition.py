"""What `kernels.define` accepts and refuses: signatures, expressions, names, sources, launches."""

from __future__ import annotations

import inspect
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from engine import errors, kernels
from engine.kernels._user.diagnostics import read_log

BODY = 'extern "C" __global__ void f(const scalar_t* x, scalar_t* out, int64_t N) {}'


def _define(signature="x: (N,) float -> (N,) like x", **options):
    options = {
        "reference": lambda x, *_: x,
        "source": BODY,
        "launch": lambda call: call.grid1d(call["N"]),
    } | options
    return kernels.define("f", signature, **options)


# Signatures.


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("x: (N,) float", "must have '->' before the results"),
        ("(N,) float -> (N,) like x", "an argument must be 'name: ...'; got '(N,) float'"),
        ("x: (N,) floaty -> (N,) like x", "dtype must be of float, float32"),
        ("x: (N,) -> (N,) like x", "must be '(sizes) dtype'"),
        ("x: (N,) float shiny -> (N,) like x", "must be one of strided, inout, zeroed"),
        ("x: (N,) float -> (M,) like x", "no argument has an axis 'M'"),
        ("x: (N,) float -> (N,) like y", "'like' must name one of x; got 'y'"),
        ("x: (N,) float, x: (N,) float -> (N,) like x", "'x' must name one thing"),
        ("N: (N,) float -> (N,) like N", "'N' must name one thing"),
        ("out: (N,) float -> (N,) float32", "a name must be an identifier other than"),
        ("class: (N,) float -> (N,) float32", "a name must be an identifier other than"),
        ("int: (N,) float -> (N,) float32", "'int' must have another name"),
        ("blockIdx: (N,) float -> (N,) float32", "'blockIdx' must have another name"),
        ("x: (N,) float ->", "must have a result after '->'"),
        ("x: (N,) float, n: int8 -> (N,) like x", "a scalar must have a dtype of"),
        ("x: (N,) float, n: int32 = 1.5 -> (N,) like x", "its default must be int32; got '1.5'"),
        ("x: (N,) float, n: bool = 1 -> (N,) like x", "its default must be bool; got '1'"),
        ("x: (N,) float, n: uint32 = -1 -> (N,) like x", "its default must be uint32; got '-1'"),
        ("x: (N,) float, n: int32 = 4294967296 -> (N,) like x", "its default must be int32"),
        ("x: (N,) float zeroed -> (N,) like x", "x: only a result may be 'zeroed'"),
        ("size: (N,) int32|int64 -> (N,) int32", "'size' must have another name: its type in"),
        ("uint8: (N,) int32|int64 -> (N,) int32", "would be uint8_t, which is another type"),
        ("x: (1.5,) float -> () like x", "x: a size must be an integer of at least 0; got 1.5"),
        ("x: (N,) float -> (2 - 3,) like x", "a size must be an integer of at least 0; got 2 - 3"),
        ("x: (N,) float = None, y: (N,) float -> (N,) like y", "'y', which must be given, follows"),
        ("x: (N,) float32 -> (N,) int32|int64", "a result must have one dtype"),
        ("x: (N,) float = None -> (N,) like x", "out: 'like' must name an argument that is always"),
        (
            "y: (N,) like x, x: (N,) float = None -> (N,) float",
            "y: 'like' must name an argument that is always given; got 'x', which may be omitted",
        ),
        ("x: (..., N) float strided -> (..., N) like x", "x: 'strided' must have no '...'"),
        ("x: (N,) float -> (min(N),) like x", "of two values (min, max: or more); got 'min(N)'"),
        ("x: (N,) float -> (ceil_div(N, 2, 3),) like x", "got 'ceil_div(N, 2, 3)'"),
        ("x: (N + import os,) float -> (N,) like x", "must be numbers, symbols"),
        ("x: (f(N),) float -> (N,) like x", "must be numbers, symbols"),
        ("eps: float32 -> (3,) float32", "must have an array argument"),
        (None, "must be a string; got None"),
        (["x: (N,) float"], "must be a string; got ['x: (N,) float']"),
    ],
)
def test_a_bad_signature_is_told_with_the_place(signature, words):
    with pytest.raises(errors.ConfigError) as caught:
        _define(signature)
    assert words in str(caught.value)
    assert str(caught.value).startswith("f: signature")
    assert isinstance(caught.value, ValueError)


def test_an_op_that_writes_in_place_needs_no_arrow():
    op = kernels.define(
        "clear",
        "x: (N,) float32 inout",
        reference=lambda x: x.fill(0),
        source='extern "C" __global__ void clear(float* x, int N) {}',
        launch=lambda call: call.grid1d(call["N"]),
    )
    x = np.ones(3, np.float32)
    assert op(x) is x
    np.testing.assert_array_equal(x, [0, 0, 0])


def test_python_sees_the_arguments():
    op = _define("x: (N,) float, b: (N,) like x = None, eps: float32 = 1e-6 -> (N,) like x")
    assert str(inspect.signature(op)) == "(x, b=None, eps=1e-06, *, out=None)"
    assert op.__name__ == "f"
    assert op.__doc__.startswith("f(x: (N,) float")


def test_the_docstring_of_the_reference_is_the_ops():
    def reference(x):
        """Return x."""
        return x

    assert _define(reference=reference).__doc__.endswith("Return x.")


def test_a_reference_may_be_a_callable_without_a_name():
    x = np.arange(3, dtype=np.float32)
    op = _define(reference=partial(np.multiply, 2))
    assert op(x).tolist() == (2 * x).tolist()
    assert op.__doc__ == _define().__doc__


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"where": "M > 2"}, "where: must name N; got 'M'"),
        ({"reduction": "K"}, "reduction: must name N; got 'K'"),
        ({"flops": "2*K"}, "flops: must name N, itemsize; got 'K'"),
        ({"sizes": {"K": (1,)}}, "sizes: must name N; got 'K'"),
        ({"bench": {"K": 1}}, "bench: must name N; got 'K'"),
        ({"inputs": {"y": None}}, "inputs: must name x; got 'y'"),
        ({"in_place": "y"}, "in_place: must name x; got 'y'"),
        ({"alignment": 3}, "alignment: must be a power of two"),
        ({"requires": "hopper"}, "requires: must be"),
        ({"reference": 3}, "reference: must be callable; got 3"),
        ({"source": "missing.cu"}, "there is no file 'missing.cu'"),
        ({"source": "__global__ void f() {}"}, 'must be declared extern "C"'),
        (
            {"source": 'extern "C" { __device__ int g() { return 1; } } __global__ void f() {}'},
            'must be declared extern "C"',
        ),
        (
            {"source": 'extern "C" { template <class T> __global__ void f() {} }'},
            'must be declared extern "C"',
        ),
        ({"source": 'extern "C" __global__ void f(const Foo x) {}'}, "parameter 'x' must be"),
        ({"source": 'extern "C" __global__ void f(float& x) {}'}, "must be a pointer or a number"),
        ({"source": 'extern "C" __global__ void class() {}'}, "kernel 'class' must have another"),
        ({"source": 'extern "C" __global__ void tanh() {}'}, "kernel 'tanh' must have another"),
        (
            {"source": 'extern "C" __global__ void f(int new) {}'},
            "parameter 'new' must have another",
        ),
        ({"source": 'extern "C" __global__ void f(unsigned int) {}'}, "got 'unsigned int'"),
    ],
)
def test_a_bad_definition_names_the_argument(options, words):
    with pytest.raises(errors.ConfigError) as caught:
        _define(**options)
    assert words in str(caught.value)


# Calls on NumPy arrays.


def test_a_call_computes_the_reference_and_rounds_once():
    op = _define(reference=lambda x: x * np.float32(1 + 2**-11))
    x = np.ones(3, np.float16)
    assert op(x).dtype == np.float16
    assert op(x).tolist() == [1.0] * 3  # float16 rounds 1 + 2**-11 to even


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((np.ones(3, np.float64),), errors.DTypeError, "x: must be float32 or float16 or bfloat16"),
        ((np.ones((3, 1), np.float32),), errors.ShapeError, "x: must have shape (N,); got (3, 1)"),
        (([1.0],), errors.DTypeError, "x: must be an array; got list"),
        ((), errors.ContractError, "x: must be given"),
        ((np.ones(3, np.float32), 4), errors.ContractError, "takes 1 arguments, x; got 2"),
    ],
)
def test_a_wrong_call_names_argument_and_values(arguments, error, words):
    with pytest.raises(error) as caught:
        _define()(*arguments)
    assert words in str(caught.value)
    assert isinstance(caught.value, errors.ContractError)


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(errors.UnknownOptionError, match="did you mean 'x'"):
        _define()(xx=np.ones(3, np.float32))


def test_a_repeated_call_is_checked_as_the_first():
    """Checks are remembered by shape and dtype: what differs is refused, also afterwards."""
    op = _define("x: (T, N) float, s: (T,) float32 -> (T, N) like x", where="T <= 4")
    x = np.ones((2, 3), np.float32)
    s = np.ones(2, np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(op(x, s), x)
        with pytest.raises(errors.ShapeError):
            op(x, s[:1])
        with pytest.raises(errors.DTypeError):
            op(x, s.astype(np.float16))
        with pytest.raises(errors.ContractError, match="must satisfy T <= 4"):
            op(np.ones((5, 3), np.float32), np.ones(5, np.float32))


def test_a_broadcast_array_cannot_be_written_in_place():
    op = _define("x: (T, N) float strided inout", reference=lambda x: x.__iadd__(1))
    for _ in range(2):
        np.testing.assert_array_equal(op(np.zeros((3, 2), np.float32).T), np.ones((2, 3)))
        rows = np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (2, 3), (0, 4))
        with pytest.raises(errors.ContractError, match="x: its elements must not share memory"):
            op(rows)


def test_an_expression_may_group_digits():
    x = np.ones(3, np.float32)
    assert _define(where="N <= 4_096")(x).size == 3


def test_an_expression_may_have_an_exponent():
    """A number before a name is a factor, as in 2F; the e of 1e-3 is no name."""
    op = _define("x: (N,) float, eps: float32 -> (N,) like x", where="eps >= 1e-3", flops="1.5e3*N")
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(op(x, 0.5), x)
    with pytest.raises(errors.ContractError, match="eps: must satisfy eps >= 1e-3"):
        op(x, 1e-4)
    assert op.definition.flops.value({"N": 2}) == 3000
    assert _define(flops=1e20).definition.flops.value({}) == 1e20


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2.5**N", "overflows a float"),
        ("1 / (N - 4096)", "divides by 0"),
        ("(5 - N) ** 0.5", "is no real number"),
    ],
)
def test_an_expression_without_a_value_is_named(text, why):
    x = np.ones(4096, np.float32)
    with pytest.raises(errors.ConfigError, match=rf"where: '{re.escape(text)} > 0' {why}"):
        _define("x: (N,) float -> (N,) like x", where=f"{text} > 0")(x)
    with pytest.raises(errors.ConfigError, match=f"'{re.escape(text)} . M' {why}"):
        _define(f"x: (N,) float, y: ({text} + M,) float -> (N,) like x")(x, x)


def test_flops_that_overflow_a_float_are_named():
    op = _define(flops="2**N")
    with pytest.raises(errors.ConfigError, match=r"flops: '2\*\*N' overflows a float"):
        op.flops(op.problem(np.ones(4096, np.float32)))


def test_conditions_may_name_scalars():
    op = _define(
        "x: (N,) float, eps: float32, k: int32 = 2 -> (N,) like x",
        reference=lambda x, eps, k: x + eps,
        where="eps > 0, k <= N",
    )
    x = np.zeros(3, np.float32)
    for _ in range(2):
        assert op(x, 1.5)[0] == 1.5
        with pytest.raises(errors.ContractError, match=r"eps: must satisfy eps > 0; got eps = 0.0"):
            op(x, 0)
        with pytest.raises(errors.ContractError, match=r"k <= N; got N = 3, k = 4"):
            op(x, 1, k=4)


def test_remembered_checks_keep_scalars_apart():
    op = _define(
        "x: (N,) float, eps: float32, flag: bool = False -> (N,) like x",
        reference=lambda x, eps, flag: x + eps + 10 * flag,
    )
    x = np.zeros(1, np.float32)
    for _ in range(2):
        assert op(x, 1)[0] == 1
        assert op(x, 1.5)[0] == 1.5
        assert op(x, np.float32(2.5))[0] == 2.5
        assert op(x, 1, True)[0] == 11
        with pytest.raises(errors.ContractError, match="flag: must be True or False"):
            op(x, 1, 1)
        with pytest.raises(errors.ContractError, match="eps: must be a number"):
            op(x, True)


def test_an_integer_argument_is_no_bool():
    op = _define("x: (N,) float, k: int32 = 1 -> (k,) like x", reference=lambda x, k: x[:k])
    x = np.zeros(2, np.float32)
    for flag in (True, np.True_):
        with pytest.raises(errors.ContractError, match="k: must be an integer; got"):
            op(x, flag)


def test_a_scalar_that_is_no_plain_number_is_told():
    """Checks are remembered by an array's shape: the second of two arrays would be the first."""
    op = _define(
        "x: (N,) float, s: float32 = 1, k: int32 = 2 -> (k,) like x",
        reference=lambda x, s, k: np.full(k, s),
    )
    x = np.zeros(1, np.float32)
    for count in (3, 5):
        with pytest.raises(errors.ContractError, match=r"k: must be an integer; got an array of"):
            op(x, k=np.array(count))
        assert op(x, k=np.int64(count)).size == count
    with pytest.raises(errors.ContractError, match="s: must be a number; got"):
        op(x, np.complex64(1))
    with pytest.raises(errors.ContractError, match="s: must be a number in float64's range"):
        op(x, 10**400)


def test_a_size_that_an_axis_does_not_tell_is_named():
    x = np.ones(5, np.float32)
    op = _define("x: (2N,) float -> (2N,) like x")
    with pytest.raises(errors.ShapeError, match=r"no one N makes 2\*N = 5; got \(5,\)"):
        op(x)
    op = _define("x: (M*N,) float -> (M*N,) like x")
    with pytest.raises(errors.ShapeError, match=r"no one M, N makes M\*N = 5"):
        op(x)


def test_zeros_of_either_sign_are_kept_apart():
    op = _define(
        "x: (N,) float, s: float32 -> (N,) like x",
        reference=np.copysign,
        source="""
extern "C" __global__ void f(const scalar_t* x, float s, scalar_t* out, int64_t N) {}
""",
    )
    x = np.ones(1, np.float32)
    for _ in range(2):
        assert op(x, 0.0)[0] == 1
        assert op(x, -0.0)[0] == -1
    for zero in ("0.0", "-0.0"):
        [launch] = op.match(op.example_problem({"N": 1}, s=float(zero)))
        assert str(launch.values({"x": x, "out": x}, {})["s"]) == zero


def test_remembered_checks_keep_no_array_alive():
    import weakref

    op = _define()
    x = np.ones(3, np.float32)
    alive = weakref.ref(x)
    op(x)
    op(x)
    del x
    assert alive() is None


def test_a_call_that_is_remembered_refuses_a_read_only_inout():
    op = _define("x: (N,) float inout ->", reference=lambda x: x.fill(1))
    x = np.zeros(2, np.float32)
    op(x)
    x.flags.writeable = False
    with pytest.raises(errors.ContractError, match="writeable"):
        op(x)


def test_inout_is_written_in_place_and_returned():
    def reference(x, y):
        x += y

    op = _define("x: (N,) float inout, y: (N,) like x ->", reference=reference)
    x = np.arange(3, dtype=np.float16)
    returned = op(x, np.ones(3, np.float16))
    assert returned is x
    assert x.tolist() == [1, 2, 3]


def test_an_inout_argument_may_be_omitted():
    def reference(x, total):
        if total is not None:
            total += x
        return 2 * x

    op = _define(
        "x: (N,) float, total: (N,) float32 inout = None -> (N,) like x", reference=reference
    )
    x = np.ones(2, np.float16)
    total = np.zeros(2, np.float32)
    assert op(x).tolist() == op(x, total).tolist() == [2, 2]
    assert total.tolist() == [1, 1]
    sizes = {"N": 2}
    assert op.nbytes(op.problem(x)) == 8 and op.nbytes(op.example_problem(sizes, "float16")) == 24


def test_arguments_that_may_all_be_omitted_keep_their_places():
    op = _define(
        "x: (N,) float inout = None, y: (N,) like x inout = None, z: (N,) int32 inout = None ->",
        reference=lambda *_: None,
    )
    x = np.ones(2, np.float16)
    assert op(x, z=None)[1:] == (None, None) and op(x)[0] is x
    with pytest.raises(errors.ContractError, match="x, y, z: must be given, at least one of them"):
        op()
    with pytest.raises(errors.ContractError, match="y: must be None without x, whose dtype it has"):
        op(y=x)


def test_out_is_filled_and_returned():
    op = _define()
    out = np.empty(3, np.float32)
    assert op(np.arange(3, dtype=np.float32), out=out) is out
    assert out.tolist() == [0, 1, 2]
    with pytest.raises(errors.ShapeError, match="out: must have shape"):
        op(np.ones(3, np.float32), out=np.empty(4, np.float32))


def test_arrays_that_are_written_must_not_overlap():
    op = _define("x: (N,) float -> y: (N,) like x, z: (N,) like x", reference=lambda x: (x, x + 1))
    x = np.arange(3, dtype=np.float32)
    both = np.zeros(6, np.float32)
    with pytest.raises(errors.ContractError, match="z: must not overlap y, which is written, too"):
        op(x, out=(both[:3], both[2:5]))
    with pytest.raises(errors.ContractError, match="out: must be a tuple of 2 arrays; got"):
        op(x, out=[both[:3], both[3:]])
    assert not both.any()
    op(x, out=(both[:3], both[3:]))
    assert both.tolist() == [0, 1, 2, 1, 2, 3]

    def swap(x, y):
        x[:], y[:] = y.copy(), x.copy()

    for words in ("", " strided"):
        op = _define(f"x: (N,) float inout{words}, y: (N,) like x inout{words}", reference=swap)
        with pytest.raises(errors.ContractError, match="y: must not overlap x"):
            op(both[:2], both[1:3])
    with pytest.raises(errors.ContractError, match="y: must not overlap x"):
        op(both[:3:2], both[2::2])
    op(both[::2], both[1::2])
    assert both.tolist() == [1, 0, 1, 2, 3, 2]


def test_a_result_must_not_overlap_an_argument_that_is_written():
    def double(x):
        x *= 2
        return x + 1

    op = _define("x: (N,) float inout -> (N,) like x", reference=double)
    x = np.arange(4, dtype=np.float32)
    for given, out in ((x, x), (x[:3], x[1:])):
        with pytest.raises(errors.ContractError, match="out: must not overlap x, which is written"):
            op(given, out=out)
    assert x.tolist() == [0, 1, 2, 3]


def test_what_overlaps_an_argument_that_is_written_keeps_its_values():
    def add_reversed(x, y):
        x += y[::-1]

    op = _define("x: (N,) float inout, y: (N,) like x", reference=add_reversed)
    x = np.arange(4, dtype=np.float32)
    assert op(x, x).tolist() == [3, 3, 3, 3]


def test_an_argument_may_be_called_self():
    op = _define("self: (N,) float -> (N,) like self", reference=lambda x: x)
    assert op(self=np.ones(2, np.float32)).tolist() == [1, 1]


def test_results_that_are_one_array_of_the_reference_are_two():
    def reference(x):
        y = 2 * x
        return y, y

    y, z = _define("x: (N,) float -> y: (N,) like x, z: (N,) like x", reference=reference)(
        np.ones(2, np.float32)
    )
    assert not np.shares_memory(y, z)


def test_a_reference_that_writes_nothing_in_place_is_told():
    x = np.ones(2, np.float32)
    words = "its reference must write x in place, .* it returned a new array of shape"
    op = _define("x: (N,) float inout", reference=lambda x: x + 1)
    with pytest.raises(errors.ContractError, match=words):
        op(x)
    op = _define("x: (N,) float inout", reference=lambda x: np.add(x, 1, out=x))
    assert op(x).tolist() == [2, 2]


def test_optional_arguments_batch_axes_and_several_results():
    op = _define(
        "x: (..., 2F) float, b: (F,) float32 = None -> y: (..., F) like x, most: (...) float32",
        reference=lambda x, b: (x[..., ::2] + (0 if b is None else b), x.max(axis=-1)),
    )
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    y, most = op(x)
    assert (y.shape, most.shape) == ((2, 3, 2), (2, 3))
    np.testing.assert_array_equal(op(x, np.ones(2, np.float32))[0], y + 1)
    with pytest.raises(errors.ShapeError):
        op(x[..., :3])
    problem = op.problem(x)
    assert problem["batch"] == 6 and problem["F"] == 2 and not problem.has("b")


def test_dlpack_arrays_are_accepted():
    class Foreign:
        def __init__(self, array):
            self._array = array

        def __dlpack__(self, **options):
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    x = np.arange(3, dtype=np.float32)
    assert _define()(Foreign(x)).tolist() == [0, 1, 2]


def test_the_reference_may_fail_with_its_own_error():
    with pytest.raises(ZeroDivisionError):
        _define(reference=lambda x: 1 / 0)(np.ones(3, np.float32))


def test_calls_from_several_threads_agree():
    from concurrent.futures import ThreadPoolExecutor

    op = _define(reference=lambda x: 2 * x)
    sizes = [1 + n % 7 for n in range(400)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda n: op(np.full(n, n, np.float32)), sizes)
        for n, result in zip(sizes, results, strict=True):
            assert result.tolist() == [2 * n] * n


# Sources.


def test_a_file_is_read_again_when_it_or_a_header_changes(tmp_path):
    header = tmp_path / "factor.cuh"
    source = tmp_path / "f.cu"
    header.write_text("#define FACTOR 2\n")
    source.write_text('#include "factor.cuh"\n' + BODY)
    op = _define(source=source)
    first = op.source.current().digest
    assert set(op.source.files) == {source, header}
    assert op.source.current().digest == first
    for path, text in ((header, "#define FACTOR 3\n"), (source, BODY + "\n")):
        path.write_text(text)
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))
        assert op.source.current().digest != first
        first = op.source.current().digest


def test_a_relative_source_is_beside_the_python_file(tmp_path, monkeypatch):
    (tmp_path / "g.cu").write_text(BODY)
    (tmp_path / "my_op.py").write_text(
        "from engine import kernels\n"
        "op = kernels.define('f', 'x: (N,) float -> (N,) like x', reference=lambda x: x,\n"
        "    source='g.cu', launch=lambda call: call.grid1d(call['N']))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_op

    assert my_op.op.source.path == (tmp_path / "g.cu").resolve()


def test_a_file_that_vanishes_is_told(tmp_path):
    path = Path(tmp_path / "f.cu")
    path.write_text(BODY)
    op = _define(source=path)
    path.unlink()
    with pytest.raises(errors.CompileError, match="cannot be read"):
        op.source.current()


# Launches and parameters.


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (lambda call: None, "launch: must return what call.grid1d or call.grid returns"),
        (lambda call: [], "launch: must return"),
        (lambda call: 256, "or several of them; got 256"),
        (lambda call: call.grid1d(call["N"], 1025), "1 to 1024 threads"),
        (lambda call: call.grid((1, 70000), 32), "grid must be at most"),
        (lambda call: call.grid(1, 32, shared=1 << 20), "shared must be 0 to 232448 bytes"),
        (lambda call: call.grid(3, 32, cluster=2), "a cluster of 2 needs sm_90 and a grid"),
        (lambda call: call.grid1d(call["M"]), "a size or scalar must be one of N; got 'M'"),
        (lambda call: call.grid(1, 1, entry="g"), 'its extern "C" kernels: f. Rename'),
        (lambda call: call.grid(1, 1, args={"tile": 4}), "args must name parameters of f"),
        (lambda call: call.grid(1, 1, pdl=True), "needs a kernel that calls pdl_wait()"),
        (lambda call: call.grid(1, 32, shared=1.5), "shared must be 0 to 232448 bytes"),
        (lambda call: call.grid(1, 32, cluster=0), "cluster must be 1 to 16 blocks; got 0"),
        (lambda call: call.grid(1, 32, cluster="2"), "cluster must be 1 to 16 blocks; got '2'"),
        (lambda call: call.grid(34, 32, cluster=17), "cluster must be 1 to 16 blocks; got 17"),
        (lambda call: call.grid1d(call["N"] - 9), "num_items must be an integer of at least 0"),
        (lambda call: call.grid1d(call["N"], 0), "threads must be an integer of at least 1; got 0"),
        (lambda call: call.grid1d(1.5), "num_items must be an integer of at least 0; got 1.5"),
        (lambda call: call.grid(1, 1, defines=["D"]), "defines must be a mapping"),
        (lambda call: call.grid(1, 1, defines={"a b": 1}), "with identifiers as keys"),
        (lambda call: call.grid(1, 1, defines={"D": None}), "D must be an integer; got None"),
        (lambda call: call.grid(1, 1, args=4), "args must be a mapping with identifiers as keys"),
        (lambda call: call.scratch((4, -1)), "shape must be integers of at least 0; got (4, -1)"),
        (lambda call: call.scratch(4, "float"), "scratch: dtype must be of float32,"),
        (lambda call: call.dtype_of("y"), "an array argument must be one of x; got 'y'"),
    ],
)
def test_a_bad_launch_is_told(launch, words):
    op = _define(launch=launch)
    with pytest.raises(errors.ConfigError) as caught:
        op.match(op.example_problem({"N": 8}))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("const scalar_t* x, scalar_t* out, int tile", "parameter 'tile' must be one of x, out, N"),
        ("const float* x, scalar_t* out", "must be a pointer to scalar_t: the array is float16"),
        ("const scalar_t* x, const scalar_t* out", "must be not const, since the kernel writes"),
        ("const scalar_t* x, scalar_t* out, float* N", "must be a number: it is 8"),
        ("scalar_t x, scalar_t* out", "parameter 'x' must be a pointer or have a type of"),
        ("const scalar_t* x, scalar_t* out, int x_stride_0", "must be marked 'strided'"),
    ],
)
def test_a_bad_parameter_is_told(params, words):
    with pytest.raises(errors.ConfigError) as caught:
        op = _define(source=f'extern "C" __global__ void f({params}) {{}}')
        op.match(op.example_problem({"N": 8}, "float16"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"box": 8}, "a box must have 2 to 5 axes"),
        ({"box": (8, 8, 8)}, "its box must have an axis for each of (M, N); it is (8, 8, 8)"),
        ({"box": ("8", 8)}, "of 1 to 256 elements; it is ('8', 8)"),
        ({"box": (8, 8), "l2_promotion": 32}, "l2_promotion must be one of 0, 64, 128, 256"),
    ],
)
def test_a_bad_tensor_map_is_told_without_a_gpu(options, words):
    op = _define(
        "x: (M, N) float -> (N,) like x",
        source=BODY.replace("int64_t N", "const __grid_constant__ TensorMap m"),
        launch=lambda call: call.grid(1, 32, args={"m": call.tensor_map("x", **options)}),
    )
    with pytest.raises(errors.ConfigError) as caught:
        op.match(op.example_problem({"M": 8, "N": 8}))
    assert words in str(caught.value)


def test_scratch_of_another_dtype_than_the_pointer_is_told():
    def op(ctype):
        return _define(
            source=BODY.replace("int64_t N", f"{ctype}* sums"),
            launch=lambda call: call.grid(1, 32, args={"sums": call.scratch(4)}),
        )

    for ctype in ("float", "void", "float4"):
        op(ctype).match(op(ctype).example_problem({"N": 8}))
    for ctype in ("double", "scalar_t"):
        with pytest.raises(errors.ConfigError, match="a pointer to float: the scratch memory is"):
            op(ctype).match(op(ctype).example_problem({"N": 8}, "float16"))


def test_a_launch_holds_plain_integers():
    op = _define(
        launch=lambda call: call.grid(
            np.int64(1), 32, shared=np.int64(16), defines={"A": True, "B": np.int32(3)}
        )
    )
    [launch] = op.launches(op.example_problem({"N": 8}))
    assert repr((launch.shared, launch.defines)) == "(16, (('A', 1), ('B', 3)))"


@pytest.mark.parametrize(
    "before",
    [
        '#include "my_templates.cuh"\n',
        "#define template_size 4\n",
        'extern "C" {}\n',
        """__device__ const char* kText = "} __global__ \\" // {", kQuote = '"';\n""",
        'extern "C" { __device__ int g() { return 1; } }\ntemplate <class T> class Template;\n',
    ],
)
def test_a_kernel_is_found_whatever_stands_before_it(before):
    op = _define(source=before + BODY)
    assert [each.kernel.entry for each in op.match(op.example_problem({"N": 8}))] == ["f"]
    inside = BODY.replace('extern "C"', "")
    op = _define(source=f'{before}extern  "C" {{\n__device__ int h() {{ return 1; }}\n{inside}}}')
    assert [each.kernel.entry for each in op.match(op.example_problem({"N": 8}))] == ["f"]


def test_a_pointer_that_is_const_itself_may_be_written_to():
    params = "const scalar_t* x, scalar_t* const __restrict__ out"
    op = _define(source=f'extern "C" __global__ void f({params}) {{}}')
    op.match(op.example_problem({"N": 8}))


def test_a_size_that_does_not_fit_an_int_is_told():
    op = _define(source=BODY.replace("int64_t N", "int N"))
    with pytest.raises(errors.ConfigError, match="must be int64_t, since 4294967296 does not fit"):
        op.match(op.example_problem({"N": 1 << 32}))


def test_launches_and_parameters_are_kept_for_equal_problems():
    calls = []
    op = _define(launch=lambda call: (calls.append(call), call.grid1d(call["N"]))[1])
    for _ in range(3):
        op.match(op.example_problem({"N": 8}))
    assert len(calls) == 1
    assert op.match(op.example_problem({"N": 8}))[0] is op.match(op.example_problem({"N": 8}))[0]
    kernels_of_sizes = {op.match(op.example_problem({"N": n}))[0].kernel for n in (1, 2, 3)}
    assert len(kernels_of_sizes) == 1  # one loaded function for all sizes


def test_macros_and_integer_types_reach_the_compiler():
    op = _define(
        "ids: (N,) int32|int64 -> (N,) int32",
        reference=lambda ids: ids,
        source="""
        extern "C" __global__ void f(const ids_t* ids, int* out) {
          static_assert(sizeof(ids_t) == WIDTH, "the type of ids");
          out[0] = ids[0];
        }""",
        launch=lambda call: call.grid(
            1, 1, defines={"WIDTH": 8 if call.dtype_of("ids") == "int64" else 4}
        ),
    )
    for dtype in ("int32", "int64"):
        [module] = op.compile(op.example_problem({"N": 8}, dtypes={"ids": dtype}))
        assert module.entries[0].name == "f"


# The compiler's errors.


def _compile_error(body, dtype="float16"):
    op = _define(source=body)
    with pytest.raises(errors.CompileError) as caught:
        op.compile(op.example_problem({"N": 8}, dtype))
    return caught.value


def test_a_compile_error_has_file_line_and_caret_and_no_options():
    error = _compile_error(BODY.replace("{}", "{\n  out[0] = foo(x[0]);\n  bar();\n}"))
    lines = str(error).splitlines()
    assert lines[0] == 'f.cu:2: error: identifier "foo" is undefined   [float16, sm_90a]'
    assert lines[1].strip() == "out[0] = foo(x[0]);"
    assert lines[2].index("^") == lines[1].index("foo")
    assert lines[3].startswith('f.cu:3: error: identifier "bar" is undefined')
    assert "-arch" not in str(error) and "-I" not in str(error)


def test_a_missing_brace_is_told_at_the_last_line():
    error = _compile_error(BODY.replace("{}", "{\n  out[0] = x[0];\n"))
    assert str(error).startswith('f.cu:2: error: expected a "}"   [float16, sm_90a]')


def test_a_notebook_shows_a_compile_error_without_a_traceback():
    error = _compile_error(BODY.replace("{}", "{ foo(); }"))
    [text] = error._render_traceback_()
    assert text.startswith('CompileError: f.cu:1: error: identifier "foo"')


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{ asm volatile("foo.bar %0;" :: "r"(1)); }', "known instruction: 'foo'"),
        (
            "{ __shared__ float s[20000]; s[N] = 1; out[0] = x[int(s[0])]; }",
            "80000 bytes of static",
        ),
        ("{ extern __device__ float g(float); out[0] = g(1); }", "but defined nowhere"),
        ('{ }\n#include "missing.cuh"', 'cannot open source file "missing.cuh"'),
    ],
)
def test_errors_of_ptxas_and_the_preprocessor_are_told(body, words):
    text = str(_compile_error(BODY.replace("{}", body), "float32"))
    assert words in text
    assert text.startswith("f.cu")


def test_an_error_in_a_header_names_the_header(tmp_path):
    (tmp_path / "mine.cuh").write_text("#pragma once\n\n__device__ float g() { return foo; }\n")
    (tmp_path / "f.cu").write_text('#include "mine.cuh"\n' + BODY)
    op = _define(source=tmp_path / "f.cu")
    with pytest.raises(errors.CompileError) as caught:
        op.compile(op.example_problem({"N": 8}))
    assert "mine.cuh:3: error: identifier" in str(caught.value)


@pytest.mark.parametrize(
    ("used", "remedy"), [(80_000, "make it dynamic (extern __shared__"), (400_000, "use less")]
)
def test_too_much_static_shared_memory_is_told_with_a_remedy(used, remedy):
    shared = f"uses too much shared data ({used:#x} bytes, 0xc000 max)"
    [found] = read_log(f"ptxas error   : Entry function 'f' {shared}", "f.cu", "")
    words = f"f declares {used} bytes of static shared memory, more than 49152: {remedy}"
    assert found.message.startswith(words)
