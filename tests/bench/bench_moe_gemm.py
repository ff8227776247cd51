"""moe_gemm, bfloat16, and a whole mixture-of-experts layer: GB/s of touched experts, and TFLOP/s.

Shapes of Qwen3-30B-A3B. Peers, if installed: torch's grouped GEMM and a Triton grouped GEMM. For
single GEMMs, peers time only the GEMM: their rows are pre-sorted, and they apply neither the
activation nor the routing weights. For the layer, peers do all the work that ours does. Then
quantized weights: Qwen3-30B-A3B in fp8 blocks, with activations quantized from nine tokens on, and
gpt-oss-20b.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.reference import Routing
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_moe import MOE_LAYERS, routing_of
from engine.testing.cases_quantized import random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS
from engine.weights.stack import matrices, stack_matrices, take_matrices
from tests.bench import moe_peers
from tests.bench.bench_gemm import filled

_TOKENS = (1, 8, 64, 256, 4096)
_HIDDEN, _WIDTH, _EXPERTS, _TOP_K = MOE_LAYERS["Qwen3-30B-A3B"]
_CHECKED = 3  # tokens compared with the mirror
_QUANTIZED = (("Qwen3-30B-A3B", "fp8_block"), ("gpt-oss-20b", "mxfp4"))
_QUANTIZED_TOKENS = (1, 2, 4, 8, 64, 256)
_PROMPTS = (2048, 8192)  # tokens of prompts, for packed weights
_CODES_FROM = 9  # minimum number of tokens to quantize x


def _logits(num_tokens, seed):
    return cases.normal((num_tokens, _EXPERTS), "float32", seed)


@lru_cache(maxsize=32)
def _routing(num_tokens, seed):
    return reference.moe_route(_logits(num_tokens, seed), _TOP_K)


def _touched(num_tokens):
    """Return how many experts the first copy's tokens select; other copies select about as many."""
    return len(np.unique(_routing(num_tokens, 0).experts))


def _weights(xp, seed):
    gate_up = filled(xp, (_EXPERTS, 2 * _WIDTH, _HIDDEN), seed, _HIDDEN**-0.5)
    return gate_up, filled(xp, (_EXPERTS, _HIDDEN, _WIDTH), seed + 1, _WIDTH**-0.5)


def _few(routing, weights):
    """Return a few tokens with their routing and experts' matrices, on the host."""
    experts = to_numpy(routing.experts)
    tokens = np.unique(np.linspace(0, len(experts) - 1, _CHECKED).astype(int))
    names, renamed = np.unique(experts[tokens], return_inverse=True)
    few = routing_of(renamed.reshape(len(tokens), _TOP_K), len(names))
    few = few._replace(weights=to_numpy(routing.weights)[tokens])
    return tokens, few, [to_numpy(weight[names]) for weight in weights]


def _check_gate_up(args, result):
    x, weight, *routing = args
    tokens, few, (matrix,) = _few(Routing(*routing), [weight])
    want = reference.moe_gemm(to_numpy(x[tokens]), matrix, few, activation="swiglu")
    pairs = (tokens[:, None] * _TOP_K + np.arange(_TOP_K)).reshape(-1)[few.order]
    places = np.argsort(to_numpy(routing[2]))[pairs]
    assert_close(to_numpy(result[places]), want, reduction=_HIDDEN)


def _check_down(args, result):
    x, weight, *routing = args
    tokens, few, (matrix,) = _few(Routing(*routing), [weight])
    pairs = (tokens[:, None] * _TOP_K + np.arange(_TOP_K)).reshape(-1)
    places = np.argsort(to_numpy(routing[2]))[pairs[few.order]]
    want = reference.moe_gemm(to_numpy(x[places]), matrix, few, scatter=True)
    assert_close(to_numpy(result[pairs]), want, reduction=_WIDTH)


def _layer(x, logits, gate_up, down, moe):
    """Return the layer's result, computed with the ops of `moe`: kernels or mirrors."""
    routing = moe.moe_route(logits, _TOP_K)
    y = moe.moe_gemm(x, gate_up, routing, activation="swiglu")
    y = moe.moe_gemm(y, down, routing, scatter=True)
    return moe.moe_combine(y.reshape(len(x), _TOP_K, _HIDDEN), residual=x)


def _check_layer(args, result):
    x, logits, *weights = args
    routing = reference.moe_route(to_numpy(logits), _TOP_K)
    tokens, few, (gate_up, down) = _few(routing, weights)
    rows = to_numpy(x[tokens])
    y = reference.moe_gemm(rows, gate_up, few, activation="swiglu")
    y = reference.moe_gemm(y, down, few, scatter=True)
    want = reference.moe_combine(y.reshape(len(tokens), _TOP_K, _HIDDEN), residual=rows)
    assert_close(to_numpy(result[tokens]), want, reduction=_HIDDEN)


