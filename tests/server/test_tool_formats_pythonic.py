"""Formats of tool calls that look like calls of functions, such as llama4_pythonic and gemma4."""

from __future__ import annotations

import ast
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server import tool_parsers
from engine.server.tool_parsers import MAX_CALLS, ToolCallDelta, ToolCallEnd, ToolCallStart
from engine.server.tool_parsers.json_scanner import MAX_DEPTH
from engine.server.tool_parsers.literals import token_json

PARAMETERS = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}
NAMES = {"f": PARAMETERS, "get.it-2": PARAMETERS, "g": {}}
AROUND = {  # texts before the first call, between two calls, and after the last one
    "llama4_pythonic": ("<|python_start|>[", ", ", "]<|python_end|>"),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>\n", "\n", "\n</function_calls>"),
    "gemma4": ("<|tool_call>call:", "<tool_call|><|tool_call>call:", "<tool_call|>"),
    "function_gemma": (
        "<start_function_call>call:",
        "<end_function_call><start_function_call>call:",
        "<end_function_call>",
    ),
}
MARKERS = {"gemma4": '<|"|>', "function_gemma": "<escape>"}
PYTHON = ("llama4_pythonic", "lfm2", "olmo3")
GEMMA = tuple(MARKERS)
FORMATS = (*PYTHON, *GEMMA)


def events_of(name, text, size, names=NAMES):
    parser = tool_parsers.get(name, names)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def parse(name, text, size=10**6, names=NAMES):
    found = tool_parsers.collect(events_of(name, text, size, names))
    return found.content, [(call.name, call.arguments) for call in found.tool_calls]


def same_in_pieces(name, text, names=NAMES):
    """Return what is read, which does not depend on the pieces."""
    whole = parse(name, text, names=names)
    for size in (1, 2, 3, 7, 16):
        assert parse(name, text, size, names) == whole, size
    return whole


def between(name, *calls):
    before, comma, after = AROUND[name]
    return before + comma.join(calls) + after


def call_of(name, function, arguments):
    """Return a call with JSON values as the format's template writes it, without its markers."""
    if name in PYTHON:
        return f"{function}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
    return f"{function}{gemma(arguments, MARKERS[name])}"


def gemma(value, marker):
    """Return a JSON value as Gemma writes it."""
    if isinstance(value, str):
        return f"{marker}{value}{marker}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v, marker)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(one, marker) for one in value) + "]"
    return json.dumps(value)


# ---- values

