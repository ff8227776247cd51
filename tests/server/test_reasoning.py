"""Reasoning parsers: blocks opened by answer or prompt, and the same result for every split."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.server import reasoning

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"


def split(name, prompt, pieces):
    parser = reasoning.get(name, prompt)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("name", reasoning.NAMES)
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
    st.sampled_from(reasoning.NAMES),
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


@pytest.mark.parametrize("prompt", [PLAIN, OPENED])
@pytest.mark.parametrize("repeated", [" ", "</thin", "<think>", "</think>", "x"])
def test_hostile_text_takes_linear_time(prompt, repeated):
    text = repeated * (2_000_000 // len(repeated))
    start = time.process_time()
    split("qwen3", prompt, [text[i : i + 16] for i in range(0, len(text), 16)])
    assert time.process_time() - start < 3


def test_get():
    with pytest.raises(ConfigError, match=r"deepseek_r1, qwen3; got 'qwen'.*'qwen3'"):
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
