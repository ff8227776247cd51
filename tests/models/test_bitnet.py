"""BitNet's packed ternary weights: read as integers, multiplied with activations in 8 bits."""

from __future__ import annotations

import json

import numpy as np
import pytest

import engine
from engine.device import to_numpy
from engine.errors import ConfigError, WeightsError
from tests.distributed.golden import GOLDEN
from tests.golden.quantized import CASES, make_linear, write_safetensors
from tests.golden.tiny_weights import tiny_weight

TOKENS = np.random.default_rng(0).integers(4, 128, (2, 24))


def checkpoint(folder, tensors, **keys):
    values = json.loads((GOLDEN / "models/bitnet.json").read_text())["config"] | keys
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(params=["bitnet", "bitnet_bitlinear"])
def pair(request, tmp_path):
    """A checkpoint of packed weights, and its unpacked twin."""
    record = json.loads((GOLDEN / "models/bitnet.json").read_text())
    stored, plain = {}, {}
    for name, shape in record["tensors"].items():
        if len(shape) < 2 or "embed" in name or "lm_head" in name:
            plain[name] = stored[name] = ("F32", tiny_weight(name, shape, record["norm_mean"]))
            continue
        kinds, numbers = make_linear(request.param, shape, name)
        plain[name] = ("F32", numbers)
        prefix = name.removesuffix("weight")
        stored |= {prefix + kind: tensor for kind, tensor in kinds.items()}
    config = CASES[request.param].config
    return (
        checkpoint(tmp_path / "stored", stored, quantization_config=config),
        checkpoint(tmp_path / "plain", plain),
    )


def logits_of(folder, **options):
    model = engine.load(folder, device="cpu", progress=False, **options)
    return to_numpy(model.step(TOKENS, model.new_cache(2, 32), logits="all")), model


def test_packed_weights_are_those_of_the_twin(pair):
    stored, plain = pair
    want, _ = logits_of(plain)
    got, _ = logits_of(stored, quantization="none")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * want.std())
    got, packed = logits_of(stored)
    weights = packed.decoder.weights
    assert {form.name for form in weights["layers.0.qkv"].formats()} == {"int8"}
    assert set(np.unique(weights["layers.1.down"].data)) == {-1, 0, 1}
    # Rounding activations to 8 bits moves transformers' logits as far from the twin's.
    assert 1e-3 < np.abs(got - want).max() / want.std() < 0.3


def test_a_fourth_value_is_damage(pair, tmp_path):
    stored, _ = pair
    data = bytearray((stored / "model.safetensors").read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    first = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0]
    data[8 + size + first] = 0xFF
    (stored / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match=r"up_proj\.weight.* must hold -1, 0 and 1; got 2 in"):
        logits_of(stored)


def test_weights_that_are_rounded_while_running_are_refused(pair):
    stored, _ = pair
    values = json.loads((stored / "config.json").read_text())
    values["quantization_config"]["quantization_mode"] = "online"
    (stored / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="quantization_mode must be offline") as caught:
        logits_of(stored)
    assert "\n" not in str(caught.value)
