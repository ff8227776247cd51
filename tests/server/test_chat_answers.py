"""Answers with calls of tools and reasoning, by OpenAI's client over a scripted engine."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest

from engine.server.answer_grammar import tool_use
from engine.server.protocol.chat import ChatCompletionRequest
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig
from engine.structured.references import OWN_DOCUMENT
from tests.lazily import lazily
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import CannedClient, serve

openai = lazily("openai")

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "1 + 2?"}]}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@contextlib.contextmanager
def _client(*pieces, config=None, **options):
    """Yield OpenAI's client of a server that answers with these pieces, and its engine."""
    with (
        serve(lambda: CannedClient(*pieces, **options), config) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield client, server.client


def _pieces(text, size=3):
    return [text[i : i + size] for i in range(0, len(text), size)]


def test_a_call_of_a_tool():
    with _client(*_pieces("I add. " + CALL)) as (client, _):
        [choice] = client.chat.completions.create(**ASK, tools=[ADD]).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I add."
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        assert call.id.startswith("call_")


def test_arguments_are_streamed_as_they_come():
    with _client(*_pieces("I add. " + CALL)) as (client, _):
        chunks = list(client.chat.completions.create(**ASK, tools=[ADD], stream=True))
        deltas = [c.choices[0].delta for c in chunks]
        assert deltas[0].role == "assistant"
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert (calls[0].id is not None, calls[0].function.name) == (True, "add")
        arguments = [call.function.arguments for call in calls[1:]]
        assert json.loads("".join(arguments)) == {"a": 1, "b": 2}
        assert len(arguments) > 3
        assert "".join(d.content or "" for d in deltas) == "I add."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(**ASK, tools=[ADD]) as stream:
            final = stream.get_final_completion()
        [call] = final.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}


