"""Mistakes that need no GPU to be told: `define`, `kernels.check` and the commands name them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from engine import errors, kernels
from engine.cli import main
from engine.kernels._tools.bench_report import BenchReport
from engine.kernels._tools.profile_report import ProfileReport

SCALE = r"""
extern "C" __global__ void __launch_bounds__(128) f(const scalar_t* x, scalar_t* out, int N) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
"""
TMA = r"""
#include "common/tma.cuh"
extern "C" __global__ void f(const __grid_constant__ TensorMap map, float* out) { out[0] = 0.0f; }
"""


def define(**changes):
    parts = {
        "signature": "x: (N,) float -> (N,) like x",
        "reference": lambda x: 2 * x,
        "source": SCALE,
        "launch": lambda call: call.grid1d(call["N"], 128),
    }
    return kernels.define("f", **(parts | changes))


def findings(**changes):
    report = kernels.check(
        define(**changes), sizes={"N": 5}, dtype="float32", arch="sm_90a", show=False
    )
    return str(report)


def box_of(columns, **options):
    return {
        "signature": "x: (M, N) float32 -> (1,) float32",
        "reference": lambda x: x[:1, 0],
        "source": TMA,
        "launch": lambda call: call.grid(
            1, 32, args={"map": call.tensor_map("x", (4, columns), **options)}
        ),
        "requires": "sm_90",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tolerance": 1e-3}, "tolerance: must be two numbers"),
        ({"sizes": {"N": 64}}, "sizes: must be several for N, such as (64, 1000); got 64"),
        ({"in_place": True}, "in_place: must name arguments; got True"),
        ({"tolerance": (float("nan"), 0.0)}, "two numbers of at least 0"),
        ({"tolerance": (1e-3, -1.0)}, "two numbers of at least 0"),
        ({"tolerance": "ab"}, "tolerance: must be two numbers"),
        ({"sizes": {"N": (-1,)}}, "sizes: must be several for N, such as (64, 1000); got (-1,)"),
        ({"sizes": {"N": (64, 1.5)}}, "sizes: must be several for N"),
        ({"sizes": ("N", 64)}, "sizes: must be a mapping; got ('N', 64)"),
        ({"inputs": 3}, "inputs: must be a mapping; got 3"),
        ({"inputs": {"x": 3}}, "inputs: must be callable for x; got 3"),
        ({"bench": 64}, "bench: must be a mapping or a sequence of mappings; got 64"),
        ({"bench": "N"}, "bench: must be a mapping or a sequence of mappings; got 'N'"),
        ({"where": ["N > 0", "N < 50"]}, "where: must be a str; got ['N > 0', 'N < 50']"),
        ({"where": None}, "where: must be a str; got None"),
        ({"entry": 3}, "entry: must be a str; got 3"),
        ({"source": "x" * 9000}, "source: there is no file 'xxx"),
        ({"requires": 90}, "requires: must be an architecture like sm_90"),
        ({"where": "N % 8 = 0"}, "equality is =="),
    ],
)
def test_an_argument_of_another_type_is_told(changes, words):
    with pytest.raises(errors.ConfigError) as caught:
        define(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reference": lambda x: None}, "must return out; it returned None"),
        ({"launch": lambda call: call.grid1d(call["N"], 256)}, "at most 128 threads"),
        ({"launch": lambda call: call.grid(call["N"] // 128, 128)}, "grid (0,) has no blocks"),
        (
            {"launch": lambda call: call.grid(call["N"] / 4, 128)},
            "one to three integers; got (1.25",
        ),
        ({"launch": lambda call: call.grid1d(call.N)}, "a size or scalar is call['N']"),
    ],
)
def test_the_check_names_the_cause_without_a_gpu(changes, words):
    assert words in findings(**changes)


def test_an_empty_grid_is_right_where_the_result_is_set_to_zero():
    total = kernels.define(
        "total",
        "x: (N,) float32 -> () float32 zeroed",
        reference=lambda x: x.sum(),
        source=r"""
