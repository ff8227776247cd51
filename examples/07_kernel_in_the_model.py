# %% [markdown]
# # 7. Your kernel in the model
#
# Install, in a checkout of the engine: `pip install '.[cuda12,examples]'` (or `cuda13`). Without a
# GPU, the formulas run in place of the kernels.
#
# A kernel that is right on random arrays has not met a model yet. Here an op of your own replaces
# one of the engine's in a running model: the same formula must give the same text. The same door
# lets you look at what passes through a layer, and try other formulas on a real model within
# seconds.

# %%
import matplotlib.pyplot as plt
import numpy as np

import engine
from engine import LLM, SamplingParams, errors, kernels
from engine.device import to_numpy

model = engine.load("smollm2", dtype="float32")
xp = model.device.xp  # numpy, or cupy on a GPU

# %% [markdown]
# ## An op to replace
#
# RMSNorm stands before every attention and every MLP. One block per row: a sum of squares over the
# block, then the row once more.

# %%
SOURCE = r"""
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(256)
my_rmsnorm(const scalar_t* x, const scalar_t* weight, scalar_t* out, int N, float eps) {
  __shared__ float smem[8];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * N;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < N; i += 256) {
    const float value = to_float(x[start + i]);
    sum += value * value;
  }
  const float scale = rsqrtf(block_sum<8>(sum, smem) / N + eps);
  for (int i = threadIdx.x; i < N; i += 256) {
    out[start + i] = from_float<scalar_t>(to_float(x[start + i]) * scale * to_float(weight[i]));
  }
}
"""


