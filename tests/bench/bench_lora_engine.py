"""lora_engine, an 8B model: 64 requests of 16 adapters and of one beside none, decode and prompts.

Weights and adapters are random. All adapters change every adaptable matrix, or those of q, k and v.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np

from engine import LoRARequest, load
from engine.commands import _bench_workloads as workloads
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work
from engine.llm_engine import LLMEngine
from engine.loading.lora import LoraAdapter

DEVICE = "GPU"
_MODEL = "llama-3.1-8b"
_FORMATS = (None, "fp8", "int4")
_RANK = 16
_NUM_ADAPTERS = 16
_WORK = {
    "decode": ("latency", Work.same(64, 128, 256), 2),
    "prefill": ("prefill", Work.same(16, 2048, 1), 2),
}


class AdaptedEngine(LLMEngine):
    """Gives its requests `adapters` in turn."""

    adapters: tuple[LoRARequest, ...] = ()
    num_added = 0

    def add_request(self, *args, **options):
        if self.adapters:
            options["lora_request"] = self.adapters[self.num_added % len(self.adapters)]
            self.num_added += 1
        super().add_request(*args, **options)


def _adapters(engine, kinds):
    """Hold random adapters of the weights of `kinds`; return their requests and the last one."""
    rng = np.random.default_rng(0)
    matrices = {}
    for name, product in engine.model.decoder.adapters.products.items():
        if name.rpartition(".")[2] in kinds:
            arrays = (product.a, product.b)
            a, b = (
                (0.02 * rng.standard_normal(array.shape[1:], np.float32)).astype(array.dtype)
                for array in arrays
            )
            matrices[name] = a, b, None
    found = []
    for index in range(_NUM_ADAPTERS):
        request = LoRARequest(f"{len(kinds)}.{index}", index + 1, "random")
        # One set of matrices on the host serves all: each is copied to a slot of its own.
        adapter = LoraAdapter(request.lora_name, Path("random"), _RANK, matrices, id(request))
        engine.add_lora(request, adapter=adapter)
        found.append(request)
    return tuple(found), adapter


def _engine(form, **options):
    model = load(
        config=built_in_config(_MODEL),
        load_format="dummy",
        quantization=form,
        max_model_len=4096,
        device="cuda",
        **options,
    )
    return AdaptedEngine(model, max_num_seqs=64, enable_prefix_caching=False)


def _measured(engine, case):
    for name, (kind, work, repeats) in _WORK.items():
        workloads.serve(engine, work)  # captures graphs on first use
        found = getattr(workloads, kind)(engine, work, repeats)
        yield {"op": "lora_engine", "case": f"{name}, {case}", **found}


def _rows(form):
    dtype = form or "bfloat16"
    with _engine(form) as engine:
        yield from _measured(engine, f"{dtype}, no room for adapters")
    gc.collect()
    with _engine(form, enable_lora=True, max_loras=_NUM_ADAPTERS, max_lora_rank=_RANK) as engine:
        yield from _measured(engine, f"{dtype}, no adapter")
        kinds = {name.rpartition(".")[2] for name in engine.model.decoder.adapters.products}
        for label, chosen in (("q, k and v", {"qkv"}), ("all matrices", kinds)):
            requests, adapter = _adapters(engine, chosen)
            for count in (1, _NUM_ADAPTERS):
                engine.adapters = requests[:count]
                yield from _measured(engine, f"{dtype}, {count} adapters of {label}")
            start = time.perf_counter()
            engine.model.write_adapter(adapter, 0)
            engine.model.device.xp.cuda.get_current_stream().synchronize()
            seconds = time.perf_counter() - start
            yield {"op": "lora_engine", "case": f"{dtype}, a slot, {label}", "ms": 1e3 * seconds}
            engine.adapters = ()
    gc.collect()


def main(device):
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("lora_engine takes a GPU: its weights alone are 16 GB")
    rows = []
    for form in _FORMATS:
        for row in _rows(form):
            rows.append(row)
            print(
                "  ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                ),
                flush=True,
            )
    return rows
