"""sleep, an 8B model in bfloat16: weights to the host and back, new weights, and adapters in use.

Sleeping and waking are compared with one plain copy over the same link. New weights are written
from device arrays; an adapter's files are read while 64 requests decode. All numbers are random.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from engine import LLMEngine, LoRARequest, SamplingParams, load
from engine.cache.memory_pool import device_memory
from engine.cache.pinned_memory import pinned_array
from engine.commands._bench_models import built_in_config
from engine.dtypes import BFLOAT16
from tests.lora_files import write_adapter

DEVICE = "GPU"
_CONFIG = built_in_config("llama-3.1-8b")
_LINK_BYTES = 1 << 30
_RANK = 16
_NUM_REQUESTS = 64
_PROMPT = list(range(100, 228))


def _load(**options):
    return load(
        config=_CONFIG,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        device="cuda",
        **options,
    )


def _seconds(device, call):
    """Return the time of a call, with all work that it starts on the device."""
    device.xp.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    call()
    device.xp.cuda.runtime.deviceSynchronize()
    return time.perf_counter() - start


def _row(case, seconds, num_bytes=None, link=None, **more):
    row = {"op": "sleep", "case": case, "ms": 1e3 * seconds}
    if num_bytes is not None:
        row |= {"GB": num_bytes * 1e-9, "GB/s": num_bytes / seconds * 1e-9}
    if link is not None:
        row["% of link"] = 100 * num_bytes / seconds / link
    return row | more


def _link(device):
    """Return bytes per second of a plain copy of page-locked memory, out and in."""
    cp = device.xp
    array = cp.ones(_LINK_BYTES, np.uint8)
    host = pinned_array(_LINK_BYTES, cp)
    runtime, stream = cp.cuda.runtime, cp.cuda.get_current_stream().ptr

    def copy(target, source, kind):
        def run():
            runtime.memcpyAsync(target, source, _LINK_BYTES, kind, stream)

        return _LINK_BYTES / min(_seconds(device, run) for _ in range(3))

    there, here = array.data.ptr, host.ctypes.data
    return {
        "out": copy(here, there, runtime.memcpyDeviceToHost),
        "in": copy(there, here, runtime.memcpyHostToDevice),
    }


def _sleep_rows(model):
    """Sleep and wake up twice; then only the copies. Outputs must stay the same."""
    device = model.device
    link = _link(device)
    for way, rate in link.items():
        yield _row(f"the link, {way}", _LINK_BYTES / rate, _LINK_BYTES)
    num_bytes = model.weight_bytes - model.decoder.table_bytes
    want = _sums(model)
    for number in ("first", "second"):
        before = device_memory(device)[1]
        with _timed(model, "free_cached_memory") as part:
            seconds = _seconds(device, model.sleep)
        freed = device_memory(device)[1] - before
        more = {"freed_GB": freed * 1e-9, "freeing_ms": 1e3 * sum(part)}
        yield _row(f"{number} sleep", seconds, num_bytes, link["out"], **more)
        with _timed(model._host_copies, "wait") as part:  # the copies outlast making the layers
            seconds = _seconds(device, model.wake_up)
        more = {"waiting_ms": 1e3 * sum(part)}
        yield _row(f"{number} wake", seconds, num_bytes, link["in"], **more)
        assert _sums(model) == want, "weights after a sleep differ"
    found = (array for weight in model.decoder.weights.values() for _, array in weight.arrays())
    arrays = list({id(array): array for array in found}.values())
    host, copies = model._host_copies, []
    seconds = _seconds(device, lambda: copies.extend(host.take(arrays)))
    yield _row("only the copies, out", seconds, num_bytes, link["out"])
    seconds = _seconds(device, lambda: host.restore(copies))
    yield _row("only the copies, in", seconds, num_bytes, link["in"])
    copies.clear()
    model.free_cached_memory()


@contextmanager
def _timed(owner, name):
    """Collect the seconds of each call of a method."""
    method, times = getattr(owner, name), []

    def timed():
        start = time.perf_counter()
        method()
        times.append(time.perf_counter() - start)

    with patch.object(owner, name, timed):
        yield times


def _sums(model):
    """Return the sum of the bits of every array of weights, as 16-bit numbers."""
    found = (array for weight in model.decoder.weights.values() for _, array in weight.arrays())
    return [int(array.view(np.uint16).sum(dtype=np.uint64)) for array in found]


class _Exported:
    """An array of another framework: only DLPack shows it."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def _update_rows(model):
    """Write all weights anew, from arrays on the device."""
    cp = model.device.xp
    arrays = {name: _numbers(cp, shape) for name, shape in _tensor_shapes().items()}
    num_bytes = sum(array.nbytes for array in arrays.values())
    tensors, door = {name: _Exported(array) for name, array in arrays.items()}, "DLPack"
    try:
        cp.from_dlpack(tensors["model.norm.weight"])
    except (BufferError, NotImplementedError, TypeError):  # this CuPy knows no bfloat16 there
        tensors, door = arrays, "CuPy"
    pool = cp.get_default_memory_pool()
    for number in ("first", "second"):
        pool.free_all_blocks()
        before = pool.total_bytes()
        seconds = _seconds(model.device, lambda: model.update_weights(tensors))
        peak = pool.total_bytes() - before  # the pool gives nothing back by itself
        case = f"{number} update_weights through {door}"
        yield _row(case, seconds, num_bytes, None, peak_MB_above=peak * 1e-6)
    for name, mine in (
        ("lm_head.weight", "lm_head"),
        ("model.layers.7.mlp.down_proj.weight", "layers.7.down"),
    ):
        got = model.decoder.weights[mine].data.view(np.uint16)
        assert bool((got == arrays[name].view(np.uint16)).all()), f"{name} was not written"


