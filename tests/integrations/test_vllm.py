"""vLLM's attention backend and layers, in vLLM's own classes and pages, on the CPU's mirrors.

vLLM is the installed one, or an unpacked wheel: ENGINE_TEST_VLLM names its folder. Its Python
sources suffice, with the packages that they import.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if _FOLDER := os.environ.get("ENGINE_TEST_VLLM"):
        sys.path.insert(0, _FOLDER)
    backend = pytest.importorskip(
        "vllm.v1.attention.backend",
        reason="needs vLLM, installed or unpacked in ENGINE_TEST_VLLM",
        exc_type=ImportError,
    )
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    attention = importlib.import_module("engine.integrations.vllm.attention")

from engine.errors import ConfigError  # noqa: E402
from engine.integrations import vllm as plugin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's modules warn
_IS_OLD = hasattr(backend.AttentionBackend, "get_kv_cache_shape")  # 0.24


@dataclass(frozen=True)
class Case:
    """A batch: new tokens and all tokens of each request, decodes first."""

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    padding: int = 0
    kv_cache_dtype: str = "auto"


_DECODE = Case((1, 1, 1), (5, 33, 16))
_MIXED = Case((1, 1, 20, 3), (40, 17, 20, 50))
_CASES = (
    _DECODE,
    replace(_DECODE, block_size=64, num_kv_heads=4),
    replace(_DECODE, lens_q=(1,) * 4, lens_k=(5, 33, 0, 0)),  # a captured batch's padding
    replace(_DECODE, lens_q=(3, 3), lens_k=(5, 40)),  # speculative decoding
    _MIXED,
    replace(_MIXED, padding=7),
    replace(_MIXED, block_size=32, num_heads=8, num_kv_heads=1),
    replace(_MIXED, window=9),
    replace(_MIXED, softcap=3.0, head_dim=40),
    replace(_MIXED, has_sinks=True),
    replace(_MIXED, has_sinks=True, window=20, block_size=128),
    replace(_MIXED, kv_cache_dtype="fp8"),
    Case((30, 7), (30, 60)),  # whole prompts and chunks
    Case((30,), (30,), window=4, softcap=10.0),
    Case((2, 1, 25), (9, 30, 25)),  # decodes of different lengths
)


def _config(num_speculative_tokens=0, calculate_kv_scales=False):
    speculative = SimpleNamespace(
        num_speculative_tokens=num_speculative_tokens, parallel_drafting=False
    )
    return SimpleNamespace(
        speculative_config=speculative if num_speculative_tokens else None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(calculate_kv_scales=calculate_kv_scales),
        use_v2_model_runner=False,
    )


def _batch(case, tables, slots):
    starts = np.concatenate([[0], np.cumsum(case.lens_q)]).astype(np.int32)
    return backend.CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(tables.device),
        query_start_loc_cpu=torch.from_numpy(starts.copy()),
        seq_lens=torch.tensor(case.lens_k, dtype=torch.int32, device=tables.device),
        num_reqs=len(case.lens_q),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(case.lens_q),
        max_seq_len=max(case.lens_k),
        block_table_tensor=tables,
        slot_mapping=slots,
    )


def _builder(case=None, **options):
    longest = max((n for n in case.lens_q if n <= 3), default=1) if case else 1
    config = _config(num_speculative_tokens=longest - 1, **options)
    return attention.EngineMetadataBuilder(None, ["layer"], config, torch.device("cpu"))


def _impl(case, **options):
    sinks = torch.linspace(-1, 2, case.num_heads).bfloat16() if case.has_sinks else None
    found = attention.EngineImpl(
        case.num_heads,
        case.head_dim,
        case.head_dim**-0.5,
        case.num_kv_heads,
        **{
            "sliding_window": case.window,
            "kv_cache_dtype": case.kv_cache_dtype,
            "logits_soft_cap": case.softcap,
            "sinks": sinks,
            **options,
        },
    )
    found.process_weights_after_loading(torch.bfloat16)
    return found


def _cache(case, num_blocks, dtype):
    """Return the cache as vLLM makes it for this backend."""
    ours = attention.EngineBackend
    sizes = {"block_size": case.block_size, "num_kv_heads": case.num_kv_heads}
    sizes |= {"head_size": case.head_dim}
    if _IS_OLD:
        utils = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
        spec = interface.FullAttentionSpec(**sizes, dtype=dtype)
        raw = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.int8)
        shape = ours.get_kv_cache_shape(num_blocks, *sizes.values())
        order = ours.get_kv_cache_stride_order()
        return utils._reshape_attention_kv_cache(raw, spec, shape, order, num_blocks, None)
    spec = ours.customize_spec(interface.FullAttentionSpec(**sizes, dtype=dtype))
    content = spec.state_content_size_bytes // dtype.itemsize
    logical = (num_blocks, spec.num_heads, case.block_size, content)
    assert int(np.prod(logical)) * dtype.itemsize == num_blocks * spec.page_size_bytes
    layout = ours.supported_kv_cache_layouts()[0].layer_view_order
    physical = torch.zeros([logical[i] for i in layout], dtype=dtype)
    return physical.permute([layout.index(i) for i in range(4)])


def _expected(case, q, keys, values, sinks):
    """Attention of each token by itself, in float64."""
    out = np.zeros(q.shape)
    row = 0
    for b, (new, total) in enumerate(zip(case.lens_q, case.lens_k, strict=True)):
        for i in range(new):
            end = total - new + i + 1
            first = max(0, end - case.window) if case.window else 0
            for h in range(case.num_heads if end > 0 else 0):
                kv = h // (case.num_heads // case.num_kv_heads)
                scores = keys[b][first:end, kv] @ q[row, h] * case.head_dim**-0.5
                if case.softcap:
                    scores = np.tanh(scores / case.softcap) * case.softcap
                weights = np.exp(scores)
                total_weight = weights.sum() + (np.exp(sinks[h]) if case.has_sinks else 0)
                out[row, h] = weights @ values[b][first:end, kv] / total_weight
            row += 1
    return out


def _random(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).bfloat16()


def _double(tensor):
    return tensor.float().cpu().numpy().astype(np.float64)


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_batches(case, where):
    """Chunk by chunk: earlier tokens are stored, then the batch's, then it attends."""
    rng = np.random.default_rng(7)
    width = -(-max(case.lens_k) // case.block_size) + 1
    num_blocks = len(case.lens_k) * width + 1
    ids = rng.permutation(num_blocks - 1).astype(np.int32) + 1
    tables = torch.from_numpy(ids[: len(case.lens_k) * width].reshape(-1, width)).to(where)
    is_fp8 = case.kv_cache_dtype == "fp8"
    cache = _cache(case, num_blocks, torch.uint8 if is_fp8 else torch.bfloat16).to(where)
    k_scale, v_scale = torch.tensor([0.5, 0.25], device=where)
    layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
    impl = _impl(case)
    if case.has_sinks:
        impl._float_sinks = impl._float_sinks.to(where)

    shape = case.num_kv_heads, case.head_dim
    keys = [_random(rng, n, *shape).to(where) for n in case.lens_k]
    values = [_random(rng, n, *shape).to(where) for n in case.lens_k]
    new_rows, new_slots = [], []
    for b, (new, total) in enumerate(zip(case.lens_q, case.lens_k, strict=True)):
        places = torch.arange(total, device=where)
        blocks = tables[b][places // case.block_size].long()
        slots = blocks * case.block_size + places % case.block_size
        old = max(total - new, 0)
        if old:
            impl.do_kv_cache_update(layer, keys[b][:old], values[b][:old], cache, slots[:old])
        new_slots += [slots[old:], torch.full((new - total + old,), -1, device=where)]
        blank = torch.zeros(new - total + old, *shape, dtype=torch.bfloat16, device=where)
        new_rows += [(keys[b][old:], values[b][old:]), (blank, blank)]
    slots = torch.cat(new_slots).long()
    padding = torch.full((case.padding, *shape), torch.nan, dtype=torch.bfloat16, device=where)
    k, v = (torch.cat([*(row[i] for row in new_rows), padding]) for i in (0, 1))
    q = _random(rng, len(slots) + case.padding, case.num_heads, case.head_dim).to(where)
    impl.do_kv_cache_update(layer, k, v, cache, slots)

    metadata = _builder(case).build(0, _batch(case, tables, slots))
    out = torch.full_like(q, 5.0)
    assert impl.forward(layer, q, k, v, cache, metadata, out) is out
    sinks = _double(impl.sinks) if case.has_sinks else None
    keys, values = ([_double(rows) for rows in each] for each in (keys, values))
    want = _expected(case, _double(q), keys, values, sinks)
    n = len(slots)
    np.testing.assert_allclose(_double(out)[:n], want[:n], atol=0.15 if is_fp8 else 0.02)
    assert (out[n:] == 5.0).all()


def test_decodes_come_first():
    tables, slots = torch.zeros(4, 9, dtype=torch.int32), torch.zeros(25, dtype=torch.int64)
    found = _builder().build(0, _batch(_MIXED, tables, slots))
    assert (found.num_decodes, found.num_queries, found.max_context_len) == (2, 1, 1024)
    assert found.cu_seqlens_q.tolist() == [0, 20, 23]
    alone = _builder().build(0, _batch(_DECODE, tables[:3], slots[:3]))
    assert (alone.num_decodes, alone.cu_seqlens_q) == (3, None)
    other = _builder().update_block_table(found, tables + 1, slots)
    assert (other.decode_tables == 1).all() and (other.chunk_tables == 1).all()
    assert len(other.chunk_tables) == 2 and other.chunk_lens is found.chunk_lens
    ours = attention.EngineMetadataBuilder
    support = ours.get_cudagraph_support(_config(), None)
    assert support == backend.AttentionCGSupport.UNIFORM_BATCH


def test_the_run_that_measures_memory():
    out = torch.full((3, 4, 32), torch.nan)
    found = _impl(_DECODE).forward(None, out, out, out, torch.zeros(0), None, out)
    assert found is out and (out == 0).all()


def _validate(**changes):
    given = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": "decoder",
    }
    return attention.EngineBackend.validate_configuration(**(given | changes))


def test_what_is_supported():
    assert _validate() == []
    assert _validate(kv_cache_dtype="fp8", block_size=48, head_size=80) == []
    if not _IS_OLD:
        assert _validate(has_sliding_window=True) == []
    for name, value, reason in (
        ("head_size", 513, "head_size"),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype"),
        ("kv_cache_dtype", "float16", "a cache of float16 needs a model of that dtype"),
        ("block_size", 8, "block_size"),
        ("use_mla", True, "MLA"),
        ("use_sparse", True, "sparse"),
        ("use_mm_prefix", True, "multimodal"),
        ("attn_type", "encoder_only", "attention type encoder_only"),
        ("use_non_causal", True, "non-causal"),
        ("use_batch_invariant", True, "batch invariance"),
        ("use_kv_connector", True, "KV connector"),
        ("device_capability", SimpleNamespace(major=7, minor=5), "compute capability"),
    ):
        (found,) = _validate(**{name: value})
        assert reason in found


def test_what_is_refused():
    for options, message in (
        ({"alibi_slopes": [0.5]}, "alibi_slopes is not supported"),
        ({"attn_type": "encoder"}, "attn_type must be decoder; got encoder"),
    ):
        with pytest.raises(ConfigError, match=message):
            _impl(_DECODE, **options)
    out = torch.zeros(3, 4, 32)
    with pytest.raises(ConfigError, match="a quantized output is not supported"):
        _impl(_DECODE).forward(None, out, out, out, out, None, out, output_scale=torch.ones(1))
    with pytest.raises(ConfigError, match="calculate_kv_scales is not supported"):
        _builder(calculate_kv_scales=True)
    tables, slots = torch.zeros(3, 9, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="attention must be causal; got causal=False"):
        _builder().build(0, _batch(_DECODE, tables, slots).replace(causal=False))
    if not _IS_OLD:
        spec = interface.FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=64, head_size_v=32, dtype=torch.float16
        )
        with pytest.raises(ConfigError, match="keys and values must have one head size"):
            attention.EngineBackend.customize_spec(spec)


