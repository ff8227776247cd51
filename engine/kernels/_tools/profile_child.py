"""The process that ncu profiles: `python -m ...profile_child FILE OP SIZES DTYPE`.

It runs the file of the definition, calls the op for a while, and once more while ncu counts.
"""

from __future__ import annotations

import json
import sys
import time

from engine import device
from engine.kernels._tools import ncu
from engine.kernels._tools.bench_sizes import case_of
from engine.kernels._tools.check_cases import make_inputs
from engine.kernels._user.files import load_ops

_WARM_UP_SECONDS = 0.3  # an idle GPU runs at a low clock, which ncu leaves as it is


def main(file: str, name: str, sizes: str, dtype: str) -> None:
    """Call the op `name` of `file`."""
    ncu.mark_child()
    op = next(op for op in load_ops(file).values() if op.name == name)
    inputs = make_inputs(op, case_of(op, json.loads(sizes), dtype), 0)
    cupy = device.cupy()
    arrays = {key: cupy.asarray(x) if hasattr(x, "dtype") else x for key, x in inputs.items()}
    start = time.perf_counter()
    while time.perf_counter() - start < _WARM_UP_SECONDS:
        op(**arrays)
        cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStart()
    op(**arrays)
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
