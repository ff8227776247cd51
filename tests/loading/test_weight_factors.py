"""Falcon-H1's multipliers: as factors on weights. Golden models check the logits."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.errors import ConfigError, WeightsError
from engine.loading.hf_config import config_from_dict, load_hf_config
from engine.loading.tensor_reader import TensorReader
from engine.loading.weight_table import Placement
from engine.models.family import WeightName
from tests.distributed.golden import GOLDEN, write_checkpoint

VALUES = json.loads((GOLDEN / "models/falcon_h1.json").read_text())["config"]


def test_multipliers_of_outputs_scale_biases_too():
    config = config_from_dict(VALUES)
    factors = {name: pair for name, *pair in config.weight_factors}
    assert factors["qkv"] == [1.3, 1.0] and factors["o"] == [0.8, 0.8]
    np.testing.assert_allclose(factors["mamba_in.mamba_x"], [1.2 * 1.4, 1.4])
    assert (config.embed_scale, config.logits_scale) == (3.3, 1.9)
    neutral = {key: None for key in VALUES if "multiplier" in key}
    assert config_from_dict({**VALUES, **neutral}).weight_factors == ()


@pytest.mark.parametrize("value", [3.0, [1.0], [1.0, "2"], [1.0, 0.0], [1.0, float("nan")]])
def test_a_pair_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match=r"mlp_multipliers must be 2 numbers from .*; got"):
        config_from_dict({**VALUES, "mlp_multipliers": value})


def test_a_quantized_weight_with_a_factor_is_refused(tmp_path, monkeypatch):
    folder = write_checkpoint("falcon_h1", tmp_path)
    reader = TensorReader(folder, load_hf_config(folder))

    class Form:
        name = "fp8"

    monkeypatch.setattr(type(reader.checkpoint), "format_of", lambda self, name: Form)
    place = Placement("o_proj.weight", WeightName("o", 0), (64, 96), 0, 64, factor=0.8)
    with pytest.raises(WeightsError, match=r"'o_proj.weight' must not be quantized.*got fp8"):
        reader.stored_format(place)
