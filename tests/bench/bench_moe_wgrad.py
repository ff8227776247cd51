"""moe_wgrad, bfloat16: TFLOP/s of both products of a layer, vs torch's grouped GEMM.

The peer multiplies rows that were gathered and sorted beforehand; ours gathers them itself.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from engine import kernels, reference
from engine.device import to_numpy
from engine.reference import Routing
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close
from tests.bench import moe_peers
from tests.bench.bench_gemm import filled

# Tokens, experts, top_k, hidden size N, width of an expert F.
_LAYERS = (
    (4096, 8, 2, 768, 2048),
    (16384, 8, 2, 768, 2048),
    (4096, 128, 8, 2048, 768),
    (8192, 64, 8, 2048, 768),
)


@lru_cache(maxsize=8)
def _routing(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Routing:
    logits = cases.normal((num_tokens, num_experts), "float32", seed)
    return reference.moe_route(logits, top_k)


def _case(layer: tuple[int, ...], gather: str) -> BenchCase:
    num_tokens, num_experts, top_k, hidden, width = layer
    pairs = num_tokens * top_k
    rows, k = (2 * width, hidden) if gather == "x" else (hidden, width)

    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        dy = filled(xp, (num_tokens if gather == "dy" else pairs, rows), seed)
        x = filled(xp, (num_tokens if gather == "x" else pairs, k), seed + 1)
        return dy, x, *cases.to_module(xp, *_routing(num_tokens, num_experts, top_k, seed))

    def run(dy: Any, x: Any, *routing: Any) -> Any:
        return kernels.moe_wgrad(dy, x, Routing(*routing), gather=gather)

    def check(args: tuple[Any, ...], result: Any) -> None:
        """Compare 64 rows of the first expert's matrix with the mirror."""
        dy, x, *routing = args
        few = Routing(*map(to_numpy, routing))
        first = few._replace(offsets=few.offsets[:2])
        want = reference.moe_wgrad(to_numpy(dy[:, :64]), to_numpy(x), first, gather=gather)
        assert_close(to_numpy(result[:1, :64]), want, reduction=pairs // num_experts)

    nbytes = 2 * (num_experts * rows * k + pairs * (rows + k))
    routing = _routing(num_tokens, num_experts, top_k)
    peer = partial(moe_peers.wgrad_seconds, routing, rows, k, nbytes)
    return BenchCase(
        f"T={num_tokens} E={num_experts} k={top_k} ({rows}, {k}), {gather} gathered",
        make,
        run,
        nbytes=nbytes,
        flops=2 * pairs * rows * k,
        peers={"torch": peer},
        check=check,
    )


CASES = [_case(layer, gather) for layer in _LAYERS for gather in ("x", "dy")]
CPU_CASES = [_case((64, 4, 2, 64, 96), gather) for gather in ("x", "dy")]
