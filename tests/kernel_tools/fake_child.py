"""`child.py` without a GPU: the kernel is the formula 2 * x, and some sizes end the process."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

from engine.kernels._tools import child
from engine.kernels._tools.device_run import Answer
from engine.kernels._user.problem import CHIPS

RUNTIME = SimpleNamespace(getDevice=lambda: 0, getDeviceProperties=lambda _: {"name": b"fake"})


def run_call(op, call):
    x = call.data["x"]
    os.write(1, b"printed by a kernel\n")  # must not mix with the messages
    if x.size == 7:
        os._exit(3)
    if x.size == 11:
        time.sleep(60)
    problem = op.example_problem({"N": x.size}, call.arrays[0].dtype)
    [launch] = op.launches(problem)
    if x.size == 13:
        return Answer(error=("crash", "cudaErrorIllegalAddress"))
    return Answer({"out": 2 * x}, [("launch", f"{launch.grid} {dict(launch.args)['pid']}")])


if __name__ == "__main__":
    child.run_call = run_call
    child.current_chip = lambda: CHIPS["sm_90a"]
    child.device = SimpleNamespace(
        cupy=lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=RUNTIME))
    )
    child.main()
