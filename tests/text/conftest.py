"""Golden texts, and the small tokenizers with which they were made."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from engine.text.tokenizer import load_tokenizer

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden/text.json").read_text())


@pytest.fixture(scope="session")
def golden() -> dict:
    """What make_text.py wrote."""
    return GOLDEN


@pytest.fixture(scope="session")
def byte_level_metadata():
    """Metadata of the small byte-level vocabulary; keywords are keys after tokenizer.ggml."""

    def make(pre: str = "gpt-2", **more: object) -> dict:
        metadata = copy.deepcopy(GOLDEN["byte_level"]["metadata"])
        metadata["tokenizer.ggml.pre"] = pre
        return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}

    return make


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata):
    """A byte-level tokenizer: 617 tokens, no BOS."""
    return load_tokenizer(byte_level_metadata())


@pytest.fixture(scope="session")
def sentencepiece():
    """A sentencepiece tokenizer with BOS, byte fallback and a leading space."""
    return load_tokenizer(GOLDEN["sentencepiece"][0]["metadata"])


@pytest.fixture(scope="session")
def bare_sentencepiece():
    """A sentencepiece tokenizer without the leading space."""
    return load_tokenizer(GOLDEN["sentencepiece"][1]["metadata"])
