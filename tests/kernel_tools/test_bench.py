"""`kernels.bench`: figures, roofs, shrunk shapes, and results that are wrong."""

from __future__ import annotations

import contextlib
import json
import time

import numpy as np
import pytest

from engine import kernels
from engine.cards import CARDS
from engine.cli import main
from engine.errors import ConfigError
from engine.kernels._module import ARCHITECTURES
from engine.kernels._tools import bench as bench_module
from engine.kernels._tools.bench_report import BenchReport, BenchRow
from engine.kernels._tools.bench_sizes import bench_shapes, case_of, cpu_case
from engine.kernels._tools.roofline import peaks_of_card
from engine.kernels._user.op import Op
from engine.testing import bench_case
from engine.testing.bench_case import BenchCase, Measurement, cases_for_cpu, measure
from engine.testing.timing import Timing, measure_cpu, num_copies
from tests.bench import listing

H200 = peaks_of_card(CARDS["h200"], sm_count=132)
SOURCE = r"""
extern "C" __global__ void scale_rows(const scalar_t* x, const float* scale, scalar_t* out,
                                      int64_t T, int N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < T * N) out[i] = from_float<scalar_t>(to_float(x[i]) * scale[i / N]);
}
"""
FILE = f'''
from engine import kernels

scale_rows = kernels.define(
    "scale_rows",
    "x: (T, N) float, scale: (T,) float32 -> (T, N) like x",
    reference=lambda x, scale: x * scale[:, None],
    source=r"""{SOURCE}""",
    launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
    flops="T*N",
    bench={{"T": 8192, "N": 4096}},
)


def twice(x, scale):
    return x * scale[:, None] * 1.0
'''


def _scale_rows(**options):
    return kernels.define(
        "scale_rows",
        "x: (T, N) float, scale: (T,) float32 -> (T, N) like x",
        reference=options.pop("reference", lambda x, scale: x * scale[:, None]),
        source=options.pop("source", SOURCE),
        launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
        flops="T*N",
        **options,
    )


# A GPU that is not there: arrays of a class of their own stand for those of CuPy.


class _OnGpu(np.ndarray):
    """An array that counts as one on the GPU."""


class _FakeCupy:
    @staticmethod
    def asarray(x):
        return np.array(x).view(_OnGpu)


@pytest.fixture
def measured(monkeypatch):
    """Return a function that measures an op on a GPU that takes 20 us for every call."""

    def timed(calls, needs_graph=True):
        for call in calls:
            call()
        return Timing((19e-6, 20e-6, 20e-6, 22e-6))

    monkeypatch.setattr(bench_case, "measure_gpu", timed)
    monkeypatch.setattr(bench_module, "is_cupy_array", lambda x: isinstance(x, _OnGpu))

    def row(op, sizes, dtype="float16", against=None):
        case = case_of(op, sizes, dtype)
        return bench_module._OpCase(op, case, _FakeCupy, against or {}, H200, False).row(())

    return row


class _Kernel(Op):
    """An op whose kernel, on a GPU, computes `kernel`."""

    def __init__(self, definition, kernel):
        super().__init__(definition)
        self._kernel = kernel

    def __call__(self, *args, out=None, **kwargs):
        if any(isinstance(arg, _OnGpu) for arg in args):
            return self._kernel(*args)
        return super().__call__(*args, out=out, **kwargs)


def _with_kernel(op, kernel):
    return _Kernel(op.definition, kernel)


def test_rates_count_what_the_definition_states(measured):
    op = _scale_rows()
    kernel = _with_kernel(op, lambda x, scale: (x * scale[:, None]).astype(x.dtype))
    row = measured(kernel, {"T": 512, "N": 1024})
    nbytes = 2 * 512 * 1024 * 2 + 512 * 4
    assert row.measured.case.nbytes == nbytes
    record = row.record()
    assert record["us"] == pytest.approx(20)
    assert record["us low"] == pytest.approx(19.75) and record["us high"] == pytest.approx(20.5)
    assert record["GB/s"] == pytest.approx(nbytes / 20e-6 * 1e-9)
    assert record["TFLOP/s"] == pytest.approx(512 * 1024 / 20e-6 * 1e-12)
    assert record["roof"] == "memory"
    assert record["of roof"] == pytest.approx(nbytes / 4.8e12 / 20e-6)
    assert record["cupy us"] == pytest.approx(20) and record["x cupy"] == pytest.approx(1)
    assert not row.is_impossible


