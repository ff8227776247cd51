"""Masks of grammars against a search through the texts that match."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from engine.structured.grammar import GrammarCompiler
from engine.structured.masks import MaskPlan
from engine.structured.spec import StructuredOutput
from engine.text.tokenizer import load_tokenizer

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden/text.json").read_text())
BYTE_LEVEL = GOLDEN["byte_level"]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}

TOKENS = [b"", b"<eos>", b"a", b"b", b"c", b"ab", b"bc", b"aab", b"\xc3", b"\xa9", b"\xc3\xa9b"]
EOS, VOCAB = 1, 70  # ids without a token at the end, in three words
PATTERN = "a{1,2}(b|bc|é)*c"


class Tokens:
    special_ids = frozenset({EOS})
    bos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [TOKENS.index(bytes([byte])) for byte in text.encode()]

    def token_bytes(self, token_id):
        return TOKENS[token_id] if token_id < len(TOKENS) else b""


@pytest.fixture(scope="module")
def grammar():
    return GrammarCompiler(Tokens(), VOCAB, [EOS]).compile(StructuredOutput(regex=PATTERN))


def _texts():
    """Return every text of up to 7 characters that matches."""
    texts = ("".join(t) for n in range(1, 8) for t in itertools.product("abcé", repeat=n))
    return [text.encode() for text in texts if re.fullmatch(PATTERN, text)]


def _allowed(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def _fill(states, paths, masks):
    """Make one mask for each state, none of them shared."""
    return MaskPlan(states, paths, range(len(states))).fill(masks)


def test_masks_allow_the_tokens_with_which_the_text_can_match(grammar):
    texts = _texts()
    prefixes = {text[:n] for text in texts for n in range(len(text) + 1)}
    pending, num_seen = [()], 0
    while pending:
        path = pending.pop()
        before = b"".join(TOKENS[i] for i in path)
        state, masks = grammar.new_state(), np.full((3, 3), 0x5A5A5A5A, np.int32)
        state.follow(path)
        assert _fill([state, grammar.new_state()], [(), path], masks[:2]) == [True, True]
        want = [i for i in range(2, len(TOKENS)) if before + TOKENS[i] in prefixes]
        want = [EOS] * (before in texts) + want
        assert _allowed(masks[0]) == _allowed(masks[1]) == want, before
        assert (masks[2] == 0x5A5A5A5A).all() and not state.error
        num_seen += 1
        # Texts that are too long to go on with are not all in `texts`.
        pending += [(*path, i) for i in want if i != EOS and len(before + TOKENS[i]) < 5]
    assert num_seen > 20


def test_a_path_that_is_not_allowed_gets_every_token_and_changes_nothing(grammar):
    state, masks = grammar.new_state(), np.zeros((3, 3), np.int32)
    state.follow([TOKENS.index(b"a")])
    paths = [(TOKENS.index(b"c"), EOS, EOS), (TOKENS.index(b"b"), 0), ()]
    assert _fill([state] * 3, paths, masks) == [False, False, True]
    assert (masks[:2] == -1).all()
    assert [TOKENS[i] for i in _allowed(masks[2])] == [
        token for token in TOKENS[2:] if token not in (b"aab", b"\xa9")
    ]


def test_a_token_that_is_not_allowed_is_an_error(grammar):
    state, other = grammar.new_state(), grammar.new_state()
    state.follow([TOKENS.index(b"b")])
    state.catch_up()
    assert "doesn't satisfy the grammar" in state.error and not other.error
    error = state.error
    state.follow([TOKENS.index(b"b")] * 2)  # stays as it is
    other.follow([TOKENS.index(b"a"), TOKENS.index(b"c"), EOS])
    masks = np.zeros((2, 3), np.int32)
    assert _fill([state, other], [(), ()], masks) == [True, True]
    assert state.error == error and (masks[0] == -1).all() and not other.error


@pytest.mark.parametrize("text", ["yes", " a  b", "<0x41>", "日本語 é", "{0}", "a{0}b{1} "])
@pytest.mark.parametrize(
    "metadata", [BYTE_LEVEL, *(one["metadata"] for one in GOLDEN["sentencepiece"])]
)
def test_forced_text_is_ordinary_tokens(metadata, text):
    """Tokenizers that write a space before a text, and texts that name special tokens."""
    tokenizer = load_tokenizer(metadata)
    special = sorted(tokenizer.special_ids)
    text = text.format(*(tokenizer.token_bytes(i).decode() for i in special))
    end = tokenizer.eos_token_ids[0]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [end])
    grammar = compiler.compile(StructuredOutput(choice=[f"{text}x", f"{text}y"]))
    mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
    for seed in range(4):
        state = grammar.new_state()
        output = []
        while end not in output:
            assert len(output) < 60
            state.follow(output)
            forced = state.forced_tokens(100)
            assert _fill([state], [()], mask) == [True], state.error
            allowed = [i for i in _allowed(mask[0]) if i < tokenizer.vocab_size]
            assert allowed == forced[:1] or not forced
            output.append(random.Random(seed).choice(allowed))
        assert tokenizer.special_ids.isdisjoint(output[:-1])
        written = b"".join(map(tokenizer.token_bytes, output[:-1])).decode()
        assert written in (f"{text}x", f"{text}y")