PYTHON_VALUES = [  # (text, JSON)
    ("1", "1"),
    ("-12", "-12"),
    ("+7", "7"),
    ("1_000", "1000"),
    ("0x1F", "31"),
    ("0b101", "5"),
    ("0o17", "15"),
    ("00", "0"),
    ("1.50", "1.50"),
    (".5", "0.5"),
    ("-5.", "-5.0"),
    ("1e-3", "1e-3"),
    ("01_0.2_5E+1_0", "10.25E+10"),
    ("True", "true"),
    ("False", "false"),
    ("None", "null"),
    ("true", "true"),
    ("false", "false"),
    ("null", "null"),
    ("''", '""'),
    ('""', '""'),
    ("'it\\'s'", '"it\'s"'),
    ('"it\'s"', '"it\'s"'),
    ("'a \"b\"'", '"a \\"b\\""'),
    ("'''a'b''c'''", "\"a'b''c\""),
    ('"""a"b""c\nd"""', '"a\\"b\\"\\"c\\nd"'),
    ('""""a"""', '"\\"a"'),
    ("''''''", '""'),
    ("'two\\nlines\\ttab'", '"two\\nlines\\ttab"'),
    ("'two\nlines'", '"two\\nlines"'),
    (r"'\x41\u00e9\U0001f642\N{BULLET}\101\0'", '"Aé🙂•A\\u0000"'),
    (r"'\ud83d\ude42'", '"\\ud83d\\ude42"'),
    (r"'\d \/ \\ \a\b\f\v\r'", '"\\\\d \\\\/ \\\\ \\u0007\\b\\f\\u000b\\r"'),
    ("'a\\\nb'", '"ab"'),
    ("r'\\d\\''", '"\\\\d\\\\\'"'),
    ("R'''\\'''", None),
    ("u'x'", '"x"'),
    ("'x' \"y\"\n r'\\z'", '"xy\\\\z"'),
    ("'é 漢 🙂'", '"é 漢 🙂"'),
    ("'f(a=1), [g()] </function_calls> <|tool_call_end|>'", None),
    ("[]", "[]"),
    ("[1, 'x', [2, [3]],]", '[1, "x", [2, [3]]]'),
    ("( 1 , 2 )", "[1, 2]"),
    ("(1,)", "[1]"),
    ("()", "[]"),
    ("('x')", '"x"'),
    ("((1))", "1"),
    ("((1), ((2), (3,)))", "[1, [2, [3]]]"),
    ("([1, (2)])", "[1, 2]"),
    ("{}", "{}"),
    ("{'a': 1, \"b\": {'c': []},}", '{"a": 1, "b": {"c": []}}'),
    ("{1: 'x', False: None, 2.5: 0}", '{"1": "x", "false": null, "2.5": 0}'),
    ("[\n  1,\n  2\n]", "[1, 2]"),
]


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("value", PYTHON_VALUES, ids=lambda value: value[0][:20])
def test_values_of_python(name, value):
    text, wanted = value
    if wanted is None:
        try:
            wanted = json.dumps(ast.literal_eval(text))
        except SyntaxError:  # an unclosed string: a call whose arguments are not complete
            found = same_in_pieces(name, between(name, f"f(a={text})"))
            assert found[0] == "" and found[1][0][1].startswith('{"a": "')
            return
    arguments = f'{{"b": 0, "a": {wanted}, "c": 1}}'
    for call in (f"f(b=0, a={text}, c=1)", f"f( b = 0 ,a\t={text}\n,\nc= 1,)"):
        assert same_in_pieces(name, between(name, call)) == ("", [("f", arguments)])
    found = same_in_pieces(name, between(name, f"f(7, {text}, c=1)"))
    assert found == ("", [("f", f'{{"a": 7, "b": {wanted}, "c": 1}}')])


@pytest.mark.parametrize("value", PYTHON_VALUES, ids=lambda value: value[0][:20])
def test_values_are_those_of_python(value):
    """The table agrees with Python where Python reads the text as JSON's types."""
    text, wanted = value
    try:
        read = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return
    if wanted is not None and "\\ud8" not in wanted:
        assert json.loads(wanted) == json.loads(json.dumps(read))


GEMMA_VALUES = [  # (text with Q for the marker of strings, JSON)
    ("1", "1"),
    ("-1.5e3", "-1.5e3"),
    ("0", "0"),
    ("true", "true"),
    ("false", "false"),
    ("null", "null"),
    ("None", "null"),
    ("True", "true"),
    ("QQ", '""'),
    ("QtextQ", '"text"'),
    ("QtwoQ", '"two"'),
    ("Q a\n\tb Q", '" a\\n\\tb "'),
    ('Qsay "x"Q', '"say \\"x\\""'),
    ("Qit's {a:1}, [b]Q", '"it\'s {a:1}, [b]"'),
    ("Qback \\ slash \\n\\dQ", '"back \\\\ slash \\\\n\\\\d"'),
    ("Qif a < b: <tool> |>Q", '"if a < b: <tool> |>"'),
    ("Qé 漢 🙂Q", '"é 漢 🙂"'),
    ('"text"', '"text"'),
    ('"a \\"b\\" \\u00e9"', '"a \\"b\\" é"'),
    ("'x'", '"x"'),
    ("[]", "[]"),
    ("[1,2]", "[1, 2]"),
    ("[ 1 , 2 ]", "[1, 2]"),
    ("[QaQ,Qb,cQ]", '["a", "b,c"]'),
    ("[[1],[{}]]", "[[1], [{}]]"),
    ("{}", "{}"),
    ("{x:1}", '{"x": 1}'),
    ("{x:QyQ,z:[1]}", '{"x": "y", "z": [1]}'),
    ("{QxQ:1,Qy zQ:{a-b:null}}", '{"x": 1, "y z": {"a-b": null}}'),
    ("{ x : 1 , 'y' : 2 }", '{"x": 1, "y": 2}'),
    ("{a b:1}", '{"a b": 1}'),
    ("{\n  x: 1,\n}", '{"x": 1}'),
]


