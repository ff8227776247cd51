# %% [markdown]
# # 4. The KV cache by hand
#
# Install, in a checkout of the engine: `pip install '.[examples]'`
#
# Every token's keys and values are kept until its sequence ends. Nobody knows beforehand how long
# that sequence will be, so the engine does what an operating system does with memory: it cuts the
# cache into *blocks* of 16 tokens, and each sequence has a *block table*, the list of its blocks in
# order. We fill such a cache ourselves, share blocks between sequences, break it, and mend it.

# %%
import matplotlib.pyplot as plt
import numpy as np

import engine
from engine import LLM, SamplingParams, kernels
from engine.device import to_numpy

model = engine.load("smollm2", dtype="float32")
xp = model.device.xp  # numpy, or cupy on a GPU

# %% [markdown]
# ## A pool of blocks
#
# One layer's pool: for keys and for values an array (blocks, KV heads, tokens per block, head
# size). Token `offset` of block `block` lives in *slot* `block * 16 + offset`. NaN marks what was
# never written: if an op read it, we would see it.

# %%
P, K, H, D = 16, 2, 4, 32  # blocks; key heads, query heads, head size
BLOCK = 16  # tokens per block
k_pages = xp.full((P, K, BLOCK, D), np.nan, "float32")
v_pages = k_pages.copy()


def slots_of(table, first, last):
    """Return the slots of tokens `first` to `last` - 1 of a sequence with this block table."""
    tokens = np.arange(first, last)
    return np.array(table)[tokens // BLOCK] * BLOCK + tokens % BLOCK


print(slots_of([5, 2, 11], 14, 34))

# %% [markdown]
# A sequence A of 40 tokens needs three blocks; any three will do. `kv_store` writes each token's
# key and value to its slot. (In a model they come from the projections of chapter 2, here from a
# random generator.)

# %%
rng = np.random.default_rng(0)


def new_tokens(count):
    """Return random keys and values of `count` tokens, (count, K, D) each."""
    k, v = rng.standard_normal((2, count, K, D), "float32")
    return xp.asarray(k), xp.asarray(v)


def store(k, v, table, first):
    """Store tokens `first`, `first` + 1, ... of the sequence that has this block table."""
    slots = xp.asarray(slots_of(table, first, first + len(k)))
    kernels.kv_store(k, v, k_pages, v_pages, slots)


a_k, a_v = new_tokens(40)
a_table = [5, 2, 11]
store(a_k, a_v, a_table, 0)
assert (k_pages[2, :, 3] == a_k[19]).all()  # token 19 is token 3 of the second block, block 2

# %% [markdown]
# ## Attention through a table
#
# `attention_decode` gets a query of the newest token, the pool, the tables and the lengths. It must
# return what a dense softmax over 40 contiguous keys returns.

# %%
query = xp.asarray(rng.standard_normal((H, D), "float32"))


def paged(table, length):
    """Attention of `query` over a sequence in the pool, (H, D)."""
    return kernels.attention_decode(
        query[None, None],  # one sequence, one new token
        k_pages,
        v_pages,
        block_tables=xp.asarray([table], "int32"),
        context_lens=xp.asarray([length], "int32"),
    )[0, 0]


def dense(k, v):
    """The same over contiguous keys and values (T, K, D), in NumPy."""
    q, k, v = to_numpy(query), to_numpy(k), to_numpy(v)
    k, v = np.repeat(k, H // K, axis=1), np.repeat(v, H // K, axis=1)
    weights = np.exp(np.einsum("hd,thd->ht", q, k) / np.sqrt(D))
    return np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), v)


def check(table, k, v):
    np.testing.assert_allclose(to_numpy(paged(table, len(k))), dense(k, v), rtol=1e-4, atol=1e-5)


check(a_table, a_k, a_v)
print("through the table", a_table, "the result is that of a dense softmax")

# %% [markdown]
# The 8 unwritten slots at the end of block 11 hold NaN and were not read. A wrong table is not
# caught by any check: it returns a wrong answer.

