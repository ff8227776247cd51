"""gemm's Hopper kernel (`cuda_src/gemm_sm90.cu`): which tile for which problem, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from engine import device, env
from engine.dtypes import dtype_name
from engine.kernels._launch import Kernel, ceil_div, sm_count
from engine.kernels._module import ModuleSpec, current_architecture
from engine.kernels._tensor_map import tensor_map_2d

__all__ = [
    "HOPPER_CONFIGS",
    "HopperConfig",
    "choose_hopper",
    "hopper_specs",
    "is_hopper",
    "launch_hopper",
]

_KERNEL = Kernel(
    "gemm_sm90",
    "map_x:tmap map_w:tmap bias:ptr residual:ptr residual_stride:i64 out:ptr out_stride:i64 "
    "m:i32 n:i32 k:i32 group:i32 activation:i32 is_float:i32 is_vector:i32",
)

_TILE_K = 64  # 128 bytes: the widest swizzle
_SHARED_BYTES = 232_448  # of a block, at most
_WARP_STAGING = 2048
_BAND = 8  # rows of clusters' tiles that are gone down before the next column
_DTYPES = ("float16", "bfloat16")


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
        free = _SHARED_BYTES - 1024 - 256 - self._beside_stages
        return min(8, free // ((self.tile_m + self.tile_n) * _TILE_K * 2))

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory of a block: stages, staging, mbarriers, alignment."""
        stage = (self.tile_m + self.tile_n) * _TILE_K * 2 + 16
        return self.stages * stage + self._beside_stages + 8 + 1024

    @property
    def _beside_stages(self) -> int:
        """Return the bytes of staging, and of sums that the cluster's other blocks send."""
        sums = self.tile_m * self.tile_n * 4 * (self.cluster_k - 1) // self.cluster_k
        return self.warpgroups * 4 * _WARP_STAGING + sums

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

    def max_clusters(self, sm_count: int) -> int:
        """Return how many clusters run at a time: larger ones do not fill every GPC."""
        size = self.cluster_size
        return sm_count // size if size <= 2 else sm_count * 10 // (11 * size)

    def waves(self, m: int, n: int, sm_count: int) -> int:
        """Return how many tiles the busiest block makes."""
        return ceil_div(self.clusters(m, n), self.max_clusters(sm_count))


@dataclass(frozen=True)
class _Cost:
    """Microseconds on an H200: a launch, a tile beside its products, 64 of k of a tile."""

    launch: float
    tile: float
    step: float


# Fitted to bars' layers at 64 to 8192 rows, bfloat16 (docs/benchmarks/gemm_sm90.md). Long products
# run at the clock that the power limit leaves, and so do these figures.
HOPPER_CONFIGS: dict[HopperConfig, _Cost] = {
    HopperConfig(256, 128, 1, 2): _Cost(1.03, 1.85, 0.711),
    HopperConfig(128, 256, 2): _Cost(0.33, 2.11, 0.714),
    HopperConfig(192, 192): _Cost(0.3, 2.26, 0.781),
    HopperConfig(128, 256): _Cost(0.3, 2.3, 0.8),
    HopperConfig(128, 224): _Cost(0.3, 2.3, 0.685),
    HopperConfig(128, 224, 2): _Cost(0.3, 2.06, 0.664),
    HopperConfig(128, 192, 2): _Cost(0.3, 2.0, 0.545),
    HopperConfig(128, 160, 2): _Cost(0.3, 1.79, 0.47),
    HopperConfig(128, 128, 2): _Cost(0.3, 1.44, 0.38),
    HopperConfig(128, 96, 2): _Cost(1.9, 0.88, 0.296),
    HopperConfig(128, 64, 2): _Cost(1.78, 0.25, 0.211),
    HopperConfig(64, 64): _Cost(2.01, 0.136, 0.157),
    HopperConfig(128, 128, 1, 1, 2): _Cost(3.94, 0.49, 0.351),
    HopperConfig(128, 128, 2, 1, 2): _Cost(3.8, 0.9, 0.337),
    HopperConfig(128, 64, 1, 1, 2): _Cost(2.84, 0.245, 0.253),
    HopperConfig(128, 64, 1, 1, 4): _Cost(3.39, 0.295, 0.276),
    HopperConfig(64, 64, 1, 1, 2): _Cost(3.62, 0.123, 0.152),
}


def hopper_specs(dtype: str) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch_hopper` may launch for `dtype`."""
    return tuple(config.spec(dtype) for config in HOPPER_CONFIGS) if dtype in _DTYPES else ()


def is_hopper(dtype: str) -> bool:
    """Tell whether the current device runs gemm_sm90.cu for `dtype`, and may."""
    index = device.cupy().cuda.runtime.getDevice()
    tier = env.kernel_tier()
    return dtype in _DTYPES and tier == "auto" and current_architecture(index) == "sm_90a"


@cache
def choose_hopper(
    m: int, n: int, k: int, sm_count: int, *, batch_invariant: bool = False
) -> HopperConfig:
    """Choose for x (m, k) and weight (n, k), both aligned: the least estimated time.

    Blocks share a sum over k only where all tiles run at once, and never with `batch_invariant`:
    without that a row is summed in the same order whatever the tile.

    Examples
    --------
    >>> choose_hopper(1024, 6144, 4096, 132)
    HopperConfig(tile_m=128, tile_n=192, cluster_m=2, cluster_n=1, cluster_k=1)
    """
    steps = ceil_div(k, _TILE_K)
    choices = [
        config
        for config in HOPPER_CONFIGS
        if config.cluster_k == 1
        or (
            not batch_invariant
            and steps >= 2 * config.cluster_k
            and config.waves(m, n, sm_count) == 1
        )
    ]

    def estimate(config: HopperConfig) -> float:
        cost = HOPPER_CONFIGS[config]
        tile = cost.tile + cost.step * ceil_div(steps, config.cluster_k)
        return cost.launch + config.waves(m, n, sm_count) * tile

    return min(choices, key=estimate)


def launch_hopper(
    config: HopperConfig, x: Any, weight: Any, out: Any, epilogue: dict[str, Any], vector: int
) -> None:
    """Launch on CuPy arrays; `vector` is 2, 1 or 0 if results move 8, 4 or 1 elements at a time."""
    (m, k), n, dtype = x.shape, weight.shape[0], dtype_name(x.dtype)
    clusters = config.clusters(m, n)
    if config.cluster_k == 1:  # persistent
        clusters = min(clusters, config.max_clusters(sm_count()))
    _KERNEL.launch(
        config.spec(dtype),
        (clusters * config.cluster_size,),
        (config.threads,),
        config.shared_bytes,
        cluster=1,  # the module says how large they are
        overlap=True,  # the kernel waits before it touches global memory
        map_x=tensor_map_2d(x, dtype, (config.tile_m // config.cluster_n, _TILE_K)),
        map_w=tensor_map_2d(weight, dtype, (config.tile_n // config.cluster_m, _TILE_K)),
        m=m,
        n=n,
        k=k,
        group=_BAND,
        is_vector=vector,
        **epilogue,
    )
