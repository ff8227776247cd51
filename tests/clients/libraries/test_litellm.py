"""A session of LiteLLM, by OpenAI's and by Anthropic's protocol."""

from __future__ import annotations

import json

import pytest

from tests.clients.libraries.conftest import LONG

litellm = pytest.importorskip("litellm")

ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def ask(request, server):
    def options(where, name):
        url = where.url if request.param == "anthropic" else where.api
        return {"model": f"{request.param}/{name}", "api_base": url, "api_key": where.key}

    options.provider = request.param
    return options


def test_a_conversation(ask, server, run):
    greedy = {**ask(server, "smollm2"), "messages": ASK, "temperature": 0.0, "max_tokens": 12}
    found = litellm.completion(**greedy)
    text = found.choices[0].message.content
    assert "Paris" in text
    assert found.usage.completion_tokens == 8
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**greedy, stream=True, **usage))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    )
    assert chunks[-1].usage.completion_tokens == 8
    again = run(litellm.acompletion(**greedy))
    assert again.choices[0].message.content == text


def test_a_loop_with_a_tool(ask, scripted):
    messages = [{"role": "user", "content": "2 + 3?"}]
    fields = {**ask(scripted, "scripted"), "tools": [TOOL], "max_tokens": 100}
    for stream in (False, True):
        asked = list(messages)
        found = litellm.completion(messages=asked, stream=stream, **fields)
        if stream:
            found = litellm.stream_chunk_builder(list(found), messages=asked)
        message = found.choices[0].message
        assert found.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        asked += [message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        last = litellm.completion(messages=asked, **fields).choices[0]
        assert (last.message.content, last.finish_reason) == ("The sum is 5.", "stop")


def test_structured_output(ask, server):
    import pydantic

    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        is_capital: bool

    fields = {**ask(server, "smollm2"), "messages": ASK, "temperature": 0.0, "max_tokens": 64}
    found = litellm.completion(**fields, response_format=City)
    City.model_validate_json(found.choices[0].message.content)


def test_errors(ask, server, run):
    fields = {**ask(server, "smollm2"), "max_tokens": 4, "num_retries": 0}
    long = [{"role": "user", "content": LONG}]
    for stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**fields, messages=long, stream=stream)
    with pytest.raises(litellm.ContextWindowExceededError):
        run(litellm.acompletion(**fields, messages=long))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**fields | ask(server, "other"), messages=ASK)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**fields | {"api_key": "x"}, messages=ASK)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**fields, messages=ASK, top_p=7.0)


def test_a_fallback_of_the_router(server, ask):
    """A prompt that is too long goes to the model for longer ones."""
    fields = ask(server, "smollm2")
    models = [
        {"model_name": "short", "litellm_params": fields},
        {"model_name": "long", "litellm_params": fields | {"mock_response": "It fits."}},
    ]
    router = litellm.Router(models, context_window_fallbacks=[{"short": ["long"]}])
    long = [{"role": "user", "content": LONG}]
    found = router.completion("short", messages=long, max_tokens=4)
    assert found.choices[0].message.content == "It fits."


def test_completions_and_embeddings(server):
    fields = {"model": "openai/smollm2", "api_base": server.api, "api_key": server.key}
    found = litellm.text_completion(
        **fields, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in found.choices[0].text
    found = litellm.embedding(**fields, input=["one", "two"])
    assert [len(item["embedding"]) for item in found.data] == [576, 576]
    assert found.usage.prompt_tokens > 0
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.embedding(**fields, input=[LONG])
