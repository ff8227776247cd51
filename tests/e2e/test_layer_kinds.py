"""Kinds of layers in the engine: tokens are those of a request alone, whatever else runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import engine
from engine import SamplingParams
from engine.device import resolve_device
from engine.errors import ConfigError
from tests.distributed.golden import write_checkpoint
from tests.e2e.tiny import (
    CONFIG,
    alone,
    check_drained,
    make_engine,
    mixed_params,
    run,
    swap_gb,
    tiny_model,
)

# One model of each kind of layer.
STATES = (
    "qwen3_next",
    "qwen3_5_text",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "nemotron_h_experts",
    "olmo_hybrid",
    "falcon_h1",
    "bamba",
    "lfm3",
    "kimi_linear",
    "bailing_hybrid",
    "bailing_moe_v2_5",
    "bailing_moe_linear",
)
LATENTS = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "longcat_flash")
VOCAB = 128
LEARNED_POSITIONS = replace(
    CONFIG,
    model_type="gpt2",
    vocab_size=VOCAB,
    num_kv_heads=6,
    layer_norm=True,
    norm_bias=True,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    gated_mlp=False,
    activation="gelu_tanh",
    learned_positions=True,
    attn_scale_by_layer=True,
    rope_layers=(False, False),
    tie_word_embeddings=True,
)
ROOM = {"max_position_embeddings": 512, "model_max_length": 512}


def _places(cases):
    """Return (case, device) of each case, on a CPU and on a GPU."""
    on_gpus = (pytest.param((case, "cuda"), marks=pytest.mark.gpu) for case in cases)
    return [*((case, "cpu") for case in cases), *on_gpus]


@pytest.fixture(scope="module", params=_places((*STATES, *LATENTS, "gpt2")), ids=str)
def model(request, tmp_path_factory):
    """A golden model, with room for long sequences; of GPT-2 the weights have as many positions."""
    case, where = request.param
    if case == "gpt2":
        return tiny_model(where, LEARNED_POSITIONS, deterministic=True)
    if where == "cuda" and not resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    folder = write_checkpoint(case, tmp_path_factory.mktemp(case))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | ROOM))
    return engine.load(folder, device=where, dtype="float32", deterministic=True, progress=False)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


HEAD = prompt(0, 70)
PROMPTS = [HEAD + prompt(1, 9), HEAD + prompt(2, 30), prompt(3, 3), HEAD[:64]]
PARAMS = [
    mixed_params(index, max_tokens=10 + 6 * index, n=1 + index % 2) for index in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def wanted(model):
    """The tokens of each request alone."""
    return [alone(model, ids, params) for ids, params in zip(PROMPTS, PARAMS, strict=True)]


MODES = [
    {},
    {"num_blocks": 12},  # preempts
    {"num_blocks": 12, "swap_space_gb": swap_gb(64), "preemption_mode": "swap"},
    {"max_num_batched_tokens": 96, "async_scheduling": True},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_tokens_are_those_of_a_request_alone(model, wanted, options):
    """Prompts with a common beginning, twice: the second time it is cached."""
    serving = make_engine(model, **options)
    for name in ("first", "second"):
        for index, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            serving.add_request(f"{name} {index}", ids, params)
        outputs = run(serving)
        for index, ids in enumerate(wanted):
            got = outputs[f"{name} {index}"].outputs
            assert [list(one.token_ids) for one in got] == ids, index
    stats = serving.scheduler.stats()
    if options.get("num_blocks") == 12:
        assert stats.num_preemptions > 0
    else:
        assert stats.prefix_cache_hits > 0
        assert (stats.num_taken_snapshots > 0) == serving.kv_cache.geometry.has_states
    check_drained(serving)
    serving.close()


def test_rejected_drafts_leave_no_trace(model):
    """Half of the drafts are right, the others end in a wrong token."""
    ids = prompt(3, 20)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [wanted] = alone(model, ids, params)
    num_calls = 0

    def propose(token_ids, limit):
        nonlocal num_calls
        num_calls += 1
        drafts = wanted[len(token_ids) - len(ids) :][:limit]
        if num_calls % 2 and drafts:
            drafts[-1] = (drafts[-1] + 1) % VOCAB
        return drafts

    config = {"proposer": propose, "num_speculative_tokens": 3, "adaptive": False}
    serving = make_engine(model, speculative_config=config)
    serving.add_request("r", ids, params)
    assert list(run(serving)["r"].outputs[0].token_ids) == wanted
    stats = serving.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    serving.close()


on_latents = pytest.mark.parametrize("model", _places(LATENTS), indirect=True, ids=str)


@on_latents
def test_a_page_holds_one_latent_for_all_heads(model):
    """40 values of the latent and 8 of the rotated key, instead of 4 heads' keys and values."""
    serving = make_engine(model)
    attentions = 4 if model.config.model_type == "longcat_flash" else 3
    assert serving.kv_cache.geometry.bytes_per_token == attentions * (40 + 8) * 4
    serving.close()


@on_latents
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_latents_are_not_quantized(model, kv_cache_dtype):
    with pytest.raises(ConfigError, match="whose pages hold latents; got"):
        make_engine(model, kv_cache_dtype=kv_cache_dtype)
