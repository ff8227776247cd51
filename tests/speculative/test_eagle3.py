"""EAGLE-3 heads: their checkpoints, their logits, and the tokens of a model that has one."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest

from engine import SamplingParams
from engine.cache.memory_pool import format_bytes
from engine.config import AltUpConfig
from engine.device import to_numpy
from engine.errors import ConfigError, WeightsError
from engine.layers.batch import ForwardBatch
from engine.loading.eagle3 import load_eagle3_config, load_eagle3_weights
from engine.speculative import head_proposer
from engine.speculative.config import SpeculativeConfig
from engine.speculative.head_pages import HeadSequence
from engine.speculative.heads import load_head
from tests.e2e.tiny import CONFIG, alone, make_engine, mixed_params, run, swap_gb, tiny_model
from tests.speculative import heads

TARGET = dataclasses.replace(CONFIG, num_layers=4)
LAYERS = (2, 2, 1)  # 2, L // 2 and L - 3


@pytest.fixture(scope="module")
def model():
    return tiny_model(config=TARGET, deterministic=True)


def make_head(folder, seed=0, **changes):
    """Write a random head; return its folder, values and tensors."""
    rng = np.random.default_rng(seed)
    values = heads.eagle3_json(TARGET, **changes)
    tensors = heads.eagle3_tensors(rng, values, TARGET)
    return heads.write(folder, values, tensors), values, tensors


def features_of(model, token_ids, layers=LAYERS):
    """The residual stream that enters these layers, from the layers themselves one by one."""
    decoder, features = model.decoder, {}
    cache = model.new_cache(1, len(token_ids))
    batch = ForwardBatch.build([token_ids], [0], [cache.block_tables[0]], 16, logits="all")
    batch = batch.to(model.device)
    decoder.extend_ropes(len(token_ids))
    delta, residual = None, decoder.embed(batch.token_ids)
    for index, layer in enumerate(decoder.layers):
        features[index] = residual + (0 if delta is None else delta)
        delta, residual = layer(delta, residual.copy(), batch, cache.pages[index])
    features[len(decoder.layers)] = residual + delta
    return np.concatenate([to_numpy(features[index]) for index in layers], axis=1)


def drafts_of(engine):
    """The drafts of each call of the engine's proposer, by request id; the list grows."""
    proposer, seen = engine.speculation._proposer._proposer, []
    propose = proposer.propose

    def watched(wanted):
        given = propose(wanted)
        known = [r.token_ids(0, r.num_known_tokens) for r, _ in wanted]
        seen.extend(zip([r.request_id for r, _ in wanted], known, given, strict=True))
        return given

    proposer.propose = watched
    return seen


def config_of(folder, **more):
    options = {"num_speculative_tokens": 3, "adaptive": False}
    return {"method": "eagle3", "model": str(folder)} | options | more


# ---- checkpoints


def test_a_head_is_read(tmp_path, model):
    folder, _, tensors = make_head(tmp_path)
    config = load_eagle3_config(folder, TARGET)
    assert config.feature_layers == LAYERS and config.draft_vocab_size == 48
    weights = load_eagle3_weights(folder, config, model.device, "float32")
    ids = weights["target_ids"]
    assert np.array_equal(ids, np.flatnonzero(tensors["t2d"]))
    parts = [tensors[f"midlayer.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert np.array_equal(weights["qkv"], np.concatenate(parts))
    assert "embed" not in weights


def test_the_other_layout_is_read(tmp_path, model):
    values = heads.eagle3_json(TARGET)
    rng = np.random.default_rng(0)
    tensors = heads.eagle3_tensors(rng, values, TARGET, 2, "layers.0.", embed=True)
    nested = {k: values[k] for k in values if k not in ("draft_vocab_size", "model_type")}
    own = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 48,
        "eagle_aux_hidden_state_layer_ids": [0, 4],
    }
    folder = heads.write(tmp_path, own | {"transformer_layer_config": nested}, tensors)
    config = load_eagle3_config(folder, TARGET)
    assert config.feature_layers == (0, 4) and config.norm_before_residual
    assert load_eagle3_weights(folder, config, model.device, "float32")["embed"].shape == (97, 48)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, "hidden_size must be that of the model, 48; got 32"),
        ({"target_hidden_size": 64}, "target_hidden_size must be that of the model, 48; got 64"),
        ({"vocab_size": 96}, "vocab_size must be that of the model, 97; got 96"),
        ({"draft_vocab_size": 98}, "draft_vocab_size must be a whole number from 1 to 97; got 98"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1; got 2"),
        ({"norm_before_fc": True}, "not implemented"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5]}, "layers from 0 to 4"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, changes, words):
    folder, _, _ = make_head(tmp_path, 0)
    heads.write(folder, heads.eagle3_json(TARGET, **changes), {})
    with pytest.raises(ConfigError, match=words):
        load_eagle3_config(folder, TARGET)


