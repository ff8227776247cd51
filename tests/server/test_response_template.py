"""Formats that a checkpoint declares: response templates, response schemas, and their limits."""

from __future__ import annotations

import json
import logging
import sys
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.server import response_template
from engine.server.chat_stream import ChatService
from engine.server.response_template import DeclaredReaders
from engine.server.response_template.contents import FormatError, content_of, transformed
from engine.server.response_template.schema import ResponseSchema
from engine.server.response_template.streams import Regions
from engine.server.response_template.template import ResponseTemplate
from engine.server.response_template.worker import MAX_SECONDS, check, read
from engine.server.tool_parsers import (
    MAX_CALLS,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from tests.server.scripted_client import ScriptedClient
from tests.server.serving import serve

CHATML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
CHANNELS = {
    "start_anchor_pattern": r"<\|start\|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
EACH = {
    "fields": {
        "content": {"open": "<R>", "close": "</R>"},
        "tool_calls": {
            "open": "<A>",
            "close": "</A>",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{tool}", "arguments": "{args}"}},
        },
    }
}
TAGS = {
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>\s*<function=(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    }
}
QUOTED = {
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|tool>call:(?P<name>\w+)",
            "close": "<tool|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    }
}
PROMPT = "<|im_start|>assistant\nBefore<|im_end|>\n<|im_start|>user\n?<|im_start|>assistant\n"
CALL = '<call>{"name": "f", "arguments": {"a": 1}}</call>'
F = ["f", {"a": 1}]

TEMPLATES = [  # (template, prompt, answer, reasoning, content, calls)
    (CHATML, PROMPT, "Yes.", "", "Yes.", []),
    (CHATML, PROMPT, " Yes.\n<|im_end|>", "", "Yes.", []),
    (CHATML, PROMPT, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", []),
    (CHATML, PROMPT + "<think>\n", "Hm.</think>Yes.", "Hm.", "Yes.", []),
    (CHATML, PROMPT + "<think>\n", "Hm.", "Hm.", "", []),
    (CHATML, PROMPT + "<think>\n\n</think>\n\n", "Yes.", "", "Yes.", []),
    (CHATML, PROMPT, "<think>Hm", "Hm", "", []),
    (CHATML, PROMPT, CALL, "", "", [F]),
    (CHATML, PROMPT, f"<think>Hm.</think>\n{CALL}\n{CALL}<|im_end|>", "Hm.", "", [F, F]),
    (CHATML, PROMPT, f"I call. {CALL}\n", "", "I call.", [F]),
    (CHATML, PROMPT, f"a {CALL} b {CALL} c", "", "a  b  c", [F, F]),
    (CHATML, PROMPT, f"<think>{CALL}</think>x", CALL, "x", []),
    (CHATML, PROMPT, '<call>{"name": "f", "arguments": "{}"}</call>', "", "", [["f", {}]]),
    (CHATML, PROMPT, '<call>{"name": "f"}</call>', "", "", [["f", {}]]),
    (CHATML, PROMPT, "", "", "", []),
    (CHATML, PROMPT + "Yes", " and no.", "", " and no.", []),
    (CHATML, "no anchor", "Yes.", "", "Yes.", []),
    (CHATML, PROMPT, "1 < 2 </think> é 漢 🙂", "", "1 < 2 </think> é 漢 🙂", []),
    (CHANNELS, "<|start|>assistant", "<|channel|>final<|message|>Hi<|return|>", "", "Hi", []),
    (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "Hm.",
        "",
        [F],
    ),
    (CHANNELS, "<|start|>assistant", "noise", "", "", []),
    (EACH, "", '<A>[{"tool": "f", "args": {"a": 1}}, {"tool": "g", "args": {}}]</A>', "", "",
     [F, ["g", {}]]),
    (EACH, "", "<R>Yes.</R>", "", "Yes.", []),
    (TAGS, "", "So <call>\n<function=f><parameter=a>1</parameter></call>", "", "So", [F]),
    (TAGS, "", "<call><function=f><parameter=a> x y </parameter>\n<parameter=b>[1]</parameter>"
     "</call>", "", "", [["f", {"a": "x y", "b": [1]}]]),
    (TAGS, "", "<call><function=f></call>", "", "", [["f", {}]]),
    (QUOTED, "", '<|tool>call:f{a:<q>say "x", {b:1}<q>,n:{c:[1,<q>y<q>]}}<tool|>', "", "",
     [["f", {"a": 'say "x", {b:1}', "n": {"c": [1, "y"]}}]]),
    (QUOTED, "", '<|tool>call:f{a:"b:c",d:1}<tool|>ok', "", "ok", [["f", {"a": "b:c", "d": 1}]]),
    (
        {"fields": {"content": {"open": "<c>", "close": "</c>", "repeats": True},
                    "reasoning": {"open": "<t>", "close": "</t>", "join": "-"}}},
        "", "<t>a</t><c>x</c><t>b</t><c>y</c>", "a-b", "x\n\ny", [],
    ),
    ({"fields": {"content": {"close_pattern": r"\s*<end>"}}}, "", "Yes  <end>", "", "Yes", []),
    ({"fields": {"content": {"content_args": {"strip": False}}}}, "", " Yes ", "", " Yes ", []),
]  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES, ids=lambda case: case[2][:24])
def test_templates(case):
    spec, prompt, text, reasoning, content, calls = case
    wanted = {"reasoning": reasoning, "content": content, "calls": calls}
    assert read("response_template", spec, ("f", "g"), prompt, text) == wanted


@pytest.mark.parametrize(
    ("spec", "text", "why"),
    [
        ({"fields": {"content": {"content": "int"}}}, "x", "no int"),
        ({"fields": {"x": {"open": "<x>", "optional": False}, "content": {}}}, "y", "has no x"),
        ({"fields": {"content": {"transform": "{absent}"}}}, "y", "no value for {absent}"),
    ],
)
def test_answers_that_a_template_does_not_fit(spec, text, why):
    with pytest.raises(ConfigError, match=f"response_template: .*{why}"):
        read("response_template", spec, ("f",), "", text)


def test_half_of_a_surrogate_pair_is_replaced():
    r"""``"\ud83d"``, which no UTF-8 text can hold, in arguments and in content that is JSON."""
    call = r'<call>{"name": "f", "arguments": {"a": "x\ud83d", "b": "\ud83d\ude00"}}</call>'
    found = read("response_template", CHATML, ("f",), "", call)
    assert found["calls"] == [["f", {"a": "x\ufffd", "b": "\U0001f600"}]]
    spec = {"fields": {"content": {"content": "json"}}}
    assert read("response_template", spec, (), "", r'"\ude00y"')["content"] == "\ufffdy"


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        (CHATML, "<call>{no json}</call>"),
        (CHATML, "<call>[1]</call>"),
        (CHATML, '<call>{"name": "f", "arguments": [1]}</call>'),
        (CHATML, '<call>{"name": "f", "arguments": "x"}</call>'),
        (CHATML, '<call>{"name": 1}</call>'),
        (CHATML, '<call>{"name": "unknown"}</call>'),
        (EACH, "<A>{}</A>"),
        (EACH, '<A>[{"tool": "f", "args": {}}, {"tool": "unknown", "args": {}}]</A>'),
        (TAGS, "<call><function=unknown></call>"),
        (QUOTED, "<|tool>call:f{a:<q>x}<tool|>"),
    ],
)
def test_damaged_calls_are_content(spec, call):
    """Unchanged, and only they; also where the answer ends in a call."""
    begin, end = ("<R>", "</R>") if spec is EACH else ("", "")
    found = read("response_template", spec, ("f",), "", f"{begin}a {end}{call}{begin} b{end}")
    assert (found["content"].split(), found["calls"]) == (f"a {call} b".split(), [])
    if spec is CHATML:
        text = f"<think>Hm.</think>x{CALL}y{call}z{CALL}<call>{{"
        found = read("response_template", spec, ("f",), "", text)
        wanted = {"reasoning": "Hm.", "content": f"xy{call}z<call>{{", "calls": [F, F]}
        assert found == wanted


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [
        ("response_template", {}, "fields must be an object"),
        ("response_template", {"fields": {"content": 1}}, "field content must be an object"),
        ("response_template", {"fields": {"a": {}, "b": {}}}, "got a, b"),
        ("response_template", {"fields": {"a": {"opens": "x"}}}, "unknown keys: opens"),
        ("response_template", {"fields": {"a": {"content": "yaml"}}}, "content of a .*'yaml'"),
        ("response_template", {"fields": {"a": {"open": ""}}}, "open must be a text or texts"),
        ("response_template", {"fields": {"a": {"open": "x", "open_pattern": "y"}}}, "got both"),
        ("response_template", {"fields": {"a": {"open_pattern": "("}}}, "open_pattern is invalid"),
        ("response_schema", {"type": "object"}, "properties must be an object"),
        ("response_schema", {"properties": {"a": {"x-regex": "("}}}, "a pattern is invalid"),
        ("response_schema", {"properties": {"a": {"x-parser": "code"}}}, "x-parser .*'code'"),
    ],
)
def test_invalid_formats(kind, spec, why):
    with pytest.raises(ConfigError, match=f"{kind}: .*{why}"):
        check(kind, spec)


