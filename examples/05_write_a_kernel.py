# %% [markdown]
# # 5. Write a kernel
#
# Install, in a checkout of the engine: `pip install '.[cuda12,examples]'` (or `cuda13`). Without a
# GPU, kernels are compiled and their formulas run; with one, the kernels run.
#
# An op of your own is four things: a signature, a formula in NumPy, the same formula in CUDA C, and
# a launch. `kernels.define` makes of them what the engine's own ops are: a function on arrays that
# checks its arguments, exists for three dtypes, and can be put into a running model (chapter 7).

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from engine import errors, kernels
from engine.device import cupy, resolve_device, to_numpy
from engine.dtypes import np_dtype

has_gpu = resolve_device("auto")[0].is_cuda
xp = cupy() if has_gpu else np

# %% [markdown]
# ## The formula comes first
#
# Our first op multiplies each row of a matrix by a number. The formula is the specification: short,
# obviously right, in float32. Everything else is compared with it.


# %%
def scale_rows_formula(x, scale):
    return x * scale[:, None]


# %% [markdown]
# ## The kernel
#
# One thread per element. `scalar_t` is the dtype that the source is compiled for: float32, float16
# or bfloat16. `to_float` and `from_float` convert; sums and products happen in float32, and the
# result is rounded once. The index has 64 bits, because a row number times a row length soon
# exceeds 2^31.