def test_a_target_of_several_residual_streams_is_refused(tmp_path):
    folder, _, _ = make_head(tmp_path)
    target = dataclasses.replace(TARGET, altup=AltUpConfig(4, True, 16))
    with pytest.raises(ConfigError, match="one residual stream; llama has 4"):
        load_eagle3_config(folder, target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), "a tensor is missing: fc.weight"),
        (lambda t: t.pop("d2t"), "a tensor is missing: d2t"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, 1:]}), "must have shape"),
        (lambda t: t.update({"more.weight": t["norm.weight"]}), "does not have: more.weight"),
        (lambda t: t.update(d2t=t["d2t"] + 97), "must map to different ids"),
        (lambda t: t.update(d2t=-np.arange(48)), "must map to different ids"),
        (lambda t: t.update(d2t=t["d2t"].astype(np.int32)), "must be I64"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].astype(np.int32)}), "must be one of"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, model, change, words):
    _, values, tensors = make_head(tmp_path / "x")
    change(tensors)
    folder = heads.write(tmp_path / "y", values, tensors)
    config = load_eagle3_config(folder, TARGET)
    with pytest.raises(WeightsError, match=words):
        load_eagle3_weights(folder, config, model.device, "float32")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"quantization": "int8"}, "speculative_config.quantization must be left out"),
        ({"dtype": "float16"}, "speculative_config.dtype must be that of the model"),
    ],
)
def test_options_that_a_head_does_not_have_are_refused(tmp_path, model, option, words):
    folder, _, _ = make_head(tmp_path)
    with pytest.raises(ConfigError, match=words):
        make_engine(model, speculative_config=config_of(folder, **option))


def test_the_plan_counts_a_head(tmp_path, model):
    folder, values, tensors = make_head(tmp_path)
    engine = make_engine(model, speculative_config=config_of(folder))
    slabs = engine.kv_cache.pool.stats().slabs
    per_block = 2 * values["num_key_value_heads"] * values["head_dim"] * 16 * 4
    assert slabs["draft kv"] == (64 + 4) * per_block  # a block of each request for its drafts
    weights = sum(t.size * 4 for name, t in tensors.items() if name not in ("d2t", "t2d"))
    weights += 8 * 48 + 4 * 8 * 256  # ids, rope table
    reason = engine.config.reasons["draft_model"]
    assert format_bytes(weights) in reason and format_bytes(per_block) in reason
    features = 2 * (24 + 24) * 48 * 4  # layers, tokens of the last step and of this, width
    assert reason.endswith(f", {format_bytes(features)} for the model's features")
    engine.close()
    assert not engine.kv_cache.pool.stats().slabs


# ---- drafts


