"""Answers that reason first, and are then JSON or calls, as their grammar makes them."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import pytest

from engine.errors import RequestError
from engine.server import reasoning
from engine.server.answer_forms import forms_of
from engine.server.answer_grammar import ToolUse, answer_structure, opening_of, tool_use
from engine.server.protocol.chat import ChatCompletionRequest
from engine.server.reasoning.formats import FORMATS
from engine.server.tool_parsers import Function, calls_of, collect, get
from engine.structured.spec import StructuredOutput
from tests.server.call_walks import MarkerTokens, compiled, walk

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PROMPTS = {
    ("qwen3", "open"): "<|im_start|>assistant\n<think>\n",
    ("qwen3", "may open"): "<|im_start|>assistant\n",
    ("qwen3", "closed"): "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ("harmony", "open"): "<|start|>assistant<|channel|>analysis<|message|>",
    ("harmony", "may open"): "<|start|>assistant",
    ("harmony", "closed"): "<|start|>assistant<|channel|>final<|message|>",
}
OTHERS = [
    (name, opening, are_special)
    for name in FORMATS
    for opening in ("open", "may open")
    for are_special in (True, False)
]
TOOLS = {"qwen3": "hermes", "harmony": "harmony"}


def tool(name, strict=None):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}


def body_of(**fields):
    fields = {"messages": [{"role": "user", "content": "?"}]} | fields
    return msgspec.convert(fields, ChatCompletionRequest)


def structure_of(name, prompt, **fields):
    """Return an answer's structure, and how it may call tools."""
    body = body_of(**fields)
    use = tool_use(body, TOOLS.get(name, "hermes"), name, follows_text=False)
    return answer_structure(body, use, forms_of(name), opening_of(name, prompt)), use


def answers(structure, name, are_special, count=60):
    """Yield texts that a structure allows."""
    markers = (*reasoning.markers_of(name), *get(TOOLS.get(name, "hermes")).markers)
    tokens = MarkerTokens(dict.fromkeys(markers), are_special=are_special)
    grammar = compiled(json.loads(structure["structural_tag"])["format"], tokens)
    for seed in range(count):
        text, has_ended = walk(grammar, tokens, seed, most=3000)
        if has_ended:
            yield text


def read(name, prompt, text, use):
    """Return the reasoning, content and calls of an answer."""
    tools = use.make_parser if name == "harmony" else None
    parser = reasoning.get(name, prompt, tools)
    parts = [parser.feed(text), parser.finish()]
    thought, content = ("".join(part) for part in zip(*parts, strict=True))
    if use.make_parser is None:
        return thought, content, []
    tools = use.make_parser()
    found = collect(tools.feed(content) + tools.finish())
    return thought, found.content, found.tool_calls


@pytest.mark.parametrize(
    ("name", "block", "are_special"),
    [(*key, True) for key in PROMPTS] + [(*key, False) for key in PROMPTS if key[0] != "harmony"],
)
def test_json_behind_reasoning(name, block, are_special):
    prompt = PROMPTS[name, block]
    assert opening_of(name, prompt) == block
    structure, use = structure_of(name, prompt, response_format=FORMAT)
    if block == "closed":
        assert structure == {"json": SCHEMA}
        return
    num_thoughts = 0
    num_answers = 0
    for text in answers(structure, name, are_special):
        thought, content, _ = read(name, prompt, text, use)
        jsonschema.validate(json.loads(content), SCHEMA)
        num_thoughts += bool(thought)
        num_answers += 1
        if num_answers > 8 and num_thoughts:
            break
    assert num_answers > 5 and num_thoughts


@pytest.mark.parametrize("choice", ["required", "named", "allowed"])
@pytest.mark.parametrize(("name", "block"), PROMPTS)
def test_required_calls_behind_reasoning(name, block, choice):
    named = {"type": "function", "function": {"name": "sub"}}
    allowed = {"mode": "required", "tools": [named]}
    choices = {"named": named, "allowed": {"type": "allowed_tools", "allowed_tools": allowed}}
    fields = {"tools": [tool("add"), tool("sub")], "tool_choice": choices.get(choice, choice)}
    prompt = PROMPTS[name, block]
    structure, use = structure_of(name, prompt, **fields)
    num_thoughts = 0
    num_answers = 0
    for text in answers(structure, name, True):
        thought, content, calls = read(name, prompt, text, use)
        assert content == "" and calls, text
        assert {call.name for call in calls} <= (
            {"add", "sub"} if choice == "required" else {"sub"}
        )
        assert len(calls) == 1 or choice != "named"
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
        num_thoughts += bool(thought)
        num_answers += 1
        if num_answers > 8 and (num_thoughts or block == "closed"):
            break
    assert num_answers > 5 and bool(num_thoughts) == (block != "closed")


