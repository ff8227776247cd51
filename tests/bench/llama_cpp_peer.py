"""llama.cpp on the prompts of `bench_smollm2`: prefill and decode of one sequence on the CPU.

Run it with an interpreter that has llama-cpp-python; nothing else is needed:

    python tests/bench/llama_cpp_peer.py MODEL.gguf --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

PROMPT = list(range(1000, 1256))  # as in bench_smollm2
NUM_TOKENS = 32


def measured(path: str, threads: int) -> dict[str, float | int]:
    """Return tokens per second, medians of three runs after a warm-up."""
    import llama_cpp

    model = llama_cpp.Llama(
        path, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    rates: dict[str, list[float]] = {"prefill_256_tokens_per_s": [], "decode_tokens_per_s": []}
    for _ in range(4):
        model.reset()
        begin = time.perf_counter()
        model.eval(PROMPT)
        middle = time.perf_counter()
        for number in range(NUM_TOKENS):
            model.eval([2000 + number])
        end = time.perf_counter()
        rates["prefill_256_tokens_per_s"].append(len(PROMPT) / (middle - begin))
        rates["decode_tokens_per_s"].append(NUM_TOKENS / (end - middle))
    medians = {name: statistics.median(values[1:]) for name, values in rates.items()}
    return {"threads": threads, **medians}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    print(json.dumps(measured(arguments.model, arguments.threads)))
