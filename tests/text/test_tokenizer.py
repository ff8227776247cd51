"""Ids and texts against independent tokenizers, and the rules around BOS and special tokens."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checks import shown, warn_once
from engine.errors import ConfigError, RequestError, TemplateError
from engine.text import encode_worker
from engine.text.gguf_vocab import UNSUPPORTED_KEYS
from engine.text.pretokenizers import PRE_TOKENIZERS
from engine.text.tokenizer import load_tokenizer

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden/text.json").read_text())
PRES = sorted(GOLDEN["byte_level"]["ids"])


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_ids_are_those_of_plain_bpe(pre, byte_level_metadata):
    golden = GOLDEN["byte_level"]
    tokenizer = load_tokenizer(byte_level_metadata(pre))
    for text, ids in zip(golden["texts"], golden["ids"][pre], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_every_pre_tokenizer_gives_other_ids():
    ids = GOLDEN["byte_level"]["ids"]
    assert len({json.dumps(ids[pre]) for pre in PRES}) == len(PRES)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_round_trips(name, byte_level_metadata):
    tokenizer = load_tokenizer(byte_level_metadata(name))
    for text in GOLDEN["byte_level"]["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids, skip_special_tokens=False)
        assert back == text or PRE_TOKENIZERS[name].nfc


@pytest.mark.parametrize("pre", ["smolm", "", "Llama3", 7])
def test_an_unknown_pre_tokenizer_is_named_with_the_known_ones(pre, byte_level_metadata):
    with pytest.raises(ConfigError, match="smollm") as error:
        load_tokenizer(byte_level_metadata(pre))
    assert repr(pre) in str(error.value)


def test_a_missing_pre_tokenizer_is_an_error(byte_level_metadata):
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ConfigError, match=r"no tokenizer\.ggml\.pre"):
        load_tokenizer(metadata)


@pytest.mark.parametrize("case", GOLDEN["sentencepiece"], ids=["prefix", "no-prefix"])
def test_sentencepiece_ids_and_texts(case):
    tokenizer = load_tokenizer(case["metadata"])
    for text, ids, decoded in zip(case["texts"], case["ids"], case["decoded"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]
        assert tokenizer.decode(ids) == decoded
    for ids, decoded in case["parts"]:
        assert tokenizer.decode(ids) == decoded


def test_sentencepiece_text_after_a_special_token_is_encoded_like_a_start(sentencepiece):
    user = sentencepiece.token_to_id("<|user|>")
    ids = sentencepiece.encode("<|user|>the dog", add_special_tokens=False)
    assert ids == [user, *sentencepiece.encode("the dog", add_special_tokens=False)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "gpt2, llama.*'bert'"),
        ({"model": None}, "None"),
        ({"tokens": []}, "tokens, the vocabulary, is missing"),
        ({"tokens": "abc"}, "must be an array"),
        ({"tokens": ["a", 3]}, r"tokens\[1\] must be a string"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' has ids 0 and 2"),
        ({"token_type": [1, 2]}, "entries, one per token"),
        ({"merges": []}, "merges must hold"),
        ({"merges": ["ab"]}, r"merges\[0\]"),
        ({"merges": ["a unheard"]}, "do not match"),
        ({"bos_token_id": 617, "add_bos_token": True}, "bos_token_id must be .*got 617"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id; got '2'"),
    ],
)
def test_damaged_metadata(changes, message, byte_level_metadata):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(byte_level_metadata(**changes))


def test_sentencepiece_needs_scores(golden):
    metadata = dict(golden["sentencepiece"][0]["metadata"])
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ConfigError, match="scores must have 620 entries, one per token"):
        load_tokenizer(metadata)


def test_scores_and_not_positions_order_the_merges(golden):
    case = golden["sentencepiece"][0]
    metadata = json.loads(json.dumps(case["metadata"]))
    count, first = len(metadata["tokenizer.ggml.tokens"]), 300
    order = [*range(first), *reversed(range(first, count))]
    for key in ("tokens", "scores", "token_type"):
        values = metadata[f"tokenizer.ggml.{key}"]
        metadata[f"tokenizer.ggml.{key}"] = [values[i] for i in order]
    tokenizer = load_tokenizer(metadata)
    for text, ids in zip(case["texts"], case["ids"], strict=True):
        assert [order[i] for i in tokenizer.encode(text, add_special_tokens=False)] == ids


def test_equal_scores_are_a_warning(golden, caplog):
    """Sentencepiece merges the leftmost pair first; a list of merges has its own order."""
    warn_once.cache_clear()
    words = ["ab", "bc", "cd"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *words, *"dcba▁"],
        "tokenizer.ggml.token_type": [2] + [1] * 8,
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0] + [-9.0] * 5,
        "tokenizer.ggml.bos_token_id": 0,
    }
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("abc", add_special_tokens=False) == [8, 1, 5]
    load_tokenizer(golden["sentencepiece"][0]["metadata"])
    assert not caplog.text  # tokens of one character are no merges
    metadata["tokenizer.ggml.scores"] = [0.0, -1.0, 0.0, 0.0] + [-9.0] * 5
    load_tokenizer(metadata)
    assert "tokenizer.ggml.scores: 2 tokens share their score with another" in caplog.text


def test_metadata_may_hold_numpy_arrays(golden):
    metadata = dict(golden["sentencepiece"][0]["metadata"])
    metadata["tokenizer.ggml.scores"] = np.float32(metadata["tokenizer.ggml.scores"])
    metadata["tokenizer.ggml.token_type"] = np.int32(metadata["tokenizer.ggml.token_type"])
    metadata["tokenizer.ggml.bos_token_id"] = np.uint32(1)
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("the dog")[1:] == load_tokenizer(
        golden["sentencepiece"][0]["metadata"]
    ).encode("the dog", add_special_tokens=False)
    assert type(tokenizer.bos_token_id) is int


def test_a_bos_in_the_text_is_not_doubled(byte_level_metadata):
    tokenizer = load_tokenizer(byte_level_metadata(add_bos_token=True))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [0, *plain]
    assert tokenizer.encode("<|endoftext|>hi") == [0, *plain]
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.encode("<|endoftext|>hi", add_special_tokens=False) == [0, *plain]


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
def test_a_rendered_chat_has_the_bos_of_its_template(written, byte_level_metadata):
    metadata = byte_level_metadata(add_bos_token=True)
    template = written + "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(metadata | {"tokenizer.chat_template": template})
    messages = [{"role": "user", "content": "hi"}]
    bos = [0] if written else []
    assert tokenizer.encode_chat(messages) == bos + tokenizer.encode("hi", False)
    assert tokenizer.encode(tokenizer.apply_chat_template(messages)).count(0) == 1


def test_bos_and_eos_by_the_files_flags(byte_level_metadata):
    both = load_tokenizer(byte_level_metadata("llama-bpe", add_eos_token=True))
    assert (both.encode("")) == [0, 2]
    none = load_tokenizer(byte_level_metadata("llama-bpe", add_bos_token=False))
    assert none.encode("") == []


def test_end_of_turn_marks_in_the_template_end_a_sequence(byte_level_metadata):
    template = {"tokenizer.chat_template": "{{ '<|im_start|>a<|im_end|>' }}"}
    metadata = byte_level_metadata(eos_token_id=0)
    assert load_tokenizer(metadata).eos_token_ids == (0,)
    assert load_tokenizer(metadata | template).eos_token_ids == (0, 2)
    named = byte_level_metadata(eos_token_id=0, eot_token_id=1)
    assert load_tokenizer(named).eos_token_ids == (0, 1)


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (("<|end|>",), ("<|end|>",)),
        (("<|end|>", "<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),
    ],
)
def test_the_messages_of_gpt_oss_do_not_end_its_answer(byte_level_metadata, marks, ends):
    """As in llama.cpp; in a template of other models ``<|end|>`` does."""
    metadata = byte_level_metadata(eos_token_id=2)
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += marks
    metadata["tokenizer.ggml.token_type"] += [3] * len(marks)
    metadata["tokenizer.chat_template"] = "{{ '" + "".join(marks) + "' }}"
    wanted = (2, *(first + marks.index(text) for text in ends))
    assert load_tokenizer(metadata).eos_token_ids == wanted


def test_special_tokens_are_parsed_and_left_out(byte_level):
    ids = byte_level.encode("<|im_start|>a<think>b<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and byte_level.token_to_id("<think>") in ids
    assert byte_level.decode(ids) == "a<think>b"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>b<|im_end|>"
    assert byte_level.special_ids == {0, 1, 2}


def test_bytes_of_tokens(byte_level, sentencepiece):
    assert byte_level.token_bytes(byte_level.token_to_id("Ġthe")) == b" the"
    assert byte_level.token_bytes(byte_level.token_to_id("ð")) == b"\xf0"
    assert byte_level.token_bytes(1) == b"<|im_start|>"
    assert sentencepiece.token_bytes(sentencepiece.token_to_id("▁the")) == b" the"
    assert sentencepiece.token_bytes(sentencepiece.token_to_id("<0xF0>")) == b"\xf0"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_ids_outside_the_vocabulary(name, request):
    tokenizer = request.getfixturevalue(name)
    v = tokenizer.vocab_size
    assert tokenizer.id_to_token(v - 1) is not None
    for padded in (v, v + 100, 2**40):
        assert tokenizer.id_to_token(padded) is None
        assert tokenizer.token_bytes(padded) == b""
        assert tokenizer.decode([padded]) == ""
    for bad in (-1, -v, 1.5, "a", None):
        with pytest.raises(RequestError, match="token id"):
            tokenizer.token_bytes(bad)
        with pytest.raises(RequestError, match="token id"):
            tokenizer.decode([bad])
    for bad in (3, None, [[1]], np.zeros((2, 2), int)):
        with pytest.raises(RequestError, match="ids must be a sequence"):
            tokenizer.decode(bad)
    assert tokenizer.decode(np.int64([5, 6])) == tokenizer.decode([5, 6])


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_no_token_is_longer_than_the_longest(name, request, golden):
    tokenizer = request.getfixturevalue(name)
    texts = [tokenizer.decode([i], False) for i in range(tokenizer.vocab_size)]
    assert max(map(len, texts)) <= tokenizer.max_token_chars <= 40
    for text in golden["byte_level"]["texts"]:
        assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_token_chars


@pytest.mark.parametrize("text", [None, b"x", 3, ["x"], "\ud800"])
def test_bad_text(byte_level, text):
    with pytest.raises(RequestError, match="text must be"):
        byte_level.encode(text)


def test_invalid_bytes_decode_to_replacement_characters(byte_level):
    euro = [byte_level.token_to_id(letter) for letter in "âĤ¬"]
    assert byte_level.decode(euro) == "€"
    assert byte_level.decode(euro[:2]) == "\ufffd"
    assert byte_level.decode([*euro[:2], *euro]) == "\ufffd€"


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_text_round_trips(text, byte_level, sentencepiece, bare_sentencepiece):
    for tokenizer in (byte_level, sentencepiece, bare_sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_model_without_a_template(byte_level, byte_level_metadata):
    with pytest.raises(TemplateError, match="no default chat template"):
        byte_level.apply_chat_template([{"role": "user", "content": "x"}])
    assert byte_level.chat_template is None
    named = load_tokenizer(byte_level_metadata() | {"tokenizer.chat_template.rag": "x"})
    with pytest.raises(TemplateError, match='it has "rag"'):
        named.apply_chat_template([{"role": "user", "content": "x"}])


def test_phi3_markers_strip_the_spaces_after_them(golden):
    metadata = dict(golden["sentencepiece"][0]["metadata"])
    plain = load_tokenizer(metadata).encode("<|user|>\nthe dog<|end|>\n")
    phi3 = load_tokenizer(metadata | {"general.architecture": "phi3"})
    assert len(phi3.encode("<|user|>\nthe dog<|end|>\n")) < len(plain)
    assert phi3.encode("<|user|>\nthe dog<|end|>\n") == phi3.encode("<|user|>the dog<|end|>")


def test_user_defined_runs_of_spaces_are_merged(golden):
    metadata = json.loads(json.dumps(golden["sentencepiece"][1]["metadata"]))
    tokens = metadata["tokenizer.ggml.tokens"]
    run = next(i for i, t in enumerate(tokens) if t == "▁▁")
    metadata["tokenizer.ggml.token_type"][run] = 4
    tokens[run] = "  "  # as .gguf files of Gemma spell it
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("  ", add_special_tokens=False) == [run]
    assert tokenizer.token_bytes(run) == b"  "


def test_importing_the_engine_imports_no_tokenizer():
    code = "import sys, engine; print([m for m in ('tokenizers', 'jinja2') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_importing_the_tokenizer_opens_no_connection():
    code = "import sys, engine.text.tokenizer; print('huggingface_hub' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("token", [5, None, b"a", ["a"], 10**5000, "\ud800"], ids=shown)
def test_bad_arguments_of_the_vocabulary(byte_level, token):
    with pytest.raises(RequestError, match="token must be"):
        byte_level.token_to_id(token)
    if not isinstance(token, int):
        for method in (byte_level.token_bytes, byte_level.id_to_token):
            with pytest.raises(RequestError, match=r"token.id must be an integer"):
                method(token)
    with pytest.raises(RequestError, match="add_special_tokens must be True or False"):
        byte_level.encode("a", token)


def test_ids_of_any_length(byte_level):
    huge = 10**5000
    assert byte_level.token_bytes(huge) == b"" and byte_level.id_to_token(huge) is None
    for method, ids in ((byte_level.token_bytes, -huge), (byte_level.id_to_token, -huge)):
        with pytest.raises(
            RequestError, match="token id must be at least 0; got a whole number of"
        ):
            method(ids)
    for ids in (huge, [-huge], [[huge]]):
        with pytest.raises(RequestError, match=r"got .*a whole number of about 5001 digits"):
            byte_level.decode(ids)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_only_a_bos_that_we_added_is_left_out(golden, adds, add_special_tokens):
    metadata = golden["sentencepiece"][0]["metadata"] | {"tokenizer.ggml.add_bos_token": adds}
    tokenizer = load_tokenizer(metadata)
    bos = tokenizer.bos_token_id
    is_added = adds and add_special_tokens
    rest = tokenizer.encode("x", add_special_tokens=False)
    for written in range(5):
        text = tokenizer.id_to_token(bos) * written + "x"
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        count = max(written, int(is_added))
        assert ids[:count] == [bos] * count and bos not in ids[count:], (written, ids)
        assert written or ids[count:] == rest


def test_endless_ids_are_refused(byte_level):
    for ids in (itertools.count(), range(10**8), itertools.repeat(5)):
        with pytest.raises(RequestError, match=f"ids must have at most {1 << 24} entries"):
            byte_level.decode(ids)
    for method in (byte_level.token_bytes, byte_level.id_to_token):
        with pytest.raises(RequestError, match="a token id must be an integer"):
            method(np.timedelta64(1, "s"))


@pytest.mark.parametrize("parallelism", ["true", "false"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_long_and_short_texts_have_the_same_ids(name, adds, parallelism, request, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallelism)
    tokenizer = request.getfixturevalue(name)
    text = "<s>Hello, wide world! 123 caf\u00e9 " * 20
    want = tokenizer.encode(text, adds)
    monkeypatch.setattr(encode_worker, "_LONG_TEXT", 1)
    assert tokenizer.encode(text, adds) == want


def test_a_long_text_leaves_pythons_lock_to_others(byte_level):
    """While a text of a million characters is encoded, another thread goes on."""
    text = "The quick brown fox jumps over the lazy dog. " * 22_000
    begin = time.monotonic()
    thread = threading.Thread(target=byte_level.encode, args=(text,))
    thread.start()
    num_turns, longest, last = 0, 0.0, begin
    while thread.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        num_turns, longest, last = num_turns + 1, max(longest, now - last), now
    assert num_turns > 10
    assert longest < (last - begin) / 2


def test_an_id_without_a_token_is_ignored(byte_level_metadata, caplog):
    """As llama.cpp does: nothing encodes to it, and nothing ends with it."""
    warn_once.cache_clear()
    with caplog.at_level("WARNING", "engine"):
        tokenizer = load_tokenizer(byte_level_metadata(eos_token_id=617, padding_token_id=999))
    assert tokenizer.eos_token_ids == ()
    for text in ("eos_token_id is ignored: it must be in [0, 617)", "got 617", "got 999"):
        assert text in caplog.text


@pytest.mark.parametrize("key", [*UNSUPPORTED_KEYS, "add_space_prefix"])
def test_a_key_that_changes_the_ids_is_refused(key, byte_level_metadata):
    is_list = key in ("precompiled_charsmap", "suppress_tokens")
    value: object = [7, 2] if is_list else True
    message = rf"ggml\.{key} must be .* got {re.escape(str(value))}"
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(byte_level_metadata(**{key: value}))
    off: object = [] if is_list else False
    assert load_tokenizer(byte_level_metadata(**{key: off})).encode("a b")


@pytest.mark.parametrize("kind", [1, 4])
def test_markers_of_the_wrong_type_are_special(byte_level_metadata, byte_level, kind):
    """Some .gguf files call the tokens that end a turn normal or user-defined."""
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.token_type"] = [kind] * 3 + metadata["tokenizer.ggml.token_type"][3:]
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<|im_end|>"
    tokenizer = load_tokenizer(metadata)
    text = "<|endoftext|>a<|im_end|>"
    assert tokenizer.encode(text) == byte_level.encode(text) == [0, byte_level.encode("a")[0], 2]
    assert tokenizer.decode(tokenizer.encode(text)) == "a"
    assert tokenizer.eos_token_ids == (2,)
