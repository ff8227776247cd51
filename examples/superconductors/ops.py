"""The example's own ops: formulas in NumPy, and kernels for the sizes that the screen has.

`engine kernels check examples/superconductors/ops.py` checks them; but codes may differ from the
formula's by one, so `norm_product_codes` has a test of its own.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from engine import kernels

__all__ = [
    "adam_formula",
    "adam_step",
    "are_for",
    "dropout",
    "finish_layer",
    "first_layer",
    "is_short",
    "keep_factors",
    "mean_rows",
    "norm_product",
    "norm_product_codes",
    "short_attention",
    "token_features",
    "weight_gradient",
]

NUM_FEATURES = 48
SHARED_BYTES = 226 * 1024  # limit of a layer's weights: a block's 227 KB less 1 for alignment
_SIZES = {"T": (1, 17, 500, 6000), "C": (64, 128)}


def are_for(xp: Any, config: Any) -> bool:
    """Tell whether a layer's ops run on CuPy's device, with a network's `Config`."""
    if xp is np or xp.cuda.Device().compute_capability != "90":
        return False
    hidden, inner, features = config.hidden, config.ffn, config.num_features
    fits = 2 * hidden * (hidden + 3 * inner) <= SHARED_BYTES
    return fits and hidden in (64, 128) and inner % 64 == 0 and features % 8 == 0 and features <= 64


def is_short(length: int, config: Any) -> bool:
    """Tell whether `short_attention` takes sequences of this length."""
    return length <= MAX_LENGTH and config.num_heads <= 8 and config.head_dim in (16, 32, 64)


def _features(fractions: Any, amounts: Any, tc: Any, distances: Any) -> Any:
    """Return features of tokens: waves of several lengths, so that small doping is seen.

    fractions, amounts : (T,) arrays
        Share of the atoms, and atoms in the formula as written; 0 for a neighbour.
    tc, distances : (T,) arrays
        Critical temperature (in K) and distance of a neighbour; 0 for an element.
    """
    f, a, t, d = (x[:, None] for x in (fractions, amounts, tc, distances))
    angles = [
        [math.pi * 2.0**k * f for k in range(5)],  # periods of 2 to 1/8
        [8 * math.pi / 2.0**k * a for k in range(7)],  # periods of 1/4 atom to 16 atoms
    ]
    waves = [wave(angle) for part in angles for wave in (np.sin, np.cos) for angle in part]
    logs = [np.log(f + 1e-3) / 3, np.log(a + 1e-2) / 2, np.log1p(a) / 2, f, f * f, np.sqrt(f)]
    near = [np.exp(-d / reach) for reach in (0.003, 0.01, 0.03, 0.1)]
    of_tc = [t / 30, np.log1p(t) / 2, np.sqrt(t) / 4, (t > 0).astype(np.float32)]
    known = [*near, *of_tc, *(t / 30 * each for each in near), np.log(d + 1e-3) / 3, np.sqrt(d)]
    found = np.concatenate([*waves, *logs, *known], axis=1)
    return np.pad(found, ((0, 0), (0, NUM_FEATURES - found.shape[1])))


