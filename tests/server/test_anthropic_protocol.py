"""/v1/messages without HTTP: what a request becomes, and the events of an answer."""

from __future__ import annotations

import functools

import msgspec
import pytest
from pydantic import TypeAdapter

from engine.errors import RequestError
from engine.server.protocol.anthropic import CountTokensRequest, MessagesRequest, to_chat
from engine.server.protocol.anthropic_events import MessageBuilder, MessageObject
from engine.server.tool_parsers import TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}


def chat(**fields):
    body = {"model": "m", "messages": [USER], "max_tokens": 8, **fields}
    return to_chat(msgspec.convert(body, MessagesRequest))


# ---- conversion


def test_text():
    assert chat(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"], temperature=0.5, top_k=4, top_p=0.9, stream=True,
        metadata={"user_id": "u"},
    ) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 8, "stop": ["END"], "temperature": 0.5, "top_k": 4, "top_p": 0.9,
        "stream": True,
    }  # fmt: skip


def test_blocks():
    call = {"type": "tool_use", "id": "c0", "name": "add", "input": {"a": "é"}}
    found = chat(
        messages=[
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "I add."},
                call,
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c0", "content": "3"},
                {"type": "tool_result", "tool_use_id": "c1",
                 "content": [{"type": "text", "text": "4"}], "is_error": True},
                {"type": "tool_result", "tool_use_id": "c2"},
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b"},
            ]},
        ],
    )["messages"]  # fmt: skip
    function = {"name": "add", "arguments": '{"a": "é"}'}
    assert found == [
        USER,
        {"role": "assistant", "content": "I add.", "reasoning_content": "Hm",
         "tool_calls": [{"id": "c0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "a\nb"},
    ]  # fmt: skip


def said(role, *contents):
    return [{"role": role, "content": content} for content in contents]


def test_consecutive_messages_of_one_role_are_joined():
    """Clients split a turn where they compact or inject; templates require that roles alternate."""
    call = {"type": "tool_use", "id": "c0", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c0", "content": "3"}
    text = {"type": "text", "text": "c"}
    found = chat(
        system="S",
        messages=[
            *said("system", "T"),
            *said("user", "a", [text], "", "d"),
            *said("assistant", "x", [call], [call | {"id": "c1"}], [text]),
            *said("user", [result], [result | {"tool_use_id": "c1"}, text], "e"),
        ],
    )["messages"]
    calls = found[2].pop("tool_calls")
    assert [each["id"] for each in calls] == ["c0", "c1"]
    assert found == [
        *said("system", "S\nT"),
        *said("user", "a\nc\nd"),
        *said("assistant", "x\nc"),
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        *said("user", "c\ne"),
    ]
    begun = chat(messages=[USER, *said("assistant", "The sum", "is")])
    assert begun["messages"] == [USER, *said("assistant", "The sum\nis")]
    assert begun["continue_final_message"] is True


def test_conversations_begun_at_anthropic():
    """What its models' answers and Claude Code's bodies hold beside the text has no effect."""
    thoughts = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    turns = [*said("assistant", [thoughts, {"type": "text", "text": "x", "citations": None}]), USER]
    found = chat(
        messages=turns,
        tools=[TOOL | {"type": None}],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert found == chat(messages=[*said("assistant", "x"), USER], tools=[TOOL])


def test_tools():
    function = {"name": "add", "parameters": {"type": "object"}, "description": "Adds."}
    assert chat(tools=[TOOL])["tools"] == [{"type": "function", "function": function}]
    for choice, expected in {
        "auto": "auto",
        "any": "required",
        "none": "none",
    }.items():
        assert chat(tools=[TOOL], tool_choice={"type": choice})["tool_choice"] == expected
    found = chat(
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    )
    assert found["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert found["parallel_tool_calls"] is False


def test_thinking_and_formats():
    assert chat(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert chat(thinking=enabled)["chat_template_kwargs"] == {"enable_thinking": True}
    assert chat(thinking={"type": "adaptive"}) == chat()
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    found = chat(output_config={"effort": "low", "format": schema})
    assert found["reasoning_effort"] == "low"
    assert found["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_counting_needs_no_limit():
    request = msgspec.convert({"model": "m", "messages": [USER]}, CountTokensRequest)
    assert to_chat(request) == {"model": "m", "messages": [USER]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages must have 1 to"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi "}]}, "must not end with"),
        ({"messages": [{"role": "user", "content": []}]}, "must not be empty"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            r"messages\[0\].role must be one of 'user', 'assistant'.*; got 'robot'",
        ),
        ({"messages": ["x"]}, r"messages\[0\] must be an object"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            r"messages\[0\].content\[0\].type must be one of text, tool_result; got 'image'; this "
            "engine serves the text of a model, without image input",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type must be .*cus"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            r"context_management.edits\[0\].type must be .*; got 'clear_tool_uses_20250919'",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice has a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type must"),
        ({"thinking": {"type": "maybe"}}, "thinking.type must"),
        ({"output_config": {"efort": "low"}}, "'efort'; did you mean 'effort'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must"),
    ],
)
def test_what_cannot_be_done_is_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        chat(**fields)


# ---- events

CALL = (
    ToolCallStart(0, "call_0", "add"),
    ToolCallDelta(0, '{"a":'),
    ToolCallDelta(0, " 1}"),
    ToolCallEnd(0),
)


@functools.cache
def adapter():
    from anthropic.types import RawMessageStreamEvent  # slow to import

    return TypeAdapter(RawMessageStreamEvent)


def run(build, *parts, finish="stop", stop=None):
    events = list(build.start(5, 2))
    for part in parts:
        events += build.reasoning(part) if isinstance(part, str) else build.add(part)
    return events + list(build.finish(finish, stop, 7))


def test_the_order_of_events():
    build = MessageBuilder("served")
    events = run(build, "Hm", TextDelta("I"), TextDelta(" add"), *CALL, finish="tool_calls")
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == [
        "message_start", "ping", *block, *block[:2], *block[1:], *block[:2], *block[1:],
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["index"] for event in events if "index" in event] == [0] * 3 + [1] * 4 + [2] * 4
    for event in events:
        if event["type"] != "ping":
            adapter().validate_python(event, strict=True)


def test_the_message():
    build = MessageBuilder("served")
    run(build, "Hm", TextDelta("I"), TextDelta(" add"), *CALL, finish="tool_calls")
    msgspec.convert(build.message, MessageObject)
    from anthropic.types import Message  # slow to import

    message = Message.model_validate(build.message, strict=True)
    thinking, text, call = message.content
    assert (thinking.thinking, text.text, call.input) == ("Hm", "I add", {"a": 1})
    assert (call.id, call.name, message.stop_reason) == ("call_0", "add", "tool_use")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 7)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_stop_reasons(finish, stop, reason):
    build = MessageBuilder("served")
    *_, delta, _ = run(build, TextDelta("I"), finish=finish, stop=stop)
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    assert build.message["stop_reason"] == reason


def test_a_call_that_was_demanded_is_a_use_of_a_tool():
    build = MessageBuilder("served")
    run(build, *CALL, finish="stop")
    assert build.message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("", {}),
        ('{"a', {}),
        ('{"a": 1', {"a": 1}),
        ('{"a": 1, "b": "x, y', {"a": 1}),
        ('{"a": 1, "b": "x"', {"a": 1, "b": "x"}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ('{"a": "\\"}", "b": -', {"a": '"}'}),
    ],
)
def test_a_call_that_was_cut_has_the_values_that_are_complete(arguments, found):
    build = MessageBuilder("served")
    run(build, CALL[0], ToolCallDelta(0, arguments), ToolCallEnd(0, is_complete=False))
    assert build.message["content"][0]["input"] == found
    assert build.message["stop_reason"] == "end_turn"


def test_arguments_that_are_nested_too_deeply_are_an_object():
    build, text = MessageBuilder("served"), '{"a": ' + "[" * 100_000
    run(build, CALL[0], ToolCallDelta(0, text), ToolCallEnd(0))
    assert list(build.message["content"][0]["input"]) in ([], ["a"])


def test_input_that_is_nested_too_deeply():
    value = {}
    for _ in range(5000):
        value = {"a": value}
    call = {"type": "tool_use", "id": "c0", "name": "add", "input": value}
    with pytest.raises(RequestError, match="the input of 'c0' is nested too deeply"):
        chat(messages=[USER, {"role": "assistant", "content": [call]}, USER])