def formula(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


my_rmsnorm = kernels.define(
    name="my_rmsnorm",
    signature="x: (T, N) float, weight: (N,) float, eps: float32 = 1e-6 -> (T, N) like x",
    reference=formula,
    source=SOURCE,
    launch=lambda call: call.grid(call["T"], 256),
    reduction="N",
)

rng = np.random.default_rng(0)
x = xp.asarray(rng.standard_normal((5, 576), "float32"))
weight = xp.asarray(rng.standard_normal(576, "float32"))
theirs = to_numpy(kernels.rmsnorm(x, weight, eps=1e-5))
np.testing.assert_allclose(to_numpy(my_rmsnorm(x, weight, eps=1e-5)), theirs, rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## Within a block
#
# Inside `with kernels.override(...)`, calls of the op and steps of every model run yours. The
# engine's ops have options that yours lacks: `rmsnorm` may add a residual first, and on a GPU the
# norm is fused into the product that follows. Such a call is taken apart: the addition and the
# product are the engine's, the norm is yours.

# %%
ids = model.tokenizer.encode("The capital of France is")


def next_logits():
    return to_numpy(model.step([ids], model.new_cache(1, 64)))[0]


plain = next_logits()
with kernels.override("rmsnorm", my_rmsnorm):
    mine = next_logits()
print(f"largest difference of a logit: {abs(mine - plain).max():.1e}, of {abs(plain).max():.0f}")
assert mine.argmax() == plain.argmax()
np.testing.assert_allclose(mine, plain, atol=1e-2)

# %% [markdown]
# ## For a whole model
#
# `LLM(..., kernels={...})` holds for as long as the model lives, in all its processes, in plans and
# CUDA graphs. The text must be the same, and the statistics say which kernel ran how often.

# %%
params = SamplingParams(temperature=0.0, max_tokens=12)
prompt = "Once upon a time"
texts, runs = [], []
for mine in ({}, {"rmsnorm": my_rmsnorm}):
    with LLM("smollm2", dtype="float32", max_model_len=256, kernels=mine) as llm:
        texts.append(llm.generate(prompt, params)[0].outputs[0].text)
        runs.append(llm.get_metrics().kernel_runs)
print(prompt + texts[1])
assert texts[0] == texts[1]
for kernel, count in runs[1].items():
    print(f"{count:6} {kernel}")

# %% [markdown]
# How often should it have run? A step of this model has two norms per layer and one at the end, and
# 12 tokens take 12 steps: the first reads the prompt and yields the first token.

# %%
config = model.config
expected = 12 * (2 * config.num_layers + 1)
assert runs[1]["rmsnorm=my_rmsnorm"] == expected
assert "rmsnorm" not in runs[1]
print(f"{expected} = 12 steps x (2 x {config.num_layers} layers + 1)")

# %% [markdown]
# ## Look, do not touch
#
# A function that calls the engine's op and notes what it saw is a probe. How large is the residual
# stream that reaches each norm?

# %%
seen = []


def probe(x, weight, eps):
    seen.append(np.copy(to_numpy(x)))  # the model writes over its arrays
    return kernels.rmsnorm(x, weight, eps=eps)


with kernels.override("rmsnorm", probe):
    np.testing.assert_allclose(next_logits(), plain, atol=1e-2)
rms = np.array([np.sqrt((one**2).mean(-1)) for one in seen if len(one) == len(ids)])  # (norms, T)
print(len(seen), "norms")
largest = rms.max(0)  # by token
assert largest[0] > 5 * largest[1:].max() and rms[0, 0] < largest[0] / 5

# %%
figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
for token, curve in zip(ids, rms.T, strict=True):
    axis.plot(curve, label=repr(model.tokenizer.decode([token])))
axis.set_yscale("log")
axis.set_xlabel("norm, from the first layer to the last")
axis.set_ylabel("rms of the token's vector")
axis.legend(frameon=False, fontsize=8)
figure.savefig("residual_stream.png", dpi=80)

# %% [markdown]
# One token stands out from a third of the layers on: the first, on which heads park the attention
# that they do not need (chapter 2).
#
# ## Another formula
#
# What does a model lose with a cheaper activation? Its MLPs compute silu(gate) * up. We try others,
# and read the price from the perplexity (chapter 1) of a short text. A function on arrays is
# enough, without CUDA: good for an idea, too slow for a product.

# %%
TEXT = """The Moon is the only natural satellite of the Earth. It orbits at an average distance of
about 384,000 kilometres, and it always shows the same side to us. Its gravity causes the tides of
the oceans. The first people to walk on it were two American astronauts, in July 1969."""
text_ids = model.tokenizer.encode(TEXT)


def perplexity():
    logits = to_numpy(model.step([text_ids], model.new_cache(1, 128), logits="all"))[0]
    logits = logits - logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(np.exp(-log_p[np.arange(len(text_ids) - 1), text_ids[1:]].mean()))


def gated(activation):
    """Return a function in place of `swiglu`, for packed rows [gate | up]."""

    def swiglu(x):
        gate, up = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        return activation(gate) * up

    return swiglu


activations = {
    "silu": lambda g: g / (1 + np.exp(-g)),
    "hard swish": lambda g: g * np.clip(g / 6 + 0.5, 0, 1),
    "gelu": lambda g: g / (1 + np.exp(-1.702 * g)),
    "relu": lambda g: np.maximum(g, 0),
}
results = {"engine": perplexity()}
for name, activation in activations.items():
    with kernels.override("swiglu", gated(activation)):
        results[name] = perplexity()
for name, value in results.items():
    print(f"{name:12} perplexity {value:10.1f}")
assert abs(results["silu"] / results["engine"] - 1) < 1e-3
assert results["engine"] < results["relu"]

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.bar(list(results), list(results.values()), color=["0.5"] + ["#1f5fbf"] * len(activations))
axis.set_yscale("log")
axis.set_ylabel("perplexity")
figure.savefig("activations.png", dpi=80)

# %% [markdown]
# The same for attention: let each token see only its last `window` keys.


# %%
def windowed(window):
    def attention_prefill(q, k, v, **options):
        return kernels.attention_prefill(q, k, v, **(options | {"window": window}))

    return attention_prefill


windows = [4, 8, 16, 64, 128]
by_window = []
for window in windows:
    with kernels.override("attention_prefill", windowed(window)):
        by_window.append(perplexity())
    print(f"window {window:4}: perplexity {by_window[-1]:8.1f}")
assert abs(by_window[-1] / results["engine"] - 1) < 1e-3  # the window holds the whole text

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(windows, by_window, "o-", color="#1f5fbf", label="the last keys only")
axis.axhline(results["engine"], color="0.5", ls=":", label="all keys")
axis.set_xscale("log", base=2)
axis.set_yscale("log")
axis.set_xticks(windows, windows)
axis.set_xlabel("keys a token sees")
axis.set_ylabel("perplexity")
axis.legend(frameon=False)
figure.savefig("windows.png", dpi=80)

# %% [markdown]
# ## When it does not fit
#
# A function that returns something else than the op does is stopped at its first call.

# %%
try:
    with kernels.override("swiglu", lambda x: x):
        next_logits()
except errors.EngineError as error:
    print(f"{type(error).__name__}: {error}")
else:
    raise AssertionError("a wrong result was accepted")

# %% [markdown]
# ## Exercises
#
# 1. Windows hurt because the first token leaves them, on which heads park their attention. Let each
#    token see it as well: attention over the window and over key 0, joined with `merge_states`
#    (chapter 2).
# 2. Override `sample` with `lambda logits: logits.argmax(axis=1)`. Which of `SamplingParams` still
#    matter?
# 3. Which norms matter? Replace a single one of the 61 by `x * weight` and plot the perplexity over
#    its index.
#
# **Next:** [8. Experts](08_experts.py): many MLPs per layer, of which each token uses a few.
