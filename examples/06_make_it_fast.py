# %% [markdown]
# # 6. Make it fast
#
# Install, in a checkout of the engine: `pip install '.[cuda12,examples]'`. On a machine without a
# GPU the chapter compiles every kernel and shows figures that an H100 recorded.
#
# One product, five times: `out = a @ b.T`, 16-bit numbers in, sums in float32. Between the first
# version and the last lies a factor of several hundred. Each version removes one limit of the one
# before, and before each measurement we predict it from two numbers: **bytes over bandwidth** and
# **operations over rate**. Where prediction and measurement disagree, there is something to learn:
# the second half of the chapter looks for it, with one experiment for each version.

# %%
import datetime
import json
import os
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from engine import kernels
from engine.device import cupy, resolve_device, to_numpy
from engine.dtypes import np_dtype
from engine.errors import DeviceError
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
def product(version, launch, **options):
    return kernels.define(
        name=f"product_{version}",
        signature="a: (M, K) float16|bfloat16, b: (N, K) like a -> (M, N) like a",
        reference=lambda a, b: a @ b.T,
        source=f"make_it_fast/product_{version}.cu",
        launch=launch,
        reduction="K",
        flops="2*M*N*K",
        **options,
    )


def define(version, launch, **options):
    products[version] = product(version, launch, **options)
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
def launch_naive(call, columns=16):
    rows = 256 // columns
    grid = blocks(call["N"], columns), blocks(call["M"], rows)
    return call.grid(grid, (columns, rows))


define("naive", launch_naive)
predict("naive", 18 * 32 / 32, CUDA_CORES)

# %% [markdown]
# ## 2. Vectorised: whole lines, 16 bytes a thread
#
# A warp computes one output. Its lanes share the sum: together they load 512 consecutive bytes of a
# row of `a` and of a row of `b`, every byte of which is used, with an eighth of the instructions.
# 4 bytes per multiply-add remain: one number of `a`, one of `b`.


# %%
def launch_vectorised(call, columns=4):
    grid = blocks(call["N"], columns), blocks(call["M"], 4)
    return call.grid(grid, columns * 4 * 32)


ROWS_OF_16_BYTES = {"where": "K % 8 == 0", "alignment": 16}
define("vectorised", launch_vectorised, **ROWS_OF_16_BYTES)
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
    **ROWS_OF_16_BYTES,
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


