"""Each kernel's share of a decode step: from the previous kernel's end to its own end.

Kernels overlap (programmatic dependent launch), so their durations do not add up; these intervals
do. End times come from PyTorch's profiler, so torch must be importable.
"""

from __future__ import annotations

import collections
import gc
import itertools

from engine import load
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work, serve
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams

DEVICE = "GPU"
_MODELS = (
    *(("qwen2.5-0.5b", None), ("qwen3-0.6b", None), ("llama-3.2-1b", None), ("llama-3.1-8b", None)),
    ("qwen3-30b-a3b", "fp8_block"),
)
_SIZES = (1, 8, 64, 256)
_PROMPT, _WARM_STEPS, _STEPS = 500, 60, 20


def kernels_of(run, torch):
    """Return (end in us, name) of all device activity during `run()`."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # earlier profiles' events are many: collecting them took 0.26 s of a step
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    found = [e for e in profile.events() if e.device_type == on_device]
    return sorted((event.time_range.end, event.name) for event in found)


def decode_steps(engine, size, torch, steps=_STEPS):
    """Return (end in us, name) of all device activity in `steps` steps of `size` requests."""
    params = SamplingParams(temperature=0.6, max_tokens=1000, ignore_eos=True)
    prompts = {f"{size}-{i}": p for i, p in enumerate(Work.same(size, _PROMPT, 1).prompts)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params)
    for _ in range(_WARM_STEPS):
        engine.step()
    ends = kernels_of(lambda: [engine.step() for _ in range(steps)], torch)
    engine.abort_request(list(prompts))
    return ends


def row_of(op, case, ends, steps=_STEPS, most=12):
    """Return a row: a step's time, and the kernels with the largest shares of `steps` steps."""
    added, counts = collections.Counter(), collections.Counter()
    for (before, _), (end, kernel) in itertools.pairwise(ends):
        added[kernel] += end - before
        counts[kernel] += 1
    row = {"op": op, "case": case}
    row["step us"] = (ends[-1][0] - ends[0][0]) / steps
    row["launches a step"] = len(ends) / steps
    row["longest us"] = max(end - before for (before, _), (end, _) in itertools.pairwise(ends))
    for kernel, us in added.most_common(most):
        row[f"{kernel} a step"] = counts[kernel] / steps
        row[f"{kernel} us"] = us / counts[kernel]
    return row


def main(device):
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("decode_steps takes a GPU: it looks at kernels")
    import torch

    torch.cuda.init()
    rows = []
    for name, form in _MODELS:
        options = {"config": built_in_config(name), "quantization": form, "max_model_len": 1024}
        model = load(load_format="dummy", device="cuda", **options)
        case = name if form is None else f"{name} {form}"
        with LLMEngine(model, max_num_seqs=max(_SIZES)) as engine:
            serve(engine, Work.same(2, 64, 20))
            rows += [
                row_of(
                    "decode_steps", f"{case} {size} x {_PROMPT}", decode_steps(engine, size, torch)
                )
                for size in _SIZES
            ]
        model.close()
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    return rows
