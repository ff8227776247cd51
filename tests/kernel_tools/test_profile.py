"""`kernels.profile`: occupancy by CUDA's rules, waves, and ncu's output in ten lines."""

from __future__ import annotations

import csv
import io
import subprocess
from pathlib import Path

import pytest

from engine import kernels
from engine.cards import CARDS
from engine.kernels._module import ARCHITECTURES
from engine.kernels._tools import ncu
from engine.kernels._tools.bench_sizes import case_of
from engine.kernels._tools.occupancy import occupancy
from engine.kernels._tools.profile_report import LaunchProfile, ProfileReport
from engine.kernels._tools.roofline import peaks_of_card
from engine.kernels._user.problem import CHIPS, Launch

RECORDED = (Path(__file__).parent / "ncu_h200.txt").read_text()

FILE = '''
from engine import kernels

copy = kernels.define(
    "copy",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: x,
    source=r"""
extern "C" __global__ void copy(const scalar_t* x, scalar_t* out, int64_t N) {
  __shared__ float unused[1024];
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  unused[threadIdx.x] = 0.0f;
  __syncthreads();
  if (i < N) out[i] = from_float<scalar_t>(to_float(x[i]) + unused[threadIdx.x ^ 1]);
}
""",
    launch=lambda call: call.grid1d(call["N"], 256, shared=20 << 10),
    bench={"N": 1 << 24},
)
'''


@pytest.fixture
def copy(tmp_path):
    from engine.kernels._user.files import load_ops

    file = tmp_path / "my_copy.py"
    file.write_text(FILE)
    return load_ops(str(file))["copy"]


# (architecture, threads, registers, shared bytes) -> blocks on a multiprocessor. From the CUDA
# occupancy calculator's rules: registers in units of 256 for each warp and quarter, 1 KiB of shared
# memory reserved for each block.
KNOWN = [
    ("sm_90a", 256, 64, 0, 4, "registers"),
    ("sm_90a", 256, 32, 0, 8, "threads"),
    ("sm_90a", 1024, 64, 0, 1, "registers"),
    ("sm_90a", 1024, 65, 0, 0, "registers"),  # 72 with the unit: 1024 threads do not fit
    ("sm_90a", 128, 168, 0, 3, "registers"),
    ("sm_90a", 384, 168, 0, 1, "registers"),
    ("sm_90a", 32, 16, 0, 32, "blocks"),
    ("sm_90a", 128, 32, 113 << 10, 2, "shared memory"),
    ("sm_90a", 128, 32, 114 << 10, 1, "shared memory"),
    ("sm_90a", 256, 32, 227 << 10, 1, "shared memory"),
    ("sm_80", 256, 40, 0, 6, "registers"),
    ("sm_80", 128, 32, 81 << 10, 2, "shared memory"),
    ("sm_86", 1024, 32, 0, 1, "threads"),
    ("sm_86", 64, 16, 0, 16, "blocks"),
    ("sm_89", 64, 16, 0, 24, "blocks"),
    ("sm_89", 256, 255, 0, 1, "registers"),
    ("sm_120", 256, 32, 49 << 10, 2, "shared memory"),
]