# ---- schemas

TOOLS = {
    "type": "array",
    "x-regex-iterator": r"<call>(.*?)</call>",
    "items": {
        "type": "object",
        "x-parser": "json",
        "x-parser-args": {"transform": "{type: 'function', function: @}"},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "thinking": {"type": "string", "x-regex": r"<think>\s*(.*?)\s*</think>"},
        "content": {"type": "string", "x-regex": r"^(?:.*</think>)?\s*(.*?)\s*(?:<call>|$)"},
        "tool_calls": TOOLS,
    },
}
NAMED = {
    "type": "object",
    "x-regex": r"^(?:<think>(?P<reasoning_content>.*?)</think>\s*)?(?P<content>[^<]*)"
    r"(?P<tool_calls><call>.*)?$",
    "properties": {
        "reasoning_content": {"type": "string"},
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"<call>(.*?)</call>",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "x-regex": r"^(\S+)"},
                    "arguments": {
                        "type": "object",
                        "x-regex-key-value": r"<k>(?P<key>.*?)</k><v>(?P<value>.*?)</v>",
                        "default": {},
                        "additionalProperties": {
                            "x-parser": "json",
                            "x-parser-args": {"allow_non_json": True},
                        },
                    },
                },
            },
        },
    },
}
CALL_OF_GEMMA = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "x-regex": r"^(.*?)(?:<call>|$)"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"<call>(.*?)</call>",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "x-regex": r"call:(?P<name>\w+)(?P<arguments>\{.*\})",
                        "properties": {
                            "name": {"type": "string"},
                            "arguments": {"type": "object", "x-parser": "gemma4-tool-call"},
                        },
                    },
                },
            },
        },
    },
}
REPLACED = {
    "type": "object",
    "x-regex-substitutions": [[r"<b>(.*?)</b>", r"**\1**"]],
    "properties": {
        "content": {"type": "string"},
        "n": {"type": "integer", "x-regex": r"(\d+)"},
        "is": {"type": "boolean", "x-regex": "(true|false)"},
    },
}

