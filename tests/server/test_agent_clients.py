"""/v1/responses and /v1/messages over HTTP, with the clients `openai` and `anthropic`."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pydantic
import pytest

from engine.errors import EngineError
from engine.scheduler.admission import QueueFullError
from engine.server.server_config import ServerConfig
from tests.golden.text_templates import TOOLS
from tests.lazily import lazily
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import serve

anthropic = lazily("anthropic")
openai = lazily("openai")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
ARGUMENTS = {"a": 1, "b": [2, "}"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI_TOOL = {"type": "function", "name": "add", "parameters": SCHEMA}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
ANSWERS = {
    "plain": "Hello there!",
    "think": "<think>\nHm, so.\n</think>\n\nYes.",
    "call": f"<think>\nI add.\n</think>\n\nI add them.\n{CALL}\n{CALL}",
    "damaged": '<tool_call>{"name": "add", "arguments": {"a": 1, oops}}</tool_call>',
    "json": '{"a": 1}',
    "one": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "think-call": (
        "<think>\nI add.\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ),
    "list": "\n".join(
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": {i}}}}}\n</tool_call>' for i in (1, 2)
    ),
    "empty": "",
    "fail": ("Hello there", EngineError("the engine has stopped")),
    "full": ("H", QueueFullError("the queue is full")),
}


def script(prompt, params):
    """Answer by the last word of the user's last message."""
    user = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return ANSWERS.get(user.split()[-1] if user.split() else "", "Done.")


@pytest.fixture(scope="module")
def client():
    return ScriptedClient(TOOLS, script)


@pytest.fixture(scope="module")
def url(client):
    with serve(lambda: client, ServerConfig(access_log=False)) as found:
        yield found.url


