"""gpt-oss's harmony format: answers in any pieces, and over HTTP with a template of its signs."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server import reasoning, tool_parsers
from engine.server.harmony import HarmonyReasoning, recipient_of
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import serve

BEGIN = "<|start|>assistant"
NEXT = "<|end|>" + BEGIN
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


def read(text, size=10**6, names=("add", "get.weather"), prompt=BEGIN, has_tools=True):
    """Return the reasoning, the content and the calls of an answer fed in pieces of `size`."""
    parser = HarmonyReasoning(prompt, keeps_calls=has_tools)
    tools = tool_parsers.get("harmony", names)
    thought, content, events = "", "", []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for more, new in [*map(parser.feed, pieces), parser.finish()]:
        thought += more
        content += new
        events += tools.feed(new) if has_tools else []
    if not has_tools:
        return thought, content, []
    parsed = tool_parsers.collect(events + tools.finish())
    return thought, parsed.content, [(c.name, c.arguments) for c in parsed.tool_calls]


CALL = ("add", '{"a": 1}')
ANSWERS = [  # (answer, reasoning, content, calls)
    (f"{FINAL}Hi<|return|>", "", "Hi", []),
    (f"{FINAL}Hi", "", "Hi", []),
    (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes<|return|>", "Hm.", "Yes", []),
    (f"{ANALYSIS}Hm.<|end|>{BEGIN}{FINAL}Yes", "Hm.", "Yes", []),
    (f"{ANALYSIS} a\n b {NEXT}{FINAL} c\n", " a\n b ", " c\n", []),
    (f"{ANALYSIS}one{NEXT}{ANALYSIS}two{NEXT}{FINAL}x", "one\n\ntwo", "x", []),
    (f"{ANALYSIS}Hm.{NEXT}{ADD}{CALL[1]}<|call|>", "Hm.", "", [CALL]),
    (f"{ADD}{CALL[1]}", "", "", [CALL]),
    (f"{ADD}{CALL[1]}<|call|>{BEGIN}{ADD}{{}}<|call|>", "", "", [CALL, ("add", "{}")]),
    (f" to=functions.add{COMMENTARY}{CALL[1]}<|call|>", "", "", [CALL]),
    (f" to=functions.add<|channel|>analysis<|message|>{CALL[1]}", "", "", [CALL]),
    (
        f"<|channel|>commentary to=functions.add json<|message|>{CALL[1]}<|call|>",
        "",
        "",
        [CALL],
    ),
    (
        '<|channel|>commentary to=functions.get.weather <|constrain|>json<|message|>{"c": "é\\n"}',
        "",
        "",
        [("get.weather", '{"c": "é\\n"}')],
    ),
    (f"{COMMENTARY}I add.{NEXT}{ADD}{CALL[1]}<|call|>", "", "I add.", [CALL]),
    (f"{COMMENTARY}I add.{NEXT}{FINAL}Done.", "", "I add.\n\nDone.", []),
    (f'{ADD}{{"a": "<|end|>"}}<|call|>', "", "", [("add", '{"a": "<|end|>"}')]),
    (f"{ADD}{{}}<|end|>{BEGIN}{FINAL}So.", "", "So.", [("add", "{}")]),
    (f'{ADD}{{"b": {{"c": [1, {{}}]}}}}\n<|call|>', "", "", [("add", '{"b": {"c": [1, {}]}}')]),
    # Cut, or without some of its markup.
    (f"{ANALYSIS}Hm", "Hm", "", []),
    (ANALYSIS, "", "", []),
    ("<|channel|>ana", "", "", []),
    ("<|channel|>commentary to=functions.a", "", "", []),
    ("", "", "", []),
    (f'{ADD}{{"a": ', "", "", [("add", '{"a": ')]),
    (f"{ANALYSIS}Hm.{FINAL}Yes", "Hm.", "Yes", []),
    (f"{FINAL}Yes<|retu", "", "Yes<|retu", []),
    ("Plain text, 1 < 2.", "", "Plain text, 1 < 2.", []),
    (f"Plain text.{FINAL}Yes", "", "Plain text.\n\nYes", []),
    ("</<|message|>x<|channel|>analysis<|message|>Hm", "Hm", "</<|message|>x", []),
    ("assistants help", "", "s help", []),
    # No call: damaged, or of an unknown function.
    (f"{ADD}{{'a': 1}}<|call|>", "", "{'a': 1}", []),
    (f"{ADD}[1]<|call|>{BEGIN}{FINAL}x", "", "[1]x", []),
    ("<|channel|>commentary to=functions.none <|message|>{}<|call|>", "", "{}", []),
    ("<|channel|>analysis to=python<|message|>print(1)<|call|>", "print(1)", "", []),
    (f"{FINAL}a{NEXT}{FINAL}b", "", "a\n\nb", []),
    # The next message ends a call whose JSON goes on.
    (f'{ADD}{{"a": "x<|call|>{BEGIN}{ADD}{{}}<|call|>', "", '{"a": "x<|call|>', [("add", "{}")]),
    (f'{ADD}{{"a": "x<|end|>{ANALYSIS}Hm.{NEXT}{FINAL}y', "Hm.", '{"a": "x<|end|>y', []),
    (f'{ADD}{{"a": "x{ANALYSIS}Hm.{NEXT}{ADD}{{}}', "Hm.", '{"a": "x<|end|>', [("add", "{}")]),
]


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: case[0][:60])
def test_answers_in_pieces(case):
    text, *expected = case
    if text == "assistants help":  # the prompt has begun the header with the role
        expected[1] = "assistants help"
    for size in (1, 2, 3, 7, 10**6):
        assert list(read(text, size)) == expected


def test_a_message_between_analysis_and_final_without_its_end():
    assert read(f"{ANALYSIS}a<|start|>assistant{FINAL}b") == ("a", "b", [])


def test_without_tools_a_call_is_its_text():
    text = f"{ANALYSIS}Hm.{NEXT}{ADD}{CALL[1]}<|call|>"
    assert read(text, 2, has_tools=False) == ("Hm.", CALL[1], [])


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (f"{BEGIN}{FINAL}Once upon", " a time", ("", " a time", [])),
        (f"{BEGIN}{ANALYSIS}Let", f" me.{NEXT}{FINAL}So", (" me.", "So", [])),
        (f"{BEGIN}{FINAL}Once", f" more.{NEXT}{FINAL}So", ("", " more.\n\nSo", [])),
        (f"{BEGIN}<|channel|>final", "<|message|>Hi", ("", "Hi", [])),
        ("<|start|>user<|message|>?<|end|>", f"{BEGIN}{FINAL}Hi", ("", "Hi", [])),
        ("no markup", f"{FINAL}Hi", ("", "Hi", [])),
    ],
)
def test_the_prompt_has_begun_the_message(prompt, text, expected):
    for size in (1, 4, 100):
        assert read(text, size, prompt=prompt) == expected


texts = st.text(st.characters(exclude_characters="<|", exclude_categories=["Cs"]), max_size=20)
messages = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["analysis", "final", "commentary"]), texts),
        st.tuples(st.just("call"), st.dictionaries(texts, st.integers() | texts, max_size=3)),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(messages, st.integers(1, 9))
def test_messages_are_read_back(messages, size):
    text, wanted = "", {"analysis": [], "content": [], "call": []}
    for kind, value in messages:
        text += BEGIN if text else ""
        if kind == "call":
            value = json.dumps(value, ensure_ascii=False)
            text += f"{ADD}{value}<|call|>"
            wanted["call"].append(("add", value))
        else:
            text += f"<|channel|>{kind}<|message|>{value}<|end|>"
            wanted["analysis" if kind == "analysis" else "content"].append(value)
    thought, content, calls = read(text, size)
    assert calls == wanted["call"]
    assert thought.split() == " ".join(wanted["analysis"]).split()
    assert content.split() == " ".join(wanted["content"]).split()


def test_time_is_linear():
    text = f"{ANALYSIS}{'a <' * 40_000}{NEXT}{ADD}" + json.dumps({"a": "x" * 100_000})
    times = {}
    for length in (len(text) // 4, len(text)):
        times[length] = min(_timed(text[:length]) for _ in range(3))
    assert times[len(text)] < 12 * times[len(text) // 4]


def _timed(text):
    """Return the time of the process, which other processes do not lengthen."""
    begin = time.process_time()
    read(text, 5)
    return time.process_time() - begin


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("assistant to=functions.f", "f"),
        ("<|channel|>commentary to=functions.a-b.c<|constrain|>json", "a-b.c"),
        ("<|channel|>commentary to=browser.open", None),
        ("<|channel|>final", None),
    ],
)
def test_recipients(header, name):
    assert recipient_of(header) == name


# ---- over HTTP

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "<|start|>assistant{# <|channel|>analysis #}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SAID = f"{ANALYSIS}Hm.{NEXT}{COMMENTARY}I add.{NEXT}{ADD}{CALL[1]}"


@pytest.fixture(scope="module")
def server():
    with serve(lambda: ScriptedClient(TEMPLATE, lambda *_: SAID)) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def test_the_format_is_known_by_its_template():
    assert tool_parsers.detect(TEMPLATE) == reasoning.detect(TEMPLATE) == "harmony"


def test_chat(http):
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I add.")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [CALL[1]]
    lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == CALL[1]
    hidden = http.post("/v1/chat/completions", json=body | {"include_reasoning": False}).json()
    assert "reasoning_content" not in hidden["choices"][0]["message"]


def test_responses_and_messages(http):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    body = {"model": "scripted", "input": "?", "tools": [tool]}
    items = http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body = {"model": "scripted", "max_tokens": 999, "tools": [tool]}
    body["messages"] = [{"role": "user", "content": "?"}]
    blocks = http.post("/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in blocks][-2:] == ["text", "tool_use"]
    assert blocks[-1]["input"] == {"a": 1}


TURNS = (
    f"{ANALYSIS}Hm.{NEXT}{COMMENTARY}First.{NEXT}{ANALYSIS}So.{NEXT}{COMMENTARY}I add.{NEXT}"
    f"{ADD}{CALL[1]}"
)


def stream_events(http, path, body):
    lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_whole_answers_keep_the_order_of_their_messages(server, http, monkeypatch):
    """As streams do, also those whose outputs have several messages."""
    monkeypatch.setattr(server.client, "script", lambda *_: TURNS)
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    body = {"model": "scripted", "input": "?", "tools": [tool]}
    tool = {"name": "add", "input_schema": {"type": "object"}}
    message = {"model": "scripted", "max_tokens": 999, "tools": [tool]}
    message["messages"] = [{"role": "user", "content": "?"}]
    told = ["Hm.", "First.", "\n\nSo.", "\n\nI add."]
    pieces = server.client._pieces

    def in_one(answer, params):
        every = pieces(answer, params)
        ids = [token for piece in every for token in piece[1]]
        return [["".join(piece[0] for piece in every), ids, *every[-1][2:]]]

    for of_answer in (pieces, in_one):
        monkeypatch.setattr(server.client, "_pieces", of_answer)
        items = http.post("/v1/responses", json=body).json()["output"]
        assert [item["content"][0]["text"] for item in items[:-1]] == told
        assert [item["type"] for item in items] == [*["reasoning", "message"] * 2, "function_call"]
        blocks = http.post("/v1/messages", json=message).json()["content"]
        assert [block.get("thinking") or block.get("text") for block in blocks[:-1]] == told
        assert [block["type"] for block in blocks] == [*["thinking", "text"] * 2, "tool_use"]
        streamed = stream_events(http, "/v1/responses", body)[-1]["response"]["output"]
        assert [item["type"] for item in streamed] == [item["type"] for item in items]
        events = stream_events(http, "/v1/messages", message)
        begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert [block["type"] for block in begun] == [block["type"] for block in blocks]


def test_reasoning_behind_an_open_call_is_no_part_of_it(server, http, monkeypatch):
    said = f'{ADD}{{"a": "x{NEXT}{ANALYSIS}Hm.{NEXT}{FINAL}Yes'
    monkeypatch.setattr(server.client, "script", lambda *_: said)
    body = {"model": "scripted", "max_tokens": 999, "tools": [{"name": "add", "input_schema": {}}]}
    body["messages"] = [{"role": "user", "content": "?"}]
    blocks, deltas = [], []
    for event in stream_events(http, "/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"]["type"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            deltas.append((blocks[-1], event["delta"]["type"]))
    assert blocks == ["tool_use", "thinking", "text"]
    kinds = {"tool_use": "input_json_delta", "thinking": "thinking_delta", "text": "text_delta"}
    assert set(deltas) == set(kinds.items())
    whole = http.post("/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in whole] == ["text", "thinking", "text"]


def test_reasoning_stays_behind_a_held_call_if_its_marker_comes_in_parts(server, http, monkeypatch):
    """Of a second call with `disable_parallel_tool_use`, which is damaged, and so text."""
    said = f'{ADD}{CALL[1]}<|call|>{BEGIN}{ADD}{{"a": "x{NEXT}{ANALYSIS}Hm.'
    at = said.rindex("age|>")
    pieces = [[said[:at], [1], None, None], [said[at:], [2], "stop", None]]
    monkeypatch.setattr(server.client, "_pieces", lambda *_: pieces)
    body = {"model": "scripted", "max_tokens": 999, "tools": [{"name": "add", "input_schema": {}}]}
    body["messages"] = [{"role": "user", "content": "?"}]
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    events = stream_events(http, "/v1/messages", body)
    begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["tool_use", "text", "thinking"]
    whole = http.post("/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in whole] == ["tool_use", "text", "thinking"]
