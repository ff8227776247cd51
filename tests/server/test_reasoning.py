"""Reasoning parsers: blocks opened by answer or prompt, and the same result for every split."""

from __future__ import annotations

import functools
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.server import reasoning, tool_parsers

THINK = ("deepseek_r1", "qwen3")  # formats of one block
OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"


def split(name, prompt, pieces):
    parser = reasoning.get(name, prompt)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("name", THINK)
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (PLAIN, "<think>\nHm, 1 < 2.\n</think>\n\nYes.\n", ("Hm, 1 < 2.", "Yes.\n")),
        (PLAIN, "\n<think>Hm</think>Yes", ("Hm", "Yes")),
        (PLAIN, "<think>\n\n</think>\n\nYes", ("", "Yes")),
        (PLAIN, "<think>never closed </thin", ("never closed </thin", "")),
        (PLAIN, " Yes <think>no</think>", ("", " Yes <think>no</think>")),
        (PLAIN, "<thin", ("", "<thin")),
        (PLAIN, " \n", ("", " \n")),
        (PLAIN, "", ("", "")),
        (OPENED, "Hm\n\nso\n</think>\n\nYes", ("Hm\n\nso", "Yes")),
        (OPENED, "Hm", ("Hm", "")),
        (OPENED, "a</think>b</think>c", ("a", "b</think>c")),
        (OPENED, "</think> ", ("", "")),
        (CLOSED, "Yes</think> <think>", ("", "Yes</think> <think>")),
        # Markers that are repeated where the block begins or ends.
        (OPENED, "<think>\nHm</think>Yes", ("Hm", "Yes")),
        (OPENED, "\n<think> <think>Hm <think> so</think>Yes", ("Hm <think> so", "Yes")),
        (PLAIN, "<think><think>\nHm</think>Yes", ("Hm", "Yes")),
        (OPENED, "<think></think>Yes", ("", "Yes")),
        (OPENED, "<thin", ("<thin", "")),
        (OPENED, "<think>", ("", "")),
        (OPENED, "Hm</think>\n</think>\n\nYes</think>", ("Hm", "Yes</think>")),
        (OPENED, "Hm</think><think>\n\n</think>\n\nYes", ("Hm", "Yes")),
        (OPENED, "Hm</think> The <think> tag", ("Hm", "The <think> tag")),
        (OPENED, "Hm</think> <think> is a tag", ("Hm", "<think> is a tag")),
        (OPENED, "Hm</think> <think> </thi", ("Hm", "<think> </thi")),
        (PLAIN, "</think>\n\nYes", ("", "Yes")),
        (PLAIN, " </thin", ("", " </thin")),
        (PLAIN, "Hm</think>Yes", ("", "Hm</think>Yes")),
        (CLOSED, "\n\nYes", ("", "Yes")),
        (CLOSED, "</think>\n\nYes", ("", "Yes")),
        (CLOSED, "<think>\n\n</think>\n\nYes", ("", "Yes")),
        (CLOSED, "<think>\n\nYes", ("", "<think>\n\nYes")),
    ],
)
def test_the_end_of_the_prompt_decides(name, prompt, text, expected):
    assert split(name, prompt, [text]) == expected


def test_without_a_prompt_the_family_decides():
    assert split("deepseek_r1", None, ["Hm</think>Yes"]) == ("Hm", "Yes")
    assert split("qwen3", None, ["Hm</think>Yes"]) == ("", "Hm</think>Yes")
    assert split("qwen3", None, ["<think>Hm</think>Yes"]) == ("Hm", "Yes")


def test_a_mark_in_the_middle_of_the_prompt_does_not_count():
    assert split("qwen3", "<think> is a marker", ["Yes"]) == ("", "Yes")


def test_text_is_passed_on_as_it_arrives():
    parser = reasoning.get("qwen3", OPENED)
    assert parser.is_reasoning
    assert [parser.feed(piece) for piece in ("Hm ", "<b> ", "so</th", "ink>", "\nYes", " ")] == [
        ("Hm", ""), (" <b>", ""), (" so", ""), ("", ""), ("", "Yes"), ("", " "),
    ]  # fmt: skip
    assert not parser.is_reasoning


