"""gemm_int8 on the linear layers of real models, vs torch._int_mm, which has no scales."""

from __future__ import annotations

from tests.bench import w8_cases

CASES = w8_cases.cases("int8")
