"""Decode steps from CUDA graphs: the same tokens as without graphs, and no allocations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine import load
from engine.config import RopeConfig
from engine.device import to_numpy
from engine.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.kernels import _module
from engine.kernels.attention_decode import sm90 as decode_sm90
from engine.runner.cuda_graph import DecodeGraphs, GraphKey, batch_sizes, context_buckets
from tests.e2e.tiny import CONFIG, alone, make_engine, mixed_params, run, tiny_model


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def half_model():
    """A float16 model with norms of q and k, and enough heads to split keys."""
    if tiny_model("cuda").device.is_cuda:
        config = dataclasses.replace(CONFIG, num_layers=3, qk_norm=True, qkv_bias=True)
        return load(config=config, load_format="dummy", device="cuda", dtype="float16")
    return None


def _engine(model, **options):
    """An engine with graphs for decode steps; on the CPU, with the steps they would capture."""
    engine = make_engine(model, **options)
    if engine.runner.graphs is None:
        engine.runner.capture_graphs(engine.config.scheduler.max_model_len)
    return engine


def _count_steps(engine, monkeypatch):
    """Count the steps replayed from graphs: [whole steps, steps up to the logits]."""
    counts, graphs = [0, 0], engine.runner.graphs

    def counted(method, index):
        def call(*args):
            result = method(*args)
            counts[index] += result is not None
            return result

        return call

    monkeypatch.setattr(graphs, "launch", counted(graphs.launch, 0))
    monkeypatch.setattr(graphs, "logits", counted(graphs.logits, 1))
    return counts


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_tokens_are_those_of_each_request_alone(model, count, is_late, monkeypatch):
    engine = _engine(model, max_num_seqs=6, max_num_batched_tokens=64, async_scheduling=is_late)
    counts = _count_steps(engine, monkeypatch)
    rng = np.random.default_rng(count)
    prompts = [rng.integers(0, 97, rng.integers(1, 40)).tolist() for _ in range(count)]
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, mixed_params(index, max_tokens=20 + 9 * index))
    got = run(engine)
    assert counts[0] >= 19
    for index, prompt in enumerate(prompts):
        want = alone(model, prompt, mixed_params(index, max_tokens=20 + 9 * index))
        assert list(got[f"r{index}"].outputs[0].token_ids) == want[0]


def test_steps_with_extra_sampling_replay_graphs_up_to_the_logits(model, monkeypatch):
    """The plain steps after them use the tokens that these have sampled."""
    engine = _engine(model)
    counts = _count_steps(engine, monkeypatch)
    extras = [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"logit_bias": {5: 2.0}}]
    for index, extra in enumerate([{}, *extras]):
        length = 60 if index == 0 else 6 + 8 * index
        engine.add_request(
            f"r{index}", [index + 1] * 9, mixed_params(1, max_tokens=length, **extra)
        )
    got = run(engine)
    assert min(counts) > 10
    for index, extra in enumerate([{}, *extras]):
        length = 60 if index == 0 else 6 + 8 * index
        want = alone(model, [index + 1] * 9, mixed_params(1, max_tokens=length, **extra))
        assert list(got[f"r{index}"].outputs[0].token_ids) == want[0]


def test_forks_and_preemption_rewrite_tables(model, monkeypatch):
    """With few blocks and parallel sampling, tables are copied, released and reallocated."""
    engine = _engine(model, max_num_seqs=9, num_blocks=13, max_model_len=176)
    counts = _count_steps(engine, monkeypatch)
    prompts = [[index + 2] * (30 + index) for index in range(4)]
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, mixed_params(1, n=2, max_tokens=50))
    got = run(engine)
    assert counts[0] > 10 and engine.scheduler.stats().num_preemptions > 0
    for index, prompt in enumerate(prompts):
        ids = [list(c.token_ids) for c in got[f"r{index}"].outputs]
        assert ids == alone(model, prompt, mixed_params(1, n=2, max_tokens=50))


def _fill(graphs, key, num_rows, seed):
    """Put random sequences of different lengths in the first rows and poison in the others."""
    rng = np.random.default_rng(seed)
    most, width = graphs._table.block_tables.shape
    inputs, longest = graphs._inputs, min(key.max_context_len, width * graphs._block_size)
    starts = rng.integers(0, longest, num_rows).astype(np.int32)
    rows = rng.permutation(most)[:num_rows]
    buffer = inputs.next_buffer()
    buffer.fill(
        num_rows,
        key.size,
        rows=rows,
        token_ids=np.where(rng.random(num_rows) < 0.5, -1, rng.integers(0, 97, num_rows)),
        positions=starts,
        rope_positions=starts,
        context_lens=starts + 1,
        sample_positions=starts + 1,
        temperature=rng.choice([0.0, 0.7], num_rows),
        top_k=rng.choice([0, 5], num_rows),
        top_p=rng.choice([1.0, 0.8], num_rows),
        min_p=np.zeros(num_rows),
        seeds=rng.integers(0, 2**40, num_rows),
        new_starts=np.zeros(num_rows),
    )
    buffer.fill_blocks(np.zeros(num_rows, np.int64), key.size)
    for field in buffer.fields.values():  # beyond the graph's rows: must not be read
        if field.size > key.size + 1:
            field[key.size + 1 :] = np.array(-1).astype(field.dtype)
    inputs.send(buffer, 0)
    return rows, starts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_replay_equals_the_eager_step(half_model, dtype):
    """Every graph, with poison in unused rows and pages, gives the bits of the eager step."""
    model = tiny_model("cuda") if dtype == "float32" else half_model
    engine = make_engine(model, max_num_seqs=20, num_blocks=320, max_num_batched_tokens=64)
    graphs, cp = engine.runner.graphs, model.device.xp
    rng = np.random.default_rng(3)
    tables = rng.permutation(320).reshape(20, 16).astype(np.int32)
    for key in graphs.keys:
        for num_rows in {1, (min(key.size, 20) + 1) // 2, min(key.size, 20)}:
            results = []
            for launch in (graphs.compute, graphs.replay):
                pages = np.random.default_rng(5).standard_normal(engine.kv_cache.slab.shape)
                engine.kv_cache.slab[...] = cp.asarray(pages.astype(np.float32))
                graphs._tables[...] = cp.asarray(tables)
                graphs._table.last_ids[...] = cp.arange(20, dtype=np.int32)
                graphs._batch_tables[...] = 2**30
                graphs._inputs.results[...] = -77
                _fill(graphs, key, num_rows, seed=key.size)
                launch(key)
                state = (graphs._inputs.results, graphs._table.last_ids, engine.kv_cache.slab)
                results.append([to_numpy(a) for a in state])
            for eager, replayed in zip(*results, strict=True):
                np.testing.assert_array_equal(replayed, eager)
            ids, status = results[0][0][: 2 * key.size].reshape(2, -1)[:, :num_rows]
            assert (status == 0).all() and (ids >= 0).all()


def _check_padding(model, num_rows):
    graphs = _engine(model, max_num_seqs=9, num_blocks=320).runner.graphs
    for key in graphs.keys:
        if key.size >= num_rows:
            _fill(graphs, key, num_rows, seed=key.size)
            logits = to_numpy(graphs._forward(key))
            assert not logits[num_rows:].any()
            assert np.isfinite(logits).all() and logits[:num_rows].any(axis=1).all()


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_rows_of_padding_stay_zeros(model, num_rows):
    """Zeros need less power in products. Without biases, layers map them to zeros."""
    _check_padding(model, num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 9])
def test_rows_of_padding_stay_zeros_in_half_precision(half_model, num_rows):
    """Its biases are those of q, k and v, which attention without keys does not read."""
    _check_padding(half_model, num_rows)


@pytest.mark.gpu
def test_decoding_an_unchanged_batch_allocates_and_compiles_nothing():
    late = _module.stats().compiles_after_ready  # includes other tests' compilations
    model = tiny_model("cuda")
    engine = make_engine(model, max_num_seqs=8, debug=False, max_num_batched_tokens=256)
    for index in range(5):
        engine.add_request(f"r{index}", [index + 1] * 20, mixed_params(index, max_tokens=100))
    for _ in range(10):
        engine.step()
    cp = model.device.xp
    pools = [cp.get_default_memory_pool(), engine.runner.graphs._pool]

    def state():
        return [(p.used_bytes(), p.total_bytes(), p.n_free_blocks()) for p in pools]

    before, free = state(), cp.get_default_pinned_memory_pool().n_free_blocks()
    allocated = []

    class Hook(cp.cuda.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **kwargs):
            allocated.append(kwargs)

    with Hook():
        for _ in range(60):
            engine.step()
    assert state() == before and not allocated
    assert cp.get_default_pinned_memory_pool().n_free_blocks() == free
    assert _module.stats().compiles_after_ready == late, _module.stats().late
    run(engine)


@pytest.mark.gpu
@pytest.mark.parametrize("is_late", [False, True])
def test_a_changing_batch_gets_the_same_tokens_with_and_without_graphs(is_late):
    """Requests with all kinds of sampling are added and aborted, so the batch size changes."""
    model, results = tiny_model("cuda"), []
    for has_graphs in (False, True):
        engine = make_engine(
            model,
            max_num_seqs=13,
            num_blocks=200,
            max_num_batched_tokens=64,
            cuda_graphs=has_graphs,
            async_scheduling=is_late,
        )
        rng = np.random.default_rng(8)
        for index in range(40):
            prompt = rng.integers(0, 97, rng.integers(1, 60)).tolist()
            params = mixed_params(index, max_tokens=int(rng.integers(1, 60)))
            engine.add_request(f"r{index}", prompt, params)
        outputs = run(engine)
        results.append([list(outputs[f"r{i}"].outputs[0].token_ids) for i in range(40)])
    assert results[0] == results[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fused_rope_and_kv_append_equals_separate_kernels(head_dim, dtype, monkeypatch):
    """Compares graphs with rope and KV append fused into attention with separate kernels."""
    tiny_model("cuda")  # or skip
    config = dataclasses.replace(
        CONFIG,
        hidden_size=64,
        num_layers=3,
        head_dim=head_dim,
        rope=RopeConfig(rotary_dim=head_dim),
        qk_norm=head_dim == 128,
        qkv_bias=head_dim == 64,
    )
    model = load(config=config, load_format="dummy", device="cuda", dtype=dtype)
    is_supported, results, num_fused = decode_sm90.is_supported, [], [0, 0]

    def counted(q, pages, out, new_tokens=None):
        may_fuse = new_tokens is None or bool(results)
        is_taken = may_fuse and is_supported(q, pages, out, new_tokens)
        num_fused[len(results)] += new_tokens is not None and is_taken
        return is_taken

    monkeypatch.setattr(decode_sm90, "is_supported", counted)
    for has_graphs in (False, True):
        engine = make_engine(model, cuda_graphs=has_graphs, max_num_batched_tokens=64)
        for index in range(4):
            params = mixed_params(index, max_tokens=120 + index)
            engine.add_request(f"r{index}", [index + 1] * (20 + 9 * index), params)
        outputs = run(engine)
        results.append([list(outputs[f"r{i}"].outputs[0].token_ids) for i in range(4)])
    assert results[0] == results[1]
    is_hopper = model.device.xp.cuda.Device().compute_capability == "90"
    assert num_fused[0] == 0 and (num_fused[1] > 0) == is_hopper


@pytest.mark.gpu
def test_graphs_keep_their_memory_when_the_device_is_full(cp):
    """Their pool then frees what no array uses, before it asks the device once more."""
    engine = _engine(tiny_model("cuda"))
    engine.add_request("a", [1, 2, 3], mixed_params(0, max_tokens=9, logprobs=2))
    want = run(engine)["a"].outputs[0].token_ids
    graphs = engine.runner.graphs
    places = [graph.result.data.ptr for graph in graphs._forwards.values()]
    graphs._pool.free_all_blocks()
    runtime = cp.cuda.runtime
    kinds = [runtime.pointerGetAttributes(place).type for place in places]
    assert kinds and set(kinds) == {runtime.memoryTypeDevice}
    engine.add_request("b", [1, 2, 3], mixed_params(0, max_tokens=9, logprobs=2))
    assert run(engine)["b"].outputs[0].token_ids == want


@pytest.mark.gpu
def test_graphs_can_be_turned_off():
    engine = make_engine(tiny_model("cuda"), cuda_graphs=False)
    assert engine.runner.graphs is None
    engine.add_request("r", [1, 2, 3], mixed_params(0, max_tokens=5))
    assert len(run(engine)["r"].outputs[0].token_ids) == 5


def test_options(model):
    is_cuda = model.device.is_cuda
    engine = make_engine(model)
    assert engine.config.cuda_graphs is is_cuda
    assert engine.config.reasons["cuda_graphs"].startswith(str(is_cuda))
    if not is_cuda:
        with pytest.raises(ConfigError, match="cuda_graphs must be False or left out on cpu"):
            make_engine(model, cuda_graphs=True)
    assert EngineConfig().cuda_graphs is None


def test_the_next_larger_graph_is_replayed(model):
    engine = make_engine(model, max_num_seqs=20)
    graphs = DecodeGraphs(
        model,
        engine.kv_cache.layers,
        engine.runner._table,
        engine.runner._sampling,
        block_size=16,
        max_model_len=5000,
    )
    assert graphs.key(1, 1) == GraphKey(1, 1024) and graphs.key(3, 1025) == GraphKey(4, 2048)
    assert graphs.key(3, 2049) == GraphKey(4, 4096)
    assert graphs.key(17, 1) == GraphKey(32, 5000) and graphs.key(16, 5000).size == 16
    assert batch_sizes(256)[-3:] == (128, 192, 256) and batch_sizes(1) == (1,)
    assert len(batch_sizes(1024)) < 18 and context_buckets(1, 100) == (100,)
    for most in range(1, 700):
        sizes = batch_sizes(most)
        assert sizes[-1] >= most and list(sizes) == sorted(set(sizes))
        assert len(sizes) == 1 or sizes[-2] < most
