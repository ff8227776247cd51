"""moe_route_backward: GB/s of logits read and gradients written, vs torch.compile's backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close
from tests.bench import torch_backward


def _case(num_tokens: int, num_experts: int, top_k: int) -> BenchCase:
    def make(xp: Any, seed: int) -> tuple[Any, ...]:
        logits = cases.normal((num_tokens, num_experts), "float32", seed)
        experts = reference.moe_route(logits, top_k).experts
        dweights = cases.normal((num_tokens, top_k), "float32", seed + 1)
        return tuple(cases.to_module(xp, dweights, logits, experts))

    def check(args: tuple[Any, ...], result: Any) -> None:
        want = reference.moe_route_backward(*map(to_numpy, args))
        assert_close(result, want, reduction=max(257, num_experts))

    nbytes = 8 * num_tokens * (num_experts + top_k)
    peer = partial(torch_backward.route_seconds, num_tokens, num_experts, top_k, nbytes)
    return BenchCase(
        f"T {num_tokens}, E {num_experts}, k {top_k}",
        make,
        kernels.moe_route_backward,
        nbytes=nbytes,
        peers={"torch.compile": peer},
        check=check,
    )


CASES = [_case(4096, 8, 2), _case(16384, 8, 2), _case(4096, 128, 8), _case(8192, 64, 8)]
