"""What a decoder with experts in some layers declares: weights, kernels, memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import engine
from engine.device import CPU, to_numpy
from engine.errors import WeightsError
from engine.layers import moe
from engine.layers.batch import ForwardBatch
from engine.layers.mlp import MLP
from engine.layers.moe import MoE
from engine.layers.norm import Norm
from engine.loading.dummy import dummy_weights
from engine.loading.mlp_padding import pad_mlps
from engine.loading.model_config import load_config
from engine.models.decoder import Decoder
from engine.models.kernel_set import kernel_specs
from engine.runner.memory_sizes import activation_bytes
from tests.models.test_layer_plans import CONFIG, FAMILIES

PLACES = (
    {"device": "cpu", "dtype": "float32"},
    pytest.param({"device": "cuda", "dtype": "bfloat16"}, marks=pytest.mark.gpu),
)
MIXED = FAMILIES["experts in some layers"]


def test_layers_have_experts_or_an_mlp():
    decoder = engine.load(config=MIXED, load_format="dummy", device="cpu").decoder
    kinds = [type(layer.mlp) for layer in decoder.layers]
    assert kinds == [MLP, MoE, MoE, MLP, MoE, MoE]
    experts = decoder.layers[1].mlp
    assert experts.correction is decoder.weights["layers.1.router_correction"].data
    assert (experts.params.score, experts.params.scale) == ("sigmoid", 2.5)


@pytest.mark.parametrize(
    ("family", "passed"),
    [
        ("experts alone", [True] * 6),
        ("experts after an MLP", [True] * 5),
        ("experts in some layers", [False] * 4),
        ("experts of other numbers", [False] * 6),
        ("experts", [False] * 6),
    ],
)
def test_experts_are_left_to_the_next_norm_where_layers_alike_follow(family, passed):
    """Elsewhere a launch plan would fit no layer: it returns what it takes."""
    for deterministic in (False, True):
        options = {"load_format": "dummy", "device": "cpu", "deterministic": deterministic}
        decoder = engine.load(config=FAMILIES[family], **options).decoder
        moes = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoE)]
        wanted = [one and not deterministic for one in passed]
        assert [one.is_summed_next for one in moes] == wanted


def test_a_missing_weight_is_named():
    weights = dummy_weights(MIXED)
    del weights["layers.2.experts_down_bias"]
    with pytest.raises(WeightsError, match=r"'layers\.2\.experts_down_bias'"):
        Decoder(MIXED, weights, 16)


def test_kernels_of_experts_are_listed_for_such_models_only():
    files = {spec.file for spec in kernel_specs(MIXED, "bfloat16")}
    assert {"moe_route.cu", "moe_combine.cu"} <= files
    assert not any("moe" in spec.file for spec in kernel_specs(CONFIG, "bfloat16"))


def test_only_mlps_are_padded():
    config = dataclasses.replace(MIXED, intermediate_size=43)
    weights = dummy_weights(config)
    pad_mlps(weights, config, CPU, "float32")
    assert weights["layers.0.down"].shape == (128, 44)
    assert weights["layers.1.experts_down"].shape == (8, 128, 64)
    without = dataclasses.replace(FAMILIES["experts"], intermediate_size=43)
    weights = dummy_weights(without)
    pad_mlps(weights, without, CPU, "float32")  # has none


def test_activations_of_experts_are_counted():
    """A token has the intermediates of each of its experts; of few, two layers' are alive."""

    def elements(config, num_tokens):
        return activation_bytes(config, "float16", num_tokens, 0) / 1.1 / 2

    def per_token(config):
        return (elements(config, 2000) - elements(config, 1000)) / 1000

    moe = FAMILIES["experts"].moe
    own = 3 * (96 + 128) + 3 * 64
    dense = per_token(CONFIG) - 3 * CONFIG.intermediate_size
    assert per_token(FAMILIES["experts"]) == pytest.approx(dense + own)
    more = dataclasses.replace(CONFIG, moe=dataclasses.replace(moe, top_k=5))
    assert per_token(more) == pytest.approx(dense + own + 2 * (96 + 128))
    assert per_token(MIXED) == pytest.approx(per_token(CONFIG))  # its MLPs have more
    for count in (100, 512, 600):
        passed = MIXED.moe.top_k * MIXED.hidden_size * min(count, 512)
        assert elements(MIXED, count) == pytest.approx(elements(CONFIG, count) + passed, abs=2)
        shared = dataclasses.replace(MIXED.moe, shared_size=MIXED.moe.intermediate_size)
        joined = dataclasses.replace(MIXED, moe=shared)
        more = MIXED.hidden_size * min(count, 512)
        assert elements(joined, count) == pytest.approx(elements(MIXED, count) + more, abs=2)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("glm4_moe", {"scale": 1.0}),
        ("cohere2_moe", {"shared_scale": 1.0}),
        ("cohere2_moe", {"scale": 1.0}),
        ("cohere2_moe", {"score": "softmax"}),
        ("afmoe", {"scale": 1.0}),
        ("hunyuan_v1_moe", {"layer_top_k": ()}),
        ("afmoe", {"score": "softmax"}),
        ("glm4_moe", {"renormalize": False}),
        ("glm4_moe", {"num_groups": 1, "top_groups": 1}),
        ("glm4_moe", {"score": "softmax"}),
        ("gpt_oss", {"alpha": 1.702}),
        ("gpt_oss", {"limit": 7.0}),
        ("qwen2_moe", {"renormalize": True}),
        ("qwen3_moe", {"renormalize": False}),
        ("qwen3_moe", {"top_k": 2}),
    ],
)
def test_what_tells_routings_apart_matters(golden, case, changes):
    """With another number a model is far from its golden logits, so the tests can fail."""
    want = golden(case)
    config = load_config(want.directory)
    other = dataclasses.replace(config, moe=dataclasses.replace(config.moe, **changes))
    model = engine.load(want.directory, config=other, device="cpu")
    got = model.step([want.prompt], model.new_cache(1, 40), logits="all")[0]
    assert np.abs(got - want.logits).max() > 0.1 * want.logits.std()


