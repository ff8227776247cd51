"""Lower every operator of `engine.integrations.jax` for a GPU that is not there.

Run by test_jax_lowering.py in a process of its own, after `mock_cuda.install`. Prints one line per
prepared call: operator, dtype, bytes of scratch, kernels.
"""

from __future__ import annotations

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np

from engine.integrations import jax as ops
from engine.integrations.jax import _handlers
from engine.kernels import BlockSparse, Periodic
from tests.integrations import test_jax_gpu

PATTERNS = (Periodic(64, 16), BlockSparse(np.tril(np.ones((2, 2), bool)), 128, 128))


def _loss(function):
    def loss(*arrays):
        leaves = jax.tree.leaves(function(*arrays))
        return sum(jnp.sum(y.astype(jnp.float32)) for y in leaves)

    return loss


def _calls(dtype):
    """Yield functions with their arguments."""
    for table in (test_jax_gpu.CASES, test_jax_gpu.GRADIENTS):
        for function, *shapes in table.values():
            arrays = [test_jax_gpu.random(i, *s, dtype=dtype) for i, s in enumerate(shapes)]
            yield function, arrays
            if table is test_jax_gpu.GRADIENTS:
                yield jax.grad(_loss(function), tuple(range(len(arrays)))), arrays
    for activation in (ops.silu, ops.relu, ops.geglu):
        yield jax.value_and_grad(_loss(activation)), [test_jax_gpu.random(0, 4, 128, dtype=dtype)]
    for rows in (4, 400):
        x = test_jax_gpu.random(0, rows, 128, dtype=dtype)
        yield ops.linear_fp8, [x, jnp.ones((256, 128), jnp.uint8), jnp.ones((2, 1))]
        yield ops.linear_int8, [x, jnp.ones((256, 128), jnp.int8), jnp.ones(256)]
        target = jnp.zeros(rows, int)
        loss = lambda x, w, target=target: ops.linear_cross_entropy(x, w, target)  # noqa: E731
        weight = test_jax_gpu.random(1, 512, 128, dtype=dtype)
        yield loss, [x, weight]
        yield jax.grad(loss, (0, 1)), [x, weight]
    q = test_jax_gpu.random(0, 8, 8, 128, dtype=dtype)
    pages = test_jax_gpu.random(1, 4, 2, 16, 128, dtype=dtype)
    tables, lens, starts = jnp.array([[3, 1], [0, 2]]), jnp.array([20, 20]), jnp.array([0, 5, 8])
    options = {"cu_seqlens_q": starts, "max_seqlen_q": 5, "return_lse": True}
    yield lambda q: ops.attention_paged(q, pages, pages, tables, lens, **options), [q]
    dense = test_jax_gpu.random(0, 1, 256, 4, 64, dtype=dtype)
    for pattern in PATTERNS:
        attend = lambda q, pattern=pattern: ops.attention(q, q, q, pattern=pattern)  # noqa: E731
        yield jax.grad(_loss(attend)), [dense]


def main():
    """Lower all calls, in a dtype of the Hopper kernels and in one of the portable kernels."""
    prepare = _handlers._prepare
    dtype = ""

    def printed(config, arguments):
        prepared = prepare(config, arguments)
        kernels = [entry.name for entry in prepared._plan.entries]
        print(json.loads(config)[0], dtype, prepared.scratch_bytes, *kernels)
        return prepared

    _handlers._prepare = printed
    _handlers._lowering_device = lambda: 0
    _handlers._on_device = lambda index: contextlib.nullcontext()
    for dtype in ("bfloat16", "float32"):
        for function, arrays in _calls(dtype):
            jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