def test_every_abstract_method_is_there():
    for theirs, ours in (
        (backend.AttentionBackend, attention.EngineBackend),
        (backend.AttentionMetadataBuilder, attention.EngineMetadataBuilder),
        (backend.AttentionImpl, attention.EngineImpl),
    ):
        assert issubclass(ours, theirs) and not ours.__abstractmethods__
    assert registry.AttentionBackendEnum[attention.EngineBackend.get_name()].name == "CUSTOM"


def test_register_twice(monkeypatch):
    monkeypatch.setenv("ENGINE_VLLM_LAYERS", "0")
    plugin.register()
    plugin.register()
    assert registry.AttentionBackendEnum.CUSTOM.get_class() is attention.EngineBackend
    monkeypatch.setenv("ENGINE_VLLM_LAYERS", "yes")
    with pytest.raises(ConfigError, match="ENGINE_VLLM_LAYERS must be one of 0, 1; got 'yes'"):
        plugin.register()


def test_another_plugins_backend_stays(monkeypatch, caplog):
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    custom = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(custom, "another.Backend")
    plugin.register()
    assert custom.get_path() == "another.Backend"
    assert "CUSTOM is another.Backend; for engine's, set VLLM_PLUGINS=engine" in caplog.text


def test_a_vllm_without_the_registry_starts_without_us(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, registry.__name__, None)
    plugin.register()
    assert "engine's kernels need vLLM 0.24 or 0.33; not registered" in caplog.text


