"""Golden models with classification heads, and a small tokenizer, as files."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from safetensors.numpy import save_file

from tests.golden.tiny_weights import tiny_weight

__all__ = ["CASES", "GOLDEN", "WORDS", "write_model", "write_tokenizer"]

GOLDEN = json.loads((Path(__file__).parent / "golden/classifiers.json").read_text(encoding="utf-8"))
CASES = GOLDEN["cases"]
WORDS = ["<pad>", "<s>", "</s>", *["cats", "eat", "mice", "rates", "rose", "what", "do", "é", "漢"]]


def write_model(folder, case, *, config=(), **tensors):
    """Write a golden model; `tensors` replace some of its own (None: left out)."""
    folder.mkdir(exist_ok=True)
    one = CASES[case]
    values = json.dumps(one["config"] | dict(config))
    (folder / "config.json").write_text(values, encoding="utf-8")
    weights = {name: tiny_weight(name, shape, 1.0) for name, shape in one["shapes"].items()}
    weights |= {name.replace("__", "."): array for name, array in tensors.items()}
    save_file(
        {name: array for name, array in weights.items() if array is not None},
        folder / "model.safetensors",
    )
    return folder


def write_tokenizer(folder, *, has_bos=True):
    """Write a tokenizer of words, whose pairs have a BOS before each text."""
    ids = {word if word[0] == "<" else f"▁{word}": i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    if has_bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
        )
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
