"""Make beside.json: ids that transformers gives with special tokens named beside tokenizer.json.

    pip install transformers
    python tests/golden/make_beside.py

Each case is a model folder: the files beside a small byte-level tokenizer.json, and what they and
its added tokens say of special tokens. The first cases have names; the others are drawn at random.
`AutoTokenizer` reads each folder. Not part of CI.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer

TARGET = Path(__file__).with_name("beside.json")
TEXTS = [
    "",
    "a <s> b </s>",
    "x<|a|>  <|b|> y [X]z",
    " <new1><new2> <|im|>\n<pad> <unk> word aword Word <S> [x]",
    "  [X]  <|A|> <s></s><s> ",
]
TOKENS = ["<s>", "</s>", "<pad>", "<|a|>", "<|b|>", "[X]", "<unk>", "word"]
NEW = [*TOKENS, "<new1>", "<new2>", "<|im|>"]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NUM_RANDOM = 50


def alphabet() -> list[str]:
    """Return the characters of a byte-level vocabulary, in GPT-2's order of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def tokenizer_json(case: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json of a case."""
    merges = [("w", "o"), ("r", "d"), ("wo", "rd")]
    words = [*alphabet(), *("".join(merge) for merge in merges)]
    words += [token for token in case["vocab"] if token not in words]
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    ids = {word: i for i, word in enumerate(words)}
    model = {"type": "BPE", "vocab": ids, "merges": merges, "byte_fallback": False}
    model |= {"dropout": None, "unk_token": None, "fuse_unk": False, "ignore_merges": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    added = []
    for token in case["added_tokens"]:
        token_id = ids.setdefault(token["content"], len(ids))
        added.append({"id": token_id, **dict.fromkeys(FLAGS, False), **token})
    model["vocab"] = {word: i for word, i in ids.items() if i < len(words)}
    found: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None}
    found |= {"pre_tokenizer": step, "post_processor": None, "decoder": step, "model": model}
    found |= {"normalizer": case["normalizer"]}
    return found | {"added_tokens": sorted(added, key=lambda token: token["id"])}


def named_cases() -> list[dict[str, Any]]:
    """Return the cases of known kinds."""
    im = [{"content": token, "special": True} for token in ("<|a|>", "<|b|>")]

    def case(name: str, added: list[Any] = im, **files: Any) -> dict[str, Any]:
        named = {"config": "tokenizer_config.json", "special": "special_tokens_map.json"}
        named["added"] = "added_tokens.json"
        found = {named[key]: content for key, content in files.items()}
        return {
            "name": name,
            "vocab": [],
            "added_tokens": added,
            "normalizer": None,
            "files": found,
        }

    strips = {"content": "<|a|>", "lstrip": True, "rstrip": True, "normalized": False}
    word = {"content": "word", "normalized": True}
    return [
        case("named only in the config", config={"bos_token": "<s>", "eos_token": "</s>"}),
        case("named only in the older map", special={"bos_token": "<s>", "eos_token": "</s>"}),
        case("the older map takes precedence", config={"eos_token": "<|a|>"},
             special={"eos_token": "<|b|>", "pad_token": {"content": "<pad>", "lstrip": True}}),
        case("but not over a list of tokens", special={"eos_token": "<|b|>"},
             config={"eos_token": "<|a|>", "added_tokens_decoder": {}}),
        case("an eos that is not special", [{"content": "<|a|>"}], config={"eos_token": "<|a|>"}),
        case("an eos listed as not special", config={
            "eos_token": "<|a|>", "added_tokens_decoder": {"259": {"content": "<|a|>"}}}),
        case("a token listed as not special", config={
            "added_tokens_decoder": {"259": {"content": "<|a|>", "special": False}}}),
        case("a token listed as special", [{"content": "<|a|>"}], config={
            "added_tokens_decoder": {"259": {"content": "<|a|>", "special": True}}}),
        case("strips in the config only", config={"added_tokens_decoder": {"259": strips}}),
        case("strips in tokenizer.json only", [strips], config={
            "added_tokens_decoder": {"259": {"content": "<|a|>", "special": True}}}),
        case("whole words in the config only", [word], config={
            "added_tokens_decoder": {"259": {"content": "word", "single_word": True}}}),
        case("normalized in the config only", [{"content": "[X]"}], config={
            "added_tokens_decoder": {"259": {"content": "[X]", "normalized": True}}}),
        case("additional special tokens", config={
            "additional_special_tokens": ["<|im|>", "<|a|>"]}),
        case("extra special tokens", config={"extra_special_tokens": ["<new1>", "<new2>"]}),
        case("extra special tokens with names", config={
            "extra_special_tokens": {"image_token": "<new1>", "boi_token": "<new2>"}}),
        case("extra ones hide additional ones", config={
            "extra_special_tokens": ["<new1>"], "additional_special_tokens": ["<new2>"]}),
        case("a token of the model's own", config={"image_token": "<|im|>", "audio_token": None}),
        case("tokens of the older list", added=[], config={"eos_token": "<new2>"}) | {"files": {
            "tokenizer_config.json": {"eos_token": "<new2>"},
            "added_tokens.json": {"<new2>": 260, "<new1>": 259}}},
        case("ids that nobody gives", config={
            "added_tokens_decoder": {"400": {"content": "<new1>"}, "300": {"content": "<new2>"}}}),
        case("in the vocabulary only", [], config={"eos_token": "<s>"}) | {"vocab": ["<s>"]},
        case("split special tokens", config={"eos_token": "<|a|>", "split_special_tokens": True}),
        case("an object", config={"eos_token": {"__type": "AddedToken", **strips}}),
        case("bos and eos are not added", config={
            "bos_token": "<s>", "add_bos_token": True, "add_eos_token": True, "legacy": False}),
        case("spaces are not cleaned up", config={"clean_up_tokenization_spaces": True}),
    ]  # fmt: skip


