"""Hostile content of tokenizer.json: an error of the engine's own, in bounded time and memory.

Each case is loaded, and used, in a process of its own with limits, since what it tests is that the
process survives: a panic or an abort of the tokenizers library would end it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError, RequestError
from engine.text import encode_worker, known_steps
from engine.text.library_errors import library_errors
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.text.tokenizer_json import build_backend, check_steps, parse

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 40  # of wall time, of one case; the cores may be shared
PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from engine.errors import ConfigError, RequestError
from engine.text.tokenizer import load_tokenizer
folder, text = sys.argv[1], json.loads(sys.argv[2])
result = {}
try:
    tokenizer = load_tokenizer(folder)
except ConfigError as error:
    result["load"] = str(error)
else:
    text = text[0] * text[1] + text[2]
    for name, one in (("encode", text), ("then", "b")):
        try:
            result[name] = tokenizer.encode(one)
        except RequestError as error:
            result[name] = str(error)
    result["text"] = tokenizer.decode([0, 1])
print(json.dumps(result))
"""
BYTE_LEVEL = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), True)
BYTE_LEVEL["type"] = "ByteLevel"


def content(**parts: object) -> dict:
    """A tokenizer.json of three tokens; `parts` replace its parts, those of the model with dots."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    changes = {key[6:]: parts.pop(key) for key in list(parts) if key.startswith("model_")}
    spec = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    return spec | {"decoder": BYTE_LEVEL, "model": model | changes} | parts


def folder_with(tmp_path: Path, spec: object) -> Path:
    (tmp_path / "tokenizer.json").write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return tmp_path


def outcome(folder: Path, text: tuple[str, int, str] = ("ab", 1, "")) -> dict:
    """Load and encode in another process; what became of it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), json.dumps(text)],
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    return json.loads(done.stdout)


def sequence(step: object, count: int, key: str) -> dict:
    return {"type": "Sequence", key: [step] * count}


def replace(old: str, new: str) -> dict:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split(regex: str) -> dict:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


def template(pieces: list, defined: dict) -> dict:
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": defined,
    }


def nested(step: object, depth: int, key: str) -> str:
    head = f'{{"type": "Sequence", "{key}": ['
    return head * depth + json.dumps(step) + "]}" * depth


