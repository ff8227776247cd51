"""An MLP padded with zero features has the same outputs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import engine
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.kernels.gemm import launch as gemm_launch
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.loading.mlp_padding import pad_features, pad_mlps
from engine.models.decoder import Decoder
from engine.testing import cases
from engine.weights import Weight
from tests.models.test_layer_plans import CONFIG


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("features", [1, 12, 16, 43])
@pytest.mark.parametrize("parts", [1, 2])
def test_padding_does_not_change_the_output(xp, dtype, features, parts):
    weights = [
        cases.normal(shape, dtype, seed=i, scale=0.2)
        for i, shape in enumerate([(parts * features, 32), (32, features), (parts * features,)])
    ]
    x = xp.asarray(cases.normal((5, 32), dtype, seed=9))
    there = [xp.asarray(array) for array in weights]
    padded = pad_features(*there, multiple=8)
    total = -(-features // 8) * 8
    assert [a.shape for a in padded] == [(parts * total, 32), (32, total), (parts * total,)]
    assert all(a.dtype == np_dtype(dtype) for a in padded)
    assert (padded[0] is there[0]) == (total == features)
    for activation in ("silu", "gelu_tanh"):
        want, got = (
            to_numpy(
                MLP(Linear(gate_up, bias), Linear(down), activation, is_gated=parts == 2)(x)
            ).astype(np.float32)
            for gate_up, down, bias in (map(Weight.dense, arrays) for arrays in (there, padded))
        )
        limit = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
        assert np.abs(got - want).max() <= limit * np.abs(want).max()


def test_no_bias_stays_none():
    gate_up, down, bias = pad_features(np.ones((6, 4)), np.ones((4, 3)), multiple=2)
    assert gate_up.shape == (8, 4) and down.shape == (4, 4) and bias is None


@pytest.mark.parametrize(("is_gated", "name", "rows"), [(True, "gate_up", 344), (False, "up", 172)])
def test_a_model_is_padded(is_gated, name, rows):
    """The padding that is used on CUDA, done on the CPU."""
    config = dataclasses.replace(CONFIG, intermediate_size=171, mlp_bias=True, gated_mlp=is_gated)
    model = engine.load(config=config, load_format="dummy", device="cpu", dtype="float32")
    padded = dict(model.decoder.weights)
    pad_mlps(padded, config, model.device, "float32")
    assert padded["layers.3.down"].shape == (128, 172)
    assert padded[f"layers.3.{name}_bias"].shape == (rows,)
    assert model.decoder.weights["layers.3.down"].shape == (128, 171)
    cache = model.new_cache(1, 32)
    batch = ForwardBatch.build([list(range(30))], [0], cache.block_tables, 16, logits="all")
    want = model.decoder.forward(batch, cache.pages)
    got = Decoder(config, padded, 64).forward(batch, cache.pages)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.gpu
def test_models_are_padded_on_a_gpu(monkeypatch):
    if not engine.device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    config = dataclasses.replace(CONFIG, intermediate_size=172)
    seen, choose = [], gemm_launch.choose_config
    monkeypatch.setattr(
        gemm_launch, "choose_config", lambda *a, **o: seen.append((a, o)) or choose(*a, **o)
    )
    model = engine.load(config=config, load_format="dummy", device="cuda", dtype="bfloat16")
    assert model.decoder.weights["layers.0.down"].shape == (128, 176)
    model.step([list(range(100))], model.new_cache(1, 112))
    assert seen and all(arguments[2] % 8 == 0 for arguments, _ in seen)
