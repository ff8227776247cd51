"""SmolLM2 from process start to text: import, load, prefill, decode, memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from engine import threads
from engine.device import Device

_IMPORT = "import time; t = time.perf_counter(); import engine; print(time.perf_counter() - t)"

# Runs in its own process, since start-up is part of the measurement.
_START = """
import json, resource, sys, time
start = float(sys.argv[2])
import numpy as np
import engine
from engine.kernels import _module
model = engine.load("smollm2", device=sys.argv[1])
loaded = time.time() - start
ids = np.array([model.tokenizer.encode("The capital of France is")])
cache = model.new_cache(1, 1024)
token = int(model.step(ids, cache)[0].argmax())
first = time.time() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
result = {"loaded_s": loaded, "first_token_s": first, "peak_rss_mb": peak / 1e6,
          "weights_mb": model.weight_bytes / 1e6, "dtype": model.dtype,
          "compiled": _module.stats().compiled, "cache_hits": _module.stats().cache_hits}
if sys.argv[1] != "cpu":
    pool = model.device.xp.get_default_memory_pool()
    result["device_pool_mb"] = pool.total_bytes() / 1e6
print(json.dumps(result))
"""


def _start(device: Device) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _START, str(device), str(time.time())],
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _steady(device: Device) -> dict[str, float]:
    """Return prefill and decode tokens per second of one sequence, after warm-up."""
    import engine

    with engine.load("smollm2", device=device) as model:
        cache = model.new_cache(1, 1024)
        ids = [list(range(1000, 1256))]
        rates: dict[str, list[float]] = {"prefill_256_tokens_per_s": [], "decode_tokens_per_s": []}
        if device.kind == "cpu":
            rates["threads"] = [threads.count()] * 4
        for _ in range(4):
            cache.reset()
            begin = time.perf_counter()
            token = int(model.step(ids, cache)[0].argmax())
            middle = time.perf_counter()
            for _ in range(32):
                token = int(model.step([[token]], cache)[0].argmax())
            end = time.perf_counter()
            rates["prefill_256_tokens_per_s"].append(256 / (middle - begin))
            rates["decode_tokens_per_s"].append(32 / (end - middle))
        return {name: statistics.median(values[1:]) for name, values in rates.items()}


def main(device: Device) -> list[dict[str, Any]]:
    """Measure on `device`, print, and return the rows."""
    imports = [
        float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True,
                             check=True).stdout)
        for _ in range(5)
    ]  # fmt: skip
    cold, warm = _start(device), _start(device)
    row = {"op": "smollm2", "device": str(device), "import_s": statistics.median(imports)}
    row |= {f"first_process_{key}": value for key, value in cold.items()} | warm | _steady(device)
    for key, value in row.items():
        print(f"{key:32} {value:.4g}" if isinstance(value, float) else f"{key:32} {value}")
    return [row]
