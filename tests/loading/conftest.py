"""Tiny models of every family, as Hugging Face directories and as .gguf files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.loading.tiny import (
    EXTRA,
    config_of,
    fused,
    random_tensors,
    tensor_shapes,
    write_model,
)


@pytest.fixture
def make_model(tmp_path):
    """Write a tiny model directory; returns (path, config, tensors)."""

    def make(model_type: str = "llama", dtype=np.float32, **changes):
        path = tmp_path / model_type
        return path, *write_model(path, model_type, dtype, **changes)

    return make


@pytest.fixture
def raw_safetensors(tmp_path):
    """Write a .safetensors file from a header (an object, or raw bytes) and its data."""

    def make(header, data: bytes = b"", name: str = "raw.safetensors") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return path

    return make


@pytest.fixture
def configs() -> dict:
    """config.json files as published ("old"; Phi's factors are made up) and as transformers 5
    saves them ("new").
    """
    return json.loads((Path(__file__).parent / "configs.json").read_text())


@pytest.fixture
def tiny():
    """The functions that describe tiny models: config_of, tensor_shapes, random_tensors, fused."""

    class Tiny:
        families = tuple(EXTRA)

    Tiny.fused = staticmethod(fused)
    Tiny.config_of = staticmethod(config_of)
    Tiny.tensor_shapes = staticmethod(tensor_shapes)
    Tiny.random_tensors = staticmethod(random_tensors)
    return Tiny


@pytest.fixture
def smollm2():
    from engine.loading.download import local_path

    path = local_path("smollm2")
    if path is None:
        pytest.skip("SmolLM2 is not in the cache (engine pull smollm2)")
    return path
