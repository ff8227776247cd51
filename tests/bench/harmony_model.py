"""A folder of gpt-oss's shape for benchmarks: random weights, a made vocabulary, scripted answers.

Weights have the published layout: experts in MXFP4, all else in bfloat16. Random weights write no
harmony, so `SAMPLER` replaces the sampler of `engine serve --kernels`: the request with seed s says
line s of `script.npy`, whatever the logits are.
"""

from __future__ import annotations

import json
import math
import random

import ml_dtypes
import numpy as np

from engine.commands._bench_models import config_folder
from engine.loading.safetensors_writer import SafetensorsWriter
from tests.bench.made_vocabulary import SYLLABLES

FUNCTION = "write_note"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": FUNCTION,
            "description": "Keep a note.",
            "parameters": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "text": {"type": "string"}},
                "required": ["title", "text"],
            },
        },
    }
]
SAMPLER = """
from pathlib import Path

import numpy as np

from engine import device

_LINES = np.load(Path(__file__).with_name("script.npy"))
_FIRST = int(_LINES[0, 0])  # the position of an answer's first token
_on_device = {}


def scripted(logits, *, seeds, positions):
    xp = device.array_module(logits)
    if xp not in _on_device:
        _on_device[xp] = xp.asarray(_LINES[1:].ravel())
    num_lines, length = _LINES[1:].shape
    rows = (seeds % np.uint64(num_lines)).astype(np.int64)
    return _on_device[xp].take(rows * length + (positions - _FIRST).clip(0, length - 1))
"""
TEMPLATE = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}
Channels: analysis, commentary, final.<|end|>\
{% if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|end|>{% endif %}\
{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{# <|channel|> #}{% endif %}"""

VOCAB_SIZE = 201_088
_SPECIAL = {  # of the published tokenizer; the other ids from the first on are reserved
    199_998: "<|startoftext|>",
    199_999: "<|endoftext|>",
    200_002: "<|return|>",
    200_003: "<|constrain|>",
    200_005: "<|channel|>",
    200_006: "<|start|>",
    200_007: "<|end|>",
    200_008: "<|message|>",
    200_012: "<|call|>",
}
_MARKS = (
    *('{"', '":"', '","', '"}', "title", "text", "analysis", "commentary", "final", "assistant"),
    *("json", " to", "=functions", FUNCTION, "system", "user", "developer", "Reasoning"),
    *("medium", "Channels", "Tools", '":', ' "', '":{"', " {"),
)
_POOL = 1 << 24  # random numbers, which repeat
_SCALE = 120  # of MXFP4: 2**-7


class Vocabulary:
    """Bytes, marks, and words of up to four syllables after a space."""

    def __init__(self):
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # they stand for themselves
        others = [i for i in range(256) if i not in plain]
        self._chars = {i: chr(i) for i in plain}
        self._chars |= {i: chr(256 + n) for n, i in enumerate(others)}
        texts = dict.fromkeys(map(self._stored, (*map(chr, range(128)), *_MARKS)))
        texts |= dict.fromkeys(self._chars.values())
        rng = random.Random(0)
        self.words = []
        while len(texts) < min(_SPECIAL):
            word = " " + "".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2, 3, 3, 4))))
            if (stored := self._stored(word)) not in texts:
                texts[stored] = None
                self.words.append(word)
        self._ids = {text: i for i, text in enumerate(texts)}
        self.special = {
            i: _SPECIAL.get(i, f"<|reserved_{i}|>") for i in range(min(_SPECIAL), VOCAB_SIZE)
        }
        self._special_ids = {text: i for i, text in self.special.items()}

    def _stored(self, text):
        return "".join(self._chars[byte] for byte in text.encode())

    def ids(self, tokens):
        """Return the ids of the texts of tokens."""
        special = self._special_ids
        return [special[t] if t in special else self._ids[self._stored(t)] for t in tokens]

    def tokenizer_json(self):
        """Return the vocabulary in the format of `tokenizer.json`."""
        added = [
            {"id": i, "content": text, "special": True, "normalized": False}
            for i, text in self.special.items()
        ]
        step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        step["trim_offsets"] = True
        model = {"type": "BPE", "vocab": self._ids, "merges": [], "ignore_merges": True}
        return {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": step,
            "decoder": step,
            "model": model,
        }