SCHEMAS = [  # (schema, answer, reasoning, content, calls)
    (SCHEMA, "Yes.", "", "Yes.", []),
    (SCHEMA, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", []),
    (SCHEMA, f"<think>Hm.</think>Yes. {CALL}", "Hm.", "Yes.", [F]),
    (SCHEMA, f"{CALL}{CALL}", "", "", [F, F]),
    (SCHEMA, "", "", "", []),
    (NAMED, "<think>Hm.</think>Yes.", "Hm.", "Yes.", []),
    (NAMED, "Yes. <call>f <k>a</k><v>1</v><k>b</k><v>x</v></call>", "", "Yes. ",
     [["f", {"a": 1, "b": "x"}]]),
    (NAMED, "<call>f</call><call>g</call>", "", "", [["f", {}], ["g", {}]]),
    (CALL_OF_GEMMA, '<call>call:f{a:<|"|>x "y"<|"|>,b:[1,{c:true}]}</call>', "", "",
     [["f", {"a": 'x "y"', "b": [1, {"c": True}]}]]),
    (CALL_OF_GEMMA, "Hi", "", "Hi", []),
    (REPLACED, "<b>5</b> true", "", "**5** true", []),
]  # fmt: skip


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case[1][:24])
def test_schemas(case):
    spec, text, reasoning, content, calls = case
    wanted = {"reasoning": reasoning, "content": content, "calls": calls}
    assert read("response_schema", spec, ("f", "g"), "the prompt", text) == wanted


