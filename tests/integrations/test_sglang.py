"""SGLang's backend against softmax attention written out, over a pool of scattered pages."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from engine.errors import ConfigError  # noqa: E402
from engine.integrations import sglang as plugin  # noqa: E402
from tests.integrations.sglang_parts import IS_REAL, Pool, WindowPool, batch, layer, parts, runner  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 16
MAX_LENGTH = 100  # keys a request, not a multiple of any page size
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """Without context parallelism."""
    torch.manual_seed(0)
    alone = SimpleNamespace(attn_cp_size=1, dcp_enabled=False)
    monkeypatch.setattr(parts.backend, "get_parallel", lambda: alone)


def _slots(page, num_requests=4):
    """Return the slot of each token of each request: pages in random order, page 0 unused."""
    width = -(-MAX_LENGTH // page)
    pages = 1 + torch.randperm(num_requests * width).view(num_requests, width)
    slots = pages[..., None] * page + torch.arange(page)
    return slots.flatten(1)[:, :MAX_LENGTH].int().contiguous(), (1 + num_requests * width) * page


def _attention(q, keys, values, *, scale=None, window=0, softcap=0.0, sinks=None):
    """Attend from the last len(q) of the tokens; q (n, H, D), keys and values (m, K, D)."""
    (n, m) = (len(q), len(keys))
    group = q.shape[1] // keys.shape[1]
    (keys, values) = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(m, device=q.device)
    last = key[m - n :, None]
    hidden = (key > last) | ((key <= last - window) if window else False)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :m], values)


def _qkv(count):
    q = torch.randn(count, HEADS * DIM)
    return q, torch.randn(count, KV_HEADS, DIM), torch.randn(count, KV_HEADS, DIM)


def _expected(q, pool, slots, requests, lengths, counts, **rule):
    """Return the attention of a batch, read from (slots, K, D) keys and values."""
    (keys, values) = (pool.slots(x).float() for x in (pool.k, pool.v))
    rows = q.float().view(len(q), -1, keys.shape[-1]).split(counts)
    found = []
    for row, request, length in zip(rows, requests, lengths, strict=True):
        where = slots[request, :length].long()
        found.append(_attention(row, keys[where], values[where], **rule).flatten(1))
    return torch.cat(found)


@pytest.mark.parametrize("is_hnd", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_prompts_then_tokens_read_the_pool_in_place(page, is_hnd):
    """Chunks after cached prefixes, then one token a request, in another order of requests."""
    (slots, size) = _slots(page)
    pool = Pool(size, KV_HEADS, DIM, page, is_hnd)
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots, page))
    radix = layer(HEADS, KV_HEADS, DIM)

    (requests, lengths, new) = ([2, 0, 3], [70, 16, 33], [5, 16, 1])
    extend = batch(requests, lengths, new, slots)
    (q, k, v) = _qkv(22)
    backend.init_forward_metadata(extend)
    out = backend.forward_extend(q, k, v, radix, extend)
    assert torch.equal(pool.slots(pool.k)[extend.out_cache_loc], k)
    assert torch.equal(pool.slots(pool.v)[extend.out_cache_loc], v)
    torch.testing.assert_close(out, _expected(q, pool, slots, requests, lengths, new), **CLOSE)

    (requests, lengths) = ([3, 2], [34, 71])
    decode = batch(requests, lengths, None, slots)
    (q, k, v) = _qkv(2)
    backend.init_forward_metadata(decode)
    out = backend.forward_decode(q, k, v, radix, decode)
    assert torch.equal(pool.slots(pool.v)[decode.out_cache_loc], v)
    torch.testing.assert_close(out, _expected(q, pool, slots, requests, lengths, [1, 1]), **CLOSE)


@pytest.mark.parametrize("new", [None, [3, 20]], ids=["decode", "extend"])
def test_windows_caps_sinks_and_scales_of_layers(new):
    """SGLang's sliding_window_size does not count the query's own key."""
    (slots, size) = _slots(16)
    pool = Pool(size, KV_HEADS, DIM, 16)
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots, 16))
    radix = layer(HEADS, KV_HEADS, DIM, sliding_window_size=7, logit_cap=2.0, scaling=0.5)
    counts = new or [1, 1]
    (q, k, v) = _qkv(sum(counts))
    forward_batch = batch([1, 2], [40, 25], new, slots)
    sinks = torch.randn(HEADS)
    backend.init_forward_metadata(forward_batch)
    forward = backend.forward_extend if new else backend.forward_decode
    out = forward(q, k, v, radix, forward_batch, sinks=sinks)
    rule = {"window": 8, "softcap": 2.0, "scale": 0.5, "sinks": sinks}
    wanted = _expected(q, pool, slots, [1, 2], [40, 25], counts, **rule)
    torch.testing.assert_close(out, wanted, **CLOSE)


@pytest.mark.skipif(not IS_REAL, reason="sglang does not import here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_sglangs_own_pool_layer_and_batch(dtype):
    """Through the base class, which calls forward_extend or forward_decode."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    (slots, size) = _slots(16)
    form = {"head_num": KV_HEADS, "head_dim": DIM, "layer_num": 1, "device": "cpu"}
    pool = MHATokenToKVPool(size - 16, 16, dtype, **form, enable_memory_saver=False)
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots, 16, kv_cache_dtype=dtype))
    radix = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    seen = SimpleNamespace(slots=lambda buffer: buffer)
    for lengths, new in (([21, 5], [21, 5]), ([22, 6], None)):
        fields = vars(batch([2, 0], lengths, new, slots))
        forward_batch = ForwardBatch(input_ids=None, seq_lens_sum=sum(lengths), **fields)
        counts = new or [1, 1]
        (q, k, v) = _qkv(sum(counts))
        backend.init_forward_metadata(forward_batch)
        out = backend.forward(q, k, v, radix, forward_batch)
        (seen.k, seen.v) = pool.get_kv_buffer(0)
        assert torch.equal(seen.v[forward_batch.out_cache_loc].float(), v.to(dtype).float())
        torch.testing.assert_close(out, _expected(q, seen, slots, [2, 0], lengths, counts), **CLOSE)


