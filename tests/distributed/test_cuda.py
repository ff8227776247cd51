"""Ranks and stages on GPUs of one host, or in turns on one: the tokens of one GPU."""

from __future__ import annotations

import itertools
import os
import signal
import time

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams, device
from engine.config import ModelConfig, MoeConfig
from engine.errors import ConfigError, RankError
from engine.kernels._peer_memory import PeerMemory
from engine.parallel import pipeline, tensor
from engine.tasks.embeddings import embed
from tests.e2e import my_kernels
from tests.speculative import heads

pytestmark = pytest.mark.gpu

SIZES = (1000, 256, 4, 8, 4, 64, 512, 512)
CONFIG = ModelConfig("llama", *SIZES, dtype="bfloat16")
# 9 experts, which two ranks do not divide.
EXPERTS = MoeConfig(9, 3, 128, (True, True, False, True))
MOE = ModelConfig("qwen3_moe", *SIZES, dtype="bfloat16", qk_norm=True, moe=EXPERTS)


@pytest.fixture(autouse=True)
def _shared_gpus(monkeypatch):
    """Let processes share GPUs where there are too few; each stage starts at another one."""
    chosen, reason = device.resolve_device("auto")
    if not chosen.is_cuda:
        pytest.skip(f"no GPU: {reason}")
    count = chosen.xp.cuda.runtime.getDeviceCount()

    def stages(config, place):
        size = config.pipeline_parallel_size
        num_ranks = config.tensor_parallel_size
        others = [
            [(stage + 1) * num_ranks + rank for rank in range(num_ranks)]
            for stage in range(size - 1)
        ]
        wanted = [*others, list(range(num_ranks))]
        if count >= size * num_ranks:
            return wanted
        return [[(stage + gpu) % count for gpu in gpus] for stage, gpus in enumerate(wanted)]

    def ranks(place, given, size, gpus):
        return [f"cuda:{gpu % count}" for gpu in gpus or range(size)]

    monkeypatch.setattr(pipeline, "_gpus", stages)
    monkeypatch.setattr(tensor, "_devices", ranks)


def _engine(size, **options):
    given = {"config": CONFIG, "collective_timeout": 20.0, "tensor_parallel_size": size, **options}
    return LLMEngine.from_name(
        "dummy",
        load_format="dummy",
        device="cuda",
        num_blocks=200,
        max_num_seqs=8,
        **given,
    )


def _tokens(size, **options):
    with _engine(size, **options) as engine:
        for index in range(12):
            params = SamplingParams(
                max_tokens=24,
                temperature=0.8 if index % 3 == 1 else 0.0,
                logprobs=2 if index % 4 == 3 else None,
                seed=index,
            )
            engine.add_request(f"r{index}", [7 * index + i for i in range(5 + 9 * index)], params)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = output.outputs[0].token_ids
        return found


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_tokens_are_those_of_one_gpu(dtype, cuda_graphs):
    options = {"dtype": dtype, "deterministic": True, "cuda_graphs": cuda_graphs}
    assert _tokens(2, **options) == _tokens(1, **options)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("stages", [1, 2])
def test_rows_sent_during_the_products_of_prompts(quantization, stages, monkeypatch):
    """Logprobs are those without them: products before a user's sum send nothing."""
    sizes = (1000, 4096, 4, 16, 4, 128, 4096, 4096)
    options = {
        "config": ModelConfig("llama", *sizes, dtype="bfloat16"),
        "quantization": quantization,
        "pipeline_parallel_size": stages,
        "max_num_batched_tokens": 4096,
        "cuda_graphs": False,
    }
    sent = []
    take = PeerMemory.take_sent

    def watched(memory, *args):
        sent.append(take(memory, *args))
        return sent[-1]

    monkeypatch.setattr(PeerMemory, "take_sent", watched)
    mine = {"all_reduce_rmsnorm": my_kernels.sum_and_norm}
    want = _logprobs(2, **options, kernels=mine)
    assert not any(sent)
    got = _logprobs(2, **options)
    # Two layers at least run on the host; launch plans replay the others.
    assert sum(count > 1000 * 4096 for count in sent) >= 2
    np.testing.assert_array_equal(got, want)


