"""Models of transformers on our kernels, beside the same models on its own implementations."""

from __future__ import annotations

import copy
import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from engine.errors import ConfigError, ContractError  # noqa: E402
from engine.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to fix

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_TWO_WAY_WINDOWS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "local_attention": 6,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
}
_MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_SHARED = {  # the last layer is computed for the logits that are kept
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 64,
    "global_head_dim": 8,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": _MIXED | {"query_pre_attn_scalar": 8},
    "gemma3_text": _MIXED,
    "gemma4_text": _SHARED,
    "mistral": {"sliding_window": 5},
    "phi3": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3},
    "cohere2": _MIXED,
    "glm4": {},
    "smollm3": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 16},
    "gpt_oss": _EXPERTS | _MIXED,
    "llama4_text": _EXPERTS | {"attention_chunk_size": 6, "intermediate_size_mlp": 48},
}
GENERATING = ("llama", "gemma2", "gemma3_text", "gemma4_text", "mistral", "gpt_oss", "llama4_text")
SDPA_REFUSES = {"gemma2", "gpt_oss"}  # a cap on scores, sinks
# Gemma 4 does not scale its scores: eager, sdpa and ours are 2e-5 to 3e-4 from float64.
BOUNDS = {"gemma4_text": 5e-4}


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    torch.manual_seed(0)


def _model(family, implementation, **kwargs):
    config = transformers.AutoConfig.for_model(family, **_SMALL | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, **kwargs
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter += float(parameter.ndim == 1)
    assert model.config._attn_implementation == implementation
    return model.train()


def _pair(family, **kwargs):
    theirs = "eager" if family in SDPA_REFUSES else "sdpa"
    return _model(family, "engine", **kwargs), _model(family, theirs)


def _ids(*shape):
    return torch.randint(2, 64, shape)


def _padded(ids, side):
    """Return the keyword arguments of a call with padding in the first row."""
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :4] = 0
    if side == "right":
        mask[0, -3:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"attention_mask": mask, "position_ids": positions} if side else {}


def _assert_close(found, expected, bound=1e-5):
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= bound, f"relative error {error:.1e}"


def _assert_same_training(ours, theirs, ids, bound=1e-5, **kwargs):
    """Compare logits and gradients of one step; padding has no part in either."""
    mask = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.randn(*ids.shape, 64) * mask[..., None]
    results = []
    for model in (ours, theirs):
        model.zero_grad()
        logits = model(ids, use_cache=False, **kwargs).logits
        (logits * weights).sum().backward()
        results.append(logits[mask])
    _assert_close(*results, bound)
    num_compared = 0
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None and b.grad.abs().max() > 0:
            num_compared += 1
            assert a.grad is not None, name
            _assert_close(a.grad, b.grad, bound)
    assert num_compared > 10


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, side):
    ids = _ids(2, 13)
    bound = BOUNDS.get(family, 1e-5)
    _assert_same_training(*_pair(family), ids, bound, **_padded(ids, side))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "llama4_text"])
def test_training_on_packed_sequences(family):
    ids = _ids(1, 21)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 13)])[None]
    _assert_same_training(*_pair(family), ids, position_ids=positions)


def test_packed_sequences_by_their_lengths():
    """The arguments of DataCollatorWithFlattening; no mask is built from position_ids then."""
    ids = _ids(1, 21)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 13)])[None]
    starts = torch.tensor([0, 7, 8, 21], dtype=torch.int32)
    lengths = {
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 13, "max_length_k": 13
    }  # fmt: skip
    ours, theirs = _pair("llama")
    found = ours(ids, position_ids=positions, use_cache=False, **lengths).logits
    _assert_close(found, theirs(ids, position_ids=positions, use_cache=False).logits)
    with pytest.raises(ContractError, match="a batch of one packed row; got 2 rows"):
        ours(_ids(2, 21), **lengths)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", GENERATING)