@pytest.mark.parametrize("scales", [None, (0.25, 0.5)], ids=["no-scales", "scales"])
@pytest.mark.parametrize("new", [None, [3, 20]], ids=["decode", "extend"])
def test_fp8_caches(new, scales):
    """Keys and values are their codes times the layer's scale, the new ones, too."""
    (slots, size) = _slots(16)
    pool = Pool(size, KV_HEADS, DIM, 16)
    (pool.k, pool.v) = (x.to(torch.float8_e4m3fn) for x in (pool.k, pool.v))
    settings = {"kv_cache_dtype": torch.float8_e4m3fn}
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots, 16, **settings))
    names = ("k_scale", "v_scale")
    own = dict(zip(names, map(torch.tensor, scales), strict=True)) if scales else {}
    own |= {f"{name}_float": scale.item() for name, scale in own.items()}
    counts = new or [1, 1]
    (q, k, v) = _qkv(sum(counts))
    forward_batch = batch([1, 2], [40, 25], new, slots)
    backend.init_forward_metadata(forward_batch)
    forward = backend.forward_extend if new else backend.forward_decode
    out = forward(q, k, v, layer(HEADS, KV_HEADS, DIM, **own), forward_batch)
    (k_scale, v_scale) = scales or (1.0, 1.0)
    stored = pool.k[forward_batch.out_cache_loc].float() * k_scale
    torch.testing.assert_close(stored, k, rtol=0.07, atol=0.01)  # 3 bits of mantissa
    values = SimpleNamespace(
        k=pool.k.float() * k_scale, v=pool.v.float() * v_scale, slots=pool.slots
    )
    wanted = _expected(q, values, slots, [1, 2], [40, 25], counts)
    torch.testing.assert_close(out, wanted, **CLOSE)


