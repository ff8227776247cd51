"""MTP heads that are a layer of their model: beside the formula, and a model of that layer alone.

That layers of these families are right is shown by tests/models/test_golden.py.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.errors import ConfigError
from engine.layers.batch import ForwardBatch
from engine.loading.mtp import load_mtp_config, load_mtp_head
from tests.distributed.golden import write_checkpoint
from tests.e2e.tiny import alone, make_engine, mixed_params, run
from tests.golden.quantized import fp8, write_safetensors

BLOCKS = fp8(block=True)

NEXT = {
    "layer": "mtp.layers.0.",
    "proj": "mtp.fc",
    "embed_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "final_norm": "mtp.norm",
}
LAST = {
    "layer": "model.layers.3.",
    "proj": "model.layers.3.eh_proj",
    "embed_norm": "model.layers.3.enorm",
    "hidden_norm": "model.layers.3.hnorm",
    "final_norm": "model.layers.3.shared_head.norm",
}
LONGCAT = {
    "layer": "model.mtp.layers.0.",
    "proj": "model.mtp.layers.0.eh_proj",
    "embed_norm": "model.mtp.layers.0.enorm.m",
    "hidden_norm": "model.mtp.layers.0.hnorm.m",
    "final_norm": "model.mtp.norm",
}
LING = {
    name: module.replace("layers.3", "layers.4").replace("shared_head.norm", "final_layernorm")
    for name, module in LAST.items()
}
# Golden model -> names of its head, keys that announce it, layers to copy attention and MLP from,
# what is added to the norms' weights, and the keys of a model of the head's layer alone.
ALONE = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "tie_word_embeddings": False}
CASES = {
    "qwen3_next": (NEXT, {}, 1, 1, 1, ALONE | {"decoder_sparse_step": 1}),
    "qwen3_5_text": (NEXT, {"mtp_num_hidden_layers": 1}, 3, 0, 1, ALONE),
    "qwen3_5_text_new_keys_tied": (NEXT, {"mtp_num_hidden_layers": 1}, 3, 0, 1, ALONE),
    "qwen3_5_moe": (NEXT, {"mtp_num_hidden_layers": 1}, 3, 1, 1, ALONE),
    "qwen3_5_moe_text": (NEXT, {"mtp_num_hidden_layers": 1}, 2, 0, 1, ALONE),
    "glm4_moe": (
        LAST,
        {"num_nextn_predict_layers": 1},
        *(2, 2, 0),
        {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    ),
    "deepseek_v3": (
        LAST,
        {"num_nextn_predict_layers": 1},
        *(2, 2, 0),
        {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    ),
    "longcat_flash_new_keys_yarn_biases": (
        LONGCAT,
        {},
        *(1, 1, 0),
        # Latent attention and an MLP.
        {
            "model_type": "youtu",
            "num_hidden_layers": 1,
            "intermediate_size": 96,
            "zero_expert_num": 0,
            "routed_scaling_factor": 1,
        },
    ),
    "bailing_hybrid": (
        LING,
        {"num_nextn_predict_layers": 1},
        *(1, 1, 0),
        ALONE | {"mlp_layer_types": ["sparse"]},
    ),
    "bailing_moe_v2_5_new_keys": (
        LING,
        {"num_nextn_predict_layers": 1},
        *(2, 2, 0),
        {"num_hidden_layers": 1, "layer_group_size": 1, "first_k_dense_replace": 0},
    ),
    "glm4_moe_lite_new_keys": (
        LAST,
        {"num_nextn_predict_layers": 1},
        *(2, 2, 0),
        {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
    ),
}
NUM_TOKENS = 11


def noise(rng, shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def rms(x, weight, offset, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (weight + offset)


def name_in_head(names, name):
    """The head's name of a tensor of a layer; None for one that it lacks."""
    if names is not LONGCAT:
        return name
    if ".1." in name or name.startswith("mlp."):
        return None
    return name.replace(".0.", ".").replace("mlps.", "transformer_layer.mlp.")


