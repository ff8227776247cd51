"""Answers that end within a call: over HTTP, streamed and whole, in all three protocols."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.lazily import lazily
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import CannedClient, serve
from tests.server.tool_answers import chat, events, say, tools

anthropic = lazily("anthropic")
openai = lazily("openai")

FIRST = '{"a": "[TOOL_CALLS]"}'
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
LIST = CALL.format("add", FIRST) + "\n" + CALL.format("sub", "{}")
BEGIN = LIST.index(FIRST)
SECOND = LIST.index("{}}")
CUTS = {
    0: [],
    3: [],  # within the marker
    12: [],  # before the first brace
    22: [],  # within the name
    BEGIN: [],
    BEGIN + 1: [("add", "{")],
    BEGIN + 12: [("add", FIRST[:12])],
    BEGIN + len(FIRST): [("add", FIRST)],
    BEGIN + len(FIRST) + 2: [("add", FIRST)],  # between two calls
    SECOND - 3: [("add", FIRST)],
    SECOND + 1: [("add", FIRST), ("sub", "{")],
    len(LIST): [("add", FIRST), ("sub", "{}")],
}


@pytest.fixture(scope="module")
def server():
    with serve(lambda: CannedClient("")) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_required_call_that_was_cut(server, http, stream, reason):
    for cut, calls in CUTS.items():
        say(server, LIST[:cut], reason)
        is_whole = any(arguments.endswith("}") for _, arguments in calls)
        ended = "tool_calls" if reason == "stop" and is_whole else reason
        for n in (1, 2):
            assert chat(http, stream, n=n, tool_choice="required") == [("", calls, ended)] * n, cut


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_that_was_cut(server, http, stream):
    choice = {"type": "function", "function": {"name": "add"}}
    for cut in range(len(FIRST) + 1):
        say(server, LIST[: BEGIN + cut])
        calls = [("add", FIRST[:cut])] if cut else []
        assert chat(http, stream, tool_choice=choice) == [("", calls, "length")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_its_own_accord_that_was_cut(server, http, stream):
    text = f'Hm.\n<tool_call>\n{{"name": "add", "arguments": {FIRST}}}\n</tool_call>\nSo.'
    begin = text.index(FIRST)
    after = text.index("So.")
    for cut in range(len(text) + 1):
        say(server, text[:cut])
        [(content, calls, reason)] = chat(http, stream)
        assert reason == "length"
        if cut <= begin:  # what is not a call yet is what the model has written
            assert (content, calls) == (text[:cut], [])
        else:
            assert content == ("Hm.\n\n" + text[after:cut] if cut > after else "Hm.")
            assert calls == [("add", FIRST[: cut - begin])]


def test_responses(server, http):
    body = {"model": "scripted", "input": "?", "tools": tools("responses")}
    body["tool_choice"] = "required"
    for cut, calls in CUTS.items():
        say(server, LIST[:cut])
        answer = http.post("/v1/responses", json=body).json()
        streamed = events(http.post("/v1/responses", json=body | {"stream": True}))[-1]
        for found in (answer, streamed["response"]):
            assert found["status"] == "incomplete"
            items = [item for item in found["output"] if item["type"] == "function_call"]
            assert [(item["name"], item["arguments"]) for item in items] == calls
            wanted = ["completed" if call[1].endswith("}") else "incomplete" for call in calls]
            assert [item["status"] for item in found["output"]] == (wanted or ["incomplete"])


def test_messages(server, http):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
    body |= {"tools": tools("messages"), "tool_choice": {"type": "any"}}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        for cut, calls in CUTS.items():
            say(server, LIST[:cut])
            answer = http.post("/v1/messages", json=body).json()
            with client.messages.stream(**body) as stream:
                streamed = stream.get_final_message().model_dump()
            for found in (answer, streamed):
                assert found["stop_reason"] == "max_tokens"
                assert [block["type"] for block in found["content"]] == ["tool_use"] * len(calls)
                inputs = [json.loads(FIRST) if c[1] == FIRST else {} for c in calls]
                names = [block["name"] for block in found["content"]]
                assert names == [name for name, _ in calls]
                assert [block["input"] for block in found["content"]] == inputs
        say(server, LIST[: BEGIN + 1], "stop")
        assert http.post("/v1/messages", json=body).json()["stop_reason"] == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 7, 500])
def test_white_space_around_a_call(server, http, stream, size):
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for text, content in (
        (f"Let me look. {call}\n\nThen.", "Let me look. \n\nThen."),
        (f"Let me look.\n{call}\n", "Let me look."),
        (f"\n\n{call}\n{call}\n", ""),
        (f"\n{call}\nThen.\n", "Then.\n"),
    ):
        say(server, text, "stop", size)
        [(found, calls, _)] = chat(http, stream)
        assert (found, len(calls)) == (content, text.count(call))


def test_blocks_are_in_the_order_of_the_text(server, http):
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    say(server, f"One {call} two {call}", "stop")
    body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
    answer = http.post("/v1/messages", json=body | {"tools": tools("messages")}).json()
    kinds = [(block["type"], block.get("text")) for block in answer["content"]]
    assert kinds == [("text", "One"), ("tool_use", None), ("text", "  two"), ("tool_use", None)]
    body = {"model": "scripted", "input": "?", "tools": tools("responses")}
    answer = http.post("/v1/responses", json=body).json()
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["message", "function_call", "message", "function_call"]


MISTRAL = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids of calls must have length 9') }}{% endif %}"
    "[TOOL_CALLS]{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ m.content }}{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_call_may_be_sent_back(choice):
    """With an id of the length that the template requires; also a call that was cut."""
    named = {"type": "function", "function": {"name": "add"}}
    fields = {"tools": tools("chat"), "tool_choice": named if choice == "named" else choice}
    texts = []
    client = ScriptedClient(MISTRAL, lambda prompt, params: texts[-1])
    with serve(lambda: client) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        for arguments, read in (('{"a": "x"}', '{"a": "x"}'), ('{"a": "x", "b": "y', '{"a": "x"}')):
            texts.append(f'[TOOL_CALLS][{{"name": "add", "arguments": {arguments}')
            messages = [{"role": "user", "content": "?"}]
            answer = http.post("/v1/chat/completions", json={"messages": messages, **fields})
            message = answer.json()["choices"][0]["message"]
            [call] = message["tool_calls"]
            assert call["function"]["arguments"] == arguments
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
            answer = http.post("/v1/chat/completions", json={"messages": messages, **fields})
            assert answer.status_code == 200, answer.text
            assert f"[TOOL_CALLS]add{read}" in client.prompts[-1]