def test_the_types_of_a_schema():
    message = ResponseSchema(REPLACED).message("<b>5</b> true", lambda *_: None)
    assert message == {"content": "**5** true", "n": 5, "is": True}
    with pytest.raises(FormatError, match="does not match"):
        ResponseSchema({"x-regex": "^a$", "properties": {}}).message("b", lambda *_: None)
    with pytest.raises(FormatError, match="one group"):
        ResponseSchema({"x-regex": "(a)(b)", "properties": {}}).message("ab", lambda *_: None)
    query = {"x-parser": "json", "x-parser-args": {"transform": "[*].{name: a.b, kind: 'x'}"}}
    schema = ResponseSchema({"type": "object", "properties": {"calls": query}})
    found = schema.message('[{"a": {"b": 1}}, {"a": {}}]', lambda *_: None)
    assert found == {"calls": [{"name": 1, "kind": "x"}, {"name": None, "kind": "x"}]}
    query["x-parser-args"] = {"transform": "sort_by(@, &a)"}
    with pytest.raises(FormatError, match="not supported"):
        schema.message("[]", lambda *_: None)


@pytest.mark.parametrize(
    ("text", "name", "args", "value"),
    [
        (" a ", "text", {}, "a"),
        (" a ", "text", {"strip": False}, " a "),
        (" 1.5 ", "float", {}, 1.5),
        ("TRUE", "bool", {}, True),
        ("a: 1\n\nno\n b : 2:3 ", "kv-lines", {}, {"a": "1", "b": "2:3"}),
        ("a=1;b=2", "kv-lines", {"line_sep": ";", "kv_sep": "=", "value_parser": {"name": "int"}},
         {"a": 1, "b": 2}),
        ("<a>1</a><b>2</b><a>3</a>", "xml-inline",
         {"tag_pattern": r"<(?P<key>\w)>(?P<value>.*?)</", "merge_duplicates": True},
         {"a": ["1", "3"], "b": "2"}),
        ("text", "json", {"allow_non_json": True}, "text"),
        ("NaN", "json", {"allow_non_json": True}, "NaN"),
        ("[1e999, -1.5e400]", "json", {}, [sys.float_info.max, -sys.float_info.max]),
        ("{a : 'x', b:{c:1}}", "json",
         {"unquoted_keys": True, "string_delims": [["'", "'"]]}, {"a": "x", "b": {"c": 1}}),
    ],
)  # fmt: skip
def test_contents(text, name, args, value):
    assert content_of(text, name, args) == value


def test_transforms():
    values = {"content": [1], "name": "f"}
    assert transformed({"a": ["{name}", "x {name}", 1], "b": "{content}"}, values) == {
        "a": ["f", "x {name}", 1], "b": [1],
    }  # fmt: skip
    deep = "{name}"
    for _ in range(40):
        deep = [deep]
    with pytest.raises(FormatError, match="32 levels"):
        transformed(deep, values)


# ---- limits


@pytest.mark.parametrize(
    ("kind", "spec", "text"),
    [
        ("response_schema", {"properties": {"content": {"x-regex": "^(a+)+$"}}}, "a" * 60 + "b"),
        ("response_template", {"fields": {"content": {"close_pattern": "(a|a)*b"}}}, "a" * 60),
    ],
)
def test_a_pattern_that_takes_exponential_time_is_stopped(kind, spec, text):
    check(kind, spec)
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match=f"{kind}: it takes more than {MAX_SECONDS:g} s"):
        read(kind, spec, (), "", text)
    assert time.perf_counter() - begin < 20 * MAX_SECONDS
    assert read("response_template", CHATML, ("f",), "", "Yes.")["content"] == "Yes."


