"""Stop strings: the same result for every way of splitting the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop import StopChecker

SMALL = st.text("ab<", max_size=24)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4)


def feed(stops, pieces, include=False):
    checker = StopChecker(stops, include)
    texts, stop = [], None
    for piece in pieces:
        result = checker.push(piece)
        texts.append(result.text)
        stop = result.stop
        if stop is not None:
            break
    texts.append(checker.flush())
    assert checker.stop == stop
    return "".join(texts), stop, texts


def expected(stops, text, include):
    """Return the result by definition: the first end of a stop string, and the longest there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(STOPS, SMALL, st.booleans(), st.data())
@settings(max_examples=500, deadline=None)
def test_any_split_gives_what_the_definition_says(stops, text, include, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, stop, _ = feed(stops, pieces, include)
    assert (found, stop) == expected(stops, text, include)


@given(STOPS, SMALL)
@settings(max_examples=200, deadline=None)
def test_only_a_possible_stop_prefix_is_held_back(stops, text):
    checker = StopChecker(stops)
    emitted = ""
    for char in text:
        result = checker.push(char)
        emitted += result.text
        if result.stop is not None:
            return
    held = checker.flush()
    assert emitted + held == text
    assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_across_pieces(size):
    text = "Hello <|end|> world"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert feed(["<|end|>"], pieces)[:2] == ("Hello ", "<|end|>")
    assert feed(["<|end|>"], pieces, include=True)[:2] == ("Hello <|end|>", "<|end|>")


def test_a_possible_stop_prefix_is_held_back():
    _, _, texts = feed(["###"], ["a#", "#b", "##"])
    assert texts == ["a", "##b", "", "##"]


def test_the_stop_that_is_complete_first_wins():
    assert feed(["abcd", "bc"], ["xabcd"])[:2] == ("xa", "bc")
    assert feed(["bcd", "cd", "d"], ["abcd"])[:2] == ("a", "bcd")
    assert feed(["z", "y"], ["a y z"])[:2] == ("a ", "y")


def test_text_after_a_stop_is_discarded():
    checker = StopChecker(["."])
    assert checker.push("One. Two. ") == ("One", ".")
    assert checker.push("Three.") == ("", ".")
    assert checker.flush() == ""


def test_unchecked_text_is_emitted():
    checker = StopChecker(["stop"])
    assert checker.push("stop st", check=False) == ("stop st", None)
    assert checker.push("op st") == ("op ", None)
    assert checker.push("o", check=False) == ("sto", None)
    assert checker.push("p stop") == ("p ", "stop")


def test_without_stop_strings_everything_is_emitted():
    checker = StopChecker([])
    assert checker.push("anything") == ("anything", None)
    assert checker.flush() == ""
