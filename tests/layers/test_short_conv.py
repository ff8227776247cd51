"""Short convolutions of more taps than the op has, whole and in pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.config import ShortConvConfig
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.short_conv import ShortConv
from engine.weights import Weight

CHANNELS = 6
SLOTS = np.array([1], np.int32)


def _conv(size, rng):
    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    eye = Weight.dense(np.eye(3 * CHANNELS, dtype=np.float32))
    out = Weight.dense(np.eye(CHANNELS, dtype=np.float32))
    return ShortConv(Linear(eye), random(CHANNELS, size), Linear(out), random(CHANNELS))


def _run(conv, rows, states, start):
    tokens = list(range(len(rows)))
    batch = ForwardBatch.build([tokens], [start], [[0, 1]], 16, state_slots=SLOTS)
    return conv(rows, batch, states)


@pytest.mark.parametrize("size", range(2, 8))
@pytest.mark.parametrize("cuts", [(), (1,), (3, 4, 5), (2, 10), tuple(range(1, 20))])
def test_every_number_of_taps(size, cuts):
    rng = np.random.default_rng(size)
    conv = _conv(size, rng)
    taps = conv.taps if conv.older is None else np.concatenate([conv.older, conv.taps], axis=1)
    rows = rng.standard_normal((20, 3 * CHANNELS)).astype(np.float32)
    b, c, x = np.split(rows, 3, axis=1)
    padded = np.concatenate([np.zeros((size - 1, CHANNELS)), b * x])
    sums = [(padded[t : t + size] * taps.T).sum(0) for t in range(20)]
    states = np.full((3, ShortConvConfig(CHANNELS, size).state_rows, CHANNELS), 9.0, np.float32)
    ends = (0, *cuts, 20)
    got = [_run(conv, rows[i:j], states, i) for i, j in itertools.pairwise(ends)]
    np.testing.assert_allclose(np.concatenate(got), c * (sums + conv.bias), atol=1e-5)
    assert (states[[0, 2]] == 9.0).all()
