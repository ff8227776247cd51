"""`kernels.check(sanitizer=)` on a GPU: what each tool of compute-sanitizer finds, in words."""

from __future__ import annotations

import shutil

import pytest

from engine import kernels

pytestmark = pytest.mark.gpu

KERNEL = r"""
extern "C" __global__ void faulty(const float* x, float* out, int64_t N) {
  __shared__ float smem[256];
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  smem[threadIdx.x] = i < N ? x[i] : 0.0f;
  FAULT
}
"""
WAIT = "__syncthreads(); if (i < N) out[i] ="


def _faulty(fault):
    return kernels.define(
        "faulty",
        "x: (N,) float32 -> (N,) float32",
        reference=lambda x: 2 * x,
        source=KERNEL.replace("FAULT", fault),
        launch=lambda call: call.grid1d(call["N"], 256),
    )


@pytest.fixture
def _tool():
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")


@pytest.mark.usefixtures("_tool")
@pytest.mark.parametrize(
    ("tool", "fault", "words"),
    [
        ("memcheck", f"{WAIT} 2.0f * x[i + N];", "a read of 4 bytes outside every array"),
        (
            "memcheck",
            "const float4 v = reinterpret_cast<const float4*>(x)[i / 4];"
            "if (i < N) out[i] = v.x + v.y + v.z + v.w;",
            "a read of 16 bytes at an address that is no multiple of 16",
        ),
        (
            "racecheck",
            "if (i < N) out[i] = smem[threadIdx.x ^ 33];",
            "a write in faulty.cu:5 and a read in faulty.cu:6, without a __syncthreads()",
        ),
        ("initcheck", f"{WAIT} out[i] + smem[threadIdx.x];", "that nothing has written"),
        (
            "synccheck",
            "if (threadIdx.x % 2) __syncthreads(); if (i < N) out[i] = smem[threadIdx.x];",
            "a barrier that not all threads reach",
        ),
    ],
)
def test_a_tool_names_the_cause_and_the_line(cp, tool, fault, words):
    report = kernels.check(_faulty(fault), sanitizer=tool, sizes={"N": 64}, show=False)
    assert not report.ok
    assert words in str(report)
    assert "faulty.cu:" in str(report)


@pytest.mark.usefixtures("_tool")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_a_right_kernel_has_no_findings(cp, tool):
    right = _faulty(f"{WAIT} 2.0f * smem[threadIdx.x];")
    report = kernels.check(right, sanitizer=tool, sizes={"N": 67}, show=False)
    assert report.ok, str(report)
