"""Formats of tool calls in JSON between markers, such as kimi_k2, deepseek_v31 and granite."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server import tool_parsers

BAR = "\uff5c"
DEEPSEEK = {
    what: f"<{BAR}tool\u2581{what}{BAR}>"
    for what in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
}
BEGIN, END, CALL, DONE, SEP = DEEPSEEK.values()
ARRAYS = {  # what stands around an array of calls
    "granite": ("<|tool_call|>", ""),
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
    "functools": ("functools", ""),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    "cohere": ("<|START_ACTION|>\n", "\n<|END_ACTION|>"),
}
OBJECTS = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "gigachat3": ("<|function_call|>", ""),
}
NAMED = ("kimi_k2", "deepseek_v31", "deepseek_v3")
FORMATS = (*ARRAYS, *OBJECTS, *NAMED, "apertus")


def render(name, calls):
    """Return calls, pairs of a name and a JSON text, as the format's template writes them."""
    if name in ARRAYS:
        keys = ("tool_name", "parameters") if name == "cohere" else ("name", "arguments")
        extra = '"tool_call_id": "0", ' if name == "cohere" else ""
        items = (f'{{{extra}"{keys[0]}": "{f}", "{keys[1]}": {a}}}' for f, a in calls)
        return f"{ARRAYS[name][0]}[{', '.join(items)}]{ARRAYS[name][1]}"
    if name in OBJECTS:
        before, after = OBJECTS[name]
        return "".join(f'{before}{{"name": "{f}", "arguments": {a}}}{after}' for f, a in calls)
    if name == "apertus":
        items = (f'{{"{f}": {a}}}' for f, a in calls)
        return f"<|tools_prefix|>[{', '.join(items)}]<|tools_suffix|>"
    if name == "kimi_k2":
        texts = (
            f"<|tool_call_begin|>functions.{f}:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>"
            for i, (f, a) in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"
    if name == "deepseek_v31":
        return BEGIN + "".join(f"{CALL}{f}{SEP}{a}{DONE}" for f, a in calls) + END
    texts = (f"{CALL}function{SEP}{f}\n```json\n{a}\n```{DONE}" for f, a in calls)
    return BEGIN + "\n".join(texts) + END


def parse(name, text, size=10**6, names=("f", "get.it-2")):
    parser = tool_parsers.get(name, names)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    found = tool_parsers.collect(events)
    return found.content, [(call.name, call.arguments) for call in found.tool_calls]


def fastest(name, text):
    """Return the shortest of three times that reading in small pieces takes."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        parse(name, text, 50)
        times.append(time.perf_counter() - begin)
    return min(times)


def same_in_pieces(name, text, names=("f", "get.it-2")):
    """Return what is read, which does not depend on the pieces."""
    whole = parse(name, text, names=names)
    for size in (1, 2, 3, 7):
        assert parse(name, text, size, names) == whole, size
    return whole


ARGUMENTS = [
    "{}",
    '{"a": 1}',
    '{"a": {"b": [1, {"c": null}]}, "d": "}"}',
    '{"s": "\\"quoted\\" \\\\ \\u00e9 é 漢 🙂"}',
    '{"s": "</tool_call> <|tool_call_end|> [1] ```"}',
    '{ "a" : 1 ,\n "b" : [ ] }',
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call(name, arguments):
    calls = [("f", arguments)]
    assert same_in_pieces(name, render(name, calls)) == ("", calls)


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_and_text_around_them(name):
    calls = [("f", '{"a": 1}'), ("get.it-2", "{}"), ("f", "{}")]
    text = render(name, calls)
    assert same_in_pieces(name, text) == ("", calls)
    assert same_in_pieces(name, f"Hm.\n\n{text}\n") == ("Hm.", calls)
    assert same_in_pieces(name, f"a {text}b {text} c")[0] in ("a b  c", "a b c", "ab c")
    assert same_in_pieces(name, "no call, 1 < 2 [3] {}") == ("no call, 1 < 2 [3] {}", [])


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_call_is_text(name):
    unknown = render(name, [("unknown", '{"a": 1}')])
    content, calls = same_in_pieces(name, f"a {unknown} b")
    assert (content, calls) == (f"a {unknown} b", [])
    assert same_in_pieces(name, unknown, names=None)[1] == [("unknown", '{"a": 1}')]
    for arguments in ("{a: 1}", '{"a": 1,}', '{"a": 1]', "[1]", "1"):
        text = render(name, [("f", arguments)])
        content, calls = same_in_pieces(name, text)
        assert not calls
        assert content == text or arguments in content


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere(name):
    """The arguments so far are the beginning of JSON; before they begin all is text."""
    text = render(name, [("f", '{"a": "bc"}')])
    has_call = False
    for end in range(len(text)):
        content, calls = same_in_pieces(name, text[:end])
        if calls:
            has_call = True
            [(function, arguments)] = calls
            assert function == "f" and not content.strip(" \n,[]")
            assert '{"a": "bc"}'.startswith(arguments)
        else:
            assert not has_call and content.strip() == text[:end].strip()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3),
    max_leaves=8,
)
calls_of = st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), min_size=1)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=40)
@given(calls_of, st.integers(1, 9), st.booleans())
def test_rendered_calls_are_read_back(name, values, size, is_ascii):
    calls = [("f", json.dumps(value, ensure_ascii=is_ascii)) for value in values[:4]]
    if any("\\ud" in text for _, text in calls):
        return  # half of a surrogate pair, which no tokenizer writes
    content, found = parse(name, f"So: {render(name, calls)}", size)
    assert content.strip() == "So:"
    assert found == calls


@pytest.mark.parametrize("name", FORMATS)
def test_time_is_linear(name):
    opening = render(name, [("f", "{}")]).split("{")[0]

    def text(length):
        arguments = json.dumps({"a": "x<" * length})
        return render(name, [("f", arguments)]) + opening * (length // 40) + " " * length

    assert fastest(name, text(160_000)) < 16 * fastest(name, text(40_000))


def test_ids_that_the_template_wants_back():
    text = render("kimi_k2", [("f", "{}"), ("get.it-2", "{}")])
    parser = tool_parsers.get("kimi_k2", ("f", "get.it-2"))
    found = tool_parsers.collect(parser.feed(text) + parser.finish())
    assert [call.id for call in found.tool_calls] == ["functions.f:0", "functions.get.it-2:1"]


def test_ids_of_one_answer_differ_even_if_the_model_repeats_one():
    again = render("kimi_k2", [("f", "{}")])
    parser = tool_parsers.get("kimi_k2", ("f",))
    found = tool_parsers.collect(parser.feed(again * 3) + parser.finish())
    assert [call.id for call in found.tool_calls] == [f"functions.f:{i}" for i in range(3)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("granite", '<|tool_call|> [ {"name":"f","arguments":{}} ] Done.', ("Done.", "f")),
        ("granite", "<|tool_call|>[]", ("<|tool_call|>[]", "")),
        ("granite", "<|tool_call|>no", ("<|tool_call|>no", "")),
        ("phi4", '<|tool_call|>[{"name":"f","arguments":{}}]x', ("x", "f")),
        ("apertus", '<|tools_prefix|>[{"f": {}, "g": {}}]', (', "g": {}}]', "f")),
        ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', None),
        ("apertus", "<|tools_prefix|>[{}]<|tools_suffix|>", None),
        ("apertus", '<|tools_prefix|>[{"g\\u0065t.it-2": {}}]', ("", "get.it-2")),
        ("nemotron", '<TOOLCALL>{"name":"f","arguments":{}}', None),
        ("kimi_k2", "<|tool_calls_section_begin|>hm", ("<|tool_calls_section_begin|>hm", "")),
        ("deepseek_v31", f"{BEGIN}{CALL}f {SEP} {{}}{DONE}x", ("x", "f")),
        ("deepseek_v3", f"{BEGIN}{CALL}function{SEP}f\n```json\n{{}}```{DONE}{END}", ("", "f")),
    ],
)
def test_particular_answers(name, text, expected):
    content, calls = same_in_pieces(name, text)
    wanted = (text, "") if expected is None else expected
    assert (content, "".join(function for function, _ in calls)) == wanted
