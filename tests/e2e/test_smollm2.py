"""The real model under load: what each prompt gives in a crowd is what it gives alone."""

from __future__ import annotations

import pytest

import engine
from engine import LLMEngine, SamplingParams
from engine.device import resolve_device, to_numpy
from engine.errors import DownloadError
from engine.loading.download import resolve_model

STEM = "You are a helpful assistant. Answer briefly and truthfully. "
PROMPTS = [
    STEM + "What is the capital of Italy?",
    STEM + "What is the boiling point of water?",
    "def fibonacci(n):",
    STEM + "What is the capital of Italy?",
]
COUNT = 18


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    """In float32; skipped where the weights are not at hand."""
    try:
        source = resolve_model("smollm2", progress=False).path
    except DownloadError as error:
        pytest.skip(f"no weights: {error}")
    if request.param == "cuda" and not resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    return engine.load(
        source, device=request.param, dtype="float32", max_model_len=128, progress=False
    )


def _greedy_alone(model, ids, count):
    cache = model.new_cache(1, len(ids) + count)
    row, out = model.step([ids], cache)[0], []
    while True:
        out.append(int(to_numpy(row).argmax()))
        if len(out) == count or out[-1] in model.eos_token_ids:
            return out
        row = model.step([out[-1:]], cache)[0]


@pytest.fixture(scope="module")
def wanted(model):
    return [_greedy_alone(model, model.tokenizer.encode(prompt), COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("late", [False, True])
def test_a_crowd_in_a_tiny_pool(model, wanted, late):
    server = LLMEngine(
        model,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_blocks=4,
        watermark=0.0,
        swap_space_gb=0.01,
        preemption_mode="swap",
        async_scheduling=late,
        debug=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=COUNT)
    for index, prompt in enumerate(PROMPTS):
        server.add_request(str(index), prompt, params)
    outputs = {}
    while server.has_unfinished_requests():
        outputs.update((o.request_id, o) for o in server.step())
        server.check_integrity()
    for index, want in enumerate(wanted):
        completion = outputs[str(index)].outputs[0]
        assert list(completion.token_ids) == want
        assert completion.text == model.tokenizer.decode(want)
    assert server.stats().num_preemptions > 0
    server.close()


def test_beams_are_better_than_greedy(model):
    llm = engine.LLM.__new__(engine.LLM)
    llm.llm_engine, llm._counter, llm._inbox = LLMEngine(model), iter(range(99)), {}
    params = engine.BeamSearchParams(beam_width=3, max_tokens=8)
    [output] = llm.beam_search("The capital of France is", params)
    best = output.sequences[0]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    [alone] = llm.generate("The capital of France is", greedy)
    mean = alone.outputs[0].cumulative_logprob / len(alone.outputs[0].token_ids)
    assert len(output.sequences) == 3 and best.score >= mean - 1e-4
    assert "Paris" in best.text
    llm.llm_engine.close()
