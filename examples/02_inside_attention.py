# %% [markdown]
# # 2. What is inside attention
#
# Install, in a checkout of the engine: `pip install '.[examples]'`
#
# Attention is how a token reads the tokens before it. We compute it by hand for the first layer of
# a real model, compare with the kernel that the engine runs, rebuild the trick behind flash
# attention, and then watch the model read a sentence. NumPy on the CPU is enough here: the mirrors
# compute what the kernels compute.

# %%
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

import engine
from engine import kernels

model = engine.load("smollm2", device="cpu", dtype="float32")
sentence = "The animal did not cross the street because it was too tired"
ids = np.array(model.tokenizer.encode(sentence))
words = [model.tokenizer.decode([int(i)]).strip() for i in ids]
T = len(ids)
print(T, "tokens:", words)

# %% [markdown]
# `model.trace(ids)` runs all layers and records, for each, the attention weights (H, T, T) and the
# residual stream (T, N), the sum to which every layer adds its result. It is what our computation
# must arrive at.

# %%
trace = model.trace(ids)
print(len(trace.attention), "layers of", trace.attention[0].shape, "weights")

# %% [markdown]
# ## Queries, keys and values
#
# Each token's vector (N,) is multiplied by three matrices. Its *query* says what the token looks
# for, its *key* what it offers, its *value* what it passes on. Each is split into heads of D
# numbers. This model has 9 query heads, but 3 heads of keys and values, each of which serves 3
# query heads (*grouped-query attention*): the KV cache is a third of the size.

# %%
layer = model.decoder.layers[0]
positions = np.arange(T, dtype=np.int32)
hidden = model.decoder.embed(ids.astype(np.int32))  # (T, N), N = 576
q, k, v = layer.attn.project(layer.attn_norm(hidden), positions)
print("q", q.shape, "k", k.shape, "v", v.shape, "(tokens, heads, head size)")

# %% [markdown]
# ## Scores, softmax, sum
#
# The score of query i on key j is their dot product, divided by the square root of D. Later tokens
# are hidden (*causal* mask), a softmax turns each row of scores into weights that sum to 1, and the
# result is the weighted mean of the values.

# %%
group = q.shape[1] // k.shape[1]
keys = np.repeat(k, group, axis=1)  # (T, 9, D): each key head, three times
values = np.repeat(v, group, axis=1)
scores = np.einsum("ihd,jhd->hij", q, keys) / np.sqrt(q.shape[-1])
scores[:, ~np.tri(T, dtype=bool)] = -np.inf
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
by_hand = np.einsum("hij,jhd->ihd", weights, values)
np.testing.assert_allclose(weights, trace.attention[0], rtol=1e-3, atol=1e-6)

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
for axis, head in zip(axes, (0, 4, 8), strict=True):
    picture = axis.imshow(weights[head], cmap="viridis", vmin=0, vmax=1)
    axis.set_title(f"layer 0, head {head}")
    axis.set_xticks(range(T), words, rotation=90)
    axis.set_yticks(range(T), words)
figure.colorbar(picture, ax=axes, label="weight", shrink=0.7)
figure.savefig("heads.png", dpi=80)

# %% [markdown]
# The engine never stores this (heads, T, T) array. Its op, called on the same arrays, returns the
# same numbers: here its NumPy mirror; on CuPy arrays the CUDA kernel.

