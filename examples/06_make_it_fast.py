# %% [markdown]
# # 6. Make it fast
#
# Install, in a checkout of the engine: `pip install '.[cuda12,examples]'`. On a machine without a
# GPU the chapter compiles every kernel and shows figures that an H100 recorded.
#
# One product, five times: `out = a @ b.T`, 16-bit numbers in, sums in float32. Between the first
# version and the last lies a factor of several hundred. Each version removes one limit of the one
# before, and before each measurement we predict it from two numbers: **bytes over bandwidth** and
# **operations over rate**. Where prediction and measurement disagree, there is something to learn.

# %%
import datetime
import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from engine import kernels
from engine.device import cupy, resolve_device, to_numpy
from engine.dtypes import np_dtype
from engine.errors import DeviceError
from engine.testing.timing import time_gpu
from engine.testing.tolerances import assert_close

here = Path(__file__).parent if "__file__" in globals() else Path.cwd()
has_gpu = resolve_device("auto")[0].is_cuda
xp = cupy() if has_gpu else np

M = N = K = 4096
FLOPS = 2 * M * N * K  # operations: a multiplication and an addition for each m, n and k

# %% [markdown]
# ## What the chip can do
#
# An H100 has 132 multiprocessors (SMs). Per clock, an SM
#
# - moves 128 bytes from L1 or shared memory to its registers,
# - does 128 float32 multiply-adds on its CUDA cores,
# - does 2048 16-bit multiply-adds on its tensor cores.
#
# At 1.83 GHz that is 30.9 TB/s, 62 TFLOP/s and 989 TFLOP/s. HBM moves 3.35 TB/s: for the 100 MB of
# these matrices, 30 µs. So HBM is not what limits this product. The way from L1 or shared memory to
# the registers is: how many bytes does a version move there **per multiply-add**?

# %%
SMS, CLOCK = 132, 1.83e9
LOADS = SMS * 128 * CLOCK  # bytes/s
CUDA_CORES = SMS * 128 * 2 * CLOCK  # operations/s
TENSOR_CORES = SMS * 2048 * 2 * CLOCK

products = {}
predictions = {}  # TFLOP/s


def predict(name, bytes_per_multiply_add, rate):
    loads = FLOPS / 2 * bytes_per_multiply_add / LOADS
    operations = FLOPS / rate
    limit = "loads" if loads > operations else "operations"
    predictions[name] = FLOPS / max(loads, operations) / 1e12
    print(f"{name}: loads {loads * 1e3:.3f} ms, operations {operations * 1e3:.3f} ms")
    print(f"limited by {limit}: at most {predictions[name]:.1f} TFLOP/s")


# %% [markdown]
# ## The definition
#
# All five share signature, formula and count of operations. What differs is the CUDA source, the
# launch, and the sizes that a version accepts (`where`).


# %%
def define(version, launch, **options):
    products[version] = kernels.define(
        name=f"product_{version}",
        signature="a: (M, K) float16|bfloat16, b: (N, K) like a -> (M, N) like a",
        reference=lambda a, b: a @ b.T,
        source=f"make_it_fast/product_{version}.cu",
        launch=launch,
        reduction="K",
        flops="2*M*N*K",
        **options,
    )
    print(products[version].source.current().text)


