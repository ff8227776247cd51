"""Writes .gguf files in which every number can be wrong."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

__all__ = ["change_gguf", "pack_gguf"]

_FORMS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q"}
_FORMS[12] = "<d"
_COUNTS = [0, 1, 2, 3, 7, 32, 33, 2**16, 2**24, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
KEYS = (
    *("general.architecture", "general.alignment", "general.file_type", "split.count"),
    *("llama.block_count", "llama.context_length", "llama.embedding_length"),
    *("llama.feed_forward_length", "llama.attention.head_count", "llama.vocab_size"),
    *("llama.attention.head_count_kv", "llama.attention.layer_norm_rms_epsilon"),
    *("llama.rope.dimension_count", "llama.rope.freq_base", "llama.rope.scaling.type"),
    *("llama.rope.scaling.factor", "llama.rope.scaling.original_context_length"),
    *("llama.attention.key_length", "llama.attention.value_length", "llama.expert_count"),
    *("llama.attention.sliding_window", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.tokens"),
    *("tokenizer.ggml.model", "tokenizer.chat_template", "x"),
    *("llama.expert_used_count", "llama.expert_feed_forward_length", "llama.expert_weights_scale"),
    *("llama.expert_weights_norm", "llama.expert_gating_func", "llama.expert_group_count"),
)


def tiny_parts(num_experts: int = 0) -> dict[str, Any]:
    """Return a valid llama model: key-value pairs (key, type, value) and tensors.

    With experts, it is a Mixtral.
    """
    pairs = [
        ["general.architecture", 8, "llama"],
        ["llama.block_count", 4, 1],
        ["llama.context_length", 4, 64],
        ["llama.embedding_length", 4, 32],
        ["llama.feed_forward_length", 4, 32],
        ["llama.attention.head_count", 4, 2],
        ["llama.attention.head_count_kv", 4, 1],
        ["llama.attention.layer_norm_rms_epsilon", 6, 1e-6],
        ["llama.rope.dimension_count", 4, 16],
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (32, 16), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (32, 16),
        "blk.0.attn_v": (32, 16), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
    }  # fmt: skip
    if num_experts:
        pairs += [["llama.expert_count", 4, num_experts], ["llama.expert_used_count", 4, 1]]
        for name in ("gate", "up", "down"):
            shapes[f"blk.0.ffn_{name}_exps"] = (*shapes.pop(f"blk.0.ffn_{name}"), num_experts)
        shapes["blk.0.ffn_gate_inp"] = (32, num_experts)
    tensors, offset = [], 0
    for name, shape in shapes.items():
        kind = 0 if len(shape) == 1 else 8  # F32, Q8_0
        count = math.prod(shape)
        tensors.append([f"{name}.weight", list(shape), kind, offset])
        offset += -(-(count * 4 if kind == 0 else count // 32 * 34) // 32) * 32
    return {"version": 3, "pairs": pairs, "tensors": tensors, "counts": None, "room": offset}


def _string(text: str, length: int | None = None) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data) if length is None else length) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _string(str(value))
    if kind == 9:
        item, count, items = value
        head = struct.pack("<IQ", item, len(items) if count is None else count)
        return head + b"".join(_value(item, one) for one in items)
    form = _FORMS.get(kind, "<I")
    try:
        return struct.pack(form, value)
    except (struct.error, OverflowError):
        return b"\xff" * struct.calcsize(form)


def pack_gguf(parts: dict[str, Any]) -> bytes:
    """Return the bytes of a file with these parts; its data is zeros."""
    num_tensors, num_pairs = parts["counts"] or (len(parts["tensors"]), len(parts["pairs"]))
    data = b"GGUF" + struct.pack("<IQQ", parts["version"], num_tensors, num_pairs)
    for key, kind, value in parts["pairs"]:
        data += _string(key) + struct.pack("<I", kind) + _value(kind, value)
    for name, shape, kind, offset in parts["tensors"]:
        data += _string(name) + struct.pack("<I", len(shape))
        data += b"".join(struct.pack("<Q", size) for size in shape)
        data += struct.pack("<IQ", kind, offset)
    return data + bytes(-len(data) % 32) + bytes(parts["room"])


def change_gguf(rng: random.Random) -> bytes:
    """Return a tiny model with one to three parts changed."""
    parts = tiny_parts(rng.choice([0, 3]))
    for _ in range(rng.choice([1, 1, 2, 3])):
        way = rng.random()
        if way < 0.5:
            _change_pair(rng, parts["pairs"])
        elif way < 0.9:
            _change_tensor(rng, parts["tensors"])
        elif way < 0.94:
            parts["counts"] = [rng.choice([0, 10, 11, 12, 2**40, 2**64 - 1]) for _ in range(2)]
        elif way < 0.97:
            parts["room"] = rng.choice([0, 1, 1000, max(0, parts["room"] - 1)])
        else:
            parts["version"] = rng.choice([0, 1, 2, 4, 2**24, 2**32 - 1])
    return pack_gguf(parts)


def _change_pair(rng: random.Random, pairs: list[Any]) -> None:
    kind = rng.choice([*_FORMS, *_FORMS, 8, 9, 13, 2**31])
    value: Any = rng.choice([*_COUNTS, -1, 0.0, 1e-45, 1e38, float("nan"), float("inf")])
    if kind == 8:
        value = rng.choice(["llama", "", "yarn", "linear", "none", "x" * 5000, "\ud800", "gpt2"])
    elif kind == 9:
        item = rng.choice([0, 4, 5, 6, 8, 9, 77])
        items = [rng.choice(["a", 1, 2]) if item == 8 else rng.randrange(3) for _ in range(3)]
        value = (item if item != 9 else 4, rng.choice([None, None, *_COUNTS]), items)
    pair = [rng.choice(KEYS), kind, value]
    way = rng.random()
    if way < 0.6:
        place = rng.randrange(len(pairs))
        pairs[place] = [pairs[place][0], *pair[1:]]
    elif way < 0.7:
        del pairs[rng.randrange(len(pairs))]
        pairs.append(pair)
    else:
        pairs.append(pair)


def _change_tensor(rng: random.Random, tensors: list[Any]) -> None:
    place = rng.randrange(len(tensors))
    way = rng.random()
    if way < 0.3:
        shape = tensors[place][1]
        shape[rng.randrange(len(shape))] = rng.choice(_COUNTS)
    elif way < 0.4:
        tensors[place][1] = [rng.choice([1, 32, 2**32])] * rng.choice([0, 3, 4, 5, 2000])
    elif way < 0.6:
        tensors[place][2] = rng.choice([*range(40), 2**31, 2**32 - 1])
    elif way < 0.85:
        tensors[place][3] = rng.choice([*_COUNTS, 31, 34, 64, 2**64 - 32])
    elif way < 0.93:
        tensors.append(list(rng.choice(tensors)))
    else:
        tensors[place][0] = rng.choice(["", "output.weight", "x" * 5000, tensors[0][0]])
