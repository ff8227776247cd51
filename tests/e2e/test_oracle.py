"""Random load: whatever other requests do, each one gets the tokens it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine import SamplingParams
from engine.config import GatedDeltaConfig, LightningConfig, MlaConfig, ShortConvConfig
from tests.e2e.tiny import CONFIG, alone, check_drained, make_engine, swap_gb, tiny_model


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    # On a GPU, only this mode gives the same tokens in any batch.
    return tiny_model(request.param, deterministic=request.param == "cuda")


def _hot_index(ids, logits):
    """A logits processor that forbids repeating the last token."""
    if ids:
        logits[ids[-1]] -= 2.0


def _random_params(rng):
    if rng.random() < 0.3:
        choices = {"temperature": 0.0}
    else:
        choices = {"temperature": rng.choice([0.5, 1.0]), "seed": rng.randrange(2**40)}
        choices["n"] = rng.choice([1, 1, 1, 2, 3])
    extras = [
        {"top_k": 9},
        {"top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logit_bias": {rng.randrange(97): 5.0, 9: -30.0}},
        {"allowed_token_ids": sorted(rng.sample(range(97), 20))},
        {"min_tokens": 6, "stop_token_ids": rng.sample(range(97), 20)},
        {"stop_token_ids": rng.sample(range(97), 5)},
        {"logits_processors": [_hot_index]},
        {"logprobs": 2},
        {},
        {},
        {},
    ]
    choices |= rng.choice(extras)
    return SamplingParams(
        max_tokens=rng.randint(max(1, choices.get("min_tokens", 1)), 80), **choices
    )


def _random_requests(rng, count, num_stems=3, shortest=1, longest=60):
    """Requests, most of which begin with part of one of a few prompts."""
    stems = [[rng.randrange(97) for _ in range(rng.randint(16, longest))] for _ in range(num_stems)]
    for index in range(count):
        stem = rng.choice(stems)[: rng.randint(shortest, longest)] if rng.random() < 0.6 else []
        tail = [rng.randrange(97) for _ in range(rng.randint(0 if stem else 1, 30))]
        yield SimpleNamespace(
            name=f"r{index}",
            prompt=stem + tail,
            params=_random_params(rng),
            step=rng.randint(0, 20),
            priority=rng.choice([0, 0, 0, -1, 2]),
            salt=rng.choice([None, None, "a", "b"]),
            abort_after=rng.randint(1, 30) if rng.random() < 0.15 else None,
        )


def _random_options(rng, max_model_len=176):
    block_size = rng.choice([16, 16, 32, 64, 128])
    longest = -(-max_model_len // block_size)
    mode = rng.choice(["auto", "recompute", "swap", "swap"])
    host = rng.choice([2, longest, 3 * longest]) if mode != "recompute" else 0
    return {
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": longest + rng.choice([0, 0, 1, 3, 20]),
        "max_num_seqs": rng.choice([1, 3, 9, 9]),
        "max_num_batched_tokens": rng.choice([9, 16, 33, 200]),
        "max_prefill_chunk": rng.choice([0, 0, 5, 17]),
        "enable_prefix_caching": rng.random() < 0.75,
        "max_blocks_per_salt": rng.choice([None, 2]),
        "swap_space_gb": swap_gb(host, block_size) if host else 0.0,
        "preemption_mode": mode,
        "scheduling_policy": rng.choice(["fcfs", "lpm"]),
        "priority_window": rng.choice([0, 3]),
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "async_scheduling": rng.random() < 0.6,
    }


def _serve(engine, requests):
    """Add requests, step, and abort as specified; return the last output of each."""
    waiting = sorted(requests, key=lambda r: r.step)
    outputs, seen = {}, {r.name: 0 for r in requests}
    aborts = {r.name: r.abort_after for r in requests if r.abort_after is not None}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].step <= step:
            r = waiting.pop(0)
            engine.add_request(r.name, r.prompt, r.params, priority=r.priority, cache_salt=r.salt)
        for output in engine.step():
            outputs[output.request_id] = output
            seen[output.request_id] += 1
        for name in [n for n, after in aborts.items() if seen[n] >= after]:
            del aborts[name]
            engine.abort_request(name)
        engine.check_integrity()
        step += 1
        assert step < 5000, "no end"
    check_drained(engine)
    return outputs


@pytest.mark.parametrize("seed", range(24))
def test_tokens_do_not_depend_on_random_other_requests(model, seed):
    rng = random.Random(seed)
    requests = list(_random_requests(rng, 12))
    engine = make_engine(model, **_random_options(rng))
    _check(model, engine, requests)


def _check(model, engine, requests):
    """Serve the requests; each must get the tokens it gets alone, up to its abort."""
    outputs = _serve(engine, requests)
    for r in requests:
        want = alone(model, r.prompt, r.params)
        got = [list(c.token_ids) for c in outputs[r.name].outputs]
        reasons = [c.finish_reason for c in outputs[r.name].outputs]
        if "abort" in reasons:
            assert r.abort_after is not None
            assert [w[: len(g)] for w, g in zip(want, got, strict=True)] == got, r
        else:
            assert got == want, (r, engine.config)


OTHERS = ("kimi_delta", "lightning")
KIMI_DELTA = GatedDeltaConfig(
    *(2, 2, 8, 8), norm_activation="sigmoid", channel_gate=True, gate_rank=8, gate_bound=-4.0
)
RECURRENT = {
    "gated_delta": {"gated_delta": GatedDeltaConfig(2, 4, 8, 16)},
    "short_conv": {"short_conv": ShortConvConfig(48)},
    "lightning": {
        "lightning": LightningConfig(6, 8, 2, True, (0.5, 0.2, 0.1) * 2, (1.1, 0.6, 0.2))
    },
    "kimi_delta": {  # beside latent attention, without rope
        "layer_kinds": ("gated_delta", "mla", "gated_delta"),
        "gated_delta": KIMI_DELTA,
        "mla": MlaConfig(12, 16, 4, 4, 6, head_gate=True),
        "attn_scale": 8**-0.5,
        "rope_layers": (False,) * 3,
    },
}


@pytest.mark.parametrize(
    ("where", "kind", "seed"),
    [("cpu", kind, seed) for kind in ("gated_delta", "short_conv") for seed in (0, 2, 3, 5, 7)]
    + [("cpu", kind, seed) for kind in OTHERS for seed in (0, 2, 5, 7)]
    + [
        pytest.param("cuda", kind, seed, marks=pytest.mark.gpu)
        for kind, seeds in (
            ("gated_delta", (0, 2, 3, 5, 6, 7)),
            *((one, (0, 2, 5, 7)) for one in OTHERS),
        )
        for seed in seeds
    ],
)
def test_hybrids_under_random_load(where, kind, seed):
    """As above, with prompts long enough for snapshots of recurrent states.

    Seed 0 runs without prefix caching; with the others some snapshots are used.
    """
    fields = {"num_layers": 3, "layer_kinds": (kind, "attention", kind)} | RECURRENT[kind]
    model = tiny_model(where, replace(CONFIG, **fields), deterministic=where == "cuda")
    rng = random.Random(seed)
    requests = list(_random_requests(rng, 12, num_stems=1, shortest=70, longest=130))
    options = _random_options(rng, 256) | {
        "enable_prefix_caching": seed > 0,
        "num_state_snapshots": rng.choice([None, 1, 4]),
        "state_snapshot_interval": rng.choice([0, 64, 4096]),
    }
    engine = make_engine(model, **options)
    _check(model, engine, requests)
    assert seed == 0 or engine.scheduler.stats().prefix_cache_hits > 0


def test_the_options_force_preemptions_swaps_and_cache_hits():
    """The random options above actually cause what they are meant to test."""
    model, totals = tiny_model(), {"num_preemptions": 0, "num_swaps": 0, "prefix_cache_hits": 0}
    for seed in range(12):
        rng = random.Random(seed)
        requests = list(_random_requests(rng, 12))
        engine = make_engine(model, **_random_options(rng))
        _serve(engine, requests)
        for name in totals:
            totals[name] += getattr(engine.scheduler.stats(), name)
        if min(totals.values()) > 10:  # they only grow
            return
    raise AssertionError(totals)
