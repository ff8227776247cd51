# %% [markdown]
# # Many tasks, one engine
#
# A web server, a bot or an agent handles many requests at the same time, each in its own asyncio
# task. `AsyncEngine` serves them together: the engine runs in a thread, and each of its steps
# computes a token for every request.

# %%
import asyncio
import time

from engine import AsyncEngine, SamplingParams
from engine.sampling_params import RequestOutputKind

engine = AsyncEngine.from_name("smollm2", device="cpu", max_num_seqs=8)

# %% [markdown]
# ## One request
#
# `generate` is an async generator. With `DELTA` each output carries only the new tokens.

# %%
params = SamplingParams(temperature=0.0, max_tokens=16, output_kind=RequestOutputKind.DELTA)


async def answer(prompt):
    """Return the continuation of a prompt and the seconds until its first and its last token."""
    start, text, first = time.perf_counter(), "", None
    async for output in engine.generate(prompt, params):
        first = first or time.perf_counter() - start
        text += output.outputs[0].text
    return text, first, time.perf_counter() - start


# %% [markdown]
# ## Several, and one that stops early
#
# Leaving the loop early closes the generator, which aborts the request before the next step and
# frees its place in the batch and its pages.

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
# The first tokens arrive together, since one step computes all prompts. The request that stopped
# early has cost three tokens.


# %%
async def main():
    *answers, cut = await asyncio.gather(*map(answer, PROMPTS), first_words("Once upon a time"))
    for prompt, (text, first, last) in zip(PROMPTS, answers, strict=True):
        print(f"{prompt}{text!r}  first token after {first:.2f} s, all after {last:.2f} s")
    print(f"given up after {cut!r}")
    stats = await engine.stats()
    print(f"{stats.generation_tokens} tokens")
    await engine.close()


asyncio.run(main())
