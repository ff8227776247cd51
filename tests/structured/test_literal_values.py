"""Objects as Gemma's literals: what the grammar allows is what the format's readers understand."""

from __future__ import annotations

import json

import jsonschema
import pytest

from engine.errors import RequestError
from engine.server.response_template.contents import lax_json
from engine.server.tool_parsers import collect, get
from engine.structured.grammar import check_structured
from engine.structured.spec import StructuredOutput
from tests.server.call_walks import MarkerTokens, compiled, walk

pytest.importorskip("llguidance")

QUOTE = '<|"|>'
MARKERS = get("gemma4").markers
TREE = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "pattern": "^[a-zé漢]{1,4}$"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
    },
    "required": ["label"],
    "additionalProperties": False,
}
RICH = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/Tree"},
        "counts": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 2}},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}],
            "items": {"type": "null"},
            "minItems": 1,
            "maxItems": 3,
        },
        "kind": {"enum": ["a:b", 'say "x"', 7, None, {"z": ["é"], "a": 1}, []]},
        "ödd key": {"type": "number", "exclusiveMinimum": 0, "maximum": 5},
        "codes": {
            "type": "object",
            "patternProperties": {"^x_[0-9]$": {"type": "boolean"}},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        "either": {
            "anyOf": [
                {"type": "string", "minLength": 2},
                {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            ]
        },
    },
    "required": ["pair", "tree"],
    "additionalProperties": False,
    "$defs": {"Tree": TREE},
}


def form_of(schema, begin=QUOTE, end=QUOTE, *, repeats_others=False):
    return {
        "type": "literal_values",
        "json_schema": schema,
        "begin": begin,
        "end": end,
        "repeats_others": repeats_others,
    }


def allows(schema, text, **options):
    tokens = MarkerTokens((), are_special=False)
    matcher = compiled(form_of(schema, **options), tokens).new_state().matcher
    ids = list(text.replace("|", QUOTE).encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def closed(**properties):
    return {"type": "object", "properties": properties, "additionalProperties": False}


def array(**rules):
    return closed(a={"type": "array", "items": {"type": "integer"}} | rules)


INTEGER = {"type": "integer"}
FIRSTS = [{"type": "integer"}, {"type": "boolean"}]
SCALARS = closed(b=INTEGER, a={"type": "string"}, C={"type": "boolean"})
NEEDED = SCALARS | {"required": ["b"]}
MAP = closed(m={"type": "object", "additionalProperties": INTEGER})
COUNTED = closed(
    m={"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3}
)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            SCALARS,
            ["{}", "{a:|x|}", "{a:|x|,b:1}", "{a:||,b:-1,C:true}", "{b:0,C:false}"],
            ["", "{b:1,a:|x|}", '{a:"x"}', "{a:|x|,}", "{,b:1}", "{a:|x|b:1}", "{d:1}", "{a:1}"],
        ),
        (NEEDED, ["{b:1}", "{a:|x|,b:1}", "{b:1,C:true}"], ["{}", "{a:|x|}", "{C:true}"]),
        (array(), ["{a:[]}", "{a:[1]}", "{a:[1,2,3]}"], ["{a:[1,]}", "{a:[,1]}", "{a:[|x|]}"]),
        (array(minItems=2, maxItems=3), ["{a:[1,2]}", "{a:[1,2,3]}"], ["{a:[1]}", "{a:[1,2,3,4]}"]),
        (array(maxItems=0), ["{a:[]}"], ["{a:[1]}"]),
        (
            array(prefixItems=FIRSTS),
            ["{a:[]}", "{a:[1]}", "{a:[1,true]}", "{a:[1,true,5,6]}"],
            ["{a:[true]}", "{a:[1,2]}", "{a:[1,true,false]}"],
        ),
        (array(prefixItems=FIRSTS, minItems=2, items=False), ["{a:[1,true]}"], ["{a:[1]}"]),
        (MAP, ["{m:{}}", "{m:{x:1,y-z:2}}", "{m:{|1 é:|:1}}"], ["{m:{x:|a|}}", "{m:{1:1}}"]),
        (COUNTED, ["{m:{x:1,y:2}}", "{m:{x:1,y:2,z:3}}"], ["{m:{x:1}}", "{m:{a:1,b:2,c:3,d:4}}"]),
        (
            closed(m={"properties": {"a": INTEGER}, "minProperties": 2, "maxProperties": 2}),
            ["{m:{a:1,b:|x|}}", "{m:{b:1,c:2}}"],
            ["{m:{a:1}}", "{m:{a:1,b:2,c:3}}"],
        ),
        ({"type": "object"}, ["{}", "{a:{b:[|x|,{}]}}", "{a:null}"], ["{a:1,b:2}", "{a:}"]),
        ({"const": {"a": 1}}, ["{a:1}"], ["{}", "{a:2}"]),
        ({"enum": [5, {"b": "x"}, {}]}, ["{}", "{b:|x|}"], ["5", "{b:|y|}"]),
        (closed(a={"const": {"b": ["x"], "A": 1}}), ["{}", "{a:{A:1,b:[|x|]}}"], ["{a:{}}"]),
        (
            closed(a={"type": "object", "properties": {"b": INTEGER}}),
            ["{a:{b:1}}", "{a:{b:1,c:|x|}}", "{a:{c:1,d:2}}"],
            ["{a:{b:|x|}}", "{a:{|b|:|x|}}"],
        ),
        (
            closed(a={"type": "boolean", "not": {"const": False}}),
            ["{a:true}"],
            ["{a:false}", "{a:1}"],
        ),
        (
            closed(a={"type": "string", "pattern": r"^\w[^\d]\D[+-\w]$"}),
            ["{a:|a٣é-|}", "{a:|_ é+|}"],
            ["{a:|éaaa|}", "{a:|a1aa|}", "{a:|aa1a|}", "{a:|aaaé|}", "{a:|aaa,|}"],
        ),
        (
            closed(ab={"type": ["integer", "string"]}) | {"patternProperties": {"^a": INTEGER}},
            ["{}", "{ab:1}"],
            ["{ab:|x|}"],
        ),
        ({"required": ["ab"], "patternProperties": {"^a": INTEGER}}, ["{ab:1}"], ["{ab:|x|}"]),
    ],
)
def test_what_the_grammar_allows(schema, good, bad):
    for text in good:
        assert allows(schema, text), text
    for text in bad:
        assert not allows(schema, text), text


