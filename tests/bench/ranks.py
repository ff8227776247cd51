"""Time collectives on all GPUs of the host, one process per GPU: `python -m tests.bench.ranks OP
FOLDER RANK SIZE` is one of them.

Calls are timed in a CUDA graph, after a barrier of all ranks; rank 0 reports.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile

import numpy as np

from engine import device
from engine.distributed.cuda_collectives import CudaCollectives
from engine.dtypes import BFLOAT16
from tests.distributed.folder_exchange import FolderExchange

__all__ = ["NCCL_BFLOAT16", "Bench", "measure"]

NCCL_BFLOAT16 = 9  # ncclBfloat16, which CuPy does not name
_MOST_RANKS = 2


def measure(op, chosen):
    """Print and return the rows that `bench_<op>.rows(bench)` yields on rank 0."""
    count = chosen.xp.cuda.runtime.getDeviceCount() if chosen.is_cuda else 0
    if count < 2:
        print(f"{op}: needs two GPUs; there are {count}")
        return []
    size = min(count, _MOST_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.ranks", op, folder]
        ranks = [
            subprocess.Popen([*command, str(r), str(size)], stdout=subprocess.PIPE, text=True)
            for r in range(size)
        ]
        output = ranks[0].communicate()[0]
        for rank in ranks:
            if ranks[0].returncode:
                rank.kill()
            rank.wait()
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    print("\n".join(line for line in output.splitlines() if not line.startswith("{")))
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()))
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{op}: a rank has failed")
    return rows


class Bench:
    """One rank's timer: `group` holds our collectives, `nccl` NCCL's communicator or None."""

    def __init__(self, folder, rank, size):
        self.xp = device.cupy()
        self.xp.cuda.Device(rank).use()
        self.stream = self.xp.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.exchange = FolderExchange(folder, rank, size, timeout=20.0)
        self.group = CudaCollectives(rank, size, self.exchange, timeout=5.0)
        self.rank, self.size = rank, size
        self.nccl = self._nccl()

    def _nccl(self):
        try:
            from cupy.cuda import nccl
        except ImportError:
            return None
        if not nccl.available:
            return None
        unique = nccl.get_unique_id() if self.rank == 0 else b""
        unique = self.exchange(bytes(unique))[0]
        return nccl.NcclCommunicator(self.size, unique, self.rank)

    def values(self, shape):
        """Return a bfloat16 array of small integers, and its sum over all ranks."""
        count = self.xp.arange(int(np.prod(shape)), dtype=np.int32) % 61
        total = self.size * count + sum(range(self.size))
        return [a.astype(BFLOAT16).reshape(shape) for a in (count + self.rank, total)]

    def microseconds(self, call, *, calls=40, replays=5):
        """Return the time per call in a graph of `calls` calls."""
        xp, stream = self.xp, self.stream
        call()
        stream.begin_capture()
        for _ in range(calls):
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        self.group.barrier("before timing")
        self.exchange(b"timing")
        self.group.all_reduce(xp.zeros(1, np.float32))
        start, end = xp.cuda.Event(), xp.cuda.Event()
        start.record(stream)
        for _ in range(replays):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        self.group.check("timing")
        return xp.cuda.get_elapsed_time(start, end) * 1e3 / (calls * replays)


def main():
    op, folder, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    bench = Bench(folder, rank, size)
    for row in importlib.import_module(f"tests.bench.bench_{op}").rows(bench):
        if rank == 0:
            print(json.dumps({"op": op, **row}), flush=True)
    bench.exchange(b"done")


if __name__ == "__main__":
    main()
