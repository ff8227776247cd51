"""A session of lm-evaluation-harness: log-likelihoods equal to the engine's own, and generation."""

from __future__ import annotations

import json
import math

import pytest

from engine import LLM, SamplingParams
from tests.clients.libraries.conftest import KEY, MAX_MODEL_LEN

lm_eval = pytest.importorskip("lm_eval")

DOCS = [
    {"question": "The capital of France is", "choices": ["Paris", "Berlin", "a city"], "answer": 0},
    {"question": "Two and two are", "choices": ["four", "five", "twenty-two"], "answer": 0},
    {"question": "Grüße, 日本 —", "choices": ["🙂 ok", "nö", "日本語"], "answer": 2},
]
CHOICE = """
task: engine_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """
task: engine_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}."
metric_list: [{metric: byte_perplexity}]
"""
GENERATE = """
task: engine_generate
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(text % data)
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN) as found:
        yield found


def evaluate(server, tasks, task, model="local-completions", chat=False, **options):
    path = "chat/completions" if model == "local-chat-completions" else "completions"
    fields = {"model": "smollm2", "base_url": f"{server.api}/{path}", "max_length": MAX_MODEL_LEN}
    fields |= {"header": {"Authorization": f"Bearer {server.key}"}, **options}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=fields,
        tasks=[task],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    return sorted(found["samples"][task], key=lambda sample: sample["doc_id"])


def scored(llm, context, continuation):
    """Return the sum of the continuation's log-probabilities, and whether it is greedy."""
    ids = context + continuation
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    [found] = llm.generate([{"prompt_token_ids": ids}], params)
    entries = list(zip(ids, found.prompt_logprobs, strict=True))[len(context) :]
    return (
        math.fsum(entry[i].logprob for i, entry in entries),
        all(entry[i].rank == 1 for i, entry in entries),
    )


BACKENDS = {
    "huggingface": {},
    "texts": {"tokenized_requests": False},
    "batches": {"batch_size": 4},
    "concurrent": {"num_concurrent": 4, "batch_size": 2},
    "remote": {"tokenizer_backend": "remote", "auth_token": KEY},
    "auto": {"tokenizer_backend": "auto", "auth_token": KEY},
}


def options_of(name, tokenizer_folder):
    own = {"tokenizer_backend": "huggingface", "tokenizer": str(tokenizer_folder)}
    return BACKENDS[name] if name in ("remote", "auto") else own | BACKENDS[name]


@pytest.mark.parametrize("name", BACKENDS)
def test_log_likelihoods_are_the_engines(server, tasks, llm, tokenizer_folder, name):
    samples = evaluate(server, tasks, "engine_choice", **options_of(name, tokenizer_folder))
    encode = llm.tokenizer.encode
    for doc, sample in zip(DOCS, samples, strict=True):
        for choice, (found,) in zip(doc["choices"], sample["resps"], strict=True):
            context = encode(doc["question"], add_special_tokens=False)
            whole = encode(f"{doc['question']} {choice}", add_special_tokens=False)
            expected, is_greedy = scored(llm, context, whole[len(context) :])
            assert float(found[0]) == pytest.approx(expected, abs=2e-4)
            assert found[1] in (is_greedy, str(is_greedy))
    assert [sample["acc"] for sample in samples[:2]] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["huggingface", "remote"])
def test_rolling_log_likelihoods(server, tasks, llm, tokenizer_folder, name):
    samples = evaluate(server, tasks, "engine_rolling", **options_of(name, tokenizer_folder))
    for doc, sample in zip(DOCS, samples, strict=True):
        ids = llm.tokenizer.encode(f"{doc['question']} {doc['choices'][0]}.", False)
        expected, _ = scored(llm, [llm.tokenizer.bos_token_id], ids)
        found = sample["resps"][0][0]
        found = found[0] if isinstance(found, (tuple, list)) else found
        assert float(found) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", ["huggingface", "texts", "batches", "concurrent", "remote"])
def test_generation(server, tasks, llm, tokenizer_folder, name):
    samples = evaluate(server, tasks, "engine_generate", **options_of(name, tokenizer_folder))
    params = SamplingParams(temperature=0.0, max_tokens=8, stop=["\n", "."])
    for doc, sample in zip(DOCS, samples, strict=True):
        ids = llm.tokenizer.encode(doc["question"], False)
        [expected] = llm.generate([{"prompt_token_ids": ids}], params)
        assert sample["resps"] == [[expected.outputs[0].text]]


def test_generation_without_a_tokenizer(server, tasks, llm):
    options = {"tokenizer_backend": None, "eos_string": "<|im_end|>"}
    samples = evaluate(server, tasks, "engine_generate", **options)
    assert "Paris" in samples[0]["resps"][0][0]


def test_chat_completions(server, tasks, llm):
    samples = evaluate(
        server, tasks, "engine_generate", "local-chat-completions", chat=True,
        eos_string="<|im_end|>",
    )  # fmt: skip
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)
    assert "Paris" in samples[0]["resps"][0][0]


def test_the_end_token_has_a_log_probability_too(server):
    """The harness drops the last entry, which it takes for the generated token's."""
    import httpx

    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!"
    fields = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    fields |= {"logit_bias": {"2": 100}, "add_special_tokens": False}
    headers = {"X-API-Key": server.key}
    found = httpx.post(f"{server.api}/completions", json=fields, headers=headers, timeout=60)
    (choice,) = found.json()["choices"]
    assert choice["finish_reason"] == "stop"
    count = found.json()["usage"]["prompt_tokens"]
    assert len(choice["logprobs"]["token_logprobs"]) == count + 1
