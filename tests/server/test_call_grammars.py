"""Grammars of tool calls: whatever they allow, the format's parser reads as valid calls."""

from __future__ import annotations

import json

import jsonschema
import pytest

from engine.errors import RequestError
from engine.server.tool_parsers import NAMES, Function, calls_of, collect, get
from engine.server.tool_parsers.required import RequiredCallsParser
from tests.server.call_walks import MarkerTokens, compiled, walk

pytest.importorskip("llguidance")

PART = {"type": "object", "properties": {"q": {"type": "boolean"}}, "additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": 3, "maximum": 99},
        "parts": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Part"}},
        "kind": {"enum": ["x", "y </b>", 5, None]},
        "any": {},
        "short": {"type": "string", "maxLength": 5, "pattern": "^a|b$"},
        "mixed": {"type": ["string", "number"]},
        "bounded": {
            "anyOf": [{"type": "string", "maxLength": 3}, {"type": "number", "minimum": 7}]
        },
        "list": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"Part": PART},
}
FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
FUNCTIONS = [Function("add", SCHEMA), Function("set.flag-2", FLAG)]
WITH_GRAMMAR = [name for name in NAMES if calls_of(name, FUNCTIONS) is not None]


def tokens_of(name, are_special):
    """Return a vocabulary with the markers of a format."""
    markers = get(name).markers
    ends = [f"\n{marker}" for marker in markers if marker.startswith("</")]
    ends += [] if are_special else [f"{markers[0]}["]
    return MarkerTokens(markers, are_special=are_special, texts=ends)


def read(name, text, functions=FUNCTIONS, *, wrap=lambda parser: parser, size=None):
    """Return the content and the calls of an answer, read in pieces of `size` characters."""
    if name == "harmony":  # `HarmonyReasoning` passes it on so
        text = f"<|start|>assistant{text}"
    names = {function.name: function.parameters for function in functions}
    parser = wrap(get(name, names))
    size = size or max(len(text), 1)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def check(calls, functions=FUNCTIONS):
    schemas = {function.name: function.parameters for function in functions}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def walks(form, tokens, count):
    """Yield random texts of a format that its grammar has ended."""
    grammar = compiled(form, tokens)
    num_endless = 0
    for seed in range(count):
        text, has_ended = walk(grammar, tokens, seed)
        num_endless += not has_ended
        if has_ended:
            yield text
    assert num_endless <= count // 5