def answer(vocabulary, seed, num_tokens):
    """Return the tokens of an answer: three fifths analysis, a fifth a call, then final text."""
    rng = random.Random(seed)

    def words(count):
        return rng.choices(vocabulary.words, k=count)

    begin = ["<|start|>", "assistant", "<|channel|>"]
    fifth = num_tokens // 5
    thought = [*begin[2:], "analysis", "<|message|>", *words(3 * fifth), "<|end|>"]
    head = [*begin, "commentary", " to", "=functions", ".", FUNCTION, " ", "<|constrain|>", "json"]
    fields = ['{"', "title", '":"', *words(5), '","', "text", '":"', *words(fifth), '"}']
    call = [*head, "<|message|>", *fields, "<|call|>"]
    final = [*begin, "final", "<|message|>"]
    found = [*thought, *call, *final]
    if len(found) >= num_tokens:
        raise ValueError(f"num_tokens must exceed {len(found)}; got {num_tokens}")
    return [*found, *words(num_tokens - len(found))]


def write_tokenizer(folder, vocabulary, config):
    """Write all of the model but its weights."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary.tokenizer_json()))
    names = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_script(folder, lines, first):
    """Write the sampler and the ids of the answers, which begin at position `first`."""
    head = np.full((1, lines.shape[1]), first, np.int32)
    np.save(folder / "script.npy", np.concatenate([head, lines]))
    (folder / "sampler.py").write_text(SAMPLER)


def make_config(**changes):
    """Return gpt-oss-20b's configuration in Hugging Face's format, with some values replaced."""
    config = json.loads((config_folder("gpt-oss-20b") / "config.json").read_text()) | changes
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return config | {"quantization_config": {"quant_method": "mxfp4"}}


def write_weights(folder, config):
    """Write random weights in the published layout."""
    rng = np.random.default_rng(0)
    entries = _entries(config)
    most = max(math.prod(shape) for _, shape in entries.values())
    floats = rng.standard_normal(_POOL, np.float32) * np.float32(0.02)
    pools = {"bfloat16": floats.astype(ml_dtypes.bfloat16)}
    pools["uint8"] = np.frombuffer(rng.bytes(_POOL), np.uint8)
    pools = {dtype: np.resize(pool, most + _POOL) for dtype, pool in pools.items()}
    with SafetensorsWriter(folder, entries) as writer:
        for name, (dtype, shape) in entries.items():
            start = int(rng.integers(_POOL))
            values = pools[dtype][start : start + math.prod(shape)].reshape(shape)
            if name.endswith("norm.weight"):
                values = np.ones(shape, ml_dtypes.bfloat16)
            elif name.endswith("_scales"):
                values = np.full(shape, _SCALE, np.uint8)
            writer.write(name, values)


def _entries(config):
    """Return the dtype and shape of each tensor by name."""
    width, size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts, inner = config["num_local_experts"], config["intermediate_size"]
    table = config["vocab_size"], width
    entries = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    entries["model.norm.weight"] = (width,)
    coded = {}
    products = {"q": (heads * size, width), "k": (kv_heads * size, width)}
    products |= {"v": products["k"], "o": (width, heads * size)}
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        for name in ("input_layernorm", "post_attention_layernorm"):
            entries[f"{layer}{name}.weight"] = (width,)
        for name, shape in products.items():
            entries[f"{layer}self_attn.{name}_proj.weight"] = shape
            entries[f"{layer}self_attn.{name}_proj.bias"] = shape[:1]
        entries[f"{layer}self_attn.sinks"] = (heads,)
        entries[f"{layer}mlp.router.weight"] = (experts, width)
        entries[f"{layer}mlp.router.bias"] = (experts,)
        for name, shape in {"gate_up": (2 * inner, width), "down": (width, inner)}.items():
            place = f"{layer}mlp.experts.{name}_proj"
            blocks = (experts, shape[0], shape[1] // 32)
            coded |= {f"{place}_blocks": (*blocks, 16), f"{place}_scales": blocks}
            entries[f"{place}_bias"] = (experts, shape[0])
    found = {name: ("bfloat16", shape) for name, shape in entries.items()}
    return found | {name: ("uint8", shape) for name, shape in coded.items()}
