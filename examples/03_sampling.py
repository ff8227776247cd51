# %% [markdown]
# # 3. Sampling
#
# Install, in a checkout of the engine: `pip install '.[examples]'`
#
# A model returns one score per word. Which word comes next is then a matter of taste and chance:
# temperature, top-k, top-p, min-p, penalties, and a random draw. Here each of them is a few lines
# of NumPy, checked against the op that the engine runs.

# %%
import matplotlib.pyplot as plt
import numpy as np

import engine
from engine import LLM, SamplingParams, kernels
from engine.device import to_numpy

model = engine.load("smollm2", dtype="float32")
xp = model.device.xp  # numpy, or cupy on a GPU
tokenizer = model.tokenizer


def next_logits(prompt):
    """Return the logits of the token after `prompt`, (V,)."""
    return model.step([tokenizer.encode(prompt)], model.new_cache(1, 64))[0]


certain = next_logits("The capital of France is")
open_ended = next_logits("My favourite food is")
for logits in (certain, open_ended):
    best = to_numpy(logits).argsort()[::-1][:6]
    print([tokenizer.decode([int(i)]) for i in best])

# %% [markdown]
# ## Temperature
#
# Logits are divided by the temperature before the softmax. Below 1, likely words gain; above 1,
# unlikely ones do. The entropy tells how many bits the choice is worth: 0 if one word is certain,
# 15.6 if all 49,152 words were equally likely.


# %%
def softmax(logits, temperature=1.0):
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return weights / weights.sum(-1, keepdims=True)


def entropy(p):
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


host = to_numpy(open_ended)
best = host.argsort()[::-1][:12]
words = [tokenizer.decode([int(i)]) for i in best]
temperatures = (0.5, 1.0, 2.0)
entropies = [entropy(softmax(host, t)) for t in temperatures]
assert entropies == sorted(entropies)

# %%
figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
for index, (temperature, bits) in enumerate(zip(temperatures, entropies, strict=True)):
    p = softmax(host, temperature)[best]
    label = f"temperature {temperature}: {bits:.1f} bits"
    axis.bar(np.arange(12) + 0.27 * (index - 1), p, 0.27, label=label)
axis.set_xticks(range(12), words, rotation=45)
axis.set_ylabel("probability")
axis.set_title("My favourite food is ...")
axis.legend(frameon=False)
figure.savefig("temperature.png", dpi=80)

# %% [markdown]
# ## A draw without a sum
#
# To draw from a softmax one would sum up probabilities until they exceed a random number. The
# engine does something that suits a GPU better: add -log(-log(u)) to each logit, with an
# independent random u in (0, 1) for each, and take the largest (the *Gumbel-max trick*). No sum, no
# sort, and the result has the softmax's probabilities. We check it by drawing 40,000 times.

# %%
few = host[best]
rng = np.random.default_rng(0)
noise = -np.log(-np.log(rng.random((40_000, len(few)))))
drawn = (few + noise).argmax(-1)
by_hand = np.bincount(drawn, minlength=len(few)) / len(drawn)


def sample(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0, positions=0):
    """Call `kernels.sample` with the same parameters for each row of `logits` (B, V)."""
    rows = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    options = {name: xp.full(len(logits), value, "float32") for name, value in rows.items()}
    options["top_k"] = xp.full(len(logits), top_k, "int32")
    options["seeds"] = xp.zeros(len(logits), "uint64") + xp.asarray(seeds, "uint64")
    options["positions"] = xp.zeros(len(logits), "int64") + xp.asarray(positions, "int64")
    return kernels.sample(logits, **options)


rows = xp.asarray(np.tile(few, (40_000, 1)))
by_op = sample(rows, seeds=1, positions=np.arange(40_000)).token_ids
by_op = np.bincount(to_numpy(by_op), minlength=len(few)) / len(rows)
for frequencies in (by_hand, by_op):  # half the sum of differences: the total variation distance
    assert abs(frequencies - softmax(few)).sum() / 2 < 0.02

# %%
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
for shift, heights, label in (
    *((-0.27, softmax(few), "softmax"), (0, by_hand, "drawn by hand")),
    (0.27, by_op, "drawn by kernels.sample"),
):
    axis.bar(np.arange(12) + shift, heights, 0.27, label=label)
axis.set_xticks(range(12), words, rotation=45)
axis.legend(frameon=False)
figure.savefig("draws.png", dpi=80)

# %% [markdown]
# The random numbers are not a stream: u depends on (seed, position, token id) only. So a request
# draws the same tokens alone, in a batch, after a restart, or on another GPU.

