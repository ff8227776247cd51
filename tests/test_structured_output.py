"""`StructuredOutput`: one field, of bounded size, as plain data."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from engine import SamplingParams
from engine.errors import RequestError, UnknownOptionError
from engine.structured.spec import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    StructuredOutput,
    structured_output_of,
)


def _nested(depth):
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"json": {"type": "object", "title": "é"}}, '{"type":"object","title":"é"}'),
        ({"json": ' {"type": "object"} '}, ' {"type": "object"} '),
        ({"json": "true"}, "true"),
        ({"json": _nested(MAX_SCHEMA_DEPTH)}, _nested(MAX_SCHEMA_DEPTH)),
        ({"json": json.dumps({"const": '"[{\\' * 200})}, json.dumps({"const": '"[{\\' * 200})),
        ({"regex": "a|b"}, "a|b"),
        ({"choice": ["b", "a", "b"]}, ("b", "a")),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
        ({"json_object": True}, True),
    ],
)
def test_what_is_kept(fields, kept):
    ((name, _),) = fields.items()
    structured = StructuredOutput(**fields)
    assert structured.kind == name and getattr(structured, name) == kept
    assert structured_output_of(fields) == structured and hash(structured)
    assert SamplingParams(structured=fields) == SamplingParams(structured=structured)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, structural_tag, json_object; got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "json": {}}, "got json and regex"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"),
        ({"json_object": 1}, "json_object must be True or False; got 1"),
        ({"json": 5}, "json must be a str or a dict; got 5"),
        ({"json": []}, "json must be a str or a dict"),
        ({"json": "[]"}, "json must be a JSON schema, an object"),
        ({"json": ""}, f"json must have 1 to {MAX_SCHEMA_CHARS} characters; got 0"),
        ({"json": "{"}, "json must be a JSON schema; got '{'"),
        ({"json": '{"a": NaN}'}, "NaN is no JSON"),
        ({"json": {"a": float("inf")}}, "it cannot be written"),
        ({"json": {"a": object()}}, "it cannot be written"),
        ({"json": {("a",): 1}}, "it cannot be written"),
        ({"json": "\ud800"}, "json must be valid Unicode"),
        ({"json": _nested(MAX_SCHEMA_DEPTH + 1)}, f"at most {MAX_SCHEMA_DEPTH} objects"),
        ({"json": "[" * 10**5}, f"at most {MAX_SCHEMA_DEPTH} objects"),
        ({"json": {"a": "x" * MAX_SCHEMA_CHARS}}, f"at most {MAX_SCHEMA_CHARS} characters"),
        ({"regex": ""}, "regex must have 1 to"),
        ({"regex": b"a"}, "regex must be a str"),
        ({"regex": "a" * (MAX_REGEX_CHARS + 1)}, "regex must have 1 to"),
        ({"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "grammar must have 1 to"),
        ({"choice": []}, "choice must not be empty"),
        ({"choice": "yes"}, "choice must be a sequence of str"),
        ({"choice": ["a", ""]}, r"choice\[1\] must have 1 to"),
        ({"choice": ["a", 1]}, r"choice\[1\] must be a str"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"at most {MAX_CHOICES} entries"),
        ({"choice": [f"{i:01000}" for i in range(300)]}, "characters in total; got 300000"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        StructuredOutput(**fields)


def test_a_dict_that_contains_itself_is_refused():
    schema = {}
    schema["a"] = schema
    with pytest.raises(RequestError, match="it cannot be written"):
        StructuredOutput(json=schema)


def test_no_more_of_a_dict_is_written_than_fits():
    start = time.process_time()
    part = ["x" * 1000] * 1000
    with pytest.raises(RequestError, match="at most"):
        StructuredOutput(json={"a": [part] * 10**6})
    assert time.process_time() - start < 2


def test_names():
    with pytest.raises(UnknownOptionError, match="did you mean 'regex'"):
        StructuredOutput(regx="a")
    with pytest.raises(UnknownOptionError, match="did you mean 'choice'"):
        SamplingParams(structured={"choices": ["a"]})
    with pytest.raises(RequestError, match="structured must be a StructuredOutput or a mapping"):
        SamplingParams(structured="a")
    with pytest.raises(RequestError, match="structured must be a StructuredOutput or a mapping"):
        SamplingParams(structured={1: "a"})


def test_importing_engine_does_not_import_the_library():
    code = "import sys, engine, engine.llm_engine; print('llguidance' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
