"""Grammars of calls in checkpoints' own formats: what they allow is read back as valid calls."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest

from engine.server.response_template import DeclaredReaders
from engine.server.response_template.layout import layout_of
from engine.server.tool_parsers import Function, collect
from engine.server.tool_parsers.required import RequiredCallsParser
from tests.server import test_response_template as formats
from tests.server.call_walks import MarkerTokens, compiled, walk
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import serve
from tests.server.test_call_grammars import FLAG, SCHEMA

pytest.importorskip("llguidance")

LINES = {
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call:\s*(?P<name>[^>]+)>\n?",
            "close": "</call>",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    }
}
DECLARED = {
    "chatml": ("response_template", formats.CHATML),
    "channels": ("response_template", formats.CHANNELS),
    "each": ("response_template", formats.EACH),
    "tags": ("response_template", formats.TAGS),
    "quoted": ("response_template", formats.QUOTED),
    "lines": ("response_template", LINES),
    "schema": ("response_schema", formats.SCHEMA),
    "schema_gemma": ("response_schema", formats.CALL_OF_GEMMA),
}
PLAIN = SCHEMA | {
    "properties": {k: v for k, v in SCHEMA["properties"].items() if k not in ("parts", "list")}
}
FUNCTIONS = [Function("add", SCHEMA), Function("set_flag", FLAG)]
MARKERS = ("<call>", "</call>", "<A>", "</A>", "<q>", '<|"|>', "<|call|>", "<|message|>")


def functions_of(name):
    """Lists on several lines cannot stand in a format of lines."""
    return [Function("add", PLAIN), FUNCTIONS[1]] if name == "lines" else FUNCTIONS


def tokens_of(name):
    """Return a vocabulary with what begins a section, and ends a value."""
    layout = layout_of(*DECLARED[name])
    texts = filter(None, [layout.begin, layout.style.end])
    return MarkerTokens(MARKERS, are_special=True, texts=texts)


def readers_of(name, functions):
    names = {function.name: function.parameters for function in functions}
    return DeclaredReaders(DECLARED[name], "", names)


def read(readers, text, size=10**6, *, is_required=False):
    """Return (content, calls) as the server reads an answer in pieces."""
    thinker = readers.reasoning(True)
    tools = RequiredCallsParser(readers.tools) if is_required else readers.tools()
    parts = [thinker.feed(text[i : i + size]) for i in range(0, len(text), size)]
    events = [event for _, part in (*parts, thinker.finish()) for event in tools.feed(part)]
    found = collect(events + tools.finish())
    return found.content, found.tool_calls


def check(calls, functions):
    schemas = {function.name: function.parameters for function in functions}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("name", DECLARED)
def test_required_calls(name):
    functions = functions_of(name)
    readers = readers_of(name, functions)
    tokens = tokens_of(name)
    grammar = compiled(readers.calls(functions).required(one_call=False), tokens)
    counts = set()
    names = set()
    for seed in range(60):
        if seed >= 12 and counts == {1, 2} and len(names) == 2:
            break
        text, has_ended = walk(grammar, tokens, seed)
        if not has_ended:
            continue
        content, calls = read(readers, text)
        assert not content.strip() and calls, text
        check(calls, functions)
        pieces = read(readers, text, 1 + seed % 7, is_required=True)
        assert pieces[0] == ""
        assert [(c.name, c.arguments) for c in pieces[1]] == [(c.name, c.arguments) for c in calls]
        counts.add(min(len(calls), 2))
        names |= {call.name for call in calls}
    assert counts == {1, 2} and names == {"add", "set_flag"}


@pytest.mark.parametrize("name", DECLARED)
def test_strict_calls_within_text(name):
    functions = functions_of(name)
    readers = readers_of(name, functions)
    tokens = tokens_of(name)
    grammar = compiled(readers.calls(functions).within_text(one_call=False), tokens)
    num_calls = 0
    for seed in range(60):
        text, has_ended = walk(grammar, tokens, seed)
        if has_ended:
            calls = read(readers, text)[1]
            check(calls, functions)
            assert len(calls) == text.count(layout_of(*DECLARED[name]).end) or name == "each"
            num_calls += len(calls)
        if seed >= 10 and num_calls:
            break
    assert num_calls


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("response_schema", formats.NAMED),
        ("response_template", {"fields": {"content": {}}}),
        ("response_template", {"fields": {"tool_calls": {"open": "<c>", "content": "json"}}}),
        (
            "response_template",
            {"fields": {"tool_calls": {"open": "<c>", "close": "</c>", "content": "int"}}},
        ),
        (
            "response_template",
            {
                "fields": {
                    "tool_calls": {
                        "open_pattern": "<c(?=x)", "close": "</c>", "content": "json",
                        "repeats": True,
                    }
                }
            },
        ),
        (
            "response_template",
            {
                "fields": {
                    "tool_calls": {
                        "open": "<c>", "close": "</c>", "content": "json", "repeats": True,
                        "transform": {"function": {"name": "{content}", "arguments": {}}},
                    }
                }
            },
        ),
    ],
)  # fmt: skip
def test_formats_without_a_known_layout(kind, spec):
    readers = DeclaredReaders((kind, spec), "", {"f": {}})
    assert readers.calls([Function("f", FLAG)]) is None


def test_a_function_that_the_format_cannot_name():
    """The pattern of the name does not match it: its calls would not be read."""
    assert readers_of("tags", FUNCTIONS).calls(FUNCTIONS) is not None
    assert readers_of("tags", FUNCTIONS).calls([Function("set.flag-2", FLAG)]) is None
    odd = {"type": "object", "properties": {"a b": {"type": "string"}}}
    assert readers_of("tags", FUNCTIONS).calls([Function("f", odd)]) is None


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n", "may open"),
        ("<|im_start|>assistant\n<think>\n", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
    ],
)
def test_the_opening_of_declared_reasoning(prompt, opening):
    assert DeclaredReaders(DECLARED["chatml"], prompt, {}).opening == opening
    assert DeclaredReaders(DECLARED["tags"], prompt, {}).opening == "closed"


# ---- through the service

TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
BODY = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
TEMPLATE = formats.TEMPLATE
CALL = '<call>{"name": "f", "arguments": {"text": "e"}}</call>'
NAMED = {"type": "function", "function": {"name": "f"}}


def ask(said, template=TEMPLATE, spec=formats.CHATML, **fields):
    """Return an answer's message, and the parameters of its request."""
    client = ScriptedClient(template, lambda *_: said)
    client.tokenizer.response_format = ("response_template", spec)
    with serve(lambda: client) as server:
        answer = httpx.post(server.url + "/v1/chat/completions", json=BODY | fields, timeout=30)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["message"], client.params[-1]