@pytest.mark.parametrize("name", GEMMA)
@pytest.mark.parametrize("value", GEMMA_VALUES, ids=lambda value: value[0][:20])
def test_values_of_gemma(name, value):
    text, wanted = value[0].replace("Q", MARKERS[name]), value[1]
    arguments = f'{{"b": 0, "a": {wanted}, "c": 1}}'
    for call in (f"f{{b:0,a:{text},c:1}}", f"f{{ b : 0 ,\na: {text} ,c:1, }}"):
        assert same_in_pieces(name, between(name, call)) == ("", [("f", arguments)])
    quoted = f"f{{{MARKERS[name]}a{MARKERS[name]}:{text}}}"
    assert same_in_pieces(name, between(name, quoted)) == ("", [("f", f'{{"a": {wanted}}}')])


# ---- whole answers


@pytest.mark.parametrize("name", FORMATS)
def test_calls_and_text_around_them(name):
    one = call_of(name, "f", {"a": 1, "b": "é"})
    two = call_of(name, "get.it-2", {})
    calls = [("f", '{"a": 1, "b": "é"}'), ("get.it-2", "{}")]
    text = between(name, one, two)
    assert same_in_pieces(name, between(name, one)) == ("", calls[:1])
    assert same_in_pieces(name, text) == ("", calls)
    assert same_in_pieces(name, f"Hm.\n\n{text}\n") == ("Hm.", calls)
    assert same_in_pieces(name, f"\n {text}\n\nSo.") == ("So.", calls)
    assert same_in_pieces(name, f"a {text} b\n{text} c") == ("a  b\n c", calls * 2)
    assert same_in_pieces(name, text + text) == ("", calls * 2)
    assert same_in_pieces(name, f"a {between(name, one)}\n{between(name, two)} b")[1] == calls


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "no call, 1 < 2 <",
        "f(a=1)",
        "a [f(a=1)]",
        "f{a:1} call:f{a:1}",
        "{} () [] [1] [a] see [f] and [f(",
        "[link](f(a=1))",
        " \n",
        "",
        "[\n]",
        "<|python_star",
        "<|tool_call",
        "<start_function_call",
        "<function_calls",
    ],
)
def test_text_without_a_call(name, text):
    assert same_in_pieces(name, text) == (text, [])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "inner", ["", "]", "f", "f,", "call:", "call:f", "1(a=1)", "f f()", "??", "g [f", "'f()'"]
)
def test_markers_without_a_call(name, inner):
    before, _, after = AROUND[name]
    text = before.removesuffix("call:") + inner + after
    assert same_in_pieces(name, f"a {text} b") == (f"a {text} b", [])


F1 = ("f", '{"a": 1}')
G = ("g", "{}")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # Brackets at the start of a line, and missing or doubled marks.
        ("llama4_pythonic", "[f(a=1), g()]", ("", [F1, G])),
        ("llama4_pythonic", "  [ f(a=1) , g( ) ] ", ("", [F1, G])),
        ("llama4_pythonic", "Hm.\n[f(a=1)]\nSo.", ("Hm.\n\nSo.", [F1])),
        ("llama4_pythonic", "[f(a=1)]\n[g()]", ("", [F1, G])),
        ("llama4_pythonic", "[f(a=1)] [g()]", ("[g()]", [F1])),
        ("llama4_pythonic", "[f(a=1)]<|python_end|>", ("", [F1])),
        ("llama4_pythonic", "<|python_start|>f(a=1)<|python_end|>", ("", [F1])),
        ("llama4_pythonic", "<|python_start|> [f(a=1)] x", ("x", [F1])),
        ("llama4_pythonic", "a <|python_start|>[f(a=1)]", ("a", [F1])),
        ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>", None),
        ("llama4_pythonic", "[f(a=1)", ("", [F1])),
        ("llama4_pythonic", "[f(a=1)<|python_end|>.", (".", [F1])),
        ("llama4_pythonic", "[f(a=1), x]", (", x]", [F1])),
        ("llama4_pythonic", "[[f(a=1)]]", None),
        ("llama4_pythonic", "[1]: a\n[x] b\n[f] c", None),
        ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|><|tool_call_end|>", None),
        ("lfm2", "<|tool_call_start|>f(a=1)<|tool_call_end|>", ("", [F1])),
        ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_cal", ("", [F1])),
        ("lfm2", "<|tool_call_start|>[f(a=1)] So", ("So", [F1])),
        ("lfm2", "<|tool_call_start|><|tool_call_start|>[g()]", ("<|tool_call_start|>", [G])),
        ("olmo3", "<function_calls>f(a=1) g()</function_calls>x", ("x", [F1, G])),
        ("olmo3", "<function_calls>\nf(a=1)\n\n  g()\n", ("", [F1, G])),
        ("olmo3", "<function_calls>\nf(\n  a=1,\n)\n</function_calls>", ("", [F1])),
        ("olmo3", "<function_calls>\n[f(a=1)]\n</function_calls>", None),
        ("gemma4", "<|tool_call>call:f{a:1}call:g{}<tool_call|>", ("", [F1, G])),
        ("gemma4", "<|tool_call> call:f{a:1} <tool_call|>", ("", [F1])),
        ("gemma4", "<|tool_call>call:f{a:1}", ("", [F1])),
        ("gemma4", "<|tool_call>call:f{a:1}<tool_response>", ("<tool_response>", [F1])),
        ("gemma4", "<|tool_call><|tool_call>call:g{}<tool_call|>", ("<|tool_call>", [G])),
        (
            "function_gemma",
            "<start_function_call>call:f{a:1}<end_function_call><start_function_response>",
            ("<start_function_response>", [F1]),
        ),
    ],
)
def test_particular_answers(name, text, expected):
    content, calls = same_in_pieces(name, text)
    if expected is not None:
        assert (content, calls) == expected
    elif "f(a=1)]<" in text:
        assert (content, calls) == ("<|tool_call_end|>", [F1])
    else:
        assert (content, calls) == (text, [])


