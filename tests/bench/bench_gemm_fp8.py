"""gemm_fp8 on the linear layers of real models, beside torch._scaled_mm with scales of rows."""

from __future__ import annotations

from tests.bench import w8_cases

CASES = [*w8_cases.cases("fp8"), *w8_cases.cases("fp8", has_blocks=True)]
