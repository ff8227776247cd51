"""Groups of ranks inside one process, for the tests of the collective kernels.

Each rank has its own stream. One device suffices: the ranks' launches are small enough to be
resident together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from engine import device
from engine.kernels._peer_memory import PeerMemory, connected_ranks

__all__ = ["PEER_SIZES", "Ranks"]

PEER_SIZES = (1, 2, 3, 8)
_MAX_BLOCKS = 4


@cache
def _stream(index: int, rank: int) -> Any:
    cupy = device.cupy()
    with cupy.cuda.Device(index):
        return cupy.cuda.Stream(non_blocking=True)


class Ranks:
    """A group of `size` CuPy ranks.

    Parameters
    ----------
    size : int
    capacity : int
        Bytes per buffer.
    timeout : float
        Seconds a call waits for a peer.
    num_devices : int
        Rank r uses device r % num_devices.
    """

    def __init__(
        self, size: int, *, capacity: int = 1 << 20, timeout: float = 10.0, num_devices: int = 1
    ) -> None:
        self.devices = [rank % num_devices for rank in range(size)]
        self.memories: list[PeerMemory] = connected_ranks(
            self.devices, capacity=capacity, timeout=timeout, max_blocks=_MAX_BLOCKS
        )

    @contextmanager
    def on(self, rank: int) -> Iterator[PeerMemory]:
        """Make the rank's device and stream current."""
        index = self.devices[rank]
        with device.cupy().cuda.Device(index), _stream(index, rank):
            yield self.memories[rank]

    def move(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays, one per rank, on the ranks' devices."""
        moved = []
        for rank, array in enumerate(arrays):
            with self.on(rank):
                moved.append(device.cupy().asarray(array))
        return moved

    def run(self, call: Callable[[int, PeerMemory], Any]) -> None:
        """Call ``call(rank, memory)`` for each rank, then wait for all.

        `call` may launch but not allocate: the allocation could wait for a rank that in turn waits
        for another.
        """
        for rank in range(len(self.devices)):
            with self.on(rank) as memory:
                call(rank, memory)
        self.synchronize()

    def captured(self, call: Callable[[int, PeerMemory], Any]) -> list[Any]:
        """Capture `call` once per rank; return the graphs."""
        graphs = []
        for rank in range(len(self.devices)):
            with self.on(rank) as memory:
                stream = device.cupy().cuda.get_current_stream()
                stream.begin_capture()
                call(rank, memory)
                graphs.append(stream.end_capture())
        return graphs

    def replay(self, graphs: Sequence[Any]) -> None:
        """Launch each rank's graph without waiting."""
        for rank, graph in enumerate(graphs):
            with self.on(rank):
                graph.launch(device.cupy().cuda.get_current_stream())

    def synchronize(self) -> None:
        """Wait for all ranks."""
        for rank in range(len(self.devices)):
            with self.on(rank):
                device.cupy().cuda.get_current_stream().synchronize()
