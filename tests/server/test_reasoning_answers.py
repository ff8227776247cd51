"""Reasoning in answers over HTTP: repeated markers, and calls in a block that is never closed."""

from __future__ import annotations

import json

import httpx
import pytest

from engine.text.tokenizer import ChatPrompt
from tests.server.serving import CannedClient, WordTokenizer, serve
from tests.server.tool_answers import events, say, tools

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "</think>"}}\n</tool_call>'
ARGUMENTS = '{"a": "</think>"}'
CASES = [  # (answer, reasoning, content, number of calls)
    ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", 0),
    ("<think>\n<think>Hm.</think>\n</think> Yes <think>", "Hm.", "Yes <think>", 0),
    ("<think>\n\n</think>\n\nYes.", "", "Yes.", 0),
    (f"<think>\nHm. {CALL}", "Hm.", "", 1),
    (f"<think>\nHm.\n{CALL}\n{CALL}\nThen.", "Hm.", "Then.", 2),
    (f"<think>\n{CALL}", "", "", 1),
    (f"<think>\nHm. {CALL} no.\n</think>\nYes.", f"Hm. {CALL} no.", "Yes.", 0),
    (f"<think>\nHm.\n</think>\n{CALL}", "Hm.", "", 1),
]


class Thinking(WordTokenizer):
    """Its prompts end with the opening marker."""

    def render_chat(self, *arguments, **options):
        return ChatPrompt(super().render_chat(*arguments, **options).text + "<think>\n")


class ThinkingClient(CannedClient):
    def __init__(self, *pieces):
        super().__init__(*pieces)
        self.tokenizer = Thinking()


@pytest.fixture(scope="module", params=[CannedClient, ThinkingClient])
def server(request):
    with serve(lambda: request.param("")) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("size", [1, 5, 500])
@pytest.mark.parametrize("case", CASES)
def test_chat(server, http, case, size):
    text, reasoning, content, num_calls = case
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools("chat")}
    say(server, text, "stop", size)
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    message = choice["message"]
    found = message.get("reasoning_content", ""), message["content"] or ""
    assert found == (reasoning, content)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert calls == [{"name": "add", "arguments": ARGUMENTS}] * num_calls
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")

    answer = http.post("/v1/chat/completions", json=body | {"stream": True})
    deltas = [event["choices"][0]["delta"] for event in events(answer)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS * num_calls


@pytest.mark.parametrize("case", CASES)
def test_responses(server, http, case):
    text, reasoning, content, num_calls = case
    body = {"model": "scripted", "input": "?", "tools": tools("responses")}
    say(server, text, "stop")
    answer = http.post("/v1/responses", json=body).json()
    streamed = events(http.post("/v1/responses", json=body | {"stream": True}))[-1]
    for found in (answer, streamed["response"]):
        texts = {"reasoning": "", "message": ""}
        for item in found["output"]:
            if item["type"] != "function_call":
                texts[item["type"]] += item["content"][0]["text"]
        assert texts == {"reasoning": reasoning, "message": content}
        calls = [item for item in found["output"] if item["type"] == "function_call"]
        assert [item["arguments"] for item in calls] == [ARGUMENTS] * num_calls


@pytest.mark.parametrize("case", CASES)
def test_messages(server, http, case):
    text, reasoning, content, num_calls = case
    body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
    body["tools"] = tools("messages")
    say(server, text, "stop")
    answer = http.post("/v1/messages", json=body).json()
    texts = {"thinking": "", "text": ""}
    for block in answer["content"]:
        if block["type"] != "tool_use":
            texts[block["type"]] += block[block["type"]]
    assert texts == {"thinking": reasoning, "text": content}
    inputs = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    assert inputs == [json.loads(ARGUMENTS)] * num_calls
    assert answer["stop_reason"] == ("tool_use" if num_calls else "end_turn")

    texts, pieces = {"thinking": "", "text": ""}, ""
    for event in events(http.post("/v1/messages", json=body | {"stream": True})):
        delta = event.get("delta", {})
        for name in texts:
            texts[name] += delta.get(name, "")
        pieces += delta.get("partial_json", "")
    assert texts == {"thinking": reasoning, "text": content}
    assert pieces == ARGUMENTS * num_calls


class MarkedTokenizer(WordTokenizer):
    """Some markers are special tokens."""

    special_ids = frozenset({0xFFF0})
    marker = "</think>"

    def token_bytes(self, token_id):
        return self.marker.encode() if token_id == 0xFFF0 else super().token_bytes(token_id)


@pytest.mark.parametrize(
    ("marker", "has_tools", "is_kept"),
    [
        ("</think>", False, True),
        ("</think>", True, True),
        ("<tool_call>", True, True),
        ("<tool_call>", False, False),
        ("<|im_end|>", True, False),
    ],
)
def test_markers_that_are_special_tokens_reach_the_parsers(marker, has_tools, is_kept):
    def make_client():
        client = CannedClient("Hm.")
        client.tokenizer = MarkedTokenizer()
        client.tokenizer.marker = marker
        return client

    with serve(make_client) as server, httpx.Client(base_url=server.url) as http:
        body = {"messages": [{"role": "user", "content": "?"}]}
        body |= {"tools": tools("chat")} if has_tools else {}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        [(_, params, _)] = server.client.requests
        assert params.skip_special_tokens != is_kept