def test_layers_that_share_keys_store_nothing():
    (slots, size) = _slots(16)
    pool = Pool(size, KV_HEADS, DIM, 16)
    before = pool.k.clone()
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots, 16))
    decode = batch([0], [9], None, slots)
    (q, k, v) = _qkv(1)
    backend.init_forward_metadata(decode)
    radix = layer(HEADS, KV_HEADS, DIM)
    outs = [
        backend.forward_decode(q, k, v, radix, decode, save_kv_cache=False),
        backend.forward_decode(q, None, None, radix, decode),
    ]
    assert torch.equal(pool.k, before)
    for out in outs:
        torch.testing.assert_close(out, _expected(q, pool, slots, [0], [9], [1]), **CLOSE)


@pytest.mark.parametrize("new", [None, [5]], ids=["decode", "extend"])
def test_layers_of_the_window_pool_read_translated_pages(new):
    (slots, size) = _slots(16)
    pool = WindowPool(size, KV_HEADS, DIM, 16)
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots, 16))
    forward_batch = batch([2], [37], new, slots)
    backend.init_forward_metadata(forward_batch)
    translated = pool.full_to_swa_index_mapping[slots.long()]
    forward = backend.forward_extend if new else backend.forward_decode
    for number, (own, where) in enumerate(zip(pool.pools, (slots, translated), strict=True)):
        radix = layer(HEADS, KV_HEADS, DIM, number, sliding_window_size=11 if number else -1)
        (q, k, v) = _qkv(5 if new else 1)
        out = forward(q, k, v, radix, forward_batch)
        assert torch.equal(own.k[where[2, 37 - len(k) : 37].long()], k)
        wanted = _expected(q, own, where, [2], [37], [len(k)], window=12 if number else 0)
        torch.testing.assert_close(out, wanted, **CLOSE)


@pytest.mark.parametrize("make_pool", [Pool, WindowPool])
def test_a_graph_replays_for_another_batch(make_pool):
    """What a graph captures reads the batch's arrays again; its own stay where they are."""
    (slots, size) = _slots(16)
    pool = make_pool(size, KV_HEADS, DIM, 16)
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots, 16))
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static = batch([0, 0], [fill, fill], None, slots)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    captured = backend.forward_metadata

    live = batch([3, 1], [50, 17], None, slots)
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(static, name).copy_(getattr(live, name))
    backend.init_forward_metadata_out_graph(static)
    backend.init_forward_metadata_in_graph(static)
    replayed = backend.forward_metadata
    for name in ("context_lens", "block_tables", "window_tables", "window_loc"):
        (before, after) = (getattr(captured, name), getattr(replayed, name))
        assert (before is None) == (after is None)
        assert before is None or before.data_ptr() == after.data_ptr()

    (q, k, v) = _qkv(2)
    out = backend.forward_decode(q, k, v, layer(HEADS, KV_HEADS, DIM), static)
    own = pool.pools[0] if make_pool is WindowPool else pool
    torch.testing.assert_close(out, _expected(q, own, slots, [3, 1], [50, 17], [1, 1]), **CLOSE)