def alone_tensor(names, name, array, hidden_size):
    """Name and values of a tensor of the head's layer in a model of that layer alone."""
    if names is LONGCAT and re.search(r"(q|kv)_a_layernorm", name):
        array = array * np.float32((hidden_size / len(array)) ** 0.5)
    return name.removeprefix("transformer_layer."), array


@pytest.fixture(params=CASES)
def checkpoint(request, tmp_path):
    """The folder of a model with a head, and the case's record."""
    names, keys, attention, mlp, *_ = record = CASES[request.param]
    write_checkpoint(request.param, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    text = values.get("text_config", values)
    text.update(keys)
    tensors = load_file(tmp_path / "model.safetensors")
    rng, n = np.random.default_rng(5), text["hidden_size"]
    for name, array in list(tensors.items()):
        found = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.(.*)", name)
        source = mlp if found and found[2].startswith("mlp.") else attention
        if found and int(found[1]) == source and (own := name_in_head(names, found[2])):
            tensors[names["layer"] + own] = noise(rng, array.shape)
    for kind in ("embed_norm", "hidden_norm", "final_norm"):
        tensors[f"{names[kind]}.weight"] = noise(rng, (n,)) + np.float32(0.7)
    tensors[f"{names['proj']}.weight"] = noise(rng, (n, 2 * n))
    if names in (LAST, LING):
        tensors[f"{names['layer']}shared_head.head.weight"] = tensors["lm_head.weight"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, record


def text_of(folder):
    """The config.json of the text model."""
    values = json.loads((folder / "config.json").read_text())
    return values.get("text_config", values)


def write_keys(folder, **keys):
    """Change keys of the text model."""
    values = json.loads((folder / "config.json").read_text())
    values.get("text_config", values).update(keys)
    (folder / "config.json").write_text(json.dumps(values))


def layer_alone(folder, names, changes, x, offset):
    """States (T, N) of the rows x (T, N): the head's layer as a model whose embeddings they are."""
    values = text_of(folder) | changes
    tensors = load_file(folder / "model.safetensors")
    n = values["hidden_size"]
    made = {}
    for name, array in tensors.items():
        is_own = name.startswith(names["layer"])
        if is_own and not re.search(r"eh_proj|enorm|hnorm|shared_head|final_layernorm", name):
            own, array = alone_tensor(names, name.removeprefix(names["layer"]), array, n)
            made[f"model.layers.0.{own}"] = array
    table = "word_embeddings" if "model.word_embeddings.weight" in tensors else "embed_tokens"
    made[f"model.{table}.weight"] = np.zeros((128, n), np.float32)
    made[f"model.{table}.weight"][: len(x)] = x
    made["model.norm.weight"] = tensors[f"{names['final_norm']}.weight"]
    made["lm_head.weight"] = np.eye(128, n, dtype=np.float32)
    where = folder / "alone"
    where.mkdir()
    keys = {"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}
    (where / "config.json").write_text(json.dumps(values | keys))
    save_file(made, where / "model.safetensors")
    model = engine.load(where, device="cpu", dtype="float32", progress=False)
    cache = model.new_cache(1, len(x))
    return model.step([list(range(len(x)))], cache, logits="all")[0][:, :n]


def test_states_are_those_of_the_formula(checkpoint):
    folder, (names, _, _, _, offset, changes) = checkpoint
    model = engine.load(folder, device="cpu", dtype="float32", progress=False)
    config = load_mtp_config(folder, model.config)
    head = load_mtp_head(folder, config, model.load_config, model.draft_target)
    rng, n = np.random.default_rng(0), config.hidden_size
    ids = rng.integers(4, 128, NUM_TOKENS).astype(np.int32)
    states = rng.standard_normal((NUM_TOKENS, n)).astype(np.float32)

    tensors, eps = load_file(folder / "model.safetensors"), config.rms_norm_eps
    table = next(name for name in tensors if re.search(r"(embed_tokens|word_embeddings)\.w", name))
    embedding = tensors[table][ids]
    both = [
        rms(embedding, tensors[f"{names['embed_norm']}.weight"], offset, eps),
        rms(states, tensors[f"{names['hidden_norm']}.weight"], offset, eps),
    ]
    x = np.concatenate(both, axis=1) @ tensors[f"{names['proj']}.weight"].T
    want = layer_alone(folder, names, changes, x.astype(np.float32), offset)

    geometry = KVGeometry.of_model(head.config, "float32")
    assert head.config.num_layers == 1
    pages = KVCache(geometry, 1).layer(0)
    first, second = (slice(0, 4), [0]), (slice(4, None), [4])
    got = []
    for rows, start in (first, second):  # keys of the first chunk are read by the second
        batch = ForwardBatch.build([ids[rows]], start, [[0]], 16)
        got.append(head.forward(batch.token_ids, states[rows].copy(), batch, pages))
    np.testing.assert_allclose(np.concatenate(got), want, atol=1e-4 * want.std())
    stored = KVCache(geometry, 1).layer(0)
    batch = ForwardBatch.build([ids], [0], [[0]], 16)
    head.store(batch.token_ids, states.copy(), batch, stored)
    for one, other in zip(stored, pages, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_projection_in_fp8_blocks(tmp_path):
    """As in LongCat's fp8 checkpoints."""
    case = "longcat_flash_new_keys_yarn_biases"
    names = CASES[case][0]
    write_checkpoint(case, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"quantization_config": BLOCKS.config})
    )
    n = values["hidden_size"]
    rng = np.random.default_rng(8)
    tensors = {
        name: ("F32", array) for name, array in load_file(tmp_path / "model.safetensors").items()
    }
    for name in list(tensors):
        own = name_in_head(names, name.removeprefix("model.layers.0."))
        if name.startswith("model.layers.0.") and own:
            tensors[names["layer"] + own] = tensors[name]
    for kind in ("embed_norm", "hidden_norm", "final_norm"):
        tensors[f"{names[kind]}.weight"] = ("F32", np.ones(n, np.float32))
    stored, numbers = BLOCKS.linear(rng, (n, 2 * n), 0)
    tensors |= {f"{names['proj']}.{kind}": tensor for kind, tensor in stored.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    config = load_mtp_config(tmp_path, model.config)
    head = load_mtp_head(tmp_path, config, model.load_config, model.draft_target)
    want = np.concatenate([numbers[:, n:], numbers[:, :n]], axis=1)  # the state comes first
    np.testing.assert_array_equal(head._weights["proj"], want)


def test_tokens_are_those_without_a_head(checkpoint):
    """Rejected drafts are rolled back, in states too; some requests share prompts."""
    folder, _ = checkpoint
    write_keys(folder, max_position_embeddings=256)
    options = {"device": "cpu", "dtype": "float32", "deterministic": True, "progress": False}
    model = engine.load(folder, **options)
    rng = np.random.default_rng(7)
    head = rng.integers(4, 128, 66).tolist()
    prompts = [[5, 6, 7], [*head, 8, 9], head + rng.integers(4, 128, 9).tolist()]
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    serving = make_engine(model, num_blocks=16, speculative_config=config)
    params = [mixed_params(index, max_tokens=16, n=1 + index % 2) for index in range(3)]
    for index, (ids, each) in enumerate(zip(prompts, params, strict=True)):
        serving.add_request(f"{index}", ids, each)
    outputs = run(serving)
    for index, (ids, each) in enumerate(zip(prompts, params, strict=True)):
        got = [list(one.token_ids) for one in outputs[f"{index}"].outputs]
        assert got == alone(model, ids, each), index
    stats = serving.stats().speculation
    assert stats.num_drafts > 0 and stats.num_proposer_failures == 0
    serving.close()


def test_drafts_need_a_head_that_the_config_announces(checkpoint):
    folder, (names, keys, *_) = checkpoint
    model = engine.load(folder, device="cpu", dtype="float32", progress=False)
    if not keys:
        assert names in (NEXT, LONGCAT)  # config.json says nothing about it
        return
    [key] = keys
    write_keys(folder, **{key: 0})
    with pytest.raises(ConfigError, match=f"{key} must be at least 1; got 0"):
        load_mtp_config(folder, model.config)
