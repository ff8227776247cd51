"""User kernels on a GPU: every feature of `define`, against its reference."""

from __future__ import annotations

import numpy as np
import pytest

from engine import errors, kernels
from engine.kernels._launch_plan import making_plan
from engine.plan_array import PlanArray
from engine.testing.tolerances import assert_close

pytestmark = pytest.mark.gpu

INDEX = "const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;"

scale_rows = kernels.define(
    "scale_rows",
    "x: (T, N) float, scale: (T,) float32 -> (T, N) like x",
    reference=lambda x, scale: x * scale[:, None],
    source=f"""
extern "C" __global__ void scale_rows(const scalar_t* x, const float* scale, scalar_t* out,
                                      int64_t T, int N) {{
  {INDEX}
  if (i < T * N) out[i] = from_float<scalar_t>(to_float(x[i]) * scale[i / N]);
}}""",
    launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
    in_place="x",
)


def _arguments(xp, dtype="float32", shape=(5, 67)):
    rng = np.random.default_rng(0)
    x = xp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(_dtype(dtype))
    return x, xp.asarray(rng.standard_normal(shape[0]).astype(np.float32))


def _dtype(name):
    from engine.dtypes import np_dtype

    return np_dtype(name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_call_equals_the_reference(cp, dtype):
    assert_close(scale_rows(*_arguments(cp, dtype)), scale_rows(*_arguments(np, dtype)))


@pytest.mark.parametrize("shape", [(0, 67), (5, 0)])
def test_an_empty_call_launches_nothing(cp, shape):
    assert scale_rows(*_arguments(cp, shape=shape)).shape == shape


def test_views_and_misaligned_arrays(cp):
    x, scale = _arguments(cp, shape=(6, 134))
    want = scale_rows(x.get()[::2, 1::2], scale.get()[::2])
    assert_close(scale_rows(x[::2, 1::2], scale[::2]), want)
    whole = cp.arange(68, dtype=cp.float32)
    got = scale_rows(whole[1:].reshape(1, 67), scale[:1])
    assert_close(got, scale_rows(whole.get()[1:].reshape(1, 67), scale.get()[:1]))


def test_out_in_place_and_overlapping(cp):
    x, scale = _arguments(cp)
    want = scale_rows(x.get(), scale.get())
    out = cp.empty_like(x)
    assert scale_rows(x, scale, out=out) is out
    assert_close(out, want)
    assert scale_rows(x, scale, out=x) is x
    assert_close(x, want)
    buffer = cp.arange(3 * 64, dtype=cp.float32)
    source = buffer[: 2 * 64].reshape(2, 64)
    target = buffer[64:].reshape(2, 64)  # its first row is the second one of the source
    want = scale_rows(source.get(), scale.get()[:2])
    scale_rows(source, scale[:2], out=target)
    assert_close(target, want)


def test_results_that_overlap_are_refused_before_the_launch(cp):
    both = kernels.define(
        name="both",
        signature="x: (N,) float32 -> y: (N,) float32, z: (N,) float32",
        reference=lambda x: (x, x + 1),
        source=r"""
extern "C" __global__ void both(const float* x, float* y, float* z, int N) {
  if (threadIdx.x < N) y[threadIdx.x] = x[threadIdx.x], z[threadIdx.x] = x[threadIdx.x] + 1;
}
""",
        launch=lambda call: call.grid(1, 32),
    )
    buffer = cp.arange(9, dtype=cp.float32)
    for x in (buffer[:3], buffer[2:5], cp.ones(3, cp.float32)):  # y, z or none overlap x, too
        with pytest.raises(errors.ContractError, match="z: must not overlap y"):
            both(x, out=(buffer[:3], buffer[2:5]))
    both(buffer[:3], out=(buffer[3:6], buffer[6:]))
    assert buffer.tolist() == [0, 1, 2, 0, 1, 2, 1, 2, 3]


def test_what_overlaps_an_argument_that_is_written_keeps_its_values(cp):
    def add_reversed(x, y):
        x += y[::-1]

    op = kernels.define(
        name="add_reversed",
        signature="x: (N,) float32 inout, y: (N,) float32",
        reference=add_reversed,
        source=r"""
extern "C" __global__ void add_reversed(float* x, const float* y, int N) {
  for (int i = 0; i < N; i++) x[i] += y[N - 1 - i];
}
""",
        launch=lambda call: call.grid(1, 1),
    )
    x = cp.arange(6, dtype=cp.float32)
    op(x[:4], x[1:5])
    assert x.tolist() == [4, 4, 4, 4, 4, 5]
    assert op(x[2:], x[2:]).tolist() == [9, 8, 8, 9]


def test_a_result_over_an_argument_that_is_written_is_refused(cp):
    op = kernels.define(
        name="doubled",
        signature="x: (N,) float32 inout -> (N,) float32",
        reference=lambda x: (x.__imul__(2), x + 1)[1],
        source=r"""
extern "C" __global__ void doubled(float* x, float* out, int N) {
  if (threadIdx.x < N) out[threadIdx.x] = (x[threadIdx.x] *= 2) + 1;
}
""",
        launch=lambda call: call.grid(1, 32),
    )
    x = cp.arange(4, dtype=cp.float32)
    with pytest.raises(errors.ContractError, match="out: must not overlap x"):
        op(x[:3], out=x[1:])
    assert op(x, out=cp.empty_like(x)).tolist() == [1, 3, 5, 7] and x.tolist() == [0, 2, 4, 6]


def test_other_frameworks_arrays(cp):
    class Foreign:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    x, scale = _arguments(cp)
    assert_close(scale_rows(Foreign(x), Foreign(scale)), scale_rows(x.get(), scale.get()))


def test_a_mix_of_modules_is_told(cp):
    x, scale = _arguments(cp)
    with pytest.raises(errors.ContractError, match="is a numpy array, but x is a cupy array"):
        scale_rows(x, scale.get())


def test_a_graph_repeats_the_call_with_new_content(cp):
    x, scale = _arguments(cp)
    out = cp.empty_like(x)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        scale_rows(x, scale, out=out)
        stream.begin_capture()
        scale_rows(x, scale, out=out)
        graph = stream.end_capture()
        x *= 3
        graph.launch(stream)
    stream.synchronize()
    assert_close(out, scale_rows(x.get(), scale.get()))


def test_a_launch_plan_repeats_the_call_for_other_arrays(cp):
    x, scale = _arguments(cp)
    out = cp.zeros_like(x)
    with making_plan() as builder:
        scale_rows(PlanArray(x), PlanArray(scale), out=PlanArray(out))
    names = {"x": x, "scale": scale, "out": out}
    plan = builder.finish([(name, a.data.ptr, a.nbytes) for name, a in names.items()])
    other = {name: cp.asarray(2 * a.get()) for name, a in names.items()}
    plan.run([array.data.ptr for array in other.values()])
    assert_close(other["out"], scale_rows(other["x"].get(), other["scale"].get()))


def test_strides_optional_arrays_and_scalars(cp):
    op = kernels.define(
        "shifted",
        "x: (T, N) float strided, b: (N,) float32 = None, eps: float32 = 0.5, "
        "twice: bool = False -> (T, N) like x",
        reference=lambda x, b, eps, twice: (
            (2 if twice else 1) * (x + (0 if b is None else b) + np.float32(eps))
        ),
        source=f"""
extern "C" __global__ void shifted(const scalar_t* x, int64_t x_stride_0, int x_stride_1,
    const float* b, float eps, bool twice, scalar_t* out, int64_t T, int64_t N) {{
  {INDEX}
  if (i >= T * N) return;
  const float value = to_float(x[i / N * x_stride_0 + i % N * x_stride_1]);
  const float sum = value + (b == nullptr ? 0.0f : b[i % N]) + eps;
  out[i] = from_float<scalar_t>(twice ? 2.0f * sum : sum);
}}""",
        launch=lambda call: call.grid1d(call["T"] * call["N"], 128),
    )
    x, _ = _arguments(cp, shape=(9, 14))
    b = cp.arange(7, dtype=cp.float32)
    for view in (x[::2, ::2], x.T[::2, :9][:, 2:9], x[:, 7:]):
        got = op(view, b[: view.shape[1]], eps=2, twice=True)
        assert_close(got, op(view.get(), b.get()[: view.shape[1]], eps=2, twice=True))
        assert_close(op(view), op(view.get()))


def test_inout_zeroed_and_several_results(cp):
    def reference(x, count):
        count += 1
        return x.sum(axis=0, dtype=np.float64), x.astype(np.int32)

    op = kernels.define(
        "several",
        "x: (T, N) float32, count: (1,) int32 inout -> sums: (N,) float32 zeroed, "
        "whole: (T, N) int32",
        reference=reference,
        source=f"""
extern "C" __global__ void several(const float* x, int* count, float* sums, int* whole, int64_t T,
                                   int64_t N) {{
  {INDEX}
  if (i == 0) *count += 1;
  if (i >= T * N) return;
  atomicAdd(sums + i % N, x[i]);
  whole[i] = int(x[i]);
}}""",
        launch=lambda call: call.grid1d(call["T"] * call["N"], 128),
        reduction="T",
    )
    x = cp.asarray(np.arange(12, dtype=np.float32).reshape(4, 3))
    count = cp.asarray([4], dtype=cp.int32)
    sums, whole = op(x, count)
    assert count.get().tolist() == [5]
    np.testing.assert_array_equal(sums.get(), x.get().sum(0))
    np.testing.assert_array_equal(whole.get(), x.get().astype(np.int32))


def test_scratch_is_shared_by_the_launches(cp):
    op = kernels.define(
        "row_sum",
        "x: (N,) float -> () float32",
        reference=lambda x: x.sum(dtype=np.float64),
        source="""
extern "C" __global__ void partial_sums(const scalar_t* x, float* partial, int64_t N) {
  for (int64_t i = threadIdx.x; i < N; i += 32) atomicAdd(partial + threadIdx.x, to_float(x[i]));
}
extern "C" __global__ void row_sum(const float* partial, float* out) {
  float sum = 0.0f;
  for (int i = 0; i < 32; ++i) sum += partial[i];
  *out = sum;
}""",
        launch=lambda call: [
            call.grid(1, 32, entry="partial_sums", args={"partial": call.scratch(32, zeroed=True)}),
            call.grid(1, 1, args={"partial": call.scratch(32, zeroed=True)}),
        ],
        reduction="N",
    )
    x = cp.asarray(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    for _ in range(3):
        assert_close(op(x), op(x.get()), reduction=1000)


@pytest.mark.parametrize("pdl", [False, True])
def test_pdl_and_clusters(cp, pdl):
    if cp.cuda.runtime.getDeviceProperties(0)["major"] < 9:
        pytest.skip("needs compute capability 9.0")
    op = kernels.define(
        "clustered",
        "x: (N,) float32 -> (N,) float32",
        reference=lambda x: 2 * x + 4,
        source=f"""
#include "common/pdl.cuh"
extern "C" __global__ void clustered(const float* x, float* out, int64_t N) {{
  pdl_trigger();
  pdl_wait();
  uint32_t blocks;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  {INDEX}
  if (i < N) out[i] = 2.0f * x[i] + blocks;
}}""",
        launch=lambda call: call.grid(-(-call["N"] // 1024) * 4, 256, cluster=4, pdl=pdl),
    )
    x = cp.arange(3000, dtype=cp.float32)
    want = x.get()
    for _ in range(5):  # each kernel may start before the one that writes its argument has ended
        x = op(x)
        want = op(want)
    assert_close(x, want)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensor_maps(cp, dtype):
    if cp.cuda.runtime.getDeviceProperties(0)["major"] != 9:
        pytest.skip("needs Hopper")
    op = kernels.define(
        "tma_copy",
        "x: (T, N) float -> (T, N) like x",
        reference=lambda x: x,
        source="""
#include "common/tma.cuh"

extern "C" __global__ void tma_copy(const __grid_constant__ TensorMap tiles, scalar_t* out,
                                    int64_t T, int64_t N) {
  __shared__ alignas(128) scalar_t smem[8 * 16];
  __shared__ uint64_t barrier;
  const int row = blockIdx.y * 8;
  const int col = blockIdx.x * 16;
  if (threadIdx.x == 0) {
    mbarrier_init(smem_address(&barrier), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(smem_address(&barrier), sizeof(smem));
    tma_load_2d(smem_address(smem), &tiles, col, row, smem_address(&barrier));
  }
  __syncthreads();
  mbarrier_wait(smem_address(&barrier), 0);
  for (int i = threadIdx.x; i < 128; i += blockDim.x) {
    const int64_t t = row + i / 16;
    const int64_t n = col + i % 16;
    if (t < T && n < N) out[t * N + n] = smem[i];
  }
}""",
        launch=lambda call: call.grid(
            (-(-call["N"] // 16), -(-call["T"] // 8)),
            32,
            args={"tiles": call.tensor_map("x", (8, 16), swizzle=0)},
        ),
        where="N % 8 == 0",
        requires="sm_90a",
        alignment=16,
    )
    x, _ = _arguments(cp, dtype, (21, 40))
    np.testing.assert_array_equal(op(x).get(), x.get())


def test_a_launch_that_the_gpu_refuses_is_told(cp):
    op = kernels.define(
        "greedy",
        "x: (N,) float32 -> (N,) float32",
        reference=lambda x: x,
        source="""
extern "C" __global__ void greedy(const float* x, float* out) {
  float v[100];
#pragma unroll
  for (int k = 0; k < 100; ++k) v[k] = x[k];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 100; ++k) sum += v[k];
#pragma unroll
  for (int k = 0; k < 100; ++k) out[threadIdx.x * 100 + k] = sum / v[k];
}""",
        launch=lambda call: call.grid(1, 1024),
    )
    with pytest.raises(errors.DeviceError) as caught:
        op(cp.zeros(100, cp.float32))
    assert "1024 threads of" in str(caught.value) and "registers need" in str(caught.value)


def test_arrays_of_another_device(cp):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cp.cuda.Device(1):
        x, scale = _arguments(cp)
    got = scale_rows(x, scale)
    assert got.device.id == 1
    assert_close(got, scale_rows(x.get(), scale.get()))
    with pytest.raises(errors.ContractError, match="is on cuda:0, but x is on cuda:1"):
        scale_rows(x, cp.ones(5, cp.float32))


def test_a_saved_source_is_compiled_anew(cp, tmp_path):
    path = tmp_path / "f.cu"
    text = 'extern "C" __global__ void f(const float* x, float* out) {{ out[0] = {} * x[0]; }}'
    path.write_text(text.format(2))
    op = kernels.define(
        "f",
        "x: (1,) float32 -> (1,) float32",
        reference=lambda x: x,
        source=path,
        launch=lambda call: call.grid(1, 1),
    )
    x = cp.ones(1, cp.float32)
    assert op(x).get().tolist() == [2]
    path.write_text(text.format(3) + "\n")
    assert op(x).get().tolist() == [3]


# `kernels.check` on the device.


@pytest.mark.parametrize("isolate", [True, False])
def test_check_finds_nothing_in_a_right_kernel(cp, isolate):
    report = kernels.check(scale_rows, isolate=isolate, special=True, show=False)
    assert report.ok, str(report)
    assert not report.warnings, str(report)
    assert report.num_calls > 60 and report.device


def test_check_of_an_op_with_everything(cp):
    op = kernels.define(
        "gathered",
        "x: (V, N) float strided, ids: (T,) int32|int64, b: (N,) like x = None, "
        "scale: float32 = 1.0 -> (T, N) like x",
        reference=lambda x, ids, b, scale: (x[ids] + (0 if b is None else b)) * np.float32(scale),
        source=f"""
extern "C" __global__ void gathered(const scalar_t* x, int64_t x_stride_0, int64_t x_stride_1,
    const ids_t* ids, const scalar_t* b, float scale, scalar_t* out, int64_t T, int64_t N) {{
  {INDEX}
  if (i >= T * N) return;
  const int64_t n = i % N;
  const float value = to_float(x[ids[i / N] * x_stride_0 + n * x_stride_1]);
  out[i] = from_float<scalar_t>((value + (b ? to_float(b[n]) : 0.0f)) * scale);
}}""",
        launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
        where="V > 0",
        inputs={"ids": lambda rng, call: rng.integers(0, call["V"], call["T"])},
    )
    report = kernels.check(op, show=False)
    assert report.ok, str(report)


def test_a_crash_in_a_check_leaves_this_process_usable(cp):
    op = kernels.define(
        "wild",
        "x: (N,) float32 -> (N,) float32",
        reference=lambda x: x,
        source='extern "C" __global__ void wild(float* out) { out[1ll << 40] = 1; }',
        launch=lambda call: call.grid(1, 1),
    )
    report = kernels.check(op, show=False)
    assert "illegal memory access in wild" in str(report)
    assert_close(scale_rows(*_arguments(cp)), scale_rows(*_arguments(np)))