def _numbers(cp, shape):
    """Return bfloat16 numbers from 1/128 to 1/32 that differ from row to row."""
    bits = cp.arange(int(np.prod(shape)), dtype=np.uint32) % 251 + np.uint32(0x3C00)
    numbers = cp.empty(shape, BFLOAT16)
    numbers.view(np.uint16)[...] = bits.astype(np.uint16).reshape(shape)
    return numbers


def _tensor_shapes():
    """Return the tensors of the checkpoint: Hugging Face's name -> shape."""
    vocab, width = _CONFIG.vocab_size, _CONFIG.hidden_size
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for layer in range(_CONFIG.num_layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (width,)
    return shapes | _matrix_shapes()


def _matrix_shapes():
    """Return the matrices of the layers, all of which an adapter may change."""
    width, features = _CONFIG.hidden_size, _CONFIG.intermediate_size
    queries = _CONFIG.num_heads * _CONFIG.head_dim
    keys = _CONFIG.num_kv_heads * _CONFIG.head_dim
    kinds = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (features, width),
        "mlp.up_proj": (features, width),
        "mlp.down_proj": (width, features),
    }
    return {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(_CONFIG.num_layers)
        for name, shape in kinds.items()
    }


def _engine_rows(model):
    """Sleep and wake up with the KV cache and the CUDA graphs of an engine."""
    with LLMEngine(model, max_num_seqs=_NUM_REQUESTS) as engine:
        yield _row("engine, sleep", _seconds(model.device, engine.sleep))
        yield _row("engine, wake: also pages and graphs", _seconds(model.device, engine.wake_up))


def _adapter_rows(folder):
    """Load adapters one after the other while requests without one decode."""
    rng = np.random.default_rng(0)
    requests = []
    for number in range(3):
        pairs = {
            name: (
                0.02 * rng.standard_normal((_RANK, columns), np.float32),
                0.02 * rng.standard_normal((rows, _RANK), np.float32),
            )
            for name, (rows, columns) in _matrix_shapes().items()
        }
        path = write_adapter(folder / f"a{number}", pairs, _RANK)
        requests.append(LoRARequest(f"a{number}", number + 1, str(path)))
    model = _load(enable_lora=True, max_loras=4, max_lora_rank=_RANK)
    with LLMEngine(model, max_num_seqs=_NUM_REQUESTS + 8, enable_prefix_caching=False) as engine:
        stay = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
        for index in range(_NUM_REQUESTS):
            engine.add_request(str(index), [index + 1, *_PROMPT], stay)
        _timed_steps(engine, 40)
        for _ in range(2):
            first_token, steps = _served(engine, None)
        longest = 1e3 * max(steps)
        yield _row("request without adapter", first_token, longest_step_in_use_ms=longest)
        for case, request in zip(("first", "second", "third"), requests, strict=True):
            yield _loaded(engine, case, request)
        engine.abort_request([str(index) for index in range(_NUM_REQUESTS)])
        while engine.has_unfinished_requests():
            engine.step()


def _loaded(engine, case, request):
    """Read an adapter in another thread, as the server does; then serve a request with it."""
    median = statistics.median(_timed_steps(engine, 50))
    reading = []
    with ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        future = pool.submit(engine.read_lora, request)
        while not future.done():
            reading += _timed_steps(engine, 1)
    engine.add_lora(request, adapter=future.result())
    usable = time.perf_counter() - start
    first_token, using = _served(engine, request)
    _, again = _served(engine, request)
    return _row(
        f"{case} adapter, all matrices, until usable",
        usable,
        first_token_ms=1e3 * first_token,
        median_step_ms=1e3 * median,
        longest_step_while_read_ms=1e3 * max(reading, default=0.0),
        longest_step_in_use_ms=1e3 * max(using),
        longest_step_of_the_next_ms=1e3 * max(again),
        steps_in_use_ms=" ".join(f"{1e3 * each:.1f}" for each in using),
    )


def _served(engine, lora_request):
    """Serve one more request; return the time to its first token, and those of the steps."""
    few = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    start = time.perf_counter()
    engine.add_request("one more", _PROMPT[:16], few, lora_request=lora_request)
    first_token, steps, is_done = None, [], False
    while not is_done:
        before = time.perf_counter()
        outputs = [each for each in engine.step() if each.request_id == "one more"]
        steps.append(time.perf_counter() - before)
        if outputs and first_token is None:
            first_token = time.perf_counter() - start
        is_done = any(each.finished for each in outputs)
    return first_token, steps


def _timed_steps(engine, count):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def _rows():
    with _load() as model:
        yield from _sleep_rows(model)
        yield from _update_rows(model)
        model.free_cached_memory()
        yield from _engine_rows(model)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        yield from _adapter_rows(Path(folder))


def main(device):
    """Measure, print, and return the rows."""
    if not device.is_cuda:
        raise SystemExit("sleep takes a GPU: its weights alone are 16 GB")
    rows = []
    for row in _rows():
        rows.append(row)
        print(
            "  ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            ),
            flush=True,
        )
    return rows
