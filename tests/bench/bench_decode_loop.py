"""Time breakdown of a decode step: its graph with each kernel left out, and gaps between graphs."""

from __future__ import annotations

import collections
import itertools
import statistics

import numpy as np

from engine import load
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work, latency, serve
from engine.kernels._launch import Kernel
from engine.llm_engine import LLMEngine
from engine.models.layer_plans import LayerPlans
from engine.runner.cuda_graph import DecodeGraphs

DEVICE = "GPU"
_MODELS = (
    *(("qwen2.5-0.5b", None), ("qwen3-0.6b", None), ("llama-3.2-1b", None), ("llama-3.1-8b", None)),
    *(("llama-3.1-8b", "fp8"), ("llama-3.1-8b", "int4")),
)
_SIZES = ((1, 384), (8, 640), (32, 640), (64, 1000), (256, 600))  # sequences, and keys of each


class _Launches:
    """Counter of launches by kernel while it is open; launches of `skipped` are dropped."""

    def __init__(self, skipped=()):
        self.skipped, self.counts = set(skipped), collections.Counter()

    def __enter__(self):
        self._launch = launch = Kernel.launch

        def counted(kernel, *args, **kwargs):
            self.counts[kernel.entry] += 1
            if kernel.entry not in self.skipped:
                launch(kernel, *args, **kwargs)

        Kernel.launch = counted
        return self

    def __exit__(self, *_):
        Kernel.launch = self._launch


def _milliseconds(cuda, launch, times=60):
    """Return the time per launch over `times` back-to-back launches."""
    for _ in range(5):
        launch()
    start, stop = cuda.Event(), cuda.Event()
    start.record()
    for _ in range(times):
        launch()
    stop.record()
    stop.synchronize()
    return cuda.get_elapsed_time(start, stop) / times


def _fill(engine, key, context_len):
    """Make every row of the graph a sequence with this many keys, in its own blocks."""
    inputs, size, blocks = engine.runner.graphs._inputs, key.size, -(-context_len // 16)
    buffer, last = inputs.next_buffer(), np.full(size, context_len - 1)
    buffer.fill(
        size,
        size,
        rows=np.arange(size),
        token_ids=np.full(size, 5),
        positions=last,
        rope_positions=last,
        context_lens=last + 1,
        sample_positions=last + 1,
        new_starts=np.zeros(size),
        seeds=np.arange(size),
    )
    buffer.fill_blocks(np.full(size, blocks), size)
    buffer.fields["new_blocks"][: size * blocks] = (
        np.arange(size * blocks) % engine.kv_cache.num_blocks
    )
    inputs.send(buffer, size * blocks)
    inputs.release(buffer)


def _parts(engine, name, size, context_len, cuda):
    graphs = engine.runner.graphs
    key = graphs.key(size, context_len)
    _fill(engine, key, context_len)
    whole = _milliseconds(cuda, lambda: graphs.replay(key))
    row = {"op": "decode_loop", "case": f"{name} {size} x {context_len}", "graph_ms": whole}
    # A replay of recorded layers would bypass the counter.
    is_worth_it = LayerPlans._is_worth_it
    LayerPlans._is_worth_it = lambda *_: False
    try:
        with graphs._capturing() as stream, _Launches() as launches:
            graphs.compute(key)
            stream.synchronize()
        for entry, count in launches.counts.items():
            with graphs._capturing() as stream, _Launches([entry]):
                graph, _ = graphs._capture(lambda: graphs.compute(key), stream)
            row[f"{entry} us"] = (whole - _milliseconds(cuda, graph.launch, 30)) * 1e3 / count
    finally:
        LayerPlans._is_worth_it = is_worth_it
    return row


def _gaps(model, name, cuda):
    """Time graphs and the gaps between them while serving one request."""
    engine, events = LLMEngine(model, max_num_seqs=1, max_model_len=1024), []
    per_token = latency(engine, Work.same(1, 128, 512), 2)["ms_per_token"]
    replay = DecodeGraphs.replay

    def timed(graphs, key):
        events.append((cuda.Event(), cuda.Event()))
        events[-1][0].record()
        replay(graphs, key)
        events[-1][1].record()

    DecodeGraphs.replay = timed
    try:
        serve(engine, Work.same(1, 128, 300))
    finally:
        DecodeGraphs.replay = replay
        engine.close()
    pairs = list(itertools.pairwise(events[50:]))
    return {
        "op": "decode_loop",
        "case": f"{name} latency",
        "ms_per_token": per_token,
        "graph_ms": statistics.median(cuda.get_elapsed_time(*now) for now, _ in pairs),
        "gap_ms": statistics.median(cuda.get_elapsed_time(a[1], b[0]) for a, b in pairs),
    }


def main(device):
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("decode_loop takes a GPU: there are no graphs without one")
    rows, cuda = [], device.xp.cuda
    for name, form in _MODELS:
        config = built_in_config(name)
        options = {"load_format": "dummy", "max_model_len": 2112, "device": "cuda"}
        model = load(config=config, quantization=form, **options)
        name = name if form is None else f"{name} {form}"
        rows.append(_gaps(model, name, cuda))
        with LLMEngine(model, max_num_seqs=256) as engine:
            rows += [_parts(engine, name, *case, cuda) for case in _SIZES]
        model.close()
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    return rows