extern "C" __global__ void total(const float* x, float* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) atomicAdd(out, x[i]);
}
""",
        launch=lambda call: call.grid1d(call["N"]),
    )
    report = kernels.check(total, arch="sm_90a", show=False)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (34, {"swizzle": 0}, "136 bytes: it must be a multiple of 16 bytes"),
        (64, {"swizzle": 128}, "256 bytes: it must be at most 128, the swizzle"),
        (64, {"swizzle": 48}, "swizzle must be one of 0, 32, 64, 128; it is 48"),
        (512, {"swizzle": 0}, "1 to 256 elements"),
        (64, {"swizzle": 0}, ""),
    ],
)
def test_a_box_that_tma_cannot_copy_is_told_without_a_gpu(columns, options, words):
    op = define(**box_of(columns, **options))
    problem = op.example_problem({"M": 8, "N": 64})
    if not words:
        assert len(op.match(problem)) == 1
        return
    with pytest.raises(errors.ConfigError) as caught:
        op.match(problem)
    assert words in str(caught.value)


@pytest.mark.parametrize(("arch", "capability"), [("sm_80", 80), ("sm_90a", 90), ("sm_103", 103)])
def test_architectures_compare_as_numbers(arch, capability):
    assert define().example_problem({"N": 5}, arch=arch).capability == capability


def test_variants_of_an_integer_dtype_are_told_apart():
    op = kernels.define(
        "f",
        "ids: (N,) int32|int64 -> (N,) int32",
        reference=lambda ids: ids,
        source='extern "C" __global__ void f(const ids_t* ids, int* out) { out[0] = ids[0]; }',
        launch=lambda call: call.grid(1, 1),
    )
    report = str(kernels.check(op, quick=True, arch="sm_90a", show=False))
    assert "ids_t=" in report


def test_help_of_kernels_names_the_other_commands(capsys):
    with pytest.raises(SystemExit) as done:
        main(["kernels", "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"engine kernels {kind}" in shown for kind in ("check", "bench", "profile"))


def test_a_report_in_a_notebook_shows_what_the_compiler_said():
    compiled = ProfileReport("f", "N=5", (), note="12 registers")
    assert "12 registers" in BenchReport("f", "cpu", (), compiled=compiled)._repr_html_()


TWO_OPS = r"""
from engine import kernels

def copy(name, dtype):
    source = f'extern "C" __global__ void {name}(const {name}_in* x, {name}_in* out) {{}}'
    return kernels.define(
        name, f"x: (N,) {dtype} -> (N,) like x", reference=lambda x: x,
        source=source.replace(f"{name}_in", "scalar_t" if dtype == "float" else "int"),
        launch=lambda call: call.grid(1, 1), bench={"N": 64},
    )

