# %% [markdown]
# # Many tasks, one engine
#
# Install, in a checkout of the engine: `pip install .`
#
# A web server, a bot or an agent handles many concurrent requests, each in its own asyncio task.
# `AsyncEngine` batches them: the engine runs in a background thread, and each step computes a token
# for every request.

# %%
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from engine import AsyncEngine, SamplingParams
from engine.sampling_params import RequestOutputKind

engine = AsyncEngine.from_name("smollm2", max_num_seqs=8)

# %% [markdown]
# ## One request
#
# `generate` is an async generator. With `DELTA` each output carries only the new tokens.

# %%
params = SamplingParams(temperature=0.0, max_tokens=16, output_kind=RequestOutputKind.DELTA)


async def answer(prompt):
    """Return the continuation of a prompt, and the seconds to its first and last token."""
    start, text, first = time.perf_counter(), "", None
    async for output in engine.generate(prompt, params):
        first = first or time.perf_counter() - start
        text += output.outputs[0].text
    return text, first, time.perf_counter() - start


# %% [markdown]
# ## Several, and one that stops early
#
# Leaving the loop early closes the generator, which aborts the request before the next step and
# frees its batch slot and KV cache pages.

# %%
PROMPTS = ["The capital of France is", "Water boils at", "Seven times eight is"]


async def first_words(prompt):
    """Read a few tokens, then stop."""
    outputs = engine.generate(prompt, params)
    words = [(await anext(outputs)).outputs[0].text for _ in range(3)]
    await outputs.aclose()
    return "".join(words)


# %% [markdown]
# ## All at once
#
# The first tokens arrive together, since a single step computes all prompts. The request that
# stopped early cost only three tokens.


# %%
async def main():
    answers = await asyncio.gather(*map(answer, PROMPTS), first_words("Once upon a time"))
    stats = await engine.stats()
    await engine.close()
    return answers, stats


# %% [markdown]
# A notebook already runs an event loop, in which `await main()` is enough and `asyncio.run` is an
# error; a script needs `asyncio.run(main())`. A thread with a loop of its own works in both.

# %%
with ThreadPoolExecutor(1) as pool:
    (*answers, cut), stats = pool.submit(asyncio.run, main()).result()

for prompt, (text, first, last) in zip(PROMPTS, answers, strict=True):
    print(f"{prompt}{text!r}  first token after {first:.2f} s, all after {last:.2f} s")
print(f"given up after {cut!r}")
print(f"{stats.generation_tokens} tokens")
assert stats.generation_tokens < 4 * params.max_tokens  # the one that was given up did not go on
