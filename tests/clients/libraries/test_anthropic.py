"""A session of Anthropic's library: messages, tools, prefill, errors, retries."""

from __future__ import annotations

import json

import pytest

from tests.clients.libraries.conftest import LONG, MAX_MODEL_LEN
from tests.lazily import lazily

anthropic = lazily("anthropic")

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": "smollm2", "max_tokens": 12, "extra_body": {"temperature": 0.0}}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0) as found:
        yield found


def test_a_message_and_its_stream(client, server, run):
    found = client.messages.create(messages=ASK, system="Be brief.", **GREEDY)
    assert "Paris" in found.content[0].text
    assert found._request_id
    count = client.messages.count_tokens(model="smollm2", messages=ASK, system="Be brief.")
    usage = found.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with client.messages.stream(messages=ASK, system="Be brief.", **GREEDY) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == found.content[0].text == last.content[0].text
    assert last.usage.output_tokens == usage.output_tokens

    async def one():
        options = {"base_url": server.url, "api_key": server.key}
        async with anthropic.AsyncAnthropic(**options) as other:
            return await other.messages.create(messages=ASK, system="Be brief.", **GREEDY)

    assert run(one()).content[0].text == text


def test_a_prefill(client):
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is the city of"}]
    found = client.messages.create(messages=begun, **GREEDY)
    assert found.content[0].text.startswith(" Paris")
    begun[-1]["content"] += " "
    with pytest.raises(anthropic.BadRequestError, match="trailing whitespace"):
        client.messages.create(messages=begun, **GREEDY)


def test_a_forced_tool_of_the_real_model(client):
    choice = {"type": "tool", "name": "add"}
    fields = {"messages": ASK, "tools": [ADD], "tool_choice": choice, **GREEDY, "max_tokens": 64}
    block = client.messages.create(**fields).content[0]
    assert block.type == "tool_use" and set(block.input) == {"a", "b"}


def test_a_loop_with_a_tool(scripted):
    options = {"base_url": scripted.url, "api_key": scripted.key}
    with anthropic.Anthropic(**options) as client:
        messages = [{"role": "user", "content": "2 + 3?"}]
        fields = {"model": "scripted", "max_tokens": 100, "tools": [ADD]}
        for stream in (False, True):
            asked = list(messages)
            answers = []
            while not answers or answers[-1].stop_reason == "tool_use":
                if stream:
                    with client.messages.stream(messages=asked, **fields) as events:
                        answers.append(events.get_final_message())
                else:
                    answers.append(client.messages.create(messages=asked, **fields))
                calls = [block for block in answers[-1].content if block.type == "tool_use"]
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": call.id,
                        "content": json.dumps(call.input["a"] + call.input["b"]),
                    }
                    for call in calls
                ]
                asked += [
                    {"role": "assistant", "content": answers[-1].content},
                    {"role": "user", "content": results},
                ]
            assert len(answers) == 2
            assert answers[-1].content[0].text == "The sum is 5."
            assert answers[-1].stop_reason == "end_turn"

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    with anthropic.Anthropic(**options) as client:
        runner = client.beta.messages.tool_runner(
            model="scripted", max_tokens=100, tools=[add], messages=messages
        )
        assert runner.until_done().content[0].text == "The sum is 5."
    assert "<result>\n5\n</result>" in scripted.client.prompts[-1]


def test_structured_output(client):
    import pydantic

    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        is_capital: bool

    fields = {"messages": ASK, **GREEDY, "max_tokens": 64}
    found = client.messages.parse(output_format=City, **fields)
    assert isinstance(found.parsed_output, City)


def test_errors(client, server):
    long = [{"role": "user", "content": LONG}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as caught:
        client.messages.create(messages=long, **GREEDY)
    assert f"> {MAX_MODEL_LEN - 1} maximum" in caught.value.message
    assert caught.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=ASK, **GREEDY | {"model": "other"})
    with (
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(messages=ASK, **GREEDY)
    (model,) = client.models.list()
    assert (model.id, model.display_name) == ("smollm2", "smollm2")
    assert model.max_input_tokens == MAX_MODEL_LEN