DAMAGED_PYTHON = [
    "f(a=)", "f(a=1 b=2)", "f(a=1, a=2)", "f(a=[1, 2)", "f(a=(1, 2])", "f(a={'b' 1})",
    "f(a={'b'})", "f(a={1, 2})", "f(a={[1]: 2})", "f(a=1+2)", "f(a=-'x')", "f(a=nan)",
    "f(a=float('inf'))", "f(a=inf)", "f(a=x)", "f(a=x.y)", "f(a=g())", "f(a=1j)", "f(a=012)",
    "f(a=1__0)", "f(a=0x)", "f(a=.)", "f(a=1e)", "f(a='x' 1)", "f(a={'x' 'y': 1})", "f(a='x'y)",
    "f(a='\\xg0')",
    "f(a='\\u12')", "f(a='\\U00110000')", "f(a='\\N{no such name}')", "f(a='\\Nx')", "f(a=b'x')",
    "f(a=f'x')", "f(a=[,])", "f(a=[1,,2])", "f(,)", "f(a=1,,b=2)", "f(a==1)", "f(a=1; b=2)",
    "f(*a)", "f(**{'a': 1})", "f(a=1, 2)", "f(1, a=2)", "f(1, 2, 3, 4)", "g(1)", "f(a=@)", "f(@)",
    "f(a=lambda: 1)", "f(a=1 # one\n)", "unknown(a=1)", "f.x(a=1)", "f (a=1)", "f(a=(1)(2))",
    f"f(a={'9' * 400})", f"f({'a' * 300}=1)",
]  # fmt: skip


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("call", DAMAGED_PYTHON, ids=lambda call: call[:20])
def test_damaged_calls_of_python_are_text(name, call):
    good = call_of(name, "f", {"a": 1})
    text = f"a \n{between(name, call)}\n b"
    assert same_in_pieces(name, text) == (text, [])
    text = between(name, call)
    assert same_in_pieces(name, text + between(name, good)) == (text, [("f", '{"a": 1}')])


DAMAGED_GEMMA = [
    "f{a}", "f{a:}", "f{a:1 b:2}", "f{a:1,a:2}", "f{:1}", "f{a:x}", "f{a:text here}", "f{a:nan}",
    "f{a:[1,2}", "f{a:{b:1]}", "f{a:(1)}", "f{a:1;b:2}", "f{,}", "f{a:1,,b:2}", "f{a:[,]}",
    "f{a:<}", "f{<x:1}", "f{Qa:1}", "f{QaQ 1}", "f{a:Qx}", "f{a:QxQQyQ}", "f{a:QxQy}", "f{{a:1}}",
    "f{a=1}", "f(a:1)", "f {a:1}", "unknown{a:1}", "f{a:1e}", "f{'a:1}", "f{a:-}",
    f"f{{a:{'9' * 400}}}", f"f{{{'a' * 300}:1}}",
]  # fmt: skip


