"""MTP heads: read beside a MiMo model, their drafts, and the tokens of a model that has one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine import SamplingParams
from engine.device import to_numpy
from engine.errors import ConfigError, WeightsError
from engine.layers.batch import ForwardBatch
from engine.loading.mtp import load_mtp_config, load_mtp_head
from tests.e2e.tiny import alone, make_engine, mixed_params, run, tiny_model
from tests.speculative import heads

PREFIX = "model.mtp_layers.0."
VALUES = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": heads.EPS,
    "rope_theta": heads.THETA,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
}


def biased_layer(rng, prefix):
    made = heads.layer_tensors(rng, VALUES, prefix, VALUES["hidden_size"])
    for name in "qkv":
        rows = len(made[f"{prefix}self_attn.{name}_proj.weight"])
        bias = rng.standard_normal(rows).astype(np.float32) * 0.3
        made[f"{prefix}self_attn.{name}_proj.bias"] = bias
    return made


def mimo_tensors(seed=0):
    """A whole MiMo checkpoint: the model, and its MTP layer."""
    rng, n, v = np.random.default_rng(seed), VALUES["hidden_size"], VALUES["vocab_size"]
    made = {
        "model.embed_tokens.weight": heads.matrix(rng, v, n),
        "model.norm.weight": heads.norm(rng, n),
        "lm_head.weight": heads.matrix(rng, v, n) * 4,
        f"{PREFIX}input_proj.weight": heads.matrix(rng, n, 2 * n),
    }
    for index in range(VALUES["num_hidden_layers"]):
        made |= biased_layer(rng, f"model.layers.{index}.")
    made |= biased_layer(rng, PREFIX)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made[f"{PREFIX}{name}.weight"] = heads.norm(rng, n)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return heads.write(tmp_path_factory.mktemp("mimo"), VALUES, mimo_tensors())


@pytest.fixture(scope="module")
def model(folder):
    return engine.load(folder, device="cpu", dtype="float32", deterministic=True)


def final_states(model, token_ids):
    """The target's states after its final norm (T, N)."""
    cache = model.new_cache(1, len(token_ids))
    batch = ForwardBatch.build([token_ids], [0], [cache.block_tables[0]], 16, logits="all")
    return to_numpy(model.decoder.hidden_states(batch.to(model.device), cache.pages))


def mtp_drafts(t, states, token_ids, count):
    """Greedy drafts after `token_ids`; `states` (T - 1, N): of all tokens but the last."""
    t = {name: array.astype(np.float64) for name, array in t.items()}
    ids, states = list(token_ids), [*states.astype(np.float64)]
    for _ in range(count):
        embedding = t["model.embed_tokens.weight"][ids[1:]].copy()
        embedding[0] = 0
        both = [
            heads.rms(np.array(states), t[f"{PREFIX}hidden_layernorm.weight"]),
            heads.rms(embedding, t[f"{PREFIX}token_layernorm.weight"]),
        ]
        x = np.concatenate(both, axis=1) @ t[f"{PREFIX}input_proj.weight"].T
        normed = heads.rms(x, t[f"{PREFIX}input_layernorm.weight"])
        out = heads.layer(t, VALUES, PREFIX, normed, x, np.arange(len(x)))[-1]
        states.append(heads.rms(out, t[f"{PREFIX}final_layernorm.weight"]))
        ids.append(int((t["lm_head.weight"] @ states[-1]).argmax()))
    return ids[len(token_ids) :]


def config_of(**more):
    return {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False} | more


@pytest.mark.parametrize("chunk", [24, 7])
def test_drafts_are_those_of_the_formula(folder, model, chunk):
    options = {"max_num_batched_tokens": chunk, "num_blocks": 8}
    serving = make_engine(model, speculative_config=config_of(), **options)
    proposer, seen = serving.speculation._proposer._proposer, []
    propose = proposer.propose

    def watched(wanted):
        known = [r.token_ids(0, r.num_known_tokens) for r, _ in wanted]
        given = propose(wanted)
        seen.extend(zip(known, given, strict=True))
        return given

    proposer.propose = watched
    prompt = np.random.default_rng(3).integers(4, 61, 20).tolist()
    serving.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    run(serving)
    tensors = load_file(folder / "model.safetensors")
    assert len(seen) >= 3
    for known, drafts in seen:
        wanted = mtp_drafts(tensors, final_states(model, known)[:-1], known, 3)
        assert list(drafts.token_ids) == wanted[: len(drafts)]
    serving.close()


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_tokens_are_those_without_a_head(folder, model, num_blocks):
    options = {"num_blocks": num_blocks, "speculative_config": config_of(model=str(folder))}
    serving = make_engine(model, **options)
    rng, wanted = np.random.default_rng(7), {}
    for index in range(6):
        prompt = rng.integers(4, 61, 3 + 6 * index).tolist()
        params = mixed_params(index, max_tokens=20, n=1 + index % 2)
        wanted[f"r{index}"] = alone(model, prompt, params)
        serving.add_request(f"r{index}", prompt, params)
    outputs = run(serving)
    for name, ids in wanted.items():
        assert [list(o.token_ids) for o in outputs[name].outputs] == ids
    stats = serving.stats().speculation
    assert stats.num_drafts > 0 and stats.num_proposer_failures == 0
    serving.close()


def test_a_further_mtp_layer_needs_the_config_to_announce_it(tmp_path):
    tensors = mimo_tensors()
    tensors["model.mtp_layers.1.final_layernorm.weight"] = tensors["model.norm.weight"]
    heads.write(tmp_path, VALUES, tensors)
    with pytest.raises(WeightsError, match=r"model\.mtp_layers\.1\.final_layernorm"):
        engine.load(tmp_path, device="cpu")
    heads.write(tmp_path, VALUES | {"num_nextn_predict_layers": 2}, tensors)
    assert engine.load(tmp_path, device="cpu").config.num_extra_layers == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "qwen2"},
            "model_type must be .* or 'mimo' .* for an MTP head; got 'qwen2'",
        ),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers must be at least 1; got 0"),
        ({"vocab_size": 60}, "vocab_size must be that of the model, 61; got 60"),
        ({"hidden_size": 64}, "hidden_size must be that of the model, 32; got 64"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, model, changes, words):
    (tmp_path / "config.json").write_text(json.dumps(VALUES | changes))
    with pytest.raises(ConfigError, match=words):
        load_mtp_config(tmp_path, model.config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{PREFIX}input_proj.weight"), "a tensor is missing: .*input_proj"),
        (lambda t: t.pop(f"{PREFIX}self_attn.k_proj.bias"), "a tensor is missing: .*k_proj.bias"),
        (
            lambda t: t.update({f"{PREFIX}x": t["model.norm.weight"]}),
            "not part of a mimo model with this config: .*3.x",
        ),
        (lambda t: t.update({f"{PREFIX}final_layernorm.weight": np.ones(31, np.float32)}), "shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, model, change, words):
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    tensors = mimo_tensors()
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_mtp_config(tmp_path, model.config)
    with pytest.raises(WeightsError, match=words):
        load_mtp_head(tmp_path, config, model.load_config, model.draft_target)


def test_a_model_without_files_has_no_head():
    with pytest.raises(ConfigError, match="the model's weights are random"):
        make_engine(tiny_model(), speculative_config=config_of())
