"""Scales of the cache of keys and values, under all names that checkpoints have for them."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.loading.quantized import QuantizedCheckpoint, scheme_from_dict
from engine.loading.quantized.cache_scales import read_cache_scales
from engine.loading.safetensors import SafetensorsFile
from tests.golden.quantized import write_safetensors

ATTENTION = "model.layers.0.self_attn"


def opened(tmp_path, **tensors):
    stored = {f"{ATTENTION}.{kind.replace('__', '.')}": value for kind, value in tensors.items()}
    write_safetensors(tmp_path / "x", stored)
    return SafetensorsFile(tmp_path / "x")


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("qkv_proj__k_scale", "qkv_proj__v_scale"),
        ("k_proj__output_scale", "v_proj__output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 1)], ids=str)
def test_names_and_shapes(tmp_path, names, shape):
    keys, values = 1 + np.arange(3), 0.5 + np.arange(3)
    k, v = (np.resize(x, shape) for x in (keys, values))
    file = opened(tmp_path, **{names[0]: ("F32", k), names[1]: ("BF16", v)})
    found = read_cache_scales(file, ATTENTION, 3)
    per_head = len(shape) == 3
    np.testing.assert_array_equal(found[0], keys if per_head else [1, 1, 1])
    np.testing.assert_array_equal(found[1], values if per_head else [0.5, 0.5, 0.5])
    assert read_cache_scales(file, "model.layers.1.self_attn", 3) is None


def test_one_scale_for_both(tmp_path):
    found = read_cache_scales(opened(tmp_path, kv_scale=("F32", np.array(2.0))), ATTENTION, 2)
    assert [one.tolist() for one in found] == [[2, 2], [2, 2]]


def test_they_are_no_weights(tmp_path):
    one = ("F32", np.ones(1))
    file = opened(tmp_path, k_scale=one, v_scale=one, q_scale=one, q_norm__weight=one)
    scheme = scheme_from_dict(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }
    )
    assert list(QuantizedCheckpoint(file, scheme).names()) == [f"{ATTENTION}.q_norm.weight"]


@pytest.mark.parametrize("value", [0, -1, np.nan, np.inf])
def test_scales_that_cannot_be(tmp_path, value):
    good, bad = ("F32", np.ones(1)), ("F32", np.full(1, value))
    with pytest.raises(WeightsError, match=r"self_attn.v_scale' must have positive scales; got"):
        read_cache_scales(opened(tmp_path, k_scale=good, v_scale=bad), ATTENTION, 2)


def test_one_is_missing_or_has_another_shape(tmp_path):
    with pytest.raises(WeightsError, match=r"self_attn.v_scale' is missing"):
        read_cache_scales(opened(tmp_path, k_scale=("F32", np.ones(1))), ATTENTION, 2)
    three = ("F32", np.ones(3))
    with pytest.raises(WeightsError, match=r"self_attn.k_scale' must have shape .*; got \(3,\)"):
        read_cache_scales(opened(tmp_path, k_scale=three, v_scale=three), ATTENTION, 2)
