"""moe_route for 128 experts, top 8: microseconds, vs torch's softmax, topk and sort."""

from __future__ import annotations

from functools import partial

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_moe import MOE_LAYERS, distinct_logits
from tests.bench import moe_peers

_TOKENS = (1, 8, 64, 256, 4096, 65536)
_, _, _EXPERTS, _TOP_K = MOE_LAYERS["Qwen3-30B-A3B"]


def _check(args, result):
    want = reference.moe_route(to_numpy(args[0]), _TOP_K)
    for name in ("experts", "order", "offsets"):
        assert (to_numpy(getattr(result, name)) == getattr(want, name)).all(), name


def _case(num_tokens: int) -> BenchCase:
    def make(xp, seed):
        return (xp.asarray(distinct_logits(num_tokens, _EXPERTS, seed)),)

    return BenchCase(
        f"T {num_tokens}, E {_EXPERTS}, k {_TOP_K}",
        make,
        lambda logits: kernels.moe_route(logits, _TOP_K),
        nbytes=4 * num_tokens * (_EXPERTS + 3 * _TOP_K) + 4 * (_EXPERTS + 1),
        peers={"torch": partial(moe_peers.route_seconds, num_tokens, _EXPERTS, _TOP_K)},
        copies=2,  # the router GEMM leaves the logits in L2
        check=_check,
    )


CASES = [_case(num_tokens) for num_tokens in _TOKENS]
