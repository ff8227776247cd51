"""gemm_fp8 on the linear layers of real models, vs torch._scaled_mm with per-row scales."""

from __future__ import annotations

from tests.bench import w8_cases

CASES = [*w8_cases.cases("fp8"), *w8_cases.cases("fp8", has_blocks=True)]