floats = copy("floats", "float")
ints = copy("ints", "int32")
"""


def test_a_dtype_that_one_op_lacks_does_not_end_the_others(tmp_path, capsys):
    file = tmp_path / "two_ops.py"
    file.write_text(TWO_OPS)
    with pytest.raises(SystemExit) as done:
        main(["kernels", "bench", str(file), "--dtype", "float16", "--device", "cpu"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert "N=64, float16" in shown
    assert "ints: the reference" in shown


def test_a_dtype_that_no_op_has_is_an_error(tmp_path, capsys):
    file = tmp_path / "two_ops.py"
    file.write_text(TWO_OPS)
    with pytest.raises(SystemExit) as done:
        main(["kernels", "bench", str(file), "--dtype", "float17", "--device", "cpu"])
    assert done.value.code == 2
    assert "'float17'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("common/reduc.cuh", 'did you mean "common/reduce.cuh"?'),
        ("reduce.cuh", 'did you mean "common/reduce.cuh"?'),
        ("cstdint", "NVRTC has no C or C++ library"),
        ("stdio.h", "NVRTC has no C or C++ library"),
        ("cub/cub.cuh", "CUB, Thrust, libcu++ and cooperative groups are not available"),
        ("cooperative_groups.h", "cooperative groups are not available"),
    ],
)
def test_a_header_that_is_not_there_is_told_with_the_remedy(header, words):
    assert words in findings(source=f"#include <{header}>\n{SCALE}")


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("x: (N,) half -> (N,) like x", "did you mean 'float16'?"),
        ("x: (N,) int -> (N,) like x", "did you mean 'int32'?"),
        ("x: (N,) float; s: (N,) float -> (N,) like x", "commas separate arguments"),
        ("x: [N] float -> (N,) like x", "a shape in parentheses, such as (T, N)"),
    ],
)
def test_a_signature_of_another_dialect_is_told(signature, words):
    with pytest.raises(errors.ConfigError) as caught:
        define(signature=signature)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("const scalar_t* x, scalar_t* out, int N, int k = 3", "has no default value; got 'int k"),
        ("PARAMS", "macros are not expanded here; got 'PARAMS'"),
    ],
)
def test_a_parameter_that_cannot_be_read_is_told(params, words):
    source = SCALE.replace("const scalar_t* x, scalar_t* out, int N", params)
    with pytest.raises(errors.ConfigError) as caught:
        define(source=source)
    assert words in str(caught.value)


def test_scalar_t_for_a_fixed_dtype_is_told():
    told = findings(
        signature="x: (N,) float, s: (N,) float32 -> (N,) like x",
        reference=lambda x, s: 2 * x,
        source=SCALE.replace("int N)", "int N, const double* s)"),
    )
    assert "must be a pointer to float: the signature says float32" in told


def test_an_argument_of_the_launch_cannot_replace_an_array():
    told = findings(launch=lambda call: call.grid1d(call["N"], 128, args={"x": 4}))
    assert "x is an array of the signature, which args cannot replace; got 4" in told


def test_a_reference_that_returns_too_many_results_is_told():
    told = findings(reference=lambda x: (x, x))
    assert "must return one array, out; it returned a tuple of 2" in told


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_reference_cannot_write_an_argument_of_the_caller(dtype):
    def double(x):
        x *= 2
        return x

    x = np.arange(4).astype(dtype)
    with pytest.raises(errors.ContractError, match="f: the reference modifies an argument: let"):
        define(reference=double)(x)
    np.testing.assert_array_equal(x, np.arange(4))
    assert "the reference modifies an argument: let it copy" in findings(reference=double)
    in_place = define(signature="x: (N,) float inout", reference=double)
    assert in_place(x) is x
    np.testing.assert_array_equal(x, 2 * np.arange(4))


@pytest.mark.parametrize("result", [[1j] * 3, [None] * 3, ["a"] * 3, [[1], [1, 2], 3]])
def test_a_reference_that_returns_no_real_numbers_is_told(result):
    op = define(reference=lambda x: result)
    with pytest.raises(errors.DTypeError, match="f: its reference must return real numbers, out;"):
        op(np.ones(3, np.float32))


def test_a_reference_or_launch_of_other_arguments_is_told():
    signature = "x: (N,) float, scale: (N,) float32 -> (N,) like x"
    words = r"f: reference: must take the arguments \(x, scale\) by position; it takes \(x\)"
    with pytest.raises(errors.ConfigError, match=words):
        define(signature=signature)
    with pytest.raises(errors.ConfigError, match=r"reference: must .* \(x\) .* takes \(\*, x\)"):
        define(reference=lambda *, x: x)
    with pytest.raises(errors.ConfigError, match=r"f: launch: must take the arguments \(problem\)"):
        define(launch=lambda: None)
    define(signature=signature, reference=np.multiply)
    define(signature=signature, reference=lambda *args, factor=2: args[0] * factor)


def test_a_size_that_no_array_can_have_is_told_before_the_reference_runs():
    op = define(
        signature="x: (N,) float, k: int32 -> (k,) like x", reference=lambda x, k: np.zeros(k)
    )
    with pytest.raises(errors.ShapeError, match="f: out: k must be an integer of at least 0; got"):
        op(np.ones(3, np.float32), -1)


def test_templates_may_stand_beside_the_kernel():
    helper = "template <typename T> __global__ void g(const T* x) {}\n"
    assert "f: ok" in findings(source=helper + SCALE)
    with pytest.raises(errors.ConfigError, match="kernel 'g' must be declared extern \"C\""):
        define(source=helper)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "f.cu"
    file.write_bytes(b"\xef\xbb\xbf" + SCALE.replace("\n", "\r\n").encode())
    assert "f: ok" in findings(source=file)


def test_an_unknown_word_after_kernels_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["kernels", "chekc", "my_op.py"])
    assert "follow a command (check, bench, profile, headers); got 'chekc'" in (
        capsys.readouterr().err
    )


def test_an_override_names_the_op_that_it_replaces_and_spares_its_arguments():
    x = np.array([[1.0, 2.0]], np.float32)
    narrow = define(signature="x: (T, N) float16 -> (T, N) like x", reference=lambda x: x)
    with kernels.override("silu", narrow), pytest.raises(errors.DTypeError) as caught:
        kernels.silu(x)
    assert str(caught.value) == "kernels['silu']: f: x: must be float16; got float32"

    def doubled(x):
        x *= 2

    in_place = define(signature="x: (T, N) float inout", reference=doubled)
    with kernels.override("silu", in_place):
        y = kernels.silu(x)
        np.testing.assert_array_equal(y, [[2.0, 4.0]])
        np.testing.assert_array_equal(x, [[1.0, 2.0]])
        kernels.silu(x, out=x)
    np.testing.assert_array_equal(x, [[2.0, 4.0]])


def test_a_string_is_compiled_again_when_a_header_beside_the_definition_changes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(globals(), "__file__", str(tmp_path / "my_op.py"))
    header = tmp_path / "mine.cuh"
    header.write_text("#define TWO 2\n")
    op = define(source='#include "mine.cuh"\n' + SCALE.replace("2.0f", "TWO"))
    problem = op.example_problem({"N": 3})
    op.compile(problem)
    header.write_text("#define THREE 3\n")
    os.utime(header, ns=(0, 1))
    with pytest.raises(errors.CompileError, match='identifier "TWO" is undefined'):
        op.compile(problem)