# %%
wrong = to_numpy(paged([2, 5, 11], 40))
print("blocks in another order, same keys:", np.allclose(wrong, dense(a_k, a_v), atol=1e-5))
wrong = to_numpy(paged([5, 2, 3], 40))
print("a block that was never written:", wrong[0, :3])
assert np.isnan(wrong).any()

# %% [markdown]
# Surprised by the first line? The softmax is a sum over a set of keys, so their order does not
# matter. In a model it does matter, because RoPE has rotated each key by its position before it is
# stored.
#
# ## What paging saves
#
# Without blocks, each sequence would reserve room for the longest text it may become. Take 200
# requests with the lengths below, of at most 2,048 tokens.

# %%
lengths = np.clip(rng.lognormal(5.3, 0.9, 200), 10, 2048).astype(int)
reserved = 2048 * len(lengths)
blocks = -(-lengths // BLOCK)
print(f"used {lengths.sum()}, reserved in blocks {blocks.sum() * BLOCK}, in full {reserved} tokens")
unused = blocks * BLOCK - lengths
assert unused.max() < BLOCK  # only the last block of a sequence has unused slots

# %%
sizes = 2 ** np.arange(2, 12)
waste = [1 - lengths.sum() / (-(-lengths // size) * size).sum() for size in sizes]
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(sizes, waste, "o-", color="#1f5fbf")
axis.set_xscale("log", base=2)
axis.set_xticks(sizes, sizes)
axis.set_xlabel("tokens per block (2048: no paging)")
axis.set_ylabel("share of memory unused")
axis.set_ylim(0, 1)
figure.savefig("paging_saves.png", dpi=80)

# %% [markdown]
# ## Sharing a prefix
#
# B begins with the same 32 tokens as A (the same system prompt, say). Keys and values of a token
# depend only on the tokens before it, so B's table simply names A's first two blocks. A count of
# owners per block says when it may be reused.

# %%
owners = np.zeros(P, int)
owners[a_table] += 1

b_table = [*a_table[:2], 7]
owners[b_table] += 1
own_k, own_v = new_tokens(10)
store(own_k, own_v, b_table, 32)
b_k, b_v = (xp.concatenate([a[:32], own]) for a, own in ((a_k, own_k), (a_v, own_v)))
check(a_table, a_k, a_v)
check(b_table, b_k, b_v)
print("owners:", {block: int(n) for block, n in enumerate(owners) if n})


# %% [markdown]
# A map of the pool: a row per block, a column per slot.


# %%
def draw(axis, sequences, title):
    """Colour the slots in use by their sequence; slots in use by several are grey."""
    image = np.ones((P, BLOCK, 3))
    colours = dict(zip(sequences, plt.get_cmap("Set2").colors, strict=False))
    users = np.zeros(P * BLOCK, int)
    for name, (table, length) in sequences.items():
        slots = slots_of(table, 0, length)
        users[slots] += 1
        image.reshape(-1, 3)[slots] = colours[name]
    image.reshape(-1, 3)[users > 1] = 0.45
    axis.imshow(image, aspect="auto")
    axis.set_yticks(range(P))
    axis.set_ylabel("block")
    axis.set_xlabel("token of the block")
    axis.set_title(title)
    for name, (table, length) in sequences.items():
        axis.text((length - 1) % BLOCK, table[-1], name, ha="center", va="center", weight="bold")


figure, axis = plt.subplots(figsize=(5, 4.6), layout="constrained")
draw(axis, {"A": (a_table, 40), "B": (b_table, 42)}, "grey: shared by A and B")
figure.savefig("pool.png", dpi=80)

# %% [markdown]
# ## Copy on write
#
# C is a second continuation of A (`n=2`, or a beam). It shares all of A's blocks, the half-full
# last one too. Now both generate their own token 40, and both tables say: block 11, offset 8.

# %%
c_table = list(a_table)
owners[c_table] += 1
a_new, c_new = new_tokens(1), new_tokens(1)
a_k, c_k = xp.concatenate([a_k, a_new[0]]), xp.concatenate([a_k, c_new[0]])
a_v, c_v = xp.concatenate([a_v, a_new[1]]), xp.concatenate([a_v, c_new[1]])

store(*a_new, a_table, 40)
check(a_table, a_k, a_v)
store(*c_new, c_table, 40)
damage = float(abs(to_numpy(paged(a_table, 41)) - dense(a_k, a_v)).max())
print(f"A's result is now wrong by {damage:.2f}")
assert damage > 1e-2

# %% [markdown]
# So before a sequence writes to a block with other owners, it copies the block and puts the copy in
# its own table. `kv_copy` copies blocks, in all layers at once if the array has them.

# %%
assert owners[c_table[-1]] > 1
copy = int(np.flatnonzero(owners == 0)[0])
pairs = xp.asarray([[c_table[-1], copy]], "int32")  # (from, to)
kernels.kv_copy(k_pages, pairs)
kernels.kv_copy(v_pages, pairs)
owners[c_table[-1]] -= 1
owners[copy] += 1
c_table[-1] = copy

store(*a_new, a_table, 40)  # mends A
store(*c_new, c_table, 40)
check(a_table, a_k, a_v)
check(b_table, b_k, b_v)
check(c_table, c_k, c_v)
print(f"A {a_table}, B {b_table}, C {c_table}: all right")

# %%
figure, axis = plt.subplots(figsize=(5, 4.6), layout="constrained")
draw(axis, {"A": (a_table, 41), "B": (b_table, 42), "C": (c_table, 41)}, "C has its own last block")
figure.savefig("copy_on_write.png", dpi=80)

# %% [markdown]
# ## The same in a model
#
# The cache of `model.step` consists of such pools, one for each layer. If tables are all that
# counts, we may shuffle the blocks of all layers under the model's feet, as long as the table says
# where they went: the next logits must have the same bits.

# %%
ids = model.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 6)
cache = model.new_cache(batch_size=1, max_tokens=128)
model.step([ids], cache)
print(len(cache.pages), "layers, table", cache.block_tables[0], "for", cache.lengths, "tokens")
expected = model.step([[42]], cache)

cache.truncate(len(ids))
order = rng.permutation(cache.block_tables.size)
for pages in (pages for layer in cache.pages for pages in layer):
    pages[:] = pages[xp.asarray(order)]  # block i now holds what order[i] held
cache.block_tables[0] = np.argsort(order)
print("shuffled, table", cache.block_tables[0])
shuffled = model.step([[42]], cache)
assert (shuffled == expected).all()

# %% [markdown]
# ## The same in the engine
#
# The engine does all of this for every request: it finds the longest prefix whose blocks it still
# has (a radix tree from tokens to blocks), counts owners, copies on write, and evicts blocks that
# nobody owns when it needs room ([memory](../docs/memory.md)).

# %%
llm = LLM("smollm2", dtype="float32", max_model_len=256)
rules = "You are a helpful assistant. Answer in one short sentence, and be polite to everybody. "
params = SamplingParams(temperature=0.0, max_tokens=8)
for question in ("What is a cat?", "What is a dog?"):
    [output] = llm.generate(rules + question, params)
    length = len(output.prompt_token_ids)
    print(f"{output.num_cached_tokens} of {length} prompt tokens were in the cache")
assert output.num_cached_tokens == len(llm.tokenizer.encode(rules)) // 16 * 16

# %% [markdown]
# Only whole blocks are found again: the count is a multiple of 16.
#
# ## Exercises
#
# 1. End sequence A: lower its counts, and list the blocks that become free. Why not all three?
# 2. Pass `window=20` to `attention_decode`. From when on could the engine free A's first block?
# 3. Store the pages as 8-bit codes (`k_scale`, `v_scale`, dtype `int8`). How far is the result from
#    the dense one, and how many tokens fit into the same memory?
#
# **Next:** [5. Write a kernel](05_write_a_kernel.py): CUDA of your own, with a reference in NumPy.
