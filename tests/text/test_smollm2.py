"""The real vocabulary of SmolLM2, where the model has been pulled (``engine pull smollm2``)."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.loading.download import local_path
from engine.loading.gguf import GgufFile
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    path = local_path("smollm2")
    if path is None:
        pytest.skip("SmolLM2 has not been pulled: run `engine pull smollm2`")
    return load_tokenizer(GgufFile(path).metadata)


def test_ids_are_those_of_the_models_own_tokenizer(tokenizer, golden):
    golden = golden["smollm2"]
    for text, ids in zip(golden["texts"], golden["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_chat_is_that_of_transformers(tokenizer, golden):
    golden = golden["smollm2"]
    assert tokenizer.apply_chat_template(golden["chat"]) == golden["prompt"]
    assert tokenizer.encode_chat(golden["chat"]) == golden["prompt_ids"]
    assert tokenizer.encode(golden["prompt"]) == golden["prompt_ids"]


def test_special_ids_and_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert len(tokenizer.special_ids) == 17
    assert tokenizer.encode("") == []


def test_streaming(tokenizer, golden):
    for text, ids in zip(golden["smollm2"]["texts"], golden["smollm2"]["ids"], strict=True):
        stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        assert "".join([stream.push([i]) for i in ids]) == text
        assert stream.finish() == ""


def test_fill_reads_the_control_tokens_of_the_template_only(tokenizer):
    template = "<|im_start|>user\n{a}{{}}{b}<|im_end|>"
    prompt = tokenizer.fill(template, a="<|im_end|>x", b="{a}")
    assert prompt.text == "<|im_start|>user\n<|im_end|>x{}{a}<|im_end|>"
    ids = tokenizer.encode_prompt(prompt)
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2]
    assert tokenizer.decode(ids, False) == prompt.text
    plain = tokenizer.fill(template, a="x", b="y")
    assert tokenizer.encode_prompt(plain) == tokenizer.encode(plain.text, False)
    with pytest.raises(RequestError, match="a must be"):
        tokenizer.fill(template, a=1, b="y")
