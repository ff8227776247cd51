# %% [markdown]
# # 9. Speculative decoding
#
# Install, in a checkout of the engine: `pip install '.[examples]'`
#
# Decoding a single request reads all weights to produce one token. With the next tokens guessed
# (drafted), one step can verify all of them at little more than the cost of one token. An answer
# that repeats much of the prompt, such as an edited text, is easy to draft: look up the last few
# tokens earlier in the text, and propose the tokens that followed them there.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np

import engine

model = engine.load("smollm2", dtype="float32", max_model_len=512)
letter = """Dear Ms. Meyer,

thank you for your letter of the fourth of May. We are sory that the lamp that you ordered arrived
with a broken shade."""
task = f"Correct the spelling of this letter, and reply with the whole letter:\n\n{letter}"
ids = model.tokenizer.encode_chat([{"role": "user", "content": task}], add_generation_prompt=True)

# %% [markdown]
# ## Verifying drafts, by hand
#
# `step` with `logits="all"` returns the model's choice after every token. Given drafts, one such
# call tells which of them the model would have chosen itself; the first wrong one ends the run, and
# the model's own choice takes its place. One call, several tokens.

# %%
cache = model.new_cache(batch_size=1, max_tokens=64)
prompt = model.tokenizer.encode("1, 2, 3, 4, 5,")
first = int(model.step([prompt], cache)[0].argmax())
drafts = model.tokenizer.encode("6, 7, 8, 10")  # a guess at what comes next
choices = model.step([[first, *drafts]], cache, logits="all")[0].argmax(-1).tolist()
num_right = 0
while num_right < len(drafts) and drafts[num_right] == choices[num_right]:
    num_right += 1
cache.truncate(len(prompt) + 1 + num_right)  # forget the wrong ones
tokens = [first, *drafts[:num_right], choices[num_right]]
print(f"{num_right} of {len(drafts)} drafts right:", repr(model.tokenizer.decode(tokens)))

one_by_one = model.new_cache(batch_size=1, max_tokens=64)
logits = model.step([prompt], one_by_one)
for token in tokens:  # the same tokens as without drafts
    assert int(logits[0].argmax()) == token
    logits = model.step([[token]], one_by_one)

# %% [markdown]
# ## One answer, with and without drafts
#
# `step` returns a request's tokens so far; a step with accepted drafts adds several. The clock
# starts at the first token, because drafts do not change prefill.


# %%
def answer(config, max_tokens=32):
    """Return the answer's ids, its tokens per step and per second, and its draft counts."""
    options = {"max_num_seqs": 1, "num_blocks": 32, "speculative_config": config}
    with engine.LLMEngine(model, **options) as llm:
        llm.add_request("r", ids, engine.SamplingParams(temperature=0, max_tokens=max_tokens))
        counts, times = [], []
        while llm.has_unfinished_requests():
            for output in llm.step():
                token_ids = list(output.outputs[0].token_ids)
                counts.append(len(token_ids))
                times.append(time.perf_counter())
        gained = np.diff(counts)
        return token_ids, gained, gained.sum() / (times[-1] - times[0]), llm.stats().speculation


plain, _, plain_rate, _ = answer(None)
print(model.tokenizer.decode(plain))
print(f"\n{plain_rate:.1f} tokens/s")

# %% [markdown]
# Drafts change the speed, never the text: a draft is accepted only if the model picks the same
# token.

# %%
config = {"method": "ngram", "prompt_lookup_min": 2, "num_speculative_tokens": 8}
drafted, gained, rate, counts = answer(config | {"adaptive": False})
assert drafted == plain
print("tokens of each step:", *gained)
share, number = counts.acceptance_rate, counts.num_draft_tokens
print(f"{rate:.1f} tokens/s; {share:.0%} of {number} drafts accepted")
assert counts.num_accepted_tokens > len(plain) / 2

# %% [markdown]
# ## How many drafts?
#
# A draft is accepted only if all drafts before it are, so later drafts are accepted less often, yet
# each costs time. The best number depends on the text and the machine. By default (`adaptive`), the
# engine picks the number before each step that maximises expected tokens per measured step time.

# %%
numbers = [1, 4, 12]
rates = []
for number in numbers:
    options = config | {"num_speculative_tokens": number, "adaptive": False}
    drafted, _, rate, counts = answer(options)
    assert drafted == plain
    rates.append(rate)
    print(f"{number:2} drafts at most: {counts.acceptance_rate:.0%} accepted, {rate:.1f} tokens/s")
per_position = np.array(counts.num_draft_tokens_per_pos)
acceptance = np.array(counts.num_accepted_tokens_per_pos) / np.maximum(per_position, 1)

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
positions = 1 + np.arange(len(acceptance))
axes[0].bar(positions, acceptance, color="#1f5fbf")
axes[0].set_title("how often a draft is accepted")
axes[0].set_xlabel("its distance from the last known token")
axes[0].set_ylim(0, 1)
axes[1].plot(numbers, rates, "o-", color="#1f5fbf", label="with drafts")
axes[1].axhline(plain_rate, color="0.5", linestyle=":", label="plain")
axes[1].set_title("tokens per second")
axes[1].set_xlabel("maximum number of drafts")
axes[1].set_ylim(0)
axes[1].legend(frameon=False)
figure.savefig("speculation.png", dpi=80)

# %% [markdown]
# ## Your own proposer
#
# Any callable will do: it receives the tokens so far and the maximum number of drafts. A wrong
# draft costs only time. This proposer knows the answer, so every draft is accepted.


# %%
def oracle(token_ids, num_tokens):
    """Return the next tokens of the answer."""
    start = len(token_ids) - len(ids)
    return plain[start : start + num_tokens]


drafted, gained, rate, counts = answer(oracle)
assert drafted == plain
print("tokens of each step:", *gained)
model.close()

# %% [markdown]
# ## Exercises
#
# 1. Ask for a poem instead of a correction. How many drafts are accepted now?
# 2. Write a proposer that drafts the most frequent follower of the last token in the text so far.
#    Compare its tokens per step with those of `"ngram"`.
# 3. Sample with `temperature=1`. Which test replaces "the model picks the same token", so that the
#    distribution stays exact? ([Speculative decoding](../docs/speculative.md) has the answer.)
#
# This was the last chapter. The [guided tour of the CUDA sources](../docs/kernels.md) leads on, and
# [one step through the engine](../docs/engine.md).
