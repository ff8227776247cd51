"""Integers of fixed width in a user's source: NVRTC has none of its own."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels

SIZES = [(kind, bits) for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize(("kind", "bits"), SIZES)
def test_c_names_of_integers_have_their_size(kind, bits):
    ctype = f"{kind}{bits}_t"
    signed = "true" if kind == "int" else "false"
    op = kernels.define(
        "copy_ids",
        f"x: (N,) {kind}{bits} -> (N,) like x",
        reference=lambda x: x.copy(),
        source=f"""
        static_assert(sizeof({ctype}) == {bits // 8} && ({ctype}(-1) < 0) == {signed});
        extern "C" __global__ void copy_ids(const {ctype}* x, {ctype}* out, int64_t N) {{
          const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
          if (i < N) out[i] = x[i];
        }}""",
        launch=lambda call: call.grid1d(call["N"], 256),
    )
    assert op.compile(op.example_problem({"N": 3}, arch="sm_80"))
    x = np.arange(3, dtype=f"{kind}{bits}")
    assert op(x).dtype == x.dtype
