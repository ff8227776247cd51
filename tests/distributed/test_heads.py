"""Heads that draft for a model that two processes share: the drafts and tokens of one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine import LLMEngine
from tests.e2e.tiny import mixed_params, run
from tests.speculative import heads, test_eagle3, test_mtp


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    folder, _, _ = test_eagle3.make_head(tmp_path_factory.mktemp("eagle3"))
    model = {"config": test_eagle3.TARGET, "load_format": "dummy"}
    return "dummy", model, test_eagle3.config_of(folder)


@pytest.fixture(scope="module")
def eagle3_without_layers(tmp_path_factory):
    """A head that looks up its tokens in the model, and has the model's output layer, too."""
    rng = np.random.default_rng(1)
    vocab_size = test_eagle3.TARGET.vocab_size
    values = heads.eagle3_json(test_eagle3.TARGET, draft_vocab_size=vocab_size)
    tensors = heads.eagle3_tensors(rng, values, test_eagle3.TARGET)
    left = {k: t for k, t in tensors.items() if k not in ("lm_head.weight", "d2t", "t2d")}
    folder = heads.write(tmp_path_factory.mktemp("eagle3"), values, left)
    model = {"config": test_eagle3.TARGET, "load_format": "dummy"}
    return "dummy", model, test_eagle3.config_of(folder)


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mimo")
    heads.write(folder, test_mtp.VALUES, test_mtp.mimo_tensors())
    return str(folder), {}, test_mtp.config_of()


@pytest.mark.parametrize(
    ("head", "deterministic", "is_async", "has_graphs"),
    [
        ("eagle3", True, False, False),
        ("eagle3", False, True, True),
        ("eagle3_without_layers", False, True, False),
        ("mtp", True, True, False),
        ("mtp", False, False, True),
    ],
)
def test_drafts_and_tokens(request, head, deterministic, is_async, has_graphs):
    """Without `deterministic` the residual streams that a head reads are sums over ranks."""
    name, model, config = request.getfixturevalue(head)
    found, drafted, counts = {}, {}, {}
    for size in (0, 1, 2):  # 0: plain decoding
        options = {"device": "cpu", "dtype": "float32", "deterministic": deterministic, **model}
        options |= {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_blocks": 64}
        options |= {"async_scheduling": is_async, "debug": True, "collective_timeout": 20.0}
        options |= {"speculative_config": config} if size else {}
        with LLMEngine.from_name(name, tensor_parallel_size=size or 1, **options) as engine:
            if has_graphs:
                limits = engine.config.scheduler
                engine.runner.capture_graphs(limits.max_model_len, limits.max_draft_tokens)
            seen = test_eagle3.drafts_of(engine) if size else []
            rng = np.random.default_rng(7)
            for index in range(3):
                prompt = rng.integers(4, 61, 3 + 12 * index).tolist()
                engine.add_request(f"r{index}", prompt, mixed_params(index, max_tokens=11))
            outputs = run(engine)
            found[size] = {k: [o.token_ids for o in v.outputs] for k, v in outputs.items()}
            drafted[size] = [(*each, list(drafts.token_ids)) for *each, drafts in seen if drafts]
            if size:
                counts[size] = engine.stats().speculation
    assert found[1] == found[0] and found[2] == found[0]
    assert drafted[2] == drafted[1]
    assert counts[2].num_draft_tokens == counts[1].num_draft_tokens > 10
    assert counts[2].num_proposer_failures == 0


@pytest.mark.parametrize(
    ("head", "sizes", "is_async", "has_graphs"),
    [
        ("eagle3", (2, 1), False, False),
        ("eagle3", (4, 1), True, True),
        ("eagle3_without_layers", (3, 1), True, False),
        ("eagle3_without_layers", (2, 2), False, False),
        ("mtp", (2, 1), True, False),
        ("mtp", (3, 1), False, True),
        ("mtp", (2, 2), True, False),
        ("mtp", (2, 2), True, True),
    ],
)
def test_stages(request, in_threads, head, sizes, is_async, has_graphs):
    """The head is in the last stage; the others send it the inputs of their layers."""
    name, model, config = request.getfixturevalue(head)
    found, drafted, counts = {}, {}, {}
    for stages, ranks in ((1, 1), sizes):
        options = {"device": "cpu", "dtype": "float32", "deterministic": True, **model}
        options |= {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_blocks": 64}
        options |= {"debug": True, "collective_timeout": 20.0}
        options |= {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
        if stages > 1:
            options["async_scheduling"] = is_async
        with LLMEngine.from_name(name, speculative_config=config, **options) as engine:
            if has_graphs and stages > 1:
                limits = engine.config.scheduler
                engine.runner.capture_graphs(limits.max_model_len, limits.max_draft_tokens)
                engine.runner._looks_ahead = True
            seen = test_eagle3.drafts_of(engine)
            rng = np.random.default_rng(7)
            for index in range(6):
                prompt = rng.integers(4, 61, 3 + 7 * index).tolist()
                engine.add_request(f"r{index}", prompt, mixed_params(index, max_tokens=11))
            outputs = run(engine)
        found[stages] = {k: [o.token_ids for o in v.outputs] for k, v in outputs.items()}
        drafted[stages] = {
            (request_id, *known): list(drafts.token_ids)
            for request_id, known, drafts in seen
            if drafts
        }
        counts[stages] = engine.stats().speculation
    stages, _ = sizes
    assert found[stages] == found[1]
    assert drafted[stages] == drafted[1]
    assert counts[stages] == counts[1] and counts[1].num_draft_tokens > 100


def test_requests_that_leave_while_their_steps_are_in_flight(in_threads, eagle3):
    """Aborted within a prompt or a decode, or preempted: no fault, and nothing is kept of them."""
    name, model, config = eagle3
    options = {"device": "cpu", "dtype": "float32", "deterministic": True, **model}
    options |= {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_blocks": 10, "debug": True}
    options |= {"pipeline_parallel_size": 3, "collective_timeout": 20.0}
    with LLMEngine.from_name(name, speculative_config=config, **options) as engine:
        proposer = engine.speculation._proposer._proposer
        for index in range(9):
            prompt = [4 + index] * (60 if index % 3 == 0 else 5)
            engine.add_request(f"r{index}", prompt, mixed_params(index, max_tokens=50))
        for step in itertools.count():
            if step in (2, 5, 9):
                engine.abort_request([f"r{step % 9}"])
            engine.step()
            if not engine.has_unfinished_requests():
                break
        stats = engine.stats()
        assert stats.num_preemptions > 0 and stats.speculation.num_draft_tokens > 0
        assert stats.speculation.num_proposer_failures == 0
        assert not proposer._rows and not proposer._sequences
