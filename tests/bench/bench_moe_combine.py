"""moe_combine, bfloat16, 8 experts of width 2048 and a residual: GB/s read and written."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_moe import MOE_LAYERS
from engine.testing.tolerances import assert_close

_IDENTITY = 256
_TOKENS = (1, 8, 64, 256, 4096)
_HIDDEN, _, _, _TOP_K = MOE_LAYERS["Qwen3-30B-A3B"]


def _run(pairs, residual):
    return kernels.moe_combine(pairs, residual=residual)


def _check(args, result):
    pairs, residual = (to_numpy(array[:64]) for array in args)
    want = reference.moe_combine(pairs, residual=residual)
    assert_close(result[:64], want, reduction=_TOP_K + 1)


def _case(num_tokens: int) -> BenchCase:
    def make(xp, seed):
        pairs = normal_on(xp, (num_tokens, _TOP_K, _HIDDEN), "bfloat16", seed)
        return pairs, xp.asarray(cases.normal((num_tokens, _HIDDEN), "bfloat16", seed + 1))

    nbytes = 2 * num_tokens * _HIDDEN * (_TOP_K + 2)
    name = f"T {num_tokens}, k {_TOP_K}, N {_HIDDEN}"
    return BenchCase(name, make, _run, nbytes=nbytes, check=_check)


def _run_identity(pairs, residual, identity, *routing):
    options = {"routing": reference.Routing(*routing), "num_identity": _IDENTITY}
    return kernels.moe_combine(pairs, identity=identity, residual=residual, **options)


def _identity_case(num_tokens: int) -> BenchCase:
    """LongCat-Flash: a third of the 12 experts of a token return their input."""
    hidden, top_k, num_experts = 6144, 12, 768

    def make(xp, seed):
        logits = cases.normal((num_tokens, num_experts), "float32", seed)
        routing = reference.moe_route(logits, top_k, renormalize=False)
        pairs = normal_on(xp, (num_tokens, top_k, hidden), "bfloat16", seed)
        rows = (cases.normal((num_tokens, hidden), "bfloat16", seed + i) for i in (1, 2))
        return (pairs, *map(xp.asarray, rows), *map(xp.asarray, routing))

    def check(args, result):
        pairs, residual, identity, experts, weights, order, offsets = map(to_numpy, args)
        routing = reference.Routing(experts, weights, order, offsets)
        options = {"routing": routing, "num_identity": _IDENTITY, "identity": identity}
        want = reference.moe_combine(pairs, residual=residual, **options)
        assert_close(result, want, reduction=top_k + 1)

    nbytes = 2 * num_tokens * hidden * (top_k * (num_experts - _IDENTITY) // num_experts + 3)
    name = f"T {num_tokens}, k {top_k}, N {hidden}, with identity"
    return BenchCase(name, make, _run_identity, nbytes=nbytes, check=check)


CASES = [_case(num_tokens) for num_tokens in _TOKENS]
CASES += [_identity_case(1), _identity_case(256)]
