"""KV pages: keys and values of all layers in one slab."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine import dtypes
from engine.cache.memory_pool import MemoryPool
from engine.checks import is_integer, shown
from engine.device import CPU, Device
from engine.errors import ConfigError, ContractError

__all__ = [
    "BLOCK_SIZES",
    "KV_CACHE_DTYPES",
    "KVCache",
    "KVGeometry",
    "kv_dtype",
    "quantized_kv_dtype",
]

BLOCK_SIZES = (16, 32, 64, 128)
"""Allowed numbers of tokens per block."""

KV_CACHE_DTYPES = ("auto", *dtypes.KV_CODE_DTYPES)
"""Allowed values of `kv_cache_dtype`."""


def _is_block_size(value: object) -> bool:
    return is_integer(value) and value in BLOCK_SIZES


def kv_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """Return the page dtype for the option `kv_cache_dtype` and activations of `dtype`.

    Raises
    ------
    ConfigError
        If `kv_cache_dtype` is not in KV_CACHE_DTYPES.

    Examples
    --------
    >>> kv_dtype("auto", "bfloat16"), kv_dtype("fp8", "bfloat16")
    ('bfloat16', 'fp8')
    """
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in KV_CACHE_DTYPES:
        wanted = ", ".join(map(repr, KV_CACHE_DTYPES))
        raise ConfigError(f"kv_cache_dtype must be one of {wanted}; got {shown(kv_cache_dtype)}")
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def quantized_kv_dtype(kv_cache_dtype: str) -> str:
    """Return `kv_cache_dtype`, checked to be the dtype of a quantized KV cache.

    Raises
    ------
    ConfigError
        If it is not such a dtype.

    Examples
    --------
    >>> quantized_kv_dtype("int8")
    'int8'
    """
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in dtypes.KV_CODE_DTYPES:
        wanted = " or ".join(map(repr, dtypes.KV_CODE_DTYPES))
        raise ConfigError(f"kv_cache_dtype must be {wanted}; got {shown(kv_cache_dtype)}")
    return kv_cache_dtype


@dataclass(frozen=True)
class KVGeometry:
    """Shape and dtype of one block. The dtype may be one of KV_CODE_DTYPES.

    Examples
    --------
    >>> KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16").bytes_per_token
    23040
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not _is_block_size(self.block_size):
            got = shown(self.block_size)
            raise ConfigError(f"block_size must be one of {BLOCK_SIZES}; got {got}")
        dtypes.page_dtype(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        itemsize = dtypes.page_dtype(self.dtype).itemsize
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        return self.bytes_per_token * self.block_size


class Workers(Protocol):
    """The other ranks: each holds a cache with the same blocks, and repeats every move in it."""

    def move_blocks(self, moves: Any) -> None:
        """Announce a step's block `Moves`."""

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Announce copies of single tokens."""

    def close(self) -> None:
        """End the other ranks."""


class KVCache:
    """The slab of pages, shape (num_layers, 2, num_blocks, K, block_size, D).

    Parameters
    ----------
    geometry : KVGeometry
        Layers, kv heads, head dim, block size, dtype.
    num_blocks : int
        Number of blocks, at least 1.
    pool : MemoryPool, optional
        Pool that allocates the slab; by default a new one on the CPU.
    name : str
        Name of the slab in the pool.

    Attributes
    ----------
    workers : Workers or None
        Other ranks; every move is announced to them before it runs here.

    Examples
    --------
    >>> cache = KVCache(KVGeometry(num_layers=2, num_kv_heads=3, head_dim=8), num_blocks=5)
    >>> k_pages, v_pages = cache.layer(1)
    >>> k_pages.shape
    (5, 3, 16, 8)
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        pool: MemoryPool | None = None,
        name: str = "kv",
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1; got {num_blocks}")
        g = geometry
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.pool = pool or MemoryPool(CPU)
        self._name = name
        self.workers: Workers | None = None
        # Zero-filled, because kernels may load a whole block and mask the slots past the sequence.
        self.slab = self.pool.allocate(
            name,
            (g.num_layers, 2, num_blocks, g.num_kv_heads, g.block_size, g.head_dim),
            dtypes.page_dtype(g.dtype),
        )

    @property
    def device(self) -> Device:
        """Device of the pages."""
        return self.pool.device

    @property
    def is_closed(self) -> bool:
        """Tell whether the slab was freed."""
        return not self.slab.size

    def layer(self, index: int) -> tuple[Any, Any]:
        """Return (k_pages, v_pages) of a layer, views of shape (num_blocks, K, block_size, D)."""
        return self.slab[index, 0], self.slab[index, 1]

    @property
    def layers(self) -> list[tuple[Any, Any]]:
        """(k_pages, v_pages) of every layer."""
        return [self.layer(index) for index in range(self.geometry.num_layers)]

    @property
    def flat_pages(self) -> Any:
        """All pages as (2 * num_layers, num_blocks, K, block_size, D), for copies of blocks."""
        return self.slab.reshape(-1, *self.slab.shape[2:])

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the keys and values of single tokens in all layers; every read precedes every write.

        Parameters
        ----------
        sources, targets : sequence of int
            Slots, ``block_id * block_size + offset``.
        """
        if self.workers is not None:
            self.workers.move_slots(sources, targets)
        xp = self.device.xp
        size = self.geometry.block_size
        by_slot = self.flat_pages.transpose(1, 3, 0, 2, 4)
        read, write = (divmod(np.array(slots, np.int64), size) for slots in (sources, targets))
        moved = by_slot[xp.asarray(read[0]), xp.asarray(read[1])]
        by_slot[xp.asarray(write[0]), xp.asarray(write[1])] = moved

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks` with NaN, so that reading a freed block shows in the output (debug mode).

        Integer codes have no NaN: they are filled with a code that quantization never writes.
        """
        if blocks:
            codes = dtypes.KV_CODE_DTYPES.get(self.geometry.dtype)
            value = codes.poison if codes else math.nan
            self.flat_pages[:, self.device.xp.asarray(blocks)] = value

    def check_blocks(self, blocks: Sequence[int], what: str = "block table") -> None:
        """Check that all ids are in the pool (debug mode, before a launch).

        Raises
        ------
        ContractError
            If an id is outside [0, num_blocks); the message names the first one.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ContractError(
                    f"{what} must hold block ids in [0, {self.num_blocks}); got {block}"
                )

    def close(self) -> None:
        """Return the slab to the pool; a second call does nothing."""
        if self.workers is not None:
            self.workers.close()
        if not self.is_closed:
            self.pool.free(self._name)
        self.slab = np.empty((self.geometry.num_layers, 2, 0, 0, 0, 0))
