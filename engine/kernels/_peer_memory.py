"""Memory that the ranks of a group write into each other; `cuda_src/collectives/peer_memory.cuh`.

A rank's `PeerMemory` is three buffers, which its peers write into, and a `PeerGroup` struct with
the addresses of everybody's buffers. How a rank gets the addresses of its peers is not decided
here: `PeerMemory.connect` takes them. `connected_ranks` makes a group inside one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import device
from engine.kernels._chip import sm_count
from engine.kernels._contract import Contract
from engine.kernels._elementwise import VECTOR_BYTES
from engine.kernels._launch import ceil_div

__all__ = ["MAX_RANKS", "MissingRank", "PeerConfig", "PeerMemory", "choose_threads"]
__all__ += ["checked_parts", "connected_ranks", "peer_memory"]

MAX_RANKS = 8
NUM_BUFFERS = 3
OPS = {1: "all_reduce", 2: "all_reduce_rmsnorm", 3: "all_gather"}  # kOp in the sources
_EMPTY = 0x80000000

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
)  # PeerGroup


@dataclass(frozen=True)
class MissingRank:
    """What a rank that waited in vain says: for whom, in which call (from 0) and in which op."""

    rank: int
    call: int
    op: str


@dataclass(frozen=True)
class PeerConfig:
    """How the vectors of a call are spread over threads."""

    blocks: int
    threads: int


def choose_threads(num_vectors: int, max_blocks: int) -> PeerConfig:
    """Choose for `num_vectors` vectors of 16 bytes and at most `max_blocks` blocks.

    Fit with ``python -m tests.bench all_reduce``: few large blocks for few vectors, and for many as
    many threads as are needed to keep the link busy.

    Examples
    --------
    >>> choose_threads(512, 264), choose_threads(1 << 20, 264)
    (PeerConfig(blocks=2, threads=256), PeerConfig(blocks=264, threads=512))
    """
    threads = 256 if num_vectors <= 2 * 256 * max_blocks else 512
    return PeerConfig(max(1, min(max_blocks, ceil_div(num_vectors, threads))), threads)


class PeerMemory:
    """The memory of one rank, on the device that is current.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks, at most 8.
    capacity : int
        Bytes of a buffer, below 2 GiB: what arrives from all peers in a call.
    timeout : float
        Seconds that a call waits for a peer.
    max_blocks : int, optional
        Blocks of a launch; by default two per multiprocessor. Ranks that share a device must all
        fit on it together.

    Attributes
    ----------
    address : int
        Address of the buffers: what peers need.
    group : cupy.ndarray
        The `PeerGroup`.
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
        self.capacity = capacity // VECTOR_BYTES
        self.device = int(cupy.cuda.runtime.getDevice())
        self.max_blocks = max_blocks or 2 * sm_count()
        num_bytes = NUM_BUFFERS * self.capacity * VECTOR_BYTES
        # Not from CuPy's pool: other processes can only map an allocation of the driver's.
        self.address = int(cupy.cuda.runtime.malloc(max(num_bytes, 2 << 20)))
        self._release = weakref.finalize(self, _free, self.device, self.address)
        self._release.atexit = False  # the driver frees it; the runtime may have gone
        memory = cupy.cuda.UnownedMemory(self.address, num_bytes, self, self.device)
        words = cupy.ndarray(num_bytes // 4, np.uint32, cupy.cuda.MemoryPointer(memory, 0))
        words.fill(_EMPTY)
        self.group = cupy.zeros(_GROUP.itemsize, np.uint8)
        self._host = cupy.cuda.alloc_pinned_memory(VECTOR_BYTES)
        self._error = np.frombuffer(self._host, np.uint32, 4)
        self._error[:] = 0
        cupy.cuda.get_current_stream().synchronize()

    def connect(self, addresses: Sequence[int]) -> None:
        """Set the addresses of all ranks' buffers, as this process sees them, in order.

        NOTE: no rank may make a call before all ranks have made their memory.
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
        """Return which rank a call has waited for in vain; reads host memory only."""
        if not self._error[0]:
            return None
        rank, call, op = (int(value) for value in self._error[:3])
        return MissingRank(rank - 1, call, OPS[op])

    def abort(self) -> None:
        """End the calls that wait for a rank, and all later ones, with NaN; any thread may do so.

        The word that says so is copied on a stream of its own, beside a kernel that waits.
        """
        cupy = device.cupy()
        with cupy.cuda.Device(self.device):
            stream = cupy.cuda.Stream(non_blocking=True)
            self._error[3] = 1  # no word of an error: the host knows why
            source = self._host.ptr + 3 * self._error.itemsize
            target = int(self.group.data.ptr) + _GROUP.fields["has_failed"][1]  # type: ignore[index]
            kind = cupy.cuda.runtime.memcpyHostToDevice
            cupy.cuda.runtime.memcpyAsync(target, source, 4, kind, stream.ptr)
            stream.synchronize()

    def close(self) -> None:
        """Free the buffers. SAFETY: no rank may write into them any more."""
        self._release()


def _free(index: int, address: int) -> None:
    cupy = device.cupy()
    with cupy.cuda.Device(index):
        cupy.cuda.runtime.free(address)


def connected_ranks(
    devices: Sequence[int], *, capacity: int, timeout: float, max_blocks: int | None = None
) -> list[PeerMemory]:
    """Make a group inside this process: rank r on device `devices[r]`, which may repeat.

    Ranks of one device run together only on streams of their own and with few blocks. One thread
    that launches for several ranks must have loaded all kernels before: loading one waits for the
    launches of a rank that waits for the others.
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
    """Check `peers` of NumPy arrays: the arrays of all ranks, each like `x`."""
    call.check(
        "peers", isinstance(peers, list | tuple) and len(peers) > 0, "a list of arrays", peers
    )
    shape = " ".join(map(str, x.shape))
    return [call.array(f"peers[{r}]", part, shape, x.dtype) for r, part in enumerate(peers)]


def peer_memory(call: Contract, x: Any, peers: Any) -> PeerMemory:
    """Check `peers` of CuPy arrays: a `PeerMemory` of x's device."""
    call.check("peers", isinstance(peers, PeerMemory), "a PeerMemory", type(peers).__name__)
    memory: PeerMemory = peers
    call.check("peers", memory.device == x.device.id, f"on cuda:{x.device.id}", memory.device)
    return memory
