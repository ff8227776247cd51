"""OpenAI's client against smollm2: answers equal those of the offline engine."""

from __future__ import annotations

import asyncio
import base64
import math

import numpy as np
import pytest

from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from tests.lazily import lazily

openai = lazily("openai")

QUESTION = [{"role": "user", "content": "Name the three primary colors."}]
PROMPT = "The capital of France is"
GREEDY = {"model": "smollm2", "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def offline(smollm2):
    """Generate with an engine of the same options, without a server."""

    def generate(prompt, **params):
        engine = LLMEngine(smollm2, max_num_seqs=8, max_model_len=512, num_blocks=256)
        engine.add_request("r", prompt, SamplingParams(**params))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        return outputs[-1]

    return generate


@pytest.fixture
def chat_prompt(smollm2):
    return {"prompt_token_ids": smollm2.tokenizer.encode_chat(QUESTION)}


def test_a_completion(client, offline):
    want = offline(PROMPT, temperature=0.0, max_tokens=12).outputs[0]
    found = client.completions.create(prompt=PROMPT, max_tokens=12, **GREEDY)
    assert found.choices[0].text == want.text
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 12)
    assert found.model == "smollm2"


def test_a_streamed_completion(client, offline):
    want = offline(PROMPT, temperature=0.0, max_tokens=12).outputs[0]
    options = {"stream_options": {"include_usage": True}}
    stream = client.completions.create(
        prompt=PROMPT, max_tokens=12, stream=True, extra_body=options, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == want.text
    assert len(chunks) > 8
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-2].choices[0].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_usage_in_every_chunk(client, kind, n):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"max_tokens": 6, "n": n, "stream": True, "stream_options": usage}
    fields |= {"logit_bias": {2: -100}, **GREEDY, "temperature": 0.5}  # never <|im_end|>
    if kind == "chat":
        chunks = list(client.chat.completions.create(messages=QUESTION, **fields))
    else:
        chunks = list(client.completions.create(prompt=PROMPT, **fields))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < 6 * n == counts[-1]
    assert len(set(counts)) >= 5
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    for usage in (chunk.usage for chunk in chunks):
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert chunks[-1].choices == [] and all(chunk.choices for chunk in chunks[:-1])


def test_usage_in_every_chunk_needs_include_usage(client):
    fields = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = list(client.completions.create(prompt=PROMPT, max_tokens=2, **fields, **GREEDY))
    assert all(chunk.usage is None for chunk in chunks)


def test_logprobs_and_echo_of_a_completion(client, offline):
    want = offline(PROMPT, temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    found = client.completions.create(
        prompt=PROMPT, max_tokens=4, logprobs=2, echo=True, **GREEDY
    ).choices[0]
    assert found.text == PROMPT + want.outputs[0].text
    logprobs = found.logprobs
    assert "".join(logprobs.tokens) == found.text
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert found.text[offset : offset + len(token)] == token
    ids = want.outputs[0].token_ids
    wanted = [e[i].logprob for i, e in zip(ids, want.outputs[0].logprobs, strict=True)]
    np.testing.assert_allclose(logprobs.token_logprobs[-4:], wanted, rtol=1e-5)
    streamed = client.completions.create(
        prompt=PROMPT, max_tokens=4, logprobs=2, echo=True, stream=True, **GREEDY
    )
    tokens = [t for c in streamed for t in (c.choices[0].logprobs.tokens or [])]
    assert tokens == logprobs.tokens


def test_a_conversation(client, offline, chat_prompt):
    want = offline(chat_prompt, temperature=0.0, max_tokens=10).outputs[0]
    found = client.chat.completions.create(messages=QUESTION, max_completion_tokens=10, **GREEDY)
    assert found.choices[0].message.content == want.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == want.finish_reason
    assert found.usage.total_tokens == len(chat_prompt["prompt_token_ids"]) + len(want.token_ids)
    parts = [{"type": "text", "text": QUESTION[0]["content"]}]
    again = client.chat.completions.create(
        messages=[{"role": "user", "content": parts}], max_tokens=10, **GREEDY
    )
    assert again.choices[0].message.content == want.text


def test_a_streamed_conversation(client, offline, chat_prompt):
    want = offline(chat_prompt, temperature=0.0, max_tokens=10).outputs[0]
    *chunks, last = client.chat.completions.create(
        messages=QUESTION,
        max_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == want.finish_reason
    assert last.usage.completion_tokens == len(want.token_ids)


def test_logprobs_of_a_conversation(client, offline, chat_prompt):
    want = offline(chat_prompt, temperature=0.0, max_tokens=6, logprobs=3).outputs[0]
    options = {"messages": QUESTION, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**options, **GREEDY).choices[0]
    content = choice.logprobs.content
    assert "".join(item.token for item in content) == choice.message.content
    assert bytes(b for item in content for b in item.bytes).decode() == choice.message.content
    for item, token_id, entry in zip(content, want.token_ids, want.logprobs, strict=True):
        assert item.logprob == pytest.approx(entry[token_id].logprob, rel=1e-5)
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].token == item.token  # greedy
        assert all(a.logprob >= b.logprob for a, b in
                   zip(item.top_logprobs, item.top_logprobs[1:], strict=False))  # fmt: skip
    chunks = client.chat.completions.create(**options, **GREEDY, stream=True)
    logprobs = [c.choices[0].logprobs for c in chunks]
    assert [i for found in logprobs if found for i in found.content] == content


def test_n_seed_and_stop(client):
    options = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 8, "temperature": 1.0}
    first = client.completions.create(n=3, seed=7, **options)
    again = client.completions.create(n=3, seed=7, **options)
    texts = [c.text for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert texts == [c.text for c in again.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.completions.create(n=3, seed=7, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    found = client.completions.create(prompt=PROMPT, stop=["Paris"], max_tokens=8, **GREEDY)
    assert "Paris" not in found.choices[0].text
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].model_extra["stop_reason"] == "Paris"


def test_vllms_extra_fields(client):
    extra = {"top_k": 1, "min_tokens": 4, "ignore_eos": True, "include_stop_str_in_output": True}
    found = client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=8, stop="Paris", temperature=1.0,
        extra_body={**extra, "min_tokens": 0},
    )  # fmt: skip
    assert found.choices[0].text.endswith("Paris")
    bias = client.completions.create(
        prompt=PROMPT, max_tokens=3, logit_bias={"7042": -100}, **GREEDY
    )
    banned = client.completions.create(
        prompt=PROMPT, max_tokens=3, extra_body={"bad_words": ["Paris"]}, **GREEDY
    )
    only = client.completions.create(
        prompt=PROMPT, max_tokens=3, extra_body={"allowed_token_ids": [28]}, **GREEDY
    )
    assert "Paris" not in bias.choices[0].text
    assert "Paris" not in banned.choices[0].text
    assert len(set(only.choices[0].text)) == 1


def test_many_at_once_with_the_async_client(real_server, offline):
    async def main():
        url = real_server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:

            async def one(index):
                stream = await client.completions.create(
                    prompt=f"{index} plus {index} is", max_tokens=6, stream=True, **GREEDY
                )
                return "".join([c.choices[0].text async for c in stream])

            return await asyncio.gather(*(one(i) for i in range(16)))

    found = asyncio.run(main())
    for index in (0, 9, 15):
        want = offline(f"{index} plus {index} is", temperature=0.0, max_tokens=6)
        assert found[index] == want.outputs[0].text


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as caught:
        client.completions.create(model="smollm2", prompt="a", extra_body={"temprature": 1})
    assert caught.value.param == "temprature"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(prompt=[5] * 600, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(prompt="a", max_tokens=0, **GREEDY)


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "smollm2"
    extra = client.models.retrieve("smollm2").model_extra
    assert extra["max_model_len"] == 512
    assert extra["default_sampling_params"] == {"temperature": 0.2, "top_p": 0.9}


def test_a_request_that_names_no_sampling_gets_the_models_own(client):
    """At temperature 1 half of the answers to this are nonsense, and no two alike."""
    choices = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "hi"}], n=8, max_tokens=8, seed=0
    ).choices
    assert sum(choice.message.content.startswith("Hello") for choice in choices) >= 7


