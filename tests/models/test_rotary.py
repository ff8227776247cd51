"""Rope tables: frequencies against transformers, the table against its definition."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import RopeConfig
from engine.errors import ConfigError
from engine.layers.rotary import (
    attention_factor,
    inverse_frequencies,
    long_rope_offset,
    rope_table,
)
from engine.loading.hf_config import config_from_dict

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/ropes.json").read_text())


@pytest.mark.parametrize("case", GOLDEN)
def test_frequencies_of_real_models(case):
    record = GOLDEN[case]
    rope = config_from_dict(record["config"]).rope
    length = record["length"]
    is_long = rope.scaling == "longrope" and length > rope.original_max_position
    got = inverse_frequencies(rope, is_long=is_long, length=length)
    # Theirs are float32, and powers of theta magnify the rounding of the exponent.
    np.testing.assert_allclose(got, record["inv_freq"], rtol=2e-6)
    assert attention_factor(rope) == pytest.approx(record["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("case", GOLDEN)
def test_rows_are_the_frequencies_times_the_position(case):
    record = GOLDEN[case]
    rope, row = config_from_dict(record["config"]).rope, record["length"] - 1
    table = rope_table(rope, record["length"])
    is_long = long_rope_offset(rope, record["length"]) > 0
    last = table[-1]
    angles = row * inverse_frequencies(rope, is_long=is_long, length=record["length"])
    want = np.concatenate([np.cos(angles), np.sin(angles)]) * attention_factor(rope)
    assert table.dtype == np.float32
    np.testing.assert_array_equal(last, want.astype(np.float32))


def test_a_table_built_in_parts_equals_the_whole():
    rope = RopeConfig(theta=100.0, rotary_dim=4)
    table = rope_table(rope, 20000)
    positions = np.arange(20000)[:, None] * np.array([1.0, 0.1])
    want = np.concatenate([np.cos(positions), np.sin(positions)], axis=1)
    np.testing.assert_allclose(table, want, atol=1e-7)


def test_long_rows_have_a_factor_of_their_own():
    factors = {"short_factor": (1.0, 1.5), "long_factor": (2.0, 3.0), "original_max_position": 4}
    rope = RopeConfig(rotary_dim=4, scaling="longrope", attention_factor=1.1, **factors)
    plain = rope_table(rope, 6)
    table = rope_table(replace(rope, long_attention_factor=1.3), 6)
    np.testing.assert_array_equal(table[:6], plain[:6])
    np.testing.assert_allclose(table[6:], plain[6:] * 1.3 / 1.1, rtol=1e-6)
    one = replace(rope, long_factor=rope.short_factor)
    assert not one.has_two_ropes
    assert replace(one, long_attention_factor=1.3).has_two_ropes
    assert not replace(one, long_attention_factor=1.1).has_two_ropes


def test_longrope_has_short_rows_then_long_rows():
    rope = RopeConfig(
        rotary_dim=4,
        scaling="longrope",
        factor=4.0,
        original_max_position=8,
        short_factor=(1.0, 2.0),
        long_factor=(3.0, 5.0),
    )
    table = rope_table(rope, 32)
    assert table.shape == (64, 4) and long_rope_offset(rope, 32) == 32
    scale = math.sqrt(1 + math.log(4) / math.log(8))
    assert table[1, 2] == pytest.approx(scale * math.sin(1.0))
    assert table[33, 2] == pytest.approx(scale * math.sin(1 / 3))
    assert rope_table(rope, 8).shape == (8, 4) and long_rope_offset(rope, 8) == 0


def test_dynamic_rows_do_not_depend_on_the_tables_length():
    rope = RopeConfig(rotary_dim=8, scaling="dynamic", factor=2.0, original_max_position=16)
    np.testing.assert_array_equal(rope_table(rope, 24), rope_table(rope, 64)[:24])
    plain = rope_table(RopeConfig(rotary_dim=8), 64)
    np.testing.assert_array_equal(rope_table(rope, 64)[:16], plain[:16])
    assert np.abs(rope_table(rope, 64)[40] - plain[40]).max() > 1e-2


def test_unknown_scaling():
    with pytest.raises(ConfigError, match="got 'magic'"):
        rope_table(RopeConfig(rotary_dim=4, scaling="magic"), 4)
