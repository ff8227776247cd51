"""Experts: every layout of a checkpoint gives the same fused arrays, whole and in shards."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.device import CPU
from engine.errors import ConfigError, WeightsError
from engine.loading.dummy import dummy_weights
from engine.loading.hf_config import config_from_dict
from engine.loading.quantized.mxfp4 import dequantize_mxfp4
from engine.loading.safetensors import SafetensorsFile
from engine.loading.weight_memory import weight_bytes
from engine.loading.weight_table import shard_axis, weight_shapes
from engine.loading.weight_update import open_update
from engine.loading.weights import load_weights
from engine.weights import WHOLE, Shard, unpack_weight

E, N, F, S = 5, 64, 96, 24  # experts, hidden size, features of an expert and of the shared one
SIZES = {
    "vocab_size": 40,
    "hidden_size": N,
    "intermediate_size": F,
    "moe_intermediate_size": F,
    "shared_expert_intermediate_size": S,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
BLOCK = "model.layers.1."


def _layer(seed: int = 0) -> dict[str, np.ndarray]:
    """Return the weights of a layer's experts, as the engine names them."""
    rng = np.random.default_rng(seed)
    shapes = {
        "gate": (E, F, N), "up": (E, F, N), "down": (E, N, F), "router": (E, N),
        "gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, N), "router_bias": (E,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _separate(block: str, gate: str, up: str, down: str):
    def write(w):
        names = {"gate": gate, "up": up, "down": down}
        tensors = {
            f"{block}.experts.{e}.{names[kind]}.weight": w[kind][e]
            for e in range(E)
            for kind in names
        }
        return {**tensors, f"{block}.gate.weight": w["router"]}

    return write


def _fused(gate_up: str, down: str, router: str):
    def write(w):
        return {
            gate_up: np.concatenate([w["gate"], w["up"]], axis=1),
            down: w["down"],
            router: w["router"],
        }

    return write


def _interleaved(w, names=("gate", "up")):
    """Return gate and up with alternating rows."""
    return np.stack([w[name] for name in names], axis=2).reshape(E, 2 * F, *w[names[0]].shape[2:])


def _gpt_oss_biases(w):
    return {
        "mlp.router.weight": w["router"],
        "mlp.router.bias": w["router_bias"],
        "mlp.experts.gate_up_proj_bias": _interleaved(w, ("gate_bias", "up_bias")),
        "mlp.experts.down_proj_bias": w["down_bias"],
    }


def _gpt_oss(w):
    return {
        "mlp.experts.gate_up_proj": np.ascontiguousarray(_interleaved(w).transpose(0, 2, 1)),
        "mlp.experts.down_proj": np.ascontiguousarray(w["down"].transpose(0, 2, 1)),
        **_gpt_oss_biases(w),
    }


LAYOUTS = {
    "qwen3_moe separate": _separate("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe fused": _fused(
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"
    ),
    "mixtral separate": _separate("block_sparse_moe", "w1", "w3", "w2"),
    "mixtral fused": _fused("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"),
    "granitemoe published": _fused(
        "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.layer.weight",
    ),
    "granitemoe fused": _fused(
        "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.weight",
    ),
    "gpt_oss transposed": _gpt_oss,
}


def _others(config) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint that are not of experts."""
    q, layer = np.ones((64, N), np.float32), {}
    for name in "qkvo":
        layer[f"self_attn.{name}_proj.weight"] = q.reshape(N, 64) if name == "o" else q
        if config.o_bias if name == "o" else config.qkv_bias:
            layer[f"self_attn.{name}_proj.bias"] = np.ones(N if name == "o" else 64, np.float32)
    if config.sinks:
        layer["self_attn.sinks"] = np.arange(4, dtype=np.float32)
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": q[0, :16] for name in "qk"}
    layer |= {"input_layernorm.weight": q[0], "post_attention_layernorm.weight": q[0]}
    if config.model_type == "qwen2_moe":
        layer |= {
            "mlp.shared_expert.gate_proj.weight": np.full((S, N), 2, np.float32),
            "mlp.shared_expert.up_proj.weight": np.full((S, N), 3, np.float32),
            "mlp.shared_expert.down_proj.weight": np.ones((N, S), np.float32),
            "mlp.shared_expert_gate.weight": np.ones((1, N), np.float32),
        }
    table = np.ones((40, N), np.float32)
    whole = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    layers = {f"model.layers.{i}.{name}": value for i in (0, 1) for name, value in layer.items()}
    return {**whole, "model.norm.weight": q[0], **layers}


@pytest.fixture
def make(tmp_path):
    """Write a model in a layout; returns its folder, its config and each layer's weights."""

    def write(case: str, writer=None, change=None):
        config = config_from_dict({"model_type": case.split()[0], **SIZES})
        layers, tensors = [_layer(0), _layer(1)], _others(config)
        for i, weights in enumerate(layers):
            own = (writer or LAYOUTS[case])(weights)
            tensors |= {f"model.layers.{i}.{name}": value for name, value in own.items()}
        if change is not None:
            change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": case.split()[0], **SIZES}))
        return tmp_path, config, layers

    return write


def _assert_experts(weights, layers, dtype=np.float32) -> None:
    for i, w in enumerate(layers):
        want = {
            "experts_gate_up": np.concatenate([w["gate"], w["up"]], axis=1),
            "experts_down": w["down"],
            "router": w["router"],
            "experts_gate_up_bias": np.concatenate([w["gate_bias"], w["up_bias"]], axis=1),
            "experts_down_bias": w["down_bias"],
            "router_bias": w["router_bias"],
        }
        for kind, value in want.items():
            name = f"layers.{i}.{kind}"
            if name in weights or "bias" not in kind:
                assert weights[name].data.flags.c_contiguous
                np.testing.assert_array_equal(weights[name].data, value.astype(dtype), name)


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout(make, case):
    path, config, layers = make(case)
    weights = load_weights(path, config)
    assert {name: w.shape for name, w in weights.items()} == weight_shapes(config)
    assert sum(w.num_bytes for w in weights.values()) == weight_bytes(config, "float32")
    _assert_experts(weights, layers)


@pytest.mark.parametrize("case", LAYOUTS)
def test_results_do_not_depend_on_slab_and_step_sizes(make, monkeypatch, case):
    monkeypatch.setattr("engine.loading.weights._SLAB_BYTES", 64)
    monkeypatch.setattr("engine.loading.tensor_reader._STEP_WEIGHTS", 16)
    path, config, layers = make(case)
    _assert_experts(load_weights(path, config, dtype="float16"), layers, np.float16)


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_shards_add_up_to_the_whole(make, case, count):
    path, config, layers = make(case)
    shards = [load_weights(path, config, shard=Shard(i, count)) for i in range(count)]
    for index, shard in enumerate(shards):
        assert {n: w.shape for n, w in shard.items()} == weight_shapes(config, Shard(index, count))
        for name, weight in shard.items():
            assert weight.axis == shard_axis(name.rpartition(".")[2])
    for i, w in enumerate(layers):
        for kind, parts in {"experts_gate_up": ("gate", "up"), "experts_down": ("down",)}.items():
            joined = [shard[f"layers.{i}.{kind}"].data for shard in shards]
            if len(parts) == 2:
                halves = [np.split(one, 2, axis=1) for one in joined]
                got = [np.concatenate([half[p] for half in halves], axis=1) for p in range(2)]
            else:
                got = [np.concatenate(joined, axis=2)]
            for part, value in zip(parts, got, strict=True):
                np.testing.assert_array_equal(value, w[part])


def _count_bytes(monkeypatch, method, seen):
    """Note the bytes of experts that this method of a file returns."""
    read = getattr(SafetensorsFile, method)

    def counted(self, name, *arguments):
        rows = read(self, name, *arguments)
        seen.extend([rows.nbytes] * (".experts." in name or "_linear." in name))
        return rows

    monkeypatch.setattr(SafetensorsFile, method, counted)


@pytest.mark.parametrize("case", [*LAYOUTS, "gpt_oss mxfp4"])
@pytest.mark.parametrize("count", [2, 4])
def test_whole_experts_of_shards(make, monkeypatch, case, count):
    """5 experts in uneven runs, of which each shard reads its own rows only."""
    path, config, layers = make(case, _gpt_oss_mxfp4 if "mxfp4" in case else None)
    seen = []
    for method in ("read", "read_bytes"):
        _count_bytes(monkeypatch, method, seen)
    load_weights(path, config)
    whole, shards = sum(seen), []
    for index in range(count):
        seen.clear()
        shard = Shard(index, count, expert_parallel=True)
        shards.append(load_weights(path, config, shard=shard))
        assert {n: w.shape for n, w in shards[-1].items()} == weight_shapes(config, shard)
        first, last = shard.cut_experts(E)
        assert sum(seen) * E == whole * (last - first)
    for kind in ("experts_gate_up", "experts_down", "experts_gate_up_bias", "experts_down_bias"):
        for layer in range(len(layers)):
            name = f"layers.{layer}.{kind}"
            parts = [shard[name] for shard in shards if name in shard]
            assert {part.axis for part in parts} <= {0}
            if parts:
                shards[0][name] = replace(parts[0], data=np.concatenate([p.data for p in parts]))
    _assert_experts(shards[0], layers)


@pytest.mark.parametrize("end", ["blocks", "scales"])
def test_new_weights_need_codes_with_their_scales(make, end):
    """In MXFP4. Nothing is written over a dense model, whose other tensors may be left out."""
    path, config, _ = make("gpt_oss mxfp4", _gpt_oss_mxfp4)
    weights = load_weights(path, config)
    open_update(path, config, weights, CPU)
    name = f"model.layers.1.mlp.experts.down_proj_{end}"
    make("gpt_oss mxfp4", _gpt_oss_mxfp4, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=f"a tensor is missing: {name}"):
        open_update(path, config, weights, CPU)


def test_shared_experts(make):
    path, config, layers = make("qwen2_moe", LAYOUTS["qwen3_moe separate"])
    weights = load_weights(path, config)
    _assert_experts(weights, layers)
    assert weights["layers.1.shared_gate_up"].data[:, 0].tolist() == [2.0] * S + [3.0] * S
    assert weights["layers.1.shared_down"].shape == (N, S)
    assert weights["layers.1.shared_gate"].shape == (1, N)
    part = load_weights(path, config, shard=Shard(1, 2))
    assert part["layers.1.shared_gate_up"].data[:, 0].tolist() == [2.0] * (S // 2) + [3.0] * (
        S // 2
    )
    assert part["layers.1.shared_down"].shape == (N, S // 2)


def test_layers_that_predict_further_tokens_are_left_out(make):
    """GLM-4.5 has one after the last; its config says so."""

    def glm(w):
        tensors = LAYOUTS["qwen3_moe separate"](w)
        for part in ("gate_proj", "up_proj"):
            tensors[f"mlp.shared_experts.{part}.weight"] = np.ones((F, N), np.float32)
        tensors["mlp.shared_experts.down_proj.weight"] = np.ones((N, F), np.float32)
        tensors["mlp.gate.e_score_correction_bias"] = np.arange(E, dtype=np.float32)
        return tensors

    def change(tensors):
        tensors["model.layers.2.eh_proj.weight"] = np.ones((2, 2), np.float32)

    keys = {**SIZES, "model_type": "glm4_moe", "first_k_dense_replace": 0}
    path, _, layers = make("glm4_moe", glm, change)
    config = config_from_dict({**keys, "num_nextn_predict_layers": 1})
    weights = load_weights(path, config, dtype="float16")
    _assert_experts(weights, layers, np.float16)
    assert weights["layers.1.router_correction"].data.dtype == np.float32
    with pytest.raises(WeightsError, match=r"not part of a glm4_moe .*layers\.2\.eh_proj"):
        load_weights(path, config_from_dict(keys))


def _mxfp4(values: np.ndarray, rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks and scales of random numbers of `values`'s shape, and the numbers.

    Each is computed from its bits: sign, 2 of exponent (bias 1), 1 of mantissa.
    """
    *rows, columns = values.shape
    codes = rng.integers(0, 16, (*rows, columns // 32, 32)).astype(np.uint8)
    scales = rng.integers(118, 131, (*rows, columns // 32)).astype(np.uint8)
    sign, exponent, mantissa = codes >> 3, (codes >> 1) & 3, codes & 1
    normal = (1 + mantissa / 2) * 2.0 ** (exponent.astype(int) - 1)
    numbers = np.where(exponent == 0, mantissa / 2, normal) * (1.0 - 2.0 * sign)
    numbers *= 2.0 ** (scales.astype(int) - 127)[..., None]
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, scales, numbers.reshape(values.shape).astype(np.float32)


def _gpt_oss_mxfp4(w):
    """Write MXFP4, and replace the layer's weights by the numbers written."""
    rng = np.random.default_rng(7)
    blocks, scales, numbers = _mxfp4(_interleaved(w), rng)
    w["gate"], w["up"] = numbers[:, 0::2], numbers[:, 1::2]
    down_blocks, down_scales, w["down"] = _mxfp4(w["down"], rng)
    return {
        "mlp.experts.gate_up_proj_blocks": blocks, "mlp.experts.gate_up_proj_scales": scales,
        "mlp.experts.down_proj_blocks": down_blocks, "mlp.experts.down_proj_scales": down_scales,
        **_gpt_oss_biases(w),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4(make, dtype):
    """Its numbers have at most 2 significant bits, so that bfloat16 holds them exactly."""
    path, config, layers = make("gpt_oss", _gpt_oss_mxfp4)
    weights = load_weights(path, config, dtype=dtype)
    for i, w in enumerate(layers):
        got = weights[f"layers.{i}.experts_gate_up"].data.astype(np.float32)
        np.testing.assert_array_equal(got, np.concatenate([w["gate"], w["up"]], axis=1))
        got = weights[f"layers.{i}.experts_down"].data.astype(np.float32)
        np.testing.assert_array_equal(got, w["down"])


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2), Shard(3, 4)], ids=str)
def test_codes_of_mxfp4_are_kept(make, shard, monkeypatch):
    """Where they are computed with, as on CUDA; a shard that begins within a block has numbers."""
    path, config, layers = make("gpt_oss", _gpt_oss_mxfp4)
    monkeypatch.setattr(
        "engine.loading.weights._keeps", lambda device, dtype, **_: lambda name, form: True
    )
    exact = load_weights(path, config, shard=shard)
    kept = load_weights(path, config, shard=shard, keeps_formats=True)
    for i in range(len(layers)):
        for kind in ("experts_gate_up", "experts_down"):
            name = f"layers.{i}.{kind}"
            np.testing.assert_array_equal(unpack_weight(kept[name]), exact[name].data)
            width = config.moe.intermediate_size // shard.count
            is_cut = kind == "experts_down" and width % 32 > 0
            assert kept[name].format.name == ("float32" if is_cut else "mxfp4")


@pytest.mark.parametrize("count", [2, 4])
def test_shards_of_mxfp4(make, count):
    """With 4 shards, the columns of one begin within a block of 32."""
    path, config, layers = make("gpt_oss", _gpt_oss_mxfp4)
    shards = [load_weights(path, config, shard=Shard(i, count)) for i in range(count)]
    for i, w in enumerate(layers):
        down = np.concatenate([s[f"layers.{i}.experts_down"].data for s in shards], axis=2)
        np.testing.assert_array_equal(down, w["down"])
        gate_up = [s[f"layers.{i}.experts_gate_up"].data for s in shards]
        gate = np.concatenate([one[:, : F // count] for one in gate_up], axis=1)
        np.testing.assert_array_equal(gate, w["gate"])
        sinks = np.concatenate([s[f"layers.{i}.sinks"].data for s in shards])
        assert sinks.tolist() == [0, 1, 2, 3]


def test_the_scale_without_a_number():
    nan = dequantize_mxfp4(np.full((1, 1, 16), 0x22, np.uint8), np.array([[255]], np.uint8))
    assert np.isnan(nan).all()
    least = dequantize_mxfp4(np.full((1, 1, 16), 0x22, np.uint8), np.array([[0]], np.uint8))
    assert (least == 2.0**-127).all()


def test_loading_reads_every_tensor_once(make, monkeypatch):
    path, config, _ = make("gpt_oss transposed")
    read, seen = SafetensorsFile.read, []

    def counted(self, *arguments):
        rows = read(self, *arguments)
        seen.append(rows.nbytes)
        return rows

    monkeypatch.setattr(SafetensorsFile, "read", counted)
    weights = load_weights(path, config)
    once = sum(w.num_bytes for w in weights.values())
    # Alternating columns of gate and up are each read with the others, apart from the outermost.
    more = sum(w.num_bytes for n, w in weights.items() if "experts_gate_up" in n)
    assert sum(seen) <= once + more


@pytest.mark.parametrize(
    ("case", "writer"),
    [("gpt_oss transposed", None), ("gpt_oss", _gpt_oss_mxfp4), ("mixtral fused", None)],
)
def test_loading_keeps_no_second_copy(make, monkeypatch, case, writer):
    """Apart from the arrays themselves, only slabs are allocated."""
    for name, value in {"N": 512, "F": 1024}.items():
        monkeypatch.setitem(globals(), name, value)
    for key, value in {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 16}.items():
        monkeypatch.setitem(SIZES, key, value)
    path, config, _ = make(case, writer)
    total = weight_bytes(config, "bfloat16")
    assert total > 30 << 20
    tracemalloc.start()
    load_weights(path, config, dtype="bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < total + (16 << 20)


GATE_UP, DOWN = f"{BLOCK}mlp.experts.gate_up_proj", f"{BLOCK}mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("case", "name", "value", "message"),
    [
        ("qwen3_moe fused", GATE_UP, np.ones((E, 2 * F, N + 1)), r"\(5, 192, 64\).*\(5, 192, 65\)"),
        ("qwen3_moe fused", GATE_UP, np.ones((E - 1, 2 * F, N)), r"\(5, 192, 64\).*\(4, 192, 64\)"),
        ("qwen3_moe fused", DOWN, np.ones((E * N, F)), r"\(5, 64, 96\).*\(320, 96\)"),
        ("qwen3_moe fused", DOWN, None, r"5 tensors are missing: .*1\.mlp\.experts\.0\.down_proj"),
        ("gpt_oss transposed", GATE_UP, np.ones((E, 2 * F, N)), r"\(5, 64, 192\).*\(5, 192, 64\)"),
        ("gpt_oss transposed", f"{GATE_UP}_bias", np.ones((E, F)), r"\(5, 192\).*\(5, 96\)"),
        ("gpt_oss transposed", f"{DOWN}_blocks", np.ones(2), r"tensors? (is|are) missing"),
        (
            "qwen3_moe separate",
            f"{BLOCK}mlp.experts.4.up_proj.weight",
            np.ones((F, N - 1)),
            r"'model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight' must .*\(96, 64\).*\(96, 63\)",
        ),
        (
            "qwen3_moe separate",
            f"{BLOCK}mlp.experts.5.up_proj.weight",
            np.ones((F, N)),
            r"not part of a qwen3_moe model with this config: .*experts\.5\.up_proj",
        ),
        ("mixtral separate", f"{BLOCK}block_sparse_moe.experts.0.w2.weight", None, "is missing"),
        ("mixtral separate", GATE_UP, np.ones((E, 2 * F, N)), "not part of a mixtral model"),
    ],
)  # fmt: skip
def test_damaged_experts_are_refused(make, case, name, value, message):
    def change(tensors):
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value.astype(np.float32)

    path, config, _ = make(case, change=change)
    with pytest.raises(WeightsError, match=message):
        load_weights(path, config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            f"{DOWN}_blocks",
            np.ones((E, N, F // 32, 16), np.float32),
            "down_proj_blocks' must be U8",
        ),
        (f"{DOWN}_scales", np.ones((E, N, F // 32), np.float16), "down_proj_scales' must be U8"),
        (f"{DOWN}_scales", np.ones((E, N, 1), np.uint8), r"\(5, 64, 3\).*got \(5, 64, 1\)"),
        (f"{DOWN}_blocks", np.ones((E, N, 3, 8), np.uint8), r"\(5, 64, 3, 16\).*\(5, 64, 3, 8\)"),
        (f"{DOWN}_scales", None, rf"a tensor is missing: {BLOCK}mlp\.experts\.down_proj_scales"),
        (f"{DOWN}", np.ones((E, F, N), np.float32), "not part of a gpt_oss model"),
    ],
)
def test_damaged_mxfp4_is_refused(make, name, value, message):
    def change(tensors):
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    path, config, _ = make("gpt_oss", _gpt_oss_mxfp4, change)
    with pytest.raises(WeightsError, match=message):
        load_weights(path, config)


def test_an_expert_that_cannot_be_divided(make):
    path, config, _ = make("qwen3_moe separate")
    odd = config_from_dict({"model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": 95})
    with pytest.raises(ConfigError, match=r"width of an expert must be a multiple of 2 .*95"):
        load_weights(path, odd, shard=Shard(0, 2))
    assert weight_shapes(config, Shard(0, 2))["layers.0.experts_down"] == (E, N, F // 2)


def test_dummy_weights_have_the_same_shapes():
    for kind in ("qwen2_moe", "gpt_oss"):
        config = config_from_dict({"model_type": kind, **SIZES})
        weights = dummy_weights(config, dtype="bfloat16")
        assert {name: w.shape for name, w in weights.items()} == weight_shapes(config)
        assert sum(w.num_bytes for w in weights.values()) == weight_bytes(config, "bfloat16")


def test_the_correction_of_scores_stays_float32():
    config = config_from_dict({"model_type": "qwen3_moe", **SIZES})
    config = replace(config, moe=replace(config.moe, correction=True))
    weights = dummy_weights(config, dtype="float16")
    assert weights["layers.0.router_correction"].data.dtype == np.float32
    assert sum(w.num_bytes for w in weights.values()) == weight_bytes(config, "float16")