@pytest.mark.parametrize(("name", "block"), PROMPTS)
def test_strict_calls_within_text_behind_reasoning(name, block):
    prompt = PROMPTS[name, block]
    structure, use = structure_of(name, prompt, tools=[tool("add", True), tool("sub")])
    num_calls = 0
    num_contents = 0
    for text in answers(structure, name, True, count=80):
        _, content, calls = read(name, prompt, text, use)
        for call in calls:
            if call.name == "add":
                jsonschema.validate(json.loads(call.arguments), SCHEMA)
        num_calls += len(calls)
        num_contents += bool(content)
        if num_calls > 3 and num_contents > 3:
            break
    assert num_calls and num_contents


@pytest.mark.parametrize(("name", "block"), PROMPTS)
def test_json_or_calls(name, block):
    """With tools, an answer in a format may be calls instead."""
    prompt = PROMPTS[name, block]
    structure, use = structure_of(name, prompt, tools=[tool("add")], response_format=FORMAT)
    kinds = set()
    for text in answers(structure, name, True, count=80):
        _, content, calls = read(name, prompt, text, use)
        if calls:
            assert not content
        else:
            jsonschema.validate(json.loads(content), SCHEMA)
        kinds.add(bool(calls))
        if len(kinds) == 2:
            break
    assert kinds == {True, False}


@pytest.mark.parametrize(("name", "opening", "are_special"), OTHERS)
def test_json_behind_every_format_of_reasoning(name, opening, are_special):
    prompt = FORMATS[name].opening[0] if opening == "open" else "Assistant:"
    structure, use = structure_of(name, prompt, response_format=FORMAT)
    num_thoughts = 0
    num_answers = 0
    for text in answers(structure, name, are_special):
        thought, content, _ = read(name, prompt, text, use)
        jsonschema.validate(json.loads(content), SCHEMA)
        num_thoughts += bool(thought)
        num_answers += 1
        if num_answers > 3 and num_thoughts:
            break
    assert num_answers and num_thoughts


@pytest.mark.parametrize("name", FORMATS)
def test_free_text_with_values_behind_every_format_of_reasoning(name):
    tags = [{"begin": "<v>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</v>"}]
    form = {"type": "triggered_tags", "triggers": ["<v>"], "tags": tags}
    asked = {"structural_tag": {"type": "structural_tag", "format": form}}
    prompt = FORMATS[name].opening[0]
    structure, use = structure_of(name, prompt, structured_outputs=asked)
    assert any(read(name, prompt, text, use)[1] for text in answers(structure, name, True))


@pytest.mark.parametrize("depth", [200, 5000])
def test_a_schema_that_nests_too_deeply_is_refused(depth):
    schema = {}
    for _ in range(depth):
        schema = {"not": schema}
    use = ToolUse(None, calls_of("hermes", [Function("f", schema)]), "required")
    with pytest.raises(RequestError, match="nest"):
        StructuredOutput(**answer_structure(body_of(), use, forms_of("qwen3"), "closed"))


def test_free_answers_stay_free():
    for fields in ({}, {"tools": [tool("add")]}, {"tools": [tool("add")], "tool_choice": "none"}):
        assert structure_of("qwen3", "<think>", **fields)[0] is None


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"guided_choice": ["a|b", "c"]}, {"type": "regex", "pattern": r"a\u{7C}b|c"}),
        ({"guided_grammar": 'start: "x"'}, {"type": "grammar", "grammar": 'start: "x"'}),
        ({"guided_json": "true"}, {"type": "json_schema", "json_schema": True}),
        (
            {"response_format": {"type": "json_object"}},
            {"type": "json_schema", "json_schema": {"type": "object"}},
        ),
    ],
)
def test_every_kind_of_structure_comes_behind_reasoning(fields, form):
    structure, _ = structure_of("qwen3", "<think>", **fields)
    before, last = json.loads(structure["structural_tag"])["format"]["elements"]
    assert before["elements"][0]["end"] == "</think>"
    assert last.items() >= form.items()
    plain, _ = structure_of("qwen3", "</think>", **fields)
    assert "structural_tag" not in plain