# %%
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256)
scale_rows(const scalar_t* x, const float* scale, scalar_t* out, int64_t T, int N) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < T * N) out[i] = from_float<scalar_t>(to_float(x[i]) * scale[i / N]);
}
"""

scale_rows = kernels.define(
    name="scale_rows",
    signature="x: (T, N) float, scale: (T,) float32 -> (T, N) like x",
    reference=scale_rows_formula,
    source=SOURCE,  # or the name of a .cu file, which is read again when it has changed
    launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
)
print(scale_rows)

# %% [markdown]
# The kernel's parameters are found by their names: arrays, the result `out`, sizes such as `T`. So
# their order is yours, and a size may be `int` or `int64_t`.
#
# NumPy arrays run the formula, CuPy arrays the kernel. That makes the first test a line:

# %%
x = np.arange(12, dtype=np.float32).reshape(4, 3)
scale = np.array([1, 10, 100, 1000], np.float32)
y = scale_rows(xp.asarray(x), xp.asarray(scale))  # with a GPU: the kernel
print(to_numpy(y))
np.testing.assert_array_equal(to_numpy(y), x * scale[:, None])

# %% [markdown]
# ## Errors
#
# A wrong call never reaches the GPU; the message names the argument, what it should be, and what it
# was.

# %%
for bad in (
    lambda: scale_rows(x, scale[:3]),
    lambda: scale_rows(x, scale.astype(np.float64)),
    lambda: scale_rows(x),
):
    try:
        bad()
    except errors.EngineError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("a wrong call was accepted")

# %% [markdown]
# ## Compile it: no GPU needed
#
# A *problem* is a call without its arrays: sizes, dtypes, the chip. From it follow the launch, and
# what the compiler makes of the kernel for any architecture. Spilled registers are registers that
# did not fit and live in slow memory: there should be none.

# %%
sizes = {"T": 4096, "N": 4096}
for dtype in ("float32", "float16", "bfloat16"):
    problem = scale_rows.example_problem(sizes, dtype, arch="sm_90a")
    [launch] = scale_rows.launches(problem)
    [entry] = scale_rows.compile(problem)[0].entries
    print(f"{dtype:9} {entry.registers} registers, {entry.spill_bytes} bytes spilled")
    assert entry.spill_bytes == 0
print(launch)

# %% [markdown]
# What is wrong with a source, the compiler says with the line. Here a semicolon is missing; then a
# parameter has a name that nothing provides; then an array is declared with another type than the
# signature's.


# %%
def broken(old, new):
    """Define the op with a mistake in its source, compile it, and print the error."""
    assert old in SOURCE
    op = kernels.define(
        name="scale_rows",
        signature="x: (T, N) float, scale: (T,) float32 -> (T, N) like x",
        reference=scale_rows_formula,
        source=SOURCE.replace(old, new),
        launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
    )
    try:
        op.compile(op.example_problem(sizes, "float16"))
    except errors.EngineError as error:
        print(f"{type(error).__name__}: {error}\n")
    else:
        raise AssertionError("the mistake was not found")


broken("threadIdx.x;", "threadIdx.x")
broken("int64_t T", "int64_t rows")
broken("const float* scale", "const double* scale")

# %% [markdown]
# ## A row per block: softmax
#
# A kernel that computes a row together needs to talk among its threads. `common/reduce.cuh` has
# sums and maxima over a block; `kernels.headers()` lists all headers that a kernel may include
# ([CUDA headers](../docs/headers.md)).

# %%
for header in kernels.headers().values():
    print(f"{header.include:28} {header.requires}")

# %% [markdown]
# The op also takes a number, `temperature`, with a default, and says that its sums have N terms
# (`reduction`), from which the tolerance of its checks follows. Three passes over a row that stays
# in L2: the maximum, the sum, the result.

# %%
SOFTMAX = r"""
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(256)
row_softmax(const scalar_t* x, scalar_t* out, int N, float temperature) {
  __shared__ float smem[8];  // one partial result for each of the 8 warps
  const scalar_t* row = x + static_cast<int64_t>(blockIdx.x) * N;
  scalar_t* result = out + static_cast<int64_t>(blockIdx.x) * N;

  float largest = -INFINITY;
  for (int i = threadIdx.x; i < N; i += 256) largest = fmaxf(largest, to_float(row[i]));
  largest = block_max<8>(largest, smem);

  float sum = 0.0f;
  for (int i = threadIdx.x; i < N; i += 256) {
    sum += expf((to_float(row[i]) - largest) / temperature);
  }
  sum = block_sum<8>(sum, smem);

  for (int i = threadIdx.x; i < N; i += 256) {
    result[i] = from_float<scalar_t>(expf((to_float(row[i]) - largest) / temperature) / sum);
  }
}
"""


def softmax_formula(x, temperature):
    weights = np.exp((x - x.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


row_softmax = kernels.define(
    name="row_softmax",
    signature="x: (T, N) float, temperature: float32 = 1.0 -> (T, N) like x",
    reference=softmax_formula,
    source=SOFTMAX,
    launch=lambda call: call.grid(call["T"], 256),
    where="N >= 1",
    reduction="N",
    flops="8 * T * N",  # two differences, quotients and exponentials; a sum and a quotient
)
rng = np.random.default_rng(0)
x = rng.standard_normal((6, 1000), "float32")
for temperature in (0.5, 1.0, 2.0):
    y = to_numpy(row_softmax(xp.asarray(x), temperature=temperature))
    np.testing.assert_allclose(y.sum(-1), 1.0, rtol=1e-4)
    print(f"temperature {temperature}: largest probability {y.max():.3f}")

# %% [markdown]
# ## Is the formula right?
#
# A kernel that agrees with a wrong formula is wrong. So the formula itself is compared with
# something simpler: a loop in Python, in float64.

# %%
row = x[0].astype(float).tolist()
largest = max(row)
total = sum(np.exp(value - largest) for value in row)
slow = [np.exp(value - largest) / total for value in row]
np.testing.assert_allclose(softmax_formula(x[:1], 1.0)[0], slow, rtol=1e-5)

# %% [markdown]
# ## Check the kernel
#
# `kernels.check` makes shapes from the signature: one row, sizes that divide nothing, empty, views,
# every dtype. On a GPU it runs the kernel in a process of its own, so that a crash does not take
# the notebook along: with results that held garbage before, guard bands around every array, and
# twice, since the bits must be the same. Without a GPU it runs the formula and compiles the kernel
# for every architecture.

# %%
report = kernels.check(row_softmax, show=False)
print(report)
assert report.ok

# %% [markdown]
# Would it find a mistake? A formula that forgets `keepdims` runs on square matrices only, and is
# wrong there:


# %%
def without_keepdims(x, temperature):
    weights = np.exp(x / temperature)
    return weights / weights.sum(-1)


def softmax_with(**changes):
    """Define the op anew, with some of its parts changed."""
    parts = {
        "name": "row_softmax",
        "signature": "x: (T, N) float, temperature: float32 = 1.0 -> (T, N) like x",
        "reference": softmax_formula,
        "source": SOFTMAX,
        "launch": lambda call: call.grid(call["T"], 256),
        "where": "N >= 1",
        "reduction": "N",
    }
    return kernels.define(**(parts | changes))


bad = softmax_with(reference=without_keepdims)
report = kernels.check(bad, quick=True, arch="sm_90a", show=False)
print(report)
assert not report.ok

# %% [markdown]
# And two kernels with a mistake: in one, each warp uses its own sum instead of the block's; one
# writes an element too many. Both compile, so only a GPU can tell.

# %%
mistakes = {
    "the warps keep their sums": ("block_sum<8>", "block_sum<1>"),
    "a write out of bounds": ("i < N; i += 256) {\n    result", "i <= N; i += 256) {\n    result"),
}
for name, (old, new) in mistakes.items():
    assert old in SOFTMAX
    bad = softmax_with(source=SOFTMAX.replace(old, new))
    report = kernels.check(bad, quick=True, arch="sm_90a", show=False)
    print(f"{name}: {report}\n")
    assert report.ok != has_gpu

# %% [markdown]
# From a terminal: `engine kernels check my_op.py`. To see it after each save of the file, run
# `engine kernels check my_op.py --watch` or, in a notebook, `kernels.watch("my_op.py")`.
#
# ## Source in a file
#
# A source that is a file is compiled again when it has changed: edit, and call the op again.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "row_softmax.cu"
    file.write_text(SOFTMAX)
    from_file = softmax_with(source=str(file))
    problem = from_file.example_problem({"T": 8, "N": 1000}, "float16")
    before = from_file.compile(problem)[0].entries[0]

    file.write_text(SOFTMAX.replace("float sum = 0.0f;", "float sum = zero;"))
    try:
        from_file.compile(problem)
    except errors.CompileError as error:
        print(next(line for line in str(error).splitlines() if "error:" in line))
    else:
        raise AssertionError("the old source was compiled")

    file.write_text(SOFTMAX.replace("expf(", "__expf("))  # the fast, less exact exponential
    after = from_file.compile(problem)[0].entries[0]
print(f"registers: {before.registers} with expf, {after.registers} with __expf")

# %% [markdown]
# ## Measure
#
# A kernel that reads and writes each element once cannot be faster than the memory. `kernels.bench`
# counts bytes from the signature, operations from `flops`, and says how close the kernel comes;
# `profile` says how many threads fit on a multiprocessor, and what limits them.

# %%
sizes = {"T": 4096, "N": 4096}
report = kernels.bench(row_softmax, sizes)
print(report)
print(kernels.profile(row_softmax, sizes, counters=False))
assert row_softmax.nbytes(row_softmax.example_problem(sizes, "float16")) == 4096 * 4096 * 2 * 2
if has_gpu:
    report.plot("roofline.png")

# %% [markdown]
# ## How exact can it be?
#
# Sums are float32, and the result is rounded once to its dtype: to 24, 11 or 8 bits. So a float16
# result is wrong by up to 2^-11 of its value, however good the kernel is, and a check may not ask
# for more. We compare with float64, in units of that rounding.

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for dtype, bits in (("float32", 24), ("float16", 11), ("bfloat16", 8)):
    given = x.astype(np_dtype(dtype))
    exact = softmax_formula(given.astype(np.float64), 2.0)
    y = to_numpy(row_softmax(xp.asarray(given), temperature=2.0)).astype(np.float64)
    error = (y - exact) / exact * 2.0**bits
    axis.hist(error.ravel(), bins=80, histtype="step", density=True, label=dtype)
    print(f"{dtype:9} largest relative error {abs(error).max():4.1f} x 2^-{bits}")
    assert abs(error).max() < (16 if dtype == "float32" else 1.1)
axis.set_xlim(-4, 4)
axis.set_xlabel("relative error, in units of the dtype's rounding")
axis.set_yticks([])
axis.legend(frameon=False)
figure.savefig("rounding.png", dpi=80)

# %% [markdown]
# Half-precision results use the whole width of one rounding. In float32 the errors of 1,000
# additions and of `exp` show: a tolerance grows with the length of the sum.
#
# ## Exercises
#
# 1. Write `rows_where`: `x: (T, N) float, ids: (M,) int32 -> (M, N) like x`, the rows of x that ids
#    names. What should the kernel do with an id outside [0, T)?
# 2. `row_softmax` reads its row three times. Keep the running maximum and the rescaled sum in one
#    pass, as in chapter 2, and read it twice. Does the same test pass?
# 3. Break the second `__syncthreads` of a copy of `block_sum` and run `kernels.check` on a GPU.
#    Which of its checks notices a race?
#
# **Next:** [6. Make it fast](06_make_it_fast.py): one product, five times.