# %%
twelve = xp.asarray(np.tile(few, (12, 1)))
in_a_batch = sample(twelve, seeds=7, positions=np.arange(12)).token_ids
alone = [int(sample(twelve[:1], seeds=7, positions=t).token_ids[0]) for t in range(12)]
assert to_numpy(in_a_batch).tolist() == alone
print("seed 7 draws", [words[i] for i in alone[:6]])

# %% [markdown]
# ## Which words take part
#
# With 49,152 candidates, thousands of absurd ones together have a chance. Three filters cut this
# tail: *top-k* keeps the k best; *top-p* the fewest that together reach probability p; *min-p*
# those at least min_p times as likely as the best. The first ignores how certain the model is, the
# others adapt.


# %%
def kept_by_hand(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Return the number of candidates."""
    p = np.sort(softmax(logits.astype(np.float64)))[::-1]
    p = p[p >= min_p * p[0]]
    p = p[: top_k or len(p)]
    before = np.cumsum(p / p.sum()) - p / p.sum()  # mass of all better candidates
    return int((before < top_p).sum())


filters = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}]
counts = []
for options in filters:
    counts.append([])
    for logits in (certain, open_ended):
        kept = int(sample(logits[None], **options).num_kept[0])
        assert kept == kept_by_hand(to_numpy(logits), **options)
        counts[-1].append(kept)
    print(f"{options}: {counts[-1][0]} candidates for the capital, {counts[-1][1]} for the food")

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
places = np.arange(len(filters))
for index, label in enumerate(("The capital of France is", "My favourite food is")):
    axis.bar(places + 0.4 * index - 0.2, np.array(counts)[:, index], 0.4, label=label)
axis.set_xticks(places, [", ".join(f"{k}={v}" for k, v in one.items()) for one in filters])
axis.set_yscale("log")
axis.set_ylabel("candidates")
axis.legend(frameon=False)
figure.savefig("filters.png", dpi=80)

# %% [markdown]
# ## In the engine
#
# `SamplingParams` has all of this per request, and requests with different parameters share a
# batch.

# %%
llm = LLM("smollm2", dtype="float32", max_model_len=256)
greedy = SamplingParams(temperature=0.0, max_tokens=40)
no_loop = SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.3)
drawn = SamplingParams(temperature=0.8, min_p=0.05, seed=1, max_tokens=40)
prompts = ["I like to eat"] * 4
outputs = llm.generate(prompts, [greedy, no_loop, drawn, drawn])
texts = [output.outputs[0].text for output in outputs]
for name, text in zip(("greedy", "penalty", "drawn", "the same seed"), texts, strict=True):
    print(f"{name}: {text!r}")
assert texts[2] == texts[3]
assert texts[0].count("not sure what to do") > 1  # greedy text runs into a loop
assert texts[1].count("not sure what to do") <= 1

# %% [markdown]
# `logprobs` reports how likely each chosen token was: the log of the softmax we computed above.

# %%
params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)
[output] = llm.generate("My favourite food is", params)
[by_id] = output.outputs[0].logprobs
for token, entry in by_id.items():
    expected = np.log(softmax(host)[token])
    print(f"{entry.decoded_token!r}: {entry.logprob:.3f}, by hand {expected:.3f}")
    assert abs(entry.logprob - expected) < 0.2

# %% [markdown]
# ## Your own rule
#
# A logits processor sees the tokens so far and may change the logits. This one forbids all tokens
# with an "e", the most frequent letter of English.

# %%
has_e = ["e" in tokenizer.decode([i]).lower() for i in range(model.config.vocab_size)]
banned = xp.asarray(np.flatnonzero(has_e))


def without_e(output_token_ids, logits):
    logits[banned] = -np.inf


params = SamplingParams(temperature=0.7, seed=1, max_tokens=30, logits_processors=[without_e])
[output] = llm.generate("My favourite day", params)
print(output.outputs[0].text)
assert "e" not in output.outputs[0].text.lower()

# %% [markdown]
# A rule that depends on what has been written, such as a JSON schema, needs a grammar: see
# [structured output](structured_output.py).
#
# ## Exercises
#
# 1. *Locally typical sampling* keeps the tokens whose surprise is close to the entropy. Write it as
#    a logits processor.
# 2. Draw 100 continuations of 3 tokens at temperatures 0.2, 0.7 and 1.5 (`n=16` returns 16 of one
#    request) and count how many are different.
# 3. Replace the Gumbel noise by normal noise. Do the frequencies still match?
#
# **Next:** [4. The KV cache by hand](04_paged_kv_by_hand.py): where the tokens so far are kept.