def test_registering_imports_no_kernels():
    """The plugin runs in each of vLLM's processes, whether or not its backend is chosen."""
    script = (
        "import sys; import vllm.v1.attention.backends.registry; before = set(sys.modules);"
        "import engine.integrations.vllm as plugin; plugin.register();"
        "print(*sorted(set(sys.modules) - before))"
    )
    options = {"capture_output": True, "text": True, "check": True}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "ENGINE_VLLM_LAYERS": "0"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, **options
    ).stdout.split()
    assert "engine.integrations.vllm" in found
    assert not {"cupy", "engine.kernels", "engine.integrations.torch"} & set(found)


@pytest.fixture(params=["all", "none"])
def layers(request, monkeypatch):
    """vLLM's layers, replaced for one test, with its own ops on or off."""
    ops = importlib.import_module("vllm.model_executor.custom_op")
    config = SimpleNamespace(custom_ops=[request.param], backend="inductor")
    config.enabled_custom_ops = config.disabled_custom_ops = set()
    monkeypatch.setattr(ops, "get_cached_compilation_config", lambda: config)
    monkeypatch.setattr(ops, "op_registry_oot", {})
    monkeypatch.setenv("ENGINE_VLLM_LAYERS", "1")
    ours = pytest.importorskip(
        "engine.integrations.vllm.layers",
        reason="vLLM's layers need more packages than its attention",
        exc_type=ImportError,
    )
    monkeypatch.setattr(ours, "op_registry_oot", ops.op_registry_oot)
    method = ours.UnquantizedFusedMoEMethod
    chosen = SimpleNamespace(is_monolithic=lambda: False)
    choose = f"{method.__module__}.select_unquantized_moe_backend"
    monkeypatch.setattr(choose, lambda moe_config: (None, chosen))
    plugin.register()
    plugin.register()
    return ours