def _product(num_tokens: int, name: str) -> BenchCase:
    is_down, pairs = name == "down", num_tokens * _TOP_K
    rows, k, columns = (_HIDDEN, _WIDTH, _HIDDEN) if is_down else (2 * _WIDTH, _HIDDEN, _WIDTH)
    num_inputs = pairs if is_down else num_tokens
    options = {"scatter": True} if is_down else {"activation": "swiglu"}

    def make(xp, seed):
        weight = filled(xp, (_EXPERTS, rows, k), seed, k**-0.5)
        x = filled(xp, (num_inputs, k), seed + 2)
        return x, weight, *cases.to_module(xp, *_routing(num_tokens, seed))

    def run(x, weight, *routing):
        return kernels.moe_gemm(x, weight, Routing(*routing), pdl=True, **options)

    nbytes = 2 * (_touched(num_tokens) * rows * k + num_inputs * k + pairs * columns)
    peer = partial(moe_peers.product_seconds, _routing(num_tokens, 0), _EXPERTS, rows, k, nbytes)
    return BenchCase(
        f"{name} T={num_tokens}",
        make,
        run,
        nbytes=nbytes,
        flops=2 * pairs * rows * k,
        peers={way: partial(peer, way) for way in moe_peers.PRODUCTS},
        check=_check_down if is_down else _check_gate_up,
    )


def _whole(num_tokens: int) -> BenchCase:
    def make(xp, seed):
        return (
            filled(xp, (num_tokens, _HIDDEN), seed + 2),
            xp.asarray(_logits(num_tokens, seed)),
            *_weights(xp, seed),
        )

    matrices = 3 * _HIDDEN * _WIDTH
    nbytes = 2 * (_touched(num_tokens) * matrices + 2 * num_tokens * _HIDDEN)
    peer = partial(moe_peers.layer_seconds, _logits(num_tokens, 0), _TOP_K, _HIDDEN, _WIDTH, nbytes)
    return BenchCase(
        f"layer T={num_tokens}",
        make,
        partial(_layer, moe=kernels),
        nbytes=nbytes,
        flops=2 * num_tokens * _TOP_K * matrices,
        peers={way: partial(peer, way) for way in moe_peers.PRODUCTS},
        check=_check_layer,
    )


def _quantized(model: str, name: str, num_tokens: int, *, is_down: bool) -> BenchCase:
    """Give every expert its own copy of the same matrix."""
    hidden, width, experts, top_k = MOE_LAYERS[model]
    rows, k = (hidden, width) if is_down else (2 * width, hidden)
    pairs = num_tokens * top_k
    num_inputs, columns = (pairs, hidden) if is_down else (num_tokens, width)
    options: dict[str, object] = {"scatter": True} if is_down else {"activation": "swiglu"}
    options["quantize_x"] = name == "fp8_block" and num_tokens >= _CODES_FROM

    def route(seed):
        return reference.moe_route(cases.normal((num_tokens, experts), "float32", seed), top_k)

    def make(xp, seed):
        one = weight_to(xp, random_weight(name, rows, k, seed))
        x = filled(xp, (num_inputs, k), seed + 2)
        return x, stack_matrices([one] * experts), *cases.to_module(xp, *route(seed))

    def run(x, weight, *routing):
        return kernels.moe_gemm(x, weight, Routing(*routing), pdl=True, **options)

    def check(args, result):
        x, weight, *routing = args
        experts_of, weights, order, _ = map(to_numpy, routing)
        tokens = np.arange(num_tokens)
        if num_tokens > max(_QUANTIZED_TOKENS):
            tokens = np.unique(np.linspace(0, num_tokens - 1, _CHECKED).astype(int))
        touched, renamed = np.unique(experts_of[tokens], return_inverse=True)
        few = routing_of(renamed.reshape(len(tokens), top_k), len(touched))
        few = few._replace(weights=weights[tokens])
        one = take_matrices(weight, 0, 1)
        matrix = stack_matrices([_on_host(one)] * len(touched))
        pairs_of = (tokens[:, None] * top_k + np.arange(top_k)).reshape(-1)
        # Places of these pairs, by expert, in the sorted order of all pairs.
        places = np.argsort(order)[pairs_of[few.order]]
        given = places if is_down else tokens
        want = reference.moe_gemm(to_numpy(x[given]).astype(np.float32), matrix, few, **options)
        found = result[pairs_of] if is_down else result[places]
        assert_close(to_numpy(found), want.astype(result.dtype), reduction=k)

    touched = len(np.unique(route(0).experts))
    nbytes = touched * FORMATS[name].num_bytes((rows, k)) + 2 * (num_inputs * k + pairs * columns)
    label = "down" if is_down else "gate_up"
    return BenchCase(
        f"{model} {name} {label} T={num_tokens}",
        make,
        run,
        nbytes=nbytes,
        flops=2 * pairs * rows * k,
        check=check,
        arithmetic="fp8" if options["quantize_x"] else "bfloat16",
    )


def _on_host(weight):
    """Return a weight (1, R, K) as a matrix (R, K) of NumPy arrays."""
    one = next(matrices(weight))
    return replace(one, **{name: to_numpy(array) for name, array in one.arrays()})


CASES = [
    *(_product(num_tokens, name) for name in ("gate_up", "down") for num_tokens in _TOKENS),
    *(_whole(num_tokens) for num_tokens in _TOKENS),
    *(
        _quantized(model, name, num_tokens, is_down=is_down)
        for model, name in _QUANTIZED
        for is_down in (False, True)
        for num_tokens in _QUANTIZED_TOKENS + (_PROMPTS if FORMATS[name].is_packed else ())
    ),
]
