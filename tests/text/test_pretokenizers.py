"""Pre-tokenizers by .gguf name against those of the models' tokenizer.json, as tokenizers runs it.

pre_tokenizers.json has the `pre_tokenizer` and `normalizer` of a model with each name; its probe is
what the converters tell pre-tokenizers apart with, and scripts with case, marks and digits.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.text.encode_worker import WorkerEncoder, encode_here
from engine.text.pretokenizers import PRE_TOKENIZERS
from engine.text.tokenizer import load_tokenizer

DATA = json.loads(Path(__file__).with_name("pre_tokenizers.json").read_text())
ORIGINALS = DATA["originals"]
PROBE = DATA["probe"]


def original(name: str):
    """Return the split of a text by the model's own tokenizer.json."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    values = {"version": "1.0", "added_tokens": [], "model": model, **ORIGINALS[name]}
    backend = tokenizers.Tokenizer.from_str(json.dumps(values))

    def split(text: str) -> list[str]:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    return split


def ours(name: str, text: str) -> list[str]:
    pre = PRE_TOKENIZERS[name]
    if pre.normalizer() is not None:
        text = pre.normalizer().normalize_str(text)
    return [piece for piece, _ in pre.backend().pre_tokenize_str(text)]


def test_every_name_has_an_original():
    """llama.cpp's fallback for files without a name is no model's."""
    assert PRE_TOKENIZERS.keys() == ORIGINALS.keys() | {"default"}


@pytest.mark.parametrize("name", sorted(ORIGINALS))
def test_the_split_is_the_originals(name):
    split = original(name)
    assert ours(name, PROBE) == split(PROBE)
    for category in ("Lu", "Ll", "Lo", "Nd", "No", "Po", "Mn"):
        chars = [chr(c) for c in range(0x3000) if unicodedata.category(chr(c)) == category]
        text = "a ".join(chars[::7])
        assert ours(name, text) == split(text), category


@settings(max_examples=20, deadline=None)
@given(
    st.text(st.sampled_from("aB1\u00e9 \n\r\t'.,$(\u4e2d\u3042\u0301sS\u0664\u00b2|-"), max_size=24)
)
def test_any_text_is_split_as_by_the_original(text):
    for name, split in SPLITS.items():
        assert ours(name, text) == split(text), name


SPLITS = {name: original(name) for name in ORIGINALS}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("glm4", ["123", "45", "'s", " cafe", "\u0301s", "!!\n\n", " ", " x"]),
        ("stablelm2", [*"12345", "'s", " caf\u00e9s", "!!\n\n", " ", " x"]),
        ("deepseek-llm", [*"12345", "'", "s", " cafe", "\u0301", "s", "!!", *"\n\n", " ", " x"]),
    ],
)
def test_numbers_and_words(name, wanted):
    level = tokenizers.decoders.ByteLevel()
    got = [level.decode([piece]) for piece in ours(name, "12345's cafe\u0301s!!\n\n  x")]
    assert got == wanted


def test_only_what_the_model_adds_is_added(byte_level_metadata):
    """glm4's template writes its prefix itself; Falcon 3 has no token before a text."""
    for name in ("glm4", "chatglm-bpe", "falcon3", "deepseek-llm", "deepseek-v3", "stablelm2"):
        tokenizer = load_tokenizer(byte_level_metadata(name, bos_token_id=1))
        assert tokenizer.encode("ab") == tokenizer.encode("ab", add_special_tokens=False)


@pytest.mark.parametrize("name", ["deepseek-llm", "superbpe", "tiny_aya"])
def test_rules_that_take_quadratic_time_run_in_a_process_with_limits(name, byte_level_metadata):
    tokenizer = load_tokenizer(byte_level_metadata(name))
    assert isinstance(tokenizer._encode, WorkerEncoder)
    assert list(tokenizer.encode(PROBE)) == encode_here(tokenizer._backend, PROBE, True)[0]


def test_the_environment_chooses_for_a_file_without_a_known_name(byte_level_metadata, monkeypatch):
    wanted = load_tokenizer(byte_level_metadata("smollm")).encode("12 345")
    for name in (None, "new-rule"):
        metadata = byte_level_metadata(name) if name else byte_level_metadata()
        if name is None:
            del metadata["tokenizer.ggml.pre"]
        monkeypatch.delenv("ENGINE_PRE_TOKENIZER", raising=False)
        with pytest.raises(ConfigError, match="set ENGINE_PRE_TOKENIZER to"):
            load_tokenizer(metadata)
        monkeypatch.setenv("ENGINE_PRE_TOKENIZER", "smollm")
        assert load_tokenizer(metadata).encode("12 345") == wanted
    monkeypatch.setenv("ENGINE_PRE_TOKENIZER", "smolm")
    with pytest.raises(ConfigError, match=r"ENGINE_PRE_TOKENIZER must be one of .*got 'smolm'"):
        load_tokenizer(metadata)