@pytest.mark.parametrize("make_pool", [Pool, WindowPool])
def test_what_a_graph_captures_reads_nothing_on_the_host(make_pool):
    """On the meta device every read by the host is an error."""
    (slots, size) = _slots(16)
    with torch.device("meta"):
        pool = make_pool(size, KV_HEADS, DIM, 16)
        static = batch([0, 1], [5, 6], None, slots.to("meta"))
    backend = parts.backend.EngineAttentionBackend(runner(pool, slots.to("meta"), 16))
    backend.init_cuda_graph_state(2, 2)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    assert backend.forward_metadata.block_tables.shape == (2, -(-MAX_LENGTH // 16))


@pytest.mark.gpu
def test_prompts_and_graphs_of_tokens_on_the_gpu():
    """A graph captured with sequences of one key replays for the batch of the next step."""
    with torch.device("cuda"):
        (slots, size) = _slots(64)
        pool = Pool(size, 2, 128, 64)
        (pool.k, pool.v) = (pool.k.bfloat16(), pool.v.bfloat16())
        settings = {"dtype": torch.bfloat16, "kv_cache_dtype": torch.bfloat16}
        backend = parts.backend.EngineAttentionBackend(runner(pool, slots, 64, **settings))
        radix = layer(8, 2, 128)

        def tokens(count):
            shapes = ((count, 8 * 128), (count, 2, 128), (count, 2, 128))
            return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]

        extend = batch([2, 1], [70, 33], [70, 3], slots)
        (q, k, v) = tokens(73)
        backend.init_forward_metadata(extend)
        out = backend.forward_extend(q, k, v, radix, extend)
        wanted = _expected(q, pool, slots, [2, 1], [70, 33], [70, 3])
        torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.02)

        backend.init_cuda_graph_state(4, 4)
        static = batch([0, 0], [1, 1], None, slots)
        (q, k, v) = tokens(2)
        backend.init_forward_metadata_out_graph(static, in_capture=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.init_forward_metadata_in_graph(static)
            out = backend.forward_decode(q, k, v, radix, static)
        for lengths in ([71, 34], [72, 35]):
            live = batch([2, 1], lengths, None, slots)
            for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
                getattr(static, name).copy_(getattr(live, name))
            for tensor, new in zip((q, k, v), tokens(2), strict=True):
                tensor.copy_(new)
            backend.init_forward_metadata_out_graph(static)
            graph.replay()
            assert torch.equal(pool.k[live.out_cache_loc], k)
            wanted = _expected(q, pool, slots, [2, 1], lengths, [1, 1])
            torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.02)


def test_graphs_of_prompts_are_refused():
    (slots, size) = _slots(16)
    backend = parts.backend.EngineAttentionBackend(runner(Pool(size, KV_HEADS, DIM, 16), slots, 16))
    backend.init_cuda_graph_state(2, 64)
    with pytest.raises(ConfigError, match="CUDA graphs decode only"):
        backend.init_forward_metadata_out_graph(batch([0], [5], [5], slots), in_capture=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 1}, "page_size must be one of .*--page-size 64; got 1"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "kv_cache_dtype must be torch.float32 or"),
        ({"use_mla_backend": True}, "does not support latent attention"),
        ({"attention_chunk_size": 8192}, "does not support attention in chunks"),
        (
            {"spec_algorithm": SimpleNamespace(is_none=lambda: False)},
            "does not support speculative decoding",
        ),
        (
            {"kv_index_translator": SimpleNamespace(is_translating=True)},
            "does not support --enable-unified-memory",
        ),
    ],
)
def test_servers_that_it_cannot_run_are_refused(changes, message):
    (slots, size) = _slots(16)
    with pytest.raises(ConfigError, match=message):
        parts.backend.EngineAttentionBackend(
            runner(Pool(size, KV_HEADS, DIM, 16), slots, **({"page": 16} | _renamed(changes)))
        )


def _renamed(changes):
    return {"page" if name == "page_size" else name: value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"attn_type": parts.AttentionType.ENCODER_ONLY}, {}, "attn_type of layer 0 must be"),
        ({"is_cross_attention": True}, {}, "is_cross_attention of layer 0 must be False"),
        ({"v_head_dim": 8}, {}, "v_head_dim of layer 0 must be 16; got 8"),
        ({"xai_temperature_len": 64}, {}, "xai_temperature_len of layer 0"),
        ({}, {"q_rope": torch.zeros(1)}, "attention of layer 0 cannot take q_rope"),
    ],
)
def test_layers_that_it_cannot_run_are_refused(changes, options, message):
    (slots, size) = _slots(16)
    backend = parts.backend.EngineAttentionBackend(runner(Pool(size, KV_HEADS, DIM, 16), slots, 16))
    decode = batch([0], [9], None, slots)
    backend.init_forward_metadata(decode)
    with pytest.raises(ConfigError, match=message):
        backend.forward_decode(*_qkv(1), layer(HEADS, KV_HEADS, DIM, **changes), decode, **options)