def test_memory_is_limited():
    spec = {"fields": {"content": {"open_pattern": "x" * 10}}}
    huge = {"properties": {"content": {"x-regex-substitutions": [["a", "b" * 10_000]]}}}
    assert read("response_template", spec, ("f",), "", "y")["content"] == ""
    with pytest.raises(ConfigError, match=r"MemoryError|MiB"):
        read("response_schema", huge, ("f",), "", "a" * 200_000)


def test_an_answer_of_many_regions_is_refused():
    text = CALL * 5000
    with pytest.raises(ConfigError, match="at most 4096 regions"):
        read("response_template", CHATML, ("f",), "", text)
    assert (
        len(read("response_template", CHATML, ("f",), "", "<think>" * 50_000)["reasoning"])
        > 300_000
    )


# ---- answers

NAMES = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "g": {}}


def answer(spec, text, size, names=NAMES, prompt=PROMPT):
    """Return (reasoning, content, calls) of an answer, as the server computes them."""
    readers = DeclaredReaders(("response_template", spec), prompt, names)
    thinker, tools = readers.reasoning(bool(names)), readers.tools()
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [*map(thinker.feed, pieces), thinker.finish()]
    thought = "".join(part[0] for part in parts)
    if not names:
        return thought, "".join(part[1] for part in parts), []
    events = [event for part in parts for event in tools.feed(part[1])]
    found = collect(events + tools.finish())
    return thought, found.content, [(call.name, call.arguments) for call in found.tool_calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_answers_in_pieces(size):
    text = f"<think>Hm.</think>I call.{CALL}"
    assert answer(CHATML, text, size) == ("Hm.", "I call.", [("f", '{"a": 1}')])
    assert answer(CHATML, "<think>Hm.</think>Yes", size, {}) == ("Hm.", "Yes", [])
    # A call that cannot be read, or of an unknown function, is content.
    for call in ("<call>{</call>", CALL.replace('"f"', '"h"'), "<call>", CALL[:-3]):
        found = ("Hm.", f"I call.{call}", [])
        assert answer(CHATML, f"<think>Hm.</think>I call.{call}", size) == found
    assert answer(CHATML, text, size, {}) == ("Hm.", f"I call.{CALL}", [])
    broken = {"fields": {"content": {"content": "int"}}}
    assert answer(broken, text, size) == ("", text, [])


def test_arguments_have_the_types_of_the_schema():
    spec = TAGS["fields"]["tool_calls"] | {
        "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</"}
    }
    spec = {"fields": {"tool_calls": spec, "content": {}}}
    text = "<call><function=f><a>1</a><s>1</s><other>é</other></call>"
    assert answer(spec, text, 50)[2] == [("f", '{"a": 1, "s": "1", "other": "é"}')]


def test_calls_are_bounded():
    text = '<call>{"name": "g"}</call>' * (MAX_CALLS + 1)
    _, content, calls = answer(CHATML, text, 1000)
    assert (content, len(calls)) == ('<call>{"name": "g"}</call>', MAX_CALLS)
    buffered = {"fields": CHATML["fields"] | {"other": {"open_pattern": "<other>"}}}
    assert answer(buffered, text, 1000) == ("", text, [])
    deep = "[" * 70 + "]" * 70
    text = f'<call>{{"name": "f", "arguments": {{"x": {deep}}}}}</call>'
    assert answer(CHATML, text, 1000) == ("", text, [])


# ---- streaming


def whole(spec, text, prompt, names):
    found = read("response_template", spec, names, prompt, text)
    calls = [(name, json.dumps(arguments)) for name, arguments in found["calls"]]
    return found["reasoning"], found["content"], calls


STREAMED = [case for case in TEMPLATES if Regions.of("response_template", case[0]) is not None]


