"""Operations of JAX beside XLA and cuDNN, bfloat16: time of the result and of the gradient.

Microseconds a call: a program is called 20 times, and the host waits for the last call only.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from engine.integrations import jax as ops
from engine.integrations.jax import _handlers

DEVICE = "GPU"
TOKENS, HIDDEN, FFN, VOCAB = 8192, 4096, 14336, 32768
EXPERTS, TOP_K, EXPERT_FFN = 8, 2, 2048


def _random(seed, *shape, scale=1.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def _rms(x, weight):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * weight
    return y.astype(x.dtype)


def _swiglu(x):
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def _loss(logits, target):
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _ragged(x, gate_up, down, ids, weights):
    """The experts by `lax.ragged_dot`, on rows sorted by expert."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=EXPERTS)
    rows = jax.lax.ragged_dot(x[order // TOP_K], gate_up.swapaxes(1, 2), sizes)
    rows = jax.lax.ragged_dot(_swiglu(rows), down.swapaxes(1, 2), sizes)
    pairs = jnp.zeros_like(rows).at[order].set(rows).reshape(*ids.shape, -1)
    return jnp.sum(pairs * weights[..., None], axis=1).astype(x.dtype)


def _cases():
    """Yield name, ours, peer, arrays, and the arguments with a gradient."""
    x, weight = _random(0, TOKENS, HIDDEN), _random(1, HIDDEN)
    yield "rmsnorm", ops.rmsnorm, _rms, (x, weight), (0, 1)
    yield "swiglu", ops.swiglu, _swiglu, (_random(0, TOKENS, 2 * FFN),), (0,)
    q, k, v = _random(0, 4, 2048, 32, 128), _random(1, 4, 2048, 8, 128), _random(2, 4, 2048, 8, 128)
    yield (
        "attention, causal, beside cuDNN",
        lambda *a: ops.attention(*a, causal=True),
        _cudnn,
        (q, k, v),
        (0, 1, 2),
    )
    target = jax.random.randint(jax.random.key(3), (TOKENS,), 0, VOCAB)
    yield "cross_entropy", ops.cross_entropy, _loss, (_random(0, TOKENS, VOCAB), target), (0,)
    weights, ids = ops.moe_route(_random(4, 4096, EXPERTS), TOP_K)
    matrices = (
        _random(1, EXPERTS, 2 * EXPERT_FFN, 1024, scale=0.03),
        _random(2, EXPERTS, 1024, EXPERT_FFN, scale=0.03),
    )
    arrays = (_random(0, 4096, 1024), *matrices, ids, weights)
    yield "moe_experts, beside ragged_dot", ops.moe_experts, _ragged, arrays, (0, 1, 2, 4)


def _microseconds(function, arrays, calls=20):
    """Return the time of a call: the best of three rounds of `calls`."""
    jax.block_until_ready(function(*arrays))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arrays)
        jax.block_until_ready(result)
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def _with_gradient(function, argnums):
    def loss(*arrays):
        return jnp.sum(function(*arrays).astype(jnp.float32))

    return jax.jit(jax.grad(loss, argnums))


def _host_rows():
    """Yield the time of small programs, which is the host's, and the handler calls of one."""
    x, weight = jnp.ones((8, 256)), jnp.ones(256)
    calls = []
    launch = _handlers._launch
    _handlers._launch = lambda *args: (calls.append(1), launch(*args))
    for length in (1, 8):
        for name, norm in (("ours", ops.rmsnorm), ("XLA", _rms)):

            def chain(x, weight, norm=norm, length=length):
                for _ in range(length):
                    x = norm(x + 1, weight)
                return x

            calls.clear()
            took = _microseconds(jax.jit(chain), (x, weight), calls=500)
            yield {
                "case": f"{length} rmsnorm of (8, 256) in one program, {name}",
                "us": took,
                "handler calls a program": len(calls) / 1501,
            }
    _handlers._launch = launch


def _rows():
    for name, ours, peer, arrays, argnums in _cases():
        row = {"case": name}
        for label, function in (("ours", ours), ("peer", peer)):
            try:
                row[f"{label} us"] = _microseconds(jax.jit(function), arrays)
                row[f"{label} us, gradient"] = _microseconds(
                    _with_gradient(function, argnums), arrays
                )
            except Exception as error:  # a peer that this build of JAX lacks
                row[f"no {label}"] = str(error)[:80]
        yield row
    yield from _host_rows()


def main(device):
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("jax_ops takes a GPU: on a CPU the mirrors compute")
    rows = []
    for row in _rows():
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows.append({**row, "jax": jax.__version__})
    return rows
