"""Random draft heads, written as they are published, and the formula of their logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

EPS = 1e-5
THETA = 10000.0


def eagle3_json(target, **changes):
    """The config.json of a head with 4 heads of 8 features, for a `ModelConfig`."""
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // 2,
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return values | changes


def layer_tensors(rng, values, prefix, width):
    """Random tensors of a Llama layer whose attention reads `width` features."""
    n, f, d = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    q, kv = values["num_attention_heads"] * d, values["num_key_value_heads"] * d
    shapes = {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (n, q),
        "mlp.gate_proj": (f, n),
        "mlp.up_proj": (f, n),
        "mlp.down_proj": (n, f),
    }
    made = {f"{prefix}{k}.weight": matrix(rng, *shape) for k, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"{prefix}{name}.weight"] = norm(rng, n)
    return made


def eagle3_tensors(rng, values, target, num_features=3, prefix="midlayer.", *, embed=False):
    """Random tensors under the published names."""
    n, v, vd = values["hidden_size"], values["vocab_size"], values["draft_vocab_size"]
    made = layer_tensors(rng, values, prefix, 2 * n)
    made |= {
        f"{prefix}hidden_norm.weight": norm(rng, n),
        "norm.weight": norm(rng, n),
        "fc.weight": matrix(rng, n, num_features * target.hidden_size),
        "lm_head.weight": matrix(rng, vd, n) * 4,
    }
    ids = np.sort(rng.choice(v, vd, replace=False))
    made["d2t"] = (ids - np.arange(vd)).astype(np.int64)
    made["t2d"] = np.isin(np.arange(v), ids)
    if embed:
        made["embed_tokens.weight"] = matrix(rng, v, n)
    return made


def write(folder, values, tensors):
    """Write a head's folder; return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(
        {k: np.ascontiguousarray(t) for k, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def matrix(rng, rows, columns):
    return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def norm(rng, size):
    return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)


# ---- the formulas, in float64, of whole sequences


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotated(x, positions):
    """x (T, heads, D): the halves of each head are the two coordinates of D / 2 rotations."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / THETA ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(t, values, prefix, x, positions):
    """Causal attention of all tokens of one sequence."""
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    shape = {"q": heads, "k": kv_heads, "v": kv_heads}
    q, k, v = (
        (
            x @ t[f"{prefix}self_attn.{name}_proj.weight"].T
            + t.get(f"{prefix}self_attn.{name}_proj.bias", 0.0)
        ).reshape(len(x), count, -1)
        for name, count in shape.items()
    )
    q, k = rotated(q, positions), rotated(k, positions)
    out = np.zeros_like(q)
    for head in range(heads):
        group = head // (heads // kv_heads)
        for i in range(len(x)):
            scores = k[: i + 1, group] @ q[i, head] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[: i + 1, group] / weights.sum()
    return out.reshape(len(x), -1) @ t[f"{prefix}self_attn.o_proj.weight"].T


def mlp(t, prefix, x):
    gate, up = (x @ t[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ t[f"{prefix}mlp.down_proj.weight"].T


def layer(t, values, prefix, x, residual, positions):
    """Attention of x and MLP, around the residual stream."""
    h = residual + attention(t, values, prefix, x, positions)
    return h + mlp(t, prefix, rms(h, t[f"{prefix}post_attention_layernorm.weight"]))


def eagle3_drafts(t, values, embed, features, token_ids, count, prefix="midlayer."):
    """Greedy drafts after `token_ids`, and their logits in the draft vocabulary.

    `features` (T - 1, F Nt): of all tokens but the last.
    """
    t = {k: a.astype(np.float64) if a.dtype == np.float32 else a for k, a in t.items()}
    embed = t.get("embed_tokens.weight", embed)
    states = list(features.astype(np.float64) @ t["fc.weight"].T)
    ids, all_logits = list(token_ids), []
    for _ in range(count):
        state, positions = np.array(states), np.arange(len(states))
        hidden = rms(state, t[f"{prefix}hidden_norm.weight"])
        x = [rms(embed[ids[1:]], t[f"{prefix}input_layernorm.weight"]), hidden]
        residual = hidden if values.get("norm_before_residual") else state
        out = layer(t, values, prefix, np.concatenate(x, axis=1), residual, positions)[-1]
        logits = t["lm_head.weight"] @ rms(out, t["norm.weight"])
        all_logits.append(logits)
        best = int(logits.argmax())
        ids.append(best + int(t["d2t"][best]) if "d2t" in t else best)
        states.append(out)
    return ids[len(token_ids) :], np.array(all_logits)