SPECIAL = {"SpecialToken": {"id": "x", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
X = {"x": {"id": "x", "ids": [0], "tokens": ["a"]}}
MEMORY_OR_TIME = "fails, or takes more than its limit of 2 GiB|takes more than its limit of CPU"

REFUSED = {
    "growth that aborts": (
        content(normalizer=sequence(replace("a", "a" * 3000), 4, "normalizers")),
        MEMORY_OR_TIME,
    ),
    "growth that takes long": (
        content(normalizer=sequence(replace("a", "a" * 8), 12, "normalizers")),
        MEMORY_OR_TIME,
    ),
    "prefix longer than a token": (
        content(model_continuing_subword_prefix="xyz"),
        "continuing_subword_prefix must be empty or null for BPE; got 'xyz'",
    ),
    "prefix that cuts a character": (
        content(
            model_continuing_subword_prefix="x",
            model_vocab={"a": 0, "é": 1, "aé": 2},
            model_merges=[["a", "é"]],
        ),
        "continuing_subword_prefix must be empty",
    ),
    "prefix, its key escaped": (
        json.dumps(content()).replace(
            '"model": {', '"model": {"\\u0063ontinuing_subword_prefix": "x", '
        ),
        "continuing_subword_prefix must be empty",
    ),
    "charsmap of garbage": (
        content(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}),
        "cannot be read: ",
    ),
    "charsmap that points outside": (
        content(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP///3///////w=="}),
        "cannot be read: ",
    ),
    "nested sequences": (
        json.dumps(content(normalizer="HERE")).replace(
            '"HERE"', nested({"type": "NFC"}, 100_000, "normalizers")
        ),
        "is not valid JSON",
    ),
    "nested sequences that Python can read": (
        json.dumps(content(pre_tokenizer="HERE")).replace(
            '"HERE"', nested({"type": "Whitespace"}, 200, "pretokenizers")
        ),
        "cannot be read: ",
    ),
    "regex of a size that fails": (content(pre_tokenizer=split("(" * 50_000)), "cannot be read: "),
    "regex in a decoder": (
        content(decoder={"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": " "}),
        "cannot decode with this tokenizer's decoder step",
    ),
    "decoder whose type is an array": (content(decoder={"type": []}), "decoder step"),
    "unknown decoder": (content(decoder={"type": "Nope"}), "decoder step"),
    "decoders without end": (
        content(decoder=sequence({"type": "Nope"}, 1, "decoders")),
        "decoder step",
    ),
    "id 2**32 - 1": (content(model_vocab={"a": 2**32 - 1}), r"ids in \[0, 4194303\]; token 'a'"),
    "negative id": (content(model_vocab={"a": -1}), r"must have ids in .* has -1"),
    "id of many digits": (content(model_vocab={"a": 10**4000}), "about 4001 digits"),
    "id that is true": (content(model_vocab={"a": True}), "has True"),
    "id that is a fraction": (content(model_vocab={"a": 0.5}), r"has 0\.5"),
    "vocabulary that is no object": (content(model_vocab=[1]), "model.vocab must be an object"),
    "lone surrogate": (content(model_vocab={"\ud800": 0}, model_merges=[]), "model is invalid"),
    "merge of unknown tokens": (content(model_merges=[["a", "c"]]), "out of vocabulary"),
    "merge of three": (content(model_merges=[["a", "b", "c"]]), r"merges\[0\] must be two tokens"),
    "merge of words": (content(model_merges=["a b c"]), r"merges\[0\] must be two tokens"),
    "merges of both kinds": (content(model_merges=["a b", ["a", "b"]]), "it has other items"),
    "merge of numbers": (content(model_merges=[[1, 2]]), "model is invalid"),
    "merges that are no array": (content(model_merges={}), "model.merges must be an array"),
    "flag that is a text": (content(model_byte_fallback="yes"), "must be true or false; got 'yes'"),
    "suffix of a million": (content(model_end_of_word_suffix="x" * 10**6), "at most 64 char"),
    "no model": ({"version": "1.0"}, "an object model"),
    "unknown model": (content(model_type="Nope"), "model.type must be one of BPE"),
    "word of any length": (
        content(model_type="WordPiece", model_max_input_chars_per_word=10**9),
        r"max_input_chars_per_word must be in \[0, 200\]; got 1000000000",
    ),
    "unigram: empty": (content(model_type="Unigram", model_vocab=[]), "an array of pieces"),
    "unigram: unknown outside": (
        content(model_type="Unigram", model_vocab=[["a", 0.0]], model_unk_id=1),
        r"unk_id must be in \[0, 1\) or null; got 1",
    ),
    "unigram: not a number": (
        content(model_type="Unigram", model_vocab=[["a", math.nan]]),
        r"vocab\[0\] must have a finite score; got nan",
    ),
    "unigram: infinite": (
        content(model_type="Unigram", model_vocab=[["a", 0.0], ["b", -math.inf]]),
        r"vocab\[1\] must have a finite score",
    ),
    "unigram: pieces that nest": (
        content(model_type="Unigram", model_vocab=[["a" * i, 0.0] for i in range(1, 2000)]),
        r"vocab\[512\] must have at most 512 characters; got 513",
    ),
    "a million added tokens": (
        content(added_tokens=[{"content": f"<{i}>", "special": True} for i in range(10**6)]),
        "must have at most 262144 tokens to add; got 1000000",
    ),
    "long added tokens": (
        content(added_tokens=[{"content": str(i) + "x" * 10**6} for i in range(10)]),
        "at most 4194304 bytes of tokens to add; got 10000010",
    ),
    "added token of another type": (content(added_tokens=[{"content": 5}]), r"added_tokens\[0\]"),
    "added flag of another type": (
        content(added_tokens=[{"content": "x", "lstrip": 5}]),
        "added_tokens are invalid",
    ),
    "template with unknown ids": (
        content(post_processor=template([SPECIAL, TEXT], {"x": X["x"] | {"ids": [99]}})),
        "must add ids of the vocabulary; got 99",
    ),
    "template with undefined tokens": (
        content(post_processor=template([SPECIAL, TEXT], {})),
        "cannot be read: the text cannot be encoded: the tokenizers library panicked",
    ),
    "long template with unknown ids": (
        content(post_processor=template([SPECIAL] * 100, {"x": X["x"] | {"ids": [99]}})),
        "must add ids of the vocabulary; got 99",
    ),
    "step with the fields of another": (
        content(
            pre_tokenizer=split("(a+)+b") | {"type": "Digits", "individual_digits": "no"},
        ),
        "cannot be read: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load(name, tmp_path):
    spec, message = REFUSED[name]
    result = outcome(folder_with(tmp_path, spec))
    assert result.keys() == {"load"}, result
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(result["load"])
    assert str(tmp_path / "tokenizer.json") in result["load"]
    assert len(result["load"]) < 900


FAILS = {
    "regex that backtracks": (content(pre_tokenizer=split("(a+)+b")), ("a", 2000, "")),
    "regex in a normalizer": (
        content(
            normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "a"},
        ),
        ("a", 2000, ""),
    ),
    "quadratic regex": (content(pre_tokenizer=split(r"\s+$")), (" ", 150_000, "b")),
    "growth of one character": (
        content(normalizer=sequence(replace("é", "é" * 64), 3, "normalizers")),
        ("é", 1000, ""),
    ),
    "quadratic growth": (
        content(normalizer={"type": "Replace", "pattern": {"Regex": "é"}, "content": "a" * 10**5}),
        ("é", 10**5, ""),
    ),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_text_that_exceeds_the_limits_fails_alone(name, tmp_path):
    spec, text = FAILS[name]
    result = outcome(folder_with(tmp_path, spec), text)
    assert isinstance(result["encode"], str), result
    with pytest.raises(RequestError, match=MEMORY_OR_TIME + "|cannot be encoded"):
        raise RequestError(result["encode"])
    assert result["then"] == [1]
    assert result["text"] == "ab"


SERVED = {
    "prefix that is empty": (content(model_continuing_subword_prefix=""), [2]),
    "model without a type": (content(model_type="BPE"), [2]),
    "merges of words": (content(model_merges=["#version: 0.2", "a b"]), [2]),
    "truncation and padding": (
        content(
            truncation={"max_length": 2**60, "strategy": "LongestFirst", "stride": 2**60},
            padding={"strategy": {"Fixed": 2**60}, "pad_to_multiple_of": 0, "pad_id": 0},
        ),
        [2],
    ),
    "dropout": (content(model_dropout=1.0), [2]),
    "cache of any size": (content(model_cache_capacity=10**12), [2]),
    "byte fallback without bytes": (content(model_byte_fallback=True), [2]),
    "ids twice": (content(model_vocab={"a": 0, "b": 0, "ab": 1}), [1]),
    "empty added token": (content(added_tokens=[{"content": ""}]), [2]),
    "a thousand special tokens": (
        content(post_processor=template([SPECIAL] * 1000 + [TEXT], X)),
        [0] * 1000 + [2],
    ),
    "the text a thousand times": (content(post_processor=template([TEXT] * 1000, {})), None),
    "listed regex": (content(pre_tokenizer=split(r"\p{N}{1,3}")), [2]),
    "unlisted regex": (content(pre_tokenizer=split(r"b{3}c")), [2]),
    "charsmap that is empty": (
        content(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
        None,
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_odd_but_harmless(name, tmp_path):
    spec, ids = SERVED[name]
    result = outcome(folder_with(tmp_path, spec))
    if ids is None:  # the library may have an error of its own
        assert result.keys() == {"load"} or result["encode"][:1] == [2]
    else:
        assert result["encode"] == ids, result


def in_parent(tmp_path: Path, **parts: object) -> Tokenizer:
    return load_tokenizer(folder_with(tmp_path, content(**parts)))


def test_an_unknown_step_encodes_as_the_library_does(tmp_path):
    """With the tokens of the other files, which the child has too."""
    step = split(r"b(?=a)|\s+$")
    (tmp_path / "added_tokens.json").write_text('{"<new>": 3}')
    tokenizer = in_parent(tmp_path, pre_tokenizer=step, post_processor=template([SPECIAL, TEXT], X))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<new>", normalized=True, special=False)])
    for text in ("", "abba", "ab<new>ab", "a  ", "<new>" * 50, "ba" * 1000):
        for add in (True, False):
            assert tokenizer.encode(text, add) == backend.encode(text, add_special_tokens=add).ids
    assert tokenizer.token_to_id("<new>") == 3


def test_threads_share_the_child(tmp_path):
    tokenizer = in_parent(tmp_path, pre_tokenizer=split("b(?=a)"))
    found: dict[int, list[int]] = {}

    def work(n: int) -> None:
        for _ in range(30):
            found[n] = tokenizer.encode("ab" * n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [0, 1] * (n - 1) + [2] for n in range(1, 9)}


def test_a_child_that_dies_is_replaced_and_ends_with_its_tokenizer(tmp_path):
    tokenizer = in_parent(tmp_path, pre_tokenizer=split("b(?=a)"))
    encoder = tokenizer._encode
    assert isinstance(encoder, encode_worker.WorkerEncoder)
    os.kill(encoder._worker.pid, signal.SIGKILL)
    with pytest.raises(RequestError, match=r"exit -9"):
        tokenizer.encode("ab")
    assert tokenizer.encode("ab") == [2]
    child = encoder._worker._child.process
    del tokenizer, encoder
    assert child.wait(timeout=10) == 0


def test_a_child_outlives_no_parent(tmp_path):
    folder = folder_with(tmp_path, content(pre_tokenizer=split("b(?=a)")))
    code = (
        "import os, sys; from engine.text.tokenizer import load_tokenizer; "
        f"t = load_tokenizer({str(folder)!r}); print(t._encode._worker.pid, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    child, end = int(done.stdout), time.monotonic() + 60
    while Path(f"/proc/{child}/stat").exists():
        if Path(f"/proc/{child}/stat").read_text().split(")")[1].split()[0] == "Z":
            break
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.05)


def test_the_child_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    folder = folder_with(tmp_path, content(pre_tokenizer=split("b(?=a)")))
    (tmp_path / "array.py").write_text("open('ran', 'w')")
    (tmp_path / "json.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert load_tokenizer(folder).encode("ab") == [2]
    assert not (tmp_path / "ran").exists()


def _honest() -> dict[str, tokenizers.Tokenizer]:
    """Small tokenizers with the steps of real families."""
    found = {}
    llama2 = tokenizers.Tokenizer(
        models.BPE(
            {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "<0x00>": 4},
            [("▁", "a")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    llama2.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    llama2.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    llama2.add_tokens([AddedToken("new", special=True), "<unk>", "b"])
    found["llama-2"] = llama2
    bert = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "[CLS]": 3}, unk_token="[UNK]")
    )
    bert.normalizer = normalizers.BertNormalizer()
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", 3)]
    )
    bert.add_special_tokens(["[CLS]"])
    found["bert"] = bert
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.5), ("b", -2.25)], 0))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram.add_tokens([AddedToken("ab c", lstrip=True)])
    found["unigram"] = unigram
    falcon = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    falcon.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )
    falcon.post_processor = processors.RobertaProcessing(("a", 0), ("b", 1))
    found["falcon"] = falcon
    for name, known in known_steps.PRE_TOKENIZERS.items():
        if known_steps._QUADRATIC_REGEXES & {*known.patterns}:
            continue
        backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        backend.pre_tokenizer = known.backend()
        backend.normalizer = known.normalizer()
        found[name] = backend
    return found


@pytest.mark.parametrize("name", _honest())
def test_honest_tokenizers_run_here_and_are_what_the_library_reads(name):
    text = _honest()[name].to_str()
    spec = parse(text.encode())
    assert known_steps.unknown_step(spec) is None
    mine = build_backend(spec, with_steps=True)
    check_steps(mine)
    assert mine.to_str() == tokenizers.Tokenizer.from_str(text).to_str()


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer"])
def test_the_growth_of_normalizers_is_the_largest_of_any_character(form):
    step = {"type": form} | ({"clean_text": True} if form == "BertNormalizer" else {})
    normalize = {
        "Lowercase": str.lower,
        "BertNormalizer": normalizers.BertNormalizer().normalize_str,
    }.get(form, lambda text: unicodedata.normalize(form, text))
    limit = known_steps.growth(step)
    for code in itertools.chain(range(0xD800), range(0xE000, 0x30000)):
        character = chr(code)
        assert len(normalize(character).encode()) <= limit * len(character.encode()), hex(code)


@pytest.mark.parametrize("regex", sorted(known_steps._LINEAR_REGEXES))
def test_listed_regexes_take_linear_time(regex):
    """Ten times the text takes far less than a hundred times the time."""
    cut = pre_tokenizers.Split(Regex(regex), "isolated")
    units = [" ", "\n", "\r\n", "a", "A", "aA", "1", "中", "ª", "ʰA", "\u0300", ".", "'", "'r", "$"]
    for unit in units:
        for end in ("", "x", " ", "\n", "$"):
            text = unit * (20_000 // len(unit)) + end
            # Linear ones take 0.03 s; a quadratic one (\s+$) takes 2 s. The least of three:
            # what others on the machine do may count as time of this thread.
            seconds = min(_seconds(cut, text) for _ in range(3))
            assert seconds < 0.25, (unit, end)


def _seconds(cut, text):
    start = time.thread_time()
    cut.pre_tokenize_str(text)
    return time.thread_time() - start


def test_a_panic_is_caught_and_an_interrupt_is_not():
    kind = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    panicked = pytest.raises(RequestError, match=r"x: the tokenizers library panicked \(boom\)")
    with panicked, library_errors(RequestError, "x"):
        raise kind("boom")
    for other in (KeyboardInterrupt, SystemExit, type("PanicException", (BaseException,), {})):
        with pytest.raises(other), library_errors(RequestError, "x"):
            raise other


def test_a_panic_of_the_library_is_caught(capfd):
    """The one that it has: a regular expression that gives up."""
    cut = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    panicked = pytest.raises(RequestError, match="the tokenizers library panicked")
    with panicked, library_errors(RequestError, "x"):
        cut.pre_tokenize_str("a" * 2000)
    capfd.readouterr()


def test_a_merge_whose_result_is_missing(tmp_path, byte_level_metadata, capfd):
    """The library panics if the result is longer than every token, and else has an error."""
    folder = folder_with(tmp_path, content(model_vocab={"a": 0, "b": 1}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: model is invalid"):
        load_tokenizer(folder)
    metadata = byte_level_metadata(
        tokens=["a", "b"], merges=["a b"], token_type=[1, 1], bos_token_id=0, eos_token_id=0
    )
    with pytest.raises(ConfigError, match="the vocabulary and its merges do not match"):
        load_tokenizer(metadata)
    capfd.readouterr()


def _sentencepiece_metadata(tokens: list[str], **more: object) -> dict:
    values = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)} | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (_sentencepiece_metadata(["a", "b"], scores=[math.nan, 0.0]), "one is NaN"),
        (_sentencepiece_metadata(["a", "b" * 40_000]), "squares sum up to at most 1073741824"),
        (_sentencepiece_metadata(["a", "\ud800"]), "the vocabulary .*"),
        (
            _sentencepiece_metadata(
                [f"{i}" + "x" * 10**4 for i in range(500)],
                token_type=[3] * 500,
                scores=[0.0] * 500,
            ),
            "squares sum up|bytes of tokens to add",
        ),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": ["a", "b"],
                "tokenizer.ggml.merges": ["a c"],
            },
            "do not match: .* out of vocabulary",
        ),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": ["a", "b", "ab", *(f"<{i:07}>" for i in range(300_000))],
                "tokenizer.ggml.token_type": [1] * 3 + [3] * 300_000,
                "tokenizer.ggml.merges": ["a b"],
            },
            "must have at most 262144 tokens to add; got 300000",
        ),
    ],
    ids=["NaN", "long token", "surrogate", "long control tokens", "merge", "control tokens"],
)
def test_metadata_of_gguf(metadata, message):
    start = time.process_time()
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(metadata)
    assert time.process_time() - start < 10


