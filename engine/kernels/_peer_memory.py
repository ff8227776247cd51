"""Peer memory: buffers that the ranks of a group write into each other over NVLink or PCIe.

A rank's `PeerMemory` holds three buffers, which its peers write, and a `PeerGroup` struct
(`cuda_src/common/peer_memory.cuh`) with the addresses of all ranks' buffers. The caller
exchanges the addresses and passes them to `PeerMemory.connect`. `connected_ranks` builds a group
inside one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import device
from engine.errors import ContractError
from engine.kernels._chip import sm_count
from engine.kernels._contract import Contract
from engine.kernels._elementwise import VECTOR_BYTES
from engine.kernels._launch import ceil_div

__all__ = ["MAX_RANKS", "MissingRank", "PeerConfig", "PeerMemory", "Sent", "choose_threads"]
__all__ += ["checked_parts", "connected_ranks", "peer_memory"]

MAX_RANKS = 8
NUM_BUFFERS = 3
OPS = {1: "all_reduce", 2: "all_reduce_rmsnorm", 3: "all_gather"}  # keyed by kOp in CUDA
_EMPTY = 0x80000000

# Struct PeerGroup of cuda_src/common/peer_memory.cuh.
_GROUP = np.dtype(
    [
        ("buffers", np.uint64, MAX_RANKS),
        ("call", np.uint32),
        ("num_arrived", np.uint32),
        ("num_used", np.uint32),
        ("has_failed", np.uint32),
        ("rank", np.int32),
        ("size", np.int32),
        ("capacity", np.int64),
        ("timeout", np.int64),
        ("host_error", np.uint64),
    ]
)


@dataclass(frozen=True)
class MissingRank:
    """Rank that did not arrive, and the call (counted from 0) and op that timed out."""

    rank: int
    call: int
    op: str


@dataclass(frozen=True)
class PeerConfig:
    """Launch size of a collective: blocks, and threads per block."""

    blocks: int
    threads: int


@dataclass(frozen=True)
class Sent:
    """First `num_sent` of an array's `size` elements, sent by a product for the next call."""

    size: int
    num_sent: int


def choose_threads(num_vectors: int, max_blocks: int) -> PeerConfig:
    """Choose the launch for `num_vectors` vectors of 16 bytes, with at most `max_blocks` blocks.

    Tuned with ``python -m tests.bench all_reduce``: few vectors use few blocks, many vectors as
    many threads as saturate the link.

    Examples
    --------
    >>> choose_threads(512, 264), choose_threads(1 << 20, 264)
    (PeerConfig(blocks=2, threads=256), PeerConfig(blocks=264, threads=512))
    """
    threads = 256 if num_vectors <= 2 * 256 * max_blocks else 512
    return PeerConfig(max(1, min(max_blocks, ceil_div(num_vectors, threads))), threads)


