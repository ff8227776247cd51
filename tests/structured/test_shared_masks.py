"""Masks shared by equal states, against those that each state makes for itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.drafts import Drafts
from engine.structured import masks as masks_module
from engine.structured import sources
from engine.structured.grammar import GrammarCompiler
from engine.structured.masks import MaskPlan
from engine.structured.spec import StructuredOutput

EOS, VOCAB = 1, 130
TOKENS = [b"", b"<eos>", *(bytes([i]) for i in range(32, 127)), b"\n", b'{"', b'": ', b"ab", b"bc"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"enum": ["ab", "abc", 7]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Tokens:
    special_ids = frozenset({EOS})
    bos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [TOKENS.index(bytes([byte])) for byte in text.encode()]

    def token_bytes(self, token_id):
        return TOKENS[token_id] if token_id < len(TOKENS) else b""


def _grammars(compiler=None):
    compiler = compiler or GrammarCompiler(Tokens(), VOCAB, [EOS])
    kinds = [{"json": SCHEMA}, {"regex": "a{1,3}(b|bc)*c"}, {"choice": ["abc", "abd", "xy"]}]
    return [compiler.compile(StructuredOutput(**kind)) for kind in kinds]


def _bits(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


class Alone:
    """Makes each mask with a matcher that consumes everything."""

    def __init__(self):
        self._starts = [grammar.new_state().matcher for grammar in _grammars()]

    def mask(self, index, ids):
        """Return the allowed ids, or None if `ids` are not allowed or have ended."""
        matcher = self._starts[index].deep_copy()
        if EOS in ids or matcher.try_consume_tokens(list(ids)) != len(ids):
            return None
        return _bits(np.frombuffer(matcher.compute_bitmask(), np.int32))


def _drafts(rng, alone, index, output):
    """Return a few drafts, most of them allowed: none, a chain or a tree."""
    ids, path = [], list(output)
    for _ in range(rng.choice((0, 0, 1, 3))):
        allowed = alone.mask(index, path)
        ids.append(rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(VOCAB))
        path.append(ids[-1])
    if len(ids) == 3 and rng.random() < 0.3 and ids[0] != ids[1]:
        return Drafts(tuple(ids), (-1, -1, 0))
    return Drafts(tuple(ids))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_drafts", [False, True], ids=["plain", "drafts"])
def test_each_row_gets_the_mask_of_its_own_state(seed, with_drafts, monkeypatch):
    monkeypatch.setattr(masks_module, "_CONSUMES_ON_ALL_CORES", seed % 2 == 0)
    rng, alone, num_shared = random.Random(seed), Alone(), 0
    grammars = _grammars()
    live = []
    for _ in range(40):
        while len(live) < 9:  # requests come and go
            index, rule = rng.choice((0, 0, 1, 2)), rng.randrange(2)
            live += [(index, grammars[index].new_state(), rule, []) for _ in range(3)]
        rows = []
        for index, state, rule, output in live:
            state.follow(output)
            drafts = _drafts(rng, alone, index, output) if with_drafts else Drafts(())
            rows += [(index, state, rule, output, drafts.path(i)) for i in range(1 + len(drafts))]
        states, paths = [row[1] for row in rows], [row[4] for row in rows]
        plan = MaskPlan(states, paths if with_drafts else None, [row[2] for row in rows])
        masks = np.full((len(plan.firsts), -(-VOCAB // 32)), 0x5A5A5A5A, np.int32)
        is_allowed = plan.fill(masks)
        num_shared += len(rows) - len(masks)
        users = {}
        for (index, _, rule, output, path), i in zip(rows, plan.indices, strict=True):
            assert users.setdefault(i, (index, rule, *output, *path)) == (
                (index, rule, *output, *path)
            )
            if EOS in path:
                continue  # nothing is sampled there
            want = alone.mask(index, [*output, *path])
            if is_allowed[i]:
                assert _bits(masks[i]) == want
            else:  # every token
                before = alone.mask(index, [*output, *path[:-1]])
                assert (masks[i] == -1).all() and (before is None or path[-1] not in before)
        for index, _, _, output in live:
            allowed = alone.mask(index, output)
            output.append(min(allowed) if rng.random() < 0.8 else rng.choice(allowed))
        live = [each for each in live if each[3][-1] != EOS]
        assert not any(state.error for _, state, _, _ in live)
    assert num_shared > 20


def test_equal_states_need_one_mask_and_later_ones_none(monkeypatch):
    grammar = _grammars()[0]
    text = [TOKENS.index(token) for token in (b'{"', b"a", b'": ', b'"', b"x")]
    made = []
    compute = masks_module._compute

    def counted(runs, masks):
        made.append(len(runs))
        compute(runs, masks)

    monkeypatch.setattr(masks_module, "_compute", counted)
    for _ in range(2):
        states = [grammar.new_state() for _ in range(5)]
        for length in range(len(text) + 1):
            for state in states:
                state.follow(text[:length])
            plan = MaskPlan(states)
            assert plan.indices == [0] * 5
            plan.fill(np.empty((1, -(-VOCAB // 32)), np.int32))
    assert made == [1] * 6 + [0] * 6


def test_states_that_differ_in_a_rule_share_nothing():
    grammar = _grammars()[0]
    states = [grammar.new_state() for _ in range(4)]
    assert MaskPlan(states, None, [0, 1, 0, 1]).indices == [0, 1, 0, 1]


def test_a_wrong_id_is_an_error_of_its_request_only():
    grammar = _grammars()[2]
    states = [grammar.new_state() for _ in range(6)]
    right, wrong = TOKENS.index(b"a"), TOKENS.index(b"z")
    for state, first in zip(states, (right, wrong, right, wrong, right, right), strict=True):
        state.follow([first])
    plan = MaskPlan(states)
    masks = np.zeros((len(plan.firsts), -(-VOCAB // 32)), np.int32)
    plan.fill(masks)
    assert plan.indices == [0, 1, 0, 1, 0, 0] and (masks[1] == -1).all()
    for state in states:
        state.catch_up()
    assert [bool(state.error) for state in states] == [False, True] * 2 + [False] * 2


# Each "a" makes the row of the parser longer, until it meets its limit.
AMBIGUOUS = {"grammar": 'start: e\ne: e e | e e e | "a" | e "a" e'}
A = TOKENS.index(b"a")


@pytest.fixture
def ambiguous(monkeypatch):
    monkeypatch.setitem(sources._LIMITS, "max_items_in_row", 100)
    return GrammarCompiler(Tokens(), VOCAB, [EOS]).compile(StructuredOutput(**AMBIGUOUS))


def _filled(states, paths=None):
    """Return the mask of each row, whether its path is allowed, and the errors by row."""
    plan = MaskPlan(states, paths)
    masks = np.zeros((len(plan.firsts), -(-VOCAB // 32)), np.int32)
    is_allowed = plan.fill(masks)
    return masks[plan.indices], [is_allowed[i] for i in plan.indices], plan.errors


def test_a_limit_is_an_error_of_all_that_share_the_mask(ambiguous):
    states = [ambiguous.new_state() for _ in range(5)]
    for length in range(100):
        for state in states:
            state.follow([A] * length)
        masks, _, errors = _filled(states)
        if states[0].error:
            break
        assert not any(state.error for state in states) and (masks != -1).any() and not errors
    assert errors == {row: states[0].error for row in range(5)}
    assert 3 < length < 99 and "max is 100" in states[0].error
    assert {state.error for state in states} == {states[0].error} and (masks == -1).all()


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (1, 0, 2)])
def test_a_limit_behind_drafts_is_an_error_of_these_rows_only(ambiguous, order, is_tree):
    alone, length = ambiguous.new_state(), 0
    want = {}
    while not alone.error:
        alone.follow([A] * length)
        want[length], *_ = _filled([alone])
        length += 1
    states = [ambiguous.new_state() for _ in range(3)]
    rows = []
    for length in range(4):
        for state in states:
            state.follow([A] * length)
    for i in order:
        rows += [(i, (A,) * n) for n in range(60 if i else 1)]  # only the first has no drafts
        rows += [(i, (A,) * n + (EOS,)) for n in (2, 3) if is_tree]
    masks, _, errors = _filled([states[i] for i, _ in rows], [path for _, path in rows])
    for row, (_, path) in enumerate(rows):
        if EOS in path:
            continue  # nothing is sampled there
        length = 3 + len(path)
        assert (length >= max(want)) == (row in errors)
        assert _bits(masks[row]) == _bits(want[min(length, max(want))][0])
    assert {*errors.values()} == {alone.error} and "max is 100" in alone.error
    for length in range(3, max(want) + 1):  # all of them go on
        for state in states:
            assert not state.error
            state.follow([A] * length)
        masks, *_ = _filled(states)
        assert (masks == want[length]).all()
    assert {state.error for state in states} == {alone.error}


def test_forced_tokens_are_the_only_ones_that_masks_allow():
    rng, alone, grammars, num_forced = random.Random(3), Alone(), _grammars(), 0
    for _ in range(120):
        index = rng.randrange(3)
        state, output = grammars[index].new_state(), []
        while (allowed := alone.mask(index, output)) and len(output) < 20:
            state.follow(output)
            forced = state.forced_tokens(limit := rng.randint(1, 5))
            assert len(forced) <= limit
            for i, token_id in enumerate(forced):
                assert alone.mask(index, [*output, *forced[:i]]) == [token_id]
            num_forced += len(forced)
            output.append(rng.choice(allowed))
    assert num_forced > 100
