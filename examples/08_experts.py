# %% [markdown]
# # 8. Experts
#
# Install, in a checkout of the engine: `pip install '.[examples]'`
#
# A *mixture of experts* has many MLPs per layer and lets each token use a few of them: the
# parameters of a large model at the cost of a small one. We compute such a layer with the engine's
# ops, then turn a real model's MLPs into experts and watch which expert gets which word, and
# whether the load is balanced.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import engine
from engine import kernels
from engine.config import MoeConfig
from engine.layers.moe import Experts

# %% [markdown]
# ## A layer in four calls
#
# A router scores the E experts for each of T tokens. `moe_route` picks the best k, turns their
# scores into weights, and sorts the T x k pairs of a token and an expert by expert, so that the
# tokens of an expert stand together.

# %%
T, N, F, E, TOP_K = 6, 32, 16, 8, 2  # tokens, hidden, inner size, experts, k
rng = np.random.default_rng(0)
x = rng.standard_normal((T, N), "float32")
router = rng.standard_normal((E, N), "float32") * N**-0.5
gate_up = rng.standard_normal((E, 2 * F, N), "float32") * N**-0.5
down = rng.standard_normal((E, N, F), "float32") * F**-0.5

routing = kernels.moe_route(x @ router.T, TOP_K)
for token in range(T):
    parts = zip(routing.weights[token], routing.experts[token], strict=True)
    print(f"token {token}:", " + ".join(f"{w:.2f} of expert {e}" for w, e in parts))
print("pairs sorted by expert:", routing.order, "each expert's range:", routing.offsets)
np.testing.assert_allclose(routing.weights.sum(1), 1, rtol=1e-5)

# %% [markdown]
# Two grouped products follow, one launch each for all experts, and a weighted sum. A loop over
# tokens and experts must arrive at the same.

# %%
inner = kernels.moe_gemm(x, gate_up, routing, activation="swiglu")  # (T k, I), sorted by expert
pairs = kernels.moe_gemm(inner, down, routing, scatter=True)  # times the weights, in token order
y = kernels.moe_combine(pairs.reshape(T, TOP_K, N))

