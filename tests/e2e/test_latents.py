"""Latent attention in the engine: tokens are those of a request alone, whatever else runs."""

from __future__ import annotations

import json

import numpy as np
import pytest

import engine
from engine.device import resolve_device
from engine.errors import ConfigError
from tests.distributed.golden import write_checkpoint
from tests.e2e.tiny import alone, check_drained, make_engine, mixed_params, run, swap_gb

CASES = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "longcat_flash")
VOCAB = 128


PLACES = [
    *((case, "cpu") for case in CASES),
    *(pytest.param((case, "cuda"), marks=pytest.mark.gpu) for case in CASES),
]


@pytest.fixture(scope="module", params=PLACES, ids=str)
def model(request, tmp_path_factory):
    """A golden model, with room for long sequences."""
    case, where = request.param
    if where == "cuda" and not resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    folder = write_checkpoint(case, tmp_path_factory.mktemp(case))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 512}))
    return engine.load(folder, device=where, dtype="float32", deterministic=True, progress=False)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


HEAD = prompt(0, 70)
PROMPTS = [HEAD + prompt(1, 9), HEAD + prompt(2, 30), prompt(3, 3), HEAD[:64]]
PARAMS = [
    mixed_params(index, max_tokens=10 + 6 * index, n=1 + index % 2) for index in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def wanted(model):
    """The tokens of each request alone."""
    return [alone(model, ids, params) for ids, params in zip(PROMPTS, PARAMS, strict=True)]


MODES = [
    {},
    {"num_blocks": 12},  # preempts
    {"num_blocks": 12, "swap_space_gb": swap_gb(64), "preemption_mode": "swap"},
    {"max_num_batched_tokens": 40, "async_scheduling": True},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_tokens_are_those_of_a_request_alone(model, wanted, options):
    """Prompts with a common beginning, twice: the second time it is cached."""
    serving = make_engine(model, **options)
    for name in ("first", "second"):
        for index, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            serving.add_request(f"{name} {index}", ids, params)
        outputs = run(serving)
        for index, ids in enumerate(wanted):
            got = outputs[f"{name} {index}"].outputs
            assert [list(one.token_ids) for one in got] == ids, index
    stats = serving.scheduler.stats()
    if options.get("num_blocks") == 12:
        assert stats.num_preemptions > 0
    else:
        assert stats.prefix_cache_hits > 0
    check_drained(serving)
    serving.close()


def test_a_page_holds_one_latent_for_all_heads(model):
    """40 values of the latent and 8 of the rotated key, instead of 4 heads' keys and values."""
    serving = make_engine(model)
    attentions = 4 if model.config.model_type == "longcat_flash" else 3
    assert serving.kv_cache.geometry.bytes_per_token == attentions * (40 + 8) * 4
    serving.close()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_latents_are_not_quantized(model, kv_cache_dtype):
    with pytest.raises(ConfigError, match="whose pages hold latents; got"):
        make_engine(model, kv_cache_dtype=kv_cache_dtype)
