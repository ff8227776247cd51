"""A session of Pydantic AI: OpenAI's chat completions and responses, Anthropic's messages."""

from __future__ import annotations

import pytest

from tests.clients.libraries.conftest import LONG

pydantic_ai = pytest.importorskip("pydantic_ai")

import anthropic  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput  # noqa: E402
from pydantic_ai.exceptions import ModelHTTPError  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

ASK = "What is the capital of France?"
GREEDY = {"temperature": 0.0, "max_tokens": 64}


class Person(BaseModel, extra="forbid"):  # a small model adds fields where it may
    """A person."""

    name: str = Field(max_length=20)
    age: int


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request):
    def make(where, name):
        if request.param == "anthropic":
            client = anthropic.AsyncAnthropic(base_url=where.url, api_key=where.key)
            return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
        provider = OpenAIProvider(base_url=where.api, api_key=where.key)
        kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
        return kind(name, provider=provider)

    make.protocol = request.param
    return make


def test_a_conversation(model, server, run):
    agent = Agent(model(server, "smollm2"), model_settings=GREEDY)
    found = agent.run_sync(ASK)
    assert "Paris" in found.output
    assert found.usage.output_tokens == 8

    async def stream():
        async with agent.run_stream(ASK) as result:
            return [part async for part in result.stream_text(delta=True, debounce_by=None)]

    parts = run(stream())
    assert "".join(parts) == found.output and len(parts) > 4
    again = agent.run_sync("And of Italy?", message_history=found.all_messages())
    assert again.output


def test_a_loop_with_a_tool(model, scripted, run):
    agent = Agent(model(scripted, "scripted"), model_settings=GREEDY)
    asked = []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        asked.append((a, b))
        return a + b

    assert agent.run_sync("2 + 3?").output == "The sum is 5."

    async def stream():
        async with agent.run_stream("2 + 3?") as result:
            return await result.get_output()

    assert run(stream()) == "The sum is 5."
    assert asked == [(2, 3), (2, 3)]


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput])
def test_structured_output(model, scripted, server, kind):
    """Tools and native schemas constrain the real model; a mere prompt needs a capable one."""
    if kind is NativeOutput and model.protocol == "anthropic":
        pytest.skip("the library allows it for models whose names it knows")
    where, name = (scripted, "scripted") if kind is PromptedOutput else (server, "smollm2")
    agent = Agent(model(where, name), model_settings=GREEDY, output_type=kind(Person))
    assert isinstance(agent.run_sync("Who was the first programmer?").output, Person)


def test_errors(model, server):
    agent = Agent(model(server, "smollm2"), model_settings=GREEDY)
    with pytest.raises(ModelHTTPError) as caught:
        agent.run_sync(LONG)
    assert caught.value.status_code == 400
    words = "prompt is too long" if model.protocol == "anthropic" else "context_length_exceeded"
    assert words in str(caught.value.body)
    with pytest.raises(ModelHTTPError) as caught:
        Agent(model(server, "other"), model_settings=GREEDY).run_sync(ASK)
    assert caught.value.status_code == 404
