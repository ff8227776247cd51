"""Models with learned positions under load: shared prefixes, preemption, chunks, graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.e2e.tiny import (
    CONFIG,
    VOCAB,
    alone,
    check_drained,
    make_engine,
    mixed_params,
    run,
    swap_gb,
    tiny_model,
)

GPT2 = replace(
    CONFIG,
    model_type="gpt2",
    num_kv_heads=6,
    layer_norm=True,
    norm_bias=True,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    gated_mlp=False,
    activation="gelu_tanh",
    learned_positions=True,
    attn_scale_by_layer=True,
    rope_layers=(False, False),
    tie_word_embeddings=True,
)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


HEAD = prompt(0, 70)
PROMPTS = [HEAD + prompt(1, 9), HEAD + prompt(2, 30), prompt(3, 3), HEAD[:64]]
PARAMS = [
    mixed_params(index, max_tokens=10 + 6 * index, n=1 + index % 2) for index in range(len(PROMPTS))
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return tiny_model(request.param, GPT2, deterministic=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 12},  # preempts
        {"num_blocks": 12, "swap_space_gb": swap_gb(64), "preemption_mode": "swap"},
        {"max_num_batched_tokens": 96, "async_scheduling": True},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_request_alone(model, options):
    """Prompts with a common beginning, twice: the second time it is cached."""
    wanted = [alone(model, ids, params) for ids, params in zip(PROMPTS, PARAMS, strict=True)]
    serving = make_engine(model, **options)
    for name in ("first", "second"):
        for index, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            serving.add_request(f"{name} {index}", ids, params)
        outputs = run(serving)
        for index, ids in enumerate(wanted):
            got = outputs[f"{name} {index}"].outputs
            assert [list(one.token_ids) for one in got] == ids, index
    stats = serving.scheduler.stats()
    assert stats.num_preemptions > 0 if "num_blocks" in options else stats.prefix_cache_hits > 0
    check_drained(serving)
    serving.close()