def test_embeddings(client):
    texts = ["A cat sits.", "A kitten is sitting.", "Interest rates rose."]
    found = client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": "mean"})
    assert found.usage.prompt_tokens == found.usage.total_tokens > 10
    vectors = np.array([item.embedding for item in found.data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    raw = client.embeddings.create(
        model="smollm2", input=texts[0], encoding_format="base64", extra_body={"pooling": "mean"}
    )
    decoded = np.frombuffer(base64.b64decode(raw.data[0].embedding), "<f4")
    np.testing.assert_allclose(decoded, vectors[0], atol=1e-5)


def test_metrics_count_the_requests(client, real_server):
    client.completions.create(prompt=PROMPT, max_tokens=3, **GREEDY)
    text = client.with_options().get("/../metrics", cast_to=str)
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    label = '{engine="0",model_name="smollm2"}'
    assert values[f"vllm:num_requests_running{label}"] == 0
    assert values[f"vllm:generation_tokens_total{label}"] >= 3
    assert (
        values[
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="smollm2"}'
        ]
        >= 1
    )
    assert math.isfinite(values[f"vllm:time_to_first_token_seconds_sum{label}"])


def test_prompt_logprobs_and_special_tokens(client, smollm2):
    tokenizer = smollm2.tokenizer
    extra = {"prompt_logprobs": 2, "add_special_tokens": False}
    found = client.completions.create(prompt=PROMPT, max_tokens=1, extra_body=extra, **GREEDY)
    entries = found.choices[0].model_extra["prompt_logprobs"]
    ids = tokenizer.encode(PROMPT, False)
    assert entries[0] is None
    assert len(entries) == len(ids)
    for entry, token_id in zip(entries[1:], ids[1:], strict=True):
        assert entry[str(token_id)]["decoded_token"] == tokenizer.decode([token_id])
        assert min(item["rank"] for item in entry.values()) == 1
    chat = client.chat.completions.create(
        messages=QUESTION, max_tokens=1, extra_body={"prompt_logprobs": 0}, **GREEDY
    )
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


def test_prompts_as_token_ids_and_the_prefix_cache(client, smollm2):
    ids = smollm2.tokenizer.encode(PROMPT * 10)
    for expected in (False, True):
        found = client.completions.create(prompt=[ids], max_tokens=2, **GREEDY)
        assert found.usage.prompt_tokens == len(ids)
        assert (found.usage.prompt_tokens_details.cached_tokens > 0) == expected
    salted = client.completions.create(
        prompt=ids, max_tokens=2, extra_body={"cache_salt": "other"}, **GREEDY
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].text == found.choices[0].text