@pytest.mark.parametrize("name", GEMMA)
@pytest.mark.parametrize("call", DAMAGED_GEMMA, ids=lambda call: call[:20])
def test_damaged_calls_of_gemma_are_text(name, call):
    call = call.replace("Q", MARKERS[name])
    good = between(name, call_of(name, "f", {"a": 1}))
    text = between(name, call)
    content, calls = same_in_pieces(name, f"a {text} b")
    if not calls:
        assert content == f"a {text} b"
        assert same_in_pieces(name, text + good) == (text, [("f", '{"a": 1}')])
    else:  # a string that is never closed: the answer ends in its arguments
        assert call.count(MARKERS[name]) % 2 or "'" in call
        assert content == "a"


@pytest.mark.parametrize("name", FORMATS)
def test_only_functions_of_the_request_are_called(name):
    unknown = between(name, call_of(name, "unknown", {"a": 1}))
    assert same_in_pieces(name, f"a {unknown} b") == (f"a {unknown} b", [])
    assert same_in_pieces(name, unknown, names=None) == ("", [("unknown", '{"a": 1}')])
    assert same_in_pieces(name, unknown, names=("unknown",)) == ("", [("unknown", '{"a": 1}')])
    mixed = between(name, call_of(name, "f", {"a": 1}), call_of(name, "unknown", {}))
    content, calls = same_in_pieces(name, mixed)
    assert calls == [("f", '{"a": 1}')] and "unknown" in content


@pytest.mark.parametrize("name", PYTHON)
def test_values_without_a_name(name):
    """They are those of the parameters in the schema's order; without a schema it is no call."""
    text = between(name, "f('x', [1], c=2)")
    wanted = ("", [("f", '{"a": "x", "b": [1], "c": 2}')])
    assert same_in_pieces(name, text) == wanted
    for names in (None, ("f",), {"f": {}}, {"f": {"properties": {}}}, {"f": {"properties": 1}}):
        assert same_in_pieces(name, text, names) == (text, [])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere(name):
    """The arguments so far are the beginning of JSON; before they begin all is text."""
    arguments = {"a": "it's", "b": [1, {"c": None}], "d": -2.5}
    text = between(name, call_of(name, "f", arguments))
    whole = json.dumps(arguments)
    has_call = False
    for end in range(len(text)):
        content, calls = same_in_pieces(name, text[:end])
        if calls:
            has_call = True
            [(function, found)] = calls
            assert function == "f" and not content.strip(" \n,[]") and whole.startswith(found)
        else:
            assert not has_call and content == text[:end]
    assert has_call


@pytest.mark.parametrize("name", FORMATS)
def test_texts_are_streamed(name):
    text = between(name, call_of(name, "f", {"a": "x" * 300, "b": ["z" * 300]}))
    deltas = [e for e in events_of(name, text, 5) if isinstance(e, ToolCallDelta)]
    assert len(deltas) > 100
    quote = MARKERS.get(name, "'")
    damaged = text.replace(f"z{quote}", f"z{quote};")
    ends = [e for e in events_of(name, damaged, 5) if isinstance(e, ToolCallEnd)]
    assert [(end.is_complete, end.is_damaged) for end in ends] == [(False, True)]


def test_a_value_in_parentheses_is_held_until_it_is_no_tuple():
    parser = tool_parsers.get("lfm2", NAMES)
    start, delta = parser.feed("<|tool_call_start|>[f(a=1, b=('x', ")
    assert isinstance(start, ToolCallStart) and delta.arguments == '{"a": 1, "b": ["x"'
    parser = tool_parsers.get("lfm2", NAMES)
    start, delta = parser.feed("<|tool_call_start|>[f(a=1")
    assert delta.arguments == '{"a": '
    assert parser.feed(", b=(('x'") == []
    assert [event.arguments for event in parser.feed("), ")] == ['1, "b": ["x"']


@pytest.mark.parametrize("name", FORMATS)
def test_the_nesting_is_bounded(name):
    for depth, is_fine in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False), (50_000, False)):
        value = "[" * depth + "]" * depth
        call = f"f(a={value})" if name in PYTHON else f"f{{a:{value}}}"
        assert bool(parse(name, between(name, call))[1]) == is_fine
        if name in PYTHON:
            call = f"f(a={'(' * depth}1{')' * depth})"
            assert bool(parse(name, between(name, call))[1]) == is_fine