def test_further_properties_of_a_free_object():
    assert allows({"type": "object"}, "{a:1,b:2}", repeats_others=True)


def test_json_strings_between_bare_keys():
    schema = closed(a={"type": "string"}, b={"enum": ["x"]}, c={"const": ["x"]})
    for text in ('{a:"x\\n",b:"x"}', '{b:"x"}', '{c:["x"]}'):
        assert allows(schema, text, begin="", end="")
        lax_json(text, {"unquoted_keys": True})
    for text in ("{a:x}", '{c:["y"]}'):
        assert not allows(schema, text, begin="", end="")


@pytest.mark.parametrize("are_special", [True, False], ids=["special", "text"])
def test_random_literals_are_read_as_valid_arguments(are_special):
    tokens = MarkerTokens(MARKERS, are_special=are_special)
    grammar = compiled(form_of(RICH), tokens)
    ways = {"unquoted_keys": True, "string_delims": [[QUOTE, QUOTE]]}
    seen = set()
    for seed in range(40):
        text, has_ended = walk(grammar, tokens, seed)
        if not has_ended or "\ufffd" in text:
            continue
        parser = get("gemma4", {"f": RICH})
        whole = f"<|tool_call>call:f{text}<tool_call|>"
        events = [event for char in whole for event in parser.feed(char)]
        [call] = collect(events + parser.finish()).tool_calls
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, RICH)
        assert lax_json(text, ways) == arguments
        seen |= arguments.keys()
    assert seen == RICH["properties"].keys()


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array"}, "must be an object"),
        (closed(**{f"a{QUOTE}": INTEGER}), "cannot be a key of a literal"),
        ({"type": "object", "minProperties": 2}, "at most 1 further properties, not 2"),
        (closed(a={"type": "string", "pattern": "^A$", "minLength": 2}), "is empty"),
        (closed(a={"enum": [f"x{QUOTE}"]}), "can be written here"),
        (closed(a={"const": [f"x{QUOTE}"]}), "can be written here"),
        (closed(a={"enum": ["x", 1], "minLength": 2}), r"no string of the enum \['x'\]"),
    ],
)
def test_schemas_that_no_literal_can_follow(schema, why):
    tag = {"type": "structural_tag", "format": form_of(schema)}
    with pytest.raises(RequestError, match=why):
        check_structured(StructuredOutput(structural_tag=json.dumps(tag)))
