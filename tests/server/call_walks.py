"""Random answers within a grammar, over a made vocabulary of bytes and markers."""

from __future__ import annotations

import json
import random

import numpy as np

from engine.structured.grammar import GrammarCompiler
from engine.structured.masks import MaskPlan
from engine.structured.spec import StructuredOutput

EOS = 256
_LIKELY = 0.4  # chance that a token of several bytes is preferred
_CLOSING = b'"}]'


class MarkerTokens:
    """A vocabulary of bytes, an end of sequence, markers, and texts that end values."""

    bos_token_id = None

    def __init__(self, markers, *, are_special, texts=()):
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]
        self.tokens += [marker.encode() for marker in markers]
        num_special = len(self.tokens) if are_special else EOS + 1
        self.special_ids = frozenset(range(EOS, num_special))
        self.tokens += [text.encode() for text in texts]

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def token_bytes(self, token_id):
        return self.tokens[token_id]


def compiled(form, tokens):
    """Return the grammar of a format."""
    tag = {"type": "structural_tag", "format": form}
    compiler = GrammarCompiler(tokens, len(tokens.tokens), [EOS])
    return compiler.compile(StructuredOutput(structural_tag=json.dumps(tag)))


def walk(grammar, tokens, seed, most=4000):
    """Return a random text of a grammar, and whether the grammar ended it."""
    chance = random.Random(seed)
    ids = []
    state = grammar.new_state()
    mask = np.zeros((1, (len(tokens.tokens) + 31) // 32), np.int32)
    while len(ids) < most:
        state.follow(ids)
        assert MaskPlan([state]).fill(mask) == [True]
        assert not state.error, (state.error, text_of(ids, tokens))
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(tokens.tokens)]).tolist()
        assert allowed, text_of(ids, tokens)
        token = _choose(allowed, chance)
        if token == EOS:
            return text_of(ids, tokens), True
        ids.append(token)
    return text_of(ids, tokens), False


def _choose(allowed, chance):
    if EOS in allowed and chance.random() < _LIKELY:
        return EOS
    groups = [
        [i for i in allowed if i > EOS],
        [i for i in allowed if i < 256 and i in _CLOSING],
        [i for i in allowed if 32 <= i < 127],
    ]
    for group in groups:
        if group and chance.random() < _LIKELY:
            return chance.choice(group)
    return chance.choice(allowed)


def text_of(ids, tokens):
    """Return the text of ids; what is no UTF-8 is replaced."""
    return b"".join(tokens.token_bytes(i) for i in ids).decode("utf-8", "replace")
