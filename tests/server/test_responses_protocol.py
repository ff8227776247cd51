"""/v1/responses without HTTP: what a request becomes, and the events of an answer."""

from __future__ import annotations

import functools

import msgspec
import pytest
from pydantic import TypeAdapter

from engine.errors import RequestError
from engine.server.protocol.responses import ResponsesRequest, to_chat
from engine.server.protocol.responses_events import ResponseBuilder, ResponseObject
from engine.server.tool_parsers import TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
USAGE = {"input_tokens": 5, "cached_tokens": 2, "output_tokens": 7, "reasoning_tokens": 3}


def chat(**fields):
    body = {"model": "m", "input": "Hi", **fields}
    return to_chat(msgspec.json.decode(msgspec.json.encode(body), type=ResponsesRequest))


def messages(*items, **fields):
    return chat(input=list(items), **fields)["messages"]


# ---- conversion


def test_text():
    assert chat(
        instructions="Be brief.", max_output_tokens=8, temperature=0.5, top_p=0.9, stream=True
    ) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "max_completion_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
    }


def test_messages():
    assert messages(
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                     {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": None}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        instructions="Be brief.",
    ) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "no"},
    ]  # fmt: skip


def test_a_turn_of_the_assistant_is_one_message():
    def call(i):
        return {"type": "function_call", "call_id": f"c{i}", "name": "add", "arguments": "{}"}

    found = messages(
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": "I add."},
        call(0),
        call(1),
        {"type": "function_call_output", "call_id": "c0", "output": "3"},
        {"type": "function_call_output", "call_id": "c1",
         "output": [{"type": "input_text", "text": "4"}]},
        call(2),
    )  # fmt: skip
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        for i in range(3)
    ]
    assert found == [
        {"role": "assistant", "reasoning_content": "Hm", "content": "I add.",
         "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "tool_calls": calls[2:]},
    ]  # fmt: skip


def test_items_of_reasoning_in_a_row_are_one_message():
    def thought(text):
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    user = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Yes."}
    found = messages(user, thought("A"), thought(""), thought("B"), answer, thought("C"))
    assert found == [
        user,
        {"role": "assistant", "reasoning_content": "A\nB", "content": "Yes."},
        {"role": "assistant", "reasoning_content": "C", "content": ""},
    ]


def test_text_behind_a_call_is_in_its_message():
    """Templates refuse results of calls behind another message of the assistant."""
    call = {"type": "function_call", "call_id": "c0", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c0", "output": "3"}
    before = {"role": "assistant", "content": "I add."}
    behind = {"role": "assistant", "content": "Wait."}
    for own, content in (([call, behind], "Wait."), ([before, call, behind], "I add.\nWait.")):
        answer, found = messages(*own, result)
        assert answer["content"] == content
        assert [one["id"] for one in answer["tool_calls"]] == ["c0"]
        assert found == {"role": "tool", "tool_call_id": "c0", "content": "3"}


def test_tools_and_formats():
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    found = chat(tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert chat(tools=[TOOL], tool_choice="required")["tool_choice"] == "required"
    allowed = {"tools": [{"type": "function", "name": "add"}], "mode": "required"}
    found = chat(tools=[TOOL], tool_choice={"type": "allowed_tools"} | allowed)
    allowed["tools"] = [{"type": "function", "function": {"name": "add"}}]
    assert found["tool_choice"] == {"type": "allowed_tools", "allowed_tools": allowed}
    schema = {"type": "json_schema", "name": "out", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": schema})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "out", "schema": {"type": "object"}, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {
        "type": "json_object"
    }
    assert "response_format" not in chat(text={"format": {"type": "text"}})
    assert chat(reasoning={"effort": "low"})["reasoning_effort"] == "low"


def test_what_asks_for_nothing_is_taken():
    assert chat(
        store=False, background=False, truncation="disabled", service_tier="auto", user="u",
        metadata={"a": "b"}, include=["reasoning.encrypted_content"], top_logprobs=0, tools=[],
        tool_choice="auto", previous_response_id=None, text={"verbosity": "medium"},
    ) == chat()  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": True}, "store must be null or False: no responses are stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id must be null.*earlier items"),
        ({"conversation": "c"}, "conversation must be null"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt must"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type must be one of text, json_obj"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "missing required .*schema"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be function; got 'we"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] \(function\) must be valid: .*name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice must be"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "x"}]}},
            r"tool_choice.tools\[0\].type must be function",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
            "tool_choice.*mode",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type must"),
        ({"input": []}, "input must not be empty"),
        ({"input": [1]}, r"input\[0\] must be an object"),
        ({"input": [{"role": "robot", "content": ""}]}, r"input\[0\].role"),
        ({"input": [{"role": "user", "content": "", "nam": "x"}]}, "unknown field 'nam'"),
        ({"input": [{"role": "user", "content": "", "contnt": "x"}]}, "mean 'content'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            r"input\[0\].content\[0\].type must be input_text; got 'input_image'; this "
            "engine serves the text of a model, without image input",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        chat(**fields)


# ---- events


@functools.cache
def adapter():
    from openai.types.responses import ResponseStreamEvent  # slow to import

    return TypeAdapter(ResponseStreamEvent)


def builder():
    request = msgspec.convert({"model": "m", "input": "Hi", "tools": [TOOL]}, ResponsesRequest)
    return ResponseBuilder(request, "served")


def run(build, *parts, finish="stop"):
    events = list(build.start())
    for part in parts:
        events += build.reasoning(part) if isinstance(part, str) else build.add(part)
    return events + list(build.finish(finish, USAGE))


CALL = (
    ToolCallStart(0, "call_0", "add"),
    ToolCallDelta(0, '{"a":'),
    ToolCallDelta(0, " 1}"),
    ToolCallEnd(0),
)


def test_the_order_of_events():
    events = run(builder(), "Hm", TextDelta("I"), TextDelta(" add"), *CALL)
    names = [event["type"].removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added"]
    assert names == [
        "created", "in_progress",
        *text, "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        *text, "output_text.delta", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        adapter().validate_python(event, strict=True)


def test_the_client_builds_the_same_response_from_the_events():
    # Slow to import.
    from openai import omit
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import Response

    build = builder()
    state = ResponseStreamState(text_format=omit, input_tools=[])
    for event in run(build, "Hm", TextDelta("I add"), *CALL, TextDelta("Done")):
        # As on the wire: each event is a copy.
        copied = msgspec.json.decode(msgspec.json.encode(event))
        state.handle_event(adapter().validate_python(copied))
    response = Response.model_validate(build.response, strict=True)
    assert response.output_text == "I addDone"
    assert [item.type for item in response.output] == [
        "reasoning", "message", "function_call", "message",
    ]  # fmt: skip
    assert response.output[2].arguments == '{"a": 1}' and response.output[2].call_id == "call_0"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 7, 12)
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens_details.reasoning_tokens == 3
    assert (response.status, build.response["store"]) == ("completed", False)


def test_an_answer_that_is_too_long_is_incomplete():
    build = builder()
    *_, last = run(build, TextDelta("I ad"), finish="length")
    assert last["type"] == "response.incomplete"
    assert build.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert build.response["output"][0]["status"] == "incomplete"


def test_a_damaged_call_is_incomplete():
    build = builder()
    run(build, CALL[0], CALL[1], ToolCallEnd(0, is_complete=False), TextDelta("oops"))
    assert [item["status"] for item in build.response["output"]] == ["incomplete", "completed"]


def test_an_empty_answer_is_an_empty_message():
    build = builder()
    events = run(build)
    for event in events:
        adapter().validate_python(event, strict=True)
    assert events[-1]["type"] == "response.completed"
    [item] = build.response["output"]
    assert (item["type"], item["status"]) == ("message", "completed")
    assert [part["text"] for part in item["content"]] == [""]


def test_a_failure():
    build = builder()
    list(build.start())
    list(build.add(TextDelta("I")))
    *_, last = build.fail("the engine stopped")
    adapter().validate_python(last, strict=True)
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine stopped"}


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_published_schema_is_that_of_the_response(finish):
    build = builder()
    msgspec.convert(build.response, ResponseObject)
    run(build, "Hm", TextDelta("I add"), *CALL, finish=finish)
    msgspec.convert(build.response, ResponseObject)


def test_the_model_may_be_left_out():
    found = msgspec.json.decode(b'{"input": "Hi"}', type=ResponsesRequest)
    assert "model" not in to_chat(found)