def test_generation(family, side, cache):
    ids = _ids(2, 9)
    mask = _padded(ids, side).get("attention_mask", torch.ones_like(ids))
    results = [
        model.eval().generate(
            ids,
            attention_mask=mask,
            max_new_tokens=8,  # beyond the windows and chunks
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for model in _pair(family)
    ]
    found, expected = results
    _assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert found.sequences.equal(expected.sequences)


def test_a_prompt_in_chunks_and_speculation_on_a_cache():
    """Several queries after cached keys, with padding on the left."""
    ids = _ids(2, 12)
    padded = _padded(ids, "left")
    results = []
    for model in _pair("llama"):
        cache = transformers.DynamicCache()
        for begin, end in ((0, 5), (5, 9), (9, 12)):
            chunk = {
                "attention_mask": padded["attention_mask"][:, :end],
                "position_ids": padded["position_ids"][:, begin:end],
            }
            logits = model(ids[:, begin:end], past_key_values=cache, **chunk).logits
        results.append(logits)
    _assert_close(*results)


# qwen2_moe also makes a mask for windows of 0 tokens, which no layer has.
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("side", [None, "left"])
def test_a_compiled_forward_is_one_graph(family, side):
    torch._dynamo.reset()
    ours, theirs = _pair(family)
    ids = _ids(2, 13)
    padded = _padded(ids, side)
    compiled = torch.compile(ours.eval(), fullgraph=True, backend="aot_eager")
    seen = padded.get("attention_mask", torch.ones_like(ids)).bool()
    with torch.no_grad():
        for use_cache in (False, True):
            found = compiled(ids, use_cache=use_cache, **padded).logits
            expected = theirs.eval()(ids, use_cache=use_cache, **padded).logits
            _assert_close(found[seen], expected[seen])


def test_compiled_training():
    torch._dynamo.reset()
    ours, theirs = _pair("llama")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids = _ids(2, 13)
    for model in (compiled, theirs):
        model(ids, use_cache=False, labels=ids).loss.backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        _assert_close(a.grad, b.grad)


def test_a_compiled_encoder_with_windows_in_both_directions():
    torch._dynamo.reset()
    config = transformers.ModernBertConfig(**_TWO_WAY_WINDOWS)
    model = transformers.ModernBertModel._from_config(config, attn_implementation="engine").eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = _ids(2, 13)
    mask = _padded(ids, "left")["attention_mask"]
    found, expected = (
        run(input_ids=ids, attention_mask=mask).last_hidden_state for run in (compiled, model)
    )
    _assert_close(found, expected)


def test_compiled_decoding_makes_one_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, theirs = _pair("llama")
    ids = _ids(2, 9)
    compiled = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    kwargs = {
        "attention_mask": _padded(ids, "left")["attention_mask"],
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
    }
    found = ours.eval().generate(ids, compile_config=compiled, **kwargs)
    assert found.equal(theirs.eval().generate(ids, **kwargs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_refuses_a_mask_that_is_no_runs():
    torch._dynamo.reset()
    ours, _ = _pair("llama")
    compiled = torch.compile(ours.eval(), fullgraph=True, backend="aot_eager")
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 5] = 0
    with pytest.raises(RuntimeError, match="padding between tokens"):
        compiled(_ids(2, 13), attention_mask=mask, use_cache=False)


def test_gradient_checkpointing():
    ours, theirs = _pair("llama")
    ours.gradient_checkpointing_enable()
    ids = _ids(2, 13)
    _assert_same_training(ours, theirs, ids, **_padded(ids, "right"))


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_an_encoder_sees_in_both_directions(side):
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(intermediate_size=48, vocab_size=64, **config)
    ids = _ids(2, 13)
    kwargs = {"attention_mask": _padded(ids, side).get("attention_mask")}
    _assert_close(*_outputs(transformers.BertModel, config, input_ids=ids, **kwargs))


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_an_encoder_with_windows_in_both_directions(side):
    ids = _ids(2, 13)
    mask = _padded(ids, side).get("attention_mask", torch.ones_like(ids))
    config = transformers.ModernBertConfig(**_TWO_WAY_WINDOWS)
    found, expected = _outputs(
        transformers.ModernBertModel, config, input_ids=ids, attention_mask=mask
    )
    _assert_close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_cross_attention_has_other_keys_than_queries(side):
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64,
    )  # fmt: skip
    ids = _ids(2, 13)
    kwargs = {"attention_mask": _padded(ids, side).get("attention_mask")}
    kwargs["decoder_input_ids"] = _ids(2, 6)
    _assert_close(*_outputs(transformers.BartModel, config, input_ids=ids, **kwargs))


def test_latent_attention_has_narrower_values():
    config = transformers.DeepseekV3Config(
        **_SMALL | {"num_key_value_heads": 4, "head_dim": 4}, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=2,
    )  # fmt: skip
    _assert_close(*_outputs(transformers.DeepseekV3Model, config, input_ids=_ids(2, 7)))


def _outputs(cls, config, **inputs):
    models = []
    for implementation in ("engine", "sdpa"):
        kept = copy.deepcopy(config)  # models share it otherwise
        models.append(cls._from_config(kept, attn_implementation=implementation).eval())
        assert models[-1].config._attn_implementation == implementation
    models[0].load_state_dict(models[1].state_dict())
    return [model(**inputs).last_hidden_state for model in models]


def test_a_model_is_saved_as_ever(tmp_path):
    ours, theirs = _pair("llama")
    ours.save_pretrained(tmp_path)
    assert "engine" not in (tmp_path / "config.json").read_text()
    for implementation in ("sdpa", "engine"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation=implementation
        )
        assert loaded.config._attn_implementation == implementation
        for key, value in theirs.state_dict().items():
            assert value.equal(loaded.state_dict()[key])


def test_the_name_is_unknown_before_it_is_registered():
    with pytest.raises(ValueError, match='`attn_implementation="not_registered"` is not supported'):
        _model("llama", "not_registered")
    integration.register("registered_now")
    _model("llama", "registered_now")


def _set_dropout(model):
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


def test_what_the_kernels_do_not_compute_is_refused():
    ours, _ = _pair("llama")
    dense = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(ContractError, match=r"2-D padding or None; got a mask \(2, 1, 5, 5\)"):
        ours(_ids(2, 5), attention_mask=dense)
    _set_dropout(ours)
    with pytest.raises(ContractError, match=r"attention_dropout must be 0 in training; got 0\.1"):
        ours(_ids(2, 5))
    assert ours.eval()(_ids(2, 5)).logits.isfinite().all()
    with pytest.raises(ValueError, match="`output_attentions` attribute is not supported"):
        ours.config.output_attentions = True


def test_a_model_that_takes_the_mask_for_a_tensor_is_refused():
    """As BigBird-Pegasus adds it to scores, and Doge reads its dtype."""
    mask = integration.make_mask(1, 2, 2)
    with pytest.raises(ContractError, match=r"attention mask: is no tensor, .*; choose another"):
        torch.zeros(1, 1, 2, 2) + mask
    with pytest.raises(ContractError, match=r"attention mask: is no tensor, .*; choose another"):
        torch.where(mask, 0.0, 1.0)
    with pytest.raises(AttributeError, match="it has no dtype; choose another attn_implement"):
        _ = mask.dtype


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts(family):
    ids = _ids(2, 13)
    ours, theirs = _pair(family, experts_implementation="engine")
    _assert_same_training(ours, theirs, ids, **_padded(ids, "right"))


def test_experts_that_compute_something_else_are_refused():
    model = _model("gpt_oss", "engine", experts_implementation="engine")
    reason = "experts of GptOssExperts: they have biases, gate and up are interleaved"
    with pytest.raises(ContractError, match=reason):
        model(_ids(2, 5))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4_text", "qwen3"])
def test_norms_and_activations(family):
    pytest.importorskip("kernels", reason="the kernels library is not installed")
    ours, theirs = _pair(family)
    assert integration.kernelize(ours) is ours
    assert "engine_layers" in ours.model.norm.forward.__func__.__module__
    assert "engine_layers" in ours.model.layers[0].mlp.act_fn.forward.__func__.__module__
    ids = _ids(2, 13)
    _assert_same_training(ours, theirs, ids, BOUNDS.get(family, 1e-5))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_everything_at_once_in_one_graph():
    pytest.importorskip("kernels", reason="the kernels library is not installed")
    torch._dynamo.reset()
    ours, theirs = _pair("qwen3_moe", experts_implementation="engine")
    compiled = torch.compile(integration.kernelize(ours), fullgraph=True, backend="aot_eager")
    ids = _ids(2, 13)
    for model in (compiled, theirs):
        model(ids, use_cache=False, labels=ids).loss.backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        _assert_close(a.grad, b.grad)


def test_a_model_without_such_layers_is_told():
    pytest.importorskip("kernels", reason="the kernels library is not installed")
    with pytest.raises(ConfigError, match=r"wanted a layer of RMSNorm.*; Linear has none"):
        integration.kernelize(torch.nn.Linear(2, 2))


def test_a_model_without_parameters():
    pytest.importorskip("kernels", reason="the kernels library is not installed")
    x = torch.randn(3, 4)
    layer = integration.kernelize(transformers.activations.SiLUActivation())
    _assert_close(layer(x), torch.nn.functional.silu(x))


_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "sliding_window": 70,
    "max_position_embeddings": 512,
}


