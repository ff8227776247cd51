"""/v1/responses and /v1/messages with the real SmolLM2 (``engine pull smollm2``) on the CPU."""

from __future__ import annotations

import asyncio

import pytest

from engine import LLM, SamplingParams
from engine.async_engine import AsyncEngine
from engine.loading.download import local_path
from engine.server.server_config import ServerConfig
from tests.lazily import lazily
from tests.server.serving import serve

anthropic = lazily("anthropic")
openai = lazily("openai")

PROMPTS = ["What is the capital of France?", "Count to five.", "Say hello in German."]
SYSTEM = "Answer with one sentence."
OPTIONS = {"device": "cpu", "max_model_len": 512}


@pytest.fixture(scope="module")
def expected():
    """What the offline engine answers: text, and number of prompt and output tokens."""
    if local_path("smollm2") is None:
        pytest.skip("SmolLM2 has not been pulled: run `engine pull smollm2`")
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        for text in PROMPTS
    ]
    with LLM("smollm2", **OPTIONS) as llm:
        found = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=12))
    return [
        (out.outputs[0].text, len(out.prompt_token_ids), len(out.outputs[0].token_ids))
        for out in found
    ]


@pytest.fixture(scope="module")
def url(expected):
    config = ServerConfig(served_model_name=("smollm2",), access_log=False)
    with serve(lambda: AsyncEngine.from_name("smollm2", **OPTIONS), config) as found:
        yield found.url


def test_responses_are_those_of_the_offline_engine(url, expected):
    async def one(client, text):
        fields = {"model": "smollm2", "input": text, "instructions": SYSTEM}
        fields |= {"temperature": 0.0, "max_output_tokens": 12}
        whole = await client.responses.create(**fields)
        parts = [
            event.delta
            async for event in await client.responses.create(**fields, stream=True)
            if event.type == "response.output_text.delta"
        ]
        assert "".join(parts) == whole.output_text and len(parts) > 1
        return whole.output_text, whole.usage.input_tokens, whole.usage.output_tokens

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, text) for text in PROMPTS))

    assert asyncio.run(run()) == expected


def test_messages_are_those_of_the_offline_engine(url, expected):
    async def one(client, text):
        fields = {"model": "smollm2", "messages": [{"role": "user", "content": text}]}
        fields |= {"system": SYSTEM}
        limits = {"max_tokens": 12, "extra_body": {"temperature": 0.0}}
        async with client.messages.stream(**fields, **limits) as stream:
            message = await stream.get_final_message()
        counted = (await client.messages.count_tokens(**fields)).input_tokens
        assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens
        return message.content[0].text, counted, message.usage.output_tokens

    async def run():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(one(client, text) for text in PROMPTS))

    assert asyncio.run(run()) == expected


def test_tools_that_the_template_does_not_read_are_refused(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
        with pytest.raises(openai.BadRequestError, match="the template ignores them"):
            client.responses.create(model="smollm2", input="Hi", tools=tools)
