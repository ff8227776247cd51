"""Tiny models of every type and rope scaling against transformers' logits and greedy tokens."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import engine
from engine import kernels
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.memory_pool import MemoryPool
from engine.config import AltUpConfig, RopeConfig
from engine.device import CPU, to_numpy
from engine.errors import ConfigError
from engine.layers.batch import ForwardBatch
from engine.layers.mlp import MLP
from engine.loading.hf_config import config_from_dict
from engine.loading.model_config import load_config
from engine.models.decoder import Decoder
from engine.models.kernel_set import kernel_specs
from engine.models.registry import FAMILIES
from engine.models.rope_tables import rope_bytes
from engine.models.wrappers import WRAPPERS

GOLDEN = Path(__file__).parents[1] / "golden/models"
CASES = sorted(p.stem for p in GOLDEN.glob("*.json"))
# The engine's float32 against another program's: only the order of rounding differs.
LIMIT = 1e-4
# Families that transformers does not have -> the one whose golden model is theirs too.
TWINS = {"mimo": "qwen2"}
# One model of each kind of attention and MLP, for the slower properties.
VARIED = [
    *("llama_dynamic", "mistral_window", "qwen3", "phi3_longrope_long", "gemma3"),
    *("granite", "olmo3", "smollm3", "qwen2_moe", "gpt_oss"),
    *("qwen3_next", "lfm2", "granitemoehybrid"),
]

_SPIN = """extern "C" __global__ void spin(long long clocks) {
  for (long long end = clock64() + clocks; clock64() < end;) {}
}"""


def _error(got, want) -> float:
    """Return the largest error in standard deviations of the logits."""
    return float(np.abs(to_numpy(got) - want).max() / want.std())


def _greedy(model, cache, prompt, count):
    row, tokens = model.step([prompt], cache)[0], []
    for _ in range(count):
        tokens.append(int(row.argmax()))
        row = model.step([tokens[-1:]], cache)[0]
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_all_logits(golden, case, where):
    """The prompt in one chunk."""
    want = golden(case)
    model = want.load(where)
    cache = model.new_cache(1, want.max_tokens)
    got = model.step([want.prompt], cache, logits="all")
    assert got.dtype == np.float32 and got.shape == (1, *want.logits.shape)
    assert _error(got[0], want.logits) < LIMIT


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens(golden, case, where):
    want = golden(case)
    model = want.load(where)
    cache = model.new_cache(1, want.max_tokens + 1)
    assert _greedy(model, cache, want.prompt, len(want.greedy)) == want.greedy


@pytest.mark.gpu
def test_tensors_are_copied_after_the_rows_that_they_leave_out_are_zeros(cp, golden, monkeypatch):
    """Narrow values leave rows of qkv empty. The zeros wait here behind a slow kernel."""
    want = golden("mimo_v2_flash")
    spin = cp.RawKernel(_SPIN, "spin")
    synchronize = cp.cuda.runtime.deviceSynchronize

    def synchronize_and_spin():
        synchronize()
        spin((1,), (1,), (np.int64(10**8),))

    monkeypatch.setattr(cp.cuda.runtime, "deviceSynchronize", synchronize_and_spin)
    model = want.load("cuda")
    monkeypatch.undo()
    got = model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")
    assert _error(got[0], want.logits) < LIMIT


@pytest.mark.parametrize("size", [1, 3, 11])
@pytest.mark.parametrize("case", CASES)
def test_prompt_in_chunks(golden, case, size, where):
    want = golden(case)
    model = want.load(where)
    cache = model.new_cache(1, want.max_tokens)
    pieces = [want.prompt[i : i + size] for i in range(0, len(want.prompt), size)]
    got = [to_numpy(model.step([piece], cache, logits="all"))[0] for piece in pieces]
    # Longrope: a piece up to the training length has the short factors, the whole prompt the long.
    first = 0
    if len(want.prompt) > model.short_rope_len > 0:
        first = model.short_rope_len // size * size
    assert _error(np.concatenate(got)[first:], want.logits[first:]) < LIMIT


@pytest.mark.parametrize("case", CASES)
def test_a_trace_ends_in_the_logits(golden, case):
    want = golden(case)
    model = want.load()
    kinds = set(model.config.layer_kinds) - {"attention", "mla"}
    if kinds or case.startswith(("gemma3n", "gemma4")):
        with pytest.raises(ConfigError, match="a trace is not supported for"):
            model.trace(np.array(want.prompt))
        return
    got = model.read_residual(model.trace(np.array(want.prompt)).hidden[-1])
    assert _error(got, want.logits) < LIMIT


@pytest.mark.parametrize("case", CASES)
def test_the_plan_knows_the_room_of_rope_tables(golden, case):
    decoder = golden(case).load().decoder
    assert decoder.table_bytes == rope_bytes(decoder.config, decoder.max_model_len)


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 27)), case=st.sampled_from(VARIED))
def test_prompt_chunked_at_any_points(golden, cuts, case):
    want = golden(case)
    model = want.load()
    cache = model.new_cache(1, want.max_tokens)
    borders = [0, *sorted(cuts), len(want.prompt)]
    for start, stop in itertools.pairwise(borders):
        row = model.step([want.prompt[start:stop]], cache)[0]
        if stop <= model.short_rope_len < len(want.prompt):
            continue  # longrope: the factors are still the short ones
        assert _error(row, want.logits[stop - 1]) < LIMIT * 2  # std of one row, not of all


@pytest.mark.parametrize("case", CASES)
def test_in_a_batch_with_others(golden, case, where):
    """Sequences of many lengths, decoded and prefilled in one step, in scattered blocks."""
    want = golden(case)
    model = want.load(where)
    prompt = want.prompt
    offset = model.decoder.rope_offsets(len(prompt))
    c = model.config
    geometry = KVGeometry.of_model(c, "float32")
    has_states = geometry.has_states
    pages = KVCache(geometry, 12, MemoryPool(model.device), num_slots=5 if has_states else 0)
    state_slots = np.array([3, 0, 4, 1, 2], np.int32)
    tables = [[7, 2], [11, 0], [4, 5], [1, 10], [9, 3]]

    def step(rows):
        """rows: (sequence, first token, end)."""
        batch = ForwardBatch.build(
            [prompt[a:b] for _, a, b in rows],
            [a for _, a, _ in rows],
            [tables[s] for s, _, _ in rows],
            16,
            rope_offset=offset,
            state_slots=state_slots[[s for s, _, _ in rows]] if has_states else None,
        )
        logits = to_numpy(model.forward(batch.to(model.device), pages.layers))
        expected = want.logits[[b - 1 for _, _, b in rows]]
        assert np.abs(logits - expected).max() / want.logits.std() < LIMIT
        return batch

    # Keys may be computed twice, a state may not.
    assert step([(0, 0, 9), (1, 0, 20 if has_states else 28), (2, 0, 16)]).num_decodes == 0
    assert step([(0, 9, 10), (2, 16, 17), (3, 0, 5), (4, 0, 1), (1, 20, 28)]).num_decodes == 2
    assert step([(2, 17, 18), (0, 10, 11), (3, 5, 6), (4, 1, 2)]).num_decodes == 4
    assert step([(3, 6, 28), (4, 2, 11), (0, 11, 12)]).num_decodes == 0


@pytest.mark.parametrize("wanted", [[8, 27], [30, 8, 8], [3], []], ids=str)
@pytest.mark.parametrize("case", ["gemma4", "gemma3n"])
def test_layers_that_store_nothing_run_for_tokens_with_logits(
    golden, case, wanted, where, monkeypatch
):
    """Tokens 0 to 8 begin a sequence; 9 to 36 are all of another. Some rows are unordered."""
    want = golden(case)
    model = want.load(where)
    rows = {}
    call = MLP.__call__

    def spy(mlp, x, **others):
        rows[id(mlp)] = x.shape[0]
        return call(mlp, x, **others)

    monkeypatch.setattr(MLP, "__call__", spy)
    c = model.config
    pages = KVCache(KVGeometry.of_model(c, "float32"), 4, MemoryPool(model.device)).layers
    batch = ForwardBatch.build([want.prompt[:9], want.prompt], [0, 0], [[3, 2], [1, 0]], 16)
    batch = replace(batch, logits_indices=np.array(wanted, np.int32))
    got = to_numpy(model.forward(batch.to(model.device), pages))
    positions = [row if row < 9 else row - 9 for row in wanted]
    assert got.shape == (len(wanted), c.vocab_size)
    if len(wanted) <= 2:
        last = [rows.get(id(layer.mlp), 0) for layer in model.decoder.layers]
        assert last == [37] * c.num_storing_layers + [len(wanted)] * 2
    assert not wanted or _error(got, want.logits[positions]) < LIMIT * 2


# Of the models with experts the one whose routers are farthest from ties: rounding to 16 bits moves
# logits by some 0.5 % of their standard deviation, and its closest choice is apart by 1.9 %.
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_new_keys_softcap", "olmoe"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_close(golden, case, dtype, where):
    want = golden(case)
    model = want.load(where, dtype)
    got = to_numpy(model.step([want.prompt], model.new_cache(1, 32), logits="all"))[0]
    cosine = (got * want.logits).sum(-1) / np.sqrt(
        np.square(got).sum(-1) * np.square(want.logits).sum(-1)
    )
    assert cosine.min() > {"float16": 0.9999, "bfloat16": 0.995}[dtype]


def test_a_rows_logits_do_not_depend_on_other_rows(golden, where):
    """Rows of one cache: the same tokens give the same logits in any row."""
    want = golden("qwen2_windows")
    model = want.load(where)
    rows = np.array([want.prompt, want.prompt[::-1], want.prompt])
    got = to_numpy(model.step(rows, model.new_cache(3, 40), logits="all"))
    assert _error(got[0], want.logits) < LIMIT
    assert _error(got[2], want.logits) < LIMIT


def test_every_family_has_a_golden_model():
    configs = [json.loads((GOLDEN / f"{case}.json").read_text())["config"] for case in CASES]
    types = {config_from_dict(config).model_type for config in configs}
    assert set(TWINS.values()) <= types and not types & set(TWINS)
    assert types | set(TWINS) == set(FAMILIES)
    # Transformers needs another package for the tower of gemma3n, and does not have phi4mm.
    assert set(WRAPPERS) - {"gemma3n", "phi4mm"} <= {config["model_type"] for config in configs}


def test_gemma3n_in_a_multimodal_checkpoint(golden, tmp_path):
    want = golden("gemma3n")
    text = json.loads((want.directory / "config.json").read_text())
    fields = {"model_type": "gemma3n", "text_config": text, "vision_config": {}, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(want.directory / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): a for name, a in tensors.items()}
    for tower in ("vision_tower.x", "audio_tower.x", "embed_vision.x", "embed_audio.x"):
        tensors[f"model.{tower}"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    cache = model.new_cache(1, want.max_tokens)
    assert _error(model.step([want.prompt], cache, logits="all")[0], want.logits) < LIMIT


def test_mimo_is_qwen2_beside_a_layer_that_it_ignores(golden, tmp_path):
    want = golden("qwen2")
    fields = json.loads((want.directory / "config.json").read_text())
    fields |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    fields["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(want.directory / "model.safetensors")
    rng, first = np.random.default_rng(0), "model.layers.0."
    for name in [name for name in tensors if name.startswith(first)]:
        noise = rng.standard_normal(tensors[name].shape).astype(np.float32)
        tensors[f"model.mtp_layers.0.{name.removeprefix(first)}"] = noise
    size = fields["hidden_size"]
    noise = rng.standard_normal((size, 2 * size)).astype(np.float32)
    tensors["model.mtp_layers.0.input_proj.weight"] = noise
    save_file(tensors, tmp_path / "model.safetensors")
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    assert model.config.model_type == "mimo"
    cache = model.new_cache(1, want.max_tokens)
    assert _error(model.step([want.prompt], cache, logits="all")[0], want.logits) < LIMIT
    cache = model.new_cache(1, want.max_tokens + 1)
    assert _greedy(model, cache, want.prompt, len(want.greedy)) == want.greedy


@pytest.mark.parametrize(
    "case", ["qwen3", "hunyuan_v1_dense", "ministral3", "llama4", "llama4_biases_new_keys"]
)
def test_kernels_that_store_keys_are_compiled_before_the_first_step(golden, monkeypatch, case):
    """Each variant of `qk_norm_rope_store` that a layer calls for is listed."""
    want, called = golden(case), set()
    original = kernels.qk_norm_rope_store

    def watched(*args, norm_after_rope=False, q_factors=None, **options):
        called.add((norm_after_rope, q_factors is not None))
        return original(*args, norm_after_rope=norm_after_rope, q_factors=q_factors, **options)

    monkeypatch.setattr(kernels, "qk_norm_rope_store", watched)
    model = want.load()
    model.step([want.prompt], model.new_cache(1, want.max_tokens))
    names = {"NORM_AFTER_ROPE", "Q_FACTORS"}
    listed = [
        names & dict(spec.defines).keys()
        for spec in kernel_specs(model.config, "float32")
        if spec.file == "qk_norm_rope_store.cu"
    ]
    for after, factors in called:
        variant = {"NORM_AFTER_ROPE"} if after else set()
        assert variant | ({"Q_FACTORS"} if factors else set()) in listed
    assert called


@pytest.mark.parametrize("case", CASES)
def test_ops_that_layers_call_are_compiled_before_the_first_step(golden, monkeypatch, case):
    want, called = golden(case), set()

    def watched(name, op):
        def run(*args, **options):
            called.add(name)
            return op(*args, **options)

        return run

    for name in kernels.__all__:
        if name.islower():
            monkeypatch.setattr(kernels, name, watched(name, getattr(kernels, name)))
    model = want.load()
    cache = model.new_cache(1, want.max_tokens)
    for ids in (want.prompt, want.greedy[:1]):
        model.step([ids], cache)
    files = (Path(spec.file) for spec in kernel_specs(model.config, "float32"))
    listed = {name for file in files for name in (file.stem, file.parts[0])}
    assert len(called) > 4
    assert called - {"moe_gemm_combine"} <= listed  # it launches moe_gemm's modules


@pytest.mark.parametrize("case", ["kimi_linear", "bailing_hybrid"])
def test_an_output_layer_beside_a_tied_config_is_used(golden, tmp_path, case):
    """transformers ties none in these families; the embedding has another name in some."""
    want = golden(case)
    (tmp_path / "config.json").write_text(json.dumps({**want.config, "tie_word_embeddings": True}))
    save_file(load_file(want.directory / "model.safetensors"), tmp_path / "model.safetensors")
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    got = model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")[0]
    assert _error(got, want.logits) < LIMIT


@pytest.mark.parametrize(
    "case", ["llama", "falcon", "gpt_neox", "opt", "nemotron_h", "bailing_hybrid"]
)
def test_names_without_the_prefix_of_their_family(golden, tmp_path, case):
    """As a model without its output layer is saved; transformers adds the prefix."""
    want = golden(case)
    tensors = load_file(want.directory / "model.safetensors")
    prefixes = ("model.", "transformer.", "gpt_neox.", "backbone.")
    prefix = next(one for one in prefixes if any(name.startswith(one) for name in tensors))
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    (tmp_path / "config.json").write_text(json.dumps(want.config))
    save_file(bare, tmp_path / "model.safetensors")
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    got = model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")[0]
    assert _error(got, want.logits) < LIMIT


# Names in published checkpoints -> in those saved with save_original_format=False.
DECAYS = {f"self_attn.{one}": f"self_attn.forget_gate.{one}" for one in ("A_log", "dt_bias", "f_")}
FUSED = {
    "minimax_m2": {"block_sparse_moe.": "mlp."},
    "phimoe": {"block_sparse_moe.gate": "mlp.router", "block_sparse_moe.": "mlp."},
    "hy_v3_biases_new_keys": {
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": "mlp.e_score_correction_bias",
        "mlp.shared_mlp": "mlp.shared_experts",
    },
    "ernie4_5_moe_biases_new_keys": {"mlp.moe_statics": "mlp.gate.moe_statics"},
    "exaone_moe": {"mlp.e_score": "mlp.gate.e_score"},
    "mimo_v2_flash_new_keys": {"attention_sink_bias": "sinks"},
    "gpt_neox": {"embed_out": "lm_head"},
    "kimi_linear_new_keys": {"block_sparse_moe.": "mlp.", **DECAYS},
    "bailing_hybrid": {
        "word_embeddings": "embed_tokens",
        ".attention.": ".self_attn.",
        ".dense.": ".o_proj.",
        "gate.expert_bias": "gate.e_score_correction_bias",
        **DECAYS,
    },
    **{case: {} for case in ("afmoe", "cohere2_moe", "hunyuan_v1_moe")},
}
CONVOLUTION = re.compile(r"(.*\.self_attn)\.[qkv]_conv1d\.weight")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate_proj|w1|up_proj|w3|down_proj|w2)\.weight")


def _fused(tensors, names):
    """Return the tensors under transformers' own names, with the matrices of all experts in one."""
    out, experts, convolutions = {}, {}, {}
    for name, value in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found = EXPERT.fullmatch(name)
        if (conv := CONVOLUTION.fullmatch(name)) is not None:  # in the order k, q, v
            convolutions.setdefault(conv[1], []).append(value)
        elif found is None:
            out[name] = value
        else:  # experts and their matrices are in order: gate, up
            first = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(found[2], found[2])
            experts.setdefault(found[1], {}).setdefault(first, []).append(value)
    for prefix, matrices in experts.items():
        gate, up, down = (np.stack(matrices[f"{one}_proj"]) for one in ("gate", "up", "down"))
        out[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{prefix}.down_proj"] = down
    for prefix, (k, q, v) in convolutions.items():
        out[f"{prefix}.conv1d.weight"] = np.concatenate([q, k, v])
    return out


@pytest.mark.parametrize("case", FUSED)
def test_a_checkpoint_in_transformers_own_form(golden, tmp_path, case):
    want = golden(case)
    tensors = _fused(load_file(want.directory / "model.safetensors"), FUSED[case])
    assert sum(".experts." in name for name in tensors) <= 2 * want.config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(want.config))
    save_file(tensors, tmp_path / "model.safetensors")
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    got = model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")[0]
    assert _error(got, want.logits) < LIMIT


