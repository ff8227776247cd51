"""Collectives on CuPy arrays between GPUs of one host: ranks write into each other's memory.

The kernels are the ops `all_reduce`, `all_reduce_rmsnorm` and `all_gather`. This module maps the
buffers of the other ranks' processes (CUDA IPC). No argument of a launch ever changes, so launches
can be captured in a graph and recorded in a launch plan.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from engine import device, kernels
from engine.errors import ContractError, DeviceError, RankError
from engine.kernels._contract import FLOATS
from engine.kernels._peer_memory import NUM_BUFFERS, PeerMemory
from engine.layers.collectives import MAX_BUFFERED_BYTES, buffer_capacity

__all__ = ["CudaCollectives"]

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaCollectives:
    """`Collectives` of CuPy arrays on the current device; all calls must use one stream.

    Parameters
    ----------
    rank, size : int
        Number of this rank, and number of ranks: at most 8, each a process with its own GPU.
    exchange : callable
        All-gathers bytes between the processes: returns the bytes passed by each rank, by rank.
    timeout : float
        Seconds that a launched operation waits for a rank. After that its result is NaN, and the
        next call of any method raises RankError.
    max_bytes : int
        Largest array that one launch moves between two ranks; larger arrays take several launches.
        The buffers take three times as much device memory, up to 5.25 times with more ranks.

    Raises
    ------
    DeviceError
        If the devices cannot map each other's memory.
    RankError
        If a rank did not join an earlier operation; names the rank and the operation.

    Examples
    --------
    >>> alone = CudaCollectives(0, 1, lambda data: [data])  # doctest: +SKIP
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Callable[[bytes], list[bytes]],
        *,
        timeout: float = 60.0,
        max_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self._exchange = exchange
        self._mapped: list[int] = []
        capacity = buffer_capacity(size, max_bytes)
        self._memory = PeerMemory(rank, size, capacity=capacity, timeout=timeout)
        runtime = device.cupy().cuda.runtime
        handles = exchange(bytes(runtime.ipcGetMemHandle(self._memory.address)))
        failure = ""
        try:
            self._memory.connect([self._address(r, handle) for r, handle in enumerate(handles)])
        except runtime.CUDARuntimeError as error:
            failure = f"rank {rank} cannot map the memory of another device: {error}"
        # No rank writes before all have mapped the buffers.
        failures = [text.decode() for text in exchange(failure.encode()) if text]
        if failures:
            raise DeviceError("; ".join(failures))

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._memory.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._memory.size

    @property
    def peers(self) -> PeerMemory:
        """This rank's buffers; see `Collectives`."""
        return self._memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers in device memory."""
        return NUM_BUFFERS * self._memory.capacity * 16

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        """Return the sum of all ranks' `x`; see `Collectives`."""
        self.check()
        return kernels.all_reduce(x, self._memory, out=out)

    def all_reduce_rmsnorm(
        self, x: Any, residual: Any, weight: Any, eps: float, *, out: Any = None
    ) -> tuple[Any, Any]:
        """Return (rmsnorm(h) * weight, h), in one launch if the rows fit; see `Collectives`."""
        self.check()
        y, h = kernels.all_reduce_rmsnorm(
            x, self._memory, residual, weight, eps=eps, out=out, residual_out=residual
        )
        return y, h

    def all_gather(self, x: Any, *, axis: int = -1, out: Any = None) -> Any:
        """Return all ranks' `x`, concatenated along `axis`; see `Collectives`.

        A float -0 may arrive as +0. Other dtypes are moved as bytes, which is slower.
        """
        self.check()
        if not -x.ndim <= axis < x.ndim:
            raise ContractError(f"axis must be an axis of x, {x.ndim} of them; got {axis}")
        axis %= x.ndim
        if x.dtype not in FLOATS:
            return self._gather_bytes(x, axis, out)
        outer = math.prod(x.shape[:axis])
        shape = (*x.shape[:axis], self.size * x.shape[axis], *x.shape[axis + 1 :])
        rows = x.reshape(outer, -1) if x.size else x.reshape(outer, 0)
        if out is None:
            return kernels.all_gather(rows, self._memory).reshape(shape)
        if out.shape != shape:
            raise ContractError(f"out of all_gather must have shape {shape}; got {out.shape}")
        kernels.all_gather(rows, self._memory, out=out.reshape(outer, self.size * rows.shape[1]))
        return out

    def broadcast(self, x: Any, *, root: int = 0) -> Any:
        """Overwrite `x` with rank `root`'s; see `Collectives`. All ranks' arrays are moved."""
        self.check()
        if not 0 <= root < self.size:
            raise ContractError(f"root must be a rank below {self.size}; got {root}")
        parts = self._all_bytes(x)
        if root != self.rank and x.size:
            x[...] = parts[root].view(x.dtype).reshape(x.shape)
        return x

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called it and all earlier launches have completed."""
        xp = device.cupy()
        kernels.all_reduce(xp.zeros(1, np.float32), self._memory)
        xp.cuda.get_current_stream().synchronize()
        self.check(f"barrier {name}")

    def check(self, doing: str = "") -> None:
        """Raise RankError if an operation timed out waiting for a rank; reads host memory only.

        Call it when results are read: a failed operation's results are NaN.
        """
        missing = self._memory.missing()
        if missing is not None:
            raise RankError(
                f"rank {missing.rank} did not come to operation {missing.call} ({missing.op}) "
                f"within {self._memory.timeout:g} s, says rank {self.rank}"
                + (f" in {doing}" if doing else "")
            )

    def abort(self) -> None:
        """Abort the operations that wait for a rank; their results and all later ones are NaN."""
        self._memory.abort()

    def close(self) -> None:
        """Unmap the buffers, then free them once all ranks have. A second call does nothing."""
        runtime = device.cupy().cuda.runtime
        device.cupy().cuda.get_current_stream().synchronize()
        for address in self._mapped:
            runtime.ipcCloseMemHandle(address)
        if self._mapped:
            with contextlib.suppress(RankError):  # a rank that has ended writes no more
                self._exchange(b"unmapped")
        self._mapped = []
        self._memory.close()

    def _address(self, rank: int, handle: bytes) -> int:
        if rank == self.rank:
            return self._memory.address
        address = device.cupy().cuda.runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
        self._mapped.append(int(address))
        return int(address)

    def _gather_bytes(self, x: Any, axis: int, out: Any) -> Any:
        parts = [part.view(x.dtype).reshape(x.shape) for part in self._all_bytes(x)]
        whole = device.cupy().concatenate(parts, axis=axis)
        if out is None:
            return whole
        if out.shape != whole.shape or out.dtype != whole.dtype:
            raise ContractError(
                f"out of all_gather must be {whole.dtype} {whole.shape}; "
                f"got {out.dtype} {out.shape}"
            )
        out[...] = whole
        return out

    def _all_bytes(self, x: Any) -> Any:
        """Return the bytes of all ranks' `x`: (size, bytes).

        Each byte is sent as a 16-bit number, so that no pattern is -0, which the kernel may change.
        """
        xp = device.cupy()
        wide = xp.ascontiguousarray(x).reshape(-1).view(np.uint8).astype(np.uint16)
        got = kernels.all_gather(wide.view(np.float16), self._memory)
        return got.view(np.uint16).astype(np.uint8).reshape(self.size, -1)
