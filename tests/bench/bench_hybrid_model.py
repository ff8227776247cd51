"""hybrid_model, Qwen3.6-35B-A3B's shape in fp8: one request, 256, prompts; each kernel's share.

The weights are random. A kernel's share is the time from the previous kernel's end to its own, by
PyTorch's profiler (`bench_decode_steps`); the other figures are those of `engine bench`.
"""

from __future__ import annotations

import time

from engine import load
from engine.commands import _bench_workloads as workloads
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from tests.bench.bench_decode_steps import decode_steps, kernels_of, row_of

DEVICE = "GPU"
_MODEL = "qwen3.6-35b-a3b"
_SIZES = (1, 32, 256)
_PROMPTS = 16, 4096
_KERNELS = 24  # kernels in a row
_WORK = {
    "prefill": (Work.same(*_PROMPTS, 1), 2),
    "latency": (Work.same(1, 128, 512), 2),
    "throughput": (Work.mixed(256), 1),
}


def build(**options):
    """Return an engine with random weights; `options` are keywords of `LLMEngine`."""
    model = load(
        config=built_in_config(_MODEL),
        load_format="dummy",
        quantization="fp8_block",
        max_model_len=4224,
        device="cuda",
    )
    return LLMEngine(model, max_num_seqs=max(_SIZES), enable_prefix_caching=False, **options)


def _prefill_steps(engine, torch):
    """Return (end in us, name) of all device activity, and the number of steps."""
    for index, prompt in enumerate(Work.same(4, _PROMPTS[1], 1, 9000).prompts):
        engine.add_request(f"p{index}", prompt, SamplingParams(max_tokens=1))
    steps = 0

    def run():
        nonlocal steps
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1

    return kernels_of(run, torch), max(1, steps - 1)  # the last one only reads results


def _rows(engine, torch):
    for kind, (work, repeats) in _WORK.items():
        start = time.perf_counter()
        found = getattr(workloads, kind)(engine, work, repeats)
        yield {"op": "hybrid_model", "case": kind, **found, "wall s": time.perf_counter() - start}
    for size in _SIZES:
        yield row_of(
            "hybrid_model", f"decode {size} x 500", decode_steps(engine, size, torch), most=_KERNELS
        )
    yield row_of("hybrid_model", "prefill step", *_prefill_steps(engine, torch), most=_KERNELS)


def main(device):
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("hybrid_model takes a GPU: its weights alone are 36 GB")
    import torch

    torch.cuda.init()
    rows = []
    with build() as engine:
        print(*engine.config.reasons.items(), sep="\n")
        workloads.serve(engine, Work.same(2, 64, 20))
        for row in _rows(engine, torch):
            rows.append(row)
            print(
                "  ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                ),
                flush=True,
            )
    return rows
