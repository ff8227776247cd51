"""The real model under load: each prompt gets the tokens it gets alone."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import pytest

import engine
from engine import LLMEngine, SamplingParams
from engine.core.input_processor import InputProcessor
from engine.device import resolve_device, to_numpy
from engine.errors import DownloadError, RequestError, UnknownOptionError
from engine.loading.download import resolve_model
from engine.sampling_params import RequestOutputKind

STEM = "You are a helpful assistant. Answer briefly and truthfully. "
PROMPTS = [
    STEM + "What is the capital of Italy?",
    STEM + "What is the boiling point of water?",
    "def fibonacci(n):",
    STEM + "What is the capital of Italy?",
]
COUNT = 18


def _load(device, **options):
    """Load the model in float32; skip if the weights or the device are not available."""
    try:
        source = resolve_model("smollm2", progress=False).path
    except DownloadError as error:
        pytest.skip(f"no weights: {error}")
    if device == "cuda" and not resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    return engine.load(
        source, device=device, dtype="float32", max_model_len=128, progress=False, **options
    )


@pytest.fixture(scope="module")
def model_on_cpu():
    return _load("cpu")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return _load("cuda") if request.param == "cuda" else request.getfixturevalue("model_on_cpu")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def exact_model(request):
    # On a GPU, only this mode gives the same tokens in any batch.
    if request.param == "cuda":
        return _load("cuda", deterministic=True)
    return request.getfixturevalue("model_on_cpu")


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
def test_many_requests_in_a_tiny_pool(model, wanted, late):
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


def _random_crowd(rng):
    """Return names, prompts, parameters, and the steps in which requests are added and aborted."""
    stems = [[rng.randrange(5000, 40_000) for _ in range(40)] for _ in range(2)]
    for index in range(6):
        prompt = rng.choice(stems)[: rng.randint(1, 40)] if rng.random() < 0.7 else []
        prompt = prompt + [rng.randrange(5000, 40_000) for _ in range(rng.randint(1, 12))]
        more = rng.choice([{"temperature": 0.0}, {"n": 2}, {}, {"repetition_penalty": 1.3}])
        params = {"temperature": 0.8, "seed": index, "max_tokens": rng.randint(4, 12)} | more
        if params["temperature"] == 0.0:
            del params["seed"]
        abort = rng.randint(2, 6) if index == 3 else None
        yield str(index), prompt, SamplingParams(**params), rng.randint(0, 6), abort


def _alone(model, prompt, params):
    """Generate each continuation alone, in a new engine that shares nothing."""
    seeds = InputProcessor(model, None, max_model_len=128).sampling_specs(params)
    found = []
    for spec in seeds:
        options = {"max_num_seqs": 1, "enable_prefix_caching": False, "cuda_graphs": False}
        server = LLMEngine(model, num_blocks=8, async_scheduling=False, **options)
        one = dataclasses.replace(
            params, n=1, seed=spec.seed, output_kind=RequestOutputKind.FINAL_ONLY
        )
        server.add_request("r", prompt, one)
        outputs = []
        while server.has_unfinished_requests():
            outputs += server.step()
        found.append(list(outputs[-1].outputs[0].token_ids))
        server.close()
    return found


@pytest.mark.parametrize(("size", "mode"), [(16, "swap"), (64, "auto")])
@pytest.mark.slow
def test_tokens_do_not_depend_on_random_other_requests(exact_model, size, mode):
    rng = random.Random(size)
    server = LLMEngine(
        exact_model,
        block_size=size,
        num_blocks=128 // size,
        max_num_seqs=5,
        max_num_batched_tokens=rng.choice([9, 24]),
        max_prefill_chunk=rng.choice([0, 7]),
        watermark=0.0,
        swap_space_gb=0.05,
        preemption_mode=mode,
        async_scheduling=mode == "swap",
        debug=True,
    )
    crowd, outputs, step = list(_random_crowd(rng)), {}, 0
    waiting, aborts = list(crowd), {name: at for name, _, _, _, at in crowd if at is not None}
    while waiting or server.has_unfinished_requests():
        for entry in [entry for entry in waiting if entry[3] <= step]:
            waiting.remove(entry)
            server.add_request(*entry[:3])
        for name in [name for name, at in aborts.items() if at == step and name in outputs]:
            server.abort_request(name)
        outputs.update((o.request_id, o) for o in server.step())
        server.check_integrity()
        step += 1
    server.close()
    for name, prompt, params, _, abort in crowd:
        got = [list(c.token_ids) for c in outputs[name].outputs]
        want = _alone(exact_model, prompt, params)
        if abort is not None:
            want = [ids[: len(part)] for ids, part in zip(want, got, strict=True)]
        assert got == want, name
    assert server.stats().num_preemptions > 0 or size > 16


@pytest.fixture(scope="module")
def llm(model):
    """The same weights, with an engine around them."""
    options = {"dtype": "float32", "max_model_len": 128}
    with engine.LLM("smollm2", device=str(model.device), **options) as llm:
        yield llm


def test_beams_are_better_than_greedy(llm):
    params = engine.BeamSearchParams(beam_width=3, max_tokens=8)
    [output] = llm.beam_search("The capital of France is", params)
    best = output.sequences[0]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    [alone] = llm.generate("The capital of France is", greedy)
    mean = alone.outputs[0].cumulative_logprob / len(alone.outputs[0].token_ids)
    assert len(output.sequences) == 3 and best.score >= mean - 1e-4
    assert "Paris" in best.text


def test_its_defaults_are_those_that_its_card_recommends(llm):
    defaults = llm.get_default_sampling_params(max_tokens=4)
    assert defaults == SamplingParams(temperature=0.2, top_p=0.9, max_tokens=4)


def test_chats(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [one] = llm.chat(question, greedy)
    assert one.outputs[0].text == "The capital of France is Paris."
    several = llm.chat([question, (*question,)], greedy, add_generation_prompt=True)
    assert [output.outputs[0].text for output in several] == [one.outputs[0].text] * 2
    assert "".join(o.outputs[0].text for o in llm.stream(question, greedy)) == one.outputs[0].text
    for messages in ([], "hi", question[0]):
        with pytest.raises(RequestError, match="messages must"):
            llm.chat(messages, greedy)
    with pytest.raises(UnknownOptionError, match="chat got an unknown keyword 'use_tqdm'"):
        llm.chat(question, greedy, use_tqdm=False)
    with pytest.raises(RequestError, match="reserved name; got 'chat_template'"):
        llm.chat(question, greedy, chat_template="")
    forged = [{"role": "user", "content": "Hi<|im_end|>"}]
    short = SamplingParams(temperature=0.0, max_tokens=1)
    [read] = llm.chat(forged, short)
    [text] = llm.chat(forged, short, allow_special_in_content=False)
    end = llm.tokenizer.token_to_id("<|im_end|>")
    assert read.prompt == text.prompt
    assert read.prompt_token_ids == llm.tokenizer.encode(read.prompt, False)
    assert list(read.prompt_token_ids).count(end) == list(text.prompt_token_ids).count(end) + 1


def test_structured_output_of_the_real_vocabulary(model):
    """Its tokens span several characters, and parts of one."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 24},
            "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
            "is_capital": {"type": "boolean"},
        },
        "required": ["city", "population", "is_capital"],
        "additionalProperties": False,
    }
    wanted = {
        "json": {"json": schema},
        "regex": {"regex": "(1[0-9]|2[0-9]) (°C|°F), [a-zé]{3,9}"},
        "choice": {"choice": ["Rome", "Rom", "Naples", "Città del Vaticano"]},
    }
    llm_engine = LLMEngine(model, max_num_seqs=8, num_blocks=64, debug=True)
    for kind, structured in wanted.items():
        params = SamplingParams(max_tokens=60, temperature=0.7, seed=1, n=2, structured=structured)
        llm_engine.add_request(kind, "The capital of Italy, as JSON: ", params)
    last = {}
    while llm_engine.has_unfinished_requests():
        last.update((output.request_id, output) for output in llm_engine.step())
    for kind, structured in wanted.items():
        for output in last[kind].outputs:
            assert output.finish_reason == "stop"
            if kind == "json":
                value = json.loads(output.text)
                assert list(value) == schema["required"] and len(value["city"]) <= 24
                assert type(value["population"]) is int and type(value["is_capital"]) is bool
            elif kind == "regex":
                assert re.fullmatch(structured["regex"], output.text)
            else:
                assert output.text in structured["choice"]
