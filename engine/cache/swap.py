"""Swapped blocks in host memory, and their copies to and from the device.

On CUDA the host blocks are pinned. The blocks of a swap are scattered over the pages, one piece per
layer; one kernel packs them on the device, and DMA moves the packed buffer on a side stream while
the main stream continues. Swapping in is the reverse:

    out:  main stream   pack -> (event) -> continues
          side stream              DMA to the host
    in:   side stream   DMA from the host (starts at once, overlapping the main stream's work)
          main stream             (event) -> unpack -> continues

The main stream waits for DMA only when it needs the blocks or the buffer. On the CPU the same calls
copy between NumPy slabs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from engine import dtypes, kernels
from engine.cache.kv_cache import KVCache
from engine.cache.pinned_memory import check_host_memory, pinned_array
from engine.cache.state_slots import SlotMoves
from engine.device import cupy
from engine.errors import ConfigError, ContractError, OutOfMemoryError

__all__ = ["Moves", "SwapSpace", "move_blocks"]

Pairs = Sequence[tuple[int, int]]

# Size of each of the two buffers, large enough to saturate the link. A buffer is packed completely
# before its DMA starts, so a larger one would start later.
_BUFFER_BYTES = 64 << 20


class Moves(Protocol):
    """The block moves of a step, as in `ScheduleOutput`."""

    swap_out: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    freed_blocks: list[int]
    slot_moves: SlotMoves | None


def move_blocks(kv: KVCache, swap: SwapSpace | None, moves: Moves) -> None:
    """Execute a step's block moves, ordered so that no move overwrites a block still to be read.

    Raises
    ------
    ConfigError
        If the step swaps blocks and `swap` is None.
    """
    if swap is None and (moves.swap_out or moves.swap_in):
        raise ConfigError("swap must be a SwapSpace for a step that swaps blocks; got None")
    if kv.workers is not None:
        kv.workers.move_blocks(moves)
    if swap is not None:
        swap.swap_blocks_to_cpu(moves.swap_out)
    if moves.copies:
        pairs = kv.device.xp.asarray(np.array(moves.copies, np.int32))
        for slab in kv.flat_pages:
            kernels.kv_copy(slab, pairs)
    if swap is not None:
        swap.swap_blocks_from_cpu(moves.swap_in)
    kv.poison(moves.freed_blocks)
    if moves.slot_moves is not None:
        _move_states(kv, swap, moves.slot_moves)


def _move_states(kv: KVCache, swap: SwapSpace | None, moves: SlotMoves) -> None:
    """Execute a step's moves of state slots, in the order of `move_blocks`."""
    if swap is not None:
        swap.swap_states_to_cpu(moves.swap_out)
    if moves.copies:
        pairs = kv.device.xp.asarray(np.array(moves.copies, np.int32))
        for slab in kv.flat_states:
            kernels.kv_copy(slab, pairs)
    if swap is not None:
        swap.swap_states_from_cpu(moves.swap_in)
    kv.poison_states(moves.freed)