def structure_of(params):
    return json.loads(params.structured.structural_tag)["format"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize(
    ("begun", "said"),
    [("", CALL), ("", f"<think>Hm.</think>{CALL}"), ("<think>\n", f"Hm.</think>\n{CALL}")],
)
def test_required_calls_come_after_reasoning(choice, begun, said):
    message, params = ask(said, TEMPLATE + begun, tool_choice=choice)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"text": "e"}'}
    assert message["content"] is None
    assert message.get("reasoning_content") == ("Hm." if "Hm." in said else None)
    matcher = compiled(structure_of(params), MarkerTokens((), are_special=False))
    state = matcher.new_state().matcher
    ids = list(said.encode())
    assert state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def test_strict_functions_with_auto():
    message, params = ask(f"<think>Hm.</think>So {CALL} it is")
    assert message["reasoning_content"] == "Hm." and message["content"] == "So  it is"
    assert len(message["tool_calls"]) == 1
    matcher = compiled(structure_of(params), MarkerTokens((), are_special=False))
    for text, is_fine in ((f"a {CALL} b", True), (CALL.replace('"e"', "5"), False)):
        state = matcher.new_state().matcher
        ids = list(text.encode())
        assert (state.try_consume_tokens(ids) == len(ids) and state.is_accepting()) == is_fine


def test_a_format_without_a_layout_has_required_calls_as_json():
    said = '[{"name": "f", "arguments": {"text": "a"}}]'
    spec = {"fields": {"tool_calls": {"open": "<c>", "content": "json"}, "content": {}}}
    message, params = ask(said, spec=spec, tool_choice="required")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"text": "a"}'
    assert params.structured.json is not None