@pytest.mark.parametrize("case", STREAMED, ids=lambda case: case[2][:24])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_streamed_answers_are_those_read_at_once(case, size):
    spec, prompt, text, *_ = case
    names = {"f": {}, "g": {}}
    assert answer(spec, text, size, names, prompt) == whole(spec, text, prompt, names)
    assert answer(spec, text, size, {}, prompt) == whole(spec, text, prompt, {})


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("content", [{"content": {"content_args": {"strip": False}}}, {}])
def test_white_space_of_damaged_calls_is_that_of_content(content, size):
    """Which the template may keep, or have no field for."""
    spec = {"fields": {"tool_calls": CHATML["fields"]["tool_calls"]} | content}
    text = "<call>{ "
    assert answer(spec, text, size, {}) == whole(spec, text, PROMPT, {}) == ("", text, [])


@pytest.mark.parametrize("size", [1, 1000])
def test_one_of_two_fields_of_reasoning_is_read(size):
    marks = {"thinking": ("<t>", "</t>"), "reasoning": ("<r>", "</r>")}
    fields = {name: {"open": opens, "close": ends} for name, (opens, ends) in marks.items()}
    spec = {"fields": {"content": {}} | fields}
    text = "<r>second</r><t>first</t>Yes"
    want = ("first", "Yes", [])
    assert answer(spec, text, size, {}) == whole(spec, text, PROMPT, {}) == want


def test_which_templates_are_streamed():
    assert len(STREAMED) > 20
    content = {"content": {}}
    for fields, is_streamed in (
        (content, True),
        (content | {"x": {"open": ["<x>", "<y>"], "close": "eos"}}, True),
        (content | {"x": {"open_pattern": "<x>"}}, False),
        (content | {"x": {"open": "<x>"}, "y": {"open": "<x>>"}}, False),
        (content | {"x": {"open": "<x>"}, "y": {"open": "<x>"}}, False),
        (content | {"x": {"open": "<x>", "optional": False}}, False),
        (content | {"thinking": {"open": "<t>"}, "reasoning": {"open": "<r>"}}, False),
        ({"content": {"content": "int"}}, False),
        ({"content": {"open": "<c>", "repeats": True}}, False),
    ):
        regions = Regions.of("response_template", {"fields": fields})
        assert (regions is not None) == is_streamed, fields
    anchored = {"fields": content, "start_anchor_pattern": "<a>"}
    assert Regions.of("response_template", anchored) is None
    assert Regions.of("response_schema", SCHEMA) is None


def test_text_is_passed_on_as_it_arrives():
    readers = DeclaredReaders(("response_template", CHATML), PROMPT, NAMES)
    thinker, tools = readers.reasoning(True), readers.tools()
    texts = [
        "<thi",
        "nk>Hm",
        ".\n</",
        "think>",
        "\nI ca",
        "ll",
        " <ca",
        'll>{"name": ',
        '"f"}',
        "</call>",
    ]
    parts = [thinker.feed(text) for text in texts]
    assert [part[0] for part in parts] == ["", "Hm", ".", *[""] * 7]
    events = [tools.feed(part[1]) for part in parts]
    assert [e for es in events[:7] for e in es] == [TextDelta("I ca"), TextDelta("ll")]
    assert [type(event) for event in events[-1]] == [ToolCallStart, ToolCallDelta, ToolCallEnd]


FRAGMENTS = [
    "<think>", "</think>", "<call>", "</call>", "<|im_end|>", '{"name": "f"}', '{"name": "h"}',
    "{", "Hm", " ", "\n", "<", "<ca", CALL,
]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join),
    st.sampled_from(["", "<think>\n", "<think></think>\n", "Yes "]),
    st.integers(1, 9),
    st.booleans(),
)
def test_streaming_agrees_with_reading_at_once(text, begun, size, has_tools):
    names = {"f": {}} if has_tools else {}
    prompt = PROMPT + begun
    assert answer(CHATML, text, size, names, prompt) == whole(CHATML, text, prompt, names)