# %%
lens = np.array([0, T], np.int32)  # one sequence, tokens 0 to T
by_op = kernels.attention_prefill(q, k, v, cu_seqlens_q=lens, cu_seqlens_k=lens)
print("largest difference:", abs(by_op - by_hand).max())
np.testing.assert_allclose(by_op, by_hand, rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## Where is a token? Rotations
#
# A dot product does not know positions. *RoPE* rotates each pair of numbers of a query and key by
# an angle proportional to its position; then the score depends on the distance of the two tokens
# only, not on where they stand. We move the same query and key along and look at their score.

# %%
D, base = q.shape[-1], model.config.rope.theta
angles = np.arange(512)[:, None] * base ** (-np.arange(0, D, 2) / D)
cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def rotated(vector, position):
    """Return `vector` (D,) rotated to a position."""
    one = vector[None, None]
    return kernels.rope(one, one, np.array([position], np.int32), cos_sin)[0][0, 0]


rng = np.random.default_rng(0)
some_query = rng.standard_normal(D).astype(np.float32)
some_key = some_query + 0.5 * rng.standard_normal(D).astype(np.float32)
distances = np.arange(0, 200)
near = [rotated(some_query, d) @ rotated(some_key, 0) for d in distances]
far = [rotated(some_query, 300 + d) @ rotated(some_key, 300) for d in distances]
np.testing.assert_allclose(far, near, atol=0.02)

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot(distances, near, color="#1f5fbf", lw=3, label="key at position 0")
axis.plot(distances, far, color="#f39c12", ls="--", label="key at position 300")
axis.set_xlabel("distance of the query from the key")
axis.set_ylabel("score")
axis.legend(frameon=False)
figure.savefig("rope.png", dpi=80)

# %% [markdown]
# ## Without the big matrix: the online softmax
#
# For a prompt of 32,768 tokens the weights of one layer would be 9 x 32,768 x 32,768 numbers: 39
# GB. *Flash attention* reads keys and values in tiles and keeps, per query, three things: the
# largest score so far m, the sum s of exp(score - m), and the sum of the values with these weights.
# When a tile has a larger maximum, what has been summed so far is scaled down by exp(old m - new
# m).


# %%
def flash(q, keys, values, tile=4):
    """Attention of one head: q, keys, values (T, D), a tile of keys at a time."""
    m = np.full(len(q), -np.inf)
    s = np.zeros(len(q))
    total = np.zeros_like(q)
    for start in range(0, len(keys), tile):
        part = slice(start, start + tile)
        scores = q @ keys[part].T / np.sqrt(q.shape[-1])
        scores[np.arange(len(q))[:, None] < np.arange(len(keys))[part]] = -np.inf
        new_m = np.maximum(m, scores.max(-1))
        p = np.exp(scores - new_m[:, None])
        shrink = np.exp(m - new_m)
        s = s * shrink + p.sum(-1)
        total = total * shrink[:, None] + p @ values[part]
        m = new_m
    return total / s[:, None]


for head in range(q.shape[1]):
    tiled = flash(q[:, head], keys[:, head], values[:, head])
    np.testing.assert_allclose(tiled, by_hand[:, head], rtol=1e-4, atol=1e-5)
print("tiles of 4 keys: the same result, without the matrix")

# %% [markdown]
# The same idea lets several thread blocks, or several GPUs, share the keys of one query. Each
# computes attention over its part and the *log-sum-exp* of its scores; `merge_states` puts the
# parts together. Here for the last token, whose keys are cut in two.

# %%
last = q[-1:]
one = np.array([0, 1], np.int32)
parts = []
for part in (slice(0, 5), slice(5, T)):
    size = np.array([0, len(k[part])], np.int32)
    lens = {"cu_seqlens_q": one, "cu_seqlens_k": size}
    parts.append(kernels.attention_prefill(last, k[part], v[part], **lens, return_lse=True))
outputs, lses = zip(*parts, strict=True)
merged, _ = kernels.merge_states(outputs, lses)
share = 1 / (1 + np.exp(lses[1] - lses[0]))  # of the first part in the softmax, by head
print("weight of the first 5 keys, by head:", share.round(2))
np.testing.assert_allclose(merged[0], by_hand[-1], rtol=1e-4, atol=1e-5)
np.testing.assert_allclose(share[0], weights[:, -1, :5].sum(-1), rtol=1e-3)

# %% [markdown]
# ## Watch it read
#
# What we computed for the first layer, `trace` has for all of them. How much weight do they put on
# the first token?

# %%
sink = np.mean([layer[:, 1:, 0].mean() for layer in trace.attention])
print(f"mean weight on the first token: {sink:.0%}")

# %% [markdown]
# Heads that find nothing to read put their weight on the first token (an *attention sink*), so the
# pictures leave it out.

# %%
layers = [0, len(trace.attention) // 3, 2 * len(trace.attention) // 3, len(trace.attention) - 1]
means = [trace.attention[index].mean(0)[1:, 1:] for index in layers]
figure, axes = plt.subplots(1, len(layers), figsize=(4 * len(layers), 4.6), layout="constrained")
for axis, index, mean in zip(axes, layers, means, strict=True):
    picture = axis.imshow(mean, cmap="viridis", vmin=0, vmax=np.max(means))
    axis.set_title(f"layer {index}, mean of {trace.attention[index].shape[0]} heads")
    axis.set_xticks(range(T - 1), words[1:], rotation=90)
    axis.set_yticks(range(T - 1), words[1:])
figure.colorbar(picture, ax=axes, label="weight", shrink=0.7)
figure.savefig("attention.png", dpi=80)

# %% [markdown]
# ## When is the next word decided?
#
# Apply the output layer to the residual stream after every layer (the *logit lens*). Colour: the
# probability of the word that the last layer will choose, on a logarithmic scale, since most layers
# give it very little. Text: the layer's own choice.

# %%
lens = np.stack([model.read_residual(hidden) for hidden in trace.hidden])  # (layers, T, V)
lens -= lens.max(-1, keepdims=True)
probabilities = np.exp(lens) / np.exp(lens).sum(-1, keepdims=True)
final = probabilities[-1].argmax(-1)  # (T,)
certainty = probabilities[:, np.arange(T), final]  # (layers, T)

logits = model.step(ids[None], model.new_cache(1, 64), logits="all")[0]
assert (logits.argmax(-1) == final).all()  # the last layer's row is the model's own answer

# %%
figure, axis = plt.subplots(figsize=(12, 9), layout="constrained")
norm = LogNorm(1e-6, 1, clip=True)
picture = axis.imshow(certainty, aspect="auto", origin="lower", cmap="viridis", norm=norm)
for (layer, position), best in np.ndenumerate(probabilities.argmax(-1)):
    colour = "black" if certainty[layer, position] > 1e-2 else "white"
    text = model.tokenizer.decode([int(best)]).strip()
    text = text[:9] if text.isascii() else "·"  # glyphs that the font lacks
    axis.text(position, layer, text, ha="center", va="center", fontsize=7, color=colour)
following = [model.tokenizer.decode([int(i)]).strip() for i in final]
labels = [f"{word} → {next_word}" for word, next_word in zip(words, following, strict=True)]
axis.set_xticks(range(T), labels, rotation=90)
axis.set_ylabel("layer")
figure.colorbar(picture, label="probability of the final choice", extend="min")
figure.savefig("logits.png", dpi=80)
for label, p in zip(labels, certainty[-1], strict=True):
    print(f"{label:>24} {p:.2f}")

# %% [markdown]
# ## Exercises
#
# 1. *Previous-token heads* put nearly all their weight on the token just before. Find them: for
#    every layer and head, the mean of `np.diagonal(weights, -1)`.
# 2. Pass `window=4` to `attention_prefill`, and change the mask of the computation by hand until
#    the two agree again.
# 3. Replace `new_m` in `flash` by 0 and multiply q by 100. What happens, and why does the running
#    maximum prevent it?
#
# **Next:** [3. Sampling](03_sampling.py): from scores to a choice.
