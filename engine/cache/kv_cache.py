"""Pages and states of all layers, in one slab for each shape of array."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine import dtypes
from engine.cache.layer_cache import LayerCache, PageShape, StateShape, layer_caches
from engine.cache.memory_pool import MemoryPool
from engine.checks import is_integer, shown
from engine.config import ModelConfig
from engine.device import CPU, Device
from engine.errors import ConfigError, ContractError
from engine.kernels._attention import BLOCK_SIZES

__all__ = [
    "BLOCK_SIZES",
    "KV_CACHE_DTYPES",
    "KVCache",
    "KVGeometry",
    "kv_dtype",
    "quantized_kv_dtype",
]

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
    """The caches of all layers: shapes and dtypes of pages and states.

    Attributes
    ----------
    layers : tuple of LayerCache
    block_size : int
        Tokens per block.
    dtype : str
        Dtype of all pages; it may be one of KV_CODE_DTYPES.
    state_dtype : str
        The option that the dtypes of the states follow, one of STATE_DTYPES.

    Examples
    --------
    >>> KVGeometry.uniform(num_layers=30, num_kv_heads=3, head_dim=64).bytes_per_token
    46080
    """

    layers: tuple[LayerCache, ...]
    block_size: int = 16
    dtype: str = "float32"
    state_dtype: str = "auto"

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("num_layers must be at least 1; got 0")
        if not _is_block_size(self.block_size):
            got = shown(self.block_size)
            raise ConfigError(f"block_size must be one of {BLOCK_SIZES}; got {got}")
        dtypes.page_dtype(self.dtype)

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: str = "float32",
    ) -> KVGeometry:
        """Return the geometry of layers that all have keys and values of one shape."""
        layers = (LayerCache.attention(num_kv_heads, head_dim),) * num_layers
        return cls(layers, block_size, dtype)

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        dtype: str,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        state_dtype: str = "auto",
    ) -> KVGeometry:
        """Return the geometry of a model's caches.

        Parameters
        ----------
        config : ModelConfig
        dtype : str
            Dtype of the activations.
        block_size : int
        kv_cache_dtype, state_dtype : str
            One of KV_CACHE_DTYPES or `dtype` itself, and one of STATE_DTYPES.

        Raises
        ------
        ConfigError
            If pages of latents would be quantized.
        """
        pages = dtype if kv_cache_dtype == dtype else kv_dtype(kv_cache_dtype, dtype)
        if config.mla is not None and pages != dtype:
            raise ConfigError(
                f"kv_cache_dtype must be 'auto' for {config.model_type}, whose pages hold latents; "
                f"got {kv_cache_dtype!r}"
            )
        return cls(layer_caches(config, dtype, state_dtype), block_size, pages, state_dtype)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in the pages of all layers."""
        values = sum(page.values_per_token for layer in self.layers for page in layer.pages)
        return values * dtypes.page_dtype(self.dtype).itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in the pages of all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in the states of all layers."""
        return sum(state.num_bytes for layer in self.layers for state in layer.states)

    @property
    def has_states(self) -> bool:
        """Tell whether any layer has a state."""
        return any(layer.states for layer in self.layers)


class Workers(Protocol):
    """The other ranks: each holds a cache with the same blocks, and repeats every move in it."""

    def move_blocks(self, moves: Any) -> None:
        """Announce a step's block `Moves`."""

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Announce copies of single tokens."""

    def close(self) -> None:
        """End the other ranks."""


class KVCache:
    """The pages and states of all layers.

    Page arrays of equal shape share a slab (A, num_blocks, K, block_size, D), and state arrays of
    equal shape and dtype a slab (A, num_slots, ...), where A counts the arrays in the order of
    their layers. A block or a slot has the same id in all slabs.

    Parameters
    ----------
    geometry : KVGeometry
        Shapes and dtypes.
    num_blocks : int
        Number of blocks, at least 1.
    pool : MemoryPool, optional
        Pool that allocates the slabs; by default a new one on the CPU.
    name : str
        Name of the slabs in the pool.
    num_slots : int
        Number of state slots; at least 1 if a layer has a state. A pipeline stage without recurrent
        layers counts the slots of the others.

    Attributes
    ----------
    page_slabs, state_slabs : list of array
        The slabs.
    workers : Workers or None
        Other ranks; every move is announced to them before it runs here.
    is_closed : bool
        Whether the slabs were freed. Layers without pages and states have none.

    Examples
    --------
    >>> cache = KVCache(KVGeometry.uniform(num_layers=2, num_kv_heads=3, head_dim=8), num_blocks=5)
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
        num_slots: int = 0,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1; got {num_blocks}")
        if num_slots < geometry.has_states:
            raise ConfigError(f"num_slots must be at least 1 for these layers; got {num_slots}")
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.pool = pool or MemoryPool(CPU)
        self.workers: Workers | None = None
        self.is_closed = False
        self._names: list[str] = []
        counts = Counter(shape for layer in geometry.layers for shape in layer.arrays)
        try:
            slabs = {shape: self._allocate(name, shape, count) for shape, count in counts.items()}
        except BaseException:
            self._free()  # the pool outlives this cache
            raise
        self.page_slabs = [slab for shape, slab in slabs.items() if isinstance(shape, PageShape)]
        self.state_slabs = [slab for shape, slab in slabs.items() if isinstance(shape, StateShape)]
        self._layers: list[tuple[Any, ...]] = []
        unused = {shape: iter(slab) for shape, slab in slabs.items()}
        for layer in geometry.layers:
            own = tuple(next(unused[shape]) for shape in layer.arrays)
            self._layers.append(own if layer.source is None else self._layers[layer.source])

    @property
    def device(self) -> Device:
        """Device of the slabs."""
        return self.pool.device

    @property
    def slab(self) -> Any:
        """All pages as (num_layers, 2, num_blocks, K, block_size, D).

        Only if every layer has keys and values of one shape.
        """
        [pages] = self.page_slabs
        return pages.reshape(self.geometry.num_layers, 2, *pages.shape[1:])

    def layer(self, index: int) -> tuple[Any, ...]:
        """Return the arrays of a layer, as its `LayerCache` orders them.

        Pages are (num_blocks, K, block_size, D), states (num_slots, ...).
        """
        return self._layers[index]

    @property
    def layers(self) -> list[tuple[Any, ...]]:
        """The arrays of every layer. See `layer`."""
        return list(self._layers)

    @property
    def flat_pages(self) -> list[Any]:
        """The page slabs as (A, num_blocks, 1, 1, values per block), for copies of blocks."""
        return [slab.reshape(*slab.shape[:2], 1, 1, -1) for slab in self.page_slabs]

    @property
    def flat_states(self) -> list[Any]:
        """The state slabs as (A, num_slots, 1, 1, n), for copies of slots.

        They are viewed in the pages' dtype: a step's copies then need one kernel for both.
        """
        dtype = dtypes.page_dtype(self.geometry.dtype)
        slabs = [slab.reshape(*slab.shape[:2], 1, 1, -1) for slab in self.state_slabs]
        return [slab.view(dtype) for slab in slabs]

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the pages of single tokens in all layers; every read precedes every write.

        Parameters
        ----------
        sources, targets : sequence of int
            Slots, ``block_id * block_size + offset``.
        """
        if self.workers is not None:
            self.workers.move_slots(sources, targets)
        xp = self.device.xp
        size = self.geometry.block_size
        read, write = (
            tuple(map(xp.asarray, divmod(np.array(slots, np.int64), size)))
            for slots in (sources, targets)
        )
        for slab in self.page_slabs:
            by_slot = slab.transpose(1, 3, 0, 2, 4)
            by_slot[write] = by_slot[read]

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill `blocks` with NaN, so that reading a freed block shows in the output (debug mode).

        Integer codes have no NaN: they are filled with a code that quantization never writes.
        """
        if blocks:
            codes = dtypes.KV_CODE_DTYPES.get(self.geometry.dtype)
            value = codes.poison if codes else math.nan
            for slab in self.page_slabs:
                slab[:, self.device.xp.asarray(blocks)] = value

    def poison_states(self, slots: Sequence[int]) -> None:
        """Fill state `slots` with NaN (debug mode)."""
        if slots:
            for slab in self.state_slabs:
                slab[:, self.device.xp.asarray(slots)] = math.nan

    def check_blocks(self, blocks: Sequence[int], what: str) -> None:
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

    def check_slots(self, slots: Sequence[int], what: str) -> None:
        """Check that all ids of state slots are in the pool (debug mode).

        Raises
        ------
        ContractError
            If an id is outside [0, num_slots); the message names the first one.
        """
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ContractError(f"{what} must be in [0, {self.num_slots}); got {slot}")

    def first_slots(self, count: int) -> np.ndarray[Any, Any] | None:
        """Return the ids of the first state slots, (count,) int32; None without states."""
        return np.arange(count, dtype=np.int32) if self.num_slots else None

    def close(self) -> None:
        """Return the slabs to the pool; a second call does nothing."""
        self.is_closed = True
        if self.workers is not None:
            self.workers.close()
        self._free()
        self.page_slabs = [np.empty((0,) * slab.ndim) for slab in self.page_slabs]
        self.state_slabs = [np.empty((0,) * slab.ndim) for slab in self.state_slabs]
        self._layers = []

    def _free(self) -> None:
        while self._names:
            self.pool.free(self._names.pop())

    def _allocate(self, name: str, shape: PageShape | StateShape, count: int) -> Any:
        """Return the slab of `count` arrays of one shape.

        It is zero-filled: kernels may load a whole block and mask the slots past the sequence.
        """
        dtype = shape.dtype if isinstance(shape, StateShape) else self.geometry.dtype
        if isinstance(shape, StateShape):
            sizes: tuple[int, ...] = (self.num_slots, *shape.shape)
        else:
            sizes = self.num_blocks, shape.num_heads, self.geometry.block_size, shape.head_dim
        name = f"{name} {len(self._names)}" if self._names else name
        slab = self.pool.allocate(name, (count, *sizes), dtypes.page_dtype(dtype))
        self._names.append(name)
        return slab
