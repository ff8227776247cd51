"""What outputs begin with: which prefixes are kept, and which masks."""

from __future__ import annotations

import random

import numpy as np

from engine.structured import prefixes
from engine.structured.prefixes import MaskStore, PrefixTree


def _walk(tree, ids):
    """Return the prefixes of an output, None where it is alone."""
    found = [tree.start()]
    for token_id in ids:
        found.append(None if found[-1] is None else tree.after(found[-1], token_id))
    return found


def test_a_request_alone_leaves_nothing_but_the_start():
    tree = PrefixTree()
    assert [prefix is None for prefix in _walk(tree, [5, 6, 7])] == [False, True, True, True]
    assert _walk(tree, [])[0].along([5]) == _walk(tree, [])[:1]


def test_equal_outputs_at_the_same_time_have_all_prefixes_in_common():
    tree = PrefixTree()
    walkers = [tree.start() for _ in range(3)]
    for token_id in (5, 6, 7):
        walkers = [tree.after(prefix, token_id) for prefix in walkers]
        assert walkers[0] is walkers[1] is walkers[2] is not None
    assert tree.start().along([5, 6, 7])[-1] is walkers[0]
    assert len(tree.start().along([5, 9])) == 2


def test_equal_prefixes_are_the_same_object_and_others_are_not():
    tree, rng, seen = PrefixTree(), random.Random(0), {}
    for _ in range(400):
        ids = [rng.randrange(3) for _ in range(6)]
        for length, prefix in enumerate(_walk(tree, ids)):
            if prefix is not None:
                assert seen.setdefault(prefix, ids[:length]) == ids[:length]
    assert len(set(map(tuple, seen.values()))) == len(seen) > 100


def test_a_full_tree_is_left_to_those_who_have_it(monkeypatch):
    monkeypatch.setattr(prefixes, "_MAX_PREFIXES", 4)
    tree = PrefixTree()
    first = tree.start(), tree.start()
    for token_id in range(4):
        assert tree.after(first[0], token_id) is tree.after(first[1], token_id)
    assert tree.start() is not first[0]
    assert tree.after(first[0], 0) is first[0].along([0])[1]


def test_masks_are_kept_for_the_second_request_and_the_oldest_go():
    tree, store = PrefixTree(), MaskStore(max_bytes=3 * 8)
    alone = tree.start()
    store.add(alone, np.ones(2, np.int32))
    assert not len(store) and store.get(alone) is None
    tree.start()
    shared = [tree.after(alone, i) for i in range(4) for _ in range(2)][::2]
    for i, prefix in enumerate(shared[:3]):
        mask = np.full(2, i, np.int32)
        store.add(prefix, mask)
        mask[:] = 9  # a copy is kept
    assert store.get(shared[0]).tolist() == [0, 0]
    store.add(shared[3], np.full(2, 3, np.int32))
    kept = [store.get(prefix) for prefix in shared]
    assert [None if mask is None else int(mask[0]) for mask in kept] == [0, None, 2, 3]
