"""A grouped GEMM in Triton: rows sorted by expert times their experts' matrices.

Like our CTAs, each program finds its expert from `offsets` on the device; the host does not know
the counts. Imported lazily, since only this benchmark peer needs Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["grouped_product"]


@triton.jit
def _grouped_kernel(
    x, weight, offsets, out, num_rows, k, num_experts,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, BLOCK_E)
    has = experts < num_experts
    begins = tl.load(offsets + experts, mask=has, other=0)
    ends = tl.load(offsets + experts + 1, mask=has, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)  # experts with all tiles before this one
    if expert < num_experts:
        first = tl.sum(tl.where(experts == expert, after - tiles, 0), 0)
        begin = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        rows = begin + (tile - first) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        ks = tl.arange(0, BLOCK_K)
        matrix = weight + expert.to(tl.int64) * num_rows * k
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            in_k = start + ks < k
            a = tl.load(
                x + rows[:, None].to(tl.int64) * k + (start + ks)[None, :],
                mask=(rows < end)[:, None] & in_k[None, :],
                other=0.0,
            )
            b = tl.load(
                matrix + columns[None, :].to(tl.int64) * k + (start + ks)[:, None],
                mask=(columns < num_rows)[None, :] & in_k[:, None],
                other=0.0,
            )
            sums += tl.dot(a, b)
        tl.store(
            out + rows[:, None].to(tl.int64) * num_rows + columns[None, :],
            sums.to(out.dtype.element_ty),
            mask=(rows < end)[:, None] & (columns < num_rows)[None, :],
        )


def grouped_product(x: Any, weight: Any, offsets: Any) -> Any:
    """Return (P, R): x (P, K), sorted by expert, times weight (E, R, K); offsets are (E + 1,)."""
    (num_pairs, k), (num_experts, num_rows, _) = x.shape, weight.shape
    is_few = num_pairs < 32 * num_experts
    tile_m, tile_n, tile_k = (16, 128, 128) if is_few else (128, 128, 64)
    out = torch.empty((num_pairs, num_rows), device=x.device, dtype=x.dtype)
    grid = (min(num_pairs, num_pairs // tile_m + num_experts), triton.cdiv(num_rows, tile_n))
    _grouped_kernel[grid](
        x, weight, offsets, out, num_rows, k, num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=tile_m, BLOCK_N=tile_n,
        BLOCK_K=tile_k, num_warps=4 if is_few else 8, num_stages=4 if is_few else 3,
    )  # fmt: skip
    return out