def blocks(size, tile):
    return -(-size // tile)


# %% [markdown]
# ## 1. Naive: one thread per output
#
# Each thread walks a row of `a` and a row of `b`. The cache delivers sectors of 32 bytes. A warp of
# 2 x 16 threads touches 2 rows of `a` and 16 rows of `b`: 18 sectors, 576 bytes, for 32
# multiply-adds. Of every sector of `b` it uses 2 bytes.

# %%
define(
    "naive",
    lambda call: call.grid((blocks(call["N"], 16), blocks(call["M"], 16)), (16, 16)),
)
predict("naive", 18 * 32 / 32, CUDA_CORES)

# %% [markdown]
# ## 2. Vectorised: whole lines, 16 bytes a thread
#
# A warp computes one output. Its lanes share the sum: together they load 512 consecutive bytes of a
# row of `a` and of a row of `b`, every byte of which is used, with an eighth of the instructions.
# 4 bytes per multiply-add remain: one number of `a`, one of `b`.
#
# Expect less than predicted: a thread converts 16 numbers to float32 for 8 multiply-adds, and those
# conversions compete for the same issue slots.

# %%
define(
    "vectorised",
    lambda call: call.grid((blocks(call["N"], 4), blocks(call["M"], 4)), 512),
    where="K % 8 == 0",
    alignment=16,
)
predict("vectorised", 4, CUDA_CORES)

# %% [markdown]
# ## 3. Tiled: every loaded number is used many times
#
# The cure is reuse. A block copies 128 rows of `a` and of `b` to shared memory; a thread loads 8
# numbers of each from there to registers and does 64 multiply-adds with them. Lanes that load the
# same address share one access, so a warp moves 512 bytes for 2048 multiply-adds: a quarter of a
# byte each. Loads are no longer the limit: the CUDA cores are.

# %%
define(
    "tiled",
    lambda call: call.grid((blocks(call["N"], 128), blocks(call["M"], 128)), 256),
    where="K % 8 == 0",
    alignment=16,
)
predict("tiled", 512 / 2048, CUDA_CORES)

# %% [markdown]
# ## 4. Tensor cores: `mma.sync`, fed by a ring of asynchronous copies
#
# A tensor core multiplies 16 x 16 by 16 x 8 numbers at once, 16 times faster than the CUDA cores.
# Now data must arrive 16 times faster, too:
#
# - `cp.async` copies from global to shared memory without passing through registers. A ring of
#   stages keeps several tiles on their way.
# - `ldmatrix` loads fragments in the layout that `mma.sync` wants. The swizzle
#   (`common/swizzle.cuh`) spares it bank conflicts.
# - A warp computes 64 x 64 outputs: for 16 values of k it loads 4 KB and does 65,536 multiply-adds.
#   The copies into shared memory add 48 KB per 128 x 256 x 64 of them.
#
# The ring has as many stages as fit: four on a Hopper, two on a consumer card.

# %%
MMA_STAGE = (128 + 256) * 128  # bytes: rows of a and b, 64 values of k


def launch_mma(call):
    stages = min(4, call.max_shared_bytes // MMA_STAGE)
    grid = blocks(call["M"], 128), blocks(call["N"], 256)
    return call.grid(grid, 256, shared=stages * MMA_STAGE, defines={"STAGES": stages})


define("mma", launch_mma, where="K % 8 == 0, N % 2 == 0", alignment=16)
predict("mma", 4096 / (64 * 64 * 16) + MMA_STAGE / (128 * 256 * 64), TENSOR_CORES)

# %% [markdown]
# Expect less: Hopper's tensor cores run at full rate only with the instruction of version 5;
# `mma.sync` reaches between 60 and 65 % of it.
#
# ## 5. TMA and wgmma: the hardware does the walking
#
# Hopper multiplies straight from shared memory. What the warps of version 4 spent instructions on
# (addresses, copies, fragments) is now done by hardware:
#
# - **TMA**: one thread starts the copy of a whole box of a matrix, swizzled, clipped at the edges.
#   The kernel gets a *tensor map*, which `call.tensor_map` describes.
# - **wgmma**: four warps together multiply 64 x 256 outputs, 16 values of k at a time.
# - **mbarriers** instead of `__syncthreads()`: a producer thread runs ahead as far as the ring
#   allows, while two warpgroups of consumers multiply.
# - A **cluster** of two blocks shares the rows of `b`: each loads half and multicasts it to both.

# %%
TMA_SHARED = 4 * MMA_STAGE + 8 * 2 * 2048 + 2 * 4 * 8 + 1024  # ring, staging, mbarriers, alignment


def launch_tma(call):
    tiles = blocks(call["M"], 2 * 128) * blocks(call["N"], 256)  # of a cluster
    maps = {
        "map_a": call.tensor_map("a", (128, 64)),
        "map_b": call.tensor_map("b", (128, 64)),
        "map_out": call.tensor_map("out", (16, 64)),
    }
    grid = 2 * min(tiles, call.sm_count // 2)
    return call.grid(grid, 384, shared=TMA_SHARED, cluster=2, args=maps)


define("tma", launch_tma, requires="sm_90a", where="K % 8 == 0, N % 8 == 0", alignment=16)
operands = (64 + 256) * 16 * 2 / (64 * 256 * 16)  # wgmma reads both from shared memory
predict("tma", operands + MMA_STAGE / (128 * 256 * 64), TENSOR_CORES)

# %% [markdown]
# ## Are they right?
#
# Against float64, on sizes that no tile divides. NumPy arrays run the reference; on a GPU each
# version runs as far as its chip allows. Results are written over NaN, so an output that a kernel
# forgets cannot pass.

# %%
rng = np.random.default_rng(0)


def random(shape, dtype="bfloat16"):
    return xp.asarray(rng.standard_normal(shape, np.float32)).astype(np_dtype(dtype))


def check(op, dtype, m=300, n=520, k=328):
    a, b = random((m, k), dtype), random((n, k), dtype)
    out = xp.full((m, n), np.nan, np.float32).astype(np_dtype(dtype))
    op(a, b, out=out)
    want = to_numpy(a).astype(np.float64) @ to_numpy(b).astype(np.float64).T
    assert_close(to_numpy(out), want.astype(np_dtype(dtype)), reduction=k)
    print(f"{op.name}, {dtype}: right")


for op in products.values():
    try:
        check(op, "float16")
        check(op, "bfloat16")
    except DeviceError as error:  # another chip
        print(error)

# %% [markdown]
# ## What the compiler made of them
#
# No GPU is needed to see registers, spills and shared memory. The sums of version 4 (128 registers)
# and its fragments (64) just fit into the 255 registers a thread may have.

# %%
for version, op in products.items():
    problem = op.example_problem({"M": M, "N": N, "K": K}, "bfloat16", arch="sm_90a")
    [entry] = op.compile(problem)[0].entries
    [launch] = op.launches(problem)
    print(
        f"{version:10} {entry.registers:3} registers, {entry.spill_bytes} bytes spilled, "
        f"{(entry.shared_bytes + launch.shared) / 1024:5.1f} KB of shared memory, "
        f"{launch.num_threads} threads"
    )

# %% [markdown]
# ## Measure
#
# Medians of graph replays. The operands rotate, so that L2 does not hold them from one call to the
# next. Beside our five: cuBLAS, and the engine's own `kernels.gemm`, which is version 5 with tiles
# chosen by size and a fused epilogue.


# %%
def measure():
    calls = {op.name: op for op in products.values()}
    calls |= {"cuBLAS": lambda a, b: a @ b.T, "kernels.gemm": kernels.gemm}
    operands = [(random((M, K)), random((N, K))) for _ in range(3)]
    times = {name: [] for name in calls}
    for _ in range(5):  # rounds: a card that heats up slows all of them
        for name, call in calls.items():
            work = [lambda call=call, pair=pair: call(*pair) for pair in operands]
            try:
                times[name].append(time_gpu(work, replays=3, min_launches=3))
            except DeviceError as error:
                print(error)
    return {name: statistics.median(found) for name, found in times.items() if found}


if has_gpu:
    record = {
        "card": xp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "date": str(datetime.date.today()),
        "commit": "",
        "command": "python examples/06_make_it_fast.py",
        "dtype": "bfloat16",
        "rows": [
            {
                "name": name,
                "us": round(seconds * 1e6, 1),
                "tflops": round(FLOPS / seconds / 1e12, 2),
                "predicted": round(predictions.get(name.removeprefix("product_"), 0.0), 1) or None,
            }
            for name, seconds in measure().items()
        ],
    }
    Path("make_it_fast.json").write_text(json.dumps(record, indent=1) + "\n")
else:
    recorded = here / "../docs/benchmarks/make_it_fast.json"
    record = json.loads(recorded.read_text()) if recorded.exists() else None

rows = record["rows"] if record else []
measured = {row["name"].removeprefix("product_"): row["tflops"] for row in rows}
if record:
    print(f"{record['card']}, {record['date']}, bfloat16, {M} x {N} x {K}")
for row in rows:
    predicted = f"predicted {row['predicted']:6.1f}" if row["predicted"] else ""
    print(f"{row['name']:20} {row['us']:9.1f} us {row['tflops']:7.1f} TFLOP/s  {predicted}")

# %%
names = list(dict.fromkeys([*predictions, *measured]))
places = np.arange(len(names))
figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
for shift, rates, label in ((-0.2, predictions, "at most"), (0.2, measured, "measured")):
    if rates:
        axis.bar(places + shift, [rates.get(name, np.nan) for name in names], 0.4, label=label)
axis.set_xticks(places, names)
axis.set(yscale="log", ylabel="TFLOP/s", title=record["card"] if record else "H100, predicted")
axis.legend()
figure.savefig("make_it_fast.png", dpi=80)

# %% [markdown]
# ## Exercises
#
# 1. Give version 1 blocks of 32 x 8 threads, so that a warp has one row of `a` and 32 rows of `b`.
#    Predict first: how many sectors does a warp touch now?
# 2. Take the swizzle out of version 4 (the same code, rows as they are). Which prediction of this
#    chapter would have told you the result?
# 3. Build version 5 with a ring of two stages instead of four. From which K on does it matter?
#
# **Next:** [7. Your kernel in the model](07_kernel_in_the_model.py).