def test_the_end_of_a_prompt_is_no_part_of_the_answer():
    for begun, text, wanted in (
        ("Yes <", "b", "b"),
        ("Yes <ca", "", ""),
        ("<", "think>", "think>"),
    ):
        for names in (NAMES, {}):
            assert answer(CHATML, text, 3, names, PROMPT + begun) == ("", wanted, [])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_the_prompt_begins(size):
    """As one that the answer continues: only what the answer adds is ever content."""
    prompt = PROMPT + 'Yes<call>{"'
    rest, damaged = 'name": "f"}</call>', "x</call>Hi"
    names = {"f": {}}
    assert answer(CHATML, rest, size, names, prompt) == ("", "", [("f", "{}")])
    for text, known in ((rest, {}), (damaged, names), (damaged, {}), ("x", names)):
        assert answer(CHATML, text, size, known, prompt) == ("", text, [])
        assert whole(CHATML, text, prompt, known) == ("", text, [])


def test_streaming_takes_linear_time():
    for one in ("<think>", "<call>", "</call>", " ", "<", "x ", CALL):
        begin = time.process_time()
        answer(CHATML, one * (200_000 // len(one)), 16)
        assert time.process_time() - begin < 3


# ---- which models use theirs


def test_a_known_format_of_the_template_is_preferred():
    declared = ("response_template", CHATML)
    for tools, thoughts, is_used in (
        (None, None, True),
        (None, "qwen3", True),
        ("hermes", None, True),
        ("hermes", "qwen3", False),
    ):
        found = response_template.chosen(declared, tools, thoughts)
        assert found == (declared if is_used else None)
    assert response_template.chosen(("response_template", EACH), "cohere", None) is None
    assert response_template.chosen(None, None, None) is None


def test_an_invalid_format_is_logged_and_not_used(caplog):
    with caplog.at_level(logging.WARNING):
        assert response_template.chosen(("response_template", {"fields": 3}), None, None) is None
    assert "response_template: fields must be an object" in caplog.text


# ---- over HTTP

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson if tools else '' }}<|im_start|>assistant\n"
)
ENDLESS = {"fields": {"content": {"close_pattern": "(a|a)*b"}}}
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def client_of(spec, said):
    client = ScriptedClient(TEMPLATE, lambda *_: said)
    client.tokenizer.response_format = ("response_template", spec)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_chat(stream):
    with serve(lambda: client_of(CHATML, f"<think>Hm.</think>I call.{CALL}")) as server:
        body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOL, "stream": stream}
        with httpx.Client(base_url=server.url, timeout=20) as http:
            answer = http.post("/v1/chat/completions", json=body)
        if stream:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [json.loads(line)["choices"][0] for line in lines]
            deltas = [choice["delta"] for choice in choices]
            thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
            content = "".join(delta.get("content") or "" for delta in deltas)
            calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            arguments = "".join(call["arguments"] for call in calls)
            assert choices[-1]["finish_reason"] == "tool_calls"
        else:
            [choice] = answer.json()["choices"]
            message = choice["message"]
            thought, content = message["reasoning_content"], message["content"]
            arguments = message["tool_calls"][0]["function"]["arguments"]
            assert choice["finish_reason"] == "tool_calls"
        assert (thought, content, arguments) == ("Hm.", "I call.", '{"a": 1}')


def test_an_endless_pattern_holds_no_other_request_up():
    with serve(lambda: client_of(ENDLESS, "a" * 60)) as server:
        body = {"messages": [{"role": "user", "content": "?"}]}
        with httpx.Client(base_url=server.url, timeout=30) as http:
            [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
            assert choice["message"]["content"] == "a" * 60
            assert http.get("/health").status_code == 200


def test_the_service_says_which_format_it_uses():
    service = ChatService(client_of(CHATML, ""))
    assert service.tool_parser == service.reasoning_parser == "response_template"
    service = ChatService(client_of(CHATML, ""), tool_parser="hermes")
    assert (service.tool_parser, service.reasoning_parser) == ("hermes", None)


def test_compiled_templates_are_those_of_the_module():
    assert ResponseTemplate(CHATML).begun(PROMPT + "x") == "x"
    assert ResponseTemplate(EACH).begun(PROMPT) == ""
