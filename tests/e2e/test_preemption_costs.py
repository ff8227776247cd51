"""The costs of preemption: measured once, shown, overridden by options, and used."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from engine import SamplingParams
from engine.core import preemption_costs
from engine.errors import ConfigError
from tests.e2e.tiny import greedy_alone, make_engine, run, swap_gb, tiny_model


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return tiny_model(request.param, deterministic=request.param == "cuda")


def _never(*args):
    raise AssertionError("nothing is to be measured")


def test_costs_are_measured_once_and_shown(model):
    engine = make_engine(model, swap_space_gb=swap_gb(8), max_num_batched_tokens=48)
    limits, reasons = engine.config.scheduler, engine.config.reasons
    assert limits is engine.scheduler.config
    for name in ("recompute_us_per_token", "swap_us_per_block"):
        cost = getattr(limits, name)
        assert cost > 0 and math.log2(cost).is_integer()
        assert re.match(rf"{cost:g}: measured", reasons[name])
    assert "prompt of 48 tokens" in reasons["recompute_us_per_token"]


def test_unused_costs_are_not_measured(model, monkeypatch):
    monkeypatch.setattr(preemption_costs, "measure_recompute", _never)
    monkeypatch.setattr(preemption_costs, "measure_swap", _never)
    for options in (
        {},
        {"preemption_mode": "recompute", "swap_space_gb": swap_gb(8)},
        {"preemption_mode": "swap", "swap_space_gb": swap_gb(8)},
        {"swap_space_gb": swap_gb(8), "recompute_us_per_token": 3.0, "swap_us_per_block": 7.5},
    ):
        engine = make_engine(model, **options)
    limits = engine.config.scheduler
    assert (limits.recompute_us_per_token, limits.swap_us_per_block) == (3.0, 7.5)
    assert "swap_us_per_block" not in engine.config.reasons


@pytest.mark.parametrize(("per_token", "per_block", "swaps"), [(100, 1, True), (1, 100, False)])
def test_the_cheaper_mode_is_chosen(model, monkeypatch, per_token, per_block, swaps):
    """With measured and with given costs; the tokens are the same."""
    prompts = [[index * 7 + i % 5 for i in range(40)] for index in range(3)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def serve(**costs):
        engine = make_engine(
            model,
            num_blocks=8,
            max_model_len=128,
            watermark=0.0,
            swap_space_gb=swap_gb(16),
            enable_prefix_caching=False,
            **costs,
        )
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params)
        outputs = run(engine)
        for index, prompt in enumerate(prompts):
            want = greedy_alone(model, prompt, 60, eos=False)
            assert list(outputs[str(index)].outputs[0].token_ids) == want
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 0
        return stats.num_swaps > 0, stats

    given = serve(recompute_us_per_token=per_token, swap_us_per_block=per_block)
    monkeypatch.setattr(preemption_costs, "measure_recompute", lambda *_: 1.1 * per_token)
    monkeypatch.setattr(preemption_costs, "measure_swap", lambda *_: 0.9 * per_block)
    assert serve() == given
    assert given[0] is swaps


def test_a_swap_is_measured_and_changes_no_page(model):
    engine = make_engine(model, swap_space_gb=swap_gb(8))
    slab = engine.kv_cache.slab
    slab[...] = model.device.xp.asarray(np.random.default_rng(1).normal(size=slab.shape))
    before = slab.copy()
    assert preemption_costs.measure_swap(engine.kv_cache, engine._swap) > 0
    assert (slab == before).all()


def test_a_negative_cost_is_refused(model):
    with pytest.raises(ConfigError, match=r"swap_us_per_block must be a number .*; got -1"):
        make_engine(model, swap_us_per_block=-1.0)