def test_a_wrong_kernel_has_no_time(measured):
    def kernel(x, scale):
        out = (x * scale[:, None]).astype(x.dtype)
        out[3, 5] += 1
        return out

    row = measured(_with_kernel(_scale_rows(), kernel), {"T": 64, "N": 64})
    assert row.measured is None and row.fraction is None
    assert "out[3, 5]" in row.wrong
    report = BenchReport("scale_rows", "NVIDIA H200", (row,), H200)
    assert not report.ok
    assert "wrong, so its time is no result; engine kernels check" in str(report)
    assert "us" not in row.record() and "out[3, 5]" in row.record()["wrong"]


def test_a_rival_that_fails_or_differs_is_named(measured):
    def fails(x, scale):
        raise RuntimeError("needs a licence")

    kernel = _with_kernel(_scale_rows(), lambda x, scale: (x * scale[:, None]).astype(x.dtype))
    against = {"broken": fails, "half": lambda x, scale: x * scale[:, None] / 2}
    row = measured(kernel, {"T": 64, "N": 64}, against=against)
    assert row.measured.rivals["broken"] == "RuntimeError: needs a licence"
    assert "half: its result differs from the reference's" in row.notes
    text = str(BenchReport("scale_rows", "NVIDIA H200", (row,), H200))
    assert "no broken: RuntimeError: needs a licence" in text


def test_a_reference_that_leaves_the_gpu_has_no_time_there(measured):
    op = _scale_rows(reference=lambda x, scale: np.array(x) * np.array(scale)[:, None])
    kernel = _with_kernel(op, lambda x, scale: (x * scale[:, None]).astype(x.dtype))
    row = measured(kernel, {"T": 64, "N": 64})
    assert "does not run on CuPy" in row.measured.rivals["cupy"]


def test_more_than_the_card_can_do_is_an_error(measured):
    kernel = _with_kernel(
        _scale_rows(nbytes="1000*T*N"), lambda x, scale: (x * scale[:, None]).astype(x.dtype)
    )
    row = measured(kernel, {"T": 512, "N": 1024})
    report = BenchReport("scale_rows", "NVIDIA H200", (row,), H200)
    assert row.is_impossible and not report.ok
    assert "of the card's memory peak is impossible" in str(report)


def test_an_argument_written_in_place_is_compared(measured):
    op = kernels.define(
        "add_one",
        "x: (N,) float inout ->",
        reference=lambda x: np.add(x, 1, out=x),
        source='extern "C" __global__ void add_one(scalar_t* x, int N) {}',
        launch=lambda call: call.grid1d(call["N"], 256),
    )

    def right(x):
        x += 1

    assert measured(_with_kernel(op, right), {"N": 4096}, "float32").wrong == ""
    assert "x[0]" in measured(_with_kernel(op, lambda x: x), {"N": 4096}, "float32").wrong


@pytest.mark.parametrize("name", CARDS)
def test_roofs_meet_where_the_intensity_says(name):
    peaks = peaks_of_card(CARDS[name])
    ridge = peaks.rate("bfloat16") / peaks.memory  # operations per byte
    assert 20 < ridge < 500
    assert peaks.roof(1e6, 0.99 * ridge * 1e6, "float16").name == "memory"
    assert peaks.roof(1e6, 1.01 * ridge * 1e6, "float16").name == "arithmetic"
    assert peaks.roof(1e6, 0, "float32").seconds == pytest.approx(1e6 / peaks.memory)


