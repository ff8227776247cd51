"""swiglu_backward, bfloat16: GB/s of three reads and two writes, vs torch.compile."""

from __future__ import annotations

from tests.bench.torch_backward import gated_case

CASES = [
    gated_case("swiglu", rows, f)
    for rows, f in ((512, 8192), (8192, 2048), (8192, 8192), (8192, 14336))
]
CPU_CASES = [gated_case("swiglu", 256, 1024)]
