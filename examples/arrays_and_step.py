# %% [markdown]
# # Arrays in, arrays out
#
# `engine.load` returns a model that is a function on arrays: token ids go in, logits come out, and
# a KV cache holds the tokens so far. Sampling, batching and serving are all built on this function.

# %%
import numpy as np

import engine

model = engine.load("smollm2", device="cpu", dtype="float32")
print(model)

# %% [markdown]
# A prompt is an array of ids, shape (B, T). One `step` computes the logits of the next token.

# %%
ids = np.array([model.tokenizer.encode("The capital of France is")])
cache = model.new_cache(batch_size=1, max_tokens=64)
logits = model.step(ids, cache)  # (B, V) float32
print(ids.shape, "->", logits.shape, logits.dtype)

best = np.argsort(logits[0])[::-1][:5]
probabilities = np.exp(logits[0] - logits[0].max())
probabilities /= probabilities.sum()
for token in best:
    print(f"{probabilities[token]:6.3f}  {model.tokenizer.decode([int(token)])!r}")

# %% [markdown]
# Greedy decoding is a one-line loop that feeds the most probable token back in. The cache holds the
# prompt, so each further step computes only one token.

# %%
answer = []
for _ in range(12):
    token = int(logits[0].argmax())
    answer.append(token)
    logits = model.step(np.array([[token]]), cache)
print(model.tokenizer.decode(answer))
print("tokens in the cache:", cache.lengths)

# %% [markdown]
# `logits="all"` returns the logits at every position, which give the probability of each token in a
# sentence. A low probability marks a surprising word.

# %%
sentence = "The cat sat on the mat and played the violin."
ids = np.array([model.tokenizer.encode(sentence)])
logits = model.step(ids, model.new_cache(1, 64), logits="all")  # (B, T, V)
log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
for position in range(1, ids.shape[1]):
    token = int(ids[0, position])
    surprise = -log_probabilities[0, position - 1, token] / np.log(2)
    print(f"{surprise:6.2f} bits  {model.tokenizer.decode([token])!r}")

# %% [markdown]
# A cache can be truncated, so trying several continuations of one prompt is cheap.

# %%
cache = model.new_cache(batch_size=1, max_tokens=64)
prompt = np.array([model.tokenizer.encode("My favourite animal is")])
model.step(prompt, cache)
for word in (" cat", " submarine"):
    ids = np.array([model.tokenizer.encode(word)])
    logits = model.step(ids, cache)
    following = int(logits[0].argmax())
    print(repr(word), "->", repr(model.tokenizer.decode([following])))
    cache.truncate(prompt.shape[1])