@pytest.mark.parametrize(("arch", "threads", "registers", "shared", "blocks", "limit"), KNOWN)
def test_occupancy(arch, threads, registers, shared, blocks, limit):
    found = occupancy(CHIPS[arch], threads, registers, shared)
    assert found.blocks == blocks and limit in found.limits
    assert found.warps == blocks * -(-threads // 32)


def test_half_of_the_warps_is_half_the_occupancy():
    assert occupancy(CHIPS["sm_90a"], 256, 64, 0).fraction == 0.5
    assert occupancy(CHIPS["sm_89"], 256, 40, 0).fraction == 1.0


def _launch(grid, blocks=4):
    held = occupancy(CHIPS["sm_90a"], 256, 64, 0)
    assert held.blocks == blocks
    return LaunchProfile(CHIPS["sm_90a"], "k", Launch((grid,), (256,)), 64, 0, 0, held)


def test_waves_and_the_tail():
    assert _launch(4 * 132).waves == 1 and _launch(4 * 132).tail == 0
    assert _launch(4 * 132 + 1).waves == pytest.approx(1.0019, abs=1e-4)
    assert _launch(4 * 132 + 1).tail == pytest.approx(0.499, abs=1e-3)
    assert _launch(6 * 132).tail == pytest.approx(0.25)
    assert "44 of 132 SMs have a block" in "\n".join(_launch(44).lines(None))


def test_bytes_in_flight():
    text = "\n".join(_launch(1000).lines(peaks_of_card(CARDS["h200"], 132)))
    # 4.8 TB/s x 600 ns / 132 = 21.8 kB an SM, for 1024 resident threads
    assert "needs 21 KiB in flight an SM" in text and "21 bytes for each resident thread" in text


def test_without_a_gpu_every_architecture_is_compiled(copy, monkeypatch):
    pytest.importorskip("cuda.pathfinder")
    report = _compiled(copy)
    found = {each.chip.arch: each for each in report.launches}
    assert tuple(found) == ARCHITECTURES
    for each in found.values():
        assert each.static_shared == 4096 and each.launch.shared == 20480
        assert each.num_blocks == 1 << 16
    assert found["sm_86"].occupancy.blocks == 4  # 100 KiB / (24 + 1) KiB
    assert found["sm_86"].occupancy.limits == ("shared memory",)
    assert "compiled, not run" in str(report) and "67%, 4 blocks" in str(report)


def _compiled(op):
    from engine.kernels._tools.profile import profile_compiled

    return profile_compiled(op, case_of(op, {"N": 1 << 24}, "float16"))


def test_an_architecture_that_cannot_run_it_says_why():
    pytest.importorskip("cuda.pathfinder")
    op = kernels.define(
        "big",
        "x: (N,) float -> (N,) like x",
        reference=lambda x: x,
        source='extern "C" __global__ void big(const scalar_t* x, scalar_t* out, int64_t N) {}',
        launch=lambda call: call.grid1d(call["N"], 256, shared=160 << 10),
        requires="sm_80",
    )
    report = _compiled(op)
    assert {each.chip.arch for each in report.launches} == {
        *("sm_80", "sm_90a", "sm_100", "sm_103")
    }
    assert "0 to 101376 bytes on sm_86" in report.failures["sm_86"]
    assert "sm_89: big: launch: shared must be 0 to" in str(report)


# ncu. The recorded output is of an H200: a transposition through shared memory without padding, and
# a copy that reads down the columns.


def test_the_recorded_counters():
    transpose, columns = ncu.parse(RECORDED)
    assert (transpose.kernel, columns.kernel) == ("tr", "st")
    assert transpose.seconds == pytest.approx(126.528e-6)
    assert transpose.dram == pytest.approx(0.1891) and columns.l2 == pytest.approx(0.9057)
    assert transpose.sm_busy == pytest.approx(0.1598) and transpose.tensor == 0
    assert columns.occupancy == pytest.approx(0.8331)
    assert columns.stalls[0] == ("long_scoreboard", pytest.approx(0.79, abs=0.01))
    assert [name for name, _ in transpose.stalls[:3]] == [
        *("short_scoreboard", "drain", "long_scoreboard")
    ]
    assert transpose.bank_conflicts == pytest.approx(16_252_928 / 17_301_504)
    assert columns.uncoalesced == pytest.approx(14_680_064 / 18_874_368)


def test_ten_readable_lines():
    for counters in ncu.parse(RECORDED):
        lines = counters.lines()
        assert len(lines) <= 10 and all(len(line) < 180 for line in lines)
    transpose, columns = ("\n".join(counters.lines()) for counters in ncu.parse(RECORDED))
    assert "waiting for shared memory" in transpose and "bank conflicts: 94%" in transpose
    assert "uncoalesced" not in transpose and "bank conflicts" not in columns
    assert "waiting for global or local memory: 79%" in columns
    assert "uncoalesced: 78%" in columns and "tensor cores 0%" in columns


def test_metrics_that_ncu_does_not_have_are_left_out():
    text = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","k","1,000"\n'
    [counters] = ncu.parse(text)
    assert counters == ncu.KernelCounters("k", pytest.approx(1e-6))
    assert len(counters.lines()) == 2
    assert ncu.parse("==ERROR== nothing") == []


@pytest.mark.parametrize(
    ("stdout", "stderr", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "", "SYS_ADMIN"),
        ("==ERROR== Unknown section", "", "ncu failed: ==ERROR== Unknown section"),
        ("", "Traceback\nValueError: no such file", "ValueError: no such file"),
        ("", "", "printed nothing"),
    ],
)
def test_why_there_are_no_counters(copy, monkeypatch, stdout, stderr, said):
    done = subprocess.CompletedProcess([], 1, stdout, stderr)
    monkeypatch.setattr(ncu, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(ncu.subprocess, "run", lambda *_, **__: done)
    found, note = ncu.measure(copy, case_of(copy, {"N": 64}, "float32"))
    assert found == () and said in note


def test_without_ncu_or_a_file_it_says_how_to_get_there(copy, monkeypatch):
    case = case_of(copy, {"N": 64}, "float32")
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    assert "developer.nvidia.com/nsight-compute" in ncu.measure(copy, case)[1]
    monkeypatch.setattr(ncu, "find_ncu", lambda: "ncu")
    in_notebook = kernels.Op(copy.definition.__class__(**{**vars(copy.definition), "file": ""}))
    assert "must be in a file" in ncu.measure(in_notebook, case)[1]


def test_ncu_runs_the_file_with_the_callers_sizes(copy, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess([], 0, RECORDED, "")

    monkeypatch.setattr(ncu, "find_ncu", lambda: "/usr/bin/ncu")
    monkeypatch.setattr(ncu.subprocess, "run", run)
    found, note = ncu.measure(copy, case_of(copy, {"N": 64}, "float16"))
    assert len(found) == 2 and note == ""
    [command] = commands
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[-4:] == [copy.definition.file, "copy", '{"N": 64}', "float16"]
    report = ProfileReport("copy", "N=64", (), counters=found)
    assert "used of the peak: DRAM 19%" in str(report)


@pytest.mark.gpu
def test_the_driver_counts_the_same_blocks(copy, cp):
    report = kernels.profile(copy, counters=False)
    [launch] = report.launches
    held = occupancy(
        launch.chip, 256, launch.registers, launch.static_shared + launch.launch.shared
    )
    print(report)
    assert launch.occupancy == held and report.peaks.sm_count == launch.chip.sm_count


@pytest.mark.gpu
def test_counters_of_a_kernel(copy, cp):
    if ncu.find_ncu() is None:
        pytest.skip("ncu is not installed")
    report = kernels.profile(copy)
    print(report)
    if "ERR_NVGPUCTRPERM" in report.note:
        pytest.skip(report.note)
    [counters] = report.counters
    assert counters.kernel == "copy" and 1e-6 < counters.seconds < 1e-3
    if counters.occupancy is None:
        pytest.skip("ncu has no numbers: another process used the card meanwhile")
    assert 0.1 < counters.dram <= 1 and 0 < counters.occupancy <= 1
    assert counters.stalls and counters.uncoalesced < 0.1


def test_a_metric_without_a_number_is_missing():
    """ncu writes "nan" where another process used the card while it measured."""
    name = "sm__warps_active.avg.pct_of_peak_sustained_active"
    lines = RECORDED.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    column = next(csv.reader([lines[start]])).index(name)
    rows = list(csv.reader(lines[start:]))
    rows[2][column] = "nan"
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows(rows)
    [counters, *_] = ncu.parse(written.getvalue())
    assert counters.occupancy is None and counters.seconds > 0