@pytest.mark.parametrize("name", FORMATS)
def test_the_number_of_calls_is_bounded(name):
    call = call_of(name, "f", {})
    content, calls = parse(name, between(name, *[call] * (MAX_CALLS + 2)))
    assert len(calls) == MAX_CALLS and content.count("f") >= 2


# ---- generated answers

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text("aé_", min_size=1), one),
    max_leaves=8,
)
arguments_of = st.dictionaries(st.sampled_from("abcé"), json_values, max_size=3)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=120)
@given(st.lists(arguments_of, min_size=1, max_size=3), st.integers(1, 9))
def test_rendered_calls_are_read_back(name, values, size):
    text = between(name, *(call_of(name, "f", value) for value in values))
    content, found = parse(name, f"So: {text}" if name != "llama4_pythonic" else text, size)
    assert content in ("So:", "")
    assert [json.loads(arguments) for _, arguments in found] == values


@settings(deadline=None, max_examples=300)
@given(st.text("'\"\\\nabnux01{}N é", max_size=12), st.integers(1, 5))
def test_strings_are_those_of_python(inner, size):
    """Whatever Python reads as a string is read as the same text."""
    for quote in ("'", '"', "'''", '"""'):
        text = f"{quote}{inner}{quote}"
        try:
            wanted = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            continue
        if isinstance(wanted, str):
            _, [(_, arguments)] = parse("lfm2", between("lfm2", f"f(a={text})"), size)
            assert json.loads(arguments) == {"a": wanted}


@settings(deadline=None, max_examples=500)
@given(st.text("0123456789_xXabeE+-.", max_size=8))
def test_numbers_are_those_of_python(text):
    try:
        wanted = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        wanted = None
    wanted = None if wanted is ... else wanted
    value = token_json(text)
    assert (None if value is None else json.loads(value)) == wanted


FRAGMENTS = [
    "[", "]", "(", ")", "{", "}", ",", ":", "=", "'", '"', '"""', "\\", "f", "f(", "f{", "call:",
    "a=", "a:", "1", "-", ".5", "True", "None", "x", " ", "\n", "r'", "\\u00e9", "\\x", "é",
    "f(a=1)", "f{a:1}", "[f(a='x', b=[1, (2)])]", '<|"|>', "<escape>", "<|",
    *(part for around in AROUND.values() for part in around),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.booleans())
def test_every_split_gives_the_same(name, text, begins):
    text = AROUND[name][0] + text if begins else text
    content, calls = same_in_pieces(name, text)
    if not any(isinstance(e, ToolCallStart) for e in events_of(name, text, 10**6)):
        assert content == text
    last = [e for e in events_of(name, text, 10**6) if isinstance(e, ToolCallEnd)][-1:]
    if last and not last[0].is_complete and not last[0].is_damaged:
        calls.pop()  # the text ends within it
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


# ---- time


def timed(name, text):
    """Return the shortest of three times that reading in small pieces takes."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        parse(name, text, 50)
        times.append(time.perf_counter() - begin)
    return min(times)


REPEATED = {
    "openings": "OPEN", "calls": "OPENf(a=", "brackets": "\n[", "names": "\n[aaaa", "spaces": " ",
    "quotes": "OPENf(a='''x''", "lists": "OPENf(a=[1, [", "tuples": "OPENf(a=((", "keys": "OPENf(a",
    "gemma": "OPENf{a:Q", "objects": "OPENf{a:{b:", "lt": "<", "escapes": "\\N{",
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", REPEATED)
def test_time_is_linear(name, kind):
    before = AROUND[name][0]
    one = REPEATED[kind].replace("OPEN", before).replace("Q", MARKERS.get(name, ""))
    bracket = "f(a=" if name in PYTHON else "f{a:"
    quote = MARKERS.get(name, "'''")
    for start in ("", f"{before}{bracket}", f"{before}{bracket}{quote}", f"{before}{bracket}["):
        times = []
        for length in (15_000, 60_000):
            times.append(timed(name, start + one * (length // len(one))))
        assert times[1] < 16 * times[0] + 0.05