@pytest.fixture(scope="module")
def responses(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found.responses


@pytest.fixture(scope="module")
def messages(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as found:
        yield found.messages


TOOL_USE = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
THINKING = {"type": "thinking", "thinking": "Hm", "signature": ""}
JSON_FORMAT = {"type": "json_schema", "schema": SCHEMA}


def user(text):
    return [{"role": "user", "content": text}]


def said(content):
    return {"role": "assistant", "content": content}


# ---- /v1/chat/completions


def test_hints_for_caches_and_empty_results(url, client):
    """Agents mark prefixes for caches as for Anthropic's models; a tool may return nothing."""
    mark = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}

    def prompt(result, **more):
        said = [
            {"role": "user", "content": [{"type": "text", "text": "plain", **more}], **more},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", **result},
        ]
        body = {"model": "scripted", "messages": said, "tools": [tool | more]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return client.prompts[-1]

    expected = prompt({"content": ""})
    assert "<result>\n\n</result>" in expected
    assert prompt({"content": ""}, **mark) == expected
    assert prompt({"content": None}) == prompt({}) == expected


# ---- /v1/responses


def test_response(responses, client):
    found = responses.create(
        model="scripted", input="plain", instructions="Be brief.", temperature=0.5, top_p=0.9,
        max_output_tokens=100, metadata={"a": "b"},
    )  # fmt: skip
    assert found.output_text == "Hello there!"
    assert (found.status, found.model, found.metadata) == ("completed", "scripted", {"a": "b"})
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.usage.input_tokens_details.cached_tokens == 2
    assert "Be brief." in client.prompts[-1]
    params = client.params[-1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 100)


def test_reasoning_and_calls(responses):
    found = responses.create(model="scripted", input="call", tools=[OPENAI_TOOL])
    reasoning, message, *calls = found.output
    assert reasoning.content[0].text == "I add."
    assert message.content[0].text == "I add them."
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS] * 2
    assert len({call.call_id for call in calls}) == 2
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens


def test_streams_give_what_the_whole_response_is(responses):
    for text in ("plain", "think", "call", "empty", "json"):
        whole = responses.create(model="scripted", input=text, tools=[OPENAI_TOOL])
        with responses.stream(model="scripted", input=text, tools=[OPENAI_TOOL]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert comparable(streamed.output) == comparable(whole.output)
        assert streamed.usage == whole.usage


def comparable(output):
    """Return items without their random ids."""
    items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return items


def test_arguments_are_streamed(responses):
    events = list(
        responses.create(model="scripted", input="call", tools=[OPENAI_TOOL], stream=True)
    )
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    first = [e.delta for e in deltas if e.output_index == deltas[0].output_index]
    assert len(first) > 5 and json.loads("".join(first)) == ARGUMENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_conversation_with_a_tool(responses, client):
    items = user("call")
    found = responses.create(model="scripted", input=items, tools=[OPENAI_TOOL])
    items += found.output
    for call in found.output[2:]:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    found = responses.create(model="scripted", input=items, tools=[OPENAI_TOOL])
    assert found.output_text == "Done."
    prompt = client.prompts[-1]
    assert prompt.count('{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}') == 2
    assert prompt.count("<result>\n3\n</result>") == 2
    assert "I add them." in prompt


def test_a_schema(responses, client):
    class Answer(pydantic.BaseModel):
        a: int

    found = responses.parse(model="scripted", input="json", text_format=Answer)
    assert found.output_parsed == Answer(a=1)
    assert client.params[-1].structured is not None


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_request_demands(responses, messages, stream):
    """Their grammar makes the answer nothing but calls."""
    named = {"type": "function", "name": "add"}
    for text, choice, expected in (("list", "required", [1, 2]), ("one", named, [1])):
        fields = {"model": "scripted", "tools": [OPENAI_TOOL], "tool_choice": choice}
        found = responses.create(**fields, input=text, stream=stream)
        output = list(found)[-1].response.output if stream else found.output
        assert [json.loads(call.arguments)["a"] for call in output] == expected
    named = {"type": "tool", "name": "add"}
    for text, choice, expected in (("list", {"type": "any"}, [1, 2]), ("one", named, [1])):
        fields = {"model": "scripted", "max_tokens": 200, "tools": [ANTHROPIC_TOOL]}
        fields |= {"messages": user(text), "tool_choice": choice}
        if stream:
            with messages.stream(**fields) as events:
                found = events.get_final_message()
        else:
            found = messages.create(**fields)
        assert [block.input["a"] for block in found.content] == expected
        assert found.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_come_behind_reasoning(client, responses, messages, stream):
    fields = {"model": "scripted", "tools": [OPENAI_TOOL], "tool_choice": "required"}
    found = responses.create(**fields, input="think-call", stream=stream)
    output = list(found)[-1].response.output if stream else found.output
    assert [item.type for item in output] == ["reasoning", "function_call"]
    assert client.params[-1].structured.structural_tag is not None
    fields = {"model": "scripted", "max_tokens": 200, "tools": [ANTHROPIC_TOOL]}
    fields |= {"messages": user("think-call"), "tool_choice": {"type": "any"}}
    if stream:
        with messages.stream(**fields) as events:
            found = events.get_final_message()
    else:
        found = messages.create(**fields)
    assert [block.type for block in found.content] == ["thinking", "tool_use"]
    assert found.content[0].thinking == "I add."


def test_damaged_calls(responses):
    whole = responses.create(model="scripted", input="damaged", tools=[OPENAI_TOOL])
    assert whole.output_text == ANSWERS["damaged"]
    events = list(
        responses.create(model="scripted", input="damaged", tools=[OPENAI_TOOL], stream=True)
    )
    call, rest = events[-1].response.output
    assert (call.status, call.arguments) == ("incomplete", '{"a": 1, ')
    assert rest.content[0].text == "oops}}</tool_call>"


def test_a_response_that_is_too_long(responses):
    found = responses.create(model="scripted", input="plain", max_output_tokens=2)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(
        responses.create(model="scripted", input="plain", max_output_tokens=2, stream=True)
    )
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"background": True, "store": False}, "store must be"),
        ({"previous_response_id": "resp_1"}, "previous_response_id must be of a stored response"),
        ({"max_output_tokens": 0}, "max_output_tokens must"),
        ({"temperature": -1}, "temperature must"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"tools": [{"type": "web_search"}]}, "must be function"),
        ({"input": []}, "input must not be empty"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{]"}]},
         "must be a JSON object"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests(responses, fields, words, stream):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        responses.create(**{"model": "scripted", "input": "plain", **fields, "stream": stream})
    assert caught.value.type == "invalid_request_error"


def test_what_does_not_exist(responses):
    with pytest.raises(openai.NotFoundError, match="'resp_1' does not exist"):
        responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        responses.create(model="other", input="Hi")


def test_failures(responses):
    with pytest.raises(openai.InternalServerError, match="the engine has stopped"):
        responses.create(model="scripted", input="fail")
    events = list(responses.create(model="scripted", input="fail", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the engine has stopped"
    assert events[-1].response.output[0].status == "incomplete"
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            responses.create(model="scripted", input="full", stream=stream)


def test_async_openai(url):
    async def run():
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client, client.responses.stream(model="scripted", input="plain") as stream:
            return (await stream.get_final_response()).output_text

    assert asyncio.run(run()) == "Hello there!"


# ---- /v1/messages


def test_message(messages, client):
    found = messages.create(
        model="scripted", max_tokens=100, messages=user("plain"), system="Be brief.",
        stop_sequences=["XYZ"], extra_body={"temperature": 0.5, "top_k": 4, "top_p": 0.9},
    )  # fmt: skip
    assert [block.text for block in found.content] == ["Hello there!"]
    assert (found.stop_reason, found.model, found.role) == ("end_turn", "scripted", "assistant")
    assert found.usage.cache_read_input_tokens == 2
    assert "Be brief." in client.prompts[-1]
    params = client.params[-1]
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 4, 0.9)
    assert (params.max_tokens, tuple(params.stop)) == (100, ("XYZ",))
    assert found._request_id


def test_thinking_and_tool_use(messages):
    found = messages.create(
        model="scripted", max_tokens=500, messages=user("call"), tools=[ANTHROPIC_TOOL]
    )
    thinking, text, *calls = found.content
    assert (thinking.thinking, text.text) == ("I add.", "I add them.")
    assert [call.input for call in calls] == [ARGUMENTS] * 2
    assert found.stop_reason == "tool_use"


def test_streams_give_what_the_whole_message_is(messages):
    for text in ("plain", "think", "call", "empty", "json"):
        fields = {"model": "scripted", "max_tokens": 500, "messages": user(text)}
        whole = messages.create(**fields, tools=[ANTHROPIC_TOOL])
        with messages.stream(**fields, tools=[ANTHROPIC_TOOL]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]
        assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


def test_input_is_streamed(messages):
    events = list(
        messages.create(
            model="scripted", max_tokens=500, messages=user("call"), tools=[ANTHROPIC_TOOL],
            stream=True,
        )
    )  # fmt: skip
    deltas = [event for event in events if event.type == "content_block_delta"]
    pieces = [e.delta.partial_json for e in deltas if e.index == 2]
    assert len(pieces) > 5 and json.loads("".join(pieces)) == ARGUMENTS


def test_a_conversation_with_tool_results(messages, client):
    fields = {"model": "scripted", "max_tokens": 500, "tools": [ANTHROPIC_TOOL]}
    history = user("call")
    found = messages.create(**fields, messages=history)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        for block in found.content
        if block.type == "tool_use"
    ]
    history += [
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": results},
    ]
    found = messages.create(**fields, messages=history)
    assert found.content[0].text == "Done."
    prompt = client.prompts[-1]
    assert prompt.count("<result>\n3\n</result>") == 2
    assert prompt.count('"arguments": {"a": 1, "b": [2, "}"]}') == 2


def test_stop_reasons(messages):
    fields = {"model": "scripted", "messages": user("plain")}
    found = messages.create(**fields, max_tokens=100, stop_sequences=["there"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "there")
    assert messages.create(**fields, max_tokens=2).stop_reason == "max_tokens"


def test_thinking_is_a_switch_of_the_template(messages, client):
    fields = {"model": "scripted", "max_tokens": 100, "messages": user("plain")}
    messages.create(**fields, thinking={"type": "disabled"})
    assert client.prompts[-1].endswith("<think>\n\n</think>\n\n")
    messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 1024})
    assert client.prompts[-1].endswith("assistant\n")


