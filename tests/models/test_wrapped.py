"""The text of multimodal checkpoints: names, towers, tied outputs, quantization, experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import engine
from engine.errors import ConfigError, WeightsError
from engine.loading.hf_config import config_from_dict, load_hf_config
from engine.loading.quantized.scheme import load_scheme
from engine.loading.text_model import open_model
from engine.loading.weights import weight_bytes
from engine.models.wrappers import WRAPPERS

LIMIT = 1e-4
CASES = sorted(
    path.stem
    for path in (Path(__file__).parents[1] / "golden/models").glob("*.json")
    if json.loads(path.read_text())["config"]["model_type"] in WRAPPERS
)
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
MODEL = "model.safetensors"


def text_tensors(want) -> dict[str, np.ndarray]:
    """Return the tensors of the text model under their plain names."""
    checkpoint = open_model(want.directory)
    return {name: checkpoint.view(name) for name in checkpoint.names()}


def logits_of(folder: Path, want) -> np.ndarray:
    model = engine.load(folder, device="cpu", dtype="float32", progress=False)
    return model.step([want.prompt], model.new_cache(1, want.max_tokens), logits="all")[0]


def is_close(got, want) -> bool:
    return float(np.abs(got - want.logits).max() / want.logits.std()) < LIMIT


def write(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / MODEL)
    return folder


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("case", CASES)
def test_every_prefix_in_use(golden, tmp_path, case, prefix):
    want = golden(case)
    head = "language_model." if prefix.startswith("language_model") else ""
    tensors = {
        head + name if name.startswith("lm_head") else prefix + name.removeprefix("model."): tensor
        for name, tensor in text_tensors(want).items()
    }
    tower = WRAPPERS[want.config["model_type"]].towers[0]
    tensors |= {f"{tower}.x": np.zeros(3), f"model.{tower}.layers.0.q.weight": np.zeros((2, 2))}
    assert is_close(logits_of(write(tmp_path, want.config, tensors), want), want)


@pytest.mark.parametrize("case", CASES)
def test_a_shard_with_towers_alone_is_not_opened(golden, tmp_path, case):
    want = golden(case)
    stored = load_file(want.directory / MODEL)
    rename = WRAPPERS[want.config["model_type"]].text_name
    text = {name: tensor for name, tensor in stored.items() if rename(name)}
    assert 5 < len(text) < len(stored)
    (tmp_path / "config.json").write_text(json.dumps(want.config))
    save_file(text, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"damaged")
    files = {name: "a.safetensors" if name in text else "b.safetensors" for name in stored}
    absent = {name: file for name, file in files.items() if name in text} | {
        name: "absent.safetensors" for name in stored.keys() - text.keys()
    }
    for weight_map in (files, absent):
        index = json.dumps({"weight_map": weight_map})
        (tmp_path / f"{MODEL}.index.json").write_text(index)
        assert is_close(logits_of(tmp_path, want), want)


def test_adapters_for_images_and_audio_are_left_out(golden, tmp_path):
    """The first release of Phi-4-multimodal: each matrix stands beside two adapters."""
    want = golden("phi4_multimodal")
    tensors = {}
    for name, tensor in text_tensors(want).items():
        module = name.removesuffix("weight")
        is_adapted = module.endswith("_proj.")
        tensors[f"{module}base_layer.weight" if is_adapted else name] = tensor
        if is_adapted:
            for part, shape in (("A", (2, tensor.shape[1])), ("B", (tensor.shape[0], 2))):
                tensors[f"{module}lora_{part}.vision.weight"] = np.ones(shape, np.float32)
    tensors["model.embed_tokens_extend.image_embed.glb_GN"] = np.ones((1, 1, 8), np.float32)
    config = {**want.config, "model_type": "phi4mm", "vision_lora": {"r": 2}}
    assert is_close(logits_of(write(tmp_path, config, tensors), want), want)


def test_weights_of_towers_are_not_counted(golden):
    want = golden("qwen3_vl")
    config = load_hf_config(want.directory)
    counted = sum(tensor.size for tensor in text_tensors(want).values())
    assert weight_bytes(config, "float32") == 4 * counted


def test_names_that_become_equal_are_refused(golden, tmp_path):
    want = golden("qwen3_vl")
    norm = np.ones(64, np.float32)
    tensors = {**text_tensors(want), "model.language_model.norm.weight": norm}
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' must have one tensor; got 'mod"):
        engine.load(write(tmp_path, want.config, tensors), device="cpu")


def test_tensors_of_no_known_module_are_refused(golden, tmp_path):
    want = golden("qwen3_vl")
    tensors = {**text_tensors(want), "model.speech.x": np.ones(2, np.float32)}
    with pytest.raises(WeightsError, match=r"not part of a qwen3_vl_text .*: model\.speech\.x"):
        engine.load(write(tmp_path, want.config, tensors), device="cpu")


@pytest.mark.parametrize("top", [None, False, True])
@pytest.mark.parametrize("text", [None, False, True])
def test_an_output_layer_in_the_checkpoint_is_not_tied(golden, tmp_path, top, text):
    want = golden("mistral3_new_keys")
    config = {**want.config, "tie_word_embeddings": top}
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": text}
    folder = write(tmp_path, config, text_tensors(want))
    assert not load_hf_config(folder).tie_word_embeddings
    assert is_close(logits_of(folder, want), want)
    tied = golden("mistral3_tied")
    config = {**tied.config, "tie_word_embeddings": top}
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": text}
    folder = write(tmp_path, config, text_tensors(tied))
    assert load_hf_config(folder).tie_word_embeddings
    assert is_close(logits_of(folder, tied), tied)


def test_without_weights_the_keys_decide_whether_the_output_is_tied(tmp_path):
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_hf_config(tmp_path)
    assert found.tie_word_embeddings and found.vocab_size == 262208 and found.num_kv_heads == 4
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert not load_hf_config(tmp_path).tie_word_embeddings


def test_ids_of_the_whole_model_take_precedence(golden):
    config = golden("gemma3_wrapped").config
    assert config_from_dict(config).eos_token_ids == (2, 5)
    assert config_from_dict({**config, "eos_token_id": None}).eos_token_ids == (2,)
    text = {**config["text_config"], "eos_token_id": None, "dtype": "float16"}
    found = config_from_dict({**config, "eos_token_id": 7, "text_config": text})
    assert found.eos_token_ids == (7,) and found.dtype == "float16"
    with pytest.raises(ConfigError, match=r"text_config must be an object; got \[1\]"):
        config_from_dict({"model_type": "gemma3", "text_config": [1]})


@pytest.mark.parametrize("case", ["qwen3_vl_moe", "qwen3_vl_moe_new_keys"])
@pytest.mark.parametrize("is_separate", [False, True])
def test_experts_in_the_other_forms(golden, tmp_path, case, is_separate):
    """In the second case gate and up of an expert are square together: down tells the form."""
    want = golden(case)
    tensors = text_tensors(want)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        matrices = tensors.pop(name)
        if not is_separate:
            tensors[name] = np.swapaxes(matrices, 1, 2)
            continue
        block, _, kind = name.rpartition(".")
        for index, matrix in enumerate(matrices):
            parts = np.split(matrix, 2) if kind == "gate_up_proj" else [matrix]
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, rows in zip(kinds, parts, strict=True):
                tensors[f"{block}.{index}.{part}.weight"] = rows
    assert is_close(logits_of(write(tmp_path, want.config, tensors), want), want)


def test_experts_of_a_wrong_shape_are_refused(golden, tmp_path):
    want = golden("qwen3_vl_moe")
    tensors = text_tensors(want)
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[name] = tensors[name][:, :-2]
    with pytest.raises(WeightsError, match=r"gate_up_proj' must have shape \(5, 40, 64\)"):
        engine.load(write(tmp_path, want.config, tensors), device="cpu")


def quantized(folder: Path, ignore: list[str]) -> tuple[dict, dict]:
    """Return config.json and tensors of a small text model with int8 matrices."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128}
    config = {"model_type": "qwen3", **sizes, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64}
    rng = np.random.default_rng(0)
    shapes = {"embed_tokens": (64, 128), "norm": (128,)}
    for layer in range(2):
        block = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128)}
        block |= {"self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128)}
        block |= {f"mlp.{name}_proj": (128, 128) for name in ("gate", "up", "down")}
        block |= {"input_layernorm": (128,), "post_attention_layernorm": (128,)}
        block |= {"self_attn.q_norm": (64,), "self_attn.k_norm": (64,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    tensors = {
        f"model.{name}.weight": rng.standard_normal(shape).astype(np.float32) / 8
        for name, shape in shapes.items()
    }
    tensors["lm_head.weight"] = rng.standard_normal((64, 128)).astype(np.float32)
    write(folder, config, tensors)
    done = folder.with_name("done")
    engine.quantize(folder, done, format="int8", ignore=ignore, device="cpu")
    return json.loads((done / "config.json").read_text()), load_file(done / MODEL)


IGNORED = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("listed", ["model.language_model.", "language_model.model.", "model."])
def test_quantized_modules_are_listed_under_any_prefix(tmp_path, prefix, listed):
    config, tensors = quantized(tmp_path / "plain", [IGNORED])
    done = tmp_path / "done"
    scheme = config.pop("quantization_config")
    assert IGNORED in scheme["ignore"]
    other = [name.replace("model.", listed, 1) for name in scheme["ignore"]]
    scheme["ignore"] = [*other, r"re:.*visual.*", "model.visual.merger.mlp.0"]
    group = next(iter(scheme["config_groups"].values()))
    group["targets"] = [rf"re:{listed}layers\.\d+\..*_proj$"]
    config |= {"model_type": "qwen3_vl_text", "rope_theta": 10000.0}
    whole = {"model_type": "qwen3_vl", "text_config": config, "quantization_config": scheme}
    renamed = {
        name if name.startswith("lm_head") else name.replace("model.", prefix, 1): tensor
        for name, tensor in tensors.items()
    }
    renamed["model.visual.merger.mlp.0.weight"] = np.ones((2, 2), np.float32)
    folder = write(tmp_path / "whole", whole, renamed)
    found = load_scheme(folder)
    assert found.storage_of(IGNORED) is None and found.storage_of("lm_head") is None
    assert found.storage_of("model.layers.0.mlp.down_proj").format.name == "int8"
    models = [
        engine.load(one, device="cpu", dtype="float32", progress=False) for one in (done, folder)
    ]
    got = [model.step([[3, 9, 27, 40]], model.new_cache(1, 8), logits="all") for model in models]
    assert np.array_equal(*got)
    # The same key inside of text_config
    whole = {"model_type": "qwen3_vl", "text_config": {**config, "quantization_config": scheme}}
    (folder / "config.json").write_text(json.dumps(whole))
    assert load_scheme(folder) == found


_GROUP = {"weights": {"num_bits": 8, "strategy": "channel"}, "targets": ["Linear"]}
_METHODS = {
    "compressed-tensors": lambda listed: {
        "format": "int-quantized",
        "config_groups": {"0": _GROUP},
        "ignore": [f"{listed}layers.1.mlp.gate", r"re:.*\.self_attn\..*", "re:.*visual.*"],
    },
    "fp8": lambda listed: {
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            *("lm_head", "model.visual", f"{listed}layers.1.mlp.gate"),
            *(f"{listed}layers.{layer}.self_attn" for layer in range(2)),
        ],
    },
    "gptq": lambda listed: {
        "bits": 4,
        "group_size": 128,
        "dynamic": {
            f"-:{listed}layers.1.mlp.gate$".replace(".", r"\."): {},
            r"-:.*\.self_attn\.": {},
            "-:.*visual": {},
        },
    },
}


@pytest.mark.parametrize("listed", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("method", _METHODS)
def test_modules_that_a_method_leaves_out(tmp_path, method, listed):
    scheme = {"quant_method": method, **_METHODS[method](listed)}
    config = {"model_type": "qwen3_vl_moe", "text_config": {}, "quantization_config": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_scheme(tmp_path)
    for module, is_quantized in [
        *(("layers.1.mlp.gate", False), ("layers.1.mlp.gate_proj", True)),
        *(("layers.11.mlp.gate", True), ("layers.0.self_attn.q_proj", False)),
        *(("layers.0.mlp.experts.3.up_proj", True), ("layers.1.mlp.down_proj", True)),
    ]:
        assert (found.storage_of(f"model.{module}") is not None) == is_quantized, module


def test_a_quantized_module_that_the_list_ignores_is_refused(tmp_path):
    config, tensors = quantized(tmp_path / "plain", [])
    scheme = config.pop("quantization_config")
    scheme["ignore"] = ["language_model.model.layers.0.mlp.up_proj"]
    config |= {"model_type": "qwen3_vl_text"}
    whole = {"model_type": "qwen3_vl", "text_config": config, "quantization_config": scheme}
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.up_proj' are quantized, but"):
        engine.load(write(tmp_path / "whole", whole, tensors), device="cpu")


@pytest.mark.parametrize("case", ["qwen2_5_vl_tied_new_keys", "mistral3_tied"])
def test_quantize_writes_the_text_model(golden, case, tmp_path):
    """Whether its output layer is tied is written, too: Mistral 3's config.json does not say it."""
    want = golden(case)
    shutil.copytree(want.directory, tmp_path / "in")
    engine.quantize(tmp_path / "in", tmp_path / "out", format="int8", device="cpu")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] in ("qwen2_5_vl_text", "mistral")
    assert config["num_hidden_layers"] == 2
    names = set(load_file(tmp_path / "out" / MODEL))
    assert "model.norm.weight" in names and not any("visual" in name for name in names)
    got = logits_of(tmp_path / "out", want)
    assert 0 < np.abs(got - want.logits).max() / want.logits.std() < 0.3