FRAGMENTS = ["<think>", "</think>", "<", "</thi", "think>", "\n", " ", "Hm", "Yes"]


@given(
    st.sampled_from(THINK),
    st.sampled_from([None, PLAIN, OPENED, CLOSED]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join),
    st.lists(st.integers(0, 100), max_size=12),
)
@settings(max_examples=1000, deadline=None)
def test_every_split_gives_the_same(name, prompt, text, cuts):
    whole = split(name, prompt, [text])
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert split(name, prompt, [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert split(name, prompt, text) == whole
    assert split(name, prompt, [text, ""]) == whole


# ---- calls in a block

CALLS = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('\n{"name": "f", "parameters": ', "}\n"),
    "mistral": ("[TOOL_CALLS]f[ARGS]", ""),
}


def answer(kind, prompt, pieces):
    """Return (reasoning, content, calls) of an answer, as the server computes them."""
    make = functools.partial(tool_parsers.get, kind, {"f"})
    thinker, parser = reasoning.get("qwen3", prompt, make), make()
    thoughts, events = [], []
    for part in (*map(thinker.feed, pieces), thinker.finish()):
        thoughts.append(part[0])
        events += parser.feed(part[1])
    parsed = tool_parsers.collect(events + parser.finish())
    return "".join(thoughts), parsed.content, [call.arguments for call in parsed.tool_calls]


def every_split(kind, prompt, text):
    """Return the answer, which must be the same for all pairs of cuts."""
    whole = answer(kind, prompt, [text])
    assert answer(kind, prompt, text) == whole
    for cut in range(len(text)):
        assert answer(kind, prompt, [text[:cut], text[cut:]]) == whole
        third = (cut + len(text)) // 2
        assert answer(kind, prompt, [text[:cut], text[cut:third], text[third:]]) == whole
    return whole


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_in_a_block_that_is_never_closed(kind):
    begin, end = CALLS[kind]
    call = begin + '{"a": "x"}' + end
    told = begin + '{"a": "</think>"}' + end
    damaged = begin + '{"a": x}' + end
    cut = begin + '{"a": "x'
    for prompt, opening in ((PLAIN, "<think>\n"), (OPENED, "<think>")):
        for text, expected in (
            (f"Hm. {call}", ("Hm.", "", ['{"a": "x"}'])),
            (call, ("", "", ['{"a": "x"}'])),
            (f"Hm. {call}\n{call}", ("Hm.", "", ['{"a": "x"}'] * 2)),
            (f"Hm.\n{call}\nSo.", ("Hm.", "So.", ['{"a": "x"}'])),
            (f"Hm. {cut}", ("Hm.", "", ['{"a": "x'])),
            (f"Hm. {told}", ("Hm.", "", ['{"a": "</think>"}'])),
            (f"Hm. {told}{told} {told}", ("Hm.", "", ['{"a": "</think>"}'] * 3)),
            # A call in a block that is closed is part of the reasoning.
            (f"Hm. {call} so</think>Yes", (f"Hm. {call} so", "Yes", [])),
            (f"Hm. {call}</think>{call}", (f"Hm. {call}".rstrip(), "", ['{"a": "x"}'])),
            (f"Hm. {told}</think>Yes", (f"Hm. {told}".rstrip(), "Yes", [])),
            # What is no call is part of the reasoning too.
            (f"Hm. {damaged} so", (f"Hm. {damaged} so", "", [])),
            (f"Hm. {damaged}</think>Yes", (f"Hm. {damaged}".rstrip(), "Yes", [])),
            (f"Hm. {damaged}{call}", (f"Hm. {damaged}".rstrip(), "", ['{"a": "x"}'])),
            (f"Hm. {cut}</think>Yes", (f"Hm. {cut}", "Yes", [])),
            (f"Hm. {cut}</think>\n{call}", (f"Hm. {cut}", "", ['{"a": "x"}'])),
            (f"Hm. {begin}", (f"Hm. {begin}".rstrip(), "", [])),
            (f"Hm. {begin}</think>Yes", (f"Hm. {begin}".rstrip(), "Yes", [])),
            (f"Hm. {call.replace('f', 'g', 1)}", None),
        ):
            found = every_split(kind, prompt, opening + text)
            expected = expected or (f"Hm. {call.replace('f', 'g', 1)}".rstrip(), "", [])
            assert found == expected, (prompt, opening + text)


def test_without_tools_nothing_is_a_call():
    text = "Hm. " + "".join(CALLS["hermes"])
    assert split("qwen3", OPENED, [text]) == (text, "")
    text = "Hm. " + '{"a": "</think>"}'.join(CALLS["hermes"])
    assert split("qwen3", OPENED, [text]) == tuple(text.split("</think>"))


def test_reasoning_is_passed_on_up_to_a_call():
    make = functools.partial(tool_parsers.get, "hermes", {"f"})
    parser = reasoning.get("qwen3", OPENED, make)
    begin, end = CALLS["hermes"]
    texts = ["Hm <b> ", "so <tool", "s> ", begin, "{}", end, " x"]
    assert [parser.feed(text)[0] for text in texts] == ["Hm <b>", " so", " <tools>", *[""] * 4]
    assert parser.finish() == ("", f"{begin}{{}}{end} x")


CALL_FRAGMENTS = [
    *FRAGMENTS, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "f", '{"name": "f", ',
    '"arguments": {', '"parameters": {', '"a": "', '"', "}", "}}", "{}", "\n", "[", "]", ",", ";",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>', '{"name": "f", "parameters": {}}',
    '{"arguments": {"a": "</think>"}, "name": "f"}',
]  # fmt: skip


@given(
    st.sampled_from(list(CALLS)),
    st.sampled_from([PLAIN, OPENED, CLOSED]),
    st.lists(st.sampled_from(CALL_FRAGMENTS), max_size=12).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
@settings(max_examples=500, deadline=None)
def test_every_split_gives_the_same_with_calls(kind, prompt, text, cuts):
    whole = answer(kind, prompt, [text])
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert answer(kind, prompt, [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert answer(kind, prompt, text) == whole
    thought, content, calls = whole
    assert len(thought) + len(content) + sum(map(len, calls)) <= len(text)


@pytest.mark.parametrize("prompt", [PLAIN, OPENED])
@pytest.mark.parametrize(
    "repeated",
    [
        " ", "</thin", "<think>", "</think>", "x", "<think></think>", "<tool_call>", "\n{",
        '<tool_call>{"name": "f", "arguments": {"a": "', '{"name":"f","parameters":{"a":"</think>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>', '<tool_call>{"name": "</think>',
    ],
)  # fmt: skip
def test_hostile_text_takes_linear_time(prompt, repeated):
    text = repeated * (200_000 // len(repeated))
    for kind in (None, "hermes", "llama3_json"):
        make = functools.partial(tool_parsers.get, kind, {"f"}) if kind else None
        parser = reasoning.get("qwen3", prompt, make)
        start = time.process_time()
        for i in range(0, len(text), 16):
            parser.feed(text[i : i + 16])
        parser.finish()
        assert time.process_time() - start < 3


def test_get():
    with pytest.raises(ConfigError, match=r"harmony, .*qwen3, .*; got 'qwen'.*'qwen3'"):
        reasoning.get("qwen")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n\\n</think>\\n\\n' }}", "qwen3"),
        (
            "{{ content.split('</think>')[-1] }}{{ '<\uff5cAssistant\uff5c><think>\\n' }}",
            "deepseek_r1",
        ),
        ("{{ '<|im_start|>' }}", None),
    ],
)
def test_detect(template, name):
    assert reasoning.detect(template) == name
