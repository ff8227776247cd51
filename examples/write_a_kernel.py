# %% [markdown]
# # Write and check your own kernel
#
# An op consists of a formula in NumPy (the mirror), the same formula in CUDA C, a public function
# that checks its arguments and dispatches to either, a test and a benchmark: five files named
# alike. This notebook writes a small one, `scale_rows`: y[t, :] = x[t, :] * s[t].

# %% [markdown]
# ## 1. The mirror is the specification
#
# Compute in float32 and round once at the end, exactly as the kernel will.

# %%
import tempfile
from pathlib import Path

import numpy as np

from engine.errors import ShapeError
from engine.kernels import _module
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec, compile_module
from engine.testing import cases
from engine.testing.tolerances import assert_close


def scale_rows_mirror(x, scale):
    return (x.astype(np.float32) * scale[:, None]).astype(x.dtype)


# %% [markdown]
# ## 2. The kernel
#
# `scalar_t` is the dtype that the file is compiled for. One thread per element; offsets are 64-bit,
# because a row index times a row length soon exceeds 2^31.

# %%
SOURCE = r"""
// y[t, i] = x[t, i] * scale[t]; x, y (T, N) scalar_t, scale (T,) float.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256, 4)
scale_rows_kernel(const scalar_t* __restrict__ x, const float* __restrict__ scale,
                  scalar_t* __restrict__ y, int64_t size, int n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < size) y[i] = from_float<scalar_t>(to_float(x[i]) * scale[i / n]);
}
"""

# %% [markdown]
# ## 3. The public function
#
# The contract is checked here, once; all later code relies on sizes and dtypes. `Kernel` casts each
# argument to its parameter's C type, since CuPy would pass Python ints as `long long`.

# %%
KERNEL = Kernel("scale_rows_kernel", "x:ptr scale:ptr y:ptr size:i64 n:i32")


def scale_rows(x, scale, *, out=None):
    call = Contract("scale_rows")
    x = call.array("x", x, "T N", FLOATS)
    scale = call.array("scale", scale, "T", FLOAT32)
    if call.on_cpu:
        return call.finish(out, scale_rows_mirror(x, scale))
    out = call.output("out", out, x.shape, x.dtype)
    spec = ModuleSpec("scale_rows.cu", str(x.dtype))
    grid = (ceil_div(x.size, 256),)
    KERNEL.launch(spec, grid, (256,), x=x, scale=scale, y=out, size=x.size, n=call["N"])
    return out


x = cases.normal((4, 6), "float32", seed=0)
print(scale_rows(x, np.array([1, 2, 3, 4], np.float32)))

# %% [markdown]
# The error for a wrong shape names the argument and both sizes.

# %%
try:
    scale_rows(x, np.ones(3, np.float32))
except ShapeError as error:
    print(error)

# %% [markdown]
# ## 4. Compile it: no GPU needed
#
# In the repository the file lives in `cuda_src/`, where the loader finds it. Here we write it to a
# temporary folder, next to links to the shared headers. NVRTC reports the register count; spilled
# bytes should be 0.

# %%
folder = Path(tempfile.mkdtemp())
(folder / "common").symlink_to(_module.source_dir() / "common")
(folder / "scale_rows.cu").write_text(SOURCE)
original_dir, _module.source_dir = _module.source_dir, lambda: folder
try:
    for dtype in ("float32", "float16", "bfloat16"):
        entry = compile_module(ModuleSpec("scale_rows.cu", dtype), "sm_90a").entries[0]
        print(f"{dtype:9} {entry.registers} registers, {entry.spill_bytes} bytes spilled")
finally:
    _module.source_dir = original_dir

# %% [markdown]
# ## 5. The test: one body, two array modules
#
# In the repository `xp` is a fixture: NumPy, plus CuPy on machines with a GPU. The mirror itself is
# checked against something simpler: here, a float64 loop.


# %%
def check(xp, dtype):
    x = cases.normal((5, 63), dtype, seed=1)  # 63: not a multiple of any vector width
    scale = cases.normal((5,), "float32", seed=2)
    got = scale_rows(*cases.to_module(xp, x, scale))
    assert_close(got, scale_rows_mirror(x, scale))


for dtype in cases.DTYPES:
    check(np, dtype)

x = cases.normal((3, 7), "float32", seed=3)
scale = cases.normal((3,), "float32", seed=4)
want = [[float(value) * float(s) for value in row] for row, s in zip(x, scale, strict=True)]
np.testing.assert_allclose(scale_rows_mirror(x, scale), want, rtol=1e-6)
print("checked")
