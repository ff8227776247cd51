"""Draft heads on a GPU, with CUDA graphs of the target and without: drafts, tokens, acceptance."""

from __future__ import annotations

import numpy as np
import pytest

import engine
from engine import SamplingParams
from engine.device import to_numpy
from tests.e2e.tiny import alone, make_engine, mixed_params, run, tiny_model
from tests.speculative import heads, test_eagle3, test_mtp

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[False, True], ids=["launches", "graphs"])
def graphs(request):
    return request.param


@pytest.fixture(scope="module")
def eagle3_pair(tmp_path_factory):
    """A model, its head's config, and the head's values and tensors."""
    model = tiny_model("cuda", test_eagle3.TARGET, deterministic=True)
    folder, values, tensors = test_eagle3.make_head(tmp_path_factory.mktemp("eagle3"))
    return model, test_eagle3.config_of(folder), (values, tensors)


@pytest.fixture(scope="module")
def mtp_pair(tmp_path_factory):
    tiny_model("cuda")  # or skip
    tensors = test_mtp.mimo_tensors()
    folder = heads.write(tmp_path_factory.mktemp("mimo"), test_mtp.VALUES, tensors)
    model = engine.load(folder, device="cuda", dtype="float32", deterministic=True)
    return model, test_mtp.config_of(), tensors


def serve(model, config, graphs, **options):
    """Serve requests of different kinds; check their tokens, and return what was proposed."""
    serving = make_engine(model, speculative_config=config, cuda_graphs=graphs, **options)
    seen, rng, wanted = test_eagle3.drafts_of(serving), np.random.default_rng(7), {}
    for index in range(6):
        prompt = rng.integers(4, 61, 3 + 6 * index).tolist()
        params = mixed_params(index, max_tokens=21, n=1 + index % 2)
        wanted[f"r{index}"] = alone(model, prompt, params)
        serving.add_request(f"r{index}", prompt, params)
    outputs = run(serving)
    for name, ids in wanted.items():
        assert [list(o.token_ids) for o in outputs[name].outputs] == ids
    stats = serving.stats().speculation
    assert stats.num_drafts > 8 and stats.num_proposer_failures == 0
    serving.close()
    return seen


def check_greedy_drafts(seen, formula):
    """Compare the drafts of greedy requests with those of a formula; few may differ by rounding."""
    pairs = []
    for name, known, drafts in seen:
        if drafts is not None and name[:2] in ("r0", "r4"):  # `mixed_params`: greedy
            given = list(drafts.token_ids)
            pairs += zip(given, formula(known), strict=False)
    assert len(pairs) > 12
    assert np.mean([one == other for one, other in pairs]) > 0.95


def test_an_eagle3_head(eagle3_pair, graphs):
    model, config, (values, tensors) = eagle3_pair
    embed = to_numpy(model.decoder.embed.weight.data)

    def formula(known):
        features = test_eagle3.features_of(model, known)[:-1]
        return heads.eagle3_drafts(tensors, values, embed, features, known, 3)[0]

    check_greedy_drafts(serve(model, config, graphs, async_scheduling=False), formula)


def test_an_mtp_head(mtp_pair, graphs):
    model, config, tensors = mtp_pair

    def formula(known):
        return test_mtp.mtp_drafts(tensors, test_mtp.final_states(model, known)[:-1], known, 3)

    check_greedy_drafts(serve(model, config, graphs, async_scheduling=False), formula)


def test_tokens_where_outputs_come_late(eagle3_pair, mtp_pair, graphs):
    """Then some steps have no drafts, and some keys of the head are missing."""
    for model, config, _ in (eagle3_pair, mtp_pair):
        serve(model, config, graphs, async_scheduling=True)


@pytest.mark.parametrize("given", [{"temperature": 0}, {"temperature": 0.7, "seed": 5}])
def test_a_head_that_is_right_is_always_accepted(tmp_path, graphs, given):
    model, folder = test_eagle3.perfect_pair(tmp_path, "cuda")
    config = test_eagle3.config_of(folder)
    options = {"cuda_graphs": graphs, "async_scheduling": False}
    serving = make_engine(model, speculative_config=config, **options)
    params = SamplingParams(max_tokens=41, ignore_eos=True, **given)
    serving.add_request("r", [1, 2, 3], params)
    tokens = list(run(serving)["r"].outputs[0].token_ids)
    stats = serving.stats().speculation
    assert tokens == alone(model, [1, 2, 3], params)[0]
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 30
    serving.close()


def test_few_pages(eagle3_pair, graphs):
    """Requests are preempted, and their keys of the head are computed again."""
    model, config, _ = eagle3_pair
    serve(model, config, graphs, num_blocks=14)