class PeerMemory:
    """Peer memory of one rank, on the current device.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks (at most 8).
    capacity : int
        Bytes per buffer, below 2 GiB; a buffer receives everything the peers send in one call.
    timeout : float
        Seconds a call waits for a peer.
    max_blocks : int, optional
        Maximum blocks per launch, by default two per multiprocessor. If ranks share a device, their
        launches must be resident together.

    Attributes
    ----------
    address : int
        Address of the buffers, for the peers.
    group : cupy.ndarray
        The `PeerGroup`.
    sent : Sent or None
        What a product launched with `peers` has sent; see `begin_sending` and `take_sent`.
    """

    def __init__(
        self, rank: int, size: int, *, capacity: int, timeout: float, max_blocks: int | None = None
    ) -> None:
        call = Contract("PeerMemory")
        call.check("size", 1 <= size <= MAX_RANKS, f"from 1 to {MAX_RANKS}", size)
        call.check("rank", 0 <= rank < size, f"from 0 to {size - 1}", rank)
        call.number("timeout", timeout, low=0.0)
        call.number("capacity", capacity, low=VECTOR_BYTES, high=2**31 - 1)
        cupy = device.cupy()
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.sent: Sent | None = None
        self.capacity = capacity // VECTOR_BYTES
        self.device = int(cupy.cuda.runtime.getDevice())
        self.max_blocks = max_blocks or 2 * sm_count()
        num_bytes = NUM_BUFFERS * self.capacity * VECTOR_BYTES
        # Not from CuPy's pool: other processes can map only whole allocations of the driver.
        self.address = int(cupy.cuda.runtime.malloc(max(num_bytes, 2 << 20)))
        self._release = weakref.finalize(self, _free, self.device, self.address)
        self._release.atexit = False  # at exit the driver frees it; the runtime may be gone
        memory = cupy.cuda.UnownedMemory(self.address, num_bytes, self, self.device)
        words = cupy.ndarray(num_bytes // 4, np.uint32, cupy.cuda.MemoryPointer(memory, 0))
        words.fill(_EMPTY)
        self.group = cupy.zeros(_GROUP.itemsize, np.uint8)
        self._host = cupy.cuda.alloc_pinned_memory(VECTOR_BYTES)
        self._error = np.frombuffer(self._host, np.uint32, 4)
        self._error[:] = 0
        cupy.cuda.get_current_stream().synchronize()

    def connect(self, addresses: Sequence[int]) -> None:
        """Set the addresses of all ranks' buffers, as mapped in this process, in rank order.

        NOTE: no rank may call a collective before all ranks have constructed their memory.
        """
        line = np.zeros((), _GROUP)
        line["buffers"][: self.size] = addresses
        line["rank"] = self.rank
        line["size"] = self.size
        line["capacity"] = self.capacity
        line["timeout"] = int(self.timeout * 1e9)
        line["host_error"] = self._host.ptr
        self.group.set(np.frombuffer(line.tobytes(), np.uint8))
        device.cupy().cuda.get_current_stream().synchronize()

    def missing(self) -> MissingRank | None:
        """Return the rank that did not arrive, or None; reads host memory only."""
        if not self._error[0]:
            return None
        rank, call, op = (int(value) for value in self._error[:3])
        return MissingRank(rank - 1, call, OPS[op])

    def begin_sending(self, x: Any, num_rows: int) -> None:
        """Note that a product sends the first rows of its result `x` (M, N) for the next call.

        Raises
        ------
        ContractError
            If the result of another product has not been summed yet.
        """
        if self.sent is not None:
            raise ContractError(
                f"peers: must have summed the result of {self.sent.size} elements of which rows "
                f"have been sent; got another result of {x.size} elements"
            )
        self.sent = Sent(x.size, num_rows * x.shape[1])

    def take_sent(self, op: str, x: Any = None) -> int:
        """Return how many elements of `x` have been sent for the call of `op` to be launched now.

        Raises
        ------
        ContractError
            If a part of an array of another size has been sent: its sum must come first. Every
            later call raises it, too, since the buffers hold that part.
        """
        # The address is not compared: a replayed launch plan writes to another one.
        sent = self.sent
        if sent is None:
            return 0
        size = None if x is None else x.size
        if size != sent.size:
            raise ContractError(
                f"{op}: x: must be the array that a product has begun to send, of {sent.size} "
                f"elements; got {'another op' if size is None else f'{size} elements'}"
            )
        self.sent = None
        return sent.num_sent

    def abort(self) -> None:
        """Make waiting and later calls return NaN; callable from any thread.

        The flag is copied on a separate stream, so that it reaches a kernel that is waiting.
        """
        cupy = device.cupy()
        with cupy.cuda.Device(self.device):
            stream = cupy.cuda.Stream(non_blocking=True)
            self._error[3] = 1  # source of the flag; `missing` does not read this word
            source = self._host.ptr + 3 * self._error.itemsize
            target = int(self.group.data.ptr) + _GROUP.fields["has_failed"][1]  # type: ignore[index]
            kind = cupy.cuda.runtime.memcpyHostToDevice
            cupy.cuda.runtime.memcpyAsync(target, source, 4, kind, stream.ptr)
            stream.synchronize()

    def close(self) -> None:
        """Free the buffers. SAFETY: no rank may write to them afterwards."""
        self._release()


def _free(index: int, address: int) -> None:
    cupy = device.cupy()
    with cupy.cuda.Device(index):
        cupy.cuda.runtime.free(address)


def connected_ranks(
    devices: Sequence[int], *, capacity: int, timeout: float, max_blocks: int | None = None
) -> list[PeerMemory]:
    """Return a connected group inside this process: rank r on device `devices[r]`.

    Ranks that share a device need separate streams, and few enough blocks to be resident
    together. A thread that launches for several ranks must load all kernels first: loading a
    module waits for the launches of one rank, and those wait for the other ranks.
    """
    cupy = device.cupy()
    ranks = []
    for rank, index in enumerate(devices):
        with cupy.cuda.Device(index):
            for other in set(devices) - {index}:
                _enable_peer_access(cupy, other)
            ranks.append(
                PeerMemory(
                    rank, len(devices), capacity=capacity, timeout=timeout, max_blocks=max_blocks
                )
            )
    for memory in ranks:
        with cupy.cuda.Device(memory.device):
            memory.connect([other.address for other in ranks])
    return ranks


def _enable_peer_access(cupy: Any, other: int) -> None:
    try:
        cupy.cuda.runtime.deviceEnablePeerAccess(other)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "AlreadyEnabled" not in str(error):
            raise


def checked_parts(call: Contract, x: Any, peers: Any) -> list[Any]:
    """Check `peers` for NumPy: the arrays of all ranks, with the shape and dtype of `x`."""
    call.check(
        "peers", isinstance(peers, list | tuple) and len(peers) > 0, "a list of arrays", peers
    )
    shape = " ".join(map(str, x.shape))
    return [call.array(f"peers[{r}]", part, shape, x.dtype) for r, part in enumerate(peers)]


def peer_memory(call: Contract, x: Any, peers: Any) -> PeerMemory:
    """Check `peers` for CuPy: a `PeerMemory` on the device of `x`."""
    call.check("peers", isinstance(peers, PeerMemory), "a PeerMemory", type(peers).__name__)
    memory: PeerMemory = peers
    call.check("peers", memory.device == x.device.id, f"on cuda:{x.device.id}", memory.device)
    return memory