@pytest.mark.parametrize("are_special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_required_calls(name, are_special):
    tokens = tokens_of(name, are_special)
    form = calls_of(name, FUNCTIONS).required(one_call=False)
    names = set()
    counts = set()
    wanted = {1} if name == "harmony" else {1, 2}
    for i, text in enumerate(walks(form, tokens, count=80)):
        if i >= 12 and len(names) == 2 and counts == wanted:
            break
        found = read(name, text)
        assert found.content == "" and found.tool_calls, text
        check(found.tool_calls)
        pieces = read(name, text, size=1 + i % 9)
        assert [call.arguments for call in pieces.tool_calls] == [
            call.arguments for call in found.tool_calls
        ]
        names |= {call.name for call in found.tool_calls}
        counts.add(min(len(found.tool_calls), 2))
    assert names == {"add", "set.flag-2"}
    assert counts == wanted


@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_one_call_of_a_named_function(name):
    form = calls_of(name, FUNCTIONS[1:]).required(one_call=True)
    for text in walks(form, tokens_of(name, True), count=6):
        [call] = read(name, text).tool_calls
        assert (call.name, text.count("set.flag-2")) == ("set.flag-2", 1)
        check([call])


@pytest.mark.parametrize("are_special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", [name for name in WITH_GRAMMAR if name != "harmony"])
def test_calls_within_text(name, are_special):
    """Strict functions follow their schema, others do not; text without calls is free."""
    loose = Function("loose", FLAG, is_strict=False)
    functions = [*FUNCTIONS, loose]
    calls = calls_of(name, functions)
    tokens = tokens_of(name, are_special)
    num_calls = 0
    num_texts = 0
    for i, text in enumerate(walks(calls.within_text(one_call=False), tokens, count=80)):
        if i >= 12 and num_calls and num_texts:
            break
        found = read(name, text, functions)
        if not (found.tool_calls or any(marker in text for marker in get(name).markers)):
            assert found.content == text
            num_texts += 1
        check([call for call in found.tool_calls if call.name != "loose"])
        num_calls += len(found.tool_calls)
    assert num_calls and num_texts
    for text in walks(calls.within_text(one_call=True), tokens, count=8):
        assert len(read(name, text, functions).tool_calls) <= 1


@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_the_grammar_grows_linearly_with_the_functions(name):
    sizes = []
    for count in (10, 40):
        functions = [Function(f"f{i}", SCHEMA) for i in range(count)]
        form = calls_of(name, functions).within_text(one_call=False)
        sizes.append(len(json.dumps(form)))
    compiled(form, tokens_of(name, True))
    assert sizes[1] < 4.2 * sizes[0]


@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_a_required_call_that_was_cut_is_no_content(name):
    form = calls_of(name, FUNCTIONS).required(one_call=False)
    text, _ = walk(compiled(form, tokens := tokens_of(name, False)), tokens, 1)
    whole = read(name, text).tool_calls
    for cut in range(0, len(text), 3):
        found = read(name, text[:cut], wrap=lambda parser: RequiredCallsParser(lambda: parser))
        assert found.content == ""
        names = [call.name for call in found.tool_calls]
        assert names == [call.name for call in whole][: len(names)]
        for call, other in zip(found.tool_calls, whole, strict=False):
            assert other.arguments.startswith(call.arguments)


def test_special_markers_are_tokens():
    """The spelling of a marker that is a special token neither begins nor ends anything."""
    tokens = tokens_of("glm45", True)
    form = calls_of("glm45", FUNCTIONS[1:]).required(one_call=True)
    state = compiled(form, tokens).new_state()
    marker = tokens.tokens.index(b"<tool_call>")
    assert state.forced_tokens(1) == [marker]
    assert not state.matcher.deep_copy().try_consume_tokens([ord("<")])
    assert state.matcher.try_consume_tokens([marker]) == 1


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"on": {"type": "boolean"}}, "additionalProperties": False},
        {"type": ["null", "object"], "additionalProperties": False},
        {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/flag"}], "$defs": {"flag": FLAG}},
    ],
)
@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_arguments_are_an_object_also_if_the_schema_allows_others(name, parameters):
    functions = [Function("f", parameters)]
    form = calls_of(name, functions).required(one_call=True)
    for text in walks(form, tokens_of(name, True), count=5):
        [call] = read(name, text, functions).tool_calls
        check([call], functions)


@pytest.mark.parametrize("name", ["glm45", "hermes", "llama4_pythonic"])
def test_a_schema_of_other_values_is_refused_with_its_place(name):
    form = calls_of(name, [Function("f", {"type": "array"}, "tools[0]")]).required(one_call=True)
    with pytest.raises(RequestError, match=r"of a call must be an object \(at tools\[0\]#\)"):
        compiled(form, tokens_of(name, True))


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"properties": {"a<b": {}}}, "'a<b' cannot be written between tags"),
        ({"type": "object", "minProperties": 3}, "minProperties and maxProperties"),
        ({"type": "object", "properties": {"a": {"type": "nonsense"}}}, "'nonsense' (at tools[0]#"),
    ],
)
def test_a_schema_that_no_call_can_follow_is_refused(parameters, why):
    form = calls_of("glm45", [Function("f", parameters, "tools[0]")]).required(one_call=True)
    with pytest.raises(RequestError) as caught:
        compiled(form, tokens_of("glm45", True))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "is_fine"),
    [
        ({"const": "a</parameter>"}, False),
        ({"type": ["string", "boolean"], "enum": ["true"]}, False),  # read as a boolean
        ({"enum": ["a</parameter>", " x"]}, True),
    ],
)
def test_a_constant_that_cannot_stand_between_tags_is_refused(schema, is_fine):
    function = Function("f", {"type": "object", "properties": {"a": schema}})
    form = calls_of("qwen3_coder", [function]).required(one_call=True)
    if is_fine:
        compiled(form, tokens_of("qwen3_coder", True))
        return
    with pytest.raises(RequestError, match=r"no string of the enum .* can be written here"):
        compiled(form, tokens_of("qwen3_coder", True))