def _norm(x, weight):
    x = _double(x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def test_norms(layers):
    rng = np.random.default_rng(1)
    x, residual = _random(rng, 5, 64), _random(rng, 5, 64)
    for theirs, offset in ((layers.RMSNorm, 0.0), (layers.GemmaRMSNorm, 1.0)):
        norm = theirs(64, eps=1e-6)
        assert type(norm).__module__ == layers.__name__
        norm.weight.data = _random(rng, 64)
        weight = _double(norm.weight.data) + offset
        np.testing.assert_allclose(_double(norm(x)), _norm(x, weight), atol=0.04)
        y, h = norm(x, residual)
        np.testing.assert_array_equal(_double(h), _double(x + residual))
        np.testing.assert_allclose(_double(y), _norm(h, weight), atol=0.04)


def test_norms_without_a_kernel_are_theirs(layers):
    norm = layers.RMSNorm(64, var_hidden_size=32)
    x = torch.ones(2, 64)
    x[:, 32:] = 3.0
    assert torch.allclose(norm(x)[:, :32], torch.ones(2, 32))


def test_activations(layers):
    x = _random(np.random.default_rng(2), 3, 2, 48)
    gate, up = _double(x)[..., :24], _double(x)[..., 24:]
    found = layers.SiluAndMul()(x)
    np.testing.assert_allclose(_double(found), gate / (1 + np.exp(-gate)) * up, atol=0.02)
    for approximate in ("tanh", "none"):
        layer = layers.GeluAndMul(approximate)
        assert type(layer).__module__ == layers.__name__
        want = torch.nn.functional.gelu(torch.from_numpy(gate), approximate=approximate)
        np.testing.assert_allclose(_double(layer(x)), want.numpy() * up, atol=0.02)


def _experts(layers, **changes):
    """Return vLLM's method for a layer of 4 experts, and the layer."""
    activation = importlib.import_module("vllm.model_executor.layers.fused_moe.activation")
    parallel = {"ep_size": 1, "dp_size": 1, "pcp_size": 1, "enable_eplb": False}
    parallel = SimpleNamespace(**parallel, is_sequence_parallel=False)
    moe = SimpleNamespace(
        activation=activation.MoEActivation.SILU,
        is_act_and_mul=True,
        has_bias=False,
        is_lora_enabled=False,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
        hidden_dim=32,
        hidden_dim_unpadded=32,
        intermediate_size_per_partition=24,
        intermediate_size_per_partition_unpadded=24,
        moe_parallel_config=parallel,
    )
    layer = torch.nn.Module()
    layer.expert_map, layer.apply_router_weight_on_input = None, False
    for name, value in changes.items():
        owner = next(each for each in (moe, parallel, layer) if hasattr(each, name))
        setattr(owner, name, value)
    method = layers.UnquantizedFusedMoEMethod(moe)
    method.create_weights(layer, 4, 32, 24, torch.bfloat16)
    rng = np.random.default_rng(5)
    layer.w13_weight.data = _random(rng, 4, 48, 32)
    layer.w2_weight.data = _random(rng, 4, 32, 24)
    return method, layer


def test_experts(layers):
    method, layer = _experts(layers)
    assert type(method) is layers.EngineFusedMoEMethod
    before = layer.w13_weight.data.clone()
    method.process_weights_after_loading(layer)
    assert torch.equal(layer.w13_weight.data, before)
    assert method.supports_internal_mk and not method.is_monolithic
    rng = np.random.default_rng(6)
    x, weights = _random(rng, 5, 32), torch.from_numpy(rng.random((5, 2), np.float32))
    ids = torch.tensor([[0, 3], [3, 1], [2, 0], [1, 2], [3, 0]], dtype=torch.int32)
    found = method.apply(layer, x, weights, ids, None, None)
    gate_up, down = _double(layer.w13_weight.data), _double(layer.w2_weight.data)
    want = np.zeros((5, 32))
    for t, j in np.ndindex(5, 2):
        gate, up = np.split(gate_up[ids[t, j]] @ _double(x)[t], 2)
        want[t] += float(weights[t, j]) * (down[ids[t, j]] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(_double(found), want, rtol=0.02, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize(
    "change",
    [
        {"has_bias": True},
        {"is_lora_enabled": True},
        {"swiglu_limit": 7.0},
        {"hidden_dim": 64},
        {"ep_size": 2},
        {"dp_size": 2},
        {"is_sequence_parallel": True},
        {"enable_eplb": True},
        {"expert_map": torch.zeros(4)},
        {"apply_router_weight_on_input": True},
    ],
    ids=str,
)
def test_experts_without_a_kernel_are_theirs(layers, monkeypatch, change):
    method, layer = _experts(layers, **change)
    converted = []
    monkeypatch.setattr(method, "_setup_kernel", lambda **given: converted.append(given))
    method.process_weights_after_loading(layer)
    assert not method.is_ours and len(converted) == 1
    method.moe_kernel = SimpleNamespace(apply=lambda **given: "theirs")
    layer.activation, layer.global_num_experts = method.moe.activation, 4
    assert method.apply(layer, torch.ones(1, 32), None, None, None, None) == "theirs"