@pytest.mark.gpu
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss", "mixtral"])
def test_bfloat16_is_no_worse_than_theirs(family, side, monkeypatch):
    """Errors of logits and gradients, in the root mean square, against float32.

    Over several prompts: a token that rounding sends to another expert has a large error on either
    side.
    """
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | _WIDE)
    errors = sum(_squared_errors(family, side) for _ in range(4))
    assert (errors[0] <= 1.1**2 * errors[1]).all()


def _squared_errors(family, side):
    """Return the mean squared errors of (ours, theirs), each of logits and of gradients."""
    ids = _ids(2, 300).cuda()
    padded = _padded(ids, side)
    mask = padded.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.randn(*ids.shape, 64).cuda() * mask[..., None]

    def results(implementation, dtype):
        is_ours = implementation == "engine" and family in ("mixtral", "qwen3_moe")
        experts = {"experts_implementation": "engine" if is_ours else "eager"}
        model = _model(family, implementation, **experts).cuda().to(dtype)
        logits = model(ids, use_cache=False, **padded).logits.float()
        (logits * weights).sum().backward()
        grads = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
        return logits[mask], torch.cat(grads)

    theirs = "eager" if family in SDPA_REFUSES else "sdpa"
    exact = results("eager", torch.float32)
    found = results("engine", torch.bfloat16)
    expected = results(theirs, torch.bfloat16)
    of_each = [
        [(a - b).square().mean() for a, b in zip(side, exact, strict=True)]
        for side in (found, expected)
    ]
    return torch.tensor(of_each)


def _has_chunked_static_masks():
    """Tell whether its maker of masks passes only known arguments (transformers 5.17 does not)."""
    make = transformers.masking_utils.create_chunked_causal_mask
    return "block_sequence_ids" in inspect.signature(make).parameters


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "llama4_text"])
def test_generation_on_the_gpu(family, cache):
    if cache and family == "llama4_text" and not _has_chunked_static_masks():
        pytest.skip("this transformers cannot make llama4's masks for a static cache")
    ids = _ids(3, 40).cuda()
    mask = _padded(ids, "left")["attention_mask"]
    logits = []
    for model in _pair(family):
        result = model.cuda().eval().generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, disable_compile=True,
            cache_implementation=cache, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logits.append(torch.stack(result.logits))
    _assert_close(*logits, bound=1e-4)