token_features = kernels.define(
    "token_features",
    "fractions: (T,) float32, amounts: (T,) float32, tc: (T,) float32, distances: (T,) float32"
    f" -> (T, {NUM_FEATURES}) float32",
    reference=_features,
    source="token_features.cu",
    launch=lambda call: call.grid(-(-call["T"] // 128), 128),
    inputs={
        "fractions": lambda rng, call: rng.random(call["T"], np.float32),
        "amounts": lambda rng, call: 12 * rng.random(call["T"], np.float32),
        "tc": lambda rng, call: np.maximum(0, 100 * rng.random(call["T"], np.float32) - 30),
        "distances": lambda rng, call: rng.random(call["T"], np.float32),
    },
    tolerance=(1e-4, 1e-4),
    bench={"T": 1 << 20},
)


def _weight(factor: int, rows: str, columns: str) -> Any:
    """Return a function that draws a weight (factor * rows, columns), of products of order 1."""

    def draw(rng: Any, call: Any) -> Any:
        shape = (factor * call[rows], call[columns])
        return rng.standard_normal(shape, np.float32) * call[columns] ** -0.5

    return draw


def _rmsnorm(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _launch_norm_product(call: Any) -> Any:
    weight = call["N"] * call["C"] * call.itemsize
    blocks = call.sm_count * (2 if weight <= SHARED_BYTES // 2 - 1024 else 1)
    return call.grid(
        min(blocks, -(-call["T"] // 128)),
        256,
        shared=weight + 1024,
        args={"rows": call["T"]},
        defines={"HIDDEN": call["C"]},
    )


norm_product = kernels.define(
    "norm_product",
    "x: (T, C) float16|bfloat16, norm: (C,) like x, weight: (N, C) like x, eps: float32 = 1e-6"
    " -> (T, N) like x",
    reference=lambda x, norm, weight, eps: _rmsnorm(x, norm, eps) @ weight.T,
    source="norm_product.cu",
    launch=_launch_norm_product,
    where=f"C % 64 == 0, C <= 128, N % 64 == 0, 2 * N * C <= {SHARED_BYTES}",
    alignment=16,
    requires="sm_90a",
    reduction="C",
    tolerance=(2e-2, 2e-2),  # normed rows are rounded
    inputs={"weight": _weight(1, "N", "C")},
    sizes=_SIZES | {"N": (64, 384)},
    flops="2*T*N*C",
    bench={"T": 262144, "N": 384, "C": 128},
)


def _codes(x: Any, norm: Any, weight: Any, factors: Any, eps: float) -> Any:
    found = _rmsnorm(x, norm, eps) @ weight.T * factors
    return np.clip(found, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


norm_product_codes = kernels.define(
    "norm_product_codes",
    "x: (T, C) float16|bfloat16, norm: (C,) like x, weight: (N, C) like x, factors: (N,) float32,"
    " eps: float32 = 1e-6 -> (T, N) uint8",
    reference=_codes,
    source="norm_product.cu",
    launch=_launch_norm_product,
    where=f"C % 64 == 0, C <= 128, N % 64 == 0, 2 * N * C <= {SHARED_BYTES}",
    alignment=16,
    requires="sm_90a",
    inputs={"weight": _weight(1, "N", "C"), "factors": lambda rng, call: np.full(call["N"], 50.0)},
    sizes=_SIZES | {"N": (64, 384)},
    flops="2*T*N*C",
    bench={"T": 262144, "N": 384, "C": 128},
)


def _feed_forward(x: Any, norm: Any, gate_up: Any, down: Any, eps: float) -> Any:
    gate, up = np.split(_rmsnorm(x, norm, eps) @ gate_up.T, 2, axis=-1)
    return x + (gate * up / (1 + np.exp(-gate))) @ down.T


def _launch_layer(call: Any, defines: dict[str, int], columns: int) -> Any:
    """Launch a kernel of layer.cu that also holds a matrix of (C, columns) in shared memory."""
    c, f = call["C"], call["F"]
    return call.grid(
        min(call.sm_count, -(-call["T"] // 192)),
        384,
        shared=call.itemsize * c * (3 * f + columns) + 1024,
        args={"rows": call["T"]},
        defines={"HIDDEN": c, "INNER": f, **defines},
    )


_LAYER: dict[str, Any] = {
    "source": "layer.cu",
    "alignment": 16,
    "requires": "sm_90a",
    "reduction": "F",
    "tolerance": (2e-2, 2e-2),  # normed rows and inner values are rounded
    "sizes": _SIZES | {"F": (64, 256)},
}
_LAYER_SIZES = f"C % 64 == 0, C <= 128, F % 64 == 0, 2 * C * (C + 3 * F) <= {SHARED_BYTES}"

finish_layer = kernels.define(
    "finish_layer",
    "x: (T, C) float16|bfloat16, norm: (C,) like x, gate_up: (2*F, C) like x, down: (C, F) like x,"
    " mixed: (T, C) like x, mixed_weight: (C, C) like x, eps: float32 = 1e-6 -> (T, C) like x",
    reference=lambda x, norm, gate_up, down, mixed, mixed_weight, eps: _feed_forward(
        x + mixed @ mixed_weight.T, norm, gate_up, down, eps
    ),
    launch=lambda call: _launch_layer(call, {}, call["C"]),
    where=_LAYER_SIZES,
    inputs={
        "gate_up": _weight(2, "F", "C"),
        "down": _weight(1, "C", "F"),
        "mixed_weight": _weight(1, "C", "C"),
    },
    flops="2*T*C*(C + 3*F)",
    bench={"T": 262144, "C": 128, "F": 256},
    **_LAYER,
)

first_layer = kernels.define(
    "first_layer",
    "elements: (T,) int32, features: (T, K) float32, table: (V, C) float16|bfloat16,"
    " feature_weight: (C, K) like table, norm: (C,) like table, gate_up: (2*F, C) like table,"
    " down: (C, F) like table, eps: float32 = 1e-6 -> (T, C) like table",
    reference=lambda elements, features, table, feature_weight, norm, gate_up, down, eps: (
        _feed_forward(table[elements] + features @ feature_weight.T, norm, gate_up, down, eps)
    ),
    launch=lambda call: _launch_layer(call, {"FEATURES": call["K"]}, 64),
    where=_LAYER_SIZES + ", K % 8 == 0, K >= 8, K <= 64, V >= 1",
    inputs={
        "elements": lambda rng, call: rng.integers(0, call["V"], call["T"]).astype(np.int32),
        "feature_weight": _weight(1, "C", "K"),
        "gate_up": _weight(2, "F", "C"),
        "down": _weight(1, "C", "F"),
    },
    flops="2*T*C*(K + 3*F)",
    bench={"T": 262144, "C": 128, "F": 256, "K": 32, "V": 98},
    **(_LAYER | {"sizes": _LAYER["sizes"] | {"K": (32, 48), "V": (98,)}}),
)

MAX_LENGTH = 16  # longest sequence of `short_attention`, tokens


def _short_attention(qkv: Any) -> Any:
    q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


def _launch_short_attention(call: Any) -> Any:
    length, heads, dim = call["L"], call["H"], call["D"]
    sequences = max(1, 256 // (heads * length))
    return call.grid(
        -(-call["S"] // sequences),
        256,
        shared=sequences * length * (3 * heads * dim // 8 + 1) * 16,
        args={"scale": math.log2(math.e) * dim**-0.5},
        defines={"LENGTH": length, "HEADS": heads, "HEAD_DIM": dim},
    )


short_attention = kernels.define(
    "short_attention",
    "qkv: (S, L, 3, H, D) float16|bfloat16 -> (S, L, H, D) like qkv",
    reference=_short_attention,
    source="short_attention.cu",
    launch=_launch_short_attention,
    where=f"L >= 1, L <= {MAX_LENGTH}, H >= 1, H <= 8, D % 8 == 0, D >= 8, D <= 64",
    alignment=16,
    tolerance=(1e-2, 1e-2),
    sizes={"S": (1, 7, 300), "L": (1, 8, 13), "H": (4,), "D": (32,)},
    flops="4*S*L*L*H*D",
    bench={"S": 131072, "L": 8, "H": 4, "D": 32},
)

mean_rows = kernels.define(
    "mean_rows",
    "x: (S, L, C) float16|bfloat16 -> (S, C) like x",
    reference=lambda x: x.mean(1),
    source="mean_rows.cu",
    launch=lambda call: call.grid(call["S"], 512),
    where="L >= 1, C % 8 == 0, C <= 4096",
    alignment=16,
    reduction="L",
    bench={"S": 131, "L": 2000, "C": 128},
)


def _launch_weight_gradient(call: Any) -> Any:
    rows, n, k = (call[size] for size in ("R", "N", "K"))
    grid = (-(-n // 128), -(-k // 128))
    shares = max(1, min(2 * call.sm_count // (grid[0] * grid[1]), -(-rows // 256)))
    share = -(-rows // (32 * shares)) * 32
    shares = -(-rows // share)
    partials = call.scratch((shares, n, k))
    return [
        call.grid(
            (*grid, shares),
            256,
            shared=4 * 2 * 32 * 128 * call.itemsize,
            entry="partial_products",
            args={"partials": partials, "share": share},
        ),
        call.grid1d(n * k, args={"partials": partials, "count": n * k, "shares": shares}),
    ]


weight_gradient = kernels.define(
    "weight_gradient",
    "dy: (R, N) float16|bfloat16, x: (R, K) like dy -> (N, K) float32",
    reference=lambda dy, x: dy.T @ x,
    source="weight_gradient.cu",
    launch=_launch_weight_gradient,
    where="R >= 1, N % 8 == 0, K % 8 == 0",
    alignment=16,
    reduction="R",
    sizes={"R": (1, 33, 5000)},
    flops="2*R*N*K",
    bench={"R": 262144, "N": 512, "K": 128},
)


def keep_factors(count: int, number: int, rate: float) -> Any:
    """Return dropout's factors, 0 or 1 / (1 - rate), (count,) float64, by hashes of a number.

    https://github.com/skeeto/hash-prospector: a permutation of 32-bit integers.
    """
    x = np.arange(count, dtype=np.uint32) + np.uint32(number * 0x9E3779B9 % 2**32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return (x >= np.uint32(rate * 2**32)) / (1 - rate)


dropout = kernels.define(
    "dropout",
    "y: (N,) float, number: uint32, rate: float32 -> (N,) like y",
    reference=lambda y, number, rate: y * keep_factors(len(y), int(number), float(rate)),
    source="dropout.cu",
    launch=lambda call: call.grid1d(call["N"], 256),
    where="rate >= 0, rate < 1",
    inputs={"number": lambda rng, call: 12345, "rate": lambda rng, call: 0.25},
    bench={"N": 1 << 20},
)


def adam_formula(
    weights: Any,
    first: Any,
    second: Any,
    mean: Any,
    gradient: Any,
    schedule: Any,
    decay: float,
    clip: float,
    beta_1: float,
    beta_2: float,
) -> None:
    """Take a step of `network.Adam`, in place.

    weights, first, second, mean, gradient : (P,) arrays
        Weights, moments of their gradient, mean of the weights over steps, gradient.
    schedule : (3,) array
        What changes from step to step: the learning rate, the correction of the moments for their
        start at 0, and the share of the new weights in the mean.
    """
    rate, correction, mean_share = schedule
    norm = np.sqrt((gradient * gradient).sum())
    gradient = gradient * np.minimum(1.0, clip / (norm + 1e-12)).astype(weights.dtype)
    first += (1 - beta_1) * (gradient - first)
    second += (1 - beta_2) * (gradient * gradient - second)
    weights *= 1 - rate * decay
    weights -= rate * correction * first / (np.sqrt(second) + 1e-8)
    mean += mean_share * (weights - mean)


def _launch_adam(call: Any) -> Any:
    parts = call.scratch(128)
    return [
        call.grid(128, 256, entry="sum_squares", args={"parts": parts}),
        call.grid1d(call["P"], 256, args={"parts": parts}),
    ]


adam_step = kernels.define(
    "adam_step",
    "weights: (P,) float32 inout, first: (P,) float32 inout, second: (P,) float32 inout,"
    " mean: (P,) float32 inout, gradient: (P,) float32, schedule: (3,) float32, decay: float32,"
    " clip: float32, beta_1: float32, beta_2: float32",
    reference=adam_formula,
    source="adam_step.cu",
    launch=_launch_adam,
    where="P >= 1",
    inputs={
        "second": lambda rng, call: rng.random(call["P"], np.float32),
        "schedule": lambda rng, call: np.array([1e-2, 1.5, 1e-2], np.float32),
        "decay": lambda rng, call: 0.3,
        "clip": lambda rng, call: 1.0,
        "beta_1": lambda rng, call: 0.9,
        "beta_2": lambda rng, call: 0.99,
    },
    tolerance=(1e-4, 1e-5),
    bench={"P": 400_000},
)
