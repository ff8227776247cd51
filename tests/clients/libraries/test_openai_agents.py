"""A session of OpenAI's Agents SDK, by responses and by chat completions."""

from __future__ import annotations

import pytest

from tests.clients.libraries.conftest import LONG

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")

from pydantic import BaseModel, Field  # noqa: E402


class City(BaseModel, extra="forbid"):  # a small model adds fields where it may
    name: str = Field(max_length=20)
    is_capital: bool


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(params=["responses", "chat"])
def make(request):
    agents.set_tracing_disabled(True)

    def make(where, name, **options):
        client = openai.AsyncOpenAI(base_url=where.api, api_key=where.key, max_retries=0)
        kinds = {
            "responses": agents.OpenAIResponsesModel,
            "chat": agents.OpenAIChatCompletionsModel,
        }
        settings = agents.ModelSettings(temperature=0.0, max_tokens=64, include_usage=True)
        return agents.Agent(
            name="Assistant",
            model=kinds[request.param](name, client),
            model_settings=options.pop("settings", settings),
            **options,
        )

    return make


@pytest.fixture
def ask(run):
    return lambda agent, text: run(agents.Runner.run(agent, text))


def test_a_conversation(make, server, ask, run):
    agent = make(server, "smollm2")
    found = ask(agent, "What is the capital of France?")
    assert "Paris" in found.final_output
    assert found.context_wrapper.usage.output_tokens == 8

    async def stream():
        result = agents.Runner.run_streamed(agent, "What is the capital of France?")
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return deltas, result.final_output

    deltas, final = run(stream())
    assert "".join(deltas) == final == found.final_output and len(deltas) > 4
    again = [*found.to_input_list(), {"role": "user", "content": "And of Italy?"}]
    assert ask(agent, again).final_output


def test_a_loop_with_a_tool(make, scripted, ask, run):
    agent = make(scripted, "scripted", instructions="Use your tools.", tools=[add])
    found = ask(agent, "2 + 3?")
    assert found.final_output == "The sum is 5."
    outputs = [item.output for item in found.new_items if item.type == "tool_call_output_item"]
    assert outputs == [5] or outputs == ["5"]

    async def stream():
        result = agents.Runner.run_streamed(agent, "2 + 3?")
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert run(stream()) == "The sum is 5."


def test_a_required_tool_of_the_real_model(make, server, ask):
    settings = agents.ModelSettings(temperature=0.0, max_tokens=64, tool_choice="required")
    agent = make(
        server, "smollm2", tools=[add], settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    assert isinstance(int(ask(agent, "2 + 3?").final_output), int)


def test_structured_output(make, server, ask):
    agent = make(server, "smollm2", output_type=City)
    assert isinstance(ask(agent, "What is the capital of France?").final_output, City)


def test_a_handoff(make, scripted, ask, monkeypatch):
    """Another agent is a tool too, by its name; then that agent is asked."""

    def script(prompt, params):
        is_first = "You decide." in prompt
        call = '{"name": "transfer_to_assistant", "arguments": {}}'
        return f"<tool_call>\n{call}\n</tool_call>" if is_first else "The sum is 5."

    monkeypatch.setattr(scripted.client, "script", script)
    other = make(scripted, "scripted", handoff_description="Adds.", instructions="You add.")
    agent = make(scripted, "scripted", handoffs=[other], instructions="You decide.")
    found = ask(agent, "2 + 3?")
    assert found.final_output == "The sum is 5."
    assert found.last_agent is other
    assert "You add." in scripted.client.prompts[-1]


def test_errors(make, server, ask):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(make(server, "smollm2"), LONG)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ask(make(server, "other"), "Hi")