def test_fp8_counts_double_where_the_card_has_it():
    assert H200.rate("fp8") == pytest.approx(2 * H200.rate("bfloat16"), rel=0.01)
    assert peaks_of_card(CARDS["a100"]).rate("fp8") == 19.5e12  # not on its tensor cores


# Shapes.


def test_the_definitions_sizes_are_measured_and_others_checked():
    op = _scale_rows(bench=({"T": 8, "N": 64}, {"T": 1, "N": 64}), where="N % 64 == 0")
    assert [shape.sizes for shape in bench_shapes(op)] == [{"T": 8, "N": 64}, {"T": 1, "N": 64}]
    for sizes, said in (
        ({"T": 8}, "must have T, N"),
        ({"T": 8, "N": 64, "K": 1}, "must have T, N"),
        ({"T": 8, "N": 63}, "N % 64 == 0"),
        (5, "sizes: must be a mapping; got 5"),
        ("T=8", "sizes: must be a mapping; got 'T=8'"),
    ):
        with pytest.raises(ConfigError, match=said):
            bench_shapes(op, sizes)


def test_numpys_integers_are_sizes():
    sizes = {"T": np.int64(8), "N": np.int32(64)}
    for shapes in (bench_shapes(_scale_rows(), [sizes]), bench_shapes(_scale_rows(bench=sizes))):
        assert shapes[0].sizes == {"T": 8, "N": 64}
        assert all(type(size) is int for size in shapes[0].sizes.values())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kernels.bench(len), "op: must be what kernels.define returns; got builtin"),
        (lambda: kernels.profile("f"), "op: must be what kernels.define returns; got str"),
        (
            lambda: kernels.bench(_scale_rows(), against=[len]),
            "against: must be a mapping of names to functions",
        ),
    ],
)
def test_an_argument_of_another_kind_is_told(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


def test_without_sizes_a_large_shape_is_chosen():
    [shape] = bench_shapes(_scale_rows(where="N % 64 == 0"))
    assert shape.sizes == {"T": 4096, "N": 4096} and "chosen" in shape.note
    with pytest.raises(ConfigError, match="has no bench="):
        bench_shapes(_scale_rows(where="N % 3 == 0"))


def test_a_cpu_gets_a_shape_that_it_can_do():
    op = _scale_rows(where="N % 512 == 0")
    start = time.perf_counter()
    case, seconds = cpu_case(op, {"T": 1 << 20, "N": 1 << 14}, "float32")
    assert time.perf_counter() - start < 3
    sizes = dict(case.sizes)
    assert sizes["N"] % 512 == 0 and sizes["T"] * sizes["N"] >= 1 << 14
    assert seconds < 1


def _mirrored_cases():
    """Yield (name, cases for a CPU) of every benchmark of an op that this machine can import."""
    for each in listing.benchmarks():
        try:
            module = __import__(f"tests.bench.bench_{each.name}", fromlist=["CASES"])
        except ModuleNotFoundError as error:
            assert error.name in ("torch", "transformers", "jax")
            continue
        if hasattr(module, "CASES"):
            yield each.name, getattr(module, "CPU_CASES", None) or cases_for_cpu(module.CASES)


def test_the_mirrors_run_few_and_small_cases_on_a_cpu():
    for name, cases in _mirrored_cases():
        assert 1 <= len(cases) <= 4, name
        assert all(case.nbytes < 20e6 and case.flops < 2e8 for case in cases), name


def test_every_benchmark_runs_and_its_check_passes():
    for _, cases in _mirrored_cases():
        case = min(cases, key=lambda case: case.nbytes + case.flops)
        arguments = case.make(np, 0)
        result = case.run(*arguments)
        if case.check is not None:
            case.check(arguments, result)


def test_a_cpu_measures_the_reference_and_compiles_the_kernel():
    report = kernels.bench(_scale_rows(), {"T": 8192, "N": 4096}, "float16", device="cpu")
    [row] = report.rows
    assert "TFLOP/s" not in row.record() and row.record()["GB/s"] > 0
    assert any(note.startswith("shrunk from T=8192, N=4096") for note in row.notes)
    text = str(report)
    assert "TFLOP/s" not in text and "reference in NumPy" in text
    found = {each.chip.arch: each for each in report.compiled.launches}
    if found:  # NVRTC is installed
        assert tuple(found) == ARCHITECTURES
        assert found["sm_90a"].occupancy.blocks == 8 and found["sm_90a"].spill_bytes == 0
    with pytest.raises(ConfigError, match="limits of a GPU"):
        report.plot()


# Timings.


def test_spread_and_copies():
    timing = Timing(tuple(range(1, 22)))
    assert timing.median == 11 and timing.quartiles == (6, 16)
    assert num_copies(1 << 30) == 2 and num_copies(1 << 10) == 16
    assert num_copies(100 << 20, 128 << 20) == 4


def test_a_slow_call_is_timed_a_few_times():
    calls = []
    timing = measure_cpu(lambda: calls.append(time.sleep(0.02)), warmup=0, seconds=0.03)
    assert len(timing.samples) == len(calls) == 3


def test_a_rate_without_its_numerator_is_left_out():
    row = Measurement(BenchCase("one", tuple, tuple, nbytes=0), Timing((1e-6,))).row()
    assert set(row) == {"case", "us", "us low", "us high"}


def test_a_case_whose_check_fails_is_not_timed():
    def check(args, result):
        raise AssertionError("off by one")

    case = BenchCase("one", lambda xp, seed: (), lambda: 1, nbytes=8, check=check)
    with pytest.raises(AssertionError, match="off by one"):
        measure(case, np)
    [row] = bench_module.bench_cases("an_op", [case], bench_module.resolve_device("cpu")[0]).rows
    assert row.wrong == "off by one" and row.measured is None


# The picture and the command.


def _report():
    rows = []
    for index, flops in enumerate((1e8, 1e12)):
        case = BenchCase(f"case {index}", tuple, tuple, 1e9, flops)
        timing = Timing((4e-4, 5e-4, 6e-4))
        found = Measurement(case, timing, {"cublas": Timing((1e-3,)), "cupy": "no"})
        rows.append(BenchRow(case.name, found, H200.roof(1e9, flops, "float16")))
    return BenchReport("gemm", "NVIDIA H200", tuple(rows), H200, 4.2e12)


def test_a_picture_has_a_point_for_each_case_and_rival(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "roofline.png"
    figure = _report().plot(file)
    assert file.read_bytes().startswith(b"\x89PNG")
    [axes] = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["the kernel"].get_xdata().tolist() == [0.1, 1000]
    assert lines["the kernel"].get_ydata() == pytest.approx([1e8 / 5e-4 * 1e-12, 2000])
    assert lines["cublas"].get_ydata()[1] == pytest.approx(1000)
    texts = [text.get_text() for text in axes.texts]
    assert "case 0" in texts and any("989 TFLOP/s" in text for text in texts)


def test_a_table_for_notebooks():
    html = _report()._repr_html_()
    assert "<td>case 1</td>" in html and "<th>cublas us</th>" in html
    assert "no cupy: no" in html


def _run(capsys, *words):
    with contextlib.suppress(SystemExit):
        main(["kernels", "bench", *map(str, words)])
    return capsys.readouterr()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_op.py"
    path.write_text(FILE)
    return path


def test_the_command_writes_what_it_measured(file, tmp_path, capsys):
    record_file = tmp_path / "out.json"
    against = f"numpy={file}:twice"
    words = ("--size", "T=64,N=128", "--dtype", "float32", "--against", against)
    output = _run(capsys, f"{file}:scale_rows", "--device", "cpu", *words, "--json", record_file)
    assert "scale_rows: the reference in NumPy" in output.out
    record = json.loads(record_file.read_text())
    assert {"card", "date", "commit", "command", "rows"} <= set(record)
    [row] = record["rows"]
    assert row["op"] == "scale_rows" and row["case"] == "T=64, N=128, float32"
    assert row["us low"] <= row["us"] <= row["us high"] and row["numpy us"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such_op"], "must be a Python file or one of those that `engine kernels` lists; got"),
        (["rmsnorm", "--sizes", "T=1"], "are for a kernel of your own"),
        (["FILE", "--sizes", "T=many"], "--sizes must be like T=8192,N=4096"),
        (["FILE", "--sizes", "T=4"], "sizes: must have T, N"),
        (["FILE", "--sizes", "T=4,N=8,T=5"], "--sizes must have each size once; got T twice"),
        (["FILE", "--dtype", "int8"], "dtypes must be of float32, float16, bfloat16"),
        (["FILE", "--against", "cublas"], "--against must be NAME=FILE.py:FUNCTION"),
        (["FILE", "--plot", "x.png"], "--plot draws the limits of a GPU"),
        (["FILE", "--plot", "/no/folder/x.png"], "--plot must name a file in an existing folder"),
    ],
)
def test_the_command_names_a_bad_option(words, said, file, capsys):
    words = [str(file) if word == "FILE" else word for word in words]
    assert said in _run(capsys, *words, "--device", "cpu").err


def test_an_op_of_the_catalog(capsys):
    out = _run(capsys, "residual_add", "--device", "cpu").out
    assert "residual_add: the reference in NumPy" in out and "(1, 4096)" in out


def test_the_catalog_without_a_checkout(capsys, monkeypatch, tmp_path):
    from engine.commands import kernels_bench

    monkeypatch.setattr(kernels_bench, "source_dir", lambda: tmp_path / "cuda_src")
    assert "comes with a checkout" in _run(capsys, "residual_add", "--device", "cpu").err


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_kernel_is_measured_below_the_roof(dtype, cp):
    report = kernels.bench(_scale_rows(), {"T": 8192, "N": 4096}, dtype)
    [row] = report.rows
    print(report)
    assert report.ok and not row.wrong
    assert 0 < row.fraction < 1  # other tests share the card
    assert isinstance(row.measured.rivals["cupy"], Timing)
    assert row.measured.rivals["cupy"].median > row.measured.timing.median
    low, high = row.measured.timing.quartiles
    assert low <= row.measured.timing.median <= high < 1.5 * low
    assert 0.5 * report.peaks.memory < report.copy_rate < report.peaks.memory


@pytest.mark.gpu
def test_a_product_is_measured_below_the_arithmetic_roof(cp):
    naive = kernels.define(
        "product",
        "a: (M, K) float, b: (K, N) float -> (M, N) like a",
        reference=lambda a, b: a @ b,
        source=r"""
extern "C" __global__ void product(const scalar_t* a, const scalar_t* b, scalar_t* out, int M,
                                   int N, int K) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  const int m = blockIdx.y * blockDim.y + threadIdx.y;
  if (m >= M || n >= N) return;
  float sum = 0.0f;
  for (int64_t k = 0; k < K; ++k) sum += to_float(a[m * int64_t(K) + k]) * to_float(b[k * N + n]);
  out[int64_t(m) * N + n] = from_float<scalar_t>(sum);
}
""",
        launch=lambda call: call.grid((-(-call["N"] // 32), -(-call["M"] // 8)), (32, 8)),
        flops="2*M*N*K",
        reduction="K",
    )
    sizes = {"M": 2048, "N": 2048, "K": 2048}
    report = kernels.bench(naive, sizes, "float16", against={"cublas": cp.matmul})
    [row] = report.rows
    print(report)
    assert report.ok and row.roof.name == "arithmetic" and 0 < row.fraction < 0.5
    assert row.measured.rivals["cublas"].median < row.measured.timing.median


@pytest.mark.gpu
def test_a_kernel_that_is_wrong_on_the_gpu_has_no_time(cp):
    source = SOURCE.replace("scale[i / N]", "scale[i % N % T]")
    report = kernels.bench(_scale_rows(source=source), {"T": 256, "N": 256}, "float32")
    assert report.rows[0].measured is None and "out[" in report.rows[0].wrong
    assert not report.ok
