"""Streaming text equals decoding everything at once, however the ids arrive."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer, TokenTexts

# U+2581 is sentencepiece's spelling of a space, so it cannot round-trip.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30)
NAMES = ["byte_level", "sentencepiece", "bare_sentencepiece"]


@pytest.fixture(scope="session")
def tokenizer(request):
    return request.getfixturevalue(request.param)


every_tokenizer = pytest.mark.parametrize("tokenizer", NAMES, indirect=True)


def split(draw, ids):
    """Cut `ids` into pushes of any size, empty ones too."""
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(tokenizer, prompt, pushes, **kwargs):
    stream = IncrementalDetokenizer(tokenizer, prompt, **kwargs)
    pieces = [stream.push(ids) for ids in pushes]
    for piece in pieces:
        piece.encode()  # whole characters
    before = stream.text
    assert before == "".join(pieces)
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    run_by_token(tokenizer, prompt, [i for ids in pushes for i in ids], kwargs, stream.text)
    return stream.text, pieces


def run_by_token(tokenizer, prompt, ids, kwargs, text):
    """The fast path for one token gives the same pieces as the slow path."""
    short, long = (IncrementalDetokenizer(tokenizer, prompt, **kwargs) for _ in range(2))
    for i in ids:
        assert short.push_token(i) == long.push([i])
    assert short.finish() == long.finish()
    assert short.text == long.text == text


def after(tokenizer, prompt, ids, skip=True):
    """Return the text of `ids` by definition: the whole text minus what the prompt shows."""
    whole = tokenizer.decode(prompt + ids, skip)
    data = b"".join(
        tokenizer.token_bytes(i) for i in prompt if not (skip and i in tokenizer.special_ids)
    )
    shown = tokenizer.decode(prompt, skip)
    if data and not whole.startswith(shown):  # the prompt's last character was completed
        assert shown.endswith("\ufffd")
        shown = shown[:-1]
        assert whole.startswith(shown)
    return whole[len(shown) :]


@every_tokenizer
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_split_anywhere(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    skip = data.draw(st.booleans())
    text, _ = run(tokenizer, [], split(data.draw, ids), skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip)


@every_tokenizer
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_text_round_trips(tokenizer, data):
    text = data.draw(TEXTS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed, pieces = run(tokenizer, [], split(data.draw, ids), skip_special_tokens=False)
    assert streamed == text
    assert pieces[-1] == ""  # nothing is left of a complete text


@every_tokenizer
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_text_after_any_prompt(tokenizer, data):
    ids = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, rest = ids[:cut], ids[cut:]
    text, _ = run(tokenizer, prompt, split(data.draw, rest))
    assert text == after(tokenizer, prompt, rest)


@every_tokenizer
@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_ids_after_any_prompt(tokenizer, data):
    # Partial characters are the difficult case: draw many single bytes.
    byte_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] >= b"\x80"]
    some = st.one_of(st.sampled_from(byte_ids), st.integers(0, tokenizer.vocab_size - 1))
    prompt = data.draw(st.lists(some, max_size=6))
    ids = data.draw(st.lists(some, max_size=6))
    text, _ = run(tokenizer, prompt, split(data.draw, ids))
    assert text == after(tokenizer, prompt, ids)


def letters(tokenizer, text):
    """Ids of the single bytes of `text`."""
    spelled = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [spelled[bytes([byte])] for byte in text.encode()]


def test_half_a_character_waits(byte_level):
    ids = letters(byte_level, "é😀x")
    stream = IncrementalDetokenizer(byte_level)
    assert [stream.push([i]) for i in ids] == ["", "é", "", "", "", "😀", "x"]
    assert stream.finish() == ""


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(byte_level):
    prompt, rest = letters(byte_level, "secret 😀")[:-2], letters(byte_level, "😀!")[-3:]
    stream = IncrementalDetokenizer(byte_level, prompt)
    assert [stream.push([i]) for i in rest] == ["", "😀", "!"]
    broken = IncrementalDetokenizer(byte_level, prompt)
    assert broken.push(letters(byte_level, "ab")) == "ab"
    assert broken.finish() == ""
    nothing = IncrementalDetokenizer(byte_level, prompt)
    assert nothing.finish() == nothing.text == ""


def test_an_intended_replacement_character(byte_level):
    ids = letters(byte_level, "\ufffd")
    stream = IncrementalDetokenizer(byte_level, ids[:1])
    assert stream.push(ids[1:2]) + stream.push(ids[2:]) == "\ufffd"


def test_invalid_bytes_end_as_replacement_characters(byte_level):
    stream = IncrementalDetokenizer(byte_level)
    assert stream.push(letters(byte_level, "a😀")[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.text == "a\ufffd"


def test_the_leading_space_is_stripped_once(sentencepiece):
    ids = sentencepiece.encode("the the", add_special_tokens=False)
    first = IncrementalDetokenizer(sentencepiece, [sentencepiece.bos_token_id])
    assert first.push(ids) == "the the"
    later = IncrementalDetokenizer(sentencepiece, ids)
    assert later.push(ids) == " the the"


def test_one_table_serves_many_streams(byte_level):
    texts = TokenTexts(byte_level)
    half = letters(byte_level, "é")[0]
    assert texts[2] == "" and texts[half] is None and TokenTexts(byte_level, False)[2]
    ids = byte_level.encode("the quick é 😀")
    for _ in range(2):
        stream = IncrementalDetokenizer(byte_level, texts=texts)
        assert "".join(stream.push_token(i) for i in ids) == "the quick é 😀"
    assert {2, half} < set(texts) <= {2, half, *ids}


def test_special_tokens_between_bytes(byte_level):
    ids = letters(byte_level, "é")
    hidden = IncrementalDetokenizer(byte_level)
    assert hidden.push([ids[0], 2, ids[1]]) == "é"
    shown = IncrementalDetokenizer(byte_level, skip_special_tokens=False)
    assert shown.push([ids[0], 2, ids[1]]) == "\ufffd<|im_end|>\ufffd"


def test_work_per_token_is_constant(byte_level):
    ids = byte_level.encode("the quick brown fox 😀 ") * 20
    stream = IncrementalDetokenizer(byte_level)

    def seconds(count):
        start = time.thread_time()
        for _ in range(count):
            for i in ids:
                stream.push([i])
        return time.thread_time() - start

    seconds(5)
    early = min(seconds(5) for _ in range(3))
    seconds(100)
    late = min(seconds(5) for _ in range(3))
    assert late < 3 * early + 0.01


@pytest.mark.parametrize("tokenizer", ["sentencepiece"], indirect=True)
def test_half_a_surrogate_at_the_end_of_the_prompt(tokenizer):
    """Python decodes the two bytes to two replacement characters, which belong to the prompt."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    prompt = [by_byte[b"\xed"], by_byte[b"\xa2"]]
    assert run(tokenizer, prompt, [])[0] == after(tokenizer, prompt, []) == ""
    assert run(tokenizer, prompt[:1], [prompt[1:]])[0] == after(tokenizer, prompt[:1], prompt[1:])