def check_drafts(model, values, tensors, seen):
    """Check drafts against the formula, computed from the whole sequences."""
    embed = model.decoder.embed.weight.data
    for _, known, drafts in seen:
        features = features_of(model, known)[:-1]
        wanted, _ = heads.eagle3_drafts(tensors, values, embed, features, known, 3)
        assert drafts is not None and list(drafts.token_ids) == wanted[: len(drafts)]


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize(("chunk", "graphs"), [(24, False), (7, False), (24, True)])
def test_drafts_are_those_of_the_formula(tmp_path, model, norm_before_residual, chunk, graphs):
    """Whatever the chunks of the prompt, and after accepted and rejected drafts."""
    given = make_head(tmp_path, norm_before_residual=norm_before_residual)
    folder, values, tensors = given
    engine = make_engine(model, speculative_config=config_of(folder), max_num_batched_tokens=chunk)
    if graphs:
        engine.runner.capture_graphs(256, 3)
    seen = drafts_of(engine)
    prompt = np.random.default_rng(3).integers(4, 97, 20).tolist()
    engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    run(engine)
    assert len(seen) >= 3
    check_drafts(model, values, tensors, seen)
    engine.close()


def test_a_cached_prefix_is_attended_to(tmp_path, model):
    """Its keys are those that the head computed for another request."""
    folder, values, tensors = make_head(tmp_path, 2)
    engine = make_engine(model, speculative_config=config_of(folder))
    prompt = np.random.default_rng(4).integers(4, 97, 39).tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("first", prompt, params)
    run(engine)
    seen = drafts_of(engine)
    engine.add_request("second", prompt, params)
    run(engine)
    assert engine.scheduler.stats().prefix_cache_hits == 32 and seen
    check_drafts(model, values, tensors, seen)
    engine.close()


def test_keys_that_are_missing_are_left_out(tmp_path, model):
    """The prefix was computed before the head looked on; its positions stay where they were."""
    folder, values, tensors = make_head(tmp_path, 3)
    engine = make_engine(model, speculative_config=config_of(folder))
    prompt = np.random.default_rng(5).integers(4, 97, 39).tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tap = engine.runner.features
    take, tap.on_step = tap.on_step, None
    engine.add_request("first", prompt, params)
    run(engine)
    tap.on_step = take
    seen = drafts_of(engine)
    engine.add_request("second", prompt, params)
    run(engine)
    embed = model.decoder.embed.weight.data
    assert seen
    for _, known, drafts in seen:
        features = features_of(model, known)[32:-1]
        ids = known[32:]
        wanted, _ = heads.eagle3_drafts(tensors, values, embed, features, ids, 3)
        assert list(drafts.token_ids) == wanted[: len(drafts)]
    engine.close()


def test_logits_are_those_of_the_formula(tmp_path, model):
    folder, values, tensors = make_head(tmp_path, 5)
    head = load_head(SpeculativeConfig(method="eagle3", model=str(folder)), model).head
    ids = np.random.default_rng(1).integers(0, 97, 21).tolist()
    features = features_of(model, ids)[:-1]
    embed = model.decoder.embed.weight.data
    _, wanted = heads.eagle3_drafts(tensors, values, embed, features, ids, 1)
    pages = np.zeros((2, 2, 2, 16, 8), np.float32)
    batch = ForwardBatch.build([ids[1:]], [0], [[1, 0]], 16, logits="all")
    parts = [np.ascontiguousarray(features[:, i * 48 : (i + 1) * 48]) for i in range(3)]
    state = head.forward(batch.token_ids, head.combine(parts), batch, pages)
    logits = head.logits(state)[-1]
    known = np.flatnonzero(tensors["t2d"])
    np.testing.assert_allclose(logits[known], wanted[0], rtol=1e-4, atol=1e-4)
    assert np.isneginf(np.delete(logits, known)).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 14},
        {"num_blocks": 14, "swap_space_gb": swap_gb(40), "preemption_mode": "swap"},
        {"num_blocks": 20, "async_scheduling": True, "adaptive": True},
    ],
)
def test_tokens_are_those_without_a_head(tmp_path, model, options):
    """Many requests with common prefixes, some of them preempted where there are few pages."""
    options = dict(options)
    more = {"adaptive": options.pop("adaptive", False)}
    folder, _, _ = make_head(tmp_path)
    rng = np.random.default_rng(7)
    common = rng.integers(4, 97, 37).tolist()
    engine = make_engine(model, speculative_config=config_of(folder, **more), **options)
    wanted = {}
    for index in range(8):
        prompt = common[: 5 * index + 2] + rng.integers(4, 97, 3 + index).tolist()
        params = mixed_params(index, max_tokens=20, n=1 + index % 2)
        wanted[f"r{index}"] = alone(model, prompt, params)
        engine.add_request(f"r{index}", prompt, params)
    outputs = run(engine)
    for name, ids in wanted.items():
        assert [list(o.token_ids) for o in outputs[name].outputs] == ids
    stats = engine.stats()
    assert stats.speculation.num_drafts > 0 or more["adaptive"]
    assert stats.speculation.num_proposer_failures == 0
    engine.close()