def _logprobs(size, **options):
    """Return the logprobs of the five likeliest tokens after each of two long prompts."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    found = {}
    with _engine(size, **options) as engine:
        for index in range(2):
            engine.add_request(f"r{index}", [(7 + index) * i % 997 for i in range(1500)], params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                [token] = output.outputs[0].logprobs
                found[output.request_id] = sorted(p.logprob for p in token.values())[-5:]
    return [found["r0"], found["r1"]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_overrides_on_all_ranks(deterministic):
    """The norm after an all-reduce is no longer fused with it."""
    options = {"dtype": "float32", "deterministic": deterministic}
    mine = {"rmsnorm": my_kernels.my_rmsnorm, "swiglu": my_kernels.my_swiglu}
    wanted = _tokens(1, **options)
    assert _tokens(2, **options, kernels=mine) == wanted
    assert _tokens(2, **options, kernels={"swiglu": my_kernels.relu_glu}) != wanted
    with pytest.raises(ConfigError, match="cuda_graphs must be False or left out"):
        _engine(2, **options, kernels=mine, cuda_graphs=True)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_tokens_of_float32_are_those_of_one_gpu(cuda_graphs):
    options = {"dtype": "float32", "cuda_graphs": cuda_graphs}
    assert _tokens(2, **options) == _tokens(1, **options)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_with_whole_experts_are_those_of_one_gpu(deterministic, cuda_graphs):
    """By plans and by graphs; summed by norms, or with all pairs gathered."""
    options = {"dtype": "float32", "deterministic": deterministic, "cuda_graphs": cuda_graphs}
    options |= {"config": MOE, "enable_expert_parallel": True}
    assert _tokens(2, **options) == _tokens(1, **options)


def test_deterministic_tokens_with_whole_experts_in_16_bits():
    options = {"config": MOE, "dtype": "bfloat16", "deterministic": True}
    assert _tokens(2, enable_expert_parallel=True, **options) == _tokens(1, **options)


def test_bits_do_not_depend_on_how_steps_are_launched():
    """With sums in norms, by plans, by graphs."""
    first = _tokens(2, dtype="float32", cuda_graphs=False)
    assert _tokens(2, dtype="float32", cuda_graphs=True, async_scheduling=False) == first


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_two_pipeline_stages_are_those_of_one_gpu(
    dtype, is_async, cuda_graphs, is_linked, monkeypatch
):
    """Each on a GPU; activations go from one to the other, or through the host."""
    if not is_linked:
        monkeypatch.setattr(pipeline, "can_link", lambda config, is_cuda: False)
    options = {"dtype": dtype, "deterministic": True, "cuda_graphs": cuda_graphs}
    stages = {"pipeline_parallel_size": 2, "async_scheduling": is_async}
    assert _tokens(1, **stages, **options) == _tokens(1, **options)
    with _engine(1, **stages, **options) as engine:
        assert engine.runner.is_linked == is_linked


def test_a_slow_last_stage_is_waited_for():
    """The chunks of a prompt sample nothing; the first stage must not overwrite those not read."""
    prompt = [i * i % 997 for i in range(450)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = {}
    for stages in (1, 2):
        options = {"max_num_batched_tokens": 16, "dtype": "float32", "deterministic": True}
        with _engine(1, pipeline_parallel_size=stages, **options) as engine:
            if stages > 1:
                _slow_down(engine.model.own)
            engine.add_request("a", prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    found[stages] = output.outputs[0].token_ids
    assert found[2] == found[1] and len(found[2]) == 8


def _slow_down(model):
    """Let the device do nothing for some milliseconds before each step of this model."""
    cupy = device.cupy()
    code = """extern "C" __global__ void pause() {
        for (long long start = clock64(); clock64() - start < 8000000;) {}
    }"""
    pause, forward = cupy.RawKernel(code, "pause"), model.forward

    def slow(batch, pages):
        pause((1,), (1,), ())
        return forward(batch, pages)

    model.forward = slow


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_stage_that_dies_or_stops_ends_the_engine(is_stopped):
    """Though this device waits for its activations, and the others for its memory."""
    seconds = 3.0
    engine = _engine(1, pipeline_parallel_size=2, collective_timeout=seconds)
    assert engine.runner.is_linked
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    [pid] = engine.model.group.pids
    os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)
    start = time.monotonic()
    # A stopped stage's silence may be noticed before the step's time is over.
    silent = rf"stage 0 has not been heard of for {seconds:g} s"
    late = rf"a step did not end within {seconds:g} s; stage 0 is in"
    message = f"{silent}|{late}" if is_stopped else "stage 0 was killed by SIGKILL"
    with pytest.raises(RankError, match=message):
        while engine.has_unfinished_requests():
            engine.step()
    engine.close()
    assert time.monotonic() - start < seconds + 8
    assert int(device.cupy().arange(10).sum()) == 45  # the device answers


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("stages", [2, 4])
def test_graphs_of_stages_without_batch_invariance(config, stages):
    """Fused layers for one request; what is captured at load is what steps replay."""
    options = {"config": config, "dtype": "float32"}
    with _engine(1, pipeline_parallel_size=stages, **options) as engine:
        before = set(engine.runner.graphs._graphs)
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        for index in range(5):
            engine.add_request(f"r{index}", [7 * index + i for i in range(5 + index)], params)
        first = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                first[output.request_id] = output.outputs[0].token_ids
        assert set(engine.runner.graphs._graphs) == before
        engine.add_request("alone", [1, 2, 3], params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first[output.request_id] = output.outputs[0].token_ids
        assert set(engine.runner.graphs._graphs) == before
    with _engine(1, **options) as engine:
        for index in range(5):
            engine.add_request(f"r{index}", [7 * index + i for i in range(5 + index)], params)
        engine.add_request("alone", [1, 2, 3], params)
        wanted = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                wanted[output.request_id] = output.outputs[0].token_ids
    assert first == wanted


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_with_stages(method, deterministic, cuda_graphs):
    """Chains, and without batch invariance trees, whose keys move in both stages."""
    options = {"dtype": "float32", "deterministic": deterministic, "cuda_graphs": cuda_graphs}
    drafting = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    drafting["adaptive"] = False
    found = _tokens(1, pipeline_parallel_size=2, speculative_config=drafting, **options)
    assert found == _tokens(1, **options)


@pytest.mark.parametrize("options", [{}, {"config": MOE, "enable_expert_parallel": True}])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_ranks_and_stages_together(ranks, stages, options, cuda_graphs):
    """Every combination has the tokens of one GPU."""
    if ranks == 1:
        options = {key: value for key, value in options.items() if key == "config"}
    common = {"dtype": "float32", "deterministic": True, "cuda_graphs": cuda_graphs}
    common |= {"config": options.get("config", CONFIG), "collective_timeout": 60.0}
    found = _tokens(ranks, pipeline_parallel_size=stages, **{**common, **options})
    assert found == _tokens(1, **common)


def test_arrays_on_pages_of_their_own():
    """Embeddings, and steps on a cache, beside a request."""
    found = {}
    for size in (1, 2):
        with _engine(size, dtype="float32", deterministic=True) as engine:
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            engine.add_request("a", [1, 2, 3] * 9, params)
            engine.step()
            vectors = embed(engine.model, [[5, 6, 7], [8], list(range(300))], "mean")
            cache = engine.model.new_cache(2, 64, kv_cache_dtype="fp8")
            engine.model.calibrate_kv_scales([[1, 2, 3], [4, 5]])
            rows = engine.model.step([[1, 2], [3, 4]], cache), engine.model.step([[5], [6]], cache)
            arrays = [*vectors, *map(device.to_numpy, rows), engine.model.kv_scales]
            tokens = []
            while engine.has_unfinished_requests():
                tokens += [output.outputs[0].token_ids for output in engine.step()]
            found[size] = arrays, tokens[-1]
    for got, want in zip(found[2][0], found[1][0], strict=True):
        np.testing.assert_array_equal(got, want)
    assert found[2][1] == found[1][1]


@pytest.mark.parametrize(
    ("ranks", "stages", "deterministic", "cuda_graphs"),
    [
        *itertools.product((2,), (1,), (False, True), (False, True)),
        *itertools.product((1,), (2,), (False, True), (False, True)),
        (2, 2, True, False),
    ],
)
def test_heads_that_draft(tmp_path, ranks, stages, deterministic, cuda_graphs):
    """A head that borrows the embedding and the output layer; tokens are those without it."""
    values = heads.eagle3_json(CONFIG, draft_vocab_size=CONFIG.vocab_size)
    tensors = heads.eagle3_tensors(np.random.default_rng(1), values, CONFIG)
    own = {k: t for k, t in tensors.items() if k not in ("lm_head.weight", "d2t", "t2d")}
    folder = heads.write(tmp_path, values, own)
    options = {"dtype": "float32", "deterministic": deterministic, "cuda_graphs": cuda_graphs}
    speculative = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    speculative["adaptive"] = False
    found = _tokens(ranks, pipeline_parallel_size=stages, speculative_config=speculative, **options)
    assert found == _tokens(1, **options)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_killed_rank_ends_the_group_within_seconds(cuda_graphs):
    """Long before `collective_timeout`, though a kernel waits for the rank."""
    engine = _engine(2, cuda_graphs=cuda_graphs)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    [pid] = engine.model.driver.processes.pids
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        while engine.has_unfinished_requests():
            engine.step()
    assert time.monotonic() - start < 8
    engine.close()


def test_a_closed_engine_waits_for_nobody():
    engine = _engine(2, collective_timeout=30.0)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 10


def test_a_stopped_rank_is_named():
    engine = _engine(2, collective_timeout=10.0)  # loading beside other tests may take seconds
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    [pid] = engine.model.driver.processes.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match="rank 1 "):
        while engine.has_unfinished_requests():
            engine.step()
    engine.close()