def launch_mma(call, stages=4):
    stages = min(stages, call.max_shared_bytes // MMA_STAGE)
    grid = blocks(call["M"], 128), blocks(call["N"], 256)
    return call.grid(grid, 256, shared=stages * MMA_STAGE, defines={"STAGES": stages})


PAIRS_OF_COLUMNS = {"where": "K % 8 == 0, N % 2 == 0", "alignment": 16}
define("mma", launch_mma, **PAIRS_OF_COLUMNS)
predict("mma", 4096 / (64 * 64 * 16) + MMA_STAGE / (128 * 256 * 64), TENSOR_CORES)

# %% [markdown]
# ## 5. TMA and wgmma: the hardware does the walking
#
# Hopper has an instruction of its own that multiplies straight from shared memory. What the warps
# of version 4 spent instructions on (addresses, copies, fragments) is now done by hardware:
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


TMA = {"requires": "sm_90a", "where": "K % 8 == 0, N % 8 == 0", "alignment": 16}
define("tma", launch_tma, **TMA)
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
# `kernels.bench` verifies a result, then times replays of a CUDA graph. Operands rotate, so that L2
# does not hold them from one call to the next. Beside our last version it times cuBLAS, which CuPy
# does not allow in a graph (launched call after call, it takes the same at this size), and the
# engine's own `kernels.gemm`: version 5 with tiles chosen by size and a fused epilogue.

# %%
SIZES = {"M": M, "N": N, "K": K}
rows = []  # of the record


def measure(name, op, sizes=None, **against):
    try:
        report = kernels.bench(op, sizes, "bfloat16", against=against)
    except DeviceError as error:  # another chip
        print(error)
        return
    print(report)
    assert report.ok
    found = report.rows[0].measured
    for each, timing in {name: found.timing, **found.rivals}.items():
        if each != "cupy" and not isinstance(timing, str):
            rate = found.case.flops / timing.median / 1e12
            row = {"name": each, "us": round(timing.median * 1e6, 1), "tflops": round(rate, 2)}
            rows.append(row | ({"timed": "without a graph"} if timing.has_launches else {}))


if has_gpu:
    for version in ("naive", "vectorised", "tiled", "mma"):
        measure(version, products[version], SIZES)
    libraries = {"cuBLAS": lambda a, b: a @ b.T, "kernels.gemm": kernels.gemm}
    measure("tma", products["tma"], SIZES, **libraries)

# %% [markdown]
# ## Where prediction and measurement disagree
#
# No version reaches its prediction. On an H100 the five ran at 0.9, 11, 45, 411 and 753 TFLOP/s. A
# reason is worth having only if it predicts something else, too. So each comes with an experiment:
# the same source with another launch, or with other numbers.
#
# **Naive: lines, not bytes.** 0.9 is a quarter of 3.4. We counted sectors of 32 bytes; but perhaps
# L1 looks up one line of 128 bytes per clock, however little of it a warp wants. A warp of 2 x 16
# threads touches 18 lines, which is 18 clocks for 32 multiply-adds: 0.86 TFLOP/s. If that is the
# reason, a warp of 4 x 8 threads, which touches 12 lines, runs at 1.3. If bytes are, at 5.2. It ran
# at 1.4: it is the lines.

# %%
experiments = {}


def experiment(name, version, launch, **options):
    experiments[name] = product(version, launch, **options)


predict("naive, by lines", 18 * 128 / 32, CUDA_CORES)
experiment("naive, warps of 4 x 8", "naive", partial(launch_naive, columns=8))
predict("naive, warps of 4 x 8", 12 * 128 / 32, CUDA_CORES)

# %% [markdown]
# **Vectorised: instructions, or L2?** The inner loop has 143 instructions (`cuobjdump -sass` prints
# them): 32 multiply-adds and 8 loads, and most of the rest converts 16-bit numbers to float32. An
# SM issues four instructions per clock, which allows 13.8 TFLOP/s; we saw 11. The other suspect is
# L2: the 4 x 4 outputs of a block need 8 rows, which for all blocks is 69 GB, or 5.4 TB/s at the
# measured speed. With 4 x 8 outputs a block it is a quarter less. If L2 is the limit, that version
# is faster; if instructions are, it is not. It was not: both ran at 10.8, so L2 is not the limit.

# %%
ISSUE = SMS * CLOCK * 4 * 32 * 2  # operations/s, if every instruction were a multiply-add
predictions["vectorised, by instructions"] = ISSUE * 32 / 143 / 1e12
experiment(
    "vectorised, 4 x 8 outputs a block",
    "vectorised",
    partial(launch_vectorised, columns=8),
    **ROWS_OF_16_BYTES,
)

# %% [markdown]
# **Tiled: the other instructions.** Of the 1160 instructions of its loop 1024 are multiply-adds,
# which allows 54.6 TFLOP/s; we saw 45. The rest must be waiting: with 128 registers a thread, a
# scheduler has only four warps to choose from, and a block's warps meet at a barrier every 16
# values of k. `kernels.profile` shows where, if Nsight Compute is installed.

# %%
predictions["tiled, by instructions"] = ISSUE * 1024 / 1160 / 1e12

# %% [markdown]
# **mma: copies, or the instruction?** 411 of 720. Copies may come too late: then a ring of three
# stages is slower than one of four, and one of two much slower. Or `mma.sync` does not reach the
# rate of the data sheet, which is that of Hopper's own instruction. `mma_only` measures it: as many
# warps as version 4, with operands that never leave their registers. Three stages reached 404, two
# 322: with four, the copies come in time. And `mma_only` reached 647, two thirds of the data sheet,
# with operands that draw little power: what is above belongs to `wgmma`. The way from 411 to 647 is
# not explained yet; `kernels.profile` is where to begin.

# %%
for stages in (2, 3):
    launch = partial(launch_mma, stages=stages)
    experiment(f"mma, {stages} stages", "mma", launch, **PAIRS_OF_COLUMNS)

ROUNDS, SUMS, WARPS = 2048, 16, 8  # independent sums of a warp; warps of a block
mma_only = kernels.define(
    name="mma_only",
    signature="a: (16, 16) float16|bfloat16, b: (8, 16) like a, rounds: int32 -> (16, 8) float32",
    reference=lambda a, b, rounds: SUMS * rounds * (a @ b.T),
    source="make_it_fast/mma_only.cu",
    launch=lambda call: call.grid(SMS, WARPS * 32),
    alignment=16,
    flops=2 * 16 * 8 * 16 * SUMS * ROUNDS * WARPS * SMS,
    inputs={
        "a": lambda rng, call: rng.integers(-1, 2, (16, 16)),
        "b": lambda rng, call: rng.integers(-1, 2, (8, 16)),
        "rounds": lambda rng, call: ROUNDS,
    },
)

# %% [markdown]
# **TMA and wgmma: power.** 753 of 989, where cuBLAS ran at 687 and `kernels.gemm` at 700. Switching
# transistors costs energy, and a chip at its power limit lowers its clock. Zeros switch few: if
# power is the limit, the same kernel is faster on matrices of zeros. It ran at 849, so power is a
# part of the answer; the rest, 849 to 989, is not.


# %%
def zeros(rng, call):
    return np.zeros((call["M"], call["K"]))  # M = N


experiment("tma, zeros", "tma", launch_tma, **TMA, inputs={"a": zeros, "b": zeros})
if has_gpu:
    for name, op in experiments.items():
        measure(name, op, SIZES)
    measure("mma.sync alone", mma_only)

# %% [markdown]
# ## Predicted and measured
#
# On a machine without a GPU, this shows what an H100 recorded.

# %%
recorded = here / "../docs/benchmarks/make_it_fast.json"
record = json.loads(recorded.read_text()) if recorded.exists() else {"card": "", "rows": []}
if has_gpu:
    for row in rows:
        if row["name"] in predictions:
            row["predicted"] = round(predictions[row["name"]], 2)
    record = {
        "card": xp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "date": str(datetime.date.today()),
        "commit": os.environ.get("ENGINE_COMMIT", "unknown"),
        "command": "python examples/06_make_it_fast.py",
        "what": f"TFLOP/s of a b^T, bfloat16, {M} x {N} x {K}",
        "rows": rows,
    }
    Path("make_it_fast.json").write_text(json.dumps(record, indent=1) + "\n")

measured = {row["name"]: row["tflops"] for row in record["rows"]}
title = f"{record['card']}, {record['date']}" if measured else "H100, predicted"
print(title)
for name in dict.fromkeys([*predictions, *measured]):
    rates = (
        f"{found[name]:6.1f}" if name in found else " " * 6 for found in (predictions, measured)
    )
    print("{:34} predicted {}   measured {} TFLOP/s".format(name, *rates))

# %%
names = [*products, *(name for name in ("cuBLAS", "kernels.gemm") if name in measured)]
places = np.arange(len(names))
figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
for shift, rates, label in ((-0.2, predictions, "predicted"), (0.2, measured, "measured")):
    if rates:
        axis.bar(places + shift, [rates.get(name, np.nan) for name in names], 0.4, label=label)
axis.set_xticks(places, names)
axis.set(yscale="log", ylabel="TFLOP/s", title=title)
axis.legend()
figure.savefig("make_it_fast.png", dpi=80)

# %% [markdown]
# ## Exercises
#
# 1. If lines are the limit of version 1, how fast is it with `columns=32`, with 4, and with 2?
#    Predict, then measure.
# 2. Take the swizzle out of version 4 (the same code, rows as they are). Which prediction of this
#    chapter would have told you the result?
# 3. Version 5 orders its tiles in bands (`kBand`) and its blocks in clusters (`kCluster`) for the
#    sake of L2. Take each away, for matrices of 4096 and of 8192. Where does it matter, and why?
# 4. Set `M = N = K = 8192` and predict: which versions change their rate?
#
# **Next:** [7. Your kernel in the model](07_kernel_in_the_model.py).