def test_the_plugin_registers_the_name_once(monkeypatch):
    for name, module in parts.stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        plugin.register()
    assert parts.ATTENTION_BACKEND_CHOICES.count(plugin.NAME) == 1
    (slots, size) = _slots(16)
    chosen = parts.ATTENTION_BACKENDS[plugin.NAME]
    made = chosen(runner(Pool(size, KV_HEADS, DIM, 16), slots, 16))
    assert isinstance(made, parts.backend.EngineAttentionBackend)
    with pytest.raises(ConfigError, match="page_size must be one of"):
        chosen(runner(Pool(size, KV_HEADS, DIM, 16), slots, 1))


def test_the_plugin_imports_no_kernels():
    """It runs in each of SGLang's processes, whether or not its backend is chosen."""
    script = "import sys, engine.integrations.sglang; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    options = {"capture_output": True, "text": True, "check": True}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, **options
    ).stdout.split()
    assert "engine.integrations.sglang" in found
    assert not {"cupy", "torch", "engine.kernels"} & set(found)


def test_the_entry_point_names_the_function():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = re.search(r'\[project\.entry-points\."sglang\.srt\.plugins"\]\n(.*)\n', text)
    assert group is not None
    assert group[1] == 'engine = "engine.integrations.sglang:register"'


# Names that the backend and the stand-ins use, of classes in files of SGLang.
FIELDS = {
    ("model_executor/forward_batch_info.py", "ForwardBatch"): set(
        vars(batch([0], [1], [1], torch.zeros(1, 1, dtype=torch.int32)))
    ),
    ("layers/radix_attention.py", "RadixAttention"): set(vars(layer(1, 1, 1))),
    ("model_executor/model_runner.py", "ModelRunner"): {
        *("page_size", "dtype", "kv_cache_dtype", "device", "use_mla_backend"),
        *("attention_chunk_size", "spec_algorithm", "kv_index_translator"),
    },
    ("mem_cache/memory_pool.py", "ReqToTokenPool"): {"req_to_token"},
    ("mem_cache/swa_memory_pool.py", "SWAKVPool"): {
        *("full_to_swa_index_mapping", "swa_layer_nums", "layers_mapping"),
    },
    ("mem_cache/kv_index_translator.py", "KVIndexTranslator"): {"is_translating"},
}


def _sources():
    """Return the folder `sglang/srt`: installed, or unpacked where ENGINE_TEST_SGLANG says."""
    if folder := os.environ.get("ENGINE_TEST_SGLANG"):
        return Path(folder) / "sglang" / "srt"
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed, and ENGINE_TEST_SGLANG names no unpacked wheel")
    return Path(spec.submodule_search_locations[0]) / "srt"


def _class(path, name):
    for node in ast.walk(ast.parse((_sources() / path).read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{path} has no class {name}")


@pytest.mark.parametrize("place", FIELDS, ids=lambda place: place[1])
def test_sglang_has_the_fields(place):
    found = set()
    for node in ast.walk(_class(*place)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(node.attr if node.value.id == "self" else "")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    assert FIELDS[place] <= found


def test_sglangs_backend_has_the_methods_with_our_parameters():
    base = _class("layers/attention/base_attn_backend.py", "AttentionBackend")
    theirs = {
        node.name: [a.arg for a in node.args.args]
        for node in base.body
        if isinstance(node, ast.FunctionDef)
    }
    ours = {
        name: list(inspect.signature(method).parameters)
        for name, method in vars(parts.backend.EngineAttentionBackend).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert len(ours) == 7
    for name, parameters in ours.items():
        assert [p for p in parameters if p != "options"] == theirs[name], name
