"""Calls as templates write them: the grammar allows them, and they are read back in any pieces."""

from __future__ import annotations

import json

import pytest

from engine.server.tool_parsers import NAMES, Function, calls_of, collect, get
from tests.server import test_tool_formats_json as with_json
from tests.server import test_tool_formats_pythonic as pythonic
from tests.server import test_tool_formats_tagged as tagged
from tests.server.call_walks import MarkerTokens, compiled

pytest.importorskip("llguidance")

ITEM = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": ITEM},
        "s": {"type": "string"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("f", SCHEMA), Function("get.it-2", SCHEMA)]
ARGUMENTS = [
    {"city": "Zürich 漢 🙂"},
    {"city": "", "flag": True},
    {"city": "a", "items": [{"count": 5, "name": "é"}, {"name": 'say "x"'}], "s": "1 < 2"},
    {"city": "b", "items": []},
]
CALLS = [[("f", one)] for one in ARGUMENTS] + [[("f", ARGUMENTS[2]), ("get.it-2", ARGUMENTS[0])]]


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def with_text(value):
    """Return a value between tags."""
    return value if isinstance(value, str) else dumped(value)


def of_json(name, calls):
    written = [(function, dumped(given)) for function, given in calls]
    if name == "longcat":
        return "\n".join(
            f'<longcat_tool_call>\n{{"name": "{f}", "arguments": {given}}}\n</longcat_tool_call>'
            for f, given in written
        )
    if name in with_json.OBJECTS:  # a section for each call
        return "\n".join(with_json.render(name, [one]) for one in written)
    text = with_json.render(name, written)
    return text.replace(">\n[", ">[").replace("]\n<", "]<")  # Cohere's line breaks


def of_tags(name, calls):
    texts = [
        tagged.render(name, function, {key: with_text(one) for key, one in given.items()})
        for function, given in calls
    ]
    texts = [text.replace('name="city" string="false"', 'name="city" string="true"')
             for text in texts]  # fmt: skip
    if name not in SECTIONS:  # a section for each call
        return "\n".join(texts)
    begin, end = SECTIONS[name]
    inner = [text.removeprefix(f"{begin}\n").removesuffix(f"\n{end}") for text in texts]
    return "\n".join([begin, *inner, end])


SECTIONS = {
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "hy_v3": ("<tool_calls>", "</tool_calls>"),
    "deepseek_v32": (f"<{tagged.DSML}function_calls>", f"</{tagged.DSML}function_calls>"),
    "deepseek_v4": (f"<{tagged.DSML}tool_calls>", f"</{tagged.DSML}tool_calls>"),
}


def of_gemma(name, calls):
    marker = pythonic.MARKERS[name]
    written = [f"{function}{pythonic.gemma(given, marker)}" for function, given in calls]
    return pythonic.between(name, *written)


def of_python(name, calls):
    """Values are JSON: the grammar writes no other literals."""
    written = [
        f"{function}({', '.join(f'{key}={dumped(one)}' for key, one in given.items())})"
        for function, given in calls
    ]
    return pythonic.between(name, *written)


def of_llama(name, calls):
    texts = [f'{{"name": "{f}", "parameters": {dumped(given)}}}' for f, given in calls]
    return "; ".join(texts)


def of_mistral(name, calls):
    return "".join(f"[TOOL_CALLS]{f}[ARGS]{dumped(given)}" for f, given in calls)


def of_harmony(name, calls):
    [(function, given)] = calls[:1]
    head = f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>"
    return f"{head}{dumped(given)}"


RENDERERS = {
    **dict.fromkeys(with_json.FORMATS, of_json),
    **dict.fromkeys(tagged.FORMATS, of_tags),
    **dict.fromkeys(pythonic.GEMMA, of_gemma),
    **dict.fromkeys(pythonic.PYTHON, of_python),
    "llama3_json": of_llama,
    "mistral": of_mistral,
    "harmony": of_harmony,
}


def test_every_format_has_a_renderer_and_a_grammar():
    assert RENDERERS.keys() == set(NAMES)
    assert all(calls_of(name, FUNCTIONS) is not None for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_rendered_calls(name):
    tokens = MarkerTokens(get(name).markers, are_special=False)
    grammar = compiled(calls_of(name, FUNCTIONS).required(one_call=False), tokens)
    names = {function.name: function.parameters for function in FUNCTIONS}
    for calls in CALLS:
        text = RENDERERS[name](name, calls)
        matcher = grammar.new_state().matcher
        ids = list(text.encode())
        taken = matcher.try_consume_tokens(ids)
        assert taken == len(ids) and matcher.is_accepting(), ids and text.encode()[:taken]
        if name == "harmony":  # `HarmonyReasoning` passes it on so
            text = f"<|start|>assistant{text}"
        for size in (1, 2, 5, 1000):
            parser = get(name, names)
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            events = [event for piece in pieces for event in parser.feed(piece)]
            found = collect(events + parser.finish())
            assert not found.content.strip()
            read = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
            assert read == (calls[:1] if name == "harmony" else calls), size
