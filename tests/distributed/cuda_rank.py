"""One process of test_cuda_collectives.py: `python -m tests.distributed.cuda_rank FOLDER RANK SIZE
SCENARIO` prints "ok", or a traceback."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from engine import device, kernels, reference
from engine.device import to_numpy
from engine.distributed.cuda_collectives import CudaCollectives
from engine.errors import RankError
from engine.kernels._launch_plan import making_plan
from engine.testing import cases
from engine.testing.tolerances import assert_close
from tests.distributed.folder_exchange import FolderExchange


def _parts(shape, dtype, size, seed):
    return [cases.normal(shape, dtype, seed=seed + 10 * r) for r in range(size)]


def sums(group, cp):
    """Each operation, with arrays of several sizes, against the mirrors."""
    for seed, dtype in enumerate(cases.DTYPES):
        for shape in ((1,), (3, 63), (5, 4096), (129, 515), (300, 4096)):
            parts = _parts(shape, dtype, group.size, seed)
            want = reference.all_reduce(parts[0], parts)
            x = cp.asarray(parts[group.rank])
            np.testing.assert_array_equal(to_numpy(group.all_reduce(x)), want)
            assert group.all_reduce(x, out=x) is x
            np.testing.assert_array_equal(to_numpy(x), want)
            weight = want.reshape(-1, shape[-1])[0]
            x, residual, scale = cases.to_module(cp, parts[group.rank], want, weight)
            y, h = group.all_reduce_rmsnorm(x, residual, scale, 1e-5)
            wanted = reference.rmsnorm(want, weight, residual=want, eps=1e-5)
            np.testing.assert_array_equal(to_numpy(h), wanted[1])
            assert_close(y, wanted[0], reduction=shape[-1])


def gathers(group, cp):
    """Along any axis, of any dtype; broadcasts; barriers."""
    for seed, dtype in enumerate((*cases.DTYPES, "int32", "int64", "uint8")):
        for axis in (0, 1, -1):
            parts = [
                (100 * cases.normal((6, 5, 10), "float32", seed + 10 * r)).astype(
                    cases.normal((1,), dtype, 0).dtype if dtype in cases.DTYPES else dtype
                )
                for r in range(group.size)
            ]
            x = cp.asarray(parts[group.rank])
            want = np.concatenate(parts, axis=axis)
            np.testing.assert_array_equal(to_numpy(group.all_gather(x, axis=axis)), want)
            out = cp.zeros(want.shape, want.dtype)
            assert group.all_gather(x, axis=axis, out=out) is out
            np.testing.assert_array_equal(to_numpy(out), want)
            root = seed % group.size
            assert group.broadcast(x, root=root) is x
            np.testing.assert_array_equal(to_numpy(x), parts[root])
            group.barrier(f"{dtype} {axis}")


def graphs(group, cp):
    """A graph of sums of changing sizes, and a launch plan run for another array."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        sizes = (4096, 3, 100_000, 1 << 20)
        parts = [_parts((n,), "bfloat16", group.size, n) for n in sizes]
        arrays = [cp.asarray(p[group.rank]) for p in parts]
        outs = [cp.zeros_like(x) for x in arrays]
        for x, out in zip(arrays, outs, strict=True):
            group.all_reduce(x, out=out)
        stream.begin_capture()
        for x, out in zip(arrays, outs, strict=True):
            group.all_reduce(x, out=out)
        graph = stream.end_capture()
        for out in outs:
            out.fill(float("nan"))
        for _ in range(50):
            graph.launch(stream)
        for p, out in zip(parts, outs, strict=True):
            np.testing.assert_array_equal(to_numpy(out), reference.all_reduce(p[0], p))
        x = arrays[2]
        with making_plan() as builder:
            group.all_reduce(x, out=outs[2])
        plan = builder.finish([("x", x.data.ptr, x.nbytes), ("out", outs[2].data.ptr, x.nbytes)])
        doubled = [(2 * p.astype(np.float32)).astype(p.dtype) for p in parts[2]]
        other, result = cp.asarray(doubled[group.rank]), cp.zeros_like(x)
        plan.run([other.data.ptr, result.data.ptr])
        np.testing.assert_array_equal(to_numpy(result), reference.all_reduce(doubled[0], doubled))
        group.check()


def dead(group, cp):
    """The last rank dies; the others say so, within the time-out, and whatever they call."""
    x = cp.ones(5000, np.float32)
    group.all_reduce(x)
    group.barrier("all are here")
    if group.rank == group.size - 1:
        os._exit(9)
    start = time.monotonic()
    assert np.isnan(to_numpy(group.all_reduce(x))).all()
    assert time.monotonic() - start < 8
    said = f"rank {group.size - 1} did not come to operation 2 .all_reduce. within 2 s"
    for call in (
        lambda: group.all_reduce(x),
        lambda: group.all_gather(x),
        lambda: group.broadcast(x),
        lambda: group.barrier("end"),
    ):
        try:
            call()
        except RankError as error:
            assert said.replace(".all_reduce.", "(all_reduce)") in str(error), error
        else:
            raise AssertionError("no RankError")


def main() -> None:
    folder, rank, size, scenario = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    cp = device.cupy()
    cp.cuda.Device(rank % cp.cuda.runtime.getDeviceCount()).use()
    for op in (kernels.all_reduce, kernels.all_gather):
        assert op  # imported before the clock of a scenario starts
    timeout = 2.0 if scenario == "dead" else 30.0
    exchange = FolderExchange(folder, rank, size, timeout=5.0 if scenario == "dead" else 60.0)
    group = CudaCollectives(rank, size, exchange, timeout=timeout, max_bytes=1 << 20)
    # Other ranks would wait for a compiler.
    alone = CudaCollectives(0, 1, lambda data: [data])
    for each in cases.DTYPES:
        x = cp.zeros((1, 64), cases.normal((1,), each, 0).dtype)
        alone.all_reduce(x)
        alone.all_gather(x)
        alone.all_reduce_rmsnorm(x, x.copy(), x[0], 1e-5)
    alone.close()
    exchange(b"compiled")
    {"sums": sums, "gathers": gathers, "graphs": graphs, "dead": dead}[scenario](group, cp)
    group.close()
    print("ok")


if __name__ == "__main__":
    main()
