"""A synthetic vocabulary of 151,936 tokens, for structured output benchmarks."""

from __future__ import annotations

import itertools
import random

EOS, VOCAB_SIZE = 151_645, 151_936
NUM_WORDS = 151_643  # ids from here on are special tokens
SYLLABLES = [
    "".join(parts)
    for parts in itertools.product("bdfgklmnprstvwz", "aeiou", ("", "n", "r", "s", "t", "nd"))
]


class MadeTokenizer:
    """Bytes, JSON punctuation, numbers, and words of up to four syllables, half after a space."""

    special_ids = frozenset(range(NUM_WORDS, VOCAB_SIZE))
    bos_token_id, eos_token_ids = None, (EOS,)
    strip_left, max_token_chars = 0, 20

    def __init__(self):
        marks = ['{"', '":', '","', '",', '"}', '"]', '"],', '["', "true", "false", "null"]
        marks += ['"name', ' "', '": "', '", "', '": ', "name", "age", "tags", "  ", "\n  "]
        tokens = [bytes([i]) for i in range(256)] + [t.encode() for t in marks]
        tokens = dict.fromkeys([*tokens, *(b"%d" % i for i in range(10, 1000))])
        rng = random.Random(0)
        while len(tokens) < NUM_WORDS:
            word = "".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2, 3, 3, 4))))
            tokens[f"{rng.choice(('', ' '))}{word}".encode()] = None
        self._tokens = list(tokens)
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._longest = max(map(len, tokens))

    def token_bytes(self, token_id):
        return self._tokens[token_id] if token_id < NUM_WORDS else b"<|%d|>" % token_id

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def encode(self, text, add_special_tokens=True):
        data, ids = text.encode(), []
        while data:
            size = next(n for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids
