"""gemm's Hopper kernel (`cuda_src/gemm_sm90.cu`): which tile for which problem, and its launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.errors import DeviceError
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec, current_architecture
from engine.kernels._tensor_map import tensor_map_2d

__all__ = ["HopperConfig", "choose_hopper", "hopper_specs", "launch_hopper"]

_KERNEL = Kernel(
    "gemm_sm90",
    "map_x:tmap map_w:tmap bias:ptr residual:ptr residual_stride:i64 out:ptr out_stride:i64 "
    "m:i32 n:i32 k:i32 group:i32 activation:i32 is_float:i32 is_vector:i32",
)

_TILE_K = 64  # 128 bytes: the widest swizzle
_SHARED_BYTES = 232_448  # of a block, at most
_WARP_STAGING = 2048


@dataclass(frozen=True)
class HopperConfig:
    """One module of gemm_sm90.cu.

    Attributes
    ----------
    tile_m, tile_n : int
        Rows and columns of out that a block makes at a time.
    cluster_m, cluster_n : int
        How many neighbouring tiles a cluster makes, sharing what it reads.
    cluster_k : int
        How many blocks share the sum over k of a tile.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1

    @property
    def cluster_size(self) -> int:
        """Return how many blocks a cluster has."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def warpgroups(self) -> int:
        """Return how many warpgroups multiply; one more loads."""
        return {64: 1, 192: 3}.get(self.tile_m, 2)

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return (self.warpgroups + 1) * 128

    @property
    def stages(self) -> int:
        """Return how many tiles of x and weight fit into shared memory."""
        free = _SHARED_BYTES - 1024 - 256 - self.warpgroups * 4 * _WARP_STAGING
        return min(8, free // ((self.tile_m + self.tile_n) * _TILE_K * 2))

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory of a block: stages, staging, mbarriers, alignment."""
        stage = (self.tile_m + self.tile_n) * _TILE_K * 2 + 16
        return self.stages * stage + self.warpgroups * 4 * _WARP_STAGING + 1024

    def spec(self, dtype: str) -> ModuleSpec:
        """Return the module for `dtype`."""
        macros = {
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "CLUSTER_M": self.cluster_m,
            "CLUSTER_N": self.cluster_n,
            "CLUSTER_K": self.cluster_k,
            "STAGES": self.stages,
        }
        return ModuleSpec("gemm_sm90.cu", dtype, tuple(macros.items()))

    def clusters(self, m: int, n: int) -> int:
        """Return how many clusters' worth of tiles a problem of `m` rows and `n` columns has."""
        rows = ceil_div(m, self.tile_m * self.cluster_m)
        return rows * ceil_div(n, self.tile_n * self.cluster_n)