def test_several_calls_and_only_one_if_asked():
    with _client(CALL + "\n" + CALL) as (client, _):
        message = client.chat.completions.create(**ASK, tools=[ADD]).choices[0].message
        assert len(message.tool_calls) == 2
        assert message.content is None
        options = {"tools": [ADD], "parallel_tool_calls": False}
        message = client.chat.completions.create(**ASK, **options).choices[0].message
        assert len(message.tool_calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_only_call_is_the_first_that_is_not_damaged(stream):
    damaged = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'
    options = {"tools": [ADD], "parallel_tool_calls": False}
    with _client(*_pieces(f"{damaged}{CALL}{damaged}{CALL}")) as (client, _):
        if stream:
            with client.chat.completions.stream(**ASK, **options) as events:
                [choice] = events.get_final_completion().choices
            begun, call = choice.message.tool_calls  # A stream cannot take back what it has sent.
            assert begun.function.arguments == '{"a": '
            assert choice.message.content == f"}}}}</tool_call>{damaged}"
        else:
            [choice] = client.chat.completions.create(**ASK, **options).choices
            [call] = choice.message.tool_calls
            assert choice.message.content == damaged + damaged
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        assert choice.finish_reason == "tool_calls"


def test_what_is_no_call_is_content():
    text = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    with _client(*_pieces(text)) as (client, _):
        [choice] = client.chat.completions.create(**ASK, tools=[ADD]).choices
        assert choice.message.tool_calls is None
        assert choice.message.content == text
        assert choice.finish_reason == "stop"


def test_without_tools_calls_are_content():
    with _client(CALL) as (client, _):
        for options in ({}, {"tools": [ADD], "tool_choice": "none"}):
            [choice] = client.chat.completions.create(**ASK, **options).choices
            assert choice.message.content == CALL


NAMED = {"type": "function", "function": {"name": "add"}}
WITHOUT_PARSER = ServerConfig(enable_auto_tool_choice=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "reason"), [(NAMED, "stop"), ("required", "tool_calls")])
def test_a_forced_call_is_in_the_format_of_the_model(stream, choice, reason):
    with _client(*_pieces(CALL)) as (client, engine):
        found = _call_of(client, stream, tools=[ADD], tool_choice=choice)
        assert found == (("add", '{"a": 1, "b": 2}'), reason)
        tag = json.loads(engine.requests[-1][1].structured.structural_tag)
        assert "<tool_call>" in json.dumps(tag["format"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_forced_by_its_schema(stream):
    """Where the model's format is not known."""
    arguments = '{"a": 1, "b": 2}'
    with _client(*_pieces(arguments), config=WITHOUT_PARSER) as (client, engine):
        call, reason = _call_of(client, stream, tools=[ADD], tool_choice=NAMED)
        assert call == ("add", arguments)
        assert reason == "stop"
        schema = _json_format(engine)["json_schema"]
        assert schema["type"] == "object"
        assert schema[OWN_DOCUMENT] == ADD["function"]["parameters"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_forced_by_a_schema_of_calls(stream):
    text = '[{"name": "add", "arguments": {"a": 1, "b": 2}}]'
    with _client(*_pieces(text), config=WITHOUT_PARSER) as (client, engine):
        call, reason = _call_of(client, stream, tools=[ADD], tool_choice="required")
        assert call == ("add", '{"a": 1, "b": 2}')
        assert reason == "tool_calls"
        schema = _json_format(engine)["json_schema"]
        assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "add"}


def _json_format(engine):
    """Return the format of JSON that ends a request's structural tag."""
    tag = json.loads(engine.requests[-1][1].structured.structural_tag)
    return tag["format"]["elements"][-1]


def _call_of(client, stream, **options):
    if stream:
        with client.chat.completions.stream(**ASK, **options) as found:
            [choice] = found.get_final_completion().choices
    else:
        [choice] = client.chat.completions.create(**ASK, **options).choices
    [call] = choice.message.tool_calls
    return (call.function.name, call.function.arguments), choice.finish_reason


def test_a_response_format_reaches_the_engine():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with _client('{"a": 1}') as (client, engine):
        given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        client.chat.completions.create(**ASK, response_format=given)
        assert _json_format(engine)["json_schema"] == schema
        client.chat.completions.create(**ASK, response_format={"type": "json_object"})
        assert _json_format(engine)["json_schema"] == {"type": "object"}
        client.completions.create(
            model="scripted", prompt="a", extra_body={"guided_choice": ["x", "y"]}
        )
        assert list(engine.requests[-1][1].structured.choice) == ["x", "y"]


def test_tools_without_auto_tool_choice_are_refused():
    with (
        _client("a", config=WITHOUT_PARSER) as (client, _),
        pytest.raises(openai.BadRequestError, match="started with --no-enable-auto-tool-choice"),
    ):
        client.chat.completions.create(**ASK, tools=[ADD])


def test_tools_without_a_known_format_are_refused():
    fields = {"messages": ASK["messages"], "tools": [ADD]}
    body = msgspec.convert(fields, ChatCompletionRequest)
    with pytest.raises(
        APIError, match=r"none is known .*; start the server with --tool-call-parser"
    ):
        tool_use(body, None, None, follows_text=False)


@pytest.mark.parametrize("pieces", [1, 5, 100])
def test_reasoning_is_split_off(pieces):
    text = "<think>\nOne and two.\n</think>\n\nThree."
    with _client(*_pieces(text, pieces)) as (client, _):
        message = client.chat.completions.create(**ASK).choices[0].message
        assert message.content == "Three."
        assert message.model_extra["reasoning_content"] == "One and two."
        reasoning, content = "", ""
        for chunk in client.chat.completions.create(**ASK, stream=True):
            delta = chunk.choices[0].delta
            reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            content += delta.content or ""
        assert (reasoning, content) == ("One and two.", "Three.")
        hidden = {"include_reasoning": False}
        message = client.chat.completions.create(**ASK, extra_body=hidden).choices[0].message
        assert (message.content, "reasoning_content" in message.model_extra) == ("Three.", False)


def test_conversations_with_calls_and_results_are_rendered():
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
    ]
    with _client("Three.") as (client, engine):
        client.chat.completions.create(model="scripted", messages=messages, tools=[ADD])
        assert engine.requests[-1][0]["prompt"] == "?\nNone\n3\nassistant: "


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}|{{ reasoning_effort }}"
    "|{% for d in documents or [] %}{{ d.text }}{% endfor %}|{{ enable_thinking }}"
    "{% if add_generation_prompt %}|answer:{% endif %}"
)


def test_variables_of_the_template():
    extra = {
        "documents": [{"text": "A page."}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    }
    engine = ScriptedClient(TEMPLATE, lambda prompt, params: "Three.")
    with (
        serve(lambda: engine) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        client.chat.completions.create(**ASK, reasoning_effort="low", extra_body=extra)
        assert engine.prompts[-1] == "1 + 2?|low|A page.|False"
        client.chat.completions.create(**ASK)
        assert engine.prompts[-1] == "1 + 2?||||answer:"
        with pytest.raises(openai.BadRequestError, match="did you mean 'enable_thinking'"):
            client.chat.completions.create(
                **ASK, extra_body={"chat_template_kwargs": {"enable_thinkng": True}}
            )
        deep = json.loads("[" * 100 + "]" * 100)
        name = "chat_template_kwargs.enable_thinking"
        with pytest.raises(openai.BadRequestError, match=rf"{name}\[0\].*nested deeper") as caught:
            client.chat.completions.create(
                **ASK, extra_body={"chat_template_kwargs": {"enable_thinking": deep}}
            )
        assert caught.value.param == name


def test_a_conversation_that_is_too_long_is_refused():
    with _client("a") as (client, _):
        messages = [{"role": "user", "content": "x" * 5000}]
        with pytest.raises(openai.BadRequestError, match="at least 5012 tokens"):
            client.chat.completions.create(model="scripted", messages=messages)
