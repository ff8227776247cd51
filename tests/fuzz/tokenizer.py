"""Tokenizer files and .gguf vocabularies with something wrong, and hostile texts and ids.

A tokenizer loads or is a `ConfigError`; a text or a list of ids is encoded and decoded or is a
`RequestError`. What loads must agree with itself.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError, RequestError
from engine.loading.gguf import GgufFile
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.fuzz import gguf_file
from tests.fuzz.limits import Limits, outcome_of
from tests.fuzz.values import change_bytes, change_document, dump, json_value

LIMITS = Limits(cpu_seconds=30.0, wall_seconds=120.0)  # a text may take 5 s in a child
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "text.json").read_text())
MAX_IDS = 1 << 24
CONFIG_KEYS = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "added_tokens_decoder", "chat_template"),
    *("add_bos_token", "add_eos_token", "tokenizer_class", "additional_special_tokens"),
    *("extra_special_tokens", "model_max_length", "clean_up_tokenization_spaces", "legacy"),
)
OTHERS = ("special_tokens_map.json", "added_tokens.json", "generation_config.json", "config.json")
PATTERNS = ("a", "", "(a+)+b", "(?=", r"\s+", "(.*)*", "[", r"\p{L}", "é", "(?i)A", "(a|aa)+$")
TEXTS = (
    *("", "a", "Hello, world", " a  b ", "\0", "\ud800", "é" * 50, "😀\u200d😀", "<|im_start|>"),
    *("<|im_start|><|im_start|> x", "a" * 2000, "1234567890" * 20, "\n\r\t", "ﷺ" * 20),
    *("\u0301" * 99, "e\u0301 ", "\x1b[31m"),
    *("<s>", "▁▁▁", "<0xFF>", "\ufffd", "ab" * 500 + "c", "中文字" * 30, "_" * 300),
)
STEPS = (
    *("normalizer", "pre_tokenizer", "post_processor", "decoder"),
    *("added_tokens", "truncation", "padding", "model"),
)


def _base(case: dict[str, Any]) -> dict[str, bytes]:
    files = json.loads(json.dumps(case["files"]))
    model, words = files["tokenizer.json"]["model"], GOLDEN["byte_level"]["metadata"]
    model["vocab"] = {t: i for i, t in enumerate(words["tokenizer.ggml.tokens"])}
    model["merges"] = [merge.split(" ") for merge in words["tokenizer.ggml.merges"]]
    chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    files["tokenizer_config.json"]["chat_template"] = chat
    return {name: json.dumps(content).encode() for name, content in files.items()}


BASES = {case["name"]: _base(case) for case in GOLDEN["directories"]}
VOCABULARIES = [
    GOLDEN["byte_level"]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"},
    *(one["metadata"] for one in GOLDEN["sentencepiece"]),
]


def make(rng: random.Random) -> dict[str, Any]:
    """Make a case."""
    texts = rng.sample(TEXTS, 3)
    texts.append("".join(rng.choice(rng.choice(TEXTS) or "x") for _ in range(rng.randrange(60))))
    ids = [rng.choice([0, 1, 2, 616, 617, 10**6, -1, 2**31, 2**63, 2**70]) for _ in range(3)]
    ids += [rng.randrange(617) for _ in range(8)]
    case: dict[str, Any] = {"texts": texts, "ids": ids}
    way = rng.random()
    if way < 0.05:
        return case | {"base": rng.choice(list(BASES)), "files": {}}
    if way < 0.2:
        changed = change_document(rng, rng.choice(VOCABULARIES), tuple(VOCABULARIES[0]))
        return case | {"metadata": dump(changed)}
    if way < 0.25:
        pairs = gguf_file.change_gguf(rng)
        return case | {"gguf": base64.b64encode(pairs).decode()}
    name = rng.choice(list(BASES))
    changes = [_step, _step, _document, _config, _other, _raw]
    files = rng.choice(changes)(rng, BASES[name])
    texts = {file: base64.b64encode(data).decode() for file, data in files.items()}
    return case | {"base": name, "files": texts}


def _encoded(value: Any) -> bytes:
    return dump(value).encode("utf-8", "surrogatepass")


def _document(rng: random.Random, base: dict[str, bytes]) -> dict[str, bytes]:
    document = json.loads(base["tokenizer.json"])
    return {"tokenizer.json": _encoded(change_document(rng, document, STEPS))}


def _config(rng: random.Random, base: dict[str, bytes]) -> dict[str, bytes]:
    config = json.loads(base["tokenizer_config.json"])
    if rng.random() < 0.3:
        entry = {"content": rng.choice(TEXTS), "special": True}
        config["added_tokens_decoder"] = {rng.choice(["0", "617", "-1", "9" * 30, "x"]): entry}
    return {"tokenizer_config.json": _encoded(change_document(rng, config, CONFIG_KEYS))}


def _other(rng: random.Random, base: dict[str, bytes]) -> dict[str, bytes]:
    content = {rng.choice([*CONFIG_KEYS, "<x>", "eos_token_id"]): json_value(rng) for _ in "ab"}
    return {rng.choice(OTHERS): _encoded(content)}


def _raw(rng: random.Random, base: dict[str, bytes]) -> dict[str, bytes]:
    name = rng.choice(list(base))
    return {name: change_bytes(rng, base[name])}


def _pattern(rng: random.Random) -> dict[str, str]:
    return {rng.choice(["Regex", "String"]): rng.choice(PATTERNS)}


def _normalizer(rng: random.Random) -> dict[str, Any]:
    content = rng.choice(["", "a", "aa", "a" * 8, "a" * 3000, "\ud83d\ude00"])
    return rng.choice(
        [
            {"type": "Replace", "pattern": _pattern(rng), "content": content},
            {"type": "Prepend", "prepend": content},
            *({"type": name} for name in ("NFC", "NFKD", "Lowercase", "Nmt", "ByteLevel")),
            {"type": "Precompiled", "precompiled_charsmap": rng.choice(["", "AAAA", "//////8="])},
            {"type": "Strip", "strip_left": True, "strip_right": rng.choice([True, 5])},
            {"type": "Sequence", "normalizers": [_replace(rng) for _ in range(rng.choice([1, 4]))]},
        ]
    )


def _replace(rng: random.Random) -> dict[str, Any]:
    content = rng.choice(["a", "aa", "aaaaaaaa", "b"])
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def _pre_tokenizer(rng: random.Random) -> dict[str, Any]:
    behavior = rng.choice(["Removed", "Isolated", "MergedWithNext", "Contiguous", "x"])
    return rng.choice(
        [
            {"type": "Split", "pattern": _pattern(rng), "behavior": behavior, "invert": False},
            {"type": "Metaspace", "replacement": rng.choice(["▁", "", "ab"]), "split": True},
            {"type": "Punctuation", "behavior": behavior},
            {"type": "FixedLength", "length": rng.choice([0, 1, 5, -1])},
            *({"type": name} for name in ("Whitespace", "BertPreTokenizer", "UnicodeScripts")),
            {"type": "CharDelimiterSplit", "delimiter": rng.choice(["a", "", "ab"])},
        ]
    )


def _template(rng: random.Random) -> dict[str, Any]:
    number = rng.choice([0, -1, 2**40])
    piece = {"SpecialToken": {"id": rng.choice(["<s>", "x"]), "type_id": number}}
    ids = rng.choice([[0], [], [2**31], [0] * 3000])
    token = {"id": "<s>", "ids": ids, "tokens": rng.choice([["<s>"], [], ["a", "b"]])}
    single = [piece, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single * rng.choice([0, 1, 1, 50]),
        "pair": single,
        "special_tokens": rng.choice([{"<s>": token}, {}]),
    }


def _step(rng: random.Random, base: dict[str, bytes]) -> dict[str, bytes]:
    """Put in a step that the library knows."""
    document = json.loads(base["tokenizer.json"])
    way = rng.random()
    if way < 0.35:
        document["normalizer"] = _normalizer(rng)
    elif way < 0.6:
        document["pre_tokenizer"] = _pre_tokenizer(rng)
    elif way < 0.75:
        document["post_processor"] = _template(rng)
    elif way < 0.9:
        name = rng.choice(["continuing_subword_prefix", "end_of_word_suffix", "unk_token"])
        document["model"][name] = rng.choice(["", "a", "##", "x" * 40, "é"])
        document["model"]["dropout"] = rng.choice([None, 0.0, 0.5, 1.0, 2.0, -1.0])
    else:
        token = {"id": rng.choice([0, 617, 5, 2**31, 2**32 - 1]), "content": rng.choice(TEXTS)}
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token |= {flag: rng.random() < 0.5 for flag in flags}
        document["added_tokens"].append(token)
    return {"tokenizer.json": _encoded(document)}


class Runner:
    """Loads a tokenizer, encodes the texts and decodes the ids."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "t"
        for name in BASES:
            case = {"base": name, "files": {}, "texts": ["Hello, world"], "ids": [0]}
            assert self.run(case).startswith("loaded")

    def run(self, case: dict[str, Any]) -> str:
        """Return how loading ended, and what the texts came to."""
        self._root.mkdir()
        try:
            try:
                tokenizer = self._load(case)
            except (ConfigError, EngineError) as error:
                return outcome_of(error)
            marks = "".join(_encode(tokenizer, text) for text in case["texts"])
            if case.get("files") == {}:
                _round_trip(tokenizer, case["texts"])
            return f"loaded {marks}{_decode(tokenizer, case['ids'])}"
        finally:
            shutil.rmtree(self._root)

    def _load(self, case: dict[str, Any]) -> Tokenizer:
        if "metadata" in case:
            try:
                metadata = json.loads(case["metadata"], parse_int=_integer)
            except RecursionError:  # no .gguf file can hold so deep a list
                metadata = {}
            assert isinstance(metadata, dict)
            return load_tokenizer(metadata)
        if "gguf" in case:
            path = self._root / "m.gguf"
            path.write_bytes(base64.b64decode(case["gguf"]))
            return load_tokenizer(GgufFile(path).metadata)
        for name, data in BASES[case["base"]].items():
            (self._root / name).write_bytes(data)
        for name, text in case["files"].items():
            (self._root / name).write_bytes(base64.b64decode(text))
        return load_tokenizer(self._root)


def _integer(digits: str) -> int:
    return int(digits) if len(digits) < 4000 else 10**5000


def _encode(tokenizer: Tokenizer, text: str) -> str:
    """Encode and decode a text; "." if it has ids, "e" if it is refused."""
    try:
        ids = tokenizer.encode(text)
    except RequestError as error:
        outcome_of(error)
        return "e"
    assert isinstance(ids, list) and len(ids) <= MAX_IDS
    assert all(type(i) is int and 0 <= i < 2**32 for i in ids)
    assert isinstance(tokenizer.decode(ids), str)
    data = b"".join(tokenizer.token_bytes(i) for i in ids)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert data.decode("utf-8", "replace").lstrip(" ") == whole.lstrip(" ")
    return "."


def _round_trip(tokenizer: Tokenizer, texts: list[str]) -> None:
    """A byte-level tokenizer gives back every text, special tokens included."""
    for text in texts:
        if "\ud800" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    marks = ""
    for one in ids:
        try:
            assert isinstance(tokenizer.decode([one]), str)
            assert isinstance(tokenizer.token_bytes(one), bytes)
            tokenizer.id_to_token(one)
            marks += "."
        except RequestError as error:
            outcome_of(error)
            marks += "e"
    return marks
