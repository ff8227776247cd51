# %% [markdown]
# # Watch a model read
#
# Which words does each word attend to, and at which layer is the next word decided? Everything is
# an array, so answering takes a few lines of NumPy and a plot.

# %%
import os
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError:
    raise SystemExit("this example draws pictures; pip install '.[examples]' first") from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import engine

model = engine.load("smollm2", device="cpu", dtype="float32")
sentence = "The animal did not cross the street because it was too tired"
ids = np.array(model.tokenizer.encode(sentence))
words = [model.tokenizer.decode([int(i)]).strip() for i in ids]
folder = Path(os.environ.get("ENGINE_EXAMPLES_OUT", "."))

# %% [markdown]
# ## Attention
#
# `model.trace(ids)` runs the NumPy reference and keeps its intermediate results: per layer, the
# attention weights, shape (H, T, T), and the residual stream, shape (T, N).

# %%
trace = model.trace(ids)
print(len(trace.attention), "layers of", trace.attention[0].shape)
np.testing.assert_allclose(trace.attention[0].sum(-1), 1.0, rtol=1e-5)

# %% [markdown]
# Heads park unused attention on the first token (an attention sink), so the plot omits it.

# %%
layers = [0, len(trace.attention) // 3, 2 * len(trace.attention) // 3, len(trace.attention) - 1]
figure, axes = plt.subplots(1, len(layers), figsize=(4 * len(layers), 4.2))
for axis, layer in zip(axes, layers, strict=True):
    weights = trace.attention[layer].mean(0)[1:, 1:]
    axis.imshow(weights, cmap="viridis")
    axis.set_title(f"layer {layer}, mean of {trace.attention[layer].shape[0]} heads")
    axis.set_xticks(range(len(words) - 1), words[1:], rotation=90)
    axis.set_yticks(range(len(words) - 1), words[1:])
figure.tight_layout()
figure.savefig(folder / "attention.png", dpi=80)
print("attention.png")

# %% [markdown]
# ## Logits, layer by layer
#
# Applying the output layer to every layer's residual stream (the "logit lens") shows when the next
# word is decided. Colour: probability of the final choice.

# %%
lens = np.stack([model.read_residual(hidden) for hidden in trace.hidden])  # (layers, T, V)
lens -= lens.max(-1, keepdims=True)
probabilities = np.exp(lens) / np.exp(lens).sum(-1, keepdims=True)
final = probabilities[-1].argmax(-1)  # (T,)
certainty = probabilities[:, np.arange(len(ids)), final]  # (layers, T)

figure, axis = plt.subplots(figsize=(9, 6))
picture = axis.imshow(certainty, aspect="auto", origin="lower", cmap="magma", vmin=0, vmax=1)
following = [model.tokenizer.decode([int(i)]).strip() for i in final]
labels = [f"{word} → {next_word}" for word, next_word in zip(words, following, strict=True)]
axis.set_xticks(range(len(words)), labels, rotation=90)
axis.set_ylabel("layer")
figure.colorbar(picture, label="probability of the final choice")
figure.tight_layout()
figure.savefig(folder / "logits.png", dpi=80)
print("logits.png")
for word, next_word, p in zip(words, following, certainty[-1], strict=True):
    print(f"{word:>10} -> {next_word:<10} {p:.2f}")