def test_models_in_anthropics_form(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as found:
        (model,) = found.models.list(limit=1)  # follows pages
        assert (model.id, model.display_name, model.type) == ("scripted", "scripted", "model")
        assert model.max_input_tokens == 4096
        assert abs(model.created_at.timestamp() - time.time()) < 3600
        assert found.models.retrieve("scripted") == model
    card = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert (card["object"], card["max_model_len"]) == ("model", 4096)


def test_count_tokens(messages, client):
    fields = {"model": "scripted", "messages": user("plain"), "tools": [ANTHROPIC_TOOL]}
    counted = messages.count_tokens(**fields).input_tokens
    usage = messages.create(**fields, max_tokens=100).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert counted == len(client.tokenizer.encode(client.prompts[-1], False))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must"),
        ({"extra_body": {"max_tokns": 1}}, "did you mean 'max_tokens'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "must be custom"),
        ({"messages": [*user("Hi"), said("I ")]}, "must not end with trailing whitespace"),
        ({"messages": [*user("Hi"), said([TOOL_USE])]}, "followed by a tool_result"),
        ({"messages": [*user("Hi"), said([THINKING])]}, "messages\\[1\\] must be text"),
        (
            {"messages": [*user("Hi"), said("I")], "thinking": {"type": "enabled"}},
            "thinking must be disabled",
        ),
        (
            {"messages": [*user("Hi"), said("I")], "output_config": {"format": JSON_FORMAT}},
            "output_config.format must be left out",
        ),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\] must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_have_anthropics_shape(messages, fields, words, stream):
    start = {"model": "scripted", "max_tokens": 8, "messages": user("Hi")}
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        messages.create(**{**start, **fields, "stream": stream})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["request_id"]


def test_failures_of_messages(messages):
    fields = {"model": "scripted", "max_tokens": 100, "messages": user("fail")}
    with pytest.raises(anthropic.APIStatusError, match="the engine has stopped") as caught:
        messages.create(**fields)
    assert caught.value.body["error"]["type"] == "overloaded_error"
    texts = []
    with pytest.raises(anthropic.APIStatusError, match="the engine has stopped"):
        for event in messages.create(**fields, stream=True):
            if event.type == "content_block_delta":
                texts.append(event.delta.text)
    assert "".join(texts) == "Hello"
    with pytest.raises(anthropic.RateLimitError, match="the queue is full"):
        messages.create(**{**fields, "messages": user("full")}, stream=True)
    with pytest.raises(anthropic.NotFoundError):
        messages.create(**{**fields, "model": "other"})


# ---- both


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_goes_ends_its_request(url, client, path):
    body = {"model": "scripted", "stream": True, "max_tokens": 4000, "messages": user("long")}
    if path == "/v1/responses":
        body = {"model": "scripted", "stream": True, "input": "long"}
    ANSWERS["long"] = "word " * 2000
    before = client.num_aborted
    with httpx.stream("POST", url + path, json=body, timeout=60) as response:
        next(response.iter_bytes())
    deadline = time.monotonic() + 60
    while client.num_aborted == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.num_aborted == before + 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"model": 1}', b"[" * 10**5])
def test_malformed_bodies(url, path, data):
    headers = {"content-type": "application/json"}
    found = httpx.post(url + path, content=data, headers=headers)
    assert found.status_code == 400 and found.json()["error"]["message"]
