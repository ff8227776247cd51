"""Checkpoints with learned positions: GPT-2's transposed matrices, OPT's unread rows, old names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import engine
from engine.errors import ConfigError, WeightsError
from engine.loading.model_config import load_config
from engine.loading.quantized_folder import plan_folder
from engine.loading.weights import load_weights
from engine.weights import FORMATS, Shard
from tests.loading.tiny import random_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def write(folder: Path, case: str, change=dict) -> dict:
    """Write a golden model's checkpoint with random values, changed; return the tensors."""
    record = json.loads((GOLDEN / f"{case}.json").read_text())
    tensors = random_tensors(record["tensors"])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(record["config"]))
    save_file(change(tensors), folder / "model.safetensors")
    return tensors


def loaded(folder: Path, **options) -> dict:
    weights = load_weights(folder, load_config(folder), **options)
    return {name: weight.data for name, weight in weights.items()}


def assert_same(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_matrices_of_gpt2_are_transposed(tmp_path):
    tensors = write(tmp_path, "gpt2")
    weights = loaded(tmp_path)
    modules = {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for kind, module in modules.items():
        matrix, bias = (weights[f"layers.1.{kind}{end}"] for end in ("", "_bias"))
        np.testing.assert_array_equal(matrix, tensors[f"transformer.h.1.{module}.weight"].T)
        np.testing.assert_array_equal(bias, tensors[f"transformer.h.1.{module}.bias"])
        assert matrix.flags.c_contiguous
    np.testing.assert_array_equal(weights["embed_positions"], tensors["transformer.wpe.weight"])


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(1, 2, by_output=True)], ids=str)
def test_transposed_matrices_in_slabs(tmp_path, monkeypatch, shard):
    write(tmp_path, "gpt2")
    wanted = loaded(tmp_path, shard=shard)
    monkeypatch.setattr("engine.loading.weights._SLAB_BYTES", 1 << 12)
    monkeypatch.setattr("engine.loading.tensor_reader._STEP_WEIGHTS", 200)
    assert_same(loaded(tmp_path, shard=shard), wanted)


def test_matrices_of_linear_layers(tmp_path):
    """Quantized checkpoints of GPT-2 have them."""
    write(tmp_path / "conv1d", "gpt2")
    write(
        tmp_path / "linear",
        "gpt2",
        lambda tensors: {
            name: np.ascontiguousarray(one.T) if ".c_" in name else one
            for name, one in tensors.items()
        },
    )
    assert_same(loaded(tmp_path / "linear"), loaded(tmp_path / "conv1d"))


@pytest.mark.parametrize(
    ("case", "prefix"),
    [("gpt2", "transformer."), ("gpt_bigcode", "transformer."), ("opt", "model.")],
)
def test_names_without_a_prefix(tmp_path, case, prefix):
    """As in GPT-2's and OPT's first checkpoints, which may hold the causal masks too."""
    write(tmp_path / "new", case)

    def renamed(tensors):
        found = {name.removeprefix(prefix): one for name, one in tensors.items()}
        if case == "opt":
            return found
        mask = np.ones((1, 1, 64, 64), np.float32)
        return found | {"h.0.attn.bias": mask, "h.1.attn.masked_bias": mask[0, 0, 0, :1]}

    write(tmp_path / "old", case, renamed)
    assert_same(loaded(tmp_path / "old"), loaded(tmp_path / "new"))


def test_the_first_two_rows_of_opt_are_not_read(tmp_path):
    tensors = write(tmp_path, "opt")
    table = tensors["model.decoder.embed_positions.weight"]
    assert table.shape == (66, 64)
    np.testing.assert_array_equal(loaded(tmp_path)["embed_positions"], table[2:])
    write(
        tmp_path,
        "opt",
        lambda tensors: tensors | {"model.decoder.embed_positions.weight": table[:64].copy()},
    )
    with pytest.raises(WeightsError, match=r"must have shape \(66, 64\).* got \(64, 64\)"):
        loaded(tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "gpt_bigcode", "gpt_neo", "opt"])
def test_no_sequence_is_longer_than_the_table(tmp_path, case):
    write(tmp_path, case)
    options = {"device": "cpu", "progress": False}
    with pytest.raises(
        ConfigError, match=r"max_model_len must be from 1 to the model's own 64; got 65"
    ):
        engine.load(tmp_path, max_model_len=65, **options)
    model = engine.load(tmp_path, **options)
    assert model.max_model_len == 64
    logits = model.step([list(range(4, 68))], model.new_cache(1, 64), logits="all")
    assert np.isfinite(logits).all()
    short = engine.load(tmp_path, max_model_len=8, **options)
    ids = [list(range(4, 12))]
    np.testing.assert_allclose(
        short.step(ids, short.new_cache(1, 8), logits="all"), logits[:, :8], atol=1e-3
    )


def test_a_folder_of_codes_has_no_transposed_matrices(tmp_path):
    write(tmp_path, "gpt2")
    with pytest.raises(WeightsError, match=r"c_attn\.weight' must be the matrix of a linear layer"):
        plan_folder(tmp_path, FORMATS["int8"])
    write(tmp_path, "gpt_bigcode")
    plan = plan_folder(tmp_path, FORMATS["int8"])
    assert "transformer.wpe.weight" not in plan.matrices and len(plan.matrices) == 8


@pytest.mark.parametrize("module", ["attn.c_attn", "attn.c_proj", "mlp.c_fc"])
def test_quantized_matrices_of_gpt2_are_refused(tmp_path, module):
    """Whether codes are as tall as the matrix is wide, as writers of GPTQ store them, or square."""
    name = f"transformer.h.0.{module}"

    def change(tensors: dict) -> dict:
        width, rows = tensors.pop(f"{name}.weight").shape
        return tensors | {
            f"{name}.qweight": np.zeros((width // 8, rows), np.int32),
            f"{name}.qzeros": np.full((1, rows // 8), 0x77777777, np.int32),
            f"{name}.scales": np.ones((1, rows), np.float16),
        }

    write(tmp_path, "gpt2", change)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = rf"{module}\.weight' must not be quantized, since gpt2 stores it transposed; got int4"
    with pytest.raises(WeightsError, match=wanted):
        loaded(tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "opt"])
def test_quantized_when_loaded(tmp_path, case):
    write(tmp_path, case)
    plain, codes = (
        engine.load(tmp_path, device="cpu", progress=False, quantization=name)
        for name in (None, "int8")
    )
    assert codes.decoder.weights["layers.0.qkv"].format.name == "int8"
    assert codes.decoder.weights["embed_positions"].format.is_dense
    rows = [
        model.step([[7, 9, 30, 4]], model.new_cache(1, 4), logits="all") for model in (plain, codes)
    ]
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.1 * rows[0].std()
