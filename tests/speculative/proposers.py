"""Proposers for tests: right, partly right, random and hostile ones."""

from __future__ import annotations

import itertools
import random

import numpy as np

from engine.drafts import Drafts

KINDS = ("right", "half", "random", "tree", "hostile", "padded", "nothing")


def outputs_of(last):
    """Return the output ids of each scheduler request, by its id, of {name: RequestOutput}."""
    return {
        f"{name}#{index}" if index else name: list(completion.token_ids)
        for name, output in last.items()
        for index, completion in enumerate(output.outputs)
    }


class KnownProposer:
    """Knows the outputs that requests have without drafts, and deviates from them.

    Parameters
    ----------
    outputs : dict of str to list of int
        By the id of the scheduler's request.
    vocab_size : int
    kinds : sequence of str
        Of `KINDS`; each proposal is of one that is chosen at random.
    seed : int
    """

    def __init__(self, outputs, vocab_size, kinds=KINDS, seed=0):
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._kinds = kinds
        self._rng = random.Random(seed)
        self.num_asked = 0
        self.forgotten = []

    def propose(self, wanted):
        """Return a proposal for each request."""
        self.num_asked += len(wanted)
        assert all(count >= 1 for _, count in wanted)
        return [self.drafts(request, count) for request, count in wanted]

    def drafts(self, request, count):
        """Return a proposal of any kind."""
        right = self._outputs.get(request.request_id, [])[request.num_output_tokens :][:count]
        kind = self._rng.choice(self._kinds)
        return getattr(self, f"_{kind}")(right, self._rng.randint(1, count))

    def forget(self, request):
        """Note it."""
        self.forgotten.append(request.request_id)

    def cost(self, num_sequences, num_tokens):
        """Return 0.0."""
        return 0.0

    def close(self):
        """Do nothing."""

    def _right(self, right, count):
        return Drafts(tuple(right)) if right else None

    def _half(self, right, count):
        ids = right[:count]
        if ids:
            at = self._rng.randrange(len(ids))
            ids[at] = (ids[at] + 1) % self._vocab_size
        return Drafts(tuple(ids))

    def _random(self, right, count):
        return Drafts(tuple(self._rng.randrange(self._vocab_size) for _ in range(count)))

    def _padded(self, right, count):
        """Right ones, then one that repeats."""
        return Drafts((*right[: count - 1], *[0] * (count - len(right[: count - 1]))))

    def _nothing(self, right, count):
        return self._rng.choice([None, Drafts(()), Drafts((), ())])

    def _tree(self, right, count):
        """Random parents; a right token at many nodes whose ancestors are right."""
        ids, parents, num_right, seen = [], [], [], set()
        for index in range(count):
            parent = self._rng.randrange(-1, index)
            depth = 0 if parent < 0 else num_right[parent]  # right ones before it; -1: a wrong one
            token = self._rng.randrange(self._vocab_size)
            if 0 <= depth < len(right) and self._rng.random() < 0.7:
                token = right[depth]
            while (parent, token) in seen:
                token = (token + 1) % self._vocab_size
            seen.add((parent, token))
            ids.append(token)
            parents.append(parent)
            num_right.append(depth + 1 if right[depth : depth + 1] == [token] else -1)
        return Drafts(tuple(ids), tuple(parents))

    def _hostile(self, right, count):
        return self._rng.choice(GARBAGE + ODD)(self._vocab_size, count)


class Unprintable(Exception):
    """An exception whose text raises."""

    def __str__(self):
        raise RuntimeError("no text")


class _Lying(Drafts):
    """Drafts that tell a wrong length."""

    __slots__ = ()

    def __len__(self):
        return 1


def _unchecked(ids, parents=None):
    """Return drafts that were not checked on construction."""
    drafts = object.__new__(Drafts)
    object.__setattr__(drafts, "token_ids", ids)
    object.__setattr__(drafts, "parents", parents)
    return drafts


GARBAGE = [
    lambda vocab, count: object(),
    lambda vocab, count: "abc",
    lambda vocab, count: 7,
    lambda vocab, count: float("nan"),
    lambda vocab, count: np.full(count, np.nan),
    lambda vocab, count: [1] * count,
    lambda vocab, count: Drafts,
    lambda vocab, count: object.__new__(Drafts),
    lambda vocab, count: ValueError("no"),
    lambda vocab, count: Unprintable(),
    lambda vocab, count: Drafts((vocab,)),
    lambda vocab, count: Drafts((2**70,)),
    lambda vocab, count: Drafts((10**5000,)),
    lambda vocab, count: Drafts(tuple([1] * (count + 1))),
    lambda vocab, count: Drafts(tuple([1] * 10**4)),
    lambda vocab, count: _unchecked(itertools.repeat(1)),
    lambda vocab, count: _unchecked((1,), itertools.repeat(-1)),
    lambda vocab, count: _unchecked((-1,)),
    lambda vocab, count: _unchecked((1.5,)),
    lambda vocab, count: _unchecked((True,)),
    lambda vocab, count: _unchecked((float("nan"),)),
    lambda vocab, count: _unchecked(("1",)),
    lambda vocab, count: _unchecked(5),
    lambda vocab, count: _unchecked(None),
    lambda vocab, count: _unchecked((np.int64(3),)),
    lambda vocab, count: _unchecked((1,), (0,)),
    lambda vocab, count: _unchecked((1,), (-2,)),
    lambda vocab, count: _unchecked((1,), (float("nan"),)),
    lambda vocab, count: _unchecked((1,), (-0.5,)),
    lambda vocab, count: _unchecked((1,), ()),
    lambda vocab, count: _unchecked((1,), "a"),
    lambda vocab, count: _unchecked((1, 1), (-1, -1)),
    lambda vocab, count: _unchecked((1, 2), (-1, 0.0)),
    lambda vocab, count: _unchecked((1, 2), (1, -1)),
    lambda vocab, count: _Lying(tuple([1] * (count + 3))),
]
"""Makers, from the size of the vocabulary and the number wanted, of what is no valid proposal."""

ODD = [
    lambda vocab, count: _unchecked(iter([1])),
    lambda vocab, count: _unchecked({1: 2}),
    lambda vocab, count: _unchecked([1], [-1]),
]
"""Makers of what is valid once it is copied."""