def test_a_head_that_fails_costs_no_request(tmp_path, model):
    """Neither while a prompt is computed nor while drafts are proposed; then it goes on."""
    folder, _, _ = make_head(tmp_path)
    engine = make_engine(model, speculative_config=config_of(folder))
    proposer = engine.runner.features.on_step.__self__
    head, calls = proposer._head, iter(range(100))

    class Failing:
        def __getattr__(self, name):
            if name in ("store", "forward") and next(calls) in (1, 4, 5):
                raise RuntimeError("a fault")
            return getattr(head, name)

    proposer._head = Failing()
    prompt = np.random.default_rng(8).integers(4, 97, 60).tolist()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add_request("r", prompt, params)
    assert list(run(engine)["r"].outputs[0].token_ids) == alone(model, prompt, params)[0]
    stats = engine.stats().speculation
    assert stats.num_proposer_failures == 3 and stats.num_drafts > 5
    engine.close()


def test_a_restart_before_the_first_key_resets_nothing(tmp_path, model):
    """A prefix without keys of the head is lost in a preemption, and computed again."""
    folder, _, _ = make_head(tmp_path)
    engine = make_engine(model, speculative_config=config_of(folder))
    proposer = engine.runner.features.on_step.__self__
    prompt = np.random.default_rng(4).integers(4, 97, 39).tolist()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add_request("w", prompt, dataclasses.replace(params, use_speculation=False))
    run(engine)
    for index in range(2):
        engine.add_request(f"r{index}", [*prompt, index], params)
    while len(engine.scheduler._queues.running) < 2:
        engine.step()
    engine.step()
    assert [own.blocks[0].first for own in proposer._sequences.values()] == [32, 32]
    engine.runner.release([engine.scheduler._queues.preempt_last(swap=False)])
    engine.reset_prefix_cache()
    pages, outputs = proposer._pages, run(engine)
    assert proposer._pages is pages and engine.stats().speculation.num_proposer_failures == 0
    for index in range(2):
        ids = list(outputs[f"r{index}"].outputs[0].token_ids)
        assert ids == alone(model, [*prompt, index], params)[0]
    engine.close()


