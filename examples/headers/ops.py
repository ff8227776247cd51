"""A small op for each CUDA header that kernels may include; docs/headers.md shows the sources.

Check them all with `engine kernels check examples/headers/ops.py`.
"""

import numpy as np

from engine import kernels


def blocks(size, tile):
    return -(-size // tile)


def softmax_rows(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def per_row(call, threads=128):
    return call.grid(call["T"], threads)


def row_in_shared_memory(call):
    return call.grid(call["T"], 128, shared=call["N"] * call.itemsize)


def launch_multiply_add(call):
    elements = 16 // call.itemsize  # per vector
    vectors = call["N"] // elements if call.is_aligned else 0
    rest = call["N"] - vectors * elements
    return call.grid1d(vectors + rest, args={"num_vectors": vectors})


def launch_row_sum(call):
    size = 2 if call.chip.has_clusters else 1
    return call.grid(call["T"] * size, 128, cluster=size)


def launch_twice(call):
    maps = {f"map_{name}": call.tensor_map(name, (64, 64), swizzle=0) for name in ("x", "out")}
    return call.grid((blocks(call["N"], 64), blocks(call["M"], 64)), 128, args=maps)


def launch_product_64(call):
    maps = {f"map_{name}": call.tensor_map(name, (64, 64)) for name in ("a", "b")}
    return call.grid((call["N"] // 64, call["M"] // 64), 128, args=maps)


scale = kernels.define(
    "scale",
    "x: (N,) float, factor: float32 = 2.0 -> (N,) like x",
    reference=lambda x, factor: factor * x,
    source="types.cu",
    launch=lambda call: call.grid1d(call["N"] * call.itemsize // 16),
    where="N % 8 == 0",
    alignment=16,
)
add = kernels.define(
    "add",
    "x: (N,) float, y: (N,) like x -> (N,) like x",
    reference=lambda x, y: x + y,
    source="packed.cu",
    launch=lambda call: call.grid1d(call["N"] * call.itemsize // 32 + 1),
    where="N % 8 == 0",
    alignment=16,
)
softmax = kernels.define(
    "softmax",
    "x: (T, N) float -> (T, N) like x",
    reference=softmax_rows,
    source="reduce.cu",
    launch=per_row,
    reduction="N",
)
multiply_add = kernels.define(
    "multiply_add",
    "x: (N,) float, y: (N,) like x, z: (N,) like x -> (N,) like x",
    reference=lambda x, y, z: x * y + z,
    source="elementwise.cu",
    launch=launch_multiply_add,
)
silu_gate = kernels.define(
    "silu_gate",
    "x: (N,) float, y: (N,) like x -> (N,) like x",
    reference=lambda x, y: x / (1 + np.exp(-x)) * y,
    source="activation.cu",
    launch=lambda call: call.grid1d(call["N"]),
)
reverse = kernels.define(
    "reverse",
    "x: (T, N) float -> (T, N) like x",
    reference=lambda x: x[:, ::-1],
    source="cp_async.cu",
    launch=row_in_shared_memory,
    where="N % 8 == 0, N <= 8192",
    alignment=16,
)
reverse_bulk = kernels.define(
    "reverse_bulk",
    "x: (T, N) float -> (T, N) like x",
    reference=lambda x: x[:, ::-1],
    source="mbarrier.cu",
    launch=row_in_shared_memory,
    requires="sm_90",
    where="N % 8 == 0, N <= 8192",
    alignment=16,
)
transpose = kernels.define(
    "transpose",
    "x: (M, N) float16|bfloat16 -> (N, M) like x",
    reference=lambda x: x.T,
    source="swizzle.cu",
    launch=lambda call: call.grid((call["N"] // 64, call["M"] // 64), 256),
    where="M % 64 == 0, N % 64 == 0",
    alignment=16,
)
product_16 = kernels.define(
    "product_16",
    "a: (16, 16) float16|bfloat16, b: (16, 16) like a -> (16, 16) float32",
    reference=lambda a, b: a @ b.T,
    source="mma.cu",
    launch=lambda call: call.grid(1, 32),
    reduction=16,
)
increment = kernels.define(
    "increment",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: x + 1,
    source="pdl.cu",
    launch=lambda call: call.grid1d(call["N"], pdl=True),
)
reverse_halves = kernels.define(
    "reverse_halves",
    "x: (T, 128) float -> (T, 128) like x",
    reference=lambda x: x.reshape(-1, 2, 64)[:, :, ::-1].reshape(x.shape),
    source="named_barrier.cu",
    launch=per_row,
)
row_sum = kernels.define(
    "row_sum",
    "x: (T, N) float -> (T,) float32",
    reference=lambda x: x.sum(-1),
    source="cluster.cu",
    launch=launch_row_sum,
    reduction="N",
)
twice = kernels.define(
    "twice",
    "x: (M, N) float -> (M, N) like x",
    reference=lambda x: 2 * x,
    source="tma.cu",
    launch=launch_twice,
    requires="sm_90",
    where="N % 8 == 0",
    alignment=16,
)
column_sum = kernels.define(
    "column_sum",
    "x: (T, N) float -> (N,) float32",
    reference=lambda x: x.sum(0),
    source="pipeline_state.cu",
    launch=lambda call: call.grid(call["N"] * call.itemsize // 2048, 160),
    requires="sm_90",
    where="N % 1024 == 0",
    alignment=16,
    reduction="T",
)
transpose_16 = kernels.define(
    "transpose_16",
    "x: (16, 16) float16|bfloat16 -> (16, 16) like x",
    reference=lambda x: x.T,
    source="sm90.cu",
    launch=lambda call: call.grid(1, 32),
    requires="sm_90a",
    alignment=16,
)
product_64 = kernels.define(
    "product_64",
    "a: (M, 64) float16|bfloat16, b: (N, 64) like a -> (M, N) float32",
    reference=lambda a, b: a @ b.T,
    source="wgmma.cu",
    launch=launch_product_64,
    requires="sm_90a",
    where="M % 64 == 0, N % 64 == 0",
    alignment=16,
    reduction=64,
)
