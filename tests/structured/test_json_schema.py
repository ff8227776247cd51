"""Which texts a JSON schema allows: right values for each group of keywords, over the real path."""

from __future__ import annotations

import json

import pytest

from engine.server.protocol.tools import tools_schema
from engine.server.tool_parsers import Function
from engine.structured import check_worker, sources
from engine.structured.grammar import check_structured
from engine.structured.spec import StructuredOutput
from tests.json_schema_suite import _library, accepts, compiled

pytest.importorskip("llguidance")

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
STEPS = (("next", 1), ("far", 7), ("again", 0))
TREE = {
    "$id": "http://example.com/tree",
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/a~1b~0c%25"}, "left": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"a/b~c%": {"type": "integer"}},
}

# Schema, texts that are valid for it, and texts that are not.
CASES = {
    "any-type": ({"maximum": 3}, ['"a"', "3", "null", "{}"], ["4"]),
    "true": (True, ["1", "{}"], ["a"]),
    "boolean": ({"properties": {"a": False}}, ["{}", '{"b":1}', "1"], ['{"a":1}']),
    "recursion": (TREE, ['{"value":1}', '{"value":1,"left":{"value":2}}'], ['{"value":"a"}']),
    "recursion-below": (TREE, [], ['{"value":1,"left":{}}', '{"value":1,"left":{"value":""}}']),
    "anchor": (
        {"items": {"$ref": "#n"}, "$defs": {"a": {"$anchor": "n", "type": "null"}}},
        ["[null]", "1"],
        ["[1]"],
    ),
    "base": (
        {
            "$id": "http://example.com/a/root.json",
            "items": {"$ref": "b/item.json"},
            "$defs": {
                "item": {
                    "$id": "b/item.json",
                    "$ref": "other.json#/$defs/x",
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                },
                "other": {"$id": "b/other.json", "$defs": {"x": {"type": "boolean"}}},
            },
        },
        ["[true]"],
        ["[1]"],
    ),
    "base-of-a-urn": (
        {"$id": "urn:a:b", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": POINT}},
        ["[{}]"],
        ["[1]"],
    ),
    "names-of-keywords": (
        {
            "properties": {"$ref": {"type": "integer"}, "$id": {"const": {"$ref": "#/nothing"}}},
            "default": {"$ref": "#/nothing"},
            "examples": [{"$ref": "http://example.com"}],
        },
        ['{"$ref":1,"$id":{"$ref":"#/nothing"}}'],
        ['{"$ref":"a"}', '{"$id":1}'],
    ),
    "siblings-of-a-reference": (
        {"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": {"type": "string"}}},
        ['"ab"'],
        ['"abc"', "1"],
    ),
    "draft-7-ignores-them": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": {"$ref": "#/definitions/s", "maxLength": 2},
            "definitions": {"s": {"type": "string"}},
        },
        ['["abc"]'],
        ["[1]"],
    ),
    "all-of": ({"allOf": [POINT, {"required": ["x"]}]}, ['{"x":1}'], ["{}", '{"x":1,"y":1}']),
    "one-of": (
        {"oneOf": [{"minimum": 2}, {"maximum": 4}], "type": "integer"},
        ["1", "5"],
        ["2", "4"],
    ),
    "one-of-whose-options-repeat-a-value": (
        {"oneOf": [{"anyOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, {"enum": ["c", "d"]}]},
        ['"a"', '"b"', '"d"'],
        ['"c"'],
    ),
    "discriminator": (
        {
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "n": {}}, "required": ["kind"]},
                {"properties": {"kind": {"const": "b"}}, "required": ["kind", "m"]},
            ]
        },
        ['{"kind":"a"}', '{"kind":"b","m":1}'],
        ['{"kind":"b"}', "{}"],
    ),
    "not": (
        {"type": ["string", "null"], "not": {"enum": ["ab", None]}},
        ['"a"', '"abc"', '""'],
        ['"ab"', "null"],
    ),
    "not-required": (
        {"type": "object", "not": {"required": ["a"]}},
        ["{}", '{"b":1}'],
        ['{"a":1}'],
    ),
    "if": (
        {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "integer"}},
        ['"ab"', "1"],
        ['"a"', "null"],
    ),
    "if-for-each-of-many": (
        {
            "type": "object",
            "properties": {"kind": {"enum": list(range(30))}},
            "required": ["kind"],
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": i}}},
                    "then": {"required": [f"p{i}"]},
                }
                for i in range(30)
            ],
        },
        ['{"kind":1,"p1":0}', '{"kind":29,"p29":0}'],
        ['{"kind":1,"p2":0}', '{"kind":30}', "{}"],
    ),
    "dialect-of-openapi": (
        {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "prefixItems": [POINT]},
        ["[{}]"],
        ["[1]"],
    ),
    "dependent-required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b":1}', '{"a":1,"b":1}'],
        ['{"a":1}'],
    ),
    "dependent-schemas": (
        {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": False}}}},
        ['{"a":1}', '{"b":1}'],
        ['{"a":1,"b":1}'],
    ),
    "property-names": (
        {"type": "object", "propertyNames": {"maxLength": 2}},
        ['{"ab":1}', "{}"],
        ['{"abc":1}'],
    ),
    "property-count": (
        {
            "properties": {"a": {}, "b": {}},
            "type": "object",
            "minProperties": 1,
            "additionalProperties": False,
        },
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ["{}"],
    ),
    "unevaluated-properties": (
        {
            "type": "object",
            "properties": {"a": {}},
            "anyOf": [{"properties": {"b": {"type": "null"}}, "required": ["b"]}, True],
            "unevaluatedProperties": False,
        },
        ['{"a":1}', '{"a":1,"b":null}'],
        ['{"b":1}', '{"c":1}'],
    ),
    "unevaluated-items": (
        {
            "type": "array",
            "prefixItems": [True],
            "allOf": [{"prefixItems": [True, {"const": 1}]}],
            "unevaluatedItems": False,
        },
        ["[0,1]", "[]"],
        ["[0,0]", "[0,1,0]"],
    ),
    "contains-nothing": (
        {"type": "array", "not": {"contains": {"type": "null"}}},
        ["[1]", "[]"],
        ["[1,null]"],
    ),
    "pattern-without-quotes": (
        {"type": "string", "pattern": r'^[^"\\]+$'},
        ['"a"', r'"\n/"'],
        [r'"\""', r'"\\"', r'"a\"b"'],
    ),
    "pattern-without-a-dash": (
        {"type": "string", "pattern": r"^[^-+]+[-a]$"},
        ['"a-"', r'"\"a"'],
        ['"-a"', '"+a"', '"a+"'],
    ),
    "pattern-of-control-characters": (
        {"type": "string", "pattern": r"^[\x00-\x1F]$"},
        [r'"\n"', r'"\u001F"'],
        [r'"\""', r'"\\"', '"a"'],
    ),
    "pattern-without-a-property": (
        {"type": "string", "pattern": r"^\P{Po}[\P{Po}]$"},
        ['"ab"', r'"\n-"'],
        [r'"\"a"', r'"a\""', r'"a\\"', '"a!"'],
    ),
    "constants-that-are-excluded": (
        {"type": "string", "not": {"enum": ['"', "a\\"]}},
        [r'"\"\""', r'"\\"', r'"a\""', '""', '"b"'],
        [r'"\""', r'"a\\"'],
    ),
    "look-ahead-of-a-quote": (
        {"type": "string", "pattern": r'^(?!")(?![^a]*$)[\s\S]*$'},
        ['"a"', r'"\\a\""'],
        [r'"\"a"', r'"b\""', r'"\u0000"'],
    ),
    "look-ahead-of-negated-classes": (
        {"type": "string", "pattern": r"^(?!\D)(?!\S+$)[\s\S]*$"},
        ['"5 a"', '"5\u00a0"'],
        ['"a b"', '"^ b"', '"5"', '"5a"', r'"\u0000 "'],
    ),
    "look-ahead-of-any-character": (
        {"type": "string", "pattern": r"^(?!.)[\s\S]*$"},
        ['""', r'"\na"'],
        ['"a"', '"^"', r'"\"\n"'],
    ),
    "names-without-quotes": (
        {"patternProperties": {'^[^"]+$': {"type": "null"}}, "additionalProperties": False},
        ['{"a":null}'],
        [r'{"\"":null}', r'{"a\"b":null}'],
    ),
    "pattern": ({"type": "string", "pattern": r"^.\s\/$"}, ['"a\u00a0/"'], ['"\\r /"', '"a/"']),
    "look-ahead-of-an-email": (
        {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([\w'+\-\.]*)[\w+-]@([a-z]+\.)+[a-z]{2,}$",
        },
        ['"a.b@c.de"'],
        ['".a@c.de"', '"a..b@c.de"', '"a.@c.de"', '"a"'],
    ),
    "look-ahead-of-a-decimal": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ['"-1.5"', '".5"', '"01"'],
        ['"+."', '""', '"-"', '"a"'],
    ),
    "look-ahead-of-a-password": (
        {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{3,}$"},
        ['"aB1"', '"1Bc"'],
        ['"ab1"', '"aBc"', '"B1"'],
    ),
    "look-ahead-for-a-character": (
        {"type": "string", "pattern": r"^(?!.*a)(?!b)(?![cd]+$)[\s\S]*$"},
        ['"e"', '"ce"', '"cb"', '""', r'"c\na"'],
        ['"ea"', '"bc"', '"cd"'],
    ),
    "pattern-properties": (
        {
            "properties": {"ab": {"minimum": 1}},
            "patternProperties": {"^a": {"type": "integer"}},
            "additionalProperties": False,
        },
        ['{"ab":1,"ac":0}'],
        ['{"ab":0}', '{"ab":"a"}', '{"c":1}'],
    ),
    "spelling-of-names": (
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        ['{"a":1,"b":"x"}'],
        [r'{"\u0061":"x"}'],
    ),
    "whole-counts": ({"maxLength": 2.0, "minItems": 1.0}, ['"ab"', "[1]"], ['"abc"', "[]"]),
    "trivial-counts": (
        {
            "minLength": 0,
            "minItems": 0,
            "minProperties": 0,
            "uniqueItems": False,
            "additionalItems": False,
        },
        ['""', "[1,1]", "{}"],
        [],
    ),
    "annotations": (
        {
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            "readOnly": True,
            "writeOnly": True,
            "$comment": "c",
            "contentMediaType": "text/html",
            "nullable": True,
            "x-order": 1,
            "format": "password",
            "type": "string",
        },
        ['"a"'],
        ["null", "1"],
    ),
    "open-below": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.5", "0.001"],
        ["0", "-0", "0.0", "0.51"],
    ),
    "open-above": (
        {"type": "number", "minimum": -3.5, "exclusiveMaximum": -3},
        ["-3.5", "-3.01"],
        ["-3", "-3.0", "-4"],
    ),
    "constant-names-beside-properties-and-patterns": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {"^a": {"maximum": 9}, "b": {"minimum": 3}},
            "propertyNames": {"enum": ["a", "ab", "c"]},
        },
        ["{}", '{"a":1,"ab":4}', '{"ab":"a"}', '{"c":0}'],
        ['{"a":10}', '{"a":0.5}', '{"ab":1}', '{"ab":10}', '{"d":1}'],
    ),
    "a-property-that-no-integer-fits": (
        {
            "items": {
                "type": "object",
                "properties": {"c": {"type": "integer", "exclusiveMinimum": 1, "maximum": 1.5}},
                "required": ["c"],
            },
            "type": "array",
        },
        ["[]"],
        ["[{}]", '[{"c":1}]', '[{"c":1.2}]', "[1]"],
    ),
    "constant-names-beside-lengths": (
        {"type": "object", "propertyNames": {"enum": ["a", "abc"], "maxLength": 2}},
        ["{}", '{"a":1}'],
        ['{"abc":1}'],
    ),
    "days-of-a-calendar": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"1900-02-28"', '"2023-12-31"'],
        ['"2023-02-29"', '"1900-02-29"', '"2100-02-29"', '"2024-02-30"', '"2023-04-31"'],
    ),
    "seconds-of-a-minute": (
        {"anyOf": [{"format": "date-time"}, {"format": "time"}], "type": "string"},
        ['"2024-02-29T23:59:59Z"', '"2023-01-01T00:00:00.5+01:30"', '"23:59:59Z"', '"00:00:00Z"'],
        ['"2023-02-29T23:59:59Z"', '"2023-01-01T10:20:60Z"', '"10:20:60Z"', '"23:59:60Z"'],
    ),
    "a-constant-date": (
        {"enum": ["2023-02-29", "2024-02-29"], "format": "date"},
        ['"2024-02-29"'],
        ['"2023-02-29"'],
    ),
    "decimals-of-a-multiple": (
        {"type": "number", "multipleOf": 0.25, "exclusiveMinimum": -1},
        ["0.5", "0.50", "-0.5", "-0.25", "1.75", "3", "3.0"],
        ["0.1", "0.2", "0.05", "-1.5", "-1"],
    ),
    "decimals-of-eighths": ({"multipleOf": 0.125}, ["0.5", "0.75", "0.625", "2"], ["0.2", "0.55"]),
    "large-integers": (
        {"type": "integer", "maximum": 9223372036854775807},
        ["1"],
        ["9223372036854775808"],
    ),
    "draft-4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "minimum": 1,
            "exclusiveMinimum": True,
            "type": "integer",
        },
        ["2"],
        ["1"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_valid_texts_are_allowed_and_no_others(name):
    schema, valid, invalid = CASES[name]
    matcher, why = compiled(schema)
    assert why == ""
    for text in valid:
        assert accepts(matcher, text), text
        assert accepts(matcher, json.dumps(json.loads(text), ensure_ascii=False, indent=1)), text
    for text in invalid:
        assert not accepts(matcher, text), text


@pytest.mark.parametrize(
    "rules",
    [
        {"patternProperties": {"^[cd]$": {"maximum": 9}}, "additionalProperties": False},
        {"propertyNames": {"pattern": "^[cd]$"}},
    ],
)
@pytest.mark.parametrize(
    ("properties", "required", "names"),
    [("cd", "", "cd"), ("dc", "", "dc"), ("c", "d", "cd"), ("", "dc", "dc")],
)
def test_names_that_all_have_schemas_leave_no_comma(properties, required, names, rules):
    """After it no name could follow: the request would end with an error."""
    properties = {name: {"type": "integer"} for name in properties}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    matcher, why = compiled(schema | rules)
    assert why == ""
    text = "{" + ",".join(f'"{name}":1' for name in names)
    assert accepts(matcher, text + "}")
    assert accepts(matcher, text + "0}") == ("propertyNames" in rules)
    assert matcher.deep_copy().try_consume_tokens(list(f"{text},".encode())) == len(text)


def test_names_that_a_pattern_has_beside_those_with_schemas_are_allowed():
    schema = {
        "type": "object",
        "properties": {"c": {"type": "integer"}},
        "patternProperties": {"^[cd]$": {"maximum": 9}},
        "additionalProperties": False,
    }
    matcher, _ = compiled(schema)
    assert accepts(matcher, '{"c":1,"d":9}')
    assert not accepts(matcher, '{"c":10}') and not accepts(matcher, '{"c":1,"d":10}')


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced (at #)"),
        ({"items": {"contains": {"const": 1}}}, "contains cannot be enforced (at #/items)"),
        ({"type": "string", "not": {"pattern": "a"}}, "the negation of pattern"),
        ({"$ref": "http://example.com/s"}, "remote schemas are not fetched (at #)"),
        ({"items": {"$ref": "#/$defs/a"}}, "refers to nothing in the schema (at #/items)"),
        ({"items": {"$ref": "#a"}}, "has no such anchor"),
        ({"$id": "http://a.b/c", "$ref": "http://[x"}, "'http://[x' is no URI"),
        ({"allOf": [{"$ref": "#"}]}, "refers to itself without an object or array between"),
        ({"required": "a"}, "required must be a list of names; got 'a'"),
        ({"minLength": -1}, "minLength must be a whole number; got -1"),
        ({"properties": {"a": 1}}, "a schema must be an object or a boolean; got 1"),
        ({"$schema": "http://example.com/my"}, "$schema must be a draft of JSON Schema"),
        ({"minimum": 10**400}, "numbers beyond 9223372036854774784 cannot be enforced"),
        ({"const": 2**53 + 1}, "the constant 9007199254740993 cannot be enforced"),
        ({"allOf": [{"anyOf": [{"minimum": i}, {"maxLength": i}]} for i in range(14)]}, "n 4096"),
        ({"items": {"pattern": r"\Aa"}}, r"\A cannot be enforced"),
        ({"type": "string", "pattern": "^(?=a)?b"}, "look-around"),
        ({"type": "string", "pattern": "^(?=a)b|c"}, "look-around"),
        ({"type": "string", "pattern": "^(?!ab)c"}, "look-around"),
        (
            {
                "$dynamicRef": "#d",
                "$defs": {"a": {"$id": "a", "$dynamicAnchor": "d"}, "b": {"$dynamicAnchor": "d"}},
            },
            "several resources have this $dynamicAnchor",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_with_its_place(schema, why):
    matcher, found = compiled(schema)
    assert matcher is None and why in found


def test_references_of_a_tool_mean_its_own_schema():
    """Two tools may have equal names of definitions, anchors and ids."""

    def nested(kind):
        return {
            "$id": "http://example.com/tool",
            "type": "object",
            "properties": {
                "item": {"$ref": "#/$defs/Item"},
                "by_anchor": {"$ref": "#item"},
                "by_id": {"$ref": "http://example.com/tool#/$defs/Item"},
                "again": {"$ref": "#"},
            },
            "additionalProperties": False,
            "$defs": {"Item": {"$anchor": "item", "type": kind}},
        }

    tools = [Function("one", nested("integer")), Function("two", nested("string"))]
    matcher, why = compiled(tools_schema(tools, one_call=False))
    assert why == ""
    for key in ("item", "by_anchor", "by_id"):
        for name, good, bad in (("one", 1, "a"), ("two", "a", 1)):
            for value, is_valid in ((good, True), (bad, False)):
                for arguments in ({key: value}, {"again": {"again": {key: value}}}):
                    call = {"name": name, "arguments": arguments}
                    assert accepts(matcher, json.dumps([call, call])) == is_valid, call
    assert not accepts(matcher, json.dumps([{"name": "one", "arguments": {"again": [call]}}]))


def test_a_refusal_names_the_tool():
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}
    tools = [Function("a", {"type": "object"}), Function("b", parameters, "tools[1]")]
    schema = tools_schema(tools, one_call=True)
    assert "(at tools[1]#/properties/a)" in compiled(schema)[1]


def test_what_is_no_constraint_is_named(caplog):
    schema = {"type": "string", "format": "password", "nullable": True, "pattren": "a", "x-a": 1}
    schema["required"] = True
    check_structured(StructuredOutput(json=schema))
    assert [record.getMessage() for record in caplog.records] == [
        "structured: json: nullable is an annotation; it is not enforced",
        "structured: json: 'pattren' is no keyword of JSON Schema; it is not enforced",
        "structured: json: a boolean required is no list of names; it is not enforced",
        "structured: json: format 'password' is an annotation; it is not enforced",
    ]


@pytest.mark.parametrize("required", [False, True], ids=["optional", "required"])
def test_an_object_of_a_thousand_properties(required):
    names = [f"property_{i}" for i in range(1000)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    matcher, why = compiled(schema | ({"required": names} if required else {}))
    assert why == ""
    given = names if required else names[3::500]
    assert accepts(matcher, json.dumps(dict.fromkeys(given, 1)))
    assert not accepts(matcher, json.dumps(dict.fromkeys(given, "a")))


def test_definitions_that_refer_to_each_other_in_a_long_cycle():
    """As in the schemas of large APIs; the engine compiles them on a stack of its own."""
    count = 300
    definitions = {
        str(i): {
            "type": "object",
            "properties": {key: {"$ref": f"#/$defs/{(i + by) % count}"} for key, by in STEPS},
            "additionalProperties": False,
        }
        for i in range(count)
    }
    schema = {"$ref": "#/$defs/0", "$defs": definitions}
    matcher, why = compiled(schema)
    assert why == ""
    assert accepts(matcher, '{"next":{"far":{"next":{}}}}')
    assert not accepts(matcher, '{"next":{"far":{"next":1}}}')
    ours = json.loads(_answered(schema)[1])
    assert len(ours["$defs"]) == count  # not one for each reference


def test_too_many_alternatives_are_found_when_compiling(monkeypatch):
    names = {f"property_{i}": {"type": "string"} for i in range(40)}
    schema = {"type": "array", "items": {"type": "object", "properties": names}}
    assert _answered(schema)[0] == ""
    monkeypatch.setitem(sources._LIMITS, "max_items_in_row", 100)
    assert "Current row has 167 items; max is 100" in _answered(schema)[0]


def _answered(schema):
    """Return the worker's answer, computed in this process."""
    module, tokenizer = _library()
    return check_worker._answer(module, tokenizer, "json_schema", json.dumps(schema))
