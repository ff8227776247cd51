"""A model without arithmetic but with a recurrent layer: each next token depends on all before.

Its state is one whole number, a function of all tokens so far, kept in the slots that the engine
assigns. It is also written to the first value of the token's key, whose page is compared for every
earlier token: so a wrong slot, a wrong page and a wrong order of moves all show in the output.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.cache import layer_cache
from engine.cache.layer_cache import LayerCache, StateShape
from engine.models.mock_model import MockModel

_MODULUS = 65521  # a prime whose products with small factors float32 holds exactly
BYTES_PER_SLOT = 4 * (3 + 5)


def _cache(config, layer, dtype, states):
    return LayerCache(states=(StateShape((3,), dtype), StateShape((5,), states)))


def chain(state, token):
    """The state after `token`."""
    return (state * 31 + token + 1) % _MODULUS


class RecurrentMock(MockModel):
    """Must be built by the fixture `recurrent`, which registers its kind of layer."""

    def __init__(self, vocab_size=64, max_model_len=512, eos_token_ids=()):
        super().__init__(vocab_size, max_model_len, eos_token_ids)
        kinds = ("attention", "recurrent mock")
        self.config = replace(self.config, num_layers=2, layer_kinds=kinds)

    def hidden_states(self, batch, kv_pages):
        (keys, _), (convs, states) = kv_pages
        found = np.zeros((batch.num_tokens, 2), np.float64)
        taken = batch.snapshot_slots
        size = keys.shape[2]
        for b in range(batch.num_sequences):
            first, stop = (int(at) for at in batch.cu_seqlens_q[b : b + 2])
            start = int(batch.context_lens[b]) - (stop - first)
            if start < 0:  # padding
                assert batch.state_slots[b] == -1 and (batch.state_targets[b] == -1).all()
                continue
            source = batch.state_slots[b]
            state = 0
            if start:
                state = int(states[source, 4])
                assert convs[source, 0] == state
                self._check_pages(keys, batch.block_tables[b], start, state)
            after = []
            for index in range(first, stop):
                state = chain(state, int(batch.token_ids[index]))
                slot = int(batch.slot_mapping[index])
                keys[slot // size, 0, slot % size] = state, start + len(after)
                after.append(state)
                found[index] = state, 0
            self._write(batch, b, after, convs, states)
            if taken is not None and taken[b] >= 0:
                offset = batch.snapshot_offsets[b]
                assert 0 < offset <= len(after)
                assert (start + offset) % 64 == 0 or offset == len(after)
                convs[taken[b]] = states[taken[b]] = after[offset - 1]
        return found if batch.logits_indices is None else found[batch.logits_indices]

    def _check_pages(self, keys, table, start, state):
        places = np.arange(start)
        size = keys.shape[2]
        rows = keys[table[places // size], 0, places % size]
        assert (rows[:, 1] == places).all() and rows[-1, 0] == state

    def _write(self, batch, b, after, convs, states):
        targets = np.atleast_1d(batch.state_targets[b])
        if len(targets) == 1 or len(after) > len(targets):
            targets = [-1] * (len(after) - 1) + [targets[-1]]
        for slot, state in zip(targets, after, strict=False):
            if slot >= 0:
                convs[slot] = states[slot] = state

    def logits(self, hidden):
        logits = np.full((len(hidden), self.config.vocab_size), -1e9, np.float32)
        logits[np.arange(len(hidden)), hidden[:, 0].astype(np.int64) % self.config.vocab_size] = 0
        return logits

    def continuation(self, prompt, count):
        state = 0
        for token in prompt:
            state = chain(state, token)
        ids = []
        for _ in range(count):
            ids.append(state % self.config.vocab_size)
            state = chain(state, ids[-1])
        return ids


def register(monkeypatch):
    """Register the mock's kind of layer for one test."""
    monkeypatch.setitem(layer_cache.CACHES_OF_KIND, "recurrent mock", _cache)