def test_words_over_two_letters_give_too_many_merges():
    tokens = ["".join(w) for n in range(1, 18) for w in itertools.product("ab", repeat=n)]
    with pytest.raises(ConfigError, match="must give at most 1048576 merges"):
        load_tokenizer(_sentencepiece_metadata(tokens))


@pytest.mark.parametrize("seed", range(200))
def test_known_steps_never_raises(seed):
    """Whatever JSON a file has in the place of a step."""
    rng = random.Random(seed)
    words = ["Sequence", "Replace", "Prepend", "Split", "TemplateProcessing", "NFC", "String", "A"]
    keys = ["type", "normalizers", "pretokenizers", "processors", "pattern", "content", "prepend"]
    keys += ["single", "special_tokens", "SpecialToken", "id", "ids", "Regex", "String", "x"]

    def value(depth: int) -> object:
        kind = rng.randrange(7 if depth else 5)
        if kind == 6:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 5 or depth > 3:
            return {rng.choice(keys): value(depth - 1) for _ in range(rng.randrange(6))}
        return rng.choice([None, True, 3, -1.5, "\ud800", rng.choice(words), string.digits])

    for _ in range(100):
        spec = {name: value(6) for name in ("normalizer", "pre_tokenizer", "post_processor")}
        name = known_steps.unknown_step(spec)
        assert name is None or isinstance(name, str)