def random_case(draw: random.Random, number: int) -> dict[str, Any]:
    """Return a random case."""

    def flags() -> dict[str, bool]:
        chances = dict(zip(FLAGS, (0.15, 0.3, 0.3, 0.4, 0.6), strict=True))
        return {name: draw.random() < chance for name, chance in chances.items()}

    def value(token: str) -> Any:
        is_text = draw.random() < 0.7
        return token if is_text else {"__type": "AddedToken", "content": token, **flags()}

    def some(most: int) -> list[str]:
        return draw.sample(NEW, draw.randint(0, most))

    vocab = [token for token in TOKENS if draw.random() < 0.4]
    added = [{"content": t, **flags()} for t in draw.sample(TOKENS, draw.randint(0, 5))]
    ids = {
        t: 259 + i for i, t in enumerate(dict.fromkeys([*vocab, *(a["content"] for a in added)]))
    }
    config: dict[str, Any] = {}
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "image_token")
    for name in names:
        if draw.random() < 0.35:
            config[name] = draw.choice(NEW) if name == "image_token" else value(draw.choice(NEW))
    if draw.random() < 0.3:
        config["additional_special_tokens"] = list(map(value, some(4)))
    if draw.random() < 0.2:
        named = {"image_token": draw.choice(NEW), "boi_token": draw.choice(NEW)}
        config["extra_special_tokens"] = draw.choice([list(map(value, some(3))), named, {}])
    listed = {t: ids.setdefault(t, 259 + len(ids)) for t in some(5)}
    if draw.random() < 0.4:
        config["added_tokens_decoder"] = {
            str(i): {"content": t, **flags()} for t, i in listed.items()
        }
    files: dict[str, Any] = {"tokenizer_config.json": config}
    if draw.random() < 0.35:
        special: dict[str, Any] = {}
        for name in ("bos_token", "eos_token", "pad_token"):
            if draw.random() < 0.5:
                token = draw.choice(NEW)
                special[name] = token if draw.random() < 0.5 else {"content": token, **flags()}
        if draw.random() < 0.4:
            special["additional_special_tokens"] = some(3)
        files["special_tokens_map.json"] = special
    if draw.random() < 0.25:
        files["added_tokens.json"] = listed
    normalizer = draw.choice([None, None, {"type": "NFKC"}])
    found = {"name": f"random {number}", "vocab": vocab, "added_tokens": added}
    return found | {"normalizer": normalizer, "files": files}


def results(case: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers makes of a case."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"tokenizer.json": tokenizer_json(case), "config.json": {"model_type": "llama"}}
        backend = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config = backend | case["files"].get("tokenizer_config.json", {})
        files |= case["files"] | {"tokenizer_config.json": config}
        for name, content in files.items():
            Path(folder, name).write_text(json.dumps(content))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    return {
        "ids": ids,
        "ids_with_special": [tokenizer(text)["input_ids"] for text in TEXTS],
        "decoded": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
        "decoded_all": [tokenizer.decode(one) for one in ids],
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "named": {name: str(t) for name, t in tokenizer._special_tokens_map.items() if t},
    }


def main() -> None:
    """Write the file."""
    draw = random.Random(6)
    cases = [*named_cases(), *(random_case(draw, i) for i in range(NUM_RANDOM))]
    content: dict[str, Any] = {"transformers": transformers.__version__, "texts": TEXTS}
    content["base"] = tokenizer_json({"vocab": [], "added_tokens": [], "normalizer": None})
    rows = []
    for case in cases:
        spec = tokenizer_json(case)
        kept = {name: spec[name] for name in ("added_tokens", "normalizer")}
        rows.append(json.dumps(case | kept | results(case), separators=(",", ":")))
    TARGET.write_text(json.dumps(content)[:-1] + ',"cases":[\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    main()
