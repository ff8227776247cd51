"""Rope tables of absurd sizes are refused before anything is allocated."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from engine.device import CPU
from engine.errors import OutOfMemoryError
from engine.loading import weight_memory
from engine.loading.hf_config import config_from_dict
from engine.loading.weight_memory import weight_room
from engine.model import load
from engine.models import decoder, rope_tables


@pytest.fixture
def absurd(tiny):
    """A tiny model with the longest sequences and widest heads that a config.json may state."""
    return tiny.config_of(
        "llama", num_attention_heads=1, num_key_value_heads=1, head_dim=1024,
        max_position_embeddings=1 << 24,
    )  # fmt: skip


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_tables_above_the_limit_are_refused_whatever_is_free(
    make_model, absurd, monkeypatch, load_format
):
    """The limit is the engine's own: a machine with a terabyte refuses them, too."""
    monkeypatch.setattr(weight_memory, "device_memory", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(decoder, "rope_table", lambda *_: pytest.fail("a table was made"))
    path, _, _ = make_model(**absurd)
    with pytest.raises(OutOfMemoryError, match=r"at most 8\.00 GiB; they would have 64\.00 GiB"):
        load(path, device="cpu", load_format=load_format)


def test_what_would_fit_does(absurd):
    config = config_from_dict(absurd)
    with pytest.raises(OutOfMemoryError, match=f"What would fit: max_model_len={1 << 21}$"):
        weight_room(config, CPU, "float32", max_model_len=1 << 24).__enter__()
    assert rope_tables.rope_bytes(config, 1 << 21) == weight_memory._MAX_ROPE_BYTES
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