@pytest.mark.parametrize("counts", [[12, 1, 1], [1] * 9, [300, 230]], ids=len)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_norm_that_follows_sums_experts_with_the_same_bits(place, counts, monkeypatch):
    """Outputs of experts go from layer to layer unsummed, unless there are many tokens."""
    if place["device"] == "cuda" and not engine.device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    config = FAMILIES["experts alone"]
    model = engine.load(config=config, load_format="dummy", **place)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, config.vocab_size, count).tolist() for count in counts]
    blocks = np.arange(len(counts) * 40, dtype=np.int32).reshape(len(counts), 40)
    xp = model.device.xp
    dtype = model.decoder.dtype
    shape = (config.num_layers, 2, blocks.size, config.num_kv_heads, 16, config.head_dim)

    def run():
        batch = ForwardBatch.build(ids, [5] * len(counts), blocks, 16, logits="all")
        features = {1: xp.zeros((sum(counts), config.hidden_size), dtype)}
        pages = xp.zeros(shape, dtype)
        batch = dataclasses.replace(batch.to(model.device), features=features)
        logits = model.forward(batch, [tuple(layer) for layer in pages])
        return [to_numpy(one).view(np.uint8) for one in (logits, pages, features[1])]

    sums = []
    add_for = Norm.add_for

    def spy(self, form, x, residual, **options):
        sums.append(x.ndim)
        return add_for(self, form, x, residual, **options)

    monkeypatch.setattr(Norm, "add_for", spy)
    got = run()
    assert (3 in sums) == (sum(counts) in moe.SUMMED_NEXT)
    sums.clear()
    monkeypatch.setattr(moe, "SUMMED_NEXT", range(0))
    for one, other in zip(got, run(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert 3 not in sums
