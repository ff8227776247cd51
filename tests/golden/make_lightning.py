"""Make the golden models with lightning attention, in NumPy alone. Not part of CI.

    python tests/golden/make_lightning.py

Transformers has no such model. This is the architecture that the modeling file beside the published
checkpoints describes (inclusionAI's Ring-V2.5), in float64 and token by token: rope by halves in
lightning and grouped-query attention, by neighbours in latent attention; decay rates by ALiBi's
slopes times 1 - (layer - 1) / (layers - 1) + 1e-5; RMSNorm over each group of heads, then the
sigmoid of the gate; a router with sigmoid scores, a bias for the choice, and groups of experts.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
from cases_lightning import LIGHTNING
from tiny_weights import tiny_weight

HERE = Path(__file__).parent
NUM_PROMPT = 28
NUM_NEW = 12
# As in make.py: a choice that rounding could flip proves nothing.
SMALLEST_GAP = 1e-3
SMALLEST_MARGIN = 1e-3


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def turned(x, theta, count, *, neighbours=False):
    """Rotate the first `count` features of x (T, H, D) by their positions."""
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(0, count, 2) / count)
    first, second = np.arange(count // 2), np.arange(count // 2, count)
    if neighbours:
        first, second = np.arange(0, count, 2), np.arange(1, count, 2)
    a, b = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = a * np.cos(angles) - b * np.sin(angles)
    y[..., second] = b * np.cos(angles) + a * np.sin(angles)
    return y


def attend(q, k, v, scale):
    """Causal softmax attention of (T, H, D) heads."""
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    scores = np.where(np.tril(np.ones(scores.shape[1:])) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


class Reference:
    """The model of a config.json, whose weights are those of their names."""

    def __init__(self, config):
        self.c = config
        self.shapes = {}
        self.margin = np.inf
        rope = config.get("rope_parameters", config)
        self.theta = rope["rope_theta"]
        self.factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))

    def weight(self, name, *shape):
        self.shapes[name] = list(shape)
        return tiny_weight(name, list(shape), 1.0).astype(np.float64)

    def linear(self, x, name, rows):
        return x @ self.weight(f"{name}.weight", rows, x.shape[-1]).T

    def norm(self, x, name, eps):
        return rms(x, self.weight(f"{name}.weight", x.shape[-1]), eps)

    def logits(self, ids):
        c = self.c
        n, eps = c["hidden_size"], c["rms_norm_eps"]
        x = self.weight("model.word_embeddings.weight", c["vocab_size"], n)[ids]
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            h = self.norm(x, f"{name}.input_layernorm", eps)
            x = x + self.attention(h, f"{name}.attention", layer)
            h = self.norm(x, f"{name}.post_attention_layernorm", eps)
            is_sparse = layer >= c["first_k_dense_replace"]
            width = c["intermediate_size"]
            mlp = f"{name}.mlp"
            x = x + (self.experts(h, mlp) if is_sparse else self.mlp(h, mlp, width))
        return self.linear(self.norm(x, "model.norm", eps), "lm_head", c["vocab_size"])

    def attention(self, x, name, layer):
        c = self.c
        size, count = c["layer_group_size"], c["num_hidden_layers"]
        if (layer + 1) % size and layer < count // size * size:
            heads = self.lightning(x, name, layer)
        else:
            heads = self.latent(x, name) if "kv_lora_rank" in c else self.grouped(x, name)
        return self.linear(heads, f"{name}.dense", c["hidden_size"])

    def heads(self, x, name, kv_heads):
        """Return q, k and v by head, normalised and rotated."""
        c = self.c
        h, d = c["num_attention_heads"], c["head_dim"]
        rows = self.linear(x, f"{name}.query_key_value", (h + 2 * kv_heads) * d)
        q, k, v = np.split(rows.reshape(len(x), -1, d), [h, h + kv_heads], axis=1)
        if c["use_qk_norm"]:
            q = self.norm(q, f"{name}.query_layernorm", c["rms_norm_eps"])
            k = self.norm(k, f"{name}.key_layernorm", c["rms_norm_eps"])
        count = int(d * self.factor)
        return turned(q, self.theta, count), turned(k, self.theta, count), v

    def lightning(self, x, name, layer):
        c = self.c
        h, d = c["num_attention_heads"], c["head_dim"]
        q, k, v = self.heads(x, name, h)
        factor = 1 - (layer - 1) / (c["num_hidden_layers"] - 1) + 1e-5
        decay = np.exp(-slopes(h) * factor)[:, None, None]
        state, out = np.zeros((h, d, d)), np.empty_like(v)
        for t in range(len(x)):
            state = decay * state + v[t][:, :, None] * k[t][:, None]
            out[t] = np.einsum("hvk,hk->hv", state, q[t]) * d**-0.5
        groups = out.reshape(len(x), c["group_norm_size"], -1)
        weight = self.weight(f"{name}.g_norm.weight", h * d).reshape(groups.shape[1:])
        normed = rms(groups, weight, c["rms_norm_eps"]).reshape(len(x), -1)
        return normed * sigmoid(self.linear(x, f"{name}.g_proj", h * d))

    def grouped(self, x, name):
        c = self.c
        kv_heads = c["num_key_value_heads"]
        q, k, v = self.heads(x, name, kv_heads)
        k, v = (np.repeat(a, q.shape[1] // kv_heads, axis=1) for a in (k, v))
        return attend(q, k, v, c["head_dim"] ** -0.5).reshape(len(x), -1)

    def latent(self, x, name):
        c = self.c
        h, rank = c["num_attention_heads"], c["kv_lora_rank"]
        nope, rope, wide = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        q = x
        if c["q_lora_rank"]:
            q = self.linear(x, f"{name}.q_a_proj", c["q_lora_rank"])
            q = self.norm(q, f"{name}.q_a_layernorm", 1e-6)
        q = self.linear(q, f"{name}.q_{'b_' if c['q_lora_rank'] else ''}proj", h * (nope + rope))
        q = q.reshape(len(x), h, -1)
        kv = self.linear(x, f"{name}.kv_a_proj_with_mqa", rank + rope)
        key = turned(kv[:, None, rank:], self.theta, rope, neighbours=True)
        kv = self.norm(kv[:, :rank], f"{name}.kv_a_layernorm", 1e-6)
        kv = self.linear(kv, f"{name}.kv_b_proj", h * (nope + wide)).reshape(len(x), h, -1)
        q = np.concatenate(
            [q[..., :nope], turned(q[..., nope:], self.theta, rope, neighbours=True)], axis=-1
        )
        k = np.concatenate([kv[..., :nope], np.repeat(key, h, axis=1)], axis=-1)
        return attend(q, k, kv[..., nope:], (nope + rope) ** -0.5).reshape(len(x), -1)

    def mlp(self, x, name, width):
        gate, up = (self.linear(x, f"{name}.{one}_proj", width) for one in ("gate", "up"))
        return self.linear(gate * sigmoid(gate) * up, f"{name}.down_proj", x.shape[-1])

    def experts(self, x, name):
        c = self.c
        count, width = c["num_experts"], c["moe_intermediate_size"]
        scores = sigmoid(self.linear(x, f"{name}.gate", count))
        ranks = scores + self.weight(f"{name}.gate.expert_bias", count)
        of_group = np.sort(ranks.reshape(len(x), c["n_group"], -1), axis=-1)[..., -2:].sum(-1)
        kept = self.largest(of_group, c["topk_group"])
        ranks = np.where(np.repeat(kept, count // c["n_group"], axis=1), ranks, -np.inf)
        weights = np.where(self.largest(ranks, c["num_experts_per_tok"]), scores, 0)
        weights *= c["routed_scaling_factor"] / (weights.sum(-1, keepdims=True) + 1e-20)
        out = self.mlp(x, f"{name}.shared_experts", width * c["num_shared_experts"])
        for e in range(count):
            out += weights[:, e : e + 1] * self.mlp(x, f"{name}.experts.{e}", width)
        return out

    def largest(self, ranks, count):
        """Tell which are the `count` largest of each row; keep the smallest margin seen."""
        ordered = np.sort(ranks, axis=-1)
        if count < ranks.shape[1]:
            self.margin = min(
                self.margin, float((ordered[:, -count] - ordered[:, -count - 1]).min())
            )
        return ranks >= ordered[:, -count, None]


def slopes(num_heads):
    """ALiBi's slopes, as in its paper's code."""
    power = 2 ** math.floor(math.log2(num_heads))
    start = 2 ** (-(2 ** -(math.log2(power) - 3)))
    found = [start**i for i in range(1, power + 1)]
    if power < num_heads:
        found += slopes(2 * power)[0::2][: num_heads - power].tolist()
    return np.array(found)


def main():
    for case, config in LIGHTNING.items():
        for attempt in range(100):
            seed = int.from_bytes(hashlib.sha256(f"{case}{attempt}".encode()).digest()[:4], "big")
            ids = np.random.default_rng(seed).integers(4, config["vocab_size"], NUM_PROMPT).tolist()
            reference, gap = Reference(config), np.inf
            for _ in range(NUM_NEW):
                last = reference.logits(ids)[-1]
                second, first = np.sort(last)[-2:]
                gap = min(gap, first - second)
                ids.append(int(last.argmax()))
            if gap > SMALLEST_GAP and reference.margin > SMALLEST_MARGIN:
                break
        prompt = ids[:NUM_PROMPT]
        logits = reference.logits(prompt)
        record = {
            "config": config,
            "norm_mean": 1.0,
            "tensors": reference.shapes,
            "prompt": prompt,
            "greedy": ids[NUM_PROMPT:],
        }
        (HERE / "models" / f"{case}.json").write_text(json.dumps(record, indent=1) + "\n")
        np.save(HERE / "models" / f"{case}.npy", logits.astype(np.float32))
        print(f"{case}: attempt {attempt}, gap {gap:.4f}, margin {reference.margin:.4f}")


if __name__ == "__main__":
    main()