def test_a_request_at_the_maximum_length_beside_one_that_wants_many_drafts(tmp_path, model):
    """No position is beyond the rope table, although all chains are of the longest's length."""
    folder, _, _ = make_head(tmp_path)
    options = {"speculative_config": config_of(folder, num_speculative_tokens=8)}
    engine = make_engine(model, max_num_batched_tokens=64, **options)
    proposer = engine.runner.features.on_step.__self__
    chains, positions = proposer._chain_batches, []

    def watched(works, count):
        for batch in chains(works, count):
            positions.extend(np.asarray(batch.rope_positions).tolist())
            yield batch

    proposer._chain_batches = watched
    rng, last = np.random.default_rng(0), engine.config.scheduler.max_model_len - 1
    for name, length, count in (("long", last - 11, 12), ("short", 20, 60)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine.add_request(name, rng.integers(4, 97, length).tolist(), params)
    run(engine)
    assert max(positions) == last
    assert engine.stats().speculation.num_proposer_failures == 0
    engine.close()


def test_closing_the_engine_frees_the_head(tmp_path, model):
    folder, _, _ = make_head(tmp_path)
    engine = make_engine(model, speculative_config=config_of(folder))
    proposer = engine.runner.features.on_step.__self__
    head = weakref.ref(proposer._head)
    engine.add_request("r", [5, 6, 7], SamplingParams(max_tokens=4))
    engine.step()
    engine.close()
    proposer.close()  # does nothing
    assert engine.runner.features.on_step is None
    gc.collect()
    assert head() is None


def test_steps_without_new_keys_make_no_entries(tmp_path, model, monkeypatch):
    folder, _, _ = make_head(tmp_path)
    engine, made = make_engine(model, speculative_config=config_of(folder)), []
    monkeypatch.setattr(head_proposer, "HeadSequence", lambda: made.append(1) or HeadSequence())
    for index in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add_request(f"r{index}", [5, 6, 7], params)
    run(engine)
    assert len(made) == 3
    engine.close()


def perfect_pair(folder, where="cpu"):
    """A model whose next token is a function of the last one, and a head that knows it.

    Embeddings are unit vectors, and all layers of the model add nothing: logits are a permutation
    of the embedding. The head's attention adds nothing, and its MLP moves its state by one token.
    """
    size = 24
    config = dataclasses.replace(TARGET, vocab_size=size, hidden_size=size, eos_token_ids=())
    model = tiny_model(where, config, deterministic=True)
    next_ids = np.random.default_rng(1).permutation(size)
    step = np.zeros((size, size), np.float32)
    step[next_ids, np.arange(size)] = 1
    weights = model.decoder.weights
    for name, weight in weights.items():
        if name.endswith((".o", ".down")):
            weight.data[...] = 0
        elif name.endswith("norm"):
            weight.data[...] = 1
    xp = model.device.xp
    weights["embed"].data[...] = xp.eye(size)
    weights["lm_head"].data[...] = xp.asarray(step)
    values = heads.eagle3_json(config, draft_vocab_size=size, intermediate_size=size)
    tensors = heads.eagle3_tensors(np.random.default_rng(0), values, config)
    tensors = {k: np.ones_like(t) if "norm" in k else t for k, t in tensors.items()}
    length = 1 / np.sqrt(1 / size + heads.EPS)  # of a normed unit vector
    fc = np.concatenate([np.eye(size), np.zeros((size, 2 * size))], axis=1)
    tensors |= {
        "fc.weight": fc.astype(np.float32),
        "lm_head.weight": step,
        "d2t": np.zeros(size, np.int64),
        "midlayer.self_attn.o_proj.weight": np.zeros((size, 32), np.float32),
        "midlayer.mlp.gate_proj.weight": np.full((size, size), 1 / length, np.float32),
        "midlayer.mlp.up_proj.weight": ((step - np.eye(size)) / length).astype(np.float32),
        "midlayer.mlp.down_proj.weight": (np.eye(size) * (1 + np.exp(-1))).astype(np.float32),
    }
    return model, heads.write(folder, values, tensors)


@pytest.mark.parametrize("given", [{"temperature": 0}, {"temperature": 0.7, "seed": 5}])
def test_a_head_that_is_right_is_always_accepted(tmp_path, given):
    model, folder = perfect_pair(tmp_path)
    engine = make_engine(model, speculative_config=config_of(folder))
    params = SamplingParams(max_tokens=41, ignore_eos=True, **given)
    engine.add_request("r", [1, 2, 3], params)
    tokens = list(run(engine)["r"].outputs[0].token_ids)
    stats = engine.stats().speculation
    assert tokens == alone(model, [1, 2, 3], params)[0]
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 30
    engine.close()