@pytest.mark.parametrize("case", ["nemotron_h_experts", "nemotron_h_new_keys_biases"])
def test_nemotron_h_in_transformers_own_form(golden, tmp_path, case):
    want = golden(case)
    tensors, experts = {}, {}
    for name, value in load_file(want.directory / "model.safetensors").items():
        name = name.replace("backbone.", "model.")
        prefix, found, rest = name.partition(".experts.")
        if found:
            experts.setdefault(f"{prefix}.experts.{rest.split('.')[1]}", []).append(value)
        else:
            tensors[name] = value
    tensors |= {name: np.stack(matrices) for name, matrices in experts.items()}
    (tmp_path / "config.json").write_text(json.dumps(want.config))
    save_file(tensors, tmp_path / "model.safetensors")
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    got = model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")[0]
    assert _error(got, want.logits) < LIMIT


@pytest.mark.parametrize("case", ["nemotron_h", "gpt_neox"])
def test_another_output_layer_is_not_tied_whatever_its_name(golden, tmp_path, case):
    want = golden(case)
    (tmp_path / "config.json").write_text(json.dumps({**want.config, "tie_word_embeddings": True}))
    weights = (want.directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    got = model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")[0]
    assert _error(got, want.logits) < LIMIT


@pytest.mark.parametrize(
    ("case", "prefix", "keys"),
    [
        ("ernie4_5_moe", "model.mtp_block.0.", {}),
        ("exaone_moe", "mtp.layers.0.", {}),
        ("mellum", "mtp.layers.0.", {}),
        ("mimo_v2_flash", "model.mtp.layers.0.", {}),
        ("hy_v3", "model.layers.3.", {}),
        ("hy_v3", "model.layers.3.", {"num_nextn_predict_layers": 1}),
    ],
)
def test_layers_that_predict_further_tokens_are_ignored(golden, tmp_path, case, prefix, keys):
    want = golden(case)
    tensors = load_file(want.directory / "model.safetensors")
    first = [name for name in tensors if name.startswith("model.layers.0.")]
    tensors |= {name.replace("model.layers.0.", prefix): tensors[name] for name in first}
    (tmp_path / "config.json").write_text(json.dumps({**want.config, **keys}))
    save_file(tensors, tmp_path / "model.safetensors")
    model = engine.load(tmp_path, device="cpu", dtype="float32", progress=False)
    got = model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")[0]
    assert _error(got, want.logits) < LIMIT


def _changed(config, change):
    """Return the config with other values; "moe.scale" is the scale of its moe."""
    for key, value in change.items():
        part, _, name = key.rpartition(".")
        if part:
            key, value = part, replace(getattr(config, part), **{name: value})
        config = replace(config, **{key: value})
    return config


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("granite", {"embed_scale": 1.0}),
        ("granite", {"branch_scale": 1.0}),
        ("granite", {"attn_scale": 0.0}),
        ("granite", {"logits_scale": 1.0}),
        ("olmo3_new_keys", {"rope_local": None}),
        ("olmo3_new_keys", {"layer_windows": ()}),
        ("gemma2", {"attn_softcap": 0.0}),
        ("gemma2", {"final_softcap": 0.0}),
        ("gemma2", {"attn_scale": 0.0}),
        ("gemma2", {"layer_windows": ()}),
        ("gemma2", {"activation": "silu"}),
        ("smollm3", {"rope_layers": ()}),
        ("smollm3_windows_new_keys", {"layer_windows": ()}),
        ("starcoder2", {"activation": "silu"}),
        ("starcoder2", {"rms_norm_eps": 1e-5}),
        ("starcoder2", {"layer_norm": False, "norm_bias": False}),
        ("starcoder2_window_new_keys", {"layer_windows": ()}),
        ("stablelm_parallel_new_keys", {"norm_bias": False}),
        ("cohere2", {"rope_layers": ()}),
        ("cohere2", {"layer_windows": (), "rope_layers": ()}),
        ("cohere2", {"layer_norm": False}),
        ("cohere2", {"logits_scale": 1.0}),
        ("phi", {"lm_head_bias": False}),
        ("phi_qk_norm", {"qk_norm": False}),
        ("cohere_qk_norm", {"qk_norm": False}),
        ("stablelm_qk_norm", {"qk_norm": False}),
        ("llama4", {"layer_chunks": ()}),
        ("kimi_linear", {"rope_layers": ()}),
        ("kimi_linear", {"gated_delta.norm_activation": "silu"}),
        ("bailing_hybrid", {"gated_delta.gate_bound": -2.5}),
        ("bailing_hybrid", {"gated_delta.gate_bound": 0.0}),
        ("llama4", {"qk_norm": False}),
        ("llama4_biases_new_keys", {"no_rope": RopeConfig(scaling="none")}),
        ("phi", {"norm_bias": False}),
        ("exaone4", {"rope_layers": ()}),
        ("exaone4", {"layer_windows": ()}),
        ("gemma", {"embed_scale": 1.0}),
        ("gemma", {"norm_weight_offset": 0.0}),
        ("hyperclovax", {"logits_scale": 1.0}),
        ("hyperclovax", {"branch_scale": 1.0}),
        ("vaultgemma", {"attn_softcap": 0.0}),
        ("mellum", {"rope_local": None}),
        ("ministral3", {"rope.q_scale_beta": 0.0}),
        ("ministral3", {"rope.scaling": "default"}),
        ("minimax_m2", {"moe.correction": False}),
        ("hy_v3", {"moe.scale": 1.0}),
        ("hy_v3", {"moe.shared_size": 0}),
        ("ernie4_5_moe", {"moe.correction": False}),
        ("ernie4_5_moe", {"moe.score": "sigmoid"}),
        ("ernie4_5_moe_biases_new_keys", {"moe.shared_bias": False}),
        ("dots1", {"layer_windows": ()}),
        ("exaone_moe", {"moe.top_groups": 3}),
        ("exaone_moe_layer_types_not_normalized", {"moe.renormalize": True}),
        ("granitemoeshared", {"moe.shared_size": 0}),
        ("granite_swa", {"layer_windows": ()}),
        ("falcon_grouped_new_keys_biases", {"parallel_norms": False}),
        ("falcon_sequential", {"parallel": True}),
        ("gpt2", {"learned_positions": False}),
        ("gpt2", {"rope_layers": ()}),
        ("gpt2_scales_by_layer", {"attn_scale_by_layer": False}),
        ("gpt2_scales_by_layer", {"activation": "silu"}),
        ("gpt2_unscaled", {"attn_scale": 0.0}),
        ("gpt2_unscaled", {"activation": "relu2"}),
        ("gpt_bigcode", {"learned_positions": False}),
        ("gpt_bigcode_heads_unscaled", {"attn_scale": 0.0}),
        ("opt", {"learned_positions": False}),
        ("opt", {"activation": "relu2"}),
        ("gpt_neo", {"attn_scale": 0.0}),
        ("gpt_neo", {"layer_windows": ()}),
        ("lfm3", {"layer_windows": (0, 9, 0, 0, 9)}),
        ("lfm3", {"rope.num_frequencies": 12}),
        ("lfm3", {"post_norms": False}),
        ("granite_swa_thetas_new_keys_biases", {"rope_thetas": ()}),
        ("arcee", {"activation": "silu"}),
        ("nemotron", {"norm_weight_offset": 0.0}),
        ("nemotron", {"rms_norm_eps": 1e-5}),
        ("jais2", {"norm_bias": False}),
        ("gpt_neox", {"parallel_norms": False}),
        ("hunyuan_v1_dense", {"qk_norm_after_rope": False}),
        ("hunyuan_v1_dense", {"rope": RopeConfig(theta=500.0, rotary_dim=24)}),
        ("apertus", {"activation": "relu2"}),
        ("olmo", {"clip_qkv": 0.0}),
        ("olmoe_clipped", {"clip_qkv": 0.0}),
        ("nanochat", {"embed_norm": False}),
        ("nanochat", {"final_softcap": 0.0}),
        ("nanochat", {"rope": RopeConfig(theta=500.0, rotary_dim=16)}),
        ("cohere2_moe", {"rope_layers": (False, True, False, True)}),
        ("cohere2_moe", {"layer_norm": False}),
        ("mimo_v2_flash", {"v_scale": 1.0}),
        ("mimo_v2_flash", {"layer_windows": ()}),
        ("mimo_v2_flash_new_keys", {"rope_local": None}),
        ("afmoe", {"attn_gate": ""}),
        ("afmoe", {"embed_scale": 1.0}),
        ("afmoe", {"rope_layers": ()}),
        ("gpt_neox", {"parallel": False}),
        ("gemma4", {"v_norm": False}),
        ("gemma4", {"attn_scale": 0.0}),
        ("gemma4", {"final_softcap": 0.0}),
        ("gemma4", {"rope": RopeConfig(theta=1000.0, rotary_dim=40)}),
        ("gemma4", {"layer_windows": (6, 0, 6, 0)}),
        ("gemma4", {"per_layer_input": None}),
        ("gemma4", {"embed_scale": 1.0}),
        ("gemma3n", {"activation_sparsity": ()}),
        ("gemma3n", {"altup": AltUpConfig(4, False, 10)}),
        ("gemma3n", {"attn_scale": 0.0}),
        ("gemma3n", {"v_norm": False}),
        ("qwen3_next", {"norm_weight_offset": 0.0}),
        ("qwen3_next", {"rope_layers": (False,) * 4}),
        ("qwen3_5_text", {"qk_norm": False}),
        ("lfm2", {"qk_norm": False}),
        ("granitemoehybrid", {"branch_scale": 1.0}),
        ("granitemoehybrid", {"rope_layers": ()}),
        ("nemotron_h", {"activation": "silu"}),
        ("nemotron_h", {"rope_layers": ()}),
        ("nemotron_h_experts", {"moe.scale": 1.0}),
        ("nemotron_h_experts", {"moe.correction": False}),
        ("nemotron_h_experts", {"moe.top_groups": 4}),
        ("nemotron_h_experts", {"moe.shared_size": 0}),
        ("nemotron_h_experts_latent_new_keys_biases", {"moe.latent_bias": False}),
        ("nemotron_h_experts_latent_new_keys_biases", {"moe.renormalize": True}),
        ("mistral4", {"rope.q_scale_beta": 0.0}),
        ("mistral4", {"rope.scaling": "default"}),
        ("mistral4", {"moe.sums_groups": False}),
        ("mistral4", {"moe.scale": 1.0}),
        ("phimoe_window_biases_new_keys", {"moe.jitter": 0.0}),
        ("phimoe_window_biases_new_keys", {"layer_norm": False, "norm_bias": False}),
        ("phimoe_window_biases_new_keys", {"moe.score": "softmax"}),
        ("phimoe_window_biases_new_keys", {"lm_head_bias": False}),
        ("bitnet", {"inner_norms": False}),
        ("bitnet", {"activation": "silu"}),
        ("bitnet", {"rms_norm_eps": 1e-5}),
        ("minicpm3", {"embed_scale": 1.0}),
        ("minicpm3", {"branch_scale": 1.0}),
        ("minicpm3", {"logits_scale": 1.0}),
        ("longcat_flash", {"moe.scale": 1.0}),
        ("longcat_flash", {"moe.correction": False}),
        ("longcat_flash", {"moe.renormalize": True}),
    ],
    ids=str,
)
def test_what_tells_a_family_apart_matters(golden, case, change):
    """With a neutral value in its place a model is far from its golden logits."""
    want = golden(case)
    decoder = want.load().decoder
    config = _changed(decoder.config, change)
    other = Decoder(config, decoder.weights, decoder.max_model_len)
    geometry = KVGeometry.of_model(config, "float32")
    pages = KVCache(geometry, 2, MemoryPool(CPU), num_slots=1 * geometry.has_states)
    slots = np.zeros(1, np.int32) if geometry.has_states else None
    tables = [[0, 1]]
    batch = ForwardBatch.build([want.prompt], [0], tables, 16, logits="all", state_slots=slots)
    assert _error(decoder.forward(batch, pages.layers), want.logits) < LIMIT
    assert _error(other.forward(batch, pages.layers), want.logits) > 0.02


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(("llama_", "phi3_longrope"))])
def test_the_scaling_matters(golden, case):
    """Without its rope scaling a model is far from its golden logits, so the tests can fail."""
    want = golden(case)
    config = load_config(want.directory)
    if config.rope.scaling == "default":
        pytest.skip("has none")
    plain = replace(config, rope=replace(config.rope, scaling="default", attention_factor=None))
    model = engine.load(want.directory, config=plain, device="cpu")
    got = model.step([want.prompt], model.new_cache(1, 40), logits="all")[0]
    assert _error(got, want.logits) > 0.1
