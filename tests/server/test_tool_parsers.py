"""Tool parsers: formats, text around calls, damaged calls, and the same result for every split."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.server import tool_parsers
from engine.server.tool_parsers import (
    ParsedText,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from engine.server.tool_parsers._parser import MAX_CALLS
from engine.server.tool_parsers.formats import FORMATS
from engine.server.tool_parsers.json_scanner import MAX_DEPTH, is_json_object
from engine.server.tool_parsers.llama3_json import Llama3JsonParser
from engine.server.tool_parsers.mistral import MistralParser
from engine.server.tool_parsers.surrogates import SurrogateGate

CLASSES = {
    "hermes": FORMATS["hermes"].parser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}


def feed(name, pieces, names=None):
    counter = itertools.count()
    parser = CLASSES[name](names, lambda: f"c{next(counter)}")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def parse(name, text, names=None):
    return collect(feed(name, [text], names))


def merged(events):
    """Join neighbouring deltas, and leave out ids, of which failed calls may use up some."""
    found = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            found[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta):
            found[-1] = ToolCallDelta(event.index, last.arguments + event.arguments)
        elif isinstance(event, ToolCallStart):
            found.append(ToolCallStart(event.index, "", event.name, event.source))
        else:
            found.append(event)
    return found


def summary(parsed: ParsedText):
    """Return what is compared of an answer."""
    return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


# ---- formats

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
ADD = ("add", '{"a": 1, "b": [2, "}"]}')


@pytest.mark.parametrize(
    ("name", "text", "content", "expected"),
    [
        ("hermes", HERMES, "", [ADD]),
        ("hermes", f"I add.\n{HERMES}\n{HERMES}\n", "I add.", [ADD, ADD]),
        ("hermes", f"{HERMES}\nDone. \n", "Done. \n", [ADD]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [ADD]),
        ("hermes", HERMES.removesuffix("}\n</tool_call>"), "", [ADD]),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{}} {"name":"g","arguments":{}}</tool_call>',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
        ("hermes", r'<tool_call>{"name":"f","arguments":"{\"a\": 1}"}', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": [1]}z', "z", [("f", "{}")]),
        ("hermes", "no call, 1 < 2", "no call, 1 < 2", []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            "llama3_json",
            '{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "llama3_json",
            'I look.\n{"name": "f", "parameters": {}}\n{"name": "g", "arguments": {}}\nSo.',
            "I look.\n\n\nSo.",
            [("f", "{}"), ("g", "{}")],
        ),
        ("llama3_json", 'Ah<|python_tag|>{"name":"f","parameters":{}}', "Ah", [("f", "{}")]),
        ("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}', []),
        ("llama3_json", 'a {"name": "f", "parameters": {}}', None, []),
        ("llama3_json", '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
        ("mistral", '[TOOL_CALLS] [{"name":"f","arguments":{"a":1}}]', "", [("f", '{"a":1}')]),
        (
            "mistral",
            'Hm. [TOOL_CALLS][{"name": "f", "arguments": {}} , {"name": "g", "arguments": {}}] x',
            "Hm.  x",
            [("f", "{}"), ("g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[ARGS]"}', "", [("f", '{"a": "[ARGS]"}')]),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{}[TOOL_CALLS]h{}',
            "",
            [("f", '{"a": 1}'), ("g", "{}"), ("h", "{}")],
        ),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ],
)  # fmt: skip
def test_formats(name, text, content, expected):
    assert summary(parse(name, text)) == (text if content is None else content, expected)


# ---- damaged calls

DAMAGED = [
    "<tool_call>",
    "<tool_call>\n",
    "<tool_call> soon",
    '<tool_call>{"name": "f", "name": "g", "arguments": {}}',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
    '<tool_call>{"name": "f", "arguments": nul}</tool_call>',
    r'<tool_call>{"name": "f", "arguments": "{\"a\": }"}</tool_call>',
    r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>',
    "<tool_call>[]</tool_call>",
]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_calls_are_content(text):
    assert summary(parse("hermes", text)) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS] is the marker",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f g[ARGS]{}",
        "[TOOL_CALLS]f[ARGS]{1}",
        "[TOOL_CALLS]" + "f" * 500 + "[ARGS]{}",
    ],
)
def test_damaged_mistral_calls_are_content(text):
    assert summary(parse("mistral", text)) == (text, [])


def test_a_good_call_after_a_damaged_one():
    text = f'<tool_call>{{"name": "f", "arguments": {{oops}}}}</tool_call>\n{HERMES}'
    content, found = summary(parse("hermes", text))
    assert found == [ADD]
    assert content == '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>'


def test_what_was_streamed_before_the_damage_ends_incomplete():
    events = merged(feed("hermes", ['<tool_call>{"name": "f", "arguments": {"a": 1, oops']))
    assert events == [
        ToolCallStart(0, "", "f", '<tool_call>{"name": "f", "arguments": '),
        ToolCallDelta(0, '{"a": 1, '),
        ToolCallEnd(0, is_complete=False, is_damaged=True),
        TextDelta("oops"),
    ]


def test_only_functions_of_the_request_are_called():
    other = HERMES.replace('"add"', '"rm"')
    assert summary(parse("hermes", HERMES + other, {"add"})) == (other, [ADD])
    text = '[TOOL_CALLS]rm[ARGS]{"a": 1}'
    assert summary(parse("mistral", text, {"add"})) == (text, [])
    text = '{"name": "Bob", "parameters": {}}'
    assert summary(parse("llama3_json", text, {"add"})) == (text, [])


# ---- text that ends within a call


@pytest.mark.parametrize(
    ("name", "text", "source"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call>"}', "<tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": {"a": "<tool_call>"}', "{"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "<tool_call>"}', "["),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "<tool_call>"}', "[TOOL_CALLS]f"),
    ],
)
def test_a_cut_call_has_its_arguments_so_far(name, text, source):
    begin = text.index('{"a"')
    for cut in range(len(text) + 1):
        arguments = text[begin:cut]
        expected = ("", [("f", arguments)]) if cut > begin else (text[:cut], [])
        assert summary(parse(name, text[:cut])) == expected, text[:cut]
        assert summary(parse(name, f"Hm.\n{text[:cut]}"))[1] == expected[1]
    assert text.startswith(source)


LIST = '[{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {"b": "[TOOL_CALLS]"}}]'


def test_nothing_of_a_forced_list_is_content():
    begins = [LIST.index('{"a"'), LIST.index('{"b"')]
    ends = [LIST.index("}, ") + 0, len(LIST) - 2]
    for cut in range(len(LIST) + 1):
        calls = [
            (name, LIST[begin : min(cut, end)])
            for name, begin, end in zip("fg", begins, ends, strict=True)
            if cut > begin
        ]
        for pieces in ([LIST[:cut]], LIST[:cut]):
            parser = tool_parsers.CallListParser({"f", "g"})
            events = [event for piece in pieces for event in parser.feed(piece)]
            assert summary(collect(events + parser.finish())) == ("", calls)


def test_nothing_beyond_the_limits_of_a_forced_list_is_content():
    one = '{"name": "f", "arguments": {}}'
    deep = '{"a": ' * 70 + "1" + "}" * 70
    for text, calls in (
        (f"[{', '.join([one] * 130)}]", [("f", "{}")] * 128),
        (f'[{one}, {{"name": "f", "arguments": {deep}}}]', [("f", "{}"), ("f", deep[: 6 * 63])]),
    ):
        for pieces in ([text], text):
            parser = tool_parsers.CallListParser({"f"})
            events = [event for piece in pieces for event in parser.feed(piece)]
            parsed = collect(events + parser.finish())
            assert parsed.content == ""
            found = [(call.name, call.arguments[: 6 * 63]) for call in parsed.tool_calls]
            assert found == calls


@pytest.mark.parametrize("text", ["Hello", " Hm. [TOOL_CALLS][", "[1]", "{}"])
def test_what_is_no_list_stays_as_it_is(text):
    for pieces in ([text], text):
        parser = tool_parsers.CallListParser({"f"})
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert summary(collect(events + parser.finish())) == (text, [])


# ---- text around calls

AROUND = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {}}',
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("before", ["", " \n", "Let me look.", "Let me look.\n\n", "\n a "])
@pytest.mark.parametrize("after", ["", "\n", "Then", " \nThen \n"])
def test_white_space_is_kept_between_texts_only(name, before, after):
    """The content is the text outside of the calls, less the space at an end where a call is."""
    call = AROUND[name]
    expected = before + after if before.strip() and after.strip() else ""
    expected = expected or (before.rstrip() if before.strip() else after.lstrip())
    text = before + call + after
    events = [merged(feed(name, pieces)) for pieces in ([text], text)]
    assert events[0] == events[1]
    assert summary(collect(events[0])) == (expected, [("f", "{}")])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", AROUND["hermes"]),
        ("mistral", AROUND["mistral"].removesuffix("]") + " , "),
        ("llama3_json", AROUND["llama3_json"] + " ;\n"),
    ],
)
def test_what_ends_or_separates_calls_is_not_content(name, text):
    """Also where the text ends within it."""
    for cut in range(text.rindex("}") + 1, len(text) + 1):
        assert summary(parse(name, text[:cut])) == ("", [("f", "{}")]), text[:cut]


def test_white_space_between_calls():
    call = AROUND["hermes"]
    assert parse("hermes", f"a\n{call} {call}\n").content == "a"
    assert parse("hermes", f"a\n{call} {call}\nb").content == "a\n \nb"
    assert parse("hermes", f"\n{call} {call}\nb\n").content == "b\n"


def test_a_damaged_call_keeps_the_space_before_it():
    text = f'a \n<tool_call>{{"name": "f", "arguments": {{"a": 1,}}}} \n{AROUND["hermes"]} b'
    damaged = text[: text.index(AROUND["hermes"])]
    assert summary(parse("hermes", text)) == (damaged + " b", [("f", "{}")])


# ---- streaming


def test_arguments_are_passed_on_as_they_arrive():
    parser = tool_parsers.get("hermes")
    assert parser.feed('<tool_call>{"name": "add", "argu') == []
    start, delta = parser.feed('ments": {"te')
    assert (start.index, start.name, delta) == (0, "add", ToolCallDelta(0, '{"te'))
    assert parser.feed("xt") == [ToolCallDelta(0, "xt")]
    assert parser.feed('": "}"') == [ToolCallDelta(0, '": "}"')]
    assert parser.feed("}}") == [ToolCallDelta(0, "}"), ToolCallEnd(0)]
    assert parser.feed("</tool_call>") == parser.finish() == []


def test_text_is_passed_on_as_it_arrives():
    parser = tool_parsers.get("hermes")
    assert parser.feed("one <to") == [TextDelta("one")]
    assert parser.feed("ken> ") == [TextDelta(" <token>")]
    assert parser.finish() == [TextDelta(" ")]


def pieces_of(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f",
    '{"name": "f", "arguments": {"a": [1.5e3, "\\u00e9\\"}", null]}}', '{"name": "g", ',
    '"parameters": {}}', '"arguments": {"x": {"y": "z"}}', '"arguments": "{}"', '"name": "f"',
    "{", "}", "[", "]", ",", ":", ";", '"', "\\", "\n", " ", "1", "-", "true", "nul", "text", "<",
]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 500), max_size=20),
)
@settings(max_examples=400, deadline=None)
def test_every_split_gives_the_same(name, text, cuts):
    whole = merged(feed(name, [text]))
    assert merged(feed(name, pieces_of(text, cuts))) == whole
    assert merged(feed(name, text)) == whole  # a character at a time
    calls = collect(whole).tool_calls
    if whole and isinstance(whole[-1], ToolCallEnd) and not whole[-1].is_complete:
        calls.pop()  # the text ends within it
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("text", [*DAMAGED, HERMES])
def test_every_cut_in_two_gives_the_same(text):
    whole = merged(feed("hermes", [text]))
    for cut in range(len(text)):
        assert merged(feed("hermes", [text[:cut], text[cut:]])) == whole


@pytest.mark.parametrize("name", CLASSES)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
@settings(max_examples=200, deadline=None)
def test_no_text_is_lost(name, text):
    """Without a call, the content is the text; with one, nothing is added to it."""
    parsed = parse(name, text)
    if not parsed.tool_calls and not any(isinstance(e, ToolCallStart) for e in feed(name, [text])):
        assert parsed.content == text
    assert len(parsed.content) <= len(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)  # fmt: skip


@given(
    st.dictionaries(st.text(max_size=5), JSON),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.lists(st.integers(0, 500), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_all_json_passes_unchanged(arguments, indent, ascii_only, cuts):
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    texts = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
    }
    for name, text in texts.items():
        assert summary(collect(feed(name, pieces_of(text, cuts)))) == ("", [("f", written)])


@given(st.text('{}[]",:\\ u0e1-.tfn\n', max_size=14))
@settings(max_examples=1000, deadline=None)
def test_the_scanner_agrees_with_the_json_module(inner):
    text = "{" + inner + "}"
    try:
        is_object = isinstance(json.loads(text, parse_constant=float), dict)
    except ValueError:
        is_object = False
    assert is_json_object(text) == is_object


# ---- hostile text

REPEATED = {
    "markers": "<tool_call>[TOOL_CALLS]<|python_tag|>",
    "objects": '<tool_call>{"name": "f", "arguments": {',
    "nesting": '{"name":"f","parameters":{"a":',
    "brackets": "[",
    "braces": "{",
    "lines": "\n{",
    "newlines": "\n",
    "quotes": '<tool_call>{"',
    "escapes": '<tool_call>{"name": "\\',
    "calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n[TOOL_CALLS]f[ARGS]{}',
    "lt": "<",
    "spaces": "  ",
    "separators": " ; ",
}
OPENINGS = ("", '<tool_call>{"name": "', '{"name": "f", "parameters": {"a": "', "[TOOL_CALLS][")


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", REPEATED)
def test_hostile_text_ends_soon(name, kind):
    size = 60_000
    for opening in OPENINGS:
        text = opening + REPEATED[kind] * (size // len(REPEATED[kind]))
        for step in (len(text), 3):
            start = time.process_time()
            feed(name, [text[i : i + step] for i in range(0, len(text), step)])
            assert time.process_time() - start < 2


CALL = '{"name": "f", "parameters": {}}'


@pytest.mark.parametrize(
    ("name", "opening", "repeated", "step"),
    [
        ("hermes", "", " ", 16),
        ("hermes", "<tool_call>", " ", 16),
        ("hermes", f"<tool_call>{CALL}", " ", 16),
        ("hermes", '<tool_call>{"name": "', "x", 16),
        ("hermes", '<tool_call>{"arguments": {"a": "', "x", 16),
        ("hermes", '<tool_call>{"name": "f", "arguments": "', "x", 16),
        ("hermes", f"<tool_call>{CALL[:-1]}, ", " ", 16),
        ("llama3_json", "", "a\n", 2_000_000),
        ("llama3_json", CALL, "; ", 16),
        ("llama3_json", "<|python_tag|>", " ", 16),
        ("mistral", "[TOOL_CALLS]", " ", 16),
        ("mistral", f"[TOOL_CALLS][{CALL}", " ", 16),
    ],
)
def test_held_text_takes_linear_time(name, opening, repeated, step):
    """Joining what is held for every piece, or searching all lines for every line, takes 10 s."""
    text = opening + repeated * (2_000_000 // len(repeated) // (1 if step == 16 else 4))
    start = time.process_time()
    feed(name, [text[i : i + step] for i in range(0, len(text), step)])
    assert time.process_time() - start < 3


def test_the_number_of_calls_is_bounded():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = parse("hermes", text * (MAX_CALLS + 2))
    assert (len(parsed.tool_calls), parsed.content) == (MAX_CALLS, text * 2)
    one = '{"name": "f", "parameters": {}}'
    parsed = parse("llama3_json", ";".join([one] * (MAX_CALLS + 1)))
    assert (len(parsed.tool_calls), parsed.content) == (MAX_CALLS, f";{one}")
    parsed = parse("mistral", f"[TOOL_CALLS][{','.join([text[11:41]] * (MAX_CALLS + 1))}]")
    assert len(parsed.tool_calls) == MAX_CALLS


def test_the_nesting_is_bounded():
    deepest = MAX_DEPTH - 1  # the object of the call is one level
    for depth, is_fine in ((deepest, True), (deepest + 1, False)):
        arguments = '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert bool(parse("hermes", text).tool_calls) == is_fine


# ---- choosing a parser


def test_get():
    assert isinstance(tool_parsers.get("mistral"), MistralParser)
    with pytest.raises(ConfigError, match=r"hermes, .*, mistral, .*; got 'herms'.*'hermes'"):
        tool_parsers.get("herms")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\\n{{ tool_call | tojson }}\\n</tool_call>", "hermes"),
        ('<|start_header_id|>{{ \'{"name": "\' }}{{ \'"parameters": \' }}', "llama3_json"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\\n<function={{ name }}>\\n<parameter={{ key }}>", "qwen3_coder"),
        ("<tool_call>{{ name }}\\n<arg_key>{{ key }}</arg_key>", "glm45"),
        ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>{{ key }}</arg_key>", "hy_v3"),
        ('{{ ns }}minimax:tool_call><invoke name="{{ name }}">', "minimax_m2"),
        ('<\uff5cDSML\uff5cinvoke name="{{ name }}">', "deepseek_v32"),
        ("{{ '<\uff5cDSML\uff5cfunction_calls>\\n' }}", "deepseek_v32"),
        ("{%- set t = '\uff5cDSML\uff5c' -%}{{ '<' + t + 'tool_calls>\\n' }}", "deepseek_v4"),
        ("{%- set t = '\uff5cDSML\uff5c' -%}{{ '<' + t + 'function_calls>\\n' }}", "deepseek_v32"),
        ("<seed:tool_call><function={{ name }}>", "seed_oss"),
        ("{{ '<|channel|>final' }}", "harmony"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}", "kimi_k2"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>{{ name }}", "deepseek_v31"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>function{{ name }}```json", "deepseek_v3"),
        ("<|tool_call|>{{ calls }}<|/tool_call|>", "phi4"),
        ("<|tool_call|>{{ calls | tojson }}", "granite"),
        ("<TOOLCALL>{{ calls }}</TOOLCALL>", "nemotron"),
        ("<tool_calls>[{{ calls }}]</tool_calls>", "hunyuan_a13b"),
        ("<longcat_tool_call>{{ call }}</longcat_tool_call>", "longcat"),
        ("<|START_ACTION|>{{ calls }}<|END_ACTION|>", "cohere"),
        ("{%- set tool_calls_token = '<|tools_prefix|>' -%}", "apertus"),
        ('function_call="<|function_call|>"', "gigachat3"),
        ("{{ 'List of tools: [' }}{{ '<|im_start|>' }}", "lfm2"),
        ("Use exact format: [func_name1(param1=value1), func_name2(...)]", "llama4_pythonic"),
        ("<|header_start|><|python_start|>{{ '\"parameters\": ' }}", "llama3_json"),
        ('<|tool_call>call:{{ name }}{ {{ key }}:<|"|>{{ value }}<|"|> }<tool_call|>', "gemma4"),
        ("<start_function_call>call:{{ name }}{ }<end_function_call>", "function_gemma"),
        ("{{ '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' }}", "lfm2"),
        ("List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2"),
        ("{{ '<function_calls>\\n' }}{{ name }}(", "olmo3"),
        ("<|start_header_id|>{{ message.role }}", None),
        ("", None),
    ],
)
def test_detect(template, name):
    assert tool_parsers.detect(template) == name


def test_ids_have_the_forms_that_templates_and_clients_expect():
    (start, *_) = tool_parsers.get("mistral").feed("[TOOL_CALLS]f[ARGS]{}")
    assert len(start.id) == 9 and start.id.isalnum()
    (start, *_) = tool_parsers.get("hermes").feed(HERMES)
    assert start.id.startswith("call_") and len(start.id) == 29


LONG = "x" * 450
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"
TOO_LONG = {  # a name that is too long, and what would begin a call in the same piece
    "glm45": f"<tool_call>{LONG}<tool_call>f\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n<function={LONG}<tool_call>\n<function=f>\n</function>",
    "kimi_k2": f"{KIMI}{LONG}{KIMI}functions.f:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
    "hy_v3": f"<tool_calls><tool_call>f<tool_sep><arg_key>{LONG}</arg_key>"
    "<arg_value>1</arg_value></tool_call><tool_call>f<tool_sep></tool_call></tool_calls>",
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_follows_a_name_that_is_too_long_is_read_in_any_pieces(name):
    text = TOO_LONG[name]
    found = []
    for size in (len(text), 1, 7, 401):
        parser = tool_parsers.get(name)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        events = [event for piece in pieces for event in parser.feed(piece)]
        parsed = collect(events + parser.finish())
        found.append((parsed.content, [(c.name, c.arguments) for c in parsed.tool_calls]))
    assert LONG in found[0][0] and found == [found[0]] * 4
    assert name == "hy_v3" or found[0][1] == [("f", "{}")]


ESCAPES = ["\\ud83d", "\\uDE00", "\\u00e9", "\\\\", '\\"', "\\n", "ud83d", "d8", "a", "é"]


@given(st.lists(st.sampled_from(ESCAPES), max_size=8), st.sets(st.integers(0, 60)))
def test_arguments_have_no_half_of_a_pair_in_any_pieces(parts, cuts):
    text = json.dumps({"a": 1})[:-1] + ', "b": "' + "".join(parts) + '"}'
    wanted = json.loads(text)["b"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    gate = SurrogateGate()
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    passed = "".join([*map(gate.push, pieces), gate.finish()])
    assert json.loads(passed) == {"a": 1, "b": wanted}
    if wanted == json.loads(text)["b"]:
        assert passed == text
