"""Rope tables: absurd sizes are refused before anything is allocated, large ones cost nothing."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams
from engine.device import CPU, resolve_device, to_numpy
from engine.errors import ConfigError, OutOfMemoryError
from engine.layers.rotary import rope_table
from engine.loading import weight_memory
from engine.loading.hf_config import config_from_dict
from engine.loading.weight_memory import weight_room
from engine.model import load
from engine.models import decoder, rope_tables


@pytest.fixture
def absurd(tiny):
    """A tiny model with the longest sequences and widest heads that a config.json may state."""
    return tiny.config_of(
        "llama", num_attention_heads=1, num_key_value_heads=1, head_dim=512,
        max_position_embeddings=1 << 24,
    )  # fmt: skip


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_tables_above_the_limit_are_refused_whatever_is_free(
    make_model, absurd, monkeypatch, load_format
):
    """The limit is the engine's own: a machine with a terabyte refuses them, too."""
    monkeypatch.setattr(weight_memory, "device_memory", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(decoder, "RopeTable", lambda *_: pytest.fail("a table was made"))
    path, _, _ = make_model(**absurd)
    with pytest.raises(OutOfMemoryError, match=r"at most 8\.00 GiB; they would have 32\.00 GiB"):
        load(path, device="cpu", load_format=load_format)


def test_what_would_fit_does(absurd):
    config = config_from_dict(absurd)
    with pytest.raises(OutOfMemoryError, match=f"What would fit: max_model_len={1 << 22}$"):
        weight_room(config, CPU, "float32", max_model_len=1 << 24).__enter__()
    assert rope_tables.rope_bytes(config, 1 << 22) == weight_memory._MAX_ROPE_BYTES
    assert load(config=config, load_format="dummy", device="cpu", max_model_len=64).step


def test_the_hosts_free_memory_counts(absurd, monkeypatch):
    config = config_from_dict(absurd)
    monkeypatch.setattr(weight_memory, "device_memory", lambda device: (1 << 30, 1 << 30))
    with pytest.raises(OutOfMemoryError, match=r"are free\. What would fit: max_model_len=") as got:
        weight_room(config, CPU, "float32", max_model_len=1 << 20).__enter__()
    fits = int(str(got.value).rpartition("=")[2])
    with weight_room(config, CPU, "float32", max_model_len=fits):
        assert fits > 1 << 17


def test_a_limit_of_the_process_that_the_plan_does_not_see(absurd):
    """With `ulimit -v`, NumPy itself raises a MemoryError."""
    code = f"""
from engine.errors import OutOfMemoryError
from engine.loading.hf_config import config_from_dict
from engine.model import load
try:
    load(config=config_from_dict({absurd | {"max_position_embeddings": 1 << 21}}),
         load_format="dummy", device="cpu")
except OutOfMemoryError as error:
    print(error)
"""
    limit = 4 << 30

    def restrict():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=restrict
    )
    assert "no room for " in done.stdout, done.stderr


@pytest.fixture
def many_positions(tiny):
    """The longest sequences that a config.json may state: 1 GiB of tables."""
    return config_from_dict(tiny.config_of("llama", head_dim=16, max_position_embeddings=1 << 24))


def test_rows_are_computed_as_far_as_sequences_reach(many_positions):
    """Errors in other options are found first, and need not wait for 16 million positions."""
    model = load(config=many_positions, load_format="dummy", device="cpu")
    (table,) = model.decoder._ropes
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLMEngine(model, num_blocks=32, max_num_seqs=0)
    assert table.num_computed == 0 and table.array.shape == (1 << 24, 16)
    with LLMEngine(model, num_blocks=600, max_num_batched_tokens=8000) as engine:
        for length, num_computed in [(8191, 8192), (8193, 16384), (100, 16384)]:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            engine.add_request("r", [1] * length, params)
            while engine.has_unfinished_requests():
                engine.step()
            assert table.num_computed == num_computed
    want = rope_table(many_positions.rope, 16384)
    np.testing.assert_array_equal(table.array[:16384], want)
    assert not table.array[16384:20000].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_kinds_of_longrope_rows_are_computed(tiny, device):
    if device == "cuda" and not resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    values = tiny.config_of("llama", head_dim=16, max_position_embeddings=20000)
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    values["rope_scaling"] = {"type": "longrope", **factors}
    values["rope_scaling"]["original_max_position_embeddings"] = 9000
    config = config_from_dict(values)
    model = load(config=config, load_format="dummy", device=device, dtype="float32")
    decoder = model.decoder
    want = rope_table(config.rope, 20000)
    decoder.extend_ropes(10)
    decoder.extend_ropes(9000)
    (table,) = decoder.rope_tables
    for first in (0, 20000):
        np.testing.assert_array_equal(
            to_numpy(table[first : first + 16384]), want[first : first + 16384]
        )
        assert not table[first + 16384 : first + 20000].any()
    decoder.extend_ropes(20000)
    np.testing.assert_array_equal(to_numpy(table), want)
