"""replicas: output tokens per second of 1, 2, ... replicas behind one server, one GPU each.

Each replica runs up to 256 requests at a time and is sent 320, so none runs dry while another has
a backlog (2 and 3 on the CPU, where replicas share cores and gain little). Requests share no
prefix. Random weights: Llama-3.1-8B's shape on a GPU, a small model on the CPU.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

# Device kind -> model; streams and requests per replica; prompt tokens; mean answer tokens.
_WORK = {"cuda": ("llama-3.1-8b", 320, 960, 512, 256), "cpu": ("qwen2.5-0.5b", 3, 6, 16, 8)}
_RUNNING = {"cuda": 256, "cpu": 2}  # maximum running requests per replica


@contextlib.contextmanager
def _server(model, device, size):
    """Serve `size` replicas; yield the server's URL."""
    command = [sys.executable, "-m", "engine", "serve", model, "--port", "0", "--device", device]
    command += ["--data-parallel-size", str(size), "--api-server-count", str(2 * size)]
    command += ["--no-access-log", "--max-model-len", "2048"]
    command += ["--max-num-seqs", str(_RUNNING[device])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"ready at (\S+)", line):
                    yield found[1]
                    return
            raise RuntimeError("the server has not started:\n" + "".join(lines[-20:]))
        finally:
            process.terminate()


def _ask(url, prompt, max_tokens):
    """Return the token count of a non-streamed answer; the models have no text."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return json.loads(connection.getresponse().read())["usage"]["completion_tokens"]


def _tokens_per_second(url, work, size):
    _, streams, requests, num_input, num_output = work
    rng = random.Random(0)
    prompts = [rng.choices(range(10_000), k=num_input) for _ in range(size * requests)]
    lengths = [rng.randint(num_output // 2, num_output * 3 // 2) for _ in prompts]
    with ThreadPoolExecutor(size * streams) as pool:
        warm_ups = [[i] * num_input for i in range(size * streams)]
        list(pool.map(lambda prompt: _ask(url, prompt, 8), warm_ups))
        start = time.perf_counter()
        counts = list(pool.map(lambda *request: _ask(url, *request), prompts, lengths))
        seconds = time.perf_counter() - start
    assert counts == lengths
    return sum(counts) / seconds


def main(device):
    """Measure each number of replicas, print, and return the rows."""
    work, count = _WORK[device.kind], 2
    if device.is_cuda:
        count = device.xp.cuda.runtime.getDeviceCount()
    rows = []
    for size in range(1, count + 1):
        with _server(work[0], device.kind, size) as url:
            rate = _tokens_per_second(url, work, size)
        row = {"op": "replicas", "case": f"{size} of {work[0]}, {size * work[1]} streams"}
        row["output tokens/s"] = rate
        row["x one"] = rate / (rows or [row])[0]["output tokens/s"]
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    return rows