by_loop = np.zeros_like(x)
for token in range(T):
    for weight, expert in zip(routing.weights[token], routing.experts[token], strict=True):
        gate, up = np.split(gate_up[expert] @ x[token], 2)
        by_loop[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
np.testing.assert_allclose(y, by_loop, rtol=1e-4, atol=1e-5)
read = len(np.unique(routing.experts)) / E
print(f"{TOP_K / E:.0%} of the arithmetic of all experts; {read:.0%} of the weights were read")

# %% [markdown]
# That is the economy of experts, and its catch: few tokens read few weights, but a batch soon reads
# all of them. With a random router, T tokens miss an expert with probability (1 - k/E)^T.

# %%
tokens = np.arange(1, 129)
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for experts, k in ((8, 2), (64, 6), (128, 8)):
    share = 1 - (1 - k / experts) ** tokens
    axis.plot(tokens, share, label=f"{k} of {experts} experts")
axis.set_xscale("log", base=2)
axis.set_xlabel("tokens in the step")
axis.set_ylabel("share of experts read")
axis.legend(frameon=False)
figure.savefig("experts_read.png", dpi=80)

# %% [markdown]
# ## Experts from a real MLP
#
# Our model has no experts, so we split its MLPs. An MLP is a sum over its F features:
# down(silu(gate x) * up x). Each expert takes I of them. The first four layers get experts, the
# fifth keeps its MLP, and all other layers are dropped.

# %%
LAYERS = 4
options = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
dense = engine.load("smollm2", quantization="none", **options)  # its matrices as plain arrays
sentence = "The cat chased a mouse, and 3 dogs chased the cat."
ids = dense.tokenizer.encode(sentence)
words = [dense.tokenizer.decode([i]).strip() or "␣" for i in ids]


def with_experts(top_k):
    """Return the model with its MLPs split into E experts; routers score all experts equally."""
    config = dense.config
    size = config.intermediate_size // E
    moe = MoeConfig(
        *(E, top_k, size, (True,) * LAYERS + (False,)),
        scale=float(E),
        correction=True,
    )
    config = replace(config, num_layers=LAYERS + 1, rope_layers=(), layer_windows=(), moe=moe)
    model = engine.load(
        config=config, load_format="dummy", device="cpu", dtype="float32", max_model_len=256
    )
    for name, weight in model.decoder.weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == "experts_gate_up":  # (E, 2I, N): gate rows, then up rows
            gate, up = np.split(dense.decoder.weights[f"{layer}.gate_up"].data, 2)
            weight.data[:, :size] = gate.reshape(E, size, -1)
            weight.data[:, size:] = up.reshape(E, size, -1)
        elif kind == "experts_down":  # (E, N, I)
            columns = np.split(dense.decoder.weights[f"{layer}.down"].data, E, axis=1)
            weight.data[:] = np.stack(columns)
        elif kind.startswith("router"):
            weight.data[:] = 0
        else:
            weight.data[:] = dense.decoder.weights[name].data
    return model


# %% [markdown]
# Routing every token to all experts with weight 1 leaves the model unchanged.

# %%
whole = with_experts(top_k=E).trace(ids).hidden[-1]
np.testing.assert_allclose(whole, dense.trace(ids).hidden[LAYERS], rtol=1e-4, atol=1e-3)
print(f"all {E} experts together are the MLP")

# %% [markdown]
# ## Which expert gets which word
#
# Now each token is routed to two experts, by random routers. The layers call their experts with the
# `Routing`, which we record.

# %%
model = with_experts(top_k=TOP_K)
for layer in range(LAYERS):
    router = model.decoder.weights[f"layers.{layer}.router"].data
    router[:] = rng.standard_normal(router.shape)
    # Divide by the norm of the RMSNorm weight, a token's length: logits then have std 1.
    router /= np.linalg.norm(model.decoder.weights[f"layers.{layer}.mlp_norm"].data)


def routings(ids):
    """Return the `Routing` of every layer that has experts."""
    seen, mixtures = [], [layer.mlp for layer in model.decoder.layers[:LAYERS]]
    originals = [mixture.experts for mixture in mixtures]

    class WatchedExperts(Experts):
        def combined(self, x, routing, **options):
            seen.append(routing)
            return super().combined(x, routing, **options)

    for mixture, experts in zip(mixtures, originals, strict=True):
        mixture.experts = WatchedExperts(**vars(experts))
    model.trace(ids)
    for mixture, experts in zip(mixtures, originals, strict=True):
        mixture.experts = experts
    return seen


seen = routings(ids)
for word, chosen, weights in zip(words, seen[0].experts, seen[0].weights / E, strict=True):
    parts = [f"{w:.2f} of expert {e}" for e, w in zip(chosen, weights, strict=True)]
    print(f"{word:>8} -> {' + '.join(parts)}")

# %%
shown = [0, LAYERS // 2, LAYERS - 1]
figure, axes = plt.subplots(len(shown), 1, figsize=(9, 8), sharex=True, layout="constrained")
for axis, layer in zip(axes, shown, strict=True):
    image = np.full((E, len(ids)), np.nan)
    columns = np.arange(len(ids))[:, None]
    image[seen[layer].experts, columns] = seen[layer].weights / E
    picture = axis.imshow(image, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
    for token, expert in np.argwhere(~np.isnan(image.T)):
        weight = image[expert, token]
        colour = "white" if weight > 0.6 else "black"
        axis.text(token, expert, f"{weight:.2f}", ha="center", va="center", color=colour, size=9)
    axis.set_title(f"layer {layer}")
    axis.set_ylabel("expert")
    axis.set_yticks(range(E))
    axis.set_xticks(np.arange(len(ids) + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(E + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="0.9")
    axis.tick_params(which="minor", length=0)
axes[-1].set_xticks(range(len(words)), words)
figure.colorbar(picture, ax=axes, label="weight of the expert's output", shrink=0.5)
figure.savefig("routing.png", dpi=80)

# %% [markdown]
# ## Load per expert
#
# The engine counts tokens per expert on the device, and `stats()` reads the counts. Tokens found in
# the prefix cache are not computed, so not counted. The cache is off here, since routers change.

# %%
prompts = [
    "Water boils at one hundred degrees, unless you are on a mountain.",
    "def area(width, height): return width * height",
    "Dear Ms. Meyer, thank you for your letter of the 4th of May.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
    "Once upon a time there was a king who had three daughters.",
    "Der Hund schläft, und die Katze sitzt auf dem Dach.",
    "Why did the chicken cross the road? Nobody had asked it to stay.",
    "Preheat the oven, beat the eggs and fold in the flour.",
]
requests = [dense.tokenizer.encode(prompt) for prompt in prompts]
server = engine.LLMEngine(model, enable_prefix_caching=False, num_blocks=64)


def load_of_a_batch():
    """Serve all prompts; return the token count of each expert, (LAYERS, E)."""
    before = np.array(list(server.stats().expert_load.values()))
    for index, request in enumerate(requests):
        server.add_request(str(index), request, engine.SamplingParams(max_tokens=1))
    while server.has_unfinished_requests():
        server.step()
    return np.array(list(server.stats().expert_load.values())) - before


first = load_of_a_batch()
assert (first.sum(1) == TOP_K * sum(map(len, requests))).all()
for layer, counts in server.stats().expert_load.items():
    print(f"layer {layer}: {counts}")

# %% [markdown]
# ## Balance
#
# A random router prefers some experts, and training reinforces the preference, because an expert
# learns from the tokens it gets. With expert parallelism, a layer is as slow as its busiest expert.
# DeepSeek-V3 and GLM-4.5 add a `correction` to the scores that select experts (not to the routing
# weights): it is raised a little for an underloaded expert and lowered for an overloaded one
# (arXiv:2408.15664). It needs only token counts; here, we count the same prompts again and again.

# %%
imbalance, rate, load = [], 0.03, first
for _ in range(16):
    imbalance.append(load.max(1) / load.mean(1))
    for layer in range(LAYERS):
        correction = model.decoder.weights[f"layers.{layer}.router_correction"].data
        correction += rate * np.sign(load[layer].mean() - load[layer])
    rate *= 0.85
    load = load_of_a_batch()
imbalance.append(load.max(1) / load.mean(1))
busiest = np.array(imbalance)  # (rounds + 1, LAYERS)
before, after = busiest[[0, -1]].mean(1)
print(f"the busiest expert has {before:.1f} times the mean; corrected, {after:.1f}")
assert after < before

# %%
figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained", width_ratios=[1, 1, 0.9])
for axis, counts, title in zip(axes, (first, load), ("random routers", "corrected"), strict=False):
    shares = counts / counts.mean(1, keepdims=True)
    picture = axis.imshow(shares, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    for (layer, expert), share in np.ndenumerate(shares):
        colour = "white" if abs(share - 1) > 0.7 else "black"
        axis.text(expert, layer, f"{share:.1f}", ha="center", va="center", color=colour, size=9)
    axis.set_title(title)
    axis.set_xlabel("expert")
    axis.set_ylabel("layer")
    axis.set_xticks(range(E))
    axis.set_yticks(range(LAYERS))
figure.colorbar(picture, ax=axes[:2], label="tokens, relative to the mean", extend="max")
for layer, curve in enumerate(busiest.T):
    shade = plt.get_cmap("viridis")(layer / LAYERS)
    axes[2].plot(curve, color=shade, label=f"layer {layer}")
axes[2].axhline(1, color="0.5", linestyle=":")
axes[2].set_title("the busiest expert's tokens / the mean")
axes[2].set_xlabel("corrections")
axes[2].set_xticks(range(0, len(busiest), 4))
axes[2].set_ylim(0.9)
axes[2].legend(frameon=False)
figure.savefig("load.png", dpi=80)

# %% [markdown]
# ## Exercises
#
# 1. Route with `score="sigmoid"` and with `num_groups=4, top_groups=2` (as DeepSeek-V3 does). How
#    many different experts does the sentence use now?
# 2. Count, layer by layer, how often two neighbouring words share an expert. How often would chance
#    alone make them?
# 3. The correction changes who is chosen, not the weights. What would change if it were added to
#    the weights, too?
#
# **Next:** [9. Speculative decoding](09_speculative_decoding.py): several tokens per step.