class SwapSpace:
    """Host blocks, and host state slots, for one KV cache.

    Parameters
    ----------
    kv : KVCache
        The pages and states on the device.
    num_blocks : int
        Number of host blocks, at least 1; `SchedulerConfig.num_host_blocks`.
    num_slots : int
        Number of host state slots.
    buffer_bytes : int
        Size of each of the two device buffers, rounded down to whole blocks. Unused on the CPU.

    Attributes
    ----------
    blocks : array (num_blocks, values per block), NumPy
        The host blocks. On CUDA, call `synchronize` before reading them.

    Raises
    ------
    OutOfMemoryError
        If host memory is too small.

    Examples
    --------
    >>> from engine.cache.kv_cache import KVGeometry
    >>> kv = KVCache(KVGeometry.uniform(num_layers=1, num_kv_heads=1, head_dim=8), num_blocks=4)
    >>> swap = SwapSpace(kv, num_blocks=2)
    >>> kv.slab[:, :, 3] = 7.0
    >>> swap.swap_blocks_to_cpu([(3, 0)])
    >>> swap.swap_blocks_from_cpu([(0, 1)])
    >>> float(kv.slab[:, :, 1].min())
    7.0
    """

    def __init__(
        self,
        kv: KVCache,
        num_blocks: int,
        *,
        num_slots: int = 0,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks of a SwapSpace must be at least 1; got {num_blocks}")
        g = kv.geometry
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        num_bytes = num_blocks * g.bytes_per_block + num_slots * g.bytes_per_slot
        check_host_memory(num_bytes, "host blocks", "lower swap_space_gb")
        self._blocks = _HostTier(
            kv, "swap buffers", kv.flat_pages, kv.num_blocks, num_blocks, buffer_bytes
        )
        try:
            self._states = _HostTier(
                kv, "state swap buffers", kv.flat_states, kv.num_slots, num_slots, buffer_bytes
            )
        except BaseException:
            self._blocks.close()  # the pool of its buffers outlives this object
            raise

    @property
    def blocks(self) -> np.ndarray[Any, Any]:
        """The host blocks."""
        return self._blocks.host

    def swap_blocks_to_cpu(self, pairs: Pairs) -> None:
        """Copy (device block, host block) pairs to the host; later work on the stream may overwrite
        the device blocks.

        Raises
        ------
        ContractError
            If an id is outside its pool, or a host block occurs twice.
        """
        self._blocks.to_host(pairs)

    def swap_blocks_from_cpu(self, pairs: Pairs) -> None:
        """Copy (host block, device block) pairs to the device; later work on the stream sees them.

        Raises
        ------
        ContractError
            If an id is outside its pool, or a device block occurs twice.
        """
        self._blocks.from_host(pairs)

    def swap_states_to_cpu(self, pairs: Pairs) -> None:
        """Copy (device slot, host slot) pairs to the host. See `swap_blocks_to_cpu`."""
        self._states.to_host(pairs)

    def swap_states_from_cpu(self, pairs: Pairs) -> None:
        """Copy (host slot, device slot) pairs to the device. See `swap_blocks_from_cpu`."""
        self._states.from_host(pairs)

    def synchronize(self) -> None:
        """Wait until all copies are done (a no-op on the CPU)."""
        self._blocks.synchronize()
        self._states.synchronize()

    def close(self) -> None:
        """Free host memory and buffers."""
        self._blocks.close()
        self._states.close()


class _HostTier:
    """Host copies of the blocks of some slabs, or of their state slots; each is contiguous.

    Parameters
    ----------
    kv : KVCache
    name : str
        Name of the device buffers in the pool.
    slabs : list of array (A, N, 1, 1, n)
        Device arrays, of one dtype; none in a pipeline stage whose layers have no such arrays.
    num_device_ids : int
        N.
    num_ids : int
        Number of blocks or slots on the host.
    buffer_bytes : int
        Size of a device buffer.
    """

    def __init__(
        self,
        kv: KVCache,
        name: str,
        slabs: list[Any],
        num_device_ids: int,
        num_ids: int,
        buffer_bytes: int,
    ) -> None:
        self.slabs = slabs
        self._num_device_ids = num_device_ids
        width = sum(slab.shape[0] * slab.shape[-1] for slab in slabs)
        dtype = dtypes.page_dtype(kv.geometry.dtype)
        has_lane = kv.device.is_cuda and width * num_ids > 0
        self.host = _host_array((num_ids, width), dtype, pinned=has_lane)
        self._lane = _DmaLane(kv, name, self, buffer_bytes) if has_lane else None

    def to_host(self, pairs: Pairs) -> None:
        """Copy (device id, host id) pairs."""
        self._check(pairs, self._num_device_ids, len(self.host))
        if self._lane is not None:
            self._lane.to_host(pairs)
        elif pairs:
            self.pack(self.host, np.array(pairs, np.int32))

    def from_host(self, pairs: Pairs) -> None:
        """Copy (host id, device id) pairs."""
        self._check(pairs, len(self.host), self._num_device_ids)
        if self._lane is not None:
            self._lane.from_host(pairs)
        elif pairs:
            self.unpack(self.host, np.array(pairs, np.int32))

    def pack(self, packed: Any, pairs: Any) -> None:
        """Copy from the slabs into `packed` (n, width); pairs (n, 2) of (id, row of packed)."""
        for slab, part in zip(self.slabs, self._parts(packed), strict=True):
            kernels.kv_swap(slab, part, pairs)

    def unpack(self, packed: Any, pairs: Any) -> None:
        """Copy from `packed` into the slabs; pairs (n, 2) of (row of packed, id)."""
        for slab, part in zip(self.slabs, self._parts(packed), strict=True):
            kernels.kv_swap(part, slab, pairs)

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        if self._lane is not None:
            self._lane.synchronize()

    def close(self) -> None:
        """Free host memory and buffers."""
        if self._lane is not None:
            self._lane.close()
        self.host = self.host[:0].copy()
        self.slabs = []

    def _parts(self, packed: Any) -> Iterator[Any]:
        """Yield the part of each slab in packed rows, (A, rows, 1, 1, n)."""
        start = 0
        for slab in self.slabs:
            count = slab.shape[0]
            stop = start + count * slab.shape[-1]
            yield packed[:, start:stop].reshape(len(packed), count, 1, 1, -1).swapaxes(0, 1)
            start = stop

    def _check(self, pairs: Pairs, num_sources: int, num_targets: int) -> None:
        for source, target in pairs:
            if not (0 <= source < num_sources and 0 <= target < num_targets):
                raise ContractError(
                    f"pairs must hold block ids below ({num_sources}, {num_targets}); "
                    f"got {(source, target)}"
                )
        if len({target for _, target in pairs}) < len(pairs):
            raise ContractError(f"pairs must write each block at most once; got {list(pairs)}")


class _DmaLane:
    """A side stream for DMA, and two device buffers of packed blocks or slots.

    SAFETY: a buffer is filled only after the event `_emptied` of its last use, and emptied only
    after `_filled`. All DMA runs on one side stream, so host blocks are read and written in the
    order of the calls.
    """

    def __init__(self, kv: KVCache, name: str, tier: _HostTier, buffer_bytes: int) -> None:
        self._kv = kv
        self._name = name
        self._tier = tier
        self._cp = cp = kv.device.xp
        self._host = host = tier.host
        self._row_bytes = int(host[0].nbytes)
        self._capacity = min(max(1, buffer_bytes // self._row_bytes), len(host))
        shape = (2, self._capacity, host.shape[1])
        self._buffers = kv.pool.allocate(name, shape, host.dtype)
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._filled = [cp.cuda.Event(disable_timing=True) for _ in range(2)]
        self._emptied = [cp.cuda.Event(disable_timing=True) for _ in range(2)]
        self._turn = 0

    def to_host(self, pairs: Pairs) -> None:
        main = self._cp.cuda.get_current_stream()
        for turn, chunk in self._chunks([(host, device) for device, host in pairs]):
            buffer = self._buffers[turn]
            main.wait_event(self._emptied[turn])
            self._pack([(device, index) for index, (_, device) in enumerate(chunk)], buffer)
            self._filled[turn].record(main)
            self._stream.wait_event(self._filled[turn])
            for index, host, count in _runs([host for host, _ in chunk]):
                self._dma(self._host_ptr(host), buffer[index].data.ptr, count, to_host=True)
            self._emptied[turn].record(self._stream)

    def from_host(self, pairs: Pairs) -> None:
        main = self._cp.cuda.get_current_stream()
        for turn, chunk in self._chunks(pairs):
            buffer = self._buffers[turn]
            self._stream.wait_event(self._emptied[turn])
            for index, host, count in _runs([host for host, _ in chunk]):
                self._dma(buffer[index].data.ptr, self._host_ptr(host), count, to_host=False)
            self._filled[turn].record(self._stream)
            main.wait_event(self._filled[turn])
            self._unpack(buffer, [(index, device) for index, (_, device) in enumerate(chunk)])
            self._emptied[turn].record(main)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()
        del self._buffers
        self._kv.pool.free(self._name)

    def _chunks(self, pairs: Pairs) -> Iterator[tuple[int, Pairs]]:
        """Yield (buffer, pairs) by ascending host block, so that adjacent blocks share one copy."""
        ordered = sorted(pairs)
        for at in range(0, len(ordered), self._capacity):
            self._turn ^= 1
            yield self._turn, ordered[at : at + self._capacity]

    def _pack(self, pairs: Pairs, buffer: Any) -> None:
        ids = self._cp.asarray(np.array(pairs, np.int32))
        self._tier.pack(buffer, ids)

    def _unpack(self, buffer: Any, pairs: Pairs) -> None:
        ids = self._cp.asarray(np.array(pairs, np.int32))
        self._tier.unpack(buffer, ids)

    def _host_ptr(self, row: int) -> int:
        return int(self._host.ctypes.data) + row * self._row_bytes

    def _dma(self, target: int, source: int, num_rows: int, *, to_host: bool) -> None:
        runtime = self._cp.cuda.runtime
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        size = num_rows * self._row_bytes
        runtime.memcpyAsync(target, source, size, kind, self._stream.ptr)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index, id, length) of each run of consecutive ids.

    Examples
    --------
    >>> list(_runs([4, 5, 6, 9]))
    [(0, 4, 3), (3, 9, 1)]
    """
    first = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[index - 1] + 1:
            yield first, ids[first], index - first
            first = index


def _host_array(
    shape: tuple[int, ...], dtype: np.dtype[Any], *, pinned: bool
) -> np.ndarray[Any, Any]:
    """Return an uninitialised host array, in page-locked memory if `pinned`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if pinned:
        return pinned_array(num_bytes, cupy()).view(dtype).reshape(shape)
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"swap_space_gb must fit in the host's memory; {num_bytes} bytes did not ({error})"
        ) from error
